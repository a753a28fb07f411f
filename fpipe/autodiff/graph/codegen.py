"""Write a part of a graph as a Python function: straight-line calls that release each value at its last use.

    def forward(v, x):
        x0 = x[0]
        v1 = v[1]
        n1 = mm(x0, v1)
        n2 = relu(n1)
        return [n2], [], [n1]

`emit(...).source` is the text. Tracebacks and debuggers show it.

A function that waits for collectives exists as a generator too, `emit(...).steps`. It yields when it has posted some
and would wait for them.
"""

from __future__ import annotations

import itertools
import linecache
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx

from fpipe.autodiff.graph.aliasing import root
from fpipe.autodiff.graph.bindings import fastest
from fpipe.autodiff.graph.block import Block, Sink
from fpipe.autodiff.graph.collectives import is_collective, is_wait, turn_ends, watched
from fpipe.autodiff.graph.copies import with_fewer_copies
from fpipe.autodiff.graph.donation import write_to_given_up
from fpipe.autodiff.graph.nodes import returns_itself, written

SIMPLE = (bool, int, str, type(None))
OPERATORS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.mod: "%"}
NUMBERS = itertools.count()
"""Numbers that make the file names of functions unique."""
CUT = "yield"


class Emitted(Protocol):
    """A function of lists, and its text.

    Args:
        steps: the function as a generator, which returns the results; None where it waits for no collective.
    """

    source: str
    steps: Callable[..., Generator[None, None, Any]] | None

    def __call__(self, *lists: Any) -> Any: ...


def emit(block: Block, module: torch.nn.Module, bindings: bool = True) -> Emitted:
    """Return a block as a function of lists.

    Args:
        module: holds what `get_attr` nodes name.
        bindings: call torch's bindings, with fewer copies. A compiler needs the operations themselves: pass False.
    """
    block = write_to_given_up(with_fewer_copies(block) if bindings else block)
    writer = _Writer(replace(block, body=_unpacked_at_once(block.body)), module, bindings)
    arguments = [*block.inputs, *([] if block.large is None else ["sink"])]
    head, lines = f"def {block.name}({', '.join(arguments)}):", list(writer.lines())
    function = _defined(block.name, [head, *(line for line in lines if line != CUT)], writer.globals)
    function.steps = cast(Any, _defined(block.name, [head, *lines], writer.globals)) if CUT in lines else None
    return function


def _defined(name: str, lines: Sequence[str], names: dict[str, Any]) -> Emitted:
    source = "\n    ".join(lines) + "\n"
    file = f"<fpipe {name} {next(NUMBERS)}>"
    exec(compile(source, file, "exec"), names)
    function = cast(Emitted, names[name])
    function.source = source
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    weakref.finalize(function, linecache.cache.pop, file, None)
    return function


