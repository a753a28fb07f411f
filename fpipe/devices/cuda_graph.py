"""A CUDA graph, with a seed for each scope that draws random numbers.

The generator of a CUDA graph has one state for all draws. Here each key has a state of its own, which is the
generator's while its scope is captured, and which is seeded before every replay: the draws are then those of the same
scope seeded without a graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.generator = torch.cuda.default_generators[device.index]
        self.states = {key: self.generator.clone_state() for key in keys}
        for state in self.states.values():
            self.graph.register_generator_state(state)
        self.borrowed = _Borrowed(tensors)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the work that is launched inside, once. What it computes is there only after a replay."""
        torch.cuda.synchronize(self.stream.device)
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.stream):
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                with self.borrowed:
                    yield
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid: the first error has the reason
                    self.graph.capture_end()
                raise
            self.graph.capture_end()

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
        self.graph.replay()


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
