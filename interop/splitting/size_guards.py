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

from fpipe.stages.pytree import describe, short
from fpipe.stages.stage import Batch, Read

SYMBOL = re.compile(r"\b[a-z]\d+\b")
_KNOWN = {"math": math, "torch": torch}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a stage's inputs.

    Args:
        axes: for each input, the size of each axis: a number, or an expression of symbols; None for other stages'
            values.
        conditions: expressions of these symbols that were true for the example, where forward branched, and the bounds
            of `dynamic_shapes`.
    """

    axes: tuple[tuple[int | str, ...] | None, ...]
    conditions: tuple[str, ...] = ()

    def check(self, reads: Sequence[Read], inputs: Sequence[Any]) -> None:
        """Check the inputs of a call.

        Raises:
            ValueError: the function is not valid for their sizes.
        """
        known: dict[str, int] = {}
        where: dict[str, str] = {}
        given = [(r, axes, x) for r, axes, x in zip(reads, self.axes, inputs, strict=True) if axes is not None]
        for read, axes, x in given:
            name = _name(read)
            if not isinstance(x, Tensor) or x.ndim != len(axes):
                raise ValueError(
                    f"{name} is {describe(x)}, where the module was split for a tensor of {len(axes)} axes"
                )
            for axis, (n, size) in enumerate(zip(x.shape, axes, strict=True)):
                if isinstance(size, int) and n != size:
                    raise ValueError(
                        f"{name} is {describe(x)}, and the module was split for {size} along axis {axis}: take an "
                        "example of another size (one of size 1 stays 1), or leave the axis free by dynamic_shapes="
                    )
                if isinstance(size, str) and size.isidentifier():
                    known.setdefault(size, n)
                    where.setdefault(size, f"axis {axis} of {name}")
        for read, axes, x in given:
            for axis, (n, size) in enumerate(zip(x.shape, axes, strict=True)):
                if isinstance(size, str) and known.keys() >= symbols(size) and n != _value(size, known):
                    said = f"{_said(size, where)}, which is {_value(size, known)}"
                    raise ValueError(f"{_name(read)} is {describe(x)}, and axis {axis} has to be {said}")
        for condition in self.conditions:
            if known.keys() >= symbols(condition) and not _value(condition, known):
                found = ", ".join(f"{where[symbol]} is {known[symbol]}" for symbol in sorted(symbols(condition)))
                raise ValueError(
                    f"{found}, and the module was split where {_said(condition, where)}: forward does something else "
                    "at other sizes, or dynamic_shapes= excludes them. Split it with an example of such a size"
                )


def _name(read: Read) -> str:
    assert isinstance(read, Batch)
    return f"the batch{short(read.path)}"


def _said(expression: str, where: Mapping[str, str]) -> str:
    plain = re.sub(r"torch\.sym_float\((\w+)\)", r"\1", re.sub(r"(\d\.\d+?)0+\b", r"\1", expression))
    return SYMBOL.sub(lambda found: where.get(found[0], found[0]), plain)


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
    found = [str(doprint(e)) for e in asked]
    for symbol in sorted(free, key=str):
        if bounds := ranges.get(symbol):
            found += [f"{symbol} >= {bounds.lower}"] if bounds.lower > 2 else []
            found += [f"{symbol} <= {bounds.upper}"] if bounds.upper.is_Integer else []
    return tuple(dict.fromkeys(found))


def _of_one(asked: Any) -> bool:
    return asked.rel_op == "!=" and any(side in (0, 1) for side in asked.args)
