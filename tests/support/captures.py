"""Captures as a recorder writes them, from timelines."""

from fpipe.tensorboard.files.captures import columns_of
from fpipe.tensorboard.files.columns import Header
from fpipe.tensorboard.files.writer import Writer


def record(logdir, timelines, ranks=None, schedule="1f1b", changed=lambda columns, rank: columns, **header):
    """Write measured timelines, by the step with which each begins.

    Args:
        ranks: those that write; by default all.
        changed: returns a rank's columns as they are to be written.
        header: more of the headers.
    """
    for rank in range(next(iter(timelines.values())).plan.ranks) if ranks is None else ranks:
        with Writer(logdir, "measured", rank) as writer:
            for step, timeline in timelines.items():
                about = Header("measured", step, rank, schedule, timeline.plan, **header)
                writer.timeline(about, changed(columns_of(timeline, rank), rank))
