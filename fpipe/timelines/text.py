"""Draw a schedule as text, in columns of one unit of time; or the lanes of a timeline, to scale. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor
from typing import NamedTuple

from fpipe._format import PLAIN, Scale, percent
from fpipe.costs import ROUNDING
from fpipe.effects import Effect, Name, Recv, Send
from fpipe.errors.arguments import checked
from fpipe.plan import Plan, Schedule
from fpipe.programs.interleaving import interleave
from fpipe.programs.lowering import lower
from fpipe.tables import TABLE, Table
from fpipe.timelines.labels import text
from fpipe.timelines.timeline import Timeline


@checked("schedule", "plan")
def draw(schedule: Schedule | str, plan: Plan, *, effects: Table = TABLE) -> str:
    """Draw the timeline in which every compute effect takes one unit of time and transfers take no time.

    F is a forward, B a backward, I and W its two halves; the number is the microbatch. Where a rank holds
    several stages, a letter after the number is the stage (a for the first). The arguments are as in `lower`.

    Raises:
        ScheduleError: the schedule is wrong for the plan.

    >>> from fpipe import Placement, Plan, schedules
    >>> print(draw(schedules.gpipe, Plan(Placement.loop(2), 2)))
    rank 0  F0 F1 .  .  B0 B1
    rank 1  .  F0 F1 B0 B1
    """
    programs = lower(schedule, plan, effects=effects)
    ready: dict[Name, int] = {}
    rows: list[list[str]] = [[] for _ in range(plan.ranks)]
    for rank, effect in interleave(programs):
        if isinstance(effect, Send | Recv):
            continue
        start = max([len(rows[rank]), *(ready[name] for name in effects.needs(effect, plan))])
        end = start
        if effects.effects[type(effect)].track == "compute":
            rows[rank] += ["."] * (start - len(rows[rank])) + [text(effect, rank, plan, effects)]
            end += 1
        ready.update(dict.fromkeys(effects.gives(effect, plan), end))
    width = max(len(cell) for row in rows for cell in row)
    label = len(str(plan.ranks - 1))
    lines = (f"rank {rank:>{label}}  " + " ".join(f"{t:{width}}" for t in row) for rank, row in enumerate(rows))
    return "\n".join(line.rstrip() for line in lines)


def figures(timeline: Timeline, scale: Scale = PLAIN) -> str:
    """Return the makespan and the bubble; where the bubble is a share of a shorter time, that time too.

    Of several steps, the period comes first.

    >>> from fpipe import Placement, Plan, schedules, simulate
    >>> figures(simulate(schedules.one_f_one_b, Plan(Placement.loop(2), 4)))
    'makespan 15, bubble 20.0%'
    >>> figures(simulate(schedules.zb_v, Plan(Placement.v(2), 4)))
    'makespan 25, bubble 0.0% of the longest span of a rank, 24'
    >>> figures(simulate(schedules.zb_v, Plan(Placement.v(2), 4), steps=10))
    'period 24 over 10 steps, makespan 241, bubble 0.0% of the longest span of a rank, 240'
    """
    loop = f"period {scale.full(timeline.period)} over {timeline.steps} steps, " if timeline.steps > 1 else ""
    within = timeline.makespan - timeline.cost > ROUNDING * timeline.makespan
    of = f" of the longest span of a rank, {scale.full(timeline.cost)}" if within else ""
    return f"{loop}makespan {scale.full(timeline.makespan)}, bubble {percent(timeline.bubble_rate)}{of}"


class Cell(NamedTuple):
    """Consecutive columns of a lane that belong to one effect, or to no effect."""

    effect: Effect | None
    columns: int
    label: str


def lane(
    timeline: Timeline, rank: int, scale: float, *, letters: bool = True, track: str = "compute"
) -> Iterator[Cell]:
    """Yield the cells of a rank's compute to scale, from the timeline's start to its end.

    Args:
        track: "compute", or one of `fpipe.tables.LANES` beside it.
        scale: columns for one unit of time. Ends are rounded to columns: an effect of one column or more is visible, a
            shorter one may not be.
        letters: whether labels contain the letter of the kind. A label that doesn't fit is shortened or left out.

    >>> from fpipe import Costs, Placement, Plan, schedules, simulate
    >>> timeline = simulate(schedules.gpipe, Plan(Placement.loop(2), 2), Costs(forward=2, backward=4))
    >>> [cell.label + "." * (cell.columns - len(cell.label)) for cell in lane(timeline, 0, scale=2)]
    ['F0..', 'F1..', '............', 'B0......', 'B1......']
    """
    first, at, last = timeline.start, 0, _column(timeline.makespan * scale)
    for span in timeline.compute(rank) if track == "compute" else timeline.beside(rank, track):
        # What travels beside compute may begin before the first one.
        begin, end = (max(0, _column((time - first) * scale)) for time in (span.start, span.end))
        if begin > at:
            yield Cell(None, begin - at, "")
        if end > begin:
            yield Cell(span.effect, end - begin, _label(span.effect, rank, timeline, end - begin, letters))
        at = max(at, end)
    if last > at:
        yield Cell(None, last - at, "")


def _column(at: float) -> int:
    """Round to the nearest column; halves go up, also if rounding of floats left them just below a half."""
    return floor(at + 0.5 + ROUNDING * max(1.0, at))


def _label(effect: Effect, rank: int, timeline: Timeline, columns: int, letters: bool) -> str:
    """Return the longest label that fits."""
    plan, table = timeline.plan, timeline.table
    forms = [text(effect, rank, plan, table, letter=letters, chunk=chunk) for chunk in (True, False)]
    if letters:
        forms.append(table.effects[type(effect)].letter)
    return next((form for form in forms if len(form) <= columns), "")
