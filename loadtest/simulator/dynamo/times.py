"""TTFT and time between tokens of every request of a run, kept small, for figures of later days.

Whole milliseconds, rounded up, so that a bound of whole milliseconds is kept by the same requests.
A file of them (xz) holds, for run after run, the bytes of all TTFTs, lowest bytes first, then one
byte a request for its mean time between tokens.

Not here: the figures that are asked for (outcome.py).
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loadtest.simulator.dynamo.job import Job
from loadtest.simulator.dynamo.outcome import ITL_SLO_S, TTFT_SLO_S

TTFT_BYTES = 4
NOT_SERVED = 2 ** (8 * TTFT_BYTES) - 1  # ms: of a request that was turned away
ITL_MS_MAX = 255


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """In order of the trace."""

    ttft_ms: npt.NDArray[np.uint32]
    itl_ms: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Times:
        ttfts = [NOT_SERVED if j.is_rejected else np.ceil(1e3 * j.ttft_s) for j in jobs]
        itls = [0 if j.is_rejected else np.ceil(1e3 * j.itl_s) for j in jobs]
        return cls(
            np.array(ttfts, np.uint32), np.minimum(np.array(itls), ITL_MS_MAX).astype(np.uint8)
        )

    @property
    def is_good(self) -> npt.NDArray[np.bool_]:
        return (self.ttft_ms <= 1e3 * TTFT_SLO_S) & (self.itl_ms <= 1e3 * ITL_SLO_S)


def p99_ratio(ours: Times, theirs: Times) -> float:
    """p99 of TTFT, ours over theirs, over the requests that are good in both runs."""
    both = ours.is_good & theirs.is_good
    assert both.any(), "no request is good in both runs"
    return float(np.percentile(ours.ttft_ms[both], 99) / np.percentile(theirs.ttft_ms[both], 99))


def write_times(path: Path, runs: Sequence[Times]) -> None:
    planes = []
    for run in runs:
        planes.append(run.ttft_ms.astype("<u4").view(np.uint8).reshape(-1, TTFT_BYTES).T.tobytes())
        planes.append(run.itl_ms.tobytes())
    path.write_bytes(lzma.compress(b"".join(planes), preset=9 | lzma.PRESET_EXTREME))


def read_times(path: Path, requests: int) -> list[Times]:
    """As many runs as there are, each of so many requests."""
    content = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
    assert content.size % (requests * (TTFT_BYTES + 1)) == 0, f"{path} is of other requests"
    return [
        Times(
            np.ascontiguousarray(run[:TTFT_BYTES].T).view("<u4").reshape(-1).astype(np.uint32),
            run[TTFT_BYTES],
        )
        for run in content.reshape(-1, TTFT_BYTES + 1, requests)
    ]
