"""Verify complete programs: check every rule, on the programs that the handlers run. No torch.

The rules, in the order of the checks; the first broken rule is the error:

1. The stages, microbatches, slices, tokens, ranks and values of effects are in the plan. Every stage runs each
   microbatch, or each slice of one, or each token of its prompts, forward once, on the rank `plan.rank_of`, and
   backward once, fused or in two halves, with the halves that the stage has: weight gradients if it is trained, input
   gradients if a stage before it is. Or no stage runs backward.
2. Per stage and copy, forwards and weight gradients run in microbatch order; the slices of a microbatch forward from
   the first to the last, and backward, in either half, from the last to the first. The parts of an overlap are
   independent. Forwards of tokens run in any order, since each microbatch has a cache of its own and waits for its last
   token.
3. Every trained stage is reduced once on each of its ranks. Sums are reduced and sent only when they are final: with
   replicas, once they are scattered, after the stage's last weight gradient. Where the parameters of stages are
   gathered, every effect that needs them comes between a `Gather` and a `Release`, and none is whole at the end. A
   stage is updated once on each of its ranks, or no stage is, after it is reduced, and is not gathered again.
4. A value is sent once from its producer to each other rank that reads it, and to no other rank. On each directed edge
   receives are posted in the order of the sends.
5. A value is computed before it is used, and the waits have no cycle under the transport. Residuals go to the host and
   back at most once, or are recomputed once, and are on the rank when the backward needs them.

By 1 and 4 each name has exactly the uses of the plan, so that no value is left unused if 5 holds.

The replicas of a pipeline run equal programs, so that one replica's are enough: a cycle of waits over several replicas
would be a closed walk in the waits of one, if equal effects of all replicas are taken for one. This holds too where
their pieces wait for each other in collectives, if a piece has the same ones, in one order, in all replicas.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from html import escape
from itertools import product
from typing import Any

from fpipe._format import aligned, format_bytes
from fpipe.costs import Costs
from fpipe.effects import (
    Activation,
    Gather,
    Gradient,
    Overlap,
    Parameters,
    Recompute,
    Recv,
    Reduce,
    Release,
    Scatter,
    Send,
    Update,
    Value,
    WeightGradient,
    parts,
)
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.plan import Plan, Schedule
from fpipe.programs.interleaving import crossed, turns
from fpipe.programs.interning import Interning
from fpipe.programs.lowering import lower
from fpipe.programs.memory import bytes_on, peak_bytes
from fpipe.programs.names import check_names, refused
from fpipe.programs.program import Pass, Program, Programs, plan_of, table_of
from fpipe.programs.residence import Residence
from fpipe.programs.residuals import MOVES, check_moves
from fpipe.programs.transports import Transport
from fpipe.tables import BACKWARD, FORWARD, INPUT, TABLE, WEIGHT, Table, halves, is_uniform, last_half, slice_of

Edge = tuple[int, int]  # source rank, target rank

MISSING = {
    INPUT | WEIGHT: "Backward, or BackwardInput and BackwardWeight,",
    INPUT: "BackwardInput",
    WEIGHT: "BackwardWeight",
}


@dataclass(frozen=True)
class Report:
    """The result of verifying correct programs.

    Args:
        plan, transport: those that the programs are correct for.
        effects: the number of effects of each rank.
        messages: the number of messages over each directed edge, (source, target).
        bytes: bytes of activations and gradients over each edge; None without costs.
        peak_in_flight: the peak number of microbatches in flight on each rank; one on one of v chunks counts 1/v, and
            one of s slices 1/s.
            A microbatch is in flight on a stage from its forward to its weight gradient or fused backward; of a stage
            that is not trained, to its input gradient. Counted in program order, so timing does not change it; 0 if no
            stage runs backward.
        peak_bytes: the peak of each rank's live bytes at the ends of effects, in program order: residuals, deferred
            values, and values from when they are computed, or their receive is posted, to their last use. Shared memory
            counts once. A backward has freed its inputs when it ends. A sent value is live until a value received from
            that peer acknowledges it. What stages prepare of their parameters alone (`Costs.prepared`) counts all the
            time. Not counted: parameters, the batch, gradient and loss accumulators, temporaries inside a piece, and
            packing buffers. None without costs. `fpipe.LiveBytes` measures it.
        peak_resident: the peak number of stages whose gathered parameters are whole on each rank at a time.
    """

    plan: Plan
    transport: str
    effects: tuple[int, ...]
    messages: dict[Edge, int]
    bytes: dict[Edge, float] | None
    peak_in_flight: tuple[float, ...]
    peak_bytes: tuple[float, ...] | None
    peak_resident: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<Report: {self.title}>"

    def _repr_html_(self) -> str:
        """Return the tables that a notebook shows."""
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def title(self) -> str:
        """The transport, and how many effects and messages there are."""
        return f"right under {self.transport}: {sum(self.effects)} effects, {sum(self.messages.values())} messages"

    @property
    def tables(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """The rows of ranks, and those of edges, as texts; the first of each is the head."""
        has_gathers = any(self.peak_resident)
        ranks = [("rank", "effects", "in flight", *["resident"] * has_gathers, *(["bytes"] if self.peak_bytes else []))]
        for rank, (effects, peak) in enumerate(zip(self.effects, self.peak_in_flight, strict=True)):
            peak_bytes = [format_bytes(self.peak_bytes[rank])] if self.peak_bytes else []
            resident = [str(self.peak_resident[rank])] * has_gathers
            ranks.append((str(rank), str(effects), f"{peak:g}", *resident, *peak_bytes))
        edges = [("edge", "messages", *(["bytes"] if self.bytes else []))]
        for edge, count in self.messages.items():
            sent = [format_bytes(self.bytes[edge])] if self.bytes else []
            edges.append((f"{edge[0]} to {edge[1]}", str(count), *sent))
        return ranks, edges

    def __str__(self) -> str:
        ranks, edges = self.tables
        return "\n".join([self.title, *aligned(ranks), *(aligned(edges) if self.messages else [])])


@fold_tracebacks
@checked("schedule", "plan", "transport", "depth")
def verify(
    schedule: Schedule | str,
    plan: Plan,
    *,
    transport: str = "async",
    ordered: bool = True,
    costs: Costs | None = None,
    depth: int | None = None,
    resident: Residence | int | None = None,
    offload: Pass | None = None,
    effects: Table = TABLE,
) -> Report:
    """Check the programs of a schedule for a plan, communication included.

    Args:
        schedule: a function, or a name that `schedules.get` takes.
        transport: `async`: posts never wait, and each directed edge is a channel, first in, first out (the transport
            of fpipe's handlers); `paired`: each rank's sends and receives to a peer run one after the other in one
            queue, as on one NCCL communicator for the pair; `rendezvous`: a send waits until its receive is posted.
            Lowering places sends and receives for the transport; those that the schedule yields keep their place.
        ordered: whether each stage must run its microbatches in order. False accepts schedules whose results are equal
            within a tolerance only, and is not for stages with state; `value_and_grad` requires True.
        costs: the sizes from which the report counts bytes.
        depth, resident, offload, effects: as in `lower`.

    Raises:
        ScheduleError: the first broken rule, or a shortest cycle of waits: the ranks, their effects, the values that
            they wait for, and a way out.

    >>> from fpipe import Placement, Plan, schedules
    >>> print(verify(schedules.one_f_one_b, Plan(Placement.loop(2), 4)))
    right under async: 34 effects, 8 messages
    rank  effects  in flight
       0       17          2
       1       17          1
      edge  messages
    0 to 1         4
    1 to 0         4
    """
    options: dict[str, Any] = {"depth": depth, "resident": resident, "offload": offload, "effects": effects}
    programs = lower(schedule, plan, transport=transport, **options)
    return check(programs, transport=transport, ordered=ordered, costs=costs)


def check(programs: Programs, *, transport: str = "async", ordered: bool = True, costs: Costs | None = None) -> Report:
    """Verify complete programs, one for each rank; the arguments are those of `verify`."""
    Transport.named(transport)
    plan = plan_of(programs)
    if costs is not None:
        costs.check(plan)
    table = table_of(programs)
    for rank, program in programs.items():
        check_names(program, rank, plan, table)
    interning = Interning(plan, table)
    all_parts: Any = (part for program in programs.values() for effect in program for part in parts(effect))
    backward = any(table.effects[type(part)].work & BACKWARD for part in all_parts)
    updates = any(type(effect) is Update for program in programs.values() for effect in program)
    rules = [_RankRules(programs[rank], backward, ordered, updates) for rank in range(plan.ranks)]
    for rank, each in enumerate(rules):
        each.check()
        check_moves(programs[rank])
    due = _due(programs, backward, interning)
    _check_messages(programs, due, interning)
    deque(turns(programs, transport), maxlen=0)
    return Report(
        plan,
        transport,
        tuple(len(programs[rank]) for rank in range(plan.ranks)),
        {edge: sum(map(len, due[edge].values())) for edge in sorted(due)},
        None if costs is None else _bytes(due, costs, interning),
        tuple(each.peak / len(plan.stages_on(each.rank)) / plan.slices for each in rules),
        None if costs is None else peak_bytes(programs, costs, interning),
        tuple(each.peak_resident for each in rules),
    )


class _RankRules:
    """Rules 1 to 3 on one rank: the work that each stage has done, the microbatches in flight, the resident stages."""

    def __init__(self, program: Program, backward: bool, ordered: bool, updates: bool) -> None:
        self.program, self.plan, self.rank, self.table = program, program.plan, program.rank, program.table
        self.backward, self.ordered, self.updates = backward, ordered, updates
        stages = self.plan.stages_on(self.rank)
        self.halves = {stage: halves(stage, self.plan) if backward else 0 for stage in stages}
        self.last_halves = {stage: last_half(stage, self.plan) if backward else 0 for stage in stages}
        self.trained = [stage for stage in stages if self.halves[stage] & WEIGHT]
        self.microbatches = {stage: self.plan.microbatches_of(stage, self.rank) for stage in stages}
        self.slices, self.tokens = self.plan.slices, self.plan.tokens
        # By the number of the slice, or of the token, counted over all microbatches.
        self.done = {stage: bytearray(self.plan.microbatches * self.slices * self.tokens) for stage in stages}
        self.last = {(stage, work): -1 for stage in self.microbatches for work in (FORWARD, WEIGHT)}
        counts = {stage: len(run) * self.slices for stage, run in self.microbatches.items()}
        self.left = {stage: count if stage in self.trained else 0 for stage, count in counts.items()}
        self.reduced, self.scattered, self.updated = set[int](), set[int](), set[int]()
        self.resident, self.peak_resident = set[int](), 0
        self.early: list[ScheduleError] = []  # of sums that are used too early; errors of rule 1 are raised first
        self.in_flight = self.peak = 0

    def check(self) -> None:
        """Check the rules, and count the peaks."""
        effect: Any
        works = {kind: row.work for kind, row in self.table.effects.items()}
        for effect in self.program:
            kind = type(effect)
            if self.plan.gathered:
                self.read(effect)
            if work := works[kind]:
                self.run(effect, work)
            elif kind is Overlap:
                self.overlap(effect)
            elif kind is Reduce:
                self.reduce(effect)
            elif kind is Send and type(effect.value) is WeightGradient:
                self.share(effect)
            elif kind is Scatter:
                self.scatter(effect)
            elif kind is Update:
                self.update(effect)
            elif kind is Gather or kind is Release:
                self.place(effect)
                self.hold(effect)
            elif kind not in TABLE.effects or kind in MOVES:
                self.place(effect)
        if len(self.table.values) > len(TABLE.values):
            self.give_once()
        self.end()

    def read(self, e: Any) -> None:
        """Check that the parameters that an effect needs are whole."""
        for name in self.table.needs(e, self.plan):
            if type(name) is Parameters and name.stage not in self.resident:
                why = f"the parameters of stage {name.stage} are not whole: yield Gather({name.stage}) before it"
                raise self.wrong(e, why)

    def hold(self, e: Any) -> None:
        if type(e) is Gather and e.stage in self.updated:
            raise self.wrong(e, "the stage is updated already: nothing may use its parameters in this step")
        if type(e) is Release:
            self.resident.remove(e.stage)
        elif e.stage in self.resident:
            raise self.wrong(e, "the parameters of the stage are whole already: release them first")
        else:
            self.resident.add(e.stage)
            self.peak_resident = max(self.peak_resident, len(self.resident))

    def scatter(self, e: Any) -> None:
        self.place(e)
        if self.plan.replicas == 1:
            raise self.wrong(e, "the plan has one replica")
        self.check_trained(e)
        if e.stage in self.scattered:
            raise self.wrong(e, "the stage is scattered already")
        self.last_weight(e, e.stage)
        self.scattered.add(e.stage)

    def place(self, e: Any) -> None:
        """Check that an effect may run on this rank."""
        ranks = self.table.effects[type(e)].where(e, self.plan)
        if self.rank not in ranks:
            raise self.wrong(e, f"{_ranks(ranks)} may run it: yield it there")

    def give_once(self) -> None:
        """Check that a value is not given again before it is freed, and the user's own not freed before it is given."""
        here: set[Any] = set()
        for effect in self.program:
            for name in self.table.frees(effect, self.plan):
                if name not in here and type(name) not in TABLE.values:
                    raise self.wrong(effect, f"the {name} that it frees is not on the rank: give it first")
                here.discard(name)
            for name in self.table.gives(effect, self.plan):
                row = self.table.values[type(name)]
                if name in here and not row.sums and type(effect) is not Recompute:
                    raise self.wrong(
                        effect, f"its {name} is on the rank already: yield it once, or free the value first"
                    )
                here.add(name)

    def run(self, e: Any, work: int) -> None:
        stage, m = e.stage, e.microbatch
        if stage not in self.microbatches or m not in self.microbatches[stage]:
            raise self.wrong(e, f"rank {self.plan.rank_of(stage, m)} runs that microbatch of that stage")
        if work & BACKWARD & ~self.halves[stage]:
            raise self.wrong(e, self.lacking(e, work & BACKWARD & ~self.halves[stage]))
        done, at = self.done[stage], (m * self.slices + slice_of(e)) * self.tokens + getattr(e, "token", 0)
        if done[at] & work:
            raise self.wrong(e, "it has run: a microbatch goes forward once, and backward once, fused or in two halves")
        done[at] |= work
        if self.slices > 1:
            self.after_slice(e, work)
        if work == FORWARD:
            self.in_order(e, FORWARD)
            self.in_flight += self.halves[stage] > 0
            self.peak = max(self.peak, self.in_flight)
        elif work & WEIGHT:
            self.in_order(e, WEIGHT)
            self.left[stage] -= 1
        self.in_flight -= bool(work & self.last_halves[stage])

    def after_slice(self, e: Any, work: int) -> None:
        """Check that the slice before has run forward, or the slice after backward, in the same half."""
        forward, t = work == FORWARD, slice_of(e)
        other = t - 1 if forward else t + 1
        if not 0 <= other < self.slices:
            return
        if missing := work & ~self.done[e.stage][e.microbatch * self.slices + other]:
            kind = "Forward" if forward else MISSING[missing]
            order = "forward from the first to the last" if forward else "backward from the last to the first"
            why = f"{kind} of slice {other} comes later: the slices of a microbatch run {order} on a stage"
            raise self.wrong(e, why + self.hint)

    def lacking(self, e: Any, half: int) -> str:
        """Return why a stage does not have a half of its backward, and the effect to yield."""
        has = MISSING.get(self.halves[e.stage])
        way = f"yield {has}" if has else "yield no backward of it"
        if half & WEIGHT:
            return f"stage {e.stage} has no weight gradients: plan.trained does not name it; {way}"
        return f"stage {e.stage} has no input gradients: no stage before it is trained; {way}"

    def in_order(self, e: Any, work: int) -> None:
        last, self.last[e.stage, work] = self.last[e.stage, work], e.microbatch
        if e.microbatch < last and self.ordered and self.table.effects[type(e)].ordered:
            kind = "forwards" if work == FORWARD else "weight gradients"
            raise self.wrong(
                e,
                f"microbatch {last} has run: a stage's {kind} run in microbatch order, for state and sums depend on it",
            )

    def overlap(self, e: Any) -> None:
        for part in parts(e):
            self.run(part, self.table.effects[type(part)].work)
        for name in {*self.table.gives(e.forward, self.plan)} & {*self.table.needs(e.backward, self.plan)}:
            raise self.wrong(e, f"its backward needs {name} of its forward: overlap what is independent")

    def reduce(self, e: Any) -> None:
        if e.stage not in self.microbatches:
            raise self.wrong(e, f"the rank holds stages {tuple(self.microbatches)}")
        self.check_trained(e)
        if e.stage in self.reduced:
            raise self.wrong(e, "the stage is reduced already")
        for stage, rank in self.plan.sharers(e.stage):
            if rank == self.rank:
                self.final(e, stage)
        self.reduced.add(e.stage)

    def update(self, e: Any) -> None:
        self.place(e)
        self.check_trained(e)
        if e.stage in self.updated:
            raise self.wrong(e, "the stage is updated already")
        if e.stage not in self.reduced:
            raise self.wrong(e, f"it comes before Reduce({e.stage}): the stage's gradients are not final")
        self.updated.add(e.stage)

    def check_trained(self, e: Any) -> None:
        if e.stage not in self.trained:
            raise self.wrong(e, "plan.trained does not name the stage" if self.backward else "nothing runs backward")

    def share(self, e: Any) -> None:
        if e.value.rank == self.rank:
            self.final(e, e.value.stage)

    def final(self, e: Any, stage: int) -> None:
        self.last_weight(e, stage)
        if self.plan.replicas > 1 and stage not in self.scattered:
            self.early.append(self.wrong(e, f"it comes before Scatter({stage}, {self.rank}): a sum is of all replicas"))

    def last_weight(self, e: Any, stage: int) -> None:
        if self.left[stage]:
            self.early.append(self.wrong(e, f"it comes before the last weight gradient of stage {stage}"))

    def end(self) -> None:
        for stage, microbatches in self.microbatches.items():
            done, full = self.done[stage], FORWARD | self.halves[stage]
            if done.count(full) == len(microbatches) * self.slices * self.tokens:
                continue
            for (m, t), token in product(self.plan.forward_order(stage, self.rank), range(self.tokens)):
                if missing := full & ~done[(m * self.slices + t) * self.tokens + token]:
                    raise ScheduleError(self.never(missing, stage, m, t, token))
        if self.early:
            raise self.early[0]
        for stage in sorted(self.resident):
            raise ScheduleError(
                f"rank {self.rank} never yields Release({stage}) after its last Gather({stage}): the whole parameters "
                "would stay"
            )
        for stage in self.trained:
            if self.plan.replicas > 1 and stage not in self.scattered:
                raise ScheduleError(
                    f"rank {self.rank} never yields Scatter({stage}, {self.rank}): a schedule yields every Scatter, or "
                    "none"
                )
            if stage not in self.reduced:
                raise ScheduleError(
                    f"rank {self.rank} never yields Reduce(stage={stage}): a schedule yields every Reduce, or none"
                )
            if self.updates and stage not in self.updated:
                raise ScheduleError(
                    f"rank {self.rank} never yields Update(stage={stage}): a schedule yields every Update, or none"
                )

    def never(self, missing: int, stage: int, m: int, t: int, token: int) -> str:
        """Return why a program is not complete: the work of a slice, a token or a microbatch that it lacks."""
        kind = self.forwards() if missing & FORWARD else MISSING[missing]
        text = f"rank {self.rank} never yields {kind} of stage {stage}, microbatch {m}"
        if self.tokens > 1:
            return f"{text}, token {token}"
        if self.slices == 1:
            return text
        return f"{text}, slice {t}{self.hint}"

    @property
    def hint(self) -> str:
        """The way out for a schedule that yields no slices."""
        if any(slice_of(part) for effect in self.program for part in parts(effect)):
            return ""
        return ". The schedule has no slices: take one that has, such as schedules.seq_1f1b, or a plan without slices"

    def forwards(self) -> str:
        """Return the names of the effects that run this program's stages forward."""
        kinds = {type(part) for effect in self.program for part in parts(effect)}
        return " or ".join(sorted(k.__name__ for k in kinds if self.table.effects[k].work == FORWARD)) or "Forward"

    def wrong(self, e: Any, why: str) -> ScheduleError:
        return refused(self.rank, e, why)


def _ranks(ranks: Collection[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)))
    return f"only rank {listed}" if len(ranks) == 1 else f"only ranks {listed}"


