"""Dynamo's own replay of the same trace: run live in its own Python, or recorded.

`recorded.json` has the figures of every run of RUNS on the published conversation trace, with the
version of Dynamo, the digest of the trace and the command. The same code counts our requests and
Dynamo's, from the times of each (loadtest/simulator/cluster/outcome.py). So the comparison needs no
installed peer, and refuses another trace. `recorded_times.xz` beside it has the times of the runs
at recorded and at four times the speed, for later figures. Both are written by

    python -m bench.dynamo.peer TRACE --peer-python DIR/bin/python

Times are whole milliseconds, rounded up, so that the same requests keep a bound of whole
milliseconds. For each run the file holds the bytes of all TTFTs, lowest bytes first, then one byte
a request for its mean time between tokens.

Not here: the code that the peer runs (peer_replay.py), our side (fleet.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.dynamo.timing import alone_s
from bench.harness.processes import PeerProcess
from conductor import Request
from loadtest.replay.trace import TraceRow, read_trace
from loadtest.simulator.cluster.job import SimulatedJob, spread_ticks
from loadtest.simulator.cluster.outcome import (
    ITL_SLO_S,
    TTFT_SLO_S,
    LengthClass,
    Quantiles,
    SimulationOutcome,
    outcome_of,
)

RECORDED = Path(__file__).with_name("recorded.json")
SCRIPT = Path(__file__).with_name("peer_replay.py")
TTFT_BYTES = 4
NOT_SERVED = 2 ** (8 * TTFT_BYTES) - 1  # ms: of a rejected request
ITL_MS_MAX = 255
BLOCKS = (2_048, 16_384)
SPEEDS = (1.0, 2.0, 4.0)

# Its default router; the router that its documentation offers for overload; and the best that a
# sweep of its queue (threshold 0 to 4, FIFO and WSPT) found for mean TTFT at speed 1.
ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "round_robin": {},
    "kv_router": {},
    "kv_router_queue2_wspt": {"router_queue_threshold": 2.0, "router_queue_policy": "wspt"},
    "kv_router_queue0_wspt": {"router_queue_threshold": 0.0, "router_queue_policy": "wspt"},
    "kv_router_queue0_fcfs": {"router_queue_threshold": 0.0, "router_queue_policy": "fcfs"},
}


class PeerFailed(RuntimeError):
    """The output of the peer's replay is unknown; the message has a part of it."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    router: str  # a name in ROUTERS
    blocks: int
    speed: float
    is_spread: bool = False
    prefills: int = 2
    decodes: int = 2

    @property
    def keeps_times(self) -> bool:
        """Whether the recording keeps its times: the runs in the tables of bench/RESULTS.md."""
        return self.speed in (1.0, 4.0) and not self.is_spread


@dataclass(frozen=True, slots=True, eq=False)
class ReplayTimes:
    """TTFT and time between tokens of every request of a run, in order of the trace."""

    ttft_ms: npt.NDArray[np.uint32]
    itl_ms: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, jobs: Sequence[SimulatedJob]) -> ReplayTimes:
        ttfts = [NOT_SERVED if j.reject else np.ceil(1e3 * j.ttft_s) for j in jobs]
        itls = [0 if j.reject else np.ceil(1e3 * j.itl_s) for j in jobs]
        return cls(
            np.array(ttfts, np.uint32), np.minimum(np.array(itls), ITL_MS_MAX).astype(np.uint8)
        )

    @property
    def is_good(self) -> npt.NDArray[np.bool_]:
        return (self.ttft_ms <= 1e3 * TTFT_SLO_S) & (self.itl_ms <= 1e3 * ITL_SLO_S)


@dataclass(frozen=True, slots=True)
class PeerResult:
    version: str
    outcome: SimulationOutcome
    times: ReplayTimes | None = None  # of every request; None: not recorded


RUNS = tuple(
    PeerRun(router, blocks, speed, is_spread)
    for blocks in BLOCKS
    for speed, is_spread in (*((speed, False) for speed in SPEEDS), (1.0, True))
    for router in ROUTERS
)


