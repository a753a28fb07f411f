"""The optimizers of `torch.optim` as pairs of pure functions, init and update.

A learning-rate schedule is a function of the step: `update(grads, state, params, lr=f(i))`. The caller counts steps.
The option of a group may be a function of the call's, `{"lr": lambda lr: lr / 10}`; a number overrides it. To
accumulate gradients over steps, use `optree.tree_map(torch.add, total, grads)`, which keeps None; with
`reduction="sum"` the total equals the gradient of one large batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe.errors.arguments import checked
from fpipe.stages.pytree import NAMESPACE, Path, describe, paths_of, short
from fpipe.stages.sharding import is_dtensor, local, placed_alike, wrap

State = Any
Group = tuple[Callable[[Path, Tensor], bool], Mapping[str, Any]]
"""A predicate of (path, parameter), e.g. of `(stage, name)` in `{stage: {name: tensor}}`, and the group's options."""


ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
"""The optimizers that treat each number of a parameter alone: they run on the pieces of DTensors, which is faster."""

MASTER = "master"
"""The name, in the state of a parameter, of its value in a wider dtype."""

COUNTS = {"step", "eta", "mu", "mu_product"}
"""The names of their values of a whole parameter, which every process has."""


class Optimizer(NamedTuple):
    """A pair of pure functions.

    Args:
        init: `params -> state`.
        update: `(grads, state, params, **options) -> (params, state)`; options such as `lr` apply to this
            call only. A parameter without a gradient (None) is returned unchanged. An option that is a tensor is not
            read on the host if the optimizer's kernels take one: `lr` with `fused=True` or `capturable=True`.
    """

    init: Callable[[Any], State]
    update: Callable[..., tuple[Any, State]]

    def __repr__(self) -> str:
        return f"<Optimizer: {getattr(self.update, '__qualname__', self.update)}>"


