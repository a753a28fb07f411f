"""Updates before the norm of the gradients is known: the bits are those of a loop that waits for it."""

import copy
import pickle
import re
import threading
from dataclasses import replace

import numpy as np
import optree
import pytest
import torch

import fpipe
from fpipe import Pipeline, Placement, handlers, interop, schedules
from fpipe.training.late import Late, LateNumber, LateScale, final
from fpipe.training.post_validation import Validation, Verdict
from tests.support import fault_jobs
from tests.support import post_validation_jobs as jobs
from tests.support.combinations import combined, one_in, sample
from tests.support.jobs import differences

NOT_READ, BY_RANK_0, BY_ALL = (), (0,), (0, 1, 2)


@one_in(3)
@combined(
    schedule=("zb_h2", "interleaved_1f1b", "zb_v", "seq_1f1b", "one_f_one_b"),
    optimizer=jobs.OPTIMIZERS,
    donate=(False, True),
    reads=(NOT_READ, BY_RANK_0, BY_ALL),
    drop=(0.0, 0.3),
)
def test_bits_of_a_loop_that_waits_for_the_norm(schedule, optimizer, donate, reads, drop, pools):
    options = {"optimizer": optimizer, "donate": donate, "reads": reads, "drop": drop, "late": 0.1}
    for found, errors, _ in _compare(pools, schedule, **options):
        assert (found, errors) == ([], [])


@one_in(5)
@pytest.mark.parametrize("handler", [handlers.Local, handlers.Reference])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": 2.0**10, "checks": {}}, {"checks": jobs.RAISES}])
def test_bits_where_the_handler_does_not_begin_steps_again(handler, donate, options):
    """An error is one of the step that has it."""
    options = options | {"handler": handler(), "donate": donate, "sizes": jobs.NOT_FINITE if options else jobs.SIZES}
    found, errors, _ = jobs.compare(0, 3, "zb_h2", options)
    assert (found, len(errors)) == ([], 2 * (options.get("checks") == jobs.RAISES))


@one_in(2)
@pytest.mark.parametrize("donate", [False, True])
def test_reading_in_other_modes_changes_no_bits(donate, pools):
    for found, errors, _ in _compare(pools, "zb_h2", donate=donate, reads=BY_ALL, reads_elsewhere=True):
        assert (found, errors) == ([], [])


def test_changing_the_loss_changes_no_verdict(pools):
    for found, errors, _ in _compare(pools, "zb_h2", checks=jobs.SKIPS, changes_loss=True):
        assert (found, errors) == ([], [])


@one_in(3)
@pytest.mark.parametrize("checks", [jobs.SKIPS, jobs.CLIPS, jobs.CLIPS | jobs.SKIPS])
def test_gradients_that_are_not_finite(checks, pools):
    """They are skipped where that is asked for, and else in the params."""
    for found, errors, more in _compare(pools, "zb_h2", sizes=jobs.NOT_FINITE, checks=checks, donate=True, late=0.1):
        assert (found, errors) == ([], [])
        assert checks == jobs.CLIPS or {i for i, count in enumerate(more) if count} <= {*jobs.REVERSALS}


@one_in(2)
@combined(
    checks=({}, jobs.CLIPS, jobs.SKIPS, jobs.RAISES),
    sizes=(jobs.SIZES, jobs.NOT_FINITE, jobs.OFTEN_NOT_FINITE),
    donate=(False, True),
    reads=(NOT_READ, BY_RANK_0, BY_ALL),
)
def test_a_loss_scale(checks, sizes, donate, reads, pools):
    """Ranks expect that it stays, or grows: it grows after two steps in a row that are finite."""
    options = {"checks": checks, "sizes": sizes, "donate": donate, "reads": reads, "late": 0.1, "scale": 2.0**10}
    for found, errors, _ in _compare(pools, "zb_h2", **options):
        assert (found, checks == jobs.RAISES or not errors) == ([], True)


@one_in(3)
@combined(
    sizes=(jobs.NOT_FINITE, jobs.OFTEN_NOT_FINITE),
    checks=(jobs.RAISES, jobs.CLIPS | jobs.RAISES),
    donate=(False, True),
    reads=(NOT_READ, BY_RANK_0, BY_ALL),
)
def test_an_error_for_a_step_that_has_returned(sizes, checks, donate, reads, pools):
    """The next call raises it on all ranks, and has not run: with the same batch it then has the bits."""
    options = {"sizes": sizes, "checks": checks, "donate": donate, "reads": reads, "late": 0.1}
    for found, errors, _ in _compare(pools, "zb_h2", **options):
        assert found == []
        early, *_ = errors
        assert early.startswith("microbatch 0: in call 3 of this train_step, the loss is inf, and that of 5 others"), (
            early
        )
        assert "the gradients of stages 0, 1, 2 are not finite: grads[" in early
        assert "Its results are the params and states that were passed to it. Find" in early


