"""Interleaved 1F1B: several chunks on each rank, and a bubble smaller by their number."""

from collections.abc import Iterator

from fpipe.effects import Backward, Effect, Forward
from fpipe.errors import ScheduleError
from fpipe.program import Placement, Plan


def interleaved_1f1b(rank: int, plan: Plan) -> Iterator[Effect]:
    """1F1B over the chunks of `Placement.loop(ranks, chunks)` (Narayanan et al. 2021, section 2.2).

    Microbatches go through the chunks in groups of as many as there are ranks. A last group that is
    short keeps its place in the order, with the missing microbatches left out, so any number runs.

    Raises:
        ScheduleError: another placement than a loop.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(interleaved_1f1b, Plan(Placement.loop(2, chunks=2), 4)))
    rank 0  F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a .   B2b .   B3b B2a B3a
    rank 1  .   F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a
    """
    ranks, chunks = plan.ranks, len(plan.stages_on(rank))
    if plan.placement != Placement.loop(ranks, chunks):
        raise ScheduleError(f"interleaved_1f1b wants Placement.loop({ranks}, chunks), not {plan.placement}")
    groups = -(-plan.microbatches // ranks)
    total = groups * ranks * chunks
    warmup = min(total, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)

    def run(effect: type[Forward] | type[Backward], k: int) -> Iterator[Effect]:
        group, at = divmod(k, ranks * chunks)
        chunk, m = divmod(at, ranks)
        if effect is Backward:
            chunk = chunks - 1 - chunk
        if (m := m + group * ranks) < plan.microbatches:
            yield effect(chunk * ranks + rank, m)

    for k in range(warmup):
        yield from run(Forward, k)
    for k in range(total - warmup):
        yield from run(Forward, k + warmup)
        yield from run(Backward, k)
    for k in range(total - warmup, total):
        yield from run(Backward, k)
