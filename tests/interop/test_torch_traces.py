"""Traces of torch.profiler: those that torch writes of its own schedules, and those that no profiler wrote so well."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fpipe import Costs, Placement, Plan, interop, schedules, simulate
from fpipe.cli import app
from fpipe.effects import Activation, Overlap, Recv, Reduce, Send
from fpipe.interop.torch_traces import annotations, reading
from fpipe.tables import TABLE
from fpipe.tensorboard.files.reader import CaptureId, find
from tests.support.combinations import few, sample, thorough
from tests.support.pool import kept
from tests.support.trace_jobs import LOOPS, SINGLE, VS, write_traces

LETTER = {"Forward": "F", "Backward": "B", "BackwardInput": "I", "BackwardWeight": "W"}
MS = Costs(forward=2e-3, backward_input=3e-3, backward_weight=1e-3, communication=5e-4)
PLAN = Plan(Placement.loop(3), 6)
MOMENT = 1e-7  # seconds
BASE = 1_700_000_000 * 10**9
NAMES = {  # torch's schedule -> ours of the same order
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleLoopedBFS": "looped-bfs, backwards in reverse",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}


def cell(effect):
    """torch's text of an effect."""
    if isinstance(effect, Overlap):
        return f"({cell(effect.forward)};{cell(effect.backward)})OVERLAP_F_B"
    if isinstance(effect, Reduce):
        return f"{effect.stage}REDUCE_GRAD"
    if isinstance(effect, Send | Recv):
        value, word = effect.value, type(effect).__name__.upper()
        if isinstance(value, Activation):
            return f"{value.stage + isinstance(effect, Recv)}{word}_F{value.microbatch}"
        return f"{value.consumer if isinstance(effect, Send) else value.stage}{word}_B{value.microbatch}"
    return f"{effect.stage}{LETTER[type(effect).__name__]}{effect.microbatch}"


def event(name, start, end, category="user_annotation", pid=77, tid=77, **args):
    """An event of a trace; seconds."""
    times = {"ts": 1e6 * start + 5e5, "dur": 1e6 * (end - start)}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args, "end": end}


def host_events(timeline, rank, shift=0.0):
    """What a host records of a rank: it waits for a message within the pass that needs it, as over gloo."""
    spans, found, last = timeline.spans, [], shift
    for at in spans.of(rank):
        effect, start, end = spans.effects[at], spans.starts[at] + shift, spans.ends[at] + shift
        name, waited = f"PP:{cell(effect)}", spans.waited[at]
        if TABLE.effects[type(effect)].track == "compute":
            waits = waited >= 0 and isinstance(spans.effects[waited], Recv)
            found.append(event(name, last + MOMENT if waits else max(start, last + MOMENT), max(end, last + MOMENT)))
            last = found[-1]["end"]
        else:
            last = max(start, last) + MOMENT  # one after the other
            found.append(event(name, last, last + MOMENT))
            if isinstance(effect, Recv):
                found.append(event("gloo:recv", last + MOMENT / 2, max(end, last + MOMENT)))
            last += MOMENT
    return found


def trace(events, rank, **more):
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank},
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 77, "args": {}}, *events],
        "baseTimeNanoseconds": BASE,
        **more,
    }


def write(folder, traces, name="rank{}_trace.json"):
    folder.mkdir(exist_ok=True)
    for rank, content in enumerate(traces):
        (folder / name.format(rank)).write_text(json.dumps(content))
    return folder


def simulated(folder, schedule=schedules.one_f_one_b, plan=PLAN, shifts=(0, 0, 0), steps=1):
    """The traces of a simulated step, and its timeline."""
    timeline = simulate(schedule, plan, MS)
    own = [
        [e for step in range(steps) for e in host_events(timeline, rank, shifts[rank] + step)]
        for rank in range(plan.ranks)
    ]
    pids = [[each | {"pid": 100 + rank} for each in events] for rank, events in enumerate(own)]
    return write(folder, [trace(events, rank) for rank, events in enumerate(pids)]), timeline


