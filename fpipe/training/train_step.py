"""A training step: loss, gradients and the optimizer's update as one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe._format import extent
from fpipe.devices import CaptureError
from fpipe.errors import NonFiniteError, StageError
from fpipe.errors.arguments import check_optimizer, checked
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.handlers.protocol import Handler
from fpipe.plan import Plan, Schedule
from fpipe.programs.updates import updating
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.rng import Rng
from fpipe.training import skipping
from fpipe.training.arguments import State
from fpipe.training.finite import CheckFinite, check_option, names_here, names_on_all, non_finite_error
from fpipe.training.late import final, known, now
from fpipe.training.loss_scale import LossScale
from fpipe.training.norms import PURPOSE, SharedSquares, squares
from fpipe.training.post_validation import Trees, Validation, Verdict, check_post_validation, snapshot
from fpipe.training.step import Arguments, CapturedStep, Computed, Step
from fpipe.training.updates import StageUpdates, donates, is_separable
from fpipe.training.verbs import check_types, value_and_grad

Optimizer = tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]
"""`init(params) -> state` and `update(grads, state, params, **options) -> (params, state)`, both pure."""

CAPTURABLE = "give the optimizer fused=True and capturable=True, as far as its class has them, and max_norm as a number"


class Updated(NamedTuple):
    """The results of a step with its update; those that it does not have are None.

    Args:
        state: of the stages.
        loss_scale: the next one.
        loss: what stands for it among the results.
        norm: of the gradients.
        finite: whether the loss and the gradients are.
        sums: each stage's sum of squares.
    """

    params: Any
    opt_state: Any
    state: Any
    loss_scale: Any
    loss: Any
    norm: Any = None
    finite: Any = None
    sums: Tensor | None = None


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
        post_validate: with `max_norm`, `check_finite` or a loss scale, update before the norm is known, and update
            again, from the old params and state, where it turns out that the gradients are clipped, or take them back
            where the step is skipped. All results but the loss and aux are then known late: they wait when they are
            read, and not when they are passed to the next step. Params and states are `{stage: tree}` as a Mapping;
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
        NonFiniteError: (with `post_validate`) with `is_late`, the call before this one had it, or that whose results
            are read: these are then what was passed to it. On every rank, a call raises it in place of its own step.
        ValueError: (at once) as `value_and_grad`; or `argnums` is given; or `post_validate` does not go with the rest.

    Without `max_norm`, `check_finite` and a loss scale, an optimizer of `interop.optimizer` updates each stage as soon
    as the stage's gradients are final: `Update` is an effect of the programs, as of `schedules.updating`. A rank then
    begins the next step when its own part of this one is done. On GPUs, and with `resident=`, all ranks meet as each
    step begins, and a captured step ends when all are done. With one of the three options, each rank waits for the
    gradients of all.

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
        capture, resident = options.get("capture", False), options.get("resident")
        check_post_validation(handler, update, capture=capture, resident=resident)
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
        self.calls = -1  # the number of the last one

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
        self.calls += 1
        arguments = params, batch, target, state, rng, loss_scale
        if self.captured is not None:
            updated = self._replayed(self.captured, opt_state, changes, *map(final, arguments))
        elif self.max_norm is not None or self._is_guarded(loss_scale):
            updated = self._validated(opt_state, changes, *arguments)
        else:
            updated = self._by_stage(final(opt_state), changes, *map(final, arguments[:-1]))
        results = {
            "norm": self.max_norm is not None,
            "finite": self.skips,
            "loss_scale": loss_scale is not None,
            "state": self.stateful,
        }
        more = (getattr(updated, name) for name, is_asked in results.items() if is_asked)
        return updated.params, updated.opt_state, updated.loss, *more

    def _updates(self, params: Any, opt_state: Any, changes: Mapping[str, Any]) -> StageUpdates | None:
        """Return the updates that the programs run; None where the update is one function of all stages."""
        by_stage = all(isinstance(tree, Mapping) for tree in (params, opt_state))
        if not (by_stage and params.keys() == opt_state.keys() and is_separable(self.update)):
            return None
        return StageUpdates(self.update, params, opt_state, changes)

    def _is_guarded(self, scale: LossScale | None) -> bool:
        """Whether the update depends on whether loss and gradients are finite."""
        return self.raises or self.skips or scale is not None

    def _by_stage(
        self, opt_state: Any, changes: Mapping[str, Any], params: Any, batch: Any, target: Any, state: Any, rng: Any
    ) -> Updated:
        """Return the results of a step whose updates depend on no other rank."""
        updates = self._updates(params, opt_state, changes)
        computed = self.differentiate.compute(params, batch, target, state, rng, None, update=updates)
        updates = updates or StageUpdates(self.update, params, opt_state, changes)
        params, opt_state = updates.finish(computed.gradients)
        return Updated(params, opt_state, computed.state, None, self.differentiate.value(computed))

    def _validated(
        self,
        opt_state: Any,
        changes: Mapping[str, Any],
        params: Any,
        batch: Any,
        target: Any,
        state: State | None,
        rng: Rng | None,
        loss_scale: LossScale | None,
    ) -> Updated:
        """Return the results of a step whose update depends on all ranks; late ones, with post-validation."""
        step, last, handler, update = self.differentiate, self.last, self.handler, self.update
        max_norm, changes = snapshot(self.max_norm), {name: snapshot(option) for name, option in changes.items()}
        shared = self._shared(max_norm, loss_scale)
        more: dict[str, Any] = {"share": shared}
        if self.post_validates:
            more["post_validate"] = True
            if isinstance(max_norm, Tensor) and not max_norm.ndim:
                more["max_norm"] = max_norm.item()  # compared before anything is updated
        if last is not None:
            more["provisional"] = last.may_change
            more["renew"] = partial(last.renewed, params, state, loss_scale)
        with step.replays.step():
            inputs = now(params, last), batch, target, now(state, last), rng, now(loss_scale, last)
            computed = step.compute(*inputs, **more)
            asks = computed.shares is not None  # and now all ranks have begun this step, and so ended the last one
            is_early = self.post_validates and asks and last is not None and last.is_known_plain()
            if not is_early and handler.peers is not None:
                handler.check()
        scale = final(loss_scale)
        gradients, shares, new_state = computed.gradients, computed.shares, computed.state if self.stateful else None
        only_raises = self.raises and scale is None  # then the error says what is not finite
        is_finite = None if only_raises else self._is_finite(computed, scale)  # now: the caller may change the loss
        losses = {unit: loss.detach().clone() for unit, loss in computed.losses.items()} if self.raises else {}
        call = f"call {self.calls} of this train_step{'' if rng is None else f' (rng={rng})'}" if is_early else ""

        def wait() -> Verdict:
            sums = shared.everywhere(gradients, handler, shares)
            verdict = Verdict.of(sums, max_norm, is_finite)
            if not self.raises:
                return verdict
            names = partial(names_here, gradients) if call else partial(names_on_all, gradients, handler)
            return verdict._replace(error=self._error(losses, sums, scale, names, call))

        def updated(gradients: Mapping[int, Any], trees: Trees) -> Trees:
            params, opt_state, _ = trees
            return *StageUpdates(update, params, opt_state, changes).finish(gradients), new_state

        old = final(params), final(opt_state), final(state)
        validation = Validation(updated, gradients, old, scale, wait, is_early, donates(update))
        late = *validation.late, validation.loss_scale, step.value(computed), validation.norm, validation.finite
        if not is_early:
            validation.settle()
        if not self.post_validates:
            return Updated(*map(known, late))
        self.last = validation
        results = Updated(*late)
        several = len(step.spec.replicas.here) > 1  # in this process, which has waited: a list of states
        return results._replace(state=known(results.state)) if several else results

    def _shared(
        self, max_norm: float | Tensor | None, scale: LossScale | None = None, device: torch.device | None = None
    ) -> SharedSquares:
        own = partial(squares, plan=self.plan, handler=self.handler, device=device)
        return SharedSquares(own, max_norm, scale)

    def _is_finite(self, computed: Computed, scale: LossScale | None) -> Tensor | None:
        """Return whether the loss is finite; None where the update does not depend on it."""
        if computed.loss is None or not self._is_guarded(scale):
            return None
        return computed.loss.detach().isfinite()

    def _error(
        self,
        losses: Mapping[int, Tensor],
        sums: Tensor | None,
        scale: LossScale | None,
        names: Callable[[Any], Any] | None = None,
        call: str = "",
    ) -> NonFiniteError | None:
        """Return the error for a step; of gradients that are scaled, not finite only means that the scale is too large.

        Args:
            names, call: see `non_finite_error`.
        """
        scaled = scale is not None
        return non_finite_error(losses, self.plan, None if scaled else sums, None if scaled else names, call=call)

    def _replayed(
        self,
        captured: CapturedStep,
        opt_state: Any,
        changes: Mapping[str, Any],
        params: Any,
        batch: Any,
        target: Any,
        state: Any,
        rng: Any,
        loss_scale: LossScale | None,
    ) -> Updated:
        """Return the results of a step that is captured."""
        more = final(opt_state), changes
        updated, computed = captured(params, batch, target, state, rng, loss_scale, more)
        error = self._error(computed.losses, updated.sums, loss_scale) if self.raises else None
        if error is not None:
            raise error
        assert isinstance(updated, Updated)
        return updated

    def _in_a_graph(self, arguments: Arguments, computed: Computed) -> tuple[Updated, Computed]:
        """Go on with the results of a step that is captured: where it is skipped, the old ones are selected."""
        try:
            updated = self._selected(arguments, computed)
        except CaptureError as error:
            raise StageError(f"the optimizer's update can't be captured: {error}; {CAPTURABLE}") from error
        return updated, computed._replace(gradients={})

    def _selected(self, arguments: Arguments, computed: Computed) -> Updated:
        (opt_state, changes), scale = arguments.more, arguments.loss_scale
        sums = verdict = None
        if self.max_norm is not None or self._is_guarded(scale):
            shared = self._shared(self.max_norm, scale, next(iter(self.handler.devices or ()), None))
            sums = self.differentiate.replays.add(shared.own(computed.gradients), PURPOSE)
            verdict = Verdict.of(sums, self.max_norm, self._is_finite(computed, scale))

        def update() -> Trees:
            gradients = computed.gradients if verdict is None else verdict.scaled(computed.gradients)
            own = StageUpdates(self.update, arguments.params, opt_state, changes)
            return *own.finish(gradients), computed.state if self.stateful else None

        loss, own_sums = self.differentiate.value(computed), sums if self.raises else None
        if verdict is None or verdict.finite is None:
            return Updated(*update(), None, loss, None if verdict is None else verdict.norm)
        old = arguments.params, opt_state, arguments.state if self.stateful else None
        trees: Trees = skipping.on_device(verdict.finite, old, update, computed.gradients, donates(self.update))
        scale = None if scale is None else scale.adjust(verdict.finite)
        return Updated(*trees, scale, loss, verdict.norm, verdict.finite, own_sums)
