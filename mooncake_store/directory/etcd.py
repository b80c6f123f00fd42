"""The few calls of etcd v3 that directories need, over its HTTP gateway.

Keys and values travel as base64 in JSON, 64-bit numbers as decimal strings. Several endpoints of
one cluster may be given: each call goes to the one that answered last, then to the others.

Where a process has keys it is mutual TLS: both sides show a certificate of the cluster.

Not here: what the keys mean (election.py, journal.py).
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

DIGITS_MAX = 18
LOOK_S_MAX = 0.5  # whether an endpoint that broke off asks for TLS


class EtcdFailed(StoreUnavailable):
    """etcd did not answer, or refused; the message says which endpoints were asked."""


class EtcdRefused(EtcdFailed):
    """Every endpoint answered that it will not: it has not been, and will not be, carried out."""


class EtcdAccessRefused(EtcdFailed, AccessRefused):
    """No endpoint lets this process in, or is who it should be: keys, or no keys."""


class EtcdExhausted(EtcdFailed):
    """Every endpoint answered, one of them that etcd is full or has too much to do.

    It has been carried out or not, and will not be later: the write that makes etcd full is made,
    and refused all the same.
    """


# Codes of gRPC in the answers of etcd. Its gateway makes HTTP's status of them by a table that has
# changed between releases, and a proxy before it has others: no status says what was not done.
# INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, FAILED_PRECONDITION, OUT_OF_RANGE,
# UNIMPLEMENTED, UNAUTHENTICATED: each is found before anything is changed.
REFUSALS = frozenset({3, 5, 6, 7, 9, 11, 12, 16})
RESOURCE_EXHAUSTED = 8


@dataclass(frozen=True, slots=True)
class KeyValue:
    value: bytes
    mod_revision: int  # changes with each write of the key; 0: there is no such key


MISSING = KeyValue(b"", 0)


class EtcdClient:
    """One cluster. A call may be asked of several endpoints, so one that failed, or a write that
    found its keys changed, may have been carried out all the same.

    No user names. Thread-safe. Each call ends within about `timeout_s` for each endpoint.
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
            {
                "request_put": {
                    "key": _packed(key),
                    "value": _packed(value),
                    "lease": str(leases.get(key, 0)),
                }
            }
            for key, value in values.items()
        ]
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
        puts = [
            {"request_put": {"key": _packed(key), "value": _packed(value)}}
            for key, value in values.items()
        ]
        deletes = [
            {"request_delete_range": {"key": _packed(first), "range_end": _packed(end)}}
            for first, end in gone
        ]
        return self._transact(expected, [*puts, *deletes])

    def _transact(self, expected: Mapping[str, int], operations: Sequence[object]) -> int:
        compare = [
            {"key": _packed(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in expected.items()
        ]
        answer = self._post("/v3/kv/txn", {"compare": compare, "success": list(operations)})
        return int(answer["header"]["revision"]) if answer.get("succeeded", False) else 0

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        failures, kept_out = [], 0
        kind: type[EtcdFailed] = EtcdRefused
        for endpoint in list(self.endpoints):
            try:
                answer = self._session().post(endpoint + path, json=body, timeout=self.timeout_s)
                if answer.status_code == 200:
                    if endpoint != self.endpoints[0]:  # ask this one first from now on
                        others = [other for other in self.endpoints if other != endpoint]
                        self.endpoints = [endpoint, *others]
                    return answer.json()
                kind = _worse(kind, _kind_of(answer))
                failures.append(f"{endpoint}: {answer.status_code} {answer.text.strip()[:200]}")
            except (requests.RequestException, ValueError) as error:
                kind = EtcdFailed
                problem = access_problem(endpoint, error)
                kept_out += bool(problem)
                failures.append(problem or f"{endpoint}: {error}")
        if kept_out == len(self.endpoints):
            kind = EtcdAccessRefused
        raise kind("etcd does not carry out " + path + ": " + "; ".join(failures))

    def _session(self) -> requests.Session:
        """With the certificates of now: renewed ones are shown by a new connection only."""
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
    """Shows this host's certificate, and believes what a member of the cluster shows."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__()

    def init_poolmanager(
        self, connections: int, maxsize: int, block: bool = False, **more: Any
    ) -> None:
        # With assert_hostname urllib3 would check the name itself, and switch the context's check
        # off; so it is the context that checks server_hostname.
        super().init_poolmanager(
            connections,
            maxsize,
            block,
            ssl_context=self._context,
            **more,
            server_hostname=folder.MEMBER,
        )

    def cert_verify(self, *_: Any, **__: Any) -> None:
        """The context says all of it; the authorities of the internet have no say here."""


def _kind_of(answer: requests.Response) -> type[EtcdFailed]:
    """What an answer that is no success says of the request."""
    try:
        said = answer.json()
    except ValueError:
        return EtcdFailed
    code = said.get("code") if isinstance(said, dict) else None
    if code == RESOURCE_EXHAUSTED:
        return EtcdExhausted
    return EtcdRefused if code in REFUSALS else EtcdFailed


def _worse(one: type[EtcdFailed], other: type[EtcdFailed]) -> type[EtcdFailed]:
    """Which of two says less of what was carried out."""
    return max(one, other, key=(EtcdRefused, EtcdExhausted, EtcdFailed).index)


def etcd_session() -> requests.Session:
    """For one thread; with this host's certificate where this process has keys."""
    session = requests.Session()
    session.trust_env = False  # etcd is near; a proxy for the internet does not know it
    if (contexts := contexts_of_process()) is not None:
        session.mount("https://", MemberAdapter(contexts.http_client))
    return session


def etcd_url(endpoint: str) -> str:
    """Of HOST:PORT, as this process calls it."""
    return f"{'http' if folder.of_process() is None else 'https'}://{endpoint}"


def access_problem(endpoint: str, error: Exception) -> str:
    """What a failed call means where one side does not believe the other; "": something else."""
    if not isinstance(error, requests.ConnectionError) or isinstance(error, requests.Timeout):
        return ""
    if isinstance(
        getattr(error.args[0], "reason", None) if error.args else None, NewConnectionError
    ):
        return ""  # nobody is there to refuse anything
    cause = _tls_error(error)
    # Who is refused in the middle of a request may read no more than that the connection is gone.
    if cause is None or isinstance(cause, ssl.SSLEOFError):
        cause = _handshake_error(endpoint)
    is_refusal = cause is not None and "ALERT" in (cause.reason or "")
    if endpoint.startswith("http://"):
        return _NO_KEYS_HERE.format(endpoint) if is_refusal else ""
    if cause is not None:
        return refusal_words(f"etcd at {endpoint}", cause)
    return _NO_KEYS_THERE.format(endpoint) if _speaks_plain(endpoint) else ""


_NO_KEYS_HERE = (
    "etcd at {} asks for a certificate, and this process has none: set "
    f"{folder.VARIABLE} to the folder of this host's keys (mooncake keys add-host)"
)
_NO_KEYS_THERE = (
    "etcd at {} speaks plain HTTP, and this process has keys: start its members with keys too "
    "(`mooncake serve --cluster` does), or an etcd of your own as docs/operations.md says"
)


def _speaks_plain(endpoint: str) -> bool:
    try:
        with etcd_session() as session:
            plain = endpoint.replace("https://", "http://", 1)
            return session.get(f"{plain}/version", timeout=LOOK_S_MAX).status_code == 200
    except requests.RequestException:
        return False


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """Below the errors of requests and urllib3, which keep it as an argument or a cause."""
    if isinstance(error, ssl.SSLError):
        return None if isinstance(error, TimeoutError) else error
    below = [*error.args, getattr(error, "reason", None), error.__cause__]
    found = (_tls_error(each) for each in below if isinstance(each, BaseException))
    return next(filter(None, found), None)


def _handshake_error(endpoint: str) -> ssl.SSLError | None:
    """Shake hands and ask nothing, so that a refusal arrives; None for none, or no TLS there."""
    named = urlsplit(endpoint)
    contexts = contexts_of_process()
    if contexts is not None:
        context = contexts.client
    else:  # of no use to a server that asks for one: it refuses who has no certificate
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
