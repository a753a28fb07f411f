"""A module as one graph of operations, by `torch.export`, and what its placeholders stand for.

Invariants:
- the module is neither run nor changed: what is exported is a copy whose tensors are fakes, so that one on the meta
  device will do;
- a tensor that the module has under several names is one placeholder, under the first of them;
- nothing in the graph writes in place; what forward leaves in a buffer is an output of the graph.
"""

from __future__ import annotations

import copy
import inspect
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any, NamedTuple, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fpipe.errors import StageError
from fpipe.interop.modules import canonical
from fpipe.tree import Path

aten = torch.ops.aten
MANUAL = (
    "Cut it by hand instead: interop.from_modules takes a module for each stage, interop.from_functions a pure "
    "function for each"
)
OPERATION = "make it a torch.library.custom_op with register_autograd"


class Call(NamedTuple):
    """How forward is called: tensors on the meta device stand for the example's."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Exported:
    """A module's graph.

    Args:
        modules: the names of all submodules.
        graph, root: the operations, and what their `get_attr` nodes name.
        tensors: placeholder -> name, of parameters and buffers.
        parameters: which of these names are parameters'.
        constants: placeholder -> tensor, of what forward makes or closes over.
        leaves: placeholder -> where in the batch it is.
        changed: buffer -> what forward leaves in it.
        output: the module's output, with nodes for tensors, of plain dicts, lists and tuples.
        device: where the fakes were.
    """

    modules: frozenset[str]
    graph: fx.Graph
    root: fx.GraphModule
    tensors: dict[fx.Node, str]
    parameters: frozenset[str]
    constants: dict[fx.Node, Tensor]
    leaves: dict[fx.Node, Path]
    changed: dict[str, fx.Node]
    output: Any
    device: torch.device


@torch.library.custom_op("fpipe::pipe_split", mutates_args=())
def _mark() -> None: ...


@_mark.register_fake
def _() -> None: ...


MARK = torch.ops.fpipe.pipe_split.default
fx.node.has_side_effect(MARK)


def pipe_split() -> None:
    """Inside a module's forward: a place where `split` begins a new stage. Does nothing by itself."""
    if torch.compiler.is_exporting():
        MARK()


def export(module: nn.Module, call: Call, dynamic_shapes: Any, device: torch.device) -> Exported:
    """Export a module as if it and its example were on `device`.

    Args:
        dynamic_shapes: as of `torch.export.export`; None leaves axis 0 of every tensor free where the module lets it.

    Raises:
        StageError: it can't be exported, or forward does what a pure function can't.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec", FutureWarning)  # torch's own
            try:
                program, lines = _program(module, call, dynamic_shapes, device)
            except StageError:
                raise
            except Exception:
                if dynamic_shapes is not None:
                    raise
                program, lines = _program(module, call, {}, device)  # some modules have one size alone
    except StageError:
        raise
    except Exception as error:
        raise StageError(_why(error, module)) from error
    return _read(program, lines, module, device)


def _program(
    module: nn.Module, call: Call, dynamic_shapes: Any, device: torch.device
) -> tuple[ExportedProgram, dict[str, str]]:
    """The module's program, and which line of it writes in place to which input."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake, args, kwargs = _fakes(module, call, mode, device)
    if dynamic_shapes is None:
        free = ShapesCollection()  # type: ignore[no-untyped-call]
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.ndim:
                free[x] = {0: Dim.AUTO}
        dynamic_shapes = free.dynamic_shapes(fake, args, kwargs)  # type: ignore[no-untyped-call]
    with _refusing_lost_gradients():
        program = torch.export.export(fake, args, kwargs, dynamic_shapes=dynamic_shapes or None, strict=False)
    _check_constants(program)
    names = canonical(module)
    lines = _writes(program, names)
    for part in _graphs(program):
        _stop_gradients(part.graph)
        part.recompile()
        if part is not program.graph_module:
            part.forward = fx.Interpreter(part).run  # keeps which submodule runs
    _merge_aliases(program, names)
    program.graph_module.recompile()
    return program.run_decompositions({aten.copy.default: _copied}), lines


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What slice assignment becomes: autograd knows no derivative of the operation itself."""
    return source.to(target.dtype).expand(target.shape)


def _fakes(
    module: nn.Module, call: Call, mode: FakeTensorMode, device: torch.device
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made

    with mode:
        memo = {id(x): fake(x) for x in (*module.parameters(), *module.buffers())}
        args, kwargs = pytree.tree_map(fake, (call.args, dict(call.kwargs)))
    return copy.deepcopy(module, memo), args, kwargs


def refuse_hooks(module: nn.Module) -> None:
    """Refuse what changes gradients from outside forward: export would see nothing of it.

    Raises:
        StageError: a submodule or parameter has a hook on its gradient.
    """
    found = [
        name or "the module itself" for name, m in module.named_modules() if m._backward_hooks or m._backward_pre_hooks
    ]
    found += [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if found:
        raise StageError(
            f"{', '.join(found[:3])}{' and more' if len(found) > 3 else ''} has a hook on gradients, which export "
            f"would lose: remove it, and change gradients where the step gives them. {MANUAL}"
        )


@contextmanager
def _refusing_lost_gradients() -> Iterator[None]:
    """Refuse what has a say in the backward besides its operations: of that, export would see nothing."""
    apply, register_hook = torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook

    def refuse(what: str, way: str) -> NoReturn:
        caller = traceback.extract_stack(limit=3)[0]
        where = f"in {caller.filename}:{caller.lineno}, {caller.name}: {caller.line}"
        raise StageError(f"forward {what}, which export would lose ({where}): {way}. {MANUAL}")

    def applied(function: type, *args: Any, **kwargs: Any) -> Any:
        reentrant = function is torch.utils.checkpoint.CheckpointFunction
        if function.__module__.startswith("torch.") and not reentrant:  # of custom operations, and the like
            return apply.__get__(None, function)(*args, **kwargs)
        what = f"applies {function.__name__}, a torch.autograd.Function with a backward of its own"
        refuse(what, "take use_reentrant=False" if reentrant else OPERATION)

    def hooked(tensor: Tensor, hook: Any) -> Any:
        refuse("registers a hook on a tensor's gradient", OPERATION)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
    torch.Tensor.register_hook = hooked  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]


# Between export and decomposition


def _check_constants(program: ExportedProgram) -> None:
    """A tensor that isn't one of the module's and has no value comes from `.data`: the graph doesn't know what of."""
    for spec, node in _inputs(program):
        if spec.kind == InputKind.CONSTANT_TENSOR and isinstance(program.constants.get(spec.target), FakeTensor):
            raise StageError(
                f"forward uses .data of a tensor{_line(next(iter(node.users), node))}, which export can't follow: "
                "write .detach(), or change buffers in place under torch.no_grad()"
            )


