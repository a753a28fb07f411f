"""The tensors of a value in a rank's store, and their storages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fpipe.autodiff.eager import DeferredTape
from fpipe.autodiff.functions import DeferredGraph, SavedGraph
from fpipe.autodiff.interface import WeightGradients
from fpipe.stages.pytree import Flat, flatten


def storage_bytes(leaves: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of each storage of the tensors among the leaves, by the storage's address."""
    storages = (leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def leaves_of(value: Any) -> Sequence[Any]:
    """Return the leaves of a value in a rank's store; not the tensors that eager autograd saves.

    >>> leaves_of({"a": 1, "b": [2, 3]})
    [1, 2, 3]
    """
    if isinstance(value, Flat):
        return value.leaves
    if isinstance(value, SavedGraph | DeferredGraph):
        return value.values
    if isinstance(value, DeferredTape):
        return value.cotangents
    return value if isinstance(value, WeightGradients) else flatten(value).leaves
