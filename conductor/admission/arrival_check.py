"""Second admission check, at the decode worker, when a request arrives with its prefill done.

The conductor admitted the request on a prediction made one prefill earlier. Since then other
requests may have arrived, answers may have been longer than expected, or the worker may have become
slower. A slow step delays every request in the batch. The worker therefore refuses a request with
which a step would exceed the limit, although the prefill is then wasted. This is the second check
of the Mooncake paper (section "Overload"), and the only check of decode load with `baseline`
admission. A request of n KV tokens is refused if `step` is above tbt_slo_s:

    step = speed * estimate(sequences + 1, context + n)

`speed` is the measured / the estimated time of the worker's steps, between 1 / RATIO_MAX and
RATIO_MAX (measured.py). It is a mean over as many steps as a short answer has
(backends/workers/step_times.py), because a refusal for a few slow steps would waste prefills.
Requests that wait for their first step count in full. An empty worker accepts every request, since
no other request is delayed.

`retry_after_s` is the time until so many requests have left that the step keeps the limit, if each
generates max_tokens. The value is kept between RETRY_S_MIN and RETRY_S_MAX.

Not here: the worker's check for room, the check before the prefill (admission.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conductor.estimates.estimates import DecodeEstimate
from conductor.estimates.measured import RATIO_MAX

RETRY_S_MIN, RETRY_S_MAX = 0.5, 60.0  # the defaults of retry_after_s_min and retry_after_s_max


@dataclass(frozen=True, slots=True)
class BatchOnArrival:
    """The requests of a decode worker when another request arrives."""

    context_tokens: int  # KV tokens, summed over the requests
    answers_left_tokens: Sequence[int]  # most tokens that each request may still generate
    speed: float = 1.0  # measured / estimated step time, a mean over the steps of a short answer

    @property
    def sequences(self) -> int:
        return len(self.answers_left_tokens)


@dataclass(frozen=True, slots=True)
class DecodeRefusal:
    kind: str
    reason: str
    retry_after_s: float


def refusal(
    there: BatchOnArrival, tokens: int, estimate: DecodeEstimate, tbt_slo_s: float
) -> DecodeRefusal | None:
    """The refusal of a request with `tokens` KV tokens, or None. `tbt_slo_s` 0 means no limit."""
    assert tokens > 0 and tbt_slo_s >= 0, (tokens, tbt_slo_s)
    if tbt_slo_s == 0 or not there.sequences:
        return None
    speed = min(RATIO_MAX, max(1 / RATIO_MAX, there.speed))
    step_s = speed * estimate.step_s(there.sequences + 1, there.context_tokens + tokens)
    if step_s <= tbt_slo_s:
        return None
    reason = (
        f"the decode worker has {there.sequences} requests; with one more, a step would take "
        f"{step_s:.3f} s, the limit is {tbt_slo_s:g} s"
    )
    steps = _steps_until_it_fits(there, tokens, estimate, tbt_slo_s / speed)
    wait_s = steps * speed * estimate.step_s(there.sequences, there.context_tokens)
    return DecodeRefusal("decode_overload", reason, min(RETRY_S_MAX, max(RETRY_S_MIN, wait_s)))


def _steps_until_it_fits(
    there: BatchOnArrival, tokens: int, estimate: DecodeEstimate, limit_s: float
) -> float:
    """Upper bound of the steps until so many requests have left that this request fits. Infinite if
    a step with this request alone exceeds the limit."""
    context_each = there.context_tokens / there.sequences  # each request counts with the mean
    for leaving, steps in enumerate(sorted(there.answers_left_tokens), 1):
        left = there.sequences - leaving
        if estimate.step_s(left + 1, left * context_each + tokens) <= limit_s:
            return float(steps)
    return math.inf
