"""The public verbs: value_and_grad and evaluate make one function of a pipeline, a schedule, a plan and a handler."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fpipe._format import extent
from fpipe.autodiff.interface import DifferentiablePipeline, NonZero
from fpipe.autodiff.options import Autodiff, Options, Policies
from fpipe.devices import HostCopy, current_device, device_of
from fpipe.effects import parts
from fpipe.errors import ScheduleError, StageError
from fpipe.handlers.captured import Captured
from fpipe.handlers.captured_pieces import CapturedPieces
from fpipe.handlers.protocol import Alone, Handler, Inputs, Observer, Outcome, Replays, Replicas, Results, Run
from fpipe.plan import Plan, Schedule
from fpipe.policies import everything_saveable
from fpipe.profiling.observers import observing, watches_effects
from fpipe.programs.lowering import forward_only, gathered, lower, wavefront
from fpipe.programs.program import Programs, plan_of
from fpipe.programs.residence import residence
from fpipe.programs.schedules import as_schedule
from fpipe.programs.verifier import check
from fpipe.stages.microbatch import WEIGHING, Microbatch, Microbatches, merge, samples, sizes_of, split
from fpipe.stages.pipeline import Pipeline, with_loss
from fpipe.stages.pytree import flatten
from fpipe.stages.rng import Rng, Seeder, as_rng
from fpipe.stages.sharding import OWN_DTYPES, Sharding
from fpipe.stages.stage import StageFunction
from fpipe.tables import TABLE, WEIGHT, Table

T = TypeVar("T")
Reduction = Literal["mean", "sum"]
Capture = bool | Literal["pieces"]
Buffers = Literal["own"]
State = Mapping[int, Any] | Sequence[Mapping[int, Any]]
"""`{stage: tree}`; of a process that plays several replicas, a list with one for each."""


def value_and_grad(
    pipeline: Pipeline,
    schedule: Schedule | str,
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
    resident: int | None = None,
    observe: Observer | None = None,
    autodiff: Autodiff = "auto",
    policy: Policies = everything_saveable,
    compile: bool | str = False,  # noqa: A002
    dynamic: bool = False,
    capture: Capture = False,
    sharding: Sharding = OWN_DTYPES,
    buffers: Buffers | None = None,
    effects: Table = TABLE,
) -> Callable[..., Any]:
    """Return a function that computes the loss and its gradients, microbatch by microbatch.

    Args:
        schedule: a function `(rank, plan)` that yields effects, or a name that `schedules.get` takes.
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
        in_axes: how to split `(batch, target)`, as in `torch.vmap`: an axis, None, or a pair of prefix trees. Of
            `Microbatches`, which are not split, the axis of the samples in each tree.
        out_axes: how to merge aux; leaves without dimensions are stacked. Of `Microbatches`, aux is not merged.
        gather: return aux on every rank, not only on the rank of the loss.
        prefetch: the number of receives posted beyond the next one used.
        resident: the number of stages whose parameters, sharded over the replicas, are whole on a rank at a time; None
            where they are not sharded. All stages of a rank are gathered once a step; with fewer, memory is saved and
            more is gathered. Autograd's tapes keep them until their backwards are done, so that eager autodiff saves
            no memory.
        observe: an observer of every effect: a `Recording`, or `fpipe.tensorboard.Recorder(logdir)`.
        autodiff: "graph" traces each stage once per input signature and splits its backward as a graph. As under
            `jax.jit`, the stage's Python code, its closures and the mode of its modules are read while it is traced.
            "eager" records the stage for every microbatch, and walks the tape once for each half of a split backward.
            "auto" uses graphs, and for stages that can't be traced eager autograd, with a warning.
        policy: what a stage's forward may keep for its backward: one of `fpipe.policies`, or `{stage: policy}`;
            a stage without an entry keeps everything.
        compile: give the graphs to `torch.compile` in the first step, with its defaults or in a mode:
            "max-autotune-no-cudagraphs". The bits are then the compiler's, and a backward keeps its residuals until it
            ends.
        dynamic: trace a stage once for all input sizes. A cotangent whose strides differ from its output's is
            copied, which may change bits.
        capture: capture the step as one graph at its second call with arguments of the same shapes, and replay it from
            the third on: a CUDA graph, or on the CPU the recorded calls. The bits stay, the arguments are copied into
            the graph's memory, and the results out of it. As under `jax.jit`, Python code runs only while it is
            captured. With `Local` on one device, and with `Distributed`. With "pieces", each forward and backward of a
            stage is a graph instead, and the host goes on to run the program: for steps that can't be captured as one.
        sharding: the dtypes in which parameters are gathered and gradients are added.
        buffers: "own" lets each replica keep a state of its own, as of batch norm, which its microbatches alone update.
            By default stages with state have no replicas.
        effects: the table of effects; `TABLE.extended({...})` for your own, whose functions the handler takes.

    Returns:
        `step(params, batch, target=None, *, state=None, rng=None) -> (loss, grads)`; with `has_aux`,
        `((loss, aux), grads)`; with stateful stages, the new state is a last element. `params`, `grads` and
        `state` are `{stage: tree}` of the stages that this process holds; `rng` is `(seed, step)`. Where a process
        plays several replicas, `state` is a list with one `{stage: tree}` for each, and so is the new state. The step
        changes none of its arguments. Every rank returns the loss. Under `torch.no_grad()` it returns the same. Batch
        and target may be `Microbatches`, whose tensors have other sizes in each microbatch; aux is then `Microbatches`
        too.

    Raises:
        ScheduleError: (at once) the schedule is wrong, or the plan does not fit this pipeline or this handler.
        ValueError: (at once) options that don't go together.
        TypeError: (at once) the pipeline or the handler is none.
        StageError: (in the step) an argument is wrong, a stage failed, or it can't be captured: it draws without `rng`,
            reads a tensor on the host, or has shapes that depend on values. Or it runs under `torch.inference_mode()`.
        TransportError: (in the step) another rank failed.

    >>> from fpipe import Pipeline, Placement, handlers, schedules
    >>> pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=lambda y, t: (y - t).square().mean())
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> step = value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handlers.Local())
    >>> step({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0), torch.zeros(4))
    (tensor(21.), {0: tensor(17.), 1: tensor(8.)})
    """
    schedule = as_schedule(schedule)
    _check_types(pipeline, plan, handler)
    options = Options(autodiff, policy, compile, dynamic)
    ranks, replicas = handler.ranks(plan), handler.replicas(plan)
    how = has_aux, reduction, weight, in_axes, out_axes, gather, options, sharding, buffers
    spec = _StepSpec(pipeline, plan, ranks, replicas, True, *how, differentiated=True)
    programs = lower(schedule, plan, depth=prefetch, resident=resident, effects=effects)
    check(programs)
    all_parts = (part for program in programs.values() for effect in program for part in parts(effect))
    if not any(effects.effects[type(part)].work & WEIGHT for part in all_parts):
        raise ScheduleError(f"{_name(schedule)} has no backward: use evaluate for the outputs or the loss alone")
    stateful = any(stage.stateful for stage in pipeline.stages)

    def result(value: Any, computed: Computed) -> Any:
        return (value, computed.gradients, computed.state) if stateful else (value, computed.gradients)

    if capture:
        check_capture(handler, observing(observe), compile, capture)
        _check_replicas_captured(spec, programs, handler, capture)
    return Step(spec, programs, handler, observe, _name(schedule), result, capture)


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
    schedule: Schedule | str | None = None,
    prefetch: int | None = None,
    resident: int | None = None,
    observe: Observer | None = None,
    autodiff: Autodiff = "auto",
    compile: bool | str = False,  # noqa: A002
    dynamic: bool = False,
    sharding: Sharding = OWN_DTYPES,
    buffers: Buffers | None = None,
    effects: Table = TABLE,
) -> Callable[..., Any]:
    """Return a function that runs the pipeline forward: it keeps no residuals and differentiates nothing.

    Args:
        loss: return the loss, on every rank, instead of the outputs.
        gather: return the outputs on every rank, not only on the last stage's (None elsewhere).
        schedule: take its forward order; by default each microbatch enters as soon as it can.

    Returns:
        `run(params, batch, target=None, *, state=None, rng=None) -> outputs`, merged along `out_axes`, or as
        `Microbatches` where the batch comes so; with `loss`, the loss, or `(loss, aux)`. The new state of stateful
        stages is not returned.

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
    schedule = wavefront if schedule is None else as_schedule(schedule)
    _check_types(pipeline, plan, handler)
    options = Options(autodiff, everything_saveable, compile, dynamic)
    ranks, replicas = handler.ranks(plan), handler.replicas(plan)
    how = has_aux, reduction, weight, in_axes, out_axes, gather, options, sharding, buffers
    spec = _StepSpec(pipeline, plan, ranks, replicas, loss, *how)
    programs = forward_only(lower(schedule, plan, depth=prefetch, effects=effects))
    if resident is not None and not gathered(programs):
        programs = residence(programs, resident)
    check(programs)
    name = f"evaluate of {_name(schedule)}"
    return Step(spec, programs, handler, observe, name, lambda value, _: value)


