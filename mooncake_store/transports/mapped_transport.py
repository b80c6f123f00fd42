"""Transport over shared memory: the node's segment is mapped, and bytes are copied by memcpy.

It reaches only nodes of this host (same /dev/shm). The node takes no part in a copy, so blocks of a
frozen node can be read and written. A transfer with a dead node fails, because before and after
each batch the transport checks the node's lock on its segment file (memory/segment.py).

The memory of a dead node stays allocated until the last process has unmapped it, and the restarted
node may need that memory. So a thread checks the locks four times a second and unmaps segments of
dead nodes. A view in use keeps its mapping until the view is dropped.

Not here: deciding that a node is on this host (known_nodes.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.segment_file import SegmentRefused
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.transport import TransferBatch, Transport

log = logging.getLogger("mooncake_store.store")
LOOK_S = 0.25  # seconds between two checks of the locks; a check takes 1 us per segment


class MappedTransport(Transport):
    """See transport.Transport. Copies run outside the GIL (numpy releases it)."""

    name = "mapped"

    def __init__(self, before_close: Callable[[Segment], None] = lambda segment: None) -> None:
        """`before_close`: called before a segment is unmapped, in the thread that unmaps it."""
        super().__init__()
        self._before_close = before_close
        self._lock = threading.Lock()
        self._segments: dict[str, tuple[str, Segment]] = {}  # node_id -> (incarnation, mapping)
        self._stop = threading.Event()
        self._watch: threading.Thread | None = None  # started with the first mapping

    def segment(self, node: NodeInfo) -> Segment:
        with self._lock:
            known = self._segments.get(node.node_id)
            if known is not None and known[0] == node.incarnation:
                return known[1]
            try:
                segment = Segment.open(node.segment_path, node.segment_bytes)
            except SegmentRefused as error:
                raise TransferFailed(f"node {node.node_id}: {error}") from error
            self._segments[node.node_id] = (node.incarnation, segment)
            if self._watch is None:
                self._watch = threading.Thread(target=self._look, name="unmap", daemon=True)
                self._watch.start()
        if known is not None:
            self._close(known[1])
        return segment

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self.drop_dead()
            except Exception:  # Catch all: the next round must look at the other segments
                log.exception("unmapping failed")

    def drop_dead(self) -> list[str]:
        """Unmap every segment whose node is dead; returns the ids of these nodes."""
        with self._lock:
            dead = {
                node_id: segment
                for node_id, (_, segment) in self._segments.items()
                if not segment.is_owner_alive()
            }
            for node_id in dead:
                del self._segments[node_id]
        for node_id, segment in dead.items():
            log.warning("node_id=%s died, its memory is unmapped", node_id)
            self._close(segment)
        return list(dead)

    def _close(self, segment: Segment) -> None:
        self._before_close(segment)
        segment.close()

    def _transfer(self, batch: TransferBatch) -> None:
        node, remote = batch.node, batch.remote
        segment = self.segment(node)
        view = _living_view(node, segment)
        for (offset, length), (buffer, (local_offset, _)) in zip(remote, batch.local, strict=True):
            remote_bytes = view[offset : offset + length]
            local_bytes = buffer[local_offset : local_offset + length]
            if batch.is_read:
                local_bytes[:] = remote_bytes
            else:
                remote_bytes[:] = local_bytes
            if time.monotonic() > batch.until_s:
                raise TransferTimeout(
                    f"node {node.node_id}: copying {len(remote)} spans through shared memory took "
                    "longer than its deadline: this host is short of CPU"
                )
        _check_alive(node, segment)

    @contextlib.contextmanager
    def owned(self, node: NodeInfo) -> Iterator[ByteArray]:
        """The node's whole segment, for the caller to copy. Raises TransferFailed if the node is
        dead at the start or at the end; bytes that were read or written are void then."""
        try:
            segment = self.segment(node)
            yield _living_view(node, segment)
            _check_alive(node, segment)
        except TransferFailed as error:
            self._tally.failed(isinstance(error, TransferTimeout))
            raise

    def note(self, is_read: bool, moved_bytes: int, started_s: float) -> None:
        """Count bytes moved under `owned`; started_s by time.monotonic()."""
        self._tally.moved(is_read, moved_bytes, time.monotonic() - started_s)

    def disconnect(self, node_id: str) -> bool:
        with self._lock:
            known = self._segments.pop(node_id, None)
        if known is not None:
            self._close(known[1])
        return True

    def close(self) -> None:
        self._stop.set()
        if self._watch is not None:
            self._watch.join()
        for node_id in list(self._segments):
            self.disconnect(node_id)


def _living_view(node: NodeInfo, segment: Segment) -> ByteArray:
    """The mapped memory; TransferFailed if its owner is dead."""
    _check_alive(node, segment)
    view = segment.view_if_open()
    if view is None:
        raise TransferFailed(f"node {node.node_id} died: its memory was unmapped")
    return view


def _check_alive(node: NodeInfo, segment: Segment) -> None:
    if not segment.is_owner_alive():
        raise TransferFailed(
            f"node {node.node_id} died: no process owns {node.segment_path} any more; "
            "its blocks are lost"
        )
