"""A part of a graph as a Python function: straight-line calls, each value given up at its last use.

    def forward(v, x):
        n1 = mm(x[0], v[1])
        n2 = relu(n1)
        return [n2], [], [n1]

An operation is called through torch's own bindings where these come to the very same operation with the
same arguments, since that takes half the time of `torch.ops`; whether they do is tried on fakes once for
each kind of call.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.autodiff.graph.aliasing import root
from fpipe.autodiff.graph.block import Block, Sink
from fpipe.autodiff.graph.copies import fewer_moves
from fpipe.autodiff.graph.functionalize import gives_itself, written

SIMPLE = (bool, int, str, type(None))
OPERATORS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.mod: "%"}


@dataclass
class _Writer:
    module: torch.nn.Module
    bindings: bool
    names: dict[fx.Node, str] = field(default_factory=dict)
    globals: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def known(self, value: Any, hint: str) -> str:
        """A global name of a value."""
        name = hint if hint.isidentifier() and self.globals.get(hint, value) is value else f"_{len(self.globals)}"
        self.globals[name] = value
        return name

    def text(self, arg: Any) -> str:
        """An argument as source."""
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, list) or type(arg) is tuple:
            inner = ", ".join(map(self.text, arg))
            return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' if len(arg) == 1 else ''})"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{key!r}: {self.text(value)}" for key, value in arg.items()) + "}"
        if isinstance(arg, slice):
            return f"slice({self.text(arg.start)}, {self.text(arg.stop)}, {self.text(arg.step)})"
        return repr(arg) if type(arg) in SIMPLE else self.known(arg, "")

    def call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self.module)
            return self.known(value.detach() if isinstance(value, Tensor) else value, "")
        if node.target is operator.getitem:
            return f"{self.text(node.args[0])}[{self.text(node.args[1])}]"
        if node.target in OPERATORS:
            return OPERATORS[node.target].join(map(self.text, node.args))
        target, args = quick(node) if self.bindings else (node.target, node.args)
        hint = str(getattr(target, "__name__", "")).replace(".", "_")
        given = [*map(self.text, args), *(f"{key}={self.text(value)}" for key, value in node.kwargs.items())]
        return f"{self.known(target, hint)}({', '.join(given)})"


def emit(block: Block, module: torch.nn.Module, bindings: bool = True) -> Callable[..., Any]:
    """The block as a function of lists; without `bindings`, of calls that a compiler knows."""
    block = fewer_moves(block) if bindings else block
    block = replace(block, body=_apart(block.body))
    writer = _Writer(module, bindings)
    used = {n for node in block.body for n in node.all_input_nodes} | _nodes(block.outputs)
    last = _last_uses(block)
    for name, values in block.inputs.items():
        for i, node in enumerate(values):
            if node is not None and node in used and node not in writer.names:
                writer.names[node] = f"{name}{i}"
                writer.lines.append(f"{name}{i} = {name}[{i}]")
    if block.empties:
        writer.lines.append(f"{block.empties}.clear()")
    ends, offered = _ends(block), _offered(block)
    for i, node in enumerate(block.body):
        into = {n: writer.names[n] for n in written(node)}
        for n in into:
            if ends.get(root(n)) != i:
                copy = f"n{i}_{writer.names[n]}"
                writer.lines.append(f"{copy} = {writer.known(copied, 'copied')}({writer.names[n]})")
                writer.names[n] = copy
        source = writer.call(node)
        if into and not gives_itself(node):
            count = len(node.target._schema.returns)  # type: ignore[union-attr]
            results = f"*{source}" if count > 1 else source
            source = f"({results}, {', '.join(writer.names[n] for n in into)})" + ("" if count else "[1:]")
        writer.names |= into
        writer.names[node] = f"n{i}"
        writer.lines.append(f"n{i} = {source}")
        dead = [writer.names[n] for n in last.get(node, ()) if n in writer.names]
        if dead:
            writer.lines.append(f"del {', '.join(dead)}")
        if node in offered:
            writer.lines.append(f"n{i} = {writer.known(offer, 'offer')}(sink, {offered[node]}, n{i})")
    writer.lines.append("return " + ", ".join(writer.text(list(values)) for values in block.outputs))
    arguments = [*block.inputs, *([] if block.large is None else ["sink"])]
    source = f"def {block.name}({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in writer.lines)
    exec(compile(source, f"<fpipe {block.name}>", "exec"), writer.globals)
    found: Callable[..., Any] = writer.globals[block.name]
    found.__doc__ = source
    return found


def _apart(body: Sequence[fx.Node]) -> list[fx.Node]:
    """The same nodes, with several results taken apart at once, so that none keeps the others."""
    items: dict[Any, list[fx.Node]] = {}
    for node in body:
        if node.target is operator.getitem:
            items.setdefault(node.args[0], []).append(node)
    inside = set(body)
    found: list[fx.Node] = []
    for node in body:
        if node.target is not operator.getitem or node.args[0] not in inside:
            todo = [node]
            while todo:
                found.append(todo.pop(0))
                todo = items.get(found[-1], []) + todo
    return found


def _ends(block: Block) -> dict[fx.Node, int]:
    """Of each memory made in the block, and not handed on, which node is the last to read it."""
    theirs = {root(n) for n in _nodes(block.outputs)}
    found = {root(n): i for i, node in enumerate(block.body) for n in node.all_input_nodes}
    ours = set(block.body) - theirs
    return {n: i for n, i in found.items() if n in ours}


def _offered(block: Block) -> dict[fx.Node, int]:
    """The large results that nothing else needs, and their numbers."""
    results = Counter(x for values in block.outputs for x in values if isinstance(x, fx.Node))
    used = {n for node in block.body for n in node.all_input_nodes}
    found = {block.outputs[0][i]: i for i in sorted(block.large or ())}
    return {node: i for node, i in found.items() if results[node] == 1 and node not in used}


def offer(sink: Sink | None, i: int, x: Tensor) -> Tensor | None:
    """The result, or None if the sink has taken it."""
    return None if sink is not None and sink.take(i, x) else x


def copied(x: Tensor) -> Tensor:
    """A copy laid out the same."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _nodes(outputs: Sequence[Sequence[Any]]) -> set[fx.Node]:
    return {x for values in outputs for x in values if isinstance(x, fx.Node)}


