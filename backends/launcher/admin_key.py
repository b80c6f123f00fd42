"""The operator's admin key: who may call what on the public ports of Triton.

The admin key opens the APIs of Triton that are closed to clients. Who may register shared
memory with Triton can read and write the storage nodes' segments; who may unload models, trace or
log can end serving or fill a disk. So on the public ports these ask for a key, made at each start
and kept in a file of the operator's; health, metadata, configuration, inference and statistics stay
open. Triton takes the key as an argument only, so it keeps out the network, not who may list the
processes of this host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from backends.launch_secret import make_secret

RESTRICTED_APIS = ("shared-memory", "model-repository", "trace", "logging")
# A worker's Triton is asked whether it is ready, and called by its frontend; nothing else.
WORKER_RESTRICTED_APIS = (*RESTRICTED_APIS, "metadata", "model-config", "statistics")
HEADER = "mooncake-admin-key"


class AdminKey:
    """Of one launch; `path` tells it to the operator."""

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
        """Unless it is by now another launch's."""
        with contextlib.suppress(OSError):  # also where the state folder is none
            if self._path.read_text() == self._key:
                self._path.unlink()

    def for_clients(self, open_apis: Collection[str]) -> list[str]:
        """Arguments of the Triton that clients call."""
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
