"""Attention of a sequence whose tokens are cut over the ranks of a group: context parallelism.

The sequence is cut into twice as many parts as there are ranks. Rank r of n has part r and part 2n - 1 - r, an early
and a late one, so that under a causal mask all ranks have the same work (Striped Attention,
https://arxiv.org/abs/2311.09431, on why; this order is that of https://arxiv.org/abs/2407.21783, section 3.3.2).

Keys and values are gathered, or they go round a ring (https://arxiv.org/abs/2310.01889). Attention to blocks of keys is
merged by the logarithms of their sums of exponentials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import sqrt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fpipe.parallel.collectives import all_gather, run_all_to_all, run_collective
from fpipe.parallel.group import Group, named, rank_in
from fpipe.parallel.placed import check_apart, cut_apart_from, mesh_of, placed_like, replicated

aten = torch.ops.aten
Pair = tuple[Tensor, Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    ring: bool = False,
) -> Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`; there is no dropout of weights, and
    no mask but the causal one. Queries, keys and values are of this rank's tokens, in the order of `shard_sequence`.

    A graph has 2 all-gathers in the forward and 2 reduce-scatters in the backward, or with `ring` as many exchanges
    with the neighbours as there are ranks, less one, and twice that plus one; the weight gradients have none. Of heads
    that tensor parallelism cuts, each process attends with its own.

    Args:
        q: [batch, heads, tokens, width] of this rank's tokens; k and v likewise.
        group: the ranks that share the sequence; None for one process, which has the whole.
        scale: of the scores; 1 / sqrt(width) by default.
        enable_gqa: k and v have fewer heads, each for several consecutive heads of q.
        ring: pass keys and values round a ring, in which each rank has those of one other at a time, and keep no others
            for the backward; else gather them all.

    Raises:
        ValueError: tensors that do not fit, or, with `is_causal`, an odd number of tokens; or tensors that processes of
            the group place.
    """
    name, size = named(group)
    if size == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    heads = q.shape[-3] // k.shape[-3] if enable_gqa else 1
    if not q.dim() == k.dim() == v.dim() == 4 or q.shape[-3] != heads * k.shape[-3] or k.shape[:3] != v.shape[:3]:
        shapes = ", ".join(str([*x.shape]) for x in (q, k, v))
        raise ValueError(
            f"q, k and v have the shapes {shapes}: they must be [batch, heads, tokens, width], with equal heads or "
            "enable_gqa=True"
        )
    if is_causal and (q.shape[-2] % 2 or q.shape[-2] != k.shape[-2]):
        raise ValueError(
            f"q has {q.shape[-2]} tokens of this rank and k {k.shape[-2]}: with is_causal they have an early and a "
            "late part, equally long; cut the sequence by shard_sequence"
        )
    rank = rank_in(group)
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    function = _Ring if ring else _Gathered
    rest = name, rank, size, is_causal, scale

    def attended(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        return cast(Tensor, function.apply(q, k, v, *rest, heads))  # type: ignore[no-untyped-call]

    return _by_head(attended, q, k, v, heads, group)


def _by_head(
    function: Callable[[Tensor, Tensor, Tensor, int], Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, group: Group
) -> Tensor:
    """Apply a function to this process's heads or rows, where tensors are placed over processes beside the group's."""
    mesh = mesh_of((q, k, v))
    if mesh is None:
        return function(q, k, v, heads)
    check_apart(group, mesh)
    if k.shape[1] % mesh.size():  # each process needs those of its queries
        k, v, heads = _for_each_query_head(k, heads), _for_each_query_head(v, heads), 1
    placed: Any = cut_apart_from(replicated(q, mesh), {2, 3})
    cuts = placed.placements
    q, k, v = (replicated(x, mesh).redistribute(placements=cuts).to_local(grad_placements=cuts) for x in (placed, k, v))
    return placed_like(function(q, k, v, heads), placed)


def shard_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Return this rank's tokens of a whole sequence: an early and a late part.

    Args:
        dim: that of the tokens.

    Raises:
        ValueError: its length is no multiple of twice the number of ranks.
    """
    size = named(group)[1]
    if size == 1:
        return x
    if x.shape[dim] % (2 * size):
        raise ValueError(
            f"a sequence of {x.shape[dim]} tokens can't be cut over {size} ranks, each of which has two parts of equal "
            f"length: pad it to a multiple of {2 * size}"
        )
    rank, parts = rank_in(group), x.chunk(2 * size, dim)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]], dim)


def unshard_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Return the whole sequence out of each rank's tokens, in order; undoes `shard_sequence`.

    Args:
        dim: that of the tokens.
    """
    size = named(group)[1]
    if size == 1:
        return x
    parts = all_gather(x, group, dim).chunk(2 * size, dim)
    return torch.cat([*parts[::2], *parts[::-2]], dim)


def positions(tokens: int, group: Group, device: torch.device | str | None = None) -> Tensor:
    """Return the positions in the whole sequence of this rank's tokens, for rotary or learned embeddings.

    Args:
        tokens: how many this rank has.

    Returns:
        Integers, [tokens].
    """
    return shard_sequence(torch.arange(tokens * named(group)[1], device=device), group, 0)


# Attention to one block of keys


def _block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, heads: int) -> Pair:
    """Return the attention to a block, and the logarithm of each query's sum of exponentials; float32 at least."""
    k, v = _for_each_query_head(k, heads), _for_each_query_head(v, heads)
    if _is_flash_on_cuda(q, v):
        out, sums, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    elif _is_flash_on_cpu(q, v):
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        scores = _scores(q, k, causal, scale)
        sums = scores.logsumexp(-1)
        out = (scores - sums.unsqueeze(-1)).exp().to(v.dtype) @ v
    return out.to(_accumulated(out)), sums


def _block_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool, scale: float, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values by one block.

    Args:
        out, sums: of the attention to all blocks.
    """
    k, v = _for_each_query_head(k, heads), _for_each_query_head(v, heads)
    saved = gradient, q, k, v, out, sums
    if _is_flash_on_cuda(q, v):
        sizes, no_dropout = (None, None, q.shape[-2], k.shape[-2], 0.0), q.new_empty(2, dtype=torch.uint64)
        states = no_dropout, q.new_empty(0, dtype=torch.uint64)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(*saved, *sizes, causal, *states, scale=scale)
    elif _is_flash_on_cpu(q, v):
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, causal, scale=scale)
    else:
        weights = (_scores(q, k, causal, scale) - sums.unsqueeze(-1)).exp()
        dv = weights.to(v.dtype).transpose(-1, -2) @ gradient
        change = gradient @ v.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True)
        of_scores = (weights * change * scale).to(q.dtype)
        dq, dk = of_scores @ k, of_scores.transpose(-1, -2) @ q
    dq, dk, dv = (x.to(_accumulated(x)) for x in (dq, dk, dv))
    return dq, _of_each_key_head(dk, heads), _of_each_key_head(dv, heads)


def _is_flash_on_cuda(q: Tensor, v: Tensor) -> bool:
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and is_half and q.shape[-1] == v.shape[-1] <= 256


def _is_flash_on_cpu(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(_accumulated(q)) * scale
    if not causal:
        return scores
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf"))


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _for_each_query_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads, -3) if heads > 1 else x


def _of_each_key_head(x: Tensor, heads: int) -> Tensor:
    return torch.unflatten(x, -3, (-1, heads)).sum(-3) if heads > 1 else x


def _merged(a: Pair, b: Pair) -> Pair:
    """Return the attention to the keys of two blocks together; `b` may be of the last queries alone."""
    (out, sums), (other, others) = a, b
    first = sums.shape[-1] - others.shape[-1]
    if first:
        rest = _merged((out[..., first:, :], sums[..., first:]), b)
        return torch.cat([out[..., :first, :], rest[0]], -2), torch.cat([sums[..., :first], rest[1]], -1)
    total = torch.logaddexp(sums, others)
    return out * (sums - total).exp().unsqueeze(-1) + other * (others - total).exp().unsqueeze(-1), total


def _attended(q: Tensor, blocks: Iterable[tuple[slice, Tensor, Tensor, bool]], scale: float, heads: int) -> Pair:
    """Return the attention to the keys of all blocks together, in the dtype of the queries, and its sums."""
    total: Pair | None = None
    for queries, keys, values, masked in blocks:
        block = _block(q[..., queries, :], keys, values, masked, scale, heads)
        total = block if total is None else _merged(total, block)
    assert total is not None
    return total[0].to(q.dtype), total[1]


def _padded(dq: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of the last queries, with zeros for those before."""
    missing = like.shape[-2] - dq.shape[-2]
    return F.pad(dq, (0, 0, missing, 0)) if missing else dq


# Gathered


class _Gathered(torch.autograd.Function):
    """A rank gathers all keys, and attends to them in up to three blocks: its own, those of earlier, of later ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        name: str,
        rank: int,
        size: int,
        causal: bool,
        scale: float,
        heads: int,
    ) -> Tensor:
        ctx.rest = name, rank, size, causal, scale, heads
        keys, values = (_of_ranks(run_collective("all_gather_into_tensor", x, size, name), size) for x in (k, v))
        blocks = (
            (queries, _tokens(keys, ranks, tokens), _tokens(values, ranks, tokens), masked)
            for queries, ranks, tokens, masked in _blocks(q.shape[-2], rank, size, causal)
        )
        out, sums = _attended(q, blocks, scale, heads)
        ctx.save_for_backward(q, keys, values, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, keys, values, out, sums = ctx.saved_tensors
        name, rank, size, causal, scale, heads = ctx.rest
        dq, parts = None, dict[int, Pair]()
        for queries, ranks, tokens, masked in _blocks(q.shape[-2], rank, size, causal):
            at_queries = gradient[..., queries, :], q[..., queries, :]
            read = _tokens(keys, ranks, tokens), _tokens(values, ranks, tokens)
            all_keys = out[..., queries, :], sums[..., queries]
            own, *others = _block_backward(*at_queries, *read, *all_keys, masked, scale, heads)
            dq = _padded(own, q) if dq is None else dq + _padded(own, q)
            missing = keys.shape[-2] - keys[..., tokens, :].shape[-2]
            dk, dv = (
                [F.pad(y, (0, 0, 0, missing)) for y in torch.unflatten(x, -2, (len(ranks), -1)).unbind(-3)]
                for x in others
            )
            parts |= dict(zip(ranks, zip(dk, dv, strict=True), strict=True))
        assert dq is not None
        summed = []
        for each, like in zip(zip(*(parts[r] for r in range(size)), strict=True), (keys, values), strict=True):
            whole = torch.cat(each).to(like.dtype)
            summed.append(run_collective("reduce_scatter_tensor", whole, "sum", size, name))
        return dq.to(q.dtype), *summed, *[None] * 6


def _of_ranks(x: Tensor, size: int) -> Tensor:
    """Return gathered tensors as [ranks, batch, ...]."""
    return torch.unflatten(x, 0, (size, -1))


def _tokens(x: Tensor, ranks: range, tokens: slice) -> Tensor:
    """Return tokens of some ranks, [batch, heads, tokens of all of them, width]."""
    return x[ranks.start : ranks.stop, ..., tokens, :].movedim(0, -3).flatten(-3, -2)


def _blocks(tokens: int, rank: int, size: int, causal: bool) -> Iterator[tuple[slice, range, slice, bool]]:
    """Yield which queries attend to which tokens of which ranks, and whether under a mask; the first are all queries.

    Both parts of this rank attend to the early parts of earlier ranks, its late part to all of later ranks.
    """
    every, half = slice(None), tokens // 2
    if not causal:
        yield every, range(size), every, False
        return
    yield every, range(rank, rank + 1), every, True
    if rank > 0:
        yield every, range(rank), slice(half), False
    if rank < size - 1:
        yield slice(half, None), range(rank + 1, size), every, False


# Round a ring


class _Ring(torch.autograd.Function):
    """In each turn a rank attends to the keys that it has, while the next ones are on their way."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        name: str,
        rank: int,
        size: int,
        causal: bool,
        scale: float,
        heads: int,
    ) -> Tensor:
        ctx.rest = name, rank, size, causal, scale, heads
        out, sums = _attended(q, _turns(q.shape[-2], (k, v), name, rank, size, causal), scale, heads)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        name, rank, size, causal, scale, heads = ctx.rest
        dq: Tensor | None = None
        gradients: Pair | None = None  # of the keys and values that are here, by the ranks where they were before
        for queries, keys, values, masked in _turns(q.shape[-2], (k, v), name, rank, size, causal):
            at_queries = gradient[..., queries, :], q[..., queries, :]
            all_keys = out[..., queries, :], sums[..., queries]
            own, *others = _block_backward(*at_queries, keys, values, *all_keys, masked, scale, heads)
            dq = _padded(own, q) if dq is None else dq + _padded(own, q)
            missing = k.shape[-2] - others[0].shape[-2]
            dk, dv = (F.pad(x, (0, 0, 0, missing)) if missing else x for x in others)
            added = (dk, dv) if gradients is None else (gradients[0] + dk, gradients[1] + dv)
            gradients = _passed_on(added, name, rank, size)
        assert dq is not None
        assert gradients is not None
        return dq.to(q.dtype), gradients[0].to(k.dtype), gradients[1].to(v.dtype), *[None] * 6


