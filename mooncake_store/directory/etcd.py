"""The etcd v3 calls that directories need, over the HTTP gateway of etcd.

Keys and values are base64 in JSON, 64-bit numbers are decimal strings. Of several endpoints of one
cluster, each call tries the endpoint that answered last, then the others. A process with keys
(mooncake keys) uses mutual TLS: both sides present a certificate of the cluster.

Not here: the meaning of the keys (election.py, journal.py).
"""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import NewConnectionError

from mooncake_store.errors import AccessRefused, StoreUnavailable
from mooncake_store.keys import folder
from mooncake_store.keys.tls import contexts_of_process, refusal_words

DIGITS_MAX = 18  # most digits of a decimal number in a value
LOOK_S_MAX = 0.5  # timeout of each connection that finds out why a call over TLS failed


class EtcdFailed(StoreUnavailable):
    """etcd did not answer, or rejected the call; the message lists the endpoints."""


class EtcdRefused(EtcdFailed):
    """Every endpoint rejected the call, which was not executed and never will be."""


class EtcdAccessRefused(EtcdFailed, AccessRefused):
    """Every endpoint failed authentication, in either direction: wrong keys, or no keys."""


class EtcdExhausted(EtcdFailed):
    """Every endpoint answered, and one reported that etcd is full or overloaded. The call will not
    be executed later. But it may have been executed, because etcd reports an error also for the
    write that fills it, and executes this write."""


# gRPC codes in the answers of etcd. They are used instead of the HTTP status, whose relation to the
# codes changed between releases of etcd's gateway, and which a proxy may change.
# INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, FAILED_PRECONDITION, OUT_OF_RANGE,
# UNIMPLEMENTED, UNAUTHENTICATED: etcd detects each before it changes anything.
REFUSALS = frozenset({3, 5, 6, 7, 9, 11, 12, 16})
RESOURCE_EXHAUSTED = 8
KINDS = (EtcdRefused, EtcdExhausted, EtcdFailed)  # by rising uncertainty about the execution


@dataclass(frozen=True, slots=True)
class KeyValue:
    value: bytes
    mod_revision: int  # changes with each write of the key; 0: the key does not exist


MISSING = KeyValue(b"", 0)


