"""A real etcd for tests, with the shortest leases that it allows (two seconds become one)."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import requests

BINARY = shutil.which("etcd")
HOW_TO = "etcd is not installed (Debian: apt-get install etcd-server)"


class EtcdProcess:
    def __init__(
        self, folder: Path, name: str = "default", ports: Sequence[int] = (), members: str = ""
    ) -> None:
        """`members`: of a cluster ("name=url,..."), of which this is one; "" for it alone."""
        self.port, peer_port = ports or (_free_port(), _free_port())
        self.url = f"http://127.0.0.1:{self.port}"
        self._numbers = itertools.count()
        peer = f"http://127.0.0.1:{peer_port}"
        # Members that are late for a moment must not elect a leader each time.
        election_ms = 500 if members else 100
        self._log = folder / f"{name}.log"
        self._command = [
            str(BINARY),
            "--name",
            name,
            "--data-dir",
            str(folder / name),
            "--listen-client-urls",
            self.url,
            "--advertise-client-urls",
            self.url,
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            members or f"{name}={peer}",
            "--heartbeat-interval",
            str(election_ms // 10),
            "--election-timeout",
            str(election_ms),
        ]
        self.start()
        if not members:
            self.wait_healthy()

    def start(self) -> None:
        """Also again, after `close`, with what it had."""
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine},
            )

    def wait_healthy(self) -> None:
        until_s = time.monotonic() + 30.0
        while not self._is_healthy():
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < until_s, self._log.read_text()[-2000:]
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


class EtcdCluster:
    """Three members, each to be killed and started again."""

    def __init__(self, folder: Path) -> None:
        ports = [(_free_port(), _free_port()) for _ in range(3)]
        members = ",".join(f"m{at}=http://127.0.0.1:{peer}" for at, (_, peer) in enumerate(ports))
        self.members = [EtcdProcess(folder, f"m{at}", ports[at], members) for at in range(3)]
        for member in self.members:
            member.wait_healthy()
        hosts = ",".join(f"127.0.0.1:{member.port}" for member in self.members)
        self.address = f"etcd://{hosts}/test"

    def close(self) -> None:
        for member in self.members:
            member.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
