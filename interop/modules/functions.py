"""Modules as stages, by `torch.func.functional_call`, and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fpipe.interop.modules.skeletons import accepted, call, skeleton, uncompiled
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import Read, Stage

Tree = dict[str, Tensor]


class Contents(NamedTuple):
    """What a stage holds and puts out, as tensors on the meta device.

    Args:
        params, state: by name.
        outputs: those that other stages read, as far as they are known.
        begins: where in the module, by name.
        share: of the time of all stages, if that was estimated or measured.
    """

    params: Tree
    state: Tree
    outputs: Tree
    begins: str | None = None
    share: float | None = None


@dataclass(frozen=True)
class ModuleFunction:
    """A module's forward as a pure function of its parameters, and of its buffers where it has any.

    Args:
        skeleton: in the mode that it runs in.
        qualified: whether its names are those of the whole module that it is a part of.
        made: the skeleton in the modes that its submodules were made in, if these are others.
    """

    skeleton: nn.Module
    qualified: bool = False
    made: nn.Module | None = None

    def __call__(self, params: Tree, *inputs: Any) -> Any:
        return call(self.skeleton, params, inputs)[0]

    @property
    def contents(self) -> Contents:
        """What it holds."""
        return Contents(dict(self.skeleton.named_parameters()), dict(self.skeleton.named_buffers()), {})

    @property
    def aliases(self) -> dict[str, str]:
        """The entry for each name in the module's state_dict."""
        first: dict[int, str] = {}
        return {name: first.setdefault(id(x), name) for name, x in self.skeleton.state_dict(keep_vars=True).items()}

    @property
    def kept(self) -> Tree:
        """Values of buffers that no state_dict has."""
        return {}


@dataclass(frozen=True)
class StatefulModuleFunction(ModuleFunction):
    def __call__(self, params: Tree, state: Tree, *inputs: Any) -> tuple[Any, Tree]:
        tensors = {**params, **{name: buffer.clone() for name, buffer in state.items()}}
        outputs, module = call(self.skeleton, tensors, inputs)
        return outputs, {name: module.get_buffer(name) for name in state}  # changed in place, or assigned anew


def from_modules(
    modules: Sequence[nn.Module] | nn.Sequential,
    *,
    at: Sequence[int] | None = None,
    loss: Callable[..., Any] | None = None,
    reads: Mapping[int, Sequence[Read | int]] | None = None,
) -> tuple[Pipeline, dict[int, Tree]]:
    """A pipeline of one stage for each module, and its parameters by stage, under the modules' own names.

    Parameters that several modules share are tied, and live with the lowest. Those with
    `requires_grad=False` are frozen. A module with buffers becomes a stateful stage: `buffers(modules)` is its
    first state. Whether a module trains or evaluates is settled here; `eval_mode` gives the other pipeline. Of what
    torch.compile has wrapped, the module inside is taken: `value_and_grad(..., compile=True)` compiles stages.

    Args:
        at: where an `nn.Sequential` is cut, by the indices of the modules that begin a stage; names are then its own.
        loss: `loss(output, target) -> loss | (loss, aux)`.
        reads: what a stage reads, where that is not the output of the stage before.

    The modules are left as they are, and the parameters share their memory.

    Raises:
        StageError: what a stage would lose or lack: hooks on parameters' gradients, tensors without a shape yet, an
            attribute that can't be copied.

    >>> pipeline, params = from_modules(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False)), at=[2])
    >>> {stage: {name: tuple(p.shape) for name, p in tree.items()} for stage, tree in params.items()}
    {0: {'0.weight': (3, 2), '0.bias': (3,)}, 1: {'2.weight': (1, 3)}}
    """
    if isinstance(modules, nn.Module):
        modules = cast(nn.Sequential, uncompiled(modules))
    if at is not None:
        modules = _pieces(modules, at)
    modules = [accepted(module, stage=stage) for stage, module in enumerate(modules)]
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
        function = (StatefulModuleFunction if stateful else ModuleFunction)(skeleton(module, index), at is not None)
        stages.append(Stage(function, (reads or {}).get(index), stateful, tuple(frozen)))
    return Pipeline(stages, loss, ties=ties), params


