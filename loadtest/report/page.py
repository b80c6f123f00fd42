"""A run as one HTML file: what people look at, with the recording inside for `mooncake report`.

Nothing is loaded from anywhere and no script runs; the page itself forbids it, because it shows
messages and names that came from a server.

Not here: the pictures (pictures/), what the numbers mean (loadtest/metrics.py), two runs on one
page (comparison_page.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from loadtest.recording import Recording, RecordingError, from_bytes, to_bytes

EMBEDDED = re.compile(
    rb'<script type="application/x-mooncake-recording">\s*([A-Za-z0-9+/=]+)\s*</script>'
)


def write_report(recording: Recording, path: Path) -> None:
    template = environment().get_template("report.html")
    html = template.render(recording=recording, embedded=to_bytes(recording).decode())
    path.write_text(html, encoding="utf-8")


def read_report(path: Path) -> Recording:
    """Raises RecordingError with the path and the reason."""
    try:
        page = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from None
    found = EMBEDDED.findall(page)
    if not found:
        raise RecordingError(f"{path}: no report of a run: it holds no recording")
    try:
        return from_bytes(found[-1])  # the page ends with it; whatever came before is text
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None


def environment() -> Environment:
    return Environment(
        loader=PackageLoader("loadtest.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
