"""Imported by the process that tests fork from: what a first trace, a first split and a first model import, it has."""

import gc

import torch
from torch import nn

import fpipe
from fpipe import Placement, handlers, interop, schedules


def warm_up() -> None:
    """Trace a step of a module that was split."""
    x = torch.ones(2, 2)
    pipeline, params = interop.split(nn.Linear(2, 2), stages=1, example=x, loss=nn.functional.mse_loss)
    plan = pipeline.plan(Placement.loop(1), 1)
    fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff="graph")(params, x, x)


if not torch.cuda.device_count():  # else autograd starts threads, and a process that has some can't be forked
    warm_up()
gc.collect()
gc.freeze()  # what was imported stays as it is: children share its memory, and don't look through it for garbage
