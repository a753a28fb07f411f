"""Which sends are complete once a value has come: what lets a sender give its tensors up early. No torch.

A peer that sends a value has used all that it needed before. What it used had arrived, and so had everything
ahead of that in the channel. gloo tells of a complete send only to who waits for it; a receipt says when
that wait is over.
"""

from __future__ import annotations

from fpipe.effects import Name, Recv, Send, Value
from fpipe.programs.program import Programs


def receipts(programs: Programs, rank: int) -> dict[Value, int]:
    """For each value that a rank receives: how many of its own sends to that peer are then complete.

    >>> from fpipe import Placement, Plan, lower, schedules
    >>> programs = lower(schedules.one_f_one_b, Plan(Placement.loop(2), 3))
    >>> {value.microbatch: count for value, count in receipts(programs, 0).items()}
    {0: 1, 1: 2, 2: 3}
    """
    found: dict[Value, int] = {}
    for peer, program in programs.items():
        if peer == rank:
            continue
        place: dict[Name, int] = {}
        for effect in program:
            if isinstance(effect, Recv) and effect.rank == rank:
                place[effect.value] = len(place) + 1
        used = 0
        for effect in program:
            if isinstance(effect, Send) and effect.rank == rank:
                found[effect.value] = used
            used = max([used, *(place.get(name, 0) for name in program.table.needs(effect, program.plan))])
    return found
