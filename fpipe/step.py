"""The public verbs: value_and_grad and evaluate make one function of a pipeline, a schedule, a plan and a handler."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.autodiff.options import Autodiff, Options, Policies
from fpipe.devices import HostCopy, current_device, device_of
from fpipe.effects import parts
from fpipe.errors import ScheduleError, StageError
from fpipe.handlers.protocol import Handler, Inputs, Observer, Outcome, Results, Run
from fpipe.plan import Plan, Schedule
from fpipe.policies import everything_saveable
from fpipe.profiling.observers import observing
from fpipe.programs.lowering import forward_only, lower, wavefront
from fpipe.programs.program import Programs
from fpipe.programs.verifier import check
from fpipe.stages.microbatch import Microbatch, merge, split
from fpipe.stages.pipeline import Pipeline, with_loss
from fpipe.tables import TABLE, WEIGHT, Table

Rng = tuple[int, int]
Reduction = Literal["mean", "sum"]


def value_and_grad(
    pipeline: Pipeline,
    schedule: Schedule,
    plan: Plan,
    *,
    handler: Handler,
    has_aux: bool = False,
    reduction: Reduction = "mean",
    weight: Callable[[Any], Any] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    gather: bool = False,
    prefetch: int | None = None,
    observe: Observer | None = None,
    autodiff: Autodiff = "auto",
    policy: Policies = everything_saveable,
    compile: bool = False,  # noqa: A002
    dynamic: bool = False,
    effects: Table = TABLE,
) -> Callable[..., Any]:
    """Return a function that computes the loss and its gradients, microbatch by microbatch.

    Args:
        plan: from `pipeline.plan(placement, microbatches)`.
        handler: `Reference()`, `Local()` or `Distributed(group)`.
        has_aux: the loss function returns `(loss, aux)`.
        reduction: what the loss function does over the samples of a microbatch. With "mean", a microbatch has the
            weight of its samples, or that of `weight`. With "sum", the losses are added.
        weight: `weight(target) -> number`, e.g. the number of tokens that count; only with "mean". A microbatch of
            weight 0 adds nothing: its loss and the last stage's gradients are ignored, even if they are NaN, because
            they are the mean of nothing. Tensors of a GPU are copied to the host all at once when the step
            begins, and the host waits for this copy after it has launched the first loss; for numbers and CPU tensors
            it waits for nothing.
        in_axes: how to split `(batch, target)`, as in `torch.vmap`: an axis, None, or a pair of prefix trees.
        out_axes: how to merge aux; leaves without dimensions are stacked.
        gather: return aux on every rank, not only on the rank of the loss.
        prefetch: the number of receives posted beyond the next one used.
        observe: an observer of every effect: a `Recording`, or `fpipe.tensorboard.Recorder(logdir)`.
        autodiff: "graph" traces each stage once per input signature and splits its backward as a graph. As under
            `jax.jit`, the stage's Python code, its closures and the mode of its modules are read while it is traced.
            "eager" records the stage for every microbatch, and walks the tape once for each half of a split backward.
            "auto" uses graphs, and for stages that can't be traced eager autograd, with a warning.
        policy: what a stage's forward may keep for its backward: one of `fpipe.policies`, or `{stage: policy}`;
            a stage without an entry keeps everything.
        compile: give the graphs to `torch.compile`, with its defaults, in the first step. The bits are then the
            compiler's, and a backward keeps its residuals until it ends.
        dynamic: trace a stage once for all input sizes. A cotangent whose strides differ from its output's is
            copied, which may change bits.
        effects: the table of effects; `TABLE.extended({...})` for your own, whose functions the handler takes.

    Returns:
        `step(params, batch, target=None, *, state=None, rng=None) -> (loss, grads)`; with `has_aux`,
        `((loss, aux), grads)`; with stateful stages, the new state is a last element. `params`, `grads` and
        `state` are `{stage: tree}` of the stages that this process holds; `rng` is `(seed, step)`. The step
        changes none of its arguments. Every rank returns the loss.

    Raises:
        ScheduleError: (at once) the schedule is wrong, or the plan does not fit this pipeline or this handler.
        StageError: (in the step) an argument is wrong, or a stage failed.
        TransportError: (in the step) another rank failed.

    >>> from fpipe import Pipeline, Placement, handlers, schedules
    >>> pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=lambda y, t: (y - t).square().mean())
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> step = value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handlers.Local())
    >>> step({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0), torch.zeros(4))
    (tensor(21.), {0: tensor(17.), 1: tensor(8.)})
    """
    options = Options(autodiff, policy, compile, dynamic)
    ranks = handler.ranks(plan)
    spec = _StepSpec(pipeline, plan, ranks, True, has_aux, reduction, weight, in_axes, out_axes, gather, options)
    programs = lower(schedule, plan, depth=prefetch, effects=effects)
    check(programs)
    all_parts = (part for program in programs.values() for effect in program for part in parts(effect))
    if not any(effects.effects[type(part)].work & WEIGHT for part in all_parts):
        raise ScheduleError(f"{_name(schedule)} has no backward: use evaluate for the outputs or the loss alone")
    stateful = any(stage.stateful for stage in pipeline.stages)

    def result(value: Any, results: Results) -> Any:
        return (value, results.gradients, results.state) if stateful else (value, results.gradients)

    return _function(spec, programs, handler, observe, _name(schedule), result)


def evaluate(
    pipeline: Pipeline,
    plan: Plan,
    *,
    handler: Handler,
    loss: bool = False,
    has_aux: bool = False,
    reduction: Reduction = "mean",
    weight: Callable[[Any], Any] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    gather: bool = False,
    schedule: Schedule | None = None,
    prefetch: int | None = None,
    observe: Observer | None = None,
    autodiff: Autodiff = "auto",
    compile: bool = False,  # noqa: A002
    dynamic: bool = False,
    effects: Table = TABLE,
) -> Callable[..., Any]:
    """Return a function that runs the pipeline forward: it keeps no residuals and differentiates nothing.

    Args:
        loss: return the loss, on every rank, instead of the outputs.
        gather: return the outputs on every rank, not only on the last stage's (None elsewhere).
        schedule: take its forward order; by default each microbatch enters as soon as it can.

    Returns:
        `run(params, batch, target=None, *, state=None, rng=None) -> outputs`, merged along `out_axes`; with
        `loss`, the loss, or `(loss, aux)`. The new state of stateful stages is not returned.

    The other arguments and errors are those of `value_and_grad`.

    >>> from fpipe import Pipeline, Placement, handlers, schedules
    >>> pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x + p])
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> run = evaluate(pipeline, plan, handler=handlers.Local())
    >>> run({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0))
    tensor([1., 3., 5., 7.])
    """
    if not loss and (has_aux or weight is not None):
        raise ValueError("has_aux and weight need loss=True: both concern the loss")
    options = Options(autodiff, everything_saveable, compile, dynamic)
    ranks = handler.ranks(plan)
    spec = _StepSpec(pipeline, plan, ranks, loss, has_aux, reduction, weight, in_axes, out_axes, gather, options)
    programs = forward_only(lower(schedule or wavefront, plan, depth=prefetch, effects=effects))
    check(programs)
    name = f"evaluate of {_name(schedule or wavefront)}"
    return _function(spec, programs, handler, observe, name, lambda value, _: value)


def _function(
    spec: _StepSpec,
    programs: Programs,
    handler: Handler,
    observe: Observer | None,
    name: str,
    result: Callable[[Any, Results], Any],
) -> Callable[..., Any]:
    """Return the function that runs the programs once, between the observer's notices of its begin and end.

    Args:
        name: of what runs, for the observer and for warnings.
        result: makes the function's result of the loss or outputs and of all `Results`.
    """
    pieces, observer = spec.pieces(), observing(observe)
    notices = Observer() if observer is None else observer
    notices.on_compile(name, programs, handler)
    run = _with_random_check(handler.compile(programs, pieces, observer), name)

    def step(
        params: Mapping[int, Any],
        batch: Any,
        target: Any = None,
        *,
        state: Mapping[int, Any] | None = None,
        rng: Rng | None = None,
    ) -> Any:
        notices.on_step_begin()
        inputs = spec.inputs(params, batch, target, state, rng)
        results = run(inputs)
        loss = spec.total(results.losses) if spec.loss else None
        notices.on_step_end(Outcome(loss, inputs.rows, results.gradients))
        value = (loss, results.output) if spec.has_aux else results.output if loss is None else loss
        return result(value, results)

    return step


def _name(schedule: Any) -> str:
    if isinstance(schedule, functools.partial):
        return _name(schedule.func)
    return getattr(schedule, "__name__", "a schedule")


def _with_random_check(run: Run, name: str) -> Run:
    """Warn once if a step without a seed draws from the global generator."""
    warned = False

    def checked(inputs: Inputs) -> Results:
        nonlocal warned
        if warned or inputs.rng is not None:
            return run(inputs)
        generators = current_device().generators()
        before = [generator.get_state() for generator in generators]
        results = run(inputs)
        if not all(torch.equal(state, g.get_state()) for state, g in zip(before, generators, strict=True)):
            warned = True
            warnings.warn(
                f"{name} drew random numbers from the global generator, so its result depends on the schedule; "
                "pass rng=(seed, step)",
                stacklevel=3,
            )
        return results

    return checked


@dataclass(frozen=True)
class _StepSpec:
    """The options of a step: check them and the arguments of each call, and split the batch.

    Args:
        ranks: the ranks that this process plays.
        loss: compute the last stage's loss; without it the outputs are the result.
    """

    pipeline: Pipeline
    plan: Plan
    ranks: Sequence[int]
    loss: bool
    has_aux: bool
    reduction: Reduction
    weight: Callable[[Any], Any] | None
    in_axes: Any
    out_axes: Any
    gather: bool
    options: Options

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {self.reduction!r}")
        if self.weight is not None and self.reduction != "mean":
            raise ValueError("weight needs reduction='mean': with 'sum', losses have no weights")
        if self.plan != self.pipeline.plan(self.plan.placement, self.plan.microbatches):
            raise ScheduleError(
                "the plan's edges or ties are not the pipeline's: make it by pipeline.plan(placement, microbatches)"
            )
        for stage, ranks in enumerate(self.plan.placement.holders):
            if self.pipeline.stages[stage].stateful and len(ranks) > 1:
                raise ScheduleError(
                    f"stage {stage} is stateful and has copies on ranks {ranks}: a state needs every microbatch in "
                    "order, so place it on one rank"
                )

    def pieces(self) -> DifferentiablePipeline:
        """Return the stages' functions; those of the last stage include the loss where it is computed."""
        pipeline = with_loss(self.pipeline, self.has_aux) if self.loss else self.pipeline
        gather = self.gather and (self.has_aux or not self.loss)
        return DifferentiablePipeline(
            pipeline, self.options.pieces(pipeline, self.loss), self.loss, gather, self._merge
        )

    def _merge(self, outputs: Mapping[int, Any]) -> Any:
        return merge([outputs[m] for m in range(self.plan.microbatches)], self.out_axes)

    def total(self, losses: Mapping[int, Tensor]) -> Tensor:
        """Add the losses in microbatch order."""
        return functools.reduce(torch.add, (losses[m] for m in range(self.plan.microbatches)))

    def inputs(
        self, params: Mapping[int, Any], batch: Any, target: Any, state: Mapping[int, Any] | None, rng: Rng | None
    ) -> Inputs:
        """Split the step's arguments into microbatches. The handler reports an error in them to all ranks."""
        try:
            if rng is not None:
                seed, step = rng
                rng = (int(seed), int(step))
            self._check_params(params)
            self._check_state(state or {})
            data, rows = self._split(batch, target)
        except Exception as error:  # the batch's types and `weight` are the user's, and may raise anything
            return Inputs({}, {}, (), broken=self._stage_error(error))
        return Inputs(params, state or {}, data, rows, self.reduction == "mean" and self.weight is None, rng)

    def _stage_error(self, error: Exception) -> StageError:
        rank = self.ranks[0] if len(self.ranks) == 1 else None
        if isinstance(error, StageError):
            return error.on(rank)
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        result = StageError(message, rank=rank)
        result.__cause__ = error
        return result

    def _check_params(self, params: Mapping[int, Any]) -> None:
        if not isinstance(params, Mapping):
            raise TypeError(f"params must be {{stage: tree}}, not a {type(params).__name__}")
        needed = {stage for rank in self.ranks for stage in self.pipeline.params_on(params, self.plan, rank)}
        foreign = sorted(set(params) - needed, key=repr)
        if foreign:
            raise StageError(
                f"params has entries for stages {foreign}, but this process holds only {sorted(needed)}: "
                "pass pipeline.params_on(params, plan, rank)"
            )

    def _check_state(self, state: Mapping[int, Any]) -> None:
        local = {stage for rank in self.ranks for stage in self.plan.stages_on(rank)}
        stateful = {stage for stage in local if self.pipeline.stages[stage].stateful}
        for stage in sorted(stateful - set(state)):
            raise StageError(
                f"the stage is stateful, but state has no entry for it: pass state={{{stage}: tree}}", stage=stage
            )
        for stage in sorted(set(state) - stateful, key=repr):
            raise StageError(
                f"state has an entry for stage {stage}, which is not a stateful stage of this process: "
                "pass pipeline.state_on(state, plan, rank)"
            )

    def _split(self, batch: Any, target: Any) -> tuple[list[Microbatch], int | None]:
        """Return the microbatches, and the number of rows of the whole batch."""
        self.pipeline.accept(batch)
        count = self.plan.microbatches
        axes = self.in_axes if isinstance(self.in_axes, tuple) else (self.in_axes, self.in_axes)
        if len(axes) != 2:
            raise ValueError(f"in_axes must be one axis, or a pair for batch and target, not {self.in_axes!r}")
        batches, rows = split(batch, count, axes[0], "batch")
        targets, target_rows = split(target, count, axes[1], "target")
        if self.weight is not None:
            return list(map(Microbatch, batches, targets, self._scales(self.weight, targets))), None
        if self.reduction == "mean" and None not in (rows, target_rows) and rows != target_rows:
            raise ValueError(f"the batch has {rows} rows, the target {target_rows}")
        return list(map(Microbatch, batches, targets)), rows if rows is not None else target_rows

    def _scales(self, weight: Callable[[Any], Any], targets: Sequence[Any]) -> Sequence[Callable[[], float] | None]:
        """Return a function of each microbatch's share of the weight; None where the loss is not computed."""
        if not any(self.plan.stages - 1 in self.plan.stages_on(rank) for rank in self.ranks):
            return [None] * len(targets)
        return _shares(list(map(weight, targets)))


def _shares(numbers: Sequence[Any]) -> Sequence[Callable[[], float]]:
    """Return functions that return each weight's share of their sum; the first call waits for a copy to the host.

    Which weights are 0 decides what the host launches, so it reads them: all at once, behind what the device ran before
    the step.
    """
    at = [None if isinstance(each, Tensor) else "cpu" for each in numbers]  # its own; never the default device
    weights = [torch.as_tensor(x, dtype=torch.float64, device=on) for x, on in zip(numbers, at, strict=True)]
    for each in weights:
        if each.numel() != 1:
            raise ValueError(f"weight must return one number, not a tensor of shape {tuple(each.shape)}")
    device = next((each.device for each in weights if each.device.type != "cpu"), weights[0].device)
    copy = HostCopy(torch.stack([each.detach().reshape(()).to(device) for each in weights]), device_of(device))

    @functools.cache
    def shares() -> list[float]:
        on_host = copy.read()
        values: list[float] = (on_host / functools.reduce(torch.add, on_host.unbind())).tolist()
        return values

    return [functools.partial(lambda m: shares()[m], m) for m in range(len(weights))]
