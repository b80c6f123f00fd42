"""`mooncake status`: reads the metrics page now and then, shows what it says.

Live until Ctrl-C, once, or once as JSON. A server that is not there is said in one line; the live
view waits for it. Not here: the view (view.py), its looks (render.py).
"""

from __future__ import annotations

import http.client
import os
import sys
import time
import urllib.request
from collections import deque
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from backends.metrics.status.render import COLUMNS_WANTED, render, unreachable
from backends.metrics.status.view import Page, View, parse, view

FETCH_S_MAX = 5.0
RECENT_S = 10.0  # of the live view


class NoStatus(Exception):
    """The page cannot be had, or it is no server of ours; the message says what to do."""


def fetch(metrics_url: str) -> Page:
    try:
        with urllib.request.urlopen(metrics_url, timeout=FETCH_S_MAX) as answer:
            page = parse(answer.read().decode(), time.monotonic())
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise NoStatus(
            f"{metrics_url}: {reason}. Start a server with `mooncake serve`, or name the page of "
            "one with --metrics-url http://HOST:PORT/metrics"
        ) from None
    if page.is_empty:
        raise NoStatus(
            f"{metrics_url} answers, but shows no mooncake metrics: it is no mooncake server, or "
            "it has loaded no model yet"
        )
    return page


class Readings:
    """The pages of the last seconds, so that rates are over some of them. Pure."""

    def __init__(self, recent_s: float) -> None:
        self._recent_s = recent_s
        self._pages: deque[Page] = deque()

    def add(self, page: Page) -> None:
        """The oldest that stays is the newest of those at least `recent_s` old."""
        self._pages.append(page)
        while len(self._pages) > 2 and page.read_at_s - self._pages[1].read_at_s >= self._recent_s:
            self._pages.popleft()

    def clear(self) -> None:
        """The server was away: what it counted before says nothing of now."""
        self._pages.clear()

    def view(self, unix_s: float) -> View:
        return view(self._pages[-1], self._pages[0], unix_s)


def once(metrics_url: str, interval_s: float, is_json: bool) -> int:
    """Two readings, `interval_s` apart. The exit status."""
    try:
        before = fetch(metrics_url)
        time.sleep(interval_s)
        seen = view(fetch(metrics_url), before, time.time())
    except NoStatus as problem:
        Console(stderr=True, soft_wrap=True).print(unreachable(str(problem)))
        return 1
    if is_json:
        print(msgspec.json.encode(seen).decode())
    else:
        console = Console(highlight=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = COLUMNS_WANTED  # a pipe or a file has no width
        console.print(render(seen, metrics_url, console.width))
    return 0


def live(metrics_url: str, interval_s: float) -> int:
    """Until Ctrl-C. The exit status."""
    console = Console(highlight=False)
    readings = Readings(max(RECENT_S, interval_s))
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as shown:
            while True:
                try:
                    readings.add(fetch(metrics_url))
                    seen = render(readings.view(time.time()), metrics_url, console.width)
                    shown.update(seen, refresh=True)
                except NoStatus as problem:
                    readings.clear()
                    shown.update(unreachable(f"{problem} (waiting for it)"), refresh=True)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0


def status(
    metrics_url: Annotated[
        str, typer.Option(help="Its metrics page.")
    ] = "http://127.0.0.1:8002/metrics",
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between readings.")] = 1.0,
    is_once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON, and exit.")] = False,
) -> None:
    """Show what a running server does: pools, queues, latency, hit rate, rejections, storage."""
    if is_once or as_json or not sys.stdout.isatty():
        sys.exit(once(metrics_url, interval_s, as_json))
    sys.exit(live(metrics_url, interval_s))