def computes(timeline, rank):
    return [(span.effect, span.start - timeline.start, span.end - timeline.start) for span in timeline.compute(rank)]


def assert_alike(found, expected, tolerance=5e-6):
    """Both timelines have the same passes at the same times, and the same causes of idle time."""
    for rank in range(expected.plan.ranks):
        ours, theirs = computes(found, rank), computes(expected, rank)
        assert [effect for effect, *_ in ours] == [effect for effect, *_ in theirs]
        for (_, *times), (_, *wanted) in zip(ours, theirs, strict=True):
            assert times == pytest.approx(wanted, abs=tolerance)
        assert found.causes[rank] == pytest.approx(
            {cause: expected.causes[rank].get(cause, 0.0) for cause in found.causes[rank]}, abs=10 * tolerance
        )


def run(*args, status=0):
    found = CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "120"}, prog_name="fpipe")
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == status, found.output
    return found


def said(found):
    return " ".join(found.stderr.replace("│", " ").split())


# What torch writes


@pytest.fixture(scope="module")
def jobs():
    """`jobs(n)`: processes without groups of other tests, which traces would name."""
    with kept() as get:
        yield get


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(
            name, ranks, marks=[] if (name, ranks) in (("ScheduleGPipe", 2), ("ScheduleDualPipeV", 2)) else thorough
        )
        for name in (*SINGLE, *LOOPS, *VS)
        for ranks in (2, 4)
    ],
)
def test_torchs_own_traces_have_its_actions(name, ranks, jobs, tmp_path):
    microbatches = 2 * ranks + 2 * (name in VS)
    wanted = jobs(ranks).run(write_traces, str(tmp_path), name, ranks, microbatches)
    traces = interop.from_traces(tmp_path)
    assert [step.step for step in traces.steps] == [1, 2]
    for step in traces.steps:
        timeline, programs = step.timeline(), step.measurement.programs
        assert step.schedule == NAMES[name]
        assert step.wall > 1.7e9
        for rank in range(ranks):
            passes = [cell(span.effect) for span in timeline.compute(rank)]
            if name != "Schedule1F1B":  # whose table is not what it runs
                assert passes == wanted[rank]
            assert all(end >= start for _, start, end in computes(timeline, rank))
            account = step.measurement.account(rank)
            assert account.compute > 0
            assert all(wait > -1e-9 for wait in account.between)
        assert timeline.makespan < 5
        for effects in (program.effects for program in programs.values()):
            assert len(set(effects)) == len(effects)
        predicted = step.predicted()
        assert {s.effect for s in predicted.spans} == {s.effect for s in timeline.spans}


def test_microbatches_of_a_schedule_that_names_nothing(jobs, tmp_path):
    """Schedule1F1B writes no names: the error has the lines that do."""
    jobs(2).run(write_traces, str(tmp_path), "Schedule1F1B", 2, 4, 1, False)
    shown = run("import-trace", tmp_path, status=1)
    assert "which Schedule1F1B for one does not write: annotate each rank's stage" in said(shown)
    lines = shown.stderr.splitlines()[-3:]
    assert lines[1:] == [
        f'stage.{name}_one_chunk = named(stage.{name}_one_chunk, "{name[0].upper()}")'
        for name in ("forward", "backward")
    ]


# What is simulated, written as a trace, and read again


@pytest.mark.parametrize(
    ("schedule", "plan"),
    few(
        [
            (schedules.gpipe, Plan(Placement.loop(3), 6)),
            (schedules.one_f_one_b, Plan(Placement.loop(3), 6)),
            (schedules.interleaved_zb, Plan(Placement.loop(3, 2), 6)),
            (schedules.zb_v, Plan(Placement.v(3), 6)),
            (schedules.dualpipe_v, Plan(Placement.v(3), 8)),
        ],
        slice(1, 4),
    ),
)
def test_a_simulated_step_comes_back(schedule, plan, tmp_path):
    folder, timeline = simulated(tmp_path / "traces", schedule, plan)
    traces = interop.from_traces(folder)
    (step,) = traces.steps
    if any(isinstance(span.effect, Overlap) for span in timeline.spans):  # a wait within one counts as compute
        assert {s.effect for s in step.timeline().spans} >= {s.effect for s in timeline.spans}
        return
    assert_alike(step.timeline(), timeline)
    assert step.predicted().makespan == pytest.approx(timeline.makespan, rel=1e-3)
    assert step.wall == pytest.approx(1_700_000_000.5)
    assert [name for name in traces.notices if "host times" in name]


