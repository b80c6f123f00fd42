"""Our own `mooncake replay` of the trace that aiperf replays: the same lengths and times."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from loadtest.clients.load import Load, Report
from loadtest.clients.process import run_client

NAME = "mooncake replay"
RUN_S_MAX = 300.0


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    """Which trace, and its scale as `mooncake replay` takes it."""

    path: Path
    length_scale: float
    speed: float


def run(load: Load, model: str, folder: Path, trace: ScaledTrace) -> Report:
    """One replay with fresh tokens; raises ClientFailed."""
    folder.mkdir(parents=True)
    command = [
        sys.executable, "-m", "loadtest.replay", str(trace.path), "--model", model,
        "--url", load.addresses.grpc, "--json", "--seed", str(secrets.randbits(62)),
        "--length-scale", str(trace.length_scale), "--speed", str(trace.speed),
    ]  # fmt: skip
    said = run_client(command, folder, RUN_S_MAX, {"COLUMNS": "100"})
    *lines, last = said.strip().splitlines()
    found = json.loads(last)
    ttft_s = found["ttft_s"]
    return Report(
        NAME,
        model,
        "trace",
        found["completed"],
        ttft_s["mean"] * 1_000.0,
        ttft_s["p50"] * 1_000.0,
        tables_of(lines),
    )


def tables_of(lines: list[str]) -> str:
    """What it printed after its progress: from the line "N of N requests completed" on."""
    first = next((at for at, line in enumerate(lines) if "requests completed" in line), 0)
    return "\n".join(line.rstrip() for line in lines[first:])
