"""The gradient's norm over the whole pipeline: torch's own, and the same bits wherever the stages are."""

import copy
import math
import re
import time
from pathlib import Path

import optree
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import fpipe
from fpipe import Placement, Plan, TransportError, handlers, interop, schedules, transforms
from fpipe.stages.sharding import placed_alike
from fpipe.training.norms import squares
from tests.support import cases
from tests.support.combinations import one_in
from tests.support.jobs import differences, handler
from tests.support.shards import Replicated, mesh_of, whole

ALONE = Plan(Placement.loop(2), 1)
PLACES = ["gpipe", "one_f_one_b", "zb_h1", "interleaved_1f1b", "gpipe_v", "zb_v", "dualpipe_v"]


def made(name, schedule):
    """A case of four stages."""
    ranks = 2 if cases.SCHEDULES[schedule][1](2).stages == 4 else 4
    return cases.make(name, schedule, ranks, 4)


def clipped(case, schedule, plan, handler, max_norm=0.5):
    """Gradients of one step after clipping, and the norm before, on the ranks that are played here."""
    step = fpipe.value_and_grad(case.pipeline, schedule, plan, handler=handler, autodiff="eager", **case.options)
    params, batch, target, state = case.params, case.batch, case.target, case.state
    if len(ranks := handler.ranks(plan)) == 1 < plan.ranks:
        params, batch, target, state = cases.own(case, plan, *ranks)
    _, grads, *_ = step(params, batch, target, state=state, rng=case.rng)
    return fpipe.clip_by_global_norm(grads, max_norm, plan, handler=handler)


def over_gloo(rank, name, schedule):
    """Where what a rank has differs from what one process has."""
    case, generator, plan = made(name, schedule)
    grads, norm = clipped(case, generator, plan, handler())
    whole, expected = clipped(case, generator, plan, handlers.Reference())
    own = {s: {k: whole[s][k] for k in tree} for s, tree in grads.items()}
    return differences((grads, norm), (own, expected))


def weight_and_norm(max_norm):
    """A model of tied and frozen parameters, clipped by torch and by us."""
    torch.manual_seed(0)
    modules = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)]
    modules[3].weight = modules[0].weight
    modules[1].bias.requires_grad_(False)
    pipeline, params = interop.from_modules(modules, loss=cases.mse)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    plan = pipeline.plan(Placement.v(2), 2)
    step = fpipe.value_and_grad(pipeline, schedules.zb_v, plan, handler=handlers.Local())
    _, grads = step(params, x, y)
    found = fpipe.clip_by_global_norm(grads, max_norm, plan, handler=handlers.Local())
    whole = nn.Sequential(*modules)
    cases.mse(whole(x), y).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
    theirs = {s: {n: modules[s].get_parameter(n).grad for n in tree} for s, tree in params.items()}
    return found, (theirs, norm), grads


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clipping_is_torchs_of_the_unsplit_model(max_norm):
    (clipped, norm), (expected, theirs), grads = weight_and_norm(max_norm)
    assert norm == pytest.approx(theirs.item(), rel=1e-12)
    assert clipped[1]["bias"] is None
    assert expected[1]["bias"] is None
    torch.testing.assert_close(optree.tree_leaves(clipped), optree.tree_leaves(expected), rtol=1e-11, atol=1e-14)
    if max_norm > norm:
        assert differences(clipped, grads) == []


@pytest.mark.parametrize("name", ["tied", "modules"])
def test_the_norms_bits_depend_on_no_schedule_or_placement(name):
    found = {}
    for schedule in PLACES:
        case, generator, plan = made(name, schedule)
        found[schedule] = clipped(case, generator, plan, handlers.Local())[1].item()
    assert found == dict.fromkeys(PLACES, found["gpipe"])
    assert found["gpipe"] > 0


