"""Silent and slow clients of a metrics page keep no other client from its answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from mooncake_store.process import bounded_http
from mooncake_store.process.metrics_page import MetricsPage
from tests.e2e.server import wait_until

WAIT_S_MAX = 20.0


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsPage]:
    monkeypatch.setattr(bounded_http, "CONNECTIONS_MAX", 6)
    monkeypatch.setattr(bounded_http, "OF_ADDRESS_MAX", 3)
    made = MetricsPage(0, [])
    yield made
    made.close()


def connected(page: MetricsPage, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", page.port), timeout=WAIT_S_MAX, source_address=(source, 0)
    )


def is_answered(page: MetricsPage) -> bool:
    url = f"http://127.0.0.1:{page.port}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=WAIT_S_MAX) as answer:
        return answer.status == 200


def handlers(page: MetricsPage) -> int:
    return len(page._server._connections)


def test_a_page_answers_beside_many_silent_and_slow_clients(page: MetricsPage) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(connected(page, f"127.0.0.{1 + number % 4}"))
            for number in range(24)
        ]
        for client in clients:
            with contextlib.suppress(OSError):  # it made room already
                client.sendall(b"G")
        assert is_answered(page)
        assert handlers(page) <= 6
        assert clients[0].recv(1) == b"", "the oldest one made room"
    wait_until(lambda: not handlers(page), "its threads to end")


def test_a_request_has_a_deadline_as_a_whole(
    page: MetricsPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More bytes give no more of it."""
    monkeypatch.setattr(bounded_http, "REQUEST_S_MAX", 1.0)
    before = threading.active_count()
    with connected(page) as silent, connected(page) as trickling:
        wait_until(lambda: handlers(page) == 2, "both of them")
        is_over = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not is_over.wait(0.01):
                    trickling.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        assert silent.recv(1) == b""
        with contextlib.suppress(ConnectionResetError):
            assert trickling.recv(1) == b""
        is_over.set()
        thread.join()
        assert is_answered(page)
    wait_until(lambda: threading.active_count() <= before, "its threads to end")


def test_one_address_leaves_room_for_others(page: MetricsPage) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(connected(page, "127.0.0.2"))
        other = stack.enter_context(connected(page, "127.0.0.3"))
        wait_until(lambda: handlers(page) == 4, "three of one, one of the other")
        other.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert other.recv(12).startswith(b"HTTP/1.0 200")


def test_a_request_in_hand_makes_no_room_for_silent_clients(
    page: MetricsPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_asked.set()
            assert may_answer.wait(WAIT_S_MAX)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = bounded_http.BoundedHttpServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = ("127.0.0.1", server.server_port)
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(socket.create_connection(address, timeout=WAIT_S_MAX))
        asked.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert is_asked.wait(WAIT_S_MAX)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(6)]
        silent[0].settimeout(WAIT_S_MAX)
        assert silent[0].recv(1) == b""
        may_answer.set()
        assert asked.recv(12).startswith(b"HTTP/1.0 200")
    server.shutdown()
    server.server_close()
    thread.join()
