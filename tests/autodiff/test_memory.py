"""What lives: after a step its results, and while a backward runs ever less."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from functools import cache
from math import inf
from typing import NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe import Pipeline, Placement, Stage, StageError, handlers, schedules
from fpipe.autodiff.eager import Eager
from fpipe.autodiff.functions import DeferredGraph as Deferring
from fpipe.autodiff.functions import SavedGraph as Keeping
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.autodiff.options import Options
from fpipe.autodiff.traced import Traced
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pipeline import with_loss
from fpipe.stages.pytree import flatten
from tests.support import cases
from tests.support.combinations import combined, few, one_in
from tests.support.policies import POLICIES

WAYS = {"eager": Options("eager")} | {
    name: Options("graph", POLICIES[name]) for name in ("everything", "nothing", "cheap")
}
MICROBATCHES = 4

each_way = pytest.mark.parametrize("way", few(WAYS, ["eager", "nothing"]))


def storages(*trees):
    """Each memory that the tensors of some trees have; fakes have none."""
    leaves = optree.tree_leaves(trees, namespace="fpipe")
    found = [x.untyped_storage() for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]
    return {storage._cdata: storage for storage in found}


def memory(*trees):
    """Its bytes."""
    return {key: storage.nbytes() for key, storage in storages(*trees).items()}


class Made(TorchDispatchMode):
    """Knows, and doesn't keep, the memory that operations make, also where only torch's own code holds it."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = storages(args, kwargs)
        for key, storage in storages(out).items():
            if key not in given:
                self.found[key] = StorageWeakRef(storage), storage.nbytes()
        return out

    def living(self):
        """The bytes of each memory that is still held."""
        return {key: size for key, (ref, size) in self.found.items() if not ref.expired()}


@pytest.fixture(scope="module", autouse=True)
def _thawed():
    """With what torch imports at its first dispatch mode, which leaves frames behind, and unfrozen at the end."""
    with Made():
        torch.ones(1).neg()
    yield
    gc.unfreeze()


