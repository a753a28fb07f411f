"""Numbers that stand for the arguments of a step: processes send each other theirs with every step, and compare them.

Two processes that were given other values find it where a step of one meets another step of the other: the numbers of
a batch hold some of its values. Nothing waits for a device, but for a digest, which is of all values.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from fpipe.devices import aside, autocasts, is_capturing
from fpipe.handlers.protocol import Inputs
from fpipe.stages.pytree import Flat, flatten

UNKNOWN = -1  # of values that this process was not given, or can't read
CONTENT = 24  # bits of a number for values, beside those for their structure
SAMPLED = 64  # numbers of a tensor that stand for all of it


def fingerprint(content: object) -> int:
    """Return a number of 56 bits for a value, by its repr."""
    return int.from_bytes(blake2b(repr(content).encode(), digest_size=7).digest(), "little")


def of_rng(inputs: Inputs) -> int:
    """Return a number for the seed of a step; `UNKNOWN` where a graph has it."""
    return UNKNOWN if callable(inputs.rng) else fingerprint(inputs.rng)


def settings(inputs: Inputs) -> dict[str, object]:
    """Return the settings of a step that are the same on every rank, by name; those that differ from the usual ones."""
    each = {
        "torch.autocast": autocasts(),
        "loss_scale=": inputs.loss_scale is not None,
        "max_norm=": inputs.max_norm,
        "check_finite=": inputs.check_finite,
        "post_validate=": inputs.post_validate,
    }
    return {**{name: setting for name, setting in each.items() if setting}, **inputs.settings}


def of_settings(inputs: Inputs) -> int:
    """Return a number for the settings; 0 for the usual ones."""
    each = settings(inputs)
    return fingerprint(each) if each else 0


def of_data(inputs: Inputs) -> list[int]:
    """Return a number for the batch, and one for the target: of structure and of some values of the first microbatch.

    `UNKNOWN` where this process was given none, or where values are not on the CPU.
    """
    if not inputs.data or is_capturing():
        return [UNKNOWN, UNKNOWN]
    with aside():
        return [_number(flatten(tree)) for tree in (inputs.data[0].batch, inputs.data[0].target)]


def digest(x: Tensor) -> str:
    """Return a text for all values of a tensor; waits for its device. It is empty for those that can't be read."""
    if x.layout is not torch.strided:
        return ""
    values = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(values.numpy().data, digest_size=4).hexdigest()


def _number(tree: Flat) -> int:
    if not tree.leaves or any(type(leaf) is not Tensor or not _is_readable(leaf) for leaf in tree.leaves):
        return UNKNOWN
    structure, content = blake2b(digest_size=4), blake2b(digest_size=CONTENT // 8)
    for leaf in tree.leaves:
        structure.update(f"{leaf.dtype} {leaf.shape}".encode())
        numbers = leaf.detach().reshape(-1)[:: max(1, leaf.numel() // SAMPLED)].contiguous()
        content.update(numbers.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(structure.digest(), "little") << CONTENT | int.from_bytes(content.digest(), "little")


def _is_readable(leaf: Tensor) -> bool:
    return leaf.device.type == "cpu" and leaf.layout is torch.strided and not (leaf.is_complex() or leaf.is_neg())
