"""Requests that have not come yet, but will join the decode workers before this one does.

A long prompt asks for room that will be free when its prefill has ended. Until then others come,
with shorter prompts, and join before it. If the room were promised to the long prompt as if nobody
came, prompts would be preferred for being slow, and each promise would be tighter than it looks.
At the rate of late, those who come after now and join before t are, per decode worker,

    expected(t) = overtaker_share x rate x (t - now - d (1 - exp(-(t - now) / d)))

where d is the mean time from routing to the end of prefill, and delays are taken as exponential: in
the first moments nobody who comes can be through with prefill yet, much later all but the last d
seconds' are. Each counts as the mean request of late: one sequence, its context, its pages.

`overtaker_share` says how much of that is kept free for them. At 1 the future is equally full for
everybody, and under overload only requests with next to no prefill come in; at 0 whoever asks first
has it. Rate and means fade with `demand_half_life_s` (forward_decay.py);
before that time has passed the rate is told too low rather than read from a few requests.

Ignored: that overtakers leave again, and that routing sends more of them where there is room.

Not here: those that are known (decode_batch.py, decode_forecast.py).
"""

from __future__ import annotations

import math

from conductor.estimates.forward_decay import ForwardDecay

DELAY_S_MIN = 1e-6


class Overtakers:
    """Counts what is admitted; tells what is expected to join until a moment."""

    def __init__(self, share: float, half_life_s: float) -> None:
        self._share = share
        self._window_s = half_life_s / math.log(2.0)  # that a faded sum stands for
        self._decay = ForwardDecay(half_life_s)
        # Faded sums over those admitted.
        self._requests = self._delay_s = self._context_tokens = self._pages = 0.0

    def admitted(self, delay_s: float, context_tokens: int, pages: int, now_s: float) -> None:
        """`delay_s`: until its prefill is predicted to end."""
        shrink = self._decay.rescaled(now_s)
        weight = self._decay.weight(now_s)
        self._requests = self._requests / shrink + weight
        self._delay_s = self._delay_s / shrink + weight * delay_s
        self._context_tokens = self._context_tokens / shrink + weight * context_tokens
        self._pages = self._pages / shrink + weight * pages

    def expected(self, at_s: float, now_s: float, workers: int) -> tuple[float, float, float]:
        """(sequences, context tokens, pages) that join each of so many workers until `at_s`."""
        ahead_s = at_s - now_s
        if not self._requests or ahead_s <= 0:
            return 0.0, 0.0, 0.0
        delay_s = max(self._delay_s / self._requests, DELAY_S_MIN)
        effective_s = max(0.0, ahead_s + delay_s * math.expm1(-ahead_s / delay_s))
        per_sum = self._share * effective_s / (self._decay.weight(now_s) * self._window_s * workers)
        return per_sum * self._requests, per_sum * self._context_tokens, per_sum * self._pages
