"""What a receiver is told of a payload survives the wire; what can't travel is refused by name."""

import math
import tokenize
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import NamedTuple

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import StageError
from fpipe.handlers.distributed import signature
from fpipe.handlers.distributed.signature import Signature, TensorSpec, decode, encode, find_type, signature_of
from fpipe.stages.pytree import ABSENT, NAMESPACE, check_plain, flatten
from tests.support.combinations import examples

Pair = namedtuple("Pair", ["left", "right"])


class Output(NamedTuple):
    hidden: object
    mask: object = None


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Cache:
    keys: object
    length: int = optree.dataclasses.field(pytree_node=False)


class Tagged:
    """A node whose metadata is what the test gives it."""

    def __init__(self, child, tag):
        self.child, self.tag = child, tag

    def __eq__(self, other):
        return (type(self), self.child, self.tag) == (type(other), other.child, other.tag)

    __hash__ = None

    def __repr__(self):
        return f"Tagged({self.child!r}, {self.tag!r})"


optree.register_pytree_node(
    Tagged, lambda t: ((t.child,), t.tag, None), lambda tag, children: Tagged(*children, tag), namespace=NAMESPACE
)


class Unregistered:
    pass


class Outer:
    class Inner(NamedTuple):
        x: int


def travelled(payload):
    return decode(encode(signature_of(payload)))


def rebuilt(tree):
    """The tree that the receiver makes, with plain leaves only."""
    found = travelled(flatten(tree))
    return found.spec.unflatten(found.leaves)


TREES = {
    "leaf": 1,
    "nothing": None,
    "tuple": (1, (2,), ()),
    "list": [1, [2, []]],
    "dict": {"b": 1, "a": {"d": 2, "c": 3}},
    "dict with keys of many kinds": {1: "int", True + 1: "two", (0, "x"): "tuple", 1.5: "float", b"k": "bytes"},
    "OrderedDict": OrderedDict([("b", 1), ("a", 2)]),
    "defaultdict": defaultdict(list, {"b": 1, "a": 2}),
    "defaultdict without a factory": defaultdict(None, {"a": 1}),
    "deque": deque([1, 2]),
    "deque with a bound": deque([1, 2], maxlen=3),
    "namedtuple": Pair(1, Pair(2, 3)),
    "typed namedtuple": Output(1, None),
    "nested class": Outer.Inner(1),
    "structseq": torch.return_types.max((1, 2)),
    "dataclass": Cache(keys=[1, 2], length=7),
    "metadata": Tagged(1, ("a", 2, None, torch.bfloat16, [1.5, b"\x00"], torch.Size([2, 3]))),
    "metadata that is a type": Tagged(1, int),
    "all at once": {"z": [Pair(None, deque([(1,)]))], "a": OrderedDict(x=Cache(keys={"k": Tagged(2, "t")}, length=0))},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_tree_survives_the_wire(tree):
    found = travelled(flatten(tree))
    assert found == signature_of(flatten(tree))
    assert found.spec.unflatten(found.leaves) == tree
    assert type(found.spec.unflatten(found.leaves)) is type(tree)


def test_dicts_keep_the_order_in_which_their_keys_were_put_in():
    tree = {"b": {"z": 0, "y": 1}, "a": 2}
    assert str(rebuilt(tree)) == str(tree)
    assert list(rebuilt(OrderedDict(tree))) == ["b", "a"]
    assert list(rebuilt(defaultdict(int, tree))) == ["b", "a"]


def test_containers_keep_what_is_not_in_their_leaves():
    assert rebuilt(defaultdict(list)).default_factory is list
    assert rebuilt(deque([1], maxlen=5)).maxlen == 5
    assert rebuilt(Cache(keys=1, length=9)).length == 9


LEAVES = [
    *(True, False, 0, -(2**70), 1.5, -0.0, math.inf, 1e-320, 1 - 2j, complex(math.inf, -0.0)),
    *("", 'é"\\\n\x00\ud800', "tensor", b"", b"\x00\xff"),
    *(torch.float8_e4m3fn, torch.device("cpu"), torch.device("cuda", 3), torch.Size([]), torch.Size([2, 0])),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=repr)
def test_a_plain_leaf_survives_the_wire_with_its_type(leaf):
    found = rebuilt({"leaf": leaf})["leaf"]
    assert type(found) is type(leaf)
    assert repr(found) == repr(leaf)


def test_a_leaf_that_is_no_number_stays_one():
    assert math.isnan(rebuilt(math.nan))


def test_what_the_rank_does_not_read_stays_absent():
    assert rebuilt([ABSENT, 1])[0] is ABSENT


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def test_every_dtype_survives_the_wire():
    spec = tuple(TensorSpec(dtype, (2, 0), False) for dtype in DTYPES)
    assert {torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2} <= set(DTYPES)
    assert decode(encode(Signature(None, spec))) == Signature(None, spec)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(True),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64),
        torch.zeros(0, 4),
        torch.zeros(2, 0, 3, dtype=torch.int64),
        torch.tensor(2.0, dtype=torch.float64, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_a_tensor_is_told_by_dtype_shape_and_whether_it_wants_a_gradient(tensor):
    found = travelled(flatten({"x": tensor}))
    assert found.leaves == (TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.requires_grad),)


