"""The recorder: which steps, what of them, over processes and clocks; and that training goes on whatever happens."""

import logging
import math
import time
import warnings
from array import array
from collections import defaultdict, deque
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch

import fpipe
from fpipe import handlers
from fpipe.devices import Cpu
from fpipe.effects import Recv
from fpipe.handlers.protocol import Span
from fpipe.profiling import gathering
from fpipe.stages.pytree import flatten
from fpipe.tables import TABLE
from fpipe.tensorboard import Recorder
from fpipe.tensorboard.files.reader import CaptureId, find
from fpipe.tensorboard.files.writer import Writer
from fpipe.tensorboard.recording import recorder as recorder_of
from fpipe.tensorboard.recording.device_clock import NUMBERS, Kept, Marks, Numbers
from fpipe.timelines.measurement import Columns
from tests.support import cases, grid_jobs, jobs, live_jobs
from tests.support.combinations import PAIRS, combined, few, one_in, thorough
from tests.support.curves import scalars
from tests.support.fake_device import FakeDevice

CASE = "attention" if PAIRS else "linear"  # where any case does
TURNS = ("the ranks took turns in one process: a rank idles while the others compute",)


def train(recorder, steps, schedule="one_f_one_b", case=CASE, ranks=2, microbatches=4, **options):
    """Losses of steps of a test's case in this process."""
    case, generator, plan = cases.make(case, schedule, ranks, microbatches)
    options = {"handler": handlers.Local()} | options
    step = fpipe.value_and_grad(case.pipeline, generator, plan, observe=recorder, **options)
    return [step(case.params, case.batch, case.target, rng=(0, i)) for i in range(steps)]


@one_in(3)
@pytest.mark.parametrize(
    ("options", "captured"),
    few(
        [
            ({}, [1]),
            ({"steps": [0, 3]}, [0, 3]),
            ({"every": 4, "first": 100}, [101, 104, 108]),
            ({"every": 4}, [1, 4, 8]),
            ({"every": 1}, list(range(1, 11))),
            ({"steps": [12]}, []),
        ],
        slice(3),
    ),
)
def test_which_steps_are_captured(tmp_path, options, captured):
    with Recorder(tmp_path, **options) as recorder:
        train(recorder, 11)
    found = find(tmp_path)
    assert found.steps("", "measured") == found.steps("", "predicted") == captured
    assert list(found.notices) == []
    first = options.get("first", 0)
    assert sorted(scalars(tmp_path, "measured/rank0")["step/loss"]) == list(range(first, first + 11))


@pytest.mark.parametrize("schedule", few(["one_f_one_b", "dualpipe_v", "gpipe", "interleaved_1f1b", "zb_v"], slice(2)))
def test_a_capture_is_the_step_that_ran(tmp_path, schedule):
    with Recorder(tmp_path, steps=[1]) as recorder:
        losses = train(recorder, 2, schedule, "attention")
    _, generator, plan = cases.make("attention", schedule, 2, 4)
    programs = fpipe.lower(generator, plan)
    for kind in ("measured", "predicted"):
        found = find(tmp_path).read(CaptureId("", kind, 1))
        assert found.notices == (TURNS if kind == "measured" else ())
        assert found.timeline.plan == plan
        for rank in range(2):
            assert tuple(found.columns[rank].effects) == programs[rank].effects
        assert found.timeline.makespan > 0
        computes = list(found.timeline.compute(0))
        assert all(before.end <= after.start + 1e-12 for before, after in pairwise(computes))
    curves = scalars(tmp_path, "measured/rank0")
    assert curves["step/loss"] == {i: pytest.approx(loss.item()) for i, (loss, _) in enumerate(losses)}
    measured, predicted = (find(tmp_path).read(CaptureId("", kind, 1)).timeline for kind in ("measured", "predicted"))
    assert scalars(tmp_path, "predicted/rank0")["bubble/fraction"][1] == pytest.approx(predicted.bubble_rate)
    for rank in range(2):
        own = scalars(tmp_path, f"measured/rank{rank}")
        kinds = {kind.__name__: taken for kind, taken in measured.kinds[rank].items()}
        assert {n[5:-8]: v[1] for n, v in own.items() if n.startswith("time/")} == pytest.approx(kinds)
        assert not [name for name in own if name.startswith(("idle/", "bubble/"))]  # they took turns


