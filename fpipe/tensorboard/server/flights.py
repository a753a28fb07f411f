"""The flights in a log directory: what the ranks of jobs that hang, crashed or run did last. No torch.

TensorBoard has no list of these files: they are read from the folders of runs below the log directory, of which a
bounded number is searched. Links are followed, as TensorBoard does for captures.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from fpipe.flight import runs
from fpipe.flight.explanation import explain
from fpipe.flight.reading import read
from fpipe.flight.report import as_json
from fpipe.tensorboard.files.columns import KINDS

MOST_FOLDERS = 10_000  # that are searched
MOST_LISTED = 100  # flights, the newest
MOST_READ = 4  # flights whose ranks are kept as they were read
KEPT = 3.0  # seconds for which a list is not made again, and a flight not read again
RECORDS = 12  # of each rank

Key = tuple[str, str]  # experiment and name


class _Listed(NamedTuple):
    """A flight in the log directory, and when it was last written, in seconds since 1970."""

    key: Key
    folder: Path
    written: float


class Flights:
    """The flights below a log directory.

    Args:
        logdir: TensorBoard's; "" or one that is not in the file system has none.
    """

    def __init__(self, logdir: str) -> None:
        self._logdir = Path(logdir).expanduser() if logdir and "://" not in logdir else None
        self._listing, self._reading = threading.Lock(), threading.Lock()
        self._newest: tuple[float, dict[Key, _Listed]] = (-KEPT, {})
        self._read: OrderedDict[Key, tuple[float, dict[str, Any] | None]] = OrderedDict()

    def listing(self) -> list[dict[str, Any]]:
        """Return the flights as JSON, the newest first. The page reads this: keep the keys."""
        listed = self._listed().values()
        return [{"experiment": each.key[0], "name": each.key[1], "written": each.written} for each in listed]

    def flight(self, experiment: str, name: str) -> dict[str, Any] | None:
        """Return what a flight says, as JSON; None if it is not listed, or has ended well since.

        Names are only compared with those that are listed.
        """
        key = experiment, name
        with self._reading:  # several pages ask at the same time, and the files of many ranks are many
            since, flight = self._read.get(key, (-KEPT, None))
            if time.monotonic() - since > KEPT:
                flight = self._flight(key)
                self._read[key] = time.monotonic(), flight
                self._read.move_to_end(key)
                while len(self._read) > MOST_READ:
                    self._read.popitem(last=False)
            return flight

    def _flight(self, key: Key) -> dict[str, Any] | None:
        listed = self._listed().get(key)
        try:
            ranks = [] if listed is None else read(listed.folder)
        except OSError:
            ranks = []
        if not ranks:
            return None
        copied = max(rank.copied for rank in ranks) / 1e9
        about = {"experiment": key[0], "name": key[1], "copied": copied, "processes": ranks[0].processes}
        return about | as_json(ranks, explain(ranks), RECORDS)

    def _listed(self) -> dict[Key, _Listed]:
        """Return the newest flights, as they were at most `KEPT` seconds ago."""
        with self._listing:
            since, listed = self._newest
            if time.monotonic() - since > KEPT:
                newest = sorted(self._search(), key=attrgetter("written"), reverse=True)[:MOST_LISTED]
                listed = {each.key: each for each in newest}
                self._newest = time.monotonic(), listed
            return listed

    def _search(self) -> Iterator[_Listed]:
        if self._logdir is None:
            return
        for run in _runs(self._logdir):
            experiment = run.relative_to(self._logdir).as_posix()
            for flight in runs.flights(run):
                key = "" if experiment == "." else experiment, flight.name
                yield _Listed(key, flight, max(runs.written(flight), default=0.0))


def _runs(logdir: Path) -> Iterator[Path]:
    """Yield the folders below a log directory that have a folder of flights. Follow links, without loops."""
    seen = set[str]()
    for count, (folder, within, _) in enumerate(os.walk(logdir, followlinks=True)):
        if count == MOST_FOLDERS:
            return
        real = os.path.realpath(folder)
        if real in seen:
            within.clear()
            continue
        seen.add(real)
        if runs.FOLDER in within:
            yield Path(folder)
        within[:] = sorted(name for name in within if name not in (*KINDS, runs.FOLDER))
