"""Encode one rank's spans of one step as bytes: a header and columns, read by Python and by the page. No torch.

The bytes are a gzip of: `FPT1`; the length of the header, as u32; the header, JSON padded with spaces to a multiple of
eight; and the columns, each at a multiple of eight. All numbers are little-endian. Times are in the header's unit. Time
0 is when the first of all ranks begins to compute, or to gather for that, if their clocks were compared, else when the
rank itself does; what was posted before is negative.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpipe.effects import Effect
from fpipe.errors import ScheduleError
from fpipe.plan import Plan
from fpipe.tables import TABLE, Table, fields_of
from fpipe.tensorboard.files.kinds import COLUMNS, LIMITS, Kind, described, read, rows_of
from fpipe.tensorboard.files.plans import Plans, TooLarge, as_json

MAGIC = b"FPT1"
FORMAT = 4
MAX_UNPACKED_BYTES = 1 << 29  # of one rank's step
MAX_HEADER_BYTES = 1 << 23
MAX_SPANS = 1 << 22  # of one rank's step
KINDS = ("measured", "predicted")  # of captures that are recorded
IMAGINED = "what-if"  # the kind of those that are worked out of them
MAX_KINDS = 256  # what a column of bytes tells apart
MAX_TIME = 1e12  # in any unit; as milliseconds, still below 2**63 nanoseconds
MAX_BYTES = 1 << 60  # of memory or a message
_TYPES = ("u1", "u2", "u4", "i4", "f8")
_STORED = ("start", "end", "from_rank", "from_row", "used", "bytes", "memory_at", "memory")  # `Columns`, after effects


COPY = "Copy it again if it is a copy; otherwise record the step again."


class BadColumns(ValueError):
    """The bytes are not the encoded spans of a rank, or are truncated.

    Args:
        problem: what follows the name of a file in a sentence, as "is cut short". It is the message.
        remedy: what to do, as a sentence.
    """

    def __init__(self, problem: str, remedy: str = COPY) -> None:
        super().__init__(problem)
        self.remedy = remedy


class Clock(NamedTuple):
    """The seconds by which a rank's clock is ahead of rank 0's, and the uncertainty of that."""

    offset: float
    uncertainty: float


_SAME = Clock(0.0, 0.0)


@dataclass(frozen=True)
class Header:
    """The metadata of one rank's spans.

    Args:
        kind: "measured" or "predicted".
        unit: of times: "s", or "" if the costs have no unit.
        clock: None if the ranks' clocks were not compared.
        wall: when the step ran, in seconds since 1970.
        peak: peak bytes of an allocator or a process until then, and which of the two.
        host: host activities around the effects: (name, start, end).
        device: the device that the rank computes on.
        turns: whether the ranks ran in turn in one process; a rank is then idle while others compute.
        job: identifies the job, the same on all its ranks; "" if the ranks did not exchange it.
        replica: the number of the replica of the pipeline.
        makespans: of the step in each replica; empty if they were not gathered, or there is one.
        busy: the times that each replica's ranks computed, by rank; empty likewise.
        steps: how many follow each other in it, each with the same effects.
        owners: the bytes at the peak of `Columns.memory`, by owner; empty if they are not known.
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
    replica: int = 0
    makespans: Sequence[float] = ()
    busy: Sequence[Sequence[float]] = ()
    steps: int = 1
    owners: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Columns:
    """One rank's spans, in the order of its program.

    Args:
        effects: in program order.
        starts, ends: as in `Timeline`.
        waited: for each span the (rank, row of that rank) of the span that it waited for, -1 for none.
        used: for each receive the time when the first use of its value began to wait; NaN if unknown.
        bytes: size of the value of each send and receive; NaN if unknown.
        memory: times at which the rank's memory changed, and its bytes from then on.
        table: describes the effects.
    """

    effects: Sequence[Effect]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    waited: tuple[NDArray[np.int32], NDArray[np.int32]]
    used: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    bytes: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    memory: tuple[NDArray[np.float64], NDArray[np.float64]] = field(default_factory=lambda: (np.empty(0), np.empty(0)))
    table: Table = TABLE

    def __len__(self) -> int:
        return len(self.effects)


def encode(header: Header, columns: Columns) -> bytes:
    """Encode one rank's spans.

    Raises:
        TooLarge: a ScheduleError: there are more effects, or kinds of them, than are shown, or the plan is too large.
        ScheduleError: an effect does not fit into the columns.

    >>> from fpipe import Placement
    >>> from fpipe.effects import Forward
    >>> header = Header("predicted", 0, 0, "mine", Plan(Placement.loop(1), 1), unit="")
    >>> none = np.full(1, -1, np.int32)
    >>> decoded, columns = decode(encode(header, Columns([Forward(0, 0)], np.zeros(1), np.ones(1), (none, none))))
    >>> decoded == header, columns.effects[0], columns.ends
    (True, Forward(stage=0, microbatch=0), array([1.]))
    """
    _check_size(len(columns), "effects", MAX_SPANS)
    kinds, codes, numbers = rows_of(columns.effects, header.plan.slices)
    _check_size(len(kinds), "kinds of effects", MAX_KINDS)
    rows = np.array(numbers, np.int64).reshape(len(numbers), len(COLUMNS))
    arrays: dict[str, NDArray[Any]] = {"kind": np.array(codes, np.uint8)}
    arrays |= {name: _narrow(rows[:, at]) for at, name in enumerate(COLUMNS)}
    stored = columns.starts, columns.ends, *columns.waited, columns.used, columns.bytes, *columns.memory
    arrays |= zip(_STORED, stored, strict=True)
    return _packed(header, arrays, [described(kind, columns.table) for kind in kinds])


