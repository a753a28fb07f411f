"""Checkpoints of a training state: saved by all ranks at once, loaded by any number of them.

Ranks agree before a save, after their parts are written, and when it is whole.
"""

from __future__ import annotations

import json
import os
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpipe.handlers.protocol import Handler
from fpipe.interop.checkpoints.completeness import Lack, check_whole, lacking, nonpersistent
from fpipe.interop.checkpoints.loading import Wanted
from fpipe.interop.checkpoints.names import Name, dense, dotted, entries, is_empty, staged
from fpipe.interop.checkpoints.ranks import Ranks
from fpipe.interop.checkpoints.storage import (
    CheckpointError,
    Outline,
    begun,
    checkpoints,
    last,
    opened,
    sealed,
    written,
)
from fpipe.plan import Plan
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import describe


class Checkpoints:
    """Checkpoints of one training run, in a folder that all ranks share; each makes it, and calls its methods.

    A training state is a dict: `params` and `state`, `{stage: tree}`, and whatever else is to be kept, trees of
    tensors, numbers, texts and None under names of one's own: `optimizer`, `step`, a seed. These two, and what has
    their structure or is kept for their entries, as an optimizer's state is, are saved by the ranks that hold the
    stages, each entry once, under its name in the module (stages of `split`) or `stages.<number>` and its path. So it
    can be loaded by other ranks, under another placement, or in one process, and that of a split module into other
    cuts. What stands by no stage must be the same on all ranks.

    A checkpoint is there as a whole or not at all, whenever a save is killed; what a killed one left is removed by the
    next. It is a checkpoint of torch.distributed.checkpoint as well. Of several replicas of a pipeline, one saves.
    No rank may come later than another by more than the handler's timeout.

    Args:
        plan, handler: the step's own.
        keep: how many are kept; by default all.

    >>> import tempfile
    >>> from fpipe import Placement, handlers
    >>> pipeline = Pipeline([lambda p, x: x * p["scale"]])
    >>> plan = pipeline.plan(Placement.loop(ranks=1), microbatches=1)
    >>> saved = Checkpoints(tempfile.mkdtemp(), pipeline, plan, handler=handlers.Local(), keep=2)
    >>> saved.latest() is None
    True
    >>> saved.save({"params": {0: {"scale": torch.tensor([3.0])}}, "step": 12, "rng": (7, 12)}).name
    '000001-step-12'
    >>> saved.load({"params": {0: {"scale": torch.zeros(1)}}, "step": 0, "rng": (0, 0)})
    {'params': {0: {'scale': tensor([3.])}}, 'step': 12, 'rng': (7, 12)}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        pipeline: Pipeline,
        plan: Plan,
        *,
        handler: Handler,
        keep: int | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep is at least 1, or None for all, not {keep}")
        self.folder, self.pipeline, self.plan, self.keep = Path(folder), pipeline, plan, keep
        self._ranks = Ranks(handler, plan, f"the checkpoints in {folder}")
        self._device = torch.device(getattr(handler, "device", "cpu"))
        self._thread = ThreadPoolExecutor(1, "fpipe-checkpoint")
        self._pending: Saving | None = None

    def latest(self) -> Path | None:
        """The one that was saved last, as rank 0 sees it; the same on every rank.

        Raises:
            CheckpointError: rank 0 can't look into the folder.
            TransportError: another rank did not come to it, or is gone.
        """
        self._begin("latest")
        _, (found, *_) = self._ranks.together(
            lambda: [path.name for path in checkpoints(self.folder)[-1:]] if self._ranks.first else []
        )
        return self.folder / found[0] if found else None

    def save(self, tree: Mapping[str, Any]) -> Path:
        """Save a training state; where it is then, on every rank.

        Raises:
            CheckpointError: another rank could not save its part, or has something else that belongs to no stage; or
                params or state, where there are any, lack what a stage holds.
            TransportError: another rank did not come to it, or is gone.
            OSError: it can't be written.
            TypeError: it holds what is neither a dense tensor, a number, a text nor None.
        """
        self._begin("save")
        return self._save(lambda: self._share(tree))

    def async_save(self, tree: Mapping[str, Any]) -> Saving:
        """Copy a training state to the CPU, and save it while training goes on, which may donate it.

        The next call waits until it is saved, and raises what went wrong unless the handle's `wait` did. The last one's
        is to be waited for: the interpreter's end does, but says nothing of errors.
        """
        self._begin("save")
        share = Future[_Share]()
        try:
            share.set_result(self._share(tree).copied())
        except Exception as error:  # the other ranks must be told, who wait for this one
            share.set_exception(error)
        self._pending = Saving(self._thread.submit(self._save, share.result))
        return self._pending

    def load(self, like: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """A training state as it was saved.

        Args:
            like: a state of the same structure, as training begins with; what the checkpoint has under other names at
                the top is not loaded. Tensors come on the devices and in the dtypes of its own; for one on the meta
                device, and where it has None, on the handler's. What an optimizer's init left empty is filled with what
                was saved, in the dtype of its parameter where it had that.
            path: one of the checkpoints; by default the one that was saved last.

        Raises:
            CheckpointError: there is none, it is damaged, or it is another model's: says which names are missing,
                unexpected, or of other shapes. What an optimizer's init left empty is missing unless it was saved.
            TransportError: another rank did not come to it, or is gone.
            TypeError: a tensor of `like` is sparse or nested.
        """
        self._begin("load")
        if path is None:
            _, names = self._ranks.together(lambda: last(self.folder).name if self._ranks.first else "")
            path = self.folder / names[0]
        at = Path(path)
        wanted, asked = self._ranks.together(
            lambda: Wanted(opened(at), like, self.pipeline, self._device), lambda found: tuple(found.asked)
        )
        wanted.check(asked)
        self._ranks.together(wanted.read, lambda _: None)
        return wanted.tree()

    def _begin(self, call: str) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.told:
            pending.wait()
        self._ranks.come(call)

    def _share(self, tree: Mapping[str, Any]) -> _Share:
        """What this process saves of it."""
        holders, own = self.plan.placement.holders, self._ranks.played
        share = _Share({}, {}, {}, staged(tree, self.pipeline), set(), {*tree}, [])
        for entry in entries(tree, self.pipeline, share.by_stage)[0]:
            if is_empty(entry.leaf):
                share.empty.add(entry.name)
                continue
            leaf = _storable(entry.name, entry.leaf)
            if entry.stage is None:
                share.common[entry.name] = "None" if leaf is None else describe(leaf)
            if (holders[entry.stage][0] if entry.stage is not None else 0) not in own:
                continue
            if isinstance(leaf, Tensor):
                share.tensors[entry.name] = leaf
            else:
                share.plain[entry.name] = leaf
        stages = {stage for stage, ranks in enumerate(holders) if ranks[0] in own}
        share.lacking.extend(lacking(tree, self.pipeline, {*share.tensors, *share.plain}, stages))
        return share

    def _save(self, give: Callable[[], _Share]) -> Path:
        ranks, folder = self._ranks, self.folder
        share, told = ranks.together(give, lambda share: (share.sections, share.lacking))
        sections, lacks = map(chain.from_iterable, zip(*told, strict=True))
        check_whole(sections, lacks, self.plan.placement.holders)
        _, names = ranks.together(lambda: begun(folder, share.step).name if ranks.first else "")
        filled, own = folder / names[0], ranks.played[0]
        _, parts = ranks.together(
            lambda: (written(filled, own, share.tensors), share.plain, share.common, share.by_stage, share.empty)
        )

        def seal() -> str:
            if not ranks.first:
                return ""
            written_, plain, common, by_stage, empty = zip(*parts, strict=True)
            _check_common(common)
            outline = Outline(frozenset(chain(*by_stage)), frozenset(chain(*empty)), nonpersistent(self.pipeline))
            return sealed(filled, written_, dict(ChainMap(*plain)), outline, self.keep).name

        _, names = ranks.together(seal)
        saved: str = names[0]
        return folder / saved


class Saving:
    """A save under way."""

    def __init__(self, future: Future[Path]) -> None:
        self.future, self.told = future, False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.future.done()

    def wait(self) -> Path:
        """Where it is, once it is saved; raises what `Checkpoints.save` would."""
        try:
            return self.future.result()
        finally:
            self.told = self.future.done()


@dataclass(frozen=True)
class _Share:
    """A process's part of a training state.

    Args:
        plain: what is no tensor.
        common: descriptions of all that stands by no stage, whoever saves it.
        by_stage: where a `{stage: tree}` stands.
        empty: where an empty dict stands, whoever saves what else is there.
        sections: the names at the top, whoever saves what is there.
        lacking: what its params and state lack of the stages that it saves.
    """

    tensors: dict[Name, Tensor]
    plain: dict[Name, Any]
    common: dict[Name, str]
    by_stage: set[Name]
    empty: set[Name]
    sections: set[str]
    lacking: list[Lack]

    @property
    def step(self) -> int | None:
        """The training's, where the state has it as `step`."""
        step = self.plain.get(("step",))
        return step if type(step) is int and step >= 0 else None

    def copied(self) -> _Share:
        return replace(self, tensors={name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()})


def _storable(name: Name, leaf: Any) -> Any:
    """A tensor, or what JSON gives back as it is: a number of NumPy's is one of Python's then."""
    if isinstance(leaf, Tensor):
        if leaf.is_meta:
            raise TypeError(
                f"{dotted(name)} has no values, being on the meta device: interop.materialise gives it some"
            )
        return dense(name, leaf).detach()
    value = leaf.item() if isinstance(leaf, np.generic) else leaf
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"{dotted(name)} is a {type(leaf).__name__}, and a checkpoint holds tensors, numbers and texts: make it "
            "one of these, or leave it out"
        )
    return json.loads(json.dumps(value))


def _check_common(common: Sequence[Mapping[Name, str]]) -> None:
    first = common[0]
    for rank, other in enumerate(common):
        for name in first.keys() | other.keys():
            ours, theirs = (each.get(name, "missing") for each in (first, other))
            if ours != theirs:
                raise CheckpointError(
                    f"{dotted(name)} is {theirs} on rank {rank} and {ours} on rank 0: what belongs to no stage must be "
                    "the same on every rank, and what does stands in params and state, or has their structure"
                )
