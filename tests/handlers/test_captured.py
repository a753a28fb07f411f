"""A step that is captured as a graph has the bits of one that is not, call after call, or is refused."""

import contextlib
import copy
import dataclasses
import gc
import re
import warnings
import weakref

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe import Pipeline, Placement, Stage, StageError, handlers, interop, schedules
from fpipe.autodiff.eager import Eager
from fpipe.autodiff.traced import Traced
from fpipe.devices import Cpu
from fpipe.devices.tape import Tape
from fpipe.handlers.captured import Captured
from fpipe.handlers.distributed.activity import Markers
from fpipe.handlers.distributed.groups import Groups
from fpipe.handlers.protocol import Alone, Observer
from fpipe.stages.rng import seeded
from fpipe.tensorboard import Recorder
from tests.support import cases, jobs, models, stage_zoo, train_jobs
from tests.support.combinations import ALL, combined, few, one_in, sample, thorough
from tests.support.jobs import differences
from tests.support.oracle import finish, flat, wants
from tests.support.sharing import sharing
from tests.support.streams import Checker, RecordedDevice, Stream

CASES, SCHEDULES = cases.UNSLICED, [*cases.SCHEDULES]


def possible(name, schedule, m, way):
    return schedule not in cases.COPIED or (m % 2 == 0 and name != "modules")


def possible_over_gloo(name, schedule, m, ranks, way):
    """By default a case meets one schedule; transfers alone differ from `Local`'s graphs."""
    met = (CASES.index(name) + SCHEDULES.index(schedule)) % len(SCHEDULES) == 0
    return possible(name, schedule, m, way) and (ALL or met)


def changed(tree, i):
    """The tree with other numbers in every step."""
    return optree.tree_map(lambda x: x * (1 + i / 8) if is_float(x) else x, tree, namespace="fpipe")


def is_float(x):
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def pair(case, schedule, plan, way="everything", handler=None, **options):
    """A step, and the same step captured."""
    options = {"handler": handler or sharing(handlers.Local(), "pair"), **jobs.WAYS[way], **case.options, **options}
    return [fpipe.value_and_grad(case.pipeline, schedule, plan, capture=c, **options) for c in (False, True)]


def check_steps(case, plain, captured):
    """Four steps with other params, data, states and seeds; all results are compared at the end."""
    results, state = [], case.state
    for i in range(4):
        params, batch = changed((case.params, case.batch), i)
        rng = case.rng and (i, case.rng[1])
        expected = plain(params, batch, case.target, state=state, rng=rng)
        before = copy.deepcopy((params, batch, case.target, state))
        results.append((captured(params, batch, case.target, state=state, rng=rng), expected))
        assert differences((params, batch, case.target, state), before) == []
        state = state and expected[-1]
    assert [differences(*each) for each in results] == [[]] * 4


@one_in(4)
@combined(name=CASES, schedule=SCHEDULES, m=(2, 3), way=("everything", "eager", "nothing"), where=possible, singly=True)
def test_bits(name, schedule, m, way):
    case, order, plan = cases.make(name, schedule, 2, m, cases.rows(m))
    check_steps(case, *pair(case, order, plan, way, sharing(handlers.Local(), name)))


@one_in(3)
@combined(
    name=few(CASES, ("linear", "weighted", "modules")),
    schedule=SCHEDULES,
    m=(2, 3),
    ranks=few((2, 4), slice(1)),
    way=("everything", "eager"),
    where=possible_over_gloo,
    singly=True,
)
def test_bits_over_gloo(pools, name, schedule, m, ranks, way):
    assert pools(ranks).run(jobs.captured, name, schedule, m, ranks, way) == [[]] * ranks


@one_in(2)
@combined(
    name=sample(("linear", "tied", "dropout", "modules", "skip"), ("tied", "modules")),
    schedule=sample(("gpipe", "zb_v", "interleaved_zb"), ("gpipe", "zb_v")),
    optimizer=("sgd", "fused"),
    donate=(False, True),
    max_norm=(None, 0.1),
)
def test_bits_of_training_over_gloo(pools, name, schedule, optimizer, donate, max_norm):
    assert pools(2).run(train_jobs.train_captured, name, schedule, 3, 2, optimizer, donate, max_norm) == [[]] * 2