Due = dict[Edge, dict[int, Collection[int]]]
"""For each edge the ids of the values that must be sent on it, by block. Values of a block have the same readers."""


def _due(programs: Programs, backward: bool, interning: Interning) -> Due:
    plan, size, due = interning.plan, interning.block_size, Due()
    kinds = _kinds_given(programs, interning.table)

    def add(value: Any, count: int) -> None:
        first, source = interning.id(value), interning.table.producer(value, plan)
        if source is None:
            return
        for reader in interning.table.readers(value, plan):
            blocks, ids = due.setdefault((source, reader), {}), range(first, first + count)
            block = first // size
            blocks[block] = {*blocks[block], *ids} if block in blocks else ids

    for stage in range(plan.stages):
        for m, t in product(range(plan.cycle), range(plan.slices)):
            if Activation in kinds:
                add(Activation(stage, m, t), size)
            for consumer in plan.consumers(stage) if backward and plan.is_differentiated(stage) else ():
                add(Gradient(stage, consumer, m, t), size)
        for rank in plan.ranks_of(stage) if backward and plan.is_trained(stage) else ():
            add(WeightGradient(stage, rank), 1)
    for value in _values_given(programs, kinds - {Activation, Gradient, WeightGradient}, interning.table):
        add(value, 1)
    return due


