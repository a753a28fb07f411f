"""Format numbers, times, bytes, tables, plan sizes and colours for people. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log2
from typing import NamedTuple

from fpipe.costs import Costs
from fpipe.plan import Plan


def number(value: float) -> str:
    """Format a number with four digits, and with no exponent from 1000 to 1e9.

    >>> number(93.40000000000001), number(98304.0), number(0.0625), number(1e-6)
    ('93.4', '98304', '0.0625', '1e-06')
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Format a count with its noun.

    Args:
        plural: its ending.

    >>> counted(1, "row"), counted(0, "row"), counted(2, "row")
    ('1 row', '0 rows', '2 rows')
    """
    return f"{count} {noun}{'' if count == 1 else plural}"


def format_bytes(count: float) -> str:
    """Format a byte count in the largest binary unit not above it, with four digits.

    >>> format_bytes(999), format_bytes(1.5 * 2**30)
    ('999 B', '1.5 GiB')
    """
    power = min(4, max(0, floor(log2(count) / 10))) if count > 0 else 0
    value = count / 1024**power
    return f"{f'{value:.0f}' if value >= 1000 else f'{value:.4g}'} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def aligned(rows: Sequence[Sequence[str]], *, ragged: bool = False) -> list[str]:
    """Return the lines of a table whose columns are aligned to the right.

    Args:
        ragged: the last column is prose, aligned to the left.

    >>> print(*aligned([("rank", "effects"), ("0", "17")]), sep="\\n")
    rank  effects
       0       17
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if ragged:
        widths[-1] = 0
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


class Scale(NamedTuple):
    """The unit in which times are shown: its name, and the factor from the timeline's unit to it."""

    name: str
    factor: float

    def __call__(self, time: float) -> str:
        """Format a time without its unit, in a column of times of this scale: none has an exponent.

        >>> Scale("s", 1.0)(1.5e-7), Scale("s", 1.0)(-12.345678), Scale("", 1.0)(1e-6)
        ('0.000', '-12.35', '1e-06')
        """
        value = time * self.factor
        return "0.000" if self.name and 0 < abs(value) < 5e-4 else number(value)

    def full(self, time: float) -> str:
        """Format a time with its unit."""
        return f"{self(time)} {self.name}".rstrip()


PLAIN = Scale("", 1.0)


_UNITS = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}  # the tab's format.js has the same


def scale_of(time: float, unit: str) -> Scale:
    """Return the unit that suits a time, the largest that is not above it; no unit for times without one.

    >>> scale_of(0.18, "s").full(0.0123), scale_of(1.8, "s").full(0.0123), scale_of(17.0, "").full(0.5)
    ('12.3 ms', '0.0123 s', '0.5')
    """
    if unit != "s":
        return PLAIN
    names = [name for name, factor in _UNITS.items() if abs(time) * factor >= 0.9999]  # what is shown as 1 is
    name = names[0] if names else "ns" if time else "ms"
    return Scale(name, _UNITS[name])


def percent(share: float) -> str:
    """Format a fraction as a percentage.

    >>> percent(0.0625)
    '6.2%'
    """
    return f"{100 * share:.1f}%"


def extent(plan: Plan) -> str:
    """Format the numbers of ranks, stages and microbatches of a plan, and of its slices and replicas if several.

    >>> from fpipe import Placement
    >>> extent(Plan(Placement.v(4), 8)), extent(Plan(Placement((0,)), 1, replicas=2))
    ('4 ranks, 8 stages, 8 microbatches', '1 rank, 1 stage, 1 microbatch, 2 replicas')
    """
    counts = [
        counted(plan.ranks, "rank"),
        counted(plan.stages, "stage"),
        counted(plan.microbatches, "microbatch", "es"),
    ]
    counts[-1] += f" of {plan.slices} slices" if plan.slices > 1 else ""
    return ", ".join(counts + [counted(plan.replicas, "replica")] * (plan.replicas > 1))


def sized(costs: Costs) -> bool:
    """Whether any size is positive, so that memory can be shown in bytes."""
    sizes = costs.activation, costs.residuals, costs.deferred, costs.parameters
    return bool(costs.extra) or any(map(_is_positive, sizes))


def _is_positive(cost: float | Sequence[float]) -> bool:
    return any(cost) if isinstance(cost, Sequence) else cost > 0


def lighter(colour: str, share: float) -> str:
    """Return a colour mixed with white.

    >>> lighter("#0080ff", 0.5)
    '#80c0ff'
    """
    mixed = (round(int(colour[at : at + 2], 16) * (1 - share) + 255 * share) for at in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in mixed)
