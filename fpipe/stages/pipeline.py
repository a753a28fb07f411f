"""Stages put together into a pipeline: a pure function, which torch.func composes with."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, SupportsIndex

import torch

from fpipe._format import counted
from fpipe.errors import StageError
from fpipe.errors.arguments import checked
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.plan import Cotangents, Edges, Placement, Plan, check_cotangents
from fpipe.stages.cache import Cache
from fpipe.stages.describe import description, html
from fpipe.stages.microbatch import Microbatch, Microbatches
from fpipe.stages.pytree import Path, as_path, flatten, get_at, paths, set_at, short
from fpipe.stages.selection import Where, leaves_of, selected
from fpipe.stages.stage import CARRY, Batch, Output, Read, Stage, StageFunction, Target

SharedParam = tuple[int, Path]
"""A stage, and the path of an entry in its params."""


class PlaysRanks(Protocol):
    """The part of a handler that the params of its process depend on."""

    def ranks(self, plan: Plan) -> tuple[int, ...]: ...


class Pipeline:
    """A DAG of stages. The last stage's output goes to the loss.

    Args:
        stages: a `Stage` or a plain function for each.
        loss: `loss(output, target) -> loss | (loss, aux)`, a 0-dim tensor; None takes the last output.
        ties: parameters that another stage uses as well, `{(stage, path): (lower stage, path)}`. Only the lower
            stage's params have the entry. It is added to the other stage's dict when that runs.
        cotangents: "by_rank" lets a rank add the gradients that its stages have of one output, and send the sum: with
            skips to many stages, fewer messages, and bits that depend on the placement. By default each is sent.
        cache: of stages that generate tokens.

    Raises:
        ScheduleError: a stage reads a later one, or no stage reads it; or `cotangents` is neither of the two.
        ValueError: a tie does not lead to a lower stage.

    >>> double = Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=lambda y, t: (y - t).sum())
    >>> double({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.ones(3), torch.zeros(3))
    tensor(9.)
    """

    @checked("cotangents")
    def __init__(
        self,
        stages: Sequence[Stage | Callable[..., Any]],
        loss: Callable[..., Any] | None = None,
        *,
        ties: Mapping[tuple[int, Any], tuple[int, Any]] | None = None,
        cotangents: Cotangents = "by_consumer",
        cache: Cache | None = None,
    ) -> None:
        check_cotangents(cotangents)
        if not len(stages):
            raise ValueError("a pipeline needs at least one stage")
        self.stages = tuple(_with_reads(s if isinstance(s, Stage) else Stage(s), i) for i, s in enumerate(stages))
        self.loss, self.cotangents, self.cache = loss, cotangents, cache
        self.edges = Edges([[s for s in stage.sources if s != CARRY] for stage in self.stages])
        # All uses of each shared param: the param itself first, then by stage.
        self.entries = _entries(ties or {}, len(self.stages))
        # Those that were passed, of which transforms make others.
        self.functions = tuple(stage.fn for stage in self.stages)
        first = self.functions[0]
        self.accepts: Callable[[Any], None] | None = first.accepts if isinstance(first, StageFunction) else None
        # Why an optimizer can't take the gradients; None where it can.
        self.no_update: str | None = None

    @property
    def by_row(self) -> bool:
        """Return whether params get a gradient for each row of the batch, which are not added."""
        return any(stage.rows is not None for stage in self.stages)

    @checked("placement", "microbatches", "replicas", "slices")
    def plan(
        self,
        placement: Placement,
        microbatches: int,
        replicas: int = 1,
        trained: Collection[int] | None = None,
        slices: int = 1,
    ) -> Plan:
        """Return the plan for this pipeline's edges, ties and trained stages.

        Args:
            microbatches: of each replica.
            replicas: copies of the whole pipeline, each with its own part of the batch.
            trained: the stages with trained params, by default `self.trained`. `range(stages)` leaves out only the
                input gradients of stages that no trained stage precedes, such as the first.
            slices: parts of each microbatch, along its sequences. Stages that mix tokens, as attention does, pass on
                what later slices need: `Stage(carry=True)`.

        Raises:
            ScheduleError: the placement's stages are not this pipeline's.
        """
        ties = tuple(tuple(sorted({stage for stage, _ in uses})) for uses in self.entries.values())
        trained = self.trained if trained is None else trained
        kinds: dict[str, Any] = {"cotangents": self.cotangents, "trained": trained, "slices": slices}
        return Plan(placement, microbatches, self.edges, ties, replicas, **kinds)

    @property
    def trained(self) -> frozenset[int] | None:
        """The stages with trained params, as far as `Stage.frozen` tells; None if no stage is frozen as a whole.

        The owner of an entry is among them as long as another stage's use of the entry is trained.
        """
        frozen = {s for s, stage in enumerate(self.stages) if () in map(as_path, stage.frozen)}
        for (owner, _), uses in self.entries.items():
            if not all(self._is_frozen(user, path) for user, path in uses):
                frozen.discard(owner)
        return frozenset(range(len(self.stages))) - frozen if frozen else None

    def _is_frozen(self, stage: int, path: Path) -> bool:
        entries = map(as_path, self.stages[stage].frozen)
        return any(path[: len(entry)] == entry for entry in entries)

    @checked("params")
    def freeze(self, params: Mapping[int, Any], where: Where) -> Pipeline:
        """Return the pipeline with more params frozen: they get no gradient, which is None.

        A stage whose params are all frozen, or that has none, is left out of the plan's `trained`: its weight gradients
        are neither scheduled nor computed, and its input gradients only if a stage before it is trained.

        Args:
            params: of all stages; only their structure is read, so that they may be on the meta device.
            where: a pattern of names, several of them, or a predicate of (path, parameter), whose path begins with the
                stage. An entry that several stages share is decided by its place in the params.

        Raises:
            ValueError: a pattern matches no parameter.
            StageError: the params of a stage are missing.

        >>> pipeline = Pipeline([lambda p, x: x * p["scale"] + p["bias"]] * 2)
        >>> params = {stage: {"scale": torch.ones(()), "bias": torch.zeros(())} for stage in range(2)}
        >>> first = pipeline.freeze(params, lambda path, x: path[0] == 0)
        >>> first.trained, first.unfreeze(params, "bias").stages[0].frozen
        (frozenset({1}), (('scale',),))
        """
        return self._with_frozen(params, where, True)

    @checked("params")
    def unfreeze(self, params: Mapping[int, Any], where: Where) -> Pipeline:
        """Return the pipeline with fewer params frozen. The arguments and errors are those of `freeze`."""
        return self._with_frozen(params, where, False)

    def sequence_parallel(self, dim: int = 1) -> Pipeline:
        """Return the pipeline with activations cut along their tokens, between layers and between stages.

        It is for stages that several processes compute together, by leaves that are DTensors; others stay as they are.
        A layer whose parts of a sum would be added on every process gives each process the sum of its tokens alone, and
        a layer that is cut gathers what it reads. So norms, additions and dropout compute on pieces, and an edge of the
        pipeline carries 1/n of the bytes from each of n processes.

        Activations are tensors of three dimensions, [batch, tokens, width]. Of others, and where the processes don't
        divide the number of tokens, nothing is cut. The loss and the gradients are the same within rounding.

        Args:
            dim: of the tokens: 1, or 0 for [tokens, batch, width].

        Raises:
            ValueError: another `dim`.

        Source: Korthikanti et al., Reducing activation recomputation in large transformer models, 2022, section 4.2.2
        (https://arxiv.org/abs/2205.05198).
        """
        if dim not in (0, 1):
            raise ValueError(f"activations are [batch, tokens, width], or [tokens, batch, width] with dim=0; dim={dim}")
        return self.replace([replace(stage, sequence=dim) for stage in self.stages], self.loss)

    def _with_frozen(self, params: Mapping[int, Any], where: Where, frozen: bool) -> Pipeline:
        trees = {stage: _tree_of(params, stage) for stage in range(len(self.stages))}
        changed = set(selected(where, leaves_of(trees)))
        stages = [
            replace(stage, frozen=self._frozen_paths(params, index, changed, frozen))
            for index, stage in enumerate(self.stages)
        ]
        return self.replace(stages, self.loss)

    def _frozen_paths(self, params: Mapping[int, Any], stage: int, changed: set[Path], frozen: bool) -> tuple[Any, ...]:
        tree = self.params_of(params, stage)
        uses = {path: entry for entry, of_entry in self.entries.items() for user, path in of_entry if user == stage}
        trained, entries = list[Path](), list[Path]()
        for path, leaf in zip(paths(tree), flatten(tree).leaves, strict=True):
            place = (stage, *path)
            for use, (owner, source) in uses.items():
                if path[: len(use)] == use:
                    place = (owner, *source, *path[len(use) :])
            is_frozen = frozen if place in changed else self._is_frozen(stage, path)
            if is_frozen:
                entries.append(path)
            elif isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                trained.append(path)
        return tuple(entries) if trained else ((),)

    @fold_tracebacks
    def __call__(
        self, params: Mapping[int, Any], batch: Any, *target: Any, state: Mapping[int, Any] | None = None
    ) -> Any:
        """Run the whole batch through all stages, in this process.

        Return the result of `loss` if there is a target, else the last stage's output. With `state`, return a pair of
        this and the new state.
        """
        if len(target) > 1:
            raise TypeError(f"a pipeline takes params, a batch and one target, not {len(target)} targets")
        if isinstance(batch, Microbatches):
            raise TypeError("a pipeline is called with one batch: call it for each of the Microbatches")
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
        """Check a batch, if the stages come from an exported module.

        Raises:
            ValueError: the stages would ignore a part of the batch.
        """
        if self.accepts is not None:
            self.accepts(batch)

    def params_of(self, params: Mapping[int, Any], stage: int) -> Any:
        """Return a stage's params, with the entries that it shares.

        Raises:
            StageError: the stage's params, or an entry, are missing.
        """
        tree = _tree_of(params, stage)
        for (owner, source), uses in self.entries.items():
            for user, path in uses:
                if user == stage and owner != stage:
                    shared = self._shared(params, stage, path, owner, source)
                    try:
                        tree = set_at(tree, path, shared)
                    except (TypeError, ValueError) as error:
                        raise StageError(
                            f"its {short(path)} is tied to params[{owner}]{short(source)} and can't be put in: "
                            f"{error}; leave it out of params[{stage}]",
                            stage=stage,
                        ) from error
        return tree

    def _shared(self, params: Mapping[int, Any], stage: int, path: Path, owner: int, source: Path) -> Any:
        try:
            return get_at(params[owner], source)
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise StageError(
                f"it shares {short(path)} with stage {owner}, and params[{owner}]{short(source)} is missing: "
                "pipeline.params_on(params, plan, rank) picks what a rank needs",
                stage=stage,
            ) from error

    @checked("params")
    def params_on(self, params: Mapping[int, Any], plan: Plan, rank: SupportsIndex | PlaysRanks) -> dict[int, Any]:
        """Return the params that a rank, or a process, needs: its stages' trees, and the entries that they share.

        Args:
            rank: or a handler, for all ranks that this process plays.

        >>> pipeline = Pipeline([lambda p, x: x, lambda p, x: x], ties={(1, "head"): (0, "wte")})
        >>> pipeline.params_on({0: {"wte": 1, "wpe": 2}, 1: {}}, pipeline.plan(Placement.loop(2), 1), rank=1)
        {0: {'wte': 1}, 1: {}}
        """
        stages = _stages_on(plan, rank)
        trees: dict[int, Any] = {stage: _tree_of(params, stage) for stage in stages}
        for (owner, path), uses in self.entries.items():
            users = [use for use in uses[1:] if use[0] in stages]
            if owner not in stages and users:
                trees[owner] = set_at(trees.get(owner, {}), path, self._shared(params, *users[0], owner, path))
        return dict(sorted(trees.items()))

    @checked()
    def state_on(self, state: Mapping[int, Any], plan: Plan, rank: SupportsIndex | PlaysRanks) -> dict[int, Any]:
        """Return the state that a rank, or a process, needs: its stages' trees. `rank` is as in `params_on`.

        >>> pipeline = Pipeline([Stage(lambda p, s, x: (x, s), stateful=True)] * 2)
        >>> pipeline.state_on({0: {"seen": 1}, 1: {"seen": 2}}, pipeline.plan(Placement.loop(2), 1), rank=1)
        {1: {'seen': 2}}
        """
        return {stage: state[stage] for stage in _stages_on(plan, rank) if stage in state}

    def describe(self, params: Mapping[int, Any] | None = None) -> str:
        """Return a table of the stages: parameters, bytes, reads; and the ties.

        Args:
            params: the params to measure. By default those of the modules that stages come from.

        Stages of `interop.split` also show the bytes that they read, for a microbatch as large as the example, and
        the share of the time if they were balanced.

        >>> pipeline = Pipeline([lambda p, x: x @ p["w"], lambda p, x: x @ p["w"].T], ties={(1, "w"): (0, "w")})
        >>> print(pipeline.describe({0: {"w": torch.zeros(8, 4)}, 1: {}}))
        stage  parameters  bytes  reads
            0          32  128 B  batch
            1           0    0 B  stage 0
        tied: w of stage 1 is w of stage 0
        """
        return description(self.stages, self.entries, params)

    def __repr__(self) -> str:
        counts = [counted(len(self.stages), "stage")]
        if ties := sum(len(uses) - 1 for uses in self.entries.values()):
            counts.append(counted(ties, "tie"))
        if self.loss is not None:
            counts.append(f"loss {getattr(self.loss, '__name__', type(self.loss).__name__)}")
        return f"<Pipeline: {', '.join(counts)}>"

    def _repr_html_(self) -> str:
        """Return the table of stages that a notebook shows."""
        return html(self.stages, self.entries)

    def replace(
        self, stages: Sequence[Stage], loss: Callable[..., Any] | None, cotangents: Cotangents | None = None
    ) -> Pipeline:
        """Return a pipeline with the same edges, ties, cache and check of the batch, and other stages and loss.

        Args:
            cotangents: by default the same.
        """
        twin = Pipeline(stages, loss, cotangents=cotangents or self.cotangents, cache=self.cache)
        twin.entries, twin.functions = self.entries, self.functions
        twin.accepts, twin.no_update = self.accepts, self.no_update
        return twin


def _stages_on(plan: Plan, rank: SupportsIndex | PlaysRanks) -> list[int]:
    if not (isinstance(rank, SupportsIndex) or callable(getattr(rank, "ranks", None))):
        raise TypeError(f"rank must be a number, or a handler, which plays ranks, not {rank!r}")
    try:
        ranks = [operator.index(rank)] if isinstance(rank, SupportsIndex) else rank.ranks(plan)
    except TypeError as error:
        raise TypeError(f"rank must be a number, or a handler, which plays ranks, not {rank!r}") from error
    return sorted({stage for each in ranks for stage in plan.stages_on(each)})


def _tree_of(params: Mapping[int, Any], stage: int) -> Any:
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be {{stage: tree}}, not {params!r}")
    if stage in params:
        return params[stage]
    raise StageError(
        f"params has no entry for it, only for stages {sorted(params)}: params is {{stage: tree}}, "
        "with an empty tree where a stage has no parameters",
        stage=stage,
    )


def _with_reads(stage: Stage, index: int) -> Stage:
    if stage.reads is not None:
        if isinstance(stage.reads, Read | int):
            raise TypeError(f"stage {index} reads {stage.reads!r}: give a list of its inputs, reads=[{stage.reads!r}]")
        for read in stage.inputs:
            if not isinstance(read, Read):
                raise TypeError(f"stage {index} reads {read!r}: name an Output, a Batch, or a stage's number")
        return stage
    return replace(stage, reads=(Output(index - 1),) if index else (Batch(),))


def _entries(
    ties: Mapping[tuple[int, Any], tuple[int, Any]], stages: int
) -> dict[SharedParam, tuple[SharedParam, ...]]:
    uses: dict[SharedParam, list[SharedParam]] = {}
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
    return {entry: tuple(sorted(users, key=lambda use: use[0])) for entry, users in uses.items()}


def with_loss(pipeline: Pipeline, has_aux: bool) -> Pipeline:
    """Return a pipeline whose last stage returns `(loss, aux)`; aux is None without `has_aux`."""
    *stages, last = pipeline.stages
    loss_fn = pipeline.loss

    def fn(params: Any, *inputs: Any) -> Any:
        *inputs_, target = inputs
        output, *rest = last.separated(last.fn(params, *inputs_))
        loss = _loss(loss_fn, output, target, has_aux)
        return (loss, *rest) if rest else loss

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
        hint = ""
        if isinstance(loss, tuple):
            hint = "; has_aux=True takes (loss, aux), which those of transforms.jvp, vmap and per_sample return too"
        raise TypeError(f"the loss must be a floating-point tensor without dimensions, not {shape}{hint}")
    return loss, aux
