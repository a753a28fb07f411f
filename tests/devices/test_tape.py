"""The CPU's graph: what is recorded runs again with the same bits on new values, or is refused with the line."""

import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fpipe.devices import CaptureError, Cpu, GraphReset, aside
from fpipe.devices.tape import Trial
from tests.support.jobs import differences

CONSTANT = torch.arange(4.0)
LSTM = nn.LSTM(4, 4, bias=False)


def views(x, w):
    parts = (x @ w).view(2, 2, 4).transpose(0, 1).unbind(1)
    return torch.cat([parts[1][:, 1:], parts[0][:, :3]], 1), x.t(), x[1].expand(3, 4)


def in_place(x, w):
    h = x.clone()
    h[:, 1].mul_(3.0)
    h.view(-1)[::2] += 1
    h.t().addmm_(w, w)
    return h


def into_out(x, w):
    out = torch.empty(4, 4)
    torch.mm(x, w, out=out)
    torch.neg(out[1], out=out[1])
    return out


def constants_overwritten(x, w):
    count, ones = torch.tensor(0.0), torch.ones(4)
    for row in x:
        count += row.sum()
        ones *= row
    return count, ones, torch.full((2,), 2.0) * count, CONSTANT * x


def uninitialised(x, w):
    empty = torch.empty(3, 4)
    empty[:2], empty[2] = x[:2], w[0]
    return empty, torch.zeros_like(x).add_(x)


def many_results(x, w):
    values, order = x.sort(dim=1)
    mean, variance = torch.var_mean(w, dim=0)
    return values, order, mean, variance, *torch.frexp(x)


def shapes_changed_in_place(x, w):
    h = (x @ w)[:2] + 1
    before = h * 2
    h.t_().unsqueeze_(0)
    h.mul_(3)
    return h, before, h.squeeze_(0).sum(1)


def recurrent(x, w):
    """Its kernel has another result without gradients."""
    w = w.detach().requires_grad_()
    params = {"weight_ih_l0": w.repeat(4, 1), "weight_hh_l0": w.repeat(4, 1) / 2}
    y, _ = torch.func.functional_call(LSTM, params, (x[:, None],))
    return y.detach(), *torch.autograd.grad(y.sum(), [w])


def indexing(x, w):
    rows = x.argsort(dim=0)[0]
    h = torch.zeros(4, 4)
    h[rows, torch.tensor([0, 1, 2, 3])] = x[0]
    return x[rows], h.index_add(0, rows, w), h.masked_fill(x > 0, 2.0), torch.where(x > 0, x, w)


def lists(x, w):
    each = torch._foreach_mul([x, w], 2.0)
    torch._foreach_add_(each, [w, x])
    return each


def numbers_of_other_kinds(x, w):
    z = torch.complex(x, w).conj()
    return z * 2, z.imag, (x > w).any(), x.double() @ w.double(), x.long().sum(), x.bfloat16() @ w.bfloat16()


def gradients(x, w):
    w = w.detach().requires_grad_()
    h = F.layer_norm(torch.tanh(x @ w), (4,))
    loss = F.cross_entropy(h, x.argmax(1)) + (h.expand(2, 4, 4) * h).sum() + w.sum()
    return loss.detach(), *torch.autograd.grad(loss, [w])


def attention(x, w):
    q = x.view(1, 1, 4, 4).requires_grad_()
    y = F.scaled_dot_product_attention(q, w.view(1, 1, 4, 4), q, is_causal=True)
    return y.detach(), *torch.autograd.grad(y.sum(), [q])


def statistics(x, w):
    mean, variance = torch.zeros(4), torch.ones(4)
    return F.batch_norm(x, mean, variance, training=True), mean, variance


def writes_to_an_argument(x, w):
    x.mul_(2).sub_(w)
    return x.sum(), x


def updates(x, w):
    step, mean, square = torch.tensor(0.0), torch.zeros(4, 4), torch.zeros(4, 4)
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False}
    for _ in range(2):
        step += 1
        torch._fused_adamw_([x], [w], [mean], [square], [], [step], maximize=False, **options)
    return step, mean


FUNCTIONS = [
    views,
    in_place,
    into_out,
    constants_overwritten,
    uninitialised,
    many_results,
    shapes_changed_in_place,
    recurrent,
    indexing,
    lists,
    numbers_of_other_kinds,
    gradients,
    attention,
    statistics,
    writes_to_an_argument,
    updates,
]


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 4, generator=generator) for _ in range(2)]


