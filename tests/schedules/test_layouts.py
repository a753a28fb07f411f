"""Layouts, whose cuts are searched too: never worse than where they start, within their limits, and as brute force."""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe import (
    Costs,
    Edges,
    Link,
    Placement,
    Plan,
    ScheduleError,
    handlers,
    interop,
    lower,
    offload,
    simulate,
    verify,
)
from fpipe.costs import Shared, Tied
from fpipe.effects import Activation, Backward, BackwardInput, BackwardWeight, Forward, Offload, Residuals
from fpipe.programs.footprint import footprint
from fpipe.schedules import CATALOGUE, lower_bound, search
from fpipe.schedules.catalogue import shares
from fpipe.schedules.cuts import recut
from fpipe.schedules.descent import SLOWER
from fpipe.schedules.grouping import Grouping
from fpipe.schedules.partitions import Partition, balanced, even, levelled
from fpipe.schedules.space import limits_of_ranks
from fpipe.timelines.simulator import simulate_programs
from tests.support.combinations import EFFORT, examples, few, one_in, thorough
from tests.support.copies import of_one_stage

UNEVEN = Costs(
    forward=[0.2, 1, 1, 2, 1, 1, 4],
    backward_input=[0.2, 1, 1, 2, 1, 1, 4],
    backward_weight=[0.2, 1, 1, 2, 1, 1, 4],
    communication=0.1,
    residuals=[1, 4, 4, 8, 4, 4, 6],
    deferred=[1, 2, 2, 4, 2, 2, 3],
    parameters=[8, 2, 2, 8, 2, 2, 8],
    activation=1,
)


