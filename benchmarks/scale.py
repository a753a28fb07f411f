"""Simulate schedules on 8 to 1024 ranks with the costs of real stages; compare prediction and measurement on 2 ranks.

    python -m benchmarks.scale
    python -m benchmarks.scale --ranks 8 64 --schedules 1f1b zb-v --microbatches 64
    python -m benchmarks.scale --json                           # an object, and nothing else
    python -m benchmarks.scale --out scale.json scale.svg       # and a figure

The stages are those of `benchmarks.peers`. Two processes profile them at the same time, so that both cores are as busy
as in a run, and measure a message of an activation's size there and back. With that, a step of each schedule on 2 ranks
is predicted, and then run over gloo and recorded. The difference is split into parts, as means over the ranks: pieces
that took longer, longer waits for values, the host's time between pieces, in which the ranks also agree on the step,
and the ends of a step, before the first piece and after the last, where they share the loss. The simulation models only
the drain of the ends.

For more ranks the model grows, two layers on each: the first and the last as profiled, those between as their median. A
batch of as many microbatches is spread over ever more ranks. Schedules are in their usual order, for passes that take
equally long. Speed-up is over a rank that does all of the model without a bubble; memory is of the rank with the most
in flight: residuals, what is deferred, and values that travel, a value twice where residuals keep it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import nn
from torch.multiprocessing.spawn import ProcessException

import fpipe
from benchmarks import models
from fpipe import Costs, Link, Plan, Recording, handlers, interop, schedules
from fpipe.plan import Schedule
from fpipe.schedules.catalogue import CATALOGUE
from fpipe.schedules.cuts import recut

# Unlike the catalogue's, without a search under costs, which takes minutes at 128 ranks.
SCHEDULES: dict[str, Schedule] = {
    "1f1b": schedules.one_f_one_b,
    "interleaved-1f1b": schedules.interleaved_1f1b,
    "zb-h1": schedules.zb_h1,
    "interleaved-zb": schedules.interleaved_zb,
    "zb-v": schedules.zb_v,
    "v-half": schedules.v_half,
    "v-min": schedules.v_min,
    "dualpipe-v": schedules.dualpipe_v,
}
PER_RANK = 2  # layers
TIMES = ("forward", "backward_input", "backward_weight", "backward")
SIZES = ("activation", "residuals", "deferred")
PARTS = ("compute", "waiting", "host", "ends")


def job(rank: int, ranks: int, width: int, names: Sequence[str], rounds: int) -> Iterator[tuple[str, Any]]:
    """Run one of the processes: yield ("prediction", row) for each schedule, then ("layers", their costs)."""
    handler, layers = handlers.Distributed(timeout=models.TIMEOUT), models.layers(width)
    link = models.ping(rank, models.data(width)[0][: models.ROWS])
    profiled: dict[int, Costs] = {}
    for name in sorted(names, key=lambda name: CATALOGUE[name].chunks):
        placement = CATALOGUE[name].plan(ranks, models.MICROBATCHES).placement
        if placement.stages not in profiled:
            profiled[placement.stages] = profile(handler, layers, width, placement.stages, link)
        pipeline, _ = interop.from_modules(models.stages(layers, placement.stages), loss=models.loss_fn)
        plan = pipeline.plan(placement, models.MICROBATCHES)
        predicted = account(fpipe.simulate(SCHEDULES[name], plan, profiled[placement.stages]))
        measured = run(name, rank, plan, layers, width, handler, rounds)
        yield "prediction", compared(name, ranks, width, predicted, measured)
    yield "layers", profile(handler, layers, width, models.LAYERS, link)


def profile(handler: handlers.Distributed, layers: list[nn.Module], width: int, stages: int, link: Link) -> Costs:
    """Return the costs of the stages, as all processes measure them at the same time."""
    pipeline, params = interop.from_modules(models.stages(layers, stages), loss=models.loss_fn)
    options: dict[str, Any] = {"microbatches": models.MICROBATCHES, "repeats": models.REPEATS, "handler": handler}
    return replace(fpipe.profile(pipeline, params, *models.data(width), **options), communication=link)


def run(
    name: str, rank: int, plan: Plan, layers: list[nn.Module], width: int, handler: handlers.Distributed, rounds: int
) -> dict[str, float]:
    """Split a measured step into parts, in seconds: medians over the rounds of means over the ranks."""
    pipeline, params = interop.from_modules(models.stages(layers, plan.stages), loss=models.loss_fn)
    recording = Recording(fpipe.lower(SCHEDULES[name], plan))
    step = fpipe.value_and_grad(pipeline, SCHEDULES[name], plan, handler=handler, observe=recording)
    held, (batch, target) = pipeline.params_on(params, plan, rank), models.data(width)
    for _ in range(2):
        step(held, batch, target)
    found = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        step(held, batch, target)
        dist.barrier()
        whole = time.perf_counter() - start
        measurement = fpipe.gather(recording)
        accounts = [measurement.account(rank) for rank in range(plan.ranks)]
        parts = {
            "compute": statistics.mean(a.compute for a in accounts),
            "waiting": statistics.mean(a.waiting for a in accounts),
            "host": statistics.mean(sum(a.between) for a in accounts),
        }
        found.append({"step": whole, "ends": whole - sum(parts.values()), **parts})
    return {part: statistics.median(step[part] for step in found) for part in found[0]}


def account(timeline: fpipe.Timeline) -> dict[str, float]:
    """Split a predicted step into the same parts."""
    step, compute = timeline.makespan, statistics.mean(timeline.busy)
    drain = statistics.mean(causes["drain"] for causes in timeline.causes)
    return {"step": step, "compute": compute, "waiting": step - compute - drain, "host": 0.0, "ends": drain}


def compared(
    name: str, ranks: int, width: int, predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "schedule": name,
        "ranks": ranks,
        "width": width,
        "predicted_ms": 1e3 * predicted["step"],
        "measured_ms": 1e3 * measured["step"],
        "error": predicted["step"] / measured["step"] - 1,
        "more_ms": {part: 1e3 * (measured[part] - predicted[part]) for part in PARTS},
    }


def grown(layers: Costs, count: int, stages: int) -> Costs:
    """Return the costs of a model of more layers, in `stages` stages."""
    found: dict[str, Any] = {}
    for name in (*TIMES, *SIZES):
        first, *between, last = getattr(layers, name)
        found[name] = [first, *[statistics.median(between)] * (count - 2), last]
    return recut(Costs(communication=layers.communication, **found), count, stages)


def simulated(name: str, ranks: int, microbatches: int, layers: Costs) -> dict[str, Any]:
    """Return a schedule's row for a number of ranks."""
    plan = CATALOGUE[name].plan(ranks, microbatches)
    timeline = fpipe.simulate(SCHEDULES[name], plan, grown(layers, PER_RANK * ranks, plan.stages))
    most = max(range(ranks), key=timeline.peak_in_flight.__getitem__)
    return {
        "schedule": name,
        "ranks": ranks,
        "microbatches": microbatches,
        "sequences_per_second": microbatches * models.ROWS / timeline.makespan,
        "speed_up": sum(timeline.busy) / timeline.makespan,
        "bubble": timeline.bubble_rate,
        "peak_in_flight": timeline.peak_in_flight[most],
        "peak_bytes": max(size for _, size in timeline.memory(most)),
    }


