"""Where the time of requests went, phase by phase (report/phases.py), as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report.phases import Phases, by_ttft, mean_of
from loadtest.report.pictures.style import (
    NAMED,
    PHASES,
    Picture,
    drawn,
    duration_axis,
    label,
    not_measured,
)
from loadtest.results.tables import duration

NO_DECISION = "no answered request says where its time went (a decision has to be asked for)."
BARS_IN, BAR_IN = 1.35, 0.42


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
        f"Mean over all {len(found):,} requests whose decision says it, and over the requests "
        "around the median, the 90th and the 99th percentile of the whole time (from sending to "
        "the last token; the nearest twentieth of all requests). Hand-over: the KVCache into the "
        "store, waiting at the decode worker, and into its engine; decode: from the first token "
        "to the last, without the hand-over.",
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
            axes.annotate(
                duration(total_s), (total_s, place), xytext=(5, 0), textcoords="offset points",
                va="center", fontsize=8.5,
            )  # fmt: skip
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
