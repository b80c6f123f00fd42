"""The traffic of a real server as a trace, over an end of its frontend that nobody wished for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton

from loadtest.replay.trace import TraceRow, read_trace
from loadtest.simulator.cluster.job import offered_of
from tests.e2e.server import Server, running, wait_until
from tests.e2e.server_processes import stub_of

pytestmark = pytest.mark.long

EXTRACT = Path(__file__).parents[1] / "data" / "conversation_turns.jsonl"
RECORDED = "mooncake_recorded_requests_total"
WITHIN = {"max_tokens": 4, "end_id": -1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("recording")
    yield from running(
        folder, state_dir, {"recording_folder": "traces", "ttft_slo_s": "600", "tbt_slo_s": "60"}
    )


def traces(server: Server) -> list[Path]:
    found = (server.repository.parent / "traces").glob("*.jsonl")
    return sorted((path for path in found if path.stat().st_size), key=lambda p: p.stat().st_mtime)


def replayed(server: Server, trace: Path, *arguments: str) -> int:
    """How many requests of it were answered."""
    command = [
        sys.executable,
        "-m",
        "backends.cli",
        "replay",
        str(trace),
        "--json",
        "--url",
        server.addresses.grpc,
        "--metrics-url",
        "none",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(json.loads(done.stdout.splitlines()[-1])["completed"])


def answers_again(server: Server) -> bool:
    try:
        return len(server.ask(input_ids=[*range(30, 90)], **WITHIN).output_ids) == 4
    except (OSError, triton.InferenceServerException):
        return False


def shared_blocks(rows: list[TraceRow]) -> int:
    ids = [one for row in rows for one in row.hash_ids]
    return len(ids) - len(set(ids))


def test_what_was_served_is_a_trace_that_can_be_served_again(server: Server, seed: int) -> None:
    arguments = ("--length-scale", "0.06", "--speed", "1000", "--seed", str(seed % 1000))
    asked = replayed(server, EXTRACT, *arguments)
    wait_until(lambda: server.metric(RECORDED, result="written") == asked, "all to be recorded")
    [path] = traces(server)
    rows = read_trace(path)
    assert len(rows) == asked == 32 and server.metric(RECORDED, result="dropped") == 0
    assert shared_blocks(rows) > 0, "turns of a conversation begin alike"
    assert [one.prompt_tokens for one in offered_of(rows)] == [row.input_tokens for row in rows]
    assert replayed(server, path, "--speed", "50") == 32


def test_a_frontend_that_is_killed_leaves_whole_lines_and_records_again(server: Server) -> None:
    wait_until(server.is_idle, "an idle start")
    streams = [
        server.stream(input_ids=[*range(20, 600 + n)], max_tokens=500, end_id=-1, stream=True)
        for n in range(4)
    ]
    for stream in streams:
        stream.begun(5)
    server.ask(input_ids=[*range(20, 900)], **WITHIN)
    before = {path: path.read_bytes() for path in traces(server)}
    stub_of(server, "conductor").kill()
    for stream in streams:
        stream.leave()
    wait_until(lambda: answers_again(server), "the frontend to serve again", 90.0)
    wait_until(lambda: set(traces(server)) - before.keys(), "another recording")
    for path in traces(server):
        assert path.read_bytes().endswith(b"\n") and read_trace(path)
        assert path.read_bytes().startswith(before.get(path, b""))
    [new] = set(traces(server)) - before.keys()
    ids = [{one for row in read_trace(path) for one in row.hash_ids} for path in (new, *before)]
    assert not ids[0] & ids[1], "another salt"
