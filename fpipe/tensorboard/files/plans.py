"""A plan as JSON, as the headers of all ranks of a job have it, and no larger than is shown. No torch.

A file is not trusted: what a plan asks for is counted before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from fpipe.errors import ScheduleError
from fpipe.errors.arguments import is_whole
from fpipe.plan import Edges, Placement, Plan

MOST_RANKS = 4096  # of one replica
MOST_STAGES = 1 << 16
MOST_COPIES = 1 << 16  # of all stages together
MOST_EDGES = 1 << 18
MOST_TIED = 1 << 13  # stages, counted in each tie
MOST_MICROBATCHES = 1 << 20
MOST_REPLICAS = 1 << 16


class TooLarge(ScheduleError):
    """A plan asks for more than is shown."""


def as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values.

    Raises:
        TooLarge: it is larger than what is shown.
    """
    content = {
        "holders": plan.placement.holders,
        "microbatches": plan.microbatches,
        "reads": plan.edges.reads,
        "ties": plan.ties,
        "replicas": plan.replicas,
        "gathered": sorted(plan.gathered),
        "batch_gradients": sorted(plan.batch_gradients),
        "cotangents": plan.cotangents,
        "trained": None if plan.trained is None else sorted(plan.trained),
        "slices": plan.slices,
        "tokens": plan.tokens,
        "prefills": plan.prefills,
    }
    _check_size(content)
    return content


class Plans:
    """Makes plans of JSON values. That of the ranks of one job is made once, and is one object.

    Without this, ranks and stages that grow together take time in their product.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Plan] | None = None  # replaced as a whole: threads share it

    def plan(self, content: Mapping[str, Any]) -> Plan:
        """Return the plan of JSON values.

        Raises:
            TooLarge: it is larger than what is shown.
            ScheduleError: it is no plan.
            LookupError, TypeError, ValueError: the values are not those of `as_json`.
        """
        last = self._last
        if last is None or last[0] != content:
            last = self._last = content, _plan(content)
        return last[1]


def _plan(content: Mapping[str, Any]) -> Plan:
    _check_size(content)
    return Plan(
        Placement([tuple(ranks) for ranks in content["holders"]]),
        content["microbatches"],
        Edges(content["reads"]),
        tuple(map(tuple, content["ties"])),
        content["replicas"],
        frozenset(map(int, content["gathered"])),
        frozenset(map(int, content.get("batch_gradients", ()))),
        content.get("cotangents", "by_consumer"),
        None if content.get("trained") is None else frozenset(map(int, content["trained"])),
        content.get("slices", 1),
        content.get("tokens", 1),
        content.get("prefills", 1),
    )


def _check_size(content: Mapping[str, Any]) -> None:
    for what, count, most in _sizes(content):
        if count > most:
            raise TooLarge(f"its plan has {count} {what}, and at most {most} are shown")


def _sizes(content: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    holders = content["holders"]
    yield "stages", len(holders), MOST_STAGES
    yield "copies of stages", sum(map(len, holders)), MOST_COPIES
    yield "ranks", 1 + max((max(copies, default=0) for copies in holders), default=0), MOST_RANKS
    yield "edges", sum(map(len, content["reads"])), MOST_EDGES
    yield "tied stages", sum(map(len, content["ties"])), MOST_TIED
    yield "replicas", content["replicas"], MOST_REPLICAS
    counts = [content["microbatches"], content.get("slices", 1), content.get("tokens", 1)]
    if not all(is_whole(count, least=0) for count in counts):
        raise TypeError("a count is no whole number")
    yield "microbatches, slices and tokens of each stage", prod(counts), MOST_MICROBATCHES
