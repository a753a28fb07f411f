"""The plan of a pipeline: the ranks of stages (Placement), the edges between stages (Edges), and both together (Plan).

No torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from math import lcm
from typing import Any, Literal, get_args

from fpipe.effects import Effect
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked, checked_class, is_whole

Cotangents = Literal["by_consumer", "by_rank"]
"""The order of adding the gradients of an output that several stages read: each by itself, or first those of a rank."""
_LISTED = 16  # stages of a placement whose ranks its repr lists


def call_of(instance: Any, *positional: str, **values: Any) -> str:
    """Return the call that makes a dataclass's instance, without the arguments that have their defaults.

    Args:
        positional: names of arguments to write without a name, first of all.
        values: those to write in place of the instance's.
    """
    arguments = []
    for field in fields(instance):
        value = values.get(field.name, getattr(instance, field.name))
        if field.default is MISSING or value != field.default:
            arguments.append(f"{'' if field.name in positional else f'{field.name}='}{value!r}")
    return f"{type(instance).__name__}({', '.join(arguments)})"


def check_plan(plan: object) -> None:
    """Raise TypeError for what is no plan."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, as pipeline.plan(placement, microbatches) makes it, not {plan!r}")


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if not is_whole(count, least=1):
            raise ScheduleError(f"{name} must be a whole number of at least 1, not {count!r}")


