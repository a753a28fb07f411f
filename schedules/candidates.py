"""A parallel strategy of a transformer: the costs of its pieces, its bounds, and its predicted step. No torch.

Ranks are numbered with tensor parallel innermost, then expert and context parallel, replicas, and the pipeline
outermost, so that the dimensions that send most stay inside a host (Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 3). The collectives of a piece are a part of its
time:

- tensor parallel: two all-reduces of a layer's activations in its forward, and two in its input gradient (Shoeybi et
  al., "Megatron-LM", 2019, section 3); a sequence-parallel layer gathers and scatters the same bytes. One more after
  the embedding, and one in the input gradient of the head, whose loss adds three numbers for each token.
- context parallel: a layer gathers the keys and values of a sequence, and adds and scatters their gradients.
- expert parallel: a layer exchanges the inputs of all slots of experts and their outputs, in its forward, and the
  gradients of both in its input gradient (Lepikhin et al., "GShard", 2020, section 3.2).

Replicas and expert-parallel ranks take other sequences, and context-parallel ranks other tokens: gradients are added
over all three, those of experts not over the second, which has other experts. Parameters are sharded over the first and
the last. Experts that are spread are not combined with tensor parallel. Not in the prediction: links that several
transfers share, the padding of vocabularies, experts whose tokens are uneven, and the host's own time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, product
from math import ceil, inf, prod
from typing import Any, NamedTuple

from fpipe._format import format_bytes, number
from fpipe.costs import Costs, Link
from fpipe.effects import Backward, BackwardInput, BackwardWeight, Effect, Forward, parts
from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan, Schedule
from fpipe.programs.footprint import RankBytes, footprint
from fpipe.programs.lowering import lower
from fpipe.programs.program import Programs
from fpipe.programs.residence import residence
from fpipe.schedules.catalogue import CatalogueEntry, named
from fpipe.schedules.machines import ITEMSIZES, Machine, exchanging, gathering, summing
from fpipe.schedules.shapes import Flops, Kept, ModelShape
from fpipe.timelines.simulator import simulate_programs
from fpipe.timelines.timeline import Timeline

UPDATED = 28  # bytes of Adam's update of a parameter in float32: four are read, and three of them written
SINGLE = 4  # bytes of a number in float32


class Degrees(NamedTuple):
    """The number of ranks along each dimension."""

    pp: int
    dp: int
    tp: int
    cp: int
    ep: int = 1

    def __str__(self) -> str:
        sizes = self._asdict()
        if self.ep == 1:
            del sizes["ep"]
        return " x ".join(f"{name} {size}" for name, size in sizes.items())

    @property
    def replicas(self) -> int:
        """The ranks over which gradients are added, but those of experts."""
        return self.shards * self.ep

    @property
    def shards(self) -> int:
        """The ranks over which parameters are sharded."""
        return self.dp * self.cp

    @property
    def batches(self) -> int:
        """The ranks that take other sequences."""
        return self.dp * self.ep


@dataclass(frozen=True)
class Strategy:
    """A model on its ranks, with a schedule, and the predicted step.

    Args:
        degrees: ranks along each dimension.
        rows: sequences of a microbatch.
        remat: "full" where a stage keeps only its input and the results of its collectives.
        name, schedule, plan, costs, resident: as `Found` has them; run it by
            `value_and_grad(pipeline, schedule, plan, resident=resident)`.
        layers: the number of layers of each stage.
        timeline: the predicted step, without the optimizer.
        footprint: the account of each pipeline rank's bytes.
        working: the most bytes inside a piece on each rank: gradients of logits, and activations computed again.
        step: seconds of a step, with the optimizer's update.
        tokens: of a step, in all.
        mfu: the FLOPs that the model needs over those that the devices' peak allows in a step.
    """

    degrees: Degrees
    rows: int
    remat: str
    name: str
    schedule: Schedule
    plan: Plan
    costs: Costs
    resident: int | None
    layers: tuple[int, ...]
    timeline: Timeline
    footprint: tuple[RankBytes, ...]
    working: tuple[float, ...]
    step: float
    tokens: int
    mfu: float

    def __repr__(self) -> str:
        return f"<Strategy: {self.degrees}, {self.name}, {number(self.step)} s, {format_bytes(self.bytes)}>"

    @property
    def bytes(self) -> float:
        """The most bytes on a rank."""
        return max(account.total + working for account, working in zip(self.footprint, self.working, strict=True))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step

    @property
    def chunks(self) -> int:
        """The number of stages on a rank."""
        return len(self.plan.stages_on(0))

    @property
    def collectives(self) -> float:
        """The share of the busiest rank's compute that the collectives inside its pieces take."""
        busy = self.timeline.busy
        rank = busy.index(max(busy))
        return self.timeline.collectives[rank] / busy[rank]


