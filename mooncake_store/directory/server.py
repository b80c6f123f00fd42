"""Server loop of a Directory: one thread, one loop.

A turn answers waiting requests (ROUTER and Unix sockets), advances the directory's clock (`tick`),
and publishes all changes as one message of the event stream (PUB socket). A heartbeat is sent every
second, and at once after a new subscription. It has the number of the latest event, so a subscriber
that missed the last events detects the gap before the next change.

Not here: the effect of a request (directory.py), messages (wire/), options (__main__.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import zmq

from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.durable_verbs import DurableVerb, DurableVerbs
from mooncake_store.directory.metrics import DirectoryCollector
from mooncake_store.errors import StoreError, StoreUnavailable
from mooncake_store.keys.curve import AddressUnguarded, DirectoryKey
from mooncake_store.process.metrics_page import Latencies, MetricsPage
from mooncake_store.process.self_check import SelfCheck
from mooncake_store.records.events import Event, NodeDown, NodeUp, WorkerDown, WorkerUp
from mooncake_store.wire import directory_protocol as protocol
from mooncake_store.wire.framing import MessageKind, pack_header
from mooncake_store.wire.request_reply import Later, Responder, listening
from mooncake_store.wire.unix_socket import UnixListener, direct_path

TICK_S = 0.1  # interval of Directory.tick
HEARTBEAT_S = 1.0  # interval of heartbeats
REQUESTS_PER_TURN_MAX = 1_024  # ZeroMQ requests per turn, so that events are published under load
TURN_S_MAX = 1.0  # see TurnClock

log = logging.getLogger(__name__)


class AddressTaken(StoreError):
    """The server cannot bind the given address."""


class TurnClock:
    """Clock of the server loop, which advances at most TURN_S_MAX per reading.

    If this process was stopped for a while (SIGSTOP, a frozen VM), the reports of nodes and workers
    wait unread in the socket, and their senders are alive. So the clock advances at most TURN_S_MAX
    for such a stop, and the reports are read before a node or worker times out.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._read_s = monotonic()
        self._now_s = 0.0

    def now_s(self) -> float:
        read_s = self._monotonic()
        self._now_s += min(read_s - self._read_s, TURN_S_MAX)
        self._read_s = read_s
        return self._now_s


