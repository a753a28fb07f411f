"""Whether a step's loss and gradients are finite: every rank learns the same, and reads it once, at the step's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from fpipe._format import counted
from fpipe.autodiff.interface import Argument
from fpipe.errors import NonFiniteError
from fpipe.handlers.protocol import Handler
from fpipe.plan import Plan
from fpipe.stages.pytree import flatten, paths_of, short
from fpipe.stages.sharding import local
from fpipe.training.norms import HINT, PURPOSE, SharedSquares, squares, sum_of_squares

Owner = int | Argument
"""A stage's number, "batch" or "target": whose gradients they are."""
NO_GRADIENTS: Mapping[Argument, Any] = MappingProxyType({})
CheckFinite = bool | Literal["raise", "skip"] | None
NAMED = 3  # leaves that a message names
WAYS_OUT = (
    "Find the first operation that is not finite with handlers.Reference() and torch.autograd.set_detect_anomaly(True, "
    "check_nan=True); float16 needs loss_scale=; check_finite='skip' of train_step leaves such a step out"
)


def check_option(check_finite: Any, options: Sequence[Any]) -> None:
    """Raise ValueError for an option that is none of these."""
    if not isinstance(check_finite, bool | str | None) or check_finite not in options:
        only = ": only train_step has an update to leave out" if check_finite == "skip" else ""
        raise ValueError(f"check_finite must be one of {', '.join(map(repr, options))}, not {check_finite!r}{only}")


def raise_if_not_finite(
    losses: Mapping[int, Tensor],
    plan: Plan,
    handler: Handler,
    grads: Mapping[int, Any] | None = None,
    sums: Tensor | None = None,
    data_gradients: Mapping[Argument, Any] = NO_GRADIENTS,
) -> None:
    """Raise NonFiniteError on every rank if a loss or a gradient is not finite. Every rank calls it.

    Args:
        losses: of all microbatches, or of all their slices.
        grads: as the step returns them; None without gradients, and where they are gone.
        sums: each stage's sum of squares on all ranks; by default those of `grads`, for which the ranks exchange one
            message.
        data_gradients: those of the batch and the target, as the step returns them, beside `grads`.
    """
    if sums is None and grads is not None:
        shared = SharedSquares(lambda own: _sums(own, data_gradients, plan, handler))
        sums = shared.everywhere(grads, handler)
    each = torch.stack([loss.detach() for _, loss in sorted(losses.items())])
    parts = [each.to(torch.float64), *([] if sums is None else [sums.to(each.device)])]
    finite = torch.cat(parts).isfinite().tolist()
    if all(finite):
        return
    units = [unit for unit, is_finite in zip(sorted(losses), finite, strict=False) if not is_finite]
    owners = [*range(plan.stages), *data_gradients]
    bad = [owner for owner, is_finite in zip(owners, finite[len(losses) :], strict=False) if not is_finite]
    stages = [owner for owner in bad if isinstance(owner, int)]
    trees: list[tuple[Owner, Any]] = [] if grads is None else [*grads.items(), *data_gradients.items()]
    names = [] if grads is None else _names(dict(trees), bad, handler)
    raise NonFiniteError(
        _message(losses, units, bad, names), microbatch=units[0] // plan.slices if units else None, stages=stages
    )


def _sums(grads: Mapping[int, Any], data_gradients: Mapping[Argument, Any], plan: Plan, handler: Handler) -> Tensor:
    """Return the sum of squares of each stage's gradients, then those of the batch and the target, on this process."""
    sums = squares(grads, plan, handler)
    of_data = [flatten(tree).leaves for tree in data_gradients.values()]
    return torch.stack(
        [*sums, *(sum_of_squares(each).to(sums.device) if each else sums.new_zeros(()) for each in of_data)]
    )


def _names(grads: Mapping[Owner, Any], owners: Sequence[Owner], handler: Handler) -> list[str]:
    """Return the names of some gradients that are not finite, the same on every rank."""
    names = [name for owner in owners if owner in grads for name in _names_of(owner, grads[owner])][:NAMED]
    if handler.peers is None:
        return names
    _, shares = handler.peers.new_group(PURPOSE, hint=HINT).agree(lambda: names, "check_finite")
    return sorted({name for share in shares for name in share})


def _names_of(owner: Owner, tree: Any) -> list[str]:
    leaves, spec = flatten(tree)
    named = zip(paths_of(spec), leaves, strict=True)
    root = owner if isinstance(owner, str) else f"grads[{owner}]"
    return [f"{root}{short(path)}" for path, leaf in named if not local(leaf).isfinite().all()]


def _message(losses: Mapping[int, Tensor], units: Sequence[int], owners: Sequence[Owner], names: Sequence[str]) -> str:
    parts = []
    if units:
        value, others = losses[units[0]].item(), len(units) - 1
        more = f", and that of {counted(others, 'other')} is not finite" if others else ""
        parts.append(f"the loss is {value}{more}")
    if owners:
        stages = [str(owner) for owner in owners if isinstance(owner, int)]
        which = [f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}"] if stages else []
        which += [f"the {owner}" for owner in owners if isinstance(owner, str)]
        some = f": {', '.join(names[:NAMED])}{' and more' if len(names) > NAMED else ''}" if names else ""
        parts.append(f"the gradients of {' and '.join(which)} are not finite{some}")
    return f"{'; '.join(parts)}. {WAYS_OUT}"
