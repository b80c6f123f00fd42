"""How long requests took: TTFT and TBT over requests, as predicted, and phase by phase.

Distributions are cumulative shares on a logarithmic axis; the phases (results/phases.py) are
stacked bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report.pictures.style import (
    DASHED,
    MANY,
    NAMED,
    PHASES,
    Picture,
    drawn,
    duration_axis,
    label,
    legend,
    not_measured,
    percent_axis,
    seconds_scale,
)
from loadtest.results.metrics import COMPLETED, RequestRecord, spread
from loadtest.results.phases import Phases, by_ttft, mean_of, predicted_ttft_s
from loadtest.results.tables import duration

POINTS_MAX = 400  # most points of a curve
PAIRS_MAX = 2_000  # most pairs of predicted and actual
FACTOR = 2.0
CURVES_MAX = len(MANY)
FLOOR_S = 1e-6  # a logarithm needs more than zero
NO_DECISION = "no answered request reports where its time went (a decision has to be asked for)."
BARS_IN, BAR_IN = 1.35, 0.42


def distribution(
    title: str, what: str, values_s: Mapping[str, Sequence[float]], slo_s: float | None = None
) -> Picture:
    """One curve for each name in `values_s`; a single curve has its percentiles marked."""
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
    words = (_percentiles(name, values, slo_s) for name, values in curves.items())
    alt = f"{title}: {'; '.join(words)}."
    height_in = 3.1 if len(curves) == 1 else 3.1 + 0.19 * len(curves)  # a legend line for each
    return drawn(title, caption, alt, draw, height_in)


def _percentiles(name: str, values: np.ndarray, slo_s: float | None) -> str:
    found = spread(values.tolist())
    assert found is not None
    percentiles = ((50, found.p50), (90, found.p90), (99, found.p99))
    text = ", ".join(f"p{number} {duration(value)}" for number, value in percentiles)
    if slo_s is not None:
        text += f", {np.mean(values <= slo_s):.1%} within {duration(slo_s)}"
    return f"{name} ({len(values):,}): {text}" if name else text


def legend_text(name: str, values: np.ndarray, slo_s: float | None) -> str:
    """Short, because a table near the picture has the other percentiles."""
    text = f"{label(name)}: p90 {duration(float(np.percentile(values, 90)))}"
    if slo_s is not None:
        text += f", {np.mean(values <= slo_s):.1%} within {duration(slo_s)}"
    return text


def _curve(axes: Axes, values: np.ndarray, colour: str, name: str) -> None:
    """Exact steps, or as many points as can be seen when there are many requests."""
    shares = np.arange(1, len(values) + 1) / len(values)
    if len(values) > POINTS_MAX:
        kept = np.unique(np.linspace(0, len(values) - 1, POINTS_MAX).astype(int))
        values, shares = values[kept], shares[kept]
    values, shares = np.concatenate([values[:1], values]), np.concatenate([[0.0], shares])
    axes.step(values, shares, where="post", color=colour, label=name, solid_joinstyle="round")


def _marks(axes: Axes, values: np.ndarray, floor_s: float) -> None:
    for number, marker in ((50, "o"), (90, "s"), (99, "^")):
        value = float(np.percentile(values, number))
        axes.plot(
            [max(value, floor_s)],
            [number / 100],
            marker,
            color=NAMED["blue"],
            markersize=6,
            label=f"p{number} {duration(value)}",
            clip_on=False,
        )


def _level(axes: Axes, slo_s: float, values: np.ndarray | None) -> None:
    """The service level; with several curves each legend text has its share within the level."""
    within = "" if values is None else f": {np.mean(values <= slo_s):.1%} within"
    text = f"level {duration(slo_s)}{within}"
    axes.axvline(slo_s, color=NAMED["vermilion"], linestyle=DASHED, linewidth=1.3, label=text)


def prediction(records: Sequence[RequestRecord]) -> Picture:
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
    shown = pairs[np.unique(np.linspace(0, len(pairs) - 1, PAIRS_MAX).astype(int))]
    low_s, high_s = float(pairs.min()) / 1.4, float(pairs.max()) * 1.4

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for which in ("x", "y"):
            seconds_scale(axes, which, low_s, high_s)
        ends = np.array([low_s, high_s])
        area = {"color": NAMED["pale"], "alpha": 0.35, "lw": 0, "label": "within a factor of 2"}
        axes.fill_between(ends, ends / FACTOR, ends * FACTOR, **area)
        axes.plot(ends, ends, color=NAMED["slate"], linewidth=1.0, label="as predicted")
        axes.plot(*shown.T, "o", color=NAMED["blue"], markersize=3.5, alpha=0.55, markeredgewidth=0)
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


def first_token(found: Sequence[Phases]) -> Picture:
    title = "Where the time to the first token went"
    if not found:
        return not_measured(title, NO_DECISION)
    groups = by_ttft(found)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        stacked(axes, [group.phases_s for group in groups], is_vertical=True)
        axes.set_xticks(range(len(groups)), [duration(group.ttft_s) for group in groups])
        axes.tick_params(axis="x", labelsize=8, length=0)
        axes.set_xlabel("median TTFT of each group, from the fastest requests to the slowest")
        axes.set_ylabel("mean time per request")
        duration_axis(axes.yaxis)
        handles(figure, axes)

    many = f"{len(found):,} requests in {len(groups)} groups of equal size"
    caption = (
        f"{many}, ordered by TTFT. Queue: waiting at the prefill worker; transfer: the cached "
        "prefix into its engine; prefill: computing the rest; elsewhere: conductor, Triton, "
        "network and client."
    )
    worst = groups[-1]
    alt = f"{many}; of the slowest group: {in_words(worst.phases_s)}."
    return drawn(title, caption, alt, draw, 3.6)


def whole_request(found: Sequence[Phases]) -> Picture:
    title = "Where the whole time went"
    if not found:
        return not_measured(title, NO_DECISION)
    bars = {"all requests": mean_of([phases.all for phases in found])}
    ordered = sorted(found, key=lambda phases: phases.latency_s)
    for percent in (50, 90, 99):
        near = around(ordered, percent)
        bars[f"around p{percent}"] = mean_of([phases.all for phases in near])
    return compared(
        title,
        bars,
        f"Mean over all {len(found):,} requests whose decision has these times, and over the "
        "requests around the median, the 90th and the 99th percentile of the whole time (from "
        "sending to the last token; the nearest twentieth of all requests). Hand-over: the KVCache "
        "into the store, waiting at the decode worker, and into its engine; decode: from the "
        "first token to the last, without the hand-over.",
    )


def compared(title: str, bars: Mapping[str, Mapping[str, float]], caption: str) -> Picture:
    """One horizontal bar for each name in `bars`, from top to bottom."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        stacked(axes, list(bars.values()), is_vertical=False)
        axes.set_yticks(range(len(bars)), [label(name) for name in bars])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlabel("mean time per request")
        duration_axis(axes.xaxis)
        for place, phases_s in enumerate(bars.values()):
            total_s = sum(phases_s.values())
            text, beside = duration(total_s), {"xytext": (5, 0), "textcoords": "offset points"}
            axes.annotate(text, (total_s, place), **beside, va="center", fontsize=8.5)
        axes.set_xlim(0.0, 1.12 * max(sum(bar.values()) for bar in bars.values()) or 1.0)
        handles(figure, axes)

    alt = "; ".join(f"{name}: {in_words(phases_s)}" for name, phases_s in bars.items())
    return drawn(title, caption, f"{alt}.", draw, max(3.6, BARS_IN + BAR_IN * len(bars)))


def around(ordered: Sequence[Phases], percent: int) -> Sequence[Phases]:
    """The requests nearest to a percentile: a twentieth of all, and at least one."""
    middle = round((len(ordered) - 1) * percent / 100)
    half = len(ordered) // 40
    return ordered[max(0, middle - half) : middle + half + 1]


def stacked(axes: Axes, bars: Sequence[Mapping[str, float]], is_vertical: bool) -> None:
    places = range(len(bars))
    below = [0.0] * len(bars)
    for phase in [name for name in PHASES if name in bars[0]]:
        sizes = [bar[phase] for bar in bars]
        draw = axes.bar if is_vertical else axes.barh
        along = {"bottom": below} if is_vertical else {"left": below}
        draw(places, sizes, 0.72, color=PHASES[phase], label=phase, **along)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.grid(False, axis="x" if is_vertical else "y")
    axes.spines["left" if is_vertical else "bottom"].set_color(NAMED["grid"])


def handles(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=len(PHASES))


def in_words(phases_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {duration(value)}" for name, value in phases_s.items())
