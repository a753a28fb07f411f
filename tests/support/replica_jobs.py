"""Replicas of small pipelines: their batches, the reference's results, and jobs for a grid of processes."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import unittest.mock
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import optree
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import fpipe
from fpipe import handlers, interop, schedules
from fpipe.effects import Gather, Overlap, Parameters, Release, parts
from fpipe.handlers.protocol import Inputs, Observer
from fpipe.programs.footprint import footprint
from fpipe.programs.interning import Interning
from fpipe.programs.memory import live_bytes
from fpipe.programs.program import plan_of
from fpipe.stages.microbatch import Microbatch, merge, sizes_of, split
from fpipe.stages.sharding import local, locals_of
from fpipe.tables import TABLE
from fpipe.tensorboard.recording.memory import SlotMemory
from tests.support import cases, jobs, live_jobs
from tests.support.shards import mesh_of, whole
from tests.support.sharing import sharing

CASES = [name for name in cases.UNSLICED if name != "modules"]  # a state has no replicas


@dataclass(frozen=True)
class Grid:
    """The mesh of a grid of processes: its dimensions, of which "pp" has the ranks of a replica.

    Args:
        text: such as "dp2 shard2 pp1".
        kind: of the devices.
    """

    text: str
    kind: str = "cpu"

    @property
    def shape(self):
        return {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", self.text)}

    @property
    def ranks(self):
        return self.shape["pp"]

    @property
    def size(self):
        return prod(self.shape.values())

    @property
    def replicas(self):
        return self.size // self.ranks

    @property
    def mesh(self):
        return mesh_of(*self.shape.values(), names=tuple(self.shape), kind=self.kind)

    @property
    def over(self):
        """The mesh of the replicas."""
        names = tuple(name for name in self.shape if name != "pp")
        return self.mesh[names if len(names) > 1 else names[0]]


@functools.cache
def handler(grid, exact=True):
    """One handler for all jobs of this process on a grid: its connections are made once."""
    device = None if grid.kind == "cpu" else torch.device(grid.kind, torch.cuda.current_device())
    return handlers.Distributed(grid.mesh["pp"], replicas=grid.over, exact=exact, timeout=30, device=device)


def train_transposed(rank, grid):
    """Strides that a stage saw in two steps, and whether each gradient's piece has those of its parameter."""
    seen, placed = [], []

    def stage(p, x):
        seen.append(p["w"].stride())
        return x @ p["w"]

    pipeline = fpipe.Pipeline([stage], loss=cases.mse)
    plan, own = pipeline.plan(fpipe.Placement.loop(1), 1, replicas=2), handler(grid)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, resident=1, autodiff="eager")
    for w in (torch.ones(4, 4), torch.ones(4, 4).t()):
        params = interop.fsdp({0: {"w": w}}, grid.over)
        _, grads = step(params, torch.ones(2, 4), torch.zeros(2, 4))
        placed.append(local(grads[0]["w"]).stride() == local(params[0]["w"]).stride())
    return seen, all(placed)


def left_of_a_step(rank, grid, which):
    """What is alive of a step's arguments and results after they are given up, while the step is kept."""
    case, generator, plan = make("linear", "zb_v", grid.ranks, grid.replicas, 2)
    own = handler(grid)
    params, batch, target = arguments(case, plan, own.grid)
    params = params if which is None else interop.fsdp(params, grid.over)
    resident = room(generator, plan, which)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, resident=resident, autodiff="eager")
    batch = optree.tree_map(torch.clone, batch)
    loss, grads = step(params, batch, target)
    trees = {"batch": batch, "gradients": grads, "loss": loss}
    alive = {
        name: [StorageWeakRef(local(x).untyped_storage()) for x in optree.tree_leaves(tree)]
        for name, tree in trees.items()
    }
    del batch, grads, loss, trees
    gc.collect()
    return [name for name, storages in alive.items() if not all(storage.expired() for storage in storages)]


def make(name, schedule, ranks, replicas, microbatches):
    """(case, schedule, plan) with the whole batch of all replicas, whose microbatches are of several sizes."""
    case, generator, plan = cases.make(name, schedule, ranks, microbatches, cases.rows(replicas * microbatches))
    return case, generator, replace(plan, replicas=replicas)


def rooms(schedule, plan):
    """The numbers of stages that may be whole at a time: from the least that the schedule can do with, to all."""
    programs = fpipe.lower(schedule, plan).values()
    least = 2 if any(type(e) is Overlap and both(e) for program in programs for e in program) else 1
    return range(least, max(len(plan.stages_on(rank)) for rank in range(plan.ranks)) + 1)


