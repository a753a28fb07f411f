"""Optimizers of torch as pure functions, against torch itself."""

import copy
import functools
import itertools
import math

import optree
import pytest
import torch
from torch import nn

import fpipe
from benchmarks import optim
from fpipe import Placement, handlers, interop, schedules
from fpipe.stages.sharding import is_dtensor
from tests.support import cases, jobs
from tests.support.combinations import ALL, few, sample, thorough
from tests.support.jobs import differences
from tests.support.shards import mesh_of, values, whole

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adafactor, {"lr": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_an_optimizer_gives_torchs_bits_and_changes_nothing(kind, options):
    torch.manual_seed(0)
    params = {0: {"w": torch.randn(3, 3), "b": torch.randn(3)}, 2: {"w": torch.randn(3), "n": torch.arange(3)}}
    own = [params[0]["b"].clone(), params[0]["w"].clone(), params[2]["w"].clone()]
    theirs = kind([p.requires_grad_() for p in own], **options)
    init, update = interop.optimizer(kind, **options)
    state = init(params)
    for i in range(4):
        grads = [torch.randn_like(p) for p in own]
        for p, g in zip(own, grads, strict=True):
            p.grad = g
        theirs.step()
        given = {0: {"w": grads[1], "b": grads[0]}, 2: {"w": grads[2], "n": None}}
        before = copy.deepcopy((given, state, params))
        new_params, new_state = update(given, state, params)
        assert differences((given, state, params), before) == []
        params, state = new_params, new_state
        found = [params[0]["b"], params[0]["w"], params[2]["w"]]
        assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True)), i
    assert state[2]["n"] == {}
    assert not params[0]["w"].requires_grad


def test_options_hold_for_one_update():
    init, update = interop.optimizer(torch.optim.SGD, lr=1.0)
    params, grads = {0: torch.zeros(1)}, {0: torch.ones(1)}
    state = init(params)
    assert update(grads, state, params, lr=0.25)[0][0] == -0.25
    assert update(grads, state, params)[0][0] == -1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_learning_rate_may_be_a_tensor(kind):
    params, grads = {0: {"w": torch.ones(3), "b": torch.ones(1)}}, {0: {"w": torch.arange(3.0), "b": torch.ones(1)}}
    of_vectors = (lambda path, p: path[1] == "b", {"lr": lambda lr: lr / 10})
    init, update = interop.optimizer(kind, lr=0.5, fused=True, groups=[of_vectors])
    number, tensor = (update(grads, init(params), params, lr=lr) for lr in (0.25, torch.tensor(0.25)))
    assert differences(tensor, number) == []
    init, update = interop.optimizer(kind, lr=torch.tensor(0.25), fused=True, groups=[of_vectors])
    assert differences(update(grads, init(params), params), number) == []
    with pytest.raises(TypeError, match=f"{kind.__name__} has no option learning_rate"):
        update(grads, init(params), params, learning_rate=torch.tensor(0.25))


def test_an_optimizer_with_a_closure_is_refused():
    with pytest.raises(TypeError, match="LBFGS"):
        interop.optimizer(torch.optim.LBFGS)


def test_an_optimizer_of_sparse_gradients_alone_is_refused():
    with pytest.raises(TypeError, match="SparseAdam takes sparse gradients alone"):
        interop.optimizer(torch.optim.SparseAdam)


@pytest.mark.parametrize(
    ("gradient", "says"),
    [
        (torch.zeros(2), r"is float32\[2\] on cpu, and its parameter float32\[3\] on cpu: grads go with the params"),
        (torch.zeros(3, dtype=torch.float64), r"is float64\[3\] on cpu, and its parameter float32\[3\] on cpu"),
        (torch.zeros(3, device="meta"), r"is float32\[3\] on meta, and its parameter float32\[3\] on cpu"),
        (0.0, r"is 0\.0, and its parameter float32\[3\] on cpu"),
    ],
    ids=["shape", "dtype", "device", "number"],
)
def test_gradients_of_another_shape_or_dtype(gradient, says):
    init, update = interop.optimizer(torch.optim.SGD, lr=1.0)
    params = {0: {"v": torch.zeros(2)}, 1: {"w": torch.zeros(3)}}
    with pytest.raises(ValueError, match=rf"^grads\[1\]\['w'\] {says}"):
        update({0: {"v": torch.zeros(2)}, 1: {"w": gradient}}, init(params), params)


