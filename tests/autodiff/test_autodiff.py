"""Every stage of the zoo, by every kind of piece: torch's eager autograd is the oracle, to the bit."""

from __future__ import annotations

import functools
import gc
import inspect
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from itertools import cycle, product
from pathlib import Path

import optree
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fpipe import StageError, policies
from fpipe.autodiff.eager import Eager
from fpipe.autodiff.interface import seed
from fpipe.autodiff.options import Options
from fpipe.autodiff.traced import Traced
from tests.support import stage_zoo
from tests.support.combinations import ALL, combined, few, one_in, sample, thorough
from tests.support.oracle import (
    LAYOUTS,
    Found,
    arguments,
    as_it_is,
    begin,
    bits,
    differences,
    expanded,
    finish,
    flat,
    is_tensor,
    leaves_of,
    oracle,
    own_params,
    run,
    same,
    seeded,
    seeds_of,
    transposed,
    wants,
)
from tests.support.policies import POLICIES

graph = functools.partial(Traced, name=3, fallback=False)
KINDS = {"eager": Eager, "graph": graph}
MICROBATCHES = 3
ROWS, WIDTH, FLOAT = stage_zoo.ROWS, stage_zoo.WIDTH, 4

every_kind = pytest.mark.parametrize("kind", KINDS)
both_ways = pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])


def piece_of(kind, example, **options):
    return KINDS[kind](example.stage, **options)


TRACED = {}
"""By example, what `test_microbatches_in_a_row_have_eagers_bits` has traced: other tests need not trace it again."""


def traced_piece(kind, name, example):
    return piece_of(kind, example, **({"graphs": TRACED.get(name)} if kind == "graph" else {}))


@contextmanager
def untouched(example):
    """What is given is the same afterwards, and was not even written to with the same values."""
    given = [x for x in leaves_of([example.params, example.sources, example.state, *example.data]) if is_tensor(x)]
    before = [(x._version, x.requires_grad, x.detach().clone()) for x in given]
    yield
    after = [(x._version, x.requires_grad, x.detach()) for x in given]
    assert [a[:2] for a in after] == [b[:2] for b in before]
    assert all(torch.equal(bits(a), bits(b)) for (*_, a), (*_, b) in zip(after, before, strict=True))


def ways(kind, name):
    """Fused and split; autograd itself walks a selectively checkpointed block only once."""
    return (False,) if kind == "eager" and name.startswith("selective") else (False, True)


def counted(example):
    """The example, and a list to which each call of its function adds whether all its tensors were fakes."""
    calls = []

    def fn(*args):
        calls.append(all(map(is_fake, filter(is_tensor, leaves_of(args)))))
        return example.stage.fn(*args)

    return replace(example, stage=replace(example.stage, fn=fn)), calls


def overwritten(weights):
    """Write to the weight gradients that are said to share no memory, and leave them out."""
    assert all(is_tensor(weights[i]) for i in weights.fresh)
    for i in weights.fresh:
        weights[i].fill_(torch.nan)
    return [None if i in weights.fresh else x for i, x in enumerate(weights)]


@one_in(7)
@pytest.mark.parametrize(
    ("kind", "name"),
    sample(
        [*product(KINDS, stage_zoo.EXAMPLES)],
        [("graph", name) for name in few(stage_zoo.EXAMPLES, slice(None, None, 3))]
        + [("eager", name) for name in few([*stage_zoo.EXAMPLES][::3], slice(None, None, 3))],
    ),
)
def test_microbatches_in_a_row_have_eagers_bits(kind, name):
    """The stage's own function is called once, on fakes; what is given, and what was handed on, stays as it is."""
    example = stage_zoo.make(name)
    watched, calls = counted(example)
    piece = piece_of(kind, watched)
    with untouched(example):
        prepared = piece.prepare(example.params)
        for split in ways(kind, name):
            forwards, expected, state = [], [], example.state
            for m in range(MICROBATCHES):
                part = replace(stage_zoo.microbatch(example, m), state=state)
                seeded(m)
                expected.append(oracle(part, seeds_of(as_it_is, n=m)))
                after = torch.get_rng_state()
                seeded(m)
                forwards.append(piece.forward(prepared, state, flat(part), part.data, keep=True))
                assert torch.equal(torch.get_rng_state(), after)
                state = forwards[-1][-1]
            begun = [begin(piece, forwards[m], seeds_of(as_it_is, n=m), split) for m in range(MICROBATCHES)]
            found = []
            for m in range(MICROBATCHES):
                found.append(begun[m]())
                assert differences(found[m], expected[m]) == []
                fresh = found[m].weights.fresh
                found[m].weights = overwritten(found[m].weights)
                expected[m].weights = [None if i in fresh else x for i, x in enumerate(expected[m].weights)]
            assert [differences(a, b) for a, b in zip(found, expected, strict=True)] == [[]] * MICROBATCHES
            assert torch.equal(torch.get_rng_state(), after)
    if kind == "graph":
        assert calls == [True]
        TRACED[name] = piece.graphs


