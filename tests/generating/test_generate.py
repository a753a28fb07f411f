"""Tokens of `generate` are those of `model.generate`, and the same on every plan and handler."""

import gc
import re
import signal
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import fpipe
from fpipe import Cache, Pipeline, Placement, ScheduleError, Stage, StageError, handlers, interop
from fpipe.autodiff.traced import Traced
from fpipe.devices import Cpu
from fpipe.generating.choice import Choice, _chosen
from fpipe.interop.transformers import split, split_with_cache
from tests.support.combinations import PAIRS, combined, few, one_in, thorough
from tests.support.fault_jobs import blamed
from tests.support.generate_jobs import (
    PROMPTS,
    SAMPLED,
    cut,
    failing,
    generated,
    growing,
    killed,
    language,
    language_model,
    of_several_lengths,
    other_arguments,
    other_ends,
    other_last_prompts,
    other_prompts,
    other_seeds_in_the_next_call,
    signatures_sent,
    too_long_on_one,
)
from tests.support.sharing import sharing

WORDS = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {**WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {**WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
AT = {"llama": ["model.layers.1"], "gpt2": ["transformer.h.1"]}
LENGTH = 24


def model_of(kind):
    """A model whose tokens depend on what it is given: drawn weights, larger than those of a new model."""
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(**GPT2)) if kind == "gpt2" else LlamaForCausalLM(LlamaConfig(**LLAMA))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return model.eval()


@cache
def language_of(kind):
    """(model, pipeline, params), with a cache for microbatches of two prompts."""
    model = model_of(kind)
    return (model, *split_with_cache(model, rows=2, max_length=LENGTH, at=AT[kind]))


def prompts(count, length=6):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 31, (count, length), generator=generator)
    mask = torch.arange(length) >= torch.randint(0, length - 1, (count, 1), generator=generator)
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


EOS = [(5,), (), (7, 11)]


@one_in(3)
@combined(kind=AT, eos=EOS)
def test_greedy_tokens_are_those_of_the_model(kind, eos):
    model, pipeline, params = language_of(kind)
    given = prompts(4)
    reference = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=[*eos] or [99])
    for ranks, handler in [(1, handlers.Reference()), (2, sharing(handlers.Local(), kind))]:
        plan = pipeline.plan(cut(pipeline, ranks), 2)
        options = {"handler": handler, "max_new_tokens": 12, "eos_token_id": eos, "tokens_per_program": 5}
        found = fpipe.generate(pipeline, params, given, plan, **options)
        assert torch.equal(found, reference)


@one_in(2)
@pytest.mark.parametrize("kind", AT)
def test_prompts_in_slices_have_the_tokens_of_the_model(kind):
    model, pipeline, params = language_of(kind)
    given = prompts(4)
    reference = model.generate(**given, max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=[5])
    plan = pipeline.plan(cut(pipeline, 2), 2)
    handler = sharing(handlers.Local(), kind)
    options = {"handler": handler, "max_new_tokens": 7, "eos_token_id": 5, "prompt_slices": 4}
    assert torch.equal(fpipe.generate(pipeline, params, given, plan, **options), reference)


@one_in(2)
@pytest.mark.parametrize("kind", AT)
def test_gloo_gives_the_models_tokens(kind, pools):
    model, pipeline, params = language_of(kind)
    given = prompts(4)
    reference = model.generate(**given, max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=[5])
    rows = [row[mask.bool()].tolist() for row, mask in zip(*given.values(), strict=True)]
    options = {
        "max_new_tokens": 9,
        "eos_token_id": 5,
        "tokens_per_program": 4,
        "autodiff": "auto" if PAIRS else "eager",
    }
    whole = pipeline, params, 2, rows, None, options
    length = max(map(len, rows))
    for found in pools(2).run(generated, *whole):
        assert torch.equal(found, reference[:, 6 - length :])


@pytest.mark.parametrize("kind", few(AT, ["llama"]))
def test_prompts_that_fill_no_microbatch_are_generated_from(kind):
    model, pipeline, params = language_of(kind)
    given = prompts(3)
    reference = model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=[5])
    plan = pipeline.plan(cut(pipeline, 2), 2)
    run = fpipe.generator(pipeline, plan, handler=sharing(handlers.Local(), kind), max_new_tokens=8, eos_token_id=5)
    assert torch.equal(run(params, given), reference)
    one = {name: x[:1] for name, x in given.items()}
    alone = model.generate(**one, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=[5])
    assert torch.equal(run(params, one), alone)


