"""Layers: attention, recurrence, experts, convolution, normalisation, losses and embeddings."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from fpipe import Batch, Stage
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.stage import Target
from tests.support.stage_zoo.example import (
    HEADS,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Example,
    example,
    family,
    of_module,
    on,
    randn,
    square,
    wants,
)


def sequence():
    return wants(2, LENGTH, WIDTH)


def encoder(**options):
    return of_module(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, **options), sequence())


family(
    encoder,
    plain={"dropout": 0.0},
    before={"dropout": 0.0, "norm_first": True, "activation": "gelu"},
    dropout={"dropout": 0.3},
)


class Decoder(nn.Module):
    """Its causal mask is made inside."""

    def __init__(self, dropout):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout, batch_first=True)

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, memory, tgt_mask=mask, tgt_is_causal=True), memory


def decoder(dropout):
    return of_module(Decoder(dropout), sequence(), wants(2, 3, WIDTH))


family(decoder, plain={"dropout": 0.0}, dropout={"dropout": 0.2})


def attention(mask=None, groups=1, width=WIDTH, **options):
    """Scaled dot product attention by hand, with fewer heads of keys and values where grouped."""

    def fn(p, x):
        batch, length, _ = x.shape
        q, k, v = ((x @ p[name]).unflatten(2, (-1, width // HEADS)).transpose(1, 2) for name in ("q", "k", "v"))
        bias = {None: lambda: None, "bool": lambda: causal(length), "float": lambda: p["bias"]}[mask]()
        y = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=groups > 1, **options)
        return x + y.transpose(1, 2).reshape(batch, length, width)

    params = {"q": randn(WIDTH, WIDTH), **{name: randn(WIDTH, WIDTH // groups) for name in ("k", "v")}}
    return on(fn, sequence(), **params, **({"bias": randn(LENGTH, LENGTH)} if mask == "float" else {}))


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


family(
    attention,
    plain={},
    causal={"is_causal": True},
    scaled={"scale": 0.3},
    masked={"mask": "bool"},
    trained_bias={"mask": "float"},
    grouped={"groups": 2, "is_causal": True},
    dropout={"dropout_p": 0.3, "is_causal": True},
)


@example
def attention_in_autocast_with_dropout():
    inner = attention(dropout_p=0.2)

    def fn(p, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner.stage.fn(p, x)

    return replace(inner, stage=replace(inner.stage, fn=fn))


class Outputs(nn.Module):
    """A recurrent module's outputs, and its hidden state."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def recurrent(kind, length=LENGTH, dtype=torch.float32, **options):
    module = kind(WIDTH, 6, **options).to(dtype)
    return of_module(Outputs(module), wants(2, length, WIDTH, dtype=dtype))


family(
    recurrent,
    lstm={"kind": nn.LSTM},
    lstm_batch_first={"kind": nn.LSTM, "batch_first": True},
    lstm_one_step={"kind": nn.LSTM, "length": 1},
    lstm_without_bias={"kind": nn.LSTM, "bias": False},
    lstm_double={"kind": nn.LSTM, "dtype": torch.float64},
    lstm_both_ways={"kind": nn.LSTM, "num_layers": 2, "bidirectional": True, "batch_first": True},
    lstm_dropout={"kind": nn.LSTM, "num_layers": 2, "dropout": 0.4},
    lstm_projected={"kind": nn.LSTM, "proj_size": 3},
    gru={"kind": nn.GRU},
    gru_both_ways={"kind": nn.GRU, "num_layers": 2, "bidirectional": True},
    rnn={"kind": nn.RNN, "batch_first": True},
)


@example
def recurrent_cell_unrolled():
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(WIDTH, WIDTH)

        def forward(self, x):
            h = c = torch.zeros(len(x), WIDTH)
            for step in x.unbind(1):
                h, c = self.cell(step, (h, c))
            return h, c

    return of_module(Unrolled(), sequence())


def expert_params(experts=3):
    return {"router": randn(WIDTH, experts), "up": randn(experts, WIDTH, 6), "down": randn(experts, 6, WIDTH)}


