"""The costs of stages with collectives inside: the times that pieces wait for them, and the bytes of pieces."""

import time
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import fpipe
from fpipe import Placement, effects, handlers, interop, schedules
from tests.support.groups import OverGloo, group_of

WIDTH, HIDDEN, ROWS, SUM = 4, 16, 8, 0.004


class LateWork(dist._Work):
    """A work that is complete no earlier than a time after it was posted."""

    def __init__(self, work):
        super().__init__()
        self.work, self.until = work, time.perf_counter() + SUM

    def wait(self, *limit):
        self.work.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))
        return True


class LateGroup(OverGloo):
    """gloo, whose sums take a time."""

    def allreduce(self, tensors, options):
        return LateWork(self.gloo.allreduce(tensors, options))


def layer(params, x):
    return x + F.relu(x @ params["up"]) @ params["down"]


def profiled(rank):
    """The costs of two stages cut over two processes, whose sums take a time; and without a cut."""
    mesh = DeviceMesh.from_group(group_of(LateGroup, "late"), "cpu", mesh_dim_names=("late",))  # else equal to others'
    pipeline = fpipe.Pipeline([layer] * 2, loss=F.mse_loss)
    params = {s: {"up": torch.randn(WIDTH, HIDDEN), "down": torch.randn(HIDDEN, WIDTH)} for s in range(2)}
    x, y = torch.randn(2, ROWS, WIDTH)
    tp = interop.shard(params, mesh, {"up": [Shard(1)], "down": [Shard(0)]})

    def costs(params):
        return fpipe.profile(pipeline, params, x, y, microbatches=2, repeats=3, handler=handlers.Local())

    return costs(tp), costs(params)


def profiled_in_slices(rank):
    """The costs of two stages cut over two processes, of three slices."""
    mesh = DeviceMesh.from_group(group_of(LateGroup, "late"), "cpu", mesh_dim_names=("late",))
    pipeline = fpipe.Pipeline([of_tokens] * 2, loss=F.mse_loss)
    params = {s: {"up": torch.randn(WIDTH, HIDDEN), "down": torch.randn(HIDDEN, WIDTH)} for s in range(2)}
    x, y = torch.randn(2, ROWS, 3, WIDTH)
    tp = interop.shard(params, mesh, {"up": [Shard(1)], "down": [Shard(0)]})
    return fpipe.profile(pipeline, tp, x, y, slices=3, repeats=3, handler=handlers.Local())


def of_tokens(params, x):
    return layer(params, x.flatten(0, 1)).view(x.shape)


def test_a_profile_has_the_times_of_collectives_of_each_slice(pools):
    costs, _ = pools(2).run(profiled_in_slices)
    for s, t in product(range(2), range(3)):
        forward = effects.Forward(s, 0, t)
        assert 0.9 * SUM <= costs.collective(forward) <= costs.time(forward)
    assert {"collectives of forward", "collectives of backward"} <= {*costs.slice_scale}


def test_a_profile_has_the_times_of_collectives_and_the_bytes_of_pieces(pools):
    (costs, whole), (other, _) = pools(2).run(profiled)
    assert costs == other
    assert not whole.collectives
    forward, inputs, weights = (
        costs.collectives[kind] for kind in (effects.Forward, effects.BackwardInput, effects.BackwardWeight)
    )
    assert all(0.9 * SUM <= wait <= time for wait, time in zip(forward, costs.forward, strict=True))
    assert 0.9 * SUM <= inputs[1] <= costs.backward_input[1]  # stage 0 has no gradient of its input
    assert weights == (0, 0)
    saved = whole.residuals[1] - costs.residuals[1]
    assert saved > 0
    assert saved % (ROWS // 2 * HIDDEN // 2 * 4) == 0  # a process's hidden numbers of a microbatch
    assert [2 * size for size in costs.parameters] == [*whole.parameters]
    plan = fpipe.Pipeline([layer] * 2, loss=F.mse_loss).plan(Placement.loop(ranks=2), microbatches=2)
    timeline = fpipe.simulate(schedules.zb_h1, plan, costs)
    expected = [2 * (forward[s] + inputs[s] + weights[s]) for s in range(2)]
    assert all(abs(time - each) < 1e-9 for time, each in zip(timeline.collectives, expected, strict=True))