@dataclass(frozen=True, init=False)
class Placement:
    """The rank of each stage; a stage with copies has several ranks.

    >>> Placement.loop(ranks=2, chunks=2)
    Placement((0, 1, 0, 1))
    >>> Placement.v(ranks=2)
    Placement((0, 1, 1, 0))
    >>> Placement.wave(ranks=2, waves=2)
    Placement((0, 1, 1, 0, 0, 1, 1, 0))
    >>> Placement.both_ways(ranks=2)
    Placement(((0, 1), (1, 0)))

    Raises:
        ScheduleError: a stage without a rank, or a rank without a stage.
    """

    holders: tuple[tuple[int, ...], ...]

    def __init__(self, ranks: Sequence[int | Sequence[int]]) -> None:
        try:
            holders = tuple((r,) if isinstance(r, int) else tuple(map(operator.index, r)) for r in ranks)
        except TypeError:
            raise ScheduleError(
                f"a placement names the rank of each stage, as in Placement((0, 1, 1, 0)), not {ranks!r}: for one "
                "stage on each of 4 ranks take Placement.loop(4)"
            ) from None
        object.__setattr__(self, "holders", holders)
        if not holders:
            raise ScheduleError("a placement needs at least one stage")
        for stage, copies in enumerate(holders):
            if not copies:
                raise ScheduleError(f"stage {stage} has no rank: name one, as in Placement((0, 1, 1, 0))")
            if min(copies) < 0 or len(set(copies)) < len(copies):
                raise ScheduleError(f"stage {stage} is placed on ranks {copies}: take different ranks, from 0")
        used = sorted({rank for copies in holders for rank in copies})
        if used[-1] >= len(used):
            idle = next(rank for rank, each in enumerate(used) if rank != each)
            raise ScheduleError(f"rank {idle} has no stage: ranks are numbered 0 to {used[-1]} without gaps")

    @classmethod
    def loop(cls, ranks: int, chunks: int = 1) -> Placement:
        """Place stage s on rank s mod ranks: a chain, or `chunks` rounds of it (Narayanan et al. 2021)."""
        _positive(ranks=ranks, chunks=chunks)
        return cls([s % ranks for s in range(ranks * chunks)])

    @classmethod
    def v(cls, ranks: int) -> Placement:
        """Place two stages on each rank, down the ranks and back up (Qi et al. 2024, ZB-V)."""
        _positive(ranks=ranks)
        return cls([*range(ranks), *reversed(range(ranks))])

    @classmethod
    def wave(cls, ranks: int, waves: int) -> Placement:
        """Place stages down the ranks and back up, `waves` times: two stages on each rank in each (Liu et al. 2023).

        An output stays on its rank at every turn: of the 2 * ranks * waves - 1 edges of a chain, 2 * waves - 1 do.
        (Hanayo, arXiv 2308.15762, section 3.)
        """
        _positive(ranks=ranks, waves=waves)
        return cls([*range(ranks), *reversed(range(ranks))] * waves)

    @classmethod
    def both_ways(cls, ranks: int) -> Placement:
        """Place two copies of each stage, one counted from either end (DualPipe, DeepSeek-V3 report)."""
        _positive(ranks=ranks)
        if ranks % 2:
            raise ScheduleError(f"both_ways needs an even number of ranks, not {ranks}")
        return cls([(s, ranks - 1 - s) for s in range(ranks)])

    @classmethod
    def vocabulary(cls, ranks: int) -> Placement:
        """Place a part of the embedding, a block and a part of the output layer on each rank; the loss on the last.

        (Yeung et al., arXiv 2411.05288.) `Edges.vocabulary` has the edges.

        >>> Placement.vocabulary(ranks=2)
        Placement((0, 1, 0, 1, 0, 1, 1))
        """
        _positive(ranks=ranks)
        return cls([*range(ranks)] * 3 + [ranks - 1])

    @property
    def stages(self) -> int:
        return len(self.holders)

    @cached_property
    def ranks(self) -> int:
        return 1 + max(rank for copies in self.holders for rank in copies)

    def __repr__(self) -> str:
        """Return the call that makes it: the factory's where the list of ranks is long."""
        if self.stages > _LISTED:
            ranks, chunks = self.ranks, max(1, self.stages // self.ranks)
            if self == Placement.loop(ranks, chunks):
                return f"Placement.loop({ranks}{f', chunks={chunks}' if chunks > 1 else ''})"
            if self == Placement.v(ranks):
                return f"Placement.v({ranks})"
            if chunks % 2 == 0 and self == Placement.wave(ranks, chunks // 2):
                return f"Placement.wave({ranks}, waves={chunks // 2})"
            if ranks % 2 == 0 and self == Placement.both_ways(ranks):
                return f"Placement.both_ways({ranks})"
        return f"Placement({tuple(h[0] if len(h) == 1 else h for h in self.holders)})"


@dataclass(frozen=True, init=False)
class Edges:
    """The stages that each stage reads: a DAG. The output of the last stage leaves the pipeline.

    >>> Edges([(), (0,), (0, 1)]).consumers(0)
    (2, 1)

    Raises:
        ScheduleError: an edge goes backwards, or no stage reads the output of a stage.
    """

    reads: tuple[tuple[int, ...], ...]

    @checked()
    def __init__(self, reads: Sequence[Sequence[int]]) -> None:
        object.__setattr__(self, "reads", tuple(tuple(sorted(set(r))) for r in reads))
        last = len(self.reads) - 1
        for stage, sources in enumerate(self.reads):
            for source in sources:
                if not 0 <= source < stage:
                    raise ScheduleError(
                        f"stage {stage} reads stage {source}: an edge goes from a lower stage to a higher one, and "
                        f"there are stages 0 to {last}"
                    )
        for stage in range(len(self.reads)):
            if stage < last and not self.consumers(stage):
                raise ScheduleError(
                    f"stage {stage} is read by no stage, and only the last stage's output ({last}) leaves the pipeline"
                )

    def __repr__(self) -> str:
        return call_of(self, "reads")

    @classmethod
    def chain(cls, stages: int) -> Edges:
        """Return edges on which each stage reads the stage before it."""
        _positive(stages=stages)
        return cls([(s - 1,) if s else () for s in range(stages)])

    @classmethod
    def vocabulary(cls, ranks: int) -> Edges:
        """Return the edges of `Placement.vocabulary(ranks)`.

        The first block reads all parts of the embedding, all parts of the output layer read the last block, and the
        loss reads these.

        >>> Edges.vocabulary(ranks=2)
        Edges(((), (), (0, 1), (2,), (3,), (3,), (4, 5)))
        """
        _positive(ranks=ranks)
        blocks = [(ranks + at,) for at in range(ranks - 1)]
        first, last = tuple(range(ranks)), 2 * ranks - 1
        return cls([*[()] * ranks, first, *blocks, *[(last,)] * ranks, tuple(range(2 * ranks, 3 * ranks))])

    def sources(self, stage: int) -> tuple[int, ...]:
        """Return the stages that this one reads, lowest first."""
        return self.reads[stage]

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Return the stages that read this one, highest first: the order in which their gradients are added."""
        return self._consumers[stage]

    @cached_property
    def _consumers(self) -> tuple[tuple[int, ...], ...]:
        consumers: list[list[int]] = [[] for _ in self.reads]
        for stage, sources in enumerate(self.reads):
            for source in sources:
                consumers[source].append(stage)
        return tuple(tuple(reversed(stages)) for stages in consumers)

    @property
    def skips(self) -> bool:
        """Whether any stage reads a stage other than the one just before it."""
        return any(source != stage - 1 for stage, sources in enumerate(self.reads) for source in sources)


def check_cotangents(cotangents: object) -> None:
    """Raise ScheduleError if these are none of `Cotangents`."""
    if cotangents not in get_args(Cotangents):
        raise ScheduleError(f"cotangents must be 'by_consumer' or 'by_rank', not {cotangents!r}")


@checked_class("placement", "microbatches", "replicas", "cotangents")
@dataclass(frozen=True)
class Plan:
    """All that a schedule depends on: the placement, the number of microbatches, the edges, ties, and what is trained.

    Args:
        placement: stage -> ranks.
        microbatches: their number; copies of a stage run them in turn (round robin: Narayanan et al., "PipeDream", SOSP
            2019, section 3.2).
        edges: the DAG, a chain by default; `Pipeline.plan` fills it in.
        ties: groups of stages that share a parameter, e.g. `((0, 3),)`; filled in likewise.
        tokens: the tokens that a program generates for each prompt, a microbatch being some prompts; `generate` fills
            it in. With `prefills`, all slices of the prompts but the last count too.
        prefills: the slices of the prompts, which a stage runs one after the other before the first token; `generate`
            fills it in.
        replicas: copies of the whole pipeline, which all run the same programs, each on its own microbatches: data
            parallelism. The plan is that of one replica.
        gathered: the stages whose parameters are whole only from a `Gather` to a `Release`; lowering fills it in.
        batch_gradients: the stages that have gradients of what they read of the batch or of the target;
            `value_and_grad` fills it in.
        cotangents: "by_consumer": each stage's gradient of an output travels by itself. "by_rank": a rank adds the
            gradients of its stages, from the highest down, and sends the sum; the sums are added from the rank of the
            highest stage down, so that bits depend on the placement. `Pipeline.plan` fills it in.
        trained: the stages with trained parameters, which alone have weight gradients. A stage has input gradients if
            a stage before it is trained, or if it or one before it is among `batch_gradients`. None if every stage has
            both halves of a backward. `Pipeline.plan` fills it in for a pipeline with frozen stages.
        slices: parts into which each microbatch is cut along its sequences. On a stage, the slices of a microbatch run
            forward from the first and backward from the last, and each passes its `Carry` on to the next.

    Raises:
        ScheduleError: a count is not positive, two counts don't fit each other, or `cotangents` is neither of the two.

    >>> plan = Plan(Placement.loop(ranks=4), microbatches=8, trained=[1, 3])
    >>> [(plan.is_trained(stage), plan.differentiated_sources(stage)) for stage in range(4)]
    [(False, ()), (True, ()), (False, (1,)), (True, (2,))]
    """

    placement: Placement
    microbatches: int
    edges: Edges = Edges(())
    ties: tuple[tuple[int, ...], ...] = ()
    replicas: int = 1
    gathered: frozenset[int] = frozenset()
    batch_gradients: frozenset[int] = frozenset()
    cotangents: Cotangents = "by_consumer"
    trained: Collection[int] | None = None
    slices: int = 1
    tokens: int = 1
    prefills: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement):
            raise ScheduleError(
                f"placement must be a Placement, such as Placement.loop(ranks=2), not {self.placement!r}"
            )
        counts = {"replicas": self.replicas, "slices": self.slices, "tokens": self.tokens}
        _positive(microbatches=self.microbatches, **counts, prefills=self.prefills)
        if self.prefills > self.tokens:
            raise ScheduleError(
                f"prompts of {self.prefills} slices and at least one token need tokens={self.prefills}, not "
                f"{self.tokens}"
            )
        if not self.edges.reads:
            object.__setattr__(self, "edges", Edges.chain(self.stages))
        if len(self.edges.reads) != self.stages:
            raise ScheduleError(f"the edges have {len(self.edges.reads)} stages, the placement {self.stages}")
        for stage, copies in enumerate(self.placement.holders):
            if self.microbatches % len(copies):
                raise ScheduleError(
                    f"stage {stage} has {len(copies)} copies, which share the microbatches equally: "
                    f"take a multiple of {len(copies)}, not {self.microbatches}"
                )
        check_cotangents(self.cotangents)
        for stage in (s for group in self.ties for s in group):
            if not 0 <= stage < self.stages:
                raise ScheduleError(f"a tie names stage {stage}: there are stages 0 to {self.stages - 1}")
        if self.trained is not None:
            object.__setattr__(self, "trained", frozenset(self.trained))
            if unknown := [s for s in self.trained if not (isinstance(s, int) and 0 <= s < self.stages)]:
                raise ScheduleError(f"trained names stage {unknown[0]!r}: there are stages 0 to {self.stages - 1}")

    def __repr__(self) -> str:
        chain = {"edges": Edges(())} if self.edges == Edges.chain(self.stages) else {}
        trained = {} if self.trained is None else {"trained": tuple(sorted(self.trained))}
        return call_of(self, "placement", **chain, **trained)

    def _repr_html_(self) -> str:
        """Return the table of stages by rank that a notebook shows."""
        rows = "".join(
            f"<tr><th>rank {rank}</th><td>{', '.join(map(str, self.stages_on(rank)))}</td></tr>"
            for rank in range(self.ranks)
        )
        caption = f"{self.stages} stages on {self.ranks} ranks, {self.microbatches} microbatches"
        caption += f" of {self.slices} slices" if self.slices > 1 else ""
        caption += f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"<table><caption>{caption}</caption><tr><th></th><th>stages</th></tr>{rows}</table>"

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def units(self) -> int:
        """The number of slices of all microbatches; without slices, that of the microbatches."""
        return self.microbatches * self.slices

    def unit(self, microbatch: int, slice: int = 0) -> int:  # noqa: A002
        """Return the number of a slice, counted over all microbatches."""
        return microbatch * self.slices + slice

    @cached_property
    def limits(self) -> dict[str, int]:
        """The number of stages, microbatches, slices, tokens or ranks, by the name that effects have for one."""
        counts = {"microbatch": self.microbatches, "slice": self.slices, "token": self.tokens, "rank": self.ranks}
        return {"stage": self.stages, "consumer": self.stages, **counts}

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, lowest first.

        Raises:
            ScheduleError: the plan has no such rank.
        """
        try:
            return self._stages_on[rank]
        except (KeyError, TypeError):
            raise ScheduleError(f"there is no rank {rank!r}: the plan has ranks 0 to {self.ranks - 1}") from None

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a stage for a microbatch."""
        ranks = self.placement.holders[stage]
        return ranks[microbatch % len(ranks)]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage: one, or one for each of its copies."""
        return self.placement.holders[stage]

    def microbatches_of(self, stage: int, rank: int) -> range:
        """Return the microbatches that a rank runs through one of its stages.

        >>> plan = Plan(Placement([(0, 1), 2]), microbatches=6)
        >>> [[*plan.microbatches_of(0, rank)] for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 5]]
        """
        ranks = self.placement.holders[stage]
        return range(ranks.index(rank), self.microbatches, len(ranks))

    @cached_property
    def cycle(self) -> int:
        """The number of microbatches after which the ranks that run them are the same again; 1 without copies."""
        return lcm(*map(len, self.placement.holders))

    def forward_order(self, stage: int, rank: int) -> list[tuple[int, int]]:
        """Return (microbatch, slice) of each forward of a stage on a rank, in order.

        >>> Plan(Placement.loop(2), 2, slices=2).forward_order(0, 0)
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        """
        return [(m, t) for m in self.microbatches_of(stage, rank) for t in range(self.slices)]

    def backward_order(self, stage: int, rank: int) -> list[tuple[int, int]]:
        """Return (microbatch, slice) of each backward of a stage on a rank, in order: the last slice first.

        >>> Plan(Placement.loop(2), 2, slices=2).backward_order(0, 0)
        [(0, 1), (0, 0), (1, 1), (1, 0)]
        """
        return [(m, t) for m in self.microbatches_of(stage, rank) for t in reversed(range(self.slices))]

    def sources(self, stage: int) -> tuple[int, ...]:
        """Return the stages that this one reads, lowest first."""
        return self.edges.sources(stage)

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Return the stages that read this one, highest first."""
        return self.edges.consumers(stage)

    def terms(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """Return the stages whose gradients of a stage's output are added to its cotangent, in the order of the sum.

        With "by_rank", the gradient of the lowest stage on a rank is the sum of all on this rank.

        >>> placement, edges = Placement.loop(ranks=2, chunks=2), Edges([(), (0,), (0, 1), (0, 1, 2)])
        >>> Plan(placement, 1, edges).terms(0, 0), Plan(placement, 1, edges, cotangents="by_rank").terms(0, 0)
        ((3, 2, 1), (1, 2))
        """
        return self.consumers(stage) if self.cotangents == "by_consumer" else self._chains(stage, microbatch)[0]

    def added_to(self, stage: int, consumer: int, microbatch: int) -> int | None:
        """Return the next higher stage on a consumer's rank that reads a stage, to whose gradient it adds its own.

        None where there is none, and always with "by_consumer".
        """
        return None if self.cotangents == "by_consumer" else self._chains(stage, microbatch)[1].get(consumer)

    def _chains(self, stage: int, microbatch: int) -> tuple[tuple[int, ...], dict[int, int | None]]:
        """Return the terms of a stage, and the next higher consumer on the rank of each, which are kept."""
        key = stage, microbatch % self.cycle
        if key not in self._known_chains:
            lowest: dict[int, int] = {}  # by rank, in the order of the highest consumers
            higher: dict[int, int | None] = {}
            for consumer in self.consumers(stage):
                rank = self.rank_of(consumer, microbatch)
                higher[consumer], lowest[rank] = lowest.get(rank), consumer
            self._known_chains[key] = tuple(lowest.values()), higher
        return self._known_chains[key]

    @cached_property
    def _known_chains(self) -> dict[tuple[int, int], tuple[tuple[int, ...], dict[int, int | None]]]:
        return {}

    def sharers(self, stage: int) -> tuple[tuple[int, int], ...]:
        """Return every (stage, rank) whose weight gradients are added to this stage's: its copies and its ties'."""
        return self._sharers[stage]

    def is_trained(self, stage: int) -> bool:
        """Return whether a stage has weight gradients."""
        return self.trained is None or stage in self.trained

    def is_differentiated(self, stage: int) -> bool:
        """Return whether a stage's output has gradients: it or a stage before it is trained or has batch gradients."""
        return self.trained is None or stage in self._differentiated

    def differentiated_sources(self, stage: int) -> tuple[int, ...]:
        """Return the stages that this one reads and gives input gradients, lowest first."""
        return tuple(filter(self.is_differentiated, self.sources(stage)))

    def has_input_half(self, stage: int) -> bool:
        """Return whether a stage's backward has input gradients; where `trained` is not given, every stage's has.

        With slices, those of what the slice before passes on count too.
        """
        if self.trained is None or stage in self.batch_gradients or (self.slices > 1 and self.is_differentiated(stage)):
            return True
        return any(map(self.is_differentiated, self.sources(stage)))

    @cached_property
    def _differentiated(self) -> frozenset[int]:
        differentiated = {*(range(self.stages) if self.trained is None else self.trained), *self.batch_gradients}
        for stage in range(self.stages):
            if not differentiated.isdisjoint(self.sources(stage)):
                differentiated.add(stage)
        return frozenset(differentiated)

    @cached_property
    def _stages_on(self) -> dict[int, tuple[int, ...]]:
        stages_on: dict[int, list[int]] = {rank: [] for rank in range(self.ranks)}
        for stage, ranks in enumerate(self.placement.holders):
            for rank in ranks:
                stages_on[rank].append(stage)
        return {rank: tuple(stages) for rank, stages in stages_on.items()}

    @cached_property
    def _sharers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        groups = [{stage} for stage in range(self.stages)]
        for tie in self.ties:
            for stage in tie:
                groups[stage].update(tie)
        holders = self.placement.holders
        trained = [sorted(filter(self.is_trained, group)) for group in groups]
        return tuple(tuple((t, rank) for t in group for rank in holders[t]) for group in trained)


Schedule = Callable[[int, Plan], Iterator[Effect]]