def test_gradients_of_another_structure():
    init, update = interop.optimizer(torch.optim.SGD, lr=1.0)
    params = {0: {"w": torch.zeros(1)}}
    with pytest.raises(ValueError, match="grads has another structure than params"):
        update({0: {"v": torch.zeros(1)}}, init(params), params)


def grown(seed=0):
    """Parameters, and twenty steps of gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {0: {"w": (5, 7), "b": (7,)}, 1: {"w": (7, 3), "b": (3,), "frozen": (2,)}}
    params = {s: {n: torch.randn(*size, generator=generator) for n, size in tree.items()} for s, tree in shapes.items()}
    steps = []
    for _ in range(20):
        grads = optree.tree_map(lambda p: torch.randn(p.shape, generator=generator), params)
        grads[1]["frozen"] = None
        steps.append(grads)
    return params, steps


def torchs(params, steps, kind, groups=None, rates=(), **options):
    """The same by an optimizer of torch's own."""
    own = optree.tree_map(lambda p: p.clone().requires_grad_(), params)
    leaves = optree.tree_leaves(own)
    stepper = kind(groups(own) if groups else leaves, **options)
    for i, grads in enumerate(steps):
        for p, g in zip(leaves, optree.tree_leaves(grads, none_is_leaf=True), strict=True):
            p.grad = g
        for group in stepper.param_groups:
            group["lr"] = rates[i] if rates else group["lr"]
        stepper.step()
    return optree.tree_map(torch.Tensor.detach, own)


KERNELS = [{}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_twenty_steps_of_adamw_have_torchs_bits(kernel, donate):
    params, steps = grown()
    expected = torchs(params, steps, torch.optim.AdamW, lr=0.1, **kernel)
    init, update = interop.optimizer(torch.optim.AdamW, lr=0.1, donate=donate, **kernel)
    state = init(params)
    for grads in steps:
        params, state = update(grads, state, params)
    assert differences(params, expected) == []
    assert state[0]["w"]["step"] == 20
    assert state[1]["frozen"] == {}


def test_fused_kernels_are_the_ones_that_run():
    params, (grads, *_) = grown()
    init, update = interop.optimizer(torch.optim.AdamW, fused=True)
    with torch.profiler.profile() as profile:
        update(grads, init(params), params)
    assert "aten::_fused_adamw_" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_what_is_donated_is_where_the_new_values_lie(kind, options):
    params, steps = grown()
    expected = torchs(params, steps[:3], kind, **options)
    init, update = interop.optimizer(kind, donate=True, **options)
    params, state = update(steps[0], init(params), params)
    for grads in steps[1:3]:
        before = copy.deepcopy(grads)
        given = [leaf.data_ptr() for leaf in optree.tree_leaves((params, state)) if isinstance(leaf, torch.Tensor)]
        params, state = update(grads, state, params)
        found = [leaf.data_ptr() for leaf in optree.tree_leaves((params, state)) if isinstance(leaf, torch.Tensor)]
        assert found == given
        assert differences(grads, before) == []
    assert differences(params, expected) == []
    assert not params[0]["w"].requires_grad


def test_a_schedule_is_a_function_of_the_step():
    params, steps = grown()
    rates = [0.1 * min(1, (i + 1) / 5) * (1 + math.cos(math.pi * i / 20)) / 2 for i in range(20)]
    expected = torchs(params, steps, torch.optim.AdamW, rates=rates, lr=1.0)
    init, update = interop.optimizer(torch.optim.AdamW, lr=1.0)
    state = init(params)
    for i, grads in enumerate(steps):
        params, state = update(grads, state, params, lr=rates[i])
    assert differences(params, expected) == []


def test_groups_have_options_of_their_own():
    params, steps = grown()

    def groups(own):
        decaying = [own[s]["w"] for s in own]
        rest = [p for p in optree.tree_leaves(own) if all(p is not q for q in decaying)]
        return [{"params": decaying}, {"params": rest, "weight_decay": 0.0}]

    expected = torchs(params, steps, torch.optim.AdamW, groups, lr=0.1, weight_decay=0.5)
    asked = []

    def bare(path, parameter):
        asked.append(path)
        return parameter.ndim < 2

    options = {"groups": [(bare, {"weight_decay": 0.0}), (lambda path, p: True, {"weight_decay": 0.5})]}
    init, update = interop.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.7, **options)
    state = init(params)
    for grads in steps:
        params, state = update(grads, state, params)
    assert differences(params, expected) == []
    assert set(asked) == {(0, "b"), (0, "w"), (1, "b"), (1, "w")}  # what has no gradient is in no group


