"""Norms of gradients over the whole pipeline.

Each leaf is reduced to a sum of squares in float64, each stage in the order of its own tree, and the sums of the stages
are added in order of stage on every rank: the bits depend on no schedule, placement or handler. A tied entry counts
with the stage that owns it, a stage with copies where its first copy is, a leaf that replicas have in common on the
first of them.

The squares of a leaf that is sharded over replicas are summed on each, and these sums are added in the order of the
replicas: where leaves are sharded, the bits depend on the number of shards. The same holds for leaves that are cut over
another dimension of the mesh, as of tensor parallelism, over which the sums are added first.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.errors.arguments import checked
from fpipe.handlers.protocol import Handler, Replicas
from fpipe.plan import Plan, check_plan
from fpipe.stages.pytree import flatten
from fpipe.stages.sharding import cut_over, is_first, local, wrap
from fpipe.training.loss_scale import LossScale

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PURPOSE = "the norm of the gradients"
OPTIONS = ("max_norm", "loss_scale")  # whose numbers come before the sums of squares
EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
HINT = "every rank calls global_norm or clip_by_global_norm, after the same step; after this, make a new handler"


@checked("grads", "plan")  # what one rank gets wrong is an error on all
def global_norm(grads: Mapping[int, Any], plan: Plan, *, handler: Handler, by_row: bool = False) -> Tensor:
    """Return the 2-norm of the gradients of the whole pipeline, on every rank. Every rank calls it.

    Args:
        by_row: return the norm of each row along axis 0, which all gradients have in common: of each sample with
            `transforms.per_sample`, of each member with `transforms.vmap` if all have their own params.
        grads: `{stage: tree}` as a step returns it; None, the gradient of a frozen parameter, counts as nothing. Leaves
            may be DTensors over the handler's replicas, and over one more dimension of the mesh, as of tensor
            parallelism; each number counts once.
        plan, handler: the step's own.

    Returns:
        A float64 tensor without dimensions, or of shape [rows], on the device of this rank's gradients. A NaN or an
        infinity in any gradient makes it NaN or infinite.

    Raises:
        TypeError, ValueError: grads is not what a step returns; or the pairs of one of `transforms.hvp`.
        TransportError: another rank's arguments are wrong; names the rank and the reason. Or a rank did not call it
            within the timeout, or died; this handler can then compute no further norms.

    With `Distributed` the ranks' sums are added on the CPU, which on CUDA waits for the gradients.

    >>> from fpipe import Placement, handlers
    >>> grads = {0: {"w": torch.tensor([3.0, 0.0])}, 1: {"w": torch.tensor([4.0]), "frozen": None}}
    >>> global_norm(grads, Plan(Placement.loop(ranks=2), microbatches=1), handler=handlers.Local())
    tensor(5., dtype=torch.float64)
    """

    def own(grads: Mapping[int, Any]) -> Tensor:
        _refuse_duals(grads)
        return squares(grads, plan, handler, by_row=by_row)

    return SharedSquares(own).everywhere(grads, handler).sum(0).sqrt()


@checked("grads", "max_norm", "plan")
def clip_by_global_norm(
    grads: Mapping[int, Any], max_norm: float | Tensor, plan: Plan, *, handler: Handler
) -> tuple[dict[int, Any], Tensor]:
    """Return the gradients scaled to a norm of at most `max_norm`, and the norm before. Every rank calls it.

    The gradients are multiplied by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does;
    `grads` itself does not change. If the norm is not finite, neither are the clipped gradients: check
    `norm.isfinite()`, which is the same on every rank, before an update.

    Raises:
        ValueError: max_norm is negative, or not a number.
        TypeError, ValueError, TransportError: as `global_norm`.

    >>> from fpipe import Placement, handlers
    >>> plan = Plan(Placement.loop(ranks=2), microbatches=1)
    >>> clip_by_global_norm({0: torch.tensor([3.0]), 1: torch.tensor([4.0])}, 1.0, plan, handler=handlers.Local())
    ({0: tensor([0.6000]), 1: tensor([0.8000])}, tensor(5., dtype=torch.float64))
    """

    def own(grads: Mapping[int, Any]) -> Tensor:
        _refuse_duals(grads)
        return squares(grads, plan, handler)

    norm = SharedSquares(own, max_norm).everywhere(grads, handler).sum(0).sqrt()
    return clipped(grads, max_norm, norm), norm


def clipped(grads: Mapping[int, Any], max_norm: float | Tensor, norm: Tensor) -> dict[int, Any]:
    """Return the gradients, whose norm is `norm`, scaled to one of at most `max_norm`."""
    return multiplied(grads, clipping(max_norm, norm))


def multiplied(grads: Mapping[int, Any], scale: Tensor) -> dict[int, Any]:
    """Return the gradients times a number, in their dtypes."""
    whole, spec = flatten(dict(grads))
    leaves = [local(leaf) for leaf in whole]
    devices = defaultdict[Any, list[int]](list)
    for i, leaf in enumerate(leaves):
        devices[leaf.device].append(i)
    for device, here in devices.items():
        scaled = torch._foreach_mul([leaves[i] for i in here], scale.to(device))
        for i, leaf in zip(here, scaled, strict=True):
            leaves[i] = wrap(leaf.to(whole[i].dtype), whole[i])  # of a tensor without dimensions the product is float64
    return spec.unflatten(leaves)  # type: ignore[return-value]


def clipping(max_norm: float | Tensor, norm: Tensor) -> Tensor:
    """Return the factor of gradients whose norm is `norm`; 1 where they stay as they are."""
    max_norm = max_norm.detach() if isinstance(max_norm, Tensor) else max_norm
    return (max_norm / (norm + EPSILON)).clamp(max=1.0)


def check_limit(max_norm: Any) -> None:
    limit = max_norm.detach().item() if isinstance(max_norm, Tensor) and not max_norm.ndim else max_norm
    if not (isinstance(limit, Real) and float(limit) >= 0):
        raise ValueError(f"max_norm must be a number of at least 0, not {max_norm}")


def _refuse_duals(grads: Any) -> None:
    """Raise TypeError for pairs of a product and a gradient."""
    module = sys.modules.get("fpipe.transforms.duals")  # until it is imported, nothing is a pair
    if module is not None and _has_nodes(flatten(grads).spec, module.Dual):
        raise TypeError(
            "grads has pairs of transforms.hvp, and one norm would mix the products with the gradients: pass "
            "transforms.primals(grads), the products, or transforms.tangents(grads), the gradients"
        )


@functools.lru_cache(32)
def _has_nodes(spec: optree.PyTreeSpec, kind: type) -> bool:
    return spec.type is kind or any(_has_nodes.__wrapped__(child, kind) for child in spec.children())


def squares(
    grads: Mapping[int, Any],
    plan: Plan,
    handler: Handler,
    device: torch.device | None = None,
    *,
    by_row: bool = False,
) -> Tensor:
    """Return the sum of squares of each stage's gradients that count in this process, in float64.

    Args:
        device: of the result where there are no gradients; by default the CPU.
        by_row: of each row along axis 0, as [stages, rows].
    """
    check_plan(plan)
    if not isinstance(grads, Mapping):
        raise TypeError(f"grads must be {{stage: tree}}, as a step returns it, not a {type(grads).__name__}")
    if unknown := [stage for stage in grads if stage not in range(plan.stages)]:
        raise ValueError(
            f"grads has an entry for {unknown[0]!r}, and the plan has stages 0 to {plan.stages - 1}: pass "
            "{stage: tree}, as a step returns it"
        )
    holders, ranks, replicas = plan.placement.holders, handler.ranks(plan), handler.replicas(plan)
    shape = _rows(grads) if by_row else ()
    counted = {s: _counted(s, tree, replicas) for s, tree in sorted(grads.items()) if holders[s][0] in ranks}
    sums = {s: _squares([x for x, mesh in leaves if mesh is None], by_row) for s, leaves in counted.items()}
    device = next((x.device for leaves in counted.values() for x, _ in leaves), device or torch.device("cpu"))
    zero = torch.zeros(shape, dtype=torch.float64, device=device)

    def stacked(sums: Mapping[int, Tensor | None]) -> Tensor:
        each = [sums.get(stage) for stage in range(plan.stages)]
        return torch.stack([zero if x is None else x.to(device) for x in each])

    total = stacked(sums)
    for mesh in dict.fromkeys(mesh for leaves in counted.values() for _, mesh in leaves if mesh is not None):
        cut = {s: _squares([x for x, over in leaves if over == mesh], by_row) for s, leaves in counted.items()}
        total = total + _added(stacked(cut), mesh, handler.timeout)
    return total


def _added(sums: Tensor, mesh: DeviceMesh, timeout: float | None) -> Tensor:
    """Return the sums of all processes of a mesh, added in their order.

    Raises:
        TransportError: a process of the mesh did not come in time.

    A graph may hold the exchange, so it is one of tensors.
    """
    every = [torch.empty_like(sums) for _ in range(mesh.size())]
    work = dist.all_gather(every, sums, group=mesh.get_group(), async_op=True)
    try:
        work.wait() if timeout is None or sums.device.type != "cpu" else work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        from fpipe.handlers.distributed.connections import cause_of  # takes a while to import

        raise TransportError(
            f"rank {dist.get_rank()} could not reach all of processes {mesh.mesh.flatten().tolist()}, over which "
            f"leaves are cut, at {PURPOSE} ({cause_of(error, timeout)}): {HINT}"
        ) from error
    return functools.reduce(torch.add, every)


def _rows(grads: Mapping[int, Any]) -> tuple[int]:
    """Return the shape of the rows of all gradients.

    Raises:
        ValueError: they have no axis of rows in common.
    """
    counts = {leaf.shape[:1] for leaf in flatten(dict(grads)).leaves if isinstance(leaf, Tensor)}
    if len(counts) != 1 or not (rows := next(iter(counts))):
        raise ValueError(
            f"by_row takes gradients with the same rows along axis 0, not {sorted(map(list, counts))}: those of "
            "transforms.per_sample, or of transforms.vmap where all members have their own params"
        )
    return (rows[0],)


def _counted(stage: int, tree: Any, replicas: Replicas) -> list[tuple[Tensor, DeviceMesh | None]]:
    """Return the leaves that count in this process, each with the mesh over which it is cut but for the replicas."""
    leaves = flatten(tree).leaves
    if wrong := [leaf for leaf in leaves if not isinstance(leaf, Tensor)]:
        raise TypeError(f"a gradient of stage {stage} is a {type(wrong[0]).__name__}: it must be a tensor or None")
    first = [leaf for leaf in leaves if is_first(leaf, replicas.here[0], replicas.mesh)]
    return [(leaf, cut_over(leaf, replicas.mesh)) for leaf in first]


def _squares(leaves: Sequence[Tensor], by_row: bool) -> Tensor | None:
    if by_row and leaves:
        numbers = map(_real, leaves)
        norms = [torch.linalg.vector_norm(x.reshape(len(x), -1), dim=1, dtype=torch.float64) for x in numbers]
        return torch.stack(norms).square().sum(0)
    return sum_of_squares(leaves) if leaves else None


def sum_of_squares(leaves: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers in some tensors, in float64."""
    numbers = [_real(leaf) for leaf in leaves]
    return torch.stack(torch._foreach_norm(numbers, 2, torch.float64)).square().sum()


