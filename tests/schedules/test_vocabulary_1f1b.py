"""1F1B over a split vocabulary, against the closed form of Yeung et al., arXiv 2411.05288."""

import pytest

from fpipe import Costs, Edges, Placement, Plan, ScheduleError, simulate, verify
from fpipe.effects import Backward, Forward
from fpipe.schedules import one_f_one_b, vocabulary_1f1b
from tests.support.combinations import combined, sample

RANKS = sample([1, 2, 3, 4, 6, 8], [2, 4])


def plan_of(ranks, microbatches):
    return Plan(Placement.vocabulary(ranks), microbatches, Edges.vocabulary(ranks))


def costs(ranks, block, head, communication=0.0):
    """Costs of a block's F, B and W, and of a head, two thirds of which are its forward; the rest takes no time."""
    none = [0.0] * ranks
    forward, by_input, by_weight = ([*none, *[time] * ranks] for time in block)
    part = head / ranks
    return Costs(
        [*forward, *[2 * part / 3] * ranks, 0],
        [*by_input, *none, 0],
        [*by_weight, *[part / 3] * ranks, 0],
        communication=communication,
    )


def form(ranks, microbatches, block, head):
    return microbatches * (sum(block) + head / ranks) + (ranks - 1) * sum(block)


BLOCKS = [(1, 1, 1), (2, 3, 1), (1, 2, 2)]  # F <= B + W


@combined(ranks=RANKS, microbatches=[1, 4, 16, 32], block=BLOCKS, over=[1, 1.5, 4])
def test_cost(ranks, microbatches, block, over):
    """From B + W = F + V / p on."""
    forward, inputs, weight = block
    head = over * (inputs + weight - forward) * ranks
    line = simulate(vocabulary_1f1b, plan_of(ranks, microbatches), costs(ranks, block, head))
    assert line.cost == pytest.approx(form(ranks, microbatches, block, head))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_small_head_costs_more_than_the_form(block):
    forward, inputs, weight = block
    head = 0.9 * (inputs + weight - forward) * 4
    line = simulate(vocabulary_1f1b, plan_of(4, 16), costs(4, block, head))
    assert line.cost > form(4, 16, block, head) * (1 + 1e-3)


@combined(ranks=RANKS, microbatches=[4, 16, 32], block=[(1, 1, 1), (2, 3, 1), (1, 2, 2)], communication=[0, 0.05])
def test_it_beats_the_head_on_the_last_rank(ranks, microbatches, block, communication):
    """With transfers and other costs too: 1F1B with the head on the last rank takes (m + p - 1)Σ + mV at c = 0."""
    head, work = sum(block) * ranks / 2, sum(block)
    times = costs(ranks, block, head, communication * work)
    line = simulate(vocabulary_1f1b, plan_of(ranks, microbatches), times)
    if ranks > 1:
        assert line.cost < (microbatches + ranks - 1) * work + microbatches * head


@combined(ranks=RANKS, microbatches=[1, 4, 32])
def test_peak(ranks, microbatches):
    """In flight on rank r: p + 1 - r blocks."""
    plan = plan_of(ranks, microbatches)
    verify(vocabulary_1f1b, plan)
    for rank in range(ranks):
        effects = [e for e in vocabulary_1f1b(rank, plan) if e.stage == ranks + rank]
        live = [sum(type(e) is Forward for e in effects[:at]) for at in range(1, len(effects) + 1)]
        done = [sum(type(e) is Backward for e in effects[: at - 1]) for at in range(1, len(effects) + 1)]
        peak = max(a - b for a, b in zip(live, done, strict=True))
        assert peak == min(ranks + 1 - rank, microbatches)


@pytest.mark.parametrize("transport", ["async", "rendezvous"])
def test_transports(transport):
    assert verify(vocabulary_1f1b, plan_of(3, 6), transport=transport).effects


def test_refusals():
    with pytest.raises(ScheduleError, match=r"take Placement\.vocabulary\(2\), and the edges"):
        verify(vocabulary_1f1b, Plan(Placement.loop(2), 2))
    with pytest.raises(ScheduleError, match="one_f_one_b wants one stage on each rank"):
        verify(one_f_one_b, plan_of(2, 2))
