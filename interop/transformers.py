"""Hugging Face's models: split as they are, and loaded stage by stage from a local folder. Extra `transformers`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.interop.modules import Tree
from fpipe.interop.splitting.split import split as split_module
from fpipe.interop.state_dicts import from_state_dict
from fpipe.stage import Pipeline

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
IGNORED = -100
"""The label of a token that does not count."""


def split(model: nn.Module, *, example: Mapping[str, Tensor], **options: Any) -> tuple[Pipeline, dict[int, Tree]]:
    """A model of `transformers` in stages, whose loss is the model's own where the batch has labels.

    Args:
        example: a microbatch, by the names of forward's arguments: `{"input_ids": …, "labels": …}`.
        options: those of `interop.split`: `at=["transformer.h.2"]`, or `stages=` with a `policy=`, and others.

    The batch of a step is such a mapping of all samples. Its target, on the last stage's rank, is what `weight` weighs
    microbatches by: the labels, `value_and_grad(..., weight=tokens)`, so that each token weighs the same.

    Raises:
        ValueError: the model can't be exported, or a cut is wrong.
    """
    given = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    loss = options.pop("loss", _own_loss if "labels" in example else None)
    return split_module(model, kwargs={**example, **given}, loss=loss, **options)


def _own_loss(output: Mapping[str, Any], target: Any) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


def tokens(labels: Tensor, shifted: bool = True) -> Tensor:
    """How many labels count: the weight of a microbatch.

    Args:
        shifted: for models that predict the next token, whose first label is nobody's; False for masked or
            sequence-to-sequence ones.

    >>> tokens(torch.tensor([[5, 7, -100, 2]]))
    tensor(2)
    """
    return (labels[..., 1:] if shifted else labels).ne(IGNORED).sum()


def load(
    folder: str | os.PathLike[str],
    pipeline: Pipeline,
    stages: Iterable[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[dict[int, Tree], dict[int, Tree]]:
    """`(params, state)` of some stages, out of the safetensors that `save_pretrained` has written.

    Args:
        stages: those that are wanted: `plan.stages_on(rank)`. By default all. Nothing else is read.
        dtype: of floating-point tensors, where it is to be another than the file's.

    A model that is loaded so needs no memory of its own: make it under `torch.device("meta")`, and split it.

    Raises:
        FileNotFoundError: the folder has no safetensors.
        ImportError: safetensors is not installed.
        ValueError: tensors are missing, or of other shapes: it is another model's.
    """
    with ExitStack() as stack:
        return from_state_dict(pipeline, _Pretrained(Path(folder), pipeline, dtype, stack), stages)


class _Pretrained(Mapping[str, Tensor]):
    """The tensors of a folder under the names of a model, each read when it is asked for.

    A base model's files do for a model with a head, and the other way round: names may have one component more in
    front, or one less.
    """

    def __init__(self, folder: Path, pipeline: Pipeline, dtype: torch.dtype | None, stack: ExitStack) -> None:
        self.folder, self.dtype, self.stack = folder, dtype, stack
        self.files: dict[str, Any] = {}
        self.homes = self._read_index()
        fronts = {name.partition(".")[0] for name in self.homes}
        self.names: dict[str, str] = {}
        wanted = {name for stage in pipeline.stages for name in getattr(stage.fn, "aliases", ())}
        for name in wanted:
            others = (name, name.partition(".")[2], *(f"{front}.{name}" for front in fronts))
            there = next((other for other in others if other in self.homes), None)
            if there is not None:
                self.names[name] = there

    def _read_index(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            found: dict[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
            return found
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
        found: Tensor = self._open(self.homes[there]).get_tensor(there)
        return found.to(self.dtype) if self.dtype and found.is_floating_point() else found

    def __contains__(self, name: object) -> bool:
        return name in self.names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
