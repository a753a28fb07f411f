"""The options and arguments of a step: check them, split the batch, and weigh its microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fpipe._format import counted
from fpipe.autodiff.interface import Argument, DifferentiablePipeline, differentiates_data
from fpipe.autodiff.options import Options
from fpipe.devices import HostCopy, device_of
from fpipe.errors import ScheduleError, StageError
from fpipe.errors.tracebacks import warn
from fpipe.handlers.gradients import names_read
from fpipe.handlers.protocol import Inputs, Replicas, Results
from fpipe.plan import Plan
from fpipe.stages.carry import by_slice
from fpipe.stages.microbatch import (
    WEIGHING,
    Microbatch,
    Microbatches,
    merge,
    pair_of_axes,
    samples,
    sizes_of,
    slices_of,
    split,
)
from fpipe.stages.pipeline import Pipeline, with_loss
from fpipe.stages.precision import Precision
from fpipe.stages.pytree import flatten
from fpipe.stages.rng import Rng, Seeder, as_rng
from fpipe.stages.stage import Original, StageFunction
from fpipe.training.data_gradients import added, joined
from fpipe.training.loss_scale import LossScale

Reduction = Literal["mean", "sum"]
Buffers = Literal["own"]
State = Mapping[int, Any] | Sequence[Mapping[int, Any]]
"""`{stage: tree}`; of a process that plays several replicas, a list with one for each."""


@dataclass(frozen=True)
class StepSpec:
    """The options of a step: check them and the arguments of each call, and split the batch.

    Args:
        ranks: the ranks that this process plays.
        replicas: the replicas that it plays.
        loss: compute the last stage's loss; without it the outputs are the result.
        differentiated: compute gradients.
        max_norm, check_finite: as of `Inputs`.
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
    precision: Precision
    buffers: Buffers | None
    sequence_axes: Any = 1
    out_sequence_axes: Any = 1
    differentiated: bool = False
    max_norm: float | Literal["a tensor"] | None = None
    check_finite: Literal["raise", "skip"] | None = None

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {self.reduction!r}")
        if self.buffers not in ("own", None):
            raise ValueError(f"buffers must be 'own' or None, not {self.buffers!r}")
        if not isinstance(self.precision, Precision):
            raise TypeError(
                "precision must be a fpipe.Precision, such as Precision(compute=torch.bfloat16), not "
                f"{self.precision!r}"
            )
        if self.weight is not None and self.reduction != "mean":
            raise ValueError("weight needs reduction='mean': with 'sum', losses have no weights")
        of_pipeline = self.pipeline.plan(self.plan.placement, self.plan.microbatches)
        fields = ("edges", "ties", "cotangents")
        if any(getattr(self.plan, name) != getattr(of_pipeline, name) for name in fields):
            raise ScheduleError(
                "the plan's edges, ties or cotangents are not the pipeline's: make it by pipeline.plan(placement, "
                "microbatches)"
            )
        if self.plan.slices > 1:
            self._check_slices()
        if self.pipeline.by_row:
            self._check_rows()
        for stage, ranks in enumerate(self.plan.placement.holders):
            if self.pipeline.stages[stage].stateful and len(ranks) > 1:
                raise ScheduleError(
                    f"stage {stage} is stateful and has copies on ranks {ranks}: a state needs every microbatch in "
                    "order, so place it on one rank, as schedules.search(copies=False) does"
                )
            if self.pipeline.stages[stage].stateful and self.plan.replicas > 1 and self.buffers is None:
                raise ScheduleError(
                    f"stage {stage} is stateful, and the plan has {self.plan.replicas} replicas: pass buffers='own' to "
                    "value_and_grad, train_step and evaluate, and each replica keeps a state of its own, which its "
                    "microbatches alone update; or make the stage stateless (such as a norm that needs no running "
                    "statistics)"
                )

    def _check_slices(self) -> None:
        """Raise an error for stages and options that can't run slices."""
        if not any(stage.carry for stage in self.pipeline.stages):
            raise ScheduleError(
                f"the plan has {self.plan.slices} slices, and no stage of the pipeline has carry=True: a stage that "
                "mixes tokens, as attention does, must get what it needs of earlier slices, as Stage(fn, carry=True) "
                "does. Or make a plan without slices"
            )
        if data := sorted({"batch", "target"} & self.options.argnums):
            raise ValueError(f"argnums has {data[0]!r}, and the plan has slices: make a plan without slices")

    def _check_rows(self) -> None:
        """Raise ValueError for options that make no sense where each sample has gradients of its own."""
        if self.loss and self.reduction != "sum":
            raise ValueError(
                "a pipeline of per_sample has the gradients of each sample's own loss, which are neither averaged nor "
                "weighted: pass reduction='sum', and no weight"
            )
        if self.plan.replicas > 1:
            raise ValueError(
                f"a pipeline of per_sample has a row for each sample, which replicas can't add, and the plan has "
                f"{self.plan.replicas}: make a plan without replicas, and on each a handler of its ranks alone"
            )

    def pieces(self) -> DifferentiablePipeline:
        """Return the stages' functions; those of the last stage include the loss where it is computed."""
        pipeline = with_loss(self.pipeline, self.has_aux) if self.loss else self.pipeline
        if self.plan.slices > 1:
            pipeline = by_slice(pipeline)
        gather = self.gather and (self.has_aux or not self.loss)
        shares: Literal["rows", "weight"] | None = None
        if self.reduction == "mean":
            shares = "rows" if self.weight is None else "weight"
        stages = self.options.pieces(pipeline, self.loss)
        how = gather, self._merge, self.precision, shares, _described(self.weight), self.options.argnums
        return DifferentiablePipeline(pipeline, stages, self.loss, *how, self.differentiated)

    def _merge(self, outputs: Mapping[int, Any], apart: bool | None) -> Any:
        trees, slices = [output for _, output in sorted(outputs.items())], self.plan.slices
        if slices > 1:
            axes = self.out_sequence_axes
            trees = [merge(trees[at : at + slices], axes) for at in range(0, len(trees), slices)]
        return Microbatches(trees) if apart else merge(trees, self.out_axes)

    def total(self, losses: Mapping[int, Tensor]) -> Tensor:
        """Add the losses in microbatch order, of a microbatch in the order of its slices, replica by replica."""
        return functools.reduce(torch.add, (loss for _, loss in sorted(losses.items())))

    def data_gradients(self, inputs: Inputs, results: Results) -> dict[Argument, Any]:
        """Return the gradients of the batch and of the target, as far as they are asked for.

        Raises:
            StageError: the handler has returned none.
        """
        names: list[tuple[int, Argument]] = [(0, "batch"), (1, "target")]
        names = [(at, name) for at, name in names if name in self.options.argnums]
        if not names:
            return {}
        pipeline, first = with_loss(self.pipeline, self.has_aux), self.replicas.here.start * self.plan.microbatches
        readers = {s: pipeline.stages[s] for rank in self.ranks for s in self.plan.stages_on(rank)}
        read = [{name for stage in readers.values() for name in names_read(stage, m)} for m in inputs.data]
        parts: list[list[Mapping[str, Tensor]]] = [[] for _ in inputs.data]
        for (_, number), part in sorted(results.data_gradients.items(), reverse=True):
            if 0 <= number - first < len(parts):
                parts[number - first].append(part)
        for s, stage in readers.items():
            if differentiates_data(stage, self.options.argnums) and s not in {s for s, _ in results.data_gradients}:
                raise StageError(
                    "the handler returns no gradients of what it reads of the batch: leave argnums out", stage=s
                )
        gradients, apart, axes = list(map(added, parts)), bool(inputs.apart), pair_of_axes(self.in_axes)
        return {
            name: joined([m[at] for m in inputs.data], at, axes[at], apart, gradients, read, inputs.loss_scale)
            for at, name in names
        }

    def inputs(
        self,
        params: Mapping[int, Any],
        batch: Any,
        target: Any,
        state: State | None,
        rng: Rng | Seeder | None,
        scales: Sequence[Any] | None = None,
        loss_scale: LossScale | None = None,
    ) -> Inputs:
        """Split the step's arguments into microbatches. The handler reports an error in them to all ranks.

        Args:
            scales: of the microbatches; by default they are computed from the target.
        """
        try:
            rng = rng if rng is None or callable(rng) else as_rng(rng)
            self.check_mode()
            self._check_params(params)
            factor = self._factor(loss_scale)
            states = self._states(state)
            self.warn_of_changes()
            data, sizes = self._split(batch, target)
            lengths = None
            if self.plan.slices > 1:
                data, lengths = slices_of(data, self.plan.slices, self.sequence_axes, self.in_axes)
            if self.weight is not None:
                scaled = scales or self._scales(self.weight, [each.target for each in data])
                data = [each._replace(scale=scale) for each, scale in zip(data, scaled, strict=True)]
        except Exception as error:  # the batch's types and `weight` are the user's, and may raise anything
            known = params if isinstance(params, Mapping) else {}  # it shows which processes are to raise an error too
            return Inputs(known, (), (), broken=self._stage_error(error))
        trees = [tree for tree in (batch, target) if tree is not None]
        apart = isinstance(trees[0], Microbatches) if trees else None
        rows = None if sizes is None else sum(sizes)
        later: dict[str, Any] = {"loss_scale": factor, "max_norm": self.max_norm, "check_finite": self.check_finite}
        if (slices := self.plan.slices) > 1:
            sizes = None if sizes is None else [size for size in sizes for _ in range(slices)]
            later |= {"slices": slices, "lengths": lengths}
        return Inputs(params, states, data, rows, sizes, self._weighed, apart, rng, **later)

    @property
    def _weighed(self) -> bool:
        """Whether each loss is scaled by its share of the rows."""
        return self.reduction == "mean" and self.weight is None

    def check_mode(self) -> None:
        """Raise StageError under a transform of torch.func, and for gradients under `torch.inference_mode`.

        A transform can't differentiate or map a step, whose results are detached; in inference mode autograd records
        nothing.
        """
        if transform := enclosing_transform():
            raise StageError(
                f"the step is called within {transform}, which can't see into it: transform the pipeline instead, by "
                "fpipe.transforms.jvp, hvp, vmap or per_sample, and make a step of the result. In one process "
                "torch.func takes the pipeline itself, pipeline(params, batch, target)"
            )
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
            scales = self._scales(self.weight, [each.target for each in data])
        except Exception as error:  # the batch's types and `weight` are the user's, and may raise anything
            raise self._stage_error(error) from error
        shares = [scale() for scale in scales if scale is not None]
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

    def _factor(self, loss_scale: LossScale | None) -> Tensor | None:
        if loss_scale is None:
            return None
        if not isinstance(loss_scale, LossScale):
            raise TypeError(f"loss_scale must be a fpipe.LossScale or None, not a {type(loss_scale).__name__}")
        if not self.differentiated:
            raise ValueError("loss_scale= is for gradients, and evaluate computes none: leave it out")
        return loss_scale.tensor

    @functools.cached_property
    def warn_of_changes(self) -> Callable[[], None]:
        """Warn of parameters that were frozen or unfrozen in their module since `Pipeline`, once for each set."""
        originals = _originals(self.pipeline) if self.differentiated else []
        usual = [original.trained for _, original in originals]
        references = [original.parameter for _, original in originals]
        seen = {tuple(usual)}

        def warn_of_new() -> None:
            parameters = [reference() for reference in references]  # in every call: about 0.1 microseconds for each
            flags = tuple([was if p is None else p.requires_grad for p, was in zip(parameters, usual, strict=True)])
            if flags in seen:
                return
            seen.add(flags)
            each = zip(originals, flags, strict=True)
            names = [f"{original.name} of stage {s}" for (s, original), flag in each if original.trained != flag]
            warn(
                f"requires_grad of {', '.join(names[:3])}{' and more' if len(names) > 3 else ''} has changed in "
                "the module since the pipeline was made. The step trains the params that were trained then. If "
                "the change is meant for it, make the pipeline of the module again, and go on with the same params",
            )

        return warn_of_new

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

    def _split(self, batch: Any, target: Any) -> tuple[list[Microbatch], Sequence[int] | None]:
        """Return the microbatches, and the rows of each."""
        apart = {isinstance(tree, Microbatches) for tree in (batch, target) if tree is not None}
        if len(apart) > 1:
            split_one = "target" if isinstance(batch, Microbatches) else "batch"
            raise ValueError(f"one of batch and target is Microbatches: pass both so, or the {split_one} as None")
        for tree in batch if isinstance(batch, Microbatches) else [batch]:
            self.pipeline.accept(tree)
        count = self.plan.microbatches * len(self.replicas.here)
        axes = pair_of_axes(self.in_axes)
        batches, rows = split(batch, count, axes[0], "batch")
        targets, target_rows = split(target, count, axes[1], "target")
        data = list(map(Microbatch, batches, targets))
        if self.weight is not None:
            return data, None
        if True in apart:
            return data, self._samples(batch, target, axes) if self.loss and self._weighed else None
        if self.reduction == "mean" and None not in (rows, target_rows) and rows != target_rows:
            raise ValueError(f"the batch has {counted(rows or 0, 'row')}, the target {target_rows}")
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
                    f"microbatch {m} of the batch has {counted(rows, 'row')}, that of the target "
                    f"{target_rows}: {WEIGHING}"
                )
        return of_batch

    def _scales(self, weight: Callable[[Any], Any], targets: Sequence[Any]) -> Sequence[Callable[[], float] | None]:
        """Return a function of each microbatch's share of the weight; None where the loss is not computed."""
        if not any(self.plan.stages - 1 in self.plan.stages_on(rank) for rank in self.ranks):
            return [None] * len(targets)
        return _shares(list(map(weight, targets)), self.replicas)


def _described(function: Callable[..., Any] | None) -> str:
    """Return a text about a function: equal ones have the same in every process."""
    code = getattr(function, "__code__", None)
    if code is None:
        return "" if function is None else f"{getattr(function, '__qualname__', type(function).__qualname__)}"
    constants = [const for const in code.co_consts if isinstance(const, bool | int | float | str | bytes | None)]
    return f"{code.co_qualname} {code.co_code.hex()} {code.co_names} {constants}"


def enclosing_transform() -> str | None:
    """Return the name of the transform of torch.func, or of forward mode, in which this is called."""
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()  # None outside of any, against its annotation
    if interpreter is not None:
        return f"torch.func.{interpreter.key().name.lower()}"
    return "torch.autograd.forward_ad.dual_level" if forward_ad._current_level >= 0 else None


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


def _originals(pipeline: Pipeline) -> list[tuple[int, Original]]:
    """Return the parameters of the modules that stages come from, each with its stage."""
    functions = [(s, function) for s, function in enumerate(pipeline.functions) if isinstance(function, StageFunction)]
    return [(s, original) for s, function in functions for original in function.originals]
