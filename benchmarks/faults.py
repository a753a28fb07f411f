"""Break jobs in every way that was thought of, and count what a user would have to notice for himself.

    python -m benchmarks.faults                              # 20 trials of each fault
    python -m benchmarks.faults --faults kill stop --trials 80
    python -m benchmarks.faults --json                       # a list of objects, and nothing else
    python -m benchmarks.faults --out faults.json            # and into a file, with the machine

Jobs are of three processes over gloo, on the loopback, with `timeout=5`; those of tensor parallelism and of
replicas are of two ranks by two. An object has the fault, its trials, and:

- hangs: trials in which a process that had no fault was still there after four times the limit.
- aborts: in which one was ended by a signal.
- corrupt: which ended with wrong values, or loaded or ran what was wrong.
- unnamed: in which an error does not name the rank, or the process, or is none of fpipe's own.
- median_s, max_s: from the fault until all processes had ended, or a restarted one trained again.

| fault | what happens |
| --- | --- |
| kill, stop | a process gets SIGKILL or SIGSTOP, at a random moment of its training |
| tp-kill, tp-stop | likewise one of two that compute a stage together |
| replica-kill, replica-stop | likewise one of a pipeline that has a replica |
| host | that hosts the job's store: SIGSTOP |
| exit | its script ends after a random step |
| raise | its stage raises in a random microbatch |
| skip | it leaves out a batch |
| twice | it calls `evaluate` once more than the others |
| save | all processes of a job that saves each step get SIGKILL: what is loaded then is whole, and has the right bits |
| flip | a random bit of a random file of a checkpoint is another: it is refused, or loaded with the right bits |
| memory-kill | as save, of a job that writes a memory checkpoint each step |
| memory-flip | a random bit of a file of memory checkpoints is another: what is loaded has the right bits |
| memory-lost | a random file of them is gone: likewise |
| mutant | an effect of a schedule, which may move residuals, is missing, repeated or elsewhere: refused, or right |
| argument | an argument of a public function is wrong |
| restart | a process of one job under torchrun gets SIGKILL, again and again: the job ends with the right bits |
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fpipe
from benchmarks import models
from fpipe import Pipeline, Placement, ScheduleError, StageError, TransportError, handlers, interop, schedules

RANKS, MICROBATCHES, WIDTH, STEPS = 3, 4, 8, 40
TIMEOUT = 5.0  # of the handlers, in seconds
LIMIT = 4 * TIMEOUT  # after which a process that should have ended hangs
OWN = (ScheduleError, StageError, TransportError, interop.CheckpointError)
EVERY = 3  # steps from one checkpoint to the next
CUTS = {"up": Shard(1), "down": Shard(0)}
ENDLESS = ("kill", "stop", "host", "save")  # what happens while a job trains, whichever mesh it has


class Mesh(NamedTuple):
    """The processes of a job: ranks of a pipeline, replicas of it, and those that compute a stage together."""

    replicas: int = 1
    ranks: int = RANKS
    parts: int = 1

    @property
    def size(self) -> int:
        return self.replicas * self.ranks * self.parts

    def name(self, process: int) -> str:
        """Return the name of a process in messages."""
        replica, rank = divmod(process // self.parts, self.ranks)
        if self.parts > 1:
            return f"process {process}"
        return f"rank {rank}" + (f" of replica {replica}" if self.replicas > 1 else "")


MESHES = {"tp": Mesh(ranks=2, parts=2), "replica": Mesh(replicas=2, ranks=2)}
"""The meshes of faults, by how their names begin; other faults have one rank a process."""


class Trial(NamedTuple):
    """The outcome of one trial, and the seconds until the job had ended or trained again."""

    hang: bool = False
    abort: bool = False
    corrupt: bool = False
    unnamed: bool = False
    seconds: float = 0.0


class Ended(NamedTuple):
    """The last message of a process: the digest of its parameters, or its error, and whether that is one of fpipe's."""

    digest: str = ""
    error: str = ""
    is_own: bool = True


# The job


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["up"]) @ p["down"]


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def batch(i: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(i))
    return x, y


