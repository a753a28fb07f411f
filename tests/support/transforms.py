"""Transformed pipelines, and what torch.func gives for the plain ones in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch.func import grad, jvp, vmap

import fpipe
from fpipe import Batch, Output, Pipeline, Stage, handlers, transforms
from fpipe.stages.microbatch import split
from tests.support import cases
from tests.support.cases import Case, randn

MEMBERS = 3


@dataclass
class Transformed:
    """A case of a transformed pipeline.

    Args:
        expected: makes the gradients, from what torch.func gives for the plain pipeline.
    """

    case: Case
    expected: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)


def mapped(function, *trees):
    return optree.tree_map(function, *trees, namespace="fpipe")


def stacked(tree):
    """Members of an ensemble."""
    return mapped(lambda x: torch.stack([x * (1 + k / 4) for k in range(MEMBERS)]) if is_tensor(x) else x, tree)


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def directions(tree):
    generator = torch.Generator().manual_seed(1)
    return mapped(lambda x: torch.randn(x.shape, generator=generator).to(x.dtype) if is_tensor(x) else None, tree)


def loss_of(case, microbatches):
    """The loss of the batch as a function of params, microbatch by microbatch."""
    batches, _ = split(case.batch, microbatches)
    targets, _ = split(case.target, microbatches)
    weight, has_aux = (case.options.get(name) for name in ("weight", "has_aux"))
    sizes = [t.shape[0] if weight is None else weight(t) for t in targets]

    def loss(params, state=case.state):
        total = 0.0
        for batch, target, size in zip(batches, targets, sizes, strict=True):
            value = case.pipeline(params, batch, target, state=state)
            value, state = value if state is not None else (value, None)
            total = total + (value[0] if has_aux else value) * (size / sum(sizes))
        return total

    return loss


def transformed(case, pipeline, params, expected, batch=None, state=None, **options):
    new = Case(pipeline, params, case.batch if batch is None else batch, case.target, state or case.state, case.rng)
    new.options = {**case.options, **options}
    return Transformed(new, expected)


def plain_jvp(case, microbatches):
    """Tangents of params, and of a batch that is a tensor of numbers; the gradients of the loss are as without."""
    along = directions(case.params)
    params = transforms.dual(case.params, along)

    def expected():
        return transforms.dual(grad(loss_of(case, microbatches))(case.params), mapped(zeros, along))

    pipeline = transforms.jvp(case.pipeline, has_aux="has_aux" in case.options)
    return transformed(case, pipeline, params, expected, has_aux=True)


def zeros(x):
    return None if x is None else torch.zeros_like(x)


def hvp(case, microbatches):
    along = directions(case.params)

    def expected():
        gradients, products = jvp(grad(loss_of(case, microbatches)), (case.params,), (along,))
        return transforms.dual(products, gradients)

    pipeline = transforms.hvp(case.pipeline, has_aux="has_aux" in case.options)
    return transformed(case, pipeline, transforms.dual(case.params, along), expected)


def ensemble(case, microbatches):
    params = stacked(case.params)
    state = None if case.state is None else mapped(lambda x: torch.stack([x] * MEMBERS), case.state)
    pipeline = transforms.vmap(case.pipeline, randomness="different", has_aux="has_aux" in case.options)
    axes = (0, None) if state is None else (0, 0)
    return transformed(
        case,
        pipeline,
        params,
        lambda: vmap(grad(loss_of(case, microbatches)), axes)(params, state),
        state=state,
        has_aux=True,
    )


def ensemble_hvp(case, microbatches, inner=False):
    params = stacked(case.params)
    along = directions(params)

    def expected():
        gradients, products = vmap(lambda p, v: jvp(grad(loss_of(case, microbatches)), (p,), (v,)))(params, along)
        return transforms.dual(products, gradients)

    if inner:
        pipeline = transforms.vmap(transforms.hvp(case.pipeline))
    else:
        pipeline = transforms.hvp(transforms.vmap(case.pipeline), has_aux=True)
    return transformed(case, pipeline, transforms.dual(params, along), expected, has_aux=True)


def ensemble_of_hvp(case, microbatches):
    return ensemble_hvp(case, microbatches, inner=True)


def per_sample(case, microbatches):
    has_aux = "has_aux" in case.options

    def expected():
        def one(params, batch, target):
            result = case.pipeline(params, batch, target)
            return result[0] if has_aux else result

        alone = mapped(lambda x: x[:, None], (case.batch, case.target))
        return vmap(grad(one), (None, 0, 0), randomness="different")(case.params, *alone)

    pipeline = transforms.per_sample(case.pipeline, randomness="different", has_aux=has_aux)
    made = transformed(case, pipeline, case.params, expected, has_aux=True, reduction="sum")
    made.case.options.pop("weight", None)
    return made


def mean_flow(stages):
    """The average velocity u(z, r, t) of MeanFlow (Geng et al., 2025, algorithm 1), in a U-shaped network."""

    def first(p, z, r, t):
        time = torch.tanh(torch.stack([t, t - r], 1) @ p["time"])
        return {"h": torch.tanh(z @ p["w"] + time), "skip": z, "time": time}

    def middle(p, h, time):
        return torch.tanh(h @ p["w"]) * time

    def last(p, h, skip):
        return h @ p["w"] + skip * p["b"]

    nodes = [Stage(first, reads=(Batch("z"), Batch("r"), Batch("t")))]
    for s in range(1, stages - 1):
        nodes.append(Stage(middle, reads=(Output(0, "h") if s == 1 else s - 1, Output(0, "time"))))
    nodes.append(Stage(last, reads=(stages - 2 if stages > 2 else Output(0, "h"), Output(0, "skip"))))
    params = {s: {"w": randn(cases.WIDTH, cases.WIDTH)} for s in range(stages)}
    params[0]["time"], params[stages - 1]["b"] = randn(2, cases.WIDTH), randn(cases.WIDTH)
    x, noise, times = randn(cases.ROWS, cases.WIDTH), randn(cases.ROWS, cases.WIDTH), torch.rand(2, cases.ROWS)
    r, t = times.amin(0), times.amax(0)
    velocity = noise - x
    batch = {"z": x + t[:, None] * velocity, "r": r, "t": t}
    target = {"v": velocity, "r": r, "t": t}
    pipeline = Pipeline(nodes)

    def loss(u, target):
        average = target["v"] - (target["t"] - target["r"])[:, None] * u.tangent
        return (u.primal - average.detach()).square().mean()

    def expected():
        def one_process(params):
            arguments = batch["z"], batch["r"], batch["t"]
            u = jvp(
                lambda z, r, t: pipeline(params, {"z": z, "r": r, "t": t}),
                arguments,
                (velocity, torch.zeros_like(r), torch.ones_like(t)),
            )
            return loss(transforms.Dual(*u), target)

        return grad(one_process)(params)

    batch_with_tangents = transforms.dual(batch, {"z": velocity, "r": None, "t": torch.ones_like(t)})
    case = Case(transforms.jvp(pipeline, loss), params, batch_with_tangents, target)
    return Transformed(case, expected)


TRANSFORMS = {
    "jvp": plain_jvp,
    "hvp": hvp,
    "vmap": ensemble,
    "hvp of vmap": ensemble_hvp,
    "vmap of hvp": ensemble_of_hvp,
    "per_sample": per_sample,
}


def make(transform, name, stages, microbatches):
    """The same in every process."""
    torch.default_generator.manual_seed(0)
    if transform == "mean flow":
        return mean_flow(stages)
    case = cases.CASES[name](stages)
    if name == "tied":  # a transformer of large numbers, whose second derivatives need more digits
        case.params = mapped(torch.Tensor.double, case.params)
    return TRANSFORMS[transform](case, microbatches)


def on_this_rank(rank, transform, name, schedule, microbatches, ranks, options):
    """Two steps on a rank of a job: where they differ from the reference."""
    from tests.support import jobs

    generator, place = cases.SCHEDULES[schedule]
    placement = place(ranks)
    case = make(transform, name, placement.stages, microbatches).case
    plan = case.pipeline.plan(placement, microbatches)
    params, batch, target, state = cases.own(case, plan, rank)
    whole = cases.reference(case, fpipe.schedules.gpipe, plan)
    expected = jobs.expected_on(whole, params, plan, rank, case.state is not None)
    step = fpipe.value_and_grad(
        case.pipeline, generator, plan, handler=jobs.handler(), gather=True, **case.options, **options
    )
    return [
        d for _ in range(2) for d in jobs.differences(step(params, batch, target, state=state, rng=case.rng), expected)
    ]


def locally(transform, name, schedule, microbatches, options, replicas=1):
    """Three steps in one process, of which the last replays what was captured: where they differ from the reference."""
    from tests.support import jobs

    generator, place = cases.SCHEDULES[schedule]
    case = make(transform, name, place(2).stages, microbatches * replicas).case
    plan = case.pipeline.plan(place(2), microbatches, replicas)
    expected = cases.reference(case, fpipe.schedules.gpipe, plan)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), **case.options, **options)
    arguments = case.params, case.batch, case.target
    results = [step(*arguments, state=case.state, rng=case.rng) for _ in range(3 if "capture" in options else 1)]
    return [d for result in results for d in jobs.differences(result, expected)]


def over_replicas(rank, transform, which):
    """Two steps on a process of a grid, with params that are whole or sharded: where they differ from the reference."""
    from tests.support import replica_jobs

    grid = replica_jobs.Grid("dp2 pp2")
    case = make(transform, "linear", 2, 4).case
    plan = case.pipeline.plan(fpipe.Placement.loop(2), 2, grid.replicas)
    expected = cases.reference(case, fpipe.schedules.gpipe, plan)
    found = replica_jobs.compare(grid, case, fpipe.schedules.zb_h1, plan, expected, which)
    return [path for path in found if path != (0, 1)]  # a replica has the aux of its own rows
