"""A timeline: the spans of all ranks, predicted or measured, and an account of each rank's time. No torch.

Conventions (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; our own for those that the paper leaves open):

- the span of a rank is the time from the first start to the last end of its compute, and of the gather that its first
  compute waits for, of its scatters, and of its receives of sums; busy is the time in compute;
- cost is the largest span: it does not include a late start; makespan includes it;
- idle is span - busy, and the bubble rate idle / span on the rank with the largest span;
- a microbatch is in flight on a stage from its forward to its weight gradient or fused backward; of a stage that is not
  trained, to its input gradient, and without either, never.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from operator import itemgetter
from typing import Any

from fpipe._format import extent, number
from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Effect, Recv, parts
from fpipe.plan import Plan
from fpipe.programs.footprint import sums_at_ends
from fpipe.programs.interning import Interning
from fpipe.programs.memory import RECEIVED, SUMS, Life, LiveMemory, Lives
from fpipe.programs.program import Program
from fpipe.programs.residuals import moves
from fpipe.tables import BACKWARD, FORWARD, LANES, last_half
from fpipe.timelines.spans import CAUSE_OF_LANE, CAUSES, Gap, Span, Spans

_MAX_DRAWN = 5000  # compute effects in a notebook's drawing


class Timeline:
    """Spans, and the account of every rank's time. Times are in the unit of the costs, or in seconds.

    Args:
        plan: the plan of the programs.
        spans: the spans of all ranks.
        costs: the sizes from which `memory` counts bytes.
        steps: how many follow each other in it, each with the same effects.

    Attributes:
        sums: by rank, the indices of the spans in which it receives sums, such as those of a stage's copies or ties.

    >>> from fpipe import Costs, Placement, Plan, schedules, simulate
    >>> timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(2), 4), Costs(communication=0.5))
    >>> timeline.makespan, timeline.cost, timeline.idle, timeline.peak_in_flight
    (17.0, 17.0, [5.0, 5.0], [2.0, 1.0])
    >>> timeline.causes[0]
    {'warm-up': 0.0, 'dependency': 3.5, 'transfer': 1.5, 'imbalance': 0.0, 'drain': 0.0}
    """

    def __init__(self, plan: Plan, spans: Spans, costs: Costs = Costs(), steps: int = 1) -> None:
        self.plan, self.spans, self.costs, self.table, self.steps = plan, spans, costs, spans.table, steps
        self._computes = self._on("compute")
        self._beside = {track: self._on(track) for track in LANES}
        self._gathers, self._scatters = self._beside["gather"], self._beside["scatter"]
        effects, values = spans.effects, self.table.values
        receives: list[list[Any]] = [[(at, effects[at]) for at in rank] for rank in self._on("receive")]
        self.sums = [[at for at, effect in each if values[type(effect.value)].sums] for each in receives]

    def __repr__(self) -> str:
        return f"<timeline of {extent(self.plan)}: makespan {number(self.makespan)}>"

    def _on(self, track: str) -> list[array[int]]:
        """Return the indices of each rank's spans on a track."""
        effects, rows = self.spans.effects, self.table.effects
        kinds = {kind for kind in set(map(type, effects)) if rows[kind].track == track}
        ranks = map(self.spans.of, range(self.plan.ranks))
        return [array("q", [at for at in rank if type(effects[at]) in kinds] if kinds else []) for rank in ranks]

    def compute(self, rank: int) -> Iterator[Span]:
        """Yield a rank's compute, in order."""
        return (self.spans[at] for at in self._computes[rank])

    def beside(self, rank: int, track: str) -> Iterator[Span]:
        """Yield a rank's spans on one of `fpipe.tables.LANES`, beside its compute, in order."""
        return (self.spans[at] for at in self._beside[track][rank])

    @cached_property
    def drawn_lanes(self) -> tuple[str, ...]:
        """Those of `fpipe.tables.LANES` on which some effect takes time."""
        ranks = range(self.plan.ranks)
        return tuple(
            track
            for track in LANES
            if any(span.end > span.start for rank in ranks for span in self.beside(rank, track))
        )

    def _repr_svg_(self) -> str | None:
        """Return the figure that a notebook shows; None for one too large for a page, or without matplotlib."""
        if sum(map(len, self._computes)) > _MAX_DRAWN or find_spec("matplotlib") is None:
            return None
        from fpipe.timelines.figure import svg

        return svg(self, extent(self.plan))

    @cached_property
    def _bounds(self) -> list[tuple[float, float]]:
        """Each rank's first start and last end; for a rank without compute, twice the timeline's start."""
        ends = self.spans.ends
        by_rank = [
            (self._first(gathers, own[0]), max(ends[at] for at in (own[-1], *scatters, *sums))) if own else None
            for gathers, own, scatters, sums in zip(
                *(self._gathers, self._computes, self._scatters, self.sums), strict=True
            )
        ]
        first = min((bounds[0] for bounds in by_rank if bounds), default=0.0)
        return [bounds or (first, first) for bounds in by_rank]

    def _first(self, gathers: Sequence[int], at: int) -> float:
        """Return the start of a rank's first compute, or of its first gather if that compute waits for one."""
        starts = self.spans.starts
        waited = self._waited_lane(at)
        gathering = waited is not None and self._track(waited) == "gather"
        return min(starts[gather] for gather in gathers) if gathering else starts[at]

    def _waited_lane(self, at: int) -> int | None:
        """Return the index of the gather or the copy that a compute waited for; None if it waited for another effect.

        What runs on the host waits on its behalf: a `Discard` for its copy.
        """
        waited = self.spans.waited[at]
        while waited >= 0 and self._track(waited) == "host":
            waited = self.spans.waited[waited]
        return waited if waited >= 0 and self._track(waited) in CAUSE_OF_LANE.keys() - {"scatter"} else None

    def _track(self, at: int) -> str:
        return self.table.effects[type(self.spans.effects[at])].track

    @cached_property
    def busy(self) -> list[float]:
        """Each rank's time in compute."""
        starts, ends = self.spans.starts, self.spans.ends
        return [sum(ends[at] - starts[at] for at in indices) for indices in self._computes]

    @cached_property
    def collectives(self) -> list[float]:
        """Each rank's time in collectives inside its pieces, a part of `busy`: `Costs(collectives=)` of its effects."""
        effects = self.spans.effects
        return [sum(self.costs.collective(effects[at], self.table) for at in indices) for indices in self._computes]

    @cached_property
    def idle(self) -> list[float]:
        """Each rank's makespan less its compute: the sum of its `causes`."""
        return [max(0.0, self.makespan - busy) for busy in self.busy]

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end over all ranks."""
        return max(end for _, end in self._bounds) - self.start

    @property
    def period(self) -> float:
        """The time from one step to the next in the long run, without a barrier; of one step alone, the makespan.

        It is that of the later half of the steps, on the rank that takes longest. A step with a barrier after it takes
        the makespan of one step.
        """
        if self.steps == 1:
            return self.makespan
        half, ends = self.steps // 2, self.step_ends
        return max((own[-1] - own[half - 1]) / (self.steps - half) for own in ends)

    @cached_property
    def step_ends(self) -> list[list[float]]:
        """When each rank ends its compute of each step; for a rank without compute, the timeline's start."""
        ends = []
        for own in self._computes:
            each = len(own) // self.steps
            last = [own[(step + 1) * each - 1] for step in range(self.steps) if each]
            ends.append([self.spans.ends[at] for at in last] or [self.start] * self.steps)
        return ends

    @property
    def start(self) -> float:
        """The time when the first rank begins to compute, or to gather for that."""
        return min(start for start, _ in self._bounds)

    @property
    def cost(self) -> float:
        """The largest span of a rank: the time of a step if steps follow one another without a gap."""
        return max(end - start for start, end in self._bounds)

    @property
    def bubble_rate(self) -> float:
        """The share of the largest span in which its rank does not compute."""
        spans = [end - start for start, end in self._bounds]
        widest = spans.index(max(spans))
        return max(0.0, 1 - self.busy[widest] / spans[widest]) if spans[widest] else 0.0

    def gaps(self, rank: int) -> Iterator[Gap]:
        """Yield the gaps of a rank: before its first compute, after its last, and between, by the cause of the wait.

        `CAUSES` defines the causes; their sums are `causes`. A wait for another rank's compute is split in the same
        ratio throughout the rank: `imbalance` is the last part of each.
        """
        share, least = self._imbalance[rank], self._least
        for gap in self._waits(rank):
            from_then = gap.end - share * (gap.end - gap.start)
            if gap.cause != "dependency" or gap.end - from_then <= least:
                yield gap
            elif from_then - gap.start <= least:
                yield gap._replace(cause="imbalance")
            else:
                yield Gap(gap.start, from_then, "dependency")
                yield Gap(from_then, gap.end, "imbalance")

    @cached_property
    def _imbalance(self) -> list[float]:
        """The share of each rank's waits for other ranks' compute that is imbalance."""
        busiest, shares = max(self.busy), []
        for rank, busy in enumerate(self.busy):
            waited = sum(gap.end - gap.start for gap in self._waits(rank) if gap.cause == "dependency")
            shares.append(min(1.0, (busiest - busy) / waited) if waited else 0.0)
        return shares

    @cached_property
    def _least(self) -> float:
        """The time up to which a gap is a rounding error."""
        return ROUNDING * self.makespan

    def _waits(self, rank: int) -> Iterator[Gap]:
        """Yield the gaps of a rank, in which every wait for another rank's compute is a dependency."""
        least = self._least
        return (gap for gap in self._pauses(rank) if gap.end - gap.start > least)

    def _pauses(self, rank: int) -> Iterator[Gap]:
        """Yield the gaps of a rank, those of rounding errors too."""
        spans, computes = self.spans, self._computes[rank]
        first, last = self.start, max(end for _, end in self._bounds)
        start, end = self._bounds[rank]
        if start > first:
            yield Gap(first, start, "warm-up")
        if computes and start < spans.starts[computes[0]]:
            yield from self._wait(start, computes[0])
        for before, after in pairwise(computes):
            if spans.starts[after] > spans.ends[before]:
                yield from self._wait(spans.ends[before], after)
        if computes and spans.ends[computes[-1]] < end:
            yield from self._behind(rank, spans.ends[computes[-1]], end)
        if end < last:
            yield Gap(end, last, "drain")

    def _behind(self, rank: int, begin: float, end: float) -> Iterator[Gap]:
        """Yield the gaps between a rank's last compute and the end of its span: for scatters, then for sums."""
        ends = self.spans.ends
        if (scattered := max((ends[at] for at in self._scatters[rank]), default=begin)) > begin:
            yield Gap(begin, scattered, "scatter")
            begin = scattered
        if begin < end:
            sent = self._sent(max(self.sums[rank], key=ends.__getitem__), begin)
            if sent > begin:
                yield Gap(begin, min(sent, end), "dependency")
            yield Gap(max(begin, min(sent, end)), end, "transfer")

    def _wait(self, begin: float, at: int) -> Iterator[Gap]:
        """Yield the gaps from a time until a compute starts."""
        until, waited = self.spans.starts[at], self._waited_lane(at)
        arrived = min(until, max(begin, self._arrived(at)))
        sent = self._sent(self.spans.waited[at], arrived) if waited is None else self.spans.starts[waited]
        if sent > begin:
            yield Gap(begin, min(sent, arrived), "dependency")
        if sent < arrived:
            yield Gap(max(begin, sent), arrived, "transfer" if waited is None else CAUSE_OF_LANE[self._track(waited)])
        if arrived < until:
            yield Gap(arrived, until, "host")

    def _arrived(self, at: int) -> float:
        """Return when a compute had all that it waited for, if that was recorded; else when it started."""
        waited = self.spans.waited[at]
        return self.spans.ends[waited] if waited >= 0 else self.spans.starts[at]

    def _sent(self, received: int, otherwise: float) -> float:
        """Return when the value of a receive was sent; `otherwise` for a span that is none."""
        if received < 0 or not isinstance(self.spans.effects[received], Recv):
            return otherwise
        sent = self.spans.waited[received]
        return self.spans.starts[sent] if sent >= 0 else otherwise  # the sender was not recorded

    @cached_property
    def cause_names(self) -> tuple[str, ...]:
        """The causes that this timeline can have: those of lanes and of the host only where there is some."""
        has = {cause for track, cause in CAUSE_OF_LANE.items() if any(self._beside[track])}
        if any(gap.cause == "host" for rank in range(self.plan.ranks) for gap in self._waits(rank)):
            has.add("host")
        return tuple(name for name in CAUSES if name in has or name not in {*CAUSE_OF_LANE.values(), "host"})

    @cached_property
    def causes(self) -> list[dict[str, float]]:
        """Each rank's makespan less its compute, by cause: the sums of its `gaps`."""
        causes = []
        for rank in range(self.plan.ranks):
            cause = dict.fromkeys(self.cause_names, 0.0)
            for gap in self.gaps(rank):
                cause[gap.cause] += gap.end - gap.start
            causes.append(cause)
        return causes

    @cached_property
    def kinds(self) -> list[dict[type[Effect], float]]:
        """Each rank's time in compute, by kind of effect."""
        kinds = []
        for indices in self._computes:
            times = defaultdict[type[Effect], float](float)
            for at in indices:
                times[type(self.spans.effects[at])] += self.spans.ends[at] - self.spans.starts[at]
            kinds.append(dict(times))
        return kinds

    @cached_property
    def critical_path(self) -> list[Span]:
        """The chain of waits that ends last. The makespan can shrink only if one of these spans does."""
        return [self.spans[at] for at in self.critical_spans]

    @cached_property
    def critical_spans(self) -> list[int]:
        """The indices of the spans of the critical path."""
        last = [indices[-1] for indices in self._computes if indices]
        last += [at for beside in (*self._scatters, *self.sums) for at in beside[-1:]]
        path = [max(last, key=self.spans.ends.__getitem__)] if last else []
        while path and (waited := self.spans.waited[path[-1]]) >= 0 and len(path) < len(self.spans):
            path.append(waited)  # bounded, because spans that were read from a file may wait in a cycle
        return path[::-1]

    def in_flight(self, rank: int) -> list[tuple[float, float]]:
        """Return (time, microbatches in flight from then on); one on one of v chunks counts 1/v, one of s slices 1/s.

        Empty if no stage runs backward, because residuals are then not saved.
        """
        chunks = len(self.plan.stages_on(rank)) * self.plan.slices
        count, steps = 0, []
        for at, begun, ended in self._flight_changes(rank):
            if begun:
                count += begun
                steps.append((self.spans.starts[at], count / chunks))
            if ended:
                count -= ended
                steps.append((self.spans.ends[at], count / chunks))
        return steps

    def _flight_changes(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield each compute's index, and the numbers of microbatches that it puts in flight and that it completes."""
        if not self._runs_backward:
            return
        last = {stage: last_half(stage, self.plan) for stage in self.plan.stages_on(rank)}
        for at in self._computes[rank]:
            of_stages: Any = [part for part in parts(self.spans.effects[at]) if self._work(part)]
            work = [(self._work(part), last[part.stage]) for part in of_stages]
            yield at, sum(bool(w & FORWARD and half) for w, half in work), sum(bool(w & half) for w, half in work)

    def _work(self, effect: Effect) -> int:
        return self.table.effects[type(effect)].work

    @cached_property
    def _runs_backward(self) -> bool:
        return any(self._work(part) & BACKWARD for effect in self.spans.effects for part in parts(effect))

    @cached_property
    def peak_in_flight(self) -> list[float]:
        """Each rank's peak number of microbatches in flight."""
        return [max((count for _, count in self.in_flight(rank)), default=0.0) for rank in range(self.plan.ranks)]

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return (time, live bytes from then on) of a rank: residuals, deferred values, sent or received values, and
        what its stages prepare of their parameters.

        A received value counts from the post of its receive, a sent value until it is delivered, and the values that a
        backward gives from its end, when it has freed its inputs. Shared memory counts once.
        """
        return [(time, live.bytes) for time, live in self._memory(rank)]

    def owners(self, rank: int) -> dict[str, float]:
        """Return the bytes of each owner of a rank's `memory` at its peak.

        An owner is `RECEIVED`, `PREPARED`, or the label of a kind of value.

        Memory that several share counts to the one that came first. Beside them, and no part of the peak, are the
        `SUMS` of weight gradients at that time, where the costs have their bytes.
        """
        peak, most = max(self.memory(rank), key=itemgetter(1), default=(0.0, 0.0))
        at_peak = next((live for _, live in self._memory(rank) if live.bytes == most), None)
        if at_peak is None:
            return {}
        effects = [self.spans.effects[at] for at in self.spans.of(rank)]
        interning = at_peak.interning
        received = {interning.id(effect.value) for effect in effects if isinstance(effect, Recv)}

        def owner(id_: int) -> str:
            return RECEIVED if id_ in received else self.table.values[type(interning.name(id_))].label

        sums = sums_at_ends(Program(self.plan, rank, tuple(effects), self.table), self.costs)
        begun = [self.spans.starts[at] <= peak for at in self.spans.of(rank)]
        at = max((at for at, is_begun in enumerate(begun) if is_begun), default=0)
        sizes = at_peak.by(owner) | {SUMS: sums[at]}
        return {name: size for name, size in sizes.items() if size > 0}

    def _memory(self, rank: int) -> Iterator[tuple[float, LiveMemory]]:
        """Yield each time at which a rank's memory changes, and what is live then."""
        interning = Interning(self.plan, self.table)
        names = Lives(interning)
        begins, ends, givers = dict[Life, float](), dict[Life, float](), dict[Life, Any]()
        for at in self.spans.of(rank):
            needs, gives, frees = interning.ids(self.spans.effects[at])
            start, end = self.spans.starts[at], self.spans.ends[at]
            lives = [names.used(id_) for id_ in (*needs, *frees)]
            ends |= {key: max(ends.get(key, end), end) for key in lives}
            for id_ in gives:
                begins.setdefault(life := names.given(id_), end if frees else start)
                givers.setdefault(life, self.spans.effects[at])
        steps = defaultdict[float, tuple[list[Life], list[Life]]](lambda: ([], []))
        has_moves = moves(self.spans.effects[at] for at in self.spans.of(rank))
        for life, begin in begins.items():  # in the order of the program: some take the place of what is there
            if begin < ends.get(life, begin):
                steps[begin][0].append(life)
                steps[ends[life]][1].append(life)
        live = LiveMemory(self.costs, interning, rank)
        for time in sorted(steps):
            begun, ended = steps[time]
            again = {id_ for id_, _ in begun}  # what comes again at the moment when it ends is there once
            for id_ in [id_ for id_, _ in ended if id_ in again]:
                live.remove(id_)
            for life in begun:
                live.add(life[0], givers[life] if has_moves else None)
            for id_ in [id_ for id_, _ in ended if id_ not in again]:
                live.remove(id_)
            yield time, live
