"""The parts of a deployment, as its cluster file defines them.

    name, hosts                name of the deployment; its machines with their addresses
    etcd, directories          the leader election; the service that records where each KV block is
    storage_nodes              processes that hold KV blocks in DRAM and on SSD
    frontends                  Tritons that clients call
    pools, defaults            groups of equal workers; parameters of all pools
    conductor, slo             parameters of routing and admission; latency targets
    keys                       keys of the hosts
    trusted_data_network       network interfaces on which KV moves unencrypted

`cluster_file.load` returns only a valid `Deployment`. For a file with mistakes it raises
`ClusterFileInvalid`, which lists all mistakes, each with its line, path and remedy.

Not here: the processes of one host (host_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OCTETS = frozenset(map(str, range(256)))
HOST_PORT_STEP = 10  # added to the frontend ports of each further host with the same address
NODE_PORT = 7010  # default control port of a host's first storage node; its data port is 7011


class ClusterFileInvalid(Exception):
    """`problems`: every mistake with its line or key, and a remedy."""

    def __init__(self, path: str, problems: tuple[str, ...]) -> None:
        lines = "\n".join(f"  - {line}" for line in problems)
        super().__init__(f"{path} has {len(problems)} mistake(s):\n{lines}")
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, or a share of one, that runs one `mooncake serve`."""

    name: str
    address: str  # IPv4 address or DNS name that other hosts use
    listen: str  # local IPv4 address that its processes bind
    identity: str = ""  # distinguishes hosts with one kernel; "": the kernel's own identity
    state_dir: str = ""  # relative paths start at the folder of the cluster file
    rack: str = ""  # nodes with the same label have a short network path; "": no label
    environment: Mapping[str, str] = field(default_factory=dict)  # set in all of its processes


@dataclass(frozen=True, slots=True)
class EtcdCluster:
    """Either hosts on which `mooncake serve` starts etcd members, or a running etcd's endpoints."""

    hosts: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()  # HOST:PORT
    client_port: int = 2379
    peer_port: int = 2380


@dataclass(frozen=True, slots=True)
class Directories:
    hosts: tuple[str, ...]
    port: int = 7001
    events_port: int = 7002
    ttl_s: int = 3  # leader's lease in etcd in seconds, after which a dead leader is replaced


@dataclass(frozen=True, slots=True)
class NodeSpec:
    name: str
    host: str
    dram_bytes: int
    ssd_bytes: int = 0  # 0: no SSD tier
    ssd_path: str = ""  # relative paths start at the host's state_dir
    segment_path: str = ""  # file of the node's KV memory; "": a file of the launcher in /dev/shm
    control_port: int = NODE_PORT
    data_port: int = NODE_PORT + 1


@dataclass(frozen=True, slots=True)
class Frontends:
    hosts: tuple[str, ...]
    address: str = "127.0.0.1"  # local address for clients; 0.0.0.0: all addresses of the host
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    metrics_address: str = "127.0.0.1"  # local address of the metrics page, on every host


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker of a pool on a host of the file."""

    model: str  # name of the worker and of its Triton model: POOL_HOST_NUMBER
    host: str
    grpc_port: int
    store_node: str  # storage node on the same host, to which the worker writes KV
    parameters: Mapping[str, str] = field(default_factory=dict)  # override the pool's parameters


@dataclass(frozen=True, slots=True)
class Elastic:
    """Elastic hosts of a pool, which the file does not list. Each has one worker and one node."""

    least: int  # least number of elastic hosts; 0 <= least <= most
    most: int
    dram_bytes: int = 1 << 30  # DRAM of the storage node of an elastic host


@dataclass(frozen=True, slots=True)
class PoolSpec:
    name: str
    role: str  # prefill | decode
    grpc_port: int  # port of the first worker on a host; further workers use the following ports
    parameters: Mapping[str, str]  # parameters of config.pbtxt, including those of `defaults`
    workers: tuple[WorkerSpec, ...]
    elastic: Elastic | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """A valid cluster file."""

    name: str
    path: str  # path of the cluster file, as the operator named it
    hosts: Mapping[str, Host]
    etcd: EtcdCluster | None
    directories: Directories
    storage_nodes: tuple[NodeSpec, ...]
    frontends: Frontends
    pools: tuple[PoolSpec, ...]
    conductor: Mapping[str, str]  # parameters of the model `conductor`
    checkpoint: str  # path of the checkpoint of all workers and tokenizers, or "demo"
    keys_folder: str = ""  # relative paths start at the file's folder; "": there are no keys
    is_insecure: bool = False  # True if the operator accepts connections without keys
    # Network interfaces on which KV moves unencrypted. None for all (possible only without keys).
    trusted_data_network: tuple[str, ...] | None = None

    @property
    def folder(self) -> str:
        """The folder of the cluster file, at which relative paths in the file start."""
        return self.path.rpartition("/")[0] or ("/" if self.path.startswith("/") else ".")

    @property
    def file_name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def elastic_pools(self) -> list[PoolSpec]:
        return [pool for pool in self.pools if pool.elastic is not None]

    @property
    def workers(self) -> list[WorkerSpec]:
        return [worker for pool in self.pools for worker in pool.workers]

    def nodes_of(self, host: str) -> list[NodeSpec]:
        return [node for node in self.storage_nodes if node.host == host]

    def port_step(self, host: str) -> int:
        """The offset of the host's frontend and metrics ports. Hosts with equal addresses run on
        one machine, so they need different ports."""
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
        """(address, port) -> the listeners there, each as (section of the file, name)."""
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
    """True for `localhost` and 127.0.0.0/8. `address` has no port."""
    return address == "localhost" or (address.startswith("127.") and address.count(".") == 3)


def is_ip(address: str) -> bool:
    """True for an IPv4 address, False for a DNS name."""
    parts = address.split(".")
    return len(parts) == 4 and all(part in OCTETS for part in parts)
