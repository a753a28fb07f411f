"""Split Hugging Face's models, and load them stage by stage from a local folder. Needs the extra `transformers`."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from fpipe.errors.tracebacks import warn
from fpipe.interop.modules.functions import Tree
from fpipe.interop.modules.skeletons import to_meta
from fpipe.interop.modules.state_dicts import from_state_dict, names_in_module
from fpipe.interop.splitting.split import split as split_module
from fpipe.stages.cache import Cache
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import StageFunction

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
IGNORED = -100
"""The label of a token that the loss ignores."""


def split(model: nn.Module, *, example: Mapping[str, Tensor], **options: Any) -> tuple[Pipeline, dict[int, Tree]]:
    """Split a model of `transformers`. If the batch has labels, the loss is the model's own.

    Args:
        example: a microbatch, by the names of forward's arguments: `{"input_ids": …, "labels": …}`.
        options: of `interop.split`: `at=["transformer.h.2"]`, or `stages=` with a `policy=`, and others.

    The batch of a step is such a mapping of all samples. The target, on the last stage's rank, is the labels if
    microbatches are weighted by tokens: `value_and_grad(..., weight=tokens)`.

    Raises:
        StageError: the model cannot be exported.
        ValueError: a split point does not exist.
    """
    uncached = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    loss = options.pop("loss", _own_loss if "labels" in example else None)
    return split_module(model, kwargs={**example, **uncached}, loss=loss, **options)


def split_with_cache(
    model: nn.Module, *, rows: int, max_length: int, **options: Any
) -> tuple[Pipeline, dict[int, Tree]]:
    """Split a causal language model of `transformers` for `fpipe.generate`: each stage has the cache of its layers.

    Its params are those of `split` at the same places, so that a trained tree of params can be generated from. It is
    exported in evaluation mode, once for prompts of all lengths.

    Args:
        rows: the prompts of a microbatch.
        max_length: the tokens of a prompt that the cache holds, padding and generated ones included.
        options: of `interop.split`: `at=["transformer.h.2"]`, or `stages=` with a `policy=`.

    Raises:
        ValueError: the model is no causal language model, has no cache of all tokens, or fewer positions; a split point
            does not exist.
        StageError: the model cannot be exported.
    """
    cache = Cache(rows, max_length, {})  # which refuses wrong numbers
    _refuse_others(model, max_length)
    made, state = _with_cache(model, rows, max_length)
    example = _example(rows, max_length, next(model.parameters()).dtype)
    sizes = {"input_ids": {1: Dim.AUTO}, "attention_mask": {2: Dim.AUTO}, "position_ids": {1: Dim.AUTO}}
    sizes |= {"cache_position": {0: Dim.AUTO}}
    modes = {part: part.training for part in made.modules()}
    try:
        pipeline, params = split_module(made.eval(), kwargs=example, dynamic_shapes=sizes, **options)
    finally:
        for part, mode in modes.items():
            part.training = mode
    names = {s: [*fn.spec.state] for s, fn in enumerate(pipeline.functions) if isinstance(fn, StageFunction)}
    caches = {s: {name: state[name] for name in each} for s, each in names.items() if each}
    if lost := sorted({*state} - {name for tree in caches.values() for name in tree}):
        raise ValueError(f"{type(model).__name__} does not write to its cache in {lost[0]}, so that it can't generate")
    ends: Any = model.generation_config
    eos = [] if ends.eos_token_id is None else ends.eos_token_id
    eos = (eos,) if isinstance(eos, int) else tuple(eos)
    dtype = example["attention_mask"].dtype
    pipeline.cache = replace(cache, state=caches, dtype=dtype, eos=eos, pad=ends.pad_token_id)
    return pipeline, params


def _refuse_others(model: Any, max_length: int) -> None:
    """Raise ValueError for what can't generate from a cache of all tokens."""
    name, config = type(model).__name__, getattr(model, "config", None)
    arguments = inspect.signature(model.forward).parameters
    is_causal = config is not None and hasattr(model, "can_generate") and model.can_generate()
    if not is_causal or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is no causal language model, as GPT2LMHeadModel and LlamaForCausalLM are: it can't generate token "
            "by token from its own output. Take the class with its head, as AutoModelForCausalLM makes it"
        )
    if missing := [x for x in ("past_key_values", "position_ids", "attention_mask") if x not in arguments]:
        raise ValueError(
            f"forward of {name} takes no {missing[0]}, and so can't go on from a cache after padding on the left: "
            "generate with model.generate"
        )
    window = getattr(config, "sliding_window", None)
    partial = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if partial or (window is not None and window < max_length):
        what = f"layers of {', '.join(sorted(partial))}" if partial else f"a sliding window of {window} tokens"
        raise ValueError(f"{name} has {what}, and the cache has all tokens before: generate with model.generate")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ValueError(f"max_length is {max_length}, and {name} has {positions} positions: take at most as many")