@one_in(3)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "ZeroDivisionError: division by zero"),
        ("reads the host", "StageError: the optimizer's update can't be captured: it reads a tensor on the host"),
    ],
)
def test_an_update_that_fails_on_one_rank_ends_the_step_on_all(pools, at, how, says):
    (first, unchanged), (second, unchanged_there) = pools(2).run(train_jobs.failing_update, at, how)
    assert (len(first), len(second), unchanged, unchanged_there) == (at + 1, at + 1, True, True)
    assert second[at].startswith(says)
    assert re.match(rf"TransportError: .*rank 1: {re.escape(says)}", first[at])


def test_a_stage_that_cannot_be_captured_is_refused_on_all_ranks(pools):
    first, second = pools(2).run(jobs.uncapturable)
    says = "rank 1, stage 1, microbatch 0: it can't be captured: it reads a tensor on the host"
    assert second.startswith(f"StageError: {says}")
    assert first.startswith("TransportError: ")
    assert says in first


def test_a_graph_that_goes_while_it_is_replayed_is_a_lost_peer(pools):
    first, second = pools(2).run(jobs.captured_reset)
    assert second.startswith("rank 1 can't go on: ")
    for text in (first, second):
        assert "rank 1 noticed it while a replayed step" in text


class Ended:
    """What ends, in order: graphs and groups."""

    asynchronous = True

    def __init__(self, log, name="groups"):
        self.log, self.name = log, name

    def reset(self):
        self.log.append(f"{self.name} are reset")

    def cut(self, groups):
        self.log.append(f"{groups} are cut")

    def close(self, groups):
        self.log.append(f"{groups} are closed")


@pytest.mark.parametrize("ends", ["close", "cut"])
def test_graphs_go_before_the_groups_that_they_hold(ends):
    log = []
    groups = Groups(Ended(log), Markers(Cpu()), 1.0)
    groups.edges[0, 1] = "an edge"
    graphs = [Ended(log, "graphs"), Ended(log, "dropped graphs")]
    for graph in graphs:
        groups.keep(graph)
    del graphs[1], graph
    getattr(groups, ends)()
    if ends == "close":
        assert log == ["graphs are reset", "['an edge'] are closed"]
        return
    assert sorted(log) == ["['an edge'] are cut", "graphs are reset"]  # at once: NCCL waits for its graphs to go
    late = Ended(log, "later graphs")
    groups.keep(late)
    assert log[-1] == "later graphs are reset"


def test_shapes_that_one_rank_sees_change_on_all(pools):
    shapes = [4, 4, 4, 6, 4, 6, 6, 4, 6]
    assert pools(2).run(jobs.captured_shapes, shapes) == [([], 2)] * 2


def test_ranks_forget_the_same_graphs(pools):
    shapes = [*[4] * 3, *[6] * 3, *[8] * 3, *[10] * 3, *[12] * 3, 4, 4, 4, 12]
    with_warnings = pools(2).run(jobs.captured_shapes, shapes)
    assert with_warnings == [([], 4)] * 2


@pytest.mark.parametrize(
    ("wrong", "says"), [("missing", "params has no entry for it"), ("sparse", r"the argument .* can't be captured")]
)
def test_wrong_arguments_of_one_rank_are_an_error_on_all_and_the_next_step_replays(pools, wrong, says):
    first, second = pools(2).run(jobs.captured_error, wrong)
    for results, kind in ((first, "TransportError"), (second, "StageError")):
        assert re.match(f"{kind}: .*{says}", results.pop(4))
        assert results == [0.0, 8.0, 16.0, 24.0, 40.0]


def test_a_rank_that_dies_before_a_replay_is_named(fresh_pool):
    outcomes = fresh_pool(3).outcomes(jobs.captured_loss, limit=30)
    assert outcomes[1].exitcode == 3
    for rank in (0, 2):
        assert f"rank {rank} can't go on: rank 1 " in outcomes[rank].value