def _real(leaf: Tensor) -> Tensor:
    """Return the values of a leaf here as real numbers, also if it is sparse or complex."""
    leaf = local(leaf).detach()
    dense = leaf.coalesce().values() if leaf.is_sparse else leaf
    return torch.view_as_real(dense) if dense.is_complex() else dense


class SharedSquares:
    """The sums of squares that the ranks send to each other, as whole numbers: the bits of float64.

    Args:
        squares: returns each stage's sum, or those of its rows, for the gradients of this rank.
        max_norm: to which all ranks clip.
        loss_scale: of the step, the same on every rank; it is read when the numbers are.
    """

    def __init__(
        self,
        squares: Callable[[Mapping[int, Any]], Tensor],
        max_norm: float | Tensor | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._squares, self._max_norm, self._loss_scale = squares, max_norm, loss_scale

    def own(self, gradients: Mapping[int, Any]) -> Tensor:
        """Return each stage's sum in this process."""
        if self._max_norm is not None:
            check_limit(self._max_norm)
        return self._squares(gradients)

    def __call__(self, gradients: Mapping[int, Any]) -> list[int]:
        """Return the numbers of this rank."""
        self._part = part = self.own(gradients)
        scale = None if self._loss_scale is None else self._loss_scale.tensor
        options = [math.nan if option is None else float(option) for option in (self._max_norm, scale)]
        numbers = torch.tensor([*options, *part.flatten().tolist()], dtype=torch.float64)
        return numbers.view(torch.int64).tolist()

    def everywhere(
        self, gradients: Mapping[int, Any], handler: Handler, received: Callable[[], list[list[int]]] | None = None
    ) -> Tensor:
        """Return each stage's sum over all ranks, which all call it.

        Args:
            received: waits for the numbers of each rank, where they are under way, and returns them.

        Raises:
            TransportError: as `total`, or a rank did not come.
        """
        if received is not None:
            return self.total(received())
        if handler.peers is None:
            return self.own(gradients)
        handler.check()  # a rank whose step has failed does not come here
        _, rows = handler.peers.new_group(PURPOSE, hint=HINT).agree(lambda: self(gradients), "global_norm")
        return self.total(rows)

    def total(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return each stage's sum over all ranks, where the gradients of this one are.

        Args:
            rows: the numbers of each rank.

        Raises:
            TransportError: the ranks have other plans or loss scales, or clip to other norms.
        """
        count = len(OPTIONS)
        if len(counts := {len(row) - count for row in rows}) > 1:
            raise TransportError(f"the ranks have plans of {sorted(counts)} stages: every rank makes the same plan")
        every = torch.tensor(rows).view(torch.float64)
        for at, name in enumerate(OPTIONS):
            if others := [rank for rank, row in enumerate(rows) if row[at] != rows[0][at]]:
                one, other = (None if math.isnan(x) else x for x in every[[0, others[0]], at].tolist())
                raise TransportError(
                    f"{name} is {one} on rank 0 and {other} on rank {others[0]}: every rank passes the same"
                )
        total = functools.reduce(torch.add, every[:, count:].unbind())  # 0 where it isn't held
        return total.reshape(self._part.shape).to(self._part.device)
