"""What one tenant may ask for within a minute and at once, over all frontends.

    requests_per_minute     requests that were let in within any 60 s
    tokens_per_minute       their tokens: prompt and max_tokens when a request is let in; when it
                            ends, what it did not use is given back to the second of its arrival
    requests_in_flight_max  requests that were let in and are not over, through all their attempts

The limits come with each request (messages.TenantLimits), so that whoever changes them changes
nothing here; kept is only what was used. Seconds are counted whole: a request leaves the minute
when the second in which it was let in does. So it counts for up to 61 s, and within no 60 are more
let in than the limit says. A request that is refused for its load or its limits pays nothing; one
that was read and is invalid, or asks for token ids only, counts as one request.

The limits are checked twice: when a request arrives, before its prompt is read (reading four
megabytes takes seconds), and when it is let in.

Each frontend tells the others what it let in and what was given back (notes.UsageNote); what they
have in flight is known by their notes in any case (load/other_frontends.py). So limits hold over
all frontends together, but for what they let in within the same fraction of a second, before the
note came. A note that is lost is missed for a minute at most; a frontend that begins anew begins to
count anew.

Not here: shares under overload (fair_share.py), places of a frontend (backends/frontend).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from conductor.messages import Reject, Request, TenantLimits
from conductor.notes import UsageNote

WINDOW_S = 60
TENANTS_MAX = 4_096  # beyond, the one that asked longest ago is forgotten
IN_FLIGHT_RETRY_S = 1.0  # nobody knows when one of them ends
ROUNDING_S = 0.01  # clients read hundredths of a second


@dataclass(slots=True)
class _Second:
    at_s: int
    requests: int
    tokens: int


class UsageWindow:
    """What one tenant was let in with, by whole seconds."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()  # ordered, at most WINDOW_S + 1

    def add(self, at_s: float, requests: int, tokens: int, now_s: float) -> None:
        """Used, or given back where negative, at a moment that may be past."""
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
        # What is given back may have been used before anybody here heard of it.
        found.requests = max(0, found.requests + requests)
        left = found.tokens + tokens
        found.tokens = max(0, left)
        # By notes that took unlike long its use may count for a second beside this one.
        for beside in self._seconds if left < 0 else ():
            if abs(beside.at_s - second) == 1:
                taken = min(beside.tokens, -left)
                beside.tokens, left = beside.tokens - taken, left + taken

    def used(self, now_s: float) -> tuple[int, int]:
        """(requests, tokens) of the last minute."""
        self._forget(now_s)
        return sum(s.requests for s in self._seconds), sum(s.tokens for s in self._seconds)

    def wait_s(self, now_s: float, requests: int, tokens: int) -> float:
        """Until so many requests and tokens of the minute are over."""
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
        """Prove the invariants."""
        moments = [second.at_s for second in self._seconds]
        assert moments == sorted(set(moments)) and len(moments) <= WINDOW_S + 1, moments
        assert all(s.requests >= 0 and s.tokens >= 0 for s in self._seconds)


@dataclass(frozen=True, slots=True)
class _LetIn:
    tenant: str
    at_s: float
    tokens: int


