"""Forward mode of a pipeline: Jacobian-vector products, and Hessian-vector products by reverse over forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fpipe.errors.arguments import checked
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import Stage
from fpipe.transforms.duals import Dual, is_dual, primals, pushforward
from fpipe.transforms.wrapping import check, with_functions


@checked("pipeline")
def jvp(pipeline: Pipeline, loss: Callable[..., Any] | None = None, *, has_aux: bool = False) -> Pipeline:
    """Return a pipeline that pushes tangents through its stages, beside the values.

    Params, batch and target may have a `Dual` in place of any tensor; `dual` makes such trees. A stage that reads one
    returns one for each tensor, and a stage that reads none runs as it is. Gradients have the params' structure: they
    are those of the result with respect to values and tangents, by reverse over forward.

    Args:
        loss: `loss(output, target) -> loss | (loss, aux)`, which gets the last stage's output with its tangents: a
            forward-mode loss. By default the pipeline's own loss is pushed forward as well, and the result is
            `(loss, tangent)`: pass has_aux=True to `value_and_grad`, which differentiates the loss. Of several
            microbatches, the tangents are stacked.
        has_aux: the pipeline's own loss returns `(loss, aux)`, and the result is `(loss, (tangent, aux))`.

    The state of a stateful stage has no tangents: a new state is that of the values.

    >>> pipeline = jvp(Pipeline([lambda p, x: x * p], loss=lambda y, t: (y - t).square().sum()))
    >>> pipeline({0: torch.tensor(2.0)}, Dual(torch.tensor(3.0), torch.tensor(1.0)), torch.tensor(0.0))
    (tensor(36.), tensor(24.))
    """
    check(pipeline)
    if loss is not None and has_aux:
        raise ValueError("has_aux says what the pipeline's own loss returns: leave it out with a loss of jvp")
    return _pushed(pipeline, loss or _own_loss(pipeline, has_aux))


@checked("pipeline")
def hvp(pipeline: Pipeline, *, has_aux: bool = False) -> Pipeline:
    """Return a pipeline whose gradient is a Hessian-vector product, by reverse over forward.

    With the vector as the params' tangents, `step(dual(params, vector), batch, target)` returns the loss, and as the
    gradient of each param `Dual(Hv, gradient)`, of the batch's loss: `primals(grads)` has the products, and
    `tangents(grads)` the gradients; both are None for a frozen param. It takes the time and
    memory of differentiating twice as many values.

    Args:
        has_aux: the pipeline's loss returns `(loss, aux)`.

    >>> pipeline = hvp(Pipeline([lambda p, x: x * p], loss=lambda y, t: y.pow(3).sum()))
    >>> params = {0: Dual(torch.tensor(2.0), torch.tensor(1.0))}
    >>> torch.func.grad(pipeline)(params, torch.tensor([1.0]), None)  # 6 p and 3 p^2
    {0: Dual(primal=tensor(12.), tangent=tensor(12.))}
    """
    check(pipeline)
    pushed = _own_loss(pipeline, has_aux, needs_tangent=True)

    def slope(output: Any, target: Any) -> Any:
        loss, more = pushed(output, target)
        tangent, aux = more if has_aux else (more, None)
        loss = (tangent - tangent.detach()) + loss.detach()  # the loss in value, its tangent in the gradient
        return (loss, aux) if has_aux else loss

    twin = _pushed(pipeline, slope)
    twin.no_update = "its gradients are Dual(Hv, gradient)"
    return twin


def _own_loss(
    pipeline: Pipeline, has_aux: bool, needs_tangent: bool = False
) -> Callable[[Any, Any], tuple[Tensor, Any]]:
    """Return a function that returns the loss of outputs with tangents, and its tangent; beside it aux, if any."""
    function = pushforward(pipeline.loss or _output)

    def loss(output: Any, target: Any) -> tuple[Tensor, Any]:
        result = function(output, target)
        value, aux = result if has_aux else (result, None)
        if not is_dual(value):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"the loss must be a tensor, not {type(value).__name__}; has_aux=True takes (loss, aux)"
                )
            if needs_tangent:
                raise ValueError("no tangent reaches the loss: pass the params as transforms.dual(params, vector)")
            value = Dual(value, torch.zeros_like(value))
        return value.primal, (value.tangent, primals(aux)) if has_aux else value.tangent

    return loss


def _output(output: Any, target: Any) -> Any:
    return output


def _pushed(pipeline: Pipeline, loss: Callable[..., Any]) -> Pipeline:
    return with_functions(pipeline, _stage, loss)


def _stage(index: int, stage: Stage) -> Callable[..., Any]:
    function = pushforward(stage.fn)
    if not stage.stateful:
        return function

    def stateful(params: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        outputs, new = function(params, state, *inputs)
        return outputs, primals(new)

    return stateful
