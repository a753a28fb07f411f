"""A step whose pieces are captured has the bits of one that is not, and its host launches a graph for each piece."""

import copy
import dataclasses
import gc
import warnings
import weakref
from collections import Counter

import optree
import pytest
import torch
import torch.nn.functional as F

import fpipe
from fpipe import Pipeline, Placement, StageError, handlers, interop, lower, schedules
from fpipe import effects as fx
from fpipe.devices.tape import Tape
from fpipe.handlers.protocol import Observer
from tests.handlers.test_captured import changed, check_steps, counted
from tests.support import cases, jobs
from tests.support.combinations import ALL, combined, few
from tests.support.jobs import differences
from tests.support.sharing import sharing
from tests.support.streams import Checker, RecordedDevice, Stream

CASES, SCHEDULES = cases.UNSLICED, [*cases.SCHEDULES]


def possible(name, schedule, m, way):
    """By default a case meets one schedule: its pieces are those that the tests of whole steps capture."""
    met = (CASES.index(name) + SCHEDULES.index(schedule)) % len(SCHEDULES) == 4
    fits = schedule not in cases.COPIED or (m % 2 == 0 and name != "modules")
    return fits and (ALL or met)


def possible_over_gloo(name, schedule, way):
    met = (CASES.index(name) + SCHEDULES.index(schedule)) % 36 == 0
    return (schedule not in cases.COPIED or name != "modules") and (ALL or met)


def pair(case, schedule, plan, way="everything", handler=None, **options):
    """A step, and the same step with captured pieces."""
    options = {"handler": handler or sharing(handlers.Local(), "pair"), **jobs.WAYS[way], **case.options, **options}
    return [fpipe.value_and_grad(case.pipeline, schedule, plan, capture=c, **options) for c in (False, "pieces")]


def linear(rows=8, m=4, schedule=schedules.one_f_one_b, **options):
    case = cases.built("linear", 2, rows)
    plan = case.pipeline.plan(Placement.loop(2), m)
    return case, *pair(case, schedule, plan, **options)


@combined(
    name=few(CASES, slice(None, None, 3)),
    schedule=few(SCHEDULES, slice(None, None, 2)),
    m=(2, 3),
    way=("everything", "eager", "nothing"),
    where=possible,
    singly=True,
)
def test_bits(name, schedule, m, way):
    case, order, plan = cases.make(name, schedule, 2, m, cases.rows(m))
    plain, captured = pair(case, order, plan, way, sharing(handlers.Local(), name))
    check_steps(case, plain, captured)
    assert captured.pieces.graphs > 0


@combined(name=CASES, schedule=SCHEDULES, way=("everything", "eager"), where=possible_over_gloo)
def test_bits_over_gloo(pools, name, schedule, way):
    assert pools(2).run(jobs.captured, name, schedule, 4, 2, way, "cpu", "pieces") == [[]] * 2


@pytest.mark.parametrize("schedule", few(SCHEDULES, ("gpipe", "one_f_one_b", "interleaved_zb", "zb_v", "dualpipe")))
def test_a_stage_has_as_many_slots_as_microbatches_are_alive_in_it(schedule):
    """One for each at the peak of its rank's program, and of those with a fused backward apart from the others."""
    case, order, plan = cases.make("linear", schedule, 2, 8, 16)
    _, captured = pair(case, order, plan)
    for _ in range(3):
        captured(case.params, case.batch, case.target)
    expected = Counter()
    for program in lower(order, plan).values():
        parts = [part for effect in program for part in fx.parts(effect)]
        fused = {(e.stage, e.microbatch) for e in parts if isinstance(e, fx.Backward)}
        alive, peak = Counter(), Counter()
        for e in parts:
            if isinstance(e, fx.Forward | fx.Backward | fx.BackwardWeight):
                kind = e.stage, (e.stage, e.microbatch) in fused
                alive[kind] += 1 if isinstance(e, fx.Forward) else -1
                peak[kind] = max(peak[kind], alive[kind])
        expected.update({kind: count * (2 if kind[1] else 3) for kind, count in peak.items()})
    assert captured.pieces.graphs == expected.total()


def test_a_replay_calls_no_stage():
    case, calls = counted()
    plan = case.pipeline.plan(Placement.loop(2), 4)
    _, captured = pair(case, schedules.one_f_one_b, plan, "eager")
    counts = []
    for _ in range(4):
        captured(case.params, case.batch, case.target)
        counts.append(len(calls))
    assert counts == [8, 8 + 3, 8 + 3, 8 + 3]  # three slots are captured: of stage 0 two, of stage 1 one


