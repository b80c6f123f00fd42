"""The parts of a deployment, as its cluster file defines them.

    name, hosts                name of the deployment; its machines with their addresses
    etcd, directories          etcd, which elects the serving directory; hosts of directories
    storage_nodes              DRAM and SSD of hosts
    frontends                  addresses for clients
    pools, defaults            groups of equal workers; parameters of all pools
    conductor, slo             parameters of routing and admission; latency targets
    keys, trusted_data_network access keys; network interfaces on which KV moves unencrypted

`load` and `parse` return only a valid `Deployment`. A file with mistakes raises
`ClusterFileInvalid`, which lists all mistakes, each with its line, path and remedy.

Not here: reading the file (cluster_file.py), what one host runs (host_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OCTETS = frozenset(map(str, range(256)))
HOST_PORT_STEP = 10  # difference of the frontend ports of two hosts with one address
NODE_PORT = 7010  # control port of a host's first storage node; its data port follows


class ClusterFileInvalid(Exception):
    """`problems`: every mistake, each with its line and a remedy."""

    def __init__(self, path: str, problems: tuple[str, ...]) -> None:
        lines = "\n".join(f"  - {line}" for line in problems)
        super().__init__(f"{path} has {len(problems)} mistake(s):\n{lines}")
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, or one of several hosts on a machine."""

    name: str
    address: str  # IPv4 address or DNS name that other hosts use
    listen: str  # local address that its processes bind
    identity: str = ""  # distinguishes hosts that share a kernel; "": the machine's own identity
    state_dir: str = ""  # relative to the folder of the cluster file
    rack: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of all its processes


@dataclass(frozen=True, slots=True)
class EtcdCluster:
    """Members on `hosts`, which `mooncake serve` starts, or `endpoints` of a running etcd."""

    hosts: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()  # HOST:PORT
    client_port: int = 2379
    peer_port: int = 2380


@dataclass(frozen=True, slots=True)
class Directories:
    hosts: tuple[str, ...]
    port: int = 7001
    events_port: int = 7002
    ttl_s: int = 3  # of the leader's lease: a dead leader is replaced after this time


@dataclass(frozen=True, slots=True)
class NodeSpec:
    name: str
    host: str
    dram_bytes: int
    ssd_bytes: int = 0
    ssd_path: str = ""  # relative to the host's state_dir
    segment_path: str = ""  # file of its memory; "": a file of the launcher in /dev/shm
    control_port: int = NODE_PORT
    data_port: int = NODE_PORT + 1


@dataclass(frozen=True, slots=True)
class Frontends:
    hosts: tuple[str, ...]
    address: str = "127.0.0.1"  # local address for clients; 0.0.0.0: all addresses of the host
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    metrics_address: str = "127.0.0.1"  # local address of every host's metrics page


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker of a pool on a host of the file."""

    model: str  # its name: POOL_HOST_NUMBER
    host: str
    grpc_port: int
    store_node: str
    parameters: Mapping[str, str] = field(default_factory=dict)  # override those of the pool


@dataclass(frozen=True, slots=True)
class Elastic:
    """The number of elastic hosts of a pool: hosts outside the file, with a storage node each."""

    least: int
    most: int  # least <= most
    dram_bytes: int = 1 << 30  # of each host's storage node


@dataclass(frozen=True, slots=True)
class PoolSpec:
    name: str
    role: str  # prefill | decode
    grpc_port: int  # of its first worker on a host; further workers use the following ports
    parameters: Mapping[str, str]  # of config.pbtxt, including those of `defaults`
    workers: tuple[WorkerSpec, ...]
    elastic: Elastic | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """A valid cluster file."""

    name: str
    path: str  # of the file, as the operator named it
    hosts: Mapping[str, Host]
    etcd: EtcdCluster | None
    directories: Directories
    storage_nodes: tuple[NodeSpec, ...]
    frontends: Frontends
    pools: tuple[PoolSpec, ...]
    conductor: Mapping[str, str]  # parameters of the model `conductor`
    checkpoint: str  # path of the checkpoint of all workers and tokenizers
    keys_folder: str = ""  # relative to the folder of the file; "": the deployment has no keys
    is_insecure: bool = False
    trusted_data_network: tuple[str, ...] | None = None  # interfaces; None: all are trusted

    @property
    def folder(self) -> str:
        """The folder of the cluster file, where its relative paths start."""
        return self.path.rpartition("/")[0] or ("/" if self.path.startswith("/") else ".")

    @property
    def file_name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def elastic_pools(self) -> list[PoolSpec]:
        """The pools that accept elastic hosts."""
        return [pool for pool in self.pools if pool.elastic is not None]

    @property
    def workers(self) -> list[WorkerSpec]:
        return [worker for pool in self.pools for worker in pool.workers]

    def nodes_of(self, host: str) -> list[NodeSpec]:
        return [node for node in self.storage_nodes if node.host == host]

    def port_step(self, host: str) -> int:
        """The offset of the host's frontend and metrics ports. Hosts with equal addresses run on
        one machine and need different ports."""
        address = self.hosts[host].address
        there = [name for name, each in self.hosts.items() if each.address == address]
        return HOST_PORT_STEP * there.index(host)

    def etcd_endpoints(self) -> list[str]:
        """HOST:PORT of each etcd member for clients; [] without etcd."""
        if self.etcd is None:
            return []
        own = [f"{self.hosts[name].address}:{self.etcd.client_port}" for name in self.etcd.hosts]
        return [*own, *self.etcd.endpoints]

    def ports(self) -> dict[tuple[str, int], list[tuple[str, str]]]:
        """(address, port) -> (section of the file, name of the listener) for each listener."""
        found: dict[tuple[str, int], list[tuple[str, str]]] = {}

        def listen(section: str, host: str, port: int, user: str) -> None:
            address = self.hosts[host].address
            found.setdefault((address, port), []).append((section, f"{user} of host {host}"))

        if etcd := self.etcd:
            for host in etcd.hosts:
                listen("etcd", host, etcd.client_port, "etcd's clients")
                listen("etcd", host, etcd.peer_port, "etcd's peers")
        for host in self.directories.hosts:
            listen("directories", host, self.directories.port, "the directory")
            listen("directories", host, self.directories.events_port, "the directory's events")
        for node in self.storage_nodes:
            listen("storage_nodes", node.host, node.control_port, f"storage node {node.name}")
            listen(
                "storage_nodes", node.host, node.data_port, f"the data of storage node {node.name}"
            )
        frontends = self.frontends
        for host in self.hosts:
            step = self.port_step(host)
            if host in frontends.hosts:
                listen("frontends", host, frontends.http_port + step, "the frontend's HTTP")
                listen("frontends", host, frontends.grpc_port + step, "the frontend's gRPC")
            listen("frontends", host, frontends.metrics_port + step, "the metrics page")
        for worker in self.workers:
            listen("pools", worker.host, worker.grpc_port, f"worker {worker.model}")
        return found


def is_loopback(address: str) -> bool:
    """True if only this machine can reach the address, which has no port."""
    return address == "localhost" or (address.startswith("127.") and address.count(".") == 3)


def is_ip(address: str) -> bool:
    """True for an IPv4 address, False for a DNS name."""
    parts = address.split(".")
    return len(parts) == 4 and all(part in OCTETS for part in parts)
