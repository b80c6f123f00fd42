"""Keeps this host's replica of the directory's index: follows the events and writes the table.

Of the storage nodes of one host that belong to one directory the first to lock the table's file
writes it (index_table.py); the others look once a second whether it is free. What was there
before this one began to listen is asked of the directory page by page between the events, so that
it is busy for milliseconds at a time; until a page has come readers ask the directory. Whatever is
missed (a gap, another leader) empties the table and begins anew.

A page and the events are applied by one thread. So an event that is later than a page is applied
after it, and what an earlier one says, the page says too.

In the table are copies in DRAM. The writer stamps it whenever it has applied all that has come and
the directory was heard lately: a reader believes an old stamp no more.

Not here: the table (memory/index_table.py), following (event_feed.py).
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
LOOK_S = 1.0  # between two looks at the lock
PAGE_BLOCKS = 8_192
SILENT_S_MAX = 2.5  # heartbeats come each second


class IndexWriter:
    """Runs in threads of its own until `close`."""

    def __init__(self, info: NodeInfo, address: str, events_address: str) -> None:
        """`address`, `events_address`: of the directory."""
        self._info = info
        self._addresses = address, events_address
        self._directory = DirectoryClient(address)
        self._hosts: dict[str, str] = {}  # from node_id
        self._next_page: int | None = None  # None: there is none left
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
        """As soon as nobody else writes."""
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
                    log.info("node_id=%s writes no index replica: %s", self._info.node_id, why)
            self._stop.wait(LOOK_S)
        else:
            return
        log.info("node_id=%s writes %s", self._info.node_id, self._info.index_path)
        self._feed = EventFeed(*self._addresses, self._begin, self._apply, on_heard=self._heard)

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

    def _heard(self, by_s: float) -> None:
        """All that had come by then is in the table."""
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
        except StoreError as error:  # the feed notices by itself when the directory is gone
            log.debug("node_id=%s no page of the index: %s", self._info.node_id, error)
            return
        for key, copies in page:
            for copy in copies:
                self._put(key, copy)
        is_over = is_last or first + PAGE_BLOCKS >= table.capacity
        self._next_page = None if is_over else first + PAGE_BLOCKS

    # ----

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._feed is not None:
            self._feed.close()
        self._directory.close()
        if self._table is not None:
            self._table.close()
