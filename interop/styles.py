"""Placements of params by the names of modules, for `shard`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.tensor import Placement, Shard


def megatron(
    column: Iterable[str] = (),
    row: Iterable[str] = (),
    vocabulary: Iterable[str] = (),
    transposed: Iterable[str] = (),
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

    A name is the last part of a module's: `"q_proj"` is `layers.0.attention.q_proj`, with its weight and bias. Other
    leaves are the same in every process.

    Raises:
        ValueError: a name is in two of the first three, or one of `transposed` in none of them.

    Source: Shoeybi et al., Megatron-LM: training multi-billion parameter language models using model parallelism, 2019,
    section 3.

    >>> megatron(column=["q_proj"], row=["o_proj"])
    {'*.q_proj.*': [Shard(dim=0)], '*.o_proj.weight': [Shard(dim=1)]}
    """
    styles = {"column": tuple(column), "row": tuple(row), "vocabulary": tuple(vocabulary)}
    names = [name for each in styles.values() for name in each]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)!r} is named twice: a layer has one style")
    if unknown := {*transposed} - {*names}:
        raise ValueError(f"transposed names {min(unknown)!r}, which has no style: name it in column or row too")
    rule: dict[str, Sequence[Placement]] = {}
    for style, each in styles.items():
        for name in each:
            inputs, outputs = (0, 1) if name in transposed else (1, 0)
            if style == "row":
                rule[f"*.{name}.weight"] = [Shard(inputs)]
                continue
            if outputs:
                rule[f"*.{name}.weight"] = [Shard(outputs)]
            rule[f"*.{name}.*"] = [Shard(0)]
    return rule
