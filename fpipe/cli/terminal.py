"""What the command line shows a person: lanes to scale, and tables. Needs rich, not torch.

Names that a user gave are printed as they are, never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, floor, log10

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fpipe.drawing import LOOKS, Cell, extent, lane, lighter, number, percent, size, sized
from fpipe.effects import Effect, parts
from fpipe.handlers.verifier import Report
from fpipe.timeline import CAUSES, Timeline


def table(columns: Iterable[str], words: Iterable[str] = (), gap: int = 2) -> Table:
    """A plain table: columns of numbers stand right, those named in `words` left."""
    found = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for column in columns:
        left = column in words
        found.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    return found


def headline(name: str, timeline: Timeline) -> Text:
    """What was simulated, and its figures."""
    figures = f"makespan {number(timeline.makespan)}, cost {number(timeline.cost)}, bubble "
    return Text.assemble((name, "bold"), f": {extent(timeline.plan)}\n{figures}", percent(timeline.bubble_rate))


def account(timeline: Timeline) -> Table:
    """Where every rank's time went, and the most that it held."""
    held = sized(timeline.costs)
    found = table(["rank", "busy", "idle", *CAUSES, "in flight", *(["memory"] if held else [])])
    for rank, causes in enumerate(timeline.causes):
        times = [timeline.busy[rank], timeline.idle[rank], *causes.values()]
        row = [*(_settled(time, timeline) for time in times), timeline.peak_in_flight[rank]]
        peak = [size(max(held for _, held in timeline.memory(rank)))] if held else []
        found.add_row(str(rank), *map(number, row), *peak)
    return found


def gantt(timeline: Timeline, console: Console, scale: float | None = None) -> Group:
    """The lanes of all ranks to scale, as wide as the console, and the share of the makespan that each is idle.

    Args:
        scale: columns for one unit of time. What is wider than the console goes on below, as music does.
    """
    ranks = range(timeline.plan.ranks)
    colours = console.color_system is not None and not console.no_color
    idle = [percent(1 - busy / timeline.makespan) if timeline.makespan else "" for busy in timeline.busy]
    margins = [f"rank {rank:>{len(str(ranks[-1]))}} {idle[rank]:>6}  " for rank in ranks]
    room = max(10, console.width - len(margins[0]))
    scale = scale or _fitting(timeline, room)
    lanes = [_row(lane(timeline, rank, scale, letters=not colours), " " if colours else "-") for rank in ranks]
    columns = len(lanes[0])
    block = max(1, ceil(columns / ceil(columns / room))) if columns else 1
    lines = []
    for at in range(0, columns, block):
        lines.append(Text("idle  ".rjust(len(margins[0])) + _axis(at, min(block, columns - at), scale), "dim"))
        pairs = zip(margins, lanes, strict=True)
        lines += [Text.assemble((margin, "dim"), row[at : at + block]) for margin, row in pairs]
    return Group(*lines, _legend(timeline, colours))


def _fitting(timeline: Timeline, room: int) -> float:
    """The scale that fills the room; or 3/4 of it and more, where the shortest effect then takes whole columns."""
    if not timeline.makespan:
        return 1.0
    scale = room / timeline.makespan
    spans = (span for rank in range(timeline.plan.ranks) for span in timeline.compute(rank))
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=0.0)
    whole = floor(scale * shortest + 1e-9)
    return whole / shortest if whole >= 0.75 * scale * shortest > 0 else scale


def _axis(at: int, columns: int, scale: float) -> str:
    """Times above their columns, ten columns or more apart, at 1, 2 or 5 times a power of ten.

    >>> _axis(at=0, columns=30, scale=2.5)
    '0            5            10'
    """
    power = 10.0 ** floor(log10(10 / scale))
    step = next(power * times for times in (1, 2, 5, 10, 20) if power * times * scale >= 10)
    axis, tick = "", ceil(at / (step * scale))
    while (column := floor(tick * step * scale + 0.5) - at) + len(time := number(tick * step)) <= columns:
        axis = axis.ljust(column) + time
        tick += 1
    return axis


def _row(cells: Iterator[Cell], filling: str) -> Text:
    row = Text(no_wrap=True, end="")
    for cell in cells:
        if cell.effect is None:
            row.append("." * cell.columns, "dim")
        else:
            row.append(cell.label.ljust(cell.columns, filling), _style(cell.effect))
    return row


def _style(effect: Effect) -> str:
    """An effect's colour, lighter for odd microbatches: neighbours differ."""
    colour = LOOKS[type(effect)].colour
    odd = getattr(parts(effect)[0], "microbatch", 0) % 2
    return f"#000000 on {lighter(colour, 0.4) if odd else colour}"


