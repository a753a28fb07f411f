"""Measure stages: the seconds of each piece, and bytes by storage."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fpipe import effects as fx
from fpipe.autodiff.functions import DeferredGraph, SavedGraph
from fpipe.autodiff.interface import DifferentiableStage, Leaves, seed
from fpipe.autodiff.options import Autodiff, Options, Policies
from fpipe.costs import Costs, Shared
from fpipe.errors import blaming
from fpipe.handlers.distributed.strides import buffer, strides_of
from fpipe.handlers.gradients import add_leaves
from fpipe.handlers.protocol import Inputs
from fpipe.policies import everything_saveable
from fpipe.profiling.storages import StorageBytes
from fpipe.stages.microbatch import Microbatch, split
from fpipe.stages.pipeline import Pipeline, with_loss
from fpipe.stages.pytree import Flat, flatten, indices
from fpipe.stages.rng import seeded
from fpipe.stages.stage import Output, Stage

T = TypeVar("T")


def profile(
    pipeline: Pipeline,
    params: Mapping[int, Any],
    batch: Any,
    target: Any = None,
    *,
    microbatches: int = 1,
    state: Mapping[int, Any] | None = None,
    rng: tuple[int, int] | None = None,
    has_aux: bool = False,
    in_axes: Any = 0,
    autodiff: Autodiff = "auto",
    policy: Policies = everything_saveable,
    compile: bool = False,  # noqa: A002
    repeats: int = 10,
) -> Costs:
    """Measure what each stage costs on this machine, for `simulate`, `search` and schedules that order by costs.

    Args:
        params, state: of all stages.
        batch, target: split into `microbatches`. The costs are those of one microbatch: the median over all of them.
        rng: (seed, step), by default (0, 0).
        repeats: the number of measured steps with fused backwards, and of those with split ones, after one unmeasured
            step of each.

    Returns:
        `Costs` in seconds for `forward`, `backward`, `backward_input` and `backward_weight`, and in bytes for
        `activation`, `residuals` and `deferred`. Parameters and the batch are not counted. `shared` lists the memory
        that several of these have in common, `reads` what a stage reads of an output if it does not read all of it.
        Communication costs nothing: set it with `dataclasses.replace(costs, communication=Link(latency, bandwidth))`.

    Raises:
        StageError: an argument is wrong, or a stage failed.
        ValueError: `repeats` is below 1.

    >>> from fpipe import Pipeline
    >>> pipeline = Pipeline([lambda p, x: torch.tanh(x @ p)] * 2, loss=lambda y, t: (y - t).square().mean())
    >>> params, batch, target = {0: torch.eye(4), 1: torch.eye(4)}, torch.ones(6, 4), torch.ones(6, 4)
    >>> costs = profile(pipeline, params, batch, target, microbatches=2)
    >>> costs.activation, costs.residuals[0], costs.forward[0] > 0
    ((48.0, 4.0), 48.0, True)
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    pipeline = with_loss(pipeline, has_aux)
    pieces = Options(autodiff, policy, compile).pieces(pipeline, loss=True)
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes, in_axes)
    batches, targets = (split(tree, microbatches, axis)[0] for tree, axis in zip((batch, target), axes, strict=True))
    data = list(map(Microbatch, batches, targets))
    profiler = _Profiler(pipeline, pieces, Inputs(params, state or {}, data, rng=rng or (0, 0)))
    profiler.step(halves=False)
    profiler.step(halves=True, sizes=True)
    profiler.seconds.clear()  # of the steps that traced the stages
    for _ in range(repeats):
        profiler.step(halves=False)
        profiler.step(halves=True)
    return profiler.costs()


