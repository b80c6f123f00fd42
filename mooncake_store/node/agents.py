"""The NIXL agents by which a storage node offers its segment: one for all, or more than one.

The shared agent serves this host, and where nothing else is said other hosts too. Where this host
has several network cards to other hosts, or the operator names the cards that may carry KV
(MOONCAKE_TRUSTED_NICS), each of those has an agent of its own: nic_choice.py says which. A node
whose directory only this host reaches needs none of them, unless they are named.

A card that is down when the node starts has no agent until the node starts again.

Not here: what an agent is (nixl_agent.py), who uses which (nic_transport.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from mooncake_store.records.membership import NicAgent
from mooncake_store.transports.host_topology import host_data_network
from mooncake_store.transports.nixl_agent import AgentDevices, NixlUnavailable, NodeAgent
from mooncake_store.transports.paths.nic_choice import Interface

log = logging.getLogger("mooncake_store.node")


@dataclass(frozen=True, slots=True)
class OpenAgents:
    """What others must know of them, and how to end them."""

    name: str = ""
    metadata: bytes = b""
    nics: tuple[NicAgent, ...] = ()
    is_local: bool = False  # the one with this name serves this host only
    closers: tuple[Callable[[], None], ...] = ()

    def close(self) -> None:
        for close in self.closers:
            close()


def open_agents(name: str, address: int, size_bytes: int, has_other_hosts: bool) -> OpenAgents:
    """`name` is unique in time; NixlUnavailable when not even the shared agent can be had."""
    network = host_data_network()
    shared = NodeAgent(name, address, size_bytes, AgentDevices(network.shared_devices))
    closers = [shared.close]
    nics: list[NicAgent] = []
    for missing in network.missing:
        log.warning("network card %s is not there, so it carries nothing", missing)
    for nic in network.nics if has_other_hosts or network.is_closed else ():
        try:
            agent = NodeAgent(f"{name}@{nic.name}", address, size_bytes, _devices(nic))
        except NixlUnavailable as error:
            log.warning("network card %s carries nothing: %s", nic.name, error)
            continue
        closers.append(agent.close)
        nics.append(
            NicAgent(
                nic=nic.name,
                agent_name=agent.name,
                agent_metadata=agent.metadata,
                addresses=nic.addresses,
                networks=nic.networks,
                port=agent.ports[0] if agent.ports else 0,
                has_rdma=bool(nic.rdma_devices),
            )
        )
    if nics:
        log.info("NIXL to other hosts by network cards %s", ", ".join(nic.nic for nic in nics))
    return OpenAgents(name, shared.metadata, tuple(nics), network.is_closed, tuple(closers))


def _devices(nic: Interface) -> AgentDevices:
    return AgentDevices(nic.ucx_devices, is_tcp_only=not nic.rdma_devices)
