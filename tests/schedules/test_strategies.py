"""Strategies of transformers: arithmetic of shapes and machines, costs of stages, and the ranking.

Oracles: published parameter counts and formulas, closed forms written out by hand, and a search that simulates all.
"""

from dataclasses import replace
from importlib import import_module
from itertools import count, permutations, product
from types import SimpleNamespace

import pytest

import fpipe
from fpipe import Costs, Link, Placement, Plan, schedules
from fpipe._format import format_bytes
from fpipe.effects import Backward, BackwardInput, Forward, Overlap
from fpipe.schedules.candidates import Degrees, Job, Pieces, divided
from fpipe.schedules.catalogue import CATALOGUE
from fpipe.schedules.cuts import recut
from fpipe.schedules.machines import MACHINES, Machine, gathering, summing
from fpipe.schedules.shapes import SHAPES, ModelShape
from fpipe.schedules.strategies import strategies
from tests.support.combinations import few, sample, thorough

module = import_module("fpipe.schedules.strategies")  # the package has the function by that name

# Narayanan et al. 2021, table 1, and Korthikanti et al. 2023, table 3: layers, hidden, heads, parameters in 1e9.
MEGATRON = [(48, 6144, 64, 22), (96, 12288, 96, 175), (105, 20480, 128, 530), (128, 25600, 160, 1008)]
TINY = ModelShape(layers=4, hidden=8, heads=2, vocabulary=16, sequence=4)
SLOW = Machine({"float32": 1e6}, bandwidth=1e12, memory=1e9, inside=Link(1, 1e3), between=Link(2, 1e2), on_host=2)
SLOW = replace(SLOW, efficiency=1.0)


def megatron(layers, hidden, heads):
    return ModelShape(layers, hidden, heads, 51200, 2048, biases=True, dropout=True, fused_attention=False, tied=True)


def test_parameters_are_the_published_ones():
    """Those of the published checkpoints, which list every tensor."""
    published = {"gpt2": 124_439_808, "llama-8b": 8_030_261_248, "llama-70b": 70_553_706_496}
    published |= {"mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112}
    assert {name: shape.parameters for name, shape in SHAPES.items()} == published
    for layers, hidden, heads, billions in MEGATRON:
        assert megatron(layers, hidden, heads).parameters == pytest.approx(1e9 * billions, rel=0.015)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [row[:3] for row in MEGATRON])
def test_flops_are_those_of_the_paper(layers, hidden, heads):
    """Korthikanti et al., equation 7; and 6 times parameters and tokens, with the scores beside."""
    shape, tokens, s, v = megatron(layers, hidden, heads), 64 * 2048, 2048, 51200
    paper = 72 * tokens * layers * hidden**2 * (1 + s / (6 * hidden) + v / (12 * hidden * layers))
    assert shape.step_flops(tokens) == pytest.approx(paper)
    scores = 12 * layers * hidden * s * tokens
    assert shape.step_flops(tokens) - scores == pytest.approx(6 * shape.parameters * tokens, rel=0.002)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [row[:3] for row in MEGATRON])
def test_kept_bytes_are_those_of_the_paper(layers, hidden, heads):
    """Korthikanti et al., table 2; the share of the scores is printed as 70 % at 175 B, and as 65 % at 530 B."""
    shape, t, s, b = megatron(layers, hidden, heads), 8, 2048, 4
    a, unit = heads * s / hidden, s * b * hidden
    assert shape.layer_kept(b).residuals == pytest.approx(unit * (34 + 5 * a))
    assert shape.layer_kept(b, tp=t).residuals == pytest.approx(unit * (10 + 24 / t + 5 * a / t))
    whole = shape.layer_kept(b, tp=t, sequence_parallel=True, gathered_again=True).residuals
    assert whole == pytest.approx(unit / t * (34 + 5 * a))
    traced = shape.layer_kept(b, tp=t, sequence_parallel=True).residuals
    assert traced == pytest.approx(whole + unit * 4 * (1 - 1 / t))  # the gathered inputs of two products
    if printed := {12288: 70, 20480: 65}.get(hidden):
        assert 100 * 5 * a / (34 + 5 * a) == pytest.approx(printed, abs=0.5)
    few = replace(shape, fused_attention=True).layer_kept(b).residuals
    assert few == pytest.approx(unit * 34 + 4 * heads * s * b)