class Computed(NamedTuple):
    """The results of a step.

    Args:
        output: of all microbatches merged: aux, or evaluate's output.
        rows: of the whole batch.
    """

    loss: Tensor | None
    output: Any
    gradients: dict[int, Any]
    state: State
    rows: int | None

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.loss, self.rows, self.gradients)


class Arguments(NamedTuple):
    """The arguments of a step that is captured.

    Args:
        weights: of the microbatches, in one tensor; None where the rows are the weights.
        zero: which of these weights are zero.
        more: those of the function that goes on with the results.
    """

    params: Mapping[int, Any]
    batch: Any
    target: Any
    state: State | None
    weights: Tensor | None
    zero: tuple[bool, ...]
    more: Any


Then = Callable[[Arguments, Computed], tuple[Any, Computed]]
"""Goes on with the results of a step; returns a result of its own, and the results that are left."""


class Step:
    """A function of params, batch and target that runs the programs once.

    Args:
        name: of what runs, for the observer and for warnings.
        result: makes the function's result of the loss or outputs and of all that was computed.
        capture: replay graphs where there are some: of the whole step, or of its pieces.
    """

    def __init__(
        self,
        spec: _StepSpec,
        programs: Programs,
        handler: Handler,
        observe: Observer | None,
        name: str,
        result: Callable[[Any, Computed], Any],
        capture: Capture = False,
    ) -> None:
        pieces, observer = spec.pieces(), observing(observe)
        self.spec, self.result, self.replays = spec, result, handler.replays or Alone()
        self.name, self.handler = name, handler
        self.device = next(iter(handler.devices or ()), None)
        self.notices = Observer() if observer is None else observer
        self.notices.on_compile(name, programs, handler)
        self.pieces: CapturedPieces | None = None
        if capture == "pieces":
            holders = spec.plan.placement.holders
            copies = [sum(rank in spec.ranks for rank in ranks) for ranks in holders]
            self.pieces = CapturedPieces(pieces, copies, self.device)
            pieces = self.pieces.pieces
        self.run = handler.compile(programs, pieces, observer)
        self.checked_run = _with_random_check(self.run, name)
        self.captured = self.capturing() if capture is True else None

    def __repr__(self) -> str:
        return f"<Step: {self.name}, {extent(self.spec.plan)}, {self.handler}>"

    def __call__(
        self,
        params: Mapping[int, Any],
        batch: Any,
        target: Any = None,
        *,
        state: State | None = None,
        rng: Rng | None = None,
    ) -> Any:
        if self.captured is None:
            self.notices.on_step_begin()
            inputs = self.spec.inputs(params, batch, target, state, rng)
            if self.pieces is not None and isinstance(inputs.rng, tuple):
                inputs = replace(inputs, rng=self.pieces.seed.seeder(inputs.rng))
            computed = _compute(self.spec, self.checked_run, inputs)
            self.notices.on_step_end(computed.outcome)
        else:
            _, computed = self.captured(params, batch, target, state, rng)
        return self.result(self.value(computed), computed)

    def value(self, computed: Computed) -> Any:
        """Return the loss, the pair of loss and aux, or the outputs."""
        if self.spec.has_aux:
            return computed.loss, computed.output
        return computed.output if computed.loss is None else computed.loss

    def capturing(self, then: Then | None = None) -> CapturedStep:
        """Return the step as a graph, which goes on with `then`."""
        return CapturedStep(self.spec, self.run, self.notices, self.replays, self.device, then)


