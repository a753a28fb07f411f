"""ZB-H1 and ZB-H2: the backward in two halves, so that weight gradients fill the bubble."""

from collections.abc import Iterator

from fpipe.effects import BackwardInput, BackwardWeight, Effect, Forward
from fpipe.plan import Plan
from fpipe.schedules.requirements import one_stage


def zb_h1(rank: int, plan: Plan) -> Iterator[Effect]:
    """1F1B with delayed weight gradients, and the memory of 1F1B's first rank on every rank.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2. One stage on each rank, in any order; any
    number of microbatches.

    Peak in flight: p = plan.ranks. With F, B, W the times of a forward, an input and a weight gradient and c that of a
    transfer, the cost is m(F+B+W) + (p-1)(B+2c + max(0, F-W+2c)) for m >= 2p and 2c <= W, which no order with this
    peak improves on: the first rank waits (p-1)(B+2c) for its first input gradient, with p forwards to fill the time,
    and (p-1)(F-W+2c) between its last forward and last input gradient. For W <= F + 2c this is (p-1)(F+B-W) of table 2,
    and 4c for the transfers. Where 2c > W the first rank waits in each round of p microbatches.

    Raises:
        ScheduleError: a rank holds several stages, or a stage has copies.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(zb_h1, Plan(Placement.loop(3), 6)))
    rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
    rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
    rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5
    """
    return in_rounds(rank, plan, plan.ranks)


def zb_h2(rank: int, plan: Plan) -> Iterator[Effect]:
    """ZB-H1 with more forwards ahead: no bubble where times are equal, for nearly twice the memory.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.3. One stage on each rank, in any order; any
    number of microbatches.

    Peak in flight: 2p - 1. In the terms of `zb_h1`, the cost is m(F+B+W) + (p-1) max(0, F+B-2W+2c, B-F+2c) for
    m >= 2p - 1 and 2c <= F + B, which no order with this peak improves on. Where W <= F and 2W <= F + B + 2c this is
    (p-1)(F+B-2W) of table 2, and 2c for the transfers.

    Raises:
        ScheduleError: a rank holds several stages, or a stage has copies.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(zb_h2, Plan(Placement.loop(3), 6)))
    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """
    return in_rounds(rank, plan, 2 * plan.ranks - 1)


def in_rounds(rank: int, plan: Plan, limit: int) -> Iterator[Effect]:
    """Yield forwards to warm up, then in each round an input gradient, a delayed weight gradient and a forward.

    The family of ZB-H1 (limit p) and ZB-H2 (limit 2p - 1): the largest number of microbatches in flight, p to 2p - 1.
    Later ranks run fewer forwards ahead and delay weight gradients by as much, so that at equal times
    and c = 0 the cost is 3m + 2p - 1 - limit.
    """
    stage = one_stage("ZB-H", rank, plan, otherwise="interleaved_zb, zb_v or zb_auto")
    ahead = min(2 * (plan.ranks - stage) - 1, limit - stage)
    late = limit - ahead
    for m in range(min(ahead, plan.microbatches)):
        yield Forward(stage, m)
    for m in range(plan.microbatches):
        yield BackwardInput(stage, m)
        if m >= late:
            yield BackwardWeight(stage, m - late)
        if m + ahead < plan.microbatches:
            yield Forward(stage, m + ahead)
    for m in range(max(0, plan.microbatches - late), plan.microbatches):
        yield BackwardWeight(stage, m)
