"""Workers that torchrun starts again meet each other, and not the addresses of dead ones."""

import os
import subprocess
import sys

import pytest

from tests.support.combinations import ALL
from tests.support.forked import free_port

SCRIPT = """
import os, signal, sys
import torch, fpipe
from fpipe import handlers

torch.set_num_threads(1)
handler = handlers.auto(timeout=20)
pipeline = fpipe.Pipeline([lambda p, x: x * p] * 2, loss=lambda y, t: (y - t).square().mean())
plan = pipeline.plan(fpipe.Placement.loop(2), 2)
step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handler)
x, again = torch.ones(4), os.environ["TORCHELASTIC_RESTART_COUNT"]
params = {handler.rank: torch.tensor(2.0)}
loss, _ = step(params, x, x)
if again == "0":
    if handler.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(params, x, x)
print(f"rank {handler.rank} after restart {again}: {loss.item()}", flush=True)
"""


@pytest.mark.skipif(not ALL, reason="starts four processes that import torch")
@pytest.mark.parametrize("where", ["one host", "several"])
def test_workers_that_are_started_again_train(tmp_path, where):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--standalone"]
    if where == "several":
        end = f"localhost:{free_port()}"
        options = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", end]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", "2", "--max-restarts", "1"]
    variables = {"several": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}.get(where, {})  # docs/hosts.md
    environment = {**os.environ, **variables}
    result = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=240, env=environment)
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} after restart 1: 9.0" for rank in range(2)], result.stderr[-2000:]
