"""Bad input: one clear error on the rank at fault, the reason on the others, and nothing hangs."""

import re
import signal
import traceback

import pytest
import torch

import fpipe
from fpipe import Pipeline, Placement, Stage, StageError, handlers, schedules
from fpipe.flight.explanation import explain
from fpipe.flight.format import folder_of_flights
from fpipe.flight.reading import read
from fpipe.programs.lowering import wavefront
from tests.support import faults
from tests.support.cases import mse
from tests.support.combinations import one_in

LIMIT = 20.0  # seconds in which every rank must have ended, on a busy machine
ALONE = ("killed", "world size")  # faults with a test of their own
both = pytest.mark.parametrize("autodiff", ["graph", "eager"])


LOCAL = ("wrong tree", "missing stage", "short batch", "raises", "raises at once", "misfit", "unregistered")


@pytest.mark.parametrize(("fault", "autodiff"), faults.ways(*LOCAL))
def test_local(fault, autodiff):
    text = faults.FAULTS[fault]
    if fault == "missing stage":  # this process holds every rank's params
        text = text.removeprefix("rank 1, ")
    with pytest.raises(StageError, match=text):
        faults.step(fault, 3, handlers.Local(), autodiff=autodiff)()


@pytest.mark.parametrize("fault", ["wrong tree", "missing stage", "short batch", "raises", "raises at once"])
def test_reference(fault):
    with pytest.raises(StageError, match=re.sub(r"^rank \d, ", "", faults.FAULTS[fault])):
        faults.step(fault, 3, handlers.Reference())()


@one_in(4)
@pytest.mark.parametrize(("fault", "autodiff"), faults.ways(*[f for f in faults.FAULTS if f not in ALONE]))
def test_over_gloo(pools, fault, autodiff):
    outcomes = pools(3).outcomes(faults.run, 3, fault, autodiff, limit=30)
    guilty = faults.GUILTY.get(fault, 1)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == ("StageError" if rank == guilty else "TransportError"), outcome.text
        assert re.search(faults.FAULTS[fault], outcome.text), outcome.text
        assert outcome.seconds < LIMIT


@pytest.mark.parametrize(("fault", "autodiff"), faults.ways("missing stage", "short batch"))
def test_a_step_refused_is_no_end(pools, fault, autodiff):
    """What a rank was given wrongly can be given rightly in the next step."""
    found = pools(3).run(faults.recover, 3, fault, autodiff)
    assert len({loss for loss, *_ in found}) == 1
    assert [again for _, again in found] == [
        "StageError" if r == faults.GUILTY.get(fault, 1) else "TransportError" for r in range(3)
    ]


def test_each_refusal_has_its_own_reason(pools):
    for told in pools(2).run(faults.refused_twice):
        assert [re.search(r"has (\d) rows", text).group(1) for text in told] == ["3", "2"]


def test_a_script_that_ends_early(fresh_pool):
    outcomes = fresh_pool(2).outcomes(faults.ends_early, limit=30)
    assert outcomes[1].exitcode == 0
    assert outcomes[0].error == "TransportError"
    assert "did not give a reason: did its script end" in outcomes[0].text
    assert outcomes[0].seconds < LIMIT


def test_batches_of_different_sizes_are_refused(pools):
    found = pools(3).run(faults.different_batches)
    assert all("batches of different sizes" in text for text in found)


def test_a_rank_that_missed_a_handler_can_make_the_next(pools):
    assert pools(2).run(faults.missed_handler) == ["TransportError then a loss", "nothing then a loss"]


def test_the_world_is_not_the_plans(pools):
    for outcome in pools(2).outcomes(faults.run, 3, "world size"):
        assert outcome.error == "ScheduleError"
        assert (
            "the plan has 3 ranks, the group 2 processes: start with torchrun --standalone --nproc-per-node 3"
            in outcome.text
        )


def test_ranks_with_different_programs(pools):
    for rank, outcome in enumerate(pools(2).outcomes(faults.different_programs)):
        assert outcome.error == "ScheduleError"
        assert f"rank {rank}: the ranks were given different schedules" in outcome.text


def test_a_handler_that_lost_a_rank_says_so_again(fresh_pool):
    outcomes = fresh_pool(3).outcomes(faults.twice, 3, limit=30)
    for rank in (0, 2):
        assert "this handler ended with an earlier failure: " in outcomes[rank].value
        assert "rank 1 did not give a reason: did its script end" in outcomes[rank].value


