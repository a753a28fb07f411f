"""What torch's eager autograd gives for a stage, and how to compare with it: to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import optree
import torch

from fpipe import Batch, Output
from fpipe.stages.pytree import flatten, get_at
from fpipe.stages.stage import Target
from tests.support import stage_zoo


@dataclass
class Found:
    """What one microbatch gives; None where there is no gradient."""

    outputs: Any
    state: Any
    weights: list[Any]
    inputs: dict[int, list[Any]]


def leaves_of(tree):
    return optree.tree_leaves(tree, namespace="fpipe")


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def wants(x):
    return is_tensor(x) and x.requires_grad


def own(x, wanted):
    numbers = is_tensor(x) and (x.is_floating_point() or x.is_complex())
    return x.detach().requires_grad_(wanted and numbers) if is_tensor(x) else x


def oracle(example, seeds):
    """Plain `torch.autograd.grad` on the stage's function; inputs and outputs are read through identities of their own.

    So an input is no leaf, whose cast autocast would cache.
    """
    stage, tree = example.stage, own_params(example)
    params = leaves_of(tree)
    sources = {s: stage_zoo.tensors_mapped(lambda x: own(x, x.requires_grad), x) for s, x in example.sources.items()}
    read = {s: stage_zoo.tensors_mapped(torch.ops.aten.alias.default, tree) for s, tree in sources.items()}
    inputs = arguments(example, read)
    tree, state = stage(tree, example.state, inputs)
    outputs = stage_zoo.tensors_mapped(torch.ops.aten.alias.default, tree)
    given = {s: leaves_of(tree) for s, tree in sources.items()}
    wanted = [x for x in [*params, *chain.from_iterable(given.values())] if wants(x)]
    found = dict(zip(map(id, wanted), gradients(leaves_of(outputs), seeds, wanted), strict=True))
    by_source = {s: [found.get(id(x)) for x in leaves] for s, leaves in given.items()}
    return Found(outputs, state, [found[id(x)] for x in params if wants(x)], by_source)


def own_params(example):
    """Leaves of our own, of which the trained ones want a gradient."""
    names, leaves, spec = optree.tree_flatten_with_path(example.params, namespace="fpipe")
    return spec.unflatten([own(x, name[0] not in example.stage.frozen) for name, x in zip(names, leaves, strict=True)])


def arguments(example, sources):
    """What the stage's function is called with."""
    data = example.data
    whole = {Batch: lambda _: data.batch, Target: lambda _: data.target, Output: lambda read: sources[read.stage]}
    return [get_at(whole[type(read)](read), getattr(read, "path", ())) for read in example.stage.inputs]


def gradients(outputs, seeds, wanted):
    pairs = [(x, g) for x, g in zip(outputs, seeds(outputs), strict=True) if g is not None]
    if not pairs or not wanted:
        return [None] * len(wanted)
    roots, cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)


def contiguous(x, generator):
    return torch.randn(x.shape, dtype=x.dtype, generator=generator)


def transposed(x, generator):
    y = torch.randn(tuple(x.shape)[::-1], dtype=x.dtype, generator=generator)
    return y.permute(tuple(reversed(range(x.ndim))))


def expanded(x, generator):
    """As a sum's backward gives it."""
    return torch.randn((), dtype=x.dtype, generator=generator).expand(x.shape)


def channels_last(x, generator):
    y = contiguous(x, generator)
    return y.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else y


def sliced(x, generator):
    return torch.randn((*x.shape, 2), dtype=x.dtype, generator=generator).select(-1, 1)


def as_it_is(x, generator):
    """The layout that a trace expects."""
    return torch.empty_like(x.detach()).copy_(contiguous(x, generator))


LAYOUTS = (contiguous, transposed, expanded, channels_last, sliced)


def seeds_of(layout=contiguous, n=0, kept=lambda i: True):
    """Random cotangents for the outputs that want a gradient, without touching the global generator."""

    def seeds(outputs):
        generator = torch.Generator().manual_seed(n)
        made = [layout(x, generator) if wants(x) else None for x in outputs]
        return [g if kept(i) else None for i, g in enumerate(made)]

    return seeds


def run(piece, prepared, example, seeds, split):
    """One microbatch through a piece."""
    forward = piece.forward(prepared, example.state, flat(example), example.data, keep=True)
    return finish(piece, forward, seeds, split)


def flat(example):
    return {source: flatten(tree) for source, tree in example.sources.items()}


def finish(piece, forward, seeds, split):
    return begin(piece, forward, seeds, split)()


def begin(piece, forward, seeds, split):
    """The backward but for the weight gradients of a split one: calling what it gives completes it."""
    outputs, residuals, state = forward
    cotangents = seeds(outputs.leaves)
    if split:
        inputs, deferred = piece.backward_input(residuals, cotangents)
        return lambda: Found(outputs.tree, state, piece.backward_weight(deferred), inputs)
    weights, inputs = piece.backward(residuals, cotangents)
    return lambda: Found(outputs.tree, state, weights, inputs)


def differences(found, expected):
    """The paths at which two microbatches' results are not the same to the bit."""
    lists = (vars(x) | {"weights": list(x.weights)} for x in (found, expected))
    a, b = (optree.tree_flatten_with_path(x, none_is_leaf=True, namespace="fpipe") for x in lists)
    assert a[2] == b[2]
    wrong = [name for name, x, y in zip(*a[:2], b[1], strict=True) if not same(x, y)]
    handed_on = leaves_of(found.outputs), leaves_of(expected.outputs)
    wrong += [("wants", i) for i, (x, y) in enumerate(zip(*handed_on, strict=True)) if wants(x) != wants(y)]
    every = leaves_of(vars(found))
    return wrong + [("graph", i) for i, x in enumerate(every) if is_tensor(x) and not x.is_leaf]


def same(a, b):
    """Equal in bits, dtype and layout: NaN is NaN, and 0.0 is not -0.0."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    return (a.dtype, a.shape, steps(a)) == (b.dtype, b.shape, steps(b)) and torch.equal(bits(a), bits(b))


def steps(x):
    return [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


def bits(x):
    x = x.detach().resolve_conj().resolve_neg()
    return x.contiguous().flatten().view(torch.uint8)


def seeded(m):
    torch.default_generator.manual_seed(m)  # of the CPU alone: torch.manual_seed notes a traceback for each kind of GPU
