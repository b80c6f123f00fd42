"""The control socket of a storage node: requests in, answers out, work in a few threads.

One thread owns the ROUTER socket and moves messages only, so a slow disk never delays a ping. Work
goes to a small pool; at most REQUESTS_MAX wait, further ones are refused at once, because a client
that waits in vain recomputes its blocks later than it could. An answer whose client has gone is
dropped by ZeroMQ.

Not here: what the verbs do (node_verbs.py), the messages (mooncake_store/wire/node_protocol.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import zmq

from mooncake_store.errors import RequestInvalid, StoreUnavailable
from mooncake_store.wire.node_protocol import AnyControl
from mooncake_store.wire.request_reply import Responder, listening

THREADS = 4
REQUESTS_MAX = 256  # accepted and not yet answered


class NodeControl:
    """Listens from the start, answers from serve() until close()."""

    def __init__(self, address: str) -> None:
        """RequestInvalid when nothing can listen there. Port 0 takes a free one: see `address`."""
        self._responder: Responder[AnyControl] = Responder(AnyControl, "node")
        self._context = zmq.Context()
        try:
            self._socket = listening(self._context, zmq.ROUTER, address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RequestInvalid(
                f"cannot listen at --control {address}: {error}; use ipc://PATH with a path of at "
                "most 107 characters, or tcp://HOST:PORT"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._path = address.removeprefix("ipc://") if address.startswith("ipc:///") else ""
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="control")
        self._answers: deque[list[bytes]] = deque()
        self._waiting = 0
        self._lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def serve(self, answer: Callable[[AnyControl, float], object]) -> None:
        """Answer with `answer(request, when it came)`, from several threads."""
        self._answer = answer
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests accepted and not yet answered."""
        return self._waiting

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        while not self._is_closing:
            poller.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            while self._answers:
                self._send(self._answers.popleft())
            with contextlib.suppress(zmq.Again):
                while True:
                    self._accept(self._socket.recv_multipart(zmq.NOBLOCK))

    def _accept(self, frames: list[bytes]) -> None:
        sender, *rest = frames
        with self._lock:
            is_full = self._waiting >= REQUESTS_MAX
            self._waiting += not is_full
        if is_full:
            busy = StoreUnavailable(f"{REQUESTS_MAX} requests wait at this node: recompute instead")
            self._send([sender, *self._responder.refusal(rest, busy)])
            return
        self._pool.submit(self._work, sender, rest, time.monotonic())

    def _work(self, sender: bytes, frames: list[bytes], came_s: float) -> None:
        answer = self._responder.reply(frames, lambda request: self._answer(request, came_s))
        self._answers.append([sender, *answer])
        with self._lock:
            self._waiting -= 1
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._wakeup, 1)

    def _send(self, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Stop listening; answers of work that is under way are lost. Twice is harmless."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wakeup, 1)
        if self._thread is not None:
            self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
        while self._answers:  # `leave` is answered before the node goes
            self._send(self._answers.popleft())
        self._context.destroy(linger=200)
        os.close(self._wakeup)
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