def test_a_groups_rate_follows_the_schedule_as_a_function_of_it():
    params, steps = grown()
    rates = [0.1 / (i + 1) for i in range(20)]
    leaves = optree.tree_map(lambda p: p.clone().requires_grad_(), params)
    stepper = torch.optim.AdamW([{"params": [leaves[s][n]]} for s in leaves for n in leaves[s] if n != "frozen"])
    slow = {id(leaves[s]["b"]) for s in leaves}
    for rate, grads in zip(rates, steps, strict=True):
        for leaf, gradient in zip(
            optree.tree_leaves(leaves), optree.tree_leaves(grads, none_is_leaf=True), strict=True
        ):
            leaf.grad = gradient
        for group in stepper.param_groups:
            group["lr"] = rate / 10 if id(group["params"][0]) in slow else rate
        stepper.step()
    vectors = (lambda path, p: path[1] == "b", {"lr": lambda lr: lr / 10})
    init, update = interop.optimizer(torch.optim.AdamW, groups=[vectors])
    state = init(params)
    for rate, grads in zip(rates, steps, strict=True):
        params, state = update(grads, state, params, lr=rate)
    assert differences(params, optree.tree_map(torch.Tensor.detach, leaves)) == []


def test_a_groups_function_is_of_the_optimizers_default_where_nothing_else_is_given():
    init, update = interop.optimizer(torch.optim.SGD, groups=[(lambda path, p: True, {"lr": lambda lr: lr * 1000})])
    params = {0: torch.zeros(1)}
    assert update({0: torch.ones(1)}, init(params), params)[0][0] == -1  # SGD's default is 1e-3


def test_gradients_of_several_steps_add_up_to_those_of_one_large_batch():
    torch.manual_seed(0)
    modules = [nn.Linear(4, 6), nn.Linear(6, 4)]
    modules[0].bias.requires_grad_(False)
    pipeline, params = interop.from_modules(modules, loss=lambda y, t: (y - t).square().sum())
    params = optree.tree_map(torch.Tensor.double, params)
    x, y = torch.randn(24, 4, dtype=torch.float64), torch.randn(24, 4, dtype=torch.float64)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), reduction="sum")
    parts = [step(params, x[i : i + 8], y[i : i + 8])[1] for i in (0, 8, 16)]
    total = functools.reduce(lambda a, b: optree.tree_map(torch.add, a, b, namespace="fpipe"), parts)
    _, whole = step(params, x, y)
    assert total[0]["bias"] is None
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)


def trained(case, schedule, plan, handler, steps=20):
    """Parameters after some steps, on the ranks that are played here."""
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handler)
    params, batch, target = case.params, case.batch, case.target
    if len(ranks := handler.ranks(plan)) == 1 < plan.ranks:
        params, batch, target, _ = cases.own(case, plan, *ranks)
    init, update = interop.optimizer(torch.optim.AdamW, lr=0.05, donate=True)
    params = optree.tree_map(torch.clone, params)
    state = init(params)
    for _ in range(steps):
        _, grads = step(params, batch, target)
        params, state = update(grads, state, params)
    return params


def trained_on(rank, schedule, ranks):
    case, generator, plan = cases.make("tied", schedule, ranks, 4)
    return trained(case, generator, plan, jobs.handler())


