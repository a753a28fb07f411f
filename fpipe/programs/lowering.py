"""Lower compute order to complete programs, by passes over the programs of all ranks. No torch.

Each pass is a plain function `programs -> programs`, and `lower` composes them. After it:

- where `plan.trained` is given, a stage's backward has the halves that exist, and no other;
- a value is sent right after the last effect that gives it, once to each rank that reads it;
- on each directed edge, receives are posted in the order of the sends, at the latest before first use;
- a stage's `Reduce` follows its last weight gradient; with replicas its `Scatter` does, and `Reduce` comes at the end;
- a schedule of `updating` has an `Update` of each trained stage after its `Reduce`;
- with `resident`, a stage's `Gather` and `Release` surround the effects that need its parameters;
- with `offload`, residuals are moved to the host and back, or recomputed, so that a rank's bytes keep to a limit.

Sends and receives that a schedule yields stay unchanged. The passes do not validate; the verifier does. For
an invalid schedule the result is best effort.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from fpipe.effects import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Effect,
    Forward,
    Gather,
    Overlap,
    Recv,
    Reduce,
    Scatter,
    Send,
    Update,
    Value,
    WeightGradient,
    parts,
)
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked, is_whole
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.plan import Plan, Schedule
from fpipe.programs.interning import Interning
from fpipe.programs.names import check_names
from fpipe.programs.program import Pass, Program, Programs, plan_of, table_of
from fpipe.programs.residence import Residence, residence
from fpipe.programs.residuals import MOVES
from fpipe.programs.schedules import as_schedule
from fpipe.programs.transports import Transport
from fpipe.programs.updates import Updating, update
from fpipe.tables import BACKWARD, INPUT, TABLE, WEIGHT, Table, halves, is_uniform

Sent = dict[tuple[int, int], deque[Value]]  # on each directed edge, the values that are not received yet


@fold_tracebacks
@checked("schedule", "plan", "transport", "depth")
def lower(
    schedule: Schedule | str,
    plan: Plan,
    *,
    depth: int | None = None,
    transport: str = "async",
    resident: Residence | int | None = None,
    offload: Pass | None = None,
    effects: Table = TABLE,
) -> Programs:
    """Return the complete programs of all ranks. `fpipe.verify` checks whether they are correct.

    Args:
        schedule: `(rank, plan) -> iterator of effects`, in compute order; or a name that `schedules.get` takes.
        depth: receives posted beyond the next one used; 2 by default, 4 where stages are skipped.
        transport: decides where receives are placed. With `async`, the transport of fpipe's handlers, a receive that is
            posted early blocks nothing. With the other transports of `fpipe.verify`, each receive is posted at the
            moment of its send, and `depth` is not used.
        resident: the number of stages whose parameters, sharded over the replicas, may be whole on a rank at a time,
            or a `Residence`, with a limit in bytes; None where parameters are not sharded. Not used where the schedule
            yields `Gather` itself.
        offload: what `fpipe.offload` returns, which moves residuals to the host or recomputes them, so that each rank
            keeps to a limit in bytes; None where all stay. Not used where the schedule does so itself.
        effects: the table of effects and values; `TABLE.extended({...})` for effects that you define.

    Raises:
        ScheduleError: the schedule yields a non-effect, or names a stage, microbatch or rank that the plan lacks; or it
            yields more effects than the plan has a use for, as one that never ends; or schedule or plan are none.

    >>> from fpipe import Placement, Plan, schedules
    >>> lower(schedules.gpipe, Plan(Placement.loop(2), 1))[1].effects[:3]
    (Recv(value=Activation(stage=0, microbatch=0), rank=0), Forward(stage=1, microbatch=0), \
Backward(stage=1, microbatch=0))
    """
    if offload is not None and (isinstance(offload, type) or not callable(offload)):
        raise ScheduleError(f"offload must be what fpipe.offload(limit_bytes, costs) returns, not {offload!r}")
    early = Transport.named(transport) == Transport()
    programs = existing_halves(collect(schedule, plan, effects))
    if not any(type(e) is Send or type(e) is Recv for program in programs.values() for e in program):
        programs = prefetch(communicate(programs), depth) if early else rendezvous(programs)
    programs = reduce(exchange_sums(scatter(programs)))
    programs = update(programs) if isinstance(schedule, Updating) else programs
    if resident is not None and not gathered(programs):
        programs = residence(programs, resident)
    return programs if offload is None else offload(programs)


def collect(schedule: Schedule | str, plan: Plan, table: Table = TABLE) -> Programs:
    """Return the effects that the schedule yields on each rank, unchanged."""
    schedule = as_schedule(schedule)
    if not isinstance(plan, Plan):
        raise ScheduleError(f"plan must be a Plan, as pipeline.plan(placement, microbatches) makes it, not {plan!r}")
    programs = {}
    for rank in range(plan.ranks):
        try:
            yielded = schedule(rank, plan)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # from inside of it
                raise
            raise ScheduleError(f"schedule must be a function of (rank, plan), not {schedule!r}: {error}") from None
        if not isinstance(yielded, Iterable):
            raise ScheduleError(
                f"on rank {rank} the schedule returns {yielded!r}: it yields effects, or returns a list"
            )
        limit = _most_effects(rank, plan, table)
        effects = tuple(islice(yielded, limit + 1))
        check_names(effects, rank, replace(plan, trained=None), table)  # a schedule may be written for all halves
        if len(effects) > limit:
            effect, count = Counter(effects).most_common(1)[0]
            own = "" if table is TABLE else ", else let each of your own effects do more"
            raise ScheduleError(
                f"rank {rank} yields more than {limit} effects, for which this plan has no use, among them {effect} "
                f"{count} times: if the schedule never ends, check the condition of its loop{own}"
            )
        programs[rank] = Program(plan, rank, effects, table)
    if stages := gathered(programs):
        plan = replace(plan, gathered=stages)
        return {rank: replace(program, plan=plan) for rank, program in programs.items()}
    return programs


OWN_EFFECTS = 256
"""The number of effects of the user's own that a schedule may yield for each effect that runs a stage."""


