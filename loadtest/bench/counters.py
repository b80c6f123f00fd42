"""Reads counters from a Prometheus page, such as Triton's metrics port serves.

Only what benchmarks need: the sum of the series of one name whose labels match.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping

SERIES = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
FETCH_S_MAX = 5.0


def counter_sum(page: str, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """The sum over all series of `name` that carry `labels`; None when there is none."""
    total: float | None = None
    for line in page.splitlines():
        series = SERIES.match(line)
        if not series or series[1] != name:
            continue
        found = dict(LABEL.findall(series[2] or ""))
        if all(found.get(label) == value for label, value in (labels or {}).items()):
            total = (total or 0.0) + float(series[3])
    return total


def fetch_page(metrics_url: str) -> str:
    with urllib.request.urlopen(metrics_url, timeout=FETCH_S_MAX) as answer:
        return str(answer.read().decode())
