"""Low-rank adapters: the function of W + alpha / rank · B A, its gradients, and never a gradient of W's size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fpipe
from fpipe import Pipeline, Placement, handlers, interop, transforms
from fpipe.interop.adapters.adapted import Adapted
from fpipe.profiling.live_bytes import peak_bytes
from tests.support import cases, jobs, replica_jobs
from tests.support.combinations import few, one_in, thorough
from tests.support.replica_jobs import Grid
from tests.support.shards import whole
from tests.support.trees import Pair


class Attention(nn.Module):
    """An embedding, whose adapter is added up, and torch's attention, which calls F.linear."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(10, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        h = self.embedding(x)
        return self.attention(h, h, h, need_weights=False)[0]


class Conv1D(nn.Module):
    """As Hugging Face's: its weight is (inputs, outputs)."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) / 2), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(x.shape).tanh()


def chain(width=4):
    def layer(p, x):
        return torch.tanh(x @ p["w"] + p["b"])

    params = {s: {"w": torch.randn(width, width), "b": torch.randn(width)} for s in range(4)}
    return Pipeline([layer] * 4, cases.mse), params, torch.randn(6, width), torch.randn(6, width)


def modules():
    parts = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 4))
    return *interop.from_modules(parts, at=[2, 3], loss=F.mse_loss), torch.randn(6, 4), torch.randn(6, 4)


def exported():
    parts = nn.Sequential(nn.Linear(4, 8), Conv1D(8), nn.Linear(8, 4), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    return *interop.split(parts, at=["1", "2"], example=(x[:3],), loss=F.mse_loss), x, torch.randn(6, 4)


def attention():
    pipeline, params = interop.from_modules([Attention(), nn.Linear(4, 4)], loss=F.mse_loss)
    return pipeline, params, torch.randint(0, 10, (6, 5)), torch.randn(6, 5, 4)


@one_in(3)
@pytest.mark.filterwarnings("error:.*traced")
@pytest.mark.parametrize(
    ("model", "at", "options", "trained"),
    [
        (chain, "w", {"fan_in_fan_out": True}, None),
        (chain, lambda path, x: path[0] > 1 and x.ndim == 2, {"alpha": 2, "fan_in_fan_out": True}, {2, 3}),
        (modules, ["0.weight", "3.weight"], {}, {0, 2}),
        (exported, "*.weight", {"alpha": 1}, None),
        (attention, lambda path, x: x.ndim == 2, {}, None),
    ],
    ids=["matmul", "two stages", "modules", "exported", "attention"],
)
def test_adapters(model, at, options, trained):
    torch.manual_seed(0)
    pipeline, params, batch, target = model()
    expected = pipeline(params, batch, target)
    adapted, new = interop.lora(pipeline, params, rank=2, at=at, **options)
    torch.testing.assert_close(adapted(new, batch, target), expected)  # B is zero
    assert adapted.trained == trained
    new = {s: {k: torch.randn_like(x) / 4 if ".lora" in k else x for k, x in tree.items()} for s, tree in new.items()}
    stages = len(pipeline.stages)
    plan = adapted.plan(Placement.loop(stages), 2)
    results = [
        fpipe.value_and_grad(adapted, "zb-h1", plan, handler=handler, autodiff=way)(new, batch, target)
        for handler, way in ((handlers.Reference(), "auto"), (handlers.Local(), "graph"), (handlers.Local(), "eager"))
    ]
    assert jobs.differences(results[1], results[0]) == []
    assert jobs.differences(results[2], results[0]) == []
    without, merged = interop.merge_lora(adapted, new)
    assert {s: [*tree] for s, tree in merged.items()} == {s: [*tree] for s, tree in params.items()}
    torch.testing.assert_close(without(merged, batch, target), results[0][0])

    def dense(adapters):
        """The plain pipeline of W + scale · B A, put together."""
        trees = {s: dict(tree) for s, tree in params.items()}
        for s, tree in adapters.items():
            for name in [name.removesuffix(".lora_A") for name in tree if name.endswith(".lora_A")]:
                change = options.get("alpha", 16) / 2 * tree[f"{name}.lora_B"] @ tree[f"{name}.lora_A"]
                trees[s][name] = trees[s][name] + (change.T if "fan_in_fan_out" in options else change)
        return pipeline(trees, batch, target)

    plain = torch.func.grad(dense)({s: {k: x for k, x in tree.items() if ".lora" in k} for s, tree in new.items()})
    for s, tree in results[0][1].items():
        assert {name for name, x in tree.items() if x is not None} == plain[s].keys()
        for name, x in plain[s].items():
            torch.testing.assert_close(tree[name], x, rtol=1e-3, atol=1e-5)


def adapted(model, at, **options):
    """(pipeline, params, batch, target) with adapters that are not zero."""
    torch.manual_seed(0)
    pipeline, params, batch, target = model()
    pipeline, params = interop.lora(pipeline, params, rank=2, at=at, **options)
    new = {
        s: {k: torch.randn_like(x) / 4 if ".lora" in k else x for k, x in tree.items()} for s, tree in params.items()
    }
    return pipeline, new, batch, target


def differing(pipeline, *arguments, calls=1, **options):
    """Where a step, after as many calls, differs from the reference's."""
    plan, reference = pipeline.plan(Placement.loop(len(pipeline.stages)), 2), handlers.Reference()
    shared = {name: x for name, x in options.items() if name in ("has_aux", "reduction")}
    expected = fpipe.value_and_grad(pipeline, "zb-h1", plan, handler=reference, **shared)(*arguments)
    step = fpipe.value_and_grad(pipeline, "zb-h1", plan, handler=handlers.Local(), **options)
    return [d for _ in range(calls) for d in jobs.differences(step(*arguments), expected)]


