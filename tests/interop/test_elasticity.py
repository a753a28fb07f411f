"""A job goes on with other ranks than before, with the same bits, and all ranks come to the same plan."""

import json
import re
from dataclasses import replace

import pytest

from fpipe import Costs, Link, Pipeline, ScheduleError, handlers, interop
from fpipe.costs import Shared
from fpipe.effects import Activation, Forward, Residuals
from fpipe.schedules import search
from tests.support import elastic_jobs
from tests.support.combinations import few, one_in, thorough
from tests.support.jobs import differences

FOUR = Pipeline([elastic_jobs.layer] * 4)


def joined(results):
    """The params of all ranks; what they all have must be equal."""
    known = [result for result in results if "losses" in result]
    assert all(result["losses"] == known[0]["losses"] and result["text"] == known[0]["text"] for result in known)
    return {stage: tree for result in known for stage, tree in result["params"].items()}, known[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of a run on one rank that nothing interrupted."""
    return elastic_jobs.train(*elastic_jobs.begin(handlers.Local(), tmp_path_factory.mktemp("whole")))


def test_with_four_ranks_then_three_then_two_the_loss_curve_is_the_same_to_the_bit(pools, tmp_path, whole):
    texts = []
    for ranks, until in [(4, 2), (3, 4), (2, 6)]:
        params, one = joined(pools(ranks).run(elastic_jobs.go_on, str(tmp_path / "job"), until, {}))
        texts.append(one["text"])
    assert not differences(params, whole["params"])
    assert one["losses"] == whole["losses"]
    assert len(whole["losses"]) == 6
    assert [text.split(" ranks: ")[0] for text in texts] == ["4", "3", "2"]
    assert "; before: 3 processes, zb-auto on Placement((0, 1, 2, 0))" in texts[2]


@thorough
@pytest.mark.parametrize("at", few([["2"], ["1", "3"]], [["1", "3"]]))
def test_with_other_cuts_the_loss_curve_is_the_same_within_rounding(tmp_path, at):
    """The job goes on with fewer stages than it had."""
    whole, _ = elastic_jobs.with_cuts(tmp_path / "whole", ["1", "2", "3"], 6)
    begun, first = elastic_jobs.with_cuts(tmp_path / "job", ["1", "2", "3"], 3)
    assert begun[:3] == whole[:3]
    losses, last = elastic_jobs.with_cuts(tmp_path / "job", at, 6)
    assert losses == pytest.approx(whole, rel=1e-5)
    assert min(whole) > 0
    assert len({*whole}) == 6
    assert first.text.split(":")[0] == "4 ranks"
    assert last.plan.stages == last.plan.ranks == len(at) + 1
    assert "; before: 4 processes" in last.text


@thorough
def test_fewer_hosts_go_on_from_their_memory_and_their_neighbours(pools, tmp_path, whole):
    """Each rank is a host, and the third one is lost: nothing was on disk, and no step is run again."""
    pools(3).run(elastic_jobs.on_hosts, str(tmp_path / "job"), 4)
    params, one = joined(pools(2).run(elastic_jobs.on_hosts, str(tmp_path / "job")))
    assert one["first"] == 4
    assert "; before: 3 processes" in one["text"]
    assert not differences(params, whole["params"])
    assert one["losses"] == whole["losses"]


SIZED = Costs(parameters=10, residuals=20, activation=1, deferred=2, communication=0.1)


@pytest.mark.parametrize("shards", few([False, True], [True]))
@thorough
def test_replicas_stay_as_many_and_a_process_that_makes_none_waits(pools, tmp_path, shards):
    """Four processes are two ranks of two replicas; three are one rank of two, and one that waits, and exits."""
    options = {"stages": 2, "replicas": 2}
    options |= {"costs": replace(SIZED, residuals=1), "memory_limit_bytes": 70} if shards else {}
    whole = elastic_jobs.train(*elastic_jobs.begin(handlers.Local(), tmp_path / "whole", **options), until=3)
    for ranks, until in [(4, 1), (3, 3)]:
        results = pools(ranks).run(elastic_jobs.go_on, str(tmp_path / "job"), until, options)
    params, one = joined(results)
    assert results[2] == {"left": 0, "params": {}}
    assert "1 process with no part of a replica; before: 4 processes" in one["text"]
    assert ("whole at a time" in one["text"]) == shards
    assert not differences(params, whole["params"])
    assert one["losses"] == whole["losses"]


def test_processes_beyond_the_stages_wait_until_the_others_are_done(pools, tmp_path):
    results = pools(3).run(elastic_jobs.go_on, str(tmp_path), 2, {"stages": 2})
    assert results[2] == {"left": 0, "params": {}}
    assert "1 process with no stage: there are 2" in results[0]["text"]


def test_groups_that_are_never_made_are_an_error_within_the_time_limit(pools):
    """As where the process that hosts the job's store is stopped meanwhile."""
    for rank, (text, seconds) in enumerate(pools(2).run(elastic_jobs.silent)):
        assert f"process {rank} could not make a group of processes [{rank}]: it did not return within" in text
        assert seconds < 6


@thorough
def test_all_ranks_come_to_the_same_plan_within_the_limit(pools):
    options = {"costs": SIZED, "memory_limit_bytes": 120}
    (text, size, programs), *others = pools(3).run(elastic_jobs.choose, [options])
    assert all(each == (text, size, programs) for each in others)
    assert size <= 120
    assert pools(3).run(elastic_jobs.choose, [{"costs": SIZED, "names": ["gpipe"]}])[0][1] > 120


@one_in(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{"memory_limit": 0.25}], r"no schedule that is known keeps to 0\.25 .*: the least is"),
        (
            [{"costs": SIZED, "memory_limit_bytes": 9}],
            "no schedule that is known keeps to 9 B on a rank: the least is .* more replicas or ranks need less",
        ),
        ([{"memory_limit_bytes": 9}], "memory_limit_bytes needs costs with sizes: pass costs=, such as those of"),
        ([{"names": ["1f1b"]}], "the placement 3"),
        ([{"replicas": 4}], "there are 3 processes for 4 replicas"),
        (
            [{}, {"memory_limit": 9}, {}],
            "processes 0 and 1 came to different plans: every process calls elastic, with the same arguments",
        ),
    ],
)
def test_where_nothing_fits_all_ranks_refuse_with_a_way_out(pools, options, message):
    outcomes = pools(3).outcomes(elastic_jobs.choose, options)
    for outcome in outcomes:
        assert outcome.error in ("ScheduleError", "ValueError"), outcome.text
        assert re.search(message, outcome.text)


