"""Draw a timeline as a figure: lanes of compute, of idle ranks and of memory, on one scale of time. Needs matplotlib.

The colours are those of the table of effects, lighter for a rank's later chunks. Idle time is grey, hatched by cause.
The background is white, so that the figure looks the same on light and dark pages.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Iterator
from itertools import accumulate
from math import ceil, log2
from typing import Any, Protocol

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from fpipe._format import format_bytes, number, sized
from fpipe.costs import ROUNDING, Costs
from fpipe.effects import Effect, parts
from fpipe.plan import Plan
from fpipe.tables import LANES, Table
from fpipe.timelines.labels import drawn_rows, shade, text
from fpipe.timelines.spans import Gap, Span

FORMATS = (".svg", ".png", ".pdf")
IDLE = {  # cause -> grey, hatch
    "warm-up": ("#eeeeee", ""),
    "dependency": ("#d4d4d4", "/////"),
    "transfer": ("#bcbcbc", "-----"),  # not dots: in an SVG they take ten times as many bytes as the rest of the figure
    "imbalance": ("#bcbcbc", "xx"),
    "drain": ("#eeeeee", "\\\\\\\\\\"),
    "gather": ("#bcbcbc", "|||||"),
    "scatter": ("#d4d4d4", "|||||"),
    "host": ("#eeeeee", "++"),
    "offload": ("#e4e4e4", "|||||"),
}
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "hatch.linewidth": 0.4,
    "hatch.color": "#8c8c8c",
    "svg.fonttype": "none",  # text stays searchable text
    "svg.hashsalt": "fpipe",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_DIGIT = 0.065  # inches across a digit of a label
_MARGINS = 1.2  # inches left and right of the lanes
_MAX_LABELS = 5000
_HALF, _THIN = 0.42, 0.12  # of the height of a rank: half of what is drawn in it, and a lane beside compute
_EDGE = 0.5  # points: width of the white edge of a box; none for narrow boxes, which it would hide


class Drawable(Protocol):
    """The part of `Timeline` that figures read. A protocol, because `Timeline` imports this module."""

    plan: Plan
    table: Table
    costs: Costs

    @property
    def start(self) -> float: ...
    @property
    def makespan(self) -> float: ...
    @property
    def drawn_lanes(self) -> tuple[str, ...]: ...
    def compute(self, rank: int, /) -> Iterator[Span]: ...
    def beside(self, rank: int, track: str, /) -> Iterator[Span]: ...
    def gaps(self, rank: int, /) -> Iterator[Gap]: ...
    def memory(self, rank: int, /) -> list[tuple[float, float]]: ...
    def in_flight(self, rank: int, /) -> list[tuple[float, float]]: ...


def save(timeline: Drawable, path: pathlib.Path, title: str = "") -> None:
    """Draw a timeline into a file. The suffix, one of `FORMATS`, is the format. Equal timelines give equal files."""
    _write(timeline, path, path.suffix.lower(), title)


def svg(timeline: Drawable, title: str = "") -> str:
    """Return a timeline's figure as an SVG element."""
    file = io.StringIO()
    _write(timeline, file, ".svg", title)
    return file.getvalue()[file.getvalue().index("<svg") :]


def _write(timeline: Drawable, file: pathlib.Path | io.StringIO, suffix: str, title: str) -> None:
    undated = {".png": "Creation Time", ".svg": "Date", ".pdf": "CreationDate"}[suffix]
    with rc_context(_STYLE):
        figure(timeline, title).savefig(file, dpi=160, format=suffix[1:], metadata={undated: None})


