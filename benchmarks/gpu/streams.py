"""Part C: programs of kernels that take a given time, on a stream for each rank, beside the simulator's prediction."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

import fpipe
from benchmarks.gpu.kernels import Spin
from benchmarks.gpu.setting import Setting
from fpipe import Costs, lower
from fpipe.effects import Recv, Send
from fpipe.programs.interleaving import turns
from fpipe.programs.program import Programs
from tests.support import cases


def makespan(setting: Setting) -> None:
    """Run programs whose effects take a given time on a stream for each rank, and compare with the simulation."""
    costs = Costs(forward=2e-3, backward_input=2e-3, backward_weight=1e-3)
    for ranks, name in product((4, 8), ("one_f_one_b", "zb_v", "dualpipe_v")):
        generator, place_of = cases.SCHEDULES[name]
        plan = fpipe.Plan(place_of(ranks), 2 * ranks)
        programs, predicted = lower(generator, plan), fpipe.simulate(generator, plan, costs).makespan
        lanes = Clocks(ranks) if setting.cpu else Streams(ranks, setting.device)
        measured = replay(programs, costs, lanes)
        off = measured / predicted - 1
        setting.report.add(**{f"{ranks} ranks, {name}": {"predicted": predicted, "measured": measured, "off": off}})
        setting.report.expect(abs(off) <= 0.05, f"{ranks} ranks, {name}: {off:+.1%}")


def replay(programs: Programs, costs: Costs, lanes: Any) -> float:
    """Run the effects of all ranks, each for its cost, and return the seconds until the last one ends."""
    sent: dict[Any, Any] = {}
    lanes.start()
    for turn in turns(programs):
        program = programs[turn.rank].effects
        for at, givers in zip(range(turn.start, turn.stop), turn.givers, strict=True):
            effect: Any = program[at]
            if isinstance(effect, Send):
                sent[effect.value, effect.rank] = lanes.passed(turn.rank)
            elif not isinstance(effect, Recv):
                for giver in givers:
                    if isinstance(value := program[giver], Recv):
                        lanes.wait(turn.rank, sent[value.value, turn.rank])
                lanes.run(turn.rank, costs.time(effect))
    return float(lanes.end())


class Clocks:
    """Lanes without a device: a clock for each rank."""

    def __init__(self, ranks: int) -> None:
        self.times = [0.0] * ranks

    def start(self) -> None:
        """Begin at 0."""

    def run(self, rank: int, seconds: float) -> None:
        self.times[rank] += seconds

    def passed(self, rank: int) -> float:
        return self.times[rank]

    def wait(self, rank: int, event: float) -> None:
        self.times[rank] = max(self.times[rank], event)

    def end(self) -> float:
        return max(self.times)


class Streams:
    """Lanes on a GPU: a stream for each rank. Nothing runs before all is launched."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.spin, self.device = Spin(device), device
        self.gate, *self.streams = (torch.cuda.Stream(device) for _ in range(ranks + 1))

    def start(self) -> None:
        self.gatekeeper = Spin(self.device)
        self.gatekeeper.launch(20.0, stream=self.gate, threads=32)
        self.begin = self._event(self.gate)
        for stream in self.streams:
            stream.wait_event(self.begin)

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def run(self, rank: int, seconds: float) -> None:
        self.spin.launch(seconds, stream=self.streams[rank], threads=32)

    def passed(self, rank: int) -> Any:
        return self._event(self.streams[rank])

    def wait(self, rank: int, event: Any) -> None:
        self.streams[rank].wait_event(event)

    def end(self) -> float:
        ends = list(map(self._event, self.streams))
        self.gatekeeper.release()
        torch.cuda.synchronize(self.device)
        return max(float(self.begin.elapsed_time(end)) for end in ends) / 1e3
