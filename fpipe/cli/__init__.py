"""The command line: fpipe schedules, verify, simulate, draw, compare, search, export, import, timeline.

- Exit status 1: the schedule is invalid, or does not fit the plan; the reason is on stderr. Status 2: usage error.
- No torch. Each verb imports slow modules itself; matplotlib is imported only to write a figure.
"""

from fpipe.cli import timeline as timeline  # importing a module registers its verbs
from fpipe.cli import verbs as verbs
from fpipe.cli.app import app, main

__all__ = ["app", "main"]
