"""Compile one rank's program into a flat list of instructions over numbered slots.

Invariants:
- Every name of the program has a numbered slot. A slot is cleared after the last effect that needs it.
- A value of another rank is taken from its channel at its first use, not earlier.
- A backward owns its residuals, deferred values and cotangents while it runs, so it may free them early.
- Residuals are saved only if an effect of the program needs them before it makes them again.
- The parts of an overlap run in turns where both are fpipe's own and traced, else one after the other.
- All lookups happen before a step: an instruction has its slots, stage functions and channels in its closure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Protocol

from optree import PyTreeSpec
from torch import Tensor

from fpipe import effects as fx
from fpipe.autodiff.braid import Part, in_turns
from fpipe.autodiff.functions import SavedGraph
from fpipe.autodiff.interface import (
    DATA,
    DifferentiablePipeline,
    Leaves,
    Prepared,
    detached_tree,
    has_weight,
    scaled,
    seed,
    weighted_loss,
    zeros,
)
from fpipe.autodiff.traced import Traced
from fpipe.devices import Device, current_device
from fpipe.errors import ScheduleError, StageError
from fpipe.handlers.gradients import LeafKey, Sum, add_leaves, received, sent, total, unscaled
from fpipe.handlers.host_residuals import HostResiduals
from fpipe.handlers.protocol import Inputs, Observer, Results
from fpipe.programs.program import Program
from fpipe.stages.cache import following
from fpipe.stages.carry import NO_CARRY, separated
from fpipe.stages.cuts import cuts_of, with_cuts
from fpipe.stages.pytree import ABSENT, Flat, Path, check_plain, flatten, indices
from fpipe.stages.rng import replayed, seeded
from fpipe.stages.sharding import wrapped
from fpipe.stages.stage import CARRY, Output, Stage
from fpipe.tables import TABLE, slice_of

Instruction = Callable[[], Any]
Function = Callable[[Any, Any], Instruction | None]
Functions = Mapping[type, Function]
NO_FUNCTIONS: Functions = MappingProxyType({})
UNSEEDED = nullcontext()


class Channels(Protocol):
    """Move values between ranks. The payload is a flattened tree (`Flat`), but for gradients: a list of leaves.

    `receives_copies` says whether a received payload is in memory that nothing else reads.
    """

    receives_copies: bool

    def sender(self, value: fx.Value, source: int, target: int) -> Callable[[Any], None]:
        """Return a function that posts the value's payload. It never waits for the receiver."""

    def receiver(
        self, value: fx.Value, source: int, target: int, by: fx.Effect
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        """Return two functions: one posts the receive and never waits, one waits for the payload, for effect `by`."""

    def scatter(self, stage: int, rank: int) -> tuple[Callable[[Step], None], Callable[[Step], Callable[[], Leaves]]]:
        """Return two functions: one posts this replica's sums of a stage, one waits until they can be added.

        The second returns a function that returns the sums over all replicas: those of this replica's shard, where the
        stage's parameters are sharded. None of the three is called twice in a step.
        """

    def gather(self, stage: int, rank: int) -> tuple[Callable[[Step], Leaves], Callable[[Step], Leaves]] | None:
        """Return two functions: one posts the gathering of a stage's parameters, one waits and puts them into the step.

        Both return tensors whose memory the whole parameters take: buffers on the way, and the parameters. None where
        they are whole at all times.
        """

    def release(self, stage: int, step: Step) -> None:
        """Give up a stage's whole parameters."""


@dataclass
class Step:
    """The data of one step, except the values in slots.

    Args:
        prepared: stage -> its prepared params.
        state: stage -> its state, updated by each forward; where the pieces are cached, a list by microbatch.
        sums: stage of this rank -> sum of its weight gradients.
        placed: the params as the caller passed them, where leaves are sharded; `inputs` then has this replica's pieces.
        joint: the stages that compute with the microbatches of other replicas too, as those with experts, or with parts
            of a sequence, do.
        others: the job's processes that have this rank in the other replicas.
        scattered: stage -> function that returns its sums over all replicas; waits for them.
        foreign: (stage, rank) -> leaves of that rank's sum, as received.
        gradients: of the entries of the params whose sums over copies and ties are complete.
        seeds: number of a slice, counted over all microbatches -> cotangents of the last stage's output.
        carried: (stage, the same number) -> the number of leaves that the stage passes on to the next slice.
        begun: (stage, the same number) -> the stage's state, and the states of the generators without `rng`, when the
            forward of residuals that are recomputed began.
        data_gradients: (stage, microbatch) -> the gradients of what the stage read of the microbatch.
    """

    inputs: Inputs
    prepared: dict[int, Prepared]
    state: dict[int, Any]
    sums: defaultdict[int, Sum] = field(default_factory=lambda: defaultdict(Sum))
    placed: Mapping[int, Any] | None = None
    joint: set[int] = field(default_factory=set)
    others: frozenset[int] = frozenset()
    scattered: dict[int, Callable[[], Leaves]] = field(default_factory=dict)
    foreign: dict[tuple[int, int], Leaves] = field(default_factory=dict)
    gradients: dict[int, Any] = field(default_factory=dict)
    seeds: dict[int, Leaves] = field(default_factory=dict)
    carried: dict[tuple[int, int], int] = field(default_factory=dict)
    begun: dict[tuple[int, int], tuple[Any, list[Tensor]]] = field(default_factory=dict)
    data_gradients: dict[tuple[int, int], Leaves] = field(default_factory=dict)
    results: Results = field(default_factory=Results)

    def sums_of(self, stage: int) -> dict[LeafKey, Any]:
        """Return this rank's sums of a stage's weight gradients, over all replicas, by path."""
        leaves = self.scattered[stage]() if stage in self.scattered else self.sums[stage].read()
        return dict(zip(self.prepared[stage].paths, leaves, strict=True))


class Calls:
    """A program's instructions, and the values that they work on.

    Args:
        calls: all instructions, in order.
        starts: for each effect the index of its first instruction; then the number of instructions.
        computes: index of an instruction that runs a stage's function -> its effect.
        slots: the rank's values by slot number; None where a slot is empty.
        touched: for each effect, the slots of the values that it needs or gives.
        device: where the rank computes; None for the current one.
        pace: returns a function that is called after an effect that computes.
        recorded: returns a function that is called before an effect, but for sends and receives, which are only posted.
        step: the running step.
    """

    def __init__(
        self,
        program: Program,
        pieces: DifferentiablePipeline,
        channels: Channels,
        observe: Observer | None,
        device: Device | None = None,
        functions: Functions = NO_FUNCTIONS,
        pace: Callable[[fx.Effect], Instruction] | None = None,
        recorded: Callable[[fx.Effect], Instruction] | None = None,
    ) -> None:
        self.program, self.plan, self.rank, self.table = program, program.plan, program.rank, program.table
        self.pieces, self.pipeline = pieces, pieces.pipeline
        self.channels, self.observe, self.device = channels, observe, device
        self.functions, self.pace, self.recorded = {**FUNCTIONS, **functions}, pace, recorded
        self.number: dict[fx.Name, int] = {}
        uses = [(name, at) for at, effect in enumerate(program) for name in self.table.needs(effect, self.plan)]
        self.last_use, self.first_use = dict(uses), dict(reversed(uses))
        self.takes: dict[fx.Name, Instruction] = {}
        again = (effect for effect in program if isinstance(effect, fx.Recompute))
        self.recomputed = {fx.Residuals(effect.stage, effect.microbatch, effect.slice) for effect in again}
        self.calls: list[Instruction] = []
        self.starts: list[int] = []
        self.computes: dict[int, fx.Effect] = {}
        self.slots: list[Any] = []
        self.touched: list[tuple[int, ...]] = []
        self.unread: list[int] = []  # slots of what no effect reads, of the one that is compiled
        self.running: Step | None = None
        self.host: HostResiduals | None = None
        last = self.plan.stages - 1
        # With copies or replicas, the losses of other ranks may depend on what is trained: the handler refuses a
        # constant loss there, at the end of the step.
        is_last = last in self.plan.stages_on(self.rank)
        losses = list(self.plan.microbatches_of(last, self.rank)) if is_last else []
        has_all = self.plan.replicas == 1 and len(losses) == self.plan.microbatches
        self.last_unit = self.plan.units - 1 if has_all else None
        self._compile()

    @property
    def step(self) -> Step:
        assert self.running is not None
        return self.running

    def clear(self) -> None:
        """Release all values of the step."""
        if self.host is not None:
            self.host.clear()
        self.slots[:] = [None] * len(self.slots)
        self.running = None

    def borrowed(self) -> Iterator[Any]:
        """Iterate over the tensors that the caller owns: parameters, and the leaves of the microbatches."""
        for prepared in self.step.prepared.values():
            yield from prepared.leaves
        yield from flatten(list(self.step.inputs.data)).leaves

    def prepared(self, stage: int) -> Iterator[Any]:
        """Iterate over the tensors that a stage has computed of its parameters alone; some are the parameters."""
        for values in self.step.prepared[stage].computed.values():
            yield from values if isinstance(values, list) else ()

    def sums(self) -> Iterator[Any]:
        """Iterate over the tensors of the sums of weight gradients so far, and None where a leaf has none yet."""
        for each in self.step.sums.values():
            yield from each.totals

    def slot(self, name: fx.Name) -> int:
        """Return the slot number of a name; a new name gets a new slot."""
        number = self.number.setdefault(name, len(self.number))
        if number == len(self.slots):
            self.slots.append(None)
        return number

    # Compiling

    def _compile(self) -> None:
        for at, effect in enumerate(self.program):
            self.starts.append(len(self.calls))
            needs, gives = self.table.needs(effect, self.plan), self.table.gives(effect, self.plan)
            self.touched.append(tuple({self.slot(n): None for n in (*needs, *gives)}))
            for name in needs:
                if name in self.takes:
                    self._take(name, self.takes.pop(name))
            self._effect(effect)
            dead = {n for n in needs if self.last_use[n] == at} | {n for n in gives if n not in self.last_use}
            freed = [self.slot(n) for n in dead | set(self.table.frees(effect, self.plan))] + self.unread
            if freed:
                self.calls.append(partial(_drop, self.slots, tuple(freed)))
            self.unread = []
        self.starts.append(len(self.calls))
        if self.observe is not None:
            self.observe.on_store(self.rank, self)

    def _take(self, value: Any, take: Instruction) -> None:
        """Add the instructions that move a value from its channel into its slot."""
        slots, slot = self.slots, self.slot(value)
        is_custom = type(value) not in TABLE.values

        def call() -> None:
            payload = take()
            slots[slot] = payload.tree if is_custom else payload

        if self.observe is None:
            self.calls.append(call)
        else:
            wait, arrive = (partial(method, self.rank, value) for method in (self.observe.wait, self.observe.arrive))
            self.calls += [wait, call, arrive]

    def _effect(self, effect: fx.Effect) -> None:
        """Add an effect's instructions, between the calls of the observer."""
        if self.recorded is not None and not isinstance(effect, fx.Send | fx.Recv):
            self.calls.append(self.recorded(effect))
        if self.observe is not None:
            self.calls.append(partial(self.observe.begin, self.rank, effect))
        if isinstance(effect, fx.Overlap) and all(map(self._is_traced, fx.parts(effect))):
            self.calls.append(self._in_turns(effect))
            self.calls += [] if self.pace is None else map(self.pace, fx.parts(effect))
        else:
            self._one_by_one(effect)
        if self.observe is not None:
            self.calls.append(partial(self.observe.end, self.rank, effect))

    def _one_by_one(self, effect: fx.Effect) -> None:
        for part in fx.parts(effect):
            function = self._function(part)
            if (call := function(self, part)) is not None:
                is_custom = function is not FUNCTIONS.get(type(part))
                computes = is_custom or self.table.effects[type(part)].track == "compute"
                if computes:
                    self.computes[len(self.calls)] = part
                self.calls.append(call)
                if computes and self.pace is not None:
                    self.calls.append(self.pace(part))

    def _is_traced(self, part: Any) -> bool:
        """Return whether fpipe's own function runs a part of an overlap, and its stage may have graphs."""
        is_own = self.functions.get(type(part)) is FUNCTIONS[type(part)]
        return is_own and isinstance(self.pieces.stages[part.stage], Traced)

    def _in_turns(self, e: fx.Overlap) -> Instruction:
        forward, backward = (self._part(part, len(self.calls)) for part in fx.parts(e))
        slots, needs = self.slots, self.table.needs(e.backward, self.plan)
        saved = next(self.slot(name) for name in needs if isinstance(name, fx.Residuals | fx.Deferred))
        one, other, is_graph = forward.stage, backward.stage, Traced.is_graph

        def call() -> None:
            if (one.waits or other.waits) and is_graph(slots[saved]):  # eager autograd may draw random numbers
                in_turns(forward, backward)
            else:
                forward.begin()
                forward.call()
                backward.begin()
                backward.call()

        return call

    def _part(self, part: Any, at: int) -> Part:
        """Return a part of the overlap whose instruction has this number."""
        call, stage = FUNCTIONS[type(part)](self, part), self.pieces.stages[part.stage]
        assert call is not None
        assert isinstance(stage, Traced)
        stage.graphs.in_turns = True
        return Part(stage, call, partial(self.computes.__setitem__, at, part))

    def _function(self, effect: fx.Effect) -> Function:
        try:
            return self.functions[type(effect)]
        except KeyError:
            name = type(effect).__name__
            raise ScheduleError(
                f"rank {self.rank} has {effect}, and the handler has no function for it: pass "
                f"functions={{{name}: function}} to the handler, where function(calls, effect) returns what runs"
            ) from None

    def _forward(self, e: fx.Forward) -> Instruction:
        stage, m, t, slots = e.stage, e.microbatch, slice_of(e), self.slots
        forward, stateful = self.pieces.stages[stage].forward, self.pipeline.stages[stage].stateful
        out, residuals, unit = self.slot(fx.Activation(stage, m, t)), None, self.plan.unit(m, t)
        again = fx.Residuals(stage, m, t) in self.recomputed
        if fx.Residuals(stage, m, t) in self.last_use and not again:
            residuals = self.slot(fx.Residuals(stage, m, t))
        inputs, carries = self._inputs(stage, m, t), CARRY in self.pipeline.stages[stage].sources
        after = self.slot(fx.Carry(stage, m, t)) if t < self.plan.slices - 1 else None
        keep = residuals is not None or self.pieces.differentiated  # in autograd's mode, even if nothing is saved
        last = stage == self.plan.stages - 1
        is_sent = bool(self.plan.consumers(stage)) or self.pieces.gather
        if not self.plan.consumers(stage):  # the results have it
            self.unread.append(out)

        def call() -> None:
            step = self.step
            activations, data, seeding = inputs()
            if again:
                generators = (self.device or current_device()).generators() if step.inputs.rng is None else ()
                step.begun[stage, unit] = step.state.get(stage), [each.get_state() for each in generators]
            with seeding:
                outputs, saved, state = forward(step.prepared[stage], step.state.get(stage), activations, data, keep)
            if carries:
                outputs, carry = separated(outputs)
                step.carried[stage, unit] = len(carry.leaves)
                if after is not None:
                    check_plain(carry, self.rank, stage, m)
                    slots[after] = carry
            if residuals is not None:
                slots[residuals] = saved
            if stateful:
                step.state[stage] = state
            if is_sent:
                check_plain(outputs, self.rank, stage, m)
            slots[out] = outputs
            if last:
                self._result(unit, outputs, keep)

        return call

    def _token(self, e: fx.Prefill | fx.Decode) -> Instruction:
        """Run a stage for a slice of the prompts of a microbatch, or one more token of each, with its cache."""
        stage, m, token = e.stage, e.microbatch, e.token
        slots, last, chooses = self.slots, stage == self.plan.stages - 1, token + 1 >= self.plan.prefills
        forward, stateful = self.pieces.stages[stage].forward, self.pipeline.stages[stage].stateful
        sources = tuple((s, self.slot(fx.Hidden(s, m, token))) for s in self.plan.sources(stage))
        before = self.slot(fx.Token(m, token - 1)) if token >= self.plan.prefills and not sources else None
        out = self.slot(fx.Token(m, token) if last else fx.Hidden(stage, m, token))

        def call() -> None:
            step = self.step
            data = step.inputs.later[token - 1][m] if token else step.inputs.data[m]
            data = data if before is None else following(data, slots[before].tree)
            state, activations = step.state[stage][m] if stateful else None, {s: slots[i] for s, i in sources}
            outputs, _, state = forward(step.prepared[stage], state, activations, data, False)
            if stateful:
                step.state[stage][m] = state
            check_plain(outputs, self.rank, stage, m)
            slots[out] = outputs
            if last and chooses:
                step.results.outputs.setdefault(m, []).append(outputs.tree)

        return call

    def _inputs(self, stage: int, m: int, t: int) -> Callable[[], tuple[dict[int, Any], Any, Any]]:
        """Return a function that returns the activations and the data that a forward reads, and its random context."""
        slots, unit = self.slots, self.plan.unit(m, t)
        sources = tuple((s, self.slot(fx.Activation(s, m, t))) for s in self.plan.sources(stage))
        carries = CARRY in self.pipeline.stages[stage].sources
        before = self.slot(fx.Carry(stage, m, t - 1)) if carries and t > 0 else None

        def inputs() -> tuple[dict[int, Any], Any, Any]:
            of_step, activations = self.step.inputs, {s: slots[i] for s, i in sources}
            if carries:
                activations[CARRY] = NO_CARRY if before is None else slots[before]
            number, _ = of_step.place(unit)
            seeding = UNSEEDED if of_step.rng is None else seeded(of_step.rng, stage, number, self.device, t)
            return activations, of_step.data[unit], seeding

        return inputs

    def _recompute(self, e: fx.Recompute) -> Instruction:
        stage, m, t, slots = e.stage, e.microbatch, slice_of(e), self.slots
        forward, inputs, unit = self.pieces.stages[stage].forward, self._inputs(stage, m, t), self.plan.unit(m, t)
        residuals = self.slot(fx.Residuals(stage, m, t))

        def call() -> None:
            step = self.step
            activations, data, seeding = inputs()
            state, states = step.begun.pop((stage, unit))
            with replayed(states, self.device) if step.inputs.rng is None else seeding:
                _, slots[residuals], _ = forward(step.prepared[stage], state, activations, data, True)

        return call

    def _offload(self, e: fx.Offload) -> Instruction:
        stage, m, slots = e.stage, e.microbatch, self.slots
        residuals, moved = self.slot(fx.Residuals(stage, m, e.slice)), self.slot(fx.Offloaded(stage, m, e.slice))

        def call() -> None:
            saved = slots[residuals]
            if not isinstance(saved, SavedGraph):
                raise StageError(
                    "its residuals are those of eager autograd, which fpipe can't move to the host: make a stage that "
                    "can be traced of it, or let them be recomputed (fpipe.offload(..., recompute=True))",
                    rank=self.rank,
                    stage=stage,
                    microbatch=m,
                )
            self.host = self.host or HostResiduals(self.device or current_device())
            slots[moved] = self.host.offload(saved, self.borrowed())

        self.takes[fx.Offloaded(stage, m, e.slice)] = lambda: slots[moved].wait()
        return call

    def _discard(self, e: fx.Discard) -> Instruction:
        """Clear the slot; the wait for the copy comes before it."""
        slots, residuals = self.slots, self.slot(fx.Residuals(e.stage, e.microbatch, e.slice))
        return partial(_drop, slots, (residuals,))

    def _fetch(self, e: fx.Fetch) -> Instruction:
        stage, m, slots = e.stage, e.microbatch, self.slots
        residuals, moved = self.slot(fx.Residuals(stage, m, e.slice)), self.slot(fx.Offloaded(stage, m, e.slice))
        waits: list[Instruction] = []

        def call() -> None:
            assert self.host is not None
            slots[residuals], wait = self.host.fetch(slots[moved])
            waits[:] = [wait]

        def take() -> Any:
            waits.pop()()
            return slots[residuals]

        self.takes[fx.Residuals(stage, m, e.slice)] = take
        return call

    def _result(self, unit: int, outputs: Flat, keep: bool) -> None:
        step = self.step
        cotangents: Leaves = [None] * len(outputs.leaves)
        number = unit + step.inputs.first
        if self.pieces.loss:
            loss, output = outputs.tree
            cotangent = seed(loss, scale := step.inputs.scale(unit))
            cotangents[0] = scaled(cotangent, step.inputs.loss_scale)
            step.results.losses[number] = weighted_loss(loss, cotangent, scale)
            step.results.outputs[number] = detached_tree(output)
            step.results.differentiable |= loss.requires_grad
            if keep and unit == self.last_unit:
                step.results.refuse_constant_loss()
        else:
            step.results.outputs[number] = outputs.tree
        if keep:
            step.seeds[unit] = cotangents

    def _cotangents(self, stage: int, m: int, t: int) -> Callable[[], Leaves]:
        """Return a function that returns the cotangents of a stage's outputs, and of what it carries."""
        outputs, slots, unit = self._output_cotangents(stage, m, t), self.slots, self.plan.unit(m, t)
        if CARRY not in self.pipeline.stages[stage].sources:
            return outputs
        if t == self.plan.slices - 1:  # no slice reads what this one passes on
            return lambda: [*outputs(), *[None] * self.step.carried[stage, unit]]
        carry = self.slot(fx.CarryGradient(stage, m, t))

        def call() -> Leaves:
            of_outputs, of_carry = outputs(), _pop(slots, carry)
            if not self._loss_has_weight(stage, unit):
                of_outputs = [None] * len(of_outputs)
            return [*of_outputs, *of_carry]

        return call

    def _output_cotangents(self, stage: int, m: int, t: int) -> Callable[[], Leaves]:
        slots = self.slots
        gradients = tuple(self.slot(fx.Gradient(stage, c, m, t)) for c in self.plan.terms(stage, m))
        if not gradients:
            return lambda: self.step.seeds.pop(self.plan.unit(m, t))
        if len(gradients) == 1:
            return partial(_pop, slots, gradients[0])
        return lambda: add_leaves(_pop(slots, slot) for slot in gradients)

    def _store_gradients(self, stage: int, m: int, t: int) -> Callable[[Mapping[int, Leaves]], None]:
        slots = self.slots
        sources = self.plan.differentiated_sources(stage)
        gradients = tuple((s, self.slot(fx.Gradient(s, stage, m, t))) for s in sources)
        if CARRY in self.pipeline.stages[stage].sources and t > 0:
            gradients = (*gradients, (CARRY, self.slot(fx.CarryGradient(stage, m, t - 1))))
        higher = ((s, self.plan.added_to(s, stage, m)) for s in sources)
        sums = {s: self.slot(fx.Gradient(s, c, m, t)) for s, c in higher if c is not None}

        def store(inputs: Mapping[int, Leaves]) -> None:
            for source, slot in gradients:
                slots[slot] = inputs[source]

        def add(inputs: Mapping[int, Leaves]) -> None:
            totals = {source: add_leaves([_pop(slots, slot), inputs[source]]) for source, slot in sums.items()}
            store({**inputs, **totals})

        keep = add if sums else store

        def keep_all(inputs: Mapping[int, Leaves]) -> None:
            keep(inputs)
            self.step.data_gradients[stage, m] = inputs[DATA]

        return keep_all if stage in self.plan.batch_gradients else keep

    def _loss_has_weight(self, stage: int, unit: int) -> bool:
        """Return False for the last stage where the loss of its slice has a weight of zero."""
        return stage != self.plan.stages - 1 or has_weight(self.step.inputs.scale(unit))

    def _has_weight(self, stage: int, m: int, t: int) -> bool:
        """Return False for a backward of the last stage whose microbatch has a loss of weight zero.

        A slice whose loss has none has what later slices read of it.
        """
        carries = CARRY in self.pipeline.stages[stage].sources and t < self.plan.slices - 1
        if carries or self._loss_has_weight(stage, self.plan.unit(m, t)):
            return True
        piece, step = self.pieces.stages[stage], self.step  # other replicas' losses may depend on this microbatch
        return stage in step.joint or not step.others.isdisjoint(getattr(piece, "peers", ()))

    def _backward(self, e: fx.Backward) -> Instruction:
        return self._whole_backward(e.stage, e.microbatch, slice_of(e))

    def _whole_backward(self, stage: int, m: int, t: int) -> Instruction:
        slots = self.slots
        backward, residuals = self.pieces.stages[stage].backward, self.slot(fx.Residuals(stage, m, t))
        cotangents, store = self._cotangents(stage, m, t), self._store_gradients(stage, m, t)

        def call() -> None:
            sums, weighted = self.step.sums[stage], self._has_weight(stage, m, t)
            weights, inputs = backward(_pop(slots, residuals), cotangents(), sums if weighted else None)
            store(inputs if weighted else zeros(inputs))
            sums.add(weights if weighted else [None] * len(weights), weights.fresh)

        return call

    def _backward_input(self, e: fx.BackwardInput) -> Instruction:
        stage, m, t, slots = e.stage, e.microbatch, slice_of(e), self.slots
        backward, residuals = self.pieces.stages[stage].backward_input, self.slot(fx.Residuals(stage, m, t))
        cotangents, store = self._cotangents(stage, m, t), self._store_gradients(stage, m, t)
        deferred = self.slot(fx.Deferred(stage, m, t)) if self.plan.is_trained(stage) else None

        def call() -> None:
            inputs, saved = backward(_pop(slots, residuals), cotangents())
            if deferred is not None:
                slots[deferred] = saved
            store(inputs if self._has_weight(stage, m, t) else zeros(inputs))

        return call

    def _backward_weight(self, e: fx.BackwardWeight) -> Instruction:
        stage, m, t, slots = e.stage, e.microbatch, slice_of(e), self.slots
        if not self.plan.has_input_half(stage):
            return self._whole_backward(stage, m, t)
        backward, deferred = self.pieces.stages[stage].backward_weight, self.slot(fx.Deferred(stage, m, t))

        def call() -> None:
            sums, weighted = self.step.sums[stage], self._has_weight(stage, m, t)
            weights = backward(_pop(slots, deferred), sums if weighted else None)
            sums.add(weights if weighted else [None] * len(weights), weights.fresh)

        return call

    def _send(self, e: fx.Send) -> Instruction:
        value, target = e.value, e.rank
        slots, post = self.slots, self.channels.sender(value, self.rank, target)
        if isinstance(value, fx.WeightGradient):
            return lambda: post(self._shared(value.stage, target))
        slot = self.slot(value)
        if type(value) not in TABLE.values:  # a value of the user's own, which may be any tree
            return lambda: post(flatten(slots[slot]))
        if isinstance(value, fx.Activation | fx.Hidden):
            consumers, source = self.plan.consumers(value.stage), value.stage
            readers = [c for c in consumers if self.plan.rank_of(c, value.microbatch) == target]
            paths = frozenset(path for c in readers for path in paths_read(self.pipeline.stages[c], source))
            if () not in paths:
                return lambda: post(_selected(slots[slot], paths))
        return lambda: post(slots[slot])

    def _recv(self, e: fx.Recv) -> Instruction:
        by = self.first_use.get(e.value)
        effect = e if by is None else self.program.effects[by]
        post, self.takes[e.value] = self.channels.receiver(e.value, e.rank, self.rank, effect)
        return post

    def _gather(self, e: fx.Gather) -> Instruction | None:
        functions = self.channels.gather(e.stage, self.rank)
        if functions is None:
            return None
        post, take = functions
        slots, slot = self.slots, self.slot(fx.Parameters(e.stage))
        self.takes[fx.Parameters(e.stage)] = lambda: take(self.step)

        def call() -> None:
            slots[slot] = post(self.step)

        return call

    def _release(self, e: fx.Release) -> Instruction:
        slots, slot = self.slots, self.slot(fx.Parameters(e.stage))

        def call() -> None:
            slots[slot] = None
            self.channels.release(e.stage, self.step)

        return call

    def _scatter(self, e: fx.Scatter) -> Instruction:
        post, take = self.channels.scatter(e.stage, self.rank)

        def wait() -> None:
            self.step.scattered[e.stage] = take(self.step)

        self.takes[fx.WeightGradient(e.stage, self.rank)] = wait
        return lambda: post(self.step)

    def _shared(self, stage: int, target: int) -> Leaves:
        step = self.step
        totals = step.sums_of(stage)
        return sent(self.pipeline, self.plan, step.inputs.params, stage, target, totals, self.pieces.precision)

    def _reduce(self, e: fx.Reduce) -> Instruction:
        slots = self.slots
        foreign = [
            ((stage, rank), self.slot(fx.WeightGradient(stage, rank)))
            for stage, rank in self.plan.sharers(e.stage)
            if rank != self.rank
        ]
        add = self._total(e.stage)

        def call() -> None:
            for sharer, slot in foreign:
                self.step.foreign[sharer] = slots[slot]
            if foreign:  # while other ranks' sums of other stages arrive
                add()

        return call

    def _update(self, e: fx.Update) -> Instruction:
        add = self._total(e.stage)

        def call() -> None:
            step = self.step
            if step.inputs.update is not None and add():
                step.inputs.update({e.stage: step.gradients[e.stage]})

        return call

    def _total(self, stage: int) -> Callable[[], bool]:
        """Return a function that puts a stage's gradients into the step, once; it returns whether they are there.

        Parts of sums over processes are added at the end, those of all stages in one reduction.
        """
        shared = {stage, *(other for other, rank in self.plan.sharers(stage) if rank == self.rank)}

        def call() -> bool:
            step = self.step
            if any(step.sums[each].parts.leaves for each in shared if each in step.sums):
                return False
            if stage not in step.gradients:
                step.gradients |= self.gradients_of([stage], step, shared)
            return True

        return call

    def gradients_of(self, entries: Collection[int], step: Step, stages: Collection[int]) -> dict[int, Any]:
        """Return the gradients of some entries of the params, in their dtypes and placements.

        Args:
            entries: stages whose sums, and those of the stages that share them, are final.
            stages: whose sums are final on this rank.
        """
        pipeline, plan, rank, params = self.pipeline, self.plan, self.rank, step.inputs.params
        sums = {(stage, rank): step.sums_of(stage) for stage in sorted(stages)}
        for (stage, other), leaves in step.foreign.items():
            sums[stage, other] = received(pipeline, plan, params, stage, rank, leaves)
        spare = step.foreign if self.channels.receives_copies else ()
        gradients = total(pipeline, plan, params, plan.stages_on(rank), sums, entries, spare)
        gradients = unscaled(gradients, step.inputs.loss_scale)
        gradients = self.pieces.precision.gradients(gradients, {stage: params[stage] for stage in entries})
        if step.placed is None:
            return dict(gradients)
        return dict(wrapped(gradients, {stage: step.placed[stage] for stage in entries}))


FUNCTIONS: Functions = {
    fx.Forward: Calls._forward,
    fx.Prefill: Calls._token,
    fx.Decode: Calls._token,
    fx.Backward: Calls._backward,
    fx.BackwardInput: Calls._backward_input,
    fx.BackwardWeight: Calls._backward_weight,
    fx.Send: Calls._send,
    fx.Recv: Calls._recv,
    fx.Reduce: Calls._reduce,
    fx.Gather: Calls._gather,
    fx.Release: Calls._release,
    fx.Scatter: Calls._scatter,
    fx.Update: Calls._update,
    fx.Offload: Calls._offload,
    fx.Discard: Calls._discard,
    fx.Fetch: Calls._fetch,
    fx.Recompute: Calls._recompute,
}
"""Effect class -> `function(calls, effect)`, which returns the instruction that runs the effect, or None for no-op.

The function runs once, when the program is compiled; the instruction runs in every step.
"""


def _pop(slots: list[Any], slot: int) -> Any:
    """Return a slot's value and clear the slot."""
    value, slots[slot] = slots[slot], None
    return value


def _drop(slots: list[Any], dead: tuple[int, ...]) -> None:
    for slot in dead:
        slots[slot] = None


def paths_read(stage: Stage, source: int) -> set[Path]:
    """Return the paths at which a stage reads a source stage's output; `()` for all of it."""
    return {read.path for read in stage.inputs if isinstance(read, Output) and read.stage == source}


def _selected(value: Flat, paths: frozenset[Path]) -> Flat:
    """Return the value with `ABSENT` for each leaf that is not below one of the paths."""
    numbers = _numbers(value.spec, paths)
    cuts = {i: cut for i, cut in cuts_of(value).items() if i in numbers}
    return with_cuts([leaf if i in numbers else ABSENT for i, leaf in enumerate(value.leaves)], value.spec, cuts)


@lru_cache(maxsize=1024)
def _numbers(spec: PyTreeSpec, paths: frozenset[Path]) -> frozenset[int]:
    """Return the numbers of the leaves below the paths."""
    tree, numbers = spec.unflatten(range(spec.num_leaves)), set[int]()
    for path in paths:
        with suppress(KeyError, IndexError, AttributeError, TypeError):  # the reader raises an error with the path
            numbers.update(indices(tree, path))
    return frozenset(numbers)