class CapturedStep:
    """A step that is captured: it runs the programs, and returns `then(arguments, computed)`.

    Args:
        then: a function that goes on with the results; by default there is nothing more.
        device: where this process computes; None if the arguments say it.
    """

    def __init__(
        self,
        spec: _StepSpec,
        run: Run,
        notices: Observer,
        replays: Replays,
        device: torch.device | None,
        then: Then | None,
    ) -> None:
        self.spec, self.notices, self.replays = spec, notices, replays

        def function(arguments: Arguments, seeder: Seeder | None) -> tuple[Any, Computed]:
            params, batch, target, state, weights, zero, _ = arguments
            each = () if weights is None else weights.unbind()
            scales = [0.0 if is_zero else NonZero(w) for w, is_zero in zip(each, zero, strict=True)]
            scale_of = [functools.partial(_identity, scale) for scale in scales]
            computed = _compute(spec, run, spec.inputs(params, batch, target, state, seeder, scale_of))
            if then is None:
                return None, computed
            with replays.running("the update"):
                return then(arguments, computed)

        self.captured = Captured(function, replays, device)

    def __call__(
        self, params: Any, batch: Any, target: Any, state: Any, rng: Rng | None, more: Any = None
    ) -> tuple[Any, Computed]:
        """Run, capture or replay a step.

        Args:
            more: for `then`.
        """
        self.notices.on_step_begin()
        try:
            self.spec.check_mode()
            arguments = Arguments(params, batch, target, state, *self.spec.weights(params, batch, target), more)
            seed = self.spec.seed(rng)
        except StageError as error:
            self.replays.refuse(error)
        result, computed = self.captured(arguments, seed)
        self.notices.on_step_end(computed.outcome)
        return result, computed

    @property
    def graphs(self) -> int:
        """The number of graphs that this process has captured and keeps."""
        return sum(graph is not None for graph in self.captured.graphs.values())


