"""A small language model with a cache, as a pipeline of plain functions; and what ranks are asked to generate."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.nn.functional as F

import fpipe
from fpipe import Batch, Cache, Output, Pipeline, Placement, Recording, Stage, autoregressive, handlers, lower
from fpipe.handlers.distributed.connections import Connections
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


def of_several_lengths(rank, prompts):
    """The tokens of several prompts, one after the other, in two slices."""
    pipeline, params = language_model(2)
    plan = pipeline.plan(cut(pipeline, 2), 4)
    run = fpipe.generator(pipeline, plan, handler=handler(), max_new_tokens=4, prompt_slices=2)
    own = pipeline.params_on(params, plan, handler())
    return [run(own, each) for each in prompts]


def observed(rank, tokens):
    """The tokens of a call, those of a call that is recorded, and the measurement of all ranks."""
    pipeline, params = language_model(2)
    plan = pipeline.plan(cut(pipeline, 2), 4)
    recording = Recording(lower(autoregressive, replace(plan, tokens=tokens)))
    own, found = pipeline.params_on(params, plan, handler()), []
    for observe in (None, recording):
        options = {"max_new_tokens": tokens, "eos_token_id": (), "observe": observe}
        found.append(fpipe.generator(pipeline, plan, handler=handler(), **options)(own, PROMPTS))
    return (*found, fpipe.gather(recording))


def signatures_sent(rank, tokens):
    """How often a rank has sent a signature in a call, and in the next one; and the tokens of both."""
    pipeline, params = language_model(2)
    plan = pipeline.plan(cut(pipeline, 2), 4)
    run = fpipe.generator(pipeline, plan, handler=handler(), max_new_tokens=tokens, eos_token_id=())
    own, counts, found = pipeline.params_on(params, plan, handler()), [], []
    for _ in range(2):
        with patch.object(Connections, "send_bytes", autospec=True, side_effect=Connections.send_bytes) as sent:
            found.append(run(own, PROMPTS))
        counts.append(sent.call_count)
    return counts, found


def growing(rank):
    """An output grows from token to token: what each rank is told, and the tokens of the same sizes after that."""
    pipeline, params = language_model(2)
    calls, grows = [], True

    def attend_and_grow(p, cache, x, mask, places):
        x, cache = attend(p, cache, x, mask, places)
        calls.append(x)
        return (F.pad(x, (0, 0, len(calls) // 9, 0)) if grows else x), cache

    places = [Output(1), Batch("attention_mask"), Batch("cache_position")]
    stages = [*pipeline.stages[:2], Stage(attend_and_grow, places, stateful=True), pipeline.stages[3]]
    plan = pipeline.plan(Placement([0, 0, 0, 1]), 4)
    run = fpipe.generator(
        pipeline.replace(stages, None), plan, handler=handler(), max_new_tokens=6, eos_token_id=(), autodiff="eager"
    )
    own = pipeline.params_on(params, plan, handler())
    try:
        run(own, PROMPTS)
    except Exception as error:
        grows = False
        return type(error).__name__, str(error), run(own, PROMPTS)


def killed(rank, victim):
    """A rank is killed at its third token; the error of the other one."""
    pipeline, params = language_model(2)
    own, plan = handlers.Distributed(timeout=20), pipeline.plan(cut(pipeline, 2), 4)
    run = fpipe.generator(pipeline, plan, handler=own, max_new_tokens=6, autodiff="eager")
    params = pipeline.params_on(params, plan, own)
    calls = []

    def kill(*args, **options):
        calls.append(args)
        if rank == victim and len(calls) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return tanh(*args, **options)

    tanh = torch.tanh
    try:
        with patch.object(torch, "tanh", kill):
            run(params, PROMPTS)
    except fpipe.TransportError as error:
        return str(error)
    return "no error"


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


def other_ends(rank):
    """Rank 1 is called with other last tokens, in prompts of two slices."""
    return after_an_error(*language_model(2), [[*prompt[:-1], rank + 4] for prompt in PROMPTS], prompt_slices=2)


def other_last_prompts(rank):
    """Rank 1 is called with another last prompt, which the last microbatch has."""
    return after_an_error(*language_model(2), [*PROMPTS[:-1], [rank + 4]])


def other_arguments(rank, arguments, same):
    """Rank 1 is called with other arguments than rank 0: both errors, and the tokens of a call with the same ones."""
    pipeline, params = language_model(2)
    plan = pipeline.plan(cut(pipeline, 2), 4)
    own = pipeline.params_on(params, plan, handler())

    def tokens(rng=None, **options):
        run = fpipe.generator(pipeline, plan, handler=handler(), **options)
        return run(own, PROMPTS, rng=rng)

    try:
        tokens(**{**same, **arguments[rank]})
    except Exception as error:
        return type(error).__name__, str(error), tokens(**same)


def other_seeds_in_the_next_call(rank):
    """Where inputs are of the same kind as before, rank 0 sends values before it knows what rank 1 was called with."""
    pipeline, params = language_model(2)
    plan = pipeline.plan(cut(pipeline, 2), 4)
    run = fpipe.generator(pipeline, plan, handler=handler(), max_new_tokens=4, autodiff="eager")
    own = pipeline.params_on(params, plan, handler())
    first = run(own, PROMPTS, rng=(7, 1))
    try:
        run(own, PROMPTS, rng=(7, 2 + rank))
    except Exception as error:
        return str(error), first, run(own, PROMPTS, rng=(7, 1))


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
