"""Compare fpipe with torch.distributed.pipelining: the same modules, data and schedules in the same processes, in turn.

    python -m benchmarks.peers                                     # 2 ranks, every width and schedule
    python -m benchmarks.peers --ranks 4 --width 256 --schedules 1f1b zb-v
    python -m benchmarks.peers --width 256 --json                  # a list of objects, and nothing else
    python -m benchmarks.peers --out peers.json peers.svg          # and a figure

Eight nn.TransformerEncoderLayer (4 heads, no dropout) in float32, sequences of 8 at width 32 and of 64 at others, 8
microbatches of 2, mean squared error; gloo, one thread a process. Before anything is timed, both must give the same
loss and gradients. A round runs every schedule by both, in alternating order, and one process alone: blocks of
steps between barriers, after an uncounted step. Every step allocates new gradients; inside the block, fpipe drops its
last ones, and torch's `.grad` are set to None. Times are medians of the rounds, and ratios medians of the rounds'
ratios, with quartiles. The garbage collector runs only between the blocks.

Where ranks do not exceed cores, a step of fpipe's is also predicted (`benchmarks.predictions`), before each block: the
time of the block's simulated steps, by a profile of its stages, the host's time for a piece, and a measured link.
`predicted_ratio` is fpipe's measured time over that.

The limit is one process's time for the same microbatches without a pipeline, by eager autograd or by fpipe's graphs,
whichever is faster, over the smaller of ranks and cores. Memory is the most bytes of tensors that a step has at once
beyond parameters and batch, on the rank that has the most; torch's receive buffers, which it keeps from its first step
on, are not counted.
"""

from __future__ import annotations

import gc
import pathlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

import fpipe
from benchmarks import models, predictions
from fpipe import Placement, Plan, handlers, interop
from fpipe.schedules.catalogue import CATALOGUE
from fpipe.stages.sharding import local

SCHEDULES: dict[str, Any] = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved-1f1b": theirs.ScheduleInterleaved1F1B,
    "interleaved-zb": theirs.ScheduleInterleavedZeroBubble,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.ScheduleDualPipeV,
}
ROUNDING = 1e-5  # of a gradient's norm
Call = Callable[[], object]
Times = dict[tuple[str, str], list[float]]  # by schedule and by whom


@dataclass(frozen=True)
class Pair:
    """One schedule's step on one rank, by fpipe and by torch, over this rank's part of the modules."""

    fpipe: Callable[[], tuple[Tensor, Mapping[int, Mapping[str, Tensor]]]]
    peer: Callable[[], list[Tensor]]
    own: Mapping[int, nn.Module]

    def check(self) -> str:
        """Return the differences between the two beyond rounding."""
        loss, grads = self.fpipe()
        losses = self.peer()
        different = [] if not losses or near(loss, torch.stack(losses).mean()) else ["the loss"]
        return ", ".join(different + self.different_gradients(grads))

    def different_gradients(self, grads: Mapping[int, Mapping[str, Tensor]]) -> list[str]:
        """Return the names of fpipe's gradients that differ beyond rounding from those in the modules; forget these."""
        different = [
            f"the gradient of stage {stage}, {name}"
            for stage, module in self.own.items()
            for name, p in module.named_parameters()
            if p.grad is None or not near(local(grads[stage][name]), local(p.grad))
        ]
        forget(self.own.values())
        return different


def near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= ROUNDING * expected.norm())


