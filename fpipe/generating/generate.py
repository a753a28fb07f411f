"""Generate tokens: programs of some tokens for all prompts, one after the other, until all texts have ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe._format import counted, extent, format_bytes
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.autodiff.options import Autodiff, Options
from fpipe.devices import device_of
from fpipe.errors import ScheduleError, StageError
from fpipe.errors.arguments import checked, is_whole
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.generating.choice import Choice, with_choice
from fpipe.generating.prompts import Prompts
from fpipe.handlers.protocol import Handler, Inputs, Observer, Outcome, Run
from fpipe.plan import Plan, check_plan
from fpipe.policies import everything_saveable
from fpipe.profiling.observers import observing
from fpipe.programs.generation import autoregressive
from fpipe.programs.lowering import lower
from fpipe.programs.program import Programs
from fpipe.programs.verifier import check
from fpipe.stages.cache import Cache
from fpipe.stages.microbatch import Microbatch, merge
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import flatten
from fpipe.stages.rng import Rng, as_rng

BETWEEN_LOOKS = 16
"""Tokens of a program where texts may end, before the ranks look whether all have."""


@fold_tracebacks
@checked("pipeline", "plan")
def generate(
    pipeline: Pipeline,
    params: Mapping[int, Any],
    prompts: Any,
    plan: Plan,
    *,
    handler: Handler,
    max_new_tokens: int,
    rng: Any = None,
    **options: Any,
) -> Tensor:
    """Return prompts with the tokens that a pipeline generates after them.

    It is `generator(pipeline, plan, handler=..., max_new_tokens=..., **options)(params, prompts, rng=rng)`. Keep a
    generator to generate again: it has traced its stages and connected the ranks.

    >>> import torch
    >>> from fpipe import Batch, Cache, Pipeline, Placement, Stage, handlers
    >>> last = Stage(lambda p, x: torch.nn.functional.one_hot(x[:, -1] + 1, 9).float())
    >>> stages = [Stage(lambda p, x: x, [Batch("input_ids")]), last]
    >>> count = Pipeline(stages, cache=Cache(rows=2, max_length=8, state={}))
    >>> plan = count.plan(Placement.loop(ranks=2), microbatches=1)
    >>> generate(count, {0: {}, 1: {}}, [[1, 2], [4, 5]], plan, handler=handlers.Local(), max_new_tokens=3)
    tensor([[1, 2, 3, 4, 5],
            [4, 5, 6, 7, 8]])
    """
    return generator(pipeline, plan, handler=handler, max_new_tokens=max_new_tokens, **options)(
        params, prompts, rng=rng
    )


@fold_tracebacks
@checked("pipeline", "plan", "prefetch", "autodiff")
def generator(
    pipeline: Pipeline,
    plan: Plan,
    *,
    handler: Handler,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    prompt_slices: int = 1,
    tokens_per_program: int | None = None,
    prefetch: int | None = None,
    observe: Observer | None = None,
    autodiff: Autodiff = "auto",
) -> Generator:
    """Return a function that generates tokens, as `model.generate` of `transformers` does.

    A microbatch is some prompts, with a cache of its own on each stage, and has one token on its way at a time: with
    at least as many microbatches as stages, all ranks are at work. Each stage is traced twice, for prompts of one
    length and for one token.

    Args:
        pipeline: with a `Cache`, as of `interop.transformers.split_with_cache`.
        plan: of the pipeline, without replicas or copies. Its microbatches hold at least as many prompts as are passed,
            `plan.microbatches * pipeline.cache.rows`.
        handler: `Reference()`, `Local()` or `Distributed(group)`.
        max_new_tokens: after which generating ends.
        eos_token_id: tokens that end a text, by default the cache's. When all texts have ended, generating does.
        pad_token_id: what follows an ended text, and pads prompts on the left; by default the cache's.
        temperature, top_k, top_p: for tokens that are drawn: divide the logits, draw from so many of the likeliest
            tokens, and from the likeliest tokens with so much probability.
        prompt_slices: prompts go through the stages in so many slices, one after the other, so that a rank begins
            when the first slice has passed the ranks before it: for long prompts in few microbatches.
        tokens_per_program: after so many tokens the ranks look whether all texts have ended. By default 16, and where
            no token ends texts all of them.
        observe: an observer of every effect, where all tokens are of one program.
        prefetch, autodiff: as of `value_and_grad`.

    Returns:
        `run(params, prompts, *, rng=None) -> tokens`, int64 `[prompts, length + new tokens]`, on every rank. `params`
        is `{stage: tree}` of the stages that this process holds. `prompts` are the same on every rank: a mapping with
        `input_ids` and maybe `attention_mask`, a tensor `[prompts, length]`, padded on the left; or lists of tokens,
        which are padded here. With `rng`, (seed, step), tokens are drawn, the same ones on every plan and handler;
        without, the likeliest ones are chosen.

    Raises:
        ValueError: (at once) options that are out of range or don't go together; the pipeline has no cache.
        ScheduleError: (at once) the plan has replicas or copies, or is not this pipeline's or this handler's.
        TypeError: (at once) the pipeline or the handler is none.
        StageError: (in a call) the prompts can't be generated from, the caches do not fit into memory, or a stage
            failed.
        TransportError: (in a call) another rank failed.
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"the first argument is a Pipeline with a cache, not {pipeline!r}")
    check_plan(plan)
    if pipeline.cache is None:
        raise ValueError(
            "the pipeline has no cache, in which stages keep the tokens before: split a causal language model by "
            "interop.transformers.split_with_cache(model, rows=, max_length=, at=), or pass Pipeline(..., cache=)"
        )
    _check_plan(pipeline, plan)
    if not all(is_whole(n, least=1) for n in (max_new_tokens, tokens_per_program) if n is not None):
        raise ValueError(
            "max_new_tokens and tokens_per_program are whole numbers of at least 1, not "
            f"{max_new_tokens!r} and {tokens_per_program!r}"
        )
    if not is_whole(prompt_slices, least=1):
        raise ValueError(f"prompt_slices must be a whole number of at least 1, not {prompt_slices!r}")
    eos = pipeline.cache.eos if eos_token_id is None else _tuple(eos_token_id)
    pad = pipeline.cache.pad if pad_token_id is None else pad_token_id
    choice = Choice(eos, pad, temperature, top_k, top_p, rng=(0, 0))
    each = tokens_per_program or (BETWEEN_LOOKS if eos else max_new_tokens)
    sizes = [min(each, max_new_tokens - done) for done in range(0, max_new_tokens, each)]
    if observe is not None and len(sizes) > 1:
        raise ValueError(
            f"observe= is for one program, and {max_new_tokens} tokens are {len(sizes)} of {each} or less: pass "
            "tokens_per_program=max_new_tokens"
        )
    made = with_choice(pipeline)
    options = Options(autodiff, everything_saveable, donated=True)
    pieces = DifferentiablePipeline(made, options.pieces(made, loss=False), False, True, _merged, cached=True)
    observer = observing(observe)
    runs: dict[tuple[bool, int], Run] = {}
    for at, size in enumerate(sizes):
        if (kind := (at == 0, size)) not in runs:
            programs = _programs(plan, size, 0 if at else prompt_slices, prefetch)
            if observer is not None:
                observer.on_compile("generate", programs, handler)
            runs[kind] = handler.compile(programs, pieces, observer)
    return Generator(pipeline, pipeline.cache, plan, handler, choice, prompt_slices, sizes, runs, observer)


