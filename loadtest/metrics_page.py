"""Reads the Prometheus page of a server, such as Triton's metrics port serves.

The text is parsed by `prometheus_client`; here is what a load test wants of it. Comment lines are
left out before parsing: with its `# TYPE` line a counter would come back under another name
(`nv_inference_count` as `nv_inference_count_total`), and a recording holds names as they stand.

Not here: reading it again and again (sampler.py), rates from counters (report/series.py).
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Series

FETCH_S_MAX = 5.0


def fetch_page(metrics_url: str) -> str:
    """Raises OSError when it cannot be had, ValueError when the address or the text is no such."""
    with urllib.request.urlopen(metrics_url, timeout=FETCH_S_MAX) as answer:
        return str(answer.read().decode())


def series_of(lines: Iterable[str]) -> Iterator[Series]:
    """Name, labels and value of each line that is no comment; ValueError for a line that is none.

    Each line is parsed alone: two lines of one name and other ones between are no error.
    """
    for line in lines:
        if line.strip() and not line.startswith("#"):
            for family in text_string_to_metric_families(line):
                yield from family.samples


def series_key(series: Series) -> str:
    """As it stands on the page, without the value: `mooncake_pages_used{model="prefill_0"}`."""
    if not series.labels:
        return series.name
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in series.labels.items())
    return f"{series.name}{{{labels}}}"


def counter_sum(page: str, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """The sum over all series of `name` that carry `labels`; None when there is none."""
    wanted = (labels or {}).items()
    lines = (line for line in page.splitlines() if line.startswith(name))
    found = [
        series.value
        for series in series_of(lines)
        if series.name == name and all(series.labels.get(k) == value for k, value in wanted)
    ]
    return sum(found) if found else None


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
