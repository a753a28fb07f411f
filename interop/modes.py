"""Training and evaluation: which of the two a stage's function is, is settled when it is made."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import fx

from fpipe.interop.modules import ModuleFunction
from fpipe.interop.splitting.cut import Flow
from fpipe.interop.splitting.export import export
from fpipe.interop.splitting.graph import GraphFunction
from fpipe.interop.splitting.split import assembled
from fpipe.stage import Pipeline


def eval_mode(pipeline: Pipeline, mode: bool = True) -> Pipeline:
    """The same pipeline with its modules in evaluation mode: no dropout, batch norm by its running statistics.

    Stages from `split` are exported again and cut at the same points; params and state are those of the pipeline
    given, which evaluation leaves as they are.

    Raises:
        ValueError: in this mode the module can't be cut at the same points, or changes other buffers; or a stage is a
            graph already, as of a `Pipe`.
    """
    if any(isinstance(stage.fn, GraphFunction) for stage in pipeline.stages):
        return _exported_again(pipeline, not mode)
    stages = []
    for index, stage in enumerate(pipeline.stages):
        if isinstance(stage.fn, ModuleFunction):
            if any(isinstance(module, fx.GraphModule) for module in stage.fn.skeleton.modules()):
                raise ValueError(
                    f"stage {index} is a graph that was traced in one mode for good: trace the module once more in the "
                    "other, or take interop.split"
                )
            module = copy.deepcopy(stage.fn.skeleton)
            stage = replace(stage, fn=replace(stage.fn, skeleton=module.train(not mode)))
        stages.append(stage)
    return pipeline.replace(stages, pipeline.loss)


def _exported_again(pipeline: Pipeline, training: bool) -> Pipeline:
    recipe = next(stage.fn.recipe for stage in pipeline.stages if isinstance(stage.fn, GraphFunction))
    module = copy.deepcopy(recipe.skeleton).train(training)
    exported = export(module, recipe.call, recipe.dynamic_shapes, recipe.device)
    if new := sorted(exported.changed.keys() - recipe.state):
        raise ValueError(
            f"in this mode forward changes the buffers {', '.join(new)}, which are params of the pipeline given: split "
            "the module in training mode, and take eval_mode of that"
        )
    flow = Flow(exported, {name: recipe.homes[name] for name in recipe.state})
    made, _ = assembled(replace(recipe, skeleton=module), flow, pipeline.loss)
    return pipeline.replace(made.stages, pipeline.loss) if made.entries == pipeline.entries else made
