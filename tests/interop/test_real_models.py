"""Real models under every schedule: losses, gradients and training are the unsplit module's."""

import copy
from dataclasses import replace
from functools import cache

import optree
import pytest
import torch

from fpipe import Batch, Output, handlers, interop
from fpipe.interop.splitting import split as splitting
from tests.support import split_cases, split_jobs
from tests.support.combinations import combined, few, one_in, sample, thorough
from tests.support.jobs import differences, same
from tests.support.sharing import sharing

EVERY = [(name, n) for name in split_cases.CASES for n in (2, 4)]
FOUR = [(name, 4) for name in ("unet", "gpt", "llama", "t5")]
QUICK = [("unet", 4), ("gpt", 4)]  # skips and buffers, ties: from FPIPE_TESTS=pairs on each meets every schedule
EACH = pytest.mark.parametrize(("name", "stages"), sample(EVERY, few(QUICK, QUICK[1:])))


(MEETINGS,) = combined(case=split_cases.CASES, schedule=split_cases.SCHEDULES, handler=("local", "gloo")).args[1:]


def schedules_of(case, handler):
    return [schedule for name, schedule, over in MEETINGS if (name, over) == (case, handler)]


@cache
def expected(name, stages):
    case, pipeline, params, state = split_cases.split(name, stages)
    return split_cases.run(split_cases.step(pipeline, handlers.Reference(), autodiff="eager"), case, params, state)


@one_in(2)
@pytest.mark.parametrize(("name", "stages"), sample(EVERY, few(FOUR, FOUR[:2])))
def test_loss_and_gradients_are_the_unsplit_modules(name, stages):
    case, pipeline, *_ = split_cases.split(name, stages)
    assert len(pipeline.stages) == stages
    split_cases.check(expected(name, stages), case, pipeline)


@EACH
def test_every_schedule_gives_the_references_bits(name, stages):
    case, pipeline, params, state = split_cases.split(name, stages)
    local = sharing(handlers.Local(), "split", name, stages)
    for schedule in schedules_of(name, "local"):
        found = split_cases.run(split_cases.step(pipeline, local, schedule), case, params, state)
        assert differences(found, expected(name, stages)) == [], schedule


@EACH
def test_over_gloo(pools, name, stages):
    """A schedule on as many ranks as it takes: one is no pipeline, and left out."""
    case, *split = split_cases.split(name, stages)
    loss, grads, state = expected(name, stages)
    whole = (loss, grads, state) if state else (loss, grads)
    for ranks in (2, 4):
        chosen = [schedule for schedule in schedules_of(name, "gloo") if split_cases.ranks(schedule, stages) == ranks]
        given = ((name, stages), chosen, case.batch, case.target, *split, whole)
        assert not chosen or pools(ranks).run(split_jobs.steps, *given) == [[]] * ranks


STEPS = 20


@thorough
@EACH
def test_training_ends_where_the_unsplit_modules_ends(pools, name, stages):
    case, *split = split_cases.split(name, stages)
    schedule = {2: "one_f_one_b", 4: "zb_v"}[stages]
    given = ((name, stages), schedule, case.batch, case.target, *split, STEPS)
    ranks = pools(2).run(split_jobs.train, *given)
    whole = trained(name)
    assert set().union(*ranks) == whole.keys()
    for found in ranks:
        for entry, x in found.items():
            torch.testing.assert_close(x, whole[entry], rtol=1e-9, atol=1e-9, msg=lambda t, e=entry: f"{e}: {t}")
    for entry in ranks[0].keys() & ranks[1].keys():
        assert same(ranks[0][entry], ranks[1][entry]), entry


@cache
def trained(name):
    """The state_dict of a module after steps of AdamW."""
    case = split_cases.made(name)
    case = replace(case, module=copy.deepcopy(case.module))
    adamw = torch.optim.AdamW(case.module.parameters(), lr=1e-2)
    for _ in range(STEPS):
        _, gradients, buffers = split_cases.unsplit(case, 2)
        for entry, gradient in gradients.items():
            case.module.get_parameter(entry).grad = gradient
        case.module.load_state_dict(buffers, strict=False)
        adamw.step()
    return case.module.state_dict()


@thorough
@pytest.mark.parametrize("name", sample(split_cases.CASES, ("gpt",)))
def test_in_float32(name):
    case, pipeline, params, state = split_cases.split(name, 4, torch.float32)
    found = split_cases.run(split_cases.step(pipeline, handlers.Local()), case, params, state)
    split_cases.check(found, case, pipeline, tolerance={"rtol": 1e-4, "atol": 1e-6})


# As they are split


@one_in(3)
@pytest.mark.parametrize("name", sample(split_cases.CASES, ("unet", "gpt", "llama")))
def test_the_state_dict_goes_in_and_out(name):
    case, pipeline, params, state = split_cases.split(name, 4)
    whole = case.module.state_dict()
    entries = interop.to_state_dict(pipeline, params, state)
    assert list(entries) == list(whole)
    assert differences(entries, dict(whole)) == []
    assert differences(interop.from_state_dict(pipeline, whole), (params, state)) == []
    case.module.load_state_dict(entries)


@thorough
def test_t5s_encoder_reaches_every_decoder_stage():
    _, pipeline, *_ = split_cases.split("t5", 4)
    reads = [
        {r for r in stage.inputs if isinstance(r, Output) and r.path[0].startswith("encoder")}
        for stage in pipeline.stages
    ]
    assert len(reads[2]) == 1
    assert reads[3] == reads[2]


def test_masks_and_positions_are_recomputed_not_sent():
    _, pipeline, params, _ = split_cases.split("llama", 4)
    reads = [stage.inputs for stage in pipeline.stages]
    assert all(Batch("attention_mask") in reads[s] for s in (1, 2))
    assert [len([r for r in each if isinstance(r, Output)]) for each in reads] == [0, 1, 1, 1]
    assert reads[0] == (Batch("input_ids"),)
    assert Batch("labels") in reads[3]
    assert "model.rotary_emb.inv_freq" in pipeline.stages[2].frozen
    assert "model.rotary_emb.inv_freq" in params[1]


@pytest.mark.parametrize("name", sample(split_cases.CASES, ("unet", "llama")))
def test_stages_run_where_their_tensors_are(name):
    """A tensor that forward creates on the example's device is created where the params and the batch are."""
    case, pipeline, params, state = split_cases.split(name, 4)
    params, state, batch = optree.tree_map(lambda x: x.to("meta"), (params, state, case.batch))
    output = pipeline(params, batch, **({"state": state} if state else {}))
    devices = {x.device.type for x in optree.tree_leaves(output) if isinstance(x, torch.Tensor)}
    assert devices == {"meta"}


@thorough
def test_a_hugging_face_model_is_made_by_its_own_rules(monkeypatch):
    case, *_ = split_cases.split("llama", 4)
    with torch.device("meta"):
        module = split_cases.CASES["llama"]().module
    exported = split_cases.exported("llama")
    monkeypatch.setattr(splitting, "export", lambda *_: exported)
    pipeline, _ = interop.split(module, at=case.cuts[4], kwargs=case.given[1], loss=case.loss)
    params, _ = interop.materialise(pipeline, init=module._init_weights)
    assert torch.equal(params[1]["model.rotary_emb.inv_freq"], case.module.model.rotary_emb.inv_freq.float())
    assert params[1]["model.layers.0.self_attn.q_proj.weight"].std() < 0.03  # 0.02, not a Linear's own 0.35