@one_in(4)
@combined(
    name=("linear", "subtrees", "tied", "dropout", "modules", "weighted"),
    schedule=("gpipe", "zb_v", "interleaved_zb", "overlap"),
    optimizer=("sgd", "fused"),
    donate=(False, True),
    max_norm=(None, 0.1),
    singly=True,
)
def test_bits_of_training(name, schedule, optimizer, donate, max_norm):
    case, order, plan = cases.make(name, schedule, 2, 3, cases.rows(3))
    own = sharing(handlers.Local(), name)
    found = train_jobs.compare(own, case, order, plan, None, optimizer, donate, max_norm, capture=True)
    assert found == []


def linear(rows=8, m=2, schedule=schedules.one_f_one_b, **options):
    case = cases.built("linear", 2, rows)
    plan = case.pipeline.plan(Placement.loop(2), m)
    return case, *pair(case, schedule, plan, **options)


def counted(stages=2):
    """A pipeline of eager stages that count their calls."""
    calls = []

    def layer(p, x):
        calls.append(0)
        return torch.tanh(x @ p["w"] + p["b"])

    case = cases.built("linear", stages)
    return dataclasses.replace(case, pipeline=Pipeline([layer] * stages, cases.mse)), calls


def test_a_replay_calls_no_stage():
    case, calls = counted()
    plan = case.pipeline.plan(Placement.loop(2), 3)
    _, captured = pair(case, schedules.gpipe, plan, "eager")
    counts = []
    for _ in range(4):
        captured(case.params, case.batch, case.target)
        counts.append(len(calls))
    assert counts == [6, 12, 12, 12]


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_the_host_only_copies_arguments_and_results(monkeypatch):
    """With the tape's own calls left out, as a GPU runs a graph's, the number of operators depends on no stage."""
    counts = []
    for m in (2, 8):
        case, _, captured = linear(m=m)
        run = [captured(case.params, case.batch, case.target) for _ in range(2)]
        assert len(run) == 2
        with monkeypatch.context() as patch, Count() as count:
            patch.setattr(Tape, "replay", lambda self, seeds: None)
            captured(case.params, case.batch, case.target)
        counts.append(sorted(count.names))
    results = 5  # the loss, and two gradients for each stage
    assert counts[0] == counts[1] == ["_foreach_copy_"] * 2 + ["empty_strided"] * results


def test_a_call_copies_its_arguments_once():
    case, _, captured = linear()
    captured(case.params, case.batch, case.target)
    for _ in range(2):  # the one that captures, and a replay
        with Count() as count:
            captured(case.params, case.batch, case.target)
        assert count.names.count("_foreach_copy_") == 2  # all arguments, all results


class Streams:
    """A captured function on a device that checks the order of its streams."""

    def __init__(self, monkeypatch, waits=True):
        self.checker = Checker()
        device = RecordedDevice(self.checker)
        monkeypatch.setattr("fpipe.handlers.captured.device_of", lambda _: device)
        if not waits:
            monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
        self.captured = Captured(lambda x, _: (x * 2).tanh(), Alone())
        self.arguments, self.results = [torch.full((3,), float(i)) for i in range(6)], []

    def replay_on(self, *streams):
        self.results += [self.captured(self.arguments[0], None) for _ in range(2)]
        for stream, x in zip(streams, self.arguments, strict=False):
            self.checker.compute = stream
            with self.checker:
                self.results.append(self.captured(x, None))
        expected = [(x * 2).tanh() for x in (self.arguments[0], *self.arguments)]
        assert all(map(torch.equal, self.results[1:], expected))


@pytest.mark.parametrize("waits", [True, False])
def test_calls_on_other_streams_wait_for_each_other(monkeypatch, waits):
    streams = Streams(monkeypatch, waits)
    first, second = streams.checker.compute, Stream("second")
    streams.replay_on(first, second, second, first, second)
    assert (streams.checker.faults == []) is waits


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_a_graph_gives_up_is_used_by_no_stream(monkeypatch, waits):
    streams = Streams(monkeypatch, waits)
    first, second = streams.checker.compute, Stream("second")
    streams.replay_on(second)
    assert streams.checker.faults == []
    streams.captured.graphs.clear()
    streams.checker.compute = first
    streams.checker.sweep()
    assert (streams.checker.faults == []) is waits


