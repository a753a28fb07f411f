"""Simulate schedules on 8 to 1024 ranks with the costs of real stages; compare prediction and measurement on 2 ranks.

    python -m benchmarks.scale
    python -m benchmarks.scale --ranks 8 64 --schedules 1f1b zb-v --microbatches 64
    python -m benchmarks.scale --json                           # a list of objects, and nothing else
    python -m benchmarks.scale --out scale.json scale.svg       # and into a file, with the machine, and a figure

The stages are those of `benchmarks.peers`. Before each step two processes profile them at the same time, so that both
cores are as busy as in a run, and measure the host's times; the link is measured once. With that, a step of
each schedule on 2 ranks is predicted (`benchmarks.predictions`), and run over gloo and recorded. The difference is
split into parts, as means over the ranks: pieces that took longer, longer waits for values, the host's time between
pieces, in which the ranks also agree on the step, and the ends of a step, before the first piece and after the last,
where they share the loss. Of the ends, the simulation models only the drain. `ratio` is measured over predicted, the
median of the rounds'. `by own` is predicted with the times of the measured step's own pieces, and the host's time
between them and at the ends.

For more ranks the model grows, two layers on each: the first and the last as profiled, those between as their median. A
batch of as many microbatches is spread over ever more ranks. Schedules are in their usual order, for passes that take
equally long. Speed-up is over a rank that does all of the model without a bubble; memory is of the rank with the most
in flight: residuals, what is deferred, and values that travel, a value twice where residuals keep it.
"""

from __future__ import annotations

import multiprocessing
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import nn

import fpipe
from benchmarks import models, predictions, recordings
from fpipe import Costs, Link, handlers, interop, schedules
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
Parts = dict[str, float]  # seconds, those of the step among them


def job(rank: int, ranks: int, width: int, names: Sequence[str], rounds: int) -> Iterator[Any]:
    """Run one of the processes: yield the row of each schedule, then the costs of the layers."""
    handler, layers = handlers.Distributed(timeout=models.TIMEOUT), models.layers(width)
    link = predictions.ping(rank)
    size = models.data(width)[0].numel() // models.MICROBATCHES
    host = predictions.Host(handler, ranks, link, models.MICROBATCHES, size=size)
    steps = {name: Step(name, ranks, layers, width, handler) for name in names}
    predicted: dict[str, list[Parts]] = {name: [] for name in names}

    def predict(name: str) -> predictions.Prediction:
        step = steps[name]
        costs = profile(handler, layers, width, step.plan.stages, link, predictions.REPEATS)
        prediction = predictions.Prediction(step.run.programs, costs, host.measure())
        predicted[name].append(step.predicted(prediction))
        return prediction

    step_of = {step.run: step for step in steps.values()}
    runs = {name: step.run for name, step in steps.items()}
    results = predictions.compare(runs, predict, rounds, measure=lambda run: step_of[run].measure())
    for name, step in steps.items():
        parts = {"predicted": predicted[name], "measured": step.measured}
        more = {part: difference(part, **parts) for part in PARTS}
        sizes = {"table": "prediction", "schedule": name, "ranks": ranks, "width": width}
        yield sizes | results[name].figures() | {"more_ms": more}
    yield profile(handler, layers, width, models.LAYERS, link, models.REPEATS)


def difference(part: str, predicted: Sequence[Parts], measured: Sequence[Parts]) -> float:
    """Return by how many milliseconds more was measured than predicted, the median of the rounds."""
    return 1e3 * statistics.median(b[part] - a[part] for a, b in zip(predicted, measured, strict=True))


def profile(
    handler: handlers.Distributed, layers: list[nn.Module], width: int, stages: int, link: Link, repeats: int
) -> Costs:
    """Return the costs of the stages, as all processes measure them at the same time."""
    pipeline, params = interop.from_modules(models.stages(layers, stages), loss=models.loss_fn)
    options: dict[str, Any] = {"microbatches": models.MICROBATCHES, "repeats": repeats, "handler": handler}
    return replace(fpipe.profile(pipeline, params, *models.data(width), **options), communication=link)