def _most_effects(rank: int, plan: Plan, table: Table) -> int:
    """Return a number of effects that no correct program of a rank exceeds."""
    total = 0
    for stage in plan.stages_on(rank):
        runs = len(plan.microbatches_of(stage, rank)) * plan.slices
        neighbours = len(plan.sources(stage)) + len(plan.consumers(stage))
        # A forward and two halves of a backward, each between a gather and a release; residuals to the host and back;
        # an activation and a gradient by each edge. Then the sums of gradients from and to each sharer, a scatter, a
        # reduce and an update. Each token goes on to the first stage.
        neighbours += plan.tokens > 1
        total += runs * plan.tokens * (3 * 3 + 3 + 2 * neighbours)
        total += 2 * len(plan.sharers(stage)) + 3
        if table is not TABLE:
            total += runs * 3 * OWN_EFFECTS
    return total


def existing_halves(programs: Programs) -> Programs:
    """Leave out the halves of backwards that the plan's stages do not have, and the effects on values that then lack.

    A `Backward` of a stage with one half becomes that half alone, and an `Overlap` without a backward its forward.
    """
    if plan_of(programs).trained is None:
        return programs
    return {rank: replace(p, effects=tuple(_existing(p.effects, p))) for rank, p in programs.items()}


def _existing(effects: Iterable[Any], program: Program) -> Iterator[Effect]:
    plan, table = program.plan, program.table
    for effect in effects:
        work, kind = table.effects[type(effect)].work, type(effect)
        if kind is Overlap:
            both = tuple(_existing(parts(effect), program))
            yield from both if len(both) < 2 else [Overlap(*both)]  # type: ignore[arg-type]
        elif work & BACKWARD:
            half = work & halves(effect.stage, plan)
            if kind is Backward and half in HALF:
                yield HALF[half](effect.stage, effect.microbatch, effect.slice)
            elif half:
                yield effect
        elif kind is Send or kind is Recv:
            if table.values[type(effect.value)].exists(effect.value, plan):
                yield effect
        elif kind in MOVES:
            if plan.is_differentiated(effect.stage):
                yield effect
        elif kind not in (Reduce, Scatter, Update) or plan.is_trained(effect.stage):
            yield effect


HALF: Mapping[int, type[BackwardInput | BackwardWeight]] = {INPUT: BackwardInput, WEIGHT: BackwardWeight}


def gathered(programs: Programs) -> frozenset[int]:
    """Return the stages that programs gather."""
    return frozenset(e.stage for program in programs.values() for e in program if type(e) is Gather)


def scatter(programs: Programs) -> Programs:
    """Add `Scatter` after each stage's last weight gradient, where there are replicas."""
    if plan_of(programs).replicas == 1 or any(type(e) is Scatter for program in programs.values() for e in program):
        return programs
    return {rank: replace(program, effects=tuple(_with_scatters(program))) for rank, program in programs.items()}


def _with_scatters(program: Program) -> list[Effect]:
    effects, last = list(program), _last_weights(program)
    for stage in sorted(last, key=last.__getitem__, reverse=True):
        effects.insert(after_sends(effects, last[stage]), Scatter(stage, program.rank))
    return effects