def _writes(program: ExportedProgram, names: Mapping[str, str]) -> dict[str, str]:
    """By the target of an input, the line of the model that writes to it."""
    targets = {node.name: names.get(spec.target, node.name) for spec, node in _inputs(program)}
    found = dict[str, str]()
    for node in (node for part in _graphs(program) for node in part.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        into = node.all_input_nodes[0] if schema is not None and schema.is_mutable else None
        while into is not None and into.op != "placeholder":  # a view of it
            into = next(iter(into.all_input_nodes), None)
        if into is not None and into.name in targets:
            found.setdefault(targets[into.name], _line(node))
    return found


def _graphs(program: ExportedProgram) -> list[fx.GraphModule]:
    """The program's own graph, and those of blocks such as `with torch.no_grad()`."""
    return [part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]


def _stop_gradients(graph: fx.Graph) -> None:
    """Detach what comes out of a block without gradients: decomposition inlines it, and forgets that it was one."""
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
            for part in list(node.users):
                with graph.inserting_after(part):
                    stopped = graph.call_function(aten.detach.default, (part,))
                stopped.meta = dict(part.meta)
                part.replace_all_uses_with(stopped, delete_user_cb=lambda user, own=stopped: user is not own)


def _merge_aliases(program: ExportedProgram, names: Mapping[str, str]) -> None:
    """Give a tensor with several names one placeholder, under the first: decomposition fails on buffers with two."""
    first = {spec.target: node for spec, node in _inputs(program) if names.get(spec.target) == spec.target}
    for spec, node in _inputs(program):
        if spec.target in names and first[names[spec.target]] is not node:
            node.replace_all_uses_with(first[names[spec.target]])
            program.graph.erase_node(node)
            program.graph_signature.input_specs.remove(spec)


def _inputs(program: ExportedProgram) -> list[tuple[Any, fx.Node]]:
    return list(zip(program.graph_signature.input_specs, program.graph.find_nodes(op="placeholder"), strict=True))


# What the graph is made of


def _read(program: ExportedProgram, lines: Mapping[str, str], module: nn.Module, device: torch.device) -> Exported:
    names = canonical(module)
    graph, (result,) = program.graph, program.graph.find_nodes(op="output")
    tensors, constants, given = dict[fx.Node, str](), dict[fx.Node, Tensor](), list[fx.Node]()
    for spec, node in _inputs(program):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensors[node] = names[spec.target]
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[node] = program.constants[spec.target]
        elif spec.kind == InputKind.USER_INPUT:
            given.append(node)
        else:
            raise StageError(f"forward closes over a {spec.kind.name.lower()} ({spec.target}). {MANUAL}")
    changed, outputs = dict[str, fx.Node](), []
    for spec, value in zip(program.graph_signature.output_specs, result.args[0], strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            changed[names[spec.target]] = value
        elif spec.kind == OutputKind.USER_OUTPUT:
            outputs.append(value)
        else:
            raise StageError(_impure(spec, names, lines))
    for node in (node for part in _graphs(program) for node in part.graph.nodes):
        _portable(node)
    output = _plain(pytree.tree_unflatten(outputs, program.call_spec.out_spec), "the module's output")
    leaves = _leaves(pytree.tree_unflatten(given, program.call_spec.in_spec), module)
    parameters = frozenset(names[name] for name, _ in module.named_parameters())
    modules = frozenset(name for name, _ in module.named_modules(remove_duplicate=False))
    return Exported(
        modules, graph, program.graph_module, tensors, parameters, constants, leaves, changed, output, device
    )


def _impure(spec: Any, names: Mapping[str, str], lines: Mapping[str, str]) -> str:
    line = lines.get(spec.target, "")
    if spec.kind == OutputKind.USER_INPUT_MUTATION:
        return f"forward writes in place to its argument {spec.target}{line}: write to a clone of it"
    others = sorted(name for name, first in names.items() if first == names.get(spec.target) and name != spec.target)
    tied = f", which is tied to {', '.join(others)}," if others else ""
    return (
        f"forward changes the parameter {spec.target}{tied} in place{line}: every stage and microbatch must "
        "see the same parameters. Change it between steps, in the tree of params, or make it a buffer"
    )


def _portable(node: fx.Node) -> None:
    """A view needs strides that another kernel before it may not give; a reshape doesn't."""
    if node.target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default


def _plain(tree: Any, where: str) -> Any:
    """A tree of dicts, lists and tuples; what is empty in a mapping of another type is left out."""
    match tree:
        case Mapping():
            ours = type(tree) is dict
            return {k: _plain(v, f"{where}[{k!r}]") for k, v in tree.items() if ours or v is not None}
        case list() | tuple():
            items = [_plain(x, f"{where}[{i}]") for i, x in enumerate(tree)]
            return items if isinstance(tree, list) else tuple(items)
        case fx.Node() | None | bool() | int() | float() | str():
            return tree
    raise StageError(
        f"{where} is a {type(tree).__module__}.{type(tree).__qualname__}, which can't leave a stage: have forward "
        "return tensors in dicts, lists and tuples (of a Hugging Face model, by use_cache=False)"
    )


def _leaves(inputs: tuple[tuple[Any, ...], dict[str, Any]], module: nn.Module) -> dict[fx.Node, Path]:
    """Where in the batch each tensor is: the batch is what forward is given, as `split` says."""
    args, kwargs = inputs

    def tensors(tree: Any) -> list[tuple[fx.Node, Path]]:
        found, _ = pytree.tree_flatten_with_path(tree)
        return [(x, tuple(map(_key, path))) for path, x in found if isinstance(_value(x), Tensor)]

    named = {name: tensors(tree) for name, tree in kwargs.items()}
    positional = [found for found in map(tensors, args) if found]
    if any(named.values()):
        bound = inspect.signature(module.forward).bind_partial(*args).arguments
        named |= {name: tensors(tree) for name, tree in bound.items()}
        return {node: (name, *path) for name, found in named.items() for node, path in found}
    if len(positional) == 1:
        return dict(positional[0])
    return {node: (i, *path) for i, found in enumerate(positional) for node, path in found}


def batch_of(call: Call, module: nn.Module) -> Any:
    """What forward is given, as a batch."""
    args = [x for x in call.args if _has_tensors(x)]
    if _has_tensors(call.kwargs):
        return {**inspect.signature(module.forward).bind_partial(*call.args).arguments, **call.kwargs}
    return args[0] if len(args) == 1 else tuple(args)


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(x, Tensor) for x in pytree.tree_leaves(tree))


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, fx.Node) else None


