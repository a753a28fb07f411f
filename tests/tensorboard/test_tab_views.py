"""The Pipeline tab in a real browser: links to it, runs beside each other, many steps and many ranks."""

import dataclasses
import functools
import json
import math
import re
import statistics
from urllib.parse import quote, urlsplit

import numpy as np
import pytest

from fpipe import Costs, Placement, Plan, schedules, simulate
from fpipe.effects import Backward, Forward, Recv
from fpipe.tensorboard.files.writer import write
from tests.support.board import Board
from tests.support.captures import record
from tests.support.combinations import thorough
from tests.support.tab import BROWSED, HASTE, MODULE, amount, opened

pytestmark = [*BROWSED, thorough]  # test_tab.py has what is there by default
RANKS, MICROBATCHES = 4, 6
STEPS = range(1, 9)
EARLY = 2.5e-3  # seconds by which a receive of the run "two" is posted before the first compute
COSTS = Costs(1e-3, backward=2e-3, communication=1e-4)


def step_of(**more):
    """A step of 1F1B, in seconds."""
    return simulate(
        schedules.one_f_one_b, Plan(Placement.loop(RANKS), MICROBATCHES), dataclasses.replace(COSTS, **more)
    )


def drifting(step):
    """A step of a run whose rank 3 takes 4 % longer from step to step; in step 6, rank 1 takes twice as long."""
    factors = [1, 2 if step == 6 else 1, 1, 1 + 0.04 * step]
    return step_of(forward=[1e-3 * f for f in factors], backward=[2e-3 * f for f in factors])


WIDE = simulate(schedules.one_f_one_b, Plan(Placement.loop(96), 8), COSTS)
DRIFTS = {step: drifting(step) for step in range(1, 11)}


def loop_of(half):
    """A loop of ZB-H2, whose period is shorter than its makespan over its steps.

    Each half of a backward takes `half` seconds.
    """
    costs = Costs(1e-3, half, half, communication=1e-4)
    return simulate(schedules.zb_h2, Plan(Placement.loop(RANKS), MICROBATCHES), costs, steps=LOOP)


LOOP = 3
LOOPS = {step: loop_of(half) for step, half in {1: 1e-3, 7: 1.25e-3}.items()}


def early(columns, rank):
    """All begins `EARLY`, but for the first receive of the last rank, which is posted before."""
    starts, ends = columns.starts + EARLY, columns.ends + EARLY
    if rank == RANKS - 1:
        starts[min(row for row, effect in enumerate(columns.effects) if isinstance(effect, Recv))] = 0.0
    return dataclasses.replace(columns, starts=starts, ends=ends)


OWNERS = {"received": 1024.0, "residuals": 3072.0, "sums of gradients": 512.0}


def holding(columns, rank):
    """2 KiB from the 5th millisecond on, and 4 KiB from the 6th to the 7th."""
    return dataclasses.replace(columns, memory=(np.array([0, 5e-3, 6e-3, 7e-3]), np.array([0.0, 2048, 4096, 0])))


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("runs")
    record(logdir / "one", {step: step_of() for step in STEPS})
    write(logdir / "one", step_of(), schedule="1f1b", unit="s")
    record(logdir / "two", {step: step_of(backward=[2e-3, 2e-3, 7.49e-3, 2e-3]) for step in (3, 4)}, changed=early)
    record(logdir / "drifts", DRIFTS)
    record(logdir / "loops", LOOPS, schedule="zb-h2", steps=LOOP)
    record(logdir / "owned", {1: step_of()}, changed=holding, owners=OWNERS)
    write(logdir / "wide", WIDE, schedule="1f1b", unit="s")
    return logdir


@pytest.fixture(scope="module")
def board(logdir):
    with Board(logdir) as board:
        board.until(lambda captures: len(captures) == len(STEPS) + len(DRIFTS) + len(LOOPS) + 5)
        yield board


@pytest.fixture
def tab(shared):
    shared.frame.fill("#search", "")
    shared.show("one/measured", 4, other="one/predicted")
    shared.released()
    shared.frame.click("#tab-bubbles")
    return shared


# Links


def answered(route, body):
    route.fulfill(body=body)


