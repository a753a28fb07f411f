"""Summarize a capture: figures, idle time by cause, critical path. No torch."""

from __future__ import annotations

from typing import Any

from fpipe.tensorboard.files.captures import Capture
from fpipe.tensorboard.server.steps import figures
from fpipe.timelines.spans import CAUSES

MAX_GAPS = 100_000  # of all ranks together; more are not listed


def summary(capture: Capture) -> dict[str, Any]:
    """Return the summary as JSON: times in the capture's unit, memory in bytes, spans as (rank, row of that rank).

    If a rank's clock was not compared, the figures that depend on other ranks are None. The page and other programs
    read this: keep the keys.
    """
    timeline = capture.timeline
    return {
        "unit": capture.unit,
        "turns": any(header.turns for header in capture.headers.values()),
        **figures(capture),
        "replica": capture.header.replica,
        "makespans": list(capture.header.makespans),
        "busy": [list(ranks) for ranks in capture.header.busy],
        "causes": {name: CAUSES[name] for name in timeline.cause_names},
        "critical": [capture.place(at) for at in timeline.critical_spans],
        "ranks": [_rank(capture, rank) for rank in capture.headers],
        "gaps": _gaps(capture),
        "notices": list(capture.notices),
    }


def _rank(capture: Capture, rank: int) -> dict[str, Any]:
    timeline, header = capture.timeline, capture.headers[rank]
    busy = timeline.busy[rank]
    return {
        "rank": rank,
        "busy": busy,
        "idle": timeline.idle[rank] if header.clock else None,
        "bubble": 1 - busy / timeline.cost,
        "causes": timeline.causes[rank] if header.clock else None,
        "kinds": {kind.__name__: time for kind, time in timeline.kinds[rank].items()},
        "peak_in_flight": timeline.peak_in_flight[rank],
        "peak_memory": capture.peak_memory(rank),
        "clock": header.clock._asdict() if header.clock else None,
        "peak": header.peak,
        "device": header.device,
    }


def _gaps(capture: Capture) -> list[dict[str, list[Any]]] | None:
    """Return the idle intervals of each present rank and their causes, as columns; None if more than `MAX_GAPS`."""
    ranks, room = list[dict[str, list[Any]]](), MAX_GAPS
    for rank in capture.headers:
        gaps = list(capture.timeline.gaps(rank)) if capture.headers[rank].clock else []
        room -= len(gaps)
        if room < 0:
            return None
        ranks.append({"start": [g.start for g in gaps], "end": [g.end for g in gaps], "cause": [g.cause for g in gaps]})
    return ranks
