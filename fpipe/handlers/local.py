"""Run all ranks of all replicas in this process, in one deterministic interleaving.

A sent value is passed on without a copy. Parameters are whole, so that a gather does nothing. The interleaving is
computed when the programs are compiled, so a deadlock is found there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fpipe import effects as fx
from fpipe.autodiff.graph.collectives import WATCH, NoWatch
from fpipe.autodiff.interface import DifferentiablePipeline, Leaves
from fpipe.devices import current_device, device_of
from fpipe.errors.arguments import checked
from fpipe.handlers.alike import compare, descriptions, notices_of
from fpipe.handlers.calls import NO_FUNCTIONS, Calls, Functions, Step
from fpipe.handlers.executor import Executor
from fpipe.handlers.gradients import add_leaves
from fpipe.handlers.protocol import Alone, Departure, Inputs, Observer, Replicas, Results, Run
from fpipe.plan import Plan
from fpipe.programs.interleaving import Turn, turns
from fpipe.programs.program import Program, plan_of
from fpipe.stages.cuts import cuts_of, with_cuts
from fpipe.stages.pytree import Flat, flatten

PARTS = (
    ". Local plays all replicas of the plan in this process. Processes that have parts of a sequence, or tokens of "
    "their own, are replicas themselves: Distributed(mesh['pp'], replicas=mesh['cp'], context='cp'), or experts='ep'. "
    "In one process, leave the group out of the stages, and pass whole sequences"
)


class Local:
    """Run all ranks of all replicas in this process. Observers see the first replica.

    Args:
        devices: one for each rank; sent values are copied between them. By default nothing is moved. A stage's
            params and state must be on its rank's device.
        functions: effect class -> `function(calls, effect)`, which returns the function that runs in every step
            (fpipe/handlers/calls.py): for custom effects, or to replace fpipe's own functions.

    Its `rank` is 0 and `is_first` is True, so that a program for one process or several prints and saves once.

    Raises:
        ScheduleError: (when a program is compiled) the programs deadlock; the message has the waits of the ranks.
    """

    peers = beside = flight = timeout = None
    replays = Alone()
    rank = 0  # the first of those that it plays, as of every handler
    is_first = True

    @checked()
    def __init__(
        self,
        devices: Sequence[torch.device | str] | None = None,
        *,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        self.functions, self.departure = functions, Departure()
        try:
            self.devices = None if devices is None else [torch.device(d) for d in devices]
        except (RuntimeError, TypeError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"devices must be devices of torch's, not {devices!r}: {why}") from error

    def __repr__(self) -> str:
        return f"Local({'' if self.devices is None else [str(device) for device in self.devices]})"

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        if self.devices is not None and len(self.devices) != plan.ranks:
            raise ValueError(f"Local has {len(self.devices)} devices for {plan.ranks} ranks: give one for each")
        return tuple(range(plan.ranks))

    def replicas(self, plan: Plan) -> Replicas:
        return Replicas(range(plan.replicas), plan.replicas)

    def compile(self, programs: Mapping[int, Program], pieces: DifferentiablePipeline, observe: Observer | None) -> Run:
        devices = [None] * len(programs) if self.devices is None else list(map(device_of, self.devices))
        sums = dict[tuple[int, int], list[Leaves]]()
        mailboxes = [_Mailbox(self.devices, sums) for _ in range(plan_of(programs).replicas)]
        replicas = [
            {
                rank: Executor(
                    Calls(program, pieces, mailbox, None if replica else observe, devices[rank], self.functions)
                )
                for rank, program in programs.items()
            }
            for replica, mailbox in enumerate(mailboxes)
        ]
        order = [
            partial(executors[rank].run, start, stop)
            for turn in turns(programs)
            for rank, start, stop in (_in_step(turn, programs) if len(replicas) > 1 else [turn[:3]])
            for executors in replicas
        ]
        executors = [executor for each in replicas for executor in each.values()]
        notices = notices_of([program for _, program in sorted(programs.items())])
        watch = NoWatch(notices, _Compared(replicas) if len(replicas) > 1 else lambda group: None)

        def run(inputs: Inputs) -> Results:
            token = WATCH.set(WATCH.get() or watch)  # a profile has its own
            try:
                for replica, own in enumerate(replicas):
                    is_whole = len(replicas) == 1 or inputs.broken is not None
                    inputs_of = inputs if is_whole else inputs.of_replica(replica, len(replicas))
                    for executor in own.values():
                        executor.agreed(inputs_of, partial(self._begin, inputs_of, executor), self.departure)
                self.departure.learn([self.departure.number])
                for turn in order:
                    turn()
                notices.end_step()
                results = Results(state=[{} for _ in replicas])
                for replica in reversed(range(len(replicas))):  # of equal gradients, those of the first one stay
                    for executor in replicas[replica].values():
                        results.merge(executor.finish(), executor.stages, replica)
                if pieces.differentiated:
                    results.refuse_constant_loss()
                results.output = pieces.merge(results.outputs, inputs.apart)
                return results
            finally:
                WATCH.reset(token)
                for executor in executors:
                    executor.calls.clear()
                for mailbox in mailboxes:
                    mailbox.clear()

        return run

    def check(self) -> None:
        """Wait until the devices have run everything."""
        for device in [current_device()] if self.devices is None else map(device_of, self.devices):
            device.synchronize()

    def _begin(self, inputs: Inputs, executor: Executor) -> Inputs:
        executor.start(self._inputs_of(inputs, executor))
        return executor.place()

    def _inputs_of(self, inputs: Inputs, executor: Executor) -> Inputs:
        rank = executor.rank
        params = executor.pipeline.params_on(inputs.params, executor.plan, rank)
        data = inputs.data
        later = inputs.later
        if self.devices is not None:
            data, *later = (
                [type(m)(*(_copy_tree(part, self.devices[rank]) for part in m)) for m in each]
                for each in (data, *later)
            )
        return replace(inputs, params=params, data=data, later=later)


def _in_step(turn: Turn, programs: Mapping[int, Program]) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a turn, as (rank, start, stop), that replicas run one after the other.

    A part ends before an effect that needs a sum over all replicas, so that all have given theirs.
    """
    start, effects, plan = turn.start, programs[turn.rank].effects, programs[turn.rank].plan
    for at in range(turn.start, turn.stop):
        needs = programs[turn.rank].table.needs(effects[at], plan)
        if at > start and any(type(name) is fx.WeightGradient for name in needs):
            yield turn.rank, start, at
            start = at
    yield turn.rank, start, turn.stop


