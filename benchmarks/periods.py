"""Compare the period of training steps with and without a barrier between them, and with a norm of the gradients.

    python -m benchmarks.periods                                   # two tables
    python -m benchmarks.periods --tables compute --rounds 10
    python -m benchmarks.periods --tables timed --schedules zb-h2
    python -m benchmarks.periods --json                            # a list of objects, and nothing else
    python -m benchmarks.periods --out periods.json                # and into a file, with the machine

A loop of `train_step` has no barrier: a rank begins the next step when its own part is done, and the last rank, which
has begun late, ends late (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4). It finds its first
values there when it comes. With a barrier, all ranks meet after each step. With `max_norm`, each rank waits for the
gradients of all, and with `post_validate=True` it goes on as if nothing were clipped. The loops take turns in one run,
and the optimizer's update of a stage is the last that its rank does in all of them.

- compute: two ranks of a transformer, with real compute. Ranks must not exceed cores.
- timed: four ranks whose layers sleep for their cost (benchmarks/timed.py), with real tensors and transfers.

An object has, in milliseconds:

- barrier_ms, free_ms: measured, the period of a loop of `--steps` steps, as medians of rounds.
- norm_ms, late_ms: likewise with `max_norm`, without and with post-validation, where no gradients are clipped.
- clipped_ms: with post-validation where those of every step are clipped: each rank waits.
- barrier_predicted_ms, free_predicted_ms: the makespan of one simulated step, and the period of as many, by costs of
  `fpipe.profile`, right before each loop where stages compute, the host's time for a piece, and a measured link
  (`benchmarks.predictions`).
- norm_predicted_ms, late_predicted_ms, clipped_predicted_ms: likewise, with the norm, the clipping, and for late_ms the
  copy of the old params and optimizer state, as measured on each rank by itself, and the slowest one's taken for all.
- barrier_by_own_ms, free_by_own_ms and so on: predicted with the times of the pieces of the loop's later half, as it is
  recorded. With a norm, updates are no pieces, and take as long as in the other prediction.
- barrier_ratio, barrier_own_ratio and so on: measured over predicted, the median of the rounds' with quartiles.
- won, won_predicted, won_by_own: the share of the period with a barrier that the loop without one saves. won has its
  quartiles.
- won_late, won_late_predicted, won_late_by_own: likewise, of the period with a norm, what post-validation saves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fpipe
from benchmarks import models, predictions, recordings, timed
from fpipe import Costs, Pipeline, Placement, handlers, interop
from fpipe.plan import Plan, Schedule
from fpipe.schedules import one_f_one_b, updating, zb_auto, zb_h2
from fpipe.stages.pytree import flatten

WIDTH = 256
KINDS = {"compute": 2, "timed": 4}
SCRATCH = 32 << 20  # elements that are written before a norm is timed, so that no cache has the gradients
SCHEDULES = ("1f1b", "zb-h2", "zb-auto")
OPTIONS: dict[str, dict[str, Any]] = {
    "free": {},
    "norm": {"max_norm": 1e9},
    "late": {"max_norm": 1e9, "post_validate": True},
    "clipped": {"max_norm": 1e-9, "post_validate": True},
}
"""Those of `train_step`, by way."""
SAVED = {"won": ("barrier", "free"), "won_late": ("norm", "late")}


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


def job(
    rank: int, ranks: int, kind: str, names: Sequence[str], layer: float, steps: int, rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield the rows of a table, as measured on rank 0."""
    handler = handlers.Distributed(timeout=models.TIMEOUT)
    pipeline, params, (batch, target), optimizer = model(kind, ranks, layer)
    microbatches = len(batch) if kind == "timed" else models.MICROBATCHES
    plan = pipeline.plan(Placement.loop(ranks), microbatches)
    rows = len(batch) // microbatches
    link = predictions.ping(rank)
    stage = timed.brief if kind == "timed" else predictions.busy
    host = predictions.Host(handler, ranks, link, microbatches, stage, size=batch[:rows].numel())
    count = 1 if kind == "timed" else models.PROFILED

    def profile(repeats: int) -> Costs:
        costs = fpipe.profile(
            *(pipeline, params, batch[: count * rows], target[: count * rows]),
            microbatches=count,
            handler=handler,
            optimizer=optimizer,
            repeats=repeats,
            autodiff="graph",
        )
        return replace(costs, communication=link)

    first = profile(models.REPEATS)

    def predicted(schedule: Schedule, free: Loop, way: str) -> predictions.Prediction:
        costs = first if kind == "timed" else profile(predictions.REPEATS)
        extra = max(recordings.gathered(seconds(free, way)))
        prediction = predict(way, plan, costs, extra, schedule, steps)
        return prediction._replace(host=host.measure())

    for name in names:
        schedule = schedule_of(name, plan, first)
        train = partial(fpipe.train_step, pipeline, schedule, plan, optimizer, handler=handler, autodiff="graph")
        own = pipeline.params_on(params, plan, rank)
        loops = dict[str, recordings.Recorded]()
        for way, options in OPTIONS.items():
            recording = fpipe.Recording(fpipe.lower(schedule if options else updating(schedule), plan))
            loop = Loop(train(observe=recording, **options), own, optimizer, batch, target)
            recorded = partial(recordings.Recorded, recording=recording, runs=steps - steps // 2)
            loops[way] = recorded(loop)
            if way == "free":
                loops["barrier"], free = recorded(loop.and_barrier), loop
        period = partial(predictions.period, steps=steps)
        results = predictions.compare(loops, partial(predicted, schedule, free), rounds, period)
        yield [row(kind, name, plan, results, steps)]


def seconds(loop: Loop, way: str) -> float:
    """Return what a rank's part of a norm takes, with what is done beside it, for params and state of a loop."""
    if "max_norm" not in OPTIONS.get(way, {}):
        return 0.0
    params, state = ([leaf.detach() for leaf in flatten(tree).leaves] for tree in (loop.params, loop.state))
    factor, scratch = torch.ones((), dtype=torch.float64), torch.empty(SCRATCH)

    def extra() -> Sequence[torch.Tensor]:
        torch._foreach_norm(params, 2, torch.float64)  # the gradients are as large
        return [leaf.clone() for leaf in (*params, *state)] if way == "late" else torch._foreach_mul(params, factor)

    times = []
    for _ in range(models.REPEATS):
        scratch.zero_()
        begun = time.perf_counter()
        results = extra()
        times.append(time.perf_counter() - begun)
        del results  # as a step does once the norm is known
    return statistics.median(times)


class Loop:
    """A training loop that goes on from call to call."""

    def __init__(self, step: Callable[..., Any], params: Any, optimizer: Any, *data: torch.Tensor) -> None:
        leaves, spec = flatten(params)
        self.params = spec.unflatten([leaf.detach().clone() for leaf in leaves])  # donated
        self.step, self.state, self.data = step, optimizer.init(self.params), data
        for _ in range(3):
            self()

    def __call__(self) -> None:
        self.params, self.state, *_ = self.step(self.params, self.state, *self.data)

    def and_barrier(self) -> None:
        self()
        dist.barrier()


def row(kind: str, schedule: str, plan: Plan, results: Mapping[str, predictions.Rounds], steps: int) -> dict[str, Any]:
    figures = {way: result.figures() for way, result in results.items()}
    shares = dict[str, Any]()
    for name, (way, without) in SAVED.items():
        shares |= predictions.spread(name, [1 - share for share in results[without].over(results[way])])
        for by in ("predicted", "by_own"):
            shares[f"{name}_{by}"] = 1 - figures[without][f"{by}_ms"] / figures[way][f"{by}_ms"]
    return {
        "table": kind,
        "schedule": schedule,
        "ranks": plan.ranks,
        "microbatches": plan.microbatches,
        "steps": steps,
        "rounds": len(results["free"].measured),
        **{
            f"{way}_{key.removeprefix('measured_')}": value
            for way, each in figures.items()
            for key, value in each.items()
            if key != "rounds"
        },
        **shares,
    }


def predict(way: str, plan: Plan, costs: Costs, extra: float, schedule: Schedule, steps: int) -> predictions.Prediction:
    """Return the prediction of a loop; `extra` is the time of a norm and of what comes with it."""
    updates = [costs.update] * plan.stages if isinstance(costs.update, float) else [*costs.update]
    if way in ("norm", "clipped"):  # all ranks update once the last one's gradients are there
        return predictions.Prediction(fpipe.lower(schedule, plan), costs, after=extra + max(updates))
    with_norm = replace(costs, update=[update + extra for update in updates])
    programs = fpipe.lower(updating(schedule), plan)
    return predictions.Prediction(programs, with_norm, steps=1 if way == "barrier" else steps)


def show(rows: Sequence[dict[str, Any]]) -> None:
    for r in rows:
        print("{table}, {schedule}: {ranks} ranks, {microbatches} microbatches, {steps} steps x {rounds}".format(**r))
        print(f"{'':10}{'measured':>10} {'predicted':>10} {'ratio':>6} {'quartiles':>13} {'by own':>10} {'ratio':>6}")
        for way in ("barrier", *OPTIONS):
            print(f"{way:10}{r[f'{way}_ms']:7.1f} ms {r[f'{way}_predicted_ms']:7.1f} ms", end="")
            print(f" {r[f'{way}_ratio']:6.3f} {predictions.quartiles(r, f'{way}_ratio'):>13}", end="")
            print(f" {r[f'{way}_by_own_ms']:7.1f} ms {r[f'{way}_own_ratio']:6.3f}")
        for saved in SAVED:
            quartiles = "{:.1%} to {:.1%}".format(*r[f"{saved}_quartiles"])
            print(f"{saved:10}{r[saved]:10.1%} {r[f'{saved}_predicted']:10.1%} {quartiles:>20}", end="")
            print(f" {r[f'{saved}_by_own']:10.1%}", flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=1200)
    parser.add_argument("--tables", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--steps", type=models.positive, default=20, help="of a loop; the later half is timed")
    parser.add_argument("--layer", type=models.positive, default=5, help="milliseconds of a timed layer's forward")
    options = parser.parse_args()

    if options.steps < 2:
        parser.error("--steps must be at least 2")

    def parts() -> Iterator[list[dict[str, Any]]]:
        for kind in options.tables:
            arguments = kind, options.schedules, 1e-3 * options.layer, options.steps, options.rounds
            yield from models.in_processes(job, KINDS[kind], *arguments, limit=options.limit)

    models.run("periods", options, parts(), show)


if __name__ == "__main__":
    main()