def _last_uses(block: Block) -> dict[fx.Node, list[fx.Node]]:
    """What each node is the last to use; of outputs nothing."""
    kept = _nodes(block.outputs)
    found: dict[fx.Node, fx.Node] = {}
    for node in block.body:
        found.setdefault(node, node)  # used by none
        for n in node.all_input_nodes:
            found[n] = node
    grouped: dict[fx.Node, list[fx.Node]] = {}
    for n, user in found.items():
        if n not in kept:
            grouped.setdefault(user, []).append(n)
    return grouped


def quick(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The fastest way to call a node's operation, with its arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target, node.args
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        return torch.reshape, node.args  # a fake's strides may be wrong, and then only reshape gives the same values
    if target == torch.ops.aten.sym_size.int:
        return _size, node.args
    binding = getattr(torch._C._VariableFunctions, target._schema.name.removeprefix("aten::"), None)
    if binding is None or not target._schema.name.startswith("aten::"):
        return target._op, node.args
    return (binding if _comes_to(binding, target, node) else target._op), node.args


def _size(x: Tensor, dim: int) -> int:
    return x.shape[dim]


KNOWN: dict[Hashable, bool] = {}
"""Whether a binding comes to an operation, by the kinds of the arguments."""


def _comes_to(binding: Callable[..., Any], target: Any, node: fx.Node) -> bool:
    leaves, spec = optree.tree_flatten(_thawed((node.args, node.kwargs)), none_is_leaf=True)
    key = target, spec, tuple(map(_kind, leaves))
    if key not in KNOWN:
        KNOWN[key] = _try(binding, target, node)
    return KNOWN[key]


def _thawed(arg: Any) -> Any:
    """Arguments in lists and dicts proper, which optree knows."""
    if isinstance(arg, list | tuple):
        return (list if isinstance(arg, list) else tuple)(map(_thawed, arg))
    return {key: _thawed(x) for key, x in arg.items()} if isinstance(arg, dict) else arg


def _kind(x: Any) -> Any:
    value = x.meta.get("val") if isinstance(x, fx.Node) else x
    return (value.dtype, value.dim()) if isinstance(value, Tensor) else type(value)


def _try(binding: Callable[..., Any], target: Any, node: fx.Node) -> bool:
    args, kwargs = _thawed(fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
    given = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type, var-annotated]
    fakes = [x for x in given if isinstance(x, FakeTensor)]
    if not fakes:
        return False
    calls = _Calls()
    with suppress(Exception), torch.no_grad(), fakes[0].fake_mode, calls:
        binding(*args, **kwargs)
    if len(calls.found) != 1 or calls.found[0][0] is not target:
        return False
    wanted, found = (_by_name(target, *given) for given in ((args, kwargs), calls.found[0][1:]))
    return wanted.keys() == found.keys() and all(map(_equal, wanted.values(), found.values()))


def _by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    formal = target._schema.arguments
    defaults = {a.name: a.default_value for a in formal if a.has_default_value()}
    given = {a.name: value for a, value in zip(formal, args, strict=False)}
    return {a.name: (defaults | given | dict(kwargs)).get(a.name) for a in formal}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":
            self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
