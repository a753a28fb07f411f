"""What is measured of a device that runs behind the host."""

import time
import warnings

import pytest
import torch

import fpipe
from fpipe import Pipeline, Recording, handlers, lower
from fpipe.handlers.protocol import Outcome
from fpipe.profiling.observers import EffectLog, Several
from tests.support import cases
from tests.support.fake_device import FakeDevice


def test_a_profile_has_the_times_until_the_device_is_done(monkeypatch):
    device = FakeDevice(lag=2.0, now=100.0)
    monkeypatch.setattr("time.perf_counter", device.clock)
    monkeypatch.setattr("fpipe.profiling.profiler.device_of", lambda _: device)
    pipeline = Pipeline([lambda p, x: x * p] * 2, loss=lambda y, t: (y - t).square().mean())
    params = {s: torch.ones(3) for s in range(2)}
    costs = fpipe.profile(pipeline, params, torch.ones(4, 3), torch.ones(4, 3), repeats=1)
    for seconds in (costs.forward, costs.backward, costs.backward_input, costs.backward_weight):
        assert seconds == pytest.approx((2.0, 2.0), abs=1e-3)


def test_the_peak_of_a_call_is_the_allocators_where_it_counts():
    calls = []
    assert fpipe.peak_bytes(lambda: calls.append(1), FakeDevice()) == 54321
    assert calls == [1]


class OnAGpu(handlers.Local):
    """A handler that says of its ranks that they are on a GPU."""

    def compile(self, programs, pieces, observe):
        return handlers.Local().compile(programs, pieces, observe)


def warned(observer, handler, steps=2):
    """The warnings of steps under an observer."""
    case, generator, plan = cases.make("linear", "gpipe", 2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, observe=observer)
        for _ in range(steps):
            step(case.params, case.batch, case.target)
    return [str(each.message) for each in caught]


def recording(**options):
    _, generator, plan = cases.make("linear", "gpipe", 2, 4)
    return Recording(lower(generator, plan), **options)


@pytest.mark.parametrize("observer", [recording, EffectLog, lambda: Several([recording()])])
def test_times_of_launching_are_warned_of_once_with_a_way_out(observer):
    (text,) = warned(observer(), OnAGpu(["cuda:0", "cuda:0"]))
    assert "the times at which the host launches work on cuda:0" in text
    assert "Recorder(logdir, device='cuda:0')" in text


def test_a_handler_without_devices_shows_its_device_by_the_loss():
    observer, loss = recording(), torch.empty((), device="meta")
    with pytest.warns(UserWarning, match="launches work on meta"):
        observer.on_step_end(Outcome(loss, None, {}))


@pytest.mark.parametrize("handler", [handlers.Local(), handlers.Local(["cpu", "cpu"])])
def test_times_of_the_cpu_need_no_warning(handler):
    assert warned(recording(), handler) == []


def test_a_clock_that_waits_for_the_device_needs_no_warning():
    assert warned(recording(clock=lambda: time.perf_counter()), OnAGpu(["cuda:0", "cuda:0"])) == []
