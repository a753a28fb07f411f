"""The schedule that generates tokens: the programs of prefill and of the tokens after it. No torch.

The last stage chooses a token for each prompt of a microbatch, and stage 0 goes on with it. A microbatch has one token
on its way at a time, so that all ranks are at work where there are as many microbatches as stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from fpipe.effects import Decode, Effect, Prefill
from fpipe.plan import Plan


def autoregressive(rank: int, plan: Plan, *, prompts: bool = True) -> Iterator[Effect]:
    """Generate `plan.tokens` tokens for each prompt; a microbatch is some prompts.

    Rank 0 takes a microbatch's next token when it arrives. Legal for every DAG and placement: no effect needs one that
    comes later in the order of tokens, waves and microbatches. With `plan.prefills`, prompts go through the stages in
    so many slices, and a rank begins when the first slice has passed the ranks before it.

    Args:
        prompts: begin with whole prompts; else with the last tokens of an earlier program.

    >>> import fpipe
    >>> print(fpipe.draw(autoregressive, fpipe.Plan(fpipe.Placement.loop(2), microbatches=2, tokens=3)))
    rank 0  P0 P1 D0 D1 D0 D1
    rank 1  .  P0 P1 D0 D1 D0 D1
    >>> print(fpipe.draw(autoregressive, fpipe.Plan(fpipe.Placement.loop(2), microbatches=2, tokens=3, prefills=2)))
    rank 0  P0 P1 P0 P1 D0 D1
    rank 1  .  P0 P1 P0 P1 D0 D1
    """
    runs = [(m + s, -m, s) for s in plan.stages_on(rank) for m in plan.microbatches_of(s, rank)]
    for token in range(plan.tokens):
        for _, m, s in sorted(runs):
            yield (Prefill if prompts and token < plan.prefills else Decode)(s, -m, token)
