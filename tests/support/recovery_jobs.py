"""Steps that fail at any effect of any rank, and those after them, on one handler that outlives all of it."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

import fpipe
from fpipe import handlers, interop
from fpipe.autodiff.functions import TraceConfig
from fpipe.devices.tape import Tape
from fpipe.handlers.calls import FUNCTIONS
from fpipe.handlers.distributed.channels import Channels
from fpipe.handlers.distributed.connections import Connections
from fpipe.programs.lowering import forward_only
from tests.support import cases, replica_jobs
from tests.support.jobs import differences, expected_on
from tests.support.sharing import sharing
from tests.support.streams import Checker, RecordedDevice, RecordedNCCL
from tests.support.train_jobs import OPTIMIZERS

MICROBATCHES = 3
GRID = replica_jobs.Grid("dp2 pp2")
REPLICATED = {"replicas": None, "shards": "least"}
WAYS = ("graph", "eager", "train", "captured", "pieces", "evaluate", "gathered", "recorded", *REPLICATED)
TOGETHER = ("train", "captured", "evaluate", "gathered", "recorded")
"""Ways in which a rank that fails in its last effect fails the step of all: they end it together, or can repeat it."""
ERRORS = (fpipe.StageError, fpipe.TransportError, KeyboardInterrupt)

kept_alive = []
armed = {}
"""Effect -> the error that it raises, once, on this rank."""
slow = {}
"""Effect -> the seconds for which it sleeps, in each step of this rank."""


def failing(function):
    """A function of an effect that raises what is armed for it, then runs as it would."""

    def compiled(calls, effect):
        run = function(calls, effect)

        def call():
            if effect in slow:
                time.sleep(slow[effect])
            if error := armed.pop(effect, None):
                raise error
            return run()

        return None if run is None else call

    return compiled


FAILING = {effect: failing(function) for effect, function in FUNCTIONS.items()}


@functools.cache
def handler(kind):
    options = {"timeout": 20, "functions": FAILING}
    if kind == "replicas":
        return handlers.Distributed(GRID.mesh["pp"], replicas=GRID.over, **options)
    if kind == "recorded":  # the path of NCCL
        checker = Checker()
        return handlers.Distributed(device=RecordedDevice(checker), backend=RecordedNCCL(checker), **options)
    return handlers.Distributed(**options)


def forget(rank):
    handler.cache_clear()
    made.cache_clear()


class Trained:
    """A step on this process, and the reference's results.

    Attributes:
        program: of this rank.
        warm: how many steps it takes until a step is like those after it.
    """

    def __init__(self, rank, way, ranks, name="tied", schedule="zb_v"):
        self.way, self.rank = way, rank
        replicas = GRID.replicas if way in REPLICATED else 1
        self.handler = own = handler("replicas" if way in REPLICATED else "recorded" if way == "recorded" else "plain")
        case, generator, plan = cases.make(name, schedule, ranks, MICROBATCHES, cases.rows(replicas * MICROBATCHES))
        plan = replace(plan, replicas=replicas)
        params, batch, target = replica_jobs.arguments(case, plan, own.grid)
        expected = expected_on(replica_jobs.oracle(name, plan), params, plan, own.rank, False)
        self.arguments, self.program = [params, batch, target], fpipe.lower(generator, plan)[own.rank]
        self.options, self.warm = {"rng": case.rng}, 2 if way in ("captured", "train", "pieces") else 1
        shared = sharing(own, "failed steps", name, ranks)
        if way in ("evaluate", "gathered"):
            gather, self.program = way == "gathered", forward_only(fpipe.lower(generator, plan))[own.rank]
            self.step = fpipe.evaluate(case.pipeline, plan, schedule=generator, handler=shared, gather=gather)
            outputs = fpipe.evaluate(case.pipeline, plan, handler=handlers.Reference())(case.params, case.batch)
            has = gather or plan.stages - 1 in plan.stages_on(own.rank)
            self.expected, self.options = outputs if has else None, {}
            self.arguments.pop()
            return
        options = {"autodiff": "eager" if way == "eager" else "graph", **case.options}
        self.expected = expected
        if way in ("captured", "train"):
            optimizer = OPTIMIZERS["fused"](donate=False)
            arguments = dict(handler=shared, max_norm=0.1, **options)
            plain, self.step = (
                fpipe.train_step(case.pipeline, generator, plan, optimizer, capture=c, **arguments)
                for c in (False, way == "captured")
            )
            self.arguments.insert(1, optimizer.init(params))
            self.expected = plain(*self.arguments, **self.options)
            return
        if way == "shards":
            self.arguments[0] = interop.fsdp(params, GRID.over)
            self.expected = expected[0], interop.fsdp(expected[1], GRID.over)
            options["resident"] = replica_jobs.room(generator, plan, "least")
        capture = "pieces" if way == "pieces" else False
        self.step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=shared, capture=capture, **options)

    def __call__(self, **changes):
        """Run a step; return where it differs from the reference's."""
        arguments = [{}, *self.arguments[1:]] if changes.pop("wrong", False) else self.arguments
        found = self.step(*arguments, **self.options)
        if self.way == "shards":
            return differences(*(replica_jobs.locals_of(tree) for tree in (found, self.expected)))
        return differences(found, self.expected)

    @property
    def connections(self):
        return self.handler._setup.ready().connections

    def groups(self):
        """The connections of this rank."""
        groups = self.connections.groups
        return {str(key): group for each in (groups.edges, groups.lanes) for key, group in each.items()}


