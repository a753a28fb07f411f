"""Write a captured step, or several in a row, into the files: the measured timeline, the predicted one, and curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from fpipe.handlers.protocol import Span
from fpipe.tensorboard.files.captures import columns_of
from fpipe.tensorboard.files.columns import Clock, Columns, Header
from fpipe.tensorboard.files.writer import Writer
from fpipe.tensorboard.recording.memory import SlotMemory
from fpipe.timelines.measurement import Measurement
from fpipe.timelines.simulator import simulate_programs
from fpipe.timelines.timeline import Timeline


def folder_of(logdir: Path, replica: int) -> Path:
    """Return the folder of a replica of the pipeline: the first one's is the logdir."""
    return logdir / f"replica{replica}" if replica else logdir


@dataclass
class Files:
    """The files of the ranks that this process plays, and what is the same for every step.

    Args:
        name: the schedule's.
        devices: descriptions by rank.
        turns: whether ranks or replicas take turns in one process, so that each idles while the others compute.
        replica: the number of this one of the pipeline.
        job: a name of the job that all its ranks share.
    """

    logdir: Path
    name: str
    devices: Mapping[int, str]
    turns: bool
    job: str = ""
    replica: int = 0
    _writers: dict[tuple[str, int], Writer] = field(default_factory=dict)

    def writer(self, kind: str, rank: int) -> Writer:
        if (kind, rank) not in self._writers:
            self._writers[kind, rank] = Writer(self.logdir, kind, rank)
        return self._writers[kind, rank]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


@dataclass(frozen=True)
class StepCapture:
    """A captured step of all ranks, or of this process alone; or several in a row.

    Args:
        step: the number of the first one.
        called: when the first step was called and when the last one returned, on this host's clock.
        wall: when it returned, in seconds since 1970.
        peaks, memory: by rank that this process plays.
        alone: whether it has this process's ranks alone, whose clock was not compared with the others'.
        norm: of the whole gradient, if the recorder was asked for it.
        launch_bound: by rank of a device that runs behind the host, the seconds that it waited for the host at most.
        beside: work of this process in other threads, on this host's clock.
    """

    step: int
    measurement: Measurement
    called: tuple[float, float]
    wall: float
    peaks: Mapping[int, tuple[float, str]]
    memory: Mapping[int, SlotMemory]
    alone: bool
    norm: float | None = None
    launch_bound: Mapping[int, float] = field(default_factory=dict)
    beside: Sequence[Span] = ()

    def write(self, files: Files) -> None:
        """Write this process's part."""
        timeline = self.measurement.timeline(partial=self.alone)
        for rank, device in files.devices.items():
            used = np.array(self.measurement.columns[rank].waits) - self.measurement.origin
            header = replace(
                self._header("measured", rank, files),
                clock=None if self.alone else self._clock(rank),
                peak=self.peaks[rank],
                host=self._host(rank),
                device=device,
                turns=files.turns,
            )
            writer = files.writer("measured", rank)
            writer.timeline(header, self._columns(timeline, rank, used))
            self._curves(writer, timeline, rank, files.turns, files.replica)
        if not self.alone:
            self._predict(files)

    def _predict(self, files: Files) -> None:
        predicted = simulate_programs(self.measurement.programs, self.measurement.costs(), self.measurement.steps)
        for rank in files.devices:
            writer = files.writer("predicted", rank)
            writer.timeline(self._header("predicted", rank, files), self._columns(predicted, rank))
            if rank == 0:
                self._bubble(writer, predicted)
                writer.flush()

    def _header(self, kind: str, rank: int, files: Files) -> Header:
        replicas = () if kind == "predicted" else self._replicas
        return Header(
            *(kind, self.step, rank, files.name, self.measurement.plan),
            wall=self.wall,
            job=files.job,
            replica=files.replica,
            makespans=tuple(timeline.makespan for timeline in replicas),
            busy=tuple(timeline.busy for timeline in replicas),
            owners=self.memory[rank].owners if rank in self.memory else {},
            steps=self.measurement.steps,
        )

    @cached_property
    def _replicas(self) -> tuple[Timeline, ...]:
        """The step in each replica; empty where they were not gathered, or there is one."""
        return tuple(replica.timeline() for replica in self.measurement.replicas)

    def _columns(self, timeline: Timeline, rank: int, used: ArrayLike = ()) -> Columns:
        sizes = self.memory[rank].sizes * timeline.steps if rank in self.memory else ()
        return columns_of(timeline, rank, used=used, sizes=sizes, memory=self._memory(timeline, rank))

    def _clock(self, rank: int) -> Clock:
        return Clock(self.measurement.offsets.get(rank, 0.0), self.measurement.uncertainty.get(rank, 0.0))

    def _host(self, rank: int) -> list[tuple[str, float, float]]:
        """Return the host's spans before a rank's first effect and after its last, and those beside them."""
        columns, origin = self.measurement.columns[rank], self.measurement.origin
        offset, first, last = self.measurement.offsets.get(rank, 0.0), columns.starts[0], max(columns.ends)
        begin, end = (when - offset for when in self.called)
        spans = [("before the first effect", begin, first), ("after the last effect", last, end)]
        spans += [(each.text, max(first, each.begin - offset), min(last, each.end - offset)) for each in self.beside]
        return [(text, start - origin, stop - origin) for text, start, stop in spans if stop > start]

    def _memory(self, timeline: Timeline, rank: int) -> Iterator[tuple[float, float]]:
        """Iterate over the bytes of a rank over time: at the start and at the end of each compute effect.

        They are those of one step, in each.
        """
        if rank not in self.memory:
            return
        spans, memory = timeline.spans, self.memory[rank]
        each = memory.during * timeline.steps, memory.after * timeline.steps
        for at, during, after in zip(spans.of(rank), *each, strict=True):
            if spans.table.effects[type(spans.effects[at])].track == "compute":
                yield spans.starts[at], during
                yield spans.ends[at], after

    def _curves(self, writer: Writer, timeline: Timeline, rank: int, turns: bool, replica: int) -> None:
        """Write a rank's curves; none of idle time where ranks take turns, for that is the others' compute."""
        for kind, seconds in timeline.kinds[rank].items():
            writer.scalar(f"time/{kind.__name__}_seconds", seconds / timeline.steps, self.step, self.wall)
        if rank in self.launch_bound:
            writer.scalar("time/launch_bound_seconds", self.launch_bound[rank], self.step, self.wall)
        writer.scalar("memory/peak_bytes", self.peaks[rank][0], self.step, self.wall)
        if rank in self.memory:
            writer.scalar("memory/held_peak_bytes", max(self.memory[rank].during), self.step, self.wall)
        if not self.alone and not turns:
            for cause, seconds in timeline.causes[rank].items():
                writer.scalar(f"idle/{cause}_seconds", seconds / timeline.steps, self.step, self.wall)
            if rank == 0:
                self._bubble(writer, timeline)
        if rank == 0 and replica == 0 and self.norm is not None and not math.isnan(self.norm):
            writer.scalar("step/gradient_norm", self.norm, self.step + timeline.steps - 1, self.wall)
        writer.flush()

    def _bubble(self, writer: Writer, timeline: Timeline) -> None:
        """Write the bubble; measured and predicted have the same names, so that one chart shows both runs."""
        writer.scalar("bubble/fraction", timeline.bubble_rate, self.step, self.wall)
        writer.scalar("bubble/makespan_seconds", timeline.period, self.step, self.wall)
