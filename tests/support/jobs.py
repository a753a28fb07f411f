"""What the ranks of a pool are asked to do."""

from __future__ import annotations

import functools
import os
import warnings
from unittest.mock import patch

import optree
import torch

import fpipe
from fpipe import handlers, interop, schedules
from fpipe.devices import Cpu
from tests.support import cases
from tests.support.policies import POLICIES
from tests.support.sharing import sharing


def place(rank, kind):
    """The device of a rank's job, "cpu" or "cuda". Ranks share the GPUs there are, and compute deterministically."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    return device


def handler(kind="cpu"):
    """One handler for all jobs of this process on a kind of device: its connections are made once."""
    return _handler(kind)


@functools.cache
def _handler(kind):
    if kind == "cpu":
        return handlers.Distributed(timeout=30)
    return handlers.Distributed(device=torch.device("cuda", torch.cuda.current_device()), timeout=60)


def differences(found, expected):
    """Where two trees are not equal in bits: paths, or nothing."""
    none = {"none_is_leaf": True, "namespace": "fpipe"}
    names = optree.tree_paths(expected, **none)
    pairs = zip(names, optree.tree_leaves(found, **none), optree.tree_leaves(expected, **none), strict=True)
    return [name for name, a, b in pairs if not same(a, b)]


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
            return False
        return torch.equal(bits(a), bits(b))
    return a == b


def bits(x):
    """So that -0.0 is not 0.0, and a NaN is itself."""
    return x.detach().resolve_conj().resolve_neg().flatten().contiguous().view(torch.uint8)


def expected_on(result, params, plan, rank, stateful):
    """The part of the reference's result that one rank is to have."""
    loss, grads, *state = result
    held = {s: {k: grads[s][k] for k in tree} for s, tree in params.items()}
    states = [{s: t for s, t in state[0].items() if s in plan.stages_on(rank)}] if stateful else []
    return (loss, held, *states)


WAYS = {"eager": {"autodiff": "eager"}} | {
    name: {"autodiff": "graph", "policy": policy}
    for name, policy in {**POLICIES, "by stage": {0: POLICIES["nothing"], 1: POLICIES["cheap"]}}.items()
}
"""Options of a step by the name of the policy, or of eager autograd."""


def train(rank, name, schedule, microbatches, ranks, way="everything", kind="cpu"):
    """Two steps on this rank against the reference on the same device: where they differ."""
    device = place(rank, kind)
    case, generator, plan = cases.make(name, schedule, ranks, microbatches, cases.rows(microbatches))
    case = cases.on_device(case, device)
    params, batch, target, state = cases.own(case, plan, rank)
    expected = expected_on(cases.oracle(name, plan, device), params, plan, rank, case.state is not None)
    own = sharing(handler(kind), name)
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, **WAYS[way], **case.options)
    before = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (params, batch, target, state))
    found = []
    for _ in range(2):  # the first exchanges signatures, the second knows them
        found += differences(step(params, batch, target, state=state, rng=case.rng), expected)
    return found + [("arguments", *path) for path in differences((params, batch, target, state), before)]


def evaluate_gathered(rank, name, ranks, microbatches, kind="cpu"):
    """Outputs on this rank, of two runs, against the reference's: where they differ."""
    device = place(rank, kind)
    case, _, plan = cases.make(name, "gpipe", ranks, microbatches)
    case = cases.on_device(case, device)
    params, batch, _, state = cases.own(case, plan, rank)
    expected = fpipe.evaluate(case.pipeline, plan, handler=handlers.Reference())
    own = sharing(handler(kind), name)
    run = fpipe.evaluate(case.pipeline, plan, handler=own, gather=True, autodiff="eager")
    whole = expected(case.params, case.batch, state=case.state)
    return [d for _ in range(2) for d in differences(run(params, batch, state=state), whole)]


def evaluate_alone(rank, ranks):
    case, _, plan = cases.make("linear", "gpipe", ranks, 2)
    params, batch, *_ = cases.own(case, plan, rank)
    outputs = fpipe.evaluate(case.pipeline, plan, handler=handler())(params, batch)
    return "nothing" if outputs is None else "outputs"