def recorded(function, arguments, *keys):
    graph = Cpu().new_graph(arguments, keys)
    with graph.capture():
        results = function(*arguments)
    return graph, results


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_replay_has_the_bits_of_a_call(function):
    arguments = values(0)
    graph, results = recorded(function, arguments)
    for seed in (1, 2, 0):
        expected_arguments = values(seed)
        torch._foreach_copy_(arguments, expected_arguments)
        graph.replay({})
        expected = function(*expected_arguments)
        assert differences(tuple(results), tuple(expected)) == []
        assert differences(arguments, expected_arguments) == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_capture_changes_no_argument(function):
    arguments = values(0)
    recorded(function, arguments)
    assert differences(arguments, values(0)) == []


def test_only_what_writes_to_memory_is_recorded():
    def function(x, w):
        return [(x @ w).unsqueeze_(0)[0].t(), torch.empty(3), x.view(2, 8)]

    with torch.no_grad():
        graph, _ = recorded(function, values(0))
    assert len(graph.calls) == 1


def test_a_replay_writes_into_the_memory_of_the_recorded_results():
    arguments = values(0)
    graph, (h,) = recorded(lambda x, w: [x @ w], arguments)
    place, before = h.data_ptr(), h.clone()
    arguments[0].mul_(2)
    graph.replay({})
    assert h.data_ptr() == place
    assert torch.equal(h, before * 2)


def test_a_tape_that_was_reset_is_not_replayed():
    graph, _ = recorded(lambda x, w: [x @ w], values(0))
    graph.reset()
    with pytest.raises(GraphReset, match="the tape was reset"):
        graph.replay({})


def test_a_replay_runs_no_python_of_the_function():
    calls = []
    graph, _ = recorded(lambda x, w: calls.append(0) or [x @ w], values(0))
    for _ in range(3):
        graph.replay({})
    assert len(calls) == 1


def test_a_value_of_the_host_is_that_of_the_capture():
    """As in a CUDA graph."""
    factors, arguments = [2.0], values(0)
    graph, (h,) = recorded(lambda x, w: [x * factors[0] + torch.tensor(factors[0])], arguments)
    factors[0] = 3.0
    graph.replay({})
    assert torch.equal(h, arguments[0] * 2 + 2)


def test_a_replay_records_no_gradient_and_casts_nothing():
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4)
    graph, (h,) = recorded(lambda x, w: [(x @ w).detach()], [x, weight])
    with torch.autocast("cpu"):
        graph.replay({})
    assert torch.equal(h, (x @ weight).detach())
    assert not h.requires_grad


def test_draws_follow_the_seeds_of_their_scopes():
    x = torch.ones(100)
    graph = Cpu().new_graph([x], ["a", "b"])
    with graph.capture():
        with graph.seeded("a"):
            a, more = F.dropout(x), torch.rand(3)
        with graph.seeded("nothing is drawn"):
            doubled = x * 2
        with graph.seeded("b"):
            b = torch.randn(2) + F.dropout(doubled).sum()
    state = torch.get_rng_state()
    for seeds in ({"a": 1, "b": 2}, {"a": 2**62, "b": 1}):
        graph.replay(seeds)
        torch.manual_seed(seeds["a"])
        assert differences((a, more), (F.dropout(x), torch.rand(3))) == []
        torch.manual_seed(seeds["b"])
        assert torch.equal(b, torch.randn(2) + F.dropout(x * 2).sum())
        torch.set_rng_state(state)
    graph.replay(seeds)
    assert torch.equal(torch.get_rng_state(), state)


GENERATOR = torch.Generator()
OUTSIDE = torch.zeros(4)


