"""What only the distributed handler can show."""

import gc
import re
import threading
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe import Placement, Plan, handlers, lower
from fpipe.devices import Cpu, device_of
from fpipe.effects import Recv, Send
from fpipe.handlers.distributed.backends import DEADLOCKING, NCCL, NCCL_DTYPES, rounds, too_many
from fpipe.programs.completions import send_completions
from fpipe.programs.interleaving import interleave
from fpipe.tables import TABLE
from tests.support import cases, jobs
from tests.support.combinations import PAIRS, few, one_in, sample, thorough

EVERY_KIND = ("gpipe", "one_f_one_b", "interleaved_zb", "zb_v", "dualpipe")
"""Schedules that differ in how many stages a rank has, in copies, and in whether backwards are split."""

each_way = pytest.mark.parametrize("autodiff", ["graph", "eager"])


@pytest.mark.parametrize(("ranks", "m"), sample([*product([2, 4], [1, 3, 8])], few([(2, 1), (4, 3), (2, 8)], [(2, 8)])))
def test_a_schedule_with_its_own_communication(pools, ranks, m):
    assert pools(ranks).run(jobs.own_communication, ranks, m) == [[]] * ranks


@pytest.mark.parametrize("handler", [handlers.Reference(), handlers.Local()], ids=["reference", "local"])
def test_a_schedule_with_its_own_communication_in_one_process(handler):
    case, _, plan = cases.make("tied", "gpipe", 4, 3)
    step = fpipe.value_and_grad(case.pipeline, cases.talking, plan, handler=handler)
    found = step(case.params, case.batch, case.target)
    assert jobs.differences(found, cases.reference(case, fpipe.schedules.gpipe, plan)) == []


@pytest.mark.parametrize(
    ("ranks", "autodiff"), sample([*product([2, 4], ["graph", "eager"])], few([(2, "graph"), (4, "eager")], slice(1)))
)
def test_shapes_change_from_step_to_step(pools, ranks, autodiff):
    assert pools(ranks).run(jobs.shapes_change, ranks, autodiff) == [[]] * ranks


@pytest.mark.parametrize(
    ("schedule", "dynamic"),
    [
        *((name, False) for name in sample(cases.SCHEDULES, few(EVERY_KIND, ("interleaved_zb", "dualpipe")))),
        *([(name, True) for name in sample(("one_f_one_b", "zb_v"), ("zb_v",))] if PAIRS else []),
    ],
)
def test_sequences_change_from_step_to_step_and_specs_travel_once(pools, schedule, dynamic):
    assert pools(2).run(jobs.sequences_change, 2, schedule, dynamic) == [([], True)] * 2


def test_sizes_that_depend_on_data_travel_with_each_value(pools):
    """In every step, once two equal microbatches of the first one differed: 4 microbatches in each of 3 steps."""
    assert pools(2).run(jobs.sizes_of_data, 2) == [([], 12)] * 2


def test_rows_that_only_another_rank_knows(pools):
    assert len(set(pools(4).run(jobs.rows_known_elsewhere, 4))) == 1


@thorough
def test_two_pipelines_on_one_mesh(pools):
    assert pools(4).run(jobs.beside_each_other, 4) == [[]] * 4


@each_way
@pytest.mark.parametrize("ranks", few([2, 4], [2]))
def test_every_kind_of_tensor_and_tree_travels(pools, ranks, autodiff):
    assert pools(ranks).run(jobs.odd_values, ranks, autodiff) == [[]] * ranks


@each_way
def test_a_gradient_that_no_consumer_gives_is_none_not_zero(pools, autodiff):
    found = pools(2).run(jobs.unused_gradients, 2, autodiff)
    assert all(torch.tensor(found).isfinite().flatten()), found


def test_sends_are_given_up_when_their_receipt_comes(pools):
    """As many as microbatches are in flight, and one more, not as many as there are microbatches."""
    assert max(pools(4).run(jobs.sends_held, 4, 16)) <= 5


@one_in(2)
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
@pytest.mark.parametrize("ranks", few([2, 4], [2]))
def test_a_gradient_may_be_given_in_one_step_and_not_in_another(pools, ranks, autodiff):
    assert pools(ranks).run(jobs.gradients_come_and_go, ranks, autodiff) == [([], [])] * ranks


@pytest.mark.parametrize("ranks", few([2, 4], [2]))
def test_a_stage_that_cannot_be_traced_runs_by_eager_autograd_on_its_rank_alone(pools, ranks):
    found = pools(ranks).run(jobs.gradients_come_and_go, ranks, "auto")
    assert [differences for differences, _ in found] == [[]] * ranks
    *others, (warning,) = [told for _, told in found]
    assert others == [[]] * (ranks - 1)
    assert f"stage {ranks - 1} can't be traced and runs by eager autograd" in warning


def test_all_ranks_refuse_the_edges_that_one_can_not_have(pools):
    for text, loss in pools(3).run(jobs.refused_edges):
        assert text == "TransportError: rank 1 has too many"
        assert loss  # the next program's


