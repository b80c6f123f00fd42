"""Requests in flight are counted, and looked after for as long as they are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from backends.frontend.live_request import LiveRequest
from backends.frontend.live_requests import LiveRequests


def made(
    name: str = "r", tenant: str = "", look: Callable[[float, float], None] = lambda *_: None
) -> LiveRequest:
    return cast(Any, SimpleNamespace(request_id=name, tenant=tenant, look=look))


def test_requests_in_flight_are_counted_per_tenant() -> None:
    live = LiveRequests(poll_s=1.0)
    first, second, other = made("1", "a"), made("2", "a"), made("3")
    for request in (first, second, other):
        live.add(request)
    assert live.of_tenants() == {"a": 2, "": 1} and len(live) == 3
    assert not live.wait_until_empty(0.0)
    live.discard(first)
    live.discard(first)
    live.discard(other)
    assert live.of_tenants() == {"a": 1}
    live.discard(second)
    assert live.wait_until_empty(0.0)
    live.close()


def test_a_request_that_cannot_be_looked_at_costs_the_others_nothing() -> None:
    looked = threading.Event()

    def fail(now_s: float, awake_s: float) -> None:
        raise OSError("its worker's inbox is gone")

    live = LiveRequests(poll_s=0.001)
    live.add(made("broken", look=fail))
    live.add(made("whole", look=lambda *_: looked.set()))
    assert looked.wait(30.0)
    looked.clear()
    assert looked.wait(30.0), "the watch goes on"
    live.close()