def after_sends(effects: Sequence[Effect], at: int) -> int:
    """Return the index after an effect and the sends of its values."""
    at += 1
    while at < len(effects) and isinstance(effects[at], Send):
        at += 1
    return at


def communicate(programs: Programs) -> Programs:
    """Add each `Send` after its producer, and each `Recv` before its first use, in the order of the sends."""
    routes = _Routes(Interning(plan_of(programs), table_of(programs)))
    sent: Sent = defaultdict(deque)
    sending = {rank: list(_with_sends(program, routes, sent)) for rank, program in programs.items()}
    return {
        rank: replace(program, effects=tuple(_with_receives(rank, sending.pop(rank), routes, sent)))
        for rank, program in programs.items()
    }


def _with_sends(program: Program, routes: _Routes, sent: Sent) -> Iterator[Effect]:
    interning, rank = routes.interning, program.rank
    for effect in program:
        yield effect
        for id_ in interning.ids(effect)[1]:
            source, peers = routes.of(id_)
            for peer in peers if source == rank else ():
                value = interning.name(id_)
                sent[rank, peer].append(value)
                yield Send(value, peer)


def _with_receives(rank: int, effects: list[Effect], routes: _Routes, sent: Sent) -> Iterator[Effect]:
    interning = routes.interning
    received: set[int] = set()
    for effect in effects:
        for id_ in interning.ids(effect)[0] if type(effect) is not Send else ():
            source, _ = routes.of(id_)
            if source is None or source == rank:
                continue
            channel = sent[source, rank]
            while channel and id_ not in received:
                value = channel.popleft()
                received.add(interning.id(value))
                yield Recv(value, source)
        yield effect


class _Routes:
    """The producer of a value and the ranks that receive it, by its id; None and none for one that is not sent.

    Looked up once for all microbatches of a block if the columns are uniform.
    """

    def __init__(self, interning: Interning) -> None:
        self.interning = interning
        self._blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def of(self, id_: int) -> tuple[int | None, tuple[int, ...]]:
        block = id_ // self.interning.block_size
        if block in self._blocks:
            return self._blocks[block]
        value, table, plan = self.interning.name(id_), self.interning.table, self.interning.plan
        travels, row = table.travels(value), table.values[type(value)]
        route = (table.producer(value, plan), table.readers(value, plan)) if travels else (None, ())
        if not travels or (is_uniform(row.producer) and is_uniform(row.readers)):
            self._blocks[block] = route
        return route


def prefetch(programs: Programs, depth: int | None = None) -> Programs:
    """Post receives earlier: up to `depth` beyond the next one used (2; 4 where stages are skipped)."""
    if depth is not None and not is_whole(depth, least=0):
        raise ScheduleError(f"the prefetch depth must be a whole number of at least 0, not {depth!r}")
    plan = plan_of(programs)
    if depth is None:
        depth = 4 if plan.edges.skips else 2
    interning = Interning(plan, table_of(programs))
    return {rank: replace(p, effects=tuple(_prefetched(p, depth, interning))) for rank, p in programs.items()}


def _prefetched(program: Program, depth: int, interning: Interning) -> Iterator[Effect]:
    receives = deque(e for e in program if isinstance(e, Recv))
    early = 0  # number of receives that are posted ahead of their place
    waiting: set[int] = set()  # posted, not used yet
    for effect in program:
        if isinstance(effect, Send):
            yield effect
        elif isinstance(effect, Recv):
            if early:
                early -= 1
            else:
                waiting.add(interning.id(effect.value))
                yield receives.popleft()
        else:
            while receives and len(waiting) <= depth:
                early += 1
                waiting.add(interning.id(receives[0].value))
                yield receives.popleft()
            yield effect
            waiting.difference_update(interning.ids(effect)[0])


def rendezvous(programs: Programs) -> Programs:
    """Add each `Send` after its producer, and its `Recv` on the other rank at that moment: any transport can run it.

    If the ranks wait for each other in a cycle, there is no such moment, and `communicate` places the receives.
    """
    rows = {rank: program.effects for rank, program in programs.items()}
    placed = lockstep(rows, plan_of(programs), table_of(programs))
    if placed is None:
        return communicate(programs)
    return {rank: replace(program, effects=tuple(placed[rank])) for rank, program in programs.items()}


