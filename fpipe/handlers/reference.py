"""The oracle: microbatch by microbatch through the stages in order, gradients by one call of autograd.

No schedule, no pieces' backward, no communication. Every other handler must give these bits.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fpipe.autodiff import Pieces, detached, detached_tree
from fpipe.effects import Backward, BackwardWeight
from fpipe.errors import blaming
from fpipe.gradients import add, total
from fpipe.handlers.protocol import Inputs, Observer, Results, Run
from fpipe.program import Plan, Program
from fpipe.rng import seeded
from fpipe.tree import viewed


class Reference:
    """Plays all ranks in this process and disregards the order of effects."""

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        return tuple(range(plan.ranks))

    def compile(self, programs: Mapping[int, Program], pieces: Pieces, observe: Observer | None) -> Run:
        plan, pipeline = programs[0].plan, pieces.pipeline
        train = any(isinstance(e, Backward | BackwardWeight) for p in programs.values() for e in p)

        def run(inputs: Inputs) -> Results:
            if inputs.broken:
                raise inputs.broken
            results, sums = Results(state=dict(inputs.state)), dict[tuple[int, int], dict[Any, Any]]()
            prepared = [piece.prepare(pipeline.params_of(inputs.params, s)) for s, piece in enumerate(pieces.stages)]
            leaves = [leaf for p in prepared for leaf in p.trained]
            for m in range(plan.microbatches):
                data, out = inputs.microbatch(m), dict[int, Any]()
                for s, stage in enumerate(pipeline.stages):
                    with torch.set_grad_enabled(train), seeded(inputs.rng, s, m), blaming(s, m):
                        arguments = stage.arguments({source: viewed(out[source]) for source in plan.sources(s)}, data)
                        output, state = stage(prepared[s].tree, results.state.get(s), arguments)
                        out[s] = viewed(output)
                    if stage.stateful:
                        results.state[s] = detached_tree(state)
                loss, kept = out[s] if pieces.loss else (None, out[s])
                results.outputs[m], results.losses[m] = detached_tree(kept), detached(loss)
                if train and isinstance(loss, torch.Tensor):
                    used = loss.requires_grad and leaves
                    grads = iter(torch.autograd.grad(loss, leaves, allow_unused=True) if used else [None] * len(leaves))
                    for s, p in enumerate(prepared):
                        into = sums.setdefault((s, plan.rank_of(s, m)), dict.fromkeys(p.paths))
                        into.update((path, add(into[path], next(grads))) for path in p.paths)
            results.gradients = total(pipeline, plan, inputs.params, range(plan.stages), sums) if train else {}
            results.output = pieces.merge(results.outputs)
            return results

        return run
