"""Which prompts share one prefill step: a full step keeps everybody in it waiting until its end.

A step takes `overhead + per_token * tokens` (estimates.py: base_s and per_token_s), and all prompts
in it have their first token when it ends. Taking one more prompt of `tokens` tokens into a step
that already ends `sharing` prompts

    costs    sharing * per_token * tokens     these wait for the tokens of the newcomer
    spares   behind * overhead                the newcomer and those that wait behind it would
                                              start one overhead later if it had its own step

so it is taken while the cost is not above what it spares; divided by per_token, both are in tokens:

    sharing * tokens <= behind * overhead_tokens,    overhead_tokens = base_s / per_token_s

Short prompts behind a deep queue share steps, which keeps throughput under load; a long prompt does
not fill the rest of a short one's step. A chunk that does not end its prompt spares only its share
of a step, which is the same as if it had a whole step's tokens: give that number.

Ignored: requests that have not come yet, and that a step's time grows a little faster than linear.

Not here: the order in which prompts are offered (queue_order.py).
"""

from __future__ import annotations

from conductor.estimates.estimates import PrefillEstimate

ALWAYS = float("inf")  # as overhead_tokens: every step is filled as far as it goes


def shares_step(sharing: int, behind: int, tokens: int, overhead_tokens: float) -> bool:
    """Whether the next prompt is computed in this step too; the first one always is.

    `sharing`: prompts in the step so far. `behind`: prompts that are not in it, the one in question
    included. `tokens`: what the step would compute more.
    """
    assert sharing >= 0 and behind >= 1 and tokens > 0, (sharing, behind, tokens)
    return sharing * tokens <= behind * overhead_tokens


def overhead_tokens(estimate: PrefillEstimate) -> float:
    """How many tokens take as long as one step's overhead."""
    return estimate.base_s / estimate.per_token_s if estimate.per_token_s > 0 else ALWAYS
