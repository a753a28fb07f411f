"""What the ranks of a pool do with split modules."""

from __future__ import annotations

import fpipe
from fpipe import handlers, schedules
from tests.jobs import differences, expected_on, handler
from tests.sharing import Sharing


def train(rank, chosen, batch, target, pipeline, params, state):
    """A step under each of the schedules, of stages that came as they are: where it differs from the reference."""
    given, found, over = {"state": state} if state else {}, [], Sharing(handler(), {})
    for name in chosen:
        placement = schedules.CATALOGUE[name.replace("_", "-")].plan(2, 2).placement
        plan = pipeline.plan(placement, 2)
        reference = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Reference())
        own = pipeline.params_on(params, plan, rank)
        expected = expected_on(reference(params, batch, target, **given), own, plan, rank, bool(state))
        held = {"state": {s: t for s, t in state.items() if s in plan.stages_on(rank)}} if state else {}
        step = fpipe.value_and_grad(pipeline, getattr(schedules, name), plan, handler=over, autodiff="graph")
        found += differences(step(own, batch, target, **held), expected)
    return found
