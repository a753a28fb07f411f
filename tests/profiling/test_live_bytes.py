"""How many bytes are held: by a call, by a rank between its effects, and as the verifier predicts."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
import torch.nn.functional as F

import fpipe
from fpipe import Costs, LiveBytes, Output, Pipeline, Placement, Plan, Stage, handlers, schedules
from fpipe.costs import Shared
from fpipe.effects import Activation, Backward, Deferred, Discard, Fetch, Forward, Offload, Residuals
from fpipe.profiling.live_bytes import peak_bytes
from fpipe.programs.footprint import footprint
from fpipe.programs.interning import Interning
from fpipe.programs.memory import live_bytes
from fpipe.stages.pytree import flatten
from tests.support import cases, jobs, live_jobs
from tests.support.catalogue import ORDERS
from tests.support.combinations import combined, few, one_in, sample, thorough

# Of a call


def keep_two():
    return torch.zeros(1000), torch.zeros(500)


def drop_the_first():
    x = torch.zeros(1000)
    del x
    return torch.zeros(500)


def temporary():
    x = torch.zeros(1000)
    return x.neg().sum()


def temporary_within_an_operation():
    """Two means and two deviations, which it never gives out."""
    return F.layer_norm(torch.zeros(2, 500), (500,))


def through_autograd():
    """x, its tanh, the total and its gradient, which expands; then the gradient of tanh, and of x as a sum."""
    x = torch.zeros(1000).requires_grad_()
    torch.tanh(x).sum().backward()


def nothing():
    return 1 + 1


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (nothing, 0),
        (keep_two, 6000),
        (drop_the_first, 4000),
        (temporary, 8004),
        (temporary_within_an_operation, 8016),
        (through_autograd, 12008),
    ],
)
def test_the_peak_of_a_call(call, expected):
    call()
    assert peak_bytes(call) == expected


def test_what_was_there_before_a_call_counts_nothing_also_where_the_call_frees_it():
    there = [torch.zeros(10_000)]

    def call():
        there.clear()
        return torch.zeros(10)

    assert peak_bytes(call) == 40


def test_a_call_that_fails_leaves_no_profiler_behind():
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda: 1 / 0)
    assert peak_bytes(keep_two) == 6000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_peak_of_a_call_on_a_gpu():
    before = torch.zeros(1000, device="cuda")
    assert peak_bytes(lambda: before.neg().neg(), "cuda") == 8000


# Of a rank


def tanh_twice():
    pipeline = Pipeline([lambda p, x: torch.tanh(x @ p)] * 2, loss=lambda y, t: (y - t).square().mean())
    return pipeline, {0: torch.eye(8), 1: torch.eye(8)}, torch.ones(64, 8), torch.ones(64, 8)


def test_in_one_process_memory_is_its_makers_and_what_a_step_returns_is_nobodys():
    pipeline, *arguments = tanh_twice()
    plan, live = pipeline.plan(Placement.loop(2), 2), LiveBytes()
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), observe=live)
    step(*arguments)
    assert live.effects == []
    loss, grads = live.run(step, *arguments)
    assert torch.equal(loss, step(*arguments)[0])
    assert grads.keys() == {0, 1}
    programs = fpipe.lower(schedules.gpipe, plan)
    assert [memory.effect for memory in live.effects if memory.rank == 0] == list(programs[0])
    assert [memory.after for memory in live.effects if memory.rank == 0] == list(after_gpipe(programs[0], 1024))
    assert all(memory.peak >= max(memory.before, memory.after) for memory in live.effects)
    assert (
        max(memory.peak - memory.after for memory in live.effects if memory.effect == Forward(0, 1)) == 1024
    )  # before tanh


def after_gpipe(program, size):
    """Two activations are made, which are residuals, and given up in turn."""
    made = 0
    for effect in program:
        made += {"Forward": size, "Backward": -size}.get(type(effect).__name__, 0)
        yield made


def test_a_rank_that_is_not_played_here_holds_nothing():
    assert LiveBytes().peak(3) == 0


# As predicted


@one_in(3)
@combined(
    name=["gpipe_v", "interleaved_zb", "zb_v", "dualpipe_v"],
    policy=["everything", "cheap", "dots", "nothing"],
    kind=live_jobs.KINDS,
    singly=True,
)
def test_one_process_that_hands_values_on_to_itself_holds_what_is_predicted(name, policy, kind):
    schedule, place = cases.SCHEDULES[name]
    check(*live_jobs.compared(0, kind, schedule, place(1), 4, handlers.Local(), policy))


@combined(
    name=["gpipe", "interleaved_zb"],
    kind=few(live_jobs.KINDS, ("skip", "layers")),
    trained=few([(3,), (0,), (1,), (0, 3)], slice(0, None, 3)),
    autodiff=["graph"],
    singly=True,
)
def test_stages_that_are_not_trained_hold_what_is_predicted(name, kind, trained, autodiff):
    schedule, _ = cases.SCHEDULES[name]
    place = Placement.loop(1, chunks=4)
    check(*live_jobs.compared(0, kind, schedule, place, 4, handlers.Local(), trained=trained))


@one_in(3)
@pytest.mark.parametrize(
    ("name", "kind"), few(zip(cases.MOVING, cycle(["layers", "blocks", "skip"]), strict=False), slice(None, None, 2))
)
def test_residuals_on_the_host_and_those_that_are_recomputed_are_not_on_the_device(pools, name, kind):
    for found in pools(2).run(live_jobs.held, kind, name, 2, 6):
        check(*found)


@one_in(6)
@pytest.mark.parametrize(
    ("name", "kind"),
    sample(
        [*product(ORDERS, live_jobs.KINDS)],
        few([*zip(ORDERS, cycle(live_jobs.KINDS), strict=False)][::2], slice(None, None, 2)),
    ),
)
def test_each_rank_holds_what_is_predicted(pools, name, kind):
    for found in pools(2).run(live_jobs.held, kind, name, 2, 6):
        check(*found)


@thorough
@pytest.mark.parametrize(
    ("name", "kind"), few([("dualpipe", "layers"), ("one_f_one_b", "layers"), ("zb_v", "skip")], slice(1))
)
def test_so_do_four(pools, name, kind):
    for found in pools(4).run(live_jobs.held, kind, name, 4, 8):
        check(*found)


def check(measured, predicted, difference):
    """Beside what is predicted live losses, and at DualPipe's end a copy's sums until they are added to another's."""
    assert measured == pytest.approx(predicted, rel=0.02)
    assert difference < 0.1 * predicted


