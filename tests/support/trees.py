"""Types that travel between ranks by name."""

from typing import Any, NamedTuple

import optree


class Pair(NamedTuple):
    left: Any
    right: Any


@optree.dataclasses.dataclass(namespace="fpipe")
class Record:
    pair: Pair
    many: list
    note: tuple = optree.dataclasses.field(pytree_node=False)
