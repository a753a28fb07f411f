"""Compare layouts whose cuts are searched with cuts into equal numbers of layers: measured steps, and predicted ones.

    python -m benchmarks.partitions                                # all tables
    python -m benchmarks.partitions --tables simulated --models gemma
    python -m benchmarks.partitions --json                         # a list of objects, and nothing else
    python -m benchmarks.partitions --profile benchmarks/unlike_layers.json      # of this machine

- `real`: two ranks over gloo. An embedding, dense blocks, two mixtures of experts, and a head that takes as long as
  several blocks.
- `timed4`, `timed8`: four and eight ranks whose pieces sleep for the costs of such layers, in milliseconds.
- `profiled4`: four ranks whose pieces sleep for the profile of a model, in proportion, with its bytes:
  `benchmarks/unlike_layers.json`. A loop of `train_step`, without barriers.
- `simulated`: the models of `benchmarks.mixed_models` on eight ranks, with 32 microbatches.

Five layouts take turns. `1f1b` and `interleaved` are what torch's and Megatron's guides recommend: stages of equal
numbers of layers, the embedding before the first and the head after the last of them, and 1F1B with one stage on a rank
or with two. `named` is the schedule that is best on stages balanced by time, as `interop.split(policy="balanced")`
makes them. `published` is the best of all schedules in a fixed order, each on the cuts that are searched for it, and
`found` is what `schedules.search(layouts=True)` finds, from a profile of the layers. The last three keep to the memory
that the larger of the first two takes, with a quarter more where they are measured, the former where it can.

A prediction is `simulate` with the costs of the layers, from `fpipe.profile` or the times that they sleep, with the
host's time for a piece, from a step of stages that do nothing, and a measured link. Times are medians of rounds in
which all layouts take turns; `over` is that of 1F1B over a layout's. `bound` is what no layout of the layers costs less
than. A measured step goes from a barrier to a barrier, so that its prediction is the makespan; that of `profiled4` is
the period of a loop without barriers, and `simulated` has the cost, which is the least that a period can be.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
from benchmarks import mixed_models, models, periods, timed
from fpipe import Costs, Pipeline, Placement, Plan, handlers, interop, schedules
from fpipe.errors import ScheduleError
from fpipe.programs.footprint import footprint
from fpipe.schedules import CATALOGUE, Found
from fpipe.schedules.grouping import Grouping, times_of
from fpipe.schedules.partitions import Partition, balanced, even
from fpipe.timelines.offloading import Offloading
from fpipe.timelines.simulator import simulate_programs

T = TypeVar("T")
RANKS = {"real": 2, "timed4": 4, "timed8": 8, "profiled4": 4, "simulated": 8}
MICROBATCHES = {"real": 8, "timed4": 16, "timed8": 24, "profiled4": 16, "simulated": 32}
ROOM = {"simulated": 1.0}  # memory over that of the guides; measured tables have a quarter more, so that nothing moves
PUBLISHED = [entry.name for entry in CATALOGUE.values() if not entry.limited and entry.slices in (None, 1)]
GUIDES = {"1f1b": "1f1b", "interleaved": "interleaved-1f1b"}
HALVES = ("forward", "backward_input", "backward_weight")
WIDTH, VOCABULARY, CONTEXT = 128, 4096, 64  # of the real model
MILLISECONDS = {  # of a forward and of each half of a backward, by layer
    "timed4": (0.5, *[4] * 6, 8, 4, 8, *[4] * 4, 14),
    "timed8": (0.5, *[3] * 12, 6, 3, 6, 3, 6, *[3] * 6, 16),
}
PROFILE = pathlib.Path(__file__).with_name("unlike_layers.json")
WORK = 0.48  # seconds that all pieces of `profiled4` sleep for a microbatch
SIDE = 32  # of an activation of timed stages
LOOP = 4  # steps of a loop, of which the later half is timed
IDLE = 32  # microbatches of stages that do nothing
SEARCH = 600  # seconds that processes wait for the one that searches


# Models


class Experts(nn.Module):
    """A block whose feed-forward part is that of several experts, all of which compute every token."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.router = nn.Linear(width, experts)
        self.into = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.out = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        inner = torch.relu(torch.einsum("btw,ewi->beti", x, self.into))
        return x + torch.einsum("beti,eiw,bte->btw", inner, self.out, self.router(x).softmax(-1))


