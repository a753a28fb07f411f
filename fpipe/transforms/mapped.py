"""A pipeline whose stages are mapped over an axis of their tensors: a `Mapped` stands in place of each such tensor.

Transforms nest: the outer one owns the innermost `Mapped` of a nest, whose value is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import optree
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fpipe.stages.microbatch import axes_of
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import NAMESPACE, Path, get_at, put_at
from fpipe.stages.stage import Batch, Output, Read, Stage
from fpipe.transforms.marks import NO_CHECKPOINT, through
from fpipe.transforms.wrapping import with_functions

Randomness = Literal["error", "different", "same"]


class Mapped(NamedTuple):
    """A tensor whose axis 0 a function is mapped over."""

    value: Any


def is_mapped(x: Any) -> bool:
    return isinstance(x, Mapped) and isinstance(x.value, Tensor)


def unmapped(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a tree with `function(value)` for each `Mapped`."""
    return optree.tree_map(
        lambda x: function(x.value) if is_mapped(x) else x, tree, is_leaf=is_mapped, namespace=NAMESPACE
    )


class Sizes(TorchFunctionMode):
    """Within it, the operators by which exported graphs read sizes are methods of tensors, for which vmap has rules."""

    METHODS: ClassVar[Mapping[Any, Callable[..., Any]]] = {
        torch.ops.aten.sym_size.int: Tensor.size,
        torch.ops.aten.sym_stride.int: Tensor.stride,
        torch.ops.aten.sym_numel.default: Tensor.numel,
    }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.METHODS.get(func, func)(*args, **(kwargs or {}))


def vectorized(function: Callable[..., Any], randomness: Randomness) -> Callable[..., Any]:
    """Return the function mapped over each `Mapped` in its arguments, by `torch.func.vmap`.

    Every tensor that it returns is then a `Mapped`. Without one among its arguments it runs as it is.
    """

    def run(of_tensors: Callable[..., list[Any]], members: Sequence[Mapped]) -> list[Any]:
        leaves: list[Any] = []

        def of_one(*values: Tensor) -> list[Tensor]:
            nonlocal leaves
            leaves = of_tensors(*values)
            return [x for x in leaves if isinstance(x, Tensor)]

        with disable_saved_tensors_hooks(NO_CHECKPOINT), Sizes():
            values = torch.func.vmap(of_one, randomness=randomness)(*(each.value for each in members))
        stacked = map(Mapped, map(_dense, values))
        return [next(stacked) if isinstance(x, Tensor) else x for x in leaves]

    return through(function, is_mapped, run)


def _dense(x: Tensor) -> Tensor:
    """Return a value without axes of stride 0, as vmap gives one that depends on no member: a tangent can't lie so."""
    return x.contiguous() if 0 in x.stride() and x.is_floating_point() else x


@dataclass(frozen=True)
class Axes:
    """The axis that is mapped over, in the trees of a pipeline: a number, None, or a prefix tree of these.

    Args:
        keep: a stage gets the tensors of the batch with the axis, of size 1.
        out: of the last stage's outputs, as far as they have so many.
    """

    params: Any
    batch: Any
    target: Any
    keep: bool
    out: int

    def of_read(self, read: Read) -> Any:
        """Return the axes in a stage's input; None for the output of another stage, which has its `Mapped`."""
        if isinstance(read, Batch):
            return _at(self.batch, read.path)
        return None if isinstance(read, Output) else self.target

    def of_params(self, pipeline: Pipeline, stage: int) -> tuple[Any, dict[Path, Any]]:
        """Return the axes in a stage's own params, and in each entry that another stage shares with it, by path."""
        tied = {
            path: _at(self._of_stage(owner), source)
            for (owner, source), uses in pipeline.entries.items()
            for user, path in uses
            if user == stage != owner
        }
        return self._of_stage(stage), tied

    def _of_stage(self, stage: int) -> Any:
        if not isinstance(self.params, Mapping):
            return self.params
        if stage not in self.params:
            raise ValueError(f"in_dims of the params has no entry for stage {stage}, only for {sorted(self.params)}")
        return self.params[stage]

    def last(self, x: Tensor) -> int:
        """Return the axis in one of the last stage's outputs."""
        return min(self.out, x.ndim - 1)


