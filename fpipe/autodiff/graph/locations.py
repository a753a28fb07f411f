"""Lines of the user's code, for messages."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from fpipe.errors.tracebacks import is_library


def user_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line of the user's code; an empty string if there is none."""
    lines = [f for f in frames if not is_library(f.filename)]
    return "".join(f" (in {f.filename}:{f.lineno}, {f.name}: {f.line})" for f in lines[-1:])
