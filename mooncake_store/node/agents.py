"""The NIXL agents of a storage node: one shared agent, and one per selected network card.

The shared agent serves this host and, by default, other hosts too. nic_choice.py selects the cards
with an agent of their own. For example, these are all cards of a host that has several and no RDMA,
or the cards that the operator names (MOONCAKE_TRUSTED_NICS). If no other host can reach the
directory, a card gets an agent only if the operator names it.

A card whose agent cannot be opened at the start of the node has none until the next start.

Not here: the agent (nixl_agent.py), the choice of an agent by clients (nic_transport.py).
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
    """Names and addresses of the agents for clients, and the functions that close the agents."""

    name: str = ""  # of the shared agent; "" without NIXL
    metadata: bytes = b""  # of the shared agent; a client's NIXL connects with it
    nics: tuple[NicAgent, ...] = ()  # the agents that serve one network card each
    is_local: bool = False  # whether the shared agent serves this host only
    closers: tuple[Callable[[], None], ...] = ()

    def close(self) -> None:
        for close in self.closers:
            close()


def open_agents(name: str, address: int, size_bytes: int, has_other_hosts: bool) -> OpenAgents:
    """Open all agents. `name` must be new. NixlUnavailable: the shared agent cannot be opened."""
    network = host_data_network()
    shared = NodeAgent(name, address, size_bytes, AgentDevices(network.shared_devices))
    closers = [shared.close]
    nics: list[NicAgent] = []
    for missing in network.missing:
        log.warning("network card %s of MOONCAKE_TRUSTED_NICS does not exist", missing)
    for nic in network.nics if has_other_hosts or network.is_closed else ():
        try:
            agent = NodeAgent(f"{name}@{nic.name}", address, size_bytes, _devices(nic))
        except NixlUnavailable as error:
            log.warning("network card %s carries no KV: %s", nic.name, error)
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
        log.info("NIXL to other hosts uses network cards %s", ", ".join(nic.nic for nic in nics))
    return OpenAgents(name, shared.metadata, tuple(nics), network.is_closed, tuple(closers))


def _devices(nic: Interface) -> AgentDevices:
    return AgentDevices(nic.ucx_devices, is_tcp_only=not nic.rdma_devices)
