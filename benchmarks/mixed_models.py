"""Models of unlike layers, as costs by layer: embeddings, mixtures of experts, state spaces, wide heads. No torch.

The shapes follow published models, with the attention of `ModelShape`: "Gemma 2" (2024), a vocabulary of 256,000;
"DeepSeek-V3" (2024), three dense layers, mixtures of experts, and a layer that predicts one more token with a head of
its own; "Nemotron-H" (2025), 24 Mamba-2 layers, 24 feed-forward parts and 4 attentions, in its order; and an image
encoder before a language model of another width. "Llama 2" (2023) is the even one. Times are those of one device at
half of its peak, without tensor parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fpipe import Costs
from fpipe.schedules.machines import MACHINES
from fpipe.schedules.shapes import Flops, Kept, ModelShape

MACHINE, DTYPE, BYTES = MACHINES["h100"], "bfloat16", 2
SEQUENCE = 4096  # tokens of a microbatch
STATE, GROUPS, HEAD = 128, 8, 64  # of Mamba-2
PATTERN = "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"  # of Nemotron-H 8B: Mamba-2, feed-forward parts, attentions


@dataclass(frozen=True)
class Layer:
    """The work of one layer for a microbatch, and the bytes of its residuals, parameters and output."""

    flops: Flops
    kept: Kept
    parameters: float
    output: float

    @property
    def moved(self) -> float:
        return BYTES * self.parameters + 2 * self.kept.residuals


def embedding(shape: ModelShape) -> Layer:
    """Return a lookup: it has no input gradient."""
    output = float(BYTES * shape.sequence * shape.hidden)
    return Layer(Flops(0.0, 0.0, 0.0, 0.0), Kept(0.0, 0.0, 0.0), shape.embedding_parameters, output)


def block(shape: ModelShape) -> Layer:
    output = float(BYTES * shape.sequence * shape.hidden)
    return Layer(shape.layer_flops(shape.sequence), shape.layer_kept(1), shape.layer_parameters, output)


def head(shape: ModelShape) -> Layer:
    return Layer(shape.head_flops(shape.sequence), shape.head_kept(1), shape.head_parameters, 4.0)


def both(first: Layer, second: Layer) -> Layer:
    """Return a layer that does what two do, with the output of the second."""
    flops = Flops(*(getattr(first.flops, n) + getattr(second.flops, n) for n in Flops.__dataclass_fields__))
    memory = Kept(*(getattr(first.kept, n) + getattr(second.kept, n) for n in Kept.__dataclass_fields__))
    return Layer(flops, memory, first.parameters + second.parameters, second.output)


def product(shape: ModelShape, numbers: float, width: float, more: float = 0.0) -> Layer:
    """Return a layer of products with so many numbers, of so wide inputs, and more operations for each token."""
    tokens = shape.sequence
    whole = 2.0 * tokens * numbers + tokens * more
    flops = Flops(whole, whole + tokens * more, 2.0 * tokens * numbers, whole)
    size = float(BYTES * tokens * width)
    return Layer(flops, Kept(size, size, 0.0), numbers, float(BYTES * tokens * shape.hidden))


def gemma() -> Iterator[Layer]:
    shape = ModelShape(42, 3584, 16, 256_000, SEQUENCE, kv_heads=8, feed_forward=14336, gated=True, tied=True)
    yield embedding(shape)
    yield from [block(shape)] * shape.layers
    yield head(shape)


def deepseek() -> Iterator[Layer]:
    dense = ModelShape(3, 7168, 128, 129_280, SEQUENCE, feed_forward=18432, gated=True)
    mixed = replace(dense, layers=58, feed_forward=2048, experts=256, experts_per_token=9, capacity_factor=1.0)
    yield embedding(dense)
    yield from [block(dense)] * dense.layers
    yield from [block(mixed)] * mixed.layers
    yield both(block(mixed), head(dense))
    yield head(dense)


def nemotron() -> Iterator[Layer]:
    shape = ModelShape(52, 4096, 32, 131_072, SEQUENCE, kv_heads=8, feed_forward=21504)
    hidden, inner = shape.hidden, 2 * shape.hidden
    joint = 2 * inner + 2 * GROUPS * STATE + inner // HEAD
    kinds = {
        "M": product(shape, hidden * (joint + inner), 2 * hidden + joint + inner, more=6.0 * inner * STATE),
        "-": product(shape, 2 * hidden * shape.inner, 2 * hidden + 2 * shape.inner),
        "*": product(shape, 2 * hidden * (hidden + shape.keys), 5 * hidden, more=4.0 * shape.sequence * hidden),
    }
    yield embedding(shape)
    yield from (kinds[kind] for kind in PATTERN)
    yield head(shape)


def encoder() -> Iterator[Layer]:
    images = ModelShape(24, 1024, 16, 1, 4096, gated=False)
    words = ModelShape(32, 4096, 32, 128_256, SEQUENCE, kv_heads=8, feed_forward=14336, gated=True)
    yield from [block(images)] * images.layers
    yield embedding(words)
    yield from [block(words)] * words.layers
    yield head(words)


def llama() -> Iterator[Layer]:
    shape = ModelShape(32, 4096, 32, 32_000, SEQUENCE, feed_forward=11008, gated=True)
    yield embedding(shape)
    yield from [block(shape)] * shape.layers
    yield head(shape)


MODELS = {
    "gemma": gemma,
    "deepseek": deepseek,
    "nemotron-h": nemotron,
    "encoder": encoder,
    "llama": llama,
}


def costs_of(name: str) -> Costs:
    """Return the costs of a model's layers, in seconds and bytes."""
    layers = list(MODELS[name]())

    def seconds(kind: str) -> list[float]:
        return [MACHINE.time(getattr(each.flops, kind), each.moved, DTYPE) for each in layers]

    return Costs(
        forward=seconds("forward"),
        backward_input=[0.0, *seconds("backward_input")[1:]],
        backward_weight=seconds("backward_weight"),
        residuals=[each.kept.residuals for each in layers],
        deferred=[each.kept.deferred for each in layers],
        parameters=[4 * each.parameters for each in layers],
        activation=[each.output for each in layers],
        communication=MACHINE.between,
    )
