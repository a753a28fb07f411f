"""What the entries of a training state are called in a checkpoint, whichever rank or stage has them.

Below a `{stage: tree}`, an entry has its module's own name (`layers.0.weight`) where the stage's function says
`qualified`, and `stages.2.weight` else; what an optimizer keeps for a parameter comes below the parameter's name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import NAMESPACE, Path, paths, pick

Name = tuple[str, ...]
"""`("params", "layers.0.weight")`, `("optimizer", "layers.0.weight", "exp_avg")`, `("step",)`."""

ALWAYS = {("params",), ("state",)}
"""Where a `{stage: tree}` stands whatever its structure."""

SHOWN = 4  # names of a kind in a message

Held = Mapping[tuple[int, Path], Any]
"""What stages have, by stage and path in its tree."""


class Entry(NamedTuple):
    """A leaf of a training state.

    Args:
        leaf: a tensor, a plain value, None, or an empty dict.
        stage: below whose number it stands; None where it belongs to all ranks.
        open: the parameter for which an optimizer may keep something in this empty dict.
        path: where in the training state it stands.
    """

    name: Name
    leaf: Any
    stage: int | None
    open: Tensor | None
    path: Path


def staged(tree: Mapping[str, Any], pipeline: Pipeline) -> set[Name]:
    """Where in a training state a `{stage: tree}` stands: `params`, `state`, and what has the structure of these.

    Numbers as keys alone are not enough: `{epoch: loss}` has them as well.
    """
    stages, held = range(len(pipeline.stages)), _held(tree, pipeline)
    found = defaultdict[Path, list[bool]](list)
    for path, leaf in zip(*_flat(tree)[:2], strict=True):
        node: Any = tree
        for depth, key in enumerate(path):
            if _by_stage(node, stages):
                found[path[:depth]].append(_follows(held, path[depth:], leaf))
            node = pick(node, (key,))
    return {tuple(map(str, at)) for at, follow in found.items() if at in ALWAYS or all(follow)}


def entries(
    tree: Mapping[str, Any], pipeline: Pipeline, by_stage: Container[Name]
) -> tuple[list[Entry], optree.PyTreeSpec]:
    """The leaves of a training state by name, and what puts it together.

    Args:
        by_stage: where a `{stage: tree}` stands.

    Raises:
        ValueError: two have one name.
    """
    found, spec = _entries(tree, pipeline, by_stage)
    counts = Counter(dotted(entry.name) for entry in found if not is_empty(entry.leaf))
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"{count} entries are called {name}: give them names of their own")
    return found, spec


def known(pipeline: Pipeline) -> list[Entry]:
    """What stages hold by what they say themselves, as those of modules do; what they share is there once."""
    tied = {(user, *path) for uses in pipeline.entries.values() for user, path in uses[1:]}
    said = {stage: each.fn.contents for stage, each in enumerate(pipeline.stages) if hasattr(each.fn, "contents")}
    tree = {of: {stage: getattr(contents, of) for stage, contents in said.items()} for of in ("params", "state")}
    return [
        entry
        for entry in _entries(tree, pipeline, ALWAYS)[0]
        if not is_empty(entry.leaf) and not any(entry.path[1:end] in tied for end in range(3, len(entry.path) + 1))
    ]


def dotted(name: Name) -> str:
    """A name as a checkpoint's key."""
    return ".".join(name)


def some(texts: Sequence[str], between: str = ", ") -> str:
    """The first of them, for messages."""
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return between.join(texts[:SHOWN]) + more


def dense(name: Name, tensor: Tensor) -> Tensor:
    """A tensor that a checkpoint can hold.

    Raises:
        TypeError: it is sparse or nested.
    """
    if tensor.layout != torch.strided or tensor.is_nested:
        what = "nested tensor" if tensor.layout == torch.strided else f"tensor of layout {tensor.layout}"
        raise TypeError(
            f"{dotted(name)} is a {what}, and a checkpoint holds dense ones: give its to_dense(), or its values and "
            "indices, or leave it out"
        )
    return tensor


def _flat(tree: Mapping[str, Any]) -> tuple[list[Path], list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten_with_path(tree, is_leaf=is_empty, none_is_leaf=True, namespace=NAMESPACE)  # type: ignore[arg-type]


def _entries(
    tree: Mapping[str, Any], pipeline: Pipeline, by_stage: Container[Name]
) -> tuple[list[Entry], optree.PyTreeSpec]:
    held = _held(tree, pipeline)
    paths_, leaves, spec = _flat(tree)
    return [_entry(path, leaf, pipeline, held, by_stage) for path, leaf in zip(paths_, leaves, strict=True)], spec


def _entry(path: Path, leaf: Any, pipeline: Pipeline, held: Held, by_stage: Container[Name]) -> Entry:
    texts, stages = tuple(map(str, path)), range(len(pipeline.stages))
    for depth, stage in enumerate(path):
        if texts[:depth] in by_stage and type(stage) is int and stage in stages:
            rest = path[depth + 1 :]
            owner = _owner(held, stage, rest)
            own = len(rest if owner is None else owner)
            short = texts[depth + 1 : depth + 1 + own]
            if not getattr(pipeline.stages[stage].fn, "qualified", False):
                short = ("stages", str(stage), *short)
            parameter = held.get((stage, rest)) if is_empty(leaf) else None
            return Entry((*texts[:depth], ".".join(short), *texts[depth + 1 + own :]), leaf, stage, parameter, path)
    return Entry(texts, leaf, None, None, path)


def _held(tree: Mapping[str, Any], pipeline: Pipeline) -> Held:
    """What stages have by what they say themselves, as those of modules do, and by what is given for them."""
    stages = range(len(pipeline.stages))
    trees = [(stage, part) for stage in stages for part in getattr(pipeline.stages[stage].fn, "contents", ())[:2]]
    for given in (tree.get("state", {}), tree.get("params", {})):
        trees += given.items() if _by_stage(given, stages) else ()
    found: dict[tuple[int, Path], Any] = {}
    for stage, part in trees:
        leaves = optree.tree_leaves(part, namespace=NAMESPACE)
        found |= {(stage, path): leaf for path, leaf in zip(paths(part), leaves, strict=True)}
    return found


def _owner(held: Held, stage: int, path: Path) -> Path | None:
    """The entry of a stage that a path leads to, or to something below it."""
    return next((path[:n] for n in range(len(path), -1, -1) if (stage, path[:n]) in held), None)


def _follows(held: Held, path: Path, leaf: Any) -> bool:
    """Whether a leaf may be an entry of a stage or be kept for one, where the path begins with the stage."""
    stage, *rest = path
    if is_empty(leaf):
        return True
    return _owner(held, stage, tuple(rest)) is not None and (bool(rest) or leaf is None or isinstance(leaf, Tensor))


def _by_stage(node: Any, stages: range) -> bool:
    return isinstance(node, Mapping) and bool(node) and all(type(key) is int and key in stages for key in node)


def is_empty(node: Any) -> bool:
    """Whether it is an empty dict, which optimizers begin with."""
    return isinstance(node, dict) and not node
