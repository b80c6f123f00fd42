"""A server's capacity: the highest rate at which it keeps 90 % of its good requests.

A slow machine cannot answer the longest prompts in time even when it is idle. So the shares of the
search are relative to `attainable_share`.

Search by steps, then by bisection. The first rate is that of a server which answers one request at
a time (`serial_per_s`). From it, go up or down by STEP until one rate passes and the next one
fails. Then try geometric means until both differ by less than PRECISION. The
caller stores each tried rate, so an interrupted search resumes with the next one.

Pure. Not here: sending requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.headline.goodput import FIXED_TPOT_S, FIXED_TTFT_S, IdleTimes
from bench.headline.traces import TraceRequest

GOOD_SHARE_MIN = 0.9
STEP, PRECISION = 1.3, 1.15
LOWEST_PER_S, HIGHEST_PER_S = 0.05, 50.0


def attainable_share(requests: Sequence[TraceRequest], idle: IdleTimes) -> float:
    """Share of the requests that the idle server answers in time (`fixed`), without its cache."""
    kept = 0
    for request in requests:
        ttft_s, tpot_s = idle.times_s(request.prompt_tokens)
        kept += ttft_s <= FIXED_TTFT_S and tpot_s <= FIXED_TPOT_S
    if not kept:
        raise ValueError("an idle vLLM answers no request in time here; the machine is too slow")
    return kept / len(requests)


def serial_per_s(requests: Sequence[TraceRequest], idle: IdleTimes) -> float:
    """Requests per second of a server that answers one request at a time, without its cache."""
    total_s = 0.0
    for request in requests:
        ttft_s, tpot_s = idle.times_s(request.prompt_tokens)
        total_s += ttft_s + (request.output_tokens - 1) * tpot_s
    return round(len(requests) / total_s, 3)


def next_rate(good_shares: Mapping[float, float], first_per_s: float) -> float | None:
    """The rate to try after those in `good_shares` (rate -> share of good requests).

    None when the capacity is known, see `capacity_per_s`."""
    if not good_shares:
        return first_per_s
    passed, failed = _bracket(good_shares)
    if passed is None:
        assert failed is not None, "a tried rate passes or fails"
        lower = failed / STEP
        return round(lower, 3) if lower >= LOWEST_PER_S else None
    if failed is None:
        higher = passed * STEP
        return round(higher, 3) if higher <= HIGHEST_PER_S else None
    if failed / passed <= PRECISION:
        return None
    return round(math.sqrt(passed * failed), 3)


def capacity_per_s(good_shares: Mapping[float, float]) -> float:
    """The highest rate that passed below every rate that failed.

    ValueError when no rate passed."""
    passed, _ = _bracket(good_shares)
    if passed is None:
        raise ValueError(
            f"even {min(good_shares)} requests/s are not {GOOD_SHARE_MIN:.0%} good; is the machine "
            "busy with other work?"
        )
    return passed


def _bracket(good_shares: Mapping[float, float]) -> tuple[float | None, float | None]:
    """(highest rate that passed below all failures, lowest rate that failed)."""
    failures = [rate for rate, share in good_shares.items() if share < GOOD_SHARE_MIN]
    failed = min(failures, default=None)
    passes = [
        rate
        for rate, share in good_shares.items()
        if share >= GOOD_SHARE_MIN and (failed is None or rate < failed)
    ]
    return max(passes, default=None), failed
