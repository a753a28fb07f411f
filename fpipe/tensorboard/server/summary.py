"""What is said of a capture beside its spans: figures, idle time by cause, critical path. No torch."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from fpipe.tensorboard.files.captures import Capture
from fpipe.timelines.timeline import Timeline

MOST_GAPS = 50_000  # of all ranks, that are listed one by one


def summary(capture: Capture) -> dict[str, Any]:
    """As JSON: times in the capture's unit, memory in bytes, spans as (rank, place in its program).

    Of a rank whose clock was not compared, only what it did within its own span is told; None is what it has with
    others. The page and others read this: the keys stay.
    """
    timeline = capture.timeline
    compared = all(header.clock for header in capture.headers.values())
    return {
        "unit": capture.unit,
        "turns": any(header.turns for header in capture.headers.values()),
        "makespan": timeline.makespan if compared else timeline.cost,
        "cost": timeline.cost,
        "bubble_rate": timeline.bubble_rate,
        "critical": [_place(timeline, at) for at in timeline.critical_spans],
        "ranks": [_rank(capture, rank) for rank in capture.headers],
        "gaps": _gaps(capture),
        "notices": list(capture.notices),
    }


def _place(timeline: Timeline, at: int) -> tuple[int, int]:
    rank = bisect_right(timeline.spans.first, at) - 1
    return rank, at - timeline.spans.first[rank]


def _rank(capture: Capture, rank: int) -> dict[str, Any]:
    timeline, header = capture.timeline, capture.headers[rank]
    busy, idle = timeline.busy[rank], timeline.idle[rank]
    return {
        "rank": rank,
        "busy": busy,
        "idle": idle,
        "span": busy + idle,
        "share_idle": (1 - busy / timeline.makespan if timeline.makespan else 0.0) if header.clock else None,
        "causes": timeline.causes[rank] if header.clock else None,
        "kinds": {kind.__name__: taken for kind, taken in timeline.kinds[rank].items()},
        "peak_in_flight": timeline.peak_in_flight[rank],
        "peak_memory": capture.peak_memory(rank),
        "clock": header.clock._asdict() if header.clock else None,
        "peak": header.peak,
        "device": header.device,
    }


def _gaps(capture: Capture) -> list[dict[str, list[Any]]] | None:
    """When each rank that is there computes nothing, and why, as columns; None where they are too many to list."""
    found, room = list[dict[str, list[Any]]](), MOST_GAPS
    for rank in capture.headers:
        gaps = list(capture.timeline.gaps(rank)) if capture.headers[rank].clock else []
        room -= len(gaps)
        if room < 0:
            return None
        found.append({"start": [g.start for g in gaps], "end": [g.end for g in gaps], "cause": [g.cause for g in gaps]})
    return found
