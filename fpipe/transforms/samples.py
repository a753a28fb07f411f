"""Gradients of each sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
from torch import Tensor

from fpipe.errors.arguments import checked
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import NAMESPACE
from fpipe.stages.stage import Stage
from fpipe.transforms.mapped import Axes, Randomness, is_mapped, marked, unmapped, vectorized_pipeline
from fpipe.transforms.wrapping import check


@checked("pipeline")
def per_sample(
    pipeline: Pipeline, in_dims: Any = 0, *, randomness: Randomness = "error", has_aux: bool = False
) -> Pipeline:
    """Return a pipeline whose steps compute the gradients of each sample's own loss, and don't add them.

    Each stage and the loss run as `torch.func.vmap` over the samples, as if each were a microbatch of one. The gradient
    of a param of shape [...] has the shape [rows, ...], with a row for each sample in the order of the batch; a step
    holds all of them, which takes the memory of the params times the samples.

    The result is `(loss, losses)`: the sum of the samples' losses, and the losses, of shape [rows]. Pass has_aux=True
    and reduction="sum" to `value_and_grad`. It takes no replicas.

    Args:
        in_dims: the samples' axis in the batch and the target, or a pair of axes or prefix trees for them, as
            `value_and_grad(in_axes=)`; leaves with None are the same for all.
        randomness: of stages that draw, as in `torch.func.vmap`: each sample draws its own numbers ("different"), all
            draw the same ("same"), or a draw is an error.
        has_aux: the pipeline's loss returns `(loss, aux)`, and the result is `(loss, (losses, aux))`; tensors in aux
            have the samples along axis 0.

    As a pure function, the pipeline has the sum of the losses, and so the sum of their gradients.

    Raises:
        ValueError: a stage is stateful: its state would depend on the other samples.

    >>> import torch
    >>> from fpipe import Placement, handlers, value_and_grad
    >>> pipeline = per_sample(Pipeline([lambda p, x: x * p], loss=lambda y, t: (y - t).square().sum()))
    >>> plan = pipeline.plan(Placement.loop(1), microbatches=2)
    >>> step = value_and_grad(pipeline, "gpipe", plan, handler=handlers.Local(), has_aux=True, reduction="sum")
    >>> step({0: torch.tensor(1.0)}, torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3))
    ((tensor(14.), tensor([1., 4., 9.])), {0: tensor([ 2.,  8., 18.])})
    """
    check(pipeline)
    for number, stage in enumerate(pipeline.stages):
        if stage.stateful:
            raise ValueError(
                f"stage {number} is stateful, and a state, as of batch norm, is of all samples: take a layer "
                "without one, such as group norm or layer norm"
            )
    dims = in_dims if isinstance(in_dims, tuple) else (in_dims, in_dims)
    if len(dims) != 2:
        raise ValueError(f"in_dims must be one axis, or a pair for batch and target, not {in_dims!r}")
    axes = Axes(0, *dims, keep=True, out=0)

    def result(losses: Tensor, aux: Any) -> Any:
        return losses.sum(), (losses, unmapped(aux, lambda x: x)) if has_aux else losses

    twin = vectorized_pipeline(pipeline, axes, randomness, result, has_aux)
    stages = [replace(stage, rows=_rows(number, stage, axes)) for number, stage in enumerate(twin.stages)]
    twin = twin.replace(stages, twin.loss)
    twin.no_update = "they are the rows of samples"
    return twin


def _rows(number: int, stage: Stage, axes: Axes) -> Callable[..., int]:
    reads = stage.inputs

    def rows(*inputs: Any) -> int:
        for x, read in zip(inputs, reads, strict=False):  # the last stage gets the target as well
            tree = marked(x, axes.of_read(read), "batch")
            for leaf in optree.tree_leaves(tree, is_leaf=is_mapped, namespace=NAMESPACE):
                if is_mapped(leaf):
                    return int(leaf.value.shape[0])
        raise TypeError(
            f"stage {number} reads nothing that has samples, so its params have no gradient for each of them"
        )

    return rows
