"""Small pipelines and their optima, as optima.py beside it proves them.

Tests have them from here too, so this file imports nothing of the script's environment, nor of the project.
"""

from __future__ import annotations

from typing import NamedTuple


class Instance(NamedTuple):
    """Times and memory are whole numbers; `placement` has the rank of each stage of a chain, of equal costs.

    Args:
        residuals, deferred, limit: bytes that a stage keeps of a microbatch until its input gradient and until its
            weight gradient, and that fit on a rank.
        scale: the factors of microbatches, of their times alone.
    """

    placement: tuple[int, ...]
    microbatches: int
    forward: int
    inputs: int
    weight: int
    communication: int
    residuals: int
    deferred: int
    limit: int
    scale: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return an identifier of it."""
        return "-".join(map(str, (len({*self.placement}), len(self.placement), *self[1:9], *self.scale)))


def chain(ranks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


def v(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


CHAINS = {
    Instance(chain(2), 6, 1, 1, 1, 0, 1, 1, 1): 30,
    Instance(chain(3), 6, 1, 1, 1, 0, 1, 1, 2): 25,
    Instance(chain(4), 8, 1, 1, 1, 0, 1, 1, 3): 31,
    Instance(chain(4), 8, 2, 2, 6, 1, 1, 1, 4): 92,
    Instance(chain(4), 12, 1, 1, 1, 0, 2, 1, 8): 39,
    Instance(chain(4), 12, 1, 1, 1, 0, 2, 1, 10): 38,
    Instance(chain(4), 12, 1, 1, 1, 0, 10, 3, 40): 39,
    Instance(chain(3), 9, 2, 4, 1, 0, 2, 1, 6): 73,
    Instance(chain(4), 9, 3, 4, 2, 0, 2, 1, 8): 96,
    Instance(chain(4), 12, 10, 10, 3, 5, 10, 5, 80): 333,
    Instance(chain(4), 12, 10, 10, 3, 5, 10, 3, 80): 333,
    Instance(chain(8), 24, 1, 1, 1, 0, 1, 1, 16): 72,
    Instance(chain(2), 5, 2, 2, 2, 0, 1, 1, 2, (1, 3, 2, 1, 2)): 62,
    Instance(chain(3), 6, 2, 3, 2, 1, 1, 1, 3, (1, 3, 2, 1, 2, 1)): 100,
    Instance(chain(3), 6, 2, 3, 2, 0, 1, 1, 5, (1, 1, 2, 3, 2, 1)): 78,
    Instance(chain(4), 6, 1, 1, 1, 0, 1, 1, 4, (1, 2, 4, 3, 2, 1)): 51,
}
VS = {
    Instance(v(2), 6, 1, 1, 1, 0, 1, 1, 2): 49,
    Instance(v(2), 6, 1, 1, 1, 0, 1, 1, 3): 39,
    Instance(v(2), 6, 1, 1, 1, 0, 1, 1, 4): 36,
    Instance(v(3), 6, 1, 1, 1, 0, 1, 1, 3): 52,
    Instance(v(3), 9, 1, 1, 1, 0, 1, 1, 2): 93,
    Instance(v(3), 9, 1, 1, 1, 0, 1, 1, 6): 54,
    Instance(v(4), 12, 1, 1, 1, 0, 1, 1, 2): 149,
}
UNPROVED = {Instance(chain(3), 8, 4, 5, 3, 1, 2, 1, 5): 141}  # found in 420 s
