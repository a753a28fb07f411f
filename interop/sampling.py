"""The rows of a dataset that a replica reads in a step, as a function of the step: nothing is kept between steps."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from fpipe.errors.arguments import checked


@checked()
def rows(
    size: int,
    *,
    replica: int,
    replicas: int,
    batch: int,
    step: int,
    seed: int | None = None,
    drop_last: bool = True,
    microbatches: int = 1,
) -> Tensor:
    """Return the numbers of the rows of a dataset that a replica reads in a step.

    The rows of all replicas, in their order, are the step's batch. It does not depend on the number of replicas, and
    training resumes at a step's number, also with other replicas. In an epoch, each row is in one batch.

    Args:
        size: rows of the dataset.
        replica, replicas: the number of this replica, `mesh["dp"].get_local_rank()`, and how many there are.
        batch: rows of a step, of all replicas together. They are divided as evenly as possible, the first replicas
            having one more.
        step: the number of the step since training began.
        seed: shuffles each epoch in another way; None for the dataset's order.
        drop_last: leave out the rows of an epoch that are left over after the last whole batch, which differ from epoch
            to epoch. Otherwise they are a smaller batch.
        microbatches: of the plan. A step needs a row for each on every replica.

    Returns:
        An int64 tensor on the CPU.

    Raises:
        ValueError: a number is out of range; the batch is larger than the dataset with `drop_last`; or a batch, such as
            the last one of an epoch without `drop_last`, has too few rows for the step.

    >>> [rows(10, replica=r, replicas=2, batch=5, step=1).tolist() for r in range(2)]
    [[5, 6, 7], [8, 9]]
    >>> [rows(10, replica=0, replicas=1, batch=4, step=i, drop_last=False).tolist() for i in range(4)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    """
    if not 0 <= replica < replicas:
        raise ValueError(f"replica must be one of 0 to {replicas - 1}, not {replica}")
    if microbatches < 1:
        raise ValueError(f"microbatches must be at least 1, not {microbatches}")
    if step < 0:
        raise ValueError(f"step must be at least 0, not {step}")
    if size < 1 or (drop_last and batch > size):
        raise ValueError(
            f"a dataset of size {size} is no whole batch of {batch}: take a smaller one, or drop_last=False"
        )
    each = f"{microbatches} microbatches each" if microbatches > 1 else "a row each"
    if batch < replicas * microbatches:
        raise ValueError(f"a batch of size {batch} is too small for {replicas} replicas with {each}: make it larger")
    last = size % batch or batch
    if not drop_last and last < replicas * microbatches:
        raise ValueError(
            f"the last batch of an epoch has size {last}, too small for {replicas} replicas with {each}: take "
            "drop_last=True, or a batch that leaves more rows, or none, over"
        )
    epoch, at = divmod(step, size // batch if drop_last else -(-size // batch))
    start, stop = at * batch, min((at + 1) * batch, size)
    block = torch.arange(start, stop).tensor_split(replicas)[replica]
    return block if seed is None else _permutation(size, seed, epoch)[block]


@lru_cache(maxsize=1)
def _permutation(size: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation, made once an epoch."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randperm(size, generator=generator)
