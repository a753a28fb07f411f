"""What autograd knows of a forward besides its operations: which blocks have no gradients, and who has a say in them.

`torch.export` keeps operations alone. Here the rest of it is written down as operations, or refused with the line of
the model that has it, while the module is being traced and before anything is decomposed.
"""

from __future__ import annotations

import operator
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path as File
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fpipe.errors import StageError

aten = torch.ops.aten
MANUAL = (
    "Cut it by hand instead: interop.from_modules takes a module for each stage, interop.from_functions a pure "
    "function for each"
)
OPERATION = "make it a torch.library.custom_op with register_autograd"
LIBRARY = (str(File(torch.__path__[0]).resolve()), str(File(__file__).resolve().parent))


def place_in_model(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost of the frames that is neither torch's nor ours, for messages."""
    own = [f for f in frames if f.filename[:1] != "<" and not str(File(f.filename).resolve()).startswith(LIBRARY)]
    return "".join(f" (in {f.filename}:{f.lineno}, {f.name}: {f.line})" for f in own[-1:])


def line_of(node: fx.Node) -> str:
    """The line of the model that a node comes from."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    places = [i for i, line in enumerate(lines) if line.startswith("File ")]
    own = [i for i in places if not lines[i].removeprefix('File "').startswith(LIBRARY)] or places
    return f" ({'; '.join(lines[own[-1] : own[-1] + 2])})" if own else ""


# While forward is traced


@torch.library.custom_op("fpipe::set_grad_enabled", mutates_args=())
def _set_grad_enabled(enabled: bool) -> None: ...


@_set_grad_enabled.register_fake
def _(enabled: bool) -> None: ...


SWITCH = torch.ops.fpipe.set_grad_enabled.default
fx.node.has_side_effect(SWITCH)


_GRAD_FN: Any = torch._C.TensorBase.__dict__["grad_fn"].__get__
_SET_DATA: Any = torch._C.TensorBase.__dict__["data"].__set__
_SET_REQUIRES_GRAD: Any = torch._C.TensorBase.__dict__["requires_grad"].__set__


class _Watched(TorchFunctionMode):
    """Marks in the graph where gradients are switched off and on, as autocast's blocks leave no trace of it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            SWITCH(args[0])
            return _enable(args[0])
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            _refuse("registers a hook on a tensor's gradient", OPERATION)
        if func in (Tensor.detach_, torch.detach_):
            _refuse("detaches a tensor in place", "write .detach()")
        if func == _SET_DATA:
            _refuse("assigns .data of a tensor", "copy into it under torch.no_grad()")
        if func == _SET_REQUIRES_GRAD or (
            func is Tensor.requires_grad_ and False in (*args[1:], *(kwargs or {}).values())
        ):
            _refuse("changes whether a tensor requires gradients", "write .detach(), or freeze it before the split")
        if isinstance(func, torch._ops.HigherOrderOperator) and any(map(_switches, args)):
            _refuse(f"switches gradients off inside {func}", "switch them off around it")
        if func == _GRAD_FN:  # made anew whenever it is asked for
            _refuse("asks for a tensor's grad_fn", OPERATION)
        return func(*args, **(kwargs or {}))


def _switches(branch: Any) -> bool:
    """Whether gradients are switched within what a control flow operation is given to run."""
    if not isinstance(branch, fx.GraphModule):
        return False
    parts = (part for part in branch.modules() if isinstance(part, fx.GraphModule))
    return any(part.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled) for part in parts)


def _refuse(what: str, way: str) -> NoReturn:
    where = place_in_model(traceback.extract_stack())
    raise StageError(f"forward {what}, which export would lose{where}: {way}. {MANUAL}")


def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that marks where it has no gradients, and is refused where it has a say in them."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        was = torch.is_grad_enabled()
        _enable(True)
        try:
            with _Watched(), _watching_classes():
                return forward(*args, **kwargs)
        finally:
            _enable(was)

    return run