def both(overlap):
    """Whether an effect is of two stages at once."""
    return len({part.stage for part in parts(overlap)}) > 1


def room(schedule, plan, which):
    """The least number of stages that may be whole, or that of all, or None."""
    return None if which is None else {"least": min, "all": max}[which](rooms(schedule, plan))


def oracle(name, plan):
    """The reference's result for the whole batch: it knows no schedule, so that one call does for all."""
    return _oracle(name, plan.placement, plan.microbatches, plan.replicas)


@functools.cache
def _oracle(name, placement, microbatches, replicas):
    case = cases.built(name, placement.stages, cases.rows(replicas * microbatches))
    plan = case.pipeline.plan(placement, microbatches, replicas=replicas)
    return cases.reference(case, schedules.gpipe, plan)


def part(tree, axis, plan, replica, rows=None):
    """A replica's rows of a tree: those of its microbatches, or of its own number."""
    if tree is None:
        return None
    if rows is not None:
        first = sum(rows[:replica])
        return optree.tree_map(lambda x: x[first : first + rows[replica]], tree)
    count = plan.microbatches
    parts, _ = split(tree, plan.replicas * count, axis)
    return merge(parts[replica * count : (replica + 1) * count], axis)


def axes_of(case):
    """The axes of the batch and of the target that count rows."""
    axes = case.options.get("in_axes", 0)
    return axes if isinstance(axes, tuple) else (axes, axes)


def in_turn(case, replicas, microbatches):
    """The same batch, whose rows are the replicas' microbatches, in the order in which copies would run them."""

    def ordered(tree, axis):
        parts, _ = split(tree, replicas * microbatches, axis)
        return merge([parts[r * microbatches + m] for m in range(microbatches) for r in range(replicas)], axis)

    batch, target = map(ordered, (case.batch, case.target), axes_of(case))
    return replace(case, batch=batch, target=target)


def arguments(case, plan, grid, rows=None):
    """The arguments of a process: params, and its replica's batch and target."""
    params, batch, target, _ = cases.own(case, plan, grid.rank)
    batch_axis, target_axis = axes_of(case)
    return (
        params,
        part(batch, batch_axis, plan, grid.replica, rows),
        part(target, target_axis, plan, grid.replica, rows),
    )


def train(rank, grid, name, schedule, microbatches, which, way="eager"):
    """Two steps on this process against the reference: where they differ."""
    case, generator, plan = make(name, schedule, grid.ranks, grid.replicas, microbatches)
    shared = sharing(handler(grid), name, plan.stages, way)
    return compare(grid, case, generator, plan, oracle(name, plan), which, own=shared, **jobs.WAYS[way])


def train_on_device(rank, text, name, schedule, microbatches, which, kind):
    """The same on a device, traced, against the reference there."""
    device, grid = jobs.place(rank, kind), Grid(text, kind)
    case, generator, plan = make(name, schedule, grid.ranks, grid.replicas, microbatches)
    case = cases.on_device(case, device)
    return compare(grid, case, generator, plan, cases.reference(case, schedules.gpipe, plan), which)


def compare(grid, case, schedule, plan, expected, which, rows=None, own=None, **options):
    """Two steps on this process against a result of all replicas: where they differ, and gradients misplaced."""
    shared = handler(grid)
    params, batch, target = arguments(case, plan, shared.grid, rows)
    expected = jobs.expected_on(expected, params, plan, shared.rank, False)
    if which is not None:
        params = interop.fsdp(params, grid.over)
    options = {"resident": room(schedule, plan, which), **case.options, **options}
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=own or shared, **options)
    before, found = optree.tree_map(torch.clone, params, namespace="fpipe"), []
    for _ in range(2):
        loss, grads = step(params, batch, target, rng=case.rng)
        found += misplaced(grads, params)
        found += jobs.differences((loss, whole(grads)), expected)
    return found + [("params", *path) for path in jobs.differences(whole(params), whole(before))]


def train_uneven(rank, grid, name, schedule, microbatches, rows, which):
    """Two steps of replicas with numbers of rows of their own, against the reference's run of their microbatches."""
    case, generator, plan = cases.make(name, schedule, grid.ranks, microbatches, sum(rows))
    plan = replace(plan, replicas=grid.replicas)
    return compare(grid, case, generator, plan, uneven(case, plan, rows), which, rows, autodiff="eager")


