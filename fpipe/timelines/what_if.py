"""What a step would take if a part of it were ideal, and so what would help. No torch.

The captured effects are replayed with their own measured times (`Replay`), then with one part ideal at a time, after
"Understanding Stragglers in Large Model Training Using What-if Analysis" (2025): a rank, a stage or a kind of effect is
ideal at the median over all stages of the same kind of effect and the same microbatch, the lower one of two; transfers,
gathers, scatters, copies of residuals and the host's time at zero; work without imbalance is each rank's, scaled to the
mean over ranks.

A stage that is larger by design is not told apart from a slow one: its row says what it would bring to cut the layers
so that it is not. Where a rank has one stage, the rank's row stands for both.

Other orders (a longer warm-up, another schedule, one more microbatch) are simulated with the medians of the measured
times, and compared with the captured order, simulated likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpipe._format import PLAIN, Scale, counted, number
from fpipe.effects import parts
from fpipe.errors.arguments import checked
from fpipe.plan import Schedule
from fpipe.programs.schedules import peaked
from fpipe.timelines.measurement import Measurement
from fpipe.timelines.orders import Other, others
from fpipe.timelines.replay import Lengths, Replay
from fpipe.timelines.timeline import Timeline

_LEAST = 1e-3  # share of the makespan that a row wins
_NOTABLE = 0.02  # share of the makespan that the headline's row wins
_AS_MUCH = 0.9  # of what a broader change wins, from which the narrower stands for it
_MOSTLY = 0.75  # likewise, where the narrower is of what stands out
_LITTLE = 0.1  # share of what one changes that lies outside of what another does
_SLOW = 1.2  # times the median, from which one stands out
_VARIED = 1e-2  # relative differences of microbatches' lengths from which their order matters
_UNDER_WAY = {  # what is ideal at zero -> its tracks
    "transfers": ("receive",),
    "gathers": ("gather",),
    "scatters": ("scatter",),
    "copies of residuals": ("offload", "fetch"),
}


class Row(NamedTuple):
    """One thing that would help.

    Args:
        what: what is ideal.
        seconds: what that wins, in the timeline's unit.
        makespan: the makespan then.
        assumes: what it takes, and what is not known of it.
        headline: the same as a part of a sentence.
        slower: by what factor a rank, a stage or an edge is slower than the median; 1 for all else.
    """

    what: str
    seconds: float
    makespan: float
    assumes: str
    headline: str
    slower: float = 1.0


class _Scenario(NamedTuple):
    """One part at its ideal: the nodes that change, and the lengths, or a timeline of another order."""

    what: str
    assumes: str
    headline: str
    nodes: NDArray[np.bool_] | None
    lengths: Lengths | None
    slower: float = 1.0
    other: Other | None = None


@dataclass(frozen=True, eq=False)
class WhatIf:
    """What would help, the largest first. It prints as a table.

    Args:
        timeline: the captured one.
        replayed: the makespan of the replay with nothing changed.
        rows: what would help; none that wins less than a thousandth of the makespan. One that another wins nine tenths
            of, with a part of its change, is left out: the slow rank stands for imbalance that it alone causes, and one
            whose backwards alone are slow for every backward.
        notices: what could not be worked out, and why.
    """

    timeline: Timeline
    replayed: float
    rows: Sequence[Row]
    notices: Sequence[str]
    _timelines: Mapping[str, Callable[[], Timeline]]

    @property
    def error(self) -> float:
        """The relative difference of the replay with nothing changed to the captured makespan: the confidence."""
        return self.replayed / self.timeline.makespan - 1 if self.timeline.makespan else 0.0

    def timeline_of(self, what: str) -> Timeline:
        """Return the timeline of a row.

        Raises:
            KeyError: there is no such row.
        """
        return self._timelines[what]()

    def headline(self, scale: Scale = PLAIN) -> str:
        """Return the slow rank, stage or edge that stands out, else what helps most; "" if it wins little."""
        notable = [row for row in self.rows if row.seconds >= _NOTABLE * self.timeline.makespan]
        row = next((row for row in notable if row.slower >= _SLOW), notable[0] if notable else None)
        makespan = scale.full(self.timeline.makespan)
        return f"{row.headline}: {scale(row.seconds)} of {makespan}" if row else ""

    def as_json(self) -> dict[str, Any]:
        """Return JSON values; times are in the timeline's unit."""
        rows = [
            {key: value for key, value in row._asdict().items() if key not in ("headline", "slower")}
            for row in self.rows
        ]
        known = {"makespan": self.timeline.makespan, "replayed": self.replayed, "error": self.error}
        return {"what_if": rows, **known, "notices": list(self.notices)}

    def __repr__(self) -> str:
        return f"<WhatIf: {counted(len(self.rows), 'row')}, {self.headline() or 'nothing stands out'}>"


