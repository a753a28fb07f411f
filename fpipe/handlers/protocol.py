"""What a handler is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fpipe.autodiff.interface import Pieces
from fpipe.effects import Effect, Name, Value
from fpipe.plan import Plan
from fpipe.programs.program import Program, Programs
from fpipe.stages.microbatch import Microbatch, size


class Observer(Protocol):
    """Sees each effect begin and end, and before it each wait for what it is the first to use; changes nothing."""

    def begin(self, rank: int, effect: Effect) -> None: ...
    def end(self, rank: int, effect: Effect) -> None: ...

    def wait(self, rank: int, value: Value) -> None:
        """Its first use begins to wait for a value from another rank."""

    def arrive(self, rank: int, value: Value) -> None:
        """It is there."""


class Store(Protocol):
    """What a rank holds while a step runs: values by the number of their slot.

    `touched` are the slots that each effect of its program, by its place, needs, gives or frees; `apart` is what a step
    was given, parameters and microbatches, which is the caller's.
    """

    slots: list[Any]
    touched: list[tuple[int, ...]]

    def slot(self, name: Name) -> int:
        """The number of a name's slot."""

    def apart(self) -> Iterable[Any]: ...


@dataclass(frozen=True)
class Outcome:
    """What a whole step came to, as far as this process knows.

    Args:
        loss: known on every rank; not synchronized; None where only outputs were asked for.
        rows: of the whole batch.
        gradients: `{stage: tree}`.
    """

    loss: Tensor | None
    rows: int | None
    gradients: Mapping[int, Any]


@runtime_checkable
class Witness(Observer, Protocol):
    """An observer that is told as well what runs, where it is held, and when a step begins and is over."""

    def prepare(self, name: str, programs: Programs, handler: Handler) -> None:
        """What will run under this observer, before the handler compiles it."""

    def hold(self, rank: int, store: Store) -> None:
        """Where a rank that is played here holds its values."""

    def step_begins(self) -> None:
        """A step is called."""

    def step_ends(self, outcome: Outcome) -> None:
        """It has ended well."""


@dataclass(frozen=True)
class Inputs:
    """One step's arguments, split into microbatches.

    Args:
        params, state: `{stage: tree}` of the stages this process holds.
        data: batch and target of each microbatch.
        rows: rows of the whole batch, as far as this process knows.
        weighed: whether losses are scaled by their share of the rows.
        rng: (seed, step), or None to draw from the global generators.
        broken: why this process can't take part in the step; its peers are told.
    """

    params: Mapping[int, Any]
    state: Mapping[int, Any]
    data: Sequence[Microbatch]
    rows: int | None = None
    weighed: bool = False
    rng: tuple[int, int] | None = None
    broken: Exception | None = None

    def scale(self, m: int) -> Any:
        """What a microbatch's loss is scaled by: its share of the rows, unless given."""
        given, count = self.data[m].scale, len(self.data)
        if not self.weighed or given is not None:
            return given
        return 1 / count if self.rows is None else size(self.rows, count, m) / self.rows


@dataclass
class Results:
    """What a step leaves behind in this process.

    Args:
        gradients: for every entry in the params given.
        losses: by microbatch, of all on every rank; scaled.
        outputs: of the last stage, by microbatch, where it runs or where gathered: aux, or what evaluate gives.
        output: these put together, where this process has all.
        state: the new state of the stateful stages held here.
    """

    gradients: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    output: Any = None
    state: dict[int, Any] = field(default_factory=dict)


Run = Callable[[Inputs], Results]


class Handler(Protocol):
    """Gives effects their meaning."""

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        """The ranks that this process plays."""
        ...

    def compile(self, programs: Mapping[int, Program], pieces: Pieces, observe: Observer | None) -> Run:
        """A function that runs one step."""
        ...
