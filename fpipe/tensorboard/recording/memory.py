"""The bytes that a rank's store holds, effect by effect, each memory once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fpipe.effects import Effect, Recv
from fpipe.handlers.protocol import Store
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
        self._of: dict[int, tuple[int, ...]] = {}  # slot -> its memories
        self._users: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}
        self._whole = 0
        self._apart: frozenset[int] | None = None
        self._at = 0

    def begin(self, effect: Effect) -> None:
        """An effect begins: the one before it has given up its last."""
        if self._apart is None:
            self._apart = frozenset(_memories(self.store.apart()))
        if self._at:
            self.after[self._at - 1] = self._look(self._at - 1)
        self.during[self._at] = self._look(self._at)  # with what has come for it

    def end(self, effect: Effect) -> None:
        """An effect ends."""
        self.after[self._at] = held = self._look(self._at)
        self.during[self._at] = max(self.during[self._at], held)
        self._at += 1

    def _look(self, at: int) -> float:
        slots = self.store.slots
        for slot in self.store.touched[at]:
            if slots[slot] is None:
                self._drop(slot)
            elif slot not in self._of:
                self._add(slot, _leaves(slots[slot]))
        return float(self._whole)

    def _add(self, slot: int, leaves: Iterable[Any]) -> None:
        assert self._apart is not None
        found = _memories(leaves)
        if slot in self._came:
            self.sizes[self._came[slot]] = float(sum(found.values()))
        mine = tuple(key for key in found if key not in self._apart)
        self._of[slot] = mine
        for key in mine:
            self._users[key] += 1
            if self._users[key] == 1:
                self._bytes[key] = found[key]
                self._whole += found[key]

    def _drop(self, slot: int) -> None:
        for key in self._of.pop(slot, ()):
            self._users[key] -= 1
            if not self._users[key]:
                self._whole -= self._bytes.pop(key)


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Flat):
        return value.leaves
    if isinstance(value, list | tuple):
        return value
    values: Iterable[Any] = getattr(value, "values", ())  # residuals and what is deferred, of a traced stage
    return values


def _memories(leaves: Iterable[Any]) -> Mapping[int, int]:
    return {storage._cdata: storage.nbytes() for storage in _storages(leaves)}


def _storages(leaves: Iterable[Any]) -> Iterator[Any]:
    return (leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor))