@checked("schedule")
def what_if(timeline: Timeline | Measurement, *, schedule: Schedule | str | None = None, orders: bool = True) -> WhatIf:
    """Return what would help a step, and how much time each part of it would win.

    Args:
        timeline: measured or predicted; of a measurement, its timeline. Its ranks ran at the same time: where one
            process runs several in turn, nothing says what one waited for.
        schedule: the schedule that ran, to add one more microbatch to it; by default it is not tried.
        orders: whether to try other orders; this takes longer than the rest.

    Raises:
        ScheduleError: the effects wait for each other in a cycle.

    >>> from fpipe import Costs, Placement, Plan, schedules, simulate
    >>> slow = Costs(forward=[1, 1, 4, 1], communication=0.25)
    >>> result = what_if(simulate(schedules.one_f_one_b, Plan(Placement.loop(4), 8), slow))
    >>> result.headline(), result.rows[0].what
    ('rank 2 computes 2x slower than the median: 19.5 of 56.5', 'rank 2')
    """
    line = timeline.timeline() if isinstance(timeline, Measurement) else timeline
    replay = Replay(line)
    notices: list[str] = []
    scenarios = [*_Ideals(replay)]
    if orders:
        simulated, reasons = others(line, schedule)
        scenarios += [_Scenario(each.what, each.assumes, each.what, None, None, other=each) for each in simulated]
        notices += reasons
    replayed, *makespans = replay.makespans(
        [replay.measured, *(each.lengths for each in scenarios if each.lengths is not None)]
    )
    of_lengths = iter(makespans)
    won = [(each.other.won if each.other else replayed - next(of_lengths), each) for each in scenarios]
    notable = [(seconds, each) for seconds, each in won if seconds > _LEAST * line.makespan]
    ranked = _ranked(notable, replay.measured.own)
    rows = [
        Row(each.what, seconds, line.makespan - seconds, each.assumes, each.headline, each.slower)
        for seconds, each in ranked
    ]
    return WhatIf(line, replayed, rows, notices, {each.what: _timeline(replay, each) for _, each in ranked})


def _timeline(replay: Replay, scenario: _Scenario) -> Callable[[], Timeline]:
    if scenario.other:
        return scenario.other.timeline
    lengths = scenario.lengths
    assert lengths is not None
    return lambda: replay.timeline_of(lengths)


def _ranked(won: Sequence[tuple[float, _Scenario]], own: NDArray[np.float64]) -> list[tuple[float, _Scenario]]:
    """Return the scenarios, largest first, without those that a narrower one stands for."""
    ranked = sorted(won, key=lambda each: -each[0])
    return [
        (seconds, each)
        for seconds, each in ranked
        if not any(_narrower(other, each, own) and more >= _enough(other) * seconds for more, other in ranked)
    ]


def _enough(narrower: _Scenario) -> float:
    """Return the share of what a broader one wins from which it stands for that."""
    return _MOSTLY if narrower.slower >= _SLOW else _AS_MUCH


def _narrower(one: _Scenario, other: _Scenario, own: NDArray[np.float64]) -> bool:
    """Return whether one changes fewer effects than the other, and those that the other leaves by little."""
    if one is other or one.nodes is None or other.nodes is None or one.lengths is None:
        return False
    changes = np.abs(one.lengths.own - own)
    outside = changes[one.nodes & ~other.nodes].sum()
    return bool(one.nodes.sum() < other.nodes.sum() and outside <= _LITTLE * changes.sum())


