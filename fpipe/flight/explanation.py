"""Say what a job waits for or why it ended: the rank where it began, by the last records of all. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from fpipe._format import counted, scale_of
from fpipe.flight.programs import verdict
from fpipe.flight.reading import Entry, Rank

Kind = Literal["gone", "failed", "stopped", "silent", "computes", "outside", "deadlock", "lost", "ended"]
"""gone, stopped: a process of this host. silent: a process of another host. failed: an error. computes: an effect that
runs. outside: a script that is in no step. deadlock: ranks that wait for each other. lost: a message was lost. ended:
there is no failure."""

_MOST = 4  # waiting ranks of which a sentence is written
_WHY = {
    "gone": "is gone and left no reason: it was killed (by a person, the scheduler, or for want of memory) or crashed",
    "stopped": "is stopped, as by SIGSTOP or a debugger: SIGCONT lets it go on",
    "silent": "has written nothing for {silence}: it is stopped or gone, or its host can't be reached",
    "outside": "is in no step: its script is elsewhere, or calls fewer steps than the others",
    "ended": "has ended its script without an error, and the others wait: it calls fewer steps than they do",
}
_BROKEN: tuple[Kind, ...] = "gone", "stopped", "silent"


@dataclass(frozen=True)
class Explanation:
    """The cause of a job's wait or failure, and the chains of waits that lead to it.

    Args:
        kind: of the cause.
        ranks: the processes where it lies, by number: one, or those of a circle.
        chains: for each process that waits, those that it waits for, one after the other, itself first.
        text: a paragraph.
    """

    kind: Kind
    ranks: Sequence[int]
    chains: Mapping[int, Sequence[int]]
    text: str


def explain(ranks: Sequence[Rank], now: int | None = None) -> Explanation:
    """Explain the recordings of a job's ranks.

    Args:
        ranks: one at least; those of other hosts may be missing.
        now: ns since the epoch; by default that of the last copy among them, else the time of this call.
    """
    known = {rank.process: rank for rank in ranks}
    clock = max(rank.copied for rank in ranks) or time.time_ns() if now is None else now
    chains = {process: _chain(process, known) for process, rank in known.items() if rank.wait is not None}
    kind, roots = _cause(known, chains)
    sentences = [*_of_roots(kind, roots, known, clock), *_of_waits(roots, known, chains), *_of_missing(ranks)]
    return Explanation(kind, roots, chains, " ".join(sentences))


def _chain(process: int, known: Mapping[int, Rank]) -> list[int]:
    """Return the processes that one waits for, one after the other; a circle ends where it began."""
    chain = {process: None}
    while process in known and (wait := known[process].wait) is not None and wait.peer is not None:
        process = wait.peer
        if process in chain:
            return [*chain, process]
        chain[process] = None
    return list(chain)


def _cause(known: Mapping[int, Rank], chains: Mapping[int, Sequence[int]]) -> tuple[Kind, list[int]]:
    """Return the kind of the cause, and the processes where it lies."""
    if failed := [rank for rank in known.values() if rank.outcome == "failed"]:
        return "failed", [min(failed, key=_concluded).process]
    for kind in _BROKEN:
        broken = [process for process, rank in known.items() if rank.outcome == "open" and rank.state == kind]
        if first := [process for process in broken if process not in chains] or broken:
            return kind, [min(first, key=lambda process: known[process].seen)] if kind == "gone" else first
    if circle := next((chain for chain in chains.values() if chain[-1] in chain[:-1]), None):
        return "deadlock", sorted(set(circle[circle.index(circle[-1]) :]))
    at_work = {process: rank for process, rank in known.items() if rank.outcome == "open"}
    busy = [process for process, rank in at_work.items() if rank.wait is None and not rank.is_outside]
    if busy:
        waited = [process for process in busy if any(chain[-1] == process for chain in chains.values())]
        return "computes", [min(waited or busy, key=lambda process: known[process].entries[-1].begin)]
    lost = [rank for rank in known.values() if rank.outcome == "lost"]
    if outside := [process for process, rank in known.items() if rank.is_outside and rank.outcome != "lost"]:
        return ("outside", outside) if chains or lost else ("ended", [])
    return ("failed", [min(lost, key=_concluded).process]) if lost else ("lost", sorted(chains))


def _concluded(rank: Rank) -> int:
    return rank.concluded


def _of_roots(kind: Kind, roots: Sequence[int], known: Mapping[int, Rank], now: int) -> Iterable[str]:
    if kind == "ended":
        yield f"No rank is in a step, and none has failed: {_last_step(known.values())}."
    elif kind in ("deadlock", "lost"):
        yield from _of_waiting(kind, roots, known)
    elif kind == "failed":
        rank = known[roots[0]]
        yield f"{_title(rank)} failed at {_clock(rank.concluded)}: {rank.reason.rstrip('.')}."
        yield from _position(rank, now)
    elif kind == "computes":
        yield f"{_title(known[roots[0]])} is at work, and others wait for it."
        yield from _position(known[roots[0]], now)
    else:
        for process in roots[:_MOST]:
            rank = known[process]
            why = _WHY["ended" if rank.outcome == "ended" else kind].format(silence=_seconds(now - rank.seen))
            yield f"{_title(rank)} {why}."
            yield from _position(rank, now)
        if len(roots) > _MOST:
            yield f"So it is with {_names(roots[_MOST:], known)}."


def _of_waiting(kind: Kind, waiting: Sequence[int], known: Mapping[int, Rank]) -> Iterable[str]:
    """Yield why ranks wait of which none is at work: by their programs, or else for a message that was lost."""
    fault = _verdict(waiting, known)
    is_circle = kind == "deadlock"
    names = _names(waiting, known)
    yield (
        f"{names} wait for each other." if is_circle else "Every rank waits, and none of them for one that is at work."
    )
    if fault:
        yield f"The verifier says of their programs: {fault}."
    elif not is_circle:
        yield "A message was lost, or the network is gone."
    elif fault is not None:
        yield "Their programs have no such circle, so a message between them was lost."


def _verdict(waiting: Sequence[int], known: Mapping[int, Rank]) -> str | None:
    """Return what is wrong with the programs in which ranks wait, "" if nothing is; None if they are not known."""
    step = max((wait.step for process in waiting if (wait := known[process].wait) is not None), default=0)
    each = ([e.program for e in rank.entries if e.step == step and e.program is not None] for rank in known.values())
    numbers = {programs[-1] for programs in each if programs}
    if len(numbers) != 1:  # ranks count their programs alike, but for those that one could not keep
        return None
    return verdict([rank.file for rank in known.values() if rank.file is not None], numbers.pop())


def _position(rank: Rank, now: int) -> Iterable[str]:
    """Yield where a rank is, or was: its last record."""
    if not rank.entries:
        yield "It has recorded nothing yet."
        return
    last = rank.entries[-1]
    until = now if rank.state == "runs" and rank.outcome == "open" else rank.concluded or rank.seen
    if last.kind == "end":
        yield f"Its last step, {last.step}, ended at {_clock(last.begin)}."
    elif last.kind == "wait" and last.end is None:
        yield f"Its last record, at {_clock(last.begin)} in step {last.step}, is that it began {last.text}."
    elif last.kind == "step":
        yield f"Its step {last.step} began at {_clock(last.begin)}, {_seconds(until - last.begin)} before."
    else:
        last = next((entry for entry in reversed(rank.entries) if entry.kind in ("effect", "replay")), last)
        usual = _usual(rank.entries, last)
        yield (
            f"Its last record is {last.text}, of step {last.step}, which began at {_clock(last.begin)}, "
            f"{_seconds(until - last.begin)} before{usual}."
        )


def _usual(entries: Sequence[Entry], last: Entry) -> str:
    """Return how long effects of the same kind and stage took before."""
    place = _place(last.text)
    times = [
        after.begin - entry.begin
        for entry, after in pairwise(entries)
        if entry.kind == last.kind and _place(entry.text) == place
    ]
    if not times:
        return ""
    return f"; the last {len(times)} of {place} took {_seconds(median(times))}, at most {_seconds(max(times))}"


def _place(text: str) -> str:
    """Return an effect without its microbatch.

    >>> _place("Forward(stage=1, microbatch=3)")
    'Forward(stage=1)'
    """
    return text.partition(", microbatch=")[0] + ")" * (", microbatch=" in text)


def _of_waits(roots: Sequence[int], known: Mapping[int, Rank], chains: Mapping[int, Sequence[int]]) -> Iterable[str]:
    """Yield what ranks wait for: those nearest to the cause first."""
    nearest = sorted(chains, key=lambda process: (len(chains[process]), process))
    for process in nearest[:_MOST]:
        rank = known[process]
        if (wait := rank.wait) is not None and not (process in roots and len(roots) == 1):
            yield f"{_capital(rank.name)} has waited since {_clock(wait.begin)} ({wait.text})."
    if len(nearest) > _MOST:
        longest = max(chains.values(), key=len)
        more = counted(len(nearest) - _MOST, "rank")
        yield f"So do {more} more; the longest chain is {' -> '.join(map(str, longest))}."


def _of_missing(ranks: Sequence[Rank]) -> Iterable[str]:
    missing = sorted({*range(ranks[0].processes)} - {rank.process for rank in ranks})
    if missing:
        yield (
            f"Of {counted(len(missing), 'process', 'es')} ({_listed(missing)}) there is no record here: they run on "
            "another host, or ended well."
        )


def _names(processes: Sequence[int], known: Mapping[int, Rank]) -> str:
    names = [known[process].name for process in processes]
    return _capital(" and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names))


def _title(rank: Rank) -> str:
    return f"{_capital(rank.name)} (process {rank.pid} on {rank.host})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + ", …" * (len(numbers) > 8)


def _last_step(ranks: Iterable[Rank]) -> str:
    ends = [rank.entries[-1] for rank in ranks if rank.entries]
    return f"the last step, {max(ends, key=lambda e: e.begin).step}, ended" if ends else "no step has begun"


def _clock(moment: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment // 10**9)) + f".{moment // 10**6 % 1000:03}"


def _seconds(ns: float) -> str:
    return scale_of(max(ns, 0) / 1e9, "s").full(max(ns, 0) / 1e9)
