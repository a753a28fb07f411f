"""Sums of gradients, in the order that makes them independent of the schedule.

Weight gradients are added per stage and copy in microbatch order, then over copies in placement order, then
over ties by stage. The gradients of an activation are added from the highest consumer down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fpipe.autodiff import Leaves
from fpipe.program import Plan
from fpipe.stage import Entry, Pipeline
from fpipe.tree import ABSENT, Path, flatten, indices, paths, pick

Key = Path | tuple[Entry, Path, int]
"""A leaf of a stage's params by its path; of a stage held elsewhere, the k-th leaf of a use of an entry it shares."""
Sums = Mapping[tuple[int, int], Mapping[Key, Tensor | None]]
"""(stage, rank) -> sum of each trained leaf, None where no microbatch gave a gradient."""


def add(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """The sum where nothing counts as nothing, not as zero: signs of zeros and NaNs stay eager's."""
    if total is None or term is None:
        return term if total is None else total
    return total + term


def add_leaves(terms: Iterable[Leaves]) -> Leaves:
    """Leaf by leaf, in the order given."""
    first, *rest = terms
    total = list(first)
    for term in rest:
        total = [add(a, b) for a, b in zip(total, term, strict=True)]
    return total


def shared_uses(pipeline: Pipeline, plan: Plan, stage: int, rank: int) -> list[tuple[Entry, Path]]:
    """A stage's uses of the entries that it shares with the stages on a rank."""
    held = plan.stages_on(rank)
    return [
        (entry, path)
        for entry, uses in pipeline.entries.items()
        if any(user in held for user, _ in uses)
        for user, path in uses
        if user == stage
    ]


def sent(
    pipeline: Pipeline, plan: Plan, params: Mapping[int, Any], stage: int, rank: int, own: Mapping[Key, Tensor | None]
) -> Leaves:
    """What a rank reads of this rank's sums: all where it holds a copy of the stage, else what it shares.

    Where nothing gave a gradient stands -0.0, to which adding changes no bit; ABSENT where a leaf is not trained.
    """
    tree = pipeline.params_of(params, stage)
    names, leaves = paths(tree), flatten(tree).leaves
    wanted = list(range(len(names)))
    if rank not in plan.placement.holders[stage]:
        wanted = [i for _, path in shared_uses(pipeline, plan, stage, rank) for i in indices(tree, path)]
    found = [own.get(names[i], ABSENT) for i in wanted]
    return [torch.full_like(leaves[i], -0.0) if x is None else x for i, x in zip(wanted, found, strict=True)]


def received(
    pipeline: Pipeline, plan: Plan, params: Mapping[int, Any], stage: int, rank: int, leaves: Leaves
) -> dict[Key, Tensor | None]:
    """What `sent` gave, by this rank's keys."""
    keys: list[Key]
    if rank in plan.placement.holders[stage]:
        keys = list(paths(pipeline.params_of(params, stage)))
    else:
        keys = [
            (entry, path, k)
            for entry, path in shared_uses(pipeline, plan, stage, rank)
            for k in range(len(flatten(pick(params[entry[0]], entry[1])).leaves))
        ]
    return {key: leaf for key, leaf in zip(keys, leaves, strict=True) if leaf is not ABSENT}


def total(
    pipeline: Pipeline, plan: Plan, params: Mapping[int, Any], held: Collection[int], sums: Sums
) -> dict[int, Any]:
    """The gradient of every entry in a rank's params: zeros where unused, None where it is not trained."""
    stages = {stage: _over_copies(plan, stage, sums) for stage, _ in sums}
    found = {}
    for stage, tree in params.items():
        leaves, spec = flatten(tree)
        keys = _keys(pipeline, params, held, stage)
        terms = [[stages[user][key] for user, key in uses if key in stages.get(user, {})] for uses in keys]
        found[stage] = spec.unflatten([_sum(leaf, own) for leaf, own in zip(leaves, terms, strict=True)])
    return found


def _sum(leaf: Any, terms: list[Tensor | None]) -> Tensor | None:
    gradient = None
    for term in terms:
        gradient = add(gradient, term)
    return torch.zeros_like(leaf) if terms and gradient is None else gradient


def _keys(
    pipeline: Pipeline, params: Mapping[int, Any], held: Collection[int], stage: int
) -> list[list[tuple[int, Key]]]:
    """For each leaf of a stage's entry in params: what goes into its gradient, by stage."""
    keys: list[list[tuple[int, Key]]] = [[(stage, name)] for name in paths(params[stage])]
    for (owner, source), uses in pipeline.entries.items():
        if owner != stage:
            continue
        try:
            tied = indices(params[stage], source)
        except (KeyError, IndexError, AttributeError):
            continue  # of another stage that shares it, while this rank's params have only what it uses
        for k, i in enumerate(tied):
            keys[i] = [(user, _key(pipeline, params, held, (owner, source), user, path, k)) for user, path in uses]
    return keys


def _key(
    pipeline: Pipeline, params: Mapping[int, Any], held: Collection[int], entry: Entry, user: int, path: Path, k: int
) -> Key:
    if user not in held:
        return entry, path, k
    tree = pipeline.params_of(params, user)
    return paths(tree)[indices(tree, path)[k]]


def _over_copies(plan: Plan, stage: int, sums: Sums) -> dict[Key, Tensor | None]:
    whole: dict[Key, Tensor | None] = {}
    for rank in plan.placement.holders[stage]:
        for key, term in sums.get((stage, rank), {}).items():
            whole[key] = add(whole.get(key), term)
    return whole
