"""Measure effects per second of lowering, verifier and simulator, with torch's beside them.

    python -m benchmarks.simulate           # plans of some 10,000 to 1,000,000 effects
    python -m benchmarks.simulate --large   # 512 ranks by 4096 microbatches of 1F1B: time and peak memory
    python -m benchmarks.simulate --json    # a list of objects, and nothing else

`torch` lowers the same compute orders by `_add_send_recv` and simulates them by `_simulate_comms_compute`, in unit time
and without transfers; both contain linear searches, so torch runs the small plans only. Each figure is the median of
several rounds, in which all take turns; `ratio` is that of the two simulators.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import models
from fpipe import Costs, Placement, Plan, lower, schedules
from fpipe.effects import Backward, Forward, Recv, Send
from fpipe.plan import Schedule
from fpipe.programs.program import Programs
from fpipe.programs.verifier import check
from fpipe.timelines.simulator import simulate_programs

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


def row(name: str, schedule: Schedule, plan: Plan, rounds: int) -> dict[str, Any]:
    """Return effects per second, by what handles them, and torch's actions where it runs."""
    took: dict[str, list[float]] = defaultdict(list)

    def note(what: str, function: Callable[[], Any]) -> Any:
        seconds, result = timed(function)
        took[what].append(seconds)
        return result

    programs: Programs = {}
    actions = 0
    for _ in range(rounds):
        programs = note("lowering", lambda: lower(schedule, plan))
        note("verifier", lambda programs=programs: check(programs))
        note("simulator", lambda programs=programs: simulate_programs(programs, Costs(communication=0.1)).makespan)
        if sum(map(len, programs.values())) <= TORCH_MOST:
            order = torch_order(schedule, plan)
            lowered = note("torch lowering", lambda order=order: torch_lower(order, plan))
            actions = sum(map(len, lowered.values()))
            note("torch simulator", lambda lowered=lowered: torch_simulate(lowered, plan))
    effects = sum(map(len, programs.values()))
    rates = {what: (actions if "torch" in what else effects) / statistics.median(s) for what, s in took.items()}
    ratio = rates["simulator"] / rates["torch simulator"] if actions else None
    return {"plan": name, "effects": effects, **{what: rates.get(what) for what in COLUMNS}, "ratio": ratio}


COLUMNS = ("lowering", "verifier", "simulator", "torch lowering", "torch simulator")


def show(rows: Sequence[dict[str, Any]]) -> None:
    for each in rows:
        if each["plan"] == LARGE:
            print(TEXT.format(**each))
            continue
        rates = ", ".join(f"{what} {each[what]:,.0f}" for what in COLUMNS if each[what])
        ratio = f", ratio of simulators {each['ratio']:.1f}" if each["ratio"] else ""
        print(f"{each['plan']}, {each['effects']:,} effects, a second: {rates}{ratio}", flush=True)


LARGE = "1F1B, 512 ranks by 4096 microbatches"
TEXT = """{plan}: {effects:,} effects, {messages:,} messages on rank 1, {gib:.1f} GiB
lowering {lowering_s:.0f} s, simulator {simulator_s:.0f} s, account {account_s:.0f} s
cost {cost:,.1f} (closed form {expected_cost:,.1f})"""


def large() -> dict[str, Any]:
    plan = Plan(Placement.loop(512), 4096)
    lowering, programs = timed(lambda: lower(schedules.one_f_one_b, plan))
    playing, timeline = timed(lambda: simulate_programs(programs, Costs(communication=0.1)))
    account, cost = timed(lambda: (timeline.cost, timeline.bubble_rate, timeline.peak_in_flight[0])[0])
    return {
        "plan": LARGE,
        "effects": sum(map(len, programs.values())),
        "messages": sum(isinstance(e, Send | Recv) for e in programs[1].effects),
        "lowering_s": lowering,
        "simulator_s": playing,
        "account_s": account,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "cost": cost,
        "expected_cost": (4096 + 511) * 3 + 0.1 * (2 * 511 * 4096 / 512 + 2 * 510),
    }


def measured(names: Sequence[str], rounds: int) -> Iterator[list[dict[str, Any]]]:
    for name in names:
        yield [row(name, *PLANS[name], rounds)]


def main() -> None:
    parser = models.parser(__doc__, rounds=3)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=[*PLANS], metavar="PLAN", help=", ".join(PLANS))
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    parts = iter([[large()]]) if options.large else measured(options.plans, options.rounds)
    models.report("simulate", options.json, parts, show)


if __name__ == "__main__":
    main()
