"""Export the weights of a checkpoint to one safetensors file, which Hugging Face and others read."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from fpipe.interop.checkpoints.names import Name, dotted
from fpipe.interop.checkpoints.storage import CheckpointError, opened, synced


def export_safetensors(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write the parameters and buffers of a checkpoint into one file, under their modules' own names.

    Buffers with `persistent=False`, which no state_dict has, are left out. A tied parameter is written once, under its
    owner's name. This process reads all of them into its memory.

    Args:
        folder: a checkpoint, or a folder of them, of which the last one is exported.

    Raises:
        CheckpointError: there is none, it is damaged, or two entries have one name.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("this needs the package safetensors: pip install 'fpipe[transformers]'") from error
    reader = opened(Path(folder))
    tensors: dict[Name, Tensor] = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in reader.tensors.items()
        if name[0] in ("params", "state") and name not in reader.nonpersistent
    }
    reader.read(tensors)
    named = {dotted(name[1:]): tensor for name, tensor in tensors.items()}
    if len(named) < len(tensors):
        raise CheckpointError(f"{reader.path} has parameters and state of the same names: one file can't hold both")
    path = Path(file)
    unfinished = path.with_name(f".{path.name}.unfinished")
    save_file(named, unfinished, metadata={"format": "pt"})
    synced(unfinished)
    unfinished.replace(path)
    synced(path.parent)
