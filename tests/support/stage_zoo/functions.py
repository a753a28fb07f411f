"""Plain functions: parameters, inputs and outputs of every kind, and operations on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fpipe import Batch, Output, Stage
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.stage import Target
from tests.support.stage_zoo.example import (
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Example,
    deep,
    example,
    layers,
    on,
    randn,
    square,
    wants,
)
from tests.support.trees import Pair, Record


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
