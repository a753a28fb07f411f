"""The connections of a handler, which its ranks make at first use, and its part in steps that are replayed."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from fpipe.devices import Device, Graph, GraphReset
from fpipe.errors import ScheduleError, TransportError
from fpipe.flight.recording import Recording, new_name, record
from fpipe.handlers.contents import fingerprint
from fpipe.handlers.distributed.backends import Backend
from fpipe.handlers.distributed.collectives import over
from fpipe.handlers.distributed.connections import Connections
from fpipe.handlers.distributed.failures import Failures
from fpipe.handlers.distributed.grid import Grid
from fpipe.handlers.distributed.handshake import REPLAYING, RollCall, check_rng, tokens
from fpipe.handlers.distributed.liveness import Watchdog
from fpipe.handlers.distributed.questions import introduce
from fpipe.handlers.distributed.rendezvous import meet
from fpipe.handlers.distributed.steps import Steps
from fpipe.handlers.protocol import Departure, PeerLost
from fpipe.store import JobStore


class Setup:
    """The connections of a handler, made at first use; its part in replayed steps."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: DeviceMesh | None,
        grid: Grid,
        timeout: float,
        compute_timeout: float,
        device: Device,
        backend: Backend,
    ) -> None:
        self._group, self._replicas, self._grid = group, replicas, grid
        self.timeout, self._compute_timeout = timeout, compute_timeout
        self._device, self._backend = device, backend
        self._steps: Steps | None = None
        self.departure = Departure(is_alone=False)
        self._token_of = tokens()

    def ready(self) -> Steps:
        """Return the steps of the handler, which connects the ranks at the first call.

        Raises:
            TransportError: a rank did not come, or the handler has ended.
        """
        self._steps = self._steps or self._make()
        self._steps.failures.check()
        return self._steps

    @property
    def flight(self) -> Path | None:
        """The file of the flight recorder; None before the ranks are connected, or where there is none."""
        recording = None if self._steps is None else self._steps.connections.activity.flight
        return None if recording is None else recording.path

    def check(self) -> None:
        """Wait for the device; raise if a peer has failed since."""
        if self._steps is not None:
            self._steps.check()

    @property
    def epoch(self) -> int:
        return self.ready().failures.epoch

    def step(self) -> AbstractContextManager[None]:
        return self.ready().running()

    def agree(self, key: Hashable | None, rng: object = None) -> Hashable | None:
        token = (0, 0) if key is None else self._token_of(key)
        numbers = self._call_roll([*token, key is None, self.departure.number, fingerprint(rng)], None)
        *numbers_by_name, leaving, rngs = zip(*numbers, strict=True)
        check_rng(rngs, self._grid)
        first, second, new = map(sum, numbers_by_name)
        self.departure.learn(leaving)
        return None if new else (first, second)

    def refuse(self, error: BaseException) -> NoReturn:
        if not self.ready().is_over:
            with suppress(Exception):  # this one; or the step has failed, or the handler has ended, and all ranks know
                self._call_roll([0, 0, True, 0, 0], error)
        raise error

    def _call_roll(self, numbers: list[int], error: BaseException | None) -> list[list[int]]:
        steps = self.ready()
        with steps.running():
            return RollCall(steps, REPLAYING, numbers, error).wait()

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        steps = self.ready()
        connections = steps.connections
        with steps.running(lambda: part):
            connections.activity.replay(part)
            if connections.device.asynchronous:
                connections.use_all()  # a replay runs none of the code that posts
            try:
                yield
            except GraphReset:
                raise PeerLost(None, part) from None
            if connections.device.asynchronous:
                connections.activity.markers.add(part, "replaying")
                connections.keep_up()

    @contextmanager
    def capturing(self, graph: Graph) -> Iterator[None]:
        connections = self.ready().connections
        markers = connections.activity.markers
        markers.paused = True
        try:
            yield
        finally:
            markers.paused = False
        connections.groups.keep(graph)

    def add(self, x: Tensor, purpose: str) -> Tensor:
        return self.ready().connections.add(x, purpose)

    def numbers_of_replicas(self, numbers: list[float]) -> list[float]:
        """Return the numbers of all replicas, in their order; in a step, on the same ranks of each."""
        return self.ready().connections.numbers_of_replicas(numbers)

    def store(self) -> Store:
        return self.ready().failures.store

    def group(self, purpose: str, timeout: float | None) -> dist.ProcessGroup:
        return self.ready().connections.new_group(purpose, timeout)  # type: ignore[no-any-return]

    def _make(self) -> Steps:
        name, processes = self._processes()
        grid = self._grid if len(processes) == dist.get_world_size() else replace(self._grid, processes=processes)
        store = meet(name, grid.number, grid.size, self.timeout)
        failures = Failures(grid, store)
        jobs = failures.jobs.within(self.timeout)
        for key in ("failed", failures.key):
            jobs.compare_set(key, "", "")  # before the watchdogs read it
        introduce(jobs, [grid.number])
        limits = self.timeout, self._compute_timeout
        own = JobStore(store, self.timeout).clone().store  # a group that is made blocks its client of the store
        try:
            connections = Connections(
                own, grid, self._device, self._backend, *limits, _recorder(grid, store, self.timeout)
            )
        except (RuntimeError, PeerLost) as error:
            raise TransportError(
                f"{failures.name} could not connect to the other {grid.size - 1} ranks within "
                f"timeout={self.timeout:g} s. "
                "Do all of them make this handler, and can they reach each other? gloo uses the address of this "
                "host's name: where that is 127.0.0.1, set GLOO_SOCKET_IFNAME to the interface that leads to the "
                f"others ({error})"
            ) from error
        connections.on_loss, connections.groups.before_end = failures.post, failures.spread
        if dist.get_world_size() > 1:  # pieces may wait for processes beside this handler's
            Watchdog(failures, connections, self._compute_timeout).start()
        return Steps(connections, failures, self._compute_timeout, self.departure)

    def _processes(self) -> tuple[str, tuple[int, ...]]:
        """Return a name of the handler's processes, the same on all of them, and their numbers in the job.

        Raises:
            ScheduleError: the group and the replicas are no dimensions of one mesh.
        """
        if self._replicas is None:
            return self._group.group_name, tuple(dist.get_process_group_ranks(self._group))
        hint = "every rank makes the same handler"
        ranks = over(self._group, "the replicas of a handler", hint=hint, timeout=self.timeout)
        processes = ranks.gather(self._replicas.mesh.flatten().tolist(), "connecting")
        every = {process for own in processes for process in own}
        if len({len(own) for own in processes}) > 1 or len(every) < self._grid.size:
            raise ScheduleError(
                f"the ranks have the replicas {processes}, which overlap or differ in number: pass two dimensions of "
                "one mesh, as Distributed(mesh['pp'], replicas=mesh['dp'])"
            )
        return f"mesh {processes}", tuple(itertools.chain(*zip(*processes, strict=True)))


def _recorder(grid: Grid, store: Store, timeout: float) -> Recording | None:
    """Return the flight recorder of this process, under the name that the first of the ranks gives the flight."""
    name = JobStore(store, timeout).compare_set("flight", "", new_name())
    return record(name, {"process": grid.number, "name": grid.name(grid.number), "processes": grid.size})
