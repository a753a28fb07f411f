"""Split a module into stages, without changes to its code."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from fpipe.errors import StageError
from fpipe.errors.arguments import checked
from fpipe.errors.tracebacks import fold_tracebacks
from fpipe.interop.modules.functions import Tree, aliases_of, canonical, named_tensors, originals_of
from fpipe.interop.modules.shared_memory import overlapping, refuse_overlapping_params
from fpipe.interop.modules.skeletons import to_meta, validated
from fpipe.interop.modules.state_dicts import specs_on
from fpipe.interop.splitting.balance import CutCandidate, bytes_of, chosen, estimate, places
from fpipe.interop.splitting.balance import measure as measure_stages
from fpipe.interop.splitting.example import ExampleCall, batch_of, device_of, stand_in
from fpipe.interop.splitting.export import export
from fpipe.interop.splitting.partition import PIPE_SPLIT, Flow, Point
from fpipe.interop.splitting.stage_graph import GraphFunction, SplitSpec, stage_function
from fpipe.plan import Cotangents, check_cotangents
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import Stage, frozen_paths


@fold_tracebacks
@checked("at", "policy", "cotangents")
def split(
    module: nn.Module,
    *,
    at: Sequence[Point] | None = None,
    stages: int | None = None,
    policy: Literal["equal", "balanced"] = "equal",
    measure: bool = False,
    example: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    loss: Callable[..., Any] | None = None,
    cotangents: Cotangents = "by_consumer",
) -> tuple[Pipeline, dict[int, Tree]]:
    """Split a module. Return the pipeline, and the parameters by stage, under the module's own names.

    Forward is exported once by `torch.export`, in the module's current mode, train or eval (`eval_mode` makes the
    other), and its graph is partitioned. A value that later stages read is sent directly to each of them. A parameter
    that several stages use, or that has several names, is one entry; the lowest stage owns it. Buffers that forward
    changes are the state of their stage: `buffers(pipeline, module)`. Other buffers are frozen entries of params. The
    module is not changed, and params share its memory. It may be on the meta device, see `materialise`.

    The batch is forward's only argument with tensors, or a tuple of these arguments; if `kwargs` has tensors, a dict of
    all arguments by name. Arguments that are not tensors are fixed here. The output is the module's, with plain dicts
    for Hugging Face's.

    Args:
        at: where stages begin: before the submodule of a name, `"layers.4"` (`"layers.4@1"`: before its second run),
            or after it, `End("layers.3")`; or where forward calls `pipe_split()`, `"pipe_split()@0"`.
        stages: the number of stages, without `at`. With neither, stages begin where forward calls `pipe_split()`.
        policy: with `stages`, what to make equal: "balanced", time; "equal", time and parameters, with equal weight.
        measure: measure forward and backward for the example here, rather than estimate them from arithmetic and bytes
            moved. Results differ between ranks: measure on one, and pass `at=split_points(...)` of its pipeline to the
            others.
        example: the arguments of forward: a microbatch of at least two rows, because a size of 1 stays fixed. At free
            sizes, 1 is assumed to behave as others.
        kwargs: the keyword arguments of forward.
        dynamic_shapes: the sizes that may change, as for `torch.export.export`. By default axis 0 of every tensor, if
            the module allows it; `{}` for none.
        loss: `loss(output, target) -> loss | (loss, aux)`; None if the output is the loss.
        cotangents: "by_rank" sends one gradient of an output from each rank, see `fpipe.Pipeline`.

    Raises:
        StageError: the module cannot be exported, or changes its arguments. The message has the line of the model.
            Or two of its parameters, or buffers of which one changes, are over the same memory.
        ValueError: a split point does not exist, or a stage would be empty.
        TypeError: forward cannot be called with the example.

    >>> import torch
    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> pipeline, params = split(layers, at=["2"], example=torch.randn(3, 4))
    >>> print(pipeline.describe())
    stage  parameters  bytes  begins  reads
        0          40  160 B          batch
        1          18   72 B       2  stage 0 1.relu (96 B)
    """
    call = ExampleCall(example if isinstance(example, tuple) else (example,), dict(kwargs or {}))
    _check_choice(at, stages, policy)
    check_cotangents(cotangents)
    try:
        inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise TypeError(f"forward can't be called with what example= and kwargs= are: {error}") from None
    module = validated(module, exported=True)
    values = {name: x.detach() for name, x in named_tensors(module)}
    names, aliases = canonical(module), aliases_of(module)
    tensors = {name: x for name, x in named_tensors(module) if name == names[name]}
    split_spec = SplitSpec(
        skeleton=to_meta(module),
        call=ExampleCall(*map(stand_in, call)),
        dynamic_shapes=dynamic_shapes,
        device=device_of(call, list(values.values())),
        names=aliases,
        nonpersistent_buffers={
            n: x for n, x in values.items() if n == names[n] and n not in aliases and x.device.type != "meta"
        },
        originals=originals_of(tensors),
    )
    refuse_overlapping_params(tensors)
    own = {x.untyped_storage()._cdata: name for name, x in values.items() if x.device.type != "meta"}
    exported = export(split_spec.skeleton, split_spec.call, split_spec.dynamic_shapes, split_spec.device, own)
    _refuse_captured(exported.constants.values(), own)
    _refuse_changes((exported.tensors[node] for node in exported.changed), tensors)
    flow = Flow(exported)
    times = None
    if at is not None:
        points = [*at]
    elif stages is not None:
        candidates = places(flow, split_spec.skeleton)
        times = _measured(split_spec, flow, candidates, values, batch_of(call, module)) if measure else estimate(flow)
        shares = _plus(times, _sizes(flow)) if policy == "equal" else times
        points = chosen(shares, candidates, stages)
    else:
        points = [f"{PIPE_SPLIT}@{number}" for number in range(len(flow.marks))]
        if not points:
            raise ValueError(
                "nothing says where to cut: name submodules in at=, give a number of stages=, or call "
                "interop.pipe_split() in forward"
            )
    pipeline, _ = assembled(replace(split_spec, points=tuple(points)), flow, loss, times)
    return pipeline.replace(pipeline.stages, loss, cotangents), _placed(pipeline, values)


def split_points(pipeline: Pipeline) -> list[Point]:
    """Return where the stages of a split module begin, for `split(at=...)`."""
    fn = pipeline.stages[0].fn
    if not isinstance(fn, GraphFunction):
        raise TypeError("split_points takes a pipeline of interop.split")
    return [*fn.split_spec.points]


def _check_choice(at: Any, stages: int | None, policy: str) -> None:
    if at is not None and stages is not None:
        raise ValueError("at= names the places to cut at, stages= lets them be chosen: give one of the two")
    if isinstance(at, Point):
        raise ValueError(f"at= is a list of split points: at=[{at!r}]")
    if at is not None and not isinstance(at, Sequence):
        raise TypeError(f"at= is a list of split points, such as ['layers.4'], not {at!r}")
    if wrong := [point for point in at or () if not isinstance(point, Point)]:
        raise TypeError(f"at= has names of submodules and End(name), and no {wrong[0]!r}")
    if policy not in ("equal", "balanced"):
        raise ValueError(f"policy is 'equal' or 'balanced', not {policy!r}")
    if stages is not None and stages < 1:
        raise ValueError(f"stages= is a number from 1, not {stages}")


def _refuse_captured(constants: Iterable[Tensor], names: Mapping[int, str]) -> None:
    """Raise StageError if forward reads a tensor of the module from elsewhere, as from a closure.

    Args:
        names: the names of the module's tensors by their storages.
    """
    for constant in constants:
        if name := names.get(constant.untyped_storage()._cdata):
            raise StageError(
                f"forward reads {name} of the module itself, not of the one it is called on, as a lambda, a patched "
                "method or a hook does that closes over the module: it would stay as it is now. Write a method, which "
                "takes it from self"
            )


def _refuse_changes(changed: Iterable[str], values: Mapping[str, Tensor]) -> None:
    """Raise StageError if forward changes a buffer whose memory another one has too."""
    changes = set(changed)
    for pair in overlapping(values) if changes else ():
        if changes.intersection(pair):
            raise StageError(
                f"forward changes {' and '.join(sorted(changes.intersection(pair)))}, and {pair[0]} and {pair[1]} are "
                "two buffers over the same memory: register one of them, and take the other from it in forward"
            )


def _placed(pipeline: Pipeline, values: Mapping[str, Tensor], of: str = "params") -> dict[int, Tree]:
    """Return the module's tensors by stage."""
    specs = specs_on(pipeline)
    return {stage: {name: values[name] for name in getattr(spec, of)} for stage, spec in specs.items()}


