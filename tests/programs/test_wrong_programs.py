"""Wrong programs, made out of right ones: the verifier refuses each, or it gives the reference's bits all the same.

Of every named schedule, complete programs with communication: every effect left out, every one doubled, every two
neighbours swapped; of programs that have all kinds of effects, also every one on another rank; and of large plans,
several faults at random. How many were tried is printed.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Edges, Output, Pipeline, Placement, Plan, ScheduleError, Stage, handlers, interop, lower
from fpipe.effects import Recompute, Reduce, Update
from fpipe.schedules import from_table, gpipe, one_f_one_b, updating, zb_auto
from fpipe.schedules.catalogue import CATALOGUE
from tests.support import vocabulary_jobs
from tests.support.cases import MOVING
from tests.support.combinations import LEVEL, PAIRS, examples, few, one_in, thorough
from tests.support.sharing import sharing

SCHEDULES = {name: (lambda plan, e=entry: e.schedule(plan), entry.plan) for name, entry in CATALOGUE.items()}
"""Name -> (plan -> schedule), (ranks, microbatches -> plan); what is named joins by itself."""
SCHEDULES["gpipe on a V"] = (lambda plan: gpipe, lambda ranks, m: Plan(Placement.v(ranks), m))
SCHEDULES["gpipe in slices"] = (
    lambda plan: gpipe,
    lambda ranks, m: Plan(Placement.loop(ranks), m, slices=2),
)
SCHEDULES["gpipe both ways"] = (lambda plan: gpipe, lambda ranks, m: Plan(Placement.both_ways(ranks), m))
SCHEDULES["1f1b, copies"] = (
    lambda plan: one_f_one_b,
    lambda ranks, m: Plan(Placement([(0, 1), *range(2, max(3, ranks))]), m),
)
SCHEDULES["zb-auto, copies"] = (zb_auto, lambda ranks, m: Plan(Placement([0, (1, 0), *range(2, ranks)]), m))
SCHEDULES |= {
    f"{name}, updated": (lambda plan, e=CATALOGUE[name]: updating(e.schedule(plan)), CATALOGUE[name].plan)
    for name in few([*CATALOGUE], ["1f1b", "interleaved-1f1b", "zb-h2", "zb-v", "dualpipe"])
}
UPDATED = [name for name in SCHEDULES if name.endswith("updated")]
SCHEDULES["1f1b, residuals on the host"] = (lambda plan: MOVING["one_f_one_b_offloaded"][0], CATALOGUE["1f1b"].plan)
SCHEDULES["gpipe, recomputed"] = (lambda plan: MOVING["gpipe_recomputed"][0], CATALOGUE["gpipe"].plan)
MOVED = [*SCHEDULES][-2:]
PLAIN = [name for name in SCHEDULES if name not in UPDATED + MOVED]
FROZEN = ["1f1b", "zb-h1", "interleaved-zb", "dualpipe", "seq-zb"]
"""Those that are also tried where one stage is trained, the second."""
KINDS = [
    *("vocabulary-1f1b", "1f1b, updated", "1f1b, residuals on the host", "gpipe, recomputed"),
    *("gpipe in slices", "zb-h1", "dualpipe"),
]
"""Programs that together have every kind of effect and value of a step."""
SMALL = [(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)]
SIZE = 160  # effects of all ranks in a small plan, at most

TRIED = Counter()


@pytest.fixture(scope="module", autouse=True)
def tally(request):
    """Print what was tried."""
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{TRIED.total()} wrong programs: {TRIED['refused']} refused, {TRIED['harmless']} harmless")


@cache
def pipeline(stages, frozen=False, slices=1):
    """A chain in which the first stage is also read by the last, and shares its parameter with it.

    Of slices, each stage adds the last token of the slice before.
    """

    def layer(p, carry, x):
        y = torch.tanh((x if carry is None else x + carry) * p["w"])
        return y, y[:, -1:]

    def last(p, carry, x, skip):
        y = (x if carry is None else x + carry) * p["w"] + skip * p["v"]
        return y, y[:, -1:]

    def stage(fn, **reads):
        return Stage(fn, carry=True, **reads) if slices > 1 else Stage(lambda p, *xs: fn(p, None, *xs)[0], **reads)

    before, plain = stages - 2, stage(layer)
    nodes = [*[plain] * (stages - 1), stage(last, reads=(Output(before), Output(0)))]
    whole = Pipeline(nodes, lambda y, t: ((y - t) ** 2).sum(), ties={(stages - 1, "w"): (0, "w")})
    return whole.freeze(arguments(stages)[0], lambda path, x: path[0] != 1) if frozen else whole


@cache
def split_vocabulary(ranks):
    """A language model whose vocabulary is split over the ranks: its pipeline, params, batch, and no target."""
    vocabulary, params, batch = vocabulary_jobs.model(ranks, rows=48, reduction="sum")
    return vocabulary.pipeline([vocabulary_jobs.block] * ranks), vocabulary.split(*params), batch, None


def model(plan):
    """The pipeline of a plan, and the arguments of its step."""
    if plan.edges == Edges.vocabulary(plan.ranks):
        return split_vocabulary(plan.ranks)
    return pipeline(plan.stages, plan.trained is not None, plan.slices), *arguments(plan.stages, plan.slices)


@cache
def arguments(stages, slices=1):
    torch.manual_seed(0)
    params = {s: {"w": torch.randn(3)} for s in range(stages)}
    params[stages - 1] = {"v": torch.randn(3)}
    shape = (48, slices, 3) if slices > 1 else (48, 3)
    return params, torch.randn(shape), torch.randn(shape)


@cache
def right(name, ranks, microbatches, frozen=False):
    """Its plan, its complete programs, and the reference's bits; nothing if it doesn't take these numbers."""
    make, plan_of = SCHEDULES[name]
    try:
        plain = plan_of(ranks, microbatches)
        own, *_ = model(replace(plain, trained=[1]) if frozen else plain)
        plan = own.plan(plain.placement, microbatches, slices=plain.slices)
        schedule = make(plan)
        programs = lower(schedule, plan)
    except ScheduleError:
        return None
    return plan, {rank: program.effects for rank, program in programs.items()}, bits(plan, programs, "reference")


def bits(plan, programs, handler="local"):
    whole, params, *data = model(plan)
    key = "wrong", plan.edges, plan.trained is not None, plan.slices
    own = sharing(handlers.Local(), *key) if handler == "local" else handlers.Reference()
    if any(isinstance(effect, Update) for program in programs.values() for effect in program):
        sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
        train = fpipe.train_step(whole, from_table(programs), plan, sgd, handler=own, reduction="sum")
        params, _, loss = train(params, sgd.init(params), *data)
        return [loss, *(leaf for _, tree in sorted(params.items()) for _, leaf in sorted(tree.items()))]
    step = fpipe.value_and_grad(whole, from_table(programs), plan, handler=own, reduction="sum")
    loss, grads = step(params, *data)
    return [loss, *(leaf for _, tree in sorted(grads.items()) for _, leaf in sorted(tree.items()))]


def harmless(plan, programs, expected):
    """Whether it runs with the same bits; False if it is refused."""
    try:
        found = bits(plan, programs)
    except ScheduleError:
        TRIED["refused"] += 1
        return False
    pairs = zip(found, expected, strict=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs), "accepted, and its gradients are wrong"
    TRIED["harmless"] += 1
    return True


def without(order, at):
    return (*order[:at], *order[at + 1 :])


def doubled(order, at):
    return (*order[: at + 1], *order[at:])


def swapped(order, at):
    return (*order[:at], order[at + 1], order[at], *order[at + 2 :])


def moved_on(order, at):
    """An effect three places later."""
    rest = without(order, at)
    return (*rest[: at + 3], order[at], *rest[at + 3 :])


def faults(programs, rank, at):
    """(kind, programs) with one fault at an effect: it is left out, doubled, on another rank, or comes later."""
    order, other = programs[rank], next(each for each in programs if each != rank)
    there = programs[other]
    yield "without", programs | {rank: without(order, at)}
    yield "doubled", programs | {rank: doubled(order, at)}
    yield "elsewhere", programs | {rank: without(order, at), other: (*there[:at], order[at], *there[at:])}
    if at + 1 < len(order):
        yield "swapped", programs | {rank: swapped(order, at)}
        yield "moved on", programs | {rank: moved_on(order, at)}


STEP = (128, 32, 1)[LEVEL]
"""Of so many effects of a rank one has a fault."""


@one_in(4)
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *((name, False) for name in few(SCHEDULES, [*PLAIN[::2], *UPDATED, *MOVED])),
        *((n, True) for n in FROZEN),
    ],
)
def test_a_small_program_with_one_fault(name, frozen):
    tried = 0
    for ranks, m in SMALL:
        if (found := right(name, ranks, m, frozen)) is None:
            continue
        plan, programs, expected = found
        if sum(map(len, programs.values())) > SIZE:
            continue
        assert harmless(plan, programs, expected)
        for rank, order in programs.items():
            for at in range(rank % STEP, len(order), STEP):
                for change in (without, doubled):
                    if change is without and frozen and order[at] in (Reduce(1), Update(1)):
                        continue  # the only one: without any, lowering adds it
                    if change is without and isinstance(order[at], Recompute):
                        continue  # the forward then saves the residuals
                    changed = programs | {rank: change(order, at)}
                    assert not harmless(plan, changed, expected), f"rank {rank} {change.__name__} {order[at]}"
                if at + 1 < len(order):
                    harmless(plan, programs | {rank: swapped(order, at)}, expected)
        tried += 1
    assert tried >= 2


@one_in(3)
@pytest.mark.parametrize("name", few(KINDS, KINDS[:5]))
def test_every_fault_of_two_ranks(name):
    """What comes later may be harmless; anything else is refused, but that residuals are saved, not recomputed.

    By default a third of the effects.
    """
    plan, programs, expected = right(name, 2, 2)
    for rank, order in programs.items():
        for at, effect in [*enumerate(order)][0 if PAIRS else rank :: 1 if PAIRS else 3]:
            for kind, changed in faults(programs, rank, at):
                may_be = kind in ("swapped", "moved on") or (kind == "without" and isinstance(effect, Recompute))
                assert not harmless(plan, changed, expected) or may_be, f"rank {rank} {kind} {effect}"


@thorough
@settings(max_examples=examples(150))
@given(st.data())
def test_a_large_program_with_faults(data):
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    sizes = data.draw(st.sampled_from([4, 6, 8])), data.draw(st.sampled_from([6, 8, 12, 16]))
    found = right(name, *sizes, data.draw(st.booleans()))
    assume(found is not None)
    plan, programs, expected = found
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, plan.ranks - 1))
        order = programs[rank]
        at = data.draw(st.integers(0, len(order) - 2))
        change = data.draw(st.sampled_from([without, doubled, swapped, moved_on]))
        programs = programs | {rank: change(order, at)}
    harmless(plan, programs, expected)
