"""One rank's spans of one step as bytes: a header and columns, which Python and the page read alike. No torch.

The bytes are a gzip of: `FPT1`; the length of the header, as u32; the header, JSON padded with spaces to a multiple of
eight; and the columns, each at a multiple of eight. All numbers are little-endian. Times are in the header's unit, from
the first start of any rank on, where the ranks' clocks were compared, else from the rank's own first start.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Effect,
    Forward,
    Gradient,
    Overlap,
    Recv,
    Reduce,
    Send,
    WeightGradient,
)
from fpipe.errors import ScheduleError
from fpipe.plan import Edges, Placement, Plan

MAGIC = b"FPT1"
LARGEST = 1 << 29  # bytes of a rank's step, unpacked: more than this is no timeline
LATEST = 1e12  # of times, in any unit: still a whole number of nanoseconds where 1 is a millisecond
MOST = 1 << 60  # bytes
_TYPES = ("u1", "u2", "u4", "i4", "f8")
Row = tuple[int, int, int, int, int]  # stage, microbatch, other, second, peer


class BadColumns(ValueError):
    """Bytes that are no rank's spans, or were cut short."""


class Clock(NamedTuple):
    """How far a rank's clock is ahead of rank 0's, and how far that may be off; seconds."""

    offset: float
    uncertainty: float


_SAME = Clock(0.0, 0.0)


@dataclass(frozen=True)
class Header:
    """What the columns are of.

    Args:
        kind: "measured" or "predicted".
        unit: "s", or "" where costs were given without one.
        clock: None where the ranks' clocks were not compared.
        wall: when it was, in seconds since 1970.
        peak: the most bytes of an allocator, or of a process, up to then, and which of them.
        host: what the host did around the effects: (what, start, end).
        device: what the rank computes on.
        turns: whether ranks took turns in one process, so that idle time is what others computed.
        job: a name that all ranks of a job know, and no other job has; "" where they never told each other.
    """

    kind: str
    step: int
    rank: int
    schedule: str
    plan: Plan
    unit: str = "s"
    clock: Clock | None = _SAME
    wall: float = 0.0
    peak: tuple[float, str] | None = None
    host: Sequence[tuple[str, float, float]] = ()
    device: str = ""
    turns: bool = False
    job: str = ""


@dataclass(frozen=True, eq=False)
class Columns:
    """One rank's spans, in the order of its program.

    Args:
        effects: what ran.
        starts, ends: as in `Timeline`.
        waited: (rank, place in that rank's program) of the span that let it start, -1 for none.
        used: when the first use of what a receive got began to wait for it; NaN where that is not known.
        bytes: of what a send or receive carries; NaN where that is not known.
        memory: when what the rank holds changed, and how many bytes it holds from then on.
    """

    effects: Sequence[Effect]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    waited: tuple[NDArray[np.int32], NDArray[np.int32]]
    used: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    bytes: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    memory: tuple[NDArray[np.float64], NDArray[np.float64]] = field(default_factory=lambda: (np.empty(0), np.empty(0)))

    def __len__(self) -> int:
        return len(self.effects)


def _value(e: Send | Recv) -> Row:
    match e.value:
        case Activation(stage, microbatch):
            return stage, microbatch, 0, 0, e.rank
        case Gradient(stage, consumer, microbatch):
            return stage, microbatch, consumer, 0, e.rank
        case WeightGradient(stage, rank):
            return stage, 0, rank, 0, e.rank


def _compute(e: Any) -> Row:
    return e.stage, e.microbatch, 0, 0, 0


def _overlap(e: Overlap) -> Row:
    return e.forward.stage, e.forward.microbatch, e.backward.stage, e.backward.microbatch, 0


class _Kind(NamedTuple):
    """How effects of one kind stand in a row, and how a row becomes one."""

    name: str
    row: Callable[[Any], Row]
    effect: Callable[[int, int, int, int, int], Effect]


def _posts(post: type[Send] | type[Recv]) -> dict[tuple[Any, ...], _Kind]:
    name = post.__name__
    return {
        (post, Activation): _Kind(f"{name} Activation", _value, lambda s, m, o, n, p: post(Activation(s, m), p)),
        (post, Gradient): _Kind(f"{name} Gradient", _value, lambda s, m, o, n, p: post(Gradient(s, o, m), p)),
        (post, WeightGradient): _Kind(
            f"{name} WeightGradient", _value, lambda s, m, o, n, p: post(WeightGradient(s, o), p)
        ),
    }