def test_recording_changes_nothing(tmp_path):
    with Recorder(tmp_path, every=1, gradient_norm=True) as recorder:
        recorded = train(recorder, 3, case="dropout")
    assert jobs.differences(recorded, train(None, 3, case="dropout")) == []


def test_a_prediction_is_the_simulation_at_the_measured_costs(tmp_path):
    """At these every effect of a kind takes its median, and a schedule without transfers leaves no other time."""
    with Recorder(tmp_path, steps=[2]) as recorder:
        train(recorder, 3, "zb_v", ranks=1)
    listing = find(tmp_path)
    measured, predicted = (listing.read(CaptureId("", kind, 2)).timeline for kind in ("measured", "predicted"))
    taken = defaultdict(list)
    for span in measured.compute(0):
        taken[type(span.effect), span.effect.stage].append(span.end - span.start)
    assert [s.end - s.start for s in predicted.compute(0)] == pytest.approx(
        [np.median(taken[type(s.effect), s.effect.stage]) for s in measured.compute(0)]
    )
    assert predicted.idle == pytest.approx([0.0], abs=1e-12)


@one_in(3)
@combined(kind=live_jobs.KINDS, name=["gpipe_v", "interleaved_zb", "zb_v", "dualpipe_v"])
def test_what_is_held_is_what_the_verifier_predicts(tmp_path, kind, name):
    """The verifier's figures are held against the allocator's own in tests of live bytes."""
    schedule, place = cases.SCHEDULES[name]
    pipeline, params, batch, target, costs = live_jobs.made(kind, place(1).stages, 4, "everything")
    plan = pipeline.plan(place(1), 4)
    with Recorder(tmp_path, steps=[1]) as recorder:
        step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Local(), observe=recorder)
        for _ in range(2):
            step(params, batch, target)
    measured, predicted = (find(tmp_path).read(CaptureId("", kind, 1)) for kind in ("measured", "predicted"))
    expected = fpipe.verify(schedule, plan, costs=costs).peak_bytes[0]
    assert measured.peak_memory(0) == predicted.peak_memory(0) == pytest.approx(expected, rel=0.02)  # live losses
    assert measured.columns[0].memory[1][-1] < 100
    assert scalars(tmp_path, "measured/rank0")["memory/held_peak_bytes"] == {1: pytest.approx(measured.peak_memory(0))}
    owners = dict(measured.headers[0].owners)
    assert 0 < owners.pop("sums of gradients", 1.0) <= sum(x.nbytes for x in flatten(params).leaves)
    assert sum(owners.values()) == measured.peak_memory(0)
    assert {"residuals"} <= set(owners) <= {"residuals", "deferred", "activation", "gradient"}
    assert predicted.headers[0].owners == measured.headers[0].owners


def test_receives_say_how_large_what_came_was(tmp_path):
    with Recorder(tmp_path, steps=[1]) as recorder:
        train(recorder, 2, case="linear")
    capture = find(tmp_path).read(CaptureId("", "measured", 1))
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
    capture = find(tmp_path).read(CaptureId("", "measured", 1))
    (first, begun, start), (last, end, done) = capture.headers[0].host
    assert (first, last) == ("before the first effect", "after the last effect")
    assert begun < start == capture.timeline.spans.starts[0] <= capture.timeline.start == 0.0
    assert end == max(capture.timeline.spans.ends[at] for at in capture.timeline.spans.of(0)) <= done


def test_work_beside_the_steps_is_in_the_row_of_the_host(tmp_path):
    """As far as it is within the effects: it may have begun before, and go on."""
    spans = deque([Span("of an earlier step", 0.0, 1.0), Span("to process 3", 0.0)])
    with patch.object(handlers.Local, "beside", spans), Recorder(tmp_path, steps=[1]) as recorder:
        train(recorder, 2)
    capture = find(tmp_path).read(CaptureId("", "measured", 1))
    (_, _, start), (_, end, _), beside = capture.headers[0].host
    assert beside == ("to process 3", start, end)


