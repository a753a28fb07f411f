"""Prove the optima of small pipelines, the tables of instances.py, by constraint programming.

    python3 -m venv build/optima && build/optima/bin/pip install ortools==9.15.6755
    build/optima/bin/python tests/support/optima.py            # a line for each instance

OR-tools pins another protobuf than TensorBoard does, so it stays out of the project's environment, and this file
imports nothing of the project but the tables beside it. OR-tools 9.15.6755 proved them. What is proved is the least
cost, the largest span of a rank, of programs whose forwards, input gradients and weight gradients run in microbatch
order on each stage.

A rank runs one pass at a time. Its memory is a cumulative resource: of each microbatch and stage, `residuals` from the
forward to the input gradient and `deferred` to the weight gradient. That is counted in whole chunks where both are 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from instances import CHAINS, UNPROVED, VS, Instance
from ortools.sat.python import cp_model

SECONDS = 300.0


def solve(instance: Instance, seconds: float = SECONDS) -> tuple[bool, float]:
    """Return whether the optimum is proved, and the least cost that was found."""
    placement, count = instance.placement, instance.microbatches
    stages, scale = range(len(placement)), instance.scale or (1,) * count
    times = (instance.forward, instance.inputs, instance.weight)
    horizon = 2 * len(placement) * sum(scale) * sum(times) + 2 * len(placement) * instance.communication * count
    model = cp_model.CpModel()
    start = {(k, s, m): model.new_int_var(0, horizon, "") for k in range(3) for s in stages for m in range(count)}
    end = {key: begin + times[key[0]] * scale[key[2]] for key, begin in start.items()}
    for s in stages:
        for m in range(count):
            if s:
                away = instance.communication * (placement[s] != placement[s - 1])
                model.add(start[0, s, m] >= end[0, s - 1, m] + away)
                model.add(start[1, s - 1, m] >= end[1, s, m] + away)
            model.add(start[1, s, m] >= end[0, s, m])
            model.add(start[2, s, m] >= end[1, s, m])
            for k in range(3) if m else ():
                model.add(start[k, s, m] >= end[k, s, m - 1])
    cost = model.new_int_var(0, horizon, "")
    for rank in range(max(placement) + 1):
        own = [s for s in stages if placement[s] == rank]
        keys = [(k, s, m) for k in range(3) for s in own for m in range(count)]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start[key], times[key[0]] * scale[key[2]], "") for key in keys]
        )
        _limit(model, instance, own, start, end, horizon)
        first = model.new_int_var(0, horizon, "")
        model.add_min_equality(first, [start[0, s, 0] for s in own])
        for s in own:
            model.add(cost >= end[2, s, count - 1] - first)
        model.add(cost >= len(own) * sum(times) * sum(scale))
    model.minimize(cost)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    return solver.solve(model) == cp_model.OPTIMAL, solver.objective_value


def _limit(
    model: cp_model.CpModel,
    instance: Instance,
    own: Sequence[int],
    start: Mapping[tuple[int, int, int], Any],
    end: Mapping[tuple[int, int, int], Any],
    horizon: int,
) -> None:
    """Limit the memory of a rank with these stages."""
    intervals, held, count = [], [], instance.microbatches
    for s in own:
        for m in range(count):
            for k, size in ((1, instance.residuals - instance.deferred), (2, instance.deferred)):
                length = model.new_int_var(0, horizon, "")
                intervals.append(model.new_interval_var(start[0, s, m], length, end[k, s, m], ""))
                held.append(size)
    model.add_cumulative(intervals, held, instance.limit)
    if len(own) == 1:  # implied, and what makes proofs short
        for k, size in ((1, instance.residuals), (2, instance.deferred)):
            fits = instance.limit // size
            for m in range(fits, count):
                model.add(start[0, own[0], m] >= end[k, own[0], m - fits])


if __name__ == "__main__":
    known = CHAINS | VS | UNPROVED
    for instance in [*known][int(sys.argv[1]) if len(sys.argv) > 1 else 0 :]:
        proved, cost = solve(instance)
        is_known = "as known" if cost == known[instance] else f"not {known[instance]}"
        print(f"{tuple(instance)}: {cost:g}, {is_known}{'' if proved else ', not proved'}", flush=True)
