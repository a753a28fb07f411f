"""The command that simulates a result of a search again. No torch."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import isclose

from fpipe.cli.options import CostOptions, is_large
from fpipe.cli.resolve import Memory
from fpipe.costs import ROUNDING, Costs, Link
from fpipe.plan import Plan
from fpipe.schedules.catalogue import named
from fpipe.schedules.found import Found
from fpipe.schedules.space import limits_of_ranks

OPTIONS = [field.name for field in fields(CostOptions) if field.name != "lengths"]


def again(found: Found, memory: Memory) -> str:
    """Return the command that simulates a result, or a note that there is none.

    Args:
        memory: of the search.
    """
    costs = found.costs
    if found.offload is not None:  # what a copy took in the pass: nothing else is copied
        costs = replace(costs, offload=found.offload.costs.offload, fetch=found.offload.costs.fetch)
    is_limited, limits = named(found.name).limited, limits_of_ranks(found.plan, memory.limit)
    in_flight = {*limits} if isinstance(limits, Sequence) else {limits}
    if not _has_options(costs) or (is_limited and len(in_flight) > 1):
        return "No options have all of this: schedules.search(layouts=True) in Python returns what simulate takes."
    words = ["fpipe", "simulate", found.name, *_of_plan(found.plan), *_of_costs(costs)]
    for option, limit in {"--memory-limit": in_flight.pop(), "--memory-limit-bytes": memory.limit_bytes}.items():
        words += [option, _text(limit)] if is_limited and limit is not None else []
    words += ["--effort", _text(found.effort)] if is_limited and found.effort != 1.0 else []
    words += ["--resident", str(found.resident)] if found.resident is not None else []
    if moved := found.offload:
        words += ["--offload-limit-bytes", _text(moved.limit_bytes)]
        words += ["--slower", _text(moved.slower)] * bool(moved.slower) + ["--recomputing"] * moved.recompute
    return f"The same step: {shlex.join(words)}"


def _has_options(costs: Costs) -> bool:
    """Return whether options can give all of the costs."""
    default, scale = Costs(), costs.scale
    others = [f.name for f in fields(Costs) if f.name not in (*OPTIONS, "scale", "sizes")]
    is_mean = not scale or isclose(sum(scale), len(scale), rel_tol=ROUNDING)
    return is_mean and costs.sizes == scale and all(_is(getattr(costs, n), getattr(default, n)) for n in others)


def _is(value: object, default: object) -> bool:
    """Return whether a cost is as by default, for each stage."""
    return value == default or (isinstance(value, tuple) and {*value} == {default} == {0.0})


def _of_plan(plan: Plan) -> Iterator[str]:
    yield from ("--placement", ",".join("+".join(map(str, ranks)) for ranks in plan.placement.holders))
    yield from ("--microbatches", str(plan.microbatches))
    if plan.replicas > 1:
        yield from ("--replicas", str(plan.replicas))
    if plan.trained is not None:
        yield from ("--trained", ",".join(map(str, sorted(plan.trained))) or "none")
    if is_large(plan.stages * plan.slices * plan.microbatches):
        yield "--any-size"


def _of_costs(costs: Costs) -> Iterator[str]:
    default = CostOptions().costs
    for name in OPTIONS:
        if not _is(getattr(costs, name), getattr(default, name)):
            yield from (f"--{name.replace('_', '-')}", _text(getattr(costs, name)))
    if costs.scale:
        yield from ("--lengths", _text(costs.scale))


def _text(value: object) -> str:
    """Return a cost as an option has it, exactly."""
    if isinstance(value, Mapping):
        return ",".join(f"{source}-{target}={_text(link)}" for (source, target), link in value.items())
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, Link):
        return f"{_text(value.latency)}:{_text(value.bandwidth)}"
    return repr(value).removesuffix(".0")