@one_in(4)
@pytest.mark.parametrize(
    ("kind", "name"),
    sample(
        [*product(KINDS, stage_zoo.EXAMPLES)],
        few([*zip(cycle(KINDS), stage_zoo.EXAMPLES, strict=False)], slice(None, None, 3)),
    ),
)
def test_without_residuals_outputs_are_those_without_gradients(kind, name):
    example = stage_zoo.make(name)
    piece = traced_piece(kind, name, example)
    seeded(0)
    sources = stage_zoo.tensors_mapped(torch.detach, example.sources)
    with torch.no_grad():
        expected = example.stage(own_params(example), example.state, arguments(example, sources))
    after = torch.get_rng_state()
    seeded(0)
    prepared = piece.prepare(example.params)
    outputs, residuals, state = piece.forward(prepared, example.state, flat(example), example.data, keep=False)
    assert torch.equal(torch.get_rng_state(), after)
    assert residuals is None
    assert not any(map(wants, outputs.leaves))
    expected = stage_zoo.tensors_mapped(torch.detach, expected)
    assert [i for i, (a, b) in enumerate(pairs((outputs.tree, state), expected)) if not same(a, b)] == []


def pairs(a, b):
    assert optree.tree_structure(a, namespace="fpipe") == optree.tree_structure(b, namespace="fpipe")
    return zip(leaves_of(a), leaves_of(b), strict=True)


MANY_LAYOUTS = (
    "mlp",
    "views_among_outputs",
    "views_of_inputs_as_outputs",
    "products_of_every_kind",
    "attention_causal",
    "recurrent_lstm",
    "recurrent_gru",
    "autocast_mlp",
    "complex_values",
    *(name for name in stage_zoo.EXAMPLES if name.startswith("convolution")),
)

ONE_LAYOUT = dict(zip(stage_zoo.EXAMPLES, cycle([(transposed,), (expanded,)])))


@one_in(4)
@pytest.mark.parametrize(
    ("kind", "name"),
    sample(
        [*product(KINDS, stage_zoo.EXAMPLES)],
        [("eager", name) for name in few(MANY_LAYOUTS, slice(None, None, 3))]
        + [
            ("graph", name)
            for name in few(
                dict.fromkeys([*MANY_LAYOUTS, *[*stage_zoo.EXAMPLES][::2]]),
                dict.fromkeys([*MANY_LAYOUTS[::2], *[*stage_zoo.EXAMPLES][::6]]),
            )
        ],
    ),
)
def test_cotangents_of_every_layout(kind, name):
    example = stage_zoo.make(name)
    piece = traced_piece(kind, name, example)
    prepared = piece.prepare(example.params)
    wrong = {}
    few = (transposed, expanded) if ALL else ONE_LAYOUT[name]
    for layout in LAYOUTS if name in MANY_LAYOUTS else few:
        seeded(0)
        expected = oracle(example, seeds_of(layout))
        for split in ways(kind, name):
            seeded(0)
            found = run(piece, prepared, example, seeds_of(layout), split)
            wrong[layout.__name__, split] = differences(found, expected)
    assert {how: found for how, found in wrong.items() if found} == {}


MISSING = {
    "all": lambda i: False,
    "odd": lambda i: i % 2 == 0,
    "even": lambda i: i % 2 == 1,
    "but the last": lambda i: i > 0,
}


@one_in(3)
@combined(
    kind=KINDS,
    name=["auxiliary_loss", "views_among_outputs", "activations", "products_of_every_kind"],
    first=[False, True],
    split=[False, True],
)
def test_where_there_is_no_cotangent_there_may_be_no_gradient(kind, name, first, split):
    example = stage_zoo.make(name)
    whole = piece_of(kind, example)
    run(whole, whole.prepare(example.params), example, seeds_of(), split)
    wrong = {}
    for which, kept in MISSING.items():
        piece = piece_of(kind, example) if first else whole
        found = run(piece, piece.prepare(example.params), example, seeds_of(kept=kept), split)
        wrong[which] = differences(found, oracle(example, seeds_of(kept=kept)))
    assert wrong == {which: [] for which in MISSING}


@combined(
    kind=KINDS,
    name=[name for name in stage_zoo.EXAMPLES if name.startswith("loss")],
    scale=[None, 0.25, torch.tensor(0.125, dtype=torch.float64)],
)
def test_loss_alone_gets_a_cotangent(kind, name, scale):
    example = stage_zoo.make(name)
    piece = piece_of(kind, example, **({"loss": True} if kind == "graph" else {}))
    prepared = piece.prepare(example.params)

    def seeds(outputs):
        return [seed(outputs[0], scale), *[None] * (len(outputs) - 1)]

    for split in (False, True):
        assert differences(run(piece, prepared, example, seeds, split), oracle(example, seeds)) == []


