"""A rank's spans as bytes, and all ranks' put together again: nothing is lost, and nothing is taken on trust."""

import gzip
import json
import time
from dataclasses import replace

import numpy as np
import pytest

from fpipe import Costs, Link, Placement, Plan, schedules, simulate
from fpipe.effects import Forward, Recv
from fpipe.errors import ScheduleError
from fpipe.tensorboard.files import columns
from fpipe.tensorboard.files.captures import BadCapture, RunName, assemble, columns_of, parse_run, parse_tag, tag
from fpipe.tensorboard.files.columns import BadColumns, Clock, Columns, Header, check, decode, encode
from fpipe.tensorboard.files.plans import Plans, as_json
from fpipe.tensorboard.server.summary import summary
from tests.profiling.test_recording import PLANS

COSTS = Costs(forward=1, backward_input=1.1, backward_weight=0.7, communication=Link(0.1, 40), activation=10)


def blobs(timeline, **said):
    return {
        rank: encode(
            replace(Header("predicted", 7, rank, "mine", timeline.plan, unit=""), **said), columns_of(timeline, rank)
        )
        for rank in range(timeline.plan.ranks)
    }


def header_of(blob):
    """The header of a rank's bytes, as JSON."""
    raw = gzip.decompress(blob)
    return json.loads(raw[8 : 8 + int.from_bytes(raw[4:8], "little")])


@pytest.mark.parametrize("name", PLANS)
def test_a_timeline_comes_back_as_it_was(name):
    schedule, plan = PLANS[name]
    timeline = simulate(schedule, plan, COSTS)
    found = assemble(blobs(timeline))
    assert found.notices == ()
    assert (found.kind, found.step, found.schedule, found.unit) == ("predicted", 7, "mine", "")
    assert found.timeline.plan == plan
    assert list(found.timeline.spans) == list(timeline.spans)
    assert found.timeline.causes == timeline.causes
    assert found.timeline.critical_path == timeline.critical_path


def test_several_steps_come_back_with_their_period():
    loop = simulate(schedules.updating("zb-h2"), Plan(Placement.loop(3), 6), replace(COSTS, update=0.5), steps=4)
    found = assemble(blobs(loop, steps=4))
    assert found.notices == ()
    assert (found.timeline.period, found.timeline.step_ends) == (loop.period, loop.step_ends)
    assert loop.period < loop.makespan / 3
    said = summary(found)
    assert (said["steps"], said["period"]) == (4, loop.period)
    each = blobs(loop, steps=4) | {1: blobs(loop)[1]}
    assert assemble(each).notices[0].startswith("rank 1 is left out: its file has 1 steps, rank 0's 4. Two jobs wrote")


def test_a_header_comes_back_as_it_was():
    header = Header(
        kind="measured",
        step=10**9,
        rank=1,
        schedule="<b>\n\0é",
        plan=Plan(Placement.both_ways(2), 4),
        clock=Clock(-0.25, 1e-6),
        wall=1.7e9,
        peak=(3e9, "allocator"),
        host=(("before the first effect", -0.5, 0.0),),
        device="cuda:1",
    )
    none = np.empty(0, np.int32)
    empty = Columns([], np.empty(0), np.empty(0), (none, none))
    assert decode(encode(header, empty))[0] == header
    assert decode(encode(replace(header, clock=None, peak=None), empty))[0].clock is None


def test_what_only_some_know_comes_back_too():
    timeline = simulate(schedules.gpipe, Plan(Placement.loop(2), 2))
    count = len(timeline.spans.of(1))
    used, sizes = np.arange(count, dtype=float), np.full(count, np.nan)
    given = columns_of(timeline, 1, used=used, sizes=sizes, memory=iter([(0.0, 10.0), (1.5, 1e12)]))
    _, found = decode(encode(Header("measured", 0, 1, "", timeline.plan), given))
    assert np.array_equal(found.used, used)
    assert np.isnan(found.bytes).all()
    assert [column.tolist() for column in found.memory] == [[0.0, 1.5], [10.0, 1e12]]