@one_in(2)
@both
def test_a_killed_rank(fresh_pool, autodiff):
    before = {*folder_of_flights().iterdir()}
    outcomes = fresh_pool(3).outcomes(faults.run, 3, "killed", autodiff, limit=30)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error == "TransportError"
        assert re.search(faults.FAULTS["killed"], outcomes[rank].text), outcomes[rank].text
        assert outcomes[rank].seconds < LIMIT
    (flight,) = {*folder_of_flights().iterdir()} - before
    explanation = explain(read(flight))
    assert (explanation.kind, explanation.ranks) == ("gone", [1])
    assert "Its last record is Forward(stage=1, microbatch=3), of step " in explanation.text
    assert explanation.chains[2] == [2, 1]
    assert f"fpipe explain {flight} says what each rank did last" in outcomes[0].text


@pytest.mark.parametrize(
    ("fault", "autodiff", "where", "frames"),
    [(*way, (1, 3), ["guilty"]) for way in faults.ways("raises")]
    + [(*way, (0, 0), ["first"]) for way in faults.ways("raises at once")]
    + [(*way, (2, 0), ["layer"]) for way in faults.ways("misfit")],
)
def test_a_traceback_begins_in_the_users_code(monkeypatch, fault, autodiff, where, frames):
    step = faults.step(fault, 3, handlers.Local(), autodiff=autodiff)
    with pytest.raises(StageError) as caught:
        step()
    assert (caught.value.stage, caught.value.microbatch) == where
    assert names_of(caught.value.__cause__) == frames
    assert names_of(caught.value)[1:] == ["run"]  # of the caller, after this function
    assert re.fullmatch(r"\d+ frames of fpipe and torch are folded; FPIPE_TRACEBACK=full .*", *caught.value.__notes__)
    monkeypatch.setenv("FPIPE_TRACEBACK", "full")
    with pytest.raises(StageError) as caught:
        step()
    *own, last = names_of(caught.value.__cause__)
    assert own
    assert [last] == frames
    assert not hasattr(caught.value, "__notes__")


def names_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("backward")


def failing_backward(p, x):
    return Backward.apply(x @ p["w"])


def failing_loss(output, target):
    return torch.nn.functional.mse_loss(output, target[:, :1, None].expand(2, 3, 5))


def failing_weight(target):
    return target.nothing


@pytest.mark.parametrize(
    ("stage", "loss", "options", "frames"),
    [
        (failing_backward, mse, {"autodiff": "eager"}, ["backward"]),
        (failing_backward, mse, {"autodiff": "graph"}, ["backward"]),
        (faults.layer, failing_loss, {}, ["failing_loss", "broadcast_tensors"]),  # torch's own innermost frame stays
        (faults.layer, mse, {"weight": failing_weight}, ["failing_weight"]),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_whatever_of_the_users_fails_comes_first(stage, loss, options, frames):
    pipeline = Pipeline([stage], loss)
    plan = pipeline.plan(Placement.loop(1), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), **options)
    with pytest.raises(StageError) as caught:
        step({0: {"w": torch.eye(4)}}, torch.ones(4, 4), torch.ones(4, 4))
    assert names_of(caught.value.__cause__) == frames
    assert len(names_of(caught.value)) == 1


def test_a_schedule_that_fails_comes_first():
    def schedule(rank, plan):
        yield fpipe.effects.Forward(0, 0)
        raise ZeroDivisionError("schedule")

    with pytest.raises(ZeroDivisionError) as caught:
        fpipe.verify(schedule, fpipe.Plan(Placement.loop(1), 1))
    assert names_of(caught.value)[1:] == ["schedule"]


def test_a_module_of_torchs_that_fails_shows_one_line_of_torch():
    pipeline, params = fpipe.interop.from_modules([torch.nn.Linear(3, 4)], loss=mse)
    step = fpipe.value_and_grad(pipeline, "gpipe", pipeline.plan(Placement.loop(1), 1), handler=handlers.Local())
    with pytest.raises(StageError) as caught:
        step(params, torch.ones(2, 4), torch.ones(2, 4))
    assert names_of(caught.value.__cause__) == ["forward"]


def test_a_wrong_argument_keeps_its_frames():
    with pytest.raises(StageError, match="rng must be") as caught:
        faults.plain_step()(rng=3)
    assert len(names_of(caught.value)) > 3


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, t: y, r"without dimensions, not torch.float32\[2, 4\]"),
        (lambda y, t: (mse(y, t), 1), "not tuple; has_aux=True takes"),
        (lambda y, t: 1.0, "not float"),
    ],
)
@both
def test_a_loss_of_the_wrong_kind(loss, message, autodiff):
    pipeline = Pipeline([lambda p, x: x], loss)
    plan = pipeline.plan(Placement.loop(1), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    with pytest.raises(StageError, match=message):
        step({0: ()}, torch.ones(4, 4), torch.ones(4, 4))


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ({(0, "w"): (1, "w")}, "must lead from a stage to a lower one"),
        ({(2, "w"): (1, "w"), (1, "w"): (0, "w")}, "ends at an entry that is tied itself"),
    ],
)
def test_ties_that_make_no_sense(ties, message):
    with pytest.raises(ValueError, match=message):
        Pipeline([lambda p, x: x] * 3, ties=ties)


