"""The contract of every transport: moves bytes between a node's segment and local memory.

A transport handles spans (runs of bytes), never block keys or blocks. Its contract, which
tests/mooncake_store/transports/test_transport_contract.py runs against each transport:

- A call moves all its spans. After an exception none of them may be trusted.
- A span outside the segment or its buffer raises TransferFailed before any byte moves.
- A call to a dead node raises TransferFailed soon. A call to a silent node raises TransferTimeout
  at its deadline.
- After TransferTimeout of a read, the local spans may still be written at any later time (NIXL
  cannot revoke a transfer). Do not reuse their memory while pending_targets() lists them.
- After TransferTimeout of a write, the *remote* spans may still be written. So the directory does
  not grant their slots again for some time (quarantine).
- Every method may be called from several threads; the GIL is released while bytes move.

Not here: the choice of a transport (known_nodes.py), the transports (mapped_transport.py,
nixl_transport.py, nic_transport.py, tcp_transport.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.records.membership import NodeInfo


class ByteSpan(NamedTuple):
    """A run of bytes in a segment or a buffer. (A frozen dataclass is 5 times slower to make.)"""

    offset_bytes: int
    length_bytes: int


LocalSpan = tuple[ByteArray, ByteSpan]  # a span of a registered uint8 buffer or of a view of one


def side_by_side(buffer: ByteArray, spans: Iterable[ByteSpan]) -> list[LocalSpan]:
    """Consecutive spans of `buffer`, from its start on, with the lengths of these spans."""
    found: list[LocalSpan] = []
    at = 0
    for span in spans:
        found.append((buffer, ByteSpan(at, span.length_bytes)))
        at += span.length_bytes
    return found


class TransferBatch(NamedTuple):
    """One call. A read moves remote[i] to local[i], a write moves local[i] to remote[i]."""

    node: NodeInfo
    remote: Sequence[ByteSpan]  # spans of the node's segment
    local: Sequence[LocalSpan]  # as many as `remote`; local[i] is as long as remote[i]
    until_s: float  # by time.monotonic()
    is_read: bool


@dataclass(slots=True)
class TransferCounters:
    """Totals of a transport since its construction. A call is counted once, when it ends."""

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    seconds: float = 0.0  # durations of successful calls, summed also if concurrent
    failures: int = 0  # TransferFailed, except timeouts
    timeouts: int = 0


def check_spans(node: NodeInfo, remote: Sequence[ByteSpan], local: Sequence[LocalSpan]) -> int:
    """The number of bytes to move. Raises TransferFailed if a span is outside its memory."""
    assert len(remote) == len(local), f"{len(remote)} remote spans, {len(local)} local ones"
    moved_bytes, segment_bytes = 0, node.segment_bytes
    for there, (buffer, here) in zip(remote, local, strict=True):
        remote_start, length_bytes = there
        local_start, local_length_bytes = here
        assert length_bytes == local_length_bytes, f"{there} and {here} differ in length"
        if remote_start < 0 or length_bytes < 0 or remote_start + length_bytes > segment_bytes:
            raise TransferFailed(
                f"{there} is outside node {node.node_id}'s segment of {segment_bytes} bytes; "
                "nothing was moved: look the block up again"
            )
        if local_start < 0 or local_start + length_bytes > buffer.nbytes:
            raise TransferFailed(
                f"{here} is outside a local buffer of {buffer.nbytes} bytes; nothing was moved"
            )
        moved_bytes += length_bytes
    return moved_bytes


def left_to_write_s(until_s: float) -> float:
    """Seconds until `until_s` (time.monotonic()). Raises TransferTimeout if it has passed."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TransferTimeout("the deadline passed before everything was written")
    return left_s


class TransferTally:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = TransferCounters()

    def moved(self, is_read: bool, moved_bytes: int, seconds: float) -> None:
        with self._lock:
            self._counters.seconds += seconds
            if is_read:
                self._counters.reads += 1
                self._counters.read_bytes += moved_bytes
            else:
                self._counters.writes += 1
                self._counters.write_bytes += moved_bytes

    def failed(self, is_timeout: bool) -> None:
        with self._lock:
            if is_timeout:
                self._counters.timeouts += 1
            else:
                self._counters.failures += 1

    def counters(self) -> TransferCounters:
        with self._lock:
            return replace(self._counters)


class Transport:
    """Moves bytes between a node's segment and local memory; see the module docstring. This class
    checks spans, counts, and maps both directions to `_transfer`; subclasses do the rest."""

    name: str

    def __init__(self) -> None:
        self._tally = TransferTally()

    @property
    def counters(self) -> TransferCounters:
        return self._tally.counters()

    def _transfer(self, batch: TransferBatch) -> None:
        """Move the whole batch. Its spans have been checked."""
        raise NotImplementedError

    def disconnect(self, node_id: str) -> bool:
        """End connections to this node, if any. False: a connection is busy; call again later."""
        raise NotImplementedError

    def close(self) -> None:
        """Release everything. A second call has no effect."""
        raise NotImplementedError

    def register(self, buffer: ByteArray) -> None:
        """Register local uint8 memory for transfers, once per buffer. The caller keeps the memory
        alive. Transports that need no registration ignore the call."""

    def unregister(self, buffer: ByteArray) -> None:
        """Forget a buffer without transfers in flight. Unknown buffers are accepted."""

    def pending_targets(self) -> list[LocalSpan]:
        """Local spans that timed-out reads may still write. The call also polls these reads. The
        result is [] for a transport that writes nothing after the deadline."""
        return []

    def keeps_order(self, node: NodeInfo) -> bool:
        """True if the spans of one transfer with this node move in order: each span is complete
        before the next is read or written."""
        return False

    def read(
        self,
        node: NodeInfo,
        sources: Sequence[ByteSpan],
        targets: Sequence[LocalSpan],
        deadline_s: float,
    ) -> None:
        """sources[i] of the node's segment -> targets[i], within `deadline_s` from now."""
        until_s = time.monotonic() + deadline_s
        self._move(TransferBatch(node, sources, targets, until_s, is_read=True))

    def write(
        self,
        node: NodeInfo,
        sources: Sequence[LocalSpan],
        targets: Sequence[ByteSpan],
        deadline_s: float,
    ) -> None:
        """sources[i] -> targets[i] of the node's segment, within `deadline_s` from now."""
        until_s = time.monotonic() + deadline_s
        self._move(TransferBatch(node, targets, sources, until_s, is_read=False))

    def _move(self, batch: TransferBatch) -> None:
        started_s = time.monotonic()
        try:
            moved_bytes = check_spans(batch.node, batch.remote, batch.local)
            if moved_bytes:
                self._transfer(batch)
        except TransferFailed as error:
            self._tally.failed(isinstance(error, TransferTimeout))
            raise
        self._tally.moved(batch.is_read, moved_bytes, time.monotonic() - started_s)
