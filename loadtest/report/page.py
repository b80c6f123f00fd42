"""A run as one HTML file: what people look at, with the recording inside for `mooncake report`.

Nothing is loaded from anywhere and no script runs; the page itself forbids it, because it shows
messages and names that came from a server.

Not here: what stands on the page (contents.py), reading it back (embedded.py), two runs on one
page (comparison.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadtest.report import rows
from loadtest.report.contents import notes, sections
from loadtest.report.embedded import read_report
from loadtest.report.numbers import summary_of
from loadtest.results.recording import Recording, goodput_of, to_bytes
from loadtest.results.tables import duration, lag_s, slo_text, warnings

# Control characters in a message: no browser shows them, and some make a page no HTML.
UNPRINTABLE = dict.fromkeys([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0)])

__all__ = ["page_of", "read_report", "rendered", "write_report"]


def write_report(recording: Recording, path: Path) -> None:
    """The page of one run; OSError when `path` cannot be written.

    First without a picture: should drawing fail, a long run is not lost with it.
    """
    embedded = to_bytes(recording).decode()
    bare = rendered("bare.html", run=recording, embedded=embedded)
    path.write_text(bare, encoding="utf-8")
    path.write_text(page_of(recording, embedded), encoding="utf-8")


def page_of(recording: Recording, embedded: str) -> str:
    summary = summary_of(recording)
    return rendered(
        "report.html",
        run=recording,
        summary=summary,
        lag_s=lag_s(summary),
        rejected=sum(summary.rejections_by_reason.values()),
        failed=sum(summary.errors_by_kind.values()),
        goodput=goodput_of(recording),
        slo=slo_text(recording.slo),
        notes=[*notes(recording), *warnings(summary)],
        sections=sections(recording),
        settings=rows.settings_of(recording),
        workloads=rows.workloads(recording),
        refusals=rows.refusals(recording.requests),
        slowest=rows.slowest(recording.requests),
        embedded=embedded,
    )


def rendered(template: str, **values: Any) -> str:
    """Everything but pictures is escaped."""
    environment = Environment(
        loader=PackageLoader("loadtest.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": lambda seconds: "–" if seconds is None else duration(seconds),
        "count": lambda number: "–" if number is None else f"{number:,}",
        "share": lambda number: "–" if number is None else f"{number:.1%}",
        "rate": lambda number: f"{number:,.0f}" if number >= 1_000 else f"{number:.3g}",
        "setting": rows.setting_text,
        "svg": Markup,
    }
    return environment.get_template(template).render(**values).translate(UNPRINTABLE)
