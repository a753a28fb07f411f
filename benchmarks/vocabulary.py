"""Compare a vocabulary that is split over all ranks with cuts of whole layers, where the head is a third of the work.

    python -m benchmarks.vocabulary                                # all tables
    python -m benchmarks.vocabulary --tables timed4 --rounds 5
    python -m benchmarks.vocabulary --json                         # a list of objects, and nothing else
    python -m benchmarks.vocabulary --out vocabulary.json          # and into a file, with the machine

- `real`: two ranks over gloo, with the tied GPT-2 of examples/gpt2_tied.py. Its head has the FLOPs of two of its four
  blocks, so that one cut of the layers is even, and splitting the vocabulary can only cost.
- `timed4`, `timed8`: four and eight ranks whose pieces sleep for the times of such a model, with two blocks for each
  rank: 10 ms for each pass of a block, and 20 on eight ranks, whose messages take the host longer. The head takes
  longer than a rank's share of all work, so that no cut of the layers is even.

Five ways take turns:

- `1f1b`: equal numbers of blocks on each rank, the embedding before the first and the head after the last.
- `balanced`: 1F1B on stages of which the longest is as short as it can be, as `interop.split(policy="balanced")` makes
  them.
- `named`: of all named schedules without copies of stages, on stages balanced like this, the one with the shortest
  predicted step.
- `dualpipe`: DualPipe on stages whose ranks have about equal times. It has two copies of each stage, so that two ranks
  share the head, and twice the parameters.
- `vocabulary`: `vocabulary-1f1b`, with equal numbers of blocks.

A prediction (`benchmarks.predictions`) is `simulate` with costs from `fpipe.profile`, the host's time for a piece, and
a measured link. Those of `real` are of the stages of each way, whose pieces take less than those of their layers
together, and of each step. `by own` is predicted with the times of the measured step's own pieces in place of the
profile's, for a machine whose speed changes within a step. A step is timed from a barrier to a barrier; times are
medians of rounds, `ratio` is that of the rounds' ratios. `over` says how many times as fast as `1f1b` a way is, the
median of the rounds'. Bytes are `fpipe.footprint` of the rank with the most.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fpipe
from benchmarks import models, partitions, predictions, recordings, timed
from examples import gpt2_tied
from fpipe import Batch, Costs, Edges, Output, Pipeline, Placement, Plan, Stage, handlers, interop
from fpipe.plan import Schedule
from fpipe.schedules import Found, vocabulary_1f1b
from fpipe.schedules.grouping import Grouping, times_of
from fpipe.schedules.partitions import balanced, levelled

WIDTH, CONTEXT = 256, 64  # of the real model
PER_BLOCK = 12 * WIDTH  # tokens whose rows of the head have the FLOPs of a block


class Table(NamedTuple):
    """The size of a table, and the milliseconds of each pass of a block that sleeps. The head is half of the blocks."""

    ranks: int
    blocks: int
    microbatches: int
    block: float = 0.0


TABLES = {"real": Table(2, 4, 8), "timed4": Table(4, 8, 16, 10), "timed8": Table(8, 16, 16, 20)}


# Models


class Embedded(nn.Module):
    """GPT-2's embeddings of tokens and of positions."""

    def __init__(self, model: gpt2_tied.GPT2) -> None:
        super().__init__()
        self.wte, self.positions = model.wte, gpt2_tied.Positions(model.wpe)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.positions(self.wte(tokens))


class Real:
    """A tied GPT-2, with the same parameters in every process."""

    def __init__(self, table: Table) -> None:
        torch.manual_seed(0)
        self.ranks, self.vocabulary = table.ranks, table.blocks // 2 * PER_BLOCK
        self.model = gpt2_tied.GPT2(table.blocks, WIDTH, 4, self.vocabulary, CONTEXT)

    def in_layers(self, cuts: Sequence[int]) -> tuple[Pipeline, Any]:
        """Return the pipeline of some stages and its params; `cuts` are the layers with which they begin."""
        head = nn.Sequential(self.model.ln_f, self.model.lm_head)
        layers = nn.Sequential(Embedded(self.model), *self.model.h, head)
        return interop.from_modules(layers, at=cuts, loss=gpt2_tied.cross_entropy)

    def in_parts(self) -> tuple[Pipeline, Any]:
        """Return the pipeline in which each rank has a part of the vocabulary, and its params."""
        return gpt2_tied.split_vocabulary(self.model, self.ranks)

    @property
    def activation(self) -> int:
        """The elements of an activation of a microbatch."""
        return models.ROWS * CONTEXT * WIDTH

    def data(self, microbatches: int, in_parts: bool) -> tuple[Any, Tensor | None]:
        tokens, target = gpt2_tied.counting(models.ROWS * microbatches, self.vocabulary, CONTEXT, seed=0)
        return ({"tokens": tokens, "targets": target}, None) if in_parts else (tokens, target)


