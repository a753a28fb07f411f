"""Modules as they are, in stages: outputs, gradients and names are the module's own."""

import copy
import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.export import Dim

import fpipe
from fpipe import Batch, Placement, handlers, interop
from fpipe.interop.splitting import split as splitting
from fpipe.interop.splitting.balance import estimate, places
from fpipe.interop.splitting.export import export
from fpipe.interop.splitting.partition import Flow
from tests.support import split_cases
from tests.support.cases import mse
from tests.support.combinations import few, one_in, thorough
from tests.support.jobs import differences
from tests.support.models import TiedGPT, UNet

EXPORTED = {}


@pytest.fixture
def exported_once(monkeypatch):
    """A module of a class is exported once for all tests that say so: they differ in where they cut."""

    def once(module, *rest):
        if type(module) not in EXPORTED:
            EXPORTED[type(module)] = export(module, *rest)
        return EXPORTED[type(module)]

    monkeypatch.setattr(splitting, "export", once)


# Names


def test_params_share_the_modules_memory_and_the_functions_hold_none():
    case, pipeline, params, _ = split_cases.split("gpt", 4)
    named = dict(case.module.named_parameters())
    assert all(params[s][n].data_ptr() == named[n].data_ptr() for s in params for n in params[s] if n in named)
    for stage in pipeline.stages:
        assert {x.device.type for x in stage.fn.skeleton.parameters()} == {"meta"}
        assert list(stage.fn.graph.parameters()) == []


