"""The recorder: which steps, what of them, over processes and clocks; and that training goes on whatever happens."""

import json
import math
import warnings
from array import array
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import fpipe
from fpipe import gathering, handlers
from fpipe.effects import TABLE, Recv
from fpipe.measurement import Columns
from fpipe.tensorboard import Recorder
from fpipe.tensorboard.captures import tag
from fpipe.tensorboard.disk import Key, find
from fpipe.tensorboard.marks import Marks
from fpipe.tensorboard.writer import Writer
from fpipe.tree import flatten
from tests import cases, jobs, live_jobs


def scalars(logdir, run):
    """name -> {step: value} of a run, and the steps in the order in which they were written."""
    found = defaultdict(dict)
    for file in sorted((logdir / run).iterdir()):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found[value.tag][event.step] = value.tensor.float_val[0]
    return dict(found)


def train(recorder, steps, schedule="one_f_one_b", case="attention", ranks=2, microbatches=4, **options):
    """Losses of steps of a test's case in this process."""
    case, generator, plan = cases.make(case, schedule, ranks, microbatches)
    options = {"handler": handlers.Local()} | options
    step = fpipe.value_and_grad(case.pipeline, generator, plan, observe=recorder, **options)
    return [step(case.params, case.batch, case.target, rng=(0, i)) for i in range(steps)]


@pytest.mark.parametrize(
    ("options", "captured"),
    [
        ({}, [1]),
        ({"every": 4}, [1, 4, 8]),
        ({"every": 1}, list(range(1, 11))),
        ({"steps": [0, 3]}, [0, 3]),
        ({"steps": [12]}, []),
        ({"every": 4, "first": 100}, [101, 104, 108]),
    ],
)
def test_which_steps_are_captured(tmp_path, options, captured):
    with Recorder(tmp_path, **options) as recorder:
        train(recorder, 11)
    found = find(tmp_path)
    assert found.steps("", "measured") == found.steps("", "predicted") == captured
    assert list(found.notices) == []
    first = options.get("first", 0)
    assert sorted(scalars(tmp_path, "measured/rank0")["step/loss"]) == list(range(first, first + 11))


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_a_capture_is_the_step_that_ran(tmp_path, schedule):
    with Recorder(tmp_path, steps=[1]) as recorder:
        losses = train(recorder, 2, schedule)
    _, generator, plan = cases.make("attention", schedule, 2, 4)
    programs = fpipe.lower(generator, plan)
    for kind in ("measured", "predicted"):
        found = find(tmp_path).read(Key("", kind, 1))
        assert found.notices == ()
        assert found.plan == plan
        for rank in range(2):
            assert tuple(found.columns[rank].effects) == programs[rank].effects
        assert found.timeline.makespan > 0
        computes = list(found.timeline.compute(0))
        assert all(before.end <= after.start + 1e-12 for before, after in pairwise(computes))
    curves = scalars(tmp_path, "measured/rank0")
    assert curves["step/loss"] == {i: pytest.approx(loss.item()) for i, (loss, _) in enumerate(losses)}
    measured = find(tmp_path).read(Key("", "measured", 1)).timeline
    assert curves["bubble/fraction"][1] == pytest.approx(measured.bubble_rate)
    predicted = find(tmp_path).read(Key("", "predicted", 1)).timeline
    assert scalars(tmp_path, "predicted/rank0")["bubble/fraction"][1] == pytest.approx(predicted.bubble_rate)
    for rank in range(2):
        own = scalars(tmp_path, f"measured/rank{rank}")
        kinds = {kind.__name__: taken for kind, taken in measured.kinds[rank].items()}
        assert {n[5:-8]: v[1] for n, v in own.items() if n.startswith("time/")} == pytest.approx(kinds)
        assert sum(v[1] for n, v in own.items() if n.startswith("idle/")) == pytest.approx(
            measured.makespan - measured.busy[rank], abs=1e-6
        )


def test_recording_changes_nothing(tmp_path):
    with Recorder(tmp_path, every=1, gradient_norm=True) as recorder:
        recorded = train(recorder, 3, case="dropout")
    assert jobs.differences(recorded, train(None, 3, case="dropout")) == []


