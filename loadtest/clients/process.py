"""Runs a client to its end: its own session, output to a file, a deadline, nothing left behind.

Load generators start processes of their own; the whole group is ended when time is up or Ctrl-C
comes. Not here: what a client is told and what it says (aiperf.py, genai_perf.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.clients.environment import LINES_SHOWN, ClientFailed

STOP_S_MAX = 5.0


def run_client(
    command: Sequence[str], folder: Path, run_s_max: float, variables: Mapping[str, str]
) -> str:
    """What the client printed, also in `folder/output.txt`; raises ClientFailed."""
    name, log = Path(command[0]).name, folder / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(variables),
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(run_s_max)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    said = log.read_text(errors="replace")
    if status != 0:
        why = f"ended with status {status}" if status is not None else f"ran over {run_s_max:.0f} s"
        last = "\n".join(said.strip().splitlines()[-LINES_SHOWN:])
        raise ClientFailed(f"{name} {why}; all it said is in {log}, the end of it:\n{last}")
    return said


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the client and all processes that it started; the client's own id names the group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S_MAX)
