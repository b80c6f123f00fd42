"""A real process that owns a segment and answers NIXL and plain TCP, for the transport tests.

Run as a module it is that process; imported it is the handle that tests hold. It knows nothing of
the directory: mooncake_store.node is the production process.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

from mooncake_store.memory.segment import Segment, host_id
from mooncake_store.records.membership import NodeInfo

ROOT = Path(__file__).resolve().parents[2]
TARGET_BYTES = 4 * 1024**2


class Target:
    """One life of a target process."""

    def __init__(
        self, path: str, node_id: str = "t0", environment: dict[str, str] | None = None
    ) -> None:
        self.path = path
        self.node_id = node_id
        self.incarnation = secrets.token_hex(6)
        command = [sys.executable, "-m", "tests.mooncake_store.targets"]
        self.process = subprocess.Popen(
            [*command, path, str(TARGET_BYTES), f"{node_id}#{self.incarnation}"],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the target process ended with {self.process.wait()}"
        said = json.loads(line)
        self.info = NodeInfo(
            node_id,
            self.incarnation,
            host_id(path),
            path,
            TARGET_BYTES,
            said["name"],
            base64.b64decode(said["metadata"]),
            said["address"],
            data_address=said["data_address"],
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process, kindly if it still lives, and remove what a killed one left."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            if self.process.poll() is None:
                self.thaw()
                self.process.stdin.close()
                assert self.process.wait(timeout=20) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            Path(self.path).unlink(missing_ok=True)


class TargetPool:
    """Targets outlive a test, because one takes two seconds to start; killed ones do not."""

    def __init__(self) -> None:
        self._prefix = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._idle: list[Target] = []

    def take(self, node_id: str, environment: dict[str, str] | None = None) -> Target:
        """A target of this name, with empty memory: a directory that begins anew in a test gives
        out lower generations than the headers of the test before have."""
        for target in self._idle:
            if target.node_id == node_id and environment is None:
                self._idle.remove(target)
                with Segment.open(target.path) as segment:
                    segment.view[:] = 0
                return target
        return Target(f"{self._prefix}-{next(self._numbers)}", node_id, environment)

    def give_back(self, target: Target, is_reusable: bool = True) -> None:
        if is_reusable and target.process.poll() is None:
            self._idle.append(target)
        else:
            target.close()

    def close(self) -> None:
        for target in self._idle:
            target.close()
        assert not list(Path("/dev/shm").glob(Path(self._prefix).name + "*"))


def main() -> None:
    path, size_bytes, name = sys.argv[1:]
    from mooncake_store.transports.nixl_agent import NodeAgent
    from mooncake_store.transports.tcp_server import TcpServer

    segment = Segment.create(path, int(size_bytes))
    server = TcpServer(segment.view, "127.0.0.1", token=name.partition("#")[2].encode())
    agent = NodeAgent(name, segment.address, segment.size_bytes)
    said = {
        "name": agent.name,
        "metadata": base64.b64encode(agent.metadata).decode(),
        "address": segment.address,
        "data_address": server.address,
    }
    print(json.dumps(said), flush=True)
    sys.stdin.read()  # until the test closes it
    agent.close()
    server.close()
    segment.close()
    os._exit(0)


if __name__ == "__main__":
    main()
