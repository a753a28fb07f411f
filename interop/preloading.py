"""Import modules in the process from which `fpipe.interop.torchrun` forks its workers.

multiprocessing imports modules there too, but not those beside the script, and it passes over those that are missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

VARIABLE = "FPIPE_PRELOAD"


def announce(path: Sequence[str], modules: Sequence[str]) -> None:
    """Let the next process that imports this module import others.

    Args:
        path: its `sys.path`.
    """
    os.environ[VARIABLE] = json.dumps([path, modules])


def preload() -> None:
    """Import the modules that were announced.

    Raises:
        RuntimeError: one can't be imported; multiprocessing would pass over an ImportError.
    """
    sys.path[:], modules = json.loads(os.environ.pop(VARIABLE))
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise RuntimeError(f"{name} can't be preloaded: {error}") from error


if VARIABLE in os.environ:
    preload()
