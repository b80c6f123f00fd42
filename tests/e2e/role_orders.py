"""Messages to workers of a real server to take the other role."""

from __future__ import annotations

import time

import psutil

from backends.launch_secret import SECRET_VARIABLE
from backends.workers.protocol import TakeRole, WorkerOutbox, encode
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.records.membership import WorkerInfo
from tests.e2e.server import Server, wait_until

OTHER = {"prefill": "decode", "decode": "prefill"}


class RoleOrders:
    """Sends orders as a frontend does, with addresses and the secret of the server's processes."""

    def __init__(self, server: Server) -> None:
        found = (process.environ() for process in psutil.Process(server.process.pid).children(True))
        known = next(each for each in found if "MOONCAKE_DIRECTORY" in each)
        self._directory = DirectoryClient(known["MOONCAKE_DIRECTORY"])
        self._outbox = WorkerOutbox(encode, known.get(SECRET_VARIABLE, ""))

    def worker(self, name: str) -> WorkerInfo | None:
        return next((w for w in self._directory.workers() if w.worker_id == name), None)

    def roles(self) -> dict[str, str]:
        return {worker.worker_id: worker.role for worker in self._directory.workers()}

    def flip(self, name: str) -> float:
        """Seconds until it was a worker of the other role."""
        before, began_s = self.worker(name), time.monotonic()
        assert before is not None and before.can_flip
        self._outbox.send(before.inbox, TakeRole(OTHER[before.role], before.incarnation))

        def has_changed() -> bool:
            now = self.worker(name)
            return now is not None and now.role == OTHER[before.role]

        wait_until(has_changed, f"{name} to change", 60.0)
        after = self.worker(name)
        assert after is not None and after.incarnation != before.incarnation
        return time.monotonic() - began_s

    def close(self) -> None:
        self._outbox.close()
        self._directory.close()
