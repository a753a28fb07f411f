"""Operators whose forward mode is wrong in torch, without an error: replaced, or refused.

torch's forward mode of layer_norm, batch_norm and instance_norm takes the mean and the variance that the kernel saved,
through which autograd has no derivative: the gradient of a tangent is then wrong, without an error. Of group_norm, fake
tensors can't be traced. Under `jvp` these functions are therefore computed from their definitions.

An operator of `torch.library` has no forward mode, and torch takes the tangent of its result for zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode


def layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    x = _wide(input)
    axes = list(range(-len(normalized_shape), 0))
    return _affine(_normalized(x, *_moments(x, axes), eps).to(input.dtype), weight, bias)


def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    x = _wide(input)
    squares = x.square().mean(list(range(-len(normalized_shape), 0)), keepdim=True)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine((x * torch.rsqrt(squares + eps)).to(input.dtype), weight, None)


def batch_norm(
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    x, shape = _wide(input), [1, -1, *[1] * (input.ndim - 2)]
    if training or running_mean is None or running_var is None:
        axes = [0, *range(2, x.ndim)]
        mean, variance = _moments(x, axes)
        _update(running_mean, running_var, mean, variance, x.numel() // x.shape[1], momentum)
    else:
        mean, variance = running_mean.view(shape), running_var.view(shape)
    weight, bias = (None if p is None else p.view(shape) for p in (weight, bias))
    return _affine(_normalized(x, mean, variance, eps).to(input.dtype), weight, bias)


def instance_norm(
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x, shape = _wide(input), [1, -1, *[1] * (input.ndim - 2)]
    mean, variance = _moments(x, list(range(2, x.ndim)))
    _update(running_mean, running_var, mean, variance, x[0, 0].numel(), momentum)
    weight, bias = (None if p is None else p.view(shape) for p in (weight, bias))
    return _affine(_normalized(x, mean, variance, eps).to(input.dtype), weight, bias)


def group_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    shape = [1, -1, *[1] * (input.ndim - 2)]
    x = _wide(input).reshape(input.shape[0], num_groups, -1)
    result = _normalized(x, *_moments(x, [2]), eps).reshape(input.shape).to(input.dtype)
    return _affine(result, *(None if p is None else p.view(shape) for p in (weight, bias)))


def _wide(x: Tensor) -> Tensor:
    """Return the tensor in the dtype in which kernels add it."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _moments(x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    mean = x.mean(axes, keepdim=True)
    return mean, (x - mean).square().mean(axes, keepdim=True)


def _normalized(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    return (x - mean) * torch.rsqrt(variance + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _update(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, variance: Tensor, count: int, momentum: float
) -> None:
    """Update running statistics in place, as the kernels do: the variance is that of a sample of `count` numbers."""
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, variance * (count / max(count - 1, 1)))):
            if running is not None:
                channels = new.mean(0).reshape(running.shape) if new.shape[0] > 1 else new.reshape(running.shape)
                running.mul_(1 - momentum).add_(channels.to(running.dtype), alpha=momentum)


def _as_kernel(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function with its arguments in the order of the operator, not of torch.nn.functional."""

    def reordered(
        input: Tensor,  # noqa: A002
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        return function(input, running_mean, running_var, weight, bias, *rest, **options)

    return reordered


ATEN = torch.ops.aten
DEFINITIONS: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm, ATEN.layer_norm, ATEN.layer_norm.default), layer_norm),
    **dict.fromkeys((F.rms_norm, torch.rms_norm, ATEN.rms_norm, ATEN.rms_norm.default), rms_norm),
    **dict.fromkeys((F.group_norm, torch.group_norm, ATEN.group_norm, ATEN.group_norm.default), group_norm),
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    **dict.fromkeys((torch.batch_norm, ATEN.batch_norm, ATEN.batch_norm.default), _as_kernel(batch_norm)),
    **dict.fromkeys((torch.instance_norm, ATEN.instance_norm, ATEN.instance_norm.default), _as_kernel(instance_norm)),
}
KERNELS = (
    "native_layer_norm",
    "native_batch_norm",
    "_native_batch_norm",
    "_batch_norm_with_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_fused_rms_norm",
)
"""How the names of their kernels begin, which a stage may call by themselves."""


class ForwardRules(TorchFunctionMode):
    """Within it, normalizations are computed from their definitions.

    Raises:
        NotImplementedError: a kernel of one of them is called by itself, or an operator that has no forward mode.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        definition = DEFINITIONS.get(func)
        if definition is not None:
            return definition(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").startswith(KERNELS):
            raise NotImplementedError(
                f"torch's forward mode of {func} can't be differentiated: call the function of torch.nn.functional in "
                "place of its kernel"
            )
        if isinstance(func, OpOverload) and func.namespace not in OF_TORCH and not _is_composite(func):
            trees: Any = (args, kwargs)
            if any(isinstance(x, Tensor) and x.is_floating_point() for x in optree.tree_leaves(trees)):
                raise NotImplementedError(
                    f"the operator {func} has no forward mode, and torch would take its tangent for zero: write it as "
                    "a torch.autograd.Function with setup_context and jvp"
                )
        return func(*args, **(kwargs or {}))


OF_TORCH = ("aten", "prim", "prims")
"""Namespaces of operators for which torch has a forward mode, or an error."""


def _is_composite(operator: OpOverload) -> bool:
    """Whether an operator calls others, which have rules of their own."""
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
