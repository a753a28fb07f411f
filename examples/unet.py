"""Train a U-Net, whose skips pass over stages, to find discs in noise.

    python examples/unet.py --ranks 4                                  all ranks in this process
    torchrun --standalone --nproc-per-node 4 examples/unet.py          one rank in each process, over gloo

The network is torchgpipe's benchmark (Kim et al. 2020, section 4): `depth` levels of `blocks` convolutions down and up
again, and a skip at every level. It is split into stages of equal cost without a change; each skip goes from the rank
that makes it straight to the one that reads it.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import fpipe
from fpipe import Placement, handlers, interop


class Block(nn.Sequential):
    """A convolution, batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, depth: int, blocks: int, channels: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]

        def stack(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(Block(inputs, outputs), *(Block(outputs, outputs) for _ in range(blocks - 1)))

        self.stem = Block(1, channels)
        self.down = nn.ModuleList(stack(widths[level], widths[level + 1]) for level in range(depth))
        self.bottom = stack(widths[-1], widths[-1])
        self.up = nn.ModuleList(stack(2 * widths[level + 1], widths[level]) for level in reversed(range(depth)))
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for level in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = level(torch.cat([x, skips.pop()], 1))
        return self.head(x)


def discs(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of one disc each, and the disc's pixels."""
    generator = torch.Generator().manual_seed(seed)
    middle = torch.rand(count, 2, 1, 1, generator=generator) * size
    grid = torch.arange(size)
    off = (grid[:, None] - middle[:, 0]).square() + (grid[None, :] - middle[:, 1]).square()
    mask = (off < (size / 4) ** 2).float().unsqueeze(1)
    return mask + torch.randn(mask.shape, generator=generator), mask


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline; under torchrun, its processes.")] = 2,
    depth: Annotated[int, typer.Option(help="Levels; a picture's side is a multiple of 2 to this power.")] = 3,
    blocks: Annotated[int, typer.Option(help="Convolutions of a level.")] = 2,
    channels: Annotated[int, typer.Option(help="Channels of the first level.")] = 8,
    size: Annotated[int, typer.Option(help="A picture's side, in pixels.")] = 32,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 30,
) -> None:
    """Train a U-Net, whose skips pass over stages, to find discs in noise."""
    handler = handlers.auto()
    if isinstance(handler, handlers.Distributed):
        ranks = handler.size
    torch.manual_seed(0)
    network = UNet(depth, blocks, channels)
    batch, microbatches = 16, 4
    example, _ = discs(batch // microbatches, size, seed=0)
    pipeline, params = interop.split(
        network, stages=ranks, policy="balanced", example=(example,), loss=F.binary_cross_entropy_with_logits
    )
    state = interop.buffers(pipeline, network)
    plan = pipeline.plan(Placement.loop(ranks), microbatches)
    if handler.is_first:
        print(pipeline.describe())
    params, state = pipeline.params_on(params, plan, handler), pipeline.state_on(state, plan, handler)

    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler)
    adamw = interop.optimizer(torch.optim.AdamW, lr=3e-3)
    optimizer = adamw.init(params)
    for i in range(steps):
        loss, grads, state = step(params, *discs(batch, size, seed=i), state=state)
        params, optimizer = adamw.update(grads, optimizer, params)
        if handler.is_first and (i % 10 == 0 or i + 1 == steps):
            print(f"step {i}: loss {loss:.4f}")


if __name__ == "__main__":
    typer.run(main)
