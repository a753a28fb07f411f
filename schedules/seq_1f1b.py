"""Seq1F1B: 1F1B over slices of the sequences, and its form with the backward in two halves."""

from collections.abc import Iterator

from fpipe.effects import Backward, BackwardInput, BackwardWeight, Effect, Forward
from fpipe.plan import Plan
from fpipe.schedules.requirements import one_stage


def seq_1f1b(rank: int, plan: Plan) -> Iterator[Effect]:
    """1F1B whose steps are slices of a microbatch: less memory and a smaller bubble, for long sequences.

    Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism", arXiv 2406.03488, section 3. `plan.slices` is
    the number of slices, s; with 1 it is `one_f_one_b`. A microbatch runs backward from its last slice, so each rank
    runs s - 1 more slices ahead than 1F1B runs microbatches. One stage on each rank, in any order.

    Peak in flight on rank r: p - 1 - r + s slices, each 1/s of a microbatch. With F, B, W the times of a whole
    microbatch on a rank, in equal slices, the cost is m(F+B+W) + (p-1)(F+B+W)/s at c = 0, for any m.

    Raises:
        ScheduleError: a rank holds several stages, or a stage has copies.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(seq_1f1b, Plan(Placement.loop(3), 3, slices=2)))
    rank 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 F2.0 B0.0 F2.1 B1.1 .    B1.0 .    B2.1 B2.0
    rank 1  .    F0.0 F0.1 F1.0 .    B0.1 F1.1 B0.0 F2.0 B1.1 F2.1 B1.0 .    B2.1 B2.0
    rank 2  .    .    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 F2.0 B1.0 F2.1 B2.1 B2.0
    """
    stage = one_stage("seq_1f1b", rank, plan, otherwise="interleaved_1f1b without slices")
    forwards, backwards = plan.forward_order(stage, rank), plan.backward_order(stage, rank)
    ahead = min(plan.stages - 1 - stage + plan.slices - 1, len(forwards))
    for m, t in forwards[:ahead]:
        yield Forward(stage, m, t)
    for at, (m, t) in enumerate(backwards):
        if at + ahead < len(forwards):
            yield Forward(stage, *forwards[at + ahead])
        yield Backward(stage, m, t)


def seq_zb(rank: int, plan: Plan) -> Iterator[Effect]:
    """`seq_1f1b` with delayed weight gradients, and the memory of its first rank on every rank.

    After ZB-H1 (Qi et al., ICLR 2024, section 2.2), over the slices of Seq1F1B (arXiv 2406.03488): rank r delays each
    weight gradient by r slices. With `plan.slices` = 1 its cost is that of `zb_h1`. One stage on each rank, in any
    order.

    Peak in flight: p - 1 + s slices, each 1/s of a microbatch. With F, B, W as in `seq_1f1b`, the cost is
    m(F+B+W) + (p-1)(F+B-W)/s for W <= F, c = 0 and m s >= p - 1 + s.

    Raises:
        ScheduleError: a rank holds several stages, or a stage has copies.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(seq_zb, Plan(Placement.loop(3), 3, slices=2)))
    rank 0  F0.0 F0.1 F1.0 F1.1 .    .    I0.1 W0.1 F2.0 I0.0 W0.0 F2.1 I1.1 W1.1 I1.0 W1.0 I2.1 W2.1 I2.0 W2.0
    rank 1  .    F0.0 F0.1 F1.0 .    I0.1 F1.1 I0.0 W0.1 F2.0 I1.1 W0.0 F2.1 I1.0 W1.1 I2.1 W1.0 I2.0 W2.1 W2.0
    rank 2  .    .    F0.0 F0.1 I0.1 F1.0 I0.0 F1.1 I1.1 W0.1 F2.0 I1.0 W0.0 F2.1 I2.1 W1.1 I2.0 W1.0 W2.1 W2.0
    """
    stage = one_stage("seq_zb", rank, plan, otherwise="interleaved_zb, zb_v or zb_auto without slices")
    forwards, backwards = plan.forward_order(stage, rank), plan.backward_order(stage, rank)
    ahead, late = min(plan.stages - 1 - stage + plan.slices, len(forwards)), stage
    for m, t in forwards[:ahead]:
        yield Forward(stage, m, t)
    for at, (m, t) in enumerate(backwards):
        yield BackwardInput(stage, m, t)
        if at >= late:
            yield BackwardWeight(stage, *backwards[at - late])
        if at + ahead < len(forwards):
            yield Forward(stage, *forwards[at + ahead])
    for m, t in backwards[max(0, len(backwards) - late) :]:
        yield BackwardWeight(stage, m, t)
