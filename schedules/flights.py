"""How long microbatches travel and are in flight at least, and the lower bounds that follow from it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor, inf

from fpipe.costs import ROUNDING, Costs
from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Gradient,
    Name,
    Overlap,
)
from fpipe.plan import Plan
from fpipe.schedules.cuts import existing


class Flights:
    """The least times of passes in any form: alone, fused, in halves, or within an overlap, where they may be shorter.

    Args:
        costs: with zeros for halves that do not exist.
        work: by stage, a forward and a backward that take as little time as they can together.
        forward, inputs, backward: by stage; `inputs` until the input gradient.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        costs = existing(costs, plan)  # of a stage with one half, `backward` is then the time of that half
        plain, stages = replace(costs, scale=(), sizes=()), range(plan.stages)
        self.plan, self.costs, self.scale = plan, costs, costs.scale or [1.0] * plan.microbatches
        fused = [plain.time(Backward(s, 0)) for s in stages]
        apart = [plain.time(BackwardInput(s, 0)) + plain.time(BackwardWeight(s, 0)) for s in stages]
        alone = [plain.time(Forward(s, 0)) for s in stages]
        pair = [inf if costs.overlap is None else plain.time(Overlap(Forward(s, 0), Backward(s, 0))) for s in stages]
        whole = pair if len({*self.scale}) == 1 else [inf if each == inf else 0.0 for each in pair]
        self.work = [min(alone[s] + min(fused[s], apart[s]), whole[s]) for s in stages]
        self.forward = [min(alone[s], pair[s]) for s in stages]
        self.inputs = [min(plain.time(BackwardInput(s, 0)), fused[s], *pair) for s in stages]
        self.backward = [min(fused[s], apart[s], *pair) for s in stages]
        self._known: dict[tuple[int, int], float] = {}

    def travelling(self) -> float:
        """Return the bound of a rank's passes, and of a microbatch on its way to the last stage and back."""
        plan, scale, bound = self.plan, self.scale, 0.0
        for rank in range(plan.ranks):
            work = 0.0
            for s in plan.stages_on(rank):
                numbers = plan.microbatches_of(s, rank)
                first, last, total = numbers[0], numbers[-1], sum(scale[m] for m in numbers)
                work += total * self.work[s]
                for m, forwards, backwards in ((first, scale[first], total), (last, total, scale[last])):
                    bound = max(bound, self._away(s, m) + forwards * self.forward[s] + backwards * self.backward[s])
            bound = max(bound, work)
        return bound

    def held(self, limits: Sequence[float]) -> float:
        """Return the bound of the time in which chunks are in flight, from a forward to the end of its backward.

        Args:
            limits: the most microbatches in flight, by rank.
        """
        plan, bound = self.plan, 0.0
        if any(len(ranks) > 1 for ranks in plan.placement.holders):
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

    def _in_flight(self, stage: int, backward: float) -> float:
        """Return the least time of all microbatches from a stage's forward to the end of a backward."""
        sizes = self.costs.sizes or [1.0] * self.plan.microbatches
        kinds = [*zip(self.scale, sizes, strict=True)]
        away = {kind: self._away(stage, kinds.index(kind)) for kind in {*kinds}}
        return sum(away[kind] + kind[0] * (self.forward[stage] + backward) for kind in kinds)

    def _away(self, stage: int, microbatch: int) -> float:
        """Return the least time from the end of a stage's forward to the start of its backward."""
        key = stage, microbatch
        if key not in self._known:
            self._known[key] = self._travel(stage, microbatch)
        return self._known[key]

    def _travel(self, stage: int, microbatch: int) -> float:
        plan, scale = self.plan, self.scale[microbatch]

        def travels(source: int, target: int, value: Name) -> float:
            return self.costs.delay(plan.rank_of(source, microbatch), plan.rank_of(target, microbatch), value)

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
