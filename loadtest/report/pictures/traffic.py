"""What the clients saw over time: requests sent and ended, in flight, and the hit rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report import series
from loadtest.report.pictures.pools import Panel, plot
from loadtest.report.pictures.style import (
    NAMED,
    OUTCOMES,
    Picture,
    count_axis,
    drawn,
    legend,
    not_measured,
    panels,
    percent_axis,
    time_axis,
)
from loadtest.report.series import Line
from loadtest.report.timeline import (
    Bins,
    bins_of,
    end_s,
    hit_rate,
    in_flight,
    per_second,
    tokens_per_second,
)
from loadtest.results.recording import Recording
from loadtest.results.tables import duration

THREE_PANELS_IN = 5.2
PATHS = {"computed": NAMED["blue"], "local": NAMED["green"], "fetched": NAMED["sky"]}


def requests(recording: Recording) -> Picture:
    title = "Requests over time"
    records = recording.requests
    if not records:
        return not_measured(title, "no request was sent.")
    bins = bins_of(records)
    rates = per_second(records, bins)
    times_s, counts = in_flight(records)
    tokens = tokens_per_second(records, bins)
    ended = [name for name in ("answered", "rejected", "failed") if rates[name].any()]

    def draw(figure: Figure) -> None:
        top, middle, bottom = panels(figure, 3)
        for name in ("sent", *ended):
            style = {"linestyle": (0, (2, 1.2))} if name == "sent" else {}
            top.stairs(
                rates[name], bins.edges_s, baseline=None, color=OUTCOMES[name], label=name,
                linewidth=1.4, **style,
            )  # fmt: skip
        top.set_ylabel("requests per second")
        top.set_ylim(bottom=0.0)
        count_axis(top.yaxis)
        legend(top, columns=4)
        middle.step(times_s, counts, where="post", color=NAMED["slate"])
        middle.fill_between(times_s, counts, step="post", color=NAMED["pale"], alpha=0.5, lw=0)
        middle.set_ylabel("in flight")
        bottom.stairs(tokens, bins.edges_s, baseline=None, color=NAMED["pink"], linewidth=1.4)
        bottom.set_ylabel("tokens/s")
        for axes in (middle, bottom):
            axes.set_ylim(bottom=0.0)
            count_axis(axes.yaxis)
        time_axis(bottom, end_s(records))
        figure.align_ylabels()

    caption = (
        "From above: requests sent, and requests that ended in each way, per second (in steps of "
        f"{duration(bins.width_s)}); requests sent and not yet ended; generated tokens that "
        "reached the clients per second."
    )
    alt = (
        f"{len(records):,} requests in {duration(end_s(records))}; at most "
        f"{int(counts.max()):,} in flight at once."
    )
    return drawn(title, caption, alt, draw, THREE_PANELS_IN)


def cache(recording: Recording) -> Picture:
    title = "Cache hits over time"
    records = recording.requests
    bins = bins_of(records, bins_max=30)
    found = hit_rate(records, bins, recording.ideal_cached_tokens)
    paths = series.rate(recording.samples, series.PROMPT_TOKENS, by="path")
    store = series.share(
        series.gauge(recording.samples, series.STORE_USED, by="node"),
        series.gauge(recording.samples, series.STORE_MAX, by="node"),
    )
    if found is None and not paths and not store:
        return not_measured(title, "no answer said what was cached, and no samples were taken.")

    def draw(figure: Figure) -> None:
        top, middle, bottom = panels(figure, 3)
        if found is None:
            _say(top, "no answer said what was cached")
        else:
            if found.ideal is not None:
                _dots(top, bins, found.ideal, "unlimited cache", NAMED["slate"], "_", 9)
            _dots(top, bins, found.rate, "cached", NAMED["green"], "o", 4.5)
            legend(top, columns=2)
        percent_axis(top)
        top.set_ylabel("of prompt tokens")
        if paths:
            _paths(middle, paths)
            legend(middle, columns=3)
        else:
            _say(middle, "no samples of the server")
        middle.set_ylabel("prompt tokens/s")
        middle.set_ylim(bottom=0.0)
        count_axis(middle.yaxis)
        if store:
            plot(bottom, Panel("store", store, is_share=True))
            legend(bottom, columns=4)
        else:
            _say(bottom, "no samples of the storage nodes")
        bottom.set_ylabel("store in use")
        percent_axis(bottom)
        time_axis(bottom, end_s(records))
        figure.align_ylabels()

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
    alt = "not said by the answers"
    if found is not None:
        told = [r for r in records if r.cached_tokens is not None and r.outcome == "completed"]
        cached = sum(r.cached_tokens or 0 for r in told)
        alt = f"{cached:,} of {sum(r.prompt_tokens for r in told):,} prompt tokens were cached"
    return drawn(title, caption, f"Hit rate: {alt}.", draw, THREE_PANELS_IN)


def _dots(
    axes: Axes, bins: Bins, rates: np.ndarray, name: str, colour: str, marker: str, size: float
) -> None:
    middles_s = (bins.edges_s[:-1] + bins.edges_s[1:]) / 2
    axes.plot(
        middles_s, rates, marker, color=colour, label=name, markersize=size,
        markeredgewidth=1.8 if marker == "_" else 0.0,
    )  # fmt: skip


def _paths(axes: Axes, lines: Sequence[Line]) -> None:
    """Stacked rates; each holds since the sample before, and is 0 where it is unknown."""
    times_s = sorted({time_s for line in lines for time_s in line.times_s})
    known = {line.label: dict(zip(line.times_s, line.values, strict=True)) for line in lines}
    names = [name for name in PATHS if name in known]
    heights = [np.nan_to_num([known[name].get(s, 0.0) for s in times_s]) for name in names]
    axes.stackplot(
        times_s, heights, labels=names, colors=[PATHS[name] for name in names], linewidth=0,
        step="pre",
    )  # fmt: skip


def _say(axes: Axes, text: str) -> None:
    axes.text(
        0.5, 0.5, f"not measured: {text}", transform=axes.transAxes, ha="center", va="center",
        color=NAMED["muted"],
    )  # fmt: skip
