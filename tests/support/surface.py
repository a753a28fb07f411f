"""The public callables with right arguments, of which a fuzzer makes one wrong at a time."""

from __future__ import annotations

import inspect

import torch
from torch import nn

import fpipe
from fpipe import Batch, Cache, Pipeline, Placement, Stage, handlers, interop, parallel, schedules, transforms
from tests.support.cases import mse


class Nothing:
    """A value of no use."""

    def __repr__(self):
        return "Nothing()"


WRONG = [
    *(None, True, -1, 0, 7, 1.5, float("nan"), float("inf"), 1j, "x", "", b"x", [], (), {}, set(), [None], ["x"], [-1]),
    *([[]], {"x": 1}, {-1: None}, {0: "x"}, Nothing(), Nothing, len, lambda: None, torch.ones(2), torch.tensor(1.5)),
    *(torch.float32, range(3), iter([1]), slice(None), Ellipsis, NotImplemented),
]
"""Values of every kind; each is wrong for most arguments."""


def scale(p, x):
    return x * p


def generating():
    """A pipeline that generates the number after each, and prompts for it."""
    last = Stage(lambda p, x: nn.functional.one_hot(x[:, -1] + 1, 9).float())
    pipeline = Pipeline(
        [Stage(lambda p, x: x, [Batch("input_ids")]), last], cache=Cache(rows=2, max_length=8, state={})
    )
    return pipeline, [[1, 2], [4, 5]]


