"""A training step: loss, gradients and the optimizer's update as one function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe._format import extent
from fpipe.devices import CaptureError
from fpipe.errors import StageError
from fpipe.errors.arguments import check_optimizer, checked
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.handlers.protocol import Handler
from fpipe.plan import Plan, Schedule
from fpipe.programs.updates import updating
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.rng import Rng
from fpipe.training import skipping
from fpipe.training.arguments import State
from fpipe.training.finite import CheckFinite, check_option, raise_if_not_finite
from fpipe.training.loss_scale import LossScale
from fpipe.training.norms import PURPOSE, SharedSquares, clipped, clipping, squares
from fpipe.training.post_validation import (
    Trees,
    Validation,
    Verdict,
    check_post_validation,
    final,
    is_provisional,
    now,
    snapshot,
)
from fpipe.training.step import Arguments, Computed, Step
from fpipe.training.updates import StageUpdates, donates, is_separable
from fpipe.training.verbs import check_types, value_and_grad

Optimizer = tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]
"""`init(params) -> state` and `update(grads, state, params, **options) -> (params, state)`, both pure."""

Choose = Callable[[Tensor, Any, Callable[[], Any], Any], Any]
"""`choose(finite, old, update, gradients)` returns the updated tree, or the old one where the step is to be skipped."""
CAPTURABLE = "give the optimizer fused=True and capturable=True, as far as its class has them, and max_norm as a number"


class Updated(NamedTuple):
    """The results of a step with its update; those that nothing asks for are None.

    Args:
        state: of the stages.
        norm: of the gradients.
        finite: whether the loss and the gradients are.
        sums: each stage's sum of squares.
        loss_scale: the next one.
    """

    params: Any
    opt_state: Any
    state: Any
    loss: Any
    norm: Tensor | None
    finite: Tensor | None
    sums: Tensor | None
    loss_scale: LossScale | None


@checked("schedule", "plan", "optimizer", "handler", "check_finite")
def train_step(
    pipeline: Pipeline,
    schedule: Schedule | str,
    plan: Plan,
    optimizer: Optimizer,
    *,
    handler: Handler,
    max_norm: float | Tensor | None = None,
    check_finite: CheckFinite = None,
    post_validate: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Return a function that computes the loss and its gradients, and updates the params.

    Args:
        optimizer: the pair `(init, update)` of `interop.optimizer`, or another pair of such functions. With
            `donate=True` a step reuses the memory of `params` and `opt_state`, which must not be used again.
        max_norm: clip the gradients to this norm over the whole pipeline, as `clip_by_global_norm` does.
        check_finite: of loss and gradients. With "skip", a step where they are not finite returns params, optimizer
            state and stages' state as they were passed. With True or "raise" it is an error, and nothing is updated.
        post_validate: with `max_norm` or `check_finite="skip"`, update before the norm is known, and update again, from
            the old params and state, where it turns out that the gradients are clipped, or take them back where the
            step is skipped. All results but the loss and aux are then known late: they wait when they are read, and
            not when they are passed to the next step. Params and states are `{stage: tree}` as a Mapping;
            `dict(params)` is the plain one. Numbers stand for tensors: `float(norm)`, `norm.clone()`. A handler that
            does not begin steps again, as `Local`, waits in each step.
        options: those of `value_and_grad`.

    Returns:
        `step(params, opt_state, batch, target=None, *, state=None, rng=None, loss_scale=None, **changes) -> (params,
        opt_state, loss)`. With `has_aux`, `(loss, aux)` stands in place of the loss. Then follow, each only where it is
        asked for: with `max_norm`, the norm before clipping; with `check_finite="skip"`, a tensor that is True if the
        step was taken; with a `LossScale`, the next one; with stateful stages, the new state. A step with a loss scale
        is skipped where loss or gradients are not finite, on all ranks alike. `changes` are options of the optimizer
        for this call only, such as `lr`. The results have the bits of `value_and_grad`, `clip_by_global_norm` and
        `update` called one after the other.

    Raises:
        ScheduleError, StageError, NonFiniteError, TransportError: as `value_and_grad`; nothing is then updated.
        ValueError: (at once) as `value_and_grad`; or `argnums` is given; or `post_validate` does not go with the rest.

    Without `max_norm`, `check_finite` and a loss scale, an optimizer of `interop.optimizer` updates each stage as soon
    as the stage's gradients are final: `Update` is an effect of the programs, as of `schedules.updating`. A rank then
    begins the next step when its own part of this one is done. With one of them, each rank waits for the gradients of
    all.

    With `post_validate=True` it does not wait then either, unless the gradients of the step before were clipped or not
    finite: the ranks expect the same of these. Where they expected wrong, all of them begin the next step again. Until
    the norm is known, in the next step, a rank keeps the gradients, and the params and the optimizer's state from
    before the update: with AdamW in float32, 16 bytes a parameter. Source: Qi et al., ICLR 2024, section 4,
    "post-validation".

    Whether a step is skipped is read on the host at its end; a captured step selects on the device, which takes a copy
    of params and optimizer state where the update reuses their memory.

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
    check_types(pipeline, plan, handler)
    if pipeline.no_update is not None:
        raise ValueError(f"no optimizer takes this pipeline's gradients: {pipeline.no_update}. Take value_and_grad")
    check_optimizer(optimizer)
    _, update = optimizer
    if "argnums" in options:
        raise ValueError(
            "train_step updates the params and returns no gradients: take value_and_grad for those of the batch"
        )
    check_option(check_finite, (None, False, True, "raise", "skip"))
    captured = options.get("capture") is True
    if post_validate:
        check_post_validation(handler, plan, update, max_norm, check_finite, options.get("capture", False))
    waits = captured or max_norm is not None or bool(check_finite)
    undoes = handler.peers is None and donates(update)  # a handler of one process goes on after a step that fails
    if is_separable(update) and not waits and not undoes:
        schedule = updating(schedule)
    differentiate = value_and_grad(pipeline, schedule, plan, handler=handler, **options)
    assert isinstance(differentiate, Step)
    return TrainStep(differentiate, update, max_norm, check_finite, captured, post_validate)


class TrainStep:
    """A function of params, optimizer state and batch: a step, its update, and what is asked for beside them.

    Args:
        captured: replay step and update as one graph.
        post_validates: update before the norm is known.
    """

    def __init__(
        self,
        differentiate: Step,
        update: Callable[..., tuple[Any, Any]],
        max_norm: float | Tensor | None,
        check_finite: CheckFinite,
        captured: bool,
        post_validates: bool = False,
    ) -> None:
        self.differentiate, self.update, self.max_norm = differentiate, update, max_norm
        self.plan, self.handler = differentiate.spec.plan, differentiate.handler
        self.raises, self.skips = check_finite in (True, "raise"), check_finite == "skip"
        differentiate.spec = replace(
            differentiate.spec,
            max_norm="a tensor" if isinstance(max_norm, Tensor) else None if max_norm is None else float(max_norm),
            check_finite="raise" if self.raises else "skip" if self.skips else None,
        )
        self.stateful = any(stage.stateful for stage in differentiate.spec.pipeline.stages)
        self.captured = differentiate.capturing(self._in_a_graph, losses=self.raises) if captured else None
        self.post_validates = post_validates
        self.last: Validation | None = None  # of the step before

    def __repr__(self) -> str:
        return f"<TrainStep: {self.differentiate.name}, {extent(self.plan)}, {self.handler}>"

    @fold_tracebacks
    def __call__(
        self,
        params: Mapping[int, Any],
        opt_state: Any,
        batch: Any,
        target: Any = None,
        *,
        state: State | None = None,
        rng: Rng | None = None,
        loss_scale: LossScale | None = None,
        **changes: Any,
    ) -> Any:
        if self.post_validates and loss_scale is None:
            return self._post_validated(params, opt_state, batch, target, state, rng, changes)
        params, opt_state, state = final(params), final(opt_state), final(state)
        more = opt_state, changes
        if self.captured is not None:
            updated, computed = self.captured(params, batch, target, state, rng, loss_scale, more)
            self._check(computed, None, updated.sums, loss_scale)
        else:
            sums = updates = None
            if self.max_norm is not None or self._is_guarded(loss_scale):
                shared = self._shared(self.max_norm, loss_scale)
                arguments = params, batch, target, state, rng, loss_scale
                computed = self.differentiate.compute_on_all(*arguments, share=shared)
                sums = shared.everywhere(computed.gradients, self.handler, computed.shares)
            else:
                updates = self._updates(params, opt_state, changes)
                computed = self.differentiate.compute(params, batch, target, state, rng, None, update=updates)
            self._check(computed, computed.gradients, sums, loss_scale)
            choose = skipping.on_host if self.skips or loss_scale is not None else None
            every = Arguments(params, batch, target, state, None, (), loss_scale, more)
            updated = self._updated(every, computed, sums, choose, updates)
        is_returned = {"norm": self.max_norm is not None, "finite": self.skips}
        is_returned |= {"loss_scale": loss_scale is not None, "state": self.stateful}
        more_results = [getattr(updated, name) for name, returned in is_returned.items() if returned]
        return updated.params, updated.opt_state, updated.loss, *more_results

    def _updates(self, params: Any, opt_state: Any, changes: Mapping[str, Any]) -> StageUpdates | None:
        """Return the updates that the programs run; None where the update is one function of all stages."""
        by_stage = all(isinstance(tree, Mapping) for tree in (params, opt_state))
        if not (by_stage and params.keys() == opt_state.keys() and is_separable(self.update)):
            return None
        return StageUpdates(self.update, params, opt_state, changes)

    def _is_guarded(self, scale: LossScale | None) -> bool:
        """Whether the update depends on whether loss and gradients are finite."""
        return self.raises or self.skips or scale is not None

    def _post_validated(
        self,
        params: Mapping[int, Any],
        opt_state: Any,
        batch: Any,
        target: Any,
        state: State | None,
        rng: Rng | None,
        changes: Mapping[str, Any],
    ) -> Any:
        """Return the results of a step whose norm may be known late."""
        step, last, handler, update = self.differentiate, self.last, self.handler, self.update
        max_norm, changes = snapshot(self.max_norm), {name: snapshot(option) for name, option in changes.items()}
        shared = self._shared(max_norm)
        more: dict[str, Any] = {"share": shared, "post_validate": True}
        if isinstance(max_norm, Tensor) and not max_norm.ndim:
            more["max_norm"] = max_norm.item()  # compared before anything is updated
        if last is not None:
            more["provisional"] = is_provisional(params, last) or is_provisional(state, last)
            more["renew"] = functools.partial(last.renewed, params, state)
        with step.replays.step():
            computed = step.compute(now(params, last), batch, target, now(state, last), rng, None, **more)
            asks = computed.shares is not None  # and now all ranks have begun this step, and so ended the last one
            is_early = asks and last is not None and last.is_known_plain()
            if not is_early and handler.peers is not None:
                handler.check()
        gradients, shares, new_state = computed.gradients, computed.shares, computed.state
        is_finite = computed.loss is None or bool(computed.loss.isfinite())  # the caller may change the loss
        skips = self.skips

        def wait() -> Verdict:
            norm = shared.everywhere(gradients, handler, shares).sum().sqrt()
            counts = not skips or (is_finite and bool(norm.isfinite()))
            return Verdict(norm, None if max_norm is None else clipping(max_norm, norm), counts)

        def updated(gradients: Mapping[int, Any], trees: Trees) -> Trees:
            params, opt_state, _ = trees
            return *StageUpdates(update, params, opt_state, changes).finish(gradients), new_state

        old = final(params), final(opt_state), final(state)
        validation = Validation(updated, gradients, old, wait, is_early, donates(update))
        *trees, late_state = validation.late
        if not is_early:
            validation.settle()
        self.last = validation
        results = {
            "norm": (self.max_norm is not None, validation.norm),
            "finite": (self.skips, validation.finite),
            "state": (self.stateful, late_state),
        }
        return *trees, step.value(computed), *(result for is_asked, result in results.values() if is_asked)

    def _shared(
        self, max_norm: float | Tensor | None, scale: LossScale | None = None, device: torch.device | None = None
    ) -> SharedSquares:
        own = functools.partial(squares, plan=self.plan, handler=self.handler, device=device)
        return SharedSquares(own, max_norm, None if scale is None else scale.tensor)

    def _check(self, computed: Computed, grads: Any, sums: Tensor | None, scale: LossScale | None) -> None:
        """Raise NonFiniteError; of gradients that are scaled, not finite only means that the scale is too large."""
        if self.raises:
            scaled = scale is not None
            gradients = {} if scaled else {"grads": grads, "sums": sums}
            raise_if_not_finite(computed.losses, self.plan, self.handler, **gradients)

    def _in_a_graph(self, arguments: Arguments, computed: Computed) -> tuple[Updated, Computed]:
        """Go on with the results of a step that is captured."""
        on_device = functools.partial(skipping.on_device, in_place=donates(self.update))
        choose = on_device if self._is_guarded(arguments.loss_scale) else None
        try:
            sums = None
            if self.max_norm is not None or self._is_guarded(arguments.loss_scale):
                device = next(iter(self.handler.devices or ()), None)
                shared = self._shared(self.max_norm, arguments.loss_scale, device)
                sums = self.differentiate.replays.add(shared.own(computed.gradients), PURPOSE)
            updated = self._updated(arguments, computed, sums, choose)
        except CaptureError as error:
            raise StageError(f"the optimizer's update can't be captured: {error}; {CAPTURABLE}") from error
        return updated, computed._replace(gradients={})

    def _updated(
        self,
        arguments: Arguments,
        computed: Computed,
        sums: Tensor | None,
        choose: Choose | None,
        updates: StageUpdates | None = None,
    ) -> Updated:
        """Return the results of a step; `choose` leaves the update out where the step is to be skipped.

        Args:
            updates: those that the programs have run.
        """
        (opt_state, changes), scale = arguments.more, arguments.loss_scale
        grads, norm = computed.gradients, None if sums is None else sums.sum().sqrt()
        if self.max_norm is not None and norm is not None:
            grads = clipped(grads, self.max_norm, norm)

        def update() -> tuple[Any, ...]:
            own = updates or StageUpdates(self.update, arguments.params, opt_state, changes)
            return *own.finish(grads), computed.state if self.stateful else None

        finite = following = None
        if self._is_guarded(scale) and norm is not None and computed.loss is not None:
            finite = norm.isfinite() & computed.loss.detach().isfinite().to(norm.device)
            following = None if scale is None else scale.adjust(finite)
        if choose is None or finite is None:
            results = update()
        else:
            old = arguments.params, opt_state, arguments.state if self.stateful else None
            results = choose(finite, old, update, computed.gradients)
        params, opt_state, state = results
        loss, raised = self.differentiate.value(computed), sums if self.raises else None
        return Updated(params, opt_state, state, loss, norm, finite, raised, following)
