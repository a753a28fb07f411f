"""The Pipeline tab in a real browser: what it shows is what Python says."""

import dataclasses
import json
import math
import re
import struct
import time
from importlib.resources import files

import numpy as np
import pytest

from fpipe import Costs, Placement, Plan, schedules, simulate
from fpipe._format import scale_of
from fpipe.effects import BackwardInput, BackwardWeight, Forward, Gather, Recv, Release, Scatter, Send
from fpipe.flight.format import AT_STATE, STATE, STATES
from fpipe.flight.recording import Recording
from fpipe.tables import LANES, TABLE
from fpipe.tensorboard.files.columns import Clock
from fpipe.tensorboard.files.reader import CaptureId, find
from fpipe.tensorboard.files.writer import write
from fpipe.tensorboard.server.summary import summary
from fpipe.timelines.comparison import Difference
from fpipe.timelines.spans import CAUSES
from fpipe.timelines.what_if import what_if
from tests import test_own_effects as own_effects
from tests.support.board import Board
from tests.support.captures import record
from tests.support.combinations import ALL, PAIRS, few, thorough
from tests.support.tab import BROWSED, CLOCK, HASTE, MODULE, amount, large, opened
from tests.tensorboard.test_recorder import recorded

pytestmark = BROWSED
HOSTILE = "<img src=x onerror=window.parent.hacked=1><b>'\"&\n\u202e" + "x" * 150
MANY = 120  # captures of one run
WIDE = 80 if PAIRS else 1  # microbatches of a run of 64 ranks
FLIGHT = "20260101-000000-a-1"
SCHEDULE = "<script>window.parent.hacked=1</script><img src=x onerror=window.parent.hacked=1>" + "y" * 5000


@pytest.fixture(scope="module")
def logdir(tmp_path_factory, pools):
    """A real run in two processes, and what else there may be in a log directory."""
    logdir = tmp_path_factory.mktemp("runs")
    pools(2).run(recorded, str(logdir / "real"), "zb_v", 5, {"steps": [1, 2, 4]}, "attention")
    one, other = (simulate(schedules.one_f_one_b, Plan(Placement.loop(3), 4), Costs(forward=f)) for f in (1.0, 1.5))
    write(logdir / HOSTILE, one, schedule=SCHEDULE)
    write(logdir / "other", other, schedule="one_f_one_b")
    record(logdir / "partial", {7: one}, [0], clock=Clock(0.0, 0.0))
    record(logdir / "partial", {7: one}, [2], clock=None)
    write(logdir / "wide", simulate(schedules.one_f_one_b, Plan(Placement.loop(64), WIDE)), schedule="1f1b")
    write(logdir / "own", own_effects.predicted(), schedule="loading")
    slow = Costs([1, 4.5, 1], backward=[2, 9, 2], communication=0.25)
    write(logdir / "slow", simulate(schedules.one_f_one_b, Plan(Placement.loop(3), 6), slow), schedule="1f1b")
    loop = simulate(schedules.updating("zb-h2"), Plan(Placement.loop(3), 6), Costs(update=1), steps=4)
    write(logdir / "loop", loop, schedule="zb-h2")
    uneven = Costs(forward=[2, 1, 3], backward=[4.5, 2, 5], communication=0.5)
    write(logdir / "uneven", simulate(schedules.one_f_one_b, Plan(Placement.loop(3), 6), uneven), schedule="1f1b")
    replicated(logdir / "shards")
    captured(logdir / "many", range(MANY))
    captured(logdir / "grows", [1])
    captured(logdir / "cut", [1, 2], ranks=2)
    (file,) = (logdir / "cut" / "measured" / "rank1").iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    captured(logdir / "damaged", [1], ranks=3)
    damage(logdir / "damaged" / "measured" / "rank1")
    captured(logdir / "ruined", [1], ranks=3)
    for rank in range(3):
        damage(logdir / "ruined" / "measured" / f"rank{rank}")
    mixed(logdir / "mixed")
    for run, killed in (("slow", True), ("uneven", False)):
        crash(logdir / run / "flights" / FLIGHT, killed)
    crash(logdir / "other" / "flights" / FLIGHT, False, 70)
    crash(logdir / "shards" / "flights" / FLIGHT, True, 4, "rank {0[1]} of replica {0[0]}")
    return logdir


def crash(folder, killed, ranks=3, name="rank {0[1]}"):
    """A flight of ranks, of which the second was killed or goes on, and the others wait for it."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        about = {
            "process": rank,
            "name": name.format(divmod(rank, 2 if "replica" in name else ranks)),
            "processes": ranks,
        }
        recording = Recording(folder / f"{rank:06}.flight", about)
        recording.begin(7)
        recording.writer("effect", f"Forward(stage={rank}, microbatch=1)")()
        if rank != 1:
            recording.waits(f"waiting for Activation(stage=1, microbatch=2) from rank 1 {HOSTILE}", 1)
        if rank == 1 and killed:
            content = bytearray(recording.path.read_bytes())
            STATE.pack_into(content, AT_STATE, time.time_ns(), STATES.index("gone"))
            recording.path.write_bytes(content)


def damage(folder):
    """Flip a bit of what a rank recorded."""
    (file,) = folder.iterdir()
    whole = bytearray(file.read_bytes())
    whole[whole.index(b"\x1f\x8b\x08\0\0\0\0\0") + 60] ^= 1
    file.write_bytes(whole)


def mixed(logdir):
    """Ranks of two jobs in one folder."""
    found = simulate(schedules.one_f_one_b, Plan(Placement.loop(3), 4))
    for rank, job in enumerate("aab"):
        record(logdir, {1: found}, [rank], job=job)


def captured(logdir, steps, ranks=1):
    """Steps that some ranks measured, all alike."""
    record(logdir, dict.fromkeys(steps, simulate(schedules.one_f_one_b, Plan(Placement.loop(ranks), 4))))


def replicated(logdir):
    """One step of two replicas that gather their parameters, as a recorder writes it."""
    plan = Plan(Placement.loop(2, 2), 4, replicas=2)
    costs = Costs(1e-3, 1e-3, 1e-3, gather=5e-4, scatter=1e-3, communication=2e-4)
    found = simulate(schedules.looped_bfs, plan, costs, resident=1)
    times = {"makespans": (0.03, 0.04), "busy": ((0.02, 0.021), (0.02, 0.033))}
    for replica, folder in enumerate((logdir, logdir / "replica1")):
        record(folder, {1: found}, schedule="bfs", changed=used, replica=replica, **times)


def used(columns, rank):
    """What comes beside the compute is waited for a little before it is there."""
    lanes = [TABLE.effects[type(effect)].track in LANES for effect in columns.effects]
    return dataclasses.replace(columns, used=np.where(lanes, columns.ends - 1e-4, np.nan))


@pytest.fixture(scope="module")
def board(logdir):
    with Board(logdir) as board:
        board.until(lambda captures: len(captures) == MANY + 22)
        yield board


@pytest.fixture
def tab(shared):
    shared.show("real/measured", 4, other="real/predicted, step 4")
    shared.released()
    shared.js("document.querySelector('#scroll').scrollTo(0, 0)")
    return shared


def capture(logdir, run="real", kind="measured", step=4):
    return find(logdir).read(CaptureId(run, kind, step))


def forwards(found, rank):
    """The rows of a rank's forwards, in order."""
    return [row for row, effect in enumerate(found.columns[rank].effects) if isinstance(effect, Forward)]


