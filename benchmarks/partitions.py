"""Compare layouts whose cuts are searched with cuts into equal numbers of layers: measured steps, and predicted ones.

    python -m benchmarks.partitions                                # all tables
    python -m benchmarks.partitions --tables simulated --models gemma
    python -m benchmarks.partitions --json                         # a list of objects, and nothing else
    python -m benchmarks.partitions --out partitions.json          # and into a file, with the machine
    python -m benchmarks.partitions --profile benchmarks/unlike_layers.json      # of this machine

- `real`: two ranks over gloo. An embedding, dense blocks, two mixtures of experts, and a head that takes as long as
  several blocks.
- `timed4`, `timed8`: four and eight ranks whose pieces sleep for the costs of such layers, in milliseconds.
- `copied4`: four ranks whose pieces sleep for an encoder that takes as long as the eight blocks of a language model
  behind it, for these, and for a head. What is found has copies of the encoder's stage.
- `profiled4`: four ranks whose pieces sleep for the profile of a model, in proportion, with its bytes:
  `benchmarks/unlike_layers.json`. `drawn` is the layout of the gallery, which was found without the host's time.
- `moved4`: four ranks whose pieces sleep and keep residuals, by 1F1B, and by 1F1B in less memory than it needs: what
  has no room is moved to the host, or recomputed. The most live bytes of a rank are measured, too, beside
  `verify(costs=).peak_bytes`.
- `simulated`: the models of `benchmarks.mixed_models` on eight ranks, with 32 microbatches.

Five layouts take turns. `1f1b` and `interleaved` are what torch's and Megatron's guides recommend: stages of equal
numbers of layers, the embedding before the first and the head after the last of them, and 1F1B with one stage on a rank
or with two. `named` is the schedule that is best on stages balanced by time, as `interop.split(policy="balanced")`
makes them. `published` is the best of all schedules in a fixed order, each on the cuts that are searched for it, and
`found` is what `schedules.search(layouts=True)` finds, from a profile of the layers. The last three keep to the memory
that the larger of the first two takes, with more where they are measured (`ROOM`), the former where it can.

Measured is the period of a loop of `train_step` without barriers, because the search makes that least. A layout is
chosen once, by the costs of the layers, from `fpipe.profile` or the times that they sleep. Its prediction
(`benchmarks.predictions`) is the period by `simulate`, with a profile of its stages, in `real` right before each loop,
the time of the host for a piece, and a measured link. Times are medians of rounds in which all layouts take turns;
`over` is that of 1F1B over a layout's, `ratio` is measured over predicted, both of each round. `by own` is predicted
with the times of the measured steps' own pieces in place of the profile's, for a machine whose speed changes within a
loop. `searched` is the cost by the profile that the layouts are chosen by, which is one for all of them: the least that
a period can be, as in `simulated`. `bound` is what no layout of the layers costs less than.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fpipe
from benchmarks import mixed_models, models, periods, predictions, recordings, timed
from benchmarks.offload import peak
from fpipe import Costs, Pipeline, Placement, Plan, handlers, interop, schedules
from fpipe.effects import Offload, Recompute
from fpipe.errors import ScheduleError
from fpipe.programs.footprint import footprint
from fpipe.schedules import CATALOGUE, Found
from fpipe.schedules.grouping import Grouping, times_of
from fpipe.schedules.partitions import Partition, balanced, even
from fpipe.timelines.offloading import Offloading
from fpipe.timelines.simulator import simulate_programs

RANKS = {"real": 2, "timed4": 4, "timed8": 8, "copied4": 4, "profiled4": 4, "moved4": 4, "simulated": 8}
MICROBATCHES = {
    "real": 8,
    "timed4": 16,
    "timed8": 24,
    "copied4": 12,
    "profiled4": 16,
    "moved4": 16,
    "simulated": 32,
}
ROOM = {"simulated": 1.0, "real": 1.5}
"""Memory over that of the guides, by default 1.25, so that nothing moves: a copy would take a core from a rank."""
PUBLISHED = [entry.name for entry in CATALOGUE.values() if not entry.limited and entry.slices in (None, 1)]
GUIDES = {"1f1b": "1f1b", "interleaved": "interleaved-1f1b"}
HALVES = ("forward", "backward_input", "backward_weight")
WIDTH, VOCABULARY, CONTEXT, ROWS = 128, 4096, 64, 2  # of the real model; sequences of a microbatch
MILLISECONDS = {  # of a forward and of each half of a backward, by layer
    "timed4": (0.5, *[4] * 6, 8, 4, 8, *[4] * 4, 14),
    "timed8": (0.5, *[3] * 12, 6, 3, 6, 3, 6, *[3] * 6, 16),
    "copied4": (32, *[4] * 8, 8),
    "moved4": (5,) * 8,
}
PROFILE = pathlib.Path(__file__).with_name("unlike_layers.json")
DRAWN = Partition(Placement([0, 1, 2, 1, 0, 3]), (3, 1, 4, 3, 1, 2))  # of `PROFILE`, in docs/gallery.md
WORK = 0.48  # seconds that all pieces of `profiled4` sleep for a microbatch
SIDE, WIDE = 32, 2**18  # of an activation of timed stages, and of those that keep residuals
LIMIT = 0.7  # of the bytes of 1F1B, in which `moved4` has to do
LOOP = 4  # steps of a loop, of which the later half is timed


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
    rows = torch.randint(VOCABULARY, (ROWS * microbatches, CONTEXT + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


class Layers:
    """The layers of a measured table: their number, and a pipeline of any cut of them."""

    def __init__(self, table: str) -> None:
        self.module = real() if table == "real" else None
        self.keeps_residuals = table == "moved4"
        self.costs = None if self.module is not None else known(table)
        self.count = len(self.module) if self.module is not None else len(self.times["forward"])
        self.plan = of_layers(self.count, RANKS[table], MICROBATCHES[table])

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
        keeps = [(end - begin) * self.keeps_residuals for begin, end in ends]
        seconds = zip(forward, inputs, weights, strict=True)
        stages = [partial(sleeping, *each) for each in zip(seconds, keeps, strict=True)]
        loss = squares if self.keeps_residuals else models.loss_fn
        return Pipeline(stages, loss), {s: torch.ones(4) for s in range(len(stages))}

    @property
    def activation(self) -> int:
        """The elements of an activation of a microbatch."""
        if self.module is not None:
            return ROWS * CONTEXT * WIDTH
        return WIDE if self.keeps_residuals else SIDE

    def data(self, microbatches: int) -> tuple[Tensor, Tensor]:
        if self.module is not None:
            return tokens(microbatches)
        return torch.ones(microbatches, self.activation), torch.zeros(microbatches, self.activation)


def squares(y: Tensor, t: Tensor) -> Tensor:
    """Return the mean square error; torch's own returns a number in memory as large as `y`."""
    return (y - t).square().mean()


