"""Timelines and scalars into TensorBoard's event files, a run for each rank: `logdir/measured/rank3`. No torch."""

from __future__ import annotations

import json
import secrets
import time
from math import nan
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.plugins.scalar.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from fpipe.effects import Recv, Send
from fpipe.programs.interning import Interning
from fpipe.programs.memory import bytes_on
from fpipe.tensorboard.files.captures import KINDS, PLUGIN, columns_of, tag
from fpipe.tensorboard.files.columns import Columns, Header, encode
from fpipe.timelines.format import sized
from fpipe.timelines.timeline import Timeline

PART = 32 << 20  # bytes of one tensor; much larger ones make TensorBoard's server answer 500


class Writer:
    """Writes one rank's run. Records are appended whole, each with its checksum; readers leave out one cut short.

    Args:
        logdir: the experiment's folder; `kind` and `rank` name the run in it.
        kind: "measured" or "predicted".

    Raises:
        OSError: the folder can't be made or written.
    """

    def __init__(self, logdir: Path | str, kind: str, rank: int) -> None:
        if kind not in KINDS:
            raise ValueError(f"a timeline is measured or predicted, not {kind!r}")
        self.folder = Path(logdir) / kind / f"rank{rank}"
        self._events = EventFileWriter(str(self.folder), flush_secs=10)

    def timeline(self, header: Header, columns: Columns) -> None:
        """One captured step, under a tag of its own."""
        blob = encode(header, columns)
        for part, at in enumerate(range(0, len(blob), PART)):
            text = TensorProto(dtype=DT_STRING, string_val=[blob[at : at + PART]], tensor_shape=TensorShapeProto())
            metadata = SummaryMetadata(
                plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN, content=outline(header)),
                data_class=DATA_CLASS_TENSOR,
            )
            value = Summary.Value(tag=tag(header.step, part), tensor=text, metadata=metadata)
            self._add(value, header.step, header.wall)
        self.flush()

    def scalar(self, name: str, value: float, step: int, wall: float | None = None) -> None:
        """A point of a curve in the standard tabs."""
        tensor = TensorProto(dtype=DT_FLOAT, float_val=[value], tensor_shape=TensorShapeProto())
        metadata = create_summary_metadata(display_name="", description="")
        metadata.data_class = DATA_CLASS_SCALAR
        self._add(Summary.Value(tag=name, tensor=tensor, metadata=metadata), step, wall)

    def _add(self, value: Summary.Value, step: int, wall: float | None) -> None:
        self._events.add_event(Event(wall_time=wall or time.time(), step=step, summary=Summary(value=[value])))

    def flush(self) -> None:
        """Have all of it in the file."""
        self._events.flush()

    def close(self) -> None:
        """Flush, and end the file."""
        self._events.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def outline(header: Header) -> bytes:
    """What a list of captures says of one, so that it need not be read: JSON."""
    plan = header.plan
    counts = {"ranks": plan.ranks, "stages": plan.stages, "microbatches": plan.microbatches}
    return json.dumps({"schedule": header.schedule[:_LONGEST], **counts, "unit": header.unit}).encode()


_LONGEST = 200  # characters of a schedule's name that a list shows


def write(logdir: Path | str, timeline: Timeline, *, schedule: str, step: int = 0, unit: str = "") -> None:
    """Write a simulated timeline of all ranks as predicted.

    Args:
        logdir: the experiment's folder.
        schedule: its name.
        unit: of its times: "s", or none.
    """
    held, job = sized(timeline.costs), f"{secrets.randbits(62):x}"
    for rank in range(timeline.plan.ranks):
        header = Header("predicted", step, rank, schedule, timeline.plan, unit, wall=time.time(), job=job)
        with Writer(logdir, "predicted", rank) as writer:
            memory = timeline.memory(rank) if held else ()
            writer.timeline(header, columns_of(timeline, rank, sizes=_sizes(timeline, rank), memory=memory))


def _sizes(timeline: Timeline, rank: int) -> NDArray[np.float64] | None:
    """Bytes of what each send and receive carries, where the costs say."""
    if not sized(timeline.costs):
        return None
    interning = Interning(timeline.plan, timeline.table)
    own = (timeline.spans.effects[at] for at in timeline.spans.of(rank))
    carried = (effect.value if isinstance(effect, Send | Recv) else None for effect in own)
    return np.array(
        [nan if value is None else bytes_on(rank, value, timeline.costs, interning) for value in carried], float
    )