@contextmanager
def without_collector():
    """`tensors()`, which are new, with the garbage collector switched off."""
    gc.collect()
    gc.freeze()  # what there is already goes out of sight
    gc.disable()
    try:
        yield lambda: [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    finally:
        gc.enable()


def left(tensors, *kept):
    """The tensors of which the memory is not that of anything kept."""
    theirs = memory(*kept)
    return [describe(x) for x in tensors if isinstance(x, FakeTensor) or x.untyped_storage()._cdata not in theirs]


def describe(x):
    return f"{type(x).__name__} {x.dtype} {list(x.shape)}"


NAMES = ("attention", "dropout", "modules", "skip")
(STEPS,) = combined(
    name=NAMES,
    way=WAYS,
    schedule=cases.SCHEDULES,
    where=lambda name, schedule, **_: name != "modules" or schedule not in cases.COPIED,  # a state has no copies
).args[1:]


def steps(name, way, ranks=2):
    """`(schedule, run, inputs)` of some schedules, of which those of as many stages share their pieces."""
    found = {}
    for schedule in [schedule for *row, schedule in STEPS if row == [name, way]]:
        case, generator, plan = cases.make(name, schedule, ranks, MICROBATCHES)
        if plan.stages not in found:
            pipeline = with_loss(case.pipeline, False)
            found[plan.stages] = (
                inputs_of(case),
                DifferentiablePipeline(pipeline, WAYS[way].pieces(pipeline, loss=True)),
            )
        inputs, pieces = found[plan.stages]
        yield schedule, handlers.Local().compile(fpipe.lower(generator, plan), pieces, None), inputs


def inputs_of(case):
    data = list(map(Microbatch, case.batch.chunk(MICROBATCHES), case.target.chunk(MICROBATCHES)))
    return handlers.Inputs(case.params, [case.state or {}], data, rng=case.rng)


def tensors_of(results):
    found = optree.tree_leaves(vars(results), namespace="fpipe")
    return list({id(x): x for x in found if isinstance(x, torch.Tensor)}.values())


# After a step


@one_in(3)
@combined(name=NAMES, way=WAYS)
def test_no_tensor_of_a_step_lives_but_its_results(name, way):
    every, traced = list(steps(name, way)), set()
    with without_collector() as tensors:
        for schedule, run, inputs in every:
            if id(inputs) not in traced:
                results = tensors_of(run(inputs))
                assert left([x for x in tensors() if not isinstance(x, FakeTensor)], results) == [], schedule
                gc.collect()
                assert left(tensors(), results) == [], schedule
                traced.add(id(inputs))
            with Made() as mode:
                results = tensors_of(run(inputs))
            assert len(mode.found) > 50, schedule
            assert mode.living().keys() <= memory(results).keys(), schedule
            assert left(tensors(), results) == [], schedule
            assert sum(memory(results).values()) == sum(x.nbytes for x in results), schedule
            assert not any(x.requires_grad for x in results), schedule
            del results


def test_of_a_trace_its_constants_live_on_once():
    def stage(p, x):
        return x * p * torch.tensor([1.0, 2.0])

    pipeline = Pipeline([stage] * 2, cases.mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff="graph")
    params, x = {0: torch.ones(2), 1: torch.ones(2)}, torch.ones(4, 2)
    with without_collector() as tensors:
        for _ in range(3):
            results = step(params, x, x)
            gc.collect()
            assert left(tensors(), results) == ["Tensor torch.float32 [2]"] * 2


def test_an_evaluation_leaves_its_outputs_alone():
    case, _, plan = cases.make("attention", "interleaved_1f1b", 2, MICROBATCHES)
    run = fpipe.evaluate(case.pipeline, plan, handler=handlers.Local(), autodiff="graph")
    run(case.params, case.batch)
    with without_collector() as tensors, Made() as mode:
        output = run(case.params, case.batch)
        assert mode.living().keys() == memory(output).keys()
        assert left(tensors(), output) == []


# After a step that failed


COUNTDOWN = []


@torch.library.custom_op("fpipe_memory::fragile", mutates_args=())
def fragile(x: torch.Tensor) -> torch.Tensor:
    """The identity, until it has run as often as was said."""
    if COUNTDOWN:
        COUNTDOWN[0] -= 1
        if COUNTDOWN[0] == 0:
            raise RuntimeError("it broke")
    return x.clone()


fragile.register_fake(torch.empty_like)
fragile.register_autograd(lambda ctx, g: fragile(g))


def brittle(p, x):
    return torch.tanh(fragile(x @ p["w"]))


@combined(after=[1, 11, 17, 24, 32], way=WAYS)
def test_no_tensor_of_a_step_that_failed_lives(way, after):
    params = {s: {"w": torch.eye(4)} for s in range(4)}
    pipeline = Pipeline([brittle] * 4, cases.mse)
    plan = pipeline.plan(Placement.v(2), MICROBATCHES)
    options = WAYS[way]
    step = fpipe.value_and_grad(
        pipeline, schedules.zb_v, plan, handler=handlers.Local(), autodiff=options.autodiff, policy=options.policy
    )
    x = torch.ones(8, 4)
    first = step(params, x, x)
    with without_collector() as tensors:
        COUNTDOWN.append(after)
        with Made() as mode:
            broke = fails(step, params, x, x)
        COUNTDOWN.clear()
        assert broke == "it broke"
        assert mode.found
        assert mode.living() == {}
        assert left(tensors()) == []
    assert torch.equal(step(params, x, x)[1][0]["w"], first[1][0]["w"])


def fails(step, *arguments):
    """Why a step fails; its error is given up, and with it the frames that it holds."""
    try:
        step(*arguments)
    except StageError as error:
        return str(error.__cause__)
    return None


def test_no_real_tensor_of_a_stage_that_fails_while_it_is_traced_lives():
    def stage(p, x):
        if x.dtype == torch.float64:
            raise ValueError("not in double precision")
        return torch.tanh(x @ p.to(x.dtype))

    pipeline = Pipeline([lambda p, x: torch.tanh(x @ p).double(), stage], cases.mse)
    plan = pipeline.plan(Placement.loop(2), MICROBATCHES)
    step = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=handlers.Local())
    params, x = {0: torch.eye(4), 1: torch.eye(4)}, torch.ones(8, 4)
    with without_collector() as tensors, Made() as mode:
        assert fails(step, params, x, x) == "not in double precision"
        assert mode.found
        assert mode.living() == {}
        assert left([x for x in tensors() if not isinstance(x, FakeTensor)]) == []


