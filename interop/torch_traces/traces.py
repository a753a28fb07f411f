"""A folder of traces as measured steps, and these as captures of the Pipeline tab. No torch."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

from fpipe._format import counted, extent
from fpipe.costs import Costs
from fpipe.effects import Backward, Effect
from fpipe.errors import ScheduleError
from fpipe.interop.torch_traces.annotations import RankTrace, rank_trace
from fpipe.interop.torch_traces.clocks import CLOCKS, Clocks, Offset, offsets
from fpipe.interop.torch_traces.measuring import Order, Orders, Origin, TimedStep, timed
from fpipe.interop.torch_traces.reading import BadTrace
from fpipe.interop.torch_traces.steps import ANNOTATE, WholeStep, by_pipeline_rank, matched, parts_of, with_stage
from fpipe.plan import Schedule
from fpipe.programs.lowering import collect, lower
from fpipe.programs.program import Programs
from fpipe.programs.schedules import as_schedule, named_schedules
from fpipe.programs.verifier import check
from fpipe.schedules.catalogue import CATALOGUE
from fpipe.tensorboard.files.captures import columns_of
from fpipe.tensorboard.files.columns import Clock, Header
from fpipe.tensorboard.files.writer import Writer
from fpipe.timelines.measurement import Columns, Measurement
from fpipe.timelines.simulator import simulate_programs
from fpipe.timelines.timeline import Timeline

_UNNAMED = "traced order"
_ON_DEVICE, _ON_HOST, _LAUNCHING = "device", "host times", "host times, of launching"


@dataclass(frozen=True)
class TracedStep:
    """A measured step of a traced job.

    Args:
        step: the profiler's number of it, or its place among the traced ones.
        measurement: its times; of ranks whose clocks are not compared, each on its own.
        compared: whether the ranks' times are on one clock.
        schedule: the name of the schedule with this order; "traced order" if none has it.
        prediction: the programs to simulate beside it.
        devices: what each rank's times are times of, as "host times".
        wall: when it ran, in seconds since 1970; 0 if that is not known.
    """

    step: int
    measurement: Measurement
    compared: bool
    schedule: str
    prediction: Programs
    devices: Mapping[int, str]
    wall: float

    def __repr__(self) -> str:
        return f"<TracedStep {self.step}: {self.schedule}, {extent(self.measurement.plan)}>"

    def timeline(self) -> Timeline:
        """Return the measured timeline.

        Raises:
            ValueError: the ranks' clocks are not compared.
        """
        if not self.compared:
            raise ValueError("the ranks' clocks are not compared: pass clocks='messages' or clocks='same'")
        return self.measurement.timeline()

    @cached_property
    def costs(self) -> Costs:
        """The measured costs, in seconds. Transfers take no time where clocks are not compared."""
        costs = self.measurement.costs()
        return costs if self.compared else replace(costs, communication=0.0)

    def predicted(self) -> Timeline:
        """Return the simulated timeline with the measured costs."""
        return simulate_programs(self.prediction, self.costs)

    def write(self, logdir: Path | str) -> None:
        """Write the step and its prediction as captures, a run for each rank.

        Raises:
            OSError: the folder can't be written.
        """
        job, predicted = f"{secrets.randbits(62):x}", self.predicted()
        for rank, columns in self.measurement.columns.items():
            header = Header("measured", self.step, rank, self.schedule, self.measurement.plan, wall=self.wall, job=job)
            with Writer(logdir, "predicted", rank) as writer:
                plan = predicted.plan
                writer.timeline(replace(header, kind="predicted", plan=plan), columns_of(predicted, rank))
            with Writer(logdir, "measured", rank) as writer:
                timeline, origin, clock = self._of(rank, columns)
                used = [wait - origin for wait in columns.waits]
                header = replace(header, clock=clock, device=self.devices[rank])
                writer.timeline(header, columns_of(timeline, rank, used=used))

    def _of(self, rank: int, columns: Columns) -> tuple[Timeline, float, Clock | None]:
        """Return the timeline that has a rank, its origin, and the rank's clock."""
        if self.compared:
            offset, uncertainty = self.measurement.offsets[rank], self.measurement.uncertainty[rank]
            return self._timeline, self.measurement.origin, Clock(offset, uncertainty)
        alone = replace(self.measurement, columns={rank: columns})
        return alone.timeline(partial=True), alone.origin, None

    @cached_property
    def _timeline(self) -> Timeline:
        return self.measurement.timeline()


