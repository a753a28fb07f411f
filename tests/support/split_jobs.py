"""What the ranks of a pool do with split modules."""

from __future__ import annotations

import torch

from fpipe import interop
from tests.support import split_cases
from tests.support.jobs import differences, expected_on, handler
from tests.support.sharing import sharing


def steps(rank, key, chosen, batch, target, pipeline, params, state, expected):
    """A step under each of the schedules, of stages that came as they are: where it is not as expected."""
    found = []
    for name in chosen:
        step, own, held = on(rank, key, name, pipeline, params, state)
        theirs = expected_on(expected, own, split_cases.planned(pipeline, name), rank, bool(state))
        found += [(name, *at) for at in differences(step(own, batch, target, **held), theirs)]
    return found


def train(rank, key, name, batch, target, pipeline, params, state, count):
    """The state_dict of this rank's stages after so many steps of AdamW."""
    step, own, held = on(rank, key, name, pipeline, params, state)
    adamw = interop.optimizer(torch.optim.AdamW, lr=1e-2)
    kept = adamw.init(own)
    for _ in range(count):
        _, grads, *new = step(own, batch, target, **held)
        own, kept = adamw.update(grads, kept, own)
        held = {"state": new[0]} if new else {}
    return interop.to_state_dict(pipeline, own, held.get("state"))


def on(rank, key, name, pipeline, params, state):
    """`(step, params, what else it takes)` of a rank, by graphs that all steps of this key share."""
    plan, step = split_cases.planned(pipeline, name), split_cases.step(pipeline, sharing(handler(), *key), name)
    held = {"state": pipeline.state_on(state, plan, rank)} if state else {}
    return step, pipeline.params_on(params, plan, rank), held
