"""Calls with a gradient of their own, under `split`: custom autograd functions, and gradients that a forward takes."""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from transformers import BloomConfig, BloomForCausalLM

from fpipe import StageError, handlers, interop
from tests.support import split_cases
from tests.support.cases import mse
from tests.support.combinations import combined, one_in, thorough


class Scaled(Function):
    """Two results, an argument that is no tensor, and a gradient that no operation of the forward has."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        return x.tanh() * scale, x.round()

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return 3 * first * x + second, None


class Reversed(Function):
    """Its result is its argument."""

    @staticmethod
    def forward(x, rows):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = float(inputs[0].shape[0] == inputs[1]) - 6

    @staticmethod
    def backward(ctx, gradient):
        return ctx.scale * gradient, None


class Activation(nn.Module):
    def __init__(self):
        super().__init__()
        self.apply_scaled = Scaled.apply

    def forward(self, x):
        first, second = self.apply_scaled(x, 2.0)
        return Reversed.apply(first + second, x.shape[0])


class Force(nn.Module):
    """Takes a gradient of its own, whose gradient reaches the parameters."""

    def __init__(self, energy):
        super().__init__()
        self.energy = energy
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, *, factor=1.0):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).tanh().sum(), x, create_graph=True)
        return x + force * self.scale * factor


class Layers(nn.Module):
    """The energy's layer is that of the end, too."""

    def __init__(self):
        super().__init__()
        self.first, self.activation, self.last = nn.Linear(4, 4), Activation(), nn.Linear(4, 4)
        self.force = Force(self.last)

    def forward(self, x):
        x = self.activation(self.first(x))
        x = self.force(x, factor=2.0)
        with torch.no_grad():
            bias = self.activation(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.activation(self.first(x))
        return self.last(y.to(x.dtype) + bias)


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    return split_cases.Case(Layers(), torch.randn(6, 4), torch.randn(6, 4), mse, {})


@one_in(2)
@combined(autodiff=["eager", "graph"], name=["gpipe", "zb_h1"])
def test_gradients_of_their_own_are_those_of_the_module(case, name, autodiff):
    pipeline, params = interop.split(case.module, at=["force", "last"], example=case.batch[:3], loss=mse)
    step = split_cases.step(pipeline, handlers.Local(), name, microbatches=2, autodiff=autodiff)
    loss, grads, _ = split_cases.run(step, case, params, {})
    whole, gradients, _ = split_cases.unsplit(case, 2)
    torch.testing.assert_close(loss, whole)
    assert {n for tree in grads.values() for n, x in tree.items() if x is not None} == gradients.keys()
    for tree in grads.values():
        for key, gradient in tree.items():
            torch.testing.assert_close(gradient, gradients.get(key), rtol=1e-5, atol=1e-6)


@thorough
def test_the_force_is_kept_whole(case):
    pipeline, params = interop.split(case.module, at=["force"], example=case.batch)
    with pytest.raises(ValueError, match=r"'force\.energy' doesn't run in forward"):
        interop.split(case.module, at=["force.energy"], example=case.batch)
    torch.testing.assert_close(interop.eval_mode(pipeline)(params, case.batch), case.module(case.batch))
    assert len(interop.split(case.module, stages=2, example=case.batch)[0].stages) == 2


class Quantized(nn.Sequential):
    def forward(self, x):
        x = torch.fake_quantize_per_tensor_affine(self[0](x), scale=0.1, zero_point=0, quant_min=-8, quant_max=7)
        scale, zero = torch.full((4,), 0.2), torch.zeros(4, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(self[1].weight, scale, zero, 0, -8, 7)
        return nn.functional.linear(x, weight, self[1].bias)


@pytest.mark.parametrize("autodiff", ["eager", "graph"])
def test_fake_quantization_has_any_size(autodiff):
    torch.manual_seed(0)
    case = split_cases.Case(Quantized(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(7, 4), torch.randn(7, 4), mse, {})
    pipeline, params = interop.split(case.module, at=[interop.End("0")], example=case.batch[:3], loss=mse)
    step = split_cases.step(pipeline, handlers.Local(), microbatches=1, autodiff=autodiff)
    split_cases.check(split_cases.run(step, case, params, {}), case, pipeline, 1, {"rtol": 0, "atol": 0})


def test_a_module_of_fake_quantization_is_refused_with_the_reason():
    module = nn.Sequential(nn.Linear(4, 4), torch.ao.quantization.FakeQuantize(), nn.Linear(4, 4))
    with pytest.raises(StageError, match=r"A FakeQuantize looks at its switches.*interop\.from_modules takes"):
        interop.split(module, at=["2"], example=torch.randn(3, 4))


class Writing(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Taking(Function):
    @staticmethod
    def forward(ctx, x, layer):
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Wrong(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.a, self.b = what, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        match self.what:
            case "in place":
                x = Writing.apply(x)
            case "module":
                x = Taking.apply(x, self.b)
            case "vmap":
                x = torch.vmap(lambda row: Reversed.apply(row, 4))(x)
            case "own":
                x = x + torch.autograd.grad(self.b(x).tanh().sum(), x, create_graph=True)[0]
        return self.b(x)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("in place", "Writing writes in place to a tensor that it reads: write to a clone"),
        ("module", "Taking takes a Linear, which a stage can't hold"),
        ("vmap", r"applies Reversed, .*under torch\.vmap, which export would lose \(in .*custom_op"),
        ("own", r"takes gradients of its own, .* \(in .*take them in a submodule, which is kept whole.*from_modules"),
    ],
)
def test_other_calls_are_refused(what, says):
    with pytest.raises(StageError, match=f"(?s){says}"):
        interop.split(Wrong(what), at=["b"], example=torch.randn(4, 4))


@thorough
def test_bloom_trains_with_the_bits_of_its_own_backward():
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "n_layer": 2, "n_head": 2}
    module = BloomForCausalLM(BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False))
    tokens = torch.randint(0, 16, (2, 5))

    def loss(output, target):
        return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())

    pipeline, params = interop.split(module, at=["transformer.h.1"], example=tokens, loss=loss)
    step = split_cases.step(pipeline, handlers.Local(), microbatches=1)
    found, grads = step(params, tokens, tokens)
    expected = loss(module(tokens), tokens)
    expected.backward()
    assert torch.equal(found, expected.detach())
    for tree in grads.values():
        for name, gradient in tree.items():
            assert torch.equal(gradient, module.get_parameter(name).grad), name