def p99_ratio(ours: ReplayTimes, theirs: ReplayTimes) -> float:
    """p99 of TTFT, ours over theirs, over the requests that are good in both runs."""
    both = ours.is_good & theirs.is_good
    assert both.any(), "no request is good in both runs"
    return float(np.percentile(ours.ttft_ms[both], 99) / np.percentile(theirs.ttft_ms[both], 99))


def run_live(
    rows: Sequence[TraceRow],
    runs: Sequence[PeerRun],
    python: str,
    done: Callable[[], None] = lambda: None,
) -> dict[PeerRun, PeerResult]:
    """Every run in the peer's own Python; RuntimeError when one fails there."""
    spread_rows, found = spread_ticks(rows), {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain, spread = Path(folder, "plain.jsonl"), Path(folder, "spread.jsonl")
        _write(plain, rows)
        _write(spread, spread_rows)
        peer = PeerProcess(stack, Path(python), SCRIPT, variables={"DYN_LOG": "error"})
        for run in runs:
            asked = {
                "trace": str(spread if run.is_spread else plain),
                "blocks": run.blocks,
                "speed": run.speed,
                "mode": "round_robin" if run.router == "round_robin" else "kv_router",
                "router": dict(ROUTERS[run.router]),
                "prefills": run.prefills,
                "decodes": run.decodes,
            }
            said = peer.ask(json.dumps(asked))
            found[run] = _result(spread_rows if run.is_spread else rows, said)
            done()
    return found


def _result(rows: Sequence[TraceRow], said: dict[str, Any]) -> PeerResult:
    """Counted as our runs are, after a check against Dynamo's own figures."""
    jobs = _jobs(rows, said["requests"])
    outcome, summary = outcome_of(jobs, alone_s), said["summary"]
    pairs = (
        (1e3 * outcome.ttft_s.mean, summary["mean_ttft_ms"]),
        (1e3 * outcome.ttft_s.most, summary["max_ttft_ms"]),
        (1e3 * outcome.itl_mean_s, summary["mean_tpot_ms"]),
        (outcome.good, summary["goodput_completed_requests"]),
    )
    if any(abs(ours - theirs) > 1e-6 * max(1.0, theirs) for ours, theirs in pairs):
        raise PeerFailed(f"its times contradict its own figures: {pairs}")
    return PeerResult(said["version"], outcome, ReplayTimes.of(jobs))


def _jobs(rows: Sequence[TraceRow], requests: Sequence[Sequence[Any]]) -> list[SimulatedJob]:
    """Jobs in order of the trace. Dynamo names no line, so lines are matched by arrival and
    lengths; equal requests may be exchanged."""
    if len(rows) != len(requests):
        raise PeerFailed(f"{len(requests)} of {len(rows)} requests have times")
    positions = sorted(
        range(len(rows)),
        key=lambda i: (rows[i].timestamp_ms, rows[i].input_tokens, max(1, rows[i].output_tokens)),
    )
    jobs: dict[int, SimulatedJob] = {}
    for position, request in zip(positions, sorted(requests, key=list), strict=True):
        arrived_ms, prompt, output, first_ms, last_ms, held_ms, cached = request
        row = rows[position]
        if (prompt, output) != (row.input_tokens, max(1, row.output_tokens)):
            raise PeerFailed(f"line {row.line} of the trace came back as {prompt} + {output}")
        asked = Request(f"r{position}", prompt, (), output)
        jobs[position] = SimulatedJob(
            position,
            asked,
            output,
            arrived_ms / 1e3,
            cached_tokens=int(cached),
            prefilled_s=held_ms / 1e3,
            first_token_s=first_ms / 1e3,
            finished_s=last_ms / 1e3,
        )
    return [jobs[position] for position in range(len(rows))]


def read_recorded(path: Path = RECORDED) -> tuple[str, dict[PeerRun, PeerResult]]:
    """The digest of the recorded trace, and Dynamo's results on it."""
    said = json.loads(path.read_text("utf-8"))
    times = iter(read_times(_times_path(path), said["requests"]))
    found = {}
    for row in said["rows"]:
        run = PeerRun(**row["run"])
        outcome = _outcome_of_figures(row["outcome"])
        found[run] = PeerResult(said["version"], outcome, next(times) if run.keeps_times else None)
    return said["trace_sha256"], found


def _figures(outcome: SimulationOutcome) -> dict[str, Any]:
    ttft = outcome.ttft_s
    return {
        "requests": outcome.offered,
        "admitted": outcome.finished,
        "ttft_mean_s": ttft.mean,
        "ttft_p50_s": ttft.p50,
        "ttft_p90_s": ttft.p90,
        "ttft_p99_s": ttft.p99,
        "ttft_max_s": ttft.most,
        "wait_max_s": outcome.wait_max_s,
        "itl_mean_s": outcome.itl_mean_s,
        "reuse": outcome.hit_share,
        "good": outcome.good,
        "good_ttft_p99_s": outcome.good_ttft_p99_s,
        "good_tokens_per_s": outcome.good_tokens_per_s,
        "classes": [asdict(found) for found in outcome.classes],
    }


def _outcome_of_figures(said: dict[str, Any]) -> SimulationOutcome:
    ttft = Quantiles(*(said[f"ttft_{part}_s"] for part in ("mean", "p50", "p90", "p99", "max")))
    return SimulationOutcome(
        offered=said["requests"],
        finished=said["admitted"],
        ttft_s=ttft,
        hit_share=said["reuse"],
        itl_mean_s=said["itl_mean_s"],
        wait_max_s=said["wait_max_s"],
        good=said["good"],
        good_ttft_p99_s=said["good_ttft_p99_s"],
        good_tokens_per_s=said["good_tokens_per_s"],
        classes=tuple(LengthClass(**fields) for fields in said["classes"]),
    )


def write_times(path: Path, runs: Sequence[ReplayTimes]) -> None:
    planes = []
    for run in runs:
        planes.append(run.ttft_ms.astype("<u4").view(np.uint8).reshape(-1, TTFT_BYTES).T.tobytes())
        planes.append(run.itl_ms.tobytes())
    path.write_bytes(lzma.compress(b"".join(planes), preset=9 | lzma.PRESET_EXTREME))


def read_times(path: Path, requests: int) -> list[ReplayTimes]:
    """All runs of the file, each of `requests` requests."""
    content = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
    assert content.size % (requests * (TTFT_BYTES + 1)) == 0, f"{path} is of other requests"
    return [
        ReplayTimes(
            np.ascontiguousarray(run[:TTFT_BYTES].T).view("<u4").reshape(-1).astype(np.uint32),
            run[TTFT_BYTES],
        )
        for run in content.reshape(-1, TTFT_BYTES + 1, requests)
    ]


def _times_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}_times.xz")


