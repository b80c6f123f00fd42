"""The few calls of etcd v3 that directories need, over its HTTP gateway.

Keys and values travel as base64 in JSON, 64-bit numbers as decimal strings. Several endpoints of
one cluster may be given: each call goes to the one that answered last, then to the others.

Not here: what the keys mean (election.py, journal.py).
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests

from mooncake_store.errors import StoreUnavailable

DIGITS_MAX = 18


class EtcdFailed(StoreUnavailable):
    """etcd did not answer, or refused; the message says which endpoints were asked."""


class EtcdRefused(EtcdFailed):
    """Every endpoint answered that it will not: it has not been, and will not be, carried out."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    value: bytes
    mod_revision: int  # changes with each write of the key; 0: there is no such key


MISSING = KeyValue(b"", 0)


class EtcdClient:
    """One cluster. A call may be asked of several endpoints, so one that failed, or a write that
    found its keys changed, may have been carried out all the same.

    No user names, no TLS. Thread-safe. Each call ends within about `timeout_s` for each endpoint.
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float = 1.0) -> None:
        assert endpoints and timeout_s > 0
        self.endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self.timeout_s = timeout_s
        self._local = threading.local()  # a requests.Session is for one thread

    def grant(self, ttl_s: int) -> tuple[int, float]:
        """A new lease and the seconds it really lasts, which may be more than asked for."""
        answer = self._post("/v3/lease/grant", {"TTL": str(ttl_s)})
        return int(answer["ID"]), float(answer["TTL"])

    def keep_alive(self, lease: int) -> float:
        """Seconds that the lease lasts from now on; 0 when it has ended."""
        answer = self._post("/v3/lease/keepalive", {"ID": str(lease)})
        return float(answer.get("result", {}).get("TTL", 0))

    def revoke(self, lease: int) -> None:
        """End the lease, and with it every key that was written under it."""
        self._post("/v3/lease/revoke", {"ID": str(lease)})

    def get(self, key: str) -> KeyValue:
        found = self._post("/v3/kv/range", {"key": _packed(key)}).get("kvs")
        return _key_value(found[0]) if found else MISSING

    def under(self, prefix: str, page_keys: int) -> Iterator[tuple[str, KeyValue]]:
        """Every key that begins with `prefix`, in order, fetched `page_keys` at a time."""
        start, end = prefix.encode(), _after(prefix.encode())
        while True:
            body = {"key": _packed(start), "range_end": _packed(end), "limit": str(page_keys)}
            answer = self._post("/v3/kv/range", body)
            for found in answer.get("kvs", []):
                start = base64.b64decode(found["key"]) + b"\0"
                yield start[:-1].decode(errors="replace"), _key_value(found)
            if not answer.get("more", False):
                return

    def write_unless_changed(
        self, expected: Mapping[str, int], values: Mapping[str, bytes], leases: Mapping[str, int]
    ) -> int:
        """Write all values if every key of `expected` still has that mod_revision, else nothing.

        The revision of the write; 0: nothing was written.
        """
        puts = [
            {"request_put": {"key": _packed(key), "value": _packed(value),
                             "lease": str(leases.get(key, 0))}}
            for key, value in values.items()
        ]  # fmt: skip
        return self._transact(expected, puts)

    def change_unless_changed(
        self,
        expected: Mapping[str, int],
        values: Mapping[str, bytes],
        gone: Sequence[tuple[str, str]],
    ) -> int:
        """The same, and every key from the first of each pair of `gone` to before the second goes.

        A key that is both written and in `gone` is refused by etcd.
        """
        puts = [{"request_put": {"key": _packed(key), "value": _packed(value)}}
                for key, value in values.items()]  # fmt: skip
        deletes = [{"request_delete_range": {"key": _packed(first), "range_end": _packed(end)}}
                   for first, end in gone]  # fmt: skip
        return self._transact(expected, [*puts, *deletes])

    def _transact(self, expected: Mapping[str, int], operations: Sequence[object]) -> int:
        compare = [
            {"key": _packed(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in expected.items()
        ]
        answer = self._post("/v3/kv/txn", {"compare": compare, "success": list(operations)})
        return int(answer["header"]["revision"]) if answer.get("succeeded", False) else 0

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        failures = []
        is_refused = True
        for endpoint in list(self.endpoints):
            try:
                answer = self._session().post(endpoint + path, json=body, timeout=self.timeout_s)
                if answer.status_code == 200:
                    if endpoint != self.endpoints[0]:  # ask this one first from now on
                        others = [other for other in self.endpoints if other != endpoint]
                        self.endpoints = [endpoint, *others]
                    return answer.json()
                is_refused &= 400 <= answer.status_code < 500
                failures.append(f"{endpoint}: {answer.status_code} {answer.text.strip()[:200]}")
            except (requests.RequestException, ValueError) as error:
                is_refused = False
                failures.append(f"{endpoint}: {error}")
        kind = EtcdRefused if is_refused else EtcdFailed
        raise kind("etcd does not carry out " + path + ": " + "; ".join(failures))

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = etcd_session()
        return session


def etcd_session() -> requests.Session:
    """For one thread."""
    session = requests.Session()
    session.trust_env = False  # etcd is near; a proxy for the internet does not know it
    return session


def decimal(value: bytes) -> int:
    """The number that a value is; 0 for what is none, or is more than any of ours can be."""
    return int(value) if value.isdigit() and len(value) <= DIGITS_MAX else 0


def _packed(text: str | bytes) -> str:
    raw = text.encode() if isinstance(text, str) else text
    return base64.b64encode(raw).decode()


def _after(prefix: bytes) -> bytes:
    """The least key behind all that begin with `prefix`; its last byte is an ASCII character."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _key_value(found: Mapping[str, str]) -> KeyValue:
    return KeyValue(base64.b64decode(found.get("value", "")), int(found["mod_revision"]))
