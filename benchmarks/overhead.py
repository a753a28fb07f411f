"""Measure fpipe's own overhead in microseconds per effect, with a stub in place of autodiff.

    python -m benchmarks.overhead

`lowering` is schedule to complete programs; `local` replays them in one process; `gloo` runs two ranks on
this machine, with values of eight floats, so that nearly all of it is the cost of passing a message, in turn with
the same number of messages by bare send and receive; `between` is what a rank does between two pieces but wait for
a value. `packing` sends values of eight tensors in one message and in eight, there and back. `observing` runs steps of
`benchmarks.peers` at width 256 without an observer, with a Recording, with a Recorder that captures no step, and one
that captures each, in turn. `flight recorder` runs steps at width 32 with it and without. `graph` is the host's time of
a step with `capture=True`, all but the replay of its graph, beside that of the same step without: at width 8 nearly all
of it is the host's, on a GPU too.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fpipe
from benchmarks import models
from fpipe import Pipeline, Placement, Plan, handlers, interop, lower, schedules
from fpipe.autodiff.graph.block import Sink
from fpipe.autodiff.interface import DifferentiablePipeline, Leaves, Prepared, WeightGradients, prepared
from fpipe.devices.tape import Tape
from fpipe.effects import Send
from fpipe.flight.format import FOLDER
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

REPEATS, PAIRS, WIDTH = 15, 40, 256
ROUNDS, BLOCK, NARROW = 41, 10, 32
PLANS = {
    "gpipe 4x32": (schedules.gpipe, Placement.loop(4), 32),
    "1f1b 4x32": (schedules.one_f_one_b, Placement.loop(4), 32),
    "interleaved 4x2x32": (schedules.interleaved_1f1b, Placement.loop(4, 2), 32),
    "1f1b 16x128": (schedules.one_f_one_b, Placement.loop(16), 128),
}


class Stub:
    """A stage that computes nothing and passes on one tensor."""

    def __init__(self, stage: Stage, given: torch.Tensor) -> None:
        self.stage, self.value, self.gradient = stage, flatten(given), [given]
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


def stubs(stages: int, given: torch.Tensor) -> DifferentiablePipeline:
    pipeline = Pipeline([lambda p, x: x] * stages)
    return DifferentiablePipeline(pipeline, tuple(Stub(stage, given) for stage in pipeline.stages), loss=False)


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


def in_process() -> None:
    print(f"{'plan':20} {'effects':>8} {'lowering':>10} {'interleave':>10} {'local':>10}   µs an effect")
    for name, (schedule, placement, microbatches) in PLANS.items():
        plan = Plan(placement, microbatches)
        programs = lower(schedule, plan)
        count = sum(map(len, programs.values()))
        pieces = stubs(plan.stages, torch.zeros(8))
        run = handlers.Local().compile(programs, pieces, None)
        arguments = inputs(range(plan.stages), microbatches)
        seconds = [
            median(lambda schedule=schedule, plan=plan: lower(schedule, plan)),
            median(lambda programs=programs: interleave(programs)),
            median(lambda run=run, arguments=arguments: run(arguments)),
        ]
        print(f"{name:20} {count:8d}" + "".join(f" {1e6 * s / count:10.2f}" for s in seconds))


def beside_a_graph() -> None:
    """Time a step, and what is left of it for the host where a graph runs the rest."""
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
        print(
            f"graph: {what} of {leaves} parameters, 2 stages, {plan.microbatches} microbatches: {1e3 * alone:.2f} ms, "
            f"beside a graph {1e3 * beside:.2f} ms, ratio {beside / alone:.3f}"
        )


def over_gloo(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo")
    plan = Plan(Placement.loop(size), 32)
    programs = lower(schedules.one_f_one_b, plan)
    given = torch.zeros(8)
    run = handlers.Distributed().compile(programs, stubs(plan.stages, given), None)
    arguments = inputs(plan.stages_on(rank), plan.microbatches)
    messages = sum(isinstance(e, Send) for p in programs.values() for e in p)

    def bare() -> None:
        for _ in range(messages // 2):
            if rank == 0:
                dist.send(given, 1)
                dist.recv(given, 1)
            else:
                dist.recv(given, 0)
                dist.send(given, 0)

    for _ in range(2):
        ours = median(lambda: run(arguments))
        theirs = median(bare)
        if rank == 0:
            effects = len(programs[0])
            print(
                f"gloo, {size} ranks, 1f1b 32: {1e6 * ours / effects:.1f} µs an effect of rank 0 ({effects}), "
                f"{1e3 * ours:.2f} ms a step of {messages} messages; bare send and receive {1e3 * theirs:.2f} ms, "
                f"ratio {ours / theirs:.2f}"
            )
    recording = fpipe.Recording(programs)
    run = handlers.Distributed().compile(programs, stubs(plan.stages, given), recording)
    between = []
    for _ in range(REPEATS):
        run(arguments)
        between += recording.measurement().account(rank).between
    if rank == 0:
        print(f"between two pieces of rank 0: {1e6 * statistics.median(between):.1f} µs")
    packing(rank)
    for name in ("1f1b", "zb-v"):
        observing(rank, size, name)
    in_flight(rank, size)
    dist.destroy_process_group()


def observing(rank: int, ranks: int, name: str) -> None:
    """Print the time of a step with an observer over that without, as the median of rounds."""
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
        for what, text in compared(steps, arguments, PAIRS).items():
            if rank == 0:
                print(f"{name} at width {WIDTH}, {what}: {text}")


def compared(
    steps: Mapping[str, Callable[..., object]], arguments: tuple[Any, ...], rounds: int, block: int = 1
) -> dict[str, str]:
    """Return the times of steps over those of the one called "", in words: medians of rounds of blocks, in turn."""
    times: dict[str, list[float]] = defaultdict(list)
    for i in range(rounds + 2):
        for what in [*steps][i % len(steps) :] + [*steps][: i % len(steps)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(block):
                steps[what](*arguments)
            dist.barrier()
            times[what].append(time.perf_counter() - start)
    alone, texts = times.pop(""), {}
    for what, each in times.items():
        low, middle, high = statistics.quantiles([a / b for a, b in list(zip(each, alone, strict=True))[2:]], n=4)
        texts[what] = f"{middle:.4f} of one without, quartiles {low:.4f} to {high:.4f}"
    return texts


def in_flight(rank: int, ranks: int) -> None:
    """Print the time of a step with the flight recorder over that without, as the median of rounds of blocks."""
    layers, (batch, target) = models.layers(NARROW), models.data(NARROW)
    placement = Placement.loop(ranks)
    pipeline, params = interop.from_modules(models.stages(layers, placement.stages), loss=models.loss_fn)
    plan = pipeline.plan(placement, models.MICROBATCHES)
    steps: dict[str, Callable[..., object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for what, place in (("flight recorder", folder), ("", "/dev/null/none")):  # where no file can be made
            with mock.patch.dict(os.environ, {FOLDER: place}):
                handler = handlers.Distributed()
                steps[what] = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handler)
                steps[what](pipeline.params_on(params, plan, rank), batch, target)  # makes the files
        arguments = pipeline.params_on(params, plan, rank), batch, target
        for what, text in compared(steps, arguments, ROUNDS, BLOCK).items():
            if rank == 0:
                print(f"1f1b at width {NARROW}, {what}: {text}")


def packing(rank: int) -> None:
    """Time eight tensors of a value there and back, as one message and as eight."""
    for size in (64, 1 << 10, 1 << 13, SMALL, 1 << 17):
        payload: list[Any] = [torch.zeros(size // 4) for _ in range(8)]
        codecs = [PayloadCodec(signature_of(payload), torch.device("cpu"), small) for small in (size, 0)]

        def there_and_back(codec: PayloadCodec, payload: list[Any] = payload) -> None:
            for sends in (rank == 0, rank == 1):
                messages = codec.messages(payload) if sends else codec.buffers()
                assert messages is not None
                works = [dist.isend(x, 1 - rank) if sends else dist.irecv(x, 1 - rank) for x in messages]
                for work in works:
                    assert work is not None
                    work.wait()
                codec.payload(messages)

        packed, alone = (median(lambda codec=codec: there_and_back(codec)) for codec in codecs)
        if rank == 0:
            print(f"packing {size:7d} bytes x 8: {1e6 * packed:.0f} µs in one message, {1e6 * alone:.0f} µs in eight")


def main() -> None:
    torch.set_num_threads(1)
    in_process()
    beside_a_graph()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(over_gloo, args=(2, port), nprocs=2, start_method="spawn")


if __name__ == "__main__":
    main()
