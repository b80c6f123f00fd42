"""The metrics port of `mooncake serve`, over small pages in the place of Triton's."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from backends.launcher.environment import free_ports
from backends.launcher.metrics_server import MetricsServer, MetricsSource
from backends.launcher.repository import ModelState
from backends.metrics.status import history
from mooncake_store.process import bounded_http

COUNTER = "mooncake_steps_total"
GAUGE = "mooncake_pages_used"


class PrivatePage:
    """A Triton's own metrics port."""

    def __init__(self, model: str) -> None:
        self.steps, self.is_hung, self.go_on = 0, False, threading.Event()
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if page.is_hung:
                    page.go_on.wait(30.0)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(
                    f"# HELP {COUNTER} Steps\n# TYPE {COUNTER} counter\n"
                    f'{COUNTER}{{model="{model}"}} {page.steps}\n'
                    f"# HELP {GAUGE} Pages\n# TYPE {GAUGE} gauge\n"
                    f'{GAUGE}{{model="{model}"}} 4\n'.encode()
                )

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()


class Tritons:
    """Two workers' pages, behind the port under test."""

    def __init__(self) -> None:
        self.pages = [PrivatePage("decode_0"), PrivatePage("decode_1")]
        self.sources = [
            MetricsSource(f"decode_{n}", n + 1, page.address) for n, page in enumerate(self.pages)
        ]
        self.states = [ModelState("decode_0", True), ModelState("decode_1", False)]
        (port,) = free_ports(1, ())
        self.url = f"http://127.0.0.1:{port}"
        self.serves_models = True
        self.server = MetricsServer(
            ("127.0.0.1", port),
            lambda: self.sources,
            lambda: self.states,
            lambda: self.serves_models,
        )

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30.0) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def close(self) -> None:
        self.server.close()
        for page in self.pages:
            page.close()


@pytest.fixture
def tritons() -> Iterator[Tritons]:
    made = Tritons()
    yield made
    made.close()


def test_a_probe_is_answered_beside_many_silent_clients(
    tritons: Tritons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else kubelet would kill the pod."""
    monkeypatch.setattr(bounded_http, "OF_ADDRESS_MAX", 4)
    address = ("127.0.0.1", int(tritons.url.rpartition(":")[2]))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(address))
        assert tritons.get("/live") == (200, "alive\n")
        names = [thread.name for thread in threading.enumerate()]
        assert sum("process_request_thread" in name for name in names) <= 8


def test_the_history_grows_while_nobody_looks(
    tritons: Tritons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVERY_S", 0.0)
    give_up_s = time.monotonic() + 30.0
    while not (points := json.loads(tritons.get("/history")[1])["points"]):
        assert time.monotonic() < give_up_s
    assert points[0].keys() == set(history.HistoryPoint.__struct_fields__)


def test_one_page_has_the_newest_of_all(tritons: Tritons) -> None:
    tritons.pages[1].steps = 7
    status, text = tritons.get("/metrics")
    assert status == 200
    for line in (f'{COUNTER}{{model="decode_0"}} 0', f'{COUNTER}{{model="decode_1"}} 7'):
        assert line in text.splitlines()
    assert text.count(f"# TYPE {COUNTER} counter") == 1


def test_a_triton_that_ended_uses_nothing_and_what_it_counted_stays(tritons: Tritons) -> None:
    tritons.pages[1].steps = 7
    tritons.get("/metrics")
    del tritons.sources[1]
    _, text = tritons.get("/metrics")
    assert f'{COUNTER}{{model="decode_1"}} 7' in text
    assert f'{GAUGE}{{model="decode_1"}}' not in text and f'{GAUGE}{{model="decode_0"}}' in text


def test_a_triton_that_hangs_keeps_nobody_s_page_away(tritons: Tritons) -> None:
    tritons.pages[1].steps = 7
    tritons.get("/metrics")
    tritons.pages[1].is_hung = True
    tritons.pages[0].steps = 3
    _, text = tritons.get("/metrics")
    assert f'{COUNTER}{{model="decode_0"}} 3' in text
    assert f'{COUNTER}{{model="decode_1"}} 7' in text, "as it was"


def test_the_launcher_lives_while_its_tritons_hang(tritons: Tritons) -> None:
    """Who asks must not wait for pages: readers of those are served one after the other."""
    for page in tritons.pages:
        page.is_hung = True
    with tritons.server._lock:  # as while pages are fetched
        assert tritons.get("/live") == (200, "alive\n")


def test_ready_says_who_serves(tritons: Tritons) -> None:
    status, text = tritons.get("/ready")
    assert status == 503
    assert json.loads(text)["models"][1] == {"name": "decode_1", "is_ready": False}
    tritons.states = [ModelState("decode_0", True), ModelState("decode_1", True)]
    assert tritons.get("/ready")[0] == 200
    tritons.states = []
    assert tritons.get("/ready")[0] == 503, "nobody has said anything yet"
    tritons.serves_models = False
    assert tritons.get("/ready")[0] == 200, "a host of storage nodes has no models to wait for"
    assert tritons.get("/other")[0] == 404