@one_in(3)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("tied", "one_f_one_b"), ("tied", "dualpipe"), ("modules", "zb_h1"), ("tied", "zb_v"), ("subtrees", "zb_v")],
)
def test_over_gloo_every_rank_has_the_references_bits(pools, name, schedule):
    ranks = made(name, schedule)[2].ranks
    assert pools(ranks).run(over_gloo, name, schedule) == [[]] * ranks


def test_copies_count_once():
    case, generator, plan = made("linear", "dualpipe")
    assert plan.placement.holders[0] == (0, 3)
    norm = clipped(case, generator, plan, handlers.Local())[1]
    once = clipped(case, schedules.gpipe, case.pipeline.plan(Placement.loop(4), 4), handlers.Local())[1]
    torch.testing.assert_close(norm, once, rtol=1e-6, atol=0)


def missing(rank, done):
    """Only rank 0 comes a second time, while rank 1 is busy: how long it waited, and what it was told."""
    own, done = handlers.Distributed(timeout=2), Path(done)
    assert fpipe.global_norm({rank: torch.ones(8)}, ALONE, handler=own) == 4
    cut = interop.shard({0: {"w": torch.ones(2)}}, mesh_of(2), {"w": [Shard(0)]})
    if rank:
        until = time.monotonic() + 50
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.02)
        return done.exists()
    start, told = time.monotonic(), []
    for _ in range(2):
        with pytest.raises(TransportError) as caught:
            fpipe.global_norm({rank: torch.ones(8)}, ALONE, handler=own)
        told.append(str(caught.value))
    with pytest.raises(TransportError) as caught:
        squares(cut, ALONE, own)
    done.touch()
    return time.monotonic() - start, [*told, str(caught.value)]


def test_a_rank_that_does_not_come_is_an_error_within_the_timeout(fresh_pool, tmp_path):
    (seconds, (*told, of_pieces)), waited = fresh_pool(2).run(missing, str(tmp_path / "done"))
    assert waited
    assert 1.5 < seconds < 30
    for text in told:
        assert "rank 0 could not reach the other ranks at global_norm of the norm of the gradients" in text
        assert "missing: [1]): every rank calls global_norm or clip_by_global_norm, after the same step" in text
        assert "\n" not in text
    assert "nothing came within timeout=2 s" in told[0]
    assert of_pieces.startswith(
        "rank 0 could not reach all of processes [0, 1], over which leaves are cut, at the norm of the gradients "
        "(nothing came within timeout=2 s): every rank calls global_norm"
    )


WRONG = {
    "unknown stage": ({2: torch.ones(1)}, 1.0, ValueError, "grads has an entry for 2, and the plan has stages 0 to 1"),
    "by name": ({"w": torch.ones(1)}, 1.0, ValueError, "grads has an entry for 'w', and the plan has stages 0 to 1"),
    "no mapping": ([torch.ones(1)], 1.0, TypeError, "grads must be {stage: tree}, as a step returns it, not a list"),
    "no tensor": ({1: {"w": 1.0}}, 1.0, TypeError, "a gradient of stage 1 is a float: it must be a tensor or None"),
    "pairs": (
        {1: {"w": transforms.Dual(torch.ones(1), torch.ones(1))}},
        1.0,
        TypeError,
        "grads has pairs of transforms.hvp, and one norm would mix the products with the gradients: pass "
        "transforms.primals(grads), the products, or transforms.tangents(grads)",
    ),
    "negative": ({1: torch.ones(1)}, -1.0, ValueError, "max_norm must be a number of at least 0, not -1.0"),
    "text": ({1: torch.ones(1)}, "1", ValueError, "max_norm must be a number of at least 0, not 1"),
    "vector": (
        {1: torch.ones(1)},
        torch.ones(2),
        ValueError,
        "max_norm must be a number of at least 0, not tensor([1., 1.])",
    ),
}


