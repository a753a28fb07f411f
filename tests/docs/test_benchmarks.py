"""The benchmarks over several processes: what they print, what they refuse, and that they end."""

import importlib
import json
import sys
import time
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessException

import fpipe
from benchmarks import models, periods, recordings, restart_job, strategies, timed
from fpipe import Costs, Measurement, Placement, Plan, lower, simulate
from fpipe.costs import ROUNDING
from fpipe.effects import Backward, BackwardInput, Forward, Recompute, parts
from fpipe.schedules import CATALOGUE, one_f_one_b, updating, zb_h2
from fpipe.schedules.candidates import Degrees
from fpipe.tables import TABLE
from fpipe.timelines.measurement import Columns
from tests.support.combinations import ALL
from tests.support.tab import CHROMIUM

PEERS = {"schedule", "ranks", "width", "fpipe_ms", "peer_ms", "ratio", "limit_share", "fpipe_bytes", "peer_bytes"}
TIMED = {"predicted_ms", "measured_ms", "ratio", "ratio_quartiles"}
LONG = 180.0  # seconds for a job that takes half a minute where nothing else runs
SCALE = {"schedule", "ranks", "sequences_per_second", "bubble", "peak_bytes"}


def benchmark(name):
    """Imported where it is used: figures and torch's schedules take seconds."""
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def printed(monkeypatch, capsys):
    """`printed(benchmark, *options)`: what a benchmark gives as JSON."""

    def call(name, *options):
        monkeypatch.setattr(sys, "argv", [name, "--json", *options])
        benchmark(name).main()
        return json.loads(capsys.readouterr().out)

    return call


@pytest.mark.skipif(not ALL, reason="torch's schedules take ten seconds to import and run: FPIPE_TESTS=all runs it")
def test_peers(tmp_path, printed):
    schedule = "zb-v"
    figure = tmp_path / "peers.svg"
    options = ("--width", "32", "--schedules", schedule, "--steps", "1", "--rounds", "1", "--out", str(figure))
    (row,) = printed("peers", "--ranks", "2", *options)
    assert row.keys() >= PEERS
    assert (row["schedule"], row["ranks"], row["width"]) == (schedule, 2, 32)
    assert row["ratio"] == pytest.approx(row["fpipe_ms"] / row["peer_ms"])
    if models.cores() >= 2:
        assert row["predicted_ratio"] == pytest.approx(row["fpipe_ms"] / row["predicted_ms"])
    assert [len(row[key]) for key in ("fpipe_bytes", "peer_bytes")] == [2, 2]
    assert schedule in figure.read_text()


@pytest.mark.skipif(not ALL, reason="torch's schedules take ten seconds to import and run: FPIPE_TESTS=all runs it")
def test_simulate(printed):
    (row,) = printed("simulate", "--plans", "1f1b 8x128", "--rounds", "1")
    assert row["effects"] == 8 * 128 * 2 + 7 * 128 * 2 * 2 + 8  # pieces, sends and receives both ways, reductions
    assert row["ratio"] == pytest.approx(row["simulator"] / row["torch simulator"])


@pytest.mark.skipif(not ALL, reason="it measures for twenty seconds: FPIPE_TESTS=all runs it")
def test_overhead(printed):
    rows = printed("overhead", "--rounds", "1")
    parts = benchmark("overhead").PARTS
    assert list(dict.fromkeys(row["part"] for row in rows)) == list(parts)
    assert [row["what"] for row in rows if row["part"] == "flight"] == ["the flight recorder"]


@pytest.mark.skipif(not ALL, reason="five processes that import torch: FPIPE_TESTS=all runs it")
def test_offload(printed):
    rows = printed("offload", "--tables", "timed", "--layer", "1", "--rounds", "1")
    assert [row["way"] for row in rows] == ["plain", "offload", "recompute"]
    plain, moved, _ = rows
    assert moved["offloads"] > 0 == plain["offloads"]
    assert moved["predicted_bytes"] < plain["predicted_bytes"]
    assert moved["measured_bytes"] < plain["measured_bytes"]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
        assert row["over_plain"] == pytest.approx(row["measured_ms"] / plain["measured_ms"])


