"""Pipelines with frozen stages: the reference's bits, by programs without the halves that nothing needs."""

from dataclasses import replace

import optree
import pytest
import torch
from torch import nn

import fpipe
from fpipe import Pipeline, Placement, Stage, StageError, handlers, interop
from fpipe.effects import Backward, BackwardInput, BackwardWeight
from fpipe.programs.lowering import lower
from tests.support import cases, jobs
from tests.support.combinations import combined, one_in
from tests.support.sharing import sharing

TRAINED = {
    "last": lambda stages: {stages - 1},
    "first": lambda stages: {0},
    "second": lambda stages: {1},
    "ends": lambda stages: {0, stages - 1},
    "all": lambda stages: set(range(stages)),
    "none": lambda stages: set(),
}
SCHEDULES = ["one_f_one_b", "zb_h1", "zb_auto", "zb_v", "interleaved_zb", "dualpipe", "overlap", "looped_bfs"]


def frozen(name, schedule, trained, ranks=2, m=4):
    """(case with its stages frozen, schedule, plan)."""
    case, generator, plan = cases.make(name, schedule, ranks, m, cases.rows(m))
    chosen = TRAINED[trained](plan.stages)
    pipeline = case.pipeline.freeze(case.params, lambda path, x: path[0] not in chosen)
    pipeline = pipeline.unfreeze(case.params, lambda path, x: path[0] in chosen)
    plan = pipeline.plan(plan.placement, m, trained=None if trained != "all" else range(plan.stages))
    return replace(case, pipeline=pipeline), generator, plan


def differing(handler, name, schedule, trained, rank=None, **options):
    """Where two steps differ from the reference's."""
    case, generator, plan = frozen(name, schedule, trained)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, **options, **case.options)
    reference = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Reference(), **case.options)
    expected = reference(case.params, case.batch, case.target, state=case.state, rng=case.rng)
    params, batch, target, state = case.params, case.batch, case.target, case.state
    if rank is not None:
        params, batch, target, state = cases.own(case, plan, rank)
        expected = jobs.expected_on(expected, params, plan, rank, state is not None)
    found = []
    for _ in range(3 if "capture" in options else 2):
        found += jobs.differences(step(params, batch, target, state=state, rng=case.rng), expected)
    return found


def fits(name, schedule, trained, way, handler):
    alone = (schedule == "dualpipe" and name == "modules") or (handler == "gloo" and way == "captured")
    nothing = trained == "none" or (name == "twice" and trained in ("second", "last"))  # their params are the first's
    return not (alone or nothing)


WAYS = {
    "graph": {},
    "eager": {"autodiff": "eager"},
    "captured": {"capture": True},
    "pieces": {"capture": "pieces"},
}


@one_in(4)
@pytest.mark.filterwarnings("ignore:stage .* runs without graphs")
@combined(
    name=["linear", "skip", "tied", "twice", "dropout", "modules", "weighted"],
    schedule=SCHEDULES,
    trained=TRAINED,
    way=WAYS,
    handler=["local", "gloo"],
    where=fits,
    singly=True,
)
def test_training(pools, name, schedule, trained, way, handler):
    if handler == "gloo":
        options = {} if way == "pieces" else WAYS[way]
        assert pools(2).run(over_gloo_with, options, name, schedule, trained) == [[], []]
    else:
        local = handlers.Local() if way in ("captured", "pieces") else sharing(handlers.Local(), name, trained)
        assert differing(local, name, schedule, trained, **WAYS[way]) == []


def over_gloo_with(rank, options, *args):
    return differing(jobs.handler(), *args, rank=rank, **options)


@one_in(3)
@combined(name=["linear", "skip", "tied"], trained=[trained for trained in TRAINED if trained != "none"])
def test_the_gradients_are_those_of_the_plain_function(name, trained):
    """Within rounding; a param that is not trained gets None."""
    case, generator, plan = frozen(name, "zb_v", trained)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=sharing(handlers.Local(), name, trained))
    double = optree.tree_map(
        lambda x: x.double() if x.is_floating_point() else x, (case.params, case.batch, case.target)
    )
    loss, grads = step(*double)
    expected, whole = torch.func.grad_and_value(case.pipeline)(*double)
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-12)
    chosen = TRAINED[trained](plan.stages)
    for stage, tree in expected.items():
        gradients = optree.tree_leaves(grads[stage], none_is_leaf=True)
        for gradient, plain in zip(gradients, optree.tree_leaves(tree), strict=True):
            assert (gradient is None) == (stage not in chosen)
            if stage in chosen:
                torch.testing.assert_close(gradient, plain, rtol=1e-10, atol=1e-12)


