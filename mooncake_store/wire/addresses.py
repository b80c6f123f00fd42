"""Addresses of ZeroMQ sockets over TCP: resolving names for bind, and detecting silent peers.

ZeroMQ accepts IP addresses and names of network interfaces for bind. Here a name is always a host
name and is resolved before bind. So the bound address is an IPv4 address or `*`, and keys/curve.py
can check whether other hosts reach it. IPv6 is not enabled.

TCP alone detects a cut link only after minutes. Its retransmissions become ever rarer, so messages
would be delayed long after the link works again. So ZeroMQ sends heartbeats. If there is no answer
to a heartbeat, ZeroMQ closes the connection and opens a new one.

Not here: which processes may use a socket (keys/).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

import zmq

TCP = "tcp://"
ELECTED = "etcd://"  # address of an election, whose leader is the directory
HEARTBEAT_MS = 1_000  # time between two heartbeats
SILENCE_MS_MAX = 3_000  # from a heartbeat without any answer until the connection is closed
CONNECT_MS_MAX = 2_000  # duration of one attempt to connect


class NameUnknown(zmq.ZMQError):  # a ZMQError, so that it is handled like a taken port
    """The name has no IPv4 address, or the resolver failed; the message contains the name."""


def bindable(address: str) -> str:
    """The address with the host's name resolved; unchanged if not tcp://. Raises NameUnknown."""
    if not address.startswith(TCP):
        return address
    host, _, port = address.removeprefix(TCP).rpartition(":")
    return f"{TCP}{number_of_host(host)}:{port}"


def number_of_host(host: str) -> str:
    """An IP address or `*` (every address of this host) unchanged; for a name, its first IPv4
    address. Raises NameUnknown."""
    bare = host.strip("[]")
    if bare == "*" or is_number(bare):
        return host
    try:
        return str(socket.getaddrinfo(bare, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise NameUnknown(
            errno.EADDRNOTAVAIL,
            f"{host!r} is no host with an IPv4 address (network interfaces are not accepted): "
            f"{error}",
        ) from error


def is_number(host: str) -> bool:
    """True for an IP address; IPv6 without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def with_port(address: str, bound: str) -> str:
    """`address` with the port of `bound`, for clients after a bind to any free port."""
    if not address.startswith(TCP):
        return address
    return f"{address.rpartition(':')[0]}:{bound.rpartition(':')[2]}"


def notice_silence(a_socket: zmq.Socket[Any], address: str) -> None:
    """Enable heartbeats for a tcp:// address. Call it before bind or connect."""
    if address.startswith(TCP):
        a_socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        a_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS_MAX)
        a_socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS_MAX)