@dataclass(frozen=True)
class Traces:
    """The steps of a traced job, in order.

    Args:
        notices: texts about what was left out, and what the times are.
    """

    steps: Sequence[TracedStep]
    notices: Sequence[str]

    def __repr__(self) -> str:
        numbers = ", ".join(str(each.step) for each in self.steps[:8]) + ", …" * (len(self.steps) > 8)
        return f"<Traces of steps {numbers}: {self.steps[0].schedule}, {extent(self.steps[0].measurement.plan)}>"

    def write(self, logdir: Path | str) -> None:
        """Write all steps, measured and predicted, for the Pipeline tab and `fpipe timeline`.

        Raises:
            OSError: the folder can't be written.
        """
        for step in self.steps:
            step.write(logdir)


def from_traces(
    folder: Path | str,
    *,
    ranks: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
    schedule: Schedule | str | None = None,
    clocks: Clocks = "host",
    progress: Callable[[str], None] = lambda file: None,
) -> Traces:
    """Read torch.profiler's traces of a job with torch.distributed.pipelining, such as torchtitan's.

    Args:
        folder: has a Chrome trace of each rank, `.json` or `.json.gz`, itself or in folders below; several of a rank
            are several windows of the job.
        ranks: the job's ranks that are the pipeline's, in order. By default all; or, where the traces say it, those of
            the mesh's dimension "pp".
        stages: the stage of each rank, for ScheduleGPipe, whose annotations lack it; by default the rank's number in
            the pipeline.
        schedule: the prediction is of this one, on the same plan; by default of the order in the traces.
        clocks: "host" takes the ranks of one host to have one clock, and does not compare those of several. "same": all
            have one clock. "messages": offsets are estimated from the messages between ranks, with an uncertainty.
            "none": no clocks are compared.
        progress: called with each file before it is read.

    Raises:
        BadTrace: a ValueError: a file is damaged, the traces have no pipeline's passes, no step is whole, or they do
            not fit together. The text says what to do.
    """
    if clocks not in CLOCKS:
        raise BadTrace(f"clocks is one of {', '.join(CLOCKS)}, not {clocks!r}")
    traces, notices = _read(Path(folder), progress)
    own = _staged(by_pipeline_rank(traces, ranks), stages)
    if not any(trace.actions for each in own.values() for trace in each):
        raise BadTrace(
            f"{folder} has traces, but without the names of a pipeline's passes, which Schedule1F1B for one does not "
            f"write: annotate each rank's stage before the schedule is made\n{ANNOTATE}"
        )
    steps, left_out = matched(
        {rank: [part for trace in each for part in parts_of(trace)] for rank, each in own.items()}
    )
    devices = _devices(steps, own)
    origin, orders = _origin(steps[0]), Orders()
    timed_steps = [timed(step, orders.of(step), origin, _ON_DEVICE in devices[0]) for step in steps]
    found, notice = offsets(own, (message for step in timed_steps for message in step.messages), clocks)
    namer = _Namer(schedule)
    result = [_traced(step, found, namer, origin, devices) for step in timed_steps]
    notices += [*_renumbered(own), *left_out, *([notice] if notice else []), *_host_notices(devices), *namer.notices]
    return Traces(result, tuple(notices))


def _read(folder: Path, progress: Callable[[str], None]) -> tuple[list[RankTrace], list[str]]:
    if not folder.is_dir():
        raise BadTrace(f"there is no folder {folder}")
    files = sorted(file for ending in ("*.json", "*.json.gz") for file in folder.rglob(ending) if file.is_file())
    traces, others = list[RankTrace](), list[str]()
    for file in files:
        progress(file.name)
        trace = rank_trace(file, sum(len(trace.actions) for trace in traces))
        if trace is None:
            others.append(file.name)
        else:
            traces.append(trace)
    if not traces:
        raise BadTrace(
            f"{folder} has no trace: write one on each rank with torch.profiler's export_chrome_trace or "
            "tensorboard_trace_handler"
        )
    return traces, [
        f"{counted(len(others), 'file')} without events of a trace left out, such as {others[0]}"
    ] if others else []


def _staged(own: dict[int, list[RankTrace]], stages: Sequence[int] | None) -> dict[int, list[RankTrace]]:
    """Return the traces with the stages of GPipe's annotations."""
    if stages is not None and sorted(stages) != list(range(len(own))):
        raise BadTrace(f"stages are one for each of {counted(len(own), 'rank')}, each of 0 to {len(own) - 1} once")
    return {
        rank: [with_stage(trace, rank if stages is None else stages[rank]) for trace in each]
        for rank, each in own.items()
    }


def _origin(step: WholeStep) -> Origin:
    """Return the time that all times are counted from."""
    part = step.parts[0]
    return Origin(part.actions[0].start, part.trace.base)


