"""Lower bounds of the cost of programs, the largest span of a rank. No torch.

Invariants:
- Forwards and weight gradients run in microbatch order on each stage, as the verifier demands it; input gradients run
  in any order.
- Each backward is fused or in halves.
- Residuals stay on their rank from the forward to the input gradient. A bound with a limit in bytes does not hold for
  programs that move or recompute them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from math import floor, inf
from typing import Any

from fpipe.costs import ROUNDING, Costs
from fpipe.effects import BackwardInput, BackwardWeight, Deferred, Forward, Residuals
from fpipe.errors.arguments import checked
from fpipe.plan import Placement, Plan
from fpipe.programs.footprint import check_limit, lasting_bytes
from fpipe.schedules.cuts import existing
from fpipe.schedules.flights import Flights, bytes_alone
from fpipe.schedules.work import FORWARD, INPUT, Room, Work, by_rank


@checked()
def lower_bound(
    plan: Plan,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    *,
    memory_limit_bytes: float | None = None,
) -> float:
    """Return a lower bound of the cost of every program within the limits, the largest of several bounds.

    Backwards may be fused or in halves. Under a limit in bytes, residuals are neither moved nor recomputed.

    Args:
        memory_limit: microbatches in flight on a rank, or on each, from its forward to the end of its backward; a
            chunk counts as its part of the rank's stages.
        memory_limit_bytes: bytes on a rank, of all that `fpipe.footprint` counts. The bound gives to residuals and
            deferred values what parameters and the optimizer's state leave. What slices share counts for none.

    - A rank runs all passes of its stages.
    - Between a stage's first forward and its first backward a microbatch travels to the last stage and back; likewise
      between its last forward and its last backward.
    - Two chunks on each rank, equal times and k half microbatches of memory: max(6m, 6m + 6p - 3k - 1) at unit times
      (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, figure 13).
    - A rank holds at most so many chunks at a time, each at least while its microbatch travels to the last stage and
      back. Likewise, of a chain of stages, for microbatches that are in flight on all chunks of a rank: 2p + 2 half
      microbatches of time on the last rank of a V, which is what counts where the limit is below half of the ranks.
    - Residuals are on a rank at least while their microbatch travels to the last stage and back, and deferred values
      during the weight gradient: their bytes times these times, over the bytes that fit.
    - A chain of stages, one on each rank. When a rank ends its last input gradient, at most as many weight gradients
      are left to it as its memory holds deferred values; that input gradient still travels to the first rank, which
      then has a weight gradient to do. Before its last input gradient, a rank runs whole weight gradients. And while
      the first microbatch travels from a rank to the last one and back, the rank has whole forwards to run, as many as
      its memory holds; what they do not fill, it waits.
    - The same chain. A microbatch begins when the one before it, by as many as fit, has been to the last rank and back.

    >>> from fpipe import Placement
    >>> lower_bound(Plan(Placement.loop(4), 1), Costs(communication=1))
    15.0
    >>> lower_bound(Plan(Placement.v(4), 8), Costs(), memory_limit=2)
    59.0
    >>> lower_bound(Plan(Placement.v(4), 8), Costs(), memory_limit=1)
    80.0
    >>> lower_bound(Plan(Placement.loop(4), 8), Costs(), memory_limit=4)
    27.0
    """
    in_order = plan.slices == 1  # of slices, the backwards are not
    flights, limits, rooms = _problem(plan, costs, memory_limit, memory_limit_bytes)
    plan, costs = flights.plan, flights.costs
    bound = max(flights.travelling(), _published(plan, costs, limits), _held(flights, limits, rooms))
    if costs.overlap is not None or not is_chain(plan):
        return bound
    chain = Chain(Work.of(plan, costs), Room.counted(plan, limits), *rooms)
    return max(bound, chain.bound() if in_order else max(chain.waiting(s) for s in range(plan.stages)))


def bound_in_any_order(
    plan: Plan,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    *,
    memory_limit_bytes: float | None = None,
) -> float:
    """Return a lower bound of the cost that holds in whatever order the factors of microbatches are.

    Args: as of `lower_bound`.

    >>> from fpipe import Placement
    >>> plan, costs = Plan(Placement.loop(2), 3), Costs(1, 1, 0, scale=[3, 1, 2])
    >>> lower_bound(plan, costs), bound_in_any_order(plan, costs)
    (16.0, 12.0)
    """
    flights, limits, rooms = _problem(plan, costs, memory_limit, memory_limit_bytes)
    return max(flights.travelling_in_any_order(), _held(flights, limits, rooms))


def _problem(
    plan: Plan, costs: Costs, limit: float | Sequence[float] | None, limit_bytes: float | None
) -> tuple[Flights, list[float], list[Room]]:
    """Return the passes in their least times, the limit of each rank, and the room in bytes if there is a limit."""
    costs.check(plan)
    check_limit(limit_bytes)
    plan, costs, limits = _as_microbatches(plan, costs, by_rank(plan, limit))
    costs = in_least_halves(plan, costs)
    rooms = []
    if limit_bytes is not None:
        left = [max(0.0, limit_bytes - each) for each in lasting_bytes(plan, costs)]
        rooms.append(Room.sized(plan, costs, left))
    return Flights(plan, costs), limits, rooms


def _held(flights: Flights, limits: Sequence[float], rooms: Sequence[Room]) -> float:
    return max(flights.held(limits), *(flights.held_bytes(room.limits) for room in rooms), 0.0)


def in_least_halves(plan: Plan, costs: Costs) -> Costs:
    """Return the costs of backwards in halves that no program with fused backwards, or in halves, costs less than.

    An input gradient takes the least time of itself and a fused backward, and the weight gradient what is then left of
    the shorter backward; it keeps the less of residuals and deferred values. In any program, each backward can be
    replaced by such halves inside its time: halves each at the end of theirs, or both at the end of a fused one. No
    half is longer than the one it replaces, nor both than the fused backward. So every gradient is there as early as
    before, and at no time is there more memory: the program costs as much, and is one of halves alone.

    >>> from fpipe import Placement
    >>> costs = in_least_halves(Plan(Placement.loop(2), 1), Costs(1, [2, 5], 3, backward=4, residuals=1, deferred=3))
    >>> costs.backward_input, costs.backward_weight, costs.deferred
    ((2.0, 4.0), (2.0, 0.0), (1.0, 1.0))
    """
    costs, stages = existing(costs, plan), range(plan.stages)
    plain = replace(costs, scale=(), sizes=())
    apart = [(plain.time(BackwardInput(s, 0)), plain.time(BackwardWeight(s, 0))) for s in stages]
    fused = [plain.at("backward", BackwardInput(s, 0)) for s in stages]
    inputs = [min(by_input, whole) for (by_input, _), whole in zip(apart, fused, strict=True)]
    weights = [min(sum(halves), fused[s]) - inputs[s] for s, halves in enumerate(apart)]
    sizes = [(plain.at("residuals", Residuals(s, 0)), plain.at("deferred", Deferred(s, 0))) for s in stages]
    return replace(costs, backward_input=inputs, backward_weight=weights, backward=None, deferred=[*map(min, sizes)])


def _as_microbatches(plan: Plan, costs: Costs, limits: list[float]) -> tuple[Plan, Costs, list[float]]:
    """Return the plan in which each slice is a microbatch, so that fewer have to wait for each other."""
    if plan.slices == 1:
        return plan, costs, limits
    scale, sizes = ([each for each in factors for _ in range(plan.slices)] for factors in (costs.scale, costs.sizes))
    costs = replace(_of_least_slices(plan, costs), scale=scale, sizes=sizes)
    limits = [limit * plan.slices for limit in limits]
    return replace(plan, microbatches=plan.microbatches * plan.slices, slices=1), costs, limits


def _of_least_slices(plan: Plan, costs: Costs) -> Costs:
    """Return the costs without factors of slices: of each cost the least of a stage's slices.

    Memory that slices share counts for none of them: it may be there for another one, and then counts once for both.
    """
    factors, stages, slices = costs.slice_scale, range(plan.stages), range(plan.slices)
    if not isinstance(factors, Mapping):
        return replace(costs, slice_scale=[min(factors)] if factors else ())
    plain = replace(costs, scale=(), sizes=())
    least: dict[str, Any] = {
        cost: [min(plain.at(cost, Forward(s, 0, t)) for t in slices) for s in stages]
        for cost in factors
        if getattr(costs, cost, None) is not None  # collectives are parts of times
    }
    if costs.has_sizes_of_slices:
        for cost, kind in (("residuals", Residuals), ("deferred", Deferred)):
            least[cost] = [min(_bytes_of_slice(kind(s, 0, t), plain, plan.slices) for t in slices) for s in stages]
    return replace(costs, slice_scale=(), shared=(), **least)


def _bytes_of_slice(name: Residuals | Deferred, costs: Costs, slices: int) -> float:
    """Return the bytes of a slice's value, without those that it shares with another slice of its stage."""
    others = {kind(name.stage, 0, t) for kind in (Residuals, Deferred) for t in range(slices) if t != name.slice}
    return bytes_alone(name, costs, others)