@pytest.mark.parametrize("name", few(["interleaved_1f1b", "zb_v"], ["zb_v"]))
def test_so_do_ranks_that_add_the_gradients_of_their_stages(pools, name):
    for found in pools(2).run(live_jobs.held, "dense", name, 2, 4):
        check(*found)


def test_losses_of_microbatches_keep_no_more_than_their_numbers():
    # mse_loss returns a scalar in memory as large as the outputs.
    pipeline = Pipeline([lambda p, x: torch.tanh(x * p)] * 2, loss=F.mse_loss)
    params, size = {0: torch.ones(256), 1: torch.ones(256)}, 64 * 256 * 4

    def peak(microbatches):
        plan = pipeline.plan(Placement.loop(2), microbatches)
        rows, live = torch.ones(64 * microbatches, 256), LiveBytes()
        step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handlers.Local(), autodiff="graph", observe=live)
        step(params, rows, 2 * rows)
        live.run(step, params, rows, 2 * rows)
        return live.peak(1)

    assert peak(8) - peak(2) < size


def test_memory_that_several_names_have_is_counted_once():
    """Rank 0 has both stages: at the second forward's end two residuals, of which one is the output of the first."""
    plan = Plan(Placement.loop(1, chunks=2), 1)
    apart = Costs(activation=[10, 0], residuals=[30, 50], deferred=[0, 20])
    output = Shared(10, (Activation(0, 0), Residuals(0, 0), Residuals(1, 0), Deferred(1, 0)))
    once = Costs(activation=[10, 0], residuals=[30, 50], deferred=[0, 20], shared=[output])
    assert fpipe.verify(schedules.gpipe, plan, costs=apart).peak_bytes == (10 + 30 + 50,)
    assert fpipe.verify(schedules.gpipe, plan, costs=once).peak_bytes == (30 + 50 - 10,)
    tops = [max(n for _, n in fpipe.simulate(schedules.gpipe, plan, costs).memory(0)) for costs in (apart, once)]
    assert tops == [90, 70]


def test_residuals_that_come_back_share_no_memory_with_what_was_there_before():
    """At the first Fetch the output of stage 0 is residuals of stage 1 still: it is there twice."""
    plan = Plan(Placement.loop(1, chunks=2), 1)
    output = Shared(10, (Activation(0, 0), Residuals(0, 0), Residuals(1, 0), Deferred(1, 0)))
    costs = Costs(activation=[10, 0], residuals=[30, 50], deferred=[0, 20], shared=[output])

    def schedule(rank, plan):
        yield from (Forward(0, 0), Offload(0, 0), Discard(0, 0), Forward(1, 0), Fetch(0, 0))
        yield from (Backward(1, 0), Backward(0, 0))

    programs = fpipe.lower(schedule, plan)
    assert next(iter(live_bytes(programs, costs, Interning(plan))))[:5] == [30, 30, 10, 50, 50 + 30]


def test_a_rank_receives_what_its_stages_read_and_gives_a_gradient_as_large():
    plan = Plan(Placement.loop(3), 1, fpipe.Edges([(), (0,), (0, 1)]))
    costs = Costs(activation=[10, 4, 0], reads={(0, 2): 3})
    report = fpipe.verify(schedules.gpipe, plan, costs=costs)
    assert report.bytes == {(0, 1): 10, (0, 2): 3, (1, 0): 10, (1, 2): 4, (2, 0): 3, (2, 1): 4}
    assert report.peak_bytes == (10 + 10 + 3, 10 + 4 + 4, 3 + 4)


