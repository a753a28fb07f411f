"""Updates before the norm of the gradients is known, which are made again, or taken back, where it turns out otherwise.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4. There an update is taken back by
arithmetic; here the old params and optimizer state are kept, so that the bits are those of an update after the norm.

Invariants:
- nothing that depends on a norm can be read before it is known: results wait when they are read (late.py);
- all ranks decide alike, by the same numbers: whether an update stands, and whether the next one is made early;
- nothing is early with a handler that does not ask whether a step has begun with the right params (`Inputs.renew`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.errors import NonFiniteError, TransportError
from fpipe.handlers.protocol import Handler, StepRejected
from fpipe.stages.pytree import flatten
from fpipe.training.late import Late, LateNumber, LateScale, final
from fpipe.training.loss_scale import LossScale
from fpipe.training.norms import clipping, multiplied
from fpipe.training.skipping import frozen
from fpipe.training.updates import is_separable

Trees = tuple[Any, Any, Any]
"""Params, optimizer state and the stages' state, by stage."""


def check_post_validation(handler: Handler, update: Callable[..., Any], *, capture: object, resident: object) -> None:
    """Raise ValueError where updates can't be made before the norm is known, or nothing would be faster by it."""
    meets = "all ranks meet before a step's first value travels"
    reasons = {
        f"{capture=}: a graph has the norm and the update": bool(capture),
        f"{resident=}: params are gathered over the replicas, for which {meets}": resident is not None,
        f"GPUs, where {meets}": any(device.type != "cpu" for device in handler.devices or ()),
        "an optimizer that may be one function of all stages: take interop.optimizer": not is_separable(update),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"post_validate=True does not go with {reason}")