@thorough
def test_the_params_of_a_split_for_training_are_generated_from():
    model, pipeline, params = language_of("gpt2")
    at = interop.split_points(pipeline)
    _, trained = split(model, example={"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, at=at)
    plan, given = pipeline.plan(cut(pipeline, 2), 2), prompts(4)
    found = [
        fpipe.generate(pipeline, tree, given, plan, handler=handlers.Local(), max_new_tokens=4)
        for tree in (params, trained)
    ]
    assert torch.equal(*found)


# A small model of plain functions


def tokens_of(rows, ranks, handler, rng=None, **options):
    pipeline, params = language_model(rows)
    plan = pipeline.plan(cut(pipeline, ranks), -(-len(PROMPTS) // rows))
    handler = sharing(handler, "language") if isinstance(handler, handlers.Local) else handler
    return fpipe.generate(pipeline, params, PROMPTS, plan, handler=handler, rng=rng, **options)


@one_in(3)
@combined(options=[{}, SAMPLED, {"temperature": 2.0}], eos=[(3, 4, 5), ()])
def test_tokens_are_the_same_on_every_plan_and_handler(options, eos, pools):
    rng = (7, 1) if options else None
    options = {**options, "max_new_tokens": 11, "eos_token_id": eos}
    reference = tokens_of(1, 1, handlers.Reference(), rng, **options)
    assert reference.shape[1] <= 5 + 11
    for rows, ranks, per_program in [(2, 4, 1), (7, 3, None)]:
        found = tokens_of(rows, ranks, handlers.Local(), rng, tokens_per_program=per_program, **options)
        assert torch.equal(found, reference)
    for found in pools(2).run(language, 2, 2, rng, {**options, "tokens_per_program": 4}):
        assert torch.equal(found, reference)
    if options.get("temperature"):
        other = tokens_of(2, 2, handlers.Local(), (7, 2), **options)
        assert not torch.equal(other, reference)


@one_in(2)
@combined(slices=[2, 5], options=[{}, SAMPLED], eos=[(3, 4, 5), ()])
def test_tokens_are_the_same_for_prompts_in_slices(slices, options, eos, pools):
    rng = (7, 1) if options else None
    options = {**options, "max_new_tokens": 8, "eos_token_id": eos, "tokens_per_program": 3}
    whole, reference = (
        tokens_of(2, 1, handlers.Reference(), rng, prompt_slices=each, **options) for each in (1, slices)
    )
    assert torch.equal(reference, whole)  # bits of logits may differ, and the likeliest token does not
    for ranks in (2, 4):
        assert torch.equal(tokens_of(2, ranks, handlers.Local(), rng, prompt_slices=slices, **options), reference)
    for found in pools(2).run(language, 2, 2, rng, {**options, "prompt_slices": slices}):
        assert torch.equal(found, reference)


def test_prompts_of_several_lengths_may_have_equal_first_slices(pools):
    longer = [*PROMPTS[:-1], [13, 2, 2, 8, 1, 5]]
    expected = [reference_tokens(each, prompt_slices=2) for each in (PROMPTS, longer, PROMPTS)]
    for found in pools(2).run(of_several_lengths, [PROMPTS, longer, PROMPTS]):
        assert all(map(torch.equal, found, expected))


def test_a_program_of_slices_and_two_tokens():
    """Of the effects of a stage with the prompts, the last one alone gives a token that travels."""
    options = {"max_new_tokens": 2, "eos_token_id": ()}
    found = tokens_of(2, 2, handlers.Local(), prompt_slices=2, **options)
    assert torch.equal(found, tokens_of(2, 1, handlers.Reference(), **options))


def reference_tokens(given, **options):
    pipeline, params = language_model(2)
    plan = pipeline.plan(cut(pipeline, 1), 4)
    return fpipe.generate(pipeline, params, given, plan, handler=handlers.Reference(), max_new_tokens=4, **options)


def test_padding_without_a_mask_is_the_pad_token():
    lists = tokens_of(2, 2, handlers.Reference(), max_new_tokens=4)
    pipeline, params = language_model(2)
    run = fpipe.generator(pipeline, pipeline.plan(cut(pipeline, 2), 4), handler=handlers.Reference(), max_new_tokens=4)
    assert torch.equal(run(params, lists[:, :5]), lists)
    whole = torch.ones(len(PROMPTS), 5)
    assert not torch.equal(run(params, {"input_ids": lists[:, :5], "attention_mask": whole}), lists)


def test_ended_texts_go_on_with_pad_tokens():
    found = tokens_of(2, 2, handlers.Local(), max_new_tokens=12, eos_token_id=range(3, 12))
    new = found[:, 5:]
    assert new.shape[1] < 12  # all have ended
    for row in new.tolist():
        end = next(at for at, token in enumerate(row) if 3 <= token < 12)
        assert set(row[end + 1 :]) <= {0}
    assert any(len(row) == new.shape[1] and 0 in row for row in new.tolist())


def test_each_stage_is_traced_twice_and_writes_to_its_cache():
    pipeline, params = language_model(2)
    gc.collect()
    before = {id(x) for x in gc.get_objects() if type(x) is Traced}
    run = fpipe.generator(pipeline, pipeline.plan(cut(pipeline, 2), 4), handler=handlers.Local(), max_new_tokens=9)
    for _ in range(2):
        run(params, PROMPTS)
        stages = [x for x in gc.get_objects() if type(x) is Traced and id(x) not in before]
        assert sorted((x.name, x.graphs.count) for x in stages) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    for functions in (functions for x in stages for functions in x.graphs.traced if x.name in (1, 2)):
        assert functions.run.source.count("copied(") == 0


def test_a_cache_stays_in_its_memory(monkeypatch):
    pipeline, params = language_model(2)
    made, empty = [], Cache.empty
    monkeypatch.setattr(Cache, "empty", lambda *args: made.append(empty(*args)) or made[-1])
    plan = pipeline.plan(cut(pipeline, 2), 4)
    fpipe.generate(pipeline, params, PROMPTS, plan, handler=handlers.Local(), max_new_tokens=5)
    assert len(made) == 2 * 4
    longest = max(map(len, PROMPTS))
    assert all(tree["keys"][:, : longest + 4].ne(0).any(-1).all() for tree in made[:4])  # it was written in place
    assert not any(tree["keys"][:, longest + 4 :].any() for tree in made)


# Drawing


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, SAMPLED])
def test_tokens_are_drawn_with_the_probabilities_of_transformers(options):
    """Of numbers that are equally spaced, as many draw a token as its probability says."""
    count = 2000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)) * 2
    target = Choice(**options, rng=(0, 0)).target((torch.arange(count) + 0.5) / count, torch.device("cpu"))
    drawn = _chosen(logits.expand(count, -1), target)
    scores = logits
    for name, warper in [("temperature", TemperatureLogitsWarper), ("top_k", TopKLogitsWarper)]:
        scores = warper(options[name])(None, scores) if name in options else scores
    scores = TopPLogitsWarper(options["top_p"])(None, scores) if "top_p" in options else scores
    wanted = scores.softmax(-1)[0] * count
    assert (drawn.bincount(minlength=40) - wanted).abs().max() <= 1.01
    assert scores[0, drawn].isfinite().all()