SEEN = """() => {
    const { sheet, shell, capture, tabs } = window.fpipe.app;
    const { view, range, selected, idle, collapsed, other } = sheet;
    return {
        shown: [capture.label, other?.label], view: [view.from, view.to], range, selected, idle,
        collapsed: [...collapsed].sort(), search: shell.search.value, found: sheet.matches?.count,
        tab: tabs.opened.id, height: shell.below.clientHeight, colour: sheet.colouring, marks: [...sheet.shown].sort(),
        follow: shell.follow.checked,
    };
}"""


def fragment(tab):
    return "&" + urlsplit(tab.page.url).fragment.split("&", 1)[1]


def test_a_link_opens_the_same(tab, chromium, board):
    """Run, step, beside, part, range, selection, search, folding, colours, marks, panel, and height of the tables."""
    tab.show("one/measured", 3, other="one/measured, step 5")
    tab.press("w")
    tab.press("d")
    tab.js("window.fpipe.app.sheet.measure(0.004, 0.009)")
    tab.js("window.fpipe.app.sheet.measured()")
    tab.js("window.fpipe.app.sheet.select({ rank: 2, row: 7, other: false })")
    tab.js("window.fpipe.app.sheet.fold(1)")
    tab.frame.fill("#search", "kind=B mb=1,2")
    tab.frame.select_option("#colour", "stage")
    tab.frame.click("#toggle-arrows")
    tab.frame.click("#tab-critical")
    tab.frame.focus("#splitter")
    tab.page.keyboard.press("ArrowUp")
    tab.until("() => window.fpipe.app.finder.searched === 'kind=B mb=1,2'")
    tab.linked(run="one/measured", step="3", beside="one/measured", beside_step="5", effect="2,7", folded="1")
    tab.linked(search="kind=B mb=1,2", range="0.004,0.009", colour="stage", tab="critical", follow="no")
    seen = tab.js(SEEN)
    assert seen["height"] > 100
    assert len(seen["collapsed"]) == 1
    assert seen["found"] > 0
    with opened(chromium, board, HASTE, fragment(tab)) as other:
        other.settled("one/measured", 3)
        assert other.js(SEEN) == seen
    tab.again()
    tab.settled("one/measured", 3)
    assert tab.js(SEEN) == seen
    tab.page.evaluate("location.hash = 'fpipe_timeline&p.fpipe_timeline.run=' + encodeURIComponent('one/predicted')")
    tab.settled("one/predicted")
    seen = tab.js(SEEN)
    assert (seen["range"], seen["selected"], seen["search"], seen["collapsed"], seen["tab"]) == (
        None,
        None,
        "",
        [],
        "bubbles",
    )
    assert seen["follow"]
    assert seen["colour"] == "kind"
    assert "arrows" in seen["marks"]


def test_a_link_selects_idle_time(tab, chromium, board):
    tab.show("one/measured", 4)
    tab.press("g")
    tab.press("g")
    tab.until("() => window.fpipe.app.sheet.idle")
    idle = tab.js("window.fpipe.app.sheet.idle")
    tab.linked(idle=f"{idle['rank']},{idle['start']!r}")
    with opened(chromium, board, HASTE, fragment(tab)) as other:
        other.settled("one/measured", 4)
        other.until("() => window.fpipe.app.sheet.idle")
        assert other.js("window.fpipe.app.sheet.idle") == idle
    tab.press("Escape")


BAD = (
    "step=77&beside=gone&effect={}&view=a,b&range=1&folded=1-,x,1e20,0-1e99&tab=nothing"
    "&colour=blue&height=-9&idle=0,1&shown=x"
)


@pytest.mark.parametrize("effect", ["9,9999", "0,0.5"])
def test_a_link_to_what_is_not_there_shows_the_rest(chromium, board, effect):
    bad = BAD.format(effect).split("&")
    state = "".join(f"&p.fpipe_timeline.{part}" for part in [f"run={quote('one/measured', '')}", *bad])
    with opened(chromium, board, HASTE, state) as tab:
        tab.settled("one/measured", max(STEPS))
        assert f"one/measured, step 77: not listed at present; one/measured, step {max(STEPS)}" in tab.text("#notices")
        assert "gone: not listed at present; it stands beside once it is" in tab.text("#notices")
        assert tab.js("window.fpipe.app.sheet.selected") is None
        assert tab.js("window.fpipe.app.sheet.view.fitted")
        tab.frame.select_option("#step", "2")
        tab.settled("one/measured", 2)
        assert "step 77" not in tab.text("#notices")


