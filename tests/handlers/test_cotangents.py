"""Cotangents by rank: the reference's bits, as many messages as ranks, and programs that the verifier knows."""

from dataclasses import replace

import optree
import pytest
import torch

import fpipe
from fpipe import (
    Costs,
    Edges,
    Output,
    Pipeline,
    Placement,
    Plan,
    ScheduleError,
    Stage,
    handlers,
    lower,
    schedules,
    verify,
)
from fpipe.effects import Backward, Gradient, Send
from fpipe.programs.verifier import check
from fpipe.schedules import from_table
from tests.support import cases, cotangent_jobs
from tests.support.combinations import combined, one_in
from tests.support.jobs import differences

SCHEDULES = ["interleaved_1f1b", "interleaved_zb", "looped_bfs", "zb_v", "v_half", "dualpipe_v", "dualpipe", "zb_h1"]


@one_in(4)
@combined(
    name=cotangent_jobs.CASES,
    schedule=SCHEDULES,
    way=("everything", "nothing", "eager"),
    m=(2, 4),
    handler=("local", "gloo"),
    singly=True,
)
def test_the_reference_has_the_same_bits(pools, name, schedule, way, m, handler):
    if handler == "local":
        assert cotangent_jobs.here(name, schedule, 2, m, way) == []
    else:
        assert pools(2).run(cotangent_jobs.train, name, schedule, 2, m, way) == [[]] * 2


def test_captured_steps_and_one_gradient_of_the_batch_more():
    options = {"capture": True, "argnums": ("params", "batch")}
    case, generator, plan = cotangent_jobs.make("skip", "interleaved_1f1b", 2, 2)
    step, reference = (
        fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, **each)
        for handler, each in ((handlers.Local(), options), (handlers.Reference(), {"argnums": options["argnums"]}))
    )
    expected = reference(case.params, case.batch, case.target)
    for _ in range(3):
        assert differences(step(case.params, case.batch, case.target), expected) == []


HALF, NEXT = 2.0**-24, 1 + 2.0**-23
"""Half of the distance from 1 to the next float32, and this one: a half added to 1 is lost, and two halves are not."""


@one_in(4)
@pytest.mark.parametrize("handler", [handlers.Reference(), handlers.Local()])
@pytest.mark.parametrize(
    ("cotangents", "ranks", "factors", "expected"),
    [
        ("by_consumer", (0, 1, 0, 1, 0), (1.0, HALF, HALF, 0.0), NEXT),  # 4, 3, 2, 1
        ("by_consumer", (0, 1, 0, 1, 0), (HALF, HALF, 1.0, 0.0), 1.0),
        ("by_rank", (0, 1, 0, 1, 0), (HALF, 1.0, HALF, 0.0), NEXT),  # 4 and 2, then 3 and 1
        ("by_rank", (0, 1, 0, 1, 0), (HALF, HALF, 1.0, 0.0), 1.0),
        ("by_rank", (0, 0, 1, 1, 2), (0.0, HALF, HALF, 1.0), NEXT),  # 4, then 3 and 2, then 1
        ("by_rank", (0, 0, 1, 2, 1), (0.0, HALF, 1.0, HALF), NEXT),  # 4 and 2, then 3, then 1
        ("by_rank", (0, 1, 2, 0, 1), (HALF, 1.0, HALF, 0.0), NEXT),  # 4 and 1, then 3, then 2
    ],
)
def test_the_order_of_the_sum(handler, cotangents, ranks, factors, expected):
    """By hand: in float32, three numbers have another sum in another order. Factors are those of stages 1 to 4."""

    def last(p, *outputs):
        *others, x = outputs
        return sum(others) + x * p

    nodes = [Stage(lambda p, x: x * p)]
    nodes += [Stage(lambda p, x: x * p, reads=[Output(0)]) for _ in range(3)]
    nodes.append(Stage(last, reads=[Output(1), Output(2), Output(3), Output(0)]))
    pipeline = Pipeline(nodes, loss=lambda y, t: y.sum(), cotangents=cotangents)
    plan = pipeline.plan(Placement(ranks), 1)
    params = {0: torch.tensor(1.0), **{s: torch.tensor(f) for s, f in enumerate(factors, 1)}}
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler)
    _, grads = step(params, torch.ones(1))
    assert grads[0].item() == expected


def sends(schedule, plan, kind=Gradient):
    effects = (e for program in lower(schedule, plan).values() for e in program)
    return [e for e in effects if isinstance(e, Send) and isinstance(e.value, kind)]


