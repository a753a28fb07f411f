"""Add gradients in an order that makes the sums independent of the schedule.

The weight gradients of each stage and copy are added in microbatch order, then over copies in placement order, then
over ties by stage. The gradients of an activation, and of a leaf of the batch, are added from the highest consumer
down.

Invariants of a `Sum`, which adds in place:
- the first gradient of a leaf is stored as it is and may alias anything, so it is never written to;
- a leaf is owned when its total is in dense memory that the sum allocated, or that the caller declared fresh; only
  owned leaves are written to;
- totals are final once read: every leaf is then owned, and none is written to afterwards;
- when every leaf is owned, and all have one dtype and device, `steady` is that dtype: one kernel adds all leaves;
- a total is in the dtype of sums, from the first term on: bfloat16 and float16 are added to float32 as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe.autodiff.graph.block import NO_PARTS, Parts
from fpipe.autodiff.graph.collectives import added_over
from fpipe.autodiff.interface import READS, Argument, Leaves, Prepared
from fpipe.errors import StageError
from fpipe.plan import Plan
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pipeline import Pipeline, SharedParam
from fpipe.stages.precision import OWN_DTYPES, Precision
from fpipe.stages.pytree import ABSENT, Path, flatten, get_at, indices, paths, paths_of, short
from fpipe.stages.stage import Batch, Output, Stage

LeafKey = Path | tuple[SharedParam, Path, int]
"""The path of a leaf in a stage's params; for a stage on another rank, (shared entry, path of its use, leaf number)."""
Sums = Mapping[tuple[int, int], Mapping[LeafKey, Tensor | None]]
"""(stage, rank) -> the sum of each trained leaf; None where no microbatch has a gradient."""


