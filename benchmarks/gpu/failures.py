"""Part B: the errors of a rank when the other one fails, and the resources that stay.

Every case has fresh processes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

import fpipe
from benchmarks.gpu.kernels import busy
from benchmarks.gpu.setting import Ended, Setting
from fpipe import Pipeline, Placement, handlers, interop, schedules
from fpipe.devices import device_of
from tests.support.cases import mse
from tests.support.jobs import place

WIDTH, MICROBATCHES, STEPS = 64, 4, 3
FEW = 3  # handlers after which a process has everything that it keeps
ROUNDING = 1e-5
GRACE = 3.0  # seconds beyond the timeout in which the other rank has its error
STARTING = 60.0  # seconds for processes to import torch and to connect
Act = Callable[[int, int], None]


class Training:
    """Steps of 1F1B on two ranks, one stage on each; `act(stage, call)` runs in every forward of a stage.

    Args:
        capture: as of `value_and_grad`: from the third step on, graphs are replayed, without `act`.
        options: of the handler.
    """

    def __init__(self, rank: int, kind: str, act: Act, capture: bool = False, **options: Any) -> None:
        self.device, calls = place(rank, kind), [0, 0]
        torch.manual_seed(0)
        weights = [torch.randn(WIDTH, WIDTH).to(self.device) / WIDTH**0.5 for _ in range(2)]
        self.batch, self.target = torch.randn(2, 2 * MICROBATCHES, WIDTH).to(self.device)

        def layer(stage: int) -> Callable[[Any, Any], Any]:
            def fn(p: Any, x: Any) -> Any:
                calls[stage] += 1
                act(stage, calls[stage])
                return torch.tanh(x @ p["w"])

            return fn

        self.pipeline = Pipeline([layer(0), layer(1)], mse)
        self.plan = self.pipeline.plan(Placement.loop(2), MICROBATCHES)
        self.params = {rank: {"w": weights[rank]}}
        where = {} if kind == "cpu" else {"device": self.device}
        self.handler = handlers.Distributed(**where, **options)
        self.step = fpipe.value_and_grad(
            self.pipeline,
            schedules.one_f_one_b,
            self.plan,
            handler=self.handler,
            autodiff="eager",
            capture=capture,
        )

    def __call__(self, batch: Any = None) -> Any:
        return self.step(self.params, self.batch if batch is None else batch, self.target)


def nothing(stage: int, call: int) -> None:
    """Let a forward be a forward."""


class Case(NamedTuple):
    """The expected end of both ranks when rank 1 fails.

    Args:
        errors, codes: of each rank's process.
        reason: a part of rank 0's error.
    """

    errors: tuple[str | None, str | None]
    codes: tuple[int, int]
    reason: str = ""


CASES = {
    "raises": Case(("TransportError", "StageError"), (1, 1), "rank 1, stage 1, microbatch 0"),
    "raises last": Case(("TransportError", "StageError"), (1, 1), f"rank 1, stage 1, microbatch {MICROBATCHES - 1}"),
    "is killed": Case(("TransportError", None), (1, -signal.SIGKILL)),
    "is killed, and the loss is read": Case(("TransportError", None), (1, -signal.SIGKILL)),
    "is killed in a replay": Case(("TransportError", None), (1, -signal.SIGKILL)),
    "exits": Case(("TransportError", None), (1, 0)),
    "stops": Case(("TransportError", "TransportError"), (1, 1)),
    "is slow": Case((None, None), (0, 0)),
    "is refused": Case((None, None), (0, 0)),
}


def failures(setting: Setting) -> None:
    """Let rank 1 fail in each way in its third step, and compare both ranks' ends with those expected."""
    timeout = 3.0 if setting.cpu else 10.0
    for name in CASES:
        if setting.report.left < STARTING / 2:
            setting.report.add(**{name: "no time was left for it"})
            setting.report.expect(False, f"{name}: no time was left for it")
        else:
            failure(setting, name, timeout)


def failure(setting: Setting, name: str, timeout: float) -> None:
    """Run one case, and report the seconds from the failure to rank 0's error."""
    case, limit = CASES[name], setting.report.limit(STARTING + 4 * timeout)
    ended = setting.scripts(fail, 2, name, timeout, setting.kind, limit=limit, resume=2 * timeout)
    begun = min((at for end in ended for at in end.said.values()), default=0.0)
    seconds = ended[0].at - begun if begun and ended[0].at else None
    figures = {
        "seconds": seconds,
        "errors": [end.error for end in ended],
        "exit_codes": [end.exitcode for end in ended],
        "text": ended[0].text[:300],
    }
    setting.report.add(**{name: figures})
    wrong = _wrong(case, ended, seconds, timeout)
    setting.report.expect(not wrong, f"{name}: {wrong}")


