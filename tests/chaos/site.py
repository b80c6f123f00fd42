"""Directory, storage nodes and clients as processes, each in a process group of its own.

`s0` has room for everything it is given and is never killed (stopped it is). `s1` is small and has
an SSD, `s2` is small: what is put there is evicted, spilled and restored all the time.

Not here: what happens to them (monkey.py), what clients do (client.py).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.memory.index_table import table_path
from tests.chaos.client import Options

MIB = 2**20
READY_S, END_S = 60.0, 40.0  # only what hangs takes so long, on a busy machine too
QUARANTINE_S = 5.0
ROOT = Path(__file__).resolve().parents[2]
SOLE_COPIES_PER_S, SOLE_COPY_BYTES = 3, 85_000  # of each client; a block on the average


class Member:
    """One process that can be stopped, killed and started again."""

    def __init__(self, name: str, folder: Path, command: list[str]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self._command = command
        self.is_stopped = False
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Does not wait until it is ready."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._command],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.is_stopped = self.is_ready = False
        self.starts += 1

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        is_readable = bool(select.select([self.process.stdout], [], [], READY_S)[0])
        line = self.process.stdout.readline() if is_readable else b""
        assert line.startswith(b"ready"), f"{self.name} did not start:\n{self.tail()}"
        self.is_ready = True

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)
        self.is_stopped = True

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self.is_stopped = False

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait(END_S)
        self._close()

    def end(self) -> int:
        """SIGTERM; the exit status. AssertionError when it does not end in time.

        Not before it is ready: one that was started a moment ago would die of the signal.
        """
        self.go_on()
        if not self.is_ready:
            self.await_ready()
        self._signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end in {END_S} s:\n{self.tail()}") from None
        finally:
            self._close()

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.killpg(self.process.pid, number)

    def tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-25:])


class ChaosSite:
    def __init__(self, folder: Path, seed: int, seconds: float) -> None:
        self.folder, self.seed = folder, seed
        self.sole_copies = int(SOLE_COPIES_PER_S * seconds)
        self.address = f"ipc://{folder}/directory"
        self.notes = folder / "notes"
        self.notes.touch()
        self.members: dict[str, Member] = {}
        self.clients: list[str] = []
        try:
            self._start()
        except BaseException:
            self.kill_all()
            raise
        self.directory = DirectoryClient(self.address, timeout_s=5.0)

    def _start(self) -> None:
        self._add(
            "directory",
            "mooncake_store.directory",
            "--address",
            self.address,
            "--events",
            f"ipc://{self.folder}/events",
            "--node-ttl-s",
            "3",
            "--quarantine-s",
            str(QUARANTINE_S),
            "--self-check",
        )
        # Room for twice what three clients keep: nothing is ever evicted there.
        self._node("s0", 32 + 6 * self.sole_copies * SOLE_COPY_BYTES // MIB)
        ssd = ("--ssd-path", str(self.folder / "ssd"), "--ssd-bytes", str(24 * MIB))
        self._node("s1", 12, *ssd)
        self._node("s2", 8, "--data", "127.0.0.1:0")
        self._client("near", "s0", "auto", 1, ["s1", "s2"])
        self._client("mapped", "s1", "mapped", 2, ["s1", "s2"])
        self._client("writer", "s1", "auto", 3, ["s1", "s2"])
        self._client("late", "s1", "auto", 4, ["s1"], is_writer_only=True)
        for member in self.members.values():
            if member.name not in self.clients:
                member.await_ready()
        for name in self.clients:
            self.members[name].await_ready()

    def _add(self, name: str, *command: str) -> None:
        self.members[name] = Member(name, self.folder, list(command))

    def _node(self, node_id: str, mib: int, *more: str) -> None:
        self._add(
            node_id,
            "mooncake_store.node",
            "--node-id",
            node_id,
            "--directory",
            self.address,
            "--events",
            f"ipc://{self.folder}/events",
            "--segment-bytes",
            str(mib * MIB),
            "--segment-path",
            self.segment_path(node_id),
            "--die-with-parent",
            "--control",
            f"ipc://{self.folder}/{node_id}",
            *more,
        )

    def segment_path(self, node_id: str) -> str:
        return f"/dev/shm/mooncake-chaos-{os.getpid()}-{node_id}"

    def _client(
        self,
        name: str,
        node_id: str,
        transports: str,
        number: int,
        others: list[str],
        is_writer_only: bool = False,
    ) -> None:
        options = Options(
            name,
            self.address,
            node_id,
            transports,
            1_000 * self.seed + number,
            self.sole_copies,
            "s0",
            others,
            str(self.notes),
            is_writer_only,
        )
        self.clients.append(name)
        self._add(name, "tests.chaos.client", msgspec.json.encode(asdict(options)).decode())

    def kill_all(self) -> None:
        """Whatever happened: nothing of this goes on."""
        for member in self.members.values():
            if member.is_running:
                member.kill()
        for path in Path("/dev/shm").glob(f"mooncake-chaos-{os.getpid()}-*"):
            path.unlink()
        Path(table_path("/dev/shm/", self.address)).unlink(missing_ok=True)


def wait_for(what: str, seconds: float, holds: object) -> None:
    """Poll until `holds()`; AssertionError after so many seconds."""
    assert callable(holds)
    until_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until_s, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)  # poll
