"""Write new values into the memory of inputs that the caller gives up, as the states of a cache.

An operation that returns an input with other values in some places becomes the one that writes them there. It stands
for the new value, as every write of a graph does: generated code writes to a copy where the old value is read later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fpipe.autodiff.graph.block import Block

aten = torch.ops.aten
IN_PLACE: Mapping[Any, Any] = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
}


def write_to_given_up(block: Block) -> Block:
    """Let a block write to the inputs that it is given up. The nodes are changed."""
    given_up = block.given_up
    for node in block.body if given_up else ():
        if node.target in IN_PLACE and node.args[0] in given_up:
            node.target = IN_PLACE[node.target]
    return block
