"""The processes of a handler: one for each rank of each replica, numbered replica by replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """The place of this process among all of a handler.

    Args:
        ranks: of one replica.
        rank, replica: of this process.
        batches: by replica, the number of the batch whose rows it has, where several share one; by default all differ.
        processes: the job's numbers of these, where the job has others too.

    >>> grid = Grid(ranks=2, replicas=3, rank=1, replica=2)
    >>> grid.number, grid.size, grid.process(0), grid.same_rank
    (5, 6, 4, (1, 3, 5))
    >>> grid.name(3), Grid(2).name(1)
    ('rank 1 of replica 1', 'rank 1')
    >>> Grid(2, processes=(1, 3)).name(1)
    'rank 1 (process 3)'
    """

    ranks: int
    replicas: int = 1
    rank: int = 0
    replica: int = 0
    batches: tuple[int, ...] = ()
    processes: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.ranks * self.replicas

    @property
    def number(self) -> int:
        """The number of this process."""
        return self.process(self.rank)

    @property
    def same_rank(self) -> tuple[int, ...]:
        """The processes of this rank, in the order of the replicas."""
        return tuple(replica * self.ranks + self.rank for replica in range(self.replicas))

    def process(self, rank: int, replica: int | None = None) -> int:
        """Return the number of a process, by default of this replica."""
        return (self.replica if replica is None else replica) * self.ranks + rank

    def name(self, number: int) -> str:
        """Return the name of a process, for messages."""
        replica, rank = divmod(number, self.ranks)
        has_other = bool(self.processes) and self.processes[number] != rank
        return (
            f"rank {rank}"
            + (f" of replica {replica}" if self.replicas > 1 else "")
            + (f" (process {self.processes[number]})" if has_other else "")
        )
