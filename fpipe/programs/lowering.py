"""From compute order to complete programs, as passes over all ranks' programs. No torch.

Each pass is a plain function `programs -> programs`; `lower` composes them. What holds after it:

- a value is sent right after the last effect that gives it, once to each rank that reads it;
- on each directed edge, receives are posted in the order of the sends, at the latest before first use;
- a stage's `Reduce` follows its last weight gradient.

A schedule that yields its own sends and receives keeps them as they are. Whether the programs are right, the
verifier says: of a wrong schedule the passes make what they can.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fpipe.effects import (
    TABLE,
    Activation,
    Backward,
    BackwardWeight,
    Effect,
    Forward,
    Gradient,
    Overlap,
    Recv,
    Reduce,
    Send,
    Value,
    WeightGradient,
    parts,
)
from fpipe.errors import ScheduleError
from fpipe.plan import Plan, Schedule
from fpipe.programs.interning import COMPUTE, Key, Numbering, check_names
from fpipe.programs.program import Program, Programs, plan_of
from fpipe.programs.transports import Transport

Sent = dict[tuple[int, int], deque[Value]]  # on each directed edge, the values that are not received yet


def lower(schedule: Schedule, plan: Plan, *, depth: int | None = None, transport: str = "async") -> Programs:
    """Complete programs of all ranks, as the schedule has them; `fpipe.verify` says whether they are right.

    Args:
        schedule: `(rank, plan) -> iterator of effects`, in compute order.
        depth: receives posted beyond the next one used; 2 by default, 4 where stages are skipped.
        transport: what receives are placed for. On `async`, fpipe's own, a receive that is posted early keeps nothing
            waiting; for the others of `fpipe.verify` it stands where its send is made, and there is no depth.

    Raises:
        ScheduleError: what is yielded is no effect, or names a stage, microbatch or rank that the plan lacks.

    >>> from fpipe import Placement, Plan, schedules
    >>> lower(schedules.gpipe, Plan(Placement.loop(2), 1))[1].effects[:3]
    (Recv(value=Activation(stage=0, microbatch=0), rank=0), Forward(stage=1, microbatch=0), \
Backward(stage=1, microbatch=0))
    """
    early = Transport.named(transport) == Transport()
    programs = collect(schedule, plan)
    if not any(type(e) is Send or type(e) is Recv for program in programs.values() for e in program):
        programs = prefetch(communicate(programs), depth) if early else meet(programs)
    return reduce(exchange(programs))


def collect(schedule: Schedule, plan: Plan) -> Programs:
    """What the schedule yields on each rank, as it stands."""
    programs = {}
    for rank in range(plan.ranks):
        yielded = schedule(rank, plan)
        if not isinstance(yielded, Iterable):
            raise ScheduleError(
                f"on rank {rank} the schedule returns {yielded!r}: it yields effects, or returns a list"
            )
        effects = tuple(yielded)
        check_names(effects, rank, plan)
        programs[rank] = Program(plan, rank, effects)
    return programs


def maker(value: Value, plan: Plan) -> int:
    """The rank that makes a value."""
    match value:
        case Activation(stage, microbatch):
            return plan.rank_of(stage, microbatch)
        case Gradient(_, consumer, microbatch):
            return plan.rank_of(consumer, microbatch)
        case WeightGradient(_, rank):
            return rank


def readers(value: Value, plan: Plan) -> tuple[int, ...]:
    """The other ranks that read a value, lowest first."""
    match value:
        case Activation(stage, microbatch):
            found = {plan.rank_of(c, microbatch) for c in plan.consumers(stage)}
        case Gradient(stage, _, microbatch):
            found = {plan.rank_of(stage, microbatch)}
        case WeightGradient(stage, _):
            found = {rank for _, rank in plan.sharers(stage)}
    return tuple(sorted(found - {maker(value, plan)}))


def communicate(programs: Programs) -> Programs:
    """Add each `Send` after its producer, and each `Recv` before its first use, in the order of the sends."""
    wires = _Wires(plan_of(programs))
    sent: Sent = defaultdict(deque)
    sending = {rank: list(_with_sends(program, wires, sent)) for rank, program in programs.items()}
    return {
        rank: replace(program, effects=tuple(_with_receives(rank, sending.pop(rank), wires, sent)))
        for rank, program in programs.items()
    }


def _with_sends(program: Program, wires: _Wires, sent: Sent) -> Iterator[Effect]:
    for effect in program:
        yield effect
        for value, peers in wires.out(effect):
            for peer in peers:
                if peer != program.rank:
                    sent[program.rank, peer].append(value)
                    yield Send(value, peer)


def _with_receives(rank: int, effects: list[Effect], wires: _Wires, sent: Sent) -> Iterator[Effect]:
    received: set[int] = set()
    for effect in effects:
        for number, source in wires.into(effect):
            channel = sent[source, rank] if source != rank else ()
            while channel and number not in received:
                value = channel.popleft()
                received.add(wires.numbering.number(value))
                yield Recv(value, source)
        yield effect


class _Wires:
    """What effects put out for other ranks, and what they take in; looked up once for all microbatches alike."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.numbering = plan, Numbering(plan)
        self._out: dict[Key, list[tuple[Callable[[int], Value], tuple[int, ...]]]] = {}
        self._into: dict[Key, list[tuple[int, int]]] = {}

    def out(self, effect: Any) -> list[tuple[Value, tuple[int, ...]]]:
        """The values that an effect gives, each with its readers on other ranks."""
        kind = type(effect)
        if kind in COMPUTE:
            key, m = self.numbering.key(effect), effect.microbatch
            if key not in self._out:
                self._out[key] = [(_like(value), peers) for value, peers in self._find_out(effect)]
            return [(make(m), peers) for make, peers in self._out[key]]
        if kind is Overlap:
            return [wire for part in parts(effect) for wire in self.out(part)]
        return [] if kind is Recv else self._find_out(effect)

    def into(self, effect: Any) -> list[tuple[int, int]]:
        """The numbers of the values that an effect needs, each with the rank that makes it."""
        kind = type(effect)
        if kind in COMPUTE:
            key, m = self.numbering.key(effect), effect.microbatch
            if key not in self._into:
                self._into[key] = [(number - m, source) for number, source in self._find_into(effect)]
            return [(number + m, source) for number, source in self._into[key]]
        if kind is Overlap:
            return [wire for part in parts(effect) for wire in self.into(part)]
        return [] if kind is Send else self._find_into(effect)

    def _find_out(self, effect: Effect) -> list[tuple[Value, tuple[int, ...]]]:
        given = TABLE[type(effect)].gives(effect, self.plan)
        return [(v, readers(v, self.plan)) for v in given if isinstance(v, Activation | Gradient)]

    def _find_into(self, effect: Effect) -> list[tuple[int, int]]:
        needed = TABLE[type(effect)].needs(effect, self.plan)
        number = self.numbering.number
        return [(number(v), maker(v, self.plan)) for v in needed if isinstance(v, Activation | Gradient)]


