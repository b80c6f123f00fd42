"""The metrics port of `mooncake serve`: one page of all its Tritons, and who is ready.

    GET /metrics   for Prometheus (metric_merge.py)
    GET /ready     200 once every model serves, else 503; {"models": [{"name", "is_ready"}]}

Threads of the launcher. Pages are fetched when somebody asks, and once a second, so that little of
what a Triton counted is lost when it dies. Not here: what the numbers mean (metrics/table.py).
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from backends.launcher.metric_merge import MergedPage
from backends.launcher.repository import DIRECTLY, ModelState
from backends.metrics.table import METRICS

log = logging.getLogger(__name__)
FETCH_S_MAX = 2.0
FETCH_EVERY_S = 1.0
SILENT_S_MAX = 10.0  # a page that is older shows only what was counted
FETCHES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Source:
    """The private metrics page of one life of a Triton."""

    triton: str
    life: int
    address: str


class MetricsServer:
    def __init__(
        self,
        address: tuple[str, int],
        sources: Callable[[], Sequence[Source]],
        states: Callable[[], Sequence[ModelState]],
    ) -> None:
        """`sources`: those that run now; both are called from threads of this server."""
        self._sources, self._states = sources, states
        self._page = MergedPage(METRICS)
        self._heard_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._fetchers = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="metrics-fetch")
        self._is_closing = threading.Event()
        self._server = ThreadingHTTPServer(address, self._handler())
        self._server.daemon_threads = True
        self._threads = [
            threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True),
            threading.Thread(target=self._fetch_now_and_then, name="metrics-keep", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def page(self) -> str:
        """As of now."""
        self._fetch()
        with self._lock:
            return self._page.text()

    def close(self) -> None:
        self._is_closing.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(timeout=0.2)  # one may wait for a Triton that is frozen
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def _fetch(self) -> None:
        with self._lock:  # an older answer must not replace a newer one
            sources = self._sources()
            texts = list(self._fetchers.map(_fetched, sources))
            now_s = time.monotonic()
            for source, text in zip(sources, texts, strict=True):
                if text is not None:
                    self._page.take(source.triton, source.life, text)
                    self._heard_s[source.triton] = now_s
            running = {source.triton for source in sources}
            for triton, heard_s in list(self._heard_s.items()):
                if triton not in running or now_s - heard_s > SILENT_S_MAX:
                    self._page.silent(triton)
                    del self._heard_s[triton]

    def _fetch_now_and_then(self) -> None:
        while not self._is_closing.wait(FETCH_EVERY_S):
            try:
                self._fetch()
            except Exception:  # edge: the page must outlive whatever one fetch meets
                log.exception("a fetch failed")

    def _ready(self) -> tuple[bool, bytes]:
        models = [{"name": each.name, "is_ready": each.is_ready} for each in self._states()]
        is_ready = bool(models) and all(model["is_ready"] for model in models)
        return is_ready, json.dumps({"models": models}).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, "text/plain; version=0.0.4", server.page().encode())
                elif self.path == "/ready":
                    is_ready, body = server._ready()
                    self._answer(200 if is_ready else 503, "application/json", body)
                else:
                    self._answer(404, "text/plain", b"/metrics or /ready\n")

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nobody needs a line for each reading."""

        return Handler


def _fetched(source: Source) -> str | None:
    try:
        url = f"http://{source.address}/metrics"
        with DIRECTLY.open(url, timeout=FETCH_S_MAX) as answer:
            return str(answer.read().decode(errors="replace"))
    except (OSError, ValueError, http.client.HTTPException):
        return None
