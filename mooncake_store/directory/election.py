"""Which of several directories serves: the one whose key is in etcd.

    PREFIX/leader   written by who finds it missing, under a lease that it keeps alive:
                    {"address": ..., "events": ..., "name": ..., "epoch": ...}
    PREFIX/epoch    the epoch of the latest leader, written in the same transaction, so that epochs
                    (and with them generations) grow whatever the clocks of the hosts say

A leader believes in itself for a shorter time than etcd does: until the lease's TTL, less a margin,
has passed since it *asked* for the last renewal that came back. So when etcd hangs, or the network
is cut, or this process was stopped for a while, `may_serve` is false before another can be elected,
and nobody has to tell it. While etcd does not answer, nobody is elected; a leader that cannot renew
steps down. What a client gets is at most one answer that was under way at that moment.

Addresses `etcd://HOST:PORT,HOST:PORT/PREFIX` mean whoever leads there now (`leader_at`).
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import requests
from msgspec import structs

from mooncake_store.errors import RequestInvalid, StoreUnavailable

log = logging.getLogger("mooncake_store.election")
SCHEME = "etcd://"
PREFIX = "mooncake/directory"
TTL_S = 5
MARGIN = 0.2  # of the TTL: the leader stops that much before etcd could give its lead away
RENEWALS = 4  # in a TTL
POLL_S = 0.3  # how often one that waits looks whether the lead is free
STEP_S = 0.05  # how soon a stop is noticed


class EtcdFailed(StoreUnavailable):
    """etcd did not answer, or refused; the message says which endpoints were asked."""


class NoLeader(StoreUnavailable):
    """Nobody leads there now."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    value: bytes
    mod_revision: int  # changes with each write of the key; 0: there is no such key


MISSING = KeyValue(b"", 0)


