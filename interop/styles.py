"""Placements of params by the names of modules, for `shard`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

NOTHING_FUSED: Mapping[str, int] = {}


def megatron(
    column: Iterable[str] = (),
    row: Iterable[str] = (),
    vocabulary: Iterable[str] = (),
    transposed: Iterable[str] = (),
    fused: Mapping[str, int] = NOTHING_FUSED,
) -> dict[str, Sequence[Placement]]:
    """Return placements by pattern of the name, as `shard` takes them, for the tensor parallelism of Megatron-LM.

    A block then adds over the processes once for its attention and once for its network, in the forward, and as often
    in the backward.

    Args:
        column: names of linear layers whose outputs are cut: those of queries, keys and values, and those into a
            network.
        row: those whose inputs are cut: the one after attention, and the one out of a network.
        vocabulary: embeddings and heads. Where the loss is `cross_entropy` of a head's output, the logits are never
            gathered.
        transposed: those of the above whose weight is [in, out], as of `Conv1D` of transformers.
        fused: those of `column` whose outputs are several things one after the other, and their number: `{"c_attn": 3}`
            of GPT-2, whose layer makes queries, keys and values. Each of them is cut.

    A name is the last part of a module's: `"q_proj"` is `layers.0.attention.q_proj`, with its weight and bias. Other
    leaves are the same in every process.

    Raises:
        TypeError: names are one string, or none at all.
        ValueError: a name is in two of the first three, or one of `transposed` or `fused` is not where it must be.

    Source: Shoeybi et al., Megatron-LM: training multi-billion parameter language models using model parallelism, 2019,
    section 3.

    >>> megatron(column=["q_proj"], row=["o_proj"])
    {'*.q_proj.[wb]*': [Shard(dim=0)], '*.o_proj.weight': [Shard(dim=1)]}
    """
    each_names = {"column": column, "row": row, "vocabulary": vocabulary, "transposed": transposed}
    for style, several in each_names.items():
        if isinstance(several, str) or not isinstance(several, Iterable):
            raise TypeError(f"megatron: {style} must be names of layers, as {style}=['q_proj'], not {several!r}")
    styles = {"column": tuple(column), "row": tuple(row), "vocabulary": tuple(vocabulary)}
    names = [name for each in styles.values() for name in each]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)!r} is named twice: a layer has one style")
    if unknown := {*transposed} - {*names}:
        raise ValueError(f"transposed names {min(unknown)!r}, which has no style: name it in column or row too")
    if unknown := {*fused} - {*styles["column"]}:
        raise ValueError(f"fused names {min(unknown)!r}, which is none of column")
    rule: dict[str, Sequence[Placement]] = {}
    for style, each in styles.items():
        for name in each:
            inputs, outputs = (0, 1) if name in transposed else (1, 0)
            if style == "row":
                rule[f"*.{name}.weight"] = [Shard(inputs)]
                continue
            weight, bias = (
                _StridedShard(dim, split_factor=fused[name]) if name in fused else Shard(dim) for dim in (outputs, 0)
            )
            if outputs:
                rule[f"*.{name}.weight"] = [weight]
            rule[f"*.{name}.[wb]*"] = [bias]  # weight and bias
    return rule
