"""1F1B with the vocabulary split over all ranks: each computes a part of the embedding and of the output layer."""

from collections.abc import Iterator
from math import ceil

from fpipe.effects import Backward, BackwardInput, BackwardWeight, Effect, Forward
from fpipe.errors import ScheduleError
from fpipe.plan import Edges, Placement, Plan

FORWARD, BACKWARD = 1.0, 2.0  # of a block, the times for which passes are ordered
SCORES, WEIGHT = 1.0, 0.5  # of a part of the output layer: a head with a third of the model's work
PERIOD = FORWARD + SCORES + WEIGHT + BACKWARD
HOP = PERIOD / 2  # from a rank to the next, either way


def vocabulary_1f1b(rank: int, plan: Plan) -> Iterator[Effect]:
    """1F1B whose ranks also run a part of the vocabulary each, so that a large output layer delays no rank.

    Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", arXiv 2411.05288, section 5, with one
    barrier (algorithm 2): the forward of a part of the output layer (S) also computes what its input gradient needs
    but for a factor, so that only the weight gradient (T) remains, which is not urgent. The plan has
    `Placement.vocabulary(ranks)` and `Edges.vocabulary(ranks)`; `fpipe.parallel.Vocabulary` makes such stages.
    On each rank a forward, S, T and a backward take turns.

    Peak in flight on rank r: p + 1 - r microbatches of its block. With F, B, W the times of a rank's block and V that
    of the whole output layer, two thirds of it in S, the cost is m(F+B+W+V/p) + (p-1)(F+B+W) for
    F <= B+W <= F + V/p and c = 0: a backward then takes no longer than half a period. With the output layer on the last
    rank as well, 1F1B takes (m+p-1)(F+B+W) + mV.

    Below, `a` is the part of the embedding, `b` the block, `c` the part of the output layer, and `d` the loss. All
    passes take one unit there.

    Raises:
        ScheduleError: other stages.

    >>> from fpipe import Edges, Placement, Plan, draw
    >>> print(draw(vocabulary_1f1b, Plan(Placement.vocabulary(2), 2, Edges.vocabulary(2))))
    rank 0  F0a F1a F0b F1b F0c .   .   I0c W0c F1c .   .   .   .   I1c W1c B0b B1b B0a B1a
    rank 1  F0a F1a .   F0b F0c F0d B0d I0c F1b F1c W0c B0b F1d B1d I1c W1c B1b B0a B1a
    """
    ranks = plan.ranks
    if plan.placement != Placement.vocabulary(ranks) or plan.edges != Edges.vocabulary(ranks):
        raise ScheduleError(
            f"vocabulary_1f1b wants a part of the embedding, a block and a part of the output layer on each rank, not "
            f"{plan.placement}: take Placement.vocabulary({ranks}), and the edges of Edges.vocabulary({ranks}) or of "
            "a pipeline of parallel.Vocabulary"
        )
    starts = sorted(
        (start + m * PERIOD, place, m)
        for place, (start, _) in enumerate(_starts(rank, ranks))
        for m in range(plan.microbatches)
    )
    effects = [effect for _, effect in _starts(rank, ranks)]
    for _, place, m in starts:
        kind, stage = effects[place]
        yield kind(stage, m)


def _starts(rank: int, ranks: int) -> list[tuple[float, tuple[type, int]]]:
    """Return when each pass of microbatch 0 starts, in order of what starts at once; of the next one a period later.

    Every pass starts after what it reads ends, so that the order of starts has no deadlock. From rank to rank a
    microbatch takes half a period either way. So every second rank runs S at the same time, and the last one waits half
    a period for S of the others, however many there are.
    """
    last = ranks - 1
    forward = (rank - last) * HOP
    scores = [_turn((r - last) * HOP + FORWARD, FORWARD) for r in range(ranks)]
    loss = max(scores) + SCORES
    backward = _turn(FORWARD + SCORES + WEIGHT, loss + BACKWARD) + (last - rank) * HOP
    embedding, block, head, of_loss = rank, ranks + rank, 2 * ranks + rank, 3 * ranks
    passes = [
        (-last * HOP - PERIOD, (Forward, embedding)),
        (forward, (Forward, block)),
        (scores[rank], (Forward, head)),
        (loss, (Forward, of_loss)),
        (loss, (Backward, of_loss)),
        (loss, (BackwardInput, head)),
        (max(loss, _turn(forward + FORWARD + SCORES, loss)), (BackwardWeight, head)),
        (backward, (Backward, block)),
        (backward + (rank + 1) * HOP + PERIOD, (Backward, embedding)),
    ]
    return [each for each in passes if each[1][1] != of_loss or rank == last]


def _turn(start: float, least: float) -> float:
    """Return the first start that is no earlier than `least`, in whole periods from another start."""
    return start + ceil((least - start) / PERIOD) * PERIOD
