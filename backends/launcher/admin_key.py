"""The operator's admin key, which protects administrative APIs on Triton's public ports.

A client that registers shared memory with Triton can read and write the storage nodes' segments. A
client that unloads models, traces or logs can end serving or fill a disk. These APIs therefore
require the admin key. Health, metadata, configuration, inference and statistics stay open.

Each launch makes a new key and keeps it in a file that only the operator can read. Triton accepts
the key only as an argument. The key therefore protects against the network, but not against users
who can list the processes of this host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from backends.launch_secret import make_secret

RESTRICTED_APIS = ("shared-memory", "model-repository", "trace", "logging")
# A worker's Triton serves only readiness probes and the inference calls of frontends.
WORKER_RESTRICTED_APIS = (*RESTRICTED_APIS, "metadata", "model-config", "statistics")
HEADER = "mooncake-admin-key"


class AdminKey:
    """The admin key of one launch, written to the file `path` for the operator."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = make_secret()

    def write(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(self._key)

    def remove(self) -> None:
        """Remove the file, unless another launch has replaced it."""
        with contextlib.suppress(OSError):  # also if the state folder is not a folder
            if self._path.read_text() == self._key:
                self._path.unlink()

    def for_clients(self, open_apis: Collection[str]) -> list[str]:
        """The arguments of the frontend's Triton."""
        closed = [api for api in RESTRICTED_APIS if api not in open_apis]
        if not closed:
            return []
        return [f"--http-restricted-api={self._rule(closed)}", *self._grpc(closed)]

    def for_worker(self) -> list[str]:
        return self._grpc(WORKER_RESTRICTED_APIS)

    def _grpc(self, apis: Sequence[str]) -> list[str]:
        return [f"--grpc-restricted-protocol={self._rule(apis)}"]

    def _rule(self, apis: Sequence[str]) -> str:
        return f"{','.join(apis)}:{HEADER}={self._key}"


def problems(open_apis: Collection[str]) -> list[str]:
    known = ", ".join(RESTRICTED_APIS)
    return [
        f"--open-api {api}: use one of {known}" for api in open_apis if api not in RESTRICTED_APIS
    ]
