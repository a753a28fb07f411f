"""A measured step: its transfers and waits, each rank's account of time, its timeline. No torch.

Times of two ranks are compared only if both were read from one clock, or the clocks' offset was measured. An arrival is
reported only to a waiting caller: for a value that was there at its first use, only an upper bound is known.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import accumulate, pairwise
from math import inf, isnan
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from fpipe._format import aligned, extent
from fpipe.costs import PIECES, Costs, relative
from fpipe.effects import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Decode,
    Effect,
    Fetch,
    Forward,
    Gather,
    Name,
    Offload,
    Overlap,
    Prefill,
    Recompute,
    Recv,
    Scatter,
    Send,
    Update,
    Value,
    parts,
)
from fpipe.plan import Plan
from fpipe.programs.program import Program, Programs, plan_of, table_of
from fpipe.programs.residuals import moves
from fpipe.tables import LANES, TABLE, Table, fields_of, slice_of
from fpipe.timelines.spans import Spans
from fpipe.timelines.timeline import Timeline

SHORT_WAIT = 50e-6  # seconds that a use takes to get a value that is there
LAST_SHARE = 0.05  # a wait of at most this share of the transfer is too short to show that the value arrived in it


class Columns(NamedTuple):
    """One rank's times of a step, by the index of the effect in its program; seconds.

    Args:
        starts, ends: of each effect on the host. Sends, receives, gathers and scatters only post; but the first message
            of a step waits until the ranks have agreed on the step.
        waits, arrivals: of each receive, and of what runs on a lane, as gathers do: when the first use of its value
            began to wait for it, and when it got the value; NaN for others, and for a gather where parameters are whole
            at all times.
    """

    starts: array[float]
    ends: array[float]
    waits: array[float]
    arrivals: array[float]


def posts_of(program: Program) -> Mapping[Name, Sequence[int]]:
    """Return for each value that arrives later the indices of the effects that post it."""
    posts = defaultdict[Name, list[int]](list)
    for at, effect in enumerate(program):
        if program.table.effects[type(effect)].track in ("receive", *LANES):
            for name in program.table.gives(effect, program.plan):
                posts[name].append(at)
    return dict(posts)


class Receive(NamedTuple):
    """A receive as its rank measured it, split in waiting and transfer; seconds.

    Args:
        posted: when the receive was posted.
        sent: when its send was posted; None if that rank was not recorded here.
        used, arrived: when the value's first use began to wait for it, and when it got the value.
    """

    effect: Recv
    posted: float
    sent: float | None
    used: float
    arrived: float

    @property
    def there(self) -> bool:
        """Whether the value was there at its first use, judged by a short wait.

        If so, `arrived` is an upper bound, and so is `transfer`.
        """
        waited = self.arrived - self.used
        if self.sent is None:
            return waited <= SHORT_WAIT
        return self.sent <= self.used and waited <= max(SHORT_WAIT, LAST_SHARE * self.transfer)

    @property
    def left(self) -> float:
        """The time when both sides had posted."""
        if self.sent is None:
            raise ValueError(f"{self.effect.value} was sent by rank {self.effect.rank}, which is not recorded here")
        return min(max(self.posted, self.sent), self.arrived)

    @property
    def waiting(self) -> float:
        """The time from the post until the sender had posted too."""
        return self.left - self.posted

    @property
    def transfer(self) -> float:
        """The time from when both sides had posted until the value arrived."""
        return self.arrived - self.left

    @property
    def exposed(self) -> float:
        """The part of the transfer in which the rank only waited for it."""
        return self.arrived - max(self.left, self.used)


class Collective(NamedTuple):
    """A gather or a scatter over the replicas, or a copy to or from the host, as its rank measured it; seconds.

    Args:
        posted: when its post began.
        began: `posted`, or if that was later, the arrival of the one before it, if the rank waited for that.
        used, arrived: when its value's first use began to wait for it, and when it got the value.
    """

    effect: Effect
    posted: float
    began: float
    used: float
    arrived: float

    @property
    def transfer(self) -> float:
        """The time until its value was there: an upper bound if it was there at its first use."""
        return self.arrived - self.began

    @property
    def waited(self) -> float:
        """The part of that time in which the rank only waited for it."""
        return self.arrived - self.used

    @property
    def there(self) -> bool:
        """Whether the value was there at its first use, judged by a short wait."""
        return self.waited <= max(SHORT_WAIT, LAST_SHARE * self.transfer)


class Account(NamedTuple):
    """An account of the time of one rank's step; seconds.

    Args:
        compute: time in pieces.
        between: for each two consecutive pieces, the time between them without waits for values: host time, and once a
            step the ranks' agreement. If one process runs several ranks, it contains the work of the other ranks.
        posting: time in sends, receives, and posts of gathers, scatters and copies.
        waiting: time in waits for values from other ranks.
        exposed: the part of `waiting` in which the value was being transferred; None, as are the next two, if a sender
            was not recorded here.
        hidden: transfers under compute, of values that the rank finally waited for.
        hidden_at_most: transfers under compute of all values, including those with only a bound.
        receives, there: the number of receives, and of those whose value was there at its first use.
        gathering: time in waits for parameters that are gathered over the replicas.
        scattering: time in waits for gradients that are added over the replicas.
        offloading, fetching: time in waits for copies of residuals to the host, and for those back.
    """

    compute: float
    between: list[float]
    posting: float
    waiting: float
    exposed: float | None
    hidden: float | None
    hidden_at_most: float | None
    receives: int
    there: int
    gathering: float = 0.0
    scattering: float = 0.0
    offloading: float = 0.0
    fetching: float = 0.0

    def _cells(self, replicas: bool, host: bool) -> tuple[str, ...]:
        """Return the cells of a row of the table, in milliseconds."""
        hidden = "-" if self.hidden is None else f"{_ms(self.hidden)} to {_ms(self.hidden_at_most)}"
        return (
            *map(_ms, (self.compute, sum(self.between), median(self.between) if self.between else 0.0)),
            *map(_ms, (self.posting, self.waiting, self.exposed)),
            *(hidden, f"{self.there} of {self.receives}"),
            *(map(_ms, (self.gathering, self.scattering)) if replicas else ()),
            *(map(_ms, (self.offloading, self.fetching)) if host else ()),
        )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


@dataclass(frozen=True)
class Measurement:
    """A measured step, or several in a row. It prints as a table of each rank's account.

    Args:
        programs: the programs of all ranks.
        columns: the times of the recorded ranks in all steps; those of several processes are on the clock of rank 0, of
            the first replica.
        offsets: seconds by which a rank's clock is ahead of that one.
        uncertainty: seconds by which the offset may be wrong; 0 if both ranks read the same clock.
        replicas: the measurements of all replicas, this one among them, on one clock; empty where only one is known.
        steps: how many steps the columns have, one behind the other, each with the effects of the programs.
    """

    programs: Programs
    columns: Mapping[int, Columns]
    offsets: Mapping[int, float] = field(default_factory=dict)
    uncertainty: Mapping[int, float] = field(default_factory=dict)
    replicas: Sequence[Measurement] = ()
    steps: int = 1

    def __repr__(self) -> str:
        return f"<Measurement: {extent(self.plan)}; recorded: ranks {', '.join(map(str, self.columns))}>"

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def plan(self) -> Plan:
        """The plan of the programs."""
        return plan_of(self.programs)

    @property
    def table(self) -> Table:
        """The table of the programs' effects."""
        return table_of(self.programs)

    def _effects(self, rank: int) -> Sequence[Effect]:
        """Return a rank's effects in all steps."""
        return self.programs[rank].effects * self.steps

    def _computes(self, effect: Effect) -> bool:
        return self._track(effect) == "compute"

    def _track(self, effect: Effect) -> str:
        return self.table.effects[type(effect)].track

    def receives(self, rank: int) -> list[Receive]:
        """Return a rank's receives, in the order of their posts."""
        return list(self._receives(rank).values())

    def _receives(self, rank: int) -> dict[int, Receive]:
        """Return a rank's receives, by their indices in its effects."""
        columns = self.columns[rank]
        return {
            at: Receive(effect, start, self._sent(effect, rank, at), columns.waits[at], columns.arrivals[at])
            for at, (effect, start) in enumerate(zip(self._effects(rank), columns.starts, strict=True))
            if isinstance(effect, Recv)
        }

    def collectives(self, rank: int) -> list[Collective]:
        """Return a rank's gathers, scatters and copies to and from the host, in the order of their posts."""
        return list(self._collectives(rank).values())

    def _collectives(self, rank: int) -> dict[int, Collective]:
        """Return a rank's gathers, scatters and copies, by their indices in its effects."""
        columns, collectives, free = self.columns[rank], dict[int, Collective](), dict[str, float]()
        for at, effect in enumerate(self._effects(rank)):
            if (track := self._track(effect)) in LANES:
                posted, done = columns.starts[at], columns.ends[at]
                used, arrived = columns.waits[at], columns.arrivals[at]
                if isnan(arrived):
                    used = arrived = done
                began = max(posted, min(free.get(track, posted), arrived))
                collectives[at] = collective = Collective(effect, posted, began, used, arrived)
                if not collective.there:
                    free[track] = arrived
        return collectives

    def _sent(self, receive: Recv, rank: int, at: int) -> float | None:
        sender = self.columns.get(receive.rank)
        return None if sender is None else sender.starts[self._send(receive, rank, at)]

    def _send(self, receive: Recv, rank: int, at: int) -> int:
        """Return the index of a receive's send in the sender's effects; `at` is that of the receive in its rank's."""
        step = at // len(self.programs[rank])
        return step * len(self.programs[receive.rank]) + self._sends[receive.value, rank]

    @cached_property
    def _sends(self) -> dict[tuple[Value, int], int]:
        """(value, receiving rank) -> index of its send in the sender's program."""
        return {
            (effect.value, effect.rank): at
            for program in self.programs.values()
            for at, effect in enumerate(program)
            if isinstance(effect, Send)
        }

    def account(self, rank: int) -> Account:
        """Return the account of a rank's time."""
        columns, effects, receives = self.columns[rank], self._effects(rank), self.receives(rank)
        spans = list(zip(columns.starts, columns.ends, strict=True))
        pieces = [span for effect, span in zip(effects, spans, strict=True) if self._computes(effect)]
        collectives = self.collectives(rank)
        computed = _Intervals(pieces)
        waits = {
            track: _Intervals(sorted((c.used, c.arrived) for c in collectives if self._track(c.effect) == track))
            for track in LANES
        }
        arrivals = _Intervals(sorted((r.used, r.arrived) for r in receives))
        both: Sequence[Receive | Collective] = [*receives, *collectives]
        waited = _Intervals(sorted((each.used, each.arrived) for each in both))
        posting = ("send", "receive", *LANES)
        posts = [span for effect, span in zip(effects, spans, strict=True) if self._track(effect) in posting]
        hidden = [(r.there, computed.within(r.left, r.arrived)) for r in receives if r.sent is not None]
        known = len(hidden) == len(receives)
        return Account(
            computed.total,
            [start - end - waited.within(end, start) for (_, end), (start, _) in pairwise(pieces)],
            sum(end - start for start, end in posts),
            arrivals.total,
            sum(r.exposed for r in receives) if known else None,
            sum(took for there, took in hidden if not there) if known else None,
            sum(took for _, took in hidden) if known else None,
            len(receives),
            sum(r.there for r in receives),
            *(waits[track].total for track in LANES),
        )

    def __str__(self) -> str:
        replicas = self.plan.replicas > 1 or bool(self.plan.gathered)
        head = ("rank", "compute", "between", "each", "posting", "waiting", "exposed", "hidden", "there")
        host = any(map(moves, self.programs.values()))
        more = (*(("gathering", "scattering") if replicas else ()), *(("offloading", "fetching") if host else ()))
        rows = [(*head, *more), *((str(rank), *self.account(rank)._cells(replicas, host)) for rank in self.columns)]
        clocks = f"; clocks within {_ms(max(self.uncertainty.values()))}" if any(self.uncertainty.values()) else ""
        of = f" of {self.steps} steps" if self.steps > 1 else ""
        legend = (
            f"milliseconds{of}{clocks}; between two pieces, in all and the median; posting sends and receives;\n"
            "waiting for values, exposed of it with the value under way; hidden: transfers under compute, what is "
            "known and at most;\nthere: values that came before their first use, of all received"
            + (";\ngathering, scattering: waits for parameters and sums of gradients over the replicas" * replicas)
            + (";\noffloading, fetching: waits for residuals on their way to the host and back" * host)
        )
        return "\n".join([*aligned(rows), legend])

    def timeline(self, costs: Costs = Costs(), *, partial: bool = False) -> Timeline:
        """Return the timeline of all ranks of this replica, in seconds from `origin`, with the same number of steps.

        What was posted before that has negative times. A send ends when its value arrives. If the value was there at
        its first use, the true end of its send and receive may be earlier; that of a gather, a scatter or a copy too. A
        compute waited for these if the value was not there. Host time in a gap counts as the wait in that gap, by
        default a dependency.

        Args:
            costs: the sizes from which `memory` counts bytes.
            partial: allow ranks that are not recorded; they have no spans. A send to such a rank ends with its post,
                and a receive from it waited for no span.

        Raises:
            ValueError: a rank is not recorded here, and `partial` is False.
        """
        missing = [rank for rank in range(self.plan.ranks) if rank not in self.columns]
        if missing and not partial:
            raise ValueError(
                f"rank {missing[0]} is not recorded in this process: call fpipe.gather(recording, group) on every rank"
            )
        return Timeline(self.plan, self._spans(self.origin), costs, self.steps)

    @cached_property
    def origin(self) -> float:
        """When the first rank of any replica begins to compute, or to gather for that, on the clock of the columns.

        Where no rank computes, the start of the first effect.
        """
        every = self.replicas or (self,)
        lines = [Timeline(each.plan, each._spans(0.0)) for each in every]
        starts = (start for each in every for columns in each.columns.values() for start in columns.starts)
        return min([line.start for line in lines if any(line.kinds)] or starts)

    def costs(self) -> Costs:
        """Return measured costs in seconds: medians for each kind of effect and stage, and for each edge's transfers.

        Of slices, the means of their medians, with the factors of each as `slice_scale`; of slices of prompts without.
        For transfers, gathers, scatters and copies, the median of those waited for; if none was, the smallest upper
        bound. A kind that a stage never ran costs 0, so use these costs to `simulate` the same schedule.
        """
        taken = defaultdict[tuple[type, int], dict[int, list[float]]](lambda: defaultdict(list))
        for rank, columns in self.columns.items():
            for effect, start, end in zip(self._effects(rank), columns.starts, columns.ends, strict=True):
                if self._computes(effect) or type(effect) not in TABLE.effects:
                    part = parts(effect)[0]
                    number = part.token if isinstance(part, Prefill) else slice_of(part)
                    taken[type(effect), getattr(part, "stage", 0)][number].append(end - start)
        stages, slices = range(self.plan.stages), range(self.plan.slices)

        def medians(kind: type, stage: int) -> dict[int, float]:
            return {t: median(seconds) for t, seconds in taken.get((kind, stage), {}).items()}

        def times(kind: type) -> list[float]:
            return [fmean(medians(kind, s).values() or [0.0]) for s in stages]

        def factors(kind: type) -> list[list[float]]:
            means = times(kind)
            return [relative([medians(kind, s).get(t, means[s]) for t in slices], means[s]) for s in stages]

        def times_of_some(kind: type) -> list[float] | None:
            return times(kind) if any(times(kind)) else None

        again = times_of_some(Recompute)
        timed = PIECES if again is None else {**PIECES, Recompute: "recompute"}
        extra = sorted({kind for kind, _ in taken if kind not in TABLE.effects}, key=lambda kind: kind.__name__)
        return Costs(
            forward=times(Forward),
            backward_input=times(BackwardInput),
            backward_weight=times(BackwardWeight),
            backward=times(Backward),
            overlap=times(Overlap),
            communication=self._transfers(),
            gather=self._lane_times(Gather),
            scatter=self._lane_times(Scatter),
            update=times(Update),
            offload=self._lane_times(Offload),
            fetch=self._lane_times(Fetch),
            recompute=again,
            prefill=times_of_some(Prefill),
            decode=times_of_some(Decode),
            slice_scale={name: factors(kind) for kind, name in timed.items()} if len(slices) > 1 else (),
            replicas=self.plan.replicas,
            extra={kind: times(kind) if "stage" in fields_of(kind) else times(kind)[0] for kind in extra},
        )

    def _transfers(self) -> dict[tuple[int, int], float]:
        return _times(
            ((receive.effect.rank, rank), receive)
            for rank in self.columns
            for receive in self.receives(rank)
            if receive.sent is not None
        )

    def _lane_times(self, kind: type[Gather | Scatter | Offload | Fetch]) -> list[float]:
        times = _times(
            (collective.effect.stage, collective)
            for rank in self.columns
            for collective in self.collectives(rank)
            if isinstance(collective.effect, kind)
        )
        return [times.get(stage, 0.0) for stage in range(self.plan.stages)]

    def _spans(self, origin: float) -> Spans:
        ranks = range(self.plan.ranks)
        here = [rank for rank in ranks if rank in self.columns]
        first = [0, *accumulate(len(self.columns[rank].starts) if rank in self.columns else 0 for rank in ranks)]
        starts = array("d", [start - origin for rank in here for start in self.columns[rank].starts])
        ends = array("d", [end - origin for rank in here for end in self.columns[rank].ends])
        waited = array("q", [-1]) * first[-1]
        for rank in here:
            for at, receive in self._receives(rank).items():
                index, arrived = first[rank] + at, receive.arrived - origin
                if receive.sent is not None:
                    waited[index] = sent = first[receive.effect.rank] + self._send(receive.effect, rank, at)
                    ends[sent] = arrived = max(starts[sent], arrived)
                ends[index] = max(starts[index], arrived)
            for at, collective in self._collectives(rank).items():
                index = first[rank] + at
                starts[index], ends[index] = collective.began - origin, collective.arrived - origin
            for at, before in self._waited(rank):
                waited[first[rank] + at] = -1 if before is None else first[rank] + before
        effects = [effect for rank in here for effect in self._effects(rank)]
        return Spans(first, effects, starts, ends, waited, self.table)

    def _waited(self, rank: int) -> Iterator[tuple[int, int | None]]:
        """Yield the index of each effect but receives, and that of the effect or late value that it waited for."""
        receives, collectives = self._receives(rank), self._collectives(rank)
        late = dict[Name, tuple[float, int]]()
        lanes = dict[str, int]()  # the last one of a lane that was waited for
        last: int | None = None
        ended = -inf
        for at, effect in enumerate(self._effects(rank)):
            post = receives.get(at) or collectives.get(at)
            if post is not None:
                for name in self.table.gives(effect, self.plan):
                    late[name] = (-inf if post.there else post.arrived, at)
            if at in collectives:
                track = self._track(effect)
                yield at, lanes[track] if collectives[at].began > collectives[at].posted else last
                if not collectives[at].there:
                    lanes[track] = at
            elif isinstance(effect, Send):
                yield at, last
            elif not isinstance(effect, Recv):
                arrivals = [late[name] for name in self.table.needs(effect, self.plan) if name in late]
                arrived, received = max(arrivals, default=(-inf, -1))
                yield at, received if arrived > ended else last
                last, ended = at, self.columns[rank].ends[at]


Key = TypeVar("Key")


def _times(transfers: Iterable[tuple[Key, Receive | Collective]]) -> dict[Key, float]:
    """Return the median time of the transfers that were waited for; for a key without these, the smallest bound."""
    late, there = (defaultdict[Key, list[float]](list) for _ in range(2))
    for key, transfer in transfers:
        (there if transfer.there else late)[key].append(transfer.transfer)
    bounds = {key: min(times) for key, times in there.items()}
    return bounds | {key: median(times) for key, times in late.items()}


class _Intervals:
    """Intervals of time that don't overlap, in order: their total, and the part of them within another interval."""

    def __init__(self, intervals: Sequence[tuple[float, float]]) -> None:
        self.starts, self.ends = [start for start, _ in intervals], [end for _, end in intervals]
        self.sums = [0.0, *accumulate(end - start for start, end in intervals)]

    @property
    def total(self) -> float:
        return self.sums[-1]

    def within(self, start: float, end: float) -> float:
        return max(0.0, self._before(end) - self._before(start))

    def _before(self, time: float) -> float:
        at = bisect_right(self.starts, time)
        return self.sums[at] - max(0.0, self.ends[at - 1] - time) if at else 0.0
