"""Kernels that take a given time: they spin on the device's clock, or until the host sets a flag."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch

from benchmarks.gpu.setting import Skipped

CYCLES = 2_000_000_000  # of a second at the highest clock of today's GPUs: a sleep takes at least its time
THREADS, REGISTERS = 640, 80  # with its own, as many as a block of NCCL's has: no other block fits beside it
SOURCE = """
extern "C" __global__ void __launch_bounds__(%(threads)d, 1)
spin(volatile int* flag, volatile float* memory, int microseconds)
{
    float values[%(registers)d];
    #pragma unroll
    for (int i = 0; i < %(registers)d; ++i) values[i] = memory[i * %(threads)d + threadIdx.x];
    unsigned long long start, now;
    asm volatile("mov.u64 %%0, %%%%globaltimer;" : "=l"(start));
    bool over = false;
    do {
        if (threadIdx.x == 0) {
            asm volatile("mov.u64 %%0, %%%%globaltimer;" : "=l"(now));
            over = *flag != 0 || now - start >= 1000ull * microseconds;
        }
    } while (!__syncthreads_or(over));
    #pragma unroll
    for (int i = 0; i < %(registers)d; ++i) memory[i * %(threads)d + threadIdx.x] = values[i];
}
"""


def busy(device: torch.device, seconds: float) -> None:
    """Keep the current stream, or the CPU, busy for at least some seconds."""
    if device.type == "cpu":
        time.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * CYCLES))  # type: ignore[no-untyped-call]


class Spin:
    """Kernels of blocks that fill a multiprocessor each, and end after a time or when `release` is called.

    The kernel has run once: CUDA loads a kernel at its first launch, for which it may wait until the device is idle.

    Raises:
        Skipped: this torch can't compile a kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernel = _spin()
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._memory = torch.zeros(REGISTERS * THREADS, device=device)
        self.launch(0.0)
        torch.cuda.synchronize(device)

    def launch(self, seconds: float, blocks: int = 1, stream: Any = None, threads: int = THREADS) -> None:
        """Launch a kernel on a stream, by default the current one."""
        arguments = [self._flag, self._memory, round(seconds * 1e6)]
        self._kernel(grid=(blocks, 1, 1), block=(threads, 1, 1), args=arguments, stream=stream)

    def release(self) -> None:
        """Let all kernels end that run, and those that are launched before `hold`."""
        self._flag[0] = 1

    def hold(self) -> None:
        self._flag[0] = 0


@cache
def _spin() -> Any:
    try:
        return torch.cuda._compile_kernel(SOURCE % {"threads": THREADS, "registers": REGISTERS}, "spin")
    except (AttributeError, RuntimeError, OSError) as error:
        raise Skipped(f"torch {torch.__version__} can't compile a kernel: {error}") from error
