"""Compare the predicted with the measured order of strategies, by timed stages: each piece sleeps for its cost.

    python -m benchmarks.strategies                  # two tables: 4 processes, and 8
    python -m benchmarks.strategies --worlds 4 --rounds 3
    python -m benchmarks.strategies --json           # a list of objects, and nothing else
    python -m benchmarks.strategies --out FILE.json  # and into a file, with the machine

`fpipe.schedules.strategies` predicts the steps of a transformer of eight layers over 4 and 8 ranks of a made-up machine
that is slow enough for gloo: pipelines, replicas and tensor parallel in all products, by 1F1B and by ZB-V. Then each
strategy runs with one process for each rank. Pieces sleep for the time that the prediction has for them, their
tensor-parallel collectives included. Transfers, gathers and scatters are real ones over gloo; gathers and scatters end
no earlier than over the link of the prediction, of bytes in proportion to those of the model.

A step is predicted by the costs of its strategy, with the host's time for a piece (`benchmarks.predictions`), which
`strategies` leaves out. The ratio is measured over predicted; times are medians of the rounds, ratios those of the
rounds' ratios, with quartiles. `order` says whether strategies whose steps differ by more than 5 %, as `strategies` has
them (`strategy_ms`), were measured in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from benchmarks import models, predictions, timed
from fpipe import Costs, Link, Pipeline, handlers, interop
from fpipe.handlers.distributed.backends import Gloo
from fpipe.schedules.candidates import Degrees, Strategy
from fpipe.schedules.machines import Machine
from fpipe.schedules.shapes import ModelShape
from fpipe.schedules.strategies import strategies

WORLDS = (4, 8)
BATCH, WIDTH = 16, 64  # sequences of a step; numbers of an activation
SCALE = 1 / 16  # bytes of a real parameter for each that is predicted
CLOSE = 0.05  # steps of strategies that are no further apart have no order
SHAPE = ModelShape(layers=models.LAYERS, hidden=256, heads=4, vocabulary=256, sequence=64)
LATENCY, GATHER = 0.03, 1.5  # of a link, and of a layer's parameters over it, in times of a layer's forward
SCHEDULES = ("1f1b", "zb-v")
OPTIONS: dict[str, Any] = {"batch": BATCH, "rows": [1], "cp": [1], "tp": [1, 2], "remat": ["none"], "top": 100}


def machine(layer: float) -> Machine:
    """Return the machine on which a layer's forward takes so many seconds."""
    flops = SHAPE.layer_flops(SHAPE.sequence).forward / layer
    bandwidth = torch.float32.itemsize * SHAPE.layer_parameters / (GATHER * layer)
    link = Link(LATENCY * layer, bandwidth)
    return Machine({"float32": flops}, bandwidth=1e12, memory=1e12, inside=link, between=link, on_host=1, efficiency=1)


def predicted(world: int, layer: float) -> list[Strategy]:
    """Return the strategies that are measured, fastest first: all degrees, by each schedule."""
    by_schedule = (strategies(SHAPE, world, machine(layer), schedules=[name], **OPTIONS) for name in SCHEDULES)
    return sorted((strategy for found in by_schedule for strategy in found), key=lambda strategy: strategy.step)


def stages(strategy: Strategy) -> tuple[Pipeline, dict[int, Tensor]]:
    """Return a pipeline whose pieces sleep as long as the strategy says, with parameters in proportion to its bytes."""
    costs = strategy.costs
    times = [*zip(*map(per_stage, (costs.forward, costs.backward_input, costs.backward_weight)), strict=True)]
    pipeline = Pipeline([partial(sleeping, seconds) for seconds in times], lambda y, t: (y - t).square().mean())
    numbers = [max(1, round(SCALE * size / torch.float32.itemsize / WIDTH)) for size in per_stage(costs.parameters)]
    replicas = strategy.degrees.replicas  # which share rows equally, so that shards have no padding
    return pipeline, {s: torch.ones(ceil(rows / replicas) * replicas, WIDTH) for s, rows in enumerate(numbers)}


def sleeping(seconds: Sequence[float], w: Tensor, x: Tensor) -> Tensor:
    return timed.forward(x, w, list(seconds))


def per_stage(cost: Any) -> tuple[float, ...]:
    assert isinstance(cost, tuple)
    return cost