def test_numbers_are_as_narrow_as_they_can_be():
    plan = Plan(Placement.loop(1, chunks=300), 70_000)
    timeline = Columns([Forward(299, 69_999)], np.zeros(1), np.ones(1), (np.array([-1], np.int32),) * 2)
    columns = header_of(encode(Header("predicted", 0, 0, "", plan), timeline))["columns"]
    assert [columns[name][0] for name in ("kind", "stage", "microbatch", "other", "start")] == [
        "u1",
        "u2",
        "u4",
        "u1",
        "f8",
    ]
    assert all(at % 8 == 0 for _, at, _ in columns.values())


def test_an_effect_that_is_a_part_of_another_says_so():
    timeline = simulate(schedules.zb_v, Plan(Placement.v(2), 4))
    kinds = header_of(blobs(timeline)[0])["kinds"]
    parts = {kind["type"]: kind["parts"] for kind in kinds if "parts" in kind}
    whole = {name: part["part_of"] for name, (part,) in parts.items()}
    assert whole == {"Forward": [], "BackwardInput": ["B"], "BackwardWeight": ["B"]}


GOOD = blobs(simulate(schedules.one_f_one_b, Plan(Placement.loop(3), 4), COSTS))


def edited(change):
    """A good blob with another header."""
    raw = gzip.decompress(GOOD[0])
    begin = 8 + int.from_bytes(raw[4:8], "little")
    said = json.loads(raw[8:begin])
    change(said)
    text = json.dumps(said).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return gzip.compress(raw[:4] + len(text).to_bytes(4, "little") + text + raw[begin:])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty, or was deleted"),
        (b"no gzip", "is damaged: its bytes are not what was written"),
        (GOOD[0][:-20], "cut short"),
        (gzip.compress(b"PNG!" + b"\0" * 8, mtime=0), "is no timeline that fpipe wrote"),
        (gzip.compress(b"FPT1" + b"\xff" * 4 + b"{}", mtime=0), "its header has"),
        (gzip.compress(b"FPT1" + b"\x02" + b"\0" * 3 + b"{}", mtime=0), "its header is not as fpipe writes it"),
        (edited(lambda said: said.update(format=1)), "another version of fpipe, in format 1, not 4"),
        (edited(lambda said: said["kinds"].__setitem__(0, "Teleport")), "its header is not as fpipe writes it"),
        (edited(lambda said: said["kinds"][0].update(type="__init__")), "whose name is none"),
        (edited(lambda said: said["kinds"][0].update(colour="red;}")), "a colour that is not #rrggbb"),
        (edited(lambda said: said["kinds"][0].update(track="<b>")), "a track that is none of compute"),
        (edited(lambda said: said["kinds"][0].update(letter="x" * 65)), "at most 64 characters"),
        (edited(lambda said: said["kinds"][0]["fields"].update(stage="start")), "a number in no column"),
        (edited(lambda said: said["columns"]["start"].__setitem__(2, 10**6)), "its header is not as fpipe writes it"),
        (edited(lambda said: said["columns"]["kind"].__setitem__(0, "O")), "a column of an unknown type"),
        (edited(lambda said: said.pop("plan")), "its header is not as fpipe writes it"),
        (edited(lambda said: said["plan"].update(holders=[[9]])), "rank 0 has no stage"),
        (edited(lambda said: said["columns"]["end"].__setitem__(2, 1)), "columns of different lengths"),
        (edited(lambda said: said.update(steps=0)), "effects of 0 equal steps"),
        (edited(lambda said: said.update(steps=10**9)), "effects of 1000000000 equal steps"),
    ],
)
def test_bytes_that_are_no_ranks_spans_are_refused(data, message):
    with pytest.raises(BadColumns, match=message):
        decode(data)


