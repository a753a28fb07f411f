"""Residuals on the host, and those that are recomputed, when steps run. Their bits are checked in test_bits.py."""

import pytest
import torch
from torch.nn import functional as F

import fpipe
from fpipe import Costs, Pipeline, Placement, Recording, StageError, handlers, lower, offload, schedules
from fpipe.autodiff.functions import SavedGraph
from fpipe.autodiff.storages import leaves_of
from fpipe.devices import Cpu
from fpipe.effects import Discard, Fetch, Offload, Offloaded, Residuals
from fpipe.handlers.host_residuals import HostResiduals
from tests.support import cases, jobs
from tests.support.sharing import sharing

WIDTH = 8


def dropped(p, x):
    return F.dropout(torch.tanh(x @ p), 0.5)


@pytest.fixture
def drawing():
    torch.manual_seed(0)
    pipeline = Pipeline([dropped] * 2, loss=cases.mse)
    params = {stage: torch.randn(WIDTH, WIDTH) for stage in range(2)}
    return pipeline, params, torch.randn(12, WIDTH), torch.randn(12, WIDTH)


@pytest.mark.parametrize("autodiff", ["graph", "eager"])
@pytest.mark.parametrize("rng", [None, (1, 2)])
def test_what_is_recomputed_draws_the_same_numbers_and_no_others(drawing, autodiff, rng):
    pipeline, *arguments = drawing
    plan = pipeline.plan(Placement.loop(2), 3)
    found = []
    for schedule in (schedules.gpipe, cases.MOVING["gpipe_recomputed"][0]):
        step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Local(), autodiff=autodiff)
        torch.manual_seed(5)
        found.append((*step(*arguments, rng=rng), torch.rand(1)))
    assert jobs.differences(found[1], found[0]) == []


def test_residuals_of_eager_autograd_stay_and_say_so(drawing):
    pipeline, *arguments = drawing
    plan = pipeline.plan(Placement.loop(2), 3)
    schedule = cases.MOVING["one_f_one_b_offloaded"][0]
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Local(), autodiff="eager")
    with pytest.raises(StageError, match=r"rank 0, stage 0, microbatch 0: its residuals are those of eager autograd"):
        step(*arguments, rng=(0, 0))


def test_a_step_that_moves_residuals_is_not_captured(drawing):
    pipeline, *_ = drawing
    plan, schedule = pipeline.plan(Placement.loop(2), 3), cases.MOVING["one_f_one_b_offloaded"][0]
    for capture in (True, "pieces"):
        with pytest.raises(ValueError, match="with residuals on the host, or recomputed: leave one of them out"):
            fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Local(), capture=capture)


def test_a_pass_is_taken_by_steps_and_measured_by_recordings():
    case, _, plan = cases.make("linear", "one_f_one_b", 4, 8)
    costs = Costs(backward=2, residuals=10, offload=0.5, fetch=0.5)
    moved = offload(20, costs)
    programs = lower(schedules.one_f_one_b, plan, offload=moved)
    recording = Recording(programs)
    own = sharing(handlers.Local(), "linear")
    step = fpipe.value_and_grad(case.pipeline, "1f1b", plan, handler=own, offload=moved, observe=recording)
    for _ in range(2):
        found = step(case.params, case.batch, case.target)
    assert jobs.differences(found, cases.reference(case, schedules.gpipe, plan)) == []
    measurement = recording.measurement()
    copies = [each.effect for each in measurement.collectives(0)]
    assert copies == [e for e in programs[0] if isinstance(e, Offload | Fetch)]
    assert len(copies) >= 4
    account, timeline = measurement.account(0), measurement.timeline()
    assert 0 <= account.fetching < timeline.makespan
    assert "fetching" in str(measurement)
    assert {"offload", "fetch"} <= {*timeline.drawn_lanes}
    assert min(measurement.costs().offload) == 0 < max(measurement.costs().offload)  # the last stage moves nothing
    assert measurement.costs().recompute is None


class Store(handlers.Observer):
    """Checks the slots of residuals at each effect that moves some."""

    def __init__(self):
        self.stores, self.bytes = {}, 0

    def on_store(self, rank, store):
        self.stores[rank] = store

    def slots(self, rank, effect):
        store = self.stores[rank]
        return [store.slots[store.slot(kind(effect.stage, effect.microbatch))] for kind in (Residuals, Offloaded)]

    def begin(self, rank, effect):
        if isinstance(effect, Fetch):
            assert self.slots(rank, effect)[0] is None

    def end(self, rank, effect):
        if isinstance(effect, Discard):
            assert self.slots(rank, effect)[1].device == []
        if isinstance(effect, Fetch):
            saved, moved = self.slots(rank, effect)
            assert all(type(leaves_of(saved)[number]) is torch.Tensor for number in moved.places)
            self.bytes += moved.bytes


def test_nothing_of_what_was_moved_is_on_the_device_until_its_fetch():
    case, _, plan = cases.make("linear", "one_f_one_b", 2, 3)
    store, schedule = Store(), cases.MOVING["one_f_one_b_offloaded"][0]
    own = sharing(handlers.Local(), "linear")
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=own, observe=store)
    step(case.params, case.batch, case.target)
    assert store.bytes > 0


def test_aliases_are_aliases_again_and_parameters_stay():
    host, x, p = HostResiduals(Cpu()), torch.arange(12.0).reshape(3, 4), torch.ones(3)
    pieces = [x, x.t()[1:], torch.randn(2, dtype=torch.complex64).conj(), p, 7, torch.zeros(0)]
    saved = SavedGraph(None, None, pieces)
    moved = host.offload(saved, [p]).wait()
    assert moved.bytes == x.nbytes + 2 * 8
    assert [value is None for value in moved.saved.values] == [True, True, True, False, False, False]
    expected = [each.clone() if isinstance(each, torch.Tensor) else each for each in pieces]
    x.zero_()
    back, wait = host.fetch(moved)
    wait()
    for found, before in zip(back.values, expected, strict=True):
        assert torch.equal(found, before) if isinstance(before, torch.Tensor) else found == before
    assert back.values[3] is p
    assert back.values[0].untyped_storage()._cdata == back.values[1].untyped_storage()._cdata
    assert back.values[1].stride() == pieces[1].stride()
    assert back.values[2].is_conj()
