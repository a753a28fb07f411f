"""Tensor parallelism: leaves that are DTensors on mesh["tp"] give the loss and the gradients of one process."""

import re

import pytest

from tests.support import dimension_jobs, tensor_jobs
from tests.support.combinations import ALL, PAIRS, few, one_in, thorough

BLOCK = {"all_reduce": 2}
COUNTS = {
    0: ({"all_reduce": 3}, {"all_reduce": 2}),  # the embedding
    1: (BLOCK, BLOCK),
    2: (BLOCK, BLOCK),
    3: ({"all_reduce": 5}, {"all_reduce": 3}),  # the cross entropy: three numbers a row; the head's input gradient
}


@pytest.mark.parametrize(
    ("name", "policy", "stages"),
    few(
        [("zb_v", "nothing_saveable", 2), ("zb_v", "nothing_saveable", 4), ("looped_bfs", "everything_saveable", 4)],
        slice(1),
    ),
    ids=str,
)
def test_a_block_adds_twice_forward_twice_backward_and_never_for_weights(pools, name, policy, stages):
    """As Megatron-LM does. Rematerialisation repeats no collective."""
    expected = COUNTS if stages == 4 else {0: COUNTS[0], 1: COUNTS[3]}
    for counts, loss, gradients, alike in pools(2).run(tensor_jobs.collectives, name, policy, stages):
        assert tensor_jobs.unexpected(counts, expected) == {}
        assert loss <= 1e-6
        assert gradients <= 1e-5
        assert alike


@thorough
def test_the_fused_layer_of_gpt2_is_cut_by_head(pools):
    """Unchanged, with its dropout, its tied head and its layers of [in, out]: it gathers nothing."""
    for counts, loss, gradients in pools(2).run(tensor_jobs.gpt2):
        assert [counts[stage, "forward"] for stage in (0, 1)] == [{"all_reduce": 3}, {"all_reduce": 5}]
        assert [counts[stage, "backward"] for stage in (0, 1)] == [{"all_reduce": 2}, {"all_reduce": 3}]
        assert counts[1, "backward_weight"] == {}
        assert loss <= 1e-6
        assert gradients <= 1e-5


ALIKE = r"compute stages together and were given different arguments: "
TOGETHER = r"processes \[2, 3\] " + ALIKE
CUT = r"params\[1\]\['up'\] is float32\[4, 16\] placed \(Shard\(dim=1\),\) over processes \[2, 3\] on process 2 and "
FAULTS = {
    "batch": TOGETHER + r"batch of microbatch 0 is float32\[4, 4\] with values of digest \w+ on process 2 and float32",
    "rows": r"the batch has 7 rows, the target 8",
    "rng": TOGETHER + r"rng is \(0, 1\) on process 2 and \(0, 2\) on process 3\. They take",
    "reduction": ALIKE + r"the option reduction= or weight= is \('rows', \d+\) on process \d and \(None, \d+\) on",
    "autocast": ALIKE + r"torch.autocast is missing on process \d and \(\('cpu', torch.bfloat16\),\) on process",
    "sharded": TOGETHER + CUT + r"float32\[4, 16\] placed \(Replicate\(\),\) over",
    "partial": r"its params\['up'\] can't be used: a leaf float32\[4, 16\] holds partial sums, .*: redistribute it",
    "pipeline": r"params\['up'\] is placed .* over DeviceMesh\(.*, which has ranks of the pipeline: shard it over",
    "elsewhere": r"params\['up'\] is placed .*, which does not have this process: shard it over a mesh that has it",
    "meshes": r"params\['bias'\] is placed .*, and params\['up'\] is placed .*other.*: shard all params of a stage",
    "shape": TOGETHER + r"params\[1\]\['down'\] is float32\[16, 4\] placed .* on process 2 and float32\[32, 4\] placed",
    "dtype": TOGETHER + CUT + r"float64\[4, 16\] placed",
    "missing": TOGETHER + r"params\[1\]\['bias'\] is float32\[4\] placed .* on process 2 and missing on process 3",
    "values": TOGETHER + r"the digest of the values of params\[1\]\['bias'\] is \w+ on process 2 and \w+ on process 3",
    "function": r"its collectives over ranks \[2, 3\] differ, so that the ranks would wait for each other for ever",
    "failing": r"rank 3, with which this one computes it, can't: .*KeyError|KeyError: 'none'",
    "heads": r"the outputs of up are cut over 2 processes, and are 1 head of 16, which 2 processes don't divide: ",
}


@pytest.fixture(scope="module", autouse=True)
def forgotten(pools):
    yield
    for pool in pools.made.values():
        pool.run(tensor_jobs.forget)