def wrong_on_rank_1(rank):
    """What each rank was told of each wrong argument, and the norm of a call after it."""
    own, told = handlers.Distributed(timeout=20), []
    for grads, max_norm, _, _ in WRONG.values():
        grads, max_norm = (grads, max_norm) if rank else ({0: torch.ones(1)}, 1.0)
        with pytest.raises((TransportError, ValueError, TypeError)) as caught:
            fpipe.clip_by_global_norm(grads, max_norm, ALONE, handler=own)
        norm = fpipe.global_norm({rank: torch.ones(2)}, ALONE, handler=own)
        told.append((caught.type, str(caught.value), norm.item()))
    with pytest.raises(TransportError) as caught:
        fpipe.global_norm({}, Plan(Placement.loop(2, 1 + rank), 1), handler=own)
    return [*told, str(caught.value)]


def test_a_wrong_argument_on_one_rank_is_an_error_on_all_and_the_next_call_works(pools):
    first, second = pools(2).run(wrong_on_rank_1)
    for theirs, own, (_, _, kind, says) in zip(first, second, WRONG.values(), strict=False):
        assert (own[0], theirs[0]) == (kind, TransportError)
        assert own[1].startswith(says)
        assert theirs[1].startswith("rank 1 failed at global_norm of the norm of the gradients: ")
        assert says in theirs[1]
        assert own[2] == theirs[2] == 2
    assert first[-1] == second[-1] == "the ranks have plans of [2, 4] stages: every rank makes the same plan"


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_says_so(wrong):
    grads, max_norm, kind, says = WRONG[wrong]
    with pytest.raises(kind, match=re.escape(says)):
        fpipe.clip_by_global_norm(grads, max_norm, ALONE, handler=handlers.Local())
    if wrong not in ("negative", "text", "vector"):
        with pytest.raises(kind, match=re.escape(says)):
            fpipe.global_norm(grads, ALONE, handler=handlers.Local())


def test_a_limit_that_is_trained_leaves_gradients_without_a_history():
    limit = torch.tensor(0.5, requires_grad=True)
    found, norm = fpipe.clip_by_global_norm({0: torch.ones(1), 1: None}, limit, ALONE, handler=handlers.Local())
    assert not found[0].requires_grad
    assert not norm.requires_grad
    assert found[0] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_shows_in_the_norm(value):
    grads = {0: torch.ones(2), 1: torch.tensor([1.0, value])}
    found, norm = fpipe.clip_by_global_norm(grads, 1.0, ALONE, handler=handlers.Local())
    assert norm.item() == pytest.approx(value, nan_ok=True)
    assert not found[1].isfinite().all()


def test_halves_do_not_overflow_and_nothing_given_changes():
    grads = {0: {"a": torch.full((100,), 6e4, dtype=torch.float16), "none": None}, 1: {"b": torch.ones(3)}}
    before = copy.deepcopy(grads)
    found, norm = fpipe.clip_by_global_norm(grads, 1.0, ALONE, handler=handlers.Local())
    assert norm == pytest.approx(6e5, rel=1e-3)
    assert found[0]["a"].dtype == torch.float16
    assert found[0]["a"].float().norm() == pytest.approx(1, rel=1e-2)
    assert found[0]["none"] is None
    assert differences(grads, before) == []


def test_a_clipped_gradient_has_the_dtype_of_the_gradient():
    """A float32 gradient without dimensions, too: the scale is float64."""
    grads = {0: {"w": torch.tensor(3.0), "b": torch.tensor([4.0]), "h": torch.tensor(0.0, dtype=torch.bfloat16)}}
    plan = fpipe.Plan(fpipe.Placement.loop(1), 1)
    clipped, _ = fpipe.clip_by_global_norm(grads, 1.0, plan, handler=handlers.Local())
    assert [x.dtype for x in clipped[0].values()] == [torch.float32, torch.float32, torch.bfloat16]
    assert clipped[0]["w"].item() == pytest.approx(0.6, rel=1e-5)


def test_complex_and_sparse_gradients():
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 1.0, 2.0], (4,), check_invariants=True)
    grads = {0: torch.tensor([3 + 4j]), 1: sparse}
    found, norm = fpipe.clip_by_global_norm(grads, 1.0, ALONE, handler=handlers.Local())
    assert norm == pytest.approx(math.sqrt(25 + 4 + 4))
    torch.testing.assert_close(found[1].to_dense(), torch.tensor([2.0, 0, 2, 0]) / norm.float(), atol=1e-5, rtol=1e-5)