def test_curves_of_ones_own_and_of_tokens(tmp_path):
    with Recorder(tmp_path, tokens=10) as recorder:
        recorder.scalar("before", 1)
        train(recorder, 3)
        recorder.scalar("after", torch.tensor(2.5, requires_grad=True))
        recorder.scalar("elsewhere", 3.0, 77)
    curves, rows = scalars(tmp_path, "measured/rank0"), len(cases.make(CASE, "gpipe", 2, 4)[0].batch)
    assert (curves["before"], curves["after"], curves["elsewhere"]) == ({0: 1.0}, {2: 2.5}, {77: 3.0})
    assert sorted(curves["step/samples_per_second"]) == [1, 2]
    for step, speed in curves["step/samples_per_second"].items():
        assert curves["step/tokens_per_second"][step] == pytest.approx(10 * speed)
        assert 0 < speed <= rows / curves["step/seconds"][step] * 1.01


@pytest.mark.parametrize(
    ("case", "schedule"), few([("tied", "one_f_one_b"), ("linear", "dualpipe"), ("attention", "gpipe")], slice(2))
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
    warns = pytest.warns(UserWarning, match="step 1 could not be recorded")
    with Recorder(tmp_path, steps=[1]) as recorder, warns as told:
        train(recorder, 2, handler=handlers.Reference())
    assert told[0].filename == __file__
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


def recorded(rank, logdir, schedule, steps, options, case=CASE):
    """This rank's share of a run over gloo; what it warned of."""
    case, generator, plan = cases.make(case, schedule, torch.distributed.get_world_size(), 4)
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


@pytest.mark.parametrize("schedule", few(["one_f_one_b", "zb_v", "dualpipe"], ["zb_v"]))
def test_two_processes_write_one_capture(pools, tmp_path, schedule):
    options = {"steps": [1, 2], "gradient_norm": True}
    by_rank = pools(2).run(recorded, str(tmp_path), schedule, 3, options, "attention")
    assert [warned for warned, _, _ in by_rank] == [[], []]
    _, _, plan = cases.make("attention", schedule, 2, 4)
    listing = find(tmp_path)
    for kind in ("measured", "predicted"):
        assert listing.steps("", kind) == [1, 2]
        capture = listing.read(CaptureId("", kind, 2))
        assert capture.notices == ()
        assert capture.timeline.plan == plan
        assert sorted(capture.headers) == [0, 1]
        assert {header.clock for header in capture.headers.values()} == {(0.0, 0.0)}  # they share the machine's
        for rank in range(2):
            own = capture.columns[rank]
            received = [at for at, effect in enumerate(own.effects) if isinstance(effect, Recv)]
            assert received
            sent = {(int(own.waited[0][at]), type(capture.timeline.spans.effects[0])) for at in received}
            assert {source for source, _ in sent} == {1 - rank}
            assert len(own.memory[0]) == 2 * sum(TABLE.effects[type(e)].track == "compute" for e in own.effects)
    whole = {stage: square for _, _, squares in by_rank for stage, square in squares.items()}
    for rank in range(2):
        own, timeline = scalars(tmp_path, f"measured/rank{rank}"), listing.read(CaptureId("", "measured", 2)).timeline
        idle = sum(points[2] for name, points in own.items() if name.startswith("idle/"))
        assert idle == pytest.approx(timeline.makespan - timeline.busy[rank], abs=1e-6)
        assert ("bubble/fraction" in own) == (rank == 0)
    assert scalars(tmp_path, "measured/rank0")["bubble/fraction"][2] == pytest.approx(timeline.bubble_rate)
    curves = scalars(tmp_path, "measured/rank0")
    assert curves["step/gradient_norm"][2] == pytest.approx(math.sqrt(sum(whole.values())), rel=1e-6)
    assert curves["step/loss"][2] == pytest.approx(by_rank[1][1])
    assert "step/loss" not in scalars(tmp_path, "measured/rank1")


def test_steps_in_a_row_are_one_capture(pools, tmp_path):
    options = {"steps": [1], "loop": 3, "gradient_norm": True}
    by_rank = pools(2).run(recorded, str(tmp_path), "one_f_one_b", 5, options)
    assert [warned for warned, *_ in by_rank] == [[], []]
    listing = find(tmp_path)
    for kind in ("measured", "predicted"):
        assert listing.steps("", kind) == [1]
        capture = listing.read(CaptureId("", kind, 1))
        timeline, spans = capture.timeline, capture.timeline.spans
        assert (capture.notices, timeline.steps) == ((), 3)
        for rank in range(2):
            assert len(list(timeline.compute(rank))) == 3 * 4 * 2
            assert len(capture.columns[rank].memory[0]) == 2 * 3 * 4 * 2
            assert all(a.end <= b.start for a, b in pairwise(timeline.compute(rank)))
            for at in spans.of(rank):
                if spans[at].track == "receive":
                    sent = spans[at].waited_for
                    assert spans.effects[sent].value == spans.effects[at].value
                    assert step_of(spans, sent) == step_of(spans, at)
    measured = listing.read(CaptureId("", "measured", 1)).timeline
    for rank in range(2):
        own = scalars(tmp_path, f"measured/rank{rank}")
        for kind, seconds in measured.kinds[rank].items():
            assert own[f"time/{kind.__name__}_seconds"] == {1: pytest.approx(seconds / 3)}
        idle = sum(points[1] for name, points in own.items() if name.startswith("idle/"))
        assert idle == pytest.approx((measured.makespan - measured.busy[rank]) / 3, abs=1e-6)
    curves = scalars(tmp_path, "measured/rank0")
    assert curves["bubble/makespan_seconds"] == {1: pytest.approx(measured.period)}
    assert [*curves["step/gradient_norm"]] == [3]


def step_of(spans, at):
    """The number of a span's step, of three."""
    rank = spans[at].rank
    return 3 * (at - spans.first[rank]) // len(spans.of(rank))


@pytest.mark.parametrize(
    ("options", "captured"),
    [
        ({"every": 4, "loop": 2}, [1, 4, 8]),
        ({"steps": [1, 4, 8], "loop": 3}, [1, 4]),  # the last one has two of its three steps
        ({"steps": [1, 2, 4], "loop": 3}, [1, 4]),  # 2 is within the first
        ({"steps": [99, 101], "first": 100, "loop": 3}, [101]),
    ],
)
def test_loops_begin_at_the_captured_steps(tmp_path, options, captured):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Recorder(tmp_path, **options) as recorder:
            train(recorder, 10)
    listing = find(tmp_path)
    assert listing.steps("", "measured") == listing.steps("", "predicted") == captured
    assert {listing.read(CaptureId("", "measured", step)).timeline.steps for step in captured} == {options["loop"]}


def test_a_step_that_fails_ends_a_loop(tmp_path):
    case, generator, plan = cases.make(CASE, "one_f_one_b", 2, 4)
    with Recorder(tmp_path, steps=[1, 5], loop=3) as recorder:
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), observe=recorder)
        run = partial(step, case.params, case.batch, case.target)
        for _ in range(2):
            run()
        with pytest.raises(fpipe.StageError, match="0 rows"):
            step(case.params, *(x[:0] for x in (case.batch, case.target)))
        run()
        with pytest.warns(UserWarning, match="step 3 could not be recorded: .*2 complete steps in a row of 3"):
            run()
        for _ in range(4):
            run()
    listing = find(tmp_path)
    assert listing.steps("", "measured") == listing.steps("", "predicted") == [5]


