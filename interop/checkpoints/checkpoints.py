"""Checkpoints of a training state: all ranks save one together, and any number of ranks load it.

The ranks agree before a save, after their parts are written, and when it is complete.
"""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors.arguments import checked
from fpipe.errors.tracebacks import warn
from fpipe.handlers.distributed.beside import RowsOfPeers, beside
from fpipe.handlers.protocol import Handler, Peers
from fpipe.interop.checkpoints.choice import (
    JOB,
    Choice,
    Report,
    choice_of,
    job_of,
    memory_of,
    note,
    saved_in,
)
from fpipe.interop.checkpoints.claims import UNFINISHED, Claim
from fpipe.interop.checkpoints.completeness import Missing, check_complete, missing_entries, nonpersistent
from fpipe.interop.checkpoints.loading import LoadPlan, Reader
from fpipe.interop.checkpoints.manifest import CheckpointError, checkpoints, last, number_of
from fpipe.interop.checkpoints.memory import Memory, MemoryCheckpoints
from fpipe.interop.checkpoints.names import Name, dotted, entries, kind_of, sections_of, state_of, storable
from fpipe.interop.checkpoints.room import Want
from fpipe.interop.checkpoints.slots import stored_in
from fpipe.interop.checkpoints.storage import CheckpointReader, naming, opened, sealed, written
from fpipe.plan import Plan
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import describe
from fpipe.stages.sharding import Placed, is_first, local, wrap

T = TypeVar("T")
log = logging.getLogger("fpipe.checkpoints")

HINT = "every rank calls latest, save and load, in the same order and with the same folder"


