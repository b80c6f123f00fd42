"""Shortest job first with ageing: the order of prompts in a prefill queue, and step sharing.

Plain shortest-first order starves long prompts. Ageing bounds the wait of a long prompt.

**Order.** Each request gets an order key when it arrives. The smallest order key runs first:

    order_key_s = arrived_s + min(stretch * work_s, wait_s_max)

`work_s` is the predicted prefill time of the tokens that are not cached. A request that arrives
more than `wait_s_max` after another one never overtakes it. `stretch = 0` is first come, first
served. An order key never changes, so a worker can keep its queue in a heap. The conductor computes
the order key, and the worker takes it over (PrefillRequest.place_s). The conductor thus predicts
without messages which of its requests run before a new one.

**Sharing.** All prompts of a step wait until the step ends. Adding a prompt to a step that already
ends `sharing` prompts delays each of them by `per_token * tokens`. It saves the added prompt and
the prompts behind it one step overhead each. A prompt is added while

    sharing * tokens <= behind * overhead_tokens,    overhead_tokens = base_s / per_token_s

Short prompts in front of a deep queue share steps. A long prompt does not fill the rest of a short
prompt's step (docs/reference/conductor.md, "Sharing a prefill step").

**Making way.** The engine computes other prompts while the cached prefix of the first prompt is
being loaded. A running step is never interrupted, so such a step is kept short. It takes at most
MAKING_WAY times the tokens that its overhead is worth, in whole blocks.

Not here: queue contents (prefill_queue.py; in a worker backends/engine/batching/batching.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """Shortest job first with ageing; a stretch of 0 is first come, first served."""

    stretch: float  # seconds of queueing per second of predicted work
    wait_s_max: float  # upper bound of the added seconds

    def key_s(self, arrived_s: float, work_s: float) -> float:
        """Order key in seconds, on the clock of `arrived_s`; the smallest key runs first."""
        return arrived_s + min(self.stretch * work_s, self.wait_s_max)


FIFO = QueueOrder(stretch=0.0, wait_s_max=0.0)


ALWAYS = float("inf")  # a value of overhead_tokens: every step is filled to its token limit
MAKING_WAY = 4  # overhead is at most a fifth of a short step, unless chunk_tokens cuts the step


def shares_step(sharing: int, behind: int, tokens: int, overhead_tokens: float) -> bool:
    """Whether the next prompt joins this step; the first prompt of a step always does.

    `sharing`: prompts that end in the step so far. `behind`: prompts not in the step, the next one
    included. `tokens`: tokens that the next prompt would add to the step.
    """
    assert sharing >= 0 and behind >= 1 and tokens > 0, (sharing, behind, tokens)
    return sharing * tokens <= behind * overhead_tokens


def short_step_tokens(chunk_tokens: int, block_tokens: int, overhead_tokens: float) -> int:
    """Token limit of a step while the cached prefix of the first prompt is being loaded."""
    wanted = MAKING_WAY * overhead_tokens
    if wanted >= chunk_tokens:
        return chunk_tokens
    blocks = max(1, math.ceil(wanted / block_tokens))
    return min(chunk_tokens, blocks * block_tokens)
