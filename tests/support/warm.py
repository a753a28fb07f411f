"""Imported by the process that tests fork from, so that it has all modules that a first use imports."""

import gc

import torch
from torch import nn
from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration  # noqa: F401

import fpipe
from examples import train_gpt  # noqa: F401
from fpipe import Placement, handlers, interop, schedules


def warm_up() -> None:
    """Trace a step of a module that was split."""
    x = torch.ones(2, 2)
    pipeline, params = interop.split(nn.Linear(2, 2), stages=1, example=x, loss=nn.functional.mse_loss)
    plan = pipeline.plan(Placement.loop(1), 1)
    fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff="graph")(params, x, x)


LAZY = (handlers.Distributed, interop.Checkpoints, fpipe.tensorboard.Recorder, fpipe.Recording, fpipe.profile)

if not torch.cuda.device_count():  # else autograd starts threads, and a process that has some can't be forked
    warm_up()
gc.collect()
gc.freeze()  # children share the memory of what was imported, and don't look for garbage in it
gc.set_threshold(50_000, 10, 10)