def close(value):
    """As it is when it is shown in four digits."""
    return pytest.approx(value, rel=6e-4, abs=1e-9)


def in_column(times, said, scale):
    """As they are in a column of times whose largest is the makespan, in four digits."""
    decimals = 3 - math.floor(math.log10(scale * said["makespan"]))
    return pytest.approx(times, abs=0.51 * 10.0**-decimals)


# What is shown


def test_the_runs_ranks_and_effects(tab, logdir):
    found = capture(logdir)
    rows = tab.table("effects")
    shown = [(int(rank), kind) for _, rank, kind, *_ in rows if kind != "host"]
    assert len(shown) == len(found.timeline.spans)
    for rank in range(2):
        effects = found.columns[rank].effects
        assert shown.count((rank, "forward")) == sum(isinstance(e, Forward) for e in effects)
        assert shown.count((rank, "input gradient")) == sum(isinstance(e, BackwardInput) for e in effects)
        assert sum(r == rank and kind.startswith("send") for r, kind in shown) == sum(
            isinstance(e, Send) for e in effects
        )
    options = tab.js("[...document.querySelectorAll('#run option')].map(o => o.value)")
    assert {"real/measured", "real/predicted", "other/predicted", "partial/measured", "wide/predicted"} <= set(options)


def test_an_effect_that_the_server_never_imported_is_shown(tab):
    tab.show("own/predicted")
    rows = {(int(rank), kind, stage, microbatch) for _, rank, kind, stage, microbatch, *_ in tab.table("effects")}
    assert rows >= {(1, "load", "1", ""), (0, "mark", "0", ""), (1, "mark", "1", ""), (1, "forward", "1", "0")}
    assert re.search(r"L\s+load", tab.text("#legend"))
    effects = own_effects.predicted().spans.effects
    first = own_effects.predicted().spans.first[1]
    row = next(at for at, e in enumerate(effects[first:]) if isinstance(e, own_effects.Load))
    text = tab.hover(1, row)
    assert re.search(r"kind\s+load", text)
    assert re.search(r"stage\s+1", text)
    assert re.search(r"duration\s+2\.5", text)
    left, _, top, _ = tab.box(1, row)
    assert tab.colour(left + 4, top + 3) == [0xF0, 0xE4, 0x42]


def test_hovering_says_what_python_says(tab, logdir):
    found = capture(logdir)
    spans, first = found.timeline.spans, found.timeline.spans.first
    for rank in range(2):
        at = next(
            i for i in spans.of(rank) if isinstance(spans.effects[i], Forward) and spans.effects[i].microbatch == 2
        )
        text, span = tab.hover(rank, at - first[rank]), spans[at]
        for name, value in (("start", span.start), ("end", span.end), ("duration", span.end - span.start)):
            assert amount(re.search(rf"{name}\s+(\S+ \S+)", text)[1]) == close(value), text
        assert re.search(rf"stage\s+{span.effect.stage}\b", text)
        assert re.search(r"microbatch\s+2\b", text)
        assert "predicted" in text  # the difference to what is beside it


def test_hovering_a_receive_says_how_long_it_waited_and_travelled(tab, logdir):
    found = capture(logdir)
    spans, first, own = found.timeline.spans, found.timeline.spans.first, found.columns[1]
    rows = [row for row, e in enumerate(own.effects) if isinstance(e, Recv)]
    row = max(rows, key=lambda row: own.ends[row] - own.starts[row])
    span = spans[first[1] + row]
    sent = spans[span.waited_for].start
    left = min(max(span.start, sent), span.end)
    text = tab.hover(1, row)
    assert amount(re.search(r"waiting\s+(\S+ \S+)", text)[1]) == close(left - span.start)
    assert amount(re.search(r"transfer\s+(\S+ \S+)", text)[1]) == close(span.end - left)
    assert amount(re.search(r"bytes\s+(\S+ \S+)", text)[1]) == close(own.bytes[row])


def test_gathers_and_scatters_of_replicas(tab, logdir):
    """Their tracks, boxes, details, colours and letters; and the makespans and ranks of all replicas."""
    tab.show("shards/measured", other="nothing")
    assert re.search(r"replica 0\s+30 ms", headline := tab.text("#headline"))
    assert re.search(r"replica 1\s+40 ms", headline)
    assert tab.table("replicas") == [
        ["rank 0 busy", "20.00", "20.00"],
        ["rank 1 busy", "21.00", "33.00 +57.1%"],
        ["makespan", "30.00", "40.00 +33.3%"],
    ]
    assert re.search(r"waiting", legend := tab.text("#legend"))
    assert re.findall(r"gather|scatter", legend) == ["gather", "scatter", "gather", "scatter"]  # effects, then causes
    effects = capture(logdir, "shards", step=1).columns[0].effects
    rows = {
        kind: [row for row, e in enumerate(effects) if type(e) is kind] for kind in (Gather, Release, Scatter, Send)
    }
    text = tab.hover(0, rows[Gather][0])
    assert text.startswith("gather 0")
    for pattern in (r"kind\s+gather", r"stage\s+0", r"duration\s+500 µs", r"first use\s+.*which waited 100 µs for it"):
        assert re.search(pattern, text), text
    left, right, top, bottom = tab.box(0, rows[Gather][0])
    assert tab.colour((left + right) / 2, (top + bottom) / 2 - 2) == [0xF0, 0xE4, 0x42]
    text = tab.hover(0, rows[Scatter][0])
    assert text.startswith("scatter 2")
    assert re.search(r"waited for\s+release 2 on rank 0", text)
    counts = {kind: 2 * len(of) for kind, of in rows.items()}  # the ranks have as many
    for query, count in {
        "kind=gather": counts[Gather],
        "kind=G": counts[Gather],
        "kind=scatter stage=2": 1,
        "kind=C": counts[Scatter],
        "kind=release": counts[Release],
        "kind=S": counts[Send],
        "gather": counts[Gather],
    }.items():
        assert (query, search(tab, query)[0]) == (query, str(count))
    tab.frame.fill("#search", "")
    tab.show("shards/replica1/measured", other="shards/measured")
    assert re.search(r"replica 1\s+40 ms", tab.text("#headline"))
    assert tab.table("diff")
    assert "not in the other" not in tab.text("body")


def test_hovering_where_a_rank_idles_says_why(tab, logdir):
    found = capture(logdir)
    for rank in range(2):
        gap = max(found.timeline.gaps(rank), key=lambda gap: gap.end - gap.start)
        text = tab.hover_idle(rank, forwards(found, rank)[0], (gap.start + gap.end) / 2)
        assert text.startswith(f"idle: {gap.cause}")
        assert f"{gap.cause}: {CAUSES[gap.cause]}" in text
        for name, value in (("start", gap.start), ("end", gap.end), ("duration", gap.end - gap.start)):
            assert amount(re.search(rf"{name}\s+(\S+ \S+)", text)[1]) == close(value), text