def test_context_parallel_ranks_keep_all_keys():
    shape = SHAPES["llama-8b"]
    one, two = shape.layer_kept(1).residuals, shape.layer_kept(1, cp=2).residuals
    assert two == one / 2 + 2 * 2 * 1024 * 8192 / 2


def test_rings_by_hand():
    link = Link(latency=1, bandwidth=10)
    assert gathering(link, 1, 100) == summing(link, 1, 100) == 0
    assert gathering(link, 4, 100) == 3 * (1 + 2.5)
    assert summing(link, 4, 100) == 2 * gathering(link, 4, 100)


def one(pp, dp, tp, cp, ep=1, shape=TINY, **options):
    """The only strategy of the tiny model with these degrees."""
    degrees = {"pp": [pp], "dp": [dp], "tp": [tp], "cp": [cp], "ep": [ep]}
    options = {"batch": 8, "rows": [1], "schedules": ["1f1b"], "remat": ["none"], **degrees, **options}
    (strategy,) = strategies(shape, pp * dp * tp * cp * ep, SLOW, **options)
    return strategy


def test_stages_cost_what_the_closed_forms_say():
    strategy = one(pp=2, dp=1, tp=1, cp=1)
    products = 12 * 8**2
    layer, scores, head = 2 * 4 * products / 1e6, 4 * 4 * 4 * 8 / 1e6, 2 * 4 * 8 * 16 / 1e6
    assert strategy.layers == (2, 2)
    costs = strategy.costs
    assert costs.forward == pytest.approx((2 * (layer + scores), 2 * (layer + scores) + head))
    assert costs.backward_input == pytest.approx((0, 2 * (layer + 2.5 * scores) + head))
    assert costs.backward_weight == pytest.approx((2 * (2 * layer + 2.5 * scores), 2 * layer + head))
    assert costs.parameters == pytest.approx((4 * (2 * 784 + 128), 4 * (2 * 784 + 136)))
    assert strategy.tokens == 32
    assert strategy.tokens_per_second == 32 / strategy.step
    assert strategy.mfu == pytest.approx(TINY.step_flops(32) / (2 * 1e6 * strategy.step))
    assert strategy.step == pytest.approx(strategy.timeline.makespan, rel=1e-6)
    again = one(pp=2, dp=1, tp=1, cp=1, remat=["full"]).costs
    assert again.backward_input[1] - costs.backward_input[1] == pytest.approx(costs.forward[1])
    assert again.residuals[0] == 4 * 8 * 4


def test_collectives_inside_pieces_are_a_share_of_their_time():
    """Two all-reduces of 128 bytes for a layer, and one for the embedding; keys and values of 64 bytes each."""
    whole, halves = one(pp=1, dp=1, tp=1, cp=1), one(pp=1, dp=1, tp=2, cp=1)
    summed, three = 2 * (1 + 64 / 1e3), 3 * 2 * (1 + 8 / 1e3)
    collectives = halves.costs.collectives
    assert collectives[Forward] == pytest.approx((4 * 2 * summed + summed + three,))
    assert collectives[BackwardInput] == (0,)  # the first stage's are in its weight gradient
    assert halves.costs.forward[0] == pytest.approx(whole.costs.forward[0] / 2 + collectives[Forward][0], rel=1e-3)
    keys = 2 * (1 + 64 / 1e3)
    shared = one(pp=1, dp=1, tp=1, cp=2)
    assert shared.costs.collectives[Forward] == pytest.approx((4 * keys,))
    assert 0.9 < halves.collectives < 1
    assert whole.collectives == 0
    both = one(pp=1, dp=1, tp=2, cp=2)  # context parallel is between hosts
    tensor = (4 * 2 + 1) * 2 * (1 + 32 / 1e3) + 3 * 2 * (1 + 4 / 1e3)
    assert both.costs.collectives[Forward] == pytest.approx((4 * 2 * (2 + 32 / 1e2) + tensor,))


