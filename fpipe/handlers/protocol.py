"""The interface of handlers: inputs and results of a step, observers, and the processes beside this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe.autodiff.graph.lost_gradients import CONSTANT_LOSS
from fpipe.autodiff.interface import DifferentiablePipeline, Scale
from fpipe.devices import Graph
from fpipe.effects import Effect, Name, Value
from fpipe.errors import StageError, TransportError
from fpipe.plan import Plan
from fpipe.programs.program import Program, Programs
from fpipe.stages.microbatch import Microbatch, sizes_of
from fpipe.stages.rng import Rng, Seeder

T = TypeVar("T")


class PeerLost(Exception):
    """A peer can't be reached; the text is the purpose.

    Args:
        peer: its rank; None where it may be any of them.
        is_other: it may also be a process that is no rank of the handler, as in the collectives of pieces.
        group: the name of the group of a collective of pieces.
    """

    def __init__(self, peer: int | None, text: str, is_other: bool = False, group: str | None = None) -> None:
        super().__init__(text)
        self.peer, self.is_other, self.group = peer, is_other, group


class ValueStore(Protocol):
    """The values that one rank holds while a step runs, in numbered slots.

    Args:
        slots: the values by slot number; None where a slot is empty.
        touched: for each effect of the rank's program, the slots of the values that it needs, gives or frees.
    """

    slots: list[Any]
    touched: list[tuple[int, ...]]

    def slot(self, name: Name) -> int:
        """Return the slot number of a value."""

    def borrowed(self) -> Iterable[Any]:
        """Iterate over the tensors that the caller owns: parameters and microbatches."""

    def prepared(self, stage: int) -> Iterable[Any]:
        """Iterate over the tensors that a stage has computed of its parameters alone; some are the parameters."""

    def sums(self) -> Iterable[Any]:
        """Iterate over the tensors of the sums of weight gradients so far, and None where a leaf has none yet."""


class StepRejected(Exception):
    """A rank can't run this step, and every rank raises an error. Nothing of it counts."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Outcome:
    """The results of a completed step, as far as this process has them.

    Args:
        loss: the same on every rank, not synchronized; None where only outputs were asked for.
        rows: of the whole batch.
        gradients: `{stage: tree}`.
    """

    loss: Tensor | None
    rows: int | None
    gradients: Mapping[int, Any]


class Observer:
    """Base class of observers. Each method does nothing; override those that are needed. Must not change anything.

    Args:
        agreed: values that must be equal on all ranks, or the ranks would wait for each other.
    """

    @property
    def agreed(self) -> tuple[object, ...]:
        return ()

    def on_compile(self, name: str, programs: Programs, handler: Handler) -> None:
        """The handler will compile these programs next; `name` is the schedule's."""

    def on_store(self, rank: int, store: ValueStore) -> None:
        """A rank that this process plays keeps its values in this store."""

    def on_step_begin(self) -> None:
        """A step is called."""

    def on_step_end(self, outcome: Outcome) -> None:
        """A step has completed without an error."""

    def begin(self, rank: int, effect: Effect) -> None:
        """An effect begins; every value that it needs has arrived. A step may begin again, with its first effect."""

    def end(self, rank: int, effect: Effect) -> None:
        """An effect has ended."""

    def wait(self, rank: int, value: Value) -> None:
        """The first effect that needs a value of another rank starts to wait for it."""

    def arrive(self, rank: int, value: Value) -> None:
        """That value has arrived."""


class BegunAgain(Exception):
    """All ranks begin the running step again, with other inputs; nothing of it counts so far.

    Args:
        changes: of the inputs.
    """

    def __init__(self, changes: Mapping[str, Any]) -> None:
        super().__init__("the step begins again")
        self.changes = changes


class Updates(Protocol):
    """Updates the params of a step while it runs, each entry once its gradients are final.

    Args:
        donates: the memory of params and optimizer state is reused, so that the step can't be undone.
    """

    @property
    def donates(self) -> bool: ...

    def __call__(self, gradients: Mapping[int, Any]) -> None:
        """Update the entries of these gradients; nothing of the step uses their params any more."""