def test_bubbles_are_pythons(tab, logdir):
    said = summary(capture(logdir))
    rows, scale = tab.table("bubbles"), 1e3 if said["makespan"] >= 1e-3 else 1e6
    assert len(rows) == 2
    for shown, row in zip(rows, said["ranks"], strict=True):
        rank, busy, idle, share, _, *causes, in_flight, memory = shown
        assert rank == f"rank {row['rank']}"
        times = [row["busy"], row["idle"], *(row["causes"][cause] for cause in said["causes"])]
        shown_times = [float(cell) for cell in (busy, idle, *causes)]
        assert shown_times == in_column([scale * time for time in times], said, scale)
        assert share == f"{100 * (1 - row['busy'] / said['cost']):.1f}%"
        assert float(in_flight) == row["peak_in_flight"]
        assert amount(memory) == close(row["peak_memory"])
    assert f"bubble {100 * said['bubble_rate']:.1f}%" in tab.text("#headline")
    assert amount(re.search(r"makespan (\S+ \S+)", tab.text("#headline"))[1]) == close(said["makespan"])


GRID = 1 / 40  # at most the share of the pixels that lines of the grid take
PAINTED = f"""async rank => {{
    {MODULE}
    const [{{ theme, inks, GROUND, rgb }}, {{ AXIS }}] = await Promise.all(["palette.js", "measures.js"].map(module));
    const {{ sheet }} = window.fpipe.app, colours = theme(false), ratio = window.devicePixelRatio;
    window.fpipe.redraw();
    const track = sheet.layout.groups.find(group => group.number === rank).tracks[0];
    const [y, tall] = [AXIS + track.y - document.querySelector("#scroll").scrollTop, 8];
    const [left, wide] = [sheet.view.left, Math.floor(sheet.view.width)].map(each => each * ratio);
    const context = document.querySelector("#canvas").getContext("2d");
    const {{ data }} = context.getImageData(left, (y + 4) * ratio, wide, tall);
    const ground = rgb(colours.track), painted = Array(inks(colours).length).fill(0);
    const mixed = (part, at) => part * GROUND + ground[at] * (1 - GROUND);
    const looks = inks(colours).map(ink => [rgb(ink), rgb(ink).map(mixed)]);
    const pixel = at => data.slice(4 * at, 4 * at + 3);
    for (let x = 0; x < wide; x += 1) {{
        const column = Array.from({{ length: tall }}, (_, row) => pixel(row * wide + x));
        const same = (one, own) => own.every((part, at) => Math.abs(part - one[at]) < 3);
        const cause = looks.findIndex(look => column.every(one => look.some(own => same(one, own))));
        if (cause >= 0) painted[cause] += sheet.view.span / sheet.view.width / ratio;
    }}
    return painted;
}}"""


def test_idle_time_that_is_painted_adds_up_to_the_table(tab, logdir):
    """The pixels of each cause, in the pattern of its ink, are the sums of the table but for the ends of its gaps."""
    tab.show("uneven/predicted", other="nothing")
    found = capture(logdir, "uneven", "predicted", 0)
    said = summary(found)
    each = tab.js("window.fpipe.app.sheet.view.span / window.fpipe.app.sheet.view.width / window.devicePixelRatio")
    rows = tab.table("bubbles")
    assert any(float(row[5 + list(said["causes"]).index("imbalance")]) > 1 for row in rows)
    for rank, row in enumerate(rows):
        painted = dict(zip(CAUSES, tab.js(PAINTED, rank), strict=True))
        assert set(painted) == set(CAUSES)
        gaps = list(found.timeline.gaps(rank))
        for cause, cell in zip(said["causes"], row[5:], strict=False):
            whole, ends = float(cell), 3 * each * sum(gap.cause == cause for gap in gaps)
            assert painted[cause] == pytest.approx(whole, abs=ends + GRID * whole), (rank, cause)
    listed = tab.js(
        """() => [...window.fpipe.app.capture.ranks.keys()].map(rank => {
            const { start, end, cause } = window.fpipe.app.capture.gaps(rank), sums = {};
            cause.forEach((name, at) => (sums[name] = (sums[name] ?? 0) + end[at] - start[at]));
            return [rank, sums];
        })"""
    )
    assert len(listed) == len(rows)
    for rank, sums in listed:  # in the order in which their files arrived
        assert {cause: sums.get(cause, 0.0) for cause in said["causes"]} == pytest.approx(found.timeline.causes[rank])


