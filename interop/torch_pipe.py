"""Convert a `Pipe` of torch.distributed.pipelining to a pipeline of fpipe."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.pipelining import Pipe

from fpipe.interop.modules.functions import ModuleFunction, Tree, from_modules
from fpipe.interop.modules.skeletons import bind_tensors
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.pytree import describe
from fpipe.stages.stage import Batch, Output, Read, Stage

Sizes = tuple[int | None, ...]
"""The sizes of a tensor, by axis; None for any size."""


@dataclass(frozen=True)
class TracedFunction(ModuleFunction):
    """A graph that was traced for inputs of these sizes; None for an input that is not a tensor."""

    sizes: tuple[Sizes | None, ...] = ()

    def __call__(self, params: Tree, *inputs: Any) -> Any:
        _check(self.sizes, inputs[1:] if self.stateful else inputs)
        return super().__call__(params, *inputs)


def from_pipe(pipe: Pipe, *, loss: Callable[..., Any] | None = None) -> tuple[Pipeline, dict[int, Tree]]:
    """Return `(pipeline, params)` for a `Pipe` of `torch.distributed.pipelining.pipeline`.

    A value that skips stages is sent directly to the stages that read it. A parameter that several stages have under
    one name is tied. If the module shared it under two names, torch has made copies; only `interop.split` of the
    module ties these. The batch is the only input, or a tuple of all inputs. The output is the last stage's, as under
    torch's schedules. The mode, train or eval, is the traced one. The sizes are the traced ones as well, because a
    graph may contain them as numbers: microbatches of another size than `mb_args` are refused.

    Args:
        loss: `loss(output, target) -> loss | (loss, aux)`.

    Raises:
        TypeError: it is not a `Pipe`.
        ValueError: forward returns something else than the last stage's output.
        StageError: as `interop.from_modules`.

    The state of stages with buffers is `interop.buffers([pipe.get_stage_module(i) for i in range(pipe.num_stages)])`.
    """
    if not isinstance(pipe, Pipe):
        raise TypeError(
            f"from_pipe takes what torch.distributed.pipelining.pipeline returns, not a {type(pipe).__name__}: a "
            "module as it is goes into interop.split, and modules cut by hand into interop.from_modules"
        )
    modules = [pipe.get_stage_module(stage) for stage in range(pipe.num_stages)]
    pipeline, params = from_modules(_sharing(modules), loss=loss, reads=_reads(pipe.split_gm.graph))
    stages = [_traced(stage, module) for stage, module in zip(pipeline.stages, modules, strict=True)]
    return pipeline.replace(stages, loss), params


def _traced(stage: Stage, module: nn.Module) -> Stage:
    """Return the stage with a check of the sizes that its graph was traced for."""
    assert isinstance(stage.fn, ModuleFunction)
    sizes = tuple(_sizes(node) for node in module.graph.nodes if node.op == "placeholder")  # type: ignore[union-attr]
    own = {field.name: getattr(stage.fn, field.name) for field in fields(stage.fn) if field.init}
    return replace(stage, fn=TracedFunction(**own, sizes=sizes))


def _sizes(node: fx.Node) -> Sizes | None:
    value = node.meta.get("val")
    return tuple(n if isinstance(n, int) else None for n in value.shape) if isinstance(value, Tensor) else None


def _check(traced: Sequence[Sizes | None], inputs: Sequence[Any]) -> None:
    for i, (sizes, x) in enumerate(zip(traced, inputs, strict=True)):
        if sizes is None or not isinstance(x, Tensor):
            continue
        if len(sizes) != x.ndim or any(n not in (None, size) for n, size in zip(sizes, x.shape, strict=True)):
            shape = ", ".join("any" if n is None else str(n) for n in sizes)
            raise ValueError(
                f"its input {i} is {describe(x)}, and its Pipe was traced for [{shape}], sizes that the graph may hold "
                "as numbers: make microbatches as large as mb_args was, trace with an example of this size, or take "
                "interop.split of the module, which leaves the batch's size free"
            )


def _sharing(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules with one parameter for each name."""
    first: Tree = {}
    shared = []
    for module in modules:
        parameters = {name: first.setdefault(name, parameter) for name, parameter in module.named_parameters()}
        shared.append(bind_tensors(module, {**parameters, **dict(module.named_buffers())}))
    return shared


def _reads(graph: fx.Graph) -> dict[int, list[Read]]:
    """Return the reads of each stage, from the graph that calls the stages in order."""
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
        elif node.op == "output":
            _check_output(node.args[0], known, len(reads) - 1)
    return reads


def _check_output(returned: Any, known: dict[Any, Any], last: int) -> None:
    """Raise ValueError unless forward returns the last stage's output."""
    reads = [known.get(x) for x in returned] if isinstance(returned, tuple | list) else [known.get(returned)]
    if reads not in ([Output(last)], [Output(last, i) for i in range(len(reads))]):
        others = sorted({f"stage {x.stage}" if isinstance(x, Output) else "the batch" for x in reads if x is not None})
        raise ValueError(
            f"forward returns what comes from {', '.join(others)}, where a Pipe's output is the last stage's: take "
            "interop.split of the module, which keeps all that it returns"
        )
