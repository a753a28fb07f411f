"""Small pipelines that every handler must run with the reference's bits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import nn

import fpipe
from fpipe import Batch, Costs, Output, Pipeline, Placement, Stage, handlers, interop, schedules
from fpipe.effects import (
    Activation,
    Backward,
    BackwardInput,
    BackwardWeight,
    Discard,
    Fetch,
    Forward,
    Gradient,
    Offload,
    Overlap,
    Recompute,
    Recv,
    Send,
    parts,
)
from fpipe.policies import checkpoint_name
from tests.support.catalogue import ORDERS
from tests.support.trees import Pair

ROWS, WIDTH, VOCABULARY, CONTEXT = 16, 8, 11, 5


@dataclass
class Case:
    pipeline: Pipeline
    params: dict[int, Any]
    batch: Any
    target: Any
    state: dict[int, Any] | None = None
    rng: tuple[int, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    slices: int = 1


def mse(output, target):
    return ((output - target) ** 2).mean()


def nll(logits, target):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def randn(*shape, scale=0.5):
    return torch.randn(*shape) * scale


def linear(stages):
    def layer(p, x):
        return torch.tanh(x @ p["w"] + p["b"])

    params = {s: {"w": randn(WIDTH, WIDTH), "b": randn(WIDTH)} for s in range(stages)}
    return Case(Pipeline([layer] * stages, mse), params, randn(ROWS, WIDTH), randn(ROWS, WIDTH))


def convolution(stages):
    def layer(p, x):
        return F.relu(F.conv2d(x, p["w"], p["b"], padding=1))

    params = {s: {"w": randn(3, 3, 3, 3), "b": randn(3)} for s in range(stages)}
    return Case(Pipeline([layer] * stages, mse), params, randn(ROWS, 3, 6, 6), randn(ROWS, 3, 6, 6))


def attend(p, x, dropout=0.0):
    batch, length, width = x.shape
    q, k, v = (x @ p["qkv"]).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    x = x + checkpoint_name(mixed, "mixed").transpose(1, 2).reshape(batch, length, width)
    return x + F.dropout(F.gelu(F.layer_norm(x, (width,)) @ p["up"]) @ p["down"], dropout, training=dropout > 0)


def attend_params():
    return {"qkv": randn(WIDTH, 3 * WIDTH), "up": randn(WIDTH, 2 * WIDTH), "down": randn(2 * WIDTH, WIDTH)}


def attention(stages, dropout=0.0, tied=False):
    """A small GPT: embedding before the first block, head after the last."""

    def first(p, x):
        return attend(p["block"], p["wte"][x] + p["wpe"][: x.shape[-1]], dropout)

    def middle(p, x):
        return attend(p["block"], x, dropout)

    def last(p, x):
        return middle(p, x) @ p["head"].T

    params = {s: {"block": attend_params()} for s in range(stages)}
    params[0] |= {"wte": randn(VOCABULARY, WIDTH), "wpe": randn(CONTEXT, WIDTH)}
    if not tied:
        params[stages - 1]["head"] = randn(VOCABULARY, WIDTH)
    ties = {(stages - 1, "head"): (0, "wte")} if tied else None
    tokens = torch.randint(0, VOCABULARY, (2, ROWS, CONTEXT))
    pipeline = Pipeline([first, *[middle] * (stages - 2), last], nll, ties=ties)
    return Case(pipeline, params, tokens[0], tokens[1], rng=(7, 3) if dropout else None)


def dropout(stages):
    return attention(stages, dropout=0.3)


def tied(stages):
    return attention(stages, tied=True)


def dictionary(stages):
    """Values are trees with a mask, an integer, a plain value, and an entry that nobody reads."""

    def first(p, batch):
        h = batch["x"] @ p["w"]
        return {"h": h, "mask": h.detach() > 0, "row": batch["row"], "note": ("plain", 3), "extra": h * 2}

    def middle(p, v):
        h = torch.where(v["mask"], v["h"], 0.1 * v["h"]) @ p["w"] + v["row"][:, None] * v["note"][1]
        return {**v, "h": h, "mask": ~v["mask"]}

    def last(p, h, mask):
        return (h * mask) @ p["w"]

    stages_ = [Stage(first), *[Stage(middle)] * (stages - 2)]
    stages_.append(Stage(last, reads=(Output(stages - 2, "h"), Output(stages - 2, "mask"))))
    params = {s: {"w": randn(WIDTH, WIDTH)} for s in range(stages)}
    return Case(
        Pipeline(stages_, mse), params, {"x": randn(ROWS, WIDTH), "row": torch.arange(ROWS)}, randn(ROWS, WIDTH)
    )


def skip(stages):
    """Stage 0's output is read by every later stage, and an earlier one's twice by the last."""

    def first(p, x):
        h = checkpoint_name(torch.tanh(x @ p["w"]), "h")
        return {"h": h, "skip": h * x}

    def layer(p, h, skip):
        return torch.tanh(h @ p["w"] + skip)

    def last(p, h, again, skip, x):
        return h @ p["w"] + again * skip + x

    nodes = [Stage(first)]
    for s in range(1, stages - 1):
        nodes.append(Stage(layer, reads=(Output(0, "h") if s == 1 else s - 1, Output(0, "skip"))))
    before = Output(0, "h") if stages == 2 else Output(stages - 2)
    nodes.append(Stage(last, reads=(before, before, Output(0, "skip"), Batch())))
    params = {s: {"w": randn(WIDTH, WIDTH)} for s in range(stages)}
    return Case(Pipeline(nodes, mse), params, randn(ROWS, WIDTH), randn(ROWS, WIDTH))


def modules(stages):
    """torch modules: batch norm with its buffers, a frozen layer, a parameter that is never used."""
    found = []
    for s in range(stages):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        if s % 2:
            module[0].requires_grad_(False)
            module.register_parameter("unused", nn.Parameter(torch.ones(2)))
        found.append(module)
    pipeline, params = interop.from_modules(found, loss=mse)
    batch, target = randn(ROWS, WIDTH), randn(ROWS, WIDTH)
    return Case(pipeline, params, batch, target, state=interop.buffers(found))


def weighted(stages):
    """Token counts as weights, an aux with tensors and plain values, gathered."""

    def loss(output, target):
        kept = target["mask"]
        error = ((output - target["y"]) ** 2).mean(1)
        return (error * kept).sum() / kept.sum(), {"error": error.detach(), "kept": kept.sum(), "unit": "tokens"}

    case = linear(stages)
    target = {"y": case.target, "mask": torch.arange(ROWS) % 3 < 2}
    options = {"has_aux": True, "weight": lambda t: t["mask"].sum(), "gather": True}
    return Case(Pipeline(case.pipeline.stages, loss), case.params, case.batch, target, options=options)


def layouts(stages):
    """Values that are transposed, channels last, expanded, conjugate, complex, and the same tensor three times."""

    def first(p, x):
        h = x @ p["w"]
        image = F.conv2d(x.view(-1, 2, 2, 2), p["k"], padding=1).to(memory_format=torch.channels_last)
        z = torch.complex(h, x).conj()
        return {"t": h.T, "image": image, "e": h.sum(0).expand(len(h), WIDTH), "z": z, "h": (h, h, h)}

    def middle(p, v):
        t = torch.tanh(v["t"].sum(1) + v["e"].T.sum(1))
        image = F.conv2d(v["image"], p["k"], padding=1)
        return {**v, "t": v["t"] * t[:, None], "image": image, "z": v["z"] * p["w"][0, 0]}

    def last(p, v):
        a, b, c = v["h"]
        h = v["t"].T * v["e"] + a.sin() * b.cos() + c.exp() + v["image"].flatten(1)
        return h @ p["w"] + v["z"].real * v["z"].imag

    nodes = [Stage(first), *[Stage(middle)] * (stages - 2), Stage(last)]
    params = {s: {"w": randn(WIDTH, WIDTH), "k": randn(2, 2, 3, 3)} for s in range(stages)}
    return Case(Pipeline(nodes, mse), params, randn(ROWS, WIDTH), randn(ROWS, WIDTH))


def subtrees(stages):
    """A whole subtree is tied, a named tuple with a frozen leaf, among params of which one is idle."""

    def first(p, x):
        return (x @ p["pair"].left) * p["pair"].right["scale"]

    def last(p, x):
        return (x @ p["again"].left) * p["again"].right["scale"] + p["own"]

    nodes = [Stage(first, frozen=[("pair", "right")]), *[Stage(lambda p, x: torch.tanh(x))] * (stages - 2)]
    nodes.append(Stage(last, frozen=[("again", "right")]))
    pair = Pair(randn(WIDTH, WIDTH), {"scale": randn(WIDTH)})
    params = {s: {} for s in range(stages)}
    params[0] = {"pair": pair, "idle": randn(2)}
    params[stages - 1] = {"own": randn(WIDTH)}
    pipeline = Pipeline(nodes, mse, ties={(stages - 1, "again"): (0, "pair")})
    return Case(pipeline, params, randn(ROWS, WIDTH), randn(ROWS, WIDTH))


def twice(stages):
    """The last stage uses one entry of the first under two names, and a second is idle there."""

    def first(p, x):
        return x @ p["w"] + p["b"]

    def last(p, x):
        return x * p["one"] + p["two"] ** 3

    nodes = [first, *[lambda p, x: torch.tanh(x)] * (stages - 2), last]
    params = {s: {} for s in range(stages)}
    params[0] = {"w": randn(WIDTH, WIDTH), "b": randn(WIDTH), "idle": randn(2)}
    ties = {(stages - 1, name): (0, entry) for name, entry in (("one", "b"), ("two", "b"), ("three", "idle"))}
    return Case(Pipeline(nodes, mse, ties=ties), params, randn(ROWS, WIDTH), randn(ROWS, WIDTH))


def causal(stages):
    """A small GPT over three slices, with dropout and a tied head: keys, values and positions are carried."""

    def attend_slice(p, carry, x):
        q, k, v = (x @ p["qkv"]).chunk(3, -1)
        if carry is not None:
            k, v = torch.cat((carry["k"], k), 1), torch.cat((carry["v"], v), 1)
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + F.dropout(F.gelu(x @ p["up"]) @ p["down"], 0.3), {"k": k, "v": v}

    def first(p, carry, x):
        at, inner = carry or (0, None)
        y, inner = attend_slice(p["block"], inner, p["wte"][x] + p["wpe"][at : at + x.shape[1]])
        return y, (at + x.shape[1], inner)

    def middle(p, carry, x):
        return attend_slice(p["block"], carry, x)

    def last(p, carry, x):
        y, carry = attend_slice(p["block"], carry, x)
        return y @ p["head"].T, carry

    params = {s: {"block": attend_params()} for s in range(stages)}
    params[0] |= {"wte": randn(VOCABULARY, WIDTH), "wpe": randn(CONTEXT, WIDTH)}
    tokens = torch.randint(0, VOCABULARY, (2, ROWS, CONTEXT))
    nodes = [Stage(fn, carry=True) for fn in (first, *[middle] * (stages - 2), last)]
    pipeline = Pipeline(nodes, nll, ties={(stages - 1, "head"): (0, "wte")})
    return Case(pipeline, params, tokens[0], tokens[1], rng=(7, 3), slices=3)


def recurrent(stages):
    """Two slices of which the first has no weight: what is carried has leaves without a gradient, and one of no use.

    The first stage has state and is read by all, the second carries nothing, and the loss has aux.
    """

    def cells(p, carry, x):
        h, count, *_ = carry or (torch.zeros_like(x[:, 0]), 0)
        outputs = []
        for token in x.unbind(1):
            outputs.append(h := torch.tanh(h @ p["w"] + token))
        return torch.stack(outputs, 1), (h, count + x.shape[1], h.detach() > 0, h * 2)

    def first(p, state, carry, x):
        y, carry = cells(p, carry, x)
        return {"y": y, "skip": x * p["w"].sum(0)}, carry, {"seen": state["seen"] + x.detach().mean((0, 1))}

    def plain(p, x):
        return torch.tanh(x @ p["w"])

    def later(p, carry, x, skip):
        y, carry = cells(p, carry, x)
        return y + skip, carry

    def loss(output, target):
        kept = target["mask"]
        error = ((output - target["y"]) ** 2).mean(2)
        return (error * kept).sum() / kept.sum(), {"error": error.detach(), "kept": kept.sum(), "unit": "tokens"}

    nodes = [Stage(first, stateful=True, carry=True)]
    for s in range(1, stages):
        before = Output(0, "y") if s == 1 else Output(s - 1)
        one = Stage(plain, reads=[before]) if s == 1 < stages - 1 else None
        nodes.append(one or Stage(later, reads=[before, Output(0, "skip")], carry=True))
    params = {s: {"w": randn(WIDTH, WIDTH)} for s in range(stages)}
    mask = (torch.arange(CONTEXT) >= (CONTEXT + 1) // 2).expand(ROWS, CONTEXT)
    target = {"y": randn(ROWS, CONTEXT, WIDTH), "mask": mask}
    options = {"has_aux": True, "weight": lambda t: t["mask"].sum(), "gather": True}
    state, batch = {0: {"seen": torch.zeros(WIDTH)}}, randn(ROWS, CONTEXT, WIDTH)
    return Case(Pipeline(nodes, loss), params, batch, target, state=state, options=options, slices=2)


CASES = {
    f.__name__: f
    for f in (
        linear,
        convolution,
        attention,
        dictionary,
        layouts,
        skip,
        subtrees,
        tied,
        twice,
        dropout,
        modules,
        weighted,
        causal,
        recurrent,
    )
}
SLICED = ["causal", "recurrent"]
UNSLICED = [name for name in CASES if name not in SLICED]


def split_backward(rank, plan):
    """Input and weight gradients apart, the weights as late as can be."""
    (stage,) = plan.stages_on(rank)
    every = range(plan.microbatches)
    yield from (Forward(stage, m) for m in every)
    yield from (BackwardInput(stage, m) for m in every)
    yield from (BackwardWeight(stage, m) for m in every)


def overlapping(rank, plan):
    """1F1B with one more microbatch to warm up, so that a forward and a backward of others can overlap."""
    (stage,) = plan.stages_on(rank)
    warmup = min(plan.stages - stage, plan.microbatches)
    yield from (Forward(stage, m) for m in range(warmup))
    yield from (Overlap(Forward(stage, m), Backward(stage, m - warmup)) for m in range(warmup, plan.microbatches))
    yield from (Backward(stage, m) for m in range(plan.microbatches - warmup, plan.microbatches))


def zb_auto(rank, plan):
    """The last stage is the heaviest, and memory is short."""
    costs = Costs(forward=[*[1.0] * (plan.stages - 1), 2.0], communication=0.3)
    return schedules.zb_auto(plan, costs, max(1, plan.ranks - 1), effort=0.02)(rank, plan)


def moving(schedule, recomputes):
    """Move the residuals of each microbatch to the host and back, or recompute them if the function says so."""

    def moved(rank, plan):
        posted = []
        for effect in schedule(rank, plan):
            yield from (Discard(*part) for part in posted)
            posted = []
            for part in parts(effect):
                if isinstance(part, Backward | BackwardInput):
                    again = recomputes(part.microbatch)
                    yield (Recompute if again else Fetch)(part.stage, part.microbatch, part.slice)
            yield effect
            for part in parts(effect):
                if isinstance(part, Forward) and not recomputes(part.microbatch):
                    posted.append((part.stage, part.microbatch, part.slice))
                    yield Offload(*posted[-1])

    return moved


def place_of(entry):
    """The entry's placement of a number of ranks."""
    return lambda ranks: entry.place(ranks, entry.chunks)


