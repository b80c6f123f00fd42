"""What the clients saw over time: requests sent and ended, in flight, and the hit rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.recording import Recording
from loadtest.report import series
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
from loadtest.report.timeline import Bins, bins_of, end_s, hit_rate, in_flight, per_second
from loadtest.tables import duration

TWO_PANELS_IN = 4.1
PATHS = {"computed": NAMED["blue"], "local": NAMED["green"], "fetched": NAMED["sky"]}


def requests(recording: Recording) -> Picture:
    title = "Requests over time"
    records = recording.requests
    if not records:
        return not_measured(title, "no request was sent.")
    bins = bins_of(records)
    rates = per_second(records, bins)
    times_s, counts = in_flight(records)
    ended = [name for name in ("answered", "rejected", "failed") if rates[name].any()]

    def draw(figure: Figure) -> None:
        top, bottom = panels(figure, 2)
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
        bottom.step(times_s, counts, where="post", color=NAMED["slate"])
        bottom.fill_between(times_s, counts, step="post", color=NAMED["pale"], alpha=0.5, lw=0)
        bottom.set_ylabel("in flight")
        bottom.set_ylim(bottom=0.0)
        count_axis(bottom.yaxis)
        time_axis(bottom, end_s(records))

    caption = (
        "Above: requests sent, and requests that ended in each way, per second (in steps of "
        f"{duration(bins.width_s)}). Below: requests sent and not yet ended."
    )
    alt = (
        f"{len(records):,} requests in {duration(end_s(records))}; at most "
        f"{int(counts.max()):,} in flight at once."
    )
    return drawn(title, caption, alt, draw, TWO_PANELS_IN)


def cache(recording: Recording) -> Picture:
    title = "Cache hits over time"
    records = recording.requests
    bins = bins_of(records, bins_max=30)
    found = hit_rate(records, bins, recording.ideal_cached_tokens)
    paths = series.rate(recording.samples, series.PROMPT_TOKENS, by="path")
    if found is None and not paths:
        return not_measured(title, "no answer said what was cached, and no samples were taken.")

    def draw(figure: Figure) -> None:
        top, bottom = panels(figure, 2)
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
            _paths(bottom, paths)
            legend(bottom, columns=3)
        else:
            _say(bottom, "no samples of the server")
        bottom.set_ylabel("prompt tokens/s")
        bottom.set_ylim(bottom=0.0)
        count_axis(bottom.yaxis)
        time_axis(bottom, end_s(records))

    caption = (
        f"Above: of the prompts sent in each {duration(bins.width_s)}, the share of tokens that "
        "was not computed but cached; an unlimited cache is a cache of full blocks that evicts "
        "nothing. Below: prompt tokens per second by how their KVCache came: computed, from the "
        "worker's own storage node (local) or from another one (fetched), from the server's "
        "counters."
    )
    alt = "not said by the answers"
    if found is not None:
        told = [r for r in records if r.cached_tokens is not None and r.outcome == "completed"]
        cached = sum(r.cached_tokens or 0 for r in told)
        alt = f"{cached:,} of {sum(r.prompt_tokens for r in told):,} prompt tokens were cached"
    return drawn(title, caption, f"Hit rate: {alt}.", draw, TWO_PANELS_IN)


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
