"""A stage may not write in place to its inputs: other stages, and the caller, read them as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fpipe.errors import StageError
from fpipe.stages.pytree import flatten

INPUT_WRITTEN = (
    "it writes in place to an input, which others read as well, as a first layer with inplace=True does: pass "
    "inplace=False, or write to a clone of it"
)
PARAMETER_WRITTEN = (
    "it writes in place to a parameter, as Embedding(max_norm=) does: every microbatch must read the same. Change it "
    "between steps, in the tree of params"
)


@contextmanager
def refusing_writes(inputs: Any, message: str = INPUT_WRITTEN) -> Iterator[None]:
    """Raise StageError if what runs inside writes in place to a tensor of a tree. Inference tensors are not checked."""
    tensors = [x for x in flatten(inputs).leaves if isinstance(x, Tensor) and not x.is_inference()]
    versions = [x._version for x in tensors]
    yield
    if [x._version for x in tensors] != versions:
        raise StageError(message)