class Checkpoints:
    """Checkpoints of one training run, in a folder that all ranks share; each makes it, and calls its methods.

    A training state has sections. Three are `{stage: tree}`: `params`, `state`, and `optimizer`, which is for all that
    is kept for the stages, averaged parameters too. Each is saved by the ranks that hold the stages, each entry once,
    under its name in the module (stages of `split`) or `stages.<number>` and its path: other ranks, another placement
    or one process can load it, and entries of a split module can be loaded into other cuts. Every other section has a
    name of the caller's (`step`, a seed) and is a tree of tensors, numbers, texts and None, the same on every rank.

    A checkpoint is complete or not there, whenever a save is killed; the next save removes what a killed one left. It
    is a checkpoint of torch.distributed.checkpoint as well. No rank may come later than another by more than the
    handler's timeout.

    Leaves may be DTensors over the replicas of the handler. All replicas save together, each shard once, and the first
    one what they have in common. What is loaded is placed like the tensors that are passed, whichever way it was saved:
    over any number of replicas, or whole. A process reads the pieces that have its rows, one at a time.

    Where replicas have a state of their own (`buffers="own"`), `state` is what a step takes and returns, and each
    replica's is saved. As many replicas load each its own; any other number loads the first one's, with a warning.

    With `tensor_parallel`, leaves may be DTensors over that dimension too, as of `interop.shard` and of torch's
    `parallelize_module`: each process saves its pieces, and loads those of its own mesh, whichever it is.

    Args:
        plan, handler: the step's own.
        keep: how many are kept; by default all.
        tensor_parallel: the processes that compute stages together with this one, as `mesh["tp"]`. All of them make the
            same calls.
        memory: checkpoints in shared memory beside them, of the runs that `resume` returns.

    >>> import tempfile
    >>> from fpipe import Placement, handlers
    >>> pipeline = Pipeline([lambda p, x: x * p["scale"]])
    >>> plan = pipeline.plan(Placement.loop(ranks=1), microbatches=1)
    >>> saved = Checkpoints(tempfile.mkdtemp(), pipeline, plan, handler=handlers.Local(), keep=2)
    >>> saved.latest() is None
    True
    >>> saved.save(params={0: {"scale": torch.tensor([3.0])}}, step=12, rng=(7, 12)).name
    '000001-step-12'
    >>> saved.load(params={0: {"scale": torch.zeros(1)}}, step=0, rng=(0, 0))
    {'params': {0: {'scale': tensor([3.])}}, 'step': 12, 'rng': (7, 12)}
    """

    @checked("keep")
    def __init__(
        self,
        folder: str | os.PathLike[str],
        pipeline: Pipeline,
        plan: Plan,
        *,
        handler: Handler,
        keep: int | None = None,
        tensor_parallel: DeviceMesh | None = None,
        memory: Memory | None = None,
    ) -> None:
        if keep is not None and not (isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1):
            raise ValueError(f"keep must be at least 1, or None for all, not {keep!r}")
        self.folder, self.pipeline, self.plan, self.keep = Path(folder), pipeline, plan, keep
        self.handler, self._ranks, self._replicas = handler, handler.ranks(plan), handler.replicas(plan)
        self._replica = self._replicas.here[0]
        purpose = f"the checkpoints in {folder}"
        row = handler.peers and handler.peers.new_group(purpose, hint=HINT, error=CheckpointError)
        self._peers: Peers | RowsOfPeers | None = row
        self._part, self._parts = 0, tensor_parallel  # the number of this process among those that compute a stage
        if tensor_parallel is not None:
            column = beside(tensor_parallel, purpose, hint=HINT, timeout=handler.timeout, error=CheckpointError)
            self._part, self._peers = tensor_parallel.get_local_rank(), RowsOfPeers(row, column)
        self._owns_state = self._replicas.count > 1 and any(stage.stateful for stage in pipeline.stages)
        self._states = list(map(state_of, self._replicas.here))  # the section with the state of each replica here
        self._device = (handler.devices or [torch.device("cpu")])[0]
        self._thread = ThreadPoolExecutor(1, "fpipe-checkpoint")
        self._pending: Saving | None = None
        self.memory = memory
        states = self._replicas.count if self._owns_state else 1
        self._memory: MemoryCheckpoints | None = None
        if memory is not None:
            self._memory = MemoryCheckpoints(memory, self.folder, pipeline, handler, self._number, states)

    def __repr__(self) -> str:
        keep = "" if self.keep is None else f", the last {self.keep} of them"
        return f"<Checkpoints in {self.folder}{keep}>"

    def latest(self) -> Path | None:
        """Return the checkpoint that was saved last, as rank 0 sees it; the same on every rank.

        Raises:
            CheckpointError: rank 0 can't read the folder.
            TransportError: a rank did not come, or is gone.
        """
        self._begin("latest")
        name = self._on_first(lambda: next((path.name for path in checkpoints(self.folder)[-1:]), None), "latest")
        return None if name is None else self.folder / name

    def save(
        self,
        *,
        params: Mapping[int, Any] | None = None,
        state: Any = None,
        optimizer: Mapping[int, Any] | None = None,
        **rest: Any,
    ) -> Path:
        """Save a training state; return its path, on every rank.

        Args:
            params, state, optimizer: `{stage: tree}` of the stages that this process holds. Where it plays several
                replicas with a state of their own, `state` is a list with one for each, as in a step.
            rest: trees that are the same on every rank; an int called `step` is in the name of the checkpoint.

        Raises:
            CheckpointError: another rank could not save its part, or has another tree in `rest`; or params or state, if
                any rank passes them, lack an entry of a stage.
            TransportError: a rank did not come, or is gone; or a peer failed in a step before.
            OSError: it can't be written, as on a full disk.
            TypeError: a leaf is neither a dense tensor, a number, a text nor None.
            ValueError: no rank passes a section; or a leaf is a DTensor over other processes than the handler's
                replicas and `tensor_parallel`.
        """
        self._begin("save")
        return self._save(lambda: self._share(params=params, state=state, optimizer=optimizer, **rest))

    def async_save(self, **sections: Any) -> Saving:
        """Copy a training state, as of `save`, to the CPU, and save it while training goes on, which may donate it.

        The next call waits until it is saved, and raises its error unless the handle's `wait` did. Wait for the last
        one: the interpreter waits for it when it exits, but does not report errors.
        """
        self._begin("save")
        share = Future[_Share]()
        try:
            share.set_result(self._share(**sections).copied())
        except Exception as error:  # the other ranks wait for this one's share: send them the error
            share.set_exception(error)
        self._pending = Saving(self._thread.submit(self._save, share.result))
        return self._pending

    def finish(self) -> None:
        """Wait for the save in the background, if there is one; raise its error unless its handle's `wait` did."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.reported:
            pending.wait()

    @checked("params", "state", "optimizer")  # what one rank gets wrong is an error on all
    def load(
        self,
        path: str | os.PathLike[str] | None = None,
        /,
        *,
        params: Mapping[int, Any] | None = None,
        state: Any = None,
        optimizer: Mapping[int, Any] | None = None,
        verify: bool = True,
        **rest: Any,
    ) -> dict[str, Any]:
        """Load the sections that are passed; return them by name, as they were saved.

        Tensors get the devices and dtypes of those that are passed; one that is passed as None, or on the meta device,
        the handler's device. An empty dict of an optimizer's init is filled with the values that were saved for the
        parameter, in the dtype of the parameter in `params` if they had its dtype.

        Args:
            path: one of the checkpoints; by default the one that was saved last.
            params, state, optimizer, rest: of the same structure as was saved, as training begins with them.
            verify: compare all files with the hashes of their content, SHA-256. The processes that load share the
                files; each reads its part once more, and hashes 0.5 to 2 GB a second.

        Raises:
            CheckpointError: there is none, it is damaged, or it is another model's: lists the names that are missing,
                unexpected, or of other shapes.
            TransportError: a rank did not come, or is gone.
            TypeError: a tensor that is passed is sparse or nested.
        """
        self._begin("load")
        at = self.folder / self._on_first(lambda: last(self.folder).name, "load") if path is None else Path(path)
        sections = {"params": params, "state": state, "optimizer": optimizer, **rest}
        return self._load(lambda: self._opened(at, verify), sections)

    def _opened(self, path: Path, verify: bool = True) -> CheckpointReader:
        reader = opened(path, verify)
        if verify:
            reader.verify(self._number, self._peers.size if self._peers else 1)
        return reader

    def _load(self, read: Callable[[], Reader], sections: Mapping[str, Any]) -> dict[str, Any]:
        state, stored = sections.get("state"), dict[str, str]()  # the section that is loaded for each state

        def planned() -> LoadPlan:
            like, reader = self._sections(**sections), read()
            stored.update(self._stored_states(reader, warns=state is not None))
            like = {stored.get(section, section): tree for section, tree in like.items()}
            return LoadPlan(reader, like, self.pipeline, self._device)

        plan, requests = self._agree(planned, "load", lambda plan: tuple(plan.request))
        plan.check(requests)
        self._agree(lambda: plan.reader.read(plan.tensors), "load")
        tree = plan.tree()
        if self._owns_state and state is not None:
            states = [tree[stored[section]] for section in self._states]
            tree["state"] = states if len(states) > 1 else states[0]
        names = dict.fromkeys(("params", "state", "optimizer", *sections))
        return {name: tree[name] for name in names if name in tree}

    def resume(self, **sections: Any) -> dict[str, Any] | None:
        """Load the newest training state, from memory or else from disk; return None where there is none.

        From then on, `keep_in_memory` writes memory checkpoints, if this has them.

        Args:
            sections: as of `load`, with `step`.

        Raises:
            OSError: there is no room for memory checkpoints.
            Exception: those of `load`.
        """
        if self._memory is None:
            if self._is_first:
                self._mention_memory()
            return None if self.latest() is None else self.load(**sections)
        self._begin("resume")
        memory = self._memory

        def report() -> Report:
            if not self._is_first:
                return memory.report(self._sections(**sections), None)
            saved, step = saved_in(next(reversed(checkpoints(self.folder)), None))
            job = job_of(self.folder, memory.folder, saved)
            return memory.report(self._sections(**sections), (job, token_hex(8), saved, step))

        _, reports = self._agree(report, "resume")
        choice = choice_of(reports, self._number)
        source, loaded = self._newest(choice, reports, sections)
        begun = {**sections, **(loaded or {})}
        try:
            claim = partial(memory.claim, choice, reports, source, self._sections(**begun))
            _, wants = self._agree(claim, "resume", tuple)
            self._agree(lambda: memory.begin(reports, [Want(*each) for each in wants]), "resume")
        except BaseException:
            memory.withdraw()
            raise
        return loaded

    def _mention_memory(self) -> None:
        """Warn of memory checkpoints on this host that no run will load or remove."""
        folder = memory_of(self.folder)
        steps = [] if folder is None else [stored.step for stored in stored_in(folder)]
        if steps:
            warn(
                f"{folder} has memory checkpoints of this run, up to step {max(steps)}: pass Checkpoints(memory=) to "
                f"go on with them, or remove them by `fpipe checkpoint memory {self.folder} --clear` on each host"
            )

    def _newest(
        self, choice: Choice, reports: Sequence[Report], sections: Mapping[str, Any]
    ) -> tuple[tuple[int, int] | None, dict[str, Any] | None]:
        """Load the newest memory checkpoint that is right; else the last one on disk, if there is one."""
        assert self._memory is not None
        for source in choice.steps:
            fetch = self._memory.fetch(reports, choice, source)
            try:
                if fetch is not None:
                    self._agree(fetch, "resume")
                loaded = self._load(partial(self._memory.reader, source), sections)
            except CheckpointError as error:  # on every rank
                log.warning("step %d in memory can't be loaded: %s", source[1], error)
                continue
            log.info("step %d loaded from memory, %s", source[1], self._memory.folder)
            if self._is_first and not choice.saved:
                log.warning(
                    "the run goes on with step %d, from memory (%s): nothing is saved in %s; to begin anew, remove %s",
                    *(source[1], self._memory.folder, self.folder, self.folder / JOB),
                )
            return source, loaded
        return None, self.load(**sections) if choice.saved else None

    def keep_in_memory(self, **sections: Any) -> None:
        """Write a training state, as of `save`, into the memory of this host, if it is due; nothing is exchanged."""
        if self._memory is not None and sections["step"] % self._memory.every == 0:
            self.handler.check()
            self._memory.write(sections["step"], self._sections(**sections))

    def clear_memory(self) -> None:
        """Remove the memory checkpoints of a run that has ended."""
        if self._memory is not None:
            self._memory.clear()

    def _stored_states(self, reader: Reader, warns: bool) -> dict[str, str]:
        """Return the section of a checkpoint that has the state for each of this process's sections."""
        saved = reader.states
        if saved == self._replicas.count:
            return dict(zip(self._states, self._states, strict=True))
        if warns and saved > 1 and self._is_first:
            warn(
                f"{reader.path} has the states of {saved} replicas, and {self._replicas.count} load it: each gets that "
                f"of the first one; for each its own, load it with {saved} replicas",
            )
        return dict.fromkeys(self._states, state_of(0))

    def _sections(self, **sections: Any) -> dict[str, Any]:
        """Return the sections of a training state, in which each replica's own state has one of its own."""
        if self._owns_state and sections.get("state") is not None:
            count, state = len(self._states), sections.pop("state")
            states = [state] if count == 1 else state
            if not isinstance(states, Sequence) or len(states) != count:
                raise ValueError(
                    f"this process plays {count} replicas, each with a state of its own: pass a list with one "
                    "{stage: tree} for each, as a step returns it"
                )
            sections |= dict(zip(self._states, states, strict=True))
        return sections_of(self.pipeline, **sections)

    def _begin(self, call: str) -> None:
        self.finish()
        if self._peers is not None:
            self._peers.connect(call)

    def _agree(
        self, do: Callable[[], T], call: str, share: Callable[[T], Any] = lambda result: result
    ) -> tuple[T, list[Any]]:
        if self._peers is not None:
            return self._peers.agree(do, call, share)
        result = do()
        return result, [share(result)]

    def _on_first(self, do: Callable[[], T], call: str) -> T:
        """Return on every rank what a function returns on rank 0."""
        result: T = self._agree(lambda: do() if self._is_first else None, call)[1][0]
        return result

    @property
    def _is_first(self) -> bool:
        """This process has rank 0 of the first replica, and the first part of its stages."""
        return 0 in self._ranks and self._replica == self._part == 0

    def _share(self, **sections: Any) -> _Share:
        """Return the part of a training state that this process saves, which no failed step has touched."""
        self.handler.check()
        if "verify" in sections:
            raise ValueError("no section is called 'verify', which load takes for itself: choose another name")
        sections = self._sections(**sections)
        saved_here = {s: ranks[0] for s, ranks in enumerate(self.plan.placement.holders) if ranks[0] in self._ranks}
        missing = missing_entries(sections, self.pipeline, saved_here)
        share = _Share({}, {}, {}, [*sections], missing)
        for entry in entries(sections, self.pipeline)[0]:
            if not entry.is_stored:
                continue
            leaf = entry.leaf if entry.is_empty else storable(entry.name, entry.leaf)
            if entry.stage is None:
                share.common[entry.name] = "None" if leaf is None else describe(leaf)
            is_ours = entry.stage in saved_here if entry.stage is not None else 0 in self._ranks
            is_ours = self._is_part_here(entry.name, leaf) and is_ours
            is_own = self._owns_state and kind_of(entry.name[0]) == "state"
            if is_ours and (is_own or is_first(leaf, self._replica, self._replicas.mesh)):
                (share.tensors if isinstance(leaf, Tensor) else share.plain)[entry.name] = leaf
        return share

    def _is_part_here(self, name: Name, leaf: Any) -> bool:
        """Return whether no process before this one, of those that compute a stage together, has its part of a leaf."""
        placed = Placed.of(leaf, self._replicas.mesh) if isinstance(leaf, Tensor) else None
        if placed is not None and (self._parts is None or not _same_processes(placed.mesh, self._parts)):
            raise ValueError(
                f"{dotted(name)} is a leaf {describe(leaf)} placed {placed.placements} over {placed.mesh}, which is "
                "neither of the handler's replicas nor of tensor_parallel=: make all Checkpoints of the job by "
                "Checkpoints(..., tensor_parallel=mesh['tp'])"
            )
        return self._part == 0 or (placed is not None and not placed.placements[0].is_replicate())

    def _save(self, make: Callable[[], _Share]) -> Path:
        share, answers = self._agree(make, "save", lambda share: (share.sections, share.missing))
        sections, missing = map(chain.from_iterable, zip(*answers, strict=True))
        names = {*sections}
        if not names:
            raise ValueError("save needs a section on some rank: pass params=, state=, optimizer=, or others by name")
        check_complete(names, missing)
        with Claim() as claim:
            unfinished = self.folder / self._on_first(lambda: claim.begin(self.folder, share.step).name, "save")

            def write() -> Any:
                with naming(self.folder):
                    return written(unfinished, self._number, share.tensors), share.plain, share.common

            _, parts = self._agree(write, "save")

            def seal() -> str:
                files, plain, common = zip(*parts, strict=True)
                _check_common(common)
                whole = dict(ChainMap(*plain))
                with naming(self.folder), self._noted(unfinished):
                    path = sealed(unfinished, files, whole, nonpersistent(self.pipeline), self.keep)
                return path.name

            return self.folder / self._on_first(seal, "save")

    @contextmanager
    def _noted(self, unfinished: Path) -> Iterator[None]:
        """Note for memory checkpoints that what is sealed within is of the same job."""
        if self._memory is None or self._memory.job is None:
            yield
            return
        number = number_of(Path(unfinished.name.removeprefix(UNFINISHED)))
        noted = partial(note, self.folder, self._memory.folder, self._memory.job)
        noted(saved_in(next(reversed(checkpoints(self.folder)), None))[0], number)
        yield
        noted(number)

    @property
    def _number(self) -> int:
        """The number of this process among all that save."""
        peers = self.handler.peers
        number, size = (0, 1) if peers is None else (peers.rank, peers.size)
        return self._part * size + number