def test_stages_without_gradients_count_nothing():
    assert fpipe.global_norm({0: {}, 1: {"frozen": None}}, ALONE, handler=handlers.Local()) == 0


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_norm_that_is_none_is_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm must be a number of at least 0"):
        fpipe.clip_by_global_norm({0: torch.ones(1)}, max_norm, ALONE, handler=handlers.Local())


# Replicas


def everybodys():
    """Gradients of two stages."""
    numbers = torch.arange(1.0, 36.0).view(7, 5)
    return {0: {"w": numbers, "b": torch.arange(3.0), "scale": torch.tensor(2.0)}, 1: {"w": numbers.t(), "none": None}}


def norms_of_replicas(rank, shape, ranks, sharded):
    """The norm, what clipping gives, and how it is placed, where each process has one rank of a replica."""
    replicas, grads = math.prod(shape), everybodys()
    mesh = mesh_of(*shape, ranks, names=(*("copies", "dp")[2 - len(shape) :], "pp"))
    over = mesh[mesh.mesh_dim_names[:-1]]
    own = Replicated(replicas, mesh=over)
    plan = Plan(Placement.loop(ranks, 2 // ranks), 1)
    grads = {s: grads[s] for s in plan.stages_on(own.rank)}
    if sharded == "inside":  # over the last dimension alone
        over = over[over.mesh_dim_names[-1]]
    grads = interop.fsdp(grads, over) if sharded else grads
    if sharded == "weights":
        grads = {s: {**tree, "b": everybodys()[s]["b"]} if s == 0 else tree for s, tree in grads.items()}
    norm = fpipe.global_norm(grads, plan, handler=own)
    clipped, again = fpipe.clip_by_global_norm(grads, 1.0, plan, handler=own)
    alike = optree.tree_map(placed_alike, clipped, grads)
    expected, _ = fpipe.clip_by_global_norm(everybodys(), 1.0, ALONE, handler=handlers.Local())
    wrong = differences(whole(clipped), {s: expected[s] for s in clipped})
    return norm.item(), again.item(), wrong, all(optree.tree_leaves(alike))


SHAPES = [((4,), 1), ((3,), 1), ((2, 2), 1), ((2,), 2)]


@pytest.mark.parametrize(
    ("shape", "ranks", "sharded"),
    [*((*shape, sharded) for shape in SHAPES for sharded in (False, True, "weights")), ((2, 2), 1, "inside")],
)
def test_the_norm_counts_what_replicas_share_once(pools, shape, ranks, sharded):
    expected = fpipe.global_norm(everybodys(), ALONE, handler=handlers.Local()).item()
    found = pools(math.prod(shape) * ranks).run(norms_of_replicas, shape, ranks, sharded)
    assert found == [(found[0][0], found[0][0], [], True)] * len(found)
    assert found[0][0] == pytest.approx(expected, rel=1e-14 if sharded else 0)


def norm_of_pieces(rank):
    """The norm and what clipping gives, where leaves are cut over processes that compute together, and are no ranks."""
    cut = interop.shard(everybodys(), mesh_of(2), {"w": [Shard(1)], "b": [Shard(0)]})
    norm = fpipe.global_norm(cut, ALONE, handler=handlers.Local())
    clipped, _ = fpipe.clip_by_global_norm(cut, 1.0, ALONE, handler=handlers.Local())
    return norm, whole(clipped)[0]["w"]


def test_the_norm_counts_what_is_cut_over_another_dimension_once(pools):
    clipped, norm = fpipe.clip_by_global_norm(everybodys(), 1.0, ALONE, handler=handlers.Local())
    for found, w in pools(2).run(norm_of_pieces):
        torch.testing.assert_close(found, norm, rtol=1e-14, atol=0)
        torch.testing.assert_close(w, clipped[0]["w"])
