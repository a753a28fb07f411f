"""The verb that describes this machine and its software, for bug reports. It alone imports torch."""

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from fpipe._version import VERSION
from fpipe.cli.app import verb
from fpipe.cli.options import Json
from fpipe.cli.output import print_json

PACKAGES = ("torch", "optree", "tensorboard", "typer", "rich", "numpy", "matplotlib", "transformers", "safetensors")
TRANSPORTS = ("nvidia-nccl", "triton")  # prefixes of packages whose versions torch depends on
PREFIXES = (
    "CUDA_",
    "FPIPE_",
    "GLOO_",
    "GOTO_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_",
)
LAUNCHER = (  # whole names: LOCAL_ and MASTER_ begin those of other programs too
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "WORLD_SIZE",
)
SECRET = ("AUTH", "CRED", "KEY", "PASS", "PWD", "SECRET", "TOKEN")


@verb("fpipe env", "fpipe env --json")
def env(as_json: Json = False) -> None:
    """Describe this machine and its software, for a bug report."""
    described = {
        "fpipe": VERSION,
        "where": str(Path(__file__).parents[1]),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cores": {"all": os.cpu_count(), "usable": _usable_cores()},
        "packages": dict(_packages()),
        "torch": _torch(),
        "environment": dict(_variables()),
    }
    if as_json:
        print_json(described)
    else:
        print("\n".join(_lines(described)))


def _usable_cores() -> int | None:
    """Return the number of cores that this process may use; of all, where the system has no affinity (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _packages() -> Iterator[tuple[str, str | None]]:
    """Yield the versions of packages; None for one that is not installed."""
    versions = {each.metadata["Name"]: each.version for each in distributions() if each.metadata["Name"]}
    for name in PACKAGES:
        yield name, versions.get(name)
    for name in sorted(versions):
        if name.startswith(TRANSPORTS):
            yield name, versions[name]


def _torch() -> dict[str, Any]:
    """Describe torch, its devices and its distributed backends."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # an install that is broken is worth a report
        return {"error": f"it can't be imported: {type(error).__name__}: {error}"}
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    described: dict[str, Any] = {"threads": torch.get_num_threads(), "backends": backends, "cuda": torch.version.cuda}
    try:
        described["devices"] = list(_devices(torch)) or ["cpu"]
    except Exception as error:  # such as a driver that is too old
        described["devices"] = [f"{type(error).__name__}: {error}"]
    return described


def _devices(torch: Any) -> Iterator[str]:
    if not torch.accelerator.is_available():
        return
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    for index in range(torch.accelerator.device_count()):
        has = module.get_device_properties(index)
        yield f"{kind.type}:{index} {has.name}, {has.total_memory / 2**30:.0f} GiB"


def _variables() -> Iterator[tuple[str, str]]:
    """Yield the environment variables that concern a run, without those whose names are like those of secrets."""
    for name, value in sorted(os.environ.items()):
        if (name.startswith(PREFIXES) or name in LAUNCHER) and not any(part in name.upper() for part in SECRET):
            yield name, value


def _lines(described: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in described.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:" if value else f"{indent}{name}: none"
            yield from _lines(value, indent + "  ")
        else:
            listed = ", ".join(value) if isinstance(value, list) else value
            yield f"{indent}{name}: {'none' if listed is None else listed}"