@pytest.mark.parametrize(("ranks", "chunks", "m"), [(2, 2, 4), (2, 4, 2), (3, 3, 3), (4, 1, 4)])
def test_the_number_of_messages(ranks, chunks, m):
    """S stages on R ranks in a loop, each of which reads all before it: of (s, c), those on two ranks; by rank
    min(R - 1, S - 1 - s) for stage s, which is in sum (R - 1)(S - R / 2)."""
    stages = ranks * chunks
    plan = Plan(Placement.loop(ranks, chunks), m, Edges([range(s) for s in range(stages)]))
    by_rank = replace(plan, cotangents="by_rank")
    for schedule in ("interleaved-1f1b", "looped-bfs") if chunks > 1 else ("1f1b", "zb-h1"):
        assert len(sends(schedule, plan)) == m * (stages * (stages - 1) // 2 - ranks * chunks * (chunks - 1) // 2)
        assert len(sends(schedule, by_rank)) == m * (ranks - 1) * (2 * stages - ranks) // 2
        assert len(sends(schedule, by_rank, fpipe.effects.Activation)) == len(sends(schedule, by_rank))
        for transport in ("async", "paired", "rendezvous"):
            verify(schedule, by_rank, transport=transport)
        slow = Costs(communication=2)
        assert fpipe.simulate(schedule, by_rank, slow).makespan <= fpipe.simulate(schedule, plan, slow).makespan


def test_the_default_does_not_depend_on_the_placement():
    """By rank it does, and where each rank has one consumer, the bits are the default's."""
    found = {}
    for cotangents in ("by_consumer", "by_rank"):
        for placement in (Placement.loop(4), Placement.loop(2, 2), Placement.v(2), Placement.loop(1, 4)):
            torch.default_generator.manual_seed(0)
            case = cotangent_jobs.every(4)
            pipeline = case.pipeline.replace(case.pipeline.stages, case.pipeline.loss, cotangents)
            step = fpipe.value_and_grad(
                pipeline, schedules.gpipe, pipeline.plan(placement, 2), handler=handlers.Local(), autodiff="eager"
            )
            found[cotangents, placement] = step(case.params, case.batch, case.target)
    expected = found.pop(("by_rank", Placement.loop(4)))
    alike = {key for key, each in found.items() if differences(each, expected) == []}
    # on one rank, one sum from the highest down is the default's, too
    assert alike == {key for key in found if key[0] == "by_consumer"} | {("by_rank", Placement.loop(1, 4))}
    for each in found.values():
        torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_wrong_programs_are_refused(schedule):
    """Each effect that is left out or doubled; neighbours that change places are refused, or have the same bits."""
    case, generator, plan = cotangent_jobs.make("every", schedule, 2, 2)
    programs = {rank: program.effects for rank, program in lower(generator, plan).items()}
    expected, harmless = cases.reference(case, generator, plan), 0
    for rank, order in programs.items():
        for at in range(rank, len(order), 5):
            for changed in (order[:at] + order[at + 1 :], order[: at + 1] + order[at:]):
                with pytest.raises(ScheduleError):
                    verify(from_table(programs | {rank: changed}), plan)
            swapped = (*order[:at], *order[at : at + 2][::-1], *order[at + 2 :])
            table = from_table(programs | {rank: swapped})
            try:
                verify(table, plan)
            except ScheduleError:
                continue
            step = fpipe.value_and_grad(case.pipeline, table, plan, handler=handlers.Local(), autodiff="eager")
            assert differences(step(case.params, case.batch, case.target), expected) == []
            harmless += 1
    assert harmless


def test_a_rank_runs_backward_from_the_highest_consumer_down():
    """A schedule in another order is refused, though the stages do not read each other."""
    edges = Edges([(), (0,), (0,), (1, 2)])
    order = [fpipe.effects.Forward(s, 0) for s in range(4)] + [Backward(s, 0) for s in (3, 1, 2, 0)]
    placement = Placement([0, 0, 0, 0])
    verify(from_table({0: order}), Plan(placement, 1, edges))
    with pytest.raises(ScheduleError, match=r"Gradient\(stage=0, consumer=2, microbatch=0\)|gradient"):
        verify(from_table({0: order}), Plan(placement, 1, edges, cotangents="by_rank"))


def test_automatic_schedules_keep_that_order():
    edges = Edges([(), (0,), (0,), (1, 2), (1, 2, 3), (0, 4)])
    plan = Plan(Placement.loop(2, 3), 3, edges, cotangents="by_rank")
    for schedule in ("looped-bfs", "interleaved-zb"):
        verify(schedule, plan)
    best = schedules.search(plan, Costs(communication=0.2), chunks=(3,))
    check(lower(best.schedule, best.plan))
    assert best.plan.cotangents == "by_rank"


def test_other_cotangents_are_refused():
    with pytest.raises(ScheduleError, match="'by_consumer' or 'by_rank', not 'rank'"):
        Pipeline([lambda p, x: x], cotangents="rank")
    pipeline = Pipeline([lambda p, x: x * p] * 2, cotangents="by_rank")
    plan = replace(pipeline.plan(Placement.loop(2), 2), cotangents="by_consumer")
    with pytest.raises(ScheduleError, match="cotangents are not the pipeline's"):
        fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handlers.Local())
    assert optree.tree_leaves(pipeline.plan(Placement.loop(2), 2).terms(0, 0)) == [1]
