"""The nftables rules of a host: its open TCP ports, and the sources that may connect to each.

    nft -f rendered/a/firewall.nft          # loads the rules, and replaces earlier ones
    nft delete table inet mooncake_NAME     # removes the rules

Elastic hosts are not in the cluster file. The operator adds the address of an elastic host to a set
on every other host. Loading the rules again keeps this set:

    nft add element inet mooncake_NAME elastic '{ 10.77.0.9 }'

The policy of the chain stays accept, so that a wrong file cannot lock out an administrator. The
last rule drops only packets with which other sources open a connection to the deployment's ports.
It must not drop other packets to FREE_PORTS, because these may answer connections of this host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.cluster.deployment import ClusterFileInvalid, Deployment, is_ip, is_loopback
from backends.cluster.host_plan import HostPlan, host_and_port, host_plan

ELASTIC = "elastic"  # name of the nftables set with the addresses of elastic hosts
# Groups of sources that may connect to a port.
CLIENTS = "clients"  # any source
FLEET = "fleet"  # all hosts
FRONTENDS = "frontends"  # hosts with a frontend
MEMBERS = "members"  # hosts with an etcd member
MONITORS = "monitors"  # metrics scrapers, for which the operator must add a rule
# Range of the ports that the cluster file does not set: message sockets of processes, and NIXL's
# listeners. It is Linux's default range of ephemeral ports (ip_local_port_range).
FREE_PORTS = (32_768, 60_999)


@dataclass(frozen=True, slots=True)
class Door:
    """One TCP port of a host, or a range of them."""

    port: int
    what: str  # name of the listener, which becomes the comment of the rule
    who: str  # CLIENTS, FLEET, FRONTENDS, MEMBERS or MONITORS
    last_port: int = 0  # last port of a range; 0 for a single port

    @property
    def ports(self) -> str:
        return f"{self.port}-{self.last_port}" if self.last_port else str(self.port)


def doors(plan: HostPlan) -> list[Door]:
    """The ports of one host in ascending order."""
    found = (Door(host_and_port(address)[1], what, who) for address, what, who in _listeners(plan))
    free = Door(FREE_PORTS[0], "inboxes of processes, KV transfers over NIXL", FLEET, FREE_PORTS[1])
    return sorted([*found, free], key=lambda door: door.port)


def _listeners(plan: HostPlan) -> Iterator[tuple[str, str, str]]:
    """(address, name of the listener, sources) of each listener to which other hosts connect.
    Frontend and metrics page may listen on loopback, and then need no rule."""
    if plan.etcd is not None:
        yield plan.etcd.listen_client_url, "etcd: leader election, pinned blocks, quotas", FLEET
        yield plan.etcd.listen_peer_url, "etcd: between members", MEMBERS
    if plan.directory is not None:
        yield plan.directory.listen, "directory: requests", FLEET
        yield plan.directory.listen_events, "directory: events", FLEET
    for node in plan.storage_nodes:
        yield node.listen_control, f"storage node {node.name}: control", FLEET
        yield node.listen_data, f"storage node {node.name}: KV transfers over TCP", FLEET
    if plan.frontend is not None and not is_loopback(host_and_port(plan.frontend.http)[0]):
        yield plan.frontend.http, "frontend: HTTP of clients", CLIENTS
        yield plan.frontend.grpc, "frontend: gRPC of clients", CLIENTS
    if not is_loopback(host_and_port(plan.metrics)[0]):
        yield plan.metrics, "metrics page", MONITORS
    for worker in plan.workers:
        yield worker.listen_grpc, f"worker {worker.model}: gRPC", FRONTENDS


def firewall(deployment: Deployment, plan: HostPlan) -> str:
    """The text for `nft -f`. Raises ClusterFileInvalid if a host has a DNS name."""
    named = [name for name, each in deployment.hosts.items() if not is_ip(each.address)]
    if named:
        what = f"hosts: {', '.join(named)} have DNS names, and firewall rules need IP addresses"
        raise ClusterFileInvalid(deployment.path, (what,))
    name = table(deployment)
    hosts = deployment.hosts.items()  # hosts with one address share a machine and the table
    here = [host_plan(deployment, name) for name, each in hosts if each.address == plan.address]
    open_to = list(dict.fromkeys(door for each in here or [plan] for door in doors(each)))
    closed = ", ".join(door.ports for door in open_to if door.who != CLIENTS)
    named_later = [f"  set {ELASTIC} {{ type ipv4_addr; flags interval; }}"]
    lines = [
        f"# Rendered from {deployment.file_name} for {plan.host} by `mooncake "
        "cluster render firewall`.",
        f"table {name} {{",
        *(named_later if deployment.elastic_pools else []),
        "  chain input { type filter hook input priority filter; policy accept; }",
        "}",
        f"flush chain {name} input",  # removes earlier rules
        f"table {name} {{",
        "  chain input {",
        "    iif lo accept",
        "    ct state established,related accept",
        *(f"    {line}" for line in _openings(deployment, open_to)),
        f'    tcp dport {{ {closed} }} tcp flags & (syn | ack) == syn drop comment "other sources"',
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def table(deployment: Deployment) -> str:
    """The name of the table in the syntax of `nft`."""
    return f"inet mooncake_{deployment.name.replace('-', '_')}"


def _openings(deployment: Deployment, open_to: Sequence[Door]) -> Iterator[str]:
    members = deployment.etcd.hosts if deployment.etcd is not None else ()
    groups = {FLEET: deployment.hosts, FRONTENDS: deployment.frontends.hosts, MEMBERS: members}
    for door in open_to:
        comment = f'comment "{door.what}"'
        if door.who == CLIENTS:
            yield f"tcp dport {door.ports} accept {comment}"
            continue
        if door.who == MONITORS:
            yield f"# tcp dport {door.ports}: add the sources that may read the {door.what}"
            continue
        addresses = [deployment.hosts[name].address for name in groups[door.who]]
        sources = ", ".join(dict.fromkeys(addresses))
        yield f"ip saddr {{ {sources} }} tcp dport {door.ports} accept {comment}"
        if door.who == FLEET and deployment.elastic_pools:
            yield f"ip saddr @{ELASTIC} tcp dport {door.ports} accept {comment}"
        if door.last_port and deployment.trusted_data_network:
            names = ", ".join(f'"{name}"' for name in deployment.trusted_data_network)
            yield f"iifname {{ {names} }} tcp dport {door.ports} accept {comment}"
