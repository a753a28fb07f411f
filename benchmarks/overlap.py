"""Measure overlaps of a forward and a backward whose stages hold collectives: in turns, and one after the other.

    python -m benchmarks.overlap                        # four rows
    python -m benchmarks.overlap --layer 2 4 8 --collective 2
    python -m benchmarks.overlap --json                 # a list of objects, and nothing else
    python -m benchmarks.overlap --out overlap.json     # and into a file, with the machine

Two processes share every layer, as in tensor parallelism: each of a stage's four layers computes, and then sums its
result over both (`fpipe.parallel.all_reduce`), in the forward and in the backward. A layer's compute sleeps, so that it
needs no core: as long as `--layer` says in the forward, half of that for the gradient of the inputs, and half for that
of the weights.

Sums go over a link on which each takes `--collective` ms, one after another, from the moment at which both processes
have posted it. The numbers are in memory that the processes share, so that a sum needs no core while it is on its way.
One of gloo does: its threads take about 0.8 ms of CPU time for a sum in each process on a virtual machine, which they
take from the thread that computes wherever cores are few.

The program is dualpipe-v of one rank: two stages, 8 microbatches, most of them in overlaps. An object has the
milliseconds of one overlap, as medians of rounds in which all ways take turns:

- layer_ms, collective_ms: of one layer's forward, and of one sum.
- compute_ms: measured, the same layers without sums.
- posted_ms: measured, the same layers with sums over a link that takes no time, in each process alone. The thread that
  computes also posts the sums and fetches their results. No order hides that.
- link_ms: the time of all sums on the link.
- bound_ms: the larger of the last two. Nothing is faster.
- unbraided_ms: measured, the forward and then the backward.
- braided_ms: measured, in turns.
- speedup, over_bound, over_larger, each with its quartiles: unbraided over braided, braided over the bound, and braided
  over the larger of compute and link, of the same round.
- overlaps, rounds: in a step, and that were measured.

Before anything is timed, the gradients of both ways are compared in bits.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from benchmarks import models, predictions, timed
from fpipe import Pipeline, Placement, Plan, handlers, parallel, schedules
from fpipe.effects import Effect, Forward, Overlap
from fpipe.handlers.calls import FUNCTIONS
from fpipe.handlers.protocol import Observer

LAYERS = 4  # of a stage
SIDE = 8
SLOTS = 64  # of exchanges in memory, many more than are under way at once
POLL = 1e-4  # seconds between two looks for what another process has posted
WAYS = ("compute", "posted", "unbraided", "braided")


class Link:
    """Numbers of processes in memory that they share, and a link that each exchange occupies for a time.

    An exchange begins when all processes have posted it, and the one before has ended. All compute the same ends.

    Args:
        seconds: of an exchange.
    """

    def __init__(self, path: str, rank: int, size: int, seconds: float) -> None:
        count = SLOTS * size * (2 + SIDE)
        shared = torch.from_file(path, shared=True, size=count, dtype=torch.float64).numpy()
        memory = shared.reshape(SLOTS, size, 2 + SIDE)
        self.numbers, self.times, self.values = memory[:, :, 0], memory[:, :, 1], memory[:, :, 2:]
        self.rank, self.seconds, self.posted = rank, seconds, 0
        self.ends = [0.0]

    def post(self, x: Tensor) -> int:
        """Return the number of the exchange, from 1."""
        self.posted += 1
        at = self.posted % SLOTS, self.rank
        self.values[at], self.times[at] = x, time.perf_counter()
        self.numbers[at] = self.posted  # last, for others read what has a number
        return self.posted

    def sum(self, number: int) -> Any:
        """Return the sum over all processes; wait for them, and for the link."""
        while len(self.ends) <= number:
            following = len(self.ends)
            slot = following % SLOTS
            while self.numbers[slot].min() < following:
                time.sleep(POLL)
            self.ends.append(max(self.ends[-1], self.times[slot].max()) + self.seconds)
        if (left := self.ends[number] - time.perf_counter()) > 0:
            time.sleep(left)
        return self.values[number % SLOTS].sum(0)


class LateWork(dist._Work):
    """A sum that is complete when the link says so."""

    def __init__(self, link: Link, x: Tensor) -> None:
        super().__init__()
        self.link, self.x, self.number = link, x, link.post(x)

    def wait(self, *limit: Any) -> bool:
        self.x.copy_(torch.from_numpy(self.link.sum(self.number)))
        return True


class SlowGroup(dist.ProcessGroup):
    """The processes of a link, which sum one row over it."""

    link: Link

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.name = ""

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self.name

    def allreduce(self, tensors: list[Tensor], options: Any) -> LateWork:
        return LateWork(self.link, tensors[0])


def slow_group(seconds: float) -> SlowGroup:
    """Return a group of all processes, whose sums take a time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with tempfile.NamedTemporaryFile() as file:
        paths = [file.name]
        dist.broadcast_object_list(paths)
        group = _group(Link(paths[0], rank, size, seconds))
        dist.barrier()  # the file has no name when all processes have it
    return group


def free_group() -> SlowGroup:
    """Return a group of all processes, whose sums take no time, and leave numbers as they are."""
    with tempfile.NamedTemporaryFile() as file:
        return _group(Link(file.name, 0, 1, 0.0))


