"""The state of `torch.autocast`, which is a part of a forward, and of no backward.

A backward has the dtypes of its forward: the casts are in autograd's graph, or in the trace. Under autocast it would
cast once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

KINDS = ("cpu", "cuda")
NOTHING = nullcontext()


def autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the kinds of devices on which operators cast now, and the dtype on each."""
    return tuple([(kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind)])


def without_autocast() -> AbstractContextManager[None]:
    """Return a context in which no operator casts; the cache of casts stays."""
    return _off() if any(map(torch.is_autocast_enabled, KINDS)) else NOTHING


@contextmanager
def _off() -> Iterator[None]:
    with ExitStack() as stack:
        for kind in KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
