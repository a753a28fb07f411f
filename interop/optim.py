"""The optimizers of `torch.optim` as pairs of pure functions: init and update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe.tree import NAMESPACE

State = Any


class Optimizer(NamedTuple):
    """A pair of pure functions.

    Args:
        init: `params -> state`.
        update: `(grads, state, params, **options) -> (params, state)`; options such as `lr` hold for this
            call alone. What has no gradient (None) stays as it is.
    """

    init: Callable[[Any], State]
    update: Callable[..., tuple[Any, State]]


def optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Optimizer:
    """A functional optimizer out of a class of `torch.optim` and its options.

    The state is a pytree: for each parameter a dict of what the optimizer keeps for it, empty until its
    first update. Nothing is changed in place. For options of a group's own, such as no weight decay on biases,
    take an optimizer for each part of the params.

    Raises:
        TypeError: an optimizer that wants a closure, such as LBFGS.

    >>> init, update = optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> params = {0: {"w": torch.tensor([1.0, 2.0])}}
    >>> params, state = update({0: {"w": torch.tensor([1.0, 1.0])}}, init(params), params)
    >>> params[0]["w"], state[0]["w"]
    (tensor([0.5000, 1.5000]), {'momentum_buffer': tensor([1., 1.])})
    """
    if issubclass(kind, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the loss itself, which a pure update can't")

    def init(params: Any) -> State:
        return optree.tree_map(lambda p: {}, params, namespace=NAMESPACE)

    def update(grads: Any, state: State, params: Any, **changes: Any) -> tuple[Any, State]:
        leaves, spec = optree.tree_flatten(params, namespace=NAMESPACE)
        gradients = _matching(spec, grads, "grads")
        states = _matching(spec, state, "state")
        trained = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not trained:
            return params, state
        own = {i: leaves[i].detach().clone().requires_grad_() for i in trained}
        for i, parameter in own.items():
            parameter.grad = gradients[i]
        stepper = kind(own.values(), **{**options, **changes})
        for i, parameter in own.items():
            if states[i]:
                stepper.state[parameter] = {name: _copy(x) for name, x in states[i].items()}
        stepper.step()
        updated = [own[i].detach() if i in own else leaf for i, leaf in enumerate(leaves)]
        kept = [dict(stepper.state[own[i]]) if i in own else states[i] for i in range(len(leaves))]
        return spec.unflatten(updated), spec.unflatten(kept)

    return Optimizer(init, update)


def _matching(spec: optree.PyTreeSpec, tree: Any, what: str) -> list[Any]:
    try:
        return spec.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"{what} has another structure than params ({error}); grads and state go with the params they came from"
        ) from error


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
