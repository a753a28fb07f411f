"""Explain a deadlock: either an effect that no rank will run, or the shortest cycle of waits. No torch.

The nodes of the graph of waits are the ranks, each at its next effect, and with one queue for a pair of ranks also the
post at the head of each queue. Every other effect waits only for its predecessor in the same program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fpipe.effects import Effect, Name, Recv, Send
from fpipe.programs.program import Programs

MAX_WAITS = 6  # of a cycle that the message lists in full
Node = int | tuple[int, int]  # a rank; or the head of a rank's queue to a peer
# The names that each blocked rank needs; empty for a send that waits for its receive.
Missing = Mapping[int, Sequence[Name]]


class Wait(NamedTuple):
    """A wait in words, and the node that it waits for; None for an effect that no rank will run."""

    text: str
    on: Node | None


def explain_deadlock(programs: Programs, at: Mapping[int, int], missing: Missing, paired: bool) -> str:
    """Return the message of the error: why no rank can proceed.

    Args:
        at: the index of each rank's next effect.
        missing: for each blocked rank, the names that it waits for; none if a send waits for its receive.
        paired: whether the posts of a pair of ranks run in one queue.
    """
    waits = _WaitGraph(programs, at, missing, paired)
    for rank in missing:
        for wait in waits.of(rank):
            if wait.on is None:
                return f"no rank can go on: {wait.text}"
    cycle = _shortest_cycle(waits)
    texts = [wait.text for wait in cycle]
    if len(texts) > MAX_WAITS:
        texts[MAX_WAITS // 2 : -MAX_WAITS // 2] = [f"and so on, {len(texts) - MAX_WAITS} more"]
    hint = "" if len(cycle) == 1 else f"; {waits.hint(cycle)}"
    return "no rank can go on: " + "; ".join(texts) + hint


def _shortest_cycle(waits: _WaitGraph) -> list[Wait]:
    shortest: list[Wait] = []
    for rank in waits.missing:
        starts: list[Node] = [rank, *(wait.on for wait in waits.of(rank) if isinstance(wait.on, tuple))]
        for start in starts:
            shortest = _cycle_through(start, waits, len(shortest)) or shortest
    return shortest


def _cycle_through(start: Node, waits: _WaitGraph, limit: int) -> list[Wait]:
    """Return the shortest cycle through a node, if shorter than the limit (0 for no limit); else an empty list."""
    paths: deque[tuple[Node, list[Wait]]] = deque([(start, [])])
    seen: set[Node] = set()
    while paths:
        node, path = paths.popleft()
        if limit and len(path) + 1 >= limit:
            return []
        for wait in waits.of(node):
            if wait.on == start:
                return [*path, wait]
            if wait.on is not None and wait.on not in seen:
                seen.add(wait.on)
                paths.append((wait.on, [*path, wait]))
    return []


class _WaitGraph:
    """The graph of waits. The edges of a node are computed on first access."""

    def __init__(self, programs: Programs, at: Mapping[int, int], missing: Missing, paired: bool) -> None:
        self.programs, self.at, self.missing, self.paired = programs, at, missing, paired
        self.queues = self._queues() if paired else {}
        self.edges: dict[Node, list[Wait]] = {}

    def of(self, node: Node) -> list[Wait]:
        """Return the waits of a node."""
        if node not in self.edges:
            self.edges[node] = list(self._of_rank(node) if isinstance(node, int) else [self._of_head(*node)])
        return self.edges[node]

    def hint(self, cycle: Sequence[Wait]) -> str:
        """Return how to break a cycle."""
        heads = [self.queues[wait.on][0] for wait in cycle if isinstance(wait.on, tuple)]
        if any(isinstance(head, Recv) for head in heads):
            return "post a receive no earlier than its value is used, or give each direction a channel of its own"
        if heads:
            return "post the receive before the send on one of the two, or give each direction a channel of its own"
        if any(not self.missing[wait.on] for wait in cycle if isinstance(wait.on, int)):
            return "post the receive before the send on one of these ranks"
        return "on one of these ranks, run what the other waits for first"

    def _of_rank(self, rank: int) -> Iterator[Wait]:
        effect = self._front(rank)
        if isinstance(effect, Send) and not self.missing[rank]:
            yield self._of_post(rank, effect, f"rank {rank} waits at {effect} for its receive, which", "posts")
        for name in self.missing[rank]:
            yield self._of_name(f"rank {rank} waits at {effect} for {name}", rank, name)

    def _of_name(self, text: str, rank: int, name: Name) -> Wait:
        program, at = self.programs[rank], self.at[rank]
        plan, table, effects = program.plan, program.table, program.effects
        recv = next((e for e in effects if isinstance(e, Recv) and e.value == name), None)
        if recv is not None and recv in effects[:at]:
            queue = self.queues.get((rank, recv.rank), deque([recv]))
            if queue[0] == recv or recv not in queue:
                return self._of_post(rank, recv, f"{text}, which", "sends")
            where = f"stands behind {queue[0]} in its queue to rank {recv.rank}"
            return Wait(f"{text}, whose receive {where}", (rank, recv.rank))
        if recv is not None:
            return Wait(f"{text}, which it receives only later: post {recv} first", rank)
        source = table.producer(name, plan)
        if source is not None and source != rank:
            value: Any = name
            return Wait(f"{text} from rank {source}: post {Recv(value, source)} first", None)
        for later in reversed(effects[at:]):
            if name in table.gives(later, plan):
                how = "which it gives itself" if later is effects[at] else f"which only {later} gives: run that first"
                return Wait(f"{text}, {how}", rank)
        return Wait(f"{text}, which is not there, and which no later effect gives", None)

    def _of_head(self, rank: int, peer: int) -> Wait:
        post = self.queues[rank, peer][0]
        other = "receive" if isinstance(post, Send) else "send"
        text = f"{post}, at the head of rank {rank}'s queue to rank {peer}, waits for its {other}, which"
        return self._of_post(rank, post, text, "posts")

    def _of_post(self, rank: int, post: Send | Recv, text: str, verb: str) -> Wait:
        """Return what a post waits for: the post of the other half, or until that half is at the head of its queue."""
        peer = post.rank
        half = Recv(post.value, rank) if isinstance(post, Send) else Send(post.value, rank)
        queue = self.queues.get((peer, rank), deque())
        if half in queue:
            place = f"stands behind {queue[0]} in rank {peer}'s queue to rank {rank}"
            return Wait(f"{text} {f'rank {peer} has sent, but it ' if verb == 'sends' else ''}{place}", (peer, rank))
        if half not in self.programs[peer].effects[self.at[peer] :]:
            return Wait(f"{text} rank {peer} never {verb}", None)
        front = self._front(peer)
        when = f"has yet to {verb.removesuffix('s')}" if front == half else f"{verb} only after {front}"
        return Wait(f"{text} rank {peer} {when}", peer)

    def _front(self, rank: int) -> Effect:
        return self.programs[rank].effects[self.at[rank]]

    def _queues(self) -> dict[tuple[int, int], deque[Send | Recv]]:
        """Return the posts of each rank to each peer whose other half is not posted yet."""
        queues: dict[tuple[int, int], deque[Send | Recv]] = {}
        for rank, program in self.programs.items():
            for effect in program.effects[: self.at[rank]]:
                if isinstance(effect, Send | Recv):
                    queues.setdefault((rank, effect.rank), deque()).append(effect)
        for (rank, peer), posts in queues.items():
            other = queues.get((peer, rank), deque())
            while posts and other and type(posts[0]) is not type(other[0]):
                posts.popleft()
                other.popleft()
        return queues
