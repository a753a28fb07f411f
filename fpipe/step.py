"""value_and_grad and evaluate: pipeline x schedule x plan x handler."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fpipe.autodiff.interface import Pieces
from fpipe.autodiff.options import Autodiff, Options, Policies
from fpipe.effects import parts
from fpipe.errors import ScheduleError, StageError
from fpipe.handlers.protocol import Handler, Inputs, Observer, Outcome, Results, Run, Witness
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


def value_and_grad(
    pipeline: Pipeline,
    schedule: Schedule,
    plan: Plan,
    *,
    handler: Handler,
    has_aux: bool = False,
    reduction: Literal["mean", "sum"] = "mean",
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
    """A function that computes the loss and its gradients, microbatch by microbatch.

    Args:
        plan: from `pipeline.plan(placement, microbatches)`.
        handler: `Reference()`, `Local()` or `Distributed(group)`.
        has_aux: the loss function returns `(loss, aux)`.
        reduction: what the loss function does over the samples of a microbatch. With "mean", microbatches
            weigh by their samples, or by `weight`; with "sum", losses are added.
        weight: `weight(target) -> number`, e.g. the tokens that count; for "mean" only. Where it is 0, the microbatch's
            loss and the last stage's gradients count for nothing, also where they are NaN, as of a mean of nothing.
        in_axes: how `(batch, target)` are split, as in `torch.vmap`: an axis, None, or a pair of prefix trees.
        out_axes: how aux is merged; leaves without dimensions are stacked.
        gather: aux is wanted on every rank, not only on the loss's.
        prefetch: receives posted beyond the next one used.
        observe: sees every effect begin and end: a `Recording`, or `fpipe.tensorboard.Recorder(logdir)`.
        autodiff: "graph" traces each stage once for every signature of what it is given, and cuts its backward as a
            graph: its Python, what it closes over, and whether a module trains, are read then, as under `jax.jit`.
            "eager" records it for every microbatch, and walks it once for each half where it is split. "auto" takes
            graphs, and eager autograd, with a warning, for stages that can't be traced.
        policy: what of a stage's forward may be kept for its backward, one of `fpipe.policies`; or one for each
            stage, `{stage: policy}`, in which what is missing keeps everything.
        compile: give the graphs to `torch.compile`, with its defaults, in the first step. Bits are then the
            compiler's, and a backward holds its residuals until it ends.
        dynamic: trace a stage once for all sizes of what it reads. A cotangent that is not laid out as its output is
            copied, which may change bits.
        effects: the table of effects; `TABLE.extended({...})` for your own, whose functions the handler takes.

    Returns:
        `step(params, batch, target=None, *, state=None, rng=None) -> (loss, grads)`; with `has_aux`,
        `((loss, aux), grads)`; with stateful stages, a last element: the new state. `params`, `grads` and
        `state` are `{stage: tree}` of the stages that this process holds; `rng` is `(seed, step)`. Nothing
        that it is given changes. The loss is known on every rank.

    Raises:
        ScheduleError: (at once) the schedule is wrong, or the plan is not this pipeline's or this handler's.
        StageError: (in the step) what was given is wrong, or a stage failed.
        TransportError: (in the step) another rank failed.

    >>> from fpipe import Pipeline, Placement, handlers, schedules
    >>> pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=lambda y, t: (y - t).square().mean())
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> step = value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handlers.Local())
    >>> step({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0), torch.zeros(4))
    (tensor(21.), {0: tensor(17.), 1: tensor(8.)})
    """
    job = _Job(pipeline, plan, handler.ranks(plan), reduction, weight, in_axes, out_axes, f"step of {_name(schedule)}")
    pieces = job.pieces(True, has_aux, gather, Options(autodiff, policy, compile, dynamic))
    programs = lower(schedule, plan, depth=prefetch, effects=effects)
    check(programs)
    all_parts = (part for program in programs.values() for effect in program for part in parts(effect))
    if not any(effects.effects[type(part)].work & WEIGHT for part in all_parts):
        raise ScheduleError(f"{_name(schedule)} runs nothing backward: for outputs or the loss alone, use evaluate")
    run, witness = _compiled(handler, programs, pieces, observe, _name(schedule))

    def step(
        params: Mapping[int, Any],
        batch: Any,
        target: Any = None,
        *,
        state: Mapping[int, Any] | None = None,
        rng: Rng | None = None,
    ) -> Any:
        if witness is not None:
            witness.step_begins()
        inputs = job.inputs(params, batch, target, state, rng)
        results = job.run(run, inputs)
        loss = job.loss(results, has_aux)
        if witness is not None:
            witness.step_ends(Outcome(loss[0] if has_aux else loss, inputs.rows, results.gradients))
        return (loss, results.gradients, results.state) if job.stateful else (loss, results.gradients)

    return step


def evaluate(
    pipeline: Pipeline,
    plan: Plan,
    *,
    handler: Handler,
    loss: bool = False,
    has_aux: bool = False,
    reduction: Literal["mean", "sum"] = "mean",
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
    """A function that runs the pipeline forward: no residual is kept, nothing is differentiated.

    Args:
        loss: give the loss, on every rank, instead of the outputs.
        gather: the outputs are wanted on every rank, not only on the last stage's (None elsewhere).
        schedule: whose forward order to take; by default each microbatch enters as soon as it can.

    Returns:
        `run(params, batch, target=None, *, state=None, rng=None) -> outputs`, merged along `out_axes`; with
        `loss`, the loss, or `(loss, aux)`. The new state of stateful stages is not given back.

    The other arguments and errors are those of `value_and_grad`.

    >>> from fpipe import Pipeline, Placement, handlers, schedules
    >>> pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x + p])
    >>> plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    >>> run = evaluate(pipeline, plan, handler=handlers.Local())
    >>> run({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0))
    tensor([1., 3., 5., 7.])
    """
    if not loss and (has_aux or weight is not None):
        raise ValueError("has_aux and weight go with loss=True: they are the loss's")
    job = _Job(pipeline, plan, handler.ranks(plan), reduction, weight, in_axes, out_axes, "evaluation")
    pieces = job.pieces(loss, has_aux, gather, Options(autodiff, everything_saveable, compile, dynamic))
    programs = forward_only(lower(schedule or wavefront, plan, depth=prefetch, effects=effects))
    check(programs)
    run, witness = _compiled(handler, programs, pieces, observe, f"evaluate of {_name(schedule or wavefront)}")

    def outputs(
        params: Mapping[int, Any],
        batch: Any,
        target: Any = None,
        *,
        state: Mapping[int, Any] | None = None,
        rng: Rng | None = None,
    ) -> Any:
        if witness is not None:
            witness.step_begins()
        inputs = job.inputs(params, batch, target, state, rng)
        results = job.run(run, inputs)
        found = job.loss(results, has_aux) if loss else results.output
        if witness is not None:
            witness.step_ends(Outcome((found[0] if has_aux else found) if loss else None, inputs.rows, {}))
        return found

    return outputs


def _compiled(
    handler: Handler, programs: Programs, pieces: Pieces, observe: Observer | None, name: str
) -> tuple[Run, Witness | None]:
    """A function that runs one step, and who is to be told when one begins and ends."""
    observer = observing(observe)
    witness = observer if isinstance(observer, Witness) else None
    if witness is not None:
        witness.prepare(name, programs, handler)
    return handler.compile(programs, pieces, observer), witness


def _name(schedule: Any) -> str:
    return (
        _name(schedule.func) if isinstance(schedule, functools.partial) else getattr(schedule, "__name__", "a schedule")
    )


@dataclass
class _Job:
    """What value_and_grad and evaluate have in common: checks before, inputs, and the loss after."""

    pipeline: Pipeline
    plan: Plan
    ranks: Sequence[int]
    reduction: str
    weight: Callable[[Any], Any] | None
    in_axes: Any
    out_axes: Any
    what: str
    warned: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {self.reduction!r}")
        if self.weight is not None and self.reduction != "mean":
            raise ValueError("weight goes with reduction='mean': with 'sum' nothing is weighed")
        if self.plan != self.pipeline.plan(self.plan.placement, self.plan.microbatches):
            raise ScheduleError(
                "the plan has other edges or ties than the pipeline: make it by pipeline.plan(placement, microbatches)"
            )
        for stage, held in enumerate(self.plan.placement.holders):
            if self.pipeline.stages[stage].stateful and len(held) > 1:
                raise ScheduleError(
                    f"stage {stage} is stateful and has copies on ranks {held}: a state needs every microbatch in "
                    "order, so place it on one rank"
                )

    @property
    def stateful(self) -> bool:
        return any(stage.stateful for stage in self.pipeline.stages)

    def pieces(self, loss: bool, has_aux: bool, gather: bool, options: Options) -> Pieces:
        """The stages' pieces, the last with the loss where it is wanted."""
        pipeline = with_loss(self.pipeline, has_aux) if loss else self.pipeline
        return Pieces(pipeline, options.pieces(pipeline, loss), loss, gather and (has_aux or not loss), self._merge)

    def _merge(self, outputs: Mapping[int, Any]) -> Any:
        return merge([outputs[m] for m in range(self.plan.microbatches)], self.out_axes)

    def run(self, run: Callable[[Inputs], Results], inputs: Inputs) -> Results:
        watching = inputs.rng is None and not self.warned
        before = torch.get_rng_state() if watching else None
        results = run(inputs)
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            self.warned = True
            warnings.warn(
                f"the {self.what} drew random numbers from the global generator, so its result depends on the "
                "schedule; pass rng=(seed, step)",
                stacklevel=3,
            )
        return results

    def inputs(
        self, params: Mapping[int, Any], batch: Any, target: Any, state: Mapping[int, Any] | None, rng: Rng | None
    ) -> Inputs:
        """The step's arguments in microbatches; what is wrong with them is told to all ranks by the handler."""
        try:
            if rng is not None:
                seed, step = rng
                rng = (int(seed), int(step))
            self._check_params(params)
            self._check_state(state or {})
            data, rows = self._split(batch, target)
        except Exception as error:
            return Inputs({}, {}, (), broken=self._broken(error))
        return Inputs(params, state or {}, data, rows, self.reduction == "mean" and self.weight is None, rng)

    def _broken(self, error: Exception) -> StageError:
        rank = self.ranks[0] if len(self.ranks) == 1 else None
        if isinstance(error, StageError):
            return error.on(rank)
        plain = isinstance(error, ValueError)
        found = StageError(str(error) if plain else f"{type(error).__name__}: {error}", rank=rank)
        found.__cause__ = error
        return found

    def _check_params(self, params: Mapping[int, Any]) -> None:
        if not isinstance(params, Mapping):
            raise TypeError(f"params must be {{stage: tree}}, not a {type(params).__name__}")
        needed = {stage for rank in self.ranks for stage in self.pipeline.params_on(params, self.plan, rank)}
        foreign = sorted(set(params) - needed, key=repr)
        if foreign:
            raise StageError(
                f"params has entries for stages {foreign}, of which this process holds only {sorted(needed)}: "
                "take pipeline.params_on(params, plan, rank)"
            )

    def _check_state(self, state: Mapping[int, Any]) -> None:
        held = {stage for rank in self.ranks for stage in self.plan.stages_on(rank)}
        stateful = {stage for stage in held if self.pipeline.stages[stage].stateful}
        for stage in sorted(stateful - set(state)):
            raise StageError(
                f"it is stateful, and state has no entry for it: pass state={{{stage}: tree}}", stage=stage
            )
        for stage in sorted(set(state) - stateful, key=repr):
            raise StageError(
                f"state has an entry for stage {stage}, which is not a stateful stage of this process: "
                "pass those of plan.stages_on(rank)"
            )

    def _split(self, batch: Any, target: Any) -> tuple[list[Microbatch], int | None]:
        self.pipeline.accept(batch)
        count = self.plan.microbatches
        axes = self.in_axes if isinstance(self.in_axes, tuple) else (self.in_axes, self.in_axes)
        if len(axes) != 2:
            raise ValueError(f"in_axes is one axis or a pair, for batch and target, not {self.in_axes!r}")
        batches, rows = split(batch, count, axes[0], "batch")
        targets, target_rows = split(target, count, axes[1], "target")
        if self.weight is not None:
            return [Microbatch(*part) for part in zip(batches, targets, self._scales(targets), strict=True)], None
        if self.reduction == "mean" and None not in (rows, target_rows) and rows != target_rows:
            raise ValueError(f"the batch has {rows} rows, the target {target_rows}")
        return list(map(Microbatch, batches, targets)), rows if rows is not None else target_rows

    def _scales(self, targets: Sequence[Any]) -> Sequence[Any]:
        """Each microbatch's share of the weight, where the loss is."""
        assert self.weight is not None
        if not any(self.plan.stages - 1 in self.plan.stages_on(rank) for rank in self.ranks):
            return [None] * len(targets)
        weights = [torch.as_tensor(self.weight(part), dtype=torch.float64, device="cpu") for part in targets]
        whole = functools.reduce(torch.add, weights)
        return [weight / whole for weight in weights]

    def loss(self, results: Results, has_aux: bool) -> Any:
        loss = functools.reduce(torch.add, (results.losses[m] for m in range(self.plan.microbatches)))
        return (loss, results.output) if has_aux else loss