def uneven(case, plan, rows):
    """The reference's result where each replica has its own number of rows."""
    total, data = sum(rows), []
    for replica in range(plan.replicas):
        batch, target = (part(tree, 0, plan, replica, rows) for tree in (case.batch, case.target))
        halves = [split(tree, plan.microbatches)[0] for tree in (batch, target)]
        shares = [size / total for size in sizes_of(rows[replica], plan.microbatches)]
        data += [Microbatch(*both, lambda share=share: share) for *both, share in zip(*halves, shares, strict=True)]
    step = fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, handler=handlers.Reference(), autodiff="eager")
    results = step.run(Inputs(case.params, [{}] * plan.replicas, data, rng=case.rng))
    return step.spec.total(results.losses), results.gradients


def alone(case, plan, replica):
    """The gradients of one replica's microbatches, weighed by their shares of all rows."""
    count, total = plan.microbatches, plan.replicas * plan.microbatches
    batch, rows = split(case.batch, total)
    target, _ = split(case.target, total)
    numbers = range(replica * count, (replica + 1) * count)
    data = [Microbatch(batch[m], target[m], lambda m=m: sizes_of(rows, total)[m] / rows) for m in numbers]
    plan = replace(plan, replicas=1)
    step = fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, handler=handlers.Reference(), autodiff="eager")
    return step.run(Inputs(case.params, [{}], data)).gradients


def added(trees):
    return functools.reduce(lambda a, b: optree.tree_map(torch.add, a, b), trees)


def inexact(rank, grid, name, schedule, which):
    """Differences of the loss, and the largest error of a gradient beside the largest number of its tensor."""
    case, generator, plan = make(name, schedule, grid.ranks, grid.replicas, 2)
    shared = handler(grid, exact=False)
    params, batch, target = arguments(case, plan, shared.grid)
    expected = jobs.expected_on(oracle(name, plan), params, plan, shared.rank, False)
    if which is not None:
        params = interop.fsdp(params, grid.over)
    options = {"resident": room(generator, plan, which), "autodiff": "eager", **case.options}
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=shared, **options)
    loss, grads = step(params, batch, target, rng=case.rng)
    pairs = zip(*(optree.tree_leaves(tree, namespace="fpipe") for tree in (whole(grads), expected[1])), strict=True)
    return jobs.differences(loss, expected[0]), max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def two_levels(rank, grid, name, schedule, which):
    """The outcome of `inexact`; the number of processes, and the bytes, of each operation among the replicas.

    And the bytes of the parameters on this rank.
    """
    connections = handler(grid, exact=False)._setup.ready().connections
    processes, moved = {}, Counter()

    def watched(operation):
        post = getattr(connections, operation)

        def call(*arguments):
            lane, tensor = arguments[:2]
            processes[lane, operation] = len(connections.lanes[lane])
            if not arguments[-1].startswith("connecting"):  # the purpose
                moved[lane, operation] += tensor.nbytes
            return post(*arguments)

        return call

    operations = {operation: watched(operation) for operation in ("all_gather", "all_reduce", "exchange")}
    with unittest.mock.patch.multiple(connections, **operations):
        outcome = inexact(rank, grid, name, schedule, which)
    case, _, plan = make(name, schedule, grid.ranks, grid.replicas, 2)
    params = case.pipeline.params_on(case.params, plan, rank % grid.ranks)
    size = sum(x.nbytes for x in optree.tree_leaves(params, namespace="fpipe"))
    return outcome, processes, dict(moved), size


def misplaced(grads, params):
    """The gradients that are not placed as their parameters."""
    from torch.distributed.tensor import DTensor

    none = {"none_is_leaf": True, "namespace": "fpipe"}
    pairs = zip(optree.tree_leaves(grads, **none), optree.tree_leaves(params, **none), strict=True)
    return [
        ("placement", type(grad).__name__)
        for grad, param in pairs
        if grad is not None
        and (
            isinstance(grad, DTensor) != isinstance(param, DTensor)
            or (isinstance(param, DTensor) and grad.placements != param.placements)
        )
    ]


