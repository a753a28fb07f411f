"""Calls that all ranks make together between steps: each gets the result, or an error that names the rank at fault.

Invariants:
- every wait ends within the time limit of its connections;
- where a rank's part of a call raises an error, the call raises one on every rank, and the next call works;
- a rank writes the number of its call into the job's store first: after a failure, ranks of lower numbers are missing;
- messages hold plain Python types alone: no class is made while one is read.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from fpipe.errors import TransportError
from fpipe.handlers.distributed.connections import cause_of
from fpipe.handlers.distributed.failures import STORE_TIMEOUT
from fpipe.store import LIMIT, JobStore, StoreError

T = TypeVar("T")
HINT = "every rank makes the same calls in the same order"


class Connector(Protocol):
    """Makes the connections of `Collectives`, keeps them, and closes them."""

    def store(self) -> Store:
        """Return the job's store, under a prefix that all ranks share and nothing else uses."""

    def group(self, purpose: str, timeout: float | None) -> Any:
        """Return the process group for a purpose; the first call for it connects all ranks."""


@dataclass(eq=False)
class Collectives:
    """Implements `Peers` (fpipe/handlers/protocol.py) over process groups of all ranks.

    Args:
        rank, size: of this process, and how many there are.
        timeout: seconds that one wait may take; None where the process group has a limit of its own.
        purpose, hint, error: as of `Peers.new_group`.
        name: of a rank, for messages.
    """

    connector: Connector
    rank: int
    size: int
    timeout: float | None
    purpose: str = "peers"
    hint: str = HINT
    error: type[Exception] = TransportError
    name: Callable[[int], str] = "rank {}".format
    _groups: dict[str, Collectives] = field(default_factory=dict, init=False)
    _calls: int = field(default=0, init=False)
    _call: str = field(default="", init=False)

    def new_group(
        self, purpose: str, *, hint: str = "", timeout: float | None = None, error: type[Exception] = TransportError
    ) -> Collectives:
        timeout = self.timeout if timeout is None else timeout
        group = replace(self, purpose=purpose, hint=hint or HINT, timeout=timeout, error=error)
        return self._groups.setdefault(purpose, group)

    def connect(self, call: str) -> None:
        self._begin(call)
        self._use(lambda group: None)

    def gather(self, value: T, call: str) -> list[T]:
        return self.agree(lambda: value, call)[1]

    def agree(
        self, do: Callable[[], T], call: str, share: Callable[[T], Any] = lambda result: result
    ) -> tuple[T, list[Any]]:
        self._begin(call)
        try:
            result = do()
            message = pickle.dumps((call, None, share(result)))
        except Exception as error:  # of any kind: the other ranks wait for an answer
            reason = str(error) if isinstance(error, self.error) else f"{type(error).__name__}: {error}"
            self._exchange(pickle.dumps((call, reason, None)))
            raise
        answers = [_loads(each) for each in self._exchange(message)]
        for rank, (other, reason, _) in enumerate(answers):
            if other != call:
                raise self.error(
                    f"{self.name(rank)} is at {other} of {self.purpose}, and this one at {call}: {self.hint}"
                )
            if reason is not None:
                raise self.error(f"{self.name(rank)} failed at {call} of {self.purpose}: {reason}")
        return result, [shared for *_, shared in answers]

    def send(self, number: float, rank: int) -> None:
        self._use(lambda group: group.send([_tensor(number, group)], rank, 0).wait())

    def receive(self, rank: int) -> float:
        def receive(group: Any) -> float:
            number = _tensor(0.0, group)
            group.recv([number], rank, 0).wait()
            return float(number)

        return self._use(receive)

    def _begin(self, call: str) -> None:
        self._calls, self._call = self._calls + 1, call
        self._explained(lambda: self._store().set(self._key(self.rank), str(self._calls)))

    def _exchange(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks."""

        def exchange(group: Any) -> list[bytes]:
            lengths = [int(length) for length in self._allgather(group, torch.tensor([len(message)]))]
            padded = bytearray(message.ljust(max(lengths), b"\0"))
            shares = self._allgather(group, torch.frombuffer(padded, dtype=torch.uint8))
            return [share[:length].numpy().tobytes() for share, length in zip(shares, lengths, strict=True)]

        return self._use(exchange)

    def _allgather(self, group: Any, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.to(_device(group))
        shares = [torch.empty_like(tensor) for _ in range(self.size)]
        limit = timedelta(seconds=self.timeout or 0)  # 0: the group's own
        group.allgather([shares], [tensor]).wait(limit)
        return [share.cpu() for share in shares]

    def _use(self, use: Callable[[Any], T]) -> T:
        return self._explained(lambda: use(self.connector.group(self.purpose, self.timeout)))

    def _explained(self, act: Callable[[], T]) -> T:
        """Return the result of an act; turn an error of torch.distributed into one that names the missing ranks."""
        try:
            return act()
        except StoreError as error:
            raise self._unreachable(str(error)) from error
        except TransportError:
            raise
        except (RuntimeError, TimeoutError) as error:
            missing: list[int] = []
            with suppress(StoreError):
                missing = self._missing()
            why = cause_of(error, self.timeout) + (f"; missing: {missing}" if missing else "")
            raise self._unreachable(why) from error

    def _unreachable(self, why: str) -> TransportError:
        return TransportError(
            f"{self.name(self.rank)} could not reach the other ranks at {self._call} of {self.purpose} ({why}): "
            f"{self.hint}"
        )

    def _store(self) -> JobStore:
        return JobStore(self.connector.store(), self.timeout or LIMIT)

    def _missing(self) -> list[int]:
        """Return the ranks that have not come to this call."""
        store, keys = self._store().within(STORE_TIMEOUT), [self._key(rank) for rank in range(self.size)]
        return [rank for rank, key in enumerate(keys) if not store.has(key) or int(store.get(key)) < self._calls]

    def _key(self, rank: int) -> str:
        return f"{self.purpose}/{rank}"


def new_store(name: str, rank: int, timeout: float | None) -> Store:
    """Return the job's store under a prefix of its own, the same on every rank where each makes the same calls.

    Args:
        timeout: seconds for an answer of the store.
    """
    store = JobStore(None, timeout or LIMIT).under(f"fpipe/{name}")
    numbered: Store = store.under(str(store.add(f"made by {rank}", 1))).store
    return numbered


class _OneGroup:
    """A process group of the caller's."""

    def __init__(self, group: dist.ProcessGroup, purpose: str, timeout: float | None) -> None:
        self._group, self._store = group, new_store(f"{group.group_name}/{purpose}", group.rank(), timeout)

    def store(self) -> Store:
        return self._store

    def group(self, purpose: str, timeout: float | None) -> Any:
        return self._group


def over(
    group: dist.ProcessGroup | DeviceMesh | None,
    purpose: str,
    *,
    hint: str,
    timeout: float | None = None,
    error: type[Exception] = TransportError,
) -> Collectives:
    """Return collectives over a process group that the caller made; its ranks make one call after another on it.

    Args:
        group: or one dimension of a DeviceMesh; by default all processes of the job.
        purpose, hint, error: as of `Peers.new_group`.
        timeout: seconds that one wait may take; by default the group's own.
    """
    ranks = process_group(group)
    connector = _OneGroup(ranks, purpose, timeout)
    return Collectives(connector, ranks.rank(), ranks.size(), timeout, purpose=purpose, hint=hint, error=error)


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Return the process group of a mesh, or of the whole job where there is none.

    Raises:
        TransportError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise TransportError(
            "torch.distributed is not initialized: start with torchrun --standalone, and call "
            "torch.distributed.init_process_group() first"
        )
    group = group.get_group() if isinstance(group, DeviceMesh) else group or dist.group.WORLD
    assert group is not None
    return group


def _tensor(number: float, group: Any) -> Tensor:
    return torch.tensor(number, dtype=torch.float64, device=_device(group))


def _device(group: Any) -> str:
    """Return where messages are; a handler's own groups are gloo backends, without a name in torch.distributed."""
    return "cuda" if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl" else "cpu"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a message holds a {module}.{name}, which is no plain Python type")


def _loads(message: bytes) -> Any:
    return _Unpickler(io.BytesIO(message)).load()
