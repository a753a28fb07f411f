"""A schedule as text: in columns of one unit of time each, or a timeline's lanes to scale. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import floor
from typing import NamedTuple

from fpipe.effects import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Effect,
    Forward,
    Name,
    Overlap,
    gives,
    needs,
    parts,
)
from fpipe.plan import Plan, Schedule
from fpipe.programs.interleaving import interleave
from fpipe.programs.lowering import lower
from fpipe.timelines.timeline import Timeline


class Look(NamedTuple):
    """How an effect is drawn: its letter, its name in a legend, and its colour."""

    letter: str
    name: str
    colour: str


# The colours are Okabe and Ito's, which the colour-blind tell apart; black text reads on each.
LOOKS: dict[type[Effect], Look] = {
    Forward: Look("F", "forward", "#56b4e9"),
    BackwardInput: Look("I", "input gradient", "#e69f00"),
    BackwardWeight: Look("W", "weight gradient", "#009e73"),
    Backward: Look("B", "backward", "#d55e00"),
    Overlap: Look("&", "overlap", "#cc79a7"),
}


def draw(schedule: Schedule, plan: Plan) -> str:
    """The timeline when every compute effect takes one unit of time and transfers take none.

    F is a forward, B a backward, I and W its two halves; the number is the microbatch. Where a rank holds
    several stages, a letter after the number tells which of them (a for its first).

    Raises:
        ScheduleError: the schedule is wrong for the plan.

    >>> from fpipe import Placement, Plan, schedules
    >>> print(draw(schedules.gpipe, Plan(Placement.loop(2), 2)))
    rank 0  F0 F1 .  .  B0 B1
    rank 1  .  F0 F1 B0 B1
    """
    ready: dict[Name, int] = {}
    rows: list[list[str]] = [[] for _ in range(plan.ranks)]
    for rank, effect in interleave(lower(schedule, plan)):
        if type(effect) in LOOKS:
            start = max([len(rows[rank]), *(ready[name] for name in needs(effect, plan))])
            rows[rank] += ["."] * (start - len(rows[rank])) + [text(effect, rank, plan)]
            ready.update(dict.fromkeys(gives(effect, plan), start + 1))
    width = max(len(cell) for row in rows for cell in row)
    label = len(str(plan.ranks - 1))
    lines = (f"rank {rank:>{label}}  " + " ".join(f"{t:{width}}" for t in row) for rank, row in enumerate(rows))
    return "\n".join(line.rstrip() for line in lines)


def text(effect: Effect, rank: int, plan: Plan, *, letter: bool = True, chunk: bool = True) -> str:
    """A compute effect's letter, microbatch and chunk; of an overlap, those of both parts.

    >>> from fpipe import Placement
    >>> text(Overlap(Forward(3, 7), Backward(0, 5)), 0, Plan(Placement.v(2), 8))
    'F7b&B5a'
    """
    return "&".join(_part(part, rank, plan, letter, chunk) for part in parts(effect))


def _part(effect: Effect, rank: int, plan: Plan, letter: bool, chunk: bool) -> str:
    assert isinstance(effect, Compute)
    stages = plan.stages_on(rank)
    which = _letters(stages.index(effect.stage)) if chunk and len(stages) > 1 else ""
    return f"{LOOKS[type(effect)].letter if letter else ''}{effect.microbatch}{which}"


def _letters(number: int) -> str:
    """a to z, then aa, ab, as the columns of a spreadsheet."""
    before, at = divmod(number, 26)
    return (_letters(before - 1) if before else "") + chr(ord("a") + at)


class Cell(NamedTuple):
    """A stretch of a lane: columns of text that one effect takes, or none does."""

    effect: Effect | None
    columns: int
    label: str


def lane(timeline: Timeline, rank: int, scale: float, *, letters: bool = True) -> Iterator[Cell]:
    """A rank's compute to scale, from the timeline's start to its end.

    Args:
        scale: columns for one unit of time. Ends are rounded to columns: what takes one or more is seen, what takes
            less may not be.
        letters: whether labels say what kind an effect is. A label is left out, or is shorter, where it doesn't fit.

    >>> from fpipe import Costs, Placement, Plan, schedules, simulate
    >>> timeline = simulate(schedules.gpipe, Plan(Placement.loop(2), 2), Costs(forward=2, backward=4))
    >>> [cell.label + "." * (cell.columns - len(cell.label)) for cell in lane(timeline, 0, scale=2)]
    ['F0..', 'F1..', '............', 'B0......', 'B1......']
    """
    plan, first, at = timeline.plan, start(timeline), 0
    for span in timeline.compute(rank):
        begin, end = (_column((time - first) * scale) for time in (span.start, span.end))
        if begin > at:
            yield Cell(None, begin - at, "")
        if end > begin:
            yield Cell(span.effect, end - begin, _label(span.effect, rank, plan, end - begin, letters))
        at = max(at, end)
    last = _column(timeline.makespan * scale)
    if last > at:
        yield Cell(None, last - at, "")


def _column(at: float) -> int:
    """The nearest column; at halves the one above, also where floats fell short of a half in their last digits."""
    return floor(at + 0.5 + 1e-9 * max(1.0, at))


def start(timeline: Timeline) -> float:
    """When the first rank begins to compute: 0 in a simulation, by the clock in a measurement."""
    return min(span.start for rank in range(timeline.plan.ranks) for span in islice(timeline.compute(rank), 1))


def _label(effect: Effect, rank: int, plan: Plan, columns: int, letters: bool) -> str:
    """The longest label that fits."""
    forms = [text(effect, rank, plan, letter=letters, chunk=chunk) for chunk in (True, False)]
    if letters:
        forms.append(LOOKS[type(effect)].letter)
    return next((form for form in forms if len(form) <= columns), "")