@functools.cache
def made(rank, way, ranks, schedule="zb_v"):
    """A step that is warm."""
    trained = Trained(rank, way, ranks, schedule=schedule)
    for _ in range(trained.warm):
        assert trained() == []
    return trained


def fault(trained, kind, guilty):
    """Arm this rank's part of a fault."""
    program, rank = [e for e in trained.program if type(e) in FAILING], trained.connections.rank
    if trained.way == "captured":  # the others run no Python
        return
    middle, own = program[len(program) // 2], rank == guilty
    compute = [e for e in program if type(e).__name__ in ("Forward", "Backward", "BackwardInput", "BackwardWeight")]
    at = {"first": compute[0], "last": compute[-1]}.get(kind, middle)
    if own or kind == "two":
        armed[at] = KeyboardInterrupt("stopped") if kind == "interrupt" else ArithmeticError(f"by {rank}")


def attempt(trained, **changes):
    """The error of a step: its type and text; nothing where it had none."""
    try:
        trained(**changes)
    except ERRORS as error:
        return f"{type(error).__name__}: {error}"
    finally:
        armed.clear()
    return ""


@contextmanager
def replays_stopped(number):
    """A replay is interrupted after some of its calls; None for one that is not."""
    replay = Tape.replay

    def stopped(tape, seeds):
        if number is None:
            return replay(tape, seeds)
        for call in tape.calls[: int(number * len(tape.calls))]:
            call()
        raise KeyboardInterrupt("stopped")

    with patch.object(Tape, "replay", stopped):
        yield


def recover(rank, way, kinds, ranks):
    """For each kind of fault: the errors of the steps that fail, the differences after them, traces and signatures.

    Args:
        kinds: with the rank that is guilty.
    """
    return [recovered(made(rank, way, ranks), kind, guilty) for kind, guilty in kinds]


def recovered(trained, kind, guilty):
    is_guilty, errors, counts = trained.connections.rank == guilty, [], []
    for _ in range(2 if kind == "again" else 1):
        fault(trained, kind, guilty)
        with replays_stopped(0.5 if is_guilty and kind == "interrupt" and trained.way == "captured" else None):
            errors.append(attempt(trained, wrong=kind == "argument" and is_guilty))
    partition, send = TraceConfig.partition, Connections.send_bytes
    with (
        patch.object(TraceConfig, "partition", lambda *args: counts.append("trace") or partition(*args)),
        patch.object(Connections, "send_bytes", lambda *args: counts.append("signature") or send(*args)),
    ):
        found = [d for _ in range(trained.warm if trained.way != "captured" else 3) for d in trained()]
    return errors, found, counts


def kept(rank, ranks):
    """An evaluation fails on a handler that a step shares: the connections that are new, and the differences."""
    trained, evaluated = made(rank, "graph", ranks, "one_f_one_b"), made(rank, "evaluate", ranks, "one_f_one_b")
    before = trained.groups()
    fault(evaluated, "last", ranks - 1)
    attempt(evaluated)
    found = evaluated() + trained()
    after = trained.groups()
    return sorted(key for key in before if before[key] is not after[key]), found


def new_program(rank, wrong):
    """A set-up fails on one rank after a good step: the errors of both ranks, and whether the next ones work."""
    trained = made(rank, "graph", 2)
    case, generator, plan = cases.make("linear", "gpipe", 2, MICROBATCHES)
    make = partial(fpipe.value_and_grad, case.pipeline, generator, plan, handler=trained.handler)
    connect = Connections.connect

    def stopped(*arguments):
        if rank == wrong:
            raise KeyboardInterrupt("stopped")
        return connect(*arguments)

    error = ""
    with patch.object(Connections, "connect", stopped):
        try:
            make()
        except ERRORS as raised:
            error = f"{type(raised).__name__}: {raised}"
    return error, attempt(trained) or trained(), trained()


def left_alone(rank):
    """Rank 1 fails and does not come again: the errors of the steps."""
    kept_alive.append(own := handlers.Distributed(timeout=1, functions=FAILING))
    case, generator, plan = cases.make("linear", "gpipe", 2, MICROBATCHES)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, autodiff="eager")
    arguments, errors = cases.own(case, plan, rank)[:3], []
    for _ in range(1 if rank else 3):
        if rank:
            armed[fpipe.effects.Forward(1, 1)] = ArithmeticError("by 1")
        try:
            step(*arguments)
        except ERRORS as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def ended_by_one(rank):
    """Rank 1 is interrupted in a step whose results rank 0 has: the errors of three steps."""
    own = handlers.Distributed(timeout=10)
    case, generator, plan = cases.make("linear", "gpipe", 2, MICROBATCHES)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, autodiff="eager")
    arguments = cases.own(case, plan, rank)[:3]
    errors, end = [], Channels.end

    def stopped(channels):
        if rank == 1:
            raise KeyboardInterrupt("stopped")
        end(channels)

    for number in range(3):
        with patch.object(Channels, "end", stopped if number == 0 else end):
            try:
                step(*arguments)
                errors.append("")
            except ERRORS as error:
                errors.append(f"{type(error).__name__}: {error}")
    return errors


