"""Kill processes of a job under torchrun again and again: its bits at the end, the price of a kill, and its causes.

    python -m benchmarks.restarts                        # 10 kills of a job of 4 processes, then the cost of saves
    python -m benchmarks.restarts --parts kills --kills 100 --split
    python -m benchmarks.restarts --json                 # a list of objects, and nothing else
    python -m benchmarks.restarts --out restarts.json    # and into a file, with the machine

kills: a process of a job over gloo under `torchrun --standalone --max-restarts` gets SIGKILL at a random moment, every
fourth time while it starts, else while it trains. The job goes on from its last checkpoint. It has the losses of each
step, and at the end the parameters, of a run in one process that nobody kills. `lost_s` are the seconds from a kill
until all ranks have taken a step again, and `steps_lost` the steps that they take twice. Then the parts of these
seconds: for each the median over the restarts of the mean over the ranks, and the seconds of CPU time of a rank:

- survivors: until the processes that are left have ended. torchrun looks every 0.1 s, and sends them SIGTERM.
- torchrun: until it has started new ones.
- python: until the first line of the script.
- torch, fpipe, torch._dynamo: their imports; the last one is needed by torch's tracer.
- process group: `handlers.auto()`, with `init_process_group`.
- model, connecting, loading: its modules, `value_and_grad`, and `interop.resume`.
- tracing: the graphs of a rank's stages.
- first step: without tracing.

saves: a run that saves every 50 steps in the background, over one that saves nothing, in the same processes in turn,
with hashes and the wait for the end of the save; in seconds of wall-clock time and of CPU time of all ranks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

import fpipe
from benchmarks import models, restart_job
from benchmarks.restart_job import TRACING, Training, digest
from fpipe import Placement, handlers, interop

STARTING = 0.25  # the share of kills that hit a process while it starts
MOMENTS = 2.0  # seconds of training in which the others hit it
LIMIT = 120.0  # seconds in which a job must take a step again
PAUSE = 0.005  # seconds between two looks
SAVED_EVERY = 50
T = TypeVar("T")


class Note(NamedTuple):
    """A part of a start of one rank that was over: the time, and its seconds of CPU time until then."""

    part: str
    time: float
    cpu: float
    pid: int


class Hung(Exception):
    """The job did not go on, or ended too early."""


class Job:
    """A job under torchrun.

    Args:
        settings: ranks, width and whether the model is split, as `restart_job.main` takes them.
        warm: torchrun is `fpipe.interop.torchrun`, which imports what the ranks need once.
    """

    def __init__(self, folder: Path, kills: int, settings: tuple[int, int, bool], warm: bool) -> None:
        self.folder, self.kills, self.settings = folder, kills, settings
        self.ranks = settings[0]
        command = [sys.executable, "-m", "fpipe.interop.torchrun" if warm else "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self.ranks), "--max-restarts", str(kills)]
        command += [restart_job.__file__, str(folder), str(kills), *map(str, settings)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.agent = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def notes(self, restart: int) -> list[list[Note]]:
        """Return the notes of each rank that has begun to start."""
        paths = [self.folder / f"{restart}-{rank}" for rank in range(self.ranks)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        whole = [text[: text.rfind("\n") + 1].splitlines() for text in texts]  # a kill may cut the last line
        return [[Note(*json.loads(line)) for line in lines] for lines in whole]

    def wait(self, restart: int, part: str, seconds: float = LIMIT) -> list[list[Note]]:
        """Wait until a part of a start is over on all ranks."""
        return self._until(lambda: self._notes_with(restart, part), f"start {restart}: {part}", seconds)

    def _notes_with(self, restart: int, part: str) -> list[list[Note]] | None:
        notes = self.notes(restart)
        return notes if all(any(note.part == part for note in each) for each in notes) else None

    def kill(self, notes: list[list[Note]], rank: int) -> tuple[float, float]:
        """Kill a rank; return the time, and that at which all processes have ended."""
        pids = [each[0].pid for each in notes]
        killed = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGKILL)
        self._until(lambda: not any(map(is_running, pids)) or None, "the survivors", LIMIT)
        return killed, time.monotonic()

    def end(self) -> None:
        """Wait until the job has ended well."""
        if self._until(lambda: None if (code := self.agent.poll()) is None else str(code), "the end", LIMIT) != "0":
            raise Hung(f"torchrun ended with status {self.agent.returncode}:\n{self.log.read_text()[-3000:]}")

    def _until(self, look: Callable[[], T | None], what: str, seconds: float) -> T:
        until = time.monotonic() + seconds
        while (result := look()) is None:
            if time.monotonic() > until or self.agent.poll() is not None:
                raise Hung(f"{what}: torchrun's status is {self.agent.poll()}:\n{self.log.read_text()[-3000:]}")
            time.sleep(PAUSE)
        return result

    def losses(self, restart: int) -> list[dict[int, str]]:
        """Return the losses of a start, in bits, by step; of each rank."""
        paths = [self.folder / f"{restart}-{rank}.losses" for rank in range(self.ranks)]
        lines = [path.read_text().splitlines() if path.exists() else [] for path in paths]
        return [{int(i): loss for i, loss in map(str.split, each)} for each in lines]

    def is_right(self) -> bool:
        """Return whether all losses, and the parameters at the end, are those of a run that nobody killed."""
        ends = [(self.folder / f"end-{rank}").read_text().split() for rank in range(self.ranks)]
        steps = int(ends[0][0])
        whole = Training(handlers.Local(), *self.settings, folder=None)
        expected = dict(whole.steps(steps))
        params = [[str(steps), digest(whole.run.params[rank])] for rank in range(self.ranks)]
        each = [losses for restart in range(self.kills + 1) for losses in self.losses(restart)]
        is_whole = set().union(*each) == set(range(steps))
        return is_whole and ends == params and all(losses.items() <= expected.items() for losses in each)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Restart(NamedTuple):
    """The cost of a kill to the job.

    Args:
        parts: wall-clock seconds, the mean over the ranks.
        cpu: the same of CPU time.
    """

    lost: float
    steps_lost: int
    parts: dict[str, float]
    cpu: dict[str, float]


def killed(job: Job, draw: random.Random) -> Iterator[Restart]:
    """Kill ranks of a job; yield the restarts after which it trained before the next kill."""
    startup, before = 0.0, None
    for restart in range(job.kills + 1):
        notes = job.wait(restart, "python")
        if restart and restart < job.kills and draw.random() < STARTING:
            time.sleep(draw.random() * startup)
            notes, before = job.notes(restart), None
        else:
            notes = job.wait(restart, "first step")
            startup = max(each[-1].time for each in notes) - min(each[0].time for each in notes)
            if before is not None:
                yield accounted(job, restart, notes, *before)
            time.sleep(draw.random() * MOMENTS)
        if restart < job.kills:
            before = job.kill(notes, draw.randrange(job.ranks))
    job.end()


def accounted(job: Job, restart: int, notes: list[list[Note]], killed: float, ended: float) -> Restart:
    """Return the account of a restart."""
    done = [max(losses, default=-1) for losses in job.losses(restart - 1)]
    begun = min(min(losses) for losses in job.losses(restart))
    parts = {"survivors": ended - killed, "torchrun": statistics.mean(each[0].time for each in notes) - ended}
    cpu = dict.fromkeys(parts, 0.0)
    for rank_notes in notes:
        traced = next(note for note in rank_notes if note.part == TRACING)
        previous = rank_notes[0]
        for note in rank_notes[1:]:
            if note.part == TRACING:
                continue
            seconds, used = note.time - previous.time, note.cpu - previous.cpu
            if note.part == "first step":
                seconds, used = seconds - traced.time, used - traced.cpu
                add(parts, cpu, TRACING, traced.time / job.ranks, traced.cpu / job.ranks)
            add(parts, cpu, note.part, seconds / job.ranks, used / job.ranks)
            previous = note
    lost = max(each[-1].time for each in notes) - killed
    return Restart(lost, max(0, min(done) + 1 - begun), parts, cpu)


def add(parts: dict[str, float], cpu: dict[str, float], part: str, seconds: float, used: float) -> None:
    parts[part] = parts.get(part, 0.0) + seconds
    cpu[part] = cpu.get(part, 0.0) + used


def kills(arguments: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the row of a job, then those of the parts of its restarts."""
    settings = (arguments.ranks, arguments.width, arguments.split)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = Job(Path(folder), arguments.kills, settings, arguments.warm)
        try:
            restarts = list(killed(job, random.Random(arguments.seed)))
            is_right = job.is_right()
        except Hung as error:
            sys.exit(f"benchmarks.restarts: {error}")
        finally:
            job.agent.terminate()  # torchrun ends its workers
            with suppress(subprocess.TimeoutExpired):
                job.agent.wait(60)
            job.agent.kill()
    lost, steps = [each.lost for each in restarts], [each.steps_lost for each in restarts]
    yield [
        {
            "kills": arguments.kills,
            "timed": len(restarts),
            "ranks": arguments.ranks,
            "width": arguments.width,
            "split": arguments.split,
            "warm": arguments.warm,
            "same_bits": is_right,
            "median_lost_s": statistics.median(lost),
            "max_lost_s": max(lost),
            "median_steps_lost": statistics.median(steps),
            "max_steps_lost": max(steps),
        }
    ]
    yield [
        {
            "part": part,
            "median_s": statistics.median(each.parts[part] for each in restarts),
            "max_s": max(each.parts[part] for each in restarts),
            "cpu_s": statistics.median(each.cpu[part] for each in restarts),
        }
        for part in restarts[0].parts
    ]