def add(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """Add two optional gradients. None is absent, not zero, so signed zeros and NaNs match eager autograd."""
    if total is None or term is None:
        return term if total is None else total
    return total + term


def add_leaves(terms: Iterable[Leaves]) -> Leaves:
    """Add lists of leaves, leaf by leaf, in the order of the lists."""
    first, *rest = terms
    total = list(first)
    for term in rest:
        total = [add(a, b) for a, b in zip(total, term, strict=True)]
    return total


class Sum:
    """The weight gradients of one stage, added leaf by leaf in the order of the calls; None is absent, as in `add`."""

    def __init__(self, precision: Precision = OWN_DTYPES) -> None:
        self.precision = precision
        self.totals: Leaves = []
        self.owned: set[int] = set()
        self.steady: torch.dtype | None = None
        self.final = False
        self.parts, self.dropped = NO_PARTS, frozenset[int]()

    def expect(self, parts: Parts) -> None:
        """Take the next microbatch's gradients as parts of sums over the processes that compute the stage, or whole.

        Where graphs of several lengths differ in that, the first process has all of a whole gradient as its part.
        """
        if parts.leaves == self.parts.leaves and not self.dropped:
            return
        mesh = parts.mesh or self.parts.mesh
        is_first = mesh is None or mesh.get_local_rank() == 0
        for i in () if is_first or not self.totals else parts.leaves - self.parts.leaves:
            if self.totals[i] is not None:
                self.totals[i] = torch.zeros_like(self.totals[i])
                self.owned.add(i)
        self.parts = Parts(self.parts.leaves | parts.leaves, mesh)
        self.dropped = frozenset() if is_first else self.parts.leaves - parts.leaves

    def add(self, terms: Leaves, fresh: Collection[int] = ()) -> None:
        """Add a microbatch's gradients; `fresh` are the leaf numbers whose dense memory nothing else uses."""
        assert not self.final, "a sum can't change after it was read"
        if self.dropped:
            terms = [x if x is None or i not in self.dropped else torch.zeros_like(x) for i, x in enumerate(terms)]
        present = [i for i, term in enumerate(terms) if term is not None]
        if self.take_all(terms):
            return
        self.totals = self.totals or [None] * len(terms)
        in_place = defaultdict[tuple[Any, ...], list[int]](list)  # one kernel adds all of one dtype and device
        for i in present:
            total, term = self.totals[i], terms[i]
            if total is None:
                self.totals[i] = self.precision.term(term)
                if i in fresh or self.totals[i] is not term:
                    self.owned.add(i)
            elif i in self.owned and self._adds_in_place(total, term):
                in_place[total.dtype, term.dtype, total.device].append(i)
            else:
                self.totals[i] = total + self.precision.term(term)
                self.owned.add(i)
        for leaves in in_place.values():
            self._add_in_place(leaves, terms)
        kinds = {(x.dtype, x.device) for x in self.totals} if len(self.owned) == len(self.totals) else ()
        self.steady = next(iter(kinds))[0] if len(kinds) == 1 else None

    def take(self, i: int, gradient: Tensor) -> bool:
        """Add the gradient of one leaf now if its total is owned; return whether it was added."""
        if i not in self.owned or not self.precision.adds_in_place(self.totals[i].dtype, gradient.dtype):
            return False
        assert not self.final, "a sum can't change after it was read"
        if i not in self.dropped:
            self.totals[i].add_(gradient)
        return True

    def take_all(self, gradients: Leaves) -> bool:
        """Add a microbatch's gradients now if all totals are owned; return whether they were added."""
        if self.steady is None:
            return False
        by_dtype = defaultdict[torch.dtype, list[int]](list)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                by_dtype[gradient.dtype].append(i)
        if not all(self.precision.adds_in_place(self.steady, dtype) for dtype in by_dtype):
            return False
        assert not self.final, "a sum can't change after it was read"
        for leaves in by_dtype.values():
            self._add_in_place(leaves, gradients)
        return True

    def _adds_in_place(self, total: Tensor, term: Tensor) -> bool:
        return total.device == term.device and self.precision.adds_in_place(total.dtype, term.dtype)

    def _add_in_place(self, leaves: list[int], terms: Leaves) -> None:
        if leaves:
            torch._foreach_add_([self.totals[i] for i in leaves], [terms[i] for i in leaves])

    def read(self) -> Leaves:
        """Return the totals; no two share memory. Parts are added over the processes that compute the stage."""
        add_parts([self])
        self.final = True
        for i, total in enumerate(self.totals):
            if total is not None and i not in self.owned:
                self.totals[i] = _copied(total)
        self.owned.update(range(len(self.totals)))
        return self.totals


class Rows(Sum):
    """The gradients of one stage for each row of the batch: those of microbatches stand one behind the other."""

    def add(self, terms: Leaves, fresh: Collection[int] = ()) -> None:
        assert not self.final, "rows can't come after they were read"
        self.totals = self.totals or [[] for _ in terms]
        for parts, term in zip(self.totals, terms, strict=True):
            parts.append(self.precision.term(term))

    def take(self, i: int, gradient: Tensor) -> bool:
        return False

    def take_all(self, gradients: Leaves) -> bool:
        return False

    def read(self) -> Leaves:
        if not self.final:
            for i, parts in enumerate(self.totals):  # leaf by leaf, so that one at a time is in memory twice
                self.totals[i] = torch.cat(parts)
                parts.clear()
        self.final = True
        return self.totals


def add_parts(sums: Iterable[Sum]) -> None:
    """Add the parts of totals over the processes that compute stages together, all of one dtype in one reduction."""
    same = defaultdict[Any, list[tuple[Sum, int]]](list)
    for each in sums:
        for i in sorted(each.parts.leaves):
            if (total := each.totals[i]) is not None:
                assert each.parts.mesh is not None
                same[each.parts.mesh, total.dtype, total.device].append((each, i))
        each.parts, each.dropped = NO_PARTS, frozenset()
    for (mesh, *_), places in same.items():
        totals = [each.totals[i] for each, i in places]
        flat = torch.cat([total.reshape(-1) for total in totals])
        flat = added_over(flat, mesh.get_group(), f"the gradients that {mesh} has parts of")
        parts = flat.split_with_sizes([total.numel() for total in totals])
        for (each, i), total, part in zip(places, totals, parts, strict=True):
            each.totals[i] = torch.empty_like(total).copy_(part.view(total.shape))
            each.owned.add(i)


def behind(total: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Put rows behind those before."""
    return torch.cat([total, rows]) if total is not None and rows is not None else add(total, rows)


def check_trained(pipeline: Pipeline, plan: Plan, stage: int, prepared: Prepared) -> None:
    """Check that every trained param of a stage, and every entry that it shares, has a sum in the plan.

    Raises:
        StageError: the plan does not train the stage, or the owner of a tied entry; the gradients would be missing.
    """
    if plan.trained is None or not prepared.trained:
        return
    leaf = prepared.trained[0] if not plan.is_trained(stage) else None
    numbers = prepared.spec.unflatten(range(len(prepared.leaves)))
    for (owner, _), uses in pipeline.entries.items():
        for user, path in uses if not plan.is_trained(owner) else ():
            if user == stage and (tied := {*indices(numbers, path)} & {*prepared.trained}):
                leaf = min(tied)
    if leaf is not None:
        raise StageError(
            f"its params{short(paths_of(prepared.spec)[leaf])} is trained, and the plan trains only stages "
            f"{sorted(plan.trained)}: freeze it with pipeline.freeze(params, where), or make the plan with "
            "pipeline.plan(placement, microbatches, trained=...), where an entry that stages share counts for all of "
            "them",
            stage=stage,
        )


def copied(tree: Any) -> Any:
    """Copy every tensor of a tree into dense memory of its own; keep strides that are dense."""
    leaves, spec = flatten(tree)
    return spec.unflatten(map(_copied, leaves))


def _copied(x: Tensor) -> Tensor:
    expanded = x.layout == torch.strided and 0 in x.stride()
    return x.clone(memory_format=torch.contiguous_format) if expanded else x.clone()


def shared_uses(pipeline: Pipeline, plan: Plan, stage: int, rank: int) -> list[tuple[SharedParam, Path]]:
    """Return a stage's uses of the entries that it shares with the stages on a rank."""
    local = plan.stages_on(rank)
    return [
        (entry, path)
        for entry, uses in pipeline.entries.items()
        if any(user in local for user, _ in uses)
        for user, path in uses
        if user == stage
    ]


def sent(
    pipeline: Pipeline,
    plan: Plan,
    params: Mapping[int, Any],
    stage: int,
    rank: int,
    totals: Mapping[LeafKey, Tensor | None],
    precision: Precision = OWN_DTYPES,
) -> Leaves:
    """Return the sums that `rank` needs of a stage here: all if it holds a copy of the stage, else the shared entries.

    A leaf without a gradient is filled with -0.0, which changes no bit of a sum. A leaf that is not trained is ABSENT.
    """
    tree = pipeline.params_of(params, stage)
    leaves, spec = flatten(tree)
    names = paths_of(spec)
    wanted = list(range(len(names)))
    if rank not in plan.placement.holders[stage]:
        wanted = [i for _, path in shared_uses(pipeline, plan, stage, rank) for i in indices(tree, path)]
    sums = [totals.get(names[i], ABSENT) for i in wanted]
    return [_nothing(leaves[i], precision) if x is None else x for i, x in zip(wanted, sums, strict=True)]


def _nothing(leaf: Any, precision: Precision) -> Tensor:
    dtype = leaf.dtype if precision.compute is None or not leaf.is_floating_point() else precision.compute
    return torch.full_like(leaf, -0.0, dtype=precision.sum_dtype(dtype))


def received(
    pipeline: Pipeline, plan: Plan, params: Mapping[int, Any], stage: int, rank: int, leaves: Leaves
) -> dict[LeafKey, Tensor | None]:
    """Key the leaves that `sent` returned on another rank as this rank keys them."""
    keys: list[LeafKey]
    if rank in plan.placement.holders[stage]:
        keys = list(paths(pipeline.params_of(params, stage)))
    else:
        keys = [
            (entry, path, k)
            for entry, path in shared_uses(pipeline, plan, stage, rank)
            for k in range(len(flatten(get_at(params[entry[0]], entry[1])).leaves))
        ]
    return {key: leaf for key, leaf in zip(keys, leaves, strict=True) if leaf is not ABSENT}


def total(
    pipeline: Pipeline,
    plan: Plan,
    params: Mapping[int, Any],
    local: Collection[int],
    sums: Sums,
    entries: Collection[int],
    spare: Collection[tuple[int, int]] = (),
) -> dict[int, Any]:
    """Return the gradients of some entries in a rank's params: -0.0 where unused, None where it is not trained.

    -0.0 is the sum of no terms, and travels as such between copies and replicas. No two gradients share memory if no
    two of the sums do.

    Args:
        spare: the (stage, rank) of sums that nothing else reads, so that totals may be written to their memory: fresh
            memory for large ones takes longer than the addition.
    """
    join = _behind if pipeline.by_row else _added

    def over_copies(stage: int, key: LeafKey) -> Iterator[_Term]:
        terms = (((stage, rank), sums.get((stage, rank), {})) for rank in plan.placement.holders[stage])
        present = [_Term(leaves[key], name in spare) for name, leaves in terms if key in leaves]
        if present:
            yield reduce(join, present)

    gradients = {}
    for stage in entries:
        leaves, spec = flatten(params[stage])
        keys = _keys(pipeline, params, local, stage, paths_of(spec))
        terms = [[term for use in uses for term in over_copies(*use)] for uses in keys]
        gradients[stage] = spec.unflatten(map(_sum, leaves, terms))
    return gradients


def unscaled(gradients: Any, loss_scale: Tensor | None) -> Any:
    """Return a tree of sums of gradients divided by the loss scale, in their dtype; None stays."""
    if loss_scale is None:
        return gradients
    leaves, spec = flatten(gradients)
    inverse = loss_scale.double().reciprocal().float()  # as torch.amp.GradScaler does
    on_device = defaultdict[torch.device, list[int]](list)
    for i, leaf in enumerate(leaves):
        on_device[leaf.device].append(i)
    for device, numbers in on_device.items():
        products = torch._foreach_mul([leaves[i] for i in numbers], inverse.to(device))
        for i, product in zip(numbers, products, strict=True):
            leaves[i] = product
    return spec.unflatten(leaves)


class _Term(NamedTuple):
    """A gradient, and whether its memory may be written to."""

    gradient: Tensor | None
    is_spare: bool


def _added(total: _Term, term: _Term) -> _Term:
    """Add two gradients as `add` does, into the memory of one where it may be."""
    a, b = total.gradient, term.gradient
    if a is None or b is None:
        return term if a is None else total
    spare = next((x.gradient for x in (total, term) if x.is_spare), None) if _in_same_layout(a, b) else None
    return _Term(torch.add(a, b, out=spare), True)


def _in_same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors look the same, and each has all of a dense memory."""
    both = a, b
    if any(x.layout != torch.strided or x.requires_grad for x in both):
        return False
    looks = {(x.dtype, x.device, x.shape, x.stride()) for x in both}
    return len(looks) == 1 and all(x.untyped_storage().nbytes() == x.nbytes for x in both)


def _behind(total: _Term, term: _Term) -> _Term:
    return _Term(behind(total.gradient, term.gradient), False)


def _sum(leaf: Any, terms: list[_Term]) -> Tensor | None:
    gradient = reduce(_added, terms).gradient if terms else None
    return torch.full_like(leaf, -0.0) if terms and gradient is None else gradient


def _keys(
    pipeline: Pipeline, params: Mapping[int, Any], local: Collection[int], stage: int, names: Sequence[Path]
) -> list[list[tuple[int, LeafKey]]]:
    """Return, for each leaf of a stage's entry in params, the (stage, key) of every sum that its gradient adds."""
    keys: list[list[tuple[int, LeafKey]]] = [[(stage, name)] for name in names]
    for entry, uses in pipeline.entries.items():
        owner, source = entry
        if owner != stage:
            continue
        try:
            tied = indices(params[stage], source)
        except (KeyError, IndexError, AttributeError):
            continue  # this rank's params have only those entries of the owner that its stages use
        for i in tied:
            keys[i] = []
        for user, path in uses:
            of_use: list[LeafKey] = [(entry, path, k) for k in range(len(tied))]
            if user in local:
                tree = pipeline.params_of(params, user)
                of_use = [paths(tree)[i] for i in indices(tree, path)]
            for i, key in zip(tied, of_use, strict=True):
                keys[i].append((user, key))
    return keys


# Gradients of the batch and the target


def data_gradients(stage: Stage, data: Microbatch, leaves: Leaves) -> dict[str, Tensor]:
    """Return the gradients of what a stage read of a microbatch, by the path of the leaf in `(batch, target)`.

    Those of a leaf that the stage reads more than once are added, the last read first.

    Args:
        leaves: a gradient, or None, for each leaf that the stage read, in the order of its arguments.
    """
    gradients: dict[str, Tensor] = {}
    for name, gradient in reversed(list(zip(names_read(stage, data), leaves, strict=True))):
        if gradient is not None:
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return gradients


def names_read(stage: Stage, data: Microbatch) -> list[str]:
    """Return the path in `(batch, target)` of each leaf that a stage reads of a microbatch, as often as it reads it."""
    spec = flatten((data.batch, data.target)).spec
    return [name for read in _reads(stage) for name in _names_below(spec, read)]


def names_read_elsewhere(pipeline: Pipeline, plan: Plan, stage: int, data: Microbatch) -> set[str]:
    """Return the paths in `(batch, target)` of the leaves that stages on another rank than a stage's read."""
    spec = flatten((data.batch, data.target)).spec
    others = [s for s in range(plan.stages) if _on_several_ranks(plan, stage, s)]
    return {name for s in others for read in _reads(pipeline.stages[s]) for name in _names_below(spec, read)}


def readers_of_shared_leaves(pipeline: Pipeline, plan: Plan, argnums: Collection[Argument]) -> list[int]:
    """Return the stages whose differentiated reads of the microbatch may meet those of stages on another rank.

    It is the same on every rank, though each sees only the leaves that it was given.
    """

    def meet(stage: int, other: int) -> bool:
        pairs = ((a, b) for a in reads[stage] for b in reads[other])
        return _on_several_ranks(plan, stage, other) and any(not any(map(_differ, a, b)) for a, b in pairs)

    reads = {s: list(_reads(pipeline.stages[s], argnums)) for s in range(plan.stages)}
    return [s for s in reads if any(meet(s, other) for other in reads)]


def _reads(stage: Stage, argnums: Collection[Argument] = ("batch", "target")) -> Iterator[Path]:
    """Yield the paths in `(batch, target)` that a stage reads, in the order of its arguments."""
    for read in stage.inputs:
        if not isinstance(read, Output) and READS[type(read)] in argnums:
            yield (0, *read.path) if isinstance(read, Batch) else (1,)


def _on_several_ranks(plan: Plan, stage: int, other: int) -> bool:
    return len({*plan.ranks_of(stage), *plan.ranks_of(other)}) > 1


def _differ(a: object, b: object) -> bool:
    """Return whether two entries of paths lead to different places in every tree, as 0 and -1 need not."""
    if isinstance(a, int) and isinstance(b, int):
        return a != b and (a < 0) == (b < 0)
    return isinstance(a, str) and isinstance(b, str) and a != b


@lru_cache(maxsize=1024)
def _names_below(spec: optree.PyTreeSpec, path: Path) -> tuple[str, ...]:
    """Return the paths of the leaves below a path; none where there is nothing."""
    names = paths_of(spec)
    with suppress(KeyError, IndexError, AttributeError, TypeError):
        return tuple(short(names[i]) for i in indices(spec.unflatten(range(spec.num_leaves)), path))
    return ()
