"""The predicted batch of one decode worker, now and at a later moment.

A request is charged here from the moment it is routed. It is *coming* while its prefill runs, then
*joined*; a joined request is *fresh* until a report that must know it arrives, then *covered*. The
report replaces what it covers:

    joined now = foreign + min(covered, reported) + fresh

`foreign` is what the report counted beyond our own charges: requests from before a restart of the
conductor, or from another front. A fresh request may or may not be in a report; ours are assumed
to be, so that none counts twice. The `min` makes a finished request leave at once and a lost finish
harmless: an idle worker's next report brings its count to zero whatever is still charged, so no
worker stays "full" by mistake.

Load at a later moment (Mooncake, "Early Rejection Based on Prediction", the system-level form):
add the coming requests whose prefill ends before then, take away those that will have decoded for
their expected time. One that has outlived its expectation is assumed to stay. Whoever stays has had
a token a step since the report; without that every prediction would be a little too low.

All counts are integers, kept by adding and subtracting, so they come back to exactly zero.

Not here: how long a step of such a batch takes (estimates.py), whether that is admitted
(admission.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

from conductor.load.decode_forecast import Answer, DecodeForecast
from mooncake_store.records.membership import WorkerReport


class Load(NamedTuple):
    """A batch: how many sequences, their KV tokens and the pages they hold or reserved."""

    sequences: float = 0.0
    context_tokens: float = 0.0
    pages: float = 0.0


@dataclass(slots=True)
class Tally:
    """A sum over charges, in whole numbers."""

    sequences: int = 0
    context_tokens: int = 0
    pages: int = 0

    def add(self, charge: DecodeCharge, sign: int) -> None:
        self.sequences += sign
        self.context_tokens += sign * charge.context_tokens
        self.pages += sign * charge.pages
        assert min(self.sequences, self.context_tokens, self.pages) >= 0, f"below zero: {self}"


@dataclass(slots=True)
class DecodeCharge:
    context_tokens: int
    pages: int
    prefill_end_s: float  # predicted, while coming
    stage: str = "coming"  # "coming" | "fresh" | "covered"
    joined_at_s: float = 0.0
    leave_s: float = 0.0  # predicted, once joined


class DecodeBatch:
    """Charges of one decode worker, and what its last report said."""

    def __init__(self) -> None:
        self._charges: dict[str, DecodeCharge] = {}
        self._fresh: dict[str, DecodeCharge] = {}  # few: those since the last report
        self._tallies = {"coming": Tally(), "fresh": Tally(), "covered": Tally()}
        self._reported = Tally()  # at most this much of the covered charges is really there
        self._foreign = Tally()
        self._reported_at_s, self._tokens_per_s = 0.0, 0.0  # of each request that is in the batch
        self._coming: list[tuple[float, str]] = []  # (prefill_end_s, request), sorted
        self._leaving: list[tuple[float, str]] = []  # (leave_s, request), sorted
        self.forecast: DecodeForecast | None = None  # of predictive_lengths only

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._charges

    def charge(
        self, request_id: str, context_tokens: int, pages: int, prefill_end_s: float,
        answer: Answer | None = None, now_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Routed: it will join when its prefill ends. A forecast needs to know the answer."""
        assert request_id not in self._charges, f"{request_id} is charged already"
        charge = DecodeCharge(context_tokens, pages, prefill_end_s)
        self._charges[request_id] = charge
        self._tallies["coming"].add(charge, 1)
        insort(self._coming, (prefill_end_s, request_id))
        if self.forecast is not None and answer is not None:
            self.forecast.charge(request_id, answer, context_tokens, pages, prefill_end_s, now_s)
            self._settle()

    def join(self, request_id: str, now_s: float, leave_s: float) -> None:
        """Its prefill ended; from here on the worker's reports may know it."""
        charge = self._charges.get(request_id)
        if charge is None or charge.stage != "coming":
            return
        self._forget(request_id, charge)
        charge.stage, charge.joined_at_s, charge.leave_s = "fresh", now_s, leave_s
        self._fresh[request_id] = charge
        self._tallies["fresh"].add(charge, 1)
        insort(self._leaving, (leave_s, request_id))
        if self.forecast is not None:
            self.forecast.join(request_id, now_s)
            self._settle()

    def drop(self, request_id: str) -> bool:
        """Finished or cancelled; False when it was not charged here."""
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return False
        self._forget(request_id, charge)
        if self.forecast is not None:
            self.forecast.drop(request_id)
            self._settle()
        return True

    def _settle(self) -> None:
        """Tell the forecast what the report left of the charges, and what else it counted."""
        assert self.forecast is not None
        covered, fresh = self._tallies["covered"].sequences, self._tallies["fresh"].sequences
        there = min(covered, self._reported.sequences) + fresh
        foreign = self._foreign
        self.forecast.settle(
            there / max(1, covered + fresh),
            (foreign.sequences, foreign.context_tokens, foreign.pages),
        )

    def _forget(self, request_id: str, charge: DecodeCharge) -> None:
        self._tallies[charge.stage].add(charge, -1)
        self._fresh.pop(request_id, None)
        is_coming = charge.stage == "coming"
        entries = self._coming if is_coming else self._leaving
        entry = (charge.prefill_end_s if is_coming else charge.leave_s, request_id)
        del entries[bisect_left(entries, entry)]

    def on_report(self, report: WorkerReport, now_s: float, report_lag_s: float) -> None:
        """Replace what the report must know; keep what it cannot know yet."""
        known = [r for r, c in self._fresh.items() if c.joined_at_s <= now_s - report_lag_s]
        for request_id in known:
            charge = self._fresh.pop(request_id)
            self._tallies["fresh"].add(charge, -1)
            charge.stage = "covered"
            self._tallies["covered"].add(charge, 1)
        self._reported = Tally(
            report.running + report.queue_requests, report.context_tokens, report.pages_used
        )
        covered, fresh = self._tallies["covered"], self._tallies["fresh"]
        # A worker reserves pages for a request while its prefill still runs.
        pages = covered.pages + fresh.pages + self._tallies["coming"].pages
        self._foreign = Tally(
            max(0, self._reported.sequences - covered.sequences - fresh.sequences),
            max(0, self._reported.context_tokens - covered.context_tokens - fresh.context_tokens),
            max(0, self._reported.pages - pages),
        )
        self._reported_at_s = now_s
        is_running = report.running > 0 and report.step_s > 0
        self._tokens_per_s = 1 / report.step_s if is_running else 0.0
        if self.forecast is not None:
            self.forecast.renew(now_s, report.step_s if report.running else 0.0)
            self._settle()

    def load_now(self) -> Load:
        """What is decoding now; requests still in prefill are not."""
        foreign, covered = self._foreign, self._tallies["covered"]
        reported, fresh = self._reported, self._tallies["fresh"]
        return Load(
            foreign.sequences + min(covered.sequences, reported.sequences) + fresh.sequences,
            foreign.context_tokens
            + min(covered.context_tokens, reported.context_tokens)
            + fresh.context_tokens,
            foreign.pages + min(covered.pages, reported.pages) + fresh.pages,
        )

    def load_reserved(self) -> Load:
        """Everything in the batch or on its way to it, as if nobody left."""
        now, coming = self.load_now(), self._tallies["coming"]
        return Load(
            now.sequences + coming.sequences,
            now.context_tokens + coming.context_tokens,
            now.pages + coming.pages,
        )

    def load_at(self, at_s: float, now_s: float, decode_s: float) -> Load:
        """What will be decoding at `at_s`, if decoding takes `decode_s` where nothing is known."""
        now, coming = self.load_now(), self._tallies["coming"]
        if not now.sequences and not coming.sequences:
            return now
        leaving: float = _until(self._leaving, at_s) - _until(self._leaving, now_s)
        # Foreign requests are known by number only: their ends are spread evenly.
        leaving += self._foreign.sequences * min(1.0, max(0.0, at_s - now_s) / decode_s)
        staying = max(0.0, 1.0 - leaving / now.sequences) if now.sequences else 0.0
        arriving = _until(self._coming, at_s)  # less those that come and go before then
        arriving -= max(0, _until(self._coming, at_s - decode_s) - _until(self._coming, now_s))
        share = arriving / coming.sequences if coming.sequences else 0.0
        # Those of the report have had a token a step since then.
        had_tokens = self._tokens_per_s * max(0.0, at_s - self._reported_at_s)
        grown = had_tokens * (now.sequences - self._tallies["fresh"].sequences)
        # The right *number* of average requests: knowing which ones would cost a walk.
        return Load(
            now.sequences * staying + coming.sequences * share,
            (now.context_tokens + grown) * staying + coming.context_tokens * share,
            now.pages * staying + coming.pages * share,
        )

    def leave_times(self, now_s: float, decode_s: float) -> list[float]:
        """When each request, here or coming, is expected to leave; soonest first."""
        foreign = self._foreign.sequences
        times = [max(now_s, leave_s) for leave_s, _ in self._leaving]
        times += [max(now_s, end_s) + decode_s for end_s, _ in self._coming]
        times += [now_s + decode_s * (n + 1) / foreign for n in range(foreign)]
        return sorted(times)

    def check(self) -> None:
        """Prove the invariants."""
        if self.forecast is not None:
            self.forecast.check()
        for stage, tally in self._tallies.items():
            charges = [c for c in self._charges.values() if c.stage == stage]
            expected = Tally(
                len(charges),
                sum(c.context_tokens for c in charges),
                sum(c.pages for c in charges),
            )
            assert tally == expected, f"{stage}: counted {tally}, charged {expected}"
        coming = [(c.prefill_end_s, r) for r, c in self._charges.items() if c.stage == "coming"]
        leaving = [(c.leave_s, r) for r, c in self._charges.items() if c.stage != "coming"]
        assert self._coming == sorted(coming) and self._leaving == sorted(leaving)
        fresh = {r for r, c in self._charges.items() if c.stage == "fresh"}
        assert set(self._fresh) == fresh, f"fresh: {set(self._fresh)} is not {fresh}"


def _until(entries: list[tuple[float, str]], at_s: float) -> int:
    """How many of the sorted entries are due at `at_s` or before."""
    return bisect_left(entries, (math.nextafter(at_s, math.inf), ""))
