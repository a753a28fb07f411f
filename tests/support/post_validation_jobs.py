"""Loops of `train_step` with `max_norm`: unhurried, and with updates before the norm is known."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext

import optree
import torch
from torch.nn import functional as F

import fpipe
from fpipe import Pipeline, handlers, interop
from fpipe.training.late import LateNumber
from tests.support.cases import SCHEDULES, mse
from tests.support.jobs import differences
from tests.support.leading_jobs import passing_on
from tests.support.shards import mesh_of

MICROBATCHES, WIDTH = 6, 4
SIZES = (40.0, 0.1, 0.1, 40.0, 40.0, 0.1, 0.1, 0.1, 40.0, 0.1)
"""Of the targets, by step: the gradients of the large ones are clipped."""
NOT_FINITE = (0.1, 0.1, 0.1, float("inf"), 0.1, 0.1, 0.1, 0.1, float("nan"), 0.1)
OFTEN_NOT_FINITE = (0.1, 0.1, 0.1, float("inf"), float("nan"), 0.1, 0.1, float("inf"), 0.1, 0.1, float("inf"))
CLIPS, SKIPS, RAISES = {"max_norm": 0.6}, {"check_finite": "skip"}, {"check_finite": "raise"}
REVERSALS = (4, 9)
"""The steps after an update that does not stand."""
OPTIMIZERS = {
    "sgd": lambda donate: interop.optimizer(torch.optim.SGD, lr=0.5, momentum=0.9, donate=donate),
    "adamw": lambda donate: interop.optimizer(torch.optim.AdamW, lr=0.1, donate=donate),
    "fused": lambda donate: interop.optimizer(torch.optim.AdamW, lr=0.1, fused=True, donate=donate),
}


class Slow(torch.autograd.Function):
    """The weight itself, whose gradient takes some seconds."""

    @staticmethod
    def forward(ctx, w, seconds):
        ctx.seconds = seconds
        return w.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


@contextmanager
def other_modes():
    """Modes in which results are read, and nothing is trained."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class Loop:
    """A training loop of one rank.

    Args:
        handler: by default Distributed.
        hurries: whether it updates before the norm is known; if not, nothing is late and nothing lags.
        late: seconds by which the last rank comes late to a step after an update that does not stand.
        lags: by step, seconds that the last rank takes for a weight gradient.
        reads: the ranks that read all results of each step at once.
        reads_elsewhere: they do so in other modes of torch.
        changes_loss: the loop changes the loss in place.
        sizes: as `SIZES`.
        limit: the stages raise an error if a weight is above it.
        drop: the probability of dropout, by the global generator.
        checks: options of `train_step`.
        scale: the first loss scale, if there is one.
        replicas: of the pipeline, in other processes; each has the same rows, and the last rank of each is late.
        faults: by step, (rank, kind): it is passed no params, clips to another norm, raises an error, is interrupted
            or is killed in its first forward; or (None, "rows") for another batch size.

    Attributes:
        counts: by step, the calls of this rank's stages.
        errors: the texts of all errors.
    """

    def __init__(
        self,
        process,
        ranks,
        schedule,
        hurries,
        *,
        optimizer="sgd",
        handler=None,
        donate=False,
        late=0.0,
        lags=None,
        reads=(),
        reads_elsewhere=False,
        changes_loss=False,
        sizes=SIZES,
        limit=float("inf"),
        drop=0.0,
        checks=CLIPS,
        faults=None,
        scale=None,
        replicas=1,
    ):
        rank = process % ranks
        is_slow = hurries and rank == ranks - 1
        self.rank, self.late, self.reads, self.sizes = rank, late * is_slow, rank in reads, sizes
        self.limit, self.drop, self.faults, self.fault = limit, drop, faults or {}, None
        self.lags, self.lag, self.changes_loss = (lags or {}) if is_slow else {}, 0.0, changes_loss
        self.elsewhere = other_modes if reads_elsewhere else nullcontext
        order, place = SCHEDULES[schedule]
        placement = place(ranks)
        sliced = schedule.startswith("seq")
        self.pipeline = Pipeline([passing_on(self.stage) if sliced else self.stage] * placement.stages, mse)
        self.plan = self.pipeline.plan(placement, MICROBATCHES, slices=1 + sliced, replicas=replicas)
        own, generator = self.plan.stages_on(rank), torch.Generator().manual_seed(0)
        self.own = range(placement.stages) if handler else own
        every = torch.randn(placement.stages, WIDTH, WIDTH, generator=generator)
        self.params = {s: {"w": every[s].clone()} for s in self.own}
        self.x, self.y = torch.randn(2, 2 * MICROBATCHES, 4, WIDTH, generator=generator)
        # Copies, for tensors that are passed to processes are theirs in common.
        self.checks = checks = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in checks.items()}
        pair, options = OPTIMIZERS[optimizer](donate), {"post_validate": hurries, "autodiff": "eager", **checks}
        mesh = mesh_of(replicas, ranks, names=("dp", "pp")) if replicas > 1 else None
        grid = {} if mesh is None else {"group": mesh["pp"], "replicas": mesh["dp"]}
        handler = handler or handlers.Distributed(**grid, timeout=20)
        self.scale = {} if scale is None else {"loss_scale": fpipe.LossScale(scale, growth_interval=2)}
        self.step = fpipe.train_step(self.pipeline, order, self.plan, pair, handler=handler, **options)
        self.state, self.counts, self.errors, self.results = pair.init(self.params), [], [], []

    def stage(self, p, x):
        self.counts[-1] += 1
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raises" or p["w"].abs().max() > self.limit:
            raise ArithmeticError("too large")
        if self.fault == "interrupt":
            self.fault = None
            raise KeyboardInterrupt
        w = Slow.apply(p["w"], self.lag) if self.lag else p["w"]
        return F.dropout(torch.tanh(x @ w), self.drop)

    def run(self):
        """The results of each step, or its error; then what is left at the end."""
        torch.manual_seed(self.rank)
        for i in range(len(self.sizes)):
            self.results.append(self.one(i))
        with self.noting():
            dict(self.params)
        results = [*self.results, (dict(self.params), dict(self.state), *self.numbers())]
        return optree.tree_map(lambda x: x.clone() if isinstance(x, LateNumber) else x, results)

    @contextmanager
    def noting(self):
        """Note an error of the step before in the place of its results."""
        try:
            yield
        except fpipe.NonFiniteError as error:
            if not error.is_late:
                raise
            self.errors.append(str(error))
            self.results[-1] = "NonFiniteError"

    def numbers(self):
        """The value and the streak of the next loss scale."""
        return [(scale.value, scale.streak) for scale in self.scale.values()]

    def one(self, i):
        time.sleep(self.late * (i in REVERSALS))
        guilty, fault = self.faults.get(i, (None, None))
        self.fault = fault if guilty in (self.rank, None) else None
        self.lag = self.lags.get(i, 0.0)
        if isinstance(limit := self.checks.get("max_norm"), torch.Tensor):
            limit.fill_(0.3 if self.fault == "limit" else 0.6)
        rows = slice(None, -1 if self.fault == "rows" else None)
        x = self.x[rows] if 0 in self.own else None
        y = self.sizes[i] * self.y[rows] if self.plan.stages - 1 in self.own else None
        self.counts.append(0)
        try:
            params = {} if self.fault == "refused" else self.params
            self.params, self.state, loss, *late = self.step(params, self.state, x, y, **self.scale)
        except fpipe.NonFiniteError as error:
            if error.is_late:  # this step has not run
                with self.noting():
                    raise
                self.counts.pop()
                return self.one(i)
            self.errors.append(str(error))
            return "NonFiniteError"
        except (fpipe.StageError, fpipe.TransportError, KeyboardInterrupt) as error:
            self.errors.append(str(error))
            return "the norm" if "max_norm" in str(error) else type(error).__name__
        if self.scale:
            *late, self.scale["loss_scale"] = late
        own = loss.clone()
        if self.changes_loss:
            loss.div_(0)
        trees = ()
        try:
            with self.elsewhere():
                if self.reads:
                    numbers = [*(str(each.item()) for each in late), *self.numbers()]
                    trees = (dict(self.params), dict(self.state), numbers)
        except fpipe.NonFiniteError:
            return "NonFiniteError"  # and once more in the next step
        return *optree.tree_map(torch.clone, trees[:2]), *trees[2:], own, *late  # which are read at the end