def test_a_trace_becomes_captures_as_a_recorder_writes_them(tmp_path):
    folder, timeline = simulated(tmp_path / "traces", steps=3)
    shown = run("import-trace", folder, "--logdir", tmp_path / "runs")
    listing = find(tmp_path / "runs")
    assert listing.steps("", "measured") == listing.steps("", "predicted") == [0, 1, 2]
    for number in range(3):
        capture = listing.read(CaptureId("", "measured", number))
        assert_alike(capture.timeline, timeline)
        assert capture.schedule == "1f1b"
        assert not capture.notices
        assert {header.device for header in capture.headers.values()} == {"host times"}
        assert listing.read(CaptureId("", "predicted", number)).timeline.makespan == pytest.approx(
            timeline.makespan, rel=1e-3
        )
    text = " ".join(shown.stdout.split())
    assert "measured, step 2, 1f1b: 3 ranks, 3 stages, 6 microbatches" in text
    assert "makespan 53 ms" in text
    assert "3 steps in" in text
    assert "critical path:" in text
    told = json.loads(run("import-trace", folder, "--json").stdout)
    assert told["makespan"] == pytest.approx(timeline.makespan, rel=1e-3)
    assert find(folder).steps("", "measured") == [0, 1, 2]  # beside the traces, where no folder is named


def test_what_would_help_is_known_of_a_trace(tmp_path):
    folder, _ = simulated(tmp_path / "traces")
    run("import-trace", folder, "--logdir", tmp_path / "runs")
    told = json.loads(run("timeline", "--what-if", tmp_path / "runs", "--json").stdout)
    assert told["what_if"]
    assert any(row["what"] == "7 microbatches" for row in told["what_if"])  # so the schedule's name is known


# The names of GPipe


def as_gpipe(content, is_first):
    """A trace as ScheduleGPipe writes it: with names of its own, and each receive within the pass that uses it."""
    words, found = {"F": "Forward", "B": "Backward"}, []
    for each in content["traceEvents"]:
        if match := re.fullmatch(r"PP:\d+([FB])(\d+)", each["name"]):
            found.append(each | {"name": f"{words[match[1]]} {match[2]}"})
        elif not each["name"].startswith("PP:"):
            found.append(each)
    receives = sorted((each for each in found if each["name"] == "gloo:recv"), key=lambda e: e["ts"] + e["dur"])
    passes = [each for each in found if each["name"][0] in "FB"]
    uses = passes[-len(receives) :] if is_first else passes[: len(receives)]
    for each, use in zip(receives, uses, strict=True):
        end = each["ts"] + each["dur"]
        each["ts"] = max(each["ts"], use["ts"] + 1e-2)
        each["dur"] = max(0.0, end - each["ts"])
    return content | {"traceEvents": found}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_stages_of_gpipe_are_given_or_those_of_the_ranks(order, tmp_path):
    plan = Plan(Placement(order), 4)
    folder, timeline = simulated(tmp_path / "traces", schedules.gpipe, plan)
    for rank in range(3):
        file = folder / f"rank{rank}_trace.json"
        file.write_text(json.dumps(as_gpipe(json.loads(file.read_text()), order[rank] == 0)))
    stages = None if order == (0, 1, 2) else [plan.stages_on(rank)[0] for rank in range(3)]
    step = interop.from_traces(folder, stages=stages).steps[0]
    assert step.measurement.plan.placement == plan.placement
    assert step.schedule == "gpipe"
    assert_alike(step.timeline(), timeline)
    assert "each of 0 to 2 once" in said(run("import-trace", folder, "--stages", "0,1,1", status=1))


# Devices