def test_it_recovers_when_the_server_was_started_again(tab, board):
    """The server does not answer, then lists nothing, then a part, then all: the page comes back to what it showed."""
    tab.show("one/measured", 3, other="one/measured, step 5")
    tab.press("w")
    tab.js("window.fpipe.app.sheet.select({ rank: 2, row: 7 })")
    seen, index = tab.js(SEEN), board.json("index")
    said = "() => document.querySelector('#notices').textContent"
    tab.page.route("**/index", lambda route: route.abort())
    tab.until(f"{said}.includes('does not answer')")
    assert tab.js(SEEN)["shown"] == seen["shown"]
    for count in (0, 2):
        tab.page.unroute_all()
        listed = json.dumps({"captures": index["captures"][:count], "notices": []})
        tab.page.route("**/index", functools.partial(answered, body=listed))
        tab.until(f"{said}.includes('one/measured, step 3: not listed at present')")
        tab.until("count => window.fpipe.app.library.entries.length === count", count)
        assert tab.js(SEEN) == seen
        assert tab.js("document.querySelector('#run').value") == "one/measured"
    tab.page.unroute_all()
    tab.until("() => document.querySelector('#notices').hidden")
    tab.settled("one/measured", 3)
    assert tab.js(SEEN) == seen
    tab.forgive("ERR_FAILED")


def test_it_recovers_from_a_real_restart(chromium, logdir):
    with Board(logdir) as board:
        board.until(lambda captures: len(captures) == len(STEPS) + len(DRIFTS) + len(LOOPS) + 5)
        with opened(chromium, board, HASTE) as tab:
            tab.show("one/measured", 3, other="one/predicted")
            tab.press("w")
            seen = tab.js(SEEN)
            board.__exit__()
            tab.until("() => document.querySelector('#notices').textContent.includes('does not answer')")
            with Board(logdir, port=urlsplit(board.url).port):
                tab.until("() => document.querySelector('#notices').hidden")
                tab.settled("one/measured", 3)
                assert tab.js(SEEN) == seen
            tab.forgive("ERR_CONNECTION")
            tab.forgive("ERR_EMPTY_RESPONSE")  # of a request that was under way when the server ended


# Runs beside each other


def test_two_runs_are_named_by_run_and_step_and_begin_with_their_first_compute(tab):
    tab.show("two/measured", 4, other="one/measured, step 2")
    headline = re.sub(r"\s+", " ", tab.text("#headline"))
    assert "one, step 2 makespan" in headline
    assert "(two, step 4 is +" in headline
    assert tab.js("window.fpipe.app.sheet.later") == pytest.approx(-EARLY)
    xs = tab.js(
        """() => {
            const { sheet } = window.fpipe.app, { state } = sheet;
            const first = ({ start, tracks }) => start[tracks.compute.rows[0]];
            return [sheet.main, sheet.other].map(c => state.viewOf(c === sheet.other).x(first(c.ranks.get(0))));
        }"""
    )
    assert xs[0] == pytest.approx(xs[1])
    row = next(row for row, effect in enumerate(effects(0)) if isinstance(effect, Forward))
    left, right, top, bottom = tab.box(0, row)
    assert tab.colour(left + 3, bottom + 6) == tab.colour(left + 3, top + 6) != tab.colour(left - 4, top + 6)
    tab.page.mouse.move(0, 0)
    tab.page.mouse.move(*tab.on_page((left + right) / 2, bottom + 8))
    tab.until("() => window.fpipe.app.sheet.pointer.spot?.other")
    assert tab.selected_under_pointer() == (0, row)
    assert re.search(r"starts\s+at the same time", tab.text("#hover"))