class Verdict(NamedTuple):
    """The norm of a step's gradients, and how its update takes them: the same on all ranks.

    Args:
        factor: with which they are multiplied; None where they are not clipped.
        finite: whether they and the loss are; None where the update does not depend on it.
        error: that they are not, where it is one.
    """

    norm: Tensor
    factor: Tensor | None
    finite: Tensor | None
    error: NonFiniteError | None = None

    @classmethod
    def of(cls, sums: Tensor, max_norm: float | Tensor | None, loss_is_finite: Tensor | None) -> Verdict:
        """Return the verdict on gradients; nothing is read on the host.

        Args:
            sums: of squares, of each stage.
            loss_is_finite: None where the update does not depend on it.
        """
        norm = sums.sum().sqrt()
        factor = None if max_norm is None else clipping(max_norm, norm)
        finite = None if loss_is_finite is None else norm.isfinite() & loss_is_finite.to(norm.device)
        return cls(norm, factor, finite)

    @property
    def counts(self) -> bool:
        """The step updates params: it is not skipped, and raises no error."""
        return self.error is None and (self.finite is None or bool(self.finite))

    @property
    def is_plain(self) -> bool:
        """The update takes the gradients as they are, without clipping."""
        return self.counts and (self.factor is None or bool(self.factor == 1))

    def scaled(self, gradients: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the gradients of which the update is made."""
        return gradients if self.factor is None else multiplied(gradients, self.factor)


class Validation:
    """The update of one step, and whether it stands. Several threads may ask at once.

    Args:
        update: `update(gradients, old) -> trees`; is called twice where the first update does not stand.
        old: the trees before it.
        loss_scale: of the step, if it has one.
        wait: waits for the verdict, and returns it; several threads may call it at once.
        is_early: update before the verdict is known, as if the gradients were to be taken as they are.
        donates: the update reuses the memory of the old params and optimizer state, of which a copy is kept until then.

    Attributes:
        late: params and states; until the verdict is known, those of an update that may not stand.
        loss_scale: the next one, likewise.
        norm, finite: of the gradients.

    Once the verdict is known, nothing else of the step is kept here.
    """

    def __init__(
        self,
        update: Callable[[Mapping[int, Any], Trees], Trees],
        gradients: Mapping[int, Any],
        old: Trees,
        loss_scale: LossScale | None,
        wait: Callable[[], Verdict],
        is_early: bool,
        donates: bool,
    ) -> None:
        copies = _copied(old, gradients) if is_early and donates else []
        self._verdict: Verdict | None = None
        self.late: tuple[Late, ...] = tuple(Late(self, x) for x in (update(gradients, old) if is_early else old))
        self.norm, self.finite = LateNumber(self), LateNumber(self)
        scale = None if loss_scale is None else LateScale(self, loss_scale.adjust(finite=True))
        self.loss_scale = scale
        self._error: NonFiniteError | None = None
        self._is_read = False

        def decide(verdict: Verdict) -> None:
            if is_early and verdict.is_plain:
                return
            self._give(old)  # and drop the first update's, before the second one
            _copy(copies, old)
            if verdict.counts:
                self._give(update(verdict.scaled(gradients), old))
            if scale is not None and loss_scale is not None and verdict.finite is not None:
                scale.now = loss_scale if verdict.error is not None else loss_scale.adjust(verdict.finite)

        self._pending: tuple[Callable[[], Verdict], Callable[[Verdict], None]] | None = wait, decide
        self._lock, self._modes = threading.RLock(), Modes.current()

    def settle(self) -> None:
        """Wait for the verdict, and update again if the update does not stand.

        Raises:
            TransportError: a rank did not end the step, or clips to another norm.
            NonFiniteError: (once) gradients or loss are not finite, and that is an error. The results are then those
                before the step.
        """
        self._settle()
        if (error := self._error) is not None and not self._is_read:
            self._is_read = True
            raise error

    def _settle(self) -> None:
        if (pending := self._pending) is None:
            return
        wait, decide = pending
        with self._modes.of_thread():  # and not the lock: the thread of the steps is not to wait for another one's wait
            verdict = wait()
        with self._lock:
            if self._pending is None:
                return
            with self._modes.again():
                decide(verdict)
            self.norm.value, self.finite.value = verdict.norm, verdict.finite
            self._verdict, self._error = verdict if verdict.error is None else None, verdict.error
            self._pending, self.late, self.loss_scale = None, (), None  # and with them what was kept

    def _give(self, trees: Trees) -> None:
        for late, tree in zip(self.late, trees, strict=True):
            late.now = tree

    @property
    def may_change(self) -> bool:
        """The next step, if this rank begins it now, may have to begin again, or to raise this one's error."""
        return self._pending is not None or self._error is not None

    def is_known_plain(self) -> bool:
        """Settle; return whether the gradients were taken as they are, which is unknown where the step has failed."""
        try:
            self._settle()
        except TransportError:
            return False
        return self._was_plain

    @property
    def _was_plain(self) -> bool:
        return self._verdict is not None and self._verdict.is_plain

    def renewed(self, params: Mapping[int, Any], state: Any, loss_scale: LossScale | None) -> Mapping[str, Any] | None:
        """Return the arguments of the next step, as of `Inputs`, if all ranks are to begin that again.

        Args:
            params, state, loss_scale: with which this rank has begun it.

        Raises:
            StepRejected: the error of this step is raised in the next one's place.
        """
        self._settle()
        if self._error is not None:
            error, self._error = self._error, None
            raise StepRejected(error)
        if self._was_plain:
            return None
        scale = final(loss_scale)
        return {
            "params": final(params),
            "state": [final(state) or {}],
            "loss_scale": None if scale is None else scale.tensor,
        }


class Modes(NamedTuple):
    """The modes of torch under which a step was called: a second update runs under them, whoever asks for it.

    Args:
        grad: whether gradients are recorded.
    """

    dtype: torch.dtype
    device: torch.device
    grad: bool

    @classmethod
    def current(cls) -> Modes:
        return cls(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())

    @contextmanager
    def of_thread(self) -> Iterator[None]:
        """Take those that this thread alone sees, which may be held while it waits."""
        if self[1:] == Modes.current()[1:] and not torch.is_inference_mode_enabled():
            yield  # a context of a device would slow down each call
            return
        with torch.inference_mode(False), torch.set_grad_enabled(self.grad), torch.device(self.device):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Take all of them, to compute: all threads see the dtype, which is set only where it is another one."""
        with self.of_thread():
            if (before := torch.get_default_dtype()) == self.dtype:
                yield
                return
            torch.set_default_dtype(self.dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(before)


def snapshot(option: Any) -> Any:
    """Return an option as it is now, for an update later on."""
    return option.detach().clone() if isinstance(option, Tensor) else option


def _copied(old: Trees, gradients: Mapping[int, Any]) -> list[Tensor | None]:
    """Return a copy of each leaf of params and optimizer state that an update may change."""
    unchanged = frozen(old[0], gradients)
    leaves = flatten(old[:2]).leaves
    return [x.detach().clone() if isinstance(x, Tensor) and id(x) not in unchanged else None for x in leaves]


def _copy(copies: list[Tensor | None], old: Trees) -> None:
    """Write the copies into the memory of what they are copies of; of nothing, where there are none."""
    for kept, x in zip(copies, flatten(old[:2]).leaves if copies else (), strict=True):
        if kept is not None:
            x.detach().copy_(kept)
