"""A stage's functions for one signature: traced, partitioned, and generated as Python or compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fpipe.autodiff import agreement
from fpipe.autodiff.braid import Run, plainly, waits
from fpipe.autodiff.graph.block import NO_PARTS, Block, Parts, Sink
from fpipe.autodiff.graph.codegen import are_same, emit
from fpipe.autodiff.graph.collectives import Post, posts
from fpipe.autodiff.graph.cse import without_duplicates
from fpipe.autodiff.graph.functionalize import functionalize
from fpipe.autodiff.graph.guards import Guards, guards
from fpipe.autodiff.graph.partition import Backward, Blocks, NotKept, layout, partition
from fpipe.autodiff.graph.signature import Signature, Untraceable
from fpipe.autodiff.graph.trace import AS_OUTPUT, Cotangent, Cotangents, Joint, trace
from fpipe.autodiff.interface import Leaves, Prepared, WeightGradients
from fpipe.devices import autocasts, without_autocast
from fpipe.errors import StageError
from fpipe.policies import Policy
from fpipe.stages.carry import is_root
from fpipe.stages.stage import Stage

Prepare = Callable[[Leaves], Leaves]
Function = Callable[..., Any]


@dataclass(frozen=True)
class TraceConfig:
    """The options for tracing a stage, apart from the signature.

    Args:
        number: the stage's number, for messages.
        loss: leaf 0 of the stage's output is the loss. Only it gets a cotangent, and what the stage carries.
        dynamic: sizes of inputs are symbols.
        data: the parts of the microbatch that the stage reads are differentiated.
        donated: a forward that is not differentiated may write the new state into the memory of the old one.
    """

    stage: Stage
    number: int
    loss: bool
    policy: Policy
    compile: bool | str
    dynamic: bool
    data: bool = False
    donated: bool = False

    def partition(
        self, signature: Signature, cotangents: Cotangents | None, kept: Sequence[int] | None = None
    ) -> tuple[Joint, Blocks]:
        """Trace and partition the stage for a signature."""
        joint = self.joint(signature, cotangents)
        return joint, partition(joint, self.policy, kept)

    def joint(self, signature: Signature, cotangents: Cotangents | None) -> Joint:
        """Trace the stage for a signature, without writes in place and duplicates."""
        joint = trace(self.stage, signature, cotangents, self.loss, self.dynamic)
        donated = len(signature.state.leaves) if self.donated and not signature.keep else 0
        return replace(without_duplicates(functionalize(joint)), donated=donated)

    def function(self, block: Block, joint: Joint) -> Callable[..., Any]:
        if not self.compile:
            return emit(block, joint.root)
        return compiled(block, joint.root, self.dynamic, self.compile if isinstance(self.compile, str) else None)


@dataclass(slots=True)
class SavedGraph:
    """The residuals of a forward, with the functions that use them.

    Args:
        layouts: the expected layouts of the cotangents. Set only if sizes are symbols.
    """

    functions: Functions
    prepared: Prepared
    values: Leaves
    layouts: Cotangents = ()


@dataclass(slots=True)
class DeferredGraph:
    """The values from which `backward_weight` computes the weight gradients.

    Args:
        v: the values that depend on the params alone, as far as they are read; None for a stage without input
            gradients, whose whole backward this is: it computes them from the params.
    """

    functions: Functions
    backward: Backward[Function]
    prepared: Prepared
    v: Leaves | None
    values: Leaves


class Functions:
    """A stage's functions for one signature.

    Args:
        run: (v, inputs) -> (outputs, state, residuals). `run.source` is its text.
        first: the backward for cotangents with the layouts of the outputs.
        backwards: the backwards so far, by the layouts of the cotangents.
        waits: whether any of them waits for collectives.
        in_turns: overlaps run them in turns.
        cuts: the places of the outputs that are pieces, by number.
        parts: the weight gradients that are parts of sums.
    """

    in_turns = False

    def __init__(self, config: TraceConfig, signature: Signature) -> None:
        joint, blocks = config.partition(signature, None)
        self.config, self.signature, self.cuts = config, signature, joint.cuts
        self.parts = Parts(joint.partial, signature.placed[0].mesh) if joint.partial else NO_PARTS
        self.collectives = self._collectives([blocks.prepare, blocks.forward, *blocks.backward.pieces])
        self.guards: Guards | None = guards(joint.fakes, signature) if config.dynamic else None
        self.kept, self.digest = blocks.kept, blocks.digest
        self.prepare: Prepare = config.function(blocks.prepare, joint)
        self.run: Callable[[Leaves, Leaves], tuple[Leaves, Leaves, Leaves]] = config.function(blocks.forward, joint)
        self.wanted = joint.wanted
        self.devices = [None if n is None else n.meta["val"].device for n in joint.cotangents]
        self.fresh, self.fresh_state = blocks.fresh[: len(joint.outputs)], blocks.fresh[len(joint.outputs) :]
        self.output_spec, self.state_spec = joint.output_spec, joint.state_spec
        self.trees = (*signature.sources, signature.data) if config.data else signature.sources
        spec = joint.output_spec
        self.rooted = [wanted and is_root(i, spec, config.loss) for i, wanted in enumerate(joint.wanted)]
        self.first = self._functions(blocks.backward, joint, self.prepare)
        self.backwards = {self.first.expected: self.first}
        self.waits = any(map(waits, (self.run, self.first.fused, self.first.weight)))

    def forward(
        self, prepared: Prepared, inputs: Leaves, run: Run = plainly
    ) -> tuple[Leaves, Leaves, SavedGraph | None]:
        """Return `(outputs, state, residuals)` as leaves. Residuals are None if the call is not differentiated."""
        inputs = [x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
        with running(self.signature):
            outputs, state, residuals = run(self.run, _v(prepared, self.prepare), inputs)
        outputs = list(map(_as_output, outputs, self.wanted, self.fresh))
        state = [_as_output(x, False, fresh) for x, fresh in zip(state, self.fresh_state, strict=True)]
        if not self.signature.keep:
            return outputs, state, None
        layouts = tuple(map(_expected, outputs, self.rooted)) if self.config.dynamic else ()
        return outputs, state, SavedGraph(self, prepared, residuals, layouts)

    def backward(
        self, residuals: SavedGraph, cotangents: Leaves, sink: Sink | None, run: Run = plainly
    ) -> tuple[WeightGradients, list[Leaves]]:
        """Return `(weight gradients, input gradients of each source, and of the data where it gets any)`."""
        backward, cotangents = self._for(residuals, cotangents)
        if sink is not None:
            sink.expect(self.parts)
        with running(self.signature):
            v = _v(residuals.prepared, backward.prepare)
            weights, gradients = run(backward.fused, v, residuals.values, cotangents, sink)
        return WeightGradients(weights, backward.fresh), self._by_source(gradients)

    def backward_input(
        self, residuals: SavedGraph, cotangents: Leaves, run: Run = plainly
    ) -> tuple[list[Leaves], DeferredGraph]:
        """Return `(input gradients as of `backward`, deferred)`."""
        backward, cotangents = self._for(residuals, cotangents)
        with running(self.signature):
            v = _v(residuals.prepared, backward.prepare)
            gradients, deferred = run(backward.input, v, residuals.values, cotangents)
        read = [x if i in backward.reads else None for i, x in enumerate(v)] if self.trees else None
        return self._by_source(gradients), DeferredGraph(self, backward, residuals.prepared, read, deferred)

    def backward_weight(self, deferred: DeferredGraph, sink: Sink | None, run: Run = plainly) -> WeightGradients:
        """Return the weight gradients that `backward_input` deferred."""
        backward = deferred.backward
        if sink is not None:
            sink.expect(self.parts)
        with running(self.signature):
            v = _v(deferred.prepared, backward.prepare) if deferred.v is None else deferred.v
            weights = run(backward.weight, v, deferred.values, sink)
        return WeightGradients(weights, backward.fresh)

    def _by_source(self, gradients: Leaves) -> list[Leaves]:
        """Return the gradients of each source, and of the data where it gets any, out of those of all inputs."""
        rest = iter(gradients[len(self.signature.state.leaves) :])
        return [list(itertools.islice(rest, len(tree.leaves))) for tree in self.trees]

    def _for(self, residuals: SavedGraph, cotangents: Leaves) -> tuple[Backward[Function], Leaves]:
        """Return the backward for these cotangents, traced if their layouts are new, and the cotangents for it."""
        plain = [_plain(c) if root else None for c, root in zip(cotangents, self.rooted, strict=True)]
        layouts = tuple([None if c is None else layout(c) for c in plain])
        if self.config.dynamic:  # one backward for all sizes: a cotangent with another layout is copied
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

    def _another(self, layouts: Cotangents) -> Backward[Function]:
        """Return a backward for other layouts of the cotangents, from the residuals of the forward."""
        try:
            joint, blocks = self.config.partition(self.signature, layouts, self.kept)
        except NotKept:  # copy the cotangents into the layout of the first backward
            return self.first
        if blocks.digest != self.digest:
            raise StageError(
                "its function ran other operations when it was traced again for other cotangents: it must be pure, "
                "and run the same operations for the same arguments",
                stage=self.config.number,
            )
        agreement.compare(self.config.number, self._compared(self._collectives(blocks.backward.pieces)))
        prepare = self.config.function(blocks.backward.prepare, joint)
        if not self.config.compile and are_same(prepare, self.prepare):  # what it computes is there once in a step
            prepare = self.prepare
        return self._functions(blocks.backward, joint, prepare)

    def compare(self, in_turns: bool) -> None:
        """Compare the collectives with those of other processes, before any of them runs.

        Args:
            in_turns: overlaps run the functions in turns.
        """
        self.in_turns = in_turns
        agreement.compare(self.config.number, self._compared(self.collectives), self.signature.digest)

    def _compared(self, collectives: Sequence[Post]) -> list[Post]:
        return [*collectives] if self.in_turns else [replace(post, turn=None) for post in collectives]

    def _collectives(self, blocks: Sequence[Block]) -> list[Post]:
        collectives = [post for block in blocks for post in posts(block.name, block.body)]
        if self.parts.mesh is not None:
            ranks = tuple(self.parts.mesh.mesh.flatten().tolist())
            collectives.append(Post("the end of a step", ranks, f"all_reduce of leaves {sorted(self.parts.leaves)}"))
        if collectives and self.config.compile:
            raise StageError(
                "it has collectives, which compile=True does not support: their waits would not be watched. Leave "
                "compile out",
                stage=self.config.number,
            )
        if collectives and self.config.dynamic:
            raise Untraceable("it has collectives, whose sizes are compared over the processes when it is traced")
        return collectives

    def _functions(self, blocks: Backward[Block], joint: Joint, prepare: Prepare) -> Backward[Function]:
        fused, by_input, by_weight = (
            self.config.function(block, joint) for block in (blocks.fused, blocks.input, blocks.weight)
        )
        expected = tuple([e and AS_OUTPUT for e in blocks.expected]) if self.config.dynamic else blocks.expected
        fresh = frozenset[int]() if self.config.compile else blocks.fresh  # compiled code may share memory
        return Backward(expected, prepare, fused, by_input, by_weight, fresh, blocks.reads)


NOTHING = nullcontext()


def running(signature: Signature) -> AbstractContextManager[object]:
    """Set the grad mode of the trace, which some operations depend on, and no autocast: casts are in the graph."""
    return _settings(signature) if autocasts() or torch.is_grad_enabled() != signature.keep else NOTHING


@contextmanager
def _settings(signature: Signature) -> Iterator[None]:
    with torch.set_grad_enabled(signature.keep), without_autocast():
        yield


def compiled(block: Block, root: torch.nn.Module, dynamic: bool, mode: str | None) -> Callable[..., Any]:
    """Return a block's function, compiled. It clears the list of residuals first, and offers nothing to a sink."""
    plain = replace(block, empties=None, large=None)
    function = torch.compile(emit(plain, root, bindings=False), fullgraph=True, dynamic=dynamic, mode=mode)
    if block.empties is None:
        return function
    at, count = list(block.inputs).index(block.empties), len(block.inputs)

    def run(*args: Any) -> Any:
        lists = [list(values) if i == at else values for i, values in enumerate(args[:count])]
        args[at].clear()
        return function(*lists)

    return run


