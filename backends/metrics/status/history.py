"""Figures of the last minutes, a point for each few seconds, for the status page. Pure."""

from __future__ import annotations

from collections import deque

import msgspec

from backends.metrics.status.view import Change, Page, latency

EVERY_S, KEPT_S = 10.0, 600.0


class HistoryPoint(msgspec.Struct, frozen=True):
    """The figures of about EVERY_S."""

    unix_s: float  # its end
    ttft_p90_s: float | None  # None without requests, as tbt_p90_s
    tbt_p90_s: float | None
    tokens_per_s: float  # generated
    rejections_per_s: float


class History:
    """Points of KEPT_S at most."""

    def __init__(self) -> None:
        self._last: Page | None = None
        self.points: deque[HistoryPoint] = deque(maxlen=round(KEPT_S / EVERY_S))

    def is_due(self, now_s: float) -> bool:
        """Whether `add` makes a point of a page that is read now. `now_s`: as Page.read_at_s."""
        return self._last is None or now_s - self._last.read_at_s >= EVERY_S

    def add(self, page: Page, unix_s: float) -> None:
        """Add the figures since the last page. `unix_s`: time of its reading."""
        before, self._last = self._last, page
        if before is None:
            return
        change = Change(page, before)
        self.points.append(
            HistoryPoint(
                unix_s=round(unix_s, 1),
                ttft_p90_s=latency(change, "mooncake_ttft_seconds").p90_s,
                tbt_p90_s=latency(change, "mooncake_tbt_seconds").p90_s,
                tokens_per_s=sum(change.rates("mooncake_output_tokens_total", "").values()),
                rejections_per_s=sum(change.rates("mooncake_rejections_total", "").values()),
            )
        )
