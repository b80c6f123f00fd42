"""A directory server and storage nodes as processes, for tests that kill them."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreUnavailable
from mooncake_store.records.membership import NodeInfo
from tests.mooncake_store.targets import ROOT

SIZE = 1024**2
PATIENCE_S = 30.0


class Site:
    """A directory server and storage nodes as processes."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/directory"
        self.events = f"ipc://{folder}/events"
        self.prefix = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.processes: list[subprocess.Popen[str]] = []
        self.directories: list[subprocess.Popen[str]] = []
        self.client = DirectoryClient(self.address, timeout_s=5.0)

    def start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"mooncake_store.{module}", *arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def start_directory(self, *more: str) -> subprocess.Popen[str]:
        process = self.start("directory", "--address", self.address, "--events", self.events, *more)
        self.directories.append(process)
        return process

    def start_node(self, node_id: str, *more: str, name: str = "") -> subprocess.Popen[str]:
        path = f"{self.prefix}-{name or node_id}"
        return self.start(
            "node",
            "--node-id",
            node_id,
            "--directory",
            self.address,
            "--segment-bytes",
            str(SIZE),
            "--segment-path",
            path,
            *more,
        )

    def segments(self) -> list[str]:
        return sorted(p.name for p in Path("/dev/shm").glob(Path(self.prefix).name + "*"))

    def nodes(self, condition: Callable[[list[NodeInfo]], bool]) -> list[NodeInfo]:
        """The registered nodes, as soon as they satisfy the condition."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                found = self.client.nodes()
            except StoreUnavailable:
                found = []
            if condition(found):
                return found
            assert time.monotonic() < until_s, f"waited in vain; nodes: {found}"
            pause()

    def close(self) -> None:
        self.client.close()
        nodes_first = sorted(self.processes, key=lambda process: process in self.directories)
        for process in nodes_first:  # they deregister
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=PATIENCE_S)
        for name in self.segments():
            Path("/dev/shm", name).unlink()


def pause() -> None:
    """Between two looks at a condition."""
    select.select([], [], [], 0.02)


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