def test_a_timeline_adds_up_collectives():
    costs = Costs(forward=2, collectives={Forward: [1, 0.5], BackwardInput: 0.25}, scale=(1, 2))
    plan = Plan(Placement.loop(2), 2)
    timeline = fpipe.simulate(schedules.one_f_one_b, plan, costs)
    assert timeline.collectives == [3 * (1 + 0.25), 3 * (0.5 + 0.25)]
    assert timeline.makespan == fpipe.simulate(schedules.one_f_one_b, plan, replace(costs, collectives={})).makespan
    assert costs.collective(Backward(1, 1)) == 0.5
    assert Costs(collectives={Forward: 9}).collective(Forward(0, 0)) == 1  # no more than its time
    both = Costs(forward=2, backward=3, overlap=3, collectives={Forward: 1.5, Backward: 2})
    assert both.collective(Overlap(Forward(0, 1), Backward(0, 0))) == 3
    assert recut(costs, 2, 4).collectives[Forward] == (0.5, 0.5, 0.25, 0.25)
    with pytest.raises(fpipe.ScheduleError, match="collectives has 2 entries for Forward"):
        costs.check(Plan(Placement.loop(3), 2))


EXPERTS = replace(TINY, experts=4, experts_per_token=2, capacity_factor=1.0)
ATTENTION, ROUTER, NORMS, EXPERT, ENDS = 256, 8 * 4, 16, 512, 2 * 128 + 8  # numbers of the tiny model


def test_experts_cost_what_the_closed_forms_say():
    """Two exchanges of 2 slots for each of 4 tokens in a layer's forward; all slots are computed, all weights read."""
    strategy = one(pp=1, dp=1, tp=1, cp=1, ep=2, shape=EXPERTS)
    exchanges, products = 4 * 2 * (1 + 2 * 4 * 32 / 2 / 1e3), 2 * 4 * (ATTENTION + ROUTER + 2 * EXPERT) / 1e6
    scores, head = 4 * 4 * 4 * 8 / 1e6, 2 * 4 * 8 * 16 / 1e6
    costs = strategy.costs
    assert costs.collectives[Forward] == pytest.approx((exchanges,))
    assert costs.forward == pytest.approx((exchanges + 4 * (products + scores) + head,))
    assert costs.backward_weight == pytest.approx((exchanges + 4 * (2 * products + 2.5 * scores) + 2 * head,))
    rest = 4 * (ATTENTION + ROUTER + NORMS) + ENDS
    assert costs.parameters == (4 * (rest + 4 * 2 * EXPERT),)
    assert costs.scatter == pytest.approx((2 * (1 + 4 * rest / 2 / 1e3),))  # no other rank has these experts
    assert (costs.gather, costs.shards, strategy.plan.replicas) == ((0,), 1, 2)
    assert strategy.mfu == pytest.approx(EXPERTS.step_flops(32) / (2 * 1e6 * strategy.step))

    both = one(pp=1, dp=2, tp=1, cp=1, ep=2, shape=EXPERTS)  # replicas are on other hosts
    (size,) = both.costs.parameters
    assert both.costs.gather == pytest.approx((2 + size / 2 / 1e2,))
    assert both.costs.scatter == pytest.approx((2 + size / 2 / 1e2 + 2 * (1 + 4 * rest / 2 / 2 / 1e3),))
    assert both.footprint[0].parameters == size / 2


def test_numbers_of_experts_by_hand():
    assert SHAPES["mixtral-8x7b"].active_parameters == 12_879_925_248  # 12.9e9 in the paper's table
    padded = replace(EXPERTS, capacity_factor=1.5)
    assert padded.layer_flops(4).model == EXPERTS.layer_flops(4).model
    assert padded.layer_flops(4).forward - EXPERTS.layer_flops(4).forward == 2 * 4 * EXPERT
    assert replace(EXPERTS, capacity_factor=9.0).slots == 4  # as many as tokens, for each expert
    one_token = replace(EXPERTS, sequence=1, gated=True)
    dense = replace(one_token, experts=None, experts_per_token=1).layer_kept(1, 4)
    kept = one_token.layer_kept(1, 4, ep=2)
    # 2 slots of 8 inputs, 2 outputs, 4 probabilities, and the inner values of one slot more
    assert kept.residuals - dense.residuals == 4 * (2 * 8 + 2 * 8 + 4 + 4 * 32)
    # inputs and outputs of 2 slots in place of the outputs of one network, 4 logits, and 3 inner values more
    assert kept.deferred - dense.deferred == 4 * (2 * 8 + 2 * 8 - 8 + 4 + 3 * 32)
    assert kept.collectives == 4 * 2 * 2 * 8


