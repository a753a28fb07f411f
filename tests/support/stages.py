"""Stages of every kind that autodiff must give eager's bits for; the names say what is hard about them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as ckpt

from fpipe import Batch, Output, Stage, interop
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.stage import Target
from tests.support.trees import Pair, Record

NOTHING = Microbatch(None, None)
ROWS, WIDTH, LENGTH, HEADS, VOCABULARY = 4, 8, 5, 2, 11


@dataclass
class Example:
    """A stage with everything that it is run on.

    Args:
        sources: by source stage; leaves that require a gradient get one.
    """

    stage: Stage
    params: Any
    sources: dict[int, Any] = field(default_factory=dict)
    state: Any = None
    data: Microbatch = NOTHING


EXAMPLES: dict[str, Callable[[], Example]] = {}


def example(make):
    EXAMPLES[make.__name__] = make
    return make


def family(make, **options):
    """An example for each set of options: `attention_causal`."""
    for name, given in options.items():
        EXAMPLES[f"{make.__name__}_{name}"] = partial(make, **given)


def make(name: str) -> Example:
    """The same example at every call."""
    torch.manual_seed(0)
    return EXAMPLES[name]()


def tensors_mapped(fn, tree):
    return optree.tree_map(lambda x: fn(x) if isinstance(x, torch.Tensor) else x, tree, namespace="fpipe")


def microbatch(example: Example, m: int) -> Example:
    """The example with another microbatch's data, of the same signature; the first is the example itself."""
    moved: dict[int, torch.Tensor] = {}

    def other(x):
        if m and id(x) not in moved:
            moved[id(x)] = _other_values(x, m).requires_grad_(x.requires_grad)
        return moved.get(id(x), x)

    sources = {source: tensors_mapped(other, tree) for source, tree in example.sources.items()}
    data = Microbatch(tensors_mapped(other, example.data.batch), tensors_mapped(other, example.data.target))
    return replace(example, sources=sources, data=data)


def _other_values(x, m):
    """A tensor of the same layout; the values may be shared by several elements."""
    if x.is_conj() or x.is_neg():
        return x.detach()  # what it is can't be written
    memory = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    values = memory * (1 + m / 4) if x.is_floating_point() or x.is_complex() else memory.clone()
    return values.roll(m).as_strided(x.shape, x.stride(), x.storage_offset())


def randn(*shape, scale=0.5, **options):
    return torch.randn(shape, **options) * scale


def wants(*shape, **options):
    """An input that wants a gradient."""
    return randn(*shape, **options).requires_grad_()


def on(fn, x, state=None, frozen=(), **params):
    """A stage that reads one other stage."""
    return Example(Stage(fn, reads=(0,), stateful=state is not None, frozen=frozen), params, {0: x}, state)


def of_module(module, *inputs, reads=None):
    """A module whose inputs come from stages of their own."""
    reads = tuple(range(len(inputs))) if reads is None else reads
    pipeline, params = interop.from_modules([module])
    stage = replace(pipeline.stages[0], reads=reads)
    return Example(stage, params[0], dict(enumerate(inputs)), interop.buffers([module]).get(0))


def square():
    return randn(WIDTH, WIDTH)


def layers(count):
    return [{"w": square(), "b": randn(WIDTH)} for _ in range(count)]


