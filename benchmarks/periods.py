"""Compare the period of training steps with and without a barrier between them.

    python -m benchmarks.periods                                   # two tables
    python -m benchmarks.periods --tables compute --rounds 10
    python -m benchmarks.periods --json                            # a list of objects, and nothing else

A loop of `train_step` has no barrier: a rank begins the next step when its own part is done, and the last rank, which
has begun late, ends late (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4). It finds its first
values there when it comes. With a barrier, all ranks meet after each step. The two loops take turns in one run, and the
optimizer's update of a stage is the last effect of its rank in both.

- compute: two ranks of a transformer, with real compute. Ranks must not exceed cores.
- timed: four ranks whose layers sleep for their cost (benchmarks/timed.py), with real tensors and transfers.

An object has, in milliseconds:

- barrier_ms, free_ms: measured, the period of a loop of `--steps` steps, as medians of rounds.
- barrier_predicted_ms, free_predicted_ms: the makespan of one simulated step, and the period of as many, by costs of
  `fpipe.profile` and a measured link.
- won, won_predicted: the share of the period with a barrier that the loop without one saves. won has its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fpipe
from benchmarks import models, timed
from fpipe import Costs, Pipeline, Placement, handlers, interop
from fpipe.plan import Plan, Schedule
from fpipe.schedules import one_f_one_b, updating, zb_auto, zb_h2
from fpipe.stages.pytree import flatten

WIDTH = 256
KINDS = {"compute": 2, "timed": 4}
SCHEDULES = ("1f1b", "zb-h2", "zb-auto")


class Model(NamedTuple):
    """A pipeline, its params, its data, and its optimizer."""

    pipeline: Pipeline
    params: dict[int, Any]
    data: tuple[torch.Tensor, torch.Tensor]
    optimizer: Any


def model(kind: str, ranks: int, layer: float) -> Model:
    adam = interop.optimizer(torch.optim.AdamW, lr=1e-3, fused=True, donate=True)
    if kind == "timed":
        pipeline, params = timed.stages(ranks, layer)
        return Model(pipeline, params, timed.data(2 * ranks), adam)
    each = models.stages(models.layers(WIDTH), ranks)
    pipeline, own = interop.from_modules(each, loss=models.loss_fn)
    return Model(pipeline, own, models.data(WIDTH), adam)


def schedule_of(name: str, plan: Plan, costs: Costs) -> Schedule:
    fixed: dict[str, Schedule] = {"1f1b": one_f_one_b, "zb-h2": zb_h2}
    return fixed.get(name) or zb_auto(plan, costs, memory_limit=2 * plan.ranks)


def job(rank: int, ranks: int, kind: str, layer: float, steps: int, rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield the rows of a table, as measured on rank 0."""
    handler = handlers.Distributed(timeout=models.TIMEOUT)
    pipeline, params, (batch, target), optimizer = model(kind, ranks, layer)
    microbatches = len(batch) if kind == "timed" else models.MICROBATCHES
    plan = pipeline.plan(Placement.loop(ranks), microbatches)
    rows = len(batch) // microbatches
    costs = fpipe.profile(
        *(pipeline, params, batch[:rows], target[:rows]),
        handler=handler,
        optimizer=optimizer,
        repeats=models.REPEATS,
        autodiff="graph",
    )
    costs = replace(costs, communication=models.ping(rank, torch.ones_like(batch[:rows])))
    for name in SCHEDULES:
        schedule = schedule_of(name, plan, costs)
        step = fpipe.train_step(pipeline, schedule, plan, optimizer, handler=handler, autodiff="graph")
        loop = _Loop(step, pipeline.params_on(params, plan, rank), optimizer, batch, target)
        yield [row(kind, name, plan, costs, schedule, measure(loop, steps, rounds), steps)]


class _Loop:
    """A training loop that goes on from call to call."""

    def __init__(self, step: Callable[..., Any], params: Any, optimizer: Any, *data: torch.Tensor) -> None:
        leaves, spec = flatten(params)
        self.params = spec.unflatten([leaf.detach().clone() for leaf in leaves])  # donated
        self.step, self.state, self.data = step, optimizer.init(self.params), data
        for _ in range(3):
            self()

    def __call__(self) -> None:
        self.params, self.state, _ = self.step(self.params, self.state, *self.data)


def measure(loop: Callable[[], None], steps: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of a step of each round, with a barrier and without."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for own, between in zip(times, (dist.barrier, _nothing), strict=True):
            dist.barrier()
            ends = []
            for _ in range(steps):
                loop()
                between()
                ends.append(time.perf_counter())
            half = steps // 2  # as of Timeline.period
            own.append(1e3 * (ends[-1] - ends[half - 1]) / (steps - half))
    return times


def _nothing() -> None:
    """Let the next step begin."""


def row(
    kind: str,
    name: str,
    plan: Plan,
    costs: Costs,
    schedule: Schedule,
    times: tuple[list[float], list[float]],
    steps: int,
) -> dict[str, Any]:
    predict = partial(fpipe.simulate, updating(schedule), plan, costs)
    barrier, free = predict().makespan, predict(steps=steps).period
    won = [1 - b / a for a, b in zip(*times, strict=True)]
    return {
        "table": kind,
        "schedule": name,
        "ranks": plan.ranks,
        "microbatches": plan.microbatches,
        "steps": steps,
        "rounds": len(won),
        "barrier_ms": statistics.median(times[0]),
        "barrier_predicted_ms": 1e3 * barrier,
        "free_ms": statistics.median(times[1]),
        "free_predicted_ms": 1e3 * free,
        "won": statistics.median(won),
        "won_quartiles": statistics.quantiles(won)[::2] if len(won) > 1 else won * 2,
        "won_predicted": 1 - free / barrier,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    for r in rows:
        print("{table}, {schedule}: {ranks} ranks, {microbatches} microbatches, {steps} steps x {rounds}".format(**r))
        print(f"{'':10}{'measured':>10} {'predicted':>10} {'ratio':>6}")
        for way in ("barrier", "free"):
            measured, predicted = r[f"{way}_ms"], r[f"{way}_predicted_ms"]
            print(f"{way:10}{measured:8.1f} ms {predicted:7.1f} ms {measured / predicted:6.3f}")
        print(f"{'won':10}{r['won']:10.1%} {r['won_predicted']:10.1%}", flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=600)
    parser.add_argument("--tables", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=models.positive, default=20, help="of a loop; the later half is timed")
    parser.add_argument("--layer", type=models.positive, default=5, help="milliseconds of a timed layer's forward")
    options = parser.parse_args()

    if options.steps < 2:
        parser.error("--steps must be at least 2")

    def parts() -> Iterator[list[dict[str, Any]]]:
        for kind in options.tables:
            arguments = kind, 1e-3 * options.layer, options.steps, options.rounds
            yield from models.in_processes(job, KINDS[kind], *arguments, limit=options.limit)

    models.report("periods", options.json, parts(), show)


if __name__ == "__main__":
    main()
