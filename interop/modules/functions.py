"""Modules as stages, and stages' tensors back into modules."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fpipe.errors import StageError
from fpipe.errors.arguments import checked
from fpipe.interop.modules.shared_memory import overlapping, refuse_overlapping_params
from fpipe.interop.modules.skeletons import call, own_tensors, to_meta, uncompiled, validated
from fpipe.plan import Cotangents
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.sharding import is_dtensor, placed_alike
from fpipe.stages.stage import Original, Read, Stage, StageFunction, StageSpec, frozen_paths

Tree = dict[str, Tensor]


@dataclass(frozen=True)
class ModuleFunction:
    """A module's forward as a pure function of its parameters; if it has buffers, of its parameters and state.

    Args:
        skeleton: the module, on the meta device, in the mode that the function runs in.
        stateful: the module has buffers.
        qualified: names are those of the whole module that this one is a part of.
        original_mode: the skeleton in the mode of the original module, if that is another one.
        originals: the parameters of the original module.
        shared: the buffers whose memory another one has too, as of a module that is in two stages; with its name.
    """

    skeleton: nn.Module
    stateful: bool
    qualified: bool = False
    original_mode: nn.Module | None = None
    originals: Sequence[Original] = field(default=(), compare=False)
    shared: Mapping[str, str] = field(default_factory=dict, hash=False)
    _has_run: set[bool] = field(default_factory=set, init=False, repr=False, compare=False)

    def __call__(self, params: Tree, *inputs: Any) -> Any:
        watched = get_proxy_mode() is not None or not self._has_run  # in each trace, and in the first run without
        self._has_run.add(True)
        if not self.stateful:
            return call(self.skeleton, params, inputs, watched)[0]
        state, *rest = inputs
        with torch.inference_mode(False):  # else they would count no changes
            buffers = {name: buffer.clone() for name, buffer in state.items()}
        versions = {name: buffers[name]._version for name in self.shared}
        outputs, module = call(self.skeleton, {**params, **buffers}, rest, watched)
        new = {name: module.get_buffer(name) for name in state}  # changed in place, or assigned anew
        for name, version in versions.items():
            if new[name] is not buffers[name] or new[name]._version != version:
                raise StageError(
                    f"forward changes its buffer {name}, which is {self.shared[name]} as well: a buffer that changes "
                    "belongs to one stage. Put all its uses into one stage, or register a buffer for each"
                )
        return outputs, new

    @property
    def spec(self) -> StageSpec:
        return StageSpec(dict(self.skeleton.named_parameters()), dict(self.skeleton.named_buffers()), {})

    @property
    def aliases(self) -> dict[str, str]:
        """The entry for each name in the module's state_dict."""
        return aliases_of(self.skeleton)

    @property
    def nonpersistent_buffers(self) -> Tree:
        """None: a buffer outside the state_dict is state, as every buffer."""
        return {}

    def accepts(self, batch: Any) -> None:
        """Accept every batch."""