@example
def experts_dense():
    """Top-k routing: every expert computes everything, weighed by one-hot gates."""

    def fn(p, x):
        gates, at = F.softmax(x @ p["router"], -1).topk(2, -1)
        weights = (F.one_hot(at, 3).to(x) * gates[..., None]).sum(1)
        every = torch.einsum("th,ehf->etf", x, p["up"]).relu() @ p["down"]
        return torch.einsum("te,eth->th", weights, every), weights.mean(0)

    return on(fn, wants(ROWS, WIDTH), **expert_params())


@example
def experts_gathered():
    """Top-k routing: each expert gathers a fixed number of tokens and scatters its results."""

    def fn(p, x):
        gates = F.softmax(x @ p["router"], -1)
        values, at = gates.T.topk(2, -1)
        hidden = torch.bmm(F.silu(torch.bmm(x[at], p["up"])), p["down"]) * values[..., None]
        y = torch.zeros_like(x).index_add(0, at.flatten(), hidden.flatten(0, 1))
        return x + y, (gates.mean(0) ** 2).sum()

    return on(fn, wants(ROWS, WIDTH), **expert_params())


def convolution(dim=2, size=6, kernel=3, bias=True, memory_format=None, **options):
    op = [F.conv1d, F.conv2d, F.conv3d][dim - 1]

    def fn(p, x):
        return F.relu(op(x, p["w"], p.get("b"), **options))

    x = wants(2, 4, *[size] * dim)
    if memory_format is not None:
        x = x.detach().to(memory_format=memory_format).requires_grad_()
    params = {"w": randn(4, 4 // options.get("groups", 1), *[kernel] * dim)} | ({"b": randn(4)} if bias else {})
    return on(fn, x, **params)


family(
    convolution,
    plain={"padding": 1},
    bare={"bias": False, "stride": 2},
    channels_last={"padding": 1, "memory_format": torch.channels_last},
    grouped={"groups": 2, "dilation": 2},
    depthwise={"groups": 4},
    pointwise={"kernel": 1},
    one_dimension={"dim": 1, "padding": "same"},
    three_dimensions={"dim": 3, "size": 4},
)


@example
def convolutions_with_pooling():
    def fn(p, x):
        x = x.to(memory_format=torch.channels_last)
        x = F.max_pool2d(F.conv2d(x, p["w"], padding=1), 2)
        x = F.conv_transpose2d(F.avg_pool2d(x, 3, 1, 1), p["u"], stride=2)
        x = F.interpolate(F.pad(x, (1, 1, 1, 1), "reflect"), scale_factor=0.5, mode="bilinear")
        return F.pixel_shuffle(x, 2), F.adaptive_avg_pool2d(x, 1).flatten(1), F.unfold(x, 2)

    return on(fn, wants(2, 4, 6, 6), w=randn(4, 4, 3, 3), u=randn(4, 4, 2, 2))


@example
def batch_norm_after_convolution():
    found = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2))
    return of_module(found, wants(2, 4, 6, 6))


@example
def batch_norm_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            return self.norm(self.linear(self.norm(x)))

    return of_module(Twice(), wants(ROWS, WIDTH))


@example
def batch_norm_evaluated():
    return of_module(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval(), wants(ROWS, WIDTH))


@example
def batch_norm_on_the_batch():
    found = of_module(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), reads=(Batch(),))
    return replace(found, data=Microbatch(randn(ROWS, WIDTH), None))


@example
def spectral_norm():
    """Its forward changes buffers in place, without a gradient."""
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return of_module(module, wants(ROWS, WIDTH))


@example
def weight_norm():
    return of_module(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), wants(ROWS, WIDTH))


@example
def running_mean_by_hand():
    """The new state is made of values that want gradients, and is an output too."""

    def fn(p, state, x):
        h = x @ p["w"]
        mean = 0.9 * state["mean"] + 0.1 * h.mean(0)
        return (h - mean, state["mean"]), {"mean": mean, "n": state["n"] + 1, "same": state["same"], "kind": "mean"}

    state = {"mean": randn(WIDTH), "n": torch.tensor(0), "same": randn(2), "kind": "mean"}
    return on(fn, wants(ROWS, WIDTH), state, w=square())


