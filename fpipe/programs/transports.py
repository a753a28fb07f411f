"""How messages travel, and so what waits for what. No torch."""

from __future__ import annotations

from typing import NamedTuple


class Transport(NamedTuple):
    """What waits for what among sends and receives. A post itself never waits, save as said here.

    Args:
        paired: a rank's posts to a peer run in one queue, one after the other; else its sends in one and its
            receives in another. A transfer takes place when the two stand at the head of their queues.
        rendezvous: a send keeps its rank until its receive is posted.
    """

    paired: bool = False
    rendezvous: bool = False

    @classmethod
    def named(cls, name: str) -> Transport:
        """One of `TRANSPORTS`.

        Raises:
            ValueError: there is none of that name.

        >>> Transport.named("paired")
        Transport(paired=True, rendezvous=False)
        """
        if name not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {name!r}")
        return TRANSPORTS[name]


TRANSPORTS = {"async": Transport(), "paired": Transport(paired=True), "rendezvous": Transport(rendezvous=True)}
