"""A real directory process for tests: start, stop, kill, start again at the same address."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


class DirectoryProcess:
    def __init__(self, folder: Path, *options: str) -> None:
        self.address = f"ipc://{folder}/directory"
        self.events_address = f"ipc://{folder}/events"
        self._options = options
        self.start()

    def start(self) -> None:
        """Returns when it listens."""
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "mooncake_store.directory", "--address", self.address,
                "--events", self.events_address, "--log-level", "WARNING", *self._options,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline().strip()
        assert self.ready.startswith("ready "), f"the directory said {self.ready!r}"

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        status = self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)

    def __enter__(self) -> DirectoryProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
