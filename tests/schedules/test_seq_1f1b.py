"""Seq1F1B and its split form against their closed forms (Sun et al., arXiv 2406.03488)."""

from inspect import cleandoc

import pytest

from fpipe import Costs, Placement, Plan, ScheduleError, draw, schedules, simulate, verify
from fpipe.costs import Shared
from fpipe.effects import Activation, Carry, Residuals
from fpipe.schedules import gpipe, lower_bound, one_f_one_b, seq_1f1b, seq_zb
from fpipe.schedules.slice_costs import of_slice
from tests.support.combinations import EFFORT, combined, sample

RANKS, SLICES = sample([2, 3, 4, 8], [2, 4]), sample([1, 2, 3, 4], [1, 2, 4])
TIMES = [(1, 1, 1), (2, 3, 1), (4, 4, 2)]  # F, B, W of a whole microbatch, W <= F


def timeline(schedule, ranks, slices, microbatches, times, **costs):
    plan = Plan(Placement.loop(ranks), microbatches, slices=slices)
    verify(schedule, plan)
    whole = Costs(forward=times[0], backward_input=times[1], backward_weight=times[2], **costs)
    return simulate(schedule, plan, of_slice(whole, slices))


def test_the_last_rank_runs_one_slice_ahead():
    """Four ranks, four microbatches in two slices; each rank before the last runs one more ahead."""
    assert draw(seq_1f1b, Plan(Placement.loop(4), 4, slices=2)).splitlines()[-1] == (
        "rank 3  .    .    .    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 F2.0 B1.0 F2.1 B2.1 F3.0 B2.0 F3.1 B3.1 B3.0"
    )


@combined(ranks=RANKS, slices=SLICES, microbatches=[1, 2, 4, 16, 32], times=TIMES)
def test_fused(ranks, slices, microbatches, times):
    """m Σ + (p - 1) Σ / s, in flight p - 1 - r + s slices, or all."""
    line, count = timeline(seq_1f1b, ranks, slices, microbatches, times), microbatches * slices
    assert line.cost == pytest.approx(microbatches * sum(times) + (ranks - 1) * sum(times) / slices)
    in_flight = [peak * slices for peak in line.peak_in_flight]
    assert in_flight == pytest.approx([min(ranks - 1 - r + slices, count) for r in range(ranks)])


@combined(ranks=RANKS, slices=SLICES, microbatches=[1, 2, 3, 4, 8, 32], times=TIMES)
def test_split(ranks, slices, microbatches, times):
    """m Σ + (p - 1)(F + B - W) / s for W <= F and m s >= p - 1 + s, else more; in flight p - 1 + s slices, or all."""
    line = timeline(seq_zb, ranks, slices, microbatches, times)
    forward, inputs, weight = times
    form = microbatches * sum(times) + (ranks - 1) * (forward + inputs - weight) / slices
    if microbatches * slices >= ranks - 1 + slices:
        assert line.cost == pytest.approx(form)
    else:
        assert line.cost > form * (1 + 1e-9)
    assert [peak * slices for peak in line.peak_in_flight] == pytest.approx(
        [min(ranks - 1 + slices, microbatches * slices)] * ranks
    )


@combined(ranks=[1, 2, 4], microbatches=[1, 2, 5])
def test_one_slice_is_1f1b(ranks, microbatches):
    plan = Plan(Placement.loop(ranks), microbatches)
    for rank in range(ranks):
        assert list(seq_1f1b(rank, plan)) == list(one_f_one_b(rank, plan))


@combined(name=["gpipe", "seq_1f1b", "seq_zb"], ranks=[1, 2, 5], slices=[1, 2, 3], microbatches=[1, 2, 7])
def test_every_plan_is_right(name, ranks, slices, microbatches):
    schedule = getattr(schedules, name)
    plan = Plan(Placement.loop(ranks), microbatches, slices=slices)
    assert schedules.lower_bound(plan, Costs()) <= simulate(schedule, plan).cost + 1e-9
    assert verify(schedule, plan).effects == verify(schedule, plan, transport="rendezvous").effects


def test_gpipe_takes_slices():
    assert draw(gpipe, Plan(Placement.loop(2), 2, slices=2)) == cleandoc(
        """
        rank 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 B0.0 B1.1 B1.0
        rank 1  .    F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0
        """
    )


def test_later_slices_take_longer():
    """With causal attention: the simulation takes a factor for each slice."""
    plan = Plan(Placement.loop(1), 2, slices=2)
    assert simulate(seq_1f1b, plan, Costs(slice_scale=[0.5, 1.5])).makespan == simulate(seq_1f1b, plan).makespan == 12
    assert simulate(seq_1f1b, plan, Costs(slice_scale=[1, 3])).makespan == 24
    with pytest.raises(ScheduleError, match="slice_scale has 3 entries, the plan 2 slices"):
        simulate(seq_1f1b, plan, Costs(slice_scale=[1, 2, 3]))