class Piece(NamedTuple):
    """The seconds of a layer, an embedding or a head; `summing` and `summing_back` are those of its collectives."""

    forward: float
    backward_input: float
    backward_weight: float
    summing: float = 0.0
    summing_back: float = 0.0


@dataclass(frozen=True)
class Job:
    """The arguments of `strategies`."""

    model: ModelShape
    machine: Machine
    world: int
    batch: int
    dtype: str
    sequence_parallel: bool
    limit: float

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    def degrees(self, *asked: Sequence[int] | None) -> Iterator[Degrees]:
        """Yield all degrees whose product is the number of ranks, and which divide heads and tokens."""
        model, divisors = self.model, [n for n in range(1, self.world + 1) if self.world % n == 0]
        sizes = ([n for n in divisors if of is None or n in of] for of in asked)
        for each in (Degrees(*degrees) for degrees in product(*sizes) if prod(degrees) == self.world):
            divides = model.key_heads % each.tp == 0 and model.inner % each.tp == 0 and model.sequence % each.cp == 0
            shares_tokens = not self.sequence_parallel or model.sequence // each.cp % each.tp == 0
            spreads = each.ep == 1 or (each.tp == 1 and (model.experts or 1) % each.ep == 0)
            if divides and shares_tokens and spreads and each.pp <= model.layers and self.batch % each.batches == 0:
                yield each

    def nothing_divides(
        self,
        rows: Sequence[int],
        schedules: Sequence[str],
        chunks: Sequence[int],
        degrees: Mapping[str, Sequence[int] | None],
    ) -> ScheduleError:
        model = self.model
        limits = "".join(f", {name} of {list(sizes)}" for name, sizes in degrees.items() if sizes is not None)
        return ScheduleError(
            f"no strategy divides {self.world} ranks{limits}: tp divides {model.key_heads} heads of keys and the inner "
            f"width of {model.inner}, cp {model.sequence} tokens, ep {model.experts or 1} experts where tp is 1, pp "
            f"times the stages on a rank ({list(chunks)}) is at most {model.layers} layers, and dp times ep times the "
            f"sequences of a microbatch ({list(rows)}) divides a batch of {self.batch}, for one of the schedules "
            f"{', '.join(schedules)}"
        )

    def candidates(
        self, degrees: Degrees, rows: int, remat: str, entries: Sequence[CatalogueEntry], chunks: Sequence[int]
    ) -> Iterator[Candidate]:
        pieces = Pieces(self, degrees, rows, remat)
        microbatches = self.batch // (degrees.batches * rows)
        for entry in entries:
            for v in chunks if entry.any_chunks else (entry.chunks,):
                try:
                    plan = replace(entry.plan(degrees.pp, microbatches, v, slices=1), replicas=degrees.replicas)
                except ScheduleError:
                    continue
                if plan.stages <= self.model.layers:
                    yield Candidate(pieces, entry, plan)