def test_differences_are_grouped_before_single_rows(tab):
    tab.show("two/measured", 4, other="one/measured, step 4")
    rows = tab.table("diff")
    assert [rows[0][0], rows[0][1], amount(rows[0][2])] == [
        f"rank 2: B +5.49 ms \u00d7 {MICROBATCHES}",
        "backward",
        pytest.approx(MICROBATCHES * 5.49e-3, rel=1e-2),
    ]
    assert len(rows) == 1  # all else took as long
    tab.frame.click("#panel-diff tbody button")
    rank, row = tab.selected()
    assert rank == 2
    assert row in [row for row, effect in enumerate(effects(2)) if isinstance(effect, Backward)]


def effects(rank):
    timeline = step_of()
    return [timeline.spans.effects[at] for at in timeline.spans.of(rank)]


def test_search_looks_in_both(tab):
    tab.show("two/measured", 4, other="one/measured, step 4")
    tab.frame.fill("#search", "kind=B rank=2 dur>5ms")
    tab.until("() => window.fpipe.app.finder.searched.endsWith('5ms')")
    assert tab.text("#search-count") == str(MICROBATCHES)
    tab.frame.fill("#search", "kind=F rank=1")
    tab.until("() => window.fpipe.app.finder.searched.endsWith('=1')")
    assert tab.text("#search-count") == str(2 * MICROBATCHES)
    title = tab.frame.get_attribute("#search-count", "title")
    assert title == f"{MICROBATCHES} in two, step 4; {MICROBATCHES} in one, step 4"
    rows = [row for row, effect in enumerate(effects(1)) if isinstance(effect, Forward)]
    seen = []
    for _ in range(2 * MICROBATCHES):
        tab.press("n")
        spot = tab.js("window.fpipe.app.sheet.selected")
        seen.append((bool(spot["other"]), spot["row"]))
    assert sorted(seen) == [(other, row) for other in (False, True) for row in rows]
    tab.press("Escape")


def test_beside_is_a_run_and_a_step(tab):
    tab.show("one/measured", 4, other="two")
    tab.until("() => window.fpipe.app.sheet.other?.entry.run === 'two/measured'")
    assert tab.js("window.fpipe.app.sheet.other.entry.step") == 4
    assert tab.text("#other-step option:checked") == "nearest: 4"
    tab.press("[")
    tab.settled("one/measured", 3)
    assert tab.js("window.fpipe.app.sheet.other.entry.step") == 3
    tab.press("[")
    tab.settled("one/measured", 2)
    assert tab.js("window.fpipe.app.sheet.other.entry.step") == 3
    tab.frame.select_option("#other-step", "4")
    tab.settled("one/measured", 2)
    assert tab.js("window.fpipe.app.sheet.other.entry.step") == 4
    tab.show("one/measured", 5, other="one/measured")
    tab.until("() => window.fpipe.app.sheet.other.entry.run === 'one/measured'")
    assert tab.js("window.fpipe.app.sheet.other.entry.step") == 4  # the step before
    assert tab.js("document.querySelector('#other-step').options.length") == len(STEPS)
    assert "measured, step 4 makespan" in re.sub(r"\s+", " ", tab.text("#headline"))


# Many steps


def test_steps_are_pythons_and_drift_and_outliers_are_told(tab):
    tab.show("drifts/measured", 10, other="nothing")
    tab.frame.click("#tab-steps")
    tab.until("steps => window.fpipe.app.steps.shown.rows.length === steps", len(DRIFTS))
    rows = tab.table("steps")
    for (step, timeline), (shown, makespan, bubble, busiest, compute) in zip(DRIFTS.items(), rows, strict=True):
        slowest = max(range(RANKS), key=lambda rank, timeline=timeline: timeline.busy[rank])
        assert (shown, busiest) == (str(step), f"rank {slowest}")
        times = 1e3 * timeline.makespan, 1e3 * max(timeline.busy)
        assert [float(makespan), float(compute)] == pytest.approx(times, abs=0.006)
        assert bubble == f"{100 * timeline.bubble_rate:.1f}%"
    told = tab.js("[...document.querySelectorAll('#panel-steps .marks li')].map(item => item.textContent)")
    assert "step 6: rank 1\u2019s compute +100.0%" in told
    assert any(re.fullmatch("rank 3\u2019s compute drifts \\+[23]\\d.\\d% from step 1 to 10", text) for text in told)
    assert any(text.startswith("step 6: makespan +") for text in told)
    assert not any("rank 0" in text or "rank 2" in text for text in told)
    assert tab.js("document.querySelectorAll('#panel-steps .chart').length") == 2
    assert tab.js("document.querySelectorAll('#panel-steps .chart')[0].querySelectorAll('.marked').length") == 1
    tab.frame.click("#panel-steps .marks button")
    tab.settled("drifts/measured", 6)


