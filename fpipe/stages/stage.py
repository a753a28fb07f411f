"""A stage: a pure function over pytrees, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from fpipe.errors.arguments import checked
from fpipe.plan import call_of
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Path, flatten, get_at, short


@dataclass(frozen=True, init=False)
class Output:
    """The output of an earlier stage, or its part at a path: `Output(0)`, `Output(0, "skip")`."""

    stage: int
    path: Path

    @checked()
    def __init__(self, stage: int, *path: Any) -> None:
        object.__setattr__(self, "stage", stage)
        object.__setattr__(self, "path", path)

    def __repr__(self) -> str:
        return f"Output({', '.join(map(repr, (self.stage, *self.path)))})"


@dataclass(frozen=True, init=False)
class Batch:
    """The batch, or its part at a path: `Batch()`, `Batch("mask")`."""

    path: Path

    def __init__(self, *path: Any) -> None:
        object.__setattr__(self, "path", path)

    def __repr__(self) -> str:
        return f"Batch({', '.join(map(repr, self.path))})"


@dataclass(frozen=True)
class Target:
    """The target of the microbatch. The loss reads it."""


Read = Output | Batch | Target
CARRY = -2
"""In place of a source stage's number: what the stage itself has passed on, of the slice before."""


def frozen_paths(params: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return `Stage.frozen` for the parameters of a module: those that require no gradient; `()` if none does."""
    frozen = tuple(name for name, x in params.items() if not x.requires_grad)
    return ((),) if len(frozen) == len(params) else frozen


def nothing() -> None:
    """Return None, as a reference to what does not exist."""


class Original(NamedTuple):
    """A parameter of the module that a stage was made of.

    Args:
        parameter: returns it, if the module still exists: a weak reference.
        trained: whether it required a gradient when the stage was made.
    """

    name: str
    parameter: Callable[[], nn.Parameter | None]
    trained: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the module behind in a copy for another process."""
        return Original, (self.name, nothing, self.trained)


class StageSpec(NamedTuple):
    """The tensors that a stage holds and returns, on the meta device.

    Args:
        params, state: by name.
        outputs: the outputs that other stages read, as far as they are known.
        begins: the name of the place in the module where the stage begins.
        share: the stage's share of the time of all stages, if that was estimated or measured.
    """

    params: dict[str, Tensor]
    state: dict[str, Tensor]
    outputs: dict[str, Tensor]
    begins: str | None = None
    share: float | None = None


@runtime_checkable
class StageFunction(Protocol):
    """A stage's function that comes from a module and describes itself. A plain function has none of these.

    Args:
        qualified: names are those of the whole module that the stage is a part of.
        skeleton: the module, on the meta device.
        aliases: the entry of params or state for each name in the module's state_dict.
        nonpersistent_buffers: the values of buffers that are not in the state_dict.
        originals: the parameters of the module that it comes from.
    """

    @property
    def qualified(self) -> bool: ...

    @property
    def spec(self) -> StageSpec: ...

    @property
    def skeleton(self) -> nn.Module: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    @property
    def nonpersistent_buffers(self) -> Mapping[str, Tensor]: ...

    @property
    def originals(self) -> Sequence[Original]: ...

    def accepts(self, batch: Any) -> None:
        """Raise ValueError if the stages would ignore a part of the batch."""

    def __call__(self, params: Any, *inputs: Any) -> Any: ...


@dataclass(frozen=True)
class Stage:
    """A pure function `fn(params, *inputs) -> outputs` over pytrees.

    Args:
        fn: the function; `fn(params, state, *inputs) -> (outputs, state)` if `stateful`. A `StageFunction` describes
            itself.
        reads: an `Output` or `Batch` for each input (a number stands for `Output`). By default stage 0 reads the
            batch, and every other stage the output of the stage before it.
        stateful: the stage has state, such as buffers, that one microbatch passes to the next.
        carry: the stage passes values on from slice to slice of a microbatch, such as keys and values:
            `fn(params, carry, *inputs) -> (outputs, carry)`, and with state `fn(params, state, carry, *inputs) ->
            (outputs, carry, state)`. The carry is any tree; the first slice gets None. Gradients go back through it.
            Where a plan has no slices, the microbatch is the first slice, and what it passes on is dropped.
        frozen: names or paths of entries of params that get no gradient; `()` is the path of all params.
            `Pipeline.freeze` sets them.
        rows: `rows(*inputs) -> int`, the number of rows of a microbatch, if the params get a gradient for each row, as
            `transforms.per_sample` has it. `fn` then gets its params with such a dimension in front.
        sequence: the dimension of the tokens, along which the processes that compute the stage together cut its
            activations between layers; None if they don't. `Pipeline.sequence_parallel` sets it.
        local: where params are DTensors, `fn` gets all else as this process has it, and makes DTensors of it by itself,
            as a module does after `parallelize_module`. By default tensors that get a gradient are replicated DTensors.
    """

    fn: StageFunction | Callable[..., Any]
    reads: Sequence[Read | int] | None = None
    stateful: bool = False
    frozen: Sequence[Any] = ()
    rows: Callable[..., int] | None = None
    sequence: int | None = None
    local: bool = False
    carry: bool = False

    def __repr__(self) -> str:
        function = getattr(self.fn, "__name__", type(self.fn).__name__)
        return call_of(self, "fn").replace(repr(self.fn), function, 1)

    def __call__(self, params: Any, state: Any, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Run the stage, of one that carries the first slice. Return `(outputs, state)`."""
        outputs, _, state = self.run(params, state, None, inputs)
        return outputs, state

    def run(self, params: Any, state: Any, carry: Any, inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Run the stage on a slice. Return `(outputs, carry, state)`."""
        if self.rows is not None:
            leaves, spec = flatten(params)
            params = spec.unflatten(expanded(leaves, self.count(inputs)))
        result = self.fn(params, *[state] * self.stateful, *[carry] * self.carry, *inputs)
        outputs, *rest = self.separated(result)
        return outputs, rest[0] if self.carry else None, rest[-1] if self.stateful else state

    def separated(self, result: Any) -> tuple[Any, ...]:
        """Return the outputs, and the carry and the new state if there are such, out of the function's result.

        Raises:
            TypeError: it is no tuple of them.
        """
        names = ["outputs", *["carry"] * self.carry, *["state"] * self.stateful]
        if len(names) == 1:
            return (result,)
        if not isinstance(result, tuple) or len(result) != len(names):
            kind = f"{'stateful stage' if self.stateful else 'stage'}{' with carry' if self.carry else ''}"
            raise TypeError(f"a {kind} returns ({', '.join(names)}), not {type(result).__name__}")
        return result

    def count(self, inputs: Sequence[Any]) -> int:
        """Return the number of rows of a stage that has some, from its inputs."""
        assert self.rows is not None
        return self.rows(*inputs)

    @cached_property
    def inputs(self) -> tuple[Read, ...]:
        """The stage's reads, in the order of its arguments."""
        return tuple(Output(r) if isinstance(r, int) else r for r in self.reads or ())

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The numbers of the stages that it reads, lowest first; where it runs slices, `CARRY` may be among them."""
        return tuple(sorted({read.stage for read in self.inputs if isinstance(read, Output)}))

    def given(self, data: Microbatch) -> list[Any]:
        """Return the inputs that come from the microbatch, in the order of the arguments."""
        return [
            data.target if isinstance(read, Target) else _part(data.batch, read.path, "the batch")
            for read in self.inputs
            if not isinstance(read, Output)
        ]

    def arguments(self, outputs: Mapping[int, Any], given: Iterable[Any]) -> tuple[Any, ...]:
        """Return all inputs, out of other stages' outputs and the inputs that come from the microbatch."""
        rest = iter(given)
        return tuple(
            _part(outputs[read.stage], read.path, f"the output of stage {read.stage}")
            if isinstance(read, Output)
            else next(rest)
            for read in self.inputs
        )


def expanded(leaves: Iterable[Any], rows: int) -> list[Any]:
    """Return views of the tensors with a dimension of rows in front, which takes no memory."""
    return [x.expand(rows, *x.shape) if isinstance(x, Tensor) else x for x in leaves]


def _part(tree: Any, path: Path, name: str) -> Any:
    try:
        return get_at(tree, path)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        problem = "is None on this rank, and is read" if tree is None else "has nothing"
        raise ValueError(f"{name} {problem} at {short(path)}") from error
