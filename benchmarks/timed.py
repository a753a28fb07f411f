"""Compare predicted with measured steps of replicas and shards, by timed stages: each piece sleeps for its cost.

    python -m benchmarks.timed                                     # three tables
    python -m benchmarks.timed --tables 2x2 --schedules gpipe zb-v
    python -m benchmarks.timed --json                              # a list of objects, and nothing else
    python -m benchmarks.timed --out timed.json                    # and into a file, with the machine

Ranks that sleep need no cores, so that a few cores play as many ranks as there are. The model has eight layers, of
which a schedule's stages have equal numbers. Each layer sleeps 10 ms in its forward, 10 ms in its input gradient and
10 ms in its weight gradient; tensors, graphs and transfers are real. There are 8 microbatches.

Parameters are sharded over the replicas. Their gathers and scatters are real ones over gloo, which end no earlier than
they would over a link of a bandwidth: `SlowLink`, a backend that is passed to the handler. So the time of a gather is
known, and far above that which gloo and the host add to it.

A prediction (`benchmarks.predictions`) is `simulate` with costs from `fpipe.profile`, which times pieces, gathers and
scatters through the same handler, a measured link between the ranks, and the host's time for a piece, from a step of
stages that sleep for 5 ms, before each step. The ratio is measured over predicted: medians of rounds, with quartiles.
Gathers are those of the rank with the most, as is the number of microbatches in flight.

- 2x2: two ranks times two replicas, every schedule with all its stages resident, and with one; a layer's gather takes
  as long as its forward.
- 4x1: four ranks without replicas.
- residence: two times two, looped BFS and interleaved 1F1B with four stages on each rank, by the number of resident
  stages. A layer's gather, and its scatter, take as long as its forward; and as its forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fpipe
from benchmarks import models, predictions
from fpipe import Costs, Pipeline, Placement, Plan, Timeline, handlers, interop
from fpipe.effects import Gather
from fpipe.handlers.distributed.backends import Gloo
from fpipe.schedules.catalogue import CATALOGUE

SIDE = 128  # a layer's parameters are SIDE x SIDE
BRIEF = 5e-3  # seconds of each pass of the stages that show the host's time
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-v")
LOOPED = ("interleaved-1f1b", "looped-bfs")


class Table(NamedTuple):
    """A table of measured steps; `gathers` are the times of a layer's gather, in times of its forward."""

    ranks: int
    replicas: int
    schedules: Sequence[str] = SCHEDULES
    gathers: Sequence[float] = (1,)


TABLES = {"2x2": Table(2, 2), "4x1": Table(4, 1, gathers=(0,)), "residence": Table(2, 2, LOOPED, gathers=(1, 3))}


# Timed stages


@torch.library.custom_op("timed::forward", mutates_args=())
def forward(x: Tensor, w: Tensor, seconds: Sequence[float]) -> Tensor:
    """Return x times the mean of w, after a sleep; `seconds` of the forward, the input and the weight gradient."""
    time.sleep(seconds[0])
    return x * w.mean()


