"""Modules of torch as pure functions, against torch itself."""

import copy
import random
import re
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fpipe
from fpipe import Placement, StageError, handlers, interop, schedules
from tests.support.cases import mse
from tests.support.combinations import combined, one_in, thorough
from tests.support.jobs import differences


def cut_by_hand(module, loss=None):
    return interop.from_modules([nn.Linear(4, 4), module], loss=loss)


def exported(module, loss=None):
    return interop.split(nn.Sequential(nn.Linear(4, 4), module), at=["1"], example=torch.randn(8, 4), loss=loss)


each_kind = pytest.mark.parametrize("cut", [cut_by_hand, exported])


def chain():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4))]


class Tied(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x @ self.inner.weight * self.scale


def test_names_are_the_state_dicts():
    modules = chain()
    _, params = interop.from_modules(modules)
    state = interop.buffers(modules)
    for s, module in enumerate(modules):
        assert {**params[s], **state.get(s, {})}.keys() == module.state_dict().keys()
    assert params[0]["0.weight"].data_ptr() == modules[0][0].weight.data_ptr()
    assert 1 not in state


def test_back_into_modules():
    modules = chain()
    _, params = interop.from_modules(modules)
    changed = {s: {k: v + 1 for k, v in tree.items()} for s, tree in params.items()}
    state = {s: {k: v + 2 for k, v in tree.items()} for s, tree in interop.buffers(modules).items()}
    interop.into_modules(modules, changed, state)
    assert differences({n: p.detach() for n, p in modules[1].named_parameters()}, changed[1]) == []
    assert differences(dict(modules[0].named_buffers()), state[0]) == []


def test_the_module_is_never_touched_and_its_memory_not_kept():
    modules = chain()
    before = copy.deepcopy([m.state_dict() for m in modules])
    pipeline, params = interop.from_modules(modules, loss=mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())
    step(params, torch.randn(8, 4), torch.randn(8, 4), state=interop.buffers(modules), rng=(0, 0))
    assert differences([m.state_dict() for m in modules], before) == []
    assert {p.device.type for s in pipeline.stages for p in s.fn.skeleton.parameters()} == {"meta"}


def test_shared_parameters_are_tied():
    weight = nn.Parameter(torch.randn(4, 4))
    modules = [Tied(weight), nn.Linear(4, 4), Tied(weight)]
    pipeline, params = interop.from_modules(modules, loss=mse)
    assert pipeline.entries == {(0, ("inner.weight",)): ((0, ("inner.weight",)), (2, ("inner.weight",)))}
    assert list(params[2]) == ["scale"]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    plan = pipeline.plan(Placement.loop(3), 1)
    _, grads = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())(params, x, y)
    mse(nn.Sequential(*modules)(x), y).backward()
    torch.testing.assert_close(grads[0]["inner.weight"], weight.grad)


class Averaging(nn.Module):
    """Subtracts a moving average, which it changes in place or assigns anew."""

    def __init__(self, assign):
        super().__init__()
        self.assign = assign
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        if self.assign:
            self.average = average
        else:
            self.average.copy_(average)
        return x - average


@pytest.mark.parametrize(
    ("make", "autodiff"),
    [
        (lambda: nn.BatchNorm1d(4), "graph"),
        (lambda: nn.BatchNorm1d(4), "eager"),
        (lambda: Averaging(False), "graph"),
        (lambda: Averaging(True), "eager"),
    ],
    ids=["batch norm", "batch norm, eager", "in place", "assigned"],
)
def test_a_buffer_of_several_stages_may_not_change(make, autodiff):
    part = make()
    modules = [nn.Sequential(nn.Linear(4, 4), part), nn.Sequential(nn.Linear(4, 4), part)]
    pipeline, params = interop.from_modules(modules, loss=mse)
    plan, state = pipeline.plan(Placement.loop(2), 2), interop.buffers(modules)
    x = torch.randn(8, 4)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    with pytest.raises(StageError, match=r"stage 0, microbatch 0: .*buffer 1\.\w+, which is 1\.\w+ of stage 1 as well"):
        step(params, x, x, state=state)
    run = fpipe.evaluate(pipeline, plan, handler=handlers.Local(), autodiff=autodiff)
    with torch.inference_mode(), pytest.raises(StageError, match=r"is 1.* of stage 1 as well"):
        run(params, x, state=state)
    if isinstance(part, nn.BatchNorm1d):  # it changes nothing in evaluation
        run = fpipe.evaluate(interop.eval_mode(pipeline), plan, handler=handlers.Local(), autodiff=autodiff)
        with torch.inference_mode():
            assert torch.equal(run(params, x, state=state), nn.Sequential(*modules).eval()(x))


