"""One signature's pieces, as functions of lists: traced, cut, and written out as Python or compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fpipe.autodiff.graph.block import Block, Sink
from fpipe.autodiff.graph.codegen import emit
from fpipe.autodiff.graph.cse import simplified
from fpipe.autodiff.graph.functionalize import functional
from fpipe.autodiff.graph.guards import Guards, guards
from fpipe.autodiff.graph.partition import BackwardBlocks, Cut, NotKept, cut, layout
from fpipe.autodiff.graph.signature import Call
from fpipe.autodiff.graph.trace import AS_OUTPUT, Cotangent, Joint, trace
from fpipe.autodiff.interface import Leaves, Prepared, WeightGradients
from fpipe.errors import StageError
from fpipe.policies import Policy
from fpipe.stages.stage import Stage

Prepare = Callable[[Leaves], Leaves]
Cotangents = tuple[Cotangent, ...]


@dataclass(frozen=True)
class Recipe:
    """What a stage's functions are made from, besides their signature.

    Args:
        loss: leaf 0 of the stage's output is the loss, and alone gets a cotangent.
        dynamic: sizes of what is read are symbols.
    """

    stage: Stage
    number: int
    loss: bool
    policy: Policy
    compile: bool
    dynamic: bool

    def cut(self, call: Call, cotangents: Cotangents | None, kept: Sequence[int] | None = None) -> tuple[Joint, Cut]:
        """Trace and cut the stage for a signature."""
        joint = functional(trace(self.stage, call, cotangents, self.loss, self.dynamic))
        for at, node in enumerate(joint.graph.nodes):
            node.meta["at"] = at
        joint = simplified(joint)
        return joint, cut(joint, self.policy, kept)

    def function(self, block: Block, joint: Joint) -> Callable[..., Any]:
        return compiled(block, joint.root, self.dynamic) if self.compile else emit(block, joint.root)


@dataclass(eq=False)
class BackwardFunctions:
    """The backward for one layout of the cotangents.

    Args:
        prepare: params -> `v`, what depends on them alone.
        fused: v, residuals, cotangents, sink -> weight gradients, input gradients.
        input: v, residuals, cotangents -> input gradients, deferred.
        weight: v, deferred, sink -> weight gradients.
        fresh: the weight gradients whose memory nothing else has.
    """

    expected: Cotangents
    prepare: Prepare
    fused: Callable[[Leaves, Leaves, Leaves, Sink | None], tuple[Leaves, Leaves]]
    input: Callable[[Leaves, Leaves, Leaves], tuple[Leaves, Leaves]]
    weight: Callable[[Leaves, Leaves, Sink | None], Leaves]
    fresh: frozenset[int] = frozenset()


@dataclass(slots=True)
class Residuals:
    """What a forward kept, and what its backward needs to know.

    Args:
        layouts: those of the outputs, which their cotangents are expected to have; only where sizes are symbols.
    """

    functions: Functions
    prepared: Prepared
    values: Leaves
    layouts: Cotangents = ()


@dataclass(slots=True)
class Deferred:
    """What the weight gradients are computed from."""

    functions: Functions
    backward: BackwardFunctions
    prepared: Prepared
    values: Leaves


class Functions:
    """A stage's pieces for one signature."""

    def __init__(self, recipe: Recipe, call: Call) -> None:
        joint, found = recipe.cut(call, None)
        self.recipe, self.call = recipe, call
        self.guards: Guards | None = guards(joint.fakes, call) if recipe.dynamic else None
        self.kept, self.digest = found.kept, found.digest
        self.prepare: Prepare = recipe.function(found.prepare, joint)
        self.run: Callable[[Leaves, Leaves], tuple[Leaves, Leaves, Leaves]] = recipe.function(found.forward, joint)
        self.wanted = joint.wanted
        self.devices = [None if n is None else n.meta["val"].device for n in joint.cotangents]
        self.fresh, self.fresh_state = found.fresh[: len(joint.outputs)], found.fresh[len(joint.outputs) :]
        self.output_spec, self.state_spec = joint.output_spec, joint.state_spec
        self.rooted = [wanted and not (recipe.loss and i) for i, wanted in enumerate(joint.wanted)]
        self.first = None if found.backward is None else self._written(found.backward, joint, self.prepare)
        self.backwards: dict[Cotangents, BackwardFunctions] = {}
        if self.first is not None:
            self.backwards[self.first.expected] = self.first

    def forward(self, prepared: Prepared, inputs: Leaves) -> tuple[Leaves, Leaves, Residuals | None]:
        """`(outputs, state, residuals)`, by leaves; residuals are None where the call is not differentiated."""
        inputs = [x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
        with running(self.call):
            outputs, state, kept = self.run(_v(prepared, self.prepare), inputs)
        outputs = list(map(_handed_on, outputs, self.wanted, self.fresh))
        state = [_handed_on(x, False, fresh) for x, fresh in zip(state, self.fresh_state, strict=True)]
        if not self.call.keep:
            return outputs, state, None
        layouts = tuple(map(_expected, outputs, self.rooted)) if self.recipe.dynamic else ()
        return outputs, state, Residuals(self, prepared, kept, layouts)

    def backward(
        self, residuals: Residuals, cotangents: Leaves, sink: Sink | None
    ) -> tuple[WeightGradients, list[Leaves]]:
        """`(weight gradients, input gradients of each source)`."""
        backward, cotangents = self._for(residuals, cotangents)
        with running(self.call):
            v = _v(residuals.prepared, backward.prepare)
            weights, gradients = backward.fused(v, residuals.values, cotangents, sink)
        return WeightGradients(weights, backward.fresh), self._by_source(gradients)

    def backward_input(self, residuals: Residuals, cotangents: Leaves) -> tuple[list[Leaves], Deferred]:
        """`(input gradients of each source, deferred)`."""
        backward, cotangents = self._for(residuals, cotangents)
        with running(self.call):
            v = _v(residuals.prepared, backward.prepare)
            gradients, deferred = backward.input(v, residuals.values, cotangents)
        return self._by_source(gradients), Deferred(self, backward, residuals.prepared, deferred)

    def backward_weight(self, deferred: Deferred, sink: Sink | None) -> WeightGradients:
        """The weight gradients that were left."""
        backward = deferred.backward
        with running(self.call):
            weights = backward.weight(_v(deferred.prepared, backward.prepare), deferred.values, sink)
        return WeightGradients(weights, backward.fresh)

    def _by_source(self, gradients: Leaves) -> list[Leaves]:
        """Of the gradients of all inputs, those of each source."""
        found, at = [], len(self.call.state.leaves)
        for tree in self.call.sources:
            found.append(gradients[at : at + len(tree.leaves)])
            at += len(tree.leaves)
        return found

    def _for(self, residuals: Residuals, cotangents: Leaves) -> tuple[BackwardFunctions, Leaves]:
        """The backward for these cotangents, traced if their layouts are new, and the cotangents as it takes them."""
        plain = [_plain(c) if root else None for c, root in zip(cotangents, self.rooted, strict=True)]
        layouts = tuple([None if c is None else layout(c) for c in plain])
        if self.recipe.dynamic:  # one backward for all sizes: what is laid out in another way is copied
            plain = [
                c if c is None else _laid_out(c, x, c.device) for c, x in zip(plain, residuals.layouts, strict=True)
            ]
            layouts = tuple([None if c is None else AS_OUTPUT for c in plain])
        if layouts not in self.backwards:
            self.backwards[layouts] = self._another(layouts)
        backward = self.backwards[layouts]
        if backward.expected != layouts:
            wanted = residuals.layouts or backward.expected
            plain = [_laid_out(c, x, d) for c, x, d in zip(plain, wanted, self.devices, strict=True)]
        return backward, plain

    def _another(self, layouts: Cotangents) -> BackwardFunctions:
        """The backward for other layouts of the cotangents, from what the forward kept."""
        if not any(layouts):
            return self._nothing(layouts)
        try:
            joint, found = self.recipe.cut(self.call, layouts, self.kept)
        except NotKept:  # then the cotangents are copied into the layout that it was kept for
            assert self.first is not None
            return self.first
        if found.digest != self.digest:
            raise StageError(
                "its function gave another graph when it was traced again for other cotangents: it must be pure, "
                "and come to the same operations whenever it is given the same",
                stage=self.recipe.number,
            )
        assert found.backward is not None
        return self._written(found.backward, joint, self.recipe.function(found.backward.prepare, joint))

    def _written(self, found: BackwardBlocks, joint: Joint, prepare: Prepare) -> BackwardFunctions:
        fused, by_input, by_weight = (self.recipe.function(b, joint) for b in (found.fused, found.input, found.weight))
        expected = tuple([e and AS_OUTPUT for e in found.expected]) if self.recipe.dynamic else found.expected
        fresh = frozenset[int]() if self.recipe.compile else found.fresh  # a compiler shares memory as it likes
        return BackwardFunctions(expected, prepare, fused, by_input, by_weight, fresh)

    def _nothing(self, expected: Cotangents) -> BackwardFunctions:
        """The backward without any cotangent."""
        weights, gradients = len(self.call.trained), len(self.call.inputs)
        return BackwardFunctions(
            expected,
            lambda p: [],
            lambda v, r, c, sink: ([None] * weights, [None] * gradients),
            lambda v, r, c: ([None] * gradients, []),
            lambda v, d, sink: [None] * weights,
        )


NOTHING = nullcontext()


def running(call: Call) -> AbstractContextManager[object]:
    """Run operations as they were traced: in the mode that some ask for, though no tensor wants a gradient."""
    casting = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return _settings(call) if casting or torch.is_grad_enabled() != call.keep else NOTHING


@contextmanager
def _settings(call: Call) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(call.keep))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def compiled(block: Block, root: torch.nn.Module, dynamic: bool) -> Callable[..., Any]:
    """The block's function through torch.compile; the list it empties, it empties first, and no sink is offered."""
    plain = replace(block, empties=None, large=None)
    function = torch.compile(emit(plain, root, bindings=False), fullgraph=True, dynamic=dynamic)
    if block.empties is None:
        return function
    at, count = list(block.inputs).index(block.empties), len(block.inputs)

    def run(*given: Any) -> Any:
        lists = [list(values) if i == at else values for i, values in enumerate(given[:count])]
        given[at].clear()
        return function(*lists)

    return run


def _v(prepared: Prepared, prepare: Prepare) -> Leaves:
    """What depends on the params alone, computed once a step."""
    if prepare not in prepared.computed:
        prepared.computed[prepare] = prepare(prepared.leaves)
    found: Leaves = prepared.computed[prepare]
    return found


def _handed_on(x: Any, wanted: bool, fresh: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (x if fresh else x.detach()).requires_grad_(wanted)


def _plain(c: Tensor | None) -> Tensor | None:
    if c is None or not (c.requires_grad or c.is_conj() or c.is_neg()):
        return c
    return c.detach().resolve_conj().resolve_neg()


def _expected(x: Any, rooted: bool) -> Cotangent:
    """The layout that the cotangent of an output is traced with."""
    return layout(torch.empty_like(x, device="meta")) if rooted else None


def _laid_out(c: Tensor | None, as_: Cotangent, device: torch.device | None) -> Tensor | None:
    """A cotangent in a layout; zeros where there is none."""
    if as_ is None or (c is not None and layout(c) == as_):
        return c if as_ is not None else None
    shape, strides, dtype = as_
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return made.zero_() if c is None else made.copy_(c)
