"""torch.func composes with a pipeline as with the plain function."""

import optree
import pytest
import torch
from torch.func import grad, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support import cases


def plain(case):
    """The same computation as one function, written out."""
    fns = [stage.fn for stage in case.pipeline.stages]

    def linear(params, x, target):
        for s, fn in enumerate(fns):
            x = fn(params[s], x)
        return cases.mse(x, target)

    def skip(params, x, target):
        first = fns[0](params[0], x)
        h = fns[1](params[1], first["h"], first["skip"])
        h = fns[2](params[2], h, first["skip"])
        return cases.mse(fns[3](params[3], h, h, first["skip"], x), target)

    def tied(params, x, target):
        full = {**params, 3: {**params[3], "head": params[0]["wte"]}}
        for s, fn in enumerate(fns):
            x = fn(full[s], x)
        return cases.nll(x, target)

    return {"linear": linear, "skip": skip, "tied": tied}


@pytest.fixture(params=["linear", "skip", "tied"])
def both(request):
    torch.manual_seed(0)
    case = cases.CASES[request.param](4)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel on CPU has no forward mode
        yield case, plain(case)[request.param]


def test_grad(both):
    case, function = both
    arguments = (case.params, case.batch, case.target)
    torch.testing.assert_close(grad(case.pipeline)(*arguments), grad(function)(*arguments), rtol=0, atol=0)


def test_jvp(both):
    case, function = both
    tangents = optree.tree_map(torch.ones_like, case.params)

    def at(f):
        return jvp(lambda p: f(p, case.batch, case.target), (case.params,), (tangents,))

    torch.testing.assert_close(at(case.pipeline), at(function), rtol=0, atol=0)


def test_jacrev(both):
    case, function = both

    def outputs(f):
        return jacrev(lambda p: torch.stack([f(p, case.batch, case.target)] * 2))(case.params)

    torch.testing.assert_close(outputs(case.pipeline), outputs(function), rtol=0, atol=0)


def test_vmap(both):
    case, function = both
    batch = torch.stack([case.batch, case.batch.flip(0)])
    target = torch.stack([case.target, case.target.flip(0)])

    def many(f):
        return vmap(f, in_dims=(None, 0, 0))(case.params, batch, target)

    torch.testing.assert_close(many(case.pipeline), many(function), rtol=0, atol=0)


def test_per_sample_gradients(both):
    case, function = both

    def many(f):
        return vmap(grad(f), in_dims=(None, 0, 0))(case.params, case.batch[:, None], case.target[:, None])

    torch.testing.assert_close(many(case.pipeline), many(function), rtol=0, atol=0)
