"""A module as it is, in stages."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from fpipe.errors import StageError
from fpipe.interop.modules.functions import Tree, canonical, named_tensors
from fpipe.interop.modules.skeletons import accepted, skeleton
from fpipe.interop.modules.state_dicts import entries_on
from fpipe.interop.splitting.balance import Place, bytes_of, chosen, estimate, places
from fpipe.interop.splitting.balance import measure as measure_stages
from fpipe.interop.splitting.example import Call, batch_of, device_of, stand_in
from fpipe.interop.splitting.export import export
from fpipe.interop.splitting.partition import Begin, End, Flow, Mark, Point
from fpipe.interop.splitting.stage_graph import Recipe, function
from fpipe.stages.pipeline import Pipeline
from fpipe.stages.stage import Stage


def split(
    module: nn.Module,
    *,
    at: Sequence[str | Point] | None = None,
    stages: int | None = None,
    policy: Literal["equal", "balanced"] = "equal",
    measure: bool = False,
    example: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    loss: Callable[..., Any] | None = None,
) -> tuple[Pipeline, dict[int, Tree]]:
    """A module as it is, in stages, and its parameters by stage, under its own names.

    Forward is exported once by `torch.export`, in the mode of training or evaluation that the module is in
    (`eval_mode` gives the other), and its graph is cut. A value that later stages read goes straight to each of them.
    A parameter that several stages use, or that has several names, is one entry, which lives with the lowest stage.
    Buffers that forward changes are the state of their stage: `buffers(pipeline, module)`. Others are entries of
    params, and frozen. The module is left as it is, and params share its memory; it may be on the meta device, see
    `materialise`.

    The batch is what forward is given: its one argument that holds tensors, or a tuple of these; where `kwargs` has
    tensors too, a dict by the names of all arguments. What is not a tensor is settled here. The output is the
    module's, with plain dicts for Hugging Face's.

    Args:
        at: where stages begin: names of submodules, `"layers.4"`, before which a stage begins
            (`"layers.4@1"`: before its second run), or `End("layers.3")`.
        stages: how many, where `at` doesn't say; with neither, stages begin where forward calls `pipe_split()`.
        policy: what of `stages` is to be equal: "balanced", time alone; "equal", time and parameters as much.
        measure: take the time of forward and backward as it is here for the example, rather than an estimate by
            arithmetic and bytes moved. Ranks would measure differently: let one do it, and give `at=split_points(...)`
            of its pipeline to the others.
        example: what forward is given: a microbatch, of two rows at least, lest its size stay fixed at one. A size of
            1 is taken to go the way of others, where sizes are free.
        kwargs: what it is given by name.
        dynamic_shapes: which sizes may change, as of `torch.export.export`. By default axis 0 of every tensor, where
            the module lets it; `{}` none.
        loss: `loss(output, target) -> loss | (loss, aux)`; None where the output is the loss.

    Raises:
        StageError: the module can't be exported, or changes what it is given; says which of its lines.
        ValueError: there is no such split point, or a stage would be empty.
        TypeError: forward can't be called with the example.

    >>> import torch
    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> pipeline, params = split(layers, at=["2"], example=torch.randn(3, 4))
    >>> print(pipeline.describe())
    stage  parameters  bytes  begins  reads
        0          40  160 B          batch
        1          18   72 B       2  stage 0 1.relu (96 B)
    """
    call = Call(example if isinstance(example, tuple) else (example,), dict(kwargs or {}))
    _check_choice(at, stages, policy)
    try:
        inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise TypeError(f"forward can't be called with what example= and kwargs= are: {error}") from None
    module = accepted(module, exported=True)
    values = {name: x.detach() for name, x in named_tensors(module)}
    names, lasting = canonical(module), set(module.state_dict(keep_vars=True))
    recipe = Recipe(
        skeleton=skeleton(module),
        call=Call(*map(stand_in, call)),
        dynamic_shapes=dynamic_shapes,
        device=device_of(call, list(values.values())),
        points=(),
        names={name: entry for name, entry in names.items() if name in lasting},
        kept={n: x for n, x in values.items() if n == names[n] and n not in lasting and x.device.type != "meta"},
        homes={},
        state=frozenset(),
    )
    exported = export(recipe.skeleton, recipe.call, recipe.dynamic_shapes, recipe.device)
    _refuse_captured(exported.constants.values(), values)
    flow = Flow(exported)
    times = None
    if at is not None:
        points: list[Point] = [Begin(point) if isinstance(point, str) else point for point in at]
    elif stages is not None:
        found = _places(recipe, flow)
        times = _measured(recipe, flow, found, values, batch_of(call, module)) if measure else estimate(flow)
        shares = _plus(times, _sizes(flow)) if policy == "equal" else times
        points = chosen(shares, found, stages)
    else:
        points = [Mark(number) for number in range(1, len(flow.marks) + 1)]
        if not points:
            raise ValueError(
                "nothing says where to cut: name submodules in at=, give a number of stages=, or call "
                "interop.pipe_split() in forward"
            )
    pipeline, _ = assembled(replace(recipe, points=tuple(points)), flow, loss, times)
    return pipeline, _placed(pipeline, values)


def split_points(pipeline: Pipeline) -> list[str | Point]:
    """Where the stages of a split module begin, as `split(at=...)` takes it."""
    fn: Any = pipeline.stages[0].fn
    return [point.name if isinstance(point, Begin) else point for point in fn.recipe.points]


def _check_choice(at: Any, stages: int | None, policy: str) -> None:
    if at is not None and stages is not None:
        raise ValueError("at= names the places to cut at, stages= lets them be chosen: give one of the two")
    if isinstance(at, str):
        raise ValueError(f"at= is a list of split points: at=[{at!r}]")
    if wrong := [point for point in at or () if not isinstance(point, str | Begin | End | Mark)]:
        raise TypeError(f"at= has names of submodules and End(name), and no {wrong[0]!r}")
    if policy not in ("equal", "balanced"):
        raise ValueError(f"policy is 'equal' or 'balanced', not {policy!r}")
    if stages is not None and stages < 1:
        raise ValueError(f"stages= is a number from 1, not {stages}")


def _refuse_captured(constants: Iterable[Tensor], values: Mapping[str, Tensor]) -> None:
    """Raises:
    StageError: forward reads the module's tensors from elsewhere than the module.
    """
    names = {x.untyped_storage()._cdata: name for name, x in values.items() if x.device.type != "meta"}
    for constant in constants:
        if constant.device.type != "meta" and (name := names.get(constant.untyped_storage()._cdata)):
            raise StageError(
                f"forward reads {name} of the module itself, not of the one it is called on, as a lambda, a patched "
                "method or a hook does that closes over the module: it would stay as it is now. Write a method, which "
                "takes it from self"
            )


def _placed(pipeline: Pipeline, values: Mapping[str, Tensor], of: str = "params") -> dict[int, Tree]:
    """The module's tensors by stage."""
    held = entries_on(pipeline)
    return {stage: {name: values[name] for name in getattr(contents, of)} for stage, contents in held.items()}


