"""Playing all ranks' programs against each other: who can go on, and who waits. No torch.

A rank goes on until it would wait, and takes another turn when what it waits for has come. Nothing that one
rank does can stop another that could go on, so one order of turns finds a way if there is any.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fpipe.effects import Effect, Name, Recv, Send
from fpipe.errors import ScheduleError
from fpipe.programs.deadlock import explain
from fpipe.programs.interning import Interning
from fpipe.programs.program import Programs, plan_of, table_of
from fpipe.programs.transports import Transport


def interleave(programs: Programs) -> tuple[tuple[int, Effect], ...]:
    """One order over all ranks in which every value is made before it is used.

    Posts never wait, and each directed edge is a channel, first in, first out. The order is deterministic:
    ranks take turns, each going on until it would wait.

    Raises:
        ScheduleError: no such order; the message says what ranks wait for.
    """
    effects = {rank: program.effects for rank, program in programs.items()}
    return tuple((turn.rank, e) for turn in turns(programs) for e in effects[turn.rank][turn.start : turn.stop])


class Turn(NamedTuple):
    """A rank goes on in its program from `start` to `stop`.

    `givers` says for each of these effects where in the same program stands what gave the names that it needs; the
    receive, where they came from another rank. Nothing for sends and receives.
    """

    rank: int
    start: int
    stop: int
    givers: list[Sequence[int]]


def turns(programs: Programs, transport: str = "async") -> Iterator[Turn]:
    """The turns of that order.

    Raises:
        ScheduleError: (at the end) ranks are left that can't go on, or posts that are never met.
    """
    play = _Play(programs, Transport.named(transport))
    while play.turns:
        turn = play.advance(play.turns.popleft())
        if turn.givers:
            yield turn
    play.check_ended()


class _Play:
    """How far each rank has got, the names that are on it, and the posts that are not met yet."""

    def __init__(self, programs: Programs, transport: Transport) -> None:
        self.programs, self.transport = programs, transport
        self.interning = Interning(plan_of(programs), table_of(programs))
        self.turns = deque(programs)
        self.at = dict.fromkeys(programs, 0)
        self.here: dict[int, dict[object, int]] = {rank: {} for rank in programs}  # name -> where it was given
        self.waits_for: dict[int, object] = {}
        self.queues: dict[tuple[int, int, bool], deque[tuple[bool, int, int]]] = defaultdict(deque)

    def advance(self, rank: int) -> Turn:
        """Run a rank until it would wait."""
        effects: tuple[Any, ...] = self.programs[rank].effects
        here, interning, start = self.here[rank], self.interning, self.at[rank]
        givers: list[Sequence[int]] = []
        for at in range(start, len(effects)):
            effect = effects[at]
            kind = type(effect)
            if kind is Recv or kind is Send:
                if (missing := self._post(rank, at, effect)) is not None:
                    self.waits_for[rank] = missing
                    break
                givers.append(())
                continue
            needs, gives, frees = interning.ids(effect)
            try:
                givers.append([here[id_] for id_ in needs])
            except KeyError as error:
                self.waits_for[rank] = error.args[0]
                break
            for id_ in frees:
                here.pop(id_, None)
            for id_ in gives:
                here[id_] = at
        self.at[rank] = start + len(givers)
        return Turn(rank, start, self.at[rank], givers)

    def _post(self, rank: int, at: int, effect: Send | Recv) -> object:
        """Post a send or a receive, and let the transfers happen that now can; what it must wait for, or None."""
        number, peer, sends = self.interning.id(effect.value), effect.rank, isinstance(effect, Send)
        if sends:
            if number not in self.here[rank]:
                return number
            if self.transport.rendezvous and (number, peer) not in self.here[rank]:
                return number, peer
        elif self.transport.rendezvous:
            self._arrive(peer, (number, rank), at)
        paired = self.transport.paired
        own = self.queues[rank, peer, paired or sends]
        other = self.queues[peer, rank, paired or not sends]
        own.append((sends, number, at))
        while own and other and own[0][0] != other[0][0]:
            post, met = own.popleft(), other.popleft()
            (_, sent, _), (_, expected, received) = (post, met) if post[0] else (met, post)
            source, target = (rank, peer) if post[0] else (peer, rank)
            if sent != expected:
                raise crossed(source, target, self.interning.name(sent), self.interning.name(expected))
            self._arrive(target, sent, received)
        return None

    def _arrive(self, rank: int, what: object, at: int) -> None:
        self.here[rank][what] = at
        if self.waits_for.get(rank) == what:
            del self.waits_for[rank]
            self.turns.append(rank)

    def check_ended(self) -> None:
        """Refuse ranks that can't go on, sends that are never received, and receives that are never sent."""
        missing = {rank: self._missing(rank) for rank, at in self.at.items() if at < len(self.programs[rank])}
        if missing:
            raise ScheduleError(explain(self.programs, self.at, missing, self.transport.paired))
        for (rank, peer, _), queue in self.queues.items():
            for sends, number, _ in queue:
                value = self.interning.name(number)
                if sends:
                    raise ScheduleError(f"rank {rank} sends {value} to rank {peer}, which never receives it")
                raise ScheduleError(f"rank {peer} never sends {value} to rank {rank}, which receives it")

    def _missing(self, rank: int) -> list[Name]:
        """What a parked rank needs and does not have."""
        needs = self.interning.ids(self.programs[rank].effects[self.at[rank]]).needs
        return [self.interning.name(id_) for id_ in needs if id_ not in self.here[rank]]


def crossed(source: int, target: int, sent: Name, expected: Name) -> ScheduleError:
    """That a channel's receives are not in the order of its sends."""
    return ScheduleError(
        f"on the channel from rank {source} to rank {target}, {sent} is sent where {expected} is received: post the "
        "receives in the order of the sends"
    )