@checked("master")
def optimizer(
    kind: type[torch.optim.Optimizer],
    *,
    donate: bool = False,
    groups: Sequence[Group] = (),
    master: torch.dtype | None = None,
    **options: Any,
) -> Optimizer:
    """Make a functional optimizer of a class of `torch.optim` and its options, including `fused` and `foreach`.

    The state is a pytree: for each parameter the dict of the optimizer's state, empty until the first update. Nothing
    is changed in place unless it is donated.

    A parameter may be a DTensor, as of `fsdp`; then its gradient is one that is placed alike, and so are the values of
    the state, except for counts. torch's optimizers that treat each number alone (Adam, AdamW, SGD and others, not
    Muon) update each process's piece without communication, to the bits of the same rows of an unsharded update. With
    `fused=True` on the CPU these bits may differ in the last place, because its kernels round the numbers behind the
    last whole vector of a tensor differently.

    Args:
        donate: reuse the memory of `params` and `state` for the results, like JAX's donated buffers: nothing is copied,
            and the arguments must not be used again. The change is visible in everything that shares the memory,
            such as the modules of `from_modules`.
        groups: `(predicate, options)`; a parameter takes the options of the first group whose
            `predicate(path, parameter)` is true. They override those of the call. An option that is a function
            computes the group's value from the call's: `{"lr": lambda lr: lr / 10}`.
        master: for parameters of narrower floating-point dtypes, such as bfloat16, keep the value in this one, float32:
            as "master" in the state, from the first update on. It is what is updated; the parameter returned is its
            cast. Their gradients may be in this dtype too.

    Raises:
        TypeError: `master` is no floating-point dtype; the optimizer needs a closure (LBFGS), or only sparse gradients
            (SparseAdam); or (in update) torch can't run it on DTensors (Adafactor).
        ValueError: (in update) grads or state differ in structure from params, a gradient differs in shape, dtype,
            device or placement from its parameter, or a value of the state in placement; or the state has masters, and
            `master` is None. Or `master` is narrower than float32.

    >>> init, update = optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> params = {0: {"w": torch.tensor([1.0, 2.0])}}
    >>> params, state = update({0: {"w": torch.tensor([1.0, 1.0])}}, init(params), params)
    >>> params[0]["w"], state[0]["w"]
    (tensor([0.5000, 1.5000]), {'momentum_buffer': tensor([1., 1.])})

    Without weight decay of vectors, such as biases:

    >>> decaying = optimizer(torch.optim.AdamW, lr=1e-3, groups=[(lambda path, p: p.ndim < 2, {"weight_decay": 0.0})])
    """
    if master is not None and not (isinstance(master, torch.dtype) and master.is_floating_point):
        raise TypeError(f"master must be a floating-point dtype or None, not {master!r}")
    if master is not None and master.itemsize < torch.float32.itemsize:
        raise ValueError(f"master must be torch.float32 or wider, not {master}: masters keep what narrower params lose")
    if issubclass(kind, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the loss itself, which a pure update can't")
    if issubclass(kind, torch.optim.SparseAdam):
        raise TypeError("SparseAdam takes sparse gradients alone, which not all are: take Adam, Adagrad or SGD")

    _check_options(kind, {name: value for name, value in options.items() if not isinstance(value, Tensor)})

    def init(params: Any) -> State:
        return optree.tree_map(lambda p: {}, params, namespace=NAMESPACE)

    def update(grads: Any, state: State, params: Any, **changes: Any) -> tuple[Any, State]:
        grads, state, params = _plain_tree(grads), _plain_tree(state), _plain_tree(params)
        leaves, spec = optree.tree_flatten(params, namespace=NAMESPACE)
        gradients = _matching(spec, grads, "grads")
        states = _matching(spec, state, "state")
        trained = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not trained:
            return params, state
        _check_gradients(gradients, leaves, paths_of(spec), master)
        members = _members({i: leaves[i] for i in trained}, paths_of(spec), groups)
        whole = {i: leaves[i] for i in trained if kind in ELEMENTWISE and is_dtensor(leaves[i])}
        for i, leaf in whole.items():
            leaves[i], gradients[i] = local(leaf), local(gradients[i])
            states[i] = _pieces(states[i], leaf, paths_of(spec)[i])
        cast = {i: leaves[i] for i in trained if _has_master(leaves[i], master)}
        for i in trained:
            value, states[i] = _without_master(states[i], paths_of(spec)[i], master)
            if i in cast:
                leaves[i], gradients[i] = leaves[i] if value is None else value, gradients[i].to(master)
        parameters = {i: _own(leaves[i], donate, master if i in cast else None) for i in trained}
        options_of_groups = [{**_plain(changed), "params": [parameters[i] for i in here]} for changed, here in members]
        values = {**options, **changes}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        stepper = kind(options_of_groups, **{name: value for name, value in values.items() if name not in tensors})
        if unknown := tensors.keys() - stepper.defaults.keys():
            raise TypeError(f"{kind.__name__} has no option {', '.join(sorted(unknown))}")
        for group, (changed, here) in zip(stepper.param_groups, members, strict=True):
            group |= {name: value for name, value in tensors.items() if name not in changed or callable(changed[name])}
            group |= {name: of(group[name]) for name, of in changed.items() if callable(of)}
            for i in here:
                parameters[i].grad = gradients[i]
                if states[i]:
                    stepper.state[parameters[i]] = _placed(states[i], parameters[i], group, donate)
        try:
            stepper.step()
        except RuntimeError as error:
            if kind in ELEMENTWISE or not any(is_dtensor(leaves[i]) for i in trained):
                raise
            reason = str(error).partition("\n")[0]
            raise TypeError(
                f"torch {torch.__version__} can't update DTensors by {kind.__name__} ({reason}): keep these params "
                "whole, or take an optimizer that treats each number alone, such as AdamW"
            ) from error
        for i, parameter in parameters.items():
            parameter.grad = None
            leaves[i], states[i] = parameter, stepper.state[parameter]
        for i, leaf in cast.items():
            states[i] = {**states[i], MASTER: leaves[i]}
            leaves[i] = leaf.detach().copy_(leaves[i]) if donate else leaves[i].to(leaf.dtype)
        for i, leaf in whole.items():
            leaves[i] = wrap(leaves[i], leaf)
            states[i] = {k: wrap(x, leaf) if _is_value(k, x) else x for k, x in states[i].items()}
        return spec.unflatten(leaves), spec.unflatten(states)

    arguments = (f"{name}={value!r}" for name, value in options.items())
    update.donates = donate  # type: ignore[attr-defined]
    update.is_separable = True  # type: ignore[attr-defined]
    update.__qualname__ = f"{kind.__name__}({', '.join(arguments)})"
    return Optimizer(init, update)


def _plain_tree(tree: Any) -> Any:
    """Return a tree that goes with others: the dict that late results of a step stand for, which is waited for."""
    return tree if type(tree) is dict else optree.tree_map(lambda x: x, tree, namespace=NAMESPACE)


def _has_master(parameter: Tensor, master: torch.dtype | None) -> bool:
    return master is not None and parameter.is_floating_point() and parameter.dtype.itemsize < master.itemsize


def _without_master(state: Mapping[str, Any], path: Path, master: torch.dtype | None) -> tuple[Any, Mapping[str, Any]]:
    """Return the master of a parameter, None if it has none, and the rest of its state."""
    if MASTER not in state:
        return None, state
    if master is None:
        raise ValueError(
            f"state{short(path)} has a master, and the optimizer keeps none: make it with master={state[MASTER].dtype}"
        )
    return state[MASTER], {name: x for name, x in state.items() if name != MASTER}


def _own(value: Tensor, donate: bool, master: torch.dtype | None) -> Tensor:
    """Return a parameter that the optimizer may change in place, in the dtype of masters if it has one."""
    own = value.detach() if master is None else value.detach().to(master)
    return own if donate or own.dtype != value.dtype else own.clone()


def _members(
    own: Mapping[int, Tensor], paths: Sequence[Path], groups: Sequence[Group]
) -> list[tuple[Mapping[str, Any], list[int]]]:
    """Return the parameters of each group, by number; those without a group come last."""
    members = [(options, list[int]()) for _, options in groups] + [({}, [])]
    for i, parameter in own.items():
        first = next((k for k, (predicate, _) in enumerate(groups) if predicate(paths[i], parameter)), -1)
        members[first][1].append(i)
    return [(options, numbers) for options, numbers in members if numbers]


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not functions of the call's."""
    return {name: value for name, value in options.items() if not callable(value)}


def _check_gradients(
    gradients: Sequence[Any], parameters: Sequence[Tensor], paths: Sequence[Path], master: torch.dtype | None
) -> None:
    for x, parameter, path in zip(gradients, parameters, paths, strict=True):
        if x is not None and not (isinstance(x, Tensor) and _goes_with(x, parameter, master)):
            there = _place(x) if isinstance(x, Tensor) else ""
            raise ValueError(
                f"grads{short(path)} is {describe(x)}{there}, and its parameter {describe(parameter)}"
                f"{_place(parameter)}: grads go with the params that the step was given"
            )


def _goes_with(gradient: Tensor, parameter: Tensor, master: torch.dtype | None) -> bool:
    dtypes = (parameter.dtype, master) if _has_master(parameter, master) else (parameter.dtype,)
    is_alike = (gradient.shape, gradient.device) == (parameter.shape, parameter.device) and gradient.dtype in dtypes
    return is_alike and placed_alike(gradient, parameter)


def _place(x: Tensor) -> str:
    return f" on {x.device}" + (f", placed {x.placements} over {x.device_mesh}" if is_dtensor(x) else "")


def _is_value(name: str, x: Any) -> bool:
    """Whether a value of the optimizer's state has one number for each number of its parameter."""
    return isinstance(x, Tensor) and name not in COUNTS


def _pieces(state: Mapping[str, Any], parameter: Tensor, path: Path) -> dict[str, Any]:
    """Return the values of a parameter that is a DTensor, with this process's pieces."""
    for name, x in state.items():
        if _is_value(name, x) and not placed_alike(x, parameter):
            raise ValueError(
                f"state{short((*path, name))} is {describe(x)}{_place(x)}, and its parameter{_place(parameter)}: state "
                "is sharded like the params it came from; Checkpoints.load with the sharded params makes it so"
            )
    return {name: local(x) if isinstance(x, Tensor) else x for name, x in state.items()}


def _placed(state: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any], donate: bool) -> dict[str, Any]:
    """Return state that the optimizer may change in place, with the step count on the device that the kernel needs."""
    result = dict(state) if donate else {k: x.clone() if isinstance(x, Tensor) else x for k, x in state.items()}
    count = result.get("step") if group.get("fused") or group.get("capturable") else None
    if isinstance(count, Tensor) and count.device != parameter.device:
        result["step"] = count.to(parameter.device)
    return result


def _check_options(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if an optimizer can't be made with these options; names the wrong one."""
    parameters = inspect.signature(kind).parameters
    names = [name for name in parameters if name != "params"]
    if unknown := [name for name in options if name not in names]:
        raise TypeError(f"{kind.__name__} has no option {unknown[0]!r}: it takes {', '.join(names)}")
    if (error := _refusal(kind, options)) is None:
        return
    wrong = TypeError if isinstance(error, TypeError) else ValueError
    for name, value in options.items():
        if _refusal(kind, {other: options[other] for other in options if other != name}) is None:
            raise wrong(
                f"{kind.__name__} can't be made with {name}={value!r}: {error}. It takes {parameters[name]}"
            ) from error
    raise wrong(f"{kind.__name__} can't be made with options {dict(options)}: {error}") from error


def _refusal(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Exception | None:
    """Return the error with which an optimizer refuses options; None if it takes them."""
    try:
        kind([{"params": [torch.zeros(1, 1, requires_grad=True)]}], **options)
    except (TypeError, ValueError) as error:
        return error
    return None


def _matching(spec: optree.PyTreeSpec, tree: Any, what: str) -> list[Any]:
    try:
        return spec.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"{what} has another structure than params ({error}); grads and state go with the params they came from"
        ) from error
