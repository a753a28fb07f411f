"""Overlaps whose stages hold collectives: bits, the order of the collectives, and errors."""

import re

import pytest

from tests.support import braid_jobs
from tests.support.combinations import ALL, combined, few, one_in, thorough

PLAIN = "p w p w p w p w"
"""Two parts with two sums each, one part after the other."""
IN_TURNS = "p p w p w p w w"
"""The backward posts, then the forward; each computes on while a sum of the other travels."""


def overlaps(log):
    """The posts and waits of each overlap, without their numbers."""
    return [re.sub(r"\d+", "", each).strip() for each in re.findall(r"\(([^)]*)\)", log)]


SINGLY = [
    ("plain", "dualpipe", "nothing"),
    ("dropout", "dualpipe_v", "everything"),
    ("exchange", "overlap", "nothing"),
    ("unequal", "deferred", "everything"),
    ("stateful", "overlap", "everything"),
    ("loss", "halves", "everything"),
]
SOME = few(
    [
        *SINGLY,
        ("dropout", "halves", "nothing"),
        ("exchange", "dualpipe", "everything"),
        ("unequal", "dualpipe_v", "nothing"),
        ("loss", "deferred", "nothing"),
    ],
    SINGLY,
)
"""Each kind, schedule and policy at least once; all of them under FPIPE_TESTS=all."""


@one_in(4)
@combined(
    # copies of a stage have no state
    lambda kind, schedule, policy: (
        (kind, schedule) != ("stateful", "dualpipe") and (ALL or (kind, schedule, policy) in SOME)
    ),
    every=True,
    kind=tuple(braid_jobs.FUNCTIONS_OF),
    schedule=("dualpipe", "dualpipe_v", "overlap", "halves", "deferred"),
    policy=tuple(braid_jobs.POLICIES),
)
def test_bits_are_those_of_the_parts_one_after_the_other(kind, schedule, policy, pools):
    for apart, reference, log, unbraided, eager in pools(2).run(braid_jobs.bits_of_a_braid, kind, schedule, policy):
        assert apart == []
        assert reference == []
        assert log.count("(") > 1
        assert sorted(log.split()) == sorted(unbraided.split())
        assert log.count("p") == eager.count("p")  # no policy repeats one


@thorough
@pytest.mark.parametrize("schedule", few(["dualpipe_v", "halves"], ["halves"]))
def test_sums_travel_while_the_other_part_computes_in_one_order_on_all_processes(schedule, pools):
    first, second = pools(2).run(braid_jobs.bits_of_a_braid, "plain", schedule, "everything")
    _, _, log, unbraided, _ = first
    assert first == second
    whole = [each for each in overlaps(log) if each.count("p") == 4]
    assert len(whole) > 2
    assert set(whole) == {IN_TURNS}
    assert {each for each in overlaps(unbraided) if each.count("p") == 4} == {PLAIN}


@thorough
@pytest.mark.parametrize("schedule", few(["dualpipe_v", "dualpipe"], ["dualpipe"]))
def test_ranks_of_a_pipeline_that_share_their_stages(schedule, pools):
    assert pools(4).run(braid_jobs.bits_of_a_grid, schedule) == [[[], []]] * 4


@pytest.mark.parametrize("part", ["the forward", "the backward"])
def test_a_failure_names_its_part(part, pools):
    kind, m = {"the forward": ("Forward", 1), "the backward": ("Backward", 0)}[part]
    expected = f"rank 0, stage 0, microbatch {m}: {kind} raised ArithmeticError: {part} is refused"
    for text in pools(2).run(braid_jobs.failure_of, part):
        assert text.startswith(expected)


A_SUM = r"all_reduce\(float32\[\d, 4\], reduce_op=sum, \d+ bytes\) in forward"
DIFFERENT = {
    "dependence": rf"collective 1 is {A_SUM}, turn 1 on rank 0, {A_SUM}, turn 0 on rank 1\. The forward and",
    "functions": rf"collective 0 is {A_SUM}, turn 0 on rank 0, {A_SUM}, not in turns on rank 1\. The forward and",
    "schedule": r"would meet in different orders: of the effects that compute, number 1 is "
    r"Forward\(stage=0, microbatch=1\) on rank 0 and Backward\(stage=0, microbatch=0\) on rank 1",
}


@pytest.mark.parametrize("which", DIFFERENT)
def test_another_order_of_collectives_is_one_error_on_all_ranks(which, pools):
    for text in pools(2).run(braid_jobs.different, which):
        assert text.startswith("rank 0, stage 0, microbatch 0: its collectives over ranks [0, 1] ")
        assert re.search(DIFFERENT[which], text), text


@pytest.mark.parametrize(("function", "turns"), [(braid_jobs.plain, 2), (braid_jobs.both, 1)])
def test_a_function_in_steps_is_the_same_text_with_a_yield_where_a_turn_ends(function, turns, pools):
    """Sums of which neither depends on the other are posted in one turn, wherever their results are used."""
    for whole, steps in pools(2).run(braid_jobs.texts, function)[0]:
        lines = steps.splitlines()
        assert [line for line in lines if line.strip() != "yield"] == whole.splitlines()
        at = [i for i, line in enumerate(lines) if line.strip() == "yield"]
        assert len(at) == turns
        for i in at:
            (waited,) = re.fullmatch(r"    n\d+ = \w+\((n\d+)\)", lines[i + 1]).groups()
            assert any(re.fullmatch(rf"    {waited} = \w+\(\w+, 'sum', '.*'\)", line) for line in lines[:i])
        assert all("clear()" not in line for line in lines[at[0] :])
