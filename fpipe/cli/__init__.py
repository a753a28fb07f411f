"""The command line: fpipe schedules, verify, simulate, draw, compare, search, export, import, timeline.

- Exit status 1: the schedule is wrong, or not for this plan; why stands on stderr. Status 2: the command is wrong.
- It never imports torch. What is slow to import is imported by the verb that needs it; matplotlib only for a file.
"""

from fpipe.cli import timeline as timeline  # each adds itself to the application
from fpipe.cli import verbs as verbs
from fpipe.cli.app import app, main

__all__ = ["app", "main"]
