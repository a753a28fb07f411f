"""What torch.distributed.pipelining (and PiPPy before it) has cut already, as a pipeline of fpipe's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.pipelining import Pipe

from fpipe.interop.modules import Tree, from_modules
from fpipe.interop.skeletons import owning
from fpipe.stage import Batch, Output, Pipeline, Read


def from_pipe(pipe: Pipe, *, loss: Callable[..., Any] | None = None) -> tuple[Pipeline, dict[int, Tree]]:
    """A `Pipe`, as `torch.distributed.pipelining.pipeline` makes it: its stage modules, and who reads what of whom.

    A value that skips stages goes straight to its readers. A parameter that several stages have under one name is
    tied; where the module shared it between two names, torch has made copies, which only `interop.split` of the
    module itself ties again. With one input the batch is that, with several it is a tuple of them. The output is the
    last stage's, as under torch's schedules. The mode, of training or evaluation, is the one that was traced.

    Args:
        loss: `loss(output, target) -> loss | (loss, aux)`.

    The state of stages with buffers is `interop.buffers([pipe.get_stage_module(i) for i in range(pipe.num_stages)])`.
    """
    modules = [pipe.get_stage_module(stage) for stage in range(pipe.num_stages)]
    return from_modules(_sharing(modules), loss=loss, reads=_reads(pipe.split_gm.graph))


def _sharing(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules with one parameter for each name."""
    first: Tree = {}
    found = []
    for module in modules:
        own = {name: first.setdefault(name, parameter) for name, parameter in module.named_parameters()}
        found.append(owning(module, {**own, **dict(module.named_buffers())}))
    return found


def _reads(graph: fx.Graph) -> dict[int, list[Read]]:
    """What each stage reads, from the graph that calls one after the other."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    known: dict[Any, Any] = {node: Batch(i) if len(inputs) > 1 else Batch() for i, node in enumerate(inputs)}
    reads: dict[int, list[Read]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            known[node] = Output(len(reads))
            reads[len(reads)] = [known[arg] for arg in node.args]
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            known[node] = Output(known[source].stage, index)
    return reads
