"""A whole store on one host: a directory and storage nodes as child processes, until Ctrl-C.

A child that exits is restarted, a few times a minute. After that, all processes stop, and the end
of the child's log is printed.

Not here: options (app.py). `mooncake serve` has its own launcher, which includes Triton.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

RESTARTS_MAX = 5
RESTARTS_WITHIN_S = 60.0
STOP_S_MAX = 15.0
UNIT_BYTES = 16 * 2**10  # allocation unit of the storage nodes: headers take 0.4 % of the memory


class StartFailed(Exception):
    """A process did not become ready; the message has the end of its log."""


@dataclass(slots=True)
class StoreProcess:
    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[str] | None = None
    started_s: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.started_s = [at for at in self.started_s if time.monotonic() - at < RESTARTS_WITHIN_S]
        self.started_s.append(time.monotonic())
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith("ready"):
            self.process.wait()
            raise StartFailed(f"{self.name} did not start: {self.log_tail()}")

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-1_000:].strip() or "its log is empty"


def directory_address(folder: Path) -> str:
    return f"ipc://{folder}/directory"


def events_address(folder: Path) -> str:
    return f"ipc://{folder}/events"


def directory_command(address: str, events: str, *options: str) -> list[str]:
    addresses = ["--address", address, "--events", events]
    return [sys.executable, "-m", "mooncake_store.directory", *addresses, *options]


def node_command(
    directory: str,
    node: str,
    dram_bytes: int,
    control: str,
    ssd_folder: Path | None,
    ssd_bytes: int,
    events: str,
    *options: str,
) -> list[str]:
    """Command of a storage node; `directory`, `control` and `events` are addresses. `ssd_bytes` 0:
    no SSD. Blocks on the SSD outlive the process, so `ssd_folder` belongs to the node."""
    values = {
        "--node-id": node,
        "--directory": directory,
        "--events": events,
        "--segment-bytes": str(dram_bytes),
        "--unit-bytes": str(UNIT_BYTES),
        "--control": control,
    }
    if ssd_folder is not None and ssd_bytes:
        (ssd_folder / node).mkdir(parents=True, exist_ok=True)
        size_bytes = -(-ssd_bytes // UNIT_BYTES) * UNIT_BYTES
        values |= {"--ssd-path": str(ssd_folder / node), "--ssd-bytes": str(size_bytes)}
    command = [sys.executable, "-m", "mooncake_store.node", "--die-with-parent"]
    return [*command, *itertools.chain(*values.items()), *options]


class StoreProcesses:
    """The processes of one store. `folder` contains their sockets and logs."""

    def __init__(
        self,
        folder: Path,
        nodes: list[str],
        dram_bytes: int,
        ssd_folder: Path | None,
        ssd_bytes: int,
        directory_options: list[str],
        node_options: list[str],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = directory_address(folder)
        command = directory_command(self.address, events_address(folder), *directory_options)
        self.processes = [StoreProcess("directory", command, folder / "directory.log")]
        for node in nodes:
            command = node_command(
                self.address,
                node,
                dram_bytes,
                f"ipc://{folder}/{node}",
                ssd_folder,
                ssd_bytes,
                events_address(folder),
                *node_options,
            )
            self.processes.append(StoreProcess(f"node {node}", command, folder / f"{node}.log"))

    def start(self) -> None:
        for each in self.processes:
            each.start()

    def supervise(self) -> list[str]:
        """Restart processes that exited; their names. StartFailed when that happens too often."""
        ended = [
            each for each in self.processes if each.process and each.process.poll() is not None
        ]
        for each in ended:
            if len(each.started_s) > RESTARTS_MAX:
                raise StartFailed(f"{each.name} exits again and again: {each.log_tail()}")
            each.start()
        return [each.name for each in ended]

    def stop(self) -> None:
        """Stop the nodes first, because they deregister from the directory."""
        for each in reversed(self.processes):
            if each.process is None or each.process.poll() is not None:
                continue
            each.process.terminate()
            try:
                each.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