def normalised(op, **params):
    return on(lambda p, x: op(x @ p["mix"], p), wants(2, WIDTH, WIDTH), mix=square(), **params)


family(
    normalised,
    group={"op": lambda x, p: F.group_norm(x, 2, p["w"], p["b"]), "w": torch.linspace(1, 2, WIDTH), "b": torch.ones(8)},
    group_bare={"op": lambda x, p: F.group_norm(x, 4)},
    instance={"op": lambda x, p: F.instance_norm(x)},
    layer={
        "op": lambda x, p: F.layer_norm(x, (WIDTH,), p["w"], p["b"]),
        "w": torch.linspace(1, 2, 8),
        "b": torch.ones(8),
    },
    layer_bare={"op": lambda x, p: F.layer_norm(x, (WIDTH, WIDTH))},
    rms={"op": lambda x, p: F.rms_norm(x, (WIDTH,), p["w"]), "w": torch.linspace(1, 2, WIDTH)},
    vectors={"op": lambda x, p: F.normalize(x, dim=-1) * x.norm(dim=1, keepdim=True)},
)


@example
def activations():
    every = (F.silu, F.mish, F.gelu, F.elu, F.selu, F.softplus, F.hardswish, F.leaky_relu, F.logsigmoid, F.tanhshrink)

    def fn(p, x):
        h = x @ p["w"]
        return [op(h) for op in every], F.glu(h), F.prelu(h, p["a"]), F.gelu(h, approximate="tanh"), F.relu6(h)

    return on(fn, wants(ROWS, WIDTH), w=square(), a=randn(1))


def loss_stage(loss, target, aux=False):
    def fn(p, x, target):
        y = x @ p["w"]
        found = loss(y, target)
        return (found, {"error": y.detach().norm(), "hits": (y.argmax(1) == 0).sum()}) if aux else (found, None)

    stage = Stage(fn, reads=(0, Target()))
    return Example(stage, {"w": square()}, {0: wants(ROWS, WIDTH)}, data=Microbatch(None, target))


@example
def loss_cross_entropy():
    target = torch.tensor([1, -100, 7, 0])
    return loss_stage(lambda y, t: F.cross_entropy(y, t, ignore_index=-100, label_smoothing=0.1), target, aux=True)


@example
def loss_mean_square():
    return loss_stage(lambda y, t: ((y - t) ** 2).mean(), randn(ROWS, WIDTH))


@example
def loss_whose_aux_wants_a_gradient():
    """The aux has parameters of its own, which get none."""

    def fn(p, x, target):
        y = x @ p["w"]
        return F.mse_loss(y, target), {"y": y, "more": y * p["aux"]}

    stage = Stage(fn, reads=(0, Target()))
    data = Microbatch(None, randn(ROWS, WIDTH))
    return Example(stage, {"w": square(), "aux": randn(WIDTH)}, {0: wants(ROWS, WIDTH)}, data=data)


@example
def loss_of_many_parts():
    def loss(y, t):
        parts = F.smooth_l1_loss(y, t), F.kl_div(y.log_softmax(1), t.softmax(1), reduction="batchmean")
        return sum(parts) + F.binary_cross_entropy_with_logits(y, t.sigmoid()) + F.cosine_embedding_loss(y, t, t[:, 0])

    return loss_stage(loss, randn(ROWS, WIDTH))


def embedding(**options):
    def fn(p, v):
        return F.embedding(v["tokens"], p["e"], **options) + p["positions"] + v["h"]

    v = {"tokens": torch.randint(VOCABULARY, (2, LENGTH)), "h": sequence()}
    return on(fn, v, e=randn(VOCABULARY, WIDTH), positions=randn(LENGTH, WIDTH))


family(embedding, plain={}, padded={"padding_idx": 3}, by_frequency={"scale_grad_by_freq": True})


@example
def embedding_bag():
    def fn(p, tokens):
        return F.embedding_bag(tokens, p["e"], mode="mean")

    return on(fn, torch.randint(VOCABULARY, (ROWS, LENGTH)), e=randn(VOCABULARY, WIDTH))
