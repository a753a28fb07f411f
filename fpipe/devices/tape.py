"""A graph of the CPU: it records the operators that a function calls, and calls them again on the same memory.

It has the rules of a CUDA graph, so that a function that a GPU could not capture is refused here too, and stale inputs,
values of the host and overwritten results show here too:
- A replay runs no Python of the function. It calls each operator with the tensors of the recorded call, in that call's
  grad mode, which some kernels read, and writes the results into the memory of the recorded ones.
- Nothing that is recorded is freed, so no two recorded tensors share memory by chance.
- A capture changes nothing; only a replay does.
- Each draw follows the seed of its scope, which is set anew for every replay.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from fpipe.devices.interface import CaptureError, GraphReset
from fpipe.devices.operators import arguments, draws, written_arguments

aten = torch.ops.aten
UNWRITTEN = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
RESIZES = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"}
HOST_READS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy", Tensor.__repr__: "repr"}
MASKS = (torch.bool, torch.uint8)
HOST_WAIT = "called a synchronizing CUDA operation"  # torch's error of the debug mode below


class Trial(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a function as it is, and refuses what a graph can't hold.

    Args:
        tensors: those from outside that the function may write to.
        generators: those that it draws from.
        saved: number of a tensor that was written to -> its value before, on the host, which has room for it.
        drawn: the keys of the scopes in which something was drawn, in order.
        again: the next call with such arguments is a trial too, by `try_again`.

    Raises:
        CaptureError: the function reads a tensor on the host or waits for CUDA, has a result whose shape depends on
            values, draws outside of a scope or from a generator of its own, or writes to another tensor from outside.
            While it runs, most waits of other threads for CUDA are errors too.
    """

    supports_higher_order_operators = True  # refused below, but not while a stage is traced

    def __init__(self, tensors: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors, self.generators = tensors, generators
        self.numbers: dict[int, list[int]] = {}
        for i, x in enumerate(tensors):
            self.numbers.setdefault(storage(x), []).append(i)
        self.saved: dict[int, Tensor] = {}
        self.drawn: dict[Any, None] = {}
        self.again = False
        self.fresh: set[int] = set()
        self.key: Hashable = None
        self.states: list[Tensor] = []
        self.traced_draw: traceback.StackSummary | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch what runs inside; if that fails, give the tensors their values back."""
        try:
            with _waits_for_cuda("error"), _HostReads(), self:
                yield
        except BaseException:
            self.restore()
            raise

    def seeded(self, key: Hashable, seed: int) -> AbstractContextManager[None]:
        """Seed what draws inside, and restore the generators afterwards."""
        return self._seeded(key, seed)

    @contextmanager
    def _seeded(self, key: Hashable, seed: int) -> Iterator[None]:
        before = [generator.get_state() for generator in self.generators]
        try:
            self.key = key
            for generator in self.generators:
                generator.manual_seed(seed)
            self.states = [generator.get_state() for generator in self.generators]
            yield
        finally:
            self.key = None
            for generator, state in zip(self.generators, before, strict=True):
                generator.set_state(state)

    def restore(self) -> None:
        """Give every tensor the value that it had before it was written to."""
        with torch.no_grad():
            for i, value in self.saved.items():
                self.tensors[i].copy_(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawing = draws(func, args, kwargs)
        if _tracing():
            if drawing:
                self.traced_draw = traceback.extract_stack()
            return func(*args, **kwargs)
        _check_values(func, args, kwargs)
        if drawing:
            self._draw(func, kwargs)
        for x in written_arguments(func, args, kwargs):
            self._write(func, x)
        inputs = tensors_in((args, kwargs))
        read = {storage(x) for x in inputs}
        with _explained():
            results = func(*args, **kwargs)
        if drawing:
            self.states = [generator.get_state() for generator in self.generators]
        outputs = tensors_in(results)
        _check_devices(func, [*inputs, *outputs])
        constant = func is aten.lift_fresh.default  # a tensor that Python made of values
        fresh = [x for x in outputs if constant or storage(x) not in read]
        self.fresh.update(map(storage, fresh))
        self.record(func, args, kwargs, results, fresh)
        return results

    def record(self, func: Any, args: Any, kwargs: Any, results: Any, fresh: Sequence[Tensor]) -> None:
        """An operator has run; `fresh` are those of its results that share no memory with its arguments."""

    def _draw(self, func: Any, kwargs: Mapping[str, Any]) -> None:
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise CaptureError(f"it draws from a generator of its own, by {func}: use torch's global generator")
        if self.key is None:
            raise CaptureError(
                f"it draws random numbers by {func}, which need a seed of their own in a graph: pass rng=(seed, step), "
                "and draw in the forward only",
                self.traced_draw,
            )
        if any(not torch.equal(a, g.get_state()) for a, g in zip(self.states, self.generators, strict=True)):
            raise CaptureError("it seeds or restores the global generator, which a graph would not do")
        self.drawn[self.key] = None

    def _write(self, func: Any, x: Tensor) -> None:
        if (memory := storage(x)) in self.fresh:
            return
        if memory not in self.numbers or torch.Tag.inplace_view in func.tags:
            raise written_outside(func)
        for i in self.numbers[memory]:
            if i not in self.saved:
                with _waits_for_cuda("default"):
                    self.saved[i] = self.tensors[i].detach().to("cpu", copy=True)


class Tape:
    """A graph of the CPU.

    Args:
        tensors: those from outside that the captured function may write to.

    Raises:
        CaptureError: (in capture) as `Trial`.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.seeds: dict[Hashable, int] = {}
        self.recorder = _Recorder(tensors, self.calls, self.seeds)
        self.draws = self.is_reset = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record what runs inside. Its results are those of no replay."""
        with self.recorder.running():
            yield
        self.recorder.restore()
        self.draws = bool(self.recorder.drawn)
        del self.recorder  # and the values that it saved

    def seeded(self, key: Hashable) -> AbstractContextManager[None]:
        """Let draws inside, while captured, follow the seed that a replay has for this key."""
        return self.recorder.seeded(key, 0)

    def replay(self, seeds: Mapping[Hashable, int]) -> None:
        """Run the recorded operators again.

        Args:
            seeds: for every key under which something was drawn.

        Raises:
            GraphReset: the calls have been given up.
        """
        if self.is_reset:
            raise GraphReset("the tape was reset")
        before = torch.default_generator.get_state() if self.draws else None
        self.seeds.update(seeds)
        with torch.no_grad(), torch._C._DisableAutocast():
            for call in self.calls:
                call()
        if before is not None:
            torch.default_generator.set_state(before)

    def reset(self) -> None:
        """Give up the calls; a replay that runs in another thread goes on to its end."""
        self.is_reset, self.calls = True, []


class _Recorder(Trial):  # type: ignore[no-untyped-call]
    """A trial that fills a tape."""

    def __init__(
        self, tensors: Sequence[Tensor], calls: list[Callable[[], Any]], seeds: Mapping[Hashable, int]
    ) -> None:
        super().__init__(tensors, [torch.default_generator])
        self.calls, self.seeds, self.seeded_now = calls, seeds, False
        self.grad = False

    def seeded(self, key: Hashable, seed: int) -> AbstractContextManager[None]:
        self.seeded_now = False
        return super().seeded(key, seed)

    def _draw(self, func: Any, kwargs: Mapping[str, Any]) -> None:
        super()._draw(func, kwargs)
        if not self.seeded_now:  # the first draw of its scope
            self.seeded_now, key, seeds = True, self.key, self.seeds
            self.calls.append(lambda: torch.default_generator.manual_seed(seeds[key]))

    def record(self, func: Any, args: Any, kwargs: Any, results: Any, fresh: Sequence[Tensor]) -> None:
        if func is aten.lift_fresh.default:
            self.calls.append(_constant(fresh[0].detach()))
        elif fresh or written_arguments(func, args, kwargs):
            if func._schema.name in UNWRITTEN or torch.Tag.inplace_view in func.tags:
                return  # it writes to no memory
            if self.grad != torch.is_grad_enabled():
                self.grad = not self.grad
                self.calls.append(partial(torch._C._set_grad_enabled, self.grad))
            self.calls.append(_again(func, args, kwargs, results, {id(x) for x in fresh}))


def launch(call: Callable[[], Any]) -> None:
    """Call a function that launches work other than operators, such as a transfer: a graph calls it in each replay.

    A CUDA graph captures what it launches; a tape records the function itself.
    """
    if not torch._C._len_torch_dispatch_stack():
        call()
        return
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _Recorder):
            mode.calls.append(call)
    with aside():
        call()


def is_capturing() -> bool:
    """Return whether this thread captures a graph, so that nothing can be read on the host."""
    on_cuda = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
    return on_cuda or any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack())


def try_again() -> None:
    """Let the next call of a function that is on trial be a trial too: no graph is to have these arguments."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Trial):
            mode.again = True


@contextmanager
def aside() -> Iterator[None]:
    """Run what is the host's own work, and no part of a graph."""
    on_trial = any(isinstance(mode, Trial) for mode in _get_current_dispatch_mode_stack())
    may_wait = _waits_for_cuda("default") if on_trial else nullcontext()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), may_wait:
        yield