def begin(
    handler: Any,
    folder: Path | None,
    guilty: Callable[[Any, Tensor], Any] = layer,
    mesh: Mesh = Mesh(),  # noqa: B008, a tuple
    tp: Any = None,
    in_memory: bool = False,
) -> tuple[Any, Any, Any]:
    """Return the run, its step, and the optimizer's update; on one process of the job, or on all in one process.

    Args:
        tp: the processes that compute stages together.
        in_memory: with memory checkpoints too.
    """
    pipeline = Pipeline([layer, guilty, layer][: mesh.ranks], squares)
    plan = pipeline.plan(Placement.loop(mesh.ranks), MICROBATCHES, replicas=mesh.replicas)
    generator = torch.Generator().manual_seed(0)
    params: dict[int, Any] = {
        s: {name: torch.randn(WIDTH, WIDTH, generator=generator) for name in CUTS} for s in range(mesh.ranks)
    }
    own = pipeline.params_on(params, plan, handler)
    if tp is not None:
        own = {
            s: {name: distribute_tensor(x, tp, [CUTS[name]], src_data_rank=None) for name, x in tree.items()}
            for s, tree in own.items()
        }
    adam = interop.optimizer(torch.optim.Adam, lr=0.01)
    memory = None
    if folder is not None and in_memory:
        (folder / "memory").mkdir(exist_ok=True)
        memory = interop.Memory(folder=folder / "memory")
    saved = None
    if folder is not None:
        saved = interop.Checkpoints(folder / "saved", pipeline, plan, handler=handler, keep=2, memory=memory)
    run = interop.resume(saved, params=own, optimizer=adam.init(own))
    autodiff: Any = "auto" if guilty is layer else "eager"  # a graph runs no code of the stage
    return run, fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler, autodiff=autodiff), adam.update


def digest(params: dict[int, Any]) -> str:
    """Return a digest of parameters in bits."""
    bits = b"".join(params[s][name].numpy().tobytes() for s in sorted(params) for name in CUTS)
    return hashlib.sha256(bits).hexdigest()


def expected(steps: int) -> dict[int, dict[int, Any]]:
    """Return the parameters after each number of steps, of one process."""
    run, step, update = begin(handlers.Local(), None)
    result = {0: run.params}
    for i in run.steps(steps):
        _, grads = step(run.params, *batch(i))
        run.params, run.optimizer = update(grads, run.optimizer, run.params)
        result[i + 1] = run.params
    return result


def train(rank: int, port: int, is_host: bool, fault: str, at: int, folder: Path | None, messages: Any) -> None:
    """Train on one process of a job; rank 1 has the fault at step `at`."""
    torch.set_num_threads(1)
    mesh, calls = mesh_of(fault), 0
    store = dist.TCPStore("127.0.0.1", port, mesh.size, is_host and rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.size)

    def guilty(p: dict[str, Tensor], x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if fault == "raise" and calls == at * MICROBATCHES + 2:
            raise ArithmeticError("a bad row")
        return layer(p, x)

    try:
        dims = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "pp", "tp"))
        handler = handlers.Distributed(dims["pp"], replicas=dims["dp"] if mesh.replicas > 1 else None, timeout=TIMEOUT)
        run, step, update = begin(
            handler,
            folder,
            guilty if fault == "raise" else layer,
            mesh,
            dims["tp"] if mesh.parts > 1 else None,
            fault.startswith("memory"),
        )
        plan = step.spec.plan
        evaluate = fpipe.evaluate(step.spec.pipeline, plan, handler=step.handler, loss=True)
        every = None if folder is None else EVERY if fault.startswith("memory") else 1
        for i in run.steps(10**6 if fault.endswith(ENDLESS) else STEPS, every=every):
            if rank == 1 and i == at:
                if fault == "exit":
                    break
                if fault == "twice":
                    evaluate(run.params, *batch(i))
            _, grads = step(run.params, *batch(i + (rank == 1 and fault == "skip" and i >= at)))
            run.params, run.optimizer = update(grads, run.optimizer, run.params)
            if i == 2:
                messages.send("trains")
        messages.send(Ended(digest(run.params)))
    except BaseException as error:
        messages.send(Ended(error=f"{type(error).__name__}: {error}", is_own=isinstance(error, OWN)))


