"""Every port of a deployment, and who may open it.

Ports that are not chosen in the cluster file (inboxes of processes, NIXL's own listeners) are any
free ones of the kernel's range for such, and only hosts of the deployment need them.

Not here: how a firewall says that (firewall.py, kubernetes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.cluster.deployment import Deployment, is_loopback

CLIENTS, FLEET, FRONTENDS, MEMBERS, MONITORS = (
    "clients", "fleet", "frontends", "members", "monitors",
)  # fmt: skip
FREE_PORTS = (32_768, 60_999)  # what Linux gives to who asks for any (ip_local_port_range)


@dataclass(frozen=True, slots=True)
class Door:
    """One TCP port of a host, or a range of them."""

    host: str
    port: int
    what: str
    who: str  # clients: anybody; fleet: all hosts; frontends, members: hosts that run those
    last_port: int = 0  # of a range

    @property
    def ports(self) -> str:
        return f"{self.port}-{self.last_port}" if self.last_port else str(self.port)


def doors(deployment: Deployment, host: str) -> list[Door]:
    """Of one host, in the order of their ports."""
    return sorted(_doors(deployment, host), key=lambda door: door.port)


def _doors(deployment: Deployment, host: str) -> Iterator[Door]:
    etcd, directories, frontends = (
        deployment.etcd, deployment.directories, deployment.frontends,
    )  # fmt: skip
    if etcd is not None and host in etcd.hosts:
        yield Door(host, etcd.client_port, "etcd: election, pins and quotas", FLEET)
        yield Door(host, etcd.peer_port, "etcd: between members", MEMBERS)
    if host in directories.hosts:
        yield Door(host, directories.port, "directory: requests", FLEET)
        yield Door(host, directories.events_port, "directory: events", FLEET)
    for node in deployment.nodes_of(host):
        yield Door(host, node.control_port, f"storage node {node.name}: control", FLEET)
        yield Door(host, node.data_port, f"storage node {node.name}: KV by TCP", FLEET)
    if host in frontends.hosts and not is_loopback(frontends.address):
        yield Door(host, frontends.http_port, "frontend: HTTP of clients", CLIENTS)
        yield Door(host, frontends.grpc_port, "frontend: gRPC of clients", CLIENTS)
    if not is_loopback(frontends.metrics_address):
        yield Door(host, frontends.metrics_port, "metrics page", MONITORS)
    for worker in deployment.workers:
        if worker.host == host:
            yield Door(host, worker.grpc_port, f"worker {worker.model}: gRPC", FRONTENDS)
    yield Door(host, FREE_PORTS[0], "inboxes of processes, KV by NIXL", FLEET, FREE_PORTS[1])


def hosts_of(deployment: Deployment, who: str) -> list[str]:
    """The hosts that are meant; [] for clients and monitors, which are no hosts of ours."""
    if who == FLEET:
        return list(deployment.hosts)
    if who == FRONTENDS:
        return list(deployment.frontends.hosts)
    if who == MEMBERS and deployment.etcd is not None:
        return list(deployment.etcd.hosts)
    return []
