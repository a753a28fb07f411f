"""Choose split points that make the largest stage as small as possible."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from fpipe.autodiff.graph.guards import hint
from fpipe.autodiff.graph.nodes import nodes_in
from fpipe.devices import device_of
from fpipe.interop.splitting.opaque import is_opaque
from fpipe.interop.splitting.partition import End, Flow, Point, frames, is_size
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pipeline import Pipeline

INTENSITY = 32
"""Arithmetic operations in the time of moving one byte: about 10 on CPUs, about 100 on GPUs."""
SLACK = 1.05
"""The largest stage may be larger than the optimum by this factor, to send less and to split at outer modules."""
WIDER = 1.5
"""A candidate is dropped if it sends more than another nearby, by this factor."""
REPEATS = 4


@dataclass(frozen=True)
class CutCandidate:
    """A place where a stage may begin.

    Args:
        start: the position of its first operation.
        point: its name.
        depth: the number of submodules around it.
        crossing: the bytes that cross it, for a microbatch of the example's size.
    """

    start: int
    point: Point
    depth: int
    crossing: int


def places(flow: Flow, module: nn.Module) -> list[CutCandidate]:
    """Return the places where a submodule with parameters begins or ends, with operations on both sides."""
    holding = {name.rpartition(".")[0] for name, _ in module.named_parameters(remove_duplicate=False)}

    def trained(name: str) -> bool:
        return any(part == name or part.startswith(f"{name}.") for part in holding)

    before: list[tuple[str, int]] = []
    crossing, whole = _crossing(flow), _whole(flow)
    candidates = []
    for i in flow.work:
        now = frames(flow.nodes[i])
        left = [frame for frame in before if frame not in now and trained(frame[0])]
        entered = [frame for frame in now if frame not in before and trained(frame[0])]
        within = len([frame for frame in now if frame in before])
        before = now
        is_free = i > flow.work[0] and not any(low < i <= high for low, high in whole)
        if is_free and (point := _point(flow, i, entered, left)):
            candidates.append(CutCandidate(flow.start(point), point, within, crossing[i]))
    return candidates


def _point(flow: Flow, i: int, entered: list[tuple[str, int]], left: list[tuple[str, int]]) -> Point | None:
    """Return a name for the position of an operation, if one exists."""
    points: list[Point] = [f"{name}@{call}" if call else name for name, call in entered[:1]]
    points += [End(name) for name, _ in left[:1]]
    return next((p for p in points if flow.work[bisect_left(flow.work, flow.start(p)) :][:1] == [i]), None)


def _whole(flow: Flow) -> list[tuple[int, int]]:
    """Return the first and last position that uses each buffer that changes. One stage must have them all."""
    spans = []
    for node, name in flow.exported.tensors.items():
        if name in flow.state:
            uses = [flow.place[n] for n in (*node.users, flow.exported.changed.get(node, node)) if n in flow.place]
            spans.append((min(uses, default=0), max(uses, default=0)))
    return spans


def _crossing(flow: Flow) -> list[int]:
    """Return, by position, the bytes of values that are computed before it and used from it on."""
    ends = set(nodes_in(flow.exported.output))
    delta = [0] * (len(flow.nodes) + 1)
    for i in flow.work:
        node = flow.nodes[i]
        uses = [flow.place[u] for u in node.users if u in flow.place] + [len(flow.nodes)] * (node in ends)
        if uses and isinstance(node.meta.get("val"), Tensor) and max(uses) > i:
            size = bytes_of(node.meta["val"])
            delta[i + 1] += size
            delta[min(max(uses) + 1, len(flow.nodes))] -= size
    return list(itertools.accumulate(delta))


def bytes_of(value: Tensor) -> int:
    """Return a tensor's bytes, with the example's sizes for symbols."""
    return int(math.prod(map(hint, value.shape))) * value.element_size()


def estimate(flow: Flow) -> list[float]:
    """Return each operation's cost: the bytes that it moves, or its arithmetic in bytes, whichever is larger."""
    costs = [0.0] * len(flow.nodes)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), FakeTensorMode(), counter:
        for i, node in enumerate(flow.nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: pytree.tree_map(_sized, n.meta.get("val")))
            before = counter.get_total_flops()
            result = _run(node, args, kwargs)
            flops = counter.get_total_flops() - before
            costs[i] = max(flops / INTENSITY, _moved((args, kwargs), result))
    return costs


