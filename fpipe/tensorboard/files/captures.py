"""Assemble a captured step from the bytes of its ranks, and name runs and tags. No torch.

A rank that is missing or whose bytes are broken is left out, with a notice. Ranks whose clocks were not compared are
independent: no span of one waits for a span of another.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fpipe.effects import Effect
from fpipe.plan import Plan
from fpipe.tables import Table
from fpipe.tensorboard.files.columns import BadColumns, Columns, Header, decode
from fpipe.tensorboard.files.plans import Plans
from fpipe.timelines.spans import Spans
from fpipe.timelines.timeline import Timeline

PLUGIN = "fpipe_timeline"
_TAG = re.compile(r"timeline/step_(\d{8,18})(?:/part_(\d{3}))?")
_RUN = re.compile(r"(?:(.*)/)?(measured|predicted)/rank(\d{1,6})", re.DOTALL)


class RunName(NamedTuple):
    """The parts of a run's name, `experiment/kind/rank3`."""

    experiment: str
    kind: str
    rank: int

    @property
    def run(self) -> str:
        """The common prefix of the names of all ranks' runs."""
        return f"{self.experiment}/{self.kind}" if self.experiment else self.kind


def tag(step: int, part: int = 0) -> str:
    """Return the tag of a capture. It is unique, so that no loader drops it; large captures have several parts.

    >>> tag(120), tag(120, part=1)
    ('timeline/step_00000120', 'timeline/step_00000120/part_001')
    """
    return f"timeline/step_{step:08}" + (f"/part_{part:03}" if part else "")


def parse_tag(tag: str) -> tuple[int, int] | None:
    """Return the step and part of a capture's tag; None for any other tag."""
    match = _TAG.fullmatch(tag)
    return (int(match[1]), int(match[2] or 0)) if match else None


def parse_run(run: str) -> RunName | None:
    """Parse the name of a rank's run; None for any other name.

    >>> parse_run("mine/measured/rank3"), parse_run("measured/rank0"), parse_run("mine")
    (RunName(experiment='mine', kind='measured', rank=3), RunName(experiment='', kind='measured', rank=0), None)
    """
    match = _RUN.fullmatch(run)
    return RunName(match[1] or "", match[2], int(match[3])) if match else None


class BadCapture(ValueError):
    """There is nothing of a step that can be shown. The message is one or more sentences."""


@dataclass(frozen=True, eq=False)
class Capture:
    """One captured step.

    Args:
        headers, columns: rank -> its header and columns; without missing ranks.
        timeline: of all ranks; a missing rank has no spans.
        notices: texts about missing or doubtful data.
    """

    headers: Mapping[int, Header]
    columns: Mapping[int, Columns]
    timeline: Timeline
    notices: Sequence[str] = ()

    @property
    def header(self) -> Header:
        """The header of the lowest rank."""
        return self.headers[min(self.headers)]

    @property
    def kind(self) -> str:
        return self.header.kind

    @property
    def step(self) -> int:
        return self.header.step

    @property
    def schedule(self) -> str:
        return self.header.schedule

    @property
    def unit(self) -> str:
        return self.header.unit

    @property
    def unrelated(self) -> str:
        """Why the times of its ranks say nothing of their waits for each other, as a sentence; "" if they do."""
        if any(header.turns for header in self.headers.values()):
            return "the ranks took turns in one process, so that nothing says what one waited for"
        if not all(header.clock for header in self.headers.values()):
            return "the ranks' clocks were not compared, so that nothing says what one waited for"
        return ""

    def place(self, at: int) -> tuple[int, int]:
        """Return the rank of a span, and its row among that rank's."""
        rank = bisect_right(self.timeline.spans.first, at) - 1
        return rank, at - self.timeline.spans.first[rank]

    def peak_memory(self, rank: int) -> float | None:
        """Return a rank's peak memory in bytes; None if it was not measured and the costs have no sizes."""
        sizes = self.columns[rank].memory[1] if rank in self.columns else np.empty(0)
        return float(sizes.max()) if len(sizes) else None


def assemble(blobs: Mapping[int, bytes], where: Mapping[int, str] | None = None) -> Capture:
    """Assemble a capture from the bytes of its ranks.

    Args:
        where: rank -> the name of its run or file, for notices.

    Raises:
        BadCapture: no rank's bytes can be read, or no rank computed anything.
    """
    headers, columns, problems, plans = dict[int, Header](), dict[int, Columns](), dict[int, BadColumns](), Plans()
    for rank, blob in sorted(blobs.items()):
        try:
            header, spans = decode(blob, plans)
            _fit(rank, header, next(iter(headers.values()), header))
        except BadColumns as error:
            problems[rank] = error
        else:
            headers[rank], columns[rank] = header, spans
    notices = list(left_out(problems, where or {}))
    if not headers:
        raise BadCapture(" ".join(notices) or "There are no ranks.")
    first = next(iter(headers.values()))
    plan = first.plan
    timeline = Timeline(plan, _spans(plan.ranks, columns), steps=first.steps)
    if not any(timeline.busy):
        raise BadCapture("No rank computed anything in this step.")
    notices += _missing(plan, headers, problems)
    return Capture(headers, columns, timeline, tuple(notices))


