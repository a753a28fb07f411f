"""The states and last records of a flight's ranks, with the explanation, as JSON. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpipe.flight.explanation import Explanation
from fpipe.flight.reading import Entry, Rank


def as_json(ranks: Sequence[Rank], explanation: Explanation, last: int = 1) -> dict[str, Any]:
    """Return the explanation of a flight and its ranks; times are in seconds since 1970.

    Args:
        last: the number of records of each rank.
    """
    return {
        "cause": explanation.kind,
        "at": list(explanation.ranks),
        "text": explanation.text,
        "chains": {str(process): list(chain) for process, chain in explanation.chains.items()},
        "ranks": [
            {
                **{key: getattr(rank, key) for key in ("process", "name", "host", "pid", "state", "outcome", "reason")},
                "seen": rank.seen / 1e9,
                "records": [_record(entry) for entry in rank.entries[-max(1, last) :]],
            }
            for rank in ranks
        ],
    }


def _record(entry: Entry) -> dict[str, Any]:
    end = None if entry.end is None else entry.end / 1e9
    known = {key: getattr(entry, key) for key in ("step", "peer", "kind", "text")}
    return {"begin": entry.begin / 1e9, "end": end, **known}