def test_a_prediction_is_the_simulation_at_the_measured_costs(tmp_path):
    """At these every effect of a kind takes its median, and a schedule without transfers leaves no other time."""
    with Recorder(tmp_path, steps=[2]) as recorder:
        train(recorder, 3, "zb_v", ranks=1)
    listing = find(tmp_path)
    measured, predicted = (listing.read(Key("", kind, 2)).timeline for kind in ("measured", "predicted"))
    taken = defaultdict(list)
    for span in measured.compute(0):
        taken[type(span.effect), span.effect.stage].append(span.end - span.start)
    assert [s.end - s.start for s in predicted.compute(0)] == pytest.approx(
        [np.median(taken[type(s.effect), s.effect.stage]) for s in measured.compute(0)]
    )
    assert predicted.idle == pytest.approx([0.0], abs=1e-12)


@pytest.mark.parametrize("kind", live_jobs.KINDS)
@pytest.mark.parametrize("name", ["gpipe_v", "interleaved_zb", "zb_v", "dualpipe_v"])
def test_what_is_held_is_what_the_verifier_predicts(tmp_path, kind, name):
    """The verifier's figures are held against the allocator's own in tests of live bytes."""
    schedule, place = cases.SCHEDULES[name]
    pipeline, params, batch, target, costs = live_jobs.made(kind, place(1).stages, 4, "everything_saveable")
    plan = pipeline.plan(place(1), 4)
    with Recorder(tmp_path, steps=[1]) as recorder:
        step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Local(), observe=recorder)
        for _ in range(2):
            step(params, batch, target)
    measured, predicted = (find(tmp_path).read(Key("", kind, 1)) for kind in ("measured", "predicted"))
    expected = fpipe.verify(schedule, plan, costs=costs).peak_bytes[0]
    assert measured.peak_memory(0) == predicted.peak_memory(0) == pytest.approx(expected, rel=0.02)  # live losses
    assert measured.columns[0].memory[1][-1] < 100
    assert scalars(tmp_path, "measured/rank0")["memory/held_peak_bytes"] == {1: pytest.approx(measured.peak_memory(0))}


def test_receives_say_how_large_what_came_was(tmp_path):
    with Recorder(tmp_path, steps=[1]) as recorder:
        train(recorder, 2, case="linear")
    capture = find(tmp_path).read(Key("", "measured", 1))
    for rank in range(2):
        own = capture.columns[rank]
        came = [size for effect, size in zip(own.effects, own.bytes, strict=True) if isinstance(effect, Recv)]
        assert came
        assert len(set(came)) == 1
        assert came[0] > 0
        assert np.isnan([size for e, size in zip(own.effects, own.bytes, strict=True) if not isinstance(e, Recv)]).all()


def test_the_host_stands_around_the_effects(tmp_path):
    with Recorder(tmp_path, steps=[1]) as recorder:
        train(recorder, 2)
    capture = find(tmp_path).read(Key("", "measured", 1))
    (first, begun, start), (last, end, done) = capture.headers[0].host
    assert (first, last) == ("before the first effect", "after the last effect")
    assert begun < start == capture.timeline.spans.starts[0] == 0.0
    assert end == max(capture.timeline.spans.ends[at] for at in capture.timeline.spans.of(0)) <= done


def test_curves_of_ones_own_and_of_tokens(tmp_path):
    with Recorder(tmp_path, tokens=10) as recorder:
        recorder.scalar("before", 1)
        train(recorder, 3)
        recorder.scalar("after", torch.tensor(2.5, requires_grad=True))
        recorder.scalar("elsewhere", 3.0, 77)
    found, rows = scalars(tmp_path, "measured/rank0"), len(cases.make("attention", "gpipe", 2, 4)[0].batch)
    assert (found["before"], found["after"], found["elsewhere"]) == ({0: 1.0}, {2: 2.5}, {77: 3.0})
    assert sorted(found["step/samples_per_second"]) == [1, 2]
    for step, speed in found["step/samples_per_second"].items():
        assert found["step/tokens_per_second"][step] == pytest.approx(10 * speed)
        assert 0 < speed <= rows / found["step/seconds"][step] * 1.01


@pytest.mark.parametrize(
    ("case", "schedule"), [("attention", "gpipe"), ("tied", "one_f_one_b"), ("linear", "dualpipe")]
)
def test_the_gradients_norm_counts_each_parameter_once(tmp_path, case, schedule):
    with Recorder(tmp_path, steps=[1], gradient_norm=True) as recorder:
        _, (_, grads) = train(recorder, 2, schedule, case)
    leaves = [leaf for leaf in flatten(grads).leaves if isinstance(leaf, torch.Tensor)]
    expected = math.sqrt(sum(leaf.double().square().sum().item() for leaf in leaves))
    assert scalars(tmp_path, "measured/rank0")["step/gradient_norm"] == {1: pytest.approx(expected, rel=1e-6)}


