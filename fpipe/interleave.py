"""One order over all ranks in which nobody waits, or what each rank waits for. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fpipe.effects import Effect, Recv, Send, Value, frees, gives, needs
from fpipe.errors import ScheduleError
from fpipe.lowering import maker
from fpipe.program import Program, Programs

Channels = dict[tuple[int, int], tuple[deque[Value], deque[Value]]]  # posted sends, posted receives


def interleave(programs: Programs) -> tuple[tuple[int, Effect], ...]:
    """One order over all ranks in which every value is made before it is used.

    The transport is `async`: posts never wait, and each directed edge is a channel, first in, first out.
    The order is deterministic: ranks take turns, each going on until it would wait.

    Raises:
        ScheduleError: no such order; the message says what each rank waits for.
    """
    order: list[tuple[int, Effect]] = []
    state = {rank: _Turn(program) for rank, program in programs.items()}
    channels: Channels = {}
    turns = deque(programs)
    while turns:
        turn = state[turns.popleft()]
        for effect in turn.advance(channels):
            order.append((turn.rank, effect))
            if isinstance(effect, Send):
                peer = state[effect.rank]
                _deliver(channels, turn.rank, peer)
                if peer.waits_for in peer.here and peer.rank not in turns:
                    turns.append(peer.rank)
    parked = [turn for turn in state.values() if turn.at < len(turn.program)]
    if parked:
        raise ScheduleError("no rank can go on: " + "; ".join(turn.explain(state) for turn in parked))
    for (source, target), (sends, receives) in channels.items():
        if sends or receives:
            kind, value = ("sends", sends[0]) if sends else ("never sends", receives[0])
            raise ScheduleError(
                f"rank {source} {kind} {value} to rank {target}, which {'never ' if sends else ''}receives it"
            )
    return tuple(order)


class _Turn:
    """How far one rank has got, what is on it, and what it waits for."""

    def __init__(self, program: Program) -> None:
        self.program, self.rank, self.at = program, program.rank, 0
        self.here: set[object] = set()
        self.waits_for: object = None

    def advance(self, channels: Channels) -> Iterator[Effect]:
        plan, effects = self.program.plan, self.program.effects
        while self.at < len(effects):
            effect = effects[self.at]
            for name in needs(effect, plan):
                if name not in self.here:
                    self.waits_for = name
                    return
            self.at += 1
            if isinstance(effect, Send):
                _channel(channels, self.rank, effect.rank)[0].append(effect.value)
            elif isinstance(effect, Recv):
                _channel(channels, effect.rank, self.rank)[1].append(effect.value)
                _deliver(channels, effect.rank, self)
            else:
                self.here.update(gives(effect, plan))
                self.here.difference_update(frees(effect, plan))
            yield effect

    def explain(self, state: dict[int, _Turn]) -> str:
        effect, name = self.program.effects[self.at], self.waits_for
        text = f"rank {self.rank} waits at {effect} for {name}"
        if not isinstance(name, Value):
            return f"{text}, which no effect before it gives"
        source = maker(name, self.program.plan)
        if source == self.rank:
            return f"{text}, which this rank itself makes only later"
        posted = any(isinstance(e, Recv) and e.value == name for e in self.program.effects[: self.at])
        if not posted:
            return f"{text} from rank {source}: post Recv({name}, {source}) before"
        later = any(isinstance(e, Send) and e.value == name for e in state[source].program.effects)
        return f"{text} from rank {source}, which {'has yet to send it' if later else 'never sends it'}"


def _channel(channels: Channels, source: int, target: int) -> tuple[deque[Value], deque[Value]]:
    return channels.setdefault((source, target), (deque(), deque()))


def _deliver(channels: Channels, source: int, target: _Turn) -> None:
    sends, receives = _channel(channels, source, target.rank)
    while sends and receives:
        value, expected = sends.popleft(), receives.popleft()
        if value != expected:
            raise ScheduleError(
                f"on the channel from rank {source} to rank {target.rank}, {value} is sent where {expected} is "
                "received: post the receives in the order of the sends"
            )
        target.here.add(value)
