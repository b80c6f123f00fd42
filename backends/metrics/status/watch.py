"""`mooncake status`: prints worker, latency and store figures from the server's metrics page.

On a terminal the figures refresh until Ctrl-C. With --once or --json, or without a terminal, they
are printed once. If the page cannot be read, one line shows the reason. A command that refreshes
retries, and any other command exits with status 1. --web serves the figures as a web page instead.

Not here: reading the page (readings.py), computing the figures (view.py).
"""

from __future__ import annotations

import os
import sys
import time
import urllib.parse
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from backends.extras import require
from backends.metrics.status.readings import (
    DEFAULT_METRICS_URL,
    RECENT_S,
    NoStatus,
    Readings,
    fetch,
)
from backends.metrics.status.view import ROLES, PeriodView, View, view
from mooncake_store.cli.arguments import shown_bytes

BAR_CELLS = 10
COLUMNS_WANTED = 100  # on a narrower terminal, no bars are shown and no tables side by side
NOTHING = "-"


def once(metrics_url: str, interval_s: float, is_json: bool) -> int:
    """Print the figures once, with rates from two readings of the page, `interval_s` seconds apart.
    Returns the exit status."""
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
    """Refresh the figures on the terminal until Ctrl-C. Returns the exit status."""
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
    """Replace this process by a gateway on 127.0.0.1:`port`. `frontend`: HOST:PORT of a gRPC port.
    Exits with status 1 if the gateway's packages are missing or the metrics page is unreadable."""
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


def render(view: View, where: str, columns: int = COLUMNS_WANTED) -> RenderableType:
    """The figures as tables, for at least 80 columns. `where`: URL of the metrics page."""
    head = f"[bold]mooncake[/]  {escape(where)}  up {duration(view.up_s)}"
    is_narrow = columns < COLUMNS_WANTED
    first: RenderableType
    if is_narrow:
        first = Group(latency_table(view), Text(), ended_table(view))
    else:
        first = Table.grid(padding=(0, 6))
        first.add_row(latency_table(view), ended_table(view))
    return Group(
        Text.from_markup(head),
        Text(),
        first,
        Text(),
        workers_table(view, is_narrow),
        Text(),
        store_table(view),
        Text.from_markup(transfers(view)),
        Text(roles(view)),
    )


def unreachable(problem: str) -> RenderableType:
    return Text.from_markup(f"[bold red]no status[/]: {escape(problem)}")


def latency_table(view: View) -> Table:
    recent, total = view.recent, view.total
    table = _table("", f"last {recent.seconds:.0f} s", "since start")
    table.add_row("live requests", str(view.live), "")
    for name, quantity in (("TTFT", "ttft"), ("TBT", "tbt")):
        now, ever = getattr(recent, quantity), getattr(total, quantity)
        for mark, part in (("p50", "p50_s"), ("p90", "p90_s")):
            cells = (duration(getattr(span, part)) for span in (now, ever))
            table.add_row(f"{name} {mark}", *cells)
        table.add_row(f"{name} limit", duration(view.slo_s.get(quantity)), "")
    table.add_row("mean per token", duration(recent.token_s), duration(total.token_s))
    table.add_row("prompt tokens cached", share(recent.hit_rate), share(total.hit_rate))
    for path in total.prompt_tokens:
        table.add_row(
            f"  {path}",
            per_s(recent, recent.prompt_tokens[path]),
            number(total.prompt_tokens[path]),
        )
    return table


def ended_table(view: View) -> Table:
    """Requests by outcome; rejections also by reason."""
    recent, total = view.recent, view.total
    table = _table("requests", f"last {recent.seconds:.0f} s", "since start")
    for outcome in total.requests or {"answered": 0}:
        style = "" if outcome in ("answered", "rejected", "cancelled") else "bold red"
        now, ever = recent.requests.get(outcome, 0), total.requests.get(outcome, 0)
        table.add_row(Text(outcome, style), per_s(recent, now), number(ever))
        if outcome == "rejected":
            for reason, ever in total.rejections.items():
                now = recent.rejections.get(reason, 0)
                table.add_row(f"  {reason}", per_s(recent, now), number(ever))
    for name, ever in total.refused_fields.items():
        now = recent.refused_fields.get(name, 0)
        table.add_row(f"refused field {name}", per_s(recent, now), number(ever))
    if view.retries:
        table.add_row("further attempts", "", number(view.retries))
    return table


def workers_table(view: View, is_narrow: bool = False) -> Table:
    bars = () if is_narrow else ("",)
    table = _table(
        "worker", "node", "running", "waiting", "pages", *bars, "KV", "tokens", "step", "busy"
    )
    for role in ROLES:
        of_role = [worker for worker in view.workers if worker.role == role]
        live = view.workers_live.get(role, 0)
        style = "" if live == len(of_role) else "bold red"
        table.add_row(Text(f"{role}, {live} live", f"dim {style}"))
        for worker in of_role:
            table.add_row(
                f"  {worker.name}",
                worker.node,
                str(worker.running),
                str(worker.waiting),
                f"{worker.pages_used}/{worker.pages_max}",
                *(bar(worker.pages_used, worker.pages_max) for _ in bars),
                shown_bytes(worker.kv_bytes_used),
                f"{number(round(worker.tokens_per_s))}/s",
                duration(worker.step_s),
                share(worker.busy),
            )
    return table


def roles(view: View) -> str:
    """One line with wanted workers and proposed role changes; "" if `role_flips` is off."""
    found = [
        f"{role} {wanted:.1f} wanted, {view.flips_proposed.get(role, 0)} flips to {role} proposed"
        for role, wanted in view.workers_wanted.items()
    ]
    return f"roles: {'; '.join(found)}" if found else ""


def store_table(view: View) -> Table:
    table = _table("storage node", "used", "of", "", "blocks", "evictions")
    for node in view.nodes:
        table.add_row(
            node.name,
            shown_bytes(node.bytes_used),
            shown_bytes(node.bytes_max),
            bar(node.bytes_used, node.bytes_max),
            number(node.blocks),
            f"{node.evictions_per_s:.1f}/s",
        )
    if not view.nodes:
        table.add_row(Text("none; the directory does not answer, or has no node", "bold red"))
    return table


def transfers(view: View) -> str:
    by_transport = view.transfer_bytes_per_s.items()
    rates = ", ".join(f"{transport} {shown_bytes(rate)}/s" for transport, rate in by_transport)
    failures = f", [bold red]{view.transfer_failures} failed[/]" if view.transfer_failures else ""
    return f"transfers: {rates or NOTHING}{failures}"


def bar(used: float, most: float) -> Text:
    """A bar of BAR_CELLS cells that shows used / most. Any use above 0 fills at least one cell."""
    share_used = min(1.0, used / most) if most else 0.0
    full = max(round(share_used * BAR_CELLS), 1 if used else 0)
    style = "red" if share_used > 0.9 else "yellow" if share_used > 0.7 else "green"
    return Text.assemble(("█" * full, style), ("░" * (BAR_CELLS - full), "dim"))


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 1.0:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.1f} s"
    if seconds < 7200.0:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def number(count: int) -> str:
    return f"{count:,}"


def share(part: float | None) -> str:
    return NOTHING if part is None else f"{part:.0%}"


def per_s(span: PeriodView, count: int) -> str:
    return f"{count / span.seconds:,.1f}/s" if span.seconds > 0 else NOTHING


def _table(*columns: str) -> Table:
    """A table without borders. Text is left-aligned, and numbers are right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        is_words = index == 0 or column in ("node", "")
        table.add_column(column, justify="left" if is_words else "right", no_wrap=True)
    return table