COLUMNS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("sequences_per_second", "sequences a second", lambda row: f"{row['sequences_per_second']:.1f}"),
    ("speed_up", "speed-up", lambda row: f"{row['speed_up']:.1f}"),
    ("bubble", "bubble", lambda row: f"{row['bubble']:.1%}"),
    ("peak_bytes", "peak MiB", lambda row: f"{row['peak_bytes'] / 2**20:.0f}"),
)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for each figure: schedules down, ranks across."""
    by = {(row["schedule"], row["ranks"]): row for row in rows}
    names, ranks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("schedule", "ranks"))
    for _, title, text in COLUMNS:
        print(f"\n{title:20}" + "".join(f"{f'{p} ranks':>12}" for p in ranks))
        for name in names:
            cells = [text(by[name, p]) for p in ranks]
            print(f"{name:20}" + "".join(f"{cell:>12}" for cell in cells))


def show_prediction(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'2 ranks, ms a step':20}{'predicted':>10}{'measured':>10}{'error':>8}   measured is more by")
    print(" " * 50 + "".join(f"{part:>10}" for part in PARTS))
    for row in rows:
        more = "".join(f"{row['more_ms'][part]:10.2f}" for part in PARTS)
        print(f"{row['schedule']:20}{row['predicted_ms']:10.2f}{row['measured_ms']:10.2f}{row['error']:8.1%}  {more}")


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw throughput and memory over ranks, a line for each schedule."""
    with rc_context({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 3.8), layout="constrained", facecolor="white")
        speed, memory = figure.subplots(1, 2)
        ranks = sorted({row["ranks"] for row in rows})
        for i, name in enumerate(dict.fromkeys(row["schedule"] for row in rows)):
            own = [row for row in rows if row["schedule"] == name]
            at = [row["ranks"] for row in own]
            style: dict[str, Any] = {"marker": "osD^v<>P"[i], "markersize": 4, "linewidth": 1.2}
            speed.plot(at, [row["sequences_per_second"] for row in own], label=name, **style)
            memory.plot(at, [row["peak_bytes"] / 2**20 for row in own], color=speed.lines[-1].get_color(), **style)
        for ax, title in ((speed, "sequences a second"), (memory, "peak MiB of a rank")):
            ax.set_title(f"{title}, {rows[0]['microbatches']} microbatches", loc="left", fontsize=9)
            ax.set_xscale("log", base=2)
            ax.set_xticks(ranks, list(map(str, ranks)))
            ax.set_xlabel("ranks")
        speed.set_ylim(bottom=0)
        memory.set_yscale("log", base=2)
        memory.yaxis.set_major_formatter("{x:g}")
        figure.legend(loc="outside lower left", ncols=5, frameon=False)
        figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=models.positive, nargs="+", default=[8, 32, 128, 512, 1024])
    parser.add_argument("--microbatches", type=models.positive, default=128)
    parser.add_argument("--width", type=int, choices=models.WIDTHS, default=256)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=models.positive, default=15, help="steps measured on 2 ranks")
    parser.add_argument("--limit", type=models.positive, default=1200, help="seconds until the processes are ended")
    parser.add_argument("--json", action="store_true", help="print an object")
    parser.add_argument("--out", type=models.output, nargs="+", default=[], help="files ending in .json, .svg or .png")
    options = parser.parse_args()
    print(models.machine(), file=sys.stderr if options.json else sys.stdout, flush=True)
    try:
        yielded = list(
            models.in_processes(job, 2, options.width, options.schedules, options.rounds, limit=options.limit)
        )
    except (TimeoutError, ProcessException) as error:
        sys.exit(f"scale: {str(error).strip()}")
    predictions = [found for kind, found in yielded if kind == "prediction"]
    layers = next(found for kind, found in yielded if kind == "layers")
    if not options.json:
        show_prediction(predictions)
    rows = scaled(options.schedules, sorted(options.ranks), options.microbatches, layers)
    found = {"machine": models.machine(), "width": options.width, "prediction": predictions, "scale": rows}
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(rows)
    for path in options.out:
        if path.suffix == ".json":
            path.write_text(json.dumps(found, indent=1) + "\n")
        else:
            draw(rows, path)


def scaled(names: Sequence[str], ranks: Sequence[int], microbatches: int, layers: Costs) -> list[dict[str, Any]]:
    """Yield the rows of every schedule and number of ranks, the longest simulations first, on all cores."""
    cases = [(name, p) for p in ranks for name in names]
    with ProcessPoolExecutor(models.cores(), multiprocessing.get_context("spawn")) as pool:
        found = {case: pool.submit(simulated, *case, microbatches, layers) for case in reversed(cases)}
        return [found[case].result() for case in cases]


if __name__ == "__main__":
    main()