def _kinds_given(programs: Programs, table: Table) -> set[type]:
    """Return the kinds of values that leave their ranks, among those that effects give."""
    some: dict[tuple[type, int | None, int | None], Any] = {}
    for program in programs.values():
        for effect in program:
            for part in parts(effect) if type(effect) is not Recv else ():
                some.setdefault((type(part), getattr(part, "stage", None), getattr(part, "token", None)), part)
    kinds = {type(v) for effect in some.values() for v in table.gives(effect, plan_of(programs))}
    kinds |= {kind for kind in table.values if kind not in TABLE.values}  # their rows may give more to some effects
    return {kind for kind in kinds if table.values[kind].producer is not None}


def _values_given(programs: Programs, kinds: set[type], table: Table) -> Iterator[Value]:
    """Yield the values of some kinds that effects give."""
    for program in programs.values() if kinds else ():
        for effect in program:
            if not isinstance(effect, Recv):
                yield from (v for v in table.gives(effect, program.plan) if type(v) in kinds)


def _check_messages(programs: Programs, due: Due, interning: Interning) -> None:
    """Check rule 4: on every edge exactly the due values are sent, and they are received in the order of the sends."""
    sent: dict[Edge, list[int]] = {edge: [] for edge in due}
    received: dict[Edge, list[int]] = {edge: [] for edge in due}
    for rank, program in programs.items():
        effect: Any
        for effect in program:
            if type(effect) is Send:
                sent.setdefault((rank, effect.rank), []).append(interning.id(effect.value))
            elif type(effect) is Recv:
                received.setdefault((effect.rank, rank), []).append(interning.id(effect.value))
    for edge in sorted({*sent, *received}):
        expected, sends, receives = due.get(edge, {}), sent.get(edge, []), received.get(edge, [])
        _check_posts(Send, edge, sends, expected, interning)
        _check_posts(Recv, edge, receives, expected, interning)
        if sends != receives:
            first, second = next(pair for pair in zip(sends, receives, strict=True) if pair[0] != pair[1])
            raise crossed(*edge, interning.name(first), interning.name(second))


