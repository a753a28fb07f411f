"""Measure stages: the seconds of each piece, and bytes by storage."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from operator import add
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fpipe import effects as fx
from fpipe._format import counted
from fpipe.autodiff.agreement import exchange
from fpipe.autodiff.functions import SavedGraph
from fpipe.autodiff.graph.collectives import WATCH, NoWatch
from fpipe.autodiff.interface import DifferentiablePipeline
from fpipe.autodiff.options import Autodiff, Options, Policies
from fpipe.autodiff.storages import leaves_of
from fpipe.costs import COLLECTIVES_OF, OVER_REPLICAS, PIECES, Costs, Shared, Tied, relative
from fpipe.devices import device_of
from fpipe.errors import ScheduleError, TransportError
from fpipe.errors.arguments import check_optimizer, checked
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.handlers.calls import paths_read
from fpipe.handlers.distributed.handler import Distributed
from fpipe.handlers.distributed.strides import buffer, strides_of
from fpipe.handlers.local import Local
from fpipe.handlers.protocol import Handler, Inputs, Observer, Peers, ValueStore
from fpipe.plan import Placement, Plan
from fpipe.policies import everything_saveable
from fpipe.profiling import host_links, replicas, updates
from fpipe.profiling.replicas import Seconds
from fpipe.profiling.storages import StorageBytes
from fpipe.programs.lowering import existing_halves
from fpipe.programs.program import Program
from fpipe.stages.carry import by_slice
from fpipe.stages.microbatch import Microbatch, pair_of_axes, slices_of, split
from fpipe.stages.pipeline import Pipeline, with_loss
from fpipe.stages.precision import OWN_DTYPES, Precision
from fpipe.stages.pytree import flatten, get_at, indices
from fpipe.stages.rng import as_rng
from fpipe.stages.sharding import Placed, expert_dim, is_dtensor, locals_of
from fpipe.tables import slice_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
SIZES: Mapping[str, Any] = {
    "residuals": fx.Residuals,
    "deferred": fx.Deferred,
    "carry": fx.Carry,
    "carry_gradient": fx.CarryGradient,
}
CARRIED = ("carry", "carry_gradient")
HINT = "every process calls profile with the handler"


@fold_tracebacks
@checked("microbatches", "slices", "rng", "autodiff", "policy", "optimizer")
def profile(
    pipeline: Pipeline,
    params: Mapping[int, Any],
    batch: Any,
    target: Any = None,
    *,
    microbatches: int = 1,
    slices: int = 1,
    state: Mapping[int, Any] | None = None,
    rng: tuple[int, int] | None = None,
    has_aux: bool = False,
    in_axes: Any = 0,
    sequence_axes: Any = 1,
    autodiff: Autodiff = "auto",
    policy: Policies = everything_saveable,
    precision: Precision = OWN_DTYPES,
    compile: bool | str = False,  # noqa: A002
    repeats: int = 10,
    handler: Handler | None = None,
    optimizer: updates.Optimizer | None = None,
) -> Costs:
    """Measure what each stage costs on this machine, for `simulate`, `search` and schedules that order by costs.

    Args:
        params, state: of all stages. With a handler of several replicas, params may be sharded over these: each process
            gets them whole, and of experts its own. They may be DTensors over the processes that compute stages
            together, which stay as they are.
        batch, target: split into `microbatches`. The costs are those of one microbatch: the median over all of them. Of
            at least three, it leaves out the first of a step, which takes longer: it makes the sums of gradients.
        slices, sequence_axes: of each microbatch, as in a plan and in `value_and_grad`. The costs are then the means
            over its slices, with `carry`, `carry_gradient`, and as `slice_scale` the factors of each stage's slices.
        rng: (seed, step), by default (0, 0).
        precision: the dtypes of the step, as of `value_and_grad`.
        repeats: the number of measured steps with fused backwards, of those with split ones, and of gathers and
            scatters of each stage, after unmeasured ones.
        handler: measure in all its processes at the same time, and return the same costs in each: the medians over
            them. Every process calls `profile`. One that plays all ranks in this process, such as `Local`, changes
            nothing. Where a `Distributed` has replicas, `gather` and `scatter` are measured as it runs them, on all
            ranks at once and with no compute beside them; `gather` is 0 where params are not sharded.
        optimizer: measure its update of each trained stage too, as `train_step` takes it. It gets gradients of zero.

    Returns:
        `Costs` in seconds for `forward`, `backward`, `backward_input` and `backward_weight`, as `Local` runs them, with
        the addition of weight gradients to their sums; in bytes for `activation`, `residuals`, `deferred`, and for
        `parameters`, which are whole also where they are sharded, in the dtype in which they are passed; `gathered` and
        `gradients` if these have others. A half of a backward that a stage does not have, because of what is frozen,
        costs nothing. In the others neither parameters nor the batch are counted. `tied` are the entries that stages
        share, `prepared` the bytes that a stage computes of its parameters alone, once a step. `update` is that of a
        whole stage, 0 without an optimizer. `collectives` are the parts of these times in which a piece waits for those
        inside it, where stages have some: all processes that take part call `profile` at the same time, and get the
        same times. What they cut among them counts as this process's piece.
        `shared` lists the memory that several of these have in common, `reads` what a stage reads of an output if it
        does not read all.
        `offload` and `fetch` are the links to the host's memory and back, as lanes copy.
        Communication costs nothing: set it with `dataclasses.replace(costs, communication=Link(latency, bandwidth))`,
        and likewise `gather` and `scatter` without a handler. `Measurement.costs` has all of them as they were in a
        step.

    Raises:
        StageError: an argument is wrong, or a stage failed.
        ScheduleError: the handler has several replicas, and more ranks than there are stages.
        TransportError: (with a handler) `profile` failed in another process; with its reason.
        ValueError: `repeats` or `microbatches` is below 1, `rng` is no pair of integers, or `Local(devices=)` has other
            devices than the params.

    >>> from fpipe import Pipeline
    >>> pipeline = Pipeline([lambda p, x: torch.tanh(x @ p)] * 2, loss=lambda y, t: (y - t).square().mean())
    >>> params, batch, target = {0: torch.eye(4), 1: torch.eye(4)}, torch.ones(6, 4), torch.ones(6, 4)
    >>> costs = profile(pipeline, params, batch, target, microbatches=2)
    >>> costs.activation, costs.residuals[0], costs.forward[0] > 0
    ((48.0, 4.0), 48.0, True)
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    if optimizer is not None:
        check_optimizer(optimizer)
    if handler is not None:
        _check_place(handler, params, len(pipeline.stages))
    pipeline = with_loss(pipeline, has_aux)
    plan = pipeline.plan(Placement.loop(1, chunks=len(pipeline.stages)), microbatches, slices=slices)
    pipeline = by_slice(pipeline) if slices > 1 else pipeline
    stages = Options(autodiff, policy, compile).pieces(pipeline, loss=True)
    pieces = DifferentiablePipeline(pipeline, stages, precision=precision, differentiated=True)

    def inputs() -> Inputs:
        trees = zip((batch, target), pair_of_axes(in_axes), ("batch", "target"), strict=True)
        batches, targets = (split(x, microbatches, axis, name)[0] for x, axis, name in trees)
        seed, data = as_rng((0, 0) if rng is None else rng), list(map(Microbatch, batches, targets))
        if slices > 1:
            data, _ = slices_of(data, slices, sequence_axes, in_axes)
        return Inputs({}, [state or {}], data, rng=seed, slices=slices)

    peers = None if handler is None or handler.peers is None else handler.peers.new_group("a profile", hint=HINT)
    split_inputs = _agreed(peers, inputs, "splitting the batch")  # before shards are gathered, by all processes at once
    whole = replace(split_inputs, params=_whole(params, precision, handler))
    run = _agreed(peers, lambda: _Run(pieces, plan, whole), "tracing stages")
    seconds = _agreed(peers, lambda: run.seconds(repeats), "measuring stages")
    seconds |= host_links.copies(locals_of(dict(whole.params)), repeats)
    count = 1 if handler is None else handler.replicas(plan).count
    if isinstance(handler, Distributed) and count > 1:
        seconds |= replicas.measure(pieces, params, run.inputs.state, handler, run.profiler.now, repeats)
    if optimizer is not None:
        measured = partial(updates.measure, whole.params, plan, optimizer, run.profiler.now, repeats)
        seconds |= _agreed(peers, measured, "measuring updates")
    if peers is not None:
        seconds = _joined(peers.gather(seconds, "comparing times"))
    for processes in sorted(run.profiler.waits.groups):
        seconds = _joined(_gathered(seconds, processes))
    return replace(
        run.profiler.costs(plan, seconds),
        **host_links.links(seconds),
        **_sizes(params, range(plan.stages), precision, handler),
        tied=_tied(pipeline, params, handler),
        replicas=count,
    )


