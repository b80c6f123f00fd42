"""A request that nobody waits for any more is ended, and its workers are told until it has gone."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from backends.errors import Cancelled, WorkerUnavailable
from backends.frontend.attempts import CALL_SILENCE_S_MAX
from backends.frontend.live_requests import LiveRequest, LiveRequests
from backends.frontend.request_times import RequestTimes
from backends.metrics.page import Observations


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


def test_a_request_that_cannot_be_looked_at_costs_the_others_nothing() -> None:
    told = threading.Event()

    def tell(request: LiveRequest) -> None:
        if request.request_id == "broken":
            raise OSError("its worker's inbox is gone")
        told.set()

    watch = LiveRequests(poll_s=0.001, on_cancel=tell)
    watch.add(made("broken", is_cancelled=True))
    watch.add(made("whole", is_cancelled=True))
    assert told.wait(30.0)
    told.clear()
    assert told.wait(30.0), "the watch goes on"
    watch.close()


def test_silence_is_judged_only_by_who_was_awake_for_as_long() -> None:
    looked: list[float] = []
    watch = LiveRequests(
        poll_s=3600.0, on_cancel=lambda _: None, on_look=lambda _, now_s: looked.append(now_s)
    )
    watch._watch_one(made(), 500.0, CALL_SILENCE_S_MAX - 1.0)
    assert not looked
    watch._watch_one(made(), 502.0, CALL_SILENCE_S_MAX + 1.0)
    assert looked == [502.0]
    watch.close()