def test_what_unpacks_to_more_than_any_timeline_is_refused(monkeypatch):
    monkeypatch.setattr(columns, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(BadColumns, match="unpacks to more than 100 bytes"):
        decode(GOOD[0])


def test_without_a_rank_the_others_are_shown_and_a_notice_says_so():
    whole = assemble(GOOD).timeline
    found = assemble({rank: blob for rank, blob in GOOD.items() if rank != 1})
    assert found.notices == ("rank 1 of 3 missing: no file of theirs has this step whole",)
    assert list(found.timeline.compute(1)) == []
    assert found.timeline.busy == [whole.busy[0], 0.0, whole.busy[2]]
    waits = [s.waited_for for s in found.timeline.spans if isinstance(s.effect, Recv)]
    assert waits
    assert set(waits) == {None}  # all were sent by rank 1
    assert found.timeline.causes[0]["transfer"] == 0.0  # nobody knows when what it waited for was sent
    said = summary(found)
    assert ([row["rank"] for row in said["ranks"]], len(said["gaps"])) == ([0, 2], 2)


def test_a_rank_whose_bytes_are_broken_is_left_out():
    found = assemble(GOOD | {2: GOOD[2][:50]})
    remedy = "Copy it again if it is a copy; otherwise record the step again."
    assert found.notices == (f"rank 2 is left out: its file is cut short. {remedy}",)
    assert sorted(found.headers) == [0, 1]
    with pytest.raises(BadCapture, match=r"rank 0 is left out: step 7 in a/rank0 is empty, or was deleted\."):
        assemble({0: b""}, {0: "step 7 in a/rank0"})
    with pytest.raises(BadCapture, match="no ranks"):
        assemble({})


def test_ranks_with_one_problem_have_one_notice():
    places = {rank: f"step 7 in mine/measured/rank{rank}" for rank in range(3)}
    found = assemble(GOOD | {rank: GOOD[rank][:50] for rank in (1, 2)}, places)
    assert [notice.partition(". ")[0] for notice in found.notices] == [
        "ranks 1, 2 are left out: step 7 in mine/measured/rank1 and 1 more is cut short"
    ]


@pytest.mark.parametrize("data", [GOOD[0][:50], edited(lambda said: said["plan"].update(holders=[[9]]))])
def test_bytes_are_checked_by_the_rules_by_which_they_are_read(data):
    assert check(GOOD[0]) == decode(GOOD[0])[0]
    problems = []
    for function in (check, decode):
        with pytest.raises(BadColumns) as raised:
            function(data)
        problems.append(str(raised.value))
    assert problems[0] == problems[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"holders": [[rank] for rank in range(100_000)]}, "100000 stages, and at most 65536 are shown"),
        ({"holders": [[0, 99_999]]}, "100000 ranks, and at most 4096 are shown"),
        ({"holders": [[0]] * 2 + [list(range(70_000))]}, "70002 copies of stages"),
        ({"microbatches": 10**9}, "1000000000 microbatches, slices and tokens of each stage"),
        ({"slices": 10**9}, "4000000000 microbatches, slices and tokens of each stage"),
        ({"replicas": 10**9}, "1000000000 replicas"),
        ({"ties": [[0] * 10_000]}, "10000 tied stages"),
    ],
)
def test_a_header_that_asks_for_too_much_is_refused_at_once(change, message):
    begin = time.process_time()
    with pytest.raises(BadColumns, match=f"its plan has {message}"):
        decode(edited(lambda said: said["plan"].update(change)))
    assert time.process_time() - begin < 1


def test_a_count_that_is_no_number_asks_for_nothing():
    begin = time.process_time()
    with pytest.raises(BadColumns, match="is damaged"):
        decode(edited(lambda said: said["plan"].update(microbatches="x", slices=10**12)))
    assert time.process_time() - begin < 1


