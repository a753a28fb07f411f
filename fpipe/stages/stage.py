"""A stage: a pure function over pytrees, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Path, pick, short


@dataclass(frozen=True, init=False)
class Output:
    """An earlier stage's output, or the part of it at a path: `Output(0)`, `Output(0, "skip")`."""

    stage: int
    path: Path

    def __init__(self, stage: int, *path: Any) -> None:
        object.__setattr__(self, "stage", stage)
        object.__setattr__(self, "path", path)


@dataclass(frozen=True, init=False)
class Batch:
    """The batch, or the part of it at a path: `Batch()`, `Batch("mask")`."""

    path: Path

    def __init__(self, *path: Any) -> None:
        object.__setattr__(self, "path", path)


@dataclass(frozen=True)
class Target:
    """The target of the microbatch, which the loss reads."""


Read = Output | Batch | Target


@dataclass(frozen=True)
class Stage:
    """A pure function `fn(params, *inputs) -> outputs` over pytrees.

    Args:
        fn: the function; `fn(params, state, *inputs) -> (outputs, state)` where `stateful`.
        reads: what the inputs are, one `Output` or `Batch` each (a number stands for `Output`). By default
            stage 0 reads the batch, any other the output of the stage before it.
        stateful: whether it carries buffers from microbatch to microbatch.
        frozen: names of entries of its params that get no gradient.
    """

    fn: Callable[..., Any]
    reads: Sequence[Read | int] | None = None
    stateful: bool = False
    frozen: Sequence[Any] = ()

    def __call__(self, params: Any, state: Any, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Run it: `(outputs, state)`."""
        if not self.stateful:
            return self.fn(params, *inputs), state
        result = self.fn(params, state, *inputs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"a stateful stage returns (outputs, state), not {type(result).__name__}")
        return result

    @cached_property
    def inputs(self) -> tuple[Read, ...]:
        """What it reads, in the order of its arguments."""
        return tuple(Output(r) if isinstance(r, int) else r for r in self.reads or ())

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The stages that it reads, lowest first."""
        return tuple(sorted({read.stage for read in self.inputs if isinstance(read, Output)}))

    def given(self, data: Microbatch) -> list[Any]:
        """What it reads of the microbatch, in the order of its arguments."""
        return [
            data.target if isinstance(read, Target) else _part(data.batch, read.path, "the batch")
            for read in self.inputs
            if not isinstance(read, Output)
        ]

    def arguments(self, outputs: Mapping[int, Any], given: Iterable[Any]) -> tuple[Any, ...]:
        """Its inputs, out of the outputs of the stages it reads and what it was given of the microbatch."""
        rest = iter(given)
        return tuple(
            _part(outputs[read.stage], read.path, f"the output of stage {read.stage}")
            if isinstance(read, Output)
            else next(rest)
            for read in self.inputs
        )


def _part(tree: Any, path: Path, name: str) -> Any:
    try:
        return pick(tree, path)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        lacks = "is None on this rank, and is read" if tree is None else "has nothing"
        raise ValueError(f"{name} {lacks} at {short(path)}") from error
