"""The TCP ports of a host's plan that other hosts connect to, and the sources allowed for each.

Ports that the cluster file does not set (inboxes of processes, NIXL's listeners) are any free ports
in FREE_PORTS. Only hosts of the deployment connect to these ports.

Not here: firewall rules (firewall.py, kubernetes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.cluster.deployment import Deployment, is_loopback
from backends.cluster.host_plan import HostPlan, host_and_port

CLIENTS, FLEET, FRONTENDS, MEMBERS, MONITORS = (
    "clients",
    "fleet",
    "frontends",
    "members",
    "monitors",
)
FREE_PORTS = (32_768, 60_999)  # Linux's default range of ephemeral ports (ip_local_port_range)


@dataclass(frozen=True, slots=True)
class Door:
    """One TCP port of a host, or a range of them."""

    port: int
    what: str  # name of the listener, shown as the rule's comment
    # CLIENTS: any source; FLEET: all hosts; FRONTENDS: hosts with a frontend; MEMBERS: hosts with
    # an etcd member; MONITORS: metrics scrapers, which the cluster file does not list.
    who: str
    last_port: int = 0  # last port of a range; 0: a single port

    @property
    def ports(self) -> str:
        return f"{self.port}-{self.last_port}" if self.last_port else str(self.port)


def doors(plan: HostPlan) -> list[Door]:
    """The ports of one host in ascending order."""
    found = (Door(host_and_port(address)[1], what, who) for address, what, who in _listeners(plan))
    free = Door(FREE_PORTS[0], "inboxes of processes, KV transfers over NIXL", FLEET, FREE_PORTS[1])
    return sorted([*found, free], key=lambda door: door.port)


def _listeners(plan: HostPlan) -> Iterator[tuple[str, str, str]]:
    """(address, name of the listener, sources) of each listener that other hosts connect to. A
    loopback listener needs no rule."""
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


def hosts_of(deployment: Deployment, who: str) -> list[str]:
    """The hosts of a group. [] for CLIENTS and MONITORS, which the cluster file does not list, and
    for MEMBERS without etcd."""
    if who == FLEET:
        return list(deployment.hosts)
    if who == FRONTENDS:
        return list(deployment.frontends.hosts)
    if who == MEMBERS and deployment.etcd is not None:
        return list(deployment.etcd.hosts)
    return []
