"""Random numbers of Python and NumPy that a function draws: a graph would have those of its trace for good.

They come from the two global generators, from NumPy's that are made without a seed, and from others that the function
reads. These are looked for where its code leads: in closures, in the globals that it names, in classes, and in
functions that these call. A generator in an attribute of a module is not among them: each call has it as it was.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy
from numpy.random import bit_generator
from torch import Tensor, nn

DRAWS = "draws from the random numbers of Python or NumPy"
LIBRARIES = sys.stdlib_module_names | {"fpipe", "numpy", "optree", "torch", "transformers"}
"""Packages whose functions read no generators but the global ones."""
LARGEST = 4000  # objects that are looked at, the nearest first

Access = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that get and set the state of a generator."""


@contextmanager
def noting_host_draws(function: Callable[..., Any]) -> Iterator[Callable[[], bool]]:
    """Return a function that returns whether a function has drawn random numbers of Python or NumPy meanwhile.

    The generators have their states back afterwards. One that is made with a seed draws the same in each call, and does
    not count.
    """
    generators: list[Access] = [
        (random.getstate, random.setstate),
        (functools.partial(numpy.random.get_state, legacy=False), numpy.random.set_state),
        *map(_access, _generators(function)),
    ]
    before = [pickle.dumps(get()) for get, _ in generators]
    thread, unseeded, randbits = threading.get_ident(), list[int](), vars(bit_generator)["randbits"]

    def drawn() -> bool:
        return bool(unseeded) or [pickle.dumps(get()) for get, _ in generators] != before

    def noting(bits: int) -> Any:
        if threading.get_ident() == thread:
            unseeded.append(bits)
        return randbits(bits)

    with patch.object(bit_generator, "randbits", noting):  # with which NumPy seeds what gets no seed
        try:
            yield drawn
        finally:
            for (get, set_state), state in zip(generators, before, strict=True):
                if pickle.dumps(get()) != state:
                    set_state(pickle.loads(state))


def _access(generator: Any) -> Access:
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, numpy.random.RandomState):
        return functools.partial(generator.get_state, legacy=False), generator.set_state
    bits = generator.bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def _generators(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield the generators that a function may read."""
    queue, seen = deque[Any]([function]), dict[int, Any]()  # keeps what it has seen, for the numbers to be of no others
    while queue and len(seen) < LARGEST:
        x = queue.popleft()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, numpy.random.Generator | numpy.random.RandomState):
            yield x
        elif isinstance(x, random.Random):
            if not isinstance(x, random.SystemRandom):
                yield x
        else:
            queue.extend(_read_by(x))


def _read_by(x: Any) -> Iterable[Any]:
    """Return the objects that an object may read when it is called, and that may lead to generators."""
    if isinstance(x, Tensor | str | bytes | int | float | ModuleType | None):
        return ()
    if isinstance(x, FunctionType):
        return () if _is_library(x) else _read_by_function(x)
    if isinstance(x, MethodType):
        return x.__func__, x.__self__
    if isinstance(x, BuiltinMethodType):
        return (x.__self__,)
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, nn.Module):
        return {type(part) for part in x.modules()}
    if isinstance(x, type):
        return () if _is_library(x) else [_function_of(value) for each in x.__mro__ for value in vars(each).values()]
    if isinstance(x, list | tuple | set | frozenset):
        return x
    if isinstance(x, dict):
        return x.values()
    attributes = getattr(x, "__dict__", {})
    return type(x), *attributes.values()


def _read_by_function(function: FunctionType) -> Iterator[Any]:
    names = set(_names(function.__code__))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet set
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield value
        elif not _is_of_library(value.__name__):
            yield from (vars(value)[name] for name in names & vars(value).keys())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _function_of(value: Any) -> Any:
    """Return the function of a method or property of a class; other attributes as they are."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _is_library(x: Any) -> bool:
    return _is_of_library(getattr(x, "__module__", None) or "")


def _is_of_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES
