"""Time a stage's backward, fused and split: fpipe beside eager autograd and torch's pipelining runtime.

    python -m benchmarks.autodiff                               # every stage and width, then the time to trace
    python -m benchmarks.autodiff --widths 32 256 --stage mlp
    python -m benchmarks.autodiff --autodiff eager              # our pieces by eager autograd instead of graphs

All ways take turns on one thread, each with a forward of its own, in an order shuffled every round, because the run
before affects caches and memory. Ratios are medians of the rounds' ratios. Gradients are returned or set, and never
accumulated. `split` is the input gradients, then the weight gradients. Before anything is timed, fpipe's gradients
must equal eager autograd's bit for bit, and the runtime's within rounding.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import _backward as runtime

from fpipe import Stage
from fpipe.autodiff.eager import Eager
from fpipe.autodiff.traced import Traced
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import flatten

LEAST_ROUNDS, MOST_ROUNDS, WARM_UP = 30, 1000, 3
TRACED_BLOCKS, TRACED_WIDTH, TRACE_SECONDS = 12, 256, 3.0
RATIOS: dict[str, tuple[str, str, Callable[[int], float | None]]] = {  # with the target at a width
    "fused / eager": ("fused", "eager", lambda width: 1.0),
    "split / fused": ("split", "fused", lambda width: 1.05 if width >= 256 else 1.1),
    "split / torch's split": ("split", "torch's split", lambda width: 0.6 if width == 32 else None),
    "fused / stage_backward": ("fused", "stage_backward", lambda width: None),
    "torch's split / its fused": ("torch's split", "stage_backward", lambda width: None),
}


class Way(NamedTuple):
    """One way to differentiate: `forward() -> kept`, `backward(*kept) -> gradients`, and a way to drop these."""

    forward: Callable[[], tuple[Any, ...]]
    backward: Callable[..., list[Tensor]]
    forget: Callable[[], None] = lambda: None


def transformer(params: Sequence[dict[str, Tensor]], x: Tensor) -> Tensor:
    """Pre-norm blocks with causal attention and a fourfold MLP."""
    for p in params:
        h = F.layer_norm(x, x.shape[-1:], p["norm"], p["norm_bias"])
        q, k, v = F.linear(h, p["qkv"], p["qkv_bias"]).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (max(2, x.shape[-1] // 64), -1)).transpose(1, 2) for y in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(h, p["out"], p["out_bias"])
        h = F.layer_norm(x, x.shape[-1:], p["again"], p["again_bias"])
        x = x + F.linear(F.gelu(F.linear(h, p["up"], p["up_bias"])), p["down"], p["down_bias"])
    return x


def mlp(params: Sequence[dict[str, Tensor]], x: Tensor) -> Tensor:
    """Linear and ReLU, repeated: hardly any work per operator."""
    for p in params:
        x = F.relu(F.linear(x, p["weight"], p["weight_bias"]))
    return x


BLOCK = {"norm": (1,), "qkv": (3, 1), "out": (1, 1), "again": (1,), "up": (4, 1), "down": (1, 4)}  # in widths
STAGES = {"transformer": (transformer, BLOCK, 2), "mlp": (mlp, {"weight": (1, 1)}, 4)}


def make_params(block: dict[str, tuple[int, ...]], width: int, blocks: int) -> list[dict[str, Tensor]]:
    shapes = {name: [n * width for n in shape] for name, shape in block.items()}
    shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
    return [{name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()} for _ in range(blocks)]


def eager_ways(fn: Callable[..., Tensor], params: Any, x: Tensor, cotangent: Tensor) -> dict[str, Way]:
    """torch's ways: its autograd, and the functions of its pipelining runtime."""
    leaves, spec = flatten(params)
    own = [p.detach().requires_grad_() for p in leaves]
    tree = spec.unflatten(own)

    def forget() -> None:
        for p in own:
            p.grad = None

    def forward() -> tuple[Tensor, Tensor]:
        given = x.detach().requires_grad_()
        return fn(tree, given), given

    def eager(output: Tensor, given: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(output, [*own, given], cotangent))

    def stage_backward(output: Tensor, given: Tensor) -> list[Tensor]:
        gradients = runtime.stage_backward((output,), (cotangent,), (given,))
        return [*(p.grad for p in own), *gradients]

    def split(output: Tensor, given: Tensor) -> list[Tensor]:
        gradients, groups = runtime.stage_backward_input([output], [cotangent], [given], iter(own))
        runtime.stage_backward_weight(iter(own), groups)
        return [*(p.grad for p in own), *gradients]

    ways = {"eager": eager, "stage_backward": stage_backward, "torch's split": split}
    return {name: Way(forward, backward, forget) for name, backward in ways.items()}


