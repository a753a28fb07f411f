"""A vocabulary split over the ranks: the bits of the reference, and the undivided model's loss and gradients."""

import pytest
import torch

from fpipe import StageError, handlers
from fpipe.parallel import Vocabulary
from tests.support import vocabulary_jobs as jobs
from tests.support.combinations import combined, one_in
from tests.support.jobs import differences

OPTIONS = {"tied": {}, "untied": {"tied": False}, "smooth": {"label_smoothing": 0.1}, "sum": {"reduction": "sum"}}


@combined(ranks=[1, 2, 3, 4], kind=OPTIONS)
def test_loss_and_gradients_are_the_undivided_models(ranks, kind):
    """Within rounding, relative to the largest number of each leaf."""
    options = {"dtype": torch.float64, **OPTIONS[kind]}
    vocabulary, params, batch = jobs.model(ranks, **options)
    (loss, grads), _ = jobs.step(ranks, handlers.Reference(), **options)
    expected, by_params = torch.func.grad_and_value(lambda p: jobs.whole(vocabulary, *p, **batch))(params)[::-1]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    matrix, blocks, head = vocabulary.join(grads)
    pairs = [(matrix, by_params[0]), *zip((b["w"] for b in blocks), (b["w"] for b in by_params[1]), strict=True)]
    for found, wanted in [*pairs, *([] if head is None else [(head, by_params[2])])]:
        assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@one_in(3)
@combined(
    ranks=[2, 3], kind=OPTIONS, schedule=["vocabulary_1f1b", "gpipe"], autodiff=["graph", "eager"], microbatches=[1, 4]
)
def test_local_has_the_references_bits(ranks, kind, schedule, autodiff, microbatches):
    options = {"schedule": schedule, "autodiff": autodiff, "microbatches": microbatches, **OPTIONS[kind]}
    found, _ = jobs.step(ranks, handlers.Local(), **options)
    expected, _ = jobs.step(ranks, handlers.Reference(), **options)
    assert differences(found, expected) == []


@one_in(2)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_gloo_has_the_references_bits(pools, kind):
    assert pools(2).run(jobs.train, 2, OPTIONS[kind]) == [[]] * 2


def test_split_and_join():
    vocabulary, params, _ = jobs.model(4, tied=False)
    matrix, blocks, head = vocabulary.join(vocabulary.split(*params))
    assert torch.equal(matrix, params[0])
    assert torch.equal(head, params[2])
    assert blocks == params[1]


def test_large_logits_do_not_overflow():
    vocabulary, (matrix, blocks), batch = jobs.model(2)
    pipeline = vocabulary.pipeline([lambda params, x: 1000 * jobs.block(params, x)] * 2)
    assert pipeline(vocabulary.split(matrix, blocks), batch).isfinite()


@pytest.mark.parametrize("where", ["tokens", "targets"])
@pytest.mark.parametrize("wrong", [11, -1])
def test_what_is_not_in_the_vocabulary_fails(where, wrong):
    vocabulary, params, batch = jobs.model(2)
    changed = {**batch, where: batch[where].clone().index_fill(0, torch.tensor([0]), wrong)}
    with pytest.raises((StageError, IndexError, RuntimeError), match="index"):
        vocabulary.pipeline([jobs.block] * 2)(vocabulary.split(*params), changed)


def test_refusals():
    vocabulary, (matrix, blocks), _ = jobs.model(2)
    with pytest.raises(ValueError, match="size=2 tokens can't be split over ranks=4"):
        Vocabulary(2, 4)
    with pytest.raises(ValueError, match="label_smoothing must be a number from 0 to 1, not 2"):
        Vocabulary(4, 2, label_smoothing=2)
    with pytest.raises(TypeError, match="reduction must be 'mean' or 'sum', not 'none'"):
        Vocabulary(4, 2, reduction="none")
    with pytest.raises(ValueError, match="1 blocks for 2 ranks"):
        vocabulary.pipeline([jobs.block])
    with pytest.raises(ValueError, match="a tied output layer has no matrix of its own"):
        vocabulary.split(matrix, blocks, matrix)
    with pytest.raises(ValueError, match="the embedding has 10 rows, and the vocabulary 11 tokens"):
        vocabulary.split(matrix[:10], blocks)
