"""Tensors for a module that was split on the meta device: each rank makes those of its own stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.interop.modules.functions import Tree, canonical
from fpipe.interop.modules.skeletons import twin_of
from fpipe.interop.modules.state_dicts import entries_on
from fpipe.stages.pipeline import Pipeline

Init = Callable[[nn.Module], object]


def materialise(
    pipeline: Pipeline,
    stages: Iterable[int] | None = None,
    *,
    device: torch.device | str = "cpu",
    init: Init | None = None,
    seed: int = 0,
) -> tuple[dict[int, Tree], dict[int, Tree]]:
    """`(params, state)` of stages that come from modules, with the tensors made and initialised here.

    Args:
        stages: those that are wanted, with the entries that they share: `plan.stages_on(rank)`. By default all.
        init: `init(submodule)`, which sets the tensors that a submodule itself has, in place; by default its own
            `reset_parameters` or `_reset_parameters`. It is called for submodules with tensors in these stages, those
            that hold others first; tensors of others stay on the meta device, so what a container does to the tensors
            of its parts is not done. Of Hugging Face's models, `model._init_weights`.
        seed: of random numbers, together with the submodule's name: a tensor is the same on every rank, and for every
            number of stages. The global generators are left as they were.

    Buffers that no state_dict has, and that had values when the module was split, keep these.

    Raises:
        TypeError: a stage comes from no module.
        ValueError: tensors that nothing has set.
    """
    params, state = dict[int, Tree](), dict[int, Tree]()
    unset = list[str]()
    for stage, contents in entries_on(pipeline, stages).items():
        fn: Any = pipeline.stages[stage].fn
        front = "" if fn.qualified else f"stages.{stage}."
        made, blank = _made(fn.skeleton, {*contents.params, *contents.state}, torch.device(device), init, (seed, front))
        made |= {name: x.to(device) for name, x in fn.kept.items() if name in made}
        unset += [f"{front}{name}" for name in made if name in blank and name not in fn.kept]
        params[stage] = {name: made[name] for name in contents.params}
        state |= {stage: {name: made[name] for name in contents.state}} if contents.state else {}
    if unset:
        raise ValueError(
            f"nothing sets {', '.join(unset[:5])}{' and more' if len(unset) > 5 else ''}: give their submodules a "
            "reset_parameters, or pass init="
        )
    return params, state


def _made(
    skeleton: nn.Module, wanted: set[str], device: torch.device, init: Init | None, seed: tuple[int, str]
) -> tuple[Tree, set[str]]:
    """The tensors of these names, as the submodules that have them set them, and the names of those that none sets."""
    first, found, blank = canonical(skeleton), Tree(), set[str]()
    for prefix, module in skeleton.named_modules():
        own = {**module._parameters, **module._buffers}
        names = {name: first[f"{prefix}.{name}" if prefix else name] for name, x in own.items() if x is not None}
        if not wanted.intersection(names.values()) - found.keys():
            continue
        made = _initialised(module, device, init or _reset, _seed(*seed, prefix), fill=False)
        unset = {name for name, x in made.items() if _is_unset(x)}
        if not all(map(_tells, made.values())):
            again = _initialised(module, device, init or _reset, _seed(*seed, prefix), fill=True)
            unset |= {
                name for name, x in made.items() if not _tells(x) and not x.any() and bool((again[name] == 1).all())
            }
        new = {name: entry for name, entry in names.items() if entry in wanted and entry not in found}
        found |= {entry: made[name] for name, entry in new.items()}
        blank |= {entry for name, entry in new.items() if name in unset}
    return found, blank


def _initialised(module: nn.Module, device: torch.device, init: Init, seed: int, fill: bool) -> Tree:
    """The tensors that a module itself has, as it sets them."""
    own = {name: x for name, x in (*module._parameters.items(), *module._buffers.items()) if x is not None}
    twin = twin_of(module, {id(x): _unset(x, device, fill) for x in own.values()})
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        init(twin)
    return {name: getattr(twin, name).detach() for name in own}


def _reset(module: nn.Module) -> None:
    """Its own initialisation, as torch's modules have it under one of two names."""
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            break


def _seed(seed: int, front: str, prefix: str) -> int:
    digest = hashlib.blake2b(f"{seed} {front}{prefix}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _unset(x: Tensor, device: torch.device, fill: bool) -> Tensor:
    """Memory with values by which it can be told that nobody has set it; `fill`, where it takes two to tell."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if _tells(x):
        made.fill_(torch.nan if x.is_floating_point() or x.is_complex() else torch.iinfo(x.dtype).min)
    else:
        made.fill_(fill)
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _is_unset(x: Tensor) -> bool:
    if not _tells(x) or not x.numel():
        return False
    blank = x.isnan() if x.is_floating_point() or x.is_complex() else x == torch.iinfo(x.dtype).min
    return bool(blank.all())


def _tells(x: Tensor) -> bool:
    """Whether a type has a value that no module would set: 0 is one for bool and unsigned integers."""
    return x.dtype not in (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
