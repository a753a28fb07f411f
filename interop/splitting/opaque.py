"""Calls that an exported graph keeps whole.

They are applications of a custom `torch.autograd.Function`, and submodules whose forward calls `torch.autograd.grad`,
because they have a gradient of their own; and fake quantization, which torch traces for one size alone.

Invariants:
- Such a call is one operation of the graph. Its inputs are all tensors and sizes that the call reads, parameters
  included, so that names, ties and cuts are as for any other operation.
- A stage runs the call's Python code, where autograd, or a trace of the stage, sees the gradient.
- The shapes of the results are found by running the call on fakes, in a thread that has none of the modes of export.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from fpipe.errors import StageError
from fpipe.interop.modules.functions import named_tensors
from fpipe.interop.modules.skeletons import bind_tensors
from fpipe.stages.pytree import PLAIN

CALLS: WeakValueDictionary[int, OpaqueCall] = WeakValueDictionary()
"""The calls of the modules that are exported now, by the number in their operation."""
NUMBERS = itertools.count()
A_TENSOR = object()
"""In place of a tensor of a result."""
THREAD = threading.local()
"""`is_running` in a thread that runs a call on fakes."""


class OpaqueCall:
    """A call of `function(*args)`, by the tensors and the sizes among its arguments.

    Args:
        name: of the call, for messages and for the code of a graph.
        args: arguments with the tensors of the trace, in any tree. Other leaves must be plain.

    Raises:
        StageError: a leaf is neither a tensor, a size nor plain, or there is no tensor.
    """

    def __init__(self, name: str, function: Callable[..., Any], args: Any) -> None:
        self.__name__, self.name, self.function = "opaque_call", name, function
        leaves, self.arguments = pytree.tree_flatten(args)
        for x in leaves:
            if not isinstance(x, (Tensor, torch.SymInt, type(None), *PLAIN)):
                raise StageError(
                    f"{name} takes a {type(x).__qualname__}, which a stage can't hold: pass tensors, sizes and plain "
                    "values. Or cut the module by hand: interop.from_modules takes a module for each stage"
                )
        if not any(isinstance(x, Tensor) for x in leaves):
            raise StageError(f"{name} takes no tensor, so that no stage is known to be its place: pass it one")
        self.constants = [None if isinstance(x, Tensor | torch.SymInt) else x for x in leaves]
        self.tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.sizes = [i for i, x in enumerate(leaves) if isinstance(x, torch.SymInt)]
        self.wanted = [leaves[i].requires_grad for i in self.tensors]
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ]
        self.results: tuple[list[Any], Any] = [], None  # its leaves, and their tree

    def __call__(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Return the tensors of the result."""
        leaves, _ = pytree.tree_flatten(self._call(tensors, sizes))
        return [x for x in leaves if isinstance(x, Tensor)]

    def record(self, args: Any) -> Any:
        """Put the call into the graph that is traced, and return its result."""
        number = next(NUMBERS)
        CALLS[number] = self
        leaves = pytree.tree_leaves(args)
        tensors = CALL(number, [leaves[i] for i in self.tensors], [leaves[i] for i in self.sizes])
        constants, spec = self.results
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if x is A_TENSOR else x for x in constants], spec)

    def fakes(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Return new fakes with the shapes of the results.

        Raises:
            StageError: the call writes in place to a tensor that it reads.
        """
        with ThreadPoolExecutor(1) as thread:
            results = thread.submit(self._results_on, tensors, sizes).result()
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in results]

    def _results_on(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        mode = next(x.fake_mode for x in tensors if isinstance(x, FakeTensor))
        THREAD.is_running = True
        with ExitStack() as stack:
            for context in (mode, torch.autograd.set_multithreading_enabled(False)):
                stack.enter_context(context)
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            inputs = [x.detach().requires_grad_(wanted) for x, wanted in zip(tensors, self.wanted, strict=True)]
            versions = [x._version for x in inputs]
            leaves, spec = pytree.tree_flatten(self._call(inputs, sizes))
        if [x._version for x in inputs] != versions:
            raise StageError(f"{self.name} writes in place to a tensor that it reads: write to a clone of it")
        self.results = [A_TENSOR if isinstance(x, Tensor) else x for x in leaves], spec
        return [x for x in leaves if isinstance(x, Tensor)]

    def _call(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Any:
        leaves = list(self.constants)
        for at, values in ((self.tensors, tensors), (self.sizes, sizes)):
            for i, x in zip(at, values, strict=True):
                leaves[i] = x
        return self.function(*pytree.tree_unflatten(leaves, self.arguments))


@torch.library.custom_op("fpipe::opaque_call", mutates_args=())
def _opaque_call(number: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    raise NotImplementedError("it stands for a call while a module is exported")


@_opaque_call.register_fake
def _(number: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return CALLS[number].fakes(tensors, sizes)


CALL = torch.ops.fpipe.opaque_call.default


def make_calls(graphs: Sequence[fx.GraphModule]) -> None:
    """Replace the operations of the graphs that stand for calls by the calls."""
    for node in (node for part in graphs for node in part.graph.nodes):
        if node.target is CALL:
            number, tensors, sizes = node.args
            node.target, node.args = CALLS[number], (tensors, sizes)


def is_opaque(node: fx.Node) -> bool:
    return isinstance(node.target, OpaqueCall)


ELEMENTWISE = {
    torch.fake_quantize_per_tensor_affine,
    torch.fake_quantize_per_channel_affine,
    torch._fake_quantize_learnable_per_tensor_affine,
    torch._fake_quantize_learnable_per_channel_affine,
}
"""Functions whose result is like their first argument, and whose trace is valid for one size alone."""


class Recorder:
    """Records opaque calls while a forward is traced. It keeps them alive until the graph has been read."""

    def __init__(self) -> None:
        self.calls: list[OpaqueCall] = []

    def _record(self, name: str, function: Callable[..., Any], args: Any) -> Any:
        call = OpaqueCall(name, function, args)
        self.calls.append(call)
        return call.record(args)

    def keep_function(self, function: Any, patches: ExitStack) -> None:
        """Let `apply` of a `torch.autograd.Function` record a call, from its next lookup of `forward` on."""
        forward, has_context = function.forward, not _sets_up_context(function)

        @functools.wraps(forward)
        def run(*args: Any) -> Any:
            if getattr(THREAD, "is_running", False):
                return forward(*args)
            call = _applied(function, forward, has_context)
            return self._record(function.__name__, call, args[1:] if has_context else args)

        patches.enter_context(patch.object(function, "forward", staticmethod(run)))
        if not has_context:
            patches.enter_context(patch.object(function, "setup_context", staticmethod(_no_context)))

    def elementwise(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a call of a function whose result is like its first argument, and return its result."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(THREAD, "is_running", False):
                return torch.empty_like(args[0] if args else kwargs["input"])
            return function(*args, **kwargs)

        return self._record(function.__name__, lambda args, kwargs: call(*args, **kwargs), (list(args), dict(kwargs)))

    def keep_module(self, part: nn.Module, skeleton: nn.Module, name: str) -> None:
        """Let the forward of a submodule record a call.

        Args:
            skeleton: the submodule without tensors, which the call runs with the tensors of a stage.
        """
        names = [name for name, _ in (*skeleton.named_parameters(), *skeleton.named_buffers())]

        def call(tensors: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return bind_tensors(skeleton, tensors).forward(*args, **kwargs)

        @functools.wraps(part.forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = dict(named_tensors(part))
            return self._record(name, call, ({each: tensors[each] for each in names}, args, kwargs))

        part.forward = run


def _applied(function: Any, forward: Callable[..., Any], has_context: bool) -> Callable[..., Any]:
    """Return the function that a call runs: on fakes its forward alone, since its gradient does not count there."""

    def call(*args: Any) -> Any:
        if not getattr(THREAD, "is_running", False):
            return function.apply(*args)
        context: Any = FunctionCtx()
        context.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
        with torch.no_grad():
            return forward(context, *args) if has_context else forward(*args)

    return call


def _sets_up_context(function: Any) -> bool:
    return function.setup_context is not torch.autograd.Function.setup_context


def _no_context(ctx: Any, inputs: Any, output: Any) -> None: ...


class OwnGradient(StageError):
    """Forward of a submodule takes gradients itself.

    Args:
        module: the name of the smallest submodule that is called around it; empty for the whole module.
    """

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


def submodule_called(module: nn.Module) -> str:
    """Return the name of the innermost submodule that is being called; empty for the module itself."""
    names = dict[int, str]()
    for name, part in module.named_modules():
        names[id(vars(part))] = name  # the tracer calls proxies, which share them
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code is nn.Module._call_impl.__code__ and id(vars(frame.f_locals["self"])) in names:
            return names[id(vars(frame.f_locals["self"]))]
    return ""
