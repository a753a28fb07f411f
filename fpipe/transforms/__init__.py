"""Functions from pipelines to pipelines, as those of torch.func. Imported on first use."""

from typing import TYPE_CHECKING

from fpipe._lazy import attach

if TYPE_CHECKING:
    from fpipe.transforms.duals import (
        Dual as Dual,
        dual as dual,
        primals as primals,
        pushforward as pushforward,
        tangents as tangents,
    )
    from fpipe.transforms.forward_mode import hvp as hvp, jvp as jvp
    from fpipe.transforms.members import vmap as vmap
    from fpipe.transforms.samples import per_sample as per_sample

__getattr__, __dir__ = attach(__name__)
