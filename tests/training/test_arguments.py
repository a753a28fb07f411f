"""Slips in the arguments of public functions: one error that names the slip, and the way out."""

import pytest
import torch

import fpipe
from fpipe import Output, Pipeline, Placement, Plan, ScheduleError, Stage, StageError, handlers, interop, schedules

PIPELINE = Pipeline([lambda p, x: x * p, lambda p, x: x * p], loss=lambda y, t: (y - t).sum())
PLAN = PIPELINE.plan(Placement.loop(2), 2)
PARAMS = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
X = torch.ones(4)
LOCAL = handlers.Local()


class Rows:
    def __call__(self, rank, plan):
        yield


WRONG_SCHEDULES = {
    "a called one": (schedules.gpipe(0, PLAN), "which gpipe.* returned: pass the schedule itself, gpipe"),
    "a class": (Rows, "Rows is a class: pass a function"),
    "None": (None, "a schedule is a function .* or the name of one, such as '1f1b', not None"),
    "an entry": (schedules.CATALOGUE["gpipe"], r"not CATALOGUE\['gpipe'\]"),
    "a factory": (schedules.zb_auto, r"zb_auto makes a schedule of a plan: pass its result, zb_auto\(plan, ...\)"),
    "an unknown name": ("zbv", "no schedule is called 'zbv': did you mean .*zb-v"),
    "no name": ("?", "no schedule is called '[?]': there are gpipe, 1f1b"),
    "a name of a factory": ("zb-auto", r"ordered for a plan and its costs: take schedules.zb_auto\(plan, costs\)"),
    "a V by costs": ("v_auto", r"take schedules.v_auto\(plan, costs\)"),
}


@pytest.mark.parametrize("slip", WRONG_SCHEDULES)
def test_what_is_no_schedule_is_refused_everywhere(slip):
    schedule, message = WRONG_SCHEDULES[slip]
    for take in (fpipe.lower, fpipe.verify, fpipe.simulate, fpipe.draw, interop.to_csv):
        with pytest.raises(ScheduleError, match=message):
            take(schedule, PLAN)
    with pytest.raises(ScheduleError, match=message):
        fpipe.value_and_grad(PIPELINE, schedule, PLAN, handler=LOCAL)
    if schedule is not None:  # evaluate's default
        with pytest.raises(ScheduleError, match=message):
            fpipe.evaluate(PIPELINE, PLAN, handler=LOCAL, schedule=schedule)


@pytest.mark.parametrize("name", ["1f1b", "one_f_one_b", "One-F-One-B"])
def test_a_name_is_taken_for_its_schedule(name):
    schedule = schedules.one_f_one_b
    assert schedules.get(name) is schedule
    assert fpipe.lower(name, PLAN) == fpipe.lower(schedule, PLAN)
    assert fpipe.verify(name, PLAN) == fpipe.verify(schedule, PLAN)
    assert fpipe.draw(name, PLAN) == fpipe.draw(schedule, PLAN)
    assert fpipe.simulate(name, PLAN).makespan == fpipe.simulate(schedule, PLAN).makespan
    assert interop.to_csv(name, PLAN) == interop.to_csv(schedule, PLAN)


def test_steps_take_names():
    loss, _ = fpipe.value_and_grad(PIPELINE, "1f1b", PLAN, handler=LOCAL)(PARAMS, X, X)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    step = fpipe.train_step(PIPELINE, "gpipe", PLAN, sgd, handler=LOCAL)
    assert step(PARAMS, sgd.init(PARAMS), X, X)[2] == loss == 10
    run = fpipe.evaluate(PIPELINE, PLAN, handler=LOCAL, schedule="gpipe", loss=True)
    assert run(PARAMS, X, X) == loss


@pytest.mark.parametrize("name", schedules.CATALOGUE)
def test_every_name_is_a_schedule_or_has_a_factory(name):
    entry = schedules.CATALOGUE[name]
    if entry.limited:
        with pytest.raises(ScheduleError, match=rf"schedules.{entry.function.__name__}\(plan, costs\)"):
            schedules.get(name)
    else:
        assert schedules.get(name) is getattr(schedules, entry.function.__name__)


