"""A training run that goes on where its last checkpoint ended, and saves one when it is asked to end."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fpipe.interop.checkpoints.checkpoints import Checkpoints

log = logging.getLogger("fpipe.checkpoints")
LEFT = 128 + signal.SIGTERM  # the exit status of a process that a signal ended


class Run:
    """A training run. Its attributes are the sections of its training state, which the loop replaces; see `resume`.

    Args:
        step: the number of steps that are done.
    """

    def __init__(self, checkpoints: Checkpoints | None, step: int, sections: dict[str, Any]) -> None:
        self.checkpoints, self.step = checkpoints, step
        self._names, self._saved = [*sections], step
        self.__dict__.update(sections)

    def __repr__(self) -> str:
        place = "not saved" if self.checkpoints is None else f"in {self.checkpoints.folder}"
        return f"<Run: {self.step} steps done, {', '.join(self._names)} {place}>"

    def __getattr__(self, name: str) -> Any:  # of sections, whose types are the caller's
        raise AttributeError(f"the run has no section {name!r}: pass it to resume, beside {', '.join(self._names)}")

    def steps(self, total: int, *, every: int | None = None) -> Iterator[int]:
        """Yield the numbers of the steps that are left, and save in between and at the end.

        After SIGTERM, as a scheduler sends it before it takes the machine, all ranks save once they have ended the same
        step, and leave: `SystemExit` with status 143. Ranks need not get the signal all at once, nor all of them: the
        next step tells the others. Where a step fails, as torchrun sends SIGTERM when another rank has died, its error
        is raised, and nothing is saved. A handler of SIGTERM that the caller has set is called too, at once; if it
        raises an error, nothing is saved either.

        Where a save in the background has failed, the last state is saved all the same, and the error is logged.

        Args:
            total: the number of steps of the whole run.
            every: save in the background after so many steps; by default only at the end.

        Raises:
            ValueError: `total` or `every` are no such numbers.
            Exception: those of `Checkpoints.save`.
        """
        for name, number, least in (("total", total, 0), ("every", every, 1)):
            is_whole = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (is_whole and number >= least):
                raise ValueError(f"{name} must be a number of steps, at least {least}, not {number!r}")
        if self.checkpoints is None:
            while self.step < total:
                yield self.step
                self.step += 1
            return
        departure = self.checkpoints.handler.departure
        departure.begin()
        with _on_sigterm(departure.ask):
            while self.step < total:
                yield self.step
                self.step += 1
                if departure.is_agreed:
                    self._finish()
                    log.warning("SIGTERM: saved step %d as %s", self.step, self.save())
                    self.checkpoints.clear_memory()
                    raise SystemExit(LEFT)
                self.checkpoints.keep_in_memory(**self._sections)
                if every is not None and self.step % every == 0:
                    self.checkpoints.async_save(**self._sections)
                    self._saved = self.step
            if not self._finish() or self._saved != self.step:
                self.save()
            self.checkpoints.clear_memory()

    def _finish(self) -> bool:
        """Wait for the save in the background; log its error, and return whether there was none."""
        assert self.checkpoints is not None
        try:
            self.checkpoints.finish()
        except Exception as error:  # of any kind: the last state is saved next, whatever it was
            log.error(
                "the save in the background before step %d failed: %s: %s", self.step, type(error).__name__, error
            )
            return False
        return True

    def save(self) -> Path:
        """Save the training state as it is; return its path, on every rank."""
        if self.checkpoints is None:
            raise ValueError("the run has no checkpoints: pass them to resume")
        path = self.checkpoints.save(**self._sections)
        self._saved = self.step
        return path

    @property
    def _sections(self) -> dict[str, Any]:
        return {**{name: self.__dict__[name] for name in self._names}, "step": self.step}


def resume(checkpoints: Checkpoints | None, **sections: Any) -> Run:
    """Return a training run with the sections of its last checkpoint, or with these where there is none.

    All that the next step depends on belongs to the state: parameters, the optimizer, and where the data loader is,
    unless it is a function of the step's number.

    Args:
        checkpoints: where to save; None for a run that is never saved.
        sections: as of `Checkpoints.load`, as training begins with them. `step` is the run's own.

    Raises:
        ValueError: a section has a name that the run uses for itself.
        Exception: those of `Checkpoints.load`.

    >>> import tempfile, torch
    >>> from fpipe import Pipeline, Placement, handlers
    >>> pipeline = Pipeline([lambda p, x: x * p["scale"]])
    >>> plan = pipeline.plan(Placement.loop(ranks=1), microbatches=1)
    >>> checkpoints = Checkpoints(tempfile.mkdtemp(), pipeline, plan, handler=handlers.Local())
    >>> run = resume(checkpoints, params={0: {"scale": torch.ones(1)}})
    >>> for i in run.steps(3, every=2):
    ...     run.params = {0: {"scale": run.params[0]["scale"] + i}}
    >>> resume(checkpoints, params={0: {"scale": torch.zeros(1)}}).step
    3
    """
    if taken := [name for name in sections if name in ("step", "steps", "save", "checkpoints")]:
        raise ValueError(f"the run uses the name {taken[0]!r} for itself: call the section otherwise")
    loaded = None if checkpoints is None else checkpoints.resume(**sections, step=0)
    return Run(checkpoints, 0, sections) if loaded is None else Run(checkpoints, loaded.pop("step"), loaded)


@contextmanager
def _on_sigterm(call: Callable[[], object]) -> Iterator[None]:
    """Call a function when SIGTERM comes, and the handler before; in a thread that can't receive signals, do nothing.

    Python can't set a handler again that was not set from Python: the default one then takes its place.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def received(number: int, frame: FrameType | None) -> None:
        call()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, received)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
