"""Tables and timelines of the command line. Needs rich, not torch.

Names from the user are printed unchanged, never interpreted as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, gcd, inf, log10
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fpipe._format import PLAIN, Scale, extent, format_bytes, lighter, number, percent, sized
from fpipe.cli.options import counts
from fpipe.costs import ROUNDING
from fpipe.effects import Backward, Effect, Forward, parts
from fpipe.plan import Plan
from fpipe.programs.footprint import RankBytes
from fpipe.programs.verifier import Report
from fpipe.schedules.cuts import splits_vocabulary
from fpipe.tables import LANES
from fpipe.tables import Table as Effects
from fpipe.timelines.comparison import Difference
from fpipe.timelines.labels import drawn_rows, label
from fpipe.timelines.spans import CAUSES
from fpipe.timelines.text import Cell, figures, lane
from fpipe.timelines.timeline import Timeline

if TYPE_CHECKING:
    from fpipe.schedules.found import Found
    from fpipe.timelines.comparison import PathSegment
    from fpipe.timelines.what_if import WhatIf

_LEAST_FOLDED = 24  # columns of a column that folds
_MAX_BLOCKS = 40  # of lanes, one below the other, without --scale


class _Unclipped(Table):
    """A table at least as wide as its columns that do not fold; rich would cut off numbers in a narrow console."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=10_000)
        least = self.__rich_measure__(console, wide).maximum
        for column in self.columns:
            if not column.no_wrap:
                widest = max(Measurement.get(console, wide, cell).maximum for cell in column.cells)
                least -= max(0, widest - _LEAST_FOLDED)
        return super().__rich_console__(console, options.update(max_width=max(options.max_width, least)))


