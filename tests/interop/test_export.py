"""What export must not lose of a module's forward: kept, or refused with the line that has it."""

import random
import sys
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import fpipe
from fpipe import Placement, StageError, handlers, interop, schedules
from tests.support import split_cases
from tests.support.cases import mse
from tests.support.combinations import few, one_in, thorough


def test_a_cut_inside_autocast_and_inside_no_grad():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def forward(self, x):
            with torch.no_grad():
                x = self.layers[1](self.layers[0](x))
            with torch.autocast("cpu", torch.bfloat16):
                x = self.layers[3](self.layers[2](x))
            return self.layers[4](x.float())

    torch.manual_seed(0)
    case = split_cases.Case(Inside(), torch.randn(4, 4), torch.randn(4, 4), mse, {})
    at = ["layers.1", "layers.2", "layers.3"]
    pipeline, params = interop.split(case.module, at=at, example=case.batch, loss=mse)
    assert [next(iter(params[s])) for s in range(4)] == [f"layers.{i}.weight" for i in range(4)]
    loss, grads, _ = split_cases.run(split_cases.step(pipeline, handlers.Local(), microbatches=1), case, params, {})
    whole, gradients, _ = split_cases.unsplit(case)
    assert loss == whole
    for tree in grads.values():
        for name, gradient in tree.items():
            expected = gradients[name]
            assert torch.equal(gradient, torch.zeros_like(gradient) if expected is None else expected)


@torch.library.custom_op("fpipe_tests::straight", mutates_args=())
def straight(x: torch.Tensor) -> torch.Tensor:
    return x.round()


straight.register_fake(torch.empty_like)
straight.register_autograd(lambda ctx, gradient: gradient)


def test_an_operation_with_a_backward_of_its_own():
    class Rounding(nn.Sequential):
        def forward(self, x):
            return self[1](straight(self[0](x) * 3))

    torch.manual_seed(0)
    case = split_cases.Case(Rounding(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4), mse, {})
    case.module.double()
    case.batch, case.target = case.batch.double(), case.target.double()
    pipeline, params = interop.split(case.module, at=["1"], example=case.batch, loss=mse)
    found = split_cases.run(split_cases.step(pipeline, handlers.Local()), case, params, {})
    split_cases.check(found, case, pipeline)
    assert found[1][0]["0.weight"].any()


class Wrong(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        match self.what:
            case "branch":
                x = x if self.first(x).sum() > 0 else -x
            case "parameter":
                with torch.no_grad():
                    self.last.weight.clamp_(-1, 1)
            case "data":
                self.last.weight.data.clamp_(-1, 1)
            case "input":
                x.mul_(2)
            case "checkpoint":
                x = torch.utils.checkpoint.checkpoint(self.last, self.first(x), use_reentrant=True)
            case "hook":
                x = self.first(x)
                x.register_hook(lambda gradient: gradient * 2)
            case "output":
                return slice(self.last(self.first(x)))
        return self.last(self.first(x))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("branch", r"Wrong can't be exported: .*needs the value of a tensor.*interop\.from_modules"),
        ("parameter", r"changes the parameter first\.weight, which is tied to last\.weight, in place \(File .*clamp_"),
        ("data", r"forward uses \.data of a tensor.*write \.detach\(\)"),
        ("input", r"writes in place to its argument x \(File .*mul_.*clone"),
        ("checkpoint", r"applies CheckpointFunction, .* which export would lose.*take use_reentrant=False"),
        ("hook", r"registers a hook on a tensor's gradient, which export would lose \(in .*custom_op"),
        ("output", r"Wrong can't be exported.*slice"),
    ],
)
def test_a_module_that_cannot_be_split_says_why(what, says):
    with pytest.raises(StageError, match=f"(?s){says}") as caught:
        interop.split(Wrong(what), at=["last"], example=torch.randn(4, 4))
    if what not in ("checkpoint", "output"):
        assert f"{__file__}" in str(caught.value)


