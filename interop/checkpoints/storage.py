"""Checkpoints on disk: `000007-step-1200/`, in the format of torch.distributed.checkpoint and with a manifest.

Invariants:
- a folder with such a name is complete: it is filled under another name, synced, and renamed;
- each file is hashed while it is written, and compared with its hash when it is loaded;
- loading makes no class that a checkpoint names, except those that describe tensors.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, EnumMeta
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fpipe.interop.checkpoints.chunks import LoadPlanner, SavePlanner
from fpipe.interop.checkpoints.claims import UNFINISHED, remove
from fpipe.interop.checkpoints.manifest import (
    MANIFEST,
    METADATA,
    CheckpointError,
    Manifest,
    checkpoints,
    chosen,
    damaged,
    guarded,
    hash_of_file,
    is_saved_by_fpipe,
    new_hash,
)
from fpipe.interop.checkpoints.names import Name, below, dotted, kind_of

Plain = Mapping[Name, Any]
Part = tuple[bytes, Mapping[str, str]]
"""A process's pickled metadata, which says where its tensors are, and the hashes of its files by name."""


# Saving


class _HashedStream:
    """A file that is hashed while it is written. It keeps the error of a write, in whose place torch raises another."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.digest = stream, new_hash()
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            count: int = self._stream.write(content)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(content)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _HashedFiles(FileSystem):
    """Files that are hashed while they are written.

    Args:
        streams: by name.
    """

    def __init__(self) -> None:
        self.streams: dict[str, _HashedStream] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            self.streams[Path(path).name] = hashed = _HashedStream(stream)
            yield hashed

    @property
    def hashes(self) -> dict[str, str]:
        return {name: stream.digest.hexdigest() for name, stream in self.streams.items()}


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Name a folder in errors of the system that name no file, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error


def written(folder: Path, number: int, tensors: Mapping[Name, Tensor]) -> Part:
    """Write a process's tensors, of DTensors its pieces.

    Raises:
        OSError: they can't be written.
    """
    writer, files = FileSystemWriter(folder), _HashedFiles()
    writer.fs = files
    planner = SavePlanner({dotted(name): x for name, x in tensors.items()})
    writer.set_up_storage_writer(True)
    local_plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = create_default_global_save_plan([local_plan])  # of this process alone, so nothing is whole yet
    metadata.planner_data = {dotted(name): name for name in tensors}
    plan = writer.prepare_global_plan(plans * (number + 1))[-1]  # a file is named after the index of its plan
    try:
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
    except RuntimeError:
        if cause := next((stream.error for stream in files.streams.values() if stream.error is not None), None):
            raise cause from None
        raise
    synced(folder)
    places = {result.index: result.storage_data for result in results}
    return pickle.dumps(replace(metadata, storage_data=places)), files.hashes


def sealed(folder: Path, parts: Sequence[Part], plain: Plain, nonpersistent: Sequence[Name], keep: int | None) -> Path:
    """Make a filled folder a checkpoint, and remove all but the last `keep`.

    Raises:
        CheckpointError: a file that another rank wrote is not visible here, or nobody wrote some rows of a tensor.
    """
    ranks = [unpickled(metadata) for metadata, _ in parts]

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
    hashes = {METADATA: hash_of_file(folder / METADATA), **dict(ChainMap(*(dict(each) for _, each in parts)))}
    hashes = {name: each for name, each in sorted(hashes.items()) if name in files}
    _write(folder / MANIFEST, Manifest(folder, sizes, hashes, nonpersistent, plain).text())
    synced(folder)
    final = folder.with_name(folder.name.removeprefix(UNFINISHED))
    folder.rename(final)
    synced(final.parent)
    own = filter(is_saved_by_fpipe, checkpoints(final.parent))  # not what else has such a name
    for old in list(own)[: -keep if keep else 0]:
        with suppress(FileNotFoundError):  # another job removes it
            remove(old.rename(old.with_name(UNFINISHED + old.name)))
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


def opened(path: Path, verify: bool = True) -> CheckpointReader:
    """Open a checkpoint, or the last one in a folder of them.

    Args:
        verify: compare what describes it with hashes; `CheckpointReader.manifest.verify` does so for other files.

    Raises:
        CheckpointError: there is none, a file is missing or truncated, or it has another format.
    """
    manifest = Manifest.read(chosen(path), verify)
    if verify:
        manifest.verify([METADATA])
    return CheckpointReader(manifest)


@dataclass(frozen=True)
class CheckpointReader:
    """A complete checkpoint."""

    manifest: Manifest

    @property
    def path(self) -> Path:
        return self.manifest.path

    @property
    def plain(self) -> Plain:
        """The values that are no tensors."""
        return self.manifest.plain

    @property
    def nonpersistent(self) -> frozenset[Name]:
        """The buffers that no state_dict has."""
        return frozenset(self.manifest.nonpersistent)

    @property
    def states(self) -> int:
        """The number of replicas with a state of their own; 1 where they share it."""
        return sum(kind_of(section) == "state" for section in {name[0] for name in self.names})

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compare every file of one part of them with its hash: the processes that load share the work.

        Raises:
            CheckpointError: a file has not the content that was saved.
        """
        self.manifest.verify(sorted(self.manifest.files)[part::parts])

    @cached_property
    def metadata(self) -> Metadata:
        def read() -> Metadata:
            metadata = unpickled((self.path / METADATA).read_bytes())
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds a {type(metadata).__name__}")
            return metadata

        return guarded(self.path, METADATA, read)

    @cached_property
    def names(self) -> set[Name]:
        """The names of all entries."""
        return {*self.tensors, *self.plain}

    @cached_property
    def below(self) -> dict[Name, list[Name]]:
        """The names that begin with a name."""
        return below((*self.tensors, *self.plain))

    @cached_property
    def tensors(self) -> dict[Name, TensorStorageMetadata]:
        """The metadata of each tensor."""

        def read() -> dict[Name, TensorStorageMetadata]:
            names: Any = self.metadata.planner_data
            tensors = {tuple(names[key]): each for key, each in self.metadata.state_dict_metadata.items()}
            if not all(isinstance(each, TensorStorageMetadata) for each in tensors.values()):
                raise TypeError("it holds something else than tensors")
            return tensors  # type: ignore[return-value]

        return guarded(self.path, METADATA, read)

    def read(self, into: Mapping[Name, Tensor]) -> None:
        """Read tensors into others of the same shapes; into DTensors, the rows of this process's pieces.

        Raises:
            CheckpointError: they can't be read.
        """
        reader = FileSystemReader(self.path)
        planner = LoadPlanner({dotted(name): tensor for name, tensor in into.items()}, self.metadata)
        try:
            reader.set_up_storage_reader(self.metadata, True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:  # a damaged file may raise anything
            raise damaged(self.path, f"its tensors can't be read ({type(error).__name__}: {error})") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # by which Python pickles members of enums before 3.11.4
            return _member
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which describes no tensor")


def _member(kind: Any, name: str) -> Enum:
    """Return the member of an enum."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"it holds the attribute {name} of {kind}, which describes no tensor")


KNOWN = {
    ("torch", "Size"),
    *(("torch", name) for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((dcp.__name__, name) for name, kind in vars(dcp).items() if getattr(kind, "__module__", "") == dcp.__name__),
}
"""Sizes, dtypes, and classes that describe tensors: all of `torch.distributed.checkpoint.metadata`, and two more."""


def unpickled(content: bytes) -> Any:
    """Return a pickled object of plain values and of the classes in `KNOWN`, or of members of those that are enums.

    Raises:
        pickle.UnpicklingError: it names another class.
    """
    return _Unpickler(io.BytesIO(content)).load()