def _like(value: Any) -> Callable[[int], Value]:
    """Microbatch -> the value that is to it what this one is to its own."""
    if isinstance(value, Activation):
        return partial(Activation, value.stage)
    return partial(Gradient, value.stage, value.consumer)


def prefetch(programs: Programs, depth: int | None = None) -> Programs:
    """Post receives earlier: up to `depth` beyond the next one used (2; 4 where stages are skipped)."""
    if depth is not None and not (isinstance(depth, int) and depth >= 0):
        raise ScheduleError(f"the prefetch depth must be a whole number of at least 0, not {depth!r}")
    plan = plan_of(programs)
    if depth is None:
        depth = 4 if plan.edges.skips else 2
    numbering = Numbering(plan)
    return {rank: replace(p, effects=tuple(_prefetched(p, depth, numbering))) for rank, p in programs.items()}


def _prefetched(program: Program, depth: int, numbering: Numbering) -> Iterator[Effect]:
    receives = deque(e for e in program if isinstance(e, Recv))
    early = 0  # how many are posted ahead of their place
    waiting: set[int] = set()  # posted, not used yet
    for effect in program:
        if isinstance(effect, Send):
            yield effect
        elif isinstance(effect, Recv):
            if early:
                early -= 1
            else:
                waiting.add(numbering.number(effect.value))
                yield receives.popleft()
        else:
            while receives and len(waiting) <= depth:
                early += 1
                waiting.add(numbering.number(receives[0].value))
                yield receives.popleft()
            yield effect
            (needs, _, _), shift = numbering.of(effect)
            waiting.difference_update([number + shift for number in needs])


def meet(programs: Programs) -> Programs:
    """Add each `Send` after its producer, and its `Recv` on the other rank at that moment: every transport runs it.

    Where the ranks wait for each other for ever there is no such moment, and `communicate` does.
    """
    rows = in_step({rank: program.effects for rank, program in programs.items()}, plan_of(programs))
    if rows is None:
        return communicate(programs)
    return {rank: replace(program, effects=tuple(rows[rank])) for rank, program in programs.items()}