def known(table: str) -> Costs:
    """Return the costs of layers that sleep; the first one has no input gradient."""
    if table in MILLISECONDS:
        seconds = [1e-3 * each for each in MILLISECONDS[table]]
        return Costs(seconds, [0.0, *seconds[1:]], seconds)
    costs = Costs.from_json(json.loads(PROFILE.read_text()))
    times = {name: getattr(costs, name) for name in (*HALVES, "backward")}
    scale = WORK / sum(sum(times[name]) for name in HALVES)
    return replace(costs, **{name: [scale * each for each in listed] for name, listed in times.items()})


def sleeping(seconds: Sequence[float], residuals: int, w: Tensor, x: Tensor) -> Tensor:
    """Sleep in each pass, as a stage that keeps some residuals of the size of its input."""
    for _ in range(residuals):
        x = torch.tanh(x * w.mean())
    return timed.forward(x, w, list(seconds))


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


def layouts(
    plan: Plan, costs: Costs, room: float = 1.0, host: float = 0.0, drawn: Partition | None = None
) -> dict[str, Found]:
    """Return the layouts that are compared, and one that is drawn; `room` is the memory over that of the guides."""
    chosen = {}
    for way, name in GUIDES.items():
        placement = CATALOGUE[name].plan(plan.ranks, plan.microbatches).placement
        chosen[way] = grouped(name, by_number(placement, plan.stages), plan, costs, host)
    limit = room * max(each.bytes for each in chosen.values())
    chosen["named"] = min(named(plan, costs, host), key=lambda each: (max(limit, each.bytes), each.timeline.cost))
    for way, names in {"published": PUBLISHED, "found": None}.items():
        partition, name, *how = predictions.on_first(partial(searched, plan, costs, limit, host, names))
        chosen[way] = grouped(name, partition, plan, costs, host, *how)
    if drawn is not None:
        chosen["drawn"] = grouped("zb-auto", drawn, plan, costs, host, limit)
    return chosen


def limited(plan: Plan, costs: Costs, host: float) -> dict[str, Found]:
    """Return 1F1B, and 1F1B in less memory, with residuals moved to the host, and recomputed."""
    layout = partial(grouped, "1f1b", by_number(Placement.loop(plan.ranks), plan.stages), plan, costs, host)
    plain = layout()
    useless = replace(plain.costs, offload=1e6, fetch=1e6)
    limit, slower = LIMIT * plain.bytes, 0.5
    return {
        "1f1b": plain,
        "moved": layout(offload=fpipe.offload(limit, plain.costs, slower=slower)),
        "recomputed": layout(offload=fpipe.offload(limit, useless, slower=slower, recompute=True)),
    }


