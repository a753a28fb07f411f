"""A CUDA graph, with a seed for each scope that draws random numbers.

The generator of a CUDA graph has one state for all draws. Here each key has a state of its own, which is the
generator's while its scope is captured, and which is seeded before every replay: the draws are then those of the same
scope seeded without a graph.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.devices.interface import GraphReset
from fpipe.devices.operators import written_arguments
from fpipe.devices.tape import storage, tensors_in, written_outside


class CudaGraph:
    """The work that a function launches on a CUDA device.

    The function must have run before, so that libraries have allocated their workspaces. The graph has a memory pool of
    its own. Only the calls of this thread are checked for what a capture forbids: other threads, such as those of
    NCCL's watchdog, go on.

    Args:
        device: with its index.
        tensors: those from outside that the function may write to.
        keys: those under which something is drawn.

    Raises:
        CaptureError: (in capture) the function writes to another tensor from outside.
    """

    def __init__(self, device: torch.device, tensors: Sequence[Tensor], keys: Sequence[Hashable]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.generator = torch.cuda.default_generators[device.index]
        self.states = {key: self.generator.clone_state() for key in keys}
        for state in self.states.values():
            self.graph.register_generator_state(state)
        self.borrowed = _Borrowed(tensors)
        self.lock, self.is_reset = threading.Lock(), False  # a graph is launched or destroyed by one thread at a time

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the work that is launched inside, once. What it computes is there only after a replay."""
        torch.cuda.synchronize(self.stream.device)
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.stream), self._spare_state():
            self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                with self.borrowed:
                    yield
            except BaseException:
                self._give_up()
                raise
            try:
                self.graph.capture_end()
            except RuntimeError:
                self._free_pool()
                raise

    @contextmanager
    def _spare_state(self) -> Iterator[None]:
        """Let the generator have another state: a capture that fails may leave its state unable to draw."""
        before = self.generator.graphsafe_get_state()
        self.generator.graphsafe_set_state(self.generator.clone_state())
        try:
            yield
        finally:
            self.generator.graphsafe_set_state(before)

    def _give_up(self) -> None:
        """End a capture whose function has failed; where it is invalid too, the function's error has the reason."""
        try:
            self.graph.capture_end()
        except RuntimeError:
            self._free_pool()

    def _free_pool(self) -> None:
        """Do what `capture_end` leaves out where it fails: let the allocator go on as before, and free the memory."""
        index = self.stream.device.index
        with suppress(RuntimeError):  # it got as far as this
            torch._C._cuda_endAllocateToPool(index, self.pool)
        try:
            self.graph.pool()
        except RuntimeError:  # the capture has not ended, so the graph's own end does not free it
            torch._C._cuda_releasePool(index, self.pool)

    @contextmanager
    def seeded(self, key: Hashable) -> Iterator[None]:
        """Let draws inside, while the graph is captured, follow the seed that a replay has for this key."""
        if key not in self.states:  # nothing is drawn: a draw is refused by torch
            yield
            return
        before = self.generator.graphsafe_get_state()
        self.generator.graphsafe_set_state(self.states[key])
        try:
            yield
        finally:
            self.generator.graphsafe_set_state(before)

    def replay(self, seeds: Mapping[Hashable, int]) -> None:
        """Launch the work again, on the current stream."""
        for key, state in self.states.items():
            state.manual_seed(seeds[key])
        with self.lock:
            if self.is_reset:
                raise GraphReset("the graph was reset")
            self.graph.replay()

    def reset(self) -> None:
        """Destroy the graph; what of it runs goes on to its end."""
        with self.lock:
            self.is_reset = True
            self.graph.reset()


class _Borrowed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps alive the tensors from outside that a captured function uses: the graph has only their addresses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writable = set(map(storage, tensors))
        self.tensors: dict[int, Tensor] = {}
        self.fresh: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not set(map(storage, written_arguments(func, args, kwargs))) <= self.fresh | self.writable:
            raise written_outside(func)
        self.tensors |= {storage(x): x for x in tensors_in((args, kwargs)) if storage(x) not in self.fresh}
        results = func(*args, **kwargs)
        self.fresh |= set(map(storage, tensors_in(results))) - self.tensors.keys()
        return results