@pytest.mark.skipif(not ALL, reason="loops of four processes take ten seconds: FPIPE_TESTS=all runs it")
def test_periods(printed):
    rows = printed("periods", "--tables", "timed", "--steps", "2", "--rounds", "1", "--layer", "1")
    assert [(row["table"], row["schedule"], row["ranks"]) for row in rows] == [
        ("timed", name, 4) for name in ("1f1b", "zb-h2", "zb-auto")
    ]
    for row in rows:
        if row["schedule"] != "1f1b":  # whose first rank ends last: it saves nothing, but for unequal stages
            assert row["barrier_predicted_ms"] > row["free_predicted_ms"]
        for way in ("barrier", "free", "norm", "late", "clipped"):
            assert row[f"{way}_ratio"] == pytest.approx(row[f"{way}_ms"] / row[f"{way}_predicted_ms"])
            assert row[f"{way}_own_ratio"] == pytest.approx(row[f"{way}_ms"] / row[f"{way}_by_own_ms"])
        assert row["won"] == pytest.approx(1 - row["free_ms"] / row["barrier_ms"])
        assert row["won_late"] == pytest.approx(1 - row["late_ms"] / row["norm_ms"])


@pytest.mark.parametrize("schedule", [one_f_one_b, zb_h2])
def test_predicted_periods(schedule):
    """Without a barrier, a step takes the cost and the update; a norm makes ranks wait for the last, clipped or not."""
    plan, costs = Plan(Placement.loop(4), 8), Costs(2, 3, 1, update=0.5)
    step = simulate(schedule, plan, costs)
    extra = {"barrier": 0.0, "free": 0.0, "norm": 0.25, "late": 0.25, "clipped": 0.25}
    period = {way: periods.predict(way, plan, costs, more, schedule, 10).seconds() for way, more in extra.items()}
    assert period["clipped"] == period["norm"] == step.makespan + 0.25 + 0.5
    assert period["free"] == pytest.approx(step.cost + 0.5)
    assert period["late"] == pytest.approx(step.cost + 0.25 + 0.5)
    assert step.makespan <= period["barrier"] <= step.makespan + 0.5
    for way, more in extra.items():  # by own pieces: with a norm, updates are none
        programs = lower(schedule if way in ("norm", "late", "clipped") else updating(schedule), plan)
        own = {effect: costs.time(effect) for effect in passes(programs)}
        assert periods.predict(way, plan, costs, more, schedule, 10).seconds(own) == pytest.approx(period[way])


@pytest.mark.skipif(not ALL, reason="torch's schedules take ten seconds to import and run: FPIPE_TESTS=all runs it")
def test_frozen_stages(printed):
    rows = printed("frozen", "--schedules", "1f1b", "--layer", "1", "--rounds", "1")
    assert [(row["schedule"], row["by"]) for row in rows] == [
        *(("1f1b", way) for way in ("fpipe", "whole", "torch")),
        ("search", "fpipe"),
    ]
    first = rows[0]
    for row, least in zip(rows, [38, 38, 38, 24], strict=True):  # the milliseconds that ranks sleep
        assert row["predicted_ms"] > least
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
        assert row["over_first"] == pytest.approx(row["measured_ms"] / first["measured_ms"])
    assert first.keys() >= TIMED


@pytest.mark.browser
@pytest.mark.skipif(not (ALL and CHROMIUM.exists()), reason="a browser for ten seconds: FPIPE_TESTS=all runs it")
def test_the_tab(printed, tmp_path):
    (row,) = printed("tab", "--spans", "640", "--rounds", "1", "--out", str(tmp_path / "tab.json"))
    assert json.loads((tmp_path / "tab.json").read_text())["rows"] == [row]
    assert (row["spans"], row["ranks"], row["rounds"]) == (640, 16, 1)
    assert {"Bubbles", "What would help", "Steps", "Microbatches", "Selection", "Effects in view"} <= set(
        row["panels_ms"]
    )
    assert row["redraws_ms"].keys() == {"1", "4", "64", "1024"}
    assert min(row["interactive_s"], *row["panels_ms"].values(), *row["redraws_ms"].values()) > 0


def test_orders(printed, tmp_path):
    options = ("--ranks", "3", "--microbatches", "6", "--limits", "1", "2", "--times", "1,1,1,0", "2,3,1,0.5")
    rows = printed("orders", *options, "--out", str(tmp_path / "orders.json"))
    assert json.loads((tmp_path / "orders.json").read_text())["rows"] == rows
    assert [(row["limit"], row["times"][0]) for row in rows] == [(3, 1), (3, 2), (6, 1), (6, 2)]
    for row in rows:
        assert row["gap"] == pytest.approx(row["cost"] / row["bound"] - 1)
        assert row["gap"] > -1e-9
    assert rows[2]["cost"] == 3 * 6  # without a bubble: a forward's memory is all that weight gradients wait for


def of_few_pieces():
    """Let few pieces show the host's time."""
    benchmark("predictions").MICROBATCHES = 4


