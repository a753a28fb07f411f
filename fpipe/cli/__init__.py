"""The command line: schedules, verify, simulate, draw, compare, search, export, import, timeline, import-trace,
explain, checkpoint, env.

- Exit status 1: the schedule is invalid, or does not fit the plan, or a checkpoint is damaged; the reason is on stderr.
  Status 2: usage error.
- No torch, but for env. Each verb imports slow modules itself; matplotlib is imported only to write a figure.
"""

from fpipe.cli import verbs as verbs  # importing a module registers its verbs
from fpipe.cli import timeline as timeline
from fpipe.cli import traces as traces
from fpipe.cli import explain as explain
from fpipe.cli import checkpoints as checkpoints
from fpipe.cli import environment as environment
from fpipe.cli.app import app, main

__all__ = ["app", "main"]
