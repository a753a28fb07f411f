"""The bytes that a rank holds, as values are made and used up. No torch.

Invariant: memory that several values share counts once, from when the first of them is made until the last is gone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from fpipe.costs import Costs
from fpipe.effects import Recv, Send, Value
from fpipe.programs.completions import receipts
from fpipe.programs.interning import Interning
from fpipe.programs.program import Program, Programs
from fpipe.tables import is_uniform


class LiveMemory:
    """The bytes of the values that one rank holds now, by their ids.

    >>> from fpipe import Placement, Plan
    >>> from fpipe.costs import Shared
    >>> from fpipe.effects import Activation, Residuals
    >>> shared = [Shared(8, (Activation(0, 0), Residuals(0, 0)))]
    >>> interning = Interning(Plan(Placement.loop(1, chunks=2), 4))
    >>> live = LiveMemory(Costs(activation=10, residuals=100, shared=shared), interning, rank=0)
    >>> for name in (Activation(0, 3), Residuals(0, 3), Residuals(0, 2)):
    ...     live.add(interning.id(name))
    >>> live.bytes
    202.0
    """

    def __init__(self, costs: Costs, interning: Interning, rank: int) -> None:
        self.costs, self.interning, self.rank, self.bytes = costs, interning, rank, 0.0
        self._here: set[int] = set()
        self._holders: Counter[int] = Counter()  # of each shared memory of each microbatch
        self._sizes: dict[int, tuple[float, list[tuple[int, float]]]] = {}

    def add(self, id_: int) -> None:
        """Count a value; one that is here counts once."""
        if id_ in self._here:
            return
        self._here.add(id_)
        size, shared = self._size(id_)
        self.bytes += size
        for holder, part in self._shared(id_, shared):
            self._holders[holder] += 1
            if self._holders[holder] > 1:
                self.bytes -= part

    def remove(self, id_: int) -> None:
        """Count a value no longer."""
        self._here.remove(id_)
        size, shared = self._size(id_)
        self.bytes -= size
        for holder, part in self._shared(id_, shared):
            self._holders[holder] -= 1
            if self._holders[holder]:
                self.bytes += part

    def _shared(self, id_: int, shared: list[tuple[int, float]]) -> Iterator[tuple[int, float]]:
        microbatch = id_ % self.interning.plan.microbatches
        return ((first + microbatch, part) for first, part in shared)

    def _size(self, id_: int) -> tuple[float, list[tuple[int, float]]]:
        """Return a value's bytes, and those that it shares; the same for a block of microbatches of equal size."""
        interning, microbatches = self.interning, self.interning.plan.microbatches
        alike = id_ // interning.block if not self.costs.sizes else id_
        if alike not in self._sizes:
            name: Any = interning.name(id_)
            family, groups = id_ - id_ % microbatches, enumerate(self.costs.shared)
            factor = self.costs.sizes[name.microbatch] if self.costs.sizes and hasattr(name, "microbatch") else 1.0
            shared = [(i * microbatches, s.bytes * factor) for i, s in groups if family in map(interning.id, s.names)]
            size = bytes_on(self.rank, name, self.costs, interning)
            if not is_uniform(interning.table.values[type(name)].bytes):
                return size, shared
            self._sizes[alike] = size, shared
        return self._sizes[alike]


def bytes_on(rank: int, name: Any, costs: Costs, interning: Interning) -> float:
    """Return a value's bytes on a rank: of what travels, the part that stages there read."""
    return interning.table.values[type(name)].bytes(name, costs, interning.plan, rank)


def peak_bytes(programs: Programs, costs: Costs, interning: Interning) -> tuple[float, ...]:
    """Return for each rank the most bytes that it holds when an effect ends, in program order."""
    return tuple(max(live, default=0.0) for live in live_bytes(programs, costs, interning))


def live_bytes(programs: Programs, costs: Costs, interning: Interning) -> Iterator[list[float]]:
    """Yield for each rank the bytes that it holds as each effect of its program ends."""
    senders = defaultdict[int, dict[int, Program]](dict)
    for rank, program in programs.items():
        for peer in {effect.rank for effect in program if isinstance(effect, Send)}:
            senders[peer][rank] = program
    for rank in range(len(programs)):
        yield list(_live(programs[rank], costs, interning, receipts(senders[rank], rank)))


def _live(program: Program, costs: Costs, interning: Interning, receipts: Mapping[Value, int]) -> Iterator[float]:
    last, live = _last_uses(program, interning, receipts), LiveMemory(costs, interning, program.rank)
    gone = defaultdict[int, list[int]](list)
    for id_, time in last.items():
        gone[time].append(id_)
    for at, effect in enumerate(program):
        for id_ in gone[2 * at]:
            live.remove(id_)
        for id_ in interning.ids(effect).gives:
            if id_ in last:
                live.add(id_)
        yield live.bytes
        for id_ in gone[2 * at + 1]:
            live.remove(id_)


def _last_uses(program: Program, interning: Interning, receipts: Mapping[Value, int]) -> dict[int, int]:
    """Return when each id that is needed goes: 2 * at, before the effect there gives anything, or 2 * at + 1, after it.

    Args:
        receipts: for each received value, how many sends to its producer are complete when it arrives.
    """
    last: dict[int, int] = {}
    posted, complete = defaultdict[int, list[int]](list), defaultdict[int, int](int)
    awaited: dict[int, tuple[int, int]] = {}
    for at, effect in enumerate(program):
        needs, gives, frees = interning.ids(effect)
        last |= dict.fromkeys(needs, 2 * at + 1)
        last |= dict.fromkeys(frees, 2 * at)
        if isinstance(effect, Send):
            posted[effect.rank] += needs
        elif isinstance(effect, Recv):
            awaited[gives[0]] = effect.rank, receipts[effect.value]
        else:
            for id_ in needs:
                if id_ in awaited:  # its first use
                    peer, count = awaited.pop(id_)
                    last |= dict.fromkeys(posted[peer][complete[peer] : count], 2 * at)
                    complete[peer] = max(complete[peer], count)
    for peer, ids in posted.items():
        last |= dict.fromkeys(ids[complete[peer] :], 2 * len(program))
    return last