def _measured(
    split_spec: SplitSpec, flow: Flow, candidates: Sequence[CutCandidate], values: Mapping[str, Tensor], batch: Any
) -> list[float]:
    """Return the seconds between each two candidates, at the position of the first operation."""
    if any(x.device.type == "meta" for x in values.values()):
        raise ValueError("measure=True runs the module, whose tensors are on the meta device: leave it to an estimate")
    fine, _ = assembled(replace(split_spec, points=tuple(place.point for place in candidates)), flow, None)
    seconds = measure_stages(fine, _placed(fine, values), _placed(fine, values, "state"), batch)
    times = [0.0] * len(flow.nodes)
    for start, taken in zip([0, *(place.start for place in candidates)], seconds, strict=True):
        times[start] = taken
    return times


def _sizes(flow: Flow) -> list[float]:
    """Return the bytes of parameters by operation. A parameter counts for the first operation that uses it."""
    sizes = [0.0] * len(flow.nodes)
    for node, name in flow.exported.tensors.items():
        used = [flow.place[user] for user in node.users if user in flow.place]
        if name in flow.exported.parameters and used:
            sizes[min(used)] += bytes_of(node.meta["val"])
    return sizes


def _plus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return the sum of two lists, each scaled to a total of 1."""
    return [x / (sum(a) or 1) + y / (sum(b) or 1) for x, y in zip(a, b, strict=True)]


def assembled(
    split_spec: SplitSpec, flow: Flow, loss: Callable[..., Any] | None, times: Sequence[float] | None = None
) -> tuple[Pipeline, SplitSpec]:
    """The pipeline of a graph that is cut at the split_spec's points, and the split_spec with what is known by now.

    Args:
        times: of the operations.
    """
    starts = flow.starts(split_spec.points)
    parts = flow.cut(starts)
    exported = flow.exported
    uses: dict[str, list[int]] = {}
    for stage, part in enumerate(parts):
        for node in (*part.entries, *part.state):
            uses.setdefault(exported.tensors[node], []).append(stage)
    split_spec = replace(split_spec, homes=split_spec.homes or _homes(split_spec, uses), state=frozenset(flow.state))
    for name, users in uses.items():
        if users[0] < split_spec.homes[name]:
            raise ValueError(
                f"in this mode stage {users[0]} uses {name}, which lives with stage {split_spec.homes[name]}: split "
                "the module again in this mode, for params of its own"
            )
    stages = []
    for stage, part in enumerate(parts):
        owned = [name for name, home in split_spec.homes.items() if home == stage and name not in split_spec.state]
        fn = stage_function(exported, parts, stage, split_spec, owned)
        low, high = [0, *starts][stage], [*starts, len(flow.nodes)][stage]
        share = None if times is None else sum(times[low:high]) / sum(times)
        begins = str(split_spec.points[stage - 1]) if stage else None
        fn = replace(fn, spec=fn.spec._replace(begins=begins, share=share))
        stages.append(Stage(fn, fn.reads, bool(part.state), frozen_paths(fn.spec.params)))
    homes = split_spec.homes
    ties = {(s, name): (homes[name], name) for name, users in uses.items() for s in users if s != homes[name]}
    return Pipeline(stages, loss, ties=ties), split_spec


def _homes(split_spec: SplitSpec, uses: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the lowest stage that uses each entry; for an unused one, the stage of the entry with the nearest name."""
    homes = {name: users[0] for name, users in uses.items()}
    order = list(dict.fromkeys(canonical(split_spec.skeleton).values()))
    known = [name for name in order if name in homes]

    def near(name: str) -> int:
        at = order.index(name)
        best = max(known, key=lambda n: (_shared(n, name), -abs(order.index(n) - at)), default=None)
        return homes[best] if best is not None else 0

    return {name: homes[name] if name in homes else near(name) for name in order}


def _shared(a: str, b: str) -> int:
    """Return how many first components two names share."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split(".")))))  # noqa: B905