KINDS: dict[tuple[Any, ...], _Kind] = {  # by `_key`; the page knows the names
    (Forward,): _Kind("Forward", _compute, lambda s, m, o, n, p: Forward(s, m)),
    (Backward,): _Kind("Backward", _compute, lambda s, m, o, n, p: Backward(s, m)),
    (BackwardInput,): _Kind("BackwardInput", _compute, lambda s, m, o, n, p: BackwardInput(s, m)),
    (BackwardWeight,): _Kind("BackwardWeight", _compute, lambda s, m, o, n, p: BackwardWeight(s, m)),
    (Overlap, Backward): _Kind(
        "Overlap Backward", _overlap, lambda s, m, o, n, p: Overlap(Forward(s, m), Backward(o, n))
    ),
    (Overlap, BackwardInput): _Kind(
        "Overlap BackwardInput", _overlap, lambda s, m, o, n, p: Overlap(Forward(s, m), BackwardInput(o, n))
    ),
    (Reduce,): _Kind("Reduce", lambda e: (e.stage, 0, 0, 0, 0), lambda s, m, o, n, p: Reduce(s)),
    **_posts(Send),
    **_posts(Recv),
}
_CODES = {key: code for code, key in enumerate(KINDS)}
_NAMES = [kind.name for kind in KINDS.values()]
_FIELDS = ("stage", "microbatch", "other", "second", "peer")


def _key(effect: Effect) -> tuple[Any, ...]:
    if isinstance(effect, Overlap):
        return Overlap, type(effect.backward)
    if isinstance(effect, Send | Recv):
        return type(effect), type(effect.value)
    return (type(effect),)


def encode(header: Header, columns: Columns) -> bytes:
    """The bytes of one rank's spans.

    >>> from fpipe import Placement
    >>> header = Header("predicted", 0, 0, "mine", Plan(Placement.loop(1), 1), unit="")
    >>> none = np.full(1, -1, np.int32)
    >>> found, columns = decode(encode(header, Columns([Forward(0, 0)], np.zeros(1), np.ones(1), (none, none))))
    >>> found == header, columns.effects[0], columns.ends
    (True, Forward(stage=0, microbatch=0), array([1.]))
    """
    keys = [_key(effect) for effect in columns.effects]
    rows = np.array([KINDS[key].row(effect) for key, effect in zip(keys, columns.effects, strict=True)], np.int64)
    rows = rows.reshape(len(keys), len(_FIELDS))
    found: dict[str, NDArray[Any]] = {"kind": np.array([_CODES[key] for key in keys], np.uint8)}
    found |= {name: _narrow(rows[:, at]) for at, name in enumerate(_FIELDS)}
    found |= {
        "start": columns.starts,
        "end": columns.ends,
        "from_rank": columns.waited[0],
        "from_row": columns.waited[1],
    }
    found |= {"used": columns.used, "bytes": columns.bytes, "memory_at": columns.memory[0], "memory": columns.memory[1]}
    return _packed(header, found)


def _narrow(numbers: NDArray[np.int64]) -> NDArray[Any]:
    most = int(numbers.max(initial=0))
    return numbers.astype(np.uint8 if most < 1 << 8 else np.uint16 if most < 1 << 16 else np.uint32)


