"""Timelines for trace viewers, parsed back: every effect once, times to the nanosecond, no overlap, arrows in pairs."""

import json
from array import array
from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from fpipe import Costs, Link, Placement, Plan, schedules, simulate
from fpipe.effects import Forward, Gradient, Recv, Send
from fpipe.tensorboard.files.captures import assemble, columns_of
from fpipe.tensorboard.files.columns import Header, encode
from fpipe.tensorboard.server.exports import extras
from fpipe.timelines.labels import label
from fpipe.timelines.perfetto import Extras, TooLong, chrome_json
from fpipe.timelines.spans import Spans
from fpipe.timelines.timeline import Timeline

QUEUED = Costs(communication=Link(0.1, 10), activation=7, residuals=3, deferred=1)  # sends wait for one another's bytes
TIMELINES = {
    "1f1b": lambda: simulate(
        schedules.one_f_one_b, Plan(Placement.loop(3), 6), Costs(1 / 3, 0.7, 0.1, None, None, 1 / 7)
    ),
    "zb-v, queued": lambda: simulate(schedules.zb_v, Plan(Placement.v(3), 6), QUEUED),
    "dualpipe": lambda: simulate(schedules.dualpipe, Plan(Placement.both_ways(4), 8), Costs(communication=0.25)),
    "no transfer time": lambda: simulate(schedules.gpipe, Plan(Placement.loop(2, 2), 4)),
}
HOSTILE = '</script>{"a":\u2028 \\ \0 \x1b[31m \ud800 ' + "x" * 5000


class Slice(NamedTuple):
    rank: int
    track: str
    number: int
    name: str
    category: str
    start: int
    end: int
    args: dict
    leaves: tuple
    arrives: tuple


class Read(NamedTuple):
    slices: list
    counters: dict  # (rank, name) -> [(at, value)]
    labels: dict  # rank -> text


def from_json(pieces):
    events = json.loads("".join(pieces))["traceEvents"]
    meta = defaultdict(dict)
    for event in events:
        if event["ph"] == "M":
            meta[event["pid"], event.get("tid")][event["name"]] = event["args"]
    ranks = {
        pid: int(found["process_name"]["name"].removeprefix("rank ")) for (pid, tid), found in meta.items() if not tid
    }
    slices, counters = [], defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[ranks[event["pid"]], event["name"]].append((round(event["ts"] * 1000), *event["args"].values()))
        elif event["ph"] == "X":
            arrow = (int(event["bind_id"], 16),) if "bind_id" in event else ()
            start = round(event["ts"] * 1000)
            slices.append(
                Slice(
                    ranks[event["pid"]],
                    meta[event["pid"], event["tid"]]["thread_name"]["name"],
                    event["tid"],
                    event["name"],
                    event["cat"],
                    start,
                    start + round(event["dur"] * 1000),
                    event["args"],
                    arrow if event.get("flow_out") else (),
                    arrow if event.get("flow_in") else (),
                )
            )
    labels = {ranks[pid]: found["process_labels"]["labels"] for (pid, tid), found in meta.items() if not tid}
    return Read(slices, dict(counters), labels)


def written(*args, **options):
    return from_json(chrome_json(*args, **options))


each_timeline = pytest.mark.parametrize("made", TIMELINES.values(), ids=TIMELINES)


def effects(found):
    """(rank, row) -> the slices of an effect that are not its wait."""
    places = defaultdict(list)
    for each in found.slices:
        if each.category != "wait" and "row" in each.args:  # what the host did beside effects has none
            places[each.rank, each.args["row"]].append(each)
    return places


@each_timeline
def test_every_effect_is_there_once_and_its_times_are_right(made):
    timeline = made()
    found = effects(written(timeline, unit="s"))
    assert len(found) == len(timeline.spans)
    for at, span in enumerate(timeline.spans):
        (one,) = found[span.rank, at - timeline.spans.first[span.rank]]
        assert one.name == label(span.effect, span.rank, timeline.plan)
        assert one.end == round(span.end * 1e9)
        if not isinstance(span.effect, Recv):
            assert one.start == round(span.start * 1e9)
        assert one.track.startswith(
            {"compute": "compute", "send": "sends", "receive": "receives", "host": "host"}[span.track]
        )


def test_every_rank_is_labelled():
    labels = written(TIMELINES["1f1b"](), schedule="mine").labels
    assert labels == dict.fromkeys(range(3), "mine, 1 ms is one unit of time")


