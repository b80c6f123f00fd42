"""A real directory with real storage nodes, as processes, for tests of whoever uses them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

from tests.mooncake_store.processes import DirectoryProcess

MIB = 2**20


class NodeProcess:
    """One storage node; kill it and start it again with the same options."""

    def __init__(self, folder: Path, directory: str, node_id: str, mib: int, *more: str) -> None:
        self.node_id = node_id
        self.path = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.log = folder / f"{node_id}.log"
        self._command = [
            sys.executable, "-m", "mooncake_store.node", "--node-id", node_id,
            "--directory", directory, "--segment-bytes", str(mib * MIB),
            "--segment-path", self.path, "--die-with-parent",
            "--control", f"ipc://{folder}/{node_id}", *more,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), f"node {self.node_id}: {self.log.read_text()[-2000:]}"

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(how)
        status = self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class SiteProcesses:
    """A directory and nodes; everything ends with it."""

    def __init__(self, folder: Path, *directory_options: str) -> None:
        self.folder = folder
        self.directory = DirectoryProcess(folder, *directory_options)
        self.nodes: dict[str, NodeProcess] = {}

    @property
    def address(self) -> str:
        return self.directory.address

    def node(self, node_id: str, mib: int = 8, *more: str) -> NodeProcess:
        self.nodes[node_id] = NodeProcess(self.folder, self.address, node_id, mib, *more)
        return self.nodes[node_id]

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self.directory.close()
