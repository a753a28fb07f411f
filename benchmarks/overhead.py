"""Measure fpipe's own overhead in microseconds per effect, with a stub in place of autodiff.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --parts flight --json     # a list of objects, and nothing else

- `effects`: lowering is schedule to complete programs; local replays them in one process.
- `graph`: the host's time of a step with `capture=True`, all but the replay of its graph, beside that of the same step
  without: at width 8 nearly all of it is the host's, on a GPU too.
- `gloo`: two ranks on this machine, with values of eight floats, so that nearly all of it is the cost of passing a
  message, in turn with the same number of messages by bare send and receive. `between_us` is what a rank does between
  two pieces but wait for a value.
- `packing`: eight tensors of a value in one message and in eight, there and back.
- `observing`: steps of `benchmarks.peers` at width 256 without an observer, with a Recording, with a Recorder that
  captures no step, and one that captures each, in turn.
- `flight`: steps at width 32 with the flight recorder and without, in turn. Equal steps differ by some percent with the
  order in which their handlers are made: in each round both are made anew, in both orders, and the ratio of a round is
  the geometric mean of the two. `records` is how many the recorder writes in a step, and `share` is the time of these,
  measured alone, over that of the step.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fpipe
from benchmarks import models
from fpipe import Pipeline, Placement, Plan, handlers, interop, lower, schedules
from fpipe.autodiff.graph.block import Sink
from fpipe.autodiff.interface import DifferentiablePipeline, Leaves, Prepared, WeightGradients, prepared
from fpipe.devices.tape import Tape
from fpipe.effects import Forward, Send
from fpipe.flight.format import FOLDER
from fpipe.flight.reading import read_rank
from fpipe.flight.recording import Recording
from fpipe.handlers.distributed.signature import signature_of
from fpipe.handlers.distributed.wire import SMALL, PayloadCodec
from fpipe.handlers.gradients import copied
from fpipe.handlers.protocol import Inputs
from fpipe.programs.interleaving import interleave
from fpipe.schedules.catalogue import CATALOGUE
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Flat, flatten
from fpipe.stages.stage import Stage
from fpipe.tensorboard import Recorder
from fpipe.training.step import Step

REPEATS, WIDTH = 15, 256
BLOCK, NARROW = 10, 32
PARTS = ("effects", "graph", "gloo", "packing", "observing", "flight")
PLANS = {
    "gpipe 4x32": (schedules.gpipe, Placement.loop(4), 32),
    "1f1b 4x32": (schedules.one_f_one_b, Placement.loop(4), 32),
    "interleaved 4x2x32": (schedules.interleaved_1f1b, Placement.loop(4, 2), 32),
    "1f1b 16x128": (schedules.one_f_one_b, Placement.loop(16), 128),
}


class Relay:
    """A stage that computes nothing and passes on one tensor."""

    def __init__(self, stage: Stage, value: torch.Tensor) -> None:
        self.stage, self.value, self.gradient = stage, flatten(value), [value]
        self.prepared = prepared(stage, {})

    def prepare(self, params: Any) -> Prepared:
        return self.prepared

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        return self.value, self, state

    def backward(
        self, residuals: Any, cotangents: Leaves, sink: Sink | None = None
    ) -> tuple[WeightGradients, dict[int, Leaves]]:
        return WeightGradients([]), dict.fromkeys(self.stage.sources, self.gradient)

    def backward_input(self, residuals: Any, cotangents: Leaves) -> tuple[dict[int, Leaves], Any]:
        return dict.fromkeys(self.stage.sources, self.gradient), self

    def backward_weight(self, deferred: Any, sink: Sink | None = None) -> WeightGradients:
        return WeightGradients([])


def relays(stages: int, value: torch.Tensor) -> DifferentiablePipeline:
    pipeline = Pipeline([lambda p, x: x] * stages)
    return DifferentiablePipeline(pipeline, tuple(Relay(stage, value) for stage in pipeline.stages), loss=False)


def median(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median seconds of a call, after two uncounted ones."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        function()
        if i > 1:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def inputs(stages: range | tuple[int, ...], microbatches: int) -> Inputs:
    data = [Microbatch(None, None)] * microbatches
    return Inputs({s: {} for s in stages}, [{}], data, rows=8 * microbatches, weighed=True)


def in_process() -> Iterator[dict[str, Any]]:
    """Yield microseconds per effect of what happens in one process."""
    for name, (schedule, placement, microbatches) in PLANS.items():
        plan = Plan(placement, microbatches)
        programs = lower(schedule, plan)
        pieces = relays(plan.stages, torch.zeros(8))
        run = handlers.Local().compile(programs, pieces, None)
        arguments = inputs(range(plan.stages), microbatches)
        calls: dict[str, Callable[[], object]] = {
            "lowering_us": lambda schedule=schedule, plan=plan: lower(schedule, plan),
            "interleaving_us": lambda programs=programs: interleave(programs),
            "local_us": lambda run=run, arguments=arguments: run(arguments),
        }
        count = sum(map(len, programs.values()))
        times = {what: 1e6 * median(call) / count for what, call in calls.items()}
        yield {"part": "effects", "plan": name, "effects": count, **times}


def beside_a_graph() -> Iterator[dict[str, Any]]:
    """Yield the milliseconds of a step, and of what is left of it for the host where a graph runs the rest."""
    modules = models.stages(models.layers(8), 2)
    pipeline, params = interop.from_modules(modules, loss=models.loss_fn)
    plan = pipeline.plan(Placement.loop(2), models.MICROBATCHES)
    generator = torch.Generator().manual_seed(1)
    batch, target = torch.randn(2, models.MICROBATCHES * models.ROWS, 4, 8, generator=generator)
    leaves = len(flatten(params).leaves)
    sgd = interop.optimizer(torch.optim.SGD, lr=1e-3, donate=True)

    def times(capture: bool) -> tuple[float, float]:
        options: dict[str, Any] = {"handler": handlers.Local(), "capture": capture}
        gradients = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, **options)
        training = fpipe.train_step(pipeline, schedules.one_f_one_b, plan, sgd, **options)
        steps = [
            lambda: gradients(params, batch, target),
            lambda: training(copies, sgd.init(copies), batch, target),
        ]
        copies = copied(params)
        for step in (*steps, *steps):
            step()
        with mock.patch.object(Tape, "replay", return_value=None):
            first, second = map(median, steps)
        return first, second

    plain, replayed = times(False), times(True)
    for what, alone, beside in zip(("value_and_grad", "train_step"), plain, replayed, strict=True):
        yield {
            "part": "graph",
            "what": what,
            "parameters": leaves,
            "ms": 1e3 * alone,
            "beside_a_graph_ms": 1e3 * beside,
            "ratio": beside / alone,
        }


def job(rank: int, ranks: int, parts: Sequence[str], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield the rows of each part, as measured on rank 0."""
    if "gloo" in parts:
        yield [passing(rank, ranks)]
    if "packing" in parts:
        yield [packing(rank, size) for size in (64, 1 << 10, 1 << 13, SMALL, 1 << 17)]
    if "observing" in parts:
        for name in ("1f1b", "zb-v"):
            yield observing(rank, ranks, name, rounds)
    if "flight" in parts:
        yield in_flight(rank, ranks, rounds)


