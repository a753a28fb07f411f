"""What stages take: times measured piece by piece, and bytes by which memory is whose."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from fpipe import effects as fx
from fpipe.autodiff.functions import Deferred, Residuals
from fpipe.autodiff.interface import Leaves, Piece, seed
from fpipe.autodiff.options import Autodiff, Options, Policies
from fpipe.costs import Costs, Shared
from fpipe.errors import blaming
from fpipe.handlers.distributed.strides import buffer, strides_of
from fpipe.handlers.gradients import add_leaves
from fpipe.policies import everything_saveable
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
    """What each stage's pieces take on this machine, for `simulate`, `search` and schedules that order by costs.

    Args:
        params, state: of all stages.
        batch, target: split into `microbatches`, of which costs are those of one: the median over all of them.
        rng: (seed, step), by default (0, 0).
        repeats: steps that are measured with backwards in one, and as many with split ones, after one of each that
            isn't.

    Returns:
        `Costs` with seconds for `forward`, `backward`, `backward_input` and `backward_weight`, and bytes for
        `activation`, `residuals` and `deferred`, parameters and the batch apart, with what of it is the same memory
        (`shared`) and what of an output its readers read (`reads`).
        Communication costs nothing: `dataclasses.replace(costs, communication=Link(latency, bandwidth))` says
        what it takes.

    Raises:
        StageError: what was given is wrong, or a stage failed.
        ValueError: no repeats.

    >>> from fpipe import Pipeline
    >>> pipeline = Pipeline([lambda p, x: torch.tanh(x @ p)] * 2, loss=lambda y, t: (y - t).square().mean())
    >>> params, batch, target = {0: torch.eye(4), 1: torch.eye(4)}, torch.ones(6, 4), torch.ones(6, 4)
    >>> costs = profile(pipeline, params, batch, target, microbatches=2)
    >>> costs.activation, costs.residuals[0], costs.forward[0] > 0
    ((48.0, 4.0), 48.0, True)
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    whole = with_loss(pipeline, has_aux)
    pieces = Options(autodiff, policy, compile).pieces(whole, loss=True)
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes, in_axes)
    batches, targets = (split(tree, microbatches, axis)[0] for tree, axis in zip((batch, target), axes, strict=True))
    run = _Run(whole, pieces, params, state or {}, rng or (0, 0), list(map(Microbatch, batches, targets)))
    run.step(halves=False)
    run.step(halves=True, noting=True)
    run.times.clear()  # in these, stages are traced
    for _ in range(repeats):
        run.step(halves=False)
        run.step(halves=True)
    return run.costs()


class _Run:
    """A pipeline's pieces, run stage by stage and measured."""

    def __init__(
        self,
        pipeline: Pipeline,
        pieces: Sequence[Piece],
        params: Mapping[int, Any],
        state: Mapping[int, Any],
        rng: tuple[int, int],
        data: Sequence[Microbatch],
    ) -> None:
        self.pipeline, self.pieces, self.rng, self.data, self.state = pipeline, pieces, rng, data, state
        self.prepared = [p.prepare(pipeline.params_of(params, s)) for s, p in enumerate(pieces)]
        self.on_gpu = any(isinstance(x, Tensor) and x.is_cuda for p in self.prepared for x in p.leaves)
        self.times: dict[tuple[str, int, int], list[float]] = defaultdict(list)  # by piece, stage and microbatch
        given = flatten((list(data), dict(state))).leaves
        self.memory = _Memory([*(x for p in self.prepared for x in p.leaves), *given])
        self.noting = False

    def step(self, halves: bool, noting: bool = False) -> None:
        """Every microbatch through all stages and back; of the first, which is the largest, its memory is noted."""
        state = dict(self.state)
        for m, data in enumerate(self.data):
            self.noting = noting and m == 0
            outputs: dict[int, Flat] = {}
            kept: list[Any] = []
            for s in range(len(self.pieces)):
                outputs[s], residuals, state[s] = self._forward(s, m, state.get(s), outputs, data)
                kept.append(residuals)
            self._backward(m, outputs, kept, halves)

    def _forward(self, s: int, m: int, state: Any, outputs: Mapping[int, Flat], data: Microbatch) -> tuple[Any, ...]:
        piece, saved = self.pieces[s], _Saved()
        sources = {source: outputs[source] for source in piece.stage.sources}
        with blaming(s, m), seeded(self.rng, s, m), saved.hooks() if self.noting else nullcontext():
            given, residuals, state = self._timed(
                "forward", s, m, lambda: piece.forward(self.prepared[s], state, sources, data, keep=True)
            )
        if self.noting:
            kept = residuals.values if isinstance(residuals, Residuals) else saved.tensors
            self.memory.note(fx.Activation(s, 0), given.leaves)
            self.memory.note(fx.Residuals(s, 0), kept)
            if not isinstance(residuals, Residuals):
                self.memory.note(fx.Deferred(s, 0), kept)
            for source, value in sources.items():
                self.memory.read(source, s, _read(piece.stage, source, value))
        return given, residuals, state

    def _backward(self, m: int, outputs: Mapping[int, Flat], kept: list[Any], halves: bool) -> None:
        gradients: dict[int, list[Leaves]] = defaultdict(list)
        for s in reversed(range(len(self.pieces))):
            piece, residuals = self.pieces[s], kept.pop()
            given = self._seeds(outputs[s]) if s == len(self.pieces) - 1 else add_leaves(gradients.pop(s))
            if halves:
                found, deferred = self._timed("backward_input", s, m, partial(piece.backward_input, residuals, given))
                if self.noting:
                    self.memory.note(fx.Deferred(s, 0), deferred.values if isinstance(deferred, Deferred) else given)
                    for source, leaves in found.items():
                        self.memory.note(fx.Gradient(source, s, 0), leaves)
                self._timed("backward_weight", s, m, partial(piece.backward_weight, deferred))
            else:
                _, found = self._timed("backward", s, m, partial(piece.backward, residuals, given))
            for source, leaves in found.items():  # from the highest consumer down
                gradients[source].append(leaves)

    def _seeds(self, output: Flat) -> Leaves:
        loss, *rest = output.leaves
        return [seed(loss, None), *[None] * len(rest)]

    def _timed(self, piece: str, s: int, m: int, call: Callable[[], T]) -> T:
        self._wait()
        start = time.perf_counter()
        result = call()
        self._wait()
        self.times[piece, s, m].append(time.perf_counter() - start)
        return result

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def costs(self) -> Costs:
        """Medians over repeats, and then over microbatches."""
        stages, count = range(len(self.pieces)), len(self.data)

        def times(piece: str) -> list[float]:
            by_microbatch = [[statistics.median(self.times[piece, s, m]) for m in range(count)] for s in stages]
            return [statistics.median(found) for found in by_microbatch]

        return Costs(
            forward=times("forward"),
            backward_input=times("backward_input"),
            backward_weight=times("backward_weight"),
            backward=times("backward"),
            activation=[self.memory.activations[fx.Activation(s, 0)] for s in stages],
            residuals=[self.memory.bytes(fx.Residuals(s, 0)) for s in stages],
            deferred=[self.memory.bytes(fx.Deferred(s, 0)) for s in stages],
            shared=self.memory.shared(),
            reads=self.memory.reads,
        )


