"""The checks: their parts, their time limits, and when each passes. No torch."""

from __future__ import annotations

from typing import NamedTuple

PARTS = {"a": "correctness", "b": "failures", "c": "numbers"}
MODULES = {
    "queues": ("queues", "stolen_sms"),
    "host": ("host_time", "graph"),
    "streams": ("makespan",),
    "marks": ("marks",),
}
"""The modules of those checks that are not in the module of their part's name."""


class Check(NamedTuple):
    """A function `module:function` of a `Setting` (benchmarks/gpu/setting.py), run in a process of its own.

    Args:
        part: a key of `PARTS`.
        seconds: its time limit.
        passes: when it passes, for the documentation.
        needs: the name of a check without which it can't pass; it is skipped if that one ran and did not pass.
    """

    part: str
    seconds: float
    function: str
    passes: str
    needs: str | None = None


def _check(part: str, seconds: float, name: str, passes: str, needs: str | None = None) -> tuple[str, Check]:
    module = next((module for module, names in MODULES.items() if name in names), PARTS[part])
    return name, Check(part, seconds, f"benchmarks.gpu.{module}:{name}", passes, needs)


CHECKS: dict[str, Check] = dict(
    [
        _check("a", 20, "machine", "always: versions, free memory, whether MPS is there"),
        _check("a", 40, "transport", "two processes on one GPU exchange equal bytes over NCCL"),
        _check(
            "a",
            110,
            "local_bits",
            "cases under every schedule have the reference's bits, in one process, as many as there is time for",
        ),
        _check("a", 140, "nccl_bits", "so they have over NCCL, on 2 and 4 ranks, in two steps each", "transport"),
        _check(
            "a",
            60,
            "replica_bits",
            "so they have with replicas, whole and sharded parameters, on 2 x 2 ranks",
            "transport",
        ),
        _check(
            "a",
            70,
            "features",
            "dtypes, trees, shapes that change, gather, weight, modes, norms, checkpoints, recordings: as over gloo",
            "transport",
        ),
        _check(
            "a",
            60,
            "captured_bits",
            "so they have as a CUDA graph, and as one for each piece, in one process and over NCCL",
        ),
        _check("a", 75, "large_messages", "8 MiB in each message, small buffers: no hang, equal bits", "transport"),
        _check("a", 25, "host_waits", "no step waits on the host for the device: plain, weighed, seeded"),
        _check(
            "b",
            270,
            "failures",
            "each failure is a TransportError on the other rank within the timeout and 3 s, and exit code 1",
            "transport",
        ),
        _check("b", 90, "cut", "2 and 4 receives that never end are cut within 2 s", "transport"),
        _check("b", 60, "dropped_handler", "losses and outputs are right where the handler goes first", "transport"),
        _check("b", 60, "saved_after_failure", "an error comes before a checkpoint is written", "transport"),
        _check("b", 90, "many_handlers", "threads and memory stay the same while handlers come and go", "transport"),
        _check("c", 50, "queues", "always: how many waiting streams stop compute, by CUDA_DEVICE_MAX_CONNECTIONS"),
        _check(
            "c", 60, "stolen_sms", "always: a GEMM's speed beside spinning blocks, and while a rank waits for a value"
        ),
        _check(
            "c",
            150,
            "host_time",
            "host time of captured steps is at most 10 % of device time at stages of 1 ms; reported for others",
        ),
        _check("c", 115, "autodiff", "fused and split backward meet the targets of benchmarks.autodiff"),
        _check("c", 45, "optim", "a donated update takes at most 1.05 of torch's time"),
        _check("c", 60, "memory", "the measured peak of a rank is within 2 % of verify's"),
        _check("c", 40, "makespan", "kernels that take a given time end within 5 % of the simulator's makespan"),
        _check("c", 30, "marks", "recorded times are within 20 µs of torch.profiler's kernels"),
        _check(
            "c",
            40,
            "graph",
            "a step captured as one CUDA graph, and by pieces, has the bits of one that is not; its speed",
        ),
    ]
)