def table(columns: Iterable[str], words: Iterable[str] = (), folded: Iterable[str] = (), gap: int = 2) -> Table:
    """Return an empty table. Columns in `words` are left-aligned, others right; only columns in `folded` may fold."""
    result = _Unclipped(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for column in columns:
        result.add_column(
            column, justify="left" if column in words else "right", overflow="fold", no_wrap=column not in folded
        )
    return result


def headline(name: str, timeline: Timeline, scale: Scale = PLAIN) -> Text:
    """Return the schedule's name, its size, and its main figures."""
    return Text.assemble((name, "bold"), f": {extent(timeline.plan)}\n{figures(timeline, scale)}")


def share_of(plan: Plan) -> list[Text]:
    """Return a note if a stage is another part of the model than a rank's share."""
    if plan.stages == plan.ranks:
        return []
    share = f"{plan.ranks // gcd(plan.ranks, plan.stages)}/{plan.stages // gcd(plan.ranks, plan.stages)}"
    shares = f"a stage takes {share} of them"
    if splits_vocabulary(plan):
        shares = "a block takes 2/3 of them, and a part of the output layer 1/3"
    return [Text(f"costs are for a rank's share of the model: {shares}", "dim")]


def above(cost: float, bound: float, scale: Scale = PLAIN) -> list[Text]:
    """Return a note of how far a cost is above a lower bound, if there is one."""
    if not bound:
        return []
    gap = percent(max(0.0, cost / bound - 1))
    return [Text(f"no order in this memory costs less than {scale.full(bound)}: this one costs {gap} more", "dim")]


def account(timeline: Timeline, scale: Scale = PLAIN, peaks: Sequence[float | None] = ()) -> Table:
    """Return a table of each rank's busy time, idle time by cause, and peak memory.

    Args:
        peaks: each rank's measured peak bytes; by default those that the costs predict.
    """
    if sized(timeline.costs) and not peaks:
        peaks = [max(nbytes for _, nbytes in timeline.memory(rank)) for rank in range(timeline.plan.ranks)]
    has_memory = any(peak is not None for peak in peaks)
    causes_of = _titles(timeline.cause_names)
    result = table(["\nrank", "\nbusy", "\nidle", *causes_of, "in\nflight", *(["\nmemory"] if has_memory else [])])
    for rank, causes in enumerate(timeline.causes):
        if not timeline.spans.of(rank):
            result.add_row(str(rank), "missing")
            continue
        times = [timeline.busy[rank], timeline.idle[rank], *causes.values()]
        row = [*(scale(_cleared(time, timeline.makespan)) for time in times), number(timeline.peak_in_flight[rank])]
        result.add_row(str(rank), *row, *([_size(peaks[rank])] if has_memory else []))
    if scale.name:
        result.caption = f"times in {scale.name}"
        result.caption_justify = "left"
    return result


def _size(nbytes: float | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def gantt(timeline: Timeline, console: Console, scale: float | None = None) -> Group:
    """Draw the lanes of all ranks to scale, with the share of the makespan that each rank is idle.

    Gathers and scatters that take time have a lane of their own below that of the rank.

    Args:
        scale: columns for one unit of time; by default at least one for the shortest effect. Lanes wider than the
            console continue in further blocks below.
    """
    ranks = range(timeline.plan.ranks)
    # 16 colours are too few for the kinds.
    colours = console.color_system in ("256", "truecolor") and not console.no_color
    idle = [percent(1 - busy / timeline.makespan) if timeline.makespan else "" for busy in timeline.busy]
    margins = [f"rank {rank:>{len(str(ranks[-1]))}} {idle[rank]:>6}  " for rank in ranks]
    room = max(10, console.width - len(margins[0]))
    limit = inf if scale else _MAX_BLOCKS * room
    scale = scale or _fitting(timeline, room)
    tracks = ["compute", *timeline.drawn_lanes]
    margins = [m for own in margins for m in (own, *(f"{t}  ".rjust(len(own)) for t in timeline.drawn_lanes))]
    cells = [
        list(_first(lane(timeline, rank, scale, letters=not colours, track=track), limit))
        for rank in ranks
        for track in tracks
    ]
    empty = [".", *" " * len(timeline.drawn_lanes)] * len(ranks)
    lanes = [_row(row, " " if colours else "-", timeline, idle) for row, idle in zip(cells, empty, strict=True)]
    columns = len(lanes[0])
    block = max(1, ceil(columns / ceil(columns / room))) if columns else 1
    lines = []
    for at in range(0, columns, block):
        lines.append(Text("idle  ".rjust(len(margins[0])) + _axis(at, min(block, columns - at), scale), "dim"))
        pairs = zip(margins, lanes, strict=True)
        lines += [Text.assemble((margin, "dim"), row[at : at + block]) for margin, row in pairs]
    return Group(
        *lines,
        _legend([cell for row in cells for cell in row], colours, timeline),
        *_left_out(timeline, scale, columns),
    )


def _first(cells: Iterator[Cell], columns: float) -> Iterator[Cell]:
    """Yield the cells that begin in the first columns, the last one cut."""
    at = 0
    for cell in cells:
        yield cell._replace(columns=int(min(cell.columns, columns - at)))
        at += cell.columns
        if at >= columns:
            return


def _left_out(timeline: Timeline, scale: float, columns: int) -> Iterator[Text]:
    """Yield a note for each kind of omission, with the option that avoids it."""
    if columns + 1 < timeline.makespan * scale:
        end = number(columns / scale)
        yield Text(f"This is until {end} of {number(timeline.makespan)}: --out FILE.svg draws all of it.", "bold")
    if (shortest := _shortest(timeline)) * scale < 1 - ROUNDING:
        enough = number(ceil(1000 / shortest) / 1000)
        yield Text(f"Some of what is shorter than a column is left out: --scale {enough} shows all.", "bold")


def _fitting(timeline: Timeline, room: int) -> float:
    """Return the largest scale that fits `room` and gives the shortest effect whole columns, at least one."""
    shortest = _shortest(timeline)
    if shortest == inf:
        return room / (timeline.makespan or room)
    return max(1, floor(room / timeline.makespan * shortest + ROUNDING)) / shortest


def _shortest(timeline: Timeline) -> float:
    """Return the shortest duration above zero of a compute effect; infinity if there is none."""
    spans = (span for rank in range(timeline.plan.ranks) for span in timeline.compute(rank))
    return min((span.end - span.start for span in spans if span.end > span.start), default=inf)


def _axis(at: int, columns: int, scale: float) -> str:
    """Return an axis: times above their columns, at least ten columns apart, at 1, 2 or 5 times a power of ten.

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


def _row(cells: Iterable[Cell], filling: str, timeline: Timeline, idle: str) -> Text:
    row = Text(no_wrap=True, end="")
    for cell in cells:
        if cell.effect is None:
            row.append(idle * cell.columns, "dim")
        else:
            row.append(cell.label.ljust(cell.columns, filling), _style(cell.effect, timeline))
    return row


def _style(effect: Effect, timeline: Timeline) -> str:
    """Return an effect's style: its colour, lighter for odd microbatches so that neighbours differ."""
    colour = timeline.table.effects[type(effect)].colour
    odd = getattr(parts(effect)[0], "microbatch", 0) % 2
    return f"#000000 on {lighter(colour, 0.4) if odd else colour}"


def _legend(cells: Sequence[Cell], colours: bool, timeline: Timeline) -> Text:
    kinds = {type(cell.effect) for cell in cells if cell.effect}
    labels = {cell.label for cell in cells}
    legend = Text()
    for kind, look in drawn_rows(timeline.table, ("compute", *LANES)).items():
        if kind in kinds:
            legend.append("  " if colours else look.letter, f"#000000 on {look.colour}")
            legend.append(f" {look.label}  ")
    legend.append(". idle", "dim")
    if any(label[-1:].isdigit() or label[-1:].islower() for label in labels):
        legend.append("\nThe number is the microbatch", "dim")
        chunked = any(label[-1:].islower() for label in labels)
        legend.append(", the letter after it the rank's chunk." if chunked else ".", "dim")
    return legend


_FIGURES = ("make- \nspan ", "\ncost ", "\nbubble", "\npeak ")
_CAUSES = dict(
    zip(
        CAUSES,
        (
            "warm\nup",
            "depen-\ndency",
            "trans-\nfer",
            "imba-\nlance",
            "\ndrain",
            "\ngather",
            "\nscatter",
            "\nhost",
            "off-\nload",
        ),
        strict=True,
    )
)


def comparison(entrants: Sequence[tuple[str, Timeline, float]], refused: Mapping[str, str]) -> Group:
    """Return a table of schedules with the best figures marked, then the refused schedules with the reasons."""
    causes = [name for name in CAUSES if any(name in timeline.cause_names for _, timeline, _ in entrants)]
    result = table(["\nschedule", "\nv", *_FIGURES, *_titles(causes)], words=["\nschedule"], gap=1)
    rows = [(line.makespan, line.cost, line.bubble_rate, peak) for _, line, peak in entrants]
    best = [min(column) for column in zip(*rows, strict=True)]
    for (name, timeline, _), row in zip(entrants, rows, strict=True):
        columns = zip((number, number, percent, number), row, best, strict=True)
        marked = [_marked(form(figure), figure <= least * (1 + ROUNDING)) for form, figure, least in columns]
        means = (f"{mean:.3g}" for mean in _mean_causes(timeline, causes))
        result.add_row(Text(_in_lines(name)), str(counts(timeline.plan)["chunks"]), *marked, *means)
    note = Text(
        "* best; v stages on a rank; cost: the longest span of a rank; bubble: its idle\n"
        "share; peak in flight; a rank's mean idle time by cause",
        "dim",
    )
    shown: list[RenderableType] = [result, note] if entrants else []
    reasons = [Text.assemble((name, "bold"), f": {reason}") for name, reason in refused.items()]
    return Group(*shown, *([Text("Not here:"), *reasons] if reasons else []))


def _titles(causes: Iterable[str]) -> list[str]:
    return [_CAUSES[cause] for cause in causes]


def _mean_causes(timeline: Timeline, names: Iterable[str]) -> list[float]:
    totals = (sum(causes.get(cause, 0.0) for causes in timeline.causes) for cause in names)
    return [_cleared(total / timeline.plan.ranks, timeline.makespan) for total in totals]


def _cleared(time: float, whole: float) -> float:
    """Return the time, or 0 for a rounding error in the whole."""
    return time if abs(time) > ROUNDING * whole else 0.0


def _marked(figure: str, best: bool) -> Text:
    return Text(figure + "*", "bold green") if best else Text(figure + " ")


def _in_lines(name: str, width: int = 16) -> str:
    """Return the name of a schedule, broken after a hyphen if it is wider than 16 columns.

    >>> _in_lines("interleaved-1f1b-overlap").split("\\n")
    ['interleaved-', '  1f1b-overlap']
    """
    end = name.rfind("-", 0, width) + 1
    return name if len(name) <= width or not end else f"{name[:end]}\n  {_in_lines(name[end:])}"


def discovery(results: Sequence[Found], within: str = "") -> Group:
    """Return a table of a search's schedules, and how far each is above the lower bound.

    Args:
        within: the memory in which no schedule costs less than its bound, such as "in this memory ".
    """
    replicas = any(each.plan.replicas > 1 for each in results)
    memory = any(each.bytes for each in results)
    columns = ["schedule", "v", *(["resident"] if replicas else []), "makespan", "cost", "bubble", "peak"]
    shown = table([*columns, *(["memory"] if memory else []), "bound", "above"], words=["schedule"])
    for each in results:
        line, bound = each.timeline, each.lower_bound
        resident = ["all, unsharded" if each.resident is None else str(each.resident)] if replicas else []
        figures = [number(line.makespan), number(line.cost), percent(line.bubble_rate), number(each.peak)]
        figures += [format_bytes(each.bytes)] if memory else []
        above = percent(max(0.0, line.cost / bound - 1)) if bound else ""
        shown.add_row(Text(each.name), str(counts(line.plan)["chunks"]), *resident, *figures, number(bound), above)
    lines = [f"bound: no schedule {within}costs less   above: what this one costs more than that"]
    if replicas:
        lines.append("resident: stages whose sharded parameters are whole on a rank at a time")
    if memory:
        lines.append("memory: of all kinds, on the rank that needs most")
    if any(each.offload for each in results):
        lines.append("residuals are moved or recomputed, so that they fit")
    if any(each.costs.scale for each in results):
        lines += [f"order of microbatches: {' '.join(map(str, each.order))}" for each in results if each.order]
    return Group(shown, Text("\n".join(lines), "dim"))


def stages_of(found: Found) -> Table:
    """Return a table of the stages that a search made of layers."""
    costs, plan = replace(found.costs, scale=(), sizes=()), found.plan
    sizes = ["residuals", "parameters"] if sized(costs) else []
    shown = table(["stage", "rank", "layers", "forward", "backward", *sizes], words=["layers"])
    for stage, (first, count) in enumerate(zip((0, *found.cuts), found.layers, strict=True)):
        ranks = "+".join(map(str, plan.ranks_of(stage)))
        names = str(first) if count == 1 else f"{first}-{first + count - 1}"
        times = [number(costs.time(kind(stage, 0))) for kind in (Forward, Backward)]
        of_values = [format_bytes(costs.at(name, Forward(stage, 0))) for name in sizes]
        shown.add_row(str(stage), ranks, names, *times, *of_values)
    return shown


def verdict(name: str, report: Report, *notes: str) -> Group:
    """Return the verifier's report of a valid schedule, after further notes."""
    tables = []
    for head, *rows in report.tables:
        tables.append(table(head))
        for row in rows:
            tables[-1].add_row(*row)
    title = Text.assemble((name, "bold"), f": {extent(report.plan)}\n{report.title}")
    return Group(title, *map(Text, notes), Columns(tables, padding=(0, 4)))


def memory_of(accounts: Sequence[RankBytes]) -> list[Table]:
    """Return a table of all bytes of each rank, if parameters are known."""
    if not any(each.parameters for each in accounts):
        return []
    parts = RankBytes._fields
    result = table(["rank", *parts, "in all"])
    for rank, each in enumerate(accounts):
        result.add_row(str(rank), *map(format_bytes, each), format_bytes(each.total))
    return [result]


_MAX_SEGMENTS = 12  # of a critical path, at each end
_MAX_EFFECTS = 10
_MAX_GROUPS = 10
_MAX_ROWS = 20  # of what would help


def path(segments: Sequence[PathSegment], shares: Mapping[str, float], timeline: Timeline, scale: Scale) -> Text:
    """Return the critical path, rank after rank, and each kind's share of the makespan on it."""
    makespan = timeline.makespan
    words = [_segment(segment, scale, timeline.table) for segment in segments if segment.time > ROUNDING * makespan]
    if (more := len(words) - 2 * _MAX_SEGMENTS) > 0:
        words[_MAX_SEGMENTS:-_MAX_SEGMENTS] = [f"… {more} more …"]
    parts = ", ".join(f"{name} {percent(time / makespan)}" for name, time in shares.items() if time and makespan)
    return Text.assemble(("critical path: ", "bold"), f"{parts}\n", " -> ".join(words))


def _segment(segment: PathSegment, scale: Scale, effects: Effects) -> str:
    rows = {kind.__name__: row for kind, row in effects.effects.items() if kind.__name__ in segment.effects}
    if any(row.track in ("send", "receive") for row in rows.values()):
        return f"transfer {scale.full(segment.time)}"
    letters = {kind: row.letter if row.track == "compute" else kind.lower() for kind, row in rows.items()}
    kinds = ", ".join(f"{count} {letters[kind]}" for kind, count in segment.effects.items())
    return f"rank {segment.ranks[0]} ({kinds}) {scale.full(segment.time)}"


def what_if(result: WhatIf, scale: Scale) -> Group:
    """Return what would help, the largest first, and how far the replay is to be trusted."""
    makespan = result.timeline.makespan
    shown = table(["what", "won", "share", "makespan", "how"], words=["what", "how"], folded=["how"])
    for row in result.rows[:_MAX_ROWS]:
        share = percent(row.seconds / makespan)
        shown.add_row(Text(row.what), scale(row.seconds), share, scale(row.makespan), Text(row.assumes, "dim"))
    if scale.name:
        shown.caption, shown.caption_justify = f"times in {scale.name}", "left"
    headline = result.headline(scale) or "nothing stands out"
    off = percent(abs(result.error))
    how = "as long as" if off == percent(0) else f"{off} {'more' if result.error > 0 else 'less'} than"
    trust = f"replayed with its own times, the step takes {how} captured"
    return Group(Text(headline, "bold"), *([shown] if result.rows else []), Text(trust, "dim"))


def difference(result: Difference, names: tuple[str, str], scale: Scale) -> Group:
    """Return two timelines side by side; a difference is positive if A is longer."""
    titles = [Text.assemble((letter, "bold"), f"  {name}") for letter, name in zip("AB", names, strict=True)]
    unit = f" ({scale.name})" if scale.name else ""
    totals = table(["", "A", "B", "A - B"], words=[""])
    totals.add_row(f"makespan{unit}", *_pair(result.makespan, scale))
    totals.add_row("bubble", *map(percent, result.bubble_rate), percent(result.bubble_rate[0] - result.bubble_rate[1]))
    for kind, pair in result.kinds.items():
        totals.add_row(f"{kind}{unit}", *_pair(pair, scale))
    breakdown = table(["where the makespans differ", "A - B"], words=["where the makespans differ"])
    for where, time in {**result.breakdown, "all": result.makespan[0] - result.makespan[1]}.items():
        style = "bold" if where == "all" else None
        breakdown.add_row(f"{where}{unit}", scale(_cleared(time, max(result.makespan))), style=style)
    note = "host: between effects of A's critical path; elsewhere: B's makespan beyond that path"
    both = Columns([totals, breakdown], padding=(0, 4))
    effects = _grouped(result, scale), *_apart(result, scale)
    return Group(*titles, both, Text(note, "dim"), _side_by_side(result, scale), *effects)


def _pair(pair: tuple[float, float], scale: Scale) -> Iterator[str]:
    return (scale(time) for time in (*pair, _cleared(pair[0] - pair[1], max(pair))))


def _side_by_side(result: Difference, scale: Scale) -> Table:
    """Return a table of each rank's busy and idle time in both timelines."""
    shown = table(["\nrank", "\nbusy A", "\nB", "\nidle A", "\nB", *_titles(result.cause_names)])
    for rank in result.ranks:
        lines = result.a, result.b
        pairs = (*(line.busy[rank] for line in lines), *(line.idle[rank] for line in lines))
        both = result.a.causes[rank], result.b.causes[rank]
        causes = (both[0].get(cause, 0.0) - both[1].get(cause, 0.0) for cause in result.cause_names)
        shown.add_row(str(rank), *(scale(_cleared(time, max(result.makespan))) for time in (*pairs, *causes)))
    shown.caption, shown.caption_justify = "causes of idle time: A - B", "left"
    return shown


def _grouped(result: Difference, scale: Scale) -> RenderableType:
    """Return a table of the effects of one kind on one rank together, those that differ most first."""
    shown = table(["effects", "kind", "sum", "largest"], words=["effects", "kind"])
    for group in result.groups[:_MAX_GROUPS]:
        if not _cleared(group.total, max(result.makespan)):
            break
        name = f"{group.name} {_signed(group.median, scale)} x {group.size}"
        times = (_signed(time, scale) for time in (group.total, group.largest.longer))
        shown.add_row(Text(name), Text(result.a.table.effects[group.kind].label), *times)
    if not shown.row_count:
        return Text("every effect that both have took as long")
    shown.caption = "effects of one kind on one rank: A - B, the median and how many, their sum and the largest"
    shown.caption_justify = "left"
    return shown


def _signed(time: float, scale: Scale) -> str:
    return f"{'+' if time > 0 else '' if time else '±'}{scale.full(time)}"


def _apart(result: Difference, scale: Scale) -> list[Table]:
    """Return a table of the effects that differ otherwise than those of their kind on their rank, if there are any."""
    shown = table(["rank", "stage", "effect", "took A", "B", "A - B", "began later by"], words=["effect"])
    longest = max(result.makespan)
    for each in result.apart[:_MAX_EFFECTS]:
        name = label(each.effect, each.rank[0], result.a.plan, result.a.table)
        times = (scale(_cleared(time, longest)) for time in (*each.took, each.longer, each.shift))
        stage = getattr(getattr(each.effect, "value", parts(each.effect)[0]), "stage", "")
        shown.add_row(str(each.rank[0]), str(stage), Text(name), *times)
    shown.caption, shown.caption_justify = f"those that differ otherwise{_in(scale)}", "left"
    return [shown] if shown.row_count else []


def _in(scale: Scale) -> str:
    return f", in {scale.name}" if scale.name else ""
