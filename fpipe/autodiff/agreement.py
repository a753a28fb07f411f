"""Compare the collectives of a stage over the processes that take part in them, before any of them runs.

Processes that run other collectives, or in another order, would wait for each other for ever; gloo ends a process in
which two of different sizes meet. So each process that has traced a stage writes the collectives of its pieces into the
job's store, and reads those of the others of each group; with them a digest of the program, whose order is theirs, and
the turns in which overlaps post them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any, NoReturn

import torch.distributed as dist

from fpipe.autodiff.graph.collectives import Post, watch_of_handler
from fpipe.autodiff.graph.notices import SHOWN, Notices, Ranks
from fpipe.errors import StageError, TransportError
from fpipe.store import JobStore

LAST_WORD = 2.0  # seconds for an answer of the job's store once a wait has failed
USUAL_WAIT = 0.1  # seconds after which a process looks why others have not come
IN_TURNS = (
    ". The forward and the backward of an overlap run in turns, each of which posts collectives that do not depend on "
    "each other, and so turns must be the same on all ranks"
)


def compare(stage: int, posts: Sequence[Post], signature: str | None = None) -> None:
    """Compare the collectives of a stage's pieces with those of every other process of their groups; waits for them.

    Args:
        signature: a digest of the shapes and dtypes for which the stage has been traced; None where that was before.

    Raises:
        StageError: they differ, or the programs do; on all processes of the group.
        TransportError: a process of a group has traced no collectives.
    """
    watch = watch_of_handler()
    groups = list(dict.fromkeys(post.group for post in posts if len(post.group) > 1))
    if watch.notices is not None and signature is not None:
        watch.notices.post(stage, signature, groups)
    for group in groups:
        watch.before_posting()
        each = _exchange(stage, group, [post for post in posts if post.group == group], signature)
        watch.check_group(group)
        _raise_difference(stage, group, each)


def refuse(stage: int, group: Ranks, reason: str) -> None:
    """Give the processes of a group, which compare the collectives of a stage, why this one has not traced it."""
    with suppress(TransportError, StageError):  # this process has an error already
        _exchange(stage, group, reason, None)


def _exchange(stage: int, group: Ranks, posts: Sequence[Post] | str, signature: str | None) -> list[list[Post]]:
    """Return the collectives of each process of a group.

    Args:
        posts: this process's; or the reason why it has none.
    """
    notices, looks = watch_of_handler().notices, itertools.count()

    def look(missing: Sequence[int]) -> None:
        if notices is not None and signature is not None:
            texts = [_described(post) for post in posts if isinstance(post, Post)]
            notices.expect(missing, stage, signature, group, texts, is_first=next(looks) == 0)

    each = exchange(
        "pieces",
        group,
        [
            stage,
            None if notices is None else notices.program,
            *([posts] if isinstance(posts, str) else map(astuple, posts)),
        ],
        f"comparing the collectives of stage {stage} with ranks {[*group]}",
        lambda missing, timeout: _missing(stage, group, missing, timeout),
        look,
    )
    programs = [program for _, program, *_ in each]
    if notices is not None and None not in programs and len(set(programs)) > 1:
        _raise_other_program(stage, group, notices, programs)
    if others := [rank for rank, (other, *_) in zip(group, each, strict=True) if other != stage]:
        other = each[group.index(others[0])][0]
        raise StageError(
            f"rank {dist.get_rank()} has traced it where rank {others[0]} has traced stage {other}, and their "
            "collectives would meet: processes that share a group run the same stages in the same order",
            stage=stage,
        )
    for rank, (_, _, *posted) in zip(group, each, strict=True):
        if posted and isinstance(posted[0], str):
            raise StageError(f"rank {rank}, with which this one computes it, can't: {posted[0]}", stage=stage)
    return [[_post(*fields) for fields in posted] for _, _, *posted in each]


def _raise_other_program(stage: int, group: Ranks, notices: Notices, programs: Sequence[str]) -> NoReturn:
    """Raise StageError for the first effect in which a process differs from the first one; the same on all."""
    each = exchange(
        "programs",
        group,
        notices.texts(),
        f"comparing programs with ranks {[*group]}",
        lambda missing, timeout: _missing(stage, group, missing, timeout),
    )
    at = next(i for i, program in enumerate(programs) if program != programs[0])
    pairs = enumerate(itertools.zip_longest(each[0], each[at], fillvalue="missing"))
    i, (a, b) = next(((i, (a, b)) for i, (a, b) in pairs if a != b), (SHOWN, ("another", "another")))
    raise StageError(
        f"its collectives over ranks {[*group]} would meet in different orders: of the effects that compute, number "
        f"{i} is {a} on rank {group[0]} and {b} on rank {group[at]}. Ranks that share a group run the same schedule "
        "for equal plans",
        stage=stage,
    )


def exchange(
    kind: str,
    group: Ranks,
    value: Any,
    purpose: str,
    error: Callable[[Sequence[int], float], TransportError],
    look: Callable[[Sequence[int]], None] = lambda missing: None,
) -> list[Any]:
    """Return the values that the processes of a group give in this exchange, in their order; wait for them.

    Args:
        kind: exchanges of each kind are numbered, and each process of the group makes the same ones.
        value: of plain lists, dicts, numbers and texts.
        error: made of the processes that have given nothing in time, and the limit in seconds.
        look: is called with the processes that have given nothing, now and then; ends the wait by raising.
    """
    rank, watch, began = dist.get_rank(), watch_of_handler(), time.monotonic()
    store = JobStore(None, watch.timeout, lambda: watch.check(purpose)).under(
        f"fpipe/{kind}/{'-'.join(map(str, group))}"
    )
    with watch.waiting(purpose, None):
        number = _next(store, rank, group)
        keys = {each: f"{number} of {each}" for each in group}
        try:
            store.set(keys[rank], json.dumps(value))
            for _ in store.polls():
                if store.has(*keys.values()):
                    break
                if time.monotonic() > began + USUAL_WAIT:
                    look([each for each in group if not store.has(keys[each])])
            else:
                raise error([each for each in group if not store.has(keys[each])], watch.timeout or 0.0)
        except BaseException:
            with suppress(TransportError):
                now = store.within(LAST_WORD)
                now.delete(keys[rank])
                given_up = f"given up by {rank}"
                now.add(given_up, number - now.add(given_up, 0))
            raise
        return [json.loads(text) for text in store.multi_get([*keys.values()])]


def _next(store: JobStore, rank: int, group: Ranks) -> int:
    """Return the number of a process's next exchange, the same on each process.

    A process that gives one up may be the only one that began it, or the last one that was in it. The others have not
    counted it in the first case, and have in the second one: so they all go on behind it.
    """
    count = store.add(f"count of {rank}", 0)
    number = 1 + max(count, *(store.add(f"given up by {each}", 0) for each in group))
    store.add(f"count of {rank}", number - count)
    return number


def _post(piece: str, group: Iterable[int], text: str, turn: int | None, sends: Any, receives: Any) -> Post:
    return Post(piece, tuple(group), text, turn, tuple(sends), tuple(receives))


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
            if a is None or b is None or (a.piece, a.text, a.turn) != (b.piece, b.text, b.turn):
                in_turns = a is not None and b is not None and (a.piece, a.text) == (b.piece, b.text)
                here, there = (_described(post, in_turns) for post in (a, b))
                difference = f"collective {i} is {here} on rank {group[0]}, {there} on rank {rank}"
                raise _different(stage, group, f"{difference}{IN_TURNS if in_turns else ''}")
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


def _described(post: Post | None, in_turns: bool = False) -> str:
    if post is None:
        return "missing"
    turn = f", {'not in turns' if post.turn is None else f'turn {post.turn}'}" if in_turns else ""
    return f"{post.text} in {post.piece}{turn}"


def _different(stage: int, group: Ranks, difference: str) -> StageError:
    return StageError(
        f"its collectives over ranks {[*group]} differ, so that the ranks would wait for each other for ever: "
        f"{difference}. Each rank of a group runs the same operations, in the same order, on tensors of equal shapes: "
        "no branch of the stage may depend on the rank, and parts of a batch must be equally large",
        stage=stage,
    )
