"""The metrics port of `mooncake serve`: one page for all Tritons, and their readiness.

    GET /metrics   for Prometheus
    GET /ready     200 while every model serves, else 503; {"models": [{"name", "is_ready"}]}
                   (always 200 on a host without models)
    GET /settings  the served model repository, and the state of each model's newest edit,
                   as JSON (model_settings/running_system.py)
    GET /history   the figures of the last ten minutes as JSON (metrics/status/history.py)
    GET /live      200 while this launcher runs, even if Tritons do not answer

Each Triton and each gateway process serves its own metrics page, and this server merges the pages.
Metrics of metrics/table.py already have a label for their model. All other metrics get the label
`triton`. The merged page has one HELP and one TYPE line for each metric family. When a process has
ended, its gauges are dropped. Its counters are kept, so that no counter decreases.

The server runs in threads of the launcher. It fetches the pages for each call of /metrics. It also
fetches them every second, so that few counts are lost when a process dies.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import msgspec

from backends.direct_http import CALL_FAILED, DIRECTLY
from backends.launcher.repository import ModelState
from backends.metrics.status import view
from backends.metrics.status.history import History
from backends.metrics.table import METRICS
from mooncake_store.process.bounded_http import BoundedHttpServer

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(slots=True)
class Family:
    kind: str = "untyped"
    meaning: str = ""
    samples: dict[str, str] = field(default_factory=dict)  # `name{labels}` -> value as text

    @property
    def is_counted(self) -> bool:
        return self.kind in ("counter", "histogram")


Families = dict[str, Family]


def parse(text: str, label: str, is_ours: Mapping[str, object]) -> Families:
    """The metric families of a page. Samples of families that are not in `is_ours` get `label`."""
    families: Families = {}
    for line in text.splitlines():
        if line.startswith("# "):
            mark, _, rest = line[2:].partition(" ")
            name, _, text_of_mark = rest.partition(" ")
            if mark == "HELP":
                families.setdefault(name, Family()).meaning = text_of_mark
            elif mark == "TYPE":
                families.setdefault(name, Family()).kind = text_of_mark
        elif found := SAMPLE.match(line):
            name, labels = found["name"], found["labels"] or ""
            family = _family_of(name, families)
            if family not in is_ours:
                labels = f"{labels},{label}" if labels else label
            key = f"{name}{{{labels}}}" if labels else name
            families.setdefault(family, Family()).samples[key] = found["value"]
    return families


def _family_of(sample: str, families: Families) -> str:
    for suffix in SUFFIXES:
        if sample not in families and sample.removesuffix(suffix) in families:
            return sample.removesuffix(suffix)
    return sample


class MergedPage:
    """Merges the pages of Tritons and gateways, including counts of their earlier processes."""

    def __init__(self, is_ours: Mapping[str, object]) -> None:
        self._is_ours = is_ours  # the keys are the families that have a label for their model
        # "Triton" stands for a Triton or gateway here. Each of its processes is an incarnation.
        self._incarnations: dict[str, int] = {}  # Triton -> number of its newest incarnation
        self._pages: dict[str, Families] = {}  # Triton -> page of its newest incarnation
        self._ended: Families = {}  # sums of the counters of earlier incarnations

    def take(self, triton: str, incarnation: int, text: str) -> None:
        """Replace the page of a Triton, unless a newer incarnation already has a page."""
        if incarnation > self._incarnations.get(triton, 0):
            for name, family in self._pages.pop(triton, {}).items():
                if family.is_counted:
                    kept = self._ended.setdefault(name, Family(family.kind, family.meaning))
                    for key, value in family.samples.items():
                        kept.samples[key] = _sum(kept.samples.get(key), value)
        if incarnation >= self._incarnations.get(triton, 0):
            self._incarnations[triton] = incarnation
            self._pages[triton] = parse(text, f'triton="{triton}"', self._is_ours)

    def silent(self, triton: str) -> None:
        """Drop the gauges of a Triton that does not answer or has ended. Keep its counters."""
        page = self._pages.get(triton, {})
        for name in [name for name, family in page.items() if not family.is_counted]:
            del page[name]

    def text(self) -> str:
        merged: Families = {}
        for families in (self._ended, *(self._pages[name] for name in sorted(self._pages))):
            for name, family in families.items():
                into = merged.setdefault(name, Family(family.kind, family.meaning))
                for key, value in family.samples.items():
                    before = into.samples.get(key)
                    into.samples[key] = _sum(before, value) if family.is_counted else value
        return "".join(f"{line}\n" for line in _lines(merged))


def _sum(before: str | None, value: str) -> str:
    return value if before is None else repr(float(before) + float(value))


def _lines(families: Families) -> Iterator[str]:
    for name, family in sorted(families.items()):
        yield f"# HELP {name} {family.meaning}"
        yield f"# TYPE {name} {family.kind}"
        for key, value in family.samples.items():
            yield f"{key} {value}"


log = logging.getLogger(__name__)
FETCH_S_MAX = 2.0  # timeout of the fetch of one page
FETCH_EVERY_S = 1.0
SILENT_S_MAX = 10.0  # age in seconds at which the gauges of a page are dropped
FETCHES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """The metrics page of one incarnation of a Triton or gateway."""

    triton: str  # name of the Triton or gateway
    incarnation: int  # a later incarnation has a larger number
    address: str  # HOST:PORT


class MetricsServer:
    def __init__(
        self,
        address: tuple[str, int],
        sources: Callable[[], Sequence[MetricsSource]],
        states: Callable[[], Sequence[ModelState]],
        serves_models: Callable[[], bool] = lambda: True,
        settings: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """`sources()` lists the pages of running processes. `serves_models()` is False on a host
        without workers and frontend. Threads of this server call all four functions."""
        self._settings = settings
        self._sources, self._states, self._serves_models = sources, states, serves_models
        self._page = MergedPage(METRICS)
        self._answered_s: dict[str, float] = {}  # Triton -> monotonic time of its last page
        self._lock = threading.Lock()
        self._fetchers = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="metrics-fetch")
        self._is_closing = threading.Event()
        self._history = History()
        self._server = BoundedHttpServer(address, self._handler())
        self._threads = [
            threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True),
            threading.Thread(target=self._fetch_now_and_then, name="metrics-keep", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def page(self) -> str:
        """Fetch all pages and merge them."""
        self._fetch()
        with self._lock:
            return self._page.text()

    def close(self) -> None:
        self._is_closing.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(timeout=0.2)  # a thread may still wait for a hung Triton
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def _fetch(self) -> None:
        with self._lock:  # held during the fetches, so that no older page replaces a newer one
            sources = self._sources()
            texts = list(self._fetchers.map(_fetched, sources))
            now_s = time.monotonic()
            for source, text in zip(sources, texts, strict=True):
                if text is not None:
                    self._page.take(source.triton, source.incarnation, text)
                    self._answered_s[source.triton] = now_s
            running = {source.triton for source in sources}
            for triton, answered_s in list(self._answered_s.items()):
                if triton not in running or now_s - answered_s > SILENT_S_MAX:
                    self._page.silent(triton)
                    del self._answered_s[triton]

    def _fetch_now_and_then(self) -> None:
        while not self._is_closing.wait(FETCH_EVERY_S):
            try:
                self._fetch()
                self._remember()
            except Exception:  # Catch all: one failed fetch must not end this thread
                log.exception("a fetch failed")

    def _remember(self) -> None:
        """Add a point to the history, if it is time."""
        if not self._history.is_due(time.monotonic()):
            return
        with self._lock:
            text = self._page.text()
        self._history.add(view.parse(text, time.monotonic()), time.time())

    def history(self) -> bytes:
        return msgspec.json.encode({"points": list(self._history.points)})

    def _ready(self) -> tuple[bool, bytes]:
        models = [{"name": each.name, "is_ready": each.is_ready} for each in self._states()]
        is_ready = all(model["is_ready"] for model in models)
        if not models:  # the host has no models, or its Tritons are not started yet
            is_ready = not self._serves_models()
        return is_ready, json.dumps({"models": models}).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, kind, body = 200, "application/json", b""
                if self.path == "/metrics":
                    kind, body = "text/plain; version=0.0.4", server.page().encode()
                elif self.path == "/live":
                    kind, body = "text/plain", b"alive\n"
                elif self.path == "/ready":
                    is_ready, body = server._ready()
                    status = 200 if is_ready else 503
                elif self.path == "/history":
                    body = server.history()
                elif self.path == "/settings":
                    body = json.dumps(server._settings()).encode()
                else:
                    status, kind = 404, "text/plain"
                    body = b"/metrics, /ready, /settings, /history or /live\n"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Requests are not logged."""

        return Handler


def _fetched(source: MetricsSource) -> str | None:
    try:
        url = f"http://{source.address}/metrics"
        with DIRECTLY.open(url, timeout=FETCH_S_MAX) as answer:
            return str(answer.read().decode(errors="replace"))
    except (*CALL_FAILED, ValueError):
        return None
