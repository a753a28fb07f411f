"""Words on the V placement, played against each other: passes and weight gradients fill their gaps. No torch.

Ranks choose in the order of time, then of ranks: when they become free and, while free, when an input arrives, with the
knowledge of all that has started before. Transfers on one edge queue, as in the simulator. Invariants:

- The words of all ranks come from one timeline, so ranks that follow their words never deadlock. A pass runs before its
  turn only when all its inputs are there.
- After its next pass, and after all passes of its word, a rank is within the limit if it runs its weight gradients in
  time; so it never waits for memory that no pass frees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from fpipe.schedules.v_blocks import FA, FB, IA, IB, WA, WB, passes
from fpipe.schedules.work import FORWARD, INPUT, WEIGHT, Hop, Words, Work

FOUR = (1 << FA) | (1 << FB) | (1 << IB) | (1 << IA)


class Fill(NamedTuple):
    """The use of the time in which the next pass of a rank's word can't run.

    Args:
        reorder: run a later pass of the word that can.
        patience: run no other pass, a weight gradient for example, if the next pass is known to become ready within
            this part of the other pass's time.
    """

    reorder: bool = False
    patience: float = 0.0


KEEP = Fill()


@dataclass(slots=True)
class _Rank:
    """One rank that follows its word.

    Args:
        passes: of the work, by kind.
        left: the kinds that are left of the word, backwards.
        spare: for how much longer the rank may wait.
        adds_weights: whether the word has no weight gradients.
        late: those to run then, of which `taken` have run.
        done: by kind, how many microbatches have started.
        live: chunks with a backward, between the start of their forward and that of their weight gradient.
        order: the kinds that have run.
    """

    passes: list[int]
    left: list[int]
    spare: float
    adds_weights: bool
    late: list[int] = field(default_factory=list)
    taken: int = 0
    done: list[int] = field(default_factory=lambda: [0] * 6)
    live: int = 0
    began: float = -1.0
    free: float = 0.0
    order: list[int] = field(default_factory=list)


class Squeezing:
    """Plays words of one work. What does not depend on the words is computed once."""

    def __init__(self, work: Work) -> None:
        plan, m = work.plan, work.plan.microbatches
        self.work, self.microbatches = work, m
        self.busy = [work.total(rank) for rank in range(plan.ranks)]
        self.passes = [passes(rank, plan) for rank in range(plan.ranks)]
        change = {FORWARD: 1, INPUT: 0, WEIGHT: -1}
        grows = [change[kind] * plan.is_differentiated(s) for kind in change for s in range(plan.stages)]
        self.grows = [[grows[at] for at in each] for each in self.passes]
        self.times = [time * scale for time in work.times for scale in work.scale]  # by slot: pass, then microbatch
        hops = [[hop for hop in each if self._delays(at, hop)] for at, (each,) in enumerate(work.hops)]
        inputs = [0] * (WEIGHT * plan.stages)
        for hop in (hop for each in hops for hop in each):
            inputs[hop.target] += 1
        self.missing = [count for count in inputs for _ in range(m)]
        edges = {edge: n for n, edge in enumerate(dict.fromkeys(hop.edge for each in hops for hop in each if hop.edge))}
        self.edges = len(edges)
        # The slot of the reader's first microbatch, its rank, the edge or -1, the time on it, the latency.
        self.hops = [
            [(hop.target * m, hop.rank, edges[hop.edge] if hop.edge else -1, hop.wire, hop.latency) for hop in each]
            for each in hops
        ]

    def _delays(self, at: int, hop: Hop) -> bool:
        """Whether the reader may wait for this; it never does for a pass before another input, or on its own rank."""
        stages = self.work.plan.stages
        is_own = hop.target == INPUT * stages + at
        return hop.target < WEIGHT * stages and not (is_own and self.work.inputs[hop.target][0] > 1)

    def squeeze(self, words: Words, limit: float, fill: Fill = KEEP, most: float = inf) -> tuple[float, Words]:
        """Return the cost (the largest span of a rank), and the words with the passes that fill their gaps.

        Words without weight gradients get them where the rank would wait, or needs the room; others are kept. The cost
        is infinite if it exceeds `most`, or if ranks wait for each other or for memory.

        Args:
            limit: of chunks in flight on a rank.
        """
        play = _Play(limit, fill, self.microbatches, self.work.times, self.missing.copy(), [0.0] * len(self.missing))
        ranks = [
            _Rank(numbers, list(reversed(word)), most - busy, all(kind <= IA for kind in word))
            for numbers, word, busy in zip(self.passes, words, self.busy, strict=True)
        ]
        count, times, hops, sizes = self.microbatches, self.times, self.hops, self.work.sizes
        missing, arrived, sent = play.missing, play.arrived, [0.0] * self.edges
        agenda = [(0.0, rank) for rank in range(len(ranks))]
        while agenda:
            now, rank = heappop(agenda)
            own = ranks[rank]
            if now < own.free:
                continue
            numbers, kind, due = own.passes, -1, inf
            if own.left:
                kind = own.left[-1]
                m = own.done[kind]
                slot = numbers[kind] * count + m
                if kind > IA:
                    due = now if m < own.done[kind - 2] else inf
                elif not missing[slot]:
                    due = arrived[slot]
            if due <= now and (kind > FB or own.live < limit):
                own.left.pop()
            else:
                kind = play.instead(own, now, due)
            if kind < 0:
                continue
            m, at = own.done[kind], numbers[kind]
            own.done[kind] += 1
            own.live += self.grows[rank][kind]
            own.order.append(kind)
            if own.adds_weights and IB <= kind <= IA:
                own.late.append(kind + 2)
            if own.began < 0:
                own.began = now
            elif now > own.free:
                own.spare -= now - own.free
                if own.spare < 0:
                    return inf, []
            own.free = end = now + times[at * count + m]
            heappush(agenda, (end, rank))
            for first, reader, edge, wire, latency in hops[at]:
                arrival = end
                if edge >= 0:
                    leaves = sent[edge]
                    if leaves < end:
                        leaves = end
                    sent[edge] = leaves = leaves + wire * sizes[m]
                    arrival = leaves + latency
                    if arrival >= ranks[reader].free:
                        heappush(agenda, (arrival, reader))
                slot = first + m
                missing[slot] -= 1
                if arrival > arrived[slot]:
                    arrived[slot] = arrival
        if any(own.left or own.taken < len(own.late) for own in ranks):
            return inf, []
        cost = max(own.free - own.began for own in ranks)
        return (cost, [own.order for own in ranks]) if cost <= most else (inf, [])


@dataclass(slots=True)
class _Play:
    """The state by which a rank chooses a later pass while its next one can't run yet.

    Args:
        times: of passes.
        missing, arrived: by slot, inputs that have not been sent, and when the last one that has been arrives.
    """

    limit: float
    fill: Fill
    microbatches: int
    times: list[float]
    missing: list[int]
    arrived: list[float]

    def instead(self, own: _Rank, now: float, due: float) -> int:
        """Return the kind of pass that runs while the next one can't, taken off the word or the late ones; or -1."""
        if now < due and own.left and self.fill.reorder:
            kind = self._early(own, now, due)
            if kind >= 0:
                at = len(own.left) - 1
                while own.left[at] != kind:
                    at -= 1
                return own.left.pop(at)
        if own.taken == len(own.late):
            return -1
        kind = own.late[own.taken]
        if now < due < now + self._patience(own, kind):
            return -1
        own.taken += 1
        return kind

    def _patience(self, own: _Rank, kind: int) -> float:
        """Return within which time the next pass is waited for, rather than to run one of this kind."""
        return self.fill.patience * self.times[own.passes[kind]]

    def _early(self, own: _Rank, now: float, due: float) -> int:
        """Return a later pass of the word that can run, if it takes no memory that the passes before it need; or -1."""
        done, limit = own.done, self.limit
        can = (done[WB] < done[IB]) << WB | (done[WA] < done[IA]) << WA
        for kind in (FA, FB, IB, IA) if own.live < limit else (IB, IA):
            m = done[kind]
            slot = own.passes[kind] * self.microbatches + m
            if m < self.microbatches and not self.missing[slot] and self.arrived[slot] <= now:
                can |= 1 << kind
        if not can:
            return -1
        balance, peak, seen = done[FA] + done[FB] - done[IB] - done[IA], 0, 0
        for kind in reversed(own.left):
            if not seen >> kind & 1:
                seen |= 1 << kind
                room = kind > FB or peak < limit
                if can >> kind & 1 and room and due >= now + self._patience(own, kind):
                    return kind
                if seen == FOUR:
                    break
            balance += 1 if kind < IB else -1
            if balance > peak:
                peak = balance
        return -1
