"""`mooncake replay` of a published trace's extract against the real server."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from loadtest.report import timeline
from loadtest.results.metrics import summarize
from loadtest.results.phases import measured
from loadtest.results.recording import read_report
from tests.e2e.server import Server, wait_until

EXTRACT = Path(__file__).parents[1] / "data" / "conversation_turns.jsonl"


def test_a_replayed_trace_is_answered_and_finds_what_an_unlimited_cache_would(
    demo: Server, seed: int, tmp_path: Path
) -> None:
    page = tmp_path / "run.html"
    command = [
        sys.executable,
        "-m",
        "backends.cli",
        "replay",
        str(EXTRACT),
        "--requests",
        "32",
        "--length-scale",
        "0.06",
        "--speed",
        "250",
        "--url",
        demo.addresses.grpc,
        "--json",
        "--seed",
        str(seed % 1000),
        "--report",
        str(page),
        "--metrics-url",
        f"http://{demo.addresses.metrics}/metrics",
        "--slo-ttft-s",
        "60",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["completed"], result["errors_by_kind"]) == (32, {})
    assert result["rejections_by_reason"] == {}
    assert result["ideal_cached_tokens"] > 0, "the extract must share prefixes"
    # 1.0 on an idle machine. On a busy one a turn may come while the one before it is still being
    # computed, and then rightly finds less; without any reuse it would be 0.
    assert result["cached_over_ideal"] >= 0.5
    wait_until(demo.is_idle, "pages, slots and leases to be free")
    the_report_holds_the_run(page, result)


def the_report_holds_the_run(page: Path, result: dict[str, Any]) -> None:
    """Every request, where its time went, and what the workers said meanwhile."""
    run = read_report(page)
    assert [record.index for record in run.requests] == list(range(32))
    assert dataclasses.asdict(summarize(run.requests, run.ideal_cached_tokens)).items() <= (
        result.items()
    )
    assert result["goodput"]["requests"] == 32
    phases = measured(run.requests)
    assert len(phases) == 32, "every answer says where its time went"
    for one in phases:
        server_s = sum(one.all[phase] for phase in ("queue", "transfer", "prefill"))
        assert one.all["prefill"] > 0 and server_s <= one.ttft_s
    assert len(run.samples) >= 2, "the first and the last at least"
    assert {line.label for line in timeline.gauge(run.samples, timeline.PAGES_USED)} == {
        "prefill_0",
        "prefill_1",
        "decode_0",
        "decode_1",
    }
    assert timeline.prefill_workers(run.samples) == {"prefill_0", "prefill_1"}
    assert timeline.decode_workers(run.samples) == {"decode_0", "decode_1"}
    prompts = timeline.gauge(run.samples, timeline.PROMPT_TOKENS, by="path")
    grown = {line.label: line.values[-1] - line.values[0] for line in prompts}
    # The page lags behind by a moment, so that the last prompts may be missing from it.
    assert result["input_tokens"] / 2 < sum(grown.values()) <= result["input_tokens"]
    assert 0 < grown["local"] + grown["fetched"] <= result["cached_tokens"]