def searched(plan: Plan, costs: Costs, limit: float, host: float, names: Sequence[str] | None) -> tuple[Any, ...]:
    """Return what a search finds, so that another process can make the same of it."""
    options: dict[str, Any] = {"memory_limit_bytes": limit, "layouts": True, "host": host, "chunks": (1, 2)}
    best = schedules.search(plan, costs, **options, names=names)
    within = limit if CATALOGUE[best.name].limited else None
    return Partition(best.plan.placement, best.layers), best.name, within, best.offload, best.lower_bound


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
    process = Process(rank, ranks, table)
    chosen = process.layouts()
    loops = {way: process.loop(found) for way, found in chosen.items()}
    costs = {way: process.costs(found) for way, found in chosen.items()} if process.is_timed else {}

    def predict(way: str) -> predictions.Prediction:
        if not process.is_timed:
            costs[way] = process.costs(chosen[way])
        return predictions.Prediction(loops[way].programs, costs[way], process.host.measure(), LOOP)

    results = predictions.compare(loops, predict, rounds, partial(predictions.period, steps=LOOP))
    sizes = {way: process.sizes(found) if table == "moved4" else {} for way, found in chosen.items()}
    rows = {way: row(table, table, way, found, chosen, results, process.host) for way, found in chosen.items()}
    yield [each | sizes[way] for way, each in rows.items()]


