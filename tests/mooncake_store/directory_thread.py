"""A directory with its server, run by a thread of the test's own process."""

from __future__ import annotations

import threading
from typing import Any

from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.server import DirectoryServer

ANY_PORT = "tcp://127.0.0.1:*"


class DirectoryThread:
    def __init__(
        self,
        directory: Directory | None = None,
        address: str = ANY_PORT,
        events: str = ANY_PORT,
        **options: Any,
    ) -> None:
        self.server = DirectoryServer(directory or Directory(1), address, events, **options)
        self.address = self.server.address
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """It answers no more; its sockets stay."""
        self.server.stop()
        self._thread.join()

    def close(self) -> None:
        self.stop()
        self.server.close()
