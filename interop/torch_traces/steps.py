"""Cut each rank's actions into steps, and put the ranks' steps together. No torch.

A rank runs the same actions in every step. A step begins where the profiler's does, and where a pass runs again. What
is no whole step, because the profiler began or ended within it, is left out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from fpipe._format import counted
from fpipe.interop.torch_traces.annotations import Action, RankTrace
from fpipe.interop.torch_traces.reading import BadTrace

ANNOTATE = """\
named = lambda f, x: lambda i, *a, **k: torch.profiler.record_function(f"PP:{stage.stage_index}{x}{i}")(f)(i, *a, **k)
stage.forward_one_chunk = named(stage.forward_one_chunk, "F")
stage.backward_one_chunk = named(stage.backward_one_chunk, "B")"""
"""Three lines that annotate a `PipelineStage`, for schedules of torch that don't, such as Schedule1F1B."""

_PASS = re.compile(r"(\d+)([FBIW])(\d+)")
_MESSAGE = re.compile(r"(\d+)((?:SEND|RECV)_[FB])")
Pass = tuple[int, str, int]  # stage, letter, microbatch


@dataclass(frozen=True)
class Part:
    """One step of one rank.

    Args:
        number: of the profiler's step; None if there is none.
    """

    trace: RankTrace
    number: int | None
    actions: Sequence[Action]


@dataclass(frozen=True)
class WholeStep:
    """A step of all ranks of a pipeline, by their numbers in the pipeline."""

    number: int
    parts: Mapping[int, Part]


def passes(cell: str) -> list[Pass]:
    """Return the passes of an action; none of one that sends, receives or reduces.

    >>> passes("(0F5;1B3)OVERLAP_F_B"), passes("2SEND_F5")
    ([(0, 'F', 5), (1, 'B', 3)], [])
    """
    return [(int(stage), kind, int(microbatch)) for stage, kind, microbatch in _PASS.findall(cell)]


def with_stage(trace: RankTrace, stage: int) -> RankTrace:
    """Return the trace of a rank of GPipe with its stage."""
    actions = [a._replace(cell=f"{stage}{a.cell}") if a.is_gpipe else a for a in trace.actions]
    return replace(trace, actions=actions)


def parts_of(trace: RankTrace) -> list[Part]:
    """Return the steps of a rank, whole or not."""
    cuts = [*_cuts(trace), len(trace.actions)]
    found = list[Part]()
    for begin, end in pairwise(cuts):
        actions = trace.actions[begin:end]
        first = next((action for action in actions if passes(action.cell)), None)
        if first is not None:
            found.append(Part(trace, trace.step_at(first.start), actions))
    return found


def _cuts(trace: RankTrace) -> Iterator[int]:
    """Yield the index of each step's first action."""
    yield 0
    step = _Step()
    number: int | None = None
    for at, action in enumerate(trace.actions):
        own = passes(action.cell)
        if not own:
            continue
        numbered = trace.step_at(action.start)
        if step.seen and (numbered != number or step.has_ended(own, bool(trace.steps))):
            begin = at
            while begin and "RECV" in trace.actions[begin - 1].cell:
                begin -= 1  # posted for this pass
            yield begin
            step = _Step()
        number = numbered
        step.add(own)


class _Step:
    """The passes of a step so far."""

    def __init__(self) -> None:
        self.seen = set[Pass]()
        self.last = dict[int, int]()  # stage -> microbatch of its last forward
        self.is_cut = False  # its beginning is missing

    def has_ended(self, own: Sequence[Pass], numbered: bool) -> bool:
        """Whether passes belong to the next step.

        Args:
            numbered: whether the profiler knows of steps. If not, a forward of an earlier microbatch begins one.
        """
        forwards = [(stage, m) for stage, kind, m in own if kind == "F"]
        earlier = any(m <= self.last.get(stage, -1) for stage, m in forwards)
        return (
            any(each in self.seen for each in own)
            or (not numbered and earlier)
            or (self.is_cut and any(m == 0 for _, m in forwards))
        )

    def add(self, own: Sequence[Pass]) -> None:
        for stage, kind, microbatch in own:
            if kind == "F":
                self.last[stage] = microbatch
            else:
                needed = "I" if kind == "W" else "F"
                self.is_cut |= (stage, needed, microbatch) not in self.seen
            self.seen.add((stage, kind, microbatch))