def device_trace(timeline, rank, device=None, annotated=True):
    """A host that launches all at once, and a device that runs it: a backward's kernels are launched by a thread."""
    device = rank if device is None else device
    host, found, number, sends = -1.0, [], 0, 0
    for span in (timeline.spans[at] for at in timeline.spans.of(rank)):
        name, computes = f"PP:{cell(span.effect)}", TABLE.effects[type(span.effect)].track == "compute"
        found.append(event(name, host, host + 1e-4, pid=rank))
        sends += isinstance(span.effect, Send | Recv)
        if computes or isinstance(span.effect, Recv):
            middle = (span.start + span.end) / 2
            stream = 7 if computes else 20 + sends
            kernels = [("gemm", span.start, middle), ("gemm", middle, span.end)]
            if isinstance(span.effect, Recv):
                kernels = [("ncclDevKernel_SendRecv", span.start, span.end)]
            for kernel, start, end in kernels:
                number += 1
                at = host + number * 1e-9
                found.append(event("cudaLaunchKernel", at, at + 1e-9, "cuda_runtime", rank, 99, correlation=number))
                found.append(event(kernel, start, end, "kernel", device, stream, correlation=number))
            if annotated and LETTER.get(type(span.effect).__name__) == "F":
                found.append(event(name, span.start, span.end, "gpu_user_annotation", device, stream))
        host += 2e-4
    return trace(found, rank)


def test_times_are_the_devices_where_it_is_annotated(tmp_path):
    plan = Plan(Placement.loop(3), 6)
    timeline = simulate(schedules.one_f_one_b, plan, MS)
    folder = write(tmp_path / "traces", [device_trace(timeline, rank) for rank in range(3)])
    traces = interop.from_traces(folder)
    assert_alike(traces.steps[0].timeline(), timeline, 1e-6)
    assert traces.steps[0].devices == {rank: f"device {rank}" for rank in range(3)}
    assert not [text for text in traces.notices if "host times" in text]


def test_hosts_may_number_their_devices_alike(tmp_path):
    """Two of three hosts have only a device 0."""
    timeline, devices = simulate(schedules.one_f_one_b, Plan(Placement.loop(3), 6), MS), (0, 0, 1)
    folder = write(tmp_path / "traces", [device_trace(timeline, rank, devices[rank]) for rank in range(3)])
    on_hosts(folder, "a", "b", "b")
    step = interop.from_traces(folder, clocks="same").steps[0]
    assert step.devices == {rank: f"device {device}" for rank, device in enumerate(devices)}
    assert_alike(step.timeline(), timeline, 1e-6)


def test_times_of_launching_are_said_to_be_that(tmp_path):
    """One pass has no kernel, so that the times of all are the host's."""
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(2), 2), MS)
    contents = [device_trace(timeline, rank) for rank in range(2)]
    launches = [e for e in contents[0]["traceEvents"] if e.get("cat") == "cuda_runtime"]
    contents[0]["traceEvents"] = [e for e in contents[0]["traceEvents"] if e not in launches[-2:]]
    traces = interop.from_traces(write(tmp_path / "traces", contents))
    assert traces.steps[0].devices == dict.fromkeys(range(2), "host times, of launching")
    assert any("those of launching on the host" in text for text in traces.notices)


# Clocks


def on_hosts(folder, *names):
    for rank, name in enumerate(names):
        file = folder / f"rank{rank}_trace.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"host_name": name}))


