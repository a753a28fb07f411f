"""Interleaved zero bubble: interleaved 1F1B whose weight gradients fill the bubble."""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from fpipe.effects import BackwardInput, BackwardWeight, Effect, Forward
from fpipe.plan import Plan
from fpipe.schedules.interleaved import in_groups
from fpipe.schedules.requirements import a_loop


def interleaved_zb(rank: int, plan: Plan) -> Iterator[Effect]:
    """Interleaved 1F1B with weight gradients moved into the bubble (Qi et al. 2024, section 2, ZB-H1, over chunks).

    A rank warms up with one forward for each rank after it instead of two, and delays weight gradients by as many steps
    as there are ranks before it, so that all ranks have the same peak. Microbatches are grouped as by
    interleaved_1f1b.

    Cost, in the terms used there: m S + (p - 1) (F + B - W) / v where m >= p, W <= min(F, B) and c = 0.
    Peak in flight: (v - 1) g + p chunks on every rank, which is p v where p divides m, and at most m v.

    Raises:
        ScheduleError: another placement than a loop.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(interleaved_zb, Plan(Placement.loop(2, chunks=2), 4)))
    rank 0  F0a F1a F0b F1b .   I0b W0b F2a I1b W1b F3a I0a W0a F2b I1a W1a F3b I2b W2b I3b W3b I2a W2a I3a W3a
    rank 1  .   F0a F1a F0b I0b F1b I1b W0b F2a I0a W1b F3a I1a W0a F2b I2b W1a F3b I3b W2b I2a W3b I3a W2a W3a
    """
    a_loop("interleaved_zb", plan)
    late: deque[BackwardWeight] = deque()
    for effect in chain.from_iterable(in_groups(rank, plan, ahead=1)):
        if isinstance(effect, Forward):
            yield effect
            continue
        yield BackwardInput(effect.stage, effect.microbatch)
        late.append(BackwardWeight(effect.stage, effect.microbatch))
        if len(late) > rank:
            yield late.popleft()
    yield from late
