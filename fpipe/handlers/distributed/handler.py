"""One rank of one replica in each process, over torch.distributed: gloo on the CPU, NCCL on GPUs.

A step begins with the handshake: numbers of all ranks, from which each learns whether the inputs have the signature of
an earlier step and whether every rank can run the step. Ranks wait for it before values are received or sent, but for
the first activations of a step like the one before (channels.py), and before anything is updated. The losses travel
after the last forward (losses.py), and a rank returns when its own program has ended. A rank that fails raises its
error, its peers raise `TransportError` with its reason, and the next step may go on where none of them has returned:
steps.py.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe import effects as fx
from fpipe.autodiff.graph.collectives import WATCH
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.devices import Device, autocasts, cuda_count, device_of, is_capturing
from fpipe.errors import ScheduleError, StageError, TransportError
from fpipe.errors.arguments import checked
from fpipe.handlers.alike import notices_of, options
from fpipe.handlers.calls import NO_FUNCTIONS, Calls, Functions
from fpipe.handlers.contents import fingerprint
from fpipe.handlers.distributed.ahead import Ahead
from fpipe.handlers.distributed.backends import NCCL, Backend, Gloo
from fpipe.handlers.distributed.channels import Channels
from fpipe.handlers.distributed.collectives import Collectives, process_group
from fpipe.handlers.distributed.failures import DONATED
from fpipe.handlers.distributed.grid import Grid
from fpipe.handlers.distributed.handshake import COMPILING, Handshake, RollCall
from fpipe.handlers.distributed.losses import Losses
from fpipe.handlers.distributed.pieces import PieceWatch
from fpipe.handlers.distributed.replicas import ReplicaChannels, lanes
from fpipe.handlers.distributed.setup import Setup
from fpipe.handlers.distributed.steps import Steps
from fpipe.handlers.executor import Executor
from fpipe.handlers.gradients import names_read_elsewhere, readers_of_shared_leaves
from fpipe.handlers.protocol import (
    BegunAgain,
    Departure,
    Inputs,
    Observer,
    PeerLost,
    Replays,
    Replicas,
    Results,
    Run,
    Span,
    StepRejected,
    Updates,
)
from fpipe.plan import Plan
from fpipe.programs.completions import send_completions
from fpipe.programs.leading import leading
from fpipe.programs.program import Program
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import flatten
from fpipe.tables import FORWARD, WEIGHT

SPANS = 16  # of work beside the steps that are kept


class Distributed:
    """Plays the rank of this process.

    Args:
        group: a process group whose ranks are the plan's, or one dimension of a DeviceMesh; by default all
            processes of the job.
        replicas: the other dimensions of the mesh: `Distributed(mesh["pp"], replicas=mesh["dp"])`. A replica's batch is
            its own; loss and gradients are those of all replicas' batches together. By default there is one replica.
        context: the name of a dimension of `replicas`, or several, whose ranks share the rows of a batch and have parts
            of each row, as of a sequence: `Distributed(mesh["pp"], replicas=mesh["dp", "cp"], context="cp")`. A row
            counts once. Their stages exchange what they need of each other's parts: `fpipe.parallel.attention`.
        exact: add the gradients of the replicas in their order, so that the bits are those of one process with the same
            number of threads; else in an order of the backend's. Over a mesh of several dimensions, they are then
            added over the last one first, and each part of the sum over the others.
        experts: the name of a dimension of `replicas` over which experts are spread:
            `Distributed(mesh["pp"], replicas=mesh["dp", "ep"], experts="ep")`. A stage gets this process's piece of a
            leaf that is cut over it, as by `interop.shard`; its gradient is added over the other dimensions alone. See
            `parallel.mixture_of_experts`.
        timeout: seconds within which a rank that others wait for must answer, and come to the step.
        compute_timeout: seconds that one effect may compute while others wait for it, with tracing and compilation.
        device: where values are; under NCCL by default the current CUDA device (call `torch.cuda.set_device`
            first), else the CPU.
        backend: `Gloo()` or `NCCL()`, by default that of the device.
        functions: effect class -> `function(calls, effect)`, as in `Local`.

    `rank` is the one that this process plays; `is_first` is whether it is rank 0 of the first replica, the process that
    prints. `peers` are the other processes, for calls between steps; None where this process is the only one.
    `value_and_grad` and `evaluate` connect the ranks: every rank calls them, in the same order.

    Raises:
        ValueError: the replicas have no dimension for the experts; a time limit is not positive; there is no such
            device.
        ScheduleError: (by them) the group's size is not the plan's, or ranks have different programs.
        TransportError: (by them, and in a step) a peer failed; names it, its reason, and the value waited for. The next
            step may go on, unless a rank is lost. Or (by them) a GPU can't run so many edges, or an environment
            variable would make ranks wait for ever.
    """

    @checked()
    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        replicas: DeviceMesh | None = None,
        context: str | Sequence[str] = (),
        exact: bool = True,
        experts: str | None = None,
        timeout: float = 300.0,
        compute_timeout: float = 1800.0,
        device: torch.device | str | Device | None = None,
        backend: Backend | None = None,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        for name, limit in {"timeout": timeout, "compute_timeout": compute_timeout}.items():
            if not limit > 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {limit!r}")
        self.functions = functions
        self.group = process_group(group)
        self.rank, self.timeout = dist.get_rank(self.group), timeout
        if self.rank < 0:
            raise TransportError("this process is not in the group: make the handler on the group's ranks only")
        self.mesh, self.exact = replicas, exact
        self.grid = _grid(self.group, replicas, (context,) if isinstance(context, str) else tuple(context))
        self.experts = None if experts is None else _replica_dim("experts", "ep", experts, replicas)
        self.size = self.grid.ranks
        place = device_of(_device(self.group) if device is None else device)
        self.device = place.torch_device
        self.devices = (self.device,)
        backend = backend or (NCCL() if self.device.type == "cuda" else Gloo())
        self._options: dict[str, Any] = {
            "exact": exact,
            "timeout": timeout,
            "compute_timeout": compute_timeout,
            "device": place,
            "backend": backend,
            "functions": functions,
        }
        self._setup = Setup(self.group, replicas, self.grid, timeout, compute_timeout, place, backend)
        grid = self.grid
        self.peers = (
            Collectives(self._setup, grid.number, grid.size, timeout, name=grid.name) if grid.size > 1 else None
        )
        self.beside = deque[Span](maxlen=SPANS)

    def __repr__(self) -> str:
        replica = f" of replica {self.grid.replica}" if self.grid.replicas > 1 else ""
        return f"<Distributed: rank {self.rank} of {self.size}{replica}, on {self.device}>"

    @property
    def is_first(self) -> bool:
        return self.grid.number == 0

    def over(self, group: dist.ProcessGroup, replicas: DeviceMesh | None = None) -> Distributed:
        """Return a handler with these options for other processes, of which this is one; they all call it."""
        return Distributed(group, replicas=replicas, **self._options)

    @property
    def departure(self) -> Departure:
        return self._setup.departure

    @property
    def flight(self) -> Path | None:
        return self._setup.flight

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        if plan.ranks != self.size:
            raise ScheduleError(
                f"the plan has {plan.ranks} ranks, the group {self.size} processes: start with "
                f"torchrun --standalone --nproc-per-node {plan.ranks * self.grid.replicas}, or make the plan for "
                f"{self.size} ranks"
            )
        if plan.replicas != self.grid.replicas:
            raise ScheduleError(
                f"the plan is of replicas={plan.replicas}, the handler of {self.grid.replicas}: make the plan by "
                f"pipeline.plan(..., replicas={self.grid.replicas}), or the handler by Distributed(mesh['pp'], "
                f"replicas=mesh['dp']) with {plan.replicas} of them"
            )
        return (self.rank,)

    def replicas(self, plan: Plan) -> Replicas:
        if self.grid.replicas == 1:
            return Replicas(range(1), 1, mesh=self.mesh)
        here = range(self.grid.replica, self.grid.replica + 1)
        return Replicas(here, self.grid.replicas, self._setup.numbers_of_replicas, self.mesh)

    def _processes(self) -> frozenset[int]:
        """Return the job's numbers of this handler's processes."""
        replicas = [] if self.mesh is None else self.mesh.mesh.flatten().tolist()
        return frozenset([*dist.get_process_group_ranks(self.group), *replicas])

    def compile(self, programs: Mapping[int, Program], pieces: DifferentiablePipeline, observe: Observer | None) -> Run:
        steps = self._setup.ready()
        connections = steps.connections
        grid, plan = self.grid, programs[self.rank].plan
        sends = {(rank, e.rank) for rank, p in programs.items() for e in p if isinstance(e, fx.Send)}
        edges = {(grid.process(a, r), grid.process(b, r)) for a, b in sends for r in range(grid.replicas)}
        own_lanes = self._lanes(plan)
        self._check_context(pieces)
        recorder = () if observe is None else observe.agreed
        alike = {
            "schedules, plans or recorders": (recorder, [(p.plan, p.effects) for _, p in sorted(programs.items())]),
            "options exact= or experts=": (self.exact, self.experts),
            **{f"options {name}": option for name, option in options(pieces).items()},
        }
        with steps.running(lambda: "setting up connections"):
            number = steps.number
            numbers = [*map(fingerprint, alike.values())]
            self._compare(RollCall(steps, COMPILING, numbers, None), alike)
            refusal = connections.refusal(edges, own_lanes)
            roll = RollCall(steps, COMPILING, [], None if refusal is None else TransportError(refusal))
            _, reason = roll.answers("setting up connections")
            if reason is not None:
                raise StepRejected(TransportError(reason))
            connections.connect(edges, own_lanes)
            # The program is every rank's, or none's.
            RollCall(steps, COMPILING, [], None).answers("setting up connections")
        options_of_replicas = self.exact, plan.gathered, pieces.precision, self.experts
        channels = Channels(
            connections,
            Handshake(steps, program=number),
            send_completions(programs, self.rank),
            plan.slices > 1 or any(stage.stateful for stage in pieces.pipeline.stages),
            plan.slices,
            plan.prefills,
            None if self.mesh is None else partial(ReplicaChannels, connections, self.mesh, *options_of_replicas),
            frozenset() if connections.device.asynchronous else leading(programs),
        )
        device, markers = connections.device, connections.activity.markers

        def pace(effect: fx.Effect) -> Callable[[], None]:
            def mark() -> None:
                markers.add(effect)
                connections.keep_up()

            return mark

        paced, flight = pace if device.asynchronous else None, connections.activity.flight
        program = None if flight is None else flight.program(programs[self.rank])
        recorded = None if flight is None else lambda effect: flight.writer("effect", str(effect), program)
        calls = Calls(programs[self.rank], pieces, channels, observe, device, self.functions, paced, recorded)
        return _CompiledProgram(Executor(calls), channels, steps, self._processes(), self.mesh)

    @property
    def replays(self) -> Replays:
        return self._setup

    def check(self) -> None:
        """Wait until every rank has ended the last step, and the device has run everything that was launched.

        Call it before results leave this process, for example into a checkpoint: a step returns when this rank has
        ended or launched its own program, and what comes after a failure of a peer is not a result.

        Raises:
            TransportError: a peer failed in the last step, or since; what this process has computed may be wrong.
        """
        self._setup.check()

    def _check_context(self, pieces: DifferentiablePipeline) -> None:
        """Raise ScheduleError for what would join parts of a row as if they were rows."""
        if not self.grid.batches:
            return
        if pieces.gather:
            raise ScheduleError(
                "gather=True joins the outputs of replicas by rows, and with context= they are parts of rows: leave it "
                "out, and join them by fpipe.parallel.unshard_sequence"
            )
        if pieces.pipeline.by_row:
            raise ScheduleError(
                "per_sample gives the gradients of each row, and with context= a rank has parts of rows: leave one of "
                "them out"
            )

    def _lanes(self, plan: Plan) -> Mapping[str, Sequence[int]]:
        """Return the processes with which this one gathers and scatters."""
        if self.mesh is None:
            return {}
        return lanes(self.mesh, self.grid, self.exact, bool(plan.gathered), self.experts)

    def _compare(self, roll: RollCall, names: Iterable[str]) -> None:
        """Check that all ranks compile the same, by one number of each name."""
        for name, numbers in zip(names, zip(*roll.wait(), strict=True), strict=True):
            if len(set(numbers)) > 1:
                raise StepRejected(
                    ScheduleError(
                        f"rank {self.rank}: the ranks were given different {name}; every rank"
                        f"{' of every replica' if self.grid.replicas > 1 else ''} must make the same"
                    )
                )


def _grid(group: dist.ProcessGroup, replicas: DeviceMesh | None, context: Sequence[str]) -> Grid:
    """Return the place of this process.

    Raises:
        ValueError: the replicas have no such dimensions.
        TransportError: it is not in the mesh of the replicas.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shared = {_replica_dim("context", "cp", name, replicas) for name in context}
    if replicas is None:
        return Grid(size, 1, rank, 0)
    processes = replicas.mesh.flatten().tolist()
    if dist.get_rank() not in processes:
        raise TransportError("this process is not in the mesh of the replicas: make the handler on its processes only")
    batches: tuple[int, ...] = ()
    if shared:
        parts = [n if dim in shared else 1 for dim, n in enumerate(replicas.shape)]
        apart = [1 if dim in shared else n for dim, n in enumerate(replicas.shape)]
        batches = tuple(torch.arange(prod(apart)).reshape(apart).repeat(parts).flatten().tolist())
    return Grid(size, len(processes), rank, processes.index(dist.get_rank()), batches)


