"""The channel between a worker and the connector inside the engine's processes.

    worker: ConnectorHost --Stage, Unstage--> scheduler                  (a ConnectorLink)
                   | ^    --Drain, MapSegment, UnmapSegment--> each rank (a ConnectorLink each)
                   | +----Staged, Claimed, Unstaged, Ready, Loaded, Saved, Drained, Broken----+
                   +--> futures, and a Listener for messages that answer no call

Each end has an inbox of its own (ZeroMQ over ipc). Every wait of a worker has a deadline.

Unstaging takes two steps, because ranks copy at their own pace. The scheduler reports how many
copies it has ordered for the request. Then each rank reports when it has finished as many.

Not here: the meaning of the messages (messages.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Protocol, TypeVar

import msgspec
import zmq

from backends.engine.connected import messages as m
from mooncake_store.wire.mailbox import Inbox, Outbox

log = logging.getLogger(__name__)
MESSAGES_MAX = 100_000  # queued for one peer; a peer with more is considered dead
TURN_S = 0.05  # a deadline is noticed at most so late
SCHEDULER = "scheduler"
STAGING, UNSTAGING, ATTACHING = "staging", "unstaging", "attaching region"
CLOSED = "the channel was closed"

T = TypeVar("T")


class ChannelError(Exception):
    """The other side did not answer, has refused, or is broken."""


def rank_name(rank: int) -> str:
    return f"rank-{rank}"


def _inbox(address: str, name: str) -> str:
    return f"{address}-{name}"


def _listen(
    address: str,
    kinds: object,
    on_message: Callable[[T], None],
    on_turn: Callable[[], None] = lambda: None,
) -> Inbox[T]:
    """Call `on_message` for each message and `on_turn` at least every TURN_S, in a new thread.

    The inbox has no secret: TensorRT-LLM passes its processes no foreign variable, and the socket
    lies in the folder of this launch.
    """

    def on_messages(messages: list[T]) -> None:
        for message in messages:
            try:
                on_message(message)
            except Exception:  # Catch all: one bad message must not stop the channel
                log.exception("a message of the KV channel failed")
        on_turn()

    decode = msgspec.msgpack.Decoder(kinds).decode
    try:
        return Inbox(
            address,
            decode,
            on_messages,
            messages_max=MESSAGES_MAX,
            turn_s=TURN_S,
            thread_name="kv-channel",
        )
    except zmq.ZMQError as error:
        raise ChannelError(f"cannot listen at {address}: {error}") from error


def _outbox() -> Outbox[msgspec.Struct]:
    """Sends to the inboxes of the other side."""
    return Outbox(msgspec.msgpack.Encoder().encode, messages_max=MESSAGES_MAX)


class ConnectorLink:
    """The end of the connector's scheduler, or of one rank."""

    def __init__(
        self, address: str, name: str, on_message: Callable[[m.ToConnector], None]
    ) -> None:
        self._address = address
        self._mailbox = _listen(_inbox(address, name), m.ToConnector, on_message)
        self._outbox = _outbox()

    def send(self, message: m.ToWorker) -> None:
        """Never raises: a worker that has stopped listening must not stop the engine."""
        if not self._outbox.send(self._address, message):  # its queue is full
            log.error("a message is lost: %s does not take its messages", self._address)

    def close(self) -> None:
        self._mailbox.close()
        self._outbox.close()


class Listener(Protocol):
    """Notified in the channel's thread. The methods must return soon."""

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None: ...
    def loaded(self, request_id: str) -> None:
        """On every rank the claimed KV is in the engine's pages."""

    def saved(self, request_id: str, tokens: int) -> None:
        """KV of the first `tokens` tokens of every rank is in the places. `tokens` only grows."""

    def broken(self, reason: str) -> None: ...


