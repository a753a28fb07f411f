"""The gallery of schedules: the drawing of each, its peak in flight, and the closed form of its cost."""

import json
from contextlib import suppress

import pytest

import fpipe
from docs import generated
from fpipe import Costs, ScheduleError
from fpipe.schedules import CATALOGUE, search
from fpipe.schedules.grouping import Grouping, times_of
from fpipe.schedules.partitions import Partition, even
from tests.support.combinations import few, thorough


@pytest.mark.parametrize("name", few(CATALOGUE, ["seq-1f1b", "dualpipe", "vocabulary-1f1b"]))
def test_a_schedule_in_the_gallery(name):
    entry = CATALOGUE[name]
    text = "\n".join(generated.section(entry))
    assert "<svg" in text
    assert f"Cost: `{entry.cost}`, where {entry.holds}." in text
    row = text[text.index("| {py:func}") :].splitlines()[0]
    *_, peaks, _ = row.split(" | ")
    if not entry.limited:
        terms = {"p": generated.RANKS, "m": generated.MICROBATCHES, "v": entry.chunks, "s": entry.slices}
        assert max(map(float, peaks.split(", "))) == eval(entry.peak.removesuffix(" blocks"), terms)


# The layout without a name


def costs_on_every_cut(entry, costs, longest):
    """The cost of a schedule in a fixed order on every cut of its placements whose ranks have less to do than that."""
    layers = generated.LAYERS
    times = times_of(layers, costs)
    for chunks in (1, 2, 3) if entry.any_chunks else (entry.chunks,):
        placement = entry.plan(layers.ranks, layers.microbatches, chunks).placement
        for cut in even(placement, layers.stages).every() if placement.stages <= layers.stages else ():
            if layers.microbatches * max(cut.loads(times)) < longest:
                grouping = Grouping(layers, cut.layers)
                plan = grouping.placed(placement)
                stages = grouping.costs(costs, plan)
                with suppress(ScheduleError):
                    yield fpipe.simulate(entry.schedule(plan, stages), plan, stages).cost


def test_no_named_schedule_on_any_cut_is_as_fast_as_the_layout_without_a_name():
    schedule, plan, stages = generated.found()
    fpipe.verify(schedule, plan)
    cost = fpipe.simulate(schedule, plan, stages).cost
    assert cost == pytest.approx(0.27844799, abs=1e-8)
    assert max(account.total for account in fpipe.footprint(fpipe.lower(schedule, plan), stages)) <= generated.LIMIT
    costs = Costs.from_json(json.loads(generated.PROFILE.read_text()))
    fixed = [
        entry for entry in CATALOGUE.values() if not entry.limited and entry.slices in (None, 1) and not entry.edges
    ]
    others = {entry.name: min(costs_on_every_cut(entry, costs, cost), default=None) for entry in fixed}
    assert min(filter(None, others.values())) == others["dualpipe"] > 1.02 * cost
    assert [others[name] for name in ("zb-v", "v-half", "v-min", "dualpipe-v")] == [None] * 4  # no cut of a V is even
    assert "0.2784 s" in "\n".join(generated.unnamed())


@thorough
def test_the_search_finds_the_layout_without_a_name():
    costs = Costs.from_json(json.loads(generated.PROFILE.read_text()))
    fastest = search(generated.LAYERS, costs, memory_limit_bytes=generated.LIMIT, layouts=True, chunks=(1, 2))
    assert Partition(fastest.plan.placement, fastest.layers) == generated.FOUND
    assert fastest.timeline.cost == pytest.approx(0.27844799, abs=1e-8)
