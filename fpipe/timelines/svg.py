"""Draw a timeline as SVG: lanes of compute to scale, for notebooks and pages. No torch, no matplotlib, no script.

Colours are those of the table of effects, lighter for a rank's later chunks, with dark labels on them. All other text
takes the colour of the page around it; a drawing in its own document follows the reader's colour scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import floor, log10

from fpipe.effects import parts
from fpipe.timelines.format import extent, lighter, percent, scale_of
from fpipe.timelines.text import drawn_rows, text
from fpipe.timelines.timeline import CAUSES, Span, Timeline

_LANE, _BOX, _TOP = 30, 24, 28  # pixels: height of a lane, height of its boxes, space above the first lane
_CHARACTER = 6.8  # pixels: width of a character of a label
_NARROWEST, _WIDEST = 360.0, 1100.0  # pixels: width of the lanes
_IDLE = {"warm-up": "1 3", "dependency": "none", "transfer": "5 2", "drain": "1 3"}  # dashes of the idle line
_STYLE = "svg:root{color:#1f2328}@media(prefers-color-scheme:dark){svg:root{color:#e6edf3}}"


def svg(timeline: Timeline, title: str = "", unit: str = "") -> str:
    """Return a drawing of each rank's compute; the caption accounts for idle time by cause.

    Args:
        title: by default the numbers of ranks, stages and microbatches.
        unit: "s" for times in seconds; other times are shown as they are.

    >>> from fpipe import Placement, Plan, schedules, simulate
    >>> drawing = svg(simulate(schedules.gpipe, Plan(Placement.loop(2), 3)))
    >>> drawing.count("<rect"), drawing[:4]
    (12, '<svg')
    """
    return _Drawing(timeline, unit).svg(title or extent(timeline.plan))


class _Drawing:
    """The measures of a drawing in pixels, and its parts."""

    def __init__(self, timeline: Timeline, unit: str) -> None:
        self.timeline, self.plan = timeline, timeline.plan
        self.spans = [list(timeline.compute(rank)) for rank in range(self.plan.ranks)]
        self.first = min((spans[0].start for spans in self.spans if spans), default=0.0)
        self.makespan, self.format = timeline.makespan, scale_of(timeline.makespan, unit)
        self.left = 18 + _CHARACTER * len(f"rank {self.plan.ranks - 1}")
        self.width = self._width()
        self.bottom = _TOP + _LANE * self.plan.ranks

    def _width(self) -> float:
        """Return the width of the lanes that leaves room for the labels of three quarters of the effects."""
        needed = sorted(
            (len(self._labels(span)[0]) * _CHARACTER + 6) / (span.end - span.start)
            for spans in self.spans
            for span in spans
            if span.end > span.start
        )
        usual = needed[3 * len(needed) // 4] * self.makespan if needed else 0.0
        return min(_WIDEST, max(_NARROWEST, usual))

    def svg(self, title: str) -> str:
        legend = list(self._legend())
        rows = _wrap(legend, self.left + self.width)
        height = self.bottom + 34 + 20 * len(rows) + 22
        width = self.left + self.width + 16
        body = [_text(0, 14, title, 'font-weight="600"'), *self._axis(), *self._lanes()]
        for row, entries in enumerate(rows):
            body += [_legend_entry(x, self.bottom + 44 + 20 * row, label, mark) for x, label, mark in entries]
        body.append(_text(0, height - 6, self._caption(), 'opacity=".75"'))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'style="max-width:100%;height:auto" role="img" aria-label="{escape(title)}" fill="currentColor" '
            f'font-family="system-ui,sans-serif" font-size="12"><style>{_STYLE}</style>{"".join(body)}</svg>'
        )

    def _x(self, time: float) -> float:
        return self.left + (time - self.first) / (self.makespan or 1.0) * self.width

    def _axis(self) -> Iterator[str]:
        """Draw a thin line and a number at each round time."""
        step = _round_step(self.makespan * self.format.factor / (self.width / 70)) / self.format.factor
        for tick in range(floor(self.makespan / step + 1e-9) + 1) if step else ():
            x = self._x(self.first + tick * step)
            yield f'<path d="M{x:.1f} {_TOP - 4}V{self.bottom + 2}" stroke="currentColor" stroke-opacity=".18"/>'
            label = self.format.full(tick * step) if tick else "0"
            yield _text(x, self.bottom + 16, label, 'text-anchor="middle" font-size="11" opacity=".75"')

    def _lanes(self) -> Iterator[str]:
        for rank, spans in enumerate(self.spans):
            top = _TOP + _LANE * rank
            yield _text(self.left - 10, top + 17, f"rank {rank}", 'text-anchor="end"')
            for gap in self.timeline.gaps(rank):
                yield (
                    f'<path d="M{self._x(gap.start):.1f} {top + _BOX / 2:.0f}H{self._x(gap.end):.1f}" '
                    f'stroke="currentColor" stroke-opacity=".45" stroke-dasharray="{_IDLE[gap.cause]}">'
                    f"<title>{self._title(f'idle: {gap.cause}', gap.start, gap.end)}</title></path>"
                )
            for span in spans:
                yield from self._box(span, top)

    def _box(self, span: Span, top: float) -> Iterator[str]:
        x, width = self._x(span.start), self._x(span.end) - self._x(span.start)
        yield (
            f'<rect x="{x:.1f}" y="{top}" width="{max(width - 1, 0.5 * width):.1f}" height="{_BOX}" rx="2" '
            f'fill="{self._colour(span)}"><title>{self._title(str(span.effect), span.start, span.end)}</title></rect>'
        )
        label = next((label for label in self._labels(span) if len(label) * _CHARACTER + 2 <= width), "")
        if label:
            attributes = 'text-anchor="middle" fill="#111" pointer-events="none"'
            yield _text(x + width / 2, top + 16, label, attributes)

    def _title(self, what: str, start: float, end: float) -> str:
        return escape(f"{what}, {self.format(start - self.first)} to {self.format.full(end - self.first)}")

    def _labels(self, span: Span) -> list[str]:
        """Return the labels of a compute effect, the longest first; the shortest is its microbatch."""
        table, forms = self.timeline.table, ((True, True), (True, False), (False, False))
        return [text(span.effect, span.rank, self.plan, table, letter=letter, chunk=chunk) for letter, chunk in forms]

    def _colour(self, span: Span) -> str:
        """Return the colour of a compute effect, lighter for the later chunks of its rank."""
        stages = self.plan.stages_on(span.rank)
        chunk = stages.index(getattr(parts(span.effect)[0], "stage", stages[0]))
        return lighter(self.timeline.table.effects[type(span.effect)].colour, 0.55 * chunk / max(1, len(stages) - 1))

    def _legend(self) -> Iterator[tuple[str, str]]:
        """Yield the label and the mark of each kind of effect and of each cause of idle time that occurs."""
        kinds = {type(span.effect) for spans in self.spans for span in spans}
        for kind, row in drawn_rows(self.timeline.table).items():
            if kind in kinds:
                yield row.label, f'<circle cx="6" cy="-4" r="6" fill="{row.colour}"/>'
        if any(len(self.plan.stages_on(rank)) > 1 for rank in range(self.plan.ranks)):
            yield "lighter: a later chunk", ""
        causes = {gap.cause for rank in range(self.plan.ranks) for gap in self.timeline.gaps(rank)}
        for cause, dashes in _IDLE.items():
            if cause in causes:
                line = f'stroke="currentColor" stroke-opacity=".6" stroke-dasharray="{dashes}"'
                yield f"idle: {cause}", f'<path d="M0 -4H13" {line}/>'

    def _caption(self) -> str:
        """Give the makespan, and the parts of all ranks' time: compute, and idle time by cause."""
        whole = self.makespan * self.plan.ranks
        times = {"compute": sum(self.timeline.busy)}
        times |= {cause: sum(causes[cause] for causes in self.timeline.causes) for cause in CAUSES}
        shares = ", ".join(f"{what} {percent(time / whole)}" for what, time in times.items() if time > 5e-4 * whole)
        return f"makespan {self.format.full(self.makespan)}" + (f"; {shares}" if shares else "")


def _text(x: float, y: float, content: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(content)}</text>'


def _wrap(entries: list[tuple[str, str]], width: float) -> list[list[tuple[float, str, str]]]:
    """Break the legend into rows of (x, label, mark)."""
    rows: list[list[tuple[float, str, str]]] = [[]]
    x = 0.0
    for label, mark in entries:
        if rows[-1] and x + 18 + len(label) * _CHARACTER > width:
            rows.append([])
            x = 0.0
        rows[-1].append((x, label, mark))
        x += 18 + len(label) * _CHARACTER + 14
    return rows


def _legend_entry(x: float, y: float, label: str, mark: str) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{mark}{_text(18 if mark else 0, 0, label, "")}</g>'


def _round_step(least: float) -> float:
    """Return the least of 1, 2 or 5 times a power of ten that is not below `least`; 0 for 0."""
    if least <= 0:
        return 0.0
    power = 10.0 ** floor(log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