def _places(recipe: Recipe, flow: Flow) -> list[Place]:
    holding = {name.rpartition(".")[0] for name, _ in recipe.skeleton.named_parameters(remove_duplicate=False)}
    return places(flow, lambda name: any(own == name or own.startswith(f"{name}.") for own in holding))


def _measured(
    recipe: Recipe, flow: Flow, found: Sequence[Place], values: Mapping[str, Tensor], batch: Any
) -> list[float]:
    """The seconds of what lies between two places, at the first of its operations."""
    if any(x.device.type == "meta" for x in values.values()):
        raise ValueError("measure=True runs the module, whose tensors are on the meta device: leave it to an estimate")
    fine, _ = assembled(replace(recipe, points=tuple(place.point for place in found)), flow, None)
    seconds = measure_stages(fine, _placed(fine, values), _placed(fine, values, "state"), batch)
    times = [0.0] * len(flow.nodes)
    for start, taken in zip([0, *(place.start for place in found)], seconds, strict=True):
        times[start] = taken
    return times


def _sizes(flow: Flow) -> list[float]:
    """The bytes of parameters by operation: a parameter belongs to the first that uses it."""
    sizes = [0.0] * len(flow.nodes)
    for node, name in flow.exported.tensors.items():
        used = [flow.place[user] for user in node.users if user in flow.place]
        if name in flow.exported.parameters and used:
            sizes[min(used)] += bytes_of(node.meta["val"])
    return sizes


def _plus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The shares of two wholes, added up."""
    return [x / (sum(a) or 1) + y / (sum(b) or 1) for x, y in zip(a, b, strict=True)]


def assembled(
    recipe: Recipe, flow: Flow, loss: Callable[..., Any] | None, times: Sequence[float] | None = None
) -> tuple[Pipeline, Recipe]:
    """The pipeline of a graph that is cut at the recipe's points, and the recipe with what is known by now.

    Args:
        times: of the operations.
    """
    starts = flow.starts(recipe.points)
    parts = flow.cut(starts)
    exported = flow.exported
    uses: dict[str, list[int]] = {}
    for stage, part in enumerate(parts):
        for name in (*(exported.tensors[node] for node in part.entries), *part.state):
            uses.setdefault(name, []).append(stage)
    recipe = replace(recipe, homes=recipe.homes or _homes(recipe, uses), state=frozenset(flow.state))
    for name, users in uses.items():
        if users[0] < recipe.homes[name]:
            raise ValueError(
                f"in this mode stage {users[0]} uses {name}, which lives with stage {recipe.homes[name]}: split the "
                "module again in this mode, for params of its own"
            )
    frozen = {name for name, x in named_tensors(recipe.skeleton) if not x.requires_grad}
    made = []
    for stage, part in enumerate(parts):
        held = [name for name, home in recipe.homes.items() if home == stage and name not in recipe.state]
        fn = function(exported, parts, stage, recipe, held)
        low, high = [0, *starts][stage], [*starts, len(flow.nodes)][stage]
        share = None if times is None else sum(times[low:high]) / sum(times)
        begins = str(recipe.points[stage - 1]).strip("'") if stage else None
        fn = replace(fn, contents=fn.contents._replace(begins=begins, share=share))
        made.append(Stage(fn, fn.reads, bool(part.state), tuple(name for name in fn.contents.params if name in frozen)))
    ties = {(s, name): (recipe.homes[name], name) for name, users in uses.items() for s in users}
    ties = {(s, name): home for (s, name), home in ties.items() if home[0] != s}
    return Pipeline(made, loss, ties=ties), recipe


def _homes(recipe: Recipe, uses: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The lowest stage that uses an entry; of one that none does, that of the entry with the most like name."""
    homes = {name: users[0] for name, users in uses.items()}
    order = list(dict.fromkeys(canonical(recipe.skeleton).values()))
    known = [name for name in order if name in homes]

    def near(name: str) -> int:
        at = order.index(name)
        best = max(known, key=lambda n: (_shared(n, name), -abs(order.index(n) - at)), default=None)
        return homes[best] if best is not None else 0

    return {name: homes[name] if name in homes else near(name) for name in order}


def _shared(a: str, b: str) -> int:
    """How many components two names begin with."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split(".")))))  # noqa: B905
