"""Compare the collectives of a stage over the processes that take part in them, before any of them runs.

Processes that run other collectives, or in another order, would wait for each other for ever; gloo ends a process in
which two of different sizes meet. So each process that has traced a stage writes the collectives of its pieces into the
job's store, and reads those of the others of each group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import torch.distributed as dist

from fpipe.autodiff.graph.collectives import Post, watch_of_handler
from fpipe.errors import StageError, TransportError
from fpipe.store import JobStore

LAST_WORD = 2.0  # seconds for an answer of the job's store once a wait has failed
Ranks = tuple[int, ...]


def compare(stage: int, posts: Sequence[Post]) -> None:
    """Compare the collectives of a stage's pieces with those of every other process of their groups; waits for them.

    Raises:
        StageError: they differ; on all processes of the group.
        TransportError: a process of a group has traced no collectives.
    """
    watch = watch_of_handler()
    for group in dict.fromkeys(post.group for post in posts if len(post.group) > 1):
        watch.before_posting()
        _raise_difference(stage, group, _exchange(stage, group, [post for post in posts if post.group == group]))


def _exchange(stage: int, group: Ranks, posts: Sequence[Post]) -> list[list[Post]]:
    """Return the collectives of each process of a group."""
    each = exchange(
        "pieces",
        group,
        [stage, *map(astuple, posts)],
        f"comparing the collectives of stage {stage} with ranks {[*group]}",
        lambda missing, timeout: _missing(stage, group, missing, timeout),
    )
    if others := [rank for rank, (other, *_) in zip(group, each, strict=True) if other != stage]:
        other = each[group.index(others[0])][0]
        raise StageError(
            f"rank {dist.get_rank()} has traced it where rank {others[0]} has traced stage {other}, and their "
            "collectives would meet: processes that share a group run the same stages in the same order",
            stage=stage,
        )
    return [[_post(*fields) for fields in posted] for _, *posted in each]


def exchange(
    kind: str,
    group: Ranks,
    value: Any,
    purpose: str,
    error: Callable[[Sequence[int], float], TransportError],
) -> list[Any]:
    """Return the values that the processes of a group give in this exchange, in their order; wait for them.

    Args:
        kind: exchanges of each kind are numbered, and each process of the group makes the same ones.
        value: of plain lists, dicts, numbers and texts.
        error: made of the processes that have given nothing in time, and the limit in seconds.
    """
    rank, watch = dist.get_rank(), watch_of_handler()
    store = JobStore(None, watch.timeout, lambda: watch.check(purpose)).under(
        f"fpipe/{kind}/{'-'.join(map(str, group))}"
    )
    with watch.waiting(purpose, None):
        number = store.add(f"count of {rank}", 1)
        keys = {each: f"{number} of {each}" for each in group}
        try:
            store.set(keys[rank], json.dumps(value))
            if not store.appear(*keys.values()):
                raise error([each for each in group if not store.has(keys[each])], watch.timeout or 0.0)
        except BaseException:
            with suppress(TransportError):
                now = store.within(LAST_WORD)
                now.delete(keys[rank])  # so that the next exchange has the same number on each process
                now.add(f"count of {rank}", -1)
            raise
        return [json.loads(text) for text in store.multi_get([*keys.values()])]


def _post(piece: str, group: Iterable[int], text: str, sends: Any, receives: Any) -> Post:
    return Post(piece, tuple(group), text, tuple(sends), tuple(receives))


def _missing(stage: int, group: Ranks, missing: Sequence[int], timeout: float) -> TransportError:
    return TransportError(
        f"stage {stage} has collectives over ranks {[*group]}, and ranks {[*missing]} have not traced such a stage "
        f"within {timeout:g} s: every rank of the group gives it inputs of equal shapes, traces it (autodiff='eager' "
        "does not), and runs the same steps"
    )


def _raise_difference(stage: int, group: Ranks, each: Sequence[Sequence[Post]]) -> None:
    """Raise StageError for the first collective in which a process differs from the first one; the same on all."""
    first = each[0]
    for rank, other in zip(group[1:], each[1:], strict=True):
        for i in range(max(len(first), len(other))):
            a, b = (posts[i] if i < len(posts) else None for posts in (first, other))
            if a is None or b is None or (a.piece, a.text) != (b.piece, b.text):
                here, there = (_described(post) for post in (a, b))
                raise _different(stage, group, f"collective {i} is {here} on rank {group[0]}, {there} on rank {rank}")
    for i in range(len(first)):
        for s, sender in enumerate(group):
            for r, receiver in enumerate(group):
                sent, received = each[s][i].sends[r : r + 1], each[r][i].receives[s : s + 1]
                if sent != received:
                    raise _different(
                        stage,
                        group,
                        f"collective {i}, {_described(first[i])}, sends {sent[0]} rows from rank {sender} to rank "
                        f"{receiver}, which expects {received[0]}",
                    )


def _described(post: Post | None) -> str:
    return "missing" if post is None else f"{post.text} in {post.piece}"


def _different(stage: int, group: Ranks, difference: str) -> StageError:
    return StageError(
        f"its collectives over ranks {[*group]} differ, so that the ranks would wait for each other for ever: "
        f"{difference}. Each rank of a group runs the same operations, in the same order, on tensors of equal shapes: "
        "no branch of the stage may depend on the rank, and parts of a batch must be equally large",
        stage=stage,
    )
