"""A step: a function that runs all ranks' programs once, as they are or as a captured graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fpipe._format import extent
from fpipe.autodiff.interface import Argument, NonZero
from fpipe.devices import autocasts, current_device
from fpipe.errors import StageError
from fpipe.errors.tracebacks import fold_tracebacks, warn
from fpipe.handlers.captured import Captured
from fpipe.handlers.captured_pieces import CapturedPieces
from fpipe.handlers.protocol import Alone, Handler, Inputs, Observer, Outcome, Replays, Results, Run
from fpipe.profiling.observers import observing, watches_effects
from fpipe.programs.program import Programs, plan_of
from fpipe.programs.residuals import moves
from fpipe.stages.precision import OWN_DTYPES
from fpipe.stages.rng import Rng, Seeder
from fpipe.training.arguments import State, StepSpec
from fpipe.training.finite import raise_if_not_finite
from fpipe.training.loss_scale import LossScale

T = TypeVar("T")
UNCOMPILED = (
    "a step of fpipe is no code for torch.compile, since it runs effects: compile=True of value_and_grad and evaluate "
    "compiles the stages, and capture=True makes a graph of the step"
)
Capture = bool | Literal["pieces"]


class Computed(NamedTuple):
    """The results of a step.

    Args:
        losses: of the microbatches, scaled by their shares; empty where nothing reads them.
        output: of all microbatches merged: aux, or evaluate's output.
        rows: of the whole batch.
        data_gradients: of the batch and of the target, as far as they are asked for.
        shares: see `Results`.
    """

    loss: Tensor | None
    losses: Mapping[int, Tensor]
    output: Any
    gradients: dict[int, Any]
    state: State
    rows: int | None
    data_gradients: dict[Argument, Any]
    shares: Callable[[], list[list[int]]] | None = None

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.loss, self.rows, self.gradients)


class Arguments(NamedTuple):
    """The arguments of a step that is captured.

    Args:
        weights: of the microbatches, in one tensor; None where the rows are the weights.
        zero: which of these weights are zero.
        loss_scale: None for 1.
        more: those of the function that goes on with the results.
    """

    params: Mapping[int, Any]
    batch: Any
    target: Any
    state: State | None
    weights: Tensor | None
    zero: tuple[bool, ...]
    loss_scale: LossScale | None
    more: Any


Then = Callable[[Arguments, Computed], tuple[Any, Computed]]
"""Goes on with the results of a step; returns a result of its own, and the results that are left."""


class Step:
    """A function of params, batch and target that runs the programs once.

    Args:
        name: of what runs, for the observer and for warnings.
        result: makes the function's result of the loss or outputs and of all that was computed.
        capture: replay graphs where there are some: of the whole step, or of its pieces.
        checks: raise NonFiniteError where loss or gradients are not finite.
    """

    def __init__(
        self,
        spec: StepSpec,
        programs: Programs,
        handler: Handler,
        observe: Observer | None,
        name: str,
        result: Callable[[Any, Computed], Any],
        capture: Capture = False,
        checks: bool = False,
    ) -> None:
        spec = replace(spec, check_finite="raise") if checks else spec
        pieces, observer = spec.pieces(), observing(observe)
        self.spec, self.result, self.replays = spec, result, handler.replays or Alone()
        self.name, self.handler, self.checks = name, handler, checks
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
        self.captured = self.capturing(losses=checks) if capture is True else None

    def __repr__(self) -> str:
        return f"<Step: {self.name}, {extent(self.spec.plan)}, {self.handler}>"

    @fold_tracebacks
    def __call__(
        self,
        params: Mapping[int, Any],
        batch: Any,
        target: Any = None,
        *,
        state: State | None = None,
        rng: Rng | None = None,
        loss_scale: LossScale | None = None,
    ) -> Any:
        step = self._outside_dynamo if "torch._dynamo" in sys.modules else Step._step
        return step(self, params, batch, target, state, rng, loss_scale)

    @functools.cached_property
    def _outside_dynamo(self) -> Callable[..., Any]:
        """`_step` as a function that `torch.compile` leaves alone: in a compiled function it breaks the graph."""
        function: Callable[..., Any] = torch.compiler.disable(Step._step, reason=UNCOMPILED)  # type: ignore[no-untyped-call]
        return function

    def _step(
        self,
        params: Any,
        batch: Any,
        target: Any,
        state: State | None,
        rng: Rng | None,
        loss_scale: LossScale | None,
    ) -> Any:
        if self.captured is None:
            run = self.compute_on_all if self.checks else self.compute
            computed = run(params, batch, target, state, rng, loss_scale)
        else:
            _, computed = self.captured(params, batch, target, state, rng, loss_scale)
        if self.checks:  # of gradients that are scaled, not finite only means that the scale is too large
            grads = computed.gradients if self.spec.differentiated and loss_scale is None else None
            data_gradients = computed.data_gradients
            raise_if_not_finite(computed.losses, self.spec.plan, self.handler, grads, data_gradients=data_gradients)
        return self.result(self.value(computed), computed)

    def compute(
        self,
        params: Mapping[int, Any],
        batch: Any,
        target: Any,
        state: State | None,
        rng: Rng | None,
        loss_scale: LossScale | None,
        **more: Any,
    ) -> Computed:
        """Run the programs as they are; with more of `Inputs`."""
        self.notices.on_step_begin()
        inputs = self.spec.inputs(params, batch, target, state, rng, loss_scale=loss_scale)
        if self.pieces is not None and isinstance(inputs.rng, tuple):
            inputs = replace(inputs, rng=self.pieces.seed.seeder(inputs.rng))
        inputs = replace(inputs, **more) if more else inputs
        computed = _compute(self.spec, self.checked_run, inputs)
        self.notices.on_step_end(computed.outcome)
        return computed

    def compute_on_all(self, *arguments: Any, **more: Any) -> Computed:
        """Run the programs as they are, and wait until every rank has: a rank that fails is a failure of all."""
        with self.replays.step():
            computed = self.compute(*arguments, **more)
            if self.handler.peers is not None:
                self.handler.check()
        return computed

    def value(self, computed: Computed) -> Any:
        """Return the loss, the pair of loss and aux, or the outputs."""
        if self.spec.has_aux:
            return computed.loss, computed.output
        return computed.output if computed.loss is None else computed.loss

    def capturing(self, then: Then | None = None, losses: bool = False) -> CapturedStep:
        """Return the step as a graph, which goes on with `then`; with the losses of the microbatches, if asked for."""
        return CapturedStep(self.spec, self.run, self.notices, self.replays, self.device, then, losses)


class CapturedStep:
    """A step that is captured: it runs the programs, and returns `then(arguments, computed)`.

    Args:
        then: a function that goes on with the results; by default there is nothing more.
        device: where this process computes; None if the arguments say it.
        losses: return those of the microbatches too.
    """

    def __init__(
        self,
        spec: StepSpec,
        run: Run,
        notices: Observer,
        replays: Replays,
        device: torch.device | None,
        then: Then | None,
        losses: bool = False,
    ) -> None:
        self.spec, self.notices, self.replays = spec, notices, replays

        def function(arguments: Arguments, seeder: Seeder | None) -> tuple[Any, Computed]:
            params, batch, target, state, weights, zero, loss_scale, _ = arguments
            each = () if weights is None else weights.unbind()
            scales = [0.0 if is_zero else NonZero(w) for w, is_zero in zip(each, zero, strict=True)]
            scale_of = [functools.partial(_identity, scale) for scale in scales]
            computed = _compute(spec, run, spec.inputs(params, batch, target, state, seeder, scale_of, loss_scale))
            result = None
            if then is not None:
                with replays.running("the update"):
                    result, computed = then(arguments, computed)
            return result, computed if losses else computed._replace(losses={})

        self.captured = Captured(function, replays, device)

    def __call__(
        self,
        params: Any,
        batch: Any,
        target: Any,
        state: Any,
        rng: Rng | None,
        loss_scale: LossScale | None = None,
        more: Any = None,
    ) -> tuple[Any, Computed]:
        """Run, capture or replay a step.

        Args:
            more: for `then`.
        """
        self.notices.on_step_begin()
        with self.replays.step():
            try:
                self.spec.check_mode()
                self.spec.warn_of_changes()  # a replay does not come to `inputs`
                weights, zero = self.spec.weights(params, batch, target)
                arguments = Arguments(params, batch, target, state, weights, zero, loss_scale, more)
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


def _compute(spec: StepSpec, run: Run, inputs: Inputs) -> Computed:
    results = run(inputs)
    if autocasts():
        torch.clear_autocast_cache()  # of casts of this step's leaves, which it would keep until autocast ends
    loss = spec.total(results.losses) if spec.loss else None
    state = results.state if len(spec.replicas.here) > 1 else results.state[0]
    data_gradients = spec.data_gradients(inputs, results)
    computed = Computed(loss, results.losses, results.output, results.gradients, state, inputs.rows, data_gradients)
    return computed._replace(shares=results.shares)


def check_capture(handler: Handler, observer: Observer | None, compile: bool | str, capture: Capture) -> None:  # noqa: A002
    """Check that steps of a handler can be captured.

    Raises:
        ValueError: they can't, or the options need what a replay lacks.
    """
    if capture is not True and capture != "pieces":
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


def check_replicas_captured(spec: StepSpec, programs: Programs, handler: Handler, capture: Capture) -> None:
    """Raise ValueError for replicas, shards, casts, rows and residuals whose steps can't be captured."""
    plan, here = plan_of(programs), len(spec.replicas.here)
    if plan.gathered and handler.peers is not None:
        raise ValueError(f"{capture=} with resident=: a graph gathers no shards. Leave one of them out")
    if any(map(moves, programs.values())):
        raise ValueError(f"{capture=} with residuals on the host, or recomputed: leave one of them out, as offload=")
    if plan.replicas > here and spec.weight is not None:
        raise ValueError(
            f"{capture=} with weight= and replicas in other processes: their weights are added on the host. Leave one "
            "of them out"
        )
    if capture == "pieces" and spec.pipeline.by_row:
        raise ValueError("capture='pieces' adds gradients, and those of per_sample are not added. Take capture=True")
    if capture == "pieces" and (here > 1 or spec.precision != OWN_DTYPES):
        raise ValueError(
            "capture='pieces' with several replicas in one process, or with precision=: the graphs of a piece read one "
            "copy of the params as they are. Take capture=True"
        )


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
            warn(
                f"{name} drew random numbers from the global generator, so its result depends on the schedule; "
                "pass rng=(seed, step)",
            )
        return results

    return checked
