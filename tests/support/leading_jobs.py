"""Steps to which the last rank comes late, while the others run their first forwards."""

from __future__ import annotations

import time

import torch

import fpipe
from fpipe import Pipeline, Placement, handlers
from tests.support.cases import mse
from tests.support.faults import layer
from tests.support.jobs import differences

LATE, MICROBATCHES = 0.3, 6
CHANGES = ("nothing", "target", "batch", "params", "rng", "raises", "interrupt", "elsewhere", "program")
"""How the late step differs from those before: on the last rank; by its rows; or by what rank 1 does, whose forward
fails, or which comes to a program of smaller values."""
ERRORS = (fpipe.StageError, fpipe.TransportError, KeyboardInterrupt)


class Late:
    """The steps of one rank.

    Attributes:
        calls: when its stage was called.
        fault: the error that the stage raises, once.
    """

    def __init__(self, rank, ranks, schedule):
        self.rank, self.last, self.calls, self.fault = rank, rank == ranks - 1, [], None
        self.pipeline = Pipeline([self.stage] * ranks, mse)
        self.plan = self.pipeline.plan(Placement.loop(ranks), MICROBATCHES)
        generator = torch.Generator().manual_seed(0)
        self.whole = {s: {"w": torch.randn(4, 4, generator=generator)} for s in range(ranks)}
        self.params = {rank: self.whole[rank]}
        self.x, self.y = torch.randn(2, 2 * MICROBATCHES, 4, generator=generator)
        own = {"handler": handlers.Distributed(timeout=20), "autodiff": "eager"}
        self.handler = own["handler"]
        self.step = fpipe.value_and_grad(self.pipeline, schedule, self.plan, **own)
        self.other = fpipe.value_and_grad(self.pipeline, schedule, self.plan, **own)
        self.run = fpipe.evaluate(self.pipeline, self.plan, **own)
        plain = Pipeline([layer] * ranks, mse)
        self.reference = fpipe.value_and_grad(plain, "gpipe", self.plan, handler=handlers.Reference())

    def stage(self, p, x):
        self.calls.append(time.monotonic())
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return layer(p, x)

    def trained(self, dtype=torch.float32, seed=0, rows=2 * MICROBATCHES):
        """Where the results of a step differ from the reference's; ranks are given what their stages read."""
        x, y = self.x[:rows], self.y[:rows].to(dtype)
        loss, grads = self.reference(self.whole, x, y)
        self.calls.clear()
        result = self.step(self.params, None if self.rank else x, y if self.last else None, rng=(seed, 0))
        return differences(result, (loss, {self.rank: grads[self.rank]}))

    def smaller(self):
        """A step of another program, with half of the rows."""
        x, y = self.x[:MICROBATCHES], self.y[:MICROBATCHES]
        self.other(self.params, None if self.rank else x, y if self.last else None, rng=(0, 0))

    def changed(self, change):
        """The late step."""
        if change in ("raises", "interrupt") and self.rank == 1:
            self.fault = ArithmeticError("at once") if change == "raises" else KeyboardInterrupt("stopped")
        if change == "elsewhere" and self.last:
            return self.run(self.params, None)
        if change == "program" and self.rank == 1:
            return self.smaller()
        if change == "params" and self.last:
            return self.step({}, None, self.y, rng=(0, 0))
        if change == "target":
            return self.trained(torch.float64)
        if change == "batch":
            return self.trained(rows=MICROBATCHES + 1)
        return self.trained(seed=int(change == "rng" and self.last))


def late(rank, ranks, schedule="zb_h2"):
    """For each change: when the rank began the late step, when its stage was first called, the error, differences."""
    late, found = Late(rank, ranks, schedule), []
    for _ in range(2):
        late.smaller()
    for change in CHANGES:
        before = [d for _ in range(3) for d in late.trained()]
        late.handler.check()
        late.calls.clear()
        if late.last:
            time.sleep(LATE)
        begun, error, result = time.monotonic(), "", None
        try:
            result = late.changed(change)
        except ERRORS as raised:
            error = f"{type(raised).__name__}: {raised}"
        late.fault = None
        found.append((begun, min(late.calls, default=None), error, [*before, *(result or []), *late.trained()]))
    return found