class Process:
    """One process of a table."""

    def __init__(self, rank: int, ranks: int, table: str) -> None:
        self.table, self.layers, self.is_timed = table, Layers(table), table != "real"
        self.handler = handlers.Distributed(timeout=models.TIMEOUT)
        self.optimizer = interop.optimizer(torch.optim.SGD, lr=1e-3, donate=True)
        link = predictions.ping(rank)
        stage = timed.brief if self.is_timed else predictions.busy
        microbatches, size = MICROBATCHES[table], self.layers.activation
        self.host = predictions.Host(self.handler, ranks, link, microbatches, stage, size=size)
        # The outputs of the file of `profiled4` do not travel.
        self.link = fpipe.Link(link.latency) if table == "profiled4" else link

    def layouts(self) -> dict[str, Found]:
        """Return the layouts that are compared."""
        fine, plan = range(1, self.layers.count), self.layers.plan
        costs = known(self.table) if self.table == "profiled4" else self.profile(fine, models.REPEATS)
        costs = replace(costs, communication=self.link, **self.layers.times)
        host = self.host.seconds()
        if self.table == "moved4":
            return limited(plan, costs, host)
        return layouts(plan, costs, ROOM.get(self.table, 1.25), host, DRAWN if self.table == "profiled4" else None)

    def profile(self, cuts: Sequence[int], repeats: int) -> Costs:
        """Return the costs of stages; `cuts` are the layers with which they begin, but for the first."""
        count = 1 if self.is_timed else models.PROFILED
        options: dict[str, Any] = {"handler": self.handler, "autodiff": "graph", "optimizer": self.optimizer}
        options |= {"microbatches": count, "repeats": repeats}
        costs = fpipe.profile(*self.layers.pipeline(cuts), *self.layers.data(count), **options)
        return replace(costs, communication=self.link)

    def costs(self, found: Found) -> Costs:
        """Return the costs of a layout's stages, as the machine is when it is called."""
        return self.profile(found.cuts, predictions.REPEATS)

    def loop(self, found: Found) -> recordings.Recorded:
        """Return a training loop of a layout."""
        pipeline, params, options = self.step(found)
        updated = schedules.updating(found.schedule)
        recording = fpipe.Recording(fpipe.lower(updated, found.plan, offload=found.offload))
        train = fpipe.train_step(pipeline, found.schedule, found.plan, self.optimizer, observe=recording, **options)
        loop = periods.Loop(train, params, self.optimizer, *self.layers.data(found.plan.microbatches))
        return recordings.Recorded(loop, recording, runs=LOOP - LOOP // 2)

    def sizes(self, found: Found) -> dict[str, Any]:
        """Return the most live bytes of the rank that has the most, predicted and measured."""
        (pipeline, params, options), live = self.step(found), fpipe.LiveBytes()
        step = fpipe.value_and_grad(pipeline, found.schedule, found.plan, observe=live, **options)
        measured = peak(step, live, params, *self.layers.data(found.plan.microbatches))
        costs = self.profile(found.cuts, 1)
        report = fpipe.verify(found.schedule, found.plan, costs=costs, offload=found.offload)
        return {"predicted_bytes": max(report.peak_bytes or (0,)), "measured_bytes": measured}

    def step(self, found: Found) -> tuple[Pipeline, Any, dict[str, Any]]:
        """Return a layout's pipeline, this rank's params, and the options of a step."""
        pipeline, params = self.layers.pipeline(found.cuts)
        options = {"handler": self.handler, "autodiff": "graph", "offload": found.offload}
        return pipeline, pipeline.params_on(params, found.plan, self.handler.rank), options


def simulated(names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each model."""
    for name in names:
        costs = mixed_models.costs_of(name)
        assert isinstance(costs.forward, tuple)
        plan = of_layers(len(costs.forward), RANKS["simulated"], MICROBATCHES["simulated"])
        chosen = layouts(plan, costs)
        yield [row("simulated", name, way, found, chosen, {}) for way, found in chosen.items()]


def row(
    table: str,
    model: str,
    way: str,
    found: Found,
    chosen: dict[str, Found],
    results: dict[str, predictions.Rounds],
    host: predictions.Host | None = None,
) -> dict[str, Any]:
    results = results or {name: predictions.Rounds([1e3 * each.timeline.cost]) for name, each in chosen.items()}
    figures = results[way].figures() if host else {"predicted_ms": results[way].predicted[0], "rounds": 0}
    return {
        "table": table,
        "model": model,
        "way": way,
        "schedule": found.name,
        "ranks": found.plan.ranks,
        "microbatches": found.plan.microbatches,
        "layers": found.layers,
        "bytes": found.bytes,
        "residuals": residuals(found),
        "host_ms": host.milliseconds if host else 0.0,
        "searched_ms": 1e3 * found.timeline.cost,
        "bound_ms": 1e3 * chosen["found"].lower_bound if "found" in chosen else None,
        "over": over(results["1f1b"], results[way]),
        "over_interleaved": over(results["interleaved"], results[way]) if "interleaved" in chosen else None,
        **figures,
    }


def over(first: predictions.Rounds, other: predictions.Rounds) -> float:
    """Return how many times as fast the other one is: measured, if it is, and predicted otherwise."""
    pairs = zip(first.measured or first.predicted, other.measured or other.predicted, strict=True)
    return statistics.median(a / b for a, b in pairs)


def residuals(found: Found) -> str:
    """Return what happens to residuals that have no room: "moved", "recomputed", or both."""
    programs = fpipe.lower(found.schedule, found.plan, offload=found.offload)
    kinds = {type(effect) for program in programs.values() for effect in program}
    return " and ".join(text for kind, text in {Offload: "moved", Recompute: "recomputed"}.items() if kind in kinds)


def show(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"\n{first['model']}: {first['ranks']} ranks, {first['microbatches']} microbatches", end="")
    print(f", none below {first['bound_ms']:.0f} ms" if first["bound_ms"] else "", end="")
    print(f", the host's time for a piece {first['host_ms']:.2f} ms" if first["rounds"] else "", end="")
    print(f", {first['rounds']} rounds" if first["rounds"] else ", simulated")
    print(f"{'':12}{'schedule':18}{'searched':>10}{'predicted':>10}", end="")
    print(f"{'measured':>10}{'ratio':>7}{'quartiles':>14}", end="")
    print(f"{'by own':>8}{'ratio':>7}", end="")
    print(f"{'over':>7}{'memory':>11}  layers")
    for r in rows:
        measured = f"{'':46}"
        if r["rounds"]:
            measured = f"{r['measured_ms']:10.1f}{r['ratio']:7.3f}{predictions.quartiles(r, 'ratio'):>14}"
            measured += f"{r['by_own_ms']:8.1f}{r['own_ratio']:7.3f}"
        moves = f" (residuals {r['residuals']})" if r["residuals"] else ""
        layers = " ".join(map(str, r["layers"]))
        print(f"{r['way']:12}{r['schedule']:18}{r['searched_ms']:10.1f}{r['predicted_ms']:10.1f}{measured}", end="")
        print(f"{r['over']:7.2f}{r['bytes'] / 2**20:8.0f}MiB  {layers}{moves}", end="")
        live = "; live MiB predicted {:.2f}, measured {:.2f}"
        has_live = "measured_bytes" in r
        print(live.format(r["predicted_bytes"] / 2**20, r["measured_bytes"] / 2**20) if has_live else "", flush=True)


def mean(rows: Sequence[dict[str, Any]]) -> None:
    searched = [r for r in rows if r["table"] == "simulated" and r["way"] == "found"]
    for guide, key in (("1f1b", "over"), ("interleaved", "over_interleaved")) if searched else ():
        each = ", ".join(f"{r['model']} {r[key]:.2f}" for r in searched)
        print(
            f"faster than {guide} on equal numbers of layers: {statistics.fmean(r[key] for r in searched):.2f} ({each})"
        )


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=900)
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

    rows = models.run("partitions", options, parts(), show)
    if not options.json:
        mean(rows)


if __name__ == "__main__":
    main()
