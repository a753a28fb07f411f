"""Gradients of the batch and of the target: torch's own, and the same bits under every schedule and handler."""

import pytest
import torch

import fpipe
from fpipe import Batch, Microbatches, Output, Pipeline, Placement, Stage, handlers, interop
from tests.support import argnums_jobs, cases
from tests.support.argnums_jobs import ALL, several_readers
from tests.support.combinations import combined, one_in
from tests.support.jobs import WAYS, differences
from tests.support.sharing import Sharing, sharing

SCHEDULES = ["one_f_one_b", "interleaved_zb", "zb_v", "zb_h2", "dualpipe", "split"]


def step_of(pipeline, schedule, plan, handler, **options):
    return fpipe.value_and_grad(pipeline, schedule, plan, handler=handler, **options)


@one_in(4)
@combined(
    name=argnums_jobs.NAMES,
    schedule=SCHEDULES,
    way=("everything", "nothing", "eager"),
    m=(2, 4),
    handler=("local", "gloo"),
    where=lambda name, schedule, **_: name != "modules" or schedule not in cases.COPIED,
    singly=True,
)
def test_every_schedule_and_handler(pools, name, schedule, way, m, handler):
    if handler == "gloo":
        assert pools(2).run(argnums_jobs.train, name, schedule, m, 2, way) == [[]] * 2
        return
    case, generator, plan = cases.make(name, schedule, 2, m, cases.rows(m))
    options = {"argnums": ALL, **WAYS[way], **case.options}
    step = step_of(case.pipeline, generator, plan, sharing(handlers.Local(), name), **options)
    loss, (_, *expected), *state = argnums_jobs.oracle(name, plan.stages, cases.rows(m), m)
    found_loss, (_, *found), *found_state = step(case.params, case.batch, case.target, state=case.state, rng=case.rng)
    assert differences((found_loss, found, found_state), (loss, expected, state)) == []


@pytest.mark.parametrize("autodiff", ["graph", "eager"])
@pytest.mark.parametrize("handler", [handlers.Reference(), handlers.Local()])
def test_torch_gives_the_same_bits(handler, autodiff):
    """Microbatch by microbatch; a leaf with several readers is added from the highest one down."""
    pipeline, params, batch, target, options = several_readers()
    plan = pipeline.plan(Placement.loop(2, 2), 2)
    step = step_of(
        pipeline, "interleaved-1f1b", plan, handler, argnums=("target", "batch"), autodiff=autodiff, **options
    )
    _, (of_target, of_batch) = step(params, batch, target)
    names, parts, targets = ("x", "k", "s"), [], []
    for rows in (slice(0, 3), slice(3, 6)):
        own = {name: (batch[name] if name == "s" else batch[name][rows]).clone().requires_grad_() for name in names}
        t = target[rows].clone().requires_grad_()
        loss = pipeline(params, {**batch, **own}, t)
        *parts_of, of_t = torch.autograd.grad(loss, [*own.values(), t], torch.tensor(0.5))
        parts.append(dict(zip(names, parts_of, strict=True)))
        targets.append(of_t)
    expected = {name: torch.cat([part[name] for part in parts]) for name in ("x", "k")}
    expected |= {"s": parts[0]["s"] + parts[1]["s"], "i": None, "unused": -torch.zeros(6)}
    assert differences((of_batch, of_target), (expected, torch.cat(targets))) == []


@one_in(2)
@pytest.mark.parametrize("capture", [False, True])
def test_each_rank_has_the_whole_gradient_of_the_leaves_that_it_reads(pools, capture):
    assert pools(2).run(argnums_jobs.partial_batches, capture) == [[], []]


def test_replicas_have_the_gradients_of_their_own_rows(pools):
    assert argnums_jobs.replicas(0, "local") == []
    assert pools(4).run(argnums_jobs.replicas) == [[]] * 4