class Whole(Observer):
    """Watches the whole parameters of the stages of one rank, out of shards.

    Attributes:
        gathers: how many there were.
        faults: effects after which other whole parameters are alive than those of the stages that are gathered.
        peak, predicted: the most bytes of whole parameters after an effect, counted and by the program.
    """

    def __init__(self, sizes):
        self.sizes, self.alive, self.resident, self.borrowed = sizes, {}, set(), set()
        self.gathers, self.faults, self.peak, self.predicted = 0, [], 0, 0

    def on_store(self, rank, store):
        self.store = store

    def on_step_begin(self):
        self.alive, self.resident, self.gathers, self.faults, self.peak, self.predicted = {}, set(), 0, [], 0, 0

    def borrow(self, tree):
        """Take the storages of the caller's tensors."""
        self.borrowed = {key(x) for x in optree.tree_leaves(tree, namespace="fpipe") if isinstance(x, torch.Tensor)}

    def begin(self, rank, effect):
        for x in self.store.borrowed():
            if isinstance(x, torch.Tensor) and key(x) not in self.borrowed:
                storage = x.untyped_storage()
                self.alive[key(x)] = StorageWeakRef(storage), storage.nbytes()
        table = TABLE.needs(effect, self.plan) if type(effect) is not Release else ()
        self.resident |= {name.stage for name in table if type(name) is Parameters}

    def end(self, rank, effect):
        self.gathers += type(effect) is Gather
        self.resident -= {effect.stage} if type(effect) is Release else set()
        self.alive = {k: (ref, n) for k, (ref, n) in self.alive.items() if not ref.expired()}
        count = sum(n for _, n in self.alive.values())
        expected = sum(self.sizes[stage] for stage in self.resident)
        self.peak, self.predicted = max(self.peak, count), max(self.predicted, expected)
        if count != expected:
            self.faults.append((effect, count, expected))


def key(x):
    return x.untyped_storage()._cdata