def forget(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.zero_grad(set_to_none=True)


def pair(name: str, rank: int, ranks: int, width: int, layers: list[nn.Module], handler: handlers.Distributed) -> Pair:
    entry = CATALOGUE[name]
    placement = entry.plan(ranks, models.MICROBATCHES).placement
    modules = models.stages(layers, placement.stages)
    pipeline, params = interop.from_modules(modules, loss=models.loss_fn)
    plan = pipeline.plan(placement, models.MICROBATCHES)
    own = {stage: modules[stage] for stage in plan.stages_on(rank)}
    held = pipeline.params_on(params, plan, rank)
    whole, wanted = models.data(width)
    batch, target = whole if 0 in own else None, wanted if plan.stages - 1 in own else None
    step = fpipe.value_and_grad(pipeline, entry.schedule(plan), plan, handler=handler)
    return Pair(lambda: step(held, batch, target), peer(name, plan, own, batch, target), own)


def peer(
    name: str,
    plan: Plan,
    own: Mapping[int, nn.Module],
    batch: Tensor | None,
    target: Tensor | None,
    group: dist.ProcessGroup | None = None,
) -> Callable[[], list[Tensor]]:
    """torch's step: it divides the summed gradients by the number of microbatches, for a mean over them."""
    cpu = torch.device("cpu")
    parts: Any = [PipelineStage(module, stage, plan.stages, cpu, group=group) for stage, module in own.items()]
    single = issubclass(SCHEDULES[name], theirs.PipelineScheduleSingle)
    runtime = SCHEDULES[name](parts[0] if single else parts, plan.microbatches, loss_fn=models.loss_fn)
    arguments = () if batch is None else (batch,)

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        forget(own.values())
        runtime.step(*arguments, target=target, losses=losses, return_outputs=False)
        return losses

    return step


def alone(layers: list[nn.Module], width: int) -> dict[str, Call]:
    """Run the same microbatches without a pipeline: forward, backward, forward, backward, in one process."""
    module, (batch, target) = nn.Sequential(*layers), models.data(width)
    pipeline, params = interop.from_modules([module], loss=models.loss_fn)
    plan = pipeline.plan(Placement.loop(1), models.MICROBATCHES)
    step = fpipe.value_and_grad(pipeline, CATALOGUE["1f1b"].schedule(plan), plan, handler=handlers.Local())
    parts = list(zip(batch.chunk(models.MICROBATCHES), target.chunk(models.MICROBATCHES), strict=True))

    def eager() -> None:
        forget([module])
        for x, t in parts:
            (models.loss_fn(module(x), t) / models.MICROBATCHES).backward()  # type: ignore[no-untyped-call]

    return {"graphs": lambda: step(params, batch, target), "eager": eager}


def block(step: Call, steps: int, barrier: Call) -> float:
    """Return milliseconds per step, after one uncounted step."""
    gc.collect()
    step()
    barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    barrier()
    return 1e3 * (time.perf_counter() - start) / steps


def measure(
    pairs: Mapping[str, Pair],
    ways: Mapping[str, Call],
    steps: int,
    rounds: int,
    predict: Callable[[str], float] | None = None,
) -> Times:
    """Return milliseconds per step of every round, by schedule and way; `ways` run on rank 0 while the others wait.

    Args:
        predict: returns the predicted milliseconds of fpipe's step of a schedule.
    """
    times: Times = defaultdict(list)
    gc.collect()
    gc.freeze()
    gc.disable()
    for i in range(rounds):
        for name, both in pairs.items():
            if predict:
                times[name, "predicted"].append(predict(name))
            turns = [("fpipe", both.fpipe), ("peer", both.peer)]
            for who, step in turns[:: 1 if i % 2 else -1]:
                times[name, who].append(block(step, steps, dist.barrier))
            forget(both.own.values())
        for way, call in ways.items():
            times["alone", way].append(block(call, steps, lambda: None))
        dist.barrier()
    gc.enable()
    gc.unfreeze()
    return times


def job(
    rank: int, ranks: int, widths: Sequence[int], names: Sequence[str], steps: int | None, rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield for every width the rows of its schedules, as measured on rank 0."""
    handler = handlers.Distributed(timeout=models.TIMEOUT)
    for width in widths:
        layers = models.layers(width)
        pairs = {name: pair(name, rank, ranks, width, layers, handler) for name in names}
        for name, both in pairs.items():
            agree(name, ranks, both.check())
        peaks = {name: memory(both, ranks) for name, both in pairs.items()}
        ways = alone(layers, width) if rank == 0 else {}
        count = steps or max(1, models.WIDTHS[-1] // width)
        predict = predictor(ranks, width, layers, handler, count) if ranks <= models.cores() else None
        times = measure(pairs, ways, count, rounds, predict)
        if rank == 0:
            yield [row(name, ranks, width, times) | peaks[name] for name in names]
        else:
            yield []


def predictor(
    ranks: int, width: int, layers: list[nn.Module], handler: handlers.Distributed, steps: int
) -> Callable[[str], float]:
    """Return a function that returns the milliseconds of a step of each schedule in a block of `steps`."""
    rows = slice(models.ROWS * models.PROFILED)
    batch, target = (x[rows] for x in models.data(width))
    link = predictions.ping(handler.rank)
    size = batch.numel() // models.PROFILED
    host = predictions.Host(handler, ranks, link, models.MICROBATCHES, size=size)

    def profile(stages: int) -> fpipe.Costs:
        pipeline, params = interop.from_modules(models.stages(layers, stages), loss=models.loss_fn)
        options: dict[str, Any] = {"microbatches": models.PROFILED, "repeats": predictions.REPEATS, "handler": handler}
        return replace(fpipe.profile(pipeline, params, batch, target, **options), communication=link)

    def predict(name: str) -> float:
        plan = CATALOGUE[name].plan(ranks, models.MICROBATCHES)
        with_host = predictions.with_host(profile(plan.stages), plan, host.seconds())
        timeline = fpipe.simulate(CATALOGUE[name].schedule(plan), plan, with_host, steps=steps)
        return 1e3 * timeline.makespan / steps

    return predict


def agree(name: str, ranks: int, differs: str) -> None:
    """Raise if a rank found a difference."""
    found: list[str] = [""] * ranks
    dist.all_gather_object(found, differs)
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]
    if wrong:
        raise RuntimeError(f"{name} by fpipe and by torch.distributed.pipelining differ in {'; '.join(wrong)}")


def memory(both: Pair, ranks: int) -> dict[str, list[int]]:
    """Return each step's peak bytes, by rank."""
    found: list[Any] = [None] * ranks
    own = fpipe.peak_bytes(both.fpipe), fpipe.peak_bytes(both.peer)
    forget(both.own.values())
    dist.all_gather_object(found, own)
    return {"fpipe_bytes": [ours for ours, _ in found], "peer_bytes": [peers for _, peers in found]}


def row(name: str, ranks: int, width: int, times: Times) -> dict[str, Any]:
    ours, peers = times[name, "fpipe"], times[name, "peer"]
    way = min(("graphs", "eager"), key=lambda way: statistics.median(times["alone", way]))
    limits = [ms / min(ranks, models.cores()) for ms in times["alone", way]]
    ratios = [a / b for a, b in zip(ours, peers, strict=True)]
    predicted = predictions.Rounds(times[name, "predicted"], ours).figures() if times[name, "predicted"] else {}
    return {
        "schedule": name,
        "ranks": ranks,
        "width": width,
        "fpipe_ms": statistics.median(ours),
        "peer_ms": statistics.median(peers),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [float(q) for q in np.quantile(ratios, (0.25, 0.75))],
        "predicted_ms": predicted.get("predicted_ms"),
        "predicted_ratio": predicted.get("ratio"),
        "limit_ms": statistics.median(limits),
        "limit_by": way,
        "limit_share": statistics.median(a / b for a, b in zip(limits, ours, strict=True)),
        "peer_limit_share": statistics.median(a / b for a, b in zip(limits, peers, strict=True)),
        "rounds": len(ours),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of one number of ranks and one width."""
    predicts = rows[0]["predicted_ms"] is not None
    about = "{ranks} ranks, width {width}, limit {limit_ms:.2f} ms by {limit_by}, {rounds} rounds".format(**rows[0])
    print(f"\n{about}\n{'':18} {'ms a step':>17} {'':23} {'limit / ms':>13} {'peak MiB':>15}", end="")
    print(f" {'predicted':>11}" if predicts else "; ranks exceed cores, so that nothing is predicted")
    print(f"{'':18} {'fpipe':>8} {'torch':>8} {'ratio':>7} {'quartiles':>15} {'fpipe':>6} {'torch':>6}", end="")
    print(f" {'fpipe':>7} {'torch':>7}", f"{'ms':>7} {'ratio':>6}" if predicts else "")
    for r in rows:
        quartiles = "{:.3f}-{:.3f}".format(*r["ratio_quartiles"])
        print(f"{r['schedule']:18} {r['fpipe_ms']:8.2f} {r['peer_ms']:8.2f} {r['ratio']:7.3f} {quartiles:>15}", end="")
        print(f" {r['limit_share']:6.2f} {r['peer_limit_share']:6.2f}", end="")
        print(f" {max(r['fpipe_bytes']) / 2**20:7.1f} {max(r['peer_bytes']) / 2**20:7.1f}", end="")
        print(f" {r['predicted_ms']:8.2f} {r['predicted_ratio']:6.3f}" if predicts else "", flush=True)


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw two panels: fpipe's time over torch's, and the shares of the limit."""
    cases = sorted({(r["ranks"], r["width"]) for r in rows})
    names = list(dict.fromkeys(r["schedule"] for r in rows))
    with rc_context({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor="white")
        ratio, share = figure.subplots(1, 2)
        for i, case in enumerate(cases):
            own = {r["schedule"]: r for r in rows if (r["ranks"], r["width"]) == case}
            at = [names.index(name) + (i - (len(cases) - 1) / 2) * 0.8 / len(cases) for name in own]
            colour, label = (
                colormaps["Blues"](0.35 + 0.4 * i / max(1, len(cases) - 1)),
                "{} ranks, width {}".format(*case),
            )
            bars = {"width": 0.72 / len(cases), "color": colour}
            ratios = [r["ratio"] for r in own.values()]
            low, high = ([abs(r["ratio"] - r["ratio_quartiles"][q]) for r in own.values()] for q in (0, 1))
            ratio.bar(at, ratios, yerr=[low, high], error_kw={"linewidth": 0.8}, label=label, **bars)
            share.bar(at, [r["limit_share"] for r in own.values()], **bars)
            peers = [r["peer_limit_share"] for r in own.values()]
            share.plot(at, peers, "_", color="black", markersize=0.72 / len(cases) * 28, label="" if i else "torch")
        for ax, title in ((ratio, "fpipe's time over torch's"), (share, "share of the limit")):
            ax.set_title(title, loc="left", fontsize=9)
            ax.set_xticks(
                range(len(names)), [name.replace("interleaved-", "interleaved\n") for name in names], fontsize=8
            )
            ax.axhline(1, color="black", linewidth=0.8, linestyle=":")
        figure.legend(loc="outside lower left", ncols=4, frameon=False)
        figure.savefig(path, dpi=160)


def main() -> None:
    parser = models.parser(__doc__, rounds=11, limit=3600)
    parser.add_argument("--ranks", type=int, nargs="+", choices=models.RANKS, default=[2])
    parser.add_argument("--width", type=int, nargs="+", choices=models.WIDTHS, default=list(models.WIDTHS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--steps", type=models.positive, help="in a block; else 16, 2, 1 at widths 32, 256, 512")
    parser.add_argument("--out", type=models.output, nargs="+", default=[], help="files ending in .json, .svg or .png")
    options = parser.parse_args()
    arguments = options.width, options.schedules, options.steps, options.rounds
    parts = (
        part for ranks in options.ranks for part in models.in_processes(job, ranks, *arguments, limit=options.limit)
    )
    rows = models.report("peers", options.json, parts, show)
    for path in options.out:
        if path.suffix == ".json":
            models.write(path, rows)
        else:
            draw(rows, path)


if __name__ == "__main__":
    main()