def real() -> nn.Sequential:
    """Return the layers of the real model, with the same parameters in every process."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)

    blocks = [block(), block(), block(), Experts(WIDTH, 4), block(), Experts(WIDTH, 4), block(), block()]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def deep() -> nn.Sequential:
    """Return the layers of the model whose profile is `PROFILE`."""
    torch.manual_seed(0)
    blocks = [Experts(WIDTH, 4) if at % 4 == 2 else models.layers(WIDTH, 1)[0] for at in range(12)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def profiled() -> Costs:
    """Return the profile of all layers of `deep`, each a stage."""
    module = deep()
    fine, params = interop.from_modules(module, at=range(1, len(module)), loss=loss_fn)
    return fpipe.profile(fine, params, *tokens(1), autodiff="graph", repeats=50)


def tokens(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (2 * microbatches, CONTEXT + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


class Layers:
    """The layers of a measured table: their number, and a pipeline of any cut of them."""

    def __init__(self, table: str) -> None:
        self.module = real() if table == "real" else None
        self.costs = None if self.module is not None else known(table)
        self.count = len(self.module) if self.module is not None else len(self.times["forward"])

    @property
    def times(self) -> dict[str, list[float]]:
        """The known seconds of layers that sleep."""
        if self.costs is None:
            return {}
        halves = {name: list(getattr(self.costs, name)) for name in HALVES}
        return {**halves, "backward": [a + b for a, b in zip(*map(halves.get, HALVES[1:]), strict=True)]}

    def pipeline(self, cuts: Sequence[int]) -> tuple[Pipeline, Any]:
        """Return a pipeline and its params; `cuts` are the layers with which stages begin, but for the first."""
        if self.module is not None:
            return interop.from_modules(self.module, at=cuts, loss=loss_fn)
        ends = [*zip([0, *cuts], [*cuts, self.count], strict=True)]
        forward, inputs, weights = ([sum(self.times[name][a:b]) for a, b in ends] for name in HALVES)
        inputs[0], weights[0] = 0.0, inputs[0] + weights[0]  # of its first stage nobody needs an input gradient
        stages = [partial(sleeping, seconds) for seconds in zip(forward, inputs, weights, strict=True)]
        return Pipeline(stages, models.loss_fn), {s: torch.ones(4) for s in range(len(stages))}

    def data(self, microbatches: int) -> tuple[Tensor, Tensor]:
        if self.module is None:
            return torch.ones(microbatches, SIDE), torch.zeros(microbatches, SIDE)
        return tokens(microbatches)


def known(table: str) -> Costs:
    """Return the costs of layers that sleep; the first one has no input gradient."""
    if table in MILLISECONDS:
        seconds = [1e-3 * each for each in MILLISECONDS[table]]
        return Costs(seconds, [0.0, *seconds[1:]], seconds)
    costs = Costs.from_json(json.loads(PROFILE.read_text()))
    times = {name: getattr(costs, name) for name in (*HALVES, "backward")}
    scale = WORK / sum(sum(times[name]) for name in HALVES)
    return replace(costs, **{name: [scale * each for each in listed] for name, listed in times.items()})


def sleeping(seconds: Sequence[float], w: Tensor, x: Tensor) -> Tensor:
    return timed.forward(x, w, list(seconds))


def host_time(handler: handlers.Distributed, ranks: int, link: fpipe.Link) -> float:
    """Return the seconds of an effect whose piece does nothing, with the posts of its transfers, as on rank 0.

    GPipe on p ranks runs 2 (m + p - 1) of them one after another, and 2 (p - 1) transfers.
    """
    pipeline = Pipeline([lambda w, x: x * w] * ranks, models.loss_fn)
    plan = pipeline.plan(Placement.loop(ranks), IDLE)
    step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handler, autodiff="graph")
    params, data = {handler.rank: torch.ones(SIDE)}, (torch.ones(IDLE, SIDE), torch.zeros(IDLE, SIDE))
    step(params, *data)
    seconds = 1e-3 * statistics.median(timed.milliseconds(lambda: step(params, *data)) for _ in range(models.REPEATS))
    return on_first(lambda: max(0.0, seconds - 2 * (ranks - 1) * link.latency) / (2 * (IDLE + ranks - 1)))


def with_host(costs: Costs, plan: Plan, host: float) -> Costs:
    """Return the costs of stages with the host's time in that of each piece."""
    return Grouping(plan, [1] * plan.stages, host).costs(costs, plan)


# Layouts


