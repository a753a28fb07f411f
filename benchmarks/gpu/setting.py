"""The surroundings of a check: a device, processes for its ranks, and a report that survives its process.

torch is imported at first use, because it takes seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.support.forked import CONTEXT, free_port
from tests.support.pool import Gpus, Outcome, Pool, join

CLOSING = 5.0  # seconds of a check's time in which nothing new begins


class Skipped(Exception):
    """This machine lacks what a check needs; the text says what."""


class Report:
    """The figures of one check, and why it does not pass. Every figure is saved at once, for a check that is killed."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.path, self.until = path, time.monotonic() + seconds
        self.figures: dict[str, Any] = {}
        self.reasons: list[str] = []
        self.notes: list[str] = []

    @property
    def left(self) -> float:
        """Seconds until the check is killed."""
        return self.until - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether there is only time left to end the check."""
        return self.left < CLOSING

    def limit(self, most: float = inf) -> float:
        """Return the seconds that a part of the check may take, so that there is time left to end it."""
        return max(1.0, min(most, self.left - CLOSING))

    def add(self, **figures: Any) -> None:
        """Add figures: numbers, texts, and lists and dicts of them."""
        self.figures |= figures
        self._save({"figures": self.figures})

    def expect(self, passes: bool, reason: str) -> None:
        """Let the check fail for a reason, and go on."""
        if not passes:
            self.reasons.append(reason)

    def note(self, text: str) -> None:
        """Put what the check did not do into its reason, also if it passes."""
        self.notes.append(text)

    def end(self, result: str, reason: str) -> None:
        self._save({"result": result, "reason": reason, "figures": self.figures})

    def _save(self, content: dict[str, Any]) -> None:
        if self.path is not None:
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(content))
            os.replace(part, self.path)


@dataclass
class Ended:
    """The end of a rank's process.

    Args:
        value: of its job, if it returned.
        error, text: type and message of its exception, if it raised.
        at: when it returned or raised, by `time.time()`.
        exitcode: None if it had to be killed.
        said: the time of each `say(name)`.
    """

    value: Any = None
    error: str | None = None
    text: str = ""
    at: float = 0.0
    exitcode: int | None = None
    said: dict[str, float] = field(default_factory=dict)


class Ranks:
    """A pool that is replaced after an error, which may have ended the handlers of its processes.

    Args:
        start: makes the pool.
    """

    def __init__(self, start: Callable[[], Pool]) -> None:
        self._start, self._pool = start, start()

    def differences(self, job: Callable[..., Any], *args: Any, limit: float) -> list[str]:
        """Return the errors of a job and the results that are not empty, of all ranks, as texts."""
        try:
            outcomes = self._pool.outcomes(job, *args, limit=limit)
        except TimeoutError as error:
            texts, fails = [str(error)], True
        else:
            fails = any(outcome.error or outcome.exitcode is not None for outcome in outcomes)
            texts = [text for rank, outcome in enumerate(outcomes) if (text := _text(rank, outcome))]
        if fails:
            self._pool.close()
            self._pool = self._start()
        return texts


def _text(rank: int, outcome: Outcome) -> str:
    if outcome.error:
        return f"rank {rank}: {outcome.error}: {outcome.text.strip().partition(chr(10))[0]}"
    if outcome.exitcode is not None:
        return f"rank {rank}: exit code {outcome.exitcode}"
    return f"rank {rank}: {outcome.value}" if outcome.value else ""


class Setting:
    """A GPU that several ranks share, or in small the CPU.

    Args:
        kind: "cuda" or "cpu", for jobs.
    """

    def __init__(self, report: Report, cpu: bool) -> None:
        self.report, self.cpu, self.kind = report, cpu, "cpu" if cpu else "cuda"
        self._pools: list[Pool] = []

    @cached_property
    def device(self) -> Any:
        """Return the device of the check's own process."""
        import torch

        return torch.device("cpu") if self.cpu else torch.device("cuda", 0)

    def pool(self, ranks: int, job: str = "gloo", **environment: str | None) -> Pool:
        """Start processes that stay until the check ends.

        Args:
            job: backend of the job's process group on GPUs.
            environment: variables of the processes on GPUs; None for one that is not set.
        """
        self._pools.append(Pool(ranks, self._gpus(job, environment)))
        return self._pools[-1]

    def scripts(
        self, job: Callable[..., Any], ranks: int, *args: Any, limit: float, resume: float = 0.0
    ) -> list[Ended]:
        """Run `job(rank, say, *args)` in processes that end with it, as scripts do; `say(name)` notes the time.

        Args:
            limit: seconds after which the processes that are left are killed.
            resume: seconds after the first `say("stops")` at which stopped processes go on.
        """
        context: Any = CONTEXT if self.cpu else multiprocessing.get_context("spawn")
        port, gpus, pipes, processes = free_port(), self._gpus("gloo", {}), {}, []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, ranks, port, gpus, theirs, job, args)
            processes.append(context.Process(target=_script, args=arguments))
            processes[-1].start()
            theirs.close()
            pipes[ours] = rank
        ended = [Ended() for _ in range(ranks)]
        try:
            _listen(pipes, ended, processes, time.monotonic() + limit, resume)
        finally:
            for rank, process in enumerate(processes):
                if not pipes:
                    process.join(10)
                ended[rank].exitcode = process.exitcode
                process.kill()
                process.join()
        return ended

    def _gpus(self, job: str, environment: dict[str, str | None]) -> Gpus | None:
        return None if self.cpu else Gpus(job, environment)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def _listen(pipes: dict[Any, int], ended: list[Ended], processes: list[Any], until: float, resume: float) -> None:
    """Note the messages of the processes, until all have ended; let stopped ones go on."""
    while pipes and (left := until - time.monotonic()) > 0:
        stops = [each.said["stops"] for each in ended if "stops" in each.said]
        if stops and time.time() > stops[0] + resume:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGCONT)
        for pipe in wait(list(pipes), timeout=min(left, 0.2)):
            rank = pipes[pipe]
            try:
                kind, content, at = pipe.recv()
            except (EOFError, ConnectionResetError):
                del pipes[pipe]
                continue
            if kind == "said":
                ended[rank].said[content] = at
            elif kind == "error":
                ended[rank].error, ended[rank].text, ended[rank].at = *content, at
            else:
                ended[rank].value, ended[rank].at = content, at


def _script(
    rank: int, size: int, port: int, gpus: Gpus | None, pipe: Any, job: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    def say(name: str) -> None:
        pipe.send(("said", name, time.time()))

    try:
        join(rank, size, "127.0.0.1", port, gpus)
        value = job(rank, say, *args)
    except BaseException as error:
        pipe.send(("error", (type(error).__name__, str(error)), time.time()))
        raise
    pipe.send(("value", value, time.time()))