def over_one_memory(kind):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    whole = torch.randn(4, 8)
    if kind in ("parameters", "one frozen", "frozen"):
        first.weight = nn.Parameter(whole[:, :4], requires_grad=kind == "parameters")
        second.weight = nn.Parameter(whole[:, 3:7], requires_grad=kind != "frozen")
    elif kind == "buffer of a parameter":
        second.register_buffer("old", first.weight.detach())
    elif kind == "parts":
        first.weight, second.weight = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])
    return [first, second]


@pytest.mark.parametrize("kind", ["parameters", "one frozen", "frozen", "buffer of a parameter", "parts"])
def test_parameters_over_one_memory_are_refused(kind):
    modules = over_one_memory(kind)
    whole = nn.Sequential(*modules)
    cuts = (lambda: interop.from_modules(modules), lambda: interop.split(whole, at=["1"], example=torch.randn(8, 4)))
    for cut in cuts:
        if kind in ("parts", "frozen"):  # no element in common, or none that changes
            assert cut()[0].entries == {}
        else:
            with pytest.raises(
                StageError, match=r"weight.* and .* two tensors over the same memory.*one nn\.Parameter"
            ):
                cut()


def test_split_refuses_a_buffer_that_changes_over_the_memory_of_another():
    module = nn.Sequential(nn.Linear(4, 4), Averaging(False))
    module.register_buffer("seen", module[1].average[:2])
    with pytest.raises(StageError, match=r"changes 1\.average, and .*seen.* are two buffers over the same memory"):
        interop.split(module, at=["1"], example=torch.randn(8, 4))


def test_frozen_parameters_get_none():
    modules = chain()
    modules[0][0].weight.requires_grad_(False)
    pipeline, params = interop.from_modules(modules, loss=mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())
    _, grads, _ = step(params, torch.randn(8, 4), torch.randn(8, 4), state=interop.buffers(modules), rng=(0, 0))
    assert grads[0]["0.weight"] is None
    assert grads[0]["0.bias"].shape == (6,)


@each_kind
def test_freezing_a_parameter_later_is_named(cut):
    module = nn.Linear(4, 4)
    pipeline, params = cut(module, mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())
    x = torch.ones(8, 4)
    module.bias.requires_grad_(False)
    message = r"requires_grad of (1\.)?bias of stage 1 has changed.* trains the params .*make the pipeline"
    with pytest.warns(UserWarning, match=message) as told:
        _, grads = step(params, x, x)
    assert told[0].filename == __file__
    assert all(gradient is not None for gradient in grads[1].values())
    with warnings.catch_warnings():  # once for each set of names
        warnings.simplefilter("error")
        step(params, x, x)
    module.weight.requires_grad_(False)
    with pytest.warns(
        UserWarning, match=r"requires_grad of (1\.)?weight of stage 1, (1\.)?bias of stage 1 has changed"
    ):
        step(params, x, x)
    captured = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), capture=True)
    module.requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(params, x, x)
        for _ in range(3):
            captured(params, x, x)
    module.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match=message):
        captured(params, x, x)
    frozen, _ = cut(module, mse)
    del module
    step = fpipe.value_and_grad(frozen, schedules.gpipe, plan, handler=handlers.Local())
    _, grads = step(params, x, x)
    assert {name.removeprefix("1.") for name, gradient in grads[1].items() if gradient is None} == {"bias"}


