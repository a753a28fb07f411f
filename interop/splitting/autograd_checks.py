"""Check how a forward uses autograd, while the module is exported and before operations are decomposed.

`torch.export` keeps operations only. Blocks without gradients become operations of the graph. Calls with a gradient of
their own become opaque ones. Other custom gradients are refused, with the line of the model.

No mode of torch reports a custom `torch.autograd.Function`, and the graph does not show it: export decomposes its
forward into plain operations. The model itself may hold its `apply` (`self.act = F.apply`), a reference that patching
the attribute would miss. So a function is patched that `apply` looks up at each call.
"""

from __future__ import annotations

import operator
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._functorch import utils as functorch
from torch._functorch.autograd_function import custom_function_call
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fpipe.autodiff.graph.aliasing import storage
from fpipe.autodiff.graph.locations import user_line
from fpipe.autodiff.graph.lost_gradients import refuse_lost
from fpipe.autodiff.graph.nodes import written
from fpipe.errors import StageError
from fpipe.errors.tracebacks import is_library
from fpipe.interop.splitting.opaque import ELEMENTWISE, OwnGradient, Recorder, submodule_called

aten = torch.ops.aten
MANUAL = (
    "Cut it by hand instead: interop.from_modules takes a module for each stage, interop.from_functions a pure "
    "function for each"
)
OPERATION = "make it a torch.library.custom_op with register_autograd"


def line_of(node: fx.Node) -> str:
    """Return the line of the model that a node comes from."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    users = [i for i in files if not is_library(lines[i].removeprefix('File "'))] or files
    return f" ({'; '.join(lines[users[-1] : users[-1] + 2])})" if users else ""


# While forward is traced


@torch.library.custom_op("fpipe::set_grad_enabled", mutates_args=())
def _set_grad_enabled(enabled: bool) -> None: ...


_set_grad_enabled.register_fake(lambda enabled: None)
SWITCH = torch.ops.fpipe.set_grad_enabled.default
fx.node.has_side_effect(SWITCH)
LOCK = threading.RLock()
"""Patches are process-wide: one export at a time."""

_ATTRIBUTES: Any = torch._C.TensorBase.__dict__
_HOOK = "registers a hook on a tensor's gradient", OPERATION
_DETACH = "detaches a tensor in place", "write .detach()"
_FREEZE = "changes whether a tensor requires gradients", "write .detach(), or freeze it before the split"
_REFUSED: dict[Any, tuple[str, str]] = {
    Tensor.register_hook: _HOOK,
    Tensor.register_post_accumulate_grad_hook: _HOOK,
    Tensor.detach_: _DETACH,
    torch.detach_: _DETACH,
    _ATTRIBUTES["data"].__set__: ("assigns .data of a tensor", "copy into it under torch.no_grad()"),
    _ATTRIBUTES["requires_grad"].__set__: _FREEZE,
    # a new object at each access, which export cannot follow
    _ATTRIBUTES["grad_fn"].__get__: ("asks for a tensor's grad_fn", OPERATION),
}
"""Uses of autograd that export would lose, each with the way out."""


class _Watched(TorchFunctionMode):
    """Marks in the graph where gradients are switched off and on. Export keeps no trace of it inside autocast."""

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        super().__init__()
        self.module, self.recorder = module, recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            SWITCH(args[0])
            return _enable(args[0])
        if func in _REFUSED:
            _refuse(*_REFUSED[func])
        if func is torch.autograd.grad:  # torch.func.grad calls it too
            message = _lost("takes gradients of its own", "take them in a submodule, which is kept whole")
            raise OwnGradient(message, submodule_called(self.module))
        if func is Tensor.requires_grad_ and False in (*args[1:], *(kwargs or {}).values()):
            _refuse(*_FREEZE)
        if func is custom_function_call:  # under vmap, where `apply` of a function calls this
            _check_function(args[0])
            _refuse_function(args[0])
        if func in ELEMENTWISE:
            return self.recorder.elementwise(func, args, kwargs or {})
        if isinstance(func, torch._ops.HigherOrderOperator) and any(map(_switches, args)):
            _refuse(
                f"applies a torch.autograd.Function, or switches gradients off inside {func}",
                f"{OPERATION}, or switch them off around it",
            )
        return func(*args, **(kwargs or {}))


def _switches(branch: Any) -> bool:
    """Return whether gradients are switched inside a branch of a control flow operation."""
    parts = graphs(branch) if isinstance(branch, fx.GraphModule) else []
    return any(part.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled) for part in parts)


def _refuse(what: str, way: str) -> NoReturn:
    raise StageError(_lost(what, way))


def _lost(what: str, way: str) -> str:
    where = user_line(traceback.extract_stack())
    return f"forward {what}, which export would lose{where}: {way}. {MANUAL}"


def watched(
    forward: Callable[..., Any], module: nn.Module, recorder: Recorder, own: Collection[int] = ()
) -> Callable[..., Any]:
    """Return a forward that marks blocks without gradients, and raises StageError for gradients that would be lost.

    Args:
        module: whose forward it is.
        recorder: records the calls that are kept whole.
        own: the storages of tensors from outside that the caller refuses itself.
    """

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        was = torch.is_grad_enabled()
        _enable(True)
        try:
            with _Watched(module, recorder), _intercepting(recorder):
                output = forward(*args, **kwargs)
            refuse_lost(
                pytree.tree_leaves(output), (), lambda x: not isinstance(x, FakeTensor) and storage(x) not in own
            )
            return output
        finally:
            _enable(was)

    return run


def _enable(enabled: bool) -> None:
    """Switch gradients without telling the tracer."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


