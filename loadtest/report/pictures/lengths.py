"""How requests ended, by the length of their prompt; and rejections by their reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
)
from loadtest.results.lengths import LengthBucket, span_names

Buckets = Sequence[LengthBucket]
NO_REQUEST = "no request was sent."
NO_LEVEL = "no service level was given (--slo-ttft-s, --slo-tbt-s), so nothing is in time or late."
OF_LENGTH = "prompt tokens, from"
REASONS_MAX = 8


def goodput(buckets: Buckets) -> Picture:
    title = "Goodput by prompt length"
    if not buckets:
        return not_measured(title, NO_REQUEST)
    if buckets[0].within is None:
        return not_measured(title, NO_LEVEL)
    lines = (
        ("TTFT in time", [b.share(b.first_in_time) for b in buckets], NAMED["blue"], "^"),
        ("TBT in time", [b.share(b.fluent) for b in buckets], NAMED["orange"], "v"),
    )
    both = [b.share(b.within) for b in buckets]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        heights = [np.nan if share is None else share for share in both]
        axes.bar(range(len(buckets)), heights, 0.8, color=NAMED["green"], label="both")
        for at, share in enumerate(both):
            if share is not None:
                _above(axes, f"{share:.0%}", at, share)
        for name, shares, colour, marker in lines:
            points = [np.nan if share is None else share for share in shares]
            look = {"markersize": 6, "clip_on": False, "markeredgewidth": 0}
            axes.plot(range(len(buckets)), points, marker, color=colour, label=name, **look)
        _lengths_axis(axes, [b.name for b in buckets])
        percent_axis(axes)
        axes.set_ylim(0.0, 1.1)
        axes.set_ylabel("share of those sent")
        legend(axes, columns=3)

    caption = (
        "Of all requests sent with prompts of this length: answered with TTFT within its limit, "
        "with TBT within its limit, and with both. Rejected and failed ones are within none."
    )
    words = (
        f"from {b.name} tokens: {share:.1%} of {b.requests:,}"
        for b, share in zip(buckets, both, strict=True)
        if share is not None
    )
    return drawn(title, caption, f"Within both limits, {'; '.join(words)}.", draw)


def goodput_of_runs(runs: Mapping[str, Buckets]) -> Picture:
    """The share within both limits of several runs, one line each; their buckets may differ."""
    title = "Goodput by prompt length"
    lines = {
        name: {b.span: share for b in buckets if (share := b.share(b.within)) is not None}
        for name, buckets in runs.items()
    }
    lines = {name: line for name, line in lines.items() if line}
    if not lines:
        return not_measured(title, NO_LEVEL if any(runs.values()) else NO_REQUEST)
    names = span_names(b for buckets in runs.values() for b in buckets)
    places = {span: at for at, span in enumerate(names)}
    left_out = len(lines) - len(MANY)
    shown = dict(list(lines.items())[: len(MANY)])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for (name, line), colour in zip(shown.items(), MANY, strict=False):
            at = [places[span] for span in line]
            axes.plot(at, list(line.values()), "o-", color=colour, label=label(name), markersize=4)
        _lengths_axis(axes, list(names.values()))
        axes.set_xlim(-0.5, len(places) - 0.5)
        percent_axis(axes)
        axes.set_ylabel("within both limits")
        legend(axes, columns=4)

    caption = "Of all requests sent with prompts of this length, the share within both limits."
    if left_out > 0:
        caption += f" {left_out} more runs are left out; the table has them."
    words = (
        f"{name}: " + ", ".join(f"from {names[span]} {share:.1%}" for span, share in line.items())
        for name, line in shown.items()
    )
    return drawn(title, caption, f"{'; '.join(words)}.", draw)


def outcomes(buckets: Buckets) -> Picture:
    title = "Outcomes by prompt length"
    if not buckets:
        return not_measured(title, NO_REQUEST)
    counts = {
        name: np.array([getattr(b, name) for b in buckets])
        for name in ("answered", "rejected", "failed")
    }
    totals = sum(counts.values())
    rejected = counts["rejected"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        below = np.zeros(len(buckets))
        for name, heights in counts.items():
            if heights.any():
                axes.bar(range(len(buckets)), heights, 0.8, below, color=OUTCOMES[name], label=name)
                below = below + heights
        for place, (total, refused) in enumerate(zip(totals, rejected, strict=True)):
            if total and rejected.any():
                _above(axes, f"{refused / total:.0%}", place, total)
        _lengths_axis(axes, [b.name for b in buckets])
        axes.margins(y=0.1)
        count_axis(axes.yaxis)
        axes.set_ylabel("requests")
        legend(axes, columns=3)

    caption = (
        "Requests by the length of their prompt and by how they ended; each bar begins at the "
        "number below it and ends where the next begins."
    )
    if rejected.any():
        caption += " Above each bar: the share that was rejected."
    alt = "; ".join(
        f"from {b.name} tokens: {total:,}, rejected {b.rejected:,}"
        for b, total in zip(buckets, totals, strict=True)
    )
    return drawn(title, caption, f"{alt}.", draw)


def _above(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(0, 3), ha="center", textcoords="offset points", fontsize=8)


def _lengths_axis(axes: Axes, names: Sequence[str]) -> None:
    is_span = any(" to " in name for name in names)
    axes.set_xticks(range(len(names)), names, rotation=90 if is_span else 0)
    axes.tick_params(axis="x", length=0, labelsize=8)
    axes.grid(False, axis="x")
    axes.set_xlabel(OF_LENGTH)


def by_reason(rejections: Mapping[str, int], requests: int) -> Picture:
    title = "Rejections by reason"
    if not rejections:
        return Picture(title, "", missing=f"None of {requests:,} requests was rejected.")
    shown = list(rejections.items())[:REASONS_MAX]
    if (rest := sum(rejections.values()) - sum(count for _, count in shown)) > 0:
        shown.append((f"{len(rejections) - len(shown)} other reasons", rest))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        bars = axes.barh(
            range(len(shown)), [count for _, count in shown], 0.6, color=OUTCOMES["rejected"]
        )
        axes.bar_label(bars, [f"{count:,}" for _, count in shown], padding=4)
        axes.set_yticks(range(len(shown)), [label(name) for name, _ in shown])
        axes.set_ylim(max(len(shown), 3) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.margins(x=0.1)
        count_axis(axes.xaxis)
        axes.set_xlabel("requests")

    caption = (
        f"{sum(rejections.values()):,} of {requests:,} requests were rejected by the conductor: "
        "it chose not to serve them and sent a time to retry after."
    )
    alt = "; ".join(f"{name}: {count:,}" for name, count in shown)
    return drawn(title, caption, f"Rejections: {alt}.", draw, 1.0 + 0.35 * max(len(shown), 3))
