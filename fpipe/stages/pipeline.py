"""Stages put together into a pipeline: a pure function, which torch.func composes with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fpipe.errors import StageError
from fpipe.plan import Edges, Placement, Plan
from fpipe.stages.describe import description, html
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Path, as_path, pick, place, short
from fpipe.stages.stage import Batch, Output, Read, Stage, Target

Entry = tuple[int, Path]


class Pipeline:
    """Stages put together: a DAG whose last stage's output goes to the loss.

    Args:
        stages: a `Stage` or a plain function for each.
        loss: `loss(output, target) -> loss | (loss, aux)`, a 0-dim tensor; None takes the last output.
        ties: parameters used by a second stage, `{(stage, path): (lower stage, path)}`. The entry lives in
            the lower stage's params alone, and is put into the other's dict when it runs.

    Raises:
        ScheduleError: an edge backwards, or a stage that nobody reads.
        ValueError: a tie to the wrong side.

    >>> double = Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=lambda y, t: (y - t).sum())
    >>> double({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.ones(3), torch.zeros(3))
    tensor(9.)
    """

    def __init__(
        self,
        stages: Sequence[Stage | Callable[..., Any]],
        loss: Callable[..., Any] | None = None,
        *,
        ties: Mapping[tuple[int, Any], tuple[int, Any]] | None = None,
    ) -> None:
        if not stages:
            raise ValueError("a pipeline needs at least one stage")
        self.stages = tuple(_with_reads(s if isinstance(s, Stage) else Stage(s), i) for i, s in enumerate(stages))
        self.loss = loss
        self.edges = Edges([stage.sources for stage in self.stages])
        # Each shared parameter, (stage, path), with all its uses: itself first, then by stage.
        self.entries = _entries(ties or {}, len(self.stages))

    def plan(self, placement: Placement, microbatches: int) -> Plan:
        """The plan for this pipeline's edges and ties.

        Raises:
            ScheduleError: the placement's stages are not this pipeline's.
        """
        ties = tuple(tuple(sorted({stage for stage, _ in uses})) for uses in self.entries.values())
        return Plan(placement, microbatches, self.edges, ties)

    def __call__(
        self, params: Mapping[int, Any], batch: Any, *target: Any, state: Mapping[int, Any] | None = None
    ) -> Any:
        """The whole batch through all stages, in this process.

        With a target, what `loss` returns; without one, the last stage's output. With `state`, a pair of
        that and the new state.
        """
        if len(target) > 1:
            raise TypeError(f"a pipeline takes params, a batch and one target, not {len(target)} targets")
        self.accept(batch)
        outputs: dict[int, Any] = {}
        states = dict(state or {})
        data = Microbatch(batch, None)
        for index, stage in enumerate(self.stages):
            inputs = stage.arguments(outputs, stage.given(data))
            outputs[index], new = stage(self.params_of(params, index), states.get(index), inputs)
            if stage.stateful:
                states[index] = new
        result = outputs[len(self.stages) - 1]
        if target and self.loss is not None:
            result = self.loss(result, target[0])
        return result if state is None else (result, states)

    def accept(self, batch: Any) -> None:
        """Raises:
        ValueError: stages would pass over a part of the batch, as those of an exported module can tell.
        """
        if accepts := getattr(self.stages[0].fn, "accepts", None):
            accepts(batch)

    def params_of(self, params: Mapping[int, Any], stage: int) -> Any:
        """A stage's own params with the entries that it shares put in.

        Raises:
            StageError: the stage's params, or an entry, are missing.
        """
        tree = _given(params, stage)
        for (owner, source), uses in self.entries.items():
            for user, path in uses:
                if user == stage and owner != stage:
                    shared = self._shared(params, stage, path, owner, source)
                    try:
                        tree = place(tree, path, shared)
                    except (TypeError, ValueError) as error:
                        raise StageError(
                            f"its {short(path)} is tied to params[{owner}]{short(source)} and can't be put in: "
                            f"{error}; leave it out of params[{stage}]",
                            stage=stage,
                        ) from error
        return tree

    def _shared(self, params: Mapping[int, Any], stage: int, path: Path, owner: int, source: Path) -> Any:
        try:
            return pick(params[owner], source)
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise StageError(
                f"it shares {short(path)} with stage {owner}, and params[{owner}]{short(source)} is missing: "
                "pipeline.params_on(params, plan, rank) picks what a rank needs",
                stage=stage,
            ) from error

    def params_on(self, params: Mapping[int, Any], plan: Plan, rank: int) -> dict[int, Any]:
        """What one rank needs of all params: its stages' trees, and the entries that they share.

        >>> pipeline = Pipeline([lambda p, x: x, lambda p, x: x], ties={(1, "head"): (0, "wte")})
        >>> pipeline.params_on({0: {"wte": 1, "wpe": 2}, 1: {}}, pipeline.plan(Placement.loop(2), 1), rank=1)
        {0: {'wte': 1}, 1: {}}
        """
        held: dict[int, Any] = {stage: _given(params, stage) for stage in plan.stages_on(rank)}
        for (owner, path), uses in self.entries.items():
            users = [use for use in uses[1:] if use[0] in plan.stages_on(rank)]
            if owner not in plan.stages_on(rank) and users:
                held[owner] = place(held.get(owner, {}), path, self._shared(params, *users[0], owner, path))
        return dict(sorted(held.items()))

    def state_on(self, state: Mapping[int, Any], plan: Plan, rank: int) -> dict[int, Any]:
        """What one rank needs of all state: its stages' trees.

        >>> pipeline = Pipeline([Stage(lambda p, s, x: (x, s), stateful=True)] * 2)
        >>> pipeline.state_on({0: {"seen": 1}, 1: {"seen": 2}}, pipeline.plan(Placement.loop(2), 1), rank=1)
        {1: {'seen': 2}}
        """
        return {stage: state[stage] for stage in plan.stages_on(rank) if stage in state}

    def describe(self, params: Mapping[int, Any] | None = None) -> str:
        """A table of the stages: parameters, bytes, what each reads; and the ties.

        Args:
            params: whose sizes to tell; by default those of modules, which know their own.

        What a stage reads in bytes, for a microbatch as large as the example, is told of stages that come from
        `interop.split`, and the share of the time of those that were balanced.

        >>> pipeline = Pipeline([lambda p, x: x @ p["w"], lambda p, x: x @ p["w"].T], ties={(1, "w"): (0, "w")})
        >>> print(pipeline.describe({0: {"w": torch.zeros(8, 4)}, 1: {}}))
        stage  parameters  bytes  reads
            0          32  128 B  batch
            1           0    0 B  stage 0
        tied: w of stage 1 is w of stage 0
        """
        return description(self.stages, self.entries, params)

    def _repr_html_(self) -> str:
        """Return the table of stages that a notebook shows."""
        return html(self.stages, self.entries)

    def replace(self, stages: Sequence[Stage], loss: Callable[..., Any] | None) -> Pipeline:
        """The same edges' and ties' pipeline with other stages and another loss."""
        twin = Pipeline(stages, loss)
        twin.entries = self.entries
        return twin


def _given(params: Mapping[int, Any], stage: int) -> Any:
    if stage in params:
        return params[stage]
    raise StageError(
        f"params has no entry for it, only for stages {sorted(params)}: params is {{stage: tree}}, "
        "with an empty tree where a stage has no parameters",
        stage=stage,
    )


def _with_reads(stage: Stage, index: int) -> Stage:
    if stage.reads is not None:
        for read in stage.inputs:
            if not isinstance(read, Read):
                raise TypeError(f"stage {index} reads {read!r}: name an Output, a Batch, or a stage's number")
        return stage
    return replace(stage, reads=(Output(index - 1),) if index else (Batch(),))


def _entries(ties: Mapping[tuple[int, Any], tuple[int, Any]], stages: int) -> dict[Entry, tuple[Entry, ...]]:
    uses: dict[Entry, list[Entry]] = {}
    for (user, path), (owner, source) in ties.items():
        if not 0 <= owner < user < stages:
            raise ValueError(
                f"the tie {(user, path)} -> {(owner, source)} must lead from a stage to a lower one: a shared "
                f"entry lives with the lowest stage that uses it (there are stages 0 to {stages - 1})"
            )
        if () in (path, source):
            raise ValueError(f"the tie {(user, path)} -> {(owner, source)} names no entry, but a stage's whole params")
        if (user, path) in ties.values():
            raise ValueError(f"the tie to {(user, path)} ends at an entry that is tied itself: lead both to the lowest")
        entry = (owner, as_path(source))
        uses.setdefault(entry, [entry]).append((user, as_path(path)))
    for (stage, path), (other, longer) in itertools.permutations(uses, 2):
        if stage == other and longer[: len(path)] == path:
            raise ValueError(
                f"two ties share {short(longer)} of stage {stage}: tie the whole {short(path)}, or its parts"
            )
    return {entry: tuple(sorted(found, key=lambda use: use[0])) for entry, found in uses.items()}


def with_loss(pipeline: Pipeline, has_aux: bool) -> Pipeline:
    """The pipeline whose last stage puts out `(loss, aux)`; aux is None without `has_aux`."""
    *stages, last = pipeline.stages
    loss_fn = pipeline.loss

    def fn(params: Any, *inputs: Any) -> Any:
        *inputs_, target = inputs
        if last.stateful:
            output, state = last.fn(params, *inputs_)
            return _loss(loss_fn, output, target, has_aux), state
        return _loss(loss_fn, last.fn(params, *inputs_), target, has_aux)

    return pipeline.replace([*stages, replace(last, fn=fn, reads=(*last.inputs, Target()))], None)


def _loss(loss_fn: Callable[..., Any] | None, output: Any, target: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    loss = output if loss_fn is None else loss_fn(output, target)
    aux = None
    if has_aux:
        if not isinstance(loss, tuple) or len(loss) != 2:
            raise TypeError(f"with has_aux the loss function returns (loss, aux), not {type(loss).__name__}")
        loss, aux = loss
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        shape = f"{loss.dtype}{list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        hint = "; has_aux=True takes (loss, aux)" if isinstance(loss, tuple) else ""
        raise TypeError(f"the loss must be a floating-point tensor without dimensions, not {shape}{hint}")
    return loss, aux
