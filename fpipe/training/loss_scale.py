"""The factor by which a loss is multiplied before it is differentiated, so that float16 gradients don't vanish."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torch import Tensor

from fpipe.errors.arguments import checked_class
from fpipe.stages.pytree import NAMESPACE


@checked_class()
@dataclass(frozen=True, eq=False)
class LossScale:
    """A loss scale, and the rule by which it changes: that of `torch.amp.GradScaler`. A pytree of two tensors.

    Pass it to a step, `step(params, batch, target, loss_scale=scale)`: the loss's cotangent is multiplied by it, and
    the sums of gradients are divided by it before they are cast. Loss and gradients are so the unscaled ones. Every
    rank passes the same.

    Args:
        value: the scale; kept as a float32 tensor without dimensions, on the device where it is made.
        growth_factor: multiplies it after `growth_interval` steps in a row whose gradients were finite.
        backoff_factor: multiplies it after a step whose gradients were not.
        streak: the number of steps with finite gradients since it last changed.

    Raises:
        ValueError: a number is out of its range.

    >>> scale = LossScale(2.0**15, growth_interval=2)
    >>> scale.adjust(finite=False)
    LossScale(16384.0)
    >>> scale.adjust(finite=True).adjust(finite=True)
    LossScale(65536.0)
    """

    value: Tensor | float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    streak: Tensor | int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if not self.growth_factor > 1.0:
            raise ValueError(f"growth_factor must be above 1, not {self.growth_factor}")
        if not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(f"backoff_factor must be between 0 and 1, not {self.backoff_factor}")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, not {self.growth_interval}")
        if isinstance(self.value, int | float) and not 0.0 < self.value < float("inf"):
            raise ValueError(f"value, the loss scale, must be a positive number, not {self.value}")
        if isinstance(self.value, int | float):
            object.__setattr__(self, "value", torch.tensor(self.value, dtype=torch.float32))
        if isinstance(self.streak, int):
            object.__setattr__(self, "streak", torch.tensor(self.streak, dtype=torch.int32, device=self.tensor.device))

    def __repr__(self) -> str:
        return f"LossScale({self.value.item() if isinstance(self.value, Tensor) else self.value})"

    def to(self, device: torch.device | str) -> LossScale:
        """Return the same on a device: where the loss is, so that no step copies it there."""
        return replace(self, value=self.tensor.to(device), streak=torch.as_tensor(self.streak).to(device))

    @property
    def tensor(self) -> Tensor:
        """The scale, detached."""
        return torch.as_tensor(self.value).detach()

    def adjust(self, finite: Tensor | bool) -> LossScale:
        """Return the scale of the next step. Nothing is read on the host.

        Args:
            finite: whether the step's gradients were, the same on every rank: `global_norm(grads, ...).isfinite()`.
        """
        value = self.tensor
        finite = torch.as_tensor(finite).to(value.device)
        streak = torch.as_tensor(self.streak) + 1
        grows = streak == self.growth_interval
        grown = value * self.growth_factor
        grown = torch.where(grows & grown.isfinite(), grown, value)
        following = torch.where(finite, grown, value * self.backoff_factor)
        return replace(self, value=following, streak=torch.where(finite & ~grows, streak, torch.zeros_like(streak)))


def flatten_scale(scale: LossScale) -> tuple[tuple[Any, Any], tuple[float, float, int], tuple[str, str]]:
    rule = scale.growth_factor, scale.backoff_factor, scale.growth_interval
    return (scale.value, scale.streak), rule, ("value", "streak")


def unflatten_scale(rule: tuple[float, float, int], children: tuple[Any, Any]) -> LossScale:
    value, streak = children
    return LossScale(value, *rule, streak)


optree.register_pytree_node(
    LossScale,  # type: ignore[arg-type]
    flatten_scale,  # type: ignore[arg-type]
    unflatten_scale,  # type: ignore[arg-type]
    path_entry_type=optree.GetAttrEntry,
    namespace=NAMESPACE,
)