def test_the_host_launches_a_graph_for_each_piece(monkeypatch):
    case, _, captured = linear()
    for _ in range(2):
        captured(case.params, case.batch, case.target)
    replays = []
    with monkeypatch.context() as patch:
        patch.setattr(Tape, "replay", lambda tape, seeds: replays.append(tape))
        captured(case.params, case.batch, case.target)
    assert len(replays) == 2 * 2 * 4  # of two stages, forward and backward, of four microbatches
    assert len(set(replays)) == 2 * 3


@pytest.mark.parametrize("name", ["linear", "modules"])
def test_results_belong_to_the_caller(name):
    """The new state, too, which one piece returns and nothing else."""
    case = cases.built(name, 2, 8)
    _, captured = pair(case, schedules.one_f_one_b, case.pipeline.plan(Placement.loop(2), 4))

    def step(i):
        return captured(*changed((case.params, case.batch), i), case.target, state=case.state, rng=case.rng)

    results = [step(i) for i in range(4)]
    copies = copy.deepcopy(results)
    step(9)
    assert differences(results, copies) == []


def test_arguments_are_kept_until_they_are_captured_and_no_longer():
    case, _, captured = linear()
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            arguments = optree.tree_map(torch.clone, (case.params, case.batch, case.target))
            given = [weakref.ref(leaf) for leaf in optree.tree_leaves(arguments)]
            captured(*arguments)
            del arguments
        assert [ref() for ref in given] == [None] * len(given)
    finally:
        gc.enable()


def test_shapes_that_change_and_come_back():
    case, plain, captured = linear(rows=16)
    for rows in (16, 8, 16, 8, 12, 16, 4, 4, 4):
        part = case.params, case.batch[:rows], case.target[:rows]
        assert differences(captured(*part), plain(*part)) == []


def test_the_number_of_graphs_is_bounded():
    case, plain, captured = linear(rows=80, m=2)
    for rows in range(40, 80, 2):
        part = case.params, case.batch[:rows], case.target[:rows]
        assert differences(captured(*part), plain(*part)) == []
    assert captured.pieces.graphs <= 2 * 16 * 2 * 2


@pytest.mark.parametrize("way", ["everything", "eager"])
def test_seeds_change_with_every_step(way):
    case = cases.built("dropout", 2, 8)
    plan = case.pipeline.plan(Placement.loop(2), 2)
    plain, captured = pair(case, schedules.zb_h1, plan, way)
    state, losses = torch.get_rng_state(), []
    for rng in ((0, 0), (0, 1), (0, 2), (2**40, 0), (0, 2)):
        found, expected = (step(case.params, case.batch, case.target, rng=rng) for step in (captured, plain))
        assert differences(found, expected) == []
        losses.append(found[0].item())
    assert len(set(losses)) == 4
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("way", ["everything", "eager"])
def test_values_that_depend_on_params_alone_are_renewed_in_each_step(way):
    """Under autocast, the weights are cast once a step."""
    case, plain, captured = linear(way=way)
    for steps in (range(6), range(6, 8), range(8, 9)):
        with torch.autocast("cpu", enabled=len(steps) > 1):
            for i in steps:
                arguments = *changed((case.params, case.batch), i), case.target
                found, expected = (step(*arguments) for step in (captured, plain))
                assert differences(found, expected) == []


def test_training_by_a_donated_optimizer_that_no_graph_could_hold():
    case = cases.built("linear", 2, 8)
    plan = case.pipeline.plan(Placement.loop(2), 4)
    trained = []
    for capture in (False, "pieces"):
        adamw = interop.optimizer(torch.optim.AdamW, lr=0.1, donate=True)
        step = fpipe.train_step(
            case.pipeline, schedules.zb_h1, plan, adamw, handler=handlers.Local(), max_norm=0.1, capture=capture
        )
        params, losses = copy.deepcopy(case.params), []
        state = adamw.init(params)
        for _ in range(5):
            params, state, *loss = step(params, state, case.batch, case.target)
            losses.append(loss)
        trained.append((params, state, losses))
    assert differences(*trained) == []


class Effects(Observer):
    def __init__(self):
        self.seen = []

    def begin(self, rank, effect):
        self.seen.append(effect)


def test_an_observer_sees_the_effects():
    case = cases.built("linear", 2, 8)
    plan, effects = case.pipeline.plan(Placement.loop(2), 4), Effects()
    _, captured = pair(case, schedules.one_f_one_b, plan, observe=effects)
    for _ in range(3):
        effects.seen.clear()
        captured(case.params, case.batch, case.target)
    assert sum(isinstance(effect, fx.Forward) for effect in effects.seen) == 8


# What can't be captured


def branches_and_draws(p, x):
    return F.dropout(x * p, 0.5) if x.sum() > 0 else F.dropout(x, 0.2)


