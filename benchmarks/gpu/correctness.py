"""Part A: bits of cases and schedules, types, large messages, and waits on the host.

Jobs and cases are those of the tests (tests/support). Results are compared with the reference's on the same device.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fpipe
from benchmarks.gpu.setting import Ranks, Setting
from benchmarks.gpu.solo import Solo
from fpipe import Pipeline, handlers, schedules
from tests.support import cases, device_jobs, jobs, replica_jobs
from tests.support.sharing import sharing

MICROBATCHES = 4
EVERY_KIND = ("one_f_one_b", "zb_v", "gpipe", "interleaved_1f1b", "dualpipe_v", "dualpipe", "overlap")
OF_FOUR = ("attention", "skip", "tied", "dropout", "weighted")


def machine(setting: Setting) -> None:
    """Report versions, variables and the GPU."""
    setting.report.add(torch=torch.__version__, python=platform.python_version(), cores=os.cpu_count())
    names = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "CUBLAS_")
    setting.report.add(environment={key: value for key, value in os.environ.items() if key.startswith(names)})
    setting.report.add(mps=shutil.which("nvidia-cuda-mps-control") is not None)
    if setting.cpu:
        return
    free, total = torch.cuda.mem_get_info(setting.device)
    properties = torch.cuda.get_device_properties(setting.device)
    setting.report.add(
        gpus=torch.cuda.device_count(),
        gpu=properties.name,
        processors=properties.multi_processor_count,
        capability=f"{properties.major}.{properties.minor}",
        free_bytes=free,
        total_bytes=total,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
    )


def transport(setting: Setting) -> None:
    """Send one message each way between two processes on one GPU, and keep NCCL's messages about the transport."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/%p"}
        try:
            pool = setting.pool(2, "nccl", **variables)
            equal = pool.run(exchange, setting.kind, limit=setting.report.limit())
            setting.report.expect(all(equal), "the bytes that arrived are not those that were sent")
        finally:
            lines = [line for path in Path(folder).iterdir() for line in path.read_text(errors="replace").splitlines()]
            telling = (" via ", "WARN", "Using network", "NCCL version", "p2p channels")
            setting.report.add(nccl_says=sorted({line for line in lines if any(word in line for word in telling)})[:60])


def exchange(rank: int, kind: str) -> bool:
    """Return whether this rank received what the other sent."""
    device = jobs.place(rank, kind)
    here, there = (torch.arange(1 << 16, dtype=torch.int32, device=device) * (3 + each) for each in (rank, 1 - rank))
    arrived = torch.zeros_like(here)
    for source in (0, 1):
        if rank == source:
            dist.send(here, 1 - rank)
        else:
            dist.recv(arrived, source)
    return torch.equal(arrived, there)


