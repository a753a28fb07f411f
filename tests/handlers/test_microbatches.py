"""Microbatches of any shape: every handler and schedule gives the reference's bits, and shapes travel once."""

import re
import warnings
from dataclasses import replace

import optree
import pytest
import torch

import fpipe
from fpipe import Microbatches, Pipeline, Placement, StageError, handlers, schedules
from fpipe.handlers import captured_pieces
from fpipe.handlers.distributed.connections import Connections
from tests.handlers.test_weights import PLACEMENTS
from tests.support import cases, jobs, replica_jobs
from tests.support.combinations import ALL, combined, few, one_in, thorough
from tests.support.sharing import Sharing, sharing

CASES, SCHEDULES = cases.UNSLICED, [*cases.SCHEDULES]
ROWS = (3, 2, 4, 2, 3)
SEQUENCES = ("attention", "tied", "dropout")


def apart(case, name, order):
    """The case with microbatches of other rows, and sequences of other lengths, in this order."""

    def of(tree):
        parts = []
        for m in order:
            rows = slice(sum(ROWS[:m]), sum(ROWS[: m + 1]))
            length = slice(cases.CONTEXT - m % 3 if name in SEQUENCES else None)
            parts.append(optree.tree_map(lambda x, r=rows, n=length: x[r, n] if name in SEQUENCES else x[r], tree))
        return Microbatches(parts)

    return replace(case, batch=of(case.batch), target=of(case.target))


def possible(name, schedule, m, handler, **_):
    if schedule in cases.COPIED and (m % 2 or name == "modules"):
        return False
    return ALL or (CASES.index(name) + SCHEDULES.index(schedule)) % (3 if handler == "local" else 7) == 0


@one_in(4)
@combined(
    name=CASES,
    schedule=SCHEDULES,
    way=("eager", "everything") if ALL else ("eager",),
    m=(2, 3, 4, 5),
    handler=("local", "gloo"),
    ranks=(2, 4) if ALL else (2,),
    where=possible,
    singly=True,
)
def test_training(pools, name, schedule, way, m, handler, ranks):
    if handler == "gloo":
        assert pools(ranks).run(train, name, schedule, m, ranks, way) == [[]] * ranks
    else:
        whole, generator, plan = cases.make(name, schedule, ranks, m)
        case = apart(whole, name, range(m))
        step = fpipe.value_and_grad(
            case.pipeline, generator, plan, handler=sharing(handlers.Local(), name), **jobs.WAYS[way], **case.options
        )
        found = step(case.params, case.batch, case.target, state=case.state, rng=case.rng)
        assert jobs.differences(found, cases.reference(case, generator, plan)) == []


def train(rank, name, schedule, m, ranks, way):
    """Three steps of other orders on this rank: where they differ from the reference, and signatures sent too often."""
    whole, generator, plan = cases.make(name, schedule, ranks, m)
    own = sharing(jobs.handler(), name)
    step = fpipe.value_and_grad(whole.pipeline, generator, plan, handler=own, **jobs.WAYS[way], **whole.options)
    found = []
    for at, order in enumerate([range(m), range(m)[::-1], range(m)[::-1]]):
        case = apart(whole, name, order)
        params, batch, target, state = cases.own(case, plan, rank)
        expected = jobs.expected_on(cases.reference(case, generator, plan), params, plan, rank, case.state is not None)
        with Signatures() as sent:
            found += jobs.differences(step(params, batch, target, state=state, rng=case.rng), expected)
        if sent and at > (case.state is not None or schedule in cases.COPIED):  # copies have edges of their own
            found.append(f"{len(sent)} signatures in step {at}")
    return found


class Signatures:
    """The signatures that this rank sends in a context."""

    def __enter__(self):
        self.sent, self.send = [], Connections.send_bytes
        Connections.send_bytes = lambda links, text, target: self.sent.append(text) or self.send(links, text, target)
        return self.sent

    def __exit__(self, *_):
        Connections.send_bytes = self.send


