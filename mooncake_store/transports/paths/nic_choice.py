"""Chooses the network cards (NICs) of a host that move KV, and pairs them with another host's.

KV moves by NIXL, which uses the library UCX. An *agent* is an endpoint of NIXL in a process. UCX
does not fail over: an agent that uses two cards hangs if one of them is cut during a transfer. So
each of several cards can get an agent of its own, in storage nodes and in clients. One more agent,
the *shared* one, serves the processes of its own host (which copy through the kernel). It also
serves another host if the cards of this host, or those of the other host, have no agents.

The first of these rules whose condition (before the colon) holds decides:

- The operator names cards (MOONCAKE_TRUSTED_NICS): each of them gets an agent, also a single one.
  The shared agent uses the loopback and these cards only. If the list is empty, NIXL moves nothing
  between hosts.
- UCX_NET_DEVICES names several interfaces: each gets an agent.
- UCX_NET_DEVICES names one interface, or RDMA devices: the shared agent uses these.
- The host has RDMA: UCX chooses the cards of the shared agent.
- Two or more cards are up and have an address: each of them gets an agent.

Two cards make a *pair* if they share a network. The remaining cards of the two hosts are paired in
order, because a router may connect them. So the first card of one host is paired with the first
card of the other, which often share a switch (a rail).

Not here: reading cards (host_topology.py), using pairs (nic_paths.py, nic_transport.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_store.records.membership import NicAgent

LOOPBACK_DEVICE = "lo"
PAIRS_MAX = 16  # between two hosts


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    addresses: tuple[str, ...] = ()  # IP addresses, without link-local and loopback ones
    networks: tuple[str, ...] = ()  # of these addresses, as in "10.78.0.0/24"
    is_up: bool = True
    is_physical: bool = True  # has a device (also one that a hypervisor emulates)
    is_part: bool = False  # True: belongs to a bridge or a bond, which is used in its place
    is_bridge: bool = False
    rdma_devices: tuple[str, ...] = ()  # UCX names, as in "mlx5_0:1"; () without RDMA

    @property
    def ucx_devices(self) -> str:
        return ",".join([*self.rdma_devices, self.name])


@dataclass(frozen=True, slots=True)
class DataNetwork:
    """How KV of this host reaches other hosts by NIXL."""

    nics: tuple[Interface, ...] = ()  # each has an agent of its own for transfers with other hosts
    shared_devices: str = ""  # UCX_NET_DEVICES of the shared agent; "": from the environment
    # True: NIXL uses only `nics` for other hosts, so it reaches no other host if `nics` is empty
    is_closed: bool = False
    missing: tuple[str, ...] = ()  # named by the operator, but not found


def data_network(
    interfaces: Sequence[Interface], trusted: str | None, ucx_net_devices: str
) -> DataNetwork:
    """`trusted`: MOONCAKE_TRUSTED_NICS, None if unset; `ucx_net_devices`: UCX_NET_DEVICES."""
    by_name = {each.name: each for each in interfaces}
    if trusted is not None:
        names = _names(trusted)
        nics = tuple(by_name[name] for name in names if name in by_name)
        devices = ",".join([LOOPBACK_DEVICE, *(nic.ucx_devices for nic in nics)])
        missing = tuple(name for name in names if name not in by_name)
        return DataNetwork(nics, devices, is_closed=True, missing=missing)
    if ucx_net_devices:
        names = [name for name in _names(ucx_net_devices) if name != LOOPBACK_DEVICE]
        if all(name in by_name for name in names) and len(names) > 1:
            return DataNetwork(tuple(by_name[name] for name in names))
        return DataNetwork()
    if any(each.rdma_devices for each in interfaces):
        return DataNetwork()
    usable = [
        each
        for each in interfaces
        if each.is_up and each.addresses and not each.is_part and not each.is_bridge
    ]
    usable = [each for each in usable if each.is_physical] or usable
    return DataNetwork(tuple(usable)) if len(usable) > 1 else DataNetwork()


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def nic_pairs(own: Sequence[Interface], theirs: Sequence[NicAgent]) -> list[tuple[int, int]]:
    """Positions in `own` and in `theirs` of the cards that are paired, at most PAIRS_MAX pairs.
    Every card that shares a network with the other host is in a pair, unless there are more."""
    pairs: list[tuple[int, int]] = []
    networks = dict.fromkeys(network for each in own for network in each.networks)
    for network in networks:
        here = [i for i, each in enumerate(own) if network in each.networks]
        there = [i for i, each in enumerate(theirs) if network in each.networks]
        pairs += _in_turn(here, there)
    paired_here, paired_there = {here for here, _ in pairs}, {there for _, there in pairs}
    pairs += _in_turn(
        [i for i in range(len(own)) if i not in paired_here],
        [i for i in range(len(theirs)) if i not in paired_there],
    )
    return list(dict.fromkeys(pairs))[:PAIRS_MAX]


def _in_turn(here: Sequence[int], there: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs in which each position of both sides occurs; none if one side is empty."""
    if not here or not there:
        return []
    count = max(len(here), len(there))
    return [(here[i % len(here)], there[i % len(there)]) for i in range(count)]
