"""How long Dynamo's simulated engine takes: a prefill pass, and any number of decode steps.

The two polynomials are those built into the mocker of ai-dynamo-runtime 1.6.1 (`timing_model:
polynomial`). They depend on tokens only; there is no term for the context that a prefill reads.

    prefill pass   4.209989e-7 t^2 + 1.518344e-2 t + 16.50142 ms     t new tokens
    decode step    5.74 + 54.01 p - 25.74 p^2 ms                     p share of the KV memory in use

Between two changes of a batch each step adds one token to every sequence, so p grows by a fixed
amount a step. The time of m steps is then a cubic in m, which is evaluated instead of summed.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 512
PASS_TOKENS_MAX = 8192  # new tokens in one prefill pass (max_num_batched_tokens)
SEQUENCES_MAX = 256  # in one decode batch (max_num_seqs)

PREFILL_BASE_S, PREFILL_PER_TOKEN_S, PREFILL_PER_TOKEN2_S = 16.50142e-3, 1.518344e-5, 4.209989e-10
DECODE_BASE_S, DECODE_SHARE_S, DECODE_SHARE2_S = 5.74e-3, 54.01e-3, -25.74e-3


def blocks_of(tokens: int) -> int:
    """Blocks that hold `tokens`; the last one may be partial."""
    return -(-tokens // BLOCK_TOKENS)


def prefill_pass_s(new_tokens: int) -> float:
    """One pass that computes `new_tokens` of any number of prompts; 0 without any."""
    if not new_tokens:
        return 0.0
    return PREFILL_BASE_S + new_tokens * (PREFILL_PER_TOKEN_S + PREFILL_PER_TOKEN2_S * new_tokens)


def alone_s(new_tokens: int) -> float:
    """Prefill time of one prompt on an idle worker, in the fewest passes."""
    full, rest = divmod(new_tokens, PASS_TOKENS_MAX)
    return full * prefill_pass_s(PASS_TOKENS_MAX) + prefill_pass_s(rest)


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps of one unchanging batch: time of the first m steps, and the inverse."""

    first_s: float  # the first step
    slope_s: float  # second step less the first
    bend_s: float  # second difference of the steps' times, negative

    @classmethod
    def of(cls, sequences: int, context_tokens: int, room_tokens: int) -> Steps:
        """`context_tokens`: KV of all `sequences` before the first step."""
        share, more = context_tokens / room_tokens, sequences / room_tokens
        return cls(
            DECODE_BASE_S + share * (DECODE_SHARE_S + DECODE_SHARE2_S * share),
            more * (DECODE_SHARE_S + DECODE_SHARE2_S * (2 * share + more)),
            2 * DECODE_SHARE2_S * more * more,
        )

    def seconds(self, steps: int) -> float:
        """Time of the first `steps` steps together."""
        pairs = steps * (steps - 1) / 2
        return steps * self.first_s + pairs * (self.slope_s + self.bend_s * (steps - 2) / 3)

    def until(self, seconds: float) -> int:
        """The least number of steps (at least 1) that take `seconds` or more.

        A step takes between first_s and first_s plus the batch's growth, so a few secant steps from
        below find the number; the loop ends at the exact whole number.
        """
        steps = max(1, int(seconds / self.first_s))
        while self.seconds(steps) >= seconds and steps > 1:
            over_s = self.seconds(steps) - seconds
            steps = max(1, steps - max(1, int(over_s / self._step_s(steps))))
        while self.seconds(steps) < seconds:
            steps += 1
        return steps

    def _step_s(self, steps: int) -> float:
        return self.seconds(steps) - self.seconds(steps - 1)
