"""Modules as stages, by `torch.func.functional_call`, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.stage import Pipeline, Read, Stage

Tree = dict[str, Tensor]


@dataclass(frozen=True)
class ModuleFunction:
    """A module's forward as a pure function of its parameters, and of its buffers where it has any."""

    skeleton: nn.Module

    def __call__(self, params: Tree, *inputs: Any) -> Any:
        return owning(self.skeleton, params)(*inputs)


@dataclass(frozen=True)
class StatefulModuleFunction:
    skeleton: nn.Module

    def __call__(self, params: Tree, state: Tree, *inputs: Any) -> tuple[Any, Tree]:
        module = owning(self.skeleton, {**params, **{name: buffer.clone() for name, buffer in state.items()}})
        outputs = module(*inputs)
        return outputs, {name: module.get_buffer(name) for name in state}  # changed in place, or assigned anew


def owning(skeleton: nn.Module, tensors: Tree) -> nn.Module:
    """A module like the skeleton, with these parameters and buffers for good.

    `torch.func.functional_call` takes them away again when it returns, and what runs later, as a checkpointed
    block does in the backward, would find none.

    Raises:
        RuntimeError: names are missing, or are none of the skeleton's.
    """
    named = {**dict(skeleton.named_parameters()), **dict(skeleton.named_buffers())}
    for what, names in (("Missing", named.keys() - tensors.keys()), ("Unexpected", tensors.keys() - named.keys())):
        if names:
            raise RuntimeError(f"{what} key(s) for {type(skeleton).__name__}: {', '.join(map(repr, sorted(names)))}")
    given = {id(tensor): tensors[name] for name, tensor in named.items()}
    twins = {id(module): _twin(module, given) for module in skeleton.modules()}
    for twin in twins.values():
        twin._modules = {name: child and twins[id(child)] for name, child in twin._modules.items()}
    return twins[id(skeleton)]


def _twin(module: nn.Module, given: Mapping[int, Tensor]) -> nn.Module:
    """A copy of a module alone, which shares all but what belongs to a call."""
    twin: nn.Module = object.__new__(module.__class__)  # a GraphModule makes a class of its own for each instance
    twin.__dict__.update({k: list(v) if type(v) is list else v for k, v in module.__dict__.items()})
    for kind in ("_parameters", "_buffers"):
        held = module.__dict__[kind]
        twin.__dict__[kind] = {name: x if x is None else given.get(id(x), x) for name, x in held.items()}
    return twin


def from_modules(
    modules: Sequence[nn.Module],
    *,
    loss: Callable[..., Any] | None = None,
    reads: Mapping[int, Sequence[Read | int]] | None = None,
) -> tuple[Pipeline, dict[int, Tree]]:
    """A pipeline of one stage for each module, and its parameters by stage, under the modules' own names.

    Parameters that several modules share are tied, and live with the lowest. Those with
    `requires_grad=False` are frozen. A module with buffers becomes a stateful stage: `buffers(modules)` is its
    first state. Whether a module trains or evaluates is settled here; `eval_mode` gives the other pipeline.

    Args:
        loss: `loss(output, target) -> loss | (loss, aux)`.
        reads: what a stage reads, where that is not the output of the stage before.

    The modules are left as they are, and the parameters share their memory.

    >>> pipeline, params = from_modules([nn.Linear(2, 3), nn.Linear(3, 1, bias=False)])
    >>> {stage: {name: tuple(p.shape) for name, p in tree.items()} for stage, tree in params.items()}
    {0: {'weight': (3, 2), 'bias': (3,)}, 1: {'weight': (1, 3)}}
    """
    home: dict[int, tuple[int, str]] = {}
    ties: dict[tuple[int, str], tuple[int, str]] = {}
    params: dict[int, Tree] = {}
    stages = []
    for index, module in enumerate(modules):
        params[index] = {}
        for name, parameter in module.named_parameters():
            owner = home.setdefault(id(parameter), (index, name))
            if owner == (index, name):
                params[index][name] = parameter.detach()
            else:
                ties[index, name] = owner
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        stateful = any(True for _ in module.buffers())
        function = (StatefulModuleFunction if stateful else ModuleFunction)(_skeleton(module))
        stages.append(Stage(function, (reads or {}).get(index), stateful, tuple(frozen)))
    return Pipeline(stages, loss, ties=ties), params


def buffers(modules: Sequence[nn.Module]) -> dict[int, Tree]:
    """The state of the stages that have one: copies of the modules' buffers, by stage."""
    found = {index: {n: b.detach().clone() for n, b in m.named_buffers()} for index, m in enumerate(modules)}
    return {index: tree for index, tree in found.items() if tree}


def into_modules(
    modules: Sequence[nn.Module], params: Mapping[int, Tree], state: Mapping[int, Tree] | None = None
) -> None:
    """Copy parameters and buffers back into modules, in place; shared parameters go with their owner.

    Stages that `params` has no entry for are left as they are.
    """
    with torch.no_grad():
        for index, module in enumerate(modules):
            own = dict(module.named_parameters())
            for name, value in params.get(index, {}).items():
                own[name].copy_(value)
            held = dict(module.named_buffers())
            for name, value in (state or {}).get(index, {}).items():
                held[name].copy_(value)


def eval_mode(pipeline: Pipeline, mode: bool = True) -> Pipeline:
    """The same pipeline with its modules in evaluation mode: no dropout, batch norm by its running statistics."""
    stages = []
    for stage in pipeline.stages:
        if isinstance(stage.fn, ModuleFunction | StatefulModuleFunction):
            module = copy.deepcopy(stage.fn.skeleton)
            stage = replace(stage, fn=replace(stage.fn, skeleton=module.train(not mode)))
        stages.append(stage)
    return pipeline.replace(stages, pipeline.loss)


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are on the meta device: it holds no memory."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo)
