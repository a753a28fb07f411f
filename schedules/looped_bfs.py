"""Looped BFS: GPipe, chunk by chunk, over chunks placed on the ranks in a loop."""

from collections.abc import Iterator

from fpipe.effects import Effect
from fpipe.plan import Plan
from fpipe.schedules.gpipe import gpipe
from fpipe.schedules.requirements import a_loop


def looped_bfs(rank: int, plan: Plan) -> Iterator[Effect]:
    """All microbatches through one chunk, then the next (Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism").

    The order is GPipe's; the loop divides the bubble by the number of chunks v. Backwards run in ascending order, so
    that sums keep their order; torch.distributed.pipelining runs them from the last microbatch to the first.

    Cost: m S + (p - 1) S / v where m >= p and transfers take no time, with S = F + B + W for all of a rank's chunks.
    Peak in flight: all m microbatches.

    Raises:
        ScheduleError: another placement than a loop.

    >>> from fpipe import Placement, Plan, draw
    >>> print(draw(looped_bfs, Plan(Placement.loop(2, chunks=2), 3)))
    rank 0  F0a F1a F2a F0b F1b F2b .   .   B0b B1b B2b B0a B1a B2a
    rank 1  .   F0a F1a F2a F0b F1b F2b B0b B1b B2b B0a B1a B2a
    """
    a_loop("looped_bfs", plan)
    yield from gpipe(rank, plan)