def _published(plan: Plan, costs: Costs, limits: Sequence[float]) -> float:
    """Return the published bound for a V of a chain; 0 where its assumptions do not hold."""
    p, m = plan.ranks, plan.microbatches
    is_v = plan.placement == Placement.v(p) and all(plan.sources(s) == ((s - 1,) if s else ()) for s in range(2 * p))
    passes = (
        kind(s, i) for kind in (Forward, BackwardInput, BackwardWeight) for s in range(plan.stages) for i in range(m)
    )
    times = {costs.time(each) for each in passes}
    plain = costs.overlap is None and costs.communication == 0
    limit = max(limits)
    if limit == inf or not is_v or not plain or len(times) > 1 or m < 2 * p or plan.trained is not None:
        return 0.0
    return times.pop() * max(6 * m, 6 * m + 6 * p - 3 * floor(2 * limit) - 1)


def is_chain(plan: Plan) -> bool:
    """Whether the stages are a chain, one on each rank, without copies, and all are trained."""
    alone = plan.stages == plan.ranks and all(len(plan.stages_on(rank)) == 1 for rank in range(plan.ranks))
    return (
        alone and plan.trained is None and all(plan.sources(s) == ((s - 1,) if s else ()) for s in range(plan.stages))
    )


class Chain:
    """A chain of stages, one on each rank, and the numbers of microbatches that fit its rank.

    Input gradients come in any order, so that the first and the last one on a rank may be those of any microbatch.

    Args:
        residuals, deferred: by stage, the most residuals and the most deferred values that fit.
    """

    def __init__(self, work: Work, *rooms: Room) -> None:
        plan, count = work.plan, work.plan.stages
        self.microbatches, self.count, self.scale, self.sizes = plan.microbatches, count, work.scale, work.sizes
        self.forward, self.inputs, self.weight = (work.times[at : at + count] for at in range(0, 3 * count, count))
        most = [plan.microbatches] * count
        self.residuals, self.deferred = most, most
        for room in rooms:
            self.residuals = [*map(min, self.residuals, room.fitting(plan, room.residuals))]
            self.deferred = [*map(min, self.deferred, room.fitting(plan, room.deferred))]
        self.is_whole = all(room.residuals == room.deferred for room in rooms)
        self._sums = [[[0.0] * 3] for _ in (FORWARD, INPUT)]  # of the passes and transfers of the stages up to one
        for kind, s in product((FORWARD, INPUT), range(count)):
            at = count + s if kind == INPUT else s - 1
            hops = [hop for hop in work.hops[at][0] if hop.edge] if s else []
            more = work.times[kind * count + s], sum(hop.latency for hop in hops), sum(hop.wire for hop in hops)
            self._sums[kind].append([a + b for a, b in zip(self._sums[kind][-1], more, strict=True)])
        kinds = zip(self.scale, self.sizes, strict=True)
        self._unlike = [*{kind: m for m, kind in enumerate(kinds)}.values()]
        self._least = [*map(self._without_waits, range(count))]
        self._gradient = [self._until_gradient(s, s + 1) if s + 1 < count else 0.0 for s in range(count)]
        self._before = [0.0, *accumulate(self.scale)]  # of the microbatches before each

    def _way(self, kind: int, first: int, last: int, microbatch: int) -> float:
        """Return the time of a microbatch's passes of a kind on the stages after the first one, with transfers."""
        sums = self._sums[kind]
        time, latency, wire = (b - a for a, b in zip(sums[first + 1], sums[last + 1], strict=True))
        return time * self.scale[microbatch] + latency + wire * self.sizes[microbatch]

    def _until_gradient(self, stage: int, last: int) -> float:
        """Return the time from a stage's first forward to its first gradient, over the later stages up to one."""
        back = min(self._way(INPUT, stage, last, i) for i in self._unlike)
        return self._way(FORWARD, stage, last, 0) + back

    def least(self, stage: int) -> float:
        """Return the cost, if the stage's rank waits only for what is late at the end."""
        return self._least[stage]

    def _without_waits(self, stage: int) -> float:
        m = self.microbatches
        busy = sum(self.scale) * (self.forward[stage] + self.inputs[stage] + self.weight[stage])
        if not stage:
            return busy
        left = sum(self.scale[m - self.deferred[stage] :]) * self.weight[stage]
        return busy + max(0.0, self._around(0, stage) + self.scale[-1] * self.weight[0] - left)

    def _around(self, first: int, last: int) -> float:
        """Return by how much a rank begins before a later one, and ends its last input gradient after it, together."""
        begun = self._way(FORWARD, first, last, 0) + (self.forward[first] - self.forward[last]) * self.scale[0]
        more = self.inputs[first] - self.inputs[last]
        return begun + min(self._way(INPUT, first, last, i) + more * self.scale[i] for i in self._unlike)

    def waiting(self, stage: int) -> float:
        """Return the cost, if its rank also waits for its first gradient, after all forwards that fit."""
        run = sum(self.scale[1 : self.residuals[stage]]) * self.forward[stage]
        return self.least(stage) + max(0.0, self._until_gradient(stage, self.count - 1) - run)

    def rate(self, stage: int) -> float:
        """Return the cost, if the stage begins a microbatch when one that was in memory has ended.

        Where an input gradient ends it, that may be any of those in memory.
        """
        m, scale, fits = self.microbatches, self.scale, self.residuals[stage]
        first, window = (m - 1) % fits, 1 if self.is_whole or len(self._unlike) == 1 else fits

        def until_end(begun: int) -> float:
            times, forwards = list[float](), 0.0
            for i in range(begun, min(begun + window, m)):
                forwards += scale[i] * self.forward[stage]
                way = self._way(FORWARD, stage, self.count - 1, i) + self._way(INPUT, stage, self.count - 1, i)
                times.append(forwards + way + scale[i] * self.inputs[stage])
            return min(times)

        ends = sum(scale[first:m:fits]) if self.is_whole else scale[-1]
        ways = sum(until_end(i) for i in range(first, m, fits))
        return sum(scale[:first]) * self.forward[stage] + ways + ends * self.weight[stage]

    def ahead(self, cost: float, pace: Sequence[float] | None = None) -> tuple[list[int], bool]:
        """Return by stage the fewest forwards before the first gradient with which no rank waits too long, or as many
        as fit; and whether these suffice.

        Args:
            cost: that no rank's span exceeds.
            pace: by stage the time of a forward, by default its own.
        """
        counts, fits, begin = [1] * self.count, True, 0.0  # of the first gradient, after the end of the first forward
        pace = pace or self.forward
        for s in range(self.count - 1, -1, -1):
            begin += self._gradient[s]
            spare, run, n = cost * (1 + ROUNDING) - self.least(s), 0.0, 1
            while n < self.residuals[s] and begin - run > spare:
                run += pace[s] * self.scale[n]
                n += 1
            counts[s], fits, begin = n, fits and begin - run <= spare, max(begin, run)
        return counts, fits

    def before_first(self, counts: Sequence[int]) -> list[float]:
        """Return by stage how long its rank waits for its first gradient, after so many forwards."""
        waits, begin = [0.0] * self.count, 0.0
        for s in range(self.count - 1, -1, -1):
            begin += self._gradient[s]
            run = (self._before[counts[s]] - self._before[1]) * self.forward[s]
            waits[s], begin = max(0.0, begin - run), max(begin, run)
        return waits

    def before_last(self, cost: float) -> tuple[list[float], bool]:
        """Return by stage how long its rank waits until its last input gradient, where that ends as early as possible;
        and whether a cost allows that.

        Until then, a rank runs all forwards and input gradients, and whole weight gradients: as many as its memory
        demands, and not the last one. What these do not fill, it waits, or it comes late with one more.

        Args:
            cost: that no rank's span exceeds.
        """
        m, waits, fits = self.microbatches, [0.0] * self.count, True
        total, end = self._before[m], 0.0  # of the last input gradient, after the first forward began
        for s in range(self.count - 1, -1, -1):
            weight, fewest = self.weight[s], m - self.deferred[s]
            others = total * (self.forward[s] + self.inputs[s])
            needed, spare = end - others, cost * (1 + ROUNDING) - others - total * weight
            n = max(fewest, bisect_right(self._before, needed, fewest, m, key=lambda scale: scale * weight) - 1)
            n += needed - self._before[n] * weight > spare
            fits = fits and n < m and spare >= 0
            run = self._before[min(n, m - 1)] * weight
            waits[s] = max(0.0, needed - run)
            end = others + max(needed, run) + (self._around(s - 1, s) if s else 0.0)
        return waits, fits

    def bound(self) -> float:
        """Return a lower bound of the cost.

        With s the stages before one and t those after it, transfers counted with the stages that they lead to and from,
        and k, k' the numbers of deferred values and of residuals that fit, it is at least

            m (F + B + W) + sum over s of (F + B) - (k - 1) W + max(0, sum over t of (F + B) - (k' - 1) F)

        where the W that is added is the first stage's. The last term is the wait for the first gradient. A rank runs
        whole forwards before it, and whole weight gradients before its last input gradient, so it may wait longer, and
        the ranks before it too: the least cost that leaves all of them the time is found by bisection.
        """
        stages = range(self.count)
        low = max(max(self.waiting(s), self.rate(s)) for s in stages)
        if self.fits(low):
            return low
        high = 2 * low
        while not self.fits(high):
            low, high = high, 2 * high
        while high - low > ROUNDING * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.fits(middle) else (middle, high)
        return low

    def fits(self, cost: float) -> bool:
        """Return whether a cost is enough for the waits of all ranks, for their first gradients and their last ones."""
        return self.ahead(cost)[1] and self.before_last(cost)[1]
