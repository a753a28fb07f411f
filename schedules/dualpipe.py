"""DualPipe and DualPipeV: a pipeline folded in two, so that forwards one way overlap with backwards the other way.

- Both have one order. DualPipe folds one pipeline onto another that runs against it, with copies of every stage;
  DualPipeV folds one pipeline onto itself, without copies. Each rank has a chunk on the way in to the fold, 0, and
  one on the way out, 1.
- Each chunk runs its microbatches in ascending order, forwards and weight gradients alike.
"""

from collections import deque
from collections.abc import Iterator
from itertools import count

from fpipe.effects import Backward, BackwardInput, BackwardWeight, Compute, Effect, Forward, Overlap
from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan
from fpipe.schedules.requirements import a_v

KINDS: dict[str, type[Forward | Backward | BackwardInput]] = {"F": Forward, "B": Backward, "I": BackwardInput}


def dualpipe(rank: int, plan: Plan) -> Iterator[Effect]:
    """Run the microbatches in turn from either end of `Placement.both_ways(ranks)` (DeepSeek-V3 report, section 3.2.1).

    The number m of microbatches must be even. With PP stages and m < 2 PP - 2, the order is that of 2 PP - 2
    microbatches without the earliest of either direction.

    With F, B, W and full = B + W the times of one stage, and F&B that of an overlap:
    Idle: (PP / 2 - 1) (F&B + full - 3 W) on every rank, a late start included, where m >= 2 PP - 2, F = B >= W,
    F&B = F + full and transfers take no time; at most that where F <= B, W <= B and F&B >= full.
    Peak in flight: PP + 1 chunks on every rank where m >= 2 PP, and never more.

    Raises:
        ScheduleError: another placement than both ways.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(dualpipe, Plan(Placement.both_ways(4), 6)))
    rank 0  F0a     F2a     F4a     F1b     I1b     W1b     F3b     B3b     F5b&B0a B5b     I2a     W2a     I4a     W4a
    rank 1  .       F0a     F1b     F2a     F3b     F4a     B1b     F5b&B0a B3b     B2a     I5b     I4a     W5b     W4a
    rank 2  .       F1a     F0b     F3a     F2b     F5a     B0b     F4b&B1a B2b     B3a     I4b     I5a     W4b     W5a
    rank 3  F1a     F3a     F5a     F0b     I0b     W0b     F2b     B2b     F4b&B1a B4b     I3a     W3a     I5a     W5a
    """
    if plan.ranks % 2 or plan.placement != Placement.both_ways(plan.ranks):
        raise ScheduleError(
            f"dualpipe wants Placement.both_ways(ranks), ranks even, not {plan.placement}; "
            "dualpipe_v needs no copies of stages"
        )
    yield from _folded(rank, plan, min(rank, plan.ranks - 1 - rank), plan.ranks // 2)


def dualpipe_v(rank: int, plan: Plan) -> Iterator[Effect]:
    """DualPipe cut in half, without copies, on `Placement.v(ranks)` (DualPipeV of the DualPipe repository).

    The cut is that of Qi et al. 2025, "DualPipe could be better without the Dual". m may be any number of microbatches.
    With PP = 2 ranks stages, the figures are dualpipe's for 2 m: the idle time from m >= PP - 1 on, the peak of
    PP + 1 chunks from m >= PP on. The order is torch's, which needs m >= PP.

    Raises:
        ScheduleError: another placement than a V.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(dualpipe_v, Plan(Placement.v(2), 3)))
    rank 0  F0a     F1a     F2a     F0b     I0b     W0b     F1b     B1b     F2b&B0a B2b     I1a     W1a     I2a     W2a
    rank 1  .       F0a     F0b     F1a     F1b     F2a     B0b     F2b&B0a B1b     B1a     I2b     I2a     W2b     W2a
    """
    a_v("dualpipe_v", plan)
    yield from _folded(rank, plan, rank, plan.ranks)


def _folded(rank: int, plan: Plan, at: int, ranks: int) -> Iterator[Effect]:
    """Yield the effects of the rank that is `at` places from the open end of a fold over `ranks` ranks.

    With too few microbatches for the eight steps, take the order for more and leave out the first ones, because the
    weight gradients of the last ones are delayed.
    """
    stages = plan.stages_on(rank)
    own = {s: plan.microbatches_of(s, rank) for s in stages}
    microbatches = len(own[stages[0]])
    missing = max(0, 2 * ranks - 1 - microbatches)
    forwards, backwards = (
        [count(each.start - missing * each.step, each.step) for each in own.values()] for _ in range(2)
    )
    deferred: deque[BackwardWeight] = deque()

    def effect(kind: str, chunk: str = "") -> Compute:
        if kind == "W":
            return deferred.popleft()
        stage, to_do = stages[int(chunk)], forwards if kind == "F" else backwards
        m = next(to_do[int(chunk)])
        if kind == "I":
            deferred.append(BackwardWeight(stage, m))
        return KINDS[kind](stage, m)

    for step in _eight_steps(at, ranks, microbatches + missing):
        match [e for part in step.split("&") if (e := effect(*part)).microbatch >= own[e.stage].start]:
            case [Forward() as forward, Backward() as backward]:
                yield Overlap(forward, backward)
            case effects:
                yield from effects


def _eight_steps(at: int, ranks: int, microbatches: int) -> Iterator[str]:
    """Yield the order of both: F, B, I and W as in a drawing, then the chunk; W is the oldest put off, & an overlap."""
    behind = ranks - 1 - at  # ranks between this one and the fold
    main = microbatches - 2 * ranks + at + 1
    apart = int(behind == 0 and main > 0)
    steps = (
        ("F0", 2 * behind),  # 1: fill
        ("F0 F1", at + 1),  # 2: the first microbatches come back from the fold
        ("I1 W F1", behind),  # 3: gradients come back: input gradients first
        ("F0 B1 F1&B0", apart),  # 4: steady; at the fold, the first pair runs apart, for a smaller bubble
        ("F0&B1 F1&B0", main - apart),
        ("B1 F1&B0", behind),  # 5: nothing more comes in
        ("B1 B0", (at + 1) // 2),  # 6: from half-way on, weight gradients are put off
        ("B1 I0", 1 - at % 2),
        ("I1 I0", (at + 1) // 2),
        ("W I0", behind),  # 7: weight gradients while gradients come back
        ("W", at + 1),  # 8: and those left
    )
    for step, times in steps:
        yield from step.split() * times
