"""Predictions of steps for benchmarks in several processes, and comparisons of them with measured steps.

A prediction is `simulate` with costs of `fpipe.profile`, with the time of the host for a piece (`Host`) in that of each
piece (`with_host`), and with a measured link (`ping`). Where pieces compute, the speed of the machine changes by more
than a prediction may be off, for seconds at a time, so each measured step has a profile of its own, right before it
(`compare`). A ratio is measured over predicted.

Where the speed changes within a step too, no profile before it fits. So a step can be recorded
(`benchmarks.recordings`), and is then also predicted with the times of its own pieces, "by own". Transfers and copies
take as long as in the first prediction, and the host's time is that outside of pieces: an equal part for each message,
and that before the first piece of a step and after its last one: of all ranks in a step from barrier to barrier, and of
one rank in a loop without barriers.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from benchmarks import models
from benchmarks.recordings import Recorded, recorded
from fpipe import Costs, Link, Pipeline, Placement, Plan, Timeline, handlers
from fpipe.effects import Recv, Send, parts
from fpipe.programs.program import Programs, plan_of
from fpipe.schedules.grouping import Grouping
from fpipe.tables import TABLE, Table
from fpipe.timelines.simulator import simulate_programs

T = TypeVar("T")
Key = TypeVar("Key")
PINGS = 200  # messages there and back
EXCHANGES, LARGE = 10, 16 << 20  # large messages, and the bytes of each
SIZE = 32  # elements of a small activation
SIDE = 200  # of the square that a stage multiplies to be busy
REPEATS = 2  # steps of a profile that each prediction takes
SLOWER = 1e-4  # seconds of the host for a message, that show how many messages a step waits for
SEARCH = 600  # seconds that processes wait for the one that searches


def ping(rank: int) -> Link:
    """Measure the link between ranks 0 and 1.

    The latency is half of a round trip of an empty message. The bandwidth is that of large messages, which both ranks
    send at once, as they send their sums of gradients; one alone can be faster.
    """

    def there_and_back(message: Tensor) -> None:
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        elif rank == 1:
            dist.recv(message, 0)
            dist.send(message, 0)

    def exchange(sent: Tensor, received: Tensor) -> None:
        if rank < 2:
            works = dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)
            for work in works:
                if work is not None:
                    work.wait()

    def seconds(call: Callable[[], None], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    latency = seconds(partial(there_and_back, torch.empty(1)), PINGS) / 2
    both_ways = seconds(partial(exchange, *torch.ones(2, LARGE // 4)), EXCHANGES)
    return on_first(lambda: Link(latency, LARGE / max(both_ways - latency, 1e-9)))


def busy(w: Tensor, x: Tensor) -> Tensor:
    """Compute for a short time, as a stage that shows the host's time where the threads of gloo have no core alone."""
    square = torch.outer(w, w) * x.mean()
    return x * (square @ square).mean()


class HostTimes(NamedTuple):
    """The seconds of the host in a step.

    Args:
        piece: what each piece takes beyond a profile.
        message: what a message takes between the step's own pieces.
        step: what a step from barrier to barrier takes before its first piece and after its last one.
        between: what a rank takes from its last piece to its first one of the next step, if it does not wait.
    """

    piece: float = 0.0
    message: float = 0.0
    step: float = 0.0
    between: float = 0.0