def test_eval_mode_is_the_module_in_eval():
    modules = chain()
    pipeline, params = interop.from_modules(modules)
    x = torch.randn(8, 4)
    run = fpipe.evaluate(interop.eval_mode(pipeline), pipeline.plan(Placement.loop(2), 1), handler=handlers.Local())
    found = run(params, x, state=interop.buffers(modules))
    assert torch.equal(found, nn.Sequential(*modules).eval()(x))
    assert all(m.training for s in pipeline.stages for m in s.fn.skeleton.modules())


def test_a_wrong_tree_names_the_missing_key():
    pipeline, params = interop.from_modules([nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        pipeline({0: {"weight": params[0]["weight"]}}, torch.ones(2))


# What a module may hold

each_way = pytest.mark.parametrize("autodiff", ["graph", "eager"])


class Holding(nn.Module):
    """Its forward takes from an attribute what is in question."""

    def __init__(self, hold=lambda module: None):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.held = hold(self)


class Summing(Holding):
    """With constants in attributes."""

    def forward(self, x):
        return self.a(x) * self.held["scale"] + self.held["more"][0]


class Listing(Holding):
    """Tensors that are registered are held in other ways too."""

    def forward(self, x):
        return x @ self.held["weights"][0] + self.b(x) * self.held["shift"][0]


class Calling(Holding):
    """Modules that are registered are held in other ways too."""

    def forward(self, x):
        for layer in self.held["layers"]:
            x = layer(x)
        return self.held["method"](x) * self.shift


class Keeping(Holding):
    """Something of each forward stays."""

    def forward(self, x):
        self.held = {"last": [self.a(x)]}
        return self.b(self.held["last"][0])


def same_as(module, cut, autodiff):
    """A step of the second of two stages gives what autograd does."""
    if any(True for _ in module.buffers()) and cut is cut_by_hand:
        state = {"state": interop.buffers([nn.Identity(), module])}
    else:
        state = {}
    pipeline, params = cut(module, mse)
    plan = pipeline.plan(Placement.loop(2), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    loss, grads, *_ = step(params, x, y, **state)
    first = nn.Linear(4, 4)
    first.load_state_dict({name.removeprefix("0."): value for name, value in params[0].items()})
    expected = mse(module(first(x)), y)
    own = dict(module.named_parameters())
    found = torch.autograd.grad(expected, list(own.values()), allow_unused=True)
    torch.testing.assert_close(loss, expected.detach())
    named = {name.removeprefix("1."): gradient for name, gradient in grads[1].items() if gradient is not None}
    assert any(gradient.any() for gradient in named.values())
    for name, gradient in zip(own, found, strict=True):
        torch.testing.assert_close(named[name], torch.zeros_like(own[name]) if gradient is None else gradient)


@one_in(3)
@combined(
    module=[
        lambda: Summing(lambda m: {"scale": torch.full((4,), 3.0), "more": (torch.ones(4),)}),
        lambda: Listing(lambda m: {"weights": [m.a.weight], "shift": (m.shift,)}),
        lambda: Calling(lambda m: {"layers": [m.a, m.b], "method": m.a.forward}),
        lambda: nn.Sequential(nn.LSTM(4, 4), Taking()),
    ],
    cut=[cut_by_hand, exported],
    autodiff=["graph", "eager"],
)
def test_attributes_are_what_they_are_in_the_module(module, cut, autodiff):
    torch.manual_seed(0)
    same_as(module(), cut, autodiff)


class Taking(nn.Module):
    def forward(self, pair):
        return pair[0]


@pytest.mark.filterwarnings("ignore:.*was assigned during export", "ignore:.*weight_norm:FutureWarning")
@combined(kind=["activation", "weight_norm"], cut=[exported, cut_by_hand], autodiff=["graph", "eager"])
def test_what_a_forward_has_left_is_left_out(kind, cut, autodiff):
    torch.manual_seed(0)
    module = Keeping() if kind == "activation" else torch.nn.utils.weight_norm(nn.Linear(4, 4))
    module(torch.randn(8, 4))
    same_as(module, cut, autodiff)


class Cache(dict):
    """A mapping that torch does not register as a tree."""


def test_what_a_forward_has_left_in_a_subclass_of_dict_is_left_out():
    module = nn.Linear(4, 4)
    module.cache = Cache(scaled=[module.weight * 2])
    pipeline, _ = interop.from_modules([module])
    assert pipeline.stages[0].fn.skeleton.cache["scaled"][0].is_meta


@each_kind
def test_what_cannot_be_copied_is_named(cut):
    with pytest.raises(StageError, match=r"held can't be copied \(TypeError: cannot pickle.*set it to None"):
        cut(Holding(lambda m: threading.Lock()))


class Box:
    """Not looked into."""

    def __init__(self, content):
        self.content = content


class Boxed(Holding):
    def forward(self, x):
        return x @ self.held.content


class Rereading(Keeping):
    def forward(self, x):
        return self.b(x) + self.held["last"][0] if self.held else super().forward(x)


@pytest.mark.parametrize(("kind", "autodiff"), [("boxed", "auto"), ("reread", "auto"), ("reread", "eager")])
def test_what_a_stage_was_not_given_is_said_when_it_runs(kind, autodiff):
    module = Boxed(lambda m: Box(m.a.weight)) if kind == "boxed" else Rereading()
    module(torch.randn(8, 4))
    pipeline, params = cut_by_hand(module, mse)
    plan = pipeline.plan(Placement.loop(2), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    state = {1: {"shift": torch.ones(4)}}
    with pytest.raises(StageError, match="forward reads a tensor that a stage isn't given"):
        step(params, torch.randn(8, 4), torch.randn(8, 4), state=state)


# What a forward passes on to the next


class Passing(nn.Module):
    """Its forward passes something on to the next by an attribute, or only leaves something."""

    level = 1

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls, self.before, self.seen = kind, 0, None, []
        self.generator = np.random.default_rng(0)

    def forward(self, x):
        match self.kind:
            case "counter":
                self.calls += 1
                return x * self.calls
            case "tensor":
                before, self.before = self.before, x.detach()
                return x if before is None else x + before
            case "list":
                self.seen.append(1)
                return x * len(self.seen)
            case "level":
                self.level += 1
                return x * self.level
            case "cache":
                self.before = torch.ones_like(x) if self.before is None else self.before
                return x * self.before
            case "generator":
                return x * float(self.generator.random())
            case "new":
                x = x + self.new if hasattr(self, "new") else x
                self.new = x.detach()
                return x
        self.left = {"sum": x.sum()}
        return x * self.left["sum"]


@one_in(4)
@pytest.mark.parametrize("autodiff", ["graph", "eager"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("counter", r"attribute 1\.calls of a Passing, and then changes it from 0 to 1.*make it a buffer"),
        ("tensor", r"attribute 1\.before of a Passing, and then changes it from None to float32\[4, 4\]"),
        ("level", r"attribute 1\.level of a Passing, and then changes it from 1 to 2"),
        ("list", r"attribute 1\.seen of a Passing, and then changes what is in it"),
        ("generator", r"attribute 1\.generator of a Passing, and then changes what is in it"),
        ("new", r"attribute 1\.new of a Passing, and then changes it from nothing to float32\[4, 4\]"),
        ("left", None),
        ("cache", None),  # of the shape alone: each call may fill it anew, and rightly
    ],
)
def test_attributes_that_pass_something_on_are_named(kind, message, autodiff):
    pipeline, params = interop.from_modules([nn.Sequential(nn.Linear(4, 4), Passing(kind)), nn.Linear(4, 4)], loss=mse)
    step = fpipe.value_and_grad(
        pipeline, schedules.gpipe, pipeline.plan(Placement.loop(2), 2), handler=handlers.Local(), autodiff=autodiff
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(params, torch.ones(8, 4), torch.ones(8, 4))
        step(params, torch.ones(8, 4), torch.ones(8, 4))
    texts = [str(each.message) for each in caught if "forward reads the attribute" in str(each.message)]
    assert len(texts) == (message is not None)
    assert message is None or re.search(message, texts[0])
    assert pipeline.stages[0].fn.skeleton[1].seen == []


GENERATOR, LEGACY = np.random.default_rng(0), np.random.RandomState(0)


def drawn_elsewhere():
    return LEGACY.rand()


DRAWS = {
    "python": random.random,
    "numpy": np.random.rand,
    "own of python": random.Random(0).random,
    "generator": lambda: GENERATOR.random(),
    "legacy": lambda: drawn_elsewhere(),
    "new": lambda: np.random.default_rng().random(),
}


@one_in(4)
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_that_are_not_torchs_are_drawn_anew(draw):
    class Drawing(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(draw())

    pipeline, params = interop.from_modules([Drawing(4, 4), nn.Linear(4, 4)], loss=mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())
    x = torch.ones(8, 4)
    with pytest.warns(UserWarning, match="stage 0 .*eager.*draws from the random numbers of Python or NumPy"):
        first = step(params, x, x)[0]
    assert not torch.equal(step(params, x, x)[0], first)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff="graph")
    with pytest.raises(StageError, match="draws from the random numbers of Python or NumPy"):
        step(params, x, x)
    with pytest.raises(StageError, match="draws from the random numbers of Python or NumPy, and the stages"):
        interop.split(nn.Sequential(Drawing(4, 4), nn.Linear(4, 4)), at=["1"], example=x)


def test_random_numbers_with_a_seed_of_each_call_are_traced():
    def mask(p, x):
        return x * p * float(np.random.default_rng(0).random())

    pipeline = fpipe.Pipeline([mask], loss=lambda output, target: output.sum())
    plan = pipeline.plan(Placement.loop(1), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff="graph")
    loss, _ = step({0: torch.tensor(2.0)}, torch.ones(4), torch.ones(4))
    assert loss.item() == pytest.approx(8 * np.random.default_rng(0).random())


def test_a_trace_gives_the_host_generators_their_states_back():
    def drawing(p, x):
        return x * p * random.random() * float(np.random.rand())

    random.seed(0)
    np.random.seed(0)
    expected = random.random() * np.random.rand()
    random.seed(0)
    np.random.seed(0)
    pipeline = fpipe.Pipeline([drawing], loss=lambda output, target: output.sum())
    plan = pipeline.plan(Placement.loop(1), 1)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local())
    with pytest.warns(UserWarning, match="Python or NumPy"):
        loss, _ = step({0: torch.ones(())}, torch.ones(1))
    assert loss.item() == pytest.approx(expected)


@each_kind
def test_modules_of_torch_jit_are_refused(cut):
    module = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))
    with pytest.raises(StageError, match=r"(it|1) is a module of torch\.jit, .*: take the module that was scripted or"):
        cut(module)


class Sparse(nn.Module):
    def forward(self, x):
        return x.to_sparse()


WRITES = r"writes in place to an input, .*a first layer with inplace=True.*a clone"


@pytest.mark.parametrize(("handler", "autodiff"), [("local", "graph"), ("local", "eager"), ("reference", "eager")])
@pytest.mark.parametrize(
    ("first", "message"),
    [
        (lambda: nn.ReLU(inplace=True), WRITES),
        (
            lambda: nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten()),
            r"a parameter, as Embedding\(max_norm",
        ),
        (Sparse, r"layout torch\.sparse_coo can't go from stage to stage: return it as to_dense\(\)"),
    ],
    ids=["in place", "embedding", "sparse"],
)
def test_what_a_first_stage_may_not_do(first, message, handler, autodiff):
    module = first()
    x = torch.arange(8)[:, None] if isinstance(module, nn.Sequential) else torch.randn(8, 4)
    pipeline, params = interop.from_modules([module, nn.Linear(4, 4)], loss=mse)
    handler = handlers.Local() if handler == "local" else handlers.Reference()
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handler, autodiff=autodiff)
    with pytest.raises(StageError, match=message):
        step(params, x, torch.ones(8, 4))


