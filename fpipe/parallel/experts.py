"""Mixtures of experts: a router chooses a few of many networks for each token, and their outputs are added.

The experts may be spread over processes that have different tokens. Every process then sends each expert its tokens, in
as many slots as the capacity says, and gets the outputs back. All shapes are known before the router has chosen, so
that a stage is traced once; the choices and sums are the same in every run.

Without a group, the same functions compute all experts here. A token that finds room does so on any number of
processes, because an expert has its own slots for the tokens of each.

Sources: GShard (https://arxiv.org/abs/2006.16668), Switch Transformer (https://arxiv.org/abs/2101.03961).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe.parallel.collectives import all_to_all
from fpipe.parallel.group import Group, named
from fpipe.parallel.placed import check_apart, is_whole, mapped, mesh_of, on_each, replicated, whole
from fpipe.stages.pytree import flatten, paths_of, short


class Routing(NamedTuple):
    """The experts of each token.

    Args:
        experts: their numbers, the most probable first, of shape [tokens, k].
        weights: the factors of their outputs, of shape [tokens, k].
        probabilities: of all experts, of shape [tokens, experts].
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


@on_each
def route(logits: Tensor, k: int, *, renormalise: bool | None = None) -> Routing:
    """Choose the k most probable experts of each token, by the softmax of a router's outputs.

    Args:
        logits: of shape [..., experts]. The softmax is computed in float32, or wider (Switch Transformer, section 2.4).
        renormalise: divide the weights of a token by their sum, as in GShard. By default where k is more than 1: with
            one expert the router is trained through the expert's probability (Switch Transformer, equation 2).

    Raises:
        ValueError: k is not between 1 and the number of experts.

    >>> routing = route(torch.tensor([[0.0, 3.0, 2.0], [1.0, 0.0, -1.0]]), k=2)
    >>> routing.experts
    tensor([[1, 2],
            [0, 1]])
    >>> torch.allclose(routing.weights.sum(-1), torch.ones(2))
    True
    """
    count = logits.shape[-1]
    if not isinstance(k, int) or not 1 <= k <= count:
        raise ValueError(f"k must be a whole number between 1 and the number of experts, {count}, not {k}")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.reshape(-1, count).softmax(-1, dtype=dtype)
    weights, experts = probabilities.topk(k)
    if renormalise or (renormalise is None and k > 1):
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights, probabilities)


@on_each
def balance_loss(routing: Routing) -> Tensor:
    """Return the load-balance loss of a router (Switch Transformer, equations 4 to 6).

    It is the number of experts times the sum, over experts, of their share of all choices times their mean probability:
    1 if both are uniform. A share counts tokens beyond the capacity too, and has no gradient.

    >>> balance_loss(route(torch.eye(4), k=1))
    tensor(1.)
    """
    share = _load(routing) / routing.experts.numel()
    return len(share) * (share * routing.probabilities.mean(0)).sum()


@on_each
def dropped(routing: Routing, capacity_factor: float | None) -> Tensor:
    """Return the share of the choices that are beyond the capacity of their expert: a number from 0 to 1.

    >>> dropped(route(torch.tensor([[1.0, 0.0]] * 4), k=1), capacity_factor=1.0)
    tensor(0.5000)
    """
    load = _load(routing)
    return (load - _capacity(routing, capacity_factor)).clamp(min=0).sum() / routing.experts.numel()


def mixture_of_experts(
    function: Callable[[Any, Tensor], Tensor],
    params: Any,
    x: Tensor,
    routing: Routing,
    group: Group = None,
    *,
    capacity_factor: float | None = 1.25,
) -> Tensor:
    """Return the sum of the outputs of each token's experts, times their weights.

    An expert has `ceil(capacity_factor * k * tokens / experts)` slots for the tokens of each process. First choices
    come before second ones, and tokens in their order (GShard, algorithm 1). A choice beyond that is dropped: the
    expert adds nothing to the token. Slots without a token are zeros.

    Args:
        function: computes all experts of this process: `function(params, inputs)`, with inputs of shape
            [experts here, slots, width], returns their outputs, of shape [experts here, slots, width of the outputs].
            From a function of one expert, `torch.func.vmap` makes one of all.
        params: a tree of tensors, each with the experts of this process along its first dimension.
        x: the tokens, of shape [..., width].
        routing: of the same tokens.
        group: the processes over which the experts are spread in equal numbers, in their order: a process group, or a
            dimension of a DeviceMesh. Each has as many tokens, and calls the function. None: all experts are here.
            Where the stage's params are placed over other processes, as those of tensor parallelism are, each of these
            computes the same; with params of experts that are cut, its part.
        capacity_factor: by how much an expert's slots exceed its share of the choices; None for as many slots as
            tokens, so that none is dropped.

    Returns:
        A tensor of shape [..., width of the outputs], in their dtype.

    Raises:
        ValueError: the experts can't be spread over the group in equal numbers, params have other experts than these,
            routing is of other tokens, the capacity is not positive, or the function returns other shapes.
        TypeError: group is neither, or the function returns no tensor.

    >>> experts = torch.tensor([1.0, 10.0]).view(2, 1, 1)  # each multiplies by a number
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> routing = route(torch.tensor([[8.0, -8.0], [-8.0, 8.0]]), k=1)
    >>> mixture_of_experts(torch.mul, experts, x, routing, capacity_factor=1.0).round()
    tensor([[ 1.],
            [20.]])
    """
    mesh = mesh_of(x, routing, params)
    if mesh is None:
        return _mixture(function, params, x, routing, group, capacity_factor)
    check_apart(group, mesh)
    function, params = _on_each_process(function, params, mesh)
    y = _mixture(function, params, whole(x), mapped(whole, routing), group, capacity_factor)
    return cast(Tensor, replicated(y, mesh))