def _key(entry: Any) -> Any:
    return next(getattr(entry, name) for name in ("idx", "key", "name") if hasattr(entry, name))


# Why it failed

LIBRARY = (str(File(torch.__path__[0]).resolve()), str(File(__file__).resolve().parent))


def _why(error: Exception, module: nn.Module) -> str:
    said = next((line for line in str(error).strip().splitlines() if line.strip()), "")
    kind = type(error).__name__
    valued = "It needs the value of a tensor, as a branch, .item() or .nonzero() does: use torch.where or torch.cond. "
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.line and f.filename[0] != "<"]
    own = [f for f in frames if not str(File(f.filename).resolve()).startswith(LIBRARY)][-1:]
    where = "".join(f" (in {f.filename}:{f.lineno}, {f.name}: {f.line})" for f in own)
    hint = valued if "DataDependent" in kind else ""
    return f"{type(module).__name__} can't be exported: {kind}: {said}{where}. {hint}{MANUAL}"


def _line(node: fx.Node) -> str:
    """The line of the model that a node comes from."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    places = [i for i, line in enumerate(lines) if line.startswith("File ")]
    return f" ({'; '.join(lines[places[-1] : places[-1] + 2])})" if places else ""


def stand_in(tree: Any) -> Any:
    """The same tree with tensors of the meta device."""
    return pytree.tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, tree)


def device_of(*trees: Sequence[Any]) -> torch.device:
    """Where the first of the tensors is that has values."""
    found = [x.device for x in pytree.tree_leaves(trees) if isinstance(x, Tensor) and x.device.type != "meta"]
    return found[0] if found else torch.device("cpu")
