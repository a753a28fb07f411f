"""Steps that are recorded in several processes, and the times of their pieces."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from fpipe import Measurement, Recording
from fpipe.effects import parts
from fpipe.programs.program import Programs

T = TypeVar("T")


class Recorded:
    """A step that is recorded, for predictions with the times of its own pieces.

    Args:
        step: the recording observes it.
        runs: how many of the last ones count.
    """

    def __init__(self, step: Callable[[], object], recording: Recording, runs: int = 1) -> None:
        self.step, self.recording, self.programs = step, recording, recording.programs
        self.measurements = deque[Measurement](maxlen=runs)

    def __call__(self) -> object:
        result = self.step()
        self.measurements.append(self.recording.measurement())
        return result

    def times(self) -> dict[Any, float]:
        """Return the seconds of each piece and update of all ranks, by their effects. Every process calls it.

        An update of a stage with copies takes that of the slower one.
        """
        each = gathered(own_seconds(self.measurements))
        effects = {*itertools.chain(*each)}
        return {effect: max(seconds.get(effect, 0.0) for seconds in each) for effect in effects}

    def span(self) -> float:
        """Return the seconds of the last run from its first piece on any rank to its last one. Every process calls it.

        The processes are on one machine, and read its clock.
        """
        firsts, lasts = zip(*gathered(self.bounds()), strict=True)
        return max(lasts) - min(firsts)

    def bounds(self) -> tuple[float, float]:
        """Return when the first piece of the last run began in this process, and when its last one ended."""
        _, starts, ends = zip(*pieces_of(self.measurements[-1]), strict=True)
        return min(starts), max(ends)


def gathered(value: T) -> list[T]:
    """Return the values of all processes. Every process calls it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def recorded(make: Callable[..., Callable[..., object]], programs: Programs, *arguments: Any) -> Recorded:
    """Return a step that is recorded.

    Args:
        make: `value_and_grad` but for `observe=`, which it takes.
        programs: as they run.
        arguments: those of the step.
    """
    recording = Recording(programs)
    return Recorded(partial(make(observe=recording), *arguments), recording)


def pieces_of(measurement: Measurement) -> Iterator[tuple[Any, float, float]]:
    """Yield each effect that computes, of those that this process measured, with its start and its end."""
    for rank, columns in measurement.columns.items():
        program = measurement.programs[rank]
        for effect, start, end in zip(program, columns.starts, columns.ends, strict=True):
            if program.table.effects[type(effect)].track == "compute":
                yield effect, start, end


def own_seconds(measurements: Collection[Measurement]) -> dict[Any, float]:
    """Return the seconds of each piece and update that this process measured, by their effects: means of the steps.

    Two passes that run together take half of their time each.
    """
    sums: Counter[Any] = Counter()
    for effect, start, end in itertools.chain(*map(pieces_of, measurements)):
        passes = parts(effect)
        for one in passes:
            sums[one] += (end - start) / len(passes) / len(measurements)
    return dict(sums)
