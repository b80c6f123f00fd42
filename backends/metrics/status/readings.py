"""Fetches the metrics page, and keeps the readings of the last seconds."""

from __future__ import annotations

import time
from collections import deque

from backends.direct_http import CALL_FAILED, DIRECTLY
from backends.metrics.status.view import Page, View, parse, view

DEFAULT_METRICS_URL = "http://127.0.0.1:8002/metrics"
FETCH_S_MAX = 5.0  # timeout of one GET of the page
RECENT_S = 10.0  # seconds that recent figures cover, if the command has run that long


class NoStatus(Exception):
    """The page cannot be read, or has no `mooncake_` metrics. The message names the remedy."""


def fetch_page(metrics_url: str) -> bytes:
    """The page's bytes. Ignores http_proxy. Raises OSError or HTTPException."""
    with DIRECTLY.open(metrics_url, timeout=FETCH_S_MAX) as answer:
        return bytes(answer.read())


def fetch(metrics_url: str) -> Page:
    """Fetch and parse the page. Raises NoStatus."""
    try:
        page = parse(fetch_page(metrics_url).decode(), time.monotonic())
    except (*CALL_FAILED, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NoStatus(
            f"{metrics_url}: {reason}. Start a server with `mooncake serve`, or set "
            "--metrics-url http://HOST:PORT/metrics to the metrics page of a running server"
        ) from None
    if page.is_empty:
        raise NoStatus(
            f"{metrics_url} answers, but has no mooncake metrics: either this is not the page of "
            "`mooncake serve`, or no model is loaded yet"
        )
    return page


class Readings:
    """The pages of the last `recent_s` seconds, for rates. `view` needs at least one page."""

    def __init__(self, recent_s: float = RECENT_S) -> None:
        self._recent_s = recent_s
        self._pages: deque[Page] = deque()

    def add(self, page: Page) -> None:
        """Add a page. Remove pages older than `recent_s`, except the newest of them."""
        self._pages.append(page)
        while len(self._pages) > 2 and page.read_at_s - self._pages[1].read_at_s >= self._recent_s:
            self._pages.popleft()

    def clear(self) -> None:
        """Remove all pages, because the server may restart its counters."""
        self._pages.clear()

    def view(self, unix_s: float) -> View:
        return view(self._pages[-1], self._pages[0], unix_s)
