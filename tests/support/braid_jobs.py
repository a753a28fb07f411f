"""Stages whose collectives are logged, for the processes of a pool."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn

import fpipe
from fpipe import Batch, Pipeline, Placement, Stage, handlers, parallel, policies
from fpipe.autodiff.traced import Traced
from fpipe.effects import Backward, BackwardInput, BackwardWeight, Forward, Overlap
from fpipe.handlers.calls import FUNCTIONS
from fpipe.handlers.protocol import Observer
from fpipe.stages.microbatch import Microbatch
from tests.support.cases import SCHEDULES, mse, overlapping
from tests.support.groups import OverGloo, group_of
from tests.support.jobs import differences
from tests.support.shards import mesh_of, values

WIDTH, MICROBATCHES = 4, 6
LOG: list[str] = []
NUMBERS: dict[str, int] = {}
"""What ran in this process: `p0` posts collective 0, `w0` waits for it; overlaps stand in brackets."""


class Work(dist._Work):
    def __init__(self, work, target, result, number):
        super().__init__()
        self.work, self.target, self.result, self.number = work, target, result, number

    def wait(self, *limit):
        LOG.append(f"w{self.number}")
        self.work.wait()
        self.target.copy_(self.result)
        return True


class Logged(OverGloo):
    """Sums over gloo. What is read before the wait is no sum."""

    def allreduce(self, tensors, options):
        number = NUMBERS["posted"] = NUMBERS.get("posted", -1) + 1
        LOG.append(f"p{number}")
        result = [tensors[0].clone()]
        return Work(self.gloo.allreduce(result, options), tensors[0], result[0], number)


def logged():
    return group_of(Logged, "logged")


class Brackets(Observer):
    def begin(self, rank, effect):
        LOG.extend("(" * isinstance(effect, Overlap))

    def end(self, rank, effect):
        LOG.extend(")" * isinstance(effect, Overlap))


@torch.library.custom_op("braid::refused", mutates_args=())
def refused(x: torch.Tensor, part: str) -> torch.Tensor:
    """A copy, but where a part is to fail."""
    if part in NUMBERS:
        raise ArithmeticError(f"{part} is refused")
    return x.clone()


@refused.register_fake
def _(x, part):
    return torch.empty_like(x)


refused.register_autograd(lambda ctx, gradient: (refused(gradient, "the backward"), None))


def affine(p, x):
    return torch.tanh(x @ p["a"]) @ p["b"]


def plain(group, p, x):
    """Two sums, of which nothing stands beside the first, and half of the layer beside the second."""
    y = refused(parallel.all_reduce(affine(p, x), group), "the forward")
    return parallel.all_reduce(affine(p, y), group) + affine(p, x)


def dropout(group, p, x):
    y = nn.functional.dropout(parallel.all_reduce(affine(p, x), group), 0.3)
    return nn.functional.dropout(parallel.all_reduce(affine(p, y), group), 0.3)


def exchange(group, p, x):
    """As experts do: rows go to another process and come back."""
    rows = parallel.all_to_all(torch.tanh(x @ p["a"]), dist.group.WORLD)
    return x + parallel.all_to_all(rows @ p["b"], dist.group.WORLD)


def both(group, p, x):
    """Two sums of which neither depends on the other."""
    return parallel.all_reduce(x @ p["a"], group) * parallel.all_reduce(x @ p["b"], group)


def chained(group, p, x):
    """Two sums of the shapes of `both`, of which the second one depends on the first."""
    return parallel.all_reduce(parallel.all_reduce(x @ p["a"], group) @ p["b"], group)


def one_sum(group, p, x):
    return parallel.all_reduce(affine(p, x), group)


def no_sum(group, p, x):
    return affine(p, x)


def counting(group, p, state, x):
    y = parallel.all_reduce(affine(p, x), group)
    return y * (1 + state), state + 0.01 * y.detach().mean()


FUNCTIONS_OF = {
    "plain": (plain,),
    "dropout": (dropout,),
    "exchange": (exchange,),
    "unequal": (plain, both, no_sum),
    "stateful": (counting,),
    "loss": (one_sum,),
}
POLICIES = {"everything": policies.everything_saveable, "nothing": policies.nothing_saveable}


def halves(rank, plan):
    """As `overlapping`, with each backward in its halves."""
    for effect in overlapping(rank, plan):
        match effect:
            case Overlap(forward, Backward(s, m)):
                yield Overlap(forward, BackwardInput(s, m))
                yield BackwardWeight(s, m)
            case Backward(s, m):
                yield from (BackwardInput(s, m), BackwardWeight(s, m))
            case _:
                yield effect


def deferred(rank, plan):
    """As `halves`, with each weight gradient under the forward after the next."""
    waiting = None
    for effect in halves(rank, plan):
        match effect:
            case BackwardWeight() if waiting is None:
                waiting = effect
            case Overlap(forward, half) if waiting is not None:
                yield Overlap(forward, waiting)
                yield half
                waiting = None
            case _:
                if waiting is not None and not isinstance(effect, Forward):
                    yield waiting
                    waiting = None
                yield effect
    if waiting is not None:
        yield waiting


ORDERS = SCHEDULES | {"halves": (halves, Placement.loop), "deferred": (deferred, Placement.loop)}
UNBRAIDED = {Forward: lambda calls, e: FUNCTIONS[Forward](calls, e)}


def pieces_of(kind, schedule, group, ranks=2):
    """(pipeline, schedule, plan, params, batch, target, more arguments)."""
    generator, place = ORDERS[schedule]
    placement, functions = place(ranks), FUNCTIONS_OF[kind]
    stages = [
        Stage(functools.partial(functions[s % len(functions)], group), stateful=kind == "stateful")
        for s in range(placement.stages)
    ]
    loss = mse
    if kind == "loss":
        loss = lambda y, t: parallel.all_reduce((y - t).square().mean(), group)  # noqa: E731
    pipeline = Pipeline(stages, loss)
    params = {
        s: {"a": values(WIDTH, WIDTH, seed=s), "b": values(WIDTH, WIDTH, seed=s + 50)} for s in range(len(stages))
    }
    batch, target = values(2 * MICROBATCHES, WIDTH, seed=90), values(2 * MICROBATCHES, WIDTH, seed=91)
    more = {"state": {s: torch.zeros(()) for s in params}} if kind == "stateful" else {}
    more |= {"rng": (0, 1)} if kind == "dropout" else {}
    return pipeline, generator, pipeline.plan(placement, MICROBATCHES), params, batch, target, more


def bits_of_a_braid(rank, kind, schedule, policy):
    """Where a step differs from the reference, and from one without turns; and the logs of all three."""
    pipeline, generator, plan, params, batch, target, more = pieces_of(kind, schedule, logged())
    options = {"autodiff": "graph", "policy": POLICIES[policy]}

    def run(handler, **options):
        LOG.clear()
        NUMBERS.clear()
        step = fpipe.value_and_grad(pipeline, generator, plan, handler=handler, **options)
        return step(params, batch, target, **more), " ".join(LOG)

    braided, log = run(handlers.Local(), observe=Brackets(), **options)
    unbraided, apart = run(handlers.Local(functions=UNBRAIDED), observe=Brackets(), **options)
    reference, eager = run(handlers.Reference())
    return differences(braided, unbraided), differences(braided, reference), log, apart, eager


def bits_of_a_grid(rank, schedule):
    """The same, of two ranks of a pipeline times two processes that share each stage."""
    mesh = mesh_of(2, 2, names=("pp", "tp"))
    pipeline, generator, plan, params, batch, target, _ = pieces_of("plain", schedule, mesh["tp"])
    handler = handlers.Distributed(mesh["pp"], timeout=30)
    held = pipeline.params_on(params, plan, handler.rank)
    step = fpipe.value_and_grad(pipeline, generator, plan, handler=handler, autodiff="graph")
    found = [step(held, batch, target) for _ in range(2)]
    loss, grads = fpipe.value_and_grad(pipeline, generator, plan, handler=handlers.Reference())(params, batch, target)
    handler.check()
    return [differences(each, (loss, {s: grads[s] for s in held})) for each in found]


def failure_of(rank, part):
    """The error of a step in which a part of an overlap fails, in all processes alike."""
    pipeline, generator, plan, params, batch, target, _ = pieces_of("plain", "overlap", logged(), ranks=1)

    class Failing(Observer):
        def begin(self, rank, effect):
            NUMBERS.update({part: 1} if isinstance(effect, Overlap) else {})

    step = fpipe.value_and_grad(
        pipeline, generator, plan, handler=handlers.Local(), autodiff="graph", observe=Failing()
    )
    try:
        step(params, batch, target)
    except fpipe.StageError as error:
        return str(error)
    finally:
        NUMBERS.clear()


def different(rank, which):
    """The error of a step whose order of collectives is another one in the second process."""
    function, functions, schedule = chained, {}, "dualpipe_v"
    if which == "dependence" and rank:
        function = both
    if which == "functions" and rank:
        functions = UNBRAIDED
    if which == "schedule":
        schedule = "one_f_one_b" if rank else "gpipe"
    generator, place = ORDERS[schedule]
    placement = place(1)
    pipeline = Pipeline([functools.partial(function, logged())] * placement.stages, mse)
    params = {s: {"a": values(WIDTH, WIDTH), "b": values(WIDTH, WIDTH)} for s in range(placement.stages)}
    plan = pipeline.plan(placement, MICROBATCHES)
    step = fpipe.value_and_grad(
        pipeline, generator, plan, handler=handlers.Local(functions=functions), autodiff="graph"
    )
    x = torch.ones(MICROBATCHES, WIDTH)
    try:
        step(params, x, x)
    except fpipe.StageError as error:
        return str(error)


def texts(rank, function):
    """The text of a forward and of a backward: as functions, and in steps."""
    traced = Traced(Stage(functools.partial(function, logged()), reads=(Batch(),)), fallback=False)
    prepared = traced.prepare({"a": values(WIDTH, WIDTH), "b": values(WIDTH, WIDTH)})
    _, saved, _ = traced.forward(prepared, None, {}, Microbatch(values(2, WIDTH), None), True)
    functions = saved.functions.run, saved.functions.first.fused
    return [(function.source, function.steps.source) for function in functions]