def own_communication(rank, ranks, microbatches):
    """A schedule that sends and receives by itself: where two steps differ from the reference."""
    case, _, plan = cases.make("tied", "gpipe", ranks, microbatches)
    params, batch, target, _ = cases.own(case, plan, rank)
    expected = expected_on(cases.reference(case, cases.talking, plan), params, plan, rank, False)
    step = fpipe.value_and_grad(case.pipeline, cases.talking, plan, handler=sharing(handler(), "tied"))
    return [d for _ in range(2) for d in differences(step(params, batch, target), expected)]


def shapes_change(rank, ranks, autodiff, kind="cpu"):
    """Steps of different shapes, each seen twice: where they differ from the reference."""
    device = place(rank, kind)
    case, schedule, plan = cases.make("attention", "interleaved_1f1b", ranks, 3)
    case = cases.on_device(case, device)
    own = sharing(handler(kind), "attention")
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=own, autodiff=autodiff)
    params, *_ = cases.own(case, plan, rank)
    found = []
    for rows in (16, 7, 16, 7, 3):
        part = cases.Case(case.pipeline, case.params, case.batch[:rows], case.target[:rows])
        _, batch, target, _ = cases.own(part, plan, rank)
        expected = expected_on(cases.reference(part, schedule, plan), params, plan, rank, False)
        found += differences(step(params, batch, target), expected)
    return found


def sequences_change(rank, ranks, schedule, dynamic):
    """Steps of sequences of other lengths: where they differ from the reference, and how often specs were sent."""
    from fpipe.handlers.distributed.connections import Connections

    told, tell = [], Connections.send_bytes
    case, generator, plan = cases.make("attention", schedule, ranks, 2, rows=4)
    options = {"autodiff": "graph", "dynamic": True} if dynamic else {"autodiff": "eager"}
    own = sharing(handler(), "attention")
    step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=own, **options)
    params, *_ = cases.own(case, plan, rank)
    found, counts = [], []
    Connections.send_bytes = lambda links, text, target: told.append(text) or tell(links, text, target)
    try:
        for length in (5, 3, 5, 4, 3):
            part = cases.Case(case.pipeline, case.params, case.batch[:, :length], case.target[:, :length])
            _, batch, target, _ = cases.own(part, plan, rank)
            expected = expected_on(cases.reference(part, generator, plan), params, plan, rank, False)
            found += differences(step(params, batch, target), expected)
            counts.append(len(told))
            told.clear()
    finally:
        Connections.send_bytes = tell
    once, each = signatures_sent(generator, plan, rank)
    return found, counts == [once + sum(each), sum(each), 0, sum(each), 0]


def signatures_sent(schedule, plan, rank):
    """How many signatures a rank sends once, and for each microbatch in the first step of its kind."""
    sends = [e for e in fpipe.lower(schedule, plan)[rank] if isinstance(e, fpipe.effects.Send)]
    microbatches = [send.value.microbatch for send in sends if hasattr(send.value, "microbatch")]
    return len(sends) - len(microbatches), [microbatches.count(m) for m in range(plan.microbatches)]


def rows_known_elsewhere(rank, ranks):
    """The last stage has neither batch nor target, and the microbatches are uneven."""
    pipeline = fpipe.Pipeline([lambda p, x: x * p, *[lambda p, x: x + p] * (ranks - 2), lambda p, x: (x * p).mean()])
    params = {s: torch.tensor(1.5 + s, dtype=torch.float64) for s in range(ranks)}
    x = torch.arange(7, dtype=torch.float64)
    plan = pipeline.plan(fpipe.Placement.loop(ranks), 3)
    step = fpipe.value_and_grad(pipeline, fpipe.schedules.one_f_one_b, plan, handler=handler())
    loss, _ = step(pipeline.params_on(params, plan, rank), x if rank == 0 else None)
    torch.testing.assert_close(loss, pipeline(params, x), rtol=1e-14, atol=0)
    return loss.item()


