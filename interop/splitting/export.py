"""Export a module as one graph of operations, by `torch.export`.

Invariants:
- The module is neither run nor changed. A copy with fake tensors is exported, so the module may be on the meta device.
- A tensor that the module has under several names is one placeholder, under the first name.
- No operation of the graph writes in place. A buffer's new value is an output of the graph.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._export.utils import _is_preservable_cia_op
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram, exported_program
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fpipe.autodiff.graph.locations import user_line
from fpipe.errors import StageError
from fpipe.interop.modules.attributes import warning_of_changes
from fpipe.interop.modules.functions import canonical
from fpipe.interop.modules.skeletons import rebinding_attributes, registered
from fpipe.interop.splitting.autograd_checks import (
    MANUAL,
    graphs,
    line_of,
    stop_gradients,
    watched,
)
from fpipe.interop.splitting.example import ExampleCall, leaves
from fpipe.interop.splitting.opaque import OwnGradient, Recorder, make_calls
from fpipe.stages.host_rng import DRAWS, noting_host_draws
from fpipe.stages.pytree import Path

aten = torch.ops.aten


@dataclass(frozen=True)
class Exported:
    """A module's graph.

    Args:
        modules: the names of all submodules.
        root: the graph of operations; it has the attributes of `get_attr` nodes, and the constants under the names of
            their placeholders.
        tensors: placeholder -> name, of parameters and buffers.
        parameters: those of the names that are parameters.
        constants: placeholder -> tensor, for tensors that forward creates or closes over.
        leaves: placeholder -> path in the batch.
        changed: placeholder of a buffer -> its new value.
        output: the module's output, with nodes for tensors, of plain dicts, lists and tuples.
        ranges: the range of each symbol.
        device: the device of the fakes.
    """

    modules: frozenset[str]
    root: fx.GraphModule
    tensors: dict[fx.Node, str]
    parameters: frozenset[str]
    constants: dict[fx.Node, Tensor]
    leaves: dict[fx.Node, Path]
    changed: dict[fx.Node, fx.Node]
    output: Any
    ranges: Mapping[Any, Any]
    device: torch.device


def pipe_split() -> None:
    """Mark a place in a module's forward where `split` begins a new stage. Has no other effect.

    It is `torch.distributed.pipelining.pipe_split`, which may stand there as well, without its import.
    """
    if torch.compiler.is_exporting():
        from torch.distributed import pipelining  # takes a second to import

        pipelining.pipe_split()  # type: ignore[no-untyped-call]


def export(
    module: nn.Module,
    call: ExampleCall,
    dynamic_shapes: Any,
    device: torch.device,
    own: Collection[int] = (),
    whole: Collection[str] = (),
) -> Exported:
    """Export a module as if it and its example were on `device`.

    Args:
        whole: the names of submodules to keep whole, besides those that take gradients themselves.
        dynamic_shapes: as of `torch.export.export`; None leaves axis 0 of every tensor free where the module lets it.
        own: the storages of the original module's tensors, which the caller refuses among the constants.

    Raises:
        StageError: it cannot be exported, or forward is not a pure function.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec", FutureWarning)  # torch's own
        recorder = Recorder()
        try:
            program = _program(module, call, dynamic_shapes, device, own, recorder, whole)
        except OwnGradient as error:
            if not error.module or error.module in whole:
                raise
            return export(module, call, dynamic_shapes, device, own, {*whole, error.module})
        except StageError:
            raise
        except Exception as error:
            if dynamic_shapes is not None or _needs_values(error):
                raise StageError(_why(error, module)) from error
            return export(module, call, {}, device, own, whole)  # some modules have one size alone
    return _read(program, module, device)


def _program(
    module: nn.Module,
    call: ExampleCall,
    dynamic_shapes: Any,
    device: torch.device,
    own: Collection[int],
    recorder: Recorder,
    whole: Collection[str],
) -> ExportedProgram:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake, args, kwargs = _fakes(module, call, mode, device)
    for name in whole:
        recorder.keep_module(fake.get_submodule(name), module.get_submodule(name), name)
    fake.forward = _named(watched(_noticing(rebinding_attributes(fake), fake), fake, recorder, own), kwargs)
    if dynamic_shapes is None:
        example = inspect.signature(fake.forward).bind(*args, **kwargs).arguments
        dynamic_shapes = pytree.tree_map(lambda x: {0: Dim.AUTO} if isinstance(x, Tensor) and x.ndim else None, example)
    with _quietly():
        program = torch.export.export(fake, args, kwargs, dynamic_shapes=dynamic_shapes or None, strict=False)
    _check_constants(program)
    stop_gradients(program)
    for block in graphs(program.graph_module)[1:]:
        block.forward = fx.Interpreter(block).run  # an interpreter keeps the nodes' submodules
    _merge_aliases(program, canonical(module))
    program.graph_module.recompile()
    with _keeping_composites(program):
        return cast(ExportedProgram, program.run_decompositions({aten.copy.default: _copied}))