def longer(x):
    return torch.cat([x.detach(), x.detach()]).requires_grad_(x.requires_grad)


OTHERS = {
    "rows": ("mlp", lambda e: {"sources": stage_zoo.tensors_mapped(longer, e.sources)}),
    "dtype": ("no_parameters", lambda e: {"sources": {0: e.sources[0].detach().double().requires_grad_()}}),
    "whether a gradient is wanted": ("mlp", lambda e: {"sources": {0: e.sources[0].detach()}}),
    "strides": ("mlp", lambda e: {"sources": {0: e.sources[0].detach().T.contiguous().T.requires_grad_()}}),
    "a static leaf": ("inputs_as_outputs", lambda e: {"sources": {0: e.sources[0] | {"note": "other"}}}),
    "a static leaf's type": ("inputs_as_outputs", lambda e: {"sources": {0: e.sources[0] | {"note": 1.0}}}),
    "the tree": ("inputs_as_outputs", lambda e: {"sources": {0: e.sources[0] | {"more": torch.ones(2)}}}),
    "the target": ("loss_mean_square", lambda e: {"data": e.data._replace(target=e.data.target.double())}),
    "the state": ("running_mean_by_hand", lambda e: {"state": e.state | {"kind": "other"}}),
    "params": ("mlp_on_sequences", lambda e: {"params": stage_zoo.tensors_mapped(torch.Tensor.double, e.params)}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_signature_is_traced_beside_the_first(what):
    name, change = OTHERS[what]
    example, calls = counted(stage_zoo.make(name))
    piece = piece_of("graph", example)
    other = replace(example, **change(example))
    if what == "params":
        other = replace(
            other, sources=stage_zoo.tensors_mapped(lambda x: x.detach().double().requires_grad_(), example.sources)
        )
    for n, part in enumerate((example, other, example, other)):
        found = run(piece, piece.prepare(part.params), part, seeds_of(n=n), split=n % 2)
        assert differences(found, oracle(replace(part, stage=stage_zoo.make(name).stage), seeds_of(n=n))) == []
    assert calls == [True, True]


def test_settings_of_torch_are_part_of_the_signature():
    example = stage_zoo.make("mlp")
    piece = piece_of("graph", example)
    for settings in (nullcontext, functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16), nullcontext):
        with settings():
            found = run(piece, piece.prepare(example.params), example, seeds_of(), split=True)
            assert differences(found, oracle(example, seeds_of())) == []


class Operations(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((func, args))
        return func(*args, **(kwargs or {}))

    def count(self, *names):
        return sum(func.overloadpacket.__name__ in names for func, _ in self.found)


def halves(example, **options):
    """The operations of a microbatch's pieces: forward, backward_input, backward_weight; and of the fused backward."""
    piece = piece_of("graph", example, **options)
    prepared = piece.prepare(example.params)
    run(piece, prepared, example, seeds_of(), split=False)
    forward, first, second, fused = (Operations() for _ in range(4))
    seeded(0)
    with forward:
        outputs, residuals, _ = piece.forward(prepared, example.state, flat(example), example.data, keep=True)
    cotangents = seeds_of()(outputs.leaves)
    with first:
        _, deferred = piece.backward_input(residuals, cotangents)
    with second:
        piece.backward_weight(deferred)
    outputs, residuals, _ = piece.forward(prepared, example.state, flat(example), example.data, keep=True)
    with fused:
        piece.backward(residuals, cotangents)
    return forward, first, second, fused


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("mlp", 3, 3),
        ("mlp_on_the_batch", 0, 5),
        ("mlp_whose_input_wants_no_gradient", 0, 3),
        ("mlp_on_sequences", 2, 2),
        ("weight_twice", 2, 2),
        ("frozen_layer", 2, 1),
        ("everything_frozen", 1, 0),
    ],
)
def test_each_half_multiplies_what_it_needs(name, first, second):
    _, by_input, by_weight, fused = halves(stage_zoo.make(name))
    assert by_input.count(*PRODUCTS) == first
    assert by_weight.count(*PRODUCTS) == second
    assert fused.count(*PRODUCTS) == first + second
    assert by_weight.count("tanh", "relu") == by_input.count("tanh", "relu") == 0


@pytest.mark.parametrize(
    "name", ["encoder_plain", "attention_grouped", "experts_dense", "experts_gathered", "autocast_mlp"]
)
def test_nothing_is_multiplied_twice_in_a_split_backward(name):
    _, by_input, by_weight, fused = halves(stage_zoo.make(name))
    attention = ("_scaled_dot_product_flash_attention_for_cpu_backward", "_softmax_backward_data")
    assert by_input.count(*PRODUCTS) + by_weight.count(*PRODUCTS) == fused.count(*PRODUCTS) > 0
    assert by_input.count(*attention) == fused.count(*attention)
    assert by_weight.count(*attention) == 0


