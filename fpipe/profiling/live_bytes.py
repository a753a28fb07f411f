"""Measure the live bytes of tensors by the allocator's events: the peak of a call, and at each effect of a step.

On the CPU torch's profiler records every allocation with its size, temporaries within operations included. It sees
only the calling thread; gloo's threads allocate nothing but sums of a few numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.profiler import ProfilerActivity, record_function

from fpipe.devices import Device, device_of
from fpipe.effects import Effect, Reduce, Send, WeightGradient
from fpipe.errors.arguments import checked
from fpipe.handlers.protocol import Observer

P = ParamSpec("P")
T = TypeVar("T")
MARK = "fpipe.live"


@checked()
def peak_bytes(call: Callable[[], object], device: torch.device | str | Device = "cpu") -> int:
    """Return the most bytes of tensors that are live during a call, beyond those that were live before it.

    Args:
        call: for example `lambda: step(params, batch, target)`. Call it once before, because tracing takes memory.
        device: the CPU, measured by every event of its allocator; or a CUDA device, measured by the statistics of
            torch's caching allocator, whose peak this resets. Both count requested bytes, before rounding.

    >>> def call():
    ...     x = torch.zeros(1000)
    ...     return x.neg().sum()  # x, a temporary, and four bytes
    >>> peak_bytes(call)
    8004
    """
    if (counted := device_of(device).requested_peak(call)) is not None:
        return counted
    with _recorded() as events:
        call()
    memory, blocks = _Memory(), _Blocks()
    for event in events:
        _count(event, memory, blocks)
    return memory.peak


class EffectMemory(NamedTuple):
    """The live bytes of a rank when an effect begins, their peak while it runs, and when it ends."""

    rank: int
    effect: Effect
    before: int
    peak: int
    after: int


class LiveBytes(Observer):
    """An observer that measures the live bytes of each rank at the begin and end of every effect, on the CPU.

    It counts what a step allocates from its first effect on, except for what it returns: sums of gradients, losses and
    outputs. Parameters and the batch belong to the caller and do not count. Memory counts for the rank whose effect
    allocates it, until it is freed. Where one process plays all ranks, a value is passed on without a copy and counts
    for its producer; a copy counts for its receiver. A copy of a stage does not return the sums that are added to
    another rank's, so these count.

    Args:
        effects: of the last `run`, one entry for each effect, in the order in which they ran.

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
        self.effects: list[EffectMemory] = []
        self._marks: list[_Mark] | None = None

    def __repr__(self) -> str:
        return f"<LiveBytes: {len(self.effects)} effects>"

    def run(self, step: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a step that has this observer, and return its result."""
        self._marks = marks = list[_Mark]()
        try:
            with _recorded() as events:
                result = step(*args, **kwargs)
        finally:
            self._marks = None
        self.effects = list(_by_effect(events, marks))
        return result

    def peak(self, rank: int) -> int:
        """Return a rank's most live bytes at the begin or end of an effect: `Report.peak_bytes`, measured."""
        return max((max(memory.before, memory.after) for memory in self.effects if memory.rank == rank), default=0)

    def begin(self, rank: int, effect: Effect) -> None:
        self._mark(rank, effect, begins=True)

    def end(self, rank: int, effect: Effect) -> None:
        self._mark(rank, effect, begins=False)

    def _mark(self, rank: int, effect: Effect, begins: bool) -> None:
        if self._marks is not None:
            with record_function(MARK):
                self._marks.append(_Mark(rank, effect, begins))


class _Mark(NamedTuple):
    rank: int
    effect: Effect
    begins: bool


class _Event(NamedTuple):
    """An allocation (size > 0), a release (size < 0), or a mark (size 0)."""

    address: int
    size: int


@contextmanager
def _recorded() -> Iterator[list[_Event]]:
    """Record the block's events; the list is filled when the block ends."""
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
    """Silence the profiler's own messages. It reads the variable when it is first started."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _in_order(tree: list[Any]) -> Iterator[_Event]:
    events, todo = list[Any](), [*tree]
    while todo:
        event = todo.pop()
        todo += event.children
        if event.name in (MARK, "[memory]"):
            events.append(event)
    for event in sorted(events, key=lambda e: e.start_time_ns):
        fields = event.extra_fields
        if event.name == MARK:
            yield _Event(0, 0)
        elif fields.device.type == "cpu" and fields.alloc_size:
            yield _Event(fields.ptr, fields.alloc_size)


@dataclass
class _Memory:
    """Live bytes, and their peak since it was last reset."""

    live: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


_Blocks = dict[int, tuple[_Memory, int]]
"""Address -> the memory that an allocation counts for, and its size."""


def _count(event: _Event, payer: _Memory | None, blocks: _Blocks) -> None:
    """Count an allocation for a memory, or a release for the one that its allocation counts for."""
    address, size = event
    if size > 0 and payer is not None:
        blocks[address] = payer, size
        payer.add(size)
    elif size < 0 and address in blocks:
        owner, size = blocks.pop(address)
        owner.add(-size)


def _by_effect(events: list[_Event], marks: list[_Mark]) -> Iterator[EffectMemory]:
    """Count the events after each mark for the rank that `_payer` names; those before the first mark for none."""
    memories, blocks = {mark.rank: _Memory() for mark in marks}, _Blocks()
    at_marks, payer, before = zip(marks, [*marks[1:], None], strict=True), None, 0
    for event in _without_results(events):
        if event.size:
            _count(event, payer, blocks)
            continue
        mark, following = next(at_marks)
        memory = memories[mark.rank]
        if mark.begins:
            before = memory.peak = memory.live
        else:
            yield EffectMemory(mark.rank, mark.effect, before, memory.peak, memory.live)
        payer = _payer(mark, following, memories)
    assert next(at_marks, None) is None, "torch's profiler has lost a mark"


def _payer(mark: _Mark, following: _Mark | None, memories: Mapping[int, _Memory]) -> _Memory | None:
    """Return the memory that allocations after a mark count for: of the running effect's rank, else the next effect's.

    Sums of gradients count for none. A send's allocations count for its receiver if this process plays that rank.
    """
    rank, effect, begins = mark
    if not begins:
        return memories[rank if following is None else following.rank]
    if isinstance(effect, Reduce) or isinstance(getattr(effect, "value", None), WeightGradient):
        return None
    return memories[effect.rank if isinstance(effect, Send) and effect.rank in memories else rank]


def _without_results(events: list[_Event]) -> list[_Event]:
    """Leave out the allocations that are never released: the results of the step."""
    unreleased: dict[int, int] = {}  # address -> index of its allocation
    for at, (address, size) in enumerate(events):
        if size > 0:
            unreleased[address] = at
        elif size < 0:
            unreleased.pop(address, None)
    results = set(unreleased.values())
    return [event for at, event in enumerate(events) if at not in results]
