"""The pieces of a stage as graphs: traced at the first call of a signature, and cut once.

What can't be traced runs by eager autograd, and says so once. Residuals are a list that the backward empties,
so that memory is given up while it runs.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optree
import torch

from fpipe.autodiff.eager import NO_REENTRANT, Eager, is_reentrant
from fpipe.autodiff.functions import Deferred, Functions, Recipe, Residuals
from fpipe.autodiff.graph.block import Sink
from fpipe.autodiff.graph.signature import Call, Impure, Tree, Untraceable, ambient, glance, leaf, leaves
from fpipe.autodiff.interface import Leaves, Prepared, WeightGradients, prepared
from fpipe.errors import StageError
from fpipe.policies import Policy, everything_saveable
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Flat, flatten
from fpipe.stages.stage import Output, Stage

NO_STATE, NO_DATA = flatten(None), flatten([])
MANY = 64
"""So many graphs of one stage are worth a warning."""


@dataclass(eq=False)
class Graphs:
    """What was traced of one function.

    Args:
        by_signature: None for what can't be traced.
        reason: why that is.
        walked_once: what eager autograd records instead can be walked only once.
        steps: the params' signature with the settings of torch, by number.
    """

    made: list[Functions] = field(default_factory=list)
    by_signature: dict[Hashable, Functions | None] = field(default_factory=dict)
    steps: dict[Hashable, int] = field(default_factory=dict)
    reason: str = ""
    walked_once: bool = False


class Traced:
    """A stage's pieces as graphs.

    Args:
        name: the stage's number, for messages.
        policy: what a forward may keep.
        compile: give each piece to `torch.compile`.
        dynamic: one graph for all sizes of what is read; by default one for each.
        fallback: run by eager autograd what can't be traced, with a warning.
        loss: leaf 0 of its output is the loss, and alone gets a cotangent.
        graphs: those that it shares with stages of the same function.

    Raises:
        StageError: (by its pieces) without `fallback`, it can't be traced.
    """

    def __init__(
        self,
        stage: Stage,
        name: int = 0,
        *,
        policy: Policy = everything_saveable,
        compile: bool = False,  # noqa: A002
        dynamic: bool = False,
        fallback: bool = True,
        loss: bool = False,
        graphs: Graphs | None = None,
    ) -> None:
        self.stage, self.name, self.fallback = stage, name, fallback
        self.recipe = Recipe(stage, name, loss, policy, compile, dynamic)
        self.eager = Eager(stage)
        self.reads_data = any(not isinstance(read, Output) for read in stage.inputs)
        self.sources = stage.sources
        self.latest: tuple[Hashable, Functions | None] = (None, None)
        self.graphs = graphs or Graphs()
        self.cause: Exception | None = None
        self.warned = False

    def prepare(self, params: Any) -> Prepared:
        return prepared(self.stage, params)

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        held = flatten(state) if self.stage.stateful else NO_STATE
        given = flatten(self.stage.given(data)) if self.reads_data else NO_DATA
        trees = [held, *[sources[s] for s in self.sources], given]
        inputs = [x for tree in trees for x in tree.leaves]
        functions = self._functions(prepared, trees, inputs, keep)
        if functions is None:
            return self._by_eager(prepared, state, sources, data, keep)
        outputs, new, residuals = functions.forward(prepared, inputs)
        return Flat(outputs, functions.output_spec), residuals, functions.state_spec.unflatten(new)

    def backward(
        self, residuals: Any, cotangents: Leaves, sink: Sink | None = None
    ) -> tuple[WeightGradients, dict[int, Leaves]]:
        if isinstance(residuals, Residuals):
            weights, found = residuals.functions.backward(residuals, cotangents, sink)
            return weights, dict(zip(self.sources, found, strict=True))
        return self.eager.backward(residuals, cotangents)

    def backward_input(self, residuals: Any, cotangents: Leaves) -> tuple[dict[int, Leaves], Any]:
        if isinstance(residuals, Residuals):
            found, deferred = residuals.functions.backward_input(residuals, cotangents)
            return dict(zip(self.sources, found, strict=True)), deferred
        return self.eager.backward_input(residuals, cotangents)

    def backward_weight(self, deferred: Any, sink: Sink | None = None) -> WeightGradients:
        if isinstance(deferred, Deferred):
            return deferred.functions.backward_weight(deferred, sink)
        return self.eager.backward_weight(deferred)

    # Tracing

    def _functions(self, prepared: Prepared, trees: list[Flat], inputs: Leaves, keep: bool) -> Functions | None:
        """The functions of this call's signature; None where it can't be traced."""
        try:
            key = self._key(prepared, trees, inputs, keep)
        except Untraceable as error:
            self.graphs.reason = self.graphs.reason or _reason(error)
            return None
        if key != self.latest[0]:
            self.latest = key, self._known(key, prepared, trees, keep)
        return self.latest[1]

    def _known(self, key: Hashable, prepared: Prepared, trees: list[Flat], keep: bool) -> Functions | None:
        """The functions of a signature, traced if it is new."""
        if key in self.graphs.by_signature:
            return self.graphs.by_signature[key]
        found = None
        try:
            found = self._find(signature(prepared, *trees, keep=keep))
        except StageError as error:
            raise StageError(error.message, stage=self.name) from error.__cause__
        except Impure as error:
            raise StageError(str(error), stage=self.name) from error
        except Exception as error:
            if is_reentrant(error):
                raise StageError(NO_REENTRANT, stage=self.name) from error
            self.graphs.reason = self.graphs.reason or _reason(error)
            self.cause = None if self.fallback else error
            self.graphs.walked_once |= "selective activation checkpoint" in str(error)
        self.graphs.by_signature[key] = found
        gc.collect(1)  # torch's tracer leaves frames in cycles, and with them the tensors of this very call
        return found

    def _find(self, call: Call) -> Functions:
        """A graph for a signature: where sizes are symbols, maybe one that was traced for others."""
        for known in self.graphs.made if self.recipe.dynamic else ():
            if known.guards is not None and known.guards.admit(call):
                return known
        found = self._made(call)
        self.graphs.made.append(found)
        if len(self.graphs.made) == MANY:
            warnings.warn(
                f"stage {self.name} has been traced for {MANY} signatures, each of which takes time and memory: "
                "dynamic=True traces once for many sizes; pass plain values that change as tensors",
                stacklevel=2,
            )
        return found

    def _made(self, call: Call) -> Functions:
        if self.recipe.dynamic:
            try:
                return Functions(self.recipe, call)
            except StageError:
                raise
            except Exception as error:
                self._warn_of_sizes(_reason(error))
        return Functions(replace(self.recipe, dynamic=False), call)

    def _warn_of_sizes(self, reason: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"stage {self.name} is traced for each of its sizes, since symbols won't do: {reason}",
                stacklevel=2,
            )

    def _key(self, prepared: Prepared, trees: list[Flat], inputs: Leaves, keep: bool) -> Hashable:
        """What stands for the signature: what is the same all through a step, by a number."""
        if self not in prepared.computed:
            step, numbers = (prepared.spec, ambient(), *map(glance, prepared.leaves)), self.graphs.steps
            prepared.computed[self] = numbers.setdefault(step, len(numbers))
        return prepared.computed[self], keep, *[tree.spec for tree in trees], *map(glance, inputs)

    def _by_eager(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        """What can't be traced; what is wrong with the stage itself is found here, and not put down to tracing."""
        self.eager = Eager(self.stage, whole=self.graphs.walked_once)
        result = self.eager.forward(prepared, state, sources, data, keep)
        if not self.fallback:
            raise StageError(
                f"it can't be traced: {self.graphs.reason}; autodiff='eager' runs it without tracing", stage=self.name
            ) from self.cause
        if not self.warned:
            self.warned = True
            lost = " and keeps all residuals" if self.recipe.policy is not everything_saveable else ""
            warnings.warn(
                f"stage {self.name} can't be traced and runs by eager autograd, which is slower where its backward is "
                f"split{lost}: {self.graphs.reason}; autodiff='eager' runs it so without this warning",
                stacklevel=2,
            )
        return result