def test_one_likely_token_is_the_greedy_one():
    greedy = tokens_of(2, 2, handlers.Local(), max_new_tokens=6)
    assert torch.equal(tokens_of(2, 2, handlers.Local(), (0, 0), top_k=1, max_new_tokens=6), greedy)
    assert torch.equal(tokens_of(2, 2, handlers.Local(), (0, 0), top_p=1e-6, max_new_tokens=6), greedy)


# What can't be generated


def refusal(pipeline=None, given=PROMPTS, plan=None, **options):
    made, params = language_model(2)
    pipeline = made if pipeline is None else pipeline
    plan = pipeline.plan(cut(pipeline, 2), 4) if plan is None else plan
    options = {"handler": handlers.Local(), "max_new_tokens": 4, **options}
    with pytest.raises((ValueError, TypeError, ScheduleError, StageError)) as error:
        fpipe.generate(pipeline, params, given, plan, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.5}, "temperature is for drawing tokens, .* pass rng="),
        ({"temperature": 0.0, "rng": (0, 0)}, "temperature must be more than 0"),
        ({"top_p": 1.5, "rng": (0, 0)}, "top_p must be a probability"),
        ({"top_k": 0, "rng": (0, 0)}, "top_k must be a whole number of at least 1, not 0"),
        ({"rng": 3}, r"rng must be \(seed, step\)"),
        ({"max_new_tokens": 0}, "max_new_tokens and tokens_per_program are whole numbers"),
        ({"max_new_tokens": 40}, "prompts of 5 tokens, padding included, with 40 new ones need a cache of 44"),
        ({"prompt_slices": 0}, "prompt_slices must be a whole number of at least 1, not 0"),
        ({"prompt_slices": 6}, "prompts of 5 tokens can't be cut into 6 slices"),
        ({"given": [[1] * 22]}, "need a cache of 25, and max_length is 24"),
        ({"given": [[1]] * 9}, "there are 9 prompts, and 4 microbatches of 2 hold 8: make a plan of 5 microbatches"),
        ({"given": [[1], []]}, "prompts are a tokenizer's mapping"),
        ({"given": "text"}, "prompts are a tokenizer's mapping"),
        ({"given": torch.ones(2, 2)}, "input_ids are torch.float32"),
        ({"given": {"ids": 1}}, "prompts are input_ids and attention_mask, and not ids"),
        (
            {"given": {"input_ids": torch.ones(2, 2).long(), "attention_mask": torch.tensor([[1, 1], [1, 0]])}},
            "prompt 1 ends in padding",
        ),
    ],
    ids=repr,
)
def test_wrong_arguments_have_a_way_out(options, message):
    assert re.search(message, refusal(**options))


