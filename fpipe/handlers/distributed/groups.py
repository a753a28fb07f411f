"""The process groups of one handler: cut at once where a step fails, closed in order where none has.

Invariants:
- a graph with operations of a group is reset before the group ends: NCCL waits for the graphs that hold it;
- groups that have not failed are closed when all ranks have ended their programs, and the device has done everything
  that was posted on them;
- any thread may cut groups; the thread that posts gives them up, and begins the next epoch.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch

from fpipe.devices import Graph
from fpipe.handlers.distributed.activity import Markers
from fpipe.handlers.distributed.backends import CUT_LIMIT, Backend, Edge, Gloo
from fpipe.handlers.distributed.lifeline import Lifeline
from fpipe.handlers.distributed.stage_groups import StageGroup

log = logging.getLogger("fpipe.transport")
GLOO = Gloo()
MOMENT = 0.001  # seconds between two looks at what other ranks have ended
Key = Edge | str
"""An edge, the name of a lane, or "control" or "results"."""


class Groups:
    """The groups of one handler; closed when its connections are collected.

    Args:
        limit: seconds that the device may take for what was posted before.

    Attributes:
        used: the keys of groups on which the running step has posted something.
        beside: the groups of processes that compute stages together with this one.
        lent: process groups of the caller, on which pieces of the running step have posted collectives.
        ends: what tells this rank that the others have ended their programs, while it is under way.
        epoch: how often groups were made again after a failed step.
        is_cut: some groups of this epoch were cut.
        before_end: is called with the names of lent groups, and the keys of those beside, before they end: their other
            processes see a peer go.
    """

    def __init__(self, backend: Backend, markers: Markers, limit: float) -> None:
        self.edges: dict[Edge, Any] = {}
        self.lanes: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}
        self.used: set[Key] = set()
        self.lent: set[Any] = set()
        self.ends: list[Any] = []
        self.before_end: Callable[[list[str]], object] = list
        self.closed, self.is_cut, self.epoch = threading.Event(), False, 0
        self._cutting = threading.Lock()
        self.lifeline: Lifeline | None = None
        self.beside: list[StageGroup] = []
        self._graphs: list[weakref.ref[Graph]] = []
        self._backend, self._markers, self._limit = backend, markers, limit

    def loss(self) -> str | None:
        """Return which rank's process has ended, or which one beside, if a lifeline knows one."""
        return next((line.lost for line in self._lifelines if line.lost is not None), None)

    def left_beside(self) -> str | None:
        """Return which process beside has closed its handler, if a lifeline knows one."""
        lines = (group.lifeline for group in self.beside)
        return next((line.following for line in lines if line is not None and line.has_left), None)

    @property
    def _lifelines(self) -> list[Lifeline]:
        return [line for line in (self.lifeline, *(group.lifeline for group in self.beside)) if line is not None]

    def lend(self, group: Any) -> None:
        """Note that a piece posts a collective on a group of the caller's, or waits for one."""
        self.lent.add(group)
        if self.is_cut:  # by another thread, which did not know of it
            self._end_lent()

    def keep(self, graph: Graph) -> None:
        """Remember a graph that holds operations of these groups."""
        self._graphs = [*(each for each in self._graphs if each() is not None), weakref.ref(graph)]
        if self.is_cut:  # by another thread
            graph.reset()

    def cut(self, keys: Collection[Key] | None = None, epoch: int | None = None) -> None:
        """End all operations that are not complete, and all waits for them. Any thread may call it.

        Args:
            keys: of the groups that end; by default all of them.
            epoch: only in this one.
        """
        with self._cutting:
            if epoch is None or epoch == self.epoch:
                self.is_cut = True
                self._end({*self._on_device(), "control"} if keys is None else keys)

    def cut_control(self) -> None:
        """End the exchange of all ranks. Groups of the caller stay: those whose pieces wait learn the reason."""
        with self._cutting:
            self.give_reason()
            self._end_control()

    def drop(self, keys: Collection[Key]) -> None:
        """End some groups and give them up. The thread that posts calls it."""
        with self._cutting:
            self._end(keys)
        kinds: list[dict[Any, Any]] = [self.edges, self.lanes, self.shared]
        self.ends.clear()  # a pending work would keep its connection open
        for key in keys:
            for groups in kinds:
                groups.pop(key, None)

    def _end(self, keys: Collection[Key]) -> None:
        # In another thread: a launch that can't go on before the groups are cut holds its graph.
        resets = threading.Thread(target=self._reset_graphs, daemon=True, name="fpipe-graphs")
        resets.start()
        self._backend.cut([group for key, group in self._on_device().items() if key in keys])
        resets.join(CUT_LIMIT)
        if "control" in keys:
            self._end_control()
        self._end_lent()

    def _end_control(self) -> None:
        if "control" in self.shared:
            GLOO.cut([self.shared["control"]])

    def give_reason(self) -> None:
        """Give the processes beside the handler the reason why it ends, if it does."""
        if names := [*(group.group_name for group in list(self.lent)), *(group.key for group in self.beside)]:
            self.before_end(names)

    def _end_lent(self) -> None:
        """End what pieces wait for; their groups can't be used again."""
        self.give_reason()
        if not self.lent:
            return
        devices = {group: {device.type for device in group._device_types} for group in list(self.lent)}
        gloo = [group._get_backend(torch.device("cpu")) for group, types in devices.items() if "cpu" in types]
        GLOO.cut(gloo)
        if self._backend.asynchronous:
            others = [group._get_backend(torch.device("cuda")) for group, types in devices.items() if "cuda" in types]
            self._backend.cut(others)

    def begin_epoch(self, epoch: int) -> None:
        """Begin the epoch in which groups are made again."""
        with self._cutting:
            self.epoch, self.is_cut = epoch, False
        self.used.clear()

    def close(self) -> None:
        """Close the connections; if none has failed, when all ranks have ended their programs, and the device its work.

        Meanwhile the watchdog ends the wait for a peer that has failed.
        """
        until, is_done = time.monotonic() + self._limit, False
        while not self.is_cut and not all(work.is_completed() for work in self.ends) and time.monotonic() < until:
            time.sleep(MOMENT)
        self.ends.clear()
        with suppress(RuntimeError):  # of a device that has failed
            is_done = self._markers.drain(lambda: not self.is_cut and time.monotonic() < until)
        if not is_done and not self.is_cut:
            log.warning("the device has not done all its work within %g s: the connections are cut", self._limit)
            self.cut()
        if not self.is_cut:
            self._reset_graphs()
            self._backend.close([*self._on_device().values()])
        self.closed.set()
        for line in self._lifelines:
            line.close()
        self.edges.clear()
        self.lanes.clear()
        self.shared.clear()

    def _reset_graphs(self) -> None:
        for each in self._graphs:
            if (graph := each()) is not None:
                graph.reset()

    def _on_device(self) -> dict[Key, Any]:
        results = {name: group for name, group in dict(self.shared).items() if name == "results"}
        return {**dict(self.edges), **dict(self.lanes), **results}
