"""Requests that were rejected, by reason."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from loadtest.report.pictures.style import OUTCOMES, Picture, count_axis, drawn, label

REASONS_MAX = 8


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