def deep(p, x):
    for layer in p["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x


@example
def mlp():
    return on(deep, wants(ROWS, WIDTH), layers=layers(3))


@example
def mlp_on_the_batch():
    batch = Microbatch(randn(ROWS, WIDTH), None)
    return Example(Stage(deep, reads=(Batch(),)), {"layers": layers(3)}, data=batch)


@example
def mlp_whose_input_wants_no_gradient():
    return on(deep, randn(ROWS, WIDTH), layers=layers(2))


@example
def mlp_on_sequences():
    def fn(p, x):
        return F.linear(F.relu(F.linear(x, p["up"], p["b"])), p["down"])

    return on(fn, wants(2, LENGTH, WIDTH), up=randn(16, WIDTH), b=randn(16), down=randn(WIDTH, 16))


@example
def mlp_in_double_precision():
    layer = {"w": square().double(), "b": randn(WIDTH).double()}
    return on(deep, wants(ROWS, WIDTH, dtype=torch.float64), layers=[layer])


@example
def frozen_layer():
    def fn(p, x):
        return torch.tanh(x @ p["w0"] + p["b"]) @ p["w1"]

    return on(fn, wants(ROWS, WIDTH), frozen=("w0",), w0=square(), w1=square(), b=randn(WIDTH))


@example
def everything_frozen():
    return on(lambda p, x: torch.tanh(x @ p["w"]), wants(ROWS, WIDTH), frozen=("w",), w=square())


@example
def plain_values_among_parameters():
    def fn(p, x):
        return F.leaky_relu(x @ p["w"], p["slope"]) if p["kind"] == "leaky" else x, p["kind"], p["table"][x.argmax(1)]

    table = torch.arange(WIDTH)
    return on(fn, wants(ROWS, WIDTH), w=square(), slope=0.1, kind="leaky", none=None, table=table)


@example
def no_parameters():
    return on(lambda p, x: F.gelu(x).sum(0), wants(ROWS, WIDTH))


@example
def nothing_wants_a_gradient():
    return on(lambda p, x: (x * 2, x.argmax(1)), randn(ROWS, WIDTH))


@example
def unused_parameter_and_input():
    def fn(p, v):
        return v["h"] @ p["w"]

    return on(fn, {"h": wants(ROWS, WIDTH), "idle": wants(3)}, w=square(), idle=randn(2))


@example
def weight_twice():
    return on(lambda p, x: F.relu(x @ p["w"]) @ p["w"], wants(ROWS, WIDTH), w=square())


@example
def weight_in_every_layer():
    def fn(p, x):
        for _ in range(4):
            x = torch.tanh(x @ p["w"] + x * p["b"])
        return x

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def one_parameter_under_two_names():
    w = square()
    return on(lambda p, x: torch.tanh(x @ p["a"]) @ p["b"].T, wants(ROWS, WIDTH), a=w, b=w)


@example
def tied_embedding():
    def fn(p, tokens):
        return torch.tanh(p["e"][tokens] @ p["w"]) @ p["e"].T

    return on(fn, torch.randint(VOCABULARY, (2, LENGTH)), e=randn(VOCABULARY, WIDTH), w=square())


@example
def auxiliary_loss():
    def fn(p, x):
        gates = F.softmax(x @ p["router"], -1)
        return {"y": F.relu(x @ p["w"]), "aux": (gates.mean(0) * gates.square().mean(0)).sum()}

    return on(fn, wants(ROWS, WIDTH), w=square(), router=randn(WIDTH, 3))


@example
def skip_over_a_stage():
    """One source is read twice, by parts, and another whole."""

    def fn(p, h, again, skip, batch):
        return torch.tanh(h["a"] @ p["w"]) * again + skip @ p["w"] + batch

    sources = {0: wants(ROWS, WIDTH), 1: {"a": wants(ROWS, WIDTH)}}
    reads = (Output(1), Output(1, "a"), Output(0), Batch("x"))
    return Example(Stage(fn, reads), {"w": square()}, sources, data=Microbatch({"x": randn(ROWS, WIDTH)}, None))


@example
def same_tensor_three_times():
    def fn(p, v):
        a, b, c = v
        return (a * b.sin() + c.exp()) @ p["w"]

    h = wants(ROWS, WIDTH)
    return on(fn, (h, h, h), w=square())


@example
def same_output_three_times():
    def fn(p, x):
        h = torch.tanh(x @ p["w"])
        return h, h, (h, x)

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def registered_trees_and_static_leaves():
    def fn(p, v):
        h = v.pair.left @ p["w"]
        h = h * v.many[1] if v.many[2] == "double" and v.note[0] == "text" else h
        return Record(Pair(h, None), [v.many[1], "named", v.many[3], 2.5], ("text", 1))

    x = Record(Pair(wants(ROWS, WIDTH), randn(2)), [None, 2, "double", torch.float16], ("text", 3))
    return on(fn, x, w=square())


@example
def views_among_outputs():
    def fn(p, x):
        h = torch.tanh(x @ p["w"])
        left, right = h.chunk(2, 1)
        return {"h": h, "t": h.T, "l": left, "r": right, "e": h.sum(0).expand(ROWS, WIDTH), "every": h.unbind(0)}

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def views_of_inputs_as_outputs():
    def fn(p, x):
        return {"x": x, "t": x.T, "row": x[1], "scaled": x * p["b"], "flat": x.reshape(-1)}

    return on(fn, wants(ROWS, WIDTH), b=randn(WIDTH))


@example
def inputs_as_outputs():
    def fn(p, v):
        return {**v, "h": v["h"] @ p["w"]}

    v = {"h": wants(ROWS, WIDTH), "skip": wants(3), "mask": torch.arange(ROWS) > 1, "note": "plain", "frozen": randn(2)}
    return on(fn, v, w=square())


@example
def parameters_as_outputs():
    """An output may be a parameter, a view of one, or depend on parameters alone."""

    def fn(p, x):
        return {"y": x @ p["w"], "w": p["w"], "t": p["w"].T, "b": torch.tanh(p["b"]) * 2}

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def batch_and_target_as_outputs():
    def fn(p, batch, target):
        return batch["x"] * p["b"], batch["x"], batch["n"], target

    data = Microbatch({"x": randn(ROWS, WIDTH), "n": torch.arange(ROWS)}, torch.arange(ROWS) * 2)
    return Example(Stage(fn, reads=(Batch(), Target())), {"b": randn(WIDTH)}, data=data)


@example
def outputs_without_gradient():
    def fn(p, x):
        h = x @ p["w"]
        return {"h": h, "stop": h.detach(), "at": h.argmax(1), "mask": h > 0, "n": torch.tensor(3), "half": h.half()}

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def everything_detached():
    return on(lambda p, x: (x.detach() @ p["w"].detach(), x.argmax()), wants(ROWS, WIDTH), w=square())


@example
def bias_whose_gradient_is_the_cotangent():
    return on(lambda p, x: x + p["b"] + p["c"], wants(ROWS, WIDTH), b=randn(ROWS, WIDTH), c=randn(ROWS, WIDTH))


@example
def sizes_as_outputs():
    def fn(p, x):
        rows = x.shape[0]
        return x.reshape(rows, -1) * rows, rows, x.shape, torch.zeros(rows) + x.sum(tuple(range(1, x.ndim))), x.numel()

    return on(fn, wants(ROWS, LENGTH, WIDTH))


@example
def scalars_and_empty_tensors():
    def fn(p, v):
        return v["s"] * p["s"], v["e"] * p["b"], torch.cat([v["e"], v["x"]]) * p["b"]

    return on(fn, {"s": wants(), "e": wants(0, WIDTH), "x": wants(ROWS, WIDTH)}, s=randn(), b=randn(WIDTH))


@example
def mixed_precision_by_hand():
    def fn(p, v):
        h = (v["h"].bfloat16() @ p["w"].bfloat16()).float() + p["d"]
        return {"h": h, "low": h.to(torch.float16) * v["i"], "sum": v["i"] + v["h"]}

    return on(fn, {"h": wants(ROWS, WIDTH), "i": torch.arange(WIDTH)}, w=square(), d=randn(WIDTH).double())


@example
def infinities_and_nans():
    def fn(p, x):
        y = torch.where(x > 0, torch.log(x), torch.sqrt(x - x)) * p["b"]
        return y, x / torch.zeros(WIDTH), torch.relu(-x.abs()) * p["b"]

    return on(fn, wants(ROWS, WIDTH), b=randn(WIDTH))


@example
def ties_of_maxima():
    def fn(p, x):
        y = (x * 4).round() * p["b"].sign() + x * 0
        return y.amax(1), y.max(1).values, y.max(), y.clamp(-1, 1), y.abs(), y.median(1).values, y.sort(1).values

    return on(fn, wants(ROWS, WIDTH), b=randn(WIDTH))


@example
def indexing():
    def fn(p, x):
        at = x.argsort(1)
        y = x.gather(1, at).cumsum(1) + p["table"].index_select(0, at[0, :ROWS])
        z = torch.zeros_like(y).scatter_add(1, at, y * x).index_add(0, at[:, 0] % ROWS, x * p["table"][:ROWS])
        return z[:, [0, 0, 2]], z[torch.tensor([1, 1, 3])], z.take_along_dim(at, 1), z.topk(2, 1).values, z.flip(0)

    return on(fn, wants(ROWS, WIDTH), table=square())


@example
def products_of_every_kind():
    def fn(p, v):
        x, y = v
        a = torch.einsum("bij,jk,bk->bi", y, p["w"], x) @ p["w"]
        b = torch.baddbmm(y, y, y.mT, beta=0.5, alpha=2) @ p["b"]
        c = torch.addmm(p["b"], x, p["w"], beta=3, alpha=0.5) + F.linear(x, p["w"], p["b"]) + x * p["b"].dot(p["b"])
        return a + b.sum(1, keepdim=True), c, torch.outer(p["w"] @ x[0], x[1]), F.bilinear(x, x, y[:2], None)

    return on(fn, (wants(ROWS, WIDTH), wants(ROWS, WIDTH, WIDTH)), w=square(), b=randn(WIDTH))


@example
def linear_algebra():
    def fn(p, x):
        a = p["w"] @ p["w"].T + torch.eye(WIDTH)
        return torch.linalg.solve(a, x.T).T + torch.linalg.cholesky(a).sum(0), torch.logdet(a), torch.linalg.inv(a)

    return on(fn, wants(ROWS, WIDTH), w=square())


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


class Scaled(torch.autograd.Function):
    """`forward(ctx, ...)`, with a plain argument and an output that is no tensor's gradient."""

    @staticmethod
    def forward(ctx, x, w, factor):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        sign = (x > 0).to(x)
        ctx.mark_non_differentiable(sign)
        return x * w * factor, sign

    @staticmethod
    def backward(ctx, g, _):
        x, w = ctx.saved_tensors
        return g * w * ctx.factor, (g * x).sum(0) * (ctx.factor + 1), None


class Exponential(torch.autograd.Function):
    """`setup_context`, and a gradient that is not the derivative."""

    @staticmethod
    def forward(x, w):
        y = x.exp()
        return y * w, y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        w, y = ctx.saved_tensors
        return 3 * g * w * y if ctx.needs_input_grad[0] else None, (g * y).sum(0)


class Once(torch.autograd.Function):
    """`once_differentiable`, and no gradient at all for its second input."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x.square() + w.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g, None


@example
def function_with_context():
    def fn(p, x):
        y, sign = Scaled.apply(x @ p["w"], p["b"], 3)
        return y, sign

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def function_with_setup_context():
    return on(lambda p, x: Exponential.apply(x @ p["w"], p["b"]), wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def function_once_differentiable():
    return on(lambda p, x: Once.apply(x * p["a"], p["b"]), wants(ROWS, WIDTH), a=randn(WIDTH), b=randn(WIDTH))


@torch.library.custom_op("fpipe_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@cube.register_fake
def _(x):
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, g: 3 * g * ctx.saved_tensors[0].square(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@example
def custom_op():
    return on(lambda p, x: cube(x @ p["w"]) + cube(p["b"]), wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def gradient_hook():
    def fn(p, x):
        h = torch.tanh(x @ p["w"])
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return h * p["b"]

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def saved_tensor_hooks():
    """What is saved for the backward is rounded."""

    def fn(p, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            return torch.tanh(x @ p["w"]) * p["b"]

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def gradient_inside():
    """Forces are the gradient of an energy, and are differentiated again."""

    def fn(p, x):
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(place @ p["w"]).square().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return energy, force

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def straight_through():
    def fn(p, x):
        h = x @ p["w"]
        return h + (h.round() - h).detach()

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def no_grad_inside():
    def fn(p, x):
        with torch.no_grad():
            target = torch.tanh(x @ p["w"])
        h = x @ p["w"]
        return (h - target).square(), target, h * h.detach().abs().amax()

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def function_transforms_inside():
    """Forces are the gradient of an energy; and a vmap over rows."""

    def fn(p, x):
        def energy(x):
            return torch.tanh(x @ p["w"]).square().sum()

        return torch.func.grad(energy)(x), torch.func.vmap(lambda row: row * (row @ p["w"]).sum())(x)

    return on(fn, wants(ROWS, WIDTH), w=square())


def block(p, x, dropout=0.0):
    return x + F.dropout(torch.tanh(x @ p["w"]) @ p["v"], dropout, training=dropout > 0)


def checkpointed(fn, *args, **options):
    return ckpt.checkpoint(fn, *args, use_reentrant=False, **options)


@example
def checkpoint_with_dropout():
    return on(lambda p, x: checkpointed(block, p, x, 0.4), wants(ROWS, WIDTH), w=square(), v=square())


@example
def checkpoint_without_randomness():
    def fn(p, x):
        return checkpointed(block, p, checkpointed(block, p, x))

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


@example
def checkpoints_in_a_row_with_dropout():
    def fn(p, x):
        for layer in p["blocks"]:
            x = F.dropout(checkpointed(block, layer, x, 0.3), 0.1)
        return x

    return on(fn, wants(ROWS, WIDTH), blocks=[{"w": square(), "v": square()} for _ in range(3)])


@example
def checkpoints_that_draw_alike():
    """Both read the same tensor with the same parameters and draw the same shapes, with other outcomes."""

    def fn(p, x):
        return checkpointed(block, p, x, 0.5) * checkpointed(block, p, x, 0.5)

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


@example
def checkpoint_that_draws_twice():
    def fn(p, x):
        def inner(x):
            return F.dropout(x, 0.5) @ p["w"] + F.dropout(x, 0.5).sin()

        return F.dropout(checkpointed(inner, x), 0.5)

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def checkpoint_in_a_checkpoint():
    def fn(p, x):
        return checkpointed(lambda x: checkpointed(block, p, torch.sin(x), 0.3) * x, x)

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


@example
def checkpoint_beside_what_is_unused():
    """One checkpointed block's result goes nowhere, another's carries no gradient."""

    def fn(p, x):
        checkpointed(block, p, x, 0.5)
        return checkpointed(block, p, x, 0.5), checkpointed(block, p, x, 0.5).detach()

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


def save_products(ctx, op, *args, **kwargs):
    return (
        ckpt.CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else ckpt.CheckpointPolicy.PREFER_RECOMPUTE
    )


def selective(dropout):
    def fn(p, x):
        mutable = dropout > 0  # under a trace every result is cached, and dropout writes to one of its own
        contexts = partial(ckpt.create_selective_checkpoint_contexts, save_products, allow_cache_entry_mutation=mutable)
        return checkpointed(block, p, x, dropout, context_fn=contexts)

    return on(fn, wants(ROWS, WIDTH), w=square(), v=square())


family(selective, plain={"dropout": 0.0}, dropout={"dropout": 0.5})


def autocast(fn, x, **params):
    def inside(p, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fn(p, x)

    return on(inside, x, **params)


@example
def autocast_mlp():
    return autocast(lambda p, x: deep(p, x), wants(ROWS, WIDTH), layers=layers(2))


@example
def autocast_weight_twice():
    def fn(p, x):
        return F.layer_norm(F.relu(x @ p["w"]) @ p["w"], (WIDTH,)).exp()

    return autocast(fn, wants(ROWS, WIDTH), w=square())


@example
def autocast_checkpoint():
    return autocast(lambda p, x: checkpointed(block, p, x, 0.3), wants(ROWS, WIDTH), w=square(), v=square())


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


@example
def in_place_on_intermediates():
    def fn(p, x):
        y = (x @ p["w"]).relu_()
        y = y + p["b"]
        y += 1
        y[x > 0] = 0
        z = y.clone()
        z[:, 1:3] *= x[:, 1:3]
        z[torch.tensor([0, 2])] = p["b"]
        z.t()[0].mul_(2)
        return y, z, z.sin().sub_(x)

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def in_place_into_a_buffer():
    def fn(p, x):
        out = torch.empty(2 * ROWS, WIDTH)
        out[:ROWS] = x @ p["w"]
        out[ROWS:].copy_(x).add_(p["b"])
        count = torch.zeros(ROWS, dtype=torch.long)
        count.index_add_(0, x.argmax(1) % ROWS, torch.ones(ROWS, dtype=torch.long))
        total = torch.zeros(WIDTH)
        for row in x:
            total = total + row
        return out, count, total, torch.zeros(WIDTH, ROWS).scatter_(0, x.argmax(1)[None], x.amax(1)[None])

    return on(fn, wants(ROWS, WIDTH), w=square(), b=randn(WIDTH))


@example
def in_place_then_read_by_a_view():
    def fn(p, x):
        y = x * p["b"]
        view = y[1]
        y.add_(x)
        head = view * 2
        view.mul_(3)
        return head, y, view

    return on(fn, wants(ROWS, WIDTH), b=randn(WIDTH))


@example
def complex_values():
    def fn(p, v):
        z = torch.fft.fft(v["x"]) * p["c"] + v["z"].conj()
        w = torch.view_as_complex(torch.stack([v["x"], z.imag], -1))
        return {"z": z @ p["c"].outer(p["c"]).conj(), "abs": z.abs(), "w": torch.fft.irfft(w), "conj": w.conj()}

    v = {"x": wants(ROWS, WIDTH), "z": wants(ROWS, WIDTH, dtype=torch.complex64)}
    return on(fn, v, c=randn(WIDTH, dtype=torch.complex64))


@example
def conjugate_and_negative_views():
    """Inputs and outputs whose memory holds the conjugate, or the negative, of what they are."""

    def fn(p, v):
        return v["z"] * p["c"], (v["z"] @ p["c"].conj()).conj(), v["n"] * 2, (v["z"] * p["c"]).conj().imag

    z = wants(ROWS, WIDTH, dtype=torch.complex64).detach().conj()
    return on(fn, {"z": z.requires_grad_(), "n": z.detach().imag}, c=randn(WIDTH, dtype=torch.complex64))


@example
def closed_over_tensor():
    table, module = randn(LENGTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def fn(p, x):
        return module(x @ p["w"]) * table[0] + table.sum(), table

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def closed_over_parameter():
    """It wants a gradient that nobody takes, and so do outputs that depend on it alone."""
    scale = wants(WIDTH)
    return on(lambda p, x: (x @ p["w"] * scale, scale * 2, x.detach() * scale), wants(ROWS, WIDTH), w=square())


@example
def constants_made_inside():
    def fn(p, x):
        mask = torch.ones(WIDTH, WIDTH).tril()
        angles = torch.arange(WIDTH)[None] / torch.tensor([10.0, 3.0, 1.5, 7.0])[:, None]
        scale = torch.tensor(2.0, requires_grad=True)
        return x @ (p["w"] * mask) + angles.sin() * x.new_tensor(3) + torch.full_like(x, math.pi) * scale, angles

    return on(fn, wants(ROWS, WIDTH), w=square())


@example
def parameters_alone_are_much_work():
    """Weights are standardised, cast and transposed before they meet the input."""

    def fn(p, x):
        w = (p["w"] - p["w"].mean(0)) / (p["w"].std(0) + 1e-5)
        low = (p["a"] @ p["b"]).bfloat16()
        return x @ (w + low.float()).T + torch.tanh(p["c"]).exp()

    return on(fn, wants(ROWS, WIDTH), w=square(), a=randn(WIDTH, 2), b=randn(2, WIDTH), c=randn(WIDTH))


def random(fn, x=None, **params):
    return on(fn, wants(ROWS, WIDTH) if x is None else x, w=square(), **params)


@example
def random_dropout():
    return random(lambda p, x: F.dropout(F.relu(F.dropout(x, 0.3) @ p["w"]), 0.5))


@example
def random_dropout_of_channels():
    def fn(p, x):
        return F.alpha_dropout(F.dropout2d(x, 0.4) * 2, 0.2, training=True) @ p["w"]

    return random(fn, wants(2, 4, 3, WIDTH))


@example
def random_weight_dropout():
    """It depends on parameters alone, and differs from microbatch to microbatch."""
    return random(lambda p, x: x @ F.dropout(p["w"], 0.5))


@example
def random_noise():
    """It depends on nothing, and differs from microbatch to microbatch."""

    def fn(p, x):
        y = x @ p["w"] + torch.randn(WIDTH) * torch.rand(()) + torch.rand_like(x)
        return y + torch.empty(WIDTH).uniform_() + torch.normal(0.0, 1.0, (WIDTH,)), torch.randint(9, (3,))

    return random(fn)


@example
def random_decisions():
    def fn(p, x):
        h = x @ p["w"]
        chosen = torch.multinomial(h.detach().softmax(1), 2)
        mask = torch.bernoulli(h.detach().sigmoid())
        return (
            F.gumbel_softmax(h, hard=True),
            h * mask,
            h.gather(1, chosen),
            h[torch.randperm(ROWS)],
            F.rrelu(h, training=True),
        )

    return random(fn)


@example
def random_draw_that_nobody_uses():
    def fn(p, x):
        torch.rand(3)
        y = F.dropout(x, 0.5) @ p["w"]
        F.dropout(p["w"], 0.5)
        return y

    return random(fn)


@example
def random_draw_without_gradients():
    def fn(p, x):
        with torch.no_grad():
            noisy = F.dropout(x, 0.5)
        return (noisy @ p["w"], noisy)

    return random(fn)


def other_layout(form):
    """Inputs and parameters that are not contiguous."""
    if form == "transposed":
        x, w = randn(WIDTH, ROWS).T.requires_grad_(), square().T
    elif form == "sliced":
        x, w = randn(ROWS, 2 * WIDTH)[:, ::2].requires_grad_(), randn(WIDTH, 2 * WIDTH)[:, WIDTH:]
    else:
        x, w = randn(1, WIDTH).expand(ROWS, WIDTH).requires_grad_(), randn(WIDTH, 1).expand(WIDTH, WIDTH)
    return on(lambda p, x: (torch.tanh(x @ p["w"]).reshape(-1), x + 1, p["w"].reshape(-1)), x, w=w)


family(other_layout, transposed={"form": "transposed"}, sliced={"form": "sliced"}, expanded={"form": "expanded"})
