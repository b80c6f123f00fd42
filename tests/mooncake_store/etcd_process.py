"""A real etcd for tests, with the shortest leases that it allows (two seconds become one)."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import requests

BINARY = shutil.which("etcd")
HOW_TO = "etcd is not installed (Debian: apt-get install etcd-server)"


class EtcdProcess:
    def __init__(self, folder: Path) -> None:
        self.port, peer_port = _free_port(), _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._numbers = itertools.count()
        peer = f"http://127.0.0.1:{peer_port}"
        with (folder / "etcd.log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    str(BINARY), "--data-dir", str(folder / "data"),
                    "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"default={peer}",
                    "--heartbeat-interval", "20", "--election-timeout", "100",
                ],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine},
            )  # fmt: skip
        until_s = time.monotonic() + 30.0
        while not self._is_healthy():
            assert self.process.poll() is None, (folder / "etcd.log").read_text()[-2000:]
            assert time.monotonic() < until_s, (folder / "etcd.log").read_text()[-2000:]
            time.sleep(0.05)  # poll

    def _is_healthy(self) -> bool:
        try:
            return requests.get(self.url + "/health", timeout=1.0).json()["health"] == "true"
        except (requests.RequestException, ValueError):
            return False

    def fresh_prefix(self) -> str:
        """Keys that no other test uses."""
        return f"test/{next(self._numbers)}"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
