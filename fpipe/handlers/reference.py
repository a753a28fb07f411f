"""The definition of the result: `torch.autograd.grad` of the stages composed in order, microbatch by microbatch.

It uses no schedule, no split backward and no communication. Every other handler must give the same bits, on the
same number of threads. The order of the sums is part of the definition:

- autograd adds the gradients of an output from its highest consumer down: each consumer reads the output through an
  identity of its own, made when the consumer runs. With cotangents by rank, those of the consumers on a rank are added
  from the highest down, then the ranks' sums from the rank of the highest consumer down;
- what a stage reads of the batch or of the target, where they are differentiated, are leaves of its own for autograd;
- the weight gradients of each stage and copy are added in microbatch order, then over the replicas, then over copies,
  then over ties by stage;
- the slices of a microbatch run forward from the first, and are differentiated one by one from the last: what a stage
  carries is a leaf of the next slice, whose gradient is a cotangent of this one. Their weight gradients are added in
  this order, from the last slice of each microbatch down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe.autodiff.by_row import by_row, rows_of
from fpipe.autodiff.graph.input_writes import PARAMETER_WRITTEN, refusing_writes
from fpipe.autodiff.graph.lost_gradients import EagerLeaves
from fpipe.autodiff.interface import (
    DifferentiablePipeline,
    Leaves,
    detached,
    detached_tree,
    differentiated,
    differentiates_data,
    has_weight,
    prepared,
    scaled,
    seed,
    weighted_loss,
)
from fpipe.devices import current_device, without_autocast
from fpipe.effects import Backward, BackwardWeight
from fpipe.errors import blaming
from fpipe.handlers.gradients import LeafKey, Sums, add, behind, check_trained, copied, data_gradients, total, unscaled
from fpipe.handlers.protocol import Departure, Inputs, Observer, Replicas, Results, Run
from fpipe.plan import Plan
from fpipe.programs.program import Program
from fpipe.stages.cache import following
from fpipe.stages.carry import NO_CARRY, separated
from fpipe.stages.microbatch import Microbatch
from fpipe.stages.pytree import Flat, Path, alias_leaves, flatten
from fpipe.stages.rng import seeded
from fpipe.stages.stage import CARRY


class Reference:
    """Play all ranks of all replicas in this process, and ignore the order of effects."""

    peers = devices = replays = beside = flight = timeout = None
    rank = 0
    is_first = True

    def __init__(self) -> None:
        self.departure = Departure()

    def __repr__(self) -> str:
        return "Reference()"

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        return tuple(range(plan.ranks))

    def replicas(self, plan: Plan) -> Replicas:
        return Replicas(range(plan.replicas), plan.replicas)

    def compile(self, programs: Mapping[int, Program], pieces: DifferentiablePipeline, observe: Observer | None) -> Run:
        backward = any(isinstance(e, Backward | BackwardWeight) for p in programs.values() for e in p)
        train = backward or pieces.differentiated
        return lambda inputs: _Step(programs[0].plan, pieces, train, inputs).run()

    def check(self) -> None:
        """Wait until the device has run everything."""
        current_device().synchronize()


@dataclass
class _Slice:
    """The forward of a microbatch, or of a slice of one.

    Args:
        unit: its number, counted over all microbatches of all replicas.
        output: the last stage's.
        inputs: what the last stage read of other stages.
        read: stage -> the leaves of its own that it read of the slice before.
        carried: stage -> what it passed on, in autograd's graph.
    """

    unit: int
    output: Any = None
    inputs: Any = None
    read: dict[int, Leaves] = field(default_factory=dict)
    carried: dict[int, Flat] = field(default_factory=dict)


class _Step:
    """One step.

    Attributes:
        sums: the weight gradients of each replica and (stage, rank), by path.
        read: stage -> the leaves that it read of the microbatch, where it differentiates a part of them.
    """

    def __init__(self, plan: Plan, pieces: DifferentiablePipeline, train: bool, inputs: Inputs) -> None:
        if inputs.broken:
            raise inputs.broken
        self.plan, self.pieces, self.pipeline, self.train, self.inputs = plan, pieces, pieces.pipeline, train, inputs
        stages = enumerate(self.pipeline.stages)
        self.params = [
            prepared(stage, self.pipeline.params_of(inputs.params, s), pieces.argnums) for s, stage in stages
        ]
        for stage, each in enumerate(self.params):
            if train:
                check_trained(self.pipeline, plan, stage, each)
            each.leaves[:] = map(pieces.precision.cast, each.leaves)
        self.current = list(self.params)  # of the microbatch that runs: by row, they have a dimension of its rows
        self.join = behind if self.pipeline.by_row else add
        self.sums: list[dict[tuple[int, int], dict[LeafKey, Tensor | None]]] = [{} for _ in range(plan.replicas)]
        self.results = Results(state=[*map(dict, inputs.state)])
        self.read: dict[int, list[Any]] = {}

    def run(self) -> Results:
        results, pipeline, plan = self.results, self.pipeline, self.plan
        for m in range(plan.replicas * plan.microbatches):
            if self.pieces.cached:
                results.outputs[m] = self._tokens(m)
                continue
            before, slices = None, list[_Slice]()
            for unit in range(m * plan.slices, (m + 1) * plan.slices):
                slices.append(before := self._forward(unit, before))
            cotangents: dict[int, Leaves] = {}
            for each in reversed(slices):
                output = each.output
                if self.pieces.loss:
                    loss, output = output
                    gradients, cotangents = self._grads(each, loss, cotangents)
                    self._accumulate(m, gradients)
                results.outputs[each.unit] = detached_tree(output)
        if self.train:
            sums = self._over_replicas()
            params = self.inputs.params
            gradients = copied(total(pipeline, plan, params, range(plan.stages), sums, params))
            gradients = unscaled(gradients, self.inputs.loss_scale)
            results.gradients = self.pieces.precision.gradients(gradients, dict(params))
            results.refuse_constant_loss()
        results.output = self.pieces.merge(results.outputs, self.inputs.apart)
        return results

    def _tokens(self, m: int) -> list[Any]:
        """Return the tokens that are generated for a microbatch, each after the one before it.

        They come after the slices of the prompts.
        """
        outputs, prefills = list[Any](), self.plan.prefills
        for number, each in enumerate((self.inputs.data, *self.inputs.later)):
            data = following(each[m], outputs[-1]) if number >= prefills else each[m]
            outputs.append(self._token(m, data))
        return outputs[prefills - 1 :]

    def _token(self, m: int, data: Microbatch) -> Any:
        outputs = dict[int, Any]()
        for s, stage in enumerate(self.pipeline.stages):
            states: Any = self.results.state[0].get(s)
            with torch.no_grad(), blaming(s, m):
                arguments = stage.arguments(outputs, stage.given(data))
                state = states[m] if stage.stateful else None
                with refusing_writes(arguments), refusing_writes(self.params[s].own, PARAMETER_WRITTEN):
                    outputs[s], new = stage(self.params[s].tree, state, arguments)
            if stage.stateful:
                states[m] = new
        return outputs[s]

    def _forward(self, unit: int, before: _Slice | None = None) -> _Slice:
        """Run a microbatch, or a slice of one, forward.

        Args:
            before: the slice before.
        """
        data, outputs, read = self.inputs.data[unit], dict[int, _Outputs](), dict[int, Any]()
        (m, t), this = divmod(unit, self.plan.slices), _Slice(unit)
        state, by_rank = self.results.state[m // self.plan.microbatches], self.plan.cotangents == "by_rank"
        for s, stage in enumerate(self.pipeline.stages):
            with torch.set_grad_enabled(self.train), seeded(self.inputs.rng, s, m, slice=t), blaming(s, m):
                read = {source: outputs[source](s) for source in self.plan.sources(s)}
                if CARRY in stage.sources:
                    leaves, spec = NO_CARRY if before is None else before.carried[s]
                    this.read[s] = [detached(x, self.train) for x in leaves]
                    read[CARRY] = alias_leaves(spec.unflatten(this.read[s]))
                arguments = stage.arguments(read, self._given(s, data))
                if stage.rows is not None:
                    self.current[s] = by_row(self.params[s], stage.count(arguments))
                function = stage if stage.rows is None else replace(stage, rows=None)
                params = self.current[s]
                with refusing_writes(arguments), refusing_writes(params.own, PARAMETER_WRITTEN):
                    output, new_state = function(params.tree, state.get(s), arguments)
                result, this.carried[s] = separated(flatten(alias_leaves(output)))
                output = result.tree
                outputs[s] = self._read_by_rank(s, m, output) if by_rank else partial(_alias, output)
            if stage.stateful:
                state[s] = detached_tree(new_state)
        this.output, this.inputs = output, {source: x for source, x in read.items() if source != CARRY}
        return this

    def _read_by_rank(self, s: int, m: int, output: Any) -> _Outputs:
        """Return what each consumer of a stage reads: identities whose gradients are added by rank."""
        ranks: dict[int, list[int]] = {}
        for consumer in self.plan.consumers(s):
            ranks.setdefault(self.plan.rank_of(consumer, m % self.plan.microbatches), []).append(consumer)
        order = [consumer for consumers in ranks.values() for consumer in consumers]
        leaves, spec = flatten(output)
        sizes = tuple(map(len, ranks.values()))
        identities: Any = _ByRank.apply
        columns = [identities(x, sizes) if _requires_grad(x) else [x] * len(order) for x in leaves]
        return {c: spec.unflatten([column[i] for column in columns]) for i, c in enumerate(order)}.__getitem__

    def _given(self, s: int, data: Microbatch) -> list[Any]:
        """Return the inputs of a stage that come from the microbatch."""
        stage, argnums = self.pipeline.stages[s], self.pieces.argnums
        if not self.train or not differentiates_data(stage, argnums):
            return stage.given(data)
        parts = differentiated(stage, data, argnums)
        self.read[s] = flatten(parts).leaves
        return parts

    def _grads(
        self, this: _Slice, loss: Tensor, cotangents: Mapping[int, Leaves]
    ) -> tuple[dict[tuple[int, Path], Tensor | None], dict[int, Leaves]]:
        """Return the gradient of every trained parameter by (stage, path), and those of what each stage read of the
        slice before. Record the loss, and gradients of data.

        A microbatch of weight 0 gives none for the last stage, and zeros for the inputs of the last stage, even where
        these gradients are NaN. A slice of weight 0 gives what later slices read of it.

        Args:
            cotangents: of what each stage passed on to the next slice.
        """
        m, scale = this.unit, self.inputs.scale(this.unit)
        cotangent = seed(loss, scale)
        self.results.losses[m] = weighted_loss(loss, cotangent, scale)
        leaves = {
            (s, path): params.own[i]
            for s, params in enumerate(self.current)
            for i, path in zip(params.trained, params.paths, strict=True)
        }
        read = [x for each in self.read.values() for x in each if _requires_grad(x)]
        if m == 0:
            self._refuse_lost(loss, [*leaves.values(), *read])
        self.results.differentiable |= loss.requires_grad
        before = [x for each in this.read.values() for x in each if _requires_grad(x)]
        wanted, last = [*leaves.values(), *read, *before], self.plan.stages - 1
        self.results.data_gradients |= {(s, m): {} for s in self.read}
        roots = self._roots(this, cotangents)
        is_ignored = not has_weight(scale) and last not in cotangents
        if loss.requires_grad and (has_weight(scale) or is_ignored):
            roots.append((loss, scaled(cotangent, self.inputs.loss_scale)))
        if not roots or not wanted:
            return dict.fromkeys(leaves), {s: [None] * len(each) for s, each in this.read.items()}
        if is_ignored:
            _zero_gradients([this.inputs, self.read.get(last), this.read.get(last)])
        with without_autocast():  # it is the forward's; its casts are in autograd's graph
            outputs, seeds = zip(*roots, strict=True)
            gradients = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        of_read = iter(gradients[len(leaves) :])
        for s, each in self.read.items():
            of_stage = [next(of_read) if _requires_grad(x) else None for x in each]
            by_path = data_gradients(self.pipeline.stages[s], self.inputs.data[m], of_stage)
            self.results.data_gradients[s, m] = by_path
        passed = {s: [next(of_read) if _requires_grad(x) else None for x in each] for s, each in this.read.items()}
        return {
            (s, path): gradient if s != last or not is_ignored else None
            for (s, path), gradient in zip(leaves, gradients, strict=False)
        }, passed

    def _roots(self, this: _Slice, cotangents: Mapping[int, Leaves]) -> list[tuple[Tensor, Tensor]]:
        """Return what a slice passed on to the next one, as far as that has gradients for it, with these."""
        pairs = [
            (x, cotangent)
            for s, each in cotangents.items()
            for x, cotangent in zip(this.carried[s].leaves, each, strict=True)
        ]
        return [(x, cotangent) for x, cotangent in pairs if cotangent is not None and _requires_grad(x)]

    def _refuse_lost(self, loss: Tensor, leaves: Iterable[Tensor]) -> None:
        """Raise StageError if a leaf in the graph of microbatch 0 is neither a param nor of the batch."""
        known = [*leaves, *flatten((self.inputs.data[0], dict(self.inputs.state[0]))).leaves]
        again = _Step(self.plan, self.pieces, self.train, self.inputs)
        EagerLeaves().check([loss], known, lambda: [again._forward(0).output[0]])

    def _accumulate(self, m: int, gradients: Mapping[tuple[int, Path], Tensor | None]) -> None:
        replica, m = divmod(m, self.plan.microbatches)
        for (s, path), gradient in gradients.items():
            sums = self.sums[replica].setdefault((s, self.plan.rank_of(s, m)), {})
            if self.pipeline.by_row:
                params = self.current[s]
                gradient = rows_of(gradient, params.leaves[params.trained[params.paths.index(path)]])
            sums[path] = self.join(sums.get(path), self.pieces.precision.term(gradient))

    def _over_replicas(self) -> Sums:
        """Return the sums of each (stage, rank) over all replicas, in their order."""
        sums, *others = self.sums
        for other in others:
            for key, leaves in other.items():
                sums[key] = {path: add(sums[key][path], leaf) for path, leaf in leaves.items()}
        return sums


_Outputs = Callable[[int], Any]
"""consumer -> the output of a stage that it reads."""


def _alias(output: Any, consumer: int) -> Any:
    return alias_leaves(output)


class _ByRank(torch.autograd.Function):
    """Identities of a tensor, one for each consumer. Their gradients are added in groups, then the groups' sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.aten.alias.default(x) for _ in range(sum(sizes)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        rest = iter(gradients)
        return reduce(add, [reduce(add, [next(rest) for _ in range(size)]) for size in ctx.sizes]), None


def _requires_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _zero_gradients(tree: Any) -> None:
    """Let autograd pass zeros on from these tensors, because 0 times NaN is NaN."""
    for x in flatten(tree).leaves:
        if _requires_grad(x):
            x.register_hook(torch.zeros_like)
