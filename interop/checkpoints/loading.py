"""A training state against what a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.interop.checkpoints.names import ALWAYS, Entry, Name, dense, dotted, entries, is_empty, some, staged
from fpipe.interop.checkpoints.storage import CheckpointError, Stored
from fpipe.stages.pipeline import Pipeline


class Asked(NamedTuple):
    """What a rank asks a checkpoint for.

    Args:
        sections: the names at the top.
        missing: of the names, those that it lacks.
        misshapen: the names of tensors of other shapes, and what they are.
    """

    sections: list[str]
    names: list[Name]
    missing: list[Name]
    misshapen: dict[Name, str]


class Wanted:
    """The part of a checkpoint that this process loads.

    Args:
        like: a training state of the same structure.
        device: where tensors go that are on the meta device there.
    """

    def __init__(self, stored: Stored, like: Mapping[str, Any], pipeline: Pipeline, device: torch.device) -> None:
        self.stored, self.device = stored, device
        self.entries, self.spec = entries(like, pipeline, stored.outline.by_stage | (staged(like, pipeline) & ALWAYS))
        self.tensors: dict[Name, Tensor] = {}
        self.asked = Asked([*like], [], [], {})
        for entry in self.entries:
            self._want(entry)

    def _want(self, entry: Entry) -> None:
        name, leaf = entry.name, entry.leaf
        if is_empty(leaf):
            below = self.stored.below.get(name, []) if entry.open is not None else []
            self.asked.names.extend(below)
            self.tensors |= {each: self._kept(each, entry) for each in below if each in self.stored.tensors}
            if not below and not self._was_empty(entry):
                self.asked.missing.append(name)
            return
        self.asked.names.append(name)
        there = self.stored.tensors.get(name)
        if there is None and name not in self.stored.plain:
            self.asked.missing.append(name)
        elif there is not None and leaf is None:  # training began without
            self.tensors[name] = torch.empty(there.size, dtype=there.properties.dtype, device=self.device)
        elif there is not None and isinstance(leaf, Tensor) and there.size == dense(name, leaf).shape:
            self.tensors[name] = torch.empty_like(leaf, device=self._home(leaf), requires_grad=False)
        elif there is not None or isinstance(leaf, Tensor):
            was = self.stored.plain[name] if there is None else list(there.size)
            self.asked.misshapen[name] = f"{was} there, {list(leaf.shape) if isinstance(leaf, Tensor) else leaf} here"

    def _was_empty(self, entry: Entry) -> bool:
        """Of what is for no parameter it is enough that its section was saved: stages have it by how they are cut."""
        if entry.open is not None:
            return entry.name in self.stored.outline.empty
        return entry.name[0] in self.stored.sections

    def _home(self, leaf: Tensor) -> torch.device:
        return self.device if leaf.is_meta else leaf.device

    def _kept(self, name: Name, entry: Entry) -> Tensor:
        """Memory for what an optimizer keeps, laid out as it would.

        What had its parameter's dtype has that of the one here; scalars keep theirs, and a count of steps stays with
        the host.
        """
        parameter, there = entry.open, self.stored.tensors[name]
        assert parameter is not None
        counts = name[-1] == "step"
        before, dtype = self.stored.tensors.get(("params", entry.name[-1])), there.properties.dtype
        scalar = counts or (not there.size and parameter.ndim > 0)
        if before is not None and dtype == before.properties.dtype and not scalar:
            dtype = parameter.dtype
        device = torch.device("cpu") if counts else self._home(parameter)
        if there.size == parameter.shape:
            return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
        return torch.empty(there.size, dtype=dtype, device=device)

    def check(self, asked: Sequence[Sequence[Any]]) -> None:
        """Compare what all ranks ask for with what is there.

        Raises:
            CheckpointError: it is another model's.
        """
        whole = [Asked(*each) for each in asked]
        sections = {section for each in whole for section in each.sections}
        names = {name for each in whole for name in each.names}
        missing = {name for each in whole for name in each.missing}
        misshapen = {name: text for each in whole for name, text in each.misshapen.items()}
        there = [*self.stored.tensors, *self.stored.plain]
        unexpected = sorted({name for name in there if name[0] in sections} - names)
        if missing or unexpected or misshapen:
            unasked = [(section,) for section in sorted(self.stored.sections - sections)]
            near = [
                _nearest(name, unexpected, 0.8) if name[0] in self.stored.sections else _nearest(name, unasked, 0.5)
                for name in sorted({name if name[0] in self.stored.sections else name[:1] for name in missing})
            ]
            raise CheckpointError(
                f"{self.stored.path} is of another model or has another state: "
                + "; ".join(
                    f"{what} {some(found)}"
                    for what, found in (
                        ("it lacks", near),
                        ("nobody asks for", [dotted(name) for name in unexpected]),
                        ("of other shapes are", [f"{dotted(n)} ({text})" for n, text in sorted(misshapen.items())]),
                    )
                    if found
                )
                + _other_mode(missing, there)
            )

    def read(self) -> None:
        """Read its tensors."""
        self.stored.read(self.tensors)

    def tree(self) -> dict[str, Any]:
        """The training state, after reading."""
        found: dict[str, Any] = self.spec.unflatten(map(self._value, self.entries))  # type: ignore[assignment]
        return found

    def _value(self, entry: Entry) -> Any:
        if not is_empty(entry.leaf):
            return self._leaf(entry.name)
        tree: dict[str, Any] = {}
        for name in self.stored.below.get(entry.name, []) if entry.open is not None else []:
            *outer, key = name[len(entry.name) :]
            place = tree
            for part in outer:
                place = place.setdefault(part, {})
            place[key] = self._leaf(name)
        return tree

    def _leaf(self, name: Name) -> Any:
        return self.tensors[name] if name in self.tensors else self.stored.plain[name]


def _other_mode(missing: Iterable[Name], there: Iterable[Name]) -> str:
    """The way out where a module was split in training mode there and in evaluation mode here, or the reverse."""
    have, lack, modes = {*there}, sorted(missing), {"state": "training", "params": "evaluation"}
    for was, now in (("state", "params"), ("params", "state")):
        if moved := [dotted(name[1:]) for name in lack if name[0] == now and (was, *name[1:]) in have]:
            return (
                f"; {some(moved)} are {was} there and {now} here, since the module was split in {modes[was]} mode "
                f"there and in {modes[now]} mode here: load it into a pipeline split in {modes[was]} mode; to evaluate "
                "what was split in training mode, take interop.eval_mode(pipeline), with the same params and state"
            )
    return ""


def _nearest(name: Name, others: Iterable[Name], cutoff: float) -> str:
    found = get_close_matches(dotted(name), map(dotted, others), n=1, cutoff=cutoff)
    return f"{dotted(name)} (has {found[0]})" if found else dotted(name)
