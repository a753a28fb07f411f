"""The captures that a log directory has, from what TensorBoard lists of its runs. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fpipe.tensorboard.files.captures import parsed, placed


def listing(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """As JSON: captures, by run and step; the page reads this, and the keys stay.

    Args:
        runs: run -> tag -> TensorBoard's `TensorTimeSeries`.
    """
    found = dict[tuple[str, int], dict[str, Any]]()
    others = 0
    for name, tags in runs.items():
        place = placed(name)
        steps = {tag: at[0] for tag in tags if (at := parsed(tag)) and not at[1]}
        if place is None or len(steps) == 0:
            others += place is None
            continue
        for tag, step in steps.items():
            said = _outline(tags[tag].plugin_content)
            entry = found.setdefault(
                (place.run, step),
                {"run": place.run, "experiment": place.experiment, "kind": place.kind, "step": step, "ranks": []}
                | said,
            )
            entry["ranks"].append(place.rank)
            entry["wall"] = max(entry.get("wall", 0.0), tags[tag].max_wall_time)
    captures = [entry | {"ranks": sorted(entry["ranks"])} for _, entry in sorted(found.items())]
    notices = [f"{others} runs have timelines, but no name as mine/measured/rank0: they are left out"] if others else []
    return {"captures": captures, "notices": notices}


def _outline(content: bytes) -> dict[str, Any]:
    """What the writer said of a capture, with nothing taken on trust."""
    try:
        said = json.loads(content)
        counts = {key: min(max(0, int(said[name])), 10**9) for key, name in _COUNTS.items()}
        return {"schedule": str(said["schedule"]), "unit": str(said["unit"]), **counts}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {"schedule": "", "unit": "", **dict.fromkeys(_COUNTS, 0)}


_COUNTS = {"expected": "ranks", "stages": "stages", "microbatches": "microbatches"}