@checked("cotangents")
def from_modules(
    modules: Sequence[nn.Module] | nn.Module,
    *,
    at: Sequence[int] | None = None,
    loss: Callable[..., Any] | None = None,
    reads: Mapping[int, Sequence[Read | int]] | None = None,
    cotangents: Cotangents = "by_consumer",
) -> tuple[Pipeline, dict[int, Tree]]:
    """Return a pipeline with a stage for each module, and the parameters by stage, under the modules' own names.

    A parameter that several modules share is tied; the lowest stage owns it. Parameters with `requires_grad=False` are
    frozen; that is fixed here, and a step warns if it has changed in the module. A module with buffers becomes a
    stateful stage: `buffers(modules)` is its first state. The mode, train or eval, is fixed here too; `eval_mode` makes
    a pipeline in the other. A module that torch.compile wraps is unwrapped: `value_and_grad(..., compile=True)`
    compiles stages. A module that went through torch's `parallelize_module` keeps its DTensors and its hooks: their
    collectives are nodes of the stage's graph, and stages pass on the tensors that torch would, each process its own.

    Args:
        at: the indices of the modules of an `nn.Sequential` that begin a stage; names are then those of the whole.
        loss: `loss(output, target) -> loss | (loss, aux)`.
        reads: the reads of stages that do not read the output of the stage before.
        cotangents: "by_rank" sends one gradient of an output from each rank, see `fpipe.Pipeline`.

    The modules are not changed. The parameters share their memory. A warning names attributes that forward reads and
    then changes: the stages do not pass them on from call to call.

    Raises:
        StageError: a module has hooks on gradients of parameters, tensors without a shape, an attribute that cannot
            be copied, or a parameter over another tensor's memory, or went through `fully_shard`; or, in a step, it
            changes a buffer whose memory another one has too, as of one batch norm in two stages.

    >>> pipeline, params = from_modules(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False)), at=[2])
    >>> {stage: {name: tuple(p.shape) for name, p in tree.items()} for stage, tree in params.items()}
    {0: {'0.weight': (3, 2), '0.bias': (3,)}, 1: {'2.weight': (1, 3)}}
    """
    if isinstance(modules, nn.Module):
        modules = cast(nn.Sequential, uncompiled(modules))
    if at is not None:
        modules = _cut(modules, at)
    modules = [validated(module, stage=stage) for stage, module in enumerate(modules)]
    shared = _shared_buffers(modules)
    home: dict[int, tuple[int, str]] = {}
    ties: dict[tuple[int, str], tuple[int, str]] = {}
    params: dict[int, Tree] = {}
    stages = []
    for index, module in enumerate(modules):
        named = dict(module.named_parameters())
        owners = {(index, name): home.setdefault(id(parameter), (index, name)) for name, parameter in named.items()}
        ties |= {entry: owner for entry, owner in owners.items() if owner != entry}
        params[index] = {name: parameter.detach() for name, parameter in named.items() if (index, name) not in ties}
        frozen = frozen_paths(named)
        stateful = any(True for _ in module.buffers())
        skeleton, originals = to_meta(module, index), originals_of(named)
        function = ModuleFunction(skeleton, stateful, at is not None, None, originals, shared.get(index, {}))
        local = any(map(is_dtensor, named.values()))
        stages.append(Stage(function, (reads or {}).get(index), stateful, frozen, local=local))
    return Pipeline(stages, loss, ties=ties, cotangents=cotangents), params


def _shared_buffers(modules: Sequence[nn.Module]) -> dict[int, dict[str, str]]:
    """Return by stage the buffers whose memory another one has too, each with the other's place.

    Raises:
        StageError: a parameter has memory that another tensor has too.
    """
    buffers = {f"{name} of stage {s}": (s, name, x) for s, m in enumerate(modules) for name, x in m.named_buffers()}
    params = {f"{name} of stage {s}": x for s, m in enumerate(modules) for name, x in m.named_parameters()}
    tensors = {place: x for place, (_, _, x) in buffers.items()}
    refuse_overlapping_params(params | tensors)
    pairs = [
        *overlapping(tensors),
        *((a, b) for a, b in itertools.combinations(tensors, 2) if tensors[a] is tensors[b]),
    ]
    shared: dict[int, dict[str, str]] = {}
    for one, other in pairs:
        for place, twin in ((one, other), (other, one)):
            stage, name, _ = buffers[place]
            shared.setdefault(stage, {})[name] = twin
    return shared


def _cut(modules: Sequence[nn.Module] | nn.Module, at: Sequence[int]) -> list[nn.Module]:
    if not isinstance(modules, nn.Sequential):
        raise TypeError(
            f"at= cuts an nn.Sequential, not a {type(modules).__name__}: a list has a module for each stage"
        )
    bounds = [0, *at, len(modules)]
    if any(low >= high for low, high in itertools.pairwise(bounds)):
        raise ValueError(f"at={list(at)} must rise, from 1 to {len(modules) - 1}, so that no stage is empty")
    parts = [modules[low:high] for low, high in itertools.pairwise(bounds)]
    for part in parts:
        part.training = modules.training
    return parts