def padded(params, shards):
    """The bytes of whole parameters, with as many rows as shards of equal size have."""
    leaves = optree.tree_leaves(params, namespace="fpipe")
    return sum(x[0].nbytes * -(-len(x) // shards) * shards for x in leaves)


def watched(rank, grid, name, schedule, microbatches, resident, way):
    """(gathers, faults, peak bytes of whole parameters as counted and predicted) of a step on this process."""
    case, generator, plan = make(name, schedule, grid.ranks, grid.replicas, microbatches)
    shared = handler(grid)
    params, batch, target = arguments(case, plan, shared.grid)
    sizes = {s: padded(case.pipeline.params_of(params, s), grid.replicas) for s in plan.stages_on(shared.rank)}
    params, observer = interop.fsdp(params, grid.over), Whole(sizes)
    own = sharing(shared, name, plan.stages, way)
    options = {"resident": resident, "observe": observer, **jobs.WAYS[way], **case.options}
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, **options)
    observer.plan = replace(plan, gathered=frozenset(range(plan.stages)))
    observer.borrow((locals_of(params), batch, target))
    for _ in range(2):  # the first traces
        step(params, batch, target, rng=case.rng)
    return observer.gathers, observer.faults, observer.peak, observer.predicted


class Memory(Observer):
    """Measures the memory of a rank as a `Recorder` does, and its sums of gradients and parameters.

    Attributes:
        sums: the most bytes of each stage's sum.
        own: the bytes of the parameters that the rank has all the time, as stages compute with them.
    """

    def __init__(self, programs):
        self.programs, self.sums = programs, Counter()

    def on_store(self, rank, store):
        self.store, self.program = store, self.programs[rank]

    def on_step_begin(self):
        self.slots, self.own = SlotMemory(self.program, self.store), None

    def begin(self, rank, effect):
        if self.own is None:
            leaves = [x for prepared in self.store.step.prepared.values() for x in prepared.leaves]
            self.own = sum(x.nbytes for x in leaves)
        self.slots.begin(effect)

    def end(self, rank, effect):
        self.slots.end(effect)
        for stage, total in self.store.step.sums.items():
            self.sums[stage] = max(self.sums[stage], sum(x.nbytes for x in total.totals if x is not None))


def measured(rank, grid, schedule, resident, precision):
    """Bytes as they were on this process, and as predicted: of live values by effect, of parameters, and of sums."""
    generator, place = cases.SCHEDULES[schedule]
    placement = place(grid.ranks)
    torch.manual_seed(0)
    pipeline, params, batch_of = live_jobs.layers(placement.stages)
    plan = pipeline.plan(placement, 4, replicas=grid.replicas)
    batch, target = batch_of(1).to(precision.compute or torch.float32)
    costs = fpipe.profile(pipeline, params, batch, target, microbatches=4, precision=precision, repeats=1)
    programs, shared = fpipe.lower(generator, plan, resident=resident), handler(grid)
    observer = Memory(programs)
    own = pipeline.params_on(params, plan, shared.rank)
    own = own if resident is None else interop.fsdp(own, grid.over)
    options = {"handler": shared, "resident": resident, "precision": precision, "observe": observer}
    step = fpipe.value_and_grad(pipeline, generator, plan, **options)
    for _ in range(2):  # the first traces
        step(own, batch, target)
    account = footprint(programs, costs)[shared.rank]
    live = list(live_bytes(programs, costs, Interning(plan_of(programs), TABLE)))[shared.rank]
    stages = plan.stages_on(shared.rank)
    given = sum(local(x).nbytes for x in optree.tree_leaves(own, namespace="fpipe"))
    copies = 0 if precision.compute is None else observer.own
    sums = [costs.at("gradients", Parameters(stage)) for stage in stages]
    return (
        (observer.slots.after, live),
        (given + copies, account.parameters),
        ([observer.sums[stage] for stage in stages], sums),
    )


def evaluated(rank, grid, name, which, gather, loss):
    """Two evaluations on this process against the reference: where they differ."""
    case, _, plan = make(name, "looped_bfs", grid.ranks, grid.replicas, 3)
    shared = handler(grid)
    place = shared.grid
    params, batch, target = arguments(case, plan, place)
    options = {"loss": loss, "out_axes": case.options.get("out_axes", 0)} | (case.options if loss else {})
    options["gather"] = gather
    whole_run = fpipe.evaluate(case.pipeline, plan, handler=handlers.Reference(), **options)
    expected = whole_run(case.params, case.batch, case.target if loss else None, rng=case.rng)
    if not gather:
        output, own = expected[1] if loss else expected, None
        if plan.stages - 1 in plan.stages_on(place.rank):
            own = optree.tree_map(lambda x: part(x, 0, plan, place.replica), output)
        expected = (expected[0], own) if loss else own
    resident = None
    if which is not None:
        params, resident = interop.fsdp(params, grid.over), {"least": 1, "all": 2}[which]
    run = fpipe.evaluate(case.pipeline, plan, handler=shared, resident=resident, autodiff="eager", **options)
    return [
        difference
        for _ in range(2)
        for difference in jobs.differences(run(params, batch, target if loss else None, rng=case.rng), expected)
    ]


def axes(rows):
    """A case whose batch and aux are cut and joined along other axes than the first."""

    def loss(output, target):
        return cases.mse(output, target), {"columns": output.T.detach(), "mean": output.mean().detach()}

    case = cases.built("linear", 4, rows)
    pipeline = fpipe.Pipeline([lambda p, x: torch.tanh(x.T @ p["w"] + p["b"]), *case.pipeline.stages[1:]], loss)
    options = {"has_aux": True, "in_axes": (1, 0), "out_axes": {"columns": 1, "mean": 0}, "gather": True}
    return cases.Case(pipeline, case.params, case.batch.T.contiguous(), case.target, options=options)


def train_axes(rank, grid, which):
    case = axes(cases.rows(grid.replicas * 2))
    plan = case.pipeline.plan(fpipe.Placement.loop(grid.ranks, 2), 2, replicas=grid.replicas)
    expected = cases.reference(case, schedules.looped_bfs, plan)
    return compare(grid, case, schedules.looped_bfs, plan, expected, which, autodiff="eager")


def buffered(case, schedule, plan, handler, **options):
    """(loss, gradients, states) of three steps of replicas with a state of their own, and outputs from the last states.

    The case's state is that of the replicas which this process plays.
    """
    options = {"handler": handler, "buffers": "own", **options}
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, **options)
    options.pop("capture", None)
    run = fpipe.evaluate(interop.eval_mode(case.pipeline), plan, gather=True, **options)
    results, state = [], case.state
    for _ in range(3):
        results.append(step(case.params, case.batch, case.target, state=state))
        state = results[-1][-1]
    return *results, run(case.params, case.batch, state=state)


def train_buffered(rank, grid, schedule, which, folder):
    """Steps, outputs and a checkpoint of replicas with a state of their own: where they differ from the reference's."""
    case, generator, plan = make("modules", schedule, grid.ranks, grid.replicas, 2)
    shared = handler(grid)
    place = shared.grid
    params, batch, target = arguments(case, plan, place)
    all_states = replace(case, state=[case.state] * grid.replicas)
    *steps, outputs = buffered(all_states, generator, plan, handlers.Reference(), autodiff="eager")
    stages = plan.stages_on(place.rank)
    states = [{s: all_of[place.replica][s] for s in stages} for _, _, all_of in steps]
    pairs = zip(steps, states, strict=True)
    expected = *((loss, {s: grads[s] for s in stages}, own) for (loss, grads, _), own in pairs), outputs
    own = {s: case.state[s] for s in stages}
    used = params if which is None else interop.fsdp(params, grid.over)
    mine = cases.Case(case.pipeline, used, batch, target, own)
    options = {"autodiff": "eager", "resident": room(generator, plan, which)}
    found = whole(buffered(mine, generator, plan, shared, **options))
    checkpoints = interop.Checkpoints(folder, case.pipeline, plan, handler=shared)
    checkpoints.save(params=used, state=found[-2][-1])
    loaded = checkpoints.load(params=used, state=own)["state"]
    return jobs.differences(found, expected) + [("loaded", *path) for path in jobs.differences(loaded, states[-1])]