def _check_place(handler: Handler, params: Any, stages: int) -> None:
    """Raise ValueError for a handler with other devices than the params', ScheduleError for one with too many ranks."""
    if isinstance(handler, Local):
        here = {(x.device.type, x.device.index or 0) for x in flatten(dict(params)).leaves if isinstance(x, Tensor)}
        if others := {str(x) for x in handler.devices or () if (x.type, x.index or 0) not in here}:
            raise ValueError(
                f"profile measures every stage where its params are, and the handler has {', '.join(sorted(others))} "
                "too: leave handler out, and profile once on each kind of device"
            )
    if isinstance(handler, Distributed) and handler.grid.replicas > 1 and handler.size > stages:
        raise ScheduleError(
            f"the handler has {handler.size} ranks in each replica, and the pipeline {counted(stages, 'stage')}: to "
            "measure gathers, profile needs a stage on each rank. Cut the model into more stages, or leave handler out"
        )


def _agreed(peers: Peers | None, do: Callable[[], T], call: str) -> T:
    """Call a function in every process, at about the same time; an error in one is raised in all."""
    return do() if peers is None else peers.agree(do, call, lambda result: None)[0]


def _gathered(seconds: Seconds, processes: tuple[int, ...]) -> list[Seconds]:
    """Return the times of all processes that take part in collectives of stages with this one."""

    def missing(absent: Sequence[int], timeout: float) -> TransportError:
        return TransportError(f"processes {[*absent]} have measured no such stages within {timeout:g} s: {HINT}")

    rows = [[*key, times] for key, times in seconds.items()]
    each = exchange("times", processes, rows, f"comparing times with ranks {[*processes]}", missing)
    return [{(cost, stage, number): times for cost, stage, number, times in rows} for rows in each]