def test_a_loop_is_refused_where_it_can_not_be_recorded(tmp_path):
    with pytest.raises(ValueError, match=r"every and loop must be whole numbers of at least 1, .*loop=0"):
        Recorder(tmp_path, loop=0)
    with (
        Recorder(tmp_path, loop=2, device=FakeDevice()) as recorder,
        pytest.raises(ValueError, match=r"loop=2 does not go with the times of .*: capture steps with loop=1"),
    ):
        train(recorder, 1)


def replicated(rank, logdir):
    """This process's share of a run of two replicas with parameters in shards; what it warned of, and the norm."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Recorder(logdir, steps=[1, 2], gradient_norm=True) as recorder:
            handler, _, grads = grid_jobs.run(3, recorder)
            recorder.scalar("mine", 1.0)
    norm = fpipe.global_norm(grads, grid_jobs.pipeline_and_plan()[1], handler=handler)
    return [str(w.message) for w in told if "record" in str(w.message)], norm.item()


@thorough
def test_every_replica_writes_its_own_timeline(pools, tmp_path):
    outcomes = pools(4).run(replicated, str(tmp_path))
    assert [told for told, _ in outcomes] == [[]] * 4
    listing = find(tmp_path)
    assert listing.experiments == ["", "replica1"]
    spans = []
    for replica, experiment in enumerate(listing.experiments):
        for kind in ("measured", "predicted"):
            assert listing.steps(experiment, kind) == [1, 2]
            capture = listing.read(CaptureId(experiment, kind, 2))
            assert capture.notices == ()
            assert capture.header.replica == replica
            assert (capture.timeline.plan.replicas, capture.timeline.plan.gathered) == (2, {0, 1, 2, 3})
            assert sorted(capture.headers) == [0, 1]
            tracks = [(span.rank, span.track, span.effect) for span in capture.timeline.spans]
            assert {"gather", "scatter"} <= {track for _, track, _ in tracks}
            spans.append(tracks)
    assert all(tracks == spans[0] for tracks in spans)
    measured = [listing.read(CaptureId(experiment, "measured", 2)) for experiment in listing.experiments]
    makespans = [capture.timeline.makespan for capture in measured]
    for capture in measured:
        assert [header.makespans for header in capture.headers.values()] == [pytest.approx(makespans)] * 2
        busy = [pytest.approx(replica.timeline.busy) for replica in measured]
        assert [list(header.busy) for header in capture.headers.values()] == [busy] * 2
    assert min(capture.timeline.start for capture in measured) == 0  # they are on one clock
    assert {"step/loss", "mine", "bubble/makespan_seconds"} <= set(scalars(tmp_path, "measured/rank0"))
    assert scalars(tmp_path, "measured/rank0")["step/gradient_norm"][2] == pytest.approx(outcomes[0][1])
    others = scalars(tmp_path, "replica1/measured/rank0")
    assert others["bubble/makespan_seconds"][2] == pytest.approx(makespans[1])
    assert not {"step/loss", "mine", "step/gradient_norm"} & set(others)
    idle = [name for name in others if name.startswith("idle/")]
    assert {"idle/gather_seconds", "idle/scatter_seconds"} <= set(idle)


def skewed(rank, logdir):
    """As `recorded`, where rank 1 seems to be on another machine, whose clock is 100 s ahead."""
    clock_number = gathering._clock_number
    gathering._clock_number = lambda clock: clock_number(clock) + rank
    try:
        return recorded(rank, logdir, "one_f_one_b", 2, {"steps": [1]})
    finally:
        gathering._clock_number = clock_number


def test_clocks_that_are_not_one_are_compared(pools, tmp_path):
    pools(2).run(skewed, str(tmp_path))
    clocks = {rank: header.clock for rank, header in find(tmp_path).read(CaptureId("", "measured", 1)).headers.items()}
    assert clocks[0] == (0.0, 0.0)
    assert 0 < clocks[1].uncertainty < 0.01
    assert abs(clocks[1].offset) <= clocks[1].uncertainty  # in truth it is the same clock


def lonely(rank, logdir):
    """As `recorded`, where rank 1 doesn't come to compare clocks; what was warned of, and later losses."""
    case, generator, plan = cases.make(CASE, "one_f_one_b", 2, 4)
    params, batch, target, _ = cases.own(case, plan, rank)
    recorder_of.GATHER_TIMEOUT = 1.0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Recorder(logdir, every=1) as recorder:
            handler = handlers.Distributed(timeout=20)
            step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, observe=recorder)
            step(params, batch, target)
            recorder._own.alone = rank == 1
            losses = [step(params, batch, target)[0].item() for _ in range(3)]
    return [str(w.message) for w in told], losses