class Saving:
    """A save that runs in the background.

    Args:
        reported: whether `wait` has returned or raised its outcome.
    """

    def __init__(self, future: Future[Path]) -> None:
        self.future, self.reported = future, False

    def done(self) -> bool:
        """Whether it has ended, with an error or without."""
        return self.future.done()

    def wait(self) -> Path:
        """Return the path once it is saved; raise what `Checkpoints.save` would."""
        try:
            return self.future.result()
        finally:
            self.reported = self.future.done()


@dataclass(frozen=True)
class _Share:
    """A process's part of a training state.

    Args:
        plain: the values that are no tensors.
        common: descriptions of all entries that every rank must have the same.
        sections: the names at the top.
        missing: what its params and state lack of the stages that it saves.
    """

    tensors: dict[Name, Tensor]
    plain: dict[Name, Any]
    common: dict[Name, str]
    sections: list[str]
    missing: list[Missing]

    @property
    def step(self) -> int | None:
        """The number of the training step, if the state has it as `step`."""
        step = self.plain.get(("step",))
        return step if type(step) is int and step >= 0 else None

    def copied(self) -> _Share:
        copies = {name: wrap(local(x).to("cpu", copy=True), x) for name, x in self.tensors.items()}
        return replace(self, tensors=copies)


def _same_processes(one: DeviceMesh, other: DeviceMesh) -> bool:
    return bool(one.mesh.flatten().tolist() == other.mesh.flatten().tolist())


def _check_common(common: Sequence[Mapping[Name, str]]) -> None:
    first = common[0]
    for rank, other in enumerate(common):
        for name in first.keys() | other.keys():
            ours, theirs = (each.get(name, "missing") for each in (first, other))
            if ours != theirs:
                raise CheckpointError(
                    f"{dotted(name)} is {theirs} on rank {rank} and {ours} on rank 0: only params, state and optimizer "
                    "may differ between ranks, as {stage: tree}"
                )