@pytest.mark.parametrize("autodiff", ["graph", "eager"])
def test_profile_says_what_is_shared_and_what_is_read(autodiff):
    def first(p, x):
        h = torch.tanh(x @ p)
        return {"h": h, "skip": h * 2}

    def last(p, h):
        return torch.tanh(h @ p)

    pipeline = Pipeline([Stage(first), Stage(last, reads=(Output(0, "h"),))], cases.mse)
    params, x = {0: torch.eye(4), 1: torch.eye(4)}, torch.ones(6, 4)
    costs = fpipe.profile(pipeline, params, x, x, microbatches=2, autodiff=autodiff, repeats=1)
    size = 3 * 4 * 4
    assert costs.activation[0] == 2 * size
    assert costs.reads == {(0, 1): size}
    output = next(names for n, names in costs.shared if n == size and Activation(0, 0) in names)
    assert {Activation(0, 0), Residuals(0, 0), Residuals(1, 0), Deferred(1, 0)} <= {*output}


@one_in(3)
@pytest.mark.parametrize("placement", [Placement.loop(2), Placement.v(2), Placement((0, 1, 2, 1))])
def test_a_profile_counts_the_tied_parameters_that_each_rank_is_given(placement):
    case = cases.attention(placement.stages, tied=True)
    costs = fpipe.profile(case.pipeline, case.params, case.batch, case.target, repeats=1)
    plan = case.pipeline.plan(placement, 2)
    costs = replace(costs, activation=0, residuals=0, deferred=0, shared=())  # the peak is where all sums are there
    accounts = footprint(fpipe.lower(schedules.gpipe, plan), costs)
    for rank, account in enumerate(accounts):
        leaves = flatten(case.pipeline.params_on(case.params, plan, rank)).leaves
        assert account.parameters == sum(x.nbytes for x in leaves)
        # A sum for each stage of all that it uses, and from other ranks those of the tied embedding.
        used = [flatten(case.pipeline.params_of(case.params, stage)).leaves for stage in plan.stages_on(rank)]
        holders = [holder for _, holder in plan.sharers(0)]
        foreign = case.params[0]["wte"].nbytes * sum(holder != rank for holder in holders) * (rank in holders)
        assert account.gradients == sum(x.nbytes for leaves in used for x in leaves) + foreign
        assert account.optimizer == 2 * account.parameters


def test_of_a_view_its_own_elements_travel():
    pipeline = Pipeline([lambda p, x: torch.tanh(x @ p)[:, :1], lambda p, x: x * p], cases.mse)
    params, x = {0: torch.eye(16), 1: torch.tensor(2.0)}, torch.ones(8, 16)
    costs = fpipe.profile(pipeline, params, x, x[:, :1], repeats=1)
    assert costs.activation[0] == 8 * 4
    assert costs.residuals[0] == 8 * 16 * 4
    assert costs.parameters == (16 * 16 * 4, 4)
    assert all(n <= 8 * 4 for n, names in costs.shared if Activation(0, 0) in names)


def test_a_stage_that_fails_while_it_is_profiled_is_named():
    def fails(p, x):
        raise KeyError("h")

    pipeline = Pipeline([lambda p, x: x * p, fails], cases.mse)
    with pytest.raises(fpipe.StageError, match=r"stage 1, microbatch 0: Forward raised KeyError: 'h'"):
        fpipe.profile(pipeline, {0: torch.tensor(2.0), 1: {}}, torch.ones(6), torch.ones(6), microbatches=2)


@pytest.mark.parametrize("given", [{"shared": [(-1, ())]}, {"reads": {(0, 1): float("nan")}}])
def test_bytes_that_are_none(given):
    with pytest.raises(fpipe.ScheduleError, match=f"{next(iter(given))} must be a finite number of at least 0"):
        Costs(**given)


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_a_large_weight_gradient_lives_no_longer_than_it_takes_to_add_it(name):
    """Of eight layers' gradients one at a time lives beside the sums."""
    width, count = 128, 8

    def layers(p, x):
        for w in p:
            x = torch.tanh(x @ w)
        return x

    pipeline = Pipeline([layers], cases.mse)
    params = {0: [torch.eye(width) for _ in range(count)]}
    x = torch.ones(16, width)
    plan = pipeline.plan(Placement.loop(1), 4)
    schedule, _ = cases.SCHEDULES[name]
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Local(), autodiff="graph")
    loss, grads = step(params, x, x)
    expected = cases.reference(cases.Case(pipeline, params, x, x), schedule, plan)
    assert jobs.differences((loss, grads), expected) == []
    layer, row = width * width * 4, 4 * width * 4
    kept = 4 * (count + 1) * row * (2 if name == "zb_h1" else 1)  # of all microbatches
    assert peak_bytes(lambda: step(params, x, x)) < (count + 1) * layer + kept + layer // 2
