"""Hugging Face's models through `interop.transformers`: weighed by tokens, and loaded stage by stage."""

import json
import warnings
from itertools import product

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    T5Config,
    T5ForConditionalGeneration,
)

import fpipe
from fpipe import Placement, handlers, interop, schedules
from fpipe.interop.transformers import IGNORED, load, split, tokens
from tests.support.combinations import thorough
from tests.support.jobs import differences

SIZES = {"vocab_size": 31, "n_positions": 8, "n_embd": 16, "n_layer": 3, "n_head": 2, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CUTS = ["transformer.h.1", "transformer.h.2"]


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


@thorough
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


@thorough
def test_each_rank_reads_its_own_tensors_alone(gpt2, tmp_path, monkeypatch):
    whole, _, params, _ = gpt2
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
    for shard in ("10GB", "5kB"):
        whole.save_pretrained(tmp_path / shard, max_shard_size=shard)
    for shard, rank in product(("10GB", "5kB"), range(3)):
        read.clear()
        loaded, state = load(tmp_path / shard, pipeline, plan.stages_on(rank))
        expected = pipeline.params_on(params, plan, rank)
        assert differences(loaded, expected) == []
        assert state == {}
        assert sorted(read) == sorted(name for tree in expected.values() for name in tree)
    single, _ = load(tmp_path / shard, pipeline, [2], dtype=torch.float32)
    assert {x.dtype for tree in single.values() for x in tree.values()} == {torch.float32}


@thorough
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


def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0))


@thorough
def test_a_part_of_a_model_takes_no_names_of_another_part(tmp_path):
    whole = t5()
    whole.save_pretrained(tmp_path)
    example = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    pipeline, params = split(whole.encoder, example=example, at=["block.1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = load(tmp_path, pipeline, [1])
    assert differences(found, {1: params[1]}) == []
    assert "block.1.layer.0.SelfAttention.k.weight" in found[1]  # as the decoder has one too


def test_one_front_is_taken_for_the_whole_model(gpt2, tmp_path):
    _, pipeline, params, _ = gpt2
    tensors = interop.to_state_dict(pipeline, params)
    names = [name for name in tensors if name != "lm_head.weight"]
    others = {f"{front}.{name}": torch.zeros_like(tensors[name]) for front in "abcdexyz" for name in names[:9]}
    save_file({**others, **{f"model.{name}": tensors[name] for name in names}}, tmp_path / "model.safetensors")
    assert differences(load(tmp_path, pipeline)[0], params) == []


def test_names_that_fit_in_several_ways_are_refused(gpt2, tmp_path):
    _, pipeline, params, _ = gpt2
    tensors = interop.to_state_dict(pipeline, params)
    names = [name for name in tensors if name != "lm_head.weight"]
    twice = {f"{front}.{name}": tensors[name].clone() for front in ("student", "teacher") for name in names}
    save_file(twice, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"its names with 'student\.' in front, or with 'teacher\.' in front: split"):
        load(tmp_path, pipeline)


@thorough
def test_layers_that_the_model_lacks_are_a_warning(gpt2, tmp_path):
    whole, pipeline, params, _ = gpt2
    model(n_layer=5).save_pretrained(tmp_path / "long")
    with pytest.warns(UserWarning, match=r"no place for: transformer\.h\.3\.attn\.c_attn\.bias, .* and 21 more; is it"):
        load(tmp_path / "long", pipeline)
    whole.save_pretrained(tmp_path / "head")
    base, _ = split(whole.transformer, example={"input_ids": batch(2)["input_ids"]}, at=["h.1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path / "head", pipeline)
        found, _ = load(tmp_path / "head", base)
    assert torch.equal(found[0]["wte.weight"], params[0]["transformer.wte.weight"])


def test_weighing_by_tokens_wants_the_labels_as_target(gpt2):
    _, pipeline, params, data = gpt2
    plan = pipeline.plan(Placement.loop(3), 3)
    step = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handlers.Local(), weight=tokens)
    with pytest.raises(fpipe.StageError, match="pass them as the step's target as well"):
        step(params, data)


def test_positions_are_no_parameters_and_other_ranks_stages_are_unknown(gpt2):
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(**sizes, intermediate_size=32, max_position_embeddings=64))
    text = torch.zeros(2, 8, dtype=torch.long)
    pipeline, _ = split(bert, example={"input_ids": text}, at=["bert.encoder.layer.0"])
    head, *rows = pipeline.describe().splitlines()
    assert head.split() == ["stage", "parameters", "bytes", "begins", "reads"]
    assert sum(int(row.split()[1].replace(",", "")) for row in rows[:2]) == sum(p.numel() for p in bert.parameters())
    _, pipeline, params, _ = gpt2
    head, *rows = pipeline.describe({1: params[1]}).splitlines()
    assert [row.split()[1:3] for row in rows[::2][:2]] == [["—", "—"]] * 2
    assert rows[1].split()[1] == f"{sum(x.numel() for x in params[1].values()):,}"