def _example(rows: int, max_length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arguments of forward for some tokens of each prompt."""
    count = min(3, max_length)
    return {
        "input_ids": torch.zeros(rows, count, dtype=torch.int64, device="meta"),
        "attention_mask": torch.zeros(rows, 1, count, max_length, dtype=dtype, device="meta"),
        "position_ids": torch.zeros(rows, count, dtype=torch.int64, device="meta"),
        "cache_position": torch.zeros(count, dtype=torch.int64, device="meta"),
    }


class _CacheOfBuffers:
    """A cache over the buffers of a module, in the place of one of `transformers`.

    Args:
        write: `(layer, keys, values) -> (all keys, all values)`.
    """

    is_compileable = True

    def __init__(self, write: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]], length: int) -> None:
        self.write, self.length = write, length

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.write(layer_idx, keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.length


def _with_cache(model: nn.Module, rows: int, max_length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a module over the same params whose cache is its buffers, and these, on the meta device."""
    blank = to_meta(model).eval()
    sizes: dict[int, tuple[Tensor, Tensor]] = {}

    def note(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        sizes[layer] = keys, values
        return tuple(x.new_zeros(*x.shape[:2], max_length, x.shape[3]) for x in (keys, values))  # type: ignore[return-value]

    example = _example(rows, max_length, next(model.parameters()).dtype)
    _last_logits(type(model), blank, note, example, max_length)
    if not sizes:
        raise ValueError(f"{type(model).__name__} reads no cache, so that it can't go on from one: it can't generate")
    made, state = copy.copy(model), dict[str, Tensor]()
    made._buffers = dict(model._buffers)
    for layer, pair in sorted(sizes.items()):
        for name, x in zip(("keys", "values"), pair, strict=True):
            buffer = torch.empty(rows, x.shape[1], max_length, x.shape[3], dtype=x.dtype, device="meta")
            made.register_buffer(f"{CACHED}{name}_{layer}", buffer, persistent=False)
            state[f"{CACHED}{name}_{layer}"] = buffer
    made.__class__ = _cached_class(type(model), max_length)
    return made, state


CACHED = "cached_"


def _cached_class(kind: type[nn.Module], max_length: int) -> type[nn.Module]:
    """Return a class of the same modules whose forward returns the logits of the next token, from the cache."""

    def forward(
        self: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache_position: Tensor
    ) -> Tensor:
        def write(layer: int, *new: Tensor) -> Any:
            whole = [getattr(self, f"{CACHED}{name}_{layer}") for name in ("keys", "values")]
            return tuple(x.index_copy_(2, cache_position, y) for x, y in zip(whole, new, strict=True))

        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return _last_logits(kind, self, write, {**given, "cache_position": cache_position}, max_length)

    def reduced(self: Any, protocol: Any) -> Any:
        return _blank, (kind, max_length), self.__dict__

    return type(f"{kind.__name__}WithCache", (kind,), {"forward": forward, "__reduce_ex__": reduced})


def _blank(kind: type[nn.Module], max_length: int) -> nn.Module:
    """Return an instance without attributes, for copies and for other processes."""
    made = _cached_class(kind, max_length)
    return made.__new__(made)


def _last_logits(
    kind: type[nn.Module], model: nn.Module, write: Any, given: Mapping[str, Tensor], max_length: int
) -> Tensor:
    """Return the logits of the last tokens, by forward of a class of models."""
    arguments = inspect.signature(kind.forward).parameters
    more: dict[str, Any] = {name: x for name, x in given.items() if name in arguments}
    if "logits_to_keep" in arguments:
        more["logits_to_keep"] = 1
    keys_and_values = _CacheOfBuffers(write, max_length)
    output = kind.forward(model, past_key_values=keys_and_values, use_cache=True, return_dict=True, **more)
    return cast(Tensor, output.logits[:, -1])


def _own_loss(output: Mapping[str, Any], target: Any) -> Tensor:
    return cast(Tensor, output["loss"])


def tokens(labels: Tensor | None, shifted: bool = True) -> Tensor:
    """Return the number of labels that the loss does not ignore: the weight of a microbatch.

    Args:
        labels: the step's target.
        shifted: the model predicts the next token, so the first label is not used; False for masked or
            sequence-to-sequence models.

    Raises:
        ValueError: there are no labels.

    >>> tokens(torch.tensor([[5, 7, -100, 2]]))
    tensor(2)
    """
    if labels is None:
        raise ValueError("tokens needs the labels, and got None: pass them as the step's target as well")
    return (labels[..., 1:] if shifted else labels).ne(IGNORED).sum()


def load(
    folder: str | os.PathLike[str],
    pipeline: Pipeline,
    stages: Iterable[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    like: Mapping[int, Tree] | None = None,
) -> tuple[dict[int, Tree], dict[int, Tree]]:
    """Load `(params, state)` of some stages from the safetensors of `save_pretrained`.

    Args:
        stages: the stages to load: `plan.stages_on(rank)`. By default all. Other tensors are not read.
        dtype: of floating-point tensors, if it differs from the file's.
        like: params on the meta device that are placed over a mesh, as by `fsdp`: a parameter is placed as there.
            Tensors are read one by one, and this process's piece of each is kept.

    The model itself needs no memory: make it under `torch.device("meta")`, and split it.

    Raises:
        FileNotFoundError: the folder has no safetensors.
        ImportError: safetensors is not installed.
        ValueError: tensors are missing or have other shapes, as of another model; or names match in several ways.

    Tensors that the model lacks, such as those of more layers, cause a warning.
    """
    with ExitStack() as stack:
        return from_state_dict(pipeline, _Pretrained(Path(folder), pipeline, dtype, stack), stages, like=like)


class _Front(NamedTuple):
    """The difference between the files' names and the model's: one component `more` in front, or one `less`."""

    more: str = ""
    less: str = ""

    def renamed(self, there: Iterable[str]) -> dict[str, str]:
        """Return the files' names by the model's."""
        return {self.less + name.removeprefix(self.more): name for name in there if name.startswith(self.more)}

    def __str__(self) -> str:
        return f"with {self.more!r} in front" if self.more else f"without {self.less!r}" if self.less else "as they are"


def _fronts(names: Iterable[str], there: Iterable[str]) -> list[_Front]:
    """Return all candidates, in an order that is equal on all ranks."""
    more, less = ({f"{name.partition('.')[0]}." for name in some if "." in name} for some in (there, names))
    return [_Front(), *(_Front(more=x) for x in sorted(more)), *(_Front(less=x) for x in sorted(less))]


class _Pretrained(Mapping[str, Tensor]):
    """The tensors of a folder under the names of a model. Each is read at its access.

    The files may be of the base model while the model has a head, or the reverse: then all names have one component
    more in front, or one less.
    """

    def __init__(self, folder: Path, pipeline: Pipeline, dtype: torch.dtype | None, stack: ExitStack) -> None:
        self.folder, self.dtype, self.stack = folder, dtype, stack
        self.files: dict[str, Any] = {}
        self.homes = self._read_index()
        aliases, nonpersistent = names_in_module(pipeline)
        front, self.names = self._named(aliases)
        if left := self._left(front, {*aliases, *nonpersistent}):
            warn(
                f"{folder} has tensors that the model has no place for: {', '.join(left[:3])}"
                f"{f' and {len(left) - 3} more' if len(left) > 3 else ''}; is it a larger model's?",
            )

    def _named(self, names: Collection[str]) -> tuple[_Front, dict[str, str]]:
        """Return the front that matches all names that any front matches, and the files' names by the model's."""
        matches = {
            front: {name: there for name, there in front.renamed(self.homes).items() if name in names}
            for front in _fronts(names, self.homes)
        }
        matches = {front: some for front, some in matches.items() if some} or {_Front(): {}}
        fitting = [front for front, some in matches.items() if all(some.keys() >= x.keys() for x in matches.values())]
        if len(fitting) != 1:
            raise ValueError(
                f"{self.folder} fits the model in several ways, its names {', or '.join(map(str, fitting or matches))}"
                ": split the model that was saved, or give interop.from_state_dict the tensors under the model's names"
            )
        return fitting[0], matches[fitting[0]]

    def _left(self, front: _Front, known: Collection[str]) -> list[str]:
        """Return the files' names that the model lacks, except for other heads."""

        def part(name: str) -> str:
            return front.less + name.removeprefix(front.less).partition(".")[0]

        parts = {part(name) for name in known if name.startswith(front.less)}
        ours = front.renamed(self.homes)
        return sorted(there for name, there in ours.items() if name not in known and part(name) in parts)

    def _read_index(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            return dict(json.loads((self.folder / INDEX).read_text())["weight_map"])
        if (self.folder / WHOLE).is_file():
            return dict.fromkeys(self._open(WHOLE).keys(), WHOLE)
        raise FileNotFoundError(
            f"{self.folder} has neither {INDEX} nor {WHOLE}: give the folder that model.save_pretrained has written"
        )

    def _open(self, file: str) -> Any:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("this needs the package safetensors: pip install 'fpipe[transformers]'") from error
        if file not in self.files:
            self.files[file] = self.stack.enter_context(safe_open(self.folder / file, framework="pt"))
        return self.files[file]

    def __getitem__(self, name: str) -> Tensor:
        there = self.names[name]
        tensor: Tensor = self._open(self.homes[there]).get_tensor(there)
        return tensor.to(self.dtype) if self.dtype and tensor.is_floating_point() else tensor

    def __contains__(self, name: object) -> bool:
        return name in self.names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