def lockstep(rows: Mapping[int, Sequence[Any]], plan: Plan, table: Table = TABLE) -> dict[int, list[Any]] | None:
    """Insert sends and receives by running the ranks in turn, one effect each. Items that are not effects pass through.

    Returns:
        None if no rank can proceed.
    """
    left = {rank: deque(row) for rank, row in rows.items()}
    done: dict[int, list[Any]] = {rank: [] for rank in rows}
    here: dict[int, set[object]] = {rank: set() for rank in rows}
    moved = True
    while moved:
        moved = False
        for rank, row in left.items():
            is_effect = row and type(row[0]) in table.effects
            if not row or (is_effect and not here[rank].issuperset(table.needs(row[0], plan))):
                continue
            moved = True
            item = row.popleft()
            done[rank].append(item)
            values = table.gives(item, plan) if is_effect else ()
            here[rank].update(values)
            for value in filter(table.travels, values):
                for peer in table.readers(value, plan):
                    done[rank].append(Send(value, peer))
                    done[peer].append(Recv(value, rank))
                    here[peer].add(value)
    return None if any(left.values()) else done


def exchange_sums(programs: Programs) -> Programs:
    """Add the sends and receives of the gradient sums that copies and ties share, once they are final.

    They are added at the end of the programs, or before the first `Reduce` that needs them, so that they follow all
    other communication; and in one order over all ranks, so that every transport can run them.
    """
    plan = plan_of(programs)
    if all(len(plan.sharers(stage)) <= 1 for stage in range(plan.stages)):
        return programs
    posts = (e for program in programs.values() for e in program if type(e) is Send or type(e) is Recv)
    if any(isinstance(post.value, WeightGradient) for post in posts):
        return programs
    return {rank: replace(p, effects=tuple(_with_sums(p))) for rank, p in programs.items()}


def _with_sums(program: Program) -> list[Effect]:
    plan, rank, effects = program.plan, program.rank, list(program)
    shared = [stage for stage in _last_weights(program) if len(plan.sharers(stage)) > 1]
    posts: list[Effect] = []
    for value in (WeightGradient(*sum_) for sum_ in sorted({s for stage in shared for s in plan.sharers(stage)})):
        peers = program.table.readers(value, plan)
        if value.rank == rank:
            posts += [Send(value, peer) for peer in peers]
        elif rank in peers:
            posts.append(Recv(value, value.rank))
    reduces = (at for at, e in enumerate(effects) if isinstance(e, Reduce) and e.stage in shared)
    at = next(reduces, len(effects))
    return [*effects[:at], *posts, *effects[at:]]


def reduce(programs: Programs) -> Programs:
    """Add `Reduce` after each stage's last weight gradient; for a stage that shares its sums, at the end.

    A stage shares its sums with copies, ties and replicas.
    """
    if any(type(e) is Reduce for program in programs.values() for e in program):
        return programs
    return {rank: replace(p, effects=tuple(_with_reduce(p))) for rank, p in programs.items()}


def _with_reduce(program: Program) -> list[Effect]:
    plan, effects, last = program.plan, list(program), _last_weights(program)
    shared = [stage for stage in sorted(last) if plan.replicas > 1 or len(plan.sharers(stage)) > 1]
    for stage in sorted(set(last) - set(shared), key=last.__getitem__, reverse=True):
        effects.insert(after_sends(effects, last[stage]), Reduce(stage))
    return [*effects, *map(Reduce, shared)]


def _last_weights(program: Program) -> dict[int, int]:
    """Return the index of each stage's last weight gradient in the program."""
    last: dict[int, int] = {}
    stages = sum(map(program.plan.is_trained, program.plan.stages_on(program.rank)))
    for at in range(len(program) - 1, -1, -1):
        part: Any
        for part in parts(program.effects[at]):
            if program.table.effects[type(part)].work & WEIGHT:
                last.setdefault(part.stage, at)
        if len(last) == stages:
            break
    return last


def forward_only(programs: Programs) -> Programs:
    """Drop the backward pass: the effects that need or give a value of the backward pass, by the table.

    And those for residuals, which nothing needs then.
    """
    return {rank: replace(p, effects=tuple(_forward(p))) for rank, p in programs.items()}


def _forward(program: Program) -> Iterator[Effect]:
    plan, table = program.plan, program.table
    each: Iterator[Any] = (part for effect in program for part in parts(effect))
    return (part for part in each if type(part) not in MOVES and not table.backward(part, plan))


def wavefront(rank: int, plan: Plan) -> Iterator[Effect]:
    """The forward-only schedule: each microbatch, or slice of one, enters as early as possible.

    Legal for every DAG and placement.
    """
    parts_of = {stage: plan.forward_order(stage, rank) for stage in plan.stages_on(rank)}
    runs = [(m * plan.slices + t + s, s, m, t) for s, order in parts_of.items() for m, t in order]
    yield from (Forward(s, m, t) for _, s, m, t in sorted(runs, key=lambda run: (run[0], -run[1])))
