"""The storage nodes as one worker sees them: who they are, how to reach them, who is out of order.

The directory is asked rarely: at start, for a name that is not known, and after a transfer failed.
A node whose transfer failed is left alone for BAD_NODE_S, so that one dead node costs one deadline
and not one per request; a new incarnation of it is used at once.

Not here: moving bytes (block_reader.py).
"""

from __future__ import annotations

import threading
import time

from mooncake_store.directory_client import DirectoryClient
from mooncake_store.mapped_transport import MappedTransport
from mooncake_store.membership import NodeInfo
from mooncake_store.nixl_transport import NixlTransport
from mooncake_store.segment import ByteArray
from mooncake_store.transport import Transport

BAD_NODE_S = 2.0
REFRESH_S = 0.02  # the directory is not asked for unknown or bad nodes more often than this
MODES = ("auto", "mapped", "nixl")


class KnownNodes:
    """node_id -> NodeInfo, and the transport for it. Thread-safe."""

    def __init__(self, directory: DirectoryClient, own_id: str, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"transports is {mode!r}; use one of {', '.join(MODES)}")
        self._directory = directory
        self._own_id = own_id
        self._mode = mode
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeInfo] = {}
        self._asked_s = 0.0
        self._bad: dict[str, tuple[str, float]] = {}  # node_id -> (incarnation, until_s)
        self.mapped = MappedTransport()
        self.nixl = None if mode == "mapped" else NixlTransport()
        self.refresh()

    def refresh(self) -> None:
        """Ask the directory; StoreUnavailable when it is gone."""
        asked_s = time.monotonic()
        nodes = {info.node_id: info for info in self._directory.nodes()}
        with self._lock:
            self._nodes, self._asked_s = nodes, asked_s
            gone = [name for name, (life, _) in self._bad.items() if not _lives(nodes, name, life)]
            for name in gone:
                del self._bad[name]

    def all(self) -> list[NodeInfo]:
        with self._lock:
            return list(self._nodes.values())

    def find(self, node_id: str) -> NodeInfo | None:
        """The node, or None when the directory does not know it."""
        return self._find(node_id)[0]

    def usable(self, node_id: str) -> NodeInfo | None:
        """The node, or None when it is unknown or this life of it has failed a moment ago."""
        info, is_bad = self._find(node_id)
        return None if is_bad else info

    def _find(self, node_id: str) -> tuple[NodeInfo | None, bool]:
        """The node, and whether it is bad; the directory is asked when that may change it."""
        for is_last in (False, True):
            with self._lock:
                info = self._nodes.get(node_id)
                life, until_s = self._bad.get(node_id, ("", 0.0))
                is_recent = time.monotonic() - self._asked_s < REFRESH_S
            is_bad = info is not None and life == info.incarnation and time.monotonic() < until_s
            if is_last or is_recent or (info is not None and not is_bad):
                break
            self.refresh()
        return info, is_bad

    def mark_bad(self, info: NodeInfo) -> None:
        with self._lock:
            self._bad[info.node_id] = (info.incarnation, time.monotonic() + BAD_NODE_S)

    def transport(self, info: NodeInfo) -> Transport | None:
        """How bytes of this node get here; None when they cannot in this mode."""
        if self._mode == "nixl":
            return self.nixl if info.agent_name else None
        if self._mode == "auto" and info.node_id != self._own_id and info.agent_name:
            return self.nixl
        own = self.find(self._own_id)
        return self.mapped if own is not None and own.host_id == info.host_id else None

    def register(self, buffer: ByteArray) -> None:
        if self.nixl is not None:
            self.nixl.register(buffer)

    def unregister(self, buffer: ByteArray) -> None:
        if self.nixl is not None:
            self.nixl.unregister(buffer)

    def transports(self) -> list[Transport]:
        return [self.mapped] if self.nixl is None else [self.mapped, self.nixl]

    def close(self) -> None:
        for transport in self.transports():
            transport.close()


def _lives(nodes: dict[str, NodeInfo], node_id: str, incarnation: str) -> bool:
    return node_id in nodes and nodes[node_id].incarnation == incarnation
