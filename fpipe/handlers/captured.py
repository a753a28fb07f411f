"""A function of trees that runs as a graph of its device: captured once for a signature, and then replayed.

Invariants:
- The first call with a signature runs the function as it is, and finds out what the graph needs: which arguments the
  function writes to, and under which keys it draws. The second captures it, later ones replay it. A function may say
  on trial that no graph can have these arguments (`try_again`): then the second runs as the first did.
- All ranks of a handler run, capture or replay the same step: they agree on its name before each call.
- An argument that the function writes to is donated: its own memory is the graph's, and results in that memory are
  returned as they are. Another place in memory is another graph.
- Every other argument is copied into the graph's memory before each replay. A comparison with the one before could not
  tell all changes: of `x.data`, or of memory shared with numpy, no counter tells.
- All other results are copied out, so a later call changes none of them.
- The graph's own memory belongs to no stream: a call waits for the last one, whatever their streams are.
- A call that is refused has changed nothing.
- After a step that failed, in which ranks have connected again, a step is captured anew.
"""

from __future__ import annotations

import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe.autodiff.graph.locations import user_line
from fpipe.autodiff.graph.signature import Untraceable, ambient, leaf_key
from fpipe.devices import CaptureError, Cpu, Device, device_of
from fpipe.devices.memory import copied, copy, empty_as, given_back_after, in_memory
from fpipe.devices.tape import Trial, storage
from fpipe.errors import StageError
from fpipe.errors.tracebacks import warn
from fpipe.handlers.protocol import Replays
from fpipe.stages.pytree import flatten, paths_of, short
from fpipe.stages.rng import Rng, Seeder, seed_of

Function = Callable[[Any, Seeder | None], Any]
"""`function(arguments, seeder) -> results`: both trees; it draws only in the contexts of the seeder."""


UNCAPTURED = "leave capture=True out"


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

    Attributes:
        graphs: by the name of a step; None for one that has run, and is captured when it comes again.

    Raises:
        StageError: the function does what a graph can't hold, or an argument is neither a plain tensor nor plain.
    """

    def __init__(
        self, function: Function, replays: Replays, device: torch.device | None = None, limit: int = 4
    ) -> None:
        self.function, self.replays, self.device, self.limit = function, replays, device, limit
        self.needs: OrderedDict[Hashable, Needs] = OrderedDict()
        self.graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self.memory: weakref.WeakValueDictionary[Hashable, Tensor] = weakref.WeakValueDictionary()
        self.last_uses: dict[torch.device, Any] = {}
        self.warned, self.epoch = False, 0

    def __call__(self, arguments: Any, rng: Rng | None) -> Any:
        """Return the function's results.

        Args:
            rng: (seed, step), from which each (stage, microbatch) gets its seed.
        """
        try:
            leaves, spec = flatten(arguments)
            device = common_device([x for x in leaves if isinstance(x, Tensor)], self.device)
            signature = (spec, rng is None, torch.is_grad_enabled(), ambient(), kernels(), *_keys(leaves, spec))
            needs = self.needs.get(signature)
            place = None if needs is None else _place(signature, leaves, needs)
        except Exception as error:  # the arguments are the user's, and may raise anything
            self.replays.refuse(error)
        name = self.replays.agree(place, rng)
        if self.replays.epoch != self.epoch:  # the graphs held connections that are gone
            self.graphs.clear()
            self.epoch = self.replays.epoch
        try:
            if needs is None or name not in self.graphs:
                return self._first(signature, arguments, leaves, rng, device)
            self.needs.move_to_end(signature)
            known = self.graphs[name]
            graph = known or self._captured(leaves, spec, needs, rng, device)
            _keep(self.graphs, name, graph, self.limit)
            with self.replays.running("a replayed step"):
                if graph is known:  # else the arguments are in it
                    graph.copy_in(leaves)
                return graph.replay(leaves, rng)
        except CaptureError as error:
            raise uncapturable(error) from error

    def _first(
        self, signature: Hashable, arguments: Any, leaves: Sequence[Any], rng: Rng | None, device: Device
    ) -> Any:
        """Run the function as it is, and note what a graph of it needs. No rank returns before all have run it."""
        numbers = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        tensors = [leaves[i] for i in numbers]
        trial = Trial(tensors, device.generators())

        def seeder(stage: int, m: int) -> Any:
            assert rng is not None
            return trial.seeded((stage, m), seed_of(*rng, stage, m))

        with trial.running():
            results = self.function(arguments, None if rng is None else seeder)
            needs = Needs(frozenset(numbers[i] for i in trial.saved), tuple(trial.drawn))
            name = self.replays.agree(None if trial.again else _place(signature, leaves, needs))
        if name is None:
            return results
        _keep(self.needs, signature, needs, self.limit)
        if len(self.graphs) == self.limit and name not in self.graphs and not self.warned:
            self.warned = True
            warn(
                f"a step that is captured has been called with more than {self.limit} signatures, and graphs that were "
                "used longest ago are dropped: pass batches of equal shapes, and numbers that change as tensors",
            )
        _keep(self.graphs, name, None, self.limit)
        return results

    def _captured(
        self, leaves: Sequence[Any], spec: optree.PyTreeSpec, needs: Needs, rng: Rng | None, device: Device
    ) -> _Graph:
        """Return a graph of the function, with these arguments in it. No rank replays before all have captured."""
        try:
            last_use = self.last_uses.setdefault(device.torch_device, device.event())
            graph = _Graph(self._static(leaves, needs), needs, device, last_use)
            graph.copy_in(leaves)
            graph.capture(self.function, self.replays, spec, rng)
        except BaseException as error:
            self.replays.refuse(error)
        self.replays.agree(())
        return graph

    def _static(self, leaves: Sequence[Any], needs: Needs) -> list[Any]:
        """Return the leaves of a graph: donated ones in their own memory, others in memory that all graphs share."""
        static = []
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and i in needs.donated:
                x = x.detach().requires_grad_(x.requires_grad)
            elif isinstance(x, Tensor):
                memory = self.memory.get((i, leaf_key(x)))
                x = self.memory[i, leaf_key(x)] = empty_as(x) if memory is None else memory
            static.append(x)
        return static


class _Graph:
    """One captured call: the graph, and the places of arguments and results in its memory.

    Args:
        static: the leaves of the arguments, in that memory.
        last_use: an event after the last use of memory that is the graph's own, on any stream.
    """

    def __init__(self, static: Sequence[Any], needs: Needs, device: Device, last_use: Any) -> None:
        self.drawn, self.static, self.device, self.last_use = needs.drawn, static, device, last_use
        self.numbers = {id(x): i for i, x in enumerate(static) if isinstance(x, Tensor)}
        self.copied = [i for i in self.numbers.values() if i not in needs.donated]
        self.inputs = [in_memory(static[i]) for i in self.copied]
        self.donated = [static[i] for i in sorted(needs.donated)]
        self.graph = device.new_graph(self.donated, needs.drawn)
        given_back_after(self, last_use, device)

    def copy_in(self, leaves: Sequence[Any]) -> None:
        """Copy arguments into the graph's memory, which the stream of an earlier call may still use."""
        self.device.current_stream().wait_event(self.last_use)
        copy([leaves[i] for i in self.copied], self.inputs)

    def capture(self, function: Function, replays: Replays, spec: optree.PyTreeSpec, rng: Rng | None) -> None:
        """Capture the function. Nothing runs."""
        with replays.capturing(self.graph), self.graph.capture():
            results = function(spec.unflatten(self.static), None if rng is None else self._seeded)
        self.results, self.spec = flatten(results)
        donated = set(map(storage, self.donated))
        tensors = [x for x in self.results if isinstance(x, Tensor) and id(x) not in self.numbers]
        self.in_place = {id(x) for x in tensors if storage(x) in donated}
        self.copies = {id(x): x for x in tensors if id(x) not in self.in_place}

    def _seeded(self, stage: int, m: int) -> Any:
        return self.graph.seeded((stage, m))

    def replay(self, leaves: Sequence[Any], rng: Rng | None) -> Any:
        """Run the graph on the arguments that were copied in, and return results that belong to the caller.

        Args:
            leaves: of these arguments.
        """
        self.graph.replay({} if rng is None else {key: seed_of(*rng, *key) for key in self.drawn})
        copies = dict(zip(self.copies, copied([*self.copies.values()]), strict=True))
        self.last_use.record(self.device.current_stream())
        return self.spec.unflatten([self._result(x, leaves, copies) for x in self.results])

    def _result(self, x: Any, leaves: Sequence[Any], copies: Mapping[int, Tensor]) -> Any:
        """Return a result for the caller: a copy, an argument as it was passed, or a new tensor in donated memory."""
        if id(x) in copies:
            return copies[id(x)]
        if id(x) in self.numbers:
            return leaves[self.numbers[id(x)]]
        return x.detach() if id(x) in self.in_place else x


