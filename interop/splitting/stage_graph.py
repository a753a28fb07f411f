"""A stage of an exported module, as a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from fpipe.interop.modules.functions import Contents, named_tensors
from fpipe.interop.splitting.example import Call, accept, known
from fpipe.interop.splitting.export import Exported
from fpipe.interop.splitting.partition import Part, Point, hint, nodes_in
from fpipe.interop.splitting.size_guards import Sizes, conditions, written
from fpipe.stages.pytree import Path
from fpipe.stages.stage import Batch, Output, Read

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Recipe:
    """What the stages of a module have in common: how it was split, and what its tensors are called.

    Args:
        skeleton: the module, without memory.
        call: how forward is called.
        points: where stages begin, but for the first.
        names: the entry for each name in the module's state_dict.
        kept: values of buffers that no state_dict has.
        homes: the stage that each entry lives with.
        state: the entries that forward changes.
    """

    skeleton: nn.Module
    call: Call
    dynamic_shapes: Any
    device: torch.device
    points: tuple[Point, ...]
    names: Mapping[str, str]
    kept: Mapping[str, Tensor]
    homes: Mapping[str, int]
    state: frozenset[str]

    @cached_property
    def example(self) -> dict[Path, Any]:
        """What the example's batch has, by where it is."""
        return known(self.call, self.skeleton)


@dataclass(frozen=True, eq=False)
class GraphFunction:
    """`fn(params, *inputs) -> outputs`, or with state; names in params and state are the module's own.

    Args:
        graph: a function of entries, state, inputs and the device, in this order.
        entries: names in the params that it takes: parameters, and buffers that nothing changes.
        state: buffers that forward changes.
        sizes: what it is right for.
        unread: the sizes of what no stage reads of the batch, by where it is.
        contents: tensors on the meta device for what it holds and puts out.
        recipe: what all stages of the module have in common.
    """

    qualified: ClassVar[bool] = True

    graph: fx.GraphModule
    entries: tuple[str, ...]
    state: tuple[str, ...]
    reads: tuple[Read, ...]
    sizes: Sizes
    unread: Mapping[Path, tuple[int | str, ...]]
    contents: Contents
    recipe: Recipe

    @property
    def skeleton(self) -> nn.Module:
        """The whole module, without memory."""
        return self.recipe.skeleton

    @property
    def aliases(self) -> Mapping[str, str]:
        """The entry for each name in the module's state_dict."""
        return self.recipe.names

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """Values of buffers that no state_dict has."""
        return self.recipe.kept

    def accepts(self, batch: Any) -> None:
        """Raises:
        ValueError: the batch has what the module was split without.
        """
        accept(batch, self.recipe.example, self.unread)

    def __call__(self, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        state: Mapping[str, Tensor] = {}
        if self.state:
            state, *inputs = inputs  # type: ignore[assignment]
        for what, names, tree in (("params", self.entries, params), ("state", self.state, state)):
            if missing := [name for name in names if name not in tree]:
                raise ValueError(f"{what} lacks {', '.join(missing)}: interop.from_state_dict gives them by stage")
        self.sizes.check(self.reads, inputs)
        tensors = [*(params[name] for name in self.entries), *(state[name] for name in self.state), *inputs]
        device = next((x.device for x in tensors if isinstance(x, Tensor)), self.recipe.device)
        return self.graph(*tensors, device)


def function(
    exported: Exported, parts: Sequence[Part], stage: int, recipe: Recipe, held: Sequence[str]
) -> GraphFunction:
    """Write a stage's graph out.

    Args:
        held: the entries of the module that live with the stage, used or not.
    """
    part = parts[stage]
    by_name = {name: node for node, name in exported.tensors.items()}
    state = [by_name[name] for name in sorted(part.state)]
    graph, root = fx.Graph(), nn.Module()
    made: dict[fx.Node, Any] = {}
    for node in (*part.entries, *state, *part.values, *part.leaves):
        made[node] = graph.placeholder(node.name)
    device = graph.placeholder("device")
    used = {n for node in part.nodes for n in node.all_input_nodes} | {*nodes_in(part.outputs)}
    for node in used.intersection(exported.constants):
        setattr(root, node.name, exported.constants[node])
        made[node] = graph.call_method("to", (graph.get_attr(node.name), device))
    for node in part.nodes:
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(exported.root, str(node.target)))
            made[node] = graph.get_attr(str(node.target))
            continue
        args, kwargs = map_aggregate(
            (part.sizes.get(node, node.args), node.kwargs),
            lambda x: made[x] if isinstance(x, fx.Node) else device if _same(x, exported.device) else x,
        )
        made[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    result = fx.map_arg(part.outputs, made.__getitem__)
    if state:
        new = {exported.tensors[node]: made[exported.changed.get(exported.tensors[node], node)] for node in state}
        result = (result, {name: graph.call_function(aten.detach.default, (x,)) for name, x in new.items()})
    graph.output(result)
    sources = {node: Output(i, name) for i, other in enumerate(parts[:-1]) for name, node in other.outputs.items()}
    outputs = part.outputs if stage < len(parts) - 1 else {}
    entries = tuple(exported.tensors[node] for node in part.entries)
    tensors = dict(named_tensors(recipe.skeleton))
    return GraphFunction(
        graph=fx.GraphModule(root, graph),
        entries=entries,
        state=tuple(exported.tensors[node] for node in state),
        reads=(*(sources[node] for node in part.values), *(Batch(*exported.leaves[node]) for node in part.leaves)),
        sizes=Sizes(
            (*(None for _ in part.values), *(tuple(map(written, node.meta["val"].shape)) for node in part.leaves)),
            conditions(part.leaves, exported.ranges),
        ),
        unread={
            path: tuple(map(written, node.meta["val"].shape))
            for node, path in exported.leaves.items()
            if not any(node in other.leaves for other in parts)
        },
        contents=Contents(
            {name: tensors[name] for name in sorted({*entries, *held}, key=list(tensors).index)},
            {exported.tensors[node]: tensors[exported.tensors[node]] for node in state},
            {name: _blank(node) for name, node in outputs.items()},
        ),
        recipe=recipe,
    )


def _same(x: Any, device: torch.device) -> bool:
    return isinstance(x, torch.device) and x.type == device.type and (x.index or 0) == (device.index or 0)


def _blank(node: fx.Node) -> Tensor:
    """Of the size it has in the example."""
    value = node.meta["val"]
    return torch.empty(list(map(hint, value.shape)), dtype=value.dtype, device="meta")