def marked(tree: Any, axes: Any, what: str, keep: bool = False) -> Any:
    """Return a tree with a `Mapped` for each tensor that has an axis.

    Args:
        what: the name of the tree, for messages.

    Raises:
        ValueError: a tensor has no such axis, or the axes are no prefix of the tree.
    """
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    each = axes_of(tree, axes, f"in_dims of the {what}")
    return spec.unflatten([_marked(x, axis, what, keep) for x, axis in zip(leaves, each, strict=True)])


def _marked(x: Any, axis: int | None, what: str, keep: bool) -> Any:
    if axis is None or not isinstance(x, Tensor):
        return x
    if not -x.ndim <= axis < x.ndim:
        way_out = "stack the members' states on it" if what == "state" else "give its axis in in_dims"
        raise ValueError(f"a tensor of shape {list(x.shape)} in the {what} has no axis {axis}: {way_out}")
    axis %= x.ndim
    first = x.movedim(axis, 0)
    return Mapped(first.unsqueeze(axis + 1) if keep else first)


def _at(axes: Any, path: Path) -> Any:
    """Return the part of a prefix tree at a path."""
    for key in path:
        if axes is None or isinstance(axes, int):
            break
        axes = get_at(axes, [key])
    return axes


def vectorized_pipeline(
    pipeline: Pipeline,
    axes: Axes,
    randomness: Randomness,
    result: Callable[[Tensor, Any], Any],
    has_aux: bool,
) -> Pipeline:
    """Return a pipeline whose stages and loss are mapped over axes of params, batch and target.

    Args:
        result: `result(losses, aux)` returns the result of the loss; in aux, each tensor is a `Mapped`.
    """
    last = len(pipeline.stages) - 1
    loss_of = vectorized(pipeline.loss or (lambda output, target: output), randomness)

    def function_of(index: int, stage: Stage) -> Callable[..., Any]:
        function, params_axes = vectorized(stage.fn, randomness), axes.of_params(pipeline, index)
        dims = [axes.of_read(read) for read in stage.inputs]

        def over(params: Any, *inputs: Any) -> Any:
            state, inputs = inputs[: stage.stateful], inputs[stage.stateful :]
            read = [marked(x, axis, "batch", axes.keep) for x, axis in zip(inputs, dims, strict=True)]
            outputs = function(_params(params, *params_axes), *(marked(x, 0, "state") for x in state), *read)
            outputs, *new = outputs if state else (outputs,)
            if index == last:
                outputs = to_last(outputs)
            return (outputs, *(unmapped(x, lambda value: value) for x in new)) if state else outputs

        return over

    def to_last(outputs: Any) -> Any:
        leaves = optree.tree_leaves(outputs, is_leaf=is_mapped, namespace=NAMESPACE)
        if not any(map(is_mapped, leaves)):
            raise TypeError("nothing that reaches the last stage has an axis to map over: give it in in_dims")
        return unmapped(outputs, lambda x: x.movedim(0, axes.last(x)))

    def loss(output: Any, target: Any) -> Any:
        output = optree.tree_map(
            lambda x: Mapped(x.movedim(axes.last(x), 0)) if isinstance(x, Tensor) else x, output, namespace=NAMESPACE
        )
        losses = loss_of(output, marked(target, axes.target, "target", axes.keep))
        losses, aux = losses if has_aux else (losses, None)
        if not is_mapped(losses) or losses.value.ndim != 1:
            kind = f"a tensor of shape {list(losses.value.shape[1:])}" if is_mapped(losses) else type(losses).__name__
            raise TypeError(f"the loss must be a tensor without dimensions, not {kind}; has_aux=True takes (loss, aux)")
        return result(losses.value, aux)

    def key(index: int, stage: Stage) -> Hashable:
        return index == last, repr((axes.of_params(pipeline, index), [axes.of_read(read) for read in stage.inputs]))

    return with_functions(pipeline, function_of, loss, key)


def _params(params: Any, axes: Any, tied: Mapping[Path, Any]) -> Any:
    """Return a stage's params with a `Mapped` for each tensor that has an axis."""
    if tied and not isinstance(axes, Mapping):
        axes = optree.tree_map(lambda _: axes, params, none_is_leaf=True, namespace=NAMESPACE)
    for path, shared in tied.items():
        axes = put_at(axes, path, shared)
    return marked(params, axes, "params")