def kernels() -> Hashable:
    """Return the settings by which operators choose their kernels: a graph has the kernels of its capture."""
    c = torch._C  # torch.backends has the same, some ten times slower
    return (
        c._get_fp32_precision_getter("cuda", "matmul"),
        c._get_fp32_precision_getter("cuda", "conv"),
        c._get_fp32_precision_getter("cuda", "rnn"),
        c._get_fp32_precision_getter("mkldnn", "matmul"),
        c._get_fp32_precision_getter("mkldnn", "conv"),
        c._get_fp32_precision_getter("mkldnn", "rnn"),
        c._get_cublas_allow_fp16_accumulation(),
        c._get_cublas_allow_fp16_reduced_precision_reduction(),
        c._get_cublas_allow_bf16_reduced_precision_reduction(),
        c._get_cudnn_benchmark(),
        c._get_cudnn_deterministic(),
        c._get_deterministic_algorithms_warn_only(),
        c._get_deterministic_fill_uninitialized_memory(),
    )


def _place(signature: Hashable, leaves: Sequence[Any], needs: Needs) -> Hashable:
    """Return the key of a graph: the signature, and the places in memory of what is donated."""
    return signature, *[leaves[i].data_ptr() for i in sorted(needs.donated)]


def uncapturable(error: CaptureError, **place: Any) -> StageError:
    """Return the error for the caller, with the line of the user's code.

    Args:
        place: rank, stage and microbatch, as far as they are known.
    """
    return StageError(f"it can't be captured: {error}{line_of(error)}; or {UNCAPTURED}", **place)


def line_of(error: CaptureError) -> str:
    """Return the line of the user's code that can't be captured, as the end of a sentence; "" if it is not known."""
    return user_line(traceback.extract_tb(error.__traceback__)) or user_line(error.traced or ())


def _keys(leaves: Sequence[Any], spec: optree.PyTreeSpec) -> Iterable[Hashable]:
    for i, x in enumerate(leaves):
        try:
            yield leaf_key(x)
        except Untraceable as error:
            raise StageError(f"the argument {short(paths_of(spec)[i])} can't be captured: {error}") from error


def common_device(tensors: Sequence[Tensor], device: torch.device | None) -> Device:
    """Return the device of all tensors, which is this one if it is not None.

    Raises:
        StageError: they are on several.
    """
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
