"""Partition a stage over the processes that compute it together, while it is traced: tensor parallelism.

The trace begins with this process's pieces of the params, which the stage's function reads as DTensors; the graph holds
the operations on pieces, and the collectives between them. DTensor's own rules choose where each operation's result
lives. `Partitioner` adds what they lack:

- a sum of which each process has a part is added over the processes once, when something else than an addition or a
  view reads it;
- an embedding whose rows are cut keeps its gradient cut, and a cross entropy over cut classes exchanges three numbers
  for each row, never the logits;
- attention on the CPU is computed by head;
- random numbers are drawn for the whole tensor on every process, which takes its piece: dropout has the bits of one
  process;
- with `Stage.sequence`, a sum of activations leaves each process its tokens, and a layer gathers them: sequence
  parallelism;
- a gradient of a parameter that every process has whole, of which each has a part, stays so: the parts are added once
  a step.

Sources: Shoeybi et al., Megatron-LM, 2019, section 3; the vocabulary-parallel cross entropy is in its section 3 too.
Korthikanti et al., Reducing activation recomputation in large transformer models, 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.autodiff.graph.signature import Untraceable
from fpipe.devices.operators import draws, written_arguments
from fpipe.errors import StageError
from fpipe.stages.cuts import CONSTRAIN, Cut
from fpipe.stages.pytree import Path
from fpipe.stages.sharding import Placed

aten = torch.ops.aten
REPLICATE, HEADS, SUM = Replicate(), Shard(1), Partial()

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
DRAWN_IN_PLACE = {
    aten.bernoulli_.float,
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
}
DRAWN_LIKE = {aten.rand_like.default, aten.randn_like.default}


class Partitioner(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes with DTensors over a mesh of one dimension; plain tensors are the same in all its processes.

    Args:
        placed: the layouts of the params of the stage, and of what it reads of other stages.
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
        self.count, self.rank = self.mesh.size(), self.mesh.get_local_rank()
        self.sequence = sequence
        self.sums: dict[int, tuple[DTensor, DTensor]] = {}  # by identity; the first keeps it from being used again
        self.summed: dict[int, Any] = {}  # over rows, as a gradient of positions: its views are no input of a layer
        self.row_sums: dict[int, tuple[DTensor, Tensor]] = {}
        self.is_backward = False
        self.cut_tables: set[int] = set()  # numbers of rows of the embeddings whose rows are cut
        self.weights: dict[int, tuple[Any, str]] = {}  # by identity: the param that a tensor is a view of
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
                if self.placement(param) == REPLICATE and self.placement(gradient) == SUM:
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
        return REPLICATE if self.sequence is None or not self._has_tokens(x.shape) else Shard(self.sequence)

    def _has_tokens(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of a shape has tokens that the processes divide."""
        return self.sequence is not None and len(shape) == 3 and shape[self.sequence] % self.count == 0

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
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
            return self._draw(func, args, kwargs)
        if func in VIEWS and not self.is_backward:
            self._check_heads(*args)
        rule = RULES.get(func)
        result = NotImplemented if rule is None else rule(self, func, *args, **kwargs)
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
        placement = self.placement(x)
        if id(x) not in self.layers or not isinstance(placement, Shard | _StridedShard) or placement.dim != x.ndim - 1:
            return
        dim, before = placement.dim, prod(x.shape[: placement.dim])
        sizes = [x.numel() // -prod(shape) if size == -1 else size for size in shape]
        at = next((at for at in range(len(sizes)) if prod(sizes[:at]) == before), None)
        if at is None or sizes[at] == x.shape[dim] or prod(sizes[at : at + 2]) != x.shape[dim]:
            return
        heads, size = sizes[at : at + 2]
        if heads % self.count:
            layer = self.layers[id(x)][1].rpartition(".")[0] or self.layers[id(x)][1]
            raise StageError(
                f"the outputs of {layer} are cut over {self.count} processes, and are {heads} "
                f"head{'s' * (heads != 1)} of {size}, which {self.count} processes don't divide: take a number of "
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
            return not self.is_backward and self._has_tokens(x.shape)
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
        piece, placement = part._local_tensor, self.placement(other)
        if placement == REPLICATE:  # the same operations on every process, so that collectives have one order
            piece = piece + other._local_tensor * float(self.rank == 0)
        elif type(placement) is Shard:
            rows = self.rows(part.shape[placement.dim])
            own = piece.narrow(placement.dim, rows.start, len(rows)) + other._local_tensor
            piece = torch.slice_scatter(piece, own, placement.dim, rows.start, rows.stop)
        else:
            return None
        return self.placed(piece, SUM, stride=part.stride())

    # Pieces

    def placement(self, x: Any) -> Placement:
        return x.placements[0] if isinstance(x, DTensor) else REPLICATE

    def is_cut(self, x: Any, dim: int) -> bool:
        return isinstance(x, DTensor) and x.placements[0] == Shard(dim % x.ndim)

    def local(self, x: Any, placement: Placement) -> Any:
        """Return this process's piece of a tensor, placed so."""
        if not isinstance(x, Tensor):
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [REPLICATE], run_check=False)
        return x.redistribute(placements=[placement])._local_tensor

    def placed(
        self, piece: Tensor, placement: Placement, size: int | None = None, stride: Sequence[int] | None = None
    ) -> DTensor:
        """Return the tensor that a piece is of.

        Args:
            size: of the dimension that is cut.
            stride: by default, that of a contiguous tensor.
        """
        shape = list(piece.shape)
        if isinstance(placement, Shard | _StridedShard):
            assert size is not None
            shape[placement.dim] = size
        stride = tuple(stride or make_contiguous_strides_for(shape))
        whole = torch.Size(shape)
        return DTensor.from_local(piece, self.mesh, [placement], run_check=False, shape=whole, stride=stride)

    def rows(self, size: int) -> range:
        """Return the rows of this process's piece of a dimension, by the rule of `torch.chunk`."""
        chunk = -(-size // self.count)
        return range(min(size, self.rank * chunk), min(size, (self.rank + 1) * chunk))

    def piece_of(self, whole: Tensor, placement: Placement) -> Tensor:
        if placement == REPLICATE:
            return whole
        if not isinstance(placement, Shard):
            raise Untraceable(f"it draws random numbers for a tensor placed as {placement}")
        rows = self.rows(whole.shape[placement.dim])
        return whole.narrow(placement.dim, rows.start, len(rows))

    def sum(self, x: Tensor, operation: str = "sum") -> Tensor:
        """Return the sum, or the maximum, over the processes."""
        result: Tensor = functional.all_reduce(x, operation, (self.mesh, 0))
        return result

    # Layers that make several things at once, as queries, keys and values

    def split(self, func: Any, x: Any, sizes: Any, dim: int = 0) -> Any:
        """Split what is cut into parts each of which is cut: each process has its piece of each."""
        placement, dim = self.placement(x), dim % x.ndim
        if not isinstance(placement, _StridedShard) or placement.dim != dim:
            return NotImplemented
        count, size = placement.split_factor, x.shape[dim]
        every = [sizes] * -(-size // sizes) if isinstance(sizes, int) else [*sizes]
        if every != [size // count] * count or size % (count * self.count):
            return NotImplemented
        pieces = x._local_tensor.split(size // count // self.count, dim)
        return [self.placed(piece, Shard(dim), size // count, x.stride()) for piece in pieces]

    def cat(self, func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
        """Join tensors along the dimension that is cut: each process joins its pieces."""
        first, dim = tensors[0], dim % tensors[0].ndim
        is_even = all(self.is_cut(x, dim) and x.shape == first.shape for x in tensors)
        if not is_even or first.shape[dim] % self.count:
            return NotImplemented
        pieces = torch.cat([x._local_tensor for x in tensors], dim)
        return self.placed(pieces, _StridedShard(dim, split_factor=len(tensors)), len(tensors) * first.shape[dim])

    # Random numbers

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        x, *rest = args
        placement = self.placement(x)
        drawn = func in DRAWN_IN_PLACE or func in DRAWN_LIKE or func is aten.native_dropout.default
        if not drawn or not isinstance(x, DTensor):
            raise Untraceable(
                f"{func} draws random numbers, which it can't do for a tensor that is cut: for attention, set its "
                "dropout to 0 or choose SDPBackend.MATH"
            )
        if func is aten.native_dropout.default:
            whole = torch.ones(x.shape, dtype=x.dtype, device=x.device)
            mask = self.piece_of(func(whole, *rest, **kwargs)[1], placement)
            rate, train = rest
            scale = 1.0 if not train else 0.0 if rate == 1 else 1 / (1 - rate)
            size = x.shape[placement.dim] if isinstance(placement, Shard) else None
            dropped = self.placed(x._local_tensor * mask * scale, placement, size)
            return dropped, self.placed(mask, placement, size)
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        piece = self.piece_of(func(like, *rest, **kwargs), placement)
        if func in DRAWN_IN_PLACE:
            x._local_tensor.copy_(piece)
            return x
        return self.placed(piece, placement, x.shape[placement.dim] if isinstance(placement, Shard) else None)

    # Rows of an embedding

    def _rows_here(self, indices: Any, size: int) -> tuple[Tensor, Tensor, int]:
        """Return indices into this process's rows, which of them are elsewhere, and the number of these rows."""
        rows = self.rows(size)
        numbers = self.local(indices, REPLICATE)
        elsewhere = (numbers < rows.start) | (numbers >= rows.stop)
        return numbers - rows.start, elsewhere, len(rows)

    def embedding(
        self, func: Any, weight: Any, indices: Any, padding: int = -1, by_frequency: bool = False, sparse: bool = False
    ) -> Any:
        if not self.is_cut(weight, 0):
            return self._embedding_by_token(func, weight, indices, padding, by_frequency, sparse)
        if sparse or by_frequency:
            raise Untraceable("an embedding whose rows are cut can't have sparse=True or scale_grad_by_freq=True")
        self.cut_tables.add(weight.shape[0])
        here, elsewhere, _ = self._rows_here(indices, weight.shape[0])
        part = func(weight._local_tensor, here.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        if self._has_tokens(part.shape):
            return self.placed(part, SUM)
        return self.placed(self.sum(part), REPLICATE)

    def _embedding_by_token(self, func: Any, weight: Any, indices: Any, *rest: Any) -> Any:
        """Look up this process's tokens alone, in a table that every process has."""
        shape = [*indices.shape, weight.shape[-1]]
        if self.sequence is None or self.placement(weight) != REPLICATE or not self._has_tokens(shape):
            return NotImplemented
        cut = Shard(self.sequence)
        rows = func(weight._local_tensor, self.local(indices, cut), *rest)
        return self.placed(rows, cut, shape[cut.dim])

    def embedding_backward(
        self, func: Any, gradient: Any, indices: Any, size: int, padding: int, by_frequency: bool
    ) -> Any:
        if size not in self.cut_tables:
            placement = self.placement(gradient)
            if type(placement) is not Shard or placement.dim == gradient.ndim - 1 or by_frequency:
                return NotImplemented
            piece = func(gradient._local_tensor, self.local(indices, placement), size, padding, by_frequency)
            return self.placed(piece, SUM)
        here, elsewhere, count = self._rows_here(indices, size)
        if padding >= 0:
            elsewhere = elsewhere | (self.local(indices, REPLICATE) == padding)
        rows = func(self.local(gradient, REPLICATE), here.masked_fill(elsewhere, count), count + 1, -1, False)
        return self.placed(rows[:count].clone(), Shard(0), size)

    # Classes of a cross entropy

    def log_softmax(self, func: Any, x: Any, dim: int, to_float: bool) -> Any:
        if not self.is_cut(x, dim):
            return NotImplemented
        piece = x._local_tensor.float() if to_float else x._local_tensor
        dtype, piece = piece.dtype, piece.to(torch.promote_types(piece.dtype, torch.float32))
        shifted = piece - self.sum(piece.amax(dim, keepdim=True), "max")
        result = shifted - self.sum(shifted.exp().sum(dim, keepdim=True)).log()
        return self.placed(result.to(dtype), self.placement(x), x.shape[dim])

    def log_softmax_backward(self, func: Any, gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
        if not self.is_cut(output, dim):
            return NotImplemented
        placement = self.placement(output)
        piece = self.local(gradient, placement)
        if id(gradient) in self.row_sums:
            sums = self.row_sums[id(gradient)][1]
        else:
            sums = self.sum(piece.sum(dim, keepdim=True))
        result = piece - output._local_tensor.exp() * sums
        return self.placed(result.to(dtype), placement, output.shape[dim])

    def nll_loss(self, func: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
        if not self.is_cut(x, 1) or x.ndim != 2:
            return NotImplemented
        target, weights = self.local(target, REPLICATE), self._class_weights(x, target, weight, ignore)
        here, elsewhere, _ = self._rows_here(target, x.shape[1])
        picked = x._local_tensor.gather(1, here.masked_fill(elsewhere, 0).unsqueeze(1)).squeeze(1)
        losses = -self.sum(picked.masked_fill(elsewhere, 0)) * weights
        total = weights.sum()
        if reduction == 0:
            return self.placed(losses, REPLICATE), self.placed(torch.zeros_like(total), REPLICATE)
        loss = losses.sum() / total if reduction == 1 else losses.sum()
        return self.placed(loss, REPLICATE), self.placed(total, REPLICATE)

    def nll_loss_backward(
        self, func: Any, gradient: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int, total: Any
    ) -> Any:
        if not self.is_cut(x, 1) or x.ndim != 2:
            return NotImplemented
        target, weights = self.local(target, REPLICATE), self._class_weights(x, target, weight, ignore)
        gradient = self.local(gradient, REPLICATE)
        each = -gradient * weights if reduction != 1 else -gradient * weights / self.local(total, REPLICATE)
        here, elsewhere, _ = self._rows_here(target, x.shape[1])
        piece = torch.zeros_like(x._local_tensor).scatter(
            1, here.masked_fill(elsewhere, 0).unsqueeze(1), each.masked_fill(elsewhere, 0).unsqueeze(1)
        )
        result = self.placed(piece, self.placement(x), x.shape[1])
        self.row_sums[id(result)] = result, each.unsqueeze(1)  # so that log_softmax need not add them
        return result

    def _class_weights(self, x: DTensor, target: Tensor, weight: Any, ignore: int) -> Tensor:
        """Return the weight of each row: that of its class, and 0 where the class is to be ignored."""
        ignored = target == ignore
        if weight is None:
            return torch.ones_like(target, dtype=x.dtype).masked_fill(ignored, 0)
        of_class: Tensor = self.local(weight, REPLICATE)[target.masked_fill(ignored, 0)]
        return of_class.masked_fill(ignored, 0)

    # Attention on the CPU, which has no rule of DTensor's

    def attention(self, func: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        out, sums = func(*self._by_head(q, k, v), *args, **self._masked(q, kwargs))
        placement = self.placement(q)
        size = q.shape[placement.dim] if isinstance(placement, Shard) else None
        return self.placed(out, placement, size), self.placed(sums, placement, size)

    def attention_backward(
        self, func: Any, gradient: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, *args: Any, **kwargs: Any
    ) -> Any:
        placement = self.placement(q)
        dim = placement.dim if isinstance(placement, Shard) else None
        pieces = [self.local(x, placement) for x in (gradient, q, k, v, out, sums)]
        gradients = func(*pieces, *args, **self._masked(q, kwargs))
        return tuple(
            self.placed(x, placement, None if dim is None else like.shape[dim])
            for x, like in zip(gradients, (q, k, v), strict=True)
        )

    def _by_head(self, q: Any, k: Any, v: Any) -> list[Tensor]:
        placement = self.placement(q)
        if placement not in (REPLICATE, HEADS, Shard(0)):
            raise Untraceable(f"attention can't be cut along dimension {placement} of its queries")
        if placement == HEADS:
            for x, name in (q, "query"), (k, "key"), (v, "value"):
                if x.shape[1] % self.count:
                    raise Untraceable(
                        f"attention has {x.shape[1]} {name} heads, which {self.count} processes don't divide"
                    )
        return [self.local(x, placement) for x in (q, k, v)]

    def _masked(self, q: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        mask, placement = kwargs.get("attn_mask"), self.placement(q)
        if mask is None:
            return dict(kwargs)
        is_cut = isinstance(placement, Shard) and mask.ndim == q.ndim and mask.shape[placement.dim] > 1
        return {**kwargs, "attn_mask": self.local(mask, placement if is_cut else REPLICATE)}


RULES: Mapping[Any, Callable[..., Any]] = {
    aten.embedding.default: Partitioner.embedding,
    aten.embedding_dense_backward.default: Partitioner.embedding_backward,
    aten.split.Tensor: Partitioner.split,
    aten.split_with_sizes.default: Partitioner.split,
    aten.cat.default: Partitioner.cat,
    aten._log_softmax.default: Partitioner.log_softmax,
    aten._log_softmax_backward_data.default: Partitioner.log_softmax_backward,
    aten.nll_loss_forward.default: Partitioner.nll_loss,
    aten.nll_loss_backward.default: Partitioner.nll_loss_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: Partitioner.attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Partitioner.attention_backward,
}


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
