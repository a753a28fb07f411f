"""Compare sequences in slices with whole ones: time and memory of steps, measured and predicted.

    python -m benchmarks.slices                                    # all tables
    python -m benchmarks.slices --kinds timed --slices 4
    python -m benchmarks.slices --json                             # a list of objects, and nothing else
    python -m benchmarks.slices --out slices.json                  # and into a file, with the machine

Whole sequences run by 1F1B; slices by `seq_1f1b` and `seq_zb`, the latter beside ZB-H1. A step has four microbatches.

- `real`: two ranks of the GPT of examples/long_sequences.py, one sequence of 1024 tokens a microbatch. Sliced attention
  computes no more than whole causal attention, in other kernels.
- `timed`: four ranks whose pieces sleep for 32 ms a microbatch, in proportion to the tokens.
- `memory`: four ranks of the same GPT, 512 tokens, over gloo. Of each rank the most live bytes that `fpipe.LiveBytes`
  finds, residuals above all, beside `verify(costs=).peak_bytes`; and the bytes by which the memory of its
  process grows at most in a step, which has the new gradients, messages and what a piece needs while it runs, too.
  `measured`, `predicted` and `process` are of the rank with the most.

A prediction (`benchmarks.predictions`) is `simulate` with costs from `fpipe.profile(slices=)`, in `real` right before
each step, the host's time for a piece, and a measured link. `by own` is predicted with the times of the measured step's
own pieces. Times are medians of rounds in which all cases take turns, `ratio` is the median of the rounds' ratios.
`over` is the measured time, or the bytes, over those of whole sequences under the same kind of schedule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fpipe
from benchmarks import models, predictions, recordings, timed
from examples import long_sequences
from fpipe import Costs, Pipeline, Placement, Plan, Stage, handlers

RANKS = {"real": 2, "timed": 4, "memory": 4}
CONTEXT = {"real": 1024, "timed": 64, "memory": 512}
MICROBATCHES, WIDTH, SECONDS = 4, 64, 32e-3
WHOLE = {"seq-1f1b": "1f1b", "seq-zb": "zb-h1"}


@dataclass(frozen=True)
class Case:
    """A schedule and its number of slices."""

    schedule: str
    slices: int


def cases(counts: Sequence[int]) -> list[Case]:
    each = [(whole, sliced) for sliced, whole in WHOLE.items()]
    return [Case(name, s) for whole, sliced in each for name, s in [(whole, 1), *((sliced, s) for s in counts)]]


def model(kind: str) -> tuple[Pipeline, dict[int, Any]]:
    """Return a pipeline whose stages carry, and its params."""
    ranks, context = RANKS[kind], CONTEXT[kind]
    if kind != "timed":
        torch.manual_seed(0)
        return long_sequences.build(ranks, WIDTH, 2, context)

    def stage(w: Tensor, carry: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        seconds = [x.shape[1] / context * SECONDS] * 3
        y = timed.forward(x if carry is None else x + carry, w, seconds)
        return y, y[:, -1:]

    return Pipeline([Stage(stage, carry=True)] * ranks, models.loss_fn), {s: torch.ones(4) for s in range(ranks)}


def data(kind: str, rows: int) -> tuple[Tensor, Tensor]:
    if kind == "timed":
        return torch.full((rows, CONTEXT[kind], 1), 0.5), torch.zeros(rows, CONTEXT[kind], 1)
    return long_sequences.sequences(rows, CONTEXT[kind], seed=0)


class Process:
    """One process of a table: its cases, each with its step."""

    def __init__(self, rank: int, kind: str, counts: Sequence[int]) -> None:
        self.kind, self.handler, self.cases = kind, handlers.Distributed(timeout=models.TIMEOUT), cases(counts)
        self.pipeline, self.params = model(kind)
        self.link = predictions.ping(rank)

    def plan(self, case: Case) -> Plan:
        return self.pipeline.plan(Placement.loop(RANKS[self.kind]), MICROBATCHES, slices=case.slices)

    def step(self, case: Case, observe: fpipe.Observer | None = None) -> Callable[[], Any]:
        plan, options = self.plan(case), {"handler": self.handler, "autodiff": "graph", "observe": observe}
        step = fpipe.value_and_grad(self.pipeline, case.schedule, plan, **options)  # type: ignore[arg-type]
        own = self.pipeline.params_on(self.params, plan, self.handler.rank)
        return partial(step, own, *data(self.kind, MICROBATCHES))

    def recorded(self, case: Case) -> recordings.Recorded:
        return recordings.recorded(partial(self.step, case), fpipe.lower(case.schedule, self.plan(case)))

    def profile(self, slices: int, repeats: int) -> Costs:
        count = models.PROFILED if self.kind == "real" else 1
        options: dict[str, Any] = {"handler": self.handler, "autodiff": "graph", "repeats": repeats}
        options |= {"slices": slices, "microbatches": count}
        return replace(
            fpipe.profile(self.pipeline, self.params, *data(self.kind, count), **options), communication=self.link
        )


def job(rank: int, ranks: int, kind: str, counts: Sequence[int], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield the rows of a table, as measured on rank 0, or of all ranks."""
    process = Process(rank, kind, counts)
    rows = memory(process) if kind == "memory" else times(process, rounds)
    wholes = {row["schedule"]: row for row in rows if row["slices"] == 1}
    yield [over(row, wholes[WHOLE.get(row["schedule"], row["schedule"])]) for row in rows]