def test_one_recorder_observes_one_function(tmp_path):
    with Recorder(tmp_path) as recorder:
        train(recorder, 1)
        with pytest.raises(ValueError, match="observes a function already"):
            train(recorder, 1)


@pytest.mark.parametrize("options", [{"every": 0}, {"steps": [-1]}, {"first": -1}])
def test_what_cannot_be_captured_is_refused(tmp_path, options):
    with pytest.raises(ValueError, match="at least"):
        Recorder(tmp_path, **options)


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Recorder(tmp_path / "file" / "run")


def test_a_disk_that_fails_ends_the_recording_and_not_the_training(tmp_path, monkeypatch):
    def full(self, header, columns):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Writer, "timeline", full)
    told = pytest.warns(UserWarning, match=r"nothing more is recorded \(OSError: .*No space left.*training goes on")
    with told, Recorder(tmp_path, every=1) as recorder:
        assert len(train(recorder, 4)) == 4


def test_a_handler_that_shows_no_effects_is_told(tmp_path):
    with Recorder(tmp_path, steps=[1]) as recorder, pytest.warns(UserWarning, match="step 1 could not be captured"):
        train(recorder, 2, handler=handlers.Reference())
    assert sorted(scalars(tmp_path, "measured/rank0")["step/loss"]) == [0, 1]


def test_a_step_that_fails_is_not_counted(tmp_path):
    case, generator, plan = cases.make("linear", "gpipe", 2, 4)
    with Recorder(tmp_path, every=1) as recorder:
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), observe=recorder)
        for target in (case.target, None, case.target, case.target):
            try:
                step(case.params, case.batch, target)
            except fpipe.StageError:
                assert target is None
    assert find(tmp_path).steps("", "measured") == [1, 2]


def test_beside_the_log_of_effects(tmp_path, caplog):
    with caplog.at_level("DEBUG", "fpipe.effects"), Recorder(tmp_path, steps=[0]) as recorder:
        train(recorder, 1)
    assert find(tmp_path).steps("", "measured") == [0]
    assert "Forward" in caplog.text


# Over processes


def recorded(rank, logdir, schedule, steps, options):
    """This rank's share of a run over gloo; what it warned of."""
    case, generator, plan = cases.make("attention", schedule, torch.distributed.get_world_size(), 4)
    params, batch, target, _ = cases.own(case, plan, rank)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Recorder(logdir, **options) as recorder:
            step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=jobs.handler(), observe=recorder)
            for _ in range(steps):
                loss, grads = step(params, batch, target)
    squares = {
        stage: sum(leaf.double().square().sum().item() for leaf in flatten(tree).leaves)
        for stage, tree in grads.items()
    }
    return [str(w.message) for w in told if "record" in str(w.message)], loss.item(), squares


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v", "dualpipe"])
def test_two_processes_write_one_capture(pools, tmp_path, schedule):
    found = pools(2).run(recorded, str(tmp_path), schedule, 3, {"steps": [1, 2], "gradient_norm": True})
    assert [told for told, _, _ in found] == [[], []]
    _, _, plan = cases.make("attention", schedule, 2, 4)
    listing = find(tmp_path)
    for kind in ("measured", "predicted"):
        assert listing.steps("", kind) == [1, 2]
        capture = listing.read(Key("", kind, 2))
        assert capture.notices == ()
        assert capture.plan == plan
        assert sorted(capture.headers) == [0, 1]
        assert {header.clock for header in capture.headers.values()} == {(0.0, 0.0)}  # they share the machine's
        for rank in range(2):
            own = capture.columns[rank]
            received = [at for at, effect in enumerate(own.effects) if isinstance(effect, Recv)]
            assert received
            sent = {(int(own.waited[0][at]), type(capture.timeline.spans.effects[0])) for at in received}
            assert {source for source, _ in sent} == {1 - rank}
            assert len(own.memory[0]) == 2 * sum(TABLE[type(e)].track == "compute" for e in own.effects)
    whole = {stage: square for _, _, squares in found for stage, square in squares.items()}
    curves = scalars(tmp_path, "measured/rank0")
    assert curves["step/gradient_norm"][2] == pytest.approx(math.sqrt(sum(whole.values())), rel=1e-6)
    assert curves["step/loss"][2] == pytest.approx(found[1][1])
    assert "step/loss" not in scalars(tmp_path, "measured/rank1")


def skewed(rank, logdir):
    """As `recorded`, where rank 1 seems to be on another machine, whose clock is 100 s ahead."""
    machine = gathering._machine
    gathering._machine = lambda: f"{machine()} {rank}"
    try:
        return recorded(rank, logdir, "one_f_one_b", 2, {"steps": [1]})
    finally:
        gathering._machine = machine