def _wrong(case: Case, ended: list[Ended], seconds: float | None, timeout: float) -> str:
    errors, codes = tuple(end.error for end in ended), tuple(end.exitcode for end in ended)
    if errors != case.errors:
        return f"errors {errors}, not {case.errors}"
    if codes != case.codes:
        return f"exit codes {codes}, not {case.codes}"
    if case.reason not in ended[0].text:
        return f"rank 0 is not told of {case.reason}: {ended[0].text[:200]}"
    if case.errors[0] and (seconds is None or seconds > timeout + GRACE):
        return f"rank 0 had its error after {seconds} s, with a timeout of {timeout:g} s"
    return ""


def fail(rank: int, say: Callable[[str], None], name: str, timeout: float, kind: str) -> str:
    """Train three steps, where rank 1 fails in the third; the script of a user."""
    if name == "is killed in a replay":
        return fail_in_replay(rank, say, timeout, kind)

    def act(stage: int, call: int) -> None:
        if rank == 0 or call <= (STEPS - 1) * MICROBATCHES:
            return
        microbatch = (call - 1) % MICROBATCHES
        if name == "raises last":
            busy(training.device, 1.0)
        if microbatch == (MICROBATCHES - 1 if name == "raises last" else 0):
            _fail(name, say, training.device, timeout)

    training = Training(rank, kind, act, timeout=timeout)
    for i in range(STEPS):
        if name == "is refused" and i == 1:
            with contextlib.suppress(fpipe.StageError, fpipe.TransportError):
                training(training.batch[:3] if rank == 0 else None)
        loss, _ = training()
    if name.endswith("the loss is read"):
        loss.item()  # waits on a GPU for values that do not come
    training.handler.check()
    return f"{loss.item():.6f}"


def fail_in_replay(rank: int, say: Callable[[str], None], timeout: float, kind: str) -> str:
    """Replay a graph again and again, until rank 1 dies; on a GPU most of the time is in its kernels."""
    training = Training(rank, kind, lambda stage, call: busy(training.device, 0.05), capture=True, timeout=timeout)
    for _ in range(STEPS + 1):
        training()
    training.handler.check()
    if rank == 1:
        say("fails")
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    until = time.monotonic() + 3 * timeout
    while time.monotonic() < until:
        training()
        training.handler.check()
    return "no error"


def _fail(name: str, say: Callable[[str], None], device: torch.device, timeout: float) -> None:
    if name in ("is slow", "is refused"):
        if name == "is slow":
            busy(device, 1.5 * timeout)
        return
    say("stops" if name == "stops" else "fails")
    if name.startswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "exits":
        os._exit(0)
    elif name == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise ArithmeticError("this is the failure")


def cut(setting: Setting) -> None:
    """Break two and four receives that never end: first as fpipe does, then one after the other."""
    for edges in (2,) if setting.cpu else (2, 4):
        for together in (True, False):
            name = f"{edges} edges, {'together' if together else 'in turn'}"
            limit = setting.report.limit(20)
            ended = setting.scripts(stuck, 2, edges, together, setting.kind, limit=limit)
            seconds = ended[0].value
            setting.report.add(**{name: f"not within {limit:.0f} s" if seconds is None else seconds})
            if together:
                setting.report.expect(seconds is not None and seconds < 2.0, f"{name}: {seconds} s")


def stuck(rank: int, say: Callable[[str], None], edges: int, together: bool, kind: str) -> float | None:
    """Return the seconds until receives have ended that nobody sends for, one on each edge."""
    device, backend = place(rank, kind), handlers.Gloo() if kind == "cpu" else handlers.NCCL()
    store = PrefixStore("stuck", _get_default_store())
    groups = [
        backend.group(PrefixStore(str(edge), store), f"edge {edge}", rank, (0, 1), STARTING) for edge in range(edges)
    ]
    ping = torch.ones(1, device=device)
    for group in groups:
        backend.wait((group.send if rank == 0 else group.recv)([ping], 1 - rank, 0))
    if rank == 1:
        store.wait(["done"], timedelta(seconds=STARTING))
        os._exit(0)
    works = [group.recv([torch.empty(1 << 20, device=device)], 1, 0) for group in groups]
    time.sleep(0.5)
    start = time.monotonic()
    if together:
        backend.cut(groups)
    else:
        for group in groups:
            backend.cut([group])
    for work in works:
        with contextlib.suppress(RuntimeError):
            backend.wait(work)
    device_of(device).synchronize()
    seconds = time.monotonic() - start
    store.set("done", "")
    return seconds


