"""A profile by the processes of a handler: the times of gathers and scatters, the same costs in each process."""

from dataclasses import replace

import pytest
import torch

import fpipe
from benchmarks.timed import SlowLink
from fpipe import Placement, handlers, interop, schedules, simulate
from fpipe.effects import Gather, Scatter
from tests.support import grid_jobs
from tests.support.shards import mesh_of

STAGES = grid_jobs.RANKS * grid_jobs.CHUNKS
BYTES = 4 * (grid_jobs.WIDTH**2 + grid_jobs.WIDTH)  # of a stage's parameters
SENT, SECONDS = BYTES / 2, 2e-3  # of a float32 gather, and how long it takes over the link


def profiled(rank, which):
    mesh = mesh_of(grid_jobs.REPLICAS, grid_jobs.RANKS, names=("dp", "pp"))
    backend = SlowLink(SENT / SECONDS)
    handler = handlers.Distributed(mesh["pp"], replicas=mesh["dp"], backend=backend, timeout=30)
    pipeline, _ = grid_jobs.pipeline_and_plan()
    params = grid_jobs.params_of(range(STAGES))
    batch = grid_jobs.batch_of([handler.grid.replica])
    options = {"microbatches": grid_jobs.MICROBATCHES, "repeats": 2, "handler": handler, "autodiff": "eager"}
    try:
        if which == "fails" and rank == 2:
            params = {**params, 3: {"w": torch.ones(3, 3), "b": torch.zeros(3)}}
        if which == "few":
            pipeline, params = fpipe.Pipeline(pipeline.stages[:1], pipeline.loss), {0: params[0]}
        if which == "whole":
            counting = fpipe.Stage(lambda p, s, x: (x @ p["w"] + p["b"], s + 1), stateful=True)
            pipeline = fpipe.Pipeline([counting, *pipeline.stages[1:]], pipeline.loss)
            options["state"] = {0: torch.zeros(())}
        if which == "rows" and rank == 2:
            batch = batch[:1]
        if which in ("sharded", "rows"):
            params = interop.fsdp(params, mesh["dp"])
            batch, options["precision"] = batch.double(), fpipe.Precision(compute=torch.float64, reduce=torch.float32)
        return fpipe.profile(pipeline, params, batch, torch.zeros_like(batch), **options)
    except (fpipe.ScheduleError, fpipe.StageError, fpipe.TransportError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def test_gathers_and_scatters_are_timed_and_predicted(pools):
    costs, *others = pools(4).run(profiled, "sharded")
    assert others == [costs] * 3
    assert costs.replicas == 2
    assert all(2 * SECONDS <= seconds < 10 for seconds in costs.gather)  # in float64
    assert all(SECONDS <= seconds < 10 for seconds in costs.scatter)
    assert costs.parameters == (BYTES,) * STAGES
    assert costs.activation[0] == 2 * grid_jobs.WIDTH * torch.float64.itemsize
    assert min(costs.forward + costs.backward + costs.backward_input + costs.backward_weight) > 0
    plan = fpipe.Plan(Placement.loop(grid_jobs.RANKS, grid_jobs.CHUNKS), grid_jobs.MICROBATCHES, replicas=2)
    timeline = simulate(schedules.interleaved_1f1b, plan, costs, resident=1)
    for kind, seconds in ((Gather, costs.gather), (Scatter, costs.scatter)):
        spans = [span for span in timeline.spans if type(span.effect) is kind]
        assert {span.effect.stage for span in spans} == {*range(STAGES)}
        assert [span.end - span.start for span in spans] == pytest.approx([seconds[s.effect.stage] for s in spans])
    free = replace(costs, gather=0, scatter=0)
    assert timeline.makespan > simulate(schedules.interleaved_1f1b, plan, free, resident=1).makespan
    with pytest.raises(fpipe.ScheduleError, match="the costs are those of 2 replicas, the plan has 3"):
        simulate(schedules.gpipe, replace(plan, replicas=3), costs)


def test_whole_parameters_are_not_gathered(pools):
    costs = pools(4).run(profiled, "whole")[0]
    assert costs.gather == (0,) * STAGES
    assert all(2 * SECONDS <= seconds < 10 for seconds in costs.scatter)  # the sum goes to every replica


def test_what_is_wrong_in_one_process_is_raised_in_all(pools):
    found = pools(4).run(profiled, "fails")
    assert "stage 3" in found[2]
    for rank in (0, 1, 3):
        assert found[rank].startswith("TransportError: rank 0 of replica 1 failed at tracing stages of a profile")
        assert "stage 3" in found[rank]
    for rank, text in enumerate(pools(4).run(profiled, "rows")):
        assert ("failed at splitting the batch of a profile" in text) == (rank != 2)
        assert "too few" in text
    few = pools(4).run(profiled, "few")
    assert all(
        text.startswith("ScheduleError: the handler has 2 ranks in each replica, and the pipeline 1 stage:")
        for text in few
    )


def test_a_handler_that_plays_all_ranks_measures_in_this_process():
    pipeline = fpipe.Pipeline([lambda p, x: x * p, lambda p, x: x * p], loss=lambda y, t: (y - t).sum())
    params = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
    for handler in (handlers.auto(), handlers.Local(), handlers.Reference()):
        costs = fpipe.profile(pipeline, params, torch.ones(4), torch.ones(4), repeats=1, handler=handler)
        assert costs.replicas == 1
        assert min(costs.forward + costs.backward) > 0
