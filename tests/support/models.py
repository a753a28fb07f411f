"""Modules to be split: written as anyone would write them, without a thought of pipelines."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


class Convolutions(nn.Sequential):
    def __init__(self, inside: int, outside: int, kind: type[nn.Module] = nn.BatchNorm2d):
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            kind(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            kind(outside),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """As in torchgpipe's benchmark, small: every encoder's output skips to the decoder across from it."""

    def __init__(self, depth: int = 3, width: int = 4):
        super().__init__()
        sizes = [width * 2**i for i in range(depth + 1)]
        self.first = Convolutions(3, width)
        self.encoders = nn.ModuleList(Convolutions(a, b) for a, b in pairwise(sizes))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(sizes))
        self.decoders = nn.ModuleList(Convolutions(b, a) for a, b in pairwise(sizes))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x = self.first(x)
        skips = []
        for encoder in self.encoders:
            skips.append(x)
            x = encoder(F.max_pool2d(x, 2))
        for up, decoder in zip(reversed(self.ups), reversed(self.decoders), strict=True):
            x = decoder(torch.cat([skips.pop(), up(x)], dim=1))
        return self.last(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.mix(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TiedGPT(nn.Module):
    """A GPT-2 whose head is its embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 8, layers: int = 4, context: int = 6, dropout: float = 0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.register_buffer("positions", torch.arange(context), persistent=False)
        self.layers = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(self.positions[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
