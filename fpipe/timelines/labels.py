"""The labels and colours of effects in drawings. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpipe._format import lighter
from fpipe.effects import Effect, parts
from fpipe.plan import Plan
from fpipe.tables import TABLE, Row, Table, slice_of


def drawn_rows(table: Table, tracks: Sequence[str] = ("compute",)) -> dict[type, Row]:
    """Return the rows of the effects that are drawn in a rank's lane, in the order of the table.

    Args:
        tracks: with `fpipe.tables.LANES`, also of those in the lanes beside compute.
    """
    return {kind: row for kind, row in table.effects.items() if row.track in tracks}


def label(effect: Effect, rank: int, plan: Plan, table: Table = TABLE) -> str:
    """Return the name of an effect on a rank.

    >>> from fpipe import Placement
    >>> from fpipe.effects import Activation, Send
    >>> label(Send(Activation(0, 3), 1), 0, Plan(Placement.loop(2), 4))
    'send activation 3'
    """
    if any(table.effects[type(part)].work for part in parts(effect)):
        return text(effect, rank, plan, table, chunk=False)
    return table.text(effect)


def text(
    effect: Effect, rank: int, plan: Plan, table: Table = TABLE, *, letter: bool = True, chunk: bool = True
) -> str:
    """Return a compute effect's letter, microbatch, slice and chunk; for an overlap, those of both parts.

    >>> from fpipe import Placement
    >>> from fpipe.effects import Backward, Forward, Overlap
    >>> text(Overlap(Forward(3, 7), Backward(0, 5)), 0, Plan(Placement.v(2), 8))
    'F7b&B5a'
    >>> text(Forward(0, 7, slice=1), 0, Plan(Placement.loop(2), 8, slices=2))
    'F7.1'
    """
    return "&".join(_part(part, rank, plan, table, letter, chunk) for part in parts(effect))


def _part(effect: Any, rank: int, plan: Plan, table: Table, letter: bool, chunk: bool) -> str:
    stages = plan.stages_on(rank)
    is_chunk = chunk and len(stages) > 1 and getattr(effect, "stage", None) in stages
    suffix = _letters(stages.index(effect.stage)) if is_chunk else ""
    microbatch = str(effect.microbatch) if hasattr(effect, "microbatch") else ""
    if microbatch and plan.slices > 1:
        microbatch += f".{slice_of(effect)}"
    return f"{table.effects[type(effect)].letter if letter else ''}{microbatch}{suffix}"


def _letters(number: int) -> str:
    """Return the letters of a chunk: a to z, then aa, ab, as the columns of a spreadsheet."""
    before, at = divmod(number, 26)
    return (_letters(before - 1) if before else "") + chr(ord("a") + at)


def shade(effect: Effect, rank: int, plan: Plan, table: Table = TABLE) -> str:
    """Return the colour of a compute effect, lighter for the later chunks of its rank."""
    stages = plan.stages_on(rank)
    chunk = stages.index(getattr(parts(effect)[0], "stage", stages[0]))
    return lighter(table.effects[type(effect)].colour, 0.55 * chunk / max(1, len(stages) - 1))