class EtcdClient:
    """Client of one etcd cluster, without etcd's user authentication. Thread-safe. A call may be
    sent to several endpoints, one after the other. So it may have been executed even if it failed,
    or if it is a write that found its keys changed (by its own earlier attempt). A call takes at
    most about `timeout_s` per endpoint."""

    def __init__(self, endpoints: Sequence[str], timeout_s: float = 1.0) -> None:
        assert endpoints and timeout_s > 0
        self.endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self.timeout_s = timeout_s
        self._local = threading.local()  # a requests.Session must not be shared between threads

    def grant(self, ttl_s: int) -> tuple[int, float]:
        """(lease, its TTL in seconds). The TTL may be longer than the requested one."""
        answer = self._post("/v3/lease/grant", {"TTL": str(ttl_s)})
        return int(answer["ID"]), float(answer["TTL"])

    def keep_alive(self, lease: int) -> float:
        """Renew a lease. Returns the seconds until the lease expires; 0: it has ended."""
        answer = self._post("/v3/lease/keepalive", {"ID": str(lease)})
        return float(answer.get("result", {}).get("TTL", 0))

    def revoke(self, lease: int) -> None:
        """End the lease, and delete every key that was written under it."""
        self._post("/v3/lease/revoke", {"ID": str(lease)})

    def get(self, key: str) -> KeyValue:
        found = self._post("/v3/kv/range", {"key": _packed(key)}).get("kvs")
        return _key_value(found[0]) if found else MISSING

    def under(self, prefix: str, page_keys: int) -> Iterator[tuple[str, KeyValue]]:
        """Every key that starts with `prefix`, in order, fetched `page_keys` at a time."""
        start = prefix.encode()
        end = start[:-1] + bytes([start[-1] + 1])  # the last byte of a prefix is ASCII
        while True:
            body = {"key": _packed(start), "range_end": _packed(end), "limit": str(page_keys)}
            answer = self._post("/v3/kv/range", body)
            for found in answer.get("kvs", []):
                start = base64.b64decode(found["key"]) + b"\0"
                yield start[:-1].decode(errors="replace"), _key_value(found)
            if not answer.get("more", False):
                return

    def write_unless_changed(
        self,
        expected: Mapping[str, int],
        values: Mapping[str, bytes],
        leases: Mapping[str, int],
        gone: Sequence[tuple[str, str]] = (),
    ) -> int:
        """Write all values and delete the key ranges [first, end) in `gone`. If a key of `expected`
        (key -> mod_revision) has another mod_revision, change nothing. Returns the revision of the
        write; 0: nothing changed. `leases`: key -> lease with which the key ends. etcd rejects a
        key that is both written and deleted."""
        compare = [
            {"key": _packed(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in expected.items()
        ]
        puts = [
            {"key": _packed(key), "value": _packed(value), "lease": str(leases.get(key, 0))}
            for key, value in values.items()
        ]
        ranges = [{"key": _packed(first), "range_end": _packed(end)} for first, end in gone]
        operations = [
            *({"request_put": put} for put in puts),
            *({"request_delete_range": each} for each in ranges),
        ]
        answer = self._post("/v3/kv/txn", {"compare": compare, "success": operations})
        return int(answer["header"]["revision"]) if answer.get("succeeded", False) else 0

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        failures, rejected = [], 0
        kind: type[EtcdFailed] = EtcdRefused
        for endpoint in list(self.endpoints):
            try:
                answer = self._session().post(endpoint + path, json=body, timeout=self.timeout_s)
                if answer.status_code == 200:
                    if endpoint != self.endpoints[0]:  # use this endpoint first from now on
                        others = [other for other in self.endpoints if other != endpoint]
                        self.endpoints = [endpoint, *others]
                    return answer.json()
                kind = max(kind, _kind_of(answer), key=KINDS.index)
                failures.append(f"{endpoint}: {answer.status_code} {answer.text.strip()[:200]}")
            except (requests.RequestException, ValueError) as error:
                kind = EtcdFailed
                problem = access_problem(endpoint, error)
                rejected += bool(problem)
                failures.append(problem or f"{endpoint}: {error}")
        if rejected == len(self.endpoints):
            kind = EtcdAccessRefused
        raise kind("etcd does not carry out " + path + ": " + "; ".join(failures))

    def _session(self) -> requests.Session:
        """This thread's session. New certificates need a new session."""
        contexts = contexts_of_process()
        now = contexts.http_client if contexts is not None else None
        held: tuple[ssl.SSLContext | None, requests.Session] | None
        held = getattr(self._local, "session", None)
        if held is None or held[0] is not now:
            if held is not None:
                held[1].close()
            held = self._local.session = (now, etcd_session())
        return held[1]


class MemberAdapter(HTTPAdapter):
    """Presents this host's certificate, and accepts the certificate of a cluster member."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__()

    def init_poolmanager(
        self, connections: int, maxsize: int, block: bool = False, **more: Any
    ) -> None:
        # With assert_hostname, urllib3 would check the name itself and disable the context's check.
        # With server_hostname, the context checks the name.
        super().init_poolmanager(
            connections,
            maxsize,
            block,
            ssl_context=self._context,
            **more,
            server_hostname=folder.MEMBER,
        )

    def cert_verify(self, *_: Any, **__: Any) -> None:
        """No checks here, because the TLS context checks the certificate."""


def _kind_of(answer: requests.Response) -> type[EtcdFailed]:
    try:
        body = answer.json()
    except ValueError:
        return EtcdFailed
    code = body.get("code") if isinstance(body, dict) else None
    if code == RESOURCE_EXHAUSTED:
        return EtcdExhausted
    return EtcdRefused if code in REFUSALS else EtcdFailed


def etcd_session() -> requests.Session:
    """A session for one thread, with this host's certificate if this process has keys."""
    session = requests.Session()
    session.trust_env = False  # etcd is in the cluster, so an internet proxy cannot reach it
    if (contexts := contexts_of_process()) is not None:
        session.mount("https://", MemberAdapter(contexts.http_client))
    return session


def etcd_url(endpoint: str) -> str:
    """The URL of HOST:PORT: https if this process has keys, else http."""
    return f"{'http' if folder.of_process() is None else 'https'}://{endpoint}"


def access_problem(endpoint: str, error: Exception) -> str:
    """The message for a failed call if one side rejects the other's certificate; else ""."""
    if not isinstance(error, requests.ConnectionError) or isinstance(error, requests.Timeout):
        return ""
    if isinstance(
        getattr(error.args[0], "reason", None) if error.args else None, NewConnectionError
    ):
        return ""  # no process listens there
    cause = _tls_error(error)
    # After a rejection in the middle of a request, the client may only see a closed connection.
    if cause is None or isinstance(cause, ssl.SSLEOFError):
        cause = _handshake_error(endpoint)
    is_refusal = cause is not None and "ALERT" in (cause.reason or "")
    if endpoint.startswith("http://"):
        return _NO_KEYS_HERE.format(endpoint) if is_refusal else ""
    if cause is not None:
        return refusal_words(f"etcd at {endpoint}", cause)
    return _NO_KEYS_THERE.format(endpoint) if _uses_http(endpoint) else ""


_NO_KEYS_HERE = (
    "etcd at {} requires a certificate, and this process has none: set "
    f"{folder.VARIABLE} to the folder of this host's keys (mooncake keys add-host)"
)
_NO_KEYS_THERE = (
    "etcd at {} uses plain HTTP, and this process has keys: start its members with keys too "
    "(`mooncake serve --cluster` does), or an etcd of your own as docs/operations.md says"
)


def _uses_http(endpoint: str) -> bool:
    try:
        with etcd_session() as session:
            plain = endpoint.replace("https://", "http://", 1)
            return session.get(f"{plain}/version", timeout=LOOK_S_MAX).status_code == 200
    except requests.RequestException:
        return False


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """The TLS error among the arguments and causes of an error of requests or urllib3."""
    if isinstance(error, ssl.SSLError):
        return None if isinstance(error, TimeoutError) else error
    below = [*error.args, getattr(error, "reason", None), error.__cause__]
    found = (_tls_error(each) for each in below if isinstance(each, BaseException))
    return next(filter(None, found), None)


def _handshake_error(endpoint: str) -> ssl.SSLError | None:
    """The TLS error of a handshake without a request; None: no error, or no TLS."""
    named = urlsplit(endpoint)
    contexts = contexts_of_process()
    if contexts is not None:
        context = contexts.client
    else:  # without a certificate: a server that requires one rejects it
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        address = (named.hostname or "", named.port or 80)
        with (
            socket.create_connection(address, LOOK_S_MAX) as raw,
            context.wrap_socket(raw, server_hostname=folder.MEMBER) as secured,
        ):
            secured.recv(1)
    except ssl.SSLError as error:
        is_silent = isinstance(error, (TimeoutError, ssl.SSLEOFError))
        return None if is_silent else error
    except OSError:
        pass
    return None


def decimal(value: bytes) -> int:
    """The number in a value; 0: the value is no number, or has more than DIGITS_MAX digits."""
    return int(value) if value.isdigit() and len(value) <= DIGITS_MAX else 0


def _packed(text: str | bytes) -> str:
    raw = text.encode() if isinstance(text, str) else text
    return base64.b64encode(raw).decode()


def _key_value(found: Mapping[str, str]) -> KeyValue:
    return KeyValue(base64.b64decode(found.get("value", "")), int(found["mod_revision"]))
