"""Mixed precision: sums, casts, autocast, loss scales and checks that numbers are finite, against torch's own."""

import pytest
import torch

import fpipe
from fpipe import LossScale, Pipeline, Placement, handlers, interop, schedules
from tests.support import precision_jobs as jobs
from tests.support.combinations import combined, few, one_in, thorough
from tests.support.jobs import differences
from tests.support.replica_jobs import Grid

WAYS = {"graph": {}, "eager": {"autodiff": "eager"}, "captured": {"capture": True}}
SCHEDULES = ["gpipe", "zb_v", "dualpipe", "interleaved_1f1b"]


@one_in(3)
@combined(mode=jobs.MODES, schedule=SCHEDULES, way=WAYS, singly=True)
def test_every_schedule_has_the_references_bits(mode, schedule, way):
    assert jobs.compare(handlers.Local(), mode, schedule, **WAYS[way]) == []


@one_in(2)
@combined(mode=("bfloat16 params", "float16"), way=("graph", "captured"))
def test_replicas_have_the_references_bits(mode, way):
    assert jobs.compare(handlers.Local(), mode, "zb_v", replicas=2, microbatches=4, **WAYS[way]) == []


@pytest.mark.parametrize("mode", few(["autocast inside", "autocast around", "bfloat16 params"], slice(1, None)))
def test_captured_pieces_have_the_references_bits(mode):
    assert jobs.compare(handlers.Local(), mode, "zb_v", capture="pieces") == []


@pytest.mark.parametrize("schedule", few(["zb_v", "dualpipe"], ["dualpipe"]))
def test_ranks_in_processes_have_the_references_bits(pools, schedule):
    every = [(mode, WAYS["captured" if i % 2 else "graph"]) for i, mode in enumerate(jobs.MODES)]
    modes = few(every, slice(1, None, 3))
    for results in pools(2).run(jobs.compare_ranks, schedule, modes):
        assert [(mode, at) for mode, at in results if at] == []


@pytest.mark.parametrize("own", [handlers.Local(), handlers.Reference()], ids=repr)
def test_steps_in_one_autocast_keep_no_casts(own):
    pipeline = Pipeline([lambda p, x: x @ p], lambda y, t: y.float().mean())
    step = fpipe.value_and_grad(
        pipeline, schedules.gpipe, pipeline.plan(Placement.loop(1), 1), handler=own, autodiff="eager"
    )
    params, x = {0: torch.ones(256, 256)}, torch.ones(2, 256)
    with torch.autocast("cpu", torch.bfloat16):
        once = fpipe.peak_bytes(lambda: step(params, x))
        often = fpipe.peak_bytes(lambda: [step(params, x) and None for _ in range(8)])
    assert often < 1.5 * once


@one_in(4)
@pytest.mark.parametrize("way", ["graph", "eager"])
@pytest.mark.parametrize("mode", jobs.MODES)
def test_the_reference_and_a_step_are_torchs_autograd(mode, way):
    """One microbatch, without ties: autograd's gradients of the stages called one after the other."""
    pipeline, params, batch, target, context, arguments = jobs.prepared(mode, 2, tied=False)
    plan = pipeline.plan(Placement.loop(2), 1)
    low = jobs.MODES[mode]["precision"].compute if jobs.MODES[mode] else None
    wanted = {s: {k: x.detach().requires_grad_() for k, x in tree.items()} for s, tree in params.items()}
    with context:
        loss = pipeline(wanted if low is None else jobs.cast(wanted, low), batch, target)
    leaves = [(s, k) for s, tree in wanted.items() for k in tree]
    seed = None if not arguments else torch.tensor(2.0**10)
    grads = torch.autograd.grad(loss, [wanted[s][k] for s, k in leaves], seed)  # outside of autocast
    grads = [g if seed is None else g / 2.0**10 for g in grads]
    for own in (handlers.Reference(), handlers.Local()):
        step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, **jobs.MODES[mode], **WAYS[way])
        with context:
            found, found_grads = step(params, batch, target, **arguments)
        assert differences(found, loss.detach()) == []
        assert differences([found_grads[s][k] for s, k in leaves], grads) == []


