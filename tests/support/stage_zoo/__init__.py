"""Stages of every kind that autodiff must give eager's bits for; the names say what is hard about them."""

from tests.support.stage_zoo import autograd, functions, layers, randomness, tensors
from tests.support.stage_zoo.autograd import block
from tests.support.stage_zoo.example import (
    EXAMPLES,
    ROWS,
    VOCABULARY,
    WIDTH,
    Example,
    make,
    microbatch,
    of_module,
    on,
    randn,
    square,
    tensors_mapped,
    wants,
)

__all__ = [
    "EXAMPLES",
    "ROWS",
    "VOCABULARY",
    "WIDTH",
    "Example",
    "autograd",
    "block",
    "functions",
    "layers",
    "make",
    "microbatch",
    "of_module",
    "on",
    "randn",
    "randomness",
    "square",
    "tensors",
    "tensors_mapped",
    "wants",
]