@torch.library.custom_op("timed::backward_input", mutates_args=())
def backward_input(cotangent: Tensor, w: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return cotangent * w.mean()


@torch.library.custom_op("timed::backward_weight", mutates_args=())
def backward_weight(cotangent: Tensor, x: Tensor, w: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return torch.ones_like(w) * ((cotangent * x).sum() / w.numel())


@forward.register_fake
def _forward_like(x: Tensor, w: Tensor, seconds: Sequence[float]) -> Tensor:
    return torch.empty_like(x)


@backward_input.register_fake
def _like_cotangent(cotangent: Tensor, w: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(cotangent)


@backward_weight.register_fake
def _like_weight(cotangent: Tensor, x: Tensor, w: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(w)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.seconds = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w = ctx.saved_tensors
    to_x, to_w, _ = ctx.needs_input_grad
    _, for_x, for_w = ctx.seconds
    return (
        backward_input(cotangent, w, for_x) if to_x else None,
        backward_weight(cotangent, x, w, for_w) if to_w else None,
        None,
    )


forward.register_autograd(_backward, setup_context=_save)


def stages(count: int, layer: float) -> tuple[Pipeline, dict[int, Tensor]]:
    """Return a pipeline of all layers in `count` stages, and its params; `layer` is the seconds of one's forward."""
    each = models.LAYERS // count
    pipeline = Pipeline([lambda w, x: forward(x, w, [each * layer] * 3)] * count, lambda y, t: (y - t).square().mean())
    return pipeline, {stage: torch.ones(each * SIDE, SIDE) for stage in range(count)}


def brief(w: Tensor, x: Tensor) -> Tensor:
    """Sleep for a short time, as a stage that shows the host's."""
    return forward(x, w, [BRIEF] * 3)


def data(microbatches: int) -> tuple[Tensor, Tensor]:
    return torch.ones(microbatches, SIDE), torch.zeros(microbatches, SIDE)


# A link of a known bandwidth


class Late:
    """A work that is complete no earlier than at a time."""

    def __init__(self, work: dist.Work, until: float) -> None:
        self.work, self.until = work, until

    def wait(self, *limit: Any) -> None:
        self.work.wait(*limit)
        if (left := self.until - time.perf_counter()) > 0:  # a sleep of 0 s takes 60 µs
            time.sleep(left)


class SlowGroup:
    """A process group of replicas, each of whose operations occupies the link for a time, one after another."""

    def __init__(self, group: Any, bandwidth: float, latency: float) -> None:
        self.group, self.bandwidth, self.latency, self.free = group, bandwidth, latency, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def alltoall_base(self, received: Tensor, *arguments: Any) -> Late:
        return self.late(self.group.alltoall_base(received, *arguments), received)

    def late(self, work: dist.Work, received: Tensor) -> Late:
        share = 1 - 1 / self.group.size()
        start = max(self.free, time.perf_counter())
        self.free = start + self.latency + share * received.nbytes / self.bandwidth
        return Late(work, self.free)


@dataclass(frozen=True)
class SlowLink(Gloo):
    """gloo, with a link of a bandwidth (bytes a second) and a latency between the replicas of a rank."""

    bandwidth: float
    latency: float = 0.0

    def group(self, *arguments: Any) -> Any:
        _, name, *_ = arguments
        group = super().group(*arguments)
        return SlowGroup(group, self.bandwidth, self.latency) if name.startswith(("gather", "scatter")) else group

    def all_gather(self, group: Any, whole: Tensor, piece: Tensor) -> list[Any]:
        if not isinstance(group, SlowGroup):
            return super().all_gather(group, whole, piece)
        *works, last = super().all_gather(group.group, whole, piece)
        return [*works, group.late(last, whole)]


# Steps


@dataclass(frozen=True)
class Case:
    """A step that is measured; `resident` is None where nothing is sharded."""

    schedule: str
    plan: Plan
    resident: int | None


def cases(name: str, schedules: Sequence[str]) -> Iterator[Case]:
    ranks, replicas, *_ = TABLES[name]
    for schedule in schedules:
        placement = CATALOGUE[schedule].plan(ranks, models.MICROBATCHES).placement
        if name == "residence":
            placement = Placement.loop(ranks, models.LAYERS // ranks)
        plan, chunks = Plan(placement, models.MICROBATCHES, replicas=replicas), placement.stages // ranks
        rooms = range(1, chunks + 1) if name == "residence" else sorted({chunks, 1}, reverse=True)
        for room in rooms if replicas > 1 else [None]:
            yield Case(schedule, plan, room)


class Process:
    """One process of a table.

    Args:
        layer, gather: seconds of a layer's forward, and of its gather and its scatter.
    """

    def __init__(self, rank: int, table: Table, layer: float, gather: float) -> None:
        mesh = init_device_mesh("cpu", (table.replicas, table.ranks), mesh_dim_names=("dp", "pp"))
        self.layer, self.replicas = layer, mesh["dp"] if table.replicas > 1 else None
        received = (1 - 1 / table.replicas) * SIDE * SIDE * torch.float32.itemsize
        backend = SlowLink(received / gather) if gather else Gloo()
        self.handler = handlers.Distributed(mesh["pp"], replicas=self.replicas, backend=backend, timeout=models.TIMEOUT)
        self.link = predictions.ping(rank)
        self.host = predictions.Host(self._alone(mesh["pp"]), table.ranks, self.link, models.MICROBATCHES, brief)

    def _alone(self, mesh: DeviceMesh) -> handlers.Distributed:
        """Return a handler of one replica."""
        return handlers.Distributed(mesh, timeout=models.TIMEOUT) if self.replicas else self.handler

    def profile(self, count: int) -> Costs:
        pipeline, params = stages(count, self.layer)
        options: dict[str, Any] = {"handler": self.handler, "autodiff": "graph", "repeats": models.REPEATS}
        costs = fpipe.profile(pipeline, self.sharded(params), *data(1), **options)
        return replace(costs, communication=self.link)

    def timeline(self, case: Case, costs: Costs, host: float) -> Timeline:
        """Return the predicted step, by the costs of the case's stages and the host's time for a piece."""
        schedule = CATALOGUE[case.schedule].schedule(case.plan)
        costs = predictions.with_host(costs, case.plan, host)
        return fpipe.simulate(schedule, case.plan, costs, resident=case.resident)

    def step(self, case: Case) -> Callable[[], object]:
        pipeline, params = stages(case.plan.stages, self.layer)
        own = self.sharded(pipeline.params_on(params, case.plan, self.handler.rank))
        schedule = CATALOGUE[case.schedule].schedule(case.plan)
        options: dict[str, Any] = {"handler": self.handler, "autodiff": "graph", "resident": case.resident}
        step = fpipe.value_and_grad(pipeline, schedule, case.plan, **options)
        return partial(step, own, *data(models.MICROBATCHES))

    def sharded(self, params: Any) -> Any:
        return params if self.replicas is None else interop.fsdp(params, self.replicas)


def job(
    rank: int, processes: int, name: str, schedules: Sequence[str], layer: float, gather: float, rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield the rows of a table with one time of a gather, as measured on rank 0."""
    process, chosen = Process(rank, TABLES[name], layer, gather), list(cases(name, schedules))
    costs = {count: process.profile(count) for count in sorted({case.plan.stages for case in chosen})}
    steps = {case: process.step(case) for case in chosen}

    def predict(case: Case) -> float:
        return process.timeline(case, costs[case.plan.stages], process.host.seconds()).makespan

    results = predictions.compare(steps, predict, rounds)
    sizes = {"layer_ms": 1e3 * layer, "gather_ms": 1e3 * gather, "host_ms": process.host.milliseconds}
    yield [{"table": name} | sizes | row(case) | results[case].figures() for case in chosen]


def row(case: Case) -> dict[str, Any]:
    plan, schedule = case.plan, CATALOGUE[case.schedule].schedule(case.plan)
    programs = fpipe.lower(schedule, plan, resident=case.resident)
    return {
        "schedule": case.schedule,
        "ranks": plan.ranks,
        "replicas": plan.replicas,
        "stages": plan.stages,
        "resident": case.resident,
        "gathers": max(sum(type(e) is Gather for e in program) for program in programs.values()),
        "in_flight": max(fpipe.simulate(schedule, plan).peak_in_flight),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("\n{table}: {ranks} ranks x {replicas} replicas, {rounds} rounds; ms a layer: ".format(**rows[0]), end="")
    print("forward {layer_ms:g}, gather {gather_ms:g}; the host's time for a piece {host_ms:.2f}".format(**rows[0]))
    print(f"{'':19}{'stages':>7} {'resident':>9} {'gathers':>8} {'in flight':>10}", end="")
    print(f" {'predicted':>10} {'measured':>9} {'ratio':>6} {'quartiles':>13}")
    for r in rows:
        resident = "-" if r["resident"] is None else r["resident"]
        print(f"{r['schedule']:19}{r['stages']:7} {resident:>9} {r['gathers']:8} {r['in_flight']:10g}", end="")
        print(f" {r['predicted_ms']:10.1f} {r['measured_ms']:9.1f} {r['ratio']:6.3f}", end="")
        print(f" {predictions.quartiles(r, 'ratio'):>13}", flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=600)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--layer", type=models.positive, default=10, help="milliseconds of a layer's forward")
    options = parser.parse_args()
    layer = 1e-3 * options.layer

    def parts() -> Iterator[list[dict[str, Any]]]:
        for name, table in [(name, TABLES[name]) for name in options.tables]:
            chosen = [schedule for schedule in options.schedules if schedule in table.schedules]
            for gather in table.gathers if chosen else ():
                arguments = name, chosen, layer, gather * layer, options.rounds
                processes = table.ranks * table.replicas
                yield from models.in_processes(job, processes, *arguments, limit=options.limit)

    models.run("timed", options, parts(), show)


if __name__ == "__main__":
    main()
