"""1F1B: one forward, one backward, with as few microbatches in flight as keep the pipeline full."""

from collections.abc import Iterator
from math import ceil

from fpipe.effects import Backward, Effect, Forward
from fpipe.plan import Plan
from fpipe.schedules.requirements import one_stage


def one_f_one_b(rank: int, plan: Plan) -> Iterator[Effect]:
    """Warm up, then a forward and a backward in turn, then drain (Narayanan et al. 2019, PipeDream-Flush).

    Peak in flight without copies: stages - stage. One stage on each rank, in any order; fewer microbatches than ranks
    run.

    A stage may have copies, which run microbatches in turn (1F1B-RR: Narayanan et al., "PipeDream", SOSP 2019, section
    3.2). The peak of each of c copies is then 1 + ceil(n / c), where n is in flight on all copies of the next stage
    together, and 0 after the last one. Where a stage takes c(F + B) for each of m microbatches, without transfers, no
    rank's span exceeds (m + p - 1)(F + B). The cost is equal if one of several stages has copies, and each runs two
    microbatches or more. PipeDream's peak, ceil(ranks from this stage on / c), may be lower; then ranks before copies
    wait.

    Raises:
        ScheduleError: a rank holds several stages.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(one_f_one_b, Plan(Placement.loop(3), 4)))
    rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3
    >>> print(draw(one_f_one_b, Plan(Placement([(0, 1), 2]), 4)))
    rank 0  F0 F2 .  B0 .  .  .  B2
    rank 1  F1 F3 .  .  .  B1 .  .  .  B3
    rank 2  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    stage = one_stage("one_f_one_b", rank, plan, otherwise="interleaved_1f1b", takes_copies=True)
    own = plan.microbatches_of(stage, rank)
    warmup = min(_ahead(stage, plan), len(own))
    for m in own[:warmup]:
        yield Forward(stage, m)
    for n, m in enumerate(own[warmup:]):
        yield Forward(stage, m)
        yield Backward(stage, own[n])
    for m in own[len(own) - warmup :]:
        yield Backward(stage, m)


def _ahead(stage: int, plan: Plan) -> int:
    """Return how many forwards each copy runs before its first backward: its part of the next stage's flights."""
    later = 0  # in flight on all copies of the next stage
    for s in range(plan.stages - 1, stage, -1):
        copies = len(plan.ranks_of(s))
        later = copies * (1 + ceil(later / copies))
    return ceil(later / len(plan.ranks_of(stage)))
