"""Split the transformer of torch's tutorial on pipeline parallelism by hand, and by tracing.

    python examples/torch_tutorial.py                                      both ranks in this process
    torchrun --standalone --nproc-per-node 2 examples/torch_tutorial.py    one rank in each process, over gloo

By hand, each stage is a copy of the model whose other parts are None. By tracing, the whole model is split before
layers.4. Either way the outputs are those of one device with the whole batch. On a CPU that is minutes of work, and
10 GB; --small is of seconds.
"""

import argparse
import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe import Placement, handlers, interop


@dataclass
class Config:
    width: int = 512
    layers: int = 8
    heads: int = 8
    vocabulary: int = 10_000
    batch: int = 32
    length: int = 500
    microbatches: int = 4


SMALL = Config(width=32, layers=2, heads=4, vocabulary=100, length=12)


class Transformer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        # batch_first: else attention goes along the axis that microbatches are cut from
        layers = [
            nn.TransformerDecoderLayer(config.width, config.heads, batch_first=True) for _ in range(config.layers)
        ]
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) if self.embedding else tokens
        for layer in self.layers.values():
            h = layer(h, h)
        h = self.norm(h) if self.norm else h
        return self.output(h) if self.output else h


def by_hand(model: Transformer, layers: int) -> list[nn.Module]:
    """Return two copies, each without the other's parts."""
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    for i in range(layers):
        del (first if i >= layers // 2 else second).layers[str(i)]
    first.norm = first.output = second.embedding = None
    return [first, second]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def main(config: Config) -> None:
    handler = handlers.auto()
    torch.manual_seed(0)
    model = Transformer(config).eval()  # without dropout, so that outputs can be compared
    tokens, target = torch.randint(config.vocabulary, (2, config.batch, config.length))
    with torch.no_grad():
        expected = model(tokens)

    middle = config.layers // 2
    example = (tokens[: config.batch // config.microbatches],)
    ways = {
        "by hand": interop.from_modules(by_hand(model, config.layers), loss=cross_entropy),
        "by tracing": interop.split(model, at=[f"layers.{middle}"], example=example, loss=cross_entropy),
    }
    for way, (pipeline, params) in ways.items():
        plan = pipeline.plan(Placement.loop(2), config.microbatches)
        params = pipeline.params_on(params, plan, handler)
        output = fpipe.evaluate(pipeline, plan, handler=handler, gather=True)(params, tokens)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handler)
        loss, _ = step(params, tokens, target)
        torch.testing.assert_close(loss, cross_entropy(expected, target))
        if handler.is_first:
            print(f"{way}: loss {loss:.4f}, outputs as on one device")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few narrow layers, few tokens")
    main(SMALL if parser.parse_args().small else Config())
