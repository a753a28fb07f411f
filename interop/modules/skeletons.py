"""Modules without tensors (skeletons), and modules with the tensors of a call.

Invariants:
- A skeleton has no memory except for plain tensors, which are constants.
- During a call, every attribute that refers to a parameter, buffer or submodule refers to the call's, also inside
  lists, tuples and dicts.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from fpipe.errors import StageError
from fpipe.interop.modules.attributes import REGISTERED, attributes, warning_of_changes
from fpipe.stages.pytree import flatten
from fpipe.stages.sharding import is_dtensor

INSIDE = "_orig_mod"
"""The name under which torch.compile stores the module that it wraps."""


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile wraps, or the module itself."""
    return dict(module._modules).get(INSIDE) or module


def validated(module: nn.Module, *, exported: bool = False, stage: int | None = None) -> nn.Module:
    """Return the module, without the wrapper of torch.compile, if it can become a stage.

    Args:
        exported: the module goes through torch.export, which loses gradient hooks of modules. Gradient hooks of
            parameters are lost in any case.
        stage: the stage's number, for messages.

    Raises:
        StageError: the module has hooks that would be lost, tensors without a shape, or parts of torch.jit; or it went
            through `fully_shard`, or through `parallelize_module` where it is exported.
    """
    if scripted := [name or "it" for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]:
        raise StageError(
            f"{_some(scripted)} is a module of torch.jit, whose code reads its own tensors alone: take the module that "
            "was scripted or traced",
            stage=stage,
        )
    module = uncompiled(module)
    _refuse_sharded(module, exported, stage)
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    if lazy := [name for name, x in tensors if is_lazy(x)]:
        raise StageError(
            f"no shape is known yet of {_some(lazy)}, as of lazy modules: run the module once on an example first",
            stage=stage,
        )
    wrapped = [name for name, part in module.named_modules() if INSIDE in part._modules]
    if wrapped and not exported:
        raise StageError(
            f"{_some(wrapped)} is wrapped by torch.compile: take the module inside, and have the stages' graphs "
            "compiled by value_and_grad(..., compile=True)",
            stage=stage,
        )
    hooked = [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    way = "remove it, and change gradients where the step gives them"
    if exported and not hooked:
        parts = module.named_modules()
        hooked = [name or "the module itself" for name, m in parts if m._backward_hooks or m._backward_pre_hooks]
        way += ", or cut the module by hand: interop.from_modules keeps it"
    if hooked:
        loser = "export" if exported else "a stage"
        raise StageError(f"{_some(hooked)} has a hook on gradients, which {loser} would lose: {way}", stage=stage)
    return module


def _refuse_sharded(module: nn.Module, exported: bool, stage: int | None) -> None:
    """Raise StageError for a module that torch has sharded in a way that a stage can't be."""
    if sharded := [name or "it" for name, part in module.named_modules() if type(part).__name__.startswith("FSDP")]:
        raise StageError(
            f"{_some(sharded)} went through fully_shard, whose hooks gather parameters outside of a stage: take the "
            "module without it, and shard its params over the replicas by interop.fsdp(params, mesh['dp'])",
            stage=stage,
        )
    if exported and (placed := [name for name, x in module.named_parameters() if is_dtensor(x)]):
        raise StageError(
            f"{_some(placed)} is a DTensor, as after parallelize_module, which torch.export can't trace: split the "
            "module without it, and shard the params by interop.shard(params, mesh['tp'], interop.styles.megatron(...))"
            "; or cut it by hand: interop.from_modules takes it as it is",
            stage=stage,
        )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"


def to_meta(module: nn.Module, stage: int | None = None) -> nn.Module:
    """Return a copy of the module with its parameters and buffers on the meta device.

    Plain tensors in attributes are constants, and are copied. A tensor that has a grad_fn, as one that an earlier
    forward has left, or that shares memory with a parameter, is on the meta device too: forward must set it before it
    reads it.

    Args:
        stage: the stage's number, for messages.

    Raises:
        StageError: an attribute cannot be copied.
    """
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(x): registered(x.detach().to("meta"), x) for x in tensors}
    memories = {_memory(x) for x in tensors} - {None}
    for x in _tensors([value for *_, value in attributes(module)]):
        if id(x) not in memo and (x.grad_fn is not None or _memory(x) in memories):
            memo[id(x)] = x.detach().to("meta")
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise StageError(
            f"{_uncopied(module, memo)} can't be copied ({text}). Stages are copies of modules: set it to None before "
            "the module is cut, if an earlier forward has left it there, or keep it outside of the module",
            stage=stage,
        ) from error


def _memory(x: Tensor) -> int | None:
    plain = x.layout is torch.strided and x.device.type != "meta"
    return x.untyped_storage()._cdata if plain and x.numel() else None


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tree, also within subclasses of list, tuple and dict that torch does not register."""
    for x in pytree.tree_leaves(tree):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple | dict):
            yield from _tensors(list(x.values() if isinstance(x, dict) else x))


def registered(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor as another one is registered: as a parameter, or as it is."""
    return nn.Parameter(tensor, like.requires_grad) if isinstance(like, nn.Parameter) else tensor