def test_loops_are_told_by_the_step(tab):
    tab.show("loops/measured", 7, other="loops/measured, step 1")
    period = {step: f"{1e3 * timeline.period:.4g} ms over {LOOP} steps" for step, timeline in LOOPS.items()}
    tab.until("() => window.fpipe.app.answer")
    shown = re.sub(r"\s+", " ", tab.text("#headline"))
    more = LOOPS[7].period / LOOPS[1].period - 1
    assert f" period {period[7]}" in shown
    assert f"measured, step 1 period {period[1]} (measured, step 7 is +{more:.1%})" in shown
    tab.frame.click("#tab-steps")
    tab.until("count => window.fpipe.app.steps.shown?.rows.length === count", len(LOOPS))
    assert "period" in tab.text("#panel-steps table:last-of-type thead")
    rows = tab.table("steps")
    for timeline, (_, each, _, busiest, compute) in zip(LOOPS.values(), rows, strict=True):
        assert timeline.period < 0.99 * timeline.makespan / LOOP
        assert float(each) == pytest.approx(1e3 * timeline.period, abs=0.006)
        assert float(compute) == pytest.approx(1e3 * max(timeline.busy) / LOOP, abs=0.006)
        assert timeline.busy[int(busiest.removeprefix("rank "))] == pytest.approx(max(timeline.busy))


def test_figures_of_steps_that_do_not_come_are_told_until_they_do(tab):
    tab.show("two/measured", 3, other="nothing")
    tab.page.route("**/steps?**", lambda route: route.fulfill(status=500, body="the disk is gone"))
    tab.frame.click("#tab-steps")
    said = "() => document.querySelector('#panel-steps').textContent"
    tab.until(f"{said}.includes('the disk is gone')")
    tab.page.unroute_all()
    tab.show("one/measured", 3, other="nothing")
    tab.until("steps => window.fpipe.app.steps.shown?.rows.length === steps", len(STEPS))
    assert "the disk" not in tab.text("#panel-steps")
    tab.show("two/measured", 3, other="nothing")
    tab.until(
        "() => window.fpipe.app.steps.shown.run === 'two/measured' && window.fpipe.app.steps.shown.rows.length === 2"
    )
    assert "the disk" not in tab.text("#panel-steps")
    tab.forgive("500")


def test_a_heat_map_of_ranks_and_steps(tab):
    tab.show("drifts/measured", 10, other="nothing")
    tab.frame.click("#tab-steps")
    tab.until("steps => window.fpipe.app.steps.shown.rows.length === steps", len(DRIFTS))
    size = tab.js("(({ width, height }) => [width, height])(document.querySelector('#panel-steps canvas'))")
    assert size == [len(DRIFTS), RANKS]
    at_cell(tab, "steps", 1, 5, size)
    typical = statistics.median(busy for timeline in DRIFTS.values() for busy in timeline.busy)
    by = DRIFTS[6].busy[1] / typical - 1
    said = tab.text("#panel-steps output")
    assert said == f"rank 1, step 6: {1e3 * DRIFTS[6].busy[1]:.4g} ms, {100 * by:.1f}% above the median"
    tab.page.mouse.click(*at_cell(tab, "steps", 0, 2, size))
    tab.settled("drifts/measured", 3)