@pytest.mark.parametrize("within", [True, False])
def test_the_gradients_of_an_activation_that_is_read_twice_are_not_added_in_bfloat16(within):
    """Autocast casts a leaf once, and adds the gradients of its cast; of an activation it casts each read."""

    def twice(p, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=within or torch.is_autocast_enabled("cpu")):
            return torch.tanh(x @ p["a"] + (x @ p["b"]).sin() + p["c"])  # float32, as c is

    torch.manual_seed(0)
    params = {s: {"a": torch.randn(4, 4), "b": torch.randn(4, 4), "c": torch.randn(4)} for s in range(3)}
    pipeline = Pipeline([twice] * 3, loss=lambda y, t: (y - t).square().mean())
    plan, batch, target = pipeline.plan(Placement.loop(3), 1), torch.randn(6, 4), torch.randn(6, 4)
    wanted = {s: {k: x.clone().requires_grad_() for k, x in tree.items()} for s, tree in params.items()}
    leaves = [(s, k) for s in range(3) for k in "abc"]
    with torch.autocast("cpu", torch.bfloat16, enabled=not within):
        whole = pipeline(wanted, batch, target)
    expected = torch.autograd.grad(whole, [wanted[s][k] for s, k in leaves])
    for own, way in ((handlers.Reference(), "auto"), (handlers.Local(), "graph"), (handlers.Local(), "eager")):
        step = fpipe.value_and_grad(pipeline, schedules.zb_h1, plan, handler=own, autodiff=way)
        with torch.autocast("cpu", torch.bfloat16, enabled=not within):
            loss, grads = step(params, batch, target)
        assert differences((loss, [grads[s][k] for s, k in leaves]), (whole.detach(), list(expected))) == []


@thorough
def test_a_split_transformer_under_autocast_is_the_module_under_autocast():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = torch.nn.Sequential(layer, torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    x, target = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    pipeline, params = interop.split(module, at=["1"], example=(x,))

    def loss_of(output, target):
        return (output.float() - target).square().mean()

    pipeline = Pipeline(pipeline.stages, loss_of)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(module(x), target)
    loss.backward()
    step = fpipe.value_and_grad(
        pipeline, schedules.gpipe, pipeline.plan(Placement.loop(2), 1), handler=handlers.Local()
    )
    with torch.autocast("cpu", torch.bfloat16):
        found, grads = step(params, x, target)
    assert torch.equal(found, loss.detach())
    by_name = {name: gradient for tree in grads.values() for name, gradient in tree.items()}
    assert by_name.keys() == dict(module.named_parameters()).keys()
    assert [name for name, p in module.named_parameters() if not torch.equal(by_name[name], p.grad)] == []


def test_ranks_must_agree_on_autocast_loss_scale_max_norm_and_check_finite(pools):
    for texts, are_finite in pools(2).run(jobs.disagree):
        autocast, scale, scales, *settings, of_norms = texts
        assert "torch.autocast is none on rank 0 and (('cpu', torch.bfloat16),) on rank 1. Enter the same" in autocast
        assert "rank 0 and rank 1 were called with different settings: loss_scale= is none on rank 0 and " in scale
        assert "the loss scale is 2.0 on rank 0 and 3.0 on rank 1: pass the same loss_scale=" in scales
        assert "check_finite= is none on rank 0 and raise on rank 1." in settings[0]
        assert "max_norm= is none on rank 0 and a tensor on rank 1." in settings[1]
        assert "check_finite= is raise on rank 0 and skip on rank 1." in settings[2]
        assert "loss_scale is 2.0 on rank 0 and 3.0 on rank 1" in of_norms
        assert are_finite == [True, True, True, False, True, True]  # a graph can't raise: its loss is NaN


@thorough
@pytest.mark.parametrize("mode", few(["float16", "bfloat16 params"], ["float16"]))
def test_shards_in_processes_train_as_one_process(pools, mode):
    for wrong, taken, text in pools(2).run(jobs.sharded, Grid("dp2 pp1"), mode):
        assert wrong == []
        assert taken == [True, True, mode != "float16", True]
        assert text.startswith("microbatch 0: the loss is nan, and that of 3 others is not finite; the gradients of")


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_a_batch_that_is_not_cast_and_dtypes_without_sums_are_refused(way):
    pipeline = Pipeline([lambda p, x: x @ p], lambda y, t: y.float().square().mean())
    plan, precision = pipeline.plan(Placement.loop(1), 2), fpipe.Precision(compute=torch.bfloat16)
    options = {"handler": handlers.Local(), "precision": precision, **WAYS[way]}
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, **options)
    with pytest.raises(fpipe.StageError, match=r"stages compute in torch\.bfloat16, .* params alone: cast the batch"):
        step({0: torch.ones(4, 4)}, torch.ones(4, 4))
    for name in ("compute", "reduce"):
        with pytest.raises(ValueError, match=rf"{name} must be a dtype of at least 16 bits, not torch\.float8_e4m3fn"):
            fpipe.Precision(**{name: torch.float8_e4m3fn})


