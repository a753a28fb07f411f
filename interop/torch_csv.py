"""torch.distributed.pipelining's CSV of actions, as schedules, and schedules as its CSV. Text only: no torch.

A row is a rank, a cell an action: the number before the letters is its stage, the number after them its microbatch.
Empty cells are bubbles and are ignored. torch's `_Action` (torch 2.13) in fpipe:

| cell | effect |
| --- | --- |
| `2F5`, `2B5`, `2I5`, `2W5` | `Forward`, `Backward`, `BackwardInput`, `BackwardWeight` |
| `(2F5;1B3)OVERLAP_F_B` | `Overlap` of the two, in either order |
| `2SEND_F5`, `2RECV_F5` | `Send` of stage 2's activation, `Recv` of stage 1's |
| `2SEND_B5`, `2RECV_B5` | `Send` of the gradient for stage 1, `Recv` of the one from stage 3 |
| `2REDUCE_GRAD` | `Reduce`; with replicas `Scatter`, after which lowering adds `Reduce` |
| `2UNSHARD`, `2RESHARD` | with replicas `Gather`, `Release`; else none: gather and release sharded parameters |

In a plan with one replica the last two follow from the order of the others: `from_csv` drops them, and `to_csv` derives
them as torch's own lowering does.

A file with communication is for `_PipelineScheduleRuntime._load_csv(file, format="compute_comms")`, one without for
`_load_csv(file)`, which adds communication itself. torchtitan's option takes one without:

    fpipe export zb-v --ranks 4 --microbatches 8 --format torch-csv-compute > zb_v.csv

    --parallelism.pipeline_parallel_degree 4 --parallelism.num_pp_microbatches 8
    --parallelism.pipeline_parallel_schedule_csv zb_v.csv --parallelism.pipeline_parallel_schedule ZBVZeroBubble

The file gives the order; the schedule's name beside it only gives the placement: ZBVZeroBubble for `Placement.v`,
Interleaved1F1B for `Placement.loop` with several chunks, 1F1B with one. pipeline_parallel_layers_per_stage must give
the plan's number of stages. Older versions of torchtitan divide training.local_batch_size by
pipeline_parallel_microbatch_size for the number of microbatches; newer ones call the degree size.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Effect,
    Forward,
    Gather,
    Gradient,
    Overlap,
    Recv,
    Reduce,
    Release,
    Scatter,
    Send,
    parts,
)
from fpipe.errors import ScheduleError
from fpipe.plan import Placement, Plan, Schedule
from fpipe.programs.lowering import collect, lockstep, lower
from fpipe.programs.program import Program, Programs
from fpipe.programs.residence import Residence
from fpipe.programs.verifier import check
from fpipe.schedules.table import from_table

_COMPUTE: dict[str, type[Compute]] = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}
_LETTER = {kind: letter for letter, kind in _COMPUTE.items()}
_ACTION = re.compile(r"(\d+)(?:([FBIW]|(?:SEND|RECV)_[FB])(\d+)|(UNSHARD|RESHARD|REDUCE_GRAD))")
_OVERLAP = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")

Item = Effect | str  # an effect, or the text of an action of torch for which fpipe has no effect


def to_csv(
    schedule: Schedule | str,
    plan: Plan,
    *,
    communication: bool = True,
    gathered: int = 3,
    resident: Residence | int | None = None,
) -> str:
    """Return a schedule as torch's CSV.

    Args:
        schedule: verified before it is written, in any order of microbatches.
        communication: include sends, receives and reductions, for `format="compute_comms"`. A schedule's own sends and
            receives are kept. Other schedules get each receive where its send is, in one order over all ranks: every
            transport runs it, and it equals the output of torch's own lowering.
        gathered: with communication, how many stages' parameters, sharded by FSDP, a rank has gathered at once (more
            where more overlap). For other modules UNSHARD and RESHARD do nothing; 0 leaves them out.
        resident: as in `lower`, for a plan with replicas: UNSHARD and RESHARD are then fpipe's own gathers and
            releases, as they are where the schedule yields these.

    Raises:
        ScheduleError: the schedule is wrong for the plan, or torch's runtime can't express it: copies of a stage,
            skips, ties, no backward, or the last stage's forwards out of order.

    >>> from fpipe import Placement, Plan, schedules
    >>> plan = Plan(Placement.loop(2), 2)
    >>> print(to_csv(schedules.gpipe, plan, communication=False), end="")
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    >>> print(to_csv(schedules.gpipe, plan, gathered=0), end="")
    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD
    1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD
    """
    if gathered < 0:
        raise ScheduleError(f"gathered must be at least 0, not {gathered}")
    programs = lower(schedule, plan, resident=resident)
    _refuse_plan(plan)
    check(programs, ordered=False)
    if programs[0].plan.gathered:
        gathered = 0
    _refuse_order(programs, plan)
    communicates = any(isinstance(e, Send | Recv) for row in collect(schedule, plan).values() for e in row)
    rows: Mapping[int, Sequence[Item]]
    if not communication:
        rows = {rank: [e for e in program if isinstance(e, Compute | Overlap)] for rank, program in programs.items()}
    elif communicates:
        rows = {rank: tuple(_gather(_without_reduce(program), gathered)) for rank, program in programs.items()}
    else:
        compute = {r: [e for e in _without_reduce(p) if not isinstance(e, Send | Recv)] for r, p in programs.items()}
        complete = lockstep({rank: tuple(_gather(row, gathered)) for rank, row in compute.items()}, plan)
        assert complete is not None  # the schedule was verified
        rows = complete
    return "".join(",".join(map(_cell, rows[rank])) + "\n" for rank in range(plan.ranks))


def from_csv(text: str, *, replicas: int = 1) -> tuple[Schedule, Plan]:
    """Return the schedule in torch's CSV, and its plan: a chain, with placement and size derived from the actions.

    Sends and receives are kept; in a file without them, lowering adds them as for any schedule. With several replicas,
    so are the gathers and releases of sharded parameters, and the reductions over replicas. Check the schedule with
    `fpipe.verify(schedule, plan)`, and with `ordered=False` for an order like torch's looped BFS.

    Raises:
        ScheduleError: a cell is not an action, or a stage is on two ranks or on none; with row, column and cell.

    >>> from fpipe import draw
    >>> schedule, plan = from_csv("0F0,0F1,,0B0,,0B1\\n,1F0,1B0,1F1,1B1,")
    >>> plan.placement, plan.microbatches
    (Placement((0, 1)), 2)
    >>> print(draw(schedule, plan))
    rank 0  F0 F1 .  B0 .  B1
    rank 1  .  F0 B0 F1 B1
    """
    rows = [
        [_read(rank, column, cell.strip()) for column, cell in enumerate(row) if cell.strip()]
        for rank, row in enumerate(csv.reader(text.strip("\r\n").splitlines()))
    ]
    plan = replace(_plan(rows), replicas=replicas)
    return from_table({rank: [e for cell in row for e in _effects(cell, plan)] for rank, row in enumerate(rows)}), plan


class _Action(NamedTuple):
    stage: int
    kind: str
    microbatch: int | None


class _Cell(NamedTuple):
    rank: int
    column: int
    text: str
    actions: tuple[_Action, ...] = ()  # two that overlap, or one

    def __str__(self) -> str:
        return f"row {self.rank + 1} (rank {self.rank}), column {self.column + 1}, {self.text!r}"


def _read(rank: int, column: int, text: str) -> _Cell:
    overlap = _OVERLAP.fullmatch(text)
    actions = []
    for part in overlap.groups() if overlap else (text,):
        match = _ACTION.fullmatch(part.strip())
        if not match:
            raise ScheduleError(
                f"{_Cell(rank, column, text)}, is no action. Stage, action, microbatch make one, as in 1F3: F, B, I, "
                "W, SEND_F, RECV_F, SEND_B, RECV_B; or stage and action, as in 1UNSHARD: UNSHARD, RESHARD, "
                "REDUCE_GRAD; or two that overlap, as in (1F3;0B2)OVERLAP_F_B"
            )
        stage, kind, microbatch, whole = match.groups()
        actions.append(_Action(int(stage), whole or kind, None if whole else int(microbatch)))
    return _Cell(rank, column, text, tuple(actions))


def _plan(rows: Sequence[Sequence[_Cell]]) -> Plan:
    """Return the chain of a table's actions."""
    first: dict[int, _Cell] = {}
    microbatches = 0
    for rank, row in enumerate(rows):
        if not row:
            raise ScheduleError(f"row {rank + 1} (rank {rank}) has no action: every rank runs at least one stage")
        for cell in row:
            for stage, _, microbatch in cell.actions:
                if first.setdefault(stage, cell).rank != rank:
                    raise ScheduleError(
                        f"stage {stage} is on two ranks, in {first[stage]} and in {cell}: a stage has one rank here; "
                        "a schedule with copies of stages is given as Python, as in schedules.dualpipe"
                    )
                microbatches = max(microbatches, -1 if microbatch is None else microbatch + 1)
    if not microbatches:
        raise ScheduleError("the text runs nothing: a row for each rank, with actions such as 0F0 and 0B0")
    missing = next(stage for stage in count() if stage not in first)
    if missing < len(first):
        raise ScheduleError(f"no rank runs stage {missing}, but {first[max(first)]} names stage {max(first)}")
    return Plan(Placement([first[stage].rank for stage in range(len(first))]), microbatches)


