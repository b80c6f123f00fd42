"""ZeroMQ as product code sees it, over the simulated network: PUSH and PULL, DEALER and ROUTER, SUB
and XPUB.

What a peer that is away would get waits at the sender, as in ZeroMQ, and goes to whoever listens at
that address next; what had arrived at a process dies with it. A connection that breaks is made
again; what was under way on it is lost. Subscribers miss what is published while they are not
connected.

Not here: delays and cuts (network.py).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import zmq

from tests.fuzz_serve.green import Ticket, in_process, loop
from tests.fuzz_serve.loop import Process
from tests.fuzz_serve.network import Network, Wire

WAITING_MAX = 64  # messages for a peer that is away
RECONNECT_S = 0.05, 0.5


class Again(Exception):
    """zmq.Again, which asks for the words of its error each time that it is made."""


class Exchange:
    """Who listens where, and who is connected there. One for a simulation."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.bound: dict[str, Socket] = {}
        self.links: dict[str, list[Link]] = {}  # by address
        self.numbers = itertools.count(1)
        self.free_port = itertools.count(20_000)

    def bind(self, address: str, socket: Socket) -> None:
        if address in self.bound:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self.bound[address] = socket
        for link in self.links.get(address, ()):
            link.again()

    def unbind(self, address: str, socket: Socket) -> None:
        if self.bound.get(address) is socket:
            del self.bound[address]
            for link in self.links.get(address, ()):
                link.broke()


class Link:
    """One connection, from the side that asked for it."""

    def __init__(self, exchange: Exchange, near: Socket, address: str) -> None:
        self.exchange, self.near, self.address = exchange, near, address
        self.identity = next(exchange.numbers).to_bytes(5, "big")
        self.far: Socket | None = None
        self.out: Wire | None = None
        self.back: Wire | None = None
        self.waiting: deque[Any] = deque(maxlen=WAITING_MAX)
        self.is_closed = False
        exchange.links.setdefault(address, []).append(self)
        self._connect(None)

    def again(self) -> None:
        """Somebody listens there (again)."""
        low, high = RECONNECT_S
        rng = self.exchange.network.loop.rng
        self._later(low + (high - low) * rng.random())

    def _later(self, seconds: float) -> None:
        world = self.exchange.network.loop
        world.at(world.now_s + seconds, self._connect)

    def _connect(self, _: Any) -> None:
        if self.is_closed or self.far is not None:
            return
        far = self.exchange.bound.get(self.address)
        network = self.exchange.network
        near_host = self.near.process.host
        if far is None or not far.process.is_alive:
            return
        far_host = far.process.host
        if network.is_cut(near_host, far_host) or network.is_cut(far_host, near_host):
            self._later(0.2)
            return
        self.far = far
        self.out = Wire(network, near_host, far_host)
        self.back = Wire(network, far_host, near_host)
        far.joined(self)
        if self.near.kind == zmq.SUB:
            self.send([b"\x01"])
        waiting, self.waiting = self.waiting, deque(maxlen=WAITING_MAX)
        for frames in waiting:
            self.send(frames)

    def broke(self) -> None:
        """Both directions; what is under way is lost."""
        for wire in (self.out, self.back):
            if wire is not None:
                wire.is_broken = True
        if self.far is not None:
            self.far.left(self)
        self.far = self.out = self.back = None

    def close(self) -> None:
        self.is_closed = True
        if self.far is not None:
            self.far.left(self)  # what has been sent goes on its way
        links = self.exchange.links[self.address]
        links.remove(self)
        self.far = None

    def send(self, frames: Any) -> None:
        """From the side that connected."""
        far = self.far
        if far is None or self.out is None:
            if self.near.kind != zmq.SUB:
                self.waiting.append(frames)
            return
        if not self.out.send(far.arrived_from(self), frames):
            self.broke()
            self._later(0.5)

    def reply(self, frames: Any) -> None:
        """From the side that listens."""
        if self.back is not None and not self.back.send(self._back, frames):
            self.broke()
            self._later(0.5)

    def _back(self, frames: Any) -> None:
        if not self.is_closed:
            self.near.arrived(frames)