def _replica_dim(option: str, usual: str, name: str, replicas: DeviceMesh | None) -> int:
    """Return the number of a dimension of the replicas.

    Args:
        option: the option that names it.
        usual: the name that the message shows.

    Raises:
        ValueError: they have no such dimension.
    """
    names = [] if replicas is None else list(replicas.mesh_dim_names or ())
    if name not in names:
        raise ValueError(
            f"{option}={name!r} is no dimension of the replicas, {names}: pass Distributed(mesh['pp'], "
            f"replicas=mesh['dp', {usual!r}], {option}={usual!r})"
        )
    return names.index(name)


def _device(group: dist.ProcessGroup) -> str:
    return "cuda" if cuda_count() and "nccl" in dist.get_backend_config(group) else "cpu"


def _last_forward(program: Program) -> int:
    """Return the number of effects after which a rank has computed its losses; 0 if it computes none."""
    last, rows = program.plan.stages - 1, program.table.effects
    computes: Iterable[tuple[int, Any]] = ((at, part) for at, e in enumerate(program) for part in fx.parts(e))
    runs = (at for at, part in computes if rows[type(part)].work & FORWARD and part.stage == last)
    return max((at + 1 for at in runs), default=0)


class _InPlace(NamedTuple):
    """Updates in place: after the first one, a failure of the step ends the handler.

    Args:
        agree: waits for the handshake of the step.
    """

    steps: Steps
    agree: Callable[[], None]
    update: Updates
    donates: bool = True

    def __call__(self, gradients: Mapping[int, Any]) -> None:
        self.agree()
        self.steps.irrevocable = DONATED
        self.update(gradients)


