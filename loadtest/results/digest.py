"""The digest of a run among many: its settings, numbers and buckets.

A recording has every request, too much for hundreds of runs. A page of many runs (a sweep, a plan)
holds digests, as a page of one run holds a recording.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.results.lengths import LengthBucket, by_length
from loadtest.results.metrics import Slo
from loadtest.results.numbers import numbers, settings_of
from loadtest.results.recording import (
    EMBEDDED_RUN,
    NO_RUN,
    Recording,
    RecordingError,
    Setting,
    embedded_in,
    from_bytes,
    read_page,
    to_bytes,
)

EMBEDDED_RUNS = "application/x-mooncake-runs"  # media type of the data embedded in a page
DIGEST_FORMAT = 1


class RunDigest(msgspec.Struct, frozen=True):
    label: str  # distinguishes it from the others: its file's name, or the varied setting
    name: str  # its command: replay | locust | simulate | plan
    title: str
    settings: dict[str, Setting]  # including its service levels
    numbers: dict[str, float | None]  # by their JSON names (numbers.py)
    lengths: list[LengthBucket]
    slo: Slo | None = None
    is_mixed: bool = False  # each of its workloads has a service level of its own


class _Digests(msgspec.Struct):
    format: int
    runs: list[RunDigest]


def digest_of(recording: Recording, label: str = "") -> RunDigest:
    return RunDigest(
        label=label or recording.title,
        name=recording.name,
        title=recording.title,
        settings=settings_of(recording),
        numbers={number.name: number.value for number in numbers(recording)},
        lengths=by_length(recording),
        slo=recording.slo,
        is_mixed=bool(recording.slo_by_workload),
    )


def digests_to_bytes(runs: Sequence[RunDigest]) -> bytes:
    """Printable ASCII, so that a page can embed it."""
    return to_bytes(_Digests(DIGEST_FORMAT, list(runs)))


def digests_from_bytes(data: bytes) -> list[RunDigest]:
    """Raises RecordingError."""
    try:
        found = msgspec.json.decode(gzip.decompress(base64.b64decode(data, validate=True)))
        if not isinstance(found, dict) or found.get("format") != DIGEST_FORMAT:
            raise RecordingError(f"its format is not {DIGEST_FORMAT}, which this version reads")
        return msgspec.convert(found, _Digests).runs
    except (ValueError, OSError, EOFError, msgspec.MsgspecError) as error:
        raise RecordingError(f"no runs: {error}") from None


def read_runs(path: Path) -> Recording | list[RunDigest]:
    """The whole run or the digests in a page. RecordingError has the path and the reason."""
    page = read_page(path)
    many, one = embedded_in(page, EMBEDDED_RUNS), embedded_in(page, EMBEDDED_RUN)
    try:
        if many is not None:
            return digests_from_bytes(many)
        if one is not None:
            return from_bytes(one)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None
    raise RecordingError(f"{path}: {NO_RUN}")