def at_cell(tab, panel, row, column, size):
    """Move the pointer to a cell of a heat map; its place on the page."""
    canvas = tab.frame.locator(f"#panel-{panel} canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    place = box["x"] + box["width"] * (column + 0.5) / size[0], box["y"] + box["height"] * (row + 0.5) / size[1]
    tab.page.mouse.move(0, 0)
    tab.page.mouse.move(*place)
    return place


def test_a_heat_map_of_ranks_and_microbatches(tab):
    tab.show("drifts/measured", 10, other="nothing")
    rows = tab.table("microbatches")
    sums = [[computed(DRIFTS[10], rank, m) for rank in range(RANKS)] for m in range(MICROBATCHES)]
    for m, (took, (name, *times)) in enumerate(zip(sums, rows, strict=True)):
        total, middle, slowest, most = times
        assert (name, slowest) == (f"microbatch {m}", "rank 3")
        expected = [1e3 * time for time in (sum(took), statistics.median(took), max(took))]
        assert [float(total), float(middle), float(most)] == pytest.approx(expected, abs=0.006)
    place = at_cell(tab, "microbatches", 3, 2, (MICROBATCHES, RANKS))
    said = tab.text("#panel-microbatches output")
    assert said == f"rank 3, microbatch 2: {1e3 * sums[2][3]:.4g} ms, 40.0% above the median"
    tab.page.mouse.click(*place)
    tab.until("() => window.fpipe.app.sheet.selected")
    rank, row = tab.selected()
    assert (rank, effects(3)[row]) == (3, Backward(3, 2))
    tab.press("Escape")


def test_a_heat_map_of_many_columns_shows_means(tab):
    """A cell for each pixel or two, however many columns there are; a row that has no value stays empty."""
    found = tab.js(
        f"""async () => {{
            {MODULE}
            const {{ heat }} = await module("heat.js");
            const columns = Array.from({{ length: 5000 }}, (_, at) => at), value = (row, at) => row ? NaN : at % 5;
            const text = (row, at, cell) => `${{row}} ${{at}} ${{cell}}`, asked = [];
            const press = (row, at) => asked.push(at);
            const place = document.querySelector("#details");
            place.replaceChildren(...heat({{ name: "", ranks: [0, 1], columns, value, text, press, dark: false }}));
            const canvas = place.querySelector("canvas");
            const {{ left, top, width, height }} = canvas.getBoundingClientRect();
            const said = y => {{
                const at = {{ clientX: Math.round(left + width / 3), clientY: top + y * height }};
                canvas.dispatchEvent(new PointerEvent("pointermove", at));
                canvas.dispatchEvent(new MouseEvent("click", at));
                return place.querySelector("output").textContent;
            }};
            return [canvas.width, said(0.2), said(0.8), asked, width];
        }}"""
    )
    cells, first, second, asked, width = found
    assert asked == [pytest.approx(5000 / 3, abs=10)] * 2
    assert (first, second) == (f"0 {asked[0]} 2; the mean from there to {asked[0] + 4}", "rank 1: none")
    assert (cells, width) == (1000, 560)
    tab.js("window.fpipe.app.sheet.select(null)")


def computed(timeline, rank, microbatch):
    """The time that a rank computes of a microbatch."""
    return sum(span.end - span.start for span in timeline.compute(rank) if span.effect.microbatch == microbatch)


# Many ranks, and statistics


def test_many_ranks_are_folded_and_all_are_in_the_overview(tab):
    """A row of pixels for each rank, in the colours of its effects; a press goes to a moment and to a rank."""
    tab.show("wide/predicted", other="nothing")
    assert tab.js("window.fpipe.app.sheet.collapsed.size") == WIDE.plan.ranks
    tall = tab.js("document.querySelector('#overview').clientHeight")
    assert tall == WIDE.plan.ranks
    for rank in (0, 50, 95):
        found = overview_at(tab, rank, tall)
        for share, colour in found:
            when = share * WIDE.makespan
            busy = [s for s in WIDE.compute(rank) if s.start < when < s.end]
            assert colour == (KINDS[type(busy[0].effect)] if busy else [0, 0, 0]), (rank, share)
    top = tab.js("document.querySelector('#sight').getBoundingClientRect().top")
    box = tab.frame.locator("#overview").bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.98)
    tab.until("top => document.querySelector('#sight').getBoundingClientRect().top > top", top)
    assert tab.js("window.fpipe.app.sheet.layout.groups.at(-1).y < document.querySelector('#scroll').scrollTop + 900")
    assert tab.js("document.querySelector('#scroll').scrollTop") > 0


KINDS = {Forward: [0x56, 0xB4, 0xE9], Backward: [0xD5, 0x5E, 0x00]}


