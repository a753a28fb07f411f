"""A function of trees that runs as a graph of its device: captured once for a signature, and then replayed.

Invariants:
- The first call with a signature runs the function as it is, and finds out what the graph needs: which arguments the
  function writes to, and under which keys it draws. The second captures it, later ones replay it.
- All ranks of a handler run, capture or replay the same step: they agree on its name before each call.
- An argument that the function writes to is donated: its own memory is the graph's, and results in that memory are
  returned as they are. Another place in memory is another graph.
- Every other argument is copied into the graph's memory before each replay. A comparison with the one before could not
  tell all changes: of `x.data`, or of memory shared with numpy, no counter tells.
- All other results are copied out, so a later call changes none of them.
- A call that is refused has changed nothing.
"""

from __future__ import annotations

import traceback
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import optree
import torch
from torch import Tensor

from fpipe.autodiff.graph.locations import user_line
from fpipe.autodiff.graph.signature import Untraceable, ambient, leaf_key
from fpipe.devices import CaptureError, Cpu, Device, device_of
from fpipe.devices.tape import Trial, storage, whole
from fpipe.errors import StageError
from fpipe.handlers.protocol import Replays
from fpipe.stages.pytree import flatten, paths_of, short
from fpipe.stages.rng import Rng, Seeder, seed_of

Function = Callable[[Any, Seeder | None], Any]
"""`function(arguments, seeder) -> results`: both trees; it draws only in the contexts of the seeder."""


class Needs(NamedTuple):
    """The needs of a graph, as the first call with a signature shows them.

    Args:
        donated: numbers of the leaves that the function writes to.
        drawn: the (stage, microbatch) that draw random numbers, in order.
    """

    donated: frozenset[int]
    drawn: tuple[tuple[int, int], ...]


