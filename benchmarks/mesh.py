"""Compare fpipe's replicas with torch's FSDP2 under torch.distributed.pipelining: the same modules, data and schedules.

    python -m benchmarks.mesh                                      # 2 ranks x 2 replicas, every width and schedule
    python -m benchmarks.mesh --width 32 --schedules zb-v --resident all
    python -m benchmarks.mesh --json                               # a list of objects, and nothing else
    python -m benchmarks.mesh --out mesh.json                      # and into a file, with the machine

The model, the microbatches and the timing are those of `benchmarks.peers`; each of two replicas has a batch of its own.
Parameters are sharded over the replicas: `interop.fsdp` and `fully_shard` of each stage. Four processes over gloo, one
thread each. Before anything is timed, both must give the same gradients.

`resident` is the number of stages that are whole on a rank at a time. "all": torch with
`reshard_after_forward=False` and as many active stages as a rank has. "1": torch's runtime with
`max_active_stages=1`; and once more with `reshard_after_forward=True`, which gathers in each forward and backward (not
under a split backward, where torch's gradients are then wrong). A rank that has one stage has all of them.

Times are medians of rounds, ratios medians of the rounds' ratios. Bytes are the most that a step has at once beyond
shards and batch, on the rank that has the most. Gathers are counted on the rank that has the most.

Nothing is predicted: where the four processes exceed cores, a rank that waits gives its core to another, so that
bubbles vanish. The ratio is fpipe's time over torch's.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import schedules as theirs

import fpipe
from benchmarks import models, peers
from fpipe import Plan, handlers, interop
from fpipe.effects import Gather
from fpipe.schedules.catalogue import CATALOGUE

peers.SCHEDULES["looped-bfs"] = theirs.ScheduleLoopedBFS
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-v")
RANKS = REPLICAS = 2
ALL, ONE, AGAIN = "all", "1", "1, reshard_after_forward"
RESIDENT = (ALL, ONE, AGAIN)


class Sharded(peers.Pair):
    """One schedule's step on one rank of one replica."""

    def check(self) -> str:
        """Return the gradients that differ; fpipe's loss is of all replicas, torch's of one."""
        _, grads = self.fpipe()
        self.peer()
        return ", ".join(self.different_gradients(grads))


def is_case(name: str, resident: str) -> bool:
    """Whether the benchmark measures a schedule with this number of resident stages.

    With `reshard_after_forward=True`, torch computes wrong gradients where the backward is split, as in zb-v.
    """
    if CATALOGUE[name].plan(RANKS, models.MICROBATCHES).stages == RANKS:
        return resident == ALL
    return name != "zb-v" or resident != AGAIN


def pair(
    name: str, resident: str, mesh: DeviceMesh, width: int, layers: list[nn.Module], handler: handlers.Distributed
) -> tuple[Sharded, int, Callable[[], int]]:
    """Return both steps, and the gathers of a step: of fpipe's, and a function that counts those of torch's."""
    entry, rank = CATALOGUE[name], mesh["pp"].get_local_rank()
    placement = entry.plan(RANKS, models.MICROBATCHES).placement
    modules = models.stages(copy.deepcopy(layers), placement.stages)
    pipeline, params = interop.from_modules(models.stages(layers, placement.stages), loss=models.loss_fn)
    plan = pipeline.plan(placement, models.MICROBATCHES, REPLICAS)
    own = {stage: modules[stage] for stage in plan.stages_on(rank)}
    shards = interop.fsdp(pipeline.params_on(params, plan, rank), mesh["dp"])
    batch, target = data(width, mesh["dp"].get_local_rank(), plan, own)
    room = len(own) if resident == ALL else 1
    step = fpipe.value_and_grad(pipeline, entry.schedule(plan), plan, handler=handler, resident=room)
    program = fpipe.lower(entry.schedule(plan), plan, resident=room)[rank]
    for module in own.values():
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=resident == AGAIN)
    theirs._add_unshard_reshard.__defaults__ = (room,)  # max_active_stages
    peer = peers.peer(name, plan, own, batch, target, mesh["pp"].get_group())
    gathers = sum(type(e) is Gather for e in program)
    return Sharded(lambda: step(shards, batch, target), peer, own), gathers, lambda: counted(peer, own)


