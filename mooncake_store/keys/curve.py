"""CURVE on ZeroMQ's sockets: which addresses need it, whose keys they take, who was refused.

Only tcp:// has it: ipc:// and Unix sockets are guarded by the file system and stay as fast as they
are. The directory has the cluster's key, because its address is all that a client begins with. Who
is found through the directory (a node, an inbox) makes a key of its own at each start and says it
with its address,

    tcp://10.77.0.1:41234#<public key, 64 hex digits>

so that nothing has to be renewed there, and a process that took over a port is not believed.

Not here: which clients are let in (gate.py), what follows from a refusal (wire/).
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
from mooncake_store.keys.folder import Keys
from mooncake_store.keys.gate import DOMAIN, guard

INSECURE_VARIABLE = "MOONCAKE_INSECURE"
log = logging.getLogger(__name__)
RENEW_S_MAX = 3.0  # until the port that a socket let go of can be had again
RENEW_NOTE_S = 60.0  # between two lines about one that cannot
HANDSHAKE_MS = 5_000  # who connects and says nothing
SILENT_FAILURES_MAX = 3  # a server that ends breaks off a handshake or two as well
LOST_FAILURES = 10  # between two looks at a connection that nobody uses
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class AddressUnguarded(RequestInvalid):
    """Others than this host reach the address, and there are no keys."""


def is_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def is_loopback(address: str) -> bool:
    """Does only this host reach tcp://HOST:PORT, or HOST:PORT?"""
    host = address.removeprefix("tcp://").partition("#")[0].rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # "*", or a name that may be anybody's