def local_bits(setting: Setting) -> None:
    """Run all ranks in this process."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    chosen = ("linear", "attention", "layouts"), ("one_f_one_b", "zb_v", "one_f_one_b_offloaded")
    names, generators = chosen if setting.cpu else (cases.CASES, [*cases.MOVING, *cases.SCHEDULES])
    tasks = [(2, name, schedule) for schedule, name in product(generators, names) if fits(name, schedule)]
    _each(setting, tasks, lambda ranks, name, schedule: local_differences(ranks, name, schedule, setting.device))


def nccl_bits(setting: Setting) -> None:
    """Run each rank in a process."""
    pools = {ranks: Ranks(partial(setting.pool, ranks)) for ranks in ((2,) if setting.cpu else (2, 4))}
    names, generators = (("linear",), EVERY_KIND[:2]) if setting.cpu else (cases.CASES, EVERY_KIND)
    two = [(2, name, schedule) for schedule, name in product(generators, names) if fits(name, schedule)]
    four = [] if setting.cpu else [(4, name, schedule) for schedule, name in product(EVERY_KIND, OF_FOUR)]
    tasks = [task for group in zip_longest(two[::2], two[1::2], four) for task in group if task is not None]

    def differences(ranks: int, name: str, schedule: str) -> list[str]:
        arguments = (name, schedule, MICROBATCHES, ranks, "everything", setting.kind)
        return pools[ranks].differences(jobs.train, *arguments, limit=setting.report.limit(60))

    _each(setting, tasks, differences)


def replica_bits(setting: Setting) -> None:
    """Run two replicas of two ranks, with whole parameters and with sharded ones."""
    pool = Ranks(partial(setting.pool, 4))
    names, generators = (("linear",), EVERY_KIND[:1]) if setting.cpu else (OF_FOUR, EVERY_KIND)

    def differences(which: str | None, name: str, schedule: str) -> list[str]:
        arguments = ("dp2 pp2", name, schedule, MICROBATCHES, which, setting.kind)
        return pool.differences(replica_jobs.train_on_device, *arguments, limit=setting.report.limit(60))

    _each(setting, list(product((None, "least", "all"), names, generators)), differences)


def _each(setting: Setting, tasks: Sequence[tuple[Any, str, str]], differences: Callable[..., list[Any]]) -> None:
    """Count the tasks with equal bits; stop before the check's time is over, and say what was left out."""
    equal, wrong = 0, {}
    for at, task in enumerate(tasks):
        if setting.report.over:
            setting.report.add(left_out=len(tasks) - at, first_left_out=" ".join(map(str, task)))
            setting.report.note(f"{len(tasks) - at} of {len(tasks)} left out for time")
            break
        try:
            places = differences(*task)
        except Exception as error:  # of any kind: the other tasks go on
            places = [f"{type(error).__name__}: {error}"]
        if places:
            wrong[" ".join(map(str, task))] = str(places[:3])[:500]
        else:
            equal += 1
        setting.report.add(tasks=len(tasks), equal=equal, wrong=wrong)
    setting.report.expect(not wrong, f"{len(wrong)} are wrong: {', '.join(wrong)[:200]}")
    setting.report.expect(equal > 0, "there was no time for any")


def fits(name: str, schedule: str) -> bool:
    """Whether the case has no state that copies of a stage would need."""
    return not (schedule in cases.COPIED and name == "modules")


def local_differences(ranks: int, name: str, schedule: str, device: torch.device) -> list[Any]:
    case, generator, plan = cases.make(name, schedule, ranks, MICROBATCHES, cases.rows(MICROBATCHES))
    case, local = cases.on_device(case, device), sharing(handlers.Local([device] * plan.ranks), name, plan.stages)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=local, autodiff="graph", **case.options)
    result = step(case.params, case.batch, case.target, state=case.state, rng=case.rng)
    return jobs.differences(result, cases.oracle(name, plan, device))


def captured_bits(setting: Setting) -> None:
    """Capture steps as graphs, whole and piece by piece: of all ranks in this process, and of each rank alone."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    names, generators = ("linear",) if setting.cpu else cases.CASES, ("zb_v", "one_f_one_b")
    pool = Ranks(partial(setting.pool, 2))

    def differences(where: str, capture: bool | str, name: str, schedule: str) -> list[Any]:
        if where == "local":
            return device_jobs.captured(name, schedule, setting.device, capture)
        arguments = (name, schedule, MICROBATCHES, 2, "everything", setting.kind, capture)
        return pool.differences(jobs.captured, *arguments, limit=setting.report.limit(30))

    ways = product(enumerate(generators), enumerate(names), ("local", "distributed"))
    # Each case meets one schedule whole, and the other by pieces.
    tasks = [(where, (True, "pieces")[(i + j) % 2], name, schedule) for (i, schedule), (j, name), where in ways]
    _each(setting, tasks, differences)


def features(setting: Setting) -> None:
    """Run the jobs of the tests on two ranks, over a job group of gloo and one of NCCL."""
    outcomes: dict[str, str] = {}
    if find_spec("tensorboard") is None:
        outcomes["record"] = "left out: there is no tensorboard"
    for job in ("gloo",) if setting.cpu else ("gloo", "nccl"):
        pool = Ranks(partial(setting.pool, 2, job))
        for ask, arguments in _features():
            if setting.report.over:
                left_out = f"{job}: {ask.__name__} {arguments} and what follows"
                setting.report.add(left_out=left_out)
                setting.report.note(f"left out for time: {left_out}")
                return
            name = " ".join(map(str, (job, ask.__name__, *arguments)))
            with tempfile.TemporaryDirectory() as folder:
                if ask in (device_jobs.norm_and_checkpoint, jobs.record):
                    arguments = (folder,)
                differences = pool.differences(ask, *arguments, setting.kind, limit=setting.report.limit(30))
            outcomes[name] = "; ".join(differences) or "equal"
            setting.report.add(outcomes=outcomes)
            setting.report.expect(not differences, f"{name}: {outcomes[name]}")


def _features() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    yield device_jobs.dtypes, ()
    yield jobs.odd_values, (2, "graph")
    yield jobs.shapes_change, (2, "graph")
    yield jobs.evaluate_gathered, ("dictionary", 2, 3)
    yield jobs.train, ("weighted", "one_f_one_b", MICROBATCHES, 2, "everything")
    yield device_jobs.norm_and_checkpoint, ()
    for mode in device_jobs.MODES:
        yield device_jobs.train_in_mode, (mode,)
    if find_spec("tensorboard") is not None:
        yield jobs.record, ()


def large_messages(setting: Setting) -> None:
    """Send values that NCCL can't take into its buffers, so that a send waits for its receive on the device."""
    ranks, elements = (2, 1 << 12) if setting.cpu else (4, 1 << 21)  # two processes on one GPU take turns: NCCL is slow
    pool = Ranks(partial(setting.pool, ranks, NCCL_BUFFSIZE=str(1 << 20)))
    for schedule, prefetch in product(("one_f_one_b", "zb_v"), (0, 2, 8)):
        arguments = (ranks, schedule, prefetch, elements, setting.kind)
        differences = pool.differences(carry, *arguments, limit=setting.report.limit(30))
        setting.report.add(**{f"{schedule}, prefetch {prefetch}": "; ".join(differences) or "equal"})
        setting.report.expect(not differences, f"{schedule}, prefetch {prefetch}: {differences}")


