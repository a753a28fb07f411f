"""Let the processes of a group agree on the store of a new handler, through the job's store alone.

A process group of NCCL would end the process where a rank does not come. A rank that gives up closes the meeting, so
that the ranks which it has missed find the next one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from fpipe.errors import TransportError
from fpipe.store import JobStore, StoreError

LAST_WORD = 2.0  # seconds for an answer of the job's store once a rank gives up
COMPLETE, GIVEN_UP = "complete", "given up"


def meet(name: str, rank: int, size: int, timeout: float, processes: Sequence[int] | None = None) -> Store:
    """Return the job's store under a prefix that no other handler has; the same on every rank.

    Args:
        name: of the ranks that meet; others have another name.
        rank, size: of this process among them, and how many there are.
        processes: their numbers in the job, where they compute stages together; by default they make a handler.

    Raises:
        TransportError: a rank did not come within `timeout` seconds; names the ranks that did not. Or the store is
            silent.
    """
    try:
        base = JobStore(None, timeout, until=time.monotonic() + timeout).clone()
        number = _meet(base.under(f"fpipe/{name}"), rank, size, timeout, processes)
        return base.under(f"fpipe/{name}/handler {number}").store  # type: ignore[no-any-return]
    except StoreError as error:
        raise _missed(rank, str(error), processes) from error


def _meet(store: JobStore, rank: int, size: int, timeout: float, processes: Sequence[int] | None) -> int:
    """Return the number of a meeting to which all ranks have come."""
    silence = f"nothing came within timeout={timeout:g} s"
    number = _join(store, rank)
    if number is None:
        raise _missed(rank, f"{silence}; another rank has not closed the meeting before", processes)
    state = f"meeting {number}"
    if store.add(f"{state} came", 1) == size:
        store.compare_set(state, "", COMPLETE)
    store, appeared = store.within(LAST_WORD), store.appear(state)
    if not appeared:
        store.compare_set(state, "", GIVEN_UP)
    outcome = store.get(state)
    if store.compare_set(f"{state} closed", "", str(rank)) == str(rank):
        store.add("meetings", 1)  # the next handler's ranks meet there
    if outcome == COMPLETE:
        return number
    names = range(size) if processes is None else processes
    missing = [names[other] for other in range(size) if not store.has(f"{state} rank {other}")]
    why = f"missing: {missing}" if missing else "another rank has given up"
    raise _missed(rank, f"{silence}; {why}", processes)


def _missed(rank: int, why: str, processes: Sequence[int] | None) -> TransportError:
    if processes is not None:
        return TransportError(
            f"process {processes[rank]} could not reach all of processes {[*processes]}, which compute stages together "
            f"({why}): each of them makes the same calls, with params sharded over the same mesh"
        )
    return TransportError(
        f"rank {rank} could not reach the other ranks at the set-up of a new handler ({why}): value_and_grad and "
        "evaluate are called on every rank, in the same order"
    )


def _join(store: JobStore, rank: int) -> int | None:
    """Return the number of the first open meeting that this rank has not been at; None if none opens in time."""
    for _ in store.polls():
        number = store.add("meetings", 0)
        if not (store.has(f"meeting {number} rank {rank}") or store.has(f"meeting {number}")):
            store.set(f"meeting {number} rank {rank}", "here")
            return number  # else a rank of that meeting is about to close it
    return None
