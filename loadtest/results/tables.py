"""A run's summary as tables for people. The same numbers as JSON are `dataclasses.asdict`.

docs/reference/loadtest.md explains each number, and metrics.py defines it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from loadtest.results.metrics import LAG_SHARE_MAX, Goodput, Slo, Spread, Summary


def duration(seconds: float) -> str:
    """Three significant digits in the unit that a person would use."""
    if abs(seconds) < 0.9995:
        return f"{seconds * 1_000:.3g} ms"
    return f"{seconds:.3g} s" if abs(seconds) < 1_000 else f"{seconds:,.0f} s"


def summary_tables(summary: Summary) -> Group:
    parts: list[Table | Text] = [_counts(summary)]
    times = [("TTFT", summary.ttft_s), ("TBT", summary.tbt_s), ("whole request", summary.latency_s)]
    if any(spread for _, spread in times):
        parts.append(_times([*times, ("sender lag", lag_s(summary))]))
    for title, kinds in (
        ("errors by kind", summary.errors_by_kind),
        ("rejections by reason", summary.rejections_by_reason),
    ):
        if kinds:
            parts.append(_kinds(title, kinds))
    parts += [Text(warning, style="bold yellow") for warning in warnings(summary)]
    return Group(*parts)


def lag_s(summary: Summary) -> Spread | None:
    """None where no request had a due time: a client that waits for an answer is not late."""
    spread = summary.sender_lag_s
    return spread if spread is not None and (spread.max or spread.mean) else None


def goodput_line(found: Goodput, slo: Slo | None) -> str:
    return (
        f"goodput: {found.requests:,} requests ({found.share:.1%} of those sent, "
        f"{found.requests_per_s:.3g} per second) met {slo_text(slo)}"
    )


def slo_text(slo: Slo | None) -> str:
    """None: of a mix whose workloads have levels of their own."""
    if slo is None:
        return "the level of their workload"
    limits = (("TTFT", slo.ttft_s), ("TBT", slo.tbt_s))
    return " and ".join(f"{name} <= {duration(s)}" for name, s in limits if s is not None)


def warnings(summary: Summary) -> Iterator[str]:
    """Conditions that make the numbers unreliable."""
    if summary.is_sender_late and summary.sender_lag_s:
        yield (
            f"The sender was late: p99 {duration(summary.sender_lag_s.p99)}, more than "
            f"{LAG_SHARE_MAX:.0%} of the median TTFT. The arrivals were not the trace's; use a "
            "lower --speed or a machine of its own for the sender."
        )
    ideal = summary.ideal_cached_tokens
    if ideal is not None and (summary.cached_tokens or 0) > ideal:
        yield (
            "More was cached than this run could have put there: the server had seen these "
            "prompts before. Restart it or use another --seed for a cold start."
        )
    if summary.short_outputs:
        yield (
            f"{summary.short_outputs:,} answers were shorter than asked (an end token, or a limit "
            "of the server)."
        )


def _counts(summary: Summary) -> Table:
    table = Table(title=f"{summary.completed:,} of {summary.requests:,} requests completed")
    table.add_column("", justify="left")
    table.add_column("total", justify="right")
    table.add_column("per second", justify="right")
    rate = f"{summary.requests_per_s:.3g}"
    table.add_row(f"requests in {duration(summary.duration_s)}", f"{summary.completed:,}", rate)
    for name, tokens, per_s in (
        ("prompt tokens", summary.input_tokens, summary.input_tokens_per_s),
        ("generated tokens", summary.output_tokens, summary.output_tokens_per_s),
    ):
        table.add_row(name, f"{tokens:,}", f"{per_s:,.0f}")
    table.add_section()
    table.add_row("cached tokens", *_cached(summary.cached_tokens, summary.hit_rate))
    table.add_row("unlimited cache", *_cached(summary.ideal_cached_tokens, summary.ideal_hit_rate))
    if summary.cached_over_ideal is not None:
        table.add_row("cached / unlimited", f"{summary.cached_over_ideal:.3f}", "")
    return table


def _cached(tokens: int | None, rate: float | None) -> tuple[str, str]:
    if tokens is None:
        return "not said", ""
    return f"{tokens:,}", f"{rate:.1%} of prompt" if rate is not None else ""


def _times(rows: list[tuple[str, Spread | None]]) -> Table:
    table = Table()
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p99", "max", "requests"):
        table.add_column(heading, justify="right")
    for name, spread in rows:
        if spread:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
            table.add_row(name, *map(duration, values), f"{spread.count:,}")
    return table


def _kinds(title: str, kinds: dict[str, int]) -> Table:
    table = Table(title=title)
    table.add_column("kind")
    table.add_column("requests", justify="right")
    for kind, count in kinds.items():
        table.add_row(kind, f"{count:,}")
    return table