@pytest.mark.parametrize("autodiff", ["auto", "eager"])
def test_a_later_stage_may_not_write_to_its_input(autodiff):
    stages = [nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))]
    pipeline, params = interop.from_modules(stages, loss=mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Local(), autodiff=autodiff)
    message = r"stage 1, microbatch 0: it writes in place to an input, .*: pass inplace=False, or write to a clone"
    with pytest.raises(StageError, match=message):
        step(params, torch.ones(8, 4), torch.ones(8, 4))


@each_kind
def test_lazy_modules_are_run_first(cut):
    with pytest.raises(StageError, match=r"no shape is known yet of (1\.)?weight.*run the module once on an example"):
        cut(nn.LazyLinear(4))


@thorough
def test_of_a_compiled_module_the_one_inside_is_cut():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled = torch.compile(module)
    for pipeline, params in (
        interop.split(compiled, at=["1"], example=torch.randn(8, 4)),
        interop.from_modules(compiled, at=[1]),
    ):
        assert [list(params[s]) for s in params] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
        assert pipeline.stages[1].stateful
    names = set(dict(module[1].named_buffers()))
    assert {name.removeprefix("1.") for name in interop.buffers(pipeline, compiled)[1]} == names
    _, params = interop.from_modules([torch.compile(module[0]), module[1]])
    assert list(params[0]) == ["weight", "bias"]
    interop.into_modules([torch.compile(module[0])], {0: {"bias": torch.full((4,), 7.0)}})
    assert module[0].bias[0] == 7
    with pytest.raises(StageError, match=r"stage 0: 0 is wrapped by torch\.compile.*compile=True"):
        interop.from_modules([nn.Sequential(torch.compile(nn.Linear(4, 4)))])