def _renumbered(own: Mapping[int, Sequence[RankTrace]]) -> Iterator[str]:
    ranks = [each[0].rank for each in own.values()]
    if ranks != list(range(len(ranks))):
        yield f"the pipeline's ranks are the job's {', '.join(map(str, ranks))}"


def _traced(
    step: TimedStep, found: Mapping[int, Offset], namer: _Namer, origin: Origin, devices: Mapping[int, str]
) -> TracedStep:
    measurement = Measurement(
        step.order.programs,
        {rank: _shifted(own, found[rank].added) if found else own for rank, own in step.columns.items()},
        {rank: -offset.added for rank, offset in found.items()},
        {rank: offset.uncertainty for rank, offset in found.items()},
    )
    name, prediction = namer.of(step.order)
    wall = origin.wall + measurement.origin if origin.wall else 0.0
    return TracedStep(step.number, measurement, bool(found), name, prediction, devices, wall)


def _devices(steps: Sequence[WholeStep], own: Mapping[int, Sequence[RankTrace]]) -> dict[int, str]:
    """Return what each rank's times are times of: of a device, if each pass of all ranks has its times there."""
    actions = (action for step in steps for part in step.parts.values() for action in part.actions)
    if all(action.device for action in actions if action.computes):
        return {rank: f"{_ON_DEVICE} {each[-1].devices[0]}" for rank, each in own.items()}
    return {rank: _LAUNCHING if each[-1].devices else _ON_HOST for rank, each in own.items()}


def _host_notices(devices: Mapping[int, str]) -> Iterator[str]:
    if _LAUNCHING in devices.values():
        yield "some passes have no time on the device: the times are those of launching on the host"
    elif _ON_HOST in devices.values():
        yield "the times are host times: the traces have none of a device"


def _shifted(columns: Columns, by: float) -> Columns:
    return Columns(*(array("d", [time + by for time in column]) for column in columns))


class _Namer:
    """The names of orders, and the programs that are simulated beside them."""

    def __init__(self, schedule: Schedule | str | None) -> None:
        self.schedule, self.notices = schedule, list[str]()
        self._known = dict[int, tuple[str, Programs]]()

    def of(self, order: Order) -> tuple[str, Programs]:
        if id(order) not in self._known:
            self._known[id(order)] = self._named(order)
        return self._known[id(order)]

    def _named(self, order: Order) -> tuple[str, Programs]:
        name = _name(order)
        if self.schedule is None:
            return name, order.programs
        try:
            programs = lower(as_schedule(self.schedule), order.plan)
            check(programs, ordered=False)
        except ScheduleError as error:
            raise BadTrace(f"the schedule of the prediction does not fit the traces: {error}") from None
        if lacking := sorted(_kinds(programs) - _kinds(order.programs)):
            raise BadTrace(
                f"the schedule of the prediction runs {' and '.join(lacking)}, whose times the traces don't have"
            )
        if _passes(programs) != _passes(order.programs):
            self.notices.append(f"the traces are not of the schedule of the prediction, but of {name}")
        return name, programs


def _kinds(programs: Programs) -> set[str]:
    return {type(effect).__name__ for own in _passes(programs).values() for effect in own}


def _passes(programs: Programs) -> dict[int, list[Effect]]:
    return {
        rank: [effect for effect in program if program.table.effects[type(effect)].track == "compute"]
        for rank, program in programs.items()
    }


def _name(order: Order) -> str:
    """Return the name of the schedule that has an order; also of one whose backwards each run in reverse."""
    own = _passes(order.programs)
    ascending = {rank: _ascending(effects) for rank, effects in own.items()}
    chunks = len(order.plan.stages_on(0))
    names = {_UNNAMED: (0, False)}  # and how well each fits
    for name, schedule in named_schedules(order.plan, Costs(), None):
        try:
            passes = _passes(collect(schedule, order.plan))
        except ScheduleError:
            continue
        if passes == own:
            names[name] = 2, CATALOGUE[name].chunks == chunks
        elif passes == ascending:
            names[f"{name}, backwards in reverse"] = 1, CATALOGUE[name].chunks == chunks
    return max(names, key=names.__getitem__)


def _ascending(effects: Sequence[Effect]) -> list[Effect]:
    """Return effects in which each run of a stage's backwards is in the order of microbatches."""
    result, run = list[Effect](), list[Backward]()
    every: list[Effect | None] = [*effects, None]
    for effect in every:
        if isinstance(effect, Backward) and (not run or run[-1].stage == effect.stage):
            run.append(effect)
            continue
        result += sorted(run, key=attrgetter("microbatch"))
        run = [effect] if isinstance(effect, Backward) else []
        if effect is not None and not run:
            result.append(effect)
    return result
