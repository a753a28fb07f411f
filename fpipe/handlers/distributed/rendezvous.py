"""Let the processes of a group agree on the store of a new handler, through the job's store alone.

A process group of NCCL would end the process where a rank does not come. A rank that gives up closes the meeting, so
that the ranks which it has missed find the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fpipe.errors import TransportError

FIRST_PAUSE, LAST_PAUSE = 0.005, 0.2  # seconds between two looks into the store
COMPLETE, GIVEN_UP = b"complete", b"given up"


def meet(name: str, rank: int, size: int, timeout: float) -> Store:
    """Return the job's store under a prefix that no other handler has; the same on every rank.

    Args:
        name: of the ranks that meet; others have another name.
        rank, size: of this process among them, and how many there are.

    Raises:
        TransportError: a rank did not come within `timeout` seconds; names the ranks that did not.
    """
    name = f"fpipe/{name}"
    base = _get_default_store().clone()  # type: ignore[attr-defined]  # a client of its own: nothing else blocks it
    store, until = PrefixStore(name, base), time.monotonic() + timeout
    number = _join(store, rank, until)
    if number is None:
        raise _missed(rank, timeout, "; another rank has not closed the meeting before")
    state = f"meeting {number}"
    if store.add(f"{state} came", 1) == size:
        store.compare_set(state, "", COMPLETE.decode())
    if not _appears(store, state, until):
        store.compare_set(state, "", GIVEN_UP.decode())
    outcome = store.get(state)
    if store.compare_set(f"{state} closed", "", str(rank)) == str(rank).encode():
        store.add("meetings", 1)  # the next handler's ranks meet there
    if outcome == COMPLETE:
        return PrefixStore(f"{name}/handler {number}", base)
    missing = [other for other in range(size) if not store.check([f"{state} rank {other}"])]
    raise _missed(rank, timeout, f"; missing: {missing}" if missing else "; another rank has given up")


def _missed(rank: int, timeout: float, why: str) -> TransportError:
    return TransportError(
        f"rank {rank} could not reach the other ranks at the set-up of a new handler (nothing came within {timeout:g} "
        f"s{why}): value_and_grad and evaluate are called on every rank, in the same order"
    )


def _join(store: Store, rank: int, until: float) -> int | None:
    """Return the number of the first open meeting that this rank has not been at; None if none opens in time."""
    for _ in _polls(until):
        number = store.add("meetings", 0)
        if not (store.check([f"meeting {number} rank {rank}"]) or store.check([f"meeting {number}"])):
            store.set(f"meeting {number} rank {rank}", "here")
            return number  # else a rank of that meeting is about to close it
    return None


def _appears(store: Store, key: str, until: float) -> bool:
    """Return whether a key is written in time."""
    return any(store.check([key]) for _ in _polls(until))


def _polls(until: float) -> Iterator[None]:
    """Iterate until a time, and once at least, with pauses that grow."""
    pause = FIRST_PAUSE
    yield
    while time.monotonic() < until:
        time.sleep(pause)
        yield
        pause = min(2 * pause, LAST_PAUSE)