def test_a_state_dict_for_one_rank_alone():
    case, pipeline, params, _ = split_cases.split("gpt", 4)
    asked = []

    class Lazy(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    found, _ = interop.from_state_dict(pipeline, Lazy(case.module.state_dict()), stages=[3])
    plan = pipeline.plan(Placement.loop(4), 2)
    assert differences(found, pipeline.params_on(params, plan, 3)) == []
    assert list(found[0]) == ["wte.weight"]
    assert {name.partition(".")[0] for name in asked} == {"wte", "norm"}


def test_another_modules_state_dict():
    case, pipeline, *_ = split_cases.split("gpt", 2)
    whole = dict(case.module.state_dict())
    with pytest.raises(ValueError, match=r"lacks norm\.bias"):
        interop.from_state_dict(pipeline, {k: v for k, v in whole.items() if k != "norm.bias"})
    with pytest.raises(ValueError, match=r"no norm\.bios \(did you mean norm\.bias\?\)"):
        interop.from_state_dict(pipeline, {**whole, "norm.bios": whole["norm.bias"]})
    with pytest.raises(ValueError, match=r"norm\.bias is of shape \[3\], and \[8\] in the module"):
        interop.from_state_dict(pipeline, {**whole, "norm.bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"no extra state of modules, as norm\._extra_state is"):
        interop.from_state_dict(pipeline, {**whole, "norm._extra_state": {"scale": 2}})


# Edges, ties, what is recomputed


def test_skips_are_edges_from_their_maker_to_their_reader():
    _, pipeline, *_ = split_cases.split("unet", 4)
    assert pipeline.stages[0].inputs == (Batch(),)
    assert [stage.sources for stage in pipeline.stages] == [(), (0,), (0, 1), (0, 2)]


def test_a_product_with_a_buffer_is_done_once():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.randint(-8, 8, (4, 4), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(4))

        def forward(self, x):
            return torch.relu(x @ (self.weight * self.scale))

    module, x = nn.Sequential(*[Quantised() for _ in range(3)]), torch.randn(4, 4)
    pipeline, params = interop.split(module, at=["1", "2"], example=x)
    assert [list(params[s]) for s in range(3)] == [[f"{s}.weight", f"{s}.scale"] for s in range(3)]
    assert [stage.sources for stage in pipeline.stages] == [(), (0,), (1,)]
    assert torch.equal(pipeline(params, x), module(x))


def test_ties_are_found_by_identity():
    _, pipeline, params, _ = split_cases.split("gpt", 4)
    assert pipeline.entries == {(0, ("wte.weight",)): ((0, ("wte.weight",)), (3, ("wte.weight",)))}
    assert "head.weight" not in params[3]


class Several(nn.Module):
    """Arguments by place and by name, a constant, and a tree as its output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.idle = nn.Linear(4, 4)
        self.scale = torch.tensor(2.0)

    def forward(self, x, pair, flag=False, *, mask=None):
        h = self.layers[0](x) * self.scale
        with torch.no_grad():
            size = self.layers[1].weight.square().sum()
        h = self.layers[1](h) * pair["left"] / size
        h = self.layers[2](h.detach() + h if flag else h)
        return {"out": (h if mask is None else h * mask, None), "size": [size, 3]}


@pytest.mark.parametrize("by_name", few([True, False], [False]))
def test_arguments_by_place_and_name_and_outputs_in_trees(by_name):
    torch.manual_seed(0)
    module, x = Several(), torch.randn(6, 4)
    pair, mask = {"left": torch.randn(6, 4), "right": torch.randn(6, 1)}, torch.rand(6, 4)
    kwargs = {"flag": True, "mask": mask} if by_name else {"flag": True}
    pipeline, params = interop.split(module, at=["layers.1", "layers.2"], example=(x, pair), kwargs=kwargs)
    batch = {"x": x, "pair": pair, "mask": mask} if by_name else (x, pair)
    found, expected = pipeline(params, batch), module(x, pair, **kwargs)
    assert differences(found, torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, expected)) == []
    assert pipeline.stages[1].inputs[-1:] == (Batch("pair", "left") if by_name else Batch(1, "left"),)
    assert list(params[2]) == ["layers.2.weight", "layers.2.bias", "idle.weight", "idle.bias"]
    pipeline.loss = lambda output, target: output["out"][0].square().mean()
    own = split_cases.step(pipeline, handlers.Local(), microbatches=1)
    _, grads = own(params, batch)
    expected["out"][0].square().mean().backward()
    for tree in grads.values():
        for name, gradient in tree.items():
            own = module.get_parameter(name).grad
            torch.testing.assert_close(gradient, torch.zeros_like(gradient) if own is None else own)


def test_frozen_parameters_get_no_gradient():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].weight.requires_grad_(False)
    pipeline, params = interop.split(module, at=["1"], example=torch.randn(4, 4), loss=mse)
    assert [stage.frozen for stage in pipeline.stages] == [("0.weight",), ()]
    _, grads = split_cases.step(pipeline, handlers.Local())(params, torch.randn(4, 4), torch.randn(4, 4))
    assert grads[0]["0.weight"] is None


@pytest.mark.parametrize("mark", few([interop.pipe_split, pipelining.pipe_split], slice(1)))
def test_marks_inside_forward(mark):
    class Marked(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            mark()
            return self[1](x)

    module, x = Marked(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(4, 4)
    pipeline, params = interop.split(module, example=x)
    assert interop.split_points(pipeline) == ["pipe_split()@0"]
    with pytest.raises(ValueError, match=r"no split point 'pipe_split\(\)@1': .* runs 1 times, counted from 0"):
        interop.split(module, at=["pipe_split()@1"], example=x)
    assert [list(params[s]) for s in range(2)] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert torch.equal(pipeline(params, x), module(x))
    assert torch.equal(interop.eval_mode(pipeline)(params, x), module(x))


class Repeated(nn.Module):
    """One layer several times, the second under another name; a buffer that it writes without gradients."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = self.layer
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = self.layer(torch.tanh(self.layer(x)))
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        return self.other(self.norm(x)) + self.mean


def test_a_layer_that_runs_several_times_and_buffers_written_by_hand():
    torch.manual_seed(0)
    case = split_cases.Case(Repeated().double(), torch.randn(4, 4).double(), torch.randn(4, 4).double(), mse, {})
    pipeline, params = interop.split(case.module, at=["layer@1", "norm"], example=case.batch, loss=mse)
    norm = ("norm.num_batches_tracked", "norm.running_mean", "norm.running_var")
    assert [stage.fn.state for stage in pipeline.stages] == [(), ("mean",), norm]
    state = interop.buffers(pipeline, case.module)
    found = split_cases.run(split_cases.step(pipeline, handlers.Local()), case, params, state)
    split_cases.check(found, case, pipeline)
    names = interop.to_state_dict(pipeline, params, state)
    assert names["other.weight"].data_ptr() == names["layer.weight"].data_ptr()


# Sizes


def test_rows_may_change_and_other_axes_where_it_is_said():
    torch.manual_seed(0)
    module = TiedGPT(layers=1, context=9).double()
    free = {"tokens": {0: Dim.AUTO, 1: Dim("length", min=2, max=9)}}
    tokens = torch.randint(11, (2, 5, 9))
    pipeline, params = interop.split(module, at=["norm"], example=tokens[0], dynamic_shapes=free)
    for rows, length in ((5, 9), (3, 4), (1, 2)):
        part = tokens[0, :rows, :length]
        torch.testing.assert_close(pipeline(params, part), module(part), **split_cases.EQUAL)
    fixed, params = interop.split(module, at=["norm"], example=tokens[0, :, :5])
    torch.testing.assert_close(fixed(params, tokens[0, :3, :5]), module(tokens[0, :3, :5]), **split_cases.EQUAL)
    with pytest.raises(ValueError, match=r"the batch is int64\[5, 9\], and the module was split for 5 along axis 1"):
        fixed(params, tokens[0])


@thorough
def test_uneven_microbatches():
    case, pipeline, params, _ = split_cases.split("gpt", 2)
    own = replace(case, batch=case.batch[:3], target=case.target[:3])
    found = split_cases.run(split_cases.step(pipeline, handlers.Local()), own, params, {})
    split_cases.check(found, own, pipeline, 1)


# Devices, modes, and modules without memory


@thorough
def test_eval_mode_takes_the_same_params_and_state():
    case, pipeline, params, state = split_cases.split("unet", 4)
    evaluating = interop.eval_mode(pipeline)
    plan = pipeline.plan(Placement.loop(4), 2)
    found = fpipe.evaluate(evaluating, plan, handler=handlers.Local())(params, case.batch, state=state)
    expected = copy.deepcopy(case.module).eval()(case.batch)
    torch.testing.assert_close(found, expected, **split_cases.EQUAL)
    _, new = evaluating(params, case.batch, state=state)
    assert differences(new, state) == []


def test_train_mode_of_a_module_split_in_evaluation_mode():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    pipeline, params = interop.split(module, at=["2"], example=torch.randn(4, 4))
    assert "1.running_mean" in params[0]
    with pytest.raises(
        ValueError, match=r"forward changes the buffers 1\.num_batches_tracked.*split the module in training"
    ):
        interop.eval_mode(pipeline, False)


def test_each_rank_makes_its_own_stages_of_a_module_on_the_meta_device():
    with torch.device("meta"):
        module = UNet(depth=2)
    x = torch.randn(2, 3, 8, 8)
    pipeline, blank = interop.split(module, at=["encoders.1", "ups.0"], example=x, dynamic_shapes={})
    assert {p.device.type for tree in blank.values() for p in tree.values()} == {"meta"}
    params, state = interop.materialise(pipeline, seed=3)
    assert interop.to_state_dict(pipeline, params, state).keys() == module.state_dict().keys()
    for stage in range(3):
        own, _ = interop.materialise(pipeline, [stage], seed=3)
        assert differences(own, {stage: params[stage]}) == []
    module.to_empty(device="cpu").load_state_dict(interop.to_state_dict(pipeline, params, state))
    assert torch.equal(pipeline(params, x, state=state)[0], module(x))
    assert params[1]["encoders.1.0.weight"].std() > 0


def test_a_tie_is_made_the_same_on_both_of_its_ranks():
    with torch.device("meta"):
        module = TiedGPT(layers=2)
    pipeline, _ = interop.split(module, at=["layers.1"], example=torch.randint(11, (2, 6)))
    with pytest.raises(ValueError, match=r"nothing sets positions: .*reset_parameters, or pass init="):
        interop.materialise(pipeline)

    def init(part):
        if isinstance(part, TiedGPT):
            part.positions.copy_(torch.arange(6))
        else:
            part.reset_parameters()

    before = torch.get_rng_state()
    low, high = (interop.materialise(pipeline, [stage], init=init)[0] for stage in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(low[0]["wte.weight"], high[0]["wte.weight"])
    assert list(high[0]) == ["wte.weight"]
    assert "head.weight" not in high[1]


# Where to cut


class Tall(nn.Module):
    """12 layers and a head that outweighs several of them."""

    def __init__(self, width=32, vocabulary=1500):
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(12)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("stages", few([2, 3, 4], [3]))
@pytest.mark.usefixtures("exported_once")
def test_the_largest_stage_is_near_the_least_that_is_possible(stages):
    module, x = Tall(), torch.randint(64, (4, 16))
    pipeline, _ = interop.split(module, stages=stages, policy="balanced", example=x, dynamic_shapes={})
    flow = Flow(EXPORTED[Tall])
    times, found = estimate(flow), places(flow, module)
    assert len(found) > 24

    def largest(starts):
        return max(sum(times[a:b]) for a, b in itertools.pairwise([0, *starts, len(times)])) / sum(times)

    best = min(largest(starts) for starts in itertools.combinations([place.start for place in found], stages - 1))
    shares = [stage.fn.spec.share for stage in pipeline.stages]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) <= 1.1 * best
    assert max(shares) < 1.2 / stages
    assert all(len(stage.inputs) == 1 for stage in pipeline.stages)  # no cut through the middle of a layer


def test_equal_stages_weigh_parameters_too():
    module = nn.Sequential(nn.Embedding(5000, 8), *[nn.Linear(8, 8) for _ in range(6)])
    _, params = interop.split(module, stages=2, example=torch.randint(9, (4, 2)))
    assert list(params[0]) == ["0.weight"]


@pytest.mark.timing
def test_measured_time_finds_what_an_estimate_does_not():
    class Slow(nn.Linear):
        def forward(self, x):
            for _ in range(100):
                x = torch.sin(x)  # next to no bytes and no products, but many calls
            return super().forward(x)

    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], Slow(64, 64), nn.Linear(64, 64))
    options = {"example": torch.randn(4, 64), "dynamic_shapes": {}, "policy": "balanced"}
    pipeline, _ = interop.split(module, stages=3, measure=True, **options)
    assert max(stage.fn.spec.share for stage in pipeline.stages) > 0.5
    assert any({n.partition(".")[0] for n in stage.fn.entries} <= {"4", "5"} for stage in pipeline.stages)


@pytest.mark.parametrize("measure", few([False, True], [True]))
def test_buffers_that_change_and_conditions_stay_together(measure):
    class Shared(nn.Module):
        """A norm that runs twice, and a branch."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            x = self.layers[1](self.layers[0](x))
            x = self.norm(self.layers[2](self.norm(x)))
            return self.layers[3](torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))

    options = {"policy": "balanced", "measure": measure, "dynamic_shapes": {}}
    pipeline, _ = interop.split(Shared(), stages=5, example=torch.randn(4, 4), **options)
    assert [stage.fn.state != () for stage in pipeline.stages] == [False, False, True, False, False]


def test_describe():
    _, pipeline, *_ = split_cases.split("gpt", 4)
    assert pipeline.describe().splitlines() == [
        "stage  parameters      bytes    begins  reads",
        "    0       1,008  7.922 KiB            batch",
        "    1         872  6.812 KiB  layers.1  stage 0 layers.0.add_1 (1.5 KiB)",
        "    2         872  6.812 KiB  layers.2  stage 1 layers.1.add_1 (1.5 KiB)",
        "    3          16      128 B      norm  stage 2 layers.2.add_1 (1.5 KiB)",
        "tied: wte.weight of stage 3 is wte.weight of stage 0",
    ]
    _, pipeline, params, _ = split_cases.split("unet", 4)
    head, first, second, third, _ = pipeline.describe(params).splitlines()
    assert head.split() == ["stage", "parameters", "bytes", "state", "begins", "reads"]
    assert int(first.split()[1].replace(",", "")) == sum(x.numel() for x in params[0].values())
    assert "End('encoders.1')" in third
    assert second.count("stage 0") == len(pipeline.stages[1].inputs)


def test_another_rank_takes_over_where_to_cut():
    case, pipeline, *_ = split_cases.split("unet", 4, stages=4, policy="balanced")
    _, again, *_ = split_cases.split("unet", 4, at=interop.split_points(pipeline))
    assert interop.split_points(again) == interop.split_points(pipeline)
    assert [stage.inputs for stage in again.stages] == [stage.inputs for stage in pipeline.stages]
    assert interop.split_points(split_cases.split("unet", 4)[1]) == case.cuts[4]


# What is wrong


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"at": ["layer.1"]}, r"no split point 'layer\.1': there is no such submodule: did you mean 'layers\.1'"),
        ({"at": ["idle"]}, "no split point 'idle': 'idle' doesn't run in forward"),
        ({"at": ["layers.1@2"]}, r"no split point 'layers\.1@2': 'layers\.1' runs 1 times"),
        ({"at": ["layers.2", "layers.1"]}, r"'layers\.1' comes before 'layers\.2' when the module runs"),
        (
            {"at": ["layers.1", interop.End("layers.0")]},
            r"End\('layers\.0'\) comes before 'layers\.1'",
        ),
        ({"at": ["layers.0"]}, "stage 0 would be empty: no parameter is used between the beginning and 'layers.0'"),
        ({"at": "layers.1"}, r"a list of split points: at=\['layers\.1'\]"),
        ({"at": ["layers.1"], "stages": 2}, "give one of the two"),
        ({"stages": 40}, "too few for 40 stages"),
        ({"stages": 2, "policy": "best"}, "'equal' or 'balanced'"),
        ({}, "nothing says where to cut"),
    ],
)
@pytest.mark.usefixtures("exported_once")
def test_a_cut_that_is_wrong(options, says):
    with pytest.raises(ValueError, match=says):
        interop.split(Several(), example=(torch.randn(2, 4), {"left": torch.randn(2, 4)}), **options)


def test_a_buffer_that_two_stages_change():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    module.append(module[0])
    with pytest.raises(ValueError, match=r"stages \[0, 1\] all use the buffer 0\.num_batches_tracked"):
        interop.split(module, at=["1"], example=torch.randn(4, 4))


def test_a_stage_function_can_be_copied_and_pickled():
    case, pipeline, params, _ = split_cases.split("gpt", 2)
    for copied in (copy.deepcopy(pipeline.stages[0].fn), pickle.loads(pickle.dumps(pipeline.stages[0].fn))):
        assert differences(copied(params[0], case.batch), pipeline.stages[0].fn(params[0], case.batch)) == []


# By hand


def test_a_sequential_cut_by_indices_keeps_its_names():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(6, 4)
    pipeline, params = interop.from_modules(module, at=[2])
    state = interop.buffers(pipeline, module)
    found = interop.to_state_dict(pipeline, params, state)
    assert differences(found, dict(module.state_dict())) == []
    assert differences(interop.from_state_dict(pipeline, module.state_dict()), (params, state)) == []
    assert torch.equal(pipeline(params, x, state=state)[0], module(x))
    made, _ = interop.materialise(pipeline, [1])
    assert list(made[1]) == ["3.weight", "3.bias"]
    with pytest.raises(ValueError, match=r"at=\[2, 2\] must rise, from 1 to 3"):
        interop.from_modules(module, at=[2, 2])
    with pytest.raises(TypeError, match=r"at= cuts an nn\.Sequential, not a list"):
        interop.from_modules([module], at=[1])
    other, _ = interop.from_modules([module])
    with pytest.raises(TypeError, match="stage 0 has names of its own"):
        interop.to_state_dict(other, {})


def test_functions_by_hand():
    functions = [lambda p, x: x * p, lambda p, n, x: (x + p, n + 1), lambda p, x, first: x * p["w"] + first]
    options = {"reads": {2: [1, 0]}, "stateful": [1], "frozen": {2: ["w"]}, "loss": lambda y, t: (y - t).sum()}
    pipeline = interop.from_functions(functions, **options)
    params = {0: torch.tensor(2.0), 1: torch.tensor(1.0), 2: {"w": torch.tensor(3.0)}}
    x, state = torch.ones(4), {1: torch.tensor(0)}
    own = split_cases.step(pipeline, handlers.Local())
    loss, grads, new = own(params, x, torch.zeros(4), state=state)
    assert (loss, grads[0], grads[1], grads[2]["w"], new[1]) == (44 / 2, 8, 6, None, 2)
    with pytest.raises(ValueError, match="reads names stage 3, and there are 3 functions"):
        interop.from_functions(functions, reads={3: [0]})


@thorough
def test_materialise_makes_attention():
    with torch.device("meta"):
        module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    pipeline, _ = interop.split(module, stages=2, example=(torch.randn(2, 3, 8),))
    params, _ = interop.materialise(pipeline)
    assert all(x.isfinite().all() for tree in params.values() for x in tree.values())


class Resetting(nn.Module):
    def __init__(self, value, dtype, reset):
        super().__init__()
        self.register_buffer("kept", torch.full((2,), value, dtype=dtype))
        self.reset = reset

    def reset_parameters(self):
        self.reset(self.kept)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float32, torch.float8_e5m2fnuz])
@pytest.mark.parametrize("value", [-1, 125, 255, math.nan])
def test_materialise_keeps_any_value_that_is_set(value, dtype):
    set_to = torch.tensor(value).to(dtype)
    pipeline, _ = interop.from_modules([Resetting(0, dtype, lambda kept: kept.copy_(set_to))])
    _, state = interop.materialise(pipeline)
    assert torch.equal(state[0]["kept"].view(torch.uint8), set_to.expand(2).contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_materialise_refuses_a_value_that_is_only_scaled(dtype):
    pipeline, _ = interop.from_modules([Resetting(1, dtype, lambda kept: kept.mul_(0.02))])
    with pytest.raises(ValueError, match=r"nothing sets stages\.0\.kept"):
        interop.materialise(pipeline)


@one_in(3)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float8_e5m2fnuz])
def test_materialise_tells_what_nothing_sets_of_any_type(dtype):
    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4, dtype=dtype), persistent=False)

        def forward(self, x):
            return self.layer(x).where(self.mask.bool(), 0.0)

    def init(part):
        if hasattr(part, "mask"):
            part.mask.copy_(torch.tensor([True, False, True, False]))
        else:
            part.reset_parameters()

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), Masking())
    pipeline, _ = interop.split(module, at=["1"], example=torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"nothing sets 1\.mask"):
        interop.materialise(pipeline)
    params, _ = interop.materialise(pipeline, init=init)
    assert params[1]["1.mask"].tolist() == [True, False, True, False]
