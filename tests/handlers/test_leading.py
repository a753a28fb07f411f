"""Ranks run the first forwards of a step before the last rank has come to it; and it may yet be refused, or fail."""

import re

import pytest

from fpipe import Placement, Plan, lower, schedules
from fpipe.effects import Activation
from fpipe.programs.leading import leading
from fpipe.programs.lowering import forward_only
from fpipe.schedules.catalogue import CATALOGUE
from tests.support import leading_jobs
from tests.support.combinations import sample

SAID = {
    "nothing": r"^$",
    "target": r"^$",
    "batch": r"^$",
    "params": "params has no entry for it",
    "rng": "rank 0 and rank 3 were called with different rng=",
    "raises": "rank 1, stage 1, microbatch 0: Forward raised ArithmeticError: at once",
    "interrupt": "stopped",
    "elsewhere": "rank 3 came to another step than rank 0",
    "program": "rank 1 came to another step than rank 0",
}
LEADING = {"raises": 1, "interrupt": 1, "batch": 0, "program": 0}
"""By change the last rank that runs a forward before the late one has come; rank 2 for the others."""


@pytest.mark.parametrize("schedule", sample(["zb_h2", "gpipe", "one_f_one_b"], ["zb_h2"]))
def test_a_step_to_which_the_last_rank_comes_late(schedule, pools):
    """The ranks before it have run a forward each, whatever becomes of the step; the next one has the reference's bits.

    A change of signatures on the last rank alone is an ordinary step.
    """
    outcomes = pools(4).run(leading_jobs.late, 4, schedule)
    for change, *ranks in zip(leading_jobs.CHANGES, *outcomes, strict=True):
        late, *_ = ranks[-1]
        for rank, (_, first, error, differences) in enumerate(ranks):
            assert differences == [], (change, rank)
            assert re.search(SAID[change], error), (change, rank, error)
            if rank <= LEADING.get(change, 2):
                assert first < late, (change, rank)


def test_what_leads_is_what_ranks_run_before_the_last_one_is_there():
    """On a chain, rank r runs p - 1 - r forwards until the last rank has its first input."""
    p, m = 4, 12
    for schedule, warm_up in (
        (schedules.zb_h2, [7, 5, 3]),
        (schedules.one_f_one_b, [4, 3, 2]),
        (schedules.gpipe, [m] * 3),
    ):
        found = leading(lower(schedule, Plan(Placement.loop(p), m)))
        counts = [min(p - 1, count) for count in warm_up]
        assert found == {(Activation(r, k), (r, r + 1)) for r in range(p - 1) for k in range(counts[r])}


@pytest.mark.parametrize("name", CATALOGUE)
def test_only_activations_lead(name):
    entry = CATALOGUE[name]
    plan = entry.plan(4, 8)
    programs = lower(entry.schedule(plan), plan)
    assert {type(value) for value, _ in leading(programs)} == {Activation}
    assert leading(forward_only(programs)) == frozenset()


def test_replicas_do_not_lead():
    assert leading(lower(schedules.gpipe, Plan(Placement.loop(2), 4, replicas=2))) == frozenset()