def of_slices(rank):
    """The rows of timed slices in a process, of one round."""
    of_few_pieces()
    slices = benchmark("slices")
    slices.SECONDS = 1e-3
    (rows,) = slices.job(rank, 4, "timed", [2], 1)
    return rows


def test_slices(pools):
    rows = pools(4).run(of_slices)[0]
    assert [(r["schedule"], r["slices"]) for r in rows] == [("1f1b", 1), ("seq-1f1b", 2), ("zb-h1", 1), ("seq-zb", 2)]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["measured"] / row["predicted"])
        assert min(row["predicted"], row["measured"]) >= 4 * 3  # ms that a rank sleeps
    assert [row["over"] for row in rows[::2]] == [1, 1]


def memory_of_slices(rank):
    """The rows of memory in a process, of short sequences."""
    slices = benchmark("slices")
    slices.CONTEXT = {**slices.CONTEXT, "memory": 64}
    (rows,) = slices.job(rank, 4, "memory", [2], 1)
    return rows


@pytest.mark.skipif(not ALL, reason="profiles of 4 processes take half a minute: FPIPE_TESTS=all runs it")
def test_memory_of_slices(pools):
    rows = pools(4).run(memory_of_slices, limit=LONG)[0]
    for row in rows:
        by_rank = row["by_rank"]
        assert {len(sizes) for sizes in by_rank.values()} == {4}
        assert row["measured"] == max(by_rank["measured"])
        assert row["ratio"] == pytest.approx(1, abs=0.2)
        assert row["process"] >= row["measured"]


def test_models_of_unlike_layers_are_as_published():
    from benchmarks import mixed_models

    numbers = {name: sum(layer.parameters for layer in make()) / 1e9 for name, make in mixed_models.MODELS.items()}
    assert numbers["llama"] == pytest.approx(6.7, rel=0.02)
    assert numbers["gemma"] - 0.92 == pytest.approx(9.2, rel=0.05)  # its embedding is its head
    assert numbers["nemotron-h"] == pytest.approx(8.1, rel=0.05)
    assert numbers["deepseek"] == pytest.approx(671 + 13, rel=0.05)  # with the layer for one more token


def of_partitions(rank, ranks, table):
    """The rows of a table in a process, of one round."""
    of_few_pieces()
    partitions = benchmark("partitions")
    partitions.MILLISECONDS = {table: (0.2, 1, 1, 1, 1, 2) if table == "timed4" else (1,) * 8}
    partitions.MICROBATCHES = {table: 2 if table == "timed4" else 6}
    partitions.RANKS = {table: ranks}
    (rows,) = partitions.job(rank, ranks, table, 1)
    return rows


@pytest.mark.skipif(not ALL, reason="it searches and measures for ten seconds: FPIPE_TESTS=all runs it")
def test_partitions(pools):
    rows = pools(2).run(of_partitions, 2, "timed4")[0]
    assert [row["way"] for row in rows] == ["1f1b", "interleaved", "named", "published", "found"]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
        assert min(row["predicted_ms"], row["measured_ms"]) > 2 * 3 * 6 / 2  # ms that a rank sleeps at least
        assert sum(row["layers"]) == 6
    searched = {row["way"]: row["searched_ms"] for row in rows}
    assert min(searched, key=searched.get) in ("found", "published", "named")
    others = min(searched["published"], searched["named"])
    assert searched["found"] <= others * (1 + ROUNDING)  # of the same cost, the search takes that with fewer bytes


