"""The options that decide how the stages of a pipeline are differentiated."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fpipe.autodiff.by_row import ByRow
from fpipe.autodiff.eager import Eager
from fpipe.autodiff.interface import PARAMS, Argument, DifferentiableStage
from fpipe.autodiff.traced import Graphs, Traced
from fpipe.policies import Policy, everything_saveable
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import Output, Stage

Autodiff = Literal["auto", "graph", "eager"]
MODES = ("default", "max-autotune-no-cudagraphs")
"""Modes of `torch.compile` whose functions return new memory in every call."""
Policies = Policy | Mapping[int, Policy]
"""A policy for all stages, or one for each. A stage without a policy saves everything."""


@dataclass(frozen=True)
class Options:
    """Options of `value_and_grad` about autodiff.

    Args:
        donated: forwards that are not differentiated may write a new state into the memory of the old one.

    Raises:
        ValueError: an unknown autodiff, something else than a policy, or options of graphs with autodiff="eager".
    """

    autodiff: Autodiff = "auto"
    policy: Policies = everything_saveable
    compile: bool | str = False
    dynamic: bool = False
    argnums: frozenset[Argument] = PARAMS
    donated: bool = False

    def __post_init__(self) -> None:
        if self.autodiff not in ("auto", "graph", "eager"):
            raise ValueError(f"autodiff must be 'auto', 'graph' or 'eager', not {self.autodiff!r}")
        for policy in self.policy.values() if isinstance(self.policy, Mapping) else [self.policy]:
            if not callable(policy):
                raise ValueError(f"a policy is a function of fpipe.policies, or one like them, not {policy!r}")
        if isinstance(self.compile, str) and self.compile not in MODES:
            raise ValueError(
                f"compile must be True, False or one of {MODES}, not {self.compile!r}: modes with CUDA graphs would "
                "overwrite the residuals of other microbatches; capture=True makes a graph of the step instead"
            )
        if self.autodiff == "eager" and (self.compile or self.dynamic or self.policy is not everything_saveable):
            raise ValueError("policy, compile and dynamic go with graphs: leave autodiff='eager' out")

    def pieces(self, pipeline: Pipeline, loss: bool) -> tuple[DifferentiableStage, ...]:
        """Return the autodiff of each stage.

        Args:
            loss: leaf 0 of the last stage's output is the loss.

        Raises:
            ValueError: a policy for a stage that the pipeline lacks.
        """
        stages = range(len(pipeline.stages))
        if isinstance(self.policy, Mapping) and not set(self.policy) <= set(stages):
            raise ValueError(
                f"policy has entries for stages {sorted(self.policy, key=repr)}; there are stages 0 to {stages[-1]}"
            )
        shared: dict[Hashable, Graphs] = {}
        return tuple(self._stage(pipeline.stages[s], s, loss, s == stages[-1], shared) for s in stages)

    def _stage(
        self, stage: Stage, s: int, loss: bool, last: bool, shared: dict[Hashable, Graphs]
    ) -> DifferentiableStage:
        loss = loss and last
        if stage.rows is not None:
            return ByRow(stage, self._stage(replace(stage, rows=None), s, loss, last, shared))
        if self.autodiff == "eager":
            return Eager(stage, argnums=self.argnums)
        policy = self.policy.get(s, everything_saveable) if isinstance(self.policy, Mapping) else self.policy
        return Traced(
            stage,
            s,
            policy=policy,
            compile=self.compile,
            dynamic=self.dynamic,
            fallback=self.autodiff == "auto",
            loss=loss,
            graphs=shared.setdefault((_alike(stage), policy, loss), Graphs()),
            argnums=self.argnums,
            last=last,
            donated=self.donated,
        )


def _alike(stage: Stage) -> Hashable:
    """Return a key that is equal for stages that can share graphs: the same function, reading alike."""
    places = {source: i for i, source in enumerate(stage.sources)}
    reads = [(places[read.stage], read.path) if isinstance(read, Output) else read for read in stage.inputs]
    return id(stage.fn), stage.stateful, stage.sequence, stage.local, tuple(stage.frozen), tuple(reads)