class Drain:
    """Two ranks, of which rank 1 has one weight gradient left when rank 0 has ended its program.

    Args:
        seconds: for which that weight gradient sleeps.
    """

    def __init__(self, rank, seconds):
        self.rank, self.seconds = rank, seconds
        self.handler = handlers.Distributed(timeout=10, functions=FAILING)
        self.case, self.generator, self.plan = cases.make("linear", "zb_h1", 2, MICROBATCHES)
        self.arguments = cases.own(self.case, self.plan, rank)[:3]
        self.last = fpipe.effects.BackwardWeight(1, MICROBATCHES - 1)
        options = {"handler": self.handler, "autodiff": "eager"}
        self.step = fpipe.value_and_grad(self.case.pipeline, self.generator, self.plan, **options)
        sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
        train = fpipe.train_step(self.case.pipeline, self.generator, self.plan, sgd, max_norm=1.0, **options)
        params, *data = self.arguments
        self.train = lambda: train(params, sgd.init(params), *data)
        self.step(*self.arguments)

    def attempt(self, call, error=None):
        """The error of a call whose last effect on rank 1 is slow, and raises one; its result; seconds."""
        if self.rank == 1:
            slow[self.last] = self.seconds
            if error is not None:
                armed[self.last] = error
        start, result, text = time.monotonic(), None, ""
        try:
            result = call()
        except ERRORS as raised:
            text = f"{type(raised).__name__}: {raised}"
        finally:
            slow.clear()
        return text, result, time.monotonic() - start

    def attempt_step(self):
        return self.attempt(lambda: self.step(*self.arguments))[0]


