"""Ensembles: a pipeline over params that have a dimension of members."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fpipe.errors.arguments import checked
from fpipe.stages.pipeline import Pipeline
from fpipe.transforms.mapped import Axes, Randomness, unmapped, vectorized_pipeline
from fpipe.transforms.wrapping import check


@checked("pipeline")
def vmap(
    pipeline: Pipeline,
    in_dims: Any = (0, None, None),
    out_dims: int = 1,
    *,
    randomness: Randomness = "error",
    has_aux: bool = False,
) -> Pipeline:
    """Return a pipeline over an ensemble: `torch.func.vmap` of every stage and of the loss.

    The result is `(loss, losses)`: the sum of the members' losses, so that each member gets its own gradients, and the
    losses, of shape [1, members]. Pass has_aux=True to `value_and_grad`, which merges them to [microbatches, members].

    Args:
        in_dims: the members' axis in (params, batch, target), or one for all three: an axis, None (all members have the
            same), or a prefix tree of these. By default each member has its own params, stacked along axis 0, and all
            have the same data. `value_and_grad(in_axes=)` must split the batch along another axis.
        out_dims: the members' axis in the last stage's outputs and in aux, where a tensor has so many dimensions; by
            default behind that of the samples, along which microbatches are merged.
        randomness: of stages that draw, as in `torch.func.vmap`: each member draws its own numbers ("different"), all
            draw the same ("same"), or a draw is an error.
        has_aux: the pipeline's loss returns `(loss, aux)`, and the result is `(loss, (losses, aux))`. A number of each
            member in aux has the shape [1, members].

    The state of stateful stages is stacked along axis 0. A stage that reads nothing of the members, such as a trunk
    that all of them share, runs once.

    >>> import torch
    >>> pipeline = vmap(Pipeline([lambda p, x: x * p], loss=lambda y, t: (y - t).square().sum()))
    >>> pipeline({0: torch.tensor([1.0, 2.0])}, torch.tensor([3.0]), torch.tensor([0.0]))
    (tensor(45.), tensor([[ 9., 36.]]))
    """
    check(pipeline)
    dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * 3
    if len(dims) != 3:
        raise ValueError(f"in_dims must be one axis, or three for params, batch and target, not {in_dims!r}")
    if out_dims < 0:
        raise ValueError(f"out_dims must count from the front, not {out_dims}: microbatches are merged along an axis")
    axes = Axes(*dims, keep=False, out=out_dims)

    def result(losses: Tensor, aux: Any) -> Any:
        if not has_aux:
            return losses.sum(), losses[None]
        aux = unmapped(aux, lambda x: x[None] if x.ndim == 1 else x.movedim(0, axes.last(x)))
        return losses.sum(), (losses[None], aux)

    return vectorized_pipeline(pipeline, axes, randomness, result, has_aux)