@pytest.mark.skipif(not ALL, reason="loops of four processes take half a minute: FPIPE_TESTS=all runs it")
def test_residuals_of_layouts_with_less_memory(pools):
    rows = {row["way"]: row for row in pools(4).run(of_partitions, 4, "moved4", limit=LONG)[0]}
    assert {way: row["residuals"] for way, row in rows.items()} == {
        "1f1b": "",
        "moved": "moved",
        "recomputed": "recomputed",
    }
    plain = rows["1f1b"]
    for row in rows.values():
        assert row["measured_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.1)
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
    assert max(rows[way]["measured_bytes"] for way in ("moved", "recomputed")) < plain["measured_bytes"]


def of_vocabulary(rank):
    """The rows of a small table in a process, of one round."""
    of_few_pieces()
    vocabulary = benchmark("vocabulary")
    vocabulary.TABLES["timed4"] = vocabulary.Table(4, 8, 4, 1)
    with pytest.MonkeyPatch.context() as patch:  # a busy host may take as long for a piece as its 1 ms
        predictions = benchmark("predictions")
        patch.setattr(predictions.Host, "seconds", lambda _: 1e-5)
        patch.setattr(predictions.Host, "measure", lambda _: predictions.HostTimes(1e-5, 1e-5, 1e-5))
        (rows,) = vocabulary.job(rank, 4, "timed4", 1)
    return rows


def test_vocabulary_by_timed_stages(pools):
    rows = {row["way"]: row for row in pools(4).run(of_vocabulary)[0]}
    assert list(rows) == ["1f1b", "balanced", "named", "dualpipe", "vocabulary"]
    assert [*rows["1f1b"]["layers"]] == [3, 2, 2, 3]
    assert [*rows["balanced"]["layers"]][-1] == 1  # the head alone
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
        assert row["layers"] == () or sum(row["layers"]) == 10
        assert min(row["measured_ms"], row["by_own_ms"]) > 4 * 3 * 3  # ms that a rank sleeps at least
        assert row["own_ratio"] == pytest.approx(row["measured_ms"] / row["by_own_ms"])
    assert min(rows[way]["predicted_over"] for way in ("balanced", "dualpipe")) > 1


@pytest.mark.skipif(not ALL, reason="a profile and five steps of a GPT-2 take ten seconds: FPIPE_TESTS=all runs them")
def test_vocabulary_with_real_compute(printed, tmp_path):
    rows = printed("vocabulary", "--tables", "real", "--rounds", "1", "--out", str(tmp_path / "vocabulary.json"))
    assert json.loads((tmp_path / "vocabulary.json").read_text())["rows"] == rows
    assert [row["way"] for row in rows] == ["1f1b", "balanced", "named", "dualpipe", "vocabulary"]
    assert all(row["bytes"] > 0 for row in rows)
    assert rows[-1]["bytes"] < rows[0]["bytes"]  # no rank has the whole matrix
    assert all(row["own_ratio"] == pytest.approx(row["measured_ms"] / row["by_own_ms"]) for row in rows)


def of_timed_stages(rank, table, layer):
    """The rows of a table in a process, of one round."""
    of_few_pieces()
    (rows,) = timed.job(rank, 4, table, ["looped-bfs"], layer, 2 * layer, 1)
    return rows


def test_timed_stages(pools):
    layer = 0.5e-3
    rows = pools(4).run(of_timed_stages, "2x2", layer)[0]
    assert [(row["resident"], row["gathers"]) for row in rows] == [(2, 2), (1, 3)]
    for row in rows:
        assert row.keys() >= TIMED
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
        slept = 3 * layer * models.MICROBATCHES * models.LAYERS / 2 + 2 * 2 * (2 * layer)
        assert min(row["predicted_ms"], row["measured_ms"]) >= 1e3 * slept


def of_overlaps(rank, layer, collective):
    """The row of one time of a layer, of one round."""
    return list(benchmark("overlap").job(rank, 2, [layer], collective, 1))


def test_overlaps(pools):
    layer, collective = 0.5e-3, 1e-3
    (row,) = pools(2).run(of_overlaps, layer, collective)[0]
    overlap = benchmark("overlap")
    link, slept = 1e3 * 2 * overlap.LAYERS * collective, 1e3 * 2 * overlap.LAYERS * layer
    assert (row["link_ms"], row["overlaps"]) == (pytest.approx(link), 13)
    assert min(row["compute_ms"], row["posted_ms"]) > slept
    assert row["unbraided_ms"] > link + slept
    assert row["braided_ms"] > max(link, slept)
    assert row["bound_ms"] == max(row["posted_ms"], link)
    assert row["over_bound"] == pytest.approx(row["braided_ms"] / row["bound_ms"])
    assert row["over_larger"] == pytest.approx(row["braided_ms"] / max(row["compute_ms"], link))
    assert row["speedup"] == pytest.approx(row["unbraided_ms"] / row["braided_ms"])


def test_rates_of_generating_are_compared_within_a_round():
    generate = benchmark("generate")
    tokens, found = 8 * 4, [torch.ones(8, 3)] * 3
    seconds = {"tokens_per_s": [1.0, 3.0, 0.7], "one_process": [1.5, 3.0, 1.4], "batch_generate": [0.5, 1.5, 0.7]}
    busy = [[0.75, 0.5], [1.5, 2.0], [0.5, 0.5]]
    host = [[0.1, 0.2], [0.3, 0.6], [0.07, 0.14]]
    predicted, by_own = [0.8, 3.0, 0.5], [0.5, 1.5, 0.7]
    calls = generate.Rounds(seconds, [1.2, 3.0, 0.9], busy, host, predicted, by_own, found)
    row = generate.row(2, generate.Setting(64, 4, 4, 1), calls)
    assert row.keys() >= {"model", "prompts", "microbatches", "tokens", "prompt_slices", "ranks", "batch_generate"}
    assert (row["tokens_per_s"], row["one_process"]) == (tokens / 1.0, tokens / 1.5)
    assert (row["ratio"], row["batch_ratio"], row["equal"]) == (1.5, 0.5, True)
    assert (row["predicted_ms"], row["measured_ms"]) == (800, 1000)
    assert row["measured_over_predicted"] == pytest.approx(1.25)  # of 1 / 0.8, 3 / 3 and 0.7 / 0.5
    assert (row["by_own_ms"], row["own_ratio"]) == (700, 2)
    assert row["bound"] == pytest.approx(1.6)  # of 1.2 / 0.75, 3 / 2 and 0.9 / 0.5
    assert row["busy"] == pytest.approx([0.5 / 0.7, 2 / 3])
    assert row["host"] == pytest.approx([0.1, 0.2])
    calls.texts = [*found[:2], torch.zeros(8, 3)]
    assert not generate.row(2, generate.Setting(64, 4, 4, 1), calls)["equal"]


@pytest.mark.skipif(not ALL, reason="an export in each process takes ten seconds: FPIPE_TESTS=all runs it")
def test_generate(printed):
    options = ("--width", "64", "--microbatches", "2", "--tokens", "3", "--prompt-slices", "1", "4")
    rows = printed("generate", *options, "--rounds", "1")
    assert [row["prompt_slices"] for row in rows] == [1, 4]
    for row in rows:
        assert row["equal"]
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["one_process"])
        assert 0 < max(row["busy"]) < 1
        assert row["predicted_ms"] > 0
        assert row["measured_ms"] == pytest.approx(1e3 * 8 * row["tokens"] / row["tokens_per_s"])


