"""The errors, by cause: the schedule, the user's stage, its numbers, or a peer; tracebacks, and warnings. No torch."""

import collections.abc
import contextlib
import functools
import importlib.util
import inspect
import itertools
import numbers
import operator
import os
import re
import reprlib
import sys
import threading
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ScheduleError(ValueError):
    """The schedule or its plan is wrong: an effect is missing, is out of order, or never finishes waiting.

    The message names ranks and effects, and the values that they wait for.
    """


class StageError(RuntimeError):
    """The user's code or data failed: a stage's function, its parameters, its inputs, or the loss.

    Args:
        message: the failure, and a way out.
        rank, stage, microbatch: where it failed, as far as that is known.

    An exception that the stage raised is the `__cause__`, with the frames of the user's code; FPIPE_TRACEBACK=full
    keeps all frames.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        place = {"rank": rank, "stage": stage, "microbatch": microbatch}
        where = ", ".join(f"{word} {at}" for word, at in place.items() if at is not None)
        super().__init__(f"{where}: {message}" if where else message)
        self.message, self.rank, self.stage, self.microbatch = message, rank, stage, microbatch

    def on(self, rank: int | None, stage: int | None = None, microbatch: int | None = None) -> "StageError":
        """Return the same error with its rank, and with its stage and its microbatch if it had none."""
        stage = stage if self.stage is None else self.stage
        microbatch = microbatch if self.microbatch is None else self.microbatch
        error = StageError(self.message, rank=rank, stage=stage, microbatch=microbatch)
        error.__cause__ = self.__cause__
        return error


class NonFiniteError(StageError, FloatingPointError):
    """The loss or the gradients of a step are not finite; raised on every rank, if the step was made to check it.

    Args:
        microbatch: the first whose loss is not finite, counted over all replicas; None if all are.
        stages: those whose gradients are not finite.
    """

    def __init__(self, message: str, *, microbatch: int | None = None, stages: Sequence[int] = ()) -> None:
        super().__init__(message, microbatch=microbatch)
        self.stages = tuple(stages)


@contextlib.contextmanager
def blaming(stage: int, microbatch: int) -> Iterator[None]:
    """Turn an exception of a stage's forward into a `StageError` with the stage and the microbatch."""
    try:
        yield
    except StageError as error:
        raise error.on(None, stage, microbatch) from error.__cause__
    except Exception as error:  # a stage is the user's, and may raise anything
        message = f"Forward raised {type(error).__name__}: {error}"
        raise StageError(message, stage=stage, microbatch=microbatch) from error


class TransportError(RuntimeError):
    """A peer failed or can't be reached; the message repeats the peer's reason if the peer left one.

    If the peer is still there, the next step may go on; if it is lost, its handler has ended.
    """