def test_clocks_that_are_not_one_are_compared(pools, tmp_path):
    pools(2).run(skewed, str(tmp_path))
    clocks = {rank: header.clock for rank, header in find(tmp_path).read(Key("", "measured", 1)).headers.items()}
    assert clocks[0] == (0.0, 0.0)
    assert 0 < clocks[1].uncertainty < 0.01
    assert abs(clocks[1].offset) <= clocks[1].uncertainty  # in truth it is the same clock


def lonely(rank, logdir):
    """As `recorded`, where rank 1 fails before the recording ends."""
    case, generator, plan = cases.make("attention", "one_f_one_b", 2, 4)
    params, batch, target, _ = cases.own(case, plan, rank)
    recorder = Recorder(logdir, steps=[1])
    step = fpipe.value_and_grad(
        case.pipeline, generator, plan, handler=handlers.Distributed(timeout=3), observe=recorder
    )
    step(params, batch, target)
    if rank == 1:
        recorder._gather = lambda *given: given[0].__setattr__("alone", True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(params, batch, target)
        recorder.close()
    return [str(w.message) for w in told]


def test_a_rank_whose_peer_does_not_answer_records_alone(fresh_pool, tmp_path):
    told = fresh_pool(2).run(lonely, str(tmp_path))
    assert "step 1 is recorded by this rank alone: rank 0 could not gather" in told[0][0]
    listing = find(tmp_path)
    assert listing.steps("", "predicted") == []
    capture = listing.read(Key("", "measured", 1))
    assert capture.notices == ("the clocks of ranks 0, 1 were not compared: each begins at its own first start",)
    for rank in range(2):
        own = capture.columns[rank]
        assert own.starts[0] == 0.0
        assert set(own.waited[0].tolist()) <= {-1, rank}


def disagreeing(rank, logdir):
    case, generator, plan = cases.make("attention", "one_f_one_b", 2, 4)
    recorder = Recorder(logdir, every=10 + rank)
    fpipe.value_and_grad(case.pipeline, generator, plan, handler=jobs.handler(), observe=recorder)


def test_ranks_that_would_record_other_steps_are_refused(fresh_pool, tmp_path):
    for outcome in fresh_pool(2).outcomes(disagreeing, str(tmp_path)):
        assert outcome.error == "ScheduleError"
        assert "different schedules, plans or recorders" in outcome.text


# On CUDA


class Device:
    """A device that passes each event two seconds after it was recorded, on a clock of its own."""

    def __init__(self, monkeypatch):
        self.now, device = 0.0, self

        class Event:
            def record(self, stream=None):
                self.host, self.passed = device.now, device.now + (2.0 if stream != "aside" else 0.0)

            def synchronize(self):
                device.now = max(device.now, self.passed) + 1e-6

            def elapsed_time(self, other):
                return 1e3 * (other.passed - self.passed)

        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "aside")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
        monkeypatch.setattr("fpipe.tensorboard.marks.time.perf_counter", lambda: device.now)


def test_marks_become_the_hosts_seconds(monkeypatch):
    device = Device(monkeypatch)
    marks = Marks(torch.device("cuda", 0), 4)
    assert marks() == 0.0  # off: nothing is recorded
    marks.on = True
    taken = []
    for now in (10.0, 11.0, 12.5, 13.0):
        device.now = now
        taken.append(marks())
    assert taken == [0.0, 1.0, 2.0, 3.0]
    nan = float("nan")
    columns = Columns(*(array("d", own) for own in ([0.0, 2.0], [1.0, 3.0], [nan, 1.0], [nan, 2.0])))
    found, width = marks.seconds(columns)
    assert list(found.starts) == pytest.approx([12.0, 14.5], abs=1e-5)
    assert list(found.ends) == pytest.approx([13.0, 15.0], abs=1e-5)
    assert math.isnan(found.waits[0])
    assert found.arrivals[1] == pytest.approx(14.5, abs=1e-5)
    assert 0 <= width < 1e-5
    assert marks() == 0.0  # the first event again


def test_json_of_headers_has_no_hidden_types(tmp_path):
    with Recorder(tmp_path, steps=[1]) as recorder:
        train(recorder, 2)
    capture = find(tmp_path).read(Key("", "measured", 1))
    assert json.loads(json.dumps(capture.headers[0].host)) == [list(each) for each in capture.headers[0].host]
    assert capture.headers[0].peak[1] == "process"
    assert capture.headers[0].peak[0] > 1e7
    assert tag(1) == "timeline/step_00000001"