def our_ways(fn: Callable[..., Tensor], params: Any, x: Tensor, cotangent: Tensor, autodiff: str) -> dict[str, Way]:
    stage = Stage(fn, reads=(0,))
    piece = Eager(stage) if autodiff == "eager" else Traced(stage, fallback=False)
    prepared = piece.prepare(params)
    sources, data = {0: flatten(x.detach().requires_grad_())}, Microbatch(None, None)

    def forward() -> tuple[Any]:
        _, residuals, _ = piece.forward(prepared, None, sources, data, keep=True)
        return (residuals,)

    def fused(residuals: Any) -> list[Tensor]:
        weights, inputs = piece.backward(residuals, [cotangent])
        return [*weights, *inputs[0]]

    def split(residuals: Any) -> list[Tensor]:
        inputs, deferred = piece.backward_input(residuals, [cotangent])
        return [*piece.backward_weight(deferred), *inputs[0]]

    return {"fused": Way(forward, fused), "split": Way(forward, split)}


def check(ways: dict[str, Way]) -> None:
    """Check all gradients against eager autograd: fpipe's bit for bit, the runtime's within rounding."""
    expected = ways["eager"].backward(*ways["eager"].forward())
    for name, (forward, backward, forget) in ways.items():
        bound = 0 if name in ("fused", "split") else None
        torch.testing.assert_close({name: backward(*forward())}, {name: expected}, rtol=bound, atol=bound)
        forget()


def timed(way: Way) -> tuple[float, float]:
    """Time the forward and the backward, in seconds; their results are dropped after the clock stops."""
    start = time.perf_counter()
    kept = way.forward()
    middle = time.perf_counter()
    gradients = way.backward(*kept)
    end = time.perf_counter()
    del gradients
    way.forget()
    return middle - start, end - middle


