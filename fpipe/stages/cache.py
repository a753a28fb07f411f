"""The caches of a pipeline that generates: keys and values of earlier tokens, and the inputs of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe.errors.arguments import checked_class, is_whole
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import flatten


@checked_class()
@dataclass(frozen=True)
class Cache:
    """The cache of a pipeline that generates tokens, as the state of its stages: one for each microbatch of prompts.

    A stage with a cache is `stateful`: `fn(params, cache, *inputs) -> (outputs, cache)`. It is called with whole
    prompts, and then with one token of each. The last stage returns the logits of the next token, `[rows, vocabulary]`.

    Stages read of the batch, with n tokens of each prompt:

    - `input_ids`, int64 `[rows, n]`: where the prompts are read, by a stage that reads no other;
    - `attention_mask`, `[rows, 1, n, max_length]` of `dtype`: 0 where a token attends to a place of the cache, else the
      lowest number;
    - `position_ids`, int64 `[rows, n]`: the positions of the tokens, of which padding has none;
    - `cache_position`, int64 `[n]`: the places of the tokens in the cache.

    Args:
        rows: the prompts of a microbatch.
        max_length: the tokens of a prompt that the cache holds, padding and generated ones included.
        state: `{stage: tree}` of tensors like the cache of one microbatch, on any device; it is zero at first.
        dtype: of the attention mask.
        eos: tokens that end a text; `generate(eos_token_id=)` replaces them.
        pad: the token in place of what is missing; `generate(pad_token_id=)` replaces it.

    Raises:
        ValueError: a number is less than 1.
    """

    rows: int
    max_length: int
    state: Mapping[int, Any]
    dtype: torch.dtype = torch.float32
    eos: tuple[int, ...] = ()
    pad: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "max_length"):
            if not is_whole(number := getattr(self, name), least=1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")

    def empty(self, stage: int, device: torch.device) -> Any:
        """Return the cache of a stage for one microbatch, before its first token."""
        leaves, spec = flatten(self.state[stage])
        return spec.unflatten([torch.zeros_like(x, device=device) if isinstance(x, Tensor) else x for x in leaves])

    def bytes(self, stage: int) -> int:
        """Return the bytes of a stage's cache for one microbatch; 0 for a stage that has none."""
        leaves = flatten(self.state.get(stage, {})).leaves
        return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))


def following(data: Microbatch, tokens: Tensor) -> Microbatch:
    """Return what the stages are given after the tokens that were chosen for a microbatch."""
    return data._replace(batch={**data.batch, "input_ids": tokens[:, None]})
