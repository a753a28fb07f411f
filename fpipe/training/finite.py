"""Whether a step's loss and gradients are finite: every rank learns the same, and reads it once, at the step's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fpipe.errors import NonFiniteError
from fpipe.handlers.protocol import Handler
from fpipe.plan import Plan
from fpipe.stages.pytree import flatten, paths_of, short
from fpipe.stages.sharding import local
from fpipe.training.norms import HINT, PURPOSE, squares, squares_everywhere

CheckFinite = bool | Literal["raise", "skip"] | None
NAMED = 3  # leaves that a message names
WAYS_OUT = (
    "Find the first operation that is not finite with handlers.Reference() and torch.autograd.set_detect_anomaly(True, "
    "check_nan=True); float16 needs loss_scale=; check_finite='skip' of train_step leaves such a step out"
)


def check_option(check_finite: Any, options: Sequence[Any]) -> None:
    """Raise ValueError for an option that is none of these."""
    if check_finite not in options:
        only = ": only train_step has an update to leave out" if check_finite == "skip" else ""
        raise ValueError(f"check_finite must be one of {', '.join(map(repr, options))}, not {check_finite!r}{only}")


def raise_if_not_finite(
    losses: Mapping[int, Tensor],
    plan: Plan,
    handler: Handler,
    grads: Mapping[int, Any] | None = None,
    sums: Tensor | None = None,
) -> None:
    """Raise NonFiniteError on every rank if a loss or a gradient is not finite. Every rank calls it.

    Args:
        losses: of all microbatches.
        grads: as the step returns them; None without gradients, and where they are gone.
        sums: each stage's sum of squares on all ranks; by default those of `grads`, for which the ranks exchange one
            message.
    """
    if sums is None and grads is not None:
        sums = squares_everywhere(lambda: squares(grads, plan, handler), handler)
    each = torch.stack([loss.detach() for _, loss in sorted(losses.items())])
    parts = [each.to(torch.float64), *([] if sums is None else [sums.to(each.device)])]
    finite = torch.cat(parts).isfinite().tolist()
    if all(finite):
        return
    microbatches = [m for m, is_finite in zip(sorted(losses), finite, strict=False) if not is_finite]
    stages = [stage for stage, is_finite in enumerate(finite[len(losses) :]) if not is_finite]
    names = _names(grads, stages, handler) if grads is not None else []
    raise NonFiniteError(
        _message(losses, microbatches, stages, names), microbatch=next(iter(microbatches), None), stages=stages
    )


def _names(grads: Mapping[int, Any], stages: Sequence[int], handler: Handler) -> list[str]:
    """Return the names of some gradients that are not finite, the same on every rank."""
    names = [name for stage in stages if stage in grads for name in _names_of(stage, grads[stage])][:NAMED]
    if handler.peers is None:
        return names
    _, shares = handler.peers.new_group(PURPOSE, hint=HINT).agree(lambda: names, "check_finite")
    return sorted({name for share in shares for name in share})


def _names_of(stage: int, tree: Any) -> list[str]:
    leaves, spec = flatten(tree)
    named = zip(paths_of(spec), leaves, strict=True)
    return [f"grads[{stage}]{short(path)}" for path, leaf in named if not local(leaf).isfinite().all()]


def _message(
    losses: Mapping[int, Tensor], microbatches: Sequence[int], stages: Sequence[int], names: Sequence[str]
) -> str:
    parts = []
    if microbatches:
        value = losses[microbatches[0]].item()
        more = f", and that of {len(microbatches) - 1} others is not finite" if len(microbatches) > 1 else ""
        parts.append(f"the loss is {value}{more}")
    if stages:
        which = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        some = f": {', '.join(names[:NAMED])}{' and more' if len(names) > NAMED else ''}" if names else ""
        parts.append(f"the gradients of {which} are not finite{some}")
    return f"{'; '.join(parts)}. {WAYS_OUT}"