class Pieces:
    """The costs of a layer, of the embedding and of the head, for degrees and a size of a microbatch."""

    def __init__(self, job: Job, degrees: Degrees, rows: int, remat: str) -> None:
        self.job, self.degrees, self.rows, self.remat = job, degrees, rows, remat
        model, tp, cp, ep = job.model, degrees.tp, degrees.cp, degrees.ep
        tokens = rows * model.sequence / cp
        whole = tokens * model.hidden * job.itemsize  # bytes of an activation
        self.activation = whole / (tp if job.sequence_parallel else 1)
        self.kept = model.layer_kept(rows, job.itemsize, tp=tp, cp=cp, sequence_parallel=job.sequence_parallel, ep=ep)
        self.head_kept = model.head_kept(rows, job.itemsize, tp=tp, cp=cp)
        self.logits = SINGLE * tokens * ceil(model.vocabulary / tp)  # bytes of their gradient
        across, along = job.machine.link(tp, 1), job.machine.link(cp, tp * ep)
        summed = summing(across, tp, whole)
        exchanged = 2 * gathering(along, cp, rows * model.sequence * model.keys / tp * job.itemsize)
        each = 2 * summed + exchanged + 2 * exchanging(job.machine, ep, tp, model.slots * whole)
        self.layer_parameters = model.layer_parameters - model.expert_parameters * (1 - 1 / ep)
        self.layer = self._piece(model.layer_flops, self.layer_parameters, self.kept, each, each)
        three = 3 * summing(across, tp, SINGLE * tokens)  # the largest logit, the sum, and the target's
        self.head = self._piece(model.head_flops, model.head_parameters, self.head_kept, three, summed)
        moved = self._time(0, 2 * whole)
        self.embedding = Piece(moved + summed, 0.0, 2 * moved, summed)
        self.over_shards = job.machine.link(degrees.shards, tp * ep)
        self.over_experts = job.machine.link(ep, tp)

    def _piece(
        self, count: Callable[[float], Flops], parameters: float, kept: Kept, summing: float, summing_back: float
    ) -> Piece:
        """Return the times of a part of the model. A value that is kept is written once, and read once."""
        flops = count(self.rows * self.job.model.sequence)
        moved = self.job.itemsize * parameters / self.degrees.tp + 2 * kept.residuals
        again = self._time(flops.again, moved) if self.remat == "full" else 0.0
        return Piece(
            self._time(flops.forward, moved) + summing,
            self._time(flops.backward_input, moved) + again + summing_back,
            self._time(flops.backward_weight, moved),
            summing,
            summing_back,
        )

    def _time(self, flops: float, moved: float) -> float:
        return self.job.machine.time(flops / (self.degrees.tp * self.degrees.cp), moved, self.job.dtype)

    def link(self, source: int, target: int) -> Link:
        """Return the link between two ranks of a pipeline, of which each is `stride` devices.

        It is the one inside a host where all these devices, from the first of one to the last of the other, are on it.
        """
        machine, stride = self.job.machine, self.degrees.replicas * self.degrees.tp
        first, last = min(source, target) * stride, (max(source, target) + 1) * stride - 1
        return machine.inside if first // machine.on_host == last // machine.on_host else machine.between

    def links(self) -> Link | dict[tuple[int, int], Link]:
        """Return the links between all ranks of a pipeline; one, if they are alike."""
        ranks = range(self.degrees.pp)
        links = {
            (source, target): self.link(source, target) for source in ranks for target in ranks if source != target
        }
        return next(iter(links.values())) if len(set(links.values())) == 1 else links


