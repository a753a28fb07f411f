"""Measure how far orders of the automatic zero-bubble schedule are above the lower bound, and how long searches take.

    python -m benchmarks.orders
    python -m benchmarks.orders --ranks 8 --limits 1 2 --microbatches 32
    python -m benchmarks.orders --times 3,4,2,0.3 --deferred 1
    python -m benchmarks.orders --json                             # a list of objects, and nothing else
    python -m benchmarks.orders --out orders.json                  # and into a file, with the machine

All is simulated. A row is one chain of p stages, one on each rank, with the times of a forward, an input gradient, a
weight gradient and a transfer. A forward keeps a byte, of which `--deferred` stays after the input gradient. `limit` is
in bytes on a rank, p times one of `--limits`; `gap` is the cost over `bound`, less 1; `seconds` are of processor time.
Of each p, m and limit the line with the largest gap is printed, with the longest search.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import models
from fpipe import Costs, Placement, Plan, simulate
from fpipe.schedules import lower_bound, zb_auto

Times = tuple[float, ...]  # F, B, W, c
TIMES: list[Times] = [(1, 1, 1, 0), (18.5, 18.1, 9.3, 0.6), (29.5, 28.1, 23.4, 0.8)]
KEYS = ("ranks", "microbatches", "limit", "bound", "cost", "gap", "seconds")
COLUMNS = "{ranks:>5} {microbatches:>12} {limit:>6} {bound:>10} {cost:>10} {gap:>7} {seconds:>7}"


def row(ranks: int, microbatches: int, limit: int, times: Times, deferred: float) -> dict[str, Any]:
    plan, (f, b, w, c) = Plan(Placement.loop(ranks), microbatches), times
    costs = Costs(f, b, w, communication=c, residuals=1, deferred=deferred)
    began = time.process_time()
    schedule = zb_auto(plan, costs, memory_limit_bytes=limit)
    seconds = time.process_time() - began
    bound, cost = lower_bound(plan, costs, memory_limit_bytes=limit), simulate(schedule, plan, costs).cost
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "limit": limit,
        "times": times,
        "deferred": deferred,
        "bound": bound,
        "cost": cost,
        "gap": cost / bound - 1,
        "seconds": seconds,
    }


def rows(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each p, m and limit."""
    for ranks in options.ranks:
        for microbatches in options.microbatches or [4 * ranks]:
            for times_p in options.limits:
                limit = int(times_p * ranks)
                yield [row(ranks, microbatches, limit, times, options.deferred) for times in options.times]


def show(part: list[dict[str, Any]]) -> None:
    worst = max(part, key=lambda each: each["gap"])
    figures = {key: f"{worst[key]:.1f}" for key in ("bound", "cost")}
    longest = max(each["seconds"] for each in part)
    print(COLUMNS.format_map(worst | figures | {"gap": f"{worst['gap']:.2%}", "seconds": f"{longest:.1f}"}), flush=True)


def four(text: str) -> Times:
    """Return the times of one option."""
    try:
        times = tuple(map(float, text.split(",")))
    except ValueError:
        times = ()
    if len(times) != 4 or min(times) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not F,B,W,c: four numbers of at least 0")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=models.positive, default=[8, 16, 32])
    parser.add_argument("--microbatches", nargs="+", type=models.positive, help="by default four times the ranks")
    parser.add_argument("--limits", nargs="+", type=float, default=[1, 1.5, 2, 2.5, 3], help="times the ranks")
    parser.add_argument("--times", nargs="+", type=four, default=TIMES, metavar="F,B,W,c")
    parser.add_argument("--deferred", type=float, default=0.5, help="of the byte that a forward keeps")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    models.add_out(parser)
    options = parser.parse_args()
    if not options.json:
        print(COLUMNS.format_map({key: key for key in KEYS}))
    reported = models.report("orders", options.json, rows(options), show)
    if options.out:
        models.write(options.out, reported)


if __name__ == "__main__":
    main()
