"""Intercept uses of autograd that no mode of torch reports.

`torch.autograd.Function.apply` may be held by the model itself (`self.act = F.apply`), as a reference that was taken
before. Patching the attribute would miss it, and the graph does not show it: export decomposes the function's forward
into plain operations. So the code of the function is replaced, for the duration of an export and under a lock.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

LOCK = threading.RLock()
"""Patches are process-wide: one export at a time."""


@contextmanager
def intercepting(refuse_function: Callable[[Any], NoReturn], refuse_hooks: Callable[[], NoReturn]) -> Iterator[None]:
    """Call `refuse_function` for a custom autograd function, and `refuse_hooks` for custom saved-tensor hooks.

    `torch.inference_mode` becomes `torch.no_grad`, whose tensors autograd may read later.
    """
    enter = saved_tensors_hooks.__enter__

    def enter_hooks(hooks: Any) -> Any:
        if not (hooks.pack_hook.__module__ or "").startswith("torch."):  # checkpointing has such hooks
            refuse_hooks()
        return enter(hooks)

    def enter_inference(mode: Any) -> None:
        mode._inference_mode_context = torch.set_grad_enabled(not mode.mode)

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        is_torchs = function.__module__.startswith("torch.")  # as those of custom operations
        if not is_torchs or function is torch.utils.checkpoint.CheckpointFunction:
            refuse_function(function)
        return ORIGINAL(function, *args, **kwargs)

    with (
        LOCK,
        patch.object(saved_tensors_hooks, "__enter__", enter_hooks),
        patch.object(torch.inference_mode, "__enter__", enter_inference),
        patch.object(torch.autograd.Function, "_fpipe_apply", staticmethod(apply), create=True),
    ):
        APPLY.__code__ = _Replacement.apply.__code__
        try:
            yield
        finally:
            APPLY.__code__ = ORIGINAL.__code__


APPLY = torch.autograd.Function.__dict__["apply"].__func__
ORIGINAL = types.FunctionType(APPLY.__code__, APPLY.__globals__, APPLY.__name__, closure=APPLY.__closure__)
ORIGINAL.__kwdefaults__ = APPLY.__kwdefaults__


class _Replacement:
    _fpipe_apply: Any

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        assert __class__  # type: ignore[name-defined]  # replaced code must have the same free variables
        return cls._fpipe_apply(cls, *args, **kwargs)
