"""A request that nobody waits for any more is ended, and its workers are told until it has gone."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from backends.errors import Cancelled, WorkerUnavailable
from backends.live_requests import LiveRequest, LiveRequests
from backends.observations import Observations
from backends.request_times import RequestTimes


def made(name: str = "r", tenant: str = "", is_cancelled: bool = False) -> LiveRequest:
    client = SimpleNamespace(is_cancelled=lambda: is_cancelled)
    times = RequestTimes(Observations(), 0.0)
    return LiveRequest(name, client, times, time.monotonic(), tenant)


def until_told(request: LiveRequest) -> None:
    told = threading.Event()
    watch = LiveRequests(poll_s=0.001, on_cancel=lambda _: told.set())
    watch.add(request)
    assert told.wait(30.0)
    watch.close()


def test_a_request_past_the_timeout_of_its_client_ends_with_the_word_for_it() -> None:
    request = made()
    request.timeout_s = 0.002
    until_told(request)
    with pytest.raises(WorkerUnavailable, match="its timeout of 2 ms has passed"):
        request.check()


def test_a_request_whose_client_left_does_not_sit_out_its_pause() -> None:
    request = made(is_cancelled=True)
    until_told(request)
    with pytest.raises(Cancelled):
        request.pause(3600.0)


def test_requests_in_flight_are_counted_per_tenant() -> None:
    live = LiveRequests(poll_s=1.0, on_cancel=lambda _: None)
    first, second, other = made("1", "a"), made("2", "a"), made("3")
    for request in (first, second, other):
        live.add(request)
    assert live.of_tenants() == {"a": 2, "": 1} and len(live) == 3
    live.discard(first)
    live.discard(first)
    live.discard(other)
    assert live.of_tenants() == {"a": 1}
    live.close()
