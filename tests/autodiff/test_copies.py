"""Blocks with fewer operations for what only moves data: the same bits, strides and aliases as without."""

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import Stage
from fpipe.autodiff.graph import codegen as emitting
from fpipe.autodiff.graph.aliasing import note_views
from fpipe.autodiff.graph.block import Block
from fpipe.autodiff.graph.codegen import emit
from fpipe.autodiff.traced import Traced
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import flatten
from tests.support.combinations import combined, one_in

aten = torch.ops.aten
TRICKY = [0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf"), -2.0, 1e-40]
CONTIGUOUS = torch.contiguous_format


def tricky(*shape, dtype=torch.float32):
    values = torch.tensor(TRICKY, dtype=torch.float32).to(dtype)
    if dtype.is_complex:
        values = torch.complex(values.real, values.real.flip(0))
    count = torch.Size(shape).numel()
    return values.repeat(count // len(values) + 1)[:count].reshape(shape).clone()


def written_out(fn, *given):
    """A function as a block's, of a list of tensors."""
    module = make_fx(fn, tracing_mode="fake")(*given)
    note_views(module.graph)
    nodes = list(module.graph.nodes)
    for node in nodes:
        node.meta["forward"] = True
    holders = [n for n in nodes if n.op == "placeholder"]
    body = [n for n in nodes if n.op == "call_function"]
    return emit(Block("run", {"x": holders}, body, [nodes[-1].args[0]]), module)


def operations(function):
    """What a block calls, in order."""
    found = re.findall(r"^ +n\d+ = (\w+)\(", function.source, re.MULTILINE)
    return [function.__globals__[name].__name__ or "part" for name in found]  # torch's own names have no name


def same(a, b):
    """Whether two tensors are the same in bits, signs of zeros included, with NaN where there is NaN."""
    parts = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (a, b)]
    a, b = parts
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        and torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())
    )


def aliases(tensors):
    """Which tensors are the same memory."""
    return [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in tensors] for b in tensors]


def check(fn, *given, inputs=None):
    """The block of a function, run on other inputs of the same layout maybe, gives what the function gives."""
    function = written_out(fn, *given)
    inputs = inputs or given
    wanted, (found,) = fn(*inputs), [function(list(inputs))]
    assert all(map(same, found, wanted))
    assert [x.stride() for x in found] == [x.stride() for x in wanted]
    assert aliases([*found, *inputs]) == aliases([*wanted, *inputs])
    return operations(function)


def copied(x):
    return x.clone(memory_format=CONTIGUOUS)


def copy_of_a_copy(x):
    y = copied(x.transpose(0, 1)).view(3, 2, 4)
    return [copied(y.transpose(1, 2)).view(3, 8)]


def copy_of_a_copy_that_could_be_a_view(x):
    y = copied(x.transpose(0, 1)).view(3, 2, 4)
    return [copied(y.transpose(1, 2)).view(12, 2)]


def copy_of_an_unsure(x, y):
    return [copied(copied((x.transpose(0, 1) + y).transpose(0, 1)).view(6, 4)).view(24)]


def copy_of_an_unsure_out_of_order(x, y):
    return [copied((x.transpose(0, 1) + y).transpose(0, 2)).view(24)]


def sum_that_drops(x):
    return [x.sum([0, 2], True).reshape(3), aten.sum.dim_IntList(x, [], True).reshape([])]


def row_by_row(x, w):
    return [torch.relu((x @ w).view(2, 3, 4)).view(6, 4)]


def row_kept_in_both_shapes(x, w):
    y = torch.relu((x @ w).view(2, 3, 4))
    return [y, y.view(6, 4)]


def parts_stacked(x, y, z):
    shape = [3, 2, 4]
    whole = aten.select_backward(z, shape, 0, 2) + aten.select_backward(y, shape, 0, 1)
    return [whole + aten.select_backward(x, shape, -3, -3)]


def parts_stacked_and_copied(x, y):
    shape = [2, 2, 4]
    parts = [aten.select_backward(copied(v.t()).view(2, 4), shape, 0, i) for i, v in enumerate((x, y))]
    return [copied((parts[1] + parts[0]).permute(1, 0, 2)).view(4, 4)]