def _programs(plan: Plan, tokens: int, slices: int, prefetch: int | None) -> Programs:
    """Return the programs that generate so many tokens, after so many slices of the prompts."""
    prefills = max(1, slices)
    plan = replace(plan, tokens=tokens + prefills - 1, prefills=prefills)
    programs = lower(partial(autoregressive, prompts=slices > 0), plan, depth=prefetch)
    check(programs)
    return programs


def _merged(outputs: Mapping[int, Any], apart: bool | None) -> Any:
    """Return the tokens of all microbatches, `[prompts, tokens]`."""
    return torch.stack(merge([tokens for _, tokens in sorted(outputs.items())]), dim=1)


def _check_plan(pipeline: Pipeline, plan: Plan) -> None:
    if plan.edges != pipeline.edges:
        raise ScheduleError(
            "the plan's edges are not the pipeline's: make it by pipeline.plan(placement, microbatches)"
        )
    if plan.replicas > 1:
        raise ScheduleError(
            f"the plan has {plan.replicas} replicas, and each would generate by itself: make a plan without replicas, "
            "and on each a handler of its ranks alone, with its own prompts"
        )
    if carrying := [s for s, stage in enumerate(pipeline.stages) if stage.carry]:
        raise ValueError(
            f"stage {carrying[0]} carries values from slice to slice, which stages that generate don't: keep what it "
            "needs of earlier tokens in its cache"
        )
    if plan.slices > 1:
        raise ScheduleError(
            f"the plan cuts microbatches into {plan.slices} slices, and tokens are not cut: make a plan without "
            f"slices; prompt_slices={plan.slices} cuts the prompts"
        )
    for stage, ranks in enumerate(plan.placement.holders):
        if len(ranks) > 1:
            raise ScheduleError(
                f"stage {stage} has copies on ranks {ranks}, and a cache is on one rank: place each stage on one rank"
            )


