"""A pipeline as a table: what each stage holds, what it reads, and which parameters are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import torch

from fpipe.stages.pytree import ABSENT, Path, as_path, flatten, pick, short
from fpipe.stages.stage import Batch, Output, Read, Stage


def description(
    stages: Sequence[Stage], entries: Mapping[Any, Sequence[Any]], params: Mapping[int, Any] | None = None
) -> str:
    """The table that `Pipeline.describe` gives.

    A function that knows what it holds says so by an attribute `contents`, with trees `params` and `state` of tensors
    that need no memory, `outputs` by name, where it `begins` and its `share` of the time; None where that isn't known.
    Where `params` has no entry for a stage, as for those of other ranks, its numbers are "—".
    """
    return "\n".join([*_table(_rows(stages, entries, params)), *_ties(entries)])


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
    contents: list[Any] = [getattr(stage.fn, "contents", None) for stage in stages]
    tied = _tied(entries)
    rows = []
    for index, stage in enumerate(stages):
        row, known = {"stage": str(index)}, contents[index]
        if params is not None or known is not None:
            row |= _held(_own(known.params, index, tied) if params is None else params.get(index, ABSENT), stage)
        if known is not None and known.state:
            row["state"] = size(_tensors(known.state))
        if known is not None and known.share is not None:
            row["time"] = f"{known.share:.0%}"
        if known is not None and known.begins is not None:
            row["begins"] = known.begins
        rows.append(row | {"reads": ", ".join(_read(read, contents) for read in stage.inputs) or "nothing"})
    return rows


def _tied(entries: Mapping[Any, Sequence[Any]]) -> dict[Any, Any]:
    """Return the shared entry of each use of it by a further stage."""
    return {user: entry for entry, uses in entries.items() for user in uses[1:]}


def _ties(entries: Mapping[Any, Sequence[Any]]) -> list[str]:
    return [
        f"tied: {_name(path)} of stage {user} is {_name(source)} of stage {owner}"
        for (user, path), (owner, source) in sorted(_tied(entries).items(), key=str)
    ]


def _own(tree: Mapping[Any, Any], stage: int, tied: Mapping[Any, Any]) -> dict[Any, Any]:
    """A stage's own entries, without those of lower stages."""
    return {name: x for name, x in tree.items() if (stage, (name,)) not in tied}


def _held(tree: Any, stage: Stage) -> dict[str, str]:
    """What a stage's params come to; numbers that no gradient is of, as of positions, are bytes alone."""
    if tree is ABSENT:
        return {"parameters": "—", "bytes": "—"}
    whole, frozen = _count(_tensors(tree)), _count(_tensors([_at(tree, as_path(name)) for name in stage.frozen]))
    row = {"parameters": f"{whole - frozen:,}", "bytes": size(_tensors(tree))}
    return row | {"frozen": f"{frozen:,}"} if frozen else row


def _at(tree: Any, path: Path) -> Any:
    """What is at a path; None where nothing is, as for an entry that lives with another stage."""
    try:
        return pick(tree, path)
    except (KeyError, IndexError, AttributeError, TypeError):
        return None


def _count(tensors: Sequence[torch.Tensor]) -> int:
    return sum(x.numel() for x in tensors if x.is_floating_point() or x.is_complex())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in flatten(tree).leaves if isinstance(x, torch.Tensor)]


def _read(read: Read, contents: Sequence[Any]) -> str:
    if isinstance(read, Output):
        known = contents[read.stage].outputs if contents[read.stage] is not None else {}
        value = pick(known, read.path) if read.path and read.path[0] in known else None
        what = f" {_name(read.path)}" if read.path else ""
        return f"stage {read.stage}{what}" + (f" ({size([value])})" if value is not None else "")
    return f"batch{short(read.path)}" if isinstance(read, Batch) else "target"


def _name(path: Sequence[Any]) -> str:
    """A path without quotes, where it is one name."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) else short(tuple(path))


def size(tensors: Sequence[torch.Tensor]) -> str:
    """Bytes, in the unit that they are some of.

    >>> size([torch.zeros(3)]), size([torch.zeros(1000, 1000)])
    ('12 B', '3.8 MiB')
    """
    count = sum(x.numel() * x.element_size() for x in tensors)
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count} B" if not power else f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def _columns(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the columns that some row has."""
    names = ("stage", "parameters", "frozen", "bytes", "state", "time", "begins", "reads")
    return [name for name in names if any(name in row for row in rows)]


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Align all columns but the last to the right."""
    *columns, last = _columns(rows)
    widths = [max(len(name), *(len(row.get(name, "")) for row in rows)) for name in columns]
    head = {name: name for name in (*columns, last)}
    return [
        "  ".join([*(row.get(n, "").rjust(w) for n, w in zip(columns, widths, strict=True)), row[last]])
        for row in (head, *rows)
    ]