@pytest.mark.parametrize("capture", [True, "pieces"])
def test_captured_steps(capture):
    pipeline, params, batch, target, options = several_readers()
    plan = pipeline.plan(Placement.v(2), 3)
    options |= {"argnums": ALL}
    expected = step_of(pipeline, "gpipe", plan, handlers.Reference(), **options)(params, batch, target)
    step = step_of(pipeline, "zb-v", plan, handlers.Local(), capture=capture, **options)
    for _ in range(3):
        assert differences(step(params, batch, target), expected) == []


def test_one_argument_or_several():
    """As jax.value_and_grad: a name gives gradients, a tuple of names gives a tuple in its order."""
    pipeline, params, batch, target, options = several_readers()
    plan = pipeline.plan(Placement.loop(4), 2)
    loss, (grads, of_batch, of_target) = step_of(pipeline, "1f1b", plan, handlers.Local(), argnums=ALL, **options)(
        params, batch, target
    )
    for argnums, expected in {
        "params": grads,
        ("params",): (grads,),
        "batch": of_batch,
        ("target", "params"): (of_target, grads),
    }.items():
        for handler in (handlers.Local(), handlers.Reference()):
            step = step_of(pipeline, "1f1b", plan, handler, argnums=argnums, **options)
            assert differences(step(params, batch, target), (loss, expected)) == []


@pytest.mark.parametrize("handler", [handlers.Reference(), handlers.Local()])
def test_frozen_params_alone(handler):
    """Saliency: nothing is trained, and aux and state are returned as ever."""
    stages = [
        Stage(lambda p, s, x: (torch.tanh(x @ p), s + 1), stateful=True, frozen=[()]),
        Stage(lambda p, x: x @ p, frozen=[()]),
    ]
    pipeline = Pipeline(stages, loss=lambda y, t: (y.sum(), y.detach()))
    params, x = {0: torch.eye(3), 1: torch.ones(3, 1)}, torch.linspace(-1, 1, 12).reshape(4, 3)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = step_of(pipeline, "zb-h1", plan, handler, argnums="batch", has_aux=True, reduction="sum")
    (loss, aux), of_x, state = step(params, x, None, state={0: torch.zeros(())})
    torch.testing.assert_close(of_x, 1 - x.tanh().square())
    torch.testing.assert_close((loss, aux, state), (aux.sum(), x.tanh() @ params[1], {0: torch.tensor(2.0)}))


@pytest.mark.parametrize("handler", [handlers.Reference(), handlers.Local()])
def test_microbatches_give_microbatches(handler):
    pipeline = Pipeline([lambda p, b: b["x"].sum(1) * p * b["n"]], loss=lambda y, t: y.sum())
    batch = Microbatches([{"x": torch.ones(2, 3), "n": 2}, {"x": torch.ones(1, 5), "n": 3}])
    plan = pipeline.plan(Placement.loop(1), 2)
    _, found = step_of(pipeline, "gpipe", plan, handler, argnums="batch", reduction="sum")(
        {0: torch.tensor(2.0)}, batch
    )
    assert isinstance(found, Microbatches)
    expected = [{"x": torch.full((2, 3), 4.0), "n": None}, {"x": torch.full((1, 5), 6.0), "n": None}]
    assert differences(list(found), expected) == []


@pytest.mark.parametrize("handler", [handlers.Reference(), handlers.Local()])
def test_a_microbatch_of_weight_zero_adds_nothing(handler):
    """Its loss is the mean of nothing, and so NaN; what its last stage read of the batch gets zeros all the same."""

    def last(p, h, x):
        return h * p + x

    pipeline = Pipeline(
        [lambda p, x: x * p, Stage(last, reads=[Output(0), Batch()])], loss=lambda y, t: (y * t).sum() / t.sum()
    )
    plan = pipeline.plan(Placement.loop(2), 2)
    step = step_of(pipeline, "1f1b", plan, handler, argnums="batch", weight=lambda t: t.sum())
    loss, of_x = step({0: torch.tensor(2.0), 1: torch.tensor(3.0)}, torch.ones(4), torch.tensor([0.0, 0, 1, 1]))
    assert differences((loss, of_x), (torch.tensor(7.0), torch.tensor([0.0, 0, 3.5, 3.5]))) == []