class Timed:
    """A model whose pieces sleep; its layers sleep for as long in each of their passes."""

    activation = timed.SIDE

    def __init__(self, table: Table) -> None:
        block = 1e-3 * table.block
        self.ranks, self.seconds = table.ranks, [0.0, *[block] * table.blocks, block * table.blocks / 2]

    def in_layers(self, cuts: Sequence[int]) -> tuple[Pipeline, Any]:
        ends = [0, *cuts, len(self.seconds)]
        passes = [[sum(self.seconds[begin:end])] * 3 for begin, end in pairwise(ends)]
        return self._of(passes, Edges.chain(len(passes)))

    def in_parts(self) -> tuple[Pipeline, Any]:
        """Return stages that sleep as long; the forward of a part of the head computes its input gradient too."""
        _, *blocks, head = self.seconds
        none, block, part = [0.0] * 3, sum(blocks) / self.ranks, head / self.ranks
        passes = [*[none] * self.ranks, *[[block] * 3] * self.ranks, *[[2 * part, 0.0, part]] * self.ranks, none]
        return self._of(passes, Edges.vocabulary(self.ranks))

    def _of(self, passes: Sequence[Sequence[float]], edges: Edges) -> tuple[Pipeline, Any]:
        stages = [
            Stage(partial(sleeping, each), [*map(Output, reads)] or [Batch()])
            for each, reads in zip(passes, edges.reads, strict=True)
        ]
        return Pipeline(stages, models.loss_fn), {stage: torch.ones(4) for stage in range(len(stages))}

    def data(self, microbatches: int, in_parts: bool) -> tuple[Any, Tensor | None]:
        return torch.ones(microbatches, timed.SIDE), torch.zeros(microbatches, timed.SIDE)


def sleeping(seconds: Sequence[float], w: Tensor, x: Tensor, *more: Tensor) -> Tensor:
    return timed.forward(sum(more, x), w, list(seconds))


# Steps


class Way(NamedTuple):
    """A way to run the model; `layers` are those of each stage, where stages are made of whole ones."""

    name: str
    schedule: Schedule
    plan: Plan
    layers: Sequence[int] = ()


class Process:
    """One process of a table."""

    def __init__(self, rank: int, name: str) -> None:
        self.table = TABLES[name]
        self.is_timed = name != "real"
        self.model = Timed(self.table) if self.is_timed else Real(self.table)
        self.handler = handlers.Distributed(timeout=models.TIMEOUT)
        self.link = predictions.ping(rank)
        ranks, microbatches, size = self.table.ranks, self.table.microbatches, self.model.activation
        stage = timed.brief if self.is_timed else predictions.busy
        self.host = predictions.Host(self.handler, ranks, self.link, microbatches, stage, size=size)
        self.count = self.table.blocks + 2
        of_layers, _ = self.model.in_layers(range(1, self.count))
        self.layers = of_layers.plan(partitions.of_layers(self.count, ranks, microbatches).placement, microbatches)
        self.of_layers = self.profile(in_parts=False)

    def profile(self, in_parts: bool, cuts: Sequence[int] | None = None, repeats: int = models.REPEATS) -> Costs:
        """Return the costs of the parts of the vocabulary, or of stages of layers.

        Args:
            cuts: the layers with which the stages begin; by default each is a stage.
        """
        cuts = range(1, self.count) if cuts is None else cuts
        stages = self.model.in_parts() if in_parts else self.model.in_layers(cuts)
        count = 1 if self.is_timed else models.PROFILED
        options: dict[str, Any] = {"handler": self.handler, "autodiff": "graph", "repeats": repeats}
        costs = fpipe.profile(*stages, *self.model.data(count, in_parts), microbatches=count, **options)
        return replace(costs, communication=self.link)

    def ways(self) -> dict[str, Way]:
        """Return the ways that take turns, cut and chosen by a profile of the layers."""
        ranks, costs = self.table.ranks, self.of_layers
        times = times_of(self.layers, costs)
        host = self.host.seconds()
        grouped = partial(partitions.grouped, plan=self.layers, costs=costs, host=host)
        chain, both_ways = Placement.loop(ranks), Placement.both_ways(ranks)
        chosen = {
            "1f1b": grouped("1f1b", partitions.by_number(chain, self.count)),
            "balanced": grouped("1f1b", balanced(chain, times)),
            "named": min(filter(has_no_copies, partitions.named(self.layers, costs, host)), key=makespan),
            "dualpipe": grouped("dualpipe", levelled(both_ways, times)),
        }
        ways = {way: Way(each.name, each.schedule, each.plan, each.layers) for way, each in chosen.items()}
        pipeline, _ = self.model.in_parts()
        plan = pipeline.plan(Placement.vocabulary(ranks), self.table.microbatches)
        return ways | {"vocabulary": Way("vocabulary-1f1b", vocabulary_1f1b, plan)}

    def costs(self, way: Way) -> Costs:
        """Return the costs of a way's stages, by a new profile."""
        if way.layers and self.is_timed:  # the sleeps of layers add up
            return Grouping(self.layers, way.layers).costs(self.of_layers, way.plan)
        return self.profile(not way.layers, [*accumulate(way.layers)][:-1], predictions.REPEATS)

    def step(self, way: Way) -> recordings.Recorded:
        in_parts, cuts = not way.layers, [*accumulate(way.layers)][:-1]
        pipeline, params = self.model.in_parts() if in_parts else self.model.in_layers(cuts)
        options: dict[str, Any] = {"handler": self.handler, "autodiff": "graph"}
        make = partial(fpipe.value_and_grad, pipeline, way.schedule, way.plan, **options)
        own = pipeline.params_on(params, way.plan, self.handler.rank)
        data = self.model.data(self.table.microbatches, in_parts)
        return recordings.recorded(make, fpipe.lower(way.schedule, way.plan), own, *data)