class _CompiledProgram:
    """A program, compiled for the rank of this process; called once a step."""

    def __init__(
        self,
        executor: Executor,
        channels: Channels,
        steps: Steps,
        processes: frozenset[int] = frozenset(),
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.executor, self.channels, self.steps, self.processes = executor, channels, steps, processes
        self.mesh = mesh  # of the replicas
        self.plan, self.pieces, self.connections = executor.plan, executor.pieces, channels.connections
        self.shared_readers = readers_of_shared_leaves(executor.pipeline, self.plan, self.pieces.argnums)
        program = executor.calls.program
        self.watch = PieceWatch(self.connections, channels.agree, notices_of([program]), processes)
        effects = (part for effect in program for part in fx.parts(effect))
        self.ahead = Ahead(executor, self.connections.device.torch_device)
        self.losses, self.last_forward = Losses(channels, self.plan), _last_forward(program)
        if self.pieces.loss and not self.last_forward:
            channels.agreed = self._give_losses
        self.is_evaluation = not any(program.table.effects[type(part)].work & WEIGHT for part in effects)

    def __call__(self, inputs: Inputs) -> Results:
        if (grid := self.connections.grid).replicas > 1:
            count = self.plan.units
            inputs = replace(inputs, first=grid.replica * count, total=grid.replicas * count)
        token = WATCH.set(self.watch)
        try:
            with self.steps.running(self.executor.effect, self._clear, self.is_evaluation):
                return self._step(inputs)
        finally:
            WATCH.reset(token)
            self.executor.calls.clear()
            self._clear()

    def _clear(self) -> None:
        self.channels.clear()
        self.losses.clear()

    def _step(self, inputs: Inputs) -> Results:
        executor = self.executor
        if inputs.update is not None and inputs.update.donates:
            inputs = replace(inputs, update=_InPlace(self.steps, self.channels.agree, inputs.update))
        try:
            inputs = executor.agreed(
                inputs, partial(self._begin, inputs), self.steps.departure, self.processes, self.mesh
            )
        except (PeerLost, TransportError):
            raise
        except Exception as error:  # of any kind: the caller's arguments may be broken
            inputs = replace(inputs, broken=error)
        has_loss = self.plan.stages - 1 in executor.stages
        self.channels.begin(inputs, has_loss)
        self._attempt(inputs, has_loss)
        inputs, results = executor.calls.step.inputs, executor.finish()
        for stage in self.shared_readers:
            self._share_data_gradients(stage, results, inputs.data)
        if self.pieces.gather:
            self._share_outputs(results)
        self._merge(results)
        if self.pieces.loss:
            results.losses = self.losses.gather(results, inputs)
        self.channels.end()
        self.ahead.leave()
        if self.pieces.loss and self.connections.device.asynchronous:
            # The exchange of the losses makes devices wait, not hosts.
            results.differentiable |= any(self.channels.handshake.confirm(results.differentiable))
        if self.pieces.differentiated and not is_capturing():
            results.refuse_constant_loss()
        if inputs.post_validate:
            self._refuse_shared_stages()
        if inputs.share is None:
            self.steps.end_program()
        else:
            results.shares = self.steps.end_program(inputs.share(results.gradients))
        return results

    def _refuse_shared_stages(self) -> None:
        """Raise StageError for a stage that is computed with processes that would not begin a step again."""
        for stage in self.executor.stages:
            if getattr(self.pieces.stages[stage], "peers", ()):
                raise StageError(
                    "post_validate=True may begin a step again, and this stage computes together with other processes, "
                    "which go on: leave it out",
                    rank=self.connections.grid.rank,
                    stage=stage,
                )

    def _attempt(self, inputs: Inputs, has_loss: bool) -> None:
        """Run the program, and once more where all ranks begin the step again."""
        drawn = () if inputs.renew is None or inputs.rng is not None else self.connections.device.generators()
        states = [generator.get_state() for generator in drawn]
        changes = None
        try:
            self._run_or_fail(inputs, has_loss)
        except BegunAgain as again:
            changes = again.changes
        if changes is None:
            return
        for generator, state in zip(drawn, states, strict=True):
            generator.set_state(state)
        if autocasts():
            torch.clear_autocast_cache()  # of casts of the other params
        self.executor.calls.clear()
        inputs = self._begin(replace(inputs, **changes))
        self.channels.agreed()
        self._run_or_fail(inputs, has_loss)

    def _run_or_fail(self, inputs: Inputs, has_loss: bool) -> None:
        """Run the program; a failure is one of the step.

        Raises:
            BegunAgain: it is to run once more.
        """
        try:
            if inputs.broken is None:
                self.ahead.trace()
            self._run(inputs, has_loss)
            self.channels.agree()
        except PeerLost:
            with suppress(PeerLost):  # the first one knows its peer
                self.channels.meet()
            raise
        except (StepRejected, BegunAgain, TransportError):
            raise
        except Exception as error:  # of any kind: a stage is the user's, and may have had params that do not count
            self.channels.handshake.meet(error)
            self.channels.begin_again_after(error)
            raise

    def _run(self, inputs: Inputs, has_loss: bool) -> None:
        """Run the program, once every rank is known to run it where that changes how this one does."""
        executor = self.executor
        if inputs.broken is not None:
            self.channels.agree()
        is_replicated = self.plan.replicas > 1
        if inputs.weighed and has_loss and (is_replicated or inputs.rows is None):
            self.channels.agree()  # the loss is scaled by rows that only other ranks know
            executor.set_rows(self.channels.handshake.rows, self.channels.handshake.here)
        if is_replicated and any(microbatch.scale is not None for microbatch in inputs.data):
            self.channels.agree()  # a refused step must not leave its weights to be received in the next one
        if is_replicated and any(getattr(self.pieces.stages[stage], "peers", ()) for stage in executor.stages):
            self.channels.agree()  # its forwards wait for other replicas, one of which may have refused the step
        executor.run(0, self.last_forward)
        if self.last_forward:
            self.channels.agree()
            self._give_losses()
        executor.run(self.last_forward, len(executor.calls.program))
        self.watch.notices.end_step()

    def _begin(self, inputs: Inputs) -> Inputs:
        """Take the params of this replica; return the inputs with its pieces of them."""
        self.executor.start(inputs)
        replicas, step = self.channels.replicas, self.executor.calls.step
        if replicas is not None:
            replicas.begin(step)
            self.channels.digest = partial(replicas.digest, step)
        return self.executor.place(self.processes)

    def _give_losses(self) -> None:
        """Post the losses that this process has computed, and merge its outputs: what fails here fails on all ranks."""
        step = self.executor.calls.step
        if not self.pieces.gather:
            self._merge(step.results)
        if self.pieces.loss:
            self.losses.post_early(step.results, step.inputs)

    def _merge(self, results: Results) -> None:
        """Merge the outputs once this process has them all, or all of its replica."""
        grid, count = self.connections.grid, self.plan.units
        if results.output is None and len(results.outputs) in (count, count * grid.replicas):
            try:
                results.output = self.pieces.merge(results.outputs, self.channels.handshake.apart)
            except ValueError as error:
                raise StageError(
                    f"the outputs can't be merged: {error}", rank=grid.rank, stage=self.plan.stages - 1
                ) from error

    def _share_outputs(self, results: Results) -> None:
        """Send gathered outputs to every rank."""
        grid, rank = self.connections.grid, self.connections.rank
        known = [self.channels.outputs_of(r) for r in range(grid.replicas)]
        for home, units in self.losses.runs:
            for m in units:
                output = flatten(results.outputs[m]) if home == rank else None
                replica, at = divmod(m, self.plan.units)
                purpose, before = f"gathering the outputs of microbatch {m}", known[replica][at]
                payload, codec = self.connections.broadcast_payload(output, home, purpose, before.codec)
                if codec is not before.codec:
                    self.channels.has_learned()
                before.codec = codec
                results.outputs[m] = payload.tree

    def _share_data_gradients(self, stage: int, results: Results, data: Sequence[Microbatch]) -> None:
        """Send the gradients of what a stage read of the batch, and stages on other ranks too, to every rank."""
        plan, grid, rank = self.plan, self.connections.grid, self.connections.rank
        for replica, m in itertools.product(range(grid.replicas), range(plan.microbatches)):
            at, home = (stage, replica * plan.microbatches + m), grid.process(plan.rank_of(stage, m), replica)
            known = self.channels.outputs_of(replica)[m].data_gradients
            payload = None
            if home == rank:
                names = names_read_elsewhere(self.executor.pipeline, plan, stage, data[m])
                payload = flatten({name: x for name, x in results.data_gradients[at].items() if name in names})
            purpose = f"sharing gradients of the batch that stage {stage} reads, microbatch {at[1]}"
            before = known.get(stage)
            received, known[stage] = self.connections.broadcast_payload(payload, home, purpose, before)
            if known[stage] is not before:
                self.channels.has_learned()
            if payload is None:
                results.data_gradients[at] = received.tree
