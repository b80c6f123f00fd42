"""A directory without a server, for tests of the store: the production Directory, called directly.

It has the methods of DirectoryClient and gives every call the real clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import EpochPassed, StoreUnavailable
from mooncake_store.records.membership import NodeInfo


class InProcessDirectory:
    """Stands where a DirectoryClient would."""

    is_elected = False

    def __init__(self) -> None:
        self.directory = Directory(epoch=1)
        self.is_down = False
        self._lock = threading.Lock()
        self.asked: list[str] = []  # the verbs, in order

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self.directory, verb)

        def ask(*arguments: Any, **named: Any) -> Any:
            if self.is_down:
                raise StoreUnavailable("the directory is down")
            with self._lock:  # as the server: one request after the other
                self.asked.append(verb)
                return method(*arguments, **named, now_s=time.monotonic())

        return ask

    def allocate(
        self,
        node_id: str,
        keys: Sequence[bytes],
        owner: str,
        lease_s: float,
        ephemeral: bool = False,
        size_bytes: int = 0,
        tenant: str = "",
    ) -> Any:
        return self.__getattr__("allocate")(
            node_id, keys, owner, lease_s, ephemeral, size_bytes=size_bytes, tenant=tenant
        )

    def commit(
        self, node_id: str, blocks: Sequence[Any], owner: str, lease_s: float, epoch: int = 0
    ) -> Any:
        try:
            return self.__getattr__("commit")(node_id, blocks, owner, lease_s, epoch=epoch)
        except EpochPassed:
            return [False] * len(blocks)

    def may_write(self, *_: object) -> bool:
        return True  # nobody is elected here

    def up(self, info: NodeInfo) -> NodeInfo:
        """Register a node."""
        self.register_node(info)
        return info