def returned_early(rank, seconds):
    """(seconds of a step, and with the wait for the other rank; whether its loss is that of the step before)."""
    drain = Drain(rank, seconds)
    loss, _ = drain.step(*drain.arguments)
    _, (late, _), own = drain.attempt(lambda: drain.step(*drain.arguments))
    start = time.monotonic()
    drain.handler.check()
    return own, own + time.monotonic() - start, bool(loss == late)


def failed_late(rank, call):
    """Rank 1 fails in its drain, when rank 0 has returned: the errors of that step, of a call, and of a step."""
    drain = Drain(rank, 0.5)
    calls = {
        "step": lambda: drain.step(*drain.arguments),
        "check": drain.handler.check,
        "norm": lambda: fpipe.global_norm(drain.arguments[0], drain.plan, handler=drain.handler),
    }
    first, *_ = drain.attempt(calls["step"], ArithmeticError("by 1"))
    errors = [first, *(drain.attempt(calls[name])[0] for name in (["step"] if rank else [call, "step"]))]
    kept_alive.append(drain)  # else rank 1 may be gone when rank 0 asks
    return errors


def failed_before_the_norm(rank):
    """Rank 1 fails in its drain of a step that clips: the errors of this step and of the next one."""
    drain = Drain(rank, 0.5)
    drain.train()
    return [drain.attempt(drain.train, error)[0] for error in (ArithmeticError("by 1"), None)]


def failed_after_an_update(rank, donate):
    """Rank 1 fails when rank 0 has updated one of its two stages: the errors of that step and of the next one."""
    kept_alive.append(own := handlers.Distributed(timeout=10, functions=FAILING))
    case, generator, plan = cases.make("linear", "zb_v", 2, MICROBATCHES)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1, donate=donate)
    step = fpipe.train_step(case.pipeline, generator, plan, sgd, handler=own, autodiff="eager")
    params, batch, target = cases.own(case, plan, rank)[:3]
    errors, last = [], fpipe.effects.BackwardInput(1, MICROBATCHES - 1)
    for number in range(2):
        if rank == 1 and number == 0:
            armed[last], slow[last] = ArithmeticError("by 1"), 0.3
        try:
            step(params, sgd.init(params), batch, target)
            errors.append("")
        except ERRORS as error:
            errors.append(f"{type(error).__name__}: {error}")
        slow.clear()
    return errors


def left_at_once(rank):
    """Rank 0 gives its handler up when it has returned from a step in which rank 1 is still at work: the errors."""
    text = Drain(rank, 0.5).attempt_step()
    gc.collect()
    return text


def killed_late(rank):
    """Rank 1 is killed in its drain, when rank 0 has returned: the errors of that step and of the next one."""
    drain = Drain(rank, 2.0)
    if rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return drain.attempt_step(), drain.attempt_step()


def resources():
    """Open files and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def attack(rank, ranks, ways, seed, steps):
    """Random faults in a row: where results are wrong, steps whose errors name no rank, and resources at both ends."""
    every, found = [made(rank, way, ranks) for way in ways], []
    before = resources()
    chance = random.Random(seed)  # the same on all ranks
    for number in range(steps):
        trained = chance.choice(every)
        guilty = {r: chance.random() for r in range(trained.connections.size) if chance.random() < 0.6 / ranks}
        kinds = {r: chance.choice([ArithmeticError, ArithmeticError, KeyboardInterrupt]) for r in guilty}
        if (at := guilty.get(trained.connections.rank)) is not None:
            program = [e for e in trained.program if type(e) in FAILING]
            error = kinds[trained.connections.rank]
            reach = 1 if trained.way in TOGETHER else 0.5  # of the others, a rank may end a step that fails late
            armed[program[int(at * reach * len(program))]] = error(f"by {trained.connections.rank}")
        stops = at if kinds.get(trained.connections.rank) is KeyboardInterrupt and trained.way == "captured" else None
        try:
            with replays_stopped(stops):
                found += [(number, trained.way, d) for d in trained()]
        except ERRORS as error:
            if not any(f"rank {r % ranks}" in str(error) for r in guilty) and not isinstance(error, KeyboardInterrupt):
                found.append((number, trained.way, sorted(guilty), f"{type(error).__name__}: {error}"))
        armed.clear()
    found += [(trained.way, d) for trained in every for d in trained()]
    return found, before, resources()