# Hooks


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@each_kind
def test_hooks_of_parameters_are_refused(cut, register):
    module = nn.Linear(4, 4)
    getattr(module.bias, register)(lambda gradient: None)
    with pytest.raises(StageError, match=r"bias has a hook on gradients, which .* would lose: .*where the step gives"):
        cut(module)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("schedule", [schedules.gpipe, schedules.zb_h1])
@each_way
def test_hooks_of_modules_are_kept(schedule, autodiff):
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4) for _ in range(3)]
    modules[1].register_full_backward_hook(lambda module, given, found: tuple(3 * g for g in given))
    modules[1].register_full_backward_pre_hook(lambda module, found: tuple(2 * g for g in found))
    modules[2].register_forward_hook(lambda module, given, found: found * 5)
    pipeline, params = interop.from_modules(modules, loss=mse)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    plan = pipeline.plan(Placement.loop(3), 1)
    _, grads = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Local(), autodiff=autodiff)(params, x, y)
    mse(nn.Sequential(*modules)(x), y).backward()
    for s, module in enumerate(modules):
        torch.testing.assert_close(grads[s], {name: p.grad for name, p in module.named_parameters()})


# Modes


def modes(pipeline):
    return [part.training for stage in pipeline.stages for part in stage.fn.skeleton.modules()]