def step(strategy: Strategy) -> Callable[[], object]:
    """Return a function that runs a step of this process."""
    pp, dp, tp, *_ = strategy.degrees
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    link = strategy.costs.gather
    assert isinstance(link, Link)
    backend = timed.SlowLink(SCALE * link.bandwidth, link.latency) if dp > 1 else Gloo()
    replicas = mesh["dp"] if dp > 1 else None
    handler = handlers.Distributed(mesh["pp"], replicas=replicas, backend=backend, timeout=models.TIMEOUT)
    pipeline, params = stages(strategy)
    own = pipeline.params_on(
        params if replicas is None else interop.fsdp(params, replicas), strategy.plan, handler.rank
    )
    options: dict[str, Any] = {"handler": handler, "autodiff": "graph", "resident": strategy.resident}
    run = fpipe.value_and_grad(pipeline, strategy.schedule, strategy.plan, **options)
    rows = strategy.plan.microbatches
    return partial(run, own, torch.ones(rows, WIDTH), torch.zeros(rows, WIDTH))


def job(rank: int, world: int, degrees: Sequence[Degrees], layer: float, rounds: int) -> Iterator[Any]:
    """Run one process: yield the rows of all strategies, or of those with some degrees, as measured on rank 0."""
    chosen = [strategy for strategy in predicted(world, layer) if not degrees or strategy.degrees in degrees]
    steps = [step(strategy) for strategy in chosen]
    sizes = [(strategy.degrees.pp, strategy.plan.microbatches) for strategy in chosen]
    hosts = {each: host(*each, world) for each in sorted({*sizes})}

    def predict(at: int) -> float:
        return with_host(chosen[at], hosts[sizes[at]].seconds())

    results = predictions.compare(dict(enumerate(steps)), predict, rounds)
    yield [row(strategy, layer) | results[at].figures() for at, strategy in enumerate(chosen)]


def host(pp: int, microbatches: int, world: int) -> predictions.Host:
    """Return the host's time for a piece on so many ranks, all replicas of which take the same steps."""
    mesh = init_device_mesh("cpu", (pp, world // pp), mesh_dim_names=("pp", "others"))
    handler = handlers.Distributed(mesh["pp"], timeout=models.TIMEOUT)
    brief = timed.BRIEF
    costs = Costs(brief, [0.0, *[brief] * (pp - 1)], brief)  # of a first stage nobody needs an input gradient
    return predictions.Host(handler, pp, Link(0.0), microbatches, timed.brief, costs)


def with_host(strategy: Strategy, host: float) -> float:
    """Return the seconds of a step, by the costs of the strategy and with the host's time for a piece."""
    costs = predictions.with_host(strategy.costs, strategy.plan, host)
    return fpipe.simulate(strategy.schedule, strategy.plan, costs, resident=strategy.resident).makespan


def row(strategy: Strategy, layer: float) -> dict[str, Any]:
    return {
        **strategy.degrees._asdict(),
        "layer_ms": 1e3 * layer,
        "schedule": strategy.name,
        "chunks": strategy.chunks,
        "microbatches": strategy.plan.microbatches,
        "collectives": strategy.collectives,
        "strategy_ms": 1e3 * strategy.step,
    }


def disordered(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pairs whose strategies are apart, and which were measured in the other order."""
    pairs = combinations(sorted(rows, key=lambda row: row["strategy_ms"]), 2)
    apart = (pair for pair in pairs if pair[1]["strategy_ms"] > (1 + CLOSE) * pair[0]["strategy_ms"])
    return [(a, b) for a, b in apart if a["measured_ms"] >= b["measured_ms"]]


def show(rows: Sequence[dict[str, Any]]) -> None:
    world = rows[0]["pp"] * rows[0]["dp"] * rows[0]["tp"]
    print(f"\n{world} ranks, {rows[0]['rounds']} rounds; a layer's forward takes {rows[0]['layer_ms']:g} ms")
    print(f"{'pp':>3}{'dp':>4}{'tp':>4}  {'schedule':12}{'v':>2} {'inside':>7}", end="")
    print(f" {'strategy':>9} {'predicted':>10} {'measured':>9} {'ratio':>6} {'quartiles':>13}")
    for r in rows:
        print(f"{r['pp']:3}{r['dp']:4}{r['tp']:4}  {r['schedule']:12}{r['chunks']:2} {r['collectives']:7.1%}", end="")
        print(f" {r['strategy_ms']:9.1f} {r['predicted_ms']:10.1f} {r['measured_ms']:9.1f} {r['ratio']:6.3f}", end="")
        print(f" {predictions.quartiles(r, 'ratio'):>13}")
    wrong = disordered(rows)
    print(f"order: {'as predicted' if not wrong else f'{len(wrong)} pairs are not as predicted'}", flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=3, limit=600)
    parser.add_argument("--worlds", nargs="+", type=int, choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--layer", type=models.positive, default=40, help="milliseconds of a layer's forward")
    options = parser.parse_args()
    arguments = (), 1e-3 * options.layer, options.rounds
    parts = (
        part for world in options.worlds for part in models.in_processes(job, world, *arguments, limit=options.limit)
    )
    models.run("strategies", options, parts, show)


if __name__ == "__main__":
    main()