def _check_size(count: int, what: str, most: int) -> None:
    if count > most:
        raise TooLarge(f"a rank has {count} {what} in its step, and at most {most} are shown: record a smaller step")


def _narrow(numbers: NDArray[np.int64]) -> NDArray[Any]:
    largest = int(numbers.max(initial=0))
    return numbers.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32)


def _packed(header: Header, arrays: Mapping[str, NDArray[Any]], kinds: Sequence[Mapping[str, Any]]) -> bytes:
    at, index, parts = 0, {}, []
    for name, column in arrays.items():
        data = column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
        index[name] = [column.dtype.str[1:], at, len(column)]
        parts.append(data.ljust(-(-len(data) // 8) * 8, b"\0"))
        at += len(parts[-1])
    content = vars(header) | {
        "plan": as_json(header.plan),
        "format": FORMAT,
        "ranks": header.plan.ranks,
        "clock": header.clock._asdict() if header.clock else None,
        "kinds": kinds,
        "columns": index,
    }
    text = json.dumps(content, allow_nan=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return gzip.compress(b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *parts]), 6, mtime=0)


def decode(data: bytes, plans: Plans | None = None) -> tuple[Header, Columns]:
    """Return the arguments of `encode` from its bytes.

    Args:
        plans: makes the plan, once for all ranks of a job.

    Raises:
        BadColumns: `encode` did not write these bytes.
    """
    return _read(data, plans).spans()


def check(data: bytes, plans: Plans | None = None) -> Header:
    """Return the header of the bytes that `decode` can read, without making their effects.

    Raises:
        BadColumns: as `decode`.
    """
    return _read(data, plans).header


class _Read(NamedTuple):
    """A rank's bytes that have been checked."""

    header: Header
    kinds: Sequence[Kind]
    table: Table
    arrays: Mapping[str, NDArray[Any]]

    def spans(self) -> tuple[Header, Columns]:
        start, end, from_rank, from_row, used, sizes, at, memory = (self.arrays[name] for name in _STORED)
        effects = list(_effects(self.kinds, self.arrays))
        return self.header, Columns(effects, start, end, (from_rank, from_row), used, sizes, (at, memory), self.table)


def _read(data: bytes, plans: Plans | None) -> _Read:
    try:
        return _checked(_unpacked(data), Plans() if plans is None else plans)
    except BadColumns:
        raise
    except TooLarge as error:
        raise BadColumns(f"can't be shown: {error}", _SMALLER) from error
    except ScheduleError as error:
        raise BadColumns(f"is damaged: {shorten(str(error), _MAX_CHARACTERS)}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise BadColumns("is damaged: its header is not as fpipe writes it") from error


_MAX_CHARACTERS = 200  # of a reason
_SMALLER = "Record a smaller step."


def _unpacked(data: bytes) -> bytes:
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        raw = unpack.decompress(data, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise BadColumns("is damaged: its bytes are not what was written") from error
    if unpack.unconsumed_tail:
        raise BadColumns(f"unpacks to more than {MAX_UNPACKED_BYTES} bytes, and at most so many are shown", _SMALLER)
    if not unpack.eof:
        raise BadColumns("is cut short" if data else "is empty, or was deleted")
    return raw


def _checked(raw: bytes, plans: Plans) -> _Read:
    if raw[:4] != MAGIC:
        raise BadColumns("is no timeline that fpipe wrote")
    begin = 8 + int.from_bytes(raw[4:8], "little")
    if begin > MAX_HEADER_BYTES:
        raise BadColumns(f"is damaged: its header has {begin} bytes, more than {MAX_HEADER_BYTES}")
    content = {"steps": 1} | json.loads(raw[8:begin])
    if content["format"] != FORMAT:
        versions = f"in format {content['format']:d}, not {FORMAT}"
        raise BadColumns(f"was written by another version of fpipe, {versions}", "Read it with that version.")
    header, arrays = _header(content, plans), dict[str, NDArray[Any]]()
    for name, (kind, at, length) in content["columns"].items():
        if kind not in _TYPES:
            raise BadColumns("is damaged: it has a column of an unknown type")
        if length > MAX_SPANS and name in ("kind", *COLUMNS):
            raise BadColumns(f"has {length} effects of one rank, and at most {MAX_SPANS} are shown", _SMALLER)
        arrays[name] = np.frombuffer(raw, np.dtype(kind).newbyteorder("<"), length, begin + at)
    kinds, table = _kinds(content["kinds"])
    for problem, is_wrong in _problems(header, kinds, arrays):
        if is_wrong:
            raise BadColumns(f"is damaged: it has {problem}")
    return _Read(header, kinds, table, arrays)


def _kinds(descriptions: Sequence[Mapping[str, Any]]) -> tuple[list[Kind], Table]:
    if len(descriptions) > MAX_KINDS:
        raise BadColumns(f"has {len(descriptions)} kinds of effects, and at most {MAX_KINDS} are shown", _SMALLER)
    try:
        return read(descriptions)
    except ValueError as error:
        raise BadColumns(f"is damaged: {shorten(str(error), _MAX_CHARACTERS)}") from error


def _header(content: Mapping[str, Any], plans: Plans) -> Header:
    clock, peak = content["clock"], content["peak"]
    simple = {field.name: _SIMPLE[field.type] for field in fields(Header) if field.type in _SIMPLE}
    return Header(
        plan=plans.plan(content["plan"]),
        clock=None if clock is None else Clock(float(clock["offset"]), float(clock["uncertainty"])),
        peak=None if peak is None else (float(peak[0]), str(peak[1])),
        makespans=tuple(map(float, content["makespans"])),
        busy=tuple(tuple(map(float, ranks)) for ranks in content["busy"]),
        host=tuple((str(what), float(start), float(end)) for what, start, end in content["host"]),
        owners={str(owner): float(size) for owner, size in content.get("owners", {}).items()},
        **{name: convert(content[name]) for name, convert in simple.items()},
    )


_SIMPLE: Mapping[Any, Callable[[Any], Any]] = {"str": str, "int": int, "float": float, "bool": bool}  # by annotation


def _problems(
    header: Header, kinds: Sequence[Kind], columns: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[str, bool | np.bool_]]:
    """Yield each problem that a file can have, and whether this one has it; readers rely on these checks."""
    plan, optional = header.plan, [name for name in ("used", "bytes") if len(columns[name])]
    lengths = {len(columns[name]) for name in ("kind", *COLUMNS, *_STORED[:4], *optional)}
    yield "columns of different lengths", len(lengths) > 1 or len(columns["memory_at"]) != len(columns["memory"])
    yield f"rank {header.rank} of a plan of {plan.ranks}", not 0 <= header.rank < plan.ranks
    yield f"replica {header.replica} of a plan of {plan.replicas}", not 0 <= header.replica < plan.replicas
    yield f"{len(header.makespans)} makespans of {plan.replicas}", len(header.makespans) not in (0, plan.replicas)
    ranks = {len(each) for each in header.busy}
    yield "busy times of other ranks", len(header.busy) not in (0, plan.replicas) or not ranks <= {plan.ranks}
    yield "an unknown kind, or unit of time", header.kind not in (*KINDS, IMAGINED) or header.unit not in ("s", "")
    yield f"step {header.step}, which is out of range", not 0 <= header.step < 10**18
    count, steps = len(columns["kind"]), header.steps
    yield f"{count} effects of {steps} equal steps", not 1 <= steps <= max(1, count) or count % steps > 0
    yield "a date that is out of range", not 0 <= header.wall < MAX_TIME
    host = np.array([time for _, start, end in header.host for time in (start, end)])
    times = [
        columns["start"],
        columns["end"],
        columns["memory_at"],
        host,
        *map(np.array, (header.makespans, header.busy)),
    ]
    yield "times that are out of range", not all((np.abs(each) < MAX_TIME).all() for each in times)
    yield "times that end before they start", (columns["end"] < columns["start"]).any()
    clock = (header.clock.uncertainty, abs(header.clock.offset)) if header.clock else ()
    sizes = [columns["memory"], columns["bytes"][~np.isnan(columns["bytes"])], header.peak[:1] if header.peak else ()]
    sizes.append(np.array(list(header.owners.values())))
    amounts = [np.asarray(each) for each in (*sizes, clock)]
    problem = "a count of bytes, or an uncertainty of clocks, that is negative or far too large"
    yield problem, not all(((each >= 0) & (each < MAX_BYTES)).all() for each in amounts)
    yield "an unknown kind of effect", columns["kind"].max(initial=0) >= max(1, len(kinds))
    is_here = np.zeros(plan.stages, bool)
    is_here[list(plan.stages_on(header.rank))] = True
    for code, kind in enumerate(kinds):
        rows = columns["kind"] == code
        for name, column in kind.numbers:
            if limit := LIMITS.get(name):
                numbers = columns[column][rows]
                yield f"a {name} that the plan doesn't have", (numbers >= getattr(plan, limit)).any()
                if name == "stage" and kind.cls in TABLE.effects and "value" not in fields_of(kind.cls):
                    yield f"a stage that is not on rank {header.rank}", not is_here[numbers].all()


def _effects(kinds: Sequence[Kind], columns: Mapping[str, NDArray[Any]]) -> Iterator[Effect]:
    makers = [kind.maker() for kind in kinds]
    rows = zip(*(columns[name].tolist() for name in COLUMNS), strict=True)
    for code, row in zip(columns["kind"].tolist(), rows, strict=True):
        yield makers[code](row)
