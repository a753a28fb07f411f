"""Two hosts with one rank each: the same bits, a lost host is named, and transfers go on behind the work."""

import re
import threading
import time
from itertools import product

import pytest

import fpipe
from fpipe import Costs, Plan
from tests.support import cases, host_jobs, jobs
from tests.support.combinations import few, one_in, sample
from tests.support.hosts import Hosts, made

LIMIT = 30.0  # seconds after an accident in which every rank must have ended, on a busy machine
PATIENCE = 2.0  # seconds that a wait may take there
FAST, SLOW = {"milliseconds": 0, "megabits": 100_000}, {"milliseconds": 5, "megabits": 400}


@pytest.fixture(scope="module")
def hosts():
    yield from made(Hosts)


@pytest.fixture
def fresh_hosts():
    yield from made(Hosts)


SCHEDULES = ["gpipe", "one_f_one_b", "interleaved_zb", "zb_v", "dualpipe"]


@one_in(2)
@pytest.mark.parametrize(
    ("name", "schedule"),
    sample(
        [*product(["attention", "tied"], SCHEDULES)],
        few([(("attention", "tied")[i % 2], schedule) for i, schedule in enumerate(SCHEDULES)], slice(2, None, 2)),
    ),
)
def test_training_gives_the_references_bits(hosts, name, schedule):
    assert hosts.run(jobs.train, name, schedule, 4, 2) == [[], []]


@pytest.mark.parametrize("autodiff", few(["graph", "eager"], ["eager"]))
def test_shapes_change_from_step_to_step(hosts, autodiff):
    assert hosts.run(jobs.shapes_change, 2, autodiff) == [[], []]


@one_in(3)
@pytest.mark.parametrize(
    ("accident", "lost"),
    [
        (lambda hosts: hosts.end(0), {1: 0}),
        (lambda hosts: hosts.end(1), {0: 1}),
        (lambda hosts: hosts.network.unplug(), {0: 1, 1: 0}),
    ],
    ids=["the first goes down", "the second goes down", "the link is cut"],
)
def test_a_lost_host_is_named(fresh_hosts, tmp_path, accident, lost):
    """The first host has the job's store too; where the link is cut, no connection is closed, and waits must end."""
    began, at = tmp_path / "began", []
    began.mkdir()

    def happen():
        until = time.monotonic() + 60
        while len(list(began.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        at.append(time.monotonic())
        accident(fresh_hosts)

    thread = threading.Thread(target=happen)
    thread.start()
    outcomes = fresh_hosts.outcomes(host_jobs.train_for_ever, str(began), PATIENCE, limit=60 + LIMIT)
    thread.join()
    assert time.monotonic() - at[0] < LIMIT
    for rank, other in lost.items():
        assert outcomes[rank].error == "TransportError", outcomes[rank].text
        assert re.search(rf"rank {rank} can't go on: .*\brank {other}\b", outcomes[rank].text), outcomes[rank].text


@pytest.mark.timing
@pytest.mark.parametrize("schedule", sample(["gpipe", "one_f_one_b"], ["one_f_one_b"]))
def test_transfers_go_on_behind_the_work(hosts, record_property, schedule):
    """A slow link costs a step about as much as the simulator says, not the sum of its transfers.

    Each of 8 microbatches goes there, and its gradient comes back: where nothing overlaps, a step would take longer by
    16 transfers, whose time is measured on the same link. GPipe hides 7 of 8, the first and the last remain; 1F1B half,
    for its first rank has one microbatch more than the second and waits for each there and back.
    """
    fast, slow, transfer = [], [], []
    for _ in range(2):
        hosts.network.slow(**FAST)
        fast += hosts.run(host_jobs.train, schedule, 8)
        hosts.network.slow(**SLOW)
        transfer.append(hosts.run(host_jobs.transfer)[0])
        slow += hosts.run(host_jobs.train, schedule, 8)
    hosts.network.slow(**FAST)
    step, delayed, one = min(fast), min(slow), min(transfer)
    hidden, expected = 1 - (delayed - step) / (16 * one), predicted(schedule, one)
    record_property(
        "figures",
        figures := f"{1e3 * step:.0f} ms a step, {1e3 * delayed:.0f} ms over the slow link, "
        f"whose 16 transfers take {16e3 * one:.0f} ms: {hidden:.0%} hidden, {expected:.0%} by simulation",
    )
    print(f"\n{schedule}: {figures}")
    assert one > 0.9 * host_jobs.least_transfer(**SLOW)
    assert hidden > expected - 0.25


def predicted(schedule, transfer):
    """The share of 16 transfers that the simulator hides."""
    order, place = cases.SCHEDULES[schedule]
    costs = {"forward": host_jobs.FORWARD, "backward": host_jobs.BACKWARD}
    times = [
        fpipe.simulate(order, Plan(place(2), 8), Costs(**costs, communication=t)).makespan for t in (0.0, transfer)
    ]
    return 1 - (times[1] - times[0]) / (16 * transfer)
