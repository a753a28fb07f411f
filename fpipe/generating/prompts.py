"""Prompts as microbatches: padded on the left, with the masks and positions of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe._format import counted
from fpipe.handlers.contents import digest
from fpipe.stages.cache import Cache


@dataclass(frozen=True)
class Prompts:
    """Prompts of one length.

    Args:
        tokens: int64 `[prompts, length]`.
        mask: bool `[prompts, length]`, False for padding.
    """

    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, prompts: Any, pad: int | None, eos: Sequence[int]) -> Prompts:
        """Return the prompts of a tokenizer's mapping, of a tensor, or of lists of tokens, which are padded here.

        Without a mask, padding is what `transformers` takes for it: the pad token, unless it ends texts too.

        Raises:
            TypeError: they are something else.
            ValueError: they differ in length without a pad token, are empty, or don't fit their mask.
        """
        mask = None
        if isinstance(prompts, Mapping):
            if "input_ids" not in prompts or (more := sorted({*prompts} - {"input_ids", "attention_mask"})):
                names = sorted(map(str, prompts)) if "input_ids" not in prompts else more
                raise ValueError(f"prompts are input_ids and attention_mask, and not {', '.join(names) or 'empty'}")
            prompts, mask = prompts["input_ids"], prompts.get("attention_mask")
        if not isinstance(prompts, Tensor):
            prompts, mask = _padded(prompts, mask, pad)
        if prompts.ndim != 2 or not prompts.numel() or prompts.is_floating_point() or prompts.dtype == torch.bool:
            raise ValueError(
                f"input_ids are {prompts.dtype} of shape {tuple(prompts.shape)}: give whole numbers [prompts, tokens]"
            )
        if mask is None:
            has_padding = pad is not None and pad not in eos and bool((prompts == pad).any())
            mask = prompts != pad if has_padding else torch.ones_like(prompts, dtype=torch.bool)
        mask = torch.as_tensor(mask, device=prompts.device).bool()
        if mask.shape != prompts.shape:
            raise ValueError(f"attention_mask is of shape {tuple(mask.shape)}, input_ids of {tuple(prompts.shape)}")
        if not mask[:, -1].all():
            row = int((~mask[:, -1]).nonzero()[0])
            raise ValueError(
                f"prompt {row} ends in padding, after which a model would go on: pad on the left, as a tokenizer does "
                "with padding_side='left'"
            )
        return cls(prompts.long(), mask)

    @property
    def count(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def text(self) -> str:
        """Return a text for all tokens, which differs for other prompts; waits for their device."""
        return f"{self.count} of {counted(self.length, 'token')} (digest {digest(self.tokens)}{digest(self.mask)})"

    def filled(self, rows: int) -> Prompts:
        """Return so many prompts; the last one stands for those that are missing."""
        at = torch.arange(rows, device=self.tokens.device).clamp(max=self.count - 1)
        return Prompts(self.tokens[at], self.mask[at])

    def given(self, cache: Cache, start: int, count: int) -> list[dict[str, Tensor]]:
        """Return what stages read of `count` tokens from a place in the cache on, by microbatch, but for the tokens."""
        device = self.tokens.device
        places = torch.arange(start, start + count, device=device)
        seen = torch.ones(self.count, cache.max_length, dtype=torch.bool, device=device)
        seen[:, : self.length] = self.mask
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, start : start + count]
        visible = seen[:, None, None, :] & (torch.arange(cache.max_length, device=device) <= places[:, None])
        lowest = torch.finfo(cache.dtype).min
        attended = torch.zeros(visible.shape, dtype=cache.dtype, device=device).masked_fill(~visible, lowest)
        groups = range(0, self.count, cache.rows)
        return [
            {
                "attention_mask": attended[row : row + cache.rows].contiguous(),
                "position_ids": positions[row : row + cache.rows].contiguous(),
                "cache_position": places,
            }
            for row in groups
        ]


def _padded(prompts: Any, mask: Any, pad: int | None) -> tuple[Tensor, Tensor]:
    """Return lists of tokens as one tensor, padded on the left, and its mask."""
    try:
        each = [torch.as_tensor(prompt, dtype=torch.int64) for prompt in prompts]
    except (TypeError, ValueError, RuntimeError):
        each = []
    if mask is not None or not each or any(prompt.ndim != 1 or not len(prompt) for prompt in each):
        raise TypeError(
            "prompts are a tokenizer's mapping of tensors, a tensor [prompts, tokens], or a list of lists of tokens, "
            f"not {prompts!r:.80}{' with a mask' if mask is not None else ''}"
        )
    length = max(map(len, each))
    if pad is None and any(len(prompt) < length for prompt in each):
        raise ValueError(
            "prompts of different lengths are padded on the left, and no token is for that: pass pad_token_id="
        )
    tokens = torch.full((len(each), length), 0 if pad is None else pad)
    known = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, prompt in enumerate(each):
        tokens[row, length - len(prompt) :] = prompt
        known[row, length - len(prompt) :] = True
    return tokens, known