@checked("cotangents")
def from_functions(
    functions: Sequence[Callable[..., Any]],
    *,
    loss: Callable[..., Any] | None = None,
    reads: Mapping[int, Sequence[Read | int]] | None = None,
    ties: Mapping[tuple[int, Any], tuple[int, Any]] | None = None,
    stateful: Collection[int] = (),
    frozen: Mapping[int, Sequence[Any]] | None = None,
    cotangents: Cotangents = "by_consumer",
) -> Pipeline:
    """Return a pipeline with a stage for each pure function `fn(params, *inputs) -> outputs`.

    Args:
        loss, ties, cotangents: see `fpipe.Pipeline`.
        reads, frozen: by stage, see `fpipe.Stage`.
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
    return Pipeline(stages, loss, ties=ties, cotangents=cotangents)


@checked("module")
def buffers(modules: Sequence[nn.Module] | Pipeline, module: nn.Module | None = None) -> dict[int, Tree]:
    """Return the state of stateful stages: copies of the buffers, by stage.

    Args:
        modules: the modules of `from_modules`; or a pipeline, as of `split`.
        module: the whole module, if `modules` is a pipeline.

    Raises:
        TypeError: `modules` is a pipeline, and `module` is no module; or `module` stands beside a list of modules.
    """
    if not isinstance(modules, Pipeline):
        if module is not None:
            raise TypeError("module= is the module of a pipeline: leave it out beside the modules of from_modules")
        trees = {i: {n: b.detach().clone() for n, b in uncompiled(m).named_buffers()} for i, m in enumerate(modules)}
        return {index: tree for index, tree in trees.items() if tree}
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"a pipeline holds no values, and module is a {type(module).__name__}: call buffers(pipeline, module) with "
            "the module that was split, or buffers(modules) with those of from_modules"
        )
    values = dict(uncompiled(module).named_buffers(remove_duplicate=False))
    names = {i: spec_of(modules, i).state for i, stage in enumerate(modules.stages) if stage.stateful}
    return {i: {name: values[name].detach().clone() for name in tree} for i, tree in names.items()}


@checked()
def into_modules(
    modules: Sequence[nn.Module], params: Mapping[int, Tree], state: Mapping[int, Tree] | None = None
) -> None:
    """Copy parameters and buffers back into modules, in place. A shared parameter is copied with its owner.

    A stage without an entry in `params` is not changed.

    A DTensor is copied into one that is placed alike, as of a module that went through `parallelize_module`.

    Raises:
        TypeError: an entry is a DTensor, of which this process has a piece, and the module's is placed otherwise.
    """
    with torch.no_grad():
        for index, module in enumerate(map(uncompiled, modules)):
            for trees, tensors in ((params, module.named_parameters()), (state or {}, module.named_buffers())):
                by_name = dict(tensors)
                for name, value in trees.get(index, {}).items():
                    if is_dtensor(value) and not placed_alike(value, by_name[name]):
                        raise TypeError(
                            f"{name} of stage {index} is a DTensor: pass its full_tensor(), for which every process of "
                            f"{value.device_mesh} calls it"
                        )
                    by_name[name].copy_(value)


def originals_of(named: Mapping[str, Tensor]) -> tuple[Original, ...]:
    """Return references to the parameters among a module's tensors."""
    parameters = {name: x for name, x in named.items() if isinstance(x, nn.Parameter)}
    return tuple(Original(name, weakref.ref(x), x.requires_grad) for name, x in parameters.items())


def spec_of(pipeline: Pipeline, stage: int) -> StageSpec:
    """Return the spec of a stage.

    Raises:
        TypeError: the stage does not come from a module.
    """
    function = pipeline.stages[stage].fn
    if not isinstance(function, StageFunction):
        raise TypeError(f"stage {stage} does not come from a module, so the names of its params are unknown")
    return function.spec


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under all their names, in the order of `state_dict`."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, x in own_tensors(part):
            yield f"{prefix}.{name}" if prefix else name, x


def canonical(module: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor, by each of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(x), name) for name, x in named_tensors(module)}


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor, by each of its names in the state_dict."""
    listed = module.state_dict(keep_vars=True)
    return {name: first for name, first in canonical(module).items() if name in listed}