@contextmanager
def _waits_for_cuda(mode: Literal["default", "error"]) -> Iterator[None]:
    """Set whether a wait of the host for CUDA is an error, as far as torch can say: not of events, nor of a device."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode(mode)
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():  # that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn torch's error of a wait into one of a capture."""
    try:
        yield
    except RuntimeError as error:
        if HOST_WAIT not in str(error):
            raise
        raise CaptureError(
            "it waits on the host for the device, as .item(), a branch, .cpu() and torch.tensor(..., device='cuda') do"
        ) from error


def _again(func: Any, args: Any, kwargs: Any, results: Any, fresh: set[int]) -> Callable[[], Any]:
    """Return a function that calls an operator again and writes the fresh results into their recorded memory.

    It keeps views of the tensors as they are now: their shapes and strides may yet be changed in place.
    """
    tree: Any = (args, kwargs)
    args, kwargs = optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)
    if not fresh:
        return lambda: func(*args, **kwargs)
    old = tensors_in(results)
    # A zero tensor, as forward mode has for a tangent of 0, has no memory, and no other value.
    into = [(i, whole(x.detach())) for i, x in enumerate(old) if id(x) in fresh and not x._is_zerotensor()]
    count = len(old)

    def call() -> None:
        new = tensors_in(func(*args, **kwargs))
        for i, memory in into:
            x = whole(new[i])
            if x.shape != memory.shape or len(new) != count:
                raise CaptureError(f"{func} gave {list(memory.shape)} when recorded and {list(x.shape)} in a replay")
            memory.copy_(x)

    return call


