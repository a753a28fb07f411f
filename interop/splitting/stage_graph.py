"""Write a stage of an exported module as a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from fpipe.autodiff.graph.guards import hint
from fpipe.autodiff.graph.nodes import nodes_in
from fpipe.interop.modules.functions import named_tensors
from fpipe.interop.splitting.example import ExampleCall, accept, known
from fpipe.interop.splitting.export import Exported
from fpipe.interop.splitting.partition import Point, StagePart
from fpipe.interop.splitting.size_guards import Sizes, as_expression, conditions
from fpipe.stages.pytree import Path
from fpipe.stages.stage import Batch, Original, Output, Read, StageSpec

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class SplitSpec:
    """A module, and its cuts into stages; the same for all stages.

    Args:
        skeleton: the module, on the meta device.
        call: the arguments of forward, on the meta device.
        names: the entry for each name in the module's state_dict.
        nonpersistent_buffers: values of the buffers that are not in the state_dict.
        originals: the parameters of the original module.
        points: where the stages after the first begin.
        homes: the stage that owns each entry.
        state: the entries that forward changes.
    """

    skeleton: nn.Module
    call: ExampleCall
    dynamic_shapes: Any
    device: torch.device
    names: Mapping[str, str]
    nonpersistent_buffers: Mapping[str, Tensor]
    originals: tuple[Original, ...]
    points: tuple[Point, ...] = ()
    homes: Mapping[str, int] = field(default_factory=dict)
    state: frozenset[str] = frozenset()

    @cached_property
    def example(self) -> dict[Path, Any]:
        """The leaves of the example's batch, by path."""
        return known(self.call, self.skeleton)