def _group(link: Link) -> SlowGroup:
    if "slow" not in dist.Backend.backend_list:
        dist.Backend.register_backend("slow", SlowGroup, devices=["cpu"])
    group: Any = dist.new_group(backend="slow")
    group.link = link
    return group  # type: ignore[no-any-return]


class Spans(Observer):
    """Measures the overlaps of a step, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def begin(self, rank: int, effect: Effect) -> None:
        self.start = time.perf_counter()

    def end(self, rank: int, effect: Effect) -> None:
        if isinstance(effect, Overlap):
            self.seconds.append(time.perf_counter() - self.start)


class Way:
    """A step whose overlaps run in one of the ways."""

    def __init__(self, way: str, group: SlowGroup, layer: float) -> None:
        def layers(ws: list[Tensor], x: Tensor) -> Tensor:
            for w in ws:
                x = Layer.apply(x, w, layer)
                x = x if way == "compute" else parallel.all_reduce(x, group)
            return x

        self.spans, plan = Spans(), Plan(Placement.v(1), models.MICROBATCHES)
        pipeline = Pipeline([layers] * plan.stages, models.loss_fn)
        # A forward of one's own is not taken apart, so the backward runs after it.
        functions = {} if way != "unbraided" else {Forward: lambda calls, e: FUNCTIONS[Forward](calls, e)}
        self.step = fpipe.value_and_grad(
            pipeline,
            schedules.dualpipe_v,
            plan,
            handler=handlers.Local(functions=functions),
            autodiff="graph",
            observe=self.spans,
        )
        self.params = {stage: [torch.full((SIDE, SIDE), 0.5) for _ in range(LAYERS)] for stage in range(plan.stages)}
        self.data = torch.ones(models.MICROBATCHES, SIDE), torch.zeros(models.MICROBATCHES, SIDE)

    def gradients(self) -> Any:
        return self.step(self.params, *self.data)[1]

    def milliseconds(self) -> float:
        """Run a step; return the time of one overlap."""
        dist.barrier()
        self.spans.seconds.clear()
        self.gradients()
        return 1e3 * statistics.median(self.spans.seconds)


class Layer(torch.autograd.Function):
    """The timed forward of `benchmarks.timed`, whose backward takes as long as it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.seconds = seconds
        return timed.forward(x, w, [seconds] * 3)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        half = ctx.seconds / 2
        return timed.backward_input(cotangent, w, half), timed.backward_weight(cotangent, x, w, half), None


def job(rank: int, processes: int, layers: Sequence[float], collective: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Run one process: yield a row for each time of a layer, as measured on rank 0."""
    group, free = slow_group(collective), free_group()
    for layer in layers:
        ways = {way: Way(way, free if way == "posted" else group, layer) for way in WAYS}
        *_, one, other = (ways[way].gradients() for way in WAYS)
        assert all(torch.equal(a, b) for stage in one for a, b in zip(one[stage], other[stage], strict=True))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                times[way].append(ways[way].milliseconds())
        yield row(layer, collective, times, len(ways["braided"].spans.seconds))


def row(layer: float, collective: float, times: dict[str, list[float]], overlaps: int) -> dict[str, Any]:
    link = 1e3 * 2 * LAYERS * collective
    compute, posted, unbraided, braided = (statistics.median(times[way]) for way in WAYS)
    speedups = [a / b for a, b in zip(times["unbraided"], times["braided"], strict=True)]
    over, over_larger = (
        [a / max(b, link) for a, b in zip(times["braided"], times[way], strict=True)] for way in ("posted", "compute")
    )
    return {
        "layer_ms": 1e3 * layer,
        "collective_ms": 1e3 * collective,
        "compute_ms": compute,
        "posted_ms": posted,
        "link_ms": link,
        "bound_ms": max(posted, link),
        "unbraided_ms": unbraided,
        "braided_ms": braided,
        **predictions.spread("speedup", speedups),
        **predictions.spread("over_bound", over),
        **predictions.spread("over_larger", over_larger),
        "overlaps": overlaps,
        "rounds": len(over),
    }


def show(r: dict[str, Any]) -> None:
    print("layer {layer_ms:g} ms, sum {collective_ms:g} ms: ".format(**r), end="")
    print("compute {compute_ms:.1f}, posted {posted_ms:.1f}, link {link_ms:g}; ".format(**r), end="")
    print("unbraided {unbraided_ms:.1f}, braided {braided_ms:.1f}: ".format(**r), end="")
    print("{speedup:.2f} times as fast, {over_bound:.3f} of the bound, ".format(**r), end="")
    print("{over_larger:.3f} of the larger of compute and link".format(**r), flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=600)
    parser.add_argument(
        "--layer", nargs="+", type=models.positive, default=[1, 2, 4, 8], help="milliseconds of a forward"
    )
    parser.add_argument("--collective", type=models.positive, default=2, help="ms of a sum over processes")
    options = parser.parse_args()
    arguments = [1e-3 * ms for ms in options.layer], 1e-3 * options.collective, options.rounds
    parts = ([measured] for measured in models.in_processes(job, 2, *arguments, limit=options.limit))
    models.run("overlap", options, parts, lambda part: show(*part))


if __name__ == "__main__":
    main()