class _Profiler:
    """Run a pipeline's pieces stage by stage, and measure them.

    Args:
        seconds: of each run, by (piece, stage, microbatch).
        sizing: whether the memory of the running microbatch is measured.
    """

    def __init__(self, pipeline: Pipeline, pieces: Sequence[DifferentiableStage], inputs: Inputs) -> None:
        self.pieces, self.inputs = pieces, inputs
        self.prepared = [p.prepare(pipeline.params_of(inputs.params, s)) for s, p in enumerate(pieces)]
        params = [x for p in self.prepared for x in p.leaves]
        self.on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in params)
        self.seconds: dict[tuple[str, int, int], list[float]] = defaultdict(list)
        self.sizes = _Sizes([*params, *flatten((list(inputs.data), dict(inputs.state))).leaves])
        self.sizing = False

    def step(self, halves: bool, sizes: bool = False) -> None:
        """Run every microbatch forward and back; with `sizes`, measure the memory of the first, the largest."""
        state = dict(self.inputs.state)
        for m in range(len(self.inputs.data)):
            self.sizing = sizes and m == 0
            outputs: dict[int, Flat] = {}
            residuals: list[Any] = []
            for s in range(len(self.pieces)):
                outputs[s], kept, state[s] = self._forward(s, m, state.get(s), outputs)
                residuals.append(kept)
            self._backward(m, outputs, residuals, halves)

    def _forward(self, s: int, m: int, state: Any, outputs: Mapping[int, Flat]) -> tuple[Flat, Any, Any]:
        """Return (outputs, residuals, new state)."""
        piece, data, saved = self.pieces[s], self.inputs.data[m], _SavedTensors()
        sources = {source: outputs[source] for source in piece.stage.sources}
        with blaming(s, m), seeded(self.inputs.rng, s, m), saved.hooks() if self.sizing else nullcontext():
            output, residuals, state = self._timed(
                "forward", s, m, lambda: piece.forward(self.prepared[s], state, sources, data, keep=True)
            )
        if self.sizing:
            kept = residuals.values if isinstance(residuals, SavedGraph) else saved.tensors
            self.sizes.add(fx.Activation(s, 0), output.leaves)
            self.sizes.add(fx.Residuals(s, 0), kept)
            if not isinstance(residuals, SavedGraph):
                self.sizes.add(fx.Deferred(s, 0), kept)
            for source, value in sources.items():
                self.sizes.add_read(source, s, _read(piece.stage, source, value))
        return output, residuals, state

    def _backward(self, m: int, outputs: Mapping[int, Flat], kept: list[Any], halves: bool) -> None:
        gradients: dict[int, list[Leaves]] = defaultdict(list)
        for s in reversed(range(len(self.pieces))):
            piece, residuals = self.pieces[s], kept.pop()
            last = s == len(self.pieces) - 1
            cotangents = self._seeds(outputs[s]) if last else add_leaves(gradients.pop(s))
            if halves:
                inputs, deferred = self._timed(
                    "backward_input", s, m, partial(piece.backward_input, residuals, cotangents)
                )
                if self.sizing:
                    leaves = deferred.values if isinstance(deferred, DeferredGraph) else cotangents
                    self.sizes.add(fx.Deferred(s, 0), leaves)
                    for source, leaves in inputs.items():
                        self.sizes.add(fx.Gradient(source, s, 0), leaves)
                self._timed("backward_weight", s, m, partial(piece.backward_weight, deferred))
            else:
                _, inputs = self._timed("backward", s, m, partial(piece.backward, residuals, cotangents))
            for source, leaves in inputs.items():  # from the highest consumer down
                gradients[source].append(leaves)

    def _seeds(self, output: Flat) -> Leaves:
        loss, *rest = output.leaves
        return [seed(loss, None), *[None] * len(rest)]

    def _timed(self, piece: str, s: int, m: int, call: Callable[[], T]) -> T:
        self._wait()
        start = time.perf_counter()
        result = call()
        self._wait()
        self.seconds[piece, s, m].append(time.perf_counter() - start)
        return result

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def costs(self) -> Costs:
        """Return medians over repeats, and then over microbatches."""
        stages, count = range(len(self.pieces)), len(self.inputs.data)

        def times(piece: str) -> list[float]:
            by_microbatch = [[statistics.median(self.seconds[piece, s, m]) for m in range(count)] for s in stages]
            return [statistics.median(medians) for medians in by_microbatch]

        return Costs(
            forward=times("forward"),
            backward_input=times("backward_input"),
            backward_weight=times("backward_weight"),
            backward=times("backward"),
            activation=[self.sizes.activations[fx.Activation(s, 0)] for s in stages],
            residuals=[self.sizes.bytes(fx.Residuals(s, 0)) for s in stages],
            deferred=[self.sizes.bytes(fx.Deferred(s, 0)) for s in stages],
            shared=self.sizes.shared(),
            reads=self.sizes.reads,
        )


class _SavedTensors:
    """The tensors that eager autograd saves for a backward: the residuals of a stage that can't be traced."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def hooks(self) -> saved_tensors_hooks:
        """Return hooks for the forward. Do not trace a stage under them: they would be traced too."""
        return saved_tensors_hooks(self._note, lambda x: x)

    def _note(self, x: Tensor) -> Tensor:
        self.tensors.append(x.detach())
        return x.detach()


class _Sizes:
    """The bytes that the names of one microbatch have. All tensors are kept alive, so that no storage is used twice.

    Args:
        excluded: tensors that do not count.
        activations, reads: bytes that are sent of a whole output, and of what a stage reads of it if that is less.
    """

    def __init__(self, excluded: Iterable[Any]) -> None:
        self.storages, self.kept = StorageBytes[fx.Name](excluded), list[Any]()
        self.activations: dict[fx.Name, int] = {}
        self.reads: dict[tuple[int, int], float] = {}

    def add(self, name: fx.Name, leaves: Sequence[Any]) -> None:
        self.kept += leaves  # a backward empties its list of residuals
        self.storages.add(name, leaves)
        if isinstance(name, fx.Activation):
            self.activations[name] = _sent_bytes(leaves)

    def add_read(self, source: int, reader: int, leaves: Iterable[Any]) -> None:
        size = _sent_bytes(leaves)
        if size < self.activations[fx.Activation(source, 0)]:
            self.reads[source, reader] = size

    def bytes(self, name: fx.Name) -> int:
        return self.storages.bytes(name)

    def shared(self) -> list[Shared]:
        """Return the bytes that names share; not those that a stage's residuals and deferred alone share, because they
        are never live together."""
        sizes: dict[tuple[fx.Name, ...], int] = defaultdict(int)
        for names, size in self.storages.shared():
            stage = names[0].stage
            if {*names} != {fx.Residuals(stage, 0), fx.Deferred(stage, 0)}:
                sizes[names] += size
        whole = self.activations
        return [Shared(min(size, *(whole.get(n, size) for n in names)), names) for names, size in sizes.items()]


def _read(stage: Stage, source: int, value: Flat) -> list[Any]:
    """Return the leaves of a source's output that a stage reads."""
    paths = {read.path for read in stage.inputs if isinstance(read, Output) and read.stage == source}
    return [value.leaves[i] for path in paths for i in indices(value.tree, path)]


def _sent_bytes(leaves: Iterable[Any]) -> int:
    """Return the bytes of the tensors as messages: a view's own elements, and expanded elements once."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return sum(buffer(tuple(x.shape), strides_of(x), x.dtype, torch.device("meta")).nbytes for x in tensors)