@dataclass(frozen=True, eq=False)
class GraphFunction:
    """`fn(params, *inputs) -> outputs`, or with state; names in params and state are the module's own.

    Args:
        graph: a function of entries, state, inputs and the device, in this order.
        entries: names of the params that it reads: parameters, and buffers that forward does not change.
        state: names of the buffers that forward changes.
        sizes: the sizes for which it is valid.
        unread: the sizes of the tensors of the batch that no stage reads.
    """

    qualified: ClassVar[bool] = True

    graph: fx.GraphModule
    entries: tuple[str, ...]
    state: tuple[str, ...]
    reads: tuple[Read, ...]
    sizes: Sizes
    unread: Sizes
    spec: StageSpec
    split_spec: SplitSpec

    def __repr__(self) -> str:
        return f"<GraphFunction: {len(self.entries)} entries of params, {len(self.state)} of state>"

    @property
    def skeleton(self) -> nn.Module:
        """The whole module, on the meta device."""
        return self.split_spec.skeleton

    @property
    def aliases(self) -> Mapping[str, str]:
        """The entry for each name in the module's state_dict."""
        return self.split_spec.names

    @property
    def nonpersistent_buffers(self) -> Mapping[str, Tensor]:
        """Values of the buffers that are not in the state_dict."""
        return self.split_spec.nonpersistent_buffers

    @cached_property
    def originals(self) -> Sequence[Original]:
        """The parameters of the module that this stage has."""
        return [original for original in self.split_spec.originals if original.name in self.spec.params]

    def accepts(self, batch: Any) -> None:
        """Raise ValueError if the stages would ignore a part of the batch."""
        accept(batch, self.split_spec.example, self.unread)

    def __call__(self, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        state, inputs = (inputs[0], inputs[1:]) if self.state else ({}, inputs)
        for what, names, tree in (("params", self.entries, params), ("state", self.state, state)):
            if missing := [name for name in names if name not in tree]:
                raise ValueError(f"{what} lacks {', '.join(missing)}: interop.from_state_dict gives them by stage")
        self.sizes.check({read.path: x for read, x in zip(self.reads, inputs, strict=True) if isinstance(read, Batch)})
        tensors = [*(params[name] for name in self.entries), *(state[name] for name in self.state), *inputs]
        device = next((x.device for x in tensors if isinstance(x, Tensor)), self.split_spec.device)
        return self.graph(*tensors, device)


def stage_function(
    exported: Exported, parts: Sequence[StagePart], stage: int, split_spec: SplitSpec, owned: Sequence[str]
) -> GraphFunction:
    """Return the function of a stage.

    Args:
        owned: the entries of the module that the stage owns, used or not.
    """
    part = parts[stage]
    entries, state = (tuple(exported.tensors[node] for node in nodes) for nodes in (part.entries, part.state))
    axes = {exported.leaves[node]: _axes(node) for node in part.leaves}
    return GraphFunction(
        graph=_graph(exported, part),
        entries=entries,
        state=state,
        reads=_reads(exported, parts, part),
        sizes=Sizes(axes, conditions(part.leaves, exported.ranges)),
        unread=_unread(exported, parts),
        spec=_spec({*entries, *owned}, state, {} if stage == len(parts) - 1 else part.outputs, split_spec),
        split_spec=split_spec,
    )


def _graph(exported: Exported, part: StagePart) -> fx.GraphModule:
    """Return a stage's operations as a function of entries, state, inputs and the device, in this order."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in (*part.entries, *part.state, *part.values, *part.leaves):
        copies[node] = graph.placeholder(node.name)
    device = graph.placeholder("device")
    used = {n for node in part.nodes for n in node.all_input_nodes} | {*nodes_in(part.outputs)}
    for node in used.intersection(exported.constants):
        copies[node] = graph.call_method("to", (graph.get_attr(node.name), device))

    def copied(x: Any) -> Any:
        return copies[x] if isinstance(x, fx.Node) else device if _same(x, exported.device) else x

    for node in part.nodes:
        args, kwargs = map_aggregate((part.sizes.get(node, node.args), node.kwargs), copied)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs)
    result = fx.map_arg(part.outputs, copies.__getitem__)
    if part.state:
        new = {exported.tensors[node]: copies[exported.changed.get(node, node)] for node in part.state}
        result = result, {name: graph.call_function(aten.detach.default, (x,)) for name, x in new.items()}
    graph.output(result)
    return fx.GraphModule(exported.root, graph)


def _reads(exported: Exported, parts: Sequence[StagePart], part: StagePart) -> tuple[Read, ...]:
    sources = {node: Output(i, name) for i, other in enumerate(parts[:-1]) for name, node in other.outputs.items()}
    return *(sources[node] for node in part.values), *(Batch(*exported.leaves[node]) for node in part.leaves)


def _unread(exported: Exported, parts: Sequence[StagePart]) -> Sizes:
    """Return the fixed sizes of leaves that no stage reads. Axis 0 is free: it has the rows of all microbatches."""
    read = {node for part in parts for node in part.leaves}
    axes = {path: _axes(node) for node, path in exported.leaves.items() if node not in read}
    return Sizes({p: tuple(n if i and isinstance(n, int) else None for i, n in enumerate(a)) for p, a in axes.items()})


def _spec(entries: set[str], state: Sequence[str], outputs: Mapping[str, fx.Node], split_spec: SplitSpec) -> StageSpec:
    tensors = dict(named_tensors(split_spec.skeleton))
    return StageSpec(
        {name: x for name, x in tensors.items() if name in entries},
        {name: tensors[name] for name in state},
        {name: _blank(node) for name, node in outputs.items()},
    )


def _axes(node: fx.Node) -> tuple[int | str, ...]:
    """Return the sizes of a tensor: numbers, or expressions of symbols."""
    return tuple(map(as_expression, node.meta["val"].shape))


def _same(x: Any, device: torch.device) -> bool:
    return isinstance(x, torch.device) and x.type == device.type and (x.index or 0) == (device.index or 0)


def _blank(node: fx.Node) -> Tensor:
    """Return a meta tensor of the example's size."""
    value = node.meta["val"]
    return torch.empty(list(map(hint, value.shape)), dtype=value.dtype, device="meta")