def copied(ranks):
    """Stages of which the first has copies on the first two ranks, and the next is on the second too.

    So as many ranks have as many stages, two ranks too, and a rank has a stage with copies beside one without.
    """
    return Placement([tuple(range(min(2, ranks))), *range(1, ranks)])


def copied_alone(ranks):
    """A chain of three ranks or more with a stage on each, whose first has copies: as the search finds them."""
    return Placement([(0, 1), *range(2, ranks)])


UNEQUAL = Costs(1, 1.5, 0.5, communication=0.3)
SCHEDULES = {name: (getattr(schedules, name), place_of(entry)) for name, entry in ORDERS.items()} | {
    "gpipe_v": (schedules.gpipe, Placement.v),
    "gpipe_both_ways": (schedules.gpipe, Placement.both_ways),
    "split": (split_backward, Placement.loop),
    "overlap": (overlapping, Placement.loop),
    "zb_auto": (zb_auto, Placement.loop),
    "zb_auto_copied": (zb_auto, copied),
    "zb_v_unequal": (partial(schedules.zb_v, costs=UNEQUAL), Placement.v),
}
MOVING = {
    "one_f_one_b_offloaded": (moving(schedules.one_f_one_b, lambda m: False), Placement.loop),
    "gpipe_offloaded": (moving(schedules.gpipe, lambda m: False), Placement.loop),
    "gpipe_recomputed": (moving(schedules.gpipe, lambda m: True), Placement.loop),
    "zb_v_moved": (moving(schedules.zb_v, lambda m: m % 2 == 1), Placement.v),
    "dualpipe_v_moved": (moving(schedules.dualpipe_v, lambda m: m % 2 == 0), Placement.v),
}
"""Those that move residuals to the host or recompute them; no step of theirs is captured."""
OF_THREE = {"one_f_one_b_copied": (schedules.one_f_one_b, copied_alone)}
"""Those of three ranks or more."""
TAKE_SLICES = ["gpipe", "gpipe_v", "gpipe_both_ways", "gpipe_recomputed", "gpipe_offloaded", "seq_1f1b", "seq_zb"]
COPIED = [name for name, (_, place) in SCHEDULES.items() if any(len(ranks) > 1 for ranks in place(2).holders)]
"""Those of stages with copies: these take an even number of microbatches, and no state."""


