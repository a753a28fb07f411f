"""Update params while a step runs: each stage's as soon as its gradients are final."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fpipe.devices import without_autocast

Update = Callable[..., tuple[Any, Any]]
"""`update(grads, state, params, **options) -> (params, state)`, pure."""


def is_separable(update: Update) -> bool:
    """Whether an update of some stages is that part of the update of all, as of `interop.optimizer`."""
    return getattr(update, "is_separable", False)


def donates(update: Update) -> bool:
    """Whether an update may reuse the memory of its arguments."""
    return getattr(update, "donates", True)  # of another function than interop.optimizer's, maybe


class StageUpdates:
    """The updates of one step: those of stages while it runs, and at its end that of the rest.

    Args:
        changes: options of the optimizer.
    """

    def __init__(self, update: Update, params: Mapping[int, Any], state: Any, changes: Mapping[str, Any]) -> None:
        self._update, self._params, self._state, self._changes = update, params, state, changes
        self._new: dict[int, tuple[Any, Any]] = {}  # stage -> params and state
        self.donates = donates(update)

    def __call__(self, gradients: Mapping[int, Any]) -> None:
        """Update some stages; one that is updated already, as another copy of it here, stays."""
        left = {stage: tree for stage, tree in gradients.items() if stage not in self._new}
        if left:
            params, state = self._run(left, *({s: tree[s] for s in left} for tree in (self._state, self._params)))
            self._new |= {stage: (params[stage], state[stage]) for stage in left}

    def finish(self, gradients: Mapping[int, Any]) -> tuple[Any, Any]:
        """Update what is left; return all params and the optimizer's state."""
        if not self._new:
            return self._run(gradients, self._state, self._params)
        self(gradients)
        params, state = ({stage: self._new[stage][i] for stage in self._params} for i in (0, 1))
        return params, state

    def _run(self, *trees: Any) -> tuple[Any, Any]:
        with without_autocast():
            return self._update(*trees, **self._changes)