class TenantQuotas:
    """Counts what tenants used, and says who has used up what it may."""

    def __init__(self, request_s_max: float) -> None:
        self._request_s_max = request_s_max
        self._windows: dict[str, UsageWindow] = {}  # the one that was used last at the end
        self._let_in: dict[str, _LetIn] = {}  # requests in flight here: oldest first
        self._in_flight_of: Counter[str] = Counter()  # of those, by tenant; 0 is left out

    def objection(self, request: Request, elsewhere: int, now_s: float) -> Reject | None:
        """Why its tenant may not have one more request now; `elsewhere`: how many it has in flight
        at other frontends."""
        limits = request.limits
        if limits is None:
            return None
        asked = asked_tokens(request)
        if limits.tokens_per_minute is not None and asked > limits.tokens_per_minute:
            return _refusal(
                request,
                "too_large",
                0.0,
                f"{request.prompt_tokens} prompt tokens and max_tokens "
                f"{request.output_tokens_max} exceed the {limits.tokens_per_minute} that tenant "
                f"{request.tenant!r} may have in a minute (tokens_per_minute); shorten "
                "the prompt or max_tokens",
            )
        in_flight = self._in_flight_of[request.tenant] + elsewhere
        return self._used_up(request, limits, in_flight, now_s)

    def arrival_objection(
        self, tenant: str, limits: TenantLimits, in_flight: int | None, now_s: float
    ) -> Reject | None:
        """As `objection`, before the prompt is read: of a request of unknown length. `in_flight`:
        requests of the tenant at all frontends; None: what is asked for is no request."""
        request = Request("", 0, (), 0, tenant=tenant, limits=limits)
        return self._used_up(request, limits, in_flight, now_s)

    def _used_up(
        self, request: Request, limits: TenantLimits, in_flight: int | None, now_s: float
    ) -> Reject | None:
        most = limits.requests_in_flight_max
        if most is not None and in_flight is not None and in_flight >= most:
            return _refusal(
                request,
                "tenant_full",
                IN_FLIGHT_RETRY_S,
                f"tenant {request.tenant!r} has {in_flight} requests in flight and may have "
                f"{most} (requests_in_flight_max)",
            )
        window = self._windows.get(request.tenant)
        return None if window is None else _rate_refusal(request, limits, window, now_s)

    def charged(self, tenant: str, now_s: float) -> UsageNote:
        """Something that costs as a request does, and is none: it counts as one."""
        return self._use(UsageNote(now_s, tenant, 1, 0), now_s)

    def let_in(self, request: Request, now_s: float) -> UsageNote | None:
        """It was routed. None where nothing of it is counted."""
        if request.limits is None:
            return None
        self._leave(request.request_id)
        tokens = asked_tokens(request)
        self._let_in[request.request_id] = _LetIn(request.tenant, now_s, tokens)
        self._in_flight_of[request.tenant] += 1
        return self._use(UsageNote(now_s, request.tenant, 1, tokens), now_s)

    def ended(self, request_id: str, tokens: int, now_s: float) -> UsageNote | None:
        """It used so many tokens, prompt and answer; the others are given back. None when there is
        nothing to give, or a minute has passed."""
        known = self._leave(request_id)
        if known is None or tokens >= known.tokens or now_s - known.at_s > WINDOW_S + 1:
            return None
        return self._use(UsageNote(known.at_s, known.tenant, 0, tokens - known.tokens), now_s)

    def heard(self, note: UsageNote, at_s: float, now_s: float) -> None:
        """What another frontend let in, or gave back, at this moment of our clock."""
        self._window(note.tenant).add(at_s, note.requests, note.tokens, now_s)

    def _leave(self, request_id: str) -> _LetIn | None:
        known = self._let_in.pop(request_id, None)
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
        """About once a second: a request that was not ended for request_s_max, and that its
        frontend does not hold any more, is not in flight. `held` is called only where needed."""
        old = []
        for request_id, entry in self._let_in.items():  # oldest first
            if now_s - entry.at_s < self._request_s_max:
                break
            old.append(request_id)
        kept = held() if old else ()
        for request_id in old:
            if request_id not in kept:
                self._leave(request_id)

    def check(self) -> None:
        """Prove the invariants."""
        assert len(self._windows) <= TENANTS_MAX
        for window in self._windows.values():
            window.check()
        assert self._in_flight_of == Counter(each.tenant for each in self._let_in.values())


def asked_tokens(request: Request) -> int:
    return request.prompt_tokens + request.output_tokens_max


def _rate_refusal(
    request: Request, limits: TenantLimits, window: UsageWindow, now_s: float
) -> Reject | None:
    requests, tokens = window.used(now_s)
    asked = max(1, asked_tokens(request))  # of a request of unknown length at least one
    too_many = _above(requests + 1, limits.requests_per_minute)
    too_much = _above(tokens + asked, limits.tokens_per_minute)
    if not too_many and not too_much:
        return None
    wait_s = window.wait_s(now_s, too_many, too_much)
    if too_many:
        return _refusal(
            request,
            "request_rate",
            wait_s,
            f"tenant {request.tenant!r} has had {requests} requests within a minute and may "
            f"have {limits.requests_per_minute} (requests_per_minute)",
        )
    return _refusal(
        request,
        "token_rate",
        wait_s,
        f"tenant {request.tenant!r} has had {tokens} tokens within a minute, asks for {asked} "
        f"and may have {limits.tokens_per_minute} (tokens_per_minute)",
    )


def _above(wanted: int, most: int | None) -> int:
    return 0 if most is None else max(0, wanted - most)


def _refusal(request: Request, kind: str, wait_s: float, reason: str) -> Reject:
    return Reject(request.request_id, kind, reason, None, wait_s)
