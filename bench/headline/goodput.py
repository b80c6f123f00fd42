"""Good requests, by two definitions, from the client's details of each request.

A request is good when it was answered completely and within both limits: the time to first token
(TTFT) and the mean time per output token after the first (TPOT). A rejected, failed or shortened
request is not good. Goodput is the share of good requests times the offered rate.

- `fixed`: TTFT <= 2 s and TPOT <= 100 ms.
- `paper`: TTFT <= 10x and TPOT <= 5x of an idle vLLM with this prompt length (Mooncake,
  "Overload-oriented scheduling"). One table, measured once, is used for all systems.

Pure. Not here: sending requests (client.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.harness.result import Cell

FIXED_TTFT_S, FIXED_TPOT_S = 2.0, 0.1
PAPER_TTFT, PAPER_TPOT = 10.0, 5.0  # times the idle server's
FIXED, PAPER = "fixed", "paper"


@dataclass(frozen=True, slots=True)
class RequestDetail:
    """One request as the client saw it; times are meaningless when `error` is not empty."""

    prompt_tokens: int
    wanted_tokens: int
    output_tokens: int
    ttft_s: float
    latency_s: float
    itls_s: tuple[float, ...]  # between messages; a message may carry several tokens
    error: str = ""  # "": answered

    @property
    def is_answered(self) -> bool:
        return not self.error and self.output_tokens >= self.wanted_tokens

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for a single token."""
        after_first = self.output_tokens - 1
        return (self.latency_s - self.ttft_s) / after_first if after_first > 0 else 0.0


@dataclass(frozen=True, slots=True)
class IdleTimes:
    """Times of an idle server by prompt length; linear between the lengths."""

    prompt_tokens: tuple[int, ...]  # rising
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]

    @classmethod
    def of(cls, details: Sequence[RequestDetail]) -> IdleTimes:
        """Medians by prompt length; ValueError when a request was not answered."""
        by_length: dict[int, list[RequestDetail]] = defaultdict(list)
        for detail in details:
            if not detail.is_answered:
                raise ValueError(f"the idle server did not answer: {detail.error or 'too short'}")
            by_length[detail.prompt_tokens].append(detail)
        lengths = tuple(sorted(by_length))
        ttfts = tuple(median(one.ttft_s for one in by_length[n]) for n in lengths)
        tpots = tuple(median(one.tpot_s for one in by_length[n]) for n in lengths)
        return cls(lengths, ttfts, tpots)

    def limits_s(self, prompt_tokens: int) -> tuple[float, float]:
        """(TTFT, TPOT) limits by the paper's definition."""
        ttft_s, tpot_s = self.times_s(prompt_tokens)
        return PAPER_TTFT * ttft_s, PAPER_TPOT * tpot_s

    def times_s(self, prompt_tokens: int) -> tuple[float, float]:
        """(TTFT, TPOT) of a prompt of this length."""
        return (
            self._between(prompt_tokens, self.ttft_s),
            self._between(prompt_tokens, self.tpot_s),
        )

    def _between(self, prompt_tokens: int, values: Sequence[float]) -> float:
        after = bisect_left(self.prompt_tokens, prompt_tokens)
        if after == 0:
            return values[0]
        if after == len(values):
            return values[-1]
        low, high = self.prompt_tokens[after - 1], self.prompt_tokens[after]
        share = (prompt_tokens - low) / (high - low)
        return values[after - 1] + share * (values[after] - values[after - 1])


def good_share(details: Sequence[RequestDetail], idle: IdleTimes | None = None) -> float:
    """Share of all requests that are good: by `fixed`, or by `paper` with `idle`."""
    good = 0
    for detail in details:
        ttft_s_max, tpot_s_max = FIXED_TTFT_S, FIXED_TPOT_S
        if idle is not None:
            ttft_s_max, tpot_s_max = idle.limits_s(detail.prompt_tokens)
        in_time = detail.ttft_s <= ttft_s_max and detail.tpot_s <= tpot_s_max
        good += detail.is_answered and in_time
    return good / max(1, len(details))


def numbers(
    details: Sequence[RequestDetail], rate_per_s: float, idle: IdleTimes | None
) -> dict[str, Cell]:
    """One cell of the measurement. Times are of answered requests; null without any."""
    answered = [detail for detail in details if detail.is_answered]
    ttfts_s = sorted(detail.ttft_s for detail in answered)
    tpots_s = sorted(detail.tpot_s for detail in answered if detail.output_tokens > 1)
    itls_s = sorted(itl_s for detail in answered for itl_s in detail.itls_s)
    found: dict[str, Cell] = {
        "offered_per_s": round(rate_per_s, 4),
        "goodput_fixed_per_s": round(good_share(details) * rate_per_s, 4),
        "goodput_paper_per_s": None,
        "requests": len(details),
        "answered": len(answered),
        "failed": len(details) - len(answered),
        "ttft_mean_ms": _ms(sum(ttfts_s) / len(ttfts_s)) if ttfts_s else None,
    }
    if idle is not None:
        found["goodput_paper_per_s"] = round(good_share(details, idle) * rate_per_s, 4)
    for percent in (50, 90, 99):
        found[f"ttft_p{percent}_ms"] = _ms(percentile(ttfts_s, percent))
    found["tpot_mean_ms"] = _ms(sum(tpots_s) / len(tpots_s)) if tpots_s else None
    found["itl_p99_ms"] = _ms(percentile(itls_s, 99))
    return found


def percentile(ascending: Sequence[float], percent: float) -> float | None:
    """Nearest rank; None without values."""
    if not ascending:
        return None
    rank = math.ceil(percent / 100 * len(ascending))
    return ascending[max(0, rank - 1)]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
