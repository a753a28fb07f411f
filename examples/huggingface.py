"""Train unchanged GPT-2, Llama, BERT and T5 of Hugging Face in stages, from random weights; nothing is downloaded.

    python examples/huggingface.py --model t5 --ranks 4                    all ranks in this process
    torchrun --standalone --nproc-per-node 2 examples/huggingface.py       one rank in each process, over gloo

Labels and masks are leaves of the batch, each on the ranks that read it. T5's encoder output goes to every stage of
the decoder.
"""

from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import fpipe
from fpipe import Placement, handlers, interop
from fpipe.interop.transformers import IGNORED, split, tokens

VOCABULARY, LENGTH, MASK, PADDING = 96, 16, 1, 0


def model(name: str, layers: int) -> nn.Module:
    """Make a small model, of width 64."""
    ends: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3}
    small: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    if name == "gpt2":
        config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=layers, n_head=4, **ends)
        return GPT2LMHeadModel(config)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, intermediate_size=128, **small, **ends))
    if name == "bert":
        return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, intermediate_size=128, **small))
    if name == "t5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": layers, "num_heads": 4}
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=PADDING, **sizes))
    raise typer.BadParameter(f"there is no {name!r}: take gpt2, llama, bert or t5")


def batch(name: str, count: int, seed: int) -> dict[str, Tensor]:
    """Return repetitive text of several lengths; with masked tokens for BERT, reversed for T5."""
    generator = torch.Generator().manual_seed(seed)
    once = torch.randint(4, VOCABULARY, (count, LENGTH // 2), generator=generator)
    text = once.repeat(1, 2)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=generator)
    there = torch.arange(LENGTH) < lengths
    given = {"input_ids": text.where(there, PADDING), "attention_mask": there.long()}
    if name == "t5":
        return {**given, "labels": text.where(there, IGNORED).flip(1)}
    if name != "bert":
        return {**given, "labels": text.where(there, IGNORED)}
    hidden = (torch.rand(text.shape, generator=generator) < 0.2) & there
    hidden[:, 0] = True  # else a microbatch might have nothing to learn from
    given["input_ids"] = given["input_ids"].masked_fill(hidden, MASK)
    return {**given, "labels": text.where(hidden, IGNORED)}


def main(
    name: Annotated[str, typer.Option("--model", help="gpt2 | llama | bert | t5")] = "gpt2",
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline; under torchrun, its processes.")] = 2,
    layers: Annotated[int, typer.Option(help="Layers of the model; of T5's encoder and of its decoder.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
) -> None:
    """Train a Hugging Face model in pipeline stages."""
    handler = handlers.auto()
    if isinstance(handler, handlers.Distributed):
        ranks = handler.size
    torch.manual_seed(0)
    count, microbatches = 16, 4
    example = batch(name, count // microbatches, seed=0)
    pipeline, params = split(model(name, layers), example=example, stages=ranks, policy="balanced")
    plan = pipeline.plan(Placement.loop(ranks), microbatches)
    if handler.is_first:
        print(pipeline.describe())
    params = pipeline.params_on(params, plan, handler)

    def weight(labels: Tensor) -> Tensor:
        return tokens(labels, shifted=name in ("gpt2", "llama"))

    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler, weight=weight)
    adamw = interop.optimizer(torch.optim.AdamW, lr=3e-3)
    optimizer = adamw.init(params)
    for i in range(steps):
        data = batch(name, count, seed=i % 4)
        loss, grads = step(params, data, data["labels"], rng=(0, i))
        params, optimizer = adamw.update(grads, optimizer, params)
        if handler.is_first and (i % 10 == 0 or i + 1 == steps):
            print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    typer.run(main)
