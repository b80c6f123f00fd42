"""CURVE encryption of ZeroMQ sockets: addresses, keys, and rejected connections.

Only tcp:// addresses use CURVE. Permissions of the file system protect ipc:// and Unix sockets. All
directories share one CURVE key. Every host's folder has the public half of this key, because a
client at first has only the address of a directory. Other servers (a storage node, a worker's
inbox) make a new key at each start. The addresses that they publish contain its public half:

    tcp://10.77.0.1:41234#<public key, 64 hex digits>

Such keys need no renewal. If another process takes over the port, clients reject that process.

Not here: the admission of clients (gate.py), the handling of a rejection (wire/).
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import os
import weakref
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from mooncake_store.errors import AccessRefused, RequestInvalid
from mooncake_store.keys import folder
from mooncake_store.keys.folder import CurveGeneration, Keys
from mooncake_store.keys.gate import DOMAIN, guard

INSECURE_VARIABLE = "MOONCAKE_INSECURE"
log = logging.getLogger(__name__)
RENEW_S_MAX = 3.0  # seconds from a renewal to the first log line about a port that is not bound
RENEW_NOTE_S = 60.0  # seconds between two log lines about such a port or a key that is not renewed
HANDSHAKE_MS = 5_000  # timeout for clients that connect and send nothing
SILENT_FAILURES_MAX = 3  # unexplained failures until AccessRefused; an exiting server causes 1 or 2
LOST_FAILURES = 10  # failed handshakes between two calls of is_lost() that show a lost connection
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class AddressUnguarded(RequestInvalid):
    """This process lacks the keys that are required to listen at this address."""


def is_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def is_loopback(address: str) -> bool:
    """Whether only this host can reach `address` (tcp://HOST:PORT or HOST:PORT)."""
    host = address.removeprefix("tcp://").partition("#")[0].rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # "*" or another name


def refuse_unguarded(address: str, keys: Keys | None) -> None:
    """Raise AddressUnguarded if other hosts can reach this tcp://HOST:PORT or HOST:PORT, and the
    process has neither keys nor MOONCAKE_INSECURE=1."""
    if keys is not None or is_loopback(address) or os.environ.get(INSECURE_VARIABLE) == "1":
        return
    raise AddressUnguarded(
        f"other hosts can reach {address}, and there are no keys: each of these hosts could "
        f"read and change everything. Set {folder.VARIABLE} to a folder of keys (made by "
        "`mooncake keys init`), listen on a loopback address, or permit this with --insecure "
        "(`insecure: true` in the cluster file)"
    )


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of one generation (keys made together) for one connection. Its repr has no keys."""

    server_public: bytes
    own_public: bytes
    own_secret: bytes

    def __repr__(self) -> str:
        return "ClientKeys(...)"


def secured_server(
    socket: zmq.Socket[Any], context: zmq.Context[Any], address: str, is_directory: bool = False
) -> str:
    """Set up CURVE on a server's socket before bind(), if the address is tcp:// and the process has
    keys. Returns the suffix of the published address: "#KEY", or "" without CURVE and for a
    directory. AddressUnguarded, KeysInvalid: the socket must not be bound."""
    if not is_tcp(address):
        return ""
    keys = folder.of_process()
    refuse_unguarded(address, keys)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if keys is None:
        return ""
    guard(context, keys)
    socket.zap_domain = DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # if gate.py does not run, reject every client
    socket.curve_server = 1
    if is_directory:
        _set_directory_key(socket, _directory_generation(keys))
        return ""
    public, secret = zmq.curve_keypair()
    socket.curve_publickey, socket.curve_secretkey = public, secret
    return "#" + z85.decode(public).hex()


def _directory_generation(keys: Keys) -> CurveGeneration:
    """The active generation. AddressUnguarded: this host may not run a directory."""
    active = keys.curve.ordered()[0]
    if not active.directory_secret:
        raise AddressUnguarded(
            f"no directory may run on host {keys.curve.host}: {keys.folder} lacks the directory's "
            "secret key (`mooncake keys add-host --directory` adds it)"
        )
    return active


def _set_directory_key(socket: zmq.Socket[Any], generation: CurveGeneration) -> None:
    """Set this key for the next bind()."""
    socket.curve_publickey = generation.directory_public.encode()
    socket.curve_secretkey = generation.directory_secret.encode()


def with_key_of(bound: str, advertised: str) -> str:
    """`advertised` with the public key of `bound`; without a key if `bound` has none."""
    return advertised.partition("#")[0] + "".join(bound.partition("#")[1:])


class DirectoryKey:
    """Changes the key of the directory's sockets when another generation becomes active. A socket
    uses the key that it had at bind(). A new key therefore needs a new bind(), which breaks all
    connections. Clients reconnect with the new key (PeerAccess) and repeat their requests."""

    def __init__(self, sockets: list[zmq.Socket[Any]]) -> None:
        """`sockets` must be bound, with the key of the active generation."""
        self._keys = folder.of_process()
        endpoints = [(each, each.getsockopt_string(zmq.LAST_ENDPOINT)) for each in sockets]
        self._bound = [each for each in endpoints if is_tcp(each[1])] if self._keys else []
        self._unbound: list[tuple[zmq.Socket[Any], str]] = []
        self._note_due_s = float("-inf")
        self._number = self._keys.curve.active if self._keys else 0  # generation in use

    @property
    def silent(self) -> list[str]:
        """Addresses that were released to renew the key and could not yet be bound again."""
        return [address for _, address in self._unbound]

    def renew(self, now_s: float) -> None:
        """Change to the active generation, and bind released addresses again. Call it each second.
        If this host lacks the directory key of that generation, nothing changes."""
        if not self._bound or self._keys is None:
            return
        if self._number != self._keys.curve.active:
            try:  # raise before any socket is unbound
                active = _directory_generation(self._keys)
            except AddressUnguarded as error:
                if now_s >= self._note_due_s:
                    self._note_due_s = now_s + RENEW_NOTE_S
                    log.error("the directory keeps the key of an old generation: %s", error)
                return
            for socket, endpoint in self._bound:
                if (socket, endpoint) not in self._unbound:
                    with contextlib.suppress(zmq.ZMQError):  # the socket is no longer bound
                        socket.unbind(endpoint)
                    self._unbound.append((socket, endpoint))
                _set_directory_key(socket, active)
            self._number = active.number
            log.info("the directory now uses the key of generation %d", self._number)
            self._note_due_s = now_s + RENEW_S_MAX
        why: zmq.ZMQError | None = None
        for socket, endpoint in list(self._unbound):
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:  # the port is not free yet: retry at the next call
                why = error
                continue
            self._unbound.remove((socket, endpoint))
            log.info("the directory listens at %s again", endpoint)
        if self._unbound and now_s >= self._note_due_s:
            self._note_due_s = now_s + RENEW_NOTE_S
            log.error(
                "the directory does not listen at %s, which it released to renew its key: %s. It "
                "retries each second. If another process has taken the port, stop that process",
                ", ".join(self.silent),
                why,
            )


def client_keys(address: str) -> list[ClientKeys]:
    """The keys to try at this address, in order; [] for a connection without keys. KeysInvalid: the
    folder of keys cannot be used."""
    keys = folder.of_process() if is_tcp(address) else None
    if keys is None:
        return []
    _, _, named = address.partition("#")
    return [
        ClientKeys(
            z85.encode(bytes.fromhex(named)) if named else each.directory_public.encode(),
            each.own_public.encode(),
            each.own_secret.encode(),
        )
        for each in keys.curve.ordered()
    ]


_MONITORS = itertools.count()
# The reader of each monitored socket, kept here because the I/O thread would block without it.
_READERS: weakref.WeakKeyDictionary[zmq.Socket[Any], zmq.Socket[bytes]]
_READERS = weakref.WeakKeyDictionary()


class PeerAccess:
    """A client's authentication at one address. While two generations are valid, the server may
    use the keys of either, so the client tries both until one handshake succeeds."""

    def __init__(self, address: str, who: str = "") -> None:
        """`who`: the server's name in error messages; "": the address."""
        self._address, self._who = address, who or address
        self._failures = 0  # failed handshakes since the last success or AccessRefused
        self._turn = 0  # index of the keys to try, modulo their number
        self._used: ClientKeys | None = None
        self._watched: zmq.Socket[Any] | None = None
        # Readable when `must_redial` has events to read. None: not connected, or not over tcp://.
        self.monitor: zmq.Socket[bytes] | None = None

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """Connect with the next keys, or without keys. zmq.ZMQError for an invalid address."""
        known = client_keys(self._address)
        self._used = known[self._turn % len(known)] if known else None
        if self._used is not None:
            socket.curve_publickey = self._used.own_public
            socket.curve_secretkey = self._used.own_secret
            socket.curve_serverkey = self._used.server_public
        if is_tcp(self._address) and self._watched is not socket:
            # A unique name, because the name of a closed monitor becomes free only after a while.
            self.monitor = _monitor(socket, f"inproc://peer-access-{next(_MONITORS)}")
            self._watched = socket
        socket.connect(self._address.partition("#")[0])

    def must_redial(self) -> bool:
        """True if a handshake failed and there are other or renewed keys: call connect() again,
        best with a new socket. False: none failed, or ZeroMQ itself retries with the only keys.
        AccessRefused: all keys failed. Unexplained failures must also reach SILENT_FAILURES_MAX."""
        failure = self._newest_failure()
        if failure is None:
            return False
        known = client_keys(self._address)
        is_definite = failure != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        attempts_max = max(len(known), 1) if is_definite else max(SILENT_FAILURES_MAX, len(known))
        if self._failures >= attempts_max:
            self._failures = 0
            raise AccessRefused(f"{self._who} refuses this connection: {self._causes(failure)}")
        is_known = self._used is None if not known else self._used in known
        self._turn += 1
        return not is_known or len(known) > 1

    def _newest_failure(self) -> int | None:
        """The event of the newest failed handshake; None if none failed or a later one succeeded.
        All failures since the last call count as one, because ZeroMQ used the same keys for them,
        and the other keys of this host must still be tried."""
        events = self._events()
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
            self._failures = 0
        if not events or events[-1] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return None
        self._failures += 1
        return events[-1]

    def is_lost(self) -> bool:
        """Whether many handshakes failed and none succeeded since the last call. Call it for unused
        connections too, because it discards their events, which would accumulate."""
        events = self._events()
        return len(events) >= LOST_FAILURES and zmq.EVENT_HANDSHAKE_SUCCEEDED not in events

    def _events(self) -> list[int]:
        """The events since the last call, oldest first."""
        events: list[int] = []
        while self.monitor is not None and self.monitor.poll(0):
            events.append(recv_monitor_message(self.monitor)["event"])
        return events

    def _causes(self, failure: int) -> str:
        if failure == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return _UNKNOWN_CLIENT
        found = _OTHER_MECHANISM if failure == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL else _SILENT
        return found[self._used is not None]

    def close(self) -> None:
        """Close the monitor; call it before the socket is closed."""
        if self.monitor is not None and self._watched is not None:
            self._watched.disable_monitor()
            self.monitor.close(linger=0)
        self.monitor = self._watched = None


def _monitor(socket: zmq.Socket[Any], name: str) -> zmq.Socket[bytes]:
    """A reader of the socket's handshake events.

    The reader's queue has no limit. A connection that fails often would fill a limited queue while
    no thread reads the events. ZeroMQ would then block the I/O thread and every socket of the
    context. wire/idle_look.py reads the events of idle connections.
    """
    socket.monitor(name, EVENTS)
    reader: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.connect(name)
    _READERS[socket] = reader
    return reader


_UNKNOWN_CLIENT = (
    "the key of this host is unknown there. Add the host (mooncake keys add-host) and copy the "
    f"folders to all hosts. If that was done, {folder.VARIABLE} may name the folder of another "
    "cluster, or old keys that were renewed since"
)
_OTHER_MECHANISM = {
    False: f"it requires keys, and this process has none. Set {folder.VARIABLE} to the folder of "
    "this host's keys (mooncake keys add-host); or no mooncake listens there",
    True: f"it uses no keys, and this process has some. Set {folder.VARIABLE} for that server and "
    "restart it; or no mooncake listens there",
}
_SILENT = {
    False: f"the handshake was broken off. The server may require keys ({folder.VARIABLE} is not "
    "set here), or no mooncake listens there",
    True: "the handshake was broken off. The server's key is not the one that this host expects: "
    "the folders of keys are of different clusters or generations (copy them again, `mooncake keys "
    "check`), the server has no keys at all, or no mooncake listens there",
}
