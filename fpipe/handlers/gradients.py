"""Sums of gradients, in the order that makes them independent of the schedule.

Weight gradients are added per stage and copy in microbatch order, then over copies in placement order, then
over ties by stage. The gradients of an activation are added from the highest consumer down.

Invariants of a `Sum`, which adds in place:
- a leaf's first gradient is taken as it is, and may alias anything: it is never written to;
- a leaf is owned when its total lies in dense memory that the sum made, or that was told to be fresh; only owned
  leaves are written to;
- what is read of it is final: every leaf is owned by then, and none is written to afterwards;
- once every leaf is owned, and all are of one dtype on one device, `steady` is that dtype: one kernel adds the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.autodiff.interface import Leaves
from fpipe.plan import Plan
from fpipe.stages.pipeline import Entry, Pipeline
from fpipe.stages.pytree import ABSENT, Path, flatten, indices, paths, paths_of, pick

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


class Sum:
    """The weight gradients of one stage, leaf by leaf in the order given; nothing counts as nothing, as in `add`."""

    def __init__(self) -> None:
        self.totals: Leaves = []
        self.owned: set[int] = set()
        self.steady: torch.dtype | None = None
        self.final = False

    def add(self, terms: Leaves, fresh: Collection[int] = ()) -> None:
        """Add a microbatch's gradients; `fresh` are those, by number, whose dense memory nothing else has."""
        assert not self.final, "what was read of a sum would change"
        if self.steady is not None and all(x is None or x.dtype is self.steady for x in terms):
            pairs = [pair for pair in zip(self.totals, terms, strict=True) if pair[1] is not None]
            if pairs:
                torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
            return
        self.totals = self.totals or [None] * len(terms)
        groups = defaultdict[Any, list[int]](list)
        for i, (total, term) in enumerate(zip(self.totals, terms, strict=True)):
            if term is None:
                continue
            if total is None:
                self.totals[i] = term
                if i in fresh:
                    self.owned.add(i)
            else:
                kind = total.dtype, total.device
                groups[i in self.owned and kind == (term.dtype, term.device), kind].append(i)
        for (writable, _), group in groups.items():
            self._add(group, terms, writable)
        if len(self.owned) == len(self.totals):
            kinds = {(x.dtype, x.device) for x in self.totals}
            self.steady = kinds.pop()[0] if len(kinds) == 1 else None

    def take(self, i: int, gradient: Tensor) -> bool:
        """Add one leaf's gradient now, where its total is owned; whether that was done."""
        if i not in self.owned or self.totals[i].dtype is not gradient.dtype:
            return False
        assert not self.final, "what was read of a sum would change"
        self.totals[i].add_(gradient)
        return True

    def _add(self, group: list[int], terms: Leaves, writable: bool) -> None:
        """Foreach kernels are fast for leaves of one dtype on one device."""
        totals, found = [self.totals[i] for i in group], [terms[i] for i in group]
        if writable:
            torch._foreach_add_(totals, found)
            return
        for i, total in zip(group, torch._foreach_add(totals, found), strict=True):
            self.totals[i] = total
        self.owned.update(group)

    def read(self) -> Leaves:
        """The totals, each in memory of its own."""
        self.final = True
        for i, total in enumerate(self.totals):
            if total is not None and i not in self.owned:
                self.totals[i] = _copied(total)
        self.owned.update(range(len(self.totals)))
        return self.totals


def copied(tree: Any) -> Any:
    """The same, every tensor in dense memory of its own; strides that are dense stay."""
    leaves, spec = flatten(tree)
    return spec.unflatten(map(_copied, leaves))


def _copied(x: Tensor) -> Tensor:
    expanded = x.layout == torch.strided and 0 in x.stride()
    return x.clone(memory_format=torch.contiguous_format) if expanded else x.clone()


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
    leaves, spec = flatten(tree)
    names = paths_of(spec)
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
    """The gradient of every entry in a rank's params: zeros where unused, None where it is not trained.

    No two share memory if no two of the sums do.
    """
    stages = {stage: _over_copies(plan, stage, sums) for stage, _ in sums}
    found = {}
    for stage, tree in params.items():
        leaves, spec = flatten(tree)
        keys = _keys(pipeline, params, held, stage, paths_of(spec))
        terms = [[stages[user][key] for user, key in uses if key in stages.get(user, {})] for uses in keys]
        found[stage] = spec.unflatten([_sum(leaf, own) for leaf, own in zip(leaves, terms, strict=True)])
    return found


def _sum(leaf: Any, terms: list[Tensor | None]) -> Tensor | None:
    gradient = None
    for term in terms:
        gradient = add(gradient, term)
    return torch.zeros_like(leaf) if terms and gradient is None else gradient


def _keys(
    pipeline: Pipeline, params: Mapping[int, Any], held: Collection[int], stage: int, names: Sequence[Path]
) -> list[list[tuple[int, Key]]]:
    """For each leaf of a stage's entry in params: what goes into its gradient, by stage."""
    keys: list[list[tuple[int, Key]]] = [[(stage, name)] for name in names]
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
