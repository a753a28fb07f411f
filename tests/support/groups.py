"""Process groups over gloo whose sums a test watches or slows down."""

from __future__ import annotations

import functools

import torch.distributed as dist


class OverGloo(dist.ProcessGroup):
    """A group that has gloo's group of the same processes, `gloo`; a kind of it says what a collective does."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo, self.name = dist.ProcessGroupGloo(store, rank, size, timeout), ""

    def setGroupName(self, name):  # noqa: N802
        self.name = name

    def getGroupName(self):  # noqa: N802
        return self.name


@functools.cache
def group_of(kind, name):
    """All processes, as a group of a kind of `OverGloo`, which is registered under a name; one for each name."""
    default = dist.Backend.default_device_backend_map["cpu"]
    dist.Backend.register_backend(name, kind, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = default  # of other tests' meshes
    return dist.new_group(backend=name)