def _enable(enabled: bool) -> None:
    """Without a word to whoever traces."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


@contextmanager
def _watching_classes() -> Iterator[None]:
    """Watches what comes by no tensor's method. Code is swapped, so that references that a model holds are too."""
    apply = torch.autograd.Function.__dict__["apply"].__func__
    packing, inferring = saved_tensors_hooks.__enter__, torch.inference_mode.__enter__

    def packed(hooks: Any) -> Any:
        if not (hooks.pack_hook.__module__ or "").startswith("torch."):  # checkpointing has such
            _refuse("packs saved tensors by hooks of its own", "leave it to fpipe what is kept for the backward")
        return packing(hooks)

    def infer(mode: Any) -> None:
        mode._inference_mode_context = torch.set_grad_enabled(not mode.mode)

    apply.__code__ = _Swapped.apply.__code__
    saved_tensors_hooks.__enter__ = packed  # type: ignore[method-assign]
    torch.inference_mode.__enter__ = infer  # type: ignore[method-assign]
    try:
        yield
    finally:
        apply.__code__ = _apply.__code__
        saved_tensors_hooks.__enter__ = packing  # type: ignore[method-assign]
        torch.inference_mode.__enter__ = inferring  # type: ignore[method-assign]


def _copied(function: Any) -> types.FunctionType:
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, closure=function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_apply = _copied(torch.autograd.Function.__dict__["apply"].__func__)


class _Swapped:
    def apply(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        assert __class__  # type: ignore[name-defined]  # code can be swapped for code of the same free variables
        from fpipe.interop.splitting.autograd_checks import applied

        return applied(cls, *args, **kwargs)


def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What `torch.autograd.Function.apply` does while a forward is watched."""
    reentrant = function is torch.utils.checkpoint.CheckpointFunction
    if function.__module__.startswith("torch.") and not reentrant:  # of custom operations, and the like
        return _apply(function, *args, **kwargs)
    what = f"applies {function.__name__}, a torch.autograd.Function with a backward of its own"
    _refuse(what, "take use_reentrant=False" if reentrant else OPERATION)


# When it has been traced


def stop_gradients(program: ExportedProgram) -> None:
    """Let what blocks without gradients read be detached: decomposition inlines them, and forgets what they were.

    Raises:
        StageError: a tensor is written in place where autograd would see something else than the operations say.
    """
    (whole, *_) = graphs(program)
    _Blocks().walk(whole)


def graphs(program: ExportedProgram) -> list[fx.GraphModule]:
    """The program's own graph, and those of blocks such as `with torch.autocast(...)`."""
    return [part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]


@dataclass
class _Blocks:
    """Walks what was traced in the order of execution.

    Args:
        enabled: whether gradients are.
        carrying: memory that holds values with gradients.
        parameters: memory of parameters, to which nobody may write anyway.
        stopped: nodes that share such memory without the gradients, as by `detach`.
    """

    enabled: bool = True
    carrying: set[int] = field(default_factory=set)
    parameters: set[int] = field(default_factory=set)
    stopped: set[fx.Node] = field(default_factory=set)

    def walk(self, part: fx.GraphModule, given: Sequence[fx.Node] | None = None) -> None:
        """Walk the whole, or a block whose placeholders were given these nodes."""
        placeholders = part.graph.find_nodes(op="placeholder")
        for node in placeholders if given is None else ():
            if getattr(node.meta.get("val"), "requires_grad", False):
                self.parameters |= _memory(node)
        self.carrying |= self.parameters
        self.stopped.update(own for own, node in zip(placeholders, given or (), strict=False) if node in self.stopped)
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
        block, *given = node.args[at:]
        inside = getattr(part, str(block.target))  # type: ignore[union-attr]
        self.walk(inside, given)  # type: ignore[arg-type]
        (result,) = inside.graph.find_nodes(op="output")
        for user in node.users:
            if user.target is operator.getitem and result.args[0][user.args[1]] in self.stopped:
                self.stopped.add(user)

    def _operation(self, node: fx.Node, part: fx.GraphModule) -> None:
        if node.target is aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            raise StageError(
                f"forward changes the running statistics of an instance norm{line_of(node)}, which export takes for "
                f"buffers that stay: take track_running_stats=False. {MANUAL}"
            )
        gives = any(map(self._carries, node.all_input_nodes))
        for target in written_by(node):
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
    """Which memory its tensors share, of those types that can have gradients."""
    found = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    return {_address(x) for x in found if x.is_floating_point() or x.is_complex()}


def _address(x: Tensor) -> int:
    try:
        return int(x.untyped_storage()._cdata)
    except NotImplementedError:  # one of many, as under vmap
        return id(x)


def written_by(node: fx.Node) -> list[fx.Node]:
    """What an operation writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [*zip(schema.arguments, node.args, strict=False)]
    given += [(argument, node.kwargs[argument.name]) for argument in schema.arguments if argument.name in node.kwargs]
    return [x for argument, value in given if argument.is_write for x in pytree.tree_leaves(value) if x is not None]