def beside_each_other(rank, ranks):
    """Two pipelines over the two rows of a DeviceMesh, with different data: where they differ from the reference."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "pipeline"))
    case, schedule, plan = cases.make("attention", "interleaved_1f1b", ranks // 2, 4)
    row, place = mesh.get_coordinate()
    case.batch = case.batch.roll(row, 0)
    params, batch, target, _ = cases.own(case, plan, place)
    expected = expected_on(cases.reference(case, schedule, plan), params, plan, place, False)
    own = handlers.Distributed(mesh["pipeline"], timeout=30)
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=sharing(own, "attention"))
    return [d for _ in range(2) for d in differences(step(params, batch, target), expected)]


def odd_values(rank, ranks, autodiff, kind="cpu"):
    """Tensors that gloo finds hard, and trees of every kind, from stage to stage."""
    device = place(rank, kind)
    from tests.support.trees import Pair, Record

    def first(p, x):
        return {
            "z": Record(Pair(x * p, x.T), [x.bool(), x.bfloat16()], ("text", 3, None, 2.5)),
            "a": (x[:0], x.sum(), torch.tensor(7, device=x.device), x[:, ::2], torch.float16),
        }

    def last(p, v):
        record, (empty, total, seven, strided, dtype) = v["z"], v["a"]
        assert list(v) == ["z", "a"]
        assert isinstance(record, Record)
        assert isinstance(record.pair, Pair)
        assert record.note == ("text", 3, None, 2.5)
        assert (empty.shape, empty.requires_grad, dtype) == ((0, 4), False, torch.float16)
        mixed = record.pair.left + record.pair.right.T + record.many[0] + record.many[1].float()
        return ((mixed[:, ::2] + strided) * p * seven + total).sum()

    pipeline = fpipe.Pipeline([first, *[lambda p, v: v] * (ranks - 2), last])
    params = {s: torch.tensor(2.0, device=device) for s in range(ranks)}
    plan = pipeline.plan(fpipe.Placement.loop(ranks), 2)
    x = torch.arange(16.0, device=device).view(4, 4)
    arguments = {"reduction": "sum", "autodiff": autodiff}
    whole = fpipe.value_and_grad(pipeline, fpipe.schedules.gpipe, plan, handler=handlers.Reference(), **arguments)
    step = fpipe.value_and_grad(pipeline, fpipe.schedules.gpipe, plan, handler=handler(kind), **arguments)
    own = pipeline.params_on(params, plan, rank)
    expected = expected_on_scalars(whole(params, x), own)
    return [d for _ in range(2) for d in differences(step(own, x if rank == 0 else None), expected)]


def expected_on_scalars(result, params):
    loss, grads = result
    return loss, {stage: grads[stage] for stage in params}


def unused_gradients(rank, ranks, autodiff):
    """A consumer that gives no gradient for a leaf that wants one: the leaf's own backward must not be run."""
    pipeline = fpipe.Pipeline(
        [
            lambda p, x: {"used": x * p, "idle": torch.sqrt(x * 0 * p)},  # its derivative is not finite
            *[lambda p, v: v] * (ranks - 2),
            lambda p, v: (v["used"] * p).sum(),
        ]
    )
    params = {s: torch.tensor(2.0) for s in range(ranks)}
    plan = pipeline.plan(fpipe.Placement.loop(ranks), 2)
    options = {"reduction": "sum", "autodiff": autodiff}
    step = fpipe.value_and_grad(pipeline, fpipe.schedules.gpipe, plan, handler=handler(), **options)
    own = pipeline.params_on(params, plan, rank)
    found = [step(own, torch.ones(4) if rank == 0 else None)[1] for _ in range(2)]
    return [float(grads[rank]) for grads in found]