def _pieces(modules: Sequence[nn.Module] | nn.Sequential, at: Sequence[int]) -> list[nn.Module]:
    if not isinstance(modules, nn.Sequential):
        raise TypeError(
            f"at= cuts an nn.Sequential, not a {type(modules).__name__}: a list has a module for each stage"
        )
    bounds = [0, *at, len(modules)]
    if any(low >= high for low, high in itertools.pairwise(bounds)):
        raise ValueError(f"at={list(at)} must rise, from 1 to {len(modules) - 1}, so that no stage is empty")
    pieces = [modules[low:high] for low, high in itertools.pairwise(bounds)]
    for piece in pieces:
        piece.training = modules.training
    return pieces


def from_functions(
    functions: Sequence[Callable[..., Any]],
    *,
    loss: Callable[..., Any] | None = None,
    reads: Mapping[int, Sequence[Read | int]] | None = None,
    ties: Mapping[tuple[int, Any], tuple[int, Any]] | None = None,
    stateful: Collection[int] = (),
    frozen: Mapping[int, Sequence[Any]] | None = None,
) -> Pipeline:
    """A pipeline of one stage for each pure function `fn(params, *inputs) -> outputs`.

    Args:
        loss, ties: as of `fpipe.Pipeline`.
        reads, frozen: of stages, as of `fpipe.Stage`.
        stateful: the stages whose function is `fn(params, state, *inputs) -> (outputs, state)`.

    >>> from fpipe import Batch
    >>> pipeline = from_functions([lambda p, x: x * p, lambda p, h, x: h + x * p], reads={1: [0, Batch()]})
    >>> pipeline({0: 2, 1: 3}, torch.ones(()))
    tensor(5.)
    """
    reads, frozen = reads or {}, frozen or {}
    for what, numbers in (("reads", reads), ("stateful", stateful), ("frozen", frozen)):
        if unknown := [number for number in numbers if number not in range(len(functions))]:
            raise ValueError(f"{what} names stage {unknown[0]}, and there are {len(functions)} functions")
    stages = [Stage(fn, reads.get(i), i in stateful, frozen.get(i, ())) for i, fn in enumerate(functions)]
    return Pipeline(stages, loss, ties=ties)


def buffers(modules: Sequence[nn.Module] | Pipeline, module: nn.Module | None = None) -> dict[int, Tree]:
    """The state of the stages that have one: copies of buffers, by stage.

    Args:
        modules: those that `from_modules` was given; or a pipeline, such as `split` gives,
        module: and then the whole module.
    """
    if not isinstance(modules, Pipeline):
        found = {i: {n: b.detach().clone() for n, b in uncompiled(m).named_buffers()} for i, m in enumerate(modules)}
        return {index: tree for index, tree in found.items() if tree}
    if module is None:
        raise TypeError("buffers(pipeline, module): a pipeline holds no values")
    held = dict(uncompiled(module).named_buffers(remove_duplicate=False))
    functions: dict[int, Any] = {index: stage.fn for index, stage in enumerate(modules.stages) if stage.stateful}
    return {i: {name: held[name].detach().clone() for name in fn.contents.state} for i, fn in functions.items()}


def into_modules(
    modules: Sequence[nn.Module], params: Mapping[int, Tree], state: Mapping[int, Tree] | None = None
) -> None:
    """Copy parameters and buffers back into modules, in place; shared parameters go with their owner.

    Stages that `params` has no entry for are left as they are.
    """
    with torch.no_grad():
        for index, module in enumerate(map(uncompiled, modules)):
            own = dict(module.named_parameters())
            for name, value in params.get(index, {}).items():
                own[name].copy_(value)
            held = dict(module.named_buffers())
            for name, value in (state or {}).get(index, {}).items():
                held[name].copy_(value)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all of their names, in the order of `state_dict` as far as they are in it."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, x in (*part._parameters.items(), *part._buffers.items()):
            if x is not None:
                yield f"{prefix}.{name}" if prefix else name, x


def canonical(module: nn.Module) -> dict[str, str]:
    """The first name of each tensor, by all of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(x), name) for name, x in named_tensors(module)}