@each_timeline
def test_nothing_overlaps_on_a_track(made):
    lanes = defaultdict(list)
    for each in written(made()).slices:
        lanes[each.number].append((each.start, each.end))
    assert all(before[1] <= after[0] for lane in lanes.values() for before, after in pairwise(lane))
    assert all(start <= end for lane in lanes.values() for start, end in lane)


def test_a_receive_that_is_posted_during_anothers_transfer_is_beside_it():
    """The sends are the second rank's: at 2 until 6, and at 5 until 9. The receives are posted at 0 and at 4."""
    plan = Plan(Placement.loop(2), 2)
    effects = [Recv(Gradient(0, 1, m), 1) for m in (0, 1)] + [Send(Gradient(0, 1, m), 0) for m in (0, 1)]
    starts, ends = array("d", [0, 4, 2, 5]), array("d", [6, 9, 6, 9])
    timeline = Timeline(plan, Spans([0, 2, 4], effects, starts, ends, array("q", [2, 3, -1, -1])))
    found = [(each.track, each.category, each.start, each.end) for each in written(timeline, unit="s").slices]
    second = 10**9
    assert found == [
        ("receives", "wait", 0, 2 * second),
        ("receives", "receive", 2 * second, 6 * second),
        ("receives 2", "wait", 4 * second, 5 * second),
        ("receives 2", "receive", 5 * second, 9 * second),
        ("sends", "send", 2 * second, 6 * second),
        ("sends 2", "send", 5 * second, 9 * second),
    ]


def test_lanes_are_as_few_as_it_takes():
    timeline = TIMELINES["zb-v, queued"]()
    for rank in range(timeline.plan.ranks):
        receives = [timeline.spans[at] for at in timeline.spans.of(rank) if isinstance(timeline.spans[at].effect, Recv)]
        starts = [each.start for each in receives]
        most = max(sum(each.start <= at < each.end for each in receives) for at in starts)
        found = {each.track for each in written(timeline).slices if each.rank == rank and each.category == "receive"}
        assert len(found) == most


@each_timeline
def test_arrows_lead_from_each_send_to_its_receive(made):
    timeline = made()
    found = written(timeline)
    leave = {arrow: each for each in found.slices for arrow in each.leaves}
    arrive = {arrow: each for each in found.slices for arrow in each.arrives}
    assert leave.keys() == arrive.keys()
    assert 0 not in leave
    assert len(leave) == sum(isinstance(effect, Recv) for effect in timeline.spans.effects)
    for arrow, sent in leave.items():
        received = arrive[arrow]
        assert (sent.category, received.category) == ("send", "receive")
        assert (sent.args["peer"], received.args["peer"]) == (received.rank, sent.rank)
        assert sent.name.removeprefix("send") == received.name.removeprefix("receive")
        assert sent.args["stage"] == received.args["stage"]
        assert received.start >= sent.start


def test_a_receive_is_its_wait_and_its_transfer():
    timeline = TIMELINES["1f1b"]()
    found = written(timeline, unit="s").slices
    waits = {(each.rank, each.args["row"]): each for each in found if each.category == "wait"}
    assert waits
    transfers = {(each.rank, each.args["row"]): each for each in found if each.category == "receive"}
    for (rank, row), wait in waits.items():
        span = timeline.spans[timeline.spans.first[rank] + row]
        sent = timeline.spans[span.waited_for]
        assert isinstance(sent.effect, Send)
        assert (wait.start, wait.end) == (round(span.start * 1e9), round(sent.start * 1e9))
        assert wait.end == transfers[rank, row].start
        assert wait.number == transfers[rank, row].number


def test_counters_are_memory_in_bytes_and_microbatches_in_flight():
    timeline = TIMELINES["zb-v, queued"]()
    found = written(timeline).counters
    for rank in range(3):
        assert found[rank, "memory"] == [(round(at * 1e6), held) for at, held in timeline.memory(rank)]
        assert found[rank, "microbatches in flight"] == [(round(at * 1e6), n) for at, n in timeline.in_flight(rank)]
    assert {name for _, name in written(TIMELINES["1f1b"]()).counters} == {"microbatches in flight"}


