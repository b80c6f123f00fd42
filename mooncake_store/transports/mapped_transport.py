"""Transport over shared memory: the node's segment is mapped and bytes are copied by memcpy.

For nodes of this host only (same /dev/shm). No cooperation of the node is needed, so a frozen
node is served; a dead one is refused, because its segment is nobody's any more: before and after
each batch the owner's lock on the file is looked at (segment.py).

Not here: deciding that a node is on this host (store.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.membership import NodeInfo
from mooncake_store.memory.segment import ByteArray, Segment, SegmentRefused
from mooncake_store.transports.transport import CountedTransport, LocalSpan, Span


class MappedTransport(CountedTransport):
    """See transport.Transport. Copies run outside the GIL (numpy releases it)."""

    name = "mapped"

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._segments: dict[str, tuple[str, Segment]] = {}  # node_id -> (incarnation, mapping)

    def register(self, buffer: ByteArray) -> None:
        """Nothing to do: any memory can be copied to."""

    def unregister(self, buffer: ByteArray) -> None:
        """Nothing to do."""

    def connect(self, node: NodeInfo) -> None:
        self.segment(node)

    def segment(self, node: NodeInfo) -> Segment:
        """The mapped segment of this incarnation of the node."""
        with self._lock:
            known = self._segments.get(node.node_id)
            if known is not None and known[0] == node.incarnation:
                return known[1]
            try:
                segment = Segment.open(node.segment_path, node.segment_bytes)
            except SegmentRefused as error:
                raise TransferFailed(f"node {node.node_id}: {error}") from error
            self._segments[node.node_id] = (node.incarnation, segment)
            if known is not None:
                known[1].close()
            return segment

    def _transfer(
        self,
        node: NodeInfo,
        remote: Sequence[Span],
        local: Sequence[LocalSpan],
        until_s: float,
        is_read: bool,
    ) -> None:
        segment = self.segment(node)
        _check_alive(node, segment)
        view = segment.view
        for there, (buffer, here) in zip(remote, local, strict=True):
            far = view[there.offset_bytes : there.offset_bytes + there.length_bytes]
            near = buffer[here.offset_bytes : here.offset_bytes + here.length_bytes]
            if is_read:
                near[:] = far
            else:
                far[:] = near
            if time.monotonic() > until_s:
                raise TransferTimeout(
                    f"node {node.node_id}: copying {len(remote)} spans through shared memory took "
                    "longer than its deadline: this host is short of CPU"
                )
        _check_alive(node, segment)

    @contextlib.contextmanager
    def owned(self, node: NodeInfo) -> Iterator[ByteArray]:
        """The node's whole segment, for copies of the caller's; its owner lives before and after.

        TransferFailed at the end when the node died meanwhile: what was read or written is void.
        """
        try:
            segment = self.segment(node)
            _check_alive(node, segment)
            yield segment.view
            _check_alive(node, segment)
        except TransferFailed as error:
            self._tally.failed(isinstance(error, TransferTimeout))
            raise

    def note(self, is_read: bool, moved_bytes: int, started_s: float) -> None:
        """Count what was moved under `owned`; started_s as of time.monotonic()."""
        self._tally.moved(is_read, moved_bytes, time.monotonic() - started_s)

    def pending_targets(self) -> list[LocalSpan]:
        """None, ever: the copies are ours and have stopped."""
        return []

    def disconnect(self, node_id: str) -> None:
        with self._lock:
            known = self._segments.pop(node_id, None)
        if known is not None:
            known[1].close()

    def close(self) -> None:
        for node_id in list(self._segments):
            self.disconnect(node_id)


def _check_alive(node: NodeInfo, segment: Segment) -> None:
    if not segment.is_owner_alive():
        raise TransferFailed(
            f"node {node.node_id} died: nobody owns {node.segment_path} any more; "
            "its blocks are lost"
        )
