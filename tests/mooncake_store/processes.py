"""A real directory with real storage nodes, as processes, for tests of whoever uses them.

Each can be killed and started again at the same address, with the same options.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from mooncake_store.memory.index_table import table_path

MIB = 2**20
AT_THAT_TIME = """
import sys, time
time.time_ns = lambda: {now_ns}
from mooncake_store.directory.__main__ import main
sys.exit(main())
"""


class StartedProcess:
    """One process, from its `ready` line on. `log` has its stderr, else ours does."""

    def __init__(self, command: list[str], log: Path | None = None) -> None:
        self.log = log
        self._command = [sys.executable, "-m", *command]
        self.start()

    def start(self) -> None:
        """Returns when it listens."""
        with self.log.open("a") if self.log else contextlib.nullcontext() as log:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline().strip()
        said = self.log.read_text()[-2000:] if self.log else ""
        assert self.ready.startswith("ready "), f"the process said {self.ready!r} {said}"

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DirectoryProcess(StartedProcess):
    def __init__(self, folder: Path, *options: str) -> None:
        self.address = f"ipc://{folder}/directory"
        self.events_address = f"ipc://{folder}/events"
        command = [
            "mooncake_store.directory",
            "--address",
            self.address,
            "--events",
            self.events_address,
            "--log-level",
            "WARNING",
            *options,
        ]
        super().__init__(command)

    def start(self, clock_ms: int = 0) -> None:
        """`clock_ms`: what its wall clock says, in milliseconds since 1970; 0: what ours does."""
        command = self._command
        if clock_ms:
            code = AT_THAT_TIME.format(now_ns=clock_ms * 1_000_000)
            self._command = [command[0], "-c", code, *command[3:]]
        super().start()
        self._command = command


class NodeProcess(StartedProcess):
    def __init__(
        self, folder: Path, directory: str, node_id: str, mib: int, *more: str, events: str = ""
    ) -> None:
        self.node_id = node_id
        self._index_path = table_path("/dev/shm/", directory)
        self.path = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
        command = [
            "mooncake_store.node",
            "--node-id",
            node_id,
            "--directory",
            directory,
            "--events",
            events,
            "--segment-bytes",
            str(mib * MIB),
            "--segment-path",
            self.path,
            "--die-with-parent",
            "--control",
            f"ipc://{folder}/{node_id}",
            *more,
        ]
        super().__init__(command, folder / f"{node_id}.log")

    def close(self) -> None:
        super().close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._index_path)  # of a node that was killed


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
        self.nodes[node_id] = NodeProcess(
            self.folder, self.address, node_id, mib, *more, events=self.directory.events_address
        )
        return self.nodes[node_id]

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self.directory.close()