def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return a node's result for fakes. For a condition, or an opaque call, return fakes like the traced result."""
    is_kept = is_opaque(node) or isinstance(node.target, torch._ops.HigherOrderOperator)
    if node.op == "get_attr" or is_size(node) or is_kept:
        return pytree.tree_map(_sized, node.meta.get("val"))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _sized(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return hint(value)
    shape, strides = (list(map(hint, sizes)) for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def _moved(arguments: Any, result: Any) -> int:
    """Return the bytes read and written: 0 for a view."""
    written, read = tensors_in(result), tensors_in(arguments)
    seen = {x.untyped_storage()._cdata for x in read}
    if all(x.untyped_storage()._cdata in seen for x in written):
        return 0
    return sum(bytes_of(x) for x in (*written, *read))


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def chosen(weights: Sequence[float], candidates: Sequence[CutCandidate], stages: int) -> list[Point]:
    """Return the split points that make the largest stage smallest; among equals, those that send least.

    Args:
        weights: the cost of each operation.

    Raises:
        ValueError: there are too few candidates.
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    if stages - 1 > len(candidates):
        raise ValueError(
            f"there are {len(candidates)} places to cut at, where submodules with parameters begin or end: too few for "
            f"{stages} stages"
        )
    near = total[-1] / (2 * stages)
    at = np.array([total[place.start] for place in candidates])
    least = [min(p.crossing for p, x in zip(candidates, at, strict=True) if abs(x - here) <= near) for here in at]
    cheap = [place for place, low in zip(candidates, least, strict=True) if place.crossing <= WIDER * low]
    cheap = cheap if len(cheap) >= stages - 1 else list(candidates)
    bounds = np.array([0.0, *(total[place.start] for place in cheap), total[-1]])
    typical = statistics.median(place.crossing for place in cheap) or 1 if cheap else 1
    penalties = np.array([0.0, *(p.crossing / typical + p.depth / 4 for p in cheap), 0.0])
    return [cheap[i - 1].point for i in _cut(bounds, penalties, stages)]


def _cut(bounds: np.ndarray, penalties: np.ndarray, stages: int) -> list[int]:
    """Return the indices of the inner bounds."""
    order = np.arange(len(bounds))
    sizes = np.where(order[:, None] < order[None], bounds[None] - bounds[:, None], np.inf)
    largest, _ = _cheapest(sizes, stages, np.maximum)
    _, inner = _cheapest(np.where(sizes <= largest * SLACK, penalties[:, None], np.inf), stages, np.add)
    return inner


def _cheapest(costs: np.ndarray, stages: int, joined: Callable[..., Any]) -> tuple[float, list[int]]:
    """Return the least cost of a path of so many edges from the first bound to the last, and the bounds between."""
    cost, steps = costs[0], []
    for _ in range(stages - 1):
        paths = joined(cost[:, None], costs)
        steps.append(paths.argmin(axis=0))
        cost = paths.min(axis=0)
    path = [len(costs) - 1]
    for step in reversed(steps):
        path.append(int(step[path[-1]]))
    return cost[-1], path[:0:-1]


def measure(pipeline: Pipeline, params: Mapping[int, Any], state: Mapping[int, Any], batch: Any) -> list[float]:
    """Return the seconds of each stage's forward and backward by eager autograd: the minimum of several runs."""
    least = [float("inf")] * len(pipeline.stages)
    for _ in range(REPEATS):
        outputs: dict[int, Any] = {}
        for index, stage in enumerate(pipeline.stages):
            arguments = stage.arguments(outputs, stage.given(Microbatch(batch, None)))
            own, inputs = pytree.tree_map_only(Tensor, _leaf, (pipeline.params_of(params, index), arguments))
            starts = [x for x in tensors_in((own, inputs)) if x.requires_grad]
            begun = time.perf_counter()
            result, _ = stage(own, state.get(index), inputs)
            ends = [x for x in tensors_in(result) if x.requires_grad]
            if ends and starts:
                torch.autograd.grad(ends, starts, [torch.ones_like(x) for x in ends], allow_unused=True)
            if ends:
                device_of(ends[0].device).synchronize()
            least[index] = min(least[index], time.perf_counter() - begun)
            outputs[index] = result
    return least


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())
