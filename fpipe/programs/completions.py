"""The sends that are complete once a value arrives, so that a sender can free its tensors early. No torch.

Before a peer sends a value, it has used every value that its earlier effects need. Those values had arrived, and so
had all values ahead of them in the channel. gloo reports a completed send only to a blocking wait; these counts
tell when that wait returns at once.
"""

from __future__ import annotations

from fpipe.effects import Recv, Send, Value
from fpipe.programs.interning import Interning
from fpipe.programs.program import Programs


def send_completions(programs: Programs, rank: int) -> dict[Value, int]:
    """Return for each value that a rank receives: how many of the rank's sends to that peer are then complete.

    >>> from fpipe import Placement, Plan, lower, schedules
    >>> programs = lower(schedules.one_f_one_b, Plan(Placement.loop(2), 3))
    >>> {value.microbatch: count for value, count in send_completions(programs, 0).items()}
    {0: 1, 1: 2, 2: 3}
    """
    complete: dict[Value, int] = {}
    for peer, program in programs.items():
        if peer == rank:
            continue
        interning = Interning(program.plan, program.table)
        receives = [effect for effect in program if isinstance(effect, Recv) and effect.rank == rank]
        position = {interning.id(receive.value): at for at, receive in enumerate(receives, start=1)}
        used = 0
        for effect in program:
            if isinstance(effect, Send):
                if effect.rank == rank:
                    complete[effect.value] = used
            elif not isinstance(effect, Recv):
                for id_ in interning.ids(effect)[0]:
                    used = max(used, position.get(id_, 0))
    return complete