def parts_joined(x, y):
    return [aten.slice_backward(x, [5, 4], 0, 0, 2, 1) + aten.slice_backward(y, [5, 4], 0, 2, 2**63 - 1, 1)]


def views_of_views(x, w):
    return [(x @ w).view(2, 3, 2, 2).transpose(1, 2)[1]]


def views_of_an_input(x):
    return [x.view(2, 3, 2, 2).transpose(1, 2)]


def transposes(x, y):
    return [(x.transpose(0, 1) + y).transpose(0, 2).permute(1, 0, 2)]


def items(x, w):
    return [v.view(3, 2, 2, 1).transpose(1, 2) for v in (x @ w).view(3, 2, 4).split(2, -1)]


def merged_twice(x, y):
    return [(x.transpose(0, 1) + y).transpose(0, 1).reshape(6, 4).view(24)]


def shapes(*given):
    return lambda dtype: [tricky(*shape, dtype=dtype) for shape in given]


FIRES = {
    copy_of_a_copy: (shapes((2, 3, 4)), ["permute", "reshape"]),
    copy_of_a_copy_that_could_be_a_view: (shapes((2, 3, 4)), ["permute", "clone", "reshape"]),
    copy_of_an_unsure: (shapes((2, 3, 4), (3, 2, 4)), ["transpose", "add", "transpose", "clone", "reshape"]),
    copy_of_an_unsure_out_of_order: (
        shapes((2, 3, 4), (3, 2, 4)),
        ["transpose", "add", "transpose", "clone", "reshape"],
    ),
    sum_that_drops: (shapes((2, 3, 4)), ["sum", "sum"]),
    row_by_row: (shapes((6, 5), (5, 4)), ["mm", "relu"]),
    row_kept_in_both_shapes: (shapes((6, 5), (5, 4)), ["mm", "relu", "reshape"]),
    parts_stacked: (shapes((2, 4), (2, 4), (2, 4)), ["stacked"]),
    parts_stacked_and_copied: (shapes((4, 2), (4, 2)), ["permute"] * 2 + ["stacked", "reshape"]),
    views_of_views: (shapes((6, 5), (5, 4)), ["mm", "as_strided"]),
    views_of_an_input: (shapes((6, 4)), ["as_strided"]),
    items: (shapes((6, 5), (5, 4)), ["mm", "as_strided", "as_strided"]),
}


COMPLEX_SUMS = parts_stacked, parts_stacked_and_copied
REAL = row_by_row, row_kept_in_both_shapes


@one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("fn", FIRES, ids=lambda fn: fn.__name__)
def test_a_rule_leaves_what_it_should(fn, dtype):
    given, expected = FIRES[fn]
    assert check(fn, *given(dtype)) == expected


@pytest.mark.parametrize("fn", [fn for fn in FIRES if fn not in REAL], ids=lambda fn: fn.__name__)
def test_complex_numbers_are_summed_as_they_were(fn):
    given, expected = FIRES[fn]
    assert (check(fn, *given(torch.complex64)) == expected) == (fn not in COMPLEX_SUMS)


def copy_put_out(x):
    y = copied(x.t())
    return [y, copied(y.t())]


def copy_read_again(x):
    y = copied(x.t())
    return [copied(y.t()), y * 2]


def parts_that_overlap(x, y):
    return [aten.slice_backward(x, [4, 4], 0, 0, 2, 1) + aten.slice_backward(y, [4, 4], 0, 1, 4, 1)]


def parts_with_a_gap(x, y):
    return [aten.select_backward(x, [3, 4], 0, 0) + aten.select_backward(y, [3, 4], 0, 1)]


def part_twice(x, y):
    part = aten.select_backward(x, [2, 4], 0, 0)
    return [part + aten.select_backward(y, [2, 4], 0, 1) + part]


def parts_in_steps(x, y):
    return [aten.slice_backward(x, [4, 4], 0, 0, 4, 2) + aten.slice_backward(y, [4, 4], 0, 1, 4, 2)]


def parts_scaled(x, y):
    parts = [aten.select_backward(v, [2, 4], 0, i) for i, v in enumerate((x, y))]
    return [torch.add(*parts, alpha=2)]


def parts_of_larger_memory(x):
    y = x * 2
    return [aten.select_backward(y[0], [2, 4], 0, 0) + aten.select_backward(y[3], [2, 4], 0, 1)]


