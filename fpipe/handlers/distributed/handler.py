"""One rank in each process, over torch.distributed: gloo on the CPU, NCCL on GPUs.

A step begins with the handshake: one sum over all ranks, from which each learns whether the inputs have the signature
of an earlier step and whether every rank can run the step. Ranks wait for it before the first value is received or
sent. If the inputs of a rank are wrong, it raises, its peers raise `TransportError` with its reason, and the handler
stays usable. A rank that fails later in the step writes its reason into the job's store and breaks its connections.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from fpipe import effects as fx
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.devices import Device, device_of
from fpipe.errors import ScheduleError, StageError, TransportError
from fpipe.handlers.calls import NO_FUNCTIONS, Calls, Functions
from fpipe.handlers.distributed.backends import NCCL, Backend, Gloo
from fpipe.handlers.distributed.channels import Channels
from fpipe.handlers.distributed.collectives import Collectives, fingerprint, process_group
from fpipe.handlers.distributed.connections import Connections, PeerLost
from fpipe.handlers.distributed.failures import Failures
from fpipe.handlers.distributed.handshake import Handshake, RollCall, StepRejected, tokens
from fpipe.handlers.distributed.liveness import Watchdog, introduce
from fpipe.handlers.distributed.rendezvous import meet
from fpipe.handlers.executor import Executor
from fpipe.handlers.protocol import Inputs, Observer, Replays, Results, Run
from fpipe.plan import Plan
from fpipe.programs.completions import send_completions
from fpipe.programs.program import Program
from fpipe.stages.pytree import flatten


class Distributed:
    """Plays the rank of this process.

    Args:
        group: a process group whose ranks are the plan's, or one dimension of a DeviceMesh; by default all
            processes of the job.
        timeout: seconds within which a rank that others wait for must answer, and come to the step.
        compute_timeout: seconds that one effect may compute while others wait for it, with tracing and compilation.
        device: where values are; under NCCL by default the current CUDA device (call `torch.cuda.set_device`
            first), else the CPU.
        backend: `Gloo()` or `NCCL()`, by default that of the device.
        functions: effect class -> `function(calls, effect)`, as in `Local`.

    Its `peers` are the other processes, for calls between steps; None where this process is the only one.
    `value_and_grad` and `evaluate` connect the ranks: every rank calls them, in the same order.

    Raises:
        ScheduleError: (by them) the group's size is not the plan's, or ranks have different programs.
        TransportError: (by them, and in a step) a peer failed; names it, its reason, and the value waited for. Or (by
            them) a GPU can't run so many edges, or an environment variable would make ranks wait for ever.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        timeout: float = 300.0,
        compute_timeout: float = 1800.0,
        device: torch.device | str | Device | None = None,
        backend: Backend | None = None,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        self.functions = functions
        self.group = process_group(group)
        self.rank, self.size, self.timeout = dist.get_rank(self.group), dist.get_world_size(self.group), timeout
        if self.rank < 0:
            raise TransportError("this process is not in the group: make the handler on the group's ranks only")
        place = device_of(_device(self.group) if device is None else device)
        self.device = place.torch_device
        self.devices = (self.device,)
        backend = backend or (NCCL() if self.device.type == "cuda" else Gloo())
        self._setup = _Setup(self.group, timeout, compute_timeout, place, backend)
        self.peers = Collectives(self._setup, self.rank, self.size, timeout) if self.size > 1 else None

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        if plan.ranks != self.size:
            raise ScheduleError(
                f"the plan has {plan.ranks} ranks, the group {self.size} processes: start with "
                f"torchrun --nproc-per-node {plan.ranks}, or make the plan for {self.size} ranks"
            )
        return (self.rank,)

    def compile(self, programs: Mapping[int, Program], pieces: DifferentiablePipeline, observe: Observer | None) -> Run:
        connections, failures = self._setup.ready()
        edges = {(rank, e.rank) for rank, p in programs.items() for e in p if isinstance(e, fx.Send)}
        options = pieces.loss, pieces.gather, () if observe is None else observe.agreed
        connections.activity.enter()
        try:
            self._compare(connections, (options, [(p.plan, p.effects) for _, p in sorted(programs.items())]))
            refusal = connections.refusal(edges)
            roll = RollCall(connections, failures, [], None if refusal is None else TransportError(refusal))
            _, reason = roll.answers("setting up connections")
            if reason is not None:
                raise TransportError(reason)
            connections.connect(edges)
        except PeerLost as lost:
            raise failures.of_peer(connections, lost) from None
        except TransportError:
            raise
        except RuntimeError as error:
            raise failures.of_peer(connections, PeerLost(None, f"setting up connections ({error})")) from error
        finally:
            connections.activity.leave()
        channels = Channels(connections, Handshake(connections, failures), send_completions(programs, self.rank))
        device, markers = connections.device, connections.activity.markers

        def pace(effect: fx.Effect) -> Callable[[], None]:
            def mark() -> None:
                markers.add(effect)
                connections.keep_up()

            return mark

        paced = pace if device.asynchronous else None
        calls = Calls(programs[self.rank], pieces, channels, observe, device, self.functions, paced)
        return _CompiledProgram(Executor(calls), channels, failures)

    @property
    def replays(self) -> Replays:
        return self._setup

    def check(self) -> None:
        """Wait until the device has run everything that was launched; on the CPU return at once.

        Call it before results leave this process, for example into a checkpoint: a step returns when everything is
        launched, and what comes after a failure of a peer is not a result.

        Raises:
            TransportError: a peer failed; what this process computed since may be wrong.
        """
        self._setup.check()

    def _compare(self, connections: Connections, content: object) -> None:
        """Check that all ranks run the same."""
        number = fingerprint(content)
        extremes, works = connections.collect([number, -number], dist.ReduceOp.MAX)
        connections.wait_for_control(works, None, "comparing programs")
        if extremes.tolist() != [number, -number]:
            raise ScheduleError(
                f"rank {self.rank}: the ranks were given different schedules, plans or recorders; every rank must make "
                "the same"
            )