def test_clocks_of_several_hosts_are_compared_only_when_told_how(tmp_path):
    shifts = (0.0, 0.3, -0.2)
    folder, timeline = simulated(tmp_path / "traces", shifts=shifts)
    on_hosts(folder, "a", "b", "b")
    traces = interop.from_traces(folder)
    assert any("on several hosts (a, b)" in text for text in traces.notices)
    assert not traces.steps[0].compared
    with pytest.raises(ValueError, match="clocks='messages'"):
        traces.steps[0].timeline()
    shown = run("import-trace", folder)
    assert "--clocks messages estimates" in said(shown)
    capture = find(folder).read(CaptureId("", "measured", 0))
    assert [header.clock for header in capture.headers.values()] == [None] * 3
    for rank in range(3):  # each on its own is right
        assert capture.timeline.busy[rank] == pytest.approx(timeline.busy[rank], rel=1e-3)
    (step,) = interop.from_traces(folder, clocks="messages").steps
    for rank in range(3):
        off = step.measurement.offsets[rank] - shifts[rank]
        assert abs(off) <= step.measurement.uncertainty[rank] + 1e-9
        assert step.measurement.uncertainty[rank] <= 1.01e-3  # two transfers of 0.5 ms
    assert step.timeline().makespan == pytest.approx(timeline.makespan, abs=1e-3)
    assert "arrives" in interop.from_traces(folder, clocks="same").notices[0]
    run("import-trace", folder, "--clocks", "messages")
    assert find(folder).read(CaptureId("", "measured", 0)).headers[2].clock.offset == pytest.approx(-0.2, abs=1e-3)


def test_clocks_that_messages_contradict_are_not_taken_for_one(tmp_path):
    folder, _ = simulated(tmp_path / "traces", shifts=(0.0, -0.3, 0.0))
    traces = interop.from_traces(folder)
    assert not traces.steps[0].compared
    assert any("arrives 300 ms before it is sent" in text or "before it is sent" in text for text in traces.notices)


def test_messages_that_contradict_each_other_are_refused(tmp_path):
    folder, _ = simulated(tmp_path / "traces", steps=2)
    file = folder / "rank1_trace.json"
    content = json.loads(file.read_text())
    for each in content["traceEvents"]:
        each["ts"] = each.get("ts", 0.0) - 4e5 * (each.get("ts", 0.0) > 1e6)  # the clock was set back between steps
    file.write_text(json.dumps(content))
    assert "the messages contradict each other" in said(run("import-trace", folder, "--clocks", "messages", status=1))


# Steps, ranks, replicas


def test_steps_that_the_profiler_cut_are_left_out(tmp_path):
    """The profiler began within a step and ended within one, at other passes on each rank."""
    folder, timeline = simulated(tmp_path / "traces", steps=4)
    for rank in range(3):
        file = folder / f"rank{rank}_trace.json"
        content = json.loads(file.read_text())
        meta, *events = sorted(content["traceEvents"], key=lambda e: e.get("ts", 0.0))
        file.write_text(json.dumps(content | {"traceEvents": [meta, *events[4 + 3 * rank : -5 - 2 * rank]]}))
    traces = interop.from_traces(folder)
    assert "6 parts of steps at the ends of traces left out" in traces.notices
    assert len(traces.steps) == 2
    for step in traces.steps:
        assert_alike(step.timeline(), timeline)


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b, schedules.looped_bfs])
def test_wherever_a_trace_begins_its_whole_steps_are_found(schedule, tmp_path):
    plan = Plan(Placement.loop(1), 3) if schedule is schedules.one_f_one_b else Plan(Placement.loop(2, 2), 3)
    folder, timeline = simulated(tmp_path / "traces", schedule, plan, steps=4)
    contents = [json.loads((folder / f"rank{rank}_trace.json").read_text()) for rank in range(plan.ranks)]
    ordered = [sorted(c["traceEvents"], key=lambda e: e.get("ts", 0.0)) for c in contents]
    for share in sample([i / 10 for i in range(1, 10)], [0.3, 0.7]):
        for rank, (content, events) in enumerate(zip(contents, ordered, strict=True)):
            count = (len(events) - 1) // 4
            kept = [events[0], *events[1 + int(share * count) :]]
            (folder / f"rank{rank}_trace.json").write_text(json.dumps(content | {"traceEvents": kept}))
        steps = interop.from_traces(folder).steps
        assert 2 <= len(steps) <= 3, share
        for step in steps:
            assert_alike(step.timeline(), timeline)


