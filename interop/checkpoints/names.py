"""The names of a training state's entries in a checkpoint, which do not depend on ranks.

The sections `params`, `state` and `optimizer` are `{stage: tree}`. There the entries of a module that was split have
the module's own names (`layers.0.weight`), whichever stage holds them; other entries are `stages.2.` and their path. An
optimizer's values for a parameter have the parameter's name in theirs. Where replicas have a state of their own,
`state` is that of the first one, and `state@2` that of replica 2. Every other section is one tree, the same on all
ranks.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import NAMESPACE, Path
from fpipe.stages.stage import StageFunction

Name = tuple[str, ...]
"""`("params", "layers.0.weight")`, `("optimizer", "layers.0.weight", "exp_avg")`, `("step",)`."""

BY_STAGE = ("params", "state", "optimizer")
SHOWN = 4  # names of a kind in a message


def state_of(replica: int) -> str:
    """Return the name of the section with a replica's own state."""
    return f"state@{replica}" if replica else "state"


def kind_of(section: str) -> str:
    """Return the name of a section without the replica's number."""
    return section.partition("@")[0]


class Entry(NamedTuple):
    """A leaf of a training state.

    Args:
        leaf: a tensor, a plain value, None, or an empty dict.
        stage: the stage that holds it; None where all ranks have it.
        parameter: name and tensor of the parameter that an optimizer keeps it for, if there is one.
    """

    name: Name
    leaf: Any
    stage: int | None = None
    parameter: tuple[Name, Tensor] | None = None

    @property
    def is_empty(self) -> bool:
        return _is_empty(self.leaf)

    @property
    def is_stored(self) -> bool:
        """Whether a checkpoint has it; an empty dict only where something may be put in later."""
        if not self.is_empty or self.stage is None:
            return True
        return self.name[0] == "optimizer" and self.parameter is not None


def sections_of(pipeline: Pipeline, /, **sections: Any) -> dict[str, Any]:
    """Return the sections of a training state, without those by stage that are None.

    Raises:
        TypeError, ValueError: a section that must be `{stage: tree}` is not.
    """
    sections = {name: tree for name, tree in sections.items() if tree is not None or kind_of(name) not in BY_STAGE}
    for section in [name for name in sections if kind_of(name) in BY_STAGE]:
        tree = sections[section]
        if not isinstance(tree, Mapping):
            raise TypeError(f"{section} must be {{stage: tree}}, not a {type(tree).__name__}")
        if unknown := [stage for stage in tree if stage not in range(len(pipeline.stages))]:
            raise ValueError(
                f"{section} has an entry for {unknown[0]!r}, and the pipeline has stages 0 to "
                f"{len(pipeline.stages) - 1}: pass {{stage: tree}}"
            )
    return sections


def entries(sections: Mapping[str, Any], pipeline: Pipeline) -> tuple[list[Entry], optree.PyTreeSpec]:
    """Return the entries of a training state, and the structure that puts them together.

    Raises:
        ValueError: two entries have one name.
    """
    parameters = {path: (name_of("params", path, pipeline), leaf) for path, leaf in _parameters(sections, pipeline)}

    def entry(section: str, *path: Any, leaf: Any) -> Entry:
        if kind_of(section) not in BY_STAGE:
            return Entry((section, *map(str, path)), leaf)
        if not path:
            return Entry((section,), leaf, stage=0)  # a section without stages
        parameter = _parameter(path, parameters) if section == "optimizer" else None
        is_modules = section != "optimizer" or parameter is not None
        return Entry(name_of(section, path, pipeline, is_modules), leaf, path[0], parameter)

    paths, leaves, spec = _paths(sections)
    result = [entry(*path, leaf=leaf) for path, leaf in zip(paths, leaves, strict=True)] if sections else []
    counts = Counter(dotted(each.name) for each in result if each.is_stored)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"{count} entries are called {name}: give each its own name")
    return result, spec


