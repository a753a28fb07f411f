"""The sizes for which a stage's function is valid: export fixes some, and forward branches on others.

Each condition is evaluated by itself, on the leaves that a stage reads, so that an error can name the one that fails.
The guards of autodiff (`ShapeEnv.evaluate_guards_expression`) are one expression over all inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._sympy.printers import PythonPrinter

from fpipe.stages.pytree import Path, describe, short

SYMBOL = re.compile(r"\b[a-z]\d+\b")
_KNOWN = {"math": math, "torch": torch}


@dataclass(frozen=True)
class Sizes:
    """The sizes of leaves of the batch.

    Args:
        axes: for each leaf, by its path, the size of each axis: a number, an expression of symbols, or None for any.
        conditions: expressions of these symbols that were true for the example, where forward branched, and the bounds
            of `dynamic_shapes`.
    """

    axes: Mapping[Path, tuple[int | str | None, ...]]
    conditions: tuple[str, ...] = ()

    def check(self, leaves: Mapping[Path, Any]) -> None:
        """Check the leaves of a call.

        Raises:
            ValueError: the function is not valid for their sizes.
        """
        known, where = dict[str, int](), dict[str, str]()
        derived = list[tuple[Path, int, str]]()
        for path, x in leaves.items():
            axes = self.axes[path]
            if not isinstance(x, Tensor) or x.ndim != len(axes):
                raise ValueError(f"{_text(path, x)}, where the module was split for a tensor of {len(axes)} axes")
            for axis, (n, size) in enumerate(zip(x.shape, axes, strict=True)):
                if isinstance(size, int) and n != size:
                    raise ValueError(
                        f"{_text(path, x)}, and the module was split for {size} along axis {axis}: take an example of "
                        "another size (one of size 1 stays 1), or leave the axis free by dynamic_shapes="
                    )
                if isinstance(size, str):
                    derived.append((path, axis, size))
                    if size.isidentifier() and size not in known:
                        known[size], where[size] = n, f"axis {axis} of the batch{short(path)}"
        for path, axis, size in derived:
            if known.keys() >= symbols(size) and leaves[path].shape[axis] != (n := _value(size, known)):
                raise ValueError(
                    f"{_text(path, leaves[path])}, and axis {axis} has to be {_said(size, where)}, which is {n}"
                )
        for condition in self.conditions:
            if known.keys() >= symbols(condition) and not _value(condition, known):
                values = ", ".join(f"{where[symbol]} is {known[symbol]}" for symbol in sorted(symbols(condition)))
                raise ValueError(
                    f"{values}, and the module was split where {_said(condition, where)}: forward does something else "
                    "at other sizes, or dynamic_shapes= excludes them. Split it with an example of such a size"
                )


def _text(path: Path, x: Any) -> str:
    return f"the batch{short(path)} is {describe(x)}"


def _said(expression: str, where: Mapping[str, str]) -> str:
    plain = re.sub(r"torch\.sym_float\((\w+)\)", r"\1", re.sub(r"(\d\.\d+?)0+\b", r"\1", expression))
    return SYMBOL.sub(lambda match: where.get(match[0], match[0]), plain)


@cache
def symbols(expression: str) -> frozenset[str]:
    """Return the symbols in an expression."""
    return frozenset(SYMBOL.findall(expression))


@cache
def _code(expression: str) -> CodeType:
    return compile(expression, "<size>", "eval")


def _value(expression: str, known: Mapping[str, int]) -> Any:
    return eval(_code(expression), _KNOWN | dict(known))


def as_expression(size: int | torch.SymInt) -> int | str:
    """Return a size as a number or an expression."""
    expr = size if isinstance(size, int) else size.node.expr
    return int(expr) if isinstance(expr, int) or expr.is_Integer else str(PythonPrinter().doprint(expr))


def conditions(nodes: Sequence[fx.Node], ranges: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the conditions on the sizes of these placeholders from the trace, and the bounds of `dynamic_shapes`.

    Conditions whether a size is 1, for broadcasting, are left out: operations check it again when they run. torch
    assumes that free sizes are at least 2.
    """
    sizes = [n for node in nodes for n in node.meta["val"].shape if isinstance(n, torch.SymInt)]
    if not sizes:
        return ()
    environment, doprint = sizes[0].node.shape_env, PythonPrinter().doprint
    free = {symbol for n in sizes for symbol in n.node.expr.free_symbols}
    asked = [environment.replace(guard.expr) for guard in environment.guards]
    asked = [e for e in asked if e.free_symbols and e.free_symbols <= free and not (e.is_Relational and _of_one(e))]
    texts = [str(doprint(e)) for e in asked]
    bounds = [(symbol, ranges[symbol]) for symbol in sorted(free, key=str) if symbol in ranges]
    texts += [f"{symbol} >= {bound.lower}" for symbol, bound in bounds if bound.lower > 2]
    texts += [f"{symbol} <= {bound.upper}" for symbol, bound in bounds if bound.upper.is_Integer]
    return tuple(dict.fromkeys(texts))


def _of_one(asked: Any) -> bool:
    return asked.rel_op == "!=" and any(side in (0, 1) for side in asked.args)