def test_results_belong_to_the_caller():
    case, plain, captured = linear()
    steps = [captured(*changed((case.params, case.batch), i), case.target) for i in range(5)]
    copies = copy.deepcopy(steps)
    captured(*changed((case.params, case.batch), 9), case.target)
    assert differences(steps, copies) == []
    for i, found in enumerate(steps):
        assert differences(found, plain(*changed((case.params, case.batch), i), case.target)) == []
    memory = {x.untyped_storage().data_ptr() for x in optree.tree_leaves(steps)}
    assert len(memory) == len(optree.tree_leaves(steps)) == 25


@pytest.mark.parametrize("how", ["in place", "behind autograd's back", "by numpy"])
def test_an_argument_that_changed_in_place_is_read_anew(how):
    case, plain, captured = linear()
    shared = case.batch.numpy()
    for i in range(4):
        if how == "in place":
            case.batch.add_(i)
            case.params[0]["w"].add_(i)
        elif how == "by numpy":
            shared += i
        else:
            case.params[1]["b"].data.add_(i)
        arguments = case.params, case.batch, case.target
        assert differences(captured(*arguments), plain(*arguments)) == []


def test_shapes_that_change_and_come_back():
    case, plain, captured = linear(rows=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (16, 9, 16, 9, 16, 4, 9, 4, 4):
            part = case.params, case.batch[:rows], case.target[:rows]
            assert differences(captured(*part), plain(*part)) == []


def test_the_number_of_graphs_is_bounded(monkeypatch):
    graphs = []
    new_graph = Cpu.new_graph
    monkeypatch.setattr(Cpu, "new_graph", lambda *a: graphs.append(new_graph(*a)) or graphs[-1])
    captured = Captured(lambda x, _: x * 2, Alone(), limit=2)

    def call(*sizes):
        for size in sizes:
            assert torch.equal(captured(torch.ones(size), None), torch.full((size,), 2.0))
        return len(graphs)

    assert call(1, 1, 1) == 1
    assert call(2, 2, 1, 2) == 2
    with pytest.warns(UserWarning, match="more than 2 signatures, .* pass batches of equal shapes"):
        call(3)
    assert len(captured.graphs) == len(captured.needs) == 2
    assert call(3, 2, 3) == 3
    assert call(1, 1) == 4


def test_graphs_share_the_memory_of_equal_arguments():
    w = torch.ones(3)
    captured = Captured(lambda tree, _: tree["w"] * tree["x"].sum(), Alone())
    for size in (1, 2, 1, 2):
        assert torch.equal(captured({"w": w, "x": torch.ones(size)}, None), w * size)
    first, second = (graph.static for graph in captured.graphs.values())
    assert first[0] is second[0]
    assert first[1] is not second[1]
    assert first[0].data_ptr() != w.data_ptr()


def test_a_step_that_is_given_up_frees_its_graphs(monkeypatch):
    made, new_graph = [], Cpu.new_graph
    monkeypatch.setattr(Cpu, "new_graph", lambda *a: made.append(new_graph(*a)) or made[-1])
    case, _, captured = linear()
    for i in range(3):
        captured(case.params, case.batch, case.target)
        assert captured.captured.graphs == min(i, 1)
    graph = weakref.ref(made.pop())
    gc.collect()
    gc.disable()
    try:
        assert graph() is not None
        del captured
        assert graph() is None
    finally:
        gc.enable()


def test_weights_may_change_and_vanish():
    """Counts of tokens are read on the host before a replay: a microbatch without any adds nothing."""
    case = cases.built("weighted", 2, 8)
    plan = case.pipeline.plan(Placement.loop(2), 2)
    plain, captured = pair(case, schedules.zb_h1, plan)
    for i in range(9):
        mask = torch.rand(8, generator=torch.Generator().manual_seed(i)) < 0.7
        if i % 3 == 0:
            mask[:4] = False
        target = {**case.target, "mask": mask}
        found, expected = (step(case.params, case.batch, target) for step in (captured, plain))
        assert differences(found, expected) == []


@pytest.mark.parametrize("way", ["everything", "eager"])
def test_seeds_change_with_every_step(way):
    case = cases.built("dropout", 2, 8)
    plan = case.pipeline.plan(Placement.loop(2), 2)
    plain, captured = pair(case, schedules.zb_h1, plan, way)
    state = torch.get_rng_state()
    losses = []
    for rng in ((0, 0), (0, 1), (0, 2), (2**40, 0), (0, 2)):
        found, expected = (step(case.params, case.batch, case.target, rng=rng) for step in (captured, plain))
        assert differences(found, expected) == []
        losses.append(found[0].item())
    assert len(set(losses)) == 4
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_another_precision_is_captured_anew(matmul_precision):
    """A graph has the kernels of its capture."""
    case, plain, captured = linear()
    counts = []
    for precision in ("highest", "high", "highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        for _ in range(3):
            found, expected = (step(case.params, case.batch, case.target) for step in (captured, plain))
            assert differences(found, expected) == []
        counts.append(captured.captured.graphs)
    assert counts == [1, 2, 2, 3]


def test_other_settings_of_torch_are_another_signature():
    case, plain, captured = linear()
    for i in range(6):
        with torch.autocast("cpu", enabled=i % 2 == 0):
            found, expected = (step(case.params, case.batch, case.target) for step in (captured, plain))
        assert differences(found, expected) == []


def test_layouts_of_arguments():
    """Expanded, strided, transposed, conjugated and negated leaves, and an empty one."""

    def first(p, batch):
        rows = batch["expanded"].sum(1) + batch["strided"].sum(1) + batch["transposed"].sum(1)
        complex_rows = (batch["conj"] * batch["conj"]).real.sum(1) + batch["neg"].sum(1)
        return (rows + complex_rows + batch["empty"].sum())[:, None] * p

    pipeline = Pipeline([first, lambda p, x: x + p], lambda y, t: (y - t).square().mean())
    plan = pipeline.plan(Placement.loop(2), 2)
    options = {"handler": handlers.Local(), "in_axes": ({"empty": None, **dict.fromkeys(KINDS, 0)}, 0)}
    steps = [fpipe.value_and_grad(pipeline, schedules.gpipe, plan, capture=c, **options) for c in (False, True)]
    params = {0: torch.randn(1, 3).expand(4, 3)[0], 1: torch.randn(3)}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(8, 8, generator=generator)
        z = torch.complex(whole, whole.t().contiguous())
        batch = {
            "expanded": whole[:1].expand(8, 8),
            "strided": whole[:, ::3],
            "transposed": whole.t(),
            "conj": z.conj(),
            "neg": z.conj().imag,
            "empty": torch.empty(0, 2),
        }
        assert (batch["conj"].is_conj(), batch["neg"].is_neg()) == (True, True)
        found, expected = (step(params, batch, whole[:, :3]) for step in reversed(steps))
        assert differences(found, expected) == []


KINDS = ("expanded", "strided", "transposed", "conj", "neg")


def test_symbolic_sizes():
    case, plain, captured = linear(rows=16, m=3, dynamic=True)
    for rows in (16, 9, 16, 9, 9, 16):
        part = case.params, case.batch[:rows], case.target[:rows]
        assert differences(captured(*part), plain(*part)) == []


def test_one_device_for_all_ranks():
    case, plain, captured = linear(handler=handlers.Local(devices=["cpu", "cpu"]))
    for i in range(3):
        arguments = *changed((case.params, case.batch), i), case.target
        assert differences(captured(*arguments), plain(*arguments)) == []


# Training


@thorough
def test_a_model_with_everything():
    """A GPT as anyone writes it: split, tied, with a buffer and dropout, clipped, by a donated optimizer."""
    torch.manual_seed(0)
    model = models.TiedGPT(layers=2, dropout=0.2)
    tokens = torch.randint(11, (6, 6, 6))
    pipeline, params = interop.split(model, at=["layers.1"], example=tokens[0, :2], loss=cases.nll)
    plan = pipeline.plan(Placement.loop(2), 3)
    adamw = interop.optimizer(torch.optim.AdamW, lr=0.1, fused=True, donate=True)
    options = {"handler": handlers.Local(), "max_norm": 1.0}
    steps = [
        fpipe.train_step(pipeline, schedules.zb_h1, plan, adamw, capture=capture, **options)
        for capture in (False, True)
    ]
    trained = [(tree, adamw.init(tree)) for tree in (copy.deepcopy(params), copy.deepcopy(params))]
    for i, text in enumerate(tokens):
        results = [step(*own, text, text, rng=(0, i)) for step, own in zip(steps, trained, strict=True)]
        assert differences(*results) == []
        trained = [each[:2] for each in results]


def training(optimizer="fused", rows=8, **options):
    case = cases.built("linear", 2, rows)
    plan = case.pipeline.plan(Placement.loop(2), 2)
    own = train_jobs.OPTIMIZERS[optimizer](donate=True)
    step = fpipe.train_step(
        case.pipeline, schedules.zb_h1, plan, own, handler=handlers.Local(), capture=True, **options
    )
    apart = train_jobs.by_parts(case, schedules.zb_h1, plan, handlers.Local(), optimizer, None)
    return case, own.init, step, lambda *a: apart(*a, None, None, 0.1)


def test_donated_params_are_updated_where_they_are():
    case, init, step, apart = training()
    params, opt_state = copy.deepcopy(case.params), init(case.params)
    theirs = copy.deepcopy((params, opt_state))
    places = [x.data_ptr() for x in optree.tree_leaves(params)]
    for _ in range(5):
        params, opt_state, loss = step(params, opt_state, case.batch, case.target)
        *theirs, expected = apart(*theirs, case.batch, case.target)
        assert differences((params, opt_state, loss), (*theirs, expected)) == []
        assert [x.data_ptr() for x in optree.tree_leaves(params)] == places


def test_a_donated_result_may_be_pointed_elsewhere():
    """It is the caller's: what happens to it happens to no graph."""
    case, init, step, apart = training()
    params, opt_state = copy.deepcopy(case.params), init(case.params)
    theirs = copy.deepcopy((params, opt_state))
    for i in range(6):
        params, opt_state, loss = step(params, opt_state, case.batch, case.target)
        *theirs, expected = apart(*theirs, case.batch, case.target)
        assert differences((params, opt_state, loss), (*theirs, expected)) == []
        if i == 3:
            results, (params, opt_state) = (params, opt_state), optree.tree_map(torch.detach, (params, opt_state))
            for x in optree.tree_leaves(results):
                x.data = torch.zeros_like(x)


def test_a_step_trains_two_models_in_turn():
    """Each has memory of its own, which is what is donated: the graph of one does not write into the other's."""
    case, init, step, apart = training()
    models = [(changed(case.params, i), init(case.params)) for i in range(2)]
    theirs = copy.deepcopy(models)
    for i in (0, 1, 0, 1, 0, 0, 1, 1, 0):
        *models[i], loss = step(*models[i], case.batch, case.target)
        *theirs[i], expected = apart(*theirs[i], case.batch, case.target)
        assert differences((models, loss), (theirs, expected)) == []


def test_numbers_that_change_may_be_tensors():
    case, init, step, _ = training()
    _, _, plain, _ = training()
    ours, theirs = [(copy.deepcopy(case.params), init(case.params)) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(6):
            lr = 0.1 / (i + 1)
            *ours, loss = step(*ours, case.batch, case.target, lr=torch.tensor(lr, dtype=torch.float64))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                *theirs, expected = plain(*theirs, case.batch, case.target, lr=lr)
            assert differences((ours, loss), (theirs, expected)) == []


def test_a_frozen_parameter_is_the_callers_own():
    pipeline = Pipeline(
        [Stage(lambda p, x: x * p["w"] * p["f"], frozen=["f"]), lambda p, x: x + p],
        lambda y, t: (y - t).square().mean(),
    )
    plan = pipeline.plan(Placement.loop(2), 2)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    step = fpipe.train_step(pipeline, schedules.gpipe, plan, sgd, handler=handlers.Local(), capture=True)
    frozen = torch.tensor(3.0)
    params = {0: {"w": torch.tensor(2.0), "f": frozen}, 1: torch.tensor(1.0)}
    opt_state = sgd.init(params)
    for _ in range(4):
        params, opt_state, _ = step(params, opt_state, torch.arange(4.0), torch.zeros(4))
        assert params[0]["f"] is frozen


# Refused


def drops(p, x):
    return F.dropout(x * p, 0.5)


def branches(p, x):
    return x * p if x.sum() > 0 else x - p


def selects(p, x):
    return x * p * x[x > 1].sum()


CLOSED = torch.zeros(2)


def accumulates(p, x):
    CLOSED.add_(1)
    return x * p


@pytest.mark.parametrize("autodiff", ["auto", "eager"])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (drops, r"it draws random numbers by aten\.\w+\.\w+, which need a seed of their own in a graph: pass rng="),
        (branches, "it reads a tensor on the host"),
        (selects, "the shape of a result depends on the values of tensors"),
        (accumulates, "it writes by aten.add_.Tensor to a tensor from outside: pass and return it as state"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_line(function, says, autodiff):
    pipeline = Pipeline([lambda p, x: x + p, function], loss=cases.mse)
    plan = pipeline.plan(Placement.loop(2), 2)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1, donate=True)
    step = fpipe.train_step(
        pipeline, schedules.gpipe, plan, sgd, handler=handlers.Local(), capture=True, autodiff=autodiff
    )
    params = {0: torch.tensor(2.0), 1: torch.tensor(1.0)}
    with pytest.raises(StageError) as caught:
        step(params, sgd.init(params), torch.arange(4.0), torch.zeros(4))
    line = rf".* \(in .*test_captured\.py:\d+, {function.__name__}: .*\); or leave capture=True out"
    assert caught.match(r"rank 1, stage 1, microbatch 0: it can't be captured: " + says + line)
    with pytest.raises(StageError, match=says):
        step(params, sgd.init(params), torch.arange(4.0), torch.zeros(4))
    assert params == {0: 2.0, 1: 1.0}
    assert not CLOSED.any()


def test_an_update_that_reads_the_host_is_refused_and_nothing_is_updated():
    case, init, step, _ = training("adamw")
    params = copy.deepcopy(case.params)
    with pytest.raises(StageError, match=r"the optimizer's update can't be captured: .* give the optimizer fused=True"):
        step(params, init(params), case.batch, case.target)
    assert differences(params, case.params) == []


def test_an_error_while_a_step_is_captured_says_what_a_graph_forbids():
    calls = []

    def layer(p, x):
        calls.append(0)
        if len(calls) > 4:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x @ p["w"] + p["b"]

    case = cases.built("linear", 2, 8)
    case = dataclasses.replace(case, pipeline=Pipeline([layer] * 2, cases.mse))
    _, captured = pair(case, schedules.gpipe, case.pipeline.plan(Placement.loop(2), 2), "eager")
    captured(case.params, case.batch, case.target)
    says = (
        r"stream is capturing\. It is captured as a graph, and there nothing may wait for the device; or leave capture"
    )
    with pytest.raises(StageError, match=says):
        captured(case.params, case.batch, case.target)


def test_an_error_of_a_stage_leaves_the_graphs_as_they_were():
    def layer(p, x):
        if len(x) == 3:
            raise ValueError("no")
        return x @ p["w"] + p["b"]

    case = cases.built("linear", 2, 8)
    case = dataclasses.replace(case, pipeline=Pipeline([layer] * 2, cases.mse))
    plain, captured = pair(case, schedules.gpipe, case.pipeline.plan(Placement.loop(2), 2), "eager")
    for rows in (8, 8, 6, 8):
        part = case.params, case.batch[:rows], case.target[:rows]
        if rows == 6:
            with pytest.raises(StageError, match="rank 0, stage 0, microbatch 0: Forward raised ValueError: no"):
                captured(*part)
        else:
            assert differences(captured(*part), plain(*part)) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"params": {0: {}}}, "stage 1: params has no entry for it"),
        ({"params": []}, r"params must be \{stage: tree\}, not a list"),
        ({"batch": torch.zeros(1, 8)}, "too few for 2 microbatches"),
        ({"batch": {"x": object()}}, r"the argument .*\['x'\] can't be captured: a value of type builtins.object"),
        ({"batch": torch.zeros(8, 8, device="meta")}, "are on one device, not on cpu and meta: move them there"),
        ({"rng": 3}, r"rng must be \(seed, step\), as in rng=\(0, step\), not 3"),
        ({"state": {0: {}}}, "state has an entry for stage 0, which is not a stateful stage"),
    ],
)
def test_wrong_arguments_are_errors_with_and_without_graphs(change, says):
    case, _, captured = linear()
    good = {"params": case.params, "batch": case.batch, "target": case.target}
    for _ in range(3):
        with pytest.raises(StageError, match=says):
            captured(**{**good, **change})
        captured(**good)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"handler": handlers.Reference()},
            "needs a handler that captures its steps, as Local and Distributed, not Reference: leave",
        ),
        ({"handler": handlers.Local(["cpu", "meta"])}, "needs one device"),
        ({"compile": True}, "capture=True with compile=True"),
    ],
)
def test_options_that_do_not_go_together(options, says):
    case = cases.built("linear", 2)
    plan = case.pipeline.plan(Placement.loop(2), 2)
    with pytest.raises(ValueError, match=says):
        fpipe.value_and_grad(
            case.pipeline, schedules.gpipe, plan, **{"handler": handlers.Local(), "capture": True, **options}
        )