def job(fault: str, draw: random.Random, folder: Path | None, during: Callable[[list[Any]], Sequence[int]]) -> Trial:
    """Run a job in which `during` does something to its processes, and returns the ranks that are to end by it."""
    context = multiprocessing.get_context("forkserver")
    is_host = fault == "host"
    store = None if is_host else dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = free_port() if store is None else store.port
    size = mesh_of(fault).size
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    at = draw.randrange(3, STEPS // 2)
    processes = [
        context.Process(target=train, args=(rank, port, is_host, fault, at, folder, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for message in [ours.recv() for ours, _ in pipes]:
            if isinstance(message, Ended):
                raise RuntimeError(f"{fault}: a process ended before its job had a fault: {message.error}")
        began = time.monotonic()
        ended_by_it = during(processes)
        victim = mesh_of(fault).name(next(iter(ended_by_it), 1))
        survivors = [rank for rank in range(size) if rank not in ended_by_it]
        for rank in survivors:
            processes[rank].join(max(0.0, began + LIMIT - time.monotonic()))
        hang = any(processes[rank].is_alive() for rank in survivors)
        seconds = time.monotonic() - began
        ends = {rank: pipes[rank][0].recv() for rank in survivors if pipes[rank][0].poll()}
        codes = [processes[rank].exitcode for rank in survivors]
    finally:
        for process in processes:
            process.kill()
            process.join()
    abort = any(code is not None and code < 0 for code in codes)
    return Trial(
        hang, abort, seconds=seconds, unnamed=_is_unnamed(fault, victim, ends), corrupt=_is_corrupt(fault, ends)
    )


def mesh_of(fault: str) -> Mesh:
    """Return the processes of the jobs with a fault."""
    return MESHES.get(fault.partition("-")[0], Mesh())


def _is_unnamed(fault: str, name: str, ends: dict[int, Ended]) -> bool:
    """Return whether a rank raised an error of another library, or one that does not name the process at fault."""
    others = [each for rank, each in ends.items() if each.error and not (rank == 1 and fault in ("raise", "exit"))]
    return any(not each.is_own or name not in each.error for each in others)


def _is_corrupt(fault: str, ends: dict[int, Ended]) -> bool:
    """Return whether a rank ended its training as if there were no fault."""
    if fault in ("save", "memory-kill"):
        return False
    return any(not each.error for rank, each in ends.items() if not (rank == 1 and fault == "exit"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# The faults


def signalled(fault: str, draw: random.Random, victim: int | None, number: signal.Signals) -> Trial:
    """Send a signal to a process; by default to one whose number is no other's rank."""

    def during(processes: list[Any]) -> Sequence[int]:
        rank = draw.randrange(1, len(processes)) if victim is None else victim
        time.sleep(draw.random())
        os.kill(processes[rank].pid, number)
        return [rank]

    return job(fault, draw, None, during)


def of_itself(fault: str, draw: random.Random) -> Trial:
    return job(fault, draw, None, lambda processes: [])


def saved(fault: str, draw: random.Random, folder: Path) -> Trial:
    """Kill all processes of a job that saves, and load what it left."""

    def during(processes: list[Any]) -> Sequence[int]:
        time.sleep(draw.random())
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        return range(RANKS)

    trial = job(fault, draw, folder, during)
    try:
        run, *_ = begin(handlers.Local(), folder, in_memory=fault == "memory-kill")
    except Exception:  # of any library: what was saved can't be loaded
        return trial._replace(corrupt=True)
    least = 2 if fault == "memory-kill" else 0  # all had done the third step
    return trial._replace(corrupt=run.step < least or digest(run.params) != digest(expected(run.step)[run.step]))


def in_memory(fault: str, draw: random.Random, folder: Path) -> Trial:
    """Damage memory checkpoints of a run that has failed, and go on from what is left, in memory or on disk."""
    run, step, update = begin(handlers.Local(), folder, in_memory=True)
    last = draw.randrange(1, 3 * EVERY)
    with suppress(ArithmeticError):
        for i in run.steps(3 * EVERY, every=EVERY):
            _, grads = step(run.params, *batch(i))
            run.params, run.optimizer = update(grads, run.optimizer, run.params)
            if i == last:
                raise ArithmeticError("a bad row")
    run.checkpoints.finish()
    path = draw.choice(sorted(path for path in (folder / "memory").rglob("*") if path.is_file()))
    if fault == "memory-lost":
        path.unlink()
    elif path.stat().st_size:
        flip_bit(draw, path)
    began = time.monotonic()
    try:
        again, *_ = begin(handlers.Local(), folder, in_memory=True)
    except interop.CheckpointError:
        return Trial(seconds=time.monotonic() - began)
    except Exception:  # of any library, where it has to be fpipe's own
        return Trial(unnamed=True, seconds=time.monotonic() - began)
    seconds, on_disk = time.monotonic() - began, last // EVERY * EVERY
    is_same = on_disk <= again.step <= last and digest(again.params) == digest(expected(last)[again.step])
    return Trial(corrupt=not is_same, seconds=seconds)


def flip_bit(draw: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def flip(draw: random.Random, folder: Path) -> Trial:
    """Flip a bit of a checkpoint, and load it."""
    run, step, update = begin(handlers.Local(), folder)
    for i in run.steps(1):
        _, grads = step(run.params, *batch(i))
        run.params, run.optimizer = update(grads, run.optimizer, run.params)
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    flip_bit(draw, path)
    began = time.monotonic()
    try:
        again, *_ = begin(handlers.Local(), folder)
    except interop.CheckpointError:
        return Trial(seconds=time.monotonic() - began)
    except Exception:  # of any library, where it has to be fpipe's own
        return Trial(unnamed=True, seconds=time.monotonic() - began)
    is_same = again.step == 1 and digest(again.params) == digest(run.params)
    return Trial(corrupt=not is_same, seconds=time.monotonic() - began)


def mutant(draw: random.Random, folder: Path) -> Trial:
    """Change the schedule of a rank, and run it."""
    from tests.support.cases import moving

    pipeline = Pipeline([layer] * RANKS, squares)
    plan = pipeline.plan(Placement.loop(RANKS), MICROBATCHES)
    schedule = draw.choice([schedules.zb_h1, moving(schedules.zb_h1, lambda m: m % 2 == 1)])
    rows = [list(schedule(rank, plan)) for rank in range(RANKS)]
    row = draw.choice(rows)
    one, other = draw.randrange(len(row)), draw.randrange(len(row))
    match draw.randrange(4):
        case 0:
            row[one], row[other] = row[other], row[one]
        case 1:
            del row[one]
        case 2:
            row.insert(other, row[one])
        case _:
            draw.choice(rows).insert(other, row.pop(one))
    run, step, _ = begin(handlers.Local(), None)
    _, grads = step(run.params, *batch(0))
    began = time.monotonic()
    try:
        changed = fpipe.value_and_grad(
            pipeline, schedules.from_table(dict(enumerate(rows))), plan, handler=handlers.Local()
        )
        _, others = changed(run.params, *batch(0))
    except ScheduleError as error:
        return Trial(unnamed="rank" not in str(error), seconds=time.monotonic() - began)
    except Exception:  # of any library, where it has to be fpipe's own
        return Trial(unnamed=True, seconds=time.monotonic() - began)
    return Trial(corrupt=digest(dict(grads)) != digest(dict(others)), seconds=time.monotonic() - began)


def argument(draw: random.Random, folder: Path) -> Trial:
    """Give a public function a wrong argument."""
    from tests.support import fuzzing, surface

    began, saved = time.monotonic(), str(folder / "saved")
    bare = fuzzing.bare_error(*draw.choice(fuzzing.cases(saved)), surface.calls(saved))
    return Trial(unnamed=bare is not None, seconds=time.monotonic() - began)


def restarts(draw: random.Random, count: int, folder: Path) -> Iterator[Trial]:
    """Kill a process of a job under torchrun again and again; the last trial says whether the job ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", str(count), "--monitor-interval", "0.1", __file__, str(folder), str(count)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    killed = time.monotonic()
    try:
        for restart in range(count + 1):
            marks = [folder / f"{restart}-{rank}" for rank in range(RANKS)]
            while not all(mark.exists() for mark in marks):
                if agent.poll() is not None or time.monotonic() > killed + 10 * LIMIT:
                    yield Trial(hang=agent.poll() is None, corrupt=True)
                    return
                time.sleep(0.01)
            if restart:
                yield Trial(seconds=time.monotonic() - killed)
            if restart < count:
                time.sleep(draw.random())
                killed = time.monotonic()
                with suppress(ProcessLookupError):
                    os.kill(int(draw.choice(marks).read_text()), signal.SIGKILL)
        try:
            code = agent.wait(10 * LIMIT)
        except subprocess.TimeoutExpired:
            yield Trial(hang=True)
            return
    finally:
        agent.kill()
    ends = [folder / f"end-{rank}" for rank in range(RANKS)]
    steps = int(ends[0].read_text().split()[0]) if ends[0].exists() else 0
    whole = expected(steps)[steps]
    right = [f"{steps} {digest({rank: whole[rank]})}" for rank in range(RANKS)]
    if code or [end.read_text() if end.exists() else "" for end in ends] != right:
        yield Trial(corrupt=True)


def restarted(folder: Path, count: int) -> None:
    """Train on one process of a job under torchrun, until nobody kills it any more."""
    torch.set_num_threads(1)
    handler, restart = handlers.auto(timeout=TIMEOUT), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = handler.rank
    run, step, update = begin(handler, folder / "checkpoints")
    begun = run.step
    for i in run.steps(10**6 if restart < count else begun + 20, every=EVERY):
        _, grads = step(run.params, *batch(i))
        run.params, run.optimizer = update(grads, run.optimizer, run.params)
        if i == begun:
            mark = folder / f"{restart}-{rank}"
            mark.with_suffix(".new").write_text(str(os.getpid()))
            mark.with_suffix(".new").rename(mark)
    (folder / f"end-{rank}").write_text(f"{run.step} {digest(run.params)}")


FAULTS: dict[str, Callable[[random.Random, Path], Trial]] = {
    "kill": lambda draw, folder: signalled("kill", draw, 1, signal.SIGKILL),
    "stop": lambda draw, folder: signalled("stop", draw, 1, signal.SIGSTOP),
    "host": lambda draw, folder: signalled("host", draw, 0, signal.SIGSTOP),
    **{
        name: lambda draw, folder, name=name: of_itself(name, draw)  # type: ignore[misc]
        for name in ("exit", "raise", "skip", "twice")
    },
    **{
        name: lambda draw, folder, name=name, number=number: signalled(name, draw, None, number)  # type: ignore[misc]
        for mesh in MESHES
        for name, number in ((f"{mesh}-kill", signal.SIGKILL), (f"{mesh}-stop", signal.SIGSTOP))
    },
    "save": lambda draw, folder: saved("save", draw, folder),
    "flip": flip,
    "memory-kill": lambda draw, folder: saved("memory-kill", draw, folder),
    "memory-flip": lambda draw, folder: in_memory("memory-flip", draw, folder),
    "memory-lost": lambda draw, folder: in_memory("memory-lost", draw, folder),
    "mutant": mutant,
    "argument": argument,
}


def measured(fault: str, trials: int, seed: int) -> dict[str, Any]:
    """Return the counts of a fault."""
    draw, results = random.Random(seed), list[Trial]()
    if fault == "restart":
        with tempfile.TemporaryDirectory() as folder:
            results = list(restarts(draw, trials, Path(folder)))
    for _ in range(0 if fault == "restart" else trials):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # processes may still end
            results.append(FAULTS[fault](draw, Path(folder)))
    seconds = [trial.seconds for trial in results]
    counts = {
        f"{what}s" if what in ("hang", "abort") else what: sum(getattr(trial, what) for trial in results)
        for what in ("hang", "abort", "corrupt", "unnamed")
    }
    times = {"median_s": round(statistics.median(seconds), 3), "max_s": round(max(seconds), 3)}
    return {"fault": fault, "trials": trials, **counts, **times}


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def main() -> None:
    options = models.parser(__doc__, rounds=1, limit=3600)
    names = [*FAULTS, "restart"]
    options.add_argument("--faults", nargs="+", choices=names, default=names)
    options.add_argument("--trials", type=models.positive, default=20)
    options.add_argument("--seed", type=int, default=0)
    models.add_out(options)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(
        ["torch", "fpipe", "fpipe.training.verbs", "fpipe.handlers.distributed.handler"]
    )
    parts = ([measured(fault, arguments.trials, arguments.seed)] for fault in arguments.faults)
    rows = models.report("benchmarks.faults", arguments.json, parts, show)
    if arguments.out:
        models.write(arguments.out, rows)
    if any(row[what] for row in rows for what in ("hangs", "aborts", "corrupt", "unnamed")):
        sys.exit(1)


if __name__ == "__main__":
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        restarted(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
