"""Partition a stage over the processes that compute it together, while it is traced: tensor parallelism.

The trace begins with this process's pieces of the params, which the stage's function reads as DTensors; the graph holds
the operations on pieces, and the collectives between them. DTensor's own rules choose where each operation's result
lives. `Partitioner` adds what they lack:

- a sum of which each process has a part is added over the processes once, when something else than an addition or a
  view reads it;
- with `Stage.sequence`, a sum of activations leaves each process its tokens, and a layer gathers them: sequence
  parallelism;
- a gradient of a parameter that every process has whole, of which each has a part, stays so: the parts are added once
  a step;
- the rules of sharded_operators.py.

Sources: Shoeybi et al., Megatron-LM, 2019, section 3. Korthikanti et al., Reducing activation recomputation in large
transformer models, 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.autodiff.graph.sharded_operators import (
    REPLICATE,
    RULES,
    SUM,
    PieceOperators,
    from_the_first,
    placement_of,
)
from fpipe.autodiff.graph.signature import Untraceable
from fpipe.devices.operators import draws, written_arguments
from fpipe.errors import StageError
from fpipe.stages.cuts import CONSTRAIN, Cut
from fpipe.stages.pytree import Path
from fpipe.stages.sharding import Placed

aten = torch.ops.aten

ADDITIONS = {aten.add.Tensor, aten.sub.Tensor}
"""Operations on two sums that are not added over the processes yet, whose result is one too."""
MOVES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.detach.default,
    aten.alias.default,
}
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
LAYERS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default}
CARRIED = {*MOVES, aten._to_copy.default, aten.split.Tensor, aten.split_with_sizes.default, aten.add.Tensor}


class Partitioner(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes with DTensors over a mesh of one dimension; plain tensors are the same in all its processes.

    Args:
        placed: the placements of the params of the stage, and of what it reads of other stages.
        sequence: as of `Stage`.
        local: its function makes DTensors by itself, of all but the params.

    Raises:
        Untraceable: they are not over one mesh.
    """

    def __init__(self, placed: Sequence[Placed], sequence: int | None = None, local: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        meshes = {each.mesh for each in placed}
        if len(meshes) > 1:
            raise Untraceable(
                f"its params are DTensors over several meshes, {sorted(map(str, meshes))}: shard over one"
            )
        (self.mesh,), self.local_inputs = meshes, local
        # It holds meshes, and takes one that is equal for this one, whose groups are others.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        self.pieces, self.sequence = PieceOperators(self.mesh, sequence), sequence
        self.sums: dict[int, tuple[DTensor, DTensor]] = {}  # by identity; the first keeps it from being used again
        self.summed: dict[int, Any] = {}  # over rows, as a gradient of positions: its views are no input of a layer
        self.is_backward = False
        self.weights: dict[int, tuple[Any, str]] = {}  # by identity: the param that a tensor is a view of
        self.products: dict[int, Any] = {}  # by identity: of matrices; einsum views them with dimensions of size 1
        self.layers: dict[int, tuple[Any, str]] = {}  # by identity: the param of the layer that a tensor is made by

    @contextmanager
    def running(self) -> Iterator[None]:
        token = CONSTRAIN.set(self.constrain)
        try:
            with implicit_replication(), self:
                yield
        finally:
            CONSTRAIN.reset(token)

    def read(self, leaf: Any, placed: Placed | None, path: Path) -> Any:
        """Return a leaf of the arguments as the stage's function gets it: a piece as the whole DTensor.

        A leaf that gets a gradient is one too, so that parts of its gradient are added.
        """
        if placed is not None:
            whole = DTensor.from_local(
                leaf, self.mesh, placed.placements, run_check=False, shape=placed.shape, stride=placed.stride
            )
            self.weights[id(whole)] = whole, ".".join(map(str, path))
            return whole
        if isinstance(leaf, Tensor) and leaf.requires_grad and not self.local_inputs:
            return DTensor.from_local(leaf, self.mesh, [REPLICATE], run_check=False)
        return leaf

    def start_backward(self) -> None:
        """Count the operations from here on as those of the backward."""
        self.is_backward = True

    # Results

    def whole(self, leaf: Any) -> Any:
        """Return a result of the stage's function, whole on every process."""
        return leaf.redistribute(placements=[REPLICATE]).to_local() if isinstance(leaf, DTensor) else leaf

    def settled(self, leaf: Any) -> Any:
        """Return an output for another stage: a piece if it is cut, and else whole."""
        if not isinstance(leaf, DTensor) or type(leaf.placements[0]) is Shard:
            return leaf
        return leaf.redistribute(placements=[self._settled_placement(leaf)])

    def cut(self, leaf: Any) -> Cut | None:
        """Return the place of this process's piece of a tensor that is cut."""
        if not isinstance(leaf, DTensor) or leaf.placements[0].is_replicate():
            return None
        return Cut.of(Placed(self.mesh, leaf.placements, leaf.shape, leaf.stride()))

    def piece(self, leaf: Any) -> Any:
        """Return this process's piece of a tensor, or all of it."""
        return leaf.to_local() if isinstance(leaf, DTensor) else leaf

    def gradients(self, params: Sequence[Any], gradients: Sequence[Any]) -> tuple[list[Any], frozenset[int]]:
        """Return gradients placed like the params, as pieces, and the numbers of those that are parts of a sum.

        These are gradients of params that every process has whole: their parts are to be added over the processes.
        """
        pieces, partial = list[Any](), set[int]()
        for i, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
            if isinstance(gradient, DTensor):
                if placement_of(param) == REPLICATE and placement_of(gradient) == SUM:
                    partial.add(i)
                else:
                    gradient = gradient.redistribute(placements=param.placements)
                gradient = gradient._local_tensor
            pieces.append(gradient)
        return pieces, frozenset(partial)

    # Placements

    def constrain(self, x: Tensor, placements: Any) -> Tensor:
        """Return a tensor placed as `fpipe.constrain` has it."""
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [REPLICATE], run_check=False)
        return x.redistribute(placements=placements_over(self.mesh, placements, x))

    def _settled_placement(self, x: DTensor) -> Placement:
        """Return where a sum lives once its parts are added."""
        return Shard(self.sequence) if self.sequence is not None and self.pieces.has_tokens(x.shape) else REPLICATE

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
        args = from_the_first(func, args)
        if any(map(_is_partial, written_arguments(func, args, kwargs))):
            raise Untraceable(
                f"{func} writes in place to a tensor of which each process has a part of the sum: write x = x + y for "
                "x += y"
            )
        if func in VIEWS and len(args[1]) == 2 and self._is_input(args[0]):
            args = self._gathered(args[0]), *args[1:]
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        if any(map(_is_partial, tensors)) and not (
            func in MOVES or (func in ADDITIONS and len(tensors) > 1 and all(map(_is_partial, tensors)))
        ):
            if func is aten.add.Tensor and self.is_backward and (part := self._added(args, kwargs)) is not None:
                return part
            args, kwargs = pytree.tree_map(self._settled, (args, kwargs))
        if draws(func, args, kwargs):
            return self.pieces.draw(func, args, kwargs)
        if func in VIEWS and not self.is_backward:
            self._check_heads(*args)
        rule = RULES.get(func)
        result = NotImplemented if rule is None else rule(self.pieces, func, *args, **kwargs)
        if result is NotImplemented:
            result = _viewed(func, args, kwargs) if func is aten.view.default else func(*args, **kwargs)
        if func is aten.sum.dim_IntList:
            self.summed[id(result)] = result
        result = self._settled(result) if _is_masked(result) else result
        if not self.is_backward:
            self._follow(func, tensors, result)
        return result

    def _follow(self, func: Any, tensors: Sequence[DTensor], result: Any) -> None:
        """Note which param a result is a view of, or which param's layer made it, where that is known."""
        if func is aten.bmm.default:
            self.products[id(result)] = result
        if func in MOVES and id(tensors[0]) in self.weights:
            self.weights[id(result)] = result, self.weights[id(tensors[0])][1]
        known = self.weights if func in LAYERS else self.layers if func in CARRIED else {}
        name = next((known[id(x)][1] for x in tensors if id(x) in known), None)
        if name is not None:
            self.layers |= {id(x): (x, name) for x in pytree.tree_leaves(result)}

    def _check_heads(self, x: Any, shape: Sequence[int]) -> None:
        """Refuse a view of a layer's outputs as heads that the processes don't divide: each would gather all of them.

        Raises:
            StageError: names the layer.
        """
        placement = placement_of(x)
        if id(x) not in self.layers or not isinstance(placement, Shard | _StridedShard) or placement.dim != x.ndim - 1:
            return
        dim, before = placement.dim, prod(x.shape[: placement.dim])
        sizes = [x.numel() // -prod(shape) if size == -1 else size for size in shape]
        at = next((at for at in range(len(sizes)) if prod(sizes[:at]) == before), None)
        if at is None or sizes[at] == x.shape[dim] or prod(sizes[at : at + 2]) != x.shape[dim]:
            return
        (heads, size), count = sizes[at : at + 2], self.pieces.count
        if heads % count and not (heads == 1 and id(x) in self.products):
            layer = self.layers[id(x)][1].rpartition(".")[0] or self.layers[id(x)][1]
            raise StageError(
                f"the outputs of {layer} are cut over {count} processes, and are {heads} "
                f"head{'s' * (heads != 1)} of {size}, which {count} processes don't divide: take a number of "
                f"processes that divides the heads, or leave {layer.rpartition('.')[2]!r} out of the names of column= "
                "(or of the rule), so that each process makes all of its heads"
            )

    def _settled(self, x: Any) -> Any:
        """Return a tensor whose parts are added over the processes, once."""
        if not _is_partial(x):
            return x
        if id(x) not in self.sums:
            self.sums[id(x)] = x, x.redistribute(placements=[self._settled_placement(x)])
        return self.sums[id(x)][1]

    def _is_input(self, x: Any) -> bool:
        """Return whether a tensor of three dimensions that is viewed as two is the input of a layer, which is gathered.

        A linear layer reads all tokens of all rows in this way. Its input is cut along these, or will be when its parts
        are added, since something else reads it too.
        """
        if _is_partial(x):
            return not self.is_backward and self.pieces.has_tokens(x.shape)
        is_cut = isinstance(x, DTensor) and x.ndim == 3 and x.placements[0] in (Shard(0), Shard(1))
        return is_cut and id(x) not in self.summed

    def _gathered(self, x: DTensor) -> DTensor:
        """Return a tensor whole on every process, gathered once."""
        x = self._settled(x)
        if id(x) not in self.sums:
            self.sums[id(x)] = x, x.redistribute(placements=[REPLICATE])
        return self.sums[id(x)][1]

    def _added(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DTensor | None:
        """Return the sum of a gradient and one that the processes have parts of, as such parts: the first adds both.

        Autograd adds the gradients of a tensor in an order of its own. So their sum is added over the processes once.
        """
        part, other = sorted(args, key=_is_partial, reverse=True)
        if kwargs or not isinstance(other, DTensor) or part.placements[0] != SUM:
            return None
        if id(part) in self.sums or part.shape != other.shape:
            return None
        piece, placement = part._local_tensor, placement_of(other)
        if placement == REPLICATE:  # the same operations on every process, so that collectives have one order
            piece = piece + other._local_tensor * float(self.pieces.rank == 0)
        elif type(placement) is Shard:
            rows = self.pieces.rows(part.shape[placement.dim])
            own = piece.narrow(placement.dim, rows.start, len(rows)) + other._local_tensor
            piece = torch.slice_scatter(piece, own, placement.dim, rows.start, rows.stop)
        else:
            return None
        return self.pieces.placed(piece, SUM, stride=part.stride())


def placements_over(mesh: DeviceMesh, placements: Any, x: DTensor) -> list[Placement]:
    """Return a placement for each dimension of a mesh.

    Args:
        placements: one for each dimension; or by the name of a dimension, of which the others stay as they are.

    Raises:
        ValueError: they don't fit the mesh or the tensor.
    """
    names = mesh.mesh_dim_names or ()
    if isinstance(placements, Mapping):
        if unknown := [name for name in placements if name not in names]:
            raise ValueError(f"placements name {unknown[0]!r}, and the dimensions of {mesh} are {[*names]}")
        each = [placements.get(name, x.placements[at]) for at, name in enumerate(names)]
    else:
        each = [*placements]
        if len(each) != mesh.ndim:
            raise ValueError(
                f"{len(each)} placements for the {mesh.ndim} dimensions of {mesh}, which compute the stage: give one "
                "for each, or a dict by the name of a dimension"
            )
    for placement in each:
        dim = getattr(placement, "dim", 0)
        if not -x.ndim <= dim < max(x.ndim, 1) or (not x.ndim and placement.is_shard()):
            raise ValueError(f"a tensor of shape {[*x.shape]} can't be placed as {placement}")
    return each


def _is_partial(x: Any) -> bool:
    return isinstance(x, DTensor) and any(p.is_partial() for p in x.placements)


def _is_masked(x: Any) -> bool:
    """Return whether the parts of a sum come with a mask, which is used up when they are added."""
    return isinstance(x, DTensor) and any(p.is_partial() and type(p) is not Partial for p in x.placements)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a view, of a contiguous copy where the strides of the piece don't allow what those of the whole do."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "view size" not in str(error):
            raise
    x: DTensor = args[0]
    piece = DTensor.from_local(
        x._local_tensor.contiguous(),
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=make_contiguous_strides_for(x.shape),
    )
    return func(piece, *args[1:], **kwargs)