def overview_at(tab, rank, tall):
    """The colours of the overview's row of a rank, where nothing begins or ends nearby: (share of the step, colour)."""
    times = [time / WIDE.makespan for s in WIDE.compute(rank) for time in (s.start, s.end)]
    shares = [share for share in (at / 40 + 0.0125 for at in range(40)) if all(abs(share - t) > 0.004 for t in times)]
    assert len(shares) > 10
    colours = tab.js(
        """([rank, ranks, shares]) => {
            const canvas = document.querySelector("#overview-canvas"), { view } = window.fpipe.app.sheet;
            const { from, to } = view.all, context = canvas.getContext("2d"), whole = view.whole;
            const y = Math.floor((rank + 0.5) / ranks * canvas.height);
            const x = share => Math.floor((share * whole - from) / (to - from) * canvas.width);
            return shares.map(share => [...context.getImageData(x(share), y, 1, 1).data.slice(0, 3)]);
        }""",
        [rank, WIDE.plan.ranks, shares],
    )
    return list(zip(shares, colours, strict=True))


def test_statistics_of_a_range_and_of_a_search(tab):
    """Count, mean, p95 and sum by kind: of what is in the range, of what the search finds, and of both."""
    tab.show("drifts/measured", 10, other="nothing")
    spans = DRIFTS[10].spans
    low, high = 0.006, 0.02
    within = [span for span in spans if span.end >= low and span.start <= high]
    tab.js("([low, high]) => window.fpipe.app.sheet.measure(low, high)", [low, high])
    tab.js("window.fpipe.app.sheet.measured()")
    assert_statistics(tab, within)
    tab.frame.fill("#search", "rank=1,3")
    tab.until("() => window.fpipe.app.finder.searched === 'rank=1,3'")
    assert_statistics(tab, [span for span in within if span.rank in (1, 3)])
    tab.press("Escape")
    assert_statistics(tab, [span for span in spans if span.rank in (1, 3)])
    assert "that the search finds" in tab.text("#panel-range caption")


def assert_statistics(tab, spans):
    rows, unit = tab.table("range"), tab.unit("range", "sum")
    for kind, name in ((Forward, "forward"), (Backward, "backward")):
        took = sorted(span.end - span.start for span in spans if type(span.effect) is kind)
        (row,) = [row for row in rows if row[0] == name]
        high = took[math.ceil(0.95 * len(took)) - 1]
        assert int(row[1]) == len(took)
        assert [float(row[2]), float(row[3])] == pytest.approx([1e3 * statistics.mean(took), 1e3 * high], abs=0.006)
        assert amount(f"{row[4]} {unit}") == pytest.approx(sum(took), rel=1e-3)
    assert sum(int(row[1]) for row in rows if row[0] != "host") == len(spans)


# Memory


def test_memory_is_told_by_owner(tab, logdir):
    """A click on the memory of a rank: what it holds then, its peak, and who owns that."""
    tab.show("owned/measured", 1, other="nothing")
    x, y = tab.js(
        """() => {
            const { sheet } = window.fpipe.app;
            const { y, height } = sheet.layout.groups[1].tracks.find(track => track.kind === "memory");
            return [sheet.view.x(0.0051), 24 + y + height / 2];
        }"""
    )
    tab.page.mouse.click(*tab.on_page(x, y))
    tab.until("() => window.fpipe.app.sheet.account")
    details = tab.text("#details")
    assert re.search(r"rank\s+1\b", details)
    assert re.search(r"holds\s+2 KiB", details)
    assert re.search(r"peak\s+4 KiB at 6 ms", details)
    rows = tab.js("[...document.querySelectorAll('#details tbody tr')].map(row => row.innerText.split(/\\t+/))")
    assert [row[:3] for row in rows] == [
        ["residuals", "3 KiB", "75.0%"],
        ["received", "1 KiB", "25.0%"],
        ["sums of gradients", "512 B", "12.5%"],
    ]
    tab.press("Escape")
    assert "Click an effect" in tab.text("#details")


# Tables and files


