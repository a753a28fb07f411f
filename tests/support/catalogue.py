"""The catalogue's schedules by the names of their functions."""

from fpipe.schedules import CATALOGUE

FUNCTIONS = {("one_f_one_b" if name == "1f1b" else name.replace("-", "_")): entry for name, entry in CATALOGUE.items()}
ORDERS = {name: entry for name, entry in FUNCTIONS.items() if not (entry.limited or entry.edges)}
"""Those that are one order for a plan, and not a search under a memory limit; of any chain of stages."""
