"""How long microbatches travel and are in flight at least, and the lower bounds that follow from it. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from math import floor, inf

from fpipe.costs import ROUNDING, Costs
from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Deferred,
    Forward,
    Gradient,
    Name,
    Overlap,
    Residuals,
)
from fpipe.plan import Plan
from fpipe.schedules.cuts import existing
from fpipe.tables import TABLE


class Flights:
    """The least times of passes in any form: alone, fused, in halves, or within an overlap, where they may be shorter.

    Args:
        costs: with zeros for halves that do not exist.
        work: by stage, a forward and a backward that take as little time as they can together.
        forward, inputs, backward: by stage; `inputs` until the input gradient.
        kinds: by microbatch, the factors of its times and of its bytes.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        costs = existing(costs, plan)  # of a stage with one half, `backward` is then the time of that half
        plain, stages = replace(costs, scale=(), sizes=()), range(plan.stages)
        self.plan, self.costs, self.scale = plan, costs, costs.scale or [1.0] * plan.microbatches
        fused = [plain.time(Backward(s, 0)) for s in stages]
        apart = [plain.time(BackwardInput(s, 0)) + plain.time(BackwardWeight(s, 0)) for s in stages]
        alone = [plain.time(Forward(s, 0)) for s in stages]
        pair = [inf if costs.overlap is None else plain.time(Overlap(Forward(s, 0), Backward(s, 0))) for s in stages]
        whole = pair
        if len({*self.scale}) > 1:  # an overlap has the mean of two factors, at least half of either
            whole, pair = [inf if each == inf else 0.0 for each in pair], [each / 2 for each in pair]
        self.work = [min(alone[s] + min(fused[s], apart[s]), whole[s]) for s in stages]
        self.forward = [min(alone[s], pair[s]) for s in stages]
        self.inputs = [min(plain.time(BackwardInput(s, 0)), fused[s], *pair) for s in stages]
        self.backward = [min(fused[s], apart[s], *pair) for s in stages]
        self.kinds = [*zip(self.scale, costs.sizes or [1.0] * plan.microbatches, strict=True)]
        self._known: dict[tuple[int, int], float] = {}

    @property
    def has_copies(self) -> bool:
        return any(len(ranks) > 1 for ranks in self.plan.placement.holders)

    def travelling(self) -> float:
        """Return the bound of a rank's passes, and of a microbatch on its way to the last stage and back.

        Input gradients come in any order: a rank's first one may be that of any microbatch.
        """
        plan, scale, bound = self.plan, self.scale, 0.0
        for rank in range(plan.ranks):
            work = 0.0
            for s in plan.stages_on(rank):
                numbers = plan.microbatches_of(s, rank)
                first, last, total = numbers[0], numbers[-1], sum(scale[m] for m in numbers)
                work += total * self.work[s]
                away = min(self._away(s, m) for m in self._unlike(numbers))
                begin = away + scale[first] * self.forward[s] + total * self.backward[s]
                end = self._away(s, last) + total * self.forward[s] + scale[last] * self.backward[s]
                bound = max(bound, begin, end)
            bound = max(bound, work)
        return bound

    def travelling_in_any_order(self) -> float:
        """Return what `travelling` is at least, whatever the order of the microbatches."""
        plan, total = self.plan, sum(self.scale)
        if self.has_copies:  # these share a stage's microbatches
            return total * sum(self.work) / plan.ranks
        bound = max(total * sum(self.work[s] for s in plan.stages_on(rank)) for rank in range(plan.ranks))
        numbers, shortest = self._unlike(range(plan.microbatches)), min(self.scale)
        for s in range(plan.stages):
            forward, backward = self.forward[s], self.backward[s]
            begin = min(self._away(s, m) for m in numbers) + shortest * forward + total * backward
            end = min(self._away(s, m) + self.scale[m] * backward for m in numbers) + total * forward
            bound = max(bound, begin, end)
        return bound

    def held(self, limits: Sequence[float]) -> float:
        """Return the bound of the time in which chunks are in flight, from a forward to the end of its backward.

        Args:
            limits: the most microbatches in flight, by rank.
        """
        plan, bound = self.plan, 0.0
        if self.has_copies:
            return bound
        is_chain = all(plan.sources(s) == ((s - 1,) if s else ()) for s in range(plan.stages))
        for rank, limit in enumerate(limits):
            stages = [s for s in plan.stages_on(rank) if plan.is_differentiated(s)]
            if not stages or limit == inf or limit * len(plan.stages_on(rank)) * (1 + ROUNDING) < 1:
                continue
            chunks = floor(limit * len(plan.stages_on(rank)) * (1 + ROUNDING))
            bound = max(bound, sum(self._in_flight(s, self.backward[s]) for s in stages) / chunks)
            if is_chain:  # the last chunk is in flight within the time of the others
                together = max(1, chunks // len(stages))
                bound = max(bound, self._in_flight(stages[-1], min(self.backward[s] for s in stages)) / together)
        return bound

    def held_bytes(self, rooms: Sequence[float]) -> float:
        """Return the bound of the time in which residuals and deferred values are there.

        The memory of a rank during a pass is that at its end or at its start, where the pass before it ended: it is at
        most the limit either way. Taken at the end of a forward and at the start of a backward, residuals are there
        from the start of the one to the input gradient of the other, and deferred values during the weight gradient.
        So the sum of bytes times seconds over all microbatches is at most the room times the rank's span.

        Args:
            rooms: the most bytes of residuals and deferred values, by rank.
        """
        ranks = [rank for rank, room in enumerate(rooms) if room > 0]
        if self.has_copies or not ranks:
            return 0.0
        return max(sum(map(self._held_bytes, self.plan.stages_on(rank))) / rooms[rank] for rank in ranks)

    def _held_bytes(self, stage: int) -> float:
        """Return the bytes times seconds of all residuals and deferred values of a stage, at least.

        An overlap in a time of its own may end with the residuals of its forward in place of those of its backward:
        then a forward's are not counted before its end.
        """
        costs, plan = self.costs, self.plan
        forward = 0.0 if costs.overlap is not None else self.forward[stage]
        residuals, deferred = (self._alone(kind(stage, 0)) for kind in (Residuals, Deferred))
        deferred, weight = min(deferred, residuals), self.backward[stage] - self.inputs[stage]
        total = 0.0
        for m, count in self._unlike(range(plan.microbatches)).items():
            scale, size = self.kinds[m]
            until = self._away(stage, m) + scale * (forward + self.inputs[stage])
            total += count * size * (residuals * until + deferred * scale * weight)
        return total

    def _alone(self, name: Residuals | Deferred) -> float:
        """Return the bytes of a stage's value, without those that it shares with another stage of its rank."""
        costs = replace(self.costs, scale=(), sizes=())
        stages = [s for s in self.plan.stages_on(self.plan.rank_of(name.stage, 0)) if s != name.stage]
        others = {kind(s, 0) for kind in (Residuals, Deferred) for s in stages}
        return bytes_alone(name, costs, others) * self.plan.is_differentiated(name.stage)

    def _in_flight(self, stage: int, backward: float) -> float:
        """Return the least time of all microbatches from a stage's forward to the end of a backward."""
        return sum(
            count * (self._away(stage, m) + self.scale[m] * (self.forward[stage] + backward))
            for m, count in self._unlike(range(self.plan.microbatches)).items()
        )

    def _unlike(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return the first of each kind of microbatches on the same copies, and how many there are of it."""
        first, counts = dict[tuple[float, float, int], int](), dict[int, int]()
        for m in numbers:
            at = first.setdefault((*self.kinds[m], m % self.plan.cycle), m)
            counts[at] = counts.get(at, 0) + 1
        return counts

    def _away(self, stage: int, microbatch: int) -> float:
        """Return the least time from the end of a stage's forward to the start of its backward."""
        key = stage, microbatch
        if key not in self._known:
            self._known[key] = self._travel(stage, microbatch)
        return self._known[key]

    def _travel(self, stage: int, microbatch: int) -> float:
        plan, scale = self.plan, self.scale[microbatch]

        def travels(source: int, target: int, value: Name) -> float:
            a, b = plan.rank_of(source, microbatch), plan.rank_of(target, microbatch)
            if a == b:
                return 0.0
            link = self.costs.link(a, b)
            return link.latency + TABLE.message_bytes(value, self.costs, plan, b) / link.bandwidth

        done = {stage: 0.0}
        for s in range(stage + 1, plan.stages):
            there = [
                done[source] + travels(source, s, Activation(source, microbatch))
                for source in plan.sources(s)
                if source in done
            ]
            if there:
                done[s] = max(there) + self.forward[s] * scale
        begun: dict[int, float] = {}
        for s in reversed(done):
            consumers = plan.consumers(s) if plan.is_differentiated(s) else ()
            gradients = (
                begun[c] + self.inputs[c] * scale + travels(c, s, Gradient(s, c, microbatch)) for c in consumers
            )
            begun[s] = max([done[s], *gradients])
        return begun[stage]


def bytes_alone(name: Name, costs: Costs, others: Set[Name]) -> float:
    """Return the bytes of a value, without those that it shares with one of the others."""
    shared = sum(each.bytes for each in costs.shared if name in each.names and not others.isdisjoint(each.names))
    return max(0.0, costs.bytes(name) - shared)