def test_steps_have_the_profilers_numbers(tmp_path):
    folder, _ = simulated(tmp_path / "traces", steps=3)
    for rank, first in enumerate((10, 10, 11)):  # rank 2's profiler lacks a step
        file = folder / f"rank{rank}_trace.json"
        content = json.loads(file.read_text())
        numbers = [event(f"ProfilerStep#{10 + at}", at - 0.01, at + 0.9) for at in range(3)]
        kept = [e for e in content["traceEvents"] if e.get("ts", 1e9) >= 5e5 + 1e6 * (first - 10)]
        file.write_text(json.dumps(content | {"traceEvents": [*numbers[first - 10 :], *kept]}))
    traces = interop.from_traces(folder)
    assert [step.step for step in traces.steps] == [11, 12]
    assert "1 step not in the traces of all ranks left out" in traces.notices


def test_several_windows_of_a_job_are_one_run(tmp_path):
    """As torchtitan writes them, a folder for each window."""
    folder, timeline = simulated(tmp_path / "once")
    for window, number in ((0, 10), (1, 20)):
        place = tmp_path / "traces" / f"iteration_{number}"
        place.mkdir(parents=True)
        for rank in range(3):
            content = json.loads((folder / f"rank{rank}_trace.json").read_text())
            later = [each | {"ts": each.get("ts", 0.0) + 9e6 * window} for each in content["traceEvents"]]
            about = event(f"ProfilerStep#{number}", 9 * window - 0.1, 9 * window + 5)
            (place / f"rank{rank}_trace.json").write_text(json.dumps(content | {"traceEvents": [about, *later]}))
    traces = interop.from_traces(tmp_path / "traces")
    assert [step.step for step in traces.steps] == [10, 20]
    assert [step.wall for step in traces.steps] == pytest.approx([1_700_000_000.5, 1_700_000_009.5])
    for step in traces.steps:
        assert_alike(step.timeline(), timeline)


def test_ranks_of_one_replica_are_named_or_found_in_the_mesh(tmp_path):
    folder, timeline = simulated(tmp_path / "one")
    both = tmp_path / "both"
    both.mkdir()
    for rank in range(3):
        content = json.loads((folder / f"rank{rank}_trace.json").read_text())
        for replica in range(2):
            world = 2 * rank + replica
            content["distributedInfo"] = {"rank": world, "world_size": 6}
            (both / f"{world}.json").write_text(json.dumps(content))
    assert "ranks 0 and 1 of the job both run stage 0" in said(run("import-trace", both, status=1))
    traces = interop.from_traces(both, ranks=[1, 3, 5])
    assert_alike(traces.steps[0].timeline(), timeline)
    assert "the pipeline's ranks are the job's 1, 3, 5" in traces.notices
    for file in both.iterdir():
        content = json.loads(file.read_text())
        world = content["distributedInfo"]["rank"]
        mesh = [world % 2, 2 + world % 2, 4 + world % 2]
        content["distributedInfo"]["pg_config"] = [
            {"pg_desc": "mesh_dp", "ranks": [0]},
            {"pg_desc": "mesh_pp", "ranks": mesh},
        ]
        file.write_text(json.dumps(content))
    assert "name the ranks of one, as --ranks 0,2,4 or 1,3,5" in said(run("import-trace", both, status=1))
    for file in both.iterdir():
        if int(file.stem) % 2:
            file.unlink()
    assert_alike(interop.from_traces(both).steps[0].timeline(), timeline)


def test_another_schedule_is_predicted_beside(tmp_path):
    folder, timeline = simulated(tmp_path / "traces")
    traces = interop.from_traces(folder, schedule="gpipe")
    assert any("not of the schedule of the prediction, but of 1f1b" in text for text in traces.notices)
    expected = simulate(schedules.gpipe, timeline.plan, MS)
    assert traces.steps[0].predicted().makespan == pytest.approx(expected.makespan, rel=1e-3)
    assert "runs BackwardInput and BackwardWeight" in said(run("import-trace", folder, "--schedule", "zb-h1", status=1))
    assert "no schedule is called" in said(run("import-trace", folder, "--schedule", "nothing", status=1))


# Files