def _tuple(tokens: int | Sequence[int]) -> tuple[int, ...]:
    return (tokens,) if isinstance(tokens, int) else tuple(tokens)


@dataclass(frozen=True, repr=False)
class Generator:
    """A function of params and prompts that generates tokens.

    Args:
        prompt_slices: into which prompts are cut.
        sizes: the tokens of each program, as long as not all texts have ended.
        runs: the programs, by whether they begin with the prompts, and their tokens.
    """

    pipeline: Pipeline
    cache: Cache
    plan: Plan
    handler: Handler
    choice: Choice
    prompt_slices: int
    sizes: Sequence[int]
    runs: Mapping[tuple[bool, int], Run]
    observer: Observer | None

    def __repr__(self) -> str:
        return f"<Generator: {counted(sum(self.sizes), 'token')}, {extent(self.plan)}, {self.handler}>"

    @fold_tracebacks
    @torch.no_grad()
    def __call__(self, params: Mapping[int, Any], prompts: Any, *, rng: Rng | None = None) -> Tensor:
        """Generate tokens; as `generator` says."""
        try:
            call = _Call.of(self, params, prompts, rng)
        except Exception as error:  # the prompts are the user's, and may raise anything
            known = params if isinstance(params, Mapping) else {}
            self.runs[True, self.sizes[0]](Inputs(known, (), (), broken=_stage_error(error)))
            raise
        tokens = call.prompts.tokens
        for at, size in enumerate(self.sizes):
            if self.observer is not None:
                self.observer.on_step_begin()
            results = self.runs[at == 0, size](call.inputs(tokens, size))
            if self.observer is not None:
                self.observer.on_step_end(Outcome(None, None, {}))
            (call.state,) = results.state
            tokens = torch.cat([tokens, results.output.to(tokens.device)], dim=1)
            if (length := call.ended(tokens)) is not None:
                return tokens[: call.count, :length]
        return tokens[: call.count]


