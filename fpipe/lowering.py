"""From compute order to complete programs, as passes over all ranks' programs. No torch.

Each pass is a plain function `programs -> programs`; `lower` composes them. What holds after it:

- a value is sent right after the last effect that gives it, once to each rank that reads it;
- on each directed edge, receives are posted in the order of the sends, at the latest before first use;
- a stage's `Reduce` follows its last weight gradient.

A schedule that yields its own sends and receives keeps them as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from fpipe.effects import (
    TABLE,
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Effect,
    Forward,
    Gradient,
    Overlap,
    Recv,
    Reduce,
    Send,
    Value,
    WeightGradient,
    gives,
    needs,
    parts,
)
from fpipe.errors import ScheduleError
from fpipe.program import Plan, Program, Programs, Schedule


def lower(schedule: Schedule, plan: Plan, *, depth: int | None = None) -> Programs:
    """Complete programs of all ranks.

    Args:
        schedule: `(rank, plan) -> iterator of effects`, in compute order.
        depth: receives posted beyond the next one used; 2 by default, 4 where stages are skipped.

    Raises:
        ScheduleError: an effect that is missing, doubled, out of order, or not this rank's to run.

    >>> from fpipe import Placement, Plan, schedules
    >>> lower(schedules.gpipe, Plan(Placement.loop(2), 1))[1].effects[:3]
    (Recv(value=Activation(stage=0, microbatch=0), rank=0), Forward(stage=1, microbatch=0), \
Backward(stage=1, microbatch=0))
    """
    programs = complete(collect(schedule, plan))
    if any(isinstance(e, Send | Recv) for program in programs.values() for e in program):
        programs = communicated(programs)
    else:
        programs = prefetch(communicate(programs), depth)
    return reduced(reduce(programs))


def collect(schedule: Schedule, plan: Plan) -> Programs:
    """What the schedule yields on each rank, as it stands."""
    programs = {}
    for rank in range(plan.ranks):
        effects = tuple(schedule(rank, plan))
        for effect in effects:
            _check(effect, rank, plan)
        programs[rank] = Program(plan, rank, effects)
    return programs


def _check(effect: Effect, rank: int, plan: Plan) -> None:
    if type(effect) not in TABLE:
        raise ScheduleError(f"rank {rank} yields {effect!r}, which is no effect: see fpipe.effects.TABLE")
    if isinstance(effect, Overlap) and not (
        isinstance(effect.forward, Forward) and isinstance(effect.backward, Backward | BackwardInput)
    ):
        raise ScheduleError(f"rank {rank} yields {effect}: it overlaps a Forward with a Backward or a BackwardInput")
    for part in parts(effect):
        if isinstance(part, Compute) and not (
            0 <= part.stage < plan.stages
            and 0 <= part.microbatch < plan.microbatches
            and plan.rank_of(part.stage, part.microbatch) == rank
        ):
            raise ScheduleError(
                f"rank {rank} yields {part}: it holds stages {plan.stages_on(rank)}"
                f", and there are microbatches 0 to {plan.microbatches - 1}"
                + (" (a copy of a stage runs its own block)" if part.stage in plan.stages_on(rank) else "")
            )
        if isinstance(part, Send | Recv) and (part.rank == rank or not 0 <= part.rank < plan.ranks):
            raise ScheduleError(f"rank {rank} yields {part}: the peer must be another rank, 0 to {plan.ranks - 1}")
        if isinstance(part, Reduce) and part.stage not in plan.stages_on(rank):
            raise ScheduleError(f"rank {rank} yields {part}: it holds stages {plan.stages_on(rank)}")


def complete(programs: Programs) -> Programs:
    """The same programs, once every stage has run every microbatch forward, and backward or not at all.

    Forwards and weight gradients must come in microbatch order on each rank: state and sums depend on it.
    """
    trained = any(isinstance(p, Backward | BackwardWeight) for q in programs.values() for e in q for p in parts(e))
    for program in programs.values():
        _complete(program, trained)
    return programs


def _complete(program: Program, trained: bool) -> None:
    plan, rank = program.plan, program.rank
    forwards = {s: deque(plan.microbatches_of(s, rank)) for s in plan.stages_on(rank)}
    weights = {s: deque(plan.microbatches_of(s, rank) if trained else ()) for s in plan.stages_on(rank)}
    inputs: set[tuple[int, int]] = set()
    for effect in program:
        for e in parts(effect):
            if isinstance(e, Forward):
                _next(forwards, e, rank)
            elif isinstance(e, Backward):
                _next(weights, e, rank)
            elif isinstance(e, BackwardInput):
                if (e.stage, e.microbatch) in inputs:
                    raise ScheduleError(f"rank {rank} yields {e} twice")
                inputs.add((e.stage, e.microbatch))
            elif isinstance(e, BackwardWeight):
                _next(weights, e, rank)
                if (e.stage, e.microbatch) not in inputs:
                    raise ScheduleError(f"rank {rank} yields {e} before its BackwardInput")
                inputs.remove((e.stage, e.microbatch))
    for left, kind in ((forwards, "Forward"), (weights, "Backward, or BackwardInput and BackwardWeight")):
        for stage, microbatches in left.items():
            if microbatches:
                raise ScheduleError(f"rank {rank} ends without {kind} of stage {stage}, microbatch {microbatches[0]}")
    if inputs:
        stage, microbatch = min(inputs)
        raise ScheduleError(f"rank {rank} ends without BackwardWeight of stage {stage}, microbatch {microbatch}")


def _next(order: dict[int, deque[int]], e: Compute, rank: int) -> None:
    expected = order[e.stage][0] if order[e.stage] else None
    if e.microbatch != expected:
        due = "nothing more" if expected is None else f"microbatch {expected}"
        raise ScheduleError(
            f"rank {rank} yields {e} where {due} is due: each stage runs its microbatches once, in order"
        )
    order[e.stage].popleft()


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
    sent: dict[tuple[int, int], deque[Value]] = {}
    sending = {rank: tuple(_with_sends(program, sent)) for rank, program in programs.items()}
    lowered = {
        rank: replace(program, effects=tuple(_with_receives(program, sending[rank], sent)))
        for rank, program in programs.items()
    }
    for (source, target), values in sent.items():
        if values:
            raise ScheduleError(f"rank {source} makes {values[0]} for rank {target}, which never uses it")
    return lowered


def _with_sends(program: Program, sent: dict[tuple[int, int], deque[Value]]) -> Iterator[Effect]:
    plan, rank = program.plan, program.rank
    for effect in program:
        yield effect
        for value in gives(effect, plan):
            if isinstance(value, Activation | Gradient):
                for peer in readers(value, plan):
                    sent.setdefault((rank, peer), deque()).append(value)
                    yield Send(value, peer)


def _with_receives(
    program: Program, effects: tuple[Effect, ...], sent: dict[tuple[int, int], deque[Value]]
) -> Iterator[Effect]:
    plan, rank = program.plan, program.rank
    received: set[Value] = set()
    for effect in effects:
        if not isinstance(effect, Send | Reduce):
            for value in needs(effect, plan):
                if not isinstance(value, Activation | Gradient):
                    continue
                source = maker(value, plan)
                channel = sent.get((source, rank), ())
                while source != rank and value not in received:
                    if not channel:
                        raise ScheduleError(f"rank {rank} needs {value} for {effect}, but rank {source} never makes it")
                    received.add(channel[0])
                    yield Recv(channel.popleft(), source)
        yield effect


def communicated(programs: Programs) -> Programs:
    """The same programs, once a schedule's own sends and receives are from a value's maker, once, and for a use."""
    for program in programs.values():
        plan, rank = program.plan, program.rank
        used = {name for effect in program if not isinstance(effect, Send) for name in needs(effect, plan)}
        seen: set[Effect] = set()
        for effect in program:
            if not isinstance(effect, Send | Recv):
                continue
            source, target = (rank, effect.rank) if isinstance(effect, Send) else (effect.rank, rank)
            if maker(effect.value, plan) != source:
                raise ScheduleError(f"rank {rank} yields {effect}: rank {maker(effect.value, plan)} makes it")
            if effect in seen:
                raise ScheduleError(f"rank {rank} yields {effect} twice")
            if target not in readers(effect.value, plan) or (target == rank and effect.value not in used):
                raise ScheduleError(f"rank {rank} yields {effect}, but rank {target} never uses it")
            seen.add(effect)
    return programs


def prefetch(programs: Programs, depth: int | None = None) -> Programs:
    """Post receives earlier: up to `depth` beyond the next one used (2; 4 where stages are skipped)."""
    if depth is not None and depth < 0:
        raise ScheduleError(f"the prefetch depth must be at least 0, not {depth}")
    return {rank: replace(p, effects=tuple(_prefetched(p, depth))) for rank, p in programs.items()}


def _prefetched(program: Program, depth: int | None) -> Iterator[Effect]:
    plan = program.plan
    if depth is None:
        depth = 4 if plan.edges.skips else 2
    ahead = deque(e for e in program if isinstance(e, Recv))
    posted: set[Value] = set()
    waiting: set[Value] = set()  # posted, not used yet
    for effect in program:
        if isinstance(effect, Recv):
            if effect.value not in posted:
                yield _post(ahead, posted, waiting)
            continue
        while ahead and len(waiting) <= depth and not isinstance(effect, Send):
            yield _post(ahead, posted, waiting)
        yield effect
        waiting.difference_update(needs(effect, plan))


def _post(ahead: deque[Recv], posted: set[Value], waiting: set[Value]) -> Recv:
    recv = ahead.popleft()
    posted.add(recv.value)
    waiting.add(recv.value)
    return recv


def reduce(programs: Programs) -> Programs:
    """Add `Reduce` after each stage's last weight gradient, with the exchange that copies and ties need.

    What a stage shares with other ranks is exchanged at the end of the programs, sends first, so that it
    fits behind any schedule and its own communication.
    """
    if any(isinstance(e, Reduce) for program in programs.values() for e in program):
        return programs
    return {rank: replace(p, effects=tuple(_with_reduce(p))) for rank, p in programs.items()}


def _with_reduce(program: Program) -> Iterator[Effect]:
    plan, rank = program.plan, program.rank
    last = _last_weights(program)
    shared = [s for s in sorted(last) if len(plan.sharers(s)) > 1]
    final: list[int] = []
    for at, effect in enumerate(program):
        if not isinstance(effect, Send):
            yield from map(Reduce, final)
            final = []
        yield effect
        final += (s for s in sorted(last) if last[s] == at and s not in shared)
    yield from map(Reduce, final)
    for stage in shared:
        value = WeightGradient(stage, rank)
        yield from (Send(value, peer) for peer in readers(value, plan))
    foreign = sorted({sharer for stage in shared for sharer in plan.sharers(stage) if sharer[1] != rank})
    yield from (Recv(WeightGradient(stage, peer), peer) for stage, peer in foreign)
    yield from (Reduce(stage) for stage in shared)


def reduced(programs: Programs) -> Programs:
    """The same programs, once each stage that is trained is reduced on each rank, once, after its last gradient."""
    for program in programs.values():
        rank, last = program.rank, _last_weights(program)
        due = set(last)
        for at, effect in enumerate(program):
            if isinstance(effect, Send) and isinstance(effect.value, WeightGradient):
                if effect.value.stage not in last or at < last[effect.value.stage]:
                    raise ScheduleError(f"rank {rank} yields {effect} before the stage's last weight gradient")
            elif isinstance(effect, Reduce):
                if effect.stage not in due or at < last[effect.stage]:
                    when = "before the stage's last weight gradient" if effect.stage in due else "twice, or for nothing"
                    raise ScheduleError(f"rank {rank} yields {effect} {when}")
                due.remove(effect.stage)
        if due:
            raise ScheduleError(
                f"rank {rank} ends without Reduce(stage={min(due)}): a schedule yields every Reduce, or none"
            )
    return programs


def _last_weights(program: Program) -> dict[int, int]:
    """Where each stage's last weight gradient stands."""
    return {
        e.stage: at
        for at, effect in enumerate(program)
        for e in parts(effect)
        if isinstance(e, Backward | BackwardWeight)
    }


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
