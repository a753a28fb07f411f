"""The step's contract, against torch's own results."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe import (
    Batch,
    Output,
    Pipeline,
    Placement,
    Plan,
    ScheduleError,
    Stage,
    StageError,
    handlers,
    interop,
    schedules,
)
from fpipe.autodiff.eager import Eager
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.effects import Backward, BackwardInput, BackwardWeight, parts
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pipeline import with_loss
from fpipe.stages.stage import Target
from tests.support import cases, jobs
from tests.support.combinations import one_in
from tests.support.fake_device import FakeDevice

LOCAL = [handlers.Reference(), handlers.Local()]
both = pytest.mark.parametrize("handler", LOCAL, ids=["reference", "local"])
each_way = pytest.mark.parametrize("autodiff", ["graph", "eager"])


def affine(p, x):
    return x @ p["w"] + p["b"]


def affine_case(stages=2, rows=10, dtype=torch.float64):
    torch.manual_seed(1)
    params = {s: {"w": torch.randn(4, 4, dtype=dtype), "b": torch.randn(4, dtype=dtype)} for s in range(stages)}
    return params, torch.randn(rows, 4, dtype=dtype), torch.randn(rows, 4, dtype=dtype)


@both
@each_way
def test_a_step_needs_autograd_and_evaluate_does_not(handler, autodiff):
    params, x, y = affine_case()
    pipeline = Pipeline([affine] * 2, loss=F.mse_loss)
    plan = pipeline.plan(Placement.loop(2), 2)
    options = {"handler": handler, "autodiff": autodiff}
    step = fpipe.value_and_grad(pipeline, schedules.zb_h1, plan, **options)
    evaluate = fpipe.evaluate(pipeline, plan, **options)
    expected = step(params, x, y), evaluate(params, x)
    with torch.no_grad():
        assert jobs.differences((step(params, x, y), evaluate(params, x)), expected) == []
    with torch.inference_mode():
        assert torch.equal(evaluate(params, x), expected[1])
        with pytest.raises(StageError, match=r"torch\.inference_mode\(\) switches autograd off.*call it outside"):
            step(params, x, y)
    assert jobs.differences(step(params, x, y), expected[0]) == []


def plain(params, x):
    for s in sorted(params):
        x = affine(params[s], x)
    return x


def run(pipeline, handler, m, params, batch, target=None, *, schedule=schedules.gpipe, stages=2, **options):
    inputs = {k: options.pop(k) for k in ("state", "rng") if k in options}
    plan = pipeline.plan(Placement.loop(stages), m)
    return fpipe.value_and_grad(pipeline, schedule, plan, handler=handler, **options)(params, batch, target, **inputs)


def check(found, loss, params):
    """Loss and gradients are those of torch.autograd on the plain function."""
    leaves, spec = jobs.optree.tree_flatten(params)
    given = [x.clone().requires_grad_() for x in leaves]
    expected = loss(spec.unflatten(given))
    torch.testing.assert_close(found[0], expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], spec.unflatten(torch.autograd.grad(expected, given)), rtol=1e-10, atol=1e-12)


@both
@pytest.mark.parametrize("m", [1, 3, 4, 10])
def test_mean_over_samples_whatever_the_microbatches(handler, m):
    params, x, y = affine_case()
    pipeline = Pipeline([affine] * 2, cases.mse)
    check(run(pipeline, handler, m, params, x, y), lambda p: cases.mse(plain(p, x), y), params)


@both
@pytest.mark.parametrize("m", [1, 3, 10])
def test_sum_adds_microbatches(handler, m):
    params, x, y = affine_case()

    def loss(output, target):
        return ((output - target) ** 2).sum()

    found = run(Pipeline([affine] * 2, loss), handler, m, params, x, y, reduction="sum")
    check(found, lambda p: loss(plain(p, x), y), params)


@both
def test_weight_by_tokens_equals_the_mean_over_all_tokens(handler):
    params, x, _ = affine_case()
    target = torch.tensor([0, -100, 2, 3, -100, -100, 1, 1, 0, -100])

    def loss(output, target):
        return F.cross_entropy(output, target, ignore_index=-100)

    pipeline = Pipeline([affine] * 2, loss)
    found = run(pipeline, handler, 3, params, x, target, weight=lambda t: (t != -100).sum())
    check(found, lambda p: loss(plain(p, x), target), params)


@both
def test_no_loss_takes_the_last_output(handler):
    params, x, _ = affine_case()
    pipeline = Pipeline([affine, lambda p, x: affine(p, x).square().mean()])
    check(run(pipeline, handler, 4, params, x), lambda p: plain(p, x).square().mean(), params)


@both
def test_aux_is_merged(handler):
    params, x, y = affine_case()

    def loss(output, target):
        return cases.mse(output, target), {"rows": output.detach(), "norm": output.detach().norm(), "name": "mse"}

    pipeline = Pipeline([affine] * 2, loss)
    (_, aux), _ = run(pipeline, handler, 4, params, x, y, has_aux=True)
    torch.testing.assert_close(aux["rows"], plain(params, x))
    assert aux["norm"].shape == (4,)
    assert aux["name"] == "mse"
    assert not aux["rows"].requires_grad


@both
def test_axes_of_batch_and_target(handler):
    params, x, y = affine_case()
    table = torch.randn(4, dtype=torch.float64)

    def first(p, batch):
        return affine(p, batch["x"].T) + batch["table"]

    pipeline = Pipeline([first, affine], cases.mse)
    batch = {"x": x.T.contiguous(), "table": table}
    found = run(pipeline, handler, 3, params, batch, y, in_axes=({"x": 1, "table": None}, 0))
    check(found, lambda p: cases.mse(affine(p[1], affine(p[0], x) + table), y), params)


@both
def test_the_same_batch_for_every_microbatch_is_a_mean(handler):
    params, x, y = affine_case()
    found = run(Pipeline([affine] * 2, cases.mse), handler, 4, params, x, y, in_axes=None)
    check(found, lambda p: cases.mse(plain(p, x), y), params)


@both
def test_frozen_integer_and_unused_params(handler):
    params, x, y = affine_case()
    params[0] |= {"ids": torch.arange(3), "idle": torch.ones(2, dtype=torch.float64), "name": "first"}
    pipeline = Pipeline([Stage(affine, frozen=["b"]), affine], cases.mse)
    _, grads = run(pipeline, handler, 2, params, x, y)
    assert grads[0]["b"] is None
    assert grads[0]["ids"] is None
    assert grads[0]["name"] is None
    assert torch.equal(grads[0]["idle"], torch.zeros(2, dtype=torch.float64))
    assert grads[0]["w"].shape == (4, 4)


@both
def test_a_pipeline_without_trained_params_is_for_evaluate(handler):
    params, x, y = affine_case()
    pipeline = Pipeline([Stage(affine, frozen=["w", "b"])] * 2, cases.mse)
    with pytest.raises(
        StageError, match=r"where every parameter is frozen, pipeline.unfreeze trains some, .* evaluate"
    ):
        run(pipeline, handler, 2, params, x, y)


@both
def test_state_goes_through_the_microbatches_in_order(handler):
    def counting(p, state, x):
        return affine(p, x), {"seen": state["seen"] + len(x), "last": x.sum()}

    params, x, y = affine_case()
    state = {1: {"seen": torch.tensor(5), "last": torch.tensor(0.0)}}
    pipeline = Pipeline([affine, Stage(counting, stateful=True)], cases.mse)
    _, _, new = run(pipeline, handler, 4, params, x, y, state=state)
    assert new[1]["seen"] == 15
    torch.testing.assert_close(new[1]["last"], affine(params[0], x[-2:]).sum())
    assert not new[1]["last"].requires_grad
    assert state[1]["seen"] == 5


def test_a_rank_is_given_the_state_of_its_stages():
    counting = Stage(lambda p, s, x: (x, s), stateful=True)
    pipeline = Pipeline([counting, affine, counting, counting])
    state = {s: {"seen": torch.tensor(s)} for s in (0, 2, 3)}
    plan = pipeline.plan(Placement.loop(2, 2), 2)
    assert [list(pipeline.state_on(state, plan, rank)) for rank in range(2)] == [[0, 2], [3]]
    assert pipeline.state_on(state, plan, 1)[3] is state[3]


@both
def test_batch_norm_equals_the_module_fed_microbatch_by_microbatch(handler):
    torch.manual_seed(0)
    modules = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(2)]
    whole = torch.nn.Sequential(*[copy.deepcopy(m) for m in modules])
    pipeline, params = interop.from_modules(modules, loss=cases.mse)
    x, y = torch.randn(12, 4), torch.randn(12, 4)
    *_, state = run(pipeline, handler, 3, params, x, y, state=interop.buffers(modules))
    for part in x.split(4):
        whole(part)
    expected = {s: dict(whole[s].named_buffers()) for s in range(2)}
    assert jobs.differences(state, expected) == []
    assert modules[0][1].num_batches_tracked == 0


@one_in(2)
@both
def test_randomness_is_the_same_under_every_schedule_and_leaves_the_generators_alone(handler):
    case, _, _ = cases.make("dropout", "one_f_one_b", 2, 4)
    found = []
    for name in ("gpipe", "one_f_one_b", "split"):
        _, schedule, plan = cases.make("dropout", name, 2, 4)
        torch.manual_seed(5)
        step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handler)
        found.append([step(case.params, case.batch, case.target, rng=(1, i)) for i in range(2)])
        drawn = torch.rand(1)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(1))
    assert jobs.differences(found[1], found[0]) == []
    assert jobs.differences(found[2], found[0]) == []
    assert not torch.equal(found[0][0][0], found[0][1][0])


@both
def test_unseeded_randomness_warns(handler):
    case, schedule, plan = cases.make("dropout", "gpipe", 2, 2)
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handler)
    with pytest.warns(UserWarning, match=r"pass rng=\(seed, step\)") as told:
        step(case.params, case.batch, case.target)
    assert told[0].filename == __file__


@both
def test_unseeded_randomness_of_a_device_warns(handler, monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr("fpipe.training.step.current_device", lambda: device)
    pipeline = Pipeline([lambda p, x: x * p * torch.rand((), generator=device.drawn)], cases.mse)
    plan = pipeline.plan(Placement.loop(1), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler, autodiff="eager")
    with pytest.warns(UserWarning, match=r"pass rng=\(seed, step\)"):
        step({0: torch.ones(3)}, torch.ones(4, 3), torch.zeros(4, 3))


@both
def test_a_shape_may_change_from_step_to_step(handler):
    params, x, y = affine_case(rows=12)
    step = fpipe.value_and_grad(
        pipeline := Pipeline([affine] * 2, cases.mse),
        schedules.gpipe,
        pipeline.plan(Placement.loop(2), 3),
        handler=handler,
    )
    for rows in (12, 7, 12, 3):
        part = x[:rows], y[:rows]
        check(step(params, *part), lambda p, part=part: cases.mse(plain(p, part[0]), part[1]), params)


class Additions(TorchDispatchMode):
    """Notes where each addition reads its first term, and where it puts the sum."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and not is_fake(out):
            self.seen += [args[0].data_ptr(), out.data_ptr()]
        return out


