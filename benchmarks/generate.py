"""Measure how many tokens a second a pipeline generates, beside one process, and beside `model.generate`.

    python -m benchmarks.generate

A GPT-2 of random weights, whose head takes the time of a layer, generates from 8 prompts. `tokens_per_s` is of ranks
over gloo, one thread each; `one_process` of a process that runs the same microbatches through the same stages, at one
thread; and `batch_generate` of `model.generate` with all prompts as one batch, at one thread. They take turns, and
`ratio` is the median over rounds of the first over the second, `batch_ratio` of the first over the third. `equal` is
whether all three give the same tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import fpipe
from benchmarks import models
from fpipe import Placement, handlers
from fpipe.interop.transformers import split_with_cache

PROMPTS, LENGTH = 8, 32


def job(
    rank: int, ranks: int, width: int, microbatches: int, tokens: int, rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield the one row."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers = 5 * ranks - 1  # and the head
    torch.manual_seed(0)
    numbers = {"vocab_size": 12 * width, "n_positions": LENGTH + tokens, "n_embd": width, "n_layer": layers}
    model = GPT2LMHeadModel(GPT2Config(**numbers, n_head=width // 64, eos_token_id=None, bos_token_id=None)).eval()
    cuts = [f"transformer.h.{5 * each}" for each in range(1, ranks)]
    rows, length = PROMPTS // microbatches, LENGTH + tokens
    pipeline, params = split_with_cache(model, rows=rows, max_length=length, at=cuts)
    prompts = torch.randint(12 * width, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(1))

    def generator(placement: Placement, handler: Any) -> Callable[[], torch.Tensor]:
        plan = pipeline.plan(placement, microbatches)
        run = fpipe.generator(pipeline, plan, handler=handler, max_new_tokens=tokens)
        own = pipeline.params_on(params, plan, handler)
        return lambda: run(own, prompts)

    by_ranks = generator(Placement.loop(ranks), handlers.Distributed())
    alone = {
        "one_process": generator(Placement([0] * ranks), handlers.Local()),
        "batch_generate": lambda: model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        ),
    }
    rates: dict[str, list[float]] = {"tokens_per_s": [], **{name: [] for name in alone}}
    texts: list[torch.Tensor] = []
    for at in range(rounds + 1):
        dist.barrier()
        results = [timed(by_ranks)]
        for call in alone.values():
            dist.barrier()
            if rank == 0:
                results.append(timed(call))
        if rank == 0 and at:  # the first round traces
            texts = [tokens for tokens, _ in results]
            for each, (_, seconds) in zip(rates.values(), results, strict=True):
                each.append(PROMPTS * tokens / seconds)
    if rank == 0:
        yield [row(f"gpt2, {layers} layers of width {width}", ranks, microbatches, rates, texts)]
    else:
        yield []


def timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Return the tokens of a call, and its seconds."""
    start = time.perf_counter()
    tokens = call()
    return tokens, time.perf_counter() - start


def row(
    model: str, ranks: int, microbatches: int, rates: Mapping[str, Sequence[float]], texts: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Return the row of some rounds, of which each list of rates has the tokens a second."""

    def over(name: str) -> float:
        return statistics.median(a / b for a, b in zip(rates["tokens_per_s"], rates[name], strict=True))

    first, *others = texts
    return {
        "model": model,
        "prompts": PROMPTS,
        "microbatches": microbatches,
        "ranks": ranks,
        **{name: statistics.median(each) for name, each in rates.items()},
        "ratio": over("one_process"),
        "batch_ratio": over("batch_generate"),
        "equal": all(torch.equal(first, other) for other in others),
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    for each in rows:
        print(
            f"{each['model']}, {each['prompts']} prompts in {each['microbatches']} microbatches, {each['ranks']} ranks"
            ": "
            f"{each['tokens_per_s']:.0f} tokens/s, one process {each['one_process']:.0f} (ratio {each['ratio']:.2f}), "
            f"model.generate of the batch {each['batch_generate']:.0f} (ratio {each['batch_ratio']:.2f}); the tokens "
            f"are {'the same' if each['equal'] else 'different'}",
            flush=True,
        )


def main() -> None:
    parser = models.parser(__doc__, rounds=7, limit=900)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, choices=(64, 128, 256, 512, 768), default=512)
    parser.add_argument("--microbatches", type=int, choices=(1, 2, 4, 8), default=2)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    arguments = options.width, options.microbatches, options.tokens, options.rounds
    parts = models.in_processes(job, options.ranks, *arguments, limit=options.limit)
    models.report("generate", options.json, parts, show)


if __name__ == "__main__":
    main()