@pytest.mark.parametrize(
    ("arguments", "handler", "message"),
    [
        ((PIPELINE, "1f1b", PLAN), handlers.Local, r"the handler is the class Local: pass an instance, Local\(\)"),
        ((PIPELINE, "1f1b", PLAN), "local", r"handler must be .*handlers.Local\(\).* not 'local'"),
        ((PIPELINE, "1f1b", PLAN), None, "handler must be .* not None"),
        ((lambda p, x: x, "1f1b", PLAN), LOCAL, r"the first argument is a Pipeline, as Pipeline\(\[stage, ...\]"),
        ((PIPELINE, "1f1b", Placement.loop(2)), LOCAL, r"pipeline.plan\(placement, microbatches\).* not Placement\("),
    ],
)
def test_what_a_step_can_not_be_made_of_is_refused(arguments, handler, message):
    pipeline, schedule, plan = arguments
    with pytest.raises(TypeError, match=message):
        fpipe.value_and_grad(pipeline, schedule, plan, handler=handler)
    with pytest.raises(TypeError, match=message):
        fpipe.evaluate(pipeline, plan, handler=handler)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: fpipe.simulate(PLAN, "gpipe"), ScheduleError, r"not Plan\("),
        (lambda: fpipe.simulate("gpipe", Placement.loop(2)), ScheduleError, "plan must be a Plan"),
        (lambda: PIPELINE.plan(2, 4), ScheduleError, "placement must be a Placement"),
        (
            lambda: Pipeline([Stage(lambda p, x: x, reads=[Output(5)]), lambda p, x: x]),
            ScheduleError,
            "stage 0 reads stage 5: .* there are stages 0 to 1",
        ),
        (lambda: Pipeline([Stage(lambda p, x: x, reads=0)] * 2), TypeError, r"give a list of its inputs, reads=\[0\]"),
        (lambda: PIPELINE.params_on(PARAMS, PLAN, -1), ScheduleError, "there is no rank -1: the plan has ranks 0 to 1"),
        (lambda: PIPELINE.state_on({}, PLAN, 2), ScheduleError, "there is no rank 2"),
        (lambda: interop.buffers(PIPELINE, []), TypeError, "module is a list: call buffers"),
        (
            lambda: fpipe.evaluate(PIPELINE, PLAN, handler=handlers.Local(), precision=torch.bfloat16),
            TypeError,
            "precision must be a fpipe.Precision, such as",
        ),
        (lambda: fpipe.profile(PIPELINE, PARAMS, X, X, microbatches=0), ValueError, "microbatches must be .* not 0"),
        (lambda: fpipe.profile(PIPELINE, PARAMS, X, X, rng=5), ValueError, r"rng must be \(seed, step\).* not 5"),
        (
            lambda: fpipe.profile(PIPELINE, PARAMS, X, X, handler=handlers.Local(["cpu", "meta"])),
            ValueError,
            "the handler has meta too: leave handler out",
        ),
    ],
)
def test_a_slip_has_one_clear_error(ask, error, message):
    with pytest.raises(error, match=message):
        ask()


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("rng", [5, (1,), ("a", 0)])
def test_a_seed_that_is_no_pair_is_refused(rng, capture):
    step = fpipe.value_and_grad(PIPELINE, "1f1b", PLAN, handler=LOCAL, capture=capture)
    with pytest.raises(StageError, match=r"^rng must be \(seed, step\), as in rng=\(0, step\), not "):
        step(PARAMS, X, X, rng=rng)


def test_a_name_needs_no_plan_of_its_own():
    """The placement is the caller's: a name stands for the function alone."""
    with pytest.raises(ScheduleError, match="one stage"):
        fpipe.draw("1f1b", Plan(Placement.v(2), 2))