class _Run:
    """The steps of one process that are measured; made by unmeasured ones."""

    def __init__(self, pieces: DifferentiablePipeline, plan: Plan, inputs: Inputs) -> None:
        self.inputs = inputs
        leaves = flatten((locals_of(dict(inputs.params)), [*inputs.state], list(inputs.data))).leaves
        self.profiler = profiler = _Profiler(pieces.pipeline, leaves, plan)
        self.fused, self.halves = (
            Local().compile(existing_halves({0: Program(plan, 0, tuple(_effects(plan, backward)))}), pieces, profiler)
            for backward in ([fx.Backward], [fx.BackwardInput, fx.BackwardWeight])
        )
        self.fused(inputs)  # it traces the stages; under the hooks of `sizing` they would be traced too
        self.halves(inputs)
        with profiler.sizing():
            self.halves(inputs)

    def seconds(self, repeats: int) -> Seconds:
        """Return the times of each piece."""
        self.profiler.seconds.clear()
        token = WATCH.set(self.profiler.waits)
        try:
            for _ in range(repeats):
                self.fused(self.inputs)
                self.halves(self.inputs)
        finally:
            WATCH.reset(token)
        return dict(self.profiler.seconds)


class _Waits(NoWatch):
    """Measures how long the pieces wait for their collectives, beside what they compute meanwhile.

    Args:
        now: returns the time when the devices have done all their work.
        seconds: of all of them so far.
        groups: the processes that take part in them.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self.now, self.seconds, self.groups = now, 0.0, set[tuple[int, ...]]()

    @contextmanager
    def waiting(self, purpose: str, group: Any) -> Iterator[None]:
        start = self.now()
        with super().waiting(purpose, group):
            yield
        self.seconds += self.now() - start
        if group is not None:
            self.groups.add(tuple(sorted(dist.get_process_group_ranks(group))))


def _whole(params: Mapping[int, Any], precision: Precision, handler: Handler | None) -> Any:
    """Return params as stages compute with them: without shards of replicas, but for the experts of other processes.

    Every process of their mesh calls it. What is cut over processes that compute a stage together stays so.
    """

    def whole(leaf: Any) -> Any:
        if not is_dtensor(leaf):
            return leaf
        at, placed = _expert_dim(leaf, handler), _placed(leaf, handler)
        if at is None and placed is None:
            return leaf.full_tensor()
        from torch.distributed.tensor import DTensor, Replicate  # imported already: there is a DTensor

        dims = {at} if placed is None else {at, *_dims_of(leaf, placed.mesh)}
        placements = [kind if i in dims else Replicate() for i, kind in enumerate(leaf.placements)]
        piece = leaf.redistribute(placements=placements).to_local()
        if placed is None:
            return piece
        return DTensor.from_local(
            piece, placed.mesh, placed.placements, run_check=False, shape=placed.shape, stride=placed.stride
        )

    leaves, spec = flatten(dict(params))
    return spec.unflatten([precision.cast(whole(leaf)) for leaf in leaves])


def _placed(leaf: DTensor, handler: Handler | None) -> Placed | None:
    """Return the placement of a leaf over the processes that compute its stage together."""
    return Placed.of(leaf, handler.mesh if isinstance(handler, Distributed) else None)


def _dims_of(leaf: DTensor, part: DeviceMesh) -> list[int]:
    """Return the dimensions of a leaf's mesh along which the processes of a part of it are."""
    mesh, processes = leaf.device_mesh, part.mesh.flatten().tolist()
    return [i for i in range(mesh.ndim) if dist.get_process_group_ranks(mesh.get_group(i)) == processes]


