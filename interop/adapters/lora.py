"""LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022): train W + alpha/rank · B A.

W is frozen; A and B are params beside it, `<name>.lora_A` and `<name>.lora_B`. Stages without an adapter are not
trained, so that `Pipeline.plan` leaves out their weight gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.interop.adapters.adapted import Adapted, summed
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import Path, describe, get_at, put_at, short
from fpipe.stages.selection import Where, leaves_of, name_of, selected
from fpipe.stages.sharding import is_dtensor
from fpipe.stages.stage import Original, Stage, StageFunction, StageSpec

A, B = ".lora_A", ".lora_B"


@dataclass(frozen=True)
class AdaptedFunction:
    """A stage's function of params with adapters.

    Args:
        stage: the stage without adapters.
        adapted: paths of the params with an adapter.
        scale: alpha / rank.
        fan_in_fan_out: as of `lora`.
    """

    stage: Stage
    adapted: tuple[Path, ...]
    scale: float
    fan_in_fan_out: bool

    def __call__(self, params: Any, *inputs: Any) -> Any:
        return self.stage.fn(self.with_adapters(params, Adapted), *inputs)

    def with_adapters(self, params: Any, combine: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> Any:
        """Return the params of the stage without adapters: `combine(W, left, right, scale)` in place of each W."""
        for path in self.adapted:
            (*outer, key) = path
            entries = dict(get_at(params, outer))
            a, b = entries.pop(key + A), entries.pop(key + B)
            left, right = (a.t(), b.t()) if self.fan_in_fan_out else (b, a)
            entries[key] = combine(entries[key], left, right, self.scale)
            params = put_at(params, tuple(outer), entries)
        return params


@dataclass(frozen=True)
class AdaptedModuleFunction(AdaptedFunction):
    """The same of a stage that comes from a module: a `StageFunction`.

    Args:
        adapters: A and B on the meta device, by name.
    """

    adapters: Mapping[str, Tensor] = field(default_factory=dict, hash=False)

    @property
    def fn(self) -> StageFunction:
        assert isinstance(self.stage.fn, StageFunction)
        return self.stage.fn

    @property
    def qualified(self) -> bool:
        return self.fn.qualified

    @property
    def spec(self) -> StageSpec:
        return self.fn.spec._replace(params={**self.fn.spec.params, **self.adapters})

    @property
    def skeleton(self) -> nn.Module:
        return self.fn.skeleton

    @property
    def aliases(self) -> Mapping[str, str]:
        return {**self.fn.aliases, **{name: name for name in self.adapters}}

    @property
    def nonpersistent_buffers(self) -> Mapping[str, Tensor]:
        return self.fn.nonpersistent_buffers

    @property
    def originals(self) -> Sequence[Original]:
        return self.fn.originals

    def accepts(self, batch: Any) -> None:
        self.fn.accepts(batch)


def lora(
    pipeline: Pipeline,
    params: Mapping[int, Any],
    rank: int = 8,
    *,
    at: Where,
    alpha: float = 16.0,
    fan_in_fan_out: bool = False,
    seed: int = 0,
) -> tuple[Pipeline, dict[int, Any]]:
    """Return a pipeline whose params are frozen, but for low-rank adapters of some of them, and its params.

    A param W gets A of shape (rank, inputs) and B of shape (outputs, rank) beside it, named `<name>.lora_A` and
    `<name>.lora_B`, and the stage computes with W + alpha / rank · B A. A is drawn as `nn.Linear` draws a weight, as in
    the authors' code, and B is zero, so that the first loss is that of the pipeline without adapters.

    In `F.linear`, `matmul`, `mm` and `addmm`, of Python code, modules and exported graphs, x is multiplied by A and B
    one after the other, so that neither W + B A nor a gradient of W's size is ever computed. Any other function, such
    as an embedding, gets the sum, computed once a step, and gradients of W's size for each microbatch.

    Args:
        params: of all stages; those of stages of other ranks may be on the meta device, and get adapters there.
        rank: the inner size of B A.
        at: the params that get an adapter, as of `Pipeline.freeze`: tensors of two dimensions, in dicts.
        alpha: the adapter counts alpha / rank times.
        fan_in_fan_out: these params are (inputs, outputs), as of Hugging Face's `Conv1D` or of `x @ w`, and not
            (outputs, inputs), as of `nn.Linear`. It decides which of the two factors is zero at first.
        seed: seeds A, together with its name, so that every rank draws the same.

    The arguments are not changed; the params share their memory with the result. Unfreeze others, such as biases, by
    `pipeline.unfreeze`.

    Raises:
        ValueError: a pattern matches no param; or a param has other dimensions, is shared by stages, has an adapter
            already, is a DTensor (shard the params after this), or is in no dict; or rank is below 1.

    >>> from fpipe import Pipeline, Placement
    >>> pipeline = Pipeline([lambda p, x: torch.tanh(x @ p["w"])] * 4, loss=lambda y, t: (y - t).square().mean())
    >>> params = {stage: {"w": torch.eye(64)} for stage in range(4)}
    >>> pipeline, params = lora(pipeline, params, rank=2, at=lambda path, x: path[0] >= 2, fan_in_fan_out=True)
    >>> {name: tuple(x.shape) for name, x in params[3].items()}
    {'w': (64, 64), 'w.lora_A': (2, 64), 'w.lora_B': (64, 2)}
    >>> pipeline.plan(Placement.loop(ranks=4), microbatches=8).trained
    frozenset({2, 3})
    """
    if rank < 1:
        raise ValueError(f"the rank of adapters must be at least 1, not {rank}")
    trees = {stage: params[stage] for stage in sorted(params)}
    chosen = selected(at, leaves_of(trees))
    _check(pipeline, trees, chosen)
    stages = list(pipeline.stages)
    for stage, (*outer, key), w in ((path[0], path[1:], get_at(trees[path[0]], path[1:])) for path in chosen):
        qualified = getattr(pipeline.stages[stage].fn, "qualified", False)
        name = name_of((stage, *outer, key))
        pair = _pair(w, rank, fan_in_fan_out, f"{seed}/{name if qualified else f'{stage}.{name}'}")
        entries = {**get_at(trees[stage], outer), key + A: pair[0], key + B: pair[1]}
        trees[stage] = put_at(trees[stage], tuple(outer), entries)
    for stage in {path[0] for path in chosen}:
        before, adapted = pipeline.stages[stage], tuple(path[1:] for path in chosen if path[0] == stage)
        options = before, adapted, alpha / rank, fan_in_fan_out
        if isinstance(before.fn, StageFunction):
            names = [key + end for (key,) in adapted for end in (A, B)]
            meta = {name: trees[stage][name].to("meta") for name in names}
            stages[stage] = replace(before, fn=AdaptedModuleFunction(*options, meta))
        else:
            stages[stage] = replace(before, fn=AdaptedFunction(*options))
    adapters = {(*path[:-1], path[-1] + end) for path in chosen for end in (A, B)}
    return pipeline.replace(stages, pipeline.loss).freeze(trees, lambda path, x: path not in adapters), trees


def merge_lora(pipeline: Pipeline, params: Mapping[int, Any]) -> tuple[Pipeline, dict[int, Any]]:
    """Return the pipeline without adapters, and params with W + alpha / rank · B A in place of each adapted W.

    Args:
        params: of all stages, or of some.
    """
    merged, stages = dict(params), list(pipeline.stages)
    for index, stage in enumerate(pipeline.stages):
        if isinstance(stage.fn, AdaptedFunction):
            stages[index] = stage.fn.stage
            if index in params:
                with torch.no_grad():
                    merged[index] = stage.fn.with_adapters(params[index], summed)
    return pipeline.replace(stages, pipeline.loss), merged


def _check(pipeline: Pipeline, trees: Mapping[int, Any], chosen: Sequence[Path]) -> None:
    shared = {(stage, path) for uses in pipeline.entries.values() for stage, path in uses}
    for stage, *path in chosen:
        outer, x = get_at(trees[stage], path[:-1]), get_at(trees[stage], path)
        problem = ""
        if isinstance(pipeline.stages[stage].fn, AdaptedFunction):
            problem = "its stage has adapters already: merge_lora puts them into the params first"
        elif x.ndim != 2:
            problem = f"it is {describe(x)}, and an adapter is of a matrix"
        elif is_dtensor(x):
            problem = "it is a DTensor: make adapters first, and shard the params then"
        elif any(stage == user and tuple(path)[: len(use)] == use for user, use in shared):
            problem = "several stages share it, and would compute with different matrices: leave it out"
        elif not (isinstance(outer, Mapping) and isinstance(path[-1], str)):
            problem = "it is not in a dict by a name, beside which the adapter could be"
        if problem:
            raise ValueError(f"params[{stage}]{short(tuple(path))} can't have an adapter: {problem}")


def _pair(w: Tensor, rank: int, fan_in_fan_out: bool, seed: str) -> tuple[Tensor, Tensor]:
    """Return A, drawn for a seed, and B, zero, in the dtype and on the device of a param."""
    inputs, outputs = w.shape if fan_in_fan_out else reversed(w.shape)
    b = w.new_zeros(outputs, rank)
    if w.is_meta:
        return w.new_empty(rank, inputs), b
    digest = hashlib.blake2b(seed.encode(), digest_size=7).digest()
    a = torch.empty(rank, inputs, dtype=torch.float32, device="cpu")
    nn.init.kaiming_uniform_(a, a=sqrt(5), generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
    return a.to(w), b