def seeds_itself(x):
    F.dropout(x)
    torch.manual_seed(0)
    return F.dropout(x)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x if x.sum() > 0 else -x, r"reads a tensor on the host, as a branch or \.item\(\) does"),
        (lambda x: x * x.sum().item(), r"reads a tensor on the host, as a branch or \.item\(\)"),
        (lambda x: x * x.tolist()[0][0], r"reads a tensor on the host, by tolist\(\)"),
        (lambda x: x * torch.tensor(x.numpy()), r"reads a tensor on the host, by numpy\(\)"),
        (lambda x: (str(x), x), r"reads a tensor on the host, by repr\(\)"),
        (lambda x: torch.equal(x, x), "reads a tensor on the host, by aten.equal"),
        (lambda x: x[x > 0], "the shape of a result depends on the values of tensors, by aten.index.Tensor"),
        (lambda x: x.nonzero(), "the shape of a result depends on the values of tensors, by aten.nonzero"),
        (lambda x: x.unique(), "the shape of a result depends on the values"),
        (lambda x: torch.empty(2).resize_(4, 4).copy_(x), "changes the memory of a tensor, by aten.resize_"),
        (lambda x: x.t_(), r"writes by aten.t_.default to a tensor from outside"),
        (lambda x: OUTSIDE.add_(1), r"writes by aten.add_.Tensor to a tensor from outside"),
        (lambda x: torch.add(x[0], 1, out=OUTSIDE), r"writes by aten.add.out to a tensor from outside"),
        (lambda x: x.to_sparse(), r"has a tensor of layout torch\.sparse_coo"),
        (lambda x: torch.randn(2, generator=GENERATOR), "draws from a generator of its own"),
        (seeds_itself, "seeds or restores the global generator"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_with_the_line(function, says):
    x = torch.randn(4, 4)
    for graph in (Cpu().new_graph([x], ["a"]), None):
        trial = Trial([x], [torch.default_generator])
        running = trial.running() if graph is None else graph.capture()
        scope = trial.seeded("a", 0) if graph is None else graph.seeded("a")
        with pytest.raises(CaptureError, match=says) as caught, running, scope:
            function(x)
        assert __file__ in {frame.filename for frame in traceback.extract_tb(caught.tb)}


@torch.library.custom_op("fpipe_tests::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("called a synchronizing CUDA operation")


@pytest.fixture
def debug_modes(monkeypatch):
    """The modes in which CUDA is set, which tells of a wait of the host; "warn" is the user's own."""
    modes = ["warn"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_a_wait_of_the_host_is_refused(debug_modes):
    x = torch.ones(2)

    def function():
        x.add_(1)  # its value is saved on the host
        with aside():  # fpipe's own work
            pass
        waits(x)

    says = r"it waits on the host for the device, as \.item\(\)"
    with pytest.raises(CaptureError, match=says), Trial([x], [torch.default_generator]).running():
        function()
    assert debug_modes == ["warn", "error", "default", "error", "default", "error", "warn"]
    assert x.tolist() == [1.0, 1.0]


def test_a_draw_outside_of_a_scope_is_refused():
    with pytest.raises(CaptureError, match=r"aten.bernoulli_.float, which need a seed .* pass rng="):
        recorded(lambda x, w: F.dropout(x), values(0))


def test_a_refused_function_has_changed_nothing():
    def function(x, w):
        x.zero_()
        w[0].add_(1)
        return x.sum().item()

    arguments, state = values(0), torch.get_rng_state()
    for tensors in (arguments, [arguments[0][:2], arguments[1]]):
        with pytest.raises(CaptureError), Trial(tensors, [torch.default_generator]).running():
            function(*tensors)
    assert differences(arguments, values(0)) == []
    assert torch.equal(torch.get_rng_state(), state)


def test_a_trial_knows_what_was_written_to_and_drawn():
    x, w, alias = *values(0), None
    alias = w[1:]
    trial = Trial([x, w, alias], [torch.default_generator])
    with trial.running():
        with trial.seeded((0, 1), 3):
            drawn = torch.rand(4)
        with trial.seeded((0, 2), 3):
            w[0].add_(drawn)
    assert (list(trial.saved), list(trial.drawn)) == ([1, 2], [(0, 1)])
    assert torch.equal(w[0], values(0)[1][0] + drawn)


@torch.library.custom_op("fpipe_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


def test_an_operator_of_another_shape_in_a_replay_is_an_error():
    """A custom operator need not say that its shapes depend on values."""
    x = torch.tensor([1.0, 1.0])
    graph, _ = recorded(lambda x: [positive(x)], [x])
    x[0] = -1
    with pytest.raises(CaptureError, match=r"positive.default gave \[2\] when recorded and \[1\] in a replay"):
        graph.replay({})


def test_a_module_is_recorded_whole():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    names = [name for name, _ in layer.named_parameters()]
    leaves = [p.detach().requires_grad_() for p in layer.parameters()]
    x = torch.randn(2, 3, 8)

    def function():
        y = torch.func.functional_call(layer, dict(zip(names, leaves, strict=True)), (x,))
        return y.detach(), *torch.autograd.grad(y.square().sum(), leaves)

    graph = Cpu().new_graph([x, *leaves], ["layer"])
    with graph.capture(), graph.seeded("layer"):
        results = function()
    for seed in range(3):
        with torch.no_grad():
            torch._foreach_add_([x, *leaves], 0.1)
        graph.replay({"layer": seed})
        torch.manual_seed(seed)
        assert differences(results, function()) == []
