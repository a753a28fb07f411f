"""Export a timeline for Perfetto and Chrome's trace viewer, as JSON or as Perfetto's protobuf. No torch.

- A rank is a process. Slices of one track never overlap: overlapping transfers are put on several tracks.
- A receive is two slices: the wait until its value is sent, and the transfer. An arrow connects the send to it.
- Times are whole nanoseconds from the first event. If the costs have no unit, one unit is shown as a millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, count, islice
from math import isfinite
from typing import Any, NamedTuple, TypeVar

from fpipe.effects import Effect, Recv, Send, parts
from fpipe.plan import Plan
from fpipe.tables import TABLE, Table, fields_of
from fpipe.timelines.format import sized
from fpipe.timelines.text import text
from fpipe.timelines.timeline import Timeline

_TRACKS = {
    "compute": "compute",
    "send": "sends",
    "receive": "receives",
    "host": "host",
}  # track of the table -> its name in the trace
_BATCH = 1000  # packets or events in one piece of the output
_SEQUENCE = 1  # the id of the writer, in every packet


class Extras(NamedTuple):
    """Measured data of a rank that the timeline does not contain.

    Args:
        bytes: by index in the rank's program, the bytes that a send or receive carries; NaN if unknown.
        used: by the same index, when the first use of a received value began to wait for it; NaN if unknown.
        memory: (time, live bytes from then on).
        host: the host's work around the effects: (name, start, end).
    """

    bytes: Sequence[float] = ()
    used: Sequence[float] = ()
    memory: Sequence[tuple[float, float]] = ()
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


class _Sample(NamedTuple):
    """A counter's value from a time on."""

    at: int
    value: float


class _Track(NamedTuple):
    """A lane of slices, or a counter with the unit `counts`."""

    rank: int
    number: int
    name: str
    counts: str
    content: Iterable[_Slice | _Sample]


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

    @cached_property
    def names(self) -> list[tuple[str, int]]:
        """The name and the rank of each span."""
        spans, plan = self.timeline.spans, self.timeline.plan
        return [
            (label(spans.effects[at], rank, plan, spans.table), rank)
            for rank in range(plan.ranks)
            for at in spans.of(rank)
        ]

    def ns(self, time: float) -> int:
        return round((time - self.origin) * (1e9 if self.unit == "s" else 1e6))

    def tracks(self) -> Iterator[_Track]:
        ranks = self.timeline.plan.ranks
        numbers = count(ranks + 1)  # smaller numbers are those of the ranks' processes
        for rank in range(ranks):
            for name, lane in self._lanes(rank):
                yield _Track(rank, next(numbers), name, "", lane)
            for name, unit, samples in self._counters(rank):
                yield _Track(rank, next(numbers), name, unit, samples)

    def _lanes(self, rank: int) -> Iterator[tuple[str, list[_Slice]]]:
        groups: dict[str, list[list[_Slice]]] = {name: [] for name in _TRACKS.values()}
        for at in self.timeline.spans.of(rank):
            groups[_TRACKS[self._track(at)]].append(self._slices(rank, at))
        for work, start, end in self.extras.get(rank, _NOTHING).host:
            groups["host"].append([_Slice(_sound(work), "host", self.ns(start), max(self.ns(start), self.ns(end)), {})])
        for name, group in groups.items():
            for number, lane in enumerate(_without_overlap(group), 1):
                yield name if number == 1 else f"{name} {number}", lane

    def _track(self, at: int) -> str:
        return self.timeline.table.effects[type(self.timeline.spans.effects[at])].track

    def _slices(self, rank: int, at: int) -> list[_Slice]:
        """Return the slices of one effect; for a receive its wait, if it had one, and its transfer."""
        spans = self.timeline.spans
        effect, start = spans.effects[at], self.ns(spans.starts[at])
        end = max(start, self.ns(spans.ends[at]))
        name, args = self.names[at][0], self._args(rank, at)
        if isinstance(effect, Send):
            return [_Slice(name, "send", start, end, args, at + 1 if at in self._received else 0)]
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
    def _received(self) -> set[int]:
        """The sends that a receive waited for."""
        spans = self.timeline.spans
        receives = (at for at, effect in enumerate(spans.effects) if isinstance(effect, Recv))
        return {spans.waited[at] for at in receives}

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
            args["waited for"] = "{} on rank {}".format(*self.names[waited])
        return args

    def _counters(self, rank: int) -> Iterator[tuple[str, str, list[_Sample]]]:
        if flight := self.timeline.in_flight(rank):
            yield "microbatches in flight", "microbatches", self._samples(flight)
        if memory := self._memory(rank):
            yield "memory", "bytes", self._samples(memory)

    def _memory(self, rank: int) -> Sequence[tuple[float, float]]:
        if measured := self.extras.get(rank, _NOTHING).memory:
            return measured
        return self.timeline.memory(rank) if sized(self.timeline.costs) else []

    def _samples(self, steps: Iterable[tuple[float, float]]) -> list[_Sample]:
        return [_Sample(max(0, self.ns(at)), value) for at, value in steps if isfinite(at) and isfinite(value)]


