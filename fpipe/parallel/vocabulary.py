"""A language model whose embedding and output layer are split over all ranks of a pipeline, by rows of the vocabulary.

Each rank has a part of both, beside its block of layers, so that a large vocabulary makes no rank slower than others,
and that logits of all of it are on no rank. The parts are stages like others: their outputs and gradients travel over
the edges of the pipeline. `schedules.vocabulary_1f1b` orders them.

Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism (https://arxiv.org/abs/2411.05288).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fpipe.errors.arguments import checked_class
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import Batch, Output, Stage

Block = Callable[[Any, Tensor], Tensor]
TOKENS, TARGETS = Batch("tokens"), Batch("targets")


@checked_class()
@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary that is split over the ranks of a pipeline, in parts of equal size, or of one row more.

    Args:
        size: its tokens.
        ranks: of the pipeline.
        tied: the output layer's matrix is the embedding's. Both parts are on one rank, so that nothing is sent for it.
        ignore_index: the target of a token that the loss ignores.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        reduction: of the losses of a microbatch's tokens; as `value_and_grad(reduction=)` is told.

    Raises:
        ValueError: fewer tokens than ranks, or a smoothing that is not between 0 and 1.

    >>> Vocabulary(size=10, ranks=4).sizes
    (3, 3, 2, 2)
    """

    size: int
    ranks: int
    tied: bool = True
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= self.size:
            raise ValueError(f"size={self.size} tokens can't be split over ranks={self.ranks}: each needs one at least")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be a number from 0 to 1, not {self.label_smoothing!r}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each part."""
        least, more = divmod(self.size, self.ranks)
        return tuple(least + (rank < more) for rank in range(self.ranks))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each part."""
        return tuple(sum(self.sizes[:rank]) for rank in range(self.ranks))

    def pipeline(self, blocks: Sequence[Block], tokens: Batch = TOKENS, targets: Batch = TARGETS) -> Pipeline:
        """Return the pipeline of `Placement.vocabulary(ranks)`, whose last output is the loss.

        Its stages are the parts of the embedding, the blocks, the parts of the output layer, and the loss: cross
        entropy, as `torch.nn.functional.cross_entropy` has it. A token or a target that is not in the vocabulary fails.

        Args:
            blocks: `fn(params, x) -> x` for each rank: the first gets the embeddings, the last returns what the output
                layer reads, of shape [..., width].
            tokens: where they are in the batch: integers of any shape.
            targets: likewise, of the same shape. The step's own target is for `value_and_grad(weight=)` alone.

        Raises:
            ValueError: another number of blocks than ranks.
        """
        if len(blocks) != self.ranks:
            raise ValueError(f"there are {len(blocks)} blocks for {self.ranks} ranks: give one for each")
        p, parts = self.ranks, [*zip(self.starts, self.sizes, strict=True)]
        first, *others = blocks
        stages = [Stage(partial(self._embed, start, size), [tokens]) for start, size in parts]
        stages.append(Stage(partial(_added, first), [Output(part) for part in range(p)]))
        stages += [Stage(block, [Output(p + at)]) for at, block in enumerate(others)]
        last = Output(2 * p - 1)
        stages += [Stage(partial(self._score, start, size), [last, targets]) for start, size in parts]
        stages.append(Stage(self._loss, [targets, *(Output(2 * p + part) for part in range(p))]))
        ties = {(2 * p + part, "weight"): (part, "weight") for part in range(p)} if self.tied else {}
        return Pipeline(stages, ties=ties)

    def split(self, embedding: Tensor, blocks: Sequence[Any], head: Tensor | None = None) -> dict[int, Any]:
        """Return the params of all stages.

        Args:
            embedding: of shape [size, width].
            blocks: the params of each.
            head: the output layer's matrix, of shape [size, width]; None if it is tied.

        Raises:
            ValueError: a matrix has another number of rows, or there is a head where it is tied, or none.
        """
        if (head is None) != self.tied:
            raise ValueError("a tied output layer has no matrix of its own" if self.tied else "the head is missing")
        for name, matrix in {"embedding": embedding, "head": head}.items():
            if matrix is not None and len(matrix) != self.size:
                raise ValueError(f"the {name} has {len(matrix)} rows, and the vocabulary {self.size} tokens")
        parts = [{"weight": part} for part in torch.split(embedding, [*self.sizes])]
        heads = [{}] * self.ranks if head is None else [{"weight": part} for part in torch.split(head, [*self.sizes])]
        return dict(enumerate([*parts, *blocks, *heads, {}]))

    def join(self, params: Mapping[int, Any]) -> tuple[Tensor, list[Any], Tensor | None]:
        """Return the embedding, the blocks' params and the head of all stages' params, or of their gradients.

        The reverse of `split`.
        """
        p = self.ranks

        def matrix(stages: range) -> Tensor:
            return torch.cat([params[stage]["weight"] for stage in stages])

        head = None if self.tied else matrix(range(2 * p, 3 * p))
        return matrix(range(p)), [params[stage] for stage in range(p, 2 * p)], head

    def _embed(self, start: int, size: int, params: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Return the rows of the tokens that are in a part, and zeros for others."""
        row = self._known(tokens) - start
        rows = torch.nn.functional.embedding(row.clamp(0, size - 1), params["weight"])
        return torch.where(_within(row, size).unsqueeze(-1), rows, 0)

    def _score(self, start: int, size: int, params: Mapping[str, Tensor], x: Tensor, targets: Tensor) -> Any:
        """Return of each token, over a part: the logarithm of the sum of exponentials, its target's logit, the sum."""
        row = targets.flatten() - start
        scores: tuple[Tensor, ...] = _Scores.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), params["weight"], row.clamp(0, size - 1), _within(row, size), self.label_smoothing > 0
        )
        return scores[:3] if self.label_smoothing else scores[:2]

    def _loss(self, params: Any, targets: Tensor, *scores: tuple[Tensor, ...]) -> Tensor:
        sums, at_target, *totals = (torch.stack(parts) for parts in zip(*scores, strict=True))
        norm = sums.logsumexp(0)
        losses = norm - at_target.sum(0)
        if self.label_smoothing:
            smooth = norm - totals[0].sum(0) / self.size
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * smooth
        targets = targets.flatten()
        counts = targets != self.ignore_index
        known = self._known(torch.where(counts, targets, 0))
        loss = torch.where(counts & (known >= 0), losses, 0).sum()
        return loss if self.reduction == "sum" else loss / counts.sum()

    def _known(self, tokens: Tensor) -> Tensor:
        """Return the tokens as they are; fail for one that is not in the vocabulary, as all parts would ignore it."""
        every = torch.arange(self.size, device=tokens.device)
        return every.index_select(0, tokens.flatten()).view(tokens.shape)


