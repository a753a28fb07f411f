"""What a rank holds, in bytes, as names come and go. No torch.

Invariant: memory that several of the names have counts once, from when the first of them comes until the last has gone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from fpipe.costs import Costs
from fpipe.effects import Activation, Gradient, Name, Recv, Send, Value
from fpipe.programs.completions import receipts
from fpipe.programs.interning import Numbering
from fpipe.programs.program import Program, Programs


class Holding:
    """The bytes of the names that one rank holds now.

    >>> from fpipe import Placement, Plan
    >>> from fpipe.costs import Shared
    >>> from fpipe.effects import Residuals
    >>> shared = [Shared(8, (Activation(0, 0), Residuals(0, 0)))]
    >>> numbering = Numbering(Plan(Placement.loop(1, chunks=2), 4))
    >>> holding = Holding(Costs(activation=10, residuals=100, shared=shared), numbering, rank=0)
    >>> for name in (Activation(0, 3), Residuals(0, 3), Residuals(0, 2)):
    ...     holding.take(numbering.number(name))
    >>> holding.bytes
    202.0
    """

    def __init__(self, costs: Costs, numbering: Numbering, rank: int) -> None:
        self.costs, self.numbering, self.rank, self.bytes = costs, numbering, rank, 0.0
        self._holders: Counter[int] = Counter()  # of each shared memory of each microbatch
        self._blocks: dict[int, tuple[float, list[tuple[int, float]]]] = {}

    def take(self, number: int) -> None:
        """A name that is not here comes."""
        size, shared = self._block(number)
        self.bytes += size
        for first, part in shared:
            self._holders[at := first + number % self.numbering.plan.microbatches] += 1
            if self._holders[at] > 1:
                self.bytes -= part

    def give_up(self, number: int) -> None:
        """A name that is here goes."""
        size, shared = self._block(number)
        self.bytes -= size
        for first, part in shared:
            self._holders[at := first + number % self.numbering.plan.microbatches] -= 1
            if self._holders[at]:
                self.bytes += part

    def _block(self, number: int) -> tuple[float, list[tuple[int, float]]]:
        """A name's bytes, and what it shares: alike for a block of microbatches."""
        block, microbatches = number // self.numbering.block, self.numbering.plan.microbatches
        if block not in self._blocks:
            name = self.numbering.name(number)
            family = number - number % microbatches
            groups = enumerate(self.costs.shared)
            mine = [(i * microbatches, s.bytes) for i, s in groups if family in map(self.numbering.number, s.names)]
            self._blocks[block] = bytes_on(self.rank, name, self.costs, self.numbering), mine
        return self._blocks[block]


def bytes_on(rank: int, name: Name, costs: Costs, numbering: Numbering) -> float:
    """A name's bytes on a rank: what travels of an activation is what stages there read, and of a gradient as much."""
    plan = numbering.plan
    if not isinstance(name, Activation | Gradient):
        return costs.bytes(name)
    m = name.microbatch
    home = plan.rank_of(name.stage, m)
    reader = plan.rank_of(name.consumer, m) if isinstance(name, Gradient) else rank
    if reader == home:
        return costs.bytes(name)
    return max(costs.read(name.stage, c) for c in plan.consumers(name.stage) if plan.rank_of(c, m) == reader)


def peak_bytes(programs: Programs, costs: Costs, numbering: Numbering) -> tuple[float, ...]:
    """For each rank the most bytes that it holds when an effect ends, as its program goes."""
    return tuple(max(held, default=0.0) for held in held_bytes(programs, costs, numbering))


def held_bytes(programs: Programs, costs: Costs, numbering: Numbering) -> Iterator[list[float]]:
    """For each rank the bytes that it holds as each effect of its program ends."""
    senders = defaultdict[int, dict[int, Program]](dict)
    for rank, program in programs.items():
        for peer in {effect.rank for effect in program if isinstance(effect, Send)}:
            senders[peer][rank] = program
    for rank in range(len(programs)):
        yield list(_held(programs[rank], costs, numbering, receipts(senders[rank], rank)))


def _held(program: Program, costs: Costs, numbering: Numbering, told: Mapping[Value, int]) -> Iterator[float]:
    until, holding = _until(program, numbering, told), Holding(costs, numbering, program.rank)
    gone = defaultdict[int, list[int]](list)
    for number, time in until.items():
        gone[time].append(number)
    for at, effect in enumerate(program):
        (_, gives, _), shift = numbering.of(effect)
        for number in gone[2 * at]:
            holding.give_up(number)
        for number in gives:
            if number + shift in until:
                holding.take(number + shift)
        yield holding.bytes
        for number in gone[2 * at + 1]:
            holding.give_up(number)


def _until(program: Program, numbering: Numbering, told: Mapping[Value, int]) -> dict[int, int]:
    """When each number that is needed goes: 2 * at, before the effect there gives anything, or 2 * at + 1, after it.

    Args:
        told: by the value that tells of it, how many sends to its maker are complete.
    """
    until: dict[int, int] = {}
    posted, complete = defaultdict[int, list[int]](list), defaultdict[int, int](int)
    awaited: dict[int, tuple[int, int]] = {}
    for at, effect in enumerate(program):
        (needs, gives, frees), shift = numbering.of(effect)
        until |= {number + shift: 2 * at + 1 for number in needs}
        until |= {number + shift: 2 * at for number in frees}
        if isinstance(effect, Send):
            posted[effect.rank] += needs
        elif isinstance(effect, Recv):
            awaited[gives[0]] = effect.rank, told[effect.value]
        else:
            for number in needs:
                if number + shift in awaited:  # its first use
                    peer, count = awaited.pop(number + shift)
                    until |= dict.fromkeys(posted[peer][complete[peer] : count], 2 * at)
                    complete[peer] = max(complete[peer], count)
    for peer, numbers in posted.items():
        until |= dict.fromkeys(numbers[complete[peer] :], 2 * len(program))
    return until