def test_a_batch_is_a_constant_by_default():
    """Though it requires a gradient, the graphs compute none for it."""
    pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x * p], loss=lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(2), 1)
    x = torch.ones(2, requires_grad=True)
    graphs = {}
    step = step_of(pipeline, "zb-h1", plan, Sharing(handlers.Local(), graphs=graphs), autodiff="graph")
    _, grads = step({0: torch.tensor(2.0), 1: torch.tensor(3.0)}, x)
    assert grads == {0: torch.tensor(6.0), 1: torch.tensor(4.0)}
    assert x.grad is None
    traced = [functions for each in graphs.values() for functions in each.traced]
    assert [[x.wanted for x in functions.signature.data.leaves] for functions in traced] == [[False], []]


def test_wrong_arguments_are_refused():
    pipeline = Pipeline([lambda p, x: x * p], loss=lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(1), 1)
    for argnums in ("x", (), ("batch", "batch"), (0, 1)):
        with pytest.raises(ValueError, match="argnums names arguments of the step"):
            step_of(pipeline, "gpipe", plan, handlers.Local(), argnums=argnums)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="take value_and_grad"):
        fpipe.train_step(pipeline, "gpipe", plan, sgd, handler=handlers.Local(), argnums="batch")


def test_a_nested_pipeline_trains_what_comes_before_it():
    """The gradients of the batch go on into an encoder, as if all were one function."""
    pipeline = Pipeline([lambda p, x: torch.tanh(x @ p)] * 2, loss=lambda y, t: (y - t).square().mean())
    params, target = {s: torch.eye(3) * (s + 1) for s in range(2)}, torch.zeros(4, 3)
    encoder = torch.nn.Linear(2, 3)
    step = step_of(pipeline, "1f1b", pipeline.plan(Placement.loop(2), 2), handlers.Local(), argnums=("params", "batch"))
    inputs = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    features = encoder(inputs)
    _, (_, of_features) = step(params, features.detach(), target)
    features.backward(of_features)
    whole = torch.autograd.grad(pipeline(params, encoder(inputs), target), [*encoder.parameters()])
    torch.testing.assert_close([p.grad for p in encoder.parameters()], list(whole))


def test_a_handler_without_these_gradients_is_refused():
    """A handler of one's own that knows nothing of them gives no zeros in their place."""

    class Own(handlers.Local):
        def compile(self, programs, pieces, observe):
            run = super().compile(programs, pieces, observe)

            def forgetting(inputs):
                results = run(inputs)
                results.data_gradients = {}
                return results

            return forgetting

    pipeline = Pipeline([lambda p, x: x * p], loss=lambda y, t: y.sum())
    step = step_of(pipeline, "gpipe", pipeline.plan(Placement.loop(1), 1), Own(), argnums="batch")
    with pytest.raises(fpipe.StageError, match="the handler returns no gradients"):
        step({0: torch.tensor(2.0)}, torch.ones(2))


def test_gradients_of_the_batch_are_checked():
    pipeline = Pipeline([lambda p, x: x["a"].sqrt() * p + x["b"], lambda p, x: x + p], loss=cases.mse)
    plan, params = pipeline.plan(Placement.loop(2), 2), {0: torch.tensor(1.0), 1: torch.tensor(1.0)}
    batch = {"a": torch.ones(4), "b": torch.ones(4)}
    for handler in (handlers.Local(), handlers.Reference()):
        for argnums in ("batch", ("params", "batch")):
            step = step_of(pipeline, "gpipe", plan, handler, argnums=argnums, check_finite=True)
            step(params, batch, torch.ones(4))
            zero = {**batch, "a": torch.tensor([1.0, 0.0, 1.0, 1.0])}
            with pytest.raises(fpipe.NonFiniteError, match=r"the gradients of the batch are not finite: batch\['a'\]"):
                step(params, zero, torch.ones(4))