class Assigned(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.a(x)
        z = torch.zeros_like(h)
        z[:, :3] = h[:, 3:]
        z[:, 3:].copy_(h[:, :3].sin())
        z[0] = 1.0
        return self.b(z) * z


def test_slices_may_be_assigned():
    torch.manual_seed(0)
    module, x, y = Assigned().double(), torch.randn(4, 6).double(), torch.randn(4, 6).double()
    pipeline, params = interop.split(module, at=["b"], example=x, loss=mse)
    plan = pipeline.plan(Placement.loop(2), 1)
    own = fpipe.value_and_grad(pipeline, schedules.zb_h1, plan, handler=handlers.Local(), autodiff="graph")
    loss, grads = own(params, x, y)
    expected = mse(module(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads["ab".index(name[0])][name], parameter.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("hook", ["module", "parameter"])
def test_hooks_on_gradients_are_refused(hook):
    module = Assigned()
    if hook == "module":
        module.b.register_full_backward_hook(lambda *given: None)
    else:
        module.b.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(StageError, match=r"^b(\.weight)? has a hook on gradients, which export would lose"):
        interop.split(module, at=["b"], example=torch.randn(4, 6))


class Forward(nn.Module):
    """Two layers and a buffer, and a forward of its own."""

    def __init__(self, forward):
        super().__init__()
        self.own, self.a, self.b = forward, nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        return self.b(self.own(self, x))


def under_autocast(m, x):
    h = m.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            stopped = m.a(h)
        return h * stopped.float().sin() + m.a(h).float()


def autocast_within(m, x):
    h = m.a(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        stopped = m.a(h)
    return h + stopped.float()


def enabled_again(m, x):
    with torch.no_grad():
        h = m.a(x)
        with torch.enable_grad():
            g = m.a(x)
        k = m.a(g)
    return h + g + k


@torch.no_grad()
def without(m, x):
    return m.a(x)


def decorated(m, x):
    with torch.no_grad():
        h = without(m, x)
        g = m.a(x)
    return m.a(x) + h + g


def inferred(m, x):
    h = m.a(x)
    with torch.inference_mode():
        scale = h.abs().amax()
    return h / scale.clone()  # torch wants one


def by_function(m, x):
    torch.set_grad_enabled(False)
    h = m.a(x)
    torch.set_grad_enabled(True)
    return m.a(x) + h


def asked(m, x):
    with torch.no_grad():
        h = m.a(x)
        if not torch.is_grad_enabled():
            h = h * 2
    return m.a(x) + h


def view_made_without(m, x):
    h = m.a(x)
    with torch.no_grad():
        rows = h[:2] * 3
    h = h * rows.sum()
    h.mul_(2)
    return h


def written_later(m, x):
    h = m.a(x)
    with torch.no_grad():
        held = h[0]
    g = h.clone()
    g[0] += held
    return g


def filled_without(m, x):
    h = m.a(x)
    with torch.no_grad():
        made = torch.empty_like(h)
        made.copy_(h)
        made[0] = 1.0
    made += m.b(x)
    return h * made


def buffer_without(m, x):
    h = m.a(x)
    with torch.no_grad():
        m.seen.mul_(0.9).add_(h.mean(0))
    return h + m.seen


def whole_without(m, x):
    h = m.a(x)
    with torch.no_grad():
        kept = h.detach().clone()
        kept.mul_(2)
    return h * kept


def counted(m, x):
    m.seen += 1
    return m.a(x) + m.seen


def averaged(m, x):
    m.seen = 0.9 * m.seen + m.a(x).mean(0).detach()
    return m.a(x) + m.seen


def given_away(m, x):
    h = m.a(x)
    m.seen.copy_(h.detach().mean(0))
    return h * m.seen.sum()


def mapped(m, x):
    return torch.vmap(lambda row: m.a(row).sin())(x)


KEPT = [under_autocast, autocast_within, enabled_again, decorated, inferred, by_function, asked, view_made_without]
KEPT += [written_later, filled_without, buffer_without, whole_without, counted, averaged, given_away, mapped]


@one_in(4)
@pytest.mark.parametrize("forward", few(KEPT, slice(None, None, 2)), ids=lambda f: f.__name__)
def test_what_has_no_gradients_has_none(forward):
    torch.manual_seed(0)
    module, x, y = Forward(forward), torch.randn(4, 6), torch.randn(4, 6)
    case = split_cases.Case(module, x, y, mse, {})
    pipeline, params = interop.split(module, at=[interop.End("a")], example=x, loss=mse)
    state = interop.buffers(pipeline, module)
    _, grads, new = split_cases.run(split_cases.step(pipeline, handlers.Local(), microbatches=1), case, params, state)
    _, gradients, buffers = split_cases.unsplit(case)
    found = {name: gradient for tree in grads.values() for name, gradient in tree.items()}
    for name, gradient in gradients.items():
        expected = torch.zeros_like(found[name]) if gradient is None else gradient
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(tree["seen"], buffers["seen"]) for tree in new.values())


def in_place_without(m, x):
    h = m.a(x)
    with torch.no_grad():
        h.mul_(2)
    return h


def into_detached(m, x):
    h = m.a(x).detach()
    h += m.b(x)
    return h


def through_detached(m, x):
    h = m.a(x)
    h.detach().clamp_(min=0)
    return h


def into_a_view_made_without(m, x):
    h = m.a(x)
    with torch.no_grad():
        rows = h[:2]
    rows += m.b(x)[:2]
    return h


def of_the_node(m, x):
    h = m.a(x)
    h.grad_fn.register_prehook(lambda gradients: gradients)
    return h


def detached_in_place(m, x):
    return m.a(x).detach_()


def data_assigned(m, x):
    m.seen.data = m.seen + 1
    return m.a(x) + m.seen


def frozen_inside(m, x):
    m.a.weight.requires_grad_(False)
    return m.a(x)


def instance_norm(m, x):
    return nn.functional.instance_norm(m.a(x)[None], m.seen[:4].clone(), torch.ones(4))[0]


def inside_a_branch(m, x):
    def yes(h):
        with torch.no_grad():
            return h * 2

    return torch.cond(x.sum() > 0, yes, lambda h: h * 3, (m.a(x),))


def packed(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda saved: saved.float()):
        return m.a(x).sin()


class Mapped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def mapped(m, x):
    return torch.vmap(Mapped.apply)(m.a(x))


@one_in(4)
@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (
            in_place_without,
            r"writes in place to values that have gradients, where they are switched off \(File ",
        ),
        (into_detached, r"writes in place .* into a tensor that was detached from them.*test_export"),
        (through_detached, r"writes in place .* into a tensor that was detached from them.*test_export"),
        (into_a_view_made_without, r"A view was created in no_grad mode .*rows \+="),
        (mapped, r"applies Mapped, .* which export would lose \(in .*vmap"),
        (of_the_node, r"asks for a tensor's grad_fn, which export would lose \(in .*register_prehook"),
        (packed, "packs saved tensors by hooks of its own"),
        (detached_in_place, r"detaches a tensor in place, .*: write \.detach\(\)"),
        (data_assigned, r"assigns \.data of a tensor, .*torch\.no_grad\(\)"),
        (frozen_inside, "changes whether a tensor requires gradients"),
        (instance_norm, r"changes the running statistics of an instance norm \(File "),
        (inside_a_branch, r"switches gradients off inside cond, which export would lose \(in "),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_autograd_would_see_otherwise_is_refused(forward, says):
    with pytest.raises(StageError, match=f"(?s){says}"):
        interop.split(Forward(forward), at=["b"], example=torch.randn(4, 6))


def by_rows(m, x):
    return m.a(x) * (2 if x.shape[0] > 5 else 3)


def by_evenness(m, x):
    return m.a(x) * (2 if x.shape[0] % 4 == 0 else 3)


def by_root(m, x):
    return m.a(x) * int(x.shape[0] ** 0.5)


def by_distance(m, x):
    return m.a(x) * (2 if abs(x.shape[0] - 10) <= 2 else 3)


def by_length(m, x):
    return m.a(x) * len(x)


@one_in(4)
@pytest.mark.parametrize(
    ("forward", "shapes", "right", "wrong", "says"),
    [
        (by_rows, None, [8, 6, 16], 4, r"axis 0 of the batch is 4, and the module was split where axis 0 of .* > 5"),
        (by_root, None, [8, 4, 6], 9, r"is 9, .* where math\.trunc\(axis 0 of the batch \*\* 0\.5\) == 2"),
        (by_distance, None, [8, 9], 4, r"is 4, and the module was split where"),
        (by_length, None, [8], 6, "was split for 8 along axis 0: take an example of another size"),
        (by_evenness, None, [8, 4, 12], 6, r"is 6, and the module was split where \(axis 0 of the batch % 4\) == 0"),
        (lambda m, x: m.a(x), {0: Dim("rows", min=4, max=9)}, [4, 9], 3, r"is 3, .* where axis 0 of the batch >= 4"),
        (lambda m, x: m.a(x), {0: Dim("rows", max=9)}, [2, 1], 10, r"is 10, .* where axis 0 of the batch <= 9"),
        (lambda m, x: m.a(x), {}, [8], 7, r"was split for 8 along axis 0: take an example of another size"),
    ],
    ids=["rows", "root", "distance", "length", "evenness", "least", "most", "fixed"],
)
def test_sizes_at_which_forward_does_something_else(forward, shapes, right, wrong, says):
    torch.manual_seed(0)
    module = Forward(forward)
    shapes = (shapes,) if shapes else shapes
    pipeline, params = interop.split(module, at=["b"], example=torch.randn(8, 6), dynamic_shapes=shapes)
    for rows in right:
        x = torch.randn(rows, 6)
        torch.testing.assert_close(pipeline(params, x), module(x))
    with pytest.raises(ValueError, match=says):
        pipeline(params, torch.randn(wrong, 6))


def test_sizes_that_hang_together():
    class Two(Forward):
        def forward(self, x, y):
            return self.b(self.a(x) + y.unflatten(0, (-1, 2)).sum(1))

    module, rows = Two(None), Dim("rows")
    shapes = ({0: rows}, {0: 2 * rows})
    given = torch.randn(4, 6), torch.randn(8, 6)
    pipeline, params = interop.split(module, at=["b"], example=given, dynamic_shapes=shapes)
    more = torch.randn(3, 6), torch.randn(6, 6)
    torch.testing.assert_close(pipeline(params, more), module(*more))
    with pytest.raises(ValueError, match=r"axis 0 has to be \(?2 ?\* ?axis 0 of the batch\[0\]\)?, which is 6"):
        pipeline(params, (torch.randn(3, 6), torch.randn(8, 6)))


def of_python(m, x):
    return m.a(x) * random.random()


def of_numpy(m, x):
    return m.a(x) * float(np.random.rand())


@pytest.mark.parametrize("forward", [of_python, of_numpy])
def test_random_numbers_that_are_not_torchs(forward):
    with pytest.raises(StageError, match="draws from the random numbers of Python or NumPy"):
        interop.split(Forward(forward), at=["b"], example=torch.randn(4, 6))


def test_numbers_that_forward_counts():
    def counting(m, x):
        m.calls += 1
        return m.a(x)

    module = Forward(counting)
    module.calls = 3
    with pytest.warns(UserWarning, match=r"the attribute calls of a Forward, and then changes it from 3 to 4") as told:
        interop.split(module, at=["b"], example=torch.randn(4, 6))
    assert told[0].filename == __file__
    assert module.calls == 3


@pytest.mark.parametrize("way", ["autograd", "func"])
def test_gradients_that_forward_takes(way):
    def forward(m, x):
        if way == "func":
            return m.a(torch.func.grad(lambda y: m.a(y).tanh().sum())(x))
        y = x.detach().requires_grad_()
        return m.a(torch.autograd.grad(m.a(y).tanh().sum(), y, create_graph=True)[0])

    with pytest.raises(StageError, match=r"takes gradients of its own.*in a submodule.*interop\.from_modules takes"):
        interop.split(Forward(forward), at=["b"], example=torch.randn(4, 6))


class CausalModel(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options, self.head = options, nn.Linear(8, 2)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.transformer(x, x, tgt_mask=mask, **self.options))


@thorough
def test_a_mask_of_a_transformer_comes_with_what_it_is():
    x = torch.randn(2, 3, 8)
    with pytest.raises(StageError, match=r"looks at the values of a mask: give the transformer tgt_is_causal="):
        interop.split(CausalModel(), at=["head"], example=x)
    module = CausalModel(tgt_is_causal=True).eval()
    pipeline, params = interop.split(module, at=["head"], example=x)
    torch.testing.assert_close(pipeline(params, x), module(x))


def branching(m, x):
    h = m.a(x)
    return h if h.sum() > 0 else -h


def sampling(m, x):
    return torch.distributions.Normal(m.a(x), 1.0, validate_args=True).rsample()


@pytest.mark.parametrize(
    ("forward", "says"), [(branching, r"use torch\.where or torch\.cond"), (sampling, "take validate_args=False")]
)
def test_what_needs_the_value_of_a_tensor_is_told_once(forward, says, capfd):
    with pytest.raises(StageError, match=says):
        interop.split(Forward(forward), at=["b"], example=torch.randn(4, 6))
    assert capfd.readouterr().err == ""


def test_what_forward_says_is_heard(capfd):
    def talking(m, x):
        print("rows", x.shape[1], file=sys.stderr)
        return m.a(x)

    interop.split(Forward(talking), at=["b"], example=torch.randn(4, 6))
    assert "rows 6" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"at": [1], "example": torch.randn(4, 6)}, r"names of submodules and End\(name\), and no 1"),
        ({"at": ["b"]}, r"what example= and kwargs= are: missing a required argument: 'x'"),
    ],
)
def test_options_of_a_wrong_kind(options, says):
    with pytest.raises(TypeError, match=says):
        interop.split(Forward(by_rows), **options)