# Lengths that are new, beside those that are known


def affine(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def sequences(name, lengths):
    """`(schedule, plan, pipeline, params, batch, target)`: sequences of these lengths, on four ranks."""
    pipeline = Pipeline([affine] * PLACEMENTS[name].stages, cases.mse)
    torch.manual_seed(0)
    params = {s: {"w": torch.randn(4, 4), "b": torch.randn(4)} for s in range(len(pipeline.stages))}
    batch, target = (Microbatches([torch.randn(1, n, 4) for n in lengths]) for _ in range(2))
    return getattr(schedules, name), pipeline.plan(PLACEMENTS[name], len(lengths)), pipeline, params, batch, target


STEPS = [(3, 5, 3, 5), (5, 3, 3, 3), (3, 4, 5, 3), (6, 3, 6, 7), (7, 6, 5, 4)]
NEW = [(0, 1, 2, 3), (), (1,), (0, 2, 3), ()]
"""The microbatches of each step whose length no earlier step had."""


def novel(rank, name, given, autodiff):
    """Where steps differ from the reference, and how often each signature of this rank travelled."""
    found, counts, step = [], [], None
    for lengths in STEPS:
        schedule, plan, pipeline, params, batch, target = sequences(name, lengths)
        if step is None:
            step = fpipe.value_and_grad(pipeline, schedule, plan, handler=jobs.handler(), autodiff=autodiff)
            once, each = jobs.signatures_sent(schedule, plan, rank)
        reference = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Reference())
        own = pipeline.params_on(params, plan, rank)
        expected = jobs.expected_on(reference(params, batch, target), own, plan, rank, False)
        with Signatures() as sent:
            stages = plan.stages_on(rank)
            reads = given == "everywhere" or 0 in stages
            scores = given == "everywhere" or plan.stages - 1 in stages
            found += jobs.differences(step(own, batch if reads else None, target if scores else None), expected)
        counts.append(len(sent))
    if name == "dualpipe":  # a shape travels over the edges of the copy that runs the microbatch
        return found, sum(counts) <= once + 2 * sum(each[m] for new in NEW for m in new)
    return found, counts == [sum(each[m] for m in new) for new in NEW]


@one_in(2)
@pytest.mark.parametrize(
    ("name", "given", "autodiff"),
    few(
        [
            ("interleaved_1f1b", "everywhere", "graph"),
            ("dualpipe", "where read", "eager"),
            ("zb_h1", "where read", "eager"),
        ],
        slice(2),
    ),
)
def test_only_new_shapes_travel(pools, name, given, autodiff):
    ranks = PLACEMENTS[name].ranks
    assert pools(ranks).run(novel, name, given, autodiff) == [([], True)] * ranks


# The definition


@pytest.mark.parametrize("name", ["linear", "convolution", "attention", "dictionary", "skip", "tied"])
@pytest.mark.parametrize("weight", [None, lambda target: target.numel()], ids=["samples", "numbers"])
def test_the_reference_is_the_plain_function(name, weight):
    """Within rounding of float64: the sum of the losses, weighed, differentiated at once."""
    whole, _, plan = cases.make(name, "gpipe", 4, 5)
    case = apart(whole, name, range(5))
    params, batch, target = (
        optree.tree_map(lambda x: x.double() if x.is_floating_point() else x, tree, namespace="fpipe")
        for tree in (case.params, case.batch, case.target)
    )
    step = fpipe.value_and_grad(case.pipeline, schedules.gpipe, plan, handler=handlers.Reference(), weight=weight)
    weights = [len(t) if weight is None else weight(t) for t in target]

    def loss(params):
        losses = [case.pipeline(params, *pair) for pair in zip(batch, target, strict=True)]
        return sum(each * w / sum(weights) for each, w in zip(losses, weights, strict=True))

    grads, value = torch.func.grad_and_value(loss)(params)
    torch.testing.assert_close(step(params, batch, target), (value, grads), rtol=1e-10, atol=1e-12)