def test_a_stage_that_cannot_be_captured_runs_as_it_is_and_says_so_once():
    pipeline = Pipeline([lambda p, x: torch.tanh(x * p), branches_and_draws], loss=cases.mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    options = {"handler": handlers.Local(), "autodiff": "eager"}
    plain = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, **options)
    captured = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, capture="pieces", **options)
    params = {0: torch.tensor(2.0), 1: torch.tensor(1.0)}

    def same(i):
        arguments = params, torch.arange(8.0) - i, torch.zeros(8)
        return differences(captured(*arguments, rng=(0, i)), plain(*arguments, rng=(0, i))) == []

    with pytest.warns(UserWarning, match="stage 1 runs without graphs: it reads a tensor on the host") as told:
        assert same(0)
    assert len(told) == 1
    assert "test_captured_pieces.py" in str(told[0].message)
    assert "return F.dropout(x * p, 0.5) if x.sum() > 0" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(same, range(1, 6)))
    assert captured.pieces.graphs == 2 * 2  # of stage 0, two microbatches


def test_a_stage_whose_capture_fails_runs_as_it_is():
    """CUDA forbids more in a capture than shows before."""
    fails = [False] * 4 + [True] + [False] * 20

    def layer(p, x):
        if fails and fails.pop(0):
            raise RuntimeError("operation not permitted when stream is capturing")
        return x @ p["w"] + p["b"]

    case = cases.built("linear", 2, 8)
    case = dataclasses.replace(case, pipeline=Pipeline([layer] * 2, cases.mse))
    plain, captured = pair(case, schedules.gpipe, case.pipeline.plan(Placement.loop(2), 2), "eager")
    arguments = case.params, case.batch, case.target
    fails[:0] = [False] * 4
    expected = plain(*arguments)
    assert differences(captured(*arguments), expected) == []
    with pytest.warns(UserWarning, match="stage 0 runs without graphs: operation not permitted when stream is captur"):
        assert differences(captured(*arguments), expected) == []
    assert [differences(captured(*arguments), expected) for _ in range(2)] == [[]] * 2
    assert captured.pieces.graphs == 2 * 2  # of stage 1


class ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g if g.sum() > 0 else g * 2


def test_a_backward_that_cannot_be_captured_is_an_error():
    pipeline = Pipeline([lambda p, x: ReadsBackward.apply(x * p), lambda p, x: x + p], loss=cases.mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(
        pipeline, schedules.gpipe, plan, handler=handlers.Local(), capture="pieces", autodiff="eager"
    )
    says = r"rank 0, stage 0, microbatch \d: it can't be captured: it reads a tensor on the host.*or leave capture"
    with pytest.raises(StageError, match=says):
        step({0: torch.tensor(2.0), 1: torch.tensor(1.0)}, torch.arange(4.0), torch.zeros(4))


def test_a_step_that_failed_leaves_its_slots_free():
    def layer(p, x):
        if len(x) == 3:
            raise ValueError("no")
        return x @ p["w"] + p["b"]

    case = cases.built("linear", 2, 8)
    case = dataclasses.replace(case, pipeline=Pipeline([layer] * 2, cases.mse))
    plain, captured = pair(case, schedules.gpipe, case.pipeline.plan(Placement.loop(2), 2), "eager")
    counts = []
    for rows in (8, 8, 7, 7, 8, 8):
        part = case.params, case.batch[:rows], case.target[:rows]
        if rows == 7:  # the first microbatch is replayed
            with pytest.raises(StageError, match="stage 0, microbatch 1: Forward raised ValueError: no"):
                captured(*part)
        else:
            assert differences(captured(*part), plain(*part)) == []
        counts.append(captured.pieces.graphs)
    assert counts == [0, 8, 8, 8, 8, 8]


def test_options():
    case = cases.built("linear", 2)
    plan = case.pipeline.plan(Placement.loop(2), 2)
    for options, says in (
        ({"capture": "steps"}, "capture must be False, True or 'pieces', not 'steps'"),
        ({"capture": "pieces", "compile": True}, "capture='pieces' with compile=True"),
    ):
        with pytest.raises(ValueError, match=says):
            fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, handler=handlers.Local(), **options)


@pytest.mark.parametrize("waits", [True, False])
def test_steps_on_other_streams_wait_for_each_other(monkeypatch, waits):
    checker = Checker()
    device = RecordedDevice(checker)
    monkeypatch.setattr("fpipe.handlers.captured.device_of", lambda _: device)
    if not waits:
        monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
    case, plain, captured = linear()
    arguments = case.params, case.batch, case.target
    expected, results = plain(*arguments), [captured(*arguments) for _ in range(2)]
    second = Stream("second")
    for stream in (checker.compute, second, second):
        checker.compute = stream
        with checker:
            results.append(captured(*arguments))
        checker.sweep()  # temporary memory goes back to this stream
    assert [differences(result, expected) for result in results] == [[]] * 5
    assert (checker.faults == []) is waits
