"""Steps to which the last rank comes late, while the others run their first forwards."""

from __future__ import annotations

import os
import signal
import time

import torch

import fpipe
from fpipe import Pipeline, Stage, handlers
from tests.support.cases import SCHEDULES, mse
from tests.support.faults import layer
from tests.support.jobs import differences
from tests.support.shards import mesh_of

LATE, MICROBATCHES = 0.3, 6
WHOLE, UNEVEN = 2 * MICROBATCHES, MICROBATCHES + 1  # rows of a batch
CHANGES = ("nothing", "target", "batch", "params", "rng", "raises", "interrupt", "elsewhere", "program")
"""How the late step differs from those before: on the last rank; by its rows; or by what rank 1 does, whose forward
fails, or which comes to a program of smaller values."""
ERRORS = (fpipe.StageError, fpipe.TransportError, KeyboardInterrupt)


def passing_on(fn):
    """A stage that adds the last token of the slice before."""

    def stage(p, carry, x):
        y = fn(p, x)
        y = y if carry is None else y + 0.1 * carry
        return y, y[:, -1:]

    return Stage(stage, carry=True)


class Late:
    """The steps of one rank, of which there is one in each replica, with the same rows.

    Attributes:
        calls: when its stage was called.
        fault: the error that the stage raises, once; or "killed".
    """

    def __init__(self, process, ranks, schedule, replicas=1):
        rank = process % ranks
        self.rank, self.last, self.calls, self.fault = rank, rank == ranks - 1, [], None
        order, place = SCHEDULES[schedule]
        stages = place(ranks).stages
        sliced = schedule.startswith("seq")
        self.pipeline = Pipeline([passing_on(self.stage) if sliced else self.stage] * stages, mse)
        self.plan = self.pipeline.plan(place(ranks), MICROBATCHES, slices=1 + sliced, replicas=replicas)
        self.own = self.plan.stages_on(rank)
        generator = torch.Generator().manual_seed(0)
        self.whole = {s: {"w": torch.randn(4, 4, generator=generator)} for s in range(stages)}
        self.params = {s: self.whole[s] for s in self.own}
        self.x, self.y = torch.randn(2, 2 * MICROBATCHES, 4, 4, generator=generator)
        mesh = mesh_of(replicas, ranks, names=("dp", "pp")) if replicas > 1 else None
        grid = {} if mesh is None else {"group": mesh["pp"], "replicas": mesh["dp"]}
        own = {"handler": handlers.Distributed(**grid, timeout=20), "autodiff": "eager"}
        self.handler = own["handler"]
        self.step = fpipe.value_and_grad(self.pipeline, order, self.plan, **own)
        self.other = fpipe.value_and_grad(self.pipeline, order, self.plan, **own)
        self.run = fpipe.evaluate(self.pipeline, self.plan, **own)
        plain = Pipeline([passing_on(layer) if sliced else layer] * stages, mse)
        self.reference = fpipe.value_and_grad(plain, "gpipe", self.plan, handler=handlers.Reference())
        self.expected = {}  # computed before the steps, which are timed
        for dtype, rows in ((torch.float32, WHOLE), (torch.float64, WHOLE), (torch.float32, UNEVEN)):
            x, y = (torch.cat([each[:rows]] * replicas) for each in (self.x, self.y.to(dtype)))
            loss, grads = self.reference(self.whole, x, y)
            self.expected[dtype, rows] = loss, {s: grads[s] for s in self.own}

    def stage(self, p, x):
        self.calls.append(time.monotonic())
        fault, self.fault = self.fault, None
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault is not None:
            raise fault
        return layer(p, x)

    def trained(self, dtype=torch.float32, seed=0, rows=WHOLE):
        """Where the results of a step differ from the reference's; ranks are given what their stages read."""
        self.calls.clear()
        result = self.step(self.params, *self.read(self.x[:rows], self.y[:rows].to(dtype)), rng=(seed, 0))
        return differences(result, self.expected[dtype, rows])

    def read(self, x, y):
        """The part of batch and target that this rank's stages read."""
        return x if 0 in self.own else None, y if self.plan.stages - 1 in self.own else None

    def smaller(self):
        """A step of another program, with half of the rows."""
        x, y = self.x[:MICROBATCHES], self.y[:MICROBATCHES]
        self.other(self.params, *self.read(x, y), rng=(0, 0))

    def changed(self, change):
        """The late step."""
        if change in ("raises", "interrupt") and self.rank == 1:
            self.fault = ArithmeticError("at once") if change == "raises" else KeyboardInterrupt("stopped")
        if change == "elsewhere" and self.last:
            return self.run(self.params, None)
        if change == "program" and self.rank == 1:
            return self.smaller()
        if change == "params" and self.last:
            return self.step({}, *self.read(self.x, self.y), rng=(0, 0))
        if change == "target":
            return self.trained(torch.float64)
        if change == "batch":
            return self.trained(rows=UNEVEN)
        return self.trained(seed=int(change == "rng" and self.last))


def late(rank, ranks, schedule="zb_h2", changes=CHANGES, replicas=1):
    """For each change: when the rank began the late step, when its stage was first called, the error, differences."""
    late, found = Late(rank, ranks, schedule, replicas), []
    for _ in range(2):
        late.smaller()
    for change in changes:
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


def killed(rank, ranks, schedule, victim):
    """A rank is killed in its first forward of a step to which the last one comes late: the error, and its seconds."""
    late = Late(rank, ranks, schedule)
    for _ in range(3):
        late.trained()
    late.handler.check()
    late.fault = "killed" if rank == victim else None
    if late.last:
        time.sleep(LATE)
    begun = time.monotonic()
    try:
        late.trained()
    except fpipe.TransportError as error:
        return str(error), time.monotonic() - begun
    return "no error", time.monotonic() - begun