def passing(rank: int, ranks: int) -> dict[str, Any]:
    """Return the cost of an effect over gloo, and of what a rank does between two of them."""
    plan = Plan(Placement.loop(ranks), 32)
    programs = lower(schedules.one_f_one_b, plan)
    value = torch.zeros(8)
    pieces, arguments = relays(plan.stages, value), inputs(plan.stages_on(rank), plan.microbatches)
    run = handlers.Distributed().compile(programs, pieces, None)
    messages = sum(isinstance(e, Send) for p in programs.values() for e in p)

    def bare() -> None:
        for _ in range(messages // 2):
            if rank == 0:
                dist.send(value, 1)
                dist.recv(value, 1)
            else:
                dist.recv(value, 0)
                dist.send(value, 0)

    turns = [(median(lambda: run(arguments)), median(bare)) for _ in range(2)]
    ours, theirs = map(statistics.mean, zip(*turns, strict=True))
    recording = fpipe.Recording(programs)
    run = handlers.Distributed().compile(programs, pieces, recording)
    between: list[float] = []
    for _ in range(REPEATS):
        run(arguments)
        between += recording.measurement().account(rank).between
    return {
        "part": "gloo",
        "effects": len(programs[0]),
        "messages": messages,
        "us": 1e6 * ours / len(programs[0]),
        "ms": 1e3 * ours,
        "bare_ms": 1e3 * theirs,
        "ratio": ours / theirs,
        "between_us": 1e6 * statistics.median(between),
    }


def packing(rank: int, size: int) -> dict[str, Any]:
    """Time eight tensors of a value there and back, as one message and as eight."""
    payload: list[Any] = [torch.zeros(size // 4) for _ in range(8)]
    codecs = [PayloadCodec(signature_of(payload), torch.device("cpu"), small) for small in (size, 0)]

    def there_and_back(codec: PayloadCodec) -> None:
        for sends in (rank == 0, rank == 1):
            messages = codec.messages(payload) if sends else codec.buffers()
            assert messages is not None
            works = [dist.isend(x, 1 - rank) if sends else dist.irecv(x, 1 - rank) for x in messages]
            for work in works:
                assert work is not None
                work.wait()
            codec.payload(messages)

    packed, alone = (1e6 * median(lambda codec=codec: there_and_back(codec)) for codec in codecs)
    return {"part": "packing", "bytes": size, "one_message_us": packed, "eight_messages_us": alone}


def observing(rank: int, ranks: int, name: str, rounds: int) -> list[dict[str, Any]]:
    """Return the time of steps with observers over that without."""
    layers, (batch, target) = models.layers(WIDTH), models.data(WIDTH)
    entry = CATALOGUE[name]
    placement = entry.plan(ranks, models.MICROBATCHES).placement
    pipeline, params = interop.from_modules(models.stages(layers, placement.stages), loss=models.loss_fn)
    plan = pipeline.plan(placement, models.MICROBATCHES)
    schedule, handler = entry.schedule(plan), handlers.Distributed()
    arguments = pipeline.params_on(params, plan, rank), batch, target
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        recorders = (Recorder(Path(folder, str(every)), every) for every in (1_000_000, 1))
        idle, busy = map(stack.enter_context, recorders)
        watched = {"": None, "a Recording": fpipe.Recording(lower(schedule, plan))}
        watched |= {"a Recorder": idle, "a captured step": busy}
        steps = {
            what: fpipe.value_and_grad(pipeline, schedule, plan, handler=handler, observe=each)
            for what, each in watched.items()
        }
        ratios = relative_times(steps, arguments, rounds)
    setting = {"part": "observing", "schedule": name, "width": WIDTH}
    return [{**setting, "what": what, **quartiles(each)} for what, each in ratios.items()]


def in_flight(rank: int, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Return the time of steps with the flight recorder over that without."""
    layers, (batch, target) = models.layers(NARROW), models.data(NARROW)
    placement = Placement.loop(ranks)
    pipeline, params = interop.from_modules(models.stages(layers, placement.stages), loss=models.loss_fn)
    plan = pipeline.plan(placement, models.MICROBATCHES)
    arguments = pipeline.params_on(params, plan, rank), batch, target

    logging.getLogger("fpipe.flight").setLevel(logging.ERROR)  # which warns where no file can be made

    def made(folder: str) -> Step:
        with mock.patch.dict(os.environ, {FOLDER: folder}):
            step = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handlers.Distributed())
            step(*arguments)  # makes the file
        return step

    def pair(ways: Mapping[str, str]) -> list[float]:
        gc.collect()  # the handlers of the pair before
        steps = {what: made(folder) for what, folder in ways.items()}
        return relative_times(steps, arguments, 2, BLOCK)["recorded"]

    with tempfile.TemporaryDirectory() as folder:
        ways = {"recorded": folder, "": "/dev/null/none"}  # where no file can be made
        orders = ways, dict(reversed(ways.items()))
        ratios = [statistics.geometric_mean(chain(*map(pair, orders[:: 1 - 2 * (i % 2)]))) for i in range(rounds)]
        step, record = made(folder), record_seconds(folder)
        seconds, records = median(lambda: step(*arguments)), records_of(step)
    row = {"part": "flight", "schedule": "1f1b", "width": NARROW, "what": "the flight recorder", **quartiles(ratios)}
    return [{**row, "records": records, "record_us": 1e6 * record, "share": records * record / seconds}]


def records_of(step: Step) -> int:
    """Return how many records the flight recorder has written in the last step."""
    assert step.handler.flight is not None
    recording = read_rank(step.handler.flight)
    assert recording is not None
    return sum(each.step == recording.entries[-1].step for each in recording.entries)


def record_seconds(folder: str) -> float:
    """Return the seconds of one record."""
    write = Recording(Path(folder, "alone"), {"process": 0}).writer("effect", str(Forward(0, 0)))
    return median(lambda: [write() for _ in range(1000)]) / 1000


def relative_times(
    steps: Mapping[str, Callable[..., object]], arguments: tuple[Any, ...], rounds: int, block: int = 1
) -> dict[str, list[float]]:
    """Return the times of steps over those of the one called "": of blocks in turn, after two uncounted rounds."""
    times: dict[str, list[float]] = defaultdict(list)
    for i in range(rounds + 2):
        for what in [*steps][i % len(steps) :] + [*steps][: i % len(steps)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(block):
                steps[what](*arguments)
            dist.barrier()
            times[what].append(time.perf_counter() - start)
    alone = times.pop("")
    return {what: [a / b for a, b in zip(each, alone, strict=True)][2:] for what, each in times.items()}


def quartiles(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median and the quartiles of the rounds' ratios."""
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [*ratios] * 3
    return {"ratio": middle, "ratio_quartiles": [low, high], "rounds": len(ratios)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    for each in rows:
        print(TEXTS[each["part"]].format(**each), flush=True)


TEXTS = {
    "effects": "{plan}, {effects} effects: lowering {lowering_us:.2f} µs an effect, "
    "interleaving {interleaving_us:.2f}, local {local_us:.2f}",
    "graph": "{what} of {parameters} parameters: {ms:.2f} ms, beside a graph {beside_a_graph_ms:.2f}, "
    "ratio {ratio:.3f}",
    "gloo": "gloo, 1f1b, {effects} effects on rank 0: {us:.1f} µs an effect; {ms:.2f} ms for {messages} messages, bare "
    "{bare_ms:.2f}, ratio {ratio:.2f}; {between_us:.1f} µs between two pieces",
    "packing": "8 tensors of {bytes} bytes: {one_message_us:.0f} µs in one message, {eight_messages_us:.0f} in eight",
    "observing": "{schedule} at width {width}, {what}: {ratio:.4f} of a step without, "
    "quartiles {ratio_quartiles[0]:.4f} to {ratio_quartiles[1]:.4f}",
}
TEXTS["flight"] = TEXTS["observing"] + "; {records} records of {record_us:.2f} µs are {share:.2%} of it"


def measured(parts: Sequence[str], rounds: int, limit: float) -> Iterator[list[dict[str, Any]]]:
    if "effects" in parts:
        yield from ([row] for row in in_process())
    if "graph" in parts:
        yield from ([row] for row in beside_a_graph())
    if {*parts} - {"effects", "graph"}:
        yield from models.in_processes(job, 2, parts, rounds, limit=limit)


def main() -> None:
    parser = models.parser(__doc__, rounds=41, limit=900)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models.run("overhead", options, measured(options.parts, options.rounds, options.limit), show)


if __name__ == "__main__":
    main()
