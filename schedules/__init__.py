"""The library of schedules, and the search among them. No torch.

A schedule is a generator `name(rank, plan)` that yields effects in compute order; what has to see all ranks and costs
is made by a factory (`zb_auto`, `v_auto`, `from_table`). `CATALOGUE` has each with its placement, by name.
"""

from fpipe.schedules.catalogue import CATALOGUE
from fpipe.schedules.controllable_memory import v_auto, v_half, v_min
from fpipe.schedules.dualpipe import dualpipe, dualpipe_v
from fpipe.schedules.gpipe import gpipe
from fpipe.schedules.interleaved import interleaved_1f1b
from fpipe.schedules.interleaved_zb import interleaved_zb
from fpipe.schedules.looped_bfs import looped_bfs
from fpipe.schedules.one_f_one_b import one_f_one_b
from fpipe.schedules.search import Found, lower_bound, pareto, search
from fpipe.schedules.table import from_table
from fpipe.schedules.zb_auto import zb_auto
from fpipe.schedules.zb_v import zb_v
from fpipe.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "CATALOGUE",
    "Found",
    "dualpipe",
    "dualpipe_v",
    "from_table",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zb",
    "looped_bfs",
    "lower_bound",
    "one_f_one_b",
    "pareto",
    "search",
    "v_auto",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
