"""What is measured of a device that runs behind the host."""

import pytest
import torch

import fpipe
from fpipe import Pipeline
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
