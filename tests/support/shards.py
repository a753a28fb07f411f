"""Meshes and sharded trees in the processes of a pool."""

from __future__ import annotations

import functools

import optree
import torch

from fpipe.handlers.protocol import Replicas


@functools.cache
def mesh_of(*shape, names=None, kind="cpu"):
    """One mesh of a shape in this process: its groups are made once. Without names, its dimensions are a, b, c."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, shape, mesh_dim_names=names or tuple("abc"[: len(shape)]))


def whole(tree):
    """A tree with the whole tensors in place of DTensors; every process of their mesh calls it."""
    from torch.distributed.tensor import DTensor

    return optree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree, namespace="fpipe")


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Replicated:
    """A handler for calls between steps: process `replica * ranks + rank` plays a rank of a replica."""

    devices = replays = departure = beside = None

    def __init__(self, replicas, timeout=20.0, mesh=None):
        import torch.distributed as dist

        from fpipe.handlers.distributed import collectives

        self.timeout, self.mesh, self.count, self.size = timeout, mesh, replicas, dist.get_world_size() // replicas
        self.replica, self.rank = divmod(dist.get_rank(), self.size)
        self.peers = collectives.over(None, "the replicas", hint="make the same calls", timeout=timeout)

    def ranks(self, plan):
        assert plan.ranks == self.size
        return (self.rank,)

    def replicas(self, plan):
        return Replicas(range(self.replica, self.replica + 1), self.count, mesh=self.mesh)

    def compile(self, programs, pieces, observe):
        raise NotImplementedError("it runs no steps")

    def check(self):
        """Nothing runs in the background."""