def _fit(rank: int, header: Header, first: Header) -> None:
    """Raise BadColumns if a rank does not belong to the capture of rank `first`."""
    if header.rank != rank:
        raise BadColumns(f"is rank {header.rank}'s", "Copy the ranks' folders again, each under its own name.")
    if header.plan != first.plan:
        raise BadColumns(f"has another plan than rank {first.rank}'s", _APART)
    if header.steps != first.steps:
        raise BadColumns(f"has {header.steps} steps, rank {first.rank}'s {first.steps}", _APART)
    if header.job != first.job and header.job and first.job:
        raise BadColumns(f"is of another job than rank {first.rank}'s", _APART)


_APART = "Two jobs wrote into one folder: record again, each into a folder of its own."


def left_out(problems: Mapping[int, BadColumns], where: Mapping[int, str]) -> Iterator[str]:
    """Yield a notice for each problem of ranks that are not shown: which ranks, which file, and what to do."""
    by_problem: dict[tuple[str, str], list[int]] = {}
    for rank, error in problems.items():
        by_problem.setdefault((str(error), error.remedy), []).append(rank)
    for (problem, remedy), ranks in by_problem.items():
        files = [where[rank] for rank in ranks if rank in where]
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        what = f"{files[0]}{more}" if files else "their file" if len(ranks) > 1 else "its file"
        verb = "are" if len(ranks) > 1 else "is"
        yield f"{_ranks(list(map(str, ranks)))} {verb} left out: {what} {problem}. {remedy}"


def _missing(plan: Plan, headers: Mapping[int, Header], told: Collection[int]) -> list[str]:
    missing = [str(rank) for rank in range(plan.ranks) if rank not in headers and rank not in told]
    unsynchronized = [str(rank) for rank, header in headers.items() if header.clock is None]
    notices = []
    if missing:
        notices.append(f"{_ranks(missing)} of {plan.ranks} missing: no file of theirs has this step whole")
    if any(header.turns for header in headers.values()):
        notices.append("the ranks took turns in one process: a rank idles while the others compute")
    if unsynchronized:
        notices.append(f"the clocks of {_ranks(unsynchronized)} were not compared: each begins at its own first start")
    return notices


def _ranks(numbers: Sequence[str]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = [*numbers[:8], "…"] if len(numbers) > 8 else numbers
    return f"ranks {', '.join(shown)}"


def _spans(ranks: int, columns: Mapping[int, Columns]) -> Spans:
    first = [0, *accumulate(len(columns[rank]) if rank in columns else 0 for rank in range(ranks))]
    present = [columns[rank] for rank in sorted(columns)]
    effects: list[Effect] = list(chain.from_iterable(each.effects for each in present))
    starts = np.concatenate([each.starts for each in present], dtype=np.float64)
    ends = np.concatenate([each.ends for each in present], dtype=np.float64)
    waited = np.concatenate([_global_rows(each.waited, np.asarray(first)) for each in present])
    times = array("d", starts.tobytes()), array("d", ends.tobytes())
    return Spans(
        first, effects, *times, array("q", waited.tobytes()), reduce(Table.joined, (each.table for each in present))
    )


def _global_rows(waited: tuple[NDArray[np.int32], NDArray[np.int32]], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert (rank, row of that rank) to row numbers among all spans; -1 if there is no such span."""
    rank, row = (column.astype(np.int64) for column in waited)
    valid = (rank >= 0) & (rank < len(first) - 1)
    begin = first[np.where(valid, rank, 0)]
    count = first[np.where(valid, rank, 0) + 1] - begin
    return np.where(valid & (row >= 0) & (row < count), begin + row, -1)


def columns_of(
    timeline: Timeline,
    rank: int,
    *,
    used: ArrayLike = (),
    sizes: ArrayLike = (),
    memory: Iterable[tuple[float, float]] = (),
) -> Columns:
    """Return a rank's columns of a timeline.

    Args:
        used, sizes, memory: `Columns.used`, `bytes` and `memory`, if known.
    """
    spans = timeline.spans
    rows = spans.of(rank)
    changed, live = np.array(list(memory), float).reshape(-1, 2).T
    waited = np.frombuffer(spans.waited, np.int64)[rows.start : rows.stop]
    first = np.asarray(spans.first)
    source = np.searchsorted(first, waited, side="right") - 1
    valid = waited >= 0
    row = np.where(valid, waited - first[np.where(valid, source, 0)], -1)
    return Columns(
        [spans.effects[at] for at in rows],
        np.frombuffer(spans.starts, np.float64)[rows.start : rows.stop],
        np.frombuffer(spans.ends, np.float64)[rows.start : rows.stop],
        (np.where(valid, source, -1).astype(np.int32), row.astype(np.int32)),
        np.asarray(used, float),
        np.asarray(sizes, float),
        (changed, live),
        timeline.table,
    )