def are_same(one: Any, other: Any) -> bool:
    """Return whether two emitted functions have the same text, with equal values for the names in it."""
    names, others = one.__globals__, other.__globals__
    return one.source == other.source and all(
        value is one or _is_same(value, others.get(name)) for name, value in names.items()
    )


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are one, or equal constants. Of others, such as tensors, `==` may be no answer."""
    if value is other or type(value) is not type(other):
        return value is other
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, float):
        return bool(value.hex() == other.hex())  # 0.0 is not -0.0, and NaN is NaN
    return isinstance(value, str | int | torch.dtype | torch.device) and bool(value == other)


@dataclass
class _Writer:
    """Turns the nodes of a block into the lines of a function, in order.

    Args:
        names: the variable that holds a node's value.
        globals: what the text names besides.
    """

    block: Block
    module: torch.nn.Module
    bindings: bool
    names: dict[fx.Node, str] = field(default_factory=dict)
    globals: dict[str, Any] = field(default_factory=lambda: {"offer": offer, "copied": copied})

    def lines(self) -> Iterator[str]:
        yield from self._loads()
        if self.block.empties is not None:
            yield f"{self.block.empties}.clear()"
        yield from self._statements()
        yield f"return {', '.join(self.text(list(values)) for values in self.block.outputs)}"

    def _loads(self) -> Iterator[str]:
        """Yield a line for each item of the argument lists that is used."""
        used = {n for node in self.block.body for n in node.all_input_nodes} | self.block.results
        for name, values in self.block.inputs.items():
            for i, node in enumerate(values):
                if node is not None and node in used and node not in self.names:
                    self.names[node] = f"{name}{i}"
                    yield f"{name}{i} = {name}[{i}]"

    def _statements(self) -> Iterator[str]:
        """Yield the lines of each node: copies of what it must not overwrite, its call, and what follows it."""
        dying, offered, cuts = _last_uses(self.block), _offered(self.block), turn_ends(self.block.body)
        for i, node in enumerate(self.block.body):
            if node in cuts:
                yield CUT
            overwritten = {n: self.names[n] for n in written(node)}
            for n, name in overwritten.items():
                if self.last_reads.get(root(n)) != i:
                    self.names[n] = f"n{i}_{name}"
                    yield f"{self.names[n]} = copied({name})"
            yield f"n{i} = {self._expression(node, [self.names[n] for n in overwritten])}"
            self.names |= overwritten
            self.names[node] = f"n{i}"
            if releases := [self.names[n] for n in dying.get(node, ()) if n in self.names]:
                yield f"del {', '.join(releases)}"
            if node in offered:
                yield f"n{i} = offer(sink, {offered[node]}, n{i})"

    @cached_property
    def last_reads(self) -> dict[fx.Node, int]:
        """The place of the last node that reads each memory that the block makes, or is given, and does not return."""
        inside = {*self.block.body, *self.block.given_up} - {root(n) for n in self.block.results}
        reads = {root(n): i for i, node in enumerate(self.block.body) for n in _read(node)}
        return {n: i for n, i in reads.items() if n in inside}

    def _expression(self, node: fx.Node, overwritten: Sequence[str]) -> str:
        """Return a node's call. Where it writes and returns other results, a tuple of these and what it wrote to."""
        call = self._call(node)
        if not overwritten or returns_itself(node):
            return call
        target: Any = node.target
        count = len(target._schema.returns)
        results = f"({'*' if count > 1 else ''}{call}, {', '.join(overwritten)})"
        return results if count else f"{results}[1:]"

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self.module)
            return self._global(value.detach() if isinstance(value, Tensor) else value)
        if node.target is operator.getitem:
            return f"{self.text(node.args[0])}[{self.text(node.args[1])}]"
        if node.target in OPERATORS:
            return OPERATORS[node.target].join(map(self.text, node.args))
        function: Any = fastest(node) if self.bindings else node.target
        if self.bindings and is_collective(node.target):
            function = watched(node, function)
        arguments = [*map(self.text, node.args), *(f"{key}={self.text(value)}" for key, value in node.kwargs.items())]
        name = self._global(function, str(getattr(function, "__name__", "")).replace(".", "_"))
        return f"{name}({', '.join(arguments)})"

    def _global(self, value: Any, hint: str = "") -> str:
        """Return a global name of a value: the hint where it is free."""
        name = hint if hint.isidentifier() and self.globals.get(hint, value) is value else f"_{len(self.globals)}"
        self.globals[name] = value
        return name

    def text(self, arg: Any) -> str:
        """Return an argument as source."""
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, list) or type(arg) is tuple:
            inner = ", ".join(map(self.text, arg))
            return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' if len(arg) == 1 else ''})"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{key!r}: {self.text(value)}" for key, value in arg.items()) + "}"
        if isinstance(arg, slice):
            return f"slice({self.text(arg.start)}, {self.text(arg.stop)}, {self.text(arg.step)})"
        return repr(arg) if type(arg) in SIMPLE else self._global(arg)


def _read(node: fx.Node) -> list[fx.Node]:
    """Return the values that a node reads. A collective reads its inputs until it is waited for."""
    if not is_wait(node.target):
        return node.all_input_nodes
    return [n for post in node.all_input_nodes for n in (post, *post.all_input_nodes)]


def offer(sink: Sink | None, i: int, x: Tensor) -> Tensor | None:
    """Return the i-th gradient, or None if the sink has taken it."""
    return None if sink is not None and sink.take(i, x) else x


def copied(x: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _unpacked_at_once(body: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes with the items of a tuple right after it, so that no item keeps the others alive."""
    items: dict[Any, list[fx.Node]] = {}
    for node in body:
        if node.target is operator.getitem:
            items.setdefault(node.args[0], []).append(node)
    inside = set(body)
    order: list[fx.Node] = []
    for node in body:
        if node.target is not operator.getitem or node.args[0] not in inside:
            todo = [node]
            while todo:
                order.append(todo.pop(0))
                todo = items.get(order[-1], []) + todo
    return order


def _offered(block: Block) -> dict[fx.Node, int]:
    """Return the numbers of the large results that are read nowhere else."""
    results = Counter(x for values in block.outputs for x in values if isinstance(x, fx.Node))
    used = {n for node in block.body for n in node.all_input_nodes}
    large = {block.outputs[0][i]: i for i in sorted(block.large or ())}
    return {node: i for node, i in large.items() if results[node] == 1 and node not in used}


def _last_uses(block: Block) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that die after each node. Outputs do not die; a value without users dies at once."""
    users: dict[fx.Node, fx.Node] = {}
    for node in block.body:
        users.setdefault(node, node)
        for n in node.all_input_nodes:
            users[n] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for n, user in users.items():
        if n not in block.results:
            dying.setdefault(user, []).append(n)
    return dying
