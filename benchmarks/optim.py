"""Compare an update of `interop.optimizer` with a step of torch's own optimizer: times in turn, and peak memory.

    python -m benchmarks.optim
    python -m benchmarks.optim --device cuda --width 2048

`torch` is `stepper.step()` on parameters that have their gradients, `donated` an update with `donate=True`, `pure` one
without. `sharded` and `sharded pure` are these on DTensors, all of whose rows this process has, and `DTensor` is
`stepper.step()` on such. A round runs each once forth and back (A B C C B A); ratios are to torch in the same round.
Bytes are peak bytes of tensors beyond parameters, gradients and state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fpipe import interop, peak_bytes

Way = Callable[[], None]
KERNELS: dict[str, dict[str, bool]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def model(layers: int, width: int, device: torch.device) -> dict[int, dict[str, torch.Tensor]]:
    """Return a matrix and a bias for each layer."""
    generator = torch.Generator().manual_seed(0)
    return {
        s: {
            "weight": torch.randn(width, width, generator=generator).to(device),
            "bias": torch.randn(width, generator=generator).to(device),
        }
        for s in range(layers)
    }


def ways(
    layers: int, width: int, device: torch.device, kernel: dict[str, bool], mesh: dist.DeviceMesh
) -> dict[str, Way]:
    """Make each way with its own parameters, gradients and state; one update has filled the state."""

    def shards() -> Any:
        return interop.fsdp(model(layers, width, device), mesh)

    by_name = {"torch": _theirs(model(layers, width, device), model(layers, width, device), kernel)}
    for name, donate in (("donated", True), ("pure", False)):
        by_name[name] = _ours(model(layers, width, device), model(layers, width, device), donate, kernel)
    for name, donate in (("sharded", True), ("sharded pure", False)):
        by_name[name] = _ours(shards(), shards(), donate, kernel)
    by_name["DTensor"] = _theirs(shards(), shards(), kernel)
    for way in by_name.values():
        way()
    return by_name


@contextmanager
def alone(device: torch.device) -> Iterator[dist.DeviceMesh]:
    """Yield a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def _theirs(grads: Any, params: Any, kernel: dict[str, bool]) -> Way:
    leaves = [p.requires_grad_() for tree in params.values() for p in tree.values()]
    for p, g in zip(leaves, (g for tree in grads.values() for g in tree.values()), strict=True):
        p.grad = g
    stepper = torch.optim.AdamW(leaves, lr=1e-3, **kernel)
    return lambda: stepper.step()


def _ours(grads: Any, params: Any, donate: bool, kernel: dict[str, bool]) -> Way:
    init, update = interop.optimizer(torch.optim.AdamW, lr=1e-3, donate=donate, **kernel)
    held = [params, init(params)]

    def way() -> None:
        held[:] = update(grads, held[1], held[0])

    return way


def timed(way: Way, device: torch.device) -> float:
    _settled(device)
    start = time.perf_counter()
    way()
    _settled(device)
    return time.perf_counter() - start


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row(name: str, layers: int, width: int, device: torch.device, rounds: int) -> dict[str, Any]:
    with alone(device) as mesh:
        return _row(name, ways(layers, width, device, KERNELS[name], mesh), layers, width, device, rounds)


def _row(
    name: str, by_name: Mapping[str, Way], layers: int, width: int, device: torch.device, rounds: int
) -> dict[str, Any]:
    times: dict[str, list[float]] = {way: [] for way in by_name}
    for _ in range(rounds):
        for way in (*by_name, *reversed(by_name)):
            times[way].append(timed(by_name[way], device))
    ratios = {way: statistics.median(a / b for a, b in zip(times[way], times["torch"], strict=True)) for way in by_name}
    parameters = layers * (width * width + width) * 4
    return {
        "kernel": name,
        "layers": layers,
        "width": width,
        "milliseconds": {way: 1e3 * statistics.median(taken) for way, taken in times.items()},
        "ratios": ratios,
        "parameter_bytes": parameters,
        "peak_bytes": {way: peak_bytes(call, device) for way, call in by_name.items()},
    }


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['kernel']}, {found['layers']} layers of width {found['width']}")
    print(f"  {'':12} {'ms':>9} {'ratio':>7} {'bytes at the peak, in parameters':>34}")
    for way, taken in found["milliseconds"].items():
        share = found["peak_bytes"][way] / found["parameter_bytes"]
        print(f"  {way:12} {taken:9.3f} {found['ratios'][way]:7.3f} {share:34.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, nargs="+", default=[32, 256, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print a list of dicts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device, rows = torch.device(options.device), []
    for width in options.width:
        for name in KERNELS:
            rows.append(row(name, options.layers, width, device, options.rounds))
            if not options.json:
                show(rows[-1])
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
