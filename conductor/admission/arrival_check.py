"""Second admission check, at the decode worker, when a request arrives with its prefill done.

The conductor admitted the request on a prediction made one prefill earlier. Since then other
requests may have arrived, answers may have been longer than expected, or the worker may have become
slower. The load is now known, and a slow step delays every request in the batch. The worker
therefore refuses a request whose step would miss the limit, and its prefill is wasted. This is the
second check of the Mooncake paper (section "Overload"). With `baseline` admission it is the only
check of decode load:

    step = speed * estimate(sequences + 1, context + its tokens)        refused above tbt_slo_s

`speed` is measured / estimated of the worker's steps, between 1 / RATIO_MAX and RATIO_MAX
(measured.py). It is a mean over as many steps as a short answer has
(backends/workers/step_times.py), because a refusal for a few slow steps would waste prefills.
Requests that wait for their first step count in full. An empty worker accepts every request, since
no other request is delayed.

`retry_after_s` is the time until enough requests have left for the step to fit, if each generates
max_tokens. It is thus an upper bound, kept between RETRY_S_MIN and RETRY_S_MAX.

Not here: room (the worker checks it itself), the check before the prefill (admission.py).
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
    """The load of a decode worker when a request arrives. `answers_left_tokens`: the most tokens
    that each request there may still generate."""

    context_tokens: int  # sum over all requests there
    answers_left_tokens: Sequence[int]
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
    """The refusal of a request with `tokens` KV tokens; None: accepted. `tbt_slo_s` 0: no limit."""
    assert tokens > 0 and tbt_slo_s >= 0, (tokens, tbt_slo_s)
    if tbt_slo_s == 0 or not there.sequences:
        return None
    speed = min(RATIO_MAX, max(1 / RATIO_MAX, there.speed))
    step_s = speed * estimate.step_s(there.sequences + 1, there.context_tokens + tokens)
    if step_s <= tbt_slo_s:
        return None
    reason = (
        f"the decode worker has {there.sequences} requests; with this one a step would take "
        f"{step_s:.3f} s, the limit is {tbt_slo_s:g} s"
    )
    steps = _steps_until_it_fits(there, tokens, estimate, tbt_slo_s / speed)
    wait_s = steps * speed * estimate.step_s(there.sequences, there.context_tokens)
    return DecodeRefusal("decode_overload", reason, min(RETRY_S_MAX, max(RETRY_S_MIN, wait_s)))


def _steps_until_it_fits(
    there: BatchOnArrival, tokens: int, estimate: DecodeEstimate, limit_s: float
) -> float:
    """Upper bound of the steps until enough requests have left. inf: the step with this request
    alone exceeds the limit."""
    context_each = there.context_tokens / there.sequences  # the mean stands for each request
    for leaving, steps in enumerate(sorted(there.answers_left_tokens), 1):
        left = there.sequences - leaving
        if estimate.step_s(left + 1, left * context_each + tokens) <= limit_s:
            return float(steps)
    return math.inf
