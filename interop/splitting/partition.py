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
from fpipe.interop.splitting.opaque import is_opaque
from fpipe.interop.splitting.size_guards import as_expression, conditions, symbols

aten = torch.ops.aten
MARK, PIPE_SPLIT = "pippy._pipe_split.default", "pipe_split()"
"""The operation of `pipe_split`, and the name of its runs among the split points."""
PRODUCTS = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "convolution"}


@dataclass(frozen=True)
class End:
    """After the last run of a submodule."""

    name: str

    def __repr__(self) -> str:
        return f"End({self.name!r})"


Point = str | End
"""A string is the name of a submodule: before it runs. `"layers.4@1"` is before it runs a second time.

`"pipe_split()@0"` is where forward first calls `pipe_split`.
"""


@dataclass
class StagePart:
    """The nodes of a stage.

    Args:
        nodes: its operations, in order.
        entries: placeholders of parameters, and of buffers that forward does not change.
        state: placeholders of buffers that forward changes, in the order of their names.
        values: values of other stages that it reads.
        leaves: leaves of the batch that it reads.
        outputs: values that others read, by name; for the last stage, the module's output.
        sizes: for a node that is a size, the tensor and the axis from which it is read.
    """

    nodes: list[fx.Node]
    entries: list[fx.Node] = field(default_factory=list)
    state: list[fx.Node] = field(default_factory=list)
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
        self.state_homes = state or {}
        self.state = {exported.tensors[node] for node in exported.changed} | self.state_homes.keys()
        self.nodes = [node for node in exported.root.graph.nodes if _computes(node)]
        self.place = {node: i for i, node in enumerate(self.nodes)}

    @cached_property
    def redone(self) -> set[fx.Node]:
        """The nodes that stages recompute: sizes, and nodes that depend on no parameter and draw no random numbers.

        A product with a buffer of two or more axes is not recomputed: that buffer is a weight, as of a quantised layer.
        """
        exported, changing = self.exported, self.exported.parameters | self.state
        fixed = {node for node, name in exported.tensors.items() if name not in changing}
        redone = {*fixed, *(n for n in exported.root.graph.find_nodes(op="placeholder") if n not in exported.tensors)}
        weights = {n for n in fixed if n.meta["val"].ndim > 1}
        for node in self.nodes:
            weighty = not weights.isdisjoint(node.all_input_nodes)
            plain = not (isinstance(node.target, torch._ops.HigherOrderOperator) or is_opaque(node) or is_random(node))
            plain = plain and not (weighty and getattr(node.target, "__name__", "").partition(".")[0] in PRODUCTS)
            if node.op == "get_attr" or is_size(node) or (plain and redone.issuperset(node.all_input_nodes)):
                redone.add(node)
                weights.update([node] if weighty else [])
        return redone

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
        positions = [self.start(point) for point in points]
        for (first, low), (second, high) in itertools.pairwise(zip(points, positions, strict=True)):
            if high < low:
                raise ValueError(f"{second!r} comes before {first!r} when the module runs: name them in that order")
        names = ["the beginning", *map(repr, points), "the end"]
        for stage, (low, high) in enumerate(itertools.pairwise([0, *positions, len(self.nodes)])):
            if not any(low <= i < high for i in self.work):
                between = f"{names[stage]} and {names[stage + 1]}"
                raise ValueError(f"stage {stage} would be empty: no parameter is used between {between}")
        return positions

    def start(self, point: Point) -> int:
        """Return the position where a point is.

        Raises:
            ValueError: the point does not exist.
        """
        name, at, call = point if isinstance(point, str) else point.name, "", ""
        if name not in self.exported.modules and "@" in name:
            name, at, call = name.rpartition("@")
        calls, problem = self.calls.get(name, {}), ""
        if not calls and name in {*self.exported.modules, PIPE_SPLIT}:
            problem = f"{name!r} doesn't run in forward, or does nothing there"
        elif not calls:
            near = difflib.get_close_matches(name, self.calls, n=3, cutoff=0.5)
            meant = f": did you mean {' or '.join(map(repr, near))}?" if near else f"; there are {_some(self.calls)}"
            problem = f"there is no such submodule{meant}"
        elif at and not (call.isdigit() and int(call) in calls):
            problem = f"{name!r} runs {len(calls)} times, counted from 0"
        if problem:
            raise ValueError(f"at: there is no split point {point!r}: {problem}")
        chosen = [calls[int(call)]] if at else list(calls.values())
        return min(low for low, _ in chosen) if isinstance(point, str) else max(high for _, high in chosen) + 1

    @cached_property
    def marks(self) -> list[int]:
        """The positions of `pipe_split()` in forward."""
        before, positions = -1, []
        for node in self.exported.root.graph.nodes:
            before = self.place.get(node, before)
            if str(node.target) == MARK:
                positions.append(before + 1)
        return positions

    @cached_property
    def calls(self) -> dict[str, dict[int, tuple[int, int]]]:
        """The first and last position of each run of each submodule. A list of modules runs with its items."""
        runs: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        runs |= {PIPE_SPLIT: {i: (at, at) for i, at in enumerate(self.marks)}} if self.marks else {}
        for i, node in enumerate(self.nodes):
            for name, call in frames(node):
                for within in itertools.accumulate(name.split("."), "{}.{}".format):
                    number = call if within == name else 0
                    low, _ = runs[within].get(number, (i, i))
                    runs[within][number] = (low, i)
        return dict(runs)

    @cached_property
    def names(self) -> dict[fx.Node, str]:
        """The names of values: submodule, operation, and a number if there are several."""
        names: dict[fx.Node, str] = {}
        counts = Counter[str]()
        for node in self.nodes:
            name = re.sub(r"_\d+$", "", node.name).strip("_")
            for within, call in frames(node)[-1:]:
                name = f"{within}@{call}.{name}" if call else f"{within}.{name}"
            names[node] = f"{name}_{counts[name]}" if counts[name] else name
            counts[name] += 1
        return names

    # Partition

    def cut(self, starts: Sequence[int]) -> list[StagePart]:
        """Return the stages that begin at these positions.

        Raises:
            ValueError: two stages touch a buffer that forward changes.
        """
        home: dict[fx.Node, int] = {}
        for i in self.work:
            node = self.nodes[i]
            is_item = node.target is operator.getitem
            home[node] = home[node.all_input_nodes[0]] if is_item else bisect_right(starts, i)
        parts = [StagePart([node for node in home if home[node] == stage]) for stage in range(len(starts) + 1)]
        parts[-1].outputs = self.exported.output
        _place_state(self, parts, home)
        for part in parts:
            _close(self, part)
        _witness(self.exported, parts)
        for part in parts[:-1]:
            read = {node: None for other in parts for node in other.values}
            part.outputs = {self.names[node]: node for node in part.nodes if node in read and node in home}
        return parts