@thorough
def test_tied_entries_stay_the_same_in_bits_on_every_rank(pools):
    case, _, plan = cases.make("tied", "one_f_one_b", 4, 4)
    expected = trained(case, schedules.gpipe, plan, handlers.Local())
    found = pools(4).run(trained_on, "one_f_one_b", 4)
    assert [rank for rank, params in enumerate(found) if 0 in params] == [0, 3]
    for params in found:
        assert differences(params, {s: {n: expected[s][n] for n in tree} for s, tree in params.items()}) == []


def test_twenty_steps_are_those_of_the_unsplit_model():
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Tanh()) for _ in range(4)]
    modules[3][0].weight = modules[0][0].weight
    pipeline, params = interop.from_modules(copy.deepcopy(modules), loss=cases.mse)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    case = cases.Case(pipeline, params, x, y)
    found = trained(case, schedules.zb_v, pipeline.plan(Placement.v(2), 4), handlers.Local())
    whole = nn.Sequential(*modules)
    stepper = torch.optim.AdamW(whole.parameters(), lr=0.05)
    for _ in range(20):
        stepper.zero_grad()
        cases.mse(whole(x), y).backward()
        stepper.step()
    expected = {s: {n: modules[s].get_parameter(n).detach() for n in tree} for s, tree in params.items()}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_torchopt_works_on_our_trees():
    torchopt = pytest.importorskip("torchopt", reason="the package torchopt is not installed")
    params, steps = grown()
    del params[1]["frozen"]
    steps = [{**grads, 1: {n: g for n, g in grads[1].items() if g is not None}} for grads in steps]
    expected = torchs(params, steps, torch.optim.Adam, lr=0.1)
    adam = torchopt.adam(lr=0.1)
    state = adam.init(params)
    for grads in steps:
        updates, state = adam.update(grads, state, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    torch.testing.assert_close(params, expected)


def test_a_donated_update_takes_no_more_memory_than_torchs_step():
    found = optim.row("fused", 2, 64, torch.device("cpu"), 1)
    peaks, parameters = found["peak_bytes"], found["parameter_bytes"]
    assert peaks["donated"] <= peaks["torch"] + 64  # a rate as a tensor, for one
    assert peaks["donated"] < parameters / 10
    assert 2.9 * parameters < peaks["pure"] < 3.1 * parameters


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_of_the_cpu_goes_on_by_fused_kernels_on_a_gpu(donate):
    params, steps = grown()
    expected = torchs(params, steps, torch.optim.AdamW, lr=0.1)
    init, update = interop.optimizer(torch.optim.AdamW, lr=0.1, donate=donate)
    state = init(params)
    for grads in steps[:10]:
        params, state = update(grads, state, params)

    def moved(tree):
        return optree.tree_map(lambda x: x.cuda() if x.ndim else x, tree)  # counts of steps stay with the host

    params, state = moved(params), moved(state)
    for grads in steps[10:]:
        params, state = update(moved(grads), state, params, fused=True)
    torch.testing.assert_close(optree.tree_map(torch.Tensor.cpu, params), expected)


# Sharded


ELEMENTWISE = [
    *((kind, options) for kind, options in OPTIMIZERS if kind is not torch.optim.Adafactor),
    (torch.optim.Adamax, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.1, "fused": True, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "fused": True, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    (torch.optim.NAdam, {"foreach": True}),
]


def numbers(seed, fused):
    """A tree whose rows no number of processes divides, with a scalar and a plain leaf.

    On the CPU a fused kernel rounds the numbers behind the last whole vector otherwise; then rows are whole vectors.
    """
    columns = 16 if fused else 19
    vector = {} if fused else {"b": values(19, seed=seed + 1)}
    return {
        0: {"w": values(37, columns, seed=seed), "scale": values(seed=seed + 2), **vector},
        1: {"few": values(1, 32, seed=seed + 3), "frozen": values(3, seed=seed), "plain": values(6, 5, seed=seed + 4)},
    }


def placed(tree, mesh):
    sharded = interop.fsdp(tree, mesh)
    return {**sharded, 1: {**sharded[1], "plain": tree[1]["plain"]}}


def updates(pair, place, donate, fused):
    """Params and state after some updates, and where these changed arguments that were not donated."""
    params, changed = place(numbers(0, fused)), []
    state = pair.init(params)
    for i in range(3):
        grads = place(numbers(10 * i + 10, fused))
        grads[1]["frozen"] = None
        before = None if donate else copy.deepcopy(whole((grads, state, params)))
        new = pair.update(grads, state, params)
        changed += [] if donate else differences(whole((grads, state, params)), before)
        params, state = new
    return params, state, changed


def sharded_updates(rank, shape):
    """Where sharded updates differ from unsharded ones, in bits or in placement, by optimizer."""
    mesh, wrong = mesh_of(*shape), []
    for number, ((kind, options), donate) in enumerate(itertools.product(ELEMENTWISE, (False, True))):
        if not ALL and (number + number // 2 + len(shape)) % 2:  # by default a shape meets each optimizer one way
            continue
        pair, fused = interop.optimizer(kind, donate=donate, **options), options.get("fused", False)
        params, state, changed = updates(pair, lambda tree: placed(tree, mesh), donate, fused)
        expected = updates(pair, lambda tree: tree, donate, fused)
        if at := differences(whole((params, state)), expected[:2]) + changed:
            wrong.append((kind.__name__, options, donate, at))
        for s, n in ((0, "w"), (0, "scale"), (1, "few")):
            for name, x in state[s][n].items():
                plain = name in ("step", "eta", "mu", "mu_product")
                if is_dtensor(x) == plain or (not plain and x.placements != params[s][n].placements):
                    wrong.append((kind.__name__, options, s, n, name))
        wrong += [kind.__name__] * (is_dtensor(params[1]["plain"]) or state[1]["frozen"] != {})
    return wrong


@pytest.mark.parametrize("shape", sample([(1,), (3,), (4,), (2, 2)], few([(3,), (2, 2)], [(3,)])))
@thorough
def test_updates_of_shards_have_the_bits_of_whole_parameters(pools, shape):
    assert pools(math.prod(shape)).run(sharded_updates, shape) == [[]] * math.prod(shape)


def updates_as_dtensors(rank):
    """How far Muon, which is not elementwise, is off on shards, its state there; and what Adafactor comes to."""
    params, grads, place = (
        {0: values(8, 6)},
        {0: values(8, 6, seed=1)},
        functools.partial(interop.fsdp, mesh=mesh_of(2)),
    )
    init, update = interop.optimizer(torch.optim.Muon, lr=0.1)
    expected, _ = update(grads, init(params), params)
    sharded, state = update(place(grads), init(params), place(params))
    init, update = interop.optimizer(torch.optim.Adafactor, lr=0.1)
    with pytest.raises(TypeError, match=r"can't update DTensors by Adafactor \(aten\."):
        update(place(grads), init(params), place(params))
    off = (whole(sharded)[0] - expected[0]).abs().max().item()
    return off, {name: is_dtensor(x) for name, x in state[0].items()}, masters_of_shards(place)


def masters_of_shards(place):
    """Where updates of bfloat16 shards with masters differ from those of whole parameters."""
    init, update = interop.optimizer(torch.optim.AdamW, lr=0.1, master=torch.float32)
    params, grads = ({0: values(8, 6, seed=seed).bfloat16()} for seed in (0, 1))
    sharded, sharded_state, state = place(params), init(params), init(params)
    for _ in range(2):
        sharded, sharded_state = update(place(grads), sharded_state, sharded)
        params, state = update(grads, state, params)
    assert is_dtensor(sharded_state[0]["master"])
    return differences(whole((sharded, sharded_state)), (params, state))


def test_optimizers_that_are_not_elementwise_update_dtensors_if_torch_can(pools):
    for worst, kinds, masters in pools(2).run(updates_as_dtensors):
        assert masters == []
        assert worst < 1e-2  # Muon multiplies matrices of bfloat16
        assert kinds == {"momentum_buffer": True}


def misplaced(rank):
    params = interop.fsdp({0: {"w": values(4, 4)}}, mesh_of(2))
    init, update = interop.optimizer(torch.optim.AdamW, lr=0.1)
    _, state = update(params, init(params), params)
    columns = interop.fsdp({0: {"w": values(4, 4)}}, mesh_of(2), dim=1)
    texts = []
    for arguments in (
        ({0: {"w": values(4, 4)}}, init(params), params),
        (columns, init(params), params),
        (params, whole(state), params),
    ):
        with pytest.raises(ValueError, match="and its parameter") as caught:
            update(*arguments)
        texts.append(str(caught.value))
    by_size = interop.optimizer(torch.optim.SGD, lr=1.0, groups=[(lambda path, p: p.numel() == 16, {"lr": 0.0})])
    again, _ = by_size.update(params, by_size.init(params), params)
    return texts, differences(whole(again), whole(params))


def test_gradients_and_state_must_be_placed_like_the_params(pools):
    for texts, of_group in pools(2).run(misplaced):
        plain, columns, state = texts
        assert plain.startswith(
            "grads[0]['w'] is float32[4, 4] on cpu, and its parameter float32[4, 4] on cpu, placed (S"
        )
        assert "placed (Shard(dim=1),) over DeviceMesh((a=2), 'cpu', stride=(1,)), and its parameter" in columns
        assert state.startswith("state[0]['w']['exp_avg'] is float32[4, 4] on cpu, and its parameter on cpu, placed")
        assert of_group == []  # a predicate sees the whole parameter


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("kind", "options"), [OPTIMIZERS[1], OPTIMIZERS[3], OPTIMIZERS[9]])
def test_masters_are_torchs_optimizer_on_float32_params(kind, options, donate):
    torch.manual_seed(0)
    low = {0: {"w": torch.randn(3, 3).bfloat16(), "b": torch.randn(3)}, 1: {"frozen": torch.randn(2).half()}}
    own = [low[0]["b"].clone(), low[0]["w"].float()]
    theirs = kind([p.requires_grad_() for p in own], **options)
    init, update = interop.optimizer(kind, master=torch.float32, donate=donate, **options)
    params, state = low, init(low)
    for i in range(4):
        grads = {0: {"w": torch.randn(3, 3).bfloat16(), "b": torch.randn(3)}, 1: {"frozen": None}}
        if i == 3:  # added up by the caller, in float32
            grads[0]["w"] = grads[0]["w"].float() / 3
        own[0].grad, own[1].grad = grads[0]["b"], grads[0]["w"].float()
        theirs.step()
        before = None if donate else copy.deepcopy((params, state))
        memory = params[0]["w"].data_ptr(), state[0]["w"].get("master", own[1]).data_ptr()
        new_params, new_state = update(grads, state, params)
        if donate:
            assert new_params[0]["w"].data_ptr() == memory[0]
            assert i == 0 or new_state[0]["w"]["master"].data_ptr() == memory[1]
        else:
            assert differences((params, state), before) == []
        params, state = new_params, new_state
        assert params[0]["w"].dtype == torch.bfloat16
        assert torch.equal(params[0]["w"], own[1].bfloat16())
        assert torch.equal(state[0]["w"]["master"], own[1])
        assert torch.equal(params[0]["b"], own[0])
    assert (state[1], "master" in state[0]["b"]) == ({"frozen": {}}, False)
    with pytest.raises(ValueError, match=r"state\[0\]\['w'\] has a master, and the optimizer keeps none: make it"):
        interop.optimizer(kind, **options).update({**params, 1: {"frozen": None}}, state, params)


def test_a_master_must_be_of_a_floating_point_dtype():
    with pytest.raises(TypeError, match="master must be a floating-point dtype or None"):
        interop.optimizer(torch.optim.SGD, master=torch.int32)
    with pytest.raises(ValueError, match=r"master must be torch\.float32 or wider, not torch\.bfloat16"):
        interop.optimizer(torch.optim.SGD, master=torch.bfloat16)
