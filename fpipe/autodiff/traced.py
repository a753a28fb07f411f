"""Traced autodiff of a stage. Each signature is traced and partitioned at its first call.

A stage that cannot be traced runs by eager autograd, with one warning. Residuals are a list that the backward clears,
so that memory is released while it runs.
"""

from __future__ import annotations

import gc
import itertools
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from fpipe.autodiff import agreement
from fpipe.autodiff.braid import Run, plainly
from fpipe.autodiff.eager import NO_REENTRANT, Eager, is_reentrant
from fpipe.autodiff.functions import DeferredGraph, Functions, SavedGraph, TraceConfig
from fpipe.autodiff.graph.block import Sink
from fpipe.autodiff.graph.collectives import Communicates, ranks_of
from fpipe.autodiff.graph.locations import user_line
from fpipe.autodiff.graph.signature import Impure, Leaf, Signature, Spec, Tree, Untraceable, ambient, leaf_key
from fpipe.autodiff.interface import (
    DATA,
    PARAMS,
    Argument,
    Leaves,
    Prepared,
    WeightGradients,
    differentiated,
    differentiates_data,
    prepared,
)
from fpipe.errors import StageError
from fpipe.errors.tracebacks import warn
from fpipe.policies import Policy, everything_saveable
from fpipe.stages.cuts import cuts_of, with_cuts
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Flat, flatten
from fpipe.stages.sharding import Placed
from fpipe.stages.stage import Output, Stage

NO_STATE, NO_DATA = flatten(None), flatten([])
GRAPHS_BEFORE_WARNING = 64
GRAPHS_KEPT = 256
"""For one function. Of more, those are kept that were used last; with symbolic sizes, those that were traced last."""


@dataclass(eq=False, slots=True)
class Looked:
    """A signature's functions: None if it cannot be traced, ... if nobody has tried."""

    functions: Functions | EllipsisType | None = ...


def _entries() -> Callable[[Hashable], Looked]:
    return lru_cache(GRAPHS_KEPT)(lambda signature: Looked())


def _numbers() -> Callable[[Hashable], int]:
    count = itertools.count()
    return lru_cache(GRAPHS_KEPT)(lambda key: next(count))


@dataclass(eq=False)
class Graphs:
    """The graphs of one function.

    Args:
        traced: the latest of them, in the order of tracing.
        count: how many have been traced.
        entry: returns the entry of a signature.
        reason: why it cannot be traced.
        walked_once: eager autograd can walk the function's graph only once.
        in_turns: overlaps of the program run them in turns.
        step: returns a number for the signature of the params together with the settings of torch.
    """

    traced: deque[Functions] = field(default_factory=lambda: deque(maxlen=GRAPHS_KEPT))
    count: int = 0
    entry: Callable[[Hashable], Looked] = field(default_factory=_entries)
    step: Callable[[Hashable], int] = field(default_factory=_numbers)
    reason: str = ""
    walked_once: bool = False
    in_turns: bool = False


