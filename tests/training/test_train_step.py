"""`train_step` is value_and_grad, clip_by_global_norm and an optimizer's update as one function."""

import copy
from dataclasses import replace

import pytest
import torch

import fpipe
from fpipe import Pipeline, Placement, StageError, handlers, interop, schedules
from fpipe.effects import Backward, Update
from tests.support import cases, train_jobs
from tests.support.combinations import combined, few, one_in, sample
from tests.support.jobs import differences
from tests.support.sharing import sharing


def possible(name, schedule, m, handler, max_norm, early, **_):
    """As for gradients: an even number of microbatches where a model runs both ways, and no copies of a state.

    Updates come before a norm only where there is one.
    """
    if early and max_norm is None:
        return False
    fits = schedule not in cases.COPIED or (m % 2 == 0 and name not in ("modules", "recurrent"))
    fits = fits and (name not in cases.SLICED or schedule in cases.TAKE_SLICES)
    return fits and (handler != "reference" or schedule == "gpipe")


@one_in(4)
@combined(
    name=sample([*cases.CASES], ["tied", "dropout", "modules", "weighted", "recurrent"]),
    schedule=sample([*cases.SCHEDULES], ["gpipe", "zb_v", "dualpipe"]),
    m=(2, 3),
    handler=("reference", "local", "gloo"),
    optimizer=train_jobs.OPTIMIZERS,
    donate=(False, True),
    max_norm=(None, 0.1, 1e9),
    early=(False, True),
    where=possible,
)
def test_bits_of_the_parts(pools, name, schedule, m, handler, optimizer, donate, max_norm, early):
    if handler == "gloo":
        job = train_jobs.train_early if early else train_jobs.train
        found = pools(2).run(job, name, schedule, m, 2, optimizer, donate, max_norm)
        assert found == [[], []]
        return
    case, generator, plan = cases.make(name, schedule, 2, m, cases.rows(m))
    own = handlers.Reference() if handler == "reference" else sharing(handlers.Local(), name)
    options = {"post_validate": True} if early else {}
    assert train_jobs.compare(own, case, generator, plan, None, optimizer, donate, max_norm, **options) == []


@pytest.mark.parametrize("donate", few([False, True], [True]))
def test_bits_with_replicas_in_one_process(donate):
    case, generator, plan = cases.make("tied", "zb_v", 2, 2, cases.rows(4))
    plan = replace(plan, replicas=2)
    own = sharing(handlers.Local(), "replicas", "tied")
    assert train_jobs.compare(own, case, generator, plan, None, "adamw", donate, None) == []


class Effects(handlers.Observer):
    """The effects of the ranks, in the order of their beginnings."""

    def __init__(self):
        self.seen = []

    def begin(self, rank, effect):
        self.seen.append(effect)


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        ({}, [Update(1), Update(0)]),
        ({"max_norm": 1.0}, []),
        ({"check_finite": "skip"}, []),
        ({"donate": True}, []),  # in one process, where a step that fails leaves params as they were
        ({"pair": True}, []),  # which may be one function of all stages
    ],
)
def test_stages_are_updated_while_a_step_runs(changes, updates):
    case, plan = linear()
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1, donate=changes.get("donate", False))
    if changes.pop("pair", False):
        update = sgd.update
        sgd = (sgd.init, lambda *trees, **options: update(*trees, **options))
    changes.pop("donate", None)
    effects = Effects()
    options = {"handler": handlers.Local(), "observe": effects, **changes}
    step = fpipe.train_step(case.pipeline, schedules.one_f_one_b, plan, sgd, **options)
    step(case.params, sgd[0](case.params), case.batch, case.target)
    assert [e for e in effects.seen if isinstance(e, Update)] == updates
    if updates:
        assert effects.seen.index(Update(1)) < effects.seen.index(Backward(0, 1))


def test_an_update_that_fails_names_its_stage():
    case, plan = linear()
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    step = fpipe.train_step(case.pipeline, schedules.one_f_one_b, plan, sgd, handler=handlers.Local())
    with pytest.raises(StageError, match="rank 1, stage 1: Update raised TypeError: SGD has no option rate"):
        step(case.params, sgd.init(case.params), case.batch, case.target, rate=torch.tensor(1.0))


def linear(rows=8):
    case = cases.built("linear", 2, rows)
    return case, case.pipeline.plan(Placement.loop(2), 2)


def test_nothing_is_changed_unless_it_is_donated():
    case, plan = linear()
    adam = interop.optimizer(torch.optim.Adam, lr=0.1)
    step = fpipe.train_step(case.pipeline, schedules.gpipe, plan, adam, handler=handlers.Local())
    params, opt_state, _ = step(case.params, adam.init(case.params), case.batch, case.target)
    before = copy.deepcopy((params, opt_state, case.batch, case.target))
    later, _, _ = step(params, opt_state, case.batch, case.target)
    assert differences((params, opt_state, case.batch, case.target), before) == []
    assert not torch.equal(later[0]["w"], params[0]["w"])


def test_donated_memory_is_that_of_the_results():
    case, plan = linear()
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1, donate=True)
    step = fpipe.train_step(case.pipeline, schedules.gpipe, plan, sgd, handler=handlers.Local())
    params, _, _ = step(case.params, sgd.init(case.params), case.batch, case.target)
    assert params[1]["w"].data_ptr() == case.params[1]["w"].data_ptr()


def test_any_pair_of_pure_functions_is_an_optimizer():
    case, plan = linear()

    def update(grads, state, params, scale=0.5):
        return {s: {k: p - scale * grads[s][k] for k, p in tree.items()} for s, tree in params.items()}, state + 1

    pair = (lambda params: 0, update)
    step = fpipe.train_step(case.pipeline, schedules.gpipe, plan, pair, handler=handlers.Local())
    gradients = fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, handler=handlers.Local())
    loss, grads = gradients(case.params, case.batch, case.target)
    params, count, found = step(case.params, 0, case.batch, case.target, scale=0.25)
    assert (count, found) == (1, loss)
    assert torch.equal(params[0]["b"], case.params[0]["b"] - 0.25 * grads[0]["b"])


def test_a_step_that_fails_updates_nothing():
    def fails(p, x):
        if x.sum() > 0:
            raise ValueError("no")
        return x * p

    pipeline = Pipeline([lambda p, x: x * p, fails], lambda y, t: (y - t).square().mean())
    plan = pipeline.plan(Placement.loop(2), 2)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1, donate=True)
    options = {"handler": handlers.Local(), "autodiff": "eager"}
    step = fpipe.train_step(pipeline, schedules.one_f_one_b, plan, sgd, **options)
    params = {0: torch.tensor(2.0), 1: torch.tensor(1.0)}
    with pytest.raises(StageError, match="stage 1, microbatch 1: Forward raised ValueError: no"):
        step(params, sgd.init(params), torch.tensor([-1.0, 1.0]), torch.zeros(2))
    assert params == {0: 2.0, 1: 1.0}


def test_wrong_options_are_named_at_once():
    case, plan = linear()
    pair = interop.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="learning_rate"):
        fpipe.train_step(case.pipeline, schedules.gpipe, plan, pair, handler=handlers.Local(), learning_rate=1)
    other = cases.built("tied", 2).pipeline.plan(Placement.loop(2), 2)
    with pytest.raises(fpipe.ScheduleError, match="the plan's edges, ties or cotangents"):
        fpipe.train_step(case.pipeline, schedules.gpipe, other, pair, handler=handlers.Local())
