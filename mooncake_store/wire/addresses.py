"""ZeroMQ addresses of other hosts: where a name is bound, and when a peer counts as gone.

ZeroMQ binds numbers and names of network interfaces, while hosts are named too. A name is always
taken for a host's, so what is bound is a number, of which can be said who reaches it
(keys/curve.py). And TCP alone notices a cut link after minutes: what was sent meanwhile is sent
again later and later, so messages would stay out long after the link is back. A heartbeat ends such
a connection, and a fresh one is made.

Not here: who may speak over a socket (keys/).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

import zmq

TCP = "tcp://"
ELECTED = "etcd://"  # names an election, which says where the directory is
HEARTBEAT_MS = 1_000
SILENCE_MS_MAX = 3_000
CONNECT_MS_MAX = 2_000


class NameUnknown(zmq.ZMQError):  # to who binds, as a port that is taken
    """A name is no host's, though perhaps an interface's; the message says which."""


def bindable(address: str) -> str:
    """The same address with the number of its host; others than tcp:// are left as they are.

    NameUnknown for a name that no host has.
    """
    if not address.startswith(TCP):
        return address
    host, _, port = address.removeprefix(TCP).rpartition(":")
    return f"{TCP}{number_of_host(host)}:{port}"


def number_of_host(host: str) -> str:
    """An IP address and `*` (every address of this host) as they are; a name by its first IPv4
    address."""
    bare = host.strip("[]")
    if bare == "*" or is_number(bare):
        return host
    try:
        return str(socket.getaddrinfo(bare, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise NameUnknown(
            errno.EADDRNOTAVAIL,
            f"{host!r} is no host's name or address (names of network interfaces are not taken): "
            f"{error}",
        ) from error


def is_number(host: str) -> bool:
    """Is it an IP address, IPv6 without brackets?"""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def with_port(address: str, bound: str) -> str:
    """`address` with the port that `bound` has: what others connect to when any port was free."""
    if not address.startswith(TCP):
        return address
    return f"{address.rpartition(':')[0]}:{bound.rpartition(':')[2]}"


def notice_silence(a_socket: zmq.Socket[Any], address: str) -> None:
    """Before it is bound or connected: a peer of another host that is silent is let go."""
    if address.startswith(TCP):
        a_socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        a_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS_MAX)
        a_socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS_MAX)