# Loss scales


def test_the_rule_is_that_of_torchs_grad_scaler():
    generator = torch.Generator().manual_seed(0)
    value, streak = torch.tensor(2.0**125), torch.zeros((), dtype=torch.int32)
    scale = LossScale(2.0**125, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    for _ in range(60):
        finite = torch.rand((), generator=generator) < 0.8
        torch._amp_update_scale_(value, streak, (~finite).float(), 4.0, 0.25, 3)
        scale = scale.adjust(finite)
        assert (scale.value.item(), scale.streak.item()) == (value.item(), streak.item())


@thorough
def test_a_loss_scale_changes_no_bits_of_float32():
    pipeline, params, batch, target, *_ = jobs.prepared("autocast inside", 2)
    plan = pipeline.plan(Placement.loop(2), 4)
    for own, options in [(handlers.Reference(), {}), (handlers.Local(), {}), (handlers.Local(), {"capture": True})]:
        step = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=own, **options)
        expected = step(params, batch, target)
        for value in (2.0**6, 2.0**7, 2.0**3):
            assert differences(step(params, batch, target, loss_scale=LossScale(value)), expected) == []


def test_a_loss_scale_keeps_float16_gradients_from_vanishing():
    pipeline = Pipeline([lambda p, x: x * p.half(), lambda p, x: x * p.half()], lambda y, t: (y.float() * 1e-9).sum())
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), reduction="sum")
    params, x = {0: torch.tensor(2.0), 1: torch.tensor(4.0)}, torch.ones(4).half()
    _, lost = step(params, x)
    loss, grads = step(params, x, loss_scale=LossScale(2.0**24))
    assert (lost[0].item(), lost[1].item()) == (0.0, 0.0)
    expected = tuple(torch.tensor([3.2e-8, 1.6e-8, 0.8e-8]))
    torch.testing.assert_close((loss, grads[0], grads[1]), expected, rtol=1e-3, atol=0)


def test_gradients_of_a_shared_batch_are_added_in_float32_and_divided_by_the_scale():
    x, target = torch.rand(4).bfloat16(), torch.rand(256, 4).bfloat16()
    pipeline = Pipeline([lambda p, x: x * p], lambda y, t: (y * t).sum())
    plan = pipeline.plan(Placement.loop(1), 256)
    options = {"argnums": ("params", "batch"), "in_axes": (None, 0), "reduction": "sum"}
    for own in (handlers.Local(), handlers.Reference()):
        step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, **options)
        results = [step({0: torch.ones(4).bfloat16()}, x, target, **k) for k in ({}, {"loss_scale": LossScale(2.0**9)})]
        assert differences(results[1], results[0]) == []
        _, (_, gradient) = results[0]
        exact = target.double().sum(0)
        assert ((gradient.double() - exact) / exact).abs().max() < 2**-8