def _effects(cell: _Cell, plan: Plan) -> Iterator[Effect]:
    effects = [effect for action in cell.actions for effect in _effect(action, cell, plan)]
    if len(cell.actions) == 1:
        yield from effects
        return
    match sorted(effects, key=lambda e: not isinstance(e, Forward)):
        case [Forward() as forward, Backward() | BackwardInput() as backward]:
            yield Overlap(forward, backward)
        case _:
            raise ScheduleError(f"{cell}: overlap an F with a B or an I, and give other actions cells of their own")


def _effect(action: _Action, cell: _Cell, plan: Plan) -> Iterator[Effect]:
    stage, kind, microbatch = action
    if microbatch is None:
        if kind == "REDUCE_GRAD":
            yield Reduce(stage) if plan.replicas == 1 else Scatter(stage, cell.rank)
        elif plan.replicas > 1:
            yield Gather(stage) if kind == "UNSHARD" else Release(stage)
    elif kind in _COMPUTE:
        yield _COMPUTE[kind](stage, microbatch)
    elif kind == "SEND_F":
        yield Send(Activation(stage, microbatch), _peer(stage, stage + 1, cell, plan))
    elif kind == "RECV_F":
        yield Recv(Activation(stage - 1, microbatch), _peer(stage, stage - 1, cell, plan))
    elif kind == "SEND_B":
        yield Send(Gradient(stage - 1, stage, microbatch), _peer(stage, stage - 1, cell, plan))
    else:
        yield Recv(Gradient(stage, stage + 1, microbatch), _peer(stage, stage + 1, cell, plan))


