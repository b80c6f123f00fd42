"""Requests in flight at the frontend: who is let in, and the watch over those inside.

While a tenant is alone it may have all places. As soon as another one is there, each may have a
share of them at most, so that a flood leaves places to others. Requests that are in flight are
left alone: a flood that came first drains, and gets no new places above its share.

A tenant that was turned away counts as being there for a while. Otherwise a flood that had filled
every place would go on doing so: whoever has nothing in flight would never be seen. And as two
shares may be all there is, who has more than another one that was turned away may have an equal
part at most until that one is in.

Triton tells a model that its client is gone only when asked, and does not pass it on to the
models called in turn. So one thread looks after every request in flight, some times a second.

Not here: what becomes of a request whose client has left (lifecycle/), shares of computing under
overload (conductor/admission/fair_share.py), who a tenant is (request.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping

from backends.frontend.live_request import LiveRequest

log = logging.getLogger(__name__)
RECENT_S = 5.0  # a tenant that was turned away comes back within this time, or has gone
TURNED_AWAY_MAX = 256  # of them are remembered
STOOD_STILL_S = 2.0  # a turn that comes so late: this process was frozen, or its machine


def places_of_one(requests_max: int, share: float, tenants: int) -> int:
    """How many requests one of so many tenants may have in flight: at least one."""
    assert requests_max >= 1 and 0 < share <= 1 and tenants >= 1, (requests_max, share, tenants)
    return requests_max if tenants == 1 else max(1, math.floor(share * requests_max))


class TenantCap:
    """Says who is turned away. Not thread-safe."""

    def __init__(self, requests_max: int, share: float) -> None:
        self._requests_max = requests_max
        self._share = share
        self._turned_away_s: dict[str, float] = {}  # tenant -> when, the oldest first

    def objection(self, tenant: str, in_flight: Mapping[str, int], now_s: float) -> tuple[str, str]:
        """(kind of rejection, reason) for one more request of `tenant`, or ("", "").

        `in_flight`: how many each tenant has.
        """
        self._forget_old(now_s)
        there = {tenant, *self._turned_away_s, *(name for name, n in in_flight.items() if n)}
        own, total = in_flight.get(tenant, 0), sum(in_flight.values())
        places = places_of_one(self._requests_max, self._share, len(there))
        if any(in_flight.get(other, 0) < own for other in self._turned_away_s):
            places = min(places, max(1, self._requests_max // len(there)))
        kind = reason = ""
        if total >= self._requests_max:
            kind = "front_full"
            reason = f"{total} requests are in flight, requests_max is {self._requests_max}"
        elif own >= places:
            kind = "tenant_full"
            reason = (
                f"tenant {tenant!r} has {own} requests in flight; one of {len(there)} tenants may "
                f"have {places} of {self._requests_max}"
            )
        if kind:
            self._turned_away_s.pop(tenant, None)  # to the end of the line
            self._turned_away_s[tenant] = now_s
            if len(self._turned_away_s) > TURNED_AWAY_MAX:
                del self._turned_away_s[next(iter(self._turned_away_s))]
        else:
            self._turned_away_s.pop(tenant, None)
        return kind, reason

    def _forget_old(self, now_s: float) -> None:
        while self._turned_away_s:
            oldest = next(iter(self._turned_away_s))
            if now_s - self._turned_away_s[oldest] <= RECENT_S:
                return
            del self._turned_away_s[oldest]


class LiveRequests:
    """The set of requests in flight, and the thread that looks after each of them."""

    def __init__(self, poll_s: float) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._of_tenant: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._poll_s = poll_s
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._live)

    def of_tenants(self) -> dict[str, int]:
        """How many each tenant has in flight; those with none are left out."""
        with self._changed:
            return dict(self._of_tenant)

    def all(self) -> list[LiveRequest]:
        with self._changed:
            return list(self._live.values())

    def held_ids(self) -> set[str]:
        """Of every attempt that a request in flight still has, or by which it is counted."""
        return {held_id for request in self.all() for held_id in request.held_ids()}

    def add(self, request: LiveRequest) -> None:
        with self._changed:
            self._live[request.request_id] = request
            self._of_tenant[request.tenant] += 1

    def discard(self, request: LiveRequest) -> None:
        with self._changed:
            if self._live.pop(request.request_id, None) is not None:
                self._of_tenant[request.tenant] -= 1
                self._of_tenant += Counter()  # drops those with none
            self._changed.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._live, timeout_s)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(timeout=2.0)

    def _watch(self) -> None:
        awake_since_s = turn_s = time.monotonic()
        while not self._is_closing.wait(self._poll_s):
            now_s = time.monotonic()
            if now_s - turn_s > STOOD_STILL_S + self._poll_s:
                awake_since_s = now_s  # what came meanwhile waits to be read
            turn_s = now_s
            for request in self.all():
                try:
                    request.look(now_s, now_s - awake_since_s)
                except Exception:  # edge: nobody else looks after the others
                    of_request = {"request_id": request.request_id}
                    log.exception(
                        "looking at request %s failed", request.request_id, extra=of_request
                    )