def _v(prepared: Prepared, prepare: Prepare) -> Leaves:
    """Return the values that depend on the params alone, computed once a step."""
    if prepare not in prepared.computed:
        prepared.computed[prepare] = prepare(prepared.leaves)
    values: Leaves = prepared.computed[prepare]
    return values


def _as_output(x: Any, wanted: bool, fresh: bool) -> Any:
    """Return a result that shares no autograd state with others, and requires a gradient if `wanted`."""
    if not isinstance(x, Tensor):
        return x
    return (x if fresh else x.detach()).requires_grad_(wanted)


def _plain(c: Tensor | None) -> Tensor | None:
    if c is None or not (c.requires_grad or c.is_conj() or c.is_neg()):
        return c
    return c.detach().resolve_conj().resolve_neg()


def _expected(x: Any, rooted: bool) -> Cotangent:
    """Return the layout with which an output's cotangent is traced."""
    return layout(torch.empty_like(x, device="meta")) if rooted else None


def _laid_out(c: Tensor | None, as_: Cotangent, device: torch.device | None) -> Tensor | None:
    """Return a cotangent in a layout; zeros for a missing one."""
    if as_ is None or (c is not None and layout(c) == as_):
        return c if as_ is not None else None
    shape, strides, dtype = as_
    result = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return result.zero_() if c is None else result.copy_(c)
