"""Run the programs of all ranks together, by name only: which rank can proceed, and which must wait. No torch.

Run each rank until it blocks, and resume it when the value arrives. Progress of one rank never disables another, so if
any order completes, this one does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fpipe.effects import Effect, Name, Recv, Send
from fpipe.errors import ScheduleError
from fpipe.programs.deadlock import explain_deadlock
from fpipe.programs.interning import Interning
from fpipe.programs.program import Programs, plan_of, table_of
from fpipe.programs.transports import Transport


def interleave(programs: Programs) -> tuple[tuple[int, Effect], ...]:
    """Return one order over all ranks in which every value is computed before it is used.

    Posts never wait, and each directed edge is a channel, first in, first out. The order is deterministic:
    ranks take turns, and each runs until it blocks.

    Raises:
        ScheduleError: there is no such order; the message names the waits.
    """
    effects = {rank: program.effects for rank, program in programs.items()}
    return tuple((turn.rank, e) for turn in turns(programs) for e in effects[turn.rank][turn.start : turn.stop])


class Turn(NamedTuple):
    """A rank runs its program from index `start` to `stop`.

    `givers` has for each of these effects the indices, in the same program, of the effects that gave the names that it
    needs: of the receive, if a name came from another rank. Empty for receives.
    """

    rank: int
    start: int
    stop: int
    givers: list[Sequence[int]]


def turns(programs: Programs, transport: str = "async") -> Iterator[Turn]:
    """Yield the turns of that order.

    Raises:
        ScheduleError: (at the end) a rank cannot finish its program, or a post has no other half.
    """
    scheduler = _Scheduler(programs, Transport.named(transport))
    while scheduler.turns:
        turn = scheduler.advance(scheduler.turns.popleft())
        if turn.givers:
            yield turn
    scheduler.check_ended()


class _Scheduler:
    """The next effect of each rank, the names on each rank, and the posts whose other half is not posted yet."""

    def __init__(self, programs: Programs, transport: Transport) -> None:
        self.programs, self.transport = programs, transport
        self.interning = Interning(plan_of(programs), table_of(programs))
        self.turns = deque(programs)
        self.at = dict.fromkeys(programs, 0)
        # By rank: id -> index of the effect that gave it.
        self.here: dict[int, dict[object, int]] = {rank: {} for rank in programs}
        self.waits_for: dict[int, object] = {}
        self.queues: dict[tuple[int, int, bool], deque[tuple[bool, int, int]]] = defaultdict(deque)

    def advance(self, rank: int) -> Turn:
        """Run a rank until it blocks."""
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
                givers.append(() if kind is Recv else (here[interning.id(effect.value)],))
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
        """Post a send or a receive, and run the transfers that are now possible; return what it waits for, or None."""
        number, peer, sends = self.interning.id(effect.value), effect.rank, isinstance(effect, Send)
        if sends:
            if number not in self.here[rank]:
                return number
            if self.transport.rendezvous and (number, peer) not in self.here[rank]:
                return number, peer
        elif self.transport.rendezvous:
            self._arrive(peer, (number, rank), at)
        paired = self.transport.paired
        posts = self.queues[rank, peer, paired or sends]
        other = self.queues[peer, rank, paired or not sends]
        posts.append((sends, number, at))
        while posts and other and posts[0][0] != other[0][0]:
            post, match = posts.popleft(), other.popleft()
            (_, sent, _), (_, expected, received) = (post, match) if post[0] else (match, post)
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
        """Raise ScheduleError for a blocked rank, a send that is never received, or a receive that is never sent."""
        missing = {rank: self._missing(rank) for rank, at in self.at.items() if at < len(self.programs[rank])}
        if missing:
            raise ScheduleError(explain_deadlock(self.programs, self.at, missing, self.transport.paired))
        for (rank, peer, _), queue in self.queues.items():
            for sends, number, _ in queue:
                value = self.interning.name(number)
                if sends:
                    raise ScheduleError(f"rank {rank} sends {value} to rank {peer}, which never receives it")
                raise ScheduleError(f"rank {peer} never sends {value} to rank {rank}, which receives it")

    def _missing(self, rank: int) -> list[Name]:
        """Return the names that a blocked rank needs and does not have."""
        needs = self.interning.ids(self.programs[rank].effects[self.at[rank]])[0]
        return [self.interning.name(id_) for id_ in needs if id_ not in self.here[rank]]


def crossed(source: int, target: int, sent: Name, expected: Name) -> ScheduleError:
    """Return the error for a channel whose receives are not in the order of its sends."""
    return ScheduleError(
        f"on the channel from rank {source} to rank {target}, {sent} is sent where {expected} is received: post the "
        "receives in the order of the sends"
    )