def compare(rank, ranks, schedule, options):
    """Where the results of the two loops differ; the errors; by step, how many forwards more the second one has run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* drew random numbers")
        loops = [Loop(rank, ranks, schedule, hurries, **options) for hurries in (False, True)]
        expected, found = (loop.run() for loop in loops)
    more = [b - a for a, b in zip(*(loop.counts for loop in loops), strict=True)]
    return differences(found, expected), loops[1].errors, more


def killed(rank, ranks, schedule, victim):
    """A rank is killed in its first forward of a step after an update that does not stand; error and seconds there."""
    loop = Loop(rank, ranks, schedule, True, late=0.2, faults={REVERSALS[0]: (victim, "killed")})
    for i in range(REVERSALS[0]):
        loop.one(i)
    begun = time.monotonic()
    loop.one(REVERSALS[0])
    return *loop.errors, time.monotonic() - begun


def differing(rank):
    """What ranks are told where one of them alone updates before the norm is known."""
    loop = Loop(rank, 2, "zb_h2", hurries=rank == 0)
    loop.one(0)
    return loop.errors


def read_in_a_thread(rank, ranks):
    """A thread of rank 0 waits for each step's results while the next one begins: differences, errors, reads, calls."""
    lags = dict.fromkeys(range(4, 8), 0.05)
    plain, loop = (Loop(rank, ranks, "zb_h2", hurries, lags=lags, donate=hurries) for hurries in (False, True))
    reads, threads = [], []

    def read(params):
        try:
            reads.append(dict(params))
        except BaseException as error:
            reads.append(error)

    for i in range(len(plain.sizes)):
        plain.one(i)
    for i in range(len(loop.sizes)):
        loop.one(i)
        if rank == 0:
            threads.append(threading.Thread(target=read, args=(loop.params,)))
            threads[-1].start()
            time.sleep(0.005)  # it waits now
    for thread in threads:
        thread.join(20)
    errors = [*loop.errors, *(str(each) for each in reads if isinstance(each, BaseException))]
    calls = loop.step.handler._setup.ready().connections.activity.calls  # those that have begun, the same on each rank
    return differences(dict(loop.params), plain.params), errors, len(reads), calls
