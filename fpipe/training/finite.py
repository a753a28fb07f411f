"""Whether a step's loss and gradients are finite: every rank learns the same, and reads it once, at the step's end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
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
    data_gradients: Mapping[Argument, Any] = NO_GRADIENTS,
) -> None:
    """Raise NonFiniteError on every rank if a loss or a gradient is not finite. Every rank calls it.

    Args:
        losses: of all microbatches, or of all their slices.
        grads: as the step returns them, for which the ranks exchange one message; None without gradients.
        data_gradients: those of the batch and the target, as the step returns them, beside `grads`.
    """
    sums = names = None
    if grads is not None:
        shared = SharedSquares(lambda own: _sums(own, data_gradients, plan, handler))
        sums = shared.everywhere(grads, handler)
        trees: list[tuple[Owner, Any]] = [*grads.items(), *data_gradients.items()]
        names = functools.partial(names_on_all, dict(trees), handler)
    if (error := non_finite_error(losses, plan, sums, names, data_gradients)) is not None:
        raise error


def non_finite_error(
    losses: Mapping[int, Tensor],
    plan: Plan,
    sums: Tensor | None = None,
    names: Callable[[Sequence[Owner]], Sequence[str]] | None = None,
    data: Collection[Argument] = (),
    call: str = "",
) -> NonFiniteError | None:
    """Return the error that a loss or a gradient is not finite; None where all are. The host reads them.

    Args:
        losses: as of `raise_if_not_finite`.
        sums: of squares, of each stage's gradients on all ranks; None where these are not checked.
        names: returns the names of some gradients that are not finite, of some of their owners.
        data: whose gradients' sums follow those of the stages.
        call: which one the error is of, where that has returned.
    """
    each = torch.stack([loss.detach() for _, loss in sorted(losses.items())])
    parts = [each.to(torch.float64), *([] if sums is None else [sums.to(each.device)])]
    finite = torch.cat(parts).isfinite().tolist()
    if all(finite):
        return None
    units = [unit for unit, is_finite in zip(sorted(losses), finite, strict=False) if not is_finite]
    owners = [*range(plan.stages), *data]
    bad = [owner for owner, is_finite in zip(owners, finite[len(losses) :], strict=False) if not is_finite]
    stages = [owner for owner in bad if isinstance(owner, int)]
    message = _message(losses, units, bad, [] if names is None else names(bad))
    late = f"in {call}, {message}. Its results are the params and states that were passed to it" if call else message
    return NonFiniteError(
        f"{late}. {WAYS_OUT}",
        microbatch=units[0] // plan.slices if units else None,
        stages=stages,
        is_late=bool(call),
    )


def _sums(grads: Mapping[int, Any], data_gradients: Mapping[Argument, Any], plan: Plan, handler: Handler) -> Tensor:
    """Return the sum of squares of each stage's gradients, then those of the batch and the target, on this process."""
    sums = squares(grads, plan, handler)
    of_data = [flatten(tree).leaves for tree in data_gradients.values()]
    return torch.stack(
        [*sums, *(sum_of_squares(each).to(sums.device) if each else sums.new_zeros(()) for each in of_data)]
    )


def names_on_all(grads: Mapping[Any, Any], handler: Handler, owners: Sequence[Owner]) -> list[str]:
    """Return the names of some gradients that are not finite, the same on every rank, which all call it."""
    names = names_here(grads, owners)
    if handler.peers is None:
        return names
    _, shares = handler.peers.new_group(PURPOSE, hint=HINT).agree(lambda: names, "check_finite")
    return sorted({name for share in shares for name in share})


def names_here(grads: Mapping[Any, Any], owners: Sequence[Owner]) -> list[str]:
    """Return the names of some gradients of this process that are not finite."""
    return [name for owner in owners if owner in grads for name in _names_of(owner, grads[owner])][:NAMED]


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
    return "; ".join(parts)