def _identity(value: T) -> T:
    return value


def _compute(spec: _StepSpec, run: Run, inputs: Inputs) -> Computed:
    results = run(inputs)
    loss = spec.total(results.losses) if spec.loss else None
    state = results.state if len(spec.replicas.here) > 1 else results.state[0]
    return Computed(loss, results.output, results.gradients, state, inputs.rows)


def check_capture(handler: Handler, observer: Observer | None, compile: bool | str, capture: Capture) -> None:  # noqa: A002
    """Check that steps of a handler can be captured.

    Raises:
        ValueError: they can't, or the options need what a replay lacks.
    """
    if capture not in (True, "pieces"):
        raise ValueError(f"capture must be False, True or 'pieces', not {capture!r}")
    if handler.replays is None:
        raise ValueError(
            f"{capture=} needs a handler that captures its steps, as Local and Distributed, not "
            f"{type(handler).__name__}: leave capture out"
        )
    if len(set(handler.devices or ())) > 1:
        raise ValueError(f"{capture=} needs one device, not {handler.devices}: a graph is of one device")
    if capture is True and watches_effects(observer):
        raise ValueError(
            "capture=True with an observer of effects, as FPIPE_LOG=effects is one: a replay runs no effects that it "
            "could see. Make a step without capture, or with capture='pieces', for the steps to be observed; its bits "
            "are the same"
        )
    if compile:
        raise ValueError(f"{capture=} with compile=True: compiled code calls no operators that could be recorded")


def _check_replicas_captured(spec: _StepSpec, programs: Programs, handler: Handler, capture: Capture) -> None:
    """Raise ValueError for replicas, shards and casts whose steps can't be captured."""
    plan, here = plan_of(programs), len(spec.replicas.here)
    if plan.gathered and handler.peers is not None:
        raise ValueError(f"{capture=} with resident=: a graph gathers no shards. Leave one of them out")
    if plan.replicas > here and spec.weight is not None:
        raise ValueError(
            f"{capture=} with weight= and replicas in other processes: their weights are added on the host. Leave one "
            "of them out"
        )
    if capture == "pieces" and (here > 1 or spec.sharding != OWN_DTYPES):
        raise ValueError(
            "capture='pieces' with several replicas in one process, or with sharding=: the graphs of a piece read one "
            "copy of the params as they are. Take capture=True"
        )