def test_tables_are_sorted_by_their_heads(tab):
    """By numbers with their units: largest first, smallest first, as they were; a table filled anew keeps its order."""
    tab.show("drifts/measured", 10, other="nothing")
    rows = tab.table("bubbles")
    head = "#panel-bubbles thead th:nth-child({})"
    falling, rising = (sorted(range(RANKS), key=lambda rank: sign * float(rows[rank][2])) for sign in (-1, 1))
    for ranks, sort in ((falling, "descending"), (rising, "ascending"), (list(range(RANKS)), None)):
        tab.frame.click(head.format(3))
        assert [row[0] for row in tab.table("bubbles")] == [f"rank {rank}" for rank in ranks]
        assert tab.frame.get_attribute(head.format(3), "aria-sort") == sort
    tab.frame.focus(head.format(1))
    tab.page.keyboard.press("Enter")
    tab.page.keyboard.press("Enter")
    assert [row[0] for row in tab.table("bubbles")] == [f"rank {rank}" for rank in reversed(range(RANKS))]
    tab.show("drifts/measured", 9)
    assert [row[0] for row in tab.table("bubbles")] == [f"rank {rank}" for rank in reversed(range(RANKS))]
    tab.frame.click(head.format(1))
    amounts = tab.js(
        f"async () => {{ {MODULE} const {{ amount }} = await module('sorting.js'); "
        "return ['1.5 ms', '900 µs', '\u22122 s', '+3 KiB', '4 MiB (process)', '12.5%', 'rank 3', '-'].map(amount); }"
    )
    assert [None if amount is None or math.isnan(amount) else amount for amount in amounts] == pytest.approx(
        [1.5e-3, 9e-4, -2.0, 3072, 4 * 2**20, 12.5, None, None]
    )


def test_files_for_other_programs(tab, board, tmp_path):
    tab.show("one/measured", 4)
    query = {"run": "one/measured", "step": 4}
    for form, check in (
        ("csv", board.get("export", format="csv", **query)[2].__eq__),
        ("svg", lambda data: b"<svg" in data),
    ):
        with tab.page.expect_download() as download:
            tab.frame.click(f"#export-{form}")
        download.value.save_as(tmp_path / form)
        assert check((tmp_path / form).read_bytes()), form
        assert download.value.suggested_filename == f"one-measured_step_00000004.{form}"


PERFETTO = """<script>
window.addEventListener("message", ({ data, source, origin }) => {
    if (data === "PING") source.postMessage("PONG", origin);
    else window.trace = data.perfetto;
});
</script>"""


def test_a_trace_is_handed_to_perfettos_page(tab):
    """To a page that answers as Perfetto's does, in another window; where none answers, the way out is told."""
    tab.show("one/measured", 4)
    context = tab.page.context
    context.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html"))
    with context.expect_page() as opened:
        tab.frame.click("#export-open")
    page = opened.value
    page.wait_for_function("window.trace")
    trace = json.loads(page.evaluate("new TextDecoder().decode(window.trace.buffer)"))
    assert page.evaluate("[window.trace.title, window.trace.fileName]") == [
        "one/measured, step 4",
        "one-measured_step_00000004.json",
    ]
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) >= len(step_of().spans)
    page.close()
    context.unroute_all()


# Small windows


@pytest.mark.parametrize(("size", "least"), [((900, 600), 240), ((600, 500), 200)])
def test_a_small_window_shows_the_timeline_and_its_notices(chromium, board, size, least):
    """Below TensorBoard's bar of 64 pixels; the marks and the legend are behind a button."""
    state = f"&p.fpipe_timeline.run={quote('one/measured', '')}&p.fpipe_timeline.step=77"
    with opened(chromium, board, HASTE, state, size) as tab:
        tab.settled("one/measured", max(STEPS))
        if size[0] < 900:
            tab.until("() => !document.querySelector('#notices').hidden")
            notice = tab.js(
                "(({ clientHeight, scrollHeight }) => [clientHeight, scrollHeight])(document.querySelector('#notices'))"
            )
            assert notice[0] >= min(notice[1], 40)
        else:
            tab.frame.select_option("#step", "2")
            tab.until("() => document.querySelector('#notices').hidden")
        assert tab.js("document.querySelector('#timeline').clientHeight") >= least
        assert not tab.frame.is_visible("#legend")
        tab.frame.click("#marks")
        assert tab.frame.is_visible("#legend")
        assert tab.frame.is_visible("#toggle-send")
        tab.page.keyboard.press("Escape")
        assert not tab.frame.is_visible("#legend")
        assert tab.js("document.documentElement.scrollWidth <= window.innerWidth")
