"""The admission re-check at the decode worker, when a request comes there with its prefill done.

The conductor admitted it on a prediction, a prefill ago. Meanwhile others may have come, answers
may have been longer than expected, the worker may have become slower. Now the load is known, and a
step that is too slow is so for everybody in the batch. So the request is refused if the step with
it would miss the limit, and its prefill is wasted (the second check of the Mooncake paper, section
"Overload"; with its baseline admission it is the only one that looks at decode):

    step = speed * estimate(sequences + 1, context + its tokens)        refused above tbt_slo_s

`speed` is measured / estimated of the worker's steps, at least 1 / RATIO_MAX and at most RATIO_MAX
(measured.py), over as many of them as a short answer has (backends/workers/step_times.py). The
conductor looks at such a mean too; whoever is refused for a few slow steps had its prefill for
nothing. Whoever is asked and not yet running counts in full. An empty worker takes whatever comes:
nobody else is harmed.

`retry_after_s` is when so many will have left that the step would fit, if each of them used all the
tokens it asked for: an upper bound, kept between the same limits as the conductor's.

Not here: room (a worker without room for a request refuses by itself), the check before the
prefill (admission.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conductor.estimates.estimates import DecodeEstimate
from conductor.estimates.measured import RATIO_MAX

RETRY_S_MIN, RETRY_S_MAX = 0.5, 60.0


@dataclass(frozen=True, slots=True)
class BatchOnArrival:
    """What a decode worker has when a request comes. `answers_left_tokens`: how many tokens each
    request there may still get."""

    context_tokens: int
    answers_left_tokens: Sequence[int]
    speed: float = 1.0  # measured / estimated of its steps, over about a short answer

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
    """None: it is taken. `tokens`: of the request, its KV; `tbt_slo_s` 0: no limit."""
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
    """At most so many until enough have left; inf when an empty worker would be too slow too."""
    context_each = there.context_tokens / there.sequences  # the mean request stands for each
    for leaving, steps in enumerate(sorted(there.answers_left_tokens), 1):
        left = there.sequences - leaving
        if estimate.step_s(left + 1, left * context_each + tokens) <= limit_s:
            return float(steps)
    return math.inf
