"""Operations on pieces of tensors for which DTensor has no rule, or one that gathers.

- An embedding whose rows are cut keeps its gradient cut, and a cross entropy over cut classes exchanges three numbers
  for each row, never the logits.
- Attention on the CPU is computed by head.
- Dimensions are counted from the first: some of DTensor's rules take a negative one for a dimension that is not cut.
- Whether any element is true is a maximum over the processes, where DTensor adds bytes of truth values.
- Random numbers are drawn for the whole tensor on every process, which takes its piece: dropout has the bits of one
  process.

Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fpipe.autodiff.graph.signature import Untraceable

aten = torch.ops.aten
REPLICATE, HEADS, SUM = Replicate(), Shard(1), Partial()
MEAN, ADDED = 1, 2  # reductions of a loss, as operators number them

DRAWN_IN_PLACE = {
    aten.bernoulli_.float,
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
}
DRAWN_LIKE = {aten.rand_like.default, aten.randn_like.default}


GAINING = {aten.unsqueeze.default, aten.stack.default}
"""Operations whose dimension is one of the result, which has one more than the argument."""


def from_the_first(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operator with dimensions counted from the first one.

    >>> from_the_first(aten.cumsum.default, (torch.ones(2, 3), -1))[1]
    1
    >>> from_the_first(aten.sum.dim_IntList, (torch.ones(2, 3), [-1, 0], True))[1:]
    ([1, 0], True)
    """
    places = [at for at in _dimensions(func) if at < len(args) and args[at] is not None]
    if not places:
        return args
    like = args[0][0] if isinstance(args[0], list | tuple) else args[0]
    sizes = next((args[at] for at, each in enumerate(func._schema.arguments) if each.name == "input_sizes"), like.shape)
    count = max(len(sizes) + (func in GAINING), 1)
    changed = list(args)
    for at in places:
        dims = args[at]
        changed[at] = dims % count if isinstance(dims, int) else [dim % count for dim in dims]
    return tuple(changed)


@cache
def _dimensions(func: Any) -> tuple[int, ...]:
    """Return the numbers of an operator's arguments that are dimensions of its first one."""
    names = {"dim", "dims", "dim0", "dim1", "dim2"}
    return tuple(at for at, each in enumerate(func._schema.arguments) if each.name in names and not each.kwarg_only)


def placement_of(x: Any) -> Placement:
    return x.placements[0] if isinstance(x, DTensor) else REPLICATE


def is_cut(x: Any, dim: int) -> bool:
    return isinstance(x, DTensor) and x.placements[0] == Shard(dim % x.ndim)


