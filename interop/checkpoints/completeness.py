"""What stages hold, as far as it is known: what a save must have of it, and what no state_dict has."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fpipe.interop.checkpoints.names import Name, dotted, known, some
from fpipe.interop.checkpoints.storage import CheckpointError
from fpipe.stages.pipeline import Pipeline

Lack = tuple[str, int, list[str]]
"""`params` or `state`, a stage, and what is not there of it; no names where it has nothing there."""


def lacking(tree: Mapping[str, Any], pipeline: Pipeline, saved: Container[Name], stages: Container[int]) -> list[Lack]:
    """What a training state lacks of some stages' params and state.

    Functions of modules say what they hold, entry by entry; plain ones have a tree in params, and one in state where
    they are stateful.
    """
    names: dict[tuple[str, int], list[str]] = {}
    for entry in known(pipeline):
        if entry.stage is not None and entry.stage in stages and entry.name not in saved:
            names.setdefault((entry.name[0], entry.stage), []).append(dotted(entry.name[1:]))
    for number, stage in enumerate(pipeline.stages):
        if number in stages and not hasattr(stage.fn, "contents"):
            for section in ("params", "state") if stage.stateful else ("params",):
                given = tree.get(section)
                if not isinstance(given, Mapping) or number not in given:
                    names[section, number] = []
    return [(section, stage, lost) for (section, stage), lost in names.items()]


def check_whole(sections: Iterable[str], lacks: Iterable[Sequence[Any]], holders: Sequence[Sequence[int]]) -> None:
    """See that all stages are there, where any is.

    Args:
        sections: the names at the top of the training state, on all ranks.
        lacks: what ranks lack.
        holders: the ranks that hold each stage.

    Raises:
        CheckpointError: some are not.
    """
    given = {*sections}
    found = [(section, stage, names) for section, stage, names in lacks if section in given]
    if found:
        texts = [
            f"rank {holders[stage][0]} holds stage {stage}, of which {section} "
            + (f"lacks {some(names)}" if names else "has nothing")
            for section, stage, names in found
        ]
        first = found[0][0]
        raise CheckpointError(
            f"{some(texts, '; ')}: pipeline.{first}_on({first}, plan, rank) gives what a rank needs; what is kept of "
            "some stages alone has a name of its own"
        )


def nonpersistent(pipeline: Pipeline) -> frozenset[Name]:
    """The buffers of modules that no state_dict has."""
    modules = {stage: getattr(each.fn, "skeleton", None) for stage, each in enumerate(pipeline.stages)}
    names = {module: _unlisted(module) for module in {*modules.values()} if module is not None}
    return frozenset(entry.name for entry in known(pipeline) if entry.path[-1] in names.get(modules[entry.path[1]], ()))


def _unlisted(module: nn.Module) -> set[str]:
    listed = module.state_dict(keep_vars=True)
    tensors = {*map(id, listed.values())}
    buffers = module.named_buffers(remove_duplicate=False)
    return {name for name, buffer in buffers if name not in listed and id(buffer) not in tensors}
