"""One rank in each process, over torch.distributed: gloo on the CPU, NCCL on GPUs.

A step begins with one sum over all ranks, by which they agree whether their inputs have the signature of an
earlier step and whether every rank can take part; it is waited for when the first value travels. A rank
whose inputs are wrong raises, its peers raise `TransportError` with its reason, and the handler goes on. A
rank that fails in the middle writes its reason to the job's store and breaks its connections.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from fpipe import effects as fx
from fpipe.autodiff.interface import Pieces
from fpipe.errors import ScheduleError, StageError, TransportError
from fpipe.handlers.calls import NO_FUNCTIONS, Functions
from fpipe.handlers.distributed.channels import Routes
from fpipe.handlers.distributed.connections import Links, Lost, first_line
from fpipe.handlers.distributed.failures import PATIENCE, Failures, Watch, within
from fpipe.handlers.distributed.handshake import Agreement, Refused
from fpipe.handlers.distributed.wire import Payload
from fpipe.handlers.executor import Executor
from fpipe.handlers.protocol import Inputs, Observer, Results, Run
from fpipe.plan import Plan
from fpipe.programs.completions import receipts
from fpipe.programs.program import Program
from fpipe.stages.pytree import flatten

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Distributed:
    """Plays the rank of this process.

    Args:
        group: a process group whose ranks are the plan's, or one dimension of a DeviceMesh; by default all
            processes of the job.
        timeout: seconds that any wait for a peer may take before it is an error.
        device: where values live; under NCCL by default the current CUDA device (`torch.cuda.set_device` comes
            first), else the CPU.
        functions: effect class -> `function(calls, effect)`, as in `Local`.

    `value_and_grad` and `evaluate` connect the ranks: every rank calls them, in the same order.

    Raises:
        ScheduleError: (by them) the group's size is not the plan's, or ranks have different programs.
        TransportError: (by them, and in a step) a peer failed; says which, why, and what was waited for.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        timeout: float = 300.0,
        device: torch.device | str | None = None,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        self.functions = functions
        if not dist.is_initialized():
            raise TransportError(
                "torch.distributed is not set up: start with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        if isinstance(group, DeviceMesh):
            group = group.get_group()
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        self.group = group
        self.rank, self.size, self.timeout = dist.get_rank(self.group), dist.get_world_size(self.group), timeout
        if self.rank < 0:
            raise TransportError("this process is not in the group: make the handler on the group's ranks only")
        self.device = torch.device(device) if device is not None else _device(self.group)
        self._links: Links | None = None
        self._failures: Failures | None = None

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        if plan.ranks != self.size:
            raise ScheduleError(
                f"the plan has {plan.ranks} ranks, the group {self.size} processes: start with "
                f"torchrun --nproc-per-node {plan.ranks}, or make the plan for {self.size} ranks"
            )
        return (self.rank,)

    def compile(self, programs: Mapping[int, Program], pieces: Pieces, observe: Observer | None) -> Run:
        links, failures = self._set_up()
        try:
            self._compare(programs, pieces, links, observe)
            links.connect({(rank, e.rank) for rank, p in programs.items() for e in p if isinstance(e, fx.Send)})
        except Lost as lost:
            raise failures.of_peer(links, lost) from None
        except TransportError:
            raise
        except RuntimeError as error:
            raise failures.of_peer(links, Lost(None, f"setting up connections ({error})")) from error
        return _Run(self.rank, programs, pieces, links, failures, observe, self.functions)

    def _set_up(self) -> tuple[Links, Failures]:
        if self._links is None or self._failures is None:
            store = _own_store(self.group, self.timeout)
            try:
                self._links = Links(store, self.rank, self.size, self.device, self.timeout)
            except RuntimeError as error:
                raise TransportError(
                    f"rank {self.rank} could not connect to the other {self.size - 1} ranks within {self.timeout:g} s. "
                    "Do all of them make this handler, and can they reach each other? gloo uses the address of this "
                    "host's name: where that is 127.0.0.1, set GLOO_SOCKET_IFNAME to the interface that leads to the "
                    f"others ({error})"
                ) from error
            self._failures = Failures(self.rank, store)
            if self.device.type == "cuda":
                Watch(self._failures, self._links).start()
        self._failures.check()
        return self._links, self._failures

    def apart(self, name: str, timeout: float) -> dist.ProcessGroup:
        """All ranks on the CPU, for who speaks with them between steps, as all of them do at once.

        What fails there fails nothing else.

        Args:
            timeout: seconds that any of it may take.
        """
        return self._set_up()[0].apart(name, timeout)  # type: ignore[no-any-return]

    def _compare(self, programs: Mapping[int, Program], pieces: Pieces, links: Links, observe: Observer | None) -> None:
        asked = pieces.loss, pieces.gather, getattr(observe, "agreed", ())
        text = repr((asked, [(p.plan, p.effects) for _, p in sorted(programs.items())]))
        mine = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
        extremes, works = links.collect([mine, -mine], dist.ReduceOp.MAX)
        links.wait(works, None, "comparing programs")
        if extremes.tolist() != [mine, -mine]:
            raise ScheduleError(
                f"rank {self.rank}: the ranks were given different schedules, plans or recorders; every rank must make "
                "the same"
            )


def _own_store(group: dist.ProcessGroup, timeout: float) -> Store:
    """The job's store under a name that no other handler has, which the ranks of the group agree on."""
    store = _get_default_store()
    name = f"fpipe/{group.group_name}"
    on_gpu = dist.get_backend(group) == "nccl"
    mine = store.add(f"{name}/{dist.get_rank(group)}", 1)
    try:
        made = torch.tensor(mine, device="cuda" if on_gpu else "cpu")
        work = dist.all_reduce(made, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        ranks = range(group.size())
        late = within(PATIENCE, lambda: [rank for rank in ranks if store.add(f"{name}/{rank}", 0) < mine])
        raise TransportError(
            f"not all ranks came to make this handler within {timeout:g} s (missing: {late or 'not known'}): "
            f"value_and_grad and evaluate are called on every rank, in the same order ({first_line(error)})"
        ) from error
    return PrefixStore(f"{name}/handler {int(made)}", store)


def _device(group: dist.ProcessGroup) -> torch.device:
    if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _Run:
    """One compiled program on this process's rank, called once a step."""

    def __init__(
        self,
        rank: int,
        programs: Mapping[int, Program],
        pieces: Pieces,
        links: Links,
        failures: Failures,
        observe: Observer | None,
        functions: Functions,
    ) -> None:
        program = programs[rank]
        self.program, self.plan, self.pieces = program, program.plan, pieces
        self.links, self.failures = links, failures
        self.agreement = Agreement(links, failures)
        self.channels = Routes(links, self.agreement, receipts(programs, program.rank))
        self.executor = Executor(program, pieces, self.channels, observe, functions=functions)

    def __call__(self, inputs: Inputs) -> Results:
        self.failures.check()
        try:
            results = self._step(inputs)
            self.failures.check()  # on CUDA nothing waits: an aborted group gives no error, but nonsense
            return results
        except Refused as refused:
            raise refused.error from refused.error.__cause__
        except Lost as lost:
            self.channels.clear()
            raise self.failures.of_peer(self.links, lost) from None
        except BaseException as error:
            self.channels.clear()
            self.failures.of_own(self.links, error)
            raise
        finally:
            self.executor.clear()
            self.channels.clear()

    def _step(self, inputs: Inputs) -> Results:
        executor = self.executor
        if inputs.broken is None:
            try:
                executor.start(inputs)
            except StageError as error:
                inputs = replace(inputs, broken=error)
        self.channels.begin(inputs)
        if inputs.broken is not None:
            self.channels.agree()
        if inputs.weighed and inputs.rows is None and self.plan.stages - 1 in self.plan.stages_on(self.program.rank):
            self.channels.agree()  # the loss is scaled by rows that only other ranks know
            executor.know(self.agreement.rows)
        executor.run(0, len(self.program))
        self.channels.agree()
        results = executor.finish()
        self._share(results)
        self.channels.end()
        return results

    def _share(self, results: Results) -> None:
        """Outputs go where they are gathered, and losses to every rank: last, so that no rank ends before a failure."""
        last = self.plan.stages - 1
        blocks = [(home, self.plan.microbatches_of(last, home)) for home in self.plan.placement.holders[last]]
        for home, block in blocks if self.pieces.gather else ():
            for m in block:
                payload: Payload | None = flatten(results.outputs[m]) if m in results.outputs else None
                payload = self.links.broadcast_payload(payload, home, f"gathering the outputs of microbatch {m}")
                results.outputs[m] = payload.tree  # type: ignore[union-attr]
        if len(results.outputs) == self.plan.microbatches:
            try:
                results.output = self.pieces.merge(results.outputs)
            except ValueError as error:
                raise StageError(f"the outputs can't be merged: {error}", rank=self.links.rank, stage=last) from error
        for home, block in blocks if self.pieces.loss else ():
            mine = torch.stack([results.losses[m] for m in block]) if home == self.links.rank else None
            losses = self._share_losses(mine, home, len(block))
            results.losses |= dict(zip(block, losses.unbind(), strict=True))

    def _share_losses(self, losses: Tensor | None, home: int, count: int) -> Tensor:
        purpose = f"waiting for the loss from rank {home}"
        dtype = self.channels.loss_dtype
        if dtype is None:
            code = torch.tensor([FLOATS.index(losses.dtype) if losses is not None else 0])
            dtype = FLOATS[int(self.links.broadcast(code, home, purpose, control=True))]
            self.channels.loss_dtype = dtype
        if losses is not None and losses.dtype != dtype:
            raise StageError(
                f"the loss is {losses.dtype}, where equal inputs gave {dtype} before",
                rank=home,
                stage=self.plan.stages - 1,
            )
        if losses is None:
            losses = torch.empty(count, dtype=dtype, device=self.links.device)
        return self.links.broadcast(losses, home, purpose)