def _check_types(pipeline: Pipeline, plan: Plan, handler: Handler) -> None:
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"the first argument is a Pipeline, as Pipeline([stage, ...], loss=loss), not {pipeline!r}")
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, as pipeline.plan(placement, microbatches) makes it, not {plan!r}")
    if isinstance(handler, type):
        raise TypeError(f"the handler is the class {handler.__name__}: pass an instance, {handler.__name__}()")
    if lacking := [name for name in ("ranks", "replicas", "compile", "check") if not hasattr(handler, name)]:
        raise TypeError(
            "handler must be handlers.Reference(), handlers.Local(), handlers.Distributed(group) or one of your own, "
            f"not {handler!r}, which has no {', '.join(lacking)}"
        )


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
        replicas: the replicas that it plays.
        loss: compute the last stage's loss; without it the outputs are the result.
        differentiated: compute gradients.
    """

    pipeline: Pipeline
    plan: Plan
    ranks: Sequence[int]
    replicas: Replicas
    loss: bool
    has_aux: bool
    reduction: Reduction
    weight: Callable[[Any], Any] | None
    in_axes: Any
    out_axes: Any
    gather: bool
    options: Options
    sharding: Sharding
    buffers: Buffers | None
    differentiated: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {self.reduction!r}")
        if self.buffers not in ("own", None):
            raise ValueError(f"buffers must be 'own' or None, not {self.buffers!r}")
        if self.weight is not None and self.reduction != "mean":
            raise ValueError("weight needs reduction='mean': with 'sum', losses have no weights")
        if self.plan != self.pipeline.plan(self.plan.placement, self.plan.microbatches, self.plan.replicas):
            raise ScheduleError(
                "the plan's edges or ties are not the pipeline's: make it by pipeline.plan(placement, microbatches)"
            )
        for stage, ranks in enumerate(self.plan.placement.holders):
            if self.pipeline.stages[stage].stateful and len(ranks) > 1:
                raise ScheduleError(
                    f"stage {stage} is stateful and has copies on ranks {ranks}: a state needs every microbatch in "
                    "order, so place it on one rank"
                )
            if self.pipeline.stages[stage].stateful and self.plan.replicas > 1 and self.buffers is None:
                raise ScheduleError(
                    f"stage {stage} is stateful, and the plan has {self.plan.replicas} replicas: pass buffers='own' to "
                    "value_and_grad, train_step and evaluate, and each replica keeps a state of its own, which its "
                    "microbatches alone update; or make the stage stateless (such as a norm that needs no running "
                    "statistics)"
                )

    def pieces(self) -> DifferentiablePipeline:
        """Return the stages' functions; those of the last stage include the loss where it is computed."""
        pipeline = with_loss(self.pipeline, self.has_aux) if self.loss else self.pipeline
        gather = self.gather and (self.has_aux or not self.loss)
        shares: Literal["rows", "weight"] | None = None
        if self.reduction == "mean":
            shares = "rows" if self.weight is None else "weight"
        stages = self.options.pieces(pipeline, self.loss)
        return DifferentiablePipeline(pipeline, stages, self.loss, gather, self._merge, self.sharding, shares)

    def _merge(self, outputs: Mapping[int, Any], apart: bool | None) -> Any:
        trees = [output for _, output in sorted(outputs.items())]
        return Microbatches(trees) if apart else merge(trees, self.out_axes)

    def total(self, losses: Mapping[int, Tensor]) -> Tensor:
        """Add the losses in microbatch order, replica by replica."""
        return functools.reduce(torch.add, (loss for _, loss in sorted(losses.items())))

    def inputs(
        self,
        params: Mapping[int, Any],
        batch: Any,
        target: Any,
        state: State | None,
        rng: Rng | Seeder | None,
        scales: Sequence[Any] | None = None,
    ) -> Inputs:
        """Split the step's arguments into microbatches. The handler reports an error in them to all ranks.

        Args:
            scales: of the microbatches; by default they are computed from the target.
        """
        try:
            rng = rng if rng is None or callable(rng) else as_rng(rng)
            self.check_mode()
            self._check_params(params)
            states = self._states(state)
            _ = self._told_of_changes
            data, sizes = self._split(batch, target, scales)
        except Exception as error:  # the batch's types and `weight` are the user's, and may raise anything
            return Inputs({}, (), (), broken=self._stage_error(error))
        trees = [tree for tree in (batch, target) if tree is not None]
        apart = isinstance(trees[0], Microbatches) if trees else None
        rows = None if sizes is None else sum(sizes)
        return Inputs(params, states, data, rows, sizes, self._weighed, apart, rng)

    @property
    def _weighed(self) -> bool:
        """Whether each loss is scaled by its share of the rows."""
        return self.reduction == "mean" and self.weight is None

    def check_mode(self) -> None:
        """Raise StageError for gradients under `torch.inference_mode`, where autograd records nothing."""
        if self.differentiated and torch.is_inference_mode_enabled():
            raise StageError(
                "the step computes gradients, and torch.inference_mode() switches autograd off for good: call it "
                "outside. evaluate runs inside, and under torch.no_grad() both do"
            )

    def seed(self, rng: Any) -> Rng | None:
        """Check a seed.

        Raises:
            StageError: it is no pair of numbers.
        """
        try:
            return None if rng is None else as_rng(rng)
        except Exception as error:  # the numbers are the user's, and may raise anything
            raise self._stage_error(error) from error

    def weights(self, params: Any, batch: Any, target: Any) -> tuple[Tensor | None, tuple[bool, ...]]:
        """Return the microbatches' shares of the weight, on the device of the arguments, and which of them are zero.

        Raises:
            StageError: the batch or the target can't be split, or `weight` failed.
        """
        if self.weight is None:
            return None, ()
        try:
            data, _ = self._split(batch, target)
        except Exception as error:  # the batch's types and `weight` are the user's, and may raise anything
            raise self._stage_error(error) from error
        shares = [microbatch.scale() for microbatch in data if microbatch.scale is not None]
        if not shares:  # another process computes the loss
            return None, ()
        tensors = (x for x in flatten((params, batch, target)).leaves if isinstance(x, Tensor))
        device = next((x.device for x in tensors), torch.device("cpu"))
        return torch.tensor(shares, dtype=torch.float64, device=device), tuple(share == 0 for share in shares)

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

    @functools.cached_property
    def _told_of_changes(self) -> bool:
        """Whether modules were frozen or unfrozen between `Pipeline` and the first call, which alone warns of them."""
        names = _changed_parameters(self.pipeline) if self.differentiated else []
        if names:
            warnings.warn(
                f"requires_grad of {', '.join(names[:3])}{' and more' if len(names) > 3 else ''} has changed in the "
                "module since the pipeline was made. The step trains the params that were trained then. If the change "
                "is meant for it, make the pipeline of the module again, and go on with the same params",
                stacklevel=2,
            )
        return bool(names)

    def _states(self, state: State | None) -> Sequence[Mapping[int, Any]]:
        """Return the state of each replica that this process plays."""
        count = len(self.replicas.here)
        if count == 1:
            states: Any = [{} if state is None else state]
        else:
            states = state or [{}] * count
            if not isinstance(states, Sequence) or len(states) != count:
                raise ValueError(
                    f"this process plays {count} replicas, each with a state of its own: pass a list with one "
                    f"{{stage: tree}} for each, such as [state] * {count}"
                )
        for replica, each in enumerate(states):
            name = "state" if count == 1 else f"state[{replica}]"
            if not isinstance(each, Mapping):
                raise TypeError(f"{name} must be {{stage: tree}}, not a {type(each).__name__}")
            self._check_state(each, name)
        return states  # type: ignore[no-any-return]

    def _check_state(self, state: Mapping[int, Any], name: str) -> None:
        local = {stage for rank in self.ranks for stage in self.plan.stages_on(rank)}
        stateful = {stage for stage in local if self.pipeline.stages[stage].stateful}
        for stage in sorted(stateful - set(state)):
            raise StageError(
                f"the stage is stateful, but {name} has no entry for it: pass {{{stage}: tree}}", stage=stage
            )
        for stage in sorted(set(state) - stateful, key=repr):
            raise StageError(
                f"{name} has an entry for stage {stage}, which is not a stateful stage of this process: "
                "pass pipeline.state_on(state, plan, rank)"
            )

    def _split(
        self, batch: Any, target: Any, scales: Sequence[Any] | None = None
    ) -> tuple[list[Microbatch], Sequence[int] | None]:
        """Return the microbatches, and the rows of each."""
        apart = {isinstance(tree, Microbatches) for tree in (batch, target) if tree is not None}
        if len(apart) > 1:
            split_one = "target" if isinstance(batch, Microbatches) else "batch"
            raise ValueError(f"one of batch and target is Microbatches: pass both so, or the {split_one} as None")
        for tree in batch if isinstance(batch, Microbatches) else [batch]:
            self.pipeline.accept(tree)
        count = self.plan.microbatches * len(self.replicas.here)
        axes = self.in_axes if isinstance(self.in_axes, tuple) else (self.in_axes, self.in_axes)
        if len(axes) != 2:
            raise ValueError(f"in_axes must be one axis, or a pair for batch and target, not {self.in_axes!r}")
        batches, rows = split(batch, count, axes[0], "batch")
        targets, target_rows = split(target, count, axes[1], "target")
        if self.weight is not None:
            return list(map(Microbatch, batches, targets, scales or self._scales(self.weight, targets))), None
        data = list(map(Microbatch, batches, targets))
        if True in apart:
            return data, self._samples(batch, target, axes) if self.loss and self._weighed else None
        if self.reduction == "mean" and None not in (rows, target_rows) and rows != target_rows:
            raise ValueError(f"the batch has {rows} rows, the target {target_rows}")
        rows = rows if rows is not None else target_rows
        return data, None if rows is None else sizes_of(rows, count)

    def _samples(self, batch: Any, target: Any, axes: tuple[Any, Any]) -> Sequence[int] | None:
        """Return the rows of each of `Microbatches`."""
        of_batch = samples(batch or (), axes[0], "batch")
        of_target = samples(target or (), axes[1], "target")
        if of_batch is None or of_target is None:
            return of_target if of_batch is None else of_batch
        for m, (rows, target_rows) in enumerate(zip(of_batch, of_target, strict=True)):
            if rows != target_rows:
                raise ValueError(
                    f"microbatch {m} of the batch has {rows} rows, that of the target {target_rows}: {WEIGHING}"
                )
        return of_batch

    def _scales(self, weight: Callable[[Any], Any], targets: Sequence[Any]) -> Sequence[Callable[[], float] | None]:
        """Return a function of each microbatch's share of the weight; None where the loss is not computed."""
        if not any(self.plan.stages - 1 in self.plan.stages_on(rank) for rank in self.ranks):
            return [None] * len(targets)
        return _shares(list(map(weight, targets)), self.replicas)


def _shares(numbers: Sequence[Any], replicas: Replicas) -> Sequence[Callable[[], float]]:
    """Return functions that return each weight's share of all replicas' sum.

    The first call waits for a copy to the host, and where other processes play other replicas, for their weights.

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
        every = on_host
        if len(replicas.here) < replicas.count:
            every = torch.tensor(replicas.gather(on_host.tolist()), dtype=torch.float64, device="cpu")
        values: list[float] = (on_host / functools.reduce(torch.add, every.unbind())).tolist()
        return values

    return [functools.partial(lambda m: shares()[m], m) for m in range(len(weights))]


def _changed_parameters(pipeline: Pipeline) -> list[str]:
    """Return the parameters whose `requires_grad` has changed in their module since the pipeline was made."""
    functions = [stage.fn for stage in pipeline.stages]
    return [
        f"{name} of stage {stage}"
        for stage, function in enumerate(functions)
        if isinstance(function, StageFunction)
        for name, reference, trained in function.originals
        if (parameter := reference()) is not None and parameter.requires_grad != trained
    ]
