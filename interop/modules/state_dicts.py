"""Convert the state_dict of a whole module to params and state by stage, and back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fpipe.errors.arguments import checked
from fpipe.interop.modules.functions import Tree, spec_of
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import StageFunction, StageSpec


@checked()
def from_state_dict(
    pipeline: Pipeline,
    state_dict: Mapping[str, Tensor],
    stages: Iterable[int] | None = None,
    *,
    like: Mapping[int, Tree] | None = None,
) -> tuple[dict[int, Tree], dict[int, Tree]]:
    """Return `(params, state)` for a pipeline whose names are those of its module, as of `split`.

    Args:
        state_dict: of the whole module: `module.state_dict()`, or another mapping. Only the tensors that are needed
            are read.
        stages: the stages to return, with the entries that they share: `plan.stages_on(rank)`. By default all.
        like: params, also on the meta device, that are placed over a mesh, as by `fsdp`: a parameter is placed as
            there. Tensors are read one by one, and this process's piece of each is kept.

    Tensors that are no DTensors share memory with the state_dict. Buffers that are not in the state_dict have their
    values of the time of the split.

    Raises:
        ValueError: names are missing or unknown, or shapes differ; or `like` lacks a parameter.
        TypeError: the pipeline's names are not those of one module.
    """
    aliases, nonpersistent = names_in_module(pipeline)
    specs = specs_on(pipeline, stages)
    if extra := [name for name in state_dict if name.endswith("_extra_state")]:
        raise ValueError(f"stages carry no extra state of modules, as {extra[0]} is: leave it out of the state_dict")
    if unknown := [name for name in state_dict if name not in aliases and name not in nonpersistent]:
        near = difflib.get_close_matches(unknown[0], aliases, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"the module has no {', '.join(unknown[:5])}{meant}: this is another module's state_dict")
    source = {entry: alias for alias, entry in reversed(aliases.items()) if alias in state_dict}

    def values(tree: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None) -> Tree:
        missing = [name for name in tree if name not in source and name not in nonpersistent]
        if missing:
            raise ValueError(
                f"the state_dict lacks {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}; "
                "interop.materialise makes tensors that no state_dict has"
            )
        return {name: value(name, spec.shape, like) for name, spec in tree.items()}

    def value(name: str, shape: torch.Size, like: Mapping[str, Tensor] | None) -> Tensor:
        x = state_dict[source[name]] if name in source else nonpersistent[name]
        if x.shape != shape:
            raise ValueError(f"{name} is of shape {list(x.shape)}, and {list(shape)} in the module")
        return place(name, x.detach(), like)

    trees = {stage: None if like is None else like.get(stage, {}) for stage in specs}
    params = {stage: values(spec.params, trees[stage]) for stage, spec in specs.items()}
    return params, {stage: values(spec.state) for stage, spec in specs.items() if spec.state}


def place(name: str, whole: Tensor, like: Mapping[str, Tensor] | None) -> Tensor:
    """Return a tensor placed like the one of its name; as it is where there is nothing to be like.

    Raises:
        ValueError: there is none of its name, or it is of another shape.
    """
    if like is None:
        return whole
    if name not in like:
        raise ValueError(f"like lacks {name}: pass the params of all these stages, as of the split on the meta device")
    from fpipe.interop.sharding import place_like  # takes time, and is for those who shard

    try:
        return place_like(whole, like[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@checked()
def to_state_dict(
    pipeline: Pipeline, params: Mapping[int, Tree], state: Mapping[int, Tree] | None = None
) -> dict[str, Tensor]:
    """Return the module's state_dict, out of params and state of all or some stages. Without state, it lacks buffers.

    It has every name of each tensor, as `module.state_dict()`.
    """
    aliases, _ = names_in_module(pipeline)
    entries = {name: x for trees in (params, state or {}) for tree in trees.values() for name, x in tree.items()}
    return {alias: entries[entry] for alias, entry in aliases.items() if entry in entries}


def specs_on(pipeline: Pipeline, stages: Iterable[int] | None = None) -> dict[int, StageSpec]:
    """Return the specs of stages, and of the entries that they share with others, by the stage that owns them."""
    wanted = set(range(len(pipeline.stages)) if stages is None else stages)
    specs = {stage: spec_of(pipeline, stage) for stage in sorted(wanted)}
    specs = {s: StageSpec(dict(spec.params), spec.state, spec.outputs) for s, spec in specs.items()}
    for (owner, (name, *_)), uses in pipeline.entries.items():
        for user, (own, *_) in uses[1:]:
            if user in wanted:
                shared = specs[user].params.pop(own)
                specs.setdefault(owner, StageSpec({}, {}, {})).params[name] = shared
    return dict(sorted(specs.items()))


def names_in_module(pipeline: Pipeline) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the entry for each name of the module, and the buffers that are not in its state_dict."""
    aliases: dict[str, str] = {}
    nonpersistent: dict[str, Tensor] = {}
    for index, stage in enumerate(pipeline.stages):
        fn = stage.fn
        if not isinstance(fn, StageFunction) or not fn.qualified:
            raise TypeError(
                f"stage {index} has names of its own, not those of a whole module: split gives such a pipeline, or "
                "from_modules of an nn.Sequential with at="
            )
        aliases |= fn.aliases
        nonpersistent |= fn.nonpersistent_buffers
    return aliases, nonpersistent
