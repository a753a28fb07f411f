"""The pieces of stages as graphs: a forward or a backward of a stage is captured, and then replayed.

A slot is the memory of one microbatch in a stage: the arguments of its pieces, and what its forward saves for its
backward. A forward takes a free slot, and the last backward of the microbatch gives it up. So a stage has as many slots
as microbatches are alive in it at once.

Invariants:
- A microbatch for which there is no slot runs as it is. It is captured at the next step's beginning, when no receive is
  posted: a capture waits for the device, and so for what other ranks have sent.
- A slot is for microbatches of one signature, whose backward is fused or split: the graph of a backward has the
  residuals of the graph of its forward.
- The params of a stage are copied into the graphs' memory once a step; the arguments of a piece are copied into it, and
  its results out of it, with each replay. What is saved for the backward stays there, as long as the slot is taken.
- The graphs' memory belongs to no stream: a step waits for the last one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from fpipe.autodiff.graph.block import Sink
from fpipe.autodiff.graph.signature import Untraceable, ambient, leaf_key
from fpipe.autodiff.interface import DifferentiablePipeline, DifferentiableStage, Leaves, Prepared, WeightGradients
from fpipe.devices import CaptureError, Device, current_device, device_of
from fpipe.devices.memory import copied, copy, empty_as, given_back_after, in_memory
from fpipe.devices.tape import Trial
from fpipe.errors import StageError
from fpipe.errors.tracebacks import warn
from fpipe.handlers.captured import UNCAPTURED, common_device, kernels, line_of
from fpipe.handlers.gradients import Sum
from fpipe.stages.cuts import cuts_of
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Flat, flatten
from fpipe.stages.rng import Rng, Seeder, restored, seed_of
from fpipe.stages.stage import Batch, Stage, Target

SCOPE = 0  # the scope of a piece in which it draws
KINDS = 16  # of microbatches of a stage, whose graphs are kept
COMPUTED = 4 * KINDS  # values of the params alone, by signature, that are renewed in each step

Outputs = tuple[Leaves, optree.PyTreeSpec, Any]
"""(leaves of the outputs, their structure, new state)."""
Gradients = tuple[WeightGradients, dict[int, Leaves]]
"""(weight gradients, input gradients by source stage); empty where a backward has none."""


class Seed:
    """The seed of the microbatch whose forward runs; None without a seed."""

    value: int | None = None

    def seeder(self, rng: Rng) -> Seeder:
        """Return contexts that set the seed here, and draw from no generator."""

        @contextmanager
        def seeded(stage: int, microbatch: int) -> Iterator[None]:
            self.value = seed_of(*rng, stage, microbatch)
            try:
                yield
            finally:
                self.value = None

        return seeded


class CapturedPieces:
    """The stages of a pipeline, whose pieces are captured.

    Args:
        copies: of each stage, how many ranks of this process have it.
        device: where this process computes; None if the arguments say it.
    """

    def __init__(self, pieces: DifferentiablePipeline, copies: Sequence[int], device: torch.device | None) -> None:
        self.seed = Seed()
        self.stages = tuple(
            CapturedStage(piece, stage, count, device, self.seed)
            for stage, (piece, count) in enumerate(zip(pieces.stages, copies, strict=True))
        )
        self.pieces = replace(pieces, stages=self.stages)

    @property
    def graphs(self) -> int:
        """The number of graphs that this process has captured and keeps."""
        copies = [each for stage in self.stages for each in stage.copies.values()]
        return sum(len(slot) for each in copies for slots in each.slots.values() for slot in slots)


class CapturedStage:
    """A `DifferentiableStage` that replays graphs of another one.

    A stage that can't be captured runs as it is from then on, with a warning.

    Args:
        number: of the stage.
        count: how many ranks of this process have it.

    Raises:
        StageError: a backward does what no graph can hold, or gets cotangents of other layouts than before.
    """

    def __init__(
        self, piece: DifferentiableStage, number: int, count: int, device: torch.device | None, seed: Seed
    ) -> None:
        self.piece, self.stage, self.number, self.count = piece, piece.stage, number, count
        self.device, self.seed = device, seed
        self.copies: dict[int, _Copy] = {}
        self.steps, self.refused = 0, False

    @property
    def peers(self) -> frozenset[int]:
        """The processes in the groups of the collectives, with which it runs without graphs."""
        return getattr(self.piece, "peers", frozenset())

    def prepare(self, params: Any) -> Prepared:
        """Return the parameters in the graphs' memory, and capture what ran as it is in the last step."""
        prepared = self.piece.prepare(params)
        if self.refused:
            return prepared
        try:
            key = prepared.spec, ambient(), kernels(), *map(leaf_key, prepared.leaves)
        except Untraceable as error:
            self._refuse(str(error))
            return prepared
        number, self.steps = self.steps % self.count, self.steps + 1  # each rank prepares its own, once a step
        known = self.copies.get(number)
        if known is None or known.key != key or known.is_full:
            known = self.copies[number] = _Copy(self.piece, self.number, prepared, key)
        try:
            known.begin(prepared.leaves)
        except RuntimeError as error:  # of torch, too: it may forbid more than a first run shows
            self._refuse(str(error))
            return prepared
        return known.prepared

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        known = next((each for each in self.copies.values() if each.prepared is prepared), None)
        if any(map(cuts_of, sources.values())):
            self._refuse("an input is cut over processes, which compute the stage together")
        if known is None or self.refused or not keep:
            return self._as_it_is(prepared, state, sources, data, keep)
        try:
            inputs = _Inputs(self.stage, state, sources, data, self.seed.value is not None)
            run = known.replay(inputs) or known.first_run(inputs, self._device(prepared, inputs))
            outputs, new_state = run.forward(inputs.leaves, self.seed.value)
            known.note_use()
        except (CaptureError, Untraceable) as error:
            self._refuse(f"{error}{line_of(error) if isinstance(error, CaptureError) else ''}")
            return self._as_it_is(prepared, state, sources, data, keep)
        return outputs, run, new_state

    def backward(
        self, residuals: Any, cotangents: Leaves, sink: Sink | None = None
    ) -> tuple[WeightGradients, dict[int, Leaves]]:
        if not isinstance(residuals, _Microbatch):
            return self.piece.backward(residuals, cotangents, sink)
        return residuals.last("backward", cotangents, sink)

    def backward_input(self, residuals: Any, cotangents: Leaves) -> tuple[dict[int, Leaves], Any]:
        if not isinstance(residuals, _Microbatch):
            return self.piece.backward_input(residuals, cotangents)
        return residuals.call("backward_input", cotangents, None)[1], residuals

    def backward_weight(self, deferred: Any, sink: Sink | None = None) -> WeightGradients:
        if not isinstance(deferred, _Microbatch):
            return self.piece.backward_weight(deferred, sink)
        return deferred.last("backward_weight", [], sink)[0]

    def _as_it_is(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        with _drawing(self.seed.value, current_device() if self.device is None else device_of(self.device)):
            return self.piece.forward(prepared, state, sources, data, keep)

    def _device(self, prepared: Prepared, inputs: _Inputs) -> Device:
        return common_device([x for x in (*prepared.leaves, *inputs.leaves) if isinstance(x, Tensor)], self.device)

    def _refuse(self, reason: str) -> None:
        self.refused = True
        self.copies.clear()
        warn(f"stage {self.number} runs without graphs: {reason}")


class _Inputs:
    """The arguments of a forward beside the params, as leaves.

    Args:
        leaves: of all.
        flats: state, data, and each source.
        sources: their numbers.
        key: of the signature.
    """

    def __init__(
        self, stage: Stage, state: Any, sources: Mapping[int, Flat], data: Microbatch, is_seeded: bool
    ) -> None:
        kinds = set(map(type, stage.inputs))
        read = data.batch if Batch in kinds else None, data.target if Target in kinds else None
        self.flats = [flatten(state if stage.stateful else None), flatten(read), *sources.values()]
        self.sources = tuple(sources)
        self.leaves = [x for flat in self.flats for x in flat.leaves]
        self.key = is_seeded, self.sources, *[flat.spec for flat in self.flats], *map(leaf_key, self.leaves)

    def arguments(self, leaves: Leaves) -> tuple[Any, dict[int, Flat], Microbatch]:
        """Return state, sources and data of other leaves."""
        rest = iter(leaves)
        state, data, *values = [Flat([next(rest) for _ in flat.leaves], flat.spec) for flat in self.flats]
        return state.tree, dict(zip(self.sources, values, strict=True)), Microbatch(*data.tree)


class _Graph:
    """One piece in one slot: a graph, and its arguments and results in its memory.

    Args:
        last_use: an event after the last use of the stage's memory, on any stream.
        leaves: arguments as they were when the piece ran as it is.
        function: returns the results of the piece, a tree.
    """

    def __init__(
        self, device: Device, last_use: Any, leaves: Leaves, draws: bool, function: Callable[[Leaves], Any]
    ) -> None:
        self.key, self.draws = _keys(leaves), draws
        static = list(map(empty_as, leaves))
        self.inputs = list(map(in_memory, static))
        self.graph = device.new_graph([], [SCOPE] if draws else [])
        copy(leaves, self.inputs)
        with self.graph.capture(), self.graph.seeded(SCOPE):
            self.results = function(static)
        torch.clear_autocast_cache()  # a graph that used a cast of this one would need a replay of it
        given_back_after(self, last_use, device)

    def run(self, leaves: Leaves, seed: int | None = None) -> Any:
        """Run the piece on other arguments; the results are overwritten in the next call."""
        copy(leaves, self.inputs)
        self.graph.replay({SCOPE: seed} if self.draws and seed is not None else {})
        return self.results


Calls = tuple[tuple[str, Hashable], ...]
"""The backwards of a microbatch, by the names of their methods, and keys of their cotangents."""
Slot = Mapping[str, _Graph]
"""The graphs of a microbatch's pieces, by the names of the methods that call them."""


class _Copy:
    """A stage on one rank: its params in the graphs' memory, and its slots.

    Args:
        number: of the stage.
        prepared: the params of the first step; their structure is that of all.
        key: of what the graphs depend on beside the microbatch.

    Attributes:
        calls: number of a forward in a step -> the backwards of its microbatch, which are the same in every step.
        slots: of microbatches with one signature and the same backwards; `free` are those of them that are not taken.
        ran: runs without a graph in this step, in the order in which they began and ended.
    """

    def __init__(self, piece: DifferentiableStage, number: int, prepared: Prepared, key: Hashable) -> None:
        self.piece, self.number, self.key = piece, number, key
        self.prepared = replace(prepared, leaves=list(map(empty_as, prepared.leaves)), computed={})
        self.inputs = list(map(in_memory, self.prepared.leaves))
        self.calls: dict[int, Calls] = {}
        self.slots: OrderedDict[Hashable, list[Slot]] = OrderedDict()
        self.free: dict[Hashable, list[Slot]] = {}
        self.ran: list[_FirstRun] = []
        self.forwards = 0
        self.device: Device | None = None
        self.last_use: Any = None  # an event

    @property
    def is_full(self) -> bool:
        """Return whether so many values of the params are kept that most of them belong to dropped graphs."""
        return len(self.prepared.computed) > COMPUTED

    def begin(self, leaves: Leaves) -> None:
        """Copy the params of a step, and capture what ran as it is in the one before."""
        if self.device is not None:
            self.device.current_stream().wait_event(self.last_use)
        copy(leaves, self.inputs)
        torch.clear_autocast_cache()  # of params in this memory
        self.prepared.renew()
        self._capture()
        self.free = {key: list(slots) for key, slots in self.slots.items()}
        self.forwards = 0

    def _capture(self) -> None:
        """Add as many slots as runs without a graph were alive at once."""
        ran, self.ran = self.ran, []
        alive, added = defaultdict[Hashable, set[_FirstRun]](set), defaultdict[Hashable, int](int)
        examples = {run.key: run for run in ran if run.is_example}
        for run in ran:
            if run.key is None:  # the step failed
                continue
            alive[run.key] ^= {run}  # it begins, or ends
            if len(alive[run.key]) > added[run.key]:
                added[run.key] += 1
                self.slots.setdefault(run.key, []).append(examples[run.key].captured())
                self.slots.move_to_end(run.key)
        while len(self.slots) > KINDS:
            self.slots.popitem(last=False)

    def replay(self, inputs: _Inputs) -> _Microbatch | None:
        """Take a slot for a microbatch; None where there is no free one."""
        free = self.free.get((inputs.key, self.calls.get(self.forwards)))
        if not free:
            return None
        self.forwards += 1
        return _Replay(self, free)

    def first_run(self, inputs: _Inputs, device: Device) -> _Microbatch:
        """Return a microbatch without a slot."""
        if self.device is None:
            self.device, self.last_use = device, device.event()
            given_back_after(self, self.last_use, device)
        self.ran.append(run := _FirstRun(self, self.forwards, inputs, device))
        self.forwards += 1
        return run

    def note_use(self) -> None:
        """A piece has been launched, which the next step waits for."""
        assert self.device is not None
        self.last_use.record(self.device.current_stream())


class _Microbatch(ABC):
    """A microbatch in a stage, from its forward to its last backward."""

    copy: _Copy

    @abstractmethod
    def forward(self, leaves: Leaves, seed: int | None) -> tuple[Flat, Any]:
        """Return the outputs and the new state."""

    @abstractmethod
    def call(self, phase: str, cotangents: Leaves, sink: Sink | None) -> Gradients:
        """Run a backward."""

    @abstractmethod
    def end(self) -> None:
        """Give the slot up."""

    def last(self, phase: str, cotangents: Leaves, sink: Sink | None) -> Gradients:
        """Run the last backward of the microbatch."""
        results = self.call(phase, cotangents, sink)
        self.end()
        self.copy.note_use()
        return results


class _FirstRun(_Microbatch):
    """A microbatch that runs as it is, and is captured in the next step.

    Args:
        number: of its forward in the step.

    Attributes:
        key: the microbatch's signature and its backwards; None until it has ended.
        is_example: whether it keeps its arguments until it is captured; one of each kind does.
    """

    key: Hashable = None
    is_example = False

    def __init__(self, copy: _Copy, number: int, inputs: _Inputs, device: Device) -> None:
        self.copy, self.number, self.inputs, self.device = copy, number, inputs, device
        self.trial = Trial([], device.generators())
        self.saved = _Saved(copy.piece)
        self.calls: list[tuple[str, Leaves]] = []

    def forward(self, leaves: Leaves, seed: int | None) -> tuple[Flat, Any]:
        with self.trial.running(), nullcontext() if seed is None else self.trial.seeded(SCOPE, seed):
            new, spec, state = self._forward(self.saved, leaves)
        return Flat(new, spec), state

    def _forward(self, saved: _Saved, leaves: Leaves) -> Outputs:
        return saved.forward(self.copy.prepared, *self.inputs.arguments(leaves))

    def call(self, phase: str, cotangents: Leaves, sink: Sink | None) -> Gradients:
        self.calls.append((phase, list(cotangents)))
        with self.trial.running():
            return self.saved.call(phase, cotangents)

    def end(self) -> None:
        calls = tuple((phase, _keys(cotangents)) for phase, cotangents in self.calls)
        key, self.copy.calls[self.number] = (self.inputs.key, calls), calls
        self.is_example = all(run.key != key for run in self.copy.ran)
        self.key = key
        if not self.is_example:
            self.inputs.leaves, self.calls = [], []
        self.copy.ran.append(self)

    def captured(self) -> Slot:
        """Return the graphs of another microbatch of this kind."""
        new = partial(_Graph, self.device, self.copy.last_use)
        saved, draws = _Saved(self.copy.piece), bool(self.trial.drawn)
        graphs = {"forward": new(self.inputs.leaves, draws, partial(self._forward, saved))}
        for phase, cotangents in self.calls:
            graphs[phase] = new(cotangents, False, partial(saved.call, phase))
        return graphs


class _Replay(_Microbatch):
    """A microbatch whose pieces are replayed.

    Args:
        free: slots, of which it takes one.
    """

    def __init__(self, copy: _Copy, free: list[Slot]) -> None:
        self.copy, self.free, self.slot = copy, free, free.pop()

    def forward(self, leaves: Leaves, seed: int | None) -> tuple[Flat, Any]:
        new, spec, state = _copied(self.slot["forward"].run(leaves, seed))
        return Flat(new, spec), state

    def call(self, phase: str, cotangents: Leaves, sink: Sink | None) -> Gradients:
        graph = self.slot.get(phase)
        if graph is None or graph.key != _keys(cotangents):
            raise StageError(
                f"its {phase} has other cotangents than the step before, for arguments of the same signature; "
                f"{UNCAPTURED}",
                stage=self.copy.number,
            )
        weights, inputs = graph.run(cotangents)
        if isinstance(sink, Sum) and sink.take_all(weights):
            return WeightGradients([None] * len(weights)), _copied(inputs)
        weights, inputs = _copied((list(weights), inputs))
        dense = [i for i, x in enumerate(weights) if x is not None and x.is_contiguous()]
        return WeightGradients(weights, dense), inputs

    def end(self) -> None:
        self.free.append(self.slot)


class _Saved:
    """The residuals of a microbatch, then its deferred values: the pieces pass them on."""

    def __init__(self, piece: DifferentiableStage) -> None:
        self.piece, self.values = piece, None

    def forward(self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch) -> Outputs:
        outputs, self.values, new = self.piece.forward(prepared, state, sources, data, True)
        return *outputs, new

    def call(self, phase: str, cotangents: Leaves) -> Gradients:
        values, self.values = self.values, None
        if phase == "backward":
            return self.piece.backward(values, cotangents)
        if phase == "backward_weight":
            return self.piece.backward_weight(values), {}
        inputs, self.values = self.piece.backward_input(values, cotangents)
        return WeightGradients([]), inputs


def _keys(leaves: Leaves) -> Hashable:
    return tuple([None if x is None else leaf_key(x) for x in leaves])


def _copied(tree: Any) -> Any:
    leaves, spec = flatten(tree)
    return spec.unflatten(copied(leaves))


@contextmanager
def _drawing(seed: int | None, device: Device) -> Iterator[None]:
    """Seed the generators of a device, and restore them afterwards."""
    if seed is None:
        yield
        return
    with restored(generators := device.generators()):
        for generator in generators:
            generator.manual_seed(seed)
        yield
