"""The passes and transfers of one rank's trace: torch's annotations, on the host and on the device. No torch.

torch.distributed.pipelining annotates what it runs with `record_function` (torch 2.13): the schedules with several
stages on a rank by the text of each action, as "PP:2F0", "PP:2SEND_F0" or "PP:(0F5;1B3)OVERLAP_F_B"; ScheduleGPipe by
"Forward 0" and "Backward 0", without the stage; Schedule1F1B by nothing.

A rank's device runs behind its host, and a backward's kernels are launched by autograd's own threads, which the
annotations on the device do not cover. So a pass on the device lasts from the first to the last kernel that was
launched while it ran on the host, on the stream that computes most.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fpipe.interop.torch_traces.reading import BadTrace, read

_ACTION = r"\d{1,5}(?:[FBIW]\d{1,7}|(?:SEND|RECV)_[FB]\d{1,7}|UNSHARD|RESHARD|REDUCE_GRAD)"
_CELL = re.compile(rf"PP:({_ACTION}|\({_ACTION};{_ACTION}\)OVERLAP_F_B)", re.ASCII)
_GPIPE = re.compile(r"(Forward|Backward) (\d{1,7})", re.ASCII)
_STEP = re.compile(r"ProfilerStep#(\d{1,15})", re.ASCII)
_HOST = re.compile(r"(.+)_(\d+)\.\d+(?:\.pt)?\.trace\.json(?:\.gz)?")  # torch.profiler.tensorboard_trace_handler
_RANK = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
_LAUNCHES = frozenset(("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver"))
_KERNELS = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_FIELDS = frozenset(("distributedInfo", "baseTimeNanoseconds", "host_name"))
_COMPUTE = re.compile(r"\(|\d+[FBIW]\d")
_SHARDS = re.compile(r"\d+(?:UNSHARD|RESHARD)")
_RECEIVE, _SEND = "gloo:recv", "c10d::send"  # from its post to the end of its wait; the call that sends
_MOST = 5_000_000  # of the events that are kept: of the passes of all files, and of the rest while a file is read
_LATEST = 1e16  # microseconds

Stream = tuple[int, int]  # device and stream, the process and the thread of an event
Interval = tuple[float, float]


class Action(NamedTuple):
    """An action of a rank. Times are in microseconds, on the clock of its trace.

    Args:
        cell: its text, as in torch's CSV; "F3" or "B3" of GPipe, which has no stage.
        start, end: on the host.
        device: on the device; None if nothing is known.
        received: when the messages that it waited for were posted, and when it had them; None if nothing is known.
        sent: when it began to send; None if it did not, or is an action of its own that does.
    """

    cell: str
    start: float
    end: float
    device: Interval | None = None
    received: Interval | None = None
    sent: float | None = None

    @property
    def computes(self) -> bool:
        return _COMPUTE.match(self.cell) is not None or self.is_gpipe

    @property
    def is_gpipe(self) -> bool:
        return self.cell[0] in "FB"


@dataclass
class RankTrace:
    """The trace of one rank.

    Args:
        rank: the rank in the job.
        host: the name of its host; "" if neither the trace nor the file's name has it.
        world: the number of the job's ranks; 0 if it is not known.
        pipeline: the ranks of its pipeline, from the job's mesh; empty if they are not known.
        base: nanoseconds that all times are after 1970.
        process: the number of its process; None if it is not known.
        actions: in the order in which they began.
        steps: the starts of the profiler's steps, and their numbers.
        devices: the numbers of the devices that it computed on.
    """

    file: Path
    rank: int
    host: str
    world: int
    pipeline: tuple[int, ...]
    base: int
    process: int | None
    actions: list[Action]
    steps: list[tuple[float, int]]
    devices: tuple[int, ...]

    def step_at(self, time: float) -> int | None:
        """Return the number of the profiler's step at a time; None before the first."""
        at = bisect_right(self.steps, (time, 1 << 60)) - 1
        return self.steps[at][1] if at >= 0 else None


def rank_trace(file: Path, before: int = 0) -> RankTrace | None:
    """Read the trace of a rank; None for a file of JSON that is no trace.

    Args:
        before: how many actions are kept of other files.

    Raises:
        BadTrace: the file is damaged, does not say of which rank it is, or has too many events.
    """
    events = _Events(file, before)
    fields = read(file, events.add, _FIELDS.__contains__)
    if fields is None:
        return None
    job = fields.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    base = fields.get("baseTimeNanoseconds", 0)
    actions, devices = events.actions()
    return RankTrace(
        file,
        _rank(job, file),
        _host(fields.get("host_name"), file),
        _world(job),
        _pipeline(job),
        base if isinstance(base, int) and 0 <= base < 1 << 63 else 0,
        events.process,
        actions,
        sorted(events.steps),
        devices,
    )


def _rank(job: Mapping[str, Any], file: Path) -> int:
    rank = job.get("rank")
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 20:
        return rank
    if named := _RANK.search(file.name):
        return int(named[1])
    raise BadTrace(
        f"{file} does not say of which rank it is: begin the profiler after init_process_group, or name the "
        "file rank0.json"
    )


