"""Put other functions into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import Stage
from fpipe.transforms.duals import primals


def check(pipeline: Pipeline) -> None:
    """Raise an error for something else than a pipeline that can be transformed.

    Raises:
        TypeError: it is no pipeline.
        ValueError: it comes from per_sample, which is the last transform.
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"a transform takes a Pipeline, as Pipeline([stage, ...], loss=loss), not {pipeline!r}")
    if pipeline.by_row:
        raise ValueError("per_sample is the last transform: apply the others first, as in per_sample(jvp(pipeline))")


def with_functions(
    pipeline: Pipeline,
    function_of: Callable[[int, Stage], Callable[..., Any]],
    loss: Callable[..., Any] | None,
    key: Callable[[int, Stage], Hashable] = lambda index, stage: None,
) -> Pipeline:
    """Return a pipeline of the stages' functions as `function_of` makes them.

    Stages of one function, for which `key` is equal too, have one function again, so that they share graphs.
    """
    functions: dict[Hashable, Callable[..., Any]] = {}
    stages = []
    for index, stage in enumerate(pipeline.stages):
        if stage.carry:
            raise ValueError(
                f"stage {index} has carry=True, and transforms have no slices: make it of a function without carry"
            )
        same = id(stage.fn), stage.stateful, key(index, stage)
        if same not in functions:
            functions[same] = function_of(index, stage)
        stages.append(replace(stage, fn=functions[same]))
    twin = pipeline.replace(stages, loss)
    twin.accepts = lambda batch: pipeline.accept(primals(batch))
    return twin
