"""Directories as processes that are elected through a real etcd; how to wait for the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreUnavailable

PATIENCE_S = 30.0
TTL_S = 2  # a leader may be a second late; each one that dies costs its test so long
T = TypeVar("T")


class Elected:
    """A directory process that waits for its election."""

    def __init__(self, folder: Path, name: str, election: str, ttl_s: int = TTL_S) -> None:
        self.address = f"ipc://{folder}/{name}"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mooncake_store.directory",
                "--address",
                self.address,
                "--events",
                f"{self.address}-events",
                "--etcd",
                election,
                "--ttl-s",
                str(ttl_s),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> int:
        """The epoch of its next reign."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(f"ready address={self.address}"), line
        return int(line.rpartition("epoch=")[2])

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def when_led(ask: Callable[[], T]) -> T:
    """What is asked of a directory, once one leads; StoreUnavailable after PATIENCE_S."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except StoreUnavailable:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.02)  # poll


def until_answered(client: DirectoryClient, but_not_epoch: int = -1) -> int:
    """The epoch of the directory that answers; errors meanwhile are StoreUnavailable."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            epoch = client.stats().epoch
        except StoreUnavailable:
            epoch = but_not_epoch
        if epoch != but_not_epoch:
            return epoch
        assert time.monotonic() < until_s, "no directory answers"
        time.sleep(0.02)  # poll