def test_a_list_of_gradients_travels_without_a_structure():
    gradients = [torch.ones(2), None, torch.tensor(1.0), None]
    found = travelled(gradients)
    assert found == Signature(
        None, (TensorSpec(torch.float32, (2,), False), None, TensorSpec(torch.float32, (), False), None)
    )
    assert travelled([]) == Signature(None, ())


plain = st.one_of(
    *(st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)),
    *(st.text(), st.binary(), st.sampled_from(DTYPES)),
)
leaves = plain | st.builds(TensorSpec, st.sampled_from(DTYPES), st.lists(st.integers(0, 4)).map(tuple), st.booleans())
trees = st.recursive(
    st.just(0) | st.none(),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3).map(deque),
        st.dictionaries(st.text(max_size=2) | st.integers(0, 3), children, max_size=3),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(lambda d: defaultdict(dict, d)),
        st.builds(Pair, children, children),
        st.builds(Cache, keys=children, length=plain),
        st.builds(Tagged, children, plain | st.tuples(plain, plain)),
    ),
    max_leaves=10,
)


@settings(max_examples=examples(200))
@given(trees, st.data())
def test_every_signature_survives_the_wire(tree, data):
    spec = flatten(tree).spec
    found = data.draw(st.lists(leaves, min_size=spec.num_leaves, max_size=spec.num_leaves).map(tuple))
    sent = Signature(spec, found)
    received = decode(encode(sent))
    assert received == sent
    assert repr(received.spec.unflatten(received.leaves)) == repr(spec.unflatten(found))


def local_class():
    class Local(NamedTuple):
        x: int

    return Local(1)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            local_class(),
            r"local_class\.<locals>\.Local is defined inside a function; between ranks a type travels by its name",
        ),
        (Tagged(1, object()), "of type object is not plain, and can't travel between ranks"),
        (Tagged(1, {"a": 1}), "{'a': 1} of type dict is not plain"),
        (defaultdict(lambda: 0, a=1), "of type function is not plain"),
        ({Unregistered(): 1}, "of type Unregistered is not plain"),
        ([Unregistered()], "of type Unregistered is not plain"),
        ([torch.ones], "is not plain"),
    ],
)
def test_what_is_not_plain_is_refused(tree, message):
    with pytest.raises(TypeError, match=message):
        encode(signature_of(flatten(tree)))


def test_a_leaf_that_cannot_travel_is_named_with_its_place_and_a_way_out():
    payload = flatten({"h": [torch.ones(1), Unregistered()]})
    message = (
        r"rank 2, stage 1, microbatch 3: its output\['h'\]\[1\] is a .*test_signature\.Unregistered, .*"
        r"optree\.register_pytree_node\(cls, flatten, unflatten, namespace='fpipe'\)"
    )
    with pytest.raises(StageError, match=message) as caught:
        check_plain(payload, 2, 1, 3)
    assert (caught.value.rank, caught.value.stage, caught.value.microbatch) == (2, 1, 3)


def test_what_passes_the_check_can_be_encoded():
    payload = flatten([torch.ones(1), ABSENT, None, *LEAVES])
    check_plain(payload, 0, 0, 0)
    assert travelled(payload) == signature_of(payload)


def test_a_type_that_is_not_registered_here_or_is_no_type_is_refused():
    text = encode(signature_of(flatten(Tagged(1, "t"))))
    with pytest.raises(
        TypeError, match=r"Unregistered came from another rank, .*register_pytree_node .*namespace='fpipe'"
    ):
        decode(text.replace(b":Tagged", b":Unregistered"))
    for name in ("os:getcwd", "math:pi"):
        with pytest.raises(TypeError, match=f"{name} is not a type"):
            find_type(name)


@pytest.mark.parametrize("name", ["no_such_module:Type", "os:NoSuchType"])
def test_a_type_that_this_process_does_not_know_is_refused(name):
    text = encode(signature_of(flatten(Tagged(1, "t"))))
    with pytest.raises(TypeError, match=name):
        decode(text.replace(f"{__name__}:Tagged".encode(), name.encode()))


def test_nothing_is_pickled_or_evaluated():
    with open(signature.__file__, "rb") as file:
        names = {token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME}
    assert "json" in names
    assert names.isdisjoint({"pickle", "cloudpickle", "dill", "marshal", "shelve", "eval", "exec", "load", "save"})