def test_a_rank_whose_peer_does_not_answer_records_alone_and_training_goes_on(fresh_pool, tmp_path):
    (told, losses), (nothing, others) = fresh_pool(2).run(lonely, str(tmp_path))
    assert len(told) == 1
    assert "from step 1 on this rank is recorded alone: " in told[0]
    assert nothing == []
    assert losses == others
    listing = find(tmp_path)
    assert listing.steps("", "measured") == [1, 2, 3]
    assert listing.steps("", "predicted") == []
    capture = listing.read(CaptureId("", "measured", 2))
    assert capture.notices == ("the clocks of ranks 0, 1 were not compared: each begins at its own first start",)
    for rank in range(2):
        own = capture.columns[rank]
        assert next(capture.timeline.compute(rank)).start == 0.0
        assert set(own.waited[0].tolist()) <= {-1, rank}


def logging_on_one(rank, logdir):
    """A recorder, and on rank 1 the log of effects beside it."""
    logging.getLogger("fpipe.effects").setLevel("DEBUG" if rank else "WARNING")
    try:
        return recorded(rank, logdir, "one_f_one_b", 2, {"steps": [1]})[0]
    finally:
        logging.getLogger("fpipe.effects").setLevel("NOTSET")


def test_the_log_of_effects_on_one_rank_is_nobody_elses_matter(pools, tmp_path):
    assert pools(2).run(logging_on_one, str(tmp_path)) == [[], []]
    assert find(tmp_path).steps("", "predicted") == [1]


