"""The recording inside a run's page, read back. Draws nothing, so that it does not wait to draw.

Not here: writing the page (page.py), the recording's own format (loadtest/results/recording.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from loadtest.results.recording import Recording, RecordingError, from_bytes

EMBEDDED = re.compile(
    rb'<script type="application/x-mooncake-recording">\s*([A-Za-z0-9+/=]+)\s*</script>'
)


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