class PieceOperators:
    """Operations over the processes of a mesh of one dimension, on their pieces.

    A rule takes the arguments of its operator, with DTensors; it returns `NotImplemented` where DTensor's own does.

    Args:
        sequence: as of `Stage`.
    """

    def __init__(self, mesh: DeviceMesh, sequence: int | None) -> None:
        self.mesh, self.sequence = mesh, sequence
        self.count, self.rank = mesh.size(), mesh.get_local_rank()
        self.row_sums: dict[int, tuple[DTensor, Tensor]] = {}  # by identity; the first keeps it from being used again
        self.cut_tables: set[int] = set()  # numbers of rows of the embeddings whose rows are cut

    def has_tokens(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of a shape has tokens that the processes divide."""
        return self.sequence is not None and len(shape) == 3 and shape[self.sequence] % self.count == 0

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

    # Views

    def view(self, func: Any, x: Any, shape: Sequence[int]) -> Any:
        """View what is cut with more or fewer dimensions of size 1: the cut stays, where DTensor's rule gathers."""
        if not x.numel() or not isinstance(x, DTensor) or x.ndim == len(shape):
            return NotImplemented
        placement, sizes = placement_of(x), [x.numel() // -prod(shape) if size == -1 else size for size in shape]
        kept, old = ([dim for dim, size in enumerate(each) if size != 1] for each in (sizes, x.shape))
        if type(placement) is not Shard or [sizes[dim] for dim in kept] != [x.shape[dim] for dim in old]:
            return NotImplemented
        if placement.dim not in old or x.shape[placement.dim] % self.count:
            return NotImplemented
        dim = kept[old.index(placement.dim)]
        piece = [size // (self.count if at == dim else 1) for at, size in enumerate(sizes)]
        strides = [x.stride(old[kept.index(at)]) if at in kept else 1 for at in range(len(sizes))]
        return self.placed(x._local_tensor.reshape(piece), Shard(dim), sizes[dim], strides)

    # Layers that make several things at once, as queries, keys and values

    def split(self, func: Any, x: Any, sizes: Any, dim: int = 0) -> Any:
        """Split what is cut into parts each of which is cut: each process has its piece of each."""
        placement, dim = placement_of(x), dim % x.ndim
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
        is_even = all(is_cut(x, dim) and x.shape == first.shape for x in tensors)
        if not is_even or first.shape[dim] % self.count:
            return NotImplemented
        pieces = torch.cat([x._local_tensor for x in tensors], dim)
        return self.placed(pieces, _StridedShard(dim, split_factor=len(tensors)), len(tensors) * first.shape[dim])

    # Truth values

    def any(self, func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        placement, dims = placement_of(x), [dim] if isinstance(dim, int) else dim
        if type(placement) is not Shard or (dims is not None and placement.dim not in dims):
            return NotImplemented
        piece = func(x._local_tensor, *(() if func is aten.any.default else (dim, keepdim)))
        return self.placed(self.sum(piece.to(torch.uint8), "max").bool(), REPLICATE)

    # Random numbers

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        x, *rest = args
        placement = placement_of(x)
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
        if not is_cut(weight, 0):
            return self._embedding_by_token(func, weight, indices, padding, by_frequency, sparse)
        if sparse or by_frequency:
            raise Untraceable("an embedding whose rows are cut can't have sparse=True or scale_grad_by_freq=True")
        self.cut_tables.add(weight.shape[0])
        here, elsewhere, _ = self._rows_here(indices, weight.shape[0])
        part = func(weight._local_tensor, here.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.has_tokens(part.shape):
            return self.placed(part, SUM)
        return self.placed(self.sum(part), REPLICATE)

    def _embedding_by_token(self, func: Any, weight: Any, indices: Any, *rest: Any) -> Any:
        """Look up this process's tokens alone, in a table that every process has."""
        shape = [*indices.shape, weight.shape[-1]]
        if self.sequence is None or placement_of(weight) != REPLICATE or not self.has_tokens(shape):
            return NotImplemented
        cut = Shard(self.sequence)
        rows = func(weight._local_tensor, self.local(indices, cut), *rest)
        return self.placed(rows, cut, shape[cut.dim])

    def embedding_backward(
        self, func: Any, gradient: Any, indices: Any, size: int, padding: int, by_frequency: bool
    ) -> Any:
        if size not in self.cut_tables:
            placement = placement_of(gradient)
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
        if not is_cut(x, dim):
            return NotImplemented
        piece = x._local_tensor.float() if to_float else x._local_tensor
        dtype, piece = piece.dtype, piece.to(torch.promote_types(piece.dtype, torch.float32))
        shifted = piece - self.sum(piece.amax(dim, keepdim=True), "max")
        result = shifted - self.sum(shifted.exp().sum(dim, keepdim=True)).log()
        return self.placed(result.to(dtype), placement_of(x), x.shape[dim])

    def log_softmax_backward(self, func: Any, gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
        if not is_cut(output, dim):
            return NotImplemented
        placement = placement_of(output)
        piece = self.local(gradient, placement)
        if id(gradient) in self.row_sums:
            sums = self.row_sums[id(gradient)][1]
        else:
            sums = self.sum(piece.sum(dim, keepdim=True))
        result = piece - output._local_tensor.exp() * sums
        return self.placed(result.to(dtype), placement, output.shape[dim])

    def nll_loss(self, func: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
        if not is_cut(x, 1) or x.ndim != 2:
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
        if not is_cut(x, 1) or x.ndim != 2:
            return NotImplemented
        target, weights = self.local(target, REPLICATE), self._class_weights(x, target, weight, ignore)
        gradient = self.local(gradient, REPLICATE)
        each = -gradient * weights if reduction != 1 else -gradient * weights / self.local(total, REPLICATE)
        here, elsewhere, _ = self._rows_here(target, x.shape[1])
        piece = torch.zeros_like(x._local_tensor).scatter(
            1, here.masked_fill(elsewhere, 0).unsqueeze(1), each.masked_fill(elsewhere, 0).unsqueeze(1)
        )
        result = self.placed(piece, placement_of(x), x.shape[1])
        self.row_sums[id(result)] = result, each.unsqueeze(1)  # so that log_softmax need not add them
        return result

    def _class_weights(self, x: DTensor, target: Tensor, weight: Any, ignore: int) -> Tensor:
        """Return the weight of each row: that of its class, and 0 where the class is to be ignored."""
        ignored = target == ignore
        if weight is None:
            return torch.ones_like(target, dtype=x.dtype).masked_fill(ignored, 0)
        of_class: Tensor = self.local(weight, REPLICATE)[target.masked_fill(ignored, 0)]
        return of_class.masked_fill(ignored, 0)

    # Other losses

    def loss_backward(self, func: Any, *args: Any) -> Any:
        """Divide the gradient of a mean by the number of all elements, where DTensor takes that of a piece."""
        names = [each.name for each in func._schema.arguments]
        each = dict(zip(names, args, strict=False))
        is_cut = any(isinstance(x, DTensor) and x.placements[0] != REPLICATE for x in args[1:])
        if not is_cut or each.get("reduction", MEAN) != MEAN:
            return NotImplemented
        each["grad_output"] = each["grad_output"] / each["self"].numel()
        return func(**each | {"reduction": ADDED})

    # Attention on the CPU, which has no rule of DTensor's

    def attention(self, func: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        out, sums = func(*self._by_head(q, k, v), *args, **self._masked(q, kwargs))
        placement = placement_of(q)
        size = q.shape[placement.dim] if isinstance(placement, Shard) else None
        return self.placed(out, placement, size), self.placed(sums, placement, size)

    def attention_backward(
        self, func: Any, gradient: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, *args: Any, **kwargs: Any
    ) -> Any:
        placement = placement_of(q)
        dim = placement.dim if isinstance(placement, Shard) else None
        pieces = [self.local(x, placement) for x in (gradient, q, k, v, out, sums)]
        gradients = func(*pieces, *args, **self._masked(q, kwargs))
        return tuple(
            self.placed(x, placement, None if dim is None else like.shape[dim])
            for x, like in zip(gradients, (q, k, v), strict=True)
        )

    def _by_head(self, q: Any, k: Any, v: Any) -> list[Tensor]:
        placement = placement_of(q)
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
        mask, placement = kwargs.get("attn_mask"), placement_of(q)
        if mask is None:
            return dict(kwargs)
        is_cut = isinstance(placement, Shard) and mask.ndim == q.ndim and mask.shape[placement.dim] > 1
        return {**kwargs, "attn_mask": self.local(mask, placement if is_cut else REPLICATE)}


RULES: Mapping[Any, Callable[..., Any]] = {
    aten.embedding.default: PieceOperators.embedding,
    aten.embedding_dense_backward.default: PieceOperators.embedding_backward,
    aten.split.Tensor: PieceOperators.split,
    aten.split_with_sizes.default: PieceOperators.split,
    aten.cat.default: PieceOperators.cat,
    aten.view.default: PieceOperators.view,
    aten._unsafe_view.default: PieceOperators.view,
    aten.reshape.default: PieceOperators.view,
    aten.any.default: PieceOperators.any,
    aten.any.dim: PieceOperators.any,
    aten.any.dims: PieceOperators.any,
    aten._log_softmax.default: PieceOperators.log_softmax,
    aten._log_softmax_backward_data.default: PieceOperators.log_softmax_backward,
    aten.nll_loss_forward.default: PieceOperators.nll_loss,
    aten.nll_loss_backward.default: PieceOperators.nll_loss_backward,
    aten.mse_loss_backward.default: PieceOperators.loss_backward,
    aten.smooth_l1_loss_backward.default: PieceOperators.loss_backward,
    aten.huber_loss_backward.default: PieceOperators.loss_backward,
    aten.binary_cross_entropy_backward.default: PieceOperators.loss_backward,
    aten.soft_margin_loss_backward.default: PieceOperators.loss_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: PieceOperators.attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: PieceOperators.attention_backward,
}