OVERFLOWS = [2.0**10, 2.0**11, 2.0**11, 2.0**39, 2.0**38, 2.0**37]


@pytest.mark.parametrize(("schedule", "way"), few([("zb_v", "graph"), ("dualpipe", "captured")], slice(1, None)))
def test_a_step_that_overflows_is_skipped(schedule, way):
    assert jobs.overflowing(handlers.Local(), schedule, **WAYS[way]) == ([], OVERFLOWS)


@thorough
def test_ranks_skip_a_step_together(pools):
    for results in pools(2).run(jobs.overflowing_ranks, "zb_v", [WAYS["graph"], WAYS["captured"]]):
        assert results == [([], OVERFLOWS)] * 2


def test_a_loss_scale_must_be_one():
    pipeline = Pipeline([lambda p, x: x * p], lambda y, t: y.sum())
    plan, params = pipeline.plan(Placement.loop(1), 1), {0: torch.ones(2)}
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())
    with pytest.raises(fpipe.StageError, match=r"loss_scale must be a fpipe\.LossScale or None, not a float"):
        step(params, torch.ones(2), loss_scale=2.0)
    run = fpipe.evaluate(pipeline, plan, handler=handlers.Local(), loss=True)
    with pytest.raises(fpipe.StageError, match="evaluate computes none"):
        run(params, torch.ones(2), loss_scale=LossScale())
    for wrong in ({"value": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}):
        with pytest.raises(ValueError, match="must be"):
            LossScale(**wrong)


def test_a_checkpoint_has_masters_and_the_loss_scale(tmp_path):
    pipeline, params, *_ = jobs.prepared("bfloat16 params", 2)
    plan = pipeline.plan(Placement.loop(2), 1)
    adamw = interop.optimizer(torch.optim.AdamW, lr=0.1, master=torch.float32)
    grads = {s: {k: torch.ones_like(x) for k, x in tree.items()} for s, tree in params.items()}
    params, state = adamw.update(grads, adamw.init(params), params)
    scale = LossScale(2.0**10).adjust(finite=True)
    checkpoints = interop.Checkpoints(tmp_path, pipeline, plan, handler=handlers.Local())
    checkpoints.save(params=params, optimizer=state, scale=scale)
    found = checkpoints.load(params=params, optimizer=adamw.init(params), scale=LossScale())
    assert differences((found["params"], found["optimizer"], found["scale"]), (params, state, scale)) == []


# Checks


def expected_checks():
    nan = "microbatch 2: the loss is nan; the gradients of stages 0, 1 are not finite: grads[0]['w'], grads[1]['v']"
    zero = "the gradients of stages 0, 1 are not finite: grads[0]['w'], grads[1]['v']"
    steps = ["", nan, zero, "", "", nan]
    evaluated = ["", "microbatch 2: the loss is nan", "", "", "", "microbatch 2: the loss is nan"]
    raised = [[], [], "2 (0, 1)", "None (0, 1)", []]
    skipped = [[True], [True], [False], [False], [True]]
    return steps + evaluated + raised + skipped, []


@pytest.mark.parametrize(("way", "replicas"), few([("graph", 1), ("eager", 2), ("captured", 2)], slice(1, None)))
def test_what_is_not_finite_is_named_or_skipped(way, replicas):
    assert jobs.check_finite(handlers.Local(), replicas=replicas, **WAYS[way]) == expected_checks()


def test_every_rank_names_or_skips_the_same(pools):
    ways = few([WAYS["graph"], WAYS["captured"]], slice(1))
    for results in pools(2).run(jobs.check_finite_ranks, ways):
        assert results == [expected_checks()] * len(ways)


def test_options_of_a_check_are_refused_at_once():
    pipeline = Pipeline([lambda p, x: x * p], lambda y, t: y.sum())
    plan, own = pipeline.plan(Placement.loop(1), 1), {"handler": handlers.Local()}
    with pytest.raises(ValueError, match=r"None, False, True, 'raise', not 'skip': only train_step"):
        fpipe.value_and_grad(pipeline, schedules.gpipe, plan, check_finite="skip", **own)
    with pytest.raises(ValueError, match="check_finite need loss=True"):
        fpipe.evaluate(pipeline, plan, check_finite=True, **own)


