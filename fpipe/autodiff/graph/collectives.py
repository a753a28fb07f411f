"""Collectives among the nodes of a graph: which they are, where they stand in a block, and how their code runs.

Invariants:
- a collective runs once: it is neither recomputed nor dropped from a forward, and merged only with one of equal inputs;
- it is posted as soon as its inputs are there, and waited for at the first use of its result;
- its order among all collectives of a block follows from the graph, so that processes with equal graphs agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from operator import getitem
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.autodiff.graph.guards import hint
from fpipe.autodiff.graph.notices import Notices
from fpipe.devices import is_capturing
from fpipe.errors import StageError, TransportError

aten = torch.ops.aten
FUNCTIONAL = "_c10d_functional"
IN_PLACE = "c10d"
"""The namespace of `torch.distributed`'s own functions, which write to their arguments."""
CHEAP = {getitem, aten.clone.default, aten._to_copy.default, aten.constant_pad_nd.default}


@cache
def is_collective(func: Any) -> bool:
    """Return whether an operator is a functional collective of torch's, or the wait for one."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    return is_wait(func) or any(argument.name == "group_name" for argument in arguments)


def communicates(func: Any) -> bool:
    """Return whether an operator is a collective of any kind."""
    return is_collective(func) or getattr(func, "namespace", None) == IN_PLACE


class Communicates(Exception):
    """A stage with collectives can't be traced, or runs by eager autograd."""


class RefusingCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives of what runs inside."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if communicates(func):
            raise Communicates(
                "its function has collectives, and eager autograd runs it: ranks could run them in different orders, "
                "and wait for each other for ever. Leave autodiff='eager' out; a stage with collectives must be traced"
            )
        return func(*args, **(kwargs or {}))

    @classmethod
    def trim(cls, error: BaseException) -> None:
        """Drop the frames of this mode, and those inside, from the traceback of an error that passed through it."""
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            if frame.tb_next.tb_frame.f_code is cls.__torch_dispatch__.__code__:
                frame.tb_next = None
                return
            frame = frame.tb_next


def is_wait(func: Any) -> bool:
    return getattr(func, "namespace", None) == FUNCTIONAL and func._opname == "wait_tensor"


def is_post(func: Any) -> bool:
    """Return whether an operator is a collective, as those of `_c10d_functional` and DTensor's own exchange are."""
    return is_collective(func) and not is_wait(func)


# Where they stand


def overlapped(body: Sequence[fx.Node]) -> list[fx.Node]:
    """Return a block's nodes in an order in which collectives are posted early and waited for late.

    A collective moves up to the last of its inputs, with the views and copies that only it needs. A wait moves down to
    the first use of its result, past views.
    """
    if not any(is_post(node.target) for node in body):
        return list(body)
    inside = dict.fromkeys(body)
    keys: dict[fx.Node, tuple[int, int, int]] = {node: (i, 0, i) for i, node in enumerate(body)}
    feeds = _feeders(body)
    for node in body:
        if node in feeds:
            after = max((keys[n][0] for n in node.all_input_nodes if n in inside), default=-1)
            keys[node] = after, 1, keys[node][2]
    late = set[fx.Node]()
    for node in body:
        inputs = [n for n in node.all_input_nodes if n in inside]
        if is_wait(node.target) or (_is_view(node) and bool(inputs) and late.issuperset(inputs)):
            late.add(node)
    for node in reversed(body):
        if node in late and node not in feeds:
            before = min((keys[n][0] for n in node.users if n in inside), default=len(body))
            keys[node] = before, -1, keys[node][2]
    return sorted(body, key=keys.__getitem__)


