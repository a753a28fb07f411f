"""A pipeline as a table: the params and the reads of each stage, and the ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import torch

from fpipe._format import aligned, format_bytes
from fpipe.stages.pytree import ABSENT, Path, as_path, flatten, get_at, short
from fpipe.stages.stage import Batch, Output, Read, Stage, StageFunction, StageSpec


def description(
    stages: Sequence[Stage], entries: Mapping[Any, Sequence[Any]], params: Mapping[int, Any] | None = None
) -> str:
    """Return the table of `Pipeline.describe`.

    If `params` has no entry for a stage, as for stages of other ranks, its numbers are "—".
    """
    rows = _rows(stages, entries, params)
    columns = _columns(rows)
    cells = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    return "\n".join([*aligned(cells, ragged=True), *_ties(entries)])


def html(stages: Sequence[Stage], entries: Mapping[Any, Sequence[Any]]) -> str:
    """Return the same table for a notebook."""
    rows = _rows(stages, entries, None)
    columns = _columns(rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    cells = ("".join(f"<td>{escape(row.get(name, ''))}</td>" for name in columns) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    ties = "".join(f"<div>{escape(tie)}</div>" for tie in _ties(entries))
    return f"<table><tr>{head}</tr>{body}</table>{ties}"


def _rows(
    stages: Sequence[Stage], entries: Mapping[Any, Sequence[Any]], params: Mapping[int, Any] | None
) -> list[dict[str, str]]:
    specs = [stage.fn.spec if isinstance(stage.fn, StageFunction) else StageSpec({}, {}, {}) for stage in stages]
    tied = _tied(entries)
    rows = []
    for index, stage in enumerate(stages):
        row, spec = {"stage": str(index)}, specs[index]
        if params is not None:
            row |= _sizes(params.get(index, ABSENT), stage)
        elif isinstance(stage.fn, StageFunction):
            row |= _sizes(_untied(spec.params, index, tied), stage)
        if spec.state:
            row["state"] = _nbytes(_tensors(spec.state))
        if spec.share is not None:
            row["time"] = f"{spec.share:.0%}"
        if spec.begins is not None:
            row["begins"] = spec.begins
        rows.append(row | {"reads": ", ".join(_read(read, specs) for read in stage.inputs) or "nothing"})
    return rows


def _tied(entries: Mapping[Any, Sequence[Any]]) -> dict[Any, Any]:
    """Return the shared entry of each use of it by a further stage."""
    return {user: entry for entry, uses in entries.items() for user in uses[1:]}


def _ties(entries: Mapping[Any, Sequence[Any]]) -> list[str]:
    return [
        f"tied: {_name(path)} of stage {user} is {_name(source)} of stage {owner}"
        for (user, path), (owner, source) in sorted(_tied(entries).items(), key=str)
    ]


def _untied(tree: Mapping[Any, Any], stage: int, tied: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a stage's entries without those of lower stages."""
    return {name: x for name, x in tree.items() if (stage, (name,)) not in tied}


def _sizes(tree: Any, stage: Stage) -> dict[str, str]:
    """Return the columns of a stage's params. Integers, such as positions, count as bytes, not as parameters."""
    if tree is ABSENT:
        return {"parameters": "—", "bytes": "—"}
    whole, frozen = _count(_tensors(tree)), _count(_tensors([_at(tree, as_path(name)) for name in stage.frozen]))
    row = {"parameters": f"{whole - frozen:,}", "bytes": _nbytes(_tensors(tree))}
    return row | {"frozen": f"{frozen:,}"} if frozen else row


def _at(tree: Any, path: Path) -> Any:
    """Return the value at a path; None if there is none, as for an entry of another stage."""
    try:
        return get_at(tree, path)
    except (KeyError, IndexError, AttributeError, TypeError):
        return None


def _count(tensors: Sequence[torch.Tensor]) -> int:
    return sum(x.numel() for x in tensors if x.is_floating_point() or x.is_complex())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in flatten(tree).leaves if isinstance(x, torch.Tensor)]


def _read(read: Read, specs: Sequence[StageSpec]) -> str:
    if isinstance(read, Output):
        outputs = specs[read.stage].outputs
        value = get_at(outputs, read.path) if read.path and read.path[0] in outputs else None
        part = f" {_name(read.path)}" if read.path else ""
        return f"stage {read.stage}{part}" + (f" ({_nbytes([value])})" if value is not None else "")
    return f"batch{short(read.path)}" if isinstance(read, Batch) else "target"


def _name(path: Sequence[Any]) -> str:
    """Return a path, without quotes if it is one name."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) else short(tuple(path))


def _nbytes(tensors: Sequence[torch.Tensor]) -> str:
    return format_bytes(sum(x.numel() * x.element_size() for x in tensors))


def _columns(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the columns that some row has."""
    names = ("stage", "parameters", "frozen", "bytes", "state", "time", "begins", "reads")
    return [name for name in names if any(name in row for row in rows)]