def unsure_rows(x, y):
    return [torch.relu((x.t() + y).view(2, 2, 4)).view(4, 4)]


def broadcast_row(x, w, b):
    return [((x @ w).view(2, 3, 4) + b).view(6, 4)]


def views_of_an_unsure(x, y):
    return [(x.t() + y).view(2, 2, 4).transpose(0, 1)]


def of_no_elements(x):
    return [copied(copied(x.transpose(0, 1)).transpose(0, 1)), x.unsqueeze(0).transpose(1, 2)]


def written_in_place(x):
    y = copied(x.t())
    z = copied(y.t())
    return [z.add_(1)]


def conjugate(x):
    return [copied(copied(x.conj().t()).t())]


STAYS = {
    copy_put_out: [(2, 4)],
    copy_read_again: [(2, 4)],
    parts_that_overlap: [(2, 4), (3, 4)],
    parts_with_a_gap: [(4,), (4,)],
    part_twice: [(4,), (4,)],
    parts_in_steps: [(2, 4), (2, 4)],
    parts_scaled: [(4,), (4,)],
    parts_of_larger_memory: [(8, 4)],
    parts_joined: [(2, 4), (3, 4)],
    transposes: [(2, 3, 4), (3, 2, 4)],
    unsure_rows: [(4, 4), (4, 4)],
    broadcast_row: [(6, 5), (5, 4), (4,)],
    views_of_an_unsure: [(4, 4), (4, 4)],
    of_no_elements: [(0, 3, 4)],
}


@pytest.mark.parametrize("fn", STAYS, ids=lambda fn: fn.__name__)
def test_what_must_stay_stays(fn, monkeypatch):
    given = shapes(*STAYS[fn])(torch.float32)
    found = check(fn, *given)
    monkeypatch.setattr(emitting, "with_fewer_copies", lambda block: block)
    assert found == check(fn, *given)


def test_views_that_are_conjugates_stay():
    assert check(conjugate, tricky(3, 4, dtype=torch.complex64)).count("clone") == 2


def test_a_block_that_writes_stays():
    module = make_fx(written_in_place, tracing_mode="fake")(tricky(2, 4))
    body = [n for n in module.graph.nodes if n.op == "call_function"]
    block = Block("run", {"x": [next(iter(module.graph.nodes))]}, body, [[body[-1]]])
    assert emitting.with_fewer_copies(block) is block


@pytest.mark.parametrize("fn", [views_of_an_input, copy_of_a_copy, items], ids=lambda fn: fn.__name__)
def test_inputs_may_begin_anywhere_in_their_memory(fn):
    given = FIRES[fn][0](torch.float32)
    inputs = [torch.cat([x + 1, x])[len(x) :] for x in given]
    assert inputs[0].storage_offset() > 0
    assert check(fn, *given, inputs=inputs) == FIRES[fn][1]


def test_tracebacks_show_the_source():
    function = written_out(views_of_an_input, tricky(6, 4))
    with pytest.raises(TypeError) as caught:
        function([None])
    assert str(caught.traceback[-1].statement).strip() in function.source


def views_of_part_of_an_input(x):
    return [x.view(6, 2, 2)[1:, 1].transpose(0, 1)]


def test_an_input_whose_beginning_is_unknown_is_viewed_step_by_step():
    x = tricky(6, 4)
    assert "as_strided" not in check(views_of_part_of_an_input, x, inputs=[torch.cat([x, x])[6:]])


@one_in(3)
@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 4), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1), (2, 0, 1)], ids=str)
def test_dims_of_one_element(shape, order):
    def fn(x, y):
        z = copied(copied(x.permute(order)).permute(order) * 2).flatten()
        parts = [aten.select_backward(v, [2, *shape], 0, i) for i, v in enumerate((x, y))]
        wide = copied((parts[0] + parts[1]).transpose(0, 1))
        return [z, wide, (x + y).unsqueeze(0).transpose(0, 2).reshape(-1), x.sum([0], True).view(shape[1:])]

    check(fn, tricky(*shape), tricky(*shape))


def layer(batch_first=True, norm_first=False, activation="relu"):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation=activation
    )


