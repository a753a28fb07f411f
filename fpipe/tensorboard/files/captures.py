"""A captured step of all ranks, put together from what each of them wrote; and how it is named on disk. No torch.

A rank that is missing, or whose bytes are broken, is left out, and a notice says so. Ranks whose clocks were not
compared stay apart: no span of one waits for a span of another.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpipe.effects import Effect
from fpipe.plan import Plan
from fpipe.tables import Table
from fpipe.tensorboard.files.columns import BadColumns, Columns, Header, decode
from fpipe.timelines.timeline import Spans, Timeline

PLUGIN = "fpipe_timeline"
KINDS = ("measured", "predicted")
_TAG = re.compile(r"timeline/step_(\d{8,18})(?:/part_(\d{3}))?")
_RUN = re.compile(r"(?:(.*)/)?(measured|predicted)/rank(\d{1,6})", re.DOTALL)


class Place(NamedTuple):
    """Whose run it is: `experiment/kind/rank3`."""

    experiment: str
    kind: str
    rank: int

    @property
    def run(self) -> str:
        """What all ranks' runs have in common."""
        return f"{self.experiment}/{self.kind}" if self.experiment else self.kind


def tag(step: int, part: int = 0) -> str:
    """The tag of a capture, which only it has, so that no loader drops it; what is large goes on in further parts.

    >>> tag(120), tag(120, part=1)
    ('timeline/step_00000120', 'timeline/step_00000120/part_001')
    """
    return f"timeline/step_{step:08}" + (f"/part_{part:03}" if part else "")


def parsed(tag: str) -> tuple[int, int] | None:
    """The step and the part that a tag names, if it is a capture's."""
    found = _TAG.fullmatch(tag)
    return (int(found[1]), int(found[2] or 0)) if found else None


def placed(run: str) -> Place | None:
    """What the name of a run says, if it is a rank's.

    >>> placed("mine/measured/rank3"), placed("measured/rank0"), placed("mine")
    (Place(experiment='mine', kind='measured', rank=3), Place(experiment='', kind='measured', rank=0), None)
    """
    found = _RUN.fullmatch(run)
    return Place(found[1] or "", found[2], int(found[3])) if found else None


@dataclass(frozen=True, eq=False)
class Capture:
    """One captured step.

    Args:
        headers, columns: of the ranks that are there.
        timeline: of all ranks; one that is missing has no spans.
        notices: what is missing or doubtful.
    """

    headers: Mapping[int, Header]
    columns: Mapping[int, Columns]
    timeline: Timeline
    notices: Sequence[str] = ()

    @property
    def header(self) -> Header:
        """The lowest rank's."""
        return self.headers[min(self.headers)]

    @property
    def plan(self) -> Plan:
        return self.timeline.plan

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

    def peak_memory(self, rank: int) -> float | None:
        """The most bytes that a rank held, where that was measured or sizes were given."""
        held = self.columns[rank].memory[1] if rank in self.columns else np.empty(0)
        return float(held.max()) if len(held) else None


def assemble(blobs: Mapping[int, bytes]) -> Capture:
    """The capture whose ranks wrote these bytes.

    Raises:
        BadColumns: no rank's bytes can be read.
    """
    headers, columns, notices = dict[int, Header](), dict[int, Columns](), list[str]()
    for rank, blob in sorted(blobs.items()):
        try:
            header, found = decode(blob)
        except BadColumns as error:
            notices.append(f"rank {rank} can't be read: {error}")
            continue
        if why := _unfit(rank, header, next(iter(headers.values()), header)):
            notices.append(f"{why}, and is left out")
        else:
            headers[rank], columns[rank] = header, found
    if not headers:
        raise BadColumns("; ".join(notices) or "there are no ranks")
    plan = next(iter(headers.values())).plan
    timeline = Timeline(plan, _spans(plan.ranks, columns))
    if not any(timeline.busy):
        raise BadColumns("nothing was computed")
    notices += _missing(plan, headers)
    return Capture(headers, columns, timeline, tuple(notices))