class Traced:
    """Autodiff of a stage by graphs.

    Args:
        name: the stage's number, for messages.
        policy: the values that a forward may save.
        compile: give each function to `torch.compile`; a text is its mode.
        dynamic: trace one graph for all sizes of the inputs, rather than one for each.
        fallback: run a stage that cannot be traced by eager autograd, with a warning.
        loss: leaf 0 of the output is the loss. Only it gets a cotangent.
        graphs: graphs to share with stages of the same function.
        argnums: the arguments of the step that are differentiated.
        last: it is the pipeline's last stage, whose outputs are whole on each process that computes it.
        donated: a forward that is not differentiated may write the new state into the memory of the old one.

    Attributes:
        run: calls the functions of graphs; another one runs them in turns with those of another stage.
        waits: whether a graph has waited for collectives.
        peers: the processes in the groups of its collectives.

    Raises:
        StageError: (by its methods) the stage cannot be traced, and `fallback` is False.
    """

    def __init__(
        self,
        stage: Stage,
        name: int = 0,
        *,
        policy: Policy = everything_saveable,
        compile: bool | str = False,  # noqa: A002
        dynamic: bool = False,
        fallback: bool = True,
        loss: bool = False,
        graphs: Graphs | None = None,
        argnums: frozenset[Argument] = PARAMS,
        last: bool = True,
        donated: bool = False,
    ) -> None:
        self.stage, self.name, self.fallback = stage, name, fallback
        self.last = last
        self.argnums, self.differentiates_data = argnums, differentiates_data(stage, argnums)
        self.config = TraceConfig(stage, name, loss, policy, compile, dynamic, self.differentiates_data, donated)
        self.eager = Eager(stage, argnums=argnums)
        self.reads_data = any(not isinstance(read, Output) for read in stage.inputs)
        self.sources = stage.sources
        self.inputs = (*self.sources, DATA) if self.differentiates_data else self.sources
        self.latest: tuple[Hashable, Functions | None] = (None, None)
        self.graphs = graphs or Graphs()
        self.cause: Exception | None = None
        self.warned = False
        self.run: Run = plainly
        self.waits = False
        self.peers = frozenset[int]()

    def prepare(self, params: Any) -> Prepared:
        return prepared(self.stage, params, self.argnums)

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        trees = self._trees(state, sources, data, keep)
        inputs = [x for tree in trees for x in tree.leaves]
        functions = self._functions(prepared, trees, inputs, keep)
        if functions is None:
            return self._by_eager(prepared, state, sources, data, keep)
        outputs, new, residuals = functions.forward(prepared, inputs, self.run)
        return with_cuts(outputs, functions.output_spec, functions.cuts), residuals, functions.state_spec.unflatten(new)

    def trace(self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool) -> None:
        """Trace the stage for such a call of `forward`, unless there is a graph for it."""
        trees = self._trees(state, sources, data, keep)
        self._functions(prepared, trees, [x for tree in trees for x in tree.leaves], keep)

    def _trees(self, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool) -> list[Flat]:
        """Return the inputs of a call: state, sources, and what the stage reads of the microbatch."""
        state_tree = flatten(state) if self.stage.stateful else NO_STATE
        data_tree = NO_DATA
        if keep and self.differentiates_data:
            data_tree = flatten(differentiated(self.stage, data, self.argnums))
        elif self.reads_data:
            data_tree = flatten(self.stage.given(data))
        return [state_tree, *[sources[s] for s in self.sources], data_tree]

    @property
    def last_sources(self) -> dict[int, Flat] | None:
        """Trees on the meta device like the sources of the last call. None where that ran no graph, or collectives."""
        functions = self.latest[1]
        if functions is None or functions.collectives:
            return None
        trees = dict(zip(self.sources, functions.signature.sources, strict=True))
        if any(isinstance(x, Spec) and (x.conj or x.neg or x.placed) for tree in trees.values() for x in tree.leaves):
            return None
        return {source: Flat(list(map(_without_values, tree.leaves)), tree.spec) for source, tree in trees.items()}

    def backward(
        self, residuals: Any, cotangents: Leaves, sink: Sink | None = None
    ) -> tuple[WeightGradients, dict[int, Leaves]]:
        if isinstance(residuals, SavedGraph):
            weights, gradients = residuals.functions.backward(residuals, cotangents, sink, self.run)
            return weights, dict(zip(self.inputs, gradients, strict=True))
        return self.eager.backward(residuals, cotangents)

    def backward_input(self, residuals: Any, cotangents: Leaves) -> tuple[dict[int, Leaves], Any]:
        if isinstance(residuals, SavedGraph):
            gradients, deferred = residuals.functions.backward_input(residuals, cotangents, self.run)
            return dict(zip(self.inputs, gradients, strict=True)), deferred
        return self.eager.backward_input(residuals, cotangents)

    def backward_weight(self, deferred: Any, sink: Sink | None = None) -> WeightGradients:
        if isinstance(deferred, DeferredGraph):
            return deferred.functions.backward_weight(deferred, sink, self.run)
        return self.eager.backward_weight(deferred)

    @staticmethod
    def is_graph(saved: Any) -> bool:
        """Return whether residuals or deferred values are a graph's, rather than eager autograd's."""
        return isinstance(saved, SavedGraph | DeferredGraph)

    # Tracing

    def _functions(self, prepared: Prepared, trees: list[Flat], inputs: Leaves, keep: bool) -> Functions | None:
        """Return the functions for this call's signature; None if it cannot be traced."""
        try:
            key = self._key(prepared, trees, inputs, keep)
        except Untraceable as error:
            self.graphs.reason = self.graphs.reason or _reason(error)
            return None
        if key != self.latest[0]:
            self.latest = key, self._look_up(key, prepared, trees, keep)
            if (functions := self.latest[1]) is not None:
                self.waits |= functions.waits
                self.peers = self.peers.union(*(post.group for post in functions.collectives))
        return self.latest[1]

    def _look_up(self, key: Hashable, prepared: Prepared, trees: list[Flat], keep: bool) -> Functions | None:
        """Return the functions for a signature. Trace it if it is new."""
        entry = self.graphs.entry(key)
        if entry.functions is not ...:
            return entry.functions
        try:
            functions = self._new(prepared, trees, keep)
        except StageError as error:
            self._refuse(prepared, error.message)
            raise
        if functions is not None:
            functions.compare(self.graphs.in_turns)
        else:
            self._refuse(prepared, f"it can't be traced: {self.graphs.reason}")
        entry.functions = functions
        gc.collect(1)  # torch's tracer leaves reference cycles that hold the tensors of this call
        return functions

    def _refuse(self, prepared: Prepared, reason: str) -> None:
        """Give the processes that compute the stage together with this one the reason why it can't."""
        for mesh in {placed.mesh for placed in prepared.placed.values()}:
            agreement.refuse(self.config.number, ranks_of(mesh.get_group()), reason)

    def _new(self, prepared: Prepared, trees: list[Flat], keep: bool) -> Functions | None:
        """Return new functions for a signature; None if it cannot be traced."""
        functions = None
        try:
            signature = signature_of(prepared, *trees, keep=keep, data_wanted=self.differentiates_data)
            functions = self._find(signature._replace(whole=self._is_whole(prepared, trees)))
        except StageError as error:
            raise StageError(error.message, stage=self.name) from error.__cause__
        except Communicates as error:
            raise StageError(
                f"it has collectives, and can't be traced: {_reason(_cause(error))}. By eager autograd, ranks "
                "could run them in different orders, and wait for each other for ever",
                stage=self.name,
            ) from error.__cause__
        except Impure as error:
            raise StageError(str(error), stage=self.name) from error
        except Exception as error:
            if is_reentrant(error):
                raise StageError(NO_REENTRANT, stage=self.name) from error
            self.graphs.reason = self.graphs.reason or _reason(error)
            self.cause = None if self.fallback and not prepared.placed else error
            self.graphs.walked_once |= "selective activation checkpoint" in str(error)
        return functions

    def _find(self, signature: Signature) -> Functions:
        """Return a graph for a signature. If sizes are symbols, an existing graph may be valid for it."""
        for known in self.graphs.traced if self.config.dynamic else ():
            if known.guards is not None and known.guards.admit(signature):
                return known
        functions = self._trace(signature)
        self.graphs.traced.append(functions)
        self.graphs.count += 1
        if self.graphs.count == GRAPHS_BEFORE_WARNING:
            warn(
                f"stage {self.name} has been traced for {GRAPHS_BEFORE_WARNING} signatures, each of which takes time "
                "and memory: dynamic=True traces once for many sizes, and lengths padded to multiples of a number are "
                f"few; pass plain values that change as tensors. The {GRAPHS_KEPT} that were used last are kept"
            )
        return functions

    def _trace(self, signature: Signature) -> Functions:
        if self.config.dynamic:
            try:
                return Functions(self.config, signature)
            except StageError:
                raise
            except Exception as error:
                self._warn_once(f"is traced for each of its sizes, since symbols do not work: {_reason(error)}")
        return Functions(replace(self.config, dynamic=False), signature)

    def _warn_once(self, text: str) -> None:
        if not self.warned:
            self.warned = True
            warn(f"stage {self.name} {text}")

    def _key(self, prepared: Prepared, trees: list[Flat], inputs: Leaves, keep: bool) -> Hashable:
        """Return a key for the signature. A number stands for the parts that are constant during a step."""
        if self not in prepared.computed:
            placed = tuple(prepared.placed.items())
            step = prepared.spec, placed, ambient(), *map(leaf_key, prepared.leaves)
            prepared.computed[self] = self.graphs.step(step)
        cuts = [tuple(cuts_of(tree).items()) for tree in trees]
        kind = prepared.computed[self], keep, self._is_whole(prepared, trees)
        return *kind, *[tree.spec for tree in trees], *cuts, *map(leaf_key, inputs)

    def _is_whole(self, prepared: Prepared, trees: list[Flat]) -> bool:
        """Return whether the outputs are whole on each process: where no param or input is cut, all are."""
        return self.last or not (prepared.placed or any(map(cuts_of, trees)))

    def _by_eager(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        """Run a stage that cannot be traced. An error of the stage itself is raised here, before any about tracing."""
        if prepared.placed or any(map(cuts_of, sources.values())):
            raise StageError(
                f"its params or inputs are placed over a dimension of tensor parallelism, and it can't be traced: "
                f"{self.graphs.reason}",
                stage=self.name,
            ) from self.cause
        if self.eager.whole != self.graphs.walked_once:
            self.eager = Eager(self.stage, whole=self.graphs.walked_once, argnums=self.argnums)
        result = self.eager.forward(prepared, state, sources, data, keep)
        if not self.fallback:
            raise StageError(
                f"it can't be traced: {self.graphs.reason}; autodiff='eager' runs it without tracing", stage=self.name
            ) from self.cause
        lost = " and keeps all residuals" if self.config.policy is not everything_saveable else ""
        self._warn_once(
            f"can't be traced and runs by eager autograd, which is slower where its backward is split{lost}: "
            f"{self.graphs.reason}; autodiff='eager' runs it so without this warning"
        )
        return result


def _without_values(x: Leaf) -> Any:
    if not isinstance(x, Spec):
        return x.value
    return torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta", requires_grad=x.wanted)


def signature_of(prepared: Prepared, state: Flat, *rest: Flat, keep: bool, data_wanted: bool = False) -> Signature:
    """Return the signature of a call.

    Args:
        rest: the trees of the sources, and then of the data.
        data_wanted: leaves of the data that require a gradient get one, as those of the sources do.

    Raises:
        Untraceable: a leaf is neither a plain tensor nor a plain value.
    """
    *sources, data = rest
    return Signature(
        Tree.of(prepared.leaves, prepared.spec, set(prepared.trained), prepared.placed),
        prepared.trained,
        Tree.of(*state),
        tuple(
            Tree.of(*value, _requiring_grad(value.leaves) if keep else (), _placed(value, prepared))
            for value in sources
        ),
        Tree.of(*data, _requiring_grad(data.leaves) if keep and data_wanted else ()),
        keep,
        ambient(),
    )


def _placed(value: Flat, prepared: Prepared) -> dict[int, Placed]:
    """Return the placements of the leaves of another stage's output that are pieces.

    Raises:
        StageError: this process can't compute with them.
    """
    cuts = cuts_of(value)
    if not cuts:
        return {}
    if not prepared.meshes:
        place = next(iter(cuts.values()))
        raise StageError(
            f"an input is {place}, and no param of this rank is a DTensor, so that there are no processes to compute "
            "with: pass the params of all stages to interop.shard, which replicates those that no rule names"
        )
    try:
        return {i: cut.over(prepared.meshes[0]) for i, cut in cuts.items()}
    except ValueError as error:
        raise StageError(
            f"an input does not fit: {error}. The ranks of a pipeline have tensor-parallel meshes of one size, in one "
            "order, as the dimension 'tp' of one mesh has"
        ) from error


def _requiring_grad(leaves: Leaves) -> set[int]:
    return {i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}


def _cause(error: Exception) -> Exception:
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


def _reason(error: Exception) -> str:
    """Return why a stage cannot be traced, with the innermost line of the stage's own code."""
    message = (str(error).strip().splitlines() or [""])[0]
    kind = "" if isinstance(error, Untraceable) else f"{type(error).__name__}: "
    if kind.startswith(("DataDependent", "GuardOnDataDependent")):
        kind = f"it needs the value of a tensor, as a branch or .item() does; {kind}"
    return f"{kind}{message}{user_line(traceback.extract_tb(error.__traceback__))}"
