"""Run one rank's instructions, and add the stage and microbatch to their errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fpipe import effects as fx
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.errors import StageError
from fpipe.handlers.calls import NO_FUNCTIONS, Calls, Channels, Functions, Step
from fpipe.handlers.gradients import LeafKey, received, total
from fpipe.handlers.protocol import Inputs, Observer, Results
from fpipe.programs.program import Program
from fpipe.stages.pytree import summary
from fpipe.stages.stage import Batch


class Executor:
    """Run the effects of one rank's program."""

    def __init__(
        self,
        program: Program,
        pieces: DifferentiablePipeline,
        channels: Channels,
        observe: Observer | None,
        device: torch.device | None = None,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        self.program, self.plan, self.rank = program, program.plan, program.rank
        self.pieces, self.pipeline = pieces, pieces.pipeline
        self.stages = self.plan.stages_on(self.rank)
        self.calls = Calls(program, pieces, channels, observe, device, functions)
        if observe is not None:
            observe.on_store(self.rank, self.calls)

    def start(self, inputs: Inputs) -> None:
        """Set the arguments of the next step, and prepare its params. Runs no effect.

        Raises:
            StageError: a stage's params can't be used.
        """
        prepared = {}
        for stage in self.stages:
            try:
                prepared[stage] = self.pieces.stages[stage].prepare(self.pipeline.params_of(inputs.params, stage))
            except StageError as error:
                raise error.on(self.rank) from error.__cause__
            except Exception as error:
                raise StageError(f"its params can't be used: {error}", rank=self.rank, stage=stage) from error
        self.calls.running = Step(inputs, prepared, dict(inputs.state))

    def set_rows(self, rows: int | None) -> None:
        """Set the step's number of rows, received from another rank."""
        step = self.calls.step
        step.inputs = replace(step.inputs, rows=rows)

    def run(self, start: int, stop: int) -> None:
        """Run effects `start` to `stop` - 1 of the program.

        Raises:
            StageError: a stage's function failed; with rank, stage and microbatch.
        """
        calls, starts, at = self.calls.calls, self.calls.starts, 0
        try:
            for at in range(starts[start], starts[stop]):
                calls[at]()
        except StageError as error:
            effect = self.calls.computes.get(at)
            if error.rank is not None:
                raise
            raise error.on(self.rank, getattr(effect, "microbatch", None)) from error.__cause__
        except Exception as error:
            effect = self.calls.computes.get(at)
            if effect is None:
                raise  # only compute effects run the user's functions
            raise self._failure(effect, error) from error

    def finish(self) -> Results:
        """Return the step's results on this rank, and release all its values."""
        step, results = self.calls.step, self.calls.step.results
        self.clear()
        results.state = {stage: step.state[stage] for stage in self.stages if self.pipeline.stages[stage].stateful}
        if step.sums:
            results.gradients = total(self.pipeline, self.plan, step.inputs.params, self.stages, self._sums(step))
        return results

    def clear(self) -> None:
        """Release all values of the step."""
        self.calls.clear()

    def _sums(self, step: Step) -> dict[tuple[int, int], dict[LeafKey, Any]]:
        sums = {(stage, self.rank): step.sums_of(stage) for stage in step.sums}
        for (stage, rank), leaves in step.foreign.items():
            sums[stage, rank] = received(self.pipeline, self.plan, step.inputs.params, stage, self.rank, leaves)
        return sums

    def _failure(self, effect: Any, error: Exception) -> StageError:
        stage: Any = getattr(effect, "stage", None)
        m: Any = getattr(effect, "microbatch", None)
        calls = self.calls
        message = f"{type(effect).__name__} raised {type(error).__name__}: {error}"
        if isinstance(effect, fx.Forward):
            inputs = {source: calls.slots[calls.slot(fx.Activation(source, m))] for source in self.plan.sources(stage)}
            hints = [f"stage {source} gave it {summary(value.tree)}" for source, value in inputs.items()]
            if self._lacks_batch(effect):
                hints.append("it reads the batch, which is None on this rank")
            if "in-place operation" in str(error):
                hints.append("a stage may not change its inputs")
            message += f" ({'; '.join(hints)})" if hints else ""
        return StageError(message, rank=self.rank, stage=stage, microbatch=m)

    def _lacks_batch(self, e: fx.Forward) -> bool:
        reads = self.pipeline.stages[e.stage].inputs
        return self.calls.step.inputs.data[e.microbatch].batch is None and any(isinstance(r, Batch) for r in reads)
