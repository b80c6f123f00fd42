"""Which prompts share a prefill step: what it costs those in it and spares those behind."""

from __future__ import annotations

import random

from conductor.estimates.estimates import PrefillEstimate
from conductor.queue_order import ALWAYS, shares_step

STEP = PrefillEstimate(base_s=0.016, per_token_s=2e-5, per_token_pair_s=0.0)  # 800 tokens


def ends_s(steps: list[list[int]]) -> list[float]:
    """When each prompt has its first token, if these steps are computed one after the other."""
    found, now_s = list[float](), 0.0
    for step in steps:
        now_s += STEP.base_s + STEP.per_token_s * sum(step)
        found += [now_s] * len(step)
    return found


def planned(prompts: list[int], overhead: float) -> list[list[int]]:
    steps: list[list[int]] = []
    for place, tokens in enumerate(prompts):
        behind = len(prompts) - place
        if steps and shares_step(len(steps[-1]), behind, tokens, overhead):
            steps[-1].append(tokens)
        else:
            steps.append([tokens])
    return steps


def test_the_first_prompt_is_always_in_the_step() -> None:
    assert shares_step(0, 1, 100_000, 1.0)


def test_a_long_prompt_waits_for_the_next_step_and_a_short_one_need_not() -> None:
    overhead = STEP.overhead_tokens
    assert overhead == 800
    assert not shares_step(1, 1, 801, overhead)
    assert shares_step(1, 1, 800, overhead)


def test_a_deep_queue_shares_what_a_short_one_does_not() -> None:
    assert not shares_step(2, 1, 1_000, 800)
    assert shares_step(2, 3, 1_000, 800)


def test_always_fills_the_step() -> None:
    assert shares_step(200, 1, 100_000, ALWAYS)
    assert PrefillEstimate(0.01, 0.0, 1e-9).overhead_tokens == ALWAYS


def test_sharing_by_this_rule_beats_sharing_always_and_never(seed: int) -> None:
    rng = random.Random(seed)
    totals = {"rule": 0.0, "always": 0.0, "never": 0.0}
    for _ in range(200):
        prompts = sorted(int(rng.lognormvariate(7, 1.2)) + 1 for _ in range(rng.randrange(2, 12)))
        totals["rule"] += sum(ends_s(planned(prompts, STEP.overhead_tokens)))
        totals["always"] += sum(ends_s([prompts]))
        totals["never"] += sum(ends_s([[tokens] for tokens in prompts]))
    assert totals["rule"] < 0.97 * totals["never"] < totals["always"]
