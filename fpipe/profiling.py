"""What stages take: times measured piece by piece, bytes by the traced shapes."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from fpipe.autodiff.functions import Residuals
from fpipe.autodiff.options import Autodiff, Options, Policies
from fpipe.autodiff.pieces import Leaves, Piece, seed
from fpipe.costs import Costs
from fpipe.errors import blaming
from fpipe.gradients import add_leaves
from fpipe.microbatch import Microbatch, split
from fpipe.policies import everything_saveable
from fpipe.rng import seeded
from fpipe.stage import Pipeline, with_loss
from fpipe.tree import Flat, flatten

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
        `activation`, `residuals` and `deferred`, each memory counted once, parameters and the batch apart.
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
    for i in range(1 + repeats):
        run.step(halves=False)
        run.step(halves=True)
        if i == 0:
            run.times.clear()  # in the first, stages are traced
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
        self.sizes: dict[tuple[str, int], int] = defaultdict(int)

    def step(self, halves: bool) -> None:
        """Every microbatch through all stages and back."""
        state = dict(self.state)
        for m, data in enumerate(self.data):
            outputs: dict[int, Flat] = {}
            kept: list[Any] = []
            for s in range(len(self.pieces)):
                outputs[s], residuals, state[s] = self._forward(s, m, state.get(s), outputs, data)
                kept.append(residuals)
            self._backward(m, outputs, kept, halves)

    def _forward(self, s: int, m: int, state: Any, outputs: Mapping[int, Flat], data: Microbatch) -> tuple[Any, ...]:
        piece, saved = self.pieces[s], _Saved()
        sources = {source: outputs[source] for source in piece.stage.sources}
        with blaming(s, m), seeded(self.rng, s, m), saved.noting():
            given, residuals, state = self._timed(
                "forward", s, m, lambda: piece.forward(self.prepared[s], state, sources, data, keep=True)
            )
        self._largest("activation", s, _bytes(given.leaves, without=()))
        if isinstance(residuals, Residuals):
            self._largest("residuals", s, residuals.functions.sizes.residuals)
            self._largest("deferred", s, residuals.functions.sizes.deferred)
        else:
            theirs = [*self.prepared[s].leaves, *flatten(data).leaves]
            self._largest("residuals", s, _bytes(saved.tensors, theirs))
            self._largest("deferred", s, _bytes([*saved.tensors, *given.leaves], theirs))  # all, and the cotangents
        return given, residuals, state

    def _backward(self, m: int, outputs: Mapping[int, Flat], kept: list[Any], halves: bool) -> None:
        gradients: dict[int, list[Leaves]] = defaultdict(list)
        for s in reversed(range(len(self.pieces))):
            piece, residuals = self.pieces[s], kept.pop()
            given = self._seeds(outputs[s]) if s == len(self.pieces) - 1 else add_leaves(gradients.pop(s))
            if halves:
                found, deferred = self._timed("backward_input", s, m, partial(piece.backward_input, residuals, given))
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

    def _largest(self, what: str, s: int, size: int) -> None:
        self.sizes[what, s] = max(self.sizes[what, s], size)

    def costs(self) -> Costs:
        """Medians over repeats, and then over microbatches."""
        stages, count = range(len(self.pieces)), len(self.data)

        def times(piece: str) -> list[float]:
            by_microbatch = [[statistics.median(self.times[piece, s, m]) for m in range(count)] for s in stages]
            return [statistics.median(found) for found in by_microbatch]

        def sizes(what: str) -> list[float]:
            return [self.sizes[what, s] for s in stages]

        return Costs(
            forward=times("forward"),
            backward_input=times("backward_input"),
            backward_weight=times("backward_weight"),
            backward=times("backward"),
            activation=sizes("activation"),
            residuals=sizes("residuals"),
            deferred=sizes("deferred"),
        )


class _Saved:
    """What eager autograd saves for a backward: the sizes of what can't be traced."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def noting(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._note, lambda x: x)

    def _note(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            self.tensors.append(x.detach())
        return x.detach()


def _bytes(leaves: Iterable[Any], without: Iterable[Any]) -> int:
    """The memory of tensors, each counted once."""
    theirs = {x.untyped_storage().data_ptr() for x in without if isinstance(x, Tensor)}
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in leaves if isinstance(x, Tensor)}
    return sum(n for key, n in found.items() if key not in theirs)