def train_with(rank, grid, name, schedule, which, options):
    case, generator, plan = make(name, schedule, grid.ranks, grid.replicas, 3)
    return compare(grid, case, generator, plan, oracle(name, plan), which, **options)


def train_steps(rank, grid, which):
    """Three steps on this process against those of the reference: where losses and params differ."""
    case, generator, plan = make("linear", "zb_v", grid.ranks, grid.replicas, 2)
    shared, sgd = handler(grid), interop.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    params, batch, target = arguments(case, plan, shared.grid)
    stages = list(params)
    if which is not None:
        params = interop.fsdp(params, grid.over)
    options = {"handler": shared, "resident": room(generator, plan, which), "autodiff": "eager"}
    step = fpipe.train_step(case.pipeline, generator, plan, sgd, **options)
    alone = fpipe.train_step(case.pipeline, generator, plan, sgd, handler=handlers.Reference(), autodiff="eager")
    state, (all_params, all_state), found = sgd.init(params), (case.params, sgd.init(case.params)), []
    for _ in range(3):
        params, state, loss = step(params, state, batch, target)
        all_params, all_state, expected = alone(all_params, all_state, case.batch, case.target)
        found += jobs.differences((loss, whole(params)), (expected, {s: all_params[s] for s in stages}))
    return found


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def mixed():
    """A stage whose parameters have several dtypes, one of them without dimensions and one without elements."""
    values = torch.linspace(-1, 1, 15).view(5, 3)
    params = {str(dtype): (values * (1 + i)).to(dtype) for i, dtype in enumerate(DTYPES)}
    params |= {"scale": torch.tensor(0.7), "none": torch.ones(0, 3), "transposed": values.T.contiguous().T * 0.3}

    def layer(p, x):
        parts = [x @ (p[str(dtype)].real if dtype.is_complex else p[str(dtype)]).float() for dtype in DTYPES]
        return torch.tanh(sum(parts) + x @ p["transposed"] + p["none"].sum()) * p["scale"]

    pipeline = fpipe.Pipeline([layer, lambda p, x: x * p["w"]], cases.mse)
    params = {0: params, 1: {"w": torch.linspace(0.5, 1, 3)}}
    return cases.Case(pipeline, params, torch.linspace(-1, 1, 60).view(12, 5), torch.linspace(0, 1, 36).view(12, 3))


