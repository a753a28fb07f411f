"""The processes that take part in a collective."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None
"""The processes that take part: a process group, or one dimension of a DeviceMesh; None for this process alone."""


def group_of(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """Return the process group.

    Raises:
        TypeError: it is neither, or a mesh of several dimensions.
    """
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        return group.get_group()
    if isinstance(group, DeviceMesh) or not hasattr(group, "group_name"):
        raise TypeError(
            f"group must be a process group, one dimension of a DeviceMesh, as mesh['cp'], or None, not {group!r}"
        )
    return group


def rank_in(group: Group) -> int:
    """Return this process's rank in a group."""
    return 0 if group is None else dist.get_group_rank(group_of(group), dist.get_rank())


def named(group: Group) -> tuple[str, int]:
    """Return a group's name, as operators take it, and the number of its processes."""
    if group is None:
        return "", 1
    process_group = group_of(group)
    return process_group.group_name, process_group.size()
