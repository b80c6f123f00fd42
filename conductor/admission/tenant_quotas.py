"""Sliding-window rate limits of tenants per minute, and limits of requests in flight.

    requests_per_minute     requests admitted within any 60 s
    tokens_per_minute       prompt tokens plus max_tokens of these requests. When a request ends,
                            its unused tokens are subtracted from the second of its admission.
    requests_in_flight_max  requests admitted and not ended; all attempts of one count as one

Each request carries its limits (messages.TenantLimits). Only the usage is stored here, so a change
of limits needs no update. Usage is counted by whole seconds, each of which leaves the window as a
whole. A request therefore counts for up to 61 s, and the limit holds for any 60 s. A request
rejected for load or limits is not charged. An invalid request is charged as one request, and so is
a call of /tokenize.

The limits are checked on arrival, because parsing a prompt of four megabytes takes seconds. They
are checked again at admission, when the number of tokens is known.

Each frontend sends its admissions and returned tokens to the others (notes.UsageNote). Requests in
flight elsewhere are known from other notes (load/other_frontends.py). The limits therefore hold
over all frontends, except while notes are on the way (a fraction of a second). A lost note causes
an error for at most 61 s. A restarted frontend starts with empty counts.

Not here: shares under overload (fair_share.py), request slots of a frontend (backends/frontend).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from conductor.messages import Reject, Request, TenantLimits
from conductor.notes import UsageNote

WINDOW_S = 60
TENANTS_MAX = 4_096  # above it, the counts of the tenant charged longest ago are dropped
IN_FLIGHT_RETRY_S = 1.0  # the end of a request in flight cannot be predicted
ROUNDING_S = 0.01  # retry_after_s is sent with two decimals (backends/errors.py)


@dataclass(slots=True)
class _Second:
    at_s: int
    requests: int
    tokens: int


class UsageWindow:
    """Requests and tokens admitted for one tenant, by whole seconds."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()  # ordered by time; at most WINDOW_S + 1 entries

    def add(self, at_s: float, requests: int, tokens: int, now_s: float) -> None:
        """Add usage at a time that may be in the past. Negative tokens are returned ones. Nothing
        changes if `at_s` has left the window."""
        self._forget(now_s)
        second = math.floor(min(at_s, now_s))
        if second < math.floor(now_s) - WINDOW_S:
            return
        index = len(self._seconds)
        while index and self._seconds[index - 1].at_s > second:
            index -= 1
        if not index or self._seconds[index - 1].at_s != second:
            self._seconds.insert(index, _Second(second, 0, 0))
            index += 1
        found = self._seconds[index - 1]
        # A note that returns tokens may arrive before the note that charged them.
        found.requests = max(0, found.requests + requests)
        left = found.tokens + tokens
        found.tokens = max(0, left)
        # Times in notes are converted to this frontend's clock. Notes have different delays, so a
        # charge and the return of its unused tokens can be in neighbouring seconds.
        for beside in self._seconds if left < 0 else ():
            if abs(beside.at_s - second) == 1:
                taken = min(beside.tokens, -left)
                beside.tokens, left = beside.tokens - taken, left + taken

    def used(self, now_s: float) -> tuple[int, int]:
        """(requests, tokens) in the window."""
        self._forget(now_s)
        return sum(s.requests for s in self._seconds), sum(s.tokens for s in self._seconds)

    def wait_s(self, now_s: float, requests: int, tokens: int) -> float:
        """Seconds until this many requests and tokens have left the window. WINDOW_S if the window
        has fewer of them."""
        self._forget(now_s)
        for second in self._seconds:
            requests, tokens = requests - second.requests, tokens - second.tokens
            if requests <= 0 and tokens <= 0:
                return second.at_s + WINDOW_S + 1 - now_s + ROUNDING_S
        return float(WINDOW_S)

    def _forget(self, now_s: float) -> None:
        first = math.floor(now_s) - WINDOW_S
        while self._seconds and self._seconds[0].at_s < first:
            self._seconds.popleft()

    def check(self) -> None:
        moments = [second.at_s for second in self._seconds]
        assert moments == sorted(set(moments)) and len(moments) <= WINDOW_S + 1, moments
        assert all(s.requests >= 0 and s.tokens >= 0 for s in self._seconds)


@dataclass(frozen=True, slots=True)
class _Admitted:
    tenant: str
    at_s: float
    tokens: int


