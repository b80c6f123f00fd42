"""The conductor's predicted TTFT against what became of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from loadtest.report.phases import predicted_ttft_s
from loadtest.report.pictures.style import NAMED, Picture, drawn, not_measured, seconds_scale
from loadtest.results.metrics import COMPLETED, RequestRecord

POINTS_MAX = 2_000
FACTOR = 2.0


def ttft(records: Sequence[RequestRecord]) -> Picture:
    title = "Predicted and actual TTFT"
    pairs = np.array(
        [
            (predicted_s, record.ttft_s)
            for record in records
            if record.outcome == COMPLETED
            and record.ttft_s
            and (predicted_s := predicted_ttft_s(record))
        ]
    )
    if not len(pairs):
        return not_measured(title, "no answered request has a decision with a predicted TTFT.")
    ratios = pairs[:, 1] / pairs[:, 0]
    within = float(np.mean((ratios <= FACTOR) & (ratios >= 1 / FACTOR)))
    shown = pairs[np.unique(np.linspace(0, len(pairs) - 1, POINTS_MAX).astype(int))]
    low_s, high_s = float(pairs.min()) / 1.4, float(pairs.max()) * 1.4

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for which in ("x", "y"):
            seconds_scale(axes, which, low_s, high_s)
        ends = np.array([low_s, high_s])
        axes.fill_between(
            ends, ends / FACTOR, ends * FACTOR, color=NAMED["pale"], alpha=0.35, lw=0,
            label="within a factor of 2",
        )  # fmt: skip
        axes.plot(ends, ends, color=NAMED["slate"], linewidth=1.0, label="as predicted")
        axes.plot(
            shown[:, 0], shown[:, 1], "o", color=NAMED["blue"], markersize=3.5, alpha=0.55,
            markeredgewidth=0,
        )  # fmt: skip
        axes.set_xlabel("predicted by the conductor")
        axes.set_ylabel("actual, at the client")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)

    median = float(np.median(ratios))
    facts = (
        f"{len(pairs):,} requests; the median actual TTFT is {median:.2f} times the predicted "
        f"one, {within:.0%} lie within a factor of 2"
    )
    caption = (
        f"One point per request, both axes logarithmic. {facts}. The prediction ends at the "
        "server; the client also waits for Triton and the network."
    )
    if len(shown) < len(pairs):
        caption += f" {len(shown):,} of the points are drawn, evenly picked."
    return drawn(title, caption, f"{facts}.", draw, 4.2)
