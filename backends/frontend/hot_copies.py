"""Carries out the conductor's suggestions for hot prefixes: one more copy on another node.

The node that shall get the copy pulls it itself, one-sided, from one that has it
(StoreClient.change_replica): no worker takes part, so no prompt waits for it. One suggestion after
the other, in a thread of its own; when too many wait the newest is dropped, and comes again if the
prefix stays hot (replicate_s_max). Not here: what is hot (conductor/replication/hotspots.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from conductor.messages import Replicate
from mooncake_store.client.client import StoreClient
from mooncake_store.errors import StoreError

log = logging.getLogger(__name__)
WAITING_MAX = 16
COPY_S_MAX = 5.0


class HotCopies:
    def __init__(self, directory: str) -> None:
        self._address = directory
        self._waiting: queue.Queue[Replicate | None] = queue.Queue(WAITING_MAX)
        self._client: StoreClient | None = None  # made when there is something to copy
        self._thread = threading.Thread(target=self._run, name="hot-copies", daemon=True)
        self._thread.start()

    def carry_out(self, suggestion: Replicate) -> None:
        try:
            self._waiting.put_nowait(suggestion)
        except queue.Full:
            log.info("too many copies wait, dropped: %s", suggestion.reason)

    def close(self) -> None:
        """What waits is dropped; a copy under way is finished, or given up after COPY_S_MAX."""
        while True:
            try:
                self._waiting.put_nowait(None)
                break
            except queue.Full:
                self._waiting.get_nowait()
        self._thread.join(timeout=COPY_S_MAX + 1.0)

    def _run(self) -> None:
        while (suggestion := self._waiting.get()) is not None:
            try:
                self._copy(suggestion)
            except StoreError as error:
                log.warning("a hot prefix was not copied: %s", error)
            except Exception:  # edge: one bad suggestion must not end the copying
                log.exception("a hot prefix was not copied")
        if self._client is not None:
            self._client.close()

    def _copy(self, suggestion: Replicate) -> None:
        if self._client is None:
            self._client = StoreClient(self._address)
        started_s = time.monotonic()
        done = self._client.change_replica(
            suggestion.block_keys, add=[suggestion.target_node], deadline_s=COPY_S_MAX,
            source=suggestion.source_node,
        )  # fmt: skip
        log.info(
            "copied blocks=%d of %d from %s to %s in %.3f s: %s", sum(done), len(done),
            suggestion.source_node, suggestion.target_node, time.monotonic() - started_s,
            suggestion.reason,
        )  # fmt: skip
