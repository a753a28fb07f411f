"""The gallery of schedules: the drawing of each, its peak in flight, and the closed form of its cost."""

import json
from contextlib import suppress

import pytest

import fpipe
from benchmarks import partitions
from docs import generated
from fpipe import Costs, ScheduleError
from fpipe.schedules import CATALOGUE, search
from fpipe.schedules.catalogue import shares
from fpipe.schedules.cuts import of_shares
from fpipe.schedules.grouping import Grouping, times_of
from fpipe.schedules.partitions import Partition, even
from tests.support.combinations import few, thorough
from tests.support.copies import of_one_stage


@pytest.mark.parametrize("name", few(CATALOGUE, ["seq-1f1b", "dualpipe", "vocabulary-1f1b"]))
def test_a_schedule_in_the_gallery(name):
    entry = CATALOGUE[name]
    text = "\n".join(generated.section(entry))
    assert "<svg" in text
    assert f"Cost: `{entry.cost}`, where {entry.holds}." in text
    assert f"Idle time of each rank: at most `{entry.idle}`" in text or not entry.idle
    assert f"Peak in flight of rank r: `{entry.peaks}`" in text or not entry.peaks
    row = text[text.index("| {py:func}") :].splitlines()[0]
    *_, peaks, _ = row.split(" | ")
    if not entry.limited:
        terms = {"p": generated.RANKS, "m": generated.MICROBATCHES, "v": entry.chunks, "s": entry.slices}
        assert max(map(float, peaks.split(", "))) == eval(entry.peak.removesuffix(" blocks"), terms)


@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.takes_copies])
def test_closed_forms_are_of_stages_without_copies(name):
    entry = CATALOGUE[name]
    assert "no stage has copies" in entry.holds
    assert entry.peak_holds == ("" if entry.limited else "no stage has copies")
    assert not entry.peaks or entry.peaks_hold == "no stage has copies"
    row = next(line for line in "\n".join(generated.section(entry)).splitlines() if line.startswith("| {py:func}"))
    assert f"| {entry.peak}{generated.where(entry.peak_holds)} |" in row


@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.peaks])
@pytest.mark.parametrize("p", [2, 4])
def test_the_peak_of_each_rank(name, p):
    entry, held = CATALOGUE[name], 0
    for m in (2, 4, 8, 10, 12):
        if _holds(entry.peaks_hold, p, m):
            plan, held = entry.plan(p, m), held + 1
            terms = {"p": p, "m": m, "v": entry.chunks, "s": entry.slices}
            expected = [eval(entry.peaks, {**terms, "r": rank}) for rank in range(p)]
            assert shares(fpipe.simulate(entry.schedule(plan), plan)) == expected
    assert held >= 2


def _holds(condition, p, m):
    """Whether a condition on p and m holds, as the catalogue writes it."""
    return {"": True, "no stage has copies": True, "p divides m": m % p == 0, "m >= 2*p": m >= 2 * p}[condition]


@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.idle])
@pytest.mark.parametrize("p", [2, 4, 6])
def test_the_idle_time_of_a_rank_is_at_most_the_bound(name, p):
    """It is reached at F = B = W, where O = F + B + W, from as many microbatches on as the catalogue says."""
    entry, reached = CATALOGUE[name], {}
    least = eval(entry.idle_holds.rpartition("m >= ")[2], {"p": p})
    for m in (least, least + 2, 3 * p + (3 * p) % 2):
        for f, b, w, o in [(1, 1, 1, 3), (1, 3, 1, 4), (1, 3, 2, 5.5), (2, 3, 3, 8), (3, 3, 1, 7), (2, 2, 2, 5)]:
            plan = entry.plan(p, m)
            timeline = fpipe.simulate(entry.schedule(plan), plan, of_shares(Costs(f, b, w, overlap=o), plan))
            bound = eval(entry.idle, {"p": p, "B": b, "W": w, "O": o})
            idle = max(timeline.makespan - busy for busy in timeline.busy)
            assert idle <= bound + 1e-9
            reached[m, f, b, w, o] = idle == pytest.approx(bound)
    assert all(reached[m, 1, 1, 1, 3] for m, *_ in reached)


def test_waves_wait_on_no_rank_within_the_memory_of_1f1b():
    schedule, plan, costs = generated.in_waves()
    timeline = fpipe.simulate(schedule, plan, costs)
    assert timeline.cost == generated.MICROBATCHES * 3  # no order takes less: all of a rank's work
    assert max(shares(timeline)) == generated.RANKS
    text = "\n".join(generated.waves())
    assert "<svg" in text
    assert "| two waves | the limit | 4, 4, 4, 4 | 0.0% |" in text


# The layout without a name


def costs_on_every_cut(entry, costs, longest):
    """The cost of a schedule in a fixed order on every cut of its placements whose ranks have less to do than that."""
    layers = generated.LAYERS
    times = times_of(layers, costs)
    counts = (1, 2, 3) if entry.any_chunks else (entry.chunks,)
    placements = [entry.plan(layers.ranks, layers.microbatches, chunks).placement for chunks in counts]
    for placement in placements + [*of_one_stage(layers.ranks)] * entry.takes_copies:
        for cut in even(placement, layers.stages).every() if placement.stages <= layers.stages else ():
            if layers.microbatches * max(cut.loads(times)) < longest:
                grouping = Grouping(layers, cut.layers)
                with suppress(ScheduleError):
                    plan = grouping.placed(placement)
                    stages = grouping.costs(costs, plan)
                    yield fpipe.simulate(entry.schedule(plan, stages), plan, stages).cost


def test_no_named_schedule_on_any_cut_is_as_fast_as_the_layout_without_a_name():
    schedule, plan, stages = generated.found()
    fpipe.verify(schedule, plan)
    cost = fpipe.simulate(schedule, plan, stages).cost
    assert cost == pytest.approx(0.27677540, abs=1e-8)
    assert max(account.total for account in fpipe.footprint(fpipe.lower(schedule, plan), stages)) <= generated.LIMIT
    costs = Costs.from_json(json.loads(generated.PROFILE.read_text()))
    fixed = [
        entry for entry in CATALOGUE.values() if not entry.limited and entry.slices in (None, 1) and not entry.edges
    ]
    others = {entry.name: min(costs_on_every_cut(entry, costs, cost), default=None) for entry in fixed}
    assert min(filter(None, others.values())) == others["dualpipe"] > 1.02 * cost
    assert [others[name] for name in ("zb-v", "v-half", "v-min", "dualpipe-v")] == [None] * 4  # no cut of a V is even
    assert "39.7 MiB | 0.2768 s" in "\n".join(generated.unnamed())
    assert partitions.DRAWN == generated.FOUND  # it is measured too


@thorough
def test_the_search_finds_the_layout_without_a_name():
    costs = Costs.from_json(json.loads(generated.PROFILE.read_text()))
    fastest = search(generated.LAYERS, costs, memory_limit_bytes=generated.LIMIT, layouts=True, chunks=(1, 2))
    assert Partition(fastest.plan.placement, fastest.layers) == generated.FOUND
    assert fastest.timeline.cost == pytest.approx(0.27677540, abs=1e-8)