def dropped_handler(setting: Setting) -> None:
    """Drop the handler before the loss is read, and let rank 0 exit where only rank 1 has outputs to read."""
    seconds = 0.2 if setting.cpu else 1.0
    for job in (loss_of_dropped, outputs_of_exited):
        ended = setting.scripts(job, 2, seconds, setting.kind, limit=setting.report.limit(STARTING))
        values = [end.value for end in ended]
        setting.report.add(**{job.__name__: {"values": values, "errors": [end.text[:200] for end in ended]}})
        setting.report.expect(values[1] is not None and values[1] <= ROUNDING, f"{job.__name__}: off by {values[1]}")
        codes = [end.exitcode for end in ended]
        setting.report.expect(codes == [0, 0], f"{job.__name__}: exit codes {codes}")


def loss_of_dropped(rank: int, say: Callable[[str], None], seconds: float, kind: str) -> float:
    """Return by how much the loss differs from that of one process."""

    def train() -> Any:
        training = Training(rank, kind, lambda stage, call: busy(place(rank, kind), seconds))
        return training()[0]

    loss = train()
    gc.collect()
    return abs(loss.item() - _alone(kind)[0].item())


def outputs_of_exited(rank: int, say: Callable[[str], None], seconds: float, kind: str) -> float:
    training = Training(rank, kind, lambda stage, call: busy(place(rank, kind), seconds))
    run = fpipe.evaluate(training.pipeline, training.plan, handler=training.handler, autodiff="eager")
    outputs = run(training.params, training.batch)
    if rank == 0:
        return 0.0  # it has nothing to read, and exits
    return float((outputs - _alone(kind)[1]).abs().max())


def _alone(kind: str) -> tuple[Any, Any]:
    """Return the loss and the outputs of the same pipeline in one process."""
    device = place(0, kind)
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH).to(device) / WIDTH**0.5 for _ in range(2)]
    batch, target = torch.randn(2, 2 * MICROBATCHES, WIDTH).to(device)
    outputs = torch.tanh(torch.tanh(batch @ weights[0]) @ weights[1])
    return mse(outputs, target), outputs


def saved_after_failure(setting: Setting) -> None:
    """Let rank 1 fail behind a long kernel; rank 0 steps, updates, checks, and saves."""
    with tempfile.TemporaryDirectory() as folder:
        limit = setting.report.limit(STARTING)
        ended = setting.scripts(save, 2, folder, setting.kind, limit=limit)
        written = sorted(path.name for path in Path(folder).iterdir() if path.name[0].isdigit())
    setting.report.add(written=written, errors=[end.error for end in ended], text=ended[0].text[:300])
    setting.report.expect(ended[0].error == "TransportError", f"rank 0 got {ended[0].error}, not a TransportError")
    setting.report.expect(not written, f"a checkpoint was written after the failure: {written}")


def save(rank: int, say: Callable[[str], None], folder: str, kind: str) -> None:
    def act(stage: int, call: int) -> None:
        if rank == 1:
            busy(training.device, 0.5)
            if call == MICROBATCHES:
                raise ArithmeticError("in the last microbatch")

    training = Training(rank, kind, act, timeout=10.0)
    checkpoints = interop.Checkpoints(folder, training.pipeline, training.plan, handler=training.handler)
    init, update = interop.optimizer(torch.optim.SGD, lr=0.1)
    _, grads = training()
    params, _ = update(grads, init(training.params), training.params)
    training.handler.check()
    checkpoints.save(params=params, step=1)


def many_handlers(setting: Setting) -> None:
    """Make and drop handlers, and compare the process's resources after the first few with those at the end."""
    most, limit = 8 if setting.cpu else 30, setting.report.limit()
    ended = setting.scripts(come_and_go, 2, most, limit - STARTING / 3, setting.kind, limit=limit)
    samples = ended[0].value or []
    setting.report.add(handlers=len(samples), samples=samples[FEW - 1 :: 4], error=ended[0].text[:300])
    setting.report.expect(len(samples) > 2 * FEW, f"{len(samples)} handlers were made: {ended[0].text[:200]}")
    for name, more in (("threads", 2), ("device_bytes", 64 << 20), ("host_bytes", 256 << 20)) if samples else ():
        growth = samples[-1].get(name, 0) - samples[min(FEW, len(samples)) - 1].get(name, 0)
        setting.report.expect(growth <= more, f"{growth} more {name} after {len(samples)} handlers than after {FEW}")


def come_and_go(rank: int, say: Callable[[str], None], most: int, seconds: float, kind: str) -> list[dict[str, int]]:
    """Return the resources of the process after each handler. Rank 0 decides when there is no time for another."""
    samples, until, going_on = [], time.monotonic() + seconds, torch.ones(1)
    while len(samples) < most and going_on:
        training = Training(rank, kind, nothing)
        loss, _ = training()
        loss.item()
        del training
        gc.collect()
        samples.append(_resources(kind))
        going_on.fill_(time.monotonic() < until)
        dist.broadcast(going_on, 0)
    return samples


def _resources(kind: str) -> dict[str, int]:
    resources = {
        "threads": len(os.listdir("/proc/self/task")),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info()
        resources["device_bytes"] = total - free
    return resources
