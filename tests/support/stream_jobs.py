"""Train on a device that checks the order of its streams, with and without a fault in the handler."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import fpipe
from fpipe import handlers, interop
from fpipe.handlers.distributed.channels import Channels, _Sent
from fpipe.handlers.distributed.connections import Connections
from fpipe.handlers.distributed.signature import encode
from fpipe.handlers.distributed.wire import PayloadCodec
from fpipe.stages.sharding import locals_of
from tests.support import cases, replica_jobs
from tests.support.jobs import differences, expected_on
from tests.support.sharing import sharing
from tests.support.streams import Checker, RecordedDevice, RecordedNCCL
from tests.support.train_jobs import OPTIMIZERS

MICROBATCHES = 4


class Forgetful(list):
    """The sends that are not complete, without their tensors."""

    def append(self, in_flight):
        super().append((in_flight[0], []))

    def popleft(self):
        return self.pop(0)


def forgetful(sent):
    sent.in_flight, sent.complete = Forgetful(), 0


def one_buffer(codec):
    """Receive all values of one signature into the same memory."""
    key = encode(codec.signature)
    if key not in shared:
        shared[key] = buffers(codec)
    return [message.detach() for message in shared[key]]


shared = {}


buffers = PayloadCodec.buffers


def no_wait(connections, works, peer, purpose):
    """Take the values, and let no stream wait."""
    connections.backend.joins, before = False, connections.backend.joins
    wait(connections, works, peer, purpose)
    connections.backend.joins = before


wait = Connections.wait


def only_for(what):
    def chosen(connections, works, peer, purpose):
        (no_wait if purpose.startswith(what) else wait)(connections, works, peer, purpose)

    return chosen


MUTATIONS = {
    "no stream waits for a value": (Connections, "wait", only_for("waiting for")),
    "no stream waits for the end of a send": (Connections, "wait", only_for("finishing a send")),
    "no stream waits for the loss": (Connections, "wait", only_for("waiting for the loss")),
    "no stream waits for whole parameters": (Connections, "wait", only_for("gathering the parameters")),
    "no stream waits for the sums of replicas": (Connections, "wait", only_for("adding the gradients")),
    "a sent tensor is given up when it is posted": (_Sent, "__init__", forgetful),
    "two receives have one buffer": (PayloadCodec, "buffers", one_buffer),
    "a step ends before its sends": (Channels, "end", lambda channels: None),
}
"""Fault -> (class, method, what takes its place)."""


def on_recorded_device(rank, name, schedule, ranks, run, mutation=None, grid=None):
    """Call `run(own, case, generator, plan, args)` for its step; check the order of the streams in two more calls.

    Args:
        grid: of replicas.

    Returns the differences from the expected results, the faults of the order, what the host waits for in the last
    call, and the number of streams.
    """
    case, generator, plan = cases.make(name, schedule, ranks, MICROBATCHES, cases.rows(MICROBATCHES))
    checker, purposes, mesh = Checker(), [], {} if grid is None else {"group": grid.mesh["pp"], "replicas": grid.over}
    with ExitStack() as stack:
        if mutation is not None:
            owner, method, replacement = MUTATIONS[mutation]
            stack.enter_context(patch.object(owner, method, replacement))
        stack.enter_context(patch.object(Connections, "wait_for_control", noting(purposes)))
        backend = RecordedNCCL(checker)
        own = handlers.Distributed(**mesh, timeout=30, device=RecordedDevice(checker), backend=backend)
        step, expected = run(rank, own, case, name, generator, plan)
        found = differences(step(), expected)  # without the checker: no other mode may see a trace
        for _ in range(2):
            checker.host_waits.clear()
            purposes.clear()
            with checker:
                results = step()
            found += differences(results, expected)
        waits = {*checker.host_waits, *purposes}
        own.check()
    return found, sorted(set(checker.faults)), waits, len(checker.streams)


def noting(purposes):
    def wait_for_control(connections, works, peer, purpose):
        purposes.append(purpose)
        control(connections, works, peer, purpose)

    return wait_for_control


control = Connections.wait_for_control


def training(rank, own, case, name, generator, plan):
    params, batch, target, state = cases.own(case, plan, rank)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=sharing(own, name), **case.options)
    expected = expected_on(cases.oracle(name, plan), params, plan, rank, case.state is not None)
    return lambda: step(params, batch, target, state=state, rng=case.rng), expected


def capturing(rank, own, case, name, generator, plan):
    """Steps of a captured `train_step`; of those that are checked, one captures and one replays."""
    params, batch, target, state = cases.own(case, plan, rank)
    optimizer = OPTIMIZERS["fused"](donate=False)
    args = params, optimizer.init(params), batch, target
    options = {"handler": sharing(own, name), "max_norm": 0.1, **case.options}
    plain, step = (
        fpipe.train_step(case.pipeline, generator, plan, optimizer, capture=c, **options) for c in (False, True)
    )
    expected = plain(*args, state=state, rng=case.rng)
    step(*args, state=state, rng=case.rng)
    return lambda: step(*args, state=state, rng=case.rng), expected


def by_pieces(rank, own, case, name, generator, plan):
    """Steps whose pieces are captured; those that are checked replay them."""
    params, batch, target, state = cases.own(case, plan, rank)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, capture="pieces", **case.options)
    expected = expected_on(cases.oracle(name, plan), params, plan, rank, case.state is not None)
    step(params, batch, target, state=state, rng=case.rng)
    return lambda: step(params, batch, target, state=state, rng=case.rng), expected


def gathering(rank, own, case, name, generator, plan):
    params, batch, _, state = cases.own(case, plan, rank)
    run = fpipe.evaluate(case.pipeline, plan, schedule=generator, handler=sharing(own, name), gather=True)
    reference = fpipe.evaluate(case.pipeline, plan, handler=handlers.Reference())
    return lambda: run(params, batch, state=state), reference(case.params, case.batch, state=case.state)


def replicated(grid, which):
    """A step of replicas; its parameters are sharded unless `which` is None."""

    def training(rank, own, case, name, generator, plan):
        case = cases.built(name, plan.stages, cases.rows(grid.replicas * plan.microbatches))
        plan = replace(plan, replicas=grid.replicas)
        params, batch, target = replica_jobs.arguments(case, plan, own.grid)
        expected = expected_on(replica_jobs.oracle(name, plan), params, plan, own.rank, False)
        if which is not None:
            params, expected = interop.fsdp(params, grid.over), (expected[0], interop.fsdp(expected[1], grid.over))
        resident = replica_jobs.room(generator, plan, which)
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, resident=resident, **case.options)

        def run():
            loss, grads = step(params, batch, target, rng=case.rng)
            return loss, locals_of(grads)

        return run, (expected[0], locals_of(expected[1]))

    return training


def train(rank, name, schedule, ranks, mutation=None):
    return on_recorded_device(rank, name, schedule, ranks, training, mutation)


def train_captured(rank, name, schedule, ranks):
    return on_recorded_device(rank, name, schedule, ranks, capturing)


def train_by_pieces(rank, name, schedule, ranks):
    return on_recorded_device(rank, name, schedule, ranks, by_pieces)


def evaluate(rank, name, schedule, ranks):
    return on_recorded_device(rank, name, schedule, ranks, gathering)


def train_replicas(rank, name, schedule, grid, which, mutation=None):
    return on_recorded_device(rank, name, schedule, grid.ranks, replicated(grid, which), mutation, grid)