def figure(timeline: Drawable, title: str = "") -> Figure:
    """Return the figure, for a notebook or for manual changes.

    The lanes are each rank's compute, below it thin ones of its gathers and scatters where these take time, the number
    of idle ranks by cause, and each rank's memory: in bytes if the timeline's costs have sizes, otherwise in
    microbatches in flight.
    """
    ranks = timeline.plan.ranks
    width, height = _width(timeline), min(9.0, max(1.0, (0.3 + _THIN * len(timeline.drawn_lanes)) * ranks))
    result = Figure(figsize=(width, height + 3.0), layout="constrained", facecolor="white")
    compute, idle, memory = result.subplots(3, 1, sharex=True, height_ratios=[height, 0.7, 1.1])
    _compute(compute, timeline, (width - _MARGINS) / (timeline.makespan or 1.0))
    _idle(idle, timeline)
    _memory(memory, timeline)
    memory.set_xlabel("time")
    memory.set_xlim(timeline.start, timeline.start + (timeline.makespan or 1.0))
    result.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", fontsize=9)
    marks = list(_legend(timeline))
    across = ceil(len(marks) / ceil(len(marks) * 1.6 / width))  # an entry is up to 1.6 inches wide
    result.legend(handles=marks, loc="outside lower left", ncols=across, frameon=False, handlelength=1.4)
    return result


def _width(timeline: Drawable) -> float:
    """Return the width in inches that fits most labels, within the limits of a page."""
    computes = (span for rank in range(timeline.plan.ranks) for span in timeline.compute(rank))
    scales = sorted(_room(s.effect, timeline) / (s.end - s.start) for s in computes if s.end > s.start)
    usual = scales[3 * len(scales) // 4] if scales else 0.0
    return min(18.0, max(8.0, _MARGINS + 1.3 * usual * timeline.makespan))


def _room(effect: Effect, timeline: Drawable) -> float:
    """Return the largest width in inches of an effect's label."""
    plan = timeline.plan
    digits = len(str(plan.microbatches - 1)) + (0.5 + len(str(plan.slices - 1)) if plan.slices > 1 else 0)
    return (len(parts(effect)) * (digits + 0.8) - 0.6) * _DIGIT


def _compute(ax: Axes, timeline: Drawable, inches: float) -> None:
    """Draw each rank's effects as boxes, with microbatches where they fit, and the gaps between them."""
    plan, lanes = timeline.plan, timeline.drawn_lanes
    half = _HALF - _THIN / 2 * len(lanes)  # of the boxes of compute, the thin lanes are below
    up = _HALF - half
    boxes: dict[str, list[_Box]] = {}
    labels = []
    for rank in range(plan.ranks):
        for span in timeline.compute(rank):
            boxes.setdefault(shade(span.effect, rank, plan, timeline.table), []).append(
                _box(rank - up, span.start, span.end, half)
            )
            if _room(span.effect, timeline) < (span.end - span.start) * inches:
                label = text(span.effect, rank, plan, timeline.table, letter=False, chunk=False)
                labels.append(((span.start + span.end) / 2, rank - up, label))
        for at, track in enumerate(lanes):
            middle = rank - up + half + (at + 0.5) * _THIN
            for span in timeline.beside(rank, track):
                boxes.setdefault(shade(span.effect, rank, plan, timeline.table), []).append(
                    _box(middle, span.start, span.end, 0.4 * _THIN)
                )
    for colour, vertices in boxes.items():
        edges = [_EDGE if (end - begin) * inches * 72 > 4 * _EDGE else 0.0 for (begin, _), (end, _), *_ in vertices]
        ax.add_collection(PolyCollection(vertices, facecolors=colour, edgecolors="white", linewidths=edges))
    for cause, (colour, hatch) in IDLE.items():
        gaps = [
            _box(rank - up, gap.start, gap.end, 0.2)
            for rank in range(plan.ranks)
            for gap in timeline.gaps(rank)
            if gap.cause == cause
        ]
        if gaps:  # one path for all gaps: to hatch each gap would take seconds
            path = Path.make_compound_path_from_polys(np.array(gaps))
            ax.add_patch(PathPatch(path, facecolor=colour, hatch=hatch, linewidth=0))
    for x, y, label in labels if len(labels) <= _MAX_LABELS else ():
        artist = ax.text(x, y, label, ha="center", va="center_baseline", fontsize=6.5, clip_on=True)
        artist.set_in_layout(False)  # it is inside the lanes; to measure each label would take seconds
    ax.set_ylim(plan.ranks - 0.4, -0.6)
    ax.set_ylabel("rank")
    ax.set_yticks(range(0, plan.ranks, ceil(plan.ranks / 24)))
    ax.tick_params(left=False)
    ax.spines["left"].set_visible(False)


_Box = list[tuple[float, float]]


def _box(middle: float, begin: float, end: float, half: float) -> _Box:
    return [(begin, middle - half), (end, middle - half), (end, middle + half), (begin, middle + half)]


def _idle(ax: Axes, timeline: Drawable) -> None:
    """Draw the number of idle ranks over time, with the causes stacked."""
    changes: dict[str, dict[float, int]] = {cause: {} for cause in IDLE}
    for rank in range(timeline.plan.ranks):
        for gap in timeline.gaps(rank):
            steps = changes[gap.cause]
            for time, change in ((gap.start, 1), (gap.end, -1)):
                at = _instant(time, timeline)
                steps[at] = steps.get(at, 0) + change
    times = sorted({time for steps in changes.values() for time in steps})
    floor = [0.0] * len(times)
    for cause, (colour, hatch) in IDLE.items():
        counts = accumulate(changes[cause].get(time, 0) for time in times)
        top = [below + count for below, count in zip(floor, counts, strict=True)]
        ax.fill_between(times, floor, top, step="post", facecolor=colour, hatch=hatch, linewidth=0)
        floor = top
    ax.step(times, floor, where="post", color="#555555", linewidth=0.7)
    ax.set_ylim(0, timeline.plan.ranks)
    ax.set_ylabel("idle ranks")
    ax.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))