def test_equal_microbatches_are_a_batch_that_is_split():
    case, generator, plan = cases.make("attention", "zb_h1", 2, 4)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handlers.Local(), autodiff="eager")
    parts = [Microbatches(tree.split(4)) for tree in (case.batch, case.target)]
    assert jobs.differences(step(case.params, *parts), step(case.params, case.batch, case.target)) == []


@one_in(2)
@pytest.mark.parametrize(("dynamic", "traces"), [(True, 1), (False, 3)])
def test_traces_are_those_of_equal_shapes(dynamic, traces):
    schedule, plan, pipeline, params, batch, target = sequences("zb_h1", (3, 5, 3, 4))
    own = Sharing(handlers.Local(), graphs={})
    options = {"autodiff": "graph", "dynamic": dynamic}
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=own, **options)
    reference = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Reference())
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 1, 3, 3)):
        data = [Microbatches(each[m] for m in order) for each in (batch, target)]
        assert jobs.differences(step(params, *data), reference(params, *data)) == []
    assert {len(graphs.traced) for graphs in own.graphs.values()} == {traces}
    forward = Sharing(handlers.Local(), graphs={})
    outputs = fpipe.evaluate(Pipeline(pipeline.stages), plan, handler=forward, **options)(params, batch)
    assert [each.shape for each in outputs] == [each.shape for each in batch]
    assert {len(graphs.traced) for graphs in forward.graphs.values()} == {traces}


def lengths_in_turn(monkeypatch, kept, **options):
    """The results of steps of twelve lengths, four a step, and those of the reference."""
    monkeypatch.setattr("fpipe.autodiff.traced.GRAPHS_KEPT", kept)
    monkeypatch.setattr("fpipe.autodiff.traced.GRAPHS_BEFORE_WARNING", 2 * kept)
    schedule, plan, pipeline, params, *data = sequences("zb_h1", (3, 5, 7, 4, 6, 8, 9, 2, 10, 11, 12, 13))
    plan, own = pipeline.plan(plan.placement, 4), Sharing(handlers.Local(), graphs={})
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=own, autodiff="graph", **options)
    reference = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Reference())
    parts = [[each[at : at + 4] for each in data] for at in (0, 4, 8, 0, 4, 8)]
    return [(step(params, *part), reference(params, *part)) for part in parts], own.graphs.values()


@thorough
def test_traces_of_many_lengths_are_bounded(monkeypatch):
    with pytest.warns(UserWarning, match=r"traced for 10 signatures.*dynamic=True.*padded.* The 5 that were") as told:
        found, graphs = lengths_in_turn(monkeypatch, 5)
    assert told[0].filename == __file__
    assert all(jobs.differences(*pair) == [] for pair in found)
    for each in graphs:
        assert each.count > 12  # some came again, after they had been dropped
        assert len(each.traced) == each.entry.cache_info().currsize == 5


