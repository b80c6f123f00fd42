"""A client that goes away in the middle of a stream frees everything, long before lease_s."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable

import pytest

from tests.e2e.server import Server, wait_until

TOKENS = 7_900  # as many as the context has room for: nothing ends by itself in these tests
FREED_S_MAX = 15.0  # leases that nobody releases end after lease_s, 30 s


def wait_busy(server: Server) -> None:
    wait_until(
        lambda: server.metric("mooncake_context_tokens") and server.metric("mooncake_pages_used"),
        "a decode worker to be at work",
    )


def cancelled(server: Server) -> float:
    return server.metric("mooncake_requests_total", outcome="cancelled")


def assert_freed(server: Server, cancelled_before: float) -> None:
    """By the cancellation: a request that came to its own end is counted as answered."""
    wait_until(server.is_idle, "pages, slots and leases to be free", FREED_S_MAX)
    wait_until(lambda: cancelled(server) == cancelled_before + 1, "the request to be cancelled")


def leave_over_grpc(server: Server) -> None:
    stream = server.stream(text_input="It was", max_tokens=TOKENS, end_id=-1, stream=True)
    for _ in range(3):
        assert stream.next() is not None
    wait_busy(server)
    stream.leave()


def leave_over_http(server: Server) -> None:
    host, port = server.addresses.http.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    body = {"text_input": "It was", "max_tokens": TOKENS, "end_id": -1, "stream": True}
    connection.request("POST", "/v2/models/conductor/generate_stream", json.dumps(body))
    response = connection.getresponse()
    assert response.read(200)
    wait_busy(server)
    response.close()
    connection.close()


@pytest.mark.parametrize("leave", [leave_over_grpc, leave_over_http])
def test_a_client_that_leaves_frees_pages_slot_and_leases(
    demo: Server, leave: Callable[[Server], None]
) -> None:
    wait_until(demo.is_idle, "an idle start")
    before = cancelled(demo)
    leave(demo)
    assert_freed(demo, before)


def test_a_client_that_leaves_during_prefill_frees_everything(demo: Server) -> None:
    wait_until(demo.is_idle, "an idle start")
    before = cancelled(demo)
    prompt = [20 + (index * index) % 2000 for index in range(8000)]
    stream = demo.stream(input_ids=prompt, max_tokens=100, end_id=-1, stream=True)
    wait_until(lambda: demo.metric("mooncake_queue_tokens"), "prefill to begin")
    stream.leave()
    assert_freed(demo, before)


@pytest.mark.parametrize("kind", ["a parameter", "Triton's own"])
def test_a_request_ends_at_the_timeout_that_its_client_named(demo: Server, kind: str) -> None:
    wait_until(demo.is_idle, "an idle start")
    is_own = kind == "Triton's own"
    stream = demo.stream(
        text_input="It was",
        max_tokens=TOKENS,
        end_id=-1,
        stream=True,
        parameters={} if is_own else {"timeout_ms": 700},
        timeout_us=700_000 if is_own else None,
    )
    answer = stream.all()
    assert answer.error.endswith("unavailable: its timeout of 700 ms has passed"), answer.error
    assert len(answer.output_ids) < TOKENS
    wait_until(demo.is_idle, "pages, slots and leases to be free")


def test_clients_that_leave_at_any_moment_leave_no_lease_in_the_store(
    demo: Server, seed: int
) -> None:
    """Also between prefill and decode, when neither worker is at the request. Leases that nobody
    releases would end by themselves after lease_s, 30 s: later than this waits."""
    chance = random.Random(seed)
    wait_until(demo.is_idle, "an idle start")
    for number in range(60):
        prompt = [chance.randrange(20, 2000) for _ in range(200)]
        stream = demo.stream(input_ids=prompt, max_tokens=50, end_id=-1, stream=True)
        until_s = time.monotonic() + chance.random() * 0.06
        wait_until(lambda until_s=until_s: time.monotonic() > until_s, "the client to leave")
        stream.leave()
        if number == 0:
            wait_until(
                lambda: demo.metric("mooncake_store_leases") is not None, "leases to be counted"
            )
    wait_until(demo.is_idle, "pages, slots and leases to be free")
    wait_until(
        lambda: demo.metric("mooncake_store_leases") == 0, "no lease in the store", deadline_s=12.0
    )


def test_neighbours_of_a_client_that_leaves_get_their_whole_answers(demo: Server) -> None:
    streams = [
        demo.stream(text_input=f"{n} times", max_tokens=60, end_id=-1, stream=True)
        for n in range(8)
    ]
    for stream in streams[::2]:
        stream.next()
        stream.leave()
    answers = [stream.all() for stream in streams[1::2]]
    assert [len(answer.output_ids) for answer in answers] == [60] * 4
    wait_until(demo.is_idle, "pages, slots and leases to be free")
