"""The rules by which sends and receives wait for each other. No torch."""

from __future__ import annotations

from typing import NamedTuple


class Transport(NamedTuple):
    """The waits between sends and receives. A post waits only as `rendezvous` describes.

    Args:
        paired: a rank's sends and receives to a peer run in one queue, one after the other; else the sends run in one
            queue and the receives in another. A transfer runs when its send and its receive are at the heads of their
            queues.
        rendezvous: a send occupies its rank until its receive is posted.
    """

    paired: bool = False
    rendezvous: bool = False

    @classmethod
    def named(cls, name: str) -> Transport:
        """Return one of `TRANSPORTS`.

        Raises:
            ValueError: there is no transport of that name.

        >>> Transport.named("paired")
        Transport(paired=True, rendezvous=False)
        """
        if not isinstance(name, str) or name not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {name!r}")
        return TRANSPORTS[name]


TRANSPORTS = {"async": Transport(), "paired": Transport(paired=True), "rendezvous": Transport(rendezvous=True)}