def _feeders(body: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the collectives, and the cheap nodes whose results only collectives read."""
    inside, feeds = dict.fromkeys(body), set[fx.Node]()
    for node in reversed(body):
        users = [n for n in node.users if n in inside]
        cheap = (_is_view(node) or node.target in CHEAP) and not is_wait(node.target)
        if is_post(node.target) or (cheap and bool(users) and feeds.issuperset(users)):
            feeds.add(node)
    return feeds


def _is_view(node: fx.Node) -> bool:
    return node.meta.get("view_of") is not None


# What they are for other processes


@dataclass(frozen=True)
class Post:
    """A collective of a piece, as the other processes of its group must have it.

    Args:
        group: the processes that take part.
        text: operation, dtype, shape, and what else must be equal.
        turn: the number of the turn that posts it, where overlaps run the piece in turns.
        sends, receives: of an exchange in which they differ, the rows that go to each process, and come from it.
    """

    piece: str
    group: tuple[int, ...]
    text: str
    turn: int | None = None
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


def posts(piece: str, body: Sequence[fx.Node]) -> list[Post]:
    """Return the collectives of a piece, in order."""
    cuts, turn, collectives = turn_ends(body), 0, list[Post]()
    for node in body:
        turn += node in cuts
        if node.op == "call_function" and is_post(node.target):
            collectives.append(_post(piece, node, turn))
    return collectives


def turn_ends(body: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes before which a turn ends: waits, or collectives, after the last collective of a turn.

    A turn posts as many collectives as do not depend on each other. So their numbers follow from the collectives, and
    processes in which other operations stand between these post them in the same turns.
    """
    cuts, latest = set[fx.Node](), dict[fx.Node, int]()  # the number of the last collective that a node depends on
    first, count, wait = 0, 0, None
    for node in body:
        latest[node] = max((latest[n] for n in node.all_input_nodes if n in latest), default=-1)
        if is_post(node.target):
            if latest[node] >= first:
                cuts.add(wait or node)
                first = count
            latest[node], wait = count, None
            count += 1
        elif wait is None and is_wait(node.target) and latest[node] >= first:
            wait = node
    return cuts if wait is None else cuts | {wait}


def _post(piece: str, node: fx.Node, turn: int) -> Post:
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    group = ranks_of(arguments.pop("group_name"))
    tensors = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    sends, receives = (arguments.pop(f"{side}_split_sizes", ()) for side in ("input", "output"))
    others = ", ".join(f"{name}={value}" for name, value in arguments.items() if isinstance(value, str | int))
    rows = slice(1 if sends else 0, None)  # the rows of an exchange may differ
    shapes = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{[hint(n) for n in x.shape[rows]]}" for x in tensors)
    size = "" if sends else f", {sum(hint(x.nbytes) for x in tensors)} bytes"
    counts = (tuple(hint(n) for n in side) for side in (sends, receives))
    return Post(piece, group, f"{target._opname}({shapes}{', ' * bool(others)}{others}{size})", turn, *counts)


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the processes of a group, of which the graph has the name."""
    return tuple(dist.get_process_group_ranks(group_of(group)))


def group_of(group: Any) -> Any:
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    return resolve(group) if isinstance(group, str) else group


# How they run


class Watch(Protocol):
    """The part of a handler in the collectives of pieces."""

    @property
    def notices(self) -> Notices | None:
        """The notices of the program that runs."""

    @property
    def timeout(self) -> float | None:
        """The seconds within which other processes must trace what this one has traced; None if `check` decides."""

    def check_group(self, group: tuple[int, ...]) -> None:
        """Raise StageError if the processes of a group can't compute a stage together."""

    def meet(self, group: tuple[int, ...]) -> None:
        """Is called before each step of processes that compute stages together; in the first, it waits for them.

        Raises:
            TransportError: one of them did not come.
        """

    def before_posting(self) -> None:
        """Is called before each collective: it may wait until all processes are known to run the step."""

    def waiting(self, purpose: str, group: Any) -> AbstractContextManager[None]:
        """Return a context in which this process waits for others of a group; an error of the group is one of a peer.

        Args:
            group: the process group; None where none is to be ended.
        """

    def check(self, purpose: str) -> None:
        """Raise if the wait of this process can't end."""


class NoWatch:
    """Outside of a handler that watches: the group's own limit of time holds, and its errors are those of peers."""

    timeout: float | None = 300.0

    def __init__(
        self, notices: Notices | None = None, check_group: Callable[[tuple[int, ...]], None] = lambda group: None
    ) -> None:
        self.notices, self.check_group = notices, check_group

    def meet(self, group: tuple[int, ...]) -> None:
        """Do nothing."""

    def before_posting(self) -> None:
        """Do nothing."""

    @contextmanager
    def waiting(self, purpose: str, group: Any) -> Iterator[None]:
        try:
            yield
        except (StageError, TransportError):
            raise
        except RuntimeError as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TransportError(f"a peer failed, or did not come, while this process was {purpose}: {first}") from None

    def check(self, purpose: str) -> None:
        """Do nothing."""


WATCH: ContextVar[Watch | None] = ContextVar("WATCH", default=None)
"""The watch of the handler that runs a step; None where no handler watches."""


def watch_of_handler() -> Watch:
    return WATCH.get() or NoWatch()


def added_over(x: Tensor, group: dist.ProcessGroup, purpose: str) -> Tensor:
    """Return the sum of the tensors of a group's processes, under the watch of the handler."""
    watch, operators = watch_of_handler(), torch.ops._c10d_functional
    watch.before_posting()
    with torch.no_grad(), watch.waiting(f"posting {purpose}", group):
        posted = operators.all_reduce(x, "sum", group.group_name)
    with torch.no_grad(), watch.waiting(f"waiting for {purpose}", group):
        total: Tensor = operators.wait_tensor(posted)
    return total


def watched(node: fx.Node, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a collective, or waits for one, under the watch of the handler."""
    if is_wait(node.target):
        return _waiting(node, function)
    purpose, group = _purpose("posting", node), _group_name(node)

    def post(*args: Any, **kwargs: Any) -> Any:
        if is_capturing():
            raise StageError("it has collectives, and steps with collectives can't be captured: leave capture out")
        watch = watch_of_handler()
        watch.before_posting()
        with watch.waiting(purpose, group_of(group)):
            return function(*args, **kwargs)

    post.__name__ = str(node.target._opname)  # type: ignore[union-attr]
    return post


def _waiting(node: fx.Node, function: Callable[..., Any]) -> Callable[..., Any]:
    source = node.all_input_nodes[0]
    while source.target is getitem:
        source = source.all_input_nodes[0]
    is_known = source.op == "call_function" and is_post(source.target)
    purpose = _purpose("waiting for", source) if is_known else "waiting for a collective"
    group = _group_name(source) if is_known else None

    def wait_tensor(x: Tensor) -> Any:
        with watch_of_handler().waiting(purpose, None if group is None else group_of(group)):
            return function(x)

    return wait_tensor


def _purpose(verb: str, node: fx.Node) -> str:
    return f"{verb} {node.target._opname} of ranks {[*ranks_of(_group_name(node))]}"  # type: ignore[union-attr]


def _group_name(node: fx.Node) -> Any:
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    return (dict(zip(names, node.args, strict=False)) | node.kwargs)["group_name"]