def test_each_cost_has_factors_of_its_own():
    """By stage, or the same for all: two forwards of 1 and 3, and two backwards of 2 and 2, for two microbatches."""
    plan = Plan(Placement.loop(1), 2, slices=2)
    assert simulate(seq_1f1b, plan, Costs(slice_scale={"forward": [1, 3]})).makespan == 2 * (1 + 3 + 2 + 2)
    by_stage = Costs(residuals=10, slice_scale={"forward": [[1, 3]], "residuals": [[1, 2]]}, prepared=5)
    assert simulate(seq_1f1b, plan, by_stage).makespan == 16
    assert verify(seq_1f1b, plan, costs=by_stage).peak_bytes == (5 + 10 + 20,)
    assert Costs.from_json(by_stage.as_json()) == by_stage
    with pytest.raises(ScheduleError, match="slice_scale of forward has 3 entries, the plan 2 slices"):
        simulate(seq_1f1b, plan, Costs(slice_scale={"forward": [1, 2, 3]}))
    with pytest.raises(ScheduleError, match="factors of 2 stages, the plan 1"):
        simulate(seq_1f1b, plan, Costs(slice_scale={"forward": [[1, 2], [1, 2]]}))
    with pytest.raises(ScheduleError, match="factors of 'gather': it takes those of backward"):
        Costs(slice_scale={"gather": [1, 2]})


def test_shared_memory_of_slices_with_sizes_of_their_own():
    """The second slice's residuals are all that the first one carries, and five bytes more."""
    plan = Plan(Placement.loop(1), 1, slices=2)
    shared = Shared(3, (Carry(0, 0, 0), Residuals(0, 0, 1)))
    costs = Costs(residuals=6, carry=3, slice_scale={"residuals": [2 / 3, 4 / 3], "carry": [1, 0]}, shared=[shared])
    assert verify("gpipe", plan, costs=costs).peak_bytes == (4 + 8,)


def test_a_bound_holds_for_the_shortest_slices():
    plan, costs = Plan(Placement.loop(2), 4, slices=2), Costs(slice_scale={"forward": [[1, 2], [0.5, 1.5]]})
    assert lower_bound(plan, costs) <= simulate(seq_1f1b, plan, costs).cost


@pytest.mark.parametrize(("ranks", "microbatches", "slices", "makespan"), [(4, 4, 2, 27), (4, 2, 4, 27), (8, 4, 4, 55)])
def test_a_bound_counts_what_slices_share_for_none_of_them(ranks, microbatches, slices, makespan):
    """Nearly all residuals of a microbatch are of all of its slices."""
    plan = Plan(Placement.loop(ranks), microbatches, slices=slices)
    shared = [Shared(9.9, tuple(Residuals(s, 0, t) for t in range(slices))) for s in range(ranks)]
    costs = Costs(residuals=10, slice_scale={"residuals": [1] * slices}, shared=shared)
    peak = max(verify(seq_zb, plan, costs=costs).peak_bytes)
    assert simulate(seq_zb, plan, costs).makespan == makespan
    assert lower_bound(plan, costs, memory_limit_bytes=peak) <= makespan


def test_a_bound_counts_what_slices_keep_alone():
    """A microbatch in 2 slices, each of 2 bytes, waits for memory that holds one of them."""
    plan = Plan(Placement.loop(2), 4, slices=2)
    shared = [Shared(1, (Activation(0, 0, 0), Residuals(1, 0, 0)))]
    costs = Costs(residuals=2, slice_scale={"residuals": [1, 1.5]}, shared=shared)
    whole = Costs(residuals=2)
    for limit in (4, 8):
        bounds = [lower_bound(plan, each, memory_limit_bytes=limit) for each in (costs, whole)]
        assert bounds[0] == bounds[1]
    assert lower_bound(plan, costs, memory_limit_bytes=2) > lower_bound(plan, costs)


def test_a_bound_holds_where_one_stage_alone_has_factors():
    plan, costs = Plan(Placement.loop(2), 4, slices=2), Costs(slice_scale={"forward": [[0.5, 1.5], []]})
    assert 8 * 3 <= lower_bound(plan, costs) <= simulate(seq_1f1b, plan, costs).cost


def test_a_search_takes_schedules_with_slices_where_the_plan_has_them():
    sliced, whole = (
        {found.name for found in schedules.pareto(Plan(Placement.loop(2), 4, slices=count), Costs(), effort=EFFORT)}
        for count in (2, 1)
    )
    assert sliced <= {"gpipe", "seq-1f1b", "seq-zb"}
    assert not {"seq-1f1b", "seq-zb"} & whole


def test_refusals():
    with pytest.raises(ScheduleError, match="slices must be a whole number of at least 1, not 0"):
        Plan(Placement.loop(2), 2, slices=0)
    with pytest.raises(ScheduleError, match="1f1b takes no slices: leave them out, or take one of gpipe, seq-1f1b"):
        schedules.CATALOGUE["1f1b"].plan(2, 4, slices=2)
    with pytest.raises(ScheduleError, match=r"of slice 1 comes later: .* such as schedules\.seq_1f1b"):
        verify(one_f_one_b, Plan(Placement.loop(2), 2, slices=2))
    with pytest.raises(ScheduleError, match="seq_1f1b wants one stage on each rank"):
        verify(seq_1f1b, Plan(Placement.v(2), 2, slices=2))
