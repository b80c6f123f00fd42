"""Subscription to the directory: a snapshot, then every change in order, in its own thread.

The feed subscribes first, then takes the snapshot, then delivers the newer events. The reverse
order would lose the events in between. A new snapshot is needed after a gap in the event numbers, a
heartbeat with a higher number, or a new epoch (the directory restarted). So a lost event is
detected within one heartbeat (1 s).

Callbacks run in the feed's thread, one at a time. While the directory does not answer, no callback
runs, and `is_current` is False.

Not here: the use of events (the conductor, prefix_index.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq

from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import AccessRefused, StoreError
from mooncake_store.keys.curve import PeerAccess
from mooncake_store.records.events import Event, Snapshot
from mooncake_store.wire import directory_protocol as protocol
from mooncake_store.wire.addresses import notice_silence
from mooncake_store.wire.framing import MessageKind, unpack_header
from mooncake_store.wire.request_reply import set_reconnecting

if TYPE_CHECKING:
    from mooncake_store.directory.election import Leader

SILENCE_S_MAX = 3.5  # silence after which the feed is not current: 3.5 heartbeats
LOOK_S = 1.25  # silence after which etcd is queried for a new leader
LOOK_AGAIN_S = 0.2  # seconds between two queries of etcd for a new leader
REFUSED_S = 1.0  # delay of the next attempt after a rejected connection
POLL_S = 0.1  # duration of a turn without messages, so close() takes about as long
RETRY_S = 0.25  # delay of the next snapshot after a failed snapshot or callback
GREETING_S_MAX = 1.5  # wait for the first heartbeat after a subscription

log = logging.getLogger(__name__)


class EventFeed:
    """Calls `on_snapshot(snapshot)`, then `on_events(events)` for each later batch."""

    def __init__(
        self,
        address: str,
        events_address: str,
        on_snapshot: Callable[[Snapshot], None],
        on_events: Callable[[Sequence[Event]], None],
        timeout_s: float = 2.0,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """`events_address` is ignored if `address` is an election (etcd://...).

        `on_progress`: called several times a second while the feed is current, with a time of
        boot_clock.py. All events that had arrived at this time are delivered. With `on_progress`,
        snapshots contain no blocks; load them separately (`index_page`).
        """
        self._on_progress = on_progress
        self._on_snapshot = on_snapshot
        self._on_events = on_events
        self._client = DirectoryClient(address, timeout_s)
        self.events_address = "" if self._client.is_elected else events_address
        self._events_decoder = msgspec.msgpack.Decoder(protocol.Events)
        self._heartbeat_decoder = msgspec.msgpack.Decoder(protocol.EventHeartbeat)
        self._changed = threading.Condition()
        self._epoch, self._sequence = -1, 0  # of the last delivered event or snapshot
        self.is_current = False  # whether the directory answers and no event is missing
        self._needs_snapshot = True
        self._received_s = self._retry_s = self._look_s = time.monotonic()
        self._leader: Leader | None = None  # the leader subscribed to; None without an election
        self._refused, self._refused_until_s = "", float("-inf")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-feed", daemon=True)
        self._thread.start()

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, number) of the last delivered event; epoch -1 before the first snapshot."""
        with self._changed:
            return self._epoch, self._sequence

    def silent_s(self) -> float:
        """Seconds since the directory's last message (one a second), or since the feed's start."""
        return time.monotonic() - self._received_s

    def wait_ready(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.is_current, timeout_s)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=self._client.timeout_s + 1.0)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as stream, self._client:
            self._access = PeerAccess(self.events_address, self._who())
            set_reconnecting(stream)
            stream.setsockopt(zmq.RCVHWM, 100_000)
            stream.subscribe(b"")
            if not self._client.is_elected:
                self._listen(stream)
            while not self._closing.is_set():
                try:
                    self._turn(stream)
                    now_s = boot_s()  # before the poll, after which this process may be stopped
                    if self._on_progress and self.is_current and not stream.poll(0):
                        self._on_progress(now_s)
                except Exception:  # Catch all: a bad message or listener must not stop the feed
                    log.exception("event feed: will take a snapshot")
                    self._lost(time.monotonic() + RETRY_S)

    def _turn(self, stream: zmq.Socket[bytes]) -> None:
        now_s = time.monotonic()
        if now_s - self._received_s > SILENCE_S_MAX and not self._needs_snapshot:
            log.warning(
                "event feed: no message from %s for %.1f s", self.events_address, SILENCE_S_MAX
            )
            self._lost(now_s)
        if self._is_replaced(now_s):
            log.info("event feed: %s is silent, another directory leads", self.events_address)
            self._lost(now_s)
        if self._needs_snapshot and now_s >= self._retry_s and self._subscribe_to_leader(stream):
            self._take_snapshot()
        if stream.poll(int(POLL_S * 1000)):
            self._received_s = time.monotonic()
            self._receive(stream.recv_multipart())
        elif self._access.monitor is not None and now_s >= self._refused_until_s:
            self._look_for_refusal(stream)

    def _who(self) -> str:
        return f"the event stream of the directory at {self.events_address}"

    def _look_for_refusal(self, stream: zmq.Socket[bytes]) -> None:
        """After a rejection, reconnect with new keys, or with the same keys after a delay."""
        try:
            must_redial, self._refused = self._access.must_redial() or bool(self._refused), ""
        except AccessRefused as error:
            if str(error) != self._refused:
                log.warning("event feed: %s", error)
            self._refused, must_redial = str(error), False
            self._refused_until_s = time.monotonic() + REFUSED_S
        if must_redial:
            with contextlib.suppress(zmq.ZMQError):  # the socket has already disconnected
                stream.disconnect(self.events_address)
            self._access.connect(stream)

    def _is_replaced(self, now_s: float) -> bool:
        """Whether the subscribed directory is silent and another one leads. Without silence, etcd
        is not queried."""
        if self._leader is None or self._needs_snapshot or now_s < self._look_s:
            return False
        if now_s - self._received_s < LOOK_S:
            return False
        self._look_s = now_s + LOOK_AGAIN_S
        try:
            return self._client.leader() != self._leader
        except StoreError:
            return False  # no directory leads yet

    def _subscribe_to_leader(self, stream: zmq.Socket[bytes]) -> bool:
        """Subscribe to the current leader, if directories are elected. False: there is none."""
        if not self._client.is_elected:
            return True
        try:
            leader = self._client.leader()
        except StoreError as error:
            log.debug("event feed: %s", error)
            self._retry_s = time.monotonic() + RETRY_S
            return False
        if leader != self._leader:
            self._leader = leader
            self._client.disconnect()  # the next request must not go to the earlier leader
        if leader.events != self.events_address:
            if self.events_address:
                self._access.close()
                # ZMQError: the connection was rejected, so the socket has disconnected already.
                with contextlib.suppress(zmq.ZMQError):
                    stream.disconnect(self.events_address)
            self.events_address = leader.events
            self._access = PeerAccess(leader.events, self._who())
            try:
                self._listen(stream)
            except BaseException:
                self.events_address = ""  # not subscribed: connect again at the next turn
                raise
        return True

    def _listen(self, stream: zmq.Socket[bytes]) -> None:
        """Connect, and wait for the heartbeat that follows a subscription, for at most
        GREETING_S_MAX, because the directory may be down."""
        notice_silence(stream, self.events_address)
        self._access.connect(stream)
        until_s = time.monotonic() + GREETING_S_MAX
        while not stream.poll(int(POLL_S * 1000)):
            if self._closing.is_set() or time.monotonic() > until_s:
                return

    def _take_snapshot(self) -> None:
        try:
            snapshot = self._client.snapshot(with_blocks=self._on_progress is None)
        except StoreError as error:
            log.debug("event feed: no snapshot: %s", error)
            self._retry_s = time.monotonic() + RETRY_S
            return
        self._on_snapshot(snapshot)
        self._received_s = time.monotonic()
        self._needs_snapshot = False
        self._moved(snapshot.epoch, snapshot.sequence)

    def _receive(self, frames: list[bytes]) -> None:
        header = unpack_header(frames[0])
        if header.kind is MessageKind.HEARTBEAT:
            beat = self._heartbeat_decoder.decode(frames[1])
            if beat.epoch != self._epoch or beat.sequence > self._sequence:
                self._lost(time.monotonic())
        elif header.kind is MessageKind.EVENTS:
            self._follow(self._events_decoder.decode(frames[1]))

    def _follow(self, batch: protocol.Events) -> None:
        """Deliver the new events of a batch, or record that earlier events are missing."""
        if self._needs_snapshot:
            return  # the next snapshot includes these events
        known = self._sequence - batch.first_sequence + 1
        if batch.epoch != self._epoch or known < 0:
            self._lost(time.monotonic())
        elif known < len(batch.events):
            events = protocol.from_messages(batch.events[known:])
            self._on_events(events)
            self._moved(batch.epoch, self._sequence + len(events))

    def _lost(self, retry_s: float) -> None:
        """Record that events are missing. A snapshot is taken from time `retry_s` on."""
        self.is_current = False
        self._needs_snapshot = True
        self._retry_s = retry_s

    def _moved(self, epoch: int, sequence: int) -> None:
        with self._changed:
            self._epoch, self._sequence = epoch, sequence
            self.is_current = True
            self._changed.notify_all()
