"""Weights of a checkpoint as one file of safetensors, which Hugging Face and others read."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from fpipe.interop.checkpoints.names import Name, dotted
from fpipe.interop.checkpoints.storage import CheckpointError, opened, synced


def export_safetensors(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write parameters and buffers of a checkpoint into one file, under their modules' own names.

    Buffers that no state_dict has, made with `persistent=False`, are left out. A tied parameter is there once, under
    the name that its owner has for it. All of them pass through this process's memory.

    Args:
        folder: a checkpoint, or a folder of them, of which the last is taken.

    Raises:
        CheckpointError: nothing is there, it is damaged, or two entries have one name.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("this needs the package safetensors: pip install 'fpipe[transformers]'") from error
    stored = opened(Path(folder))
    tensors: dict[Name, Tensor] = {
        name: torch.empty(there.size, dtype=there.properties.dtype)
        for name, there in stored.tensors.items()
        if name[0] in ("params", "state") and name not in stored.outline.nonpersistent
    }
    stored.read(tensors)
    named = {dotted(name[1:]): tensor for name, tensor in tensors.items()}
    if len(named) < len(tensors):
        raise CheckpointError(f"{stored.path} has parameters and state of the same names, which one file can't hold")
    path = Path(file)
    beside = path.with_name(f".{path.name}.unfinished")
    save_file(named, beside, metadata={"format": "pt"})
    synced(beside)
    beside.replace(path)
    synced(path.parent)