class Candidate:
    """Degrees with a schedule and a plan, before they are simulated.

    Invariants: no step of it takes less than `bound`, and none needs fewer bytes than `least`.
    """

    def __init__(self, pieces: Pieces, entry: CatalogueEntry, plan: Plan) -> None:
        self.pieces, self.entry, self.plan, self.degrees = pieces, entry, plan, pieces.degrees
        self.layers = divided(pieces.job.model, plan.placement)
        times = [
            self._of_stages(pieces.layer[at], pieces.head[at], pieces.embedding[at]) for at in range(len(Piece._fields))
        ]
        # The first stage needs no gradient of its input: all of its backward is one for its weights.
        self.forward, self.backward_input, self.backward_weight, self.summing, self.summing_back = times
        self.backward_weight[0] += self.backward_input[0]
        self.backward_input[0] = 0.0
        self.parameters = self._parameters()
        self.residuals, self.deferred, self.working = self._sizes()
        self.bound, self.least = self._bound(), self._least()

    def __str__(self) -> str:
        return f"{self.degrees}, {self.entry.name}"

    def _of_stages(self, layer: float, head: float, embedding: float = 0.0) -> list[float]:
        """Return a cost of each stage from those of its parts."""
        each = [count * layer for count in self.layers]
        each[0] += embedding
        each[-1] += head
        return each

    def _parameters(self) -> list[float]:
        model, end = self.pieces.job.model, self.plan.stages - 1
        together = self.plan.rank_of(0, 0) == self.plan.rank_of(end, 0)
        head = model.hidden if model.tied and together else model.head_parameters
        numbers = self._of_stages(self.pieces.layer_parameters, head, model.embedding_parameters)
        return [count / self.degrees.tp for count in numbers]

    def _sizes(self) -> tuple[list[float], list[float], list[float]]:
        """Return each stage's residuals, deferred bytes, and bytes inside its backward."""
        pieces, layer, head = self.pieces, self.pieces.kept, self.pieces.head_kept
        residuals = self._of_stages(layer.residuals, head.residuals)
        deferred = self._of_stages(layer.deferred, head.deferred)
        working = self._of_stages(0.0, pieces.logits)
        if pieces.remat == "full":
            working = [more + size for more, size in zip(working, residuals, strict=True)]
            residuals = [pieces.activation + size for size in self._of_stages(layer.collectives, head.collectives)]
        deferred[0] = residuals[0]
        return residuals, deferred, working

    def _bound(self) -> float:
        """Return seconds that no schedule with these stages falls below.

        A rank waits for the forwards of the stages before its first, and runs all passes of its stages. After its last
        backward, the gradient passes the stages before its first, in a fused backward with their weight gradients; and
        after its last weight gradient, this is added over the replicas.
        """
        plan, is_split = self.plan, _is_split(self.entry.name)
        links = [self.pieces.link(rank, rank + 1) for rank in range(plan.ranks - 1)]
        hop = min((link.latency + self.pieces.activation / link.bandwidth for link in links), default=0.0)
        up = [0.0, *accumulate(forward + hop for forward in self.forward)]
        ups = zip(self.backward_input, self.backward_weight, strict=True)
        down = [0.0, *accumulate(hop + inputs + (0.0 if is_split else weights) for inputs, weights in ups)]
        bound = 0.0
        for rank in range(plan.ranks):
            stages = plan.stages_on(rank)
            numbers = [len(plan.microbatches_of(s, rank)) for s in stages]
            first = stages[0] if min(numbers) == plan.microbatches else 0  # copies share the microbatches
            pairs = [*zip(numbers, stages, strict=True)]
            inputs = sum(n * (self.forward[s] + self.backward_input[s]) for n, s in pairs)
            weights = sum(n * self.backward_weight[s] for n, s in pairs)
            scatter = min(map(self._scatter, stages))
            after = max(weights + scatter, down[first] if is_split else weights + down[first])
            bound = max(bound, up[first] + inputs + after)
        return bound + self._update(self.degrees.shards)

    def _gather(self, stage: int) -> float:
        job, degrees = self.pieces.job, self.degrees
        return gathering(self.pieces.over_shards, degrees.shards, min(job.itemsize, SINGLE) * self.parameters[stage])

    def _scatter(self, stage: int) -> float:
        """Return the seconds of adding gradients: all to shards, and then those that are no experts' over these."""
        model, degrees = self.pieces.job.model, self.degrees
        experts = self.layers[stage] * model.expert_parameters / (degrees.ep * degrees.tp)
        rest = SINGLE * (self.parameters[stage] - experts) / degrees.shards
        to_shards = gathering(self.pieces.over_shards, degrees.shards, SINGLE * self.parameters[stage])
        return to_shards + summing(self.pieces.over_experts, degrees.ep, rest)

    def _least(self) -> float:
        """Return bytes that no schedule with these stages falls below.

        They are those of the shards, and the most of the residuals that are there at the same time with the sums of
        gradients: of one microbatch, or of as many as the order of the schedule says beside each number of sums, where
        this does not depend on costs. With few microbatches there is no sum yet when most of them are in flight.
        """
        plan = self.plan
        counts = [(1, *(0 for _ in plan.stages_on(rank))) for rank in range(plan.ranks)]
        if not (self.entry.by_costs or self.entry.limited):
            counts = _in_flight(self.entry.name, plan.ranks, self.chunks, min(plan.microbatches, 2 * plan.ranks))
        return max(self._least_of(rank, of_rank) for rank, of_rank in enumerate(counts))

    def _least_of(self, rank: int, counts: Sequence[int]) -> float:
        """Return a rank's least bytes with so many microbatches in flight beside no sum, one sum, and so on."""
        stages, itemsize, shards = self.plan.stages_on(rank), self.pieces.job.itemsize, self.degrees.shards
        each = 3 * SINGLE + (itemsize if itemsize < SINGLE else 0)  # parameters, two moments, and the cast
        sums = accumulate(sorted(SINGLE * self.parameters[s] / shards for s in stages), initial=0.0)
        residuals, working = min(self.residuals[s] for s in stages), min(self.working[s] for s in stages)
        several = max(count * residuals + size for count, size in zip(counts, sums, strict=True)) + working
        one = max(self.residuals[s] + self.working[s] for s in stages)
        return each / shards * sum(self.parameters[s] for s in stages) + max(one, several)

    @property
    def chunks(self) -> int:
        return max(len(self.plan.stages_on(rank)) for rank in range(self.plan.ranks))

    def _update(self, shards: int) -> float:
        """Return the seconds of the optimizer's update, and of the exchange of a tied gradient before it."""
        job, plan = self.pieces.job, self.plan
        most = max(sum(self.parameters[s] for s in plan.stages_on(rank)) for rank in range(plan.ranks))
        ends = plan.rank_of(0, 0), plan.rank_of(plan.stages - 1, 0)
        exchange = 0.0
        if job.model.tied and ends[0] != ends[1]:
            link = self.pieces.link(*ends)
            tied = SINGLE * job.model.hidden * job.model.vocabulary / self.degrees.tp / shards
            exchange = link.latency + tied / link.bandwidth
        return exchange + UPDATED * most / shards / job.machine.bandwidth

    @cached_property
    def costs(self) -> Costs:
        first, *later = self.summing_back
        sizes = [SINGLE * count for count in self.parameters]
        itemsize = self.pieces.job.itemsize
        return Costs(
            forward=self.forward,
            backward_input=self.backward_input,
            backward_weight=self.backward_weight,
            collectives={
                Forward: self.summing,
                BackwardInput: [0.0, *later],
                BackwardWeight: [first, *(0.0 for _ in later)],
            },
            communication=self.pieces.links() if self.plan.ranks > 1 else 0.0,
            activation=[self.pieces.activation] * (self.plan.stages - 1) + [float(SINGLE)],
            residuals=self.residuals,
            deferred=self.deferred,
            parameters=sizes,
            gathered=[itemsize * count for count in self.parameters] if itemsize < SINGLE else None,
            gradients=sizes,
            **self._over_replicas(),
        )

    def _over_replicas(self) -> dict[str, Any]:
        """Return the costs of gathers and scatters: over a link, or by stage, of which a part is experts."""
        stages, degrees, over = range(self.plan.stages), self.degrees, self.pieces.over_shards
        if degrees.ep == 1:
            link = Link((degrees.shards - 1) * over.latency, over.bandwidth)
            return {"gather": link, "scatter": link}
        gather, scatter = [self._gather(s) for s in stages], [self._scatter(s) for s in stages]
        return {"gather": gather, "scatter": scatter, "shards": degrees.shards}

    def strategy(self, limit: float) -> Strategy | None:
        """Return the strategy with the most resident stages that fits; None if none does, or the plan is refused.

        Memory with few microbatches decides first, because it is no more than with all of them.
        """
        few = min(self.plan.microbatches, self.plan.ranks)
        try:
            for resident in self.rooms:
                if self.most_bytes(self._placed(few, resident)) <= limit:
                    placed = self._placed(self.plan.microbatches, resident)
                    if few == self.plan.microbatches or self.most_bytes(placed) <= limit:
                        return self._strategy(placed, resident)
        except ScheduleError:  # the schedule does not take the plan
            pass
        return None

    @property
    def rooms(self) -> list[int | None]:
        """The numbers of resident stages to try, the most first.

        Whole parameters are never faster: their all-reduce sends what a scatter and a gather of shards do, all at the
        end of a step.
        """
        if self.degrees.shards == 1:
            return [None]
        return [self.chunks >> halvings for halvings in range(self.chunks.bit_length())]

    def least_bytes(self, microbatches: int | None = None) -> float:
        """Return the bytes with fewest resident stages; infinity if the plan is refused.

        Args:
            microbatches: at most so many, which need no more bytes than all of them.
        """
        number = min(self.plan.microbatches, microbatches or self.plan.microbatches)
        for resident in reversed(self.rooms):
            with suppress(ScheduleError):  # an overlap of two stages needs both of them
                return self.most_bytes(self._placed(number, resident))
        return inf

    def _schedule(self, plan: Plan) -> Schedule:
        return self.entry.schedule(plan, self.costs)

    def _placed(self, microbatches: int, resident: int | None) -> Programs:
        plan = replace(self.plan, microbatches=microbatches)
        programs = lower(self._schedule(plan), plan)
        return programs if resident is None else residence(programs, resident)

    def _working(self) -> tuple[float, ...]:
        return tuple(max(self.working[s] for s in self.plan.stages_on(rank)) for rank in range(self.plan.ranks))

    def most_bytes(self, placed: Programs) -> float:
        accounts = footprint(placed, self.costs)
        return max(account.total + working for account, working in zip(accounts, self._working(), strict=True))

    def _strategy(self, placed: Programs, resident: int | None) -> Strategy:
        job, timeline = self.pieces.job, simulate_programs(placed, self.costs)
        step = timeline.makespan + self._update(self.degrees.shards)
        tokens = job.batch * job.model.sequence
        return Strategy(
            self.degrees,
            self.pieces.rows,
            self.pieces.remat,
            self.entry.name,
            self._schedule(self.plan),
            self.plan,
            self.costs,
            resident,
            self.layers,
            timeline,
            footprint(placed, self.costs),
            self._working(),
            step,
            tokens,
            job.model.step_flops(tokens) / (job.world * job.machine.peak(job.dtype) * step),
        )