def _turns(
    tokens: int, pair: Pair, name: str, rank: int, size: int, causal: bool
) -> Iterator[tuple[slice, Tensor, Tensor, bool]]:
    """Yield queries, the keys and values of each rank to which they attend, and whether under a mask.

    The next keys and values are sent before those that are here are yielded.
    """
    here = coming = pair
    for turn in range(size):
        if turn < size - 1:
            coming = _passed_on(here, name, rank, size)
        queries, read, masked = _block_of(tokens, rank, (rank - turn) % size, causal)
        yield queries, here[0][..., read, :], here[1][..., read, :], masked
        here = coming


def _block_of(tokens: int, rank: int, source: int, causal: bool) -> tuple[slice, slice, bool]:
    """Return which queries attend to which tokens of a rank, and whether under a mask."""
    every, half = slice(None), tokens // 2
    if not causal or rank == source:
        return every, every, causal
    return (every, slice(half), False) if source < rank else (slice(half, None), every, False)


def _passed_on(pair: Pair, name: str, rank: int, size: int) -> Pair:
    """Send two tensors to the next rank in one message; return those of the rank before."""
    flat = torch.cat([x.reshape(-1) for x in pair])
    sent, received = [0] * size, [0] * size
    sent[(rank + 1) % size] = received[rank - 1] = flat.numel()
    first, second = run_all_to_all(flat, received, sent, name).split_with_sizes([x.numel() for x in pair])
    return first.view(pair[0].shape), second.view(pair[1].shape)