def test_what_was_frozen_in_evaluation_stays_so():
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))]
    modules[0].eval()
    modules[1][1].eval()
    whole = nn.Sequential(*modules)
    x = torch.randn(8, 4)
    pipeline, params = interop.from_modules(modules)
    by_export, values = interop.split(whole, at=["1"], example=x)
    whole.train()  # has no say any more
    for made, given, state in (
        (pipeline, params, interop.buffers(modules)),
        (interop.from_modules(_frozen(whole), at=[1])[0], None, None),
        (by_export, values, interop.buffers(by_export, whole)),
    ):
        before = None if given is None else made(given, x, state=state)
        evaluating = interop.eval_mode(made)
        back = interop.eval_mode(evaluating, False)
        again = interop.eval_mode(interop.eval_mode(back), False)
        assert modes(made) == modes(back) == modes(again)
        if before is not None:
            assert differences(back(given, x, state=state), before) == []
            assert differences(again(given, x, state=state), before) == []
    assert modes(pipeline) == [False] * 3 + [True, True, False]
    assert not any(modes(interop.eval_mode(pipeline)))


def _frozen(whole):
    whole = copy.deepcopy(whole)
    whole[0].eval()
    return whole


def test_what_was_made_in_evaluation_can_be_trained():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval(), torch.ones(4, 4)
    for pipeline, params in (interop.from_modules(module, at=[1]), interop.split(module, at=["1"], example=x)):
        assert torch.equal(pipeline(params, x), module(x))
        assert (interop.eval_mode(pipeline, False)(params, x) == 0).any()
