"""Placements of stages of which some have copies."""

from fpipe import Placement


def copied(*counts):
    """Stages with so many copies each, one stage on a rank."""
    ranks = iter(range(sum(counts)))
    return Placement([[next(ranks) for _ in range(count)] for count in counts])


def of_one_stage(ranks):
    """Chains of at least two stages in which one has copies."""
    for count in range(2, ranks):
        for at in range(ranks - count + 1):
            yield copied(*(count if stage == at else 1 for stage in range(ranks - count + 1)))