@pytest.mark.parametrize("name", ["convolution_plain", "convolution_bare", "batch_norm_after_convolution"])
def test_convolutions_backward_comes_in_halves(name):
    forward, by_input, by_weight, _ = halves(stage_zoo.make(name))
    count = forward.count("convolution")
    masks = [
        [args[-1] for func, args in half.found if "convolution_backward" in str(func)] for half in (by_input, by_weight)
    ]
    assert masks[0] == [[True, False, False]] * count
    assert [mask[:2] for mask in masks[1]] == [[False, True]] * count


@one_in(4)
@pytest.mark.parametrize("name", sample(stage_zoo.EXAMPLES, few([*stage_zoo.EXAMPLES][::5], slice(None, None, 2))))
def test_inputs_without_gradient_leave_everything_to_the_weights(name):
    example = stage_zoo.make(name)
    example = replace(example, sources=stage_zoo.tensors_mapped(torch.detach, example.sources))
    piece = traced_piece("graph", name, example)
    prepared = piece.prepare(example.params)
    seeded(0)
    expected = oracle(example, seeds_of(as_it_is))
    seeded(0)
    outputs, residuals, state = piece.forward(prepared, example.state, flat(example), example.data, keep=True)
    cotangents = seeds_of(as_it_is)(outputs.leaves)
    with Operations() as ops:
        inputs, deferred = piece.backward_input(residuals, cotangents)
    assert [func for func, _ in ops.found if func is not torch.ops.aten.detach.default] == []
    assert not any(map(is_tensor, leaves_of(inputs)))
    assert differences(Found(outputs.tree, state, piece.backward_weight(deferred), inputs), expected) == []


def branches(h):
    if h.sum() > 0:  # here
        return h * 2
    return h


def takes_an_item(h):
    return h * h.detach().abs().max().item()  # here


def leaves_torch(h):
    return h * torch.from_numpy(h.detach().numpy()).cos()  # here


def chooses_rows(h):
    return h[h.detach().sum(1) > 0].sum(0)  # here


def loops(h):
    for n in h.detach().argmax(1).tolist():  # here
        h = h * (n + 1)
    return h


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * (1.0 if float(h.sum()) > 0 else 2.0)  # here

    @staticmethod
    def backward(ctx, g):
        return g * 2


class RefusingLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 2

    @staticmethod
    def backward(ctx, g):
        return g * float(g.sum())  # here


REFUSED = {f.__name__: f for f in (branches, takes_an_item, leaves_torch, chooses_rows, loops, Refusing, RefusingLater)}


def refused(name):
    """A stage that can't be traced, and the line of its own code that says so."""
    torch.manual_seed(0)
    found = REFUSED[name]
    fn = found.apply if isinstance(found, type) else found
    lines, start = inspect.getsourcelines(found)
    example = stage_zoo.on(lambda p, x: fn(x @ p["w"]), stage_zoo.wants(ROWS, WIDTH), w=stage_zoo.square())
    return example, f"{Path(__file__).name}:{start + next(i for i, line in enumerate(lines) if '# here' in line)}"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_runs_by_eager_autograd_with_one_warning(name):
    example, line = refused(name)
    piece = Traced(example.stage, name=3)
    prepared = piece.prepare(example.params)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for part in (
            example,
            stage_zoo.microbatch(example, 1),
            replace(example, sources=stage_zoo.tensors_mapped(longer, example.sources)),
        ):
            for split in (False, True):
                found = run(piece, prepared, part, seeds_of(), split)
                assert differences(found, oracle(part, seeds_of())) == []
    assert [warning.category for warning in said] == [UserWarning]
    assert "stage 3" in str(said[0].message)
    assert line in str(said[0].message)
    assert "autodiff='eager'" in str(said[0].message)


def test_stage_that_counts_its_calls_counts_them_all():
    """A trace would count once."""
    fn, same_fn = writes_to_what_it_closes_over(), writes_to_what_it_closes_over()
    example = stage_zoo.on(fn, stage_zoo.wants(ROWS, WIDTH), w=stage_zoo.square())
    piece = Traced(example.stage)
    prepared = piece.prepare(example.params)
    with pytest.warns(UserWarning, match=r"stage 0.*closes over"):
        found = [run(piece, prepared, example, seeds_of(), split=False) for _ in range(MICROBATCHES)]
    other = replace(example, stage=replace(example.stage, fn=same_fn))
    assert [differences(one, oracle(other, seeds_of())) for one in found] == [[]] * MICROBATCHES


