"""Results of a step that may not be final yet: whoever reads them waits.

They stand for params and states, `{stage: tree}`, for a loss scale, and for numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Protocol

import optree
from torch import Tensor

from fpipe.stages.pytree import NAMESPACE
from fpipe.training.loss_scale import LossScale, flatten_scale, unflatten_scale


class Pending(Protocol):
    """A step whose results are not final yet."""

    def settle(self) -> None:
        """Wait until its results are final."""


class Late(Mapping[int, Any]):
    """`{stage: tree}` after a step; reading a tree waits until it is final.

    fpipe's functions take it as the dict that it stands for; `dict(late)` is that one.

    Args:
        now: the trees as they are now.
    """

    def __init__(self, validation: Pending, now: Any) -> None:
        self.validation, self.now = validation, now

    def __getitem__(self, stage: int) -> Any:
        self.validation.settle()
        return self.now[stage]

    def __iter__(self) -> Iterator[int]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class LateScale(LossScale):
    """The loss scale of the next step; reading it waits until it is final.

    Args:
        now: as it is now.
    """

    validation: Pending
    now: LossScale

    def __init__(self, validation: Pending, now: LossScale) -> None:
        self.validation, self.now = validation, now

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what dataclasses.replace makes of it is a plain one
        return LossScale

    def __reduce__(self) -> Any:
        return LossScale, tuple(getattr(self, field.name) for field in fields(LossScale))


def _final_field(name: str) -> property:
    return property(lambda late: getattr(final(late), name))


for field in fields(LossScale):
    setattr(LateScale, field.name, _final_field(field.name))


def final(tree: Any) -> Any:
    """Return a tree, or a loss scale, of which nothing is late."""
    if isinstance(tree, Late):
        return dict(tree)
    if isinstance(tree, LateScale):
        tree.validation.settle()
        return tree.now
    return tree


def known(late: Any) -> Any:
    """Return what something late stands for, after it is known to be final."""
    return late.value if isinstance(late, LateNumber) else late.now if isinstance(late, Late | LateScale) else late


def now(tree: Any, of: object) -> Any:
    """Return a tree, or a loss scale, as it is now if it is late and of this validation; else the final one."""
    return tree.now if isinstance(tree, Late | LateScale) and tree.validation is of else final(tree)


class LateNumber:
    """A number without dimensions that may not be known yet: a stand-in for a tensor; every use of it waits.

    It is no tensor, so that torch can't take anything else for the number.

    Attributes:
        value: once it is known.
    """

    def __init__(self, validation: Pending) -> None:
        self._validation = validation
        self.value: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The number; waits for it."""
        self._validation.settle()
        assert self.value is not None
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # a protocol that it does not have
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments: Any = (args, kwargs or {})
        args, kwargs = optree.tree_map(lambda x: x.tensor if isinstance(x, LateNumber) else x, arguments)
        return func(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.tensor.numpy()
        return array.astype(dtype or array.dtype, copy=copy is not False)

    def __copy__(self) -> Tensor:
        return copy.copy(self.tensor)


def _reading(name: str) -> Callable[..., Any]:
    """Return a method that is one of the tensor's."""

    def method(number: LateNumber, *args: Any, **options: Any) -> Any:
        return getattr(number.tensor, name)(*args, **options)

    method.__name__ = name
    return method


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
UNARY = ("neg", "pos", "abs", "invert", "bool", "int", "float", "complex", "repr", "dlpack_device")
OTHERS = ("lt", "le", "eq", "ne", "gt", "ge", "format", "deepcopy", "reduce_ex", "dlpack")
for name in (*BINARY, *(f"r{each}" for each in BINARY), *UNARY, *OTHERS):
    setattr(LateNumber, f"__{name}__", _reading(f"__{name}__"))


def _flatten(late: Late) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[int, ...]]:
    stages = tuple(sorted(late))
    return tuple(late[stage] for stage in stages), stages, stages


def _unflatten(stages: tuple[int, ...], trees: Any) -> dict[int, Any]:
    return dict(zip(stages, trees, strict=True))


optree.register_pytree_node(
    Late,
    _flatten,  # type: ignore[arg-type]
    _unflatten,  # type: ignore[arg-type]
    path_entry_type=optree.MappingEntry,
    namespace=NAMESPACE,
)
optree.register_pytree_node(
    LateScale,  # type: ignore[arg-type]
    flatten_scale,  # type: ignore[arg-type]
    unflatten_scale,  # type: ignore[arg-type]
    path_entry_type=optree.GetAttrEntry,
    namespace=NAMESPACE,
)
