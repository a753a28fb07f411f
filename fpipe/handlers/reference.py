"""The oracle: microbatch by microbatch through the stages in order, gradients by one call of autograd.

No schedule, no pieces' backward, no communication. Every other handler must give these bits.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fpipe.autodiff.interface import Pieces, counts, detached_tree, prepared, seed, weighed
from fpipe.effects import Backward, BackwardWeight
from fpipe.errors import blaming
from fpipe.handlers.gradients import add, copied, total
from fpipe.handlers.protocol import Inputs, Observer, Results, Run
from fpipe.plan import Plan
from fpipe.programs.program import Program
from fpipe.stages.pytree import flatten, viewed
from fpipe.stages.rng import seeded


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
            params = [prepared(stage, pipeline.params_of(inputs.params, s)) for s, stage in enumerate(pipeline.stages)]
            own = [p.own[i] for p in params for i in p.trained]
            for m in range(plan.microbatches):
                data, out = inputs.data[m], dict[int, Any]()
                for s, stage in enumerate(pipeline.stages):
                    with torch.set_grad_enabled(train), seeded(inputs.rng, s, m), blaming(s, m):
                        read = {r: viewed(out[r]) for r in plan.sources(s)}
                        arguments = stage.arguments(read, stage.given(data))
                        output, state = stage(params[s].tree, results.state.get(s), arguments)
                        out[s] = viewed(output)
                    if stage.stateful:
                        results.state[s] = detached_tree(state)
                loss, kept = out[s] if pieces.loss else (None, out[s])
                results.outputs[m] = detached_tree(kept)
                if loss is None:
                    continue
                weight = seed(loss, scale := inputs.scale(m))
                results.losses[m] = weighed(loss, weight, scale)
                if not (counted := counts(scale)):
                    _nothing_back(read)
                used = loss.requires_grad and own
                grads = iter(torch.autograd.grad(loss, own, weight, allow_unused=True) if used else [None] * len(own))
                for s, p in enumerate(params if train else ()):
                    into = sums.setdefault((s, plan.rank_of(s, m)), dict.fromkeys(p.paths))
                    for path in p.paths:
                        gradient = next(grads)
                        into[path] = add(into[path], gradient if counted or s < plan.stages - 1 else None)
            results.gradients = copied(total(pipeline, plan, inputs.params, range(plan.stages), sums)) if train else {}
            results.output = pieces.merge(results.outputs)
            return results

        return run


def _nothing_back(read: Any) -> None:
    """Let zeros go back through what the last stage reads, whatever its own gradients are: 0 times NaN would be NaN."""
    for x in flatten(read).leaves:
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