@one_in(3)
@combined(
    checks=(jobs.CLIPS, jobs.SKIPS, jobs.RAISES),
    sizes=(jobs.SIZES, jobs.NOT_FINITE),
    scale=(None, 2.0**10),
    schedule=("zb_h2", "zb_v", "interleaved_1f1b"),
)
def test_replicas(checks, sizes, scale, schedule, pools):
    options = {"checks": checks, "sizes": sizes, "scale": scale, "late": 0.2, "replicas": 2, "donate": True}
    for process, (found, _, more) in enumerate(pools(4).run(jobs.compare, 2, schedule, options)):
        assert found == []
        if process % 2 == 0 and checks == jobs.CLIPS and sizes is jobs.SIZES and schedule == "zb_h2":
            assert [i for i, count in enumerate(more) if count] == [*jobs.REVERSALS]


def test_a_thread_may_wait_for_results_while_steps_run(pools):
    found = pools(3).run(jobs.read_in_a_thread, 3)
    for rank, (differing, errors, reads, _) in enumerate(found):
        assert (differing, errors, reads) == ([], [], 0 if rank else len(jobs.SIZES))
    assert len({calls for *_, calls in found}) == 1


def _compare(pools, schedule, **options):
    return pools(3).run(jobs.compare, 3, schedule, options)


def test_steps_begin_again_after_an_update_that_does_not_stand(pools):
    """The ranks before the last one, which comes late, have run some forwards by then; in no other step."""
    _, _, more = zip(*_compare(pools, "zb_h2", late=0.4), strict=True)
    for rank, forwards in enumerate(more):
        again = [i for i, count in enumerate(forwards) if count]
        assert again == [*jobs.REVERSALS] or (rank == 2 and {*again} <= {*jobs.REVERSALS}), (rank, forwards)


FAULTS = {
    "refused": {"faults": {4: (2, "refused")}},
    "refused later": {"faults": {5: (0, "refused"), 7: (1, "refused")}},
    "raises": {"faults": {4: (1, "raises"), 6: (0, "raises")}},
    "rows": {"faults": {4: (None, "rows"), 9: (None, "rows")}},
    "limit": {"faults": {7: (1, "limit")}, "checks": {"max_norm": torch.tensor(0.6)}},
    "interrupt": {"faults": {7: (0, "interrupt")}, "lags": {6: 0.15}},
    "params": {"sizes": tuple(1e3 * size if size > 1 else size for size in jobs.SIZES), "limit": 100.0},
}
ERRORS = {"refused": 1, "refused later": 2, "raises": 2, "limit": 1, "interrupt": 1}


@one_in(4)
@pytest.mark.parametrize("donate", sample([False, True], [True]))
@pytest.mark.parametrize("fault", FAULTS)
def test_steps_that_are_refused_or_fail_when_they_begin_again(fault, donate, pools):
    """They fail as in a loop that waits. An error for params that are not the right ones is none."""
    for rank, (found, errors, _) in enumerate(_compare(pools, "zb_h2", late=0.1, donate=donate, **FAULTS[fault])):
        assert (found, len(errors)) == ([], ERRORS.get(fault, 0)), rank


@pytest.mark.parametrize("victim", sample([0, 1, 2], [1]))
def test_a_rank_that_is_killed_in_a_step_that_begins_again_is_named(victim, fresh_pool):
    outcomes = fresh_pool(3).outcomes(jobs.killed, 3, "zb_h2", victim)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            text, seconds = outcome.value
            assert fault_jobs.blamed(text) == f"rank {victim}", text
            assert seconds < 10.0, seconds


def test_all_ranks_update_early_or_none(pools):
    for (text,) in pools(2).run(jobs.differing):
        assert "different settings: post_validate= is True on rank 0 and none on rank 1" in text


def local(**options):
    pipeline = Pipeline([lambda p, x: x * p, lambda p, x: x + p], loss=lambda y, t: (y - t).square().mean())
    plan = pipeline.plan(Placement.loop(ranks=2), microbatches=2)
    pair = options.pop("optimizer", interop.optimizer(torch.optim.SGD, lr=0.1))
    options = {"handler": handlers.Local(), "max_norm": 1.0, "post_validate": True} | options
    step = fpipe.train_step(pipeline, schedules.one_f_one_b, plan, pair, **options)
    params = {0: torch.tensor(2.0), 1: torch.tensor(1.0)}
    return lambda **more: step(params, pair[0](params), torch.arange(4.0), torch.zeros(4), **more)