def _expert_dim(leaf: DTensor, handler: Handler | None) -> int | None:
    """Return the dimension of a leaf's mesh over which it is cut into a handler's experts; None if it is not."""
    if not isinstance(handler, Distributed) or handler.mesh is None:
        return None
    return expert_dim(leaf, handler.mesh, handler.experts)


def _joined(shares: Iterable[Seconds]) -> Seconds:
    """Return the times of all processes."""
    joined: Seconds = defaultdict(list)
    for seconds in shares:
        for key, times in seconds.items():
            joined[key] += times
    return joined


def _sizes(
    params: Mapping[int, Any], stages: Iterable[int], precision: Precision, handler: Handler | None
) -> dict[str, Any]:
    """Return the sizes of parameters and of sums that `Costs` have, without those that are the same as others."""

    def computed(dtype: torch.dtype) -> torch.dtype:
        return precision.compute or dtype

    def added(dtype: torch.dtype) -> torch.dtype:
        return precision.sum_dtype(computed(dtype))

    def sizes(dtype_of: Callable[[torch.dtype], torch.dtype]) -> list[int]:
        return [_parameter_bytes(params[stage], dtype_of, handler) for stage in stages]

    parameters, gathered, gradients = sizes(lambda dtype: dtype), sizes(computed), sizes(added)
    other = {"gathered": gathered} if precision.compute is not None else {}
    return {"parameters": parameters, **other} | ({"gradients": gradients} if gradients != gathered else {})


def _tied(pipeline: Pipeline, params: Mapping[int, Any], handler: Handler | None) -> list[Tied]:
    """Return the sizes of the entries that stages share; those that the same stages share together."""
    sizes: dict[tuple[int, ...], int] = defaultdict(int)
    for (owner, path), uses in pipeline.entries.items():
        stages = tuple(sorted({stage for stage, _ in uses}))
        sizes[stages] += _parameter_bytes(get_at(params[owner], path), lambda dtype: dtype, handler)
    return [Tied(size, stages) for stages, size in sizes.items()]


def _parameter_bytes(
    params: Any, dtype_of: Callable[[torch.dtype], torch.dtype], handler: Handler | None = None
) -> int:
    """Return the bytes of a stage's parameters, with those of floating point in other dtypes; a DTensor counts whole.

    Args:
        dtype_of: dtype of a parameter -> the dtype in which it counts.
        handler: of its experts, those of one process count.
    """

    def count(x: Tensor) -> int:
        if not is_dtensor(x):
            return x.numel()
        at, placed = _expert_dim(x, handler), _placed(x, handler)
        dims = [] if placed is None or placed.placements[0].is_replicate() else _dims_of(x, placed.mesh)
        return x.numel() // prod(x.device_mesh.size(i) for i in ([] if at is None else [at]) + dims)

    leaves = {id(x): x for x in flatten(params).leaves if isinstance(x, Tensor)}.values()
    return sum(count(x) * (dtype_of(x.dtype) if x.is_floating_point() else x.dtype).itemsize for x in leaves)