def test_a_name_with_an_at_sign():
    module = nn.Sequential()
    for name in ("a", "b@1"):
        module.add_module(name, nn.Linear(6, 6))
    pipeline, _ = interop.split(module, at=["b@1"], example=torch.randn(4, 6))
    assert list(pipeline.stages[1].fn.spec.params) == ["b@1.weight", "b@1.bias"]


class Masked(Forward):
    def forward(self, x, mask=None, scale=2.0, **more):
        h = self.a(x) * scale
        h = h if mask is None else h * mask
        return self.b(h * more["width"].shape[1] if "width" in more else h)


X = torch.randn(4, 6)


@one_in(4)
@pytest.mark.parametrize(
    ("given", "batch", "says"),
    [
        (
            {"x": X},
            {"x": X, "mask": X},
            r"the batch\['mask'\] is float32\[4, 6\], and the module was split with nothing",
        ),
        ({"x": X, "mask": None}, {"x": X, "mask": X}, r"split with nothing there: put it into the example"),
        ({"x": X, "scale": 2.0}, {"x": X, "scale": 3.0}, r"\['scale'\] is 3\.0, and the module was split for 2\.0"),
        (
            {"x": X},
            {"x": X, "mask": X.numpy()},
            r"the batch\['mask'\] is ndarray, and the module was split with nothing",
        ),
        ({"x": X}, UserDict(x=X, mask=X), r"batch is a UserDict, no tree|the batch is UserDict"),
        ({"x": X, "width": X}, {"x": X, "width": 6}, r"\['width'\] is 6, and the module was split for float32\[4, 6\]"),
        ({"x": X, "width": X}, {"x": X, "width": X[:, :3]}, r"\['width'\] is .*, and the module was split for 6 along"),
    ],
    ids=["more", "none", "constant", "array", "mapping", "number", "size"],
)
def test_a_batch_with_what_the_example_lacked(given, batch, says):
    module = Masked(None)
    pipeline, params = interop.split(module, at=["b"], kwargs=given, loss=mse)
    torch.testing.assert_close(pipeline(params, given), module(**given))
    torch.testing.assert_close(pipeline(params, {"width": None, **given, "mask": None}), module(**given))
    torch.testing.assert_close(pipeline(params, {"scale": 2.0, **given}), module(**given))
    with pytest.raises(ValueError, match=says):
        pipeline(params, batch)
    with pytest.raises((ValueError, StageError), match=says):
        split_cases.step(pipeline, handlers.Local())(params, batch, torch.randn(4, 6))


