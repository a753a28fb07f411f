"""The named schedules as data: placement, factory, peak memory, idea and source of each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from fpipe.costs import Costs
from fpipe.errors import ScheduleError
from fpipe.errors.arguments import checked
from fpipe.plan import Edges, Placement, Plan, Schedule
from fpipe.programs.residence import Residence
from fpipe.schedules.controllable_memory import v_auto, v_half, v_min
from fpipe.schedules.dualpipe import dualpipe, dualpipe_v
from fpipe.schedules.gpipe import gpipe
from fpipe.schedules.interleaved import interleaved_1f1b, interleaved_1f1b_overlap
from fpipe.schedules.interleaved_zb import interleaved_zb
from fpipe.schedules.looped_bfs import looped_bfs
from fpipe.schedules.one_f_one_b import one_f_one_b
from fpipe.schedules.seq_1f1b import seq_1f1b, seq_zb
from fpipe.schedules.vocabulary_1f1b import vocabulary_1f1b
from fpipe.schedules.zb_auto import zb_auto
from fpipe.schedules.zb_v import zb_v
from fpipe.schedules.zero_bubble import zb_h1, zb_h2
from fpipe.timelines.timeline import Timeline

PlacementFactory = Callable[[int, int], Placement]


@dataclass(frozen=True)
class CatalogueEntry:
    """A named schedule.

    Args:
        function: the schedule; `(rank, plan, costs=)` with `by_costs`. With `limited`, a function of plan, costs and
            memory limit, in microbatches of a whole rank, or `memory_limit_bytes=`, that returns one.
        place: (ranks, chunks) -> placement; `placement` is its name.
        chunks: stages on each rank by default; with `any_chunks`, a plan may have another number.
        peak: the peak in flight, in microbatches of a rank's share of the model, at equal costs and m large enough:
            p ranks, v chunks, m microbatches, s slices. Where stages are not alike, it says of which.
        peak_holds: where it holds; everywhere if empty.
        slices: of each microbatch by default; None for a schedule that takes no slices.
        edges: ranks -> the edges between stages that are not alike, so that no cut of a chain of layers makes them;
            None for schedules of any chain.
        cost: the closed form of a step's time, the longest span of a rank, in these terms, the times F, B, W of a
            rank's share of the model, S = F + B + W, c of a transfer, and the limit k; empty where none is known.
        holds: where it holds; everywhere if empty.
        peaks: the peak of rank r from 0 to p - 1, as `peak` has the largest; empty where costs or a limit decide, or
            where `peak` says all.
        peaks_hold: where they hold; everywhere if empty.
        idle: a bound from above on each rank's idle time in a step, a late start included, where the cost is no closed
            form; O is the time of an overlapped forward and backward of a rank's share. Empty where none is known.
        idle_holds: where it holds.
        takes_copies: whether single stages may have copies, with one stage on each rank.
        by_costs: whether it orders by costs.
        limited: whether it orders by costs and under the memory limit, in microbatches or bytes.
    """

    name: str
    function: Callable[..., Any]
    place: PlacementFactory
    placement: str
    chunks: int
    any_chunks: bool
    peak: str
    idea: str
    source: str
    cost: str = ""
    holds: str = ""
    peak_holds: str = ""
    peaks: str = ""
    peaks_hold: str = ""
    idle: str = ""
    idle_holds: str = ""
    takes_copies: bool = False
    by_costs: bool = False
    limited: bool = False
    slices: int | None = None
    edges: Callable[[int], Edges] | None = None

    def __repr__(self) -> str:
        return f"CATALOGUE[{self.name!r}]"

    def plan(self, ranks: int, microbatches: int, chunks: int | None = None, slices: int | None = None) -> Plan:
        """Return the plan with the schedule's own placement.

        Raises:
            ScheduleError: chunks, ranks or microbatches that the placement does not allow, or slices that the schedule
                does not take.

        >>> CATALOGUE["1f1b"].plan(ranks=2, microbatches=4, chunks=2)
        Traceback (most recent call last):
        fpipe.errors.ScheduleError: 1f1b has 1 stage on each rank, not 2
        """
        if chunks not in (None, self.chunks) and not self.any_chunks:
            stages = "stage" if self.chunks == 1 else "stages"
            raise ScheduleError(f"{self.name} has {self.chunks} {stages} on each rank, not {chunks}")
        placement = self.place(ranks, self.chunks if chunks is None else chunks)
        if self.slices is None and slices not in (None, 1):
            takes = ", ".join(name for name, entry in CATALOGUE.items() if entry.slices)
            raise ScheduleError(f"{self.name} takes no slices: leave them out, or take one of {takes}")
        edges = Edges(()) if self.edges is None else self.edges(ranks)
        return Plan(placement, microbatches, edges, slices=slices or self.slices or 1)

    def schedule(
        self,
        plan: Plan,
        costs: Costs = Costs(),
        memory_limit: float | Sequence[float] | None = None,
        *,
        memory_limit_bytes: float | None = None,
        resident: Residence | int | None = None,
        effort: float = 1.0,
    ) -> Schedule:
        """Return the schedule for a plan; those that order by costs or under a memory limit use these.

        Args:
            resident: as in `fpipe.lower`, for the account of bytes.
            effort: as of `zb_auto`, of schedules that order under a limit.

        Raises:
            ScheduleError: no order fits the limit or the costs. A wrong plan raises when the schedule runs.
        """
        if self.limited:
            limits: dict[str, Any] = {"memory_limit_bytes": memory_limit_bytes, "resident": resident, "effort": effort}
            schedule: Schedule = self.function(plan, costs, memory_limit, **limits)
            return schedule
        return partial(self.function, costs=costs) if self.by_costs else self.function


def _wave(ranks: int, chunks: int) -> Placement:
    if chunks % 2:
        raise ScheduleError(f"a wave has two stages on each rank: take an even number of them, not {chunks}")
    return Placement.wave(ranks, waves=chunks // 2)


PLACES: dict[str, PlacementFactory] = {
    "loop": Placement.loop,
    "v": lambda ranks, chunks: Placement.v(ranks),
    "wave": _wave,
    "both-ways": lambda ranks, chunks: Placement.both_ways(ranks),
}

# place, placement, chunks, any_chunks
_ANY = (PLACES["loop"], "any", 1, True)
_CHAIN = (PLACES["loop"], "chain", 1, False)
_LOOP = (PLACES["loop"], "loop", 2, True)
_V = (PLACES["v"], "V", 2, False)
_BOTH_WAYS = (PLACES["both-ways"], "both ways", 2, False)
_VOCABULARY = (lambda ranks, chunks: Placement.vocabulary(ranks), "vocabulary", 3, False)

_AUTO = "the best order found for the costs and the limit"
_ZERO_BUBBLE, _CONTROLLABLE = "Qi et al. 2024, zero bubble", "Qi et al. 2024, controllable memory"

_EQUAL = "F = B = W, c = 0"

# name, function, placement, peak, idea, source; cost, where it holds
_ENTRIES = (
    CatalogueEntry(
        "gpipe",
        gpipe,
        *_ANY,
        "m",
        "all forwards, then all backwards",
        "Huang et al. 2019",
        "(m + p - 1)*S + 2*(p - 1)*c",
        "one stage on each rank, no stage has copies",
        peak_holds="no stage has copies",
        takes_copies=True,
        slices=1,
    ),
    CatalogueEntry(
        "1f1b",
        one_f_one_b,
        *_CHAIN,
        "p",
        "a forward and a backward in turn",
        "Narayanan et al. 2019",
        "(m + p - 1)*S + (2*(p - 1)*m/p + 2*(p - 2))*c",
        "p divides m, p >= 2, no stage has copies",
        peak_holds="no stage has copies",
        peaks="min(m, p - r)",
        peaks_hold="no stage has copies",
        takes_copies=True,
    ),
    CatalogueEntry(
        "interleaved-1f1b",
        interleaved_1f1b,
        *_LOOP,
        "p + (p-1)/v",
        "1F1B over several chunks of a rank",
        "Narayanan et al. 2021",
        "m*S + (p - 1)*S/v + 2*(p*v - 1)*c",
        "p divides m, p >= 2, m >= 2*p, c <= min(F, B + W)/v",
        peaks="min(m*v, 2*(p - r - 1) + (v - 1)*p + 1)/v",
        peaks_hold="p divides m",
    ),
    CatalogueEntry(
        "interleaved-1f1b-overlap",
        interleaved_1f1b_overlap,
        *_LOOP,
        "p + p/v",
        "interleaved 1F1B, each forward overlapped with a backward",
        "Megatron-LM 2025",
        "m*S + (p - 1)*S/v",
        "m >= p, c = 0, and a pair takes as long as its parts",
        peaks="min(m*v, 2*(p - r - 1) + (v - 1)*p + 2)/v",
        peaks_hold="p divides m",
    ),
    CatalogueEntry(
        "looped-bfs",
        looped_bfs,
        *_LOOP,
        "m",
        "every chunk takes all microbatches at a time",
        "Lamy-Poirier 2023",
        "m*S + (p - 1)*S/v",
        "m >= p, c = 0",
    ),
    CatalogueEntry(
        "zb-h1",
        zb_h1,
        *_CHAIN,
        "p",
        "1F1B, its weight gradients in the bubble",
        _ZERO_BUBBLE,
        "m*S + (p - 1)*(B + 2*c + max(0, F - W + 2*c))",
        "m >= 2*p, 2*c <= W",
    ),
    CatalogueEntry(
        "zb-h2",
        zb_h2,
        *_CHAIN,
        "2*p - 1",
        "ZB-H1 with more forwards ahead: no bubble",
        _ZERO_BUBBLE,
        "m*S + (p - 1)*max(0, F + B - 2*W + 2*c, B - F + 2*c)",
        "m >= 2*p - 1, 2*c <= F + B",
    ),
    CatalogueEntry(
        "seq-1f1b",
        seq_1f1b,
        *_CHAIN,
        "1 + (p - 1)/s",
        "1F1B over slices of the sequences, which a stage carries values between",
        "Sun et al. 2024",
        "m*S + (p - 1)*S/s",
        "c = 0",
        peaks="min(m*s, p - r - 1 + s)/s",
        slices=2,
    ),
    CatalogueEntry(
        "seq-zb",
        seq_zb,
        *_CHAIN,
        "1 + (p - 1)/s",
        "the same, its weight gradients in the bubble",
        "after Sun et al. 2024 and ZB-H1",
        "m*S + (p - 1)*(F + B - W)/s",
        "m*s >= p - 1 + s, W <= F, c = 0",
        slices=2,
    ),
    CatalogueEntry(
        "vocabulary-1f1b",
        vocabulary_1f1b,
        *_VOCABULARY,
        "p + 1 blocks",
        "1F1B whose ranks also have a part of the embedding and of the output layer each",
        "Yeung et al. 2024",
        "m*S + (p - 1)*S*2/3",
        f"{_EQUAL}, a third of S is the output layer's",
        edges=Edges.vocabulary,
    ),
    CatalogueEntry(
        "zb-auto",
        zb_auto,
        *_ANY,
        "the limit",
        _AUTO,
        _ZERO_BUBBLE,
        "m*S + max(0, 2*p - 1 - k)*F",
        f"one stage on each rank, no stage has copies, {_EQUAL}, p <= k <= m",
        takes_copies=True,
        limited=True,
    ),
    CatalogueEntry(
        "interleaved-zb",
        interleaved_zb,
        *_LOOP,
        "p",
        "interleaved 1F1B, its weight gradients in the bubble",
        "after ZB-H1",
        "m*S + (p - 1)*(F + B - W)/v",
        "m >= p, W <= min(F, B), c = 0",
    ),
    CatalogueEntry(
        "zb-v",
        zb_v,
        *_V,
        "p",
        "no bubble with the memory of 1F1B, over a V",
        _ZERO_BUBBLE,
        "m*S",
        f"{_EQUAL}, m >= 2*p - 1",
        by_costs=True,
    ),
    CatalogueEntry(
        "v-half",
        v_half,
        *_V,
        "(p + 2) // 2",
        "about half of that memory, over a V",
        _CONTROLLABLE,
        "m*S + max(0, 6*p - 6*((p + 2)//2) - 1)*F/2",
        f"{_EQUAL}, m > p",
        by_costs=True,
    ),
    CatalogueEntry(
        "v-min",
        v_min,
        *_V,
        "(p + 4) // 3",
        "about a third of that memory, over a V",
        _CONTROLLABLE,
        "m*S + max(0, 6*p - 6*((p + 4)//3) - 1)*F/2",
        f"{_EQUAL}, m > p",
        by_costs=True,
    ),
    CatalogueEntry(
        "v-auto",
        v_auto,
        *_V,
        "the limit",
        f"{_AUTO}, over a V",
        _CONTROLLABLE,
        "m*S + max(0, 6*p - 6*k - 1)*F/2",
        f"{_EQUAL}, m >= 2*p - 1; no order within the limit takes less",
        limited=True,
    ),
    CatalogueEntry(
        "dualpipe-v",
        dualpipe_v,
        *_V,
        "p + 1/2",
        "DualPipe folded into a V, without copies",
        "DualPipe repository 2025",
        "m*S + (p - 1)*(F + 2*B - W)/2",
        "F = B >= W, c = 0, m >= 2*p - 1, and a pair takes as long as its parts",
        peaks="p + 1/2",
        peaks_hold="m >= 2*p",
        idle="(p - 1)*(O + B - 2*W)/2",
        idle_holds="F <= B, W <= B, O >= B + W, c = 0, m >= 2*p - 1",
    ),
    CatalogueEntry(
        "dualpipe",
        dualpipe,
        *_BOTH_WAYS,
        "p + 1",
        "microbatches from both ends, through two copies of each stage",
        "DeepSeek-V3 2024",
        "m*S + (p/2 - 1)*(F + 2*B - W)",
        "F = B >= W, c = 0, m >= 2*p - 2, and a pair takes as long as its parts",
        peaks="p + 1",
        peaks_hold="m >= 2*p",
        idle="(p/2 - 1)*(O + B - 2*W)",
        idle_holds="F <= B, W <= B, O >= B + W, c = 0, m >= 2*p - 2",
    ),
)
CATALOGUE = {entry.name: entry for entry in _ENTRIES}


@checked()
def get(name: str) -> Schedule:
    """Return a schedule of the catalogue. Where a function takes a schedule, it also takes such a name.

    Args:
        name: a key of `CATALOGUE`, or the name of its function; capitals, - and _ make no difference.

    Raises:
        ScheduleError: there is none; or it is not one order, but ordered for a plan and its costs.

    >>> get("zb-v") is zb_v
    True
    """
    entry = named(name)
    if entry.limited:
        function = entry.function.__name__
        raise ScheduleError(
            f"{entry.name} is ordered for a plan and its costs: take schedules.{function}(plan, costs), or "
            f"schedules.{function}(plan, costs, memory_limit)"
        )
    schedule: Schedule = entry.function
    return schedule


def named(name: str) -> CatalogueEntry:
    """Return the entry of a name, as `get` takes it.

    Raises:
        ScheduleError: there is none.
    """
    plain = name.lower().replace("_", "-")
    names = CATALOGUE | {entry.function.__name__.replace("_", "-"): entry for entry in _ENTRIES}
    if plain not in names:
        near = sorted(get_close_matches(plain, CATALOGUE, n=2, cutoff=0.5))
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(CATALOGUE)}"
        raise ScheduleError(f"no schedule is called {name!r}: {hint}")
    return names[plain]


def shares(timeline: Timeline) -> list[float]:
    """Return each rank's peak in flight, where a stage counts as its part of 1/ranks of the model.

    This compares memory between plans: with copies of stages, a rank's two stages are twice its share.

    >>> from fpipe import simulate
    >>> shares(simulate(interleaved_1f1b, Plan(Placement.loop(2, chunks=2), 4)))
    [2.5, 1.5]
    """
    plan = timeline.plan
    shared = plan.ranks / plan.stages
    return [peak * len(plan.stages_on(rank)) * shared for rank, peak in enumerate(timeline.peak_in_flight)]
