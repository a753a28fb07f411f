"""The params and state that stages hold: a save must have all of them, and some buffers belong to no state_dict."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fpipe.interop.checkpoints.names import Name, name_of, some
from fpipe.interop.checkpoints.storage import CheckpointError
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import StageFunction

Missing = tuple[str, int, list[str]]
"""`params` or `state`, a stage, and the names that are missing; no names where nothing of the stage is there."""


def missing_entries(sections: Mapping[str, Any], pipeline: Pipeline, stages: Collection[int]) -> list[Missing]:
    """Return what the sections lack of the params and state of some stages.

    Functions of modules declare what they hold; plain ones have a tree in params, and one in state if they are
    stateful.
    """
    tied = {use for uses in pipeline.entries.values() for use in uses[1:]}
    missing: list[Missing] = []
    for section in ("params", "state"):
        tree = sections.get(section, {})
        for stage in stages:
            each = pipeline.stages[stage]
            if isinstance(each.fn, StageFunction):
                own, declared = tree.get(stage, {}), getattr(each.fn.spec, section)
                names = [name for name in sorted(declared) if name not in own and (stage, (name,)) not in tied]
                missing += [(section, stage, names)] if names else []
            elif stage not in tree and (section == "params" or each.stateful):
                missing.append((section, stage, []))
    return missing


def check_complete(sections: Collection[str], missing: Iterable[Missing], holders: Sequence[Sequence[int]]) -> None:
    """Raise if a section that is saved lacks something of a stage.

    Args:
        sections: their names, on all ranks.
        missing: on all ranks.
        holders: the ranks that hold each stage.

    Raises:
        CheckpointError: says which ranks hold it.
    """
    texts = [
        f"rank {holders[stage][0]} holds stage {stage}, of which {section} "
        + (f"lacks {some(names)}" if names else "has nothing")
        for section, stage, names in missing
        if section in sections
    ]
    if texts:
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
                names += [name_of(section, (stage, name), pipeline) for name in tree if name not in listed]
    return names