def _named(forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return forward with a parameter for each keyword: torch.export takes no sizes for `**kwargs`."""
    signature = inspect.signature(forward)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    known = [p for name, p in signature.parameters.items() if kinds[name] != inspect.Parameter.VAR_KEYWORD]
    if len(known) < len(kinds):
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in kinds]
        forward.__signature__ = signature.replace(parameters=[*known, *more])  # type: ignore[attr-defined]
    return forward


def _noticing(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return forward with two checks: of random numbers other than torch's, and of attributes that pass values on."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with warning_of_changes(module), noting_host_draws(module) as has_drawn:
            output = forward(*args, **kwargs)
            if has_drawn():
                raise StageError(
                    f"forward {DRAWS}, and the stages would draw the same for good: draw from torch's. {MANUAL}"
                )
        return output

    return run


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the graph and the traceback that torch prints when it fails. The error has the information."""
    printed, names = io.StringIO(), ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    with redirect_stderr(printed), ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        yield
    sys.stderr.write(printed.getvalue())


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Replace `aten.copy`, to which slice assignment is decomposed: autograd has no derivative of it."""
    return source.to(target.dtype).expand(target.shape)


def _fakes(
    module: nn.Module, call: ExampleCall, mode: FakeTensorMode, device: torch.device
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    def fake(x: Tensor) -> Tensor:
        return registered(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), x)

    with mode:
        memo = {id(x): fake(x) for x in (*module.parameters(), *module.buffers())}
        args, kwargs = pytree.tree_map_only(Tensor, fake, (call.args, dict(call.kwargs)))
    return copy.deepcopy(module, memo), args, kwargs


# Between export and decomposition


def _check_constants(program: ExportedProgram) -> None:
    """Raise StageError for a constant without a value: it comes from `.data`, and the graph lacks its source.

    Decomposition may crash on such a program.
    """
    for spec, node in _inputs(program):
        if spec.kind == InputKind.CONSTANT_TENSOR and isinstance(program.constants.get(spec.target), FakeTensor):
            raise StageError(
                f"forward uses .data of a tensor, or one that is held where no module registers it"
                f"{line_of(next(iter(node.users), node))}, which export can't follow: write .detach(), change buffers "
                "in place under torch.no_grad(), and take parameters from where they are registered"
            )


def _merge_aliases(program: ExportedProgram, names: Mapping[str, str]) -> None:
    """Replace the placeholders of a tensor with several names by the first: decomposition fails on such buffers."""
    first = {spec.target: node for spec, node in _inputs(program) if names.get(spec.target) == spec.target}
    for spec, node in _inputs(program):
        if spec.target in names and first[names[spec.target]] is not node:
            node.replace_all_uses_with(first[names[spec.target]])
            program.graph.erase_node(node)
            program.graph_signature.input_specs.remove(spec)


def _inputs(program: ExportedProgram) -> list[tuple[Any, fx.Node]]:
    return list(zip(program.graph_signature.input_specs, program.graph.find_nodes(op="placeholder"), strict=True))


@contextmanager
def _keeping_composites(program: ExportedProgram) -> Iterator[None]:
    """Let decomposition keep the composite operations that the program has.

    To keep all of torch's, it would patch a thousand of them first, which takes as long as the rest of the export.
    """
    targets = {node.target for part in graphs(program.graph_module) for node in part.graph.nodes}
    kept = {op for op in targets if isinstance(op, torch._ops.OpOverload) and _is_preservable_cia_op(op)}
    with patch.object(exported_program, "_collect_all_valid_cia_ops", lambda: kept):
        yield


# The exported graph


def _read(program: ExportedProgram, module: nn.Module, device: torch.device) -> Exported:
    names = canonical(module)
    _settle_assigned(program)
    (result,) = program.graph.find_nodes(op="output")
    tensors, constants, inputs = dict[fx.Node, str](), dict[fx.Node, Tensor](), list[fx.Node]()
    for spec, node in _inputs(program):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensors[node] = names[spec.target]
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[node] = program.constants[spec.target]
            setattr(program.graph_module, node.name, constants[node])
        elif spec.kind == InputKind.USER_INPUT:
            inputs.append(node)
        else:
            raise StageError(f"forward closes over a {spec.kind.name.lower()} ({spec.target}). {MANUAL}")
    placeholders = {name: node for node, name in tensors.items()}
    changed, outputs = dict[fx.Node, fx.Node](), []
    for spec, value in zip(program.graph_signature.output_specs, result.args[0], strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            changed[placeholders[names[spec.target]]] = value
        elif spec.kind == OutputKind.USER_OUTPUT:
            outputs.append(value)
        else:
            raise StageError(_impure(spec, names, line_of(value)))
    make_calls(graphs(program.graph_module))
    for node in (node for part in graphs(program.graph_module) for node in part.graph.nodes):
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # another device's kernels may return strides that do not allow the view
    return Exported(
        modules=frozenset(name for name, _ in module.named_modules(remove_duplicate=False)),
        root=program.graph_module,
        tensors=tensors,
        parameters=frozenset(names[name] for name, _ in module.named_parameters()),
        constants=constants,
        leaves=leaves(pytree.tree_unflatten(inputs, program.call_spec.in_spec), module),
        changed=changed,
        output=_plain(pytree.tree_unflatten(outputs, program.call_spec.out_spec), "the module's output"),
        ranges=program.range_constraints,
        device=device,
    )


def _settle_assigned(program: ExportedProgram) -> None:
    """Make the new value of an assigned buffer the computed tensor. Export adds a copy at the end of the graph."""
    (result,) = program.graph.find_nodes(op="output")
    for spec, value in zip(program.graph_signature.output_specs, result.args[0], strict=True):
        while spec.kind == OutputKind.BUFFER_MUTATION and value.target is aten.expand.default:
            (source, *_) = value.all_input_nodes
            if source.op != "call_function" or source.meta["val"].shape != value.meta["val"].shape:
                break
            result.replace_input_with(value, source)
            if not value.users:
                program.graph.erase_node(value)
            value = source


def _impure(spec: Any, names: Mapping[str, str], line: str) -> str:
    if spec.kind == OutputKind.USER_INPUT_MUTATION:
        way_out = "pass inplace=False, or write to a clone of it"
        return f"forward writes in place to its argument {spec.target}{line}: {way_out}"
    others = sorted(name for name, first in names.items() if first == names.get(spec.target) and name != spec.target)
    tied = f", which is tied to {', '.join(others)}," if others else ""
    return (
        f"forward changes the parameter {spec.target}{tied} in place{line}: every stage and microbatch must "
        "see the same parameters. Change it between steps, in the tree of params, or make it a buffer"
    )


def _plain(tree: Any, where: str) -> Any:
    """Return a tree of dicts, lists and tuples. None in a mapping of another type is left out."""
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


# Why it failed


def _needs_values(error: Exception) -> bool:
    return "DataDependent" in type(error).__name__


def _why(error: Exception, module: nn.Module) -> str:
    reason = next((line for line in str(error).strip().splitlines() if line.strip()), "")
    frames = traceback.extract_tb(error.__traceback__)
    where = user_line(frames)
    hint = ""
    if _needs_values(error):
        hint = (
            "It needs the value of a tensor, as a branch, .item() or .nonzero() does: use torch.where or torch.cond. "
        )
    if hint and any("/torch/distributions/" in frame.filename for frame in frames):
        hint = "A distribution looks at the values that it is given: take validate_args=False. "
    if hint and any("/torch/ao/quantization/" in frame.filename for frame in frames):
        hint = "A FakeQuantize looks at its switches, which are tensors. "
    if hint and any(frame.name == "_detect_is_causal_mask" for frame in frames):
        hint = "It looks at the values of a mask: give the transformer tgt_is_causal= or is_causal=, True or False. "
    if type(error).__name__ == "SpecViolationError" and "copy_" in reason:
        hint = "It assigns a buffer, or what it is given, to a buffer as it is: assign a clone(). "
    return f"{type(module).__name__} can't be exported: {type(error).__name__}: {reason}{where}. {hint}{MANUAL}"
