"""The collectives inside pieces: groups that the caller made, watched by the handler while a step runs.

Invariants:
- a step posts one only when every rank is known to run the step: a rank that refuses it would not come;
- a host's wait for one is known to the watchdog, which ends it (liveness.py);
- these groups can't be made again: a step that fails after one was used ends the handler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fpipe.autodiff.graph.collectives import ranks_of
from fpipe.autodiff.graph.notices import Notices
from fpipe.errors import StageError, TransportError
from fpipe.handlers.distributed.connections import Connections, first_line
from fpipe.handlers.protocol import PeerLost


class PieceWatch:
    """Watches the collectives of one program's pieces.

    Args:
        agree: waits for the handshake of the step.
        processes: the handler's, by their numbers in the job.
    """

    timeout = None

    def __init__(
        self, connections: Connections, agree: Callable[[], None], notices: Notices, processes: frozenset[int]
    ) -> None:
        self._connections, self._agree, self.notices, self._processes = connections, agree, notices, processes

    def check_group(self, group: tuple[int, ...]) -> None:
        """Do nothing: they are replicas of this handler, or each has its own, and is given the same batch."""

    def meet(self, group: tuple[int, ...]) -> None:
        self._connections.join(group)

    def before_posting(self) -> None:
        self._agree()

    @contextmanager
    def waiting(self, purpose: str, group: Any) -> Iterator[None]:
        connections = self._connections
        if group is not None:
            connections.groups.lend(group)
        try:
            with connections.activity.waits_for(purpose):
                yield
        except (StageError, TransportError):
            raise
        except RuntimeError as error:
            cut = connections.groups.is_cut
            is_other = group is None or not self._processes.issuperset(ranks_of(group))
            text = purpose if cut else f"{purpose} ({first_line(error)})"
            raise PeerLost(None, text, is_other, None if group is None else group.group_name) from None
        if connections.device.asynchronous and group is not None:
            connections.activity.markers.add(purpose, "waiting")

    def check(self, purpose: str) -> None:
        if self._connections.groups.is_cut:
            raise PeerLost(None, purpose, is_other=True)
