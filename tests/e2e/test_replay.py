"""`mooncake replay` of a published trace's extract against the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.server import Server, wait_until

EXTRACT = Path(__file__).parents[1] / "data" / "conversation_turns.jsonl"


def test_a_replayed_trace_is_answered_and_finds_what_an_unlimited_cache_would(
    demo: Server, seed: int
) -> None:
    command = [
        sys.executable, "-m", "backends.cli", "replay", str(EXTRACT), "--requests", "32",
        "--length-scale", "0.06", "--speed", "400", "--url", demo.addresses.grpc, "--json",
        "--seed", str(seed % 1000),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["completed"], result["errors_by_kind"]) == (32, {})
    assert result["rejections_by_reason"] == {}
    assert result["ideal_cached_tokens"] > 0, "the extract must share prefixes"
    assert result["cached_over_ideal"] >= 0.9
    wait_until(demo.is_idle, "pages, slots and leases to be free")