def sizes_of_data(rank, ranks):
    """Stages whose outputs' sizes depend on data: where steps differ from the reference, and signatures in each."""
    from fpipe.handlers.distributed.connections import Connections

    pipeline = fpipe.Pipeline(
        [
            lambda p, x: (x * p["w"])[x > 0],
            *[lambda p, x: x[x > 1] + p["w"]] * (ranks - 2),
            lambda p, x: (x * p["w"]).sum(),
        ]
    )
    params = {s: {"w": torch.tensor(2.0)} for s in range(ranks)}
    plan = pipeline.plan(fpipe.Placement.loop(ranks), 4)
    options = {"reduction": "sum", "autodiff": "eager"}
    step = fpipe.value_and_grad(pipeline, fpipe.schedules.one_f_one_b, plan, handler=handler(), **options)
    reference = fpipe.value_and_grad(
        pipeline, fpipe.schedules.one_f_one_b, plan, handler=fpipe.handlers.Reference(), **options
    )
    own = pipeline.params_on(params, plan, rank)
    found, counts, send = [], [], Connections.send_bytes
    Connections.send_bytes = lambda links, text, target: counts.append(text) or send(links, text, target)
    try:
        for seed in range(3):
            batch = torch.randn(16, generator=torch.Generator().manual_seed(seed))
            expected = expected_on(reference(params, batch), own, plan, rank, False)
            found += differences(step(own, batch), expected)
    finally:
        Connections.send_bytes = send
    return found, len(counts)


def sends_held(rank, ranks, microbatches):
    """The most values that this rank held for its peers at once, in a step of 1F1B."""
    from fpipe.handlers.distributed.channels import Channels

    most, sender = 0, Channels.sender

    def counting(routes, value, source, target):
        send = sender(routes, value, source, target)

        def counted(payload):
            nonlocal most
            send(payload)
            most = max(most, len(routes.sent[target].in_flight))

        return counted

    Channels.sender = counting
    try:
        case, schedule, plan = cases.make("linear", "one_f_one_b", ranks, microbatches)
        step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handlers.Distributed(timeout=30))
    finally:
        Channels.sender = sender
    params, batch, target, _ = cases.own(case, plan, rank)
    step(params, batch, target)
    step(params, batch, target)
    return most


def gradients_come_and_go(rank, ranks, autodiff):
    """A consumer reads a part of a value in some microbatches and steps, and not in others: (differences, warnings).

    By graphs it decides by the number of rows, else by their values, which graphs can't.
    """

    def first(p, x):
        return (x * p, torch.sqrt(x * p))

    def last(p, v):
        both = len(v[0]) > 1 if autodiff == "graph" else v[0].sum() > 4
        return (v[0] + v[1] if both else v[0]).sum() * p

    pipeline = fpipe.Pipeline([first, *[lambda p, v: v] * (ranks - 2), last])
    plan = pipeline.plan(fpipe.Placement.loop(ranks), 2)
    params = {s: torch.tensor(1.5) for s in range(ranks)}
    own = pipeline.params_on(params, plan, rank)
    steps = [
        fpipe.value_and_grad(pipeline, fpipe.schedules.gpipe, plan, handler=h, reduction="sum", autodiff=autodiff)
        for h in (handler(), handlers.Reference())
    ]
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in ([1, 1, 5, 6], [5, 6, 1], [5, 6, 7, 8], [1, 1, 1, 1], [1, 1, 1], [2, 3]):
            x = torch.tensor(rows, dtype=torch.float32)
            expected = expected_on_scalars(steps[1](params, x), own)
            found += differences(steps[0](own, x), expected)
    return found, [str(warning.message) for warning in told]


def kept_alive(rank, ranks, autodiff):
    """How many of the arguments of a step still live when its caller has dropped them."""
    import gc
    import weakref

    case, schedule, plan = cases.make("attention", "interleaved_1f1b", ranks, 4)
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handler(), autodiff=autodiff)
    arguments = optree.tree_map(torch.clone, cases.own(case, plan, rank)[:3])
    given = [weakref.ref(leaf) for leaf in optree.tree_leaves(arguments)]
    gc.collect()
    gc.disable()
    try:
        step(*arguments)
        del arguments
        return sum(ref() is not None for ref in given)
    finally:
        gc.enable()