def contrast(one, other):
    """The contrast of two colours (WCAG 2.2, 1.4.11 asks for 3 between graphics and what is beside them)."""

    def luminance(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def shifted(shape):
    """A repeated pattern, begun at each of its pixels."""
    return {tuple(row[x:] + row[:x] for row in shape[y:] + shape[:y]) for x in range(8) for y in range(8)}


def test_causes_differ_from_the_track_in_contrast_and_from_each_other_in_pattern(tab):
    themes, patterns = tab.js(
        f"async () => {{ {MODULE} const p = await module('palette.js'); "
        "return [[false, true].map(dark => p.theme(dark)), p.PATTERNS]; }"
    )
    for theme in themes:
        assert list(theme["causes"]) == list(CAUSES)
        for cause, ink in theme["causes"].items():
            assert contrast(ink, theme["track"]) >= 3, (cause, ink)
        below, middle, above = ("#{:02x}{:02x}{:02x}".format(*theme["heat"][at]) for at in ("below", "middle", "above"))
        assert min(contrast(below, middle), contrast(above, middle)) >= 3
    shapes = [tuple(tuple(row) for row in pattern) for pattern in patterns]
    for at, shape in enumerate(shapes):
        assert 0 < sum(map(sum, shape)) < 64
        assert not any(shape in shifted(other) for other in shapes[:at])


def test_the_page_keeps_its_marks_where_colours_are_forced(tab):
    marks = ["#legend .swatch", ".chip[aria-pressed=true]", "#tabs button[aria-selected=true]", ".bar i"]

    def shown():
        return tab.js(
            """marks => marks.map(at => {
                const style = getComputedStyle(document.querySelector(at));
                return [style.forcedColorAdjust, style.borderBottomWidth];
            })""",
            marks,
        )

    tab.show("uneven/predicted", other="nothing")
    plain = shown()
    tab.page.emulate_media(forced_colors="active")
    try:
        forced = shown()
    finally:
        tab.page.emulate_media(forced_colors="none")
    assert [adjust for adjust, _ in plain] == ["auto"] * 4
    assert [forced[0][0], forced[3][0]] == ["none", "none"]
    assert [width for _, width in forced[1:3]] == ["2px", "3px"]


def test_times_have_the_unit_that_the_command_gives_them(tab):
    times = [0.0, 2e-10, 5e-7, 9.9999e-7, 3e-6, 1.234567e-3, 0.5, 0.99994, 0.999995, 1.5, 9.876, 12.0, 3600.0]
    script = "async times => { %s const { time } = await module('format.js'); return times.map(at => time(at, 's')); }"
    shown = tab.js(script % MODULE, times)
    assert shown == [scale_of(time, "s").full(time) for time in times]


def test_no_number_of_a_column_has_an_exponent(tab):
    """Rounding errors are 0, and all cells of a column have as many decimals as the largest."""
    cells = tab.js(
        f"async () => {{ {MODULE} const {{ column }} = await module('format.js'); "
        "const one = column([27.5], 's'), other = column([0.018], 's'); "
        "return [2.78e-14, 1.5e-7, -3.25, 27.5].map(one.signed).concat([2.78e-14, 1.5e-7, 0.018].map(other.cell)); }"
    )
    assert cells == ["0", "0.00", "\u22123.25", "+27.50", "0", "0.00", "18.00"]
    tab.show("uneven/predicted", other="nothing")
    assert not [cell for row in tab.table("bubbles") for cell in row if re.search(r"\de[-+]?\d", cell)]


def test_idle_time_is_selected_with_what_it_waited_for(tab, logdir):
    tab.show("uneven/predicted", other="nothing")
    found = capture(logdir, "uneven", "predicted", 0)
    spans, first = found.timeline.spans, found.timeline.spans.first
    gap = next(gap for gap in found.timeline.gaps(1) if gap.cause == "imbalance")
    at = next(at for at in spans.of(1) if spans[at].track == "compute" and spans.starts[at] >= gap.end)
    chain = [at]
    while spans.waited[chain[-1]] >= 0:
        chain.append(spans.waited[chain[-1]])
    awaited = next(at for at in chain if spans[at].rank != 1 and spans[at].track == "compute")
    x = tab.js("when => window.fpipe.app.sheet.view.x(when)", (gap.start + gap.end) / 2)
    _, _, top, bottom = tab.box(1, forwards(found, 1)[0])
    tab.page.mouse.click(*tab.on_page(x, (top + bottom) / 2))
    tab.until("() => window.fpipe.app.sheet.idle")
    details = tab.text("#details")
    assert details.startswith("idle: imbalance")
    effect = spans[awaited].effect
    letter = TABLE.effects[type(effect)].letter
    assert re.search(rf"waited for\s+{letter}{effect.microbatch} on rank {spans[awaited].rank}\b", details)
    more = found.timeline.busy[2] - found.timeline.busy[1]
    assert re.search(rf"busiest rank\s+2, computes {more:g} more", details)
    links = tab.js("[...document.querySelectorAll('#details ol button')].map(link => link.textContent)")
    ranks = [int(re.search(r"rank (\d)", link)[1]) for link in links]
    assert ranks == [spans[at].rank for at in chain[1:]][: len(ranks)]
    tab.press("g")
    after = next(each for each in found.timeline.gaps(1) if each.start >= gap.end)
    assert tab.js("window.fpipe.app.sheet.idle.start") == pytest.approx(after.start)
    tab.press("G")
    assert tab.js("window.fpipe.app.sheet.idle.start") == pytest.approx(gap.start)
    tab.frame.click("#details ol button")
    assert tab.selected() == (spans[chain[1]].rank, chain[1] - first[spans[chain[1]].rank])
    tab.press("Escape")


def test_what_would_help_is_pythons_and_a_click_shows_it_beside(tab, logdir):
    tab.show("slow/predicted", other="nothing")
    result = what_if(capture(logdir, "slow", "predicted", 0).timeline, schedule="1f1b")
    tab.until("() => window.fpipe.app.capture.whatIf")
    assert result.headline().startswith("rank 1 computes 4.5x slower than the median: ")
    assert result.headline() in tab.text("#headline")
    rows = tab.table("what-if")
    assert [row[0] for row in rows] == [row.what for row in result.rows]
    for shown, row in zip(rows, result.rows, strict=True):
        wins, share, makespan, assumes = shown[1:]
        assert [float(wins), float(makespan)] == pytest.approx([row.seconds, row.makespan], abs=0.006)
        assert (share, assumes) == (f"{100 * row.seconds / result.timeline.makespan:.1f}%", row.assumes)
    assert result.headline() in tab.text("#panel-what-if")
    assert "the step takes the same" in tab.text("#panel-what-if")
    tab.frame.click("#panel-what-if td button, #panel-what-if th button")
    tab.settled("slow/predicted")
    tab.until("() => window.fpipe.app.sheet.other?.entry.what === 'rank 1'")
    mended = result.timeline_of("rank 1")
    assert f"if rank 1 makespan {mended.makespan:g}" in re.sub(r"\s+", " ", tab.text("#headline"))
    assert tab.js("[...window.fpipe.app.sheet.other.ranks.get(1).end]") == pytest.approx(
        [mended.spans.ends[at] for at in mended.spans.of(1)]
    )
    assert tab.text("#other option:checked") == "this step, if rank 1 were ideal"
    assert tab.frame.get_attribute("#panel-what-if tbody button", "aria-pressed") == "true"
    assert tab.table("diff")
    tab.show("uneven/predicted")
    assert tab.js("window.fpipe.app.sheet.other") is None


def test_the_critical_path_is_pythons(tab, logdir):
    path = summary(capture(logdir))["critical"]
    tab.frame.click("#tab-critical")
    assert tab.js("window.fpipe.app.capture.summary.critical") == [list(place) for place in path]
    items = tab.js("[...document.querySelectorAll('#panel-critical li')].map(i => i.innerText)")
    assert items[0].strip().startswith(f"rank {path[0][0]}")
    took = sum(amount(re.search(r"\s([\d.]+(e-\d+)? (ns|µs|ms|s))\s*$", item)[1]) for item in items)
    timeline = capture(logdir).timeline
    steps = [timeline.spans[at] for at in timeline.critical_spans]
    sent = {at: timeline.spans[span.waited_for].start for at, span in enumerate(steps) if isinstance(span.effect, Recv)}
    shown = (
        s.end - max(s.start, sent.get(at, s.start)) for at, s in enumerate(steps) if not isinstance(s.effect, Send)
    )
    assert took == close(sum(shown))
    before = tab.pixels()
    tab.press("c")
    assert tab.frame.get_attribute("#toggle-path", "aria-pressed") == "true"
    assert tab.pixels() != before
    tab.press("c")
    assert tab.pixels() == before


def test_measured_stands_beside_predicted(tab, logdir):
    measured, predicted = (capture(logdir, kind=kind).timeline for kind in ("measured", "predicted"))
    difference = Difference(measured, predicted)
    rows, scale = tab.table("diff", 1), 1e3 if max(difference.makespan) >= 1e-3 else 1e6
    for rank, row in enumerate(rows):
        pairs = measured.busy[rank], predicted.busy[rank]
        assert [float(cell) for cell in row[1:3]] == in_column(
            [scale * taken for taken in pairs], {"makespan": max(difference.makespan)}, scale
        )
    said = tab.js("window.fpipe.app.answer")
    assert said == json.loads(json.dumps(difference.as_json()))
    effects = tab.table("diff", 2)
    assert amount(effects[0][1]) == close(said["effects"][0]["took"][0])
    assert amount(effects[0][2]) == close(said["effects"][0]["took"][1])


def test_another_run_can_stand_beside(tab):
    tab.show(f"{HOSTILE}/predicted", other="other")
    assert tab.js("window.fpipe.app.answer.kinds.Forward") == [12.0, 18.0]


def test_runs_in_other_units_are_not_compared(tab):
    tab.show("real/measured", 4, other="other/predicted, step 0")
    assert "its times are in no unit of time, and those in s" in tab.text("#notices")
    assert tab.js("window.fpipe.app.answer") is None
    assert tab.js("window.fpipe.app.sheet.other") is None


def test_several_steps_are_shown_with_their_period(tab, logdir):
    tab.show("loop/predicted")
    found = capture(logdir, "loop", "predicted", 0)
    assert "period 19 over 4 steps" in re.sub(r"\s+", " ", tab.text("#headline"))
    for rank in range(3):
        assert tab.js(f"window.fpipe.app.sheet.main.ranks.get({rank}).recorded") == len(found.columns[rank])


def test_another_run_begins_anew(tab, logdir):
    for key in (".", "w", "w"):  # the first effect, of which every run has one
        tab.press(key)
    tab.js("window.fpipe.app.sheet.measure(0, 1)")
    tab.js("window.fpipe.app.sheet.measured()")
    assert "rank 1" in tab.text("#panel-range table:last-of-type")
    tab.show("other/predicted")
    assert tab.js("window.fpipe.app.sheet.view.fitted")
    assert "measures a range" in tab.text("#panel-range")
    assert "predicted" in tab.text("#details")  # the same effect, of the run that is shown
    assert not tab.frame.is_visible("#tab-diff")
    assert tab.js("window.fpipe.app.sheet.select({ rank: 9, row: 0 }), window.fpipe.app.sheet.selected") is None


def test_steps_are_chosen_by_list_buttons_and_keys(tab):
    step = "Number(document.querySelector('#step').value)"
    assert tab.js("[...document.querySelectorAll('#step option')].map(o => Number(o.value)).sort()") == [1, 2, 4]
    tab.frame.click("#step-prev")
    tab.until(f"() => {step} === 2")
    tab.press("[")
    tab.until(f"() => {step} === 1")
    tab.press("]")
    tab.until(f"() => {step} === 2 && window.fpipe.app.capture.entry.step === 2")
    tab.show("real/measured", 1)
    assert tab.js("window.fpipe.app.capture.entry.step") == 1


HALVES = BackwardInput | BackwardWeight
SEARCHES = {
    "kind=F": lambda span: isinstance(span.effect, Forward),
    "mb=1 kind=I": lambda span: isinstance(span.effect, BackwardInput) and span.effect.microbatch == 1,
    "rank=1 kind=F,I": lambda span: span.rank == 1 and isinstance(span.effect, Forward | BackwardInput),
    "kind=F mb=1-2 stage=0,3": lambda span: (
        isinstance(span.effect, Forward) and span.effect.microbatch in (1, 2) and span.effect.stage in (0, 3)
    ),
    "mb=1 kind=b": lambda span: isinstance(span.effect, BackwardInput | BackwardWeight) and span.effect.microbatch == 1,
    "kind=F dur>1000s": lambda span: False,
    "kind=backward mb=1": lambda span: isinstance(span.effect, HALVES) and span.effect.microbatch == 1,
    "backward mb=1": lambda span: isinstance(span.effect, HALVES) and span.effect.microbatch == 1,
    '"weight gradient" rank=0': lambda span: isinstance(span.effect, BackwardWeight) and span.rank == 0,
    'kind="weight gradient" and rank=0': lambda span: isinstance(span.effect, BackwardWeight) and span.rank == 0,
    "recv rank=1": lambda span: isinstance(span.effect, Recv) and span.rank == 1,
    "kind=Recv": lambda span: isinstance(span.effect, Recv),
    "kind=F dur > 0s": lambda span: isinstance(span.effect, Forward),
    "kind=F,I not mb=1": lambda span: isinstance(span.effect, Forward | BackwardInput) and span.effect.microbatch != 1,
    "kind=F mb=0 or kind=I mb=1 or send rank=0": lambda span: (
        (isinstance(span.effect, Forward) and span.effect.microbatch == 0)
        or (isinstance(span.effect, BackwardInput) and span.effect.microbatch == 1)
        or (isinstance(span.effect, Send) and span.rank == 0)
    ),
    "constructor": lambda span: False,
}


def test_search_finds_what_python_finds(tab, logdir):
    tab.show("real/measured", 4, other="nothing")
    spans = capture(logdir).timeline.spans
    for query, matches in SEARCHES.items():
        numbers = [int(n) for n in re.findall(r"\d+", search(tab, query)[0])] or [0]
        assert (query, numbers[-1]) == (query, sum(map(matches, spans)))
    tab.frame.fill("#search", "")


def search(tab, query):
    """Search at once, and not after the pause that follows a key; return the message and `aria-invalid`."""
    return tab.js(
        """query => {
            const [box, count] = ["#search", "#search-count"].map(each => document.querySelector(each));
            box.value = query;
            window.fpipe.app.finder.search();
            return [count.innerText, box.getAttribute("aria-invalid")];
        }""",
        query,
    )


def test_a_query_that_cannot_be_read_is_told(tab):
    wrong = ["mb=", "mb=5-3", "mb=x", "constructor=1", "kind=F,", "rank>1", "dur>1h", "=5"]
    for query in [*wrong, '"F3', "kind=F or", "or mb=1", "not", "(mb=1)", "mb=1 or or mb=2", '""', "F1|F2"]:
        message, invalid = search(tab, query)
        assert invalid == "true", query
        assert query in message
    tab.frame.fill("#search", "")
    tab.until("() => !document.querySelector('#search').hasAttribute('aria-invalid')")


def test_n_goes_from_match_to_match(tab, logdir):
    tab.show("real/measured", 4, other="nothing")
    rows = forwards(capture(logdir), 1)
    tab.frame.fill("#search", "kind=F rank=1")
    for key, place in (("n", 0), ("n", 1), ("n", 2), ("N", 1), ("N", 0), ("N", -1), ("n", 0)):
        tab.press(key)
        assert tab.selected() == (1, rows[place])
        assert tab.text("#search-count") == f"{place % len(rows) + 1} of {len(rows)}"
    tab.frame.fill("#search", "")


def test_the_keyboard_zooms_moves_and_selects(tab):
    whole = tab.view()
    for key, holds in (
        ("w", lambda a, b: b[1] - b[0] < a[1] - a[0]),
        ("w", lambda a, b: b[1] - b[0] < a[1] - a[0]),
        ("d", lambda a, b: b[0] > a[0]),
        ("ArrowLeft", lambda a, b: b[0] < a[0]),
        ("s", lambda a, b: b[1] - b[0] > a[1] - a[0]),
    ):
        before = tab.view()
        tab.press(key)
        assert holds(before, tab.view()), key
    tab.press("0")
    assert tab.view() == pytest.approx(whole)
    tab.press(".")
    first = tab.text("#details")
    said = tab.js("document.querySelector('#live').textContent")
    assert "rank 0" in said
    tab.press(".")
    assert tab.text("#details") != first
    assert tab.js("document.querySelector('#live').textContent") != said
    tab.press("w")
    tab.press(",")
    time.sleep(0.6)  # longer than a view rests until it is told
    assert tab.js("document.querySelector('#live').textContent") == said
    assert tab.js("document.querySelector('#canvas').getAttribute('role')") == "application"


def test_a_click_selects_and_keys_go_on_from_there(tab, logdir):
    found = capture(logdir)
    spans, first = found.timeline.spans, found.timeline.spans.first
    computes = [row for row, at in enumerate(spans.of(1)) if spans[at].track == "compute"]
    rows = sorted(forwards(found, 1), key=lambda row: found.columns[1].ends[row] - found.columns[1].starts[row])
    row = rows[len(rows) // 2]
    span = spans[first[1] + row]
    tab.page.mouse.click(*tab.place(1, row))
    tab.until("() => window.fpipe.app.sheet.selected")
    assert tab.selected() == (1, row)
    details = tab.text("#details")
    assert amount(re.search(r"duration\s+(\S+ \S+)", details)[1]) == close(span.end - span.start)
    assert re.search(rf"microbatch\s+{span.effect.microbatch}\b", details)
    tab.press("Enter")
    begin, end = tab.view()
    assert begin <= span.start < span.end <= end
    assert end - begin == pytest.approx(8 * (span.end - span.start))
    tab.press("Alt+ArrowRight")
    assert tab.selected() == (1, computes[computes.index(row) + 1])
    tab.press("Alt+ArrowLeft")
    assert tab.selected() == (1, row)
    tab.press("Alt+ArrowUp")
    rank, beside = tab.selected()
    middle = (span.start + span.end) / 2
    off = {at - first[0]: max(spans[at].start - middle, middle - spans[at].end) for at in spans.of(0)}
    off = {row: max(0.0, far) for row, far in off.items() if spans[row + first[0]].track == "compute"}
    assert (rank, off[beside]) == (0, min(off.values()))
    tab.press("Alt+ArrowDown")
    assert tab.selected()[0] == 1


def test_p_selects_what_was_waited_for(tab, logdir):
    spans, first = capture(logdir).timeline.spans, capture(logdir).timeline.spans.first
    at = next(at for at in reversed(spans.of(1)) if isinstance(spans.effects[at], Forward))
    tab.page.mouse.click(*tab.place(1, at - first[1]))
    tab.until("() => window.fpipe.app.sheet.selected")
    for _ in range(3):
        tab.press("p")
        at = spans[at].waited_for
        rank = spans[at].rank
        assert tab.selected() == (rank, at - first[rank])
        assert re.search(rf"rank\s+{rank}\b", tab.text("#details"))


def test_colours_tell_kinds_or_microbatches_or_stages(tab, logdir):
    found = capture(logdir, "other", "predicted", 0)
    tab.show("other/predicted")
    places = (0, forwards(found, 0)[0]), (0, forwards(found, 0)[1]), (2, forwards(found, 2)[0])
    same = {}
    for colouring in ("kind", "microbatch", "stage"):
        tab.frame.select_option("#colour", colouring)
        corners = [(left + 3, top + 3) for left, _, top, _ in (tab.box(*place) for place in places)]
        one, *others = (tab.colour(*corner) for corner in corners)
        same[colouring] = [one == other for other in others]
    tab.frame.select_option("#colour", "kind")
    assert same == {"kind": [True, True], "microbatch": [False, True], "stage": [True, False]}


def test_tracks_and_marks_can_be_left_out(tab):
    shown, before = tab.tracks(0), tab.pixels()
    assert {"compute", "send", "receive", "memory"} <= shown
    for what in few([*sorted(shown - {"compute"}), "causes", "arrows", "path"], ["memory", "causes", "arrows"]):
        tab.frame.click(f"#toggle-{what}")
        assert tab.tracks(0) == shown - {what}
        assert tab.pixels() != before, what
        tab.frame.click(f"#toggle-{what}")
        assert tab.tracks(0) == shown
        assert tab.pixels() == before, what


def test_ranks_are_folded(tab, logdir):
    row = forwards(capture(logdir), 0)[0]
    whole = tab.tracks(0)

    def press_on_rank():
        _, _, top, bottom = tab.box(0, row)
        tab.page.mouse.click(*tab.on_page(20, (top + bottom) / 2))

    press_on_rank()
    tab.until("() => window.fpipe.app.sheet.layout.groups[0].collapsed")
    assert (tab.tracks(0), tab.tracks(1)) == ({"compute"}, whole)
    press_on_rank()
    tab.until("() => !window.fpipe.app.sheet.layout.groups[0].collapsed")
    tab.press(".")
    for key, folded in (("x", {0}), ("x", set()), ("X", {0, 1}), ("X", set())):
        tab.press(key)
        assert {rank for rank in range(2) if tab.tracks(rank) == {"compute"}} == folded, key


def test_memory_goes_in_steps(tab):
    for _ in range(3):
        lines = tab.lines("memory")
        assert len(lines) > 20
        assert [line for line in lines if line[0] != line[2] and line[1] != line[3]] == []
        tab.press("w")


def test_a_range_is_measured(tab, logdir):
    timeline = capture(logdir).timeline
    x, y = tab.place(0, next(r for r, e in enumerate(capture(logdir).columns[0].effects) if isinstance(e, Forward)))
    tab.page.keyboard.down("Shift")
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 300, y + 5, steps=4)
    tab.page.mouse.up()
    tab.page.keyboard.up("Shift")
    rows, unit = tab.table("range", 1), tab.unit("range", "busy", 1)
    span = tab.js("[window.fpipe.app.sheet.range.from, window.fpipe.app.sheet.range.to]")
    for rank, row in enumerate(rows):
        busy = sum(max(0.0, min(s.end, span[1]) - max(s.start, span[0])) for s in timeline.compute(rank))
        computed, idle = (amount(f"{cell} {unit}") for cell in (row[1], row[3]))
        assert computed == pytest.approx(busy, abs=5e-4 * (span[1] - span[0]))  # four digits of the range
        assert computed + idle == pytest.approx(span[1] - span[0], rel=1e-3)


def test_exports_are_files(tab, logdir, tmp_path):
    found = capture(logdir)
    for button, check in (
        ("export-json", lambda data: boxes(data) >= len(found.timeline.spans)),
        ("export-png", lambda data: data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", data[16:20])[0] >= 1000),
    ):
        with tab.page.expect_download() as download:
            tab.frame.click(f"#{button}")
        path = tmp_path / button
        download.value.save_as(path)
        assert check(path.read_bytes()), button
        assert re.fullmatch(r"real-measured_step_00000004\.\w+", download.value.suggested_filename)


def test_an_export_shows_how_far_it_is_and_can_be_cancelled(tab):
    tab.page.route("**/export?*", lambda route: None)  # which is never answered
    tab.frame.click("#export-json")
    assert tab.text("#export-json") == "Cancel 0%"
    tab.frame.click("#export-json")
    tab.until("() => document.querySelector('#export-json').textContent === 'Perfetto'")
    assert "export" not in tab.js("document.querySelector('#notices').textContent")
    tab.page.unroute_all()
    tab.js(
        "() => { window.shares = []; new MutationObserver(() => window.shares.push("
        "document.querySelector('#export-json').textContent)).observe("
        "document.querySelector('#export-json'), { childList: true }) }"
    )
    with tab.page.expect_download():
        tab.frame.click("#export-json")
    tab.until("() => window.shares.at(-1) === 'Perfetto'")
    assert tab.js("window.shares.at(-2)") == "Cancel 100%"


def boxes(data):
    """How many slices are in a trace of Chrome's."""
    return sum(event["ph"] == "X" for event in json.loads(data)["traceEvents"])


def test_it_is_dark_where_the_host_is(tab):
    def lightness():
        ground = tab.js("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", ground)[:3])), sum(tab.colour(1, 30))

    light = lightness()
    tab.page.evaluate("document.body.classList.add('dark-mode')")
    tab.until("() => document.documentElement.classList.contains('dark')")
    dark = lightness()
    tab.page.evaluate("document.body.classList.remove('dark-mode')")
    tab.until("() => !document.documentElement.classList.contains('dark')")
    assert max(dark) < 200 < 600 < min(light)
    assert lightness() == light


