"""A view as tables in a terminal of 80 columns or more."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from backends.metrics.status.view import ROLES, PeriodView, View
from mooncake_store.cli.arguments import shown_bytes

BAR_CELLS = 10
COLUMNS_WANTED = 100  # a narrower terminal has no bars, and tables below each other
NOTHING = "-"


def render(view: View, where: str, columns: int = COLUMNS_WANTED) -> RenderableType:
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
    """The demand that the role controller finds; "" where it is off."""
    found = [
        f"{role} {wanted:.1f} wanted, {view.flips_proposed.get(role, 0)} flips to it proposed"
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
        table.add_row(Text("none; the directory does not answer", "bold red"))
    return table


def transfers(view: View) -> str:
    by_transport = view.transfer_bytes_per_s.items()
    rates = ", ".join(f"{transport} {shown_bytes(rate)}/s" for transport, rate in by_transport)
    failures = f", [bold red]{view.transfer_failures} failed[/]" if view.transfer_failures else ""
    return f"transfers: {rates or NOTHING}{failures}"


def bar(used: float, most: float) -> Text:
    """Full and empty cells; a used amount above 0 shows at least one full cell."""
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
    """Words to the left, numbers to the right, no lines."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        is_words = index == 0 or column in ("node", "")
        table.add_column(column, justify="left" if is_words else "right", no_wrap=True)
    return table
