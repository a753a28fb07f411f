"""Measure steps whose residuals are on the host, or recomputed, beside plain ones: their time, and a rank's memory.

    python -m benchmarks.offload                        # two tables
    python -m benchmarks.offload --tables timed --layer 10
    python -m benchmarks.offload --json                 # a list of objects, and nothing else
    python -m benchmarks.offload --out offload.json     # and into a file, with the machine

- timed: four ranks, whose stages sleep as those of `benchmarks.timed` do and pass on 1 MiB a microbatch. Ranks that
  sleep need no cores.
- compute: two ranks of four layers each, tanh(x @ w) of 512 rows by 512 columns, with one thread each.

The schedule is GPipe, with 16 microbatches on four ranks and with 8 on two. The ways:

- plain: nothing is moved.
- offload: the tightest limit, in steps of one microbatch's residuals, that `fpipe.offload` keeps with no time lost.
- recompute: likewise with `slower=0.1, recompute=True`, for a link to the host of no use.

On the CPU a copy to the host is one into memory outside of torch's allocator, by a thread beside the rank's.
Predictions (`benchmarks.predictions`) are `simulate` and `verify(...).peak_bytes` with costs of `fpipe.profile`, right
before each step where stages compute, the host's time for a piece, and a measured link between ranks. Bytes are those
of the live values of the rank with the most, measured by `LiveBytes`. A round runs every way in turn; times are medians
of the rounds, `ratio` is measured over predicted, and `over_plain` over the plain step, as medians of the rounds' with
quartiles. `by own` is predicted with the times of the measured step's own pieces. Before anything is timed, the
gradients of all ways are compared in bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from benchmarks import models, predictions, recordings, timed
from fpipe import Costs, Pipeline, Placement, ScheduleError, handlers
from fpipe.effects import Offload, Recompute

JOBS = {"timed": (4, "gpipe", 16), "compute": (2, "gpipe", 8)}  # ranks, schedule, microbatches
WIDE, ROWS, COLUMNS, DEEP = 2**18, 512, 512, 4
WAYS = ("plain", "offload", "recompute")


def model(name: str, layer: float) -> tuple[Pipeline, dict[int, Any], Tensor, Tensor]:
    """Return a pipeline, its params, a batch and its target."""
    ranks, _, microbatches = JOBS[name]
    if name == "timed":
        seconds = [models.LAYERS // ranks * layer] * 3

        def sleeper(w: Tensor, x: Tensor) -> Tensor:
            return timed.forward(torch.tanh(x * w.mean()), w, seconds)  # whose result is a residual

        pipeline = Pipeline([sleeper] * ranks, lambda y, t: (y - t).square().mean())
        params = {rank: torch.ones(timed.SIDE, timed.SIDE) for rank in range(ranks)}
        return pipeline, params, torch.ones(microbatches, WIDE), torch.zeros(microbatches, WIDE)

    def stage(p: Sequence[Tensor], x: Tensor) -> Tensor:
        for w in p:
            x = torch.tanh(x @ w)
        return x

    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(ranks, DEEP, COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5
    batch, target = torch.randn(2, microbatches * ROWS, COLUMNS, generator=generator)
    pipeline = Pipeline([stage] * ranks, lambda y, t: (y - t).square().mean())
    return pipeline, {rank: list(weights[rank]) for rank in range(ranks)}, batch, target


def passes(schedule: str, plan: fpipe.Plan, costs: Costs) -> dict[str, Any]:
    """Return the pass of each way; None for none."""
    useless = replace(costs, offload=1e6, fetch=1e6)
    return {
        "plain": None,
        "offload": tightest(schedule, plan, costs),
        "recompute": tightest(schedule, plan, useless, slower=0.1, recompute=True),
    }


def tightest(schedule: str, plan: fpipe.Plan, costs: Costs, **how: Any) -> Any:
    residuals = max(costs.residuals) if isinstance(costs.residuals, Sequence) else costs.residuals
    limit = max(each.total for each in fpipe.footprint(fpipe.lower(schedule, plan), costs))
    offload = None
    while limit > residuals:
        tried = fpipe.offload(limit, costs, **how)
        try:
            fpipe.lower(schedule, plan, offload=tried)
        except ScheduleError:
            break
        offload, limit = tried, limit - residuals
    return offload


def job(rank: int, ranks: int, name: str, layer: float, rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Run one rank: yield the rows of a table, as measured on rank 0."""
    torch.set_num_threads(1)
    handler = handlers.Distributed(timeout=models.TIMEOUT)
    _, schedule, microbatches = JOBS[name]
    pipeline, params, batch, target = model(name, layer)
    plan = pipeline.plan(Placement.loop(ranks), microbatches)
    one = len(batch) // microbatches
    options: dict[str, Any] = {"autodiff": "graph", "handler": handler}
    link = predictions.ping(rank)
    stage = timed.brief if name == "timed" else predictions.busy
    host = predictions.Host(handler, ranks, link, microbatches, stage, size=batch[:one].numel())

    def profile(repeats: int) -> Costs:
        count = 1 if name == "timed" else models.PROFILED
        rows, numbers = slice(count * one), {"microbatches": count, "repeats": repeats}
        costs = fpipe.profile(pipeline, params, batch[rows], target[rows], **numbers, **options)
        return replace(costs, communication=link)

    costs = profile(models.REPEATS)
    ways, own = passes(schedule, plan, costs), pipeline.params_on(params, plan, rank)
    live = {way: fpipe.LiveBytes() for way in WAYS}
    make = partial(fpipe.value_and_grad, pipeline, schedule, plan, **options)

    def recorded(way: str) -> recordings.Recorded:
        programs = fpipe.lower(schedule, plan, offload=ways[way])
        return recordings.recorded(partial(make, offload=ways[way]), programs, own, batch, target)

    steps = {way: recorded(way) for way in WAYS}
    compare([step() for step in steps.values()])
    peaks = {way: peak(make(offload=ways[way], observe=live[way]), live[way], own, batch, target) for way in WAYS}

    def predict(way: str) -> predictions.Prediction:
        now = costs if name == "timed" else profile(predictions.REPEATS)
        return predictions.Prediction(steps[way].programs, now, host.measure())

    results = predictions.compare(steps, predict, rounds)
    yield [row(name, way, plan, costs, ways[way], peaks[way], results) for way in WAYS]