def test_rows_are_free_in_arguments_by_any_name():
    module = Masked(None)
    given = {"x": X, "width": X}
    pipeline, params = interop.split(module, at=["b"], kwargs=given)
    fewer = {name: x[:3] for name, x in given.items()}
    torch.testing.assert_close(pipeline(params, fewer), module(**fewer))


def test_a_condition_on_what_several_stages_read():
    class Two(Forward):
        def forward(self, x, y):
            h = self.b(self.a(x).mean(1)) + y.mean(1)
            return h * 2 if x.shape[1] > y.shape[1] else h

    given = {"x": torch.randn(3, 5, 6), "y": torch.randn(3, 4, 6)}
    free = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in given}
    pipeline, params = interop.split(Two(None), at=["b"], kwargs=given, dynamic_shapes=free)
    pipeline(params, given)
    with pytest.raises(ValueError, match=r"axis 1 of the batch\['x'\] is 5.* split where"):
        pipeline(params, {**given, "y": torch.randn(3, 6, 6)})


def test_a_buffer_that_is_returned_and_one_that_takes_anothers_value():
    class Returning(Forward):
        def forward(self, x):
            h = self.a(x)
            self.seen.copy_(self.b(h).detach().mean(0))
            return self.b(h), self.seen

    module = Returning(None)
    pipeline, params = interop.split(module, at=["b@1"], example=X)
    found, _ = pipeline(params, X, state=interop.buffers(pipeline, module))
    torch.testing.assert_close(found, module(X))

    class Two(Forward):
        def forward(self, x):
            y = self.b(self.a(x) + self.seen)
            self.before.copy_(self.seen)
            self.seen.copy_(y.detach().mean(0))
            return y

    module = Two(None)
    module.register_buffer("before", torch.zeros(6))
    pipeline, params = interop.split(module, stages=1, example=X)
    assert pipeline(params, X, state=interop.buffers(pipeline, module))[0].shape == (4, 6)


def test_a_buffer_that_is_assigned_another_as_it_is():
    def shifted(m, x):
        m.before = m.seen
        m.seen = m.a(x).mean(0).detach()
        return m.a(x) + m.before

    module = Forward(shifted)
    module.register_buffer("before", torch.zeros(6))
    with pytest.raises(StageError, match=r"assigns a buffer, .* to a buffer as it is: assign a clone\(\)"):
        interop.split(module, at=["b"], example=X)


@pytest.mark.parametrize("how", ["lambda", "method"])
def test_a_closure_over_the_module(how):
    module = Forward(lambda m, x: m.act(m.a(x)))
    if how == "lambda":
        module.act = lambda h: h * module.b.bias
    else:
        old, module.act = module.a.forward, torch.tanh
        module.a.forward = lambda x: old(x) * 2
    says = r"forward reads (a|b)\.(bias|weight) of the module itself, not of the one it is called on"
    with pytest.raises(StageError, match=says):
        interop.split(module, at=["b"], example=X)
