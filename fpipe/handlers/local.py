"""Run all ranks in this process, in one deterministic interleaving.

A sent value is passed on without a copy. The interleaving is computed when the programs are compiled, so a
deadlock is found there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fpipe import effects as fx
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.devices import current_device, device_of
from fpipe.handlers.calls import NO_FUNCTIONS, Calls, Functions
from fpipe.handlers.executor import Executor
from fpipe.handlers.protocol import Alone, Inputs, Observer, Results, Run
from fpipe.plan import Plan
from fpipe.programs.interleaving import turns
from fpipe.programs.program import Program
from fpipe.stages.pytree import flatten


class Local:
    """Run all ranks in this process.

    Args:
        devices: one for each rank; sent values are copied between them. By default nothing is moved. A stage's
            params and state must be on its rank's device.
        functions: effect class -> `function(calls, effect)`, which returns the function that runs in every step
            (fpipe/handlers/calls.py): for custom effects, or to replace fpipe's own functions.

    Raises:
        ScheduleError: (when a program is compiled) the programs deadlock; the message has the waits of the ranks.
    """

    peers = None
    replays = Alone()

    def __init__(
        self,
        devices: Sequence[torch.device | str] | None = None,
        *,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        self.functions = functions
        self.devices = None if devices is None else [torch.device(d) for d in devices]

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        if self.devices is not None and len(self.devices) != plan.ranks:
            raise ValueError(f"Local has {len(self.devices)} devices for {plan.ranks} ranks: give one for each")
        return tuple(range(plan.ranks))

    def compile(self, programs: Mapping[int, Program], pieces: DifferentiablePipeline, observe: Observer | None) -> Run:
        mailbox = _Mailbox(self.devices)
        devices = [None] * len(programs) if self.devices is None else list(map(device_of, self.devices))
        executors = {
            rank: Executor(Calls(program, pieces, mailbox, observe, devices[rank], self.functions))
            for rank, program in programs.items()
        }
        order = [partial(executors[turn.rank].run, turn.start, turn.stop) for turn in turns(programs)]

        def run(inputs: Inputs) -> Results:
            if inputs.broken:
                raise inputs.broken
            try:
                for executor in executors.values():
                    executor.start(self._inputs_of(inputs, executor))
                for turn in order:
                    turn()
                results = Results()
                for executor in executors.values():
                    results.merge(executor.finish(), executor.stages)
                results.output = pieces.merge(results.outputs)
                return results
            finally:
                for executor in executors.values():
                    executor.calls.clear()
                mailbox.clear()

        return run

    def check(self) -> None:
        """Wait until the devices have run everything."""
        for device in [current_device()] if self.devices is None else map(device_of, self.devices):
            device.synchronize()

    def _inputs_of(self, inputs: Inputs, executor: Executor) -> Inputs:
        rank = executor.rank
        params = executor.pipeline.params_on(inputs.params, executor.plan, rank)
        data = inputs.data
        if self.devices is not None:
            data = [type(m)(*(_copy_tree(part, self.devices[rank]) for part in m)) for m in data]
        return replace(inputs, params=params, data=data)


class _Mailbox:
    """`Channels` within a process: stores each sent payload until its receiver takes it."""

    def __init__(self, devices: list[torch.device] | None) -> None:
        self.devices = devices
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

    def clear(self) -> None:
        for box in self.payloads.values():
            box.clear()


def _copy_tree(tree: Any, device: torch.device) -> Any:
    leaves, spec = flatten(tree)
    return spec.unflatten([_copy(x, device) if isinstance(x, torch.Tensor) else x for x in leaves])


def _copy(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy; on its way to the host it is waited for, because nothing there waits for the device."""
    return x.detach().to(device, non_blocking=device.type != "cpu").requires_grad_(x.requires_grad)