def signature(prepared: Prepared, state: Flat, *rest: Flat, keep: bool) -> Call:
    """Of a call with these trees: the sources', and at last the data's.

    Raises:
        Untraceable: a leaf is neither a plain tensor nor a plain value.
    """
    *sources, data = rest
    return Call(
        Tree(tuple(map(leaf, prepared.leaves)), prepared.spec),
        prepared.trained,
        Tree(tuple(map(leaf, state.leaves)), state.spec),
        tuple(Tree(leaves(value.leaves), value.spec) for value in sources),
        Tree(tuple(map(leaf, data.leaves)), data.spec),
        keep,
        ambient(),
    )


ROOT = Path(__file__).resolve().parents[2]
NOT_THEIRS = (
    *(str(Path(package.__path__[0]).resolve()) for package in (torch, optree)),
    *(str(ROOT / name) for name in ("fpipe", "interop")),
    "<",
)
"""Where a line that is not the stage's own comes from."""


def _reason(error: Exception) -> str:
    """Why a stage can't be traced, and the last line of the stage's own code that led there."""
    text = str(error).strip().splitlines()
    said = text[0] if text else ""
    kind = "" if isinstance(error, Untraceable) else f"{type(error).__name__}: "
    if kind.startswith(("DataDependent", "GuardOnDataDependent")):
        kind = f"it needs the value of a tensor, as a branch or .item() does; {kind}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(NOT_THEIRS)]
    where = f" (in {own[-1].filename}:{own[-1].lineno}, {own[-1].name}: {own[-1].line})" if own else ""
    return f"{kind}{said}{where}"
