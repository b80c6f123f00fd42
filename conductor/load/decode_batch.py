"""The predicted batch of one decode worker, now and at a later moment.

A request is reserved here from the moment it is routed. It is *coming* while its prefill runs, then
*joined*; a joined request is *fresh* until a report that must know it arrives, then *confirmed*.
The report replaces what it confirms:

    joined now = unattributed + min(confirmed, reported) + fresh

`unattributed` is what the report counted beyond our own reservations: requests from before a
restart of the conductor, or from another frontend. A fresh request may or may not be in a report;
ours are assumed to be, so that none counts twice. A report may as well be from just before a finish
that is known here already: for as long as it may, ours that have gone are not taken for somebody
else's, or a burst that follows another one at once would find their places taken. The `min` makes a
finished request leave at once and a lost finish harmless: an idle worker's next report brings its
count to zero whatever is still reserved, so no worker stays "full" by mistake.

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
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from conductor.load.decode_forecast import DecodeForecast, ExpectedAnswer
from mooncake_store.records.membership import WorkerReport

GONE_S_MAX = 5.0  # longer than any report is on its way


class DecodeLoad(NamedTuple):
    """A batch: how many sequences, their KV tokens and the pages they hold or reserved."""

    sequences: float = 0.0
    context_tokens: float = 0.0
    pages: float = 0.0

    def plus(self, sequences: float, context_tokens: float, pages: float) -> DecodeLoad:
        return DecodeLoad(
            self.sequences + sequences, self.context_tokens + context_tokens, self.pages + pages
        )


@dataclass(slots=True)
class Tally:
    """A sum over reservations, in whole numbers."""

    sequences: int = 0
    context_tokens: int = 0
    pages: int = 0

    def add(self, reservation: DecodeReservation, sign: int) -> None:
        self.sequences += sign
        self.context_tokens += sign * reservation.context_tokens
        self.pages += sign * reservation.pages
        assert min(self.sequences, self.context_tokens, self.pages) >= 0, f"below zero: {self}"


@dataclass(slots=True)
class DecodeReservation:
    context_tokens: int
    pages: int
    prefill_end_s: float  # predicted, while coming
    stage: str = "coming"  # "coming" | "fresh" | "confirmed"
    joined_at_s: float = 0.0
    leave_s: float = 0.0  # predicted, once joined


class DecodeBatch:
    """Charges of one decode worker, and what its last report said."""

    def __init__(self) -> None:
        self._reservations: dict[str, DecodeReservation] = {}
        self._fresh: dict[str, DecodeReservation] = {}  # few: those since the last report
        self._tallies = {"coming": Tally(), "fresh": Tally(), "confirmed": Tally()}
        self._gone: deque[tuple[float, DecodeReservation]] = deque()  # lately, and when
        self._gone_sequences = self._gone_pages = 0  # of these
        self._reported = Tally()  # no more of the confirmed ones is really there
        self._unattributed = Tally()
        self._reported_at_s, self._tokens_per_s = 0.0, 0.0  # of each request that is in the batch
        self._coming: list[tuple[float, str]] = []  # (prefill_end_s, request), sorted
        self._leaving: list[tuple[float, str]] = []  # (leave_s, request), sorted
        self.forecast: DecodeForecast | None = None  # of predictive_lengths only

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
        """Routed: it will join when its prefill ends. A forecast needs to know the answer."""
        assert request_id not in self._reservations, f"{request_id} is reserved already"
        reservation = DecodeReservation(context_tokens, pages, prefill_end_s)
        self._reservations[request_id] = reservation
        self._tallies["coming"].add(reservation, 1)
        insort(self._coming, (prefill_end_s, request_id))
        if self.forecast is not None and answer is not None:
            self.forecast.reserve(request_id, answer, context_tokens, pages, prefill_end_s, now_s)
            self._settle()

    def join(self, request_id: str, now_s: float, leave_s: float) -> None:
        """Its prefill ended; from here on the worker's reports may know it."""
        reservation = self._reservations.get(request_id)
        if reservation is None or reservation.stage != "coming":
            return
        self._forget(request_id, reservation)
        reservation.stage, reservation.joined_at_s, reservation.leave_s = "fresh", now_s, leave_s
        self._fresh[request_id] = reservation
        self._tallies["fresh"].add(reservation, 1)
        insort(self._leaving, (leave_s, request_id))
        if self.forecast is not None:
            self.forecast.join(request_id, now_s)
            self._settle()

    def drop(self, request_id: str, now_s: float) -> bool:
        """Finished or cancelled; False when it was not reserved here."""
        reservation = self._removed(request_id)
        if reservation is None:
            return False
        self._gone.append((now_s, reservation))
        self._gone_sequences += reservation.stage != "coming"
        self._gone_pages += reservation.pages
        self._forget_gone(now_s - GONE_S_MAX)
        return True

    def _forget_gone(self, until_s: float) -> None:
        while self._gone and self._gone[0][0] <= until_s:
            _, reservation = self._gone.popleft()
            self._gone_sequences -= reservation.stage != "coming"
            self._gone_pages -= reservation.pages

    def _removed(self, request_id: str) -> DecodeReservation | None:
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None:
            self._forget(request_id, reservation)
            if self.forecast is not None:
                self.forecast.drop(request_id)
                self._settle()
        return reservation

    def attribute(self) -> None:
        """What was now reserved or joined, the last report may have counted already."""
        beyond, unattributed = self._beyond_ours(), self._unattributed
        self._unattributed = Tally(
            min(beyond.sequences, unattributed.sequences),
            min(beyond.context_tokens, unattributed.context_tokens),
            min(beyond.pages, unattributed.pages),
        )
        if self.forecast is not None:
            self._settle()

    def disown(self, request_id: str) -> None:
        """Nobody will say when this one ends: it counts as unattributed until the next report."""
        before = self.load_reserved()
        self._removed(request_id)
        after, unattributed = self.load_reserved(), self._unattributed
        self._unattributed = Tally(
            unattributed.sequences + int(before.sequences - after.sequences),
            unattributed.context_tokens + int(before.context_tokens - after.context_tokens),
            unattributed.pages + int(before.pages - after.pages),
        )
        if self.forecast is not None:
            self._settle()

    def _beyond_ours(self) -> Tally:
        """What the last report counted and the reservations do not account for."""
        confirmed, fresh = self._tallies["confirmed"], self._tallies["fresh"]
        # A worker reserves pages for a request while its prefill still runs.
        pages = confirmed.pages + fresh.pages + self._tallies["coming"].pages + self._gone_pages
        reported, gone = self._reported, self._gone_sequences
        # Each of those has had some tokens more: as many as the others there, on average.
        there = 1.0 - min(1.0, gone / reported.sequences) if reported.sequences else 1.0
        context_tokens = round(reported.context_tokens * there)
        return Tally(
            max(0, reported.sequences - confirmed.sequences - fresh.sequences - gone),
            max(0, context_tokens - confirmed.context_tokens - fresh.context_tokens),
            max(0, reported.pages - pages),
        )

    def _settle(self) -> None:
        """Tell the forecast what the report left of the reservations, and what else it counted."""
        assert self.forecast is not None
        confirmed, fresh = self._tallies["confirmed"].sequences, self._tallies["fresh"].sequences
        there = min(confirmed, self._reported.sequences) + fresh
        unattributed = self._unattributed
        self.forecast.settle(
            there / max(1, confirmed + fresh),
            (unattributed.sequences, unattributed.context_tokens, unattributed.pages),
        )

    def _forget(self, request_id: str, reservation: DecodeReservation) -> None:
        self._tallies[reservation.stage].add(reservation, -1)
        self._fresh.pop(request_id, None)
        is_coming = reservation.stage == "coming"
        entries = self._coming if is_coming else self._leaving
        entry = (reservation.prefill_end_s if is_coming else reservation.leave_s, request_id)
        del entries[bisect_left(entries, entry)]

    def on_report(self, report: WorkerReport, now_s: float, report_lag_s: float) -> None:
        """Replace what the report must know; keep what it cannot know yet."""
        known = [r for r, c in self._fresh.items() if c.joined_at_s <= now_s - report_lag_s]
        for request_id in known:
            reservation = self._fresh.pop(request_id)
            self._tallies["fresh"].add(reservation, -1)
            reservation.stage = "confirmed"
            self._tallies["confirmed"].add(reservation, 1)
        self._forget_gone(now_s - report_lag_s)
        self._reported = Tally(
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
        """What is decoding now; requests still in prefill are not."""
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
        """Everything in the batch or on its way to it, as if nobody left."""
        coming = self._tallies["coming"]
        return self.load_now().plus(coming.sequences, coming.context_tokens, coming.pages)

    def load_at(self, at_s: float, now_s: float, decode_s: float) -> DecodeLoad:
        """What will be decoding at `at_s`, if decoding takes `decode_s` where nothing is known."""
        now, coming = self.load_now(), self._tallies["coming"]
        if not now.sequences and not coming.sequences:
            return now
        leaving: float = _until(self._leaving, at_s) - _until(self._leaving, now_s)
        # Unattributed requests are known by number only: their ends are spread evenly.
        leaving += self._unattributed.sequences * min(1.0, max(0.0, at_s - now_s) / decode_s)
        staying = max(0.0, 1.0 - leaving / now.sequences) if now.sequences else 0.0
        arriving = _until(self._coming, at_s)  # less those that come and go before then
        arriving -= max(0, _until(self._coming, at_s - decode_s) - _until(self._coming, now_s))
        share = arriving / coming.sequences if coming.sequences else 0.0
        # Requests that the report counted have had a token a step since then.
        had_tokens = self._tokens_per_s * max(0.0, at_s - self._reported_at_s)
        grown = had_tokens * (now.sequences - self._tallies["fresh"].sequences)
        # The number of requests is right, but each counts as an average one: to know which ones
        # they are would cost a walk over all of them.
        return DecodeLoad(
            now.sequences * staying + coming.sequences * share,
            (now.context_tokens + grown) * staying + coming.context_tokens * share,
            now.pages * staying + coming.pages * share,
        )

    def leave_times(self, now_s: float, decode_s: float) -> list[float]:
        """When each request, here or coming, is expected to leave; soonest first."""
        unattributed = self._unattributed.sequences
        times = [max(now_s, leave_s) for leave_s, _ in self._leaving]
        times += [max(now_s, end_s) + decode_s for end_s, _ in self._coming]
        times += [now_s + decode_s * (n + 1) / unattributed for n in range(unattributed)]
        return sorted(times)

    def check(self) -> None:
        """Prove the invariants."""
        if self.forecast is not None:
            self.forecast.check()
        for stage, tally in self._tallies.items():
            reservations = [c for c in self._reservations.values() if c.stage == stage]
            expected = Tally(
                len(reservations),
                sum(c.context_tokens for c in reservations),
                sum(c.pages for c in reservations),
            )
            assert tally == expected, f"{stage}: counted {tally}, reserved {expected}"
        gone = [c for _, c in self._gone]
        assert self._gone_pages == sum(c.pages for c in gone)
        assert self._gone_sequences == sum(c.stage != "coming" for c in gone)
        coming = [
            (c.prefill_end_s, r) for r, c in self._reservations.items() if c.stage == "coming"
        ]
        leaving = [(c.leave_s, r) for r, c in self._reservations.items() if c.stage != "coming"]
        assert self._coming == sorted(coming) and self._leaving == sorted(leaving)
        fresh = {r for r, c in self._reservations.items() if c.stage == "fresh"}
        assert set(self._fresh) == fresh, f"fresh: {set(self._fresh)} is not {fresh}"


def _until(entries: list[tuple[float, str]], at_s: float) -> int:
    """How many of the sorted entries are due at `at_s` or before."""
    return bisect_left(entries, (math.nextafter(at_s, math.inf), ""))
