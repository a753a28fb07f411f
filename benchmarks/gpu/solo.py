"""One rank of a program, alone in a process: it computes as among its peers, and transfers are copies on a side stream.

Invariants:
- the values that the rank receives are copies of those that it received in a step of all ranks in this process;
- as over NCCL, a receive is posted where the program has it, its memory belongs to the compute stream, and compute
  waits for it on the device; a sent value lives until a value received from that peer acknowledges it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fpipe import Pipeline, lower
from fpipe import effects as fx
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.autodiff.options import Options
from fpipe.devices import device_of
from fpipe.handlers.calls import Calls
from fpipe.handlers.executor import Executor
from fpipe.handlers.protocol import Inputs, Observer, Results
from fpipe.plan import Plan, Schedule
from fpipe.programs.completions import send_completions
from fpipe.programs.interleaving import turns
from fpipe.programs.program import Programs
from fpipe.stages.cuts import cuts_of, with_cuts
from fpipe.stages.microbatch import Microbatch, split
from fpipe.stages.pipeline import with_loss
from fpipe.stages.pytree import Flat


class Solo:
    """Rank `rank` of a plan.

    Args:
        params: of all stages.
        options: of `Options`: autodiff, policy, compile, dynamic.

    `program` are its effects.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        plan: Plan,
        rank: int,
        params: Any,
        batch: Any,
        target: Any,
        device: torch.device,
        observe: Observer | None = None,
        **options: Any,
    ) -> None:
        pipeline = with_loss(pipeline, False)
        pieces = DifferentiablePipeline(pipeline, Options(**options).pieces(pipeline, loss=True))
        parts = (split(tree, plan.microbatches)[0] for tree in (batch, target))
        data, programs = list(map(Microbatch, *parts)), lower(schedule, plan)
        values = _values(programs, pieces, params, data)
        channels = _Copies(values, programs, rank, device)
        self.program = programs[rank]
        self._executor = Executor(Calls(self.program, pieces, channels, observe, device_of(device)))
        self._inputs = Inputs(pipeline.params_on(params, plan, rank), [{}], data)
        self._channels = channels

    def step(self) -> Results:
        """Run the program once; waits for nothing."""
        try:
            self._executor.start(self._inputs)
            self._executor.run(0, len(self.program))
            return self._executor.finish()
        finally:
            self._executor.calls.clear()
            self._channels.clear()


def _values(
    programs: Programs, pieces: DifferentiablePipeline, params: Any, data: list[Microbatch]
) -> dict[tuple[fx.Value, int], Any]:
    """Return the payloads that each rank receives in a step of all ranks."""
    channels = _Recorded()
    executors = {rank: Executor(Calls(program, pieces, channels, None)) for rank, program in programs.items()}
    for rank, executor in executors.items():
        executor.start(Inputs(pieces.pipeline.params_on(params, programs[rank].plan, rank), [{}], data))
    for turn in turns(programs):
        executors[turn.rank].run(turn.start, turn.stop)
    for executor in executors.values():
        executor.calls.clear()
    return channels.payloads


class _Recorded:
    """Channels within a process that keep every payload."""

    receives_copies = False

    def __init__(self) -> None:
        self.payloads: dict[tuple[fx.Value, int], Any] = {}

    def sender(self, value: fx.Value, source: int, target: int) -> Callable[[Any], None]:
        return lambda payload: self.payloads.update({(value, target): _mapped(payload, lambda x: x)})

    def receiver(
        self, value: fx.Value, source: int, target: int, by: fx.Effect
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        return lambda: None, lambda: _mapped(self.payloads[value, target], lambda x: x)


class _Copies:
    """Channels of one rank without peers."""

    receives_copies = True

    def __init__(
        self, values: dict[tuple[fx.Value, int], Any], programs: Programs, rank: int, device: torch.device
    ) -> None:
        self.values, self.receipts = values, send_completions(programs, rank)
        self.device = device_of(device)
        self.side = self.device.new_stream()
        self.arriving: dict[fx.Value, tuple[Any, Any]] = {}
        self.sent: defaultdict[int, deque[tuple[Any, Any]]] = defaultdict(deque)
        self.complete: defaultdict[int, int] = defaultdict(int)

    def sender(self, value: fx.Value, source: int, target: int) -> Callable[[Any], None]:
        def send(payload: Any) -> None:
            with self._aside():
                _mapped(payload, torch.clone)
            self.sent[target].append((payload, self._passed()))

        return send

    def receiver(
        self, value: fx.Value, source: int, target: int, by: fx.Effect
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        receipt, original = self.receipts.get(value, 0), self.values[value, target]

        def post() -> None:
            buffers = _mapped(original, torch.empty_like)
            with self._aside():
                for buffer, x in zip(_tensors(buffers), _tensors(original), strict=True):
                    buffer.copy_(x)
            self.arriving[value] = buffers, self._passed()

        def wait() -> Any:
            payload, event = self.arriving.pop(value)
            self.device.current_stream().wait_event(event)
            while self.complete[source] < receipt:
                self.complete[source] += 1
                self.device.current_stream().wait_event(self.sent[source].popleft()[1])
            for x, y in zip(_tensors(payload), _tensors(original), strict=True):
                x.requires_grad_(y.requires_grad)
            return payload

        return post, wait

    @contextlib.contextmanager
    def _aside(self) -> Any:
        """Run on the side stream, after what compute has now."""
        ready = self.device.event()
        ready.record(self.device.current_stream())
        self.side.wait_event(ready)
        with torch.no_grad(), torch.cuda.stream(self.side) if self.device.asynchronous else contextlib.nullcontext():
            yield

    def _passed(self) -> Any:
        event = self.device.event()
        event.record(self.side)
        return event

    def clear(self) -> None:
        for each in self.sent.values():
            for _, event in each:
                self.device.current_stream().wait_event(event)
        self.arriving.clear()
        self.sent.clear()
        self.complete.clear()


def _mapped(payload: Any, function: Callable[[Tensor], Tensor]) -> Any:
    leaves = payload.leaves if isinstance(payload, Flat) else payload
    new = [function(x.detach()).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    return with_cuts(new, payload.spec, cuts_of(payload)) if isinstance(payload, Flat) else new


def _tensors(payload: Any) -> list[Tensor]:
    leaves = payload.leaves if isinstance(payload, Flat) else payload
    return [x for x in leaves if isinstance(x, Tensor)]
