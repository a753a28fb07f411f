"""Programs for tests, and an oracle for them.

The oracle is written from the rules alone: `reads`, `makes` and `runs_through` say nothing of how lowering
or `fpipe.effects.TABLE` say it.
"""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Edges, Placement, Plan
from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Gradient,
    Overlap,
    Recv,
    Reduce,
    Send,
    WeightGradient,
)
from fpipe.programs.lowering import wavefront
from fpipe.schedules import gpipe, interleaved_1f1b, one_f_one_b
from tests.support.combinations import examples


def reads(effect, plan):
    match effect:
        case Overlap(forward, backward):
            return reads(forward, plan) | reads(backward, plan)
        case Forward(s, m):
            return {Activation(t, m) for t in plan.edges.reads[s]}
        case Backward(s, m) | BackwardInput(s, m):
            return {Gradient(s, c, m) for c, read in enumerate(plan.edges.reads) if s in read} | {("kept", s, m)}
        case BackwardWeight(s, m):
            return {("deferred", s, m)}
        case Send(value, _):
            return {value}
        case Reduce(s):
            tied = {s}.union(*(group for group in plan.ties if s in group))
            return {WeightGradient(t, rank) for t in tied for rank in plan.placement.holders[t]}
    return set()


def makes(effect, rank, plan):
    match effect:
        case Overlap(forward, backward):
            return makes(forward, rank, plan) | makes(backward, rank, plan)
        case Forward(s, m):
            return {Activation(s, m), ("kept", s, m)}
        case Backward(s, m) | BackwardInput(s, m):
            gradients = {Gradient(t, s, m) for t in plan.edges.reads[s]}
            return gradients | (
                {("deferred", s, m)} if isinstance(effect, BackwardInput) else last_sum(s, m, rank, plan)
            )
        case BackwardWeight(s, m):
            return last_sum(s, m, rank, plan)
    return set()


def last_sum(stage, microbatch, rank, plan):
    return {WeightGradient(stage, rank)} if microbatch == plan.microbatches_of(stage, rank)[-1] else set()


def runs_through(programs, wired=True):
    """Whether every effect can run. Not wired: what one rank makes, all ranks have."""
    everywhere = set()
    here = {rank: set() if wired else everywhere for rank in programs}
    sent, posted = set(), set()
    left = {rank: deque(program) for rank, program in programs.items()}
    stuck = False
    while not stuck:
        stuck = True
        for rank, effects in left.items():
            plan = programs[rank].plan
            while effects and all(v in here[rank] or {(v, rank)} <= sent & posted for v in reads(effects[0], plan)):
                effect, stuck = effects.popleft(), False
                here[rank] |= makes(effect, rank, plan)
                if isinstance(effect, Send):
                    sent.add((effect.value, effect.rank))
                if isinstance(effect, Recv):
                    posted.add((effect.value, rank))
    return not any(left.values())


def computes(program):
    return [
        p
        for e in program
        for p in ((e.forward, e.backward) if isinstance(e, Overlap) else (e,))
        if isinstance(p, Forward | Backward | BackwardInput | BackwardWeight)
    ]


def runs_each_once_in_order(programs):
    """Every stage's forwards, and its weight gradients if there are any, in the order of the microbatches."""
    trained = any(isinstance(e, Backward | BackwardWeight) for p in programs.values() for e in computes(p))
    for rank, program in programs.items():
        plan = program.plan
        for stage in plan.stages_on(rank):
            own = [e for e in computes(program) if e.stage == stage]
            due = list(plan.microbatches_of(stage, rank))
            halves = sorted(e.microbatch for e in own if isinstance(e, BackwardInput))
            if [e.microbatch for e in own if isinstance(e, Forward)] != due:
                return False
            if [e.microbatch for e in own if isinstance(e, Backward | BackwardWeight)] != (due if trained else []):
                return False
            if halves != [e.microbatch for e in own if isinstance(e, BackwardWeight)]:
                return False
    return True


def legal(programs):
    return runs_each_once_in_order(programs) and runs_through(programs)


