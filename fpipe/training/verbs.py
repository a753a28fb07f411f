"""The public verbs: value_and_grad and evaluate make one function of a pipeline, a schedule, a plan and a handler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from fpipe.autodiff.interface import Argument, differentiates_data
from fpipe.autodiff.options import Autodiff, Options, Policies
from fpipe.effects import parts
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.handlers.protocol import Handler, Observer
from fpipe.plan import Plan, Schedule, check_plan
from fpipe.policies import everything_saveable
from fpipe.profiling.observers import observing
from fpipe.programs.lowering import forward_only, gathered, lower, wavefront
from fpipe.programs.program import Pass
from fpipe.programs.residence import Residence, residence
from fpipe.programs.schedules import as_schedule
from fpipe.programs.updates import Updating
from fpipe.programs.verifier import check
from fpipe.stages.pipeline import Pipeline, with_loss
from fpipe.stages.precision import OWN_DTYPES, Precision
from fpipe.tables import BACKWARD, TABLE, Table
from fpipe.training.arguments import Buffers, Reduction, StepSpec
from fpipe.training.finite import CheckFinite, check_option
from fpipe.training.step import Capture, Computed, Step, check_capture, check_replicas_captured

OF_BOTH = (
    *("pipeline", "schedule", "plan", "handler", "reduction", "prefetch", "autodiff", "precision", "buffers"),
    "check_finite",
)
"""Arguments of both verbs that what they call checks."""


@fold_tracebacks
@checked(*OF_BOTH, "argnums", "policy", "capture")
def value_and_grad(
    pipeline: Pipeline,
    schedule: Schedule | str,
    plan: Plan,
    *,
    handler: Handler,
    argnums: Argument | Sequence[Argument] = "params",
    has_aux: bool = False,
    reduction: Reduction = "mean",
    weight: Callable[[Any], Any] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    sequence_axes: Any = 1,
    out_sequence_axes: Any = 1,
    gather: bool = False,
    prefetch: int | None = None,
    resident: Residence | int | None = None,
    offload: Pass | None = None,
    observe: Observer | None = None,
    autodiff: Autodiff = "auto",
    policy: Policies = everything_saveable,
    compile: bool | str = False,  # noqa: A002
    dynamic: bool = False,
    capture: Capture = False,
    precision: Precision = OWN_DTYPES,
    buffers: Buffers | None = None,
    check_finite: CheckFinite = None,
    effects: Table = TABLE,
) -> Callable[..., Any]:
    """Return a function that computes the loss and its gradients, microbatch by microbatch.

    Args:
        schedule: a function `(rank, plan)` that yields effects, or a name that `schedules.get` takes.
        plan: from `pipeline.plan(placement, microbatches)`.
        handler: `Reference()`, `Local()` or `Distributed(group)`.
        argnums: the arguments to differentiate with respect to: "params", "batch" or "target"; or several of them, such
            as `("params", "batch")`, and the gradients are a tuple in this order, as in `jax.value_and_grad`.
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
        sequence_axes: how to cut each microbatch of `(batch, target)` into slices, where the plan has them: the axis of
            the sequences, None for what every slice reads whole, or a pair of prefix trees. The loss is computed for
            each slice; with "mean", it has the weight of its share of the sequence, or that of `weight`.
        out_sequence_axes: how to merge the aux of slices; leaves without dimensions are stacked.
        gather: return aux on every rank, not only on the rank of the loss.
        prefetch: the number of receives posted beyond the next one used.
        resident: the number of stages whose parameters, sharded over the replicas, are whole on a rank at a time, or a
            `Residence`, with a limit in bytes; None where they are not sharded. With all stages of a rank, each is
            gathered once a step; with fewer, memory is saved and more is gathered. Autograd's tapes keep them until
            their backwards are done, so that eager autodiff saves no memory.
        offload: `fpipe.offload(limit_bytes, costs)`, which moves residuals to the host and back, or recomputes them, so
            that each rank keeps to a limit in bytes; None where all stay. Residuals of eager autograd can't be moved.
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
        precision: the dtypes in which stages compute and gradients are added: with `Precision(compute=torch.bfloat16)`,
            float32 params are cast for the stages, and their gradients are float32.
        buffers: "own" lets each replica keep a state of its own, as of batch norm, which its microbatches alone update.
            By default stages with state have no replicas.
        check_finite: True or "raise" makes it an error that a loss or a gradient is not finite, on every rank and with
            the microbatch and the stages. Nothing waits for it before the step's end, when the ranks exchange one
            message, and the host reads the result.
        effects: the table of effects; `TABLE.extended({...})` for your own, whose functions the handler takes.

    Returns:
        `step(params, batch, target=None, *, state=None, rng=None, loss_scale=None) -> (loss, grads)`; with `has_aux`,
        `((loss, aux), grads)`; with stateful stages, the new state is a last element. `params`, `grads` and
        `state` are `{stage: tree}` of the stages that this process holds; `rng` is `(seed, step)`. Where a process
        plays several replicas, `state` is a list with one `{stage: tree}` for each, and so is the new state. The step
        changes none of its arguments. Every rank returns the loss. Under `torch.no_grad()` it returns the same. Batch
        and target may be `Microbatches`, whose tensors have other sizes in each microbatch; aux is then `Microbatches`
        too. `loss_scale` is a `LossScale`.

        The gradients of the batch, or of the target, are a tree like it. A floating or complex leaf that a stage of
        this process reads has its whole gradient, though stages of other ranks read it too, and zeros if the loss does
        not depend on it; all other leaves are None. It has the leaf's dtype. A leaf that all microbatches share
        (`in_axes` None) has the sum over them: over those that this process passes, where each replica passes its own.
        Gradients of `Microbatches` are `Microbatches`.

    Raises:
        ScheduleError: (at once) the schedule is wrong, or the plan does not fit this pipeline or this handler.
        ValueError: (at once) options that don't go together.
        TypeError: (at once) the pipeline or the handler is none.
        StageError: (in the step) an argument is wrong, a stage failed, or it can't be captured: it draws without `rng`,
            reads a tensor on the host, or has shapes that depend on values. Or it runs under `torch.inference_mode()`.
        NonFiniteError: (in the step, with `check_finite`) a loss or a gradient is not finite.
        TransportError: (in the step) another rank failed.

    >>> import torch
    >>> from fpipe import Pipeline, Placement, handlers, schedules
    >>> pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=lambda y, t: (y - t).square().mean())
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> step = value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handlers.Local())
    >>> step({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0), torch.zeros(4))
    (tensor(21.), {0: tensor(17.), 1: tensor(8.)})
    """
    schedule = as_schedule(schedule)
    check_types(pipeline, plan, handler)
    names = _arguments(argnums)
    options = Options(autodiff, policy, compile, dynamic, frozenset(names))
    ranks, replicas = handler.ranks(plan), handler.replicas(plan)
    axes = sequence_axes, out_sequence_axes
    how = has_aux, reduction, weight, in_axes, out_axes, gather, options, precision, buffers, *axes
    spec = StepSpec(pipeline, plan, ranks, replicas, True, *how, differentiated=True)
    stages = enumerate(with_loss(pipeline, has_aux).stages)
    trained = plan.trained if "params" in names else frozenset[int]()
    readers = frozenset(s for s, stage in stages if differentiates_data(stage, names))
    plan = replace(plan, batch_gradients=readers, trained=trained)
    programs = lower(schedule, plan, depth=prefetch, resident=resident, offload=offload, effects=effects)
    check(programs)
    all_parts = (part for program in programs.values() for effect in program for part in parts(effect))
    has_backward = any(effects.effects[type(part)].work & BACKWARD for part in all_parts)
    if any(map(plan.is_differentiated, range(plan.stages))) and not has_backward:
        raise ScheduleError(f"{_name(schedule)} has no backward: use evaluate for the outputs or the loss alone")
    stateful = any(stage.stateful for stage in pipeline.stages)

    def result(value: Any, computed: Computed) -> Any:
        each = {"params": computed.gradients, **computed.data_gradients}
        gradients = each[names[0]] if isinstance(argnums, str) else tuple(each[name] for name in names)
        return (value, gradients, computed.state) if stateful else (value, gradients)

    if capture is not False:
        check_capture(handler, observing(observe), compile, capture)
        if plan.slices > 1:
            raise ValueError(f"{capture=} with slices: a graph keeps no carry. Leave one of them out")
        check_replicas_captured(spec, programs, handler, capture)
    check_option(check_finite, (None, False, True, "raise"))
    return Step(spec, programs, handler, observe, _name(schedule), result, capture, bool(check_finite))


@fold_tracebacks
@checked(*OF_BOTH)
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
    sequence_axes: Any = 1,
    out_sequence_axes: Any = 1,
    gather: bool = False,
    schedule: Schedule | str | None = None,
    prefetch: int | None = None,
    resident: Residence | int | None = None,
    observe: Observer | None = None,
    autodiff: Autodiff = "auto",
    compile: bool | str = False,  # noqa: A002
    dynamic: bool = False,
    precision: Precision = OWN_DTYPES,
    buffers: Buffers | None = None,
    check_finite: CheckFinite = None,
    effects: Table = TABLE,
) -> Callable[..., Any]:
    """Return a function that runs the pipeline forward: it keeps no residuals and differentiates nothing.

    Args:
        loss: return the loss, on every rank, instead of the outputs.
        gather: return the outputs on every rank, not only on the last stage's (None elsewhere).
        schedule: take its forward order; by default each microbatch enters as soon as it can.

    Returns:
        `run(params, batch, target=None, *, state=None, rng=None) -> outputs`, merged along `out_axes`, those of slices
        along `out_sequence_axes`, or as
        `Microbatches` where the batch comes so; with `loss`, the loss, or `(loss, aux)`. The new state of stateful
        stages is not returned.

    The other arguments and errors are those of `value_and_grad`.

    >>> import torch
    >>> from fpipe import Pipeline, Placement, handlers, schedules
    >>> pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x + p])
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> run = evaluate(pipeline, plan, handler=handlers.Local())
    >>> run({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0))
    tensor([1., 3., 5., 7.])
    """
    if not loss and (has_aux or weight is not None or check_finite):
        raise ValueError("has_aux, weight and check_finite need loss=True: they concern the loss")
    check_option(check_finite, (None, False, True, "raise"))
    schedule = wavefront if schedule is None else as_schedule(schedule)
    check_types(pipeline, plan, handler)
    options = Options(autodiff, everything_saveable, compile, dynamic)
    ranks, replicas = handler.ranks(plan), handler.replicas(plan)
    axes = sequence_axes, out_sequence_axes
    how = has_aux, reduction, weight, in_axes, out_axes, gather, options, precision, buffers, *axes
    spec = StepSpec(pipeline, plan, ranks, replicas, loss, *how)
    programs = forward_only(lower(schedule, plan, depth=prefetch, effects=effects))
    if resident is not None and not gathered(programs):
        programs = residence(programs, resident)
    check(programs)
    name = f"evaluate of {_name(schedule)}"
    return Step(spec, programs, handler, observe, name, lambda value, _: value, checks=bool(check_finite))


def _arguments(argnums: Argument | Sequence[Argument]) -> tuple[Argument, ...]:
    names: tuple[Any, ...] = (
        (argnums,) if isinstance(argnums, str) else tuple(argnums) if isinstance(argnums, Sequence) else ()
    )
    if not names or any(name not in get_args(Argument) for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"argnums names arguments of the step, each once: {', '.join(map(repr, get_args(Argument)))}, or a tuple "
            f"of them, not {argnums!r}"
        )
    return names


def check_types(pipeline: Pipeline, plan: Plan, handler: Handler) -> None:
    """Raise TypeError or ScheduleError if one of the arguments is none of its type."""
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"the first argument is a Pipeline, as Pipeline([stage, ...], loss=loss), not {pipeline!r}")
    check_plan(plan)
    if isinstance(handler, type):
        raise TypeError(f"the handler is the class {handler.__name__}: pass an instance, {handler.__name__}()")
    parts = [name for name in vars(Handler) if not name.startswith("_")]
    if lacking := [name for name in parts if not hasattr(handler, name)]:
        raise TypeError(
            "handler must be handlers.Reference(), handlers.Local(), handlers.Distributed(group) or one of your own, "
            f"not {handler!r}, which has no {', '.join(lacking)}"
        )


def _name(schedule: Any) -> str:
    if isinstance(schedule, functools.partial):
        return _name(schedule.func)
    if isinstance(schedule, Updating):
        return _name(schedule.schedule)
    return getattr(schedule, "__name__", "a schedule")
