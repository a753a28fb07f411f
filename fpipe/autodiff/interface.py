"""The interface of eager and traced autodiff.

Leaves are lists in flattening order, with None for a missing gradient. Trees are built only for the stage's own
function. Results are detached; `requires_grad` of a result is whether it requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from fpipe.autodiff.graph.block import Sink
from fpipe.devices.memory import copy, in_memory
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.precision import OWN_DTYPES, Precision
from fpipe.stages.pytree import HOW_TO_REGISTER, PLAIN, Flat, Path, as_path, flatten, indices, paths_of, short
from fpipe.stages.sharding import Placed, is_dtensor
from fpipe.stages.stage import Batch, Output, Stage, Target

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Leaves = list[Any]
"""Tensors in flattening order; None for a missing one."""
Argument = Literal["params", "batch", "target"]
"""An argument of a step that can be differentiated."""
PARAMS: frozenset[Argument] = frozenset({"params"})
DATA = -1
"""In place of a source stage's number: the inputs that come from the microbatch."""


class WeightGradients(list[Any]):
    """Gradients. `fresh` has the numbers of those that share memory with no other value."""

    def __init__(self, leaves: Leaves, fresh: Collection[int] = ()) -> None:
        super().__init__(leaves)
        self.fresh = fresh


class DifferentiableStage(Protocol):
    """A stage's forward and backward functions."""

    @property
    def stage(self) -> Stage: ...

    def prepare(self, params: Any) -> Prepared:
        """Return the parameters for one step. Values that depend on them alone are computed at most once."""

    def forward(
        self, prepared: Prepared, state: Any, sources: Mapping[int, Flat], data: Microbatch, keep: bool
    ) -> tuple[Flat, Any, Any]:
        """Return `(outputs, residuals, new state)`. Residuals are None unless `keep`."""

    def backward(
        self, residuals: Any, cotangents: Leaves, sink: Sink | None = None
    ) -> tuple[WeightGradients, dict[int, Leaves]]:
        """Return `(weight gradients, input gradients by source stage)`. Here and below, residuals are consumed.

        A weight gradient that the sink has taken is None. Where the stage differentiates what it reads of the
        microbatch, the gradients of these leaves are under `DATA`.
        """

    def backward_input(self, residuals: Any, cotangents: Leaves) -> tuple[dict[int, Leaves], Any]:
        """Return `(input gradients by source stage, deferred)`."""

    def backward_weight(self, deferred: Any, sink: Sink | None = None) -> WeightGradients:
        """Return the weight gradients that `backward_input` deferred."""


@dataclass(frozen=True)
class DifferentiablePipeline:
    """A pipeline with the functions of its stages. A handler runs it.

    Args:
        loss: the last stage returns (loss, aux), rather than the outputs of `evaluate`.
        gather: return the outputs, or the aux, on every rank.
        merge: merges the outputs, or the aux, of all microbatches; if the batch came as `Microbatches`, returns such.
        precision: the dtypes of params and of sums of gradients.
        shares: whether the factor of each loss is its share of the "rows" or of the caller's "weight"; None for the
            sum of the losses.
        weight: describes the caller's function of the weight.
        argnums: the arguments of the step that are differentiated.
        differentiated: the step returns gradients. Forwards then run in grad mode, also those without a backward.
        cached: each microbatch has states of its own, `{stage: [tree]}`, in whose memory a forward may write the new
            ones.
    """

    pipeline: Pipeline
    stages: tuple[DifferentiableStage, ...]
    loss: bool = True
    gather: bool = False
    merge: Callable[[Mapping[int, Any], bool | None], Any] = lambda outputs, apart: dict(outputs)
    precision: Precision = OWN_DTYPES
    shares: Literal["rows", "weight"] | None = "rows"
    weight: str = ""
    argnums: frozenset[Argument] = PARAMS
    differentiated: bool = False
    cached: bool = False


@dataclass(frozen=True)
class Prepared:
    """A stage's params for one step.

    Args:
        leaves: in flattening order, detached; DTensors as they are, until a handler takes their pieces.
        trained: numbers of the leaves that get gradients, in the order of the weight gradients.
        paths: paths of the trained leaves.
        computed: a cache of values that depend on the params alone.
        placed: by number, the placements of the leaves that are pieces, of which the stage reads the whole.
        meshes: of the processes that compute the rank's stages together; first that of this stage, if it has one.
    """

    leaves: Leaves
    spec: optree.PyTreeSpec
    trained: tuple[int, ...]
    paths: tuple[Path, ...]
    computed: dict[Any, Any] = field(default_factory=dict)
    placed: dict[int, Placed] = field(default_factory=dict)
    meshes: list[DeviceMesh] = field(default_factory=list)

    @cached_property
    def own(self) -> Leaves:
        """New leaves for autograd; the trained ones require a gradient."""
        own = [x.detach() if isinstance(x, Tensor) else x for x in self.leaves]
        for i in self.trained:
            own[i].requires_grad_()
        return own

    @property
    def tree(self) -> Any:
        return self.spec.unflatten(self.own)

    def replace(self, leaves: Leaves) -> None:
        """Take other leaves of the same kinds, and forget what was computed of those before."""
        self.leaves[:] = leaves
        self.computed.clear()
        self.__dict__.pop("own", None)

    def renew(self) -> None:
        """Compute the cached values again, in their memory, because those of the leaves have changed."""
        with torch.no_grad(), torch._C._DisableAutocast():
            for function, values in self.computed.items():
                if isinstance(function, FunctionType):
                    pairs = zip(function(self.leaves), values, strict=True)
                    moved = [(x, old) for x, old in pairs if isinstance(x, Tensor) and x.data_ptr() != old.data_ptr()]
                    copy([x for x, _ in moved], [in_memory(old) for _, old in moved])  # the others are views of leaves


