"""Refuse arguments of a wrong type by name. No torch."""

import collections.abc
import functools
import inspect
import itertools
import numbers
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def checked(*own: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the function raises TypeError, with the argument's name, for one not of its annotation.

    Annotations are looked up at the first call. Those that can't be, such as names for type checkers alone, and those
    of which nothing is known, such as type variables, admit everything. Sequences and mappings are checked with their
    first elements.

    Args:
        own: names of arguments that the function alone checks: its own message says more, or all ranks must get it.
    """

    def decorator(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.cache
        def hints() -> dict[str, Any]:
            parameters = signature.parameters.items()
            return {name: _evaluated(each.annotation, function) for name, each in parameters if name not in own}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError:  # of the number of arguments, which Python says
                return function(*args, **kwargs)
            for name, value in arguments.items():
                hint, parameter = hints().get(name, Any), signature.parameters[name]
                if hint is Any or parameter.kind is parameter.VAR_KEYWORD or value is parameter.default:
                    continue
                for each in value if parameter.kind is parameter.VAR_POSITIONAL else (value,):
                    if not _fits(each, hint):
                        where = function.__qualname__.removesuffix(".__init__")
                        wanted = _named(hint, parameter.annotation)
                        raise TypeError(f"{where}: {name} must be {wanted}, not {_short(each)}")
            return function(*args, **kwargs)

        return call

    return decorator


def checked_class(*own: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that checks the arguments of a dataclass, as `checked` does."""

    def decorator(kind: type[T]) -> type[T]:
        setattr(kind, "__init__", checked(*own)(vars(kind)["__init__"]))  # noqa: B010  # mypy refuses an assignment
        return kind

    return decorator


def is_whole(value: object, least: int) -> typing.TypeGuard[int]:
    """Return whether a value is an int of at least `least`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_optimizer(optimizer: object) -> None:
    """Raise TypeError for what is no pair of functions."""
    if not (isinstance(optimizer, collections.abc.Sequence) and len(optimizer) == 2 and all(map(callable, optimizer))):
        raise TypeError(f"optimizer must be a pair (init, update), as interop.optimizer returns it, not {optimizer!r}")


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
    if isinstance(value, dict) and len(arguments) == 2:  # other mappings may read files
        some = itertools.islice(value.items(), _SHOWN)
        return all(_fits(key, arguments[0]) and _fits(each, arguments[1]) for key, each in some)
    if kind in _SERIES and arguments and isinstance(value, list | tuple | range | set | frozenset | _Array):
        return all(_fits(each, arguments[0]) for each in itertools.islice(value, _SHOWN))
    return True


def _is_number(value: Any, kind: type) -> bool:
    """Return whether a value is a number: an int, or of a library, such as a tensor without dimensions."""
    if isinstance(value, bool | str | bytes) or str(getattr(value, "dtype", "")) in _BOOLS:
        return False
    if kind is float and isinstance(value, numbers.Real):
        return True
    if not hasattr(value, "__index__" if kind is int else "__float__"):
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
_BOOLS = ("bool", "torch.bool")  # dtypes of arrays and tensors
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
