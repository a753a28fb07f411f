"""Let the processes of a group agree on the store of a new handler, through the job's store alone.

A process group of NCCL would end the process where a rank does not come. A rank that gives up closes the meeting, so
that the ranks which it has missed find the next one.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fpipe.errors import TransportError

INTERVAL = 0.01  # seconds between two looks into the store
COMPLETE, GIVEN_UP = b"complete", b"given up"


def meet(group: dist.ProcessGroup, timeout: float) -> Store:
    """Return the job's store under a prefix that no other handler has; the same on every rank of the group.

    Raises:
        TransportError: a rank did not come within `timeout` seconds; names the ranks that did not.
    """
    rank, size = group.rank(), group.size()
    name = f"fpipe/{group.group_name}"
    store, until = PrefixStore(name, _get_default_store()), time.monotonic() + timeout
    number = _join(store, rank, until)
    state = f"meeting {number}"
    if store.add(f"{state} came", 1) == size:
        store.compare_set(state, "", COMPLETE.decode())
    while not store.check([state]):
        if time.monotonic() > until:
            store.compare_set(state, "", GIVEN_UP.decode())
            break
        time.sleep(INTERVAL)
    outcome = store.get(state)
    if store.compare_set(f"{state} closed", "", str(rank)) == str(rank).encode():
        store.add("meetings", 1)  # the next handler's ranks meet there
    if outcome == COMPLETE:
        return PrefixStore(f"{name}/handler {number}", _get_default_store())
    missing = [other for other in range(size) if not store.check([f"{state} rank {other}"])]
    raise TransportError(
        f"rank {rank} could not reach the other ranks at the set-up of a new handler (nothing came within {timeout:g} "
        f"s; missing: {missing}): value_and_grad and evaluate are called on every rank, in the same order"
    )


def _join(store: Store, rank: int, until: float) -> int:
    """Return the number of the first open meeting that this rank has not been at."""
    number = store.add("meetings", 0)
    while store.check([f"meeting {number} rank {rank}"]) and time.monotonic() < until:
        time.sleep(INTERVAL)  # the last rank of that meeting is about to close it
        number = store.add("meetings", 0)
    store.set(f"meeting {number} rank {rank}", "here")
    return number
