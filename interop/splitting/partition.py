"""Partition a module's graph into stages.

Invariants:
- An operation belongs to one stage, by its position in the order of execution. Exception: operations that depend on no
  parameter and draw no random numbers are recomputed in each stage that uses them, so that masks, positions and sizes
  are not sent.
- A value is sent from the stage that computes it directly to every stage that reads it.
- Only one stage uses a buffer that forward changes.
"""

from __future__ import annotations

import difflib
import itertools
import operator
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fpipe.autodiff.graph.guards import SYMBOLS
from fpipe.autodiff.graph.nodes import ancestors, is_random, nodes_in
from fpipe.interop.splitting.export import Exported
from fpipe.interop.splitting.size_guards import as_expression, conditions, symbols

aten = torch.ops.aten
MARK = "pippy._pipe_split.default"
"""The operation of `pipe_split`."""
PRODUCTS = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "convolution"}


@dataclass(frozen=True)
class End:
    """After the last run of a submodule."""

    name: str

    def __repr__(self) -> str:
        return f"End({self.name!r})"


@dataclass(frozen=True)
class Mark:
    """At the n-th `pipe_split()` of forward."""

    number: int

    def __repr__(self) -> str:
        return f"pipe_split() {self.number}"


Point = str | End | Mark
"""A string is the name of a submodule: before it runs. `"layers.4@1"` is before it runs a second time."""


@dataclass
class StagePart:
    """The nodes of a stage.

    Args:
        nodes: its operations, in order.
        entries: placeholders of parameters, and of buffers that forward does not change.
        state: buffers that forward changes.
        values: values of other stages that it reads.
        leaves: leaves of the batch that it reads.
        outputs: values that others read, by name; for the last stage, the module's output.
        sizes: for a node that is a size, the tensor and the axis from which it is read.
    """

    nodes: list[fx.Node]
    entries: list[fx.Node] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    values: list[fx.Node] = field(default_factory=list)
    leaves: list[fx.Node] = field(default_factory=list)
    outputs: Any = field(default_factory=dict)
    sizes: dict[fx.Node, tuple[fx.Node, Any]] = field(default_factory=dict)


