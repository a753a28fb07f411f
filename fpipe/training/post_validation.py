"""Updates before the norm of the gradients is known, which are made again, or taken back, where it turns out otherwise.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4. There an update is taken back by
arithmetic; here the old params and optimizer state are kept, so that the bits are those of an update after the norm.

Invariants:
- nothing that depends on a norm can be read before it is known: results wait when they are read;
- all ranks decide alike, by the same numbers: whether an update stands, and whether the next one is made early;
- nothing is early with a handler that does not ask whether a step has begun with the right params (`Inputs.renew`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.handlers.protocol import Handler
from fpipe.plan import Plan
from fpipe.stages.pytree import NAMESPACE, flatten
from fpipe.training.finite import CheckFinite
from fpipe.training.norms import multiplied
from fpipe.training.skipping import frozen
from fpipe.training.updates import is_separable

Trees = tuple[Any, Any, Any]
"""Params, optimizer state and the stages' state, by stage."""


def check_post_validation(
    handler: Handler,
    plan: Plan,
    update: Callable[..., Any],
    max_norm: float | Tensor | None,
    check_finite: CheckFinite,
    capture: object,
) -> None:
    """Raise ValueError where updates can't be made before the norm is known, or nothing would be faster by it."""
    meets = "all ranks meet before a step's first value travels"
    reasons = {
        f"{max_norm=} and {check_finite=}: no rank waits for a norm then": max_norm is None and not check_finite,
        f"{check_finite=}: a step that is an error has to be one when it returns": check_finite in (True, "raise"),
        f"{capture=}: a graph has the norm and the update": bool(capture),
        f"replicas, with which {meets}": plan.replicas > 1 or handler.replicas(plan).mesh is not None,
        f"GPUs, where {meets}": any(device.type != "cpu" for device in handler.devices or ()),
        "an optimizer that may be one function of all stages: take interop.optimizer": not is_separable(update),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"post_validate=True does not go with {reason}")


class Verdict(NamedTuple):
    """What all ranks know of the gradients of a step.

    Args:
        factor: with which they are multiplied.
        counts: whether the step is not to be skipped.
    """

    norm: Tensor
    factor: Tensor | None
    counts: bool

    @property
    def is_plain(self) -> bool:
        """Whether the gradients are taken as they are."""
        return self.counts and (self.factor is None or bool(self.factor == 1))


class Validation:
    """The update of one step, and whether it stands. Several threads may ask at once.

    Args:
        update: `update(gradients, old) -> trees`; is called twice where the first update does not stand.
        old: the trees before it.
        wait: waits for the verdict, and returns it.
        is_early: update before the verdict is known, as if the gradients were to be taken as they are.
        donates: the update reuses the memory of the old params and optimizer state, of which a copy is kept until then.

    Attributes:
        late: params and states; until the verdict is known, those of an update that may not stand.
        was_plain: once the verdict is known, whether the gradients were taken as they are.
        norm, finite: of the gradients.

    Once the verdict is known, nothing of the step is kept here.
    """

    def __init__(
        self,
        update: Callable[[Mapping[int, Any], Trees], Trees],
        gradients: Mapping[int, Any],
        old: Trees,
        wait: Callable[[], Verdict],
        is_early: bool,
        donates: bool,
    ) -> None:
        copies = _copied(old, gradients) if is_early and donates else []
        self.was_plain = False
        self.late = tuple(Late(self, tree) for tree in (update(gradients, old) if is_early else old))
        self.norm, self.finite = LateNumber(self), LateNumber(self)

        def decide() -> Verdict:
            verdict = wait()
            if is_early and verdict.is_plain:
                return verdict
            self._give(old)  # and drop the first update's, before the second one
            _copy(copies, old)
            if verdict.counts:
                scaled = gradients if verdict.factor is None else multiplied(gradients, verdict.factor)
                self._give(update(scaled, old))
            return verdict

        self._decide: Callable[[], Verdict] | None = decide
        self._lock, self._modes = threading.RLock(), Modes.current()

    def settle(self) -> None:
        """Wait for the verdict, and update again if the update does not stand.

        Raises:
            TransportError: a rank did not end the step, or clips to another norm.
        """
        with self._lock:
            if self._decide is None:
                return
            with self._modes.again():
                verdict = self._decide()
                self.norm.value, self.finite.value = verdict.norm, torch.tensor(verdict.counts)
            self.was_plain = verdict.is_plain
            self._decide, self.late = None, ()  # and with them what was kept

    def _give(self, trees: Trees) -> None:
        for late, tree in zip(self.late, trees, strict=True):
            late.now = tree

    @property
    def is_settled(self) -> bool:
        return self._decide is None

    def is_known_plain(self) -> bool:
        """Settle; return whether the gradients were taken as they are, which is unknown where the step has failed."""
        try:
            self.settle()
        except TransportError:
            return False
        return self.was_plain

    def renewed(self, params: Mapping[int, Any], state: Any) -> Mapping[str, Any] | None:
        """Return the params and the states of the next step, as of `Inputs`, if all ranks are to begin that again.

        Args:
            params, state: with which this rank has begun it.
        """
        self.settle()
        return None if self.was_plain else {"params": final(params), "state": [final(state) or {}]}


