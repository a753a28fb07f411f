"""Lines of the user's code, for messages."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path

import optree
import torch

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = (
    *(str(Path(package.__path__[0]).resolve()) for package in (torch, optree)),
    *(str(ROOT / name) for name in ("fpipe", "interop")),
    "<",
)
"""The beginnings of file names that are not the user's."""


def user_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line of the user's code; an empty string if there is none."""
    lines = [f for f in frames if not f.filename.startswith(LIBRARIES)]
    return "".join(f" (in {f.filename}:{f.lineno}, {f.name}: {f.line})" for f in lines[-1:])
