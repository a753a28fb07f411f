"""Processor time in seconds of one machine, so that limits of time hold on any, whatever else it runs."""

import time
from collections.abc import Callable
from heapq import heappop, heappush

ROUNDS = 1_500_000  # of the loop below, which take a second on the machine of which the seconds are


def seconds_of(work: Callable[[], object]) -> float:
    """Return the processor time of some work, by that of a loop that runs before it and after it."""
    before, took, after = _time(_loop), _time(work), _time(_loop)
    return took * 2 / (before + after)


def _time(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _loop() -> None:
    agenda, last = list[tuple[int, int]](), dict[int, int]()
    for n in range(ROUNDS):
        heappush(agenda, (n * 7919 % 10_007, n))
        last[n % 1000] = n
        if n >= 1000:
            heappop(agenda)
