"""Stages that pass values from one slice of a microbatch to the next, as plain stages.

What is carried is one more input, as if the output of a stage `CARRY`, and one more output, in `Carried`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree

from fpipe.stages.cuts import cuts_of, with_cuts
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import Flat, flatten
from fpipe.stages.stage import CARRY, Output, Stage

NO_CARRY = flatten(None)
"""The carried value that the first slice reads."""


class Carried(NamedTuple):
    """The result of a stage that carries."""

    outputs: Any
    carry: Any


@dataclass(frozen=True)
class OfSlice:
    """The function of a stage that carries, as `fn(params, carry, *inputs) -> Carried`; with state as of any stage."""

    stage: Stage

    def __call__(self, params: Any, *inputs: Any) -> Any:
        states, (carry, *rest) = inputs[: self.stage.stateful], inputs[self.stage.stateful :]
        outputs, carry, state = self.stage.run(params, states[0] if states else None, carry, rest)
        result = Carried(outputs, carry)
        return (result, state) if self.stage.stateful else result


def by_slice(pipeline: Pipeline) -> Pipeline:
    """Return a pipeline whose stages run slices: those that carry read what the slice before has passed on."""
    functions: dict[tuple[int, bool], OfSlice] = {}  # of equal stages the same one, so that they share graphs

    def sliced(stage: Stage) -> Stage:
        if not stage.carry:
            return stage
        function = functions.setdefault((id(stage.fn), stage.stateful), OfSlice(stage))
        return replace(stage, fn=function, carry=False, reads=(Output(CARRY), *stage.inputs))

    return pipeline.replace(list(map(sliced, pipeline.stages)), pipeline.loss)


def first_carried(spec: optree.PyTreeSpec) -> int:
    """Return the number of leaves of a stage's result before those of what it carries: all, if it carries nothing."""
    return spec.children()[0].num_leaves if spec.type is Carried else spec.num_leaves


def separated(result: Flat) -> tuple[Flat, Flat]:
    """Return the outputs of a stage, and what it carries."""
    if result.spec.type is not Carried:
        return result, NO_CARRY
    outputs, carry = result.spec.children()
    at, cuts = outputs.num_leaves, cuts_of(result)
    before, after = ({i: cut for i, cut in cuts.items() if i < at}, {i - at: cut for i, cut in cuts.items() if i >= at})
    return with_cuts(result.leaves[:at], outputs, before), with_cuts(result.leaves[at:], carry, after)


def is_root(number: int, spec: optree.PyTreeSpec, loss: bool) -> bool:
    """Return whether a leaf of a stage's result gets a cotangent: where leaf 0 is the loss, this and what is carried.

    Args:
        loss: leaf 0 is the loss.
    """
    return not loss or number == 0 or number >= first_carried(spec)
