"""Requests that were not served: rejections by reason, and how outcomes depend on prompt length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from loadtest.report.pictures.style import (
    OUTCOMES,
    Picture,
    count_axis,
    drawn,
    label,
    legend,
    not_measured,
)
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord

REASONS_MAX = 8
LENGTH_BINS_MAX = 13
NAMES = {"answered": COMPLETED, "rejected": REJECTED, "failed": FAILED}


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
        "it chose not to serve them and said when to come again."
    )
    alt = "; ".join(f"{name}: {count:,}" for name, count in shown)
    return drawn(title, caption, f"Rejections: {alt}.", draw, 1.0 + 0.35 * max(len(shown), 3))


def by_prompt_length(records: Sequence[RequestRecord]) -> Picture:
    title = "Outcomes by prompt length"
    if not records:
        return not_measured(title, "no request was sent.")
    edges = length_edges([record.prompt_tokens for record in records])
    counts = {
        name: np.histogram([r.prompt_tokens for r in records if r.outcome == outcome], edges)[0]
        for name, outcome in NAMES.items()
    }
    totals = sum(counts.values())
    rejected = counts["rejected"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        below = np.zeros(len(totals))
        for name, heights in counts.items():
            if heights.any():
                axes.bar(range(len(totals)), heights, 0.8, below, color=OUTCOMES[name], label=name)
                below = below + heights
        for place, (total, refused) in enumerate(zip(totals, rejected, strict=True)):
            if total and rejected.any():
                axes.annotate(
                    f"{refused / total:.0%}", (place, total), xytext=(0, 3), ha="center",
                    textcoords="offset points", fontsize=8,
                )  # fmt: skip
        axes.set_xticks(range(len(totals)), names_of(edges))
        axes.tick_params(axis="x", length=0, labelsize=8)
        axes.grid(False, axis="x")
        axes.margins(y=0.1)
        count_axis(axes.yaxis)
        axes.set_xlabel("prompt tokens, from")
        axes.set_ylabel("requests")
        legend(axes, columns=3)

    caption = (
        "Requests by the length of their prompt and by how they ended; each bar begins at the "
    )
    caption += "number below it and ends where the next begins."
    if rejected.any():
        caption += " Above each bar: the share that was rejected."
    alt = "; ".join(
        f"from {name} tokens: {total:,}, rejected {refused:,}"
        for name, total, refused in zip(names_of(edges), totals, rejected, strict=True)
    )
    return drawn(title, caption, f"{alt}.", draw)


def length_edges(lengths: Sequence[int]) -> list[int]:
    """Powers of two around all lengths; wider steps when they would be too many."""
    low, high = max(1, min(lengths)), max(1, *lengths)
    first, last = int(math.log2(low)), int(math.log2(high)) + 1
    step = math.ceil((last - first) / LENGTH_BINS_MAX)
    edges = [2**power for power in range(first, last, step)]
    edges.append(2 ** (first + step * len(edges)))
    if min(lengths) < 1:  # a request that names no prompt length
        edges[0] = min(lengths)
    return edges


def names_of(edges: Sequence[int]) -> list[str]:
    return [
        f"{edge / 1024:g}K" if edge >= 1024 and edge % 1024 == 0 else f"{edge:,}"
        for edge in edges[:-1]
    ]
