"""The rules for residuals that are moved to the host, or recomputed."""

import pytest

from fpipe import Costs, Placement, Plan, ScheduleError, lower, verify
from fpipe.effects import Backward, BackwardInput, BackwardWeight, Discard, Fetch, Forward, Offload, Recompute
from fpipe.programs.lowering import forward_only
from fpipe.programs.residuals import moves

F, B, BI, BW = Forward(0, 0), Backward(0, 0), BackwardInput(0, 0), BackwardWeight(0, 0)
OUT, DROP, BACK, AGAIN = Offload(0, 0), Discard(0, 0), Fetch(0, 0), Recompute(0, 0)
ONE = Plan(Placement.loop(1), 1)


def of(*effects):
    return lambda rank, plan: effects


@pytest.mark.parametrize(
    "effects", [(F, OUT, DROP, BACK, B), (F, OUT, DROP, BACK, BI, BW), (F, AGAIN, B), (F, AGAIN, BI, BW)]
)
def test_a_way_to_the_host_and_back_and_a_recomputation_are_right(effects):
    verify(of(*effects), ONE)


@pytest.mark.parametrize(
    ("effects", "message"),
    [
        ((OUT, F, DROP, BACK, B), "Offload.* are not saved yet: it comes once, between forward and backward"),
        ((F, DROP, BACK, B), "Discard.* are on the rank since its forward: it comes once, after their Offload"),
        ((F, OUT, BACK, B), "Fetch.* are on the rank, and posted to the host: it comes once, after their Discard"),
        ((F, OUT, DROP, DROP, BACK, B), "Discard.* are on the host"),
        ((F, OUT, OUT, DROP, BACK, B), "Offload.* are on the rank, and posted to the host"),
        ((F, OUT, DROP, BACK, BACK, B), "Fetch.* are back from the host"),
        ((F, OUT, DROP, BACK, OUT, DROP, BACK, B), "Offload.* are back from the host"),
        ((F, OUT, DROP, B), "Backward.* are on the host: yield their Fetch before it"),
        ((F, OUT, B), "Backward.* posted to the host: yield their Discard and Fetch before it"),
        ((F, OUT, DROP, B, BACK), "Backward.* are on the host"),
        ((F, OUT, DROP, AGAIN, B), "Recompute.* are on the host: it comes once, between forward and backward, where"),
        ((F, AGAIN, AGAIN, B), "Recompute.* are recomputed"),
        ((AGAIN, F, B), "Recompute.* are not saved yet"),
        ((F, B, AGAIN), "Recompute.* are used: its backward has run"),
    ],
)
def test_what_may_not_follow_is_refused(effects, message):
    with pytest.raises(ScheduleError, match=f"rank 0 yields {message}"):
        verify(of(*effects), ONE)


def test_they_belong_to_the_rank_of_the_stage():
    def elsewhere(rank, plan):
        yield from (Forward(rank, 0), *([Recompute(0, 0)] if rank else []), Backward(rank, 0))

    with pytest.raises(ScheduleError, match="only rank 0 may run it"):
        verify(elsewhere, Plan(Placement.loop(2), 1))


def test_peaks_count_what_is_there():
    costs = Costs(residuals=10)

    def peak(*effects):
        return verify(of(*effects), Plan(Placement.loop(1), 2), costs=costs).peak_bytes

    first, second = (Forward(0, 0), Offload(0, 0), Discard(0, 0)), (Forward(0, 1), Backward(0, 1))
    assert peak(Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)) == (20,)
    assert peak(*first, Forward(0, 1), Fetch(0, 0), Backward(0, 0), Backward(0, 1)) == (20,)
    assert peak(*first, Fetch(0, 0), Backward(0, 0), *second) == (10,)
    assert peak(Forward(0, 0), Forward(0, 1), Recompute(0, 0), Backward(0, 0), Backward(0, 1)) == (20,)
    again = (Recompute(0, 0), Backward(0, 0), Recompute(0, 1), Backward(0, 1))
    assert peak(Forward(0, 0), Forward(0, 1), *again) == (10,)


def test_without_a_backward_nothing_is_moved():
    programs = forward_only(lower(of(F, OUT, DROP, BACK, B), ONE))
    assert programs[0].effects == (F,)
    programs = forward_only(lower(of(F, AGAIN, B), ONE))
    assert programs[0].effects == (F,)
    assert not moves(programs[0])


def test_what_is_not_differentiated_has_no_residuals_to_move():
    def moved(rank, plan):
        yield from (Forward(rank, 0), Offload(rank, 0), Discard(rank, 0), Fetch(rank, 0), Backward(rank, 0))

    programs = lower(moved, Plan(Placement.loop(2), 1, trained=[1]))
    assert not moves(programs[0])
    assert moves(programs[1])
