"""How TTFT and TBT are distributed over requests, as cumulative shares on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report.pictures.style import (
    MANY,
    NAMED,
    Picture,
    drawn,
    label,
    legend,
    not_measured,
    percent_axis,
    seconds_scale,
)
from loadtest.results.metrics import spread
from loadtest.results.tables import duration

POINTS_MAX = 400
CURVES_MAX = len(MANY)
FLOOR_S = 1e-6  # a logarithm needs more than zero


def distribution(
    title: str, what: str, values_s: Mapping[str, Sequence[float]], slo_s: float | None = None
) -> Picture:
    """One curve for each name in `values_s`; with a single one its percentiles are marked."""
    curves = {name: np.sort(values) for name, values in values_s.items() if len(values)}
    if not curves:
        return not_measured(title, f"no answered request has a {title}.")
    left_out = max(0, len(curves) - CURVES_MAX)
    by_count = sorted(curves, key=lambda name: -len(curves[name]))[:CURVES_MAX]
    curves = {name: curves[name] for name in curves if name in by_count}
    everything = np.concatenate(list(curves.values()))
    positive = everything[everything > 0]
    low_s = max(FLOOR_S, float(positive.min()) if len(positive) else FLOOR_S)
    high_s = max(low_s, float(everything.max()), slo_s or 0.0)
    zeros = int(len(everything) - len(positive))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        seconds_scale(axes, "x", low_s / 1.3, high_s * 1.6)
        percent_axis(axes)
        axes.set_xlabel(f"{title} (logarithmic)")
        axes.set_ylabel("share of answered requests")
        for (name, values), colour in zip(curves.items(), MANY, strict=False):
            text = legend_text(name, values, slo_s) if len(curves) > 1 else "_"
            _curve(axes, np.maximum(values, low_s / 1.3), colour, text)
        if len(curves) == 1:
            _marks(axes, everything, low_s / 1.3)
        if slo_s is not None:
            _level(axes, slo_s, everything if len(curves) == 1 else None)
        legend(axes, columns=1 if len(curves) > 1 else 4)

    caption = (
        f"{what} Each point of the curve: this share of the answered requests had a {title} of at "
        "most this."
    )
    if slo_s is not None:
        caption += f" Dashed: the service level of {duration(slo_s)}."
    if zeros:
        caption += f" {zeros:,} at 0 (tokens in one message) are drawn at the left edge."
    if left_out:
        caption += f" {left_out} more with fewer requests are left out."
    words = (in_words(name, values, slo_s) for name, values in curves.items())
    alt = f"{title}: {'; '.join(words)}."
    return drawn(title, caption, alt, draw, height_in(len(curves)))


def height_in(curves: int) -> float:
    """The legend of several curves is above them, a line for each."""
    return 3.1 if curves == 1 else 3.1 + 0.19 * curves


def in_words(name: str, values: np.ndarray, slo_s: float | None) -> str:
    found = spread(values.tolist())
    assert found is not None
    percentiles = ((50, found.p50), (90, found.p90), (99, found.p99))
    text = ", ".join(f"p{number} {duration(value)}" for number, value in percentiles)
    if slo_s is not None:
        text += f", {np.mean(values <= slo_s):.1%} within {duration(slo_s)}"
    return f"{name} ({len(values):,}): {text}" if name else text


def legend_text(name: str, values: np.ndarray, slo_s: float | None) -> str:
    """Of one curve of several, short: a table near the picture has the other percentiles."""
    text = f"{label(name)}: p90 {duration(float(np.percentile(values, 90)))}"
    if slo_s is not None:
        text += f", {np.mean(values <= slo_s):.1%} within {duration(slo_s)}"
    return text


def _curve(axes: Axes, values: np.ndarray, colour: str, name: str) -> None:
    """Exact steps, or of many requests as many points as can be seen."""
    shares = np.arange(1, len(values) + 1) / len(values)
    if len(values) > POINTS_MAX:
        kept = np.unique(np.linspace(0, len(values) - 1, POINTS_MAX).astype(int))
        values, shares = values[kept], shares[kept]
    axes.step(
        np.concatenate([values[:1], values]),
        np.concatenate([[0.0], shares]),
        where="post", color=colour, label=name, solid_joinstyle="round",
    )  # fmt: skip


def _marks(axes: Axes, values: np.ndarray, floor_s: float) -> None:
    """The percentiles as points of the curve; their values stand in the legend, never on it."""
    for number, marker in ((50, "o"), (90, "s"), (99, "^")):
        value = float(np.percentile(values, number))
        axes.plot(
            [max(value, floor_s)], [number / 100], marker, color=NAMED["blue"], markersize=6,
            label=f"p{number} {duration(value)}", clip_on=False,
        )  # fmt: skip


def _level(axes: Axes, slo_s: float, values: np.ndarray | None) -> None:
    """Of several curves each says itself how much of it is within."""
    within = "" if values is None else f": {np.mean(values <= slo_s):.1%} within"
    axes.axvline(
        slo_s, color=NAMED["vermilion"], linestyle=(0, (4, 3)), linewidth=1.3,
        label=f"level {duration(slo_s)}{within}",
    )  # fmt: skip