def _check_posts(
    kind: type[Any], edge: Edge, posts: list[int], due: dict[int, Collection[int]], interning: Interning
) -> None:
    """Check that a rank posts each value that is due on an edge, once, and no other value."""
    (rank, peer), size = edge if kind is Send else edge[::-1], interning.block_size
    stray = next((id_ for id_ in posts if id_ not in due.get(id_ // size, ())), None)
    if stray is not None:
        raise _misdirected(kind, rank, peer, interning.name(stray), interning)
    if len(counts := Counter(posts)) < len(posts):
        post = kind(interning.name(next(id_ for id_ in posts if counts[id_] > 1)), peer)
        raise ScheduleError(f"rank {rank} yields {post} twice: a value goes once to each rank that uses it")
    if len(posts) < sum(map(len, due.values())):
        value = interning.name(min({id_ for ids in due.values() for id_ in ids} - {*posts}))
        raise ScheduleError(
            f"rank {rank} never yields {kind(value, peer)}: rank {edge[1]} uses the value, and rank {edge[0]} makes it"
        )


def _misdirected(kind: type[Any], rank: int, peer: int, value: Any, interning: Interning) -> ScheduleError:
    source, target = (rank, peer) if kind is Send else (peer, rank)
    table, plan = interning.table, interning.plan
    producer = table.producer(value, plan)
    if producer != source:
        why = f"rank {producer} makes the value"
    elif target not in table.readers(value, plan):
        why = f"rank {target} never uses the value"
    else:
        why = "nothing runs backward" if table.values[type(value)].backward else "no effect gives the value"
    return refused(rank, kind(value, peer), why)


def _bytes(due: Due, costs: Costs, interning: Interning) -> dict[Edge, float]:
    def total(block: Collection[int], rank: int) -> float:
        first = interning.name(next(iter(block)))
        if not costs.sizes and is_uniform(interning.table.values[type(first)].bytes):
            return bytes_on(rank, first, costs, interning) * len(block)
        return sum(bytes_on(rank, interning.name(id_), costs, interning) for id_ in block)

    return {edge: sum(total(block, edge[1]) for block in due[edge].values()) for edge in sorted(due)}
