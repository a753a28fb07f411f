"""Autodiff of a stage whose params get a gradient for each row of a microbatch, rather than the sum of all.

The stage's function is given its params expanded by a dimension of rows, which takes no memory: the gradients of the
expanded params are the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe.autodiff.graph.block import Sink
from fpipe.autodiff.interface import DifferentiableStage, Leaves, Prepared, WeightGradients
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Flat
from fpipe.stages.stage import Stage, expanded


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Residuals, or deferred values, with the expanded params that they belong to."""

    content: Any
    params: Prepared


class ByRow:
    """Autodiff of a stage by rows.

    Args:
        stage: with `rows`.
        each: the autodiff of its function.
    """

    def __init__(self, stage: Stage, each: DifferentiableStage) -> None:
        self.stage, self.each = stage, each

    def prepare(self, params: Any) -> Prepared:
        return self.each.prepare(params)

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        inputs = self.stage.arguments({s: value.tree for s, value in sources.items()}, self.stage.given(data))
        params = by_row(prepared, self.stage.count(inputs))
        outputs, residuals, new = self.each.forward(params, state, sources, data, keep)
        return outputs, SavedRows(residuals, params) if keep else None, new

    def backward(
        self, residuals: SavedRows, cotangents: Leaves, sink: Sink | None = None
    ) -> tuple[WeightGradients, dict[int, Leaves]]:
        weights, inputs = self.each.backward(residuals.content, cotangents)
        return _filled(weights, residuals.params), inputs

    def backward_input(self, residuals: SavedRows, cotangents: Leaves) -> tuple[dict[int, Leaves], SavedRows]:
        inputs, deferred = self.each.backward_input(residuals.content, cotangents)
        return inputs, SavedRows(deferred, residuals.params)

    def backward_weight(self, deferred: SavedRows, sink: Sink | None = None) -> WeightGradients:
        return _filled(self.each.backward_weight(deferred.content), deferred.params)


def by_row(prepared: Prepared, rows: int) -> Prepared:
    """Return a stage's params expanded by a dimension of rows; the same for each microbatch of as many rows."""
    key = ByRow, rows
    if key not in prepared.computed:
        leaves = expanded(prepared.leaves, rows)
        prepared.computed[key] = Prepared(leaves, prepared.spec, prepared.trained, prepared.paths)
    params: Prepared = prepared.computed[key]
    return params


def rows_of(gradient: Tensor | None, param: Tensor) -> Tensor:
    """Return the gradients of an expanded param: -0.0 if there are none, since every microbatch has its rows."""
    return gradient if gradient is not None else torch.full(param.shape, -0.0, dtype=param.dtype, device=param.device)


def _filled(weights: WeightGradients, params: Prepared) -> WeightGradients:
    leaves = [rows_of(x, params.leaves[i]) for x, i in zip(weights, params.trained, strict=True)]
    return WeightGradients(leaves, weights.fresh)
