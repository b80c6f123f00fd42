"""How many requests one tenant may have in flight at a frontend.

While a tenant is alone it may have all places. As soon as another one is there, each may have a
share of them at most, so that a flood leaves places to others. Requests that are in flight are
left alone: a flood that came first drains, and gets no new places above its share.

A tenant that was turned away counts as being there for a while. Otherwise a flood that had filled
every place would go on doing so: whoever has nothing in flight would never be seen. And as two
shares may be all there is, who has more than another one that was turned away may have an equal
part at most until that one is in.

Pure: time is an argument. Not here: shares of computing under overload
(conductor/admission/fair_share.py), who a tenant is (backends/frontend/request.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

THERE_S = 5.0  # a tenant that was turned away comes back within this time, or has gone
TURNED_AWAY_MAX = 256  # of them are remembered


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
            if now_s - self._turned_away_s[oldest] <= THERE_S:
                return
            del self._turned_away_s[oldest]
