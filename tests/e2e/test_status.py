"""`mooncake status` against the real server."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.e2e.server import ROOT, Server, wait_until


def status(server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "backends.cli",
        "status",
        "--metrics-url",
        server.addresses.metrics_url,
        "--interval-s",
        "0.5",
        *options,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60.0)


def test_it_shows_a_running_stream_and_every_worker_and_node(demo: Server) -> None:
    stream = demo.stream(
        text_input="It was",
        max_tokens=4000,
        end_id=-1,
        stream=True,
        parameters={"decode_worker": "decode_1"},
    )
    assert stream.next() is not None
    wait_until(lambda: demo.metric("mooncake_context_tokens"), "the stream to be published")
    shown, told = status(demo, "--once"), status(demo, "--json")
    stream.leave()
    assert (shown.returncode, told.returncode) == (0, 0), shown.stderr + told.stderr
    seen = json.loads(told.stdout)
    workers = {worker["name"]: worker for worker in seen["workers"]}
    assert {name: (worker["role"], worker["node"]) for name, worker in workers.items()} == {
        f"{role}_{n}": (role, f"s{n}") for role in ("prefill", "decode") for n in (0, 1)
    }
    assert seen["live"] == 1 and seen["workers_live"] == {"prefill": 2, "decode": 2}
    busy = workers["decode_1"]
    assert busy["running"] == 1 and busy["tokens_per_s"] > 0 and 0 < busy["step_s"] < 10
    assert 0 < busy["pages_used"] < busy["pages_max"]
    assert seen["total"]["ttft"]["p50_s"] > 0
    assert [node["name"] for node in seen["nodes"]] == ["s0", "s1"]
    for part in (demo.addresses.metrics_url, "decode, 2 live", "decode_1", "since start"):
        assert part in shown.stdout, shown.stdout
    wait_until(demo.is_idle, "pages, slots and leases to be free")
