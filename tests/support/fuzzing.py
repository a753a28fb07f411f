"""Wrong arguments for the public surface: whether the error is one of fpipe's own, and names the argument."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import traceback
import warnings

from fpipe.errors import NonFiniteError, ScheduleError, StageError, TransportError
from fpipe.errors.tracebacks import own_folders
from fpipe.interop import CheckpointError
from tests.support import surface

OWN = (ScheduleError, StageError, TransportError, NonFiniteError, CheckpointError, OSError)
NAMES = {"opt_state": "state"}
"""Argument -> a name for it in messages, where it is another one."""
SECONDS = 10


class TooSlow(BaseException):
    """A call takes longer than any right one."""


def cases(folder):
    """(callable, argument, number of the wrong value) of everything."""
    return [
        (name, argument, i)
        for name, (_, arguments) in surface.calls(folder).items()
        for argument in arguments
        for i in range(len(surface.WRONG))
    ]


def bare_error(call, argument, number, calls):
    """A text about an error that says nothing of the argument; None where it does, or nothing is raised."""
    function, arguments = calls[call]
    wrong = surface.WRONG[number]
    try:
        with limited(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            named(function, {**arguments, argument: wrong})
    except OWN:
        return None
    except TooSlow:
        return f"{call}({argument}={wrong!r}): takes longer than {SECONDS} s"
    except (TypeError, ValueError) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        if at.filename == surface.__file__:  # a stage's, which is the user's code
            return None
        pattern = rf"\b{NAMES.get(argument, argument).removesuffix('s')}"
        if at.filename.startswith(own_folders()) and re.search(pattern, str(error), re.IGNORECASE):
            return None
        return f"{call}({argument}={wrong!r}): {type(error).__name__} at {at.filename[-40:]}:{at.lineno}: {error}"[:300]
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{call}({argument}={wrong!r}): {type(error).__name__} at {at.filename[-40:]}:{at.lineno}: {error}"[:300]
    return None


def named(function, arguments):
    """Call a function by names; those before a slash, or a star, by position."""
    positional = [arguments.pop(name) for name in ("path",) if name in arguments]
    return function(*positional, **arguments)


@contextlib.contextmanager
def limited():
    def stop(*_):
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