def test_a_header_that_is_too_long_or_has_too_many_effects_is_refused():
    with pytest.raises(BadColumns, match="its header has"):
        decode(edited(lambda said: said.update(schedule="x" * columns.MAX_HEADER_BYTES)))
    with pytest.raises(BadColumns, match="effects of one rank"):
        decode(edited(lambda said: said["columns"]["stage"].__setitem__(2, columns.MAX_SPANS + 1)))
    with pytest.raises(BadColumns, match="kinds of effects"):
        decode(edited(lambda said: said.update(kinds=said["kinds"][:1] * 300)))


def test_a_plan_that_is_larger_than_what_is_shown_is_not_written():
    plan = Plan(Placement.loop(5000), 1)
    none = np.empty(0, np.int32)
    with pytest.raises(ScheduleError, match="5000 ranks, and at most 4096 are shown"):
        encode(Header("predicted", 0, 0, "", plan), Columns([], np.empty(0), np.empty(0), (none, none)))


@pytest.mark.parametrize(("limit", "text"), [("MAX_SPANS", "17 effects"), ("MAX_KINDS", "5 kinds of effects")])
def test_what_would_not_be_read_is_not_written(limit, text, monkeypatch):
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(2), 4), COSTS)
    monkeypatch.setattr(columns, limit, int(text.split()[0]))
    blobs(timeline)
    monkeypatch.setattr(columns, limit, int(text.split()[0]) - 1)
    with pytest.raises(ScheduleError, match=f"a rank has {text} in its step, and at most"):
        blobs(timeline)


def test_the_ranks_of_a_job_share_one_plan():
    headers = assemble(GOOD).headers.values()
    assert len({id(header.plan) for header in headers}) == 1
    plans = Plans()
    first, other = (plans.plan({**as_json(Plan(Placement.loop(2), 2)), "microbatches": count}) for count in (4, 6))
    assert (first.microbatches, other.microbatches) == (4, 6)


def test_ranks_of_another_plan_are_left_out():
    other = blobs(simulate(schedules.one_f_one_b, Plan(Placement.loop(3), 5), COSTS))
    apart = "Two jobs wrote into one folder: record again, each into a folder of its own."
    (notice,) = assemble(GOOD | {1: other[1]}).notices
    assert notice == f"rank 1 is left out: its file has another plan than rank 0's. {apart}"
    assert assemble(GOOD | {3: GOOD[0]}).notices[0].startswith("rank 3 is left out: its file is rank 0's. Copy the")
    (notice,) = assemble({r: b for job in ("a", "b") for r, b in _of(job).items() if (r == 2) == (job == "b")}).notices
    assert notice == f"rank 2 is left out: its file is of another job than rank 0's. {apart}"


def _of(job):
    return blobs(assemble(GOOD).timeline, job=job)


def test_clocks_that_were_not_compared_are_told():
    found = assemble(GOOD | {2: blobs(assemble(GOOD).timeline, clock=None)[2]})
    assert found.notices == ("the clocks of rank 2 were not compared: each begins at its own first start",)


def changed(rank=0, **columns):
    """A good blob with a value of some columns changed: (place, value) of each."""
    raw = bytearray(gzip.decompress(GOOD[rank]))
    begin = 8 + int.from_bytes(raw[4:8], "little")
    found = json.loads(raw[8:begin])["columns"]
    for name, (place, value) in columns.items():
        kind, at, length = found[name]
        assert place < length
        np.frombuffer(memoryview(raw), kind, length, begin + at)[place] = value
    return gzip.compress(bytes(raw))


