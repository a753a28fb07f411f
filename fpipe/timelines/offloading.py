"""The pass that moves residuals to the host, or recomputes them, so that every rank keeps to a limit. No torch.

The programs are simulated. Stretch that timeline: every effect starts `slower` times later and takes as long as before.
In it, no copy is waited for: an `Offload` is posted after its forward and ends before its `Discard`, a `Fetch` ends
before the backward that needs it, and a `Recompute` fits into a time in which the rank waits.

What that leaves out may make a step slower after all: a `Recompute` that fits into no wait is just before the backward
that needs it, and delays other ranks too; a `Discard` waits for its copy, and with it what comes after. So the result
is simulated as well, and not taken if it is too slow.

Which residuals to move when a rank has no room is the question of paging: those that are needed again last (Belady,
"A study of replacement algorithms", IBM Systems Journal 1966; for pipelines PipeOffload, arXiv 2503.01328). What does
not fit through the link to the host may be recomputed, first where the rank waits (Mario, PPoPP 2025).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

from fpipe._format import format_bytes
from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Activation, Discard, Effect, Fetch, Offload, Recompute, Residuals, Value, parts
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked
from fpipe.programs.footprint import bytes_at_ends, check_limit
from fpipe.programs.interning import Interning
from fpipe.programs.lowering import after_sends
from fpipe.programs.memory import bytes_on, completions_by_rank, live_on
from fpipe.programs.program import Program, Programs, plan_of, table_of
from fpipe.programs.residuals import moves
from fpipe.tables import FORWARD
from fpipe.timelines.simulator import simulate_programs
from fpipe.timelines.timeline import Timeline

SHARES = (0.0, 0.25, 0.5, 1.0)  # of the allowed slowdown, in the order in which they are tried


@checked()
def offload(limit_bytes: float, costs: Costs, *, slower: float = 0.0, recompute: bool = False) -> Offloading:
    """Return the pass for `offload=` of `lower`, `simulate`, `value_and_grad` and others.

    It adds `Offload`, `Discard`, `Fetch` and `Recompute` to complete programs, so that no rank ever has more bytes than
    the limit.

    Args:
        limit_bytes: bytes that a rank has, for all that `fpipe.footprint` counts.
        costs: sizes and times, those of `Offload` and `Fetch` among them; from `fpipe.profile`, or your own.
        slower: how much longer the simulated step may take, as a share of it: 0.05 for 5 %. By default none. It holds
            for `Timeline.makespan` and for `Timeline.cost`, by which a step of a loop without a barrier takes longer.
        recompute: whether residuals may also be recomputed: where a rank waits, then where `slower` allows it.

    Raises:
        ScheduleError: `slower` is no share; or, when programs are lowered, a rank can't keep to the limit, with the
            least that can be reached.

    Residuals of slices, and of stages whose parameters are gathered, are moved and never recomputed: the carry of the
    slice before, or the parameters, may be gone by then.

    >>> from fpipe import Costs, Placement, Plan, draw, footprint, lower, schedules
    >>> plan = Plan(Placement.loop(ranks=4), microbatches=6)
    >>> costs = Costs(backward=2, residuals=10, offload=0.5, fetch=0.5)
    >>> programs = lower(schedules.one_f_one_b, plan, offload=offload(20, costs))
    >>> [each.total for each in footprint(lower(schedules.one_f_one_b, plan), costs)]
    [40.0, 30.0, 20.0, 10.0]
    >>> [each.total for each in footprint(programs, costs)]
    [20.0, 20.0, 20.0, 10.0]
    """
    if not 0 <= slower < inf:
        raise ScheduleError(f"slower must be a share of the step, 0 or more, not {slower!r}")
    check_limit(limit_bytes, costs)
    return Offloading(limit_bytes, costs, slower, recompute)


@dataclass(frozen=True)
class Offloading:
    """The pass that `offload` returns: complete programs -> programs that keep to a limit."""

    limit_bytes: float
    costs: Costs
    slower: float = 0.0
    recompute: bool = False

    def __call__(self, programs: Programs) -> Programs:
        """Return programs that keep to the limit; those that move residuals already, as they are.

        Raises:
            ScheduleError: a rank can't keep to the limit.
        """
        if any(map(moves, programs.values())):
            return programs
        plan = plan_of(programs)
        self.costs.check(plan)
        costs = self.costs.over(plan)
        timeline, interning = simulate_programs(programs, costs), Interning(plan, table_of(programs))
        ranks = [
            _Rank(programs[rank], timeline, costs, interning, completions)
            for rank, completions in enumerate(completions_by_rank(programs))
        ]
        tight = max(range(plan.ranks), key=lambda rank: max(ranks[rank].totals, default=0.0))
        least = max(ranks[tight].totals, default=0.0)
        for ways in self._ways(timeline.cost):
            results = [rank.within(self.limit_bytes, ways) for rank in ranks]
            moved = {rank: result.program for rank, result in enumerate(results)}
            if self._is_too_slow(simulate_programs(moved, costs), timeline):
                continue
            most = max(range(plan.ranks), key=lambda rank: results[rank].peak)
            if results[most].peak <= self.limit_bytes * (1 + ROUNDING):
                return moved
            least, tight = min((least, tight), (results[most].peak, most))
        raise ScheduleError(
            f"rank {tight} can't keep to {format_bytes(self.limit_bytes)}: with residuals moved, the least limit is "
            f"{format_bytes(least)} ({least:.0f} bytes){'' if self.slower else ' at no time lost'}; "
            f"{self._way_out(ranks[tight])}"
        )

    def _is_too_slow(self, moved: Timeline, before: Timeline) -> bool:
        """Whether a step takes longer than asked, with a barrier after it or in a loop without one."""
        most = (1 + self.slower) * (1 + ROUNDING)
        return moved.makespan > most * before.makespan or moved.cost > most * before.cost

    def _ways(self, cost: float) -> Iterator[_Ways]:
        for share in SHARES if self.slower else SHARES[:1]:
            delay = share * self.slower * cost
            for again in dict.fromkeys((0.0, delay)) if self.recompute else (None,):
                yield _Ways(delay, again, waits=True)
                yield _Ways(delay, again, waits=False)

    def _way_out(self, tight: _Rank) -> str:
        ways = ["give that", "allow a slower step (slower=0.1)" if self.slower < 0.1 else "allow a slower step"]
        if not self.recompute and any(map(tight.can_recompute, tight.lives)):
            ways.append("let residuals be recomputed (recompute=True)")
        return f"{', '.join(ways)}, or take a schedule that needs less (fpipe search --memory-limit-bytes)"


class _Ways(NamedTuple):
    """The ways in which residuals may be moved.

    Args:
        delay: by how much a rank may end later for copies.
        again: the time in which residuals may be recomputed beside that in which the rank waits; None for none.
        waits: where residuals go and others come back, the latter wait until the memory of the former is free.
    """

    delay: float
    again: float | None
    waits: bool


class _Result(NamedTuple):
    """A rank's program with moved residuals, and the most bytes that it has."""

    program: Program
    peak: float