def _unfit(rank: int, header: Header, first: Header) -> str:
    """Why a rank does not belong to a capture, whose lowest one is the first; "" if it does."""
    if header.rank != rank:
        return f"what should be rank {rank}'s is rank {header.rank}'s"
    if header.plan != first.plan:
        return f"rank {rank} has another plan than rank {first.rank}"
    if header.job != first.job and header.job and first.job:
        return f"rank {rank} is of another job than rank {first.rank} (each takes a folder of its own, replicas too)"
    return ""


def _missing(plan: Plan, headers: Mapping[int, Header]) -> list[str]:
    missing = [str(rank) for rank in range(plan.ranks) if rank not in headers]
    apart = [str(rank) for rank, header in headers.items() if header.clock is None]
    notices = []
    if missing:
        notices.append(f"{_ranks(missing)} of {plan.ranks} missing: no file of theirs has this step whole")
    if any(header.turns for header in headers.values()):
        notices.append("the ranks took turns in one process: a rank idles while the others compute")
    if apart:
        notices.append(f"the clocks of {_ranks(apart)} were not compared: each begins at its own first start")
    return notices


def _ranks(numbers: Sequence[str]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = [*numbers[:8], "…"] if len(numbers) > 8 else numbers
    return f"ranks {', '.join(shown)}"


def _spans(ranks: int, columns: Mapping[int, Columns]) -> Spans:
    first = [0, *accumulate(len(columns[rank]) if rank in columns else 0 for rank in range(ranks))]
    mine = [columns[rank] for rank in range(ranks) if rank in columns]
    effects: list[Effect] = list(chain.from_iterable(own.effects for own in mine))
    waited = [_whole(own.waited, np.asarray(first)) for own in mine]
    return Spans(
        first,
        effects,
        array("d", np.concatenate([own.starts for own in mine]).astype("d").tobytes()),
        array("d", np.concatenate([own.ends for own in mine]).astype("d").tobytes()),
        array("q", np.concatenate(waited).astype("q").tobytes()),
        reduce(Table.joined, (each.table for each in mine)),
    )


def _whole(waited: tuple[NDArray[np.int32], NDArray[np.int32]], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places among all spans, from ranks and places in theirs; -1 for what is not there."""
    rank, row = (column.astype(np.int64) for column in waited)
    there = (rank >= 0) & (rank < len(first) - 1)
    begin = first[np.where(there, rank, 0)]
    room = first[np.where(there, rank, 0) + 1] - begin
    return np.where(there & (row >= 0) & (row < room), begin + row, -1)


def columns_of(
    timeline: Timeline,
    rank: int,
    *,
    used: NDArray[np.float64] | None = None,
    sizes: NDArray[np.float64] | None = None,
    memory: Iterable[tuple[float, float]] = (),
) -> Columns:
    """A rank's share of a timeline.

    Args:
        used, sizes, memory: `Columns.used`, `bytes` and `memory`, for who knows them.
    """
    spans, held = timeline.spans, list(memory)
    own = spans.of(rank)
    waited = np.frombuffer(spans.waited, np.int64)[own.start : own.stop]
    first = np.asarray(spans.first)
    whose = np.searchsorted(first, waited, side="right") - 1
    there = waited >= 0
    row = np.where(there, waited - first[np.where(there, whose, 0)], -1)
    return Columns(
        [spans.effects[at] for at in own],
        np.frombuffer(spans.starts, np.float64)[own.start : own.stop],
        np.frombuffer(spans.ends, np.float64)[own.start : own.stop],
        (np.where(there, whose, -1).astype(np.int32), row.astype(np.int32)),
        np.empty(0) if used is None else used,
        np.empty(0) if sizes is None else sizes,
        (np.array([at for at, _ in held], float), np.array([size for _, size in held], float)),
        timeline.table,
    )