def test_costs_are_measured_once_for_a_folder_and_by_one_process(pools, tmp_path):
    (count, texts), (other, same) = pools(2).run(elastic_jobs.measured, str(tmp_path))
    assert (count, other) == (1, 0)
    assert same == texts == [texts[0]] * 2
    assert " s, bubble" in texts[0]
    assert json.loads((tmp_path / "plan.json").read_text())["costs"]["forward"] == [0.5, 1, 1, 1]


def test_costs_are_the_same_after_they_were_written_as_json():
    costs = Costs(
        forward=[1, 2],
        communication={(0, 1): Link(0.5), (1, 0): Link(0.5, 100)},
        gather=Link(0.1, 10),
        shared=[Shared(8, (Activation(0, 0), Residuals(1, 0)))],
        reads={(0, 1): 4},
        collectives={Forward: [0.1, 0.2]},
        scale=[1, 2],
    )
    assert Costs.from_json(json.loads(json.dumps(costs.as_json()))) == costs
    with pytest.raises(ScheduleError, match="costs of Own, which is not fpipe's own, can't be written as JSON"):
        Costs(extra={type("Own", (), {}): 1}).as_json()
    for content in ({"forwards": 1}, {"forward": {"Link": [1]}}, {"shared": [{"Own": []}]}, {"forward": {}}):
        with pytest.raises(ScheduleError):
            Costs.from_json(content)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"last": {"placement": "x"}}', '{"last": {"placement": [0]}}', '{"last": 1, "costs": {"x": 1}}'],
)
def test_a_plan_file_that_is_none_is_written_anew(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    with pytest.warns(UserWarning, match=r"plan\.json is no file of fpipe\.interop\.elastic, and is written anew"):
        interop.elastic(FOUR, 4, handler=handlers.Local(), folder=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["last"]["placement"] == [0, 0, 0, 0]


def test_a_folder_that_can_not_be_written_ends_no_job(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="the next start will not know of this plan: .*file"):
        interop.elastic(FOUR, 4, handler=handlers.Local(), folder=tmp_path / "file" / "below")


def test_a_store_that_torchrun_keeps_on_one_of_several_hosts_is_warned_of(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    interop.elastic(FOUR, 4, handler=handlers.Local())
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, on each host"):
        interop.elastic(FOUR, 4, handler=handlers.Local())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1, not 0"),
        ({"replicas": 0}, "replicas must be at least 1, not 0"),
        ({"costs": Costs(forward=[1, 2])}, "forward has 2 entries, the plan 4 stages"),
        ({"names": ["1f1c"]}, "no schedule is called '1f1c': did you mean 1f1b"),
        ({"costs": lambda: 5}, "costs must return Costs, as fpipe.profile does, not 5"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises((ScheduleError, ValueError, TypeError), match=message):
        interop.elastic(FOUR, 4, handler=handlers.Local(), **options)


def test_the_prediction_is_the_searchs():
    job = interop.elastic(FOUR, 4, handler=handlers.Local(), ranks=3)
    fastest = search(job.plan, memory_limit=3, recut=False)
    assert (job.found.name, job.plan, job.found.timeline.cost) == (fastest.name, fastest.plan, fastest.timeline.cost)