# By pieces


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@each_way
def test_pieces_keep_nothing_of_what_they_gave(way, split):
    piece, params, x, cotangent = deep_piece(way, blocks=1)
    prepared = piece.prepare(params)
    once(piece, prepared, x, cotangent, split)
    with without_collector() as tensors:
        with Made() as mode:
            found = once(piece, prepared, x, cotangent, split)
        assert mode.living().keys() == memory(found).keys()
        assert left(tensors(), found) == []
        del found
        assert mode.living() == {}


def once(piece, prepared, x, cotangent, split):
    outputs, residuals, _ = piece.forward(prepared, None, {0: x}, Microbatch(None, None), keep=True)
    del outputs
    if not split:
        weights, inputs = piece.backward(residuals, [cotangent])
        return list(weights), inputs[0]
    inputs, deferred = piece.backward_input(residuals, [cotangent])
    del residuals
    return list(piece.backward_weight(deferred)), inputs[0]


# During a backward

WIDTH, HEADS, LENGTH = 16, 2, 6


def block(p, x):
    """A transformer's: attention, then a layer four times as wide, both behind a norm and beside a skip."""
    rows, length, width = x.shape
    h = F.layer_norm(x, (width,), p["norm1"], p["bias1"])
    q, k, v = (h @ p["qkv"] + p["qkv_bias"]).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
    x = x + (mixed @ p["out"] + p["out_bias"])
    h = F.layer_norm(x, (width,), p["norm2"], p["bias2"])
    return x + (F.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"])


def block_params():
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    biases = {f"{name}_bias": shape[1:] for name, shape in shapes.items()}
    norms = dict.fromkeys(("norm1", "bias1", "norm2", "bias2"), (WIDTH,))
    return {name: cases.randn(*shape) for name, shape in (shapes | biases | norms).items()}


def contents(x):
    return x.values if isinstance(x, Keeping | Deferring) else x


class Lives(Made):
    """Notes for each operation what lives before it and when it has run, and what it reads and gives."""

    def __init__(self):
        super().__init__()
        self.before, self.after, self.used = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.before.append(self.living())
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.after.append(self.living())
        self.used.append(set(storages(args, kwargs, out)))
        return out

    def seen(self, *results):
        """What was noted, of operations that gave these results; and start again."""
        last = {key: at for at, keys in enumerate(self.used) for key in keys} | dict.fromkeys(memory(*results), inf)
        overdue = [
            (at, n) for at, found in enumerate(self.before) for key, n in found.items() if at > last.get(key, -1)
        ]
        peak = max(sum(found.values()) for found in self.after)
        seen = Seen(len(self.used), sum(self.before[0].values()), peak, overdue)
        self.before, self.after, self.used = [], [], []
        return seen


class Seen(NamedTuple):
    """Bytes, apart from those of parameters and of the cotangents given.

    Args:
        overdue: what lived though no operation needed it any more: before which operation, and how much.
    """

    operations: int
    start: int
    peak: int
    overdue: list[tuple[int, int]]


def deep_piece(way, blocks=4, rows=32):
    """A stage of blocks, its params, its input, and its output's cotangent; values are large beside params."""

    def fn(p, x):
        for each in p:
            x = block(each, x)
        return x

    torch.manual_seed(0)
    stage, options = Stage(fn, reads=(0,)), WAYS[way]
    piece = Eager(stage) if way == "eager" else Traced(stage, policy=options.policy, fallback=False)
    params = [block_params() for _ in range(blocks)]
    x = torch.randn(rows, LENGTH, WIDTH, requires_grad=True)
    return piece, params, flatten(x), torch.randn(rows, LENGTH, WIDTH)


@cache
def fused(way):
    """What is seen of a backward in one; and the bytes of an activation."""
    piece, params, x, cotangent = deep_piece(way)
    with without_collector():
        mode, residuals = forward_watched(piece, params, x)
        with mode:
            weights, inputs = piece.backward(residuals, [cotangent])
        return mode.seen(list(weights), inputs), cotangent.nbytes


@cache
def halves(way):
    """What is seen of the two halves of a backward."""
    piece, params, x, cotangent = deep_piece(way)
    with without_collector():
        mode, residuals = forward_watched(piece, params, x)
        with mode:
            inputs, deferred = piece.backward_input(residuals, [cotangent])
        first = mode.seen(inputs, contents(deferred))
        del residuals
        with mode:
            weights = piece.backward_weight(deferred)
        return first, mode.seen(inputs, list(weights))


def forward_watched(piece, params, x):
    """A mode that knows what a forward keeps, a copy of its input among it; and the residuals."""
    prepared, nothing = piece.prepare(params), Microbatch(None, None)
    piece.forward(prepared, None, {0: x}, nothing, keep=True)
    with Lives() as mode:
        own = flatten(x.leaves[0].detach().clone().requires_grad_())
        _, residuals, _ = piece.forward(prepared, None, {0: own}, nothing, keep=True)
    mode.seen()
    return mode, residuals


GRAPHS = [name for name in WAYS if name != "eager"]


@pytest.mark.parametrize("way", few(GRAPHS, ["nothing"]))
def test_a_backward_gives_up_each_memory_after_the_last_operation_that_needs_it(way):
    found, _ = fused(way)
    assert found.operations > 100
    assert found.overdue == []


@pytest.mark.parametrize("way", few(GRAPHS, ["everything"]))
def test_so_do_its_halves(way):
    first, second = halves(way)
    assert min(first.operations, second.operations) > 40
    assert (first.overdue, second.overdue) == ([], [])


def test_a_backward_needs_little_more_memory_than_its_residuals():
    """At the start one value is made that is as wide as a hidden layer, beside the gradients of weights."""
    found, activation = fused("everything")
    assert found.start > 60 * activation
    assert found.peak <= found.start + 5 * activation
    assert found.peak <= fused("eager")[0].peak


def test_an_input_gradient_needs_no_more_memory_than_by_eager_autograd():
    assert halves("everything")[0].peak <= halves("eager")[0].peak


@pytest.mark.parametrize("way", few(["nothing", "cheap"], slice(1)))
def test_a_backward_that_redoes_its_forward_needs_no_more_memory_than_one_that_keeps_it(way):
    assert fused(way)[0].peak <= fused("everything")[0].peak


class Triangles(TorchDispatchMode):
    """Counts the masks that are made."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.tril.default
        return func(*args, **kwargs or {})


def test_what_depends_on_the_params_alone_is_computed_once_whatever_the_cotangents_look_like():
    """The second stage reads the transpose, and so its gradient is transposed: the first one's backward has two."""
    stages = [lambda p, x: torch.tanh(x @ p) * torch.ones(8, 8).tril(), lambda p, x: x.T @ p]
    pipeline, params = Pipeline(stages, cases.mse), {0: cases.randn(8, 8), 1: cases.randn(8, 8)}
    plan, x = pipeline.plan(Placement.loop(2), 2), cases.randn(16, 8)
    step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handlers.Local(), autodiff="graph")
    expected = step(params, x, x)
    with Triangles() as made:
        again = step(params, x, x)
    assert made.count == 1
    assert all(map(torch.equal, optree.tree_leaves(again), optree.tree_leaves(expected)))
