"""Show the user's lines first in tracebacks and warnings. No torch."""

import contextlib
import functools
import importlib.util
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from fpipe.errors import StageError

P = ParamSpec("P")
T = TypeVar("T")

HERE = Path(__file__).parents[1]
GENERATED = re.compile(r"<(fpipe|eval_with_key|frozen|string|__array_function__)")
"""The beginnings of the names of files with code that fpipe, torch or Python generate."""
FOLDED = "frames of fpipe and torch are folded; FPIPE_TRACEBACK=full shows them"


@functools.cache
def library_files() -> tuple[str, ...]:
    """Return the beginnings of the names of files of fpipe, torch and optree, and of what calls through to others."""
    specs = map(importlib.util.find_spec, ("torch", "optree", "concurrent"))  # which imports none of them
    others = [folder for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()]
    return own_folders() + _folders(map(Path, others)) + (contextlib.__file__, functools.__file__, threading.__file__)


@functools.cache
def own_folders() -> tuple[str, ...]:
    """Return the folders of fpipe; those of interop and schedules may be links."""
    return _folders([HERE, HERE / "interop", HERE / "schedules"])


def _folders(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return the beginnings of the names of files in some folders, by which Python may have imported them."""
    return tuple({str(each) + os.sep for path in paths for each in (path, path.resolve())})


def is_library(file: str) -> bool:
    """Return whether a file is fpipe's or torch's, calls through to others, or is code that these have generated."""
    return file.startswith(library_files()) or GENERATED.match(file) is not None


def warn(message: str) -> None:
    """Warn, with the innermost line of the user's code as the place."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def fold_tracebacks(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose errors show the frames of the user's code first.

    Of the frames inside the function, those of libraries are folded in the error and its causes, except the innermost
    one, where the user's code called torch. A note counts them. Errors that come from no code of the user's are left
    as they are, and all are under FPIPE_TRACEBACK=full.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _Folding():
            return function(*args, **kwargs)

    return call


class _Folding:
    """A context whose frames, and that of its `with`, are folded in errors that leave it."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception) and os.environ.get("FPIPE_TRACEBACK") != "full":
            _fold(error)


def _fold(error: Exception) -> None:
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and all(one is not each for each in chain):
        chain.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    tracebacks = {id(one): list(frames(one)) for one in chain}
    if not any(_is_users(frame) for each in tracebacks.values() for frame in each) and not _is_called(error, chain[-1]):
        return
    folded = 0
    for one in chain:
        shown = [frame for frame in tracebacks[id(one)] if _is_users(frame)]
        if tracebacks[id(one)] and (shown or one is not error) and not _is_users(tracebacks[id(one)][-1]):
            shown.append(tracebacks[id(one)][-1])
        folded += len(tracebacks[id(one)]) - len(shown)
        one.__traceback__ = None
        for frame in reversed(shown):
            one.__traceback__ = TracebackType(one.__traceback__, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    notes = getattr(error, "__notes__", [])
    before = sum(int(note.split()[0]) for note in notes if note.endswith(FOLDED))  # of a call inside this one
    error.__notes__ = [note for note in notes if not note.endswith(FOLDED)] + [f"{before + folded} {FOLDED}"]


def _is_called(error: Exception, cause: BaseException) -> bool:
    """Return whether an error comes from what a stage has called, such as a module of torch's without a frame here."""
    files = [frame.tb_frame.f_code.co_filename for frame in frames(cause)]
    return (
        isinstance(error, StageError) and cause is not error and bool(files) and not files[-1].startswith(own_folders())
    )


def frames(error: BaseException) -> Iterator[TracebackType]:
    """Iterate over the traceback of an error, the innermost frame last."""
    at = error.__traceback__
    while at is not None:
        yield at
        at = at.tb_next


def _is_users(frame: TracebackType) -> bool:
    return not is_library(frame.tb_frame.f_code.co_filename)
