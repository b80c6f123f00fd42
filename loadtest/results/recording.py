"""A run as a file: every request, the server's metrics during the run, and its settings.

Every source of runs (replay, Locust, the simulator) fills a `Recording`, and report/ shows it. The
HTML report embeds it, so `mooncake report A B` compares the same file that people read.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.results.metrics import Goodput, RequestRecord, Slo, compact, goodput

FORMAT = 2  # 1: no record was compact
READABLE = (1, 2)
TOKENS_MAX = 2_000_000  # most token times in a page; a browser loads them in a few seconds
EMBEDDED_RUN = "application/x-mooncake-recording"  # media type of the data embedded in a page
NO_RUN = (
    "no report of a run: it holds no recording. `mooncake replay --report`, --report of Locust's "
    "users, `mooncake simulate --experiment replay --report` and `mooncake plan` write such pages"
)
Setting = str | int | float | bool | None


class Sample(msgspec.Struct, frozen=True):
    """The server's own gauges and counters at one moment.

    `values` are the series of its metrics page whose name begins with `mooncake_`, under their
    names there: `mooncake_requests_waiting{model="prefill_0"}`. Buckets of histograms are left out;
    their `_sum` and `_count` are included.
    """

    time_s: float  # since the run began, on the clock of the records
    values: dict[str, float]


class Recording(msgspec.Struct):
    """One run. Times are seconds since it began."""

    name: str  # its command: replay | locust | simulate
    title: str  # one line for people: the load and its server
    started_at: str  # ISO 8601, UTC; "" under a virtual clock
    settings: dict[str, Setting]
    requests: list[RequestRecord]
    samples: list[Sample] = []
    slo: Slo | None = None  # the service level of goodput
    slo_by_workload: dict[str, Slo] = {}  # of a mix with different levels; then `slo` is None
    # request index -> tokens of an unlimited cache (reuse)
    ideal_cached_tokens: dict[int, int] | None = None
    format: int = FORMAT


def goodput_of(recording: Recording) -> Goodput | None:
    """None when no service level was set."""
    if not has_levels(recording):
        return None
    return goodput(recording.requests, recording.slo or Slo(), recording.slo_by_workload)


def has_levels(recording: Recording) -> bool:
    return recording.slo is not None or bool(recording.slo_by_workload)


class RecordingError(Exception):
    """The bytes are no recording that this version can read; the message has the reason."""


def slim(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Records without token ids; of very many tokens only the first and last time is kept."""
    is_large = sum(len(record.token_times_s) for record in records) > TOKENS_MAX
    kept = (compact(record) for record in records) if is_large else records
    return [dataclasses.replace(record, output_ids=()) for record in kept]


def to_bytes(recording: msgspec.Struct) -> bytes:
    """Compressed JSON as printable ASCII, so that a page can embed it."""
    return base64.b64encode(gzip.compress(msgspec.json.encode(recording), mtime=0))


def from_bytes(data: bytes) -> Recording:
    """Raises RecordingError."""
    try:
        text = gzip.decompress(base64.b64decode(data, validate=True))
        found = msgspec.json.decode(text, type=_Header)
        if found.format not in READABLE:
            raise RecordingError(f"its format is {found.format}, this version reads {READABLE}")
        return msgspec.json.decode(text, type=Recording)
    except (
        ValueError,
        OSError,
        EOFError,
        zlib.error,
        RecursionError,
        msgspec.MsgspecError,
    ) as error:
        raise RecordingError(f"not a recording: {error}") from None


def read_report(path: Path) -> Recording:
    """The recording inside a run's page; RecordingError with the path and the reason."""
    data = embedded_in(read_page(path), EMBEDDED_RUN)
    if data is None:
        raise RecordingError(f"{path}: {NO_RUN}")
    try:
        return from_bytes(data)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None


def read_page(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from None


def embedded_in(page: bytes, what: str) -> bytes | None:
    """The last script of this type: the page ends with it, and everything before is text."""
    begin = b'<script type="' + what.encode() + b'">'
    at = page.rfind(begin)
    end = page.find(b"</script>", at)
    if at < 0 or end < 0:
        return None
    data = page[at + len(begin) : end].strip()
    return data if re.fullmatch(rb"[A-Za-z0-9+/=]+", data) else None


class _Header(msgspec.Struct):
    format: int