def _world(job: Mapping[str, Any]) -> int:
    world = job.get("world_size")
    return world if isinstance(world, int) and 0 < world < 1 << 20 else 0


def _host(name: Any, file: Path) -> str:
    if isinstance(name, str) and name:
        return name[:64]
    named = _HOST.fullmatch(file.name)
    return named[1] if named else ""


def _pipeline(job: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks of the group that a mesh made for its dimension "pp"."""
    groups = job.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and group.get("pg_desc") == "mesh_pp" and isinstance(group.get("ranks"), list):
            ranks = [rank for rank in group["ranks"] if isinstance(rank, int) and 0 <= rank < 1 << 20]
            if len(ranks) == len(group["ranks"]) and job.get("rank") in ranks:
                return tuple(ranks)
    return ()


class _Events:
    """What is kept of the events of a file."""

    def __init__(self, file: Path, before: int) -> None:
        self.file, self.before = file, before
        self.named = list[Action]()
        self.steps = list[tuple[float, int]]()
        self.process: int | None = None
        self.receives, self.sends = list[Interval](), list[float]()
        self.annotated = defaultdict[tuple[str, Stream], list[Interval]](list)  # on devices, by name
        self.launched_at, self.launched = array("d"), array("q")  # and the correlations
        self.kernels = _Kernels()

    def add(self, event: Mapping[str, Any]) -> None:
        name, category = event.get("name"), event.get("cat")
        if event.get("ph") != "X" or not isinstance(name, str) or not isinstance(category, str):
            return
        if category in _LAUNCHES or category in _KERNELS:
            self._launched(event, name, category)
        elif name in (_RECEIVE, _SEND):
            if interval := _interval(event):
                self._room(len(self.receives) + len(self.sends))
                if name == _RECEIVE:
                    self.receives.append(interval)
                else:
                    self.sends.append(interval[0])
        elif (cell := _cell(name)) and (interval := _interval(event)):
            if category == "gpu_user_annotation":
                if stream := _stream(event):
                    self.annotated[cell, stream].append(interval)
            else:
                self._room(self.before + len(self.named))
                self.named.append(Action(cell, *interval))
                if isinstance(process := event.get("pid"), int):
                    self.process = process
        elif category == "user_annotation" and (step := _STEP.fullmatch(name)) and (interval := _interval(event)):
            self.steps.append((interval[0], int(step[1])))

    def _launched(self, event: Mapping[str, Any], name: str, category: str) -> None:
        more, interval = event.get("args"), _interval(event)
        correlation = more.get("correlation") if isinstance(more, dict) else None
        if interval is None or not isinstance(correlation, int) or not 0 <= correlation < 1 << 62:
            return
        self._room(len(self.launched) + len(self.kernels))
        if category in _LAUNCHES:
            self.launched_at.append(interval[0])
            self.launched.append(correlation)
        elif stream := _stream(event):
            self.kernels.add(correlation, interval, stream, "nccl" not in name.lower())

    def _room(self, kept: int) -> None:
        if kept > _MOST:
            raise BadTrace(
                f"{self.file} has more than {_MOST} events to keep, with those of the files before: record "
                "fewer steps, as 2 or 3"
            )

    def actions(self) -> tuple[list[Action], tuple[int, ...]]:
        """Return the actions in order, with their times on devices and of messages; and the numbers of the devices."""
        actions = [action for action in self.named if not action.is_gpipe] or self.named
        actions = _outermost(action for action in sorted(actions, key=_begin) if not _SHARDS.match(action.cell))
        actions = _with_messages(actions, sorted(self.receives), sorted(self.sends))
        if not self.annotated:
            return actions, ()
        return self._with_device(actions)

    def _with_device(self, actions: list[Action]) -> tuple[list[Action], tuple[int, ...]]:
        """Return the actions with their times on the device, and the numbers of the devices."""
        parts = [defaultdict[Stream, list[float]](list) for _ in actions]  # by stream: first start, last end, time
        for at, stream, interval in self.kernels.of(actions, self.launched, self.launched_at):
            _widen(parts[at][stream], interval)
        numbers = defaultdict[str, list[int]](list)
        for at, action in enumerate(actions):
            numbers[action.cell].append(at)
        for (cell, stream), intervals in self.annotated.items():
            if len(intervals) == len(numbers[cell]):
                for at, interval in zip(numbers[cell], sorted(intervals), strict=True):
                    _widen(parts[at][stream], interval)
        time = Counter[Stream]()
        for action, streams in zip(actions, parts, strict=True):
            if action.computes:
                time.update({stream: took for stream, (_, _, took) in streams.items()})
        main = max(time, key=time.__getitem__, default=None)
        on_device = [
            action._replace(device=_device(action, streams, main))
            for action, streams in zip(actions, parts, strict=True)
        ]
        return on_device, tuple(sorted({device for device, _ in time}))


class _Kernels:
    """The kernels of a device, as columns."""

    def __init__(self) -> None:
        self.correlations, self.streams = array("q"), array("q")
        self.starts, self.ends = array("d"), array("d")
        self.computes = bytearray()

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, correlation: int, interval: Interval, stream: Stream, computes: bool) -> None:
        self.correlations.append(correlation)
        self.starts.append(interval[0])
        self.ends.append(interval[1])
        self.streams.extend(stream)
        self.computes.append(computes)

    def of(
        self, actions: Sequence[Action], launched: array[int], launched_at: array[float]
    ) -> Iterator[tuple[int, Stream, Interval]]:
        """Yield the kernels that were launched within an action of their kind: the action's index, stream and time.

        Args:
            launched, launched_at: the correlations of launches, and when these were.
        """
        if not len(launched) or not actions:
            return
        correlations, times = np.frombuffer(launched, np.int64), np.frombuffer(launched_at, np.float64)
        ascending = np.argsort(correlations, kind="stable")
        own = np.frombuffer(self.correlations, np.int64)
        places = ascending[np.minimum(np.searchsorted(correlations[ascending], own), len(launched) - 1)]
        begun = times[places]
        at = np.searchsorted([action.start for action in actions], begun, side="right") - 1
        ends, computes = np.array([(action.end, action.computes) for action in actions]).T
        within = (correlations[places] == own) & (at >= 0) & (begun <= ends[at])
        within &= computes[at] == np.frombuffer(self.computes, np.uint8)
        for row in np.flatnonzero(within).tolist():
            stream = self.streams[2 * row], self.streams[2 * row + 1]
            yield int(at[row]), stream, (self.starts[row], self.ends[row])


def _cell(name: str) -> str:
    """Return the action that an annotation names; "" if it names none."""
    if match := _CELL.fullmatch(name):
        return match[1]
    if match := _GPIPE.fullmatch(name):
        return f"{name[0]}{int(match[2])}"
    return ""


def _interval(event: Mapping[str, Any]) -> Interval | None:
    """Return when an event began and ended; None if it has no times, or impossible ones."""
    start, took = event.get("ts"), event.get("dur", 0)
    if not (isinstance(start, int | float) and isinstance(took, int | float)):
        return None
    if not (abs(start) < _LATEST and 0 <= took < _LATEST):  # no NaN, either
        return None
    return float(start), float(start + took)


def _stream(event: Mapping[str, Any]) -> Stream | None:
    device, stream = event.get("pid"), event.get("tid")
    if isinstance(device, int) and isinstance(stream, int) and 0 <= device < 1 << 31 and 0 <= stream < 1 << 31:
        return device, stream
    return None


def _begin(action: Action) -> tuple[float, float]:
    return action.start, action.end


def _outermost(actions: Iterable[Action]) -> list[Action]:
    """Leave out an action within one of the same text, where a stage is annotated that torch annotates too."""
    outermost = list[Action]()
    for action in actions:
        if outermost and outermost[-1].cell == action.cell and action.start < outermost[-1].end:
            outermost[-1] = max(outermost[-1], action, key=attrgetter("end"))
        else:
            outermost.append(action)
    return outermost


def _widen(part: list[float], interval: Interval) -> None:
    start, end = interval
    if part:
        part[:] = min(part[0], start), max(part[1], end), part[2] + end - start
    else:
        part[:] = start, end, end - start


def _device(action: Action, streams: Mapping[Stream, Sequence[float]], main: Stream | None) -> Interval | None:
    """Return an action's time on the device: of one that computes, on the main stream."""
    used = [part for stream, part in streams.items() if not action.computes or stream == main]
    return (min(part[0] for part in used), max(part[1] for part in used)) if used else None


def _with_messages(actions: Sequence[Action], receives: Sequence[Interval], sends: Sequence[float]) -> list[Action]:
    """Return the actions with the times of their messages over gloo, which ends a receive where it was waited for.

    A message that was posted between two actions is one that the next pass waited for, or that the last one sent.
    """
    starts = [action.start for action in actions]
    within, before = dict[int, Interval](), dict[int, Interval]()
    following = _next_passes(actions)
    for posted, had in receives:
        at = bisect_right(starts, posted) - 1
        inside = at >= 0 and posted <= actions[at].end
        place, into = (at, within) if inside else (following[at + 1], before)
        first, last = into.get(place, (posted, had))
        into[place] = min(first, posted), max(last, had)
    received = before | within
    sent = dict[int, float]()
    for posted in sends:
        at = bisect_right(starts, posted) - 1
        if at >= 0 and actions[at].computes and posted >= received.get(at, (0.0, posted))[1]:
            sent.setdefault(at, posted)
    return [action._replace(received=received.get(at), sent=sent.get(at)) for at, action in enumerate(actions)]


def _next_passes(actions: Sequence[Action]) -> list[int]:
    """Return for each place among the actions the next one that computes; one past the last if there is none."""
    following = [len(actions)] * (len(actions) + 1)
    for at in range(len(actions) - 1, -1, -1):
        following[at] = at if actions[at].computes else following[at + 1]
    return following
