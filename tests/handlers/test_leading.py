"""Ranks run the first forwards of a step before the last rank has come to it; and it may yet be refused, or fail."""

import re
from dataclasses import replace

import pytest

from fpipe import Placement, Plan, lower, schedules
from fpipe.effects import Activation
from fpipe.programs.leading import leading
from fpipe.programs.lowering import forward_only
from fpipe.schedules.catalogue import CATALOGUE
from tests.support import fault_jobs, leading_jobs
from tests.support.combinations import few, one_in, sample, thorough

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
FEW = ("nothing", "batch", "raises")


@one_in(3)
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("zb_h2", leading_jobs.CHANGES),
        *[(schedule, few(leading_jobs.CHANGES, FEW)) for schedule in ("interleaved_1f1b", "zb_v", "seq_1f1b")],
        *[(schedule, leading_jobs.CHANGES) for schedule in sample(["gpipe", "one_f_one_b", "seq_zb"], [])],
    ],
)
def test_a_step_to_which_the_last_rank_comes_late(schedule, changes, pools):
    """The ranks before it have run a forward each, whatever becomes of the step; the next one has the reference's bits.

    A change of signatures on the last rank alone is an ordinary step. In a V, the first rank has the target.
    """
    outcomes = pools(4).run(leading_jobs.late, 4, schedule, changes)
    leading = LEADING | ({"target": 0} if schedule == "zb_v" else {})
    for change, *ranks in zip(changes, *outcomes, strict=True):
        late, *_ = ranks[-1]
        for rank, (_, first, error, differences) in enumerate(ranks):
            assert differences == [], (change, rank)
            assert re.search(SAID[change], error), (change, rank, error)
            if rank <= leading.get(change, 2):
                assert first < late, (change, rank)


@thorough
@pytest.mark.parametrize("schedule", sample(["zb_h2", "zb_v", "interleaved_1f1b", "seq_1f1b"], ["zb_h2"]))
def test_a_step_of_replicas_to_which_their_last_ranks_come_late(schedule, pools):
    """Rank 0 of each replica has run a forward, whatever becomes of the step."""
    changes = ("nothing", "params", "raises", "rng", "target")
    says = SAID | {"params": "params has no entry for it|can't run the step", "raises": "ArithmeticError: at once"}
    says["rng"] = r"were called with different rng="
    outcomes = pools(4).run(leading_jobs.late, 2, schedule, changes, 2)
    for change, *processes in zip(changes, *outcomes, strict=True):
        late = min(begun for begun, *_ in processes[1::2])
        for process, (_, first, error, differences) in enumerate(processes):
            assert differences == [], (change, process)
            assert re.search(says[change], error), (change, process, error)
            if process % 2 == 0 and change in ("nothing", "params", "rng"):
                assert first < late, (change, process)


@one_in(2)
@pytest.mark.parametrize(
    ("schedule", "victim"),
    sample([(s, v) for s in ("zb_h2", "zb_v", "interleaved_1f1b") for v in (0, 1, 2)], [("zb_h2", 1), ("zb_v", 0)]),
)
def test_a_leading_rank_that_is_killed_is_named(schedule, victim, fresh_pool):
    """By all others, and at once, though not all of them have begun the step."""
    outcomes = fresh_pool(4).outcomes(leading_jobs.killed, 4, schedule, victim)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            text, seconds = outcome.value
            assert fault_jobs.blamed(text) == f"rank {victim}", text
            assert seconds < 10.0, seconds  # its handler's limit is 20


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


def test_replicas_lead_unless_they_gather_params():
    plan = Plan(Placement.loop(2), 4)
    alone = leading(lower(schedules.gpipe, plan))
    plan = replace(plan, replicas=2)
    assert leading(lower(schedules.gpipe, plan)) == alone
    assert leading(lower(schedules.gpipe, plan, resident=1)) == frozenset()
