"""Run a forward and a backward in turns, so that the collectives of one travel while the other computes.

Invariants:
- A part runs until it would wait for the collectives that it has posted in its turn; then the other goes on.
- The backward begins if it waits for collectives: it may have one to post at once, as of an expert's combine.
- A turn posts the collectives that do not depend on each other. So the order of all collectives follows from those of
  the two graphs, and is the same in every process that runs this pair, whatever it computes between them.
- Each part runs the same operations on the same values, in the same order. A traced backward draws no random numbers,
  so it may run between the draws of the forward, under the forward's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

Run = Callable[..., Any]
"""`run(function, *lists)` calls a function of a graph, and returns its results."""
Steps = Generator[None, None, Any]


def plainly(function: Callable[..., Any], *lists: Any) -> Any:
    return function(*lists)


class Runner(Protocol):
    """A stage whose graphs are called by its `run`; `waits` is whether one has waited for collectives."""

    run: Run
    waits: bool


@dataclass(slots=True)
class Part:
    """A forward, or a backward.

    Args:
        call: runs it; it gives at most one function to the `run` of the stage.
        begin: called before the part goes on.
    """

    stage: Runner
    call: Callable[[], Any]
    begin: Callable[[], Any]

    def __call__(self, run: Run = plainly) -> None:
        self.begin()
        self.stage.run = run
        try:
            self.call()
        finally:
            self.stage.run = plainly


def in_turns(forward: Part, backward: Part) -> None:
    """Run two parts, the functions of their graphs in turns.

    Args:
        forward: of a stage that has no graph, it runs first.
        backward: of a stage that has one.
    """
    has_graph, outputs = False, None

    def run_forward(function: Callable[..., Any], *lists: Any) -> Any:
        nonlocal has_graph
        has_graph = True

        def run_backward(other: Callable[..., Any], *others: Any) -> Any:
            nonlocal outputs
            first, second = _Turn(forward, function, lists), _Turn(backward, other, others)
            _alternate(*([second, first] if waits(other) else [first, second]))
            outputs = first.results
            backward.begin()
            return second.results

        backward(run_backward)
        forward.begin()
        return outputs

    forward(run_forward)
    if not has_graph:
        backward()


class _Turn:
    """A function that runs on in each turn, up to its next wait; one that waits for nothing runs in a single turn."""

    def __init__(self, part: Part, function: Any, lists: tuple[Any, ...]) -> None:
        steps = function.steps if waits(function) else partial(_whole, function)
        self.part, self.steps, self.results = part, steps(*lists), None

    def has_ended(self) -> bool:
        """Run on; return whether there is nothing left."""
        self.part.begin()
        try:
            next(self.steps)
        except StopIteration as end:
            self.results = end.value
            return True
        return False


def _alternate(one: _Turn, other: _Turn) -> None:
    while not one.has_ended():
        one, other = other, one
    while not other.has_ended():
        pass


def waits(function: Any) -> bool:
    """Return whether a function waits for collectives that it has posted."""
    return getattr(function, "steps", None) is not None  # compiled code has none


def _whole(function: Callable[..., Any], *lists: Any) -> Steps:
    yield from ()
    return function(*lists)