@thorough
def test_pieces_of_many_lengths_are_bounded(monkeypatch):
    monkeypatch.setattr("fpipe.handlers.captured_pieces.KINDS", 2)
    monkeypatch.setattr("fpipe.handlers.captured_pieces.COMPUTED", 8)
    copies, begin = set(), captured_pieces._Copy.begin

    def counted(copy, leaves):
        begin(copy, leaves)
        copies.add(copy)
        assert len(copy.slots) <= 2
        assert len(copy.prepared.computed) <= 8

    monkeypatch.setattr(captured_pieces._Copy, "begin", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = lengths_in_turn(monkeypatch, 5, capture="pieces")
    assert all(jobs.differences(*pair) == [] for pair in found)
    assert len(copies) > 2  # of two stages


@pytest.mark.parametrize("capture", [True, "pieces"])
def test_a_graph_for_each_tuple_of_shapes(capture):
    found = []
    for lengths in [(3, 5), (5, 3), (3, 5), (5, 3), (3, 5), (5, 3)]:
        schedule, plan, pipeline, params, batch, target = sequences("gpipe", lengths)
        if not found:
            local = handlers.Local()
            step = fpipe.value_and_grad(pipeline, schedule, plan, handler=local, autodiff="graph", capture=capture)
        expected = fpipe.value_and_grad(pipeline, schedule, plan, handler=handlers.Reference())(params, batch, target)
        found.append(jobs.differences(step(params, batch, target), expected))
    assert found == [[]] * 6
    assert (step.captured if capture is True else step.pieces).graphs > 0


def captured(rank):
    """Steps of two tuples of shapes on this rank, run, captured and replayed: where they differ from the reference."""
    found = []
    for lengths in [(3, 5), (5, 3), (3, 5), (5, 3), (3, 5), (5, 3)]:
        _, _, pipeline, params, batch, target = sequences("gpipe", lengths)
        pipeline = Pipeline(pipeline.stages[:2], cases.mse)
        plan = pipeline.plan(Placement.loop(2), 2)
        if not found:
            step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=jobs.handler(), capture=True)
        own, params = pipeline.params_on(params, plan, rank), {s: params[s] for s in range(2)}
        reference = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=handlers.Reference())
        expected = jobs.expected_on(reference(params, batch, target), own, plan, rank, False)
        found.append(jobs.differences(step(own, batch, target), expected))
    return found, step.captured.graphs


def test_graphs_of_each_rank(pools):
    assert pools(2).run(captured) == [([[]] * 6, 2)] * 2


# Evaluation


def log_probabilities(rank, own=None):
    """Log-probabilities of sequences of several lengths, of two orders: where they differ from the reference."""
    found = []
    for order in (range(3), [2, 0, 1]):
        whole, _, plan = cases.make("attention", "gpipe", 2, 3)
        case = apart(whole, "attention", order)
        own = own or jobs.handler()
        runs = [
            fpipe.evaluate(Pipeline(case.pipeline.stages), plan, handler=each, gather=True, autodiff="eager")
            for each in (handlers.Reference(), own)
        ]
        params, batch, *_ = cases.own(case, plan, rank)
        expected, outputs = runs[0](case.params, case.batch), runs[1](params, batch)
        found += jobs.differences(outputs, expected)
        shapes = [(*x.shape, cases.VOCABULARY) for x in case.batch]
        if not isinstance(outputs, Microbatches) or [x.shape for x in outputs] != shapes:
            found.append(outputs)
    return found


def test_evaluation_returns_microbatches(pools):
    assert pools(2).run(log_probabilities) == [[], []]


def test_evaluation_in_one_process():
    _, plan, pipeline, params, batch, _ = sequences("gpipe", (3, 1, 2, 2))
    outputs = fpipe.evaluate(pipeline, plan, handler=handlers.Local())(params, batch)
    assert repr(outputs) == "Microbatches([float32[1, 3, 4], float32[1, 1, 4], float32[1, 2, 4], float32[1, 2, 4]])"
    torch.testing.assert_close(outputs[0], pipeline(params, batch[0]))
    assert isinstance(outputs[1:], Microbatches)


# Replicas


def over_replicas(rank, grid, weight):
    """Two steps on this process: where they differ from those of all replicas' microbatches in one process."""
    found = []
    for lengths in ((3, 5, 3, 4), (4, 3, 7, 3)):
        pipeline = Pipeline([affine] * 2, cases.mse)
        torch.manual_seed(0)
        params = {s: {"w": torch.randn(4, 4), "b": torch.randn(4)} for s in range(2)}
        rows = [1, 2, 3, 1]
        data = [[torch.randn(r, n, 4) for r, n in zip(rows, lengths, strict=True)] for _ in range(2)]
        plan = pipeline.plan(Placement.loop(2), 2, replicas=2)
        options = {"weight": (lambda t: t.numel()) if weight else None, "autodiff": "eager"}
        steps = [
            fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=own, **options)
            for own in (handlers.Reference(), handlers.Local(), replica_jobs.handler(grid))
        ]
        whole = [Microbatches(each) for each in data]
        expected, local = (step(params, *whole) for step in steps[:2])
        found += jobs.differences(local, expected)
        pp, dp = grid.mesh["pp"].get_local_rank(), grid.over.get_local_rank()
        own = pipeline.params_on(params, plan, pp)
        batch, target = (Microbatches(each[2 * dp : 2 * dp + 2]) for each in data)
        result = steps[2](own, batch if pp == 0 else None, target if pp == 1 else None)
        found += jobs.differences(result, jobs.expected_on(expected, own, plan, pp, False))
    return found