def test_a_captures_bytes_memory_and_host_are_shown():
    timeline = TIMELINES["1f1b"]()
    rows = [at for at in timeline.spans.of(0) if isinstance(timeline.spans.effects[at], Send)]
    sizes = [4096.0 if at in rows else float("nan") for at in timeline.spans.of(0)]
    columns = columns_of(timeline, 0, sizes=np.array(sizes), memory=[(0.5, 7.0)])
    header = Header("measured", 3, 0, "mine", timeline.plan, host=[("load data", -0.25, 0.125), ("step", -0.25, 2.0)])
    found = written(timeline, unit="s", extras={0: extras(columns, header)})
    assert {each.args.get("bytes") for each in found.slices if each.category == "send" and each.rank == 0} == {4096}
    assert {each.args.get("bytes") for each in found.slices if each.rank == 1} == {None}
    assert found.counters[0, "memory"] == [(750_000_000, 7.0)]
    host = {
        each.name: (each.start, each.end) for each in found.slices if each.category == "host" and "row" not in each.args
    }
    assert host == {"load data": (0, 375_000_000), "step": (0, 2_250_000_000)}  # the first of anything is at 0
    assert next(each.start for each in found.slices if each.name == "F0" and each.rank == 0) == 250_000_000


def test_hostile_names_are_text():
    timeline = TIMELINES["no transfer time"]()
    header = Header("measured", 0, 0, HOSTILE, timeline.plan, host=[(HOSTILE, 0.0, 1.0)])
    found = written(timeline, schedule=HOSTILE, unit="s", extras={0: Extras(host=header.host)})
    plain = HOSTILE.replace("\ud800", "?")
    assert found.labels == {0: plain, 1: plain}
    assert plain in {each.name for each in found.slices}
    assert len(found.slices) == len(written(timeline, unit="s").slices) + 1


def test_what_waited_for_what_is_said():
    found = effects(written(TIMELINES["1f1b"]()))
    assert found[1, 0][0].args["waited for"] == "send activation 0 on rank 0"
    first = next(one for (rank, _), (one,) in found.items() if rank == 1 and one.name == "F0")
    assert first.args["waited for"] == "receive activation 0 on rank 1"
    assert (first.args["kind"], first.args["stage"], first.args["microbatch"]) == ("Forward", 1, 0)


def test_an_overlap_names_both_parts():
    found = written(TIMELINES["dualpipe"]()).slices
    pair = next(each for each in found if "&" in each.name)
    forward, backward = pair.name.split("&")
    assert pair.args["forward microbatch"] == int(forward[1:])
    assert pair.args["backward microbatch"] == int(backward[1:])


def test_a_missing_rank_leaves_the_others_and_no_arrows():
    timeline = TIMELINES["1f1b"]()
    spans = timeline.spans
    blobs = {
        rank: encode(Header("measured", 0, rank, "mine", timeline.plan), columns_of(timeline, rank)) for rank in (0, 2)
    }
    found = written(assemble(blobs).timeline, unit="s")
    assert {each.rank for each in found.slices} == {0, 2}
    assert len(effects(found)) == len(spans.of(0)) + len(spans.of(2))
    assert [each for each in found.slices if each.leaves or each.arrives] == []  # all of them led to or from rank 1


@pytest.mark.parametrize(("unit", "seconds"), [("s", 2e10), ("", 2e13), ("s", -2e10)])
def test_times_that_a_trace_would_round_are_refused(unit, seconds):
    """2e10 s are more than 2**63 nanoseconds, and from 104 days on JSON's numbers are not exact."""
    plan = Plan(Placement.loop(1), 1)
    begin, end = min(0.0, seconds), max(0.0, seconds)
    spans = Spans([0, 1], [Forward(0, 0)], array("d", [begin]), array("d", [end]), array("q", [-1]))
    with pytest.raises(TooLong, match=r"lasts 2.*, and nanoseconds are exact up to 104 days: take \.csv, or a figure"):
        chrome_json(Timeline(plan, spans), unit=unit)


def test_it_is_written_in_pieces():
    timeline = simulate(schedules.one_f_one_b, Plan(Placement.loop(4), 200))
    pieces = list(chrome_json(timeline))
    assert max(map(len, pieces)) < sum(map(len, pieces)) / 3
    lines = "".join(pieces).splitlines()
    of_effects = [line for line in lines if '"row":' in line]
    assert len(of_effects) == len(timeline.spans)  # so that lines say how far it is
    assert len(lines) < len(of_effects) + 50
    slices = effects(written(timeline))
    assert len(slices) == len(timeline.spans)
    assert {len(each) for each in slices.values()} == {1}