class Socket:
    """One of any kind."""

    def __init__(self, exchange: Exchange, process: Process, kind: int) -> None:
        self.exchange, self.process, self.kind = exchange, process, kind
        self.linger = -1
        self.is_closed = False
        self._address = ""
        self._messages: deque[Any] = deque()
        self._links: list[Link] = []
        self._peers: dict[bytes, Link] = {}  # of one that listens
        self._tickets: list[Ticket] = []
        process.on_end.append(self.close)

    # ---- how product code uses it

    def set_hwm(self, _: int) -> None: ...

    def setsockopt(self, *_: Any) -> None: ...

    def subscribe(self, _: bytes) -> None: ...

    def monitor(self, _address: str, _events: int) -> None:
        """Of handshakes, none of which fails where there are no keys."""

    def disable_monitor(self) -> None: ...

    @property
    def context(self) -> Context:
        return Context()

    def getsockopt_string(self, _: int) -> str:
        return self._address

    def bind(self, address: str) -> None:
        if address.startswith("tcp://") and address.endswith((":0", ":*")):
            address = f"{address.rpartition(':')[0]}:{next(self.exchange.free_port)}"
        self._address = address
        self.exchange.bind(address, self)

    def connect(self, address: str) -> None:
        if address.startswith("inproc://"):
            return  # to a monitor
        self._links.append(Link(self.exchange, self, address))

    def disconnect(self, address: str) -> None:
        for link in [link for link in self._links if link.address == address]:
            self._links.remove(link)
            link.close()

    def close(self, linger: int | None = None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._address:
            self.exchange.unbind(self._address, self)
        for link in self._links:
            link.close()
        self._links = []
        self._messages.clear()
        self._wake()

    @property
    def closed(self) -> bool:
        return self.is_closed

    def send(self, data: bytes, flags: int = 0) -> None:
        self.send_multipart([data], flags)

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        if not self.process.is_alive or loop().is_over:
            return
        if self.kind == zmq.ROUTER:
            if (link := self._peers.get(frames[0])) is not None:
                link.reply(frames[1:])
        elif self.kind in (zmq.XPUB, zmq.PUB):
            for link in list(self._peers.values()):
                link.reply(frames)
        else:
            for link in self._links:
                link.send(frames)

    def recv(self, flags: int = 0) -> bytes:
        found: bytes = self.recv_multipart(flags)[0]
        return found

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        while not self._messages:
            if flags & zmq.NOBLOCK:
                raise Again
            self.poll(None)
        frames: list[bytes] = self._messages.popleft()
        return frames

    def poll(self, timeout: float | None = None, flags: int = 0) -> int:
        found = zmq_poll([(self, zmq.POLLIN)], timeout)
        if self.is_closed:
            raise zmq.ContextTerminated
        return len(found)

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- how messages come

    @property
    def is_ready(self) -> bool:
        return bool(self._messages) or self.is_closed

    def joined(self, link: Link) -> None:
        self._peers[link.identity] = link

    def left(self, link: Link) -> None:
        self._peers.pop(link.identity, None)

    def arrived_from(self, link: Link) -> Callable[[Any], None]:
        if self.kind == zmq.ROUTER:
            return lambda frames: self.arrived([link.identity, *frames])
        return self.arrived

    def arrived(self, frames: Any) -> None:
        """Into the memory of the process; also of a frozen one, as the kernel does."""
        if not self.is_closed:
            self._messages.append(frames)
            self._wake()

    def _wake(self) -> None:
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wake(True)


def zmq_poll(
    polled: Iterable[tuple[Any, int]], timeout: float | None = None
) -> list[tuple[Any, int]]:
    """Milliseconds, as zmq.zmq_poll."""
    sockets = [socket for socket, _ in polled]
    ready = [(socket, zmq.POLLIN) for socket in sockets if socket.is_ready]
    if ready or timeout == 0:
        return ready
    ticket = Ticket()
    for socket in sockets:
        socket._tickets.append(ticket)
    ticket.wait(None if timeout is None or timeout < 0 else timeout / 1000)
    for socket in sockets:
        if ticket in socket._tickets:
            socket._tickets.remove(ticket)
    return [(socket, zmq.POLLIN) for socket in sockets if socket.is_ready]


class Wakeup(int):
    """An eventfd: a number, as product code wants it."""

    numbers = itertools.count(10_000)

    def __new__(cls) -> Wakeup:
        return super().__new__(cls, next(cls.numbers))

    def __init__(self) -> None:
        self.is_ready = False
        self._tickets: list[Ticket] = []

    def wake(self) -> None:
        self.is_ready = True
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wake(True)


class Poller:
    def __init__(self) -> None:
        self._polled: list[tuple[Any, int]] = []

    def register(self, polled: Any, flags: int) -> None:
        self._polled.append((polled, flags))

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        return zmq_poll(self._polled, timeout)


class Context:
    """zmq.Context, of the process that makes it."""

    _exchange: Exchange  # set by the stage

    def __init__(self) -> None:
        self._sockets: list[Socket] = []

    @classmethod
    def instance(cls) -> Context:
        return cls()

    def socket(self, kind: int) -> Socket:
        process = in_process()
        assert process is not None, "a socket of no process"
        socket = Socket(self._exchange, process, kind)
        self._sockets.append(socket)
        return socket

    def term(self) -> None:
        self.destroy()

    def destroy(self, linger: int | None = None) -> None:
        for socket in self._sockets:
            socket.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


# The module `zmq`: its constants are the real ones, and so are its errors but for one.
ZMQ = SimpleNamespace(
    **{name: value for name, value in vars(zmq).items() if not name.startswith("__")}
    | {"Context": Context, "Socket": Socket, "Poller": Poller, "zmq_poll": zmq_poll, "Again": Again}
)