WRONG = {
    "empty": b"",
    "cut": b'{"traceEvents": [{"ph": "X", "name": "PP:0F0", "cat": "user_anno',
    "text": b"what is this",
    "deep": b'{"traceEvents": [' + b"[" * 200_000,
    "digits": b'{"a": ' + b"1" * 10_000 + b', "traceEvents": []}',
    "gzip": gzip.compress(b'{"traceEvents": []}')[:-9],
    "no gzip": b"\x1f\x8b nothing",
    "binary": bytes(range(256)) * 10,
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_damaged_file_is_refused_in_a_sentence(content, tmp_path):
    folder, _ = simulated(tmp_path / "traces", plan=Plan(Placement.loop(2), 2))
    (folder / "rank1_trace.json").write_bytes(content)
    shown = run("import-trace", folder, status=1)
    assert "rank1_trace.json" in said(shown)
    assert "write the trace again" in said(shown)
    assert len(said(shown)) < 400
    assert not (folder / "measured").exists()


def odd_events():
    """Events that no profiler writes."""
    numbers = [None, "1", float("nan"), float("inf"), -1e300, 10**400, [], {}]
    found = [event("PP:0F0", 0, 1) | {key: value} for key in ("ts", "dur", "pid", "tid") for value in numbers]
    names = ["PP:", "PP:0F", "PP:F0", "PP:0F0 ", "PP:-1F0", "PP:(0F0)OVERLAP_F_B", "PP:٣F٣", "PP:0X1", "</script>"]
    found += [event(name, 0, 1) for name in names]
    return [*found, None, 3, "event", [], {}, {"ph": "X"}, {"ph": "X", "name": 3, "cat": []}]


def test_odd_events_are_passed_over(tmp_path):
    folder, timeline = simulated(tmp_path / "traces")
    for rank in range(3):
        file = folder / f"rank{rank}_trace.json"
        content = json.loads(file.read_text())
        odd = [e for e in odd_events() if not isinstance(e, dict) or not usable(e)]
        file.write_text(json.dumps(content | {"traceEvents": [*odd, *content["traceEvents"]]}))
    (folder / "config.json").write_text('{"a": 1}\n{"b": 2}')
    for number, content in enumerate(OTHERS):
        (folder / f"other{number}.json").write_text(content)
    traces = interop.from_traces(folder)
    assert_alike(traces.steps[0].timeline(), timeline)
    left_out = f"{1 + len(OTHERS)} files without events of a trace left out, such as config.json"
    assert left_out in traces.notices


OTHERS = ("[]", "[1, 2]", '[{"loss": 0.5}, {"loss": 0.25}]', '"a text"', "3", '{"traceName": "a.json"}')
"""Files of JSON that are no traces."""


def usable(each):
    """Whether an event has a pass's name, and times."""
    times = [each.get("ts"), each.get("dur")]
    return each.get("name") == "PP:0F0" and all(isinstance(t, int | float) and abs(t) < 1e15 for t in times)


HOSTILE = {
    "many microbatches": ["PP:0F9999999"],
    "many stages": ["PP:99999F0", "PP:99999B0"],
    "a hole": ["PP:0F0", "PP:0F2", "PP:0B0", "PP:0B2"],
    "no forward": ["PP:0B0"],
    "half a backward": ["PP:0F0", "PP:0I0"],
    "not received": ["PP:0F0", "PP:0SEND_F0", "PP:0B0"],
    "overlapped itself": ["PP:(0F0;0F0)OVERLAP_F_B"],
    "only messages": ["PP:0SEND_F0"],
}


@pytest.mark.parametrize("names", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_order_is_refused_in_a_sentence(names, tmp_path):
    events = [event(name, at, at + 0.5) for at, name in enumerate(names)]
    folder = write(tmp_path / "traces", [trace(events, 0)])
    shown = run("import-trace", folder, status=1)
    assert said(shown).startswith("error: ")
    assert len(said(shown)) < 500
    assert "Traceback" not in said(shown)


def test_a_list_of_events_is_a_trace_too(tmp_path):
    folder, timeline = simulated(tmp_path / "traces")
    for rank in range(3):
        file = folder / f"rank{rank}_trace.json"
        content = json.loads(file.read_text())["traceEvents"]
        file.unlink()
        with gzip.open(folder / f"rank-{rank}.json.gz", "wt", encoding="utf-8-sig") as stream:
            json.dump(content, stream)
    assert_alike(interop.from_traces(folder).steps[0].timeline(), timeline)
    (folder / "rank-1.json.gz").rename(folder / "another.json.gz")
    assert "does not say of which rank it is" in said(run("import-trace", folder, status=1))


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_file_is_read_in_pieces(piece, tmp_path, monkeypatch):
    """Wherever a piece ends, the same is read."""
    monkeypatch.setattr(reading, "_PIECE", piece)
    content = {"a": 12.5, "b": {"c": [1, "x\\"]}, "traceEvents": [{"é": '\u2028"}', "n": -1e-3}, [], {}], "z": 12345}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False))
    events = []
    fields = reading.read(file, events.append, lambda name: name != "b")
    assert fields == {"a": 12.5, "z": 12345}
    assert events == [content["traceEvents"][0], {}]


