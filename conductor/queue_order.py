"""Whose prompt is computed next inside a prefill worker, and which prompts share one step.

**Order**: short work first, with ageing. Each request gets a key when it arrives, and the least key
goes first:

    order_key_s = arrived_s + min(stretch * work_s, wait_s_max)

`work_s` is the predicted time of its prefill, after what is cached. Nobody is overtaken by one that
came more than `wait_s_max` later: that is the ageing. `stretch = 0` is first come, first
served. A key never changes, so the worker may keep a heap, the conductor can tell which of the
requests that it routed there will go ahead of a new one, and both agree without talking about it.

**Sharing**: a full step keeps everybody in it waiting until its end. Taking one more prompt into a
step that already ends `sharing` prompts costs these `sharing * per_token * tokens`, and spares the
prompt and those behind it one overhead. So it is taken while

    sharing * tokens <= behind * overhead_tokens,    overhead_tokens = base_s / per_token_s

Short prompts behind a deep queue share steps; a long prompt does not fill the rest of a short one's
step (docs/reference/conductor.md, "Sharing a prefill step").

**Making way**: while the cached prefix of a prompt that goes first is still being loaded, the
engine computes others, and a step is never interrupted. So such a step is a short one: MAKING_WAY
times as many tokens as its overhead is worth, in whole blocks.

Not here: what the queue holds (prefill_queue.py; in a worker backends/engine/batching/batching.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """How much later a request may queue per second of its work, and at most."""

    stretch: float
    wait_s_max: float

    def key_s(self, arrived_s: float, work_s: float) -> float:
        """Position in the queue, in seconds on the clock of `arrived_s`; the least goes first."""
        return arrived_s + min(self.stretch * work_s, self.wait_s_max)


FIFO = QueueOrder(stretch=0.0, wait_s_max=0.0)


ALWAYS = float("inf")  # as overhead_tokens: every step is filled as far as it goes
MAKING_WAY = 4  # a short step loses at most a fifth of its time to overhead


def shares_step(sharing: int, behind: int, tokens: int, overhead_tokens: float) -> bool:
    """Whether the next prompt is computed in this step too; the first one always is.

    `sharing`: prompts in the step so far. `behind`: prompts that are not in it, the one in question
    included. `tokens`: what the step would compute more.
    """
    assert sharing >= 0 and behind >= 1 and tokens > 0, (sharing, behind, tokens)
    return sharing * tokens <= behind * overhead_tokens


def short_step_tokens(chunk_tokens: int, block_tokens: int, overhead_tokens: float) -> int:
    """What a step takes at most while a prompt that goes first is being loaded."""
    wanted = MAKING_WAY * overhead_tokens
    if wanted >= chunk_tokens:
        return chunk_tokens
    blocks = max(1, math.ceil(wanted / block_tokens))
    return min(chunk_tokens, blocks * block_tokens)
