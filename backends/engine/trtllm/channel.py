"""The channel between a worker and the connector inside TensorRT-LLM's processes.

    worker: ConnectorHost ──Stage, Unstage──▶ scheduler on rank 0    (a ConnectorLink)
                   │ ▲  └─Drain, MapSegment─▶ every rank             (a ConnectorLink each)
                   │ └── Staged, Claimed, Unstaged, Ready, Loaded, Saved, Drained, Broken ──┘
                   └──▶ futures, and a Listener for what comes by itself

ZeroMQ over ipc: each end has an inbox of its own and writes to the others'. Everything that a
worker waits for has a deadline. Nothing here is called while TensorRT-LLM allocates blocks
(scheduler.py).

Unstaging takes two steps, because ranks copy on their own time: the scheduler says how many
copies it has ordered for the request, then every rank says when it has done that many.

Not here: what the messages mean (messages.py).
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

from backends.engine.trtllm import messages as m
from mooncake_store.wire.mailbox import Inbox, Outbox

log = logging.getLogger(__name__)
MESSAGES_MAX = 100_000  # queued per peer; a peer that lets more wait is taken for dead
TURN_S = 0.05  # how late a deadline may be noticed
SCHEDULER = "scheduler"
STAGING, UNSTAGING, ATTACHING = "staging", "unstaging", "attaching region"
CLOSED = "the channel was closed"

TokensOf = dict[str, dict[int, int]]  # request -> rank -> tokens
T = TypeVar("T")


class ChannelError(Exception):
    """The other side did not answer, refused, or cannot work at all."""


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
    """Calls `on_message` for each, and `on_turn` at least every TURN_S, in a thread of its own.

    Without a secret: TensorRT-LLM hands its processes no variable but its own, and the address lies
    in the folder of this launch.
    """

    def on_messages(messages: list[T]) -> None:
        for message in messages:
            try:
                on_message(message)
            except Exception:  # Catch all: one bad message must not drop the others
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


class _Post(Outbox[msgspec.Struct]):
    """To the inboxes of the other side; ChannelError for one that does not take its messages."""

    def __init__(self) -> None:
        super().__init__(msgspec.msgpack.Encoder().encode, messages_max=MESSAGES_MAX)

    def post(self, address: str, message: m.ToWorker | m.ToConnector) -> None:
        if not self.send(address, message):
            raise ChannelError(f"{address} does not take its messages")


class ConnectorLink:
    """A connector's end: of the scheduler, or of one rank."""

    def __init__(
        self, address: str, name: str, on_message: Callable[[m.ToConnector], None]
    ) -> None:
        self._address = address
        self._mailbox = _listen(_inbox(address, name), m.ToConnector, on_message)
        self._post = _Post()

    def send(self, message: m.ToWorker) -> None:
        """Never raises: a worker that does not listen any more must not stop TensorRT-LLM."""
        try:
            self._post.post(self._address, message)
        except ChannelError as error:
            log.error("a message is lost: %s", error)

    def close(self) -> None:
        self._mailbox.close()
        self._post.close()


class Listener(Protocol):
    """What a worker hears unasked, in the channel's thread: return soon."""

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None: ...
    def loaded(self, request_id: str) -> None:
        """Every rank has in the engine's pages what was claimed for it."""

    def saved(self, request_id: str, tokens: int) -> None:
        """Every rank has the KV of so many leading tokens in its places; it only grows."""

    def broken(self, reason: str) -> None: ...