def why_not_whole(part: Part) -> str:
    """Return why a rank's step is not whole; "" if it is."""
    own = [each for action in part.actions for each in passes(action.cell)]
    by_stage: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    at = dict[Pass, int]()
    for place, (stage, kind, microbatch) in enumerate(own):
        by_stage[stage][kind].append(microbatch)
        at.setdefault((stage, kind, microbatch), place)
    for stage, kinds in by_stage.items():
        forwards = sorted(kinds["F"])
        if forwards != list(range(len(forwards))) or not forwards:
            return f"stage {stage} runs microbatches {_listed(forwards)} forward"
        inputs = sorted(kinds["B"] + kinds["I"])
        if inputs and inputs != forwards:
            return f"stage {stage} runs {counted(len(forwards), 'microbatch', 'es')} forward and {len(inputs)} backward"
        if sorted(kinds["W"]) != sorted(kinds["I"]):
            return f"stage {stage} runs {len(kinds['I'])} input gradients and {len(kinds['W'])} weight gradients"
        for m in inputs:
            backward = at.get((stage, "B", m), at.get((stage, "I", m), 0))
            if backward < at[stage, "F", m] or at.get((stage, "W", m), backward) < backward:
                return f"stage {stage} runs microbatch {m} backward before its forward"
    messages = Counter(match.groups() for action in part.actions if (match := _MESSAGE.match(action.cell)))
    for (number, what), count in messages.items():
        if count != len(by_stage[int(number)]["F"]):
            return f"stage {number} has {what} of {counted(count, 'microbatch', 'es')} alone"
    return ""


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, …" if len(numbers) > 8 else shown or "none"


def matched(parts: Mapping[int, Sequence[Part]]) -> tuple[list[WholeStep], list[str]]:
    """Return the steps that all ranks have whole, and notices of what is left out.

    Steps are matched by the profiler's numbers; without these, by their order.

    Args:
        parts: of each rank of the pipeline.

    Raises:
        BadTrace: no step is whole on all ranks, or nothing says which steps belong together.
    """
    whole, reasons, cut = dict[int, list[Part]](), dict[int, str](), 0
    for rank, own in parts.items():
        problems = [why_not_whole(part) for part in own]
        whole[rank] = [part for part, problem in zip(own, problems, strict=True) if not problem]
        reasons[rank] = next((problem for problem in problems if problem), "it has none")
        cut += len(own) - len(whole[rank])
    for rank, own in whole.items():
        if not own:
            file = parts[rank][0].trace.file if parts[rank] else f"rank {rank}"
            raise BadTrace(
                f"{file} has no whole step ({reasons[rank]}): record whole steps, with the profiler around "
                "schedule.step"
            )
    notices = [f"{counted(cut, 'part')} of steps at the ends of traces left out"] if cut else []
    numbers = {rank: [part.number for part in own] for rank, own in whole.items()}
    if all(None not in own and len(set(own)) == len(own) for own in numbers.values()):
        common = set.intersection(*(set(own) for own in numbers.values()))
        missing = set.union(*(set(own) for own in numbers.values())) - common
        if not common:
            raise BadTrace(f"no step is in the traces of all ranks: {_numbers(numbers)}; record the same steps on each")
        if missing:
            notices.append(f"{counted(len(missing), 'step')} not in the traces of all ranks left out")
        by_number = {rank: {part.number: part for part in own} for rank, own in whole.items()}
        ascending = sorted(number for number in common if number is not None)
        numbered = [WholeStep(n, {rank: own[n] for rank, own in by_number.items()}) for n in ascending]
        return numbered, notices
    if len({len(own) for own in whole.values()}) > 1:
        each = ", ".join(f"{len(own)} on rank {rank}" for rank, own in whole.items())
        raise BadTrace(
            f"nothing says which steps belong together, for ranks have {each}: call the profiler's step() "
            "once after each step"
        )
    count = len(next(iter(whole.values())))
    return [WholeStep(i, {rank: own[i] for rank, own in whole.items()}) for i in range(count)], notices


