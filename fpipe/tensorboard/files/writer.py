"""Write timelines and scalars into TensorBoard's event files, one run per rank: `logdir/measured/rank3`. No torch."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from math import nan
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.plugins.scalar.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from fpipe._format import sized
from fpipe.effects import Recv, Send
from fpipe.programs.interning import Interning
from fpipe.programs.memory import bytes_on
from fpipe.tensorboard.files.captures import PLUGIN, columns_of, tag
from fpipe.tensorboard.files.columns import KINDS, Columns, Header, encode
from fpipe.timelines.timeline import Timeline

PART_BYTES = 32 << 20  # of one tensor; TensorBoard's server answers 500 for much larger ones


class Writer:
    """Write one rank's run. Each record is appended with its checksum; readers skip a truncated record.

    Args:
        logdir: the experiment's folder; `kind` and `rank` name the run in it.
        kind: "measured" or "predicted".

    Raises:
        OSError: the folder can't be created or written.
        ValueError: `kind` is neither of the two.
    """

    def __init__(self, logdir: Path | str, kind: str, rank: int) -> None:
        if kind not in KINDS:
            raise ValueError(f"a timeline is measured or predicted, not {kind!r}")
        self.folder = Path(logdir) / kind / f"rank{rank}"
        self._events = EventFileWriter(str(self.folder), flush_secs=10)

    def timeline(self, header: Header, columns: Columns) -> None:
        """Write one captured step under its own tag, and flush."""
        blob = encode(header, columns)
        data = SummaryMetadata.PluginData(plugin_name=PLUGIN, content=outline(header))
        metadata = SummaryMetadata(plugin_data=data, data_class=DATA_CLASS_TENSOR)
        for part, at in enumerate(range(0, len(blob), PART_BYTES)):
            piece = blob[at : at + PART_BYTES]
            text = TensorProto(dtype=DT_STRING, string_val=[piece], tensor_shape=TensorShapeProto())
            value = Summary.Value(tag=tag(header.step, part), tensor=text, metadata=metadata)
            self._add(value, header.step, header.wall)
        self.flush()

    def scalar(self, name: str, value: float, step: int, wall: float | None = None) -> None:
        """Write one point of a curve for the standard tabs; `wall` in seconds since 1970, by default now."""
        tensor = TensorProto(dtype=DT_FLOAT, float_val=[value], tensor_shape=TensorShapeProto())
        metadata = create_summary_metadata(display_name="", description="")
        metadata.data_class = DATA_CLASS_SCALAR
        self._add(Summary.Value(tag=name, tensor=tensor, metadata=metadata), step, wall)

    def _add(self, value: Summary.Value, step: int, wall: float | None) -> None:
        self._events.add_event(Event(wall_time=wall or time.time(), step=step, summary=Summary(value=[value])))

    def flush(self) -> None:
        """Write all buffered records to the file."""
        self._events.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._events.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def outline(header: Header) -> bytes:
    """Return the summary of a capture for a list of captures, as JSON, so that the list need not read it."""
    plan = header.plan
    counts = {"ranks": plan.ranks, "stages": plan.stages, "microbatches": plan.microbatches}
    return json.dumps({"schedule": header.schedule[:_MAX_CHARACTERS], **counts, "unit": header.unit}).encode()


_MAX_CHARACTERS = 200  # of a schedule's name in a list of captures


def write(logdir: Path | str, timeline: Timeline, *, schedule: str, step: int = 0, unit: str = "") -> None:
    """Write a simulated timeline of all ranks, as kind "predicted".

    Args:
        logdir: the experiment's folder.
        schedule: the schedule's name.
        unit: of the timeline's times: "s", or "" for none.

    Raises:
        OSError: the folder can't be created or written.
    """
    job = f"{secrets.randbits(62):x}"
    has_sizes = sized(timeline.costs)
    for rank in range(timeline.plan.ranks):
        header = Header(
            *("predicted", step, rank, schedule, timeline.plan, unit),
            wall=time.time(),
            job=job,
            steps=timeline.steps,
            owners=timeline.owners(rank) if has_sizes else {},
        )
        sizes, memory = (_sizes(timeline, rank), timeline.memory(rank)) if has_sizes else ((), ())
        with Writer(logdir, "predicted", rank) as writer:
            writer.timeline(header, columns_of(timeline, rank, sizes=sizes, memory=memory))


def _sizes(timeline: Timeline, rank: int) -> Sequence[float]:
    """Return the bytes of each send and receive of a rank, NaN for other effects."""
    interning = Interning(timeline.plan, timeline.table)
    effects = (timeline.spans.effects[at] for at in timeline.spans.of(rank))
    values = (effect.value if isinstance(effect, Send | Recv) else None for effect in effects)
    return [nan if value is None else bytes_on(rank, value, timeline.costs, interning) for value in values]
