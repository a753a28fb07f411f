"""A schedule as text: one column for each unit of time, one row for each rank. No torch."""

from __future__ import annotations

from fpipe.effects import Backward, BackwardInput, BackwardWeight, Effect, Forward, Name, Overlap, gives, needs
from fpipe.interleave import interleave
from fpipe.lowering import lower
from fpipe.program import Plan, Schedule

LETTERS = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}


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
        text = _text(effect, rank, plan)
        if text:
            start = max([len(rows[rank]), *(ready[name] for name in needs(effect, plan))])
            rows[rank] += ["."] * (start - len(rows[rank])) + [text]
            ready.update(dict.fromkeys(gives(effect, plan), start + 1))
    width = max(len(text) for row in rows for text in row)
    label = len(str(plan.ranks - 1))
    lines = (f"rank {rank:>{label}}  " + " ".join(f"{t:{width}}" for t in row) for rank, row in enumerate(rows))
    return "\n".join(line.rstrip() for line in lines)


def _text(effect: Effect, rank: int, plan: Plan) -> str:
    if isinstance(effect, Overlap):
        return f"{_text(effect.forward, rank, plan)}&{_text(effect.backward, rank, plan)}"
    if not isinstance(effect, Forward | Backward | BackwardInput | BackwardWeight):
        return ""
    stages = plan.stages_on(rank)
    chunk = _letters(stages.index(effect.stage)) if len(stages) > 1 else ""
    return f"{LETTERS[type(effect)]}{effect.microbatch}{chunk}"


def _letters(number: int) -> str:
    """a to z, then aa, ab, as the columns of a spreadsheet."""
    before, at = divmod(number, 26)
    return (_letters(before - 1) if before else "") + chr(ord("a") + at)
