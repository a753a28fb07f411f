"""Export the weights of a checkpoint to one safetensors file, which Hugging Face and others read.

The file is a header, of 8 bytes with its length and JSON, and the tensors' bytes without gaps between them
(https://github.com/huggingface/safetensors, Format). It is written here, because the package takes all tensors at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fpipe.errors.arguments import checked
from fpipe.interop.checkpoints.manifest import CheckpointError
from fpipe.interop.checkpoints.names import Name, dotted
from fpipe.interop.checkpoints.storage import opened, synced

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@checked()
def export_safetensors(folder: str | os.PathLike[str], file: str | os.PathLike[str], *, verify: bool = True) -> None:
    """Write the parameters and buffers of a checkpoint into one file, under their modules' own names.

    Buffers with `persistent=False`, which no state_dict has, are left out. A tied parameter is written once, under its
    owner's name. One process calls it, and has one whole tensor at a time in its memory, also if the checkpoint is of
    shards. Of replicas with a state of their own, the first one's is written. In a folder with the config of a Hugging
    Face model, the file `model.safetensors` is its weights.

    Args:
        folder: a checkpoint, or a folder of them, of which the last one is exported.
        verify: compare the files with their hashes first.

    Raises:
        CheckpointError: there is none, it is damaged, two entries have one name, or one has a dtype that no such file
            holds.
    """
    reader = opened(Path(folder), verify)
    if verify:
        reader.verify()
    tensors = {
        name: each
        for name, each in reader.tensors.items()
        if name[0] in ("params", "state") and name not in reader.nonpersistent
    }
    if len({dotted(name[1:]) for name in tensors}) < len(tensors):
        raise CheckpointError(f"{reader.path} has parameters and state of the same names: one file can't hold both")
    if wrong := [name for name, each in tensors.items() if each.properties.dtype not in DTYPES]:
        raise CheckpointError(
            f"{dotted(wrong[0])} of {reader.path} is of {tensors[wrong[0]].properties.dtype}, which safetensors can't "
            "hold: convert it, and save again"
        )
    order = sorted(tensors, key=lambda name: (-tensors[name].properties.dtype.itemsize, name))  # each is aligned so
    path = Path(file)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as stream:
        stream.write(_header({name: tensors[name] for name in order}))
        for name in order:
            whole = torch.empty(tensors[name].size, dtype=tensors[name].properties.dtype)
            reader.read({name: whole})
            stream.write(whole.reshape(-1).view(torch.uint8).numpy().data)
    synced(unfinished)
    unfinished.replace(path)
    synced(path.parent)


def _header(tensors: Mapping[Name, TensorStorageMetadata]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, each in tensors.items():
        dtype, end = each.properties.dtype, at + prod(each.size) * each.properties.dtype.itemsize
        header[dotted(name[1:])] = {"dtype": DTYPES[dtype], "shape": [*each.size], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
