"""List the captures of a log directory, from TensorBoard's list of its runs. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fpipe.tensorboard.files.captures import parse_run, parse_tag
from fpipe.tensorboard.files.plans import MOST_RANKS


def listing(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the captures by run and step, as JSON. The page reads this: keep the keys.

    Args:
        runs: run -> tag -> TensorBoard's `TensorTimeSeries`.
    """
    entries = dict[tuple[str, int], dict[str, Any]]()
    others = 0
    for run, tags in runs.items():
        name = parse_run(run)
        steps = {tag: at[0] for tag in tags if (at := parse_tag(tag)) and not at[1]}
        if name is None or len(steps) == 0:
            others += name is None
            continue
        for tag, step in steps.items():
            place = {"run": name.run, "experiment": name.experiment, "kind": name.kind, "step": step, "ranks": []}
            entry = entries.setdefault((name.run, step), place | _outline(tags[tag].plugin_content))
            entry["ranks"].append(name.rank)
            entry["wall"] = max(entry.get("wall", 0.0), tags[tag].max_wall_time)
    captures = [entry | {"ranks": sorted(entry["ranks"])} for _, entry in sorted(entries.items())]
    notices = [f"runs with timelines, but no name as mine/measured/rank0, are left out: {others}"] if others else []
    return {"captures": captures, "notices": notices}


def _outline(content: bytes) -> dict[str, Any]:
    """Return the writer's summary of a capture, validated; empty values if it is malformed."""
    try:
        summary = json.loads(content)
        counts = {key: min(max(0, int(summary[name])), _MOST[key]) for key, name in _COUNTS.items()}
        return {"schedule": str(summary["schedule"]), "unit": str(summary["unit"]), **counts}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {"schedule": "", "unit": "", **dict.fromkeys(_COUNTS, 0)}


_COUNTS = {"expected": "ranks", "stages": "stages", "microbatches": "microbatches"}
_MOST = {"expected": MOST_RANKS, "stages": 10**9, "microbatches": 10**9}  # the page makes a place for each rank