def test_a_tied_entry_that_is_missing():
    pipeline = Pipeline([lambda p, x: x] * 2, mse, ties={(1, "head"): (0, "wte")})
    with pytest.raises(
        StageError, match=r"stage 1: it shares \['head'\] with stage 0, and params\[0\]\['wte'\] is missing"
    ):
        pipeline({0: {}, 1: {}}, torch.ones(2), torch.ones(2))


def test_a_tied_entry_given_twice():
    pipeline = Pipeline([lambda p, x: x] * 2, mse, ties={(1, "head"): (0, "wte")})
    with pytest.raises(StageError, match=r"stage 1: its \['head'\] is tied .* leave it out of params\[1\]"):
        pipeline({0: {"wte": torch.ones(1)}, 1: {"head": torch.ones(1)}}, torch.ones(2), torch.ones(2))


@pytest.mark.parametrize(
    ("stages", "message"),
    [([], "at least one stage"), ([Stage(lambda p, x: x, reads=("x",))], "stage 0 reads 'x': name an Output")],
)
def test_pipelines_that_make_no_sense(stages, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Pipeline(stages)


@both
def test_params_that_hide_tensors(autodiff):
    pipeline = Pipeline([lambda p, x: x * p.w], lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(1), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    with pytest.raises(StageError, match=r"rank 0, stage 0: .*the tree is a Odd: only tensors"):
        step({0: faults.Odd()}, torch.ones(2))


@both
def test_a_value_that_hides_tensors_is_refused_on_one_rank_too(autodiff):
    pipeline = Pipeline([lambda p, x: faults.Odd(), lambda p, x: torch.ones(())])
    plan = pipeline.plan(Placement((0, 0)), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    with pytest.raises(StageError, match="which can't go from stage to stage"):
        step({0: (), 1: ()}, torch.ones(2))


@both
def test_a_batch_that_was_not_passed(autodiff):
    pipeline = Pipeline([lambda p, x: x * p], lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(1), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    with pytest.raises(StageError, match="it reads the batch, which is None on this rank"):
        step({0: torch.ones(1)}, None)


@both
def test_an_input_changed_in_place(autodiff):
    pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x.relu_()], lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(2), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    with pytest.raises(StageError, match=r"microbatch 0: it writes in place to an input, .*: pass inplace=False"):
        step({0: torch.ones(1), 1: ()}, torch.ones(2))


@pytest.mark.parametrize(("rng", "message"), [(3, r"not 3$"), ((1, 2, 3), r"not \(1, 2, 3\)$")])
def test_an_rng_that_is_no_pair(rng, message):
    with pytest.raises(StageError, match=rf"rng must be \(seed, step\), as in rng=\(0, step\), {message}"):
        faults.plain_step()(rng=rng)


def test_a_state_that_no_stage_has():
    with pytest.raises(StageError, match="state has an entry for stage 0, which is not a stateful stage"):
        faults.plain_step()(state={0: {}})


def test_a_schedule_that_runs_nothing_backward():
    pipeline = Pipeline([lambda p, x: x], mse)
    with pytest.raises(fpipe.ScheduleError, match="use evaluate"):
        fpipe.value_and_grad(pipeline, wavefront, pipeline.plan(Placement.loop(1), 1), handler=handlers.Local())


@both
def test_a_read_of_nothing(autodiff):
    pipeline = Pipeline([lambda p, x: {"h": x}, Stage(lambda p, x: x, reads=(fpipe.Output(0, "g"),))])
    plan = pipeline.plan(Placement.loop(2), 1)
    run = fpipe.evaluate(pipeline, plan, handler=handlers.Local(), autodiff=autodiff)
    with pytest.raises(
        StageError, match=r"rank 1, stage 1, microbatch 0: .* the output of stage 0 has nothing at \['g'\]"
    ):
        run({0: (), 1: ()}, torch.ones(2))


def test_the_number_of_local_devices():
    pipeline = Pipeline([lambda p, x: x] * 2)
    with pytest.raises(ValueError, match="3 devices for 2 ranks"):
        fpipe.evaluate(pipeline, pipeline.plan(Placement.loop(2), 1), handler=handlers.Local(["cpu"] * 3))
