"""The state_dict of a whole module as params and state by stage, and back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fpipe.interop.modules.functions import Contents, Tree
from fpipe.stages.pipeline import Pipeline


def from_state_dict(
    pipeline: Pipeline, state_dict: Mapping[str, Tensor], stages: Iterable[int] | None = None
) -> tuple[dict[int, Tree], dict[int, Tree]]:
    """`(params, state)` of a pipeline whose names are its module's own, as `split`'s are.

    Args:
        state_dict: the whole module's, as `module.state_dict()` gives it; any mapping will do, of which no more is
            read than is needed.
        stages: those that are wanted, with the entries that they share: `plan.stages_on(rank)`. By default all.

    Tensors share their memory with what they come from. Buffers that no state_dict has are as they were in the module
    when it was split.

    Raises:
        ValueError: names are missing or unknown, or shapes differ.
    """
    aliases, kept = _names(pipeline)
    held = entries_on(pipeline, stages)
    if extra := [name for name in state_dict if name.endswith("_extra_state")]:
        raise ValueError(f"stages carry no extra state of modules, as {extra[0]} is: leave it out of the state_dict")
    if unknown := [name for name in state_dict if name not in aliases and name not in kept]:
        near = difflib.get_close_matches(unknown[0], aliases, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"the module has no {', '.join(unknown[:5])}{meant}: this is another module's state_dict")
    source = {entry: alias for alias, entry in reversed(aliases.items()) if alias in state_dict}

    def found(tree: Mapping[str, Tensor]) -> Tree:
        missing = [name for name in tree if name not in source and name not in kept]
        if missing:
            raise ValueError(
                f"the state_dict lacks {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}; for what no "
                "state_dict has, take interop.materialise"
            )
        made = {name: state_dict[source[name]] if name in source else kept[name] for name in tree}
        for name, x in made.items():
            if x.shape != tree[name].shape:
                raise ValueError(f"{name} is of shape {list(x.shape)}, and {list(tree[name].shape)} in the module")
        return {name: x.detach() for name, x in made.items()}

    params = {stage: found(contents.params) for stage, contents in held.items()}
    return params, {stage: found(contents.state) for stage, contents in held.items() if contents.state}


def to_state_dict(
    pipeline: Pipeline, params: Mapping[int, Tree], state: Mapping[int, Tree] | None = None
) -> dict[str, Tensor]:
    """The module's state_dict, out of params and state of all stages or of some; without state, lacking its buffers.

    Every name that the module has for a tensor is there, as in `module.state_dict()`.
    """
    aliases, _ = _names(pipeline)
    found = {name: x for trees in (params, state or {}) for tree in trees.values() for name, x in tree.items()}
    return {alias: found[entry] for alias, entry in aliases.items() if entry in found}


def entries_on(pipeline: Pipeline, stages: Iterable[int] | None = None) -> dict[int, Contents]:
    """What lives with stages, and what they share with others, as tensors of the meta device."""
    wanted = set(range(len(pipeline.stages)) if stages is None else stages)
    held = {stage: contents_of(pipeline, stage) for stage in sorted(wanted)}
    found = {s: Contents(dict(contents.params), contents.state, contents.outputs) for s, contents in held.items()}
    for (owner, (name, *_)), uses in pipeline.entries.items():
        for user, (own, *_) in uses[1:]:
            if user in wanted:
                shared = found[user].params.pop(own)
                found.setdefault(owner, Contents({}, {}, {})).params[name] = shared
    return dict(sorted(found.items()))


def contents_of(pipeline: Pipeline, stage: int) -> Contents:
    """What a stage's function says of itself.

    Raises:
        TypeError: it doesn't come from a module.
    """
    found: Contents | None = getattr(pipeline.stages[stage].fn, "contents", None)
    if found is None:
        raise TypeError(f"stage {stage} comes from no module, so nothing is known of its params")
    return found


def _names(pipeline: Pipeline) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The entry of each of the module's names, and buffers that no state_dict has."""
    aliases: dict[str, str] = {}
    kept: dict[str, Tensor] = {}
    for index, stage in enumerate(pipeline.stages):
        fn: Any = stage.fn
        if not getattr(fn, "qualified", False):
            raise TypeError(
                f"stage {index} has names of its own, not those of a whole module: split gives such a pipeline, or "
                "from_modules of an nn.Sequential with at="
            )
        aliases |= fn.aliases
        kept |= fn.kept
    return aliases, kept
