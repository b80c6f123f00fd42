"""Dynamo's own replay of the same trace: run live in its own Python, or recorded.

`recorded.json` has every run of RUNS on the published conversation trace, with the version of
Dynamo, the digest of the trace and the command; so the comparison needs no peer to be installed,
and says so when the trace is another one. It is written by

    python -m loadtest.simulator.dynamo.peer TRACE --peer-python DIR/bin/python

Not here: what the peer runs (peer_replay.py), our side (experiment.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.simulator.dynamo.arrivals import spread_ticks
from loadtest.trace import TraceRow, read_trace

RECORDED = Path(__file__).with_name("recorded.json")
SCRIPT = Path(__file__).with_name("peer_replay.py")
BLOCKS = (2_048, 16_384)
SPEEDS = (1.0, 2.0, 4.0)

# Its default router; what its documentation offers for overload; and the best that a sweep of its
# queue (threshold 0 to 4, first come first served and WSPT) found for mean TTFT at speed 1.
ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "round_robin": {},
    "kv_router": {},
    "kv_router_queue2_wspt": {"router_queue_threshold": 2.0, "router_queue_policy": "wspt"},
    "kv_router_queue0_wspt": {"router_queue_threshold": 0.0, "router_queue_policy": "wspt"},
    "kv_router_queue0_fcfs": {"router_queue_threshold": 0.0, "router_queue_policy": "fcfs"},
}


class PeerFailed(Exception):
    """The peer's replay did not run; the message says what it said."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    router: str  # a name in ROUTERS
    blocks: int
    speed: float
    is_spread: bool = False


@dataclass(frozen=True, slots=True)
class PeerResult:
    """As Dynamo counts it; see outcome.py for the same of ours."""

    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    ttft_max_ms: float
    itl_mean_ms: float
    reuse: float
    requests: int
    good: int
    good_tokens_per_s: float
    version: str


RUNS = tuple(
    PeerRun(router, blocks, speed, is_spread)
    for blocks in BLOCKS
    for speed, is_spread in (*((speed, False) for speed in SPEEDS), (1.0, True))
    for router in ROUTERS
)


def run_live(
    rows: Sequence[TraceRow], runs: Sequence[PeerRun], python: str,
    done: Callable[[], None] = lambda: None,
) -> dict[PeerRun, PeerResult]:  # fmt: skip
    """Every run in the peer's own Python; raises PeerFailed."""
    with tempfile.TemporaryDirectory() as folder:
        plain, spread = Path(folder, "plain.jsonl"), Path(folder, "spread.jsonl")
        _write(plain, rows)
        _write(spread, spread_ticks(rows))
        asked = [
            {
                "trace": str(spread if run.is_spread else plain),
                "blocks": run.blocks,
                "speed": run.speed,
                "mode": "round_robin" if run.router == "round_robin" else "kv_router",
                "router": dict(ROUTERS[run.router]),
            }
            for run in runs
        ]
        complaints = Path(folder, "stderr.txt")
        with complaints.open("w") as errors, subprocess.Popen(
            [python, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, env={**os.environ, "DYN_LOG": "error"},
        ) as process:  # fmt: skip
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps(asked))
            process.stdin.close()
            found = []
            for line in process.stdout:
                found.append(PeerResult(**json.loads(line)))
                done()
        said = complaints.read_text()[-800:]
    if process.returncode or len(found) != len(runs):
        raise PeerFailed(f"{python} {SCRIPT.name} ended with {process.returncode}: {said}")
    return dict(zip(runs, found, strict=True))


def read_recorded(path: Path = RECORDED) -> tuple[str, dict[PeerRun, PeerResult]]:
    """The digest of the trace that was recorded, and what Dynamo found on it."""
    said = json.loads(path.read_text())
    version = said["version"]
    found = {
        PeerRun(**row["run"]): PeerResult(**row["result"], version=version) for row in said["rows"]
    }
    return said["trace_sha256"], found


def digest(rows: Sequence[TraceRow]) -> str:
    """Of what a replay takes from a trace, however the file is written."""
    hashed = hashlib.sha256()
    for row in rows:
        fields = (row.timestamp_ms, row.input_tokens, row.output_tokens, row.hash_ids)
        hashed.update(repr(fields).encode())
    return hashed.hexdigest()


def record(path: Path, rows: Sequence[TraceRow], results: Mapping[PeerRun, PeerResult]) -> None:
    """Write what `read_recorded` reads; one run a line, so that changes show."""
    (version,) = {result.version for result in results.values()}
    lines = []
    for run, result in results.items():
        fields = asdict(result)
        del fields["version"]
        lines.append(json.dumps({"run": asdict(run), "result": fields}))
    head = {
        "version": version,
        "command": "python -m loadtest.simulator.dynamo.peer TRACE --peer-python PYTHON",
        "requests": len(rows),
        "trace_sha256": digest(rows),
    }
    opening = json.dumps(head, indent=1).removesuffix("\n}")
    path.write_text(f'{opening},\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


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