def digest(rows: Sequence[TraceRow]) -> str:
    """Digest of the part of a trace that a replay uses, independent of the file's format."""
    hashed = hashlib.sha256()
    for row in rows:
        fields = (row.timestamp_ms, row.input_tokens, row.output_tokens, row.hash_ids)
        hashed.update(repr(fields).encode())
    return hashed.hexdigest()


def record(path: Path, rows: Sequence[TraceRow], results: Mapping[PeerRun, PeerResult]) -> None:
    """Write the file of `read_recorded`; one run a line, so that diffs are readable."""
    (version,) = {result.version for result in results.values()}
    lines = [
        json.dumps({"run": asdict(run), "outcome": _rounded(_figures(result.outcome))})
        for run, result in results.items()
    ]
    head = {
        "version": version,
        "command": "python -m bench.dynamo.peer TRACE --peer-python PYTHON",
        "requests": len(rows),
        "trace_sha256": digest(rows),
    }
    opening = json.dumps(head, indent=1).removesuffix("\n}")
    path.write_text(
        f'{opening},\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n", encoding="utf-8"
    )
    write_times(
        _times_path(path),
        [result.times for run, result in results.items() if run.keeps_times and result.times],
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, 7) if isinstance(value, float) else value


def _write(path: Path, rows: Sequence[TraceRow]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            fields = {
                "timestamp": row.timestamp_ms,
                "input_length": row.input_tokens,
                "output_length": row.output_tokens,
                "hash_ids": list(row.hash_ids),
            }
            file.write(json.dumps(fields) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Record Dynamo's own replay of a trace.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--to", type=Path, default=RECORDED)
    asked = parser.parse_args()
    rows = read_trace(asked.trace, asked.requests)
    record(asked.to, rows, run_live(rows, RUNS, asked.peer_python))


if __name__ == "__main__":
    main()