def in_step(rows: Mapping[int, Sequence[Any]], plan: Plan) -> dict[int, list[Any]] | None:
    """The rows with their sends and receives, as ranks take turns, an effect each. What is no effect keeps its place.

    None where no rank can go on.
    """
    left = {rank: deque(row) for rank, row in rows.items()}
    done: dict[int, list[Any]] = {rank: [] for rank in rows}
    here: dict[int, set[object]] = {rank: set() for rank in rows}
    moved = True
    while moved:
        moved = False
        for rank, row in left.items():
            known = row and TABLE.get(type(row[0]))
            if not row or (known and not here[rank].issuperset(known.needs(row[0], plan))):
                continue
            moved = True
            item = row.popleft()
            done[rank].append(item)
            made = known.gives(item, plan) if known else ()
            here[rank].update(made)
            for value in (name for name in made if isinstance(name, Activation | Gradient)):
                for peer in readers(value, plan):
                    done[rank].append(Send(value, peer))
                    done[peer].append(Recv(value, rank))
                    here[peer].add(value)
    return None if any(left.values()) else done


def exchange(programs: Programs) -> Programs:
    """Add the sends and receives of the sums that copies and ties share, once they are final.

    At the end of the programs, or before a stage's own `Reduce`, so that it fits behind any communication; and in one
    order over all ranks, so that every transport runs it.
    """
    plan = plan_of(programs)
    if all(len(plan.sharers(stage)) == 1 for stage in range(plan.stages)):
        return programs
    posts = (e for program in programs.values() for e in program if type(e) is Send or type(e) is Recv)
    if any(isinstance(post.value, WeightGradient) for post in posts):
        return programs
    return {rank: replace(p, effects=tuple(_with_exchange(p))) for rank, p in programs.items()}


def _with_exchange(program: Program) -> list[Effect]:
    plan, rank, effects = program.plan, program.rank, list(program)
    shared = [stage for stage in _last_weights(program) if len(plan.sharers(stage)) > 1]
    posts: list[Effect] = []
    for value in (WeightGradient(*sum_) for sum_ in sorted({s for stage in shared for s in plan.sharers(stage)})):
        peers = readers(value, plan)
        if value.rank == rank:
            posts += [Send(value, peer) for peer in peers]
        elif rank in peers:
            posts.append(Recv(value, value.rank))
    reduced = (at for at, e in enumerate(effects) if isinstance(e, Reduce) and e.stage in shared)
    at = next(reduced, len(effects))
    return [*effects[:at], *posts, *effects[at:]]


def reduce(programs: Programs) -> Programs:
    """Add `Reduce` after each stage's last weight gradient; of a stage that shares its sums, at the end."""
    if any(type(e) is Reduce for program in programs.values() for e in program):
        return programs
    return {rank: replace(p, effects=tuple(_with_reduce(p))) for rank, p in programs.items()}


def _with_reduce(program: Program) -> list[Effect]:
    plan, effects, last = program.plan, list(program), _last_weights(program)
    shared = [stage for stage in sorted(last) if len(plan.sharers(stage)) > 1]
    for stage in sorted(set(last) - set(shared), key=last.__getitem__, reverse=True):
        at = last[stage] + 1
        while at < len(effects) and isinstance(effects[at], Send):
            at += 1
        effects.insert(at, Reduce(stage))
    return [*effects, *map(Reduce, shared)]


def _last_weights(program: Program) -> dict[int, int]:
    """Where each stage's last weight gradient stands."""
    last: dict[int, int] = {}
    held = len(program.plan.stages_on(program.rank))
    for at in range(len(program) - 1, -1, -1):
        for e in parts(program.effects[at]):
            if isinstance(e, Backward | BackwardWeight):
                last.setdefault(e.stage, at)
        if len(last) == held:
            break
    return last


def forward_only(programs: Programs) -> Programs:
    """Drop what is backward: gradients, their sends and receives, and reduction."""
    return {rank: replace(p, effects=tuple(_forward(p))) for rank, p in programs.items()}


def _forward(program: Program) -> Iterator[Effect]:
    for effect in program:
        for e in parts(effect):
            if isinstance(e, Forward) or (isinstance(e, Send | Recv) and isinstance(e.value, Activation)):
                yield e


def wavefront(rank: int, plan: Plan) -> Iterator[Effect]:
    """The forward-only schedule: each microbatch enters as soon as it can; legal for every DAG and placement."""
    runs = [(m + s, s, m) for s in plan.stages_on(rank) for m in plan.microbatches_of(s, rank)]
    yield from (Forward(s, m) for _, s, m in sorted(runs, key=lambda run: (run[0], -run[1])))