class ConnectorHost:
    """The worker's end. Futures fail with ChannelError, at the latest when their time is over."""

    def __init__(self, address: str, listener: Listener) -> None:
        self._address = address
        self._listener = listener
        self._changed = threading.Condition()
        self._ready: dict[int, m.Ready] = {}
        self._broken = ""
        self._is_closed = False
        self._waiting: dict[tuple[str, str], tuple[Future[None], float]] = {}  # with its deadline
        self._undrained: dict[str, set[int]] = {}  # ranks that still copy, of an unstaged request
        self._saved: TokensOf = defaultdict(dict)
        self._unloaded: dict[str, set[int]] = {}  # ranks that still load, of a staged request
        self._unattached: dict[str, set[int]] = {}  # ranks that have not mapped a region
        self._scheduler = _inbox(address, SCHEDULER)
        self._ranks: dict[int, str] = {}  # their inboxes
        self._post = _Post()
        self._mailbox = _listen(address, m.ToWorker, self._on_message, self._expire)

    def wait_ready(self, timeout_s: float) -> list[m.Ready]:
        """What every rank says of itself, once all are there."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._broken or self._is_complete(), timeout_s):
                here = sorted(self._ready)
                raise ChannelError(
                    f"TensorRT-LLM's connector did not report within {timeout_s:g} s; ranks that "
                    f"did: {here or 'none'}. Is this package importable in its processes?"
                )
            self._refuse_if_broken()
            return [self._ready[rank] for rank in sorted(self._ready)]

    def stage(self, stage: m.Stage, timeout_s: float) -> Future[None]:
        """Done when the connector knows. After a failure unstage it before its pages are reused."""
        with self._changed:
            self._forget(stage.request_id)
            self._unloaded[stage.request_id] = set(self._ranks)
        return self._ask(STAGING, stage.request_id, stage, timeout_s)

    def unstage(self, request_id: str, timeout_s: float) -> Future[None]:
        """Done when no copy touches its pages any more; also of a request that is not staged."""
        return self._ask(UNSTAGING, request_id, m.Unstage(request_id), timeout_s)

    def attach(self, region: int, path: str, size_bytes: int, timeout_s: float) -> Future[None]:
        """Done when every rank has mapped that segment as the region; it fails with the first
        problem of one. Then, too, detach it: others may have it."""
        with self._changed:
            self._unattached[str(region)] = set(self._ranks)
            future = self._expect(ATTACHING, str(region), timeout_s)
        self._to_ranks(m.MapSegment(region, path, size_bytes))
        return future

    def detach(self, region: int) -> None:
        """Nothing that is staged has a place there, nor will have."""
        self._to_ranks(m.UnmapSegment(region))

    def _to_ranks(self, message: m.ToConnector) -> None:
        with self._changed:
            inboxes = list(self._ranks.values())
        for inbox in inboxes:
            self._post.post(inbox, message)

    def close(self) -> None:
        self._mailbox.close()
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            _fail(future, CLOSED)
        for inbox in (self._scheduler, *self._ranks.values()):
            self._post.send(inbox, m.Goodbye())
        self._post.close()

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
        self._post.post(self._scheduler, message)
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
                self._drain(message)
            case m.Drained():
                self._drained(message)
            case m.Claimed():
                self._listener.claimed(
                    message.request_id, message.local_tokens, message.loaded_tokens
                )
            case m.SegmentMapped():
                self._attached(message)
            case m.Loaded():
                if self._have_all_loaded(message):
                    self._listener.loaded(message.request_id)
            case m.Saved():
                tokens = self._all_have(message)
                if tokens is not None:
                    self._listener.saved(message.request_id, tokens)
            case m.Broken():
                self._break(message.reason)

    def _attached(self, message: m.SegmentMapped) -> None:
        name = str(message.region)
        with self._changed:
            left = self._unattached.get(name, set())
            left.discard(message.rank)
            if left and not message.problem:
                return
            self._unattached.pop(name, None)
        self._resolve(ATTACHING, name, message.problem)

    def _have_all_loaded(self, message: m.Loaded) -> bool:
        with self._changed:
            left = self._unloaded.get(message.request_id)
            if left is None:
                return False
            left.discard(message.rank)
            if not left:
                del self._unloaded[message.request_id]
            return not left

    def _all_have(self, message: m.Saved) -> int | None:
        """What the slowest rank has, when this message raised it. None: not raised."""
        with self._changed:
            by_rank = self._saved[message.request_id]
            before = min(by_rank.values()) if len(by_rank) == len(self._ready) else 0
            by_rank[message.rank] = message.tokens
            now = min(by_rank.values()) if len(by_rank) == len(self._ready) else 0
            return now if now > before else None

    def _forget(self, request_id: str) -> None:
        self._saved.pop(request_id, None)
        self._unloaded.pop(request_id, None)

    def _drain(self, message: m.Unstaged) -> None:
        with self._changed:
            ranks = dict(self._ranks)
            self._undrained[message.request_id] = set(ranks)
        for inbox in ranks.values():
            self._post.post(inbox, m.Drain(message.request_id, message.moves))

    def _drained(self, message: m.Drained) -> None:
        with self._changed:
            left = self._undrained.get(message.request_id, set())
            left.discard(message.rank)
            if left:
                return
            self._undrained.pop(message.request_id, None)
            self._forget(message.request_id)
        self._resolve(UNSTAGING, message.request_id)

    def _resolve(self, kind: str, request_id: str, error: str = "") -> None:
        with self._changed:
            future, _ = self._waiting.pop((kind, request_id), (None, 0.0))
        if future is not None and error:
            _fail(future, error)
        elif future is not None:
            with contextlib.suppress(InvalidStateError):  # its user gave it up
                future.set_result(None)

    def _expire(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            late = [asked for asked, (_, until_s) in self._waiting.items() if until_s <= now_s]
            futures = [(asked, self._waiting.pop(asked)[0]) for asked in late]
        for (kind, request_id), future in futures:
            _fail(future, f"{kind} {request_id}: TensorRT-LLM's processes did not answer in time")

    def _break(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            waiting, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for future, _ in waiting.values():
            _fail(future, reason)
        self._listener.broken(reason)


def _fail(future: Future[None], reason: str) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(ChannelError(reason))