def compare(results: Sequence[Any]) -> None:
    for loss, grads in results[1:]:
        torch.testing.assert_close((loss, grads), results[0], rtol=0, atol=0)


def peak(step: Callable[..., Any], live: fpipe.LiveBytes, *arguments: Any) -> int:
    """Return the most live bytes of a rank, in a step that has this observer."""
    for _ in range(2):
        step(*arguments)  # traces, and exchanges signatures
    live.run(step, *arguments)
    most = torch.tensor(live.peak(dist.get_rank()))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def row(
    name: str,
    way: str,
    plan: fpipe.Plan,
    costs: Costs,
    moved: Any,
    measured: int,
    results: dict[str, predictions.Rounds],
) -> dict[str, Any]:
    _, schedule, _ = JOBS[name]
    effects = [effect for program in fpipe.lower(schedule, plan, offload=moved).values() for effect in program]
    report = fpipe.verify(schedule, plan, costs=costs, offload=moved)
    return {
        "table": name,
        "way": way,
        "schedule": schedule,
        "ranks": plan.ranks,
        "microbatches": plan.microbatches,
        "offloads": sum(isinstance(effect, Offload) for effect in effects),
        "recomputes": sum(isinstance(effect, Recompute) for effect in effects),
        **results[way].figures(),
        **predictions.spread("over_plain", results[way].over(results["plain"])),
        "predicted_bytes": max(report.peak_bytes or (0,)),
        "measured_bytes": measured,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    title = "{table}: {schedule} on {ranks} ranks, {microbatches} microbatches, {rounds} rounds"
    print(f"\n{title.format(**rows[0])}; MiB of live values of the rank with the most")
    print(f"{'':10}{'offloads':>9} {'recomputes':>10} {'predicted':>10} {'measured':>9}", end="")
    print(f" {'ms predicted':>13} {'measured':>9} {'ratio':>6} {'by own':>8} {'ratio':>6}", end="")
    print(f" {'over plain':>11} {'quartiles':>13}")
    for r in rows:
        predicted, measured = (r[f"{which}_bytes"] / 2**20 for which in ("predicted", "measured"))
        print(f"{r['way']:10}{r['offloads']:9} {r['recomputes']:10} {predicted:10.2f} {measured:9.2f}", end="")
        print(f" {r['predicted_ms']:13.1f} {r['measured_ms']:9.1f} {r['ratio']:6.3f}", end="")
        print(f" {r['by_own_ms']:8.1f} {r['own_ratio']:6.3f}", end="")
        print(f" {r['over_plain']:11.3f} {predictions.quartiles(r, 'over_plain'):>13}", flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=600)
    parser.add_argument("--tables", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--layer", type=models.positive, default=5, help="milliseconds of a timed layer's forward")
    options = parser.parse_args()

    def parts() -> Iterator[list[dict[str, Any]]]:
        for name in options.tables:
            arguments = name, 1e-3 * options.layer, options.rounds
            yield from models.in_processes(job, JOBS[name][0], *arguments, limit=options.limit)

    models.run("offload", options, parts(), show)


if __name__ == "__main__":
    main()
