"""Bytes in the slots of a rank's store, effect by effect; memory that values share counts once."""

from __future__ import annotations

from typing import Any

from fpipe.autodiff.storages import leaves_of, storage_bytes
from fpipe.effects import Effect, Gather, Parameters, Recv, parts
from fpipe.handlers.protocol import ValueStore
from fpipe.profiling.storages import StorageBytes
from fpipe.programs.memory import PREPARED, RECEIVED, SUMS
from fpipe.programs.program import Program

OTHER = "other"


class SlotMemory:
    """Measures one rank's store through one step, in bytes.

    Counted: values in slots, which are outputs, gradients, residuals, deferred values, and the whole parameters of a
    stage from their gather to their release; and what stages prepare of their parameters. Not counted: the parameters
    that the rank has all the time, and microbatches; sums of weight gradients, which live for the whole step; and
    tensors that eager autograd saves.

    Args:
        during: for each effect, the bytes when it begins or when it ends, whichever is more.
        after: for each effect, the bytes after the values that it was the last to use are freed.
        sizes: for each receive, the bytes of its value.
        owners: the bytes at the peak by owner: `RECEIVED`, `PREPARED`, or the name of a kind of value as the table has
            it. Beside them, and not a part of the peak, `SUMS`: the sums of weight gradients at that time.
    """

    def __init__(self, program: Program, store: ValueStore) -> None:
        self.store, self.plan, self.table = store, program.plan, program.table
        count = len(program)
        self.during, self.after, self.sizes = [0.0] * count, [0.0] * count, [float("nan")] * count
        self._gathered = {store.slot(Parameters(e.stage)) for e in program if isinstance(e, Gather)}
        self._receives = {store.slot(e.value): at for at, e in enumerate(program) if isinstance(e, Recv)}
        self.owners: dict[str, float] = {}
        self._peak, self._labels = 0.0, _labels(program, store)
        self._labels |= dict.fromkeys(self._receives, RECEIVED)
        self._labels |= dict.fromkeys(map(_of_stage, program.plan.stages_on(program.rank)), PREPARED)
        self._seen = set[int]()  # slots whose value is counted
        self._prepared = set[tuple[type, int, int]]()  # kinds of effects, with stage and slice, that have run
        self._bytes: StorageBytes[int] | None = None
        self._at = 0

    def begin(self, effect: Effect) -> None:
        """Measure when an effect begins: the one before it has freed its values."""
        if self._bytes is None:
            self._bytes = StorageBytes(excluded=self.store.borrowed())
        if self._at:
            self.after[self._at - 1] = self._measure(self._at - 1)
        self.during[self._at] = self._measure(self._at)  # with the values that arrived for it

    def end(self, effect: Effect) -> None:
        """Measure when an effect ends."""
        self._count_prepared(effect)
        self.after[self._at] = total = self._measure(self._at)
        self.during[self._at] = max(self.during[self._at], total)
        self._at += 1

    def _count_prepared(self, effect: Effect) -> None:
        """Count what an effect's stage has prepared, which it does when the effect runs for the first time."""
        assert self._bytes is not None
        each: list[Any] = [part for part in parts(effect) if self.table.effects[type(part)].work]
        for part in each:
            key = type(part), part.stage, getattr(part, "slice", 0)
            if key not in self._prepared:
                self._prepared.add(key)
                if part.stage not in self.plan.gathered:  # else it is given up with the whole parameters
                    self._bytes.add(_of_stage(part.stage), self.store.prepared(part.stage))

    def _measure(self, at: int) -> float:
        assert self._bytes is not None
        slots, touched = self.store.slots, self.store.touched[at]
        for slot in touched:
            if slots[slot] is None or slot in self._gathered:  # parameters follow the buffers in which they came
                self._seen.discard(slot)
                self._bytes.remove(slot)
        for slot in touched:
            if slots[slot] is not None and slot not in self._seen:
                self._seen.add(slot)
                leaves = leaves_of(slots[slot])
                self._bytes.add(slot, leaves)
                if slot in self._receives:
                    self.sizes[self._receives[slot]] = float(sum(storage_bytes(leaves).values()))
        if self._bytes.total > self._peak:
            self._peak = float(self._bytes.total)
            sums = float(sum(storage_bytes(self.store.sums()).values()))
            self.owners = self._bytes.by(lambda slot: self._labels.get(slot, OTHER)) | ({SUMS: sums} if sums else {})
        return float(self._bytes.total)


def _of_stage(stage: int) -> int:
    """Return the number under which what a stage prepares counts, which is no slot's."""
    return -1 - stage


def _labels(program: Program, store: ValueStore) -> dict[int, str]:
    """Return for each slot the name of its kind of value."""
    table, plan = program.table, program.plan
    names = {name for effect in program for name in (*table.needs(effect, plan), *table.gives(effect, plan))}
    return {store.slot(name): table.values[type(name)].label for name in names if type(name) in table.values}