class Flow:
    """The operations of a module, in order.

    Args:
        state: buffers that are state although forward does not change them, as in evaluation, with their stages.
    """

    def __init__(self, exported: Exported, state: Mapping[str, int] | None = None) -> None:
        self.exported = exported
        self.given = state or {}
        self.state = {*exported.changed, *self.given}
        self.nodes = [n for n in exported.graph.nodes if n.op in ("call_function", "get_attr") and not _only_checks(n)]
        self.place = {node: i for i, node in enumerate(self.nodes)}

    @cached_property
    def redone(self) -> set[fx.Node]:
        """The nodes that stages recompute: sizes, and nodes that depend on no parameter and draw no random numbers.

        A product with a buffer of two or more axes is not recomputed: that buffer is a weight, as of a quantised layer.
        """
        found = {n for n in self.exported.graph.nodes if n.op == "placeholder" and not self._is_given_by_module(n)}
        weights = {n for n in found.intersection(self.exported.tensors) if n.meta["val"].ndim > 1}
        for node in self.nodes:
            weighty = not weights.isdisjoint(node.all_input_nodes)
            plain = not (isinstance(node.target, torch._ops.HigherOrderOperator) or is_random(node))
            plain = plain and not (weighty and getattr(node.target, "__name__", "").partition(".")[0] in PRODUCTS)
            if node.op == "get_attr" or is_size(node) or (plain and found.issuperset(node.all_input_nodes)):
                found.add(node)
                weights.update([node] if weighty else [])
        return found

    def _is_given_by_module(self, node: fx.Node) -> bool:
        """Return whether a placeholder is a parameter, or a buffer that changes."""
        name = self.exported.tensors.get(node)
        return name is not None and (name in self.exported.parameters or name in self.state)

    @cached_property
    def work(self) -> list[int]:
        """The positions of the nodes that run in one stage only."""
        return [i for i, node in enumerate(self.nodes) if node not in self.redone]

    # Points

    def starts(self, points: Sequence[Point]) -> list[int]:
        """Return the positions where the stages after the first begin.

        Raises:
            ValueError: a point does not exist, is out of order, or leaves a stage empty.
        """
        found = [self.start(point) for point in points]
        for (first, low), (second, high) in itertools.pairwise(zip(points, found, strict=True)):
            if high < low:
                raise ValueError(f"{second!r} comes before {first!r} when the module runs: name them in that order")
        names = ["the beginning", *map(repr, points), "the end"]
        for stage, (low, high) in enumerate(itertools.pairwise([0, *found, len(self.nodes)])):
            if not any(low <= i < high for i in self.work):
                between = f"{names[stage]} and {names[stage + 1]}"
                raise ValueError(f"stage {stage} would be empty: no parameter is used between {between}")
        return found

    def start(self, point: Point) -> int:
        """Return the position where a point is.

        Raises:
            ValueError: the point does not exist.
        """
        if isinstance(point, Mark):
            if point.number > len(self.marks):
                raise ValueError(
                    f"forward comes by {len(self.marks)} pipe_split() in this mode, and is to be cut at number "
                    f"{point.number}"
                )
            return self.marks[point.number - 1]
        name, at, call = point if isinstance(point, str) else point.name, "", ""
        if name not in self.exported.modules and "@" in name:
            name, at, call = name.rpartition("@")
        calls, problem = self.calls.get(name, {}), ""
        if not calls and name in self.exported.modules:
            problem = f"{name!r} doesn't run in forward, or does nothing there"
        elif not calls:
            near = difflib.get_close_matches(name, self.calls, n=3, cutoff=0.5)
            meant = f": did you mean {' or '.join(map(repr, near))}?" if near else f"; there are {_some(self.calls)}"
            problem = f"there is no such submodule{meant}"
        elif at and not (call.isdigit() and int(call) in calls):
            problem = f"{name!r} runs {len(calls)} times, counted from 0"
        if problem:
            raise ValueError(f"there is no split point {point!r}: {problem}")
        chosen = [calls[int(call)]] if at else list(calls.values())
        return min(low for low, _ in chosen) if isinstance(point, str) else max(high for _, high in chosen) + 1

    @cached_property
    def marks(self) -> list[int]:
        """The positions of `pipe_split()` in forward."""
        before, found = -1, []
        for node in self.exported.graph.nodes:
            before = self.place.get(node, before)
            if str(node.target) == MARK:
                found.append(before + 1)
        return found

    @cached_property
    def calls(self) -> dict[str, dict[int, tuple[int, int]]]:
        """The first and last position of each run of each submodule. A list of modules runs with its items."""
        found: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for i, node in enumerate(self.nodes):
            for name, call in frames(node):
                parts = name.split(".")
                for own in range(1, len(parts) + 1):
                    within = ".".join(parts[:own])
                    number = call if within == name else 0
                    low, _ = found[within].get(number, (i, i))
                    found[within][number] = (low, i)
        return dict(found)

    @cached_property
    def names(self) -> dict[fx.Node, str]:
        """The names of values: submodule, operation, and a number if there are several."""
        found: dict[fx.Node, str] = {}
        counts = Counter[str]()
        for node in self.nodes:
            name = re.sub(r"_\d+$", "", node.name).strip("_")
            for within, call in frames(node)[-1:]:
                name = f"{within}@{call}.{name}" if call else f"{within}.{name}"
            found[node] = f"{name}_{counts[name]}" if counts[name] else name
            counts[name] += 1
        return found

    # Partition

    def cut(self, starts: Sequence[int]) -> list[StagePart]:
        """Return the stages that begin at these positions.

        Raises:
            ValueError: two stages touch a buffer that forward changes.
        """
        parts = [StagePart([]) for _ in range(len(starts) + 1)]
        for i in self.work:
            parts[bisect_right(starts, i)].nodes.append(self.nodes[i])
        return _Cutter(self, parts).cut()


def frames(node: fx.Node) -> list[tuple[str, int]]:
    """Return the submodules around a node, outermost first, and the number of the run of each."""
    found = []
    for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
        call = str(key).rpartition("@")[2]
        if name and not name.startswith("_empty_nn_module_stack"):
            found.append((name, int(call) if "@" in str(key) and call.isdigit() else 0))
    return found


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), SYMBOLS)


def _only_checks(node: fx.Node) -> bool:
    """Return whether a node only checks or marks something."""
    target = node.target
    return str(target) == MARK or (isinstance(target, torch._ops.OpOverload) and not target._schema.returns)


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(map(repr, found[:8])) + (" and more" if len(found) > 8 else "")