def failing_norm(rank, logdir):
    """Rank 1 has gradients of which no norm can be taken."""
    fails = patch.object(recorder_of, "squares", lambda gradients, plan, ranks: 1 / 0)
    with fails if rank == 1 else nullcontext():
        return recorded(rank, logdir, "one_f_one_b", 4, {"every": 1, "gradient_norm": True})[0]


def test_what_fails_on_one_rank_ends_no_training(pools, tmp_path):
    warned = pools(2).run(failing_norm, str(tmp_path))
    assert warned[0] == []
    assert [text.split(":")[0] for text in warned[1]] == [f"step {i} could not be recorded" for i in (1, 2, 3)]
    assert find(tmp_path).captures == {}
    assert sorted(scalars(tmp_path, "measured/rank0")["step/loss"]) == [0, 1, 2, 3]


def disagreeing(rank, logdir):
    case, generator, plan = cases.make("attention", "one_f_one_b", 2, 4)
    recorder = Recorder(logdir, every=10 + rank)
    fpipe.value_and_grad(case.pipeline, generator, plan, handler=jobs.handler(), observe=recorder)


def test_ranks_that_would_record_other_steps_are_refused(fresh_pool, tmp_path):
    for outcome in fresh_pool(2).outcomes(disagreeing, str(tmp_path)):
        assert outcome.error == "ScheduleError"
        assert "different schedules, plans or recorders" in outcome.text


# On an asynchronous device


@pytest.fixture
def device(monkeypatch):
    """A device that is two seconds behind the host, whose time is its own."""
    device = FakeDevice(lag=2.0, now=100.0)
    monkeypatch.setattr("time.perf_counter", device.clock)
    return device


def test_marks_become_the_hosts_seconds(device):
    marks = Marks(device, 6)
    marks.begin(False)
    assert marks() == 0.0  # nothing is recorded
    marks.begin(True)
    taken = []
    for now in (110.0, 111.0, 112.5, 113.0):
        device.now = now
        taken.append(marks())
    kept, nan = marks.keep(), float("nan")
    columns = Columns(
        *(array("d", own) for own in ((taken[0], taken[2]), (taken[1], taken[3]), (nan, taken[1]))),
        array("d", [nan, taken[2]]),
    )
    marks.begin(True)  # another step, whose marks are other events
    assert not {marks(), marks()} & set(taken)
    found, width = kept.seconds({0: columns})
    assert list(found[0].starts) == pytest.approx([112.0, 114.5], abs=1e-5)
    assert list(found[0].ends) == pytest.approx([113.0, 115.0], abs=1e-5)
    assert math.isnan(found[0].waits[0])
    assert found[0].arrivals[1] == pytest.approx(114.5, abs=1e-5)
    assert 0 <= width < 1e-5


def test_the_device_waits_for_the_host_where_it_passes_a_mark_at_once(device):
    marks, taken = Marks(device, 4), []
    device.stream.lag = 0.0
    marks.begin(True)
    for now, lag in ((110.0, 0.0), (111.0, 0.0), (111.5, 2.0), (114.0, 0.0)):
        device.now, device.stream.lag = now, lag
        taken.append(marks())
    lanes = {0: taken[:2], 1: taken[2:]}
    columns = {rank: Columns(*(array("d", [m]) for m in own), array("d"), array("d")) for rank, own in lanes.items()}
    bounds = marks.keep().launch_bound(columns)
    assert bounds == pytest.approx({0: 1.0, 1: 0.5}, abs=1e-4)  # not 0.5 to 2.5, when it was behind the host


@pytest.mark.parametrize(("lag", "share"), [(0.0, 1.0), (2.0, 0.0)])
def test_a_recorder_has_the_time_in_which_a_device_ran_out_of_work(tmp_path, device, lag, share):
    device.stream.lag = lag
    case, generator, plan = cases.make("attention", "one_f_one_b", 2, 4)
    with Recorder(tmp_path, steps=[1], device=device) as recorder:
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), observe=recorder)
        for _ in range(3):
            step(case.params, case.batch, case.target)
    makespan = find(tmp_path).read(CaptureId("", "measured", 1)).timeline.makespan
    bound = sum(scalars(tmp_path, f"measured/rank{rank}")["time/launch_bound_seconds"][1] for rank in range(2))
    assert bound == pytest.approx(share * makespan, rel=0.2)


