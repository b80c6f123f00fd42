"""Runs Locust on our locustfile as a user does: as a command, against a test's server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.results.recording import Recording, read_report
from tests.e2e.server import ROOT, Server

LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"
SMALL = (  # short pauses and texts: much happens in little time
    "--think-s",
    "0.3",
    "--question-tokens",
    "20",
    "--answer-tokens",
    "12",
    "--chat-turns",
    "4",
    "--system-tokens",
    "300",
    "--document-tokens",
    "600",
    "--document-questions",
    "2",
    "--burst-requests",
    "3",
    "--burst-every-s",
    "1.5",
    "--unloaded-requests",
    "2",
)
DRIVER = (sys.executable, "-m", "loadtest.users")  # what `make loadtest` runs
LENIENT = ("--slo-ttft-p90", "60", "--slo-tbt-p90", "60")  # where speed is not the question
RUN_S_MAX = 120.0


def command(server: Server) -> list[str]:
    return [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(LOCUSTFILE),
        "--only-summary",
        "--host",
        server.addresses.grpc,
        "--metrics-url",
        server.addresses.metrics_url,
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left: exit status, log, its report, and Locust's own statistics."""

    status: int
    log: str
    recording: Recording
    counts: dict[tuple[str, str], int]  # (type, name) -> requests
    failures: int

    def counted(self, kind: str) -> int:
        return sum(count for (found, _), count in self.counts.items() if found == kind)


def outcome(status: int, log: str, folder: Path) -> Outcome:
    stats = json.loads((folder / "stats.json").read_text())
    return Outcome(
        status,
        log,
        read_report(folder / "report.html"),
        {(line["method"], line["name"]): line["num_requests"] for line in stats},
        sum(line["num_failures"] for line in stats),
    )


def outputs(folder: Path) -> list[str]:
    return ["--report", str(folder / "report.html"), "--json-file", str(folder / "stats")]


def headless(
    server: Server, folder: Path, *arguments: str, users: int = 5, seconds: int = 4
) -> Outcome:
    return ended(
        folder,
        [
            *command(server),
            "--headless",
            "--users",
            str(users),
            "--spawn-rate",
            "10",
            "--run-time",
            f"{seconds}s",
            *SMALL,
            *outputs(folder),
            *arguments,
        ],
    )


def ended(folder: Path, whole_command: Sequence[str]) -> Outcome:
    done = subprocess.run(
        whole_command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False
    )
    return outcome(done.returncode, done.stderr, folder)