def calls(folder):
    """Name -> (callable, its arguments by name, all right); made anew, since some keep a state.

    Args:
        folder: for checkpoints.
    """
    pipeline = Pipeline([scale, scale], mse)
    placement = Placement.loop(2)
    plan = pipeline.plan(placement, 2)
    params = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
    x, y = torch.ones(4), torch.zeros(4)
    local, schedule = handlers.Local(), schedules.one_f_one_b
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=local)
    run = fpipe.evaluate(pipeline, plan, handler=local)
    adam = interop.optimizer(torch.optim.Adam, lr=0.1)
    train = fpipe.train_step(pipeline, schedule, plan, adam, handler=local)
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    of_modules, weights = interop.from_modules(modules)
    model, example = nn.Sequential(*modules), (torch.ones(2, 2),)
    whole = interop.from_modules(model, at=[1])
    saved = interop.Checkpoints(folder, pipeline, plan, handler=local)
    saved.save(params=params)
    programs = fpipe.lower(schedule, plan)
    costs = fpipe.Costs(forward=1.0, backward=2.0)
    sized = fpipe.Costs(residuals=10.0, offload=0.5, fetch=0.5)
    count, texts = generating()
    of_count = {"plan": count.plan(placement, 1), "handler": local, "max_new_tokens": 2}
    counting = fpipe.generator(count, **of_count)
    made = {"pipeline": pipeline, "schedule": schedule, "plan": plan, "handler": local}
    options = inspect_arguments(fpipe.value_and_grad)
    of_evaluate = {k: v for k, v in options.items() if k not in ("argnums", "policy", "capture", "effects", "offload")}
    of_train = {k: v for k, v in options.items() if k not in ("argnums", "effects")}
    first = inspect_arguments
    return {
        "Placement": (Placement, {"ranks": [0, 1]}),
        "Placement.loop": (Placement.loop, {"ranks": 2, "chunks": 1}),
        "Placement.v": (Placement.v, {"ranks": 2}),
        "Placement.both_ways": (Placement.both_ways, {"ranks": 2}),
        "Edges": (fpipe.Edges, {"reads": [(), (0,)]}),
        "Edges.chain": (fpipe.Edges.chain, {"stages": 2}),
        "Plan": (fpipe.Plan, first(fpipe.Plan, placement, 2)),
        "Plan.stages_on": (plan.stages_on, {"rank": 0}),
        "Link": (fpipe.Link, first(fpipe.Link, 0.0, 1.0)),
        "Costs": (fpipe.Costs, first(fpipe.Costs)),
        "Residence": (fpipe.Residence, first(fpipe.Residence)),
        "Precision": (fpipe.Precision, first(fpipe.Precision, torch.bfloat16)),
        "LossScale": (fpipe.LossScale, first(fpipe.LossScale)),
        "Output": (fpipe.Output, {"stage": 0}),
        "Stage": (fpipe.Stage, first(fpipe.Stage, scale)),
        "Microbatches": (fpipe.Microbatches, {"trees": [x, y]}),
        "Pipeline": (Pipeline, first(Pipeline, [scale, scale], mse)),
        "Pipeline.call": (pipeline, {"params": params, "batch": x}),
        "Pipeline.plan": (pipeline.plan, first(pipeline.plan, placement, 2)),
        "Pipeline.params_on": (pipeline.params_on, {"params": params, "plan": plan, "rank": 0}),
        "Pipeline.state_on": (pipeline.state_on, {"state": {}, "plan": plan, "rank": 0}),
        "Pipeline.freeze": (pipeline.freeze, {"params": params, "where": lambda path, leaf: False}),
        "value_and_grad": (fpipe.value_and_grad, {**made, **options}),
        "evaluate": (fpipe.evaluate, {**made, **of_evaluate, "loss": True}),
        "train_step": (fpipe.train_step, {**made, **of_train, "optimizer": adam, "max_norm": 1.0}),
        "step": (step, {"params": params, "batch": x, "target": y, "state": None, "rng": (0, 1), "loss_scale": None}),
        "run": (run, {"params": params, "batch": x, "state": None, "rng": (0, 1)}),
        "train": (train, {"params": params, "opt_state": adam.init(params), "batch": x, "target": y, "rng": (0, 1)}),
        "lower": (fpipe.lower, first(fpipe.lower, schedule, plan)),
        "verify": (fpipe.verify, first(fpipe.verify, schedule, plan)),
        "Cache": (fpipe.Cache, first(fpipe.Cache, 2, 8, {})),
        "generate": (
            fpipe.generate,
            {"pipeline": count, "params": {0: {}, 1: {}}, "prompts": texts, "rng": None, **of_count},
        ),
        "generator": (fpipe.generator, {**first(fpipe.generator), "pipeline": count, **of_count}),
        "generator.call": (counting, {"params": {0: {}, 1: {}}, "prompts": texts, "rng": None}),
        "simulate": (fpipe.simulate, first(fpipe.simulate, schedule, plan, costs)),
        "what_if": (fpipe.what_if, first(fpipe.what_if, fpipe.simulate(schedule, plan, costs))),
        "offload": (fpipe.offload, {**first(fpipe.offload), "limit_bytes": 10.0, "costs": sized}),
        "draw": (fpipe.draw, first(fpipe.draw, schedule, plan)),
        "footprint": (fpipe.footprint, {"programs": programs, "costs": costs}),
        "peak_bytes": (fpipe.peak_bytes, first(fpipe.peak_bytes, list)),
        "global_norm": (fpipe.global_norm, {"grads": params, "plan": plan, "handler": local, "by_row": False}),
        "clip_by_global_norm": (
            fpipe.clip_by_global_norm,
            {"grads": params, "max_norm": 1.0, "plan": plan, "handler": local},
        ),
        "profile": (fpipe.profile, {**first(fpipe.profile, pipeline, params, x, y), "repeats": 1, "microbatches": 2}),
        "Recording": (fpipe.Recording, first(fpipe.Recording, programs)),
        "Local": (handlers.Local, first(handlers.Local)),
        "auto": (handlers.auto, first(handlers.auto)),
        "NCCL": (handlers.NCCL, {"channels": 4}),
        "schedules.get": (schedules.get, {"name": "gpipe"}),
        "schedules.search": (schedules.search, first(schedules.search, plan, costs)),
        "schedules.pareto": (schedules.pareto, first(schedules.pareto, plan, costs)),
        "schedules.lower_bound": (schedules.lower_bound, first(schedules.lower_bound, plan, costs)),
        "by_length": (fpipe.by_length, {"lengths": [3, 1, 2]}),
        "pack": (fpipe.pack, {"lengths": [3, 1, 2], "microbatches": 2}),
        "from_modules": (interop.from_modules, first(interop.from_modules, modules)),
        "split": (interop.split, {**first(interop.split, model), "at": ["1"], "example": example}),
        "into_modules": (interop.into_modules, first(interop.into_modules, modules, weights)),
        "buffers": (interop.buffers, {"modules": modules}),
        "eval_mode": (interop.eval_mode, {"pipeline": of_modules, "mode": True}),
        "to_state_dict": (interop.to_state_dict, first(interop.to_state_dict, *whole)),
        "optimizer": (interop.optimizer, {**first(interop.optimizer, torch.optim.SGD), "lr": 0.1}),
        "optimizer.init": (adam.init, {"params": params}),
        "rows": (interop.rows, {**first(interop.rows, 8), "replica": 0, "replicas": 2, "batch": 2, "step": 0}),
        "Checkpoints": (
            interop.Checkpoints,
            {"folder": folder, "pipeline": pipeline, "plan": plan, "handler": local, "keep": 2, "memory": None},
        ),
        "elastic": (interop.elastic, {**first(interop.elastic, pipeline, 2), "handler": local}),
        "Memory": (interop.Memory, first(interop.Memory)),
        "save": (saved.save, {"params": params, "state": None, "optimizer": {}, "step": 1}),
        "load": (saved.load, {"path": None, "params": params, "verify": True}),
        "export_safetensors": (interop.export_safetensors, {"folder": folder, "file": f"{folder}/x", "verify": True}),
        "Vocabulary": (parallel.Vocabulary, first(parallel.Vocabulary, 8, 2)),
        "vmap": (transforms.vmap, first(transforms.vmap, pipeline)),
        "per_sample": (transforms.per_sample, first(transforms.per_sample, pipeline)),
        "jvp": (transforms.jvp, first(transforms.jvp, pipeline)),
    }


def inspect_arguments(function, *first):
    """The first arguments by name, and the defaults of the others."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_KEYWORD,)]
    given = dict(zip([p.name for p in parameters], first, strict=False))
    rest = {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in given}
    return given | rest