@pytest.mark.parametrize("ranks", few([2, 4, 8], [4]))
@pytest.mark.parametrize("schedule", cases.SCHEDULES)
def test_edges_are_connected_in_few_rounds(schedule, ranks):
    """In as many as a rank has edges, or a few more, however many ranks there are."""
    generator, place = cases.SCHEDULES[schedule]
    programs = lower(generator, Plan(place(ranks), 2 * ranks))
    edges = {(rank, e.rank) for rank, program in programs.items() for e in program if isinstance(e, Send)}
    order = rounds(edges)
    assert sorted(edge for each in order for edge in each) == sorted(edges)
    for each in order:
        assert len({rank for edge in each for rank in edge}) == 2 * len(each)
    edges_of = [sum(rank in edge for edge in edges) for rank in range(ranks)]
    assert max(edges_of) <= len(order) <= 2 * max(edges_of)
    assert too_many(max(edges_of), 1, NCCL().channels, 132, "32") is None


@pytest.mark.parametrize("name", DEADLOCKING)
def test_an_environment_that_would_deadlock_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert re.match(f"{name}=1 makes .*: unset it", NCCL().check(Gpu(), 0, {(0, 1)}, 0, Owner()))


def test_nccl_needs_a_gpu():
    assert "rank 1: NCCL moves values between GPUs, and its handler is on cpu: pass Distributed(device='cuda')" in (
        NCCL().check(Cpu(), 1, {(0, 1)}, 0, Owner())
    )


class Gpu(Cpu):
    torch_device = torch.device("cuda", 0)


class Owner:
    def __init__(self):
        self.closed = threading.Event()


def test_the_edges_of_all_handlers_of_a_process_count(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    edges = {(0, 1), (1, 0), (1, 2), (2, 1)}
    training, evaluation, another = Owner(), Owner(), Owner()
    assert NCCL().check(Gpu(), 1, edges, 0, training) is None
    assert NCCL().check(Gpu(), 1, edges, 0, evaluation) is None
    assert NCCL().check(Gpu(), 1, edges, 0, evaluation) is None  # its next program has the same edges
    assert "rank 1 has 12 edges in 3 handlers of 4 channels each" in NCCL().check(Gpu(), 1, edges, 0, another)
    evaluation.closed.set()
    assert NCCL().check(Gpu(), 1, edges, 0, another) is None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert "rank 1: its handler is on cuda:0, and the current device is cuda:1: call torch.cuda.set_device(0)" in (
        NCCL().check(Gpu(), 1, edges, 0, another)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    del training, another
    gc.collect()
    assert NCCL(channels=8).check(Gpu(), 1, edges, 0, Owner()) is None


def test_how_many_edges_a_gpu_can_have():
    assert too_many(4, 1, 4, 132, "16") is None
    assert "8 edges in 2 handlers, which with compute and results need 22 streams" in too_many(8, 2, 4, 132, "16")
    assert too_many(8, 1, 4, 132, "32") is None
    assert "pass backend=NCCL(channels=4)" in too_many(8, 1, 8, 132, "32")
    assert "use a placement with fewer edges" in too_many(8, 1, 8, 16, "32")
    assert too_many(16, 1, 1, 132, "64").endswith(
        "would block compute: use a placement with fewer edges, or fewer handlers"
    )
    assert too_many(16, 1, 1, 132, "16").endswith(
        ": set it to 32 before start, and use a placement with fewer edges, or fewer handlers"
    )
    for queues in ("abc", "0", "-4"):
        assert f"CUDA_DEVICE_MAX_CONNECTIONS={queues}, which is no number from 1 to 32" in too_many(
            2, 1, 4, 132, queues
        )


@pytest.mark.parametrize("channels", [0, -4])
def test_a_transfer_needs_a_channel(channels):
    with pytest.raises(ValueError, match=f"channels must be at least 1, not {channels}"):
        NCCL(channels=channels)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_gpu_without_cuda_is_refused_by_name():
    with pytest.raises(ValueError, match="there is no device cuda:0: this torch is built without CUDA"):
        device_of("cuda:0")
    case, schedule, plan = cases.make("linear", "gpipe", 2, 2)
    with pytest.raises(ValueError, match="there is no device cuda:0"):
        fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handlers.Local(["cuda:0", "cpu"]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.float32])
def test_every_dtype_travels_over_nccl(dtype):
    x = torch.arange(6).to(dtype)
    message = NCCL().message(x)
    assert message.dtype in NCCL_DTYPES
    assert message.data_ptr() == x.data_ptr()
    assert torch.equal(message.view(dtype).view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("option", ["timeout", "compute_timeout"])
def test_a_time_limit_is_positive(option):
    for limit in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"{option} must be more than 0 seconds, not {limit}"):
            handlers.Distributed(**{option: limit})


def test_one_process_refuses_a_device_that_torch_does_not_know():
    with pytest.raises(ValueError, match="'foo' is no device"):
        handlers.auto("foo")


def test_the_handler_says_when_torch_distributed_is_not_set_up():
    with pytest.raises(fpipe.TransportError, match="torchrun"):
        handlers.Distributed()