def refuse_unguarded(address: str, keys: Keys | None) -> None:
    """AddressUnguarded when other hosts reach this address and nothing asks who they are."""
    if keys is not None or is_loopback(address) or os.environ.get(INSECURE_VARIABLE) == "1":
        return
    raise AddressUnguarded(
        f"{address} can be reached from other hosts, and there are no keys: whoever reaches it "
        f"could read and change everything. Name a folder of keys ({folder.VARIABLE}, made by "
        "`mooncake keys init`), listen on a loopback address, or write insecure (--insecure, "
        "`insecure: true` in the cluster file) if that is what you want"
    )


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs of one generation; no repr, as it has a secret."""

    server_public: bytes
    own_public: bytes
    own_secret: bytes

    def __repr__(self) -> str:
        return "ClientKeys(...)"


def secured_server(
    socket: zmq.Socket[Any], context: zmq.Context[Any], address: str, is_directory: bool = False
) -> str:
    """Before bind(): what the folder of this process asks for at such an address.

    What an address is to be followed by when it is told to others: "" or "#KEY". AddressUnguarded.
    """
    if not is_tcp(address):
        return ""
    keys = folder.of_process()
    refuse_unguarded(address, keys)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if keys is None:
        return ""
    guard(context, keys)
    socket.zap_domain = DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without its gate nobody comes in
    socket.curve_server = 1
    if is_directory:
        set_directory_key(socket, keys)
        return ""
    public, secret = zmq.curve_keypair()
    socket.curve_publickey, socket.curve_secretkey = public, secret
    return "#" + z85.decode(public).hex()


def set_directory_key(socket: zmq.Socket[Any], keys: Keys) -> int:
    """The directory's key of the active generation, for the next bind(); that one's number."""
    active = keys.curve.ordered()[0]
    if not active.directory_secret:
        raise AddressUnguarded(
            f"no directory may run on host {keys.curve.host}: its keys in {keys.folder} lack the "
            "directory's (mooncake keys add-host --directory)"
        )
    socket.curve_publickey = active.directory_public.encode()
    socket.curve_secretkey = active.directory_secret.encode()
    return active.number


def with_key_of(bound: str, advertised: str) -> str:
    """The address as others see it, with the key of the one that is bound."""
    return advertised.partition("#")[0] + "".join(bound.partition("#")[1:])


class DirectoryKey:
    """Keeps the directory's sockets at the active generation of its key, while they are open.

    A socket keeps the key that it was bound with, so it is bound anew. That breaks its connections:
    clients come back by themselves, with the other key (PeerAccess), and ask again.
    """

    def __init__(self, sockets: list[zmq.Socket[Any]]) -> None:
        """These are bound, with the key of now."""
        self._keys = folder.of_process()
        endpoints = [(each, each.getsockopt_string(zmq.LAST_ENDPOINT)) for each in sockets]
        self._bound = [each for each in endpoints if is_tcp(each[1])] if self._keys else []
        self._unbound: list[tuple[zmq.Socket[Any], str]] = []
        self._note_due_s = float("-inf")
        self._number = self._keys.curve.active if self._keys else 0

    @property
    def silent(self) -> list[str]:
        """Where the directory does not listen, since it let go of them to renew its key."""
        return [address for _, address in self._unbound]

    def renew(self, now_s: float) -> None:
        """Call it often: it looks whether the folder has another active generation."""
        if not self._bound or self._keys is None:
            return
        if self._number != self._keys.curve.active:
            for socket, endpoint in self._bound:
                if (socket, endpoint) not in self._unbound:
                    with contextlib.suppress(zmq.ZMQError):  # it is not bound any more
                        socket.unbind(endpoint)
                    self._unbound.append((socket, endpoint))
                self._number = set_directory_key(socket, self._keys)
            log.info("the directory's key is of generation %d now", self._number)
            self._note_due_s = now_s + RENEW_S_MAX
        why: zmq.ZMQError | None = None
        for socket, endpoint in list(self._unbound):
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:  # not closed yet, or taken: again at the next call
                why = error
                continue
            self._unbound.remove((socket, endpoint))
            log.info("the directory listens at %s again", endpoint)
        if self._unbound and now_s >= self._note_due_s:
            self._note_due_s = now_s + RENEW_NOTE_S
            log.error(
                "the directory does not listen at %s, which it let go of to renew its key: %s. It "
                "tries again each second; end what has taken the port",
                ", ".join(self.silent),
                why,
            )


def client_keys(address: str) -> list[ClientKeys]:
    """With which keys to try there, in this order; [] to speak in plain."""
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
# Who reads them must last as long as the socket: without a reader its I/O thread waits for one.
_READERS: weakref.WeakKeyDictionary[zmq.Socket[Any], zmq.Socket[bytes]]
_READERS = weakref.WeakKeyDictionary()


class PeerAccess:
    """A client's way in at one address: which keys it tries next, and when it gives up.

    While two generations overlap a server may have either: a client tries one after the other.
    """

    def __init__(self, address: str, who: str = "") -> None:
        """`who`: the other side, as a refusal names it."""
        self._address, self._who = address, who or address
        self._failures = 0  # in a row
        self._turn = 0  # of the keys
        self._used: ClientKeys | None = None
        self._watched: zmq.Socket[Any] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def monitor(self) -> zmq.Socket[bytes] | None:
        """Readable when there is something for `must_redial`; None where nobody is refused."""
        return self._monitor

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """With the keys whose turn it is, or in plain. zmq.ZMQError for what is no address."""
        known = client_keys(self._address)
        self._used = known[self._turn % len(known)] if known else None
        if self._used is not None:
            socket.curve_publickey = self._used.own_public
            socket.curve_secretkey = self._used.own_secret
            socket.curve_serverkey = self._used.server_public
        if is_tcp(self._address) and self._watched is not socket:
            # A name of its own: that of a socket is free again only a while after `close`.
            self._monitor = _monitor(socket, f"inproc://peer-access-{next(_MONITORS)}")
            self._watched = socket
        socket.connect(self._address.partition("#")[0])

    def must_redial(self) -> bool:
        """Refused, and there are other keys to try: connect() again, best with a fresh socket.

        AccessRefused when all have been tried.
        """
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
        """The event; None when nothing failed, or something has worked since.

        However often ZeroMQ has tried these keys by itself since the last look counts as once: the
        others that this host has are still to be tried.
        """
        events = self._events()
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
            self._failures = 0
        if not events or events[-1] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return None
        self._failures += 1
        return events[-1]

    def is_lost(self) -> bool:
        """Has nothing but failed many times since the last look? For a connection in no use: what
        has happened to it is forgotten, so that it does not pile up.
        """
        events = self._events()
        return len(events) >= LOST_FAILURES and zmq.EVENT_HANDSHAKE_SUCCEEDED not in events

    def _events(self) -> list[int]:
        """What has happened since the last look, oldest first."""
        events: list[int] = []
        while self._monitor is not None and self._monitor.poll(0):
            events.append(recv_monitor_message(self._monitor)["event"])
        return events

    def _causes(self, failure: int) -> str:
        if failure == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return _UNKNOWN_CLIENT
        found = _OTHER_MECHANISM if failure == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL else _SILENT
        return found[self._used is not None]

    def close(self) -> None:
        """Before the socket is closed."""
        if self._monitor is not None and self._watched is not None:
            self._watched.disable_monitor()
            self._monitor.close(linger=0)
        self._monitor = self._watched = None


def _monitor(socket: zmq.Socket[Any], name: str) -> zmq.Socket[bytes]:
    """Where the socket's handshakes are told.

    Without a limit: ZeroMQ waits for room in it, and so its I/O thread would stop, with every
    socket of the context, as soon as a connection has failed often and nobody has read why. Idle
    ones are looked at by wire/idle_look.py.
    """
    socket.monitor(name, EVENTS)
    reader: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.connect(name)
    _READERS[socket] = reader
    return reader


_UNKNOWN_CLIENT = (
    "it does not know the key of this host. Was the host added (mooncake keys add-host) and the "
    f"folder copied to all hosts, or is {folder.VARIABLE} the folder of another cluster, or of "
    "keys that were renewed since?"
)
_OTHER_MECHANISM = {
    False: f"it asks for keys, and this process has none. Set {folder.VARIABLE} to the folder of "
    "this host's keys (mooncake keys add-host); or no mooncake listens there at all",
    True: f"it speaks without keys, and this process has some. Give it {folder.VARIABLE} and start "
    "it again; or no mooncake listens there at all",
}
_SILENT = {
    False: f"it closes it during the handshake. It may ask for keys ({folder.VARIABLE} is not set "
    "here), or no mooncake listens there",
    True: "it closes it during the handshake. Its key is another than this host expects: the "
    "folders of keys are of different clusters or generations (copy them anew, `mooncake keys "
    "check`), it has no keys at all, or no mooncake listens there",
}
