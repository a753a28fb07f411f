"""Generate with GPT-2 of Hugging Face in stages, from random weights; nothing is downloaded.

    python examples/generate_gpt2.py --ranks 2                              all ranks in this process
    torchrun --standalone --nproc-per-node 2 examples/generate_gpt2.py      one rank in each process, over gloo

Prompts of different lengths go through the stages as microbatches, each with a cache of its own, and all stages are at
work. The tokens are those of `model.generate`. With --temperature, they are drawn, the same ones on any ranks.
"""

from functools import partial
from typing import Annotated

import torch
import typer
from transformers import GPT2Config, GPT2LMHeadModel

import fpipe
from fpipe import Placement, handlers
from fpipe.interop.transformers import split_with_cache

VOCABULARY, PAD, END = 96, 0, 1


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline; under torchrun, its processes.")] = 2,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the model; heads are 16 wide.")] = 64,
    microbatches: Annotated[int, typer.Option(help="Microbatches, of two prompts each.")] = 4,
    tokens: Annotated[int, typer.Option(help="New tokens of each prompt, at most.")] = 24,
    temperature: Annotated[float | None, typer.Option(help="Draw tokens; by default the likeliest are chosen.")] = None,
) -> None:
    """Generate from prompts of different lengths."""
    handler = handlers.auto()
    if isinstance(handler, handlers.Distributed):
        ranks = handler.size
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": width, "n_layer": layers, "n_head": width // 16, "tie_word_embeddings": False}
    config = GPT2Config(vocab_size=VOCABULARY, bos_token_id=END, eos_token_id=END, **sizes)
    model = GPT2LMHeadModel(config).eval()
    cuts = [f"transformer.h.{layers * rank // ranks}" for rank in range(1, ranks)]
    pipeline, params = split_with_cache(model, rows=2, max_length=64, at=cuts)
    plan = pipeline.plan(Placement.loop(ranks), microbatches)
    if handler.is_first:
        print(fpipe.draw(fpipe.autoregressive, fpipe.Plan(plan.placement, microbatches, tokens=3)))

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (2 * microbatches,), generator=generator).tolist()
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    generate = fpipe.generator(
        pipeline, plan, handler=handler, max_new_tokens=tokens, pad_token_id=PAD, temperature=temperature
    )
    params = pipeline.params_on(params, plan, handler)
    texts = generate(params, prompts, rng=None if temperature is None else (0, 0))
    if handler.is_first:
        for prompt, text in zip(prompts, texts.tolist(), strict=True):
            print(f"{' '.join(map(str, prompt))} -> {' '.join(map(str, text[-(texts.shape[1] - max(lengths)) :]))}")
        if temperature is None:
            print(
                f"model.generate gives {'the same' if torch.equal(texts, whole(model, prompts, tokens)) else 'others'}"
            )


def whole(model: GPT2LMHeadModel, prompts: list[list[int]], tokens: int) -> torch.Tensor:
    """Generate with the whole model, and all prompts as one batch."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    batch = {
        "input_ids": pad([torch.tensor(prompt) for prompt in prompts], padding_value=PAD),
        "attention_mask": pad([torch.ones(len(prompt)) for prompt in prompts]),
    }
    return model.generate(**batch, max_new_tokens=tokens, do_sample=False, pad_token_id=PAD)


if __name__ == "__main__":
    typer.run(main)