def test_a_profile_has_no_costs_of_halves_that_do_not_exist():
    case, _, _ = frozen("linear", "one_f_one_b", "second", ranks=4)
    for autodiff in ("graph", "eager"):
        costs = fpipe.profile(case.pipeline, case.params, case.batch, case.target, repeats=1, autodiff=autodiff)
        assert [x > 0 for x in costs.backward_weight] == [False, True, False, False]
        assert [x > 0 for x in costs.backward_input] == [False, False, True, True]
        assert costs.backward == tuple(map(sum, zip(costs.backward_input, costs.backward_weight, strict=True)))
        assert [x > 0 for x in costs.residuals] == [False, True, True, True]
        assert costs.deferred == (0, 0, 0, 0)


def affine(p, x):
    return x * p["w"] + p["b"]


def affine_pipeline(stages=3, **options):
    params = {s: {"w": torch.randn(4), "b": torch.randn(4)} for s in range(stages)}
    return Pipeline([affine] * stages, cases.mse, **options), params


def test_freeze_and_unfreeze_by_name_and_predicate():
    pipeline, params = affine_pipeline()
    assert pipeline.trained is None
    assert pipeline.freeze(params, "w").trained is None
    half = pipeline.freeze(params, lambda path, x: path == (1, "w"))
    assert [stage.frozen for stage in half.stages] == [(), (("w",),), ()]
    lower_two = half.freeze(params, lambda path, x: path[0] < 2)
    assert lower_two.trained == {2}
    assert lower_two.plan(Placement.loop(3), 2).trained == {2}
    assert lower_two.plan(Placement.loop(3), 2, trained=range(3)).trained == {0, 1, 2}
    assert lower_two.unfreeze(params, ["b", "w"]).trained is None
    biases = lower_two.unfreeze(params, "b")
    assert [stage.frozen for stage in biases.stages] == [(("w",),), (("w",),), ()]
    assert pipeline.freeze(params, "*").trained == set()
    assert pipeline.trained is None
    with pytest.raises(ValueError, match="no parameter is called 'W': names are such as b, w"):
        pipeline.freeze(params, "W")
    with pytest.raises(StageError, match="stage 2: params has no entry for it"):
        pipeline.freeze({0: params[0], 1: params[1]}, "w")


def test_a_stage_without_params_that_could_be_trained_is_left_out():
    pipeline, params = affine_pipeline()
    pipeline = Pipeline([affine, lambda p, x: x.sin() * p["scale"], affine], cases.mse)
    params[1] = {"scale": 3, "ids": torch.arange(2)}
    assert pipeline.freeze(params, lambda path, x: False).trained == {0, 2}
    modules = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4).requires_grad_(False)]
    assert interop.from_modules(modules)[0].trained == {0}
    cut, _ = interop.split(nn.Sequential(*modules), at=["1", "2"], example=(torch.ones(2, 4),))
    assert cut.trained == {0}


def test_an_entry_that_stages_share_is_frozen_for_all_of_them():
    pipeline, params = affine_pipeline(ties={(2, "b"): (0, "b")})
    del params[2]["b"]
    frozen = pipeline.freeze(params, lambda path, x: path == (0, "b"))
    assert [stage.frozen for stage in frozen.stages] == [(("b",),), (), (("b",),)]
    only_shared = pipeline.freeze(params, lambda path, x: path != (0, "b"))
    assert only_shared.trained == {0, 2}
    by_hand = Pipeline([Stage(affine, frozen=[()]), affine, affine], cases.mse, ties={(2, "b"): (0, "b")})
    assert by_hand.trained is None  # the use of stage 2 is trained, and adds to the entry's gradient


@pytest.mark.parametrize("handler", [handlers.Reference(), handlers.Local()], ids=repr)
def test_a_plan_that_leaves_out_a_trained_stage_is_refused(handler):
    pipeline, params = affine_pipeline()
    plan = pipeline.plan(Placement.loop(3), 2, trained=[2])
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler)
    with pytest.raises(
        StageError, match=r"stage 0: its params\['b'\] is trained, and the plan trains only stages \[2\]"
    ):
        step(params, torch.ones(4, 4), torch.ones(4, 4))
    tied, params = affine_pipeline(ties={(2, "b"): (0, "b")})
    del params[2]["b"]
    tied = Pipeline(
        [Stage(affine, frozen=[()]), Stage(affine, frozen=[()]), affine], cases.mse, ties={(2, "b"): (0, "b")}
    )
    step = fpipe.value_and_grad(tied, "1f1b", tied.plan(Placement.loop(3), 2, trained=[2]), handler=handler)
    with pytest.raises(StageError, match=r"stage 2: its params\['b'\] is trained"):
        step(params, torch.ones(4, 4), torch.ones(4, 4))


