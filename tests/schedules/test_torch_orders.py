"""Compute orders are torch.distributed.pipelining's own, where the two share a schedule and a plan."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from fpipe import Placement, Plan
from fpipe.interop.torch_csv import to_csv
from fpipe.schedules.dualpipe import dualpipe_v
from fpipe.schedules.gpipe import gpipe
from fpipe.schedules.interleaved import interleaved_1f1b
from fpipe.schedules.interleaved_zb import interleaved_zb
from fpipe.schedules.looped_bfs import looped_bfs
from fpipe.schedules.one_f_one_b import one_f_one_b
from fpipe.schedules.zb_v import zb_v
from tests.support.combinations import combined, sample
from tests.support.torch_jobs import stand_ins


def ours(schedule, plan):
    return [row.split(",") for row in to_csv(schedule, plan, communication=False).splitlines()]


def theirs(name, ranks, chunks, microbatches):
    """torch's compute actions, without bubbles."""
    stages = stand_ins(ranks, chunks)
    single = issubclass(getattr(torch_schedules, name), torch_schedules.PipelineScheduleSingle)
    table = getattr(torch_schedules, name)(stages[0] if single else stages, microbatches).pipeline_order
    return [[str(a) for a in table[rank] if a is not None and a.is_compute_op] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_gpipe(ranks, microbatches):
    plan = Plan(Placement.loop(ranks), microbatches)
    assert ours(gpipe, plan) == theirs("ScheduleGPipe", ranks, 1, microbatches)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_1f1b_but_for_torchs_last_rank(ranks, extra):
    """torch's table starts at microbatch 1 on the last rank; its runtime doesn't."""
    plan = Plan(Placement.loop(ranks), ranks + extra)
    *found, last = ours(one_f_one_b, plan)
    *expected, wrong = theirs("Schedule1F1B", ranks, 1, ranks + extra)
    assert found == expected
    assert wrong[0] == f"{ranks - 1}F1" != last[0]


@combined(name=["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"], ranks=[1, 2, 3, 4, 8], chunks=[1, 2, 3, 4])
def test_interleaved(name, ranks, chunks):
    """For every number of microbatches that torch takes: one that its number of rounds divides."""
    schedule = interleaved_1f1b if name == "ScheduleInterleaved1F1B" else interleaved_zb
    divided = [m for m in range(1, 3 * ranks + 2) if m % max(1, m // ranks) == 0]
    for microbatches in sample(divided, {1, ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks}):
        plan = Plan(Placement.loop(ranks, chunks), microbatches)
        assert ours(schedule, plan) == theirs(name, ranks, chunks, microbatches), microbatches


@combined(chunks=[1, 2, 3], ranks=[1, 2, 4], microbatches=[1, 4, 6])
def test_looped_bfs_but_for_the_order_of_backwards(ranks, chunks, microbatches):
    """torch runs a stage's backwards from the last microbatch to the first; here sums keep their order."""
    for found, expected in zip(
        ours(looped_bfs, Plan(Placement.loop(ranks, chunks), microbatches)),
        theirs("ScheduleLoopedBFS", ranks, chunks, microbatches),
        strict=True,
    ):
        half = chunks * microbatches
        runs = [expected[i : i + microbatches] for i in range(half, 2 * half, microbatches)]
        assert found == expected[:half] + [cell for run in runs for cell in reversed(run)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_zb_v(ranks):
    for microbatches in (*range(1, 2 * ranks + 2), 3 * ranks + 1):
        plan = Plan(Placement.v(ranks), microbatches)
        assert ours(zb_v, plan) == theirs("ScheduleZBVZeroBubble", ranks, 2, microbatches), microbatches


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_dualpipe_v(ranks, extra):
    plan = Plan(Placement.v(ranks), 2 * ranks + extra)
    assert ours(dualpipe_v, plan) == theirs("ScheduleDualPipeV", ranks, 2, 2 * ranks + extra)
