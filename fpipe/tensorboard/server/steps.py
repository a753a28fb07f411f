"""The figures of captured steps, for a view over many of them. No torch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from fpipe.tensorboard.files.captures import Capture

MAX_STEPS = 20_000  # whose figures are kept: a few numbers each


def figures(capture: Capture) -> dict[str, Any]:
    """Return a step's makespan, the largest span of a rank, the bubble, and how many steps it is, with their period.

    Times are in the capture's unit. Where a rank's clock was not compared, the makespan is the largest span. The period
    of one step is its makespan.
    """
    timeline = capture.timeline
    compared = all(header.clock for header in capture.headers.values())
    makespan = timeline.makespan if compared else timeline.cost
    return {
        "makespan": makespan,
        "cost": timeline.cost,
        "bubble_rate": timeline.bubble_rate,
        "steps": timeline.steps,
        "period": timeline.period if timeline.steps > 1 else makespan,
    }


def outline(capture: Capture) -> dict[str, Any]:
    """Return the `figures` of a step, and rank -> the time that it computed."""
    return figures(capture) | {"busy": {str(rank): capture.timeline.busy[rank] for rank in capture.headers}}


class Outlines:
    """The outlines of the steps that were asked for last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, capture: Callable[[], Capture]) -> dict[str, Any]:
        """Return the outline of the capture with this key, which is read if it is not kept."""
        with self._lock:
            if key in self._kept:
                return self._kept[key]
        figures = outline(capture())
        with self._lock:
            self._kept[key] = figures
            while len(self._kept) > MAX_STEPS:
                self._kept.popitem(last=False)
        return figures
