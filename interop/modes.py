"""Train and eval mode: fixed when a stage function is created. `eval_mode` makes the other."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import fx, nn

from fpipe.errors.arguments import checked
from fpipe.interop.modules.functions import ModuleFunction
from fpipe.interop.splitting.export import export
from fpipe.interop.splitting.partition import Flow
from fpipe.interop.splitting.split import assembled
from fpipe.interop.splitting.stage_graph import GraphFunction
from fpipe.stages.pipeline import Pipeline


@checked()
def eval_mode(pipeline: Pipeline, mode: bool = True) -> Pipeline:
    """Return the pipeline with its modules in evaluation mode: no dropout, batch norm by its running statistics.

    Stages of `split` are exported again and split at the same points. Params and state are the same trees as before;
    evaluation does not change the state.

    Args:
        mode: False for training. Each submodule is then in the mode in which the pipeline was made, so that a submodule
            in evaluation mode stays there. If all were in evaluation mode, all train.

    Raises:
        ValueError: in this mode the module cannot be split at the same points, or changes other buffers; or a stage is
            a graph that was traced in one mode, as of a `Pipe`.
    """
    if any(isinstance(stage.fn, GraphFunction) for stage in pipeline.stages):
        return _exported_again(pipeline, mode)
    functions = {i: stage.fn for i, stage in enumerate(pipeline.stages) if isinstance(stage.fn, ModuleFunction)}
    originals = {i: fn.skeleton if fn.original_mode is None else fn.original_mode for i, fn in functions.items()}
    for i, module in originals.items():
        if any(isinstance(part, fx.GraphModule) for part in module.modules()):
            raise ValueError(
                f"stage {i} is a graph that was traced in one mode for good: trace the module once more in the "
                "other, or take interop.split"
            )
    trained = any(map(_trains, originals.values()))
    stages = list(pipeline.stages)
    for i, fn in functions.items():
        module = _in_mode(originals[i], mode, trained)
        function = replace(fn, skeleton=module, original_mode=None if module is originals[i] else originals[i])
        stages[i] = replace(stages[i], fn=function)
    return pipeline.replace(stages, pipeline.loss)


def _trains(module: nn.Module) -> bool:
    return any(part.training for part in module.modules())


def _in_mode(made: nn.Module, evaluating: bool, trained: bool) -> nn.Module:
    """Return a module in evaluation mode, or in training mode: its original one if that was `trained`."""
    return made if trained and not evaluating else copy.deepcopy(made).train(not evaluating)


def _exported_again(pipeline: Pipeline, evaluating: bool) -> Pipeline:
    split_spec = next(stage.fn.split_spec for stage in pipeline.stages if isinstance(stage.fn, GraphFunction))
    module = _in_mode(split_spec.skeleton, evaluating, _trains(split_spec.skeleton))
    exported = export(module, split_spec.call, split_spec.dynamic_shapes, split_spec.device)
    if new := sorted({exported.tensors[node] for node in exported.changed} - split_spec.state):
        raise ValueError(
            f"in this mode forward changes the buffers {', '.join(new)}, which are params of the pipeline given: split "
            "the module in training mode, and take eval_mode of that"
        )
    flow = Flow(exported, {name: split_spec.homes[name] for name in split_spec.state})
    made, _ = assembled(split_spec, flow, pipeline.loss)  # the skeleton keeps its original modes
    alike = pipeline if made.entries == pipeline.entries else made
    return alike.replace(made.stages, pipeline.loss, pipeline.cotangents)