def _on_each_process(
    function: Callable[[Any, Tensor], Tensor], params: Any, mesh: DeviceMesh
) -> tuple[Callable[[Any, Tensor], Tensor], Any]:
    """Return a function of a tensor that each process of a mesh has whole, and its params."""
    if all(map(is_whole, flatten(params).leaves)):
        return function, mapped(whole, params)
    return lambda params, sent: whole(function(params, replicated(sent, mesh))), params


def _mixture(
    function: Callable[[Any, Tensor], Tensor],
    params: Any,
    x: Tensor,
    routing: Routing,
    group: Group,
    capacity_factor: float | None,
) -> Tensor:
    inputs = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    _check(params, inputs, routing, group)
    capacity, (tokens, k) = _capacity(routing, capacity_factor), routing.experts.shape
    slots = _slots(routing, capacity)
    count = routing.probabilities.shape[-1]
    rows = count * capacity
    # One more row is for all choices beyond the capacity. Each other one is written and read at most once: the sums of
    # gradients have one term in both directions, and no order.
    filled = inputs.new_zeros(rows + 1, inputs.shape[1]).index_copy(0, slots, inputs.repeat(k, 1))
    sent = filled[:rows].view(count, capacity, inputs.shape[1])
    received = sent if group is None else all_to_all(sent, group, 0, 1)
    outputs = function(params, received)
    _check_outputs(outputs, received)
    returned = (outputs if group is None else all_to_all(outputs, group, 1, 0)).reshape(rows, outputs.shape[-1])
    has_slot = slots < rows
    weights = torch.where(has_slot, routing.weights.t().flatten(), 0).to(returned.dtype)
    terms = returned.index_select(0, torch.where(has_slot, slots, 0)) * weights.unsqueeze(1)
    return terms.view(k, tokens, terms.shape[1]).sum(0).view(*x.shape[:-1], terms.shape[1])


def _load(routing: Routing) -> Tensor:
    """Return the number of choices of each expert."""
    choices = routing.experts.flatten()
    return choices.new_zeros(routing.probabilities.shape[-1]).scatter_add(0, choices, torch.ones_like(choices))


def _capacity(routing: Routing, factor: float | None) -> int:
    """Return the number of an expert's slots for the tokens of one process."""
    tokens, k = routing.experts.shape
    if factor is None:
        return tokens
    if not 0 < factor < math.inf:
        raise ValueError(
            f"capacity_factor must be positive and finite, or None to drop nothing, not {factor}: 1.25 is usual"
        )
    return min(math.ceil(factor * k * tokens / routing.probabilities.shape[-1]), tokens)


def _slots(routing: Routing, capacity: int) -> Tensor:
    """Return the slot of each choice among those of all experts, first choices first; of one without, their number."""
    count = routing.probabilities.shape[-1]
    ordered, order = routing.experts.t().flatten().sort(stable=True)
    load = _load(routing)
    place = torch.arange(len(ordered), device=ordered.device) - (load.cumsum(0) - load).index_select(0, ordered)
    slots = torch.where(place < capacity, ordered * capacity + place, count * capacity)
    return torch.zeros_like(slots).scatter(0, order, slots)


def _check_outputs(outputs: object, inputs: Tensor) -> None:
    if not isinstance(outputs, Tensor):
        raise TypeError(f"function must return a tensor [experts here, slots, width], not {type(outputs).__name__}")
    if outputs.ndim != 3 or outputs.shape[:2] != inputs.shape[:2]:
        raise ValueError(
            f"function returned a tensor of shape {[*outputs.shape]} for inputs of shape {[*inputs.shape]}: it must be "
            f"of shape [{inputs.shape[0]}, {inputs.shape[1]}, width], with an output of each expert for each slot"
        )


def _check(params: Any, inputs: Tensor, routing: Routing, group: Group) -> None:
    count, size = routing.probabilities.shape[-1], named(group)[1]
    if len(routing.experts) != len(inputs):
        raise ValueError(f"x has {len(inputs)} tokens, and routing is of {len(routing.experts)}: route the same tokens")
    if count % size:
        raise ValueError(
            f"{count} experts can't be spread over {size} processes in equal numbers: take a multiple of {size} "
            "experts, or a group whose size divides their number"
        )
    leaves, spec = flatten(params)
    for path, leaf in zip(paths_of(spec), leaves, strict=True):
        if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != count // size):
            raise ValueError(
                f"params{short(path)} is of shape {[*leaf.shape]}, and this process has {count // size} of the "
                f"router's {count} experts, for which it needs as many rows. Over a group, params are cut by "
                "interop.shard(params, mesh['ep'], {pattern: [Shard(0)]}), and the handler is made with "
                "experts='ep'"
            )