def _instant(time: float, timeline: Drawable) -> float:
    """Round away the last digits of a time, so that simultaneous events are drawn at the same time."""
    grain = timeline.makespan * ROUNDING or 1.0
    return round(time / grain) * grain


def _memory(ax: Axes, timeline: Drawable) -> None:
    """Draw each rank's memory over time, with the peak over all ranks."""
    ranks, measured = timeline.plan.ranks, sized(timeline.costs)
    peaks = []
    for rank in range(ranks):
        steps = timeline.memory(rank) if measured else timeline.in_flight(rank)
        after = {timeline.start: 0.0} | {_instant(time, timeline): value for time, value in steps}
        colour = colormaps["viridis"](0.9 * rank / max(1, ranks - 1))
        ax.step(list(after), list(after.values()), where="post", color=colour, linewidth=1.0, label=f"rank {rank}")
        peaks.append(max((value for _, value in steps), default=0.0))
    highest = peaks.index(max(peaks))
    most = number(peaks[highest])
    amount = format_bytes(peaks[highest]) if measured else f"{most} microbatch{'' if most == '1' else 'es'}"
    ax.text(0.005, 0.98, f"peak {amount}, on rank {highest}", transform=ax.transAxes, va="top")
    ax.set_ylim(0, 1.3 * peaks[highest] or 1.0)
    ax.set_ylabel("memory" if measured else "in flight")
    if measured:  # marks at powers of two, as the units are
        ax.yaxis.set_major_locator(MultipleLocator(2.0 ** ceil(log2((peaks[highest] or 1.0) / 4))))
    else:
        ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=all(peak.is_integer() for peak in peaks)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value) if measured else number(value)))
    lines = ax.get_lines()
    shown = lines if ranks <= 8 else [lines[0], lines[ranks // 2], lines[-1]]
    ax.legend(handles=shown, loc="upper right", frameon=False, ncols=len(shown), handlelength=1.0, columnspacing=0.8)


def _legend(timeline: Drawable) -> Iterator[Patch]:
    ranks = range(timeline.plan.ranks)
    kinds = {type(span.effect) for rank in ranks for span in timeline.compute(rank)}
    kinds |= {type(s.effect) for track in timeline.drawn_lanes for rank in ranks for s in timeline.beside(rank, track)}
    causes = {gap.cause for rank in ranks for gap in timeline.gaps(rank)}
    for kind, row in drawn_rows(timeline.table, ("compute", *LANES)).items():
        if kind in kinds:
            yield Patch(facecolor=row.colour, label=row.label)
    if any(len(timeline.plan.stages_on(rank)) > 1 for rank in ranks):
        yield Patch(facecolor="none", label="lighter: a later chunk")
    for cause, (colour, hatch) in IDLE.items():
        if cause in causes:
            yield Patch(facecolor=colour, hatch=hatch, linewidth=0, label=f"idle: {cause}")