def _peer(stage: int, other: int, cell: _Cell, plan: Plan) -> int:
    if not 0 <= other < plan.stages:
        side = "before" if other < stage else "after"
        raise ScheduleError(
            f"{cell}: stage {stage} has none {side} it, for the table runs stages 0 to {plan.stages - 1}"
        )
    (rank,) = plan.placement.holders[other]
    if rank == cell.rank:
        raise ScheduleError(
            f"{cell}: stages {stage} and {other} are both on rank {rank}, so nothing passes between ranks"
        )
    return rank


def _refuse_plan(plan: Plan) -> None:
    if plan.slices > 1:
        raise ScheduleError(
            f"the plan has {plan.slices} slices, and torch.distributed.pipelining has none: take a schedule without "
            "slices, such as 1f1b"
        )
    for stage, ranks in enumerate(plan.placement.holders):
        if len(ranks) > 1:
            raise ScheduleError(
                f"stage {stage} has copies on ranks {ranks}, and torch.distributed.pipelining knows one rank for each: "
                "take a placement without copies, such as Placement.v with dualpipe_v"
            )
        if plan.sources(stage) != ((stage - 1,) if stage else ()):
            raise ScheduleError(
                f"stage {stage} reads stages {plan.sources(stage)}, and torch.distributed.pipelining only passes "
                "values from each stage to the next: pass along what a later stage needs"
            )
    if plan.ties:
        raise ScheduleError(
            f"stages {plan.ties[0]} share a parameter, and torch.distributed.pipelining doesn't add their gradients: "
            "export dataclasses.replace(plan, ties=()), and add them after the step"
        )


