"""Requests in flight at the frontend: their limit per tenant, and the thread that watches them.

A tenant that is alone may use all `requests_max` request slots. While several tenants are present,
each may use at most the share `tenant_requests_share`, so that one tenant's flood of requests
leaves slots to the others. A limit never ends a request in flight.

A tenant is present while it has requests in flight. A tenant whose request was rejected is present
for RECENT_S. Otherwise a tenant that holds all slots could keep them, because the rejected tenants
would not count. The shares of two tenants may cover all slots. Therefore a tenant that has more
requests in flight than a present rejected tenant may use only an equal part of the slots.

Triton reports a disconnected client only to the model that the client called, and only if that
model polls. So one thread polls for every request in flight, every `poll_s` seconds.

Not here: how the request of a disconnected client ends (lifecycle/), shares of computing under
overload (conductor/admission/fair_share.py), a request's tenant (tenants/principal.py).
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
RECENT_S = 5.0  # seconds for which a tenant counts as present after its latest rejection
REJECTED_TENANTS_MAX = 256  # limit of rejected tenants that count as present
STALL_S = 2.0  # seconds; if a poll is later than this, the process was frozen


def slots_of_one(requests_max: int, share: float, tenants: int) -> int:
    """Requests that a tenant may have in flight while `tenants` tenants are present; >= 1."""
    assert requests_max >= 1 and 0 < share <= 1 and tenants >= 1, (requests_max, share, tenants)
    return requests_max if tenants == 1 else max(1, math.floor(share * requests_max))


class TenantCap:
    """Rejects requests above their tenant's share. Not thread-safe."""

    def __init__(self, requests_max: int, share: float) -> None:
        self._requests_max = requests_max
        self._share = share
        self._rejected_s: dict[str, float] = {}  # tenant -> latest rejection's time, oldest first

    def rejection(self, tenant: str, in_flight: Mapping[str, int], now_s: float) -> tuple[str, str]:
        """(kind of rejection, reason) for one more request of `tenant`, or ("", "").

        `in_flight`: tenant -> its number of requests in flight.
        """
        self._forget_old(now_s)
        present = {tenant, *self._rejected_s, *(name for name, n in in_flight.items() if n)}
        own, total = in_flight.get(tenant, 0), sum(in_flight.values())
        slots = slots_of_one(self._requests_max, self._share, len(present))
        if any(in_flight.get(other, 0) < own for other in self._rejected_s):
            slots = min(slots, max(1, self._requests_max // len(present)))
        kind = reason = ""
        if total >= self._requests_max:
            kind = "front_full"
            reason = f"{total} requests are in flight, requests_max is {self._requests_max}"
        elif own >= slots:
            kind = "tenant_full"
            reason = (
                f"tenant {tenant!r} has {own} requests in flight; while {len(present)} tenants are "
                f"present, it may have at most {slots} of {self._requests_max}"
            )
        if kind:
            self._rejected_s.pop(tenant, None)  # so that the tenant is inserted as the newest
            self._rejected_s[tenant] = now_s
            if len(self._rejected_s) > REJECTED_TENANTS_MAX:
                del self._rejected_s[next(iter(self._rejected_s))]
        else:
            self._rejected_s.pop(tenant, None)
        return kind, reason

    def _forget_old(self, now_s: float) -> None:
        while self._rejected_s:
            oldest = next(iter(self._rejected_s))
            if now_s - self._rejected_s[oldest] <= RECENT_S:
                return
            del self._rejected_s[oldest]


class LiveRequests:
    """The set of requests in flight, and the thread that watches each of them."""

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
        with self._changed:
            return dict(self._of_tenant)

    def all(self) -> list[LiveRequest]:
        with self._changed:
            return list(self._live.values())

    def held_ids(self) -> set[str]:
        """Ids of all open attempts, and of attempts that are charged to tenants' limits."""
        return {held_id for request in self.all() for held_id in request.held_ids()}

    def add(self, request: LiveRequest) -> None:
        with self._changed:
            self._live[request.request_id] = request
            self._of_tenant[request.tenant] += 1

    def discard(self, request: LiveRequest) -> None:
        with self._changed:
            if self._live.pop(request.request_id, None) is not None:
                self._of_tenant[request.tenant] -= 1
                self._of_tenant += Counter()  # drops tenants without requests
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
            if now_s - turn_s > STALL_S + self._poll_s:
                awake_since_s = now_s  # messages that came during the stall are still unread
            turn_s = now_s
            for request in self.all():
                try:
                    request.look(now_s, now_s - awake_since_s)
                except Exception:  # Catch all: the other requests still need the watch
                    in_log = {"request_id": request.request_id}
                    log.exception("watching request %s failed", request.request_id, extra=in_log)
