"""The bytes of live values on a rank. No torch.

Invariants:
- Memory that several values share counts once, from the first value's start until the last value's end.
- Residuals that come back from the host are in memory of their own. Those that are recomputed share what the forward
  reads again; of the rest they have memory of their own. What is computed from them shares theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fpipe.costs import Costs
from fpipe.effects import Fetch, Parameters, Recompute, Recv, Send, Value
from fpipe.plan import Plan
from fpipe.programs.completions import send_completions
from fpipe.programs.interning import Interning
from fpipe.programs.program import Program, Programs
from fpipe.programs.residuals import moves
from fpipe.tables import is_uniform, slice_of

RECEIVED = "received"
PREPARED = "prepared"
SUMS = "sums of gradients"
"""Owners of memory that are no kind of value; the sums are counted apart."""


class LiveMemory:
    """The bytes of the live values on one rank, by their ids.

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
        self.costs, self.interning, self.rank = costs, interning, rank
        self.bytes = self.prepared = prepared_on(interning.plan, costs, rank)
        self._live: dict[int, None] = {}  # in the order in which they came
        self._users: Counter[int] = Counter()  # live values of each shared memory of each slice of each microbatch
        self._copies: dict[tuple[int, int], int] = {}  # of what came again: (value, shared memory) -> its own memory
        self._last_copy = 0
        self._alike = 1 if costs.sizes else interning.block_size  # ids that follow one another and have the same size
        self._sizes: dict[int, tuple[float, list[tuple[int, float]]]] = {}

    def add(self, id_: int, effect: Any = None) -> None:
        """Count a value; a value that is live already is not counted again.

        Args:
            effect: that gives it, where residuals are moved or recomputed.
        """
        if id_ not in self._live:
            if effect is not None:
                self._place(id_, effect)
            self._live[id_] = None
            self._count(id_, 1)

    def remove(self, id_: int) -> None:
        """Stop counting a value."""
        del self._live[id_]
        self._count(id_, -1)
        if self._copies:
            for memory in self._memories(id_):
                self._copies.pop((id_, memory), None)

    def by(self, owner: Callable[[int], str]) -> dict[str, float]:
        """Return the bytes of each owner of values; memory that several share counts to the value that came first."""
        result, counted = defaultdict[str, float](float), set[int]()
        for id_ in self._live:
            size, shared = self._sizes.get(id_ // self._alike) or self._size(id_)
            for memory, (_, part) in zip(self._memories(id_), shared, strict=True):
                memory = self._copies.get((id_, memory), memory)
                size -= part if memory in counted else 0.0
                counted.add(memory)
            result[owner(id_)] += size
        return {**result, **({PREPARED: self.prepared} if self.prepared else {})}

    def _place(self, id_: int, effect: Any) -> None:
        """Note which copies of shared memories a value has: those of what the effect needs, or new ones."""
        again = isinstance(effect, Fetch | Recompute)
        if not again and not self._copies:
            return
        needs, _, _ = self.interning.ids(effect)
        for memory in self._memories(id_):
            needed = next((n for n in needs if memory in self._memories(n)), None)
            if needed is not None:
                copy = self._copies.get((needed, memory), memory)
            elif again:
                copy = self._last_copy = self._last_copy - 1
            else:
                continue
            if copy != memory:
                self._copies[id_, memory] = copy

    def _memories(self, id_: int) -> list[int]:
        _, shared = self._sizes.get(id_ // self._alike) or self._size(id_)
        return [first + id_ % self.interning.plan.microbatches for first, _ in shared]

    def _count(self, id_: int, sign: int) -> None:
        size, shared = self._sizes.get(id_ // self._alike) or self._size(id_)
        self.bytes += sign * size
        for first, part in shared:
            memory = first + id_ % self.interning.plan.microbatches
            if self._copies:
                memory = self._copies.get((id_, memory), memory)
            others = self._users[memory] - (sign < 0)
            self._users[memory] += sign
            if others:  # it counts with them
                self.bytes -= sign * part

    def _size(self, id_: int) -> tuple[float, list[tuple[int, float]]]:
        """Return a value's bytes, and its shared memories with their bytes; cached for all ids with the same result."""
        interning, sizes, name = self.interning, self.costs.sizes, self.interning.name(id_)
        microbatches, groups = interning.plan.microbatches, len(self.costs.shared)
        factor = sizes[name.microbatch] if sizes and hasattr(name, "microbatch") else 1.0
        if self.costs.has_sizes_of_slices:
            first, of_shared = 0, of_first(name, slice=slice_of(name))
        else:  # slices share memory as the first one does, each its own
            first, of_shared = slice_of(name) * groups * microbatches, of_first(name)
        shared = [
            (first + i * microbatches, s.bytes * factor)
            for i, s in enumerate(self.costs.shared)
            if of_shared in s.names
        ]
        result = bytes_on(self.rank, name, self.costs, interning), shared
        if is_uniform(interning.table.values[type(name)].bytes):
            self._sizes[id_ // self._alike] = result
        return result


def of_first(name: Any, slice: int = 0) -> Any:  # noqa: A002
    """Return the same name of microbatch 0, and of its first slice or another one."""
    if not hasattr(name, "microbatch"):
        return name
    return replace(name, microbatch=0, slice=slice) if hasattr(name, "slice") else replace(name, microbatch=0)


def prepared_on(plan: Plan, costs: Costs, rank: int) -> float:
    """Return the bytes that the stages of a rank prepare of their parameters."""
    return sum(costs.at("prepared", Parameters(stage)) for stage in plan.stages_on(rank))


def bytes_on(rank: int, name: Any, costs: Costs, interning: Interning) -> float:
    """Return a value's bytes on a rank; for a received value, the part that the stages there read."""
    return interning.table.values[type(name)].bytes(name, costs, interning.plan, rank)


def peak_bytes(programs: Programs, costs: Costs, interning: Interning) -> tuple[float, ...]:
    """Return for each rank the peak of its live bytes at the ends of its effects, in program order."""
    return tuple(max(live, default=0.0) for live in live_bytes(programs, costs, interning))


def live_bytes(programs: Programs, costs: Costs, interning: Interning) -> Iterator[list[float]]:
    """Yield for each rank its live bytes at the end of each effect of its program."""
    for rank, completions in enumerate(completions_by_rank(programs)):
        yield list(live_on(programs[rank], costs, interning, completions))


def completions_by_rank(programs: Programs) -> Iterator[Mapping[Value, int]]:
    """Yield for each rank what `send_completions` returns."""
    senders = defaultdict[int, dict[int, Program]](dict)
    for rank, program in programs.items():
        for peer in {effect.rank for effect in program if isinstance(effect, Send)}:
            senders[peer][rank] = program
    for rank in range(len(programs)):
        yield send_completions(senders[rank], rank)


def live_on(program: Program, costs: Costs, interning: Interning, completions: Mapping[Value, int]) -> Iterator[float]:
    """Yield a rank's live bytes at the end of each effect of its program.

    Args:
        completions: what `send_completions` returns for the rank.
    """
    begun, last = _lifetimes(program, interning, completions)
    live, ended = LiveMemory(costs, interning, program.rank), defaultdict[int, list[int]](list)
    for (id_, _), time in last.items():
        ended[time].append(id_)
    has_moves = moves(program)
    for at, lives in enumerate(begun):
        for id_ in ended[2 * at]:
            live.remove(id_)
        for life in lives:
            if life in last:
                live.add(life[0], program.effects[at] if has_moves else None)
        yield live.bytes
        for id_ in ended[2 * at + 1]:
            live.remove(id_)


Life = tuple[int, int]  # an id, and how many lives of it came before


class Lives:
    """The lives of names: one ends when a name that is no sum is given again."""

    def __init__(self, interning: Interning) -> None:
        self._interning = interning
        self._count: Counter[int] = Counter()
        self._used: set[int] = set()
        self._given: set[int] = set()

    def given(self, id_: int) -> Life:
        """Return the life that an effect begins by giving a name; it continues that of a sum that was not used yet."""
        if id_ in self._used or (id_ in self._given and not self._is_sum(id_)):
            self._used.discard(id_)
            self._count[id_] += 1
        self._given.add(id_)
        return id_, self._count[id_]

    def _is_sum(self, id_: int) -> bool:
        return self._interning.table.values[type(self._interning.name(id_))].sums

    def used(self, id_: int) -> Life:
        """Return the life of a name that an effect needs or frees."""
        self._used.add(id_)
        return id_, self._count[id_]


def _lifetimes(
    program: Program, interning: Interning, completions: Mapping[Value, int]
) -> tuple[list[list[Life]], dict[Life, int]]:
    """Return the lives that each effect begins or continues, and when each life ends.

    A life ends at 2 * at, before the effect at that index gives its names, or at 2 * at + 1, after it.

    Args:
        completions: for each received value, how many sends to its producer are complete when it arrives.
    """
    begun: list[list[Life]] = []
    last: dict[Life, int] = {}
    names = Lives(interning)
    posted, complete = defaultdict[int, list[Life]](list), defaultdict[int, int](int)
    received: dict[int, tuple[int, int]] = {}
    for at, effect in enumerate(program):
        needs, gives, frees = interning.ids(effect)
        used = list(map(names.used, needs))
        for life in used:
            last[life] = 2 * at + 1
        for id_ in frees:
            last[names.used(id_)] = 2 * at
        if isinstance(effect, Send):
            posted[effect.rank] += used
        elif isinstance(effect, Recv):
            received[gives[0]] = effect.rank, completions[effect.value]
        else:
            for id_ in needs:
                if id_ in received:  # its first use
                    peer, count = received.pop(id_)
                    last |= dict.fromkeys(posted[peer][complete[peer] : count], 2 * at)
                    complete[peer] = max(complete[peer], count)
        begun.append(list(map(names.given, gives)))
    for peer, lives in posted.items():
        last |= dict.fromkeys(lives[complete[peer] :], 2 * len(program))
    return begun, last
