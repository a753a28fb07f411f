"""A capture with one part ideal, as the page reads it. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from werkzeug.exceptions import NotFound

from fpipe._format import scale_of
from fpipe.tensorboard.files.captures import Capture, columns_of
from fpipe.tensorboard.files.columns import IMAGINED, encode
from fpipe.timelines.what_if import WhatIf


def answer(result: WhatIf, capture: Capture) -> dict[str, Any]:
    """Return what would help as JSON, with the line that names the slowest rank or edge.

    Where ranks are missing, the capture's own notices say so.
    """
    headline = result.headline(scale_of(result.timeline.makespan, capture.unit))
    answered = {"unit": capture.unit, "headline": headline, **result.as_json()}
    return answered if len(capture.headers) == capture.timeline.plan.ranks else answered | {"notices": []}


def unknown(capture: Capture) -> dict[str, Any]:
    """Return the answer for a capture of which nothing can be said, with the reason, and without a confidence."""
    reason = f"what would help is not known: {capture.unrelated}"
    times = {"makespan": capture.timeline.cost, "replayed": None, "error": None}
    return {"unit": capture.unit, "headline": "", "what_if": [], **times, "notices": [reason]}


def imagined(capture: Capture, result: WhatIf, what: str) -> Capture:
    """Return the capture that a row of what would help names."""
    timeline = result.timeline_of(what)
    more: dict[str, Any] = {"kind": IMAGINED, "plan": timeline.plan, "host": (), "peak": None}
    headers = {rank: replace(each, makespans=(), busy=(), **more) for rank, each in capture.headers.items()}
    return Capture(headers, {rank: columns_of(timeline, rank) for rank in headers}, timeline)


def imagined_rank(capture: Capture, rank: int) -> bytes:
    """Return one rank's bytes.

    Raises:
        NotFound: the capture has no such rank.
    """
    if rank not in capture.headers:
        raise NotFound(f"rank {rank} is not in this capture")
    return encode(capture.headers[rank], capture.columns[rank])