def test_sparse_gradients_are_eagers():
    def fn(p, tokens):
        return F.embedding(tokens, p["e"], sparse=True)

    torch.manual_seed(0)
    example = stage_zoo.on(
        fn, torch.randint(stage_zoo.VOCABULARY, (ROWS,)), e=stage_zoo.randn(stage_zoo.VOCABULARY, WIDTH)
    )
    piece = Traced(example.stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(piece, piece.prepare(example.params), example, seeds_of(), split=True)
    expected = oracle(example, seeds_of())
    assert found.weights[0].layout == torch.sparse_coo
    assert same(found.weights[0].to_dense(), expected.weights[0].to_dense())


@one_in(3)
@pytest.mark.parametrize(
    "name", ["mlp", "encoder_plain", "checkpoint_with_dropout", "batch_norm_after_convolution", "views_among_outputs"]
)
@both_ways
def test_nothing_outlives_its_use(name, split):
    example = stage_zoo.make(name)
    piece = piece_of("graph", example)
    prepared = piece.prepare(example.params)
    run(piece, prepared, example, seeds_of(), split)
    part = stage_zoo.microbatch(example, 1)
    forward = piece.forward(prepared, part.state, flat(part), part.data, keep=True)
    lives = [weakref.ref(x) for x in leaves_of([part.sources, list(forward[0].leaves)]) if is_tensor(x)]
    lives += [weakref.ref(x) for x in forward[1].values if is_tensor(x)]
    own = {id(x) for x in leaves_of([example.params, prepared.leaves])}
    lives = [ref for ref in lives if id(ref()) not in own]
    gc.disable()
    try:
        finish(piece, forward, seeds_of(), split)
        del forward, part
        assert [ref() for ref in lives if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_an_error_without_fallback(name):
    example, line = refused(name)
    piece = graph(example.stage)
    prepared = piece.prepare(example.params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StageError, match=r"stage 3: .*traced") as caught:
            run(piece, prepared, example, seeds_of(), split=True)
    assert caught.value.stage == 3
    assert line in str(caught.value)


@pytest.mark.parametrize("fallback", [False, True])
def test_stage_that_fails_fails_with_its_own_error(fallback):
    def raises(p, x):
        raise KeyError("mine")

    def mismatched(p, x):
        return x @ p["w"][:3]

    for fn, error in ((raises, KeyError), (mismatched, RuntimeError)):
        example = stage_zoo.on(fn, stage_zoo.wants(ROWS, WIDTH), w=stage_zoo.square())
        piece = Traced(example.stage, name=3, fallback=fallback)
        prepared = piece.prepare(example.params)
        with pytest.raises(error) as expected:
            oracle(example, seeds_of())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(error) as caught:
                run(piece, prepared, example, seeds_of(), split=False)
        assert (type(caught.value), str(caught.value)) == (type(expected.value), str(expected.value))


@pytest.mark.parametrize("fallback", [False, True])
def test_reentrant_checkpoint_is_refused_with_a_way_out(fallback):
    def fn(p, x):
        return checkpoint(stage_zoo.block, p, x, use_reentrant=True)

    example = stage_zoo.on(fn, stage_zoo.wants(ROWS, WIDTH), w=stage_zoo.square(), v=stage_zoo.square())
    piece = Traced(example.stage, name=3, fallback=fallback)
    with pytest.raises(StageError, match=r"stage 3: .*use_reentrant=False.*policy="):
        run(piece, piece.prepare(example.params), example, seeds_of(), split=False)


class CheckpointedModule(torch.nn.Module):
    """Its block is run again in the backward, when the stage's function has returned."""

    def __init__(self):
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.3), torch.nn.Tanh())

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) * 2


@every_kind
@both_ways
def test_checkpoint_in_a_module_has_the_modules_own_gradients(kind, split):
    torch.manual_seed(0)
    module, x = CheckpointedModule(), stage_zoo.wants(ROWS, WIDTH)
    example = stage_zoo.of_module(module, x)
    piece = piece_of(kind, example)
    seeded(0)
    found = run(piece, piece.prepare(example.params), example, seeds_of(), split)
    seeded(0)
    y = module(x)
    named = [parameter for _, parameter in sorted(module.named_parameters())]  # as a tree has them
    *weights, gradient = torch.autograd.grad(y, [*named, x], seeds_of()([y]))
    assert differences(found, Found(y, None, weights, {0: [gradient]})) == []