def test_a_recorder_is_refused(tmp_path):
    case = cases.built("linear", 2)
    plan = case.pipeline.plan(Placement.loop(2), 2)
    with Recorder(tmp_path) as recorder, pytest.raises(ValueError, match="an observer of effects"):
        pair(case, schedules.gpipe, plan, observe=recorder)


class Losses(Observer):
    def __init__(self):
        self.begun, self.losses = 0, []

    def on_step_begin(self):
        self.begun += 1

    def on_step_end(self, outcome):
        self.losses.append(outcome.loss)


def test_an_observer_of_steps_sees_every_step():
    losses = Losses()
    case = cases.built("linear", 2, 8)
    plan = case.pipeline.plan(Placement.loop(2), 2)
    step = fpipe.value_and_grad(
        case.pipeline, schedules.gpipe, plan, handler=handlers.Local(), capture=True, observe=losses
    )
    results = [step(*changed((case.params, case.batch), i), case.target)[0] for i in range(4)]
    assert losses.begun == 4
    assert losses.losses == results


# Stages of every kind


def of_zoo(example, piece, split, m):
    """One microbatch through a stage as a function of trees, and its arguments."""
    part = stage_zoo.microbatch(example, m)
    arguments = {"params": changed(part.params, m), "state": part.state, "sources": part.sources, "data": part.data}

    def function(tree, seeder):
        given = dataclasses.replace(part, **tree)
        with contextlib.nullcontext() if seeder is None else seeder(0, 0):
            forward = piece.forward(piece.prepare(tree["params"]), given.state, flat(given), given.data, keep=True)
        found = finish(piece, forward, half, split)
        results = found.outputs, found.state, list(found.weights), found.inputs
        return stage_zoo.tensors_mapped(torch.detach, results)

    return function, arguments