class Captured:
    """A function whose calls are replayed, for a bounded number of signatures.

    A signature is the structure of the arguments; shapes, strides, dtypes and devices of the tensors, and the values of
    other leaves; whether there is a seed; and the settings of torch.

    Args:
        function: pure but for the arguments that are donated to it. As under `jax.jit`, its Python code, and all values
            of the host that it uses, are those of the call that is captured.
        replays: of the handler.
        device: where the function runs; by default that of its arguments.
        limit: the number of graphs. With another signature, the one that was used longest ago is dropped.

    Raises:
        StageError: the function does what a graph can't hold, or an argument is neither a plain tensor nor plain.
    """

    def __init__(
        self, function: Function, replays: Replays, device: torch.device | None = None, limit: int = 4
    ) -> None:
        self.function, self.replays, self.device, self.limit = function, replays, device, limit
        self.needs: OrderedDict[Hashable, Needs] = OrderedDict()
        self.graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self.memory: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()
        self.warned = False

    def __call__(self, arguments: Any, rng: Rng | None) -> Any:
        """Return the function's results.

        Args:
            rng: (seed, step), from which each (stage, microbatch) gets its seed.
        """
        try:
            leaves, spec = flatten(arguments)
            device = _device([x for x in leaves if isinstance(x, Tensor)], self.device)
            signature = (spec, rng is None, torch.is_grad_enabled(), ambient(), *_keys(leaves, spec))
            needs = self.needs.get(signature)
        except Exception as error:  # the arguments are the user's, and may raise anything
            self.replays.agree(None, False, error)  # raises it
            raise
        name, known = self.replays.agree(_place(signature, leaves, needs), needs is not None)
        try:
            if needs is None or not known or name not in self.graphs:
                return self._first(name if known else None, signature, arguments, leaves, rng, device)
            self.needs.move_to_end(signature)
            graph = self.graphs[name] or self._graph(leaves, spec, needs, rng, device)
            _keep(self.graphs, name, graph, self.limit)
            return graph.replay(leaves, rng)
        except CaptureError as error:
            raise uncapturable(error) from error

    def _graph(
        self, leaves: Sequence[Any], spec: optree.PyTreeSpec, needs: Needs, rng: Rng | None, device: Device
    ) -> _Graph:
        """Capture the function. No rank replays before all have captured."""
        try:
            static = self._static(leaves, needs)
            graph = _Graph(self.function, self.replays, static, leaves, spec, needs, rng, device)
        except BaseException as error:
            with suppress(Exception):  # this one is raised here
                self.replays.agree(None, False, error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise
        self.replays.agree(None, True)
        return graph

    def _first(
        self,
        name: Hashable,
        signature: Hashable,
        arguments: Any,
        leaves: Sequence[Any],
        rng: Rng | None,
        device: Device,
    ) -> Any:
        """Run the function as it is, and note what a graph of it needs.

        Args:
            name: of the step; None where a rank did not know before what its graph needs.
        """
        numbers = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        tensors = [leaves[i] for i in numbers]
        trial = Trial(tensors, device.generators())

        def seeder(stage: int, m: int) -> Any:
            assert rng is not None
            return trial.seeded((stage, m), seed_of(*rng, stage, m))

        with trial.running():
            results = self.function(arguments, None if rng is None else seeder)
            needs = Needs(frozenset(numbers[i] for i in trial.saved), tuple(trial.drawn))
            if name is None:
                name, _ = self.replays.agree(_place(signature, leaves, needs), True)
        _keep(self.needs, signature, needs, self.limit)
        if len(self.graphs) == self.limit and name not in self.graphs and not self.warned:
            self.warned = True
            warnings.warn(
                f"a step that is captured has been called with more than {self.limit} signatures, and graphs that were "
                "used longest ago are dropped: pass batches of equal shapes, and numbers that change as tensors",
                stacklevel=5,
            )
        _keep(self.graphs, name, None, self.limit)
        return results

    def _static(self, leaves: Sequence[Any], needs: Needs) -> list[Any]:
        """Return the leaves of a graph: donated ones in their own memory, others in memory that all graphs share."""
        static = []
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and i in needs.donated:
                x = x.detach().requires_grad_(x.requires_grad)
            elif isinstance(x, Tensor):
                memory = self.memory.get((i, leaf_key(x)))
                x = self.memory[i, leaf_key(x)] = _empty(x) if memory is None else memory
            static.append(x)
        return static


class _Graph:
    """One captured call: the graph, and the places of arguments and results in its memory."""

    def __init__(
        self,
        function: Function,
        replays: Replays,
        static: Sequence[Any],
        leaves: Sequence[Any],
        spec: optree.PyTreeSpec,
        needs: Needs,
        rng: Rng | None,
        device: Device,
    ) -> None:
        self.drawn, self.static, self.replays = needs.drawn, static, replays
        numbers = [i for i, x in enumerate(static) if isinstance(x, Tensor)]
        self.copied = [i for i in numbers if i not in needs.donated]
        self.inputs = [_in_memory(static[i]) for i in self.copied]
        donated = [static[i] for i in sorted(needs.donated)]
        self.graph = device.new_graph(donated, needs.drawn)
        self._copy_in(leaves)
        with replays.capturing(), self.graph.capture():
            results = function(spec.unflatten(static), None if rng is None else self._seeded)
        self.results, self.spec = flatten(results)
        self.arguments = {id(static[i]): i for i in numbers}
        memory = set(map(storage, donated))
        tensors = [x for x in self.results if isinstance(x, Tensor) and id(x) not in self.arguments]
        self.donated = {id(x) for x in tensors if storage(x) in memory}
        self.copies = {id(x): x for x in tensors if id(x) not in self.donated}

    def _seeded(self, stage: int, m: int) -> Any:
        return self.graph.seeded((stage, m))

    def _copy_in(self, leaves: Sequence[Any]) -> None:
        _copy([_in_memory(leaves[i]) for i in self.copied], self.inputs)

    def replay(self, leaves: Sequence[Any], rng: Rng | None) -> Any:
        """Run the graph on these arguments, and return results that belong to the caller."""
        with self.replays.running():
            self._copy_in(leaves)
            self.graph.replay({} if rng is None else {key: seed_of(*rng, *key) for key in self.drawn})
        copies = {number: torch.empty_like(x, requires_grad=False) for number, x in self.copies.items()}
        _copy(list(self.copies.values()), list(copies.values()))
        return self.spec.unflatten([self._result(x, leaves, copies) for x in self.results])

    def _result(self, x: Any, leaves: Sequence[Any], copies: Mapping[int, Tensor]) -> Any:
        """Return a result for the caller: a copy, an argument as it was passed, or a new tensor in donated memory."""
        if id(x) in copies:
            return copies[id(x)]
        if id(x) in self.arguments:
            return leaves[self.arguments[id(x)]]
        return x.detach() if id(x) in self.donated else x


def _place(signature: Hashable, leaves: Sequence[Any], needs: Needs | None) -> Hashable:
    """Return the key of a graph: the signature, and the places in memory of what is donated."""
    return None if needs is None else (signature, *[leaves[i].data_ptr() for i in sorted(needs.donated)])


def uncapturable(error: CaptureError, **place: Any) -> StageError:
    """Return the error for the caller, with the line of the user's code.

    Args:
        place: rank, stage and microbatch, as far as they are known.
    """
    line = user_line(traceback.extract_tb(error.__traceback__)) or user_line(error.traced or ())
    return StageError(f"it can't be captured: {error}{line}; or leave capture=True out", **place)


def _keys(leaves: Sequence[Any], spec: optree.PyTreeSpec) -> Iterable[Hashable]:
    for i, x in enumerate(leaves):
        try:
            yield leaf_key(x)
        except Untraceable as error:
            raise StageError(f"the argument {short(paths_of(spec)[i])} can't be captured: {error}") from error


def _device(tensors: Sequence[Tensor], device: torch.device | None) -> Device:
    devices = {x.device for x in tensors} | ({device} if device is not None else set())
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise StageError(f"the arguments of a step that is captured are on one device, not on {names}: move them there")
    return device_of(next(iter(devices))) if devices else Cpu()


def _keep(entries: OrderedDict[Hashable, Any], key: Hashable, value: Any, limit: int) -> None:
    """Set the entry that was used last; drop the one that was used longest ago if there are more than the limit."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > limit:
        entries.popitem(last=False)


def _empty(x: Tensor) -> Tensor:
    """Return memory with the layout of an argument."""
    memory = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    memory = memory.conj() if x.is_conj() else memory
    return (torch._neg_view(memory) if x.is_neg() else memory).requires_grad_(x.requires_grad)


def _copy(values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Copy tensors, those of one dtype by one kernel."""
    pairs = defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
    for x, memory in zip(values, into, strict=True):
        pairs[x.dtype][0].append(memory)
        pairs[x.dtype][1].append(x)
    with torch.no_grad():
        for memories, tensors in pairs.values():
            torch._foreach_copy_(memories, tensors)


def _in_memory(x: Tensor) -> Tensor:
    """Return each element that is in memory once, as it is there: not repeated, not conjugated and not negated."""
    x = x.conj() if x.is_conj() else x
    return whole(torch._neg_view(x) if x.is_neg() else x)
