"""The library of schedules, and the search among them. No torch.

A schedule is a generator `name(rank, plan)` that yields effects in compute order; what has to see all ranks and costs
is made by a factory (`zb_auto`, `v_auto`, `from_table`). `CATALOGUE` has each with its placement, by name, and `get`
returns a schedule by its name.
"""

from typing import TYPE_CHECKING

from fpipe._lazy import reexports
from fpipe.programs.updates import updating as updating
from fpipe.schedules.bounds import lower_bound as lower_bound
from fpipe.schedules.candidates import Strategy as Strategy
from fpipe.schedules.catalogue import CATALOGUE as CATALOGUE, get as get
from fpipe.schedules.controllable_memory import v_auto as v_auto, v_half as v_half, v_min as v_min
from fpipe.schedules.dualpipe import dualpipe as dualpipe, dualpipe_v as dualpipe_v
from fpipe.schedules.gpipe import gpipe as gpipe
from fpipe.schedules.interleaved import (
    interleaved_1f1b as interleaved_1f1b,
    interleaved_1f1b_overlap as interleaved_1f1b_overlap,
)
from fpipe.schedules.interleaved_zb import interleaved_zb as interleaved_zb
from fpipe.schedules.looped_bfs import looped_bfs as looped_bfs
from fpipe.schedules.machines import MACHINES as MACHINES, Machine as Machine
from fpipe.schedules.one_f_one_b import one_f_one_b as one_f_one_b
from fpipe.schedules.seq_1f1b import seq_1f1b as seq_1f1b, seq_zb as seq_zb
from fpipe.schedules.found import Found as Found
from fpipe.schedules.search import pareto as pareto, search as search
from fpipe.schedules.shapes import SHAPES as SHAPES, ModelShape as ModelShape
from fpipe.schedules.strategies import strategies as strategies
from fpipe.schedules.table import from_table as from_table
from fpipe.schedules.vocabulary_1f1b import vocabulary_1f1b as vocabulary_1f1b
from fpipe.schedules.zb_auto import zb_auto as zb_auto
from fpipe.schedules.zb_v import zb_v as zb_v
from fpipe.schedules.zero_bubble import zb_h1 as zb_h1, zb_h2 as zb_h2

if not TYPE_CHECKING:  # a checker takes the names above, and none from a list that is computed
    __all__ = sorted(reexports(__name__))
