"""How many bytes of tensors are held: at the peak of a call, and between the effects of a step.

On the CPU these are the allocator's own events, by torch's profiler: of every tensor with its size, temporaries
within operations too. It sees the thread that calls; gloo's own threads make nothing but sums of a few numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.profiler import ProfilerActivity, record_function

from fpipe.effects import Effect, Reduce, Send, Value, WeightGradient

P = ParamSpec("P")
T = TypeVar("T")
MARK = "fpipe.live"


def peak_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The most bytes of tensors that a call holds at once, beyond what was there before it.

    Args:
        call: `lambda: step(params, batch, target)`, for one; best when it has run before, for tracing takes memory.
        device: the CPU, by every event of its allocator, or a CUDA device, by the statistics of torch's caching
            allocator, whose peak this resets. On both the bytes asked for, before they are rounded up.

    >>> def call():
    ...     x = torch.zeros(1000)
    ...     return x.neg().sum()  # x, a temporary, and four bytes
    >>> peak_bytes(call)
    8004
    """
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before)
    with _recorded() as events:
        call()
    made, live, peak = dict[int, int](), 0, 0
    for event in events:
        if event.size > 0:
            made[event.address] = event.size
            live += event.size
            peak = max(peak, live)
        else:
            live -= made.pop(event.address, 0)
    return peak


class Held(NamedTuple):
    """What a rank holds when an effect begins, at most while it runs, and when it ends."""

    rank: int
    effect: Effect
    before: int
    most: int
    after: int


class LiveBytes:
    """An observer that says what each rank holds at the boundaries of effects, in bytes, on the CPU.

    Counted is what a step makes from its first effect on, less what it returns: sums of gradients, losses and outputs
    lie apart, as do parameters and the batch, which are the caller's. Memory is held by the rank whose effect makes
    it, until it is freed. Where one process plays all ranks, a value is handed over as it is, and stays its maker's;
    where that makes a copy, the copy is its receiver's. Of a stage with copies the sums that are added to another
    rank's are not returned, and count.

    Args:
        held: of the last `run`, an entry for each effect, in the order in which they ran.

    >>> import fpipe
    >>> pipeline = fpipe.Pipeline([lambda p, x: torch.tanh(x @ p)] * 2, loss=lambda y, t: (y - t).square().mean())
    >>> plan, live = pipeline.plan(fpipe.Placement.loop(ranks=2), microbatches=2), LiveBytes()
    >>> handler = fpipe.handlers.Local()
    >>> step = fpipe.value_and_grad(pipeline, fpipe.schedules.one_f_one_b, plan, handler=handler, observe=live)
    >>> params, batch, target = {0: torch.eye(8), 1: torch.eye(8)}, torch.ones(64, 8), torch.ones(64, 8)
    >>> loss, grads = step(params, batch, target)  # traces, which takes memory too
    >>> loss, grads = live.run(step, params, batch, target)
    >>> live.peak(0)  # two activations of 32 rows by 8 columns, of 4 bytes each
    2048
    """

    def __init__(self) -> None:
        self.held: list[Held] = []
        self._marks: list[_Mark] | None = None

    def run(self, step: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a step that this observes; what it returns."""
        self._marks = marks = list[_Mark]()
        try:
            with _recorded() as events:
                result = step(*args, **kwargs)
        finally:
            self._marks = None
        self.held = list(_by_rank(events, marks))
        return result

    def peak(self, rank: int) -> int:
        """The most that a rank holds at the boundary of an effect: `Report.peak_bytes`, as measured."""
        return max((max(held.before, held.after) for held in self.held if held.rank == rank), default=0)

    def begin(self, rank: int, effect: Effect) -> None:
        self._mark(rank, effect, begins=True)

    def end(self, rank: int, effect: Effect) -> None:
        self._mark(rank, effect, begins=False)

    def wait(self, rank: int, value: Value) -> None:
        """A wait makes nothing."""

    def arrive(self, rank: int, value: Value) -> None:
        """Nor does its end."""

    def _mark(self, rank: int, effect: Effect, begins: bool) -> None:
        if self._marks is not None:
            with record_function(MARK):
                self._marks.append(_Mark(rank, effect, begins))


class _Mark(NamedTuple):
    rank: int
    effect: Effect
    begins: bool


class _Event(NamedTuple):
    """Memory made, size > 0, or freed, size < 0; or a mark, without a size."""

    address: int
    size: int


@contextmanager
def _recorded() -> Iterator[list[_Event]]:
    """The events of the block, in order, once it is over."""
    events: list[_Event] = []
    with _quietly():
        profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
        profiler.start()
    try:
        yield events
    finally:
        profiler.stop()
    results: Any = profiler.profiler
    events += _in_order(results.kineto_results.experimental_event_tree())


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the profiler's own messages, for which it looks when it is first started."""
    given = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if given is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _in_order(tree: list[Any]) -> Iterator[_Event]:
    found, todo = list[Any](), [*tree]
    while todo:
        event = todo.pop()
        todo += event.children
        if event.name in (MARK, "[memory]"):
            found.append(event)
    for event in sorted(found, key=lambda e: e.start_time_ns):
        of = event.extra_fields
        if event.name == MARK:
            yield _Event(0, 0)
        elif of.device.type == "cpu" and of.alloc_size:
            yield _Event(of.ptr, of.alloc_size)


@dataclass
class _Holder:
    """What one rank holds now, and the most since it was last asked."""

    live: int = 0
    most: int = 0

    def add(self, size: int) -> None:
        self.live += size
        self.most = max(self.most, self.live)


def _by_rank(events: list[_Event], marks: list[_Mark]) -> Iterator[Held]:
    ranks = {mark.rank: _Holder() for mark in marks}
    kept, made, before = _survivors(events), dict[int, tuple[_Holder, int]](), 0
    upcoming = iter(marks)
    mark, owner = next(upcoming, None), None  # what is made before the first effect lies apart
    for at, (address, size) in enumerate(events):
        if size > 0 and at not in kept and owner is not None:
            made[address] = ranks[owner], size
            ranks[owner].add(size)
        elif size < 0 and address in made:
            holder, size = made.pop(address)
            holder.add(-size)
        elif not size and mark is not None:
            rank, effect, begins = mark
            holder = ranks[rank]
            if begins:
                before = holder.most = holder.live
            else:
                yield Held(rank, effect, before, holder.most, holder.live)
            following = next(upcoming, None)
            owner, mark = _owner(mark, following, ranks), following


def _owner(mark: _Mark, following: _Mark | None, ranks: Container[int]) -> int | None:
    """Whose is what is made from here on: within an effect its rank's, else that of the next. Sums are nobody's."""
    rank, effect, begins = mark
    if not begins:
        return rank if following is None else following.rank
    if isinstance(effect, Reduce) or isinstance(getattr(effect, "value", None), WeightGradient):
        return None
    return effect.rank if isinstance(effect, Send) and effect.rank in ranks else rank


def _survivors(events: list[_Event]) -> set[int]:
    """Where memory is made that is never freed."""
    made: dict[int, int] = {}
    for at, (address, size) in enumerate(events):
        if size > 0:
            made[address] = at
        elif size < 0:
            made.pop(address, None)
    return set(made.values())