class Host:
    """Measures the times of the host, by steps of GPipe.

    The time for a piece is what a step takes beyond its prediction by a profile, over the 2 (m + p - 1) pieces of m
    microbatches on p ranks that run one after another. It includes a part of what the step takes once, and what gloo's
    threads take from the pieces. The time for a message is what a step takes from its first piece to its last one
    beyond its prediction by own pieces, over the messages between pieces that run one after another. The time of a step
    is what it takes besides, and that between two steps what it takes on rank 0 beyond the time from this rank's first
    piece to its last one.

    Args:
        microbatches: of the measured steps.
        size: elements of their activations.
        stage: takes a short time, and does what the measured stages do. Where these compute, it computes, because
            gloo's threads then take the cores from it; where they sleep it sleeps, because ranks that exceed cores wait
            for them only as long as others do not sleep.
        costs: those that predictions have of such stages; by default a profile right before each measurement.
    """

    def __init__(
        self,
        handler: handlers.Distributed,
        ranks: int,
        link: Link,
        microbatches: int,
        stage: Callable[[Tensor, Tensor], Tensor] = busy,
        costs: Costs | None = None,
        size: int = SIZE,
    ) -> None:
        pipeline = Pipeline([stage] * ranks, models.loss_fn)
        plan, params = pipeline.plan(Placement.loop(ranks), microbatches), {s: torch.ones(SIDE) for s in range(ranks)}
        data = torch.ones(microbatches, size), torch.zeros(microbatches, size)
        options: dict[str, Any] = {"handler": handler, "autodiff": "graph"}
        some = [x[: models.PROFILED] for x in data]
        profiled = partial(fpipe.profile, pipeline, params, *some, microbatches=len(some[0]), repeats=models.REPEATS)
        self.costs: Callable[[], Costs] = partial(profiled, **options) if costs is None else lambda: costs
        self.link, self.pieces, self.times = link, 2 * (microbatches + ranks - 1), list[float]()
        make = partial(fpipe.value_and_grad, pipeline, "gpipe", plan, **options)
        own = pipeline.params_on(params, plan, handler.rank)
        self.step = recorded(make, fpipe.lower("gpipe", plan), own, *data)
        self.step()

    def seconds(self) -> float:
        """Measure the time for a piece, as on rank 0."""
        predicted = self._prediction().seconds()
        took = statistics.median(1e-3 * milliseconds(self.step) for _ in range(models.REPEATS))
        return self._measured((took - predicted) / self.pieces).piece

    def measure(self) -> HostTimes:
        """Measure all of them, as on rank 0."""
        prediction = self._prediction()
        predicted, runs = prediction.seconds(), [outside(self.step, prediction) for _ in range(models.REPEATS)]
        took, *others = map(statistics.median, zip(*runs, strict=True))
        return self._measured((took - predicted) / self.pieces, *others)

    def _prediction(self) -> Prediction:
        return Prediction(self.step.programs, replace(self.costs(), communication=self.link))

    def _measured(self, *seconds: float) -> HostTimes:
        times = as_on_first(*seconds)
        self.times.append(times.piece)
        return times

    @property
    def milliseconds(self) -> float:
        """The median of the times for a piece that were measured."""
        return 1e3 * statistics.median(self.times)


def outside(step: Recorded, prediction: Prediction) -> tuple[float, float, float, float]:
    """Run a step; return its time and the times of the host but for that of a piece, in the order of `HostTimes`.

    That between two steps is right only on rank 0, which in GPipe waits for no other rank before its first piece or
    after its last one.
    """
    (here, took), (first, last) = between_barriers(step), step.bounds()
    span, own = step.span(), step.times()
    by_own, slower = (prediction._replace(host=HostTimes(message=each)).seconds(own) for each in (0.0, SLOWER))
    share = SLOWER / (slower - by_own) if slower > by_own else 0.0  # one rank has no messages
    return took, share * (span - by_own), took - span, here - (last - first)


def as_on_first(*seconds: float) -> HostTimes:
    """Return the host's times as rank 0 measured them, none of which is below 0."""
    return on_first(lambda: HostTimes(*(max(0.0, each) for each in seconds)))


def with_host(costs: Costs, plan: Plan, host: float) -> Costs:
    """Return the costs of stages with the host's time in that of each piece."""
    return Grouping(plan, [1] * plan.stages, host).costs(costs, plan)


class Prediction(NamedTuple):
    """All from which a step is predicted, or one of a loop without barriers: by `simulate`, with the host's time.

    Args:
        programs: as they run.
        costs: of the stages, by a profile.
        host: its times: a prediction by a profile has that for a piece, and one by own pieces the others.
        steps: of the loop; 1 for a step from barrier to barrier.
        after: the seconds that a step takes after its effects.
    """

    programs: Programs
    costs: Costs
    host: HostTimes = HostTimes()
    steps: int = 1
    after: float = 0.0

    def seconds(self, own: Mapping[Any, float] | None = None) -> float:
        """Return the time of the step; see `timeline`."""
        at_ends = self.host.step if self.steps == 1 else self.host.between
        return self.timeline(own).period + (0.0 if own is None else at_ends) + self.after

    def timeline(self, own: Mapping[Any, float] | None = None) -> Timeline:
        """Return the predicted timeline.

        Args:
            own: the seconds of each piece and update, by their effects, in place of those of the costs.
        """
        if own is None:
            costs = with_host(self.costs, plan_of(self.programs), self.host.piece)
            return simulate_programs(self.programs, costs, self.steps)
        table = timed_by(own, messages_of(self.programs), self.host.message)
        programs = {rank: replace(program, table=table) for rank, program in self.programs.items()}
        return simulate_programs(programs, replace(self.costs, overlap=None), self.steps)