class _Setup:
    """The connections of a handler, made at first use; its part in replayed steps."""

    def __init__(
        self, group: dist.ProcessGroup, timeout: float, compute_timeout: float, device: Device, backend: Backend
    ) -> None:
        self._group, self.timeout, self._compute_timeout = group, timeout, compute_timeout
        self._device, self._backend = device, backend
        self._parts: tuple[Connections, Failures] | None = None
        self._token_of = tokens()

    def ready(self) -> tuple[Connections, Failures]:
        """Return the connections and the failures so far.

        Raises:
            TransportError: a rank did not come, or the handler has failed.
        """
        connections, failures = self._parts = self._parts or self._make()
        failures.check()
        return connections, failures

    def check(self) -> None:
        """Wait for the device; raise if the handler has failed."""
        if self._parts is not None:
            connections, failures = self._parts
            try:
                connections.activity.markers.drain(lambda: failures.ended is None)
            except RuntimeError as error:
                failures.of_own(connections, error)
                raise TransportError(f"rank {failures.rank}: its device has failed: {error}") from error
            failures.check()

    def agree(self, key: Hashable, knows: bool, error: Exception | None = None) -> tuple[Hashable, bool]:
        connections, failures = self.ready()
        with together(connections, failures):
            token = (0, 0) if error is not None else self._token_of(key)
            *name, ignorant = RollCall(connections, failures, [*token, not knows], error).wait()
        return tuple(name), not ignorant

    @contextmanager
    def running(self) -> Iterator[None]:
        connections, failures = self.ready()
        with together(connections, failures, lambda: "a replayed step"):
            yield
            if connections.device.asynchronous:
                connections.activity.markers.add("a replayed step", "replaying")
                connections.keep_up()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        markers = self.ready()[0].activity.markers
        markers.paused = True
        try:
            yield
        finally:
            markers.paused = False

    def store(self) -> Store:
        return self.ready()[0].store

    def group(self, purpose: str, timeout: float | None) -> dist.ProcessGroup:
        return self.ready()[0].new_group(purpose, timeout)  # type: ignore[no-any-return]

    def _make(self) -> tuple[Connections, Failures]:
        rank, size = self._group.rank(), self._group.size()
        store = meet(self._group, self.timeout)
        failures = Failures(rank, store)
        introduce(failures)
        try:
            connections = Connections(
                store, rank, size, self._device, self._backend, self.timeout, self._compute_timeout
            )
        except RuntimeError as error:
            raise TransportError(
                f"rank {rank} could not connect to the other {size - 1} ranks within {self.timeout:g} s. "
                "Do all of them make this handler, and can they reach each other? gloo uses the address of this "
                "host's name: where that is 127.0.0.1, set GLOO_SOCKET_IFNAME to the interface that leads to the "
                f"others ({error})"
            ) from error
        if size > 1:
            Watchdog(failures, connections, self._compute_timeout).start()
        return connections, failures


