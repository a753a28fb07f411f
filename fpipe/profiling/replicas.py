"""Measure the gathers and scatters of each stage over the replicas, by a program that a handler runs as a step.

On each rank, for one stage after the other: gather, release, scatter zeros as large as the gradients. Each is waited
for at once, so that nothing is beside it but those of the other ranks, and every replica begins it at the same time.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fpipe import effects as fx
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.handlers.calls import Calls, Instruction
from fpipe.handlers.distributed.handler import Distributed
from fpipe.handlers.protocol import Inputs, Observer
from fpipe.plan import Placement, Plan
from fpipe.programs.program import Program
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import flatten
from fpipe.stages.sharding import is_dtensor

Seconds = dict[tuple[str, int, int], list[float]]
"""By the name of a cost, stage and microbatch: the times of each run."""


def measure(
    pieces: DifferentiablePipeline,
    params: Mapping[int, Any],
    state: Sequence[Mapping[int, Any]],
    handler: Distributed,
    now: Callable[[], float],
    repeats: int,
) -> Seconds:
    """Return the times of the gathers and scatters of this rank's stages, where stage s is on rank s mod ranks.

    Args:
        params: of all stages. Those with DTensors are gathered, and the gradients of those without are whole sums.
        state: of all stages, as in `Inputs`.
        now: returns the time when the device has done all its work.

    Raises:
        ScheduleError: there are fewer stages than ranks.
        StageError: params are not sharded over the handler's replicas.
    """
    stages, pipeline = len(pieces.stages), pieces.pipeline
    sharded = frozenset(s for s in range(stages) if any(map(is_dtensor, flatten(pipeline.params_of(params, s)).leaves)))
    placement = Placement([s % handler.size for s in range(stages)])
    plan = Plan(placement, 1, replicas=handler.grid.replicas, gathered=sharded)
    (rank,) = handler.ranks(plan)
    programs = {r: Program(plan, r, tuple(_effects(plan.stages_on(r), r, sharded))) for r in range(plan.ranks)}
    timing = copy.copy(handler)
    timing.functions = {fx.Forward: _agree, fx.Backward: _zeros, fx.Reduce: _finish}
    watch = _Watch(now, sharded)
    run = timing.compile(programs, replace(pieces, loss=False, differentiated=False), watch)
    inputs = Inputs(pipeline.params_on(params, plan, rank), state, [Microbatch(None, None)])
    run(inputs)
    watch.seconds.clear()
    for _ in range(repeats):
        run(inputs)
    return dict(watch.seconds)


def _effects(stages: Collection[int], rank: int, sharded: Collection[int]) -> Iterator[fx.Effect]:
    for s in stages:
        yield fx.Forward(s, 0)
        if s in sharded:
            yield fx.Gather(s)
        yield fx.Backward(s, 0)
        if s in sharded:
            yield fx.Release(s)
        yield fx.Scatter(s, rank)
        yield fx.Reduce(s)


def _agree(calls: Calls, effect: fx.Forward) -> Instruction:
    """In place of a forward: wait until every rank has come to the step."""
    channels: Any = calls.channels
    agree: Instruction = channels.agree
    return agree


def _zeros(calls: Calls, effect: fx.Backward) -> Instruction:
    """In place of a backward: give gradients as large as the parameters."""

    def call() -> None:
        step = calls.step
        prepared = step.prepared[effect.stage]
        zeros = [torch.zeros_like(prepared.leaves[i]) for i in prepared.trained]
        step.sums[effect.stage].add(zeros, fresh=range(len(zeros)))

    return call


def _finish(calls: Calls, effect: fx.Reduce) -> Instruction:
    """In place of a reduction: wait for the sums of all replicas, and drop them."""

    def call() -> None:
        calls.step.scattered[effect.stage]()
        del calls.step.scattered[effect.stage]

    return call


class _Watch(Observer):
    """Takes the time from the post of a gather or a scatter until its value is there."""

    def __init__(self, now: Callable[[], float], sharded: Collection[int]) -> None:
        self.now, self.sharded, self.start = now, sharded, 0.0
        self.seconds: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)

    def begin(self, rank: int, effect: Any) -> None:
        if isinstance(effect, fx.Gather | fx.Scatter):
            self.start = self.now()
        elif isinstance(effect, fx.Backward) and effect.stage in self.sharded:
            self._add("gather", effect.stage)

    def end(self, rank: int, effect: Any) -> None:
        if isinstance(effect, fx.Reduce):
            self._add("scatter", effect.stage)

    def _add(self, cost: str, stage: int) -> None:
        self.seconds[cost, stage, 0].append(self.now() - self.start)
