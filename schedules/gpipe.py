"""GPipe: all forwards, then all backwards."""

from collections.abc import Iterator

from fpipe.effects import Backward, Effect, Forward
from fpipe.plan import Plan


def gpipe(rank: int, plan: Plan) -> Iterator[Effect]:
    """Run every microbatch forward, then every microbatch backward (Huang et al. 2019, figure 2).

    Peak in flight: all microbatches. Takes any placement; a rank runs its stages one after the other.
    Backwards run in ascending order, so that sums keep their order. With `plan.slices`, microbatches run slice by
    slice (Li et al., "TeraPipe", ICML 2021, in equal slices).

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(gpipe, Plan(Placement.loop(3), 4)))
    rank 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    rank 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3
    rank 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3
    """
    stages = plan.stages_on(rank)
    for stage in stages:
        for m, t in plan.forward_order(stage, rank):
            yield Forward(stage, m, t)
    for stage in reversed(stages):
        for m, t in plan.backward_order(stage, rank):
            yield Backward(stage, m, t)
