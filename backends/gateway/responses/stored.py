"""Responses that clients asked to store, in a file of SQLite that all gateway processes share.

A response belongs to the tenant whose key made it. For every other tenant it does not exist. Each
tenant has a limit, beyond which its oldest responses go. None is older than HOURS_MAX; the text of
older ones goes when a response is stored.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from backends.gateway.responses.items import INPUT, Item, items_of_output, response_of
from backends.statuses import HttpRefusal, unavailable

NOT_FOUND, PREVIOUS_NOT_FOUND = "response_not_found", "previous_response_not_found"
HOURS_MAX = 24.0
IN_MEMORY = ":memory:"  # as `path`: responses of one process
LOCK_S_MAX = 5.0  # for so long a process waits for another one that writes
TABLE = """
CREATE TABLE IF NOT EXISTS responses
    (id TEXT PRIMARY KEY, tenant TEXT, made_s REAL, bytes INTEGER, body BLOB) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_tenant ON responses (tenant, made_s);
"""


class StoredResponse(msgspec.Struct):
    """A response, and the conversation before it."""

    response: msgspec.Raw
    items: list[Item]  # of the conversation, with the input

    @property
    def output(self) -> list[Item]:
        found: list[Item] = msgspec.json.decode(self.response)["output"]
        return found


class StoredResponses:
    """Thread-safe."""

    def __init__(self, path: str = IN_MEMORY) -> None:
        """`path`: of the file. Raises sqlite3.Error if it cannot be used."""
        self._lock = threading.Lock()
        self._file = sqlite3.connect(
            path, LOCK_S_MAX, isolation_level=None, check_same_thread=False
        )
        with self._lock:
            with suppress(sqlite3.OperationalError):  # another process does the same just now
                self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = OFF")
            self._file.execute("PRAGMA secure_delete = ON")
            self._file.executescript(TABLE)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def add(
        self, tenant: str, bytes_max: int, response: dict[str, Any], items: Sequence[Item]
    ) -> None:
        """Keep a response, and drop the tenant's oldest ones above `bytes_max`. A response that is
        larger is not kept."""
        body = msgspec.json.encode({"response": response, "items": items})
        if len(body) > bytes_max:
            return
        with self._lock, self._file:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.execute("DELETE FROM responses WHERE made_s < ?", (self._oldest_s(),))
            row = (response["id"], tenant, time.time(), len(body), body)
            self._file.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?)", row)
            newest_first = (
                "SELECT id, SUM(bytes) OVER (ORDER BY made_s DESC, id) AS total "
                "FROM responses WHERE tenant = ?"
            )
            self._file.execute(
                f"DELETE FROM responses WHERE id IN "
                f"(SELECT id FROM ({newest_first}) WHERE total > ?)",
                (tenant, bytes_max),
            )

    def _oldest_s(self) -> float:
        return time.time() - HOURS_MAX * 3600

    def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Raises HttpRefusal: 404 if the tenant has no such response, 503 if the file does not
        answer."""
        with self._lock, _refusing():
            found = self._file.execute(
                "SELECT body FROM responses WHERE id = ? AND tenant = ? AND made_s >= ?",
                (response_id, tenant, self._oldest_s()),
            ).fetchone()
        if found is None:
            raise unknown(response_id)
        return msgspec.json.decode(found[0], type=StoredResponse)

    def delete(self, response_id: str, tenant: str) -> None:
        """As `get`."""
        with self._lock, _refusing():
            count = self._file.execute(
                "DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant)
            ).rowcount
        if not count:
            raise unknown(response_id)


@contextmanager
def _refusing() -> Iterator[None]:
    """Errors of the file as refusals."""
    try:
        yield
    except sqlite3.Error as error:
        raise unavailable(f"the stored responses cannot be read: {error}") from None


class EarlierResponses:
    """The stored responses that one request of a tenant refers to."""

    def __init__(self, stored: StoredResponses, tenant: str) -> None:
        self._stored, self._tenant = stored, tenant
        self._found: dict[str, StoredResponse] = {}

    def _get(self, response_id: str) -> StoredResponse:
        if response_id not in self._found:
            self._found[response_id] = self._stored.get(response_id, self._tenant)
        return self._found[response_id]

    def conversation(self, response_id: str) -> list[Item]:
        """The items up to the end of a response. Raises HttpRefusal 404."""
        try:
            found = self._get(response_id)
        except HttpRefusal as refusal:
            if refusal.status != 404:
                raise
            field = "previous_response_id"
            raise HttpRefusal(404, PREVIOUS_NOT_FOUND, refusal.message, field) from None
        return [*found.items, *items_of_output(found.output)]

    def item(self, reference: str) -> Item:
        """The item with this id, of an input or an output. Raises HttpRefusal, as `get`."""
        response_id, index = response_of(reference)
        try:
            found = self._get(response_id)
            if reference.startswith(f"{INPUT}_"):
                return found.items[index]
            if found.output[index]["id"] == reference:
                return items_of_output(found.output[index : index + 1])[0]
        except HttpRefusal as refusal:
            if refusal.status != 404:
                raise
        except IndexError:
            pass
        what = f"there is no stored item {reference[:80]!r}; send the item itself"
        raise HttpRefusal(404, NOT_FOUND, what, "input")


def unknown(response_id: str) -> HttpRefusal:
    what = f"there is no stored response {response_id[:80]!r}; send store: true to keep one"
    return HttpRefusal(404, NOT_FOUND, what, "response_id")