def data(width: int, replica: int, plan: Plan, own: Mapping[int, nn.Module]) -> tuple[Tensor | None, Tensor | None]:
    """Return the batch and the target of a replica, on the ranks that read them."""
    rows = [x.roll(replica, 0) + replica for x in models.data(width)]
    return rows[0] if 0 in own else None, rows[1] if plan.stages - 1 in own else None


def counted(step: Callable[[], object], own: Mapping[int, nn.Module]) -> int:
    """Run torch's step; return how many times it gathers a stage's parameters."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    count, gather = 0, groups.foreach_all_gather

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return gather(*args, **options)

    groups.foreach_all_gather = counting
    try:
        step()
    finally:
        groups.foreach_all_gather = gather
    assert all(isinstance(module, FSDPModule) for module in own.values())
    return count


def job(
    rank: int,
    ranks: int,
    widths: Sequence[int],
    names: Sequence[str],
    rooms: Sequence[str],
    steps: int | None,
    rounds: int,
) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield for every width the rows, as measured on rank 0."""
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "pp"))
    handler = handlers.Distributed(mesh["pp"], replicas=mesh["dp"], timeout=models.TIMEOUT)
    for width in widths:
        layers = models.layers(width)
        cases = [(name, room) for name in names for room in rooms if is_case(name, room)]
        steps_of = {case: pair(*case, mesh, width, layers, handler) for case in cases}
        keys = {case: ", resident ".join(case) for case in cases}
        figures = {}
        for case, (both, ours, count) in steps_of.items():
            peers.agree(keys[case], ranks, both.check())
            gathers: list[Any] = [None] * ranks
            dist.all_gather_object(gathers, (ours, count()))
            peers.forget(both.own.values())
            memory = peers.memory(both, ranks)
            most = [max(column) for column in zip(*gathers, strict=True)]
            figures[case] = {key: max(each) for key, each in memory.items()}
            figures[case] |= {"gathers": most[0], "peer_gathers": most[1]}
        pairs = {keys[case]: both for case, (both, *_) in steps_of.items()}
        times = peers.measure(pairs, {}, steps or max(1, models.WIDTHS[-1] // width // 2), rounds)
        yield [row(case, keys[case], width, times) | figures[case] for case in cases] if rank == 0 else []


def row(case: tuple[str, str], key: str, width: int, times: peers.Times) -> dict[str, Any]:
    ours, torchs = times[key, "fpipe"], times[key, "peer"]
    ratios = [a / b for a, b in zip(ours, torchs, strict=True)]
    return {
        "schedule": case[0],
        "resident": case[1],
        "width": width,
        "fpipe_ms": statistics.median(ours),
        "peer_ms": statistics.median(torchs),
        "ratio": statistics.median(ratios),
        "rounds": len(ours),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{RANKS} ranks x {REPLICAS} replicas, width {rows[0]['width']}, {rows[0]['rounds']} rounds", end="")
    print("; ranks exceed cores, so that nothing is predicted" if models.cores() < RANKS * REPLICAS else "")
    print(f"{'':45} {'ms a step':>17} {'':7} {'peak MiB':>15} {'gathers':>13}")
    print(f"{'':19}{'resident':26} {'fpipe':>8} {'torch':>8} {'ratio':>7} {'fpipe':>7} {'torch':>7}", end="")
    print(f" {'fpipe':>6} {'torch':>6}")
    for r in rows:
        print(
            f"{r['schedule']:19}{r['resident']:26} {r['fpipe_ms']:8.2f} {r['peer_ms']:8.2f} {r['ratio']:7.3f}", end=""
        )
        print(f" {r['fpipe_bytes'] / 2**20:7.1f} {r['peer_bytes'] / 2**20:7.1f}", end="")
        print(f" {r['gathers']:6} {r['peer_gathers']:6}", flush=True)


def main() -> None:
    parser = models.parser(__doc__, rounds=7, limit=3600)
    parser.add_argument("--width", type=int, nargs="+", choices=models.WIDTHS, default=[32, 256])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--resident", nargs="+", choices=RESIDENT, default=list(RESIDENT))
    parser.add_argument("--steps", type=models.positive, help="in a block; else 8, 1 at widths 32, 256")
    options = parser.parse_args()
    arguments = options.width, options.schedules, options.resident, options.steps, options.rounds
    parts = models.in_processes(job, RANKS * REPLICAS, *arguments, limit=options.limit)
    models.run("mesh", options, parts, show)


if __name__ == "__main__":
    main()