def measure(ways: dict[str, Way], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Time every round. The garbage collector runs only between the ways."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    order = random.Random(0)
    gc.collect()
    gc.freeze()
    gc.disable()
    end = time.perf_counter() + seconds
    for i in range(WARM_UP + MOST_ROUNDS):
        if i >= WARM_UP + LEAST_ROUNDS and time.perf_counter() > end:
            break
        for name in order.sample(list(ways), len(ways)):
            gc.collect()
            times[name].append(timed(ways[name]))
    gc.enable()
    gc.unfreeze()
    return {name: found[WARM_UP:] for name, found in times.items()}


def ratio(over: Sequence[float], under: Sequence[float], target: float | None = None) -> dict[str, Any]:
    """Return the median with its 95 % interval, without an assumption about the distribution of the ratios."""
    found = sorted(a / b for a, b in zip(over, under, strict=True))
    median, low = statistics.median(found), int(len(found) / 2 - 0.98 * len(found) ** 0.5)
    interval = found[low], found[-1 - low]
    return {"median": median, "interval": interval, "target": target, "verdict": verdict(median, interval, target)}


def verdict(median: float, interval: tuple[float, float], target: float | None) -> str | None:
    """Return whether a target is met, and whether the difference is significant."""
    if target is None:
        return None
    return ("met" if median <= target else "missed") + (", barely" if interval[0] <= target < interval[1] else "")


def case(kind: str, width: int, shape: tuple[int, int], autodiff: str, seconds: float) -> dict[str, Any]:
    """Measure one stage at one width, as a row for `--json`."""
    torch.manual_seed(0)
    fn, block, blocks = STAGES[kind]
    params, x, cotangent = make_params(block, width, blocks), torch.randn(*shape, width), torch.randn(*shape, width)
    ways = eager_ways(fn, params, x, cotangent) | our_ways(fn, params, x, cotangent, autodiff)
    check(ways)
    times = measure(ways, seconds)
    forward, backward = ({name: [t[i] for t in found] for name, found in times.items()} for i in (0, 1))
    both = {name: [sum(t) for t in found] for name, found in times.items()}
    ratios = {name: ratio(backward[a], backward[b], target(width)) for name, (a, b, target) in RATIOS.items()}
    ratios["our forward / eager's"] = ratio(forward["fused"], forward["eager"])
    ratios["fused / eager, both phases"] = ratio(both["fused"], both["eager"])
    medians = {name: [1e3 * statistics.median(t[name]) for t in (forward, backward)] for name in ways}
    row = {"stage": kind, "width": width, "shape": shape, "autodiff": autodiff, "rounds": len(times["eager"])}
    return row | {"milliseconds": medians, "ratios": ratios}


def show(row: dict[str, Any]) -> None:
    batch, length = row["shape"]
    print(f"\n{row['stage']}, width {row['width']}, {batch}x{length}, {row['autodiff']}: {row['rounds']} rounds")
    print(f"  {'':26} {'forward ms':>11} {'backward ms':>12}")
    for name, (forward, backward) in row["milliseconds"].items():
        print(f"  {name:26} {forward:11.3f} {backward:12.3f}")
    print(f"  {'':26} {'median':>11} {'95 % of it':>12}   target")
    for name, found in row["ratios"].items():
        interval, target = "{:.3f}-{:.3f}".format(*found["interval"]), found["target"]
        against = "" if target is None else f"   <= {target:.2f} {found['verdict']}"
        print(f"  {name:26} {found['median']:11.3f} {interval:>12}{against}", flush=True)


def trace(autodiff: str) -> dict[str, Any]:
    """Time tracing, partitioning and code generation: a deep stage's first use less its second; median of three."""
    params, x = make_params(BLOCK, TRACED_WIDTH, TRACED_BLOCKS), torch.randn(2, 64, TRACED_WIDTH)
    found = []
    for _ in range(3):
        ways = our_ways(transformer, params, x, torch.randn_like(x), autodiff)
        first, second = (sum(sum(timed(way)) for way in ways.values()) for _ in range(2))
        found.append(first - second)
    seconds, interval = statistics.median(found), (min(found), max(found))
    row = {"stage": f"transformer of {TRACED_BLOCKS} blocks", "width": TRACED_WIDTH, "autodiff": autodiff}
    return row | {
        "seconds": seconds,
        "target": TRACE_SECONDS,
        "verdict": verdict(seconds, interval, TRACE_SECONDS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--shape", help="batch x sequence, like 2x64; else 2x8, 2x64, 2x128 at widths 32, 256, 1024")
    parser.add_argument("--autodiff", choices=["graph", "eager"], default="graph")
    parser.add_argument("--seconds", type=float, default=20.0, help=f"a width, once {LEAST_ROUNDS} rounds are done")
    parser.add_argument("--json", action="store_true", help="print a list of dicts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind, width in itertools.product(options.stage, options.widths):
        batch, length = map(int, (options.shape or f"2x{min(128, width // 4)}").split("x"))
        rows.append(case(kind, width, (batch, length), options.autodiff, options.seconds))
        if not options.json:
            show(rows[-1])
    rows.append(trace(options.autodiff))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print("\ntracing a {stage}, width {width}: {seconds:.2f} s, target {target:g} s {verdict}".format(**rows[-1]))


if __name__ == "__main__":
    main()