def _legend(timeline: Timeline, colours: bool) -> Text:
    plan = timeline.plan
    kinds = {type(span.effect) for rank in range(plan.ranks) for span in timeline.compute(rank)}
    legend = Text()
    for kind, look in LOOKS.items():
        if kind in kinds:
            legend.append("  " if colours else look.letter, f"#000000 on {look.colour}")
            legend.append(f" {look.name}  ")
    legend.append(". idle\nThe number is the microbatch", "dim")
    chunked = any(len(plan.stages_on(rank)) > 1 for rank in range(plan.ranks))
    return legend.append(", the letter after it the rank's chunk." if chunked else ".", "dim")


_FIGURES = ("make- \nspan ", "\ncost ", "\nbubble", "\npeak ")
_CAUSES = ("warm\nup", "depen-\ndency", "trans-\nfer", "imba-\nlance", "\ndrain")


def comparison(entrants: Sequence[tuple[str, Timeline, float]], refused: Mapping[str, str]) -> Group:
    """Schedules with their peaks, the best figures marked; then those that can't run here, and why."""
    found = table(["\nschedule", "\nv", *_FIGURES, *_CAUSES], words=["\nschedule"], gap=1)
    rows = [(line.makespan, line.cost, line.bubble_rate, peak) for _, line, peak in entrants]
    best = [min(column) for column in zip(*rows, strict=True)]
    for (name, timeline, _), figures in zip(entrants, rows, strict=True):
        forms = (number, number, percent, number)
        marked = [
            _marked(form(figure), figure <= least * (1 + 1e-9))
            for form, figure, least in zip(forms, figures, best, strict=True)
        ]
        found.add_row(Text(name), str(_chunks(timeline)), *marked, *(f"{mean:.3g}" for mean in _mean_causes(timeline)))
    note = Text("* best; v stages on a rank; peak in flight; a rank's mean idle time by cause", "dim")
    shown: list[RenderableType] = [found, note] if entrants else []
    reasons = [Text.assemble((name, "bold"), f": {reason}") for name, reason in refused.items()]
    return Group(*shown, *([Text("Not here:"), *reasons] if reasons else []))


def _mean_causes(timeline: Timeline) -> list[float]:
    totals = (sum(causes[cause] for causes in timeline.causes) for cause in CAUSES)
    return [_settled(total / timeline.plan.ranks, timeline) for total in totals]


def _settled(time: float, timeline: Timeline) -> float:
    """A time, or 0 where sums of floats left no more than their last digits."""
    return time if abs(time) > 1e-9 * timeline.makespan else 0.0


def _chunks(timeline: Timeline) -> int:
    return max(len(timeline.plan.stages_on(rank)) for rank in range(timeline.plan.ranks))


def _marked(figure: str, best: bool) -> Text:
    return Text(figure + "*", "bold green") if best else Text(figure + " ")


def discovery(found: Sequence[tuple[str, Timeline, float, float]]) -> Group:
    """Schedules that a search found, and how far each is from the bound."""
    shown = table(["schedule", "v", "makespan", "cost", "bubble", "peak", "bound", "above"], words=["schedule"])
    for name, timeline, peak, bound in found:
        figures = [number(timeline.makespan), number(timeline.cost), percent(timeline.bubble_rate), number(peak)]
        above = percent(timeline.cost / bound - 1) if bound else ""
        shown.add_row(Text(name), str(_chunks(timeline)), *figures, number(bound), above)
    return Group(shown, Text("bound: no schedule costs less   above: what this one costs more than that", "dim"))


def verdict(name: str, report: Report, *notes: str) -> Group:
    """What the verifier found in a schedule that is right, and what else is to be said of it."""
    memory = report.peak_bytes
    ranks = table(["rank", "effects", "in flight", *(["memory"] if memory else [])])
    for rank, (effects, peak) in enumerate(zip(report.effects, report.peak_in_flight, strict=True)):
        ranks.add_row(str(rank), str(effects), number(peak), *([size(memory[rank])] if memory else []))
    edges = table(["from", "to", "messages", *(["bytes"] if report.bytes else [])])
    for (source, target), count in report.messages.items():
        sent = [size(report.bytes[source, target])] if report.bytes else []
        edges.add_row(str(source), str(target), str(count), *sent)
    counts = f"{sum(report.effects)} effects, {sum(report.messages.values())} messages"
    head = f": {extent(report.plan)}\nright over the {report.transport} transport: {counts}"
    return Group(Text.assemble((name, "bold"), head), *map(Text, notes), Columns([ranks, edges], padding=(0, 4)))
