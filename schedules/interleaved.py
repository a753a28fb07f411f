"""Interleaved 1F1B: several chunks on each rank, and a bubble smaller by their number.

- Microbatches pass through the chunks in groups of at least as many as there are ranks: when the last microbatch of a
  group has left a chunk, the first has arrived for the next chunk.
- No group is larger than the first, which determines the warm-up: a chunk's backward never precedes its forward.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from fpipe.effects import Backward, Effect, Forward, Overlap
from fpipe.plan import Plan
from fpipe.schedules.requirements import a_loop


def interleaved_1f1b(rank: int, plan: Plan) -> Iterator[Effect]:
    """1F1B over the chunks of `Placement.loop(ranks, chunks)` (Narayanan et al. 2021, section 2.2).

    m may be any number of microbatches: they form m // p groups of nearly equal size, or one group if m < p. The order
    is torch's if the groups are equal, and Megatron-LM's if p divides m.

    With p ranks, v chunks, groups of up to g microbatches (p where p divides m), a transfer taking c, and F, B, W, and
    S = F + B + W, the times of all of a rank's chunks:
    Cost: m S + (p - 1) S / v where m >= p and c = 0; where p divides m and c <= min(F, B + W) / v, 2 (p v - 1) c more.
    Peak in flight: (v - 1) g + 2 (p - r - 1) + 1 chunks on rank r, and at most m v.

    Raises:
        ScheduleError: another placement than a loop.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(interleaved_1f1b, Plan(Placement.loop(2, chunks=2), 4)))
    rank 0  F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a .   B2b .   B3b B2a B3a
    rank 1  .   F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a
    """
    a_loop("interleaved_1f1b", plan)
    for pair in in_groups(rank, plan, ahead=2):
        yield from pair


def interleaved_1f1b_overlap(rank: int, plan: Plan) -> Iterator[Effect]:
    """Interleaved 1F1B whose forwards overlap with backwards, of another microbatch or chunk.

    One forward more of warm-up makes the two independent (Megatron-LM, `overlap_moe_expert_parallel_comm`, in
    forward_backward_pipelining_with_interleaving), so that the collectives of one travel while the other computes.

    With the figures of interleaved_1f1b, v chunks and groups of g microbatches, f = F / v and b = (B + W) / v the times
    of one chunk, and o that of an overlap:
    Cost: m v o + ((v - 1) g + 1) (f + b - o) + (p - 1) (f + b) where m >= p, c = 0 and max(f, b) <= o <= f + b.
    Peak in flight: (v - 1) g + 2 (p - r - 1) + 2 chunks on rank r, and at most m v.

    Raises:
        ScheduleError: another placement than a loop.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(interleaved_1f1b_overlap, Plan(Placement.loop(2, chunks=2), 4)))
    rank 0  F0a     F1a     F0b     F1b     F2a     F3a&B0b F2b&B1b F3b&B0a B1a     B2b     B3b     B2a     B3a
    rank 1  .       F0a     F1a     F0b     F1b&B0b F2a&B1b F3a&B0a F2b&B1a F3b&B2b B3b     B2a     B3a
    """
    a_loop("interleaved_1f1b_overlap", plan)
    for pair in in_groups(rank, plan, ahead=2, more=1):
        match pair:
            case [Forward() as forward, Backward() as backward]:
                yield Overlap(forward, backward)
            case _:
                yield from pair


def in_groups(rank: int, plan: Plan, ahead: int, more: int = 0) -> Iterator[Sequence[Forward | Backward]]:
    """Yield forwards to warm up, then pairs of a forward and a backward, group by group and chunk by chunk.

    The warm-up is all chunks but the last of the first group, `ahead` forwards for each rank behind this one, and
    `more` forwards.
    """
    stages, groups = plan.stages_on(rank), _groups(plan)
    forwards = [Forward(s, m) for group in groups for s in stages for m in group]
    backwards = [Backward(s, m) for group in groups for s in reversed(stages) for m in group]
    warmup = (len(stages) - 1) * len(groups[0]) + ahead * (plan.ranks - 1 - rank) + more
    yield forwards[:warmup]
    yield from zip(forwards[warmup:], backwards, strict=False)
    yield backwards[max(0, len(forwards) - warmup) :]


def _groups(plan: Plan) -> list[range]:
    """Split the microbatches into as many groups of at least `plan.ranks` as possible, the larger ones first."""
    count = max(1, plan.microbatches // plan.ranks)
    size, larger = divmod(plan.microbatches, count)
    return [range(*ends) for ends in pairwise(g * size + min(g, larger) for g in range(count + 1))]