@thorough
@pytest.mark.filterwarnings("error:.*eager autograd")
def test_adapters_within_transforms():
    pipeline, params, batch, target = adapted(chain, "w", fan_in_fan_out=True)
    vector = {s: {k: torch.randn_like(x) if ".lora" in k else None for k, x in t.items()} for s, t in params.items()}
    tangents = transforms.dual(params, vector)
    assert differing(transforms.jvp(pipeline), tangents, batch, target, has_aux=True) == []
    assert differing(transforms.hvp(pipeline), tangents, batch, target) == []
    members = {s: {k: torch.stack([x, -x]) if ".lora" in k else x for k, x in t.items()} for s, t in params.items()}
    dims = {s: {k: 0 if ".lora" in k else None for k in tree} for s, tree in params.items()}
    ensemble = transforms.vmap(pipeline, (dims, None, None))
    assert differing(ensemble, members, batch, target, has_aux=True) == []
    rows = {"has_aux": True, "reduction": "sum"}
    assert differing(transforms.per_sample(pipeline), params, batch, target, **rows) == []

    trained = {s: {k: x for k, x in tree.items() if ".lora" in k} for s, tree in params.items()}
    plan = pipeline.plan(Placement.loop(4), 2)
    step = fpipe.value_and_grad(transforms.hvp(pipeline), "1f1b", plan, handler=handlers.Local())
    _, grads = step(tangents, batch, target)
    along = {s: {k: x for k, x in tree.items() if ".lora" in k} for s, tree in vector.items()}

    def loss(adapters):
        return pipeline({s: {**params[s], **adapters[s]} for s in params}, batch, target)

    gradients, products = torch.func.jvp(torch.func.grad(loss), (trained,), (along,))
    for s, tree in products.items():
        for k, product in tree.items():
            # float32: torch.func sums over the whole batch at once, forward over reverse
            torch.testing.assert_close(tuple(grads[s][k]), (product, gradients[s][k]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capture", few([True, "pieces"], [True]))
def test_adapters_in_captured_steps(capture):
    assert differing(*adapted(exported, "*.weight"), calls=3, capture=capture) == []


def test_adapters_under_autocast():
    pipeline, params, batch, target = adapted(chain, "w", fan_in_fan_out=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert differing(pipeline, params, batch, target) == []
        loss = pipeline(params, batch, target)
    step = fpipe.value_and_grad(pipeline, "1f1b", pipeline.plan(Placement.loop(4), 2), handler=handlers.Local())
    exact, grads = step(params, batch, target)
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.0)
    assert loss != exact
    assert {x.dtype for tree in grads.values() for x in tree.values() if x is not None} == {torch.float32}


def test_a_step_of_an_optimizer_changes_the_adapters_alone():
    torch.manual_seed(0)
    pipeline, params, batch, target = chain()
    pipeline, params = interop.lora(pipeline, params, rank=2, at="w", fan_in_fan_out=True)
    adam = interop.optimizer(torch.optim.Adam, lr=0.1)
    step = fpipe.train_step(pipeline, "1f1b", pipeline.plan(Placement.loop(4), 2), adam, handler=handlers.Local())
    new, state, first = step(params, adam.init(params), batch, target)
    new, state, second = step(new, state, batch, target)
    assert second < first
    assert {name for s in state for name in state[s] if state[s][name]} == {"w.lora_A", "w.lora_B"}
    assert all(new[s][name] is params[s][name] for s in params for name in ("w", "b"))


def in_processes(rank, grid):
    """Where two steps of a grid of processes, with params in shards if it has replicas, differ from those of one."""
    torch.manual_seed(0)
    pipeline, params, *_ = chain()
    batch, target = torch.randn(2, 8, 4)
    pipeline, params = interop.lora(pipeline, params, rank=2, at=lambda path, x: path[0] and x.ndim == 2)
    plan = pipeline.plan(Placement.loop(grid.ranks, chunks=4 // grid.ranks), 2, replicas=grid.replicas)
    adamw, own, sharded = interop.optimizer(torch.optim.AdamW, lr=0.1), replica_jobs.handler(grid), grid.replicas > 1
    rows = slice(rank * 4, rank * 4 + 4) if sharded else slice(None)
    options = {"resident": 1} if sharded else {}
    step = fpipe.train_step(pipeline, "looped-bfs", plan, adamw, handler=own, **options)
    alone = fpipe.train_step(pipeline, "looped-bfs", plan, adamw, handler=handlers.Local())
    placed = interop.fsdp(params, grid.over) if sharded else pipeline.params_on(params, plan, own)
    ours, theirs = (placed, adamw.init(placed)), (params, adamw.init(params))
    for _ in range(2):
        *ours, loss = step(*ours, batch[rows], target[rows])
        *theirs, expected = alone(*theirs, batch, target)
    assert not torch.equal(theirs[0][3]["w.lora_A"], params[3]["w.lora_A"])
    expected = [{stage: tree for stage, tree in trees.items() if stage in placed} for trees in theirs], expected
    return jobs.differences((whole(ours), loss), expected)


@thorough
@pytest.mark.parametrize("text", few(["dp1 pp2", "dp2 pp1"], ["dp2 pp1"]))
def test_processes_have_the_bits_of_one(text, pools):
    assert pools(2).run(in_processes, Grid(text)) == [[], []]


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_no_gradient_of_the_size_of_a_matrix_is_computed(fan_in_fan_out):
    width, rows = 256, 8

    def layer(p, x):
        return torch.tanh(F.linear(x, p["w"]) if not fan_in_fan_out else x @ p["w"])

    params, x = {0: {"w": torch.eye(width)}}, torch.ones(rows, width)
    pipeline = Pipeline([layer], cases.mse)
    adapted, new = interop.lora(pipeline, params, rank=2, at="w", fan_in_fan_out=fan_in_fan_out)
    sizes = []
    for each, tree in ((pipeline, params), (adapted, new)):
        step = fpipe.value_and_grad(each, "gpipe", each.plan(Placement.loop(1), 2), handler=handlers.Local())
        step(tree, x, x)
        sizes.append(peak_bytes(lambda step=step, tree=tree: step(tree, x, x)))
    assert sizes[0] > width * width * 4
    assert sizes[1] < width * width * 4 / 4


class WithAdapter(nn.Module):
    """A layer as PEFT wraps it: the frozen one, and a narrow way beside it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 8


@pytest.mark.parametrize("cut", ["from_modules", "split"])
def test_modules_with_adapters_of_their_own(cut):
    """As of peft.get_peft_model: what is trained is found by requires_grad."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Tanh(), WithAdapter(nn.Linear(8, 4)))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    if cut == "split":
        pipeline, params = interop.split(module, at=["1", "2"], example=(x[:3],), loss=F.mse_loss)
    else:
        pipeline, params = interop.from_modules(module, at=[1, 2], loss=F.mse_loss)
    plan = pipeline.plan(Placement.loop(3), 2)
    assert plan.trained == {2}
    loss, grads = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handlers.Local())(params, x, y)
    expected = F.mse_loss(module(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        gradient = grads[{"0": 0, "2": 2}[name[0]]][name]
        assert (gradient is None) == (parameter.grad is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, parameter.grad)


def test_adapters_are_the_same_on_every_rank_and_differ_by_name():
    pipeline, params, *_ = chain()
    _, whole = interop.lora(pipeline, params, rank=2, at="w")
    meta = {s: tree if s == 3 else {k: x.to("meta") for k, x in tree.items()} for s, tree in params.items()}
    _, part = interop.lora(pipeline, meta, rank=2, at="w")
    assert torch.equal(whole[3]["w.lora_A"], part[3]["w.lora_A"])
    assert not torch.equal(whole[3]["w.lora_A"], whole[2]["w.lora_A"])
    assert part[2]["w.lora_A"].is_meta
    _, other = interop.lora(pipeline, params, rank=2, at="w", seed=1)
    assert not torch.equal(whole[3]["w.lora_A"], other[3]["w.lora_A"])
    assert whole[3]["w"] is params[3]["w"]
    bound = 1 / 4**0.5  # of nn.Linear, of 4 inputs
    assert 0 < whole[3]["w.lora_A"].abs().max() < bound


def test_names_are_those_of_the_module_and_its_adapters():
    torch.manual_seed(0)
    pipeline, params, *_ = exported()
    adapted, new = interop.lora(pipeline, params, rank=2, at="0.weight")
    assert [*interop.to_state_dict(adapted, new)][-2:] == ["0.weight.lora_A", "0.weight.lora_B"]
    again, _ = interop.from_state_dict(adapted, interop.to_state_dict(adapted, new))
    assert jobs.differences(again, new) == []
    assert "24      40" in adapted.describe(new)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {},
            {"at": "b"},
            r"params\[0\]\['b'\] can't have an adapter: it is float32\[4\], and an adapter is of a matrix",
        ),
        ({}, {"at": "v"}, "no parameter is called 'v'"),
        ({}, {"at": "w", "rank": 0}, "the rank of adapters must be at least 1, not 0"),
        ({0: {"p": Pair(torch.eye(4), {"b": torch.ones(4)})}}, {"at": "p.*"}, "it is not in a dict by a name"),
    ],
)
def test_a_param_that_can_have_no_adapter(change, options, message):
    pipeline, params, *_ = chain()
    with pytest.raises(ValueError, match=message):
        interop.lora(pipeline, {**params, **change}, **options)


def test_shared_params_and_second_adapters_are_refused():
    pipeline, params, *_ = chain()
    tied = Pipeline(pipeline.stages, cases.mse, ties={(3, "w"): (0, "w")})
    del params[3]["w"]
    with pytest.raises(ValueError, match=r"params\[0\]\['w'\] can't have an adapter: several stages share it"):
        interop.lora(tied, params, at="w")
    adapted, new = interop.lora(tied, params, at=lambda path, x: path == (1, "w"))
    assert adapted.trained == {1}
    with pytest.raises(ValueError, match="its stage has adapters already: merge_lora puts them"):
        interop.lora(adapted, new, at=lambda path, x: path == (1, "w"))


def test_an_adapted_matrix_is_what_it_stands_for():
    torch.manual_seed(0)
    base, left, right, x = torch.randn(3, 5), torch.randn(3, 2), torch.randn(2, 5), torch.randn(4, 3)
    w, whole = Adapted(base, left, right, 0.5), base + 0.5 * left @ right
    assert (w.shape, w.dtype, w.ndim, w.size(0)) == ((3, 5), torch.float32, 2, 3)
    assert repr(w) == "Adapted((3, 5), rank=2)"
    for function in (
        lambda w: x @ w,
        lambda w: torch.matmul(x, w),
        lambda w: F.linear(x, w.T, torch.ones(5)),
        lambda w: F.linear(x, w.transpose(0, -1)),
        lambda w: torch.addmm(torch.ones(5), x, w),
        lambda w: torch.addmm(torch.ones(5), x, w, beta=2, alpha=3),
        lambda w: torch.mm(x, w.t().mT),
        lambda w: w.permute(1, 0) @ x.T[:3],
        lambda w: w.permute(0, 1) + w.transpose(1, 1),
        lambda w: torch.einsum("ti,io->to", x, w),
        lambda w: F.embedding(torch.tensor([0, 2]), w),
        lambda w: w * w,
        lambda w: torch.stack([w, w]).sum(0),
        lambda w: torch.ops.aten.linear.default(x, torch.ops.aten.t.default(w)),
    ):
        torch.testing.assert_close(function(w), function(whole))
