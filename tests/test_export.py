"""What export must not lose of a module's forward: kept, or refused with the line that has it."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe import Placement, StageError, handlers, interop, schedules
from tests import split_cases
from tests.cases import mse


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


class Straight(torch.autograd.Function):
    """Rounds, and passes gradients straight through."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


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
            case "function":
                x = Straight.apply(self.first(x))
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
        ("function", r"applies Straight, .* which export would lose \(in .*custom_op with register_autograd"),
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
