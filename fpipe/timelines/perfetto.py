"""Export a timeline as Chrome's trace event format, which Perfetto reads too. No torch.

- A rank is a process. Slices of one track never overlap: overlapping transfers are put on several tracks.
- A receive is two slices: the wait until its value is sent, and the transfer. An arrow connects the send to it.
- Times are whole nanoseconds from the first event. If the costs have no unit, one unit is shown as a millisecond.
- Each effect is a line, written as soon as it is made: besides the timeline, memory has the numbers of one rank.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, count, islice
from math import isfinite
from typing import Any, NamedTuple

from fpipe._format import number, sized
from fpipe.effects import Recv, Send, parts
from fpipe.tables import fields_of
from fpipe.timelines.labels import label
from fpipe.timelines.timeline import Timeline

_TRACKS = {
    "compute": "compute",
    "send": "sends",
    "receive": "receives",
    "gather": "gathers",
    "scatter": "scatters",
    "offload": "offloads",
    "fetch": "fetches",
    "host": "host",
}  # track of the table -> its name in the trace
_MOST_NS = 1 << 53  # that JSON's numbers have exactly
_DAYS = _MOST_NS // (86400 * 10**9)
_COUNTERS = 1000  # in one line
_Interval = tuple[int, int, int]  # start, end, and the number of what it is
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class TooLong(ValueError):
    """A timeline lasts longer than a trace can count nanoseconds."""


class Extras(NamedTuple):
    """Measured data of a rank that the timeline does not contain.

    Args:
        bytes: by index in the rank's program, the bytes that a send or receive carries; NaN if unknown.
        used: by the same index, when the first use of a received value began to wait for it; NaN if unknown.
        memory: times, and by the same index the live bytes from then on.
        host: the host's work around the effects: (name, start, end).
    """

    bytes: Sequence[float] = ()
    used: Sequence[float] = ()
    memory: tuple[Sequence[float], Sequence[float]] = ((), ())
    host: Sequence[tuple[str, float, float]] = ()


_NONE: Mapping[int, Extras] = {}
_NOTHING = Extras()


class _Slice(NamedTuple):
    """A named interval on a track.

    Args:
        flow: the id, from 1 on, of the arrow that starts here, or with `arrives` ends here; 0 for none.
    """

    name: str
    category: str
    start: int
    end: int
    args: Mapping[str, object]
    flow: int = 0
    arrives: bool = False

    def event(self) -> dict[str, object]:
        """Return the slice as a complete event; its times are in microseconds."""
        begin, duration = self.start / 1000, (self.end - self.start) / 1000
        event = {"ph": "X", "name": self.name, "cat": self.category, "ts": begin, "dur": duration, "args": self.args}
        arrow = {"bind_id": f"0x{self.flow:x}", "flow_in" if self.arrives else "flow_out": True}
        return event | (arrow if self.flow else {})


@dataclass(frozen=True)
class _Trace:
    timeline: Timeline
    schedule: str
    unit: str
    extras: Mapping[int, Extras]

    @property
    def labels(self) -> list[str]:
        """The labels that every rank shows: the schedule, and the unit of time."""
        schedule = _sound(self.schedule)
        return [*([schedule] if schedule else []), *([] if self.unit == "s" else ["1 ms is one unit of time"])]

    @cached_property
    def origin(self) -> float:
        hosts = (start for extras in self.extras.values() for _, start, _ in extras.host)
        return min(chain(self.timeline.spans.starts, hosts), default=0.0)

    def check(self) -> None:
        """Raise TooLong if there are times that are not exact in a trace."""
        hosts = (end for extras in self.extras.values() for *_, end in extras.host)
        memory = (at for extras in self.extras.values() for at in extras.memory[0] if isfinite(at))
        last = max(chain(self.timeline.spans.ends, hosts, memory), default=0.0)
        if self.ns(last) > _MOST_NS:
            unit = " s" if self.unit == "s" else ", of which a trace shows each as a millisecond"
            raise TooLong(
                f"it lasts {number(last - self.origin)}{unit}, and nanoseconds are exact up to {_DAYS} days: "
                "take .csv, or a figure"
            )

    def name(self, rank: int, at: int) -> str:
        return label(self.timeline.spans.effects[at], rank, self.timeline.plan, self.timeline.table)

    def ns(self, time: float) -> int:
        return round((time - self.origin) * (1e9 if self.unit == "s" else 1e6))

    def lines(self) -> Iterator[list[dict[str, object]]]:
        """Yield the events of each line. Ids start at 1, because 0 means the idle process or thread."""
        ranks, labels = self.timeline.plan.ranks, ", ".join(self.labels)
        for rank in range(ranks):
            yield [
                _named("process_name", rank, name=f"rank {rank}"),
                _named("process_sort_index", rank, sort_index=rank),
                _named("process_labels", rank, labels=labels),
            ]
        tracks = count(ranks + 1)  # smaller numbers are those of the ranks' processes
        for rank in range(ranks):
            for (name, lane), track in zip(self._lanes(rank), tracks, strict=False):
                named = _named("thread_name", rank, name=name), _named("thread_sort_index", rank, sort_index=track)
                yield [event | {"tid": track} for event in named]
                for slices in lane:
                    yield [{"pid": rank + 1, "tid": track} | each.event() for each in slices]
            counters = self._counters(rank)
            while line := list(islice(counters, _COUNTERS)):
                yield line

    def _lanes(self, rank: int) -> Iterator[tuple[str, Iterator[list[_Slice]]]]:
        """Yield the name of each lane of a rank, and the slices of each of its effects."""
        spans, groups = self.timeline.spans, dict[str, list[_Interval]]()
        for at in spans.of(rank):
            start = self.ns(spans.starts[at])
            group = groups.setdefault(_TRACKS[self._track(at)], [])
            group.append((start, max(start, self.ns(spans.ends[at])), at))
        works = [
            _Slice(_sound(work), "host", self.ns(start), max(self.ns(start), self.ns(end)), {})
            for work, start, end in self.extras.get(rank, _NOTHING).host
        ]
        groups.setdefault("host", []).extend((work.start, work.end, ~at) for at, work in enumerate(works))
        for name in _TRACKS.values():
            for place, lane in enumerate(_without_overlap(groups.get(name, ())), 1):
                slices = (self._slices(rank, at) if at >= 0 else [works[~at]] for at in lane)
                yield name if place == 1 else f"{name} {place}", slices

    def _track(self, at: int) -> str:
        return self.timeline.table.effects[type(self.timeline.spans.effects[at])].track

    def _slices(self, rank: int, at: int) -> list[_Slice]:
        """Return the slices of one effect; for a receive its wait, if it had one, and its transfer."""
        spans = self.timeline.spans
        effect, start = spans.effects[at], self.ns(spans.starts[at])
        end = max(start, self.ns(spans.ends[at]))
        name, args = self.name(rank, at), self._args(rank, at)
        if isinstance(effect, Send):
            return [_Slice(name, "send", start, end, args, at + 1 if self._received[at] else 0)]
        if not isinstance(effect, Recv):
            return [_Slice(name, self._track(at), start, end, args)]
        sent = spans.waited[at]
        if sent < 0 or not isinstance(spans.effects[sent], Send):
            return [_Slice(name, "receive", start, end, args)]
        begun = min(max(start, self.ns(spans.starts[sent])), end)
        transfer = _Slice(name, "receive", begun, end, args, sent + 1, arrives=True)
        if begun == start:
            return [transfer]
        wait = _Slice(name.replace("receive", "wait for"), "wait", start, begun, {"row": args["row"]})
        return [wait, transfer]

    @cached_property
    def _received(self) -> bytearray:
        """For each span 1 if a receive waited for it."""
        spans = self.timeline.spans
        received = bytearray(len(spans))
        for at, effect in enumerate(spans.effects):
            if isinstance(effect, Recv) and spans.waited[at] >= 0:
                received[spans.waited[at]] = 1
        return received

    def _args(self, rank: int, at: int) -> dict[str, object]:
        spans = self.timeline.spans
        row, waited = at - spans.first[rank], spans.waited[at]
        args = _fields(spans.effects[at]) | {"row": row}
        extras = self.extras.get(rank, _NOTHING)
        if row < len(extras.bytes) and isfinite(extras.bytes[row]):
            args["bytes"] = int(extras.bytes[row])
        if row < len(extras.used) and isfinite(extras.used[row]):
            args["first use waits from, µs"] = self.ns(extras.used[row]) / 1000
        if waited >= 0:
            source = bisect_right(spans.first, waited) - 1
            args["waited for"] = f"{self.name(source, waited)} on rank {source}"
        return args

    def _counters(self, rank: int) -> Iterator[dict[str, object]]:
        recorded = self.extras.get(rank, _NOTHING).memory
        memory: Iterable[tuple[float, float]] = zip(*recorded, strict=True)
        if len(recorded[0]) == 0 and sized(self.timeline.costs):
            memory = self.timeline.memory(rank)
        flight = self.timeline.in_flight(rank)
        for name, unit, steps in (("microbatches in flight", "microbatches", flight), ("memory", "bytes", memory)):
            for at, value in steps:
                if isfinite(at) and isfinite(value):
                    since = max(0, self.ns(at)) / 1000
                    yield {"ph": "C", "pid": rank + 1, "name": name, "ts": since, "args": {unit: value}}


def _named(kind: str, rank: int, **args: object) -> dict[str, object]:
    """Return a metadata event of a rank's process."""
    return {"ph": "M", "pid": rank + 1, "name": kind, "args": args}