@lru_cache(maxsize=256)
def divided(model: ModelShape, placement: Placement) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one.

    Each next layer goes to the rank that has least to compute, and there to the stage that has.
    """
    tokens = model.sequence
    head = model.head_flops(tokens).model / model.layer_flops(tokens).model
    counts, end = [1] * placement.stages, placement.stages - 1
    work = [0.0] * placement.ranks
    for stage, ranks in enumerate(placement.holders):
        for rank in ranks:
            work[rank] += 1 + (head if stage == end else 0.0)
    for _ in range(model.layers - placement.stages):
        stage = min(
            range(placement.stages),
            key=lambda s: (max(work[rank] for rank in placement.holders[s]), counts[s] + (head if s == end else 0.0)),
        )
        counts[stage] += 1
        for rank in placement.holders[stage]:
            work[rank] += 1
    return tuple(counts)


@lru_cache
def _is_split(name: str) -> bool:
    """Return whether a schedule of the catalogue runs weight gradients apart from input gradients."""
    entry = named(name)
    plan = entry.plan(2, 4)
    schedule = entry.schedule(plan)
    effects = (part for rank in range(2) for effect in schedule(rank, plan) for part in parts(effect))
    return any(isinstance(effect, BackwardWeight) for effect in effects)


@lru_cache(maxsize=1024)
def _in_flight(name: str, ranks: int, chunks: int, microbatches: int) -> list[tuple[int, ...]]:
    """Return how many forwards of stages each rank is ahead of their backwards, at most, in the order of a schedule.

    A rank has a number for each number of its stages, from none to all, that have run a weight gradient.

    >>> _in_flight("1f1b", ranks=4, chunks=1, microbatches=4)  # rank 0 begins a sum when no forward is left
    [(4, 3), (3, 3), (2, 2), (1, 1)]
    """
    entry = named(name)
    plan = entry.plan(ranks, microbatches, chunks)
    try:
        schedule = entry.schedule(plan)
        return [_ahead(schedule(rank, plan), len(plan.stages_on(rank))) for rank in range(ranks)]
    except ScheduleError:  # it does not take the plan, and says so again when it is lowered
        return [(1, *(0 for _ in plan.stages_on(rank))) for rank in range(ranks)]


def _ahead(effects: Iterable[Effect], stages: int) -> tuple[int, ...]:
    """Return how many forwards a rank is ahead, at most, by the number of its stages that have a sum of gradients.

    They are counted at the ends of effects, as bytes are: the two parts of an overlap end together.
    """
    most, ahead, summed = [0] * (stages + 1), 0, set[int]()
    for effect in effects:
        for part in parts(effect):
            ahead += isinstance(part, Forward) - isinstance(part, Backward | BackwardInput)
            if isinstance(part, Backward | BackwardWeight):
                summed.add(part.stage)
        most[len(summed)] = max(most[len(summed)], ahead)
    return tuple(most)