@each_way
def test_values_on_one_rank_are_handed_over_without_a_copy(autodiff):
    pipeline = Pipeline([lambda p, x: x + p] * 4, lambda y, t: y.sum())
    plan = pipeline.plan(Placement((0, 0, 1, 1)), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    with Additions() as additions:
        step(dict.fromkeys(range(4), torch.ones(3)), torch.zeros(3, 3), None)
    first_in, first_out, second_in, *_, third_out, fourth_in, _ = additions.seen
    assert first_in != first_out
    assert first_out == second_in
    assert third_out == fourth_in


def test_devices_of_the_local_handler():
    case, schedule, plan = cases.make("dictionary", "interleaved_1f1b", 2, 3)
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handlers.Local(["cpu", "cpu:0"]))
    found = step(case.params, case.batch, case.target)
    assert jobs.differences(found, cases.reference(case, schedule, plan)) == []


class Moves(TorchFunctionMode):
    """Notes for each move of a tensor to a device whether the host waits for it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            self.seen.append((args[1].type, not (kwargs or {}).get("non_blocking", False)))
        return func(*args, **(kwargs or {}))


def test_the_local_handler_waits_for_what_it_moves_to_the_host_alone(monkeypatch):
    monkeypatch.setattr("fpipe.handlers.local.device_of", lambda _: FakeDevice())
    pipeline = Pipeline([lambda p, x: x * p] * 2, lambda y, t: y.sum())
    plan, params = pipeline.plan(Placement.loop(2), 1), dict.fromkeys(range(2), torch.ones(3))
    for devices, expected in ((["cpu", "cpu"], {("cpu", True)}), (["meta", "meta"], {("meta", False)})):
        moved = {s: p.to(device) for (s, p), device in zip(params.items(), devices, strict=True)}
        step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(devices))
        with Moves() as moves:
            step(moved, torch.ones(2, 3, device=devices[0]))
        assert set(moves.seen) == expected


@each_way
def test_a_failure_inside_an_overlap_names_its_part(autodiff):
    def failing(p, x):
        if len(x) == 1:
            raise ArithmeticError("short")
        return x * p

    pipeline = Pipeline([failing], lambda y, t: y.sum())
    plan = pipeline.plan(Placement.loop(1), 4)
    step = fpipe.value_and_grad(pipeline, cases.overlapping, plan, handler=handlers.Local(), autodiff=autodiff)
    with pytest.raises(fpipe.StageError, match="rank 0, stage 0, microbatch 2: Forward raised ArithmeticError: short"):
        step({0: torch.ones(())}, torch.ones(6))  # 2, 2, 1, 1


def test_what_a_stage_reads_of_the_microbatch_stands_between_what_it_reads_of_stages():
    stage = Stage(lambda p, *inputs: inputs, reads=(Batch("x"), Output(1, "h"), Target(), 0, Batch("y", 1)))
    given = stage.given(Microbatch({"x": 1, "y": (2, 3)}, "target", "scale"))
    assert given == [1, "target", 3]
    assert stage.arguments({0: "zero", 1: {"h": "one"}}, given) == (1, "one", "target", "zero", 3)
    assert stage.arguments({0: "zero", 1: {"h": "one"}}, "abc") == ("a", "one", "b", "zero", "c")


@one_in(3)
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_way
def test_the_weight_of_a_microbatch_is_the_cotangent_of_its_loss(handler, dtype, autodiff):
    """The stage itself knows nothing of it: it is the same for every microbatch of a shape."""
    params, x, y = affine_case(rows=7, dtype=dtype)
    kept = []

    def loss(output, target):
        kept.append(cases.mse(output, target))
        return kept[-1]

    found, grads = run(Pipeline([affine] * 2, loss), handler, 2, params, x, y, autodiff=autodiff)
    leaves, spec = jobs.optree.tree_flatten(params)
    given = [leaf.clone().requires_grad_() for leaf in leaves]
    expected, sums = 0, [0] * len(given)
    for i, rows in enumerate((slice(0, 4), slice(4, 7))):
        own = cases.mse(plain(spec.unflatten(given), x[rows]), y[rows])
        assert autodiff == "graph" or torch.equal(kept[i], own)
        weight = torch.tensor((4 - i) / 7, dtype=dtype)
        expected = expected + own.detach() * weight
        sums = [a + b for a, b in zip(sums, torch.autograd.grad(own, given, weight), strict=True)]
    assert jobs.differences((found, grads), (expected, spec.unflatten(sums))) == []


def test_residuals_hold_no_output_that_the_backward_has_no_use_for():
    piece = Eager(Stage(lambda p, x: x + p, reads=(Batch(),)))
    prepared = piece.prepare(torch.ones(4))
    outputs, residuals, _ = piece.forward(prepared, None, {}, Microbatch(torch.ones(4), None), keep=True)
    storage = weakref.ref(outputs.leaves[0].untyped_storage())
    del outputs
    assert storage() is None
    assert torch.equal(piece.backward(residuals, [torch.full((4,), 2.0)])[0][0], torch.full((4,), 2.0))


class Kept:
    """Residuals, or what is deferred, with a life that can be watched."""

    def __init__(self, content):
        self.content = content


class Watching(Eager):
    """Eager pieces that note what still lives of the things a backward uses up once it has let go of them."""

    def forward(self, *arguments):
        outputs, residuals, state = super().forward(*arguments)
        return outputs, Kept(residuals), state

    def backward(self, residuals, cotangents, sink=None):
        found = super().backward(residuals.content, cotangents)
        given = [weakref.ref(x) for x in (residuals, *cotangents) if x is not None]
        del residuals, cotangents
        LIVING.append([x() for x in given if x() is not None])
        return found

    def backward_input(self, residuals, cotangents):
        found, deferred = super().backward_input(
            residuals.content, [None if x is None else x.clone() for x in cotangents]
        )
        given = [weakref.ref(x) for x in (residuals, *cotangents) if x is not None]
        del residuals, cotangents
        LIVING.append([x() for x in given if x() is not None])
        return found, Kept(deferred)

    def backward_weight(self, deferred, sink=None):
        found = super().backward_weight(deferred.content)
        given = weakref.ref(deferred)
        del deferred
        LIVING.append([given()] if given() is not None else [])
        return found


LIVING = []


@pytest.mark.parametrize("name", ["linear", "skip", "attention"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "split", "overlap", "dualpipe_v"])
def test_what_a_backward_uses_up_is_its_alone(name, schedule):
    case, generator, plan = cases.make(name, schedule, 2, 4)
    pipeline, programs = with_loss(case.pipeline, False), fpipe.lower(generator, plan)
    pieces = DifferentiablePipeline(pipeline, tuple(map(Watching, pipeline.stages)))
    microbatches = map(Microbatch, case.batch.chunk(4), case.target.chunk(4))
    LIVING.clear()
    handlers.Local().compile(programs, pieces, None)(handlers.Inputs(case.params, [{}], list(microbatches)))
    backward = (Backward, BackwardInput, BackwardWeight)
    assert len(LIVING) == sum(isinstance(e, backward) for p in programs.values() for each in p for e in parts(each))
    assert [living for living in LIVING if living] == []


def test_nothing_of_a_step_stays_but_its_results():
    case, schedule, plan = cases.make("attention", "interleaved_1f1b", 2, 4)
    alive = []

    def watching(stage):
        def fn(p, *inputs):
            out = stage.fn(p, *inputs)
            alive.append(weakref.ref(out))
            return out

        return Stage(fn, stage.reads)

    pipeline = Pipeline([watching(s) for s in case.pipeline.stages], case.pipeline.loss)
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Local(), autodiff="eager")
    gc.collect()
    gc.disable()
    try:
        result = step(case.params, case.batch, case.target)
        assert len(alive) == 16
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()
    assert result[0].isfinite()


def test_the_plan_must_be_the_pipelines():
    case, _, _ = cases.make("skip", "gpipe", 4, 2)
    with pytest.raises(ScheduleError, match=r"pipeline\.plan\(placement, microbatches\)"):
        fpipe.value_and_grad(case.pipeline, schedules.gpipe, Plan(Placement.loop(4), 2), handler=handlers.Local())


def test_a_state_has_no_copies():
    pipeline = Pipeline([Stage(lambda p, s, x: (x, s), stateful=True), affine], cases.mse)
    plan = pipeline.plan(Placement.both_ways(2), 2)
    with pytest.raises(ScheduleError, match=r"stage 0 is stateful and has copies on ranks .*search\(copies=False\)"):
        fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())


@pytest.mark.parametrize("options", [{"reduction": "max"}, {"reduction": "sum", "weight": len}])
def test_options_that_make_no_sense(options):
    pipeline = Pipeline([affine] * 2, cases.mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    with pytest.raises(ValueError, match="reduction"):
        fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), **options)


def test_reads_and_paths():
    pipeline = Pipeline(
        [
            lambda p, b: {"a": b["x"], "b": (b["x"] * 2, b["x"] * 3)},
            Stage(lambda p, a, b1, x: a + b1 + x, reads=(Output(0, "a"), Output(0, "b", 1), Batch("x"))),
        ]
    )
    x = torch.ones(2)
    assert torch.equal(pipeline({0: (), 1: ()}, {"x": x}), x * 5)
