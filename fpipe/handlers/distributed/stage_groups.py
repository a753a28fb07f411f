"""The processes that compute stages together with this one, as of tensor parallelism: each notices that one is gone.

They may be ranks of other handlers, which know nothing of each other. So each group has a lifeline and questions of its
own, and a handler that ends gives its groups the reason.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fpipe.handlers.distributed.lifeline import Lifeline
from fpipe.handlers.distributed.questions import Questions, introduce
from fpipe.handlers.distributed.rendezvous import meet
from fpipe.store import JobStore


class StageGroup:
    """One group of such processes, for one handler. All of them make it together.

    Args:
        processes: by their numbers in the job, this one among them.
        timeout: seconds in which they must come.

    Attributes:
        key: under which handlers of these processes give their reasons; no other group has it.

    Raises:
        TransportError: one of them did not come; names it.
    """

    def __init__(self, processes: tuple[int, ...], timeout: float) -> None:
        self.processes, self.rank, self._timeout = processes, processes.index(dist.get_rank()), timeout
        ranks = range(len(processes))
        self._store = meet(f"stages of {'-'.join(map(str, processes))}", self.rank, len(ranks), timeout, processes)
        jobs = JobStore(self._store, timeout)
        introduce(jobs, ranks)
        self.key = jobs.compare_set("key", "", uuid.uuid4().hex)
        own: Any = jobs.clone().store  # a lifeline that is made blocks its client of the store
        self.questions = Questions(own, self.rank, len(ranks), timeout)
        self.lifeline: Lifeline | None = None

    def connect(self, on_loss: Callable[[str], object]) -> None:
        """Make the lifeline, see there."""
        self.lifeline = Lifeline(self._store, self.rank, len(self.processes), self._timeout, on_loss, self.name)

    def question(self) -> int:
        """Return the number of the last question; may never return, as `Questions.exchange`."""
        return int(self.questions.store.add("questions", 0))

    def name(self, rank: int) -> str:
        """Return the name of a process, for messages."""
        return f"process {self.processes[rank]}"
