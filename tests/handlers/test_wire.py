"""What is written into messages comes out of them: every layout and dtype, packed or alone."""

import pytest
import torch

from fpipe.handlers.distributed.signature import Signature, TensorSpec, signature_of
from fpipe.handlers.distributed.strides import strides_of
from fpipe.handlers.distributed.wire import SMALL, PayloadCodec
from fpipe.stages.pytree import Flat, flatten

CPU = torch.device("cpu")


def arrived(payload, codec=None):
    """The payload as its receiver gets it: message by message, into buffers of its own."""
    codec = codec or PayloadCodec(signature_of(payload), CPU)
    sent, received = codec.messages(payload), PayloadCodec(codec.signature, CPU).buffers()
    assert [(x.shape, x.dtype) for x in sent] == [(x.shape, x.dtype) for x in received]
    assert all(x.is_contiguous() and x.numel() for x in sent)
    for ours, theirs in zip(received, sent, strict=True):
        ours.copy_(theirs)
    return codec.payload(received), sent


def told(x):
    """All that a receiver may see of a leaf."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.resolve_conj().resolve_neg()
    return x.dtype, x.shape, strides_of(x), x.requires_grad, x.detach().clone().reshape(-1).view(torch.uint8).tolist()


def values(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.arange(torch.Size(shape).numel()) % 2 > 0


BIG = SMALL // 4 + 1
TENSORS = {
    "0-dim": torch.tensor(-0.0),
    "bool": values(3, 5, dtype=torch.bool),
    "bfloat16": values(4, 3, dtype=torch.bfloat16),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "conjugate, expanded": torch.randn(1, 3, dtype=torch.complex64).conj().expand(2, 3),
    "negative, every other": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    "empty": torch.zeros(0, 4),
    "empty inside": torch.zeros(2, 0, 3, dtype=torch.int64),
    "transposed": values(3, 4).T,
    "channels last": values(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": values(1, 4).expand(3, 4),
    "every other": values(3, 8)[:, ::2],
    "trained": values(2, 3).requires_grad_(),
    "not a number": torch.tensor([float("nan"), float("-inf")]),
    "large": values(BIG),
    "large, transposed": values(2, BIG).T,
    "large, trained": values(BIG).requires_grad_(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_alone_comes_out_as_it_went_in(name):
    found, sent = arrived(flatten({"x": TENSORS[name], "n": 3}))
    assert list(map(told, found.leaves)) == [3, told(TENSORS[name])]
    assert len(sent) == (TENSORS[name].numel() > 0)


@pytest.mark.parametrize("names", [list(TENSORS), list(reversed(TENSORS))], ids=["forwards", "backwards"])
def test_small_tensors_come_out_of_one_message(names):
    found, sent = arrived(flatten([TENSORS[name] for name in names]))
    assert [told(x) for x in found.leaves] == [told(TENSORS[name]) for name in names]
    assert len(sent) == 1 + sum("large" in name for name in names)
    starts = [x.data_ptr() % 64 for x in found.leaves if x.numel()]
    assert starts == [0] * len(starts)


def test_gradients_travel_as_a_list_with_none_where_there_is_none():
    gradients = [torch.ones(2), None, torch.tensor(1.0), None]
    found, _ = arrived(gradients)
    assert [None if g is None else g.tolist() for g in found] == [[1.0, 1.0], None, 1.0, None]


def test_a_gradient_that_is_missing_this_time_travels_as_zeros():
    codec = PayloadCodec(Signature(None, (TensorSpec(torch.float32, (2,), False),)), CPU)
    assert arrived([torch.ones(2)], codec)[0][0].tolist() == [1.0, 1.0]
    for _ in range(2):
        assert arrived([None], codec)[0][0].tolist() == [0.0, 0.0]
        assert arrived([torch.full((2,), 3.0)], codec)[0][0].tolist() == [3.0, 3.0]


def test_what_is_already_contiguous_is_sent_without_a_copy():
    large = torch.randn(BIG)
    codec = PayloadCodec(signature_of([large]), CPU)
    for _ in range(3):
        assert [x.data_ptr() for x in codec.messages([large])] == [large.data_ptr()]


def test_a_gradient_that_may_be_missing_is_told_by_a_message_of_its_own():
    spec = TensorSpec(torch.float32, (2,), False)
    codec = PayloadCodec(Signature(None, (spec, spec), (1,)), CPU)
    assert arrived([torch.ones(2), None], codec)[0][1] is None
    assert arrived([torch.ones(2), torch.tensor([0.0, 2.0])], codec)[0][1].tolist() == [0.0, 2.0]


def test_a_gradient_in_another_layout_is_brought_into_the_one_agreed_on():
    x = torch.randn(3, 4)
    codec = PayloadCodec(Signature(None, (TensorSpec(torch.float32, (3, 4), False, (1, 3)),)), CPU)
    (found,), _ = arrived([x], codec)
    assert found.stride() == (1, 3)
    assert torch.equal(found, x)


OTHERS = {
    "shape": [torch.ones(3), 1],
    "dtype": [torch.ones(2, dtype=torch.float64), 1],
    "layout": [torch.ones(4)[::2], 1],
    "gradient": [torch.ones(2, requires_grad=True), 1],
    "leaf": [torch.ones(2), True],
    "number": [torch.ones(2), 2],
    "structure": (torch.ones(2), 1),
    "length": [torch.ones(2)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_another_signature_is_refused_also_after_one_that_fits(name):
    fits = flatten([torch.ones(2), 1])
    codec = PayloadCodec(signature_of(fits), CPU)
    for _ in range(2):
        assert codec.messages(flatten(OTHERS[name])) is None
        assert codec.messages(fits) is not None


def test_a_received_tree_has_the_signature_of_the_one_sent():
    tree = {"x": torch.ones(2, requires_grad=True), "n": 3, "more": (torch.ones(1, dtype=torch.int32), "text")}
    found, _ = arrived(flatten(tree))
    assert isinstance(found, Flat)
    assert signature_of(found) == signature_of(flatten(tree))
