"""Run one rank's instructions, and add the stage and microbatch to their errors."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fpipe import effects as fx
from fpipe.autodiff.by_row import ByRow
from fpipe.autodiff.eager import Eager
from fpipe.autodiff.interface import UNTRACED, Prepared
from fpipe.devices import CaptureError, is_capturing
from fpipe.errors import StageError, TransportError
from fpipe.handlers.alike import StagePeers, descriptions, shardings_of
from fpipe.handlers.calls import Calls, Step
from fpipe.handlers.captured import UNCAPTURED, uncapturable
from fpipe.handlers.gradients import Rows, Sum, add_parts, check_trained, data_gradients
from fpipe.handlers.protocol import BegunAgain, Departure, Inputs, PeerLost, Results, StepRejected
from fpipe.stages.pytree import paths_of, short, summary
from fpipe.stages.sharding import Placed, is_dtensor, local, locals_of, processes_beside
from fpipe.stages.stage import Batch
from fpipe.tables import slice_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Executor:
    """Run the effects of one rank's program."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.plan, self.rank = calls, calls.plan, calls.rank
        self.pieces, self.pipeline = calls.pieces, calls.pipeline
        self.stages = self.plan.stages_on(self.rank)
        self.stage_peers = StagePeers()
        self.at = 0  # the index of the instruction that runs

    def start(self, inputs: Inputs) -> None:
        """Set the arguments of the next step, and prepare its params. Runs no effect.

        Raises:
            StageError: a stage's params can't be used.
        """
        prepared = {}
        for stage in self.stages:
            try:
                prepared[stage] = self.pieces.stages[stage].prepare(self.pipeline.params_of(inputs.params, stage))
                if self.pieces.differentiated:
                    check_trained(self.pipeline, self.plan, stage, prepared[stage])
                if self.pieces.precision.compute is not None:
                    prepared[stage].replace(list(map(self.pieces.precision.cast, prepared[stage].leaves)))
            except StageError as error:
                raise error.on(self.rank) from error.__cause__
            except Exception as error:  # the types of the tree are the user's, and may raise anything
                raise StageError(f"its params can't be used: {error}", rank=self.rank, stage=stage) from error
        sums = defaultdict[int, Sum](partial(Rows if self.pipeline.by_row else Sum, self.pieces.precision))
        (state,) = inputs.state
        has_pieces = any(is_dtensor(leaf) for each in prepared.values() for leaf in each.leaves)
        self.calls.running = Step(inputs, prepared, dict(state), sums, inputs.params if has_pieces else None)

    def agreed(
        self,
        inputs: Inputs,
        begin: Callable[[], Inputs],
        departure: Departure,
        processes: Collection[int] = (),
        replicas: DeviceMesh | None = None,
    ) -> Inputs:
        """Begin a step by a function; on all processes that compute its stages together, or on none.

        Args:
            begin: returns the inputs with this process's pieces. It is not called where the inputs are broken.
            departure: of the handler.
            processes: the handler's, over which no stage is computed.
            replicas: their mesh.

        Raises:
            Exception: the inputs are broken, or `begin` raised it.
            StageError: another of these processes can't run the step, or has other arguments.
            TransportError: one of them did not come.
        """
        error, step = inputs.broken, None
        if error is None:
            try:
                result, step = begin(), self.calls.step
            except StageError as failure:
                error = failure
        if step is not None and not any(prepared.placed for prepared in step.prepared.values()):
            return result
        groups = processes_beside(inputs.params, processes, replicas)
        shardings = None if step is None else shardings_of(step)

        def rows(has_values: bool) -> dict[str, str]:
            return {} if step is None else descriptions(step, self.pieces, has_values)

        try:
            self.stage_peers.agree(groups, inputs, shardings, rows, error, departure)
        except StageError as difference:
            if difference is error:  # with its cause
                raise
            raise difference.on(self.rank) from None
        return result

    def place(self, processes: Collection[int] = ()) -> Inputs:
        """Put this process's pieces in place of DTensors, those over replicas excepted; return the inputs with pieces.

        Args:
            processes: the handler's, over which no stage is computed.

        Raises:
            StageError: a stage's params are placed as no stage can read them.
        """
        step = self.calls.step
        if step.placed is None:
            return step.inputs
        meshes: dict[DeviceMesh, None] = {}  # of the processes that compute stages together
        for stage, prepared in step.prepared.items():
            for i, leaf in enumerate(prepared.leaves):
                if is_dtensor(leaf):
                    if (placed := self._placed(stage, prepared, i)) is not None:
                        prepared.placed[i] = placed
                    prepared.leaves[i] = self.pieces.precision.cast(local(leaf))
            for i, placed in prepared.placed.items():
                if placed.mesh not in meshes:
                    self._check_mesh(stage, prepared, i, processes)
                    meshes[placed.mesh] = None
            self._check_one_mesh(stage, prepared)
            if prepared.placed and isinstance(self.pieces.stages[stage], Eager | ByRow):
                raise StageError(UNTRACED, rank=self.rank, stage=stage)
        for prepared in step.prepared.values():
            prepared.meshes[:] = dict.fromkeys([*(placed.mesh for placed in prepared.placed.values()), *meshes])
        step.inputs = replace(step.inputs, params=locals_of(dict(step.inputs.params)))
        return step.inputs

    def _check_mesh(self, stage: int, prepared: Prepared, number: int, processes: Collection[int]) -> None:
        """Raise StageError if a leaf is placed over ranks of the pipeline, or over other processes than this one."""
        mesh = prepared.placed[number].mesh
        if mesh.get_coordinate() is None:
            wrong, way_out = "which does not have this process", "over a mesh that has it"
        elif len({*mesh.mesh.flatten().tolist()} & {*processes}) > 1:
            wrong, way_out = "which has ranks of the pipeline", "over another dimension of the mesh, as mesh['tp']"
        else:
            return
        raise StageError(f"{_named(prepared, number)}, {wrong}: shard it {way_out}", rank=self.rank, stage=stage)

    def _check_one_mesh(self, stage: int, prepared: Prepared) -> None:
        """Raise StageError if the leaves of a stage are placed over several meshes."""
        meshes = {placed.mesh: i for i, placed in reversed(prepared.placed.items())}  # with a leaf over it
        if len(meshes) > 1:
            one, other = sorted(meshes.values())[:2]
            raise StageError(
                f"{_named(prepared, one)}, and {_named(prepared, other)}: shard all params of a stage over one mesh",
                rank=self.rank,
                stage=stage,
            )

    def _placed(self, stage: int, prepared: Prepared, number: int) -> Placed | None:
        try:
            return Placed.of(prepared.leaves[number], None)
        except ValueError as error:
            name = short(paths_of(prepared.spec)[number])
            raise StageError(f"its params{name} can't be used: {error}", rank=self.rank, stage=stage) from error

    def set_rows(self, rows: int | None, here: int | None) -> None:
        """Set the step's number of rows, of all replicas and of this one, received from other processes."""
        step = self.calls.step
        sizes = step.inputs.sizes
        if sizes is None and here is not None:  # the batch was split, elsewhere
            sizes = step.inputs.split(here)
        step.inputs = replace(step.inputs, rows=rows, sizes=sizes)

    def run(self, start: int, stop: int) -> None:
        """Run effects `start` to `stop` - 1 of the program.

        Raises:
            StageError: a stage's function failed; with rank, stage and microbatch.
        """
        calls, starts = self.calls.calls, self.calls.starts
        try:
            for self.at in range(starts[start], starts[stop]):
                calls[self.at]()
        except StageError as error:
            if error.rank is not None:
                raise
            effect = self.calls.computes.get(self.at)
            stage, m = (getattr(effect, name, None) for name in ("stage", "microbatch"))
            raise error.on(self.rank, stage, m) from error.__cause__
        except CaptureError as error:
            effect = self.calls.computes.get(self.at)
            place = {"stage": getattr(effect, "stage", None), "microbatch": getattr(effect, "microbatch", None)}
            raise uncapturable(error, rank=self.rank, **place) from error
        except (PeerLost, StepRejected, BegunAgain, TransportError):  # of another replica, whose weights scale the loss
            raise
        except Exception as error:  # a stage is the user's, and may raise anything
            if self.at not in self.calls.computes:
                raise  # only compute effects run the user's functions
            raise self._failure(self.calls.computes[self.at], error) from error

    def effect(self) -> fx.Effect:
        """Return the effect that runs, or ran last. Any thread may call it."""
        return self.calls.program.effects[max(0, bisect_right(self.calls.starts, self.at) - 1)]

    def finish(self) -> Results:
        """Return the step's results on this rank, and release all its values."""
        step = self.calls.step
        results, params = step.results, step.inputs.params
        self.calls.clear()
        results.state = [{stage: step.state[stage] for stage in self.stages if self.pipeline.stages[stage].stateful}]
        for (stage, m), leaves in step.data_gradients.items():
            gradients = data_gradients(self.pipeline.stages[stage], step.inputs.data[m], leaves)
            results.data_gradients[stage, m + step.inputs.first] = gradients
        add_parts(step.sums.values())  # of all stages in one reduction
        if (stages := {*step.sums, *step.scattered}) or self.pieces.differentiated:
            left = [stage for stage in params if stage not in step.gradients]
            every = step.gradients | self.calls.gradients_of(left, step, stages)
            results.gradients = {stage: every[stage] for stage in params}
        return results

    def _failure(self, effect: Any, error: Exception) -> StageError:
        stage: Any = getattr(effect, "stage", None)
        m: Any = getattr(effect, "microbatch", None)
        calls, message = self.calls, f"{type(effect).__name__} raised {type(error).__name__}: {error}"
        if isinstance(effect, fx.Forward):
            t = slice_of(effect)
            sources = self.plan.sources(stage)
            inputs = {source: calls.slots[calls.slot(fx.Activation(source, m, t))] for source in sources}
            hints = [f"stage {source} gave it {summary(value.tree)}" for source, value in inputs.items()]
            reads_batch = any(isinstance(read, Batch) for read in self.pipeline.stages[stage].inputs)
            if reads_batch and calls.step.inputs.data[self.plan.unit(m, t)].batch is None:
                hints.append("it reads the batch, which is None on this rank")
            message += f" ({'; '.join(hints)})" if hints else ""
            if "in-place operation" in str(error):
                message = (
                    "it writes in place to an input, as a first layer with inplace=True does, or to a parameter: pass "
                    f"inplace=False, or write to a clone. {message}"
                )
            compute = self.pieces.precision.compute
            if compute is not None and ("dtype" in str(error) or "scalar type" in str(error)):
                message = (
                    f"stages compute in {compute}, to which precision= casts params alone: cast the batch. {message}"
                )
        if is_capturing():
            message += f". It is captured as a graph, and there nothing may wait for the device; or {UNCAPTURED}"
        return StageError(message, rank=self.rank, stage=stage, microbatch=m)


def _named(prepared: Prepared, number: int) -> str:
    placed = prepared.placed[number]
    return f"params{short(paths_of(prepared.spec)[number])} is placed {placed.placements} over {placed.mesh}"
