"""Predicted batch of one decode worker: reservations reconciled with worker reports.

A routed request is reserved. It is *coming* during its prefill, and *joined* afterwards. A joined
request is *fresh* until a report arrives that must include it. From then on it is *confirmed*. The
batch is predicted from these counts and the last report:

    joined now = unattributed + min(confirmed, reported) + fresh

*Unattributed* requests are reported but not reserved, because another frontend or an earlier
process of this frontend routed them. A report may or may not include a fresh request. It is assumed
to include each fresh request, so that no request counts twice.

A report may still include requests whose end is known here. Recently finished requests are
therefore subtracted from the report, and do not count as unattributed. If the end of a request was
lost, `min` limits the error. An idle worker reports zero requests, so its load becomes zero too.

The load at a later moment is that of Mooncake, "Early Rejection Based on Prediction" (system
level). Coming requests whose prefill ends before that moment are added. Requests that will have
decoded for their expected time are subtracted. A request that has exceeded its expected time is
assumed to stay. Each reported request that stays grows by one token per step since the report.

All counts are integers and only added or subtracted, so they return to exactly zero.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from conductor.load.decode_forecast import DecodeForecast, ExpectedAnswer
from mooncake_store.records.membership import WorkerReport

GONE_S_MAX = 5.0  # seconds for which a finished request is subtracted, if no report arrives


class DecodeLoad(NamedTuple):
    """Sequences, their KV tokens, and the pages that they hold or reserve. Reserved and reported
    loads are whole numbers, forecasts are not."""

    sequences: float = 0.0
    context_tokens: float = 0.0
    pages: float = 0.0

    def plus(self, sequences: float, context_tokens: float, pages: float) -> DecodeLoad:
        return DecodeLoad(
            self.sequences + sequences, self.context_tokens + context_tokens, self.pages + pages
        )

    def minus(self, sequences: float, context_tokens: float, pages: float) -> DecodeLoad:
        return self.plus(-sequences, -context_tokens, -pages)


@dataclass(slots=True)
class DecodeReservation:
    load: DecodeLoad  # of one sequence: tokens of the prompt, pages for it and the longest answer
    prefill_end_s: float  # time at which the request is predicted to join
    state: str = "coming"  # "coming" | "fresh" | "confirmed"
    joined_at_s: float = 0.0  # 0 while coming
    leave_s: float = 0.0  # time at which it is predicted to finish; 0 while coming


class DecodeBatch:
    """Reservations of one decode worker, and the counts of its last report."""

    def __init__(self) -> None:
        self._reservations: dict[str, DecodeReservation] = {}
        self._fresh: dict[str, DecodeReservation] = {}  # the reservations in state "fresh"
        # Sums over the reservations, by their state.
        self._tallies = dict.fromkeys(("coming", "fresh", "confirmed"), DecodeLoad(0, 0, 0))
        self._gone: deque[tuple[float, DecodeReservation]] = deque()  # (removed_s, reservation)
        self._gone_sequences, self._gone_pages = 0, 0.0  # joined requests and pages in `_gone`
        self._reported = DecodeLoad(0, 0, 0)  # upper bound of the confirmed requests in the batch
        self._unattributed = DecodeLoad(0, 0, 0)  # reported beyond the reservations
        self._reported_at_s = 0.0
        self._tokens_per_s = 0.0  # tokens that each request in the batch gets per second
        self._coming: list[tuple[float, str]] = []  # (prefill_end_s, request), sorted
        self._leaving: list[tuple[float, str]] = []  # (leave_s, request), sorted
        self.forecast: DecodeForecast | None = None  # only with predictive_lengths

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reservations

    def reserve(
        self,
        request_id: str,
        context_tokens: int,
        pages: int,
        prefill_end_s: float,
        answer: ExpectedAnswer | None = None,
        now_s: float = 0.0,
    ) -> None:
        """Add a routed request, which joins at `prefill_end_s`. The forecast needs `answer`."""
        assert request_id not in self._reservations, f"{request_id} is reserved already"
        load = DecodeLoad(1, context_tokens, pages)
        self._reservations[request_id] = DecodeReservation(load, prefill_end_s)
        self._tallies["coming"] = self._tallies["coming"].plus(*load)
        insort(self._coming, (prefill_end_s, request_id))
        if self.forecast is not None and answer is not None:
            self.forecast.reserve(request_id, answer, context_tokens, pages, prefill_end_s, now_s)
            self._settle()

    def join(self, request_id: str, now_s: float, leave_s: float) -> None:
        """Move a request from coming to fresh, because its prefill has ended. Idempotent."""
        reservation = self._reservations.get(request_id)
        if reservation is None or reservation.state != "coming":
            return
        self._forget(request_id, reservation)
        reservation.state, reservation.joined_at_s, reservation.leave_s = "fresh", now_s, leave_s
        self._fresh[request_id] = reservation
        self._tallies["fresh"] = self._tallies["fresh"].plus(*reservation.load)
        insort(self._leaving, (leave_s, request_id))
        if self.forecast is not None:
            self.forecast.join(request_id, now_s)
            self._settle()

    def drop(self, request_id: str, now_s: float) -> bool:
        """Remove a finished or cancelled request; False if it was not reserved here."""
        reservation = self._removed(request_id)
        if reservation is None:
            return False
        self._gone.append((now_s, reservation))
        self._gone_sequences += reservation.state != "coming"
        self._gone_pages += reservation.load.pages
        self._forget_gone(now_s - GONE_S_MAX)
        return True

    def _forget_gone(self, until_s: float) -> None:
        while self._gone and self._gone[0][0] <= until_s:
            _, reservation = self._gone.popleft()
            self._gone_sequences -= reservation.state != "coming"
            self._gone_pages -= reservation.load.pages

    def _removed(self, request_id: str) -> DecodeReservation | None:
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None:
            self._forget(request_id, reservation)
            if self.forecast is not None:
                self.forecast.drop(request_id)
                self._settle()
        return reservation

    def attribute(self) -> None:
        """Reduce the unattributed requests, after a request that the last report may have counted
        was reserved or has joined."""
        self._unattributed = DecodeLoad(*map(min, self._beyond_ours(), self._unattributed))
        if self.forecast is not None:
            self._settle()

    def disown(self, request_id: str) -> None:
        """Turn a reservation into unattributed load until the next report, because no note of its
        end will arrive."""
        before = self.load_reserved()
        self._removed(request_id)
        removed = before.minus(*self.load_reserved())
        self._unattributed = self._unattributed.plus(*removed)
        if self.forecast is not None:
            self._settle()

    def _beyond_ours(self) -> DecodeLoad:
        """The part of the last report that the reservations do not account for."""
        confirmed, fresh = self._tallies["confirmed"], self._tallies["fresh"]
        # A worker reserves pages for a request while its prefill runs.
        pages = confirmed.pages + fresh.pages + self._tallies["coming"].pages + self._gone_pages
        reported, gone = self._reported, self._gone_sequences
        # Each finished request counts as many tokens as the mean of the reported requests.
        there = 1.0 - min(1.0, gone / reported.sequences) if reported.sequences else 1.0
        context_tokens = round(reported.context_tokens * there)
        return DecodeLoad(
            max(0, reported.sequences - confirmed.sequences - fresh.sequences - gone),
            max(0, context_tokens - confirmed.context_tokens - fresh.context_tokens),
            max(0, reported.pages - pages),
        )

    def _settle(self) -> None:
        """Update the forecast with the share of joined requests that still decode, and with the
        unattributed load."""
        assert self.forecast is not None
        confirmed, fresh = self._tallies["confirmed"].sequences, self._tallies["fresh"].sequences
        there = min(confirmed, self._reported.sequences) + fresh
        self.forecast.settle(there / max(1, confirmed + fresh), self._unattributed)

    def _forget(self, request_id: str, reservation: DecodeReservation) -> None:
        tally = self._tallies[reservation.state].minus(*reservation.load)
        assert min(tally) >= 0, f"{reservation.state} requests are below zero: {tally}"
        self._tallies[reservation.state] = tally
        self._fresh.pop(request_id, None)
        is_coming = reservation.state == "coming"
        entries = self._coming if is_coming else self._leaving
        entry = (reservation.prefill_end_s if is_coming else reservation.leave_s, request_id)
        del entries[bisect_left(entries, entry)]

    def on_report(self, report: WorkerReport, now_s: float, report_lag_s: float) -> None:
        """Apply a report. It confirms fresh requests that joined at least report_lag_s before."""
        known = [r for r, c in self._fresh.items() if c.joined_at_s <= now_s - report_lag_s]
        for request_id in known:
            reservation = self._fresh.pop(request_id)
            self._tallies["fresh"] = self._tallies["fresh"].minus(*reservation.load)
            reservation.state = "confirmed"
            self._tallies["confirmed"] = self._tallies["confirmed"].plus(*reservation.load)
        self._forget_gone(now_s - report_lag_s)
        self._reported = DecodeLoad(
            report.running + report.queue_requests, report.context_tokens, report.pages_used
        )
        self._unattributed = self._beyond_ours()
        self._reported_at_s = now_s
        is_running = report.running > 0 and report.step_s > 0
        self._tokens_per_s = 1 / report.step_s if is_running else 0.0
        if self.forecast is not None:
            self.forecast.renew(now_s, report.step_s if report.running else 0.0)
            self._settle()

    def load_now(self) -> DecodeLoad:
        """The batch now, without requests that are still in prefill."""
        unattributed, confirmed = self._unattributed, self._tallies["confirmed"]
        reported, fresh = self._reported, self._tallies["fresh"]
        return DecodeLoad(
            unattributed.sequences + min(confirmed.sequences, reported.sequences) + fresh.sequences,
            unattributed.context_tokens
            + min(confirmed.context_tokens, reported.context_tokens)
            + fresh.context_tokens,
            unattributed.pages + min(confirmed.pages, reported.pages) + fresh.pages,
        )

    def load_reserved(self) -> DecodeLoad:
        """All requests in the batch or on their way to it, if none leaves."""
        coming = self._tallies["coming"]
        return self.load_now().plus(coming.sequences, coming.context_tokens, coming.pages)

    def load_at(self, at_s: float, now_s: float, decode_s: float) -> DecodeLoad:
        """The batch at `at_s`. `decode_s`: decode time of requests without a known end."""
        now, coming = self.load_now(), self._tallies["coming"]
        if not now.sequences and not coming.sequences:
            return now
        leaving: float = _until(self._leaving, at_s) - _until(self._leaving, now_s)
        # The ends of unattributed requests are unknown, so they are spread over `decode_s`.
        leaving += self._unattributed.sequences * min(1.0, max(0.0, at_s - now_s) / decode_s)
        staying = max(0.0, 1.0 - leaving / now.sequences) if now.sequences else 0.0
        arriving = _until(self._coming, at_s)  # without requests that join and leave before `at_s`
        arriving -= max(0, _until(self._coming, at_s - decode_s) - _until(self._coming, now_s))
        share = arriving / coming.sequences if coming.sequences else 0.0
        # Each reported request generates one token per step from the report to `at_s`.
        had_tokens = self._tokens_per_s * max(0.0, at_s - self._reported_at_s)
        grown = had_tokens * (now.sequences - self._tallies["fresh"].sequences)
        # Each request counts with the mean tokens and pages. Exact sums would take a loop over all
        # requests.
        return DecodeLoad(
            now.sequences * staying + coming.sequences * share,
            (now.context_tokens + grown) * staying + coming.context_tokens * share,
            now.pages * staying + coming.pages * share,
        )

    def leave_times(self, now_s: float, decode_s: float) -> list[float]:
        """Expected ends of all joined, coming and unattributed requests; earliest first."""
        unattributed = int(self._unattributed.sequences)
        times = [max(now_s, leave_s) for leave_s, _ in self._leaving]
        times += [max(now_s, end_s) + decode_s for end_s, _ in self._coming]
        times += [now_s + decode_s * (n + 1) / unattributed for n in range(unattributed)]
        return sorted(times)

    def check(self) -> None:
        if self.forecast is not None:
            self.forecast.check()
        for state, tally in self._tallies.items():
            loads = [c.load for c in self._reservations.values() if c.state == state]
            expected = tuple(map(sum, zip(DecodeLoad(0, 0, 0), *loads, strict=True)))
            assert tally == expected, f"{state}: counted {tally}, reserved {expected}"
        gone = [c for _, c in self._gone]
        assert self._gone_pages == sum(c.load.pages for c in gone)
        assert self._gone_sequences == sum(c.state != "coming" for c in gone)
        coming = [
            (c.prefill_end_s, r) for r, c in self._reservations.items() if c.state == "coming"
        ]
        leaving = [(c.leave_s, r) for r, c in self._reservations.items() if c.state != "coming"]
        assert self._coming == sorted(coming) and self._leaving == sorted(leaving)
        fresh = {r for r, c in self._reservations.items() if c.state == "fresh"}
        assert set(self._fresh) == fresh, f"fresh: {set(self._fresh)} is not {fresh}"


def _until(entries: list[tuple[float, str]], at_s: float) -> int:
    """Number of the sorted entries that are due at `at_s` or before."""
    return bisect_left(entries, (math.nextafter(at_s, math.inf), ""))
