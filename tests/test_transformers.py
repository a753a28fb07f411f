"""Hugging Face's models through `interop.transformers`: weighed by tokens, and loaded stage by stage."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

import fpipe
from fpipe import Placement, handlers, interop, schedules
from fpipe.interop.transformers import IGNORED, load, split, tokens
from tests.jobs import differences

SIZES = {"vocab_size": 31, "n_positions": 8, "n_embd": 16, "n_layer": 4, "n_head": 2, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CUTS = ["transformer.h.1", "transformer.h.3"]


def model(kind=GPT2LMHeadModel, **more):
    torch.manual_seed(0)
    return kind(GPT2Config(**{**SIZES, **more})).double()


def batch(rows):
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(31, (rows, 8), generator=generator)
    counted = torch.arange(8) < torch.randint(2, 9, (rows, 1), generator=generator)
    return {"input_ids": text, "labels": text.where(counted, IGNORED)}


@pytest.fixture(scope="module")
def gpt2():
    """(model, pipeline, params, batch)."""
    whole = model()
    return (whole, *split(whole, example=batch(2), at=CUTS), batch(6))


def test_every_token_weighs_the_same(gpt2):
    whole, pipeline, params, data = gpt2
    plan = pipeline.plan(Placement.loop(3), 3)
    step = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handlers.Local(), weight=tokens)
    loss, grads = step(params, data, data["labels"])
    expected = whole(**data).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)  # its own loss is in float32
    found = interop.to_state_dict(pipeline, grads)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-8)
        parameter.grad = None


@pytest.mark.parametrize("shard", ["10GB", "5kB"])
def test_each_rank_reads_its_own_tensors_alone(gpt2, tmp_path, monkeypatch, shard):
    whole, _, params, _ = gpt2
    whole.save_pretrained(tmp_path, max_shard_size=shard)
    with torch.device("meta"):
        blank = model()
    pipeline, _ = split(blank, example=batch(2), at=CUTS)
    plan = pipeline.plan(Placement.loop(3), 3)
    read = []

    class Counting:
        def __init__(self, *given, **options):
            self.file = safe_open(*given, **options).__enter__()

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr("safetensors.safe_open", Counting)
    for rank in range(3):
        read.clear()
        found, state = load(tmp_path, pipeline, plan.stages_on(rank))
        expected = pipeline.params_on(params, plan, rank)
        assert differences(found, expected) == []
        assert state == {}
        assert sorted(read) == sorted(name for tree in expected.values() for name in tree)
    single, _ = load(tmp_path, pipeline, [2], dtype=torch.float32)
    assert {x.dtype for tree in single.values() for x in tree.values()} == {torch.float32}


def test_a_base_models_files_do_for_a_model_with_a_head(gpt2, tmp_path):
    whole, pipeline, params, _ = gpt2
    whole.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in json.dumps(sorted(interop.to_state_dict(pipeline, params)))
    assert differences(load(tmp_path, pipeline)[0], params) == []


def test_a_folder_without_tensors_and_another_model_are_told(gpt2, tmp_path):
    _, pipeline, _, _ = gpt2
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        load(tmp_path, pipeline)
    model(n_embd=8).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match=r"is of shape \[31, 8\], and \[31, 16\] in the module"):
        load(tmp_path / "narrow", pipeline)
    model(GPT2Model, n_layer=2).save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match=r"lacks transformer\.h\.2"):
        load(tmp_path / "short", pipeline)