FIRST = next(at for at, effect in enumerate(decode(GOOD[0])[1].effects) if isinstance(effect, Forward))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"start": (0, np.nan)}, "times that"),
        ({"end": (3, np.inf)}, "times that"),
        ({"start": (0, 1e300), "end": (0, 2e300)}, "times that"),
        ({"end": (0, -1.0)}, "times that"),
        ({"kind": (0, 200)}, "an unknown kind of effect"),
        ({"stage": (FIRST, 2)}, "a stage that is not on rank 0"),
        ({"stage": (0, 77)}, "a stage that the plan doesn't have"),
        ({"microbatch": (0, 99)}, "a (microbatch|rank) that the plan doesn't have"),
        ({"peer": (1, 9)}, "a (microbatch|rank) that the plan doesn't have"),
    ],
)
def test_what_no_rank_can_have_done_is_refused(columns, message):
    with pytest.raises(BadColumns, match=message):
        decode(changed(**columns))
    assert decode(changed())[1].effects == decode(GOOD[0])[1].effects


@pytest.mark.parametrize("said", [{"peak": [-1, "process"]}, {"clock": {"offset": 0, "uncertainty": -1}}, {"rank": 3}])
def test_what_no_header_can_say_is_refused(said):
    with pytest.raises(BadColumns, match=r"far too large|out of range|rank 3 of a plan of 3"):
        decode(edited(lambda header: header.update(said)))


def test_a_capture_in_which_nothing_was_computed_is_refused():
    none = np.empty(0, np.int32)
    empty = encode(
        Header("measured", 0, 0, "", Plan(Placement.loop(1), 1)), Columns([], np.empty(0), np.empty(0), (none, none))
    )
    with pytest.raises(BadCapture, match="No rank computed anything"):
        assemble({0: empty})


def test_spans_that_wait_in_a_circle_end():
    none = np.array([0, 0], np.int32), np.array([1, 0], np.int32)
    circle = Columns([Forward(0, 0), Forward(0, 1)], np.arange(2.0), np.arange(1.0, 3.0), none)
    found = assemble({0: encode(Header("measured", 0, 0, "", Plan(Placement.loop(1), 2)), circle)})
    assert len(found.timeline.critical_path) == 2


def test_a_summary_is_the_timelines_own_account():
    found = assemble(GOOD)
    timeline, said = found.timeline, json.loads(json.dumps(summary(found)))
    assert (said["makespan"], said["cost"], said["bubble_rate"]) == (
        timeline.makespan,
        timeline.cost,
        timeline.bubble_rate,
    )
    assert [row["causes"] for row in said["ranks"]] == timeline.causes
    assert [list(row["causes"]) for row in said["ranks"]] == [list(said["causes"])] * 3
    assert [sum(row["kinds"].values()) for row in said["ranks"]] == pytest.approx(timeline.busy)
    spans, first = timeline.spans, timeline.spans.first
    assert [spans[first[rank] + row] for rank, row in said["critical"]] == timeline.critical_path
    gaps = [list(zip(g["start"], g["end"], g["cause"], strict=True)) for g in said["gaps"]]
    assert gaps == [[tuple(gap) for gap in timeline.gaps(rank)] for rank in range(3)]


def test_too_many_gaps_are_not_listed(monkeypatch):
    monkeypatch.setattr("fpipe.tensorboard.server.summary.MAX_GAPS", 3)
    assert summary(assemble(GOOD))["gaps"] is None


@pytest.mark.parametrize("step", [0, 7, 10**8, 10**17])
@pytest.mark.parametrize("part", [0, 1, 999])
def test_tags_say_step_and_part(step, part):
    assert parse_tag(tag(step, part)) == (step, part)


@pytest.mark.parametrize(
    "text", ["timeline/step_1", "timeline/step_00000001/part_1", "x/timeline/step_00000001", "loss"]
)
def test_other_tags_say_nothing(text):
    assert parse_tag(text) is None


def test_runs_say_whose_they_are():
    assert parse_run("a/b/predicted/rank12") == RunName("a/b", "predicted", 12)
    assert parse_run("measured/rank0") == RunName("", "measured", 0)
    assert parse_run("<b>\n</b>/measured/rank0") == RunName("<b>\n</b>", "measured", 0)
    assert [parse_run(text) for text in ("rank0", "measured", "x/measured/rank-1", "xmeasured/rank0")] == [None] * 4
