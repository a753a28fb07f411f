"""What the entries of a training state are called in a checkpoint, whichever rank or stage has them.

Below a `{stage: tree}`, an entry has its module's own name (`layers.0.weight`) where the stage's function says
`qualified`, and `stages.2.weight` else; what an optimizer keeps for a parameter comes below the parameter's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fpipe.stage import Pipeline
from fpipe.tree import NAMESPACE, Path, paths, pick

Name = tuple[str, ...]
"""`("params", "layers.0.weight")`, `("optimizer", "layers.0.weight", "exp_avg")`, `("step",)`."""


class Entry(NamedTuple):
    """A leaf of a training state.

    Args:
        leaf: a tensor, a plain value, or an empty dict.
        stage: below whose number it stands; None where it belongs to all ranks.
        open: the parameter for which an optimizer may keep something in this empty dict.
    """

    name: Name
    leaf: Any
    stage: int | None
    open: Tensor | None


def entries(tree: Mapping[str, Any], pipeline: Pipeline) -> tuple[list[Entry], optree.PyTreeSpec]:
    """The leaves of a training state by name, and what puts it together.

    Raises:
        ValueError: two have one name.
    """
    params = _parameters(tree.get("params"), range(len(pipeline.stages)))
    paths_, leaves, spec = optree.tree_flatten_with_path(tree, is_leaf=is_empty, namespace=NAMESPACE)  # type: ignore[arg-type]
    found = [_entry(tree, path, leaf, pipeline, params) for path, leaf in zip(paths_, leaves, strict=True)]
    counts = Counter(dotted(entry.name) for entry in found if not is_empty(entry.leaf))
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"{count} entries are called {name}: give them names of their own")
    return found, spec


def dotted(name: Name) -> str:
    """A name as a checkpoint's key."""
    return ".".join(name)


def _entry(tree: Any, path: Path, leaf: Any, pipeline: Pipeline, params: Mapping[tuple[int, Path], Any]) -> Entry:
    stages, node = range(len(pipeline.stages)), tree
    for depth, key in enumerate(path):
        if _by_stage(node, stages):
            outer, stage, rest = path[:depth], key, path[depth + 1 :]
            own = next((n for n in range(len(rest), -1, -1) if (stage, rest[:n]) in params), len(rest))
            short = [str(part) for part in rest[:own]]
            if not getattr(pipeline.stages[stage].fn, "qualified", False):
                short = ["stages", str(stage), *short]
            parameter = params.get((stage, rest)) if is_empty(leaf) else None
            return Entry((*map(str, outer), ".".join(short), *map(str, rest[own:])), leaf, stage, parameter)
        node = pick(node, (key,))
    return Entry(tuple(map(str, path)), leaf, None, None)


def _parameters(params: Any, stages: range) -> dict[tuple[int, Path], Any]:
    if not _by_stage(params, stages):
        return {}
    found: dict[tuple[int, Path], Any] = {}
    for stage, tree in params.items():
        leaves = optree.tree_leaves(tree, namespace=NAMESPACE)
        found |= {(stage, path): leaf for path, leaf in zip(paths(tree), leaves, strict=True)}
    return found


def _by_stage(node: Any, stages: range) -> bool:
    return isinstance(node, Mapping) and bool(node) and all(type(key) is int and key in stages for key in node)


def is_empty(node: Any) -> bool:
    """Whether it is an empty dict, which optimizers begin with."""
    return isinstance(node, dict) and not node
