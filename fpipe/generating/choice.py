"""The last stage of a model that generates: it also chooses the next tokens, the likeliest ones or drawn ones.

Random numbers are inputs, one for each prompt and token, so that a draw depends on neither plan nor handler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fpipe.errors.arguments import is_whole
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.rng import Rng, seed_of
from fpipe.stages.stage import Target


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen, as in `transformers`.

    Args:
        eos: tokens that end a text.
        pad: the token after the end of a text.
        temperature: divides the logits.
        top_k: how many of the likeliest tokens may be drawn.
        top_p: of the likeliest tokens, as many may be drawn as have this probability together.
        rng: (seed, step), from which tokens are drawn; None chooses the likeliest ones.

    Raises:
        ValueError: a number is out of range, or there is nothing to draw from.
    """

    eos: tuple[int, ...] = ()
    pad: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    rng: Rng | None = None

    def __post_init__(self) -> None:
        options = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        passed = [name for name, option in options.items() if option is not None]
        if self.rng is None and passed:
            raise ValueError(
                f"{', '.join(passed)} {'is' if len(passed) == 1 else 'are'} for drawing tokens, and nothing says from "
                "which seed: pass rng=(seed, step), or leave out what is for drawing"
            )
        if not _is_number(self.temperature, 0, float("inf")):
            raise ValueError(
                f"temperature must be more than 0, not {self.temperature!r}: without rng= nothing is drawn"
            )
        if not _is_number(self.top_p, 0, 1):
            raise ValueError(f"top_p must be a probability of more than 0 and at most 1, not {self.top_p!r}")
        if self.top_k is not None and not is_whole(self.top_k, least=1):
            raise ValueError(f"top_k must be a whole number of at least 1, not {self.top_k!r}")
        if not all(is_whole(token, least=0) for token in (*self.eos, *([] if self.pad is None else [self.pad]))):
            raise ValueError(f"eos_token_id and pad_token_id are numbers of tokens, not {self.eos!r} and {self.pad!r}")
        if self.eos and self.pad is None:
            raise ValueError(
                "texts end at eos_token_id, and no token stands for what is missing after the end: pass pad_token_id=, "
                f"as pad_token_id={self.eos[0]}, or eos_token_id=() to go on to the last token"
            )

    def target(self, noise: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Return what the last stage reads of the choice for one token, as tensors: other numbers are no new trace.

        Args:
            noise: a number in [0, 1) for each prompt.
        """
        numbers: dict[str, Any] = {}
        if self.eos:
            numbers |= {"eos": list(self.eos), "pad": self.pad}
        if self.rng is not None:
            numbers |= {"temperature": 1.0 if self.temperature is None else self.temperature, "noise": noise}
            numbers |= {name: x for name, x in {"top_k": self.top_k, "top_p": self.top_p}.items() if x is not None}
        return {name: torch.as_tensor(number, device=device) for name, number in numbers.items()}

    def settings(self) -> dict[str, object]:
        """Return the arguments that decide the choice, by name: equal ones for equal choices."""
        named: dict[str, object] = {}
        if self.eos:
            named |= {"eos_token_id=": tuple(sorted({*self.eos})), "pad_token_id=": self.pad}
        if self.rng is not None:
            temperature = 1.0 if self.temperature is None else float(self.temperature)
            top_p = None if self.top_p is None else float(self.top_p)
            named |= {"rng=": self.rng, "temperature=": temperature, "top_k=": self.top_k, "top_p=": top_p}
        return {name: value for name, value in named.items() if value is not None}

    def noise(self, tokens: int, prompts: int) -> Tensor:
        """Return the random numbers of all tokens, `[tokens, prompts]`, on the CPU."""
        if self.rng is None:
            return torch.zeros(tokens, prompts, device="cpu")
        generator = torch.Generator("cpu").manual_seed(seed_of(*self.rng, 0, 0))
        return torch.rand(tokens, prompts, generator=generator, device="cpu")


def _is_number(x: Any, low: float, high: float) -> bool:
    return x is None or (
        isinstance(x, int | float) and not isinstance(x, bool) and low < x <= high and x < float("inf")
    )


def with_choice(pipeline: Pipeline) -> Pipeline:
    """Return a pipeline whose last stage returns the next tokens, int64 `[rows]`; its target is `Choice.target`.

    The state of the last stage becomes `(its own, which texts have ended)`.
    """
    *stages, last = pipeline.stages

    def fn(params: Any, state: Any, *inputs: Any) -> Any:
        own, ended = state
        *read, target = inputs
        logits, own = last.fn(params, own, *read) if last.stateful else (last.fn(params, *read), own)
        tokens = _chosen(logits, target)
        if "eos" in target:
            tokens = torch.where(ended, target["pad"], tokens)
            ended = ended | (tokens[:, None] == target["eos"]).any(-1)
        return tokens, (own, ended)

    return pipeline.replace([*stages, replace(last, fn=fn, reads=(*last.inputs, Target()), stateful=True)], None)


def _chosen(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise TypeError(
            "the last stage of a pipeline that generates returns the logits of the next token, [rows, vocabulary], not "
            f"{tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__}"
        )
    if "noise" not in target:
        return logits.argmax(-1)
    ordered, tokens = (logits.float() / target["temperature"]).sort(dim=-1, descending=True, stable=True)
    if "top_k" in target:
        lowest = ordered.gather(-1, (target["top_k"] - 1).clamp(max=ordered.shape[-1] - 1).expand(len(ordered), 1))
        ordered = ordered.masked_fill(ordered < lowest, -torch.inf)
    probabilities = ordered.softmax(-1)
    if "top_p" in target:
        before = probabilities.cumsum(-1) - probabilities  # of the likelier tokens
        probabilities = probabilities.masked_fill(before >= target["top_p"], 0)
    sums = probabilities.cumsum(-1)
    drawn = (sums <= target["noise"][:, None] * sums[:, -1:]).sum(-1, keepdim=True)
    next_tokens: Tensor = tokens.gather(-1, drawn.clamp(max=tokens.shape[-1] - 1)).squeeze(-1)
    return next_tokens
