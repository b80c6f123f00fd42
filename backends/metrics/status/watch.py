"""`mooncake status` reads the metrics page every `interval_s` seconds and prints worker, latency
and store figures.

On a terminal the view refreshes until Ctrl-C. With --once, --json, or without a terminal, it is
printed once. If the page cannot be read, one line shows the reason. The live view then retries;
otherwise the exit status is 1.

Not here: reading the page (readings.py), the figures (view.py), the tables (render.py).
"""

from __future__ import annotations

import os
import sys
import time
import urllib.parse
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from backends.extras import require
from backends.metrics.status.readings import (
    DEFAULT_METRICS_URL,
    RECENT_S,
    NoStatus,
    Readings,
    fetch,
)
from backends.metrics.status.render import COLUMNS_WANTED, render, unreachable
from backends.metrics.status.view import view


def once(metrics_url: str, interval_s: float, is_json: bool) -> int:
    """Print one view. Its rates are computed between two readings, `interval_s` apart. Returns the
    exit status."""
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
    """Refresh the view every `interval_s` seconds until Ctrl-C. Returns the exit status."""
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
                    line = f"{problem} (retrying every {interval_s:g} s)"
                    shown.update(unreachable(line), refresh=True)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0


def serve_page(metrics_url: str, frontend: str, port: int) -> None:
    """Exec `backends.gateway` on 127.0.0.1:`port`, connected to `frontend` (HOST:PORT of gRPC).

    Never returns: without the gateway's packages or the metrics page, it exits with status 1.
    """
    require("gateway", "--web")
    console = Console(stderr=True, soft_wrap=True)
    try:
        fetch(metrics_url)
    except NoStatus as problem:
        console.print(unreachable(str(problem)))
        sys.exit(1)
    console.print(f"status page, playground: http://127.0.0.1:{port}/ (Ctrl-C ends it)")
    metrics = urllib.parse.urlsplit(metrics_url).netloc
    options = [f"--port={port}", f"--frontend={frontend}", f"--metrics={metrics}"]
    command = [sys.executable, "-m", "backends.gateway", "--name=status-page", *options]
    os.execv(sys.executable, command)


def status(
    metrics_url: Annotated[
        str, typer.Option(help="URL of the server's metrics page.")
    ] = DEFAULT_METRICS_URL,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between readings.")] = 1.0,
    is_once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON, and exit.")] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Serve the status page and playground on loopback.")
    ] = False,
    web_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the status page that --web serves.")
    ] = 9080,
    frontend: Annotated[
        str, typer.Option(help="HOST:PORT of the frontend's gRPC port; used with --web only.")
    ] = "127.0.0.1:8001",
) -> None:
    """Show what a running server does: pools, queues, latency, hit rate, rejections, storage."""
    if web:
        serve_page(metrics_url, frontend, web_port)
    if is_once or as_json or not sys.stdout.isatty():
        sys.exit(once(metrics_url, interval_s, as_json))
    sys.exit(live(metrics_url, interval_s))
