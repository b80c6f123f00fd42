"""Transport over plain TCP, for hosts where NIXL cannot load.

A connection serves one transfer at a time. So each thread that moves bytes takes a connection from
the node's pool or opens a new one. It returns the connection only after a successful transfer. At a
deadline or an error the connection is closed. Nothing can then arrive in the targets of a read, so
pending_targets() is always empty. The close is a reset, so that the node stops a write before it
has read the bytes that are still queued (tcp_server.py).

A pooled connection may have died. So when it breaks, one more attempt is made on a new connection.
Reads and writes may be repeated, because a transfer moves the same bytes to the same address again.

The kernel chooses the size of socket buffers, because its auto-tuning exceeds a fixed size
(net.ipv4.tcp_rmem). A fixed size of 4 MiB made no difference on one host.

Not here: the frames (tcp_frames.py), the node's side (tcp_server.py).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass, field

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.keys.tls import TlsContexts, contexts_of_process, refusal_words
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports import tcp_frames as frames
from mooncake_store.transports.tcp_frames import FrameInvalid, FrameKind, LimitReached
from mooncake_store.transports.tcp_tls import PLAIN_CLIENT, TransferRefused, client_handshake
from mooncake_store.transports.transport import TransferBatch, Transport

IDLE_MAX = 8  # connections kept per node
CONNECT_S = 5.0  # for connect(); a transfer has its own deadline
# Total time and pause of the retries after the answer CROWDED. The server makes room by closing
# unauthenticated connections older than 0.5 s (tcp_server.py).
CROWDED_S_MAX, CROWDED_PAUSE_S = 2.0, 0.05


class ConnectionsFull(TransferFailed):
    """The node is at its limit of connections."""


@dataclass(slots=True)
class _Pool:
    """Idle connections to one incarnation of a node."""

    incarnation: str
    idle: list[socket.socket] = field(default_factory=list)


class TcpTransport(Transport):
    """See transport.Transport. Bytes move outside the GIL."""

    name = "tcp"

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._pools: dict[str, _Pool] = {}  # by node_id
        self._is_closed = False
        self._tls = contexts_of_process()

    def connect(self, node: NodeInfo) -> None:
        until_s = time.monotonic() + CONNECT_S
        try:
            self._give(node, self._take(node) or _admitted(node, until_s, self._tls))
        except (OSError, FrameInvalid) as error:
            raise _failure(node, error, 0, is_read=True) from error

    def _transfer(self, batch: TransferBatch) -> None:
        """Use a pooled connection, or a new one if that is broken."""
        pooled = self._take(batch.node)
        try:
            if pooled is not None:
                with contextlib.suppress(ConnectionError):
                    self._ask(pooled, batch)
                    return
            self._ask(_admitted(batch.node, batch.until_s, self._tls), batch)
        except (OSError, FrameInvalid) as error:
            raise _failure(batch.node, error, len(batch.remote), batch.is_read) from error

    def _ask(self, connection: socket.socket, batch: TransferBatch) -> None:
        """Run the whole transfer on this connection, then return the connection to the pool. After
        an error the connection is closed."""
        node, remote, local, until_s, is_read = batch
        try:
            for start in range(0, len(remote), frames.SPANS_MAX):
                spans = remote[start : start + frames.SPANS_MAX]
                pieces = [
                    buffer.data[offset : offset + length]
                    for buffer, (offset, length) in local[start : start + frames.SPANS_MAX]
                ]
                kind = FrameKind.READ if is_read else FrameKind.WRITE
                request = frames.pack(kind, len(spans)) + frames.pack_spans(spans)
                head = [memoryview(request)]
                frames.send(connection, head if is_read else head + pieces, until_s)
                moved_bytes = sum(piece.nbytes for piece in pieces) if is_read else 0
                _expect_done(connection, node, moved_bytes, until_s)
                if is_read:
                    frames.receive(connection, pieces, until_s)
        except BaseException:
            _reset(connection)
            raise
        self._give(node, connection)

    def _take(self, node: NodeInfo) -> socket.socket | None:
        """An idle connection to this incarnation; connections to other incarnations are closed."""
        with self._lock:
            if self._is_closed:
                raise TransferFailed("this transport is closed")
            pool = self._pools.get(node.node_id)
            if pool is None or pool.incarnation != node.incarnation:
                old, self._pools[node.node_id] = pool, _Pool(node.incarnation)
                pool = self._pools[node.node_id]
                _close(old.idle if old else [])
            return pool.idle.pop() if pool.idle else None

    def _give(self, node: NodeInfo, connection: socket.socket) -> None:
        with self._lock:
            pool = self._pools.get(node.node_id)
            is_current = pool is not None and pool.incarnation == node.incarnation
            if pool is not None and is_current and len(pool.idle) < IDLE_MAX:
                pool.idle.append(connection)
                return
        connection.close()

    def disconnect(self, node_id: str) -> bool:
        with self._lock:
            pool = self._pools.pop(node_id, None)
        _close(pool.idle if pool else [])
        return True  # connections in use are closed when they are returned

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            _close(pool.idle)


def _admitted(node: NodeInfo, until_s: float, tls: TlsContexts | None) -> socket.socket:
    """As _opened(), with retries while unauthenticated connections take all room (CROWDED)."""
    again_until_s = min(until_s, time.monotonic() + CROWDED_S_MAX) - CROWDED_PAUSE_S
    while True:
        try:
            return _opened(node, until_s, tls)
        except LimitReached as error:
            if error.kind is not FrameKind.CROWDED or time.monotonic() >= again_until_s:
                raise
        time.sleep(CROWDED_PAUSE_S)


def _opened(node: NodeInfo, until_s: float, tls: TlsContexts | None) -> socket.socket:
    """A new connection, accepted by the node. Raises OSError, FrameInvalid or TransferFailed."""
    if not node.data_address:
        raise TransferFailed(f"node {node.node_id} serves no plain TCP; start it with --data")
    host, _, port = node.data_address.rpartition(":")
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline passed")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=left_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            connection = client_handshake(connection, tls, until_s)
        token = node.incarnation.encode()
        hello = memoryview(frames.pack(FrameKind.HELLO, len(token)) + token)
        frames.send(connection, [hello], until_s)
        _expect_done(connection, node, 0, until_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _expect_done(
    connection: socket.socket, node: NodeInfo, follows_bytes: int, until_s: float
) -> None:
    kind, count = frames.unpack(frames.receive_bytes(connection, frames.HEADER.size, until_s))
    if kind is FrameKind.REFUSED:
        text = frames.receive_bytes(connection, min(count, frames.TEXT_BYTES_MAX), until_s)
        said = text.decode(errors="replace")
        kind_of_error = TransferRefused if said == PLAIN_CLIENT else TransferFailed
        raise kind_of_error(f"node {node.node_id} at {node.data_address} rejects: {said}")
    if kind in (FrameKind.CROWDED, FrameKind.FULL):
        raise LimitReached(kind, count)
    if kind is not FrameKind.DONE or count != follows_bytes:
        raise FrameInvalid(
            f"expected DONE with {follows_bytes} bytes, received {kind.name} {count}"
        )


def _failure(node: NodeInfo, error: Exception, spans: int, is_read: bool) -> TransferFailed:
    where = f"node {node.node_id} at {node.data_address}"
    if isinstance(error, ssl.SSLError) and not isinstance(error, TimeoutError):
        return TransferRefused(refusal_words(where, error))
    if isinstance(error, TimeoutError):
        late = "nothing more will arrive" if is_read else "the node may still write some of them"
        return TransferTimeout(
            f"{where} did not answer within the deadline (TCP, {spans} spans): it is frozen, cut "
            f"off or overloaded; the connection is closed, {late}"
        )
    if isinstance(error, LimitReached):
        return ConnectionsFull(f"{where} accepts no further connection: {error}")
    return TransferFailed(f"{where}: {error}; is the node gone or cut off?")


def _reset(connection: socket.socket) -> None:
    """Close by a reset, because a normal close would first send the queued bytes of a write."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
