"""The library of schedules: generators `schedule(rank, plan)` that yield effects in compute order. No torch."""

from fpipe.schedules.gpipe import gpipe
from fpipe.schedules.interleaved import interleaved_1f1b
from fpipe.schedules.one_f_one_b import one_f_one_b
from fpipe.schedules.table import from_table

__all__ = ["from_table", "gpipe", "interleaved_1f1b", "one_f_one_b"]