def _refuse_order(programs: Programs, plan: Plan) -> None:
    compute = [part for program in programs.values() for effect in program for part in parts(effect)]
    if not any(isinstance(e, Backward | BackwardWeight) for e in compute):
        raise ScheduleError("nothing runs backward, and torch.distributed.pipelining only loads schedules that train")
    last = [e.microbatch for e in compute if isinstance(e, Forward) and e.stage == plan.stages - 1]
    for expected, microbatch in enumerate(last):
        if microbatch != expected:
            raise ScheduleError(
                f"stage {plan.stages - 1} runs microbatch {microbatch} forward where {expected} is due: torch numbers "
                "losses in the order of the last stage's forwards, so these must come in microbatch order"
            )


def _without_reduce(program: Program) -> list[Effect]:
    """Return the effects; with replicas, without the additions of copies and ties after the sums over replicas."""
    return [e for e in program if program.plan.replicas == 1 or not isinstance(e, Reduce)]


def _gather(row: Sequence[Effect], most: int) -> Iterator[Item]:
    """Before each compute effect, gather the `most` stages that run next and release the others."""
    soon: tuple[int, ...] = ()
    ahead = []
    for effect in reversed(row):
        now = {part.stage: None for part in parts(effect) if isinstance(part, Compute)}
        soon = tuple({**now, **dict.fromkeys(soon)})[: max(most, len(now))] if most else ()
        ahead.append(soon)
    gathered: tuple[int, ...] = ()
    for effect, soon in zip(row, reversed(ahead), strict=True):
        if isinstance(effect, Compute | Overlap):
            yield from (f"{stage}RESHARD" for stage in sorted(gathered) if stage not in soon)
            yield from (f"{stage}UNSHARD" for stage in soon if stage not in gathered)
            gathered = soon
        yield effect
    yield from (f"{stage}RESHARD" for stage in sorted(gathered))


def _cell(item: Item) -> str:
    match item:
        case str():
            return item
        case Overlap(forward, backward):
            return f"({_cell(forward)};{_cell(backward)})OVERLAP_F_B"
        case Send(Activation(stage, microbatch)):
            return f"{stage}SEND_F{microbatch}"
        case Recv(Activation(stage, microbatch)):
            return f"{stage + 1}RECV_F{microbatch}"
        case Send(Gradient(_, stage, microbatch)):
            return f"{stage}SEND_B{microbatch}"
        case Recv(Gradient(stage, _, microbatch)):
            return f"{stage}RECV_B{microbatch}"
        case Reduce(stage) | Scatter(stage, _):
            return f"{stage}REDUCE_GRAD"
        case Gather(stage):
            return f"{stage}UNSHARD"
        case Release(stage):
            return f"{stage}RESHARD"
        case Forward() | Backward() | BackwardInput() | BackwardWeight():
            return f"{item.stage}{_LETTER[type(item)]}{item.microbatch}"
        case _:
            raise ScheduleError(
                f"torch.distributed.pipelining has no action for {item}: leave it out of what is exported"
            )