def half(outputs):
    """Cotangents that draw nothing."""
    return [x.detach() * 0.5 if wants(x) else None for x in outputs]


def drawn_again(name, kind):
    """Whether the backward draws anew: eager autograd runs a checkpoint's forward again."""
    return kind == "eager" and name in {
        "checkpoint_with_dropout",
        "checkpoints_in_a_row_with_dropout",
        "checkpoints_that_draw_alike",
        "checkpoint_that_draws_twice",
        "checkpoint_in_a_checkpoint",
        "checkpoint_beside_what_is_unused",
        "selective_dropout",
        "autocast_checkpoint",
    }


@one_in(4)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("name", "kind"),
    few(
        [(name, kind) for i, name in enumerate(stage_zoo.EXAMPLES) for kind in ("eager", "graph") if ALL or i % 4 == 0],
        slice(None, None, 3),
    ),
)
def test_stages_of_every_kind(name, kind):
    example = stage_zoo.make(name)
    piece = Eager(example.stage) if kind == "eager" else Traced(example.stage, fallback=False)
    split = kind == "graph" or not name.startswith("selective")
    captured = Captured(of_zoo(example, piece, split, 0)[0], Alone())
    reads_host = (name, kind) == ("experts_dense", "eager")  # one_hot checks its argument on the CPU
    if reads_host or drawn_again(name, kind):
        with pytest.raises(
            StageError, match="reads a tensor on the host" if reads_host else "draw in the forward only"
        ):
            captured(of_zoo(example, piece, split, 0)[1], (0, 0))
        return
    results = []
    for m in (0, 1, 2, 0):
        function, arguments = of_zoo(example, piece, split, m)
        found = captured(arguments, (0, m))
        results.append((found, function(arguments, lambda s, i, m=m: seeded((0, m), s, i))))
    assert [differences(*each) for each in results] == [[]] * 4
