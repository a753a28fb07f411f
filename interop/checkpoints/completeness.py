"""The params and state that stages hold: a save must have all of them, and some buffers belong to no state_dict."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any

from torch import nn

from fpipe.interop.checkpoints.manifest import CheckpointError
from fpipe.interop.checkpoints.names import Name, kind_of, name_of, some
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import StageFunction

Missing = tuple[str, str]
"""The section of params or of a state, and a text that says what it lacks."""


def missing_entries(sections: Mapping[str, Any], pipeline: Pipeline, ranks: Mapping[int, int]) -> list[Missing]:
    """Return what the sections lack of the params and state of stages. `ranks` maps these stages to their ranks.

    Functions of modules declare what they hold; plain ones have a tree in params, and one in state if they are
    stateful.
    """
    tied = {use for uses in pipeline.entries.values() for use in uses[1:]}
    missing: list[Missing] = []
    states = [section for section in sections if kind_of(section) == "state"] or ["state"]
    for section, stage in product(("params", *states), ranks):
        tree, each, lack = sections.get(section, {}), pipeline.stages[stage], ""
        if isinstance(each.fn, StageFunction):
            declared = {name for name in getattr(each.fn.spec, kind_of(section)) if (stage, (name,)) not in tied}
            if names := sorted(declared - tree.get(stage, {}).keys()):
                lack = f"lacks {some(names)}"
        elif stage not in tree and (section == "params" or each.stateful):
            lack = "has nothing"
        if lack:
            missing.append((section, f"rank {ranks[stage]} holds stage {stage}, of which {section} {lack}"))
    return missing


def check_complete(sections: Collection[str], missing: Iterable[Missing]) -> None:
    """Raise if a section that is saved lacks something of a stage.

    Args:
        sections: their names, on all ranks.
        missing: on all ranks.

    Raises:
        CheckpointError: says which ranks hold it.
    """
    saved = {*map(kind_of, sections)}
    if texts := [text for section, text in missing if kind_of(section) in saved]:
        raise CheckpointError(
            f"{some(texts, '; ')}: pipeline.params_on(params, plan, rank) and pipeline.state_on(state, plan, rank) "
            "return what a rank needs"
        )


def nonpersistent(pipeline: Pipeline) -> list[Name]:
    """Return the names of modules' buffers that no state_dict has."""
    names: list[Name] = []
    for stage, each in enumerate(pipeline.stages):
        if isinstance(each.fn, StageFunction):
            listed = {*each.fn.aliases.values()}
            for section, tree in (("params", each.fn.spec.params), ("state", each.fn.spec.state)):
                hidden = [n for n, x in tree.items() if n not in listed and not isinstance(x, nn.Parameter)]
                names += [name_of(section, (stage, name), pipeline) for name in hidden]
    return names
