"""A storage node's control socket as clients see it: one method per verb, synchronous, any thread.

Each call has a socket of its own while it lasts (a few are kept for the next calls), so a slow load
does not hold up a ping. When no answer came in time the call raises StoreUnavailable and its socket
is thrown away with what was queued; what the node was asked may still happen. For `load` that means
bytes may still arrive in the segment: let the lease on those slots run out, do not abandon them.

Not here: which blocks to ask for (store.py), the messages (mooncake_store/wire/node_protocol.py).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import zmq

from mooncake_store.errors import StoreUnavailable
from mooncake_store.records.blocks import Copy
from mooncake_store.wire import node_protocol as control
from mooncake_store.wire import protocol
from mooncake_store.wire.node_protocol import NodeStats, Restore
from mooncake_store.wire.protocol import Kind

T = TypeVar("T")
Decoder = msgspec.msgpack.Decoder

TIMEOUT_S = 2.0  # for verbs that move no bytes
MARGIN_S = 1.0  # the node keeps its deadline by itself; this long its answer may take to get here
IDLE_SOCKETS_MAX = 4

_NONE = Decoder(type(None))
_TEXT = Decoder(str)
_BOOLS = Decoder(list[bool])
_STATS = Decoder(NodeStats)


class NodeClient:
    """The verbs of one storage node. Thread-safe."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._idle: list[zmq.Socket[bytes]] = []
        self._number = 0
        self._is_closed = False

    def ping(self, timeout_s: float = TIMEOUT_S) -> str:
        """The incarnation of the node that answers."""
        return self._ask(control.Ping(), _TEXT, timeout_s)

    def load(self, blocks: Sequence[Restore], deadline_s: float) -> list[bool]:
        """Read these from the SSD into the segment. True: whole, verified, its header is READY.

        False: it is not there, or not whole (then the directory knows already), or not in time.
        Slots with False may be abandoned: nothing is in flight. StoreUnavailable, TransferTimeout:
        bytes may still arrive.
        """
        request = control.Load(list(blocks), deadline_s)
        return self._ask(request, _BOOLS, deadline_s + MARGIN_S)

    def fetch(self, keys: Sequence[bytes], copies: Sequence[Copy], deadline_s: float) -> list[bool]:
        """Have the node copy these blocks of other nodes; which of them it has afterwards.

        The caller leases the copies meanwhile.
        """
        request = control.Fetch(list(keys), list(copies), deadline_s)
        return self._ask(request, _BOOLS, deadline_s + MARGIN_S)

    def stats(self, timeout_s: float = TIMEOUT_S) -> NodeStats:
        return self._ask(control.AskNodeStats(), _STATS, timeout_s)

    def leave(self, timeout_s: float = TIMEOUT_S) -> None:
        """The node deregisters and ends."""
        self._ask(control.Leave(), _NONE, timeout_s)

    def _ask(self, request: control.AnyControl, decoder: Decoder[T], timeout_s: float) -> T:
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            if self._is_closed:
                raise StoreUnavailable(f"this client of the node at {self.address} is closed")
            self._number += 1
            number = self._number
            socket = self._idle.pop() if self._idle else self._connect()
        frames = [protocol.pack_header(Kind.REQUEST, number), msgspec.msgpack.encode(request)]
        reply = self._exchange(socket, frames, number, deadline_s)
        with self._lock:
            if reply is None or self._is_closed or len(self._idle) >= IDLE_SOCKETS_MAX:
                socket.close(linger=0)
            else:
                self._idle.append(socket)
        if reply is None:
            verb = request.__struct_config__.tag
            raise StoreUnavailable(
                f"the storage node at {self.address} did not answer {verb} within {timeout_s:g} s; "
                "is it running, and can this host reach the address?"
            )
        return protocol.result_of(reply, decoder, f"the storage node at {self.address}")

    def _exchange(
        self, socket: zmq.Socket[bytes], frames: list[bytes], number: int, deadline_s: float
    ) -> list[bytes] | None:
        with contextlib.suppress(zmq.ContextTerminated):  # closed by another thread
            socket.send_multipart(frames)
            while (left_s := deadline_s - time.monotonic()) > 0:
                if socket.poll(math.ceil(left_s * 1000)):
                    reply = socket.recv_multipart()
                    if protocol.number_of(reply[0]) == number:
                        return reply
        return None

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.connect(self.address)
        return socket

    def close(self) -> None:
        """Twice is harmless. A call under way in another thread ends with StoreUnavailable."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for socket in self._idle:
                socket.close(linger=0)
            self._idle.clear()
        self._context.term()  # wakes the calls under way, which close their own sockets

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
