"""Make and initialise tensors for a module that was split on the meta device, on each rank for its own stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from fpipe.interop.modules.functions import Tree, canonical
from fpipe.interop.modules.skeletons import own_tensors, registered, shallow_clone
from fpipe.interop.modules.state_dicts import specs_on
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

    Buffers that are not in the state_dict keep their values of the time of the split, if they had any.

    Raises:
        TypeError: a stage does not come from a module.
        ValueError: a tensor was not initialised.
    """
    params, state = dict[int, Tree](), dict[int, Tree]()
    unset = list[str]()
    for stage, spec in specs_on(pipeline, stages).items():
        fn = pipeline.stages[stage].fn
        assert isinstance(fn, StageFunction)
        front = "" if fn.qualified else f"stages.{stage}."
        make = partial(_entries, fn.skeleton, device=torch.device(device), init=init, seed=(seed, front))
        new = make({*spec.params, *spec.state}, fill=FIRST)
        blank = {name for name, x in new.items() if name not in fn.nonpersistent_buffers and _is_blank(x)}
        again = make(blank, fill=SECOND)
        unset += [f"{front}{name}" for name, x in again.items() if not torch.equal(_memory(x), _memory(new[name]))]
        new |= {name: x.to(device) for name, x in fn.nonpersistent_buffers.items() if name in new}
        params[stage] = {name: new[name] for name in spec.params}
        state |= {stage: {name: new[name] for name in spec.state}} if spec.state else {}
    if unset:
        raise ValueError(
            f"nothing sets {', '.join(unset[:5])}{' and more' if len(unset) > 5 else ''}: give their submodules a "
            "reset_parameters, or pass init="
        )
    return params, state


def _entries(
    skeleton: nn.Module, wanted: set[str], device: torch.device, init: Init | None, seed: tuple[int, str], fill: int
) -> Tree:
    """Return the tensors of these names, initialised."""
    first, entries = canonical(skeleton), Tree()
    for prefix, module in skeleton.named_modules():
        names = {name: first[f"{prefix}.{name}" if prefix else name] for name, _ in own_tensors(module)}
        if new := {name: entry for name, entry in names.items() if entry in wanted - entries.keys()}:
            values = _initialised(module, device, init or _reset, _seed(*seed, prefix), fill)
            entries |= {entry: values[name] for name, entry in new.items()}
    return entries


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
    return x.numel() > 0 and bool((_memory(x) == FIRST).all() or (x != x).all())


def _memory(x: Tensor) -> Tensor:
    """Return the bytes of a tensor's memory."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