class Step:
    """A step of a schedule, which is recorded."""

    def __init__(
        self, name: str, ranks: int, layers: list[nn.Module], width: int, handler: handlers.Distributed
    ) -> None:
        placement = CATALOGUE[name].plan(ranks, models.MICROBATCHES).placement
        pipeline, params = interop.from_modules(models.stages(layers, placement.stages), loss=models.loss_fn)
        self.plan = pipeline.plan(placement, models.MICROBATCHES)
        make = partial(fpipe.value_and_grad, pipeline, SCHEDULES[name], self.plan, handler=handler)
        own = pipeline.params_on(params, self.plan, handler.rank)
        self.run = recordings.recorded(make, fpipe.lower(SCHEDULES[name], self.plan), own, *models.data(width))
        self.run()
        self.measured = list[Parts]()

    def predicted(self, prediction: predictions.Prediction) -> Parts:
        """Split a predicted step into parts."""
        plain, timeline = prediction._replace(host=predictions.HostTimes()).timeline(), prediction.timeline()
        return account(timeline, statistics.mean(timeline.busy) - statistics.mean(plain.busy))

    def measure(self) -> float:
        """Run a step, and add its parts; return its milliseconds."""
        whole = predictions.milliseconds(self.run)
        measurement = fpipe.gather(self.run.recording)
        accounts = [measurement.account(rank) for rank in range(self.plan.ranks)]
        parts = {
            "compute": statistics.mean(a.compute for a in accounts),
            "waiting": statistics.mean(a.waiting for a in accounts),
            "host": statistics.mean(sum(a.between) for a in accounts),
        }
        self.measured.append({"step": 1e-3 * whole, "ends": 1e-3 * whole - sum(parts.values()), **parts})
        return whole


def account(timeline: fpipe.Timeline, host: float) -> Parts:
    """Split a predicted step into the same parts; `host` is in the times of its pieces."""
    step, busy = timeline.makespan, statistics.mean(timeline.busy)
    drain = statistics.mean(causes["drain"] for causes in timeline.causes)
    return {"step": step, "compute": busy - host, "waiting": step - busy - drain, "host": host, "ends": drain}


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
        "table": "scale",
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
    """Print the rows of one of the tables."""
    (show_prediction if rows[0]["table"] == "prediction" else show_scale)(rows)


def show_scale(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for each figure: schedules down, ranks across."""
    by = {(row["schedule"], row["ranks"]): row for row in rows}
    names, ranks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("schedule", "ranks"))
    for _, title, text in COLUMNS:
        print(f"\n{title:20}" + "".join(f"{f'{p} ranks':>12}" for p in ranks))
        for name in names:
            cells = [text(by[name, p]) for p in ranks]
            print(f"{name:20}" + "".join(f"{cell:>12}" for cell in cells))


def show_prediction(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'2 ranks, ms a step':20}{'predicted':>10}{'measured':>10}{'ratio':>7}{'quartiles':>14}", end="")
    print(f"{'by own':>9}{'ratio':>7}   measured is more by")
    print(" " * 79 + "".join(f"{part:>10}" for part in PARTS))
    for row in rows:
        more = "".join(f"{row['more_ms'][part]:10.2f}" for part in PARTS)
        print(f"{row['schedule']:20}{row['predicted_ms']:10.2f}{row['measured_ms']:10.2f}{row['ratio']:7.3f}", end="")
        print(f"{predictions.quartiles(row, 'ratio'):>14}{row['by_own_ms']:9.2f}{row['own_ratio']:7.3f}  {more}")


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
    parser = models.parser(__doc__, rounds=7, limit=1200)
    parser.add_argument("--ranks", type=models.positive, nargs="+", default=[8, 32, 128, 512, 1024])
    parser.add_argument("--microbatches", type=models.positive, default=128)
    parser.add_argument("--width", type=int, choices=models.WIDTHS, default=256)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--out", type=models.output, nargs="+", default=[], help="files ending in .json, .svg or .png")
    options = parser.parse_args()
    arguments = options.width, options.schedules, options.rounds

    def parts() -> Iterator[list[dict[str, Any]]]:
        *predicted, layers = models.in_processes(job, 2, *arguments, limit=options.limit)
        yield predicted
        yield scaled(options.schedules, sorted(options.ranks), options.microbatches, layers)

    rows = models.report("scale", options.json, parts(), show)
    for path in options.out:
        if path.suffix == ".json":
            models.write(path, rows)
        else:
            draw([row for row in rows if row["table"] == "scale"], path)


def scaled(names: Sequence[str], ranks: Sequence[int], microbatches: int, layers: Costs) -> list[dict[str, Any]]:
    """Return the rows of every schedule and number of ranks, the longest simulations first, on all cores."""
    cases = [(name, p) for p in ranks for name in names]
    with ProcessPoolExecutor(models.cores(), multiprocessing.get_context("spawn")) as pool:
        found = {case: pool.submit(simulated, *case, microbatches, layers) for case in reversed(cases)}
        return [found[case].result() for case in cases]


if __name__ == "__main__":
    main()
