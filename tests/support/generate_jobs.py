"""A small language model with a cache, as a pipeline of plain functions; and what ranks are asked to generate."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fpipe
from fpipe import Batch, Cache, Output, Pipeline, Placement, Stage
from tests.support.jobs import handler

WORDS, WIDTH, LENGTH = 23, 8, 24


def embed(p, ids, positions):
    return p["words"][ids] + p["places"][positions]


def attend(p, cache, x, mask, places):
    """A layer of attention with one head, whose keys and values are the cache."""
    q, k, v = (x @ p["qkv"]).chunk(3, dim=-1)
    keys, values = cache["keys"].index_copy(1, places, k), cache["values"].index_copy(1, places, v)
    weights = (q @ keys.mT + mask[:, 0]).softmax(-1)
    return x + torch.tanh(weights @ values), {"keys": keys, "values": values}


def head(p, x):
    return F.layer_norm(x[:, -1], [WIDTH]) @ p["words"].T


def language_model(rows, layers=2):
    """(pipeline, params): an embedding, layers with a cache, and a head without one, a stage each."""
    mask, places = Batch("attention_mask"), Batch("cache_position")
    stages = [Stage(embed, [Batch("input_ids"), Batch("position_ids")])]
    stages += [Stage(attend, [Output(s), mask, places], stateful=True) for s in range(layers)]
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator)

    empty = {name: torch.empty(rows, LENGTH, WIDTH, device="meta") for name in ("keys", "values")}
    cache = Cache(rows, LENGTH, {s + 1: empty for s in range(layers)}, eos=(3,), pad=0)
    ends = {"words": drawn(WORDS, WIDTH)}
    params = {0: {**ends, "places": drawn(LENGTH, WIDTH)}}
    params |= {s + 1: {"qkv": drawn(WIDTH, 3 * WIDTH)} for s in range(layers)}
    return Pipeline([*stages, Stage(head, [Output(layers)])], cache=cache), {**params, layers + 1: ends}


PROMPTS = [[5, 9, 4], [7], [8, 2, 11, 6, 1], [4, 4], [19, 20, 21, 22], [1, 2, 3, 4], [13]]
SAMPLED = {"temperature": 0.8, "top_k": 9, "top_p": 0.9}


def cut(pipeline, ranks):
    """Consecutive stages on each rank."""
    stages = len(pipeline.stages)
    return Placement([s * ranks // stages for s in range(stages)])


def generated(rank, pipeline, params, ranks, prompts, rng, options, runs=1):
    """Generate over gloo, several times with equal tokens."""
    plan = pipeline.plan(cut(pipeline, ranks), -(-len(prompts) // pipeline.cache.rows))
    run = fpipe.generator(pipeline, plan, handler=handler(), **options)
    own = pipeline.params_on(params, plan, handler())
    first, *others = [run(own, prompts, rng=rng) for _ in range(runs)]
    assert all(torch.equal(first, other) for other in others)
    return first


def language(rank, rows, ranks, rng, options):
    return generated(rank, *language_model(rows), ranks, PROMPTS, rng, options, runs=3)


def after_an_error(pipeline, params, prompts, **options):
    """The error of a call with some prompts, and the tokens of the next call, with `PROMPTS`."""
    plan = pipeline.plan(cut(pipeline, 2), 4)
    run = fpipe.generator(pipeline, plan, handler=handler(), max_new_tokens=6, **options)
    own = pipeline.params_on(params, plan, handler())
    try:
        run(own, prompts)
    except Exception as error:
        return type(error).__name__, str(error), run(own, PROMPTS)


def other_prompts(rank):
    """Rank 1 is called with other prompts than rank 0."""
    return after_an_error(*language_model(2), [[rank + 4, *prompt[1:]] for prompt in PROMPTS])


def too_long_on_one(rank):
    """Rank 1 is called with prompts that are too long."""
    return after_an_error(*language_model(2), [[1] * (LENGTH if rank else 1)])


def failing(rank, token):
    """The last stage fails at a token."""
    pipeline, params = language_model(2)
    calls = []

    def fails(p, x):
        calls.append(x)
        if len(calls) == 4 * token + 2:
            raise ArithmeticError("the head fails")
        return head(p, x)

    stages = [*pipeline.stages[:-1], Stage(fails, [Output(2)])]
    return after_an_error(pipeline.replace(stages, None), params, PROMPTS, autodiff="eager")