def _sound(text: str) -> str:
    """Return text that UTF-8 can encode; text from other sources may contain half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def _without_overlap(group: Iterable[_Interval]) -> list[array[int]]:
    """Distribute intervals over as few lanes as possible without overlap, and return the numbers on each."""
    lanes: list[array[int]] = []
    free: list[tuple[int, int]] = []  # the end of a lane's last interval, and the lane's index
    for start, end, at in sorted(group):
        if free and free[0][0] <= start:
            lane = heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append(array("q"))
        lanes[lane].append(at)
        heappush(free, (end, lane))
    return lanes


def _fields(effect: Any) -> dict[str, object]:
    """Return the effect's kind and its fields; of an overlap, those of both parts."""
    kind, names = type(effect).__name__, fields_of(type(effect))
    if hasattr(effect, "value"):
        value = effect.value
        carried = {name: getattr(value, name) for name in fields_of(type(value))}
        return {"kind": f"{kind} {type(value).__name__}", **carried, "peer": effect.rank}
    if len(parts(effect)) > 1:
        both = {f"{name} {field}": n for name in names for field, n in _fields(getattr(effect, name)).items()}
        return {"kind": kind, **both}
    numbers = {name: getattr(effect, name) for name in names}
    return {"kind": kind, **{name: n if isinstance(n, int) else str(n) for name, n in numbers.items()}}


def chrome_json(
    timeline: Timeline,
    *,
    schedule: str = "",
    unit: str = "",
    extras: Mapping[int, Extras] = _NONE,
) -> Iterator[str]:
    """Return the JSON of a timeline, line by line: one for each effect, and few others.

    Args:
        timeline: the timeline to export.
        schedule: its name.
        unit: the unit of its times: "s", or none.
        extras: rank -> measured data that the timeline does not contain.

    Raises:
        TooLong: nanoseconds would not be exact.
    """
    trace = _Trace(timeline, schedule, unit, extras)
    trace.check()
    return _json(trace)


def _json(trace: _Trace) -> Iterator[str]:
    unit, schedule = trace.unit, trace.schedule
    header = {"schedule": _sound(schedule), "time": "µs" if unit == "s" else "1000 µs are one unit of time"}
    yield f'{{"displayTimeUnit":"ns","otherData":{json.dumps(header)},"traceEvents":[\n'
    before = ""
    for events in trace.lines():
        yield before + _ENCODER.encode(events)[1:-1]
        before = ",\n"
    yield "\n]}\n"