# Saves


def trained(rank: int, ranks: int, width: int, rounds: int, folder: str) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each round, the seconds of SAVED_EVERY steps without a save and with one."""
    stages = models.stages(models.layers(width), ranks)
    pipeline, params = interop.from_modules(stages, loss=models.loss_fn)
    plan = pipeline.plan(Placement.loop(ranks), models.MICROBATCHES)
    handler = handlers.Distributed(timeout=models.TIMEOUT)
    own = pipeline.params_on(params, plan, handler)
    adam = interop.optimizer(torch.optim.AdamW, lr=1e-3)
    checkpoints = interop.Checkpoints(folder, pipeline, plan, handler=handler, keep=1)
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler)
    state, data = adam.init(own), models.data(width)

    def train(steps: int, saves: bool) -> dict[str, float]:
        nonlocal own, state
        began, used = time.perf_counter(), time.process_time()
        if saves:
            checkpoints.async_save(params=own, optimizer=state)
        for _ in range(steps):
            _, grads = step(own, *data)
            own, state = adam.update(grads, state, own)
        checkpoints.finish()
        used_by_all = torch.tensor(time.process_time() - used, dtype=torch.float64)
        seconds = time.perf_counter() - began
        dist.all_reduce(used_by_all)
        return {"s": seconds, "cpu_s": used_by_all.item()}

    train(5, saves=True)
    for _ in range(rounds):
        without, saving = train(SAVED_EVERY, saves=False), train(SAVED_EVERY, saves=True)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        yield [{"without": without, "saving": saving, "bytes": size}]


def saves(arguments: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the row of the cost of saves."""
    with tempfile.TemporaryDirectory() as folder:
        job = (arguments.saved_width, arguments.rounds, folder)
        rounds = [row for rows in models.in_processes(trained, 2, *job, limit=arguments.limit) for row in rows]
    ratios = {of: [row["saving"][of] / row["without"][of] for row in rounds] for of in ("s", "cpu_s")}
    yield [
        {
            "width": arguments.saved_width,
            "ranks": 2,
            "every": SAVED_EVERY,
            "rounds": arguments.rounds,
            "bytes": rounds[-1]["bytes"],
            "without_s": statistics.median(row["without"]["s"] for row in rounds),
            "saving_s": statistics.median(row["saving"]["s"] for row in rounds),
            "ratio": statistics.median(ratios["s"]),
            "ratios": ratios["s"],
            "cpu_ratio": statistics.median(ratios["cpu_s"]),
            "cpu_ratios": ratios["cpu_s"],
        }
    ]