def _effects(plan: Plan, backward: Iterable[Any]) -> Iterator[fx.Effect]:
    """Yield the effects of one rank that runs every microbatch forward and back."""
    for m in range(plan.microbatches):
        for t, s in product(range(plan.slices), range(plan.stages)):
            yield fx.Forward(s, m, t)
        for t, s in product(reversed(range(plan.slices)), reversed(range(plan.stages))):
            for half in backward:
                yield half(s, m, t)


class _Profiler(Observer):
    """Measures each effect, and in one step the memory of the first microbatch, the largest.

    Args:
        excluded: tensors that do not count.
        seconds: of each run.
        waits: measures the collectives inside pieces.
        activations, reads: bytes that are sent of a whole output, and of what a stage reads of it if that is less.
        saved: tensors that eager autograd has saved in the running effect: the residuals of a stage that can't be
            traced. None except in the step whose memory is measured.
        alive: all tensors that were added, so that no storage is used twice.
    """

    def __init__(self, pipeline: Pipeline, excluded: list[Any], plan: Plan) -> None:
        self.stages, self.storages, self.plan = pipeline.stages, StorageBytes[fx.Name](excluded), plan
        self.devices = [device_of(device) for device in {x.device for x in excluded if isinstance(x, Tensor)}]
        self.seconds: Seconds = defaultdict(list)
        self.activations: dict[fx.Name, int] = {}
        self.reads: dict[tuple[int, int], float] = {}
        self.waits = _Waits(self.now)
        self.saved: list[Tensor] | None = None
        self.alive: list[Any] = []

    def on_store(self, rank: int, store: ValueStore) -> None:
        self.store = store

    def begin(self, rank: int, effect: fx.Effect) -> None:
        if self.saved is not None:
            self.saved.clear()
        self.waits.seconds = 0.0
        self.start = self.now()

    def end(self, rank: int, effect: Any) -> None:
        piece = PIECES[type(effect)]
        unit = self.plan.unit(effect.microbatch, effect.slice)
        self.seconds[piece, effect.stage, unit].append(self.now() - self.start)
        self.seconds[f"collectives of {piece}", effect.stage, unit].append(self.waits.seconds)
        if self.saved is not None and effect.microbatch == 0:
            self._measure(effect, self.saved)

    def now(self) -> float:
        """Return the time when the devices have done all their work."""
        for device in self.devices:
            device.synchronize()
        return time.perf_counter()

    @contextmanager
    def sizing(self) -> Iterator[None]:
        """Measure the memory of the step that runs in the block."""
        self.saved = saved = list[Tensor]()

        def save(x: Tensor) -> Tensor:
            saved.append(x.detach())
            return x.detach()

        with saved_tensors_hooks(save, lambda x: x):
            yield
        self.saved = None

    def _measure(self, effect: fx.Compute, saved: list[Tensor]) -> None:
        """Add the values that an effect has put into the store, and those that its stage has prepared."""
        prepared = [*self.store.prepared(effect.stage)]
        self.storages.add(fx.Parameters(effect.stage), prepared)
        self.alive += prepared
        s, t, stage = effect.stage, effect.slice, self.stages[effect.stage]
        if isinstance(effect, fx.Forward):
            residuals = self._value(fx.Residuals(s, 0, t))
            self.activations[fx.Activation(s, 0, t)] = _sent_bytes(self._add(fx.Activation(s, 0, t)))
            self._add(fx.Residuals(s, 0, t), saved)
            if t < self.plan.slices - 1 and self._value(fx.Carry(s, 0, t)) is not None:
                self._add(fx.Carry(s, 0, t))
            if not isinstance(residuals, SavedGraph):
                self._add(fx.Deferred(s, 0, t), saved)
            for source in self.plan.sources(s) if t == 0 else ():
                output = self._value(fx.Activation(source, 0))
                numbers = {i for path in paths_read(stage, source) for i in indices(output.tree, path)}
                size = _sent_bytes([output.leaves[i] for i in numbers])
                if size < self.activations[fx.Activation(source, 0)]:
                    self.reads[source, s] = size
        elif isinstance(effect, fx.BackwardInput):
            self._add(fx.Deferred(s, 0, t))
            for source in self.plan.sources(s):
                self._add(fx.Gradient(source, s, 0, t))
            if t > 0 and self._value(fx.CarryGradient(s, 0, t - 1)) is not None:
                self._add(fx.CarryGradient(s, 0, t - 1))

    def _value(self, name: fx.Name) -> Any:
        return self.store.slots[self.store.slot(name)]

    def _add(self, name: fx.Name, saved: Iterable[Any] = ()) -> list[Any]:
        """Add the tensors of a value, and those that autograd saved for it; return all of them."""
        leaves = [*leaves_of(self._value(name)), *saved]
        self.alive += leaves
        self.storages.add(name, leaves)
        return leaves

    def costs(self, plan: Plan, seconds: Seconds) -> Costs:
        """Return medians over repeats and processes, and then over microbatches; of slices, the means of these."""
        stages, slices = range(plan.stages), range(plan.slices)

        def of_slice(cost: str, stage: int, t: int) -> float:
            keys = [(cost, stage, plan.unit(m, t)) for m in range(plan.microbatches)]
            return median([median(seconds[key]) for key in keys if key in seconds] or [0.0])

        def times(cost: str, stage: int) -> list[float]:
            return [of_slice(cost, stage, t) for t in slices]

        def whole(cost: str, stage: int) -> float:
            return median(seconds.get((cost, stage, 0), [0.0]))

        def sizes(kind: Any, stage: int) -> list[float]:
            return [float(self.storages.bytes(kind(stage, 0, t))) for t in slices]

        in_two = [plan.is_trained(s) and plan.has_input_half(s) for s in stages]
        each = {cost: [times(cost, s) for s in stages] for cost in PIECES.values()}  # of each slice of each stage
        waits = {kind: [times(f"collectives of {piece}", s) for s in stages] for kind, piece in PIECES.items()}
        for s in stages:
            if not in_two[s]:
                each["backward"][s] = [*map(add, each["backward_input"][s], each["backward_weight"][s])]
                waits[fx.Backward][s] = [*map(add, waits[fx.BackwardInput][s], waits[fx.BackwardWeight][s])]
        each |= {name: [sizes(kind, s) for s in stages] for name, kind in SIZES.items()}
        each["deferred"] = [x if in_two[s] else [0.0] * plan.slices for s, x in enumerate(each["deferred"])]
        counts = {name: max(1, plan.slices - (name in CARRIED)) for name in each}  # the last slice passes nothing on
        means: Any = {name: [sum(x) / counts[name] for x in costs] for name, costs in each.items()}
        by_slice = {name: [*map(relative, costs, means[name])] for name, costs in each.items()}
        if self.waits.groups:
            by_slice |= {COLLECTIVES_OF[kind]: [*map(relative, x, map(fmean, x))] for kind, x in waits.items()}
        once: Any = {cost: [whole(cost, s) for s in stages] for cost in (*OVER_REPLICAS, "update")}
        return Costs(
            **means,
            **once,
            collectives={kind: [*map(fmean, x)] for kind, x in waits.items()} if self.waits.groups else {},
            activation=[sum(self.activations[fx.Activation(s, 0, t)] for t in slices) / plan.slices for s in stages],
            prepared=[self.storages.bytes(fx.Parameters(s)) for s in stages],
            slice_scale=by_slice if plan.slices > 1 else (),
            shared=self._shared(),
            reads=self.reads,
        )

    def _shared(self) -> list[Shared]:
        """Return the bytes that names share; not those that residuals and deferred values of the same stage and slice
        alone share, because they are never live together."""
        sizes: dict[tuple[fx.Name, ...], float] = defaultdict(float)
        for names, size in self.storages.shared():
            first: Any = names[0]
            pair = {kind(first.stage, 0, slice_of(first)) for kind in (fx.Residuals, fx.Deferred)}
            if {*names} != pair:
                sizes[names] += size
        whole = self.activations
        return [Shared(min(size, *(whole.get(n, size) for n in names)), names) for names, size in sizes.items()]


def _sent_bytes(leaves: Iterable[Any]) -> int:
    """Return the bytes of the tensors as messages: a view's own elements, and expanded elements once."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return sum(buffer(tuple(x.shape), strides_of(x), x.dtype, torch.device("meta")).nbytes for x in tensors)