class Modes(NamedTuple):
    """The modes of torch under which a step was called: a second update runs under them, whoever asks for it.

    Args:
        grad: whether gradients are recorded.
    """

    dtype: torch.dtype
    device: torch.device
    grad: bool

    @classmethod
    def current(cls) -> Modes:
        return cls(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())

    @contextmanager
    def again(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(self.grad), torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(before)


class Late(Mapping[int, Any]):
    """`{stage: tree}` after a step whose verdict may not be known yet; reading a tree waits for it.

    fpipe's functions take it as the dict that it stands for; `dict(late)` is that one.

    Args:
        now: the trees as they are now, see `Validation`.
    """

    def __init__(self, validation: Validation, now: Any) -> None:
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


def final(tree: Any) -> Any:
    """Return a tree of which nothing is late."""
    return dict(tree) if isinstance(tree, Late) else tree


def is_provisional(tree: Any, of: Validation | None) -> bool:
    """Whether a tree is late, of this validation, and not final yet."""
    return isinstance(tree, Late) and tree.validation is of and not tree.validation.is_settled


def now(tree: Any, of: Validation | None) -> Any:
    """Return a tree as it is now if it is late and of this validation; else one of which nothing is late."""
    return tree.now if isinstance(tree, Late) and tree.validation is of else final(tree)


def snapshot(option: Any) -> Any:
    """Return an option as it is now, for an update later on."""
    return option.detach().clone() if isinstance(option, Tensor) else option


class LateNumber:
    """A number without dimensions that may not be known yet: a stand-in for a tensor; every use of it waits.

    It is no tensor, so that torch can't take anything else for the number.

    Attributes:
        value: once it is known.
    """

    def __init__(self, validation: Validation) -> None:
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
for each in (*BINARY, *(f"r{name}" for name in BINARY), *UNARY, *OTHERS):
    setattr(LateNumber, f"__{each}__", _reading(f"__{each}__"))


def _copied(old: Trees, gradients: Mapping[int, Any]) -> list[Tensor | None]:
    """Return a copy of each leaf of params and optimizer state that an update may change."""
    unchanged = frozen(old[0], gradients)
    leaves = flatten(old[:2]).leaves
    return [x.detach().clone() if isinstance(x, Tensor) and id(x) not in unchanged else None for x in leaves]


def _copy(copies: list[Tensor | None], old: Trees) -> None:
    """Write the copies into the memory of what they are copies of; of nothing, where there are none."""
    for kept, x in zip(copies, flatten(old[:2]).leaves if copies else (), strict=True):
        if kept is not None:
            x.detach().copy_(kept)


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