def show(rows: list[dict[str, Any]]) -> None:
    if "part" not in rows[0]:
        print("  ".join(f"{key} {_text(value)}" for key, value in rows[0].items()), flush=True)
        return
    print(f"{'part':>14} {'median s':>9} {'max s':>7} {'CPU s':>7}")
    for row in rows:
        print(f"{row['part']:>14} {row['median_s']:9.2f} {row['max_s']:7.2f} {row['cpu_s']:7.2f}", flush=True)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


PARTS = {"kills": kills, "saves": saves}


def main() -> None:
    options = models.parser(__doc__, rounds=5, limit=3600)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    options.add_argument("--kills", type=models.positive, default=10)
    options.add_argument("--ranks", type=models.positive, choices=(1, 2, 4, 8), default=4)
    options.add_argument("--width", type=models.positive, default=64, help="of the job that is killed")
    options.add_argument("--split", action="store_true", help="its pipeline comes from interop.split")
    options.add_argument("--warm", action="store_true", help="under fpipe.interop.torchrun")
    options.add_argument("--saved-width", type=models.positive, default=256, help="of the run that saves")
    options.add_argument("--seed", type=int, default=0)
    models.add_out(options)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    parts = (rows for part in arguments.parts for rows in PARTS[part](arguments))
    rows = models.report("benchmarks.restarts", arguments.json, parts, show)
    if arguments.out:
        models.write(arguments.out, rows)
    if not all(row.get("same_bits", True) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