def test_a_step_that_fails_takes_no_marks_of_one_that_is_still_to_be_read(device):
    marks = Marks(device, 2)
    marks.begin(True)
    taken = marks(), marks()
    kept = marks.keep()
    expected = device.now + 2
    for _ in range(3):
        device.now += 50
        marks.begin(True)
        marks(), marks()
    columns = Columns(*(array("d", [mark]) for mark in (*taken, *taken)))
    assert kept.seconds({0: columns})[0][0].ends[0] == pytest.approx(expected, abs=1e-4)


def test_a_captured_step_of_a_device_is_read_after_the_next_one(tmp_path, device, monkeypatch):
    read = []
    resolve = Kept.seconds
    monkeypatch.setattr(Kept, "seconds", lambda kept, columns: (read.append(recorder.step), resolve(kept, columns))[1])
    case, generator, plan = cases.make(CASE, "one_f_one_b", 2, 4)
    with Recorder(tmp_path, every=1, device=device) as recorder:
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), observe=recorder)
        for _ in range(4):
            step(case.params, case.batch, case.target)
            device.now += 1.0
    assert read == [2, 3, 4]  # steps 1 and 2 while the one after them ends, and 3 on closing
    listing = find(tmp_path)
    assert listing.steps("", "measured") == [1, 2, 3]
    for number in (1, 2, 3):
        capture = listing.read(CaptureId("", "measured", number))
        assert {header.peak for header in capture.headers.values()} == {(12345.0, "allocator")}
        assert {header.device for header in capture.headers.values()} == {"cpu"}
        assert 0 < capture.timeline.makespan < 1.0
        for rank in range(2):
            spans = list(capture.timeline.compute(rank))
            assert all(span.end > span.start for span in spans)
            assert all(before.end <= after.start for before, after in pairwise(spans))


def test_numbers_are_as_they_were_when_they_were_given_and_waited_for_alone(device):
    numbers, x = Numbers(device), torch.zeros((), dtype=torch.bfloat16)
    first = numbers.later(x)
    device.now += 1.0
    x += 1
    second = numbers.later(x)
    x += 1
    assert device.waits == []
    assert first.item() == 0.0
    assert device.waits == pytest.approx([1.0], abs=1e-4)
    device.now += 5.0
    assert second.item() == 1.0
    assert len(device.waits) == 1  # it was there


def test_numbers_share_memory_that_grows_with_those_on_their_way(device):
    numbers, count = Numbers(device), 0
    for pending in (NUMBERS, NUMBERS, 3 * NUMBERS, 4 * NUMBERS):
        laters = [numbers.later(torch.tensor(count + i)) for i in range(pending)]
        assert [later.item() for later in laters] == list(range(count, count + pending))
        count += pending
    assert device.memory == [(NUMBERS,), (NUMBERS,), (2 * NUMBERS,)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.float64])
def test_a_number_of_any_real_type(dtype):
    assert Numbers(Cpu()).later(torch.ones(1, 1, dtype=dtype)).item() == 1.0


def test_marks_of_the_cpu_are_the_hosts_own_times():
    marks = Marks(Cpu(), 2)
    marks.begin(True)
    before, taken, after = time.perf_counter(), marks(), time.perf_counter()
    columns, width = marks.keep().seconds({0: Columns(*(array("d", [taken]) for _ in range(4)))})
    assert before - width <= columns[0].starts[0] <= after + width


def test_a_recorders_numbers_wait_for_nothing_before_they_are_written(tmp_path, device):
    case, generator, plan = cases.make("linear", "gpipe", 2, 4)
    recorder = Recorder(tmp_path, steps=[], device=device)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), observe=recorder)
    losses = [step(case.params, case.batch, case.target)[0].item() for _ in range(3)]
    assert device.waits == []
    recorder.close()
    assert device.memory == [(NUMBERS,)]
    assert scalars(tmp_path, "measured/rank0")["step/loss"] == pytest.approx(dict(enumerate(losses)))


def on_devices(rank, logdir):
    """Ranks whose devices compare their clocks with the host's as well as their round trips allow."""
    device, capture, seen = FakeDevice(lag=0.0, round_trip=(1e-4, 4e-2)[rank]), recorder_of.StepCapture, []

    def captured(*arguments, measurement, **options):
        seen.append(measurement.uncertainty)
        return capture(*arguments, measurement=measurement, **options)

    with patch.multiple(recorder_of, device_of=lambda _: device, StepCapture=captured):
        assert recorded(rank, logdir, "one_f_one_b", 3, {"steps": [1]})[0] == []
    return seen


