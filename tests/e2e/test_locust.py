"""Locust with our users against the real server: alone, distributed, and with its web page."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.harness.server import free_addresses
from loadtest.results.metrics import COMPLETED, REJECTED
from loadtest.results.recording import read_report
from tests.e2e import locusts
from tests.e2e.locusts import LENIENT, SMALL, headless
from tests.e2e.server import Server, running, wait_until

TRACE = Path(__file__).parents[1] / "data" / "conversation_turns.jsonl"
TRACE_ROWS = 12


def test_five_users_over_grpc_are_answered_and_counted_and_reported(
    demo: Server, tmp_path: Path
) -> None:
    mix = "chat:2,shared:1,document:1,burst:1"
    run = headless(demo, tmp_path, "--workload", mix, *LENIENT, seconds=8)
    assert (run.status, run.failures) == (0, 0), run.log
    records = run.recording.requests
    assert {record.outcome for record in records} == {COMPLETED}
    assert {record.workload for record in records} == {"chat", "shared", "document", "burst"}
    assert run.counted("total") == run.counted("TTFT") == run.counted("TBT") == len(records)
    assert all(record.decision and record.ttft_s and record.tbt_s for record in records)
    assert max(record.cached_tokens or 0 for record in records) >= 64, "prefixes are reused"
    assert run.recording.samples, "the server's metrics belong to the report"
    wait_until(demo.is_idle, "pages, slots and leases to be free")


def test_one_user_of_make_loadtest_over_http_is_answered_by_the_ensemble(
    demo: Server, tmp_path: Path
) -> None:
    run = locusts.ended(
        tmp_path,
        [
            *locusts.DRIVER,
            "--users",
            "1",
            "--seconds",
            "4",
            "--via",
            "http",
            "--host",
            f"http://{demo.addresses.http}",
            "--metrics-url",
            demo.addresses.metrics_url,
            "--target-model",
            "ensemble",
            "--workload",
            "chat",
            *SMALL,
            *LENIENT,
            *locusts.outputs(tmp_path),
        ],
    )
    assert (run.status, run.failures) == (0, 0), run.log
    turns = [record for record in run.recording.requests if record.outcome == COMPLETED]
    assert len(turns) == len(run.recording.requests) >= 2
    assert turns[1].prompt_tokens > turns[0].prompt_tokens + len(turns[0].token_times_s)
    assert turns[0].request_id == "chat-1-1" and turns[0].decision


def test_a_trace_is_replayed_row_by_row_and_an_impossible_limit_fails_the_run(
    demo: Server, tmp_path: Path
) -> None:
    run = headless(
        demo,
        tmp_path,
        "--workload",
        "trace",
        "--trace",
        str(TRACE),
        "--length-scale",
        "0.06",
        "--trace-speed",
        "400",
        "--trace-requests",
        str(TRACE_ROWS),
        "--slo-ttft-p90",
        "0.000001",
        seconds=60,
    )
    assert run.status == 1 and run.failures == 0, run.log
    assert "MISSED trace: P90 TTFT" in run.log and "--slo-ttft-p90" in run.log
    records = run.recording.requests
    assert [record.index for record in records] == list(range(TRACE_ROWS))
    assert all(record.outcome == COMPLETED for record in records)
    assert (run.recording.ideal_cached_tokens or {}).keys() == set(range(TRACE_ROWS))
    assert sum(record.cached_tokens or 0 for record in records) > 0


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    """A server that takes two requests at a time."""
    yield from running(tmp_path_factory.mktemp("narrow"), state_dir, {"requests_max": "2"})


@pytest.mark.long  # tests/e2e/test_gateway.py has users that are rejected and come back
def test_rejected_users_are_counted_as_such_come_back_and_fail_nothing(
    narrow: Server, tmp_path: Path
) -> None:
    run = headless(narrow, tmp_path, "--workload", "chat", *LENIENT, users=8)
    assert (run.status, run.failures) == (0, 0), run.log
    ended = Counter(record.outcome for record in run.recording.requests)
    assert ended.keys() == {COMPLETED, REJECTED}
    assert run.counts["rejected", "chat front_full"] == ended[REJECTED]
    assert run.counts["total", "chat"] == ended[COMPLETED]
    rejected = [record for record in run.recording.requests if record.outcome == REJECTED]
    for record in rejected:
        user = record.request_id.rpartition("-")[0]
        later = [
            other.sent_s
            for other in run.recording.requests
            if other.request_id.rpartition("-")[0] == user and other.sent_s > record.sent_s
        ]
        assert record.retry_after_s == 1.0
        # less a little: timers of gevent count from when its loop last looked at the clock
        assert not later or min(later) >= record.finished_s + 0.95, "it came back too early"


@pytest.mark.long  # tests/loadtest/users/test_run.py has the messages of a master and its workers
def test_a_master_judges_the_requests_of_all_its_workers(demo: Server, tmp_path: Path) -> None:
    port = free_addresses().grpc.rpartition(":")[2]
    worker = [*locusts.command(demo), "--worker", "--master-port", port]
    logs = [(tmp_path / f"worker-{number}.log").open("wb") for number in range(2)]
    workers = [subprocess.Popen(worker, stdout=log, stderr=log) for log in logs]
    try:
        run = headless(
            demo,
            tmp_path,
            "--master",
            "--master-bind-host",
            "127.0.0.1",
            "--master-bind-port",
            port,
            "--expect-workers",
            "2",
            "--workload",
            "chat:1,document:1",
            *LENIENT,
            users=4,
        )
        statuses = [process.wait(30.0) for process in workers]
    finally:
        for process in workers:
            process.kill()
        for log in logs:
            log.close()
    assert (run.status, run.failures, statuses) == (0, 0, [0, 0]), run.log
    ids = [record.request_id for record in run.recording.requests]
    assert len(set(ids)) == len(ids) == run.counted("total"), "each request counts once"
    users = {request_id.rpartition("-")[0] for request_id in ids}
    assert len(users) == 4, "no two users have one name"
    assert {user.split("-")[1].split(".")[0] for user in users} == {"0", "1"}, "of both workers"


class WebPage:
    """Locust's, used as a browser does."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, **form: object) -> Any:
        data = urllib.parse.urlencode(form).encode()
        with urllib.request.urlopen(f"{self.url}{path}", data=data, timeout=60.0) as answer:
            return json.load(answer)

    def answered(self) -> dict[str, int]:
        """Requests by workload; empty while the page is not there."""
        try:
            with urllib.request.urlopen(f"{self.url}/stats/requests", timeout=5.0) as answer:
                stats = json.load(answer)["stats"]
        except OSError:
            return {}
        return {line["name"]: line["num_requests"] for line in stats if line["method"] == "total"}

    def is_there(self) -> bool:
        try:
            return bool(urllib.request.urlopen(self.url, timeout=5.0).status == 200)
        except OSError:
            return False