UNTRACED = (
    "its params have DTensors over a dimension of tensor parallelism, which are computed with in traced stages alone: "
    "leave autodiff='eager' out, and transforms.per_sample"
)


def prepared(stage: Stage, params: Any, argnums: Collection[Argument] = PARAMS) -> Prepared:
    """Flatten a stage's params for one step. None is trained unless params are differentiated.

    Raises:
        TypeError: a leaf is neither a tensor nor plain.
    """
    leaves, spec = flatten(params)
    names = paths_of(spec)
    frozen = {i for entry in stage.frozen for i in indices(params, as_path(entry))}
    trained = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if i not in frozen and "params" in argnums and is_differentiable(leaf):
                trained.append(i)
        elif type(leaf) not in PLAIN:
            raise TypeError(f"{short(names[i]) or 'the tree'} is a {type(leaf).__qualname__}: {HOW_TO_REGISTER}")
    own = [x.detach() if isinstance(x, Tensor) and _is_attached(x) else x for x in leaves]
    return Prepared(own, spec, tuple(trained), tuple(names[i] for i in trained))


def is_differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


READS: Mapping[type, Argument] = {Batch: "batch", Target: "target"}


def differentiates_data(stage: Stage, argnums: Collection[Argument]) -> bool:
    """Return whether a stage reads a part of the microbatch that is differentiated."""
    return any(READS.get(type(read)) in argnums for read in stage.inputs)


def differentiated(stage: Stage, data: Microbatch, argnums: Collection[Argument]) -> list[Any]:
    """Return a stage's inputs that come from the microbatch, as new leaves for autograd where they are differentiated.

    A leaf that the stage reads twice is two leaves, each with a gradient of its own.
    """
    names = [READS[type(read)] for read in stage.inputs if not isinstance(read, Output)]
    trees = zip(names, stage.given(data), strict=True)
    return [_own_leaves(tree) if name in argnums else tree for name, tree in trees]


def _own_leaves(tree: Any) -> Any:
    leaves, spec = flatten(tree)
    return spec.unflatten([x.detach().requires_grad_() if is_differentiable(x) else x for x in leaves])


def _is_attached(x: Tensor) -> bool:
    """Return whether a param is to be detached here. The handler detaches a DTensor's piece, which takes less time."""
    return (x.requires_grad or type(x) is not Tensor) and not is_dtensor(x)


def detached(x: Any, keep: bool = False) -> Any:
    """Return a tensor detached. With `keep`, it requires a gradient if it did before."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(keep and x.requires_grad)


def detached_tree(tree: Any) -> Any:
    leaves, spec = flatten(tree)
    return spec.unflatten([detached(x) for x in leaves])


class NonZero(NamedTuple):
    """The weight of a microbatch, known not to be zero, so that the step need not read it on the host."""

    weight: Tensor


Scale = float | NonZero | None
"""The weight of a microbatch in the loss; None for 1."""


def seed(loss: Tensor, scale: Scale) -> Tensor:
    """Return the loss's cotangent: the weight of its microbatch, in the loss's dtype."""
    if isinstance(scale, NonZero):
        return scale.weight.to(loss).detach()
    return torch.full((), 1.0 if scale is None else scale, dtype=loss.dtype, device=loss.device)


def scaled(cotangent: Tensor, loss_scale: Tensor | None) -> Tensor:
    """Return the loss's cotangent multiplied by the loss scale, in its own dtype."""
    if loss_scale is None:
        return cotangent
    return (cotangent * loss_scale.to(cotangent.device)).to(cotangent.dtype)


def has_weight(scale: Scale) -> bool:
    """Return whether a microbatch has a weight. A loss of weight 0 is ignored, even NaN, the mean of no elements."""
    return scale is None or isinstance(scale, NonZero) or scale != 0


def weighted_loss(loss: Tensor, cotangent: Tensor, scale: Scale) -> Tensor:
    """Return the microbatch's contribution to the loss of the batch."""
    return loss.detach() * cotangent if has_weight(scale) else torch.zeros_like(cotangent)


def zeros(inputs: Mapping[int, Leaves]) -> dict[int, Leaves]:
    """Return zeros in place of the input gradients of a microbatch of weight 0: 0 times NaN would be NaN."""
    return {s: [None if x is None else torch.zeros_like(x) for x in leaves] for s, leaves in inputs.items()}