def test_experts_are_spread_where_tensor_parallel_is_not():
    tried = strategies(EXPERTS, 8, SLOW, batch=8, rows=[1], schedules=["1f1b"], remat=["none"], top=99)
    degrees = {strategy.degrees for strategy in tried}
    assert {each.ep for each in degrees if each.tp == 1} == {1, 2, 4}
    assert {each.ep for each in degrees if each.tp > 1} == {1}
    with pytest.raises(fpipe.ScheduleError, match="ep 4 experts where tp is 1"):
        strategies(EXPERTS, 8, SLOW, batch=8, ep=[8])
    with pytest.raises(fpipe.ScheduleError, match="a token can't have 2 of 1 experts"):
        replace(TINY, experts_per_token=2)


def test_layers_are_divided_for_equal_work():
    assert one(pp=4, dp=1, tp=1, cp=1).layers == (1, 1, 1, 1)
    heavy = replace(TINY, layers=9, vocabulary=3 * 96)  # a head as heavy as almost three layers
    assert divided(heavy, Placement.loop(3)) == (4, 4, 1)


def test_more_of_each_dimension_needs_less_memory():
    for degree in ("pp", "dp", "tp", "cp"):
        sizes = {"pp": 1, "dp": 1, "tp": 1, "cp": 1}
        assert one(**{**sizes, degree: 2}).bytes < one(**sizes).bytes, degree
    assert one(2, 1, 1, 1, remat=["full"], batch=16).costs.residuals < one(2, 1, 1, 1, batch=16).costs.residuals