@contextmanager
def _intercepting(recorder: Recorder) -> Iterator[None]:
    """Record calls of custom autograd functions, and refuse custom saved-tensor hooks.

    `torch.inference_mode` becomes `torch.no_grad`, whose tensors autograd may read later.
    """
    enter, unwrap = saved_tensors_hooks.__enter__, functorch.unwrap_dead_wrappers
    patches, functions = ExitStack(), set[Any]()

    def enter_hooks(hooks: Any) -> Any:
        if not (hooks.pack_hook.__module__ or "").startswith("torch."):  # checkpointing has such hooks
            _refuse("packs saved tensors by hooks of its own", "leave it to fpipe what is kept for the backward")
        return enter(hooks)

    def enter_inference(mode: Any) -> None:
        mode._inference_mode_context = torch.set_grad_enabled(not mode.mode)

    def unwrap_arguments(args: Any) -> Any:
        function = sys._getframe(1).f_locals["cls"]  # the caller is `apply`
        if function not in functions and _check_function(function):
            functions.add(function)
            recorder.keep_function(function, patches)
        return unwrap(args)

    with (
        LOCK,
        patches,
        patch.object(saved_tensors_hooks, "__enter__", enter_hooks),
        patch.object(torch.inference_mode, "__enter__", enter_inference),
        patch.object(functorch, "unwrap_dead_wrappers", unwrap_arguments),
    ):
        yield


def _check_function(function: Any) -> bool:
    """Return whether a `torch.autograd.Function` is the user's: those of custom operations are torch's."""
    if function is torch.utils.checkpoint.CheckpointFunction:
        _refuse(_applies(function), "take use_reentrant=False")
    return not function.__module__.startswith("torch.")


def _refuse_function(function: Any) -> None:
    if not function.__module__.startswith("torch."):
        _refuse(f"{_applies(function)}, under torch.vmap", OPERATION)


def _applies(function: Any) -> str:
    return f"applies {function.__name__}, a torch.autograd.Function with a backward of its own"


# When it has been traced


def stop_gradients(program: ExportedProgram) -> None:
    """Detach the inputs of blocks without gradients. Decomposition inlines these blocks, and their grad mode is lost.

    Raises:
        StageError: a write in place has gradients that the operations alone do not show.
    """
    _Blocks().walk(program.graph_module)


def graphs(whole: fx.GraphModule) -> list[fx.GraphModule]:
    """Return a graph, and those of blocks in it such as `with torch.autocast(...)`."""
    return [part for part in whole.modules() if isinstance(part, fx.GraphModule)]