def _numbers(numbers: Mapping[int, Sequence[int | None]]) -> str:
    some = [f"rank {rank} has {_listed([n for n in own if n is not None])}" for rank, own in list(numbers.items())[:2]]
    return ", ".join(some)


def by_pipeline_rank(traces: Sequence[RankTrace], ranks: Sequence[int] | None) -> dict[int, list[RankTrace]]:
    """Return the traces of one pipeline, by the rank in it, each rank's in order of time.

    Args:
        ranks: the pipeline's ranks in the job, in order; None to find them.

    Raises:
        BadTrace: a rank has no trace, or the ranks are of several pipelines.
    """
    by_rank: dict[int, list[RankTrace]] = defaultdict(list)
    for trace in traces:
        by_rank[trace.rank].append(trace)
    if ranks is None:
        meshes = {trace.pipeline for trace in traces if trace.pipeline}
        if len(meshes) > 1:
            some = " or ".join(",".join(map(str, mesh)) for mesh in sorted(meshes)[:3])
            raise BadTrace(f"these are the traces of {len(meshes)} pipelines: name the ranks of one, as --ranks {some}")
        ranks = next(iter(meshes)) if meshes else _all_ranks(traces)
    if missing := [rank for rank in ranks if rank not in by_rank]:
        raise BadTrace(f"there is no trace of {_ranks(missing)}: bring the files of all ranks into one folder")
    return {at: sorted(by_rank[rank], key=_when) for at, rank in enumerate(ranks)}


def _all_ranks(traces: Sequence[RankTrace]) -> list[int]:
    """Return the ranks that have traces, which are all of the job's, if its number of ranks is known."""
    ranks, world = sorted({trace.rank for trace in traces}), max(trace.world for trace in traces)
    if len(ranks) < world:
        raise BadTrace(
            f"there are traces of {len(ranks)} of the job's {world} ranks: bring the files of all into one folder, or "
            "name the ranks of one pipeline, in order, as --ranks 0,2,4"
        )
    return ranks


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _when(trace: RankTrace) -> tuple[float, Path]:
    return trace.base / 1e3 + (trace.actions[0].start if trace.actions else 0.0), trace.file


def check_stages(parts: Mapping[int, Part]) -> None:
    """Check that the ranks' stages are all stages of one pipeline, each on one rank, with as many microbatches.

    Raises:
        BadTrace: they are not.
    """
    counts = Counter[int]()
    of_stage = dict[int, int]()
    for rank, part in parts.items():
        for action in part.actions:
            for stage, kind, _ in passes(action.cell):
                other = of_stage.setdefault(stage, rank)
                if other != rank:
                    raise BadTrace(
                        f"ranks {parts[other].trace.rank} and {part.trace.rank} of the job both run stage "
                        f"{stage}, as replicas of a pipeline do: name the ranks of one, as --ranks 0,2"
                    )
                counts[stage] += kind == "F"
    if missing := [stage for stage in range(max(counts) + 1) if stage not in counts][:1]:
        raise BadTrace(
            f"no trace has stage {missing[0]}, but one has stage {max(counts)}: bring the files of all ranks "
            "into one folder"
        )
    first = counts[0]
    uneven = [stage for stage in counts if counts[stage] != first]
    if uneven:
        raise BadTrace(
            f"stage 0 runs {counted(first, 'microbatch', 'es')} and stage {uneven[0]} {counts[uneven[0]]}: the traces "
            "are of different steps"
        )
