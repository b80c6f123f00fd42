"""What a deployment consists of, as its cluster file says.

    name, hosts                what it is called, and the machines with their addresses
    etcd, directories          who elects the directory that serves, and where directories run
    storage_nodes              DRAM and SSD of hosts
    frontends                  where clients call
    pools, defaults            workers that are alike, and parameters of all pools
    conductor, slo             how requests are routed and judged
    keys, trusted_data_network who may speak to whom, and where KV moves unencrypted

A `Deployment` is checked: a file with mistakes does not become one, but `ClusterFileInvalid`, which
names all of them at once, each with its line, its path and a remedy.

Not here: reading the file (cluster_file.py), what one host runs (host_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OCTETS = frozenset(map(str, range(256)))  # as they are written in an address
HOST_PORT_STEP = 10  # between the ports of hosts of one address
NODE_PORT = 7010  # of the first storage node on a host: control; data is the next one


class ClusterFileInvalid(Exception):
    """`problems`: every mistake, each with its line and a remedy."""

    def __init__(self, path: str, problems: tuple[str, ...]) -> None:
        lines = "\n".join(f"  - {line}" for line in problems)
        super().__init__(f"{path} has {len(problems)} mistake(s):\n{lines}")
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, or what is told apart as one."""

    name: str
    address: str  # where other hosts reach it
    listen: str  # on which of its own addresses its ports are opened
    identity: str = ""  # tells it from others that share a kernel; "": the machine's own
    state_dir: str = ""  # relative to the folder of the cluster file
    rack: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)  # of all its processes


@dataclass(frozen=True, slots=True)
class EtcdCluster:
    """Members on `hosts`, which `mooncake serve` starts, or `endpoints` that somebody else runs."""

    hosts: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()  # HOST:PORT
    client_port: int = 2379
    peer_port: int = 2380


@dataclass(frozen=True, slots=True)
class Directories:
    hosts: tuple[str, ...]
    port: int = 7001
    events_port: int = 7002
    ttl_s: int = 3  # a leader that dies is replaced after so long


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A storage node."""

    name: str
    host: str
    dram_bytes: int
    ssd_bytes: int
    ssd_path: str  # relative to the host's state_dir
    segment_path: str  # file of its memory; "": one of the launcher's in /dev/shm
    control_port: int
    data_port: int


@dataclass(frozen=True, slots=True)
class Frontends:
    hosts: tuple[str, ...]
    address: str = "127.0.0.1"  # where clients call; 0.0.0.0: on every address of the host
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    metrics_address: str = "127.0.0.1"  # of every host's metrics page


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker of a pool on a host of the file."""

    model: str  # POOL_HOST_NUMBER
    host: str
    grpc_port: int
    store_node: str
    parameters: Mapping[str, str] = field(default_factory=dict)  # its own, above those of its pool


@dataclass(frozen=True, slots=True)
class Elastic:
    """How many hosts that are not in the file may serve a pool, each with a storage node."""

    least: int
    most: int
    dram_bytes: int = 1 << 30  # of that node


@dataclass(frozen=True, slots=True)
class PoolSpec:
    name: str
    role: str  # prefill | decode
    grpc_port: int  # of its first worker on a host; the next ones follow
    parameters: Mapping[str, str]  # of config.pbtxt, with those of `defaults`
    workers: tuple[WorkerSpec, ...]
    elastic: Elastic | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """A whole cluster file, checked."""

    name: str
    path: str  # of the file, as it was named
    hosts: Mapping[str, Host]
    etcd: EtcdCluster | None
    directories: Directories
    storage_nodes: tuple[NodeSpec, ...]
    frontends: Frontends
    pools: tuple[PoolSpec, ...]
    conductor: Mapping[str, str]  # parameters of the model `conductor`
    checkpoint: str  # of all workers and tokenizers
    keys_folder: str = ""  # relative to the folder of the file; "": there are no keys
    is_insecure: bool = False
    trusted_data_network: tuple[str, ...] | None = None  # None: every interface is

    @property
    def folder(self) -> str:
        """Of the cluster file, as it was named; relative paths in it start there."""
        return self.path.rpartition("/")[0] or ("/" if self.path.startswith("/") else ".")

    @property
    def file_name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def elastic_pools(self) -> list[PoolSpec]:
        """Those whose workers may also be hosts that are not in the file."""
        return [pool for pool in self.pools if pool.elastic is not None]

    @property
    def workers(self) -> list[WorkerSpec]:
        return [worker for pool in self.pools for worker in pool.workers]

    def pool_of(self, worker: WorkerSpec) -> PoolSpec:
        return next(pool for pool in self.pools if worker in pool.workers)

    def nodes_of(self, host: str) -> list[NodeSpec]:
        return [node for node in self.storage_nodes if node.host == host]

    def port_step(self, host: str) -> int:
        """What is added to the ports of frontends and metrics pages: hosts of one address are on
        one machine."""
        address = self.hosts[host].address
        there = [name for name, each in self.hosts.items() if each.address == address]
        return HOST_PORT_STEP * there.index(host)

    def etcd_endpoints(self) -> list[str]:
        """HOST:PORT of each member that answers clients; [] without etcd."""
        if self.etcd is None:
            return []
        own = [f"{self.hosts[name].address}:{self.etcd.client_port}" for name in self.etcd.hosts]
        return [*own, *self.etcd.endpoints]

    def ports(self) -> dict[tuple[str, int], list[tuple[str, str]]]:
        """(address, port) -> (section of the file, what listens there) of each listener.

        Hosts may share an address.
        """
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
    """Can only this machine reach it?"""
    return address == "localhost" or (address.startswith("127.") and address.count(".") == 3)


def is_ip(address: str) -> bool:
    """A number, and not a DNS name."""
    parts = address.split(".")
    return len(parts) == 4 and all(part in OCTETS for part in parts)