def test_a_missing_pad_token_is_named():
    pipeline, _ = language_model(2)
    pipeline.cache = Cache(2, 24, pipeline.cache.state)
    assert "pass pad_token_id=" in refusal(pipeline)
    assert "pass pad_token_id=, as pad_token_id=3" in refusal(pipeline, eos_token_id=3)


def test_a_plan_that_does_not_fit_is_named():
    pipeline, _ = language_model(2)
    assert "copies on ranks (0, 1)" in refusal(plan=pipeline.plan(Placement([0, 1, 0, (0, 1)]), 4))
    assert "2 replicas, and each would generate by itself" in refusal(plan=pipeline.plan(cut(pipeline, 2), 4, 2))
    assert "make a plan without slices; prompt_slices=2 cuts the prompts" in refusal(
        plan=replace(pipeline.plan(cut(pipeline, 2), 4), slices=2)
    )
    assert "edges are not the pipeline's" in refusal(plan=fpipe.Plan(Placement.loop(2), 4))
    assert "has no cache" in refusal(Pipeline([Stage(lambda p, x: x)] * 2))


def test_caches_that_do_not_fit_into_memory_are_refused_with_their_bytes(monkeypatch):
    monkeypatch.setattr(Cpu, "available_bytes", lambda self: 5000)
    assert (
        "caches of 2 stages for 4 microbatches of 2 prompts take 24 KiB, and cpu has 4.883 KiB: take fewer prompts"
        in refusal()
    )


def test_logits_of_another_shape_are_named():
    pipeline, _ = language_model(2)
    bad = pipeline.replace([*pipeline.stages[:-1], Stage(lambda p, x: x)], None)
    assert "returns the logits of the next token, [rows, vocabulary], not (2, 5, 8)" in refusal(bad)


def test_models_that_can_not_generate_from_a_cache_are_refused():
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    wrong = [
        (BertForMaskedLM(BertConfig(vocab_size=31, **small)), "is no causal language model"),
        (GPT2Model(GPT2Config(**GPT2)), "is no causal language model"),
        (T5ForConditionalGeneration(T5Config(vocab_size=31, d_model=16, d_ff=24)), "is no causal language model"),
        (torch.nn.Linear(2, 2), "is no causal language model"),
        (
            MistralForCausalLM(MistralConfig(**WORDS, **small, num_key_value_heads=2, sliding_window=8)),
            "a sliding window of 8 tokens",
        ),
    ]
    for model, message in wrong:
        with pytest.raises(ValueError, match=message):
            split_with_cache(model, rows=1, max_length=16, stages=2)
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, not 0"):
        split_with_cache(GPT2LMHeadModel(GPT2Config(**GPT2)), rows=0, max_length=8, stages=2)
    with pytest.raises(ValueError, match="max_length is 64, and GPT2LMHeadModel has 32 positions"):
        split_with_cache(GPT2LMHeadModel(GPT2Config(**GPT2)), rows=1, max_length=64, stages=2)


# Over gloo


def test_signatures_travel_once_for_the_prompts_and_once_for_a_token(pools):
    """Of four microbatches, whatever the number of tokens."""
    expected = tokens_of(2, 2, handlers.Reference(), max_new_tokens=7, eos_token_id=())
    for counts, found in pools(2).run(signatures_sent, 7):
        assert counts == [2 * 4, 0]
        assert all(torch.equal(tokens, expected) for tokens in found)


def test_an_output_that_grows_from_token_to_token_is_refused(pools):
    (first, text, one), (second, other, two) = pools(2).run(growing)
    assert (first, second) == ("StageError", "TransportError")
    assert "is float32[2, 2, 8], where equal inputs gave float32[2, 1, 8] before" in text
    assert "where equal inputs gave" in other
    assert torch.equal(one, two)


