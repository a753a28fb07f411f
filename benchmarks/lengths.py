"""Compare orders of microbatches of unequal lengths, `fpipe.Microbatches`: measured and predicted steps.

    python -m benchmarks.lengths                                   # both tables
    python -m benchmarks.lengths --stages timed --schedules zb-h1 --sigmas 0.6
    python -m benchmarks.lengths --json                            # a list of objects, and nothing else
    python -m benchmarks.lengths --out lengths.json                # and into a file, with the machine

Lengths are lognormal with the given sigma, 16 microbatches a step, in the order drawn and in that of
`fpipe.by_length`, "peak". `real` has two ranks of encoder layers, `models.layers`, with two sequences of 64 tokens on
average a microbatch, in multiples of 16. `timed` has four ranks whose pieces sleep in proportion to the length, for 10
ms on average and rank.

A prediction (`benchmarks.predictions`) is `simulate` with costs from `fpipe.profile` for the average length, times
`Costs(scale=)`, the host's time for a piece, and a measured link. The scale is interpolated between profiles of the
shortest, the average and the longest length, because a part of a piece's time, the host's above all, is the same for
every length; each step has profiles of its own, right before it. The work is that of the busiest rank, predicted. All
are medians of rounds; `ratio` is the median of the rounds' ratios. `by own` is predicted with the times of the measured
step's own pieces. Steps are measured from a barrier to a barrier; the first call of a step, which traces every length,
is not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fpipe
from benchmarks import models, predictions, recordings, timed
from fpipe import Costs, Link, Microbatches, Pipeline, handlers, interop
from fpipe.schedules.catalogue import CATALOGUE

RANKS = {"real": 2, "timed": 4}
MICROBATCHES, WIDTH, LENGTH, MULTIPLE = 16, 128, 64, 16
SECONDS = 10e-3  # of each of a rank's three pieces, at the average length
SCHEDULES = ("1f1b", "zb-h1", "zb-v")  # under GPipe every order takes as long
ORDERS: Mapping[str, Callable[[Sequence[int]], list[int]]] = {
    "drawn": lambda lengths: list(range(len(lengths))),
    "peak": fpipe.by_length,
}


def drawn(sigma: float) -> list[int]:
    """Return lengths whose mean is about LENGTH."""
    factors = np.random.default_rng(0).lognormal(-(sigma**2) / 2, sigma, MICROBATCHES)
    return [max(MULTIPLE, MULTIPLE * round(LENGTH * factor / MULTIPLE)) for factor in factors]


def model(kind: str, stages: int) -> tuple[Pipeline, dict[int, Any]]:
    """Return a pipeline and its params."""
    if kind == "real":
        return interop.from_modules(models.stages(models.layers(WIDTH), stages), loss=models.loss_fn)
    seconds = SECONDS * RANKS[kind] / stages / LENGTH  # for a token
    stage = lambda w, x: timed.forward(x, w, [x.shape[1] * seconds] * 3)  # noqa: E731
    return Pipeline([stage] * stages, models.loss_fn), {s: torch.ones(4) for s in range(stages)}


def data(kind: str, length: int, microbatches: int = 1) -> tuple[Tensor, Tensor]:
    """Return microbatches of a length and their target."""
    shape = (microbatches * models.ROWS, length, WIDTH if kind == "real" else 1)
    return torch.full(shape, 0.5), torch.zeros(shape)


def job(
    rank: int, ranks: int, kind: str, names: Sequence[str], sigmas: Sequence[float], rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield the rows of each schedule, as measured on rank 0."""
    handler = handlers.Distributed(timeout=models.TIMEOUT)
    link = predictions.ping(rank)
    host = predictions.Host(
        handler,
        ranks,
        link,
        MICROBATCHES,
        timed.brief if kind == "timed" else predictions.busy,
        size=data(kind, LENGTH)[0].numel(),
    )
    for name in names:
        yield of_schedule(name, kind, sigmas, rounds, handler, link, host)


def of_schedule(
    name: str,
    kind: str,
    sigmas: Sequence[float],
    rounds: int,
    handler: handlers.Distributed,
    link: Link,
    host: predictions.Host,
) -> list[dict[str, Any]]:
    """Return the rows of a schedule, of every sigma and order."""
    plan = CATALOGUE[name].plan(RANKS[kind], MICROBATCHES)
    pipeline, params = model(kind, plan.stages)
    schedule = CATALOGUE[name].schedule(plan)
    recording = fpipe.Recording(fpipe.lower(schedule, plan))
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler, autodiff="graph", observe=recording)
    lengths, calls = {}, {}
    for sigma, (order, ordered) in product(sigmas, ORDERS.items()):
        each = drawn(sigma)
        each = lengths[sigma, order] = [each[i] for i in ordered(each)]
        batch, target = map(Microbatches, zip(*(data(kind, n) for n in each), strict=True))
        call = partial(step, pipeline.params_on(params, plan, handler.rank), batch, target)
        calls[sigma, order] = recordings.Recorded(call, recording)
    every = [length for each in lengths.values() for length in each]
    count = 1 if kind == "timed" else models.PROFILED
    options: dict[str, Any] = {"microbatches": count, "autodiff": "graph", "handler": handler}
    work = {case: list[float]() for case in lengths}

    def profile(length: int) -> Costs:
        each = data(kind, length, count)
        costs = fpipe.profile(pipeline, params, *each, repeats=predictions.REPEATS, **options)
        return replace(costs, communication=link)

    def predict(case: tuple[float, str]) -> predictions.Prediction:
        times, each = host.measure(), lengths[case]
        profiles = {length: profile(length) for length in sorted({min(every), LENGTH, max(every)})}
        longer = {length: predictions.with_host(costs, plan, times.piece) for length, costs in profiles.items()}
        factors = {"scale": scales(longer, each), "sizes": [length / LENGTH for length in each]}
        prediction = predictions.Prediction(recording.programs, replace(profiles[LENGTH], **factors), times)
        work[case].append(1e3 * max(prediction.timeline().busy))
        return prediction

    return [
        {"stages": kind, "ranks": plan.ranks, "schedule": name, "sigma": case[0], "order": case[1]}
        | result.figures()
        | {"work_ms": statistics.median(work[case])}
        for case, result in predictions.compare(calls, predict, rounds).items()
    ]


def scales(profiles: Mapping[int, Costs], lengths: Sequence[int]) -> list[float]:
    """Return the time of each length over that of the average one, between those of the profiled lengths."""
    times = [np.sum([costs.forward, costs.backward_input, costs.backward_weight]) for costs in profiles.values()]
    factors: list[float] = np.interp(lengths, list(profiles), times / times[list(profiles).index(LENGTH)]).tolist()
    return factors


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        measured, predicted, work = (row[key] for key in ("measured_ms", "predicted_ms", "work_ms"))
        print(
            f"{row['stages']:5}  {row['ranks']} ranks  {row['schedule']:6}  sigma {row['sigma']:g}  {row['order']:5}  "
            f"measured {measured:6.0f} ms  predicted {predicted:6.0f} ms  ({row['ratio']:.3f}, by own "
            f"{row['own_ratio']:.3f})  "
            f"over the work {measured / work:.2f}",
            flush=True,
        )


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=900)
    parser.add_argument("--stages", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.3, 0.6])
    options = parser.parse_args()
    arguments = options.schedules, options.sigmas, options.rounds
    parts = (
        part
        for kind in options.stages
        for part in models.in_processes(job, RANKS[kind], kind, *arguments, limit=options.limit)
    )
    models.run("lengths", options, parts, show)


if __name__ == "__main__":
    main()
