"""One rank's program as a flat list of calls over numbered slots: what each effect does to the values on the rank.

Invariants:
- every name of the program has a numbered slot; a slot is emptied at the last effect that needs it;
- a value from another rank is taken from its channel at its first use, and not before;
- what a backward uses up, residuals, deferred and cotangents, is its alone while it runs: it may free it early;
- residuals are kept only where the program has a use for them;
- whatever can be known before a step, is: a call finds its slots, pieces and channels in its closure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch

from fpipe import effects as fx
from fpipe.autodiff.interface import (
    DifferentiablePipeline,
    Leaves,
    Prepared,
    detached_tree,
    has_weight,
    seed,
    weighted_loss,
    zero_weight_gradients,
    zeros,
)
from fpipe.errors import ScheduleError
from fpipe.handlers.gradients import LeafKey, Sum, add_leaves, sent
from fpipe.handlers.protocol import Inputs, Observer, Results
from fpipe.programs.program import Program
from fpipe.stages.pytree import ABSENT, Flat, check_plain, flatten, indices
from fpipe.stages.rng import seeded
from fpipe.stages.stage import Output, Stage

Call = Callable[[], Any]
Function = Callable[[Any, Any], Call | None]
Functions = Mapping[type, Function]
NO_FUNCTIONS: Functions = MappingProxyType({})


class Channels(Protocol):
    """How values travel. Payloads are trees taken apart for activations, else lists of leaves."""

    def sender(self, value: fx.Value, source: int, target: int) -> Callable[[Any], None]:
        """A function that posts the value's payload; it never waits for its receiver."""

    def receiver(
        self, value: fx.Value, source: int, target: int, by: fx.Effect
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        """A function that says that the value will be taken, and never waits; and one that takes it for `by`."""


@dataclass
class Step:
    """What one step holds beside the slots.

    Args:
        sums: of the weight gradients, by this rank's stages.
        foreign: what it was sent of other ranks' sums, by (stage, rank).
        seeds: the cotangents of the last stage's output, by microbatch.
        uncounted: microbatches whose loss doesn't count.
    """

    inputs: Inputs
    prepared: dict[int, Prepared]
    state: dict[int, Any]
    sums: defaultdict[int, Sum] = field(default_factory=lambda: defaultdict(Sum))
    foreign: dict[tuple[int, int], Leaves] = field(default_factory=dict)
    seeds: dict[int, Leaves] = field(default_factory=dict)
    uncounted: set[int] = field(default_factory=set)
    results: Results = field(default_factory=Results)

    def own(self, stage: int) -> dict[LeafKey, Any]:
        """This rank's sums for a stage, by path."""
        return dict(zip(self.prepared[stage].paths, self.sums[stage].read(), strict=True))


class Calls:
    """A program's calls.

    Args:
        calls: all of them, in order.
        starts: where each effect's begin, and at last how many there are.
        computes: what runs a stage's own functions, by the number of its call.
        slots: what the rank holds, by number.
        touched: the slots of what each effect needs, gives and frees.
        step: the one that runs.
    """

    def __init__(
        self,
        program: Program,
        pieces: DifferentiablePipeline,
        channels: Channels,
        observe: Observer | None,
        device: torch.device | None,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        self.program, self.plan, self.rank, self.table = program, program.plan, program.rank, program.table
        self.pieces, self.pipeline = pieces, pieces.pipeline
        self.channels, self.observe, self.device = channels, observe, device
        self.functions = {**FUNCTIONS, **functions}
        self.reads = _Reads(self.pipeline.stages)
        self.number: dict[fx.Name, int] = {}
        self.uses = {name: at for at, effect in enumerate(program) for name in self.table.needs(effect, self.plan)}
        self.calls: list[Call] = []
        self.starts: list[int] = []
        self.computes: dict[int, fx.Effect] = {}
        self.slots: list[Any] = []
        self.touched: list[tuple[int, ...]] = []
        self.running: Step | None = None
        self._compile()

    @property
    def step(self) -> Step:
        assert self.running is not None
        return self.running

    def clear(self) -> None:
        """Give up everything that the step holds."""
        self.slots[:] = [None] * len(self.slots)
        self.running = None

    def borrowed(self) -> Iterator[Any]:
        """What the step was given: parameters, and the leaves of its microbatches."""
        for prepared in self.step.prepared.values():
            yield from prepared.leaves
        yield from flatten(list(self.step.inputs.data)).leaves

    def slot(self, name: fx.Name) -> int:
        """The number of a name's slot."""
        number = self.number.setdefault(name, len(self.number))
        if number == len(self.slots):
            self.slots.append(None)
        return number

    # Compiling

    def _compile(self) -> None:
        first = self._first_uses()
        posts: dict[fx.Name, Call] = {}
        takes: dict[fx.Name, Call] = {}
        for effect in self.program:
            if isinstance(effect, fx.Recv):
                by = first.get(effect.value, effect)
                posts[effect.value], takes[effect.value] = self.channels.receiver(
                    effect.value, effect.rank, self.rank, by
                )
        for at, effect in enumerate(self.program):
            self.starts.append(len(self.calls))
            used, given = self.table.needs(effect, self.plan), self.table.gives(effect, self.plan)
            self.touched.append(tuple({self.slot(n): None for n in (*used, *given)}))
            if isinstance(effect, fx.Recv):
                self._body(effect, [posts[effect.value]])
                continue
            for name in used:
                if name in takes:
                    self._take(name, takes.pop(name))
            self._body(effect, self._effect(effect))
            dead = {n for n in used if self.uses[n] == at} | {n for n in given if n not in self.uses}
            if slots := tuple(self.slot(n) for n in dead | set(self.table.frees(effect, self.plan))):
                self.calls.append(partial(_drop, self.slots, slots))
        self.starts.append(len(self.calls))

    def _first_uses(self) -> dict[fx.Name, fx.Effect]:
        found: dict[fx.Name, fx.Effect] = {}
        for effect in self.program:
            for name in self.table.needs(effect, self.plan):
                found.setdefault(name, effect)
        return found

    def _take(self, value: Any, take: Call) -> None:
        """From its channel into its slot."""
        slots, slot = self.slots, self.slot(value)

        def call() -> None:
            slots[slot] = take()

        if self.observe is None:
            self.calls.append(call)
        else:
            wait, arrive = (partial(see, self.rank, value) for see in (self.observe.wait, self.observe.arrive))
            self.calls += [wait, call, arrive]

    def _body(self, effect: fx.Effect, body: list[Call]) -> None:
        """What an effect does, between the observer's looks."""
        if self.observe is not None:
            self.calls.append(partial(self.observe.begin, self.rank, effect))
        for part, call in zip(fx.parts(effect) if body else (), body, strict=True):
            if self.table.effects[type(part)].track == "compute":
                self.computes[len(self.calls)] = part
            self.calls.append(call)
        if self.observe is not None:
            self.calls.append(partial(self.observe.end, self.rank, effect))

    def _effect(self, effect: fx.Effect) -> list[Call]:
        return [call for part in fx.parts(effect) if (call := self._function(part)(self, part)) is not None]

    def _function(self, effect: fx.Effect) -> Function:
        try:
            return self.functions[type(effect)]
        except KeyError:
            name = type(effect).__name__
            raise ScheduleError(
                f"rank {self.rank} has {effect}, and the handler has no function for it: pass "
                f"functions={{{name}: function}} to the handler, where function(calls, effect) returns what runs"
            ) from None

    def _forward(self, e: fx.Forward) -> Call:
        stage, m, slots = e.stage, e.microbatch, self.slots
        forward, stateful = self.pieces.stages[stage].forward, self.pipeline.stages[stage].stateful
        sources = tuple((s, self.slot(fx.Activation(s, m))) for s in self.plan.sources(stage))
        out, residuals = self.slot(fx.Activation(stage, m)), None
        if keep := fx.Residuals(stage, m) in self.uses:
            residuals = self.slot(fx.Residuals(stage, m))
        last = stage == self.plan.stages - 1
        goes_on = bool(self.plan.consumers(stage)) or self.pieces.gather

        def run(step: Step) -> Flat:
            read = {s: slots[i] for s, i in sources}
            outputs, kept, state = forward(step.prepared[stage], step.state.get(stage), read, step.inputs.data[m], keep)
            if residuals is not None:
                slots[residuals] = kept
            if stateful:
                step.state[stage] = state
            return outputs

        def call() -> None:
            step = self.step
            if step.inputs.rng is None:
                outputs = run(step)
            else:
                with seeded(step.inputs.rng, stage, m, self.device):
                    outputs = run(step)
            if goes_on:
                check_plain(outputs, self.rank, stage, m)
            slots[out] = outputs
            if last:
                self._result(m, outputs, keep)

        return call

    def _result(self, m: int, outputs: Flat, keep: bool) -> None:
        step = self.step
        cotangents: Leaves = [None] * len(outputs.leaves)
        if self.pieces.loss:
            loss, kept = outputs.tree
            cotangents[0] = seed(loss, scale := step.inputs.scale(m))
            step.results.losses[m], step.results.outputs[m] = (
                weighted_loss(loss, cotangents[0], scale),
                detached_tree(kept),
            )
            if not has_weight(scale):
                step.uncounted.add(m)
        else:
            step.results.outputs[m] = outputs.tree
        if keep:
            step.seeds[m] = cotangents

    def _cotangents(self, stage: int, m: int) -> Callable[[], Leaves]:
        slots, given = self.slots, tuple(self.slot(fx.Gradient(stage, c, m)) for c in self.plan.consumers(stage))
        if not given:
            return lambda: self.step.seeds.pop(m)
        if len(given) == 1:
            return partial(_taken, slots, given[0])
        return lambda: add_leaves(_taken(slots, slot) for slot in given)

    def _give(self, stage: int, m: int) -> Callable[[Mapping[int, Leaves]], None]:
        slots = self.slots
        gradients = tuple((s, self.slot(fx.Gradient(s, stage, m))) for s in self.plan.sources(stage))

        def give(found: Mapping[int, Leaves]) -> None:
            for source, slot in gradients:
                slots[slot] = found[source]

        return give

    def _counted(self, stage: int, m: int) -> bool:
        """Whether a backward's result counts; only the last stage knows that of a microbatch."""
        return stage < self.plan.stages - 1 or m not in self.step.uncounted

    def _backward(self, e: fx.Backward) -> Call:
        stage, m, slots = e.stage, e.microbatch, self.slots
        backward, residuals = self.pieces.stages[stage].backward, self.slot(fx.Residuals(stage, m))
        cotangents, give = self._cotangents(stage, m), self._give(stage, m)

        def call() -> None:
            sums = self.step.sums[stage]
            if self._counted(stage, m):
                weights, inputs = backward(_taken(slots, residuals), cotangents(), sums)
            else:
                weights, inputs = zero_weight_gradients(*backward(_taken(slots, residuals), cotangents()))
            give(inputs)
            sums.add(weights, weights.fresh)

        return call

    def _backward_input(self, e: fx.BackwardInput) -> Call:
        stage, m, slots = e.stage, e.microbatch, self.slots
        backward, residuals = self.pieces.stages[stage].backward_input, self.slot(fx.Residuals(stage, m))
        cotangents, give = self._cotangents(stage, m), self._give(stage, m)
        deferred = self.slot(fx.Deferred(stage, m))

        def call() -> None:
            inputs, slots[deferred] = backward(_taken(slots, residuals), cotangents())
            give(inputs if self._counted(stage, m) else zeros(inputs))

        return call

    def _backward_weight(self, e: fx.BackwardWeight) -> Call:
        stage, m, slots = e.stage, e.microbatch, self.slots
        backward, deferred = self.pieces.stages[stage].backward_weight, self.slot(fx.Deferred(stage, m))

        def call() -> None:
            sums = self.step.sums[stage]
            if self._counted(stage, m):
                weights = backward(_taken(slots, deferred), sums)
            else:
                weights, _ = zero_weight_gradients(backward(_taken(slots, deferred)), {})
            sums.add(weights, weights.fresh)

        return call

    def _send(self, e: fx.Send) -> Call:
        value, target = e.value, e.rank
        slots, post = self.slots, self.channels.sender(value, self.rank, target)
        if isinstance(value, fx.WeightGradient):
            return lambda: post(self._shared(value.stage, target))
        slot = self.slot(value)
        if not isinstance(value, fx.Activation):
            return lambda: post(slots[slot])
        readers = tuple(c for c in self.plan.consumers(value.stage) if self.plan.rank_of(c, value.microbatch) == target)
        only = self.reads.only
        return lambda: post(only(slots[slot], value.stage, readers))

    def _shared(self, stage: int, target: int) -> Leaves:
        step = self.step
        return sent(self.pipeline, self.plan, step.inputs.params, stage, target, step.own(stage))

    def _reduce(self, e: fx.Reduce) -> Call:
        slots = self.slots
        foreign = [
            ((stage, rank), self.slot(fx.WeightGradient(stage, rank)))
            for stage, rank in self.plan.sharers(e.stage)
            if rank != self.rank
        ]

        def call() -> None:
            for sharer, slot in foreign:
                self.step.foreign[sharer] = slots[slot]

        return call


FUNCTIONS: Functions = {
    fx.Forward: Calls._forward,
    fx.Backward: Calls._backward,
    fx.BackwardInput: Calls._backward_input,
    fx.BackwardWeight: Calls._backward_weight,
    fx.Send: Calls._send,
    fx.Reduce: Calls._reduce,
}
"""Effect class -> `function(calls, effect)`, which returns a call that runs the effect in every step, or None for none.

The function runs once, when the program is compiled; the call finds its slots, pieces and channels in its closure.
"""


def _taken(slots: list[Any], slot: int) -> Any:
    """What lies in a slot, and lies there no longer."""
    value, slots[slot] = slots[slot], None
    return value


def _drop(slots: list[Any], dead: tuple[int, ...]) -> None:
    for slot in dead:
        slots[slot] = None


class _Reads:
    """Which leaves of an output its readers read, found once for each structure."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages = stages
        self.found: dict[Any, frozenset[int] | None] = {}

    def only(self, value: Flat, stage: int, readers: tuple[int, ...]) -> Flat:
        """The value with the leaves that no reader reads left out."""
        key = (value.spec, stage, readers)
        if key not in self.found:
            self.found[key] = self._find(value, stage, readers)
        wanted = self.found[key]
        if wanted is None:
            return value
        return Flat([leaf if i in wanted else ABSENT for i, leaf in enumerate(value.leaves)], value.spec)

    def _find(self, value: Flat, stage: int, readers: tuple[int, ...]) -> frozenset[int] | None:
        reads = {
            read.path
            for reader in readers
            for read in self.stages[reader].inputs
            if isinstance(read, Output) and read.stage == stage
        }
        if () in reads:
            return None
        found: set[int] = set()
        for path in reads:
            with suppress(KeyError, IndexError, AttributeError, TypeError):  # its reader will say that it lacks it
                found.update(indices(value.tree, path))
        return frozenset(found)
