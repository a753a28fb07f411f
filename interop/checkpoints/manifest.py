"""The manifest of a checkpoint: its files with their sizes and SHA-256 hashes, and its plain values. No torch.

Invariants:
- whatever is wrong with a checkpoint is a `CheckpointError` that names the file and the checkpoint before it;
- a hash covers each file, and one the manifest itself, so that no flipped bit is loaded unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
FORMAT = {"format": "fpipe checkpoint", "version": 2}
MANIFEST, METADATA = "fpipe.json", ".metadata"
NUMBERED = re.compile(r"(\d{6,})(-step-\d+)?")
HASHED_AT_ONCE = 1 << 20  # bytes
Name = tuple[str, ...]


class CheckpointError(RuntimeError):
    """There is no checkpoint, or it is damaged, or it is another model's."""


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, in the order in which they were saved."""
    paths = [path for path in folder.iterdir() if NUMBERED.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=number_of)


def number_of(path: Path) -> int:
    match = NUMBERED.fullmatch(path.name)
    return int(match[1]) if match else 0


def last(folder: Path) -> Path:
    """Return the checkpoint that was saved last.

    Raises:
        CheckpointError: there is none.
    """
    paths = checkpoints(folder)
    if not paths:
        raise CheckpointError(f"there is no checkpoint in {folder}: was it saved to another folder?")
    return paths[-1]


def chosen(path: Path) -> Path:
    """Return a checkpoint, or the last one in a folder of them."""
    return path if (path / MANIFEST).exists() or NUMBERED.fullmatch(path.name) else last(path)


def is_saved_by_fpipe(path: Path) -> bool:
    """Return whether a folder is a checkpoint, and no link to one."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return manifest["format"] == FORMAT["format"] and not path.is_symlink()
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Args:
        path: of the checkpoint.
        files: the size of each, in bytes, by its name.
        hashes: their SHA-256, as `sha256sum` shows it; empty in checkpoints of before there were hashes.
        nonpersistent: the buffers that no state_dict has.
        plain: the values that are no tensors.
    """

    path: Path
    files: Mapping[str, int]
    hashes: Mapping[str, str]
    nonpersistent: Sequence[Name]
    plain: Mapping[Name, Any]

    def text(self) -> bytes:
        """Return the content of its file, with a hash of all the rest."""
        content = {
            **FORMAT,
            "files": self.files,
            "hashes": self.hashes,
            "nonpersistent": sorted(self.nonpersistent),
            "plain": [*self.plain.items()],
        }
        return json.dumps({**content, "hash": _hash_of(content)}).encode()

    @classmethod
    def read(cls, path: Path, verify: bool = True) -> Manifest:
        """Read the manifest of a checkpoint, and compare the sizes of its files.

        Args:
            verify: compare the manifest with its hash.

        Raises:
            CheckpointError: a file is missing or truncated, the manifest is damaged, or of another version.
        """
        content = guarded(path, MANIFEST, lambda: dict(json.loads((path / MANIFEST).read_bytes())))
        format_, version = (content.get(key) for key in FORMAT)
        if (format_, version) != tuple(FORMAT.values()):
            raise CheckpointError(
                f"{path} is a {format_} of version {version}, not of version {FORMAT['version']}: load it with the "
                "fpipe that saved it"
            )
        expected = content.pop("hash", None)
        if verify and expected is not None and _hash_of(content) != expected:
            raise damaged(path, f"its {MANIFEST} has not the content that was saved, by its hash")
        manifest = guarded(path, MANIFEST, lambda: cls._of(path, content))
        for name, size in manifest.files.items():
            actual = (path / name).stat().st_size if (path / name).is_file() else None
            if actual != size:
                why = "is missing" if actual is None else f"has {actual} of {size} bytes"
                raise damaged(path, f"its {name} {why}")
        return manifest

    @classmethod
    def _of(cls, path: Path, content: Mapping[str, Any]) -> Manifest:
        files = {str(name): int(size) for name, size in content["files"].items()}
        if METADATA not in files or any(Path(name).name != name for name in files):
            raise ValueError(f"its files are {list(files)}")
        if not isinstance(content["nonpersistent"], list):
            raise TypeError("nonpersistent is no list")
        hashes = {str(name): str(each) for name, each in content.get("hashes", {}).items()}
        plain = {tuple(map(str, name)): value for name, value in content["plain"]}
        return cls(path, files, hashes, [tuple(map(str, name)) for name in content["nonpersistent"]], plain)

    def verify(self, names: Iterable[str]) -> None:
        """Compare files with their hashes; those of before there were hashes are right.

        Raises:
            CheckpointError: a file has not the content that was saved.
        """
        for name in names:
            if self.is_right(name) is False:
                raise damaged(self.path, f"its {name} has not the content that was saved, by its hash")

    def is_right(self, name: str) -> bool | None:
        """Return whether a file has the content that was saved; None if it has no hash."""
        if name not in self.hashes:
            return None
        return guarded(self.path, name, lambda: hash_of_file(self.path / name) == self.hashes[name])


def guarded(path: Path, name: str, read: Callable[[], T]) -> T:
    """Return the result of reading a file of a checkpoint; whatever it raises is an error of the checkpoint."""
    try:
        return read()
    except Exception as error:  # a damaged file may raise anything
        raise damaged(path, f"its {name} can't be read ({type(error).__name__}: {error})") from error


def damaged(path: Path, why: str) -> CheckpointError:
    before = [each for each in checkpoints(path.parent) if number_of(each) < number_of(path)]
    earlier = [each.name for each in before if is_saved_by_fpipe(each)][-1:]
    way_out = f"; {earlier[0]} is the one before it" if earlier else ""
    return CheckpointError(f"{path} is damaged: {why}{way_out}")


def new_hash() -> Any:
    return hashlib.sha256(usedforsecurity=False)


def hash_of_file(path: Path) -> str:
    digest = new_hash()
    with path.open("rb") as stream:
        while chunk := stream.read(HASHED_AT_ONCE):
            digest.update(chunk)
    return str(digest.hexdigest())


def _hash_of(content: Mapping[str, Any]) -> str:
    digest = new_hash()
    digest.update(json.dumps(content).encode())
    return str(digest.hexdigest())
