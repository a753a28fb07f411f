"""A handler that is defined here alone: it runs the ranks' effects in a random order that their needs admit.

The bits are the reference's, whatever the order.
"""

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest

import fpipe
from fpipe.handlers.calls import Calls
from fpipe.handlers.executor import Executor
from fpipe.handlers.protocol import Departure, Replicas, Results
from tests.support import cases, jobs
from tests.support.combinations import few, thorough


class Shuffled:
    """Run all ranks in this process; each next effect is one of those that can run, drawn at random."""

    peers = devices = replays = beside = flight = timeout = None

    def __init__(self, seed):
        self.departure = Departure()
        self.random = Random(seed)
        self.order = []

    def ranks(self, plan):
        return tuple(range(plan.ranks))

    def replicas(self, plan):
        return Replicas(range(1), 1)

    def check(self):
        """Every step is done when it returns."""

    def compile(self, programs, pieces, observe):
        mailbox = Mailbox()
        executors = {rank: Executor(Calls(program, pieces, mailbox, observe)) for rank, program in programs.items()}

        def run(inputs):
            results, position = Results(), dict.fromkeys(programs, 0)
            for rank, executor in executors.items():
                params = executor.pipeline.params_on(inputs.params, executor.plan, rank)
                executor.start(replace(inputs, params=params))
            while ready := [rank for rank, at in position.items() if mailbox.can_run(programs[rank], at)]:
                rank = self.random.choice(ready)
                executors[rank].run(position[rank], position[rank] + 1)
                position[rank] += 1
                self.order.append(rank)
            for executor in executors.values():
                results.merge(executor.finish(), executor.stages)
            return results

        return run


class Mailbox:
    """Keeps each sent payload until its receiver takes it."""

    receives_copies = False

    def __init__(self):
        self.payloads = defaultdict(list)
        self.sent = set()

    def sender(self, value, source, target):
        def post(payload):
            self.payloads[value, target].append(payload)
            self.sent.add((value, target))

        return post

    def receiver(self, value, source, target, by):
        return lambda: None, self.payloads[value, target].pop

    def can_run(self, program, at):
        """Whether a next effect exists, and every value that it needs from another rank was sent."""
        if at == len(program):
            return False
        received = {effect.value for effect in program if isinstance(effect, fpipe.effects.Recv)}
        needs = program.table.needs(program.effects[at], program.plan)
        return all((name, program.rank) in self.sent for name in needs if name in received)


@thorough
@pytest.mark.parametrize(
    ("name", "schedule", "ranks"),
    few(
        [("tied", "zb_v", 2), ("modules", "gpipe", 2), ("attention", "one_f_one_b", 4), ("skip", "interleaved_zb", 2)],
        slice(2),
    ),
)
def test_a_random_order_has_the_references_bits(name, schedule, ranks):
    case, generator, plan = cases.make(name, schedule, ranks, 4)
    orders = []
    for seed in range(2):
        handler = Shuffled(seed)
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler, autodiff="graph", **case.options)
        results = step(case.params, case.batch, case.target, state=case.state, rng=case.rng)
        assert jobs.differences(results, cases.reference(case, generator, plan)) == []
        orders.append(handler.order)
    assert orders[0] != orders[1]