def rows(microbatches):
    """A batch of which few microbatches are even, and all have one of three sizes: each is traced."""
    return min(ROWS, 3 * microbatches + 1)


def make(name, schedule, ranks, microbatches, rows=ROWS):
    """(case, schedule, plan), the same in every process."""
    generator, place = (SCHEDULES | MOVING | OF_THREE)[schedule]
    placement = place(ranks)
    case = built(name, placement.stages, rows)
    return case, generator, case.pipeline.plan(placement, microbatches, slices=case.slices)


def built(name, stages, rows=ROWS):
    torch.default_generator.manual_seed(0)
    case = CASES[name](stages)
    case.batch, case.target = optree.tree_map(lambda x: x[:rows], (case.batch, case.target))
    return case


def own(case, plan, rank):
    """What a rank passes to its step: params, batch, target and state of its own stages."""
    stages = plan.stages_on(rank)
    reads = any(isinstance(read, Batch) for s in stages for read in case.pipeline.stages[s].inputs)
    state = None if case.state is None else {s: tree for s, tree in case.state.items() if s in stages}
    params = case.pipeline.params_on(case.params, plan, rank)
    return params, case.batch if reads else None, case.target if plan.stages - 1 in stages else None, state


def reference(case, schedule, plan):
    options = {"handler": handlers.Reference(), "autodiff": "eager", **case.options}
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, **options)
    return step(case.params, case.batch, case.target, state=case.state, rng=case.rng)


def oracle(name, plan, device=None):
    """The reference's result for a batch of few rows: it knows no schedule, so that one call does for all."""
    return _oracle(name, plan, device or torch.device("cpu"))


@cache
def _oracle(name, plan, device):
    case = on_device(built(name, plan.stages, rows(plan.microbatches)), device)
    return reference(case, schedules.gpipe, plan)


def moved(tree, device):
    return optree.tree_map(
        lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree, none_is_leaf=True, namespace="fpipe"
    )


def on_device(case, device):
    parts = {name: moved(getattr(case, name), device) for name in ("params", "batch", "target", "state")}
    return replace(case, **parts)


def talking(rank, plan):
    """GPipe on a chain, with its own communication."""
    (stage,) = plan.stages_on(rank)
    before, after = stage > 0, stage < plan.stages - 1
    for m in range(plan.microbatches):
        if before:
            yield Recv(Activation(stage - 1, m), rank - 1)
        yield Forward(stage, m)
        if after:
            yield Send(Activation(stage, m), rank + 1)
    for m in range(plan.microbatches):
        if after:
            yield Recv(Gradient(stage, stage + 1, m), rank + 1)
        yield Backward(stage, m)
        if before:
            yield Send(Gradient(stage - 1, stage, m), rank - 1)