@pytest.mark.skipif(not ALL, reason="a prediction of a large model takes half a minute: FPIPE_TESTS=all runs it")
def test_scale(printed):
    options = ("--ranks", "4", "--microbatches", "4", "--width", "32", "--schedules", "1f1b")
    predicted, row = printed("scale", *options, "--rounds", "1")
    assert (predicted["table"], row["table"]) == ("prediction", "scale")
    assert predicted["ratio"] == pytest.approx(predicted["measured_ms"] / predicted["predicted_ms"])
    assert sum(predicted["more_ms"].values()) == pytest.approx(predicted["measured_ms"] - predicted["predicted_ms"])
    assert row.keys() >= SCALE
    assert 0 < row["bubble"] < 1


@pytest.mark.skipif(not ALL, reason="four processes for two steps: FPIPE_TESTS=all runs them")
@pytest.mark.parametrize(("kind", "ranks"), [("real", 2), ("timed", 4)])
def test_lengths(kind, ranks, printed, tmp_path):
    options = ("--stages", kind, "--schedules", "1f1b", "--sigmas", "0.6", "--rounds", "1")
    drawn, peak = printed("lengths", *options, "--out", str(tmp_path / "lengths.json"))
    assert json.loads((tmp_path / "lengths.json").read_text())["rows"] == [drawn, peak]
    assert drawn["ranks"] == ranks
    assert (drawn["order"], peak["order"]) == ("drawn", "peak")
    assert peak["predicted_ms"] < drawn["predicted_ms"]
    assert peak["ratio"] == pytest.approx(peak["measured_ms"] / peak["predicted_ms"])
    assert min(peak["measured_ms"], peak["work_ms"]) > 0


def test_each_round_has_its_own_prediction():
    predictions = benchmark("predictions")
    rounds = predictions.Rounds(predicted=[10.0, 20.0, 40.0], measured=[11.0, 20.0, 48.0])
    assert rounds.figures() == {
        "predicted_ms": 20.0,
        "measured_ms": 20.0,
        "ratio": pytest.approx(1.1),
        "ratio_quartiles": pytest.approx([1.0, 1.2]),
        "rounds": 3,
    }
    own = predictions.Rounds([10.0], [11.0], by_own=[22.0]).figures()
    assert (own["by_own_ms"], own["own_ratio"], own["own_ratio_quartiles"]) == (22.0, 0.5, [0.5, 0.5])
    assert predictions.Rounds([1.0], [3.0]).over(predictions.Rounds([1.0], [2.0])) == [1.5]
    assert predictions.spread("over", [2.0]) == {"over": 2.0, "over_quartiles": [2.0, 2.0]}