def _packed(header: Header, found: Mapping[str, NDArray[Any]]) -> bytes:
    at, placed, parts = 0, {}, []
    for name, column in found.items():
        data = column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
        placed[name] = [column.dtype.str[1:], at, len(column)]
        parts.append(data.ljust(-(-len(data) // 8) * 8, b"\0"))
        at += len(parts[-1])
    plan = header.plan
    said = {field.name: getattr(header, field.name) for field in fields(header)} | {
        "plan": {
            "holders": plan.placement.holders,
            "microbatches": plan.microbatches,
            "reads": plan.edges.reads,
            "ties": plan.ties,
        },
        "format": 1,
        "ranks": plan.ranks,
        "clock": header.clock._asdict() if header.clock else None,
        "kinds": _NAMES,
        "columns": placed,
    }
    text = json.dumps(said, allow_nan=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return gzip.compress(b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *parts]), 6, mtime=0)


def decode(data: bytes) -> tuple[Header, Columns]:
    """What `encode` was given.

    Raises:
        BadColumns: the bytes are none of `encode`'s.
    """
    try:
        return _decoded(_unpacked(data))
    except BadColumns:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, ScheduleError) as error:
        raise BadColumns(f"not a rank's spans as fpipe writes them: {error}") from error


def _unpacked(data: bytes) -> bytes:
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        raw = unpack.decompress(data, LARGEST)
    except zlib.error as error:
        raise BadColumns(f"not a gzip: {error}") from None
    if not unpack.eof:
        raise BadColumns("cut short, or larger than any timeline")
    return raw


def _decoded(raw: bytes) -> tuple[Header, Columns]:
    if raw[:4] != MAGIC:
        raise BadColumns("it does not begin as fpipe's timelines do")
    begin = 8 + int.from_bytes(raw[4:8], "little")
    said = json.loads(raw[8:begin])
    if said["format"] != 1:
        raise BadColumns(f"format {said['format']}, of a later fpipe: update this one")
    header, found = _header(said), dict[str, NDArray[Any]]()
    for name, (kind, at, length) in said["columns"].items():
        if kind not in _TYPES:
            raise BadColumns(f"a column of {kind!r}")
        found[name] = np.frombuffer(raw, np.dtype(kind).newbyteorder("<"), length, begin + at)
    _check(header, said["kinds"], found)
    return header, Columns(
        list(_effects(said["kinds"], found)),
        *(found["start"], found["end"], (found["from_rank"], found["from_row"])),
        *(found["used"], found["bytes"], (found["memory_at"], found["memory"])),
    )


def _header(said: Mapping[str, Any]) -> Header:
    plan, clock, peak = said["plan"], said["clock"], said["peak"]
    return Header(
        kind=str(said["kind"]),
        step=int(said["step"]),
        rank=int(said["rank"]),
        schedule=str(said["schedule"]),
        plan=Plan(
            Placement([tuple(held) for held in plan["holders"]]),
            plan["microbatches"],
            Edges(plan["reads"]),
            tuple(map(tuple, plan["ties"])),
        ),
        unit=str(said["unit"]),
        clock=None if clock is None else Clock(float(clock["offset"]), float(clock["uncertainty"])),
        wall=float(said["wall"]),
        peak=None if peak is None else (float(peak[0]), str(peak[1])),
        host=tuple((str(what), float(start), float(end)) for what, start, end in said["host"]),
        device=str(said["device"]),
        turns=bool(said["turns"]),
        job=str(said["job"]),
    )


def _check(header: Header, names: Sequence[str], found: Mapping[str, NDArray[Any]]) -> None:
    """Refuse what no rank can have done: readers rely on it."""
    whole, some = ("kind", *_FIELDS, "start", "end", "from_rank", "from_row"), ("used", "bytes")
    count, plan = len(found["kind"]), header.plan
    lengths = {len(found[name]) for name in whole} | {len(found[name]) for name in some if len(found[name])}
    if lengths != {count} or len(found["memory_at"]) != len(found["memory"]):
        raise BadColumns("columns of different lengths")
    if not 0 <= header.rank < plan.ranks:
        raise BadColumns(f"rank {header.rank} of a plan of {plan.ranks}")
    if not 0 <= header.step < 10**18 or not 0 <= header.wall < LATEST:
        raise BadColumns(f"step {header.step}, or a date, that is none")
    host = np.array([time for _, start, end in header.host for time in (start, end)])
    times = [found["start"], found["end"], found["memory_at"], host]
    if not all((np.abs(each) < LATEST).all() for each in times) or (found["end"] < found["start"]).any():
        raise BadColumns("times that are none")
    amounts = [found["memory"], found["bytes"][~np.isnan(found["bytes"])], header.peak[:1] if header.peak else ()]
    amounts.append(header.clock[1:] if header.clock else ())
    amounts.append(np.abs(header.clock[:1]) if header.clock else ())
    if not all(((np.asarray(each) >= 0) & (np.asarray(each) < MOST)).all() for each in amounts):
        raise BadColumns("bytes, or an uncertainty of clocks, that are none")
    if found["kind"].max(initial=0) >= len(names):
        raise BadColumns("an effect of no kind")
    here = np.zeros(plan.stages, bool)
    here[list(plan.stages_on(header.rank))] = True
    posts, overlaps = (
        np.array([n.startswith(of) for n in names])[found["kind"]] for of in (("Send", "Recv"), "Overlap")
    )
    if (found["stage"] >= plan.stages).any() or (found["other"][overlaps] >= plan.stages).any():
        raise BadColumns("a stage that the plan doesn't have")
    if not here[found["stage"][~posts]].all() or not here[found["other"][overlaps]].all():
        raise BadColumns(f"rank {header.rank} runs a stage that is not on it")
    if (found["microbatch"] >= plan.microbatches).any() or (found["peer"] >= plan.ranks).any():
        raise BadColumns("a microbatch or a rank that the plan doesn't have")


def _effects(names: Sequence[str], found: Mapping[str, NDArray[Any]]) -> Iterator[Effect]:
    known = {kind.name: kind.effect for kind in KINDS.values()}
    makers = [known.get(name) for name in names]
    rows = zip(found["kind"].tolist(), *(found[name].tolist() for name in _FIELDS), strict=True)
    for code, *row in rows:
        make = makers[code]
        if make is None:
            raise BadColumns(f"an effect {names[code]!r}, of a later fpipe: update this one")
        yield make(*row)