@dataclass(frozen=True)
class Inputs:
    """The arguments of one step, split into microbatches.

    Args:
        params: `{stage: tree}` of the stages that this process holds.
        state: likewise, of each replica that this process plays.
        data: batch and target of each microbatch, or of each slice of one, of all replicas that this process plays.
            Its numbers, those of `sizes` and of `first` and `total` count slices.
        later: likewise for each token after the first that the program generates, without the tokens themselves. The
            slices of prompts after the first come before these.
        rows: rows of the whole batch, of all replicas; None where this process has no part of it.
        sizes: rows of each of these microbatches; by default those of a batch that is split.
        weighed: whether each loss is scaled by its share of the rows.
        apart: whether batch or target came as `Microbatches`; None where this process was given neither.
        rng: (seed, step), or the contexts of a graph; None to draw from the global generators.
        broken: the error that keeps this process from running the step; its peers raise it too.
        first: the number of the first microbatch, counted over all replicas.
        total: the number of all replicas' microbatches; None for those in `data`.
        loss_scale: multiplies the loss's cotangents, and divides the gradients; None for 1.
        max_norm: to which the caller clips the gradients; the same on every rank. None where it does not.
        check_finite: what the caller does where loss or gradients are not finite, likewise; None for nothing.
        post_validate: whether the caller updates before the norm is known, likewise.
        settings: other arguments of the caller that are the same on every rank, by name.
        slices: of each microbatch.
        lengths: the share that each slice has of the sequences of its microbatch; where a process has no part of them,
            they are equal.
        update: the meaning of `Update`; None where the caller updates nothing, or at the end.
        share: returns the numbers that this rank tells the others as it ends the step, as many on each, from its
            gradients; None for nothing.
        provisional: params, state or loss scale of this process may turn out not to be the right ones.
        renew: is asked once all ranks have begun a step that is provisional on some of them. It returns other params,
            state and loss scale, by name, with which they begin it again, where these are not the right ones; on all
            ranks, or on none. It raises `StepRejected` where the step is not to run, likewise. A handler that returns
            `Results.shares` asks it.
    """

    params: Mapping[int, Any]
    state: Sequence[Mapping[int, Any]]
    data: Sequence[Microbatch]
    rows: int | None = None
    sizes: Sequence[int] | None = None
    weighed: bool = False
    apart: bool | None = None
    rng: Rng | Seeder | None = None
    broken: Exception | None = None
    first: int = 0
    total: int | None = None
    loss_scale: Tensor | None = None
    max_norm: float | Literal["a tensor"] | None = None
    check_finite: Literal["raise", "skip"] | None = None
    post_validate: bool = False
    slices: int = 1
    lengths: Sequence[float] | None = None
    update: Updates | None = None
    share: Callable[[Mapping[int, Any]], Sequence[int]] | None = None
    provisional: bool = False
    renew: Callable[[], Mapping[str, Any] | None] | None = None
    later: Sequence[Sequence[Microbatch]] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sizes is None and self.rows is not None:
            object.__setattr__(self, "sizes", self.split(self.rows))

    def split(self, rows: int) -> Sequence[int]:
        """Return the rows of each of the microbatches, for each of its slices."""
        sizes = sizes_of(rows, len(self.data) // self.slices)
        return sizes if self.slices == 1 else [size for size in sizes for _ in range(self.slices)]

    def of_replica(self, replica: int, replicas: int) -> Inputs:
        """Return the inputs of one replica, out of those of all."""
        total = len(self.data)
        count = total // replicas
        numbers = slice(replica * count, (replica + 1) * count)
        sizes = None if self.sizes is None else self.sizes[numbers]
        state, data = self.state[replica : replica + 1], self.data[numbers]
        lengths = None if self.lengths is None else self.lengths[numbers]
        return replace(self, state=state, data=data, sizes=sizes, lengths=lengths, first=numbers.start, total=total)

    def scale(self, unit: int) -> Scale:
        """Return the factor of the loss of a microbatch, or of a slice of one.

        It is the share of the caller's weights, else of the rows; a slice has its share of its microbatch's.
        """
        share = self.data[unit].scale
        if share is not None:
            value: Scale = share()
            return value
        if not self.weighed:
            return None
        count = self.total or len(self.data)
        whole = self.slices / count if self.rows is None or self.sizes is None else self.sizes[unit] / self.rows
        if self.slices == 1:
            return whole
        return whole * (1 / self.slices if self.lengths is None else self.lengths[unit])

    def place(self, unit: int) -> tuple[int, int]:
        """Return the number of a microbatch, counted over all replicas, and of its slice."""
        return divmod(self.first + unit, self.slices)


@dataclass
class Results:
    """The results of a step in this process.

    Args:
        gradients: for every entry in the params of the step.
        losses: by microbatch, or slice of one, counted over all replicas, scaled; all of them on every rank.
        outputs: of the last stage, likewise, where it runs or where they are gathered: aux, evaluate's output, or a
            list of tokens.
        output: the outputs of all microbatches merged, where this process has them all, or all of its replica.
        state: the new state of the stateful stages of this process, `{stage: tree}`, of each replica that it plays.
        differentiable: whether the loss of a microbatch requires a gradient, as far as this process knows.
        data_gradients: (stage, microbatch counted over all replicas) -> the gradients of what the stage read of the
            microbatch, by the path of the leaf in `(batch, target)`, where they are differentiated: those of this
            process's stages, and of others that read the same leaves.
        shares: waits for the numbers of `Inputs.share`, and returns those of each rank; None where there are none. A
            handler that has it also asks `Inputs.renew`.
    """

    gradients: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    output: Any = None
    state: list[dict[int, Any]] = field(default_factory=lambda: [{}])
    differentiable: bool = False
    data_gradients: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    shares: Callable[[], list[list[int]]] | None = None

    def refuse_constant_loss(self) -> None:
        """Raise StageError if no loss requires a gradient; for steps that differentiate, once all losses are known."""
        if not self.differentiable:
            raise StageError(CONSTANT_LOSS)

    def merge(self, other: Results, stages: Collection[int], replica: int = 0) -> None:
        """Add the results of a rank that holds some stages; its other gradients are parts of tied parameters.

        Args:
            replica: the number of its replica among those of this process.
        """
        self.gradients |= {stage: tree for stage, tree in other.gradients.items() if stage in stages}
        self.losses |= other.losses
        self.outputs |= other.outputs
        self.data_gradients |= other.data_gradients
        self.state[replica] |= other.state[0]
        self.differentiable |= other.differentiable


Run = Callable[[Inputs], Results]


class Peers(Protocol):
    """The processes of a handler that plays one rank in each, for calls that all of them make between steps.

    Every process makes the same calls in the same order. A call ends on all of them: with its result, or with an error
    that names the rank that failed or did not come.
    """

    rank: int
    size: int
    timeout: float | None

    def new_group(
        self, purpose: str, *, hint: str = "", timeout: float | None = None, error: type[Exception] = TransportError
    ) -> Peers:
        """Return the same processes over separate connections, so that a failure there affects nothing else.

        Args:
            purpose: names the connections, in messages too; the same name gives the same connections.
            hint: the way out that error messages end with.
            timeout: seconds that one wait may take; by default the handler's.
            error: what is raised where another rank failed in the same call.
        """

    def connect(self, call: str) -> None:
        """Make the connections, if they are not there yet, so that a later call finds them in any thread."""

    def gather(self, value: T, call: str) -> list[T]:
        """Return the values of all ranks; a value is made of plain Python types.

        Args:
            call: the name of the call, which all ranks compare.

        Raises:
            TransportError: a rank did not come, or is gone.
        """

    def agree(
        self, do: Callable[[], T], call: str, share: Callable[[T], Any] = lambda result: result
    ) -> tuple[T, list[Any]]:
        """Call a function on every rank; return its result here, and what every rank shares of its own.

        Args:
            share: makes of a result, in plain Python types, what the other ranks get.

        Raises:
            Exception: this rank's function raised it; the other ranks raise the group's `error`, with the reason.
            TransportError: a rank did not come, or is gone.
        """

    def send(self, number: float, rank: int) -> None:
        """Send a number to a rank, which calls `receive` at the same time."""

    def receive(self, rank: int) -> float:
        """Wait for a number from a rank."""


class Replays(Protocol):
    """The part of a handler in steps that are captured as graphs, and replayed. All ranks make the same calls.

    Args:
        epoch: how often processes have connected again; what was captured before that is gone.
    """

    @property
    def epoch(self) -> int: ...

    def step(self) -> AbstractContextManager[None]:
        """Return a context in which the whole step runs: a failure in it is one of all ranks."""

    def agree(self, key: Hashable | None, rng: object = None) -> Hashable | None:
        """Return a name of the step, the same on every rank, and another one wherever the key of a rank is another.

        Args:
            key: of the step on this rank; None if it has none yet.
            rng: of the step, which is the same on every rank.

        Returns:
            None if the step has no key on some rank.

        Raises:
            StageError: the ranks have different `rng`.
            TransportError: a rank refuses the step; with its reason.
        """

    def refuse(self, error: BaseException) -> NoReturn:
        """Raise an error that keeps this rank from the step; the other ranks, which call `agree`, get its text."""

    def running(self, part: str) -> AbstractContextManager[None]:
        """Return a context in which a part of the step runs: a failure in it is one of all ranks."""

    def capturing(self, graph: Graph) -> AbstractContextManager[None]:
        """Return a context in which the step is captured into a graph, and nothing of it may run."""

    def add(self, x: Tensor, purpose: str) -> Tensor:
        """Return the sum over all processes of a new tensor, by an operation that a graph holds."""


@dataclass
class Departure:
    """Whether the ranks leave once they have ended the running step, as a process asks that gets SIGTERM.

    The ranks of a handler learn in one step that one of them asks. Where they compute stages together with ranks of
    other handlers, they tell these as the next step begins, and all handlers leave after that one.

    Args:
        is_alone: this process plays all ranks.
        is_requested: by this process.
        is_asked: a rank of this handler had requested it when the last step began; the same on all of them.
        is_shared: other processes compute stages together with this one, in a step of this loop.
        is_passed: a handler of those processes, or this one, was asked before this step.
        is_known: all ranks of all these handlers leave.
    """

    is_alone: bool = True
    is_requested: bool = False
    is_asked: bool = False
    is_shared: bool = False
    is_passed: bool = False
    is_known: bool = False

    def begin(self) -> None:
        """Begin a loop of steps, which tell anew whether other processes compute stages together with this one."""
        self.is_shared = False

    def ask(self) -> None:
        """Ask all ranks to leave: they learn it as the next step begins."""
        self.is_requested = True

    @property
    def number(self) -> int:
        """The number that this rank sends to the others of the handler as a step begins: three bits, for `learn`."""
        return self.is_requested | self.is_shared << 1 | self.is_passed << 2

    def learn(self, numbers: Sequence[int]) -> None:
        """Take the numbers of all ranks of the handler, as a step begins."""
        is_asked, is_shared, is_passed = (any(number & bit for number in numbers) for bit in (1, 2, 4))
        self.is_asked |= is_asked
        self.is_known |= is_passed if is_shared else is_asked

    @property
    def is_agreed(self) -> bool:
        """Whether they leave; the same on every rank after a step."""
        return self.is_known or (self.is_alone and self.is_requested and not self.is_shared)


@dataclass
class Span:
    """Work of a process beside its steps, in a thread of its own, for timelines.

    Args:
        text: its name.
        begin, end: by `time.perf_counter`; it runs as long as the end is infinite.
    """

    text: str
    begin: float
    end: float = inf


class Alone:
    """`Replays` of a handler that plays all ranks in this process."""

    epoch = 0

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def agree(self, key: Hashable | None, rng: object = None) -> Hashable | None:
        return key

    def refuse(self, error: BaseException) -> NoReturn:
        raise error

    def running(self, part: str) -> AbstractContextManager[None]:
        return nullcontext()

    def capturing(self, graph: Graph) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, x: Tensor, purpose: str) -> Tensor:
        return x


