"""Shortest job first with ageing: the order of prompts in a prefill queue, and step sharing.

Plain shortest-first order starves long prompts. Ageing bounds the wait of a long prompt.

**Order.** Each request gets an order key when it arrives. The smallest order key runs first:

    order_key_s = arrived_s + min(stretch * work_s, wait_s_max)

`work_s` is the predicted prefill time of the tokens that are not cached. A request that arrives
more than `wait_s_max` after another one never overtakes it. `stretch = 0` is first come, first
served. An order key never changes, so a worker can keep its queue in a heap. The conductor computes
the order key and sends it to the worker (PrefillRequest.place_s). The conductor can thus predict
which of its requests run before a new one.

**Sharing.** The prompts of a step wait until the step ends. If `sharing` prompts end in a step, one
more prompt of `tokens` tokens delays each of them by `per_token_s * tokens`. If this prompt is not
added, the prompt and all prompts after it (`behind` prompts) wait for one more step, which has an
overhead of `base_s`. The prompt is added if the delays are at most these savings:

    sharing * tokens <= behind * overhead_tokens,    overhead_tokens = base_s / per_token_s

Short prompts at the front of a long queue share steps. A long prompt is not added to a short
prompt's step (docs/reference/conductor.md, "Sharing a prefill step").

**Making way.** While the cached prefix of the first prompt is being loaded, the engine computes
later prompts. A step cannot be interrupted, so a long step would delay the first prompt. Such steps
have at most MAKING_WAY * overhead_tokens tokens, rounded up to whole blocks.

Not here: the queues, predicted (prefill_queue.py) and real (backends/engine/batching/batching.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """Shortest job first with ageing, or first come, first served with a stretch of 0."""

    stretch: float  # seconds added to the order key per second of predicted work, >= 0
    wait_s_max: float  # upper bound of the added seconds, >= 0

    def key_s(self, arrived_s: float, work_s: float) -> float:
        """Order key in seconds, on the clock of `arrived_s`; the smallest key runs first."""
        return arrived_s + min(self.stretch * work_s, self.wait_s_max)


FIFO = QueueOrder(stretch=0.0, wait_s_max=0.0)


ALWAYS = float("inf")  # overhead_tokens with which every step is filled to its token limit
MAKING_WAY = 4  # overhead is at most a fifth of a short step, unless chunk_tokens cuts the step


def shares_step(sharing: int, behind: int, tokens: int, overhead_tokens: float) -> bool:
    """Whether the next prompt joins a step that already has a prompt.

    `sharing`: number of prompts that end in the step so far. `behind`: number of prompts not in the
    step, including the next one. `tokens`: tokens that the next prompt would add to the step.
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
