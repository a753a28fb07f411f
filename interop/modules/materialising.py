"""Make and initialise tensors for a module that was split on the meta device, on each rank for its own stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fpipe.interop.modules.functions import Tree, canonical
from fpipe.interop.modules.skeletons import own_tensors, registered, shallow_clone
from fpipe.interop.modules.state_dicts import place, specs_on
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import StageFunction

Init = Callable[[nn.Module], object]

FIRST, SECOND = 0xFF, 0x7D
"""The bytes that fill memory before it is initialised: floats of the first are NaN, and remain NaN in arithmetic."""


def materialise(
    pipeline: Pipeline,
    stages: Iterable[int] | None = None,
    *,
    device: torch.device | str = "cpu",
    init: Init | None = None,
    seed: int = 0,
    like: Mapping[int, Tree] | None = None,
) -> tuple[dict[int, Tree], dict[int, Tree]]:
    """Return `(params, state)` of stages that come from modules, with new tensors, initialised.

    Args:
        stages: the stages to return, with the entries that they share: `plan.stages_on(rank)`. By default all.
        init: `init(submodule)` sets the submodule's own tensors in place. By default its `reset_parameters` or
            `_reset_parameters`. It is called for each submodule with tensors in these stages, outer ones first. Only
            the submodule's own tensors are real, so a container cannot initialise those of its parts. For Hugging
            Face's models, use `model._init_weights`.
        seed: seeds the random numbers, together with the submodule's name. A tensor is the same on every rank and for
            every number of stages. The global generators are restored.
        like: params on the meta device that are placed over a mesh, as by `fsdp`: a parameter is placed as there. A
            submodule's tensors are made whole, and all but this process's pieces are freed before the next is made.

    Buffers that are not in the state_dict keep their values of the time of the split, if they had any.

    Raises:
        TypeError: a stage does not come from a module.
        ValueError: a tensor was not initialised; or `like` lacks one.
    """
    params, state = dict[int, Tree](), dict[int, Tree]()
    unset = list[str]()
    for stage, spec in specs_on(pipeline, stages).items():
        fn = pipeline.stages[stage].fn
        assert isinstance(fn, StageFunction)
        front = "" if fn.qualified else f"stages.{stage}."
        trees = {name: None if like is None else like.get(stage, {}) for name in spec.params}
        making = _Making(fn, torch.device(device), init or _reset, (seed, front), trees)
        new = making.entries({*spec.params, *spec.state})
        unset += [f"{front}{name}" for name in making.unset]
        params[stage] = {name: new[name] for name in spec.params}
        state |= {stage: {name: new[name] for name in spec.state}} if spec.state else {}
    if unset:
        raise ValueError(
            f"nothing sets {', '.join(unset[:5])}{' and more' if len(unset) > 5 else ''}: give their submodules a "
            "reset_parameters, or pass init="
        )
    return params, state


@dataclass
class _Making:
    """Makes the tensors of one stage.

    Args:
        seed: the seed, and the front of the submodules' names.
        like: by the name of each parameter, the tree that it is placed like.
        unset: the names of tensors that nothing has set.
    """

    fn: StageFunction
    device: torch.device
    init: Init
    seed: tuple[int, str]
    like: Mapping[str, Mapping[str, Tensor] | None]
    unset: list[str] = field(default_factory=list)

    def entries(self, wanted: set[str]) -> Tree:
        """Return the tensors of these names, initialised."""
        first, entries = canonical(self.fn.skeleton), Tree()
        for prefix, module in self.fn.skeleton.named_modules():
            names = {name: first[f"{prefix}.{name}" if prefix else name] for name, _ in own_tensors(module)}
            if new := {name: entry for name, entry in names.items() if entry in wanted - entries.keys()}:
                entries |= self._of(module, prefix, new)
        return entries

    def _of(self, module: nn.Module, prefix: str, names: Mapping[str, str]) -> Tree:
        """Return a submodule's own tensors by entry; they are whole in here alone."""
        seed, fixed = _seed(*self.seed, prefix), self.fn.nonpersistent_buffers
        values = _initialised(module, self.device, self.init, seed, FIRST)
        if blank := [name for name, entry in names.items() if entry not in fixed and _is_blank(values[name])]:
            again = _initialised(module, self.device, self.init, seed, SECOND)
            changed = [name for name in blank if not torch.equal(_memory(again[name]), _memory(values[name]))]
            self.unset += [names[name] for name in changed]
        values |= {name: fixed[entry].to(self.device) for name, entry in names.items() if entry in fixed}
        return {entry: place(entry, values.pop(name), self.like.get(entry)) for name, entry in names.items()}


def _initialised(module: nn.Module, device: torch.device, init: Init, seed: int, fill: int) -> Tree:
    """Return a module's own tensors, initialised."""
    twin = shallow_clone(module, {id(x): _filled(x, device, fill) for _, x in own_tensors(module)})
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        init(twin)
    return {name: getattr(twin, name).detach() for name, _ in own_tensors(module)}


def _reset(module: nn.Module) -> None:
    """Call a module's own initialisation, which torch's modules have under one of two names."""
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            break


def _seed(seed: int, front: str, prefix: str) -> int:
    digest = hashlib.blake2b(f"{seed} {front}{prefix}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _filled(x: Tensor, device: torch.device, fill: int) -> Tensor:
    """Return a tensor like this one, with memory of one byte."""
    tensor = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    _memory(tensor).fill_(fill)
    return registered(tensor, x)


def _is_blank(x: Tensor) -> bool:
    """Whether a tensor may not have been set: its memory has the bytes that it was filled with, or all are NaN."""
    if not x.numel():
        return False
    memory, first = _memory(x), x[(0,) * x.ndim]
    return bool((memory[0] == FIRST and (memory == FIRST).all()) or (first != first and (x != x).all()))


def _memory(x: Tensor) -> Tensor:
    """Return the bytes of a tensor's memory."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
