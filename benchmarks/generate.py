"""Measure how many tokens a second a pipeline generates, beside one process, and beside `model.generate`.

    python -m benchmarks.generate
    python -m benchmarks.generate --width 128 512 --microbatches 2 --tokens 128

A GPT-2 of random weights, of the width of the published one, generates from 8 prompts. Its vocabulary is of so many
tokens that the head takes the time of a layer for one token, so that the ranks have as much to do. `tokens_per_s` is of
ranks over gloo, one thread each; `one_process` of a process that runs the same microbatches through the same stages, at
one thread; and `batch_generate` of `model.generate` with all prompts as one batch, at one thread. They take turns, and
`ratio` is the median over rounds of the first over the second, `batch_ratio` of the first over the third. `equal` is
whether all three give the same tokens. With as many microbatches as ranks, each rank waits for the one before it at
every token; with twice as many it does not, but passes of fewer prompts take longer for each.

`bound` is the ratio if no rank ever waited: the time that all pieces take in one process, while the other cores have
nothing to do, over that of the busiest rank, while all ranks compute. It is less than the number of ranks where cores
share a cache and the way to memory, or where stages differ. `busy` is the share of a call that each rank's pieces take,
and `host` what the host does between them, to post messages above all. All three are in processor time of the thread
that computes, which other programs disturb less. The rest of a call are waits: for messages, for the first prompts to
pass the ranks before, and for the last token.

With `--prompt-slices` the ranks run prompts in so many slices, one process whole ones.

`predicted_ms` is the time of a call by `simulate`, of the program that the ranks run, and `measured_ms` that of the
calls; `measured_over_predicted` is the median of the rounds' quotients. In each round all processes record the program
in one process, at the same time and each by itself, so that they share caches and memory as the ranks do; the times of
a prefill and of a decode of a stage are those of its rank, in processor time of the thread. The link is measured
(`benchmarks.predictions.ping`); a message has the hidden states of one token. The host's time for a piece is what a
call with short stages takes beyond such a prediction, over the pieces that run one after another.
`by_own_ms` is predicted with the times that the call's own pieces took, and the host's between them and at its ends, as
in `benchmarks.predictions`; `own_ratio` is the median of the rounds' quotients.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import truediv
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fpipe
from benchmarks import models, predictions
from benchmarks.recordings import Recorded, gathered
from fpipe import Batch, Cache, Costs, Link, Pipeline, Placement, Plan, Recording, Stage, handlers
from fpipe.interop.transformers import split_with_cache
from fpipe.profiling.observers import Several

PROMPTS, LENGTH = 8, 32
VOCABULARY = 9  # tokens for each of the model's width
WAYS = ("tokens_per_s", "one_process", "batch_generate")


class Setting(NamedTuple):
    """The width of the model, and the numbers of microbatches, of new tokens, and of slices of the prompts."""

    width: int
    microbatches: int
    tokens: int
    slices: int


@dataclass
class Rounds:
    """The calls of some rounds.

    Args:
        seconds: of each way's calls.
        alone: the seconds that the pieces of all stages took in one process.
        busy: those that the pieces of each rank took.
        host: those that the host took between these.
        predicted: the seconds that the ranks' calls are predicted to take.
        by_own: those that they are by the times of their own pieces.
        texts: the tokens of each way, in the last round.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WAYS})
    alone: list[float] = field(default_factory=list)
    busy: list[list[float]] = field(default_factory=list)
    host: list[list[float]] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    by_own: list[float] = field(default_factory=list)
    texts: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Generation:
    """Calls of a pipeline on some prompts.

    Args:
        call: recorded in seconds.
        plan: of its program.
        recording: in processor time.
    """

    call: Recorded
    plan: Plan
    recording: Recording

    @classmethod
    def of(
        cls, pipeline: Pipeline, params: Any, prompts: torch.Tensor, handler: Any, ranks: int, setting: Setting
    ) -> Generation:
        """Return the calls of ranks over gloo, or of one process that runs all stages."""
        placement = Placement([0] * ranks) if isinstance(handler, handlers.Local) else Placement.loop(ranks)
        plan, tokens, slices = pipeline.plan(placement, setting.microbatches), setting.tokens, setting.slices
        program = replace(plan, tokens=slices - 1 + tokens, prefills=slices)
        programs = fpipe.lower(fpipe.autoregressive, program)
        recordings = Recording(programs), Recording(programs, clock=time.thread_time)
        options: dict[str, Any] = {"max_new_tokens": tokens, "prompt_slices": slices, "observe": Several(recordings)}
        run = fpipe.generator(pipeline, plan, handler=handler, **options)
        own = pipeline.params_on(params, plan, handler)
        return cls(Recorded(lambda: run(own, prompts), recordings[0]), program, recordings[1])

    def times(self) -> Costs:
        """Call it in every process at once; return the times of each stage as its rank took them."""
        dist.barrier()
        self.call()
        own, stages = self.recording.measurement().costs(), self.plan.stages
        decodes = own.decode or [0.0] * stages  # one new token is the prefill's
        every = gathered((own.prefill, decodes))
        prefill, decode = ([each[stage] for stage, each in enumerate(kind)] for kind in zip(*every, strict=True))
        return Costs(prefill=prefill, decode=decode)

    def predicted(self, times: Costs, link: Link, host: float) -> float:
        """Return the seconds of a call.

        Args:
            host: seconds of the host for a piece.
        """
        prefill, decode = ([seconds + host for seconds in each] for each in (times.prefill, times.decode))
        costs = replace(times, prefill=prefill, decode=decode, communication=link)
        return fpipe.simulate(fpipe.autoregressive, self.plan, costs).makespan

    def by_own(self, link: Link) -> predictions.Prediction:
        """Return the prediction of a call by the times of its own pieces, without the host's."""
        return predictions.Prediction(self.call.programs, Costs(communication=link))