def test_runs_from_the_web_page_begin_anew_and_ctrl_c_ends_the_last_one_well(
    demo: Server, tmp_path: Path
) -> None:
    address = free_addresses().http
    page = WebPage(f"http://{address}")
    report = tmp_path / "report.html"
    options = [*SMALL, *LENIENT, *locusts.outputs(tmp_path), "--web-port", address.split(":")[1]]
    with (tmp_path / "locust.log").open("wb") as log:
        process = subprocess.Popen([*locusts.command(demo), *options], stdout=log, stderr=log)
    try:
        wait_until(page.is_there, "Locust's web page")
        page.post("/swarm", user_count=2, spawn_rate=10, workload="chat")
        wait_until(lambda: page.answered().get("chat", 0) >= 2, "two answers")
        page.post("/stop")
        first = read_report(report).requests
        page.post("/swarm", user_count=2, spawn_rate=10, workload="document")
        wait_until(lambda: page.answered().get("document", 0) >= 2, "two answers")
        process.send_signal(signal.SIGINT)
        status = process.wait(60.0)
    finally:
        process.kill()
    run = locusts.outcome(status, (tmp_path / "locust.log").read_text(), tmp_path)
    assert (run.status, run.failures) == (0, 0), run.log
    assert {record.workload for record in first} == {"chat"}
    assert {record.workload for record in run.recording.requests} == {"document"}
    assert {record.outcome for record in run.recording.requests} == {COMPLETED}
    assert run.counts.keys() == {(kind, "document") for kind in ("total", "TTFT", "TBT")}
    wait_until(demo.is_idle, "pages, slots and leases to be free")


def test_without_a_server_it_says_so_and_does_not_start(tmp_path: Path) -> None:
    nowhere = free_addresses().grpc
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "locust",
            "-f",
            str(locusts.LOCUSTFILE),
            "--headless",
            "--host",
            nowhere,
        ],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == 2
    assert f"cannot start: unreachable: {nowhere}" in done.stderr and "make serve" in done.stderr