class _Ideals:
    """The scenarios of a replay: an iterable, in which each part is ideal alone."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.own, timeline = replay, replay.measured.own, replay.timeline
        self.plan, self.table = timeline.plan, timeline.table
        effects = [replay.spans.effects[at] for at in replay.span_of]
        self.tracks = np.array([replay.tracks[at] for at in replay.span_of])
        self.ranks, self.effects = replay.own_ranks, effects
        self.computes = self.tracks == "compute"
        subjects: list[Any] = [getattr(effect, "value", parts(effect)[0]) for effect in effects]
        self.stages = np.array([getattr(subject, "stage", -1) for subject in subjects])
        self.microbatches = np.array([getattr(subject, "microbatch", -1) for subject in subjects])
        self.slices = np.array([getattr(subject, "slice", 0) for subject in subjects])
        numbers = {kind: at for at, kind in enumerate(dict.fromkeys(map(type, effects)))}
        self.kinds, self.kind_of = list(numbers), np.array([numbers[type(effect)] for effect in effects])
        sources: list[Any] = effects
        self.sources = np.array([getattr(effect, "rank", -1) for effect in sources])

    def __iter__(self) -> Iterator[_Scenario]:
        for rank in range(self.plan.ranks):
            yield self._slow(f"rank {rank}", self.computes & (self.ranks == rank))
        for stage in range(self.plan.stages):
            holders = self.plan.placement.holders[stage]
            if len(holders) > 1 or len(self.plan.stages_on(holders[0])) > 1:
                where = f" (rank {', '.join(map(str, holders))})"
                yield self._slow(f"stage {stage}{where}", self.computes & (self.stages == stage))
        for at, kind in enumerate(self.kinds):
            nodes = self.computes & (self.kind_of == at)
            if nodes.any():
                label = self.table.effects[kind].label
                assumes = "each at the median of its microbatch over the stages"
                yield _Scenario(
                    f"every {label}", assumes, f"every {label} at its median", nodes, self._set(nodes, self.medians)
                )
        yield from self._edges()
        yield from self._causes()
        yield from self._reordered()

    @cached_property
    def medians(self) -> NDArray[np.float64]:
        """For each node, the lower median over the effects of its kind and microbatch."""
        groups = np.unique(np.stack([self.kind_of, self.microbatches, self.slices]), axis=1, return_inverse=True)[
            1
        ].reshape(-1)
        by_length = np.lexsort((self.own, groups))
        counts = np.bincount(groups)
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])
        middles: NDArray[np.float64] = self.own[by_length][first + (counts - 1) // 2][groups]
        return middles

    def _set(self, nodes: NDArray[np.bool_], own: NDArray[np.float64]) -> Lengths:
        return self.replay.measured._replace(own=np.where(nodes, own, self.own))

    def _slow(self, what: str, nodes: NDArray[np.bool_]) -> _Scenario:
        typical = float(self.medians[nodes].sum())
        times = float(self.own[nodes].sum()) / typical if typical else 1.0
        headline = f"{what} computes {number(round(times, 2))}x slower than the median" if times > 1.05 else what
        assumes = "its effects at the medians over the stages"
        return _Scenario(what, assumes, headline, nodes, self._set(nodes, self.medians), times)

    def _edges(self) -> Iterator[_Scenario]:
        """Yield each edge with transfers that take no time."""
        received = self.tracks == "receive"
        pairs = sorted(set(zip(self.sources[received].tolist(), self.ranks[received].tolist(), strict=True)))
        masks = {(a, b): received & (self.sources == a) & (self.ranks == b) for a, b in pairs}
        usual = {edge: float(np.median(self.own[nodes])) for edge, nodes in masks.items()}
        middle = float(np.median(list(usual.values()))) if usual else 0.0
        for (source, target), nodes in masks.items():
            what = f"edge {source} -> {target}"
            times = usual[source, target] / middle if middle else 0.0
            slower = f" take {number(round(times, 2))}x the median of the edges" if times > 1.05 else ""
            headline = f"transfers from rank {source} to rank {target}{slower}"
            lengths = self.replay.without(nodes)
            yield _Scenario(what, "its transfers take no time", headline, nodes, lengths, max(1.0, times))

    def _causes(self) -> Iterator[_Scenario]:
        for what, tracks in _UNDER_WAY.items():
            nodes = np.isin(self.tracks, tracks)
            if nodes.any():
                yield _Scenario(what, "they take no time", what, nodes, self.replay.without(nodes))
        yield _Scenario("host time", "none between effects", "host time", None, self.replay.idle_host())
        busy = np.bincount(self.ranks[self.computes], self.own[self.computes], self.plan.ranks)
        working = busy > 0
        scales = np.where(working, busy[working].mean() / np.where(working, busy, 1.0), 1.0)
        even = self._set(self.computes, self.own * scales[self.ranks])
        yield _Scenario("imbalance", "the same work, evenly over the ranks", "imbalance", self.computes, even)

    def _reordered(self) -> Iterator[_Scenario]:
        """Yield the microbatches in the order in which a pipeline waits least, if their lengths differ."""
        counted_ones = self.computes & (self.microbatches >= 0)
        lengths = np.bincount(self.microbatches[counted_ones], self.own[counted_ones], self.plan.microbatches)
        if len(lengths) < 3 or np.ptp(lengths) <= _VARIED * lengths.mean():
            return
        order = peaked(lengths.tolist())
        own = self.own.copy()
        columns = self.kind_of, self.stages, self.slices, self.ranks, self._consumers(), self.microbatches
        keys = list(zip(*(column.tolist() for column in columns), strict=True))
        places = {key: node for node, key in enumerate(keys)}
        for node, (*key, microbatch) in enumerate(keys):
            if microbatch >= 0:
                own[node] = self.own[places.get((*key, order[microbatch]), node)]
        changed = self.replay.measured._replace(own=own)
        assumes = f"in the order {', '.join(map(str, order[:12]))}{', …' * (len(order) > 12)} (fpipe.by_length)"
        yield _Scenario("order of microbatches", assumes, "another order of the microbatches", None, changed)

    def _consumers(self) -> NDArray[np.int64]:
        """Return the consumers that values name, which tell two of one stage and microbatch apart."""
        values = (getattr(effect, "value", None) for effect in self.effects)
        return np.array([getattr(value, "consumer", -1) for value in values])