def _uncopied(module: nn.Module, memo: Mapping[int, Any]) -> str:
    """Return the attribute that cannot be copied, or the module's type."""
    for prefix, _, name, value in attributes(module):
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:
            return f"{prefix}.{name}" if prefix else name
    return f"a {type(module).__name__}"


def bind_tensors(skeleton: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module like the skeleton that has these parameters and buffers, also after the call.

    `torch.func.functional_call` removes them when it returns. A checkpointed block, which runs again in the backward,
    would then find none.

    Raises:
        RuntimeError: names are missing, or unknown to the skeleton.
    """
    named = {**dict(skeleton.named_parameters()), **dict(skeleton.named_buffers())}
    for what, names in (("Missing", named.keys() - tensors.keys()), ("Unexpected", tensors.keys() - named.keys())):
        if names:
            raise RuntimeError(f"{what} key(s) for {type(skeleton).__name__}: {', '.join(map(repr, sorted(names)))}")
    new = {id(tensor): tensors[name] for name, tensor in named.items()}
    twins = {id(module): shallow_clone(module, new) for module in skeleton.modules()}
    replacements = {**new, **twins}
    for twin in twins.values():
        plain = {name: value for name, value in twin.__dict__.items() if name not in REGISTERED}
        twin.__dict__.update({name: _replaced(value, replacements) for name, value in plain.items()})
        twin._modules = {name: child and twins[id(child)] for name, child in twin._modules.items()}
    return twins[id(skeleton)]


def shallow_clone(module: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """Return a copy of a module, without its submodules, that has these tensors and shares everything else."""
    twin: nn.Module = object.__new__(module.__class__)  # each GraphModule has its own class
    twin.__dict__.update({k: copy.copy(v) if type(v) in (list, dict, set) else v for k, v in module.__dict__.items()})
    for kind in ("_parameters", "_buffers"):
        twin.__dict__[kind] = {name: tensors.get(id(x), x) for name, x in module.__dict__[kind].items()}
    return twin


def _replaced(value: Any, new: Mapping[int, Any]) -> Any:
    """Return a value with new tensors, modules and bound methods, by the ids of the old."""
    if isinstance(value, Tensor | nn.Module):
        return new.get(id(value), value)
    if isinstance(value, MethodType) and id(value.__self__) in new:
        return MethodType(value.__func__, new[id(value.__self__)])
    if type(value) in (dict, list, tuple):
        before = list(value.values()) if type(value) is dict else value
        after = [_replaced(x, new) for x in before]
        if any(a is not b for a, b in zip(after, before, strict=True)):
            return dict(zip(value, after, strict=True)) if type(value) is dict else type(value)(after)
    return value


def rebinding_attributes(module: nn.Module) -> Callable[..., Any]:
    """Return the module's forward, during which attributes refer to the tensors that are registered at that time.

    torch.export replaces tensors only where they are registered.
    """
    places = {id(x): (part, name) for part in module.modules() for name, x in own_tensors(part)}
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        now = {key: getattr(part, name) for key, (part, name) in places.items()}
        new = [(part.__dict__, name, value, _replaced(value, now)) for _, part, name, value in attributes(module)]
        changed = [each for each in new if each[2] is not each[3]]
        for values, name, _, after in changed:
            values[name] = after
        try:
            return forward(*args, **kwargs)
        finally:
            for values, name, before, after in changed:
                if values.get(name) is after:
                    values[name] = before

    return run


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a module's parameters and buffers, without those of its submodules, by name."""
    return [(name, x) for name, x in (*module._parameters.items(), *module._buffers.items()) if x is not None]


def call(
    skeleton: nn.Module, tensors: Mapping[str, Tensor], inputs: Sequence[Any], watched: bool
) -> tuple[Any, nn.Module]:
    """Run the module with these parameters and buffers. Return its output, and the module that has them.

    Args:
        watched: warn of attributes that forward reads and then changes.

    Raises:
        StageError: forward has read a tensor of the skeleton.
    """
    module = bind_tensors(skeleton, tensors)
    ungiven = (
        "forward reads a tensor that a stage isn't given: what an earlier forward left in an attribute, or a parameter "
        "through an object that is no module, list, tuple or dict. Have forward compute the one, and take the other "
        "from where it is registered"
    )
    try:
        with warning_of_changes(module, inputs) if watched else nullcontext():
            outputs = module(*inputs)
    except RuntimeError as error:
        if re.search(r"\bmeta\b", str(error)) and not _on_meta((tensors, inputs)):
            raise StageError(ungiven) from error
        raise
    if _on_meta(outputs) and not _on_meta((tensors, inputs)):
        raise StageError(ungiven)
    return outputs, module


def _on_meta(tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.device.type == "meta" for x in flatten(tree).leaves)
