"""Signatures of values: structure, shapes, dtypes and plain leaves, encoded as text. Never pickled.

A user's type travels by its name. The receiver looks it up among the modules that it has imported, and imports none. It
must be registered with optree on both sides, and its metadata must be plain.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe.handlers.distributed.strides import Strides, strides_of
from fpipe.stages.cuts import Cut, cuts_of
from fpipe.stages.pytree import ABSENT, NAMESPACE, Absent, Flat, Text, flatten

DICTS = (dict, OrderedDict, defaultdict)


class TensorSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    strides: Strides | None = None  # None: contiguous
    cut: Cut | None = None  # its place, if it is a piece of a larger tensor

    def __str__(self) -> str:
        more = f" of strides {self.strides}" if self.strides else ""
        more += f", {self.cut}," if self.cut else ""
        return f"{_dtype_name(self.dtype)}{list(self.shape)}{more}{' wanting a gradient' if self.requires_grad else ''}"


class Signature(NamedTuple):
    """The structure of a payload, which a receiver must know before it arrives.

    Args:
        spec: the structure; None for a list of gradients.
        leaves: a `TensorSpec` for each tensor, other leaves as they are.
        optional: indices of leaves that may be missing; a message has a flag for each.
    """

    spec: optree.PyTreeSpec | None
    leaves: tuple[Any, ...]
    optional: tuple[int, ...] = ()

    def text(self) -> str:
        """Return the signature for error messages: `{'h': float32[2, 8]}`."""
        leaves = [Text(leaf) for leaf in self.leaves]
        return str(leaves if self.spec is None else self.spec.unflatten(leaves))


def signature_of(payload: Flat | list[Any]) -> Signature:
    leaves, spec = payload if isinstance(payload, Flat) else (payload, None)
    cuts = cuts_of(payload)
    return Signature(spec, tuple(_leaf_spec(leaf, cuts.get(i)) for i, leaf in enumerate(leaves)))


def _leaf_spec(leaf: Any, cut: Cut | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return TensorSpec(leaf.dtype, tuple(leaf.shape), leaf.requires_grad, strides_of(leaf), cut)


def same(a: Signature, b: Signature) -> bool:
    """Whether two signatures are equal; plain leaves are compared as text: NaN is NaN, True is not 1."""
    plain = any(not isinstance(leaf, TensorSpec) and leaf is not None for leaf in a.leaves)
    return encode(a) == encode(b) if plain else a == b


def encode(signature: Signature) -> bytes:
    """Return the signature as text.

    Raises:
        TypeError: a leaf, a key or metadata is not plain.
    """
    spec, leaves, optional = signature
    tree = None if spec is None else _encode_tree(spec.unflatten(range(len(leaves))))
    return json.dumps([tree, [_encode_plain(leaf) for leaf in leaves], optional]).encode()


def decode(text: bytes) -> Signature:
    """Return the signature of a text that `encode` made.

    Raises:
        TypeError: this process has not imported a type, or has not registered it.
    """
    tree, leaves, optional = json.loads(text)
    spec = None if tree is None else flatten(_decode_tree(tree)).spec
    return Signature(spec, tuple(_decode_plain(leaf) for leaf in leaves), tuple(optional))


def _encode_tree(tree: Any) -> Any:
    if optree.tree_is_leaf(tree, namespace=NAMESPACE):
        return tree
    name = type_name(type(tree))
    if type(tree) in DICTS:
        factory = _encode_plain(getattr(tree, "default_factory", None))
        return [name, factory, [[_encode_plain(key), _encode_tree(child)] for key, child in tree.items()]]
    children, metadata, *_ = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
    named = optree.is_namedtuple(tree) or optree.is_structseq(tree)  # their metadata is the type itself
    return [name, None if named else _encode_plain(metadata), [_encode_tree(child) for child in children]]


def _decode_tree(tree: Any) -> Any:
    if isinstance(tree, int):
        return tree
    name, metadata, children = tree
    kind = find_type(name)
    metadata = _decode_plain(metadata)
    if kind in DICTS:
        items = [(_decode_plain(key), _decode_tree(child)) for key, child in children]
        return defaultdict(metadata, items) if kind is defaultdict else kind(items)
    subtrees = [_decode_tree(child) for child in children]
    if optree.is_namedtuple_class(kind):
        return kind(*subtrees)
    if optree.is_structseq_class(kind):
        return kind(subtrees)
    entry = optree.register_pytree_node.get(kind, namespace=NAMESPACE)
    if entry is None:
        raise TypeError(
            f"{name} came from another rank, but is not registered here: call optree.register_pytree_node "
            f"with namespace={NAMESPACE!r} on every rank"
        )
    return entry.unflatten_func(metadata, subtrees)


def type_name(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise TypeError(f"{kind.__qualname__} is defined inside a function; between ranks a type travels by its name")
    return f"{kind.__module__}:{kind.__qualname__}"


def find_type(name: str) -> Any:
    if name == "builtins:NoneType":
        return type(None)
    module, _, qualname = name.partition(":")
    kind: Any = sys.modules.get(module)
    try:
        for part in qualname.split("."):
            kind = vars(kind)[part]  # which runs no code of the module's, as getattr may
    except (KeyError, TypeError):
        raise TypeError(
            f"{name} came from another rank, and this process has not imported it: import {module} on every rank"
        ) from None
    if not isinstance(kind, type):
        raise TypeError(f"{name} is not a type")
    return kind


_CODERS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    TensorSpec: (
        "tensor",
        lambda t: [_dtype_name(t.dtype), list(t.shape), t.requires_grad, t.strides, t.cut],
        lambda t: TensorSpec(
            getattr(torch, t[0]), tuple(t[1]), t[2], None if t[3] is None else tuple(t[3]), _decode_cut(t[4])
        ),
    ),
    Absent: ("absent", lambda a: 0, lambda a: ABSENT),
    tuple: ("tuple", lambda t: [_encode_plain(x) for x in t], lambda t: tuple(_decode_plain(x) for x in t)),
    list: ("list", lambda t: [_encode_plain(x) for x in t], lambda t: [_decode_plain(x) for x in t]),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", lambda d: _dtype_name(d), lambda d: getattr(torch, d)),
    torch.device: ("device", str, torch.device),
    bytes: ("bytes", lambda b: b.hex(), bytes.fromhex),
    complex: ("complex", lambda z: [z.real, z.imag], lambda z: complex(*z)),
    type: ("type", type_name, find_type),
}
_DECODERS = {tag: decoder for tag, _, decoder in _CODERS.values()}


def _decode_cut(fields: Any) -> Cut | None:
    if fields is None:
        return None
    dim, piece, pieces, shape, stride = fields
    return Cut(dim, piece, pieces, tuple(shape), tuple(stride))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _encode_plain(x: Any) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if type(x) not in _CODERS:
        raise TypeError(f"{x!r} of type {type(x).__qualname__} is not plain, and can't travel between ranks")
    tag, encoder, _ = _CODERS[type(x)]
    return {tag: encoder(x)}


def _decode_plain(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    ((tag, content),) = x.items()
    return _DECODERS[tag](content)