class _Compared:
    """Compares the arguments of all replicas with those of the other processes of a group, once.

    Args:
        replicas: the executors of each, by rank.
    """

    def __init__(self, replicas: Sequence[Mapping[int, Executor]]) -> None:
        self.replicas, self.groups = replicas, set[tuple[int, ...]]()

    def __call__(self, group: tuple[int, ...]) -> None:
        if group not in self.groups:
            each = [next(iter(executors.values())).calls for executors in self.replicas]
            described = [descriptions(calls.step, calls.pieces) for calls in each]
            rows = {f"{name} of replica {i}": x for i, row in enumerate(described) for name, x in row.items()}
            compare(group, rows, hint=PARTS)
            self.groups.add(group)


class _Mailbox:
    """`Channels` of one replica within a process: stores each sent payload until its receiver takes it.

    Args:
        sums: (stage, rank) -> the sums of the replicas so far, in their order; shared by all replicas.
    """

    receives_copies = False

    def __init__(self, devices: list[torch.device] | None, sums: dict[tuple[int, int], list[Leaves]]) -> None:
        self.devices, self.sums = devices, sums
        self.payloads: dict[tuple[fx.Value, int], list[Any]] = defaultdict(list)

    def sender(self, value: fx.Value, source: int, target: int) -> Callable[[Any], None]:
        box = self.payloads[value, target]
        if self.devices is None:
            return box.append
        device = self.devices[target]
        return lambda payload: box.append(_copy_tree(payload, device))

    def receiver(
        self, value: fx.Value, source: int, target: int, by: fx.Effect
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        return lambda: None, self.payloads[value, target].pop

    def scatter(self, stage: int, rank: int) -> tuple[Callable[[Step], None], Callable[[Step], Callable[[], Leaves]]]:
        def post(step: Step) -> None:
            self.sums.setdefault((stage, rank), []).append(step.sums[stage].read())

        def wait(step: Step) -> Callable[[], Leaves]:
            terms = self.sums[stage, rank]
            if len(terms) > 1:
                terms[:] = [add_leaves(terms)]
            return lambda: terms[0]

        return post, wait

    def gather(self, stage: int, rank: int) -> None:
        return None

    def release(self, stage: int, step: Step) -> None:
        pass

    def clear(self) -> None:
        for box in self.payloads.values():
            box.clear()
        self.sums.clear()


def _copy_tree(tree: Any, device: torch.device) -> Any:
    leaves, spec = tree if isinstance(tree, Flat) else flatten(tree)
    copies = with_cuts([_copy(x, device) if isinstance(x, torch.Tensor) else x for x in leaves], spec, cuts_of(tree))
    return copies if isinstance(tree, Flat) else copies.tree


def _copy(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy; on its way to the host it is waited for, because nothing there waits for the device."""
    return x.detach().to(device, non_blocking=device.type != "cpu").requires_grad_(x.requires_grad)
