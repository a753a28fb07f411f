"""A small language model with its vocabulary split over the ranks, and the same model whole."""

from functools import cache

import torch
import torch.nn.functional as F

import fpipe
from fpipe import Placement, handlers
from fpipe.parallel import Vocabulary
from tests.support import jobs

WIDTH, LENGTH, ROWS, MICROBATCHES = 8, 5, 8, 4


def block(params, x):
    return x + torch.tanh(x @ params["w"])


@cache
def model(ranks, tied=True, size=11, dtype=torch.float32, rows=ROWS, **options):
    """Return the vocabulary, whole params, a batch and its targets, of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = Vocabulary(size, ranks, tied, **options)
    matrices = [torch.randn(size, WIDTH, generator=generator).to(dtype) for _ in range(1 if tied else 2)]
    blocks = [{"w": torch.randn(WIDTH, WIDTH, generator=generator).to(dtype) / 4} for _ in range(ranks)]
    tokens, targets = torch.randint(size, (2, rows, LENGTH), generator=generator)
    targets = targets.masked_fill(torch.rand(rows, LENGTH, generator=generator) < 0.2, vocabulary.ignore_index)
    return vocabulary, (matrices[0], blocks, *matrices[1:]), {"tokens": tokens, "targets": targets}


def whole(vocabulary, matrix, blocks, head=None, *, tokens, targets):
    """Return the loss of the undivided model."""
    x = F.embedding(tokens, matrix)
    for params in blocks:
        x = block(params, x)
    logits = x @ (matrix if head is None else head).T
    return F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        ignore_index=vocabulary.ignore_index,
        label_smoothing=vocabulary.label_smoothing,
        reduction=vocabulary.reduction,
    )


def counted(targets):
    return targets.ne(-100).sum()


def step(ranks, handler, schedule="vocabulary_1f1b", autodiff="auto", microbatches=MICROBATCHES, **options):
    """Return a step's loss and gradients."""
    vocabulary, params, batch = model(ranks, **options)
    pipeline = vocabulary.pipeline([block] * ranks)
    plan = pipeline.plan(Placement.vocabulary(ranks), microbatches)
    weights = {"weight": counted} if vocabulary.reduction == "mean" else {"reduction": "sum"}
    run = fpipe.value_and_grad(
        pipeline, getattr(fpipe.schedules, schedule), plan, handler=handler, autodiff=autodiff, **weights
    )
    own, split = {}, vocabulary.split(*params)
    for rank in handler.ranks(plan):
        own |= pipeline.params_on(split, plan, rank)
    return run(own, batch, batch["targets"]), plan


def train(rank, ranks, options):
    """Return the differences of a rank's results over gloo from the reference's."""
    found, _ = step(ranks, jobs.handler(), **options)
    expected, _ = step(ranks, handlers.Reference(), **options)
    return jobs.differences(found, (expected[0], {stage: expected[1][stage] for stage in found[1]}))