def test_rounds_measure_next_to_what_they_predict():
    """In each round every step once, each after its prediction; one step of each before them does not count."""
    calls = []

    def predict(name):
        calls.append("predict")
        return 1e-3 * calls.count("predict")

    steps = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    results = benchmark("predictions").compare(steps, predict, 2, measure=lambda step: step() or 5.0)
    assert calls == ["a", "b", *("predict", "a", "predict", "b") * 2]
    assert (results["a"].predicted, results["a"].measured) == ([1.0, 3.0], [5.0, 5.0])


def test_the_host_makes_each_piece_longer():
    from fpipe import Placement, Plan, simulate

    plan = Plan(Placement.loop(2), 4)
    costs = Costs(forward=2, backward_input=1, backward_weight=3)
    longer = benchmark("predictions").with_host(costs, plan, 0.5)
    assert (longer.forward, longer.backward) == ((2.5, 2.5), (4.5, 4.5))
    assert simulate("gpipe", plan, longer).makespan == simulate("gpipe", plan, costs).makespan + 2 * 5 * 0.5


@pytest.mark.parametrize(
    ("name", "limit", "steps"), [("gpipe", None, 1), ("gpipe", 3, 1), ("zb-h1", None, 3), ("dualpipe", None, 1)]
)
def test_a_prediction_by_own_times_takes_them_for_the_costs(name, limit, steps):
    """Times that are those of the costs change nothing; a first forward that takes longer delays all that follow."""
    plan = CATALOGUE[name].plan(2, 4)
    costs = Costs(forward=2, backward_input=1, backward_weight=3, update=0.5, communication=0.25, residuals=1)
    recompute = limit and fpipe.offload(limit, replace(costs, offload=1e6, fetch=1e6), slower=1, recompute=True)
    programs = lower(updating(CATALOGUE[name].schedule(plan)), plan, offload=recompute)
    own = {effect: costs.time(effect) for effect in passes(programs)}
    assert any(isinstance(effect, Recompute) for effect in own) == bool(limit)
    prediction = benchmark("predictions").Prediction(programs, costs, steps=steps)
    assert prediction.seconds(own) == prediction.seconds()
    once = prediction._replace(steps=1)
    assert once.seconds(own | {Forward(0, 0): 9}) >= once.seconds() + 7


def passes(programs):
    """The parts of all effects that compute."""
    effects = (part for program in programs.values() for effect in program for part in parts(effect))
    return [effect for effect in effects if TABLE.effects[type(effect)].track == "compute"]


def test_own_times_are_means_over_steps_and_halves_of_overlaps():
    """The second effect of a rank takes 1 s in the first step and 3 in the other one, the third one 2 and 6."""
    programs = lower("dualpipe", CATALOGUE["dualpipe"].plan(2, 4))

    def measurement(seconds):
        def columns(count):
            ends = array("d", [seconds * at for at in range(count)])
            return Columns(array("d", [0.0] * count), ends, array("d"), array("d"))

        return Measurement(programs, {rank: columns(len(program)) for rank, program in programs.items()})

    own = recordings.own_seconds([measurement(1), measurement(3)])
    assert own.keys() == {*passes(programs)}
    for program in programs.values():
        for at, effect in enumerate(program):
            both = parts(effect)
            assert all(own[part] == 2 * at / len(both) for part in both if part in own)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_by_own_times_the_host_takes_time_for_each_message(name):
    """On two ranks a forward and an input gradient have one each, and a weight gradient has none."""
    predictions, plan, costs = benchmark("predictions"), Plan(Placement.loop(2), 4), Costs(2, 1, 3)
    programs = lower(name, plan)
    counts = predictions.messages_of(programs)
    assert {effect: counts[effect] for effect in passes(programs)} == {
        effect: int(isinstance(effect, Forward | Backward | BackwardInput)) for effect in passes(programs)
    }
    if name == "gpipe":
        own = {effect: costs.time(effect) for effect in passes(programs)}
        host = predictions.HostTimes(message=0.5)
        slower = predictions.Prediction(programs, costs, host).seconds(own)
        assert slower == simulate(name, plan, costs).makespan + 2 * (4 + 1) * 0.5


