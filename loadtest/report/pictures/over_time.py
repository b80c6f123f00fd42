"""A run over time: requests and cache hits at the clients, and the server's own load.

Each picture is a stack of panels with one axis of time. The table POOLS lists the panels of a pool
of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report import timeline
from loadtest.report.pictures.style import (
    MANY,
    NAMED,
    OUTCOMES,
    Picture,
    count_axis,
    drawn,
    label,
    legend,
    not_measured,
    percent_axis,
    time_axis,
)
from loadtest.report.timeline import Bins, TimeSeries, bins_of, end_s
from loadtest.results.metrics import COMPLETED
from loadtest.results.recording import Recording, Sample
from loadtest.results.tables import duration

THREE_PANELS_IN = 5.2
PANEL_IN, AROUND_IN = 1.15, 0.75
LINES_MAX = 4  # with more workers a band is drawn
DOTS_MAX = 120  # with more samples the dots would look like a line
STYLES = ("-", (0, (4, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
PATHS = {"computed": NAMED["blue"], "local": NAMED["green"], "fetched": NAMED["sky"]}


@dataclass(frozen=True, slots=True)
class Panel:
    """One vertical axis of a picture; an axis of shares goes to 100 %, or to its peak."""

    name: str
    draw: Callable[[Axes], None]
    share_peak: float | None = None
    legend_columns: int = 0  # 0: no legend


@dataclass(frozen=True, slots=True)
class Quantity:
    name: str
    metric: str
    is_rate: bool = False  # a counter, shown as its growth per second since the sample before
    is_share: bool = False
    limit: str = ""  # metric that the values are divided by; "": none

    def lines(self, samples: Sequence[Sample], workers: set[str]) -> list[TimeSeries]:
        lines = (timeline.rate if self.is_rate else timeline.gauge)(samples, self.metric)
        if self.limit:
            lines = timeline.share(lines, timeline.gauge(samples, self.limit))
        return [line for line in lines if line.label in workers]


@dataclass(frozen=True, slots=True)
class WorkerPool:
    title: str
    workers: Callable[[Sequence[Sample]], set[str]]
    quantities: Sequence[Quantity]
    caption: str


QUEUES = (
    Quantity("waiting", "mooncake_requests_waiting"),
    Quantity("running", "mooncake_requests_running"),
)
USE = (
    Quantity("busy", "mooncake_step_seconds_total", is_rate=True, is_share=True),
    Quantity("pages", timeline.PAGES_USED, is_share=True, limit="mooncake_pages_max"),
)
POOLS = {
    "prefill": WorkerPool(
        "Prefill workers",
        timeline.prefill_workers,
        (*QUEUES, Quantity("tokens left", timeline.QUEUE_TOKENS), *USE),
        "Of each prefill worker: requests waiting for pages, requests that have them, tokens of "
        "the prompts of both that are not computed yet",
    ),
    "decode": WorkerPool(
        "Decode workers",
        timeline.decode_workers,
        (*QUEUES, Quantity("tokens/s", "mooncake_output_tokens_total", is_rate=True), *USE),
        "Of each decode worker: requests waiting to be in the running batch, requests in it, "
        "tokens generated per second",
    ),
}


def requests(recording: Recording) -> Picture:
    title = "Requests over time"
    records = recording.requests
    if not records:
        return not_measured(title, "no request was sent.")
    bins = bins_of(records)
    rates = timeline.per_second(records, bins)
    times_s, counts = timeline.in_flight(records)
    tokens = timeline.tokens_per_second(records, bins)
    ended = [name for name in ("answered", "rejected", "failed") if rates[name].any()]

    def draw_rates(axes: Axes) -> None:
        for name in ("sent", *ended):
            axes.stairs(
                rates[name],
                bins.edges_s,
                baseline=None,
                color=OUTCOMES[name],
                label=name,
                linewidth=1.4,
                linestyle=(0, (2, 1.2)) if name == "sent" else "-",
            )

    def draw_in_flight(axes: Axes) -> None:
        axes.step(times_s, counts, where="post", color=NAMED["slate"])
        axes.fill_between(times_s, counts, step="post", color=NAMED["pale"], alpha=0.5, lw=0)

    def draw_tokens(axes: Axes) -> None:
        axes.stairs(tokens, bins.edges_s, baseline=None, color=NAMED["pink"], linewidth=1.4)

    panels = (
        Panel("requests per second", draw_rates, legend_columns=4),
        Panel("in flight", draw_in_flight),
        Panel("tokens/s", draw_tokens),
    )
    caption = (
        "From above: requests sent, and requests that ended in each way, per second (in steps of "
        f"{duration(bins.width_s)}); requests sent and not yet ended; generated tokens that "
        "reached the clients per second."
    )
    alt = (
        f"{len(records):,} requests in {duration(end_s(records))}; at most "
        f"{int(counts.max()):,} in flight at once."
    )
    draw = partial(_stack, panels, end_s(records))
    return drawn(title, caption, alt, draw, THREE_PANELS_IN)


def cache(recording: Recording) -> Picture:
    title = "Cache hits over time"
    records, samples = recording.requests, recording.samples
    bins = bins_of(records, bins_max=30)
    found = timeline.hit_rate(records, bins, recording.ideal_cached_tokens)
    paths = timeline.rate(samples, timeline.PROMPT_TOKENS, by="path")
    store = timeline.share(
        timeline.gauge(samples, "mooncake_store_bytes_used", by="node"),
        timeline.gauge(samples, "mooncake_store_bytes_max", by="node"),
    )
    if found is None and not paths and not store:
        return not_measured(
            title, "no answer reported its cached tokens, and no samples were taken."
        )

    def draw_hits(axes: Axes) -> None:
        if found is None:
            _say(axes, "not measured: no answer reported its cached tokens")
            return
        if found.ideal is not None:
            _dots(axes, bins, found.ideal, "unlimited cache", NAMED["slate"], "_", 9)
        _dots(axes, bins, found.rate, "cached", NAMED["green"], "o", 4.5)

    draw_paths = partial(_paths, lines=paths)
    if not paths:
        draw_paths = partial(_say, text="not measured: no samples of the server")
    draw_store = partial(_lines, lines=store)
    if not store:
        draw_store = partial(_say, text="not measured: no samples of the storage nodes")
    panels = (
        Panel("of prompt tokens", draw_hits, share_peak=1.0, legend_columns=2 if found else 0),
        Panel("prompt tokens/s", draw_paths, legend_columns=3 if paths else 0),
        Panel("store in use", draw_store, share_peak=1.0, legend_columns=4 if store else 0),
    )
    unlimited = ""
    if found is not None and found.ideal is not None:
        unlimited = ", and what an unlimited cache (full blocks, nothing evicted) would have had"
    caption = (
        f"From above: of the prompts sent in each {duration(bins.width_s)}, the share of tokens "
        f"that was not computed but cached{unlimited}; prompt tokens per second by how their "
        "KVCache came: computed, from the worker's own storage node (local) or from another one "
        "(fetched), each prompt at its end; the share of each storage node's memory that holds "
        "blocks."
    )
    alt = "not reported by the answers"
    if found is not None:
        known = [r for r in records if r.cached_tokens is not None and r.outcome == COMPLETED]
        cached = sum(r.cached_tokens or 0 for r in known)
        alt = f"{cached:,} of {sum(r.prompt_tokens for r in known):,} prompt tokens were cached"
    draw = partial(_stack, panels, end_s(records))
    return drawn(title, caption, f"Hit rate: {alt}.", draw, THREE_PANELS_IN)


def workers(recording: Recording, role: str) -> Picture:
    pool, samples = POOLS[role], recording.samples
    names = pool.workers(samples)
    if not names:
        why = "the samples name none." if samples else "no samples of the server."
        return not_measured(pool.title, why)
    measured = [(quantity, quantity.lines(samples, names)) for quantity in pool.quantities]
    panels = [
        Panel(
            quantity.name,
            partial(_lines, lines=lines, is_rate=quantity.is_rate, margin=0.1),
            share_peak=(_peak(lines) or 0.0) if quantity.is_share else None,
        )
        for quantity, lines in measured
    ]

    def draw(figure: Figure) -> None:
        until_s = max(end_s(recording.requests), samples[-1].time_s)
        axes = _stack(panels, until_s, figure)
        handles = (each.get_legend_handles_labels() for each in axes)
        most = max(handles, key=lambda found: len(found[1]))
        figure.legend(*most, loc="outside upper left", ncols=LINES_MAX)

    peaks = ", ".join(
        f"{quantity.name} {peak:.0%}" if quantity.is_share else f"{quantity.name} {peak:,.0f}"
        for quantity, lines in measured
        if (peak := _peak(lines)) is not None
    )
    caption = (
        f"{pool.caption}, the share of time that its engine computed (a step counts when it ends, "
        "so a long one may show as over 100 %), and the share of its engine's KVCache memory (in "
        "pages) that is taken."
    )
    if len(names) > LINES_MAX:
        caption += f" The line is the mean of {len(names)} workers, the band goes from the "
        caption += "least to the most loaded."
    caption += f" {len(samples)} samples of the server's metrics page; changes between two "
    caption += "of them show in rates only."
    alt = f"{pool.title}: largest values: {peaks}."
    return drawn(pool.title, caption, alt, draw, AROUND_IN + PANEL_IN * len(panels))


def _stack(panels: Sequence[Panel], until_s: float, figure: Figure) -> list[Axes]:
    stack = list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
    for axes, panel in zip(stack, panels, strict=True):
        panel.draw(axes)
        axes.set_ylabel(panel.name)
        if panel.share_peak is None:
            axes.set_ylim(bottom=0.0)
            count_axis(axes.yaxis)
        else:
            percent_axis(axes, panel.share_peak)
        if panel.legend_columns:
            legend(axes, panel.legend_columns)
    time_axis(stack[-1], until_s)
    figure.align_ylabels(stack)
    return stack


def _peak(lines: Sequence[TimeSeries]) -> float | None:
    known = [value for line in lines for value in line.values if not math.isnan(value)]
    return max(known) if known else None


def _lines(
    axes: Axes, lines: Sequence[TimeSeries], is_rate: bool = False, margin: float | None = None
) -> None:
    if _peak(lines) is None:
        _say(axes, "not measured")
    elif len(lines) <= LINES_MAX:
        is_sparse = max(len(line.times_s) for line in lines) <= DOTS_MAX
        for line, colour, style in zip(lines, MANY, STYLES, strict=False):
            axes.plot(
                line.times_s,
                line.values,
                color=colour,
                linestyle=style,
                label=label(line.label),
                marker="o" if is_sparse and not is_rate else "",
                markersize=2.6,
                linewidth=1.2,
                drawstyle="steps-pre" if is_rate else "default",
            )
    else:
        times_s, low, mean, high = band(lines)
        axes.fill_between(times_s, low, high, color=NAMED["sky"], alpha=0.4, lw=0, label="range")
        axes.plot(times_s, mean, color=NAMED["blue"], label="mean")
    if margin is not None:
        axes.margins(y=margin)


def band(lines: Sequence[TimeSeries]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Times, and at each the least, mean and largest value over the lines that have one."""
    values: dict[float, list[float]] = {}
    for line in lines:
        for time_s, value in zip(line.times_s, line.values, strict=True):
            if not math.isnan(value):
                values.setdefault(time_s, []).append(value)
    times_s = sorted(values)
    low, mean, high = ([pick(values[s]) for s in times_s] for pick in (min, np.mean, max))
    return np.array(times_s), np.array(low), np.array(mean), np.array(high)


def _dots(
    axes: Axes, bins: Bins, rates: np.ndarray, name: str, colour: str, marker: str, size: float
) -> None:
    middles_s = (bins.edges_s[:-1] + bins.edges_s[1:]) / 2
    look = {"markersize": size, "markeredgewidth": 1.8 if marker == "_" else 0.0}
    axes.plot(middles_s, rates, marker, color=colour, label=name, **look)


def _paths(axes: Axes, lines: Sequence[TimeSeries]) -> None:
    """Stacked rates; each is valid since the sample before, and 0 where it is unknown."""
    times_s = sorted({time_s for line in lines for time_s in line.times_s})
    known = {line.label: dict(zip(line.times_s, line.values, strict=True)) for line in lines}
    names = [name for name in PATHS if name in known]
    heights = [np.nan_to_num([known[name].get(s, 0.0) for s in times_s]) for name in names]
    colours = [PATHS[name] for name in names]
    axes.stackplot(times_s, heights, labels=names, colors=colours, linewidth=0, step="pre")


def _say(axes: Axes, text: str) -> None:
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=NAMED["muted"]
    )
