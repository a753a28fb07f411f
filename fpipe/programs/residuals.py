"""The rules for residuals that are moved to the host, or recomputed: what may follow what on a rank. No torch.

From its forward to its backward, the residuals of a microbatch on a stage are in one state at a time. They go to the
host and back at most once, or they are recomputed once; and they are on the rank when its backward needs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fpipe.effects import Discard, Effect, Fetch, Offload, Recompute, Residuals, parts
from fpipe.programs.names import refused
from fpipe.programs.program import Program
from fpipe.tables import FORWARD, slice_of

SAVED, COPIED, AWAY, FETCHED, AGAIN, USED = range(6)
STATES = {
    None: "are not saved yet",
    SAVED: "are on the rank since its forward",
    COPIED: "are on the rank, and posted to the host",
    AWAY: "are on the host",
    FETCHED: "are back from the host",
    AGAIN: "are recomputed",
    USED: "are used: its backward has run",
}
MOVES: dict[type, tuple[int, int, str]] = {
    Offload: (SAVED, COPIED, "it comes once, between forward and backward"),
    Discard: (COPIED, AWAY, "it comes once, after their Offload"),
    Fetch: (AWAY, FETCHED, "it comes once, after their Discard and before the backward"),
    Recompute: (SAVED, AGAIN, "it comes once, between forward and backward, where nothing is offloaded"),
}
"""Effect -> the states before and after it, and where it belongs."""
UNUSABLE = {COPIED: "Discard and Fetch", AWAY: "Fetch"}
"""State in which no backward may run -> the effects that lack."""


def moves(effects: Iterable[Effect]) -> bool:
    """Return whether any of the effects moves or recomputes residuals."""
    return not MOVES.keys().isdisjoint(map(type, effects))


def check_moves(program: Program) -> None:
    """Raise ScheduleError at the first effect that finds the residuals in a state in which it may not run."""
    states: dict[Residuals, int] = {}
    plan, table = program.plan, program.table
    for effect in program if moves(program) else ():
        part: Any
        for part in parts(effect):
            if type(part) in MOVES:
                before, after, way = MOVES[type(part)]
                name = Residuals(part.stage, part.microbatch, slice_of(part))
                state = states.get(name)
                if program.rank not in plan.ranks_of(part.stage) or not plan.is_differentiated(part.stage):
                    raise refused(program.rank, part, "the rank saves no residuals of the stage")
                if state != before:
                    raise refused(program.rank, part, f"the residuals of the microbatch {STATES[state]}: {way}")
                states[name] = after
            elif table.effects[type(part)].work & FORWARD:
                states[Residuals(part.stage, part.microbatch, slice_of(part))] = SAVED
            else:
                for name in table.needs(part, plan):
                    if type(name) is Residuals:
                        _use(program, part, name, states)


def _use(program: Program, effect: Effect, name: Residuals, states: dict[Residuals, int]) -> None:
    state = states.get(name)
    if state is not None and state in UNUSABLE:
        raise refused(
            program.rank,
            effect,
            f"the residuals of the microbatch {STATES[state]}: yield their {UNUSABLE[state]} before it",
        )
    states[name] = USED