def over(row: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its figures over those of whole sequences."""
    shares = {"over": row["measured"] / whole["measured"]}
    return {**row, **shares, **({"process_over": row["process"] / whole["process"]} if "process" in row else {})}


def times(process: Process, rounds: int) -> list[dict[str, Any]]:
    steps = {case: process.recorded(case) for case in process.cases}
    counts, is_timed = sorted({case.slices for case in steps}), process.kind == "timed"
    stage = timed.brief if is_timed else predictions.busy
    most = max(counts)
    size = 1 if is_timed else CONTEXT[process.kind] * WIDTH // most
    host = predictions.Host(process.handler, RANKS[process.kind], process.link, MICROBATCHES * most, stage, size=size)
    first = {slices: process.profile(slices, models.REPEATS) for slices in counts} if is_timed else {}

    def predict(case: Case) -> predictions.Prediction:
        costs = first[case.slices] if is_timed else process.profile(case.slices, predictions.REPEATS)
        return predictions.Prediction(steps[case].programs, costs, host.measure())

    results = predictions.compare(steps, predict, rounds)
    return [row(process.kind, case, result) for case, result in results.items()]


def memory(process: Process) -> list[dict[str, Any]]:
    rows, peers = [], process.handler.peers
    costs = {slices: process.profile(slices, 1) for slices in sorted({case.slices for case in process.cases})}
    for case in process.cases:
        live = fpipe.LiveBytes()
        step = process.step(case, live)
        step()
        grown = growth(step)
        live.run(step)
        assert peers is not None
        of_ranks = peers.gather((live.peak(process.handler.rank), grown), "comparing bytes")
        measured, processes = map(list, zip(*of_ranks, strict=True))
        predicted = fpipe.verify(case.schedule, process.plan(case), costs=costs[case.slices]).peak_bytes
        assert predicted is not None
        by_rank = {"predicted": [*predicted], "measured": measured, "process": processes}
        most = {"process": max(processes), "by_rank": by_rank}
        rows.append(row(process.kind, case, predictions.Rounds([max(predicted)], [max(measured)])) | most)
    return rows


def growth(call: Callable[[], Any]) -> int:
    """Return the bytes by which the resident memory of this process grows at most during a call."""
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory that the allocator keeps would not grow again
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return a number of bytes that the kernel has for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def row(kind: str, case: Case, result: predictions.Rounds) -> dict[str, Any]:
    return {
        "kind": kind,
        "ranks": RANKS[kind],
        "schedule": case.schedule,
        "slices": case.slices,
        "unit": "bytes" if kind == "memory" else "ms",
        **result.figures(""),
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    for each in rows:
        factor, unit = (2**-20, "MiB") if each["unit"] == "bytes" else (1, "ms")
        own = f", by own {each['own_ratio']:.3f}" if "own_ratio" in each else ""
        print(
            f"{each['kind']:6}  {each['ranks']} ranks  {each['schedule']:8}  {each['slices']} slices  "
            f"measured {factor * each['measured']:7.2f} {unit}  predicted {factor * each['predicted']:7.2f}  "
            f"({each['ratio']:.3f}{own})  over whole {each['over']:.3f}",
            flush=True,
        )
        for name, sizes in each.get("by_rank", {}).items():
            print(
                f"        {name:9}  " + "  ".join(f"{factor * size:7.2f}" for size in sizes), end="  MiB on each rank\n"
            )
        if "process_over" in each:
            print(f"        the process with the most over whole {each['process_over']:.3f}", flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=900)
    parser.add_argument("--kinds", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--slices", nargs="+", type=models.positive, default=[2, 4])
    options = parser.parse_args()
    parts = (
        part
        for kind in options.kinds
        for part in models.in_processes(job, RANKS[kind], kind, options.slices, options.rounds, limit=options.limit)
    )
    models.run("slices", options, parts, show)


if __name__ == "__main__":
    main()