class _Life(NamedTuple):
    """Residuals: the numbers of the computes that save and use them, and their bytes."""

    name: Residuals
    saved: int
    used: int
    bytes: float


class _Away(NamedTuple):
    """Residuals that are not on the rank from the moment `begin` on, and are again at `end`; the bytes that this saves.

    Moment 2 n is just before compute n, and 2 n + 1 at its end.

    Args:
        copied, due: the times when the copy to the host ends, and when that back, or the second forward, begins.
    """

    life: _Life
    begin: int
    end: int
    bytes: float
    due: float
    copied: float = 0.0


class _Times(NamedTuple):
    """The starts and ends of a rank's compute, in order."""

    starts: list[float]
    ends: list[float]


class _Rank:
    """A rank whose residuals are moved.

    Args:
        computes: the indices of its effects that compute.
        room: the time before each of these in which the rank waits.
        totals: its most bytes at each moment where nothing is moved.
    """

    def __init__(
        self, program: Program, timeline: Timeline, costs: Costs, interning: Interning, completions: Mapping[Value, int]
    ) -> None:
        self.program, self.costs, self.interning, self.completions = program, costs, interning, completions
        table, first = program.table, timeline.spans.first[program.rank]
        self.computes = [at for at, effect in enumerate(program) if table.effects[type(effect)].track == "compute"]
        spans = timeline.spans
        self.starts = [spans.starts[first + at] for at in self.computes]
        self.times = [spans.ends[first + at] - spans.starts[first + at] for at in self.computes]
        ends = [start + took for start, took in zip(self.starts, self.times, strict=True)]
        self.room = [start - end for start, end in zip(self.starts, [0.0, *ends[:-1]], strict=True)]
        self.lives = list(self._lives())
        self.totals = list(self._moments(self._totals(program)))

    def _totals(self, program: Program) -> list[float]:
        live = live_on(program, self.costs, self.interning, self.completions)
        return bytes_at_ends(program, live, self.costs)

    def _moments(self, totals: Sequence[float]) -> Iterator[float]:
        """Yield the bytes before each compute, and the most bytes from its end until just before the next."""
        ends = [*self.computes[1:], len(totals)]
        for at, end in zip(self.computes, ends, strict=True):
            yield totals[at - 1] if at else 0.0
            yield max(totals[at:end])

    def _lives(self) -> Iterator[_Life]:
        plan, table = self.program.plan, self.program.table
        saved: dict[Residuals, int] = {}
        for number, at in enumerate(self.computes):
            part: Any
            for part in parts(self.program.effects[at]):
                if table.effects[type(part)].work & FORWARD:
                    saved |= {n: number for n in table.gives(part, plan) if type(n) is Residuals}
                    continue
                for name in table.needs(part, plan):
                    if type(name) is Residuals and name in saved:
                        size = bytes_on(self.program.rank, name, self.costs, self.interning)
                        yield _Life(name, saved.pop(name), number, size)

    def within(self, limit: float, ways: _Ways) -> _Result:
        """Return the program with as few residuals moved as keep it to a limit; the one of least peak if none does."""
        times, bound, again = self._times(ways.delay), limit * (1 + ROUNDING), ways.again
        best = _Result(self.program, max(self.totals, default=0.0))
        moved, away, redone = list[_Life](), list[_Away](), list[_Away]()
        while best.peak > bound:
            totals = self._estimate([*away, *redone])
            at = max(range(len(totals)), key=totals.__getitem__)
            gone = {each.life for each in [*away, *redone]}
            lives = [life for life in self.lives if 2 * life.saved < at < 2 * life.used and life not in gone]
            lives.sort(key=lambda life: -life.used)
            if (more := self._offloaded(at, lives, moved, times)) is not None:
                moved, away = more
            elif again is not None and (one := self._recomputed(at, lives, redone, again)) is not None:
                redone.append(one)
            else:
                return min(best, self._placed(away, redone, ways.waits), key=lambda result: result.peak)
            if max(self._estimate([*away, *redone])) <= bound:
                best = min(best, self._placed(away, redone, ways.waits), key=lambda result: result.peak)
        return best

    def _times(self, delay: float) -> _Times:
        """Return the times of a step that is longer by a delay, in proportion."""
        factor = 1 + delay / (self.starts[-1] + self.times[-1]) if self.starts else 1.0
        starts = [factor * start for start in self.starts]
        ends = [start + took for start, took in zip(starts, self.times, strict=True)]
        return _Times(starts, ends)

    def _estimate(self, away: Sequence[_Away]) -> list[float]:
        """Return the bytes at each moment; exact where residuals share no memory with other values."""
        changes = [0.0] * (len(self.totals) + 1)
        for each in away:
            changes[each.begin] -= each.bytes
            changes[each.end] += each.bytes
        return [total + change for total, change in zip(self.totals, accumulate(changes[:-1]), strict=True)]

    def _offloaded(
        self, at: int, lives: Sequence[_Life], moved: Sequence[_Life], times: _Times
    ) -> tuple[list[_Life], list[_Away]] | None:
        """Return those moved with one life more, which is then not on the rank at a moment."""
        for life in lives:
            away = self._away([*moved, life], times)
            if away is not None and away[life].begin <= at < away[life].end:
                return [*moved, life], list(away.values())
        return None

    def _away(self, moved: Sequence[_Life], times: _Times) -> dict[_Life, _Away] | None:
        """Return when residuals are not on the rank; None if one is needed again before it could be back.

        The copies each way go one after the other: those to the host as early as possible, those back as late.
        """
        copied, free = dict[_Life, float](), 0.0
        for life in sorted(moved, key=lambda life: life.saved):
            copied[life] = free = max(free, times.ends[life.saved]) + self._took(Offload, life)
        away, free = dict[_Life, _Away](), inf
        for life in sorted(moved, key=lambda life: -life.used):
            free = min(free, times.starts[life.used]) - self._took(Fetch, life)
            begin = bisect_left(times.starts, copied[life] * (1 - ROUNDING))
            end = min(bisect_right(times.ends, free * (1 + ROUNDING)), life.used)
            if begin >= end:
                return None
            away[life] = _Away(life, 2 * begin, 2 * end, life.bytes, free, copied[life])
        return away

    def _recomputed(self, at: int, lives: Sequence[_Life], redone: Sequence[_Away], delay: float) -> _Away | None:
        """Return the recomputation that saves most at a moment: while the rank waits, else as late as can be."""
        room = [*self.room]
        for each in redone:
            room[each.end // 2] -= self._took(Recompute, each.life)
        delay += sum(min(0.0, left) for left in room)
        best = None
        for life in lives:
            took, numbers = self._took(Recompute, life) * (1 - ROUNDING), range(life.used, at // 2, -1)
            number = next((n for n in numbers if room[n] >= took), life.used)
            if took - max(0.0, room[number]) > delay or not self.can_recompute(life):
                continue
            due = self.starts[number] - took - (self.room[number] - room[number])
            again = _Away(life, 2 * life.saved + 1, 2 * number, life.bytes - self._inputs(life), due)
            if again.bytes > (best.bytes if best else 0.0):
                best = again
        return best

    def can_recompute(self, life: _Life) -> bool:
        """Whether what a stage reads is there: no parameters that are gathered for its forward, no carry."""
        plan = self.program.plan
        return life.name.stage not in plan.gathered and plan.slices == 1

    def _inputs(self, life: _Life) -> float:
        """Return the bytes of the inputs from which residuals are recomputed."""
        sources = self.program.plan.sources(life.name.stage)
        names = (Activation(source, life.name.microbatch) for source in sources)
        return sum(bytes_on(self.program.rank, name, self.costs, self.interning) for name in names)

    def _took(self, kind: type[Any], life: _Life) -> float:
        return self.costs.time(_effect(kind, life), self.program.table)

    def _placed(self, away: Sequence[_Away], redone: Sequence[_Away], waits: bool) -> _Result:
        """Return the program with the effects that move residuals."""
        before = defaultdict[int, list[tuple[float, Effect]]](list)
        effects, computes = self.program.effects, self.computes
        for each in away:
            before[after_sends(effects, computes[each.life.saved])].append((0.0, _effect(Offload, each.life)))
        for each in away:  # a `Discard` waits for its copy
            at = 0.0 if waits else each.copied * (1 - ROUNDING)
            before[computes[each.begin // 2]].append((at, _effect(Discard, each.life)))
        for kind, back in ((Fetch, away), (Recompute, redone)):
            for each in sorted(back, key=lambda each: each.life.used):
                before[computes[each.end // 2]].append((inf if waits else each.due, _effect(kind, each.life)))
        timed = (sorted(before[at], key=itemgetter(0)) for at in range(len(effects)))
        inserted = tuple(
            e for some, effect in zip(timed, effects, strict=True) for e in (*(e for _, e in some), effect)
        )
        program = replace(self.program, effects=inserted)
        return _Result(program, max(self._totals(program), default=0.0))


def _effect(kind: type[Any], life: _Life) -> Effect:
    effect: Effect = kind(life.name.stage, life.name.microbatch, life.name.slice)
    return effect