def timed_by(own: Mapping[Any, float], messages: Mapping[Any, int], for_message: float) -> Table:
    """Return the table in which each effect that has a time of its own takes that, and the host's for its messages."""

    def time_of(effect: Any, _: object) -> float:
        return own[effect] + messages.get(effect, 0) * for_message

    kinds = {type(effect) for effect in own}
    return TABLE.extended({kind: TABLE.effects[kind]._replace(time=time_of) for kind in kinds})


def messages_of(programs: Programs) -> Counter[Any]:
    """Return how many messages each piece needs, and sends after it."""
    counts: Counter[Any] = Counter()
    for program in programs.values():
        last, received = None, set[Any]()
        for effect in program:
            if isinstance(effect, Recv):
                received.add(effect.value)
            elif isinstance(effect, Send):
                counts[last] += 1
            elif program.table.effects[type(effect)].track == "compute":
                last, needed = parts(effect)[0], received.intersection(program.table.needs(effect, program.plan))
                counts[last] += len(needed)
                received -= needed
    return counts


def on_first(compute: Callable[[], T]) -> T:
    """Return the result of a function that one process calls, where there are several."""
    if not dist.is_initialized():
        return compute()
    results: list[Any] = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results, 0, patient(dist.group.WORLD))
    return cast(T, results[0])


@cache
def patient(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of all processes in which these wait for as long as a search may take."""
    return dist.new_group(timeout=datetime.timedelta(seconds=SEARCH))


# Measured


def milliseconds(step: Callable[[], object]) -> float:
    """Return the time of a step, from a barrier to a barrier."""
    return 1e3 * between_barriers(step)[1]


def between_barriers(step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a step in this process, and those of all: from a barrier to a barrier."""
    dist.barrier()
    begun = time.perf_counter()
    step()
    ended = time.perf_counter()
    dist.barrier()
    return ended - begun, time.perf_counter() - begun


def period(step: Callable[[], object], steps: int) -> float:
    """Return the milliseconds of a step in a loop, of its later half, as `Timeline.period` does."""
    dist.barrier()
    ends = []
    for _ in range(steps):
        step()
        ends.append(time.perf_counter())
    half = steps // 2
    return 1e3 * (ends[-1] - ends[half - 1]) / (steps - half)


@dataclass
class Rounds:
    """A figure of each round, predicted and measured: the milliseconds of a step, or its bytes.

    Args:
        by_own: predicted with the times of the step's own pieces, if it is recorded.
    """

    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    by_own: list[float] = field(default_factory=list)

    def figures(self, unit: str = "_ms") -> dict[str, Any]:
        """Return medians, of the ratios of each round with quartiles; names of figures end with the unit."""
        figures = {
            f"predicted{unit}": statistics.median(self.predicted),
            f"measured{unit}": statistics.median(self.measured),
            **self._ratios("ratio", self.predicted),
            "rounds": len(self.predicted),
        }
        if self.by_own:
            figures |= {f"by_own{unit}": statistics.median(self.by_own), **self._ratios("own_ratio", self.by_own)}
        return figures

    def _ratios(self, name: str, predicted: Sequence[float]) -> dict[str, Any]:
        return spread(name, [a / b for a, b in zip(self.measured, predicted, strict=True)])

    def over(self, others: Rounds) -> list[float]:
        """Return the measured times of each round over those of another step."""
        return [a / b for a, b in zip(self.measured, others.measured, strict=True)]


def spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the median of some values, and their quartiles."""
    first, _, third = statistics.quantiles(values) if len(values) > 1 else [*values] * 3
    return {name: statistics.median(values), f"{name}_quartiles": [first, third]}


def quartiles(row: Mapping[str, Any], name: str) -> str:
    """Return the text of a figure's quartiles."""
    return "{:.3f}-{:.3f}".format(*row[f"{name}_quartiles"])


def compare(
    steps: Mapping[Key, Callable[[], object]],
    predict: Callable[[Key], float | Prediction],
    rounds: int,
    measure: Callable[[Callable[[], object]], float] = milliseconds,
) -> dict[Key, Rounds]:
    """Run all steps in turn in each round, after one of each that does not count.

    Args:
        predict: returns the seconds of a step, or a `Prediction`, which `Recorded` steps need. It is called right
            before the step, so that what it profiles is of the machine's speed at that time.
        measure: returns the milliseconds of a step.
    """
    for step in steps.values():
        step()
    results = {key: Rounds() for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            predicted = predict(key)
            seconds = predicted.seconds() if isinstance(predicted, Prediction) else predicted
            results[key].predicted.append(1e3 * seconds)
            results[key].measured.append(measure(step))
            if isinstance(step, Recorded):
                assert isinstance(predicted, Prediction), "a recorded step needs a Prediction"
                results[key].by_own.append(1e3 * predicted.seconds(step.times()))
    return results
