"""Put the times of ranks on one clock, where that is right. No torch.

All processes of a host read one clock. Of several hosts, nothing says how far their clocks are apart but the messages:
one that arrives was sent before. Messages both ways bound the offset from both sides, as in NTP; over several ranks the
bounds add up along the shortest paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Literal, NamedTuple, get_args

from fpipe.interop.torch_traces.annotations import RankTrace
from fpipe.interop.torch_traces.measuring import Message
from fpipe.interop.torch_traces.reading import BadTrace

Clocks = Literal["host", "same", "messages", "none"]
CLOCKS: tuple[str, ...] = get_args(Clocks)
_ONE = 20e-6  # seconds by which two readings of one clock may be apart, in a profiler's conversion


class Offset(NamedTuple):
    """Seconds to add to a rank's times to have them on rank 0's clock, and by how much that may be wrong."""

    added: float
    uncertainty: float


def offsets(
    traces: Mapping[int, Sequence[RankTrace]], messages: Iterable[Message], how: Clocks
) -> tuple[dict[int, Offset], str]:
    """Return each rank's offset, and a notice; no offsets where the clocks are not compared.

    Raises:
        BadTrace: messages contradict each other, or there are none both ways.
    """
    if how == "none":
        return {}, ""
    bounds = _bounds(messages)
    if how == "messages":
        return _from_messages(len(traces), bounds), ""
    same = {rank: Offset(0.0, 0.0) for rank in traces}
    early = min(bounds.values(), default=0.0)
    if how == "same":
        if early < -_ONE:
            rank, other = min(bounds, key=bounds.__getitem__)
            return same, (
                f"a message from rank {rank} to rank {other} arrives {-early * 1e3:.3g} ms before it is sent: their "
                "clocks are not the same"
            )
        return same, ""
    if why := _several(traces) or (f"a message arrives {-early * 1e3:.3g} ms before it is sent" * (early < -_ONE)):
        return {}, (
            f"the ranks were on several hosts ({why}), whose clocks are not compared: --clocks messages estimates "
            "them, --clocks same takes them as one"
        )
    if not all(trace.host for own in traces.values() for trace in own) and len(traces) > 1:
        return same, "the ranks are taken to be of one host, with one clock: for several, pass --clocks messages"
    return same, ""


def _several(traces: Mapping[int, Sequence[RankTrace]]) -> str:
    """Return why the ranks were on several hosts; "" if nothing says so."""
    hosts = {trace.host for own in traces.values() for trace in own if trace.host}
    if len(hosts) > 1:
        return ", ".join(sorted(hosts)[:3]) + ", …" * (len(hosts) > 3)
    if hosts and all(trace.host for own in traces.values() for trace in own):
        return ""  # one host, on which each process may see one device, of the same number
    last = [own[-1] for own in traces.values()]
    processes = [trace.process for trace in last if trace.process is not None]
    if len(set(processes)) < len(processes):
        return "two have one process number"
    devices = [device for trace in last for device in trace.devices]
    if len(set(devices)) < len(devices):
        return "two have one device number"
    return ""


Edge = tuple[int, int]


def _bounds(messages: Iterable[Message]) -> dict[Edge, float]:
    """Return for each edge the least time from a post to its arrival, on the two clocks."""
    bounds = dict[Edge, float]()
    for source, target, posted, had in messages:
        bounds[source, target] = min(bounds.get((source, target), inf), had - posted)
    return bounds


def _from_messages(ranks: int, bounds: Mapping[Edge, float]) -> dict[int, Offset]:
    """Return the offsets in the middle of what the messages allow; these hold for all messages together."""
    most = {(target, source): least for (source, target), least in bounds.items()}
    above = _shortest(ranks, most)  # what may be added to each rank's times
    below = _shortest(ranks, {(b, a): least for (a, b), least in most.items()})
    found = dict[int, Offset]()
    for rank in range(ranks):
        if inf in (above[rank], below[rank]):
            raise BadTrace(f"no messages go both ways between ranks 0 and {rank}: take --clocks same or none")
        found[rank] = Offset((above[rank] - below[rank]) / 2, max(0.0, (above[rank] + below[rank]) / 2))
    return found


def _shortest(ranks: int, edges: Mapping[Edge, float]) -> list[float]:
    """Return the lengths of the shortest paths from rank 0 (Bellman and Ford).

    Raises:
        BadTrace: a cycle has a negative length.
    """
    lengths = [0.0] + [inf] * (ranks - 1)
    for _ in range(ranks + 1):
        changed = False
        for (a, b), length in edges.items():
            if lengths[a] + length < lengths[b] - 1e-12:
                lengths[b], changed = lengths[a] + length, True
        if not changed:
            return lengths
    raise BadTrace("the messages contradict each other, as where a clock was set during the trace: take --clocks none")