def test_what_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_PIECE", 100)
    monkeypatch.setattr(reading, "_MOST", 10_000)
    file = tmp_path / "a.json"
    file.write_text('{"traceEvents": [{"name": "' + "x" * 100_000 + '"}]}')
    with pytest.raises(interop.BadTrace, match="a part of more than"):
        reading.read(file, lambda event: None, lambda name: True)


def test_the_passes_of_all_files_are_counted(tmp_path, monkeypatch):
    folder, timeline = simulated(tmp_path / "traces")
    most = sum(len(timeline.spans.of(rank)) for rank in range(3))
    monkeypatch.setattr(annotations, "_MOST", most)
    interop.from_traces(folder)
    monkeypatch.setattr(annotations, "_MOST", most // 2)
    with pytest.raises(interop.BadTrace, match="events to keep, with those of the files before: record fewer steps"):
        interop.from_traces(folder)


@thorough
def test_memory_does_not_grow_with_what_is_of_no_use(tmp_path):
    """A trace of 40 MB, of which one step is of a pipeline."""
    folder, _ = simulated(tmp_path / "traces", plan=Plan(Placement.loop(1), 2))
    file = folder / "rank0_trace.json"
    whole = json.loads(file.read_text())
    other = ",".join([json.dumps(event("aten::mm", 0, 1, "cpu_op", shapes=["x" * 150]))] * 1000)
    with file.open("w") as stream:
        stream.write('{"distributedInfo": {"rank": 0}, "traceEvents": [')
        stream.writelines(f"{other}," for _ in range(150))
        stream.write(",".join(map(json.dumps, whole["traceEvents"])) + "]}")
    assert file.stat().st_size > 40e6
    code = f"""if True:
        import resource
        from fpipe.interop.torch_traces.traces import from_traces
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert len(from_traces({str(folder)!r}).steps) == 1
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert int(shown.stdout) < 20_000  # KiB


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "there is no folder nowhere"),
        ([".", "--ranks", "0,x"], "is no list of numbers: give one as 0,2,4,6"),
    ],
)
def test_wrong_arguments_are_named(arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["import-trace", *arguments], env={"COLUMNS": "200"})
    assert shown.exit_code in (1, 2)
    assert text in said(shown)


def test_folders_without_what_is_needed_are_named(tmp_path):
    assert "has no trace: write one on each rank" in said(run("import-trace", tmp_path, status=1))
    folder, _ = simulated(tmp_path / "traces")
    (folder / "rank1_trace.json").unlink()
    assert "no trace has stage 1" in said(run("import-trace", folder, status=1))
    content = json.loads((folder / "rank2_trace.json").read_text())
    content["distributedInfo"]["world_size"] = 3
    (folder / "rank2_trace.json").write_text(json.dumps(content))
    assert "traces of 2 of the job's 3 ranks: bring the files of all" in said(run("import-trace", folder, status=1))
    assert "there is no trace of rank 1: bring the files" in said(
        run("import-trace", folder, "--ranks", "0,1,2", status=1)
    )