def test_by_own_times_the_host_takes_time_before_and_after_a_step():
    """In a loop without barriers, that of one rank. Beside a profile, it is in that of the pieces."""
    predictions, plan, costs = benchmark("predictions"), Plan(Placement.loop(2), 4), Costs(2, 1, 3)
    programs = lower(updating("gpipe"), plan)
    own = {effect: costs.time(effect) for effect in passes(programs)}
    for steps in (1, 3):
        prediction = predictions.Prediction(programs, costs, predictions.HostTimes(step=0.5, between=0.25), steps)
        plain = predictions.Prediction(programs, costs, steps=steps)
        assert prediction.seconds(own) == plain.seconds(own) + (0.5 if steps == 1 else 0.25)
        assert prediction.seconds() == plain.seconds()


def of_two(rank):
    """The bounds of a step in a process, and its span.

    Pieces take from 3 to 9 on rank 0, from 4 to 10 on rank 1, and posts from 1 to 11.
    """
    programs = lower("gpipe", Plan(Placement.loop(2), 4))
    tracks = [TABLE.effects[type(effect)].track for effect in programs[rank]]
    starts = array("d", [3.0 + rank if track == "compute" else 1.0 for track in tracks])
    ends = array("d", [9.0 + rank if track == "compute" else 11.0 for track in tracks])
    step = recordings.Recorded(lambda: None, fpipe.Recording(programs))
    step.measurements.append(Measurement(programs, {rank: Columns(starts, ends, array("d"), array("d"))}))
    return step.bounds(), step.span()


def test_a_step_spans_the_pieces_of_all_ranks(pools):
    assert pools(2).run(of_two) == [((3.0, 9.0), 7.0), ((4.0, 10.0), 7.0)]


def test_the_host_takes_what_a_step_takes_outside_of_its_pieces(monkeypatch):
    """A step of GPipe takes 20 s, and 19.5 on this rank, 18 of them from its first piece to its last one.

    By its pieces it would take 15.
    """
    predictions, plan, costs = benchmark("predictions"), Plan(Placement.loop(2), 4), Costs(1, 1, 1)
    programs = lower("gpipe", plan)
    own = {effect: costs.time(effect) for effect in passes(programs)}
    clock = [99.5]
    monkeypatch.setattr(predictions, "time", SimpleNamespace(perf_counter=lambda: sum(clock)))
    monkeypatch.setattr(predictions.dist, "barrier", lambda: clock.append(0.5))
    step = recordings.Recorded(lambda: clock.append(19.5), fpipe.Recording(programs))
    monkeypatch.setattr(step.recording, "measurement", lambda: None)
    for name, value in {"span": 18.0, "times": own, "bounds": (101.0, 119.0)}.items():
        monkeypatch.setattr(step, name, lambda value=value: value)
    took, message, ends, between = predictions.outside(step, predictions.Prediction(programs, costs))
    assert (took, ends, between) == (20.0, 2.0, 1.5)
    assert message == pytest.approx(3 / (2 * (4 + 1)))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_recorded_steps_are_predicted_again_after_each_run(is_recorded, monkeypatch):
    predictions, calls = benchmark("predictions"), []
    monkeypatch.setattr(recordings.Recorded, "times", lambda _: calls.append("times") or {"own": 2.0})
    monkeypatch.setattr(predictions.Prediction, "seconds", lambda _, own=None: 1.0 if own is None else own["own"])
    recording = fpipe.Recording(lower("gpipe", Plan(Placement.loop(1), 1)))
    monkeypatch.setattr(recording, "measurement", lambda: None)
    step = recordings.Recorded(lambda: calls.append("run"), recording) if is_recorded else lambda: calls.append("run")
    prediction = predictions.Prediction(recording.programs, Costs())
    results = predictions.compare({"a": step}, lambda _: prediction, 2, measure=lambda step: step() or 4000.0)
    assert calls == ["run", *["run", "times"] * 2] if is_recorded else ["run"] * 3
    assert results["a"].predicted == [1000.0, 1000.0]
    assert results["a"].by_own == ([2000.0, 2000.0] if is_recorded else [])