def pieces(module):
    params = dict(module.named_parameters())
    piece = Traced(Stage(lambda p, x: torch.func.functional_call(module, p, (x,)), reads=(0,)), fallback=False)
    return piece, piece.prepare(params)


def differentiated(module, x, c, split):
    piece, prepared = pieces(module)
    sources = {0: flatten(x.detach().requires_grad_())}
    output, residuals, _ = piece.forward(prepared, None, sources, Microbatch(None, None), keep=True)
    if not split:
        weights, inputs = piece.backward(residuals, [c])
    else:
        inputs, deferred = piece.backward_input(residuals, [c])
        weights = piece.backward_weight(deferred)
    return [output.leaves[0].detach(), *weights, *inputs[0]]


class Computing(TorchDispatchMode):
    """The operands of what computes, by shape and strides."""

    NAMES = {"mm", "addmm", "native_layer_norm", "native_layer_norm_backward"}

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        given = [x for x in args if isinstance(x, torch.Tensor)]
        if (name in self.NAMES or "attention" in name) and not any(map(is_fake, given)):
            layouts = [(tuple(x.shape), x.stride()) for x in given]
            self.found[name, tuple(layouts)] += 1
        return func(*args, **(kwargs or {}))


LAYERS = [{}, {"batch_first": False}, {"norm_first": True}, {"activation": "gelu"}]


@one_in(3)
@combined(options=LAYERS, shape=[(2, 4, 16), (1, 4, 16), (3, 1, 16)], split=[False, True])
def test_a_layer_has_eager_bits_and_operands(options, shape, split, monkeypatch):
    module = layer(**options)
    x, c = torch.randn(shape), torch.randn(shape)
    params = [p for _, p in sorted(module.named_parameters())]
    given = x.clone().requires_grad_()
    output = module(given)
    wanted = [output.detach(), *torch.autograd.grad(output, [*params, given], c)]
    with Computing() as ours:
        found = differentiated(module, x, c, split)
    assert all(map(same, found, wanted))
    monkeypatch.setattr(emitting, "with_fewer_copies", lambda block: block)
    with Computing() as plain:
        differentiated(module, x, c, split)
    assert ours.found == plain.found
    assert sum(plain.found.values()) > 10


def test_a_layer_has_fewer_operations(monkeypatch):
    def count():
        piece, prepared = pieces(layer())
        sources = {0: flatten(torch.randn(2, 4, 16).requires_grad_())}
        _, residuals, _ = piece.forward(prepared, None, sources, Microbatch(None, None), keep=True)
        functions = residuals.functions
        blocks = functions.run, functions.first.fused, functions.first.input, functions.first.weight
        return [len(operations(block)) for block in blocks]

    ours = count()
    monkeypatch.setattr(emitting, "with_fewer_copies", lambda block: block)
    assert (ours, count()) == ([25, 34, 22, 12], [40, 63, 47, 16])


class Unlike:
    """What is no constant: `==` raises, or is true of anything, as it is of some containers of tensors."""

    def __init__(self, answer=None):
        self.answer = answer

    def __eq__(self, other):
        return self.answer if self.answer is not None else bool(torch.ones(2))

    __hash__ = None


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, True, False),
        ((1,), (True,), False),
        (0.0, -0.0, False),
        ((0.5, -0.0), (0.5, 0.0), False),
        (NAN, -NAN, True),
        ((2, "a", None, torch.float32), (2, "a", None, torch.float32), True),
        ((2,), (2, 2), False),
        (torch.Size([2, 3]), torch.Size([2, 3]), True),
        (torch.device("cpu"), torch.device("cpu"), True),
        (torch.float32, torch.float64, False),
        (torch.ones(2), torch.ones(2), False),
        ((torch.ones(2),), (torch.ones(2),), False),
        ((torch.ones(1),), (torch.ones(1),), False),
        (Unlike(), Unlike(), False),
        (Unlike(True), Unlike(True), False),
    ],
)
def test_functions_are_the_same_with_equal_constants_alone(one, other, expected):
    """Of what is no constant, the same object."""
    functions = [written_out(lambda x: [x * 2.5], torch.ones(2)) for _ in range(3)]
    for function, value in zip(functions, (one, other, one), strict=True):
        function.__globals__["constant"] = value
    assert emitting.are_same(functions[0], functions[1]) is expected
    assert emitting.are_same(functions[0], functions[2])