class EtcdClient:
    """The few calls of etcd v3 that an election needs, over its HTTP gateway.

    Keys and values travel as base64 in JSON, 64-bit numbers as decimal strings. Several endpoints
    of one cluster may be given: each call goes to the one that answered last, then to the others.
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

    def write_unless_changed(
        self, expected: Mapping[str, int], values: Mapping[str, bytes], leases: Mapping[str, int]
    ) -> bool:
        """Write all values if every key of `expected` still has that mod_revision, else nothing."""
        compare = [
            {"key": _packed(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in expected.items()
        ]
        puts = [
            {"request_put": {"key": _packed(key), "value": _packed(value),
                             "lease": str(leases.get(key, 0))}}
            for key, value in values.items()
        ]  # fmt: skip
        answer = self._post("/v3/kv/txn", {"compare": compare, "success": puts})
        return bool(answer.get("succeeded", False))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        failures = []
        for endpoint in list(self.endpoints):
            try:
                answer = self._session().post(endpoint + path, json=body, timeout=self.timeout_s)
                if answer.status_code == 200:
                    if endpoint != self.endpoints[0]:  # ask this one first from now on
                        others = [other for other in self.endpoints if other != endpoint]
                        self.endpoints = [endpoint, *others]
                    return answer.json()
                failures.append(f"{endpoint}: {answer.status_code} {answer.text.strip()[:200]}")
            except (requests.RequestException, ValueError) as error:
                failures.append(f"{endpoint}: {error}")
        raise EtcdFailed("etcd does not carry out " + path + ": " + "; ".join(failures))

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False  # etcd is near; a proxy for the internet does not know it
        return session


def _packed(text: str | bytes) -> str:
    raw = text.encode() if isinstance(text, str) else text
    return base64.b64encode(raw).decode()


def _key_value(found: Mapping[str, str]) -> KeyValue:
    return KeyValue(base64.b64decode(found.get("value", "")), int(found["mod_revision"]))


class Leader(msgspec.Struct, frozen=True):
    """What the key says."""

    address: str  # of its requests
    events: str
    name: str = ""  # for people: host and process
    epoch: int = 0  # of its reign; the election sets it


class Leadership:
    """A won election. Renews itself in a thread; once lost it stays lost."""

    def __init__(
        self, etcd: EtcdClient, lease: int, epoch: int, asked_s: float, ttl_s: float
    ) -> None:
        """`asked_s`: when (monotonic) the lease of `ttl_s` was asked for."""
        self.epoch = epoch
        self._etcd, self._lease, self._ttl_s = etcd, lease, ttl_s
        self._valid_until_s = _valid_until_s(asked_s, ttl_s)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="election", daemon=True)
        self._thread.start()

    def may_serve(self) -> bool:
        """May this process still act as the leader? Cheap: ask before each act."""
        return time.monotonic() < self._valid_until_s and not self._is_over.is_set()

    def close(self) -> None:
        """Give the lead away now, for a clean end. Twice is harmless."""
        was_over = self._is_over.is_set()
        self._is_over.set()
        self._thread.join()
        if not was_over:
            with contextlib.suppress(EtcdFailed):  # then it ends with its TTL
                self._etcd.revoke(self._lease)

    def _renew(self) -> None:
        wait_s = self._ttl_s / RENEWALS
        while not self._is_over.wait(wait_s):
            asked_s = time.monotonic()
            ttl_s = -1.0
            try:
                ttl_s = self._etcd.keep_alive(self._lease)
            except EtcdFailed as error:
                log.warning("leadership not renewed: %s", error)
            if ttl_s == 0 or time.monotonic() >= self._valid_until_s:  # lost is lost
                log.warning("leadership ended: its lease was not renewed in time")
                self._is_over.set()
            elif ttl_s > 0:
                self._valid_until_s = _valid_until_s(asked_s, ttl_s)
            wait_s = STEP_S if ttl_s < 0 else ttl_s / RENEWALS


def campaign(
    etcd: EtcdClient,
    prefix: str,
    leader: Leader,
    is_stopping: Callable[[], bool],
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ttl_s: int = TTL_S,
) -> Leadership | None:
    """Wait until `leader` is the one; None when `is_stopping` says so before."""
    said = ""
    while not is_stopping():
        try:
            won = _try_once(etcd, prefix, leader, now_ms, ttl_s)
            if won is not None:
                log.info("leads %s as %s, epoch %d", prefix, leader.address, won.epoch)
                return won
            says = f"waits: {_leader_of(etcd, prefix).address} leads {prefix}"
        except NoLeader:
            continue  # it went away between two questions
        except EtcdFailed as error:
            says = f"waits: {error}"
        if says != said:
            log.info("%s", says)
            said = says
        until_s = time.monotonic() + POLL_S
        while time.monotonic() < until_s and not is_stopping():
            time.sleep(STEP_S)
    return None


def _try_once(
    etcd: EtcdClient, prefix: str, leader: Leader, now_ms: Callable[[], int], ttl_s: int
) -> Leadership | None:
    key, epoch_key = f"{prefix}/leader", f"{prefix}/epoch"
    if etcd.get(key).mod_revision:
        return None
    last = etcd.get(epoch_key)
    epoch = max(now_ms(), _epoch(last.value) + 1)
    asked_s = time.monotonic()
    lease, really_s = etcd.grant(ttl_s)
    try:
        has_won = etcd.write_unless_changed(
            {key: 0, epoch_key: last.mod_revision},
            {
                key: msgspec.json.encode(structs.replace(leader, epoch=epoch)),
                epoch_key: str(epoch).encode(),
            },
            {key: lease},
        )
    except BaseException:  # perhaps it was written: then it must go before its TTL, if possible
        with contextlib.suppress(EtcdFailed):
            etcd.revoke(lease)
        raise
    if not has_won:
        with contextlib.suppress(EtcdFailed):
            etcd.revoke(lease)
        return None
    return Leadership(etcd, lease, epoch, asked_s, really_s)


def _valid_until_s(asked_s: float, ttl_s: float) -> float:
    return asked_s + ttl_s * (1.0 - MARGIN)


def _epoch(value: bytes) -> int:
    return int(value) if value.isdigit() else 0


def _leader_of(etcd: EtcdClient, prefix: str) -> Leader:
    found = etcd.get(f"{prefix}/leader")
    if not found.mod_revision:
        raise NoLeader(
            f"no directory leads {prefix} at {', '.join(etcd.endpoints)}: start one with --etcd, "
            "or wait: an election takes a few seconds"
        )
    try:
        return msgspec.json.decode(found.value, type=Leader)
    except (msgspec.DecodeError, ValueError) as error:
        raise StoreUnavailable(f"{prefix}/leader in etcd names no directory: {error}") from error


def leader_at(address: str, timeout_s: float = 1.0) -> Leader:
    """Who leads at etcd://HOST:PORT[,HOST:PORT...][/PREFIX]; NoLeader, EtcdFailed."""
    etcd, prefix = parse_address(address, timeout_s)
    return _leader_of(etcd, prefix)


class ElectedAddress:
    """Where a client found the leader. For one thread at a time."""

    def __init__(self, address: str) -> None:
        self._etcd, self._prefix = parse_address(address)
        self._leader: Leader | None = None

    def find(self) -> str:
        """The address of who leads now."""
        self._leader = _leader_of(self._etcd, self._prefix)
        return self._leader.address

    def has_moved(self) -> bool:
        """Does somebody else lead by now, or nobody, or the same under another epoch?"""
        try:
            return _leader_of(self._etcd, self._prefix) != self._leader
        except EtcdFailed:
            return False  # nobody can be elected meanwhile
        except StoreUnavailable:
            return True


def parse_address(address: str, timeout_s: float = 1.0) -> tuple[EtcdClient, str]:
    hosts, _, prefix = address.removeprefix(SCHEME).partition("/")
    names = [host for host in hosts.split(",") if host]
    if not address.startswith(SCHEME) or not names:
        raise RequestInvalid(f"{address!r}: use {SCHEME}HOST:PORT[,HOST:PORT...][/{PREFIX}]")
    endpoints = [f"http://{host}" for host in names]
    return EtcdClient(endpoints, timeout_s), prefix.strip("/") or PREFIX