def of_layers(count, ranks, microbatches, **options):
    """The plan of layers on ranks, where it does not matter on which."""
    return Plan(Placement([layer * ranks // count for layer in range(count)]), microbatches, **options)


def figures_of(name, partition, plan, costs, in_flight=None, limit=None):
    """The cost of a named schedule on stages of layers, and its most bytes and microbatches in flight.

    One that orders under limits keeps to `in_flight`, and to `limit` in bytes.
    """
    grouping = Grouping(plan, partition.layers)
    placed = grouping.placed(partition.placement)
    grouped = grouping.costs(costs, placed)
    schedule = CATALOGUE[name].schedule(placed, grouped, limits_of_ranks(placed, in_flight), memory_limit_bytes=limit)
    programs = lower(schedule, placed)
    timeline = simulate_programs(programs, grouped)
    return timeline.cost, max(each.total for each in footprint(programs, grouped)), max(shares(timeline))


# Stages of layers


@given(st.sampled_from([(6, 3), (8, 2), (8, 4), (5, 5)]), st.data())
def test_equal_groups_cost_what_an_even_split_does(sizes, data):
    count, stages = sizes
    numbers = st.lists(st.integers(1, 9).map(float), min_size=count, max_size=count)
    names = ("forward", "backward_input", "backward_weight", "backward", "residuals", "parameters", "activation")
    costs = Costs(**{name: data.draw(numbers) for name in names}, scale=[1, 2], communication=Link(1, 2))
    grouping = Grouping(of_layers(count, stages, 2), [count // stages] * stages)
    placed = grouping.placed(Placement.loop(stages))
    assert placed == Plan(Placement.loop(stages), 2)
    found, expected = grouping.costs(costs, placed), recut(costs, count, stages)
    for name in (*names, "scale", "sizes", "communication"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_what_layers_of_a_stage_share_counts_once():
    shared = [
        Shared(3, (Residuals(0, 0), Residuals(1, 0), Activation(0, 0))),
        Shared(2, (Activation(1, 0), Residuals(2, 0))),
    ]
    plan, costs = of_layers(4, 2, 2), Costs(residuals=10, activation=5, shared=shared)
    grouping = Grouping(plan, [2, 2])
    grouped = grouping.costs(costs, grouping.placed(Placement.loop(2)))
    assert grouped.residuals == (17, 20)
    assert grouped.activation == (5, 5)
    assert grouped.shared == (Shared(2, (Activation(0, 0), Residuals(1, 0))),)


def test_skips_ties_and_frozen_layers_are_those_of_the_stages():
    edges = Edges([(), (0,), (1,), (0, 2), (3,)])
    plan = Plan(Placement.loop(5), 2, edges, ties=((0, 4), (1, 2)), trained=[2, 4])
    grouping = Grouping(plan, [1, 2, 1, 1])
    placed = grouping.placed(Placement.loop(4))
    assert placed.edges == Edges([(), (0,), (0, 1), (2,)])
    assert (placed.ties, sorted(placed.trained)) == (((0, 3),), [1, 3])
    costs = grouping.costs(Costs(activation=[8, 1, 1, 1, 1], reads={(0, 3): 2}), placed)
    assert costs.activation == (8, 1, 1, 1)
    assert costs.reads == {(0, 2): 2}
    # Layer 1 is frozen, and no layer before it is trained: its stage has no input gradient, nor has layer 2.
    assert costs.backward_input[:2] == (0, 0)
    assert costs.backward_weight[:2] == (0, 1)


@pytest.mark.parametrize("backward", [None, [3, 1, 1, 2]])
def test_a_piece_has_the_hosts_time_once(backward):
    costs = Costs(forward=[1, 2, 3, 4], backward_input=2, backward_weight=1, backward=backward, scale=[1, 2])
    plan = of_layers(4, 2, 2)
    plain, timed = (Grouping(plan, [3, 1], host).costs(costs, Plan(Placement.loop(2), 2)) for host in (0, 0.25))
    for piece in (Forward, Backward, BackwardInput, BackwardWeight):
        for stage in range(2):
            assert timed.time(piece(stage, 0)) == plain.time(piece(stage, 0)) + 0.25
    assert (timed.residuals, timed.scale) == (plain.residuals, plain.scale)
    bounds = [search(plan, costs, layouts=True, host=host, names=["1f1b"]).lower_bound for host in (0, 0.25)]
    assert bounds[0] == bounds[1]


def test_tied_layers_of_one_stage_have_their_parameters_once():
    costs = Costs(parameters=[8, 1, 1, 1], tied=[Tied(6, (0, 3)), Tied(2, (0, 1))])
    for layers, tied in [((2, 1, 1), (Tied(6, (0, 2)),)), ((1, 1, 2), (Tied(6, (0, 2)), Tied(2, (0, 1)))), ((4,), ())]:
        plan = Plan(Placement.loop(4), 2, ties=((0, 3), (0, 1)))
        grouping = Grouping(plan, layers)
        placed = grouping.placed(Placement.loop(len(layers)))
        assert grouping.costs(costs, placed).tied == tied
        assert {each.stages for each in tied} == {*placed.ties}


def test_a_first_layer_without_an_input_gradient_has_none_in_a_stage():
    costs = Costs(backward_input=[1e-6, 2, 2, 2], backward_weight=3, residuals=5, deferred=1)
    grouping = Grouping(of_layers(4, 2, 2), [2, 2])
    grouped = grouping.costs(costs, grouping.placed(Placement.loop(2)))
    assert grouped.backward_input == pytest.approx((0, 4))
    assert grouped.backward_weight == pytest.approx((8, 6))
    assert grouped.deferred == (10, 2)


@pytest.mark.parametrize(
    ("layers", "inputs", "weights", "deferred"),
    [
        # Layers 0 to 2 are a tower of images; 3 and 4 are one of words, on its own; 5 and 6 read both.
        ((3, 2, 2), (0, 0, 4), (13, 8, 6), (15, 10, 2)),
        ((2, 3, 2), (0, 2, 4), (8, 11, 6), (10, 11, 2)),  # layer 2 passes a gradient on; layer 4 does not
        ((3, 1, 3), (0, 0, 6), (13, 3, 9), (15, 5, 3)),  # layer 4 reads a stage before
        ((1, 6), (0, 8), (3, 20), (5, 14)),
        ((7,), (0,), (31,), (35,)),
    ],
)
def test_no_root_of_several_has_an_input_gradient(layers, inputs, weights, deferred):
    edges = Edges([(), (0,), (1,), (), (3,), (2, 4), (5,)])
    plan = Plan(Placement.loop(7), 2, edges)
    costs = Costs(backward_input=[0, 2, 2, 1e-6, 2, 2, 2], backward_weight=3, residuals=5, deferred=1)
    grouping = Grouping(plan, layers)
    grouped = grouping.costs(costs, grouping.placed(Placement.loop(len(layers))))
    found = grouped.backward_input, grouped.backward_weight, grouped.deferred
    assert found == (pytest.approx(inputs, abs=1e-5), pytest.approx(weights, abs=1e-5), pytest.approx(deferred))


class Skipping(nn.Module):
    """Layers of which the last but one reads the first one's output too."""

    def __init__(self):
        super().__init__()
        widths = [4, 6, 6, 8, 6, 6, 3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x):
        first = torch.tanh(self.layers[0](x))
        y = first
        for layer in self.layers[1:4]:
            y = torch.relu(layer(y))
        return self.layers[5](torch.tanh(self.layers[4](y) + first))


def profiled(cuts):
    """A split model, with its costs; `cuts` are the layers with which stages begin."""
    torch.manual_seed(0)
    at = [f"layers.{cut}" for cut in cuts]
    options = {"example": torch.randn(2, 4), "loss": nn.functional.mse_loss}
    pipeline, params = interop.split(Skipping(), at=at, **options)
    batch, target = torch.randn(2, 4), torch.randn(2, 3)
    return pipeline, params, fpipe.profile(pipeline, params, batch, target, repeats=1)


@one_in(2)
@pytest.mark.parametrize("cuts", few([(3,), (2, 5), (1, 3), (4, 5)], slice(2)))
def test_the_bytes_of_stages_are_those_that_a_profile_of_them_has(cuts):
    fine, _, costs = profiled([1, 2, 3, 4, 5])
    whole, _, expected = profiled(cuts)
    layers = [end - begin for begin, end in zip([0, *cuts], [*cuts, 6], strict=True)]
    placement = Placement.loop(len(layers))
    grouping = Grouping(fine.plan(Placement.loop(6), 2), layers)
    placed = grouping.placed(placement)
    assert placed == whole.plan(placement, 2)
    found = grouping.costs(costs, placed)
    for name in ("parameters", "activation", "residuals", "reads"):
        assert getattr(found, name) == getattr(expected, name), name
    programs = lower("gpipe", placed)
    assert [each.total for each in footprint(programs, found)] == [each.total for each in footprint(programs, expected)]


# Cuts


@pytest.mark.parametrize(
    ("placement", "times", "expected"),
    [
        (Placement.loop(3), [1, 1, 1, 1, 1, 1], (2, 2, 2)),
        (Placement.loop(2), [5, 1, 1, 1, 1, 1], (1, 5)),
        (Placement.v(2), [1, 1, 1, 1, 1, 1, 1, 5], (3, 3, 3, 1)),
    ],
)
def test_levelled_stages_give_ranks_equal_times(placement, times, expected):
    partition = levelled(placement, times)
    loads = partition.loads(times)
    least = min(max(each.loads(times)) for each in partition.every())
    assert max(loads) == least
    if len(placement.holders) == placement.ranks:
        assert partition.layers == expected


def test_even_stages_have_equal_numbers_of_layers():
    assert even(Placement.loop(4), 10).layers == (3, 3, 2, 2)
    assert balanced(Placement.loop(2), [1, 1, 1, 5]).layers == (3, 1)


def test_layers_that_are_not_all_or_none_are_refused():
    with pytest.raises(ScheduleError, match=r"stages of \[3, 0\] layers are no cut of 3: give each at least one"):
        Grouping(of_layers(3, 1, 1), [3, 0])


# Layouts


@one_in(3)
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"), few([("1f1b", 3, 4), ("zb-h1", 2, 3), ("zb-v", 2, 4), ("1f1b", 4, 4)], slice(3))
)
def test_where_cuts_are_few_the_best_of_all_is_found(name, ranks, microbatches):
    plan = of_layers(7, ranks, microbatches)
    found = search(plan, UNEVEN, layouts=True, names=[name])
    first = Partition(found.plan.placement, found.layers)
    best = min(figures_of(name, each, plan, UNEVEN)[0] for each in first.every())
    assert found.timeline.cost == pytest.approx(best, rel=1e-9)
    assert found.lower_bound <= best


LONG = Costs(*[[6, 1, 1, 1, 1]] * 3, residuals=1, parameters=[2, 4, 4, 4, 4], activation=1, communication=Link(0.1, 8))


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_stage_with_copies_is_found_where_a_layer_takes_long(ranks):
    plan = of_layers(5, ranks, 6)
    cuts = [cut for placement in of_one_stage(ranks) for cut in even(placement, 5).every()]
    best = min(figures_of("1f1b", cut, plan, LONG)[0] for cut in cuts)
    layout = search(plan, LONG, layouts=True, names=["1f1b"])
    assert layout.timeline.cost == pytest.approx(best, rel=1e-9)
    without = search(plan, LONG, layouts=True, names=["1f1b"], copies=False)
    assert layout.timeline.cost < without.timeline.cost
    assert without.plan.cycle == 1
    ordered = search(plan, LONG, layouts=True, names=["zb-auto"])
    assert ordered.plan.cycle > 1
    assert layout.lower_bound <= ordered.timeline.cost < layout.timeline.cost
    assert search(of_layers(5, ranks, 5), LONG, layouts=True, names=["1f1b"]).plan.cycle == 1  # none divides 5


@pytest.mark.parametrize("names", [["1f1b"], ["zb-auto"], None])
def test_layers_fewer_than_ranks_have_copies(names):
    plan = Plan(Placement([(0, 1), 2]), 8)
    layout = search(plan, Costs(forward=[6, 1]), layouts=True, names=names, chunks=(1,))
    assert (layout.plan.placement, layout.layers) == (plan.placement, (1, 1))
    with pytest.raises(ScheduleError, match="each stage has at least one"):
        search(plan, Costs(forward=[6, 1]), layouts=True, names=names, chunks=(1,), copies=False)


def test_a_limit_in_flight_counts_shares_of_the_model_on_copies_too():
    layout = search(of_layers(5, 4, 6), LONG, layouts=True, names=["zb-auto"], memory_limit=3)
    assert layout.plan.cycle > 1
    assert layout.peak <= 3


@st.composite
def models(draw):
    """Layers with costs of their own, on ranks; some are chains, others have a skip."""
    count = draw(st.integers(3, 7))
    ranks = draw(st.integers(2, min(3, count)))
    edges = Edges([(), *(((0, s - 1) if s > 1 and draw(st.booleans()) else (s - 1,)) for s in range(1, count))])
    numbers = st.lists(st.integers(0, 8).map(lambda n: n / 4), min_size=count, max_size=count)
    times = {name: draw(numbers) for name in ("forward", "backward_input", "backward_weight")}
    sizes = {name: draw(numbers) for name in ("residuals", "parameters")}
    costs = Costs(**times, **sizes, deferred=0.5, activation=0.25, communication=draw(st.sampled_from([0, 0.5])))
    plan = replace(of_layers(count, ranks, draw(st.sampled_from([1, 3, 4]))), edges=edges)
    return plan, costs


FIXED = ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
LIMITED = ("zb-auto", "v-auto")


def figures_on_cuts(names, cuts, plan, costs, *limits):
    """The figures of named schedules on some cuts, where they take these and the limits."""
    times = [sum(each) for each in zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)]
    for name, cut in product(names, cuts):
        placement = CATALOGUE[name].plan(plan.ranks, plan.microbatches).placement
        if placement.stages <= plan.stages:
            with suppress(ScheduleError):
                yield figures_of(name, cut(placement, plan.stages if cut is even else times), plan, costs, *limits)


@settings(max_examples=examples(20), deadline=None)
@given(models(), st.sampled_from([None, 0.8, 0.5]), st.sampled_from([None, 1.5, 2]), st.data())
def test_a_layout_is_never_worse_than_named_schedules_on_balanced_cuts(model, share, in_flight, data):
    plan, costs = model
    names = data.draw(st.sampled_from([FIXED, LIMITED, ("1f1b", "zb-auto"), ("zb-v", "v-auto")]))
    limit, fixed = None, [*figures_on_cuts(FIXED, (even, balanced, levelled), plan, costs)]
    if share is not None:
        sizes = [total for _, total, _ in fixed]
        least, most = min(sizes), max(sizes)
        limit = least + share * (most - least) or None
    results = [*figures_on_cuts([n for n in names if n in FIXED], (even, balanced, levelled), plan, costs)]
    ordered = [n for n in names if n in LIMITED]
    results += figures_on_cuts(ordered, (balanced, levelled), plan, costs, in_flight, limit)
    limits = {"memory_limit": in_flight, "memory_limit_bytes": limit}
    within = [cost for cost, total, peak in results if total <= (limit or inf) and peak <= (in_flight or inf)]
    try:
        found = search(plan, costs, **limits, layouts=True, names=names, chunks=(1, 2))
    except ScheduleError:
        assert not within
        return
    assert found.timeline.cost <= min(within, default=inf) * (1 + 1e-9)
    assert found.lower_bound <= found.timeline.cost * (1 + 1e-9)
    verify(found.schedule, found.plan, offload=found.offload)
    programs = lower(found.schedule, found.plan, offload=found.offload)
    assert footprint(programs, found.costs) == found.footprint
    assert limit is None or found.bytes <= limit * (1 + 1e-9)
    assert in_flight is None or found.peak <= in_flight * (1 + 1e-9)
    assert sum(found.layers) == plan.stages


def test_all_schedules_are_tried_and_the_result_is_always_the_same():
    fastest = search(of_layers(7, 2, 4), UNEVEN, layouts=True, effort=EFFORT)
    again = search(of_layers(7, 2, 4), UNEVEN, layouts=True, effort=EFFORT)
    assert (fastest.name, fastest.layers, fastest.plan, fastest.timeline.cost) == (
        again.name,
        again.layers,
        again.plan,
        again.timeline.cost,
    )
    assert fastest.timeline.cost <= min(
        search(of_layers(7, 2, 4), UNEVEN, layouts=True, names=[name]).timeline.cost for name in ("1f1b", "zb-h2")
    )
    assert "layers" in repr(fastest)


def test_residuals_are_moved_where_that_is_faster_than_what_fits():
    plan = of_layers(7, 2, 6)
    costs = replace(UNEVEN, offload=0.1, fetch=0.1, optimizer=0)
    free = search(plan, costs, layouts=True, names=["1f1b", "gpipe"], chunks=(1,))
    limit = 0.8 * free.bytes
    options = {"memory_limit_bytes": limit, "layouts": True, "names": ["1f1b"], "chunks": (1,)}
    found = search(plan, costs, **options)
    assert found.offload is not None
    assert found.bytes <= limit
    moved = simulate(found.schedule, found.plan, found.costs, offload=found.offload)
    assert moved.cost == found.timeline.cost
    every = [figures_of("1f1b", each, plan, costs) for each in levelled(Placement.loop(2), [1] * 7).every()]
    assert found.timeline.cost < min((cost for cost, total, _ in every if total <= limit), default=inf)
    assert "residuals moved" in repr(found)


def least_moved(name, plan, costs, limit):
    """The least cost of a schedule on any cut, with residuals moved where the cut exceeds a limit."""
    best = inf
    for cut in even(Placement.loop(plan.ranks), plan.stages).every():
        grouping = Grouping(plan, cut.layers)
        placed = grouping.placed(cut.placement)
        grouped = grouping.costs(costs, placed)
        for slower in SLOWER:
            with suppress(ScheduleError):
                move = offload(limit, grouped, slower=slower, recompute=True)
                best = min(best, simulate(name, placed, grouped, offload=move).cost)
                break
    return best


def test_layers_move_together_with_residuals():
    """Without a limit layers (4, 3) are fastest, in 65 bytes. In 52, with residuals moved, (3, 4) are."""
    times, sizes = [2, 2, 1, 4, 4, 1, 0.2], {"residuals": [4, 8, 8, 4, 4, 1, 8], "parameters": [0, 2, 4, 0, 2, 4, 2]}
    costs = Costs(times, times, times, communication=0.1, activation=1, **sizes, offload=2, fetch=0.5, optimizer=0)
    plan, options = of_layers(7, 2, 6), {"layouts": True, "names": ["1f1b"], "chunks": (1,)}
    found = search(plan, costs, memory_limit_bytes=52, **options)
    assert found.offload is not None
    assert found.bytes <= 52
    assert found.layers == (3, 4)
    assert found.timeline.cost == pytest.approx(least_moved("1f1b", plan, costs, 52)) == pytest.approx(180.8)


def test_copies_are_not_free_where_nothing_says_what_they_take():
    plan, costs = of_layers(7, 2, 6), replace(UNEVEN, optimizer=0)
    options = {"layouts": True, "names": ["1f1b"], "chunks": (1,)}
    limit = 0.9 * search(plan, costs, **options).bytes
    layout = search(plan, costs, memory_limit_bytes=limit, **options)
    programs = lower(layout.schedule, layout.plan, offload=layout.offload)
    assert not any(isinstance(effect, Offload) for program in programs.values() for effect in program)


def test_the_hosts_time_is_a_number():
    with pytest.raises(TypeError, match="search: host must be float, not True"):
        search(of_layers(4, 2, 2), layouts=True, host=True)


@one_in(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": False, "host": 0.1}, "host is the time of a piece beside its layers: give it with layouts=True"),
        ({"host": -1.0}, "host must be a time of at least 0, not -1"),
        ({"recut": False}, "layouts are cuts of the plan's stages into others: leave recut=False out"),
        (
            {"names": ["zb-v"]},
            "zb-v: no stages are made of 3 layers on 2 ranks: each stage has at least one; try",
        ),
        ({"memory_limit_bytes": 1}, "no schedule that is known keeps to 1 B on a rank: the least is"),
        ({"memory_limit": 0.1}, r"keeps to 0\.1 microbatches in flight: the least is"),
    ],
)
def test_what_no_layout_can_be_is_refused(options, message):
    costs = Costs(parameters=10, residuals=1)
    with pytest.raises(ScheduleError, match=message):
        search(of_layers(3, 2, 2), costs, **{"layouts": True, **options})


def check_bits(layout, pipeline, params, batch, target):
    """Compare a step of a layout on `Local` with that of `Reference`."""
    results = [
        fpipe.value_and_grad(pipeline, layout.schedule, layout.plan, handler=handler)(params, batch, target)
        for handler in (handlers.Local(), handlers.Reference())
    ]
    assert torch.equal(results[0][0], results[1][0])
    for stage, tree in results[0][1].items():
        assert all(torch.equal(tree[name], results[1][1][stage][name]) for name in tree)


@thorough
def test_what_was_found_for_a_profile_runs_with_the_bits_of_the_reference():
    fine, _, costs = profiled([1, 2, 3, 4, 5])
    found = search(fine.plan(Placement([0, 0, 0, 1, 1, 1]), 4), costs, layouts=True)
    points = interop.split_points(fine)
    torch.manual_seed(0)
    options = {"example": torch.randn(2, 4), "loss": nn.functional.mse_loss}
    pipeline, params = interop.split(Skipping(), at=[points[cut - 1] for cut in found.cuts], **options)
    batch, target = torch.randn(8, 4), torch.randn(8, 3)
    check_bits(found, pipeline, params, batch, target)


def test_copies_of_an_encoder_run_with_the_bits_of_the_reference():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    model = nn.Sequential(encoder, *[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    layers, _ = interop.from_modules(model, at=range(1, len(model)), loss=nn.functional.mse_loss)
    layout = search(layers.plan(of_layers(5, 3, 6).placement, 6), LONG, layouts=True)
    assert layout.plan.placement == Placement([(0, 1), 2])
    pipeline, params = interop.from_modules(model, at=layout.cuts, loss=nn.functional.mse_loss)
    batch, target = torch.randn(12, 6), torch.randn(12, 8)
    check_bits(layout, pipeline, params, batch, target)


SMALL = Costs(residuals=10, parameters=10, offload=0.05, fetch=0.05)


@thorough
def test_more_schedules_never_hide_one_that_keeps_to_the_limit():
    """DualPipe is faster, and its parameters alone exceed the limit."""
    one = search(of_layers(8, 4, 8), SMALL, memory_limit_bytes=140, layouts=True, names=["1f1b"])
    two = search(of_layers(8, 4, 8), SMALL, memory_limit_bytes=140, layouts=True, names=["dualpipe", "1f1b"])
    assert (one.timeline.cost, one.bytes) == (two.timeline.cost, two.bytes) == (66, 140)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"memory_limit_bytes": 1}, "rank 0 needs 20 B for a microbatch"),
        ({"memory_limit": 0.1}, "memory_limit is 0.1 on rank 0: at least 1"),
    ],
)
def test_the_reason_of_a_schedule_that_orders_is_told(limits, message):
    with pytest.raises(ScheduleError, match=message):
        search(of_layers(4, 2, 4), Costs(residuals=10), layouts=True, names=["zb-auto"], **limits)


def test_frozen_layers_share_no_residuals():
    plan, shared = replace(of_layers(4, 2, 4), trained={3}), Shared(3, (Residuals(0, 0), Residuals(1, 0)))
    found = search(plan, Costs(residuals=10, shared=(shared,)), layouts=True, names=["1f1b"])
    assert found.bytes == 10


def test_layers_of_a_stage_may_read_different_parts_of_an_output():
    plan = Plan(Placement([0, 1, 1]), 1, Edges([(), (0,), (0, 1)]))
    costs = Costs(activation=[10, 1, 1], reads={(0, 1): 6.0, (0, 2): 3.0})
    assert Grouping(plan, (1, 2)).costs(costs, Plan(Placement.loop(2), 1)).reads == {(0, 1): 9.0}


def test_the_bound_counts_slices():
    found = search(replace(of_layers(4, 2, 4), slices=4), Costs(), layouts=True, names=["seq-1f1b"])
    assert found.lower_bound == 4 * 4 * 2 * 3
    assert found.timeline.cost >= found.lower_bound


@pytest.mark.parametrize(
    ("slice_scale", "work"),
    [
        ([0.5, 0.25], 4 * 3 * 0.75),
        ({"forward": [0.5, 0.25]}, 4 * (0.75 + 2 * 2)),
        ({"forward": [[0.5, 0.25], [], [0.5, 0.25], [2, 2]], "backward_input": [0.5, 0.25]}, 7.5 + 4 * (0.75 + 2)),
    ],
)
def test_the_bound_counts_factors_of_slices_whatever_their_mean(slice_scale, work):
    """The work of a microbatch on all layers, in both slices: eight times, on two ranks."""
    plan, costs = replace(of_layers(4, 2, 8), slices=2), Costs(slice_scale=slice_scale)
    found = search(plan, costs, layouts=True, names=["seq-1f1b"])
    assert found.lower_bound == 8 * work / 2
    assert found.lower_bound <= sum(found.timeline.busy) / 2 <= found.timeline.cost


def grouped_in_slices(costs, layers=(2, 2), trained=None, host=0.0):
    plan = replace(of_layers(4, 2, 4), slices=2, trained=trained)
    grouping = Grouping(plan, layers, host)
    placed = grouping.placed(Placement.loop(len(layers)))
    grouped = grouping.costs(costs, placed)
    grouped.check(placed)
    return grouped


def test_slices_of_a_stage_share_what_those_of_its_layers_share():
    """The second slices of two layers have 8 bytes in common, the first ones none."""
    shared = [Shared(8, (Residuals(0, 0, 1), Residuals(1, 0, 1)))]
    for factors in ([1, 1], [[1, 1], [], [1, 1], []]):
        costs = grouped_in_slices(Costs(residuals=10, slice_scale={"residuals": factors}, shared=shared))
        assert [costs.bytes(Residuals(s, 0, t)) for s in (0, 1) for t in (0, 1)] == pytest.approx([20, 12, 20, 20])


def test_slices_of_a_stage_take_the_time_of_those_of_its_layers():
    """With the host's time, which no slice has more of; of frozen layers, none."""
    slice_scale = {"forward": [[0.5, 1.5], [], [], []], "backward_weight": [[0.5, 1.5], [0.8, 1.2], [1, 1], [1, 1]]}
    costs = Costs(forward=2, backward_input=1, backward_weight=5, slice_scale=slice_scale)
    grouped = grouped_in_slices(costs, host=0.25)
    assert [grouped.time(Forward(0, 0, t)) for t in (0, 1)] == pytest.approx([3.25, 5.25])
    frozen = grouped_in_slices(replace(costs, backward_input=0), trained={1, 3})
    assert [frozen.time(BackwardWeight(0, 0, t)) for t in (0, 1)] == pytest.approx([4, 6])


def test_slices_of_a_cut_into_other_stages_take_the_time_of_their_parts():
    """The first of two stages is the first of three and half of the second."""
    costs = Costs(forward=[2, 4, 2], slice_scale={"forward": [[0.5, 1.5], [], [1, 1]]})
    into = recut(costs, stages=3, into=2)
    assert [into.time(Forward(s, 0, t)) for s in (0, 1) for t in (0, 1)] == pytest.approx([3, 5, 4, 4])


def test_slices_have_collectives_of_their_own():
    slice_scale = {"forward": [0.5, 1.5], "collectives of forward": [[0.8, 1.2], [], [1, 1], [1, 1]]}
    costs = Costs(forward=4, collectives={Forward: 1}, slice_scale=slice_scale)
    assert [costs.collective(Forward(s, 0, t)) for s in (0, 1) for t in (0, 1)] == pytest.approx([0.8, 1.2, 1, 1])
    grouped = grouped_in_slices(costs)
    assert [grouped.collective(Forward(0, 0, t)) for t in (0, 1)] == pytest.approx([1.8, 2.2])
    assert lower_bound(replace(of_layers(4, 4, 4), slices=2), costs) >= 4 * (2 + 4)
    assert Costs.from_json(costs.as_json()) == costs
