"""Measure effects per second of lowering, verifier and simulator, with torch's beside them.

    python -m benchmarks.simulate           # plans of some 10,000 to 1,000,000 effects
    python -m benchmarks.simulate --large   # 512 ranks by 4096 microbatches of 1F1B: time and peak memory

`torch` lowers the same compute orders by `_add_send_recv` and simulates them by `_simulate_comms_compute`, in unit time
and without transfers; both contain linear searches, so torch runs the small plans only. Each line is the median of
several rounds, in which all take turns.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from fpipe import Costs, Placement, Plan, lower, schedules
from fpipe.effects import Backward, Forward, Recv, Send
from fpipe.plan import Schedule
from fpipe.programs.program import Programs
from fpipe.programs.verifier import check
from fpipe.timelines.simulator import simulate_programs

ROUNDS = 3
PLANS = {
    "1f1b 8x128": (schedules.one_f_one_b, Plan(Placement.loop(8), 128)),
    "interleaved 8x2x64": (schedules.interleaved_1f1b, Plan(Placement.loop(8, 2), 64)),
    "1f1b 16x2048": (schedules.one_f_one_b, Plan(Placement.loop(16), 2048)),
    "interleaved 16x4x2048": (schedules.interleaved_1f1b, Plan(Placement.loop(16, 4), 2048)),
}
TORCH_MOST = 20_000  # effects


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def torch_order(schedule: Schedule, plan: Plan) -> dict[int, list[Any]]:
    """Return the compute order as torch's actions."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    kinds = {Forward: _ComputationType.FORWARD, Backward: _ComputationType.FULL_BACKWARD}
    return {r: [_Action(e.stage, kinds[type(e)], e.microbatch) for e in schedule(r, plan)] for r in range(plan.ranks)}


def torch_lower(order: dict[int, list[Any]], plan: Plan) -> dict[int, list[Any]]:
    from torch.distributed.pipelining.schedules import _add_send_recv

    return _add_send_recv({r: list(a) for r, a in order.items()}, lambda s: plan.rank_of(s, 0), plan.stages)


def torch_simulate(actions: dict[int, list[Any]], plan: Plan) -> Any:
    from torch.distributed.pipelining.schedules import _simulate_comms_compute

    return _simulate_comms_compute({r: list(a) for r, a in actions.items()}, lambda s: plan.rank_of(s, 0), plan.stages)


def row(name: str, schedule: Schedule, plan: Plan) -> None:
    took: dict[str, list[float]] = {}

    def note(what: str, function: Callable[[], Any]) -> Any:
        seconds, result = timed(function)
        took.setdefault(what, []).append(seconds)
        return result

    programs: Programs = {}
    actions = 0
    for _ in range(ROUNDS):
        programs = note("lowering", lambda: lower(schedule, plan))
        note("verifier", lambda programs=programs: check(programs))
        note("simulator", lambda programs=programs: simulate_programs(programs, Costs(communication=0.1)).makespan)
        if sum(map(len, programs.values())) <= TORCH_MOST:
            order = torch_order(schedule, plan)
            lowered = note("torch lowering", lambda order=order: torch_lower(order, plan))
            actions = sum(map(len, lowered.values()))
            note("torch simulator", lambda lowered=lowered: torch_simulate(lowered, plan))
    effects = sum(map(len, programs.values()))
    rate = {what: (actions if "torch" in what else effects) / statistics.median(s) for what, s in took.items()}
    print(f"{name:>22} {effects:>10,}", *(f"{rate.get(what, 0):>16,.0f}" for what in COLUMNS[:3]), end="")
    if actions:
        ratio = rate["simulator"] / rate["torch simulator"]
        print(*(f"{rate[what]:>16,.0f}" for what in COLUMNS[3:]), f"{ratio:>8.1f}x")
    else:
        print()


COLUMNS = ("lowering", "verifier", "simulator", "torch lowering", "torch simulator")


def large() -> None:
    plan = Plan(Placement.loop(512), 4096)
    lowering, programs = timed(lambda: lower(schedules.one_f_one_b, plan))
    messages = sum(isinstance(e, Send | Recv) for e in programs[1].effects)
    playing, timeline = timed(lambda: simulate_programs(programs, Costs(communication=0.1)))
    account, cost = timed(lambda: (timeline.cost, timeline.bubble_rate, timeline.peak_in_flight[0]))
    expected = (4096 + 511) * 3 + 0.1 * (2 * 511 * 4096 / 512 + 2 * 510)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"1F1B, 512 ranks by 4096 microbatches: {sum(map(len, programs.values())):,} effects, {messages:,} messages")
    print(f"on rank 1; lowering {lowering:.0f} s, simulator {playing:.0f} s, account {account:.0f} s, {peak:.1f} GiB")
    print(f"cost {cost[0]:,.1f} (closed form {expected:,.1f}), bubble rate {cost[1]:.4f}, peak {cost[2]:g} on rank 0")


def main() -> None:
    if "--large" in sys.argv:
        return large()
    print("effects a second, medians")
    print(f"{'':>22} {'effects':>10}", *(f"{what:>16}" for what in COLUMNS), f"{'ratio':>9}")
    for name, (schedule, plan) in PLANS.items():
        row(name, schedule, plan)
    return None


if __name__ == "__main__":
    main()