@dataclass
class _Blocks:
    """Walks the traced graphs in the order of execution.

    Args:
        enabled: whether gradients are enabled.
        carrying: memory that holds values with gradients.
        parameters: memory of parameters. Writes to it are refused elsewhere.
        stopped: nodes that share such memory but have no gradients, as by `detach`.
    """

    enabled: bool = True
    carrying: set[int] = field(default_factory=set)
    parameters: set[int] = field(default_factory=set)
    stopped: set[fx.Node] = field(default_factory=set)

    def walk(self, part: fx.GraphModule, outer: Sequence[fx.Node] | None = None) -> None:
        """Walk the whole graph, or a block whose placeholders stand for these nodes."""
        placeholders = part.graph.find_nodes(op="placeholder")
        for node in placeholders if outer is None else ():
            if getattr(node.meta.get("val"), "requires_grad", False):
                self.parameters |= _memory(node)
        self.carrying |= self.parameters
        self.stopped.update(x for x, node in zip(placeholders, outer or (), strict=False) if node in self.stopped)
        for node in list(part.graph.nodes):
            if node.target is SWITCH:
                self.enabled = node.args[0]
                part.graph.erase_node(node)
            elif node.target is torch.ops.higher_order.wrap_with_autocast:
                self._autocast(node, part)
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._operation(node, part)
            elif node.op == "call_function" and self.stopped.issuperset(node.all_input_nodes):
                self.stopped.add(node)
        part.recompile()

    def _autocast(self, node: fx.Node, part: fx.GraphModule) -> None:
        at = next(i for i, x in enumerate(node.args) if isinstance(x, fx.Node))
        block, *outer = node.args[at:]
        inside = getattr(part, str(block.target))  # type: ignore[union-attr]
        self.walk(inside, outer)  # type: ignore[arg-type]
        (result,) = inside.graph.find_nodes(op="output")
        for user in node.users:
            if user.target is operator.getitem and result.args[0][user.args[1]] in self.stopped:
                self.stopped.add(user)

    def _operation(self, node: fx.Node, part: fx.GraphModule) -> None:
        if node.target is aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            raise StageError(
                f"forward changes the running statistics of an instance norm{line_of(node)}, which export takes for "
                f"constant buffers: take track_running_stats=False. {MANUAL}"
            )
        gives = any(map(self._carries, node.all_input_nodes))
        for target in written(node):
            self._write(node, target, gives)
        if not self.enabled:
            for source in filter(self._carries, node.all_input_nodes):
                with part.graph.inserting_before(node):
                    detached = part.graph.call_function(aten.detach.default, (source,))
                detached.meta = {**node.meta, "val": source.meta["val"]}
                node.replace_input_with(source, detached)
                self.stopped.add(detached)
        elif gives:
            self.carrying |= _memory(node)
        shared = set[int]().union(*(_memory(x) for x in node.all_input_nodes if x in self.stopped))
        if node.target is aten.detach.default or shared & _memory(node):
            self.stopped.add(node)

    def _write(self, node: fx.Node, target: fx.Node, gives: bool) -> None:
        memory = _memory(target)
        if memory & self.parameters:
            return
        carried = bool(memory & self.carrying)
        if target in self.stopped and (gives or carried):
            where = "into a tensor that was detached from them, or is a view made without them"
        elif carried and not self.enabled:
            where = "where they are switched off"
        else:
            return
        raise StageError(
            f"forward writes in place to values that have gradients, {where}{line_of(node)}: of the graph's operations "
            f"all are differentiated, or none. Write to a clone, or compute what is written as a tensor of its own. "
            f"{MANUAL}"
        )

    def _carries(self, node: fx.Node) -> bool:
        return node not in self.stopped and not self.carrying.isdisjoint(_memory(node))


def _memory(node: fx.Node) -> set[int]:
    """Return the memories of a node's tensors whose dtype can have gradients."""
    tensors = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    carrying = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    return {storage(x) if torch._C._has_storage(x) else id(x) for x in carrying}  # under vmap there is none