@dataclass
class _Cutter:
    flow: Flow
    parts: list[StagePart]
    home: dict[fx.Node, int] = field(default_factory=dict)

    def cut(self) -> list[StagePart]:
        for stage, part in enumerate(self.parts):
            for node in part.nodes:
                self.home[node] = self.home[node.all_input_nodes[0]] if node.target is operator.getitem else stage
        for stage, part in enumerate(self.parts):
            part.nodes = [node for node, home in self.home.items() if home == stage]
        self._place_state()
        for part in self.parts:
            self._close(part)
        self._witness()
        for part in self.parts[:-1]:
            read = {node: None for other in self.parts for node in other.values}
            part.outputs = {self.flow.names[node]: node for node in part.nodes if node in read and node in self.home}
        self.parts[-1].outputs = self.flow.exported.output
        return self.parts

    def _place_state(self) -> None:
        """Assign each buffer that changes to the stage that uses it."""
        exported = self.flow.exported
        holders = {name: node for node, name in exported.tensors.items()}
        for name in sorted(self.flow.state):
            touched = [*holders[name].users, *([exported.changed[name]] if name in exported.changed else [])]
            stages = {self.home[node] for node in touched if node in self.home} or {self.flow.given.get(name, 0)}
            if len(stages) > 1:
                raise ValueError(
                    f"stages {sorted(stages)} all use the buffer {name}, which forward changes: a buffer that changes "
                    "belongs to one stage, so cut where all its uses lie on one side"
                )
            self.parts[stages.pop()].state.append(name)

    def _close(self, part: StagePart) -> None:
        """Set what a stage reads, and add the nodes that it recomputes.

        Reading a size may need another tensor, and that tensor more nodes: repeat until nothing is missing.
        """
        exported, place, redone = self.flow.exported, self.flow.place, self.flow.redone
        own, needed = set(part.nodes), set[fx.Node]()
        ends = [n for node in part.nodes for n in node.all_input_nodes]
        ends += [exported.changed[name] for name in part.state if name in exported.changed]
        ends += nodes_in(exported.output) if part is self.parts[-1] else []

        def inputs(node: fx.Node) -> Sequence[fx.Node]:
            return node.all_input_nodes if node in redone and node.target is not aten.sym_size.int else ()

        while ends:
            needed |= ancestors(ends, lambda node: node not in own, inputs).keys()
            part.values = sorted((n for n in needed if n in place and n not in redone), key=place.__getitem__)
            part.leaves = [n for n in exported.leaves if n in needed]
            ends = self._read_sizes(part, own | needed)
        part.entries = [n for n, name in exported.tensors.items() if n in needed and name not in self.flow.state]
        part.nodes = sorted([*own, *(n for n in needed if n in place and n in redone)], key=place.__getitem__)

    def _witness(self) -> None:
        """Let the first stage read leaves whose sizes are in a condition that no other stage can check."""
        first, leaves = self.parts[0], list(self.flow.exported.leaves)
        for condition in conditions(leaves, self.flow.exported.ranges):
            needed = symbols(condition)
            if not any(needed <= _symbols(part.leaves) for part in self.parts):
                for leaf in leaves:
                    if _symbols([leaf]) & needed - _symbols(first.leaves):
                        first.leaves.append(leaf)

    def _read_sizes(self, part: StagePart, available: set[fx.Node]) -> list[fx.Node]:
        """Set the tensor that each size is read from. Return a missing tensor, or an empty list."""
        for node in available:
            if node.target is not aten.sym_size.int or node in part.sizes:
                continue
            (tensor,) = node.all_input_nodes
            if tensor in available:
                part.sizes[node] = tensor, node.args[1]
                continue
            for other in (*part.leaves, *part.values, *self.flow.exported.leaves):
                if (at := _axis(other, node.meta["val"])) is not None:
                    part.sizes[node] = other, at
                    return [other]
            return [tensor]
        return []


def _symbols(leaves: Iterable[fx.Node]) -> set[str]:
    """Return the symbols that are the size of an axis."""
    sizes = (as_expression(n) for leaf in leaves for n in leaf.meta["val"].shape)
    return {n for n in sizes if isinstance(n, str) and n.isidentifier()}


def _axis(tensor: fx.Node, size: torch.SymInt) -> int | None:
    """Return the axis of a tensor that has a size; None if there is none."""
    shape = getattr(tensor.meta.get("val"), "shape", ())
    return next((i for i, n in enumerate(shape) if isinstance(n, torch.SymInt) and str(n) == str(size)), None)