def refused_over_gloo(rank):
    pipeline, params = affine_pipeline(2)
    step = fpipe.value_and_grad(
        pipeline, "1f1b", pipeline.plan(Placement.loop(2), 2, trained=[0]), handler=jobs.handler()
    )
    try:
        step({rank: params[rank]}, torch.ones(4, 4), torch.ones(4, 4))
    except (StageError, fpipe.TransportError) as error:
        return str(error)


def test_all_ranks_refuse_it(pools):
    assert all("stage 1: its params['b'] is trained" in text for text in pools(2).run(refused_over_gloo))


def test_an_optimizer_has_states_of_trained_params_only():
    pipeline, params = affine_pipeline()
    pipeline = pipeline.freeze(params, lambda path, x: path != (2, "b"))
    adam = interop.optimizer(torch.optim.Adam, lr=0.1)
    step = fpipe.train_step(pipeline, "zb-h1", pipeline.plan(Placement.loop(3), 2), adam, handler=handlers.Local())
    new, state, _ = step(params, adam.init(params), torch.ones(4, 4), torch.ones(4, 4))
    changed = [(s, name) for s in params for name in params[s] if not torch.equal(new[s][name], params[s][name])]
    assert changed == [(2, "b")]
    assert [(s, name) for s in state for name in state[s] if state[s][name]] == [(2, "b")]


def test_evaluate_takes_the_same_plan():
    case, _, plan = frozen("skip", "one_f_one_b", "last")
    run = fpipe.evaluate(case.pipeline, plan, handler=handlers.Local(), loss=True)
    expected = case.pipeline(case.params, case.batch, case.target)
    torch.testing.assert_close(run(case.params, case.batch, case.target), expected)


@combined(argnums=["batch", ("batch", "params")], trained=["last", "second", "none"], schedule=["one_f_one_b", "zb_v"])
def test_gradients_of_the_batch_go_back_through_frozen_stages(argnums, trained, schedule):
    case, generator, plan = frozen("linear", schedule, trained)
    results = [
        fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, argnums=argnums, autodiff=way)(
            case.params, case.batch, case.target
        )
        for handler, way in ((handlers.Reference(), "auto"), (handlers.Local(), "graph"), (handlers.Local(), "eager"))
    ]
    assert jobs.differences(results[1], results[0]) == []
    assert jobs.differences(results[2], results[0]) == []
    of_batch = results[0][1] if argnums == "batch" else results[0][1][0]
    expected = torch.func.grad(case.pipeline, argnums=1)(case.params, case.batch, case.target)
    torch.testing.assert_close(of_batch, expected)


class Kinds(handlers.Observer):
    """The kinds of effects that a step runs."""

    def __init__(self):
        self.kinds = set()

    def begin(self, rank, effect):
        self.kinds.add(type(effect))


def test_of_the_batch_alone_no_weight_gradients_run():
    case, generator, plan = frozen("linear", "one_f_one_b", "all")
    seen = Kinds()
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), argnums="batch", observe=seen)
    step(case.params, case.batch, case.target)
    assert BackwardInput in seen.kinds
    assert not seen.kinds & {Backward, BackwardWeight}


def test_replicas_scatter_only_what_is_trained():
    pipeline, params = affine_pipeline(2)
    pipeline = pipeline.freeze(params, lambda path, x: path[0] == 0)
    plan = pipeline.plan(Placement.loop(2), 2, replicas=2)
    results = [
        fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler)(params, torch.ones(8, 4), torch.ones(8, 4))
        for handler in (handlers.Local(), handlers.Reference())
    ]
    assert jobs.differences(*results) == []
    assert results[0][1][0] == {"w": None, "b": None}
    names = [type(e).__name__ for program in lower("1f1b", plan, resident=1).values() for e in program]
    assert (names.count("Gather"), names.count("Scatter"), names.count("Reduce")) == (2, 1, 1)