def carry(rank: int, ranks: int, schedule: str, prefetch: int, elements: int, kind: str) -> list[Any]:
    """Two steps whose values have this many elements: where they differ from the reference."""
    device = jobs.place(rank, kind)
    generator, place = cases.SCHEDULES[schedule]
    placement = place(ranks)
    pipeline = Pipeline([lambda p, x: x * p] * placement.stages, cases.mse)
    plan = pipeline.plan(placement, MICROBATCHES)
    params = {s: torch.tensor(1.0 + s / 8, device=device) for s in range(plan.stages)}
    batch = torch.arange(1.0, 1 + MICROBATCHES, device=device)[:, None].expand(-1, elements).contiguous()
    whole = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Reference())
    params_here = pipeline.params_on(params, plan, rank)
    expected = jobs.expected_on_scalars(whole(params, batch, batch), params_here)
    step = fpipe.value_and_grad(pipeline, generator, plan, handler=jobs.handler(kind), prefetch=prefetch)
    stages = plan.stages_on(rank)
    arguments = (batch if 0 in stages else None, batch if plan.stages - 1 in stages else None)
    return [at for _ in range(2) for at in jobs.differences(step(params_here, *arguments), expected)]


def host_waits(setting: Setting) -> None:
    """Find the lines at which a step makes the host wait for the device, in its second run."""
    case, generator, plan = cases.make("linear", "one_f_one_b", 2, MICROBATCHES)
    case, local = cases.on_device(case, setting.device), handlers.Local([setting.device] * 2)
    weigh = {"weight": lambda target: target.new_ones(()).sum()}
    wanted: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({}, {}),
        "weighed": (weigh, {}),
        "seeded": ({}, {"rng": (0, 0)}),
    }
    for name, (options, more) in wanted.items():
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=local, **options)
        call = lambda step=step, more=more: step(case.params, case.batch, case.target, **more)  # noqa: E731
        call()
        lines = waits(call, setting)
        setting.report.add(**{name: lines})
        setting.report.expect(not lines, f"{name}: waits at {', '.join(lines)}")
    _, grads = call()
    setting.report.add(norm=waits(lambda: fpipe.global_norm(grads, plan, handler=local), setting))
    solo = Solo(case.pipeline, generator, plan, 1, case.params, case.batch, case.target, setting.device)
    solo.step()
    setting.report.add(solo=waits(solo.step, setting))
    setting.report.expect(not setting.report.figures["solo"], "one rank alone waits")


def waits(call: Callable[[], object], setting: Setting) -> list[str]:
    """Return the lines of Python at which a call makes the host wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if setting.cpu:
            call()
        else:
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return sorted({f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)})