@pytest.mark.parametrize("option", [("--ranks", "3"), ("--width", "33"), ("--schedules", "zb-h1"), ("--out", "x.txt")])
def test_a_wrong_option_says_what_is_possible(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peers", *option])
    with pytest.raises(SystemExit, match="2"):
        benchmark("peers").main()
    possible = {"--ranks": "2, 4", "--width": "32, 256, 512", "--schedules": "'zb-v'", "--out": ".json, .svg or .png"}
    assert possible[option[0]] in capsys.readouterr().err


@pytest.mark.parametrize("off", ["loss", "weight", "bias", None])
def test_what_differs_is_named(off):
    module = nn.Linear(2, 2)

    def gradients():
        return {name: torch.ones_like(p) * (2 if name == off else 1) for name, p in module.named_parameters()}

    def peer():
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        return [torch.tensor(1.0), torch.tensor(3.0)]

    pair = benchmark("peers").Pair(
        lambda: (torch.tensor(1.0 if off == "loss" else 2.0), {3: gradients()}), peer, {3: module}
    )
    expected = {"loss": "the loss", None: ""}.get(off, f"the gradient of stage 3, {off}")
    assert pair.check() == expected


def stuck(rank, ranks):
    yield "begun"
    time.sleep(600)


def broken(rank, ranks):
    yield "begun"
    raise ValueError(f"rank {rank} is broken")


@pytest.mark.parametrize(
    ("job", "limit", "error"), [(stuck, 3, "not done after 3 s"), (broken, 100, r"rank \d is broken")]
)
def test_processes_that_hang_or_fail_end(job, limit, error):
    before = set(torch.multiprocessing.active_children())  # pools of other tests
    with pytest.raises((TimeoutError, ProcessException), match=error):
        list(models.in_processes(job, 2, limit=limit))
    assert set(torch.multiprocessing.active_children()) <= before


def test_costs_of_a_model_that_grows():
    same = dict.fromkeys(("backward_input", "backward_weight", "backward", "residuals", "deferred"), [1] * 5)
    found = benchmark("scale").grown(Costs(forward=[1, 2, 4, 6, 9], activation=[5] * 5, **same), count=8, stages=4)
    assert found.forward == (5, 8, 8, 13)
    assert found.activation == (5, 5, 5, 5)


def of_strategies(rank, degrees, layer):
    """The rows of strategies with some degrees in a process, of one round."""
    of_few_pieces()
    (rows,) = strategies.job(rank, 4, degrees, layer, 1)
    return rows


def test_strategies_by_timed_stages(pools):
    """Twice: a pipeline with replicas, and one whose tensor-parallel collectives are slept."""
    layer = 0.5e-3
    rows = pools(4).run(of_strategies, [Degrees(2, 2, 1, 1), Degrees(2, 1, 2, 1)], layer)[0]
    assert {(row["pp"], row["dp"], row["tp"], row["schedule"]) for row in rows} == {
        (2, dp, tp, schedule) for dp, tp in [(2, 1), (1, 2)] for schedule in strategies.SCHEDULES
    }
    for row in rows:
        assert row.keys() >= TIMED
        assert (row["collectives"] > 0) == (row["tp"] > 1)
        slept = 3 * layer * models.LAYERS * strategies.BATCH / 4
        assert min(row["predicted_ms"], row["measured_ms"]) >= 1e3 * slept


def host_of_one_rank(rank):
    return strategies.host(1, 2, 4).measure()


def test_the_host_of_one_rank_has_no_time_for_messages(pools):
    for host in pools(4).run(host_of_one_rank):
        assert host.piece > host.message == 0
        assert host.step > 0


def test_pairs_that_are_apart_have_an_order():
    rows = [{"strategy_ms": p, "measured_ms": m} for p, m in [(100, 130), (104, 120), (110, 129)]]
    assert strategies.disordered(rows) == [(rows[0], rows[2])]


def test_faults(printed):
    """These need no processes; the others are those of tests of handlers and runs."""
    faults = ["mutant", "flip", "memory-flip", "memory-lost"]
    rows = printed("faults", "--trials", "3", "--faults", *faults)
    assert [(row["fault"], row["trials"]) for row in rows] == [(fault, 3) for fault in faults]
    assert all(row[key] == 0 for row in rows for key in ("hangs", "aborts", "corrupt", "unnamed"))
    assert all(0 <= row["median_s"] <= row["max_s"] < 5 for row in rows)


@pytest.mark.skipif(not ALL, reason="four starts of four processes take a minute: FPIPE_TESTS=all runs them")
@pytest.mark.parametrize("torchrun", ["torchrun", "fpipe's"])
def test_a_job_of_which_processes_are_killed_has_the_bits_of_another(torchrun, printed):
    warm = ["--warm"] if torchrun == "fpipe's" else []
    job, *parts = printed("restarts", "--parts", "kills", "--kills", "3", "--width", "8", *warm)
    assert (job["kills"], job["ranks"], job["warm"], job["same_bits"]) == (3, 4, bool(warm), True)
    assert 0 <= job["max_steps_lost"] <= 2 * restart_job.EVERY
    seconds = {row["part"]: row["median_s"] for row in parts}
    assert min(seconds.values()) >= 0
    assert (seconds["torch"] < 0.1) == bool(warm)
    assert seconds["tracing"] > 0
