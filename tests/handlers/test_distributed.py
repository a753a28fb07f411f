"""What only the distributed handler can show."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe import Placement, Plan, handlers, lower
from fpipe.effects import Recv
from fpipe.handlers.distributed.connections import Connections
from fpipe.programs.completions import send_completions
from fpipe.programs.interleaving import interleave
from fpipe.tables import TABLE
from tests.support import cases, jobs
from tests.support.combinations import sample

EVERY_KIND = ("gpipe", "one_f_one_b", "interleaved_zb", "zb_v", "dualpipe")
"""Schedules that differ in how many stages a rank has, in copies, and in whether backwards are split."""

each_way = pytest.mark.parametrize("autodiff", ["graph", "eager"])


@pytest.mark.parametrize(("ranks", "m"), sample([*product([2, 4], [1, 3, 8])], [(2, 1), (4, 3), (2, 8)]))
def test_a_schedule_with_its_own_communication(pools, ranks, m):
    assert pools(ranks).run(jobs.own_communication, ranks, m) == [[]] * ranks


@pytest.mark.parametrize("handler", [handlers.Reference(), handlers.Local()], ids=["reference", "local"])
def test_a_schedule_with_its_own_communication_in_one_process(handler):
    case, _, plan = cases.make("tied", "gpipe", 4, 3)
    step = fpipe.value_and_grad(case.pipeline, cases.talking, plan, handler=handler)
    found = step(case.params, case.batch, case.target)
    assert jobs.differences(found, cases.reference(case, fpipe.schedules.gpipe, plan)) == []


@pytest.mark.parametrize(
    ("ranks", "autodiff"), sample([*product([2, 4], ["graph", "eager"])], [(2, "graph"), (4, "eager")])
)
def test_shapes_change_from_step_to_step(pools, ranks, autodiff):
    assert pools(ranks).run(jobs.shapes_change, ranks, autodiff) == [[]] * ranks


@pytest.mark.parametrize(
    ("schedule", "dynamic"),
    [
        *((name, False) for name in sample(cases.SCHEDULES, EVERY_KIND)),
        *((name, True) for name in sample(("one_f_one_b", "zb_v"), ("zb_v",))),
    ],
)
def test_sequences_change_from_step_to_step_and_specs_travel_once(pools, schedule, dynamic):
    assert pools(2).run(jobs.sequences_change, 2, schedule, dynamic) == [([], True)] * 2


def test_rows_that_only_another_rank_knows(pools):
    assert len(set(pools(4).run(jobs.rows_known_elsewhere, 4))) == 1


def test_two_pipelines_on_one_mesh(pools):
    assert pools(4).run(jobs.beside_each_other, 4) == [[]] * 4


@each_way
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_of_tensor_and_tree_travels(pools, ranks, autodiff):
    assert pools(ranks).run(jobs.odd_values, ranks, autodiff) == [[]] * ranks


@each_way
def test_a_gradient_that_no_consumer_gives_is_none_not_zero(pools, autodiff):
    found = pools(2).run(jobs.unused_gradients, 2, autodiff)
    assert all(torch.tensor(found).isfinite().flatten()), found


def test_sends_are_given_up_when_their_receipt_comes(pools):
    """As many as microbatches are in flight, and one more, not as many as there are microbatches."""
    assert max(pools(4).run(jobs.sends_held, 4, 16)) <= 5


@each_way
def test_nothing_of_a_step_stays(pools, autodiff):
    assert pools(2).run(jobs.kept_alive, 2, autodiff) == [0, 0]


@given(ranks=st.integers(1, 4), chunks=st.integers(1, 3), microbatches=st.integers(1, 6), depth=st.integers(0, 3))
def test_a_receipt_never_comes_before_its_send_is_received(ranks, chunks, microbatches, depth):
    """Replayed in an order of the handler's own: when a value is taken, what it proves has been taken."""
    plan = Plan(Placement.loop(ranks, chunks), microbatches)
    programs = lower(fpipe.schedules.interleaved_1f1b, plan, depth=depth)
    proofs = [send_completions(programs, rank) for rank in range(ranks)]
    taken = {}
    for rank, effect in interleave(programs):
        for name in TABLE.needs(effect, plan):
            received = [e for e in programs[rank] if isinstance(e, Recv) and e.value == name]
            for recv in received:
                back = taken.setdefault((recv.rank, rank), [])
                back.append(name)
                assert proofs[rank][name] <= through(programs[recv.rank], rank, taken.get((rank, recv.rank), []))


def through(program, source, taken):
    """How many receives from a rank are complete once these values have been taken."""
    order = [e.value for e in program if isinstance(e, Recv) and e.rank == source]
    return max((order.index(value) + 1 for value in taken), default=0)


@each_way
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gradient_may_be_given_in_one_step_and_not_in_another(pools, ranks, autodiff):
    assert pools(ranks).run(jobs.gradients_come_and_go, ranks, autodiff) == [([], [])] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stage_that_cannot_be_traced_runs_by_eager_autograd_on_its_rank_alone(pools, ranks):
    found = pools(ranks).run(jobs.gradients_come_and_go, ranks, "auto")
    assert [differences for differences, _ in found] == [[]] * ranks
    *others, (warning,) = [told for _, told in found]
    assert others == [[]] * (ranks - 1)
    assert f"stage {ranks - 1} can't be traced and runs by eager autograd" in warning


def test_all_ranks_refuse_what_is_too_much_for_the_queues_of_one(monkeypatch):
    """Rank 1 of three has four edges, ranks 0 and 2 two each."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    for rank in range(3):
        connections = object.__new__(Connections)
        connections.rank, connections.size, connections.backend, connections.edges = rank, 3, "nccl", {}
        with pytest.raises(fpipe.TransportError, match=r"rank 1 has 4 edges.* set it to 32 before start"):
            connections.connect([(0, 1), (1, 0), (1, 2), (2, 1)])


def test_the_handler_says_when_torch_distributed_is_not_set_up():
    with pytest.raises(fpipe.TransportError, match="torchrun"):
        handlers.Distributed()
