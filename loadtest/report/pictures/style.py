"""The common look of all pictures: colours, sizes, and a figure as SVG that fits into the page.

The colours are those of Okabe and Ito, which colour-blind people can distinguish. In the SVG each
becomes a variable of the page (`var(--blue)`), so the page can lighten it in dark mode. Text stays
text: it can be searched, and takes the page's font.

No global state: no pyplot; figures are plain objects, and settings apply to one figure.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from loadtest.results.tables import duration

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
WIDTH_IN = 6.4
COLOURS = {
    "#1b1f24": "ink",
    "#5b6470": "muted",
    "#dfe3e8": "grid",
    "#0072b2": "blue",
    "#e69f00": "orange",
    "#009e73": "green",
    "#cc79a7": "pink",
    "#56b4e9": "sky",
    "#d55e00": "vermilion",
    "#4d5662": "slate",
    "#c4cad2": "pale",
}
NAMED = {name: colour for colour, name in COLOURS.items()}
MANY = [NAMED[n] for n in ("blue", "orange", "green", "pink", "sky", "vermilion", "slate")]
OUTCOMES = {
    "sent": NAMED["slate"],
    "answered": NAMED["green"],
    "rejected": NAMED["orange"],
    "failed": NAMED["vermilion"],
}
PHASES = {
    "queue": NAMED["slate"],
    "transfer": NAMED["sky"],
    "prefill": NAMED["blue"],
    "hand-over": NAMED["orange"],
    "decode": NAMED["pink"],
    "elsewhere": NAMED["pale"],
}
DASHED = (0, (4, 3))
LABEL_CHARACTERS_MAX = 24
STEPS = (1, 2, 2.5, 5, 10)  # of ticks on linear axes

SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mooncake",  # equal runs give equal pages
    "text.parse_math": False,  # a `$` in a name is a `$`
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": NAMED["ink"],
    "axes.labelcolor": NAMED["muted"],
    "axes.edgecolor": NAMED["muted"],
    "xtick.color": NAMED["muted"],
    "ytick.color": NAMED["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": NAMED["grid"],
    "grid.linewidth": 0.7,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.0,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure of the page: an SVG, or why there is none."""

    title: str
    caption: str  # what the figure shows, with units
    svg: str = ""
    missing: str = ""


def not_measured(title: str, why: str) -> Picture:
    return Picture(title, caption="", missing=f"Not measured: {why}")


def drawn(
    title: str, caption: str, alt: str, draw: Callable[[Figure], None], height_in: float = 3.1
) -> Picture:
    """The picture that `draw` makes; `alt` describes it in words."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        # The layout is computed once here; savefig would draw everything twice.
        figure.get_layout_engine().execute(figure)
        figure.set_layout_engine(None)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return Picture(title, caption, svg=inline(text.getvalue(), alt))


def inline(svg: str, alt: str) -> str:
    """SVG for use inside HTML: no prolog, unique ids, the page's colours."""
    root = ElementTree.fromstring(svg)
    for element in list(root.iter()):
        # HTML has svg elements without namespaces
        element.tag = element.tag.removeprefix(f"{{{SVG}}}")
        for child in list(element):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                element.remove(child)  # a style would apply to the whole page
        if element.tag == "g":
            element.attrib.pop("id", None)
        if (target := element.attrib.pop(f"{{{XLINK}}}href", None)) is not None:
            element.set("href", target)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", alt)
    text = ElementTree.tostring(root, encoding="unicode")
    return re.sub(
        "#[0-9a-f]{6}",
        lambda found: f"var(--{COLOURS[found[0]]})" if found[0] in COLOURS else found[0],
        text,
    )


def label(text: str, characters_max: int = LABEL_CHARACTERS_MAX) -> str:
    """An external name, fit for a picture: short, printable, never empty."""
    clean = "".join(char if char.isascii() and char.isprintable() else "?" for char in text)
    if len(clean) > characters_max:
        clean = clean[: characters_max - 3] + "..."
    return clean.lstrip("_") or "unnamed"  # matplotlib hides labels that begin with "_"


def legend(axes: Axes, columns: int) -> None:
    """Place the legend above the axes, where nothing is drawn."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.02), ncols=columns)


def seconds_scale(axes: Axes, which: str, low_s: float, high_s: float) -> None:
    """A logarithmic axis of times with readable ticks: 10 ms, 100 ms, 1 s."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(low_s, high_s)
    decades = high_s / low_s
    subs = (1.0,) if decades > 1_000 else (1.0, 3.0) if decades > 100 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def percent_axis(axes: Axes, peak: float = 1.0) -> None:
    """From 0 to 100 %, so that pictures of shares can be compared at a glance."""
    axes.set_ylim(0.0, 1.04 * max(1.0, peak))
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if peak <= 1.1 else [0.0, 0.5, 1.0, 1.5, 2.0]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def count_axis(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1, steps=STEPS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def duration_axis(axis: Axis) -> None:
    """Times on a linear axis that begins at 0."""
    axis.set_major_locator(MaxNLocator(nbins=6, steps=STEPS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: duration(value) if value else "0"))


def time_axis(axes: Axes, end_s: float) -> None:
    """The time of the run in seconds, or for a long run in minutes or hours."""
    units = (("hours", 3_600), ("minutes", 60), ("seconds", 1))
    unit, unit_s = next(one for one in units if end_s >= 3 * one[1] or one[1] == 1)
    axes.set_xlim(0.0, max(end_s, 1e-3))
    steps = MaxNLocator(nbins=8, steps=STEPS).tick_values(0.0, max(end_s, 1e-3) / unit_s)
    axes.xaxis.set_major_locator(FixedLocator([step * unit_s for step in steps]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit_s:g}"))
    axes.set_xlabel(f"{unit} since the run began")