@pytest.mark.parametrize("weight", few([False, True], [True]))
def test_replicas_have_their_own(pools, weight):
    assert pools(4).run(over_replicas, replica_jobs.Grid("dp2 pp2"), weight) == [[]] * 4


# Refusals


def step_of(lengths=(3, 5), handler=None, **options):
    schedule, plan, pipeline, params, batch, target = sequences("zb_h1", lengths)
    pipeline = Pipeline(pipeline.stages[:2], cases.mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler or handlers.Local(), **options)
    return step, pipeline, plan, {s: params[s] for s in range(2)}, batch, target


WRONG = {
    "too few": ((0, slice(1)), r"the target has 1 Microbatches where the step runs 2: pass one for each"),
    "one of both": ((0, list), r"one of batch and target is Microbatches: pass both so, or the target as None"),
    "within a tree": (
        (lambda x: {"x": x}, lambda x: {"x": x}),
        r"batch\['x'\] is Microbatches: pass Microbatches of whole trees as the batch",
    ),
    "other rows": (
        (0, lambda each: Microbatches([each[0], torch.cat([each[1]] * 2)])),
        r"microbatch 1 of the batch has 1 row, that of the target 2: pass weight= or reduction='sum'",
    ),
    "rows unclear": (
        (lambda each: Microbatches([each[0], (each[1], torch.ones(7))]), 0),
        r"microbatch 1 of the batch has leaves of 1 and 7 rows, so the number of its samples is not known: pass wei",
    ),
    "no rows": (
        (lambda each: Microbatches([each[0], (each[1], torch.ones(()))]), 0),
        r"microbatch 1 of the batch has float32\[\], which has no axis 0 of samples: pass weight=",
    ),
    "empty": (
        (lambda each: Microbatches([x[:0] for x in each]), lambda each: Microbatches([x[:0] for x in each])),
        "microbatch 0 of the batch has no samples",
    ),
}


def changed(tree, change):
    if isinstance(change, slice):
        return tree[change]
    return change(tree) if callable(change) else tree


@pytest.mark.parametrize("name", WRONG)
def test_wrong_microbatches(name):
    changes, message = WRONG[name]
    step, _, _, params, *data = step_of()
    with pytest.raises(StageError, match=message):
        step(params, *map(changed, data, changes))


def test_rows_that_count_nothing_need_not_agree():
    _, _, pipeline, params, batch, target = sequences("gpipe", (3, 5))
    packed = Microbatches([{"x": x, "starts": torch.arange(n)} for n, x in enumerate(batch, 2)])
    pipeline = Pipeline([lambda p, b: affine(p, b["x"]), *pipeline.stages[1:]], cases.mse)
    plan = pipeline.plan(Placement.loop(4), 2)
    for options in ({"weight": torch.numel}, {"reduction": "sum"}, {"in_axes": ({"x": 0, "starts": None}, 0)}):
        steps = [
            fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, autodiff="eager", **options)
            for own in (handlers.Local(), handlers.Reference())
        ]
        assert jobs.differences(steps[0](params, packed, target), steps[1](params, packed, target)) == []


@pytest.mark.parametrize("wrong", [torch.zeros(2), {"x": 1}])
def test_microbatches_are_a_list(wrong):
    with pytest.raises(TypeError, match=f"a list of trees, one for each, not a {type(wrong).__name__}"):
        Microbatches(wrong)