def _added(block: Block, params: Any, *parts: Tensor) -> Tensor:
    """Run the first block on the embeddings: of each token, one part's are not zeros."""
    first, *others = parts
    return block(params, sum(others, first))


def _within(row: Tensor, size: int) -> Tensor:
    return (row >= 0) & (row < size)


class _Scores(torch.autograd.Function):
    """A part of the output layer, whose forward leaves little for the gradient of x, which all other ranks wait for.

    The gradient of the logarithm of the sum is the mean of the matrix's rows by the part's softmax. It is computed at
    once, and only multiplied later (arXiv 2411.05288, section 4.4); the weight gradient is not urgent.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, row: Tensor, is_here: Tensor, smooth: bool) -> tuple[Tensor, ...]:
        logits = x @ weight.T
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = logits.amax(-1, keepdim=True)
        powers = (logits - largest).exp()
        total = powers.sum(-1, keepdim=True)  # of an entry at least 1
        norm = (largest + total.log()).squeeze(-1)
        at_target = torch.where(is_here, logits.gather(-1, row.unsqueeze(-1)).squeeze(-1), 0)
        powers, share = powers.to(x.dtype), (1 / total).to(x.dtype)
        return (
            norm,
            at_target,
            logits.sum(-1) if smooth else torch.zeros_like(norm),
            powers,
            share,
            (powers @ weight) * share,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.smooth = inputs
        ctx.save_for_backward(*tensors, *output[3:])
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, row, is_here, powers, share, mean = ctx.saved_tensors
        by_norm, by_target, by_sum, *_ = (each.to(x.dtype).unsqueeze(-1) for each in cotangents)
        by_target = torch.where(is_here.unsqueeze(-1), by_target, 0)
        for_x = by_norm * mean + by_target * weight.index_select(0, row)
        for_weight = (powers.T @ (by_norm * share * x)).index_add(0, row, by_target * x)
        if ctx.smooth:
            for_x, for_weight = for_x + by_sum * weight.sum(0), for_weight + (by_sum * x).sum(0)
        return for_x, for_weight, None, None, None