class ConnectorHost:
    """The worker's end. Futures fail with ChannelError, at the latest at their deadlines."""

    def __init__(self, address: str, listener: Listener) -> None:
        self._address = address
        self._listener = listener
        self._changed = threading.Condition()
        self._ready: dict[int, m.Ready] = {}
        self._broken = ""
        self._is_closed = False
        self._waiting: dict[tuple[str, str], tuple[Future[None], float]] = {}  # deadlines
        # Ranks that have not yet loaded (STAGING), drained (UNSTAGING) or mapped (ATTACHING) it.
        self._left: dict[tuple[str, str], set[int]] = {}
        self._saved: dict[str, dict[int, int]] = defaultdict(dict)  # tokens, by request and rank
        self._scheduler = _inbox(address, SCHEDULER)
        self._ranks: dict[int, str] = {}  # their inboxes
        self._outbox = _outbox()
        self._mailbox = _listen(address, m.ToWorker, self._on_message, self._expire)

    def wait_ready(self, timeout_s: float) -> list[m.Ready]:
        """Wait for all ranks; their messages in order of ranks."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._broken or self._is_complete(), timeout_s):
                here = sorted(self._ready)
                raise ChannelError(
                    f"the engine's connector did not report within {timeout_s:g} s; ranks that "
                    f"did: {here or 'none'}. Is this package importable in its processes?"
                )
            self._refuse_if_broken()
            return [self._ready[rank] for rank in sorted(self._ready)]

    def stage(self, stage: m.Stage, timeout_s: float) -> Future[None]:
        """Done when the connector has the stage. Also after a failure the caller must unstage it
        before it reuses the pages."""
        with self._changed:
            self._forget(stage.request_id)
            self._left[STAGING, stage.request_id] = set(self._ranks)
        return self._ask(STAGING, stage.request_id, stage, timeout_s)

    def unstage(self, request_id: str, timeout_s: float) -> Future[None]:
        """Done when no copy uses the request's pages any more. Unknown requests are allowed."""
        return self._ask(UNSTAGING, request_id, m.Unstage(request_id), timeout_s)

    def attach(self, region: int, path: str, size_bytes: int, timeout_s: float) -> Future[None]:
        """Done when every rank has mapped the segment as this region. Fails with the first problem
        of a rank; then the caller must detach it, because other ranks may have mapped it."""
        with self._changed:
            self._left[ATTACHING, str(region)] = set(self._ranks)
            future = self._expect(ATTACHING, str(region), timeout_s)
        self._to_ranks(m.MapSegment(region, path, size_bytes))
        return future

    def detach(self, region: int) -> None:
        """Unmap the region. No staged prompt has a place in it, now or later."""
        self._to_ranks(m.UnmapSegment(region))

    def _to_ranks(self, message: m.ToConnector) -> None:
        with self._changed:
            inboxes = list(self._ranks.values())
        for inbox in inboxes:
            self._post(inbox, message)

    def _post(self, inbox: str, message: m.ToConnector) -> None:
        if not self._outbox.send(inbox, message):  # its queue is full
            raise ChannelError(f"{inbox} does not take its messages")

    def close(self) -> None:
        self._mailbox.close()
        with self._changed:
            self._is_closed = True
        self._fail_all(CLOSED)
        for inbox in (self._scheduler, *self._ranks.values()):
            self._outbox.send(inbox, m.Goodbye())
        self._outbox.close()

    def _is_complete(self) -> bool:
        return bool(self._ready) and len(self._ready) == next(iter(self._ready.values())).tp_size

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise ChannelError(self._broken)

    def _ask(
        self, kind: str, request_id: str, message: m.ToConnector, timeout_s: float
    ) -> Future[None]:
        with self._changed:
            if (kind, request_id) in self._waiting:
                return self._waiting[kind, request_id][0]
            future = self._expect(kind, request_id, timeout_s)
        self._post(self._scheduler, message)
        return future

    def _expect(self, kind: str, name: str, timeout_s: float) -> Future[None]:
        """With the lock held."""
        self._refuse_if_broken()
        if self._is_closed:
            raise ChannelError(CLOSED)
        future: Future[None] = Future()
        self._waiting[kind, name] = (future, time.monotonic() + timeout_s)
        return future

    def _on_message(self, message: m.ToWorker) -> None:
        match message:
            case m.Ready():
                with self._changed:
                    self._ready[message.rank] = message
                    self._ranks[message.rank] = _inbox(self._address, rank_name(message.rank))
                    self._changed.notify_all()
            case m.Staged():
                self._resolve(STAGING, message.request_id)
            case m.Refused():
                self._resolve(STAGING, message.request_id, message.reason)
            case m.Unstaged():
                with self._changed:
                    self._left[UNSTAGING, message.request_id] = set(self._ranks)
                self._to_ranks(m.Drain(message.request_id, message.moves))
            case m.Drained():
                if self._is_last(UNSTAGING, message.request_id, message.rank):
                    with self._changed:
                        self._forget(message.request_id)
                    self._resolve(UNSTAGING, message.request_id)
            case m.Claimed():
                local_tokens, loaded_tokens = message.local_tokens, message.loaded_tokens
                self._listener.claimed(message.request_id, local_tokens, loaded_tokens)
            case m.SegmentMapped():
                name = str(message.region)
                if self._is_last(ATTACHING, name, message.rank) or message.problem:
                    self._resolve(ATTACHING, name, message.problem)
            case m.Loaded():
                if self._is_last(STAGING, message.request_id, message.rank):
                    self._listener.loaded(message.request_id)
            case m.Saved():
                tokens = self._all_have(message)
                if tokens is not None:
                    self._listener.saved(message.request_id, tokens)
            case m.Broken():
                self._break(message.reason)

    def _is_last(self, kind: str, name: str, rank: int) -> bool:
        """True if all other ranks have reported before."""
        with self._changed:
            left = self._left.get((kind, name))
            if left is None:
                return False
            left.discard(rank)
            if not left:
                del self._left[kind, name]
            return not left

    def _all_have(self, message: m.Saved) -> int | None:
        """Tokens of the slowest rank if this message raised them, else None."""
        with self._changed:
            by_rank = self._saved[message.request_id]
            before = min(by_rank.values()) if len(by_rank) == len(self._ready) else 0
            by_rank[message.rank] = message.tokens
            now = min(by_rank.values()) if len(by_rank) == len(self._ready) else 0
            return now if now > before else None

    def _forget(self, request_id: str) -> None:
        self._saved.pop(request_id, None)
        self._left.pop((STAGING, request_id), None)

    def _resolve(self, kind: str, request_id: str, error: str = "") -> None:
        with self._changed:
            future, _ = self._waiting.pop((kind, request_id), (None, 0.0))
        if future is not None and error:
            _fail(future, error)
        elif future is not None:
            with contextlib.suppress(InvalidStateError):  # the caller has cancelled it
                future.set_result(None)

    def _expire(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            late = [asked for asked, (_, until_s) in self._waiting.items() if until_s <= now_s]
            futures = [(asked, self._waiting.pop(asked)[0]) for asked in late]
        for (kind, request_id), future in futures:
            _fail(future, f"{kind} {request_id}: the engine's processes did not answer in time")

    def _break(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()
        self._fail_all(reason)
        self._listener.broken(reason)

    def _fail_all(self, reason: str) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            _fail(future, reason)


def _fail(future: Future[None], reason: str) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(ChannelError(reason))