def has_no_copies(found: Found) -> bool:
    return all(len(ranks) == 1 for ranks in found.plan.placement.holders)


def makespan(found: Found) -> float:
    return found.timeline.makespan


def job(rank: int, ranks: int, name: str, rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield the rows of a table, as measured on rank 0."""
    process = Process(rank, name)
    ways = process.ways()
    steps = {key: process.step(way) for key, way in ways.items()}
    costs = {key: process.costs(way) for key, way in ways.items()}

    def predict(key: str) -> predictions.Prediction:
        if not process.is_timed:
            costs[key] = process.costs(ways[key])
        return predictions.Prediction(steps[key].programs, costs[key], process.host.measure())

    results = predictions.compare(steps, predict, rounds)
    sizes = {key: None if process.is_timed else most_bytes(way, costs[key]) for key, way in ways.items()}
    yield [row(name, key, way, results) | {"bytes": sizes[key]} for key, way in ways.items()]


def most_bytes(way: Way, costs: Costs) -> float:
    return max(each.total for each in fpipe.footprint(fpipe.lower(way.schedule, way.plan), costs))


def row(name: str, key: str, way: Way, results: dict[str, predictions.Rounds]) -> dict[str, Any]:
    first, own = results["1f1b"], results[key]
    return {
        "table": name,
        "way": key,
        "schedule": way.name,
        "ranks": way.plan.ranks,
        "microbatches": way.plan.microbatches,
        "layers": way.layers,
        **own.figures(),
        "predicted_over": statistics.median(a / b for a, b in zip(first.predicted, own.predicted, strict=True)),
        "over": statistics.median(first.over(own)),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("\n{table}: {ranks} ranks, {microbatches} microbatches, {rounds} rounds".format(**rows[0]))
    print(f"{'':12}{'schedule':18}{'predicted':>10}{'measured':>10}{'ratio':>7}{'by own':>8}{'ratio':>7}", end="")
    print(f"{'over 1f1b':>11}{'predicted':>11}{'memory':>11}  layers")
    for r in rows:
        memory = "" if r["bytes"] is None else f"{r['bytes'] / 2**20:.1f} MiB"
        layers = " ".join(map(str, r["layers"]))
        print(f"{r['way']:12}{r['schedule']:18}{r['predicted_ms']:10.1f}{r['measured_ms']:10.1f}", end="")
        print(f"{r['ratio']:7.3f}{r['by_own_ms']:8.1f}{r['own_ratio']:7.3f}", end="")
        print(f"{r['over']:11.2f}{r['predicted_over']:11.2f}{memory:>11}  {layers}".rstrip(), flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=3, limit=900)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    parts = (
        part
        for name in options.tables
        for part in models.in_processes(job, TABLES[name].ranks, name, options.rounds, limit=options.limit)
    )
    models.run("vocabulary", options, parts, show)


if __name__ == "__main__":
    main()