def frames(node: fx.Node) -> list[tuple[str, int]]:
    """Return the submodules around a node, outermost first, and the number of the run of each."""
    runs = []
    for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
        _, at, call = str(key).rpartition("@")
        if name and not name.startswith("_empty_nn_module_stack"):
            runs.append((name, int(call) if at and call.isdigit() else 0))
    return runs


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), SYMBOLS)


def _computes(node: fx.Node) -> bool:
    """Return whether a node computes a value, rather than checks or marks something."""
    is_check = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns
    return node.op in ("call_function", "get_attr") and not is_check


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:8])) + (" and more" if len(listed) > 8 else "")


def _place_state(flow: Flow, parts: Sequence[StagePart], home: Mapping[fx.Node, int]) -> None:
    """Assign each buffer that changes to the stage that uses it."""
    for node, name in sorted(flow.exported.tensors.items(), key=lambda item: item[1]):
        if name not in flow.state:
            continue
        touched = (*node.users, flow.exported.changed.get(node, node))
        stages = {home[n] for n in touched if n in home} or {flow.state_homes.get(name, 0)}
        if len(stages) > 1:
            raise ValueError(
                f"stages {sorted(stages)} all use the buffer {name}, which forward changes: a buffer that changes "
                "belongs to one stage, so cut where all its uses lie on one side"
            )
        parts[stages.pop()].state.append(node)


def _close(flow: Flow, part: StagePart) -> None:
    """Set what a stage reads, and add the nodes that it recomputes.

    Reading a size may need another tensor, and that tensor more nodes: repeat until nothing is missing.
    """
    exported, place, redone = flow.exported, flow.place, flow.redone
    own, needed = set(part.nodes), set[fx.Node]()
    ends = [n for node in part.nodes for n in node.all_input_nodes] + nodes_in(part.outputs)
    ends += [exported.changed[node] for node in part.state if node in exported.changed]

    def inputs(node: fx.Node) -> Sequence[fx.Node]:
        return node.all_input_nodes if node in redone and node.target is not aten.sym_size.int else ()

    while ends:
        needed |= ancestors(ends, lambda node: node not in own, inputs).keys()
        part.values = sorted((n for n in needed if n in place and n not in redone), key=place.__getitem__)
        part.leaves = [n for n in exported.leaves if n in needed]
        ends = _read_sizes(flow, part, own | needed)
    part.entries = [n for n, name in exported.tensors.items() if n in needed and name not in flow.state]
    part.nodes = sorted([*own, *(n for n in needed if n in place and n in redone)], key=place.__getitem__)


def _read_sizes(flow: Flow, part: StagePart, available: set[fx.Node]) -> list[fx.Node]:
    """Set the tensor that each size is read from. Return a missing tensor, or an empty list."""
    for node in flow.nodes:  # in their order, which is the same on every rank
        if node not in available or node.target is not aten.sym_size.int or node in part.sizes:
            continue
        (tensor,) = node.all_input_nodes
        others = (*part.leaves, *part.values, *flow.exported.leaves)
        axes = [(other, at) for other in others if (at := _axis(other, node.meta["val"])) is not None]
        if tensor not in available and not axes:
            return [tensor]
        part.sizes[node] = (tensor, node.args[1]) if tensor in available else axes[0]
        if part.sizes[node][0] not in available:
            return [part.sizes[node][0]]
    return []


def _witness(exported: Exported, parts: Sequence[StagePart]) -> None:
    """Let the first stage read leaves whose sizes are in a condition that no other stage can check."""
    first = parts[0]
    for condition in conditions(list(exported.leaves), exported.ranges):
        needed = symbols(condition)
        if not any(needed <= _symbols(part.leaves) for part in parts):
            for leaf in exported.leaves:
                if _symbols([leaf]) & needed - _symbols(first.leaves):
                    first.leaves.append(leaf)


def _symbols(leaves: Iterable[fx.Node]) -> set[str]:
    """Return the symbols that are the size of an axis."""
    sizes = (as_expression(n) for leaf in leaves for n in leaf.meta["val"].shape)
    return {n for n in sizes if isinstance(n, str) and n.isidentifier()}


def _axis(tensor: fx.Node, size: torch.SymInt) -> int | None:
    """Return the axis of a tensor that has a size; None if there is none."""
    shape = getattr(tensor.meta.get("val"), "shape", ())
    return next((i for i, n in enumerate(shape) if isinstance(n, torch.SymInt) and str(n) == str(size)), None)
