"""Load the part of a checkpoint that a training state asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fpipe.interop.checkpoints.manifest import CheckpointError
from fpipe.interop.checkpoints.names import Entry, Name, dense, dotted, entries, nested, some
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.sharding import local, wrap


class LoadRequest(NamedTuple):
    """A rank's request to a checkpoint.

    Args:
        sections: the names at the top.
        missing: of the names, those that the checkpoint lacks.
        misshapen: the names of tensors of other shapes, with both shapes.
    """

    sections: list[str]
    names: list[Name]
    missing: list[Name]
    misshapen: dict[Name, str]


class Reader(Protocol):
    """A checkpoint, or the part of one that this host has.

    Args:
        path: in messages.
        plain: the values that are no tensors.
        tensors: the metadata of each tensor.
        names: of all entries.
        below: by each beginning of names, the names that have it.
        states: the number of replicas with a state of their own; 1 where they share it.
    """

    @property
    def path(self) -> Path: ...
    @property
    def plain(self) -> Mapping[Name, Any]: ...
    @property
    def tensors(self) -> Mapping[Name, TensorStorageMetadata]: ...
    @property
    def names(self) -> set[Name]: ...
    @property
    def below(self) -> Mapping[Name, list[Name]]: ...
    @property
    def states(self) -> int: ...

    def read(self, into: Mapping[Name, Tensor]) -> None:
        """Read tensors into others of the same shapes; into DTensors, the rows of this process's pieces."""


