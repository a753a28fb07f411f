"""Write a schedule, then draw, verify, simulate and run it, and compare it with others.

python examples/custom_schedule.py
"""

from collections.abc import Iterator
from functools import partial

import torch

import fpipe
from fpipe import Costs, Placement, Plan, Stage, handlers, schedules
from fpipe.effects import BackwardInput, BackwardWeight, Effect, Forward

RANKS, MICROBATCHES = 4, 8


def patient(rank: int, plan: Plan, delay: int = 0) -> Iterator[Effect]:
    """1F1B that sends input gradients at once and delays weight gradients: by its rank, and by `delay`.

    No other rank needs weight gradients, so they fill the time in which a rank would wait. Their inputs stay in memory
    until then.
    """
    (stage,) = plan.stages_on(rank)
    warmup = min(plan.ranks - 1 - rank, plan.microbatches)
    behind = rank + delay
    yield from (Forward(stage, m) for m in range(warmup))
    for m in range(plan.microbatches):
        if m + warmup < plan.microbatches:
            yield Forward(stage, m + warmup)
        yield BackwardInput(stage, m)
        if m >= behind:
            yield BackwardWeight(stage, m - behind)
    yield from (BackwardWeight(stage, m) for m in range(max(0, plan.microbatches - behind), plan.microbatches))


def layer(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["w"] + params["b"])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def main() -> None:
    pipeline = fpipe.Pipeline([Stage(layer)] * RANKS, loss=loss)
    plan = pipeline.plan(Placement.loop(RANKS), MICROBATCHES)
    print(fpipe.draw(patient, plan), end="\n\n")

    costs = Costs(forward=1, backward_input=1, backward_weight=1, communication=0.1)
    others = {name: getattr(schedules, name) for name in ("gpipe", "one_f_one_b", "zb_h1")}
    for name, schedule in {**others, "patient": patient, "patient, 2 later": partial(patient, delay=2)}.items():
        report = fpipe.verify(schedule, plan)
        timeline = fpipe.simulate(schedule, plan, costs)
        print(f"{name:17} bubble {timeline.bubble_rate:6.1%}   in flight {report.peak_in_flight}")

    generator = torch.Generator().manual_seed(0)
    params = {s: {"w": torch.randn(8, 8, generator=generator), "b": torch.zeros(8)} for s in range(RANKS)}
    batch, target = torch.randn(2, 32, 8, generator=generator)
    results = [
        fpipe.value_and_grad(pipeline, schedule, plan, handler=handler)(params, batch, target)
        for schedule, handler in ((patient, handlers.Local()), (schedules.gpipe, handlers.Reference()))
    ]
    (found, grads), (expected, reference) = results
    same = all(torch.equal(grads[s][name], reference[s][name]) for s in params for name in params[s])
    print(f"\nloss {found:.6f}, {'the' if same and torch.equal(found, expected) else 'not the'} bits of the reference")

    print("\nWhere it is wrong, the verifier says so:")
    try:
        fpipe.verify(lambda rank, plan: list(patient(rank, plan))[:-1], plan)
    except fpipe.ScheduleError as error:
        print(error)


if __name__ == "__main__":
    main()
