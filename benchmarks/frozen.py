"""Compare steps whose lower stages are frozen: as planned, without a plan of what is trained, and by torch.

    python -m benchmarks.frozen                         # four ranks, the last stage trained
    python -m benchmarks.frozen --trained 2 3 --schedules 1f1b
    python -m benchmarks.frozen --json                  # a list of objects, and nothing else
    python -m benchmarks.frozen --out frozen.json       # and into a file, with the machine

The stages are those of `benchmarks.timed`: eight layers, of which each sleeps 10 ms in its forward, its input gradient
and its weight gradient, and 8 microbatches; tensors, graphs and transfers are real. Ranks that sleep need no cores.

- fpipe: `Pipeline.plan` leaves out the halves of backwards that no trained parameter needs.
- whole: fpipe with a plan of all halves (`trained=None`). Frozen halves take no time there; gradients still travel.
- torch: the same schedule of torch.distributed.pipelining over modules whose lower stages have `requires_grad=False`.
  Its stages agree on what requires a gradient, so that they compute no frozen half either; the order stays.
- search: the schedule that `schedules.search` finds for the trained part of the model, with up to two stages on a rank.

Predictions are `simulate` with the costs of `fpipe.profile`, the host's time for a piece and a measured link
(`benchmarks.predictions`); of torch's step it is that of fpipe's. A round runs every step in turn; times are medians of
the rounds, `ratio` is measured over predicted, and `over_first` over the first step of fpipe, as medians of the rounds'
with quartiles. Before anything is timed, the gradients of the first three are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

import fpipe
from benchmarks import models, predictions, timed
from fpipe import Costs, Pipeline, Placement, Plan, handlers
from fpipe.plan import Schedule
from fpipe.schedules.catalogue import CATALOGUE
from fpipe.schedules.cuts import recut_trained

RANKS = 4
SCHEDULES: dict[str, Any] = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}
WAYS = ("fpipe", "whole", "torch")


class TimedStage(nn.Module):
    """A stage of `benchmarks.timed` as a module."""

    def __init__(self, w: Tensor, seconds: float, is_trained: bool) -> None:
        super().__init__()
        self.w, self.seconds = nn.Parameter(w.clone(), requires_grad=is_trained), seconds

    def forward(self, x: Tensor) -> Tensor:
        return timed.forward(x, self.w, [self.seconds] * 3)


def job(
    rank: int, ranks: int, schedules: Sequence[str], trained: Sequence[int], layer: float, rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """Run one rank: yield the rows, as measured on rank 0."""
    handler = handlers.Distributed(timeout=models.TIMEOUT)
    keys = [*((name, way) for name in schedules for way in WAYS), ("search", "fpipe")]
    steps = {key: step(*key, rank, ranks, trained, layer, handler) for key in keys}
    for name in schedules:
        gradients = [run() for run in (steps[name, way] for way in WAYS)]
        for other in gradients[1:]:
            torch.testing.assert_close(other, gradients[0], rtol=1e-5, atol=0)
    link = predictions.ping(rank)
    host = predictions.Host(handler, ranks, link, models.MICROBATCHES, timed.brief)
    plans = {key: ordered(*key, ranks, trained, models.LAYERS // ranks * layer) for key in keys}
    costs = {key: replace(profile(plans[key][1], trained, layer, handler), communication=link) for key in keys}

    def predict(key: tuple[str, str]) -> predictions.Prediction:
        return predictions.Prediction(fpipe.lower(*plans[key]), costs[key], predictions.HostTimes(host.seconds()))

    results = predictions.compare(steps, predict, rounds)
    first = results[keys[0]]
    yield [row(key, plans[key][1], trained) | results[key].figures() | over(results[key], first) for key in keys]


def step(
    name: str, way: str, rank: int, ranks: int, trained: Sequence[int], layer: float, handler: handlers.Distributed
) -> Callable[[], Tensor | None]:
    """Return a function that runs a step, and returns the gradient of this rank's stage."""
    seconds = models.LAYERS // ranks * layer
    schedule, plan = ordered(name, way, ranks, trained, seconds)
    pipeline, params = model(plan, trained, layer)
    batch, target = timed.data(models.MICROBATCHES)
    if way == "torch":
        module = TimedStage(params[rank], seconds, rank in trained)
        stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
        runtime = SCHEDULES[name](stage, models.MICROBATCHES, loss_fn=models.loss_fn)

        def peer() -> Tensor | None:
            module.zero_grad(set_to_none=True)
            runtime.step(*([batch] if rank == 0 else []), target=target, return_outputs=False)
            return module.w.grad

        return peer
    run = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler)
    own = pipeline.params_on(params, plan, rank)

    def ours() -> Tensor | None:
        gradient: Tensor | None = run(own, batch, target)[1][rank]
        return gradient

    return ours


def model(plan: Plan, trained: Sequence[int], layer: float) -> tuple[Pipeline, dict[int, Tensor]]:
    """Return the pipeline of a plan, of which a part is frozen, and its params."""
    pipeline, params = timed.stages(plan.stages, layer)
    chosen = recut_trained(trained, plan.ranks, plan.stages) or ()
    return pipeline.freeze(params, lambda path, x: path[0] not in chosen), params


def profile(plan: Plan, trained: Sequence[int], layer: float, handler: handlers.Distributed) -> Costs:
    return fpipe.profile(*model(plan, trained, layer), *timed.data(1), handler=handler, repeats=predictions.REPEATS)


def ordered(name: str, way: str, ranks: int, trained: Sequence[int], seconds: float) -> tuple[Schedule, Plan]:
    """Return a step's schedule and plan."""
    plan = Plan(Placement.loop(ranks), models.MICROBATCHES, trained=None if way == "whole" else trained)
    if name == "search":
        best = fpipe.schedules.search(plan, Costs(seconds, seconds, seconds), chunks=(1, 2))
        return best.schedule, best.plan
    return CATALOGUE[name].schedule(plan), plan


def row(key: tuple[str, str], plan: Plan, trained: Sequence[int]) -> dict[str, Any]:
    sizes = {"ranks": plan.ranks, "stages": plan.stages, "trained": sorted(trained)}
    return {"schedule": key[0], "by": key[1], **sizes}


def over(result: predictions.Rounds, first: predictions.Rounds) -> dict[str, Any]:
    return predictions.spread("over_first", result.over(first))


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("{ranks} ranks, stages {trained} are trained, {rounds} rounds; ms".format(**rows[0]))
    print(f"{'':16}{'predicted':>10} {'measured':>9} {'ratio':>6} {'quartiles':>13} {'over first':>11}")
    for r in rows:
        print(f"{r['schedule']:10}{r['by']:6}{r['predicted_ms']:10.1f} {r['measured_ms']:9.1f}", end="")
        print(f" {r['ratio']:6.3f} {predictions.quartiles(r, 'ratio'):>13} {r['over_first']:11.3f}", flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=600)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--trained", nargs="+", type=int, choices=range(RANKS), default=[RANKS - 1])
    parser.add_argument("--layer", type=models.positive, default=10, help="milliseconds of a layer's forward")
    options = parser.parse_args()
    arguments = options.schedules, options.trained, 1e-3 * options.layer, options.rounds
    parts = models.in_processes(job, RANKS, *arguments, limit=options.limit)
    models.run("frozen", options, parts, show)


if __name__ == "__main__":
    main()