@pytest.mark.parametrize("capture", [False, True])
def test_a_step_that_is_skipped_leaves_the_state_of_stages_too(capture):
    def running(p, state, x):
        return x * p, {"mean": state["mean"] * 0.5 + x.mean() * 0.5}

    pipeline = Pipeline([fpipe.Stage(running, stateful=True), lambda p, x: x * p], lambda y, t: y.mean())
    plan, own = pipeline.plan(Placement.loop(2), 2), handlers.Local()
    adamw = interop.optimizer(
        torch.optim.AdamW, lr=0.1, donate=True, master=torch.float32, fused=True, capturable=capture
    )
    step = fpipe.train_step(pipeline, schedules.gpipe, plan, adamw, handler=own, check_finite="skip", capture=capture)
    params, good = {0: torch.ones(2).bfloat16(), 1: torch.ones(2).bfloat16()}, torch.ones(4, 2).bfloat16()
    state, opt_state, means = {0: {"mean": torch.zeros(())}}, adamw.init(params), []
    for batch in (good, good, good, good * torch.nan, good):
        before = jobs.cloned((params, opt_state, state))
        params, opt_state, _, is_taken, state = step(params, opt_state, batch, state=state)
        if not is_taken:
            assert differences((params, opt_state, state), before) == []
        means.append(round(state[0]["mean"].item(), 3))
    assert means == [0.75, 0.938, 0.984, 0.984, 0.996]
    assert opt_state[0]["step"] == 4
    assert torch.equal(params[0], opt_state[0]["master"].bfloat16())


def test_a_captured_step_may_be_skipped_before_the_first_update():
    """The state of an optimizer that donates nothing has entries only after its first update."""
    pipeline = Pipeline([lambda p, x: x * p] * 2, lambda y, t: y.square().mean())
    plan, own = pipeline.plan(Placement.loop(2), 2), handlers.Local()
    adam = interop.optimizer(torch.optim.Adam, lr=0.1, fused=True)
    steps = [fpipe.train_step(pipeline, schedules.gpipe, plan, adam, handler=own, capture=c) for c in (True, False)]
    params, good = {0: torch.ones(2), 1: torch.ones(2)}, torch.ones(4, 2)
    ours, theirs = [(params, adam.init(params), LossScale(2.0**8))] * 2
    for batch in (good * torch.inf, good * torch.inf, good, good, good, good * torch.inf, good):
        results = [f(*s[:2], batch, loss_scale=s[2]) for f, s in zip(steps, (ours, theirs), strict=True)]
        assert differences(*results) == []
        ours, theirs = ((*new, scale) for *new, _, scale in results)
    assert ours[2].value == 2.0**5
    assert ours[1][0]["step"] == 4
    assert steps[0].captured.graphs == 1


def test_a_captured_step_that_can_skip_copies_only_what_is_donated():
    pipeline = Pipeline([lambda p, x: x @ p] * 2, loss=lambda y, t: (y - t).square().mean())
    plan, x, size = pipeline.plan(Placement.loop(2), 1), torch.randn(2, 64), 2 * 64 * 64 * 4
    extra = {}
    for donate in (False, True):
        peaks = []
        for check in (None, "skip"):
            adamw = interop.optimizer(torch.optim.AdamW, fused=True, donate=donate)
            options = {"handler": handlers.Local(), "check_finite": check, "capture": True}
            step = fpipe.train_step(pipeline, schedules.gpipe, plan, adamw, **options)
            params = {s: torch.randn(64, 64) for s in range(2)}
            params, state, *_ = step(params, adamw.init(params), x, x)
            peaks.append(fpipe.peak_bytes(lambda: step(params, state, x, x)))  # noqa: B023
        extra[donate] = (peaks[1] - peaks[0]) / (3 * size)
    assert max(extra.values()) < 1.2  # the values that are selected; or copies, into which the update is written