def test_a_pipeline_is_called_with_a_batch():
    _, pipeline, _, params, batch, _ = step_of()
    with pytest.raises(TypeError, match="call it for each of the Microbatches"):
        pipeline(params, batch)


def refused(rank):
    """The errors on this rank, each followed by a step that works."""
    step, pipeline, plan, params, batch, target = step_of(handler=jobs.handler(), autodiff="eager")
    own, errors = pipeline.params_on(params, plan, rank), []
    last = Pipeline(pipeline.stages, lambda y, t: y.mean())
    alone = fpipe.value_and_grad(last, schedules.zb_h1, plan, handler=jobs.handler(), autodiff="eager")
    calls = [
        lambda: step(own, batch[:1] if rank == 0 else None, target if rank else None),
        lambda: step(own, batch if rank == 0 else None, torch.randn(2, 3, 4) if rank else None),
        lambda: step(own, doubled(batch) if rank == 0 else None, doubled(target[::-1])[::-1] if rank else None),
        lambda: step(own, batch if rank == 0 else None, doubled(target) if rank else None),
        lambda: alone(own, batch if rank == 0 else None),
    ]
    for call in calls:
        try:
            call()
        except (StageError, fpipe.TransportError) as error:
            errors.append(re.sub(r"rank \d", "rank", str(error)))
    loss, _ = step(own, batch, target)
    return errors, loss.item()


def doubled(target):
    return Microbatches([target[0], torch.cat([target[1]] * 2)])


REFUSED = [
    "the batch has 1 Microbatches where the step runs 2",
    "rank was given Microbatches, rank a batch or target to be split: pass Microbatches, or None, on every rank",
    "the ranks were given Microbatches in another order, or divided otherwise, rank 3 rows in all, rank 3 rows in all: "
    "every rank must be given (its part of) the same batch; where rows are no samples, pass weight= or reduction='sum'",
    "the ranks were given Microbatches of different sizes, rank 2 rows in all, rank 3 rows in all",
    "the losses of Microbatches are weighed by their rows, which a rank of the last stage was not given",
]


def test_every_rank_is_told(pools):
    (errors, loss), (others, same) = pools(2).run(refused)
    assert loss == same
    assert len(errors) == len(others) == len(REFUSED)
    for message, one, other in zip(REFUSED, errors, others, strict=True):
        assert message in one
        assert message in other


def astray(rank):
    """The errors of ranks in different steps, and how many numbers the steps after them exchange."""
    own, errors, counts = jobs.handler(), [], []
    step, pipeline, plan, params, batch, target = step_of(handler=own, autodiff="eager")
    _, _, _, _, *more = sequences("zb_h1", (3, 4, 5, 6, 7))

    def evaluation():
        return fpipe.evaluate(pipeline, pipeline.plan(Placement.loop(2), 5), handler=own, autodiff="eager")

    evaluate, params = evaluation(), pipeline.params_on(params, plan, rank)
    losses = [step(params, batch, target)[0], evaluate(params, *more)]
    for other in (lambda: evaluate(params, *more), evaluation):
        try:
            other() if rank else step(params, batch, target)
        except StageError as error:
            errors.append(str(error))
    collect = Connections.collect
    Connections.collect = lambda links, numbers: counts.append(len(numbers)) or collect(links, numbers)
    try:
        again = [step(params, batch, target)[0], evaluate(params, *more)]
        evaluate(params, *(each[::-1] for each in more))  # another order: the pairs of each microbatch travel, once
        evaluate(params, *(each[::-1] for each in more))
    finally:
        Connections.collect = collect
    return errors, counts, jobs.differences(again, losses)


def test_ranks_in_different_steps(pools):
    for errors, counts, differences in pools(2).run(astray):
        assert len(errors) == 2
        assert all("rank 1 came to another step than rank 0: call the same functions" in text for text in errors)
        # Of roll calls, and of ends of programs. The fifth is neither: two for the step and for each microbatch.
        assert counts == [13, 1, 13, 1, 13, 12, 1, 13, 1]
        assert differences == []
