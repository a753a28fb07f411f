"""1F1B: one forward, one backward, with as few microbatches in flight as keep the pipeline full."""

from collections.abc import Iterator

from fpipe.effects import Backward, Effect, Forward
from fpipe.plan import Plan
from fpipe.schedules.requirements import one_stage


def one_f_one_b(rank: int, plan: Plan) -> Iterator[Effect]:
    """Warm up, then a forward and a backward in turn, then drain (Narayanan et al. 2019, PipeDream-Flush).

    Peak in flight: stages - stage. One stage on each rank, in any order; fewer microbatches than ranks run.

    Raises:
        ScheduleError: a rank holds several stages.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(one_f_one_b, Plan(Placement.loop(3), 4)))
    rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    stage = one_stage("one_f_one_b", rank, plan, otherwise="interleaved_1f1b")
    warmup = min(plan.stages - 1 - stage, plan.microbatches)
    for m in range(warmup):
        yield Forward(stage, m)
    for m in range(plan.microbatches - warmup):
        yield Forward(stage, m + warmup)
        yield Backward(stage, m)
    for m in range(plan.microbatches - warmup, plan.microbatches):
        yield Backward(stage, m)