class LoadPlan:
    """The part of a checkpoint that this process loads.

    Args:
        like: the sections of a training state of the same structure.
        device: of tensors that are on the meta device, or None, in `like`.
    """

    def __init__(self, reader: Reader, like: Mapping[str, Any], pipeline: Pipeline, device: torch.device) -> None:
        self.reader, self.device = reader, device
        self.entries, self.spec = entries(like, pipeline)
        self.tensors: dict[Name, Tensor] = {}
        self.request = LoadRequest([*like], [], [], {})
        for entry in self.entries:
            if entry.is_stored:
                self._fill(entry) if entry.is_empty else self._ask(entry)

    def _ask(self, entry: Entry) -> None:
        (name, leaf), request = entry[:2], self.request
        request.names.append(name)
        stored = self.reader.tensors.get(name)
        if name not in self.reader.names:
            request.missing.append(name)
        elif stored is not None and leaf is None:  # training began without it
            self.tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype, device=self.device)
        elif stored is not None and isinstance(leaf, Tensor) and stored.size == dense(name, leaf).shape:
            self.tensors[name] = self._memory(leaf, leaf.dtype)
        elif stored is not None or isinstance(leaf, Tensor):
            there = self.reader.plain[name] if stored is None else list(stored.size)
            here = list(leaf.shape) if isinstance(leaf, Tensor) else leaf
            request.misshapen[name] = f"{there} there, {here} here"

    def _fill(self, entry: Entry) -> None:
        """Ask for everything that was saved below an empty dict."""
        below = self.reader.below.get(entry.name, [])
        self.request.names.extend([entry.name, *below])
        self.tensors |= {name: self._kept(name, entry) for name in below if name in self.reader.tensors}
        if not below and entry.name not in self.reader.plain:
            self.request.missing.append(entry.name)

    def _home(self, leaf: Tensor) -> torch.device:
        return self.device if leaf.is_meta else leaf.device

    def _memory(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor that is laid out, and placed, like another one."""
        piece = local(like)
        return wrap(torch.empty_like(piece, dtype=dtype, device=self._home(piece), requires_grad=False), like)

    def _kept(self, name: Name, entry: Entry) -> Tensor:
        """Return memory for an optimizer's value, laid out and sharded as the optimizer would.

        A value that had its parameter's dtype gets the dtype of the parameter here. Scalars keep their own, and a count
        of steps is on the CPU.
        """
        stored = self.reader.tensors[name]
        dtype = stored.properties.dtype
        if entry.parameter is None:
            return torch.empty(stored.size, dtype=dtype, device=self.device)
        parameter_name, parameter = entry.parameter
        is_count = name[-1] == "step"
        is_scalar = is_count or (not stored.size and parameter.ndim > 0)
        saved = self.reader.tensors.get(parameter_name)
        if saved is not None and dtype == saved.properties.dtype and not is_scalar:
            dtype = parameter.dtype
        if is_count:
            return torch.empty(stored.size, dtype=dtype)
        if stored.size == parameter.shape:
            return self._memory(parameter, dtype)
        return torch.empty(stored.size, dtype=dtype, device=self._home(parameter))

    def check(self, requests: Sequence[Sequence[Any]]) -> None:
        """Compare the requests of all ranks with the checkpoint.

        Raises:
            CheckpointError: the checkpoint is another model's.
        """
        columns = zip(*requests, strict=True)
        sections, names, missing = ({*chain.from_iterable(next(columns))} for _ in range(3))
        misshapen = {name: text for each in next(columns) for name, text in each.items()}
        unexpected = sorted(name for name in self.reader.names - names if name[0] in sections)
        problems = {
            "it lacks": self._missing_texts(missing, unexpected, sections),
            "nobody asks for": [*map(dotted, unexpected)],
            "of other shapes are": [f"{dotted(name)} ({text})" for name, text in sorted(misshapen.items())],
        }
        if texts := [f"{problem} {some(items)}" for problem, items in problems.items() if items]:
            raise CheckpointError(
                f"{self.reader.path} is of another model or has another state: {'; '.join(texts)}"
                f"{_other_mode(missing, self.reader.names)}"
            )

    def _missing_texts(self, missing: set[Name], unexpected: list[Name], asked: set[str]) -> list[str]:
        """Describe missing names, or sections that are missing as a whole, each with the most similar name there."""
        stored = {name[0] for name in self.reader.names}
        names = {name if name[0] in stored else name[:1] for name in missing}
        unasked = [(section,) for section in sorted(stored - asked)]
        return [_nearest(n, unexpected, 0.8) if n[0] in stored else _nearest(n, unasked, 0.5) for n in sorted(names)]

    def tree(self) -> dict[str, Any]:
        """Return the training state, once its tensors are read."""
        tree: Any = self.spec.unflatten(map(self._value, self.entries)) if self.request.sections else {}
        return cast(dict[str, Any], tree)

    def _value(self, entry: Entry) -> Any:
        if not entry.is_empty:
            return self._leaf(entry.name)
        below = self.reader.below.get(entry.name, []) if entry.is_stored else []
        return nested({name[len(entry.name) :]: self._leaf(name) for name in below})

    def _leaf(self, name: Name) -> Any:
        return self.tensors[name] if name in self.tensors else self.reader.plain[name]


def _other_mode(missing: Iterable[Name], there: Collection[Name]) -> str:
    """Return the way out where a module was split in training mode there and in evaluation mode here, or vice versa."""
    modes = {"state": "training", "params": "evaluation"}
    for was, now in (("state", "params"), ("params", "state")):
        moved = [dotted(name[1:]) for name in sorted(missing) if name[0] == now and (was, *name[1:]) in there]
        if moved:
            return (
                f"; {some(moved)} are {was} there and {now} here, since the module was split in {modes[was]} mode "
                f"there and in {modes[now]} mode here: load it into a pipeline split in {modes[was]} mode; to evaluate "
                "what was split in training mode, use interop.eval_mode(pipeline), with the same params and state"
            )
    return ""


def _nearest(name: Name, others: Iterable[Name], cutoff: float) -> str:
    matches = get_close_matches(dotted(name), map(dotted, others), n=1, cutoff=cutoff)
    return f"{dotted(name)} (has {matches[0]})" if matches else dotted(name)