def train_mixed(rank, grid, which, exact):
    """Where a step differs from the reference; inexact sums within the rounding of their dtypes."""
    case = mixed()
    plan = case.pipeline.plan(fpipe.Placement.loop(grid.ranks, 2 // grid.ranks), 2, replicas=grid.replicas)
    expected = cases.reference(case, schedules.gpipe, plan)
    if exact:
        return compare(grid, case, schedules.gpipe, plan, expected, which, autodiff="eager")
    shared = handler(grid, exact=False)
    params, batch, target = arguments(case, plan, shared.grid)
    expected = jobs.expected_on(expected, params, plan, shared.rank, False)
    params = params if which is None else interop.fsdp(params, grid.over)
    options = {"resident": room(schedules.gpipe, plan, which), "autodiff": "eager"}
    step = fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, handler=shared, **options)
    loss, grads = step(params, batch, target)
    torch.testing.assert_close((loss, whole(grads)), expected)
    return []


def images(replicas):
    """Convolutions whose weights are channels last: one of 3 x 3, and one of 1 x 1, which is contiguous as well.

    Attributes of the layer: the strides that it has seen of the latter.
    """

    def layer(p, x):
        layer.strides.add(p["one"].stride())
        return torch.relu(F.conv2d(x, p["one"]) + F.conv2d(x, p["three"], padding=1))

    layer.strides = set()
    torch.manual_seed(0)
    params = {
        s: {
            name: torch.randn(5, size, size, 5).mul(0.4).permute(0, 3, 1, 2)
            for name, size in (("one", 1), ("three", 3))
        }
        for s in range(2)
    }
    rows = cases.rows(2 * replicas)
    return layer, cases.Case(
        fpipe.Pipeline([layer] * 2, cases.mse), params, torch.randn(rows, 5, 4, 4), torch.randn(rows, 5, 4, 4)
    )


def train_images(rank, grid, which):
    """Where steps differ from the reference; strides of a weight as stages see it, and of gradients, and of params."""
    layer, case = images(grid.replicas)
    plan = case.pipeline.plan(fpipe.Placement.loop(grid.ranks, 2 // grid.ranks), 2, replicas=grid.replicas)
    expected = cases.reference(case, schedules.gpipe, plan)
    layer.strides.clear()
    different = compare(grid, case, schedules.gpipe, plan, expected, which, autodiff="eager")
    params, batch, target = arguments(case, plan, handler(grid).grid)
    used = params if which is None else interop.fsdp(params, grid.over)
    options = {"resident": room(schedules.gpipe, plan, which), "autodiff": "eager", "handler": handler(grid)}
    _, grads = fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, **options)(used, batch, target)
    strides = [[x.stride() for x in optree.tree_leaves(locals_of(tree), namespace="fpipe")] for tree in (grads, used)]
    return different, layer.strides, *strides


# Bad input


@functools.cache
def alone_on(grid):
    return handlers.Distributed(grid.mesh["pp"], timeout=30)


def wrong(rank, grid, fault):
    """(type and text of the error of a wrong step on this process, where a right step after it differs)."""
    shared = handler(grid)
    case, generator, plan = make("linear", "looped_bfs", grid.ranks, grid.replicas, 2)
    params, batch, target = arguments(case, plan, shared.grid)
    shards, last = interop.fsdp(params, grid.over), shared.grid.replica == grid.replicas - 1
    guilty, pipeline, used, resident = last and shared.rank == 1, case.pipeline, params, None
    if fault in ("a plain leaf", "not resident"):
        used, resident = shards, None if fault == "not resident" else 1
    if fault == "a plain leaf" and guilty:
        used = {**shards, 1: {**shards[1], "b": params[1]["b"]}}
    if fault == "not sharded":
        resident = 1
    if fault == "another mesh":
        used, resident = interop.fsdp(params, mesh_of(grid.size)), 1
    if fault == "a mesh of another size":
        used, resident = interop.fsdp(params, mesh_of(grid.size) if guilty else grid.over), 1
    if fault in ("the ranks' mesh", "the ranks' mesh, whole"):
        used, resident = interop.fsdp(params, grid.mesh["pp"]), None if fault.endswith("whole") else 1
    if fault == "along another dimension":
        used, resident = interop.fsdp(params, grid.over, dim=1 if guilty else 0), 1
    if fault == "no replicas":
        shared, used, plan = alone_on(grid), shards, replace(plan, replicas=1)
    if fault == "one replica is sharded":
        used = shards if last else params
    if fault == "other shapes" and guilty:
        used = {**params, 1: {**params[1], "more": torch.ones(3)}}
    if fault == "other dtypes" and guilty:
        used = {**params, 1: {**params[1], "b": params[1]["b"].double()}}
    if fault == "other values" and guilty:
        used = {**params, 1: {**params[1], "b": params[1]["b"] + 1}}
    if fault == "one frozen leaf" and last:
        pipeline = fpipe.Pipeline([fpipe.Stage(stage.fn, frozen=["b"]) for stage in pipeline.stages], cases.mse)
    if fault == "few rows" and last:
        batch, target = (x if x is None else x[:1] for x in (batch, target))
    if fault == "other rows" and guilty:
        target = target[:-1]
    if fault == "microbatches" and last:
        plan = replace(plan, microbatches=3)
    if fault == "schedules" and last:
        generator = schedules.interleaved_1f1b
    if fault == "replicas":
        plan = replace(plan, replicas=1)
    if fault == "ranks":
        plan = pipeline.plan(fpipe.Placement.loop(4), 2, replicas=grid.replicas)
    if fault == "rows of one replica":
        pipeline = fpipe.Pipeline([lambda p, x: p["w"].sum() + 0.0, *[lambda p, x: x * p["w"].sum()] * 3])
        batch, target = None if last else batch, None
    if fault == "a state":
        stages = [fpipe.Stage(lambda p, s, x: (x, s), stateful=True), *pipeline.stages[1:]]
        pipeline = fpipe.Pipeline(stages, cases.mse)
    error = None
    try:
        options = {"resident": resident, "autodiff": "eager"}
        fpipe.value_and_grad(pipeline, generator, plan, handler=shared, **options)(used, batch, target)
    except (fpipe.ScheduleError, fpipe.StageError, fpipe.TransportError) as caught:
        error = type(caught).__name__, str(caught)
    return error, train(rank, grid, "linear", "looped_bfs", 2, "all")


def refused(rank, grid):
    """The error of a weighed step that the last replica refuses, and the differences of a step after it.

    With one rank, the first message of a step may be the weights of the other replicas.
    """
    case, generator, plan = make("linear", "gpipe", grid.ranks, grid.replicas, 2)
    own = handler(grid)
    params, batch, target = arguments(case, plan, own.grid)
    options = {"weight": lambda target: target.square().sum()}
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, **options)
    step(params, batch, 2 * target)
    error = None
    try:
        step(params, batch[:1] if own.grid.replica == grid.replicas - 1 else batch, 2 * target)
    except (fpipe.StageError, fpipe.TransportError) as caught:
        error = type(caught).__name__, str(caught)
    weighed = replace(case, options=options)
    return error, jobs.differences(step(params, batch, target), cases.reference(weighed, generator, plan))


def differing(rank, grid):
    """The errors where the two replicas have different options, and where a right step after them differs."""
    case, generator, plan = make("linear", "gpipe", grid.ranks, grid.replicas, 2)
    own, texts = handler(grid), []
    for options in (
        [{"precision": fpipe.Precision(reduce=torch.float64)}, {}],
        [{"precision": fpipe.Precision(torch.bfloat16)}, {"precision": fpipe.Precision(torch.float16)}],
        [{"weight": len}, {"reduction": "sum"}],
        [{"weight": len}, {}],
        [{}, {"reduction": "sum"}],
        [{"gather": True, "has_aux": True}, {"has_aux": True}],
    ):
        try:
            fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, **options[own.grid.replica])
        except fpipe.ScheduleError as error:
            texts.append(str(error))
    return texts, train(rank, grid, "linear", "gpipe", 2, None)