def _device(group: dist.ProcessGroup) -> str:
    return "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group) else "cpu"


@contextmanager
def together(
    connections: Connections,
    failures: Failures,
    effect: Callable[[], object] = lambda: None,
    clear: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Make a failure of this rank inside the context one of all ranks, and a peer's a `TransportError`.

    Args:
        effect: returns the effect that runs, or what runs in its place.
        clear: drops what keeps connections open.
    """
    failures.check()
    connections.activity.enter(effect)
    try:
        yield
        failures.check()  # on CUDA an aborted group raises nothing: its values are wrong
    except StepRejected as refused:
        raise refused.error from refused.error.__cause__
    except PeerLost as lost:
        clear()
        raise failures.of_peer(connections, lost) from None
    except TransportError:
        clear()
        connections.abort()
        raise
    except BaseException as error:  # an interrupt too: the other ranks wait for this one
        clear()
        failures.of_own(connections, error)
        raise
    finally:
        connections.activity.leave()


class _CompiledProgram:
    """A program, compiled for the rank of this process; called once a step."""

    def __init__(self, executor: Executor, channels: Channels, failures: Failures) -> None:
        self.executor, self.channels, self.failures = executor, channels, failures
        self.plan, self.pieces, self.connections = executor.plan, executor.pieces, channels.connections

    def __call__(self, inputs: Inputs) -> Results:
        try:
            with together(self.connections, self.failures, self.executor.effect, self.channels.clear):
                return self._step(inputs)
        finally:
            self.executor.calls.clear()
            self.channels.clear()

    def _step(self, inputs: Inputs) -> Results:
        executor, program = self.executor, self.executor.calls.program
        if inputs.broken is None:
            try:
                executor.start(inputs)
            except StageError as error:
                inputs = replace(inputs, broken=error)
        self.channels.begin(inputs)
        if inputs.broken is not None:
            self.channels.agree()
        if inputs.weighed and inputs.rows is None and self.plan.stages - 1 in executor.stages:
            self.channels.agree()  # the loss is scaled by rows that only other ranks know
            executor.set_rows(self.channels.handshake.rows)
        executor.run(0, len(program))
        self.channels.agree()
        results = executor.finish()
        self._share(results)
        self.channels.end()
        return results

    def _share(self, results: Results) -> None:
        """Send gathered outputs and the losses to every rank; last, so that no rank returns before another fails."""
        last, rank = self.plan.stages - 1, self.connections.rank
        blocks = [(home, self.plan.microbatches_of(last, home)) for home in self.plan.placement.holders[last]]
        for home, block in blocks if self.pieces.gather else ():
            for m in block:
                output = flatten(results.outputs[m]) if home == rank else None
                purpose, gathered = f"gathering the outputs of microbatch {m}", self.channels.known.gathered
                payload, gathered[m] = self.connections.broadcast_payload(output, home, purpose, gathered.get(m))
                results.outputs[m] = payload.tree
        if len(results.outputs) == self.plan.microbatches:
            try:
                results.output = self.pieces.merge(results.outputs)
            except ValueError as error:
                raise StageError(f"the outputs can't be merged: {error}", rank=rank, stage=last) from error
        for home, block in blocks if self.pieces.loss else ():
            losses = torch.stack([results.losses[m] for m in block]) if home == rank else None
            losses = self._share_losses(losses, home, len(block))
            results.losses |= dict(zip(block, losses.unbind(), strict=True))

    def _share_losses(self, losses: Tensor | None, home: int, count: int) -> Tensor:
        purpose, known = f"waiting for the loss from rank {home}", self.channels.known
        device = self.connections.device.torch_device
        if known.loss_dtype is None:
            payload = None if losses is None else flatten(losses)
            payload, _ = self.connections.broadcast_payload(payload, home, purpose, None)
            losses = payload.tree
            known.loss_dtype = losses.dtype
            return losses
        if losses is None:
            losses = torch.empty(count, dtype=known.loss_dtype, device=device)
        if losses.dtype != known.loss_dtype:
            raise StageError(
                f"the loss is {losses.dtype}, where equal inputs gave {known.loss_dtype} before",
                rank=home,
                stage=self.plan.stages - 1,
            )
        return self.connections.broadcast(losses, home, purpose)