@dataclass(frozen=True)
class Replicas:
    """The replicas of a plan.

    Args:
        here: the numbers of those that this process plays; on each of them, the same ranks.
        count: of all.
        gather: returns the numbers that all replicas pass, in their order. Each calls it on the same ranks.
        mesh: of the replicas, where they are in several processes.
    """

    here: range
    count: int
    gather: Callable[[list[float]], list[float]] = list
    mesh: DeviceMesh | None = None


class Handler(Protocol):
    """Runs programs: gives effects their meaning."""

    @property
    def replays(self) -> Replays | None:
        """The handler's part in steps that are captured; None where it captures none."""

    @property
    def timeout(self) -> float | None:
        """Seconds that a wait for another process may take; None where no other one is the handler's."""

    @property
    def departure(self) -> Departure:
        """Whether the ranks leave after the running step."""

    @property
    def flight(self) -> Path | None:
        """The file of the flight recorder of this process; None where there is none, or none yet."""

    @property
    def beside(self) -> deque[Span] | None:
        """The last work of this process beside its steps; None where there can be none."""

    @property
    def peers(self) -> Peers | None:
        """The other processes, numbered `replica * ranks + rank`; None where this process plays all."""

    @property
    def devices(self) -> Sequence[torch.device] | None:
        """The device of each rank that this process plays; None where the handler moves nothing."""

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        """Return the ranks that this process plays."""

    def replicas(self, plan: Plan) -> Replicas:
        """Return the replicas of a plan, and which of them this process plays."""

    def compile(self, programs: Mapping[int, Program], pieces: DifferentiablePipeline, observe: Observer | None) -> Run:
        """Return a function that runs one step."""

    def check(self) -> None:
        """Wait until the steps so far are done, and raise TransportError if a peer has failed since.

        What leaves this process after it, such as a checkpoint, has results of whole steps.
        """
