"""Modules to split, with a batch, and names to cut them at: exported once in a process, for all cuts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import nn

import fpipe
from fpipe import Placement, interop, schedules
from fpipe.interop.splitting import split as splitting
from tests.support.cases import mse, nll
from tests.support.models import TiedGPT, UNet

ROWS, TOKENS, VOCABULARY = 4, 6, 11


@dataclass
class Case:
    """A module without dropout."""

    module: nn.Module
    batch: Any
    target: Any
    loss: Callable[..., Any]
    cuts: dict[int, list[Any]]
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self):
        """`example` and `kwargs` of a call."""
        if isinstance(self.batch, dict):
            return (), {**self.batch, **self.constants}
        return (self.batch,), {}


def unet():
    x, y = torch.randn(ROWS, 3, 8, 8), torch.randn(ROWS, 1, 8, 8)
    cuts = {2: ["ups.1"], 4: ["encoders.1", interop.End("encoders.1"), "ups.0"]}
    return Case(UNet(depth=2), x, y, mse, cuts)


def gpt():
    tokens = torch.randint(VOCABULARY, (2, ROWS, TOKENS))
    cuts = {2: ["layers.2"], 4: ["layers.1", "layers.2", "norm"]}
    return Case(TiedGPT(VOCABULARY, layers=3, context=TOKENS), tokens[0], tokens[1], nll, cuts)


def own_loss(output, target):
    return output["loss"]


def text(module, cuts, **constants):
    tokens = torch.randint(1, VOCABULARY, (2, ROWS, TOKENS))
    mask = torch.ones_like(tokens[0])
    mask[0, TOKENS - 2 :] = 0
    batch = {"input_ids": tokens[0], "attention_mask": mask, "labels": tokens[1]}
    return Case(module, batch, None, own_loss, cuts, constants)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    own = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=8, n_layer=2, n_head=2, **own)
    cuts = {2: ["transformer.h.1"], 4: ["transformer.h.0", "transformer.h.1", "transformer.ln_f"]}
    return text(GPT2LMHeadModel(config), cuts, use_cache=False)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    own = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, **own)
    cuts = {2: ["model.layers.1"], 4: ["model.layers.0", "model.layers.1", "model.norm"]}
    return text(LlamaForCausalLM(config), cuts, use_cache=False)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    own = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "max_position_embeddings": TOKENS}
    own |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, **own)
    cuts = {2: ["bert.encoder.layer.1"], 4: ["bert.encoder.layer.0", "bert.encoder.layer.1", "cls"]}
    return text(BertForMaskedLM(config), cuts)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    own = {"dropout_rate": 0, "relative_attention_num_buckets": 4, "decoder_start_token_id": 0, "num_heads": 2}
    config = T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=2, **own)
    cuts = {2: ["decoder.block.0"], 4: ["encoder.block.1", "decoder.block.0", "decoder.block.1"]}
    return text(T5ForConditionalGeneration(config), cuts, use_cache=False)


CASES = {f.__name__: f for f in (unet, gpt, gpt2, llama, bert, t5)}
HUGGING_FACE = ("gpt2", "llama", "bert", "t5")


@cache
def made(name, dtype=torch.float64):
    """One module for all tests, which leave it as it is."""
    torch.manual_seed(0)
    case = CASES[name]()
    case.module.to(dtype)
    if not isinstance(case.batch, dict) and case.batch.is_floating_point():
        case.batch, case.target = case.batch.to(dtype), case.target.to(dtype)
    return case


@contextmanager
def exported_once(first=None):
    """Within, a module is exported when it is split first, if it isn't already, and later cuts are of that export."""
    real, seen = splitting.export, [] if first is None else [first]

    def export(*arguments):
        if not seen:
            seen.append(real(*arguments))
        return seen[0]

    with mock.patch.object(splitting, "export", export):
        yield seen


@cache
def exported(name, dtype=torch.float64):
    case = made(name, dtype)
    example, kwargs = case.given
    with exported_once() as seen:
        interop.split(case.module, at=case.cuts[2], example=example, kwargs=kwargs)
    return seen[0]


def split(name, count, dtype=torch.float64, **options):
    """`(case, pipeline, params, state)`."""
    case = made(name, dtype)
    example, kwargs = case.given
    options = options or {"at": case.cuts[count]}
    with exported_once(exported(name, dtype)):
        pipeline, params = interop.split(case.module, example=example, kwargs=kwargs, loss=case.loss, **options)
    return case, pipeline, params, interop.buffers(pipeline, case.module)


EQUAL = {"rtol": 1e-9, "atol": 1e-12}

SCHEDULES = {
    "gpipe": (schedules.gpipe, Placement.loop),
    "one_f_one_b": (schedules.one_f_one_b, Placement.loop),
    "zb_h1": (schedules.zb_h1, Placement.loop),
    "interleaved_1f1b": (schedules.interleaved_1f1b, lambda ranks: Placement.loop(ranks, chunks=2)),
    "zb_v": (schedules.zb_v, Placement.v),
    "dualpipe_v": (schedules.dualpipe_v, Placement.v),
}


def ranks(name, stages):
    """How many it takes under a schedule."""
    return stages // SCHEDULES[name][1](1).stages


def planned(pipeline, name, microbatches=2):
    count = ranks(name, len(pipeline.stages))
    return pipeline.plan(SCHEDULES[name][1](count), microbatches)


def step(pipeline, handler, name="gpipe", microbatches=2, autodiff="graph", **options):
    plan = planned(pipeline, name, microbatches)
    return fpipe.value_and_grad(pipeline, SCHEDULES[name][0], plan, handler=handler, autodiff=autodiff, **options)


def run(function, case, params, state):
    """(loss, gradients, state), the last empty where there is none."""
    loss, grads, *new = function(params, case.batch, case.target, **({"state": state} if state else {}))
    return loss, grads, new[0] if new else {}


def unsplit(case, microbatches=1):
    """(loss, gradients by name, buffers) of the module itself, microbatch by microbatch."""
    module, total = copy.deepcopy(case.module), 0.0
    split = fpipe.stages.microbatch.split
    for batch, target in zip(split(case.batch, microbatches)[0], split(case.target, microbatches)[0], strict=True):
        output = module(**batch, **case.constants) if isinstance(batch, dict) else module(batch)
        loss = case.loss(output, target) / microbatches
        loss.backward()
        total = total + loss.detach()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return total, gradients, dict(module.named_buffers())


def check(found, case, pipeline, microbatches=2, tolerance=EQUAL):
    loss, grads, state = found
    whole, gradients, buffers = unsplit(case, microbatches)
    torch.testing.assert_close(loss, whole, **tolerance)
    named = {name: x for tree in grads.values() for name, x in tree.items()}
    assert {name for name, x in named.items() if x is not None} == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(named[name], gradient, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    for tree in state.values():
        for name, x in tree.items():
            torch.testing.assert_close(x, buffers[name], **tolerance)