@pytest.mark.parametrize(("stride", "on_host"), [(1, 2), (2, 4), (3, 8), (2, 3), (8, 4)])
def test_a_link_is_inside_a_host_where_every_member_of_both_stages_is(stride, on_host):
    """Of 3 replicas on hosts of 8, ranks 3 to 5 and 6 to 8 send from rank 5 to rank 8, which is on another host."""
    machine, degrees = replace(SLOW, on_host=on_host), Degrees(pp=4, dp=stride, tp=1, cp=1)
    pieces = Pieces(Job(TINY, machine, 4 * stride, stride, "float32", False, 1e9), degrees, 1, "none")
    for source, target in permutations(range(4), 2):
        pairs = [(source * stride + member, target * stride + member) for member in range(stride)]
        together = all(one // on_host == other // on_host for one, other in pairs)
        assert pieces.link(source, target) == (machine.inside if together else machine.between)


FIXED = [name for name, each in CATALOGUE.items() if not each.limited and not each.edges and each.slices != 2]


@pytest.mark.parametrize(
    ("vocabulary", "remat"),  # sums of the ends that are small, and large, beside residuals
    sample([*product([16, 512], ["none", "full"])], [(16, "none"), (512, "full")]),
)
def test_no_candidate_needs_fewer_bytes_than_its_least(vocabulary, remat):
    """Few microbatches are all in flight before there is a sum of gradients."""
    sizes = [(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 2, 2), (2, 1, 4), (4, 1, 2), (4, 1, 4), (4, 2, 5), (4, 1, 8)]
    shape, checked = replace(TINY, layers=8, vocabulary=vocabulary), set()
    for pp, dp, m in few(sizes, slice(6)):
        job = Job(shape, SLOW, pp * dp, m * dp, "float32", False, 1e9)
        entries = [CATALOGUE[name] for name in FIXED]
        for candidate in job.candidates(Degrees(pp, dp, 1, 1), 1, remat, entries, (1, 2)):
            strategy, nbytes = candidate.strategy(1e9), candidate.least_bytes()
            if strategy is not None:
                assert strategy.bytes >= nbytes >= candidate.least * (1 - 1e-9), (str(candidate), m)
                checked.add(candidate.entry.name)
    assert checked == set(FIXED)


def test_what_fits_is_returned():
    """At most as many microbatches as ranks: no sum of gradients while all are in flight."""
    options = {"batch": 4, "pp": [4], "rows": [1], "schedules": ["1f1b"], "remat": ["none"]}
    (strategy,) = strategies(TINY, 4, SLOW, **options)
    (again,) = strategies(TINY, 4, SLOW, **options, memory_limit_bytes=strategy.bytes)
    assert again.bytes == strategy.bytes
    with pytest.raises(fpipe.ScheduleError, match="no strategy keeps to"):
        strategies(TINY, 4, SLOW, **options, memory_limit_bytes=strategy.bytes - 1)


@pytest.mark.parametrize(("schedule", "dp"), [("gpipe", 1), ("dualpipe-v", 2)])
def test_the_least_bytes_of_an_error_are_reached_with_that_limit(schedule, dp):
    """GPipe needs more with more microbatches; an overlap of two sharded stages needs both of them whole."""
    options = {"pp": 2, "dp": dp, "tp": 1, "cp": 1, "schedules": [schedule], "chunks": [1], "batch": 32}
    strategy = one(**options)
    with pytest.raises(fpipe.ScheduleError) as error:
        one(**options, memory_limit_bytes=strategy.bytes - 1)
    assert f"the least reached is {format_bytes(strategy.bytes)}, of " in str(error.value)


SEARCHED = {"batch": 16, "rows": (1, 2), "chunks": (1, 2), "schedules": ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")}


@thorough
def test_the_ranking_is_that_of_simulating_all(monkeypatch):
    """Within the share that is not looked at; and no step is below the bound, nor its bytes below the least."""
    hosts = replace(MACHINES["a100"], on_host=4)
    ranked = strategies("gpt2", 8, hosts, memory_limit_bytes=8e9, top=5, **SEARCHED)
    assert ranked == sorted(ranked, key=lambda strategy: strategy.step)
    assert len({strategy.degrees for strategy in ranked}) == 5
    candidates = []
    monkeypatch.setattr(module, "_ranked", lambda every, *rest: candidates.extend(every) or [])
    strategies("gpt2", 8, hosts, memory_limit_bytes=8e9, dp=[2, 4, 8], tp=[1], cp=[1], **SEARCHED)
    best = {}
    for candidate in candidates:
        strategy = candidate.strategy(8e9)
        if strategy:
            assert strategy.step >= candidate.bound * (1 - 1e-9)
            assert strategy.bytes >= candidate.least * (1 - 1e-9)
            best[strategy.degrees] = min(best.get(strategy.degrees, strategy.step), strategy.step)
    steps = {strategy.degrees: strategy.step for strategy in ranked}
    for degrees, step in best.items():
        if degrees in steps:
            assert step <= steps[degrees] <= 1.01 * step
        else:
            assert step * 1.01 >= ranked[-1].step


def test_a_strategy_is_simulated_again_by_its_parts():
    strategy = strategies("gpt2", 4, "a100", top=1, **SEARCHED)[0]
    again = fpipe.simulate(strategy.schedule, strategy.plan, strategy.costs, resident=strategy.resident)
    assert again.makespan == strategy.timeline.makespan
    assert strategy.plan.replicas == strategy.degrees.replicas


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "gpt5"}, "no model shape is called 'gpt5': there are gpt2, llama-8b, llama-70b, mixtral-8x7b"),
        ({"machine": "abacus"}, "no machine is called 'abacus'"),
        ({"world": 7, "tp": [7]}, "no strategy divides 7 ranks, tp of \\[7\\]: tp divides 12 heads"),
        ({"memory_limit_bytes": 1e6}, "keeps to 976.6 KiB on a rank: the least reached is .* MiB, of pp"),
        ({"dtype": "float64"}, "no peak for float64: it has those for bfloat16, float16, float32"),
        ({"schedules": ["dualpipe"], "world": 4, "pp": [1]}, "no strategy divides 4 ranks, pp of \\[1\\]"),
        ({"remat": ["half"]}, "remat is none or full, not half"),
        ({"batch": 0}, "batch must be whole numbers of at least 1"),
        ({"budget": 0.0, "memory_limit_bytes": 8e9}, "stopped after 0 s with 0 of up to"),
    ],
)
def test_errors_have_a_way_out(options, error):
    with pytest.raises(fpipe.ScheduleError, match=error):
        strategies(**{"model": "gpt2", "world": 4, "machine": "a100", **SEARCHED, **options})


def test_a_budget_that_ends_says_so(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=count().__next__))
    with pytest.warns(UserWarning, match=r"stopped after 1 s with \d+ of up to .* allow more time"):
        assert len(strategies("gpt2", 4, "a100", **SEARCHED, budget=1)) == 1


def test_machines_are_checked():
    for wrong in ({"efficiency": 1.5}, {"memory": 0}, {"flops": {"int4": 1.0}}, {"flops": {"float32": 0.0}}):
        with pytest.raises(fpipe.ScheduleError):
            replace(MACHINES["h100"], **wrong)
    with pytest.raises(fpipe.ScheduleError, match="3 heads must divide the width of 8"):
        replace(TINY, heads=3)
    assert str(Degrees(1, 2, 3, 4)) == "pp 1 x dp 2 x tp 3 x cp 4"