class Short:
    """A generation of stages that compute for a short time, which shows the host's time for a piece."""

    def __init__(self, prompts: torch.Tensor, ranks: int, setting: Setting, link: Link) -> None:
        first = Stage(lambda p, ids: predictions.busy(p, ids[..., None] * p[: predictions.SIZE]), [Batch("input_ids")])
        stages = [first, *[predictions.busy] * (ranks - 2), lambda p, x: predictions.busy(p, x[:, -1])]
        cache = Cache(PROMPTS // setting.microbatches, LENGTH + setting.tokens, state={})
        params = {stage: torch.ones(predictions.SIDE) for stage in range(ranks)}
        arguments = Pipeline(stages, cache=cache), params, prompts
        by_ranks, self.link = Generation.of(*arguments, handlers.Distributed(), ranks, setting), link
        self.by_ranks, self.alone = by_ranks, Generation.of(*arguments, handlers.Local(), ranks, setting)
        self.pieces = fpipe.simulate(fpipe.autoregressive, by_ranks.plan, Costs(forward=1)).makespan
        self.by_ranks.call()
        self.alone.call()

    def measure(self) -> predictions.HostTimes:
        """Return the host's times, as on rank 0."""
        predicted = self.by_ranks.predicted(self.alone.times(), self.link, 0.0)
        took, *others = predictions.outside(self.by_ranks.call, self.by_ranks.by_own(self.link))
        return predictions.as_on_first((took - predicted) / self.pieces, *others)


def job(rank: int, ranks: int, settings: Sequence[Setting], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Run one process: yield the row of each setting, as measured on rank 0."""
    for setting in settings:
        model, pipeline, params = language_model(ranks, setting)
        calls = run(model, pipeline, params, ranks, setting, rounds)
        yield [row(ranks, setting, calls)] if rank == 0 else []


def language_model(ranks: int, setting: Setting) -> tuple[Any, Pipeline, Any]:
    """Return a model, with its pipeline and params: five layers on each rank, of which the head is one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    width, length = setting.width, LENGTH + setting.tokens
    numbers = {"vocab_size": VOCABULARY * width, "n_positions": length, "n_embd": width, "n_layer": layers(ranks)}
    model = GPT2LMHeadModel(GPT2Config(**numbers, n_head=width // 64, eos_token_id=None, bos_token_id=None)).eval()
    cuts = [f"transformer.h.{5 * each}" for each in range(1, ranks)]
    return model, *split_with_cache(model, rows=PROMPTS // setting.microbatches, max_length=length, at=cuts)


def layers(ranks: int) -> int:
    return 5 * ranks - 1


def run(model: Any, pipeline: Pipeline, params: Any, ranks: int, setting: Setting, rounds: int) -> Rounds:
    """Generate in all ways in turn; the first round traces, and does not count. Only rank 0 runs all of them."""
    prompts = torch.randint(VOCABULARY * setting.width, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": setting.tokens}

    def generation(handler: Any, setting: Setting = setting) -> Generation:
        return Generation.of(pipeline, params, prompts, handler, ranks, setting)

    by_ranks, alone = generation(handlers.Distributed()), generation(handlers.Local(), setting._replace(slices=1))
    profiled = alone if setting.slices == 1 else generation(handlers.Local())
    hidden = torch.ones(PROMPTS // setting.microbatches, 1, setting.width)
    link = predictions.ping(dist.get_rank())
    link = Link(link.latency + hidden.nbytes / link.bandwidth)
    short = Short(prompts, ranks, setting, link)
    ways = [by_ranks.call, alone.call, lambda: model.generate(prompts, **batch, do_sample=False, pad_token_id=0)]
    calls = Rounds()
    for at in range(rounds + 1):
        results, times, host = [], profiled.times(), short.measure()
        for way in ways:
            dist.barrier()
            if way is by_ranks.call or dist.get_rank() == 0:
                results.append(timed(way))
        own = by_ranks.call.times()
        accounts = gathered(by_ranks.recording.measurement().account(dist.get_rank()))
        if at and dist.get_rank() == 0:
            calls.texts = [tokens for tokens, _ in results]
            for each, (_, seconds) in zip(calls.seconds.values(), results, strict=True):
                each.append(seconds)
            calls.alone.append(alone.recording.measurement().account(0).compute)
            calls.predicted.append(by_ranks.predicted(times, link, host.piece))
            calls.by_own.append(by_ranks.by_own(link)._replace(host=host).seconds(own))
            calls.busy.append([account.compute for account in accounts])
            calls.host.append([sum(account.between) for account in accounts])
    return calls


def timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Return the tokens of a call, and its seconds."""
    start = time.perf_counter()
    tokens = call()
    return tokens, time.perf_counter() - start


def row(ranks: int, setting: Setting, calls: Rounds) -> dict[str, Any]:
    """Return the row of some rounds."""
    tokens, seconds = PROMPTS * setting.tokens, calls.seconds
    whole = seconds["tokens_per_s"]

    def over(name: str) -> float:
        return statistics.median(b / a for a, b in zip(whole, seconds[name], strict=True))

    def shares(of_ranks: Sequence[Sequence[float]]) -> list[float]:
        each = [[part / call for part in parts] for parts, call in zip(of_ranks, whole, strict=True)]
        return [statistics.median(rank) for rank in zip(*each, strict=True)]

    first, *others = calls.texts
    return {
        "model": f"gpt2, {layers(ranks)} layers of width {setting.width}",
        "prompts": PROMPTS,
        "microbatches": setting.microbatches,
        "tokens": setting.tokens,
        "prompt_slices": setting.slices,
        "ranks": ranks,
        **{name: tokens / statistics.median(each) for name, each in seconds.items()},
        "ratio": over("one_process"),
        "predicted_ms": 1e3 * statistics.median(calls.predicted),
        "measured_ms": 1e3 * statistics.median(whole),
        "measured_over_predicted": statistics.median(map(truediv, whole, calls.predicted)),
        "by_own_ms": 1e3 * statistics.median(calls.by_own),
        "own_ratio": statistics.median(map(truediv, whole, calls.by_own)),
        "bound": statistics.median(one / max(each) for one, each in zip(calls.alone, calls.busy, strict=True)),
        "busy": shares(calls.busy),
        "host": shares(calls.host),
        "batch_ratio": over("batch_generate"),
        "equal": all(torch.equal(first, other) for other in others),
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    for each in rows:
        print(
            f"{each['model']}, {each['prompts']} prompts in {each['microbatches']} microbatches"
            f"{' and {prompt_slices} slices'.format(**each) if each['prompt_slices'] > 1 else ''}, {each['tokens']} "
            f"new tokens, {each['ranks']} ranks: {each['tokens_per_s']:.0f} tokens/s, in {each['measured_ms']:.0f} ms "
            f"({each['predicted_ms']:.0f} predicted, ratio {each['measured_over_predicted']:.2f}; by own pieces "
            f"{each['by_own_ms']:.0f}, ratio {each['own_ratio']:.2f}), one process "
            f"{each['one_process']:.0f} (ratio {each['ratio']:.2f}, bound {each['bound']:.2f}; pieces take "
            f"{', '.join(f'{share:.0%}' for share in each['busy'])} of each rank's time, and the host between them "
            f"{', '.join(f'{share:.0%}' for share in each['host'])}), model.generate of the batch "
            f"{each['batch_generate']:.0f} (ratio {each['batch_ratio']:.2f}); the tokens are "
            f"{'the same' if each['equal'] else 'different'}",
            flush=True,
        )


def main() -> None:
    parser = models.parser(__doc__, rounds=5, limit=900)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, nargs="+", choices=(64, 128, 256, 512, 768), default=[768])
    parser.add_argument("--microbatches", type=int, nargs="+", choices=(1, 2, 4, 8), default=[2, 4])
    parser.add_argument("--tokens", type=models.positive, nargs="+", default=[64])
    parser.add_argument("--prompt-slices", type=models.positive, nargs="+", default=[1])
    models.add_out(parser)
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("ranks are compared with one process: give --ranks at least 2")
    numbers = options.width, options.microbatches, options.tokens, options.prompt_slices
    settings = list(itertools.starmap(Setting, itertools.product(*numbers)))
    parts = models.in_processes(job, options.ranks, settings, options.rounds, limit=options.limit)
    rows = models.report("generate", options.json, parts, show)
    if options.out:
        models.write(options.out, rows)


if __name__ == "__main__":
    main()
