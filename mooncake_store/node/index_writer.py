"""Maintains the index replica of this host: applies the directory's events to a shared table.

Several storage nodes of one host may belong to one directory. The node that first locks the table's
file writes the table (index_table.py). The other nodes retry the lock once a second.

Blocks that were stored before the first event are loaded page by page, between the events, so each
request occupies the directory only for milliseconds. Until a page is loaded, readers query the
directory for its blocks. After a missed event or a new leader, the whole table is loaded again.

One thread applies both pages and events. An event later than a page is therefore applied after the
page. The page already includes the effect of earlier events.

The table lists copies in DRAM only. When all received events are applied, and the directory is not
silent, the writer stamps the table with the time. Readers ignore a table with an old stamp.

Not here: the table (memory/index_table.py), subscribing (event_feed.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.event_feed import EventFeed
from mooncake_store.errors import StoreError
from mooncake_store.memory.index_table import IndexTable, remove_dead_tables, table_bytes
from mooncake_store.records.blocks import Copy
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    NodeDown,
    NodeUp,
    Snapshot,
)
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo

log = logging.getLogger("mooncake_store.node")
LOOK_S = 1.0  # seconds between two attempts to lock the table
PAGE_BLOCKS = 8_192  # blocks per page
SILENT_S_MAX = 2.5  # after longer silence, no stamps; the directory sends a heartbeat each second


class IndexWriter:
    """Waits until no other node writes the table, then writes the table until `close`."""

    def __init__(self, info: NodeInfo, address: str, events_address: str) -> None:
        """`address`, `events_address`: the directory's, for requests and for its event stream."""
        self._info = info
        self._addresses = address, events_address
        self._directory = DirectoryClient(address)
        self._hosts: dict[str, str] = {}  # node_id -> host_id
        self._next_page: int | None = None  # first block of the next page; None: all are loaded
        self._table: IndexTable | None = None
        self._feed: EventFeed | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._take_over, name="index-writer", daemon=True)
        self._thread.start()

    @property
    def blocks(self) -> int:
        """Entries of the table; 0 while another node writes it."""
        return self._table.entries if self._table else 0

    def _take_over(self) -> None:
        """Wait until no other node writes the table, then start the feed."""
        why = ""
        while not self._stop.is_set():
            try:
                size_bytes = table_bytes(self._info.segment_bytes)
                self._table = IndexTable(self._info.index_path, size_bytes)
                remove_dead_tables(self._info.index_path)
                break
            except (StoreError, OSError) as error:
                if str(error) != why:
                    why = str(error)
                    log.info("node_id=%s waits for the index replica: %s", self._info.node_id, why)
            self._stop.wait(LOOK_S)
        else:
            return
        log.info("node_id=%s writes index replica %s", self._info.node_id, self._info.index_path)
        self._feed = EventFeed(*self._addresses, self._begin, self._apply, on_progress=self._stamp)

    # ---- in the feed's thread

    def _begin(self, snapshot: Snapshot) -> None:
        assert self._table is not None
        self._hosts = {info.node_id: info.host_id for info in snapshot.nodes}
        self._table.begin(snapshot.epoch, snapshot.sequence)
        self._next_page = 0

    def _apply(self, events: Sequence[Event]) -> None:
        assert self._table is not None
        for event in events:
            if isinstance(event, BlockAdded):
                if event.copy is not None:
                    self._put(event.key, event.copy)
            elif isinstance(event, BlockRemoved):
                self._table.drop(event.key, event.node_id)
            elif isinstance(event, NodeUp):
                self._hosts[event.info.node_id] = event.info.host_id
            elif isinstance(event, NodeDown):
                self._hosts.pop(event.node_id, None)

    def _put(self, key: bytes, copy: Copy) -> None:
        assert self._table is not None
        if not copy.node_id.endswith(SSD_SUFFIX):
            is_local = self._hosts.get(copy.node_id) == self._info.host_id
            self._table.put(key, copy, is_local)

    def _stamp(self, by_s: float) -> None:
        """Stamp the table, because all events received by `by_s` are applied. Then load a page."""
        table, feed = self._table, self._feed
        if table is None or feed is None or feed.silent_s() > SILENT_S_MAX:
            return
        table.moved(*feed.position)
        table.stamp(by_s)
        if self._next_page is not None:
            self._fill(table, self._next_page)

    def _fill(self, table: IndexTable, first: int) -> None:
        try:
            page, is_last = self._directory.index_page(first, PAGE_BLOCKS)
        except StoreError as error:  # the feed itself detects a lost directory
            log.debug("node_id=%s cannot load a page: %s", self._info.node_id, error)
            return
        for key, copies in page:
            for copy in copies:
                self._put(key, copy)
        is_complete = is_last or first + PAGE_BLOCKS >= table.capacity
        self._next_page = None if is_complete else first + PAGE_BLOCKS

    # ----

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._feed is not None:
            self._feed.close()
        self._directory.close()
        if self._table is not None:
            self._table.close()
