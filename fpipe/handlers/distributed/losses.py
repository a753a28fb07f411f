"""The exchange of the losses: every rank returns the losses of all microbatches.

Invariants:
- a rank gives its losses as soon as it has run its last forward of the last stage, and a rank without this stage once
  the handshake is over; each waits for them when its own program has ended. So a rank waits for the forwards of others,
  and not for the rest of their programs;
- on an asynchronous device, in a graph, and where the ranks do not know the dtype of the losses yet, the exchange is at
  the end of the program;
- all ranks know a dtype, or none does: so they post the exchange at the same place among those of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.devices import aside, is_capturing
from fpipe.errors import StageError
from fpipe.handlers.distributed.channels import Channels
from fpipe.handlers.protocol import Inputs, Results
from fpipe.plan import Plan
from fpipe.stages.pytree import flatten

PURPOSE = "waiting for the loss: a rank has not run its forwards"


class _Posted(NamedTuple):
    """An exchange under way: this process's row, which must live until it is over, and that of each."""

    own: Tensor
    rows: Tensor
    works: list[dist.Work]


class Losses:
    """The losses of one program.

    Attributes:
        runs: the processes that run the last stage, and the microbatches or slices of each, over all replicas.
    """

    def __init__(self, channels: Channels, plan: Plan) -> None:
        self.channels, self.plan, self.connections = channels, plan, channels.connections
        self.grid, last = channels.connections.grid, plan.stages - 1
        self.runs: list[tuple[int, list[int]]] = []
        for replica in range(self.grid.replicas):
            for holder in plan.placement.holders[last]:
                units = [replica * plan.units + plan.unit(m, t) for m, t in plan.forward_order(last, holder)]
                self.runs.append((self.grid.process(holder, replica), units))
        self._posted: _Posted | None = None

    def clear(self) -> None:
        """Drop an exchange that is under way: a pending work would keep its connection open."""
        self._posted = None

    def post_early(self, results: Results, inputs: Inputs) -> None:
        """Post the exchange once this process has its losses, if ranks may return before others have ended.

        Raises:
            StageError: the losses have other dtypes than equal inputs gave before.
        """
        waits = self.connections.device.asynchronous or is_capturing()
        if not waits and self.channels.known.loss_dtype is not None:
            self._posted = self._post(results, inputs)

    def gather(self, results: Results, inputs: Inputs) -> dict[int, Tensor]:
        """Return the losses of all ranks and replicas.

        The loss scale travels with them. They are NaN where the ranks have different ones and the host does not wait:
        the gradients are wrong by their ratio.

        Raises:
            StageError: the ranks have different loss scales; where the host waits, on all ranks.
        """
        if self.channels.known.loss_dtype is None:
            self._introduce(results)
        posted, self._posted = self._posted or self._post(results, inputs), None
        self.connections.wait_for_all(posted.works, PURPOSE)
        every, count = posted.rows, self.plan.units
        scales = every[:, count:-1]
        if not (self.connections.device.asynchronous or is_capturing()):
            with aside():
                results.differentiable = bool(every[:, -1].any())
                if inputs.loss_scale is not None:
                    self._check_scales(scales)
        elif inputs.loss_scale is not None:
            every = torch.where((scales == scales[0]).all(), every, torch.nan)
        return {m: every[home][m % count] for home, units in self.runs for m in units}

    def _post(self, results: Results, inputs: Inputs) -> _Posted:
        losses, dtype = results.losses, self.channels.known.loss_dtype
        if others := [loss.dtype for loss in losses.values() if loss.dtype != dtype]:
            raise self._other_dtype(others[0])
        nothing = torch.zeros((), dtype=dtype, device=self.connections.device.torch_device)
        first = self.grid.replica * self.plan.units
        flag = torch.full_like(nothing, results.differentiable)
        scale: Iterable[Tensor] = ()
        if inputs.loss_scale is not None:  # as bytes, which every dtype of a loss holds
            number = inputs.loss_scale.to(nothing.device, torch.float32).reshape(1)
            scale = number.view(torch.uint8).to(dtype).unbind()
        own = (losses.get(first + m, nothing) for m in range(self.plan.units))
        row = torch.stack([*own, *scale, flag])
        return _Posted(row, *self.connections.post_gather(row, PURPOSE))

    def _check_scales(self, scales: Tensor) -> None:
        """Raise StageError, on all ranks, if they have different loss scales, of which these are the bytes."""
        grid, numbers = self.grid, scales.to(torch.uint8).tolist()
        if others := [process for process, each in enumerate(numbers) if each != numbers[0]]:
            one, other = (torch.tensor(numbers[at], dtype=torch.uint8).view(torch.float32) for at in (0, others[0]))
            raise StageError(
                f"the loss scale is {one.item()} on {grid.name(0)} and {other.item()} on {grid.name(others[0])}: pass "
                "the same loss_scale= on every rank. Has one of them resumed without it, or adjusted it by a flag of "
                "its own?",
                rank=grid.rank,
            )

    def _other_dtype(self, dtype: torch.dtype) -> StageError:
        known = self.channels.known.loss_dtype
        message = f"the loss is {dtype}, where equal inputs gave {known} before"
        return StageError(message, rank=self.grid.rank, stage=self.plan.stages - 1)

    def _introduce(self, results: Results) -> None:
        """Share the dtype of the losses, which other ranks do not know yet."""
        known = self.channels.known
        self.channels.has_learned()
        for home, _ in self.runs:
            payload: Any = None
            if home == self.connections.rank:
                payload = flatten((next(iter(results.losses.values())).dtype,))
            purpose = f"waiting for the loss from {self.grid.name(home)}"
            payload, _ = self.connections.broadcast_payload(payload, home, purpose, None)
            (dtype,) = payload.tree
            if known.loss_dtype not in (None, dtype):
                raise self._other_dtype(dtype)
            known.loss_dtype = dtype
