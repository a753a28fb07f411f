"""A training step: loss, gradients and the optimizer's update as one function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fpipe.devices import CaptureError
from fpipe.errors import StageError
from fpipe.handlers.protocol import Handler
from fpipe.plan import Plan, Schedule
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.rng import Rng
from fpipe.training.norms import clip_by_global_norm, clip_in_a_graph
from fpipe.training.step import Arguments, Computed, Step
from fpipe.training.verbs import value_and_grad

Optimizer = tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]
"""`init(params) -> state` and `update(grads, state, params, **options) -> (params, state)`, both pure."""


def train_step(
    pipeline: Pipeline,
    schedule: Schedule | str,
    plan: Plan,
    optimizer: Optimizer,
    *,
    handler: Handler,
    max_norm: float | Tensor | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Return a function that computes the loss and its gradients, and updates the params.

    Args:
        optimizer: the pair `(init, update)` of `interop.optimizer`, or another pair of such functions. With
            `donate=True` a step reuses the memory of `params` and `opt_state`, which must not be used again.
        max_norm: clip the gradients to this norm over the whole pipeline, as `clip_by_global_norm` does.
        options: those of `value_and_grad`.

    Returns:
        `step(params, opt_state, batch, target=None, *, state=None, rng=None, **changes) -> (params, opt_state, loss)`.
        With `has_aux`, `(loss, aux)` stands in place of the loss; with `max_norm`, the norm before clipping follows;
        with stateful stages, the new state is the last element. `changes` are options of the optimizer for this call
        only, such as `lr`. The results have the bits of `value_and_grad`, `clip_by_global_norm` and `update` called
        one after the other.

    Raises:
        ScheduleError, StageError, TransportError: as `value_and_grad`; nothing is then updated.
        ValueError: (at once) as `value_and_grad`; or `argnums` is given.

    >>> import torch
    >>> from fpipe import Pipeline, Placement, handlers, interop, schedules
    >>> pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=lambda y, t: (y - t).square().mean())
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    >>> step = train_step(pipeline, schedules.one_f_one_b, plan, sgd, handler=handlers.Local())
    >>> params = {0: torch.tensor(2.0), 1: torch.tensor(1.0)}
    >>> step(params, sgd.init(params), torch.arange(4.0), torch.zeros(4))
    ({0: tensor(0.3000), 1: tensor(0.2000)}, {0: {}, 1: {}}, tensor(21.))
    """
    _, update = optimizer
    if "argnums" in options:
        raise ValueError(
            "train_step updates the params and returns no gradients: take value_and_grad for those of the batch"
        )
    differentiate = value_and_grad(pipeline, schedule, plan, handler=handler, **options)
    assert isinstance(differentiate, Step)
    stateful = any(stage.stateful for stage in pipeline.stages)

    def updated(
        params: Any, opt_state: Any, changes: Mapping[str, Any], loss: Any, grads: Any, clip: Callable[..., Any]
    ) -> tuple[Any, ...]:
        norm: list[Tensor] = []
        if max_norm is not None:
            grads, *norm = clip(grads, max_norm, plan, handler=handler)
        return *update(grads, opt_state, params, **changes), loss, *norm

    def then(arguments: Arguments, computed: Computed) -> tuple[tuple[Any, ...], Computed]:
        opt_state, changes = arguments.more
        loss, grads = differentiate.value(computed), computed.gradients
        clip = functools.partial(clip_in_a_graph, replays=differentiate.replays)
        try:
            results = updated(arguments.params, opt_state, changes, loss, grads, clip)
        except CaptureError as error:
            raise StageError(f"the optimizer's update can't be captured: {error}; {CAPTURABLE}") from error
        return results, computed._replace(gradients={})

    captured = differentiate.capturing(then) if options.get("capture") is True else None

    def step(
        params: Mapping[int, Any],
        opt_state: Any,
        batch: Any,
        target: Any = None,
        *,
        state: Mapping[int, Any] | None = None,
        rng: Rng | None = None,
        **changes: Any,
    ) -> Any:
        if captured is None:
            loss, grads, *new_state = differentiate(params, batch, target, state=state, rng=rng)
            return *updated(params, opt_state, changes, loss, grads, clip_by_global_norm), *new_state
        results, computed = captured(params, batch, target, state, rng, (opt_state, changes))
        return (*results, computed.state) if stateful else results

    return step


CAPTURABLE = "give the optimizer fused=True and capturable=True, as far as its class has them, and max_norm as a number"