class OneTooMany(handlers.Gloo):
    """gloo, but a rank in the middle may have two edges."""

    def check(self, device, rank, edges, lanes, owner):
        return f"rank {rank} has too many" if sum(rank in edge for edge in edges) > 2 else None


def refused_edges(rank):
    """The error of a program that one rank can't have the edges of, and whether a smaller one runs after it."""
    own = handlers.Distributed(timeout=10, backend=OneTooMany())
    pipeline = fpipe.Pipeline([lambda p, x: x * p] * 3, loss=lambda y, t: y.sum())
    plan = pipeline.plan(fpipe.Placement.loop(3), 2)
    text = ""
    try:
        fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own)
    except fpipe.TransportError as error:
        text = f"{type(error).__name__}: {error}"
    run = fpipe.evaluate(pipeline, plan, handler=own, gather=True)  # forward alone: an edge each way less
    return text, run({rank: torch.tensor(2.0)}, torch.ones(4)).tolist() == [8.0] * 4


def record(rank, logdir, kind="cpu"):
    """Three steps, of which the second and the third are captured."""
    from fpipe.tensorboard import Recorder  # a machine that only checks a GPU may have no TensorBoard

    device = place(rank, kind)
    case, generator, plan = cases.make("attention", "one_f_one_b", 2, 4)
    params, batch, target, _ = cases.own(cases.on_device(case, device), plan, rank)
    with Recorder(logdir, every=1) as recorder:
        step = fpipe.value_and_grad(case.pipeline, generator, plan, handler=handler(kind), observe=recorder)
        for _ in range(3):
            step(params, batch, target)


def train_gpt(rank, names, ranks, microbatches, pipelines, data, expected):
    """Steps of the example's GPT on this rank under each schedule: where they differ from what the reference came to.

    Args:
        pipelines: (pipeline, params) by the number of stages.
        expected: `gpt_steps` by the plan.
    """
    found = []
    for name in names:
        plan = schedules.CATALOGUE[name].plan(ranks, microbatches)
        pipeline, params = pipelines[plan.stages]
        own, over = pipeline.params_on(params, plan, rank), sharing(handler(), "gpt", plan.stages)
        losses, *trees = expected[plan]
        theirs = (losses, *({s: tree[s] for s in own} for tree in trees))
        found += [(name, *at) for at in differences(gpt_steps(over, name, plan, pipeline, own, data), theirs)]
    return found


def gpt_steps(handler, name, plan, pipeline, params, data, autodiff="graph"):
    """(losses, last gradients, params) of a step with each batch."""
    schedule, adamw = schedules.CATALOGUE[name].schedule(plan), interop.optimizer(torch.optim.AdamW, lr=0.1)
    step = fpipe.value_and_grad(pipeline, schedule, plan, handler=handler, autodiff=autodiff)
    state, losses = adamw.init(params), []
    for i, (batch, target) in enumerate(data):
        loss, grads = step(params, batch, target, rng=(0, i))
        params, state = adamw.update(grads, state, params)
        losses.append(loss)
    return losses, grads, params


def captured(rank, name, schedule, microbatches, ranks, way="everything", kind="cpu", capture=True):
    """Five steps with other params, data and seeds, captured, against the same steps not captured: differences."""
    device = place(rank, kind)
    case, generator, plan = cases.make(name, schedule, ranks, microbatches, cases.rows(microbatches))
    params, batch, target, state = cases.own(cases.on_device(case, device), plan, rank)
    own = sharing(handler(kind), name)
    options = {"handler": own, **WAYS[way], **case.options}
    plain, step = (fpipe.value_and_grad(case.pipeline, generator, plan, capture=c, **options) for c in (False, capture))
    results = []
    for i in range(5):
        rng = case.rng and (i, case.rng[1])
        inputs = optree.tree_map(lambda x, i=i: scaled(x, 1 + i / 8), (params, batch), namespace="fpipe")
        expected = plain(*inputs, target, state=state, rng=rng)
        results.append((step(*inputs, target, state=state, rng=rng), expected))
        state = state and expected[-1]
    return [difference for found, expected in results for difference in differences(found, expected)]


