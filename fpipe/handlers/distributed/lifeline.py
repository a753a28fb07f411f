"""Notice at once when the process of another rank ends: its end of a connection closes.

Each rank watches the next one, in a ring. Where several ranks end, one that lives watches one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from fpipe.handlers.distributed.backends import FOREVER, Gloo

GOODBYE = timedelta(seconds=1)  # in which the rank that watches this one takes its goodbye


class Lifeline:
    """The connections to the two neighbours in the ring. All ranks make it together.

    Args:
        on_loss: is called with the reason, in a thread of its own.
        name: of a rank, for messages.
        following: the name of the next rank.
        lost: why it is gone, once it is.
        has_left: whether it has said goodbye, as where its script has ended.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        on_loss: Callable[[str], object] = str,
        name: Callable[[int], str] = "rank {}".format,
    ) -> None:
        following, before = (rank + 1) % size, (rank - 1) % size
        self._watched: Any = None
        self._watching: Any = None
        for end in sorted((rank, before), key=lambda end: (end % 2, end)):  # two rounds, whatever the size
            watches = end == rank  # the number of a connection is the rank that watches
            group = Gloo().group(PrefixStore(f"lifeline {end}", store), "lifeline", int(not watches), range(2), timeout)
            if watches:
                self._watching = group
            else:
                self._watched = group
        self.lost: str | None = None
        self.following, self.has_left = name(following), False
        self._closing, self._on_loss = False, on_loss
        reason = (
            f"{self.following} did not give a reason: did its script end, or was its process killed? {name(rank)} "
            "noticed it: their connection closed"
        )
        threading.Thread(target=self._watch, args=(reason,), daemon=True, name="fpipe-lifeline").start()

    def _watch(self, reason: str) -> None:
        try:
            self._watching.recv([torch.empty(1)], 1, 0).wait(FOREVER)
            self.has_left = True
        except RuntimeError:
            if not self._closing:
                self.lost = reason
                self._on_loss(reason)

    def close(self) -> None:
        """Say goodbye to the rank that watches this one, and stop watching."""
        self._closing = True
        with suppress(RuntimeError):
            self._watched.send([torch.ones(1)], 0, 0).wait(GOODBYE)
        Gloo().cut([self._watching])