@pytest.mark.parametrize("victim", few([0, 1], [1]))
def test_a_rank_that_is_killed_is_named(victim, fresh_pool):
    outcomes = fresh_pool(2).outcomes(killed, victim)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    assert blamed(outcomes[1 - victim].value) == f"rank {victim}"


# Over gloo, a rank that fails


def test_ranks_with_other_prompts_are_refused(pools):
    for error, text, _ in pools(2).run(other_prompts):
        assert error == "StageError"
        assert "rank 0 and rank 1 were called with different settings: prompts is 7 of 5 tokens (digest " in text


@thorough
def test_ranks_with_other_ends_of_prompts_in_slices_are_refused(pools):
    for error, text, _ in pools(2).run(other_ends):
        assert error == "StageError"
        assert "rank 0 and rank 1 were called with different settings: prompts is 7 of 5 tokens (digest " in text


OTHER_ARGUMENTS = {
    "seeds": ([{"rng": (7, 1)}, {"rng": (7, 2)}], "rng= is (7, 1) on rank 0 and (7, 2) on rank 1"),
    "greedy and drawn": ([{}, {"rng": (0, 0)}], "rng= is none on rank 0 and (0, 0) on rank 1"),
    "temperatures": (
        [{"rng": (0, 0), "temperature": 0.5}, {"rng": (0, 0)}],
        "temperature= is 0.5 on rank 0 and 1.0 on rank 1",
    ),
    "top_k": ([{"rng": (0, 0), "top_k": 3}, {"rng": (0, 0)}], "top_k= is 3 on rank 0 and none on rank 1"),
    "top_p": (
        [{"rng": (0, 0), "top_p": 0.5}, {"rng": (0, 0), "top_p": 0.6}],
        "top_p= is 0.5 on rank 0 and 0.6 on rank 1",
    ),
    "ends": ([{}, {"eos_token_id": (4, 5)}], "eos_token_id= is (3,) on rank 0 and (4, 5) on rank 1"),
    "padding": ([{}, {"pad_token_id": 22}], "pad_token_id= is 0 on rank 0 and 22 on rank 1"),
    "numbers of tokens": ([{}, {"max_new_tokens": 8}], "max_new_tokens= is 6 on rank 0 and 8 on rank 1"),
}


@combined(which=OTHER_ARGUMENTS, slices=[1, 2])
def test_ranks_with_other_arguments_are_refused(which, slices, pools):
    arguments, message = OTHER_ARGUMENTS[which]
    same = {"max_new_tokens": 6, "tokens_per_program": 2, "prompt_slices": slices, "autodiff": "eager"}
    expected = tokens_of(2, 2, handlers.Reference(), **same)
    for error, text, after in pools(2).run(other_arguments, arguments, same):
        assert error == "StageError"
        assert "rank 0 and rank 1 were called with different settings" in text
        assert message in text
        assert torch.equal(after, expected)


def test_ranks_with_other_seeds_in_a_later_call_are_refused(pools):
    expected = tokens_of(2, 2, handlers.Reference(), (7, 1), max_new_tokens=4)
    for text, *found in pools(2).run(other_seeds_in_the_next_call):
        assert "different settings: rng= is (7, 2) on rank 0 and (7, 3) on rank 1" in text
        assert all(torch.equal(tokens, expected) for tokens in found)


def test_ranks_with_other_prompts_in_a_later_microbatch_are_refused(pools):
    for error, text, _ in pools(2).run(other_last_prompts):
        assert error == "StageError"
        assert "rank 0 and rank 1 were called with different settings: prompts is 7 of 5 tokens (digest " in text


def test_prompts_that_are_too_long_on_one_rank_are_every_ranks_error(pools):
    (first, other, one), (second, text, two) = pools(2).run(too_long_on_one)
    assert (first, second) == ("TransportError", "StageError")
    assert "need a cache of 29" in text
    assert "need a cache of 29" in other
    assert torch.equal(one, two)


@pytest.mark.parametrize("token", [0, 3])
def test_a_stage_that_fails_ends_the_call_on_every_rank(token, pools):
    (first, other, one), (second, text, two) = pools(2).run(failing, token)
    assert (first, second) == ("TransportError", "StageError")
    assert "stage 3, microbatch 1" in text
    assert "the head fails" in other
    assert torch.equal(one, two)
    assert torch.equal(one, tokens_of(2, 2, handlers.Reference(), max_new_tokens=6))
