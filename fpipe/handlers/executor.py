"""One rank's program, compiled once: what each effect does to the values on the rank.

Invariants:
- every name of the program has a numbered slot; a slot is emptied at the last effect that needs it;
- a value from another rank is taken from its channel at its first use, and not before;
- what a backward uses up, residuals, deferred and cotangents, is its alone while it runs: it may free it early;
- residuals are kept only where the program has a use for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from fpipe import effects as fx
from fpipe.autodiff.pieces import Leaves, Pieces, Prepared, WeightGradients, detached_tree, seed
from fpipe.effects import frees, gives, needs
from fpipe.errors import StageError
from fpipe.gradients import Key, Sum, add_leaves, received, sent, total
from fpipe.handlers.protocol import Inputs, Observer, Results
from fpipe.program import Program
from fpipe.rng import seeded
from fpipe.signature import check_plain
from fpipe.stage import Batch, Output, Stage
from fpipe.tree import ABSENT, Flat, indices, summary


class Channels(Protocol):
    """How values travel. Payloads are trees taken apart for activations, else lists of leaves."""

    def send(self, value: fx.Value, source: int, target: int, payload: Any) -> None:
        """Post a payload; never wait for its receiver."""

    def post(self, value: fx.Value, source: int, target: int) -> None:
        """Say that a value will be taken; never wait."""

    def take(self, value: fx.Value, source: int, target: int, by: fx.Effect) -> Any:
        """The payload, when it has come; `by` is the effect that waits for it."""


class Instruction(NamedTuple):
    """An effect with what it takes from channels, what it does, and the slots it leaves empty."""

    effect: fx.Effect
    takes: tuple[tuple[int, fx.Value, int], ...]
    call: Callable[[], None]
    drops: tuple[int, ...]


@dataclass
class Step:
    """What one step holds beside the slots.

    Args:
        sums: of the weight gradients, by this rank's stages.
        foreign: what it was sent of other ranks' sums, by (stage, rank).
        seeds: the cotangents of the last stage's output, by microbatch.
    """

    inputs: Inputs
    prepared: dict[int, Prepared]
    state: dict[int, Any]
    sums: dict[int, Sum] = field(default_factory=dict)
    foreign: dict[tuple[int, int], Leaves] = field(default_factory=dict)
    seeds: dict[int, Leaves] = field(default_factory=dict)
    results: Results = field(default_factory=Results)


class Executor:
    """Runs one rank's effects."""

    def __init__(
        self,
        program: Program,
        pieces: Pieces,
        channels: Channels,
        observe: Observer | None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        self.program, self.plan, self.rank = program, program.plan, program.rank
        self.pieces, self.pipeline = pieces, pieces.pipeline
        self.channels, self.observe = channels, observe
        self._number: dict[fx.Name, int] = {}
        self._uses = self._last_uses()
        self.instructions = self._compile()
        self.slots: list[Any] = [None] * len(self._number)
        self.step: Step | None = None
        self.reads = _Reads(self.pipeline.stages)

    # Before and after a step

    def start(self, inputs: Inputs) -> None:
        """Take a step's arguments; nothing runs yet."""
        prepared = {}
        for stage in self.plan.stages_on(self.rank):
            try:
                prepared[stage] = self.pieces.stages[stage].prepare(self.pipeline.params_of(inputs.params, stage))
            except StageError as error:
                raise error.on(self.rank) from error.__cause__
            except Exception as error:
                raise StageError(f"its params can't be used: {error}", rank=self.rank, stage=stage) from error
        self.step = Step(inputs, prepared, dict(inputs.state))

    def know(self, rows: int | None) -> None:
        """Take the number of rows, which other ranks told."""
        self._running.inputs = replace(self._running.inputs, rows=rows)

    def finish(self) -> Results:
        """The step's results on this rank; nothing of the step stays here."""
        step, results = self._running, self._running.results
        self.clear()
        held = self.plan.stages_on(self.rank)
        results.state = {stage: step.state[stage] for stage in held if self.pipeline.stages[stage].stateful}
        if step.sums:
            results.gradients = total(self.pipeline, self.plan, step.inputs.params, held, self._sums(step))
        return results

    @property
    def _running(self) -> Step:
        assert self.step is not None
        return self.step

    def clear(self) -> None:
        """Give up everything that the step holds."""
        self.slots = [None] * len(self.slots)
        self.step = None

    def _sums(self, step: Step) -> dict[tuple[int, int], dict[Key, Any]]:
        sums = {(stage, self.rank): self._own(step, stage) for stage in step.sums}
        for (stage, rank), leaves in step.foreign.items():
            sums[stage, rank] = received(self.pipeline, self.plan, step.inputs.params, stage, self.rank, leaves)
        return sums

    def _own(self, step: Step, stage: int) -> dict[Key, Any]:
        """This rank's sums for a stage, by path."""
        return dict(zip(step.prepared[stage].paths, step.sums[stage].read(), strict=True))

    # Running

    def execute(self, at: int) -> None:
        """Run the effect at an index of the program."""
        effect, takes, call, drops = self.instructions[at]
        slots = self.slots
        for slot, value, source in takes:
            slots[slot] = self.channels.take(value, source, self.rank, effect)
        observe = self.observe
        if observe is not None:
            observe.begin(self.rank, effect)
        try:
            call()
        except StageError as error:
            if error.rank is not None:
                raise
            raise error.on(self.rank, getattr(effect, "microbatch", None)) from error.__cause__
        except Exception as error:
            if not isinstance(effect, fx.Compute):
                raise  # the user's functions run in compute effects alone; an overlap names its part itself
            raise self._failure(effect, error) from error
        if observe is not None:
            observe.end(self.rank, effect)
        for slot in drops:
            slots[slot] = None

    def _failure(self, effect: fx.Compute, error: Exception) -> StageError:
        stage, m = effect.stage, effect.microbatch
        message = f"{type(effect).__name__} raised {type(error).__name__}: {error}"
        if isinstance(effect, fx.Forward):
            came = {source: self.slots[self._number[fx.Activation(source, m)]] for source in self.plan.sources(stage)}
            given = [f"stage {source} gave it {summary(value.tree)}" for source, value in came.items()]
            if self._lacks_batch(effect):
                given.append("it reads the batch, which is None on this rank")
            if "in-place operation" in str(error):
                given.append("a stage may not change its inputs")
            message += f" ({'; '.join(given)})" if given else ""
        return StageError(message, rank=self.rank, stage=stage, microbatch=m)

    # Compiling

    def _lacks_batch(self, e: fx.Forward) -> bool:
        reads = self.pipeline.stages[e.stage].inputs
        return self._running.inputs.data[e.microbatch].batch is None and any(isinstance(r, Batch) for r in reads)

    def _slot(self, name: fx.Name) -> int:
        return self._number.setdefault(name, len(self._number))

    def _last_uses(self) -> dict[fx.Name, int]:
        return {name: at for at, effect in enumerate(self.program) for name in needs(effect, self.plan)}

    def _compile(self) -> list[Instruction]:
        source = {e.value: e.rank for e in self.program if isinstance(e, fx.Recv)}
        instructions = []
        for at, effect in enumerate(self.program):
            used, given = needs(effect, self.plan), gives(effect, self.plan)
            takes = [(self._slot(n), n, source.pop(n)) for n in used if n in source and not isinstance(effect, fx.Recv)]
            freed = {n for n in used if self._uses[n] == at} | set(frees(effect, self.plan))
            unused = {n for n in given if n not in self._uses and not isinstance(effect, fx.Recv)}
            drops = tuple(self._slot(n) for n in freed | unused)
            instructions.append(Instruction(effect, tuple(takes), self._call(effect), drops))
        return instructions

    def _call(self, effect: fx.Effect) -> Callable[[], None]:
        match effect:
            case fx.Forward():
                return self._forward(effect)
            case fx.Backward():
                return self._backward(effect)
            case fx.BackwardInput():
                return self._backward_input(effect)
            case fx.BackwardWeight():
                return self._backward_weight(effect)
            case fx.Overlap(forward, backward):
                return self._overlap(forward, backward)
            case fx.Send(value, rank):
                return self._send(value, rank)
            case fx.Recv(value, rank):
                return lambda: self.channels.post(value, rank, self.rank)
            case fx.Reduce():
                return self._reduce(effect)

    def _overlap(self, *parts: fx.Compute) -> Callable[[], None]:
        calls = [(part, self._call(part)) for part in parts]

        def call() -> None:
            for part, run in calls:
                try:
                    run()
                except StageError:
                    raise
                except Exception as error:
                    raise self._failure(part, error) from error

        return call

    def _forward(self, e: fx.Forward) -> Callable[[], None]:
        stage, m, piece = e.stage, e.microbatch, self.pieces.stages[e.stage]
        sources = tuple((s, self._slot(fx.Activation(s, m))) for s in self.plan.sources(stage))
        out = self._slot(fx.Activation(stage, m))
        residuals = self._slot(fx.Residuals(stage, m))
        keep = fx.Residuals(stage, m) in self._uses
        last = stage == self.plan.stages - 1
        name = fx.Activation(stage, m)
        goes_on = bool(self.plan.consumers(stage)) or self.pieces.gather
        stateful = self.pipeline.stages[stage].stateful

        def call() -> None:
            step, slots = self._running, self.slots
            read = {s: slots[i] for s, i in sources}
            with seeded(step.inputs.rng, stage, m, self.device):
                outputs, kept, state = piece.forward(
                    step.prepared[stage], step.state.get(stage), read, step.inputs.microbatch(m), keep
                )
            if goes_on:
                check_plain(outputs, self.rank, name)
            slots[out], slots[residuals] = outputs, kept
            if stateful:
                step.state[stage] = state
            if last:
                self._result(m, outputs, keep)

        return call

    def _result(self, m: int, outputs: Flat, keep: bool) -> None:
        step, results = self._running, self._running.results
        cotangents: Leaves = [None] * len(outputs.leaves)
        if self.pieces.loss:
            loss, kept = outputs.tree
            cotangents[0] = seed(loss, step.inputs.microbatch(m).scale)
            results.losses[m], results.outputs[m] = loss.detach() * cotangents[0], detached_tree(kept)
        else:
            results.outputs[m] = outputs.tree
        if keep:
            step.seeds[m] = cotangents

    def _cotangents(self, stage: int, m: int) -> Callable[[], Leaves]:
        given = tuple(self._slot(fx.Gradient(stage, c, m)) for c in self.plan.consumers(stage))
        if not given:
            return lambda: self._running.seeds.pop(m)
        return lambda: add_leaves(map(self._take, given))

    def _take(self, slot: int) -> Any:
        """What lies in a slot, and lies there no longer."""
        value, self.slots[slot] = self.slots[slot], None
        return value

    def _give(self, stage: int, m: int) -> Callable[[Mapping[int, Leaves]], None]:
        gradients = tuple((s, self._slot(fx.Gradient(s, stage, m))) for s in self.plan.sources(stage))

        def give(found: Mapping[int, Leaves]) -> None:
            for source, slot in gradients:
                self.slots[slot] = found[source]

        return give

    def _backward(self, e: fx.Backward) -> Callable[[], None]:
        stage, piece = e.stage, self.pieces.stages[e.stage]
        cotangents, give = self._cotangents(stage, e.microbatch), self._give(stage, e.microbatch)
        residuals = self._slot(fx.Residuals(stage, e.microbatch))

        def call() -> None:
            weights, inputs = piece.backward(self._take(residuals), cotangents())
            give(inputs)
            self._add(stage, weights)

        return call

    def _backward_input(self, e: fx.BackwardInput) -> Callable[[], None]:
        stage, piece = e.stage, self.pieces.stages[e.stage]
        cotangents, give = self._cotangents(stage, e.microbatch), self._give(stage, e.microbatch)
        residuals = self._slot(fx.Residuals(stage, e.microbatch))
        deferred = self._slot(fx.Deferred(stage, e.microbatch))

        def call() -> None:
            inputs, self.slots[deferred] = piece.backward_input(self._take(residuals), cotangents())
            give(inputs)

        return call

    def _backward_weight(self, e: fx.BackwardWeight) -> Callable[[], None]:
        stage, piece = e.stage, self.pieces.stages[e.stage]
        deferred = self._slot(fx.Deferred(stage, e.microbatch))
        return lambda: self._add(stage, piece.backward_weight(self._take(deferred)))

    def _add(self, stage: int, weights: WeightGradients) -> None:
        self._running.sums.setdefault(stage, Sum()).add(weights, weights.fresh)

    def _send(self, value: fx.Value, target: int) -> Callable[[], None]:
        if isinstance(value, fx.WeightGradient):
            return lambda: self.channels.send(value, self.rank, target, self._shared(value.stage, target))
        slot = self._slot(value)
        if isinstance(value, fx.Gradient):
            return lambda: self.channels.send(value, self.rank, target, self.slots[slot])
        readers = tuple(c for c in self.plan.consumers(value.stage) if self.plan.rank_of(c, value.microbatch) == target)

        def call() -> None:
            payload = self.reads.only(self.slots[slot], value.stage, readers)
            self.channels.send(value, self.rank, target, payload)

        return call

    def _shared(self, stage: int, target: int) -> Leaves:
        step = self._running
        return sent(self.pipeline, self.plan, step.inputs.params, stage, target, self._own(step, stage))

    def _reduce(self, e: fx.Reduce) -> Callable[[], None]:
        foreign = [
            ((stage, rank), self._slot(fx.WeightGradient(stage, rank)))
            for stage, rank in self.plan.sharers(e.stage)
            if rank != self.rank
        ]

        def call() -> None:
            for sharer, slot in foreign:
                self._running.foreign[sharer] = self.slots[slot]

        return call


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