def test_every_rank_knows_the_uncertainty_of_each_ranks_device(pools, tmp_path):
    (first,), (second,) = pools(2).run(on_devices, str(tmp_path))
    assert first == second
    assert 5e-5 <= first[0] < 1e-2
    assert 2e-2 <= first[1] < 1.0
    headers = find(tmp_path).read(CaptureId("", "measured", 1)).headers
    assert {rank: header.clock.uncertainty for rank, header in headers.items()} == first


# What a loop may do


def test_a_number_is_as_it_was_when_it_was_given(tmp_path):
    total, case, generator, plan = torch.zeros(()), *cases.make("linear", "gpipe", 2, 4)
    with Recorder(tmp_path, steps=[]) as recorder:
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), observe=recorder)
        for i in range(4):
            loss, _ = step(case.params, case.batch, case.target)
            total += i
            recorder.scalar("total", total)
            loss.zero_()
    found = scalars(tmp_path, "measured/rank0")
    assert found["total"] == {0: 0.0, 1: 1.0, 2: 3.0, 3: 6.0}
    assert min(found["step/loss"].values()) > 0


def test_what_is_no_number_is_refused_at_once(tmp_path):
    with Recorder(tmp_path) as recorder:
        with pytest.raises(ValueError, match="mine must be one number, not a tensor of shape"):
            recorder.scalar("mine", torch.ones(2))
        with pytest.raises(ValueError, match="mine must be one number, not a complex tensor"):
            recorder.scalar("mine", torch.ones((), dtype=torch.complex64))


def test_a_curve_without_a_step(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.scalar("mine", 2.0)
    assert scalars(tmp_path, "measured/rank0") == {"mine": {0: 2.0}}


def test_steps_after_closing_are_not_recorded(tmp_path):
    case, generator, plan = cases.make("linear", "gpipe", 2, 4)
    with Recorder(tmp_path, every=1) as recorder:
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), observe=recorder)
        first = [step(case.params, case.batch, case.target) for _ in range(2)]
    recorder.close()
    assert jobs.differences(step(case.params, case.batch, case.target), first[0]) == []
    assert find(tmp_path).steps("", "measured") == [1]


def test_an_evaluation_is_recorded_by_a_recorder_of_its_own(tmp_path):
    case, _, plan = cases.make(CASE, "gpipe", 2, 4)
    with Recorder(tmp_path, steps=[1]) as recorder:
        run = fpipe.evaluate(case.pipeline, plan, handler=handlers.Local(), observe=recorder)
        for _ in range(2):
            run(case.params, case.batch)
    capture = find(tmp_path).read(CaptureId("", "measured", 1))
    assert capture.schedule == "evaluate of wavefront"
    assert {type(effect).__name__ for effect in capture.timeline.spans.effects} == {"Forward", "Send", "Recv"}
    with Recorder(tmp_path / "other") as recorder:
        train(recorder, 1)
        with pytest.raises(ValueError, match="observes a function already"):
            fpipe.evaluate(case.pipeline, plan, handler=handlers.Local(), observe=recorder)


def test_an_error_in_the_loop_stays_the_error(tmp_path):
    def loop():
        with Recorder(tmp_path, every=1) as recorder:
            train(recorder, 3)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop()
    assert find(tmp_path).steps("", "measured") == [1, 2]


def test_ranks_of_two_jobs_in_one_folder_are_not_put_together(tmp_path):
    for name in ("one", "other"):
        with Recorder(tmp_path / name, steps=[1]) as recorder:
            train(recorder, 2)
    for file in (tmp_path / "other/measured/rank1").iterdir():
        file.rename(tmp_path / "one/measured/rank1" / f"{file.name}.1")
    notices = find(tmp_path / "one").read(CaptureId("", "measured", 1)).notices
    assert "is of another job than rank 0's" in notices[0]


def test_a_header_has_what_the_process_took(tmp_path):
    with Recorder(tmp_path, steps=[1]) as recorder:
        train(recorder, 2)
    peak, whose = find(tmp_path).read(CaptureId("", "measured", 1)).headers[0].peak
    assert whose == "process"
    assert peak > 1e7