class TenantQuotas:
    """Counts the usage of tenants, and rejects requests beyond their limits."""

    def __init__(self, request_s_max: float) -> None:
        self._request_s_max = request_s_max
        self._windows: dict[str, UsageWindow] = {}  # by tenant; the one charged longest ago first
        self._admitted: dict[str, _Admitted] = {}  # in flight at this frontend, oldest first
        self._in_flight_of: Counter[str] = Counter()  # of `_admitted`, by tenant; no zero entries

    def rejection(self, request: Request, elsewhere: int, now_s: float) -> Reject | None:
        """The rejection of the request by the limits of its tenant, or None. `elsewhere`: requests
        of the tenant in flight at other frontends."""
        limits = request.limits
        if limits is None:
            return None
        asked = asked_tokens(request) * request.answers
        if limits.tokens_per_minute is not None and asked > limits.tokens_per_minute:
            times = f", {request.answers} times," if request.answers > 1 else ""
            reason = (
                f"{request.prompt_tokens} prompt tokens and max_tokens "
                f"{request.output_tokens_max}{times} exceed the {limits.tokens_per_minute} that "
                f"tenant {request.tenant!r} may have in a minute (tokens_per_minute); shorten "
                "the prompt or max_tokens"
            )
            return Reject(request.request_id, "too_large", reason, None, 0.0)
        in_flight = self._in_flight_of[request.tenant] + elsewhere
        return self._used_up(request, limits, in_flight, now_s)

    def arrival_rejection(
        self,
        tenant: str,
        limits: TenantLimits,
        in_flight: int | None,
        now_s: float,
        arriving: int = 1,
    ) -> Reject | None:
        """As `rejection`, for a prompt that is not parsed yet. `in_flight`: requests of the tenant
        over all frontends. None for work that is not a request, such as /tokenize. `arriving`:
        number of such requests."""
        request = Request("", 0, (), 0, tenant=tenant, limits=limits, answers=arriving)
        return self._used_up(request, limits, in_flight, now_s)

    def _used_up(
        self, request: Request, limits: TenantLimits, in_flight: int | None, now_s: float
    ) -> Reject | None:
        most, arriving = limits.requests_in_flight_max, request.answers
        more = f", asks for {arriving}" if arriving > 1 else ""
        if most is not None and in_flight is not None and in_flight + arriving > most:
            reason = (
                f"tenant {request.tenant!r} has {in_flight} requests in flight{more} and may have "
                f"{most} (requests_in_flight_max)"
            )
            return Reject(request.request_id, "tenant_full", reason, None, IN_FLIGHT_RETRY_S)
        window = self._windows.get(request.tenant) or UsageWindow()
        requests, tokens = window.used(now_s)
        asked = max(1, asked_tokens(request) * arriving)  # an unknown length counts as one token
        too_many = _above(requests + arriving, limits.requests_per_minute)
        too_much = _above(tokens + asked, limits.tokens_per_minute)
        if not too_many and not too_much:
            return None
        if too_many:
            kind, had = "request_rate", f"{requests} requests within a minute{more}"
            most_of = f"{limits.requests_per_minute} (requests_per_minute)"
        else:
            kind, had = "token_rate", f"{tokens} tokens within a minute, asks for {asked}"
            most_of = f"{limits.tokens_per_minute} (tokens_per_minute)"
        reason = f"tenant {request.tenant!r} has had {had} and may have {most_of}"
        wait_s = window.wait_s(now_s, too_many, too_much)
        return Reject(request.request_id, kind, reason, None, wait_s)

    def charged(self, tenant: str, now_s: float) -> UsageNote:
        """Charge an invalid request, or work that is not a request, as one request."""
        return self._use(UsageNote(now_s, tenant, 1, 0), now_s)

    def admitted(self, request: Request, now_s: float) -> UsageNote | None:
        """Count an admitted request, and return the note for other frontends. Requests without
        limits are not counted."""
        if request.limits is None:
            return None
        self._leave(request.request_id)
        tokens = asked_tokens(request)
        self._admitted[request.request_id] = _Admitted(request.tenant, now_s, tokens)
        self._in_flight_of[request.tenant] += 1
        return self._use(UsageNote(now_s, request.tenant, 1, tokens), now_s)

    def ended(self, request_id: str, tokens: int, now_s: float) -> UsageNote | None:
        """End a request that used `tokens` for prompt and answer, and subtract its unused tokens
        from the window. Returns the note for other frontends. Returns None if the request is not
        counted, no tokens are unused, or the admission has left the window."""
        known = self._leave(request_id)
        if known is None or tokens >= known.tokens or now_s - known.at_s > WINDOW_S + 1:
            return None
        return self._use(UsageNote(known.at_s, known.tenant, 0, tokens - known.tokens), now_s)

    def used_elsewhere(self, note: UsageNote, at_s: float, now_s: float) -> None:
        """Count usage at another frontend; `at_s` is on this frontend's clock."""
        self._window(note.tenant).add(at_s, note.requests, note.tokens, now_s)

    def _leave(self, request_id: str) -> _Admitted | None:
        known = self._admitted.pop(request_id, None)
        if known is not None:
            self._in_flight_of[known.tenant] -= 1
            if not self._in_flight_of[known.tenant]:
                del self._in_flight_of[known.tenant]
        return known

    def _use(self, note: UsageNote, now_s: float) -> UsageNote:
        self._window(note.tenant).add(note.at_s, note.requests, note.tokens, now_s)
        return note

    def _window(self, tenant: str) -> UsageWindow:
        window = self._windows.pop(tenant, None) or UsageWindow()
        self._windows[tenant] = window
        if len(self._windows) > TENANTS_MAX:
            del self._windows[next(iter(self._windows))]
        return window

    def tick(self, now_s: float, held: Callable[[], Collection[str]]) -> None:
        """Drop requests older than request_s_max, except those that this frontend still holds.
        `held()` returns the ids of the held requests. It is called only if there are old ones."""
        old = []
        for request_id, entry in self._admitted.items():  # oldest first
            if now_s - entry.at_s < self._request_s_max:
                break
            old.append(request_id)
        kept = held() if old else ()
        for request_id in old:
            if request_id not in kept:
                self._leave(request_id)

    def check(self) -> None:
        assert len(self._windows) <= TENANTS_MAX
        for window in self._windows.values():
            window.check()
        assert self._in_flight_of == Counter(each.tenant for each in self._admitted.values())


def asked_tokens(request: Request) -> int:
    return request.prompt_tokens + request.output_tokens_max


def _above(wanted: int, most: int | None) -> int:
    return 0 if most is None else max(0, wanted - most)