def halved(schedule, delay=0):
    """The schedule with each backward in its two halves, weight gradients `delay` backwards later."""

    def run(rank, plan):
        late = deque()
        for e in schedule(rank, plan):
            if isinstance(e, Backward):
                yield BackwardInput(e.stage, e.microbatch)
                late.append(BackwardWeight(e.stage, e.microbatch))
                if len(late) > delay:
                    yield late.popleft()
            else:
                yield e
        yield from late

    return run


def overlapped(schedule):
    """The schedule with a forward and the backward behind it as one, where they are of different microbatches."""

    def run(rank, plan):
        held = None
        for e in schedule(rank, plan):
            if isinstance(held, Forward) and isinstance(e, Backward) and held.microbatch != e.microbatch:
                held, e = None, Overlap(held, e)
            yield from (held,) if held else ()
            held = e
        yield held

    return run


def circle(rank, plan):
    """Each of two ranks first computes what needs a value that the other computes later."""
    yield Forward(rank, 0)
    yield from ([Backward(0, 0), Forward(0, 1)] if rank == 0 else [Forward(1, 1), Backward(1, 0)])
    yield Backward(rank, 1)


def written(*orders):
    """The schedule that yields these effects, rank by rank."""
    return lambda rank, plan: iter(orders[rank])


def text(program):
    """`F1.0` is stage 1's forward of microbatch 0; `a1.0>2` sends its activation to rank 2, `a1.0<1` receives it."""
    return " ".join(map(_text, program))


def _text(x):
    match x:
        case Activation(s, m):
            return f"a{s}.{m}"
        case Gradient(s, c, m):
            return f"g{s}/{c}.{m}"
        case WeightGradient(s, r):
            return f"w{s}@{r}"
        case Send(value, rank):
            return f"{_text(value)}>{rank}"
        case Recv(value, rank):
            return f"{_text(value)}<{rank}"
        case Reduce(s):
            return f"R{s}"
        case Overlap(f, b):
            return f"{_text(f)}&{_text(b)}"
    letter = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}[type(x)]
    return f"{letter}{x.stage}.{x.microbatch}"


def texts(programs):
    return [text(program) for program in programs.values()]


F0, F1, B0, B1 = Forward(0, 0), Forward(1, 0), Backward(0, 0), Backward(1, 0)
A, G = Activation(0, 0), Gradient(0, 1, 0)
PAIR = Plan(Placement.loop(2), 1)


@st.composite
def placements(draw):
    """A placement, and the schedules that admit it."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["loop", "chunks", "v", "both_ways", "any"]))
    if kind == "loop":
        return Placement.loop(ranks), [gpipe, one_f_one_b, interleaved_1f1b]
    if kind == "chunks":
        return Placement.loop(ranks, chunks), [gpipe, interleaved_1f1b]
    if kind == "v":
        return Placement.v(ranks), [gpipe]
    if kind == "both_ways":
        return Placement.both_ways(draw(st.sampled_from([2, 4]))), [gpipe]
    others = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
    holders = draw(st.permutations([*range(ranks), *others]))
    return Placement([draw(st.sampled_from([rank, [rank, *{0} - {rank}]])) for rank in holders]), [gpipe]


@st.composite
def edges_between(draw, stages):
    """A DAG in which every stage but the last is read."""
    found = [[] for _ in range(stages)]
    for stage in range(stages - 1):
        for consumer in draw(st.sets(st.integers(stage + 1, stages - 1), min_size=1, max_size=3)):
            found[consumer].append(stage)
    return Edges(found)


@st.composite
def works(draw):
    """A plan, a schedule that admits it, and a prefetch depth."""
    placement, schedules = draw(placements())
    stages, copies = placement.stages, max(map(len, placement.holders))
    group = st.lists(st.integers(0, stages - 1), min_size=2, max_size=3, unique=True).map(tuple)
    plan = Plan(
        placement,
        copies * draw(st.integers(1, 8 // copies)),
        draw(st.just(Edges.chain(stages)) | edges_between(stages)),
        ties=tuple(draw(st.lists(group, max_size=2))) if stages > 1 else (),
    )
    schedule = draw(st.sampled_from([*schedules, wavefront]))
    schedule = draw(st.sampled_from([schedule, halved(schedule), halved(schedule, delay=2)]))
    return schedule, plan, draw(st.integers(0, 4))


def over_random_plans(test):
    return settings(max_examples=examples(200))(given(works())(test))
