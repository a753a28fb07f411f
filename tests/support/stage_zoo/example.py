"""Examples of stages, each with all that it is run on, and the register of them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import optree
import torch

from fpipe import Stage, interop
from fpipe.stages.microbatch import Microbatch

NOTHING = Microbatch(None, None)


ROWS, WIDTH, LENGTH, HEADS, VOCABULARY = 4, 8, 5, 2, 11


@dataclass
class Example:
    """A stage with everything that it is run on.

    Args:
        sources: by source stage; leaves that require a gradient get one.
    """

    stage: Stage
    params: Any
    sources: dict[int, Any] = field(default_factory=dict)
    state: Any = None
    data: Microbatch = NOTHING


EXAMPLES: dict[str, Callable[[], Example]] = {}


def example(make):
    EXAMPLES[make.__name__] = make
    return make


def family(make, **options):
    """An example for each set of options: `attention_causal`."""
    for name, given in options.items():
        EXAMPLES[f"{make.__name__}_{name}"] = partial(make, **given)


def make(name: str) -> Example:
    """The same example at every call."""
    torch.default_generator.manual_seed(0)
    return EXAMPLES[name]()


def tensors_mapped(fn, tree):
    return optree.tree_map(lambda x: fn(x) if isinstance(x, torch.Tensor) else x, tree, namespace="fpipe")


def microbatch(example: Example, m: int) -> Example:
    """The example with another microbatch's data, of the same signature; the first is the example itself."""
    moved: dict[int, torch.Tensor] = {}

    def other(x):
        if m and id(x) not in moved:
            moved[id(x)] = _other_values(x, m).requires_grad_(x.requires_grad)
        return moved.get(id(x), x)

    sources = {source: tensors_mapped(other, tree) for source, tree in example.sources.items()}
    data = Microbatch(tensors_mapped(other, example.data.batch), tensors_mapped(other, example.data.target))
    return replace(example, sources=sources, data=data)


def _other_values(x, m):
    """A tensor of the same layout; the values may be shared by several elements."""
    if x.is_conj() or x.is_neg():
        return x.detach()  # what it is can't be written
    memory = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    values = memory * (1 + m / 4) if x.is_floating_point() or x.is_complex() else memory.clone()
    return values.roll(m).as_strided(x.shape, x.stride(), x.storage_offset())


def randn(*shape, scale=0.5, **options):
    return torch.randn(shape, **options) * scale


def wants(*shape, **options):
    """An input that wants a gradient."""
    return randn(*shape, **options).requires_grad_()


def on(fn, x, state=None, frozen=(), **params):
    """A stage that reads one other stage."""
    return Example(Stage(fn, reads=(0,), stateful=state is not None, frozen=frozen), params, {0: x}, state)


def of_module(module, *inputs, reads=None):
    """A module whose inputs come from stages of their own."""
    reads = tuple(range(len(inputs))) if reads is None else reads
    pipeline, params = interop.from_modules([module])
    stage = replace(pipeline.stages[0], reads=reads)
    return Example(stage, params[0], dict(enumerate(inputs)), interop.buffers([module]).get(0))


def square():
    return randn(WIDTH, WIDTH)


def layers(count):
    return [{"w": square(), "b": randn(WIDTH)} for _ in range(count)]


def deep(p, x):
    for layer in p["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x