def test_results_are_those_of_other_steps_to_all_who_read_them():
    late, expected = local()(), local(post_validate=False)()
    assert [*map(type, late)] == [Late, Late, torch.Tensor, LateNumber]
    assert differences(late, expected) == []
    assert dict(late[0]) == expected[0]
    assert repr(late) == repr(expected)
    assert differences(pickle.loads(pickle.dumps(late[:2])), expected[:2]) == []
    assert differences(copy.deepcopy(late[:2]), expected[:2]) == []
    norm, number = late[3], expected[3].item()
    assert (float(norm), norm.item(), norm.tolist(), f"{norm:.3f}") == (number, number, number, f"{number:.3f}")
    assert norm.isfinite()
    assert norm + 1 == 1 + number
    assert torch.stack([norm, norm]).sum() == 2 * number
    assert type(norm * 2) is torch.Tensor


def test_a_late_loss_scale_is_one_to_all_who_read_it():
    scale = fpipe.LossScale(2.0**4, growth_interval=1)
    *_, late = local(max_norm=None)(loss_scale=scale)
    plain = scale.adjust(finite=True)
    assert type(late) is LateScale
    assert isinstance(late, fpipe.LossScale)
    assert repr(late) == repr(plain) == "LossScale(32.0)"
    uses = (lambda x: x, copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.to("cpu"))
    every = [*uses, lambda x: optree.tree_map(torch.clone, x, namespace="fpipe"), lambda x: replace(x, streak=0)]
    for use in (*every, lambda x: x.adjust(finite=False).adjust(finite=True)):
        found, expected = use(late), use(plain)
        assert (found.value, found.streak, found.growth_interval) == (expected.value, expected.streak, 1)
        assert use is uses[0] or type(found) is fpipe.LossScale
    for post_validate in (False, True):  # other functions take it too
        *_, following = local(max_norm=None, post_validate=post_validate)(loss_scale=late)
        assert following.tensor == 2.0**6
    with pytest.raises(fpipe.StageError, match=r"loss_scale must be a fpipe\.LossScale or None, not a float"):
        local()(loss_scale=2.0)


def test_the_optimizer_takes_late_results():
    pair = interop.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    params, state, *_ = local(optimizer=pair)()
    grads = {stage: torch.ones(()) for stage in range(2)}
    expected = pair.update(grads, dict(state), dict(params))
    assert differences(pair.update(grads, state, params), expected) == []


USES = {
    "tensor": torch.tensor,
    "full": lambda norm: torch.full((), norm, dtype=torch.float64),
    "new_tensor": torch.zeros(1, dtype=torch.float64).new_tensor,
    "alpha": lambda norm: torch.zeros((), dtype=torch.float64).add(torch.ones((), dtype=torch.float64), alpha=norm),
    "setitem": lambda norm: torch.zeros(1, dtype=torch.float64).index_put((torch.tensor([0]),), norm)[0],
    "reflected": lambda norm: 1.0 * norm,
    "tensor first": lambda norm: torch.ones((), dtype=torch.float64) * norm,
    "numpy": np.asarray,
    "clamp": lambda norm: torch.full((), 1e9, dtype=torch.float64).clamp(max=norm),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda norm: pickle.loads(pickle.dumps(norm)),
}


@one_in(4)
@pytest.mark.parametrize("use", USES)
def test_a_late_number_is_never_taken_for_another_one(use):
    expected = local(post_validate=False)()[3].item()
    assert float(USES[use](local()()[3])) == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resident": 1}, "resident=1: params are gathered"),
        ({"capture": True}, "capture=True"),
        ({"optimizer": (lambda p: p, lambda g, s, p: (p, s))}, "take interop.optimizer"),
    ],
)
def test_options_that_do_not_go_together(options, says):
    with pytest.raises(ValueError, match=f"post_validate=True does not go with .*{re.escape(says)}"):
        local(**options)


def _validation(update, wait):
    """A step whose update is made once its verdict is known."""
    return Validation(update, {}, ({0: torch.zeros(())}, {}, {}), None, wait, is_early=False, donates=False)


def _plain():
    return Verdict(torch.ones(()), None, None)


def test_while_a_thread_waits_others_see_their_default_dtype():
    seen = []

    def wait():
        seen.append(torch.get_default_dtype())
        return _plain()

    def update(gradients, old):
        seen.append(torch.get_default_dtype())
        return old

    validation = _validation(update, wait)
    torch.set_default_dtype(torch.float64)
    try:
        validation.settle()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [torch.float64, torch.float32]


def test_an_update_that_raises_in_a_thread_that_reads_raises_in_the_next_step_too():
    """It is made again from the same values; the error of the step that it belongs to is the update's own."""
    calls = []

    def update(gradients, old):
        calls.append(old[0][0].item())
        raise ValueError(f"update {len(calls)} of step 7 has no memory")

    validation = _validation(update, _plain)
    late = validation.late[0]
    errors = []

    def read():
        try:
            final(late)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(20)
    assert errors == ["update 1 of step 7 has no memory"]
    assert validation.may_change
    with pytest.raises(ValueError, match="update 2 of step 7 has no memory"):
        validation.renewed({}, {}, None)
    assert calls == [0.0, 0.0]