def _constant(x: Tensor) -> Callable[[], Any]:
    """Return a function that gives a constant its value again, which the function may have overwritten."""
    value = x.clone()
    return lambda: x.copy_(value)


class _HostReads(TorchFunctionMode):
    """Refuses methods of tensors that read memory without calling an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in HOST_READS and not _tracing():
            raise CaptureError(f"it reads a tensor on the host, by {HOST_READS[func]}()")
        with _explained():
            return func(*args, **(kwargs or {}))


def _tracing() -> bool:
    """Return whether a stage is being traced: its tensors have no values, and nothing runs."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _check_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an error for operators whose results a graph can't compute again for other values."""
    if not isinstance(func, torch._ops.OpOverload):
        raise CaptureError(f"it calls the higher-order operator {func}, which can't be recorded")
    if torch.Tag.data_dependent_output in func.tags:
        by = "as a branch or .item() does" if func is aten._local_scalar_dense.default else f"by {func}"
        raise CaptureError(f"it reads a tensor on the host, {by}")
    if torch.Tag.dynamic_output_shape in func.tags and _has_dynamic_shape(func, args, kwargs):
        raise CaptureError(f"the shape of a result depends on the values of tensors, by {func}")
    if func._schema.name in RESIZES:
        raise CaptureError(f"it changes the memory of a tensor, by {func}")


def _has_dynamic_shape(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the result's shape depends on values. Of indexing, only that by a mask does."""
    if func is not aten.index.Tensor:
        return True
    return any(x.dtype in MASKS for x in arguments(func, args, kwargs)["indices"] if x is not None)


def _check_devices(func: Any, tensors: Sequence[Tensor]) -> None:
    devices = {x.device for x in tensors if x.device.type != "meta"}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise CaptureError(f"{func} has tensors on {names}, and a graph copies nothing from or to the host")


def written_outside(func: Any) -> CaptureError:
    return CaptureError(f"it writes by {func} to a tensor from outside: pass and return it as state")


def storage(x: Tensor) -> int:
    """Return a number that tensors have in common exactly if they share a storage, while both are alive.

    Raises:
        CaptureError: the tensor has no storage, as sparse ones.
    """
    if x.layout is not torch.strided:
        raise CaptureError(f"it has a tensor of layout {x.layout}: a graph holds dense tensors only")
    number: int = x.untyped_storage()._cdata
    return number


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


def whole(x: Tensor) -> Tensor:
    """Return a view of each element once, without the dimensions along which an expanded tensor repeats them."""
    if 0 not in x.stride():
        return x
    sizes = [min(size, 1) if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(sizes, x.stride())