# What is hostile, missing, or large


def test_names_are_shown_as_text(tab):
    tab.show(f"{HOSTILE}/predicted")
    assert "<script>" in tab.text("#headline")
    assert "\u202e" not in tab.text("#panel-bubbles caption")
    assert tab.js("document.querySelectorAll('img, script:not([type=module]):not([src])').length") == 0
    assert tab.page.evaluate("window.hacked") is None
    assert tab.js("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_missing_rank_and_a_clock_that_was_not_compared_are_told(tab):
    tab.show("partial/measured")
    notices = tab.text("#notices")
    assert "rank 1 of 3 missing" in notices
    assert "the clocks of rank 2 were not compared" in notices
    assert tab.js("window.fpipe.app.sheet.layout.groups.map(group => group.number)") == [0, 1, 2]
    tab.until("() => window.fpipe.app.capture.whatIf")
    tab.frame.click("#tab-what-if")
    assert tab.text("#panel-what-if").startswith("what would help is not known: the ranks' clocks were not compared")
    rows = tab.table("bubbles")
    assert [row[0] for row in rows] == ["rank 0", "rank 2"]
    assert "not compared" in rows[1]
    causes = [cause for cause in CAUSES if cause not in (*LANES, "host")]
    assert rows[1].count("\u2013") >= len(causes)


@thorough
def test_sixty_four_ranks_are_scrolled(tab, logdir):
    tab.show("wide/predicted")
    assert tab.js("window.fpipe.app.sheet.layout.groups.length") == 64
    assert tab.js("document.querySelector('#scroll').scrollHeight > document.querySelector('#scroll').clientHeight")
    assert len(tab.table("bubbles")) == 64
    tab.js("document.querySelector('#scroll').scrollTo(0, 1e6)")
    text = tab.hover(63, forwards(capture(logdir, "wide", "predicted", 0), 63)[-1])
    assert re.search(r"rank\s+63\b", text)
    assert re.search(rf"microbatch\s+{WIDE - 1}\b", text)


def test_each_of_many_steps_can_be_chosen(tab):
    tab.show("many/measured", 0)
    steps = tab.js("[...document.querySelectorAll('#step option')].map(o => Number(o.value))")
    assert steps == list(range(MANY))
    tab.show("many/measured", MANY - 1)
    assert tab.frame.is_disabled("#step-next")


def test_a_file_that_was_cut_short_is_told(tab):
    tab.show("cut/measured", 2)
    assert "rank 1 of 2 missing" in tab.text("#notices")
    assert tab.js("[...window.fpipe.app.capture.ranks.keys()]") == [0]
    tab.show("cut/measured", 1)
    assert "missing" not in tab.js("document.querySelector('#notices').textContent")
    assert tab.js("window.fpipe.app.capture.ranks.size") == 2


def test_a_rank_that_is_left_out_has_one_notice_and_is_not_drawn(tab):
    for run, number, problem in (
        ("damaged", 1, "rank 1 is left out: step 1 in damaged/measured/rank1 is damaged"),
        ("mixed", 2, "rank 2 is left out: step 1 in mixed/measured/rank2 is of another job than rank 0's"),
    ):
        tab.show(f"{run}/measured")
        (notice,) = tab.js("[...document.querySelectorAll('#notices p')].map(p => p.textContent)")
        assert notice.startswith(problem)
        assert sorted(tab.js("[...window.fpipe.app.capture.ranks.keys()]")) == [n for n in range(3) if n != number]
        assert len(tab.table("bubbles")) == 2
    tab.forgive("422")


def test_a_run_of_which_nothing_can_be_read_has_one_notice(tab):
    tab.frame.select_option("#run", "ruined/measured")
    tab.until("() => document.querySelector('#notices').textContent.includes('ranks 0, 1, 2 are left out')")
    tab.until("() => window.fpipe.app.capture.whatIf === null")
    assert tab.js("document.querySelectorAll('#notices p').length") == 1
    tab.forgive("422")


def test_the_last_effects_of_a_crashed_job_are_shown(tab):
    tab.show("slow/predicted")
    tab.until("() => document.querySelector('#notices').textContent.includes('is gone and left no reason')")
    rows = tab.table("flight")
    assert [row[:2] for row in rows] == [["rank 0", "runs"], ["rank 1", "gone"], ["rank 2", "runs"]]
    assert rows[1][2:4] == ["7", "Forward(stage=1, microbatch=1)"]
    assert [row[5] for row in rows] == ["rank 1", "", "rank 1"]
    assert tab.text("#panel-flight p").startswith("Rank 1 (process ")
    assert tab.js("document.querySelectorAll('#panel-flight details').length") == 3
    tab.frame.click("#panel-flight details:nth-of-type(2) summary")
    last = tab.js("[...document.querySelectorAll('#panel-flight details')][1].innerText")
    assert "Forward(stage=1, microbatch=1)" in last
    assert tab.page.evaluate("window.hacked") is None
    tab.show("own/predicted")
    tab.until("() => document.querySelector('#tab-flight').hidden")
    assert "is gone" not in tab.js("document.querySelector('#notices').textContent")


@thorough
def test_a_link_opens_the_panel_of_a_flight(tab):
    tab.show("slow/predicted")
    tab.until("() => !document.querySelector('#tab-flight').hidden")
    tab.frame.click("#tab-flight")
    tab.linked(run="slow/predicted", tab="flight")
    tab.again()
    tab.until("() => document.querySelector('#tab-flight').ariaSelected === 'true'")  # it has come after the capture


def test_a_job_that_runs_has_its_last_effects_without_a_notice(tab):
    tab.show("uneven/predicted")
    tab.until("() => !document.querySelector('#tab-flight').hidden")
    assert tab.text("#notices") == ""
    tab.table("flight")
    assert "is at work, and others wait for it" in tab.text("#panel-flight p")


def test_of_more_ranks_those_near_the_fault_are_shown(tab):
    tab.show("other/predicted")
    tab.until("() => !document.querySelector('#tab-flight').hidden")
    rows = tab.table("flight")
    assert [row[0] for row in rows] == ["rank 1", "rank 0", *(f"rank {rank}" for rank in range(2, 64))]
    assert "64 of 70 ranks" in tab.text("#panel-flight > table caption")
    assert tab.js("document.querySelectorAll('#panel-flight details').length") == 64


def test_the_flight_of_replicas_is_shown_at_each_of_them(tab):
    for run in few(["shards/measured", "shards/replica1/measured"], ["shards/replica1/measured"]):
        tab.show(run, 1)
        tab.until("() => !document.querySelector('#tab-flight').hidden")
        rows = tab.table("flight")
        assert [row[0] for row in rows] == [
            f"rank {rank} of replica {replica}" for replica in (0, 1) for rank in (0, 1)
        ]
        assert [row[5] for row in rows] == [*(["rank 1 of replica 0", ""]), *["rank 1 of replica 0"] * 2]
        assert "Rank 1 of replica 0 (process" in tab.text("#notices")


def test_a_flight_that_does_not_come_is_told_and_asked_for_again(tab):
    tab.show("own/predicted")
    tab.until("() => document.querySelector('#tab-flight').hidden")
    tab.page.route("**/flight?**", lambda route: route.fulfill(status=500, body="the disk is gone"))
    tab.show("slow/predicted")
    tab.until("() => document.querySelector('#notices').textContent.includes('the disk is gone')")
    assert tab.js("document.querySelector('#tab-flight').hidden")
    tab.page.unroute_all()
    tab.until("() => document.querySelector('#notices').textContent.includes('is gone and left no reason')")
    assert "the disk" not in tab.text("#notices")
    tab.forgive("500")


@thorough
def test_a_job_that_crashed_before_it_recorded_a_step_is_shown(chromium, tmp_path):
    crash(tmp_path / "mine" / "flights" / FLIGHT, True)
    with Board(tmp_path) as board, opened(chromium, board, HASTE) as tab:
        tab.until("() => document.querySelector('#empty').textContent.includes('is gone and left no reason')")
        assert tab.js("document.querySelectorAll('#empty tbody tr').length") >= 3


def test_a_server_that_is_gone_is_told_and_may_come_back(tab):
    tab.page.context.set_offline(True)
    tab.frame.check("#follow")
    tab.until("() => document.querySelector('#notices').textContent.includes('does not answer')")
    assert tab.js("window.fpipe.app.capture.ranks.size") == 2  # what was there is still shown
    tab.page.context.set_offline(False)
    tab.until("() => !document.querySelector('#notices').textContent.includes('does not answer')")
    tab.forgive("ERR_INTERNET_DISCONNECTED")


def test_a_new_step_is_listed_and_only_shown_where_the_tab_follows(tab, logdir, board):
    tab.show("grows/measured", 1)
    tab.frame.uncheck("#follow")
    there = "[...document.querySelectorAll('#step option')].some(o => o.value === '{}')"
    grow(logdir, board, 2)
    tab.until(f"() => {there.format(2)}")
    assert tab.js("Number(document.querySelector('#step').value)") == 1
    tab.js("Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true })")
    grow(logdir, board, 3)
    assert not tab.js(there.format(3))  # a page that nobody sees does not ask
    tab.page.click("app-header-reload button")
    tab.until(f"() => {there.format(3)}")
    tab.js("delete document.visibilityState")
    assert tab.js("Number(document.querySelector('#step').value)") == 1


def test_it_follows_a_run(tab, logdir, board):
    tab.show("grows/measured", 1)
    tab.frame.check("#follow")
    grow(logdir, board, 4)
    tab.settled("grows/measured", 4)
    assert tab.js("Number(document.querySelector('#step').value)") == 4


def grow(logdir, board, step):
    """One more step, once the server has seen it."""
    captured(logdir / "grows", [step])
    board.until(lambda captures: any((c["run"], c["step"]) == ("grows/measured", step) for c in captures))


TOY = """
import { element } from "./dom.js";

export const toy = {
  id: "toy",
  title: "Toy",
  reads: ["capture", "range"],
  opens: "range",
  content: ({ capture, range }) => [element("p", {}, `${capture.label}, ${range ? range.to : "no range"}`)],
};
"""


@thorough
def test_a_panel_is_one_module_and_a_name_in_the_list(tab):
    static = files("fpipe.tensorboard.server").joinpath("static")
    texts = {file.name: file.read_text() for file in static.iterdir()}
    assert [name for name, text in texts.items() if '"./panel_' in text] == ["panels.js"]
    listed = 'import { toy } from "./panel_toy.js";' + texts["panels.js"].replace("PANELS = [", "PANELS = [toy, ")
    with tab.answered({"panel_toy.js": TOY, "panels.js": listed}):
        tab.show("other/predicted")
        assert tab.text("#tab-toy") == "Toy"
        assert tab.text("#panel-toy") == "other/predicted, step 0, no range"
        tab.frame.click("#tab-effects")
        assert not tab.frame.is_visible("#panel-toy")
        tab.js("window.fpipe.app.sheet.measure(0, 1)")
        tab.js("window.fpipe.app.sheet.measured()")
        assert tab.text("#panel-toy") == "other/predicted, step 0, 1"


@thorough
def test_without_data_the_tab_says_how_to_record(tab):
    with tab.answered({"index": json.dumps({"captures": [], "notices": []})}):
        assert "Recorder" in tab.text("#empty")


@pytest.mark.timing
@pytest.mark.parametrize(("count", "until", "redraw"), [(100_000, 4.0, 64.0), (1_000_000, 10.0, 160.0)][: 1 + ALL])
def test_large_captures_are_drawn_in_time(chromium, tmp_path, count, until, redraw):
    """Four times what benchmarks.tab shows on a quiet machine."""
    large(tmp_path, count)
    with Board(tmp_path) as board:
        board.until(lambda captures: captures and len(captures[0]["ranks"]) == 16)
        with opened(chromium, board, CLOCK) as tab:
            taken = tab.js("window.done - window.begun") / 1e3
            times = sorted(
                tab.js("() => { const t = []; for (let i = 0; i < 15; i++) t.push(window.fpipe.redraw()); return t }")
            )
            lengths = tab.js("[...window.fpipe.app.capture.ranks.values()].map(rank => rank.recorded)")
            assert lengths == [count // 16] * 16
            assert taken < until
            assert times[7] < redraw
            assert ink(tab) > 0.5


def ink(tab):
    """The share of the timeline's pixels that differ from its ground."""
    return tab.js(
        """() => {
            const canvas = document.querySelector("#canvas"), context = canvas.getContext("2d");
            const { width, height } = canvas;
            const { data } = context.getImageData(width / 4, height / 8, width / 2, height / 4);
            let found = 0;
            for (let at = 0; at < data.length; at += 4) found += Math.min(...data.slice(at, at + 3)) < 200;
            return found / (data.length / 4);
        }"""
    )