class Noisy(torch.autograd.Function):
    """Its backward draws what its forward did not."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


def own_generator(p, x):
    return F.relu(x @ p["w"]) * torch.rand(WIDTH, generator=torch.Generator().manual_seed(5))


def seeds_inside(p, x):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        noise = torch.rand(WIDTH)
    return x @ p["w"] * noise + torch.rand(WIDTH)


def restores_the_generator(p, x):
    """The same mask twice."""
    state = torch.get_rng_state()
    first = F.dropout(x @ p["w"])
    torch.set_rng_state(state)
    return first + F.dropout(x)


def draws_in_its_backward(p, x):
    return Noisy.apply(x @ p["w"])


def writes_to_what_it_closes_over():
    count = torch.zeros(())

    def fn(p, x):
        count.add_(1)
        return x @ p["w"] * count

    return fn


@torch.library.custom_op("fpipe_tests::fill", mutates_args={"out"})
def fill(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x).mul_(2)


def op_that_writes(p, x):
    out = torch.zeros(ROWS, WIDTH)
    fill(out, x)
    return out @ p["w"]


@pytest.mark.parametrize(
    "fn", [own_generator, seeds_inside, restores_the_generator, draws_in_its_backward, op_that_writes]
)
def test_what_a_graph_would_not_repeat_is_eagers(fn):
    torch.manual_seed(0)
    example = stage_zoo.on(fn, stage_zoo.wants(ROWS, WIDTH), w=stage_zoo.square())
    piece = Traced(example.stage, name=3)
    prepared = piece.prepare(example.params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for m in range(MICROBATCHES):
            seeded(m)
            expected, after = oracle(example, seeds_of()), torch.get_rng_state()
            seeded(m)
            assert differences(run(piece, prepared, example, seeds_of(), split=False), expected) == []
            assert torch.equal(torch.get_rng_state(), after)


REMADE = [
    "mlp",
    "weight_twice",
    "auxiliary_loss",
    "encoder_plain",
    "encoder_dropout",
    "decoder_dropout",
    "attention_dropout",
    "attention_trained_bias",
    "experts_gathered",
    "autocast_weight_twice",
    "convolution_channels_last",
    "batch_norm_after_convolution",
    "recurrent_gru",
    "views_among_outputs",
    "parameters_alone_are_much_work",
    "in_place_on_intermediates",
    "function_with_context",
    "custom_op",
    "complex_values",
    *(name for name in stage_zoo.EXAMPLES if name.startswith(("checkpoint", "selective", "random"))),
]


OTHER = [policy for policy in POLICIES if policy not in ("everything", "nothing")]
"""Each example runs under one of these, under `everything` (the default) and under `nothing` (it recomputes all)."""


@one_in(7)
@pytest.mark.parametrize(
    ("name", "policy"),
    sample(
        [*product(REMADE, POLICIES)],
        [(name, OTHER[i % len(OTHER)]) for i, name in enumerate(REMADE)]
        + [(name, "nothing") for name in few(REMADE, slice(None, None, 3))],
    ),
)
def test_policies_change_no_bit(name, policy):
    example = stage_zoo.make(name)
    piece = piece_of("graph", example, policy=POLICIES[policy])
    prepared = piece.prepare(example.params)
    for m in range(2):
        part = stage_zoo.microbatch(example, m)
        seeded(m)
        expected, after = oracle(part, seeds_of()), torch.get_rng_state()
        for split in (False, True):
            seeded(m)
            assert differences(run(piece, prepared, part, seeds_of(), split), expected) == []
            assert torch.equal(torch.get_rng_state(), after)


def memory(tree):
    """The bytes of each memory that is reachable from an object, by its address."""
    found, todo, seen = {}, [tree], set()
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if is_tensor(x):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            todo.extend(x.values())
        elif isinstance(x, list | tuple):
            todo.extend(x)
        elif is_dataclass(x):
            todo.extend(getattr(x, field.name, None) for field in fields(x))
    return found


def kept(example, policy):
    """The bytes that a microbatch keeps for its backward, beside what all microbatches share."""
    piece = piece_of("graph", example, policy=POLICIES[policy])
    prepared = piece.prepare(example.params)
    parts = [stage_zoo.microbatch(example, m) for m in range(2)]
    residuals = [piece.forward(prepared, x.state, flat(x), x.data, keep=True)[1] for x in parts]
    theirs = [memory(found) for found in residuals]
    return sum(n for key, n in theirs[1].items() if key not in theirs[0])


@one_in(3)
@pytest.mark.parametrize(
    "name", few(["mlp", "attention_causal", "random_dropout", "normalised_group", "encoder_plain"], slice(4))
)
def test_policies_keep_less_the_more_they_redo(name):
    bytes_of = {policy: kept(stage_zoo.make(name), policy) for policy in POLICIES}
    assert bytes_of["nothing"] <= bytes_of["cheap"] <= bytes_of["everything"]
    assert bytes_of["nothing"] <= bytes_of["dots"] <= bytes_of["everything"]
    assert bytes_of["nothing"] < bytes_of["everything"]
    assert bytes_of["names"] == bytes_of["nothing"]


def test_what_is_kept_is_what_eager_autograd_saves_and_no_more():
    rows = ROWS * WIDTH * FLOAT
    assert kept(stage_zoo.make("mlp"), "everything") == 4 * rows  # the input and each tanh
    assert kept(stage_zoo.make("mlp"), "nothing") == rows
    assert kept(stage_zoo.make("weight_twice"), "everything") == 2 * rows  # the input, and the relu of both
    assert kept(stage_zoo.make("no_parameters"), "everything") == rows
    assert kept(stage_zoo.make("everything_detached"), "everything") == 0


def test_casts_of_weights_are_made_once_a_step_and_kept_by_no_microbatch():
    example = stage_zoo.make("autocast_mlp")
    rows = ROWS * WIDTH
    assert kept(example, "everything") == rows * (2 + 4 + 2 + 4)  # the cast input, each tanh, and the cast of the first
    piece = piece_of("graph", example)
    prepared = piece.prepare(example.params)
    casts = []
    run(piece, piece.prepare(example.params), example, seeds_of(), split=True)
    for m in range(MICROBATCHES):
        with Operations() as ops:
            run(piece, prepared, stage_zoo.microbatch(example, m), seeds_of(), split=True)
        casts.append(sum(args[0].shape == (WIDTH, WIDTH) for func, args in ops.found if "_to_copy" in str(func)))
    assert casts[1] == casts[2] == 2  # the weight gradients back to float32
    assert casts[0] == 4


def test_deferred_is_what_the_weight_gradients_multiply():
    example = stage_zoo.make("mlp")
    piece = piece_of("graph", example)
    prepared = piece.prepare(example.params)
    outputs, residuals, _ = piece.forward(prepared, None, flat(example), example.data, keep=True)
    _, deferred = piece.backward_input(residuals, seeds_of()(outputs.leaves))
    shared = memory(prepared)
    kept = sum(n for key, n in memory(deferred).items() if key not in shared)
    assert kept == 2 * 3 * ROWS * WIDTH * FLOAT  # each layer's input, and the gradient of what it puts out


@one_in(3)
@pytest.mark.parametrize("name", few(["mlp", "attention_causal", "experts_dense", "encoder_plain"], slice(3)))
def test_each_product_is_redone_at_most_once(name):
    counts = {}
    for policy in POLICIES:
        forward, *backward = halves(stage_zoo.make(name), policy=POLICIES[policy])
        by_input, by_weight, fused = (ops.count(*PRODUCTS, *ATTENTION) for ops in backward)
        assert by_input + by_weight == fused
        counts[policy] = fused
    made = forward.count(*PRODUCTS, *ATTENTION)
    assert counts["dots"] == counts["cheap"] == counts["everything"]
    assert counts["everything"] < counts["nothing"] <= counts["everything"] + made


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointed_block_is_redone_once_under_every_policy(policy):
    forward, by_input, by_weight, fused = halves(stage_zoo.make("checkpoint_with_dropout"), policy=POLICIES[policy])
    assert forward.count("mm") == 2
    assert by_input.count("mm") + by_weight.count("mm") == fused.count("mm") == 4 + 1  # the last product is not needed
    assert by_input.count("tanh") + by_weight.count("tanh") == fused.count("tanh") == 1


ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu",)


def named():
    """A hidden layer that `save_only("h")` keeps."""

    def fn(p, x):
        h = policies.checkpoint_name(torch.tanh(x @ p["a"]), "h")
        return torch.tanh(h @ p["b"]) @ p["c"]

    torch.manual_seed(0)
    return stage_zoo.on(
        fn, stage_zoo.wants(ROWS, WIDTH), a=stage_zoo.square(), b=stage_zoo.square(), c=stage_zoo.square()
    )


def test_save_only_keeps_what_has_the_name():
    rows = ROWS * WIDTH * FLOAT
    assert kept(named(), "nothing") == rows
    assert kept(named(), "names") == 2 * rows
    *_, everything = halves(named())
    *_, nothing = halves(named(), policy=policies.nothing_saveable)
    *_, names = halves(named(), policy=policies.save_only("h"))
    assert nothing.count("mm") == everything.count("mm") + 2
    assert names.count("mm") == everything.count("mm") + 1
    assert names.count("tanh") == 1
    piece = piece_of("graph", named(), policy=policies.save_only("h"))
    found = run(piece, piece.prepare(named().params), named(), seeds_of(), split=True)
    assert differences(found, oracle(named(), seeds_of())) == []


def test_selective_checkpoint_keeps_what_it_says():
    whole, plain = stage_zoo.make("selective_plain"), stage_zoo.make("checkpoint_without_randomness")
    *_, fused = halves(whole)
    *_, again = halves(plain)
    assert fused.count("mm") == 4
    assert again.count("mm") > 8


SIZES = ((4, 5), (7, 9), (2, 9), (4, 2))


def sized(example, rows, length):
    """The example with another batch size and sequence length."""
    x = example.sources[0]
    other = torch.randint(stage_zoo.VOCABULARY, (rows, length)) if not x.is_floating_point() else None
    other = stage_zoo.wants(rows, length, WIDTH) if other is None else other
    return replace(example, sources={**example.sources, 0: other})


DYNAMIC = [
    "mlp_on_sequences",
    "no_parameters",
    "tied_embedding",
    "encoder_plain",
    "attention_plain",
    "attention_causal",
    "attention_masked",
    "attention_grouped",
    "weight_norm",
    "random_dropout",
    "autocast_mlp",
    "function_with_setup_context",
    "checkpoint_with_dropout",
]


@one_in(4)
@pytest.mark.parametrize("name", few(DYNAMIC, [name for name in DYNAMIC if not name.startswith("encoder")][::2]))
def test_one_dynamic_trace_serves_all_sizes(name):
    example, calls = counted(stage_zoo.make(name))
    piece = piece_of("graph", example, dynamic=True)
    prepared = piece.prepare(example.params)
    for rows, length in SIZES:
        part = sized(stage_zoo.make(name), rows, length)
        for split in (False, True):
            seeded(0)
            expected = oracle(part, seeds_of())
            seeded(0)
            assert differences(run(piece, prepared, part, seeds_of(), split), expected) == []
    assert calls == [True]


@one_in(2)
@pytest.mark.parametrize("name", ["in_place_then_read_by_a_view", "sizes_as_outputs"])
def test_what_no_dynamic_trace_can_serve_is_traced_for_each_size(name):
    """A write to a part of a tensor of unknown size, and plain values that a size decides."""
    example, calls = counted(stage_zoo.make(name))
    piece = piece_of("graph", example, dynamic=True)
    prepared = piece.prepare(example.params)
    parts = [sized(stage_zoo.make(name), rows, length) for rows, length in SIZES for _ in range(2)]
    with pytest.warns(UserWarning, match="stage 3 is traced for each of its sizes") as told:
        found = [run(piece, prepared, part, seeds_of(), split=i % 2 == 1) for i, part in enumerate(parts)]
    assert len(told) == 1
    expected = [oracle(part, seeds_of()) for part in parts]
    assert [differences(a, b) for a, b in zip(found, expected, strict=True)] == [[]] * len(parts)
    assert all(calls)
    assert len(calls) >= len(SIZES)


@one_in(2)
@pytest.mark.parametrize(
    ("name", "policy"),
    sample(
        [*product(["mlp_on_sequences", "no_parameters", "attention_causal"], ["everything", "nothing"])],
        few(
            [("mlp_on_sequences", "nothing"), ("no_parameters", "everything"), ("attention_causal", "everything")],
            slice(2),
        ),
    ),
)
def test_dynamic_traces_do_sizes_that_are_zero_one_or_alike(name, policy):
    example = stage_zoo.make(name)
    piece = piece_of("graph", example, dynamic=True, policy=POLICIES[policy])
    prepared = piece.prepare(example.params)
    for rows, length in ((5, 5), (7, 9), (8, 8), (1, 5), (0, 5), (4, 1), (1, 1), (7, 5)):
        part = sized(example, rows, length)
        for split in (False, True):
            found = run(piece, prepared, part, seeds_of(), split)
            assert differences(found, oracle(part, seeds_of())) == []


def test_a_mode_with_cuda_graphs_is_refused():
    with pytest.raises(ValueError, match="'reduce-overhead': modes with CUDA graphs would overwrite the residuals"):
        Options(compile="reduce-overhead")


def test_a_mode_is_the_compilers(monkeypatch):
    modes, example = [], stage_zoo.make("mlp")
    monkeypatch.setattr(torch, "compile", lambda function, mode, **options: modes.append(mode) or function)
    for compile_ in (True, "max-autotune-no-cudagraphs"):
        piece = piece_of("graph", example, compile=compile_)
        piece.forward(piece.prepare(example.params), example.state, flat(example), example.data, keep=False)
    assert set(modes[: len(modes) // 2]) == {None}
    assert set(modes[len(modes) // 2 :]) == {"max-autotune-no-cudagraphs"}


@thorough
def test_compiled_pieces_are_close_to_eager_and_split_as_fused():
    example = stage_zoo.make("mlp")
    piece = piece_of("graph", example, compile=True)
    prepared = piece.prepare(example.params)
    for m in range(2):
        part = stage_zoo.microbatch(example, m)
        fused, split = (run(piece, prepared, part, seeds_of(), split) for split in (False, True))
        assert differences(split, fused) == []
        expected = oracle(part, seeds_of())
        torch.testing.assert_close(fused.outputs, expected.outputs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tuple(fused.weights), tuple(expected.weights), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fused.inputs, expected.inputs, rtol=1e-5, atol=1e-6)