@one_in(4)
@pytest.mark.parametrize("fault", few(FAULTS, slice(None, None, 3)))
def test_what_does_not_fit_is_one_error_on_all_processes(pools, fault):
    """In the first step and in a later one; process 3 of 2 x 2 is wrong, and the step that follows works."""
    for texts in pools(4).run(tensor_jobs.wrong, fault, PAIRS or fault in (*tensor_jobs.FIRST, "sharded")):
        assert all(re.search(FAULTS[fault], text) for text in texts), texts


def test_exchanges_meet_after_one_that_a_process_gave_up(pools):
    for each in pools(2).run(tensor_jobs.given_up):
        assert each == [[[0, "second"], [1, "second"]], [[0, "fourth"], [1, "fourth"]]]


def test_a_mesh_takes_the_place_of_one_whose_groups_have_gone(pools):
    """torch takes the two for one, and remembers the first in what it knows of operations."""
    for posted, groups in pools(4).run(tensor_jobs.after_others):
        assert posted == groups
        assert groups[0] != groups[1]


def test_eager_autograd_is_refused(pools):
    for text in pools(2).run(tensor_jobs.eager):
        assert re.match(
            r"rank 0, stage 0: its params have DTensors over a dimension of tensor parallelism, .*: leave", text
        )


@thorough
@pytest.mark.parametrize("options", few([{"heads": 2}, {"post": True}], slice(1, 2)), ids=str)
def test_other_models_are_right(pools, options):
    """One head of keys and values, which two processes don't divide, is made whole by each.

    After a layer that normalises its sum, gradients of both terms meet: what is whole, and parts of three products.
    """
    for loss, gradients, counts, text in pools(2).run(tensor_jobs.other_models, options):
        assert loss <= 1e-6
        assert gradients <= 1e-5
        if "post" in options:
            assert counts[1, "backward_input"] == {"all_reduce": 3}
            assert counts[1, "backward_weight"] == {}
        else:
            assert re.search(r"the outputs of block.attention.k_proj are .* 1 head of 2, .* leave 'k_proj' out", text)


@one_in(2)
@pytest.mark.parametrize(
    ("operations", "cuts", "dims"),
    [(dimension_jobs.OPERATIONS, range(3), range(-3, 3))]
    if ALL
    else [(dimension_jobs.SCANS, [1], few([-2, -1, 1], [-1, 1])), (dimension_jobs.LOSSES, [1], [0])],
    ids=len,
)
def test_operations_along_a_dimension_are_those_of_one_process(pools, operations, cuts, dims):
    """Counted from the first or from the last, along the one that is cut or another: results and gradients."""
    assert pools(2).run(dimension_jobs.swept, [*operations], [*cuts], [*dims]) == [[], []]


def test_einsum_has_the_collectives_of_a_product(pools):
    """It views its result with dimensions of size 1, which are no heads."""
    for loss, gradients, counts in pools(2).run(tensor_jobs.einsum):
        assert loss <= 1e-6
        assert gradients <= 1e-5
        assert (counts[0, "forward"], counts[0, "backward"]) == ({"all_reduce": 1}, {})


def test_pieces_are_made_and_go_from_one_mesh_into_another(pools, tmp_path):
    assert pools(4).run(tensor_jobs.stored, str(tmp_path)) == [([[], [], []], [], True)] * 4


GATHERS = "all_gather_into_tensor"
SCATTERS = "reduce_scatter_tensor"
STYLES = {
    "apart": ({"all_reduce": 2}, {"all_reduce": 5}),  # queries, keys and values each take a copy of their input
    "prepared": ({"all_reduce": 2}, {"all_reduce": 3}),
    "vocabulary": ({"all_reduce": 2, GATHERS: 1}, {"all_reduce": 6}),
    "sequence": ({GATHERS: 4, SCATTERS: 2}, {GATHERS: 2, SCATTERS: 4}),  # those of norms' weights are added once a step
}


@pytest.mark.parametrize("name", few(STYLES, ["vocabulary", "sequence"]))
@thorough
def test_modules_that_torch_has_parallelized_are_stages(pools, name):
    """Loss and gradients are those of the same modules by torch alone; with the collectives of their hooks."""
    for loss, gradients, counts, alike in pools(2).run(tensor_jobs.parallelized, name):
        assert loss <= 1e-6
        assert gradients <= 1e-5
        assert (counts[1, "forward"], counts[1, "backward"]) == STYLES[name]
        assert counts[1, "backward_weight"] == {}
        assert alike


def test_what_torch_has_sharded_otherwise_is_refused_with_a_way_out(pools):
    for exported, sharded in pools(2).run(tensor_jobs.unshardable):
        assert re.match(r"0\.weight, 0\.bias is a DTensor, as after parallelize_module, .* interop\.shard\(", exported)
        assert re.match(r"stage 0: 0 went through fully_shard, .* interop\.fsdp\(params, mesh\['dp'\]\)", sharded)
