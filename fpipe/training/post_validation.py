"""Updates before the norm of the gradients is known, which are made again, or taken back, where it turns out otherwise.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4. There an update is taken back by
arithmetic; here the old params and optimizer state are kept, so that the bits are those of an update after the norm.

Invariants:
- nothing that depends on a norm can be read before it is known: results wait when they are read;
- all ranks decide alike, by the same numbers: whether an update stands, and whether the next one is made early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe.handlers.protocol import Handler
from fpipe.plan import Plan
from fpipe.stages.pytree import NAMESPACE, flatten
from fpipe.training.finite import CheckFinite
from fpipe.training.norms import multiplied
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
    """The update of one step, and whether it stands.

    Args:
        update: `update(gradients, old) -> trees`; is called twice where the first update does not stand.
        old: the trees before it.
        wait: waits for the verdict, and returns it.
        is_early: update before the verdict is known, as if the gradients were to be taken as they are.
        donates: the update reuses the memory of the old params and optimizer state, of which a copy is kept until then.

    Attributes:
        trees: as they are now; until the verdict is known, those of an update that may not stand.
        stands: once the verdict is known, whether it is that of `is_early`.
        norm, finite: of the gradients; they wait when they are read.
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
        self.is_early, self.stands = is_early, False
        copies = _copied(old[:2]) if is_early and donates else None
        self.trees = update(gradients, old) if is_early else old

        def settle() -> Verdict:
            verdict = wait()
            self.stands = verdict.is_plain
            if copies is not None and not self.stands:
                _copy(copies, old[:2])
            if not verdict.counts:
                self.trees = old
            elif not (is_early and self.stands):
                scaled = gradients if verdict.factor is None else multiplied(gradients, verdict.factor)
                self.trees = update(scaled, old)
            return verdict

        self._settle: Callable[[], Verdict] | None = settle
        self.norm = LateNumber.read_by(lambda: self._known(self.norm), torch.float64)
        self.finite = LateNumber.read_by(lambda: self._known(self.finite), torch.bool)

    def settle(self) -> None:
        """Wait for the verdict, and update again if the update does not stand.

        Raises:
            TransportError: a rank did not end the step, or clips to another norm.
        """
        if self._settle is not None:
            norm, _, counts = self._settle()
            self._settle = None  # and with it what was kept
            finite = torch.tensor(counts)
            self.norm.read, self.finite.read = lambda: norm, lambda: finite  # which keep nothing else

    def _known(self, number: LateNumber) -> Tensor:
        self.settle()
        return number.read()

    def renewed(self, params: Mapping[int, Any], state: Any) -> Mapping[str, Any] | None:
        """Return the params and the states of the next step, as of `Inputs`, if all ranks are to begin that again.

        Args:
            params, state: with which this rank has begun it.
        """
        self.settle()
        if self.stands or not self.is_early:
            return None
        return {"params": final(params), "state": [final(state) or {}]}


class Late(Mapping[int, Any]):
    """`{stage: tree}` after a step whose verdict may not be known yet; reading a tree waits for it.

    fpipe's functions take it as the dict that it stands for; `dict(late)` is that one.

    Args:
        at: 0 for the params, 1 for the optimizer's state, 2 for that of the stages.
    """

    def __init__(self, validation: Validation, at: int) -> None:
        self.validation, self.at = validation, at

    @property
    def now(self) -> Mapping[int, Any]:
        """The trees as they are now, see `Validation`."""
        trees: Mapping[int, Any] = self.validation.trees[self.at]
        return trees

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


def now(tree: Any, of: Validation | None) -> Any:
    """Return a tree as it is now if it is late and of this validation; else one of which nothing is late."""
    return tree.now if isinstance(tree, Late) and tree.validation is of else final(tree)


def kept(option: Any) -> Any:
    """Return an option as it is now, for an update later on."""
    return option.detach().clone() if isinstance(option, Tensor) else option


class LateNumber(Tensor):
    """A number without dimensions that may not be known yet; every use of it waits.

    Args:
        read: waits for it.
    """

    read: Callable[[], Tensor]

    @classmethod
    def read_by(cls, read: Callable[[], Tensor], dtype: torch.dtype) -> LateNumber:
        number = torch.zeros((), dtype=dtype).as_subclass(cls)
        number.read = read
        return number

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments: Any = (args, kwargs or {})
        args, kwargs = optree.tree_map(_read, arguments)
        return func(*args, **kwargs)


def _read(x: Any) -> Any:
    return x.read() if isinstance(x, LateNumber) else x


def _copied(trees: Any) -> list[Any]:
    """Return copies of all leaves."""
    return list(map(kept, flatten(trees).leaves))


def _copy(leaves: list[Any], trees: Any) -> None:
    """Write leaves into the memory of the trees that they are copies of."""
    for copy, x in zip(leaves, flatten(trees).leaves, strict=True):
        if isinstance(x, Tensor):
            x.detach().copy_(copy)


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