def uncaptured(rank, grid):
    """The errors of steps that can't be captured, by fault and kind of capture."""
    case, generator, plan = make("linear", "looped_bfs", grid.ranks, grid.replicas, 2)
    faults = {"shards": {"resident": 1}, "weights": {"weight": len}}
    texts = {}
    for (fault, options), capture in product(faults.items(), (True, "pieces")):
        try:
            fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler(grid), capture=capture, **options)
        except ValueError as error:
            texts[fault, capture] = str(error)
    assert len(texts) == 4
    return texts


def wrong_mesh(rank, grid, fault):
    """The error of a step where the params, or the handler, have another mesh."""
    own, resident = handler(grid), 1
    case, generator, plan = make("linear", "looped_bfs", grid.ranks, grid.replicas, 2)
    params, batch, target = arguments(case, plan, own.grid)
    if fault == "over the copies":
        params = interop.fsdp(params, grid.mesh["dp"])
    else:
        all_of_them = mesh_of(grid.size)
        meshes = {"the ranks as replicas": grid.mesh["pp"], "all as replicas": all_of_them}
        over = meshes.get(fault, all_of_them if own.rank else grid.over)
        own, resident = handlers.Distributed(grid.mesh["pp"], replicas=over, timeout=30), None
        plan = replace(plan, replicas=own.grid.replicas)
    try:
        options = {"handler": own, "resident": resident, "autodiff": "eager"}
        fpipe.value_and_grad(case.pipeline, generator, plan, **options)(params, batch, target)
    except (fpipe.ScheduleError, fpipe.StageError) as error:
        return str(error)
    return "no error"


def lost(rank, grid, fault, which, timeout, weight=None):
    """The last rank of the last replica is killed or stopped in the third step."""
    armed = False

    def layer(p, x):
        if armed and rank == grid.size - 1:
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[fault])
        return torch.tanh(x @ p["w"])

    pipeline = fpipe.Pipeline([layer] * 2 * grid.ranks, cases.mse)
    plan = pipeline.plan(fpipe.Placement.loop(grid.ranks, 2), 2, replicas=grid.replicas)
    own = handlers.Distributed(grid.mesh["pp"], replicas=grid.over, timeout=timeout)
    params = {s: {"w": torch.eye(4)} for s in plan.stages_on(own.rank)}
    if which is not None:
        params = interop.fsdp(params, grid.over)
    options = {"resident": which, "autodiff": "eager", "weight": weight}
    step = fpipe.value_and_grad(pipeline, schedules.looped_bfs, plan, handler=own, **options)
    for i in range(3):
        armed = i == 2
        step(params, torch.ones(4, 4), torch.ones(4, 4))
