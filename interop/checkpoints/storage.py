"""Checkpoints on disk: `000007-step-1200/`, in the format of torch.distributed.checkpoint and with a manifest.

Invariants:
- a folder with such a name is complete: it is filled under another name, synced, and renamed;
- loading makes no class that a checkpoint names, except those that describe tensors.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fpipe.interop.checkpoints.names import Name, dotted, nested
from fpipe.stages.sharding import is_dtensor, local

FORMAT = {"format": "fpipe checkpoint", "version": 2}
MANIFEST, METADATA = "fpipe.json", ".metadata"
NUMBERED = re.compile(r"(\d{6,})(-step-\d+)?")
UNFINISHED = ".unfinished-"
Plain = Mapping[Name, Any]


class CheckpointError(RuntimeError):
    """There is no checkpoint, or it is damaged, or it is another model's."""


# Saving


def begun(folder: Path, step: int | None) -> Path:
    """Make a new folder to be filled, and remove those that earlier saves left unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(UNFINISHED + "*"):
        shutil.rmtree(left)
    number = 1 + max((_number(path) for path in checkpoints(folder)), default=0)
    unfinished = folder / f"{UNFINISHED}{number:06d}{'' if step is None else f'-step-{step}'}"
    unfinished.mkdir()
    return unfinished


def written(folder: Path, number: int, tensors: Mapping[Name, Tensor]) -> bytes:
    """Write a process's tensors, of DTensors its pieces; return the pickled metadata, which says where they are."""
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    planner.set_up_planner(nested(tensors), writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    local_plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = create_default_global_save_plan([local_plan])  # of this process alone, so nothing is whole yet
    metadata.planner_data = local_plan.planner_data
    plan = writer.prepare_global_plan(plans * (number + 1))[-1]  # a file is named after the index of its plan
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    synced(folder)
    return pickle.dumps(replace(metadata, storage_data={result.index: result.storage_data for result in results}))


def sealed(folder: Path, parts: Sequence[bytes], plain: Plain, nonpersistent: Sequence[Name], keep: int | None) -> Path:
    """Make a filled folder a checkpoint, and remove all but the last `keep`.

    Raises:
        CheckpointError: a file that another rank wrote is not visible here, or nobody wrote some rows of a tensor.
    """
    ranks = [unpickled(part) for part in parts]

    def joined(column: str) -> dict[Any, Any]:
        return dict(ChainMap(*(getattr(rank, column) for rank in ranks)))

    whole = Metadata(_tensors_of(ranks), joined("planner_data"), joined("storage_data"))
    _write(folder / METADATA, pickle.dumps(whole))
    files = {METADATA, *(info.relative_path for info in whole.storage_data.values())}
    missing = sorted(name for name in files if not (folder / name).exists())
    if missing:
        raise CheckpointError(
            f"{', '.join(missing)} not visible from rank 0, though written: {folder.parent} must be a folder that "
            "all ranks share"
        )
    sizes = {name: (folder / name).stat().st_size for name in sorted(files)}
    manifest = {**FORMAT, "files": sizes, "nonpersistent": sorted(nonpersistent), "plain": [*plain.items()]}
    _write(folder / MANIFEST, json.dumps(manifest).encode())
    synced(folder)
    final = folder.with_name(folder.name.removeprefix(UNFINISHED))
    folder.rename(final)
    synced(final.parent)
    for old in checkpoints(final.parent)[: -keep if keep else 0]:
        shutil.rmtree(old.rename(old.with_name(UNFINISHED + old.name)))
    return final


def _tensors_of(ranks: Sequence[Metadata]) -> dict[str, Any]:
    """Return the metadata of each tensor, with the pieces that all ranks wrote; of several at one place, the first."""
    pieces = defaultdict[str, dict[tuple[int, ...], dcp.ChunkStorageMetadata]](dict)
    tensors: dict[str, Any] = {}
    for rank in ranks:
        for key, tensor in rank.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            tensors.setdefault(key, tensor)
            for chunk in tensor.chunks:
                pieces[key].setdefault(tuple(chunk.offsets), chunk)
    for key, chunks in pieces.items():
        numbers, whole = sum(prod(chunk.sizes) for chunk in chunks.values()), prod(tensors[key].size)
        if numbers != whole:
            raise CheckpointError(
                f"{key} has {whole} numbers, of which {numbers} were written: every process passes its piece, over "
                "the mesh of the handler's replicas"
            )
        tensors[key] = replace(tensors[key], chunks=[chunks[offsets] for offsets in sorted(chunks)])
    return tensors


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    synced(path)


def synced(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Loading


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, in the order in which they were saved."""
    paths = [path for path in folder.iterdir() if NUMBERED.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=_number)


def last(folder: Path) -> Path:
    """Return the checkpoint that was saved last.

    Raises:
        CheckpointError: there is none.
    """
    paths = checkpoints(folder)
    if not paths:
        raise CheckpointError(f"there is no checkpoint in {folder}: was it saved to another folder?")
    return paths[-1]


def opened(path: Path) -> CheckpointReader:
    """Open a checkpoint, or the last one in a folder of them.

    Raises:
        CheckpointError: there is none, a file is missing or truncated, or it has another format.
    """
    if not (path / MANIFEST).exists() and not NUMBERED.fullmatch(path.name):
        path = last(path)
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        format_, version = (manifest.get(key) for key in FORMAT)
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(path, f"its {MANIFEST} can't be read ({error})") from error
    if (format_, version) != tuple(FORMAT.values()):
        raise CheckpointError(
            f"{path} is a {format_} of version {version}, not of version {FORMAT['version']}: load it with the fpipe "
            "that saved it"
        )
    for name, size in manifest["files"].items():
        actual = (path / name).stat().st_size if (path / name).exists() else None
        if actual != size:
            raise _damaged(path, f"its {name} " + ("is missing" if actual is None else f"has {actual} of {size} bytes"))
    plain = {tuple(name): value for name, value in manifest["plain"]}
    return CheckpointReader(path, plain, frozenset(map(tuple, manifest["nonpersistent"])))


@dataclass(frozen=True)
class CheckpointReader:
    """A complete checkpoint.

    Args:
        plain: the values that are no tensors.
        nonpersistent: the buffers that no state_dict has.
    """

    path: Path
    plain: Plain
    nonpersistent: frozenset[Name]

    @cached_property
    def metadata(self) -> Metadata:
        try:
            metadata = unpickled((self.path / METADATA).read_bytes())
        except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise _damaged(self.path, f"its {METADATA} can't be read ({error})") from error
        assert isinstance(metadata, Metadata)
        return metadata

    @cached_property
    def names(self) -> set[Name]:
        """The names of all entries."""
        return {*self.tensors, *self.plain}

    @cached_property
    def below(self) -> dict[Name, list[Name]]:
        """The names that begin with a name."""
        below = defaultdict[Name, list[Name]](list)
        for name in (*self.tensors, *self.plain):
            for length in range(1, len(name)):
                below[name[:length]].append(name)
        return below

    @cached_property
    def tensors(self) -> dict[Name, TensorStorageMetadata]:
        """The metadata of each tensor."""
        metadata = self.metadata
        return {tuple(metadata.planner_data[key]): each for key, each in metadata.state_dict_metadata.items()}  # type: ignore[misc]

    def read(self, into: Mapping[Name, Tensor]) -> None:
        """Read tensors into others of the same shapes; into DTensors, the rows of this process's pieces."""
        with_rows = {name: tensor for name, tensor in into.items() if not is_dtensor(tensor) or local(tensor).numel()}
        flat = {dotted(name): tensor for name, tensor in with_rows.items()}
        reader = FileSystemReader(self.path)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner(flat, self.metadata, True)
            reader.set_up_storage_reader(self.metadata, True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise _damaged(self.path, f"its tensors can't be read ({error})") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which describes no tensor")


KNOWN = {
    ("torch", "Size"),
    *(("torch", name) for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((dcp.__name__, name) for name, kind in vars(dcp).items() if getattr(kind, "__module__", "") == dcp.__name__),
}
"""Sizes, dtypes, and classes that describe tensors: all of `torch.distributed.checkpoint.metadata`, and two more."""


def unpickled(content: bytes) -> Any:
    """Return a pickled object of plain values and of the classes in `KNOWN`.

    Raises:
        pickle.UnpicklingError: it names another class.
    """
    return _Unpickler(io.BytesIO(content)).load()


def _damaged(path: Path, why: str) -> CheckpointError:
    earlier = [each.name for each in checkpoints(path.parent) if _number(each) < _number(path)][-1:]
    way_out = f"; {earlier[0]} is the one before it" if earlier else ""
    return CheckpointError(f"{path} is damaged: {why}{way_out}")


def _number(path: Path) -> int:
    match = NUMBERED.fullmatch(path.name)
    return int(match[1]) if match else 0