def _sound(text: str) -> str:
    """Return text that UTF-8 can encode; text from other sources may contain half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def _without_overlap(group: Iterable[list[_Slice]]) -> list[list[_Slice]]:
    """Distribute slices over as few lanes as possible without overlap. The slices of one effect stay on one lane."""
    lanes: list[list[_Slice]] = []
    free: list[tuple[int, int]] = []  # the end of a lane's last slice, and the lane's index
    for slices in sorted(group, key=lambda slices: (slices[0].start, slices[-1].end)):
        if free and free[0][0] <= slices[0].start:
            lane = heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane] += slices
        heappush(free, (slices[-1].end, lane))
    return lanes


def label(effect: Effect, rank: int, plan: Plan, table: Table = TABLE) -> str:
    """Return the name of an effect on a rank.

    >>> from fpipe import Placement
    >>> from fpipe.effects import Activation
    >>> label(Send(Activation(0, 3), 1), 0, Plan(Placement.loop(2), 4))
    'send activation 3'
    """
    if any(table.effects[type(part)].work for part in parts(effect)):
        return text(effect, rank, plan, table, chunk=False)
    return table.text(effect)


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


_Each = TypeVar("_Each")


def _batches(stream: Iterator[_Each]) -> Iterator[list[_Each]]:
    while batch := list(islice(stream, _BATCH)):
        yield batch


def chrome_json(
    timeline: Timeline,
    *,
    schedule: str = "",
    unit: str = "",
    extras: Mapping[int, Extras] = _NONE,
) -> Iterator[str]:
    """Yield Chrome's trace event format in pieces; Perfetto reads it too.

    Args:
        timeline: the timeline to export.
        schedule: its name.
        unit: the unit of its times: "s", or none.
        extras: rank -> measured data that the timeline does not contain.
    """
    trace = _Trace(timeline, schedule, unit, extras)
    header = {"schedule": _sound(schedule), "time": "µs" if unit == "s" else "1000 µs are one unit of time"}
    yield f'{{"displayTimeUnit":"ns","otherData":{json.dumps(header)},"traceEvents":[\n'
    before = ""
    for events in _batches(_events(trace)):
        yield before + json.dumps(events, allow_nan=False, separators=(",", ":"))[1:-1]
        before = ",\n"
    yield "\n]}\n"


def _events(trace: _Trace) -> Iterator[dict[str, object]]:
    for rank in range(trace.timeline.plan.ranks):  # ids start at 1, because 0 means the idle process or thread
        process = {"ph": "M", "pid": rank + 1}
        yield {**process, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": rank}}
        yield {**process, "name": "process_labels", "args": {"labels": ", ".join(trace.labels)}}
    for track in trace.tracks():
        on = {"pid": track.rank + 1, "tid": track.number}
        if not track.counts:
            yield {**on, "ph": "M", "name": "thread_name", "args": {"name": track.name}}
            yield {**on, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": track.number}}
        for each in track.content:
            if isinstance(each, _Sample):
                args = {track.counts: each.value}
                yield {"ph": "C", "pid": track.rank + 1, "name": track.name, "ts": each.at / 1000, "args": args}
            else:
                yield {**on, **_complete(each)}


def _complete(slice_: _Slice) -> dict[str, object]:
    took = (slice_.end - slice_.start) / 1000
    event = {"ph": "X", "name": slice_.name, "cat": slice_.category, "ts": slice_.start / 1000, "dur": took}
    arrow = {"bind_id": f"0x{slice_.flow:x}", "flow_in" if slice_.arrives else "flow_out": True}
    return {**event, "args": slice_.args} | (arrow if slice_.flow else {})


def pftrace(
    timeline: Timeline,
    *,
    schedule: str = "",
    unit: str = "",
    extras: Mapping[int, Extras] = _NONE,
) -> Iterator[bytes]:
    """Yield Perfetto's protobuf format in pieces. The arguments are those of `chrome_json`.

    Raises:
        ImportError: on the first piece, if the package perfetto is not installed.
    """
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto
    except ImportError as error:
        raise ImportError("a .pftrace needs the package perfetto: pip install 'fpipe[perfetto]'") from error
    message = proto.Trace()
    for _ in _fill(message, proto, _Trace(timeline, schedule, unit, extras)):
        if len(message.packet) >= _BATCH:
            yield message.SerializeToString()
            message.Clear()
    yield message.SerializeToString()  # the concatenation of the pieces is the whole trace


def _fill(message: Any, proto: Any, trace: _Trace) -> Iterator[None]:
    """Add the packets, and yield after every few, so that the caller can write them out."""
    descriptor_type = proto.TrackDescriptor
    for rank in range(trace.timeline.plan.ranks):
        descriptor = _packet(message).track_descriptor
        descriptor.uuid, descriptor.child_ordering = rank + 1, descriptor_type.EXPLICIT
        descriptor.process.pid = rank + 1
        descriptor.process.process_name = f"rank {rank}"
        descriptor.process.process_labels.extend(trace.labels)
        descriptor.process.legacy_sort_index = rank
        yield
    for track in trace.tracks():
        descriptor = _packet(message).track_descriptor
        descriptor.uuid, descriptor.parent_uuid, descriptor.name = track.number, track.rank + 1, track.name
        descriptor.sibling_order_rank = track.number
        if track.counts:
            descriptor.counter.unit_name = track.counts
        for each in track.content:
            if isinstance(each, _Sample):
                event = _event(message, each.at, track.number, proto.TrackEvent.TYPE_COUNTER)
                event.double_counter_value = each.value
            else:
                _begin(_event(message, each.start, track.number, proto.TrackEvent.TYPE_SLICE_BEGIN), each)
                _event(message, each.end, track.number, proto.TrackEvent.TYPE_SLICE_END)
            yield


def _packet(message: Any) -> Any:
    packet = message.packet.add()
    packet.trusted_packet_sequence_id = _SEQUENCE
    return packet


def _event(message: Any, at: int, track: int, kind: int) -> Any:
    packet = _packet(message)
    packet.timestamp = at
    event = packet.track_event
    event.type, event.track_uuid = kind, track
    return event


def _begin(event: Any, slice_: _Slice) -> None:
    event.name = slice_.name
    event.categories.append(slice_.category)
    if slice_.flow:
        (event.terminating_flow_ids if slice_.arrives else event.flow_ids).append(slice_.flow)
    for name, value in slice_.args.items():
        if isinstance(value, str):
            event.debug_annotations.add(name=name, string_value=value)
        elif isinstance(value, float):
            event.debug_annotations.add(name=name, double_value=value)
        else:
            event.debug_annotations.add(name=name, int_value=value)
