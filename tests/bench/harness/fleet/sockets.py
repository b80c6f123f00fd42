"""Plain sockets on hosts, made by this process: a socket stays in the namespace it was made in."""

from __future__ import annotations

import ctypes
import os
import socket
import threading

from bench.harness.fleet import Namespaces

PORT = 9_000
CLONE_NEWNET = 0x40000000
WAIT_S_MAX = 60.0


def socket_on(hosts: Namespaces, host: str, kind: socket.SocketKind) -> socket.socket:
    """Of a thread that moves there; this thread stays where it is."""
    made: list[socket.socket | OSError] = []

    def make() -> None:
        namespace = os.open(f"/run/netns/{hosts.name(host)}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
                made.append(OSError(ctypes.get_errno(), f"setns to {host}"))
            else:
                made.append(socket.socket(socket.AF_INET, kind))
        finally:
            os.close(namespace)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(WAIT_S_MAX)
    if isinstance(made[0], OSError):
        raise made[0]
    made[0].settimeout(WAIT_S_MAX)
    return made[0]


def datagrams(hosts: Namespaces, host: str) -> socket.socket:
    """Bound to the host's address."""
    bound = socket_on(hosts, host, socket.SOCK_DGRAM)
    bound.bind((hosts.address(host), PORT))
    return bound


def listener(hosts: Namespaces, host: str, address: str) -> socket.socket:
    bound = socket_on(hosts, host, socket.SOCK_STREAM)
    bound.bind((address, PORT))
    bound.listen()
    return bound


def arrived(receiver: socket.socket, marker: bytes, sender: socket.socket, to: str) -> list[bytes]:
    """What came to the receiver until the marker, which is sent again until it is there.

    The marker's own way must be open; datagrams of one way stay in order, but of two they may not,
    so whoever expects nothing asks twice.
    """
    found: list[bytes] = []
    receiver.settimeout(0.05)
    for _ in range(int(WAIT_S_MAX / 0.05)):
        sender.sendto(marker, (to, PORT))
        while True:
            try:
                data = receiver.recv(2_048)
            except (TimeoutError, BlockingIOError):
                break
            if data == marker:
                return found
            found.append(data)
    raise AssertionError(f"{marker!r} never arrived; {len(found)} others did")