class DirectoryServer:
    """A Directory with sockets for requests and events. Raises AddressTaken, AddressUnguarded."""

    def __init__(
        self,
        directory: Directory,
        address: str,
        events_address: str,
        is_self_checked: bool = False,
        may_serve: Callable[[], bool] = lambda: True,
        durable: DurableVerbs | None = None,
    ) -> None:
        """`may_serve` is called before each action; once false, this server stops (election.py).
        `durable` carries out verbs whose effect outlives this directory. The server closes it."""
        self.directory = directory
        self._may_serve = may_serve
        self._durable = durable
        self._self_check = SelfCheck(directory.check, is_self_checked)
        self._clock = TurnClock()
        self._responder: Responder[protocol.AnyRequest]
        self._responder = Responder(protocol.VERBS, "directory")
        self._encoder = msgspec.msgpack.Encoder()
        self._published = directory.sequence
        self._tick_due_s = self._heartbeat_due_s = 0.0
        self._collector: DirectoryCollector | None = None
        self._latencies: Latencies | None = None
        self._is_stopping = False
        self._context = zmq.Context()
        self._paths: list[str] = []
        self._direct: UnixListener | None = None
        self._requests, self.address = self._bound(zmq.ROUTER, address)
        path = direct_path(address)
        self._direct = UnixListener(path, self.answer) if path else None
        # XPUB is a PUB socket that also reports new subscribers.
        self._subscribers, self.events_address = self._bound(zmq.XPUB, events_address)
        self._key = DirectoryKey([self._requests, self._subscribers])

    def _bound(self, kind: int, address: str) -> tuple[zmq.Socket[bytes], str]:
        try:
            refuse_second_server(address)
            bound, where = listening(self._context, kind, address, is_directory=True)
        except AddressUnguarded:
            self.close()
            raise
        except (zmq.ZMQError, AddressTaken) as error:
            self.close()
            raise AddressTaken(f"cannot listen at {address}: {error}") from error
        if kind == zmq.XPUB:
            bound.setsockopt(zmq.XPUB_VERBOSE, 1)
        if address.startswith("ipc://"):
            self._paths.append(address.removeprefix("ipc://"))
        return bound, where

    def show_metrics(self, port: int, host: str) -> MetricsPage:
        """Serve this directory's metrics to Prometheus, updated once a second."""
        self._collector = DirectoryCollector()
        self._latencies = Latencies(
            "mooncake_directory_request_seconds", "Seconds from reading a request to its answer."
        )
        return MetricsPage(port, [self._collector, self._latencies], host)

    def stop(self) -> None:
        """Leave `run` after this turn. Safe in a signal handler."""
        self._is_stopping = True

    def run(self) -> None:
        """Serve until `stop`, or until this directory may not serve any more."""
        while not self._is_stopping and self._may_serve():
            left_s = min(self._tick_due_s, self._heartbeat_due_s) - self._clock.now_s()
            ready = zmq.zmq_poll(self._polled(), max(0, int(left_s * 1000) + 1))
            self.turn([fd for fd, _ in ready if isinstance(fd, int)])
        if not self._may_serve():  # reject the waiting requests at once
            self.turn([fd for fd, _ in zmq.zmq_poll(self._polled(), 0) if isinstance(fd, int)])

    def _polled(self) -> list[tuple[zmq.Socket[bytes] | int, int]]:
        files = self._direct.files() if self._direct else {}
        return [
            (self._requests, zmq.POLLIN),
            (self._subscribers, zmq.POLLIN),
            *((fd, zmq.POLLIN | (zmq.POLLOUT * writes)) for fd, writes in files.items()),
            *([(self._durable.wakeup, zmq.POLLIN)] if self._durable else []),
        ]

    def turn(self, ready: Sequence[int] = ()) -> None:
        """Answer waiting requests, advance the clock, publish changes. `ready`: the ready
        descriptors of Unix sockets and of `durable`."""
        if self._direct is not None and ready:
            self._direct.serve(list(ready))
        for _ in range(REQUESTS_PER_TURN_MAX):
            try:
                frames = self._requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            reply = self.answer(frames[1:])
            if isinstance(reply, Later):
                reply.then(partial(self._send_reply, frames[0]))
            else:
                self._send_reply(frames[0], reply)
        if not self._may_serve():
            return
        if self._durable is not None and self._durable.wakeup in ready:
            self._durable.turn(self._responder, self._clock.now_s())
        now_s = self._clock.now_s()
        if now_s >= self._tick_due_s:
            self.directory.tick(now_s)
            self._tick_due_s = now_s + TICK_S
            self._self_check.run(now_s)
        self._publish()
        if self._has_new_subscriber() or now_s >= self._heartbeat_due_s:
            self._heartbeat_due_s = now_s + HEARTBEAT_S
            self._key.renew(now_s)
            beat = protocol.EventHeartbeat(self.directory.epoch, self.directory.sequence)
            self._send_event(MessageKind.HEARTBEAT, beat)
            if self._collector is not None:
                self._collector.update(self.directory.stats(now_s), len(self._key.silent))

    def _send_reply(self, sender: bytes, reply: list[bytes]) -> None:
        self._requests.send_multipart([sender, *reply])

    def answer(self, frames: list[bytes]) -> list[bytes] | Later:
        """The frames of the reply, with a result or an error; Later: the reply follows."""
        if not self._may_serve():
            moved = StoreUnavailable("this directory does not lead any more: find the leader")
            return self._responder.refusal(frames, moved)
        return self._responder.reply_or_later(frames, self._carry_out)

    def _carry_out(self, request: protocol.AnyRequest) -> object:
        arguments = {name: getattr(request, name) for name in request.__struct_fields__}
        name = str(request.__struct_config__.tag)
        verb, started_s = getattr(self.directory, name), time.perf_counter()
        try:
            if self._durable is not None and isinstance(request, DurableVerb):
                return self._durable.take(request, self._clock.now_s())
            return verb(**arguments, now_s=self._clock.now_s())
        finally:
            if self._latencies is not None:
                self._latencies.observe(name, time.perf_counter() - started_s)

    def _publish(self) -> None:
        latest = self.directory.sequence
        if latest == self._published:
            return
        events = self.directory.events_since(self._published)
        first_sequence, self._published = self._published + 1, latest
        if events is None:
            return  # some are no longer in the log; subscribers detect the gap at a heartbeat
        log_members(events)
        messages = protocol.to_messages(events)
        self._send_event(
            MessageKind.EVENTS, protocol.Events(self.directory.epoch, first_sequence, messages)
        )

    def _send_event(
        self, kind: MessageKind, body: protocol.Events | protocol.EventHeartbeat
    ) -> None:
        frames = [pack_header(kind, 0), self._encoder.encode(body)]
        # Drops messages for slow subscribers, never blocks.
        self._subscribers.send_multipart(frames)

    def _has_new_subscriber(self) -> bool:
        found = False
        with contextlib.suppress(zmq.Again):
            while True:
                found |= self._subscribers.recv(zmq.NOBLOCK)[:1] == b"\x01"
        return found

    def close(self) -> None:
        if self._durable is not None:
            self._durable.close(self._responder)
            self._durable = None
        if self._direct is not None:
            self._direct.close()
        self._context.destroy(linger=0)
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def log_members(events: list[Event]) -> None:
    """Log each node or worker that registered or left. Other events are too frequent to log."""
    for event in events:
        if isinstance(event, NodeUp):
            node = event.info
            memory = node.segment_bytes, node.tier
            log.info("node %s up, %d bytes of %s, %s", node.node_id, *memory, node.incarnation)
        elif isinstance(event, WorkerUp):
            up = event.info
            log.info("worker %s up on node %s, %s", up.worker_id, up.node_id, up.incarnation)
        elif isinstance(event, NodeDown):
            log.info("node %s down, %s", event.node_id, event.incarnation)
        elif isinstance(event, WorkerDown):
            log.info("worker %s down, %s", event.worker_id, event.incarnation)


def refuse_second_server(address: str) -> None:
    """Raise AddressTaken if a process listens at this ipc:// address, because bind would take the
    address from that process."""
    path = address.removeprefix("ipc://")
    if path == address or not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(path)
        raise AddressTaken("another process listens there; stop it or choose another address")