HERE = Path(__file__).parent
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
    frames = {id(one): list(_frames(one)) for one in chain}
    if not any(_is_users(frame) for each in frames.values() for frame in each) and not _is_called(error, chain[-1]):
        return
    folded = 0
    for one in chain:
        shown = [frame for frame in frames[id(one)] if _is_users(frame)]
        if frames[id(one)] and (shown or one is not error) and not _is_users(frames[id(one)][-1]):
            shown.append(frames[id(one)][-1])
        folded += len(frames[id(one)]) - len(shown)
        one.__traceback__ = None
        for frame in reversed(shown):
            one.__traceback__ = TracebackType(one.__traceback__, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    notes = getattr(error, "__notes__", [])
    before = sum(int(note.split()[0]) for note in notes if note.endswith(FOLDED))  # of a call inside this one
    error.__notes__ = [note for note in notes if not note.endswith(FOLDED)] + [f"{before + folded} {FOLDED}"]


def _is_called(error: Exception, cause: BaseException) -> bool:
    """Return whether an error comes from what a stage has called, such as a module of torch's without a frame here."""
    files = [frame.tb_frame.f_code.co_filename for frame in _frames(cause)]
    return (
        isinstance(error, StageError) and cause is not error and bool(files) and not files[-1].startswith(own_folders())
    )


def _frames(error: BaseException) -> Iterator[TracebackType]:
    at = error.__traceback__
    while at is not None:
        yield at
        at = at.tb_next


def _is_users(frame: TracebackType) -> bool:
    return not is_library(frame.tb_frame.f_code.co_filename)


# Wrong arguments


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that raises TypeError, with the argument's name, for an argument not of its annotation.

    Where the function itself refuses the argument by its name, its own error is raised. Annotations are looked up at
    the first call. Those that can't be, such as names for type checkers alone, and those of which nothing is known,
    such as type variables, admit everything. Sequences and mappings are checked with their first elements.
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        return {name: _evaluated(each.annotation, function) for name, each in signature.parameters.items()}

    def wrong(*args: Any, **kwargs: Any) -> tuple[str, str] | None:
        """Return the name of the first argument that does not fit, and a text about it."""
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            hint, parameter = hints()[name], signature.parameters[name]
            if hint is Any or parameter.kind is parameter.VAR_KEYWORD or value is parameter.default:
                continue
            for each in value if parameter.kind is parameter.VAR_POSITIONAL else (value,):
                if not _fits(each, hint):
                    where = function.__qualname__.removesuffix(".__init__")
                    return name, f"{where}: {name} must be {_named(hint, parameter.annotation)}, not {_short(each)}"
        return None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            problem = wrong(*args, **kwargs)
        except TypeError:  # of the number of arguments, which Python says
            problem = None
        if problem is None:
            return function(*args, **kwargs)
        name, text = problem
        try:
            function(*args, **kwargs)
        except (ScheduleError, StageError, TransportError):
            raise
        except (TypeError, ValueError) as error:
            if re.search(rf"\b{name.removesuffix('s')}", str(error), re.IGNORECASE) and _is_own(error):
                raise
        except Exception as error:
            raise TypeError(text) from error
        raise TypeError(text)

    return call


def _is_own(error: BaseException) -> bool:
    """Return whether fpipe has raised an error, and not Python or torch."""
    *_, last = _frames(error)
    return last.tb_frame.f_code.co_filename.startswith(own_folders())


def checked_class(kind: type[T]) -> type[T]:
    """Check the arguments of a dataclass."""
    setattr(kind, "__init__", checked(vars(kind)["__init__"]))  # noqa: B010  # mypy refuses an assignment to a method
    return kind


def _evaluated(annotation: Any, function: Callable[..., Any]) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        return eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
    except Exception:  # of a name that type checkers alone see
        return Any


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value may be of a type; True where nothing is known of the type."""
    origin: Any
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if hint is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
    if hint in (int, float):
        return _is_number(value, hint)
    if origin is type:
        kinds = tuple(each for each in arguments if isinstance(each, type))
        return isinstance(value, type) and (not kinds or issubclass(value, kinds))
    kind: Any = origin or hint
    if not isinstance(kind, type) or kind is object:
        return True
    if getattr(kind, "_is_protocol", False):
        methods = [name for name, each in vars(kind).items() if inspect.isfunction(each) and name[0] != "_"]
        return not methods or any(hasattr(value, name) for name in methods)  # it may have no more than it needs
    if kind.__name__ == "Callable":
        return callable(value)
    if not isinstance(value, kind) and not (kind in _SERIES and getattr(value, "ndim", 0) == 1):
        return False
    if kind in _SERIES and (isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0):
        return False
    if isinstance(value, collections.abc.Mapping) and len(arguments) == 2:
        some = itertools.islice(value.items(), _SHOWN)
        return all(_fits(key, arguments[0]) and _fits(each, arguments[1]) for key, each in some)
    if kind in _SERIES and arguments and isinstance(value, collections.abc.Collection | _Array):
        return all(_fits(each, arguments[0]) for each in itertools.islice(value, _SHOWN))
    return True


def _is_number(value: Any, kind: type) -> bool:
    """Return whether a value is a number: an int, or of a library, such as a tensor without dimensions."""
    if kind is float and isinstance(value, numbers.Real):
        return True
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__index__" if kind is int else "__float__"):
        return False
    try:
        operator.index(value) if kind is int else float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


@typing.runtime_checkable
class _Array(typing.Protocol):
    """An array or a tensor."""

    ndim: int

    def __iter__(self) -> Iterator[Any]: ...


_SERIES = {collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable}
_SHOWN = 8  # elements of a sequence or a mapping that are checked


def _named(hint: Any, annotation: Any) -> str:
    """Return the name of a type, for messages."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.replace("Any", "tree")


def _short(value: object) -> str:
    text = reprlib.repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
