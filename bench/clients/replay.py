"""A published trace at another scale: by `mooncake replay`, and as a file for clients that cannot
scale.

Lengths and times of the file are those of `mooncake replay --length-scale X --speed Y`, by the same
function. Hash ids stay: a client receives the number of tokens of each id.
"""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.clients.agreement import ClientLoad, ClientReport
from bench.clients.environment import run_client
from loadtest.replay.trace import read_trace, scaled_lengths

NAME = "mooncake replay"


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    """Which trace, and its scale as in `mooncake replay`."""

    path: Path
    length_scale: float
    speed: float
    requests_max: int | None = None

    def write(self, path: Path) -> int:
        """Write it in the trace's own format; returns the tokens of a hash id."""
        rows = read_trace(self.path, self.requests_max)
        assert rows and self.speed > 0, "an empty trace or no speed"
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                lengths = scaled_lengths(row, self.length_scale)
                line = {
                    "timestamp": round((row.timestamp_ms - rows[0].timestamp_ms) / self.speed),
                    "input_length": lengths.prompt_tokens,
                    "output_length": lengths.output_tokens,
                    "hash_ids": list(row.hash_ids),
                }
                file.write(json.dumps(line) + "\n")
        return scaled_lengths(rows[0], self.length_scale).block_tokens


def run(load: ClientLoad, model: str, folder: Path, trace: ScaledTrace) -> ClientReport:
    """One replay with fresh tokens; raises ClientFailed."""
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "loadtest.replay",
        str(trace.path),
        f"--model={model}",
        f"--url={load.addresses.grpc}",
        "--json",
        f"--seed={secrets.randbits(62)}",
        f"--length-scale={trace.length_scale}",
        f"--speed={trace.speed}",
    ]
    *lines, last = run_client(command, folder).strip().splitlines()
    found = json.loads(last)
    mean_ms, p50_ms = found["ttft_s"]["mean"] * 1_000.0, found["ttft_s"]["p50"] * 1_000.0
    requests, table = found["completed"], tables_of(lines)
    return ClientReport(NAME, model, "trace", requests, mean_ms, p50_ms, table)


def tables_of(lines: list[str]) -> str:
    """Its output after the progress: from the line "N of N requests completed" on."""
    first = next((at for at, line in enumerate(lines) if "requests completed" in line), 0)
    return "\n".join(line.rstrip() for line in lines[first:])
