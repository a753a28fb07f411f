"""The bytes that a rank's store holds, effect by effect, each memory once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fpipe.effects import Effect, Recv
from fpipe.handlers.protocol import Store
from fpipe.profiling.storages import StorageBytes, storage_bytes
from fpipe.programs.program import Program
from fpipe.stages.pytree import Flat


class Held:
    """Follows one rank's store through one step.

    Counted is the memory of values in their slots: outputs, gradients, residuals and what is deferred; not parameters
    and microbatches, which are the caller's, nor sums of weight gradients, which are always there. Of a stage that runs
    by eager autograd, what autograd saved is not seen.

    Args:
        during: by effect, what is held as it begins or as it ends, the larger: what it uses, or gives.
        after: what is held once that has been given up which the effect was the last to use.
        sizes: by effect, for receives: bytes of what came.
    """

    def __init__(self, program: Program, store: Store) -> None:
        self.store = store
        count = len(program)
        self.during, self.after, self.sizes = [0.0] * count, [0.0] * count, [float("nan")] * count
        self._came = {store.slot(e.value): at for at, e in enumerate(program) if isinstance(e, Recv)}
        self._seen = set[int]()  # slots whose value is counted
        self._bytes: StorageBytes[int] | None = None
        self._at = 0

    def begin(self, effect: Effect) -> None:
        """An effect begins: the one before it has given up its last."""
        if self._bytes is None:
            self._bytes = StorageBytes(excluded=self.store.apart())
        if self._at:
            self.after[self._at - 1] = self._look(self._at - 1)
        self.during[self._at] = self._look(self._at)  # with what has come for it

    def end(self, effect: Effect) -> None:
        """An effect ends."""
        self.after[self._at] = held = self._look(self._at)
        self.during[self._at] = max(self.during[self._at], held)
        self._at += 1

    def _look(self, at: int) -> float:
        assert self._bytes is not None
        slots, touched = self.store.slots, self.store.touched[at]
        for slot in touched:
            if slots[slot] is None:
                self._seen.discard(slot)
                self._bytes.remove(slot)
        for slot in touched:
            if slots[slot] is not None and slot not in self._seen:
                self._seen.add(slot)
                leaves = list(_leaves(slots[slot]))
                self._bytes.add(slot, leaves)
                if slot in self._came:
                    self.sizes[self._came[slot]] = float(sum(storage_bytes(leaves).values()))
        return float(self._bytes.total)


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Flat):
        return value.leaves
    if isinstance(value, list | tuple):
        return value
    values: Iterable[Any] = getattr(value, "values", ())  # residuals and what is deferred, of a traced stage
    return values