class _Saved:
    """What eager autograd saves for a backward: the memory of what can't be traced."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def hooks(self) -> saved_tensors_hooks:
        """Not while a stage is traced, which would trace them too."""
        return saved_tensors_hooks(self._note, lambda x: x)

    def _note(self, x: Tensor) -> Tensor:
        self.tensors.append(x.detach())
        return x.detach()


class _Memory:
    """Which names of a microbatch have which memory. It holds all of it, so that none is used twice.

    Args:
        apart: what is nobody's.
        activations, reads: bytes that travel of a whole output, and of what a stage reads of it where that is less.
    """

    def __init__(self, apart: Iterable[Any]) -> None:
        self.apart = _storages(apart)
        self.found: dict[int, tuple[UntypedStorage, dict[fx.Name, None]]] = {}
        self.activations: dict[fx.Name, int] = {}
        self.reads: dict[tuple[int, int], float] = {}

    def note(self, name: fx.Name, leaves: Sequence[Any]) -> None:
        storages = _storages(leaves)
        if isinstance(name, fx.Activation):
            self.activations[name] = _travelling(leaves)
        for key, storage in storages.items():
            if key not in self.apart:
                self.found.setdefault(key, (storage, {}))[1][name] = None

    def read(self, source: int, reader: int, leaves: Iterable[Any]) -> None:
        size = _travelling(leaves)
        if size < self.activations[fx.Activation(source, 0)]:
            self.reads[source, reader] = size

    def bytes(self, name: fx.Name) -> int:
        return sum(storage.nbytes() for storage, names in self.found.values() if name in names)

    def shared(self) -> list[Shared]:
        """By the names that share it; what a stage's residuals and deferred alone share is never held by both."""
        sizes: dict[tuple[fx.Name, ...], int] = defaultdict(int)
        for storage, names in self.found.values():
            if len(names) > 1 and names.keys() != {fx.Residuals(s := next(iter(names)).stage, 0), fx.Deferred(s, 0)}:
                sizes[tuple(names)] += storage.nbytes()
        whole = self.activations
        return [Shared(min(size, *(whole.get(n, size) for n in names)), names) for names, size in sizes.items()]


def _read(stage: Stage, source: int, value: Flat) -> list[Any]:
    """The leaves of a source's output that a stage reads."""
    paths = {read.path for read in stage.inputs if isinstance(read, Output) and read.stage == source}
    return [value.leaves[i] for path in paths for i in indices(value.tree, path)]


def _travelling(leaves: Iterable[Any]) -> int:
    """Bytes of the messages that tensors become: of a view its own elements, of what is expanded each once."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return sum(buffer(tuple(x.shape), strides_of(x), x.dtype, torch.device("meta")).nbytes for x in tensors)


def _storages(leaves: Iterable[Any]) -> dict[int, UntypedStorage]:
    """Each memory that tensors have."""
    found = [x.untyped_storage() for x in leaves if isinstance(x, Tensor)]
    return {storage._cdata: storage for storage in found}