def scaled(x, factor):
    return x * factor if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) else x


def captured_shapes(rank, shapes):
    """Steps with batches of other shapes, which rank 0 alone sees: differences, and how many graphs each rank has."""
    pipeline = fpipe.Pipeline([lambda p, x: torch.tanh(x * p)] * 2, loss=lambda y, t: y.square().mean())
    plan = pipeline.plan(fpipe.Placement.loop(2), 2)
    own = handlers.Distributed(timeout=20)
    plain, step = (
        fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=own, capture=c) for c in (False, True)
    )
    params, found = {rank: torch.tensor(0.5 + rank)}, []
    for i, rows in enumerate(shapes):
        batch = torch.arange(rows, dtype=torch.float32) + i if rank == 0 else None
        found += differences(step(params, batch), plain(params, batch))
    return found, step.captured.graphs


WRONG = {"missing": {}, "sparse": {1: {"w": torch.ones(1).to_sparse()}}}


def captured_error(rank, wrong):
    """A step whose arguments are wrong on rank 1 once, when others would replay it: errors, and the losses."""
    pipeline = fpipe.Pipeline([lambda p, x: x * p["w"]] * 2, loss=lambda y, t: y.sum())
    plan = pipeline.plan(fpipe.Placement.loop(2), 2)
    step = fpipe.value_and_grad(
        pipeline, schedules.one_f_one_b, plan, handler=handlers.Distributed(timeout=20), capture=True
    )
    params, results = {rank: {"w": torch.tensor(2.0)}}, []
    for i in range(6):
        given = WRONG[wrong] if rank == 1 and i == 4 else params
        try:
            results.append(step(given, torch.ones(4) * i)[0].item())
        except (fpipe.StageError, fpipe.TransportError) as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def branches(p, x):
    return x * p if x.sum() > 0 else x


def uncapturable(rank):
    """The error of a step whose stage on rank 1 can't be captured."""
    pipeline = fpipe.Pipeline([lambda p, x: x * p, branches], loss=lambda y, t: y.sum())
    plan = pipeline.plan(fpipe.Placement.loop(2), 2)
    own = handlers.Distributed(timeout=10)
    step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, capture=True)
    try:
        step({rank: torch.tensor(2.0)}, torch.ones(4))
    except (fpipe.StageError, fpipe.TransportError) as error:
        return f"{type(error).__name__}: {error}"


def captured_reset(rank):
    """The error of a step whose graph on rank 1 is reset when it would be replayed, as the watchdog does."""
    pipeline = fpipe.Pipeline([lambda p, x: x * p] * 2, loss=lambda y, t: y.sum())
    plan = pipeline.plan(fpipe.Placement.loop(2), 2)
    own, graphs, new_graph = handlers.Distributed(timeout=5), [], Cpu.new_graph
    with patch.object(Cpu, "new_graph", lambda *a: graphs.append(new_graph(*a)) or graphs[-1]):
        step = fpipe.value_and_grad(pipeline, schedules.gpipe, plan, handler=own, capture=True)
        for _ in range(3):
            step({rank: torch.tensor(2.0)}, torch.ones(4))
    if rank == 1:
        graphs[0].reset()
    try:
        step({rank: torch.tensor(2.0)}, torch.ones(4))
    except fpipe.TransportError as error:
        return str(error)


def captured_loss(rank):
    """Rank 1 dies before a step that the others would replay, or while they do."""
    pipeline = fpipe.Pipeline([lambda p, x: x * p] * 3, loss=lambda y, t: y.sum())
    plan = pipeline.plan(fpipe.Placement.loop(3), 2)
    own = handlers.Distributed(timeout=5)
    step = fpipe.value_and_grad(pipeline, schedules.one_f_one_b, plan, handler=own, capture=True)
    for _ in range(4):
        step({rank: torch.tensor(2.0)}, torch.ones(4))
    if rank == 1:
        own.replays.agree = lambda *arguments: os._exit(3)
    try:
        step({rank: torch.tensor(2.0)}, torch.ones(4))
    except fpipe.TransportError as error:
        return str(error)
