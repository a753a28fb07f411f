"""Training and evaluation: which of the two a stage's function is, is settled when it is made."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import fx, nn

from fpipe.interop.modules.functions import ModuleFunction
from fpipe.interop.splitting.export import export
from fpipe.interop.splitting.partition import Flow
from fpipe.interop.splitting.split import assembled
from fpipe.interop.splitting.stage_graph import GraphFunction
from fpipe.stages.pipeline import Pipeline


def eval_mode(pipeline: Pipeline, mode: bool = True) -> Pipeline:
    """The same pipeline with its modules in evaluation mode: no dropout, batch norm by its running statistics.

    Stages from `split` are exported again and cut at the same points; params and state are those of the pipeline
    given, which evaluation leaves as they are.

    Args:
        mode: False for training: each submodule is in the mode that it was in when the pipeline was made, so that what
            was frozen in evaluation stays so; if none trained then, all do.

    Raises:
        ValueError: in this mode the module can't be cut at the same points, or changes other buffers; or a stage is a
            graph already, as of a `Pipe`.
    """
    if any(isinstance(stage.fn, GraphFunction) for stage in pipeline.stages):
        return _exported_again(pipeline, mode)
    functions = {i: stage.fn for i, stage in enumerate(pipeline.stages) if isinstance(stage.fn, ModuleFunction)}
    made = {i: fn.skeleton if fn.made is None else fn.made for i, fn in functions.items()}
    for i, module in made.items():
        if any(isinstance(part, fx.GraphModule) for part in module.modules()):
            raise ValueError(
                f"stage {i} is a graph that was traced in one mode for good: trace the module once more in the "
                "other, or take interop.split"
            )
    trained = any(map(_trains, made.values()))
    stages = list(pipeline.stages)
    for i, fn in functions.items():
        module = _in_mode(made[i], mode, trained)
        function = replace(fn, skeleton=module, made=None if module is made[i] else made[i])
        stages[i] = replace(stages[i], fn=function)
    return pipeline.replace(stages, pipeline.loss)


def _trains(module: nn.Module) -> bool:
    return any(part.training for part in module.modules())


def _in_mode(made: nn.Module, evaluating: bool, trained: bool) -> nn.Module:
    """A module in evaluation, or in training as it was made; `trained`, if it was."""
    return made if trained and not evaluating else copy.deepcopy(made).train(not evaluating)


def _exported_again(pipeline: Pipeline, evaluating: bool) -> Pipeline:
    recipe = next(stage.fn.recipe for stage in pipeline.stages if isinstance(stage.fn, GraphFunction))
    module = _in_mode(recipe.skeleton, evaluating, _trains(recipe.skeleton))
    exported = export(module, recipe.call, recipe.dynamic_shapes, recipe.device)
    if new := sorted(exported.changed.keys() - recipe.state):
        raise ValueError(
            f"in this mode forward changes the buffers {', '.join(new)}, which are params of the pipeline given: split "
            "the module in training mode, and take eval_mode of that"
        )
    flow = Flow(exported, {name: recipe.homes[name] for name in recipe.state})
    made, _ = assembled(recipe, flow, pipeline.loss)  # whose skeleton keeps the modes that it was made in
    return pipeline.replace(made.stages, pipeline.loss) if made.entries == pipeline.entries else made
