"""Split Hugging Face's models, and load them stage by stage from a local folder. Needs the extra `transformers`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fpipe.errors.tracebacks import warn
from fpipe.interop.modules.functions import Tree
from fpipe.interop.modules.state_dicts import from_state_dict, names_in_module
from fpipe.interop.splitting.split import split as split_module
from fpipe.stages.pipeline import Pipeline

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