@dataclass
class _Call:
    """One call of a generator.

    Args:
        prompts: of all microbatches.
        count: of the prompts that were passed.
        slices: into which the prompts are cut.
        noise: [token, prompt].
        settings: the arguments that are the same on every rank, by name.
        state: the caches, `{stage: [tree by microbatch]}`.
    """

    cache: Cache
    choice: Choice
    params: Mapping[int, Any]
    prompts: Prompts
    count: int
    slices: int
    noise: Tensor
    settings: Mapping[str, object]
    state: Mapping[int, Any]

    @classmethod
    def of(cls, made: Generator, params: Mapping[int, Any], given: Any, rng: Rng | None) -> _Call:
        """Check the arguments, and make the caches.

        Raises:
            ValueError: they can't be generated from.
            StageError: the caches do not fit into memory.
        """
        cache, plan, choice = made.cache, made.plan, replace(made.choice, rng=None if rng is None else as_rng(rng))
        if not isinstance(params, Mapping):
            raise TypeError(f"params must be {{stage: tree}}, not a {type(params).__name__}")
        prompts, places = Prompts.of(given, choice.pad, choice.eos), plan.microbatches * cache.rows
        if prompts.count > places:
            raise ValueError(
                f"there are {prompts.count} prompts, and {plan.microbatches} microbatches of {cache.rows} hold {places}"
                f": make a plan of {-(-prompts.count // cache.rows)} microbatches, or a cache with more rows"
            )
        length, new = prompts.length, sum(made.sizes)
        if length < made.prompt_slices:
            raise ValueError(
                f"prompts of {counted(length, 'token')} can't be cut into {made.prompt_slices} slices: pass a smaller "
                "prompt_slices"
            )
        if length + new - 1 > cache.max_length:
            raise ValueError(
                f"prompts of {counted(length, 'token')}, padding included, with {new} new ones need a cache of "
                f"{length + new - 1}, and max_length is {cache.max_length}: split the model with a larger max_length, "
                "or shorten the prompts or max_new_tokens"
            )
        leaves = (x for x in flatten(dict(params)).leaves if isinstance(x, Tensor))
        device = next((x.device for x in leaves), prompts.tokens.device)
        whole = Prompts(prompts.tokens.to(device), prompts.mask.to(device)).filled(places)
        noise = torch.zeros(new, places, device=device)
        noise[:, : prompts.count] = choice.noise(new, prompts.count)
        alike = {"prompts": prompts.text(), "Cache.rows": cache.rows, "max_new_tokens=": new, **choice.settings()}
        state = dict(_caches(made, prompts.count, device))
        return cls(cache, choice, params, whole, prompts.count, made.prompt_slices, noise, alike, state)

    def inputs(self, tokens: Tensor, count: int) -> Inputs:
        """Return the inputs of the program that generates `count` tokens after those before."""
        length, done = self.prompts.length, tokens.shape[1] - self.prompts.length
        later = [self._given(length + token - 1, 1, token) for token in range(max(1, done), done + count)]
        if done:
            first, *later = later
            first = self._with("input_ids", tokens[:, -1:], first)
        else:
            first, *slices = self._slices()
            later = [*slices, *later]
        return Inputs(self.params, [self.state], first, apart=True, later=later, settings=self.settings)

    def _slices(self) -> Iterator[list[Microbatch]]:
        """Yield what stages read of each slice of the prompts, by microbatch."""
        prompts, start = self.prompts, 0
        for number, tokens in enumerate(prompts.tokens.tensor_split(self.slices, dim=1)):
            is_last, length = number + 1 == self.slices, tokens.shape[1]
            data = self._with("input_ids", tokens, self._given(start, length, 0 if is_last else None))
            # Signatures are of the first slice's data; the sizes of later slices depend on the length of all of them.
            yield data if number or is_last else self._with("prompts", prompts.tokens, data)
            start += length

    def _with(self, name: str, tokens: Tensor, data: Sequence[Microbatch]) -> list[Microbatch]:
        """Return microbatches with their rows of some tokens."""
        rows = torch.split(tokens, self.cache.rows)
        return [m._replace(batch={**m.batch, name: x.contiguous()}) for m, x in zip(data, rows, strict=True)]

    def _given(self, start: int, count: int, token: int | None) -> list[Microbatch]:
        """Return what stages read of some tokens from a place in the cache on, by microbatch, but for the tokens.

        Args:
            token: the number of the one that is chosen after them; None where none is.
        """
        batches = self.prompts.given(self.cache, start, count)
        if token is None:
            return [Microbatch(batch, {}) for batch in batches]
        noises = torch.split(self.noise[token], self.cache.rows)
        targets = (self.choice.target(noise, self.noise.device) for noise in noises)
        return list(map(Microbatch, batches, targets))

    def ended(self, tokens: Tensor) -> int | None:
        """Return the length at which the last text has ended; None if one goes on."""
        if not self.choice.eos:
            return None
        eos = torch.tensor(self.choice.eos, device=tokens.device)
        new = tokens[: self.count, self.prompts.length :]
        ends = torch.isin(new, eos)
        if not ends.any(-1).all():
            return None
        return self.prompts.length + 1 + int(ends.int().argmax(-1).max())


def _caches(made: Generator, count: int, device: torch.device) -> Iterator[tuple[int, Any]]:
    """Yield the stages of this process with empty caches.

    Args:
        count: prompts; microbatches may have places for more.
    """
    plan, cache, pipeline = made.plan, made.cache, made.pipeline
    stages = sorted({stage for rank in made.handler.ranks(plan) for stage in plan.stages_on(rank)})
    sizes = [size for size in map(cache.bytes, stages) if size]
    needed = plan.microbatches * sum(sizes)
    free = device_of(device).available_bytes()
    if free is not None and needed > free:
        raise StageError(
            f"the caches of {counted(len(sizes), 'stage')} for {counted(plan.microbatches, 'microbatch', 'es')} of "
            f"{counted(cache.rows, 'prompt')} take {format_bytes(needed)}, and {device} has {format_bytes(free)}: take "
            "fewer prompts, a smaller max_length, or more ranks"
        )
    rows = torch.split(torch.arange(plan.microbatches * cache.rows, device=device), cache.rows)
    for stage in stages:
        each: list[Any] = [cache.empty(stage, device) if stage in cache.state else {} for _ in rows]
        if stage == plan.stages - 1:
            each = [(own, numbers >= count) for own, numbers in zip(each, rows, strict=True)]
        if pipeline.stages[stage].stateful or stage == plan.stages - 1:
            yield stage, each


def _stage_error(error: Exception) -> StageError:
    if isinstance(error, StageError):
        return error
    result = StageError(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
    result.__cause__ = error
    return result
