"""Installing a client, and running it to its end.

Each client has a Python environment of its own, made at its first use, with exact versions. It is
never the project's own: aiperf and genai-perf need other versions of numpy and transformers than
the server. The environment records its packages, so another version makes it anew, and an
interrupted installation is not taken for a complete one.

A client runs in its own session, with its output in a file and a deadline. Load generators start
processes of their own, so the whole group is ended at the deadline or on Ctrl-C.

Not here: versions, requests and reports of a client (aiperf.py, genai_perf.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.harness.server import PROJECT, CannotMeasure

ENVIRONMENTS = PROJECT / ".venv-clients"
INSTALL_S_MAX = 900.0
RUN_S_MAX, STOP_S_MAX = 300.0, 5.0
LINES_SHOWN = 8
COLUMNS = "100"  # of the tables that clients print


class ClientFailed(CannotMeasure):
    """A client could not be installed or failed; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    folder: Path
    install_s: float  # 0.0: it was installed already

    @property
    def bin(self) -> Path:
        return self.folder / "bin"


def environment(name: str, requirements: Sequence[str], parent: Path) -> ClientEnvironment:
    """The environment `parent/name` with `requirements` in it; raises ClientFailed."""
    folder = parent.resolve() / name
    complete = folder / "installed.txt"
    wanted = "\n".join((sys.version.split()[0], *requirements))
    if complete.exists() and complete.read_text() == wanted:
        return ClientEnvironment(folder, 0.0)
    started_s = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "install", "--quiet", *requirements],
    ):
        install_step(command, " ".join(requirements), disk_gb=1.3)
    complete.write_text(wanted)
    return ClientEnvironment(folder, time.perf_counter() - started_s)


def npm_environment(name: str, packages: Sequence[str], parent: Path) -> ClientEnvironment:
    """The folder `parent/name` with the npm `packages` in it; its programs are node's scripts.
    Raises ClientFailed."""
    folder = parent.resolve() / name
    complete, wanted = folder / "installed.txt", "\n".join(packages)
    if complete.exists() and complete.read_text() == wanted:
        return ClientEnvironment(folder, 0.0)
    if shutil.which("npm") is None:
        raise ClientFailed(f"{name} needs node 18 or newer: apt-get install -y nodejs npm")
    started_s = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    install = ["npm", "install", "--prefix", str(folder), "--save-exact", "--no-audit", *packages]
    install_step(install, " ".join(packages), disk_gb=0.1)
    complete.write_text(wanted)
    return ClientEnvironment(folder, time.perf_counter() - started_s)


def install_step(
    command: Sequence[str], what: str, disk_gb: float, s_max: float = INSTALL_S_MAX
) -> None:
    """Run one command of an installation; raises ClientFailed with the remedy."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=s_max, check=False)
    except subprocess.TimeoutExpired:
        raise ClientFailed(f"{' '.join(command)} took over {s_max:.0f} s") from None
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-LINES_SHOWN:])
        raise ClientFailed(
            f"cannot install {what}; it needs a package index (as pip and npm have it) and "
            f"{disk_gb:g} GB of disk. {command[0]} said:\n{said}"
        )


def flags(**values: object) -> list[str]:
    """Command line options by keyword: request_count=60 is --request-count 60."""
    named = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items())
    return [word for pair in named for word in pair]


def run_client(
    command: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    run_s_max: float = RUN_S_MAX,
) -> str:
    """The client's output, also in `folder/output.txt`; raises ClientFailed."""
    name, log = Path(command[0]).name, folder / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"COLUMNS": COLUMNS, **(variables or {})},
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
