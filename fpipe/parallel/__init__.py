"""Functions that a stage may call to compute together with other processes. Imported on first use."""

from typing import TYPE_CHECKING

from fpipe._lazy import attach

if TYPE_CHECKING:
    from fpipe.parallel.context import (
        attention as attention,
        positions as positions,
        shard_sequence as shard_sequence,
        unshard_sequence as unshard_sequence,
    )
    from fpipe.parallel.collectives import (
        all_gather as all_gather,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        copy as copy,
        reduce_scatter as reduce_scatter,
        shift as shift,
    )
    from fpipe.parallel.experts import (
        Routing as Routing,
        balance_loss as balance_loss,
        dropped as dropped,
        mixture_of_experts as mixture_of_experts,
        route as route,
    )
    from fpipe.parallel.vocabulary import Vocabulary as Vocabulary

__getattr__, __dir__ = attach(__name__)
