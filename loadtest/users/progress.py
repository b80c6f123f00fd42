"""A line every few seconds that says how a run goes, for runs without a page and without tables.

Percentiles are of the answers since the line before: the process that says this also takes the
times of tokens, and must not look through a whole run again and again.
"""

from __future__ import annotations

from collections import Counter

from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord, spread


class Progress:
    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()
        self._seen = 0

    def line(self, records: list[RequestRecord], now_s: float, users: int) -> str:
        """`records` are all so far; what was there at the last line is not looked at again."""
        new, self._seen = records[self._seen :], len(records)
        self._ended.update(record.outcome for record in new)
        ended = ", ".join(
            f"{self._ended[outcome]} {word}"
            for outcome, word in (
                (COMPLETED, "answered"), (REJECTED, "rejected"), (FAILED, "failed"),
            )
        )  # fmt: skip
        text = f"{now_s:.0f} s: {users} users, {ended}"
        done = [record for record in new if record.outcome == COMPLETED]
        levels = (("TTFT", [r.ttft_s for r in done]), ("TBT", [r.tbt_s for r in done]))
        found = [
            f"{name} P90 {spread_s.p90 * 1e3:.0f} ms"
            for name, values in levels
            if (spread_s := spread(values)) is not None
        ]
        return f"{text}; of the last: {', '.join(found)}" if found else text