def name_of(section: str, path: Path, pipeline: Pipeline, is_modules: bool = True) -> Name:
    """Return the name of the entry at a path, which begins with the stage.

    Args:
        is_modules: the entry is a parameter or buffer, or belongs to one.
    """
    stage, *rest = path
    qualified = is_modules and getattr(pipeline.stages[stage].fn, "qualified", False)  # a plain function may say so too
    return (section, *(() if qualified else ("stages", str(stage))), *map(str, rest))


def _parameter(path: Path, parameters: Mapping[Path, tuple[Name, Tensor]]) -> tuple[Name, Tensor] | None:
    """Return the parameter whose own path is a part of a path in a stage's tree, as near to its end as possible."""
    stage, *rest = path
    parts = ((stage, *rest[start:end]) for end in range(len(rest), -1, -1) for start in range(end + 1))
    return next((parameters[part] for part in parts if part in parameters), None)


def _parameters(sections: Mapping[str, Any], pipeline: Pipeline) -> Iterator[tuple[Path, Tensor]]:
    """Iterate over the parameters by stage and path: those that modules declare, then those in `params`."""
    declared = {s: each.fn.spec.params for s, each in enumerate(pipeline.stages) if isinstance(each.fn, StageFunction)}
    for tree in (declared, sections.get("params", {})):
        paths, leaves, _ = _paths(tree)
        yield from ((path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor))


def dotted(name: Name) -> str:
    """Return a name as a checkpoint's key."""
    return ".".join(name)


def below(names: Iterable[Name]) -> dict[Name, list[Name]]:
    """Return, by each beginning of names, the names that have it."""
    result = defaultdict[Name, list[Name]](list)
    for name in names:
        for length in range(1, len(name)):
            result[name[:length]].append(name)
    return result


def nested(values: Mapping[Name, Any]) -> dict[str, Any]:
    """Return values as a tree of dicts."""
    tree: dict[str, Any] = {}
    for (*outer, key), value in values.items():
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
        node[key] = value
    return tree


def some(texts: Sequence[str], between: str = ", ") -> str:
    """Return the first of some texts, for messages."""
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return between.join(texts[:SHOWN]) + more


def dense(name: Name, tensor: Tensor) -> Tensor:
    """Return the tensor, if a checkpoint can hold it.

    Raises:
        TypeError: it is sparse or nested.
    """
    if tensor.layout != torch.strided or tensor.is_nested:
        what = "nested tensor" if tensor.layout == torch.strided else f"tensor of layout {tensor.layout}"
        raise TypeError(
            f"{dotted(name)} is a {what}, and a checkpoint holds dense ones: save its to_dense(), or its values and "
            "indices, or leave it out"
        )
    return tensor


def flat(sections: Mapping[str, Any]) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a training state, one for each of its entries, and its structure."""
    return optree.tree_flatten(sections, is_leaf=_is_empty, none_is_leaf=True, namespace=NAMESPACE)  # type: ignore[arg-type]


def _paths(tree: Any) -> tuple[list[Path], list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten_with_path(tree, is_leaf=_is_empty, none_is_leaf=True, namespace=NAMESPACE)


def storable(name: Name, leaf: Any) -> Any:
    """Return a tensor, or a value that JSON returns unchanged: a NumPy number becomes a Python one.

    Raises:
        TypeError: a checkpoint can't hold it.
    """
    if isinstance(leaf, Tensor):
        if leaf.is_meta:
            raise TypeError(
                f"{dotted(name)} has no values, because it is on the meta device: interop.materialise makes values"
            )
        return dense(name, leaf).detach()
    value = leaf.item() if isinstance(leaf, np.generic) else leaf
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"{dotted(name)} is a {type(leaf).__name__}, and a checkpoint holds tensors, numbers and texts: "
            "convert it to one of these, or leave it out"
        )
    return json.loads(json.dumps(value))


def _is_empty(node: Any) -> bool:
    """Whether it is an empty dict, with which optimizers begin."""
    return isinstance(node, dict) and not node