def of_layers(count: int, ranks: int, microbatches: int) -> Plan:
    return Plan(Placement([layer * ranks // count for layer in range(count)]), microbatches)


def by_number(placement: Placement, count: int) -> Partition:
    """Return stages of equal numbers of layers, of those between an embedding and a head."""
    first, *others = even(placement, count - 2).layers
    if not others:
        return Partition(placement, (count,))
    *others, last = others
    return Partition(placement, (first + 1, *others, last + 1))


def grouped(
    name: str,
    partition: Partition,
    plan: Plan,
    costs: Costs,
    host: float,
    limit: float | None = None,
    offload: Offloading | None = None,
    bound: float = 0.0,
) -> Found:
    """Return a schedule on stages of layers, as a result of a search; `limit` is in bytes."""
    grouping = Grouping(plan, partition.layers, host)
    placed = grouping.placed(partition.placement)
    of_stages = grouping.costs(costs, placed)
    schedule = CATALOGUE[name].schedule(placed, of_stages, memory_limit_bytes=limit)
    programs = fpipe.lower(schedule, placed, offload=offload)
    line, account = simulate_programs(programs, of_stages), footprint(programs, of_stages)
    layers = partition.layers
    return Found(name, schedule, placed, of_stages, line, bound, footprint=account, layers=layers, offload=offload)


def layouts(plan: Plan, costs: Costs, room: float = 1.0, host: float = 0.0) -> dict[str, Found]:
    """Return the layouts that are compared; `room` is the memory over that of the guides."""
    chosen = {}
    for way, name in GUIDES.items():
        placement = CATALOGUE[name].plan(plan.ranks, plan.microbatches).placement
        chosen[way] = grouped(name, by_number(placement, plan.stages), plan, costs, host)
    limit = room * max(each.bytes for each in chosen.values())
    chosen["named"] = min(named(plan, costs, host), key=lambda each: (max(limit, each.bytes), each.timeline.cost))
    for way, names in {"published": PUBLISHED, "found": None}.items():
        partition, name, *how = on_first(partial(searched, plan, costs, limit, host, names))
        chosen[way] = grouped(name, partition, plan, costs, host, *how)
    return chosen


def searched(plan: Plan, costs: Costs, limit: float, host: float, names: Sequence[str] | None) -> tuple[Any, ...]:
    """Return what a search finds, so that another process can make the same of it."""
    options: dict[str, Any] = {"memory_limit_bytes": limit, "layouts": True, "host": host, "chunks": (1, 2)}
    best = schedules.search(plan, costs, **options, names=names)
    within = limit if CATALOGUE[best.name].limited else None
    return Partition(best.plan.placement, best.layers), best.name, within, best.offload, best.lower_bound


def on_first(search: Callable[[], T]) -> T:
    """Return the result of a function that one process calls, where there are several."""
    if not dist.is_initialized():
        return search()
    results: list[Any] = [search() if dist.get_rank() == 0 else None]
    group = dist.new_group(timeout=datetime.timedelta(seconds=SEARCH))
    dist.broadcast_object_list(results, 0, group)
    return cast(T, results[0])


def named(plan: Plan, costs: Costs, host: float) -> Iterator[Found]:
    """Yield all named schedules in a fixed order on stages that are balanced by time."""
    for name in PUBLISHED:
        placement = CATALOGUE[name].plan(plan.ranks, plan.microbatches).placement
        if placement.stages <= plan.stages:
            with suppress(ScheduleError):
                yield grouped(name, balanced(placement, times_of(plan, costs)), plan, costs, host)


# Tables


def job(rank: int, ranks: int, table: str, rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield the rows of a table, as measured on rank 0."""
    layers, handler = Layers(table), handlers.Distributed(timeout=models.TIMEOUT)
    options: dict[str, Any] = {"handler": handler, "autodiff": "graph"}
    fine, params = layers.pipeline(range(1, layers.count))
    microbatches = MICROBATCHES[table]
    costs = fpipe.profile(fine, params, *layers.data(1), repeats=models.REPEATS, **options)
    link = models.ping(rank, torch.ones(1, SIDE) if table != "real" else torch.ones(2, CONTEXT, WIDTH))
    if table == "profiled4":  # the outputs of its file do not travel
        costs, link = known(table), fpipe.Link(link.latency)
    costs, host = replace(costs, communication=link, **layers.times), host_time(handler, ranks, link)
    chosen = layouts(of_layers(layers.count, ranks, microbatches), costs, ROOM.get(table, 1.25), host)
    if table == "profiled4":
        loops = {way: (loop(layers, found, options), periods.nothing) for way, found in chosen.items()}
        times = periods.measure(loops, LOOP, rounds)
    else:
        times = measure({way: step(layers, found, options) for way, found in chosen.items()}, rounds)
    yield [row(table, table, way, found, chosen, times, host) for way, found in chosen.items()]


def measure(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each way's step in each round."""
    times = {way: list[float]() for way in steps}
    for run in steps.values():
        run()
    for _ in range(rounds):
        for way, run in steps.items():
            times[way].append(timed.milliseconds(run))
    return times


def loop(layers: Layers, found: Found, options: dict[str, Any]) -> periods.Loop:
    """Return a training loop of a layout."""
    pipeline, params = layers.pipeline(found.cuts)
    optimizer = interop.optimizer(torch.optim.SGD, lr=1e-3, donate=True)
    train = fpipe.train_step(pipeline, found.schedule, found.plan, optimizer, offload=found.offload, **options)
    own = pipeline.params_on(params, found.plan, options["handler"].rank)
    return periods.Loop(train, own, optimizer, *layers.data(found.plan.microbatches))


def step(layers: Layers, found: Found, options: dict[str, Any]) -> Callable[[], object]:
    """Return a function that runs a step of a layout."""
    pipeline, params = layers.pipeline(found.cuts)
    run = fpipe.value_and_grad(pipeline, found.schedule, found.plan, offload=found.offload, **options)
    own = pipeline.params_on(params, found.plan, options["handler"].rank)
    return partial(run, own, *layers.data(found.plan.microbatches))


def simulated(names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each model."""
    for name in names:
        costs = mixed_models.costs_of(name)
        assert isinstance(costs.forward, tuple)
        plan = of_layers(len(costs.forward), RANKS["simulated"], MICROBATCHES["simulated"])
        chosen = layouts(plan, costs)
        yield [row("simulated", name, way, found, chosen, {}) for way, found in chosen.items()]


def prediction(table: str, found: Found) -> float:
    """Return the time of a step as its table has it."""
    if table == "simulated":
        return found.timeline.cost
    if table != "profiled4":
        return found.timeline.makespan
    updated = schedules.updating(found.schedule)
    return fpipe.simulate(updated, found.plan, found.costs, offload=found.offload, steps=LOOP).period


def row(
    table: str,
    model: str,
    way: str,
    found: Found,
    chosen: dict[str, Found],
    times: dict[str, list[float]],
    host: float = 0.0,
) -> dict[str, Any]:
    predicted = {name: 1e3 * prediction(table, each) for name, each in chosen.items()}
    measured = {name: statistics.median(taken) for name, taken in times.items()}
    shown = measured or predicted
    return {
        "table": table,
        "model": model,
        "way": way,
        "schedule": found.name,
        "ranks": found.plan.ranks,
        "microbatches": found.plan.microbatches,
        "layers": found.layers,
        "bytes": found.bytes,
        "moves": found.offload is not None,
        "predicted_ms": predicted[way],
        "host_ms": 1e3 * host,
        "bound_ms": 1e3 * chosen["found"].lower_bound,
        "measured_ms": measured.get(way),
        "ratio": measured[way] / predicted[way] if measured else None,
        "over": shown["1f1b"] / shown[way],
        "over_interleaved": shown["interleaved"] / shown[way],
        "rounds": len(times.get(way, ())),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"\n{first['model']}: {first['ranks']} ranks, {first['microbatches']} microbatches", end="")
    print(f", none below {first['bound_ms']:.0f} ms", end="")
    print(f", the host's time for a piece {first['host_ms']:.2f} ms" if first["rounds"] else "", end="")
    print(f", {first['rounds']} rounds" if first["rounds"] else ", simulated")
    print(f"{'':12}{'schedule':18}{'predicted':>10}{'measured':>10}{'ratio':>7}{'over':>7}{'memory':>11}  layers")
    for r in rows:
        measured = f"{r['measured_ms']:10.1f}{r['ratio']:7.3f}" if r["measured_ms"] else f"{'':17}"
        moves = " (residuals moved)" if r["moves"] else ""
        layers = " ".join(map(str, r["layers"]))
        print(f"{r['way']:12}{r['schedule']:18}{r['predicted_ms']:10.1f}{measured}", end="")
        print(f"{r['over']:7.2f}{r['bytes'] / 2**20:8.0f}MiB  {layers}{moves}", flush=True)


def mean(rows: Sequence[dict[str, Any]]) -> None:
    searched = [r for r in rows if r["table"] == "simulated" and r["way"] == "found"]
    for guide, key in (("1f1b", "over"), ("interleaved", "over_interleaved")) if searched else ():
        each = ", ".join(f"{r['model']} {r[key]:.2f}" for r in searched)
        print(
            f"faster than {guide} on equal numbers of layers: {statistics.fmean(r[key] for r in searched):.2f} ({each})"
        )


def main() -> None:
    parser = models.parser(__doc__, rounds=9, limit=600)
    parser.add_argument("--tables", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument(
        "--profile", type=partial(models.output, kinds=[".json"]), metavar="FILE.json", help="write a profile, and end"
    )
    parser.add_argument("--models", nargs="+", choices=mixed_models.MODELS, default=list(mixed_models.MODELS))
    options = parser.parse_args()
    if options.profile:
        torch.set_num_threads(1)
        options.profile.write_text(json.dumps(profiled().as_json(), indent=1) + "\n")
        return

    def parts() -> Iterator[list[dict[str, Any]]]:
        for table in options.tables:
            if table == "simulated":
                yield from simulated(options.models)
            else:
                yield from models.in_processes(job, RANKS[table], table, options.rounds, limit=options.limit)

    rows = models.report("partitions", options.json, parts(), show)
    if not options.json:
        mean(rows)


if __name__ == "__main__":
    main()
