"""Replay a timeline with other lengths: its effects in its order, each as soon as what it waits for is there. No torch.

A replay is a longest path. A node is a compute or host effect, the arrival of a received value, or a gather or scatter;
its time is the largest, over the nodes that it waits for, of their time and a lag, and its own length after that:

- an effect follows the one before it on its rank, and the arrivals that it needs. The lags are the host's time before
  it began to wait and after that: where it waited, the first is at most what the rank's other effects show;
- an arrival follows the posts of its send and its receive, whose lags are the host's time since the effect before them;
  where bytes queue on an edge, also the arrival before it;
- gathers, and scatters, follow each other.

The length of a transfer that something waited for was measured. One that was there at its first use has only a bound:
it takes the median of its edge if that is less. Where nothing waited for any of its edge, it takes the edge's least
bound, or the median over the other edges if that is less. Gathers and scatters likewise, by stage, and without others.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median, median_low
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpipe.effects import Name, Send
from fpipe.errors import ScheduleError
from fpipe.tables import LANES
from fpipe.timelines.spans import Spans
from fpipe.timelines.timeline import Timeline

Floats = NDArray[np.float64]
_ROOM = 1 << 25  # numbers of weights at a time
_NEVER = -np.inf


class Lengths(NamedTuple):
    """What a replay adds up.

    Args:
        own: of each node.
        lags: of each node to each that it waits for.
        rest: what else an arrival waits for after its receive's post, or after the arrival before it, less its own.
        host: whether the host takes time.
    """

    own: Floats
    lags: Floats
    rest: Floats
    host: bool = True

    @property
    def weights(self) -> Floats:
        return self.own[:, None] + self.lags + self.rest


@dataclass(eq=False)
class _Rank:
    """What is known of a rank while its effects are gone through in order."""

    begin: float  # when it began, on the timeline's clock
    last: int = -1  # the node of its last effect
    held: list[int] = field(default_factory=list)  # nodes that its next effect waits for too
    late: dict[Name, int] = field(default_factory=dict)
    lanes: dict[str, int] = field(default_factory=dict)


class Replay:
    """The order of a timeline and its lengths.

    Args:
        timeline: whose effects are replayed; ranks that are not recorded have none.

    Raises:
        ScheduleError: the effects wait for each other in a cycle.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.spans, table = timeline, timeline.spans, timeline.table
        spans = self.spans
        rows = {kind: table.effects[kind] for kind in set(map(type, spans.effects))}
        self.tracks = [rows[type(effect)].track for effect in spans.effects]
        self.waited_for = set(spans.waited)
        self.node_of = array("q", [-1]) * len(spans)  # of each span but sends
        self.posts = array("q", [-1]) * len(spans)  # the node before the post of a send or a receive
        self.offsets = array("d", bytes(8 * len(spans)))  # from its end to the post, or from 0
        self.span_of: list[int] = []
        self._before: list[list[tuple[int, float, float]]] = []  # node, lag, rest
        self._own: list[float] = []
        self._edges, self._stages = _Usual(alike=True), _Usual(alike=False)
        for rank in range(timeline.plan.ranks):
            self._learn(rank)
        for rank in range(timeline.plan.ranks):
            self._walk(rank)
        self._link_queues()
        self._settle()

    # What follows what

    def _learn(self, rank: int) -> None:
        """Number a rank's nodes, and collect the lengths of its transfers, gathers and scatters, known and bounds."""
        spans = self.spans
        for at in spans.of(rank):
            track = self.tracks[at]
            effect: Any = spans.effects[at]
            if track == "receive" and (sent := spans.waited[at]) >= 0 and not self._queued(sent):
                known = at in self.waited_for and spans.starts[at] <= spans.starts[sent]
                self._edges.add((effect.rank, rank), spans.ends[sent] - spans.starts[sent], known)
            elif track in LANES:
                key = track, getattr(effect, "stage", 0)
                self._stages.add(key, spans.ends[at] - spans.starts[at], at in self.waited_for)
            if track != "send":
                self.node_of[at] = len(self.span_of)
                self.span_of.append(at)
                self._before.append([])
                self._own.append(0.0)

    def _queued(self, sent: int) -> bool:
        """Return whether a send waited for the bytes of another."""
        waited = self.spans.waited[sent]
        return waited >= 0 and isinstance(self.spans.effects[waited], Send)

    def _walk(self, rank: int) -> None:
        spans, plan, table = self.spans, self.timeline.plan, self.timeline.table
        own = spans.of(rank)
        if not own:
            return
        self._host = host_time(self.timeline, rank)
        state = _Rank(min(spans.starts[at] for at in own))
        for at in own:
            track, effect = self.tracks[at], spans.effects[at]
            if track == "send":
                held = [state.late[name] for name in table.needs(effect, plan) if name in state.late]
                state.held += [node for node in held if self.tracks[self.span_of[node]] in LANES]
                self._post(at, state)
            elif track == "receive":
                self._post(at, state)
                self._receive(at, rank)
            elif track in LANES:
                self._lane(at, track, state)
            else:
                self._effect(at, state)
            if track in ("receive", *LANES):
                state.late.update(dict.fromkeys(table.gives(effect, plan), self.node_of[at]))

    def _post(self, at: int, state: _Rank) -> None:
        """Note what a send or a receive is posted after."""
        nodes = [node for node in (state.last, *state.held) if node >= 0]
        end, before = max([(self.spans.ends[self.span_of[node]], node) for node in nodes], default=(0.0, -1))
        self.posts[at], self.offsets[at] = before, self.spans.starts[at] - end

    def _receive(self, at: int, rank: int) -> None:
        """Add an arrival; the post of its send may come later."""
        spans, node = self.spans, self.node_of[at]
        sent = spans.waited[at]
        if sent < 0 or not isinstance(spans.effects[sent], Send):  # its sender is not recorded
            self._before[node].append((-1, spans.ends[at], 0.0))
            return
        took, early = spans.ends[sent] - spans.starts[sent], spans.starts[at] <= spans.starts[sent]
        effect: Any = spans.effects[at]
        known, edge = at in self.waited_for, (effect.rank, rank)
        if not (known and early) or self._queued(sent):
            took = self._edges.tightest(edge, took)
        later = max(0.0, spans.ends[at] - spans.starts[at]) if known and not early else 0.0
        self._own[node] = took
        self._before[node] += [(-2 - sent, 0.0, 0.0), (-2 - at, 0.0, later - took)]

    def _lane(self, at: int, track: str, state: _Rank) -> None:
        spans, node, effect = self.spans, self.node_of[at], self.spans.effects[at]
        took = spans.ends[at] - spans.starts[at]
        if at not in self.waited_for:
            took = self._stages.tightest((track, getattr(effect, "stage", 0)), took)
        waited = spans.waited[at]
        follows = waited >= 0 and self.tracks[waited] in LANES
        end = spans.ends[self.span_of[state.last]] if state.last >= 0 else 0.0
        begin = spans.starts[at] if state.last < 0 or not follows else end
        self._own[node] = took
        self._before[node].append((state.last, max(0.0, begin - end) if state.last >= 0 else begin, 0.0))
        if track in state.lanes:
            self._before[node].append((state.lanes[track], 0.0, 0.0))
        state.lanes[track] = node

    def _effect(self, at: int, state: _Rank) -> None:
        spans, node, effect = self.spans, self.node_of[at], self.spans.effects[at]
        start, waited = spans.starts[at], spans.waited[at]
        ended = spans.ends[self.span_of[state.last]] if state.last >= 0 else state.begin
        arrived = spans.ends[waited] if waited >= 0 else ended
        waits = waited >= 0 and self.tracks[waited] in ("receive", *LANES) and arrived > ended
        after = max(0.0, start - arrived) if waits else 0.0
        before = min(max(0.0, arrived - ended), self._host) if waits else start - ended
        first = ended if state.last < 0 else 0.0
        self._own[node] = spans.ends[at] - start
        needs = self.timeline.table.needs(effect, self.timeline.plan)
        late = {state.late[name] for name in needs if name in state.late} | set(state.held)
        self._before[node].append((state.last, first + before + after, 0.0))
        self._before[node] += [(giver, after, 0.0) for giver in sorted(late)]
        state.held = []
        state.last = node

    def _link_queues(self) -> None:
        """Replace posts by the nodes before them, and add the arrivals that others queue behind."""
        spans = self.spans
        received = {spans.waited[at]: at for at in self.span_of if self.tracks[at] == "receive"}
        for node, before in enumerate(self._before):
            for place, (giver, _, rest) in enumerate(before):
                if giver < -1:
                    post = -2 - giver
                    before[place] = self.posts[post], self.offsets[post], rest
            at = self.span_of[node]
            if self.tracks[at] == "receive" and (sent := spans.waited[at]) >= 0 and self._queued(sent):
                other = spans.waited[sent]
                if other in received:
                    service = spans.ends[sent] - spans.ends[other]
                    before.append((self.node_of[received[other]], 0.0, service - self._own[node]))

    def _settle(self) -> None:
        """Order the nodes so that each comes after all that it waits for, in levels."""
        count, width = len(self._before), max(map(len, self._before), default=1)
        givers = np.full((count, width), count + 1)  # one that was never there
        lags, rest = np.zeros((count, width)), np.zeros((count, width))
        followers: list[list[int]] = [[] for _ in range(count)]
        open_ = [0] * count
        for node, before in enumerate(self._before):
            for place, (giver, lag, more) in enumerate(before):
                givers[node, place] = giver if giver >= 0 else count  # one that was there at 0
                lags[node, place], rest[node, place] = lag, more
                if giver >= 0:
                    followers[giver].append(node)
                    open_[node] += 1
        levels, ready = [0] * count, [node for node in range(count) if not open_[node]]
        for node in ready:  # grows
            for follower in followers[node]:
                levels[follower] = max(levels[follower], levels[node] + 1)
                open_[follower] -= 1
                if not open_[follower]:
                    ready.append(follower)
        if len(ready) < count:
            raise ScheduleError("the effects of this timeline wait for each other in a cycle: it can't be replayed")
        self.order = np.argsort(np.asarray(levels), kind="stable")
        to_order = np.arange(count + 2)
        to_order[self.order] = np.arange(count)
        self._sorted = to_order[givers[self.order]]
        self._bounds = np.searchsorted(np.asarray(levels)[self.order], np.arange(max(levels, default=-1) + 2)).tolist()
        self._place, self._givers = to_order, givers
        self.measured = Lengths(np.asarray(self._own), lags, rest)

    # Times

    @property
    def own_ranks(self) -> NDArray[np.int64]:
        """The rank of each node."""
        return np.searchsorted(np.asarray(self.spans.first), np.asarray(self.span_of), side="right") - 1

    def idle_host(self) -> Lengths:
        """Return the lengths without the host's time: between effects of a rank, and in its host effects."""
        own, lags, rest, _ = self.measured
        works = np.array([self.tracks[at] != "host" for at in self.span_of], bool)
        return Lengths(own * works, np.where(self._givers == len(own), lags, 0.0), rest, host=False)

    def without(self, nodes: NDArray[np.bool_]) -> Lengths:
        """Return the lengths with none of some transfers, gathers or scatters."""
        own, lags, rest, _ = self.measured
        return Lengths(np.where(nodes, 0.0, own), lags, np.where(nodes[:, None], 0.0, rest))

    def makespans(self, scenarios: Sequence[Lengths]) -> list[float]:
        """Return the makespan of each scenario."""
        each = max(1, _ROOM // max(1, self.measured.lags.size))
        makespans: list[float] = []
        for begin in range(0, len(scenarios), each):
            some = scenarios[begin : begin + each]
            times = self._times(some)
            own = np.stack([one.own for one in some], axis=1)
            starts = (times[self._place[self._firsts]] - own[self._firsts]).min(axis=0)
            makespans += (times[self._place[self._lasts]].max(axis=0) - starts).tolist()
        return makespans

    def _times(self, scenarios: Sequence[Lengths]) -> Floats:
        """Return the time of each node in each scenario, in the order of `order`."""
        count = len(self.order)
        weights = np.stack([one.weights[self.order] for one in scenarios], axis=2)
        times = np.empty((count + 2, len(scenarios)))
        times[count], times[count + 1] = 0.0, _NEVER
        for begin, end in zip(self._bounds, self._bounds[1:], strict=False):
            times[begin:end] = (times[self._sorted[begin:end]] + weights[begin:end]).max(axis=1)
        return times

    @cached_property
    def _firsts(self) -> list[int]:
        """The nodes with which ranks begin: their first compute, or the gathers if it waited for one."""
        nodes = list[int]()
        for rank in range(self.timeline.plan.ranks):
            computes = [at for at in self.spans.of(rank) if self.tracks[at] == "compute"]
            if computes:
                waited = self.spans.waited[computes[0]]
                gathers = [at for at in self.spans.of(rank) if self.tracks[at] == "gather"]
                begin = gathers if waited >= 0 and self.tracks[waited] == "gather" else computes[:1]
                nodes += [self.node_of[at] for at in begin]
        return nodes

    @cached_property
    def _lasts(self) -> list[int]:
        nodes = list[int]()
        for rank in range(self.timeline.plan.ranks):
            of_rank = self.spans.of(rank)
            nodes += [self.node_of[at] for at in of_rank if self.tracks[at] == "scatter"]
            nodes += [self.node_of[at] for at in self.timeline.sums[rank]]
            nodes += [self.node_of[at] for at in of_rank if self.tracks[at] == "compute"][-1:]
        return nodes

    def timeline_of(self, lengths: Lengths) -> Timeline:
        """Return the timeline of a scenario."""
        spans, count = self.spans, len(self.order)
        times = np.empty(count + 2)
        times[self.order] = self._times([lengths])[:count, 0]
        times[count], times[count + 1] = 0.0, _NEVER
        terms = times[self._givers] + lengths.weights
        givers = self._givers[np.arange(count), terms.argmax(axis=1)].tolist()
        starts, ends, waited = array("d", spans.starts), array("d", spans.ends), array("q", spans.waited)
        for at, track in enumerate(self.tracks):
            if track in ("send", "receive"):
                took, before = spans.ends[at] - spans.starts[at], self.posts[at]
                starts[at] = (float(times[before]) if before >= 0 else 0.0) + self.offsets[at] * (
                    lengths.host or before < 0
                )
                ends[at] = starts[at] + took
        for node, at in enumerate(self.span_of):
            ends[at] = max(float(times[node]), starts[at])
            if self.tracks[at] != "receive":
                ends[at] = float(times[node])
                starts[at] = ends[at] - float(lengths.own[node])
                waited[at] = self.span_of[givers[node]] if givers[node] < count else -1
            elif (sent := spans.waited[at]) >= 0:
                ends[sent] = max(starts[sent], float(times[node]))
        return Timeline(
            self.timeline.plan,
            Spans(spans.first, spans.effects, starts, ends, waited, spans.table),
            self.timeline.costs,
            self.timeline.steps,
        )


def host_time(timeline: Timeline, rank: int) -> float:
    """Return the median time between two effects of a rank of which the second waited for nothing else."""
    spans, rows, before = timeline.spans, timeline.table.effects, -1
    times = list[float]()
    for at in spans.of(rank):
        if rows[type(spans.effects[at])].track in ("compute", "host"):
            if before >= 0 and spans.waited[at] == before:
                times.append(spans.starts[at] - spans.ends[before])
            before = at
    return median(times) if times else 0.0


class _Usual:
    """The lengths of transfers by key: those that something waited for, and bounds of the others.

    Args:
        alike: one of a key of which only bounds are known takes no longer than those of other keys.
    """

    def __init__(self, alike: bool) -> None:
        self.alike = alike
        self.known, self.bounds = defaultdict[object, list[float]](list), defaultdict[object, list[float]](list)
        self._usual = dict[object, float]()

    def add(self, key: object, took: float, known: bool) -> None:
        (self.known if known else self.bounds)[key].append(took)

    def of(self, key: object) -> float | None:
        """Return the median of what is known of a key, else its least bound; None if there is neither."""
        if key not in self._usual and (self.known[key] or self.bounds[key]):
            self._usual[key] = median_low(self.known[key]) if self.known[key] else min(*self.bounds[key], self._others)
        return self._usual.get(key)

    @cached_property
    def _others(self) -> float:
        """The median of the keys of which something is known."""
        medians = [median_low(known) for known in self.known.values() if known]
        return median_low(medians) if self.alike and medians else np.inf

    def tightest(self, key: object, bound: float) -> float:
        usual = self.of(key)
        return bound if usual is None else min(bound, usual)
